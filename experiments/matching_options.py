"""What learned matching needs to carry the identity of objects: one option at a time, in a small network on a CPU.

    python -m experiments.matching_options --runs runs/matching_options --jobs 2    # trains and evaluates all
    python -m experiments.matching_options ... --stop-after 9                       # for nine minutes
    python -m experiments.matching_options ... --quick                              # a few steps on small images

Preset `tiny` on videos of 2 to 5 objects, 64x64: first single frames, then pairs that begin with them, each with three
associations of the same slots (experiments/matching.py has the same at 128x128):

    frames, resnet, norm      single frames; a CNN encoder, a ResNet, a ResNet with batch normalisation
    near                      pairs of neighbouring frames, joint pairing, temperature 0.5: the paper's algorithm
    far, temperature, areas, shared    one option changed
    all                       frames up to 8 apart, temperature 0.1 and areas
    resnet-areas, norm-areas  areas, with the other encoders
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import tyro

from cutslots.training.config import TrainConfig
from experiments.matching import ASSOCIATIONS
from experiments.study import SEEDS, Options, Study, make_quick, run_study, spread
from experiments.table import parse

SCENES = "--data moving --data.num-objects 2 5 --num-images 12000 --num-eval-images 240"
FRAMES = f"tiny --model discovery {SCENES} --max-steps 1800 --eval-every 1800"
PAIRS = (
    f"tiny --model pair-discovery {SCENES} --max-steps 600 --eval-every 600 --lr 5e-4 --warmup-steps 50 "
    "--lr-decay-steps 200"
)
RESNET = "--encoder resnet --encoder.channels 32 --encoder.kernel-sizes 5 3 3"
ENCODERS = {
    "frames": "",
    "resnet": f"{RESNET} --encoder.no-batch-norm",
    "norm": f"{RESNET} --encoder.batch-norm",
}
AREAS = "--match-half-area 0.03"
OPTIONS = {
    "near": "",
    "far": "--max-frame-gap 8",
    "temperature": "--match-temperature 0.1",
    "areas": AREAS,
    "shared": "--pairing shared",
    "all": f"--max-frame-gap 8 --match-temperature 0.1 {AREAS}",
    "resnet-areas": AREAS,
    "norm-areas": AREAS,
}
NAMES = {
    "near": "neighbouring frames, joint pairing, temperature 0.5, no areas (the paper)",
    "far": "frames up to 8 apart",
    "temperature": "temperature 0.1",
    "areas": "areas, which exclude empty slots",
    "shared": "shared pairing: one set of slots, and a code for each frame",
    "all": "frames up to 8 apart, temperature 0.1 and areas",
    "resnet-areas": "areas, ResNet",
    "norm-areas": "areas, ResNet with batch normalisation",
}
METRICS = {"ari_fg": "ARI-FG", "ari": "ARI", "frame_ari_fg": "ARI-FG per frame"}


def encoder_of(change: str) -> str:
    """Return the runs on single frames that runs on pairs begin with.

    >>> encoder_of("norm-areas"), encoder_of("areas")
    ('norm', 'frames')
    """
    first = change.partition("-")[0]
    return first if first in ENCODERS else "frames"


def run_config(name: str, options: Options) -> TrainConfig:
    change, seed = name.rsplit("-", 1)
    first, on_pairs = encoder_of(change), change in OPTIONS
    words = f"{PAIRS} {OPTIONS[change]}" if on_pairs else FRAMES
    config = replace(parse(f"{words} {ENCODERS[first]}"), seed=int(seed))
    if on_pairs:
        config = replace(config, init_from=str(options.runs / f"{first}-{seed}"))
    return make_quick(config) if options.quick else config


def test_data(name: str, options: Options) -> dict[str, str]:
    on_pairs = name.rsplit("-", 1)[0] in OPTIONS
    return dict.fromkeys(ASSOCIATIONS, "moving:2-5") if on_pairs else {}


def table(results: dict[str, Any]) -> str:
    """Return a row for each option: ARI-FG of videos by association, and how far learned matching is ahead."""
    heads = ("pairs", "seeds", "learned", "Hungarian", "difference", "area", "ARI, learned", "ARI-FG per frame")
    rows = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for change, text in NAMES.items():
        found = (results.get(f"{change}-{seed}", {}).get("test", {}) for seed in SEEDS)
        tests = [test for test in found if set(ASSOCIATIONS) <= set(test)]
        learned, hungarian, area = ([test[name]["ari_fg"] for test in tests] for name in ASSOCIATIONS)
        ahead = [ours - theirs for ours, theirs in zip(learned, hungarian, strict=True)]
        others = ([test["learned"][metric] for test in tests] for metric in ("ari", "frame_ari_fg"))
        cells = [text, str(len(tests)) if tests else "not run"]
        cells += map(spread, (learned, hungarian, ahead, area, *others))
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


RUN_NAMES = tuple(f"{change}-{seed}" for seed in SEEDS for change in (*ENCODERS, *OPTIONS))
STUDY = Study(
    "matching_options", RUN_NAMES, run_config, test_data, METRICS, table, {name: name for name in ASSOCIATIONS}
)


if __name__ == "__main__":
    run_study(STUDY, tyro.cli(Options, description=__doc__))
