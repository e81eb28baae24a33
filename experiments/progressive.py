"""Train the paper's presets at 128x128 in three stages of growing resolution, then on their own labels.

    python -m experiments.progressive --runs runs/progressive --jobs 3                     # everything, three at a time
    python -m experiments.progressive --runs runs/progressive --jobs 3 --match "cut-*"     # the runs of one variant

Variants go through some of these stages. Each stage begins with the weights of the one before:

    quarter    the decoder has a quarter of the resolution; textures grow from step 4,000 to step 8,000
    half       half of the resolution
    full       the paper's decoder
    self-1     self-training: the teacher is the stage before
    self-2, 3  once more; in `cut` with twice the steps, and labels merge more slots into the background

The variants:

    cut              preset `clevrtex`, three seeds
    penalty          the same with a foreground penalty from the second stage on, without self-training
    softmax          its no-cut ablation, three seeds, without self-training
    full-textures    preset `clevrtex` with full textures from the first step, without self-training
    graph-ocl        preset `graph-ocl`, the authors' released code, without self-training
    plain            preset `clevr` on plain scenes; self-training, three times, follows the second stage
    plain-long       the same for longer with half of the resolution, then self-training with it
    plain-direct     full resolution only, then self-training with labels that are grown over the background
    plain-full       the same for longer
    plain-light      begins with `plain-full-full`; a tenth of the label weight, default refinement, more steps
    plain-taught     half, full, from the first step on with grown labels of the checkpoint `plain-128`, three seeds
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import tyro

from cutslots.training.config import TrainConfig
from experiments.self_training import COLORS, without_labels
from experiments.study import SEEDS, Group, Options, Study, join_curves, make_quick, make_table, run_study
from experiments.table import TEST_FAMILIES, parse
from experiments.weights import METRICS as REFINED_METRICS

METRICS = {"ari_fg": "ARI-FG", "ari": "ARI"} | REFINED_METRICS
BASE = "--num-images 24000 --eval-every 1000 --num-eval-images 128 --lr 4e-4 --warmup-steps 200"
RAMP = "--data.texture-ramp-start 4000 --data.texture-ramp-end 8000"
LABELS = f"{COLORS} --data.flat-teacher --loss.label-weight 0.03 --camouflage 0.5"
# After one round slots still share the background. Merging more of them raises mIoU (docs/self_training.md).
SECOND_LABELS = f"{LABELS} --label-pixel-sigma 0.2 --label-background-threshold 1.5"
STAGES = {
    "quarter": "--batch-size 32 --max-steps 9000 --lr-decay-steps 9000 --loss.blur 5 --loss.blur-steps 2000 "
    "--decoder.skipped-doublings 2",
    "half": "--batch-size 16 --max-steps 5000 --lr-decay-steps 5000 --decoder.skipped-doublings 1",
    "full": "--batch-size 16 --max-steps 4000 --lr-decay-steps 2000",
    "self-1": f"--batch-size 16 --max-steps 3000 --lr-decay-steps 1000 {LABELS}",
    "self-2": f"--batch-size 16 --max-steps 6000 --lr-decay-steps 2000 {SECOND_LABELS}",
}
HALF = "--decoder.skipped-doublings 1"
PLAIN_LONG = "--batch-size 32"
PLAIN_LABELS = "--loss.label-weight 0.03 --horizontal-flips --label-pixel-sigma 0.2"  # no textures to flatten
PLAIN_SELF = f"--batch-size 16 --max-steps 4000 --lr-decay-steps 1000 {PLAIN_LABELS}"
# Wide masks lose fewer pixels of objects to the background (docs/self_training.md).
GROWN = (
    "--batch-size 32 --loss.label-weight 0.03 --horizontal-flips --label-pixel-sigma 0.5 --label-merge-threshold 0.1 "
    "--label-background-threshold 1.2 --label-dilation 2 --eval-every 2000"
)
# Default refinement gives better labels than these (docs/log.md); a smaller weight, a higher mIoU (self_training.md).
LIGHT = "--batch-size 64 --num-images 50000 --loss.label-weight 0.003 --horizontal-flips --eval-every 3000"
PLAIN_STAGES = {
    "plain": dict.fromkeys(("self-1", "self-2", "self-3"), PLAIN_SELF),
    "plain-long": {
        "half": f"{PLAIN_LONG} --num-images 32000 --max-steps 30000 --lr-decay-steps 9000 --eval-every 3000 {HALF}",
        "self-1": f"{PLAIN_LONG} --max-steps 10000 --lr-decay-steps 2500 --eval-every 2500 {PLAIN_LABELS} {HALF}",
    },
    "plain-direct": {
        "full": "--batch-size 64 --max-steps 4000 --lr-decay-steps 2000",
        "self-1": f"{GROWN} --max-steps 4000 --lr-decay-steps 1000",
    },
    "plain-full": {
        "full": "--batch-size 64 --num-images 50000 --max-steps 36000 --lr-decay-steps 9000 --eval-every 3000",
        "self-1": f"{GROWN} --num-images 16000 --max-steps 8000 --lr-decay-steps 2000",
        "self-2": f"{GROWN} --num-images 16000 --max-steps 10000 --lr-decay-steps 2500",
    },
    "plain-light": {
        "self-1": f"{LIGHT} --label-dilation 2 --max-steps 30000 --lr-decay-steps 10000",
        "self-2": f"{LIGHT} --max-steps 8000 --lr-decay-steps 2000",
    },
    "plain-taught": {
        "half": f"{GROWN} --num-images 16000 --max-steps 6000 --lr-decay-steps 6000 {HALF}",
        "full": f"{GROWN} --num-images 32000 --max-steps 16000 --lr-decay-steps 4000",
    },
}
TEACHERS = {"plain-taught": "plain-128"}  # of all stages
# Variants that begin with a stage of another.
FIRST_STAGES = {"penalty": "cut-quarter", "plain-light": "plain-full-full"}
UP_TO_FULL = ("quarter", "half", "full")
VARIANTS: dict[str, tuple[str, tuple[str, ...], tuple[int, ...]]] = {  # options, stages and seeds
    "cut": ("clevrtex", (*UP_TO_FULL, "self-1", "self-2"), SEEDS),
    "penalty": ("clevrtex --loss.foreground-penalty 7e-4", ("half", "full"), SEEDS),
    "softmax": ("clevrtex --slots.partition softmax", UP_TO_FULL, SEEDS),
    "full-textures": ("clevrtex", UP_TO_FULL, (0,)),
    "graph-ocl": ("graph-ocl --precision bf16-mixed", UP_TO_FULL, (0,)),
    "plain": ("clevr", ("quarter", "half", "self-1", "self-2", "self-3"), (0,)),
    "plain-long": ("clevr", ("half", "self-1"), (0,)),
    "plain-direct": ("clevr", ("full", "self-1"), (0,)),
    "plain-full": ("clevr", ("full", "self-1", "self-2"), (0,)),
    "plain-light": ("clevr", ("self-1", "self-2"), (0,)),
    "plain-taught": ("clevr", ("half", "full"), SEEDS),
}
NAMES = {
    "cut-full": "`clevrtex`",
    "cut-self-1": "`clevrtex`, self-training",
    "cut-self-2": "`clevrtex`, self-training twice",
    "penalty-full": "`clevrtex`, foreground penalty",
    "softmax-full": "no-cut ablation of `clevrtex`",
    "full-textures-full": "`clevrtex`, full textures",
    "graph-ocl-full": "`graph-ocl`",
    "plain-self-1": "`clevr`, self-training",
    "plain-self-2": "`clevr`, self-training twice",
    "plain-self-3": "`clevr`, self-training three times",
    "plain-long-half": "`clevr`, longer, half resolution",
    "plain-long-self-1": "`clevr`, longer, half resolution, self-training",
    "plain-direct-full": "`clevr`, full resolution",
    "plain-direct-self-1": "`clevr`, full resolution, wide labels",
    "plain-full-full": "`clevr`, full resolution, longer",
    "plain-full-self-1": "`clevr`, full resolution, longer, wide labels",
    "plain-full-self-2": "`clevr`, full resolution, longer, wide labels twice",
    "plain-light-self-1": "`clevr`, full resolution, longer, smaller label weight",
    "plain-light-self-2": "`clevr`, full resolution, longer, smaller label weight, twice",
    "plain-taught-full": "`clevr`, wide labels of `plain-128`",
}


def split_name(name: str) -> tuple[str, str, int]:
    """Return the variant, the stage and the seed of a run.

    >>> split_name("full-textures-half-0"), split_name("cut-self-1-2")
    (('full-textures', 'half', 0), ('cut', 'self-1', 2))
    """
    kind, seed = name.rsplit("-", 1)
    variant = max((each for each in VARIANTS if kind.startswith(f"{each}-")), key=len)
    return variant, kind.removeprefix(f"{variant}-"), int(seed)


def run_config(name: str, options: Options) -> TrainConfig:
    variant, stage, seed = split_name(name)
    words = [VARIANTS[variant][0], BASE, (STAGES | PLAIN_STAGES.get(variant, {}))[stage]]
    if stage == "quarter" and variant in ("cut", "softmax", "graph-ocl"):
        words.append(RAMP)
    config = replace(parse(" ".join(words)), seed=seed)
    if options.quick:  # the model of a quick run is another, and its images are too small to skip anything
        return make_quick(at_full_resolution(without_labels(config)))
    if len(chain(name)) == 1:
        return replace(config, teacher=TEACHERS.get(variant))
    before = str(options.runs.resolve() / chain(name)[-2])
    return replace(config, init_from=before, teacher=before if stage.startswith("self") else TEACHERS.get(variant))


def at_full_resolution(config: TrainConfig) -> TrainConfig:
    """Return the run with a decoder that skips nothing. Small images have too few doublings for that."""
    model = cast(Any, config.model)
    if not hasattr(model.decoder, "skipped_doublings"):
        return config
    return replace(config, model=replace(model, decoder=replace(model.decoder, skipped_doublings=0)))


def test_data(name: str, options: Options) -> dict[str, str]:
    """Return the test data of a run: every family that its variant is for, if it is in the table."""
    variant, stage, _ = split_name(name)
    if f"{variant}-{stage}" not in NAMES:
        return {}
    return {each: each for each in families(variant)}


def families(variant: str) -> tuple[str, ...]:
    return TEST_FAMILIES["plain" if VARIANTS[variant][0] == "clevr" else "textured"]


def table(results: dict[str, Any]) -> str:
    """Return the rows of what has been evaluated. Their steps are those of all stages."""
    results = {name: results[name] | {"steps": total_steps(name, results)} for name in results if results[name]["test"]}
    groups = (
        Group((label,), tuple(names), families(split_name(names[0])[0]))
        for kind, label in NAMES.items()
        if (names := [f"{kind}-{seed}" for seed in SEEDS if f"{kind}-{seed}" in results])
    )
    return make_table(("preset",), groups, METRICS, results)


def chain(name: str) -> list[str]:
    """Return the runs that lead to a run, and the run. Some variants begin with a stage of another.

    >>> chain("penalty-full-1")
    ['cut-quarter-1', 'penalty-half-1', 'penalty-full-1']
    """
    variant, stage, seed = split_name(name)
    stages = VARIANTS[variant][1]
    first = [f"{FIRST_STAGES[variant]}-{seed}"] if variant in FIRST_STAGES else []
    return first + [f"{variant}-{each}-{seed}" for each in stages[: stages.index(stage) + 1]]


def total_steps(name: str, results: Mapping[str, Any]) -> int:
    return sum(results[each]["steps"] for each in chain(name))


def curves(results: dict[str, Any]) -> dict[str, Any]:
    """Return the validation curves of each variant and seed over the steps of all stages."""
    found: dict[str, Any] = {}
    for variant, (_, stages, seeds) in VARIANTS.items():
        for seed in seeds:
            if f"{variant}-{stages[0]}-{seed}" in results:
                names = chain(f"{variant}-{stages[-1]}-{seed}")
                found[f"{variant}-{seed}"] = {"curve": join_curves(results, names)}
    return found


RUN_NAMES = tuple(
    f"{variant}-{stage}-{seed}"
    for variant, (_, stages, seeds) in VARIANTS.items()
    for stage in stages
    for seed in seeds
)
STUDY = Study("progressive", RUN_NAMES, run_config, test_data, METRICS, table, curves=tuple(VARIANTS), joined=curves)


if __name__ == "__main__":
    run_study(STUDY, tyro.cli(Options))
