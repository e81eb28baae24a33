"""Varied scenes and augmentation: what they give a model on scenes of another look, such as those of Blender.

    python -m experiments.varied --runs runs/varied --textured-renders DIR --plain-renders DIR
    python -m experiments.varied ... --jobs 8 --stop-after 9 # eight runs at a time, for nine minutes
    python -m experiments.varied ... --match "textured-*"    # some of the runs
    python -m experiments.varied ... --quick                 # a few steps on a few small images

Preset `ours` on scenes that never repeat, three seeds and as many steps each, on textured and on plain scenes:

    as-is          the scenes of the family
    varied         varied scenes of the family
    augmented      the scenes of the family, and augmentation
    both           varied scenes, and augmentation

Every run is evaluated on test scenes of its family, varied and not, and on the last images of a folder of renders
(images/ and masks/), which is left out where there is none.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import tyro

from cutslots.training.config import TrainConfig
from experiments.study import SEEDS, Group, Options, Study, make_quick, make_table, run_study, with_renders
from experiments.table import BASE, parse

FAMILIES = ("textured", "plain")
COMMON = "--num-images endless --max-steps 10000 --eval-every 1000 --num-eval-images 128"
VARIED = "--data.variation v1"
# Flips, because light has a side. Other changes are mild: they may not make objects look like the background.
AUGMENTED = (
    "--horizontal-flips --min-crop-area 0.6 --brightness-jitter 0.3 --contrast-jitter 0.3 --saturation-jitter 0.3 "
    "--hue-jitter 0.05 --blur-probability 0.3 --noise-sigma 0.02"
)
METHODS = {"as-is": "", "varied": VARIED, "augmented": AUGMENTED, "both": f"{VARIED} {AUGMENTED}"}
NAMES = {"as-is": "as they are", "varied": "varied", "augmented": "as they are, augmented", "both": "varied, augmented"}
TEST_DATA = ("built-in", "varied", "renders")
METRICS = {
    "ari_fg": "ARI-FG",
    "miou": "mIoU",
    "refined_ari_fg": "ARI-FG, refined",
    "refined_miou": "mIoU, refined",
}


def run_config(name: str, options: Options) -> TrainConfig:
    family, rest = name.split("-", 1)
    method, seed = rest.rsplit("-", 1)
    config = replace(parse(f"{BASE} --data {family} {COMMON} {METHODS[method]}"), seed=int(seed))
    return make_quick(config) if options.quick else config


def test_data(name: str, options: Options) -> dict[str, str]:
    family = name.partition("-")[0]
    found = {"built-in": family, "varied": f"{family}:variation=v1"}
    return with_renders(found, family, options)


def table(results: dict[str, Any]) -> str:
    groups = (
        Group((family, name), tuple(f"{family}-{method}-{seed}" for seed in SEEDS), TEST_DATA)
        for family in FAMILIES
        for method, name in NAMES.items()
    )
    return make_table(("family", "trained on scenes"), groups, METRICS, results)


RUN_NAMES = tuple(f"{family}-{method}-{seed}" for family in FAMILIES for method in METHODS for seed in SEEDS)
STUDY = Study("varied", RUN_NAMES, run_config, test_data, METRICS, table)

if __name__ == "__main__":
    run_study(STUDY, tyro.cli(Options))
