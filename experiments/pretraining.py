"""Pixels or own features: what discovery gains from reconstructing features that `cutslots pretrain` has learned.

    python -m experiments.pretraining --runs runs/pretraining --measure      # how long a step of each kind of run takes
    python -m experiments.pretraining --runs runs/pretraining --docs docs    # trains and evaluates what is missing
    python -m experiments.pretraining ... --jobs 12 --stop-after 9           # twelve runs at a time, for nine minutes
    python -m experiments.pretraining ... --match "*-cut-*"                  # some of the runs
    python -m experiments.pretraining ... --quick                            # a few steps on a few small images

Every method has the same training data, the same slots, three seeds and the same time:

    pixels       preset `ours` for all of the time
    features     preset `resnet` of `cutslots pretrain` for a share of the time, then preset `ours` with the frozen
                 encoder and a decoder of features for the rest. All runs of one seed and objective share the encoder,
                 and each is charged for its time

with the cut and with Slot Attention, trained on textured scenes and evaluated on textured, ood and camo. The time of a
run is its number of steps times the duration of a step alone on the device, which `--measure` writes to steps.json. So
runs may share the device. Run the same command again to resume. docs/pretraining.json collects the records, and the
table of docs/pretraining.md is made of it.
"""

from __future__ import annotations

import fnmatch
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import tyro

from cutslots.files import read_lines, write_atomically
from cutslots.training.config import PretrainConfig, RunConfig, TrainConfig
from cutslots.training.options import parse_pretrain
from experiments.jobs import run_processes, start_process
from experiments.study import SEEDS, facts, facts_of_device, make_quick, print_end, spread, write_table
from experiments.table import NO_CONSISTENCY, parse

OBJECTIVES = {"simclr": "--objective simclr", "simmim": "--objective simmim --objective.mask-size 8"}
SLOTS = {"cut": "", "slot-attention": "--slots slot-attention --lr 4e-4 --warmup-steps 2000"}
SLOT_NAMES = {"cut": "cut", "slot-attention": "Slot Attention"}
TARGETS = ("pixels", *OBJECTIVES)
NUM_OBJECTS = "3-6"
TEST_DATA = ("textured", "ood", "camo")
# Not compiled: a dozen runs at a time would wait for the compiler. CUDA graphs replay their steps.
COMMON = "--image-size 64 64 --num-images 24000 --eval-every 2500 --num-eval-images 128 --compile off"
ENCODER = f"resnet --data textured:{NUM_OBJECTS} {COMMON}"
DISCOVERY = (
    f"ours --data textured:{NUM_OBJECTS} --data.texture-ramp-start 2000 --data.texture-ramp-end 5000 "
    f"--slots.num-slots 8 {COMMON}"
)
FEATURES = "--encoder pretrained --decoder mlp --decoder.hidden-dims 256 256 --loss feature-mse"
MEASURED_STEPS, WARMUP_STEPS = 240, 80  # of --measure; the first ones choose algorithms and capture a graph
METRICS = {"ari_fg": "ARI-FG", "refined_ari_fg": "ARI-FG, refined", "refined_miou": "mIoU, refined"}


class Method(NamedTuple):
    target: str  # what is reconstructed: pixels, or the features of an objective
    slots: str


METHODS = {f"{target}-{slots}": Method(target, slots) for target in TARGETS for slots in SLOTS}
KINDS = (*(f"encoder-{o}" for o in OBJECTIVES), *(f"{t}-{s}" for t in ("pixels", "features") for s in SLOTS))


@dataclass
class Options:
    runs: Path
    """Folder of the run folders."""
    docs: Path = Path("docs")
    """Folder of pretraining.json and pretraining.md."""
    max_minutes: float = 1.0
    """Training time of each method alone on the device, pre-training included."""
    pretraining_share: float = 0.5
    """Share of this time for pre-training, for methods that reconstruct features."""
    match: str = "*"
    """Only the runs of discovery whose names match this pattern, and the encoders that they need."""
    num_images: int = 1000
    """Images of each test split to evaluate on."""
    jobs: int = 1
    """Runs at a time, sharing the device."""
    stop_after: float | None = None
    """Minutes after which running processes save their state and stop. Run the same command again to resume."""
    measure: bool = False
    """Measure the duration of a step of each kind of run, and write steps.json."""
    write: bool = True
    """Write pretraining.json and the table."""
    one: str | None = None
    """Train and evaluate only this run, in this process."""
    quick: bool = False
    """A few steps on a few small images."""


def main(options: Options) -> None:
    options.runs = options.runs.resolve()  # a model names the folder of its encoder
    if options.measure:
        measure(options)
        return
    if options.one is not None:
        run_one(options.runs / options.one, all_runs(replace(options, match="*"))[options.one], options)
        return
    complete = run_all(options)
    if options.write:
        write(options)
    if not complete:
        sys.exit("some runs are not done; run the same command again")


def write(options: Options) -> None:
    results = collect(options)
    write_atomically(options.docs / "pretraining.json", json.dumps(results, indent=1).encode())
    write_table(options.docs / "pretraining.md", table(results))
    print(f"wrote {options.docs / 'pretraining.json'} and the table in {options.docs / 'pretraining.md'}")


# ---------------------------------------------------------------------------------------------------------------- runs


def all_runs(options: Options) -> dict[str, RunConfig]:
    """Return every run by the name of its folder, encoders before the runs that need them."""
    steps = read_steps(options)
    chosen = [(m, s) for m in METHODS for s in SEEDS if fnmatch.fnmatch(f"{m}-{s}", options.match)]
    needed = {f"encoder-{METHODS[m].target}-{s}": (METHODS[m].target, s) for m, s in chosen if has_encoder(m)}
    runs: dict[str, RunConfig] = {name: encoder_config(*key, options, steps) for name, key in needed.items()}
    return runs | {f"{m}-{s}": discovery_config(m, s, options, steps) for m, s in chosen}


def read_steps(options: Options) -> dict[str, float]:
    """Return the seconds of a step of each kind of run, as `measure` has written them."""
    if options.quick or options.measure:
        return dict.fromkeys(KINDS, 1.0)
    file = options.runs / "steps.json"
    if not file.is_file():
        sys.exit(f"{file} is missing; run the command with --measure first, on an idle device")
    found: dict[str, float] = json.loads(file.read_text())["seconds"]
    return found


def kind_of(method: str) -> str:
    """Return whose step is as long: features of all objectives have the same network."""
    return method if not has_encoder(method) else f"features-{METHODS[method].slots}"


def has_encoder(method: str) -> bool:
    return METHODS[method].target != "pixels"


def encoder_config(objective: str, seed: int, options: Options, steps: dict[str, float]) -> PretrainConfig:
    """Return the pre-training run of an encoder."""
    config = parse_pretrain(f"{ENCODER} {OBJECTIVES[objective]} --seed {seed}".split())
    seconds = 60 * options.pretraining_share * options.max_minutes
    config = replace(config, max_steps=max(1, round(seconds / steps[f"encoder-{objective}"])))
    return make_quick(config) if options.quick else config


def discovery_config(method: str, seed: int, options: Options, steps: dict[str, float]) -> TrainConfig:
    """Return the training run of a method: what is left of the time after pre-training."""
    words = f"{DISCOVERY} {SLOTS[METHODS[method].slots]}"
    seconds = 60 * options.max_minutes
    if has_encoder(method):
        words += f" {FEATURES} --encoder.checkpoint {options.runs / f'encoder-{METHODS[method].target}-{seed}'}"
        seconds *= 1 - options.pretraining_share
    else:
        words += f" {NO_CONSISTENCY}"  # preset `ours` got it after these runs; a loss of features has none
    config = replace(parse(words), seed=seed, max_steps=max(1, round(seconds / steps[kind_of(method)])))
    return make_quick(config) if options.quick else config


def measure(options: Options) -> None:
    """Train each kind of run for a few steps, alone, and write the duration of a step."""
    from cutslots.training.loop import train
    from cutslots.training.pretrain import pretrain

    options.runs.mkdir(parents=True, exist_ok=True)
    found: dict[str, float] = {}
    configs = all_runs(replace(options, match="*-0"))
    with tempfile.TemporaryDirectory() as folder:
        for name, config in configs.items():
            kind = name.removesuffix("-0")
            kind = kind if isinstance(config, PretrainConfig) else kind_of(kind)
            if kind in found:
                continue
            out = Path(folder) / name
            limits: dict[str, Any] = {"max_steps": MEASURED_STEPS, "num_images": 512, "eval_every": MEASURED_STEPS}
            config = replace(config, **({} if options.quick else limits), out=out, num_eval_images=64)
            if isinstance(config, PretrainConfig):
                pretrain(config)
            else:
                assert isinstance(config, TrainConfig)
                train(_with_encoder(config, Path(folder)))
            found[kind] = step_seconds(read_lines(out / "metrics.jsonl"))
    write_atomically(options.runs / "steps.json", json.dumps({"seconds": found, **facts_of_device()}).encode())
    print(json.dumps(found))


def _with_encoder(config: TrainConfig, folder: Path) -> TrainConfig:
    """Return the run with the encoder of the same name in another folder."""
    encoder: Any = config.model.encoder
    if not hasattr(encoder, "checkpoint"):
        return config
    encoder = replace(encoder, checkpoint=str(folder / Path(encoder.checkpoint).name))
    return replace(config, model=replace(config.model, encoder=encoder))


def step_seconds(lines: list[dict[str, Any]]) -> float:
    """Return the duration of a step after the first ones."""
    logged = [line for line in lines if "loss" in line]
    first = next((line for line in logged if line["step"] >= WARMUP_STEPS), {"step": 0, "seconds": 0.0})
    last = logged[-1]
    return float((last["seconds"] - first["seconds"]) / max(1, last["step"] - first["step"]))


def run_all(options: Options) -> bool:
    """Run what is missing, in processes if several run at a time or are to stop. Return whether all are done."""
    configs = all_runs(options)
    if options.jobs == 1 and options.stop_after is None:
        for name, config in configs.items():
            run_one(options.runs / name, config, options)
        return True
    flags = ["--max-minutes", str(options.max_minutes), "--pretraining-share", str(options.pretraining_share)]
    flags += ["--num-images", str(options.num_images), *(["--quick"] if options.quick else [])]
    command = [sys.executable, "-m", "experiments.pretraining", "--runs", str(options.runs), *flags, "--one"]

    def start(name: str) -> subprocess.Popen[bytes]:
        return start_process([*command, name], options.runs / "logs" / f"{name}.txt", options.jobs)

    def is_ready(name: str) -> bool:
        encoder: Any = getattr(getattr(configs[name], "model", None), "encoder", None)
        return not hasattr(encoder, "checkpoint") or (Path(encoder.checkpoint) / "done").is_file()

    missing = [name for name in configs if not (options.runs / name / "done").is_file()]
    return run_processes(missing, start, is_ready, print_end, options.jobs, options.stop_after)


def run_one(folder: Path, config: RunConfig, options: Options) -> None:
    """Train a run, or resume it, and evaluate it if it is a model."""
    from cutslots.devices import make_fabric
    from cutslots.evaluation.evaluate import evaluate
    from cutslots.training.loop import train
    from cutslots.training.pretrain import pretrain

    if (folder / "done").is_file():
        return
    config = replace(config, out=folder, cache_dir=options.runs / "cache", checkpoint_minutes=2.0)
    if isinstance(config, PretrainConfig):
        pretrain(config)
    else:
        assert isinstance(config, TrainConfig)
        train(config)
        fabric = make_fabric("auto", 1, 1, "32-true")
        data = tuple(f"{name}:{NUM_OBJECTS}" for name in TEST_DATA)
        evaluate(str(folder), data, folder / "evaluation", "test", options.num_images, fabric)
    write_atomically(folder / "done", json.dumps(facts(folder)).encode())


# ------------------------------------------------------------------------------------------------------------- results


def collect(options: Options) -> dict[str, Any]:
    """Return the records of all runs that are done, by the names of their folders."""
    names = [
        *(f"encoder-{target}-{s}" for target in OBJECTIVES for s in SEEDS),
        *(f"{m}-{s}" for m in METHODS for s in SEEDS),
    ]
    results = {}
    for name in names:
        folder = options.runs / name
        if (folder / "done").is_file():
            results[name] = json.loads((folder / "done").read_text())
            scores = folder / "evaluation" / "results.json"
            if scores.is_file():
                found = json.loads(scores.read_text())["results"]
                results[name] |= {"test": {data.partition(":")[0]: values for data, values in found.items()}}
    return results


def table(results: dict[str, Any]) -> str:
    """Return a row for each method and dataset: means over seeds, and the smallest and the largest value."""
    heads = ["reconstructs", "slots", "data", "seeds", "steps", *METRICS.values()]
    rows = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for name, method in METHODS.items():
        found = [results[f"{name}-{seed}"] for seed in SEEDS if f"{name}-{seed}" in results]
        target = "pixels" if method.target == "pixels" else f"features, `{method.target}`"
        for data in TEST_DATA:
            cells = [target, SLOT_NAMES[method.slots], data, str(len(found)) if found else "not run"]
            cells += [f"{mean(run['steps'] for run in found):,.0f}"] if found else [""]
            cells += [spread([run["test"][data][metric] for run in found]) for metric in METRICS]
            rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    main(tyro.cli(Options))
