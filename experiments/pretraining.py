"""Pixels or own features: what discovery gains from reconstructing features that `cutslots pretrain` has learned.

    python -m experiments.pretraining --runs runs/pretraining --docs docs    # trains and evaluates what is missing
    python -m experiments.pretraining ... --match "*-cut-*"                  # some of the runs
    python -m experiments.pretraining ... --quick                            # a few steps on a few small images

Every method has the same training data, scenes that never repeat, the same slots, three seeds and the same time:

    pixels       preset `ours` for all of the time
    features     preset `resnet` of `cutslots pretrain` for a share of the time, then preset `ours` with the frozen
                 encoder and a decoder of features for the rest. All runs of one seed and objective share the encoder,
                 and each is charged for its time

with the cut and with Slot Attention, trained on textured scenes and evaluated on textured, ood and camo. Run the same
command again to resume. docs/pretraining.json collects the records, and the table of docs/pretraining.md is made of it.
"""

from __future__ import annotations

import datetime
import fnmatch
import json
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import tyro

from cutslots.files import read_lines, write_atomically
from cutslots.training.config import PretrainConfig, RunConfig, TrainConfig
from cutslots.training.options import parse_pretrain, parse_train

SEEDS = (0, 1, 2)
UNLIMITED = 10**6  # steps of a run that is limited by time
OBJECTIVES = {"simclr": "--objective simclr", "simmim": "--objective simmim --objective.mask-size 16"}
SLOTS = {"cut": "", "slot-attention": "--slots slot-attention --lr 4e-4 --warmup-steps 2000"}
SLOT_NAMES = {"cut": "cut", "slot-attention": "Slot Attention"}
TARGETS = ("pixels", *OBJECTIVES)
TEST_DATA = ("textured", "ood", "camo")
COMMON = "--num-images endless --eval-every 1000 --num-eval-images 128"
# A grid of 32x32 positions: four times as many as those of a ViT at 224, and a quarter of those of the encoder.
FEATURES = "--encoder pretrained --encoder.pool 2 --decoder mlp --decoder.hidden-dims 256 256 --loss feature-mse"
METRICS = {"ari_fg": "ARI-FG", "refined_ari_fg": "ARI-FG, refined", "refined_miou": "mIoU, refined"}
START, END = "<!-- table -->\n", "<!-- end of table -->"


class Method(NamedTuple):
    target: str  # what is reconstructed: pixels, or the features of an objective
    slots: str


METHODS = {f"{target}-{slots}": Method(target, slots) for target in TARGETS for slots in SLOTS}


@dataclass
class Options:
    runs: Path
    """Folder of the run folders."""
    docs: Path = Path("docs")
    """Folder of pretraining.json and pretraining.md."""
    max_minutes: float = 20.0
    """Training time of each method, pre-training included."""
    pretraining_share: float = 0.5
    """Share of this time for pre-training, for methods that reconstruct features."""
    match: str = "*"
    """Only the runs of discovery whose names match this pattern, and the encoders that they need."""
    num_images: int = 1000
    """Images of each test split to evaluate on."""
    quick: bool = False
    """A few steps on a few small images."""


def main(options: Options) -> None:
    options.runs = options.runs.resolve()  # a model names the folder of its encoder
    for name, config in all_runs(options).items():
        run_one(options.runs / name, config, options)
    results = collect(options)
    write_atomically(options.docs / "pretraining.json", json.dumps(results, indent=1).encode())
    write_table(options.docs / "pretraining.md", results)
    print(f"wrote {options.docs / 'pretraining.json'} and the table in {options.docs / 'pretraining.md'}")


# ---------------------------------------------------------------------------------------------------------------- runs


def all_runs(options: Options) -> dict[str, RunConfig]:
    """Return every run by the name of its folder, encoders before the runs that need them."""
    chosen = [(m, s) for m in METHODS for s in SEEDS if fnmatch.fnmatch(f"{m}-{s}", options.match)]
    needed = {f"encoder-{METHODS[m].target}-{s}": (METHODS[m].target, s) for m, s in chosen if has_encoder(m)}
    runs: dict[str, RunConfig] = {name: encoder_config(*key, options) for name, key in needed.items()}
    return runs | {f"{m}-{s}": discovery_config(m, s, options) for m, s in chosen}


def has_encoder(method: str) -> bool:
    return METHODS[method].target != "pixels"


def encoder_config(objective: str, seed: int, options: Options) -> PretrainConfig:
    """Return the pre-training run of an encoder."""
    config = parse_pretrain(f"resnet --data textured {COMMON} {OBJECTIVES[objective]} --seed {seed}".split())
    minutes = options.pretraining_share * options.max_minutes
    config = replace(config, max_steps=UNLIMITED, max_minutes=minutes)
    return make_quick(config) if options.quick else config


def discovery_config(method: str, seed: int, options: Options) -> TrainConfig:
    """Return the training run of a method: what is left of the time after pre-training."""
    words = f"ours {COMMON} {SLOTS[METHODS[method].slots]} --seed {seed}"
    minutes = options.max_minutes
    if has_encoder(method):
        words += f" {FEATURES} --encoder.checkpoint {options.runs / f'encoder-{METHODS[method].target}-{seed}'}"
        minutes *= 1 - options.pretraining_share
    config = replace(parse_train(words.split()), max_steps=UNLIMITED, max_minutes=minutes)
    return make_quick(config) if options.quick else config


def make_quick(config: Any) -> Any:
    """Return the run with a few steps on a few small images."""
    few: dict[str, Any] = {"max_steps": 4, "batch_size": 4, "num_images": 8, "eval_every": 2, "num_eval_images": 4}
    config = replace(config, **few, max_minutes=None, compile="off")
    small_encoder = {"channels": 8, "kernel_sizes": (3, 3), "pyramid_levels": 1}
    if isinstance(config, TrainConfig):
        model: Any = replace(config.model, image_size=(16, 16))
        is_pixels = hasattr(model.encoder, "pyramid_levels")
        return replace(
            config, model=replace(model, encoder=replace(model.encoder, **small_encoder)) if is_pixels else model
        )
    objective = config.objective
    if hasattr(objective, "mask_size"):
        objective = replace(objective, mask_size=4)
    return replace(config, image_size=(16, 16), objective=objective, encoder=replace(config.encoder, **small_encoder))


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
        evaluate(str(folder), TEST_DATA, folder / "evaluation", "test", options.num_images, fabric)
    write_atomically(folder / "done", json.dumps(facts(folder)).encode())


def facts(folder: Path) -> dict[str, Any]:
    """Return the steps, seconds, device and date of a run, and its last validation metrics."""
    import torch

    lines = read_lines(folder / "metrics.jsonl")
    last = [line for line in lines if "loss" in line][-1]
    validation: dict[str, float] = next((line["val"] for line in reversed(lines) if "val" in line), {})
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{torch.get_num_threads()} CPU threads"
    found = {"steps": last["step"], "seconds": round(last["seconds"]), "device": device}
    return found | {"date": f"{datetime.date.today()}", "val": validation}


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
            results[name] |= {"test": json.loads(scores.read_text())["results"]} if scores.is_file() else {}
    return results


def write_table(path: Path, results: dict[str, Any]) -> None:
    """Replace the table between its two marks."""
    before, rest = path.read_text().split(START)
    after = rest.split(END)[1]
    write_atomically(path, (before + START + table(results) + END + after).encode())


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


def spread(values: list[float]) -> str:
    """Return the mean and the range of values in percent."""
    if not values:
        return ""
    low, middle, high = (100 * value for value in (min(values), mean(values), max(values)))
    return f"{middle:.1f}" if len(values) == 1 else f"{middle:.1f} ({low:.1f} to {high:.1f})"


if __name__ == "__main__":
    main(tyro.cli(Options))
