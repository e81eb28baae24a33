"""Every number of every preset, in one place. Nothing here needs torch: the command line reads its options off these.

tiny       finds objects on two CPU cores in minutes
clevr      the paper's text, for plain scenes: a CNN encoder of 64 maps
clevrtex   the paper's text, for textured scenes: a ResNet encoder of 4 blocks of 100 maps
released   what the authors' published code does where it differs from their text
best       ours: slots that know their place, an encoder that sees far, textures that rise
movi       the paper's text, for pairs of frames: clevr with 8 slots
movi11     ours, for pairs of frames: 11 slots, a cheaper network, a price on area
"""

from __future__ import annotations

import dataclasses
import reprlib
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro


@dataclass(frozen=True)
class ModelConfig:
    """The numbers of a `Discovery` model. Saved with its weights as config.json."""

    size: int
    """Side of the pictures in pixels: a power of two from 16 on."""
    slots: int
    """How many slots, the background's among them."""
    slot_dim: int
    """Length of a slot."""
    module: Literal["cut", "softmax", "attention"]
    """Graph cuts (the paper), the same network without the program (a control), or Slot Attention (the baseline)."""

    frames: int
    """Frames seen at once: 1 for images; 2 for pairs whose slots are matched (the paper); any number with volume."""
    volume: bool
    """One cut through the space and time of a clip, in place of matching."""
    match_gamma: float
    """The regulariser of the matching program."""
    match_temperature: float
    """Of the softmax over its solution."""

    encoder: Literal["cnn", "resnet"]
    """Plain convolutions, or residual blocks."""
    encoder_maps: int
    """Feature maps of the encoder."""
    encoder_kernels: tuple[int, ...]
    """CNN: side of each layer's kernel. ResNet: that of the stem, then of each block. The first layer has stride 2."""
    encoder_norm: bool
    """Batch normalisation in the ResNet."""

    weight_maps: int
    """Hidden maps of the network that gives the cuts their weights."""
    weight_kernels: tuple[int, ...]
    """Side of the kernel of each of its layers."""
    signed: bool
    """Whether weights may be negative; otherwise they pass a ReLU."""
    gamma: float
    """The regulariser of the program."""
    reach: float | None
    """Distance in feature pixels over which a weight is felt; None is the paper, 0.71."""
    anchor: float
    """0 leaves the terminals free, which balances every cut (the paper); 1 ties them down."""
    temperature: float
    """Of the softmax over the objects' cuts."""
    background: Literal["cuts", "terminals", "none"]
    """The background slot: a 2-partition, the terminal edges of one more cut, or none."""
    background_temperature: float
    """Of the softmax between background and foreground."""
    sharpen: float | None
    """Temperature of another softmax over the finished masks."""
    pool: Literal["mean", "weighted"]
    """Masked features are averaged over the picture (the paper) or over their mask."""
    streams: int
    """How many feature MLPs run in parallel, their slots being summed."""
    feature_maps: int
    """Width of the MLP that pixels pass before they are pooled."""
    hidden: int
    """Width of the MLP that slots pass after it."""
    iterations: int
    """Slot Attention's."""

    decoder: Literal["transposed", "subpixel"]
    """Slot Attention's transposed convolutions, or convolutions at the lower resolution, which are far cheaper."""
    decoder_maps: tuple[int, ...]
    """Maps after each doubling of the resolution, from 8x8 on; the last is repeated as needed."""
    decoder_extra: int
    """Layers at full resolution before the last one."""
    decoder_style: Literal["relu", "leaky"]
    """relu, or LeakyReLU with a tanh at the end."""

    # Newer than the weights of version 0.1: what is missing from a config.json is as it was then.
    context: int = 0
    """How often the encoder halves its maps and brings them back, to see further."""
    placed: bool = False
    """The last three numbers of a slot are the place of its mask, which the decoder draws around."""
    background_anchor: float | None = None
    """The anchor of the background's cuts; None for that of all."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, list):  # JSON knows no tuples
                object.__setattr__(self, field.name, value := tuple(value))
            _check(field.name, value)
        if self.volume and self.module != "cut":
            raise ValueError(f"module is {self.module!r} and volume is set; expected 'cut', which can go through time")
        if self.volume and self.frames < 2:
            raise ValueError(f"frames is {self.frames} and volume is set; expected at least 2")
        if self.frames > 2 and not self.volume:
            raise ValueError(f"frames is {self.frames}; expected 1 or 2, or volume")
        if self.placed and self.frames > 1 and not self.volume:
            raise ValueError("placed is set and slots are matched; expected images or volume, whose places stay theirs")
        if self.placed and self.slot_dim < 4:
            raise ValueError(f"slot_dim is {self.slot_dim} and placed is set; expected at least 4")
        if self.frames * self.size**2 > MOST_PIXELS:
            seen = f"frames is {self.frames} and size {self.size}"
            raise ValueError(f"{seen}; expected clips of at most {MOST_PIXELS:,} pixels")
        self._check_weights()

    def _check_weights(self) -> None:
        """Before any is made: a file that anybody wrote may ask for any number. Counts rather too many."""
        e, d, wide = self.encoder_maps, self.slot_dim, max(self.encoder_maps, self.weight_maps, 8 * self.slots + 8)
        counts = {
            "encoder_maps": 2 * e * e * (sum(k * k for k in self.encoder_kernels) + 9 * self.context),
            "weight_maps": wide * wide * sum(k * k for k in self.weight_kernels),
            "feature_maps": self.streams * self.feature_maps * (e + d),
            "hidden": (2 * self.streams + 4) * self.hidden * d + 6 * d * d,
            "decoder_maps": 100 * max(d, *self.decoder_maps, 1) ** 2 * (8 + self.decoder_extra),
        }
        largest = max(counts, key=lambda name: counts[name])
        if sum(counts.values()) > MOST_WEIGHTS:
            seen = f"{largest} is {getattr(self, largest)}, with which the model would have {sum(counts.values()):.1e}"
            raise ValueError(f"{seen} weights; expected at most {MOST_WEIGHTS:.0e}")


_TYPES = typing.get_type_hints(ModelConfig)
MOST_WEIGHTS, MOST_PIXELS = 10**9, 2**26
MOST = {"size": 2048, "slots": 255, "streams": 64, "decoder_extra": 64, "context": 64}  # slots: a label is a byte
MOST_OTHERWISE = 65_536


def _check(name: str, value: typing.Any) -> None:
    """One of the numbers, by itself; a sentence if it is not of its kind."""
    kind, choices = _TYPES[name], typing.get_args(_TYPES[name])
    least, most = int(name not in ("decoder_extra", "context")), MOST.get(name, MOST_OTHERWISE)
    if typing.get_origin(kind) is Literal:
        right, wanted = value in choices, f"one of {', '.join(map(str, choices))}"
    elif typing.get_origin(kind) is tuple:
        right = isinstance(value, tuple) and len(value) <= 64 and all(_is_whole(n, 1, most) for n in value)
        wanted = f"at most 64 whole numbers from 1 to {most:,}"
    elif kind is int:
        right, wanted = _is_whole(value, least, most), f"at least {least} and at most {most:,}"
    elif kind is bool:
        right, wanted = isinstance(value, bool), "true or false"
    else:
        right = _is_whole(value, -most, most) or (isinstance(value, float) and abs(value) <= most)
        right, wanted = right or (value is None and type(None) in choices), f"a number of at most {most:,}"
    if not right:
        raise ValueError(f"{name} is {reprlib.repr(value)}; expected {wanted}")


def _is_whole(value: typing.Any, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


@dataclass(frozen=True)
class TrainConfig:
    """A training run: what to learn from, how, and where."""

    model: ModelConfig
    preset: Annotated[str, tyro.conf.Suppress]
    data: str
    """plain, textured, ood, camo, moving; clevrtex:DIR and the like; with numbers of objects as in plain:2-5; or a
    folder that holds images/."""

    batch: int
    """Images a step, or clips for a model of several frames, over all processes together."""
    steps: int
    """Steps in all."""
    lr: float
    """Adam's learning rate."""
    warmup: int
    """Steps over which the rate rises from zero."""
    decay: float
    """The rate is multiplied by this..."""
    decay_steps: int
    """...every so many steps, smoothly."""
    clip: float
    """Largest norm of the gradient; 0 for no limit."""
    area_price: float
    """What a pixel costs that is not the first slot's, in squared error: the ground is then left to one slot. 0 for
    nothing (the paper)."""
    area_from: int
    """The step from which it costs; the price rises over as many steps again."""
    eval_every: int
    """Steps between evaluations."""
    eval_images: int
    """How many validation images, or frames of films, an evaluation takes."""

    images: int | None = None
    """Learn from the first so many images or frames; all by default, but for presets that say otherwise."""
    flips: bool = False
    """Mirror images at random, left to right."""
    flat_until: int = 0
    """Built-in scenes that have textures have hardly any up to this step..."""
    whole_from: int = 0
    """...and whole ones from this step on; in between they rise. 0 for whole ones always."""
    near: float = 0.0
    """Share of images, of built-in scenes that have textures, whose objects take on some of the ground's colours..."""
    near_from: int = 0
    """...from this step on, but not before textures are whole."""
    blur: float = 0.0
    """The error is seen through a blur of this spread in pixels at first..."""
    blur_steps: int = 0
    """...which clears over so many steps, linearly: what is coarse is learned before what is fine."""
    start: str | None = None
    """Begin with the weights of this run folder, file or name; at random by default."""
    seed: int = 0
    """Of the weights and the order of images."""
    minutes: float | None = None
    """Stop after so many minutes of training, if the steps are not done by then."""
    out: Path | None = None
    """The run folder; runs/PRESET-DATA-SEED by default. An interrupted run in it is gone on with."""
    overwrite: bool = False
    """Start anew if the run folder holds another run."""
    save_minutes: float = 1.0
    """Time between saved states."""
    cache: Path | None = None
    """Keep rendered scenes in this folder for other runs; in memory by default."""

    accelerator: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """Where to run."""
    devices: int = 1
    """Processes on this node, one for each device."""
    nodes: int = 1
    """Nodes, which share a disk; start the command on each, by torchrun, SLURM or with Lightning's variables."""
    precision: Literal["auto", "32-true", "bf16-mixed"] = "auto"
    """bf16-mixed on CUDA, 32-true elsewhere. The cuts are solved in float32 always."""
    compile: Literal["auto", "on", "off"] = "auto"
    """torch.compile: on for CUDA."""


CLEVR = ModelConfig(
    size=128,
    slots=12,
    slot_dim=64,
    module="cut",
    frames=1,
    volume=False,
    match_gamma=0.1,
    match_temperature=0.5,
    encoder="cnn",
    encoder_maps=64,
    encoder_kernels=(5, 5, 5, 5),
    encoder_norm=False,
    weight_maps=32,
    weight_kernels=(3, 3, 1),
    signed=True,
    gamma=0.5,
    reach=None,
    anchor=0.0,
    temperature=0.5,
    background="cuts",
    background_temperature=0.1,
    sharpen=None,
    pool="mean",
    streams=1,
    feature_maps=64,
    hidden=128,
    iterations=3,
    decoder="transposed",
    decoder_maps=(64,),
    decoder_extra=1,
    decoder_style="relu",
)

CLEVRTEX = dataclasses.replace(CLEVR, encoder="resnet", encoder_maps=100, encoder_kernels=(5, 3, 3, 3, 3))

RELEASED = dataclasses.replace(
    CLEVRTEX,
    encoder_norm=True,
    weight_maps=100,
    weight_kernels=(3, 3),
    signed=False,
    background="terminals",
    background_temperature=1.0,
    sharpen=0.1,
    streams=3,
    decoder_extra=2,
    decoder_style="leaky",
)

TINY = dataclasses.replace(
    CLEVR,
    size=64,
    slots=6,
    encoder_maps=32,
    encoder_kernels=(5, 3, 3),
    weight_kernels=(3, 3, 3),
    feature_maps=128,
    decoder="subpixel",
    decoder_maps=(32, 32),
    decoder_extra=0,
)

# The paper gives batch, rate and "exponential decay" and needs no warm-up; warm-up, clipping and the rate of decay are
# those of the runs we have seen learn.
PRESETS: dict[str, TrainConfig] = {
    "tiny": TrainConfig(
        TINY,
        "tiny",
        "plain:2-5",
        batch=16,
        steps=1_000,
        lr=1e-3,
        warmup=0,
        decay=0.5,
        decay_steps=700,
        clip=1.0,
        area_price=0.0,
        area_from=0,
        eval_every=200,
        eval_images=96,
        images=1_100,
    ),
    "clevr": TrainConfig(
        CLEVR,
        "clevr",
        "plain",
        batch=64,
        steps=100_000,
        lr=4e-4,
        warmup=500,
        decay=0.5,
        decay_steps=20_000,
        clip=1.0,
        area_price=0.0,
        area_from=0,
        eval_every=1_000,
        eval_images=320,
    ),
}
PRESETS["clevrtex"] = dataclasses.replace(PRESETS["clevr"], model=CLEVRTEX, preset="clevrtex", data="textured")
PRESETS["released"] = dataclasses.replace(
    PRESETS["clevrtex"], model=RELEASED, preset="released", warmup=0, decay=0.8, decay_steps=20_000, clip=0.0
)

# Ours for images. Placed slots, context, a blur that clears and textures that rise make slots follow objects instead of
# regions; a background that is anchored need not be half of the picture.
BEST = dataclasses.replace(
    CLEVR,
    slots=11,
    encoder="resnet",
    encoder_maps=96,
    encoder_kernels=(5, 3, 3, 3, 3),
    context=4,
    placed=True,
    background_anchor=1.0,
    weight_kernels=(3, 3, 3),
    feature_maps=128,
    decoder="subpixel",
    decoder_maps=(64, 64, 32),
    decoder_extra=0,
)
PRESETS["best"] = dataclasses.replace(
    PRESETS["clevr"],
    model=BEST,
    preset="best",
    data="textured",
    batch=32,
    steps=16_000,
    lr=1e-3,
    warmup=200,
    decay_steps=4_000,
    blur=5.0,
    blur_steps=2_000,
    flat_until=2_000,
    whole_from=5_000,
    eval_every=500,
)

# Pairs of frames. The paper says 8 slots, fewer than there may be things; 11 are enough for all and the ground.
PRESETS["movi"] = dataclasses.replace(
    PRESETS["clevr"],
    model=dataclasses.replace(CLEVR, frames=2, slots=8),
    preset="movi",
    data="moving",
    batch=32,
    images=36_000,
)
# Ours: a cheaper encoder and decoder, and a price on area, for which the ground becomes one slot.
MOVI11 = dataclasses.replace(
    CLEVR,
    frames=2,
    slots=11,
    encoder_kernels=(5, 5, 3, 3),
    weight_kernels=(3, 3, 3),
    feature_maps=128,
    decoder="subpixel",
    decoder_maps=(64, 64, 32),
    decoder_extra=0,
)
PRESETS["movi11"] = dataclasses.replace(
    PRESETS["movi"],
    model=MOVI11,
    preset="movi11",
    batch=16,
    steps=24_000,
    lr=8e-4,
    warmup=200,
    decay_steps=5_000,
    area_price=7e-4,
    area_from=3_000,
    eval_every=2_500,
    eval_images=480,
)
