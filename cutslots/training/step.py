"""A training step: forward pass, loss, backward pass, clipping, Adam. On one GPU it is replayed as a CUDA graph.

Small networks make a GPU wait for Python, which launches a thousand kernels a step. A CUDA graph launches them at once.
What changes from step to step is in tensors: the images, the step and the learning rates. Random numbers follow from
the seed set before each step, as without a graph.

A graph holds one computation. The loss says when its own changes (`Loss.phase`): then the step is captured again.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Hashable
from typing import Any

import torch
from lightning_fabric import Fabric
from torch import Tensor

from cutslots.training.config import TrainConfig
from cutslots.training.losses import Loss
from cutslots.training.schedules import learning_rate

NUM_WARMUP_STEPS = 3  # before a capture: compilation, cuDNN's benchmarks and Adam's moments allocate memory


class TrainStep:
    """Updates the model. Returns the loss to log and the norm of the gradient, on the device."""

    def __init__(self, config: TrainConfig, fabric: Fabric, model: Any, optimizer: Any, loss: Loss) -> None:
        self.config, self.fabric, self.model, self.optimizer, self.loss = config, fabric, model, optimizer, loss
        for group in optimizer.param_groups:  # also of a state that another device has saved
            group["lr"], group["capturable"] = self._lr(0.0), fabric.device.type == "cuda"

    def _lr(self, lr: float) -> Tensor | float:
        return torch.tensor(lr, device=self.fabric.device) if self.fabric.device.type == "cuda" else lr

    def __call__(self, image: Tensor, step: int) -> tuple[Tensor, Tensor]:
        self.set_learning_rates(step)
        return self.update(image, self.loss, step)

    def set_learning_rates(self, step: int) -> None:
        lr = learning_rate(self.config, step)
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(lr * group["lr_scale"])
            else:
                group["lr"] = lr * group["lr_scale"]

    def update(self, image: Tensor, loss: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        self.optimizer.zero_grad()
        value, logged = loss(self.model(image), image, *arguments)
        self.fabric.backward(value)
        max_norm = self.config.grad_clip or math.inf
        norm = self.fabric.clip_gradients(self.model, self.optimizer, max_norm=max_norm, error_if_nonfinite=False)
        self.optimizer.step()
        return logged.detach(), logged.detach() if norm is None else norm.detach()


class GraphStep(TrainStep):
    """The same, replayed as a CUDA graph after a few steps."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.stream = torch.cuda.Stream(self.fabric.device)
        self.step = torch.zeros((), dtype=torch.int64, device=self.fabric.device)
        self.image: Tensor | None = None
        self.phase: Hashable = None
        self.graph: torch.cuda.CUDAGraph | None = None
        self.warm_steps = 0
        self.outputs: tuple[Tensor, Tensor] | None = None

    def __call__(self, image: Tensor, step: int) -> tuple[Tensor, Tensor]:
        self.set_learning_rates(step)
        phase = self.loss.phase(step)
        if phase != self.phase or self.image is None or image.shape != self.image.shape:
            self._begin(image, phase)
        assert self.image is not None
        self.image.copy_(image)
        self.step.fill_(step)
        if self.warm_steps < NUM_WARMUP_STEPS:
            self.warm_steps += 1
            return self._warm_up()
        if self.graph is None:
            self._capture()
        assert self.graph is not None and self.outputs is not None
        self.graph.replay()
        return self.outputs[0].clone(), self.outputs[1].clone()  # the next step overwrites them

    def _begin(self, image: Tensor, phase: Hashable) -> None:
        """Forget the graph of another phase. Its memory is free before the next one is captured."""
        self.graph, self.outputs, self.warm_steps, self.phase = None, None, 0, phase
        self.image = torch.empty_like(image)

    def _run(self) -> tuple[Tensor, Tensor]:
        assert self.image is not None
        return self.update(self.image, self.loss.in_phase, self.step, self.phase)

    def _warm_up(self) -> tuple[Tensor, Tensor]:
        """Run in the stream of the capture, as a capture requires."""
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            outputs = self._run()
        torch.cuda.current_stream().wait_stream(self.stream)
        return outputs

    def _capture(self) -> None:
        self.optimizer.zero_grad()  # so that the graph writes gradients instead of adding to them
        gc.collect()
        graph = torch.cuda.CUDAGraph()
        # Meanwhile the thread of the loader prepares the next images, which is not part of the graph.
        with torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
            self.outputs = self._run()
        self.graph = graph


def make_step(config: TrainConfig, fabric: Fabric, model: Any, optimizer: Any, loss: Loss) -> TrainStep:
    """Return the step for this device. Says why if CUDA graphs are asked for and not possible."""
    parts = (config, fabric, model, optimizer, loss)
    if not config.cuda_graphs:
        return TrainStep(*parts)
    reason = no_graph_reason(config, fabric, loss)
    if reason is None:
        return GraphStep(*parts)
    if fabric.global_rank == 0:
        print(f"training without CUDA graphs: {reason}")
    return TrainStep(*parts)


def no_graph_reason(config: TrainConfig, fabric: Fabric, loss: Loss) -> str | None:
    """Return why a step cannot be captured, or None."""
    if fabric.device.type != "cuda":
        return f"the device is {fabric.device.type}"
    if fabric.world_size > 1:
        return f"{fabric.world_size} processes share the gradients"
    if loss.phase(0) is None:
        return f"{type(loss).__name__} does not implement Loss.phase"
    return None
