"""Train and evaluate every run behind docs/results.md. Run the same command again to resume.

    python -m experiments.table --runs runs/table --docs docs        # trains and evaluates what is missing, writes
    python -m experiments.table ... --jobs 8 --stop-after 9          # eight runs at a time on one GPU, for nine minutes
    python -m experiments.table ... --only ablations                 # one group of runs
    python -m experiments.table ... --quick                          # a few steps on a few small images, to try it all

The groups:

    paper              the paper's presets; a run may take several commands (--stop-after)
    partition          the cut and the no-cut ablation in the paper's textured model at 64x64, three seeds
    temperature        the two readings of the paper's temperature of the combined slots
    slot_attention_lr  learning rates and warm-ups of Slot Attention, 4,000 steps, evaluated on validation scenes
    ablations          one option changed at a time, in a small network, three seeds

A run is a command line of `cutslots train` (see `cutslots.training.options`). Its folder holds its whole record:
run.json, metrics.jsonl, machine.json, evaluation/results.json. Finished runs are skipped. docs/results.json collects
the records, and experiments/results.py makes the tables and figures of docs/results.md from it.
"""

from __future__ import annotations

import datetime
import fnmatch
import functools
import json
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import tyro

from cutslots.data.text import data_text
from cutslots.files import read_lines, write_atomically
from cutslots.training.config import TrainConfig
from cutslots.training.options import parse_train
from experiments.jobs import Process, run_processes, start_process
from experiments.study import SEEDS, make_quick

Group = Literal["paper", "partition", "temperature", "slot_attention_lr", "ablations"]
TEST_FAMILIES = {"plain": ("plain",), "textured": ("textured", "ood", "camo")}  # by the family of the training data
PAPER_TEXTURED = (
    "clevrtex --num-images 24000 --lr-decay-steps 8000 --max-steps 16000 --eval-every 2000 "
    "--data.texture-ramp-start 4000 --data.texture-ramp-end 9000"
)
PAPER = {  # command lines of the paper's presets at full resolution, with their seeds; others: progressive.py
    "clevr-plain": ("clevr --num-images 24000 --lr-decay-steps 15000 --max-steps 30000", (0,)),
    "clevrtex-textured": (PAPER_TEXTURED, SEEDS),
}
# A quarter of the pixels and 8 slots for 3 to 6 objects: twelve times as fast as clevrtex at 128x128.
PARTITION_BASE = (
    "clevrtex --image-size 64 64 --data textured:3-6 --slots.num-slots 8 --num-images 24000 --max-steps 10000 "
    "--lr-decay-steps 5000 --data.texture-ramp-start 2000 --data.texture-ramp-end 5000"
)
PARTITION = {"cut": "", "softmax": "--slots.partition softmax"}
FIRST_READING = "--slots.partition.background-temperature 0.1 --slots.partition.combined-temperature None"
SECOND_READING = "--slots.partition.background-temperature 0.5 --slots.partition.combined-temperature 0.1"
TEMPERATURE = {  # the other reading on textured scenes is that of the group `partition`
    "background-plain": (f"tiny --precision 32-true --compile off {FIRST_READING}", range(4)),
    "combined-plain": (f"tiny --precision 32-true --compile off {SECOND_READING}", range(4)),
    "background-textured": (f"{PARTITION_BASE} {FIRST_READING}", SEEDS),
}
# Preset `ours` as it was before it got mask consistency.
NO_CONSISTENCY = "--loss.mask-consistency 0 --loss.mask-consistency-start 0"
BASE = f"ours {NO_CONSISTENCY}"
# The best of the sweep SLOT_ATTENTION_LR by ARI-FG of decoder masks; the reference has 4e-4.
SLOT_ATTENTION = "--slots slot-attention --lr 2e-4 --warmup-steps 200"
SLOT_ATTENTION_LR = {  # the learning rate of preset `ours` was chosen for cuts; the reference's is 4e-4
    f"lr-{lr}-warmup-{warmup}": f"--slots slot-attention --lr {lr} --warmup-steps {warmup}"
    for lr in ("1e-4", "2e-4", "4e-4", "1e-3")
    for warmup in (200, 2000)
}
SWEEP_SEED = 8  # no result uses it
SWEEP = f"{BASE} --num-images 24000 --max-steps 4000 --eval-every 500 --num-eval-images 128"
ABLATION_BASE = (
    "tiny --data textured:3-6 --batch-size 32 --max-steps 2000 --num-images 20000 --slots.num-slots 8 --lr 8e-4 "
    "--warmup-steps 200 --lr-decay-steps 2000 --eval-every 250 --num-eval-images 128 --compile off"
)
ABLATIONS = {
    "base": "",
    "softmax": "--slots.partition softmax",
    "min-cut": "--slots.partition min-cut --slots.partition.gamma 1",
    "min-cut-ramp": "--slots.partition min-cut --slots.partition.gamma 1 --slots.partition.initial-capacity 0.05 "
    "--slots.partition.capacity-ramp-steps 1000",
    "min-cut-straight-through": "--slots.partition min-cut --slots.partition.gamma 1 "
    "--slots.partition.straight-through",
    "reach-2": "--slots.partition.reach 2",
    "reach-4": "--slots.partition.reach 4",
    "reach-8": "--slots.partition.reach 8",
    "temperature-0.2": "--slots.partition.temperature 0.2",
    "temperature-1": "--slots.partition.temperature 1",
    "gamma-0.1": "--slots.partition.gamma 0.1",
    "gamma-2": "--slots.partition.gamma 2",
    "mask-mean": "--slots.pool mask_mean",
    "background-none": "--slots.partition.background none",
    "relu-weights": "--slots.partition.no-signed-weights",
    "relative-positions": "--slots.relative-positions",
    "relative-positions-pyramid": "--slots.relative-positions --encoder.pyramid-levels 3",
    "spatial-broadcast": "--decoder spatial-broadcast --decoder.channels 64 --decoder.extra-layers 1",
    "feature-dim-64": "--slots.feature-dim 64",
    "lr-4e-4": "--lr 4e-4",
    "batch-size-64": "--batch-size 64",
    "plain-base": "--data plain:3-6",
    "plain-softmax": "--data plain:3-6 --slots.partition softmax",
}
FIXED_GRIDS = {  # test data by the network whose slots the fixed-grid baseline has as cells
    BASE: ("plain", "textured", "ood", "camo"),
    ABLATION_BASE: ("plain:3-6", "textured:3-6", "camo:3-6"),
}


@dataclass(frozen=True)
class Run:
    group: Group
    config: TrainConfig
    test_data: tuple[str, ...]  # evaluated on the test split of each


@dataclass
class Options:
    runs: Path
    """Folder of the run folders."""
    docs: Path = Path("docs")
    """Folder of results.json and results.md."""
    only: tuple[Group, ...] = get_args(Group)
    """Groups of runs."""
    match: str = "*"
    """Only the runs whose names match this pattern, as in "paper/clevrtex-*"."""
    jobs: int = 1
    """Runs at a time, sharing the device."""
    stop_after: float | None = None
    """Minutes after which running processes save their state and stop. Run the same command again to resume."""
    num_images: int = 1000
    """Images of each test split to evaluate on."""
    write: bool = True
    """Write results.json, the tables and the figures."""
    quick: bool = False
    """A few steps on a few small images."""
    one: str | None = None
    """Train and evaluate only this run, in this process."""


def main(options: Options) -> None:
    if options.one is not None:
        runs = all_runs(options, [group for group in options.only if options.one.startswith(f"{group}/")])
        if options.one not in runs:
            sys.exit(f"--one is {options.one!r}; expected a run, as in {next(iter(runs), 'ablations/base-0')}")
        run_one(options.runs / options.one, runs[options.one], options)
        return
    runs = {name: run for name, run in all_runs(options, options.only).items() if fnmatch.fnmatch(name, options.match)}
    finished = run_all(runs, options)
    if options.write:
        from experiments.results import write_results

        evaluate_fixed_grid(options.runs / "fixed_grid.json", options)
        write_results(options.runs, options.docs, list(all_runs(options)))
    if not finished:
        sys.exit("some runs are not finished; run the same command again to resume")


# ---------------------------------------------------------------------------------------------------------------- runs


def all_runs(options: Options, groups: Sequence[str] = get_args(Group)) -> dict[str, Run]:
    """Return every run of these groups by the name of its folder. To parse the command lines of all takes seconds."""
    runs = {name: run for group in groups for name, run in GROUPS[group](options).items()}
    if options.quick:
        return {name: replace(run, config=make_quick(run.config)) for name, run in runs.items()}
    return runs


def paper(options: Options) -> dict[str, Run]:
    """Return the runs of the paper's presets."""
    return {
        f"paper/{name}-{seed}": Run("paper", replace(parse(words), seed=seed), TEST_FAMILIES[name.rpartition("-")[2]])
        for name, (words, seeds) in PAPER.items()
        for seed in seeds
    }


def partition(options: Options) -> dict[str, Run]:
    """Return the runs of the cut and the no-cut ablation in the paper's textured model."""
    configs = {name: parse(f"{PARTITION_BASE} {words}") for name, words in PARTITION.items()}
    return {
        f"partition/{name}-{seed}": Run("partition", replace(config, seed=seed), ("textured:3-6", "camo:3-6"))
        for name, config in configs.items()
        for seed in SEEDS
    }


def temperature(options: Options) -> dict[str, Run]:
    """Return the runs of both readings of the temperature of the combined slots."""
    test_data: dict[str, tuple[str, ...]] = {"plain": ("plain:2-5",), "textured": ("textured:3-6", "camo:3-6")}
    return {
        f"temperature/{name}-{seed}": Run(
            "temperature", replace(parse(words), seed=seed), test_data[name.rpartition("-")[2]]
        )
        for name, (words, seeds) in TEMPERATURE.items()
        for seed in seeds
    }


def slot_attention_lr(options: Options) -> dict[str, Run]:
    """Return the runs of Slot Attention with other learning rates and warm-ups."""
    runs = {}
    for name, words in SLOT_ATTENTION_LR.items():
        config = replace(parse(f"{SWEEP} {words}"), seed=SWEEP_SEED)
        runs[f"slot_attention_lr/{name}-{SWEEP_SEED}"] = Run("slot_attention_lr", config, ())
    return runs


def ablations(options: Options) -> dict[str, Run]:
    """Return the ablations: one option of a small network at 64x64 changed at a time."""
    runs: dict[str, Run] = {}
    for name, words in ABLATIONS.items():
        config = parse(f"{ABLATION_BASE} {words}")
        family = data_text(config.data).partition(":")[0]
        test_data = tuple(f"{each}:3-6" for each in TEST_FAMILIES[family] if each != "ood")
        runs |= {f"ablations/{name}-{seed}": Run("ablations", replace(config, seed=seed), test_data) for seed in SEEDS}
    return runs


GROUPS: dict[str, Callable[[Options], dict[str, Run]]] = {
    "paper": paper,
    "partition": partition,
    "temperature": temperature,
    "slot_attention_lr": slot_attention_lr,
    "ablations": ablations,
}


@functools.cache
def parse(words: str) -> TrainConfig:
    """Return the config of a command line of `cutslots train`. The last value of a repeated option counts."""
    return parse_train(words.split())


# ------------------------------------------------------------------------------------------------------------- one run


def run_one(folder: Path, run: Run, options: Options) -> None:
    """Train a run, or resume it, and evaluate it."""
    from cutslots.devices import make_fabric
    from cutslots.evaluation.evaluate import evaluate
    from cutslots.training.loop import train

    if not is_imported(folder):
        try:
            train(replace(run.config, out=folder, cache_dir=options.runs / "cache", checkpoint_minutes=2.0))
        finally:  # a run that is stopped is resumed later, perhaps on another machine
            if folder.is_dir():
                write_atomically(folder / "machine.json", json.dumps(machine_facts()).encode())
    fabric = make_fabric("auto", 1, 1, "32-true")
    if run.test_data:
        evaluate(str(folder), run.test_data, folder / "evaluation", "test", options.num_images, fabric)
    write_atomically(folder / "done", b"")


def is_done(folder: Path) -> bool:
    return (folder / "done").is_file()


def is_imported(folder: Path) -> bool:
    """Return whether the weights were trained on another machine, where their training state remained."""
    return (folder / "model.safetensors").is_file() and not (folder / "state.pt").is_file()


def machine_facts() -> dict[str, str]:
    """Return the device, the versions and the date. The order in which SciPy pairs masks is part of mIoU."""
    import scipy
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{torch.get_num_threads()} CPU threads"
    facts = {"device": device, "torch": torch.__version__, "scipy": scipy.__version__}
    facts["python"] = platform.python_version()
    return facts | {"date": f"{datetime.date.today()}"}


def evaluate_fixed_grid(file: Path, options: Options) -> None:
    """Evaluate the fixed-grid baseline: the same partition of every image into as many cells as there are slots."""
    import torch
    from scipy.cluster.vq import kmeans2

    from cutslots.data.open import open_dataset
    from cutslots.evaluation import metrics

    request = [options.num_images, options.quick]
    if file.is_file() and json.loads(file.read_text()).get("request") == request:
        return
    results: dict[str, Any] = {"request": request}
    for words, test_data in FIXED_GRIDS.items():
        model = (make_quick(parse(words)) if options.quick else parse(words)).model
        num_slots, (height, width) = model.slots.num_slots, model.image_size
        pixels = torch.cartesian_prod(torch.arange(height).double(), torch.arange(width).double()).numpy()
        cells = torch.from_numpy(kmeans2(pixels, num_slots, iter=50, minit="++", seed=0)[1]).view(1, height, width)
        for family in test_data:
            rows = metrics.MetricRows()
            data = open_dataset(family, "test", (height, width), options.num_images)
            for indices in torch.arange(len(data)).split(32):
                truth = data.get_batch(indices.numpy(), torch.device("cpu")).mask
                rows.add(indices.tolist(), metrics.image_metrics(truth, cells.expand_as(truth), num_slots))
            results[family] = {"num_slots": num_slots, "num_images": len(data), **rows.means()}
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, json.dumps(results).encode())


# ------------------------------------------------------------------------------------------------------------ all runs


def run_all(runs: dict[str, Run], options: Options) -> bool:
    """Run what is missing, each run in a process of its own, `jobs` at a time. Return whether all are done."""
    missing = [name for name in runs if not is_done(options.runs / name)]
    started: set[str] = set()

    def start_one(name: str) -> Process:
        started.add(name)
        return start(name, options)

    def is_ready(name: str) -> bool:
        """Return whether no running process compiles the same network: to wait is faster, because of the disk cache."""
        config = runs[name].config
        same = [other for other in started if runs[other].config.model == config.model and config.compile != "off"]
        return not same or any((options.runs / other / "metrics.jsonl").is_file() for other in same)

    def ended(name: str, code: int, waiting: int) -> None:
        started.discard(name)
        report(name, code, options.runs, f"{waiting} waiting")

    return run_processes(missing, start_one, is_ready, ended, options.jobs, options.stop_after)


def start(name: str, options: Options) -> Process:
    command = [sys.executable, "-m", "experiments.table", "--one", name, "--runs", str(options.runs)]
    command += ["--num-images", str(options.num_images)]
    command += ["--quick"] if options.quick else []
    return start_process(command, options.runs / "logs" / f"{name.replace('/', '-')}.txt", options.jobs)


def report(name: str, code: int, runs: Path, rest: str) -> None:
    """Print a line about a run that has ended: its last step, its last metrics, whether it failed."""
    lines = read_lines(runs / name / "metrics.jsonl")
    metrics = next((line["val"] for line in reversed(lines) if "ari_fg" in line.get("val", {})), None)
    step = next((line["step"] for line in reversed(lines)), 0)
    scores = f"ARI-FG {100 * metrics['ari_fg']:.1f}, mIoU {100 * metrics['miou']:.1f}" if metrics else "no metrics"
    outcome = "" if code == 0 else f" FAILED ({code}), see {runs / 'logs' / name.replace('/', '-')}.txt"
    print(f"{name}: step {step:,}, {scores}{outcome}; {rest}", flush=True)


if __name__ == "__main__":
    main(tyro.cli(Options))
