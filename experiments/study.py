"""Studies: runs of `cutslots train` that differ in a few options, the data each is evaluated on, and one table.

Every study has the same options. A run that is stopped is resumed by the same command. docs/NAME.json collects the
records, also of runs whose folders are elsewhere, and the table of docs/NAME.md is made of it.
"""

from __future__ import annotations

import contextlib
import datetime
import fnmatch
import io
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple, TypeVar

from cutslots.files import read_lines, write_atomically
from cutslots.models.refinement import DEFAULTS
from cutslots.modules.partition import CutPartitionConfig
from cutslots.modules.slots import CutSlotsConfig
from cutslots.training.config import PretrainConfig, RunConfig, TrainConfig
from experiments.jobs import Process, run_processes, start_process

SEEDS = (0, 1, 2)
NUM_RENDERS = 100  # the last images of a folder
# Options of the command, not of a run.
COMMAND_OPTIONS = frozenset(["docs", "match", "jobs", "stop_after", "write", "one", "quick", "figure", "tracks_figure"])
NUM_VIDEOS = 64  # at most, of test data that are videos: a video has many frames

Config = TypeVar("Config", bound=RunConfig)


@dataclass
class Options:
    runs: Path
    """Folder of the run folders."""
    docs: Path = Path("docs")
    """Folder of the record and the page with the table."""
    textured_renders: Path | None = None
    """Folder of renders with images/ and masks/, for runs on textured scenes."""
    plain_renders: Path | None = None
    """The same for runs on plain scenes."""
    match: str = "*"
    """Only the runs whose names match this pattern, as in textured-*-0."""
    num_images: int = 500
    """Test scenes of each kind."""
    jobs: int = 1
    """Runs at a time, sharing the device."""
    stop_after: float | None = None
    """Minutes after which running processes save their state and stop. Run the same command again to resume."""
    write: bool = True
    """Write the record and the table."""
    one: str | None = None
    """Train and evaluate only this run, in this process."""
    quick: bool = False
    """A few steps on a few small images."""


@dataclass(frozen=True)
class Study:
    name: str  # of the module, the record and the page
    run_names: tuple[str, ...]  # in the order in which they start
    config: Callable[[str, Any], TrainConfig]  # by name and options
    test_data: Callable[[str, Any], Mapping[str, str]]  # texts of --data by name
    metrics: Mapping[str, str]  # and their names in the table
    table: Callable[[dict[str, Any]], str]  # of the record
    associations: Mapping[str, str] = field(default_factory=dict)  # of videos over time, by the name of test data
    curves: tuple[str, ...] = ()  # runs, without their seeds, whose validation curves are drawn
    joined: Callable[[dict[str, Any]], dict[str, Any]] = dict  # maps the record to the curves to draw


def run_study(study: Study, options: Options) -> None:
    """Train and evaluate what is missing, then write the record and the table."""
    options = replace(options, runs=options.runs.resolve())
    if options.one is not None:
        run_one(study, options.one, options)
        return
    complete = run_all(study, options)
    results, docs = collect(study, options.runs), options.docs
    if options.write and results:
        results = with_earlier(study, results, docs / f"{study.name}.json")
        write_atomically(docs / f"{study.name}.json", json.dumps(results, indent=1).encode())
        write_table(docs / f"{study.name}.md", study.table(results))
        draw_curves(study.curves, study.joined(results), docs / "img" / f"{study.name}-curves.png")
        print(f"wrote {docs / f'{study.name}.json'} and the table in {docs / f'{study.name}.md'}")
    if not complete:
        sys.exit("some runs are not done; run the same command again")


def run_all(study: Study, options: Options) -> bool:
    """Run what is missing, in processes if several run at a time or are to stop. Return whether all are done."""
    names = fnmatch.filter(study.run_names, options.match)
    if options.jobs == 1 and options.stop_after is None:
        for name in names:
            run_one(study, name, options)
        return True
    command = [sys.executable, "-m", f"experiments.{study.name}", *flags(options), "--one"]

    def start(name: str) -> Process:
        return start_process([*command, name], options.runs / "logs" / f"{name}.txt", options.jobs)

    missing = [name for name in names if not is_complete(study, name, options)]
    needed = {name: needed_runs(study.config(name, options), options.runs) for name in missing}
    for name in missing:
        for folder in needed[name]:
            if folder.name not in missing and not (folder / "done").is_file():
                sys.exit(f"{name} needs {folder}, which is not done; expected --match to select it too")

    def is_ready(name: str) -> bool:
        return all((folder / "done").is_file() for folder in needed[name])

    return run_processes(missing, start, is_ready, print_end, options.jobs, options.stop_after)


def needed_runs(config: TrainConfig, runs: Path) -> list[Path]:
    """Return the folders of other runs that a run begins with or learns from."""
    given = (Path(each) for each in (config.init_from, config.teacher) if each is not None)
    return [path for path in given if path.parent == runs]


def print_end(name: str, code: int, waiting: int) -> None:
    print(f"{name}: {'done' if code == 0 else f'FAILED ({code})'}; {waiting} waiting", flush=True)


def flags(options: Options) -> list[str]:
    """Return the options of one run's process."""
    found = []
    for name, value in vars(options).items():
        if name not in COMMAND_OPTIONS and value is not None:
            found += [f"--{name.replace('_', '-')}", str(value)]
    return [*found, "--quick"] if options.quick else found


def run_one(study: Study, name: str, options: Options) -> None:
    """Train a run, or resume it, and evaluate it on what has not been evaluated."""
    from cutslots.devices import make_fabric
    from cutslots.evaluation.evaluate import evaluate
    from cutslots.training.loop import train

    folder = options.runs / name
    if not (folder / "done").is_file():
        config = replace(study.config(name, options), out=folder, cache_dir=options.runs / "cache")
        train(replace(config, checkpoint_minutes=2.0))
        write_atomically(folder / "done", json.dumps(facts(folder)).encode())
    fabric = make_fabric("auto", 1, 1, "32-true")
    for data, text in study.test_data(name, options).items():
        if scores(folder, data, study.metrics) is None:
            count = min(options.num_images, NUM_VIDEOS) if text.partition(":")[0] == "moving" else options.num_images
            out, association = folder / "evaluation" / data, study.associations.get(data)
            evaluate(str(folder), (text,), out, "test", count, fabric, association)


def is_complete(study: Study, name: str, options: Options) -> bool:
    """Return whether a run is trained and evaluated on all of its test data."""
    folder = options.runs / name
    evaluated = (scores(folder, data, study.metrics) is not None for data in study.test_data(name, options))
    return (folder / "done").is_file() and all(evaluated)


def facts(folder: Path) -> dict[str, Any]:
    """Return the steps, seconds, device and date of a run, and its last validation metrics."""
    lines = read_lines(folder / "metrics.jsonl")
    last = [line for line in lines if "loss" in line][-1]
    validation: dict[str, float] = next((line["val"] for line in reversed(lines) if "val" in line), {})
    return {"steps": last["step"], "seconds": round(last["seconds"]), **facts_of_device(), "val": validation}


def facts_of_device() -> dict[str, str]:
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{torch.get_num_threads()} CPU threads"
    return {"device": device, "date": f"{datetime.date.today()}"}


def make_quick(config: Config) -> Config:
    """Return the run with a few steps on a few small images, and a small encoder."""
    few: dict[str, Any] = {"max_steps": 4, "batch_size": 4, "eval_every": 2, "num_eval_images": 4, "compile": "off"}
    few["num_images"] = config.num_images if config.num_images == "endless" else 8
    if isinstance(config, TrainConfig):
        model: Any = config.model
        parts = {"encoder": small_encoder(model.encoder), "slots": without_reach(model.slots)}
        return replace(config, model=replace(model, image_size=(16, 16), **parts), **few)
    assert isinstance(config, PretrainConfig)
    objective: Any = config.objective
    if hasattr(objective, "mask_size"):
        objective = replace(objective, mask_size=4)
    return replace(config, image_size=(16, 16), objective=objective, encoder=small_encoder(config.encoder), **few)


def small_encoder(encoder: Any) -> Any:
    """Return the config of a small encoder of the same kind. One of a checkpoint stays as it is."""
    if not hasattr(encoder, "pyramid_levels"):
        return encoder
    return replace(encoder, channels=8, kernel_sizes=(3, 3), pyramid_levels=min(1, encoder.pyramid_levels))


def without_reach(slots: Any) -> Any:
    """Return the config of slots whose cut has no reach: the grid of a small image may be smaller."""
    if isinstance(slots, CutSlotsConfig) and isinstance(slots.partition, CutPartitionConfig):
        return replace(slots, partition=replace(slots.partition, reach=None))
    return slots


# ------------------------------------------------------------------------------------------------------------- renders


def renders_of(family: str, options: Options) -> Path | None:
    """Return the folder of renders for runs on a family."""
    return {"textured": options.textured_renders, "plain": options.plain_renders}.get(family)


def with_renders(found: dict[str, str], family: str, options: Options) -> dict[str, str]:
    """Return test data with the last renders of a family, if there are any."""
    renders = renders_of(family, options)
    if renders is None:
        return found
    return found | {"renders": str(last_images(renders, options.runs / "renders" / family))}


def last_images(source: Path, folder: Path) -> Path:
    """Return a folder of links to the last images, and their masks, of another."""
    return link_images(source, images_of(source)[-NUM_RENDERS:], folder)


def images_of(source: Path) -> list[Path]:
    images = sorted((source / "images").iterdir())
    if not images:
        raise ValueError(f"{source / 'images'} is empty; expected images")
    return images


def link_images(source: Path, images: Iterable[Path], folder: Path) -> Path:
    """Fill a folder with links to images, and their masks, of another."""
    for image in images:
        for kind, file in (("images", image), ("masks", source / "masks" / f"{image.stem}.png")):
            (folder / kind).mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileExistsError):  # other processes make them too
                (folder / kind / file.name).symlink_to(file.resolve(strict=True))
    return folder


# ------------------------------------------------------------------------------------------------------------- results


def scores(folder: Path, name: str, metrics: Iterable[str]) -> dict[str, Any] | None:
    """Return the metrics of a run on test data, or None if it has not been evaluated. Paths are left out.

    An evaluation with other settings of refinement counts as none: seeds of one row are refined alike.
    """
    file = folder / "evaluation" / name / "results.json"
    record = json.loads(file.read_text()) if file.is_file() else {}
    if record.get("refinement") != DEFAULTS:
        return None
    (found,) = record["results"].values()
    return {key: found[key] for key in ("num_images", *metrics)}


def marks(title: str = "table") -> tuple[str, str]:
    """Return the lines before and after a table of a page."""
    return f"<!-- {title} -->\n", f"<!-- end of {title} -->"


def write_table(path: Path, text: str, title: str = "table") -> None:
    """Replace the table between its two marks."""
    start, end = marks(title)
    before, rest = path.read_text().split(start)
    after = rest.split(end)[1]
    write_atomically(path, (before + start + text + end + after).encode())


def collect(study: Study, runs: Path) -> dict[str, Any]:
    """Return the records of all runs that are done, by the names of their folders."""
    results = {}
    for name in study.run_names:
        folder = runs / name
        if (folder / "done").is_file():
            names = sorted(path.name for path in (folder / "evaluation").glob("*"))
            found = {data: scores(folder, data, study.metrics) for data in names}
            test = {data: values for data, values in found.items() if values is not None}
            results[name] = json.loads((folder / "done").read_text()) | {"test": test, "curve": curve(folder)}
    return results


def with_earlier(study: Study, results: dict[str, Any], record: Path) -> dict[str, Any]:
    """Return results with those in the record of runs whose folders are not here, in the order of the study."""
    known = (json.loads(record.read_text()) if record.is_file() else {}) | results
    return {name: known[name] for name in study.run_names if name in known}


def curve(folder: Path) -> list[list[float]]:
    """Return step, ARI-FG of decoder masks and of refined masks of each validation."""
    rows = ((line["step"], line["val"]) for line in read_lines(folder / "metrics.jsonl") if "val" in line)
    return [[step, *(round(values[name], 4) for name in ("ari_fg", "refined_ari_fg"))] for step, values in rows]


def join_curves(results: Mapping[str, Any], names: Iterable[str]) -> list[list[float]]:
    """Return the validation curve of runs that begin with each other, up to the first without results."""
    joined: list[list[float]] = []
    start = 0
    for run in map(results.__getitem__, takewhile(results.__contains__, names)):
        joined += [[start + step, *metrics] for step, *metrics in run["curve"]]
        start += run["steps"]
    return joined


def draw_curves(kinds: Sequence[str], results: Mapping[str, Any], path: Path) -> None:
    """Draw validation curves, a panel for each kind of runs and a color for each seed."""
    found = {kind: [results[name] for seed in SEEDS if (name := f"{kind}-{seed}") in results] for kind in kinds}
    panels = {kind: runs for kind, runs in found.items() if runs}
    if not panels:
        return
    import matplotlib.pyplot as plt

    columns = 3 if len(panels) > 1 else 1
    rows, width = -(-len(panels) // columns), 9 if columns > 1 else 6
    figure, axes = plt.subplots(
        rows, columns, figsize=(width, 2.6 * rows), sharey=True, squeeze=False, layout="constrained"
    )
    for axis, (kind, runs) in zip(axes.flat, panels.items(), strict=False):
        for i, run in enumerate(runs):
            steps, decoder, refined = zip(*run["curve"], strict=True)
            axis.plot(steps, [100 * each for each in decoder], color=f"C{i}")
            axis.plot(steps, [100 * each for each in refined], color=f"C{i}", linestyle="--")
        axis.set(title=kind, xlabel="step", ylim=(0, 100))
        axis.set_xlim(left=0)
        axis.locator_params(axis="x", nbins=4)  # more labels overlap in a narrow panel
        axis.grid(alpha=0.3)
    for axis in axes.flat[len(panels) :]:
        axis.set_axis_off()
    axes[0, 0].set_ylabel("ARI-FG, validation")
    write_figure(figure, path)


def write_figure(figure: Any, path: Path) -> None:
    import matplotlib.pyplot as plt

    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=110)
    plt.close(figure)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, data.getvalue())


class Group(NamedTuple):
    """Runs that differ in their seeds: the rows of a table, one for each test data."""

    labels: tuple[str, ...]
    runs: tuple[str, ...]
    data: tuple[str, ...]


def make_table(
    heads: Iterable[str],
    groups: Iterable[Group],
    metrics: Mapping[str, str],
    results: Mapping[str, Any],
    evaluated: str = "evaluated on",
) -> str:
    """Return the rows of all groups: means over seeds, and the smallest and the largest value."""
    titles = [*heads, evaluated, "seeds", "steps", *metrics.values()]
    rows = [f"| {' | '.join(titles)} |", "|" + "---|" * len(titles)]
    for labels, names, all_data in groups:
        for data in all_data:
            found = [results[name] for name in names if data in results.get(name, {}).get("test", {})]
            steps = f"{mean(run['steps'] for run in found):,.0f}" if found else ""
            cells = [*labels, data, str(len(found)) if found else "not run", steps]
            cells += [spread([run["test"][data][metric] for run in found]) for metric in metrics]
            rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def spread(values: list[float]) -> str:
    """Return the mean and the range of values in percent."""
    if not values:
        return ""
    low, middle, high = (100 * value for value in (min(values), mean(values), max(values)))
    middle = round(middle, 1) + 0.0  # no -0.0
    return f"{middle:.1f}" if len(values) == 1 else f"{middle:.1f} ({low:.1f} to {high:.1f})"
