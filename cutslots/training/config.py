"""The configs of training runs, from their parts to their run folders: `TrainConfig` and `PretrainConfig`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

import tyro

from cutslots.data.registry import DATASETS, DatasetConfig
from cutslots.models.discovery import MODELS, ModelConfig
from cutslots.models.refinement import BACKGROUND_THRESHOLD, MERGE_THRESHOLD, PIXEL_SIGMA
from cutslots.modules.encoders import ENCODERS, EncoderConfig
from cutslots.registry import Range, Registry, Steps, check_option, options, plugins_of, validate_nested
from cutslots.training.augment import BatchAugmentation
from cutslots.training.losses import LOSSES, LossConfig
from cutslots.training.objectives import OBJECTIVES, ObjectiveConfig

Positive = Range(1e-12, 65_536)
Minutes = Range(0, 10**6)
Count = Annotated[int, Range(1, 10**9)]
PATHS = ("out", "cache_dir")
MIX_FRACTION = 0.25  # unless it is given


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """What all training runs have in common: the data, the schedule, and where they run."""

    parts: ClassVar[dict[str, Registry]]  # the registries of the fields that are parts

    data: DatasetConfig
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
    """Keep rendered scenes, features of a frozen encoder and labels in this folder for other runs; none by default."""
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
    cuda_graphs: Literal["auto", "on", "off"] = "auto"
    """Replay training steps as a CUDA graph, on one CUDA device; auto: without plugins."""

    if TYPE_CHECKING:

        @property
        def image_size(self) -> tuple[int, int]:
            """Height and width of the images."""  # a field of PretrainConfig, whose default a property would become

    @property
    def frames(self) -> int:
        """Frames of a training sample: 1 for images."""
        return 1

    @property
    def max_frame_gap(self) -> int:
        """Largest distance between successive frames of a clip."""
        return 1

    @property
    def horizontal_flips(self) -> bool:
        """Whether the loader flips images at random, left to right."""
        return False

    @property
    def mix_data(self) -> str | None:
        """A second dataset. Some images of every batch come from it."""
        return None

    @property
    def mix_fraction(self) -> float:
        """Mean fraction of a batch that comes from the second dataset."""
        return MIX_FRACTION

    @property
    def augmentation(self) -> BatchAugmentation:
        """How strongly the loader changes images at random."""
        return BatchAugmentation()

    @property
    def teacher(self) -> str | None:
        """A checkpoint whose refined masks are labels to train on."""
        return None

    @property
    def label_refinement(self) -> dict[str, float]:
        """Arguments of `refine_masks` for these labels."""
        return {}

    @property
    def label_tracks(self) -> bool:
        """Whether labels of videos are tracks."""
        return False

    @property
    def label_dilation(self) -> int:
        """Pixels by which the objects of labels grow over the background."""
        return 0

    @property
    def validates_on_videos(self) -> bool:
        """Whether videos are validated on as videos. Otherwise their frames are images."""
        return False

    def validate(self) -> None:
        """Raise a ValueError that names the option if one has the wrong type or is out of range."""
        for name, hint in options(type(self)).items():
            if name not in (*self.parts, *PATHS, "plugins"):
                check_option(name, getattr(self, name), hint)
        for name in self.parts:
            validate_nested(getattr(self, name), "" if name == "model" else f"{name}.")

    def to_dict(self) -> dict[str, Any]:
        """Return the config as JSON types, parts nested: the content of run.json."""
        values = {name: getattr(self, name) for name in options(type(self))}
        parts = {name: value.registry.to_dict(value) for name, value in values.items() if name in self.parts}
        paths = {name: None if values[name] is None else str(values[name]) for name in PATHS}
        needed = dict.fromkeys(name for part in self.parts for name in plugins_of(values[part]))
        return values | parts | paths | {"plugins": list(needed)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Return the config that `to_dict` was called on."""
        known = {field.name for field in dataclasses.fields(cls)}
        given = {name: _without_lists(value) for name, value in values.items() if name in known}
        parts = {name: registry.from_dict(given[name]) for name, registry in cls.parts.items()}
        paths = {name: Path(given[name]) for name in PATHS if given.get(name) is not None}
        return cls(**given | parts | paths | {"plugins": ()})  # whose parts are registered by now


def _without_lists(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value  # JSON has no tuples


@dataclass(frozen=True, kw_only=True)
class TrainConfig(RunConfig):
    """A training run: the model, the data and the loss, the schedule, and where it runs."""

    parts = {"model": MODELS, "data": DATASETS, "loss": LOSSES}

    model: Annotated[ModelConfig, tyro.conf.arg(name="")]
    loss: LossConfig
    max_frame_gap: Annotated[int, Range(1, 10_000)] = 1
    """Largest distance between successive frames of a clip, for models of clips; 1 for consecutive frames."""
    mix_data: str | None = None
    """A second dataset, as for --data, for models of images. Some images of every batch are from its training split."""
    mix_fraction: Annotated[float, Range(0, 1)] = MIX_FRACTION
    """Mean fraction of a batch that comes from `mix_data`."""
    horizontal_flips: bool = False
    """Augmentation: flip images at random, left to right."""
    min_crop_area: Annotated[float, Range(0.01, 1)] = 1.0
    """Augmentation: smallest area of random crops, which are resized to the image. 1: no crops."""
    brightness_jitter: Annotated[float, Range(0, 1)] = 0.0
    """Augmentation: brightness is multiplied by 1 plus or minus up to this."""
    contrast_jitter: Annotated[float, Range(0, 1)] = 0.0
    """Augmentation: differences from the mean are multiplied by 1 plus or minus up to this."""
    saturation_jitter: Annotated[float, Range(0, 1)] = 0.0
    """Augmentation: differences from gray are multiplied by 1 plus or minus up to this."""
    hue_jitter: Annotated[float, Range(0, 0.5)] = 0.0
    """Augmentation: hues are rotated by up to this, in turns."""
    blur_probability: Annotated[float, Range(0, 1)] = 0.0
    """Augmentation: probability of a Gaussian blur of up to 1/112 of the smaller side."""
    noise_sigma: Annotated[float, Range(0, 1)] = 0.0
    """Augmentation: largest standard deviation of Gaussian noise, for values from 0 to 1."""
    teacher: str | None = None
    """Self-training: a checkpoint whose refined masks are labels of the training images. The loss needs a weight for
    them (--loss.label-weight)."""
    label_pixel_sigma: Annotated[float, Range(1e-3, 1e3)] = PIXEL_SIGMA
    """Refinement of labels: standard deviation of a pixel's channel around its slot reconstruction."""
    label_merge_threshold: Annotated[float, Range(-1, 1e3)] = MERGE_THRESHOLD
    """Refinement of labels: a smaller threshold merges fewer slots with similar reconstructions; -1 merges none."""
    label_background_threshold: Annotated[float, Range(0, 1e3)] = BACKGROUND_THRESHOLD
    """Refinement of labels: a larger threshold merges more slots into the background; 0 merges none."""
    label_dilation: Annotated[int, Range(0, 64)] = 0
    """Pixels by which the objects of labels grow over the background."""
    camouflage: Annotated[float, Range(0, 1)] = 0.0
    """Augmentation: probability that the objects of an image, as the teacher labels them, take on the background's
    texture."""
    init_from: str | None = None
    """Initialise from a checkpoint, to fine-tune it: a run folder, a .safetensors file or a name. The weights of its
    encoder, slots and decoder have the shapes of the run's; options that change no shape may differ."""

    @property
    def image_size(self) -> tuple[int, int]:
        return self.model.image_size

    @property
    def frames(self) -> int:
        return self.model.frames

    @property
    def augmentation(self) -> BatchAugmentation:
        colors = (self.brightness_jitter, self.contrast_jitter, self.saturation_jitter, self.hue_jitter)
        return BatchAugmentation(self.min_crop_area, *colors, self.blur_probability, self.noise_sigma, self.camouflage)

    @property
    def label_tracks(self) -> bool:
        return bool(getattr(self.loss, "label_tracks", False))

    @property
    def label_refinement(self) -> dict[str, float]:
        names = ("pixel_sigma", "merge_threshold", "background_threshold")
        return {name: getattr(self, f"label_{name}") for name in names}

    @property
    def validates_on_videos(self) -> bool:
        return True


@dataclass(frozen=True, kw_only=True)
class PretrainConfig(RunConfig):
    """A run of `cutslots pretrain`: the encoder, the objective and the data, the schedule, and where it runs."""

    parts = {"encoder": ENCODERS, "objective": OBJECTIVES, "data": DATASETS}

    encoder: EncoderConfig
    objective: ObjectiveConfig
    image_size: Annotated[tuple[int, int], Range(8, 2048)]
    """Height and width of the images."""
    out: Path | None = None
    """Run folder; runs/pretrain-PRESET-DATA-SEED by default. Run the same command again to resume."""
