"""The cut, the no-cut ablation and Slot Attention in the network and on the schedule of preset `ours`, three seeds.

    python -m experiments.comparison --runs runs/comparison --jobs 8
    python -m experiments.comparison ... --stop-after 9      # for nine minutes
    python -m experiments.comparison ... --quick             # a few steps on a few small images
    python -m experiments.comparison ... --match none --no-write --figure cut-0 cut-1    # draws their masks

Scenes never repeat; runs with the same seed see the same ones. The no-cut ablation has a softmax of the same logits in
the place of the cuts. Slot Attention has the learning rate and the warm-up of a sweep (`experiments.table --only
slot_attention_lr`), and neither mask consistency nor a foreground penalty, which are losses of ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import tyro

from cutslots.files import write_atomically
from cutslots.models.checkpoints import load
from cutslots.scenes import Scenes
from cutslots.training.config import TrainConfig
from cutslots.viz.images import encode_png, image_grid
from cutslots.viz.palette import PALETTE
from experiments.study import SEEDS, Group, Options, Study, make_quick, make_table, run_study
from experiments.table import NO_CONSISTENCY, SLOT_ATTENTION, parse

SCHEDULE = "ours --num-images endless --data.num-flat-scenes 0 --max-steps 8000"
LOSSES = "--loss.mask-consistency-start 4000 --loss.foreground-penalty 3e-4 --loss.foreground-penalty-start 4000"
METHODS = {
    "cut": LOSSES,
    "softmax": f"{LOSSES} --slots.partition softmax",
    "slot-attention": f"{NO_CONSISTENCY} {SLOT_ATTENTION}",
}
NAMES = {"cut": "cut", "softmax": "no-cut ablation (softmax)", "slot-attention": "Slot Attention"}
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
STUDY = Study("comparison", RUN_NAMES, run_config, test_data, METRICS, table, curves=tuple(METHODS))


@dataclass
class ComparisonOptions(Options):
    figure: tuple[str, ...] = ()
    """Draw the decoder masks of these runs."""


def draw_masks(runs: Sequence[Path], path: Path, num_images: int = 6) -> None:
    """Draw validation scenes, and below them the decoder masks of each run; a slot has one color in all images."""
    models = [load(run).eval() for run in runs]
    image = Scenes("textured", "val", models[0].image_size, count=num_images).get_batch(range(num_images)).image
    rows = [[each.permute(1, 2, 0).numpy() for each in image]]
    for model in models:
        torch.manual_seed(0)  # Slot Attention samples its initial slots
        with torch.no_grad():
            labels = model(image).masks.argmax(1)
        rows.append([PALETTE[each.numpy() + 1] for each in labels])
    write_atomically(path, encode_png(image_grid(rows)))


def main(options: ComparisonOptions) -> None:
    run_study(STUDY, options)
    if options.figure:
        draw_masks([options.runs / name for name in options.figure], options.docs / "img" / "comparison.png")


if __name__ == "__main__":
    main(tyro.cli(ComparisonOptions))
