"""`TrainConfig`: a training run, from its parts to its run folder."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from cutslots.data.registry import DATASETS, DatasetConfig
from cutslots.models.discovery import MODELS, ModelConfig
from cutslots.registry import Range, Steps, check_option, options, plugins_of, validate_nested
from cutslots.training.losses import LOSSES, LossConfig

Positive = Range(1e-12, 65_536)
Minutes = Range(0, 10**6)
Count = Annotated[int, Range(1, 10**9)]


@dataclass(frozen=True)
class TrainConfig:
    """A training run: the model, the data and the loss, the schedule, and where it runs."""

    model: Annotated[ModelConfig, tyro.conf.arg(name="")]
    data: DatasetConfig
    loss: LossConfig
    preset: Annotated[str, tyro.conf.Suppress]

    batch_size: Annotated[int, Range(1, 65_536)]
    """Images of a step, or clips for a model that takes them, over all processes."""
    max_steps: Count
    """Steps in total."""
    lr: Annotated[float, Positive]
    """Learning rate of Adam."""
    warmup_steps: Steps
    """Steps over which the learning rate rises linearly from zero."""
    lr_decay: Annotated[float, Positive]
    """Factor by which the learning rate decays every `lr_decay_steps` steps, exponentially."""
    lr_decay_steps: Count
    """Steps over which the learning rate is multiplied by `lr_decay`."""
    grad_clip: Annotated[float, Range(0, 1e12)]
    """Largest norm of the gradient; 0 for no clipping."""
    eval_every: Count
    """Steps between evaluations."""
    num_eval_images: Count
    """Validation images, or frames of videos, of an evaluation."""

    num_images: Count | Literal["endless"] | None = None
    """Train on the first images or frames only; on all by default. With endless, built-in scenes never repeat."""
    max_frame_gap: Annotated[int, Range(1, 10_000)] = 1
    """Largest distance between successive frames of a clip, for models of clips; 1 for consecutive frames."""
    horizontal_flips: bool = False
    """Augmentation: flip images at random, left to right."""
    init_from: str | None = None
    """Initialise from a checkpoint of the same model, to fine-tune it: a run folder, a .safetensors file or a name."""
    seed: Annotated[int, Range(0, 2**32 - 1)] = 0
    """Seed of the initial weights, the order of images and all random numbers."""
    max_minutes: Annotated[float, Minutes] | None = None
    """Stop after this time, saving everything; the time of resumed runs adds up."""

    out: Path | None = None
    """Run folder; runs/PRESET-DATA-SEED by default. Run the same command again to resume."""
    overwrite: bool = False
    """Replace another run in the run folder."""
    checkpoint_minutes: Annotated[float, Minutes] = 1.0
    """Minutes between checkpoints."""
    cache_dir: Path | None = None
    """Keep rendered scenes, and features of a frozen encoder, in this folder for other runs; none by default."""
    plugins: Annotated[tuple[str, ...], tyro.conf.Suppress] = field(default=())

    accelerator: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """Device type."""
    devices: Annotated[int, Range(1, 65_536)] = 1
    """Processes on this node, one for each device."""
    num_nodes: Annotated[int, Range(1, 65_536)] = 1
    """Nodes, which share a file system. Start the command on each, by torchrun, SLURM or Lightning's variables."""
    precision: Literal["auto", "32-true", "bf16-mixed"] = "auto"
    """bf16-mixed on CUDA, 32-true elsewhere. Cuts are always solved in float32."""
    compile: Literal["auto", "on", "off"] = "auto"
    """torch.compile; on for CUDA."""
    cuda_graphs: bool = False
    """Replay training steps as a CUDA graph, on one CUDA device. Experimental."""

    def validate(self) -> None:
        """Raise a ValueError that names the option if one has the wrong type or is out of range."""
        for name, hint in options(TrainConfig).items():
            if name not in (*PARTS, "out", "cache_dir", "plugins"):
                check_option(name, getattr(self, name), hint)
        for name in PARTS:
            validate_nested(getattr(self, name), "" if name == "model" else f"{name}.")

    def to_dict(self) -> dict[str, Any]:
        """Return the config as JSON types, parts nested: the content of run.json."""
        values = {name: getattr(self, name) for name in options(TrainConfig)}
        parts = {name: value.registry.to_dict(value) for name, value in values.items() if name in PARTS}
        paths = {name: None if values[name] is None else str(values[name]) for name in ("out", "cache_dir")}
        needed = dict.fromkeys(name for part in PARTS for name in plugins_of(values[part]))
        return values | parts | paths | {"plugins": list(needed)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TrainConfig:
        """Return the config that `to_dict` was called on."""
        known = {field.name for field in dataclasses.fields(cls)}
        given = {name: value for name, value in values.items() if name in known}
        parts = {name: registry.from_dict(given[name]) for name, registry in PARTS.items()}
        paths = {name: Path(given[name]) for name in ("out", "cache_dir") if given.get(name) is not None}
        return cls(**given | parts | paths | {"plugins": ()})  # whose parts are registered by now


PARTS = {"model": MODELS, "data": DATASETS, "loss": LOSSES}
