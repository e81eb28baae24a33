"""The training loop. Devices, precision and processes are Lightning Fabric's.

The images, the learning rate and the random numbers of a step follow from (seed, step) alone; state.pt holds the
weights and Adam's moments after some step. So a run that was killed resumes from its newest state and ends with the
weights of an uninterrupted run. run_folder.py lists what a run writes.

`run` trains whatever a `Task` says: `train` models that discover objects, `pretrain` (pretrain.py) encoders.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from lightning_fabric import Fabric
from lightning_fabric.utilities.rank_zero import rank_zero_only
from torch import nn

import cutslots
from cutslots.data.text import data_text
from cutslots.data.video import Clips
from cutslots.dataset import Dataset
from cutslots.devices import make_fabric, resolve_accelerator
from cutslots.files import differences
from cutslots.models.checkpoints import checkpoint_file, load
from cutslots.models.discovery import MODELS, Discovery, ModelConfig, build, channels_last
from cutslots.modules.base import PartModule
from cutslots.registry import load_plugins
from cutslots.training.config import PretrainConfig, RunConfig, TrainConfig
from cutslots.training.data import (
    curriculum,
    mixed_data,
    open_mixed_data,
    open_split,
    training_data,
    validation_data,
)
from cutslots.training.endless import EndlessLoader, endless_scenes
from cutslots.training.feature_cache import FromFeatures, cached_features
from cutslots.training.loader import TrainLoader
from cutslots.training.logger import LOG_EVERY, RunLogger
from cutslots.training.losses import LOSSES, Loss
from cutslots.training.run_folder import load_state, open_run
from cutslots.training.schedules import learning_rate
from cutslots.training.step import make_step
from cutslots.training.teacher import check_teacher, label_request

Config = TypeVar("Config", bound=RunConfig)
Model = TypeVar("Model", bound=nn.Module)

PARTS = ("encoder", "slots", "decoder")  # of every model


class Interrupted(Exception):
    """Training was interrupted, and its state is saved. One process of several reports it."""

    def __init__(self, message: str, report: bool) -> None:
        super().__init__(message)
        self.report = report


class Task:
    """What a run trains. Subclasses say what differs between runs; the loop is the same for all.

    `config` has "auto" replaced once the run begins.
    """

    command: str | None = None  # in run.json, to tell the runs of commands apart; None for `cutslots train`

    def __init__(self, config: Any) -> None:
        self.config = config

    def validate(self) -> None:
        """Raise a ValueError for whatever is wrong, before anything is written."""
        raise NotImplementedError

    def check_start(self, folder: Path) -> None:
        """Raise a ValueError if a run cannot start in this folder, whose default is known by then."""

    def prepare_model(self, folder: Path, fabric: Fabric) -> nn.Module:
        """Return the model on the device, with the weights that a run in this folder starts from."""
        raise NotImplementedError

    def cached_features(self, fabric: Fabric, model: nn.Module) -> Dataset | None:
        """Return features to train on in the place of images, if the model takes them."""
        return None

    def make_loss(self) -> Loss:
        raise NotImplementedError

    def make_logger(self, folder: Path, fabric: Fabric, state: dict[str, Any]) -> RunLogger:
        raise NotImplementedError


class Discover(Task):
    """Training of a model that discovers objects."""

    config: TrainConfig

    def validate(self) -> None:
        validate(self.config)

    def check_start(self, folder: Path) -> None:
        config = self.config
        if config.teacher is not None and checkpoint_file(config.teacher).parent.resolve() == folder.resolve():
            raise ValueError(f"teacher is {config.teacher}, the run folder itself; expected another checkpoint")
        if config.init_from is not None and not _has_state(folder, config):
            _initialized(config)  # reports a checkpoint that does not fit before anything is written
            if checkpoint_file(config.init_from).parent.resolve() == folder.resolve():
                raise ValueError(f"init_from is {config.init_from}, the run folder itself; expected another checkpoint")

    def prepare_model(self, folder: Path, fabric: Fabric) -> Discovery:
        return _prepare_model(self.config, folder, fabric)

    def cached_features(self, fabric: Fabric, model: nn.Module) -> Dataset | None:
        return cached_features(self.config, fabric, cast(Discovery, model))

    def make_loss(self) -> Loss:
        loss: Loss = LOSSES.build(self.config.loss)
        return loss

    def make_logger(self, folder: Path, fabric: Fabric, state: dict[str, Any]) -> RunLogger:
        return RunLogger(folder, self.config, fabric, state)


def train(config: TrainConfig) -> Path:
    """Start or resume a training run; return its folder. Validates everything before starting processes."""
    return run(Discover(config))


def run(task: Task) -> Path:
    """Start or resume the run of a task; return its folder. Validates everything before starting processes."""
    load_plugins(task.config.plugins)
    task.validate()
    task.config = config = resolve(task.config)
    folder = cast(Path, config.out)
    task.check_start(folder)
    rank: int = rank_zero_only.rank  # type: ignore[attr-defined]
    is_other = rank > 0 or int(os.environ.get("NODE_RANK", 0)) > 0
    values = config.to_dict() | {"version": cutslots.__version__}
    values |= {} if task.command is None else {"command": task.command}
    values |= {} if config.teacher is None else {"labels": label_request(config)}  # a resumed run has the same
    is_finished = functools.partial(_is_finished, config)
    opened = contextlib.nullcontext(False) if is_other else open_run(folder, values, config.overwrite, is_finished)
    with opened as complete:
        fabric = make_fabric(config.accelerator, config.devices, config.num_nodes, config.precision)
        if is_other and fabric.global_rank == 0:
            given = f"devices is {config.devices} and num_nodes {config.num_nodes}"
            raise ValueError(f"{given}; expected as many processes as were started")
        if config.batch_size % fabric.world_size:
            raise ValueError(
                f"batch_size is {config.batch_size}; expected a multiple of the {fabric.world_size} processes"
            )
        with _lost_processes(folder, fabric):
            if not fabric.broadcast(complete):
                return _train(task, folder, fabric)
        if fabric.global_rank == 0:
            print(f"{folder} is complete; nothing is left to do")
        return folder


@contextlib.contextmanager
def _lost_processes(folder: Path, fabric: Fabric) -> Iterator[None]:
    """Re-raise the error of a process that waits for another one, which was killed, as a sentence."""
    try:
        yield
    except RuntimeError as error:
        is_lost = isinstance(error, torch.distributed.DistError) or "gloo" in str(error)  # gloo's have no type
        if fabric.world_size == 1 or not is_lost:
            raise
        raise ConnectionError(
            f"process {fabric.global_rank} of {fabric.world_size} lost the others, which ended or cannot be reached; "
            f"run the same command again, on every node, to resume from {folder}"
        ) from None


def _is_finished(config: RunConfig, step: int, seconds: float) -> bool:
    """Return whether a run has done all its steps or used all its time."""
    return step >= config.max_steps or (config.max_minutes is not None and seconds > 60 * config.max_minutes)


def _train(task: Task, folder: Path, fabric: Fabric) -> Path:
    config: RunConfig = task.config
    torch.manual_seed(config.seed)
    raw = task.prepare_model(folder, fabric)
    optimizer = torch.optim.Adam(parameter_groups(raw), config.lr, fused=True)
    state = load_state(folder / "state.pt", raw, optimizer)
    _check_same_state(state, folder, fabric)
    validation, log = validation_data(config, fabric), task.make_logger(folder, fabric, state)
    if _is_finished(config, **state):  # but was killed before it wrote its report
        return log.finish(raw, validation)
    features = task.cached_features(fabric, raw)
    loader = open_loader(config, fabric, state["step"], features)
    trained = raw if features is None else FromFeatures(cast(Discovery, raw))
    compiled = cast(nn.Module, torch.compile(trained)) if config.compile == "on" else trained
    model, optimizer = fabric.setup(compiled, optimizer)
    train_step = make_step(config, fabric, model, optimizer, task.make_loss(), loader.paused)

    stop = Stop(config, fabric)
    started = time.monotonic() - state["seconds"]
    with log, stop, loader:
        for step in range(state["step"], config.max_steps):
            torch.manual_seed((config.seed << 32) + step * fabric.world_size + fabric.global_rank)
            log.record(*train_step(next(loader), step))
            state |= {"step": step + 1, "seconds": time.monotonic() - started}
            finished, interrupted = stop.finished(**state), stop.interrupted(**state)
            if finished or state["step"] % LOG_EVERY == 0:
                log.losses(**state, lr=learning_rate(config, step))
            if finished or state["step"] % config.eval_every == 0:
                log.evaluate(state["step"], raw, validation)
            if finished or interrupted or log.checkpoint_due(state["step"]):
                log.save(raw, optimizer, state)
            if finished or interrupted:
                break
    fabric.barrier()  # until process 0 has saved
    if interrupted and not finished:
        raise Interrupted(
            f"stopped after step {state['step']}; the state is saved in {folder}", fabric.global_rank == 0
        )
    return log.finish(raw, validation)


def open_loader(config: RunConfig, fabric: Fabric, step: int, features: Dataset | None = None) -> TrainLoader:
    """Return the loader of the images of steps, or of their cached features, from `step` on."""
    if features is not None:
        return TrainLoader(features, config, fabric, step)
    if config.num_images == "endless":
        return EndlessLoader(config, fabric, step, mixed_data(config, fabric))
    data = training_data(config, fabric)
    scenes = curriculum(config, fabric, len(data), step)
    return TrainLoader(data, config, fabric, step, scenes, mixed_data(config, fabric))


def _prepare_model(config: TrainConfig, folder: Path, fabric: Fabric) -> Discovery:
    """Build or initialise the model on the device, before the optimizer, whose state follows it."""
    if config.init_from is None or (folder / "state.pt").exists():
        return to_device(build(config.model), fabric)
    model, names = _initialized(config)
    if names and fabric.global_rank == 0:
        print(f"begins with {config.init_from}, which differs in {', '.join(names)} (--init-from)")
    return to_device(model, fabric)


def to_device(model: Model, fabric: Fabric) -> Model:
    """Return a model on the device, in the memory format of convolutions. Processes share batch statistics."""
    model = channels_last(model)
    has_batch_norm = any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())
    if has_batch_norm and fabric.world_size > 1:
        if fabric.device.type != "cuda":
            raise ValueError("batch normalisation needs one process or CUDA: other devices cannot share statistics")
        model = cast(Model, nn.SyncBatchNorm.convert_sync_batchnorm(model))
    return model.to(fabric.device)


def parameter_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Return the optimizer groups of the parts, and one for all other parameters."""
    groups: list[dict[str, Any]] = []
    for part in model.children():
        if isinstance(part, PartModule):
            groups += [{"lr_scale": 1.0} | group for group in part.parameter_groups()]
    known = {id(p) for group in groups for p in group["params"]}
    rest = [p for p in model.parameters() if p.requires_grad and id(p) not in known]
    return [group for group in [*groups, {"params": rest, "lr_scale": 1.0}] if group["params"]]


def _check_same_state(state: dict[str, Any], folder: Path, fabric: Fabric) -> None:
    if _any_process(fabric, state["step"] != fabric.broadcast(state["step"])):
        raise ValueError(f"processes found different states in {folder}; expected a file system that all nodes share")


def _any_process(fabric: Fabric, condition: bool) -> bool:
    """Return whether the condition holds in any process. All processes have to ask."""
    count = fabric.all_reduce(torch.tensor(float(condition), device=fabric.device), reduce_op="sum")
    return bool(torch.as_tensor(count) > 0)


def resolve(config: Config) -> Config:
    """Replace "auto" and the default run folder by what they mean here."""
    accelerator, precision = resolve_accelerator(config.accelerator, config.precision)
    compiled = {"auto": "on" if accelerator == "cuda" else "off"}.get(config.compile, config.compile)
    kind = "pretrain-" if isinstance(config, PretrainConfig) else ""
    name = f"{kind}{config.preset}-{Path(data_text(config.data)).name.replace(':', '-')}-{config.seed}"
    resolved: dict[str, Any] = {"accelerator": accelerator, "precision": precision, "compile": compiled}
    return dataclasses.replace(config, out=config.out or Path("runs") / name, **resolved)


def validate(config: TrainConfig) -> None:
    """Build the model and open the data once, so that whatever is wrong is reported before anything is written."""
    config.validate()
    frames = config.model.frames
    if frames == 1 and config.max_frame_gap > 1:
        raise ValueError(f"max_frame_gap is {config.max_frame_gap}; a model of images expects 1")
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        model = build(config.model).eval()
        loss: Loss = LOSSES.build(config.loss)
        loss.validate(model)
        check_teacher(config, model, loss)
        clip = torch.zeros(1, frames, 3, *config.model.image_size)
        model(clip if frames > 1 else clip[:, 0])
    if config.num_images == "endless":
        endless_scenes(config)
    for split in ("train", "val"):
        data = open_split(config, split, None)
        if frames > 1:
            Clips(data, frames, config.max_frame_gap)
    open_mixed_data(config)


def _has_state(folder: Path, config: TrainConfig) -> bool:
    return (folder / "state.pt").exists() and not config.overwrite


def _initialized(config: TrainConfig) -> tuple[Discovery, list[str]]:
    """Return the model with the weights of another checkpoint, and the options that differ.

    If the shapes of other weights differ, only those of the encoder, the slots and the decoder are taken.
    """
    try:
        other = load(cast(str, config.init_from)).train()
    except ValueError as error:
        raise ValueError(f"init_from: {str(error).removeprefix('checkpoint: ')}") from None
    if other.config is None or other.config == config.model:
        return other, []
    model, names = build(config.model), _differing_options(other.config, config.model)
    given = f"init_from is {config.init_from}, whose model differs from the run's in {', '.join(names)}"
    if other.image_size != model.image_size:
        raise ValueError(f"{given}; expected images of the same size")
    if _shapes(other) == _shapes(model):
        model.load_state_dict(other.state_dict())
    elif all(_shapes(getattr(other, part)) == _shapes(getattr(model, part)) for part in PARTS):
        for part in PARTS:
            getattr(model, part).load_state_dict(getattr(other, part).state_dict())
    else:
        raise ValueError(f"{given}; expected weights of the same shapes in encoder, slots and decoder")
    return model, names


def _shapes(module: nn.Module) -> dict[str, torch.Size]:
    return {name: value.shape for name, value in module.state_dict().items()}


def _differing_options(a: ModelConfig, b: ModelConfig) -> list[str]:
    """Return the options of the parts that differ; of the model itself if no part does."""
    return differences(_parts(a), _parts(b)) or differences(MODELS.to_dict(a), MODELS.to_dict(b))


def _parts(config: ModelConfig) -> dict[str, Any]:
    """Return what models of any kind share: the image size, the encoder, the slots and the decoder."""
    values = MODELS.to_dict(config)
    return {name: values[name] for name in ("image_size", *PARTS)}


class Stop:
    """When to stop: after the last step, when the time is up, or after the step at which Ctrl-C or SIGTERM came.

    A second Ctrl-C ends the run at once.
    """

    def __init__(self, config: RunConfig, fabric: Fabric) -> None:
        self.config, self.fabric, self.signalled = config, fabric, False

    def __enter__(self) -> None:
        self.handlers = {s: signal.signal(s, self._on_signal) for s in (signal.SIGINT, signal.SIGTERM)}

    def __exit__(self, *_: object) -> None:
        for number, handler in self.handlers.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, _: object) -> None:
        if self.signalled:
            raise KeyboardInterrupt
        self.signalled = True

    def finished(self, step: int, seconds: float) -> bool:
        return step == self.config.max_steps or self._any_process(step, _is_finished(self.config, step, seconds))

    def interrupted(self, step: int, seconds: float) -> bool:
        return self._any_process(step, self.signalled)

    def _any_process(self, step: int, condition: bool) -> bool:
        """Return whether the condition holds in any process. All must stop at the same step: they ask when they log."""
        if self.fabric.world_size == 1:
            return condition
        if step % LOG_EVERY:
            return False
        return _any_process(self.fabric, condition)
