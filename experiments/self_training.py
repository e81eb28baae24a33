"""Self-training: models that learn the refined masks of a teacher.

    python -m experiments.self_training --runs runs/self --initial DIR --match "*-1-0"
    python -m experiments.self_training ... --textured-renders DIR --plain-renders DIR --jobs 15
    python -m experiments.self_training ... --quick          # a few steps on a few small images

The first command trains the teachers of the second, in two rounds:

    textured-1, textured-flips-1    the teacher is the checkpoint that they begin with (`--initial`)
    plain-1                         no teacher: fine-tuned on plain scenes, as in experiments/weights.py
    textured-2, textured-flips-2    the teacher is textured-1, with seed 0
    textured-renders-2              the teacher is textured-flips-1; three images of ten are renders
    plain-2                         the teacher is plain-1
    plain-renders-2                 the teacher is the checkpoint that it begins with (`--initial-plain`)

A teacher labels textured scenes with flat textures; the model sees the full ones. All runs but plain-1 have random
colors and camouflage. Images are flipped at random in the runs named so, and in all on renders and of plain-2.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast

import tyro

from cutslots.models.refinement import DEFAULTS
from cutslots.training.config import TrainConfig
from experiments.study import SEEDS, Group, Options, Study, make_quick, make_table
from experiments.table import parse
from experiments.weights import FULL_TEXTURES, METRICS, MIX_FRACTION, run_on_renders, test_data, training_renders

INITIAL, INITIAL_PLAIN = "textured-128", "plain-128"
COLORS = "--brightness-jitter 0.2 --contrast-jitter 0.2 --saturation-jitter 0.3 --hue-jitter 0.1"
FINE_TUNED = "ours --loss.blur 0 --loss.mask-consistency 0 --warmup-steps 200 --lr 5e-4 --num-eval-images 128"
ROUND_1 = "--max-steps 3000 --lr-decay-steps 750 --eval-every 1000 --num-images 24000"
ROUND_2 = "--max-steps 3500 --lr-decay-steps 875 --eval-every 1750"
TEXTURED = (
    f"{FINE_TUNED} {COLORS} --data textured {FULL_TEXTURES} --data.num-flat-scenes 0 --data.flat-teacher "
    "--loss.label-weight 0.03 --camouflage 0.5"
)
TEXTURED_2 = f"{TEXTURED} {ROUND_2} --num-images 16000"
PLAIN_1 = (
    f"{FINE_TUNED} --data plain --num-images endless --loss.foreground-penalty 3e-4 --max-steps 4000 "
    "--lr-decay-steps 1000 --eval-every 1000"
)
PLAIN_2 = (
    f"{FINE_TUNED} {COLORS} --data plain {ROUND_2} --num-images 12000 --loss.foreground-penalty 3e-4 "
    "--loss.label-weight 0.01 --camouflage 0.2 --horizontal-flips"
)
FLIPS = "--horizontal-flips"
RUNS = {
    "textured-1": f"{TEXTURED} {ROUND_1}",
    "textured-flips-1": f"{TEXTURED} {ROUND_1} {FLIPS}",
    "plain-1": PLAIN_1,
    "textured-2": TEXTURED_2,
    "textured-flips-2": f"{TEXTURED_2} {FLIPS}",
    "textured-renders-2": f"{TEXTURED_2} {FLIPS}",
    "plain-2": PLAIN_2,
    "plain-renders-2": PLAIN_2,
}
# The runs of seed 0 that others begin with, and their teachers; others begin with a checkpoint, which is their teacher.
STARTS = {
    "textured-2": "textured-1",
    "textured-flips-2": "textured-flips-1",
    "textured-renders-2": "textured-flips-1",
    "plain-2": "plain-1",
}
TEACHERS = STARTS | {"textured-flips-2": "textured-1"}
NAMES = {
    "textured-2": "`textured` scenes",
    "textured-flips-2": "the same with flips",
    "textured-renders-2": "the same with flips and 30 % renders",
    "plain-2": "`plain` scenes with flips",
    "plain-renders-2": "the same with 30 % renders",
}


@dataclass
class SelfTrainingOptions(Options):
    initial: str = INITIAL
    """The checkpoint that the first round begins with."""
    initial_plain: str = INITIAL_PLAIN
    """The checkpoint that runs on renders of CLEVR begin with."""


def run_config(name: str, options: SelfTrainingOptions) -> TrainConfig:
    kind, seed = name.rsplit("-", 1)
    config = replace(parse(RUNS[kind]), seed=int(seed))
    if "-renders" in kind:
        folder = training_renders(kind.partition("-")[0], options)
        config = replace(config, mix_data=str(folder), mix_fraction=MIX_FRACTION)
    first = options.initial_plain if kind == "plain-renders-2" else options.initial

    def checkpoint(run: str | None) -> str:
        return first if run is None else str(options.runs.resolve() / f"{run}-0")

    if kind != "plain-1":
        config = replace(config, teacher=checkpoint(TEACHERS.get(kind)))
    if options.quick:  # the model of a quick run is another, and so are its images
        return make_quick(without_labels(config))
    return replace(config, init_from=checkpoint(STARTS.get(kind)))


def without_labels(config: TrainConfig) -> TrainConfig:
    """Return the run without a teacher."""
    loss, data = cast(Any, config.loss), cast(Any, config.data)
    if hasattr(data, "flat_teacher"):
        config = replace(config, data=replace(data, flat_teacher=False))
    refinement: dict[str, Any] = {f"label_{name}": DEFAULTS[name] for name in config.label_refinement}
    config = replace(config, **refinement, label_dilation=0, teacher=None, camouflage=0.0)
    return replace(config, loss=replace(loss, label_weight=0.0, label_background_weight=1.0, label_tracks=False))


def table(results: dict[str, Any]) -> str:
    groups = (
        Group(
            (NAMES[kind],),
            tuple(f"{kind}-{seed}" for seed in SEEDS),
            ("textured", "ood", "camo", "varied", "renders")
            if kind.startswith("textured")
            else ("plain", "varied", "renders"),
        )
        for kind in NAMES
    )
    return make_table(("trained on",), groups, METRICS, results)


FIRST = ("textured-1-0", "textured-flips-1-0", "plain-1-0")
RUN_NAMES = (*FIRST, *(f"{kind}-{seed}" for seed in SEEDS for kind in RUNS if kind.endswith("-2")))
STUDY = Study("self_training", RUN_NAMES, run_config, test_data, METRICS, table)


if __name__ == "__main__":
    run_on_renders(STUDY, tyro.cli(SelfTrainingOptions))
