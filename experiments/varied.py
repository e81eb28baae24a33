"""Varied scenes and augmentation: what they give a model on scenes of another look, such as those of Blender.

    python -m experiments.varied --runs runs/varied --textured-renders DIR --plain-renders DIR
    python -m experiments.varied ... --match "textured-*"    # some of the runs
    python -m experiments.varied ... --quick                 # a few steps on a few small images

Preset `ours` on scenes that never repeat, three seeds and as many steps each, on textured and on plain scenes:

    as-is          the scenes of the family
    varied         varied scenes of the family
    augmented      the scenes of the family, and augmentation
    both           varied scenes, and augmentation

Every run is evaluated on test scenes of its family, varied and not, and on the last images of a folder of renders
(images/ and masks/), which is left out where there is none. Run the same command again to resume. docs/varied.json
collects the records, and the table of docs/varied.md is made of it.
"""

from __future__ import annotations

import fnmatch
import json
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

import tyro

from cutslots.files import write_atomically
from cutslots.training.config import TrainConfig
from experiments.pretraining import SEEDS, facts, spread, write_table
from experiments.table import parse

FAMILIES = ("textured", "plain")
COMMON = "--num-images endless --eval-every 1000 --num-eval-images 128"
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
NUM_RENDERS = 100  # the last images of a folder


@dataclass
class Options:
    runs: Path
    """Folder of the run folders."""
    docs: Path = Path("docs")
    """Folder of varied.json and varied.md."""
    textured_renders: Path | None = None
    """Folder of renders with images/ and masks/, for runs on textured scenes."""
    plain_renders: Path | None = None
    """The same for runs on plain scenes."""
    max_steps: int = 10_000
    """Steps of each run."""
    match: str = "*"
    """Only the runs whose names match this pattern, as in textured-both-0."""
    num_images: int = 500
    """Test scenes of each kind."""
    quick: bool = False
    """A few steps on a few small images."""


def main(options: Options) -> None:
    for name, config in all_runs(options).items():
        run_one(options.runs / name, config, options)
    results = collect(options)
    write_atomically(options.docs / "varied.json", json.dumps(results, indent=1).encode())
    write_table(options.docs / "varied.md", table(results))
    print(f"wrote {options.docs / 'varied.json'} and the table in {options.docs / 'varied.md'}")


# ---------------------------------------------------------------------------------------------------------------- runs


def run_names() -> list[str]:
    return [f"{family}-{method}-{seed}" for family in FAMILIES for method in METHODS for seed in SEEDS]


def all_runs(options: Options) -> dict[str, TrainConfig]:
    """Return the runs that match, by the names of their folders."""
    return {name: run_config(name, options) for name in run_names() if fnmatch.fnmatch(name, options.match)}


def run_config(name: str, options: Options) -> TrainConfig:
    family, rest = name.split("-", 1)
    method, seed = rest.rsplit("-", 1)
    words = f"ours --data {family} {COMMON} {METHODS[method]} --max-steps {options.max_steps} --seed {seed}"
    config = parse(words)
    return make_quick(config) if options.quick else config


def make_quick(config: TrainConfig) -> TrainConfig:
    """Return the run with a few steps on a few small images."""
    model: Any = config.model
    encoder = replace(model.encoder, channels=8, kernel_sizes=(3, 3), pyramid_levels=1)
    few: dict[str, Any] = {"max_steps": 4, "batch_size": 4, "eval_every": 2, "num_eval_images": 4}
    return replace(config, model=replace(model, image_size=(16, 16), encoder=encoder), **few, compile="off")


def run_one(folder: Path, config: TrainConfig, options: Options) -> None:
    """Train a run, or resume it, and evaluate it on what has not been evaluated."""
    from cutslots.devices import make_fabric
    from cutslots.evaluation.evaluate import evaluate
    from cutslots.training.loop import train

    if not (folder / "done").is_file():
        train(replace(config, out=folder, checkpoint_minutes=2.0))
        write_atomically(folder / "done", json.dumps(facts(folder)).encode())
    fabric = make_fabric("auto", 1, 1, "32-true")
    for name, text in test_data(folder.name.partition("-")[0], options).items():
        if scores(folder, name) is None:
            evaluate(str(folder), (text,), folder / "evaluation" / name, "test", options.num_images, fabric)


def test_data(family: str, options: Options) -> dict[str, str]:
    """Return the test data of a family by name, as texts of --data."""
    renders = {"textured": options.textured_renders, "plain": options.plain_renders}[family]
    found = {"built-in": family, "varied": f"{family}:variation=v1"}
    return (
        found if renders is None else found | {"renders": str(last_images(renders, options.runs / "renders" / family))}
    )


def last_images(source: Path, folder: Path) -> Path:
    """Return a folder of links to the last images, and their masks, of another."""
    images = sorted((source / "images").iterdir())[-NUM_RENDERS:]
    if not images:
        raise ValueError(f"{source / 'images'} is empty; expected images")
    for image in images:
        for kind, file in (("images", image), ("masks", source / "masks" / f"{image.stem}.png")):
            (folder / kind).mkdir(parents=True, exist_ok=True)
            link = folder / kind / file.name
            if not link.is_symlink():
                link.symlink_to(file.resolve(strict=True))
    return folder


# ------------------------------------------------------------------------------------------------------------- results


def scores(folder: Path, name: str) -> dict[str, Any] | None:
    """Return the metrics of a run on test data, or None if it has not been evaluated. Paths are left out."""
    file = folder / "evaluation" / name / "results.json"
    if not file.is_file():
        return None
    (found,) = json.loads(file.read_text())["results"].values()
    return {key: found[key] for key in ("num_images", *METRICS)}


def collect(options: Options) -> dict[str, Any]:
    """Return the records of all runs that are done, by the names of their folders."""
    results = {}
    for name in run_names():
        folder = options.runs / name
        if (folder / "done").is_file():
            found = {data: scores(folder, data) for data in TEST_DATA}
            test = {data: values for data, values in found.items() if values is not None}
            results[name] = json.loads((folder / "done").read_text()) | {"test": test}
    return results


def table(results: dict[str, Any]) -> str:
    """Return a row for each family, method and test data: means over seeds, and the smallest and the largest value."""
    heads = ["family", "trained on scenes", "evaluated on", "seeds", "steps", *METRICS.values()]
    rows = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for family in FAMILIES:
        for method, name in NAMES.items():
            runs = [results.get(f"{family}-{method}-{seed}", {"test": {}}) for seed in SEEDS]
            for data in TEST_DATA:
                found = [run for run in runs if data in run["test"]]
                cells = [family, name, data, str(len(found)) if found else "not run"]
                cells += [f"{mean(run['steps'] for run in found):,.0f}"] if found else [""]
                cells += [spread([run["test"][data][metric] for run in found]) for metric in METRICS]
                rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    main(tyro.cli(Options))
