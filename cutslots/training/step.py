"""A training step: forward and backward pass, clipping, Adam. On one CUDA device it is replayed as a CUDA graph.

Small networks make a GPU wait for Python, which launches a thousand kernels a step. A CUDA graph launches them at once.
What changes from step to step is in tensors: the images, the step and the learning rates. Random numbers follow from
the seed set before each step, as without a graph.

A graph holds one computation. The loss says when its own changes (`Loss.phase`): then the step is captured again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from typing import Any

import torch
from lightning_fabric import Fabric
from torch import Tensor

from cutslots.training.config import RunConfig
from cutslots.training.losses import Loss
from cutslots.training.schedules import learning_rate
from cutslots.training.teacher import split_labels

Paused = Callable[[], AbstractContextManager[None]]
NUM_WARMUP_STEPS = 3  # before a capture: compilation, cuDNN's benchmarks and Adam's moments allocate memory


class TrainStep:
    """Updates the model. Returns the loss to log and the norm of the gradient, on the device."""

    captures = False  # a CUDA graph

    def __init__(self, config: RunConfig, fabric: Fabric, model: Any, optimizer: Any, loss: Loss) -> None:
        self.config, self.fabric, self.model, self.optimizer, self.loss = config, fabric, model, optimizer, loss
        for group in optimizer.param_groups:  # also of a state that a run with or without graphs has saved
            group["lr"], group["capturable"] = self._lr(), self.captures

    def _lr(self) -> Tensor | float:
        return torch.zeros((), device=self.fabric.device) if self.captures else 0.0

    def __call__(self, image: Tensor, step: int) -> tuple[Tensor, Tensor]:
        self.set_learning_rates(step)
        outputs = self.update(image, self.loss, step)
        self.optimizer.zero_grad()
        return outputs

    def set_learning_rates(self, step: int) -> None:
        lr = learning_rate(self.config, step)
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(lr * group["lr_scale"])
            else:
                group["lr"] = lr * group["lr_scale"]

    def update(self, image: Tensor, loss: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        image, *labels = (image,) if self.config.teacher is None else split_labels(image)
        value, logged = loss(self.model(image), image, *arguments, *labels)
        self.fabric.backward(value)
        max_norm = self.config.grad_clip or math.inf
        norm = self.fabric.clip_gradients(self.model, self.optimizer, max_norm=max_norm, error_if_nonfinite=False)
        self.optimizer.step()
        return logged.detach(), logged.detach() if norm is None else norm.detach()


class GraphStep(TrainStep):
    """The same, replayed as a CUDA graph after a few steps. `paused` keeps other threads off the device in a block."""

    captures = True

    def __init__(self, *args: Any, paused: Paused) -> None:
        super().__init__(*args)
        self.paused = paused
        self.stream = torch.cuda.Stream(self.fabric.device)
        self.step = torch.zeros((), dtype=torch.int64, device=self.fabric.device)
        self.image: Tensor | None = None
        self.phase: Hashable = None
        self.graph: torch.cuda.CUDAGraph | None = None
        self.warm_steps, self.failed = 0, False
        self.outputs: tuple[Tensor, Tensor] | None = None

    def __call__(self, image: Tensor, step: int) -> tuple[Tensor, Tensor]:
        self.set_learning_rates(step)
        phase = self.loss.phase(step)
        if phase != self.phase or self.image is None or image.shape != self.image.shape:
            self._begin(image, phase)
        assert self.image is not None
        self.image.copy_(image)
        self.step.fill_(step)
        if self.warm_steps == NUM_WARMUP_STEPS and self.graph is None and not self.failed:
            self._try_capture()
        if self.graph is None:
            self.warm_steps = min(self.warm_steps + 1, NUM_WARMUP_STEPS)
            return self._run_in_stream()
        assert self.outputs is not None
        self.graph.replay()
        return self.outputs[0].clone(), self.outputs[1].clone()  # the next step overwrites them

    def _begin(self, image: Tensor, phase: Hashable) -> None:
        """Forget the graph of another phase. Its memory is free before the next one is captured."""
        self.graph, self.outputs, self.warm_steps, self.phase = None, None, 0, phase
        self.image = torch.empty_like(image)

    def _run(self) -> tuple[Tensor, Tensor]:
        assert self.image is not None
        return self.update(self.image, self.loss.in_phase, self.step, self.phase)

    def _run_in_stream(self) -> tuple[Tensor, Tensor]:
        """Run in the stream of the capture, as a capture requires."""
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            self.optimizer.zero_grad()
            outputs = self._run()
        torch.cuda.current_stream().wait_stream(self.stream)
        return outputs

    def _try_capture(self) -> None:
        """Capture the step. What synchronises with the device cannot be captured: then the run goes on without."""
        try:
            self._capture()
        except RuntimeError as error:
            self.graph, self.outputs, self.failed = None, None, True
            print(f"training without CUDA graphs: {str(error).partition(chr(10))[0]}")

    def _capture(self) -> None:
        self.optimizer.zero_grad()  # so that the graph writes gradients instead of adding to them
        graph = torch.cuda.CUDAGraph()
        with self.paused(), torch.cuda.graph(graph, stream=self.stream):
            self.outputs = self._run()
        self.graph = graph


def make_step(config: RunConfig, fabric: Fabric, model: Any, optimizer: Any, loss: Loss, paused: Paused) -> TrainStep:
    """Return the step for this device. Says why if a CUDA device or the user asks for CUDA graphs and has none."""
    parts = (config, fabric, model, optimizer, loss)
    if config.cuda_graphs == "off" or (config.cuda_graphs == "auto" and fabric.device.type != "cuda"):
        return TrainStep(*parts)
    reason = no_graph_reason(fabric, loss)
    if reason is None and config.cuda_graphs == "auto" and config.plugins:
        # A graph repeats what it has captured: Python code of others may have to run at every step.
        reason = "plugins are loaded; --cuda-graphs on captures their code too"
    if reason is None:
        return GraphStep(*parts, paused=paused)
    if fabric.global_rank == 0:
        print(f"training without CUDA graphs: {reason}")
    return TrainStep(*parts)


def no_graph_reason(fabric: Fabric, loss: Loss) -> str | None:
    """Return why a step cannot be captured, or None."""
    if fabric.device.type != "cuda":
        return f"the device is {fabric.device.type}"
    if fabric.world_size > 1:
        return f"{fabric.world_size} processes share the gradients"
    if loss.phase(0) is None or _overrides_call_alone(type(loss)):
        return f"{type(loss).__name__} does not implement Loss.phase"
    return None


def _overrides_call_alone(kind: type[Loss]) -> bool:
    """Return whether a subclass has changed the loss of a step and inherits that of a phase."""
    line = kind.__mro__
    call, phase = (next(i for i, each in enumerate(line) if name in vars(each)) for name in ("__call__", "in_phase"))
    return call < phase and line[phase] is not Loss
