"""The checkpoints of this package at 128x128: fine-tuned on built-in scenes, with renders mixed in or without.

    python -m experiments.weights --runs runs/weights --jobs 5 --textured-renders DIR --plain-renders DIR
    python -m experiments.weights ... --stop-after 9         # for nine minutes
    python -m experiments.weights ... --match "plain-*"      # some of the runs
    python -m experiments.weights ... --quick                # a few steps on a few small images

The first runs are those of preset `ours`, from random weights. The others begin with the weights of a checkpoint
(`--initial`), the cut of preset `ours` on textured scenes: objects are found, what is left is their appearance.

    textured-scratch                      preset `ours` on textured scenes that never repeat
    textured, plain                       fine-tuned on built-in scenes that never repeat
    textured-renders, plain-renders       the same, and three images of ten are renders
    moving                                fine-tuned on frames of built-in videos

Runs of other names differ from these in mask consistency and foreground penalty.

Folders of renders have images/ and masks/. Their last images are for evaluation and are not trained on; without them
the runs on renders are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import tyro

from cutslots.models.checkpoints import load
from cutslots.models.discovery import Discovery
from cutslots.training.config import TrainConfig
from experiments.study import (
    NUM_RENDERS,
    SEEDS,
    Group,
    Options,
    Study,
    images_of,
    link_images,
    make_quick,
    make_table,
    renders_of,
    run_study,
    with_renders,
)
from experiments.table import NO_CONSISTENCY, parse

INITIAL = "textured-128"
FINE_TUNED = (
    "ours --loss.blur 0 --loss.mask-consistency-start 0 --warmup-steps 100 --lr 5e-4 --lr-decay-steps 1500 "
    "--max-steps 6000 --eval-every 1000 --num-eval-images 128"
)
FULL_TEXTURES = "--data.texture-ramp-start 0 --data.texture-ramp-end 0"
TEXTURED = f"{FINE_TUNED} --data textured {FULL_TEXTURES} --data.low-contrast 0.5 --num-images endless"
PLAIN = f"{FINE_TUNED} --data plain --num-images endless"
MOVING = f"{FINE_TUNED} --data moving --num-images 15360 --num-eval-images 480 --eval-every 2000"


def penalty(value: float) -> str:
    return f"--loss.foreground-penalty {value}"


RUNS = {
    "textured-scratch": "ours --num-images endless --data.num-flat-scenes 0 --max-steps 10000",
    "textured": f"{TEXTURED} {penalty(7e-4)}",
    "textured-renders": f"{TEXTURED} {penalty(7e-4)}",
    "textured-strong-renders": f"{TEXTURED} {penalty(1.5e-3)}",
    "plain": f"{PLAIN} {NO_CONSISTENCY} {penalty(3e-4)}",
    "plain-renders": f"{PLAIN} {penalty(7e-4)}",
    "plain-penalty-renders": f"{PLAIN} {NO_CONSISTENCY} {penalty(3e-4)}",
    "moving": f"{MOVING} {penalty(7e-4)}",
}
MIX_FRACTION = 0.3  # of the images are renders
TEST_FAMILIES = {"textured": ("textured", "ood", "camo"), "plain": ("plain",), "moving": ("moving",)}
METRICS = {
    "ari_fg": "ARI-FG",
    "miou": "mIoU",
    "refined_ari_fg": "ARI-FG, refined",
    "refined_ari": "ARI, refined",
    "refined_miou": "mIoU, refined",
    "partition_ari_fg": "ARI-FG, partition",
}
NAMES = {
    "textured-scratch": "`textured` scenes, preset `ours`, from random weights",
    "textured": "`textured` scenes, half of low contrast",
    "textured-renders": "the same, 30 % renders",
    "textured-strong-renders": "the same, 30 % renders",
    "plain": "`plain` scenes",
    "plain-renders": "the same, 30 % renders",
    "plain-penalty-renders": "the same, 30 % renders",
    "moving": "frames of `moving` videos",
}


@dataclass
class WeightsOptions(Options):
    initial: str = INITIAL
    """The checkpoint that fine-tuned runs begin with."""


def run_config(name: str, options: WeightsOptions) -> TrainConfig:
    kind, seed = name.rsplit("-", 1)
    config = replace(parse(RUNS[kind]), seed=int(seed))
    if kind.endswith("-renders"):
        folder = training_renders(kind.partition("-")[0], options)
        config = replace(config, mix_data=str(folder), mix_fraction=MIX_FRACTION)
    if options.quick:  # the model of a quick run is another
        return make_quick(config)
    return config if kind.endswith("-scratch") else replace(config, init_from=options.initial)


def training_renders(family: str, options: Options) -> Path:
    return options.runs.resolve() / "training-renders" / family


def prepare(options: Options) -> None:
    """Make the folders of renders that runs are trained on."""
    for family in TEST_FAMILIES:
        source = renders_of(family, options)
        if source is None:
            continue
        renders = images_of(source)
        if len(renders) <= NUM_RENDERS:
            given = f"{source / 'images'} has {len(renders)} images"
            raise ValueError(f"{given}; expected more than {NUM_RENDERS}, the last of which are for evaluation")
        link_images(source, renders[:-NUM_RENDERS], training_renders(family, options) / "train")


def test_data(name: str, options: Options) -> dict[str, str]:
    family = name.partition("-")[0]
    found = {each: each for each in TEST_FAMILIES[family]}
    if family == "moving":
        return found
    return with_renders(found | {"varied": f"{family}:variation=v1"}, family, options)


def labels(kind: str) -> tuple[str, ...]:
    """Return what runs are trained on, their mask consistency and their foreground penalty."""
    loss: Any = parse(RUNS[kind]).loss
    return NAMES[kind], f"{loss.mask_consistency:g}", f"{loss.foreground_penalty:g}"


def table(results: dict[str, Any]) -> str:
    groups = (
        Group(
            labels(kind),
            tuple(f"{kind}-{seed}" for seed in SEEDS),
            (*TEST_FAMILIES[kind.partition("-")[0]], *(() if kind.startswith("moving") else ("varied", "renders"))),
        )
        for kind in NAMES
    )
    return make_table(("trained on", "consistency", "penalty"), groups, METRICS, results)


RUN_NAMES = tuple(f"{kind}-{seed}" for seed in SEEDS for kind in RUNS)
CURVES = ("textured-scratch", "textured", "textured-renders", "plain", "plain-renders", "moving")
STUDY = Study("weights", RUN_NAMES, run_config, test_data, METRICS, table, curves=CURVES)


def average(checkpoints: Sequence[str]) -> Discovery:
    """Return a model whose weights are the means of those of checkpoints of one model.

    `textured-128` is such a mean. Runs that begin with the same weights stay close enough for it.
    """
    models = [load(each) for each in checkpoints]
    for name, model in zip(checkpoints, models, strict=True):
        if model.config != models[0].config:
            raise ValueError(f"{name} has another model than {checkpoints[0]}; expected the same configuration")
    states = [model.state_dict() for model in models]
    means = {name: torch.stack([state[name] for state in states]).double().mean(0) for name in states[0]}
    models[0].load_state_dict(means)
    return models[0]


def possible(names: Sequence[str], options: Options) -> tuple[str, ...]:
    """Return the runs that have their training data: those on renders need a folder of renders."""
    return tuple(
        name for name in names if "-renders" not in name or renders_of(name.partition("-")[0], options) is not None
    )


def run_on_renders(study: Study, options: Options) -> None:
    """Run a study some of whose runs have renders."""
    if options.one is None:
        prepare(options)
    run_study(replace(study, run_names=possible(study.run_names, options)), options)


if __name__ == "__main__":
    run_on_renders(STUDY, tyro.cli(WeightsOptions))
