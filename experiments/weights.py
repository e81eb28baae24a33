"""The checkpoints of this package for images: fine-tuned on built-in scenes, then on renders too.

    python -m experiments.weights --runs runs/weights --jobs 4 --textured-renders DIR --plain-renders DIR
    python -m experiments.weights ... --stop-after 9         # for nine minutes
    python -m experiments.weights ... --match "plain-*"      # some of the runs
    python -m experiments.weights ... --quick                # a few steps on a few small images

All begin with the weights of `textured-128` (`--initial`), the cut of preset `ours` on textured scenes: objects are
found, what is left is their appearance.

    textured, plain                       on built-in scenes
    plain-consistency                     the same with mask consistency instead of a foreground penalty
    textured-renders                      on renders and built-in scenes, with flips and crops
    plain-renders, ...                    after the run of that name, the same

Folders of renders have images/ and masks/. Their last images are for evaluation and are not trained on; without them
the runs on renders are left out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tyro

from cutslots.data.folder import FolderConfig
from cutslots.scenes import Scenes
from cutslots.scenes.export import generate
from cutslots.training.config import TrainConfig
from experiments.pretraining import SEEDS
from experiments.study import (
    NUM_RENDERS,
    Group,
    Options,
    Study,
    images_of,
    last_images,
    link_images,
    make_quick,
    make_table,
    renders_of,
    run_study,
    with_renders,
)
from experiments.table import parse

INITIAL = "textured-128"
COMMON = "ours --loss.blur 0 --warmup-steps 100 --eval-every 1000 --num-eval-images 128"
FULL_TEXTURES = "--data.texture-ramp-start 0 --data.texture-ramp-end 0"
CONSISTENCY, PENALTY = "--loss.mask-consistency 1e-3", "--loss.foreground-penalty 3e-4"
SCHEDULE = "--lr 5e-4 --lr-decay-steps 1250 --max-steps 5000"
SHORT = "--lr 3e-4 --lr-decay-steps 700 --max-steps 2500"
AUGMENTED = "--horizontal-flips --min-crop-area 0.7"
RUNS = {
    "textured": f"--data textured {FULL_TEXTURES} --data.low-contrast 0.5 {SCHEDULE} --num-images 24000 {CONSISTENCY}",
    "textured-renders": f"{SCHEDULE} {AUGMENTED} {CONSISTENCY}",
    "plain": f"--data plain {SCHEDULE} --num-images 24000 {PENALTY}",
    "plain-renders": f"{SHORT} {AUGMENTED} {PENALTY}",
    "plain-consistency": f"--data plain {SCHEDULE} --num-images 24000 {CONSISTENCY}",
    "plain-consistency-renders": f"{SHORT} {AUGMENTED} {CONSISTENCY}",
}
NUM_SCENES = {"textured": 300, "plain": 700}  # built-in ones among the renders
TEST_FAMILIES = {"textured": ("textured", "ood", "camo"), "plain": ("plain",)}
METRICS = {
    "ari_fg": "ARI-FG",
    "miou": "mIoU",
    "refined_ari_fg": "ARI-FG, refined",
    "refined_ari": "ARI, refined",
    "refined_miou": "mIoU, refined",
    "partition_ari_fg": "ARI-FG, partition",
}
NAMES = {
    "textured": "`textured` scenes, half of low contrast; mask consistency",
    "textured-renders": "renders and `textured` scenes; mask consistency",
    "plain": "`plain` scenes; foreground penalty",
    "plain-renders": "the same, then renders and `plain` scenes",
    "plain-consistency": "`plain` scenes; mask consistency",
    "plain-consistency-renders": "the same, then renders and `plain` scenes (`plain-128`)",
}


@dataclass
class WeightsOptions(Options):
    initial: str = INITIAL
    """The checkpoint that the first runs begin with."""


def run_config(name: str, options: WeightsOptions) -> TrainConfig:
    kind, seed = name.rsplit("-", 1)
    config = parse(f"{COMMON} {RUNS[kind]} --seed {seed}")
    if kind.endswith("-renders"):
        data = FolderConfig(path=str(mixed_folder(kind.partition("-")[0], options)))
        config = replace(config, data=data, num_eval_images=NUM_RENDERS)
    if needs(name) is None and not options.quick:  # the model of a quick run is another
        config = replace(config, init_from=options.initial)
    return make_quick(config) if options.quick else config


def mixed_folder(family: str, options: Options) -> Path:
    return options.runs.resolve() / ("mixed-quick" if options.quick else "mixed") / family


def prepare(options: Options) -> None:
    """Make the folders of renders and built-in scenes that runs are fine-tuned on."""
    for family, count in NUM_SCENES.items():
        source, folder = renders_of(family, options), mixed_folder(family, options)
        if source is None:
            continue
        renders = images_of(source)
        if len(renders) <= NUM_RENDERS:
            given = f"{source / 'images'} has {len(renders)} images"
            raise ValueError(f"{given}; expected more than {NUM_RENDERS}, the last of which are for evaluation")
        scenes = folder.with_name(f"{family}-scenes")
        size, count = (16, 2) if options.quick else (128, count)
        generate(Scenes(family, "train", size, count=count), scenes, quiet=True)
        link_images(source, renders[:-NUM_RENDERS], folder / "train")
        for image in images_of(scenes):
            for kind in ("images", "masks"):
                link = folder / "train" / kind / f"scene_{image.name}"
                if not link.is_symlink():
                    link.symlink_to(scenes / kind / image.name)
        last_images(source, folder / "val")


def test_data(name: str, options: Options) -> dict[str, str]:
    family = name.partition("-")[0]
    found = {each: each for each in TEST_FAMILIES[family]}
    return with_renders(found | {"varied": f"{family}:variation=v1"}, family, options)


def needs(name: str) -> str | None:
    """Return the run that a run on renders begins with."""
    return name.replace("-renders", "") if name.startswith("plain-") and "-renders" in name else None


def table(results: dict[str, Any]) -> str:
    groups = (
        Group(
            (label,),
            tuple(f"{kind}-{seed}" for seed in SEEDS),
            (*TEST_FAMILIES[kind.partition("-")[0]], "varied", "renders"),
        )
        for kind, label in NAMES.items()
    )
    return make_table(("trained on",), groups, METRICS, results)


RUN_NAMES = tuple(f"{kind}-{seed}" for seed in SEEDS for kind in RUNS)
STUDY = Study("weights", RUN_NAMES, run_config, test_data, METRICS, table, needs)


def possible_runs(options: Options) -> tuple[str, ...]:
    """Return the runs that have their training data: those on renders need a folder of renders."""
    return tuple(
        name for name in RUN_NAMES if "-renders" not in name or renders_of(name.partition("-")[0], options) is not None
    )


def main(options: WeightsOptions) -> None:
    if options.one is None:
        prepare(options)
    run_study(replace(STUDY, run_names=possible_runs(options)), options)


if __name__ == "__main__":
    main(tyro.cli(WeightsOptions))
