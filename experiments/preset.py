"""What each change of preset `ours` without mask consistency gives: one at a time, in a small version of it.

    python -m experiments.preset --runs runs/preset --jobs 12                  # trains and evaluates what is missing
    python -m experiments.preset ... --stop-after 9                            # for nine minutes
    python -m experiments.preset ... --textured-renders DIR --plain-renders DIR
    python -m experiments.preset ... --quick                                   # a few steps on a few small images

The runs have 64x64 images of 3 to 6 objects and 8 slots. Each is evaluated on test scenes of its family, on varied ones
and on the last images of a folder of renders (images/ and masks/), if there is one; runs on textured scenes on ood and
camo too. The runs of the first seed start first.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import tyro

from cutslots.training.config import TrainConfig
from experiments.study import SEEDS, Group, Options, Study, make_quick, make_table, run_study, with_renders
from experiments.table import BASE, parse

NUM_OBJECTS = "3-6"
COMMON = "--image-size 64 64 --slots.num-slots 8 --num-images 24000 --eval-every 1000 --num-eval-images 128"
FAMILIES = {
    "textured": f"--data textured:{NUM_OBJECTS} --data.texture-ramp-start 1000 --data.texture-ramp-end 2500 "
    "--loss.blur-steps 1000 --max-steps 5000 --lr-decay-steps 1500",
    "plain": f"--data plain:{NUM_OBJECTS} --loss.blur-steps 1000 --max-steps 3000 --lr-decay-steps 1000",
}
FREE = "--slots.partition.background-anchor None"
PENALTY = "--loss.foreground-penalty 7e-4 --loss.foreground-penalty-start 1000"
WEAK_PENALTY = "--loss.foreground-penalty 3e-4 --loss.foreground-penalty-start 1000"
CONSISTENCY = "--loss.mask-consistency 1e-3 --loss.mask-consistency-start 1000"
CHANGES = {
    "base": "",
    "consistency": CONSISTENCY,
    "strong-consistency": "--loss.mask-consistency 4e-3 --loss.mask-consistency-start 1000",
    "penalty": PENALTY,
    "free": FREE,
    "combined-temperature": "--slots.partition.background-temperature 0.5 --slots.partition.combined-temperature 0.1",
    "batch-norm": "--encoder.batch-norm",
    "varied": "--data.variation v1",
    "free-penalty": f"{FREE} {PENALTY}",
    "consistency-penalty": f"{CONSISTENCY} {PENALTY}",
    "consistency-weak-penalty": f"{CONSISTENCY} {WEAK_PENALTY}",
    "consistency-free": f"{CONSISTENCY} {FREE}",
    "consistency-low-contrast": f"{CONSISTENCY} --data.low-contrast 0.5",
}
NAMES = {
    "base": "`ours` without mask consistency, small",
    "consistency": "mask consistency 0.001",
    "strong-consistency": "mask consistency 0.004",
    "penalty": "foreground penalty 7e-4 from step 1,000",
    "free": "free terminals of the background",
    "combined-temperature": "temperature 0.1 over the combined masks",
    "batch-norm": "batch normalisation in the encoder",
    "varied": "varied scenes",
    "free-penalty": "free terminals, foreground penalty",
    "consistency-penalty": "mask consistency 0.001, foreground penalty 7e-4",
    "consistency-weak-penalty": "mask consistency 0.001, foreground penalty 3e-4",
    "consistency-free": "mask consistency 0.001, free terminals",
    "consistency-low-contrast": "mask consistency 0.001, half of the scenes of low contrast",
}
CHANGES_BY_FAMILY = {
    "textured": tuple(change for change in CHANGES if change != "free-penalty"),
    "plain": ("base", "consistency", "penalty", "free", "varied", "free-penalty", "consistency-penalty"),
}
TEST_FAMILIES = {"textured": ("textured", "ood", "camo"), "plain": ("plain",)}
METRICS = {
    "ari_fg": "ARI-FG",
    "ari": "ARI",
    "refined_ari_fg": "ARI-FG, refined",
    "refined_miou": "mIoU, refined",
    "partition_ari_fg": "ARI-FG, partition",
}


def run_config(name: str, options: Options) -> TrainConfig:
    family, rest = name.split("-", 1)
    change, seed = rest.rsplit("-", 1)
    config = replace(parse(f"{BASE} {COMMON} {FAMILIES[family]} {CHANGES[change]}"), seed=int(seed))
    return make_quick(config) if options.quick else config


def test_data(name: str, options: Options) -> dict[str, str]:
    family = name.partition("-")[0]
    found = {each: f"{each}:{NUM_OBJECTS}" for each in TEST_FAMILIES[family]}
    return with_renders(found | {"varied": f"{family}:{NUM_OBJECTS},variation=v1"}, family, options)


def table(results: dict[str, Any]) -> str:
    groups = (
        Group(
            (family, NAMES[c]), tuple(f"{family}-{c}-{s}" for s in SEEDS), (*TEST_FAMILIES[family], "varied", "renders")
        )
        for family, changes in CHANGES_BY_FAMILY.items()
        for c in changes
    )
    return make_table(("family", "change"), groups, METRICS, results)


RUN_NAMES = tuple(f"{family}-{c}-{s}" for s in SEEDS for family, changes in CHANGES_BY_FAMILY.items() for c in changes)
STUDY = Study("preset", RUN_NAMES, run_config, test_data, METRICS, table)

if __name__ == "__main__":
    run_study(STUDY, tyro.cli(Options))
