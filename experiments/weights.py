"""The checkpoints of this package: three seeds of each, on built-in scenes, then fine-tuned on renders too.

    python -m experiments.weights --runs runs/weights --jobs 8 --textured-renders DIR --plain-renders DIR
    python -m experiments.weights ... --stop-after 9         # for nine minutes
    python -m experiments.weights ... --match "plain-*"      # some of the runs
    python -m experiments.weights ... --quick                # a few steps on a few small images

    textured, plain, moving               preset `ours` (`ours-video`) on built-in scenes
    textured-renders, plain-renders       the same weights, fine-tuned on renders and as many built-in scenes, with
                                          flips and crops

Folders of renders have images/ and masks/. Their last images are for evaluation and are not trained on; without them
the runs on renders are left out. The shipped seed is the one with the best ARI-FG of refined masks on validation scenes
(renders: on the evaluated images themselves, which docs/weights.md says).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import tyro

from cutslots.data.folder import FolderConfig
from cutslots.scenes import Scenes
from cutslots.scenes.export import generate
from cutslots.training.config import TrainConfig
from experiments.pretraining import SEEDS, spread
from experiments.study import (
    NUM_RENDERS,
    Options,
    Study,
    TestData,
    images_of,
    last_images,
    link_images,
    make_quick,
    renders_of,
    run_study,
    with_renders,
)
from experiments.table import parse

CONSISTENCY = "--loss.mask-consistency 1e-3 --loss.mask-consistency-start 2000"
PENALTY = "--loss.foreground-penalty 3e-4 --loss.foreground-penalty-start 2000"
EVALUATION = "--eval-every 1000 --num-eval-images 128"
SCENES = {
    "textured": "ours --num-images 48000 --max-steps 14000 --lr-decay-steps 3500 --data.low-contrast 0.5 "
    f"{CONSISTENCY} {PENALTY}",
    "plain": "ours --data plain --slots.num-slots 12 --num-images 24000 --max-steps 10000 --lr-decay-steps 2500 "
    f"{CONSISTENCY} {PENALTY}",
    "moving": "ours-video --model discovery --batch-size 32 --max-steps 12000 --lr-decay-steps 3000 --num-images 24000 "
    f"{CONSISTENCY}",
}
FINE_TUNE = (
    "--loss.blur 0 --lr 5e-4 --warmup-steps 100 --lr-decay-steps 1000 --max-steps 4000 --horizontal-flips "
    "--min-crop-area 0.7 --loss.mask-consistency-start 0 --loss.foreground-penalty-start 0"
)
TEST_FAMILIES = {"textured": ("textured", "ood", "camo"), "plain": ("plain",), "moving": ("moving",)}
NUM_VIDEOS = 64
METRICS = {
    "ari_fg": "ARI-FG",
    "miou": "mIoU",
    "refined_ari_fg": "ARI-FG, refined",
    "refined_ari": "ARI, refined",
    "refined_miou": "mIoU, refined",
    "partition_ari_fg": "ARI-FG, partition",
}
KINDS = {
    "textured": "`textured` scenes",
    "textured-renders": "then renders too",
    "plain": "`plain` scenes",
    "plain-renders": "then renders too",
    "moving": "`moving` scenes",
}


def run_config(name: str, options: Options) -> TrainConfig:
    kind, seed = name.rsplit("-", 1)
    family = kind.removesuffix("-renders")
    words = f"{SCENES[family]} {EVALUATION} --seed {seed}"
    if kind == family:
        return make_quick(parse(words)) if options.quick else parse(words)
    data = FolderConfig(path=str(mixed_folder(family, options)))
    config = replace(parse(f"{words} {FINE_TUNE}"), data=data, num_eval_images=NUM_RENDERS)
    return make_quick(config) if options.quick else config


def mixed_folder(family: str, options: Options) -> Path:
    return options.runs.resolve() / "mixed" / family


def prepare(options: Options) -> None:
    """Make the folders of renders and built-in scenes that runs are fine-tuned on."""
    for family in ("textured", "plain"):
        source, folder = renders_of(family, options), mixed_folder(family, options)
        if source is None or (folder / "val").is_dir():
            continue
        renders = images_of(source)[:-NUM_RENDERS]
        scenes = options.runs.resolve() / "mixed" / f"{family}-scenes"
        generate(Scenes(family, "train", 16 if options.quick else 128, count=len(renders)), scenes)
        link_images(source, renders, folder / "train")
        for image in images_of(scenes):
            for kind in ("images", "masks"):
                link = folder / "train" / kind / f"scene_{image.name}"
                if not link.is_symlink():
                    link.symlink_to(scenes / kind / image.name)
        last_images(source, folder / "val")


def test_data(name: str, options: Options) -> dict[str, TestData]:
    family = name.partition("-")[0]
    if family == "moving":
        return {"moving": TestData("moving", NUM_VIDEOS)}
    found = {each: TestData(each) for each in TEST_FAMILIES[family]}
    return with_renders(found | {"varied": TestData(f"{family}:variation=v1")}, family, options)


def needs(name: str) -> str | None:
    """Return the run that a run on renders is initialised from."""
    return name.replace("-renders", "") if "-renders" in name else None


def table(results: dict[str, Any]) -> str:
    """Return a row for each kind of run and test data: means over seeds, and the smallest and the largest value."""
    heads = ["trained on", "evaluated on", "seeds", "steps", *METRICS.values()]
    rows = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for kind, label in KINDS.items():
        family = kind.removesuffix("-renders")
        runs = [results.get(f"{kind}-{seed}", {"test": {}}) for seed in SEEDS]
        for data in TEST_FAMILIES[family] if family == "moving" else (*TEST_FAMILIES[family], "varied", "renders"):
            found = [run for run in runs if data in run["test"]]
            cells = [label, data, str(len(found)) if found else "not run", f"{found[0]['steps']:,}" if found else ""]
            cells += [spread([run["test"][data][metric] for run in found]) for metric in METRICS]
            rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


RUN_NAMES = tuple(f"{kind}-{seed}" for kind in KINDS for seed in SEEDS)
STUDY = Study("weights", RUN_NAMES, run_config, test_data, METRICS, table, needs)


def main(options: Options) -> None:
    if options.one is None:
        prepare(options)
    run_study(STUDY, options)


if __name__ == "__main__":
    main(tyro.cli(Options))
