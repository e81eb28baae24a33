"""The cut, the no-cut ablation and Slot Attention in the network and on the schedule of preset `ours`, three seeds.

    python -m experiments.comparison --runs runs/comparison --jobs 8
    python -m experiments.comparison ... --stop-after 9      # for nine minutes
    python -m experiments.comparison ... --quick             # a few steps on a few small images

All runs see the same scenes, which never repeat. The no-cut ablation has a softmax of the same logits in the place of
the cuts. Slot Attention has the learning rate and the warm-up of a sweep (`experiments.table --only
slot_attention_lr`), and neither mask consistency nor a foreground penalty, which are losses of ours.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import tyro

from cutslots.training.config import TrainConfig
from experiments.study import SEEDS, Group, Options, Study, make_quick, make_table, run_study
from experiments.table import NO_CONSISTENCY, SLOT_ATTENTION, parse

SCHEDULE = "ours --num-images endless --max-steps 8000"
LOSSES = "--loss.mask-consistency-start 4000 --loss.foreground-penalty 3e-4 --loss.foreground-penalty-start 4000"
METHODS = {
    "cut": LOSSES,
    "softmax": f"{LOSSES} --slots.partition softmax",
    "slot-attention": f"{NO_CONSISTENCY} {SLOT_ATTENTION}",
}
NAMES = {"cut": "cut (`ours`)", "softmax": "no-cut ablation (softmax)", "slot-attention": "Slot Attention"}
FAMILIES = ("textured", "ood", "camo")
METRICS = {
    "ari_fg": "ARI-FG",
    "miou": "mIoU",
    "ari": "ARI",
    "refined_ari_fg": "ARI-FG, refined",
    "refined_miou": "mIoU, refined",
    "partition_ari_fg": "ARI-FG, partition",
}


def run_config(name: str, options: Options) -> TrainConfig:
    method, seed = name.rsplit("-", 1)
    config = replace(parse(f"{SCHEDULE} {METHODS[method]}"), seed=int(seed))
    return make_quick(config) if options.quick else config


def test_data(name: str, options: Options) -> dict[str, str]:
    return {family: family for family in FAMILIES}


def table(results: dict[str, Any]) -> str:
    groups = (
        Group((NAMES[method],), tuple(f"{method}-{seed}" for seed in SEEDS), (family,))
        for family in FAMILIES
        for method in METHODS
    )
    return make_table(("method",), groups, METRICS, results)


RUN_NAMES = tuple(f"{method}-{seed}" for seed in SEEDS for method in METHODS)
STUDY = Study("comparison", RUN_NAMES, run_config, test_data, METRICS, table)

if __name__ == "__main__":
    run_study(STUDY, tyro.cli(Options))
