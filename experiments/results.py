"""Write docs/results.json and the generated parts of docs/results.md from run folders (see experiments/table.py).

    python -m experiments.results --docs docs                  # tables and curves again, from docs/results.json alone
    python -m experiments.results --docs docs --checkpoints    # evaluate and draw the checkpoints of this package first
    python -m experiments.results --docs docs --textured-renders DIR --plain-renders DIR    # also on renders

A generated part of the page lies between the lines <!-- NAME --> and <!-- end -->, NAME being a function below.

The records of ablations of 15 November 2026 have no `miou` and `miou_fg`: they were computed by another rule than that
of CLEVRTEX's evaluator, and the weights are lost. Their table shows `miou_gt`, which is the same by both.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import tyro

from cutslots.evaluation.labels import EVALUATED_MASKS
from cutslots.evaluation.published import PAPER, published_results
from cutslots.files import read_lines, write_atomically
from experiments.study import write_figure

Record = dict[str, Any]
PAPER_RUNS = {  # the paper's presets
    "clevr-plain": "`clevr`",
    "clevrtex-textured": "`clevrtex`, texture ramp",
}
TEMPERATURE = {  # readings of the paper's temperature of the combined slots
    "temperature/background-plain": "`tiny`, 0.1 between background and foreground",
    "temperature/combined-plain": "`tiny`, 0.1 over the combined masks",
    "temperature/background-textured": "`clevrtex` at 64x64, 0.1 between background and foreground",
    "partition/cut": "`clevrtex` at 64x64, 0.1 over the combined masks",
}
PARTITION = {"cut": "cut", "softmax": "no-cut ablation (softmax)"}  # in the paper's textured model at 64x64
SLOT_ATTENTION_LR = {  # learning rates and warm-up steps
    f"lr-{lr}-warmup-{warmup}": (lr, warmup) for lr in ("1e-4", "2e-4", "4e-4", "1e-3") for warmup in (200, 2000)
}
# The checkpoints that are compared with the paper, by the family of their training data.
CHECKPOINTS = {"plain": "plain-128", "textured": "textured-128"}
EVALUATIONS = (
    "cutslots evaluate plain-128 --data plain --num-images 500",
    "cutslots evaluate plain-paper-128 --data plain --num-images 500",
    "cutslots evaluate textured-128 --data textured ood camo --num-images 500",
    "cutslots evaluate textured-paper-128 --data textured ood camo --num-images 500",
    "cutslots evaluate tiny-64 --data plain:2-5 --num-images 128",
    "cutslots evaluate moving-128 --data moving --num-images 64",
    "cutslots evaluate moving-paper-128 --data moving --num-images 64 --association learned",
)
# The checkpoints that are evaluated on renders, and the family that the renders resemble.
RENDERED = {
    "plain-128": "plain",
    "plain-paper-128": "plain",
    "textured-128": "textured",
    "textured-paper-128": "textured",
}
FAMILIES = ("plain", "textured", "ood", "camo")
FIGURES = {  # file: checkpoint and family
    "results-plain.png": ("plain-128", "plain"),
    "results-textured.png": ("textured-128", "textured"),
    "results-ood.png": ("textured-128", "ood"),
    "results-camo.png": ("textured-128", "camo"),
    "progressive.png": ("textured-paper-128", "textured"),
}
PERCENT_METRICS = {"ari_fg": "ARI-FG", "ari": "ARI", "miou": "mIoU", "miou_fg": "mIoU-FG", "miou_gt": "mIoU-GT"}
MASKS = ("decoder", "refined", "high-recall")
ABLATIONS = {
    "base": "base: cut, reach 0.71 px, temperature 0.5, gamma 0.5, image mean, background by cuts, signed weights",
    "softmax": "no-cut ablation (softmax)",
    "reach-2": "reach 2 px",
    "reach-4": "reach 4 px",
    "reach-8": "reach 8 px",
    "temperature-0.2": "temperature 0.2",
    "temperature-1": "temperature 1",
    "gamma-0.1": "gamma 0.1",
    "gamma-2": "gamma 2",
    "min-cut": "minimum cuts",
    "min-cut-ramp": "minimum cuts, capacities that grow from zero",
    "min-cut-straight-through": "minimum cuts, straight-through estimator",
    "mask-mean": "mask mean",
    "background-none": "no background cut",
    "relu-weights": "edge weights through a ReLU",
    "relative-positions": "relative positions (ours)",
    "relative-positions-pyramid": "relative positions, feature pyramid (ours)",
    "spatial-broadcast": "the paper's decoder: spatial broadcast, 64 channels, one extra layer",
    "feature-dim-64": "feature dimension 64, as the paper; the base has 128",
    "lr-4e-4": "learning rate 4e-4, as the paper; the base has 8e-4",
    "batch-size-64": "batch size 64, as the paper; the base has 32",
    "plain-base": "plain scenes: base",
    "plain-softmax": "plain scenes: no-cut ablation (softmax)",
}


def write_results(runs: Path | None, docs: Path, names: Iterable[str] = ()) -> None:
    """Collect the records of finished runs in docs/results.json, and write the tables and figures of the page.

    Without `runs`, the tables and curves are made from the records that are in docs/results.json.
    """
    path, page = docs / "results.json", docs / "results.md"
    records: dict[str, Record] = json.loads(path.read_text()) if path.is_file() else {}
    if runs is not None:
        records |= {name: read_record(runs / name) for name in names if is_recorded(runs / name)}
        if (runs / "fixed_grid.json").is_file():
            records["fixed_grid"] = json.loads((runs / "fixed_grid.json").read_text())
        write_records(path, records)
    write_atomically(page, fill(page, records).encode())
    draw_paper_curves(records, docs / "img" / "paper-curves.png")
    print(f"wrote {page} and figures in {docs / 'img'}")


def is_recorded(folder: Path) -> bool:
    """Return whether a run is finished, or has begun and is reported while it lasts: a run of a paper's preset."""
    if folder.parent.name == "paper":
        return any("val" in line for line in read_lines(folder / "metrics.jsonl"))
    return (folder / "done").is_file()


def write_records(path: Path, records: dict[str, Record]) -> None:
    """Write records, sorted by name, each on a line."""
    rows = (f"{json.dumps(name)}: {json.dumps(records[name])}" for name in sorted(records))
    write_atomically(path, ("{\n" + ",\n".join(rows) + "\n}\n").encode())


def evaluate_checkpoints(docs: Path, commands: Iterable[str] = EVALUATIONS) -> None:
    """Evaluate the checkpoints of this package and record it in docs/results.json as checkpoints/NAME."""
    from experiments.table import machine_facts

    path = docs / "results.json"
    records: dict[str, Record] = json.loads(path.read_text()) if path.is_file() else {}
    for command in commands:
        checkpoint = command.split()[2]
        record = {"command": command, "machine": machine_facts(), "scores": _evaluate(command.split()[1:])}
        records[f"checkpoints/{checkpoint}"] = records.get(f"checkpoints/{checkpoint}", {}) | record
        write_records(path, records)


def evaluate_renders(docs: Path, renders: dict[str, Path]) -> None:
    """Evaluate the checkpoints on the last renders of the family that they are for, and add it to their records.

    No command is recorded: renders are not part of this project.
    """
    from experiments.study import last_images
    from experiments.table import machine_facts

    path = docs / "results.json"
    records: dict[str, Record] = json.loads(path.read_text())
    for checkpoint, family in RENDERED.items():
        if family in renders:
            with tempfile.TemporaryDirectory() as folder:
                data = last_images(renders[family], Path(folder))
                (scores,) = _evaluate(["evaluate", checkpoint, "--data", str(data)]).values()
            records[f"checkpoints/{checkpoint}"]["renders"] = {"machine": machine_facts(), "scores": scores}
            write_records(path, records)


def _evaluate(words: list[str]) -> dict[str, Any]:
    """Return the metrics that a command of `cutslots evaluate` writes, by dataset."""
    with tempfile.TemporaryDirectory() as out:
        subprocess.run([sys.executable, "-m", "cutslots", *words, "--out", out], check=True)
        return _scores(Path(out) / "results.json")


def fill(page: Path, records: dict[str, Record]) -> str:
    """Return the text of the page with its generated parts replaced."""
    text = page.read_text()
    for make in GENERATED:
        before, mark, rest = text.partition(f"<!-- {make.__name__} -->\n")
        if not mark:
            raise ValueError(f"{page} has no place for {make.__name__}; expected the line <!-- {make.__name__} -->")
        _, end, after = rest.partition("<!-- end -->")
        if not end:
            raise ValueError(f"{page} has no line <!-- end --> after <!-- {make.__name__} -->")
        text = before + mark + make(records) + end + after
    return text


def read_record(folder: Path) -> Record:
    """Return the record of a run folder."""
    lines = read_lines(folder / "metrics.jsonl")
    losses = {line["step"]: line for line in lines if "loss" in line}
    last = losses[max(losses)]
    curve = [  # runs without the evaluator's mIoU have three columns
        [line["step"], _seconds(losses, line["step"]), line["val"]["ari_fg"], line["val"]["miou"]]
        for line in lines
        if "ari_fg" in line.get("val", {})
    ]
    refined = [
        [line["step"], line["val"]["refined_ari_fg"], line["val"]["refined_miou"]]
        for line in lines
        if "refined_ari_fg" in line.get("val", {})
    ]
    run = json.loads((folder / "run.json").read_text())
    speed = float(np.median([line["images_per_second"] for line in losses.values()]))
    return {
        "seed": run["seed"],
        "steps": last["step"],
        "batch_size": run["batch_size"],
        "seconds": round(last["seconds"]),
        "images_per_second": round(speed),
        "machine": json.loads((folder / "machine.json").read_text()),
        "curve": curve,
        "refined": refined,
        "scores": _scores(folder / "evaluation" / "results.json"),
    }


def _seconds(losses: dict[int, Any], step: int) -> float:
    """Return the time of a step, interpolated between the steps at which losses were logged."""
    steps = sorted(losses)
    return float(np.interp(step, steps, [losses[known]["seconds"] for known in steps]))


def _scores(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text())["results"] if file.is_file() else {}


# -------------------------------------------------------------------------------------------------------------- tables


def summary(records: dict[str, Record]) -> str:
    """Return the refined masks of the shipped checkpoints next to the published results."""
    rows = []
    for family in FAMILIES:
        checkpoint, scores = checkpoint_scores(records, family)
        if "refined_miou" not in scores:
            continue
        published = published_results([family])
        cells = [family, f"`{checkpoint}`", published[0].dataset]
        for metric in ("ari_fg", "miou"):
            cells.append(f"{100 * scores[f'refined_{metric}']:.1f}")
            cells += [f"{result.metrics[metric]:.1f}" for result in reversed(published)]
        rows.append(cells)
    theirs = "the paper | Slot Attention"
    heads = f"scenes | checkpoint | imitates | ARI-FG, ours | {theirs} | mIoU, ours | {theirs}"
    return _checkpoint_facts(records) + _table(heads, rows)


def against_paper(records: dict[str, Record]) -> str:
    """Return all masks of the shipped checkpoints, and whether they reach the paper's results."""
    rows = []
    for family, kind in itertools.product(FAMILIES, MASKS):
        _, scores = checkpoint_scores(records, family)
        if _prefix(kind) + "miou" not in scores:
            continue
        (paper,) = (result.metrics for result in published_results([family]) if result.method == PAPER)
        cells = [family, kind]
        for metric in ("ari_fg", "miou"):
            score = 100 * scores[_prefix(kind) + metric]
            reached = "reached" if score >= paper[metric] else "not reached"
            cells += [f"{score:.1f}", f"{paper[metric]:.1f}", reached]
        rows.append(cells)
    return _table("scenes | masks | ARI-FG, ours | the paper | | mIoU, ours | the paper |", rows)


def checkpoint_scores(records: dict[str, Record], family: str) -> tuple[str, dict[str, Any]]:
    """Return the name of the shipped checkpoint for a family, and its metrics on it; none if it is not evaluated."""
    checkpoint = CHECKPOINTS[trained_on(family)]
    return checkpoint, records.get(f"checkpoints/{checkpoint}", {}).get("scores", {}).get(family, {})


def _checkpoint_facts(records: dict[str, Record]) -> str:
    """Return the commands, devices and dates of the evaluations of the shipped checkpoints in the tables."""
    names = [f"checkpoints/{checkpoint}" for checkpoint in CHECKPOINTS.values()]
    chosen = [records[name] for name in names if name in records]
    if not chosen:
        return "\n"
    commands = ", ".join(f"`{record['command']}`" for record in chosen)
    return f"{commands}: {_machines(chosen)}.\n\n"


def trained_on(family: str) -> str:
    """Return the family that a model evaluated on this one was trained on."""
    return "plain" if family == "plain" else "textured"


def paper(records: dict[str, Record]) -> str:
    """Return the paper's presets by decoder masks, over seeds, and the fixed-grid baseline.

    Runs that are not evaluated on test scenes have their last evaluation on validation scenes.
    """
    rows = []
    for name, label in PAPER_RUNS.items():
        runs = _seeds(records, f"paper/{name}")
        for family in FAMILIES:
            rows += _test_row(label, family, [run for run in runs if family in run["scores"]])
        rows += _validation_row(label, name.rpartition("-")[2], [run for run in runs if not run["scores"]])
    grids = records.get("fixed_grid", {})
    rows += [_fixed_grid_row(family, grids[family]) for family in FAMILIES if family in grids]
    heads = "preset | steps | seeds | scenes | ARI-FG | ARI | mIoU"
    return _facts(records, "paper/") + _table(heads, rows)


def _test_row(label: str, family: str, runs: list[Record]) -> list[list[str]]:
    if not runs:
        return []
    values = [[100 * run["scores"][family][metric] for run in runs] for metric in ("ari_fg", "ari", "miou")]
    return [[label, _steps(runs), str(len(runs)), f"{family}, test", *map(mean_and_std, values)]]


def _validation_row(label: str, family: str, runs: list[Record]) -> list[list[str]]:
    if not runs:
        return []
    last = [run["curve"][-1] for run in runs]
    ari_fg = mean_and_std([100 * point[2] for point in last])
    miou = mean_and_std([100 * point[3] for point in last]) if all(len(point) > 3 for point in last) else ""
    return [[label, _steps(runs), str(len(runs)), f"{family}, validation", ari_fg, "", miou]]


def _fixed_grid_row(family: str, grid: Record) -> list[str]:
    cells = [f"{100 * grid[metric]:.1f}" for metric in ("ari_fg", "ari", "miou")]
    return [f"fixed-grid baseline, {grid['num_slots']} cells", "", "", f"{family}, test", *cells]


def _steps(runs: list[Record]) -> str:
    return ", ".join(dict.fromkeys(f"{run['steps']:,}" for run in runs))


def partition(records: dict[str, Record]) -> str:
    """Return the cut and the no-cut ablation in the paper's textured model, over seeds, with their difference."""
    rows = []
    for family, kind in itertools.product(("textured:3-6", "camo:3-6"), ("decoder", "partition")):
        runs = {method: _seeds(records, f"partition/{method}") for method in PARTITION}
        found = {
            method: [
                [100 * run["scores"][family][_prefix(kind) + metric] for run in each] for metric in ("ari_fg", "miou")
            ]
            for method, each in runs.items()
        }
        for method, values in found.items():
            pairs = zip(values, found["softmax"], strict=True)
            cells = [family, kind, PARTITION[method], str(len(values[0])), *map(mean_and_std, values)]
            rows.append(cells + [difference(*pair) if method == "cut" else "" for pair in pairs])
    heads = "scenes | masks | method | seeds | ARI-FG | mIoU | ARI-FG, difference | mIoU, difference"
    return _facts(records, "partition/") + _table(heads, [row for row in rows if row[3] != "0"])


def temperature(records: dict[str, Record]) -> str:
    """Return the readings of the temperature of the combined slots by decoder masks, over seeds."""
    rows = []
    for name, label in TEMPERATURE.items():
        runs = _seeds(records, name)
        for family in ("plain:2-5", "textured:3-6", "camo:3-6"):
            rows += _test_row(label, family, [run for run in runs if family in run["scores"]])
    return _facts(records, ("temperature/", "partition/cut")) + _table(
        "reading | steps | seeds | scenes | ARI-FG | ARI | mIoU", rows
    )


def _seeds(records: dict[str, Record], name: str) -> list[Record]:
    """Return the records of a run with every seed."""
    return [records[key] for seed in range(9) if (key := f"{name}-{seed}") in records]


def _iou_metric(records: dict[str, Record], prefix: str) -> tuple[str, str]:
    """Return the mIoU to compare runs by, and its label: mIoU if all runs of a group have it, mIoU-GT otherwise."""
    runs = [run for name, run in records.items() if name.startswith(prefix)]
    metric = "miou" if all("miou" in scores for run in runs for scores in run["scores"].values()) else "miou_gt"
    return metric, PERCENT_METRICS[metric]


def slot_attention_lr(records: dict[str, Record]) -> str:
    """Return the last evaluation on validation scenes of Slot Attention with other learning rates and warm-ups."""
    rows = []
    for name, (lr, warmup) in SLOT_ATTENTION_LR.items():
        for run in (records[key] for seed in range(9) if (key := f"slot_attention_lr/{name}-{seed}") in records):
            decoder, refined = run["curve"][-1], run["refined"][-1]
            cells = [f"{100 * ari_fg:.1f} / {100 * miou:.1f}" for *_, ari_fg, miou in (decoder, refined)]
            rows.append([lr, f"{warmup:,}", f"{decoder[0]:,}", *cells])
    heads = "learning rate | warm-up steps | step | ARI-FG / mIoU, decoder masks | ARI-FG / mIoU, refined masks"
    return _facts(records, "slot_attention_lr/") + _table(heads, rows)


def _prefix(kind: str) -> str:
    return EVALUATED_MASKS[kind].prefix


def _facts(records: dict[str, Record], prefix: str | tuple[str, ...]) -> str:
    """Return the seeds, times, devices and dates of the runs whose names begin with a prefix."""
    chosen = [run for name, run in records.items() if name.startswith(prefix)]
    if not chosen:
        return "\n"
    seeds = ", ".join(sorted({str(run["seed"]) for run in chosen}))
    minutes = [run["seconds"] / 60 for run in chosen]
    if len(chosen) == 1:
        return f"1 run, seed {seeds}, {minutes[0]:.1f} minutes, {_machines(chosen)}.\n\n"
    each = f"{min(minutes):.1f} to {max(minutes):.1f} minutes each"
    return f"{len(chosen)} runs, seeds {seeds}, {each}, {_machines(chosen)}.\n\n"


def _machines(records: list[Record]) -> str:
    machines = [record["machine"] for record in records]
    devices = sorted({f"{machine['device']}, torch {machine['torch']}" for machine in machines})
    return ", ".join(devices + sorted({machine["date"] for machine in machines}))


def first_step(run: Record, threshold: float = 0.5) -> int | None:
    """Return the first step at which the validation ARI-FG of a run's decoder masks reached a threshold."""
    return next((step for step, _, ari_fg, *_ in run["curve"] if ari_fg >= threshold), None)


def ablations(records: dict[str, Record]) -> str:
    """Return the ablations over seeds. Differences are to the base."""
    rows = []
    iou, iou_label = _iou_metric(records, "ablations/")
    for name, label in ABLATIONS.items():
        base = "plain-base" if name.startswith("plain") else "base"
        runs, bases = (
            [records[key] for seed in range(9) if (key := f"ablations/{each}-{seed}") in records]
            for each in (name, base)
        )
        if runs:
            rows.append([label, str(len(runs)), *_ablation_cells(runs, bases, name, iou)])
    for scenes in ("textured", "plain"):
        grid = records.get("fixed_grid", {}).get(f"{scenes}:3-6")
        if grid and rows:
            cells = [f"{100 * grid[metric]:.1f}" for metric in ("ari_fg", iou)]
            label = f"{scenes} scenes: fixed-grid baseline, {grid['num_slots']} cells"
            rows.append([label, "", *cells, *[""] * 4])
    heads = f"change | seeds | ARI-FG | {iou_label} | ARI-FG, camo | steps to ARI-FG 50"
    return _facts(records, "ablations/") + _table(f"{heads} | ARI-FG, difference | {iou_label}, difference", rows)


def _ablation_cells(runs: list[Record], bases: list[Record], name: str, iou: str) -> list[str]:
    family = "plain:3-6" if name.startswith("plain") else "textured:3-6"
    cells = []
    for data, metric in ((family, "ari_fg"), (family, iou), ("camo:3-6", "ari_fg")):
        cells.append(mean_and_std([100 * run["scores"][data][metric] for run in runs if data in run["scores"]]))
    steps = [first_step(run) for run in runs]
    known = [step for step in steps if step is not None]
    cells.append(mean_and_std(known, 0) + ("" if len(known) == len(steps) else f" ({len(steps) - len(known)} never)"))
    for metric in ("ari_fg", iou):
        values = ([100 * run["scores"][family][metric] for run in some] for some in (runs, bases))
        cells.append("" if name.endswith("base") else difference(*values))
    return cells


def difference(values: list[float], base: list[float]) -> str:
    """Return the difference of means, and whether it is significant by Welch's t-test at 5 %. Empty for one seed."""
    from scipy.stats import ttest_ind

    if min(len(values), len(base)) < 2:
        return ""
    gain = float(np.mean(values) - np.mean(base))
    significant = ttest_ind(values, base, equal_var=False).pvalue < 0.05
    return f"{gain:+.1f}" + (f", {'better' if gain > 0 else 'worse'}" if significant else "")


def mean_and_std(values: list[Any], digits: int = 1) -> str:
    """Return the mean and the standard deviation as text; the mean alone for one value."""
    if not values:
        return ""
    mean = f"{np.mean(values):,.{digits}f}"
    return f"{mean} ± {np.std(values, ddof=1):,.{digits}f}" if len(values) > 1 else mean


def _table(heads: str, rows: list[list[str]]) -> str:
    """Return a table without the mIoU columns in which no row has a value."""
    if not rows:
        return "There are no such runs yet.\n"
    columns = list(zip(map(str.strip, heads.split("|")), *rows, strict=True))
    shown = [head for head, *cells in columns if any(cells) or head not in PERCENT_METRICS.values()]
    lines = ["| " + " | ".join(row) + " |" for row in zip(*(c for c in columns if c[0] in shown), strict=True)]
    lines.insert(1, "|" + "---|" * len(shown))
    return "\n".join(lines) + "\n"


GENERATED: tuple[Callable[[dict[str, Record]], str], ...] = (
    summary,
    paper,
    partition,
    temperature,
    ablations,
    against_paper,
    slot_attention_lr,
)

# ------------------------------------------------------------------------------------------------------------- figures


def draw_paper_curves(records: dict[str, Record], file: Path) -> None:
    """Draw the validation ARI-FG by step for the runs of the paper's presets."""
    import matplotlib.pyplot as plt

    runs = [(i, label, run) for i, name in enumerate(PAPER_RUNS) for label, run in _labelled(records, name)]
    if not runs:
        return
    figure, axis = plt.subplots(figsize=(9, 3.6), layout="constrained")
    for i, label, run in runs:
        axis.plot([x[0] for x in run["curve"]], [100 * x[2] for x in run["curve"]], color=f"C{i}", label=label)
    axis.set(xlabel="step", ylabel="ARI-FG, validation", ylim=(0, 100))
    axis.grid(alpha=0.3)
    figure.legend(fontsize=8, loc="outside right upper")
    write_figure(figure, file)


def _labelled(records: dict[str, Record], name: str) -> list[tuple[str, Record]]:
    """Return the runs of a paper's preset; only the first has a label."""
    label = PAPER_RUNS[name].replace("`", "")
    return [(label if i == 0 else "", run) for i, run in enumerate(_seeds(records, f"paper/{name}"))]


def draw_images(folder: Path) -> None:
    """Draw the outputs of the shipped checkpoints for the first test scenes, as FIGURES says."""
    from cutslots.data.open import open_dataset
    from cutslots.devices import make_fabric
    from cutslots.evaluation.visualize import visualization_grid, visualize_images
    from cutslots.models.checkpoints import load
    from cutslots.viz.images import encode_png

    folder.mkdir(parents=True, exist_ok=True)
    fabric = make_fabric("auto", 1, 1, "32-true")
    for file, (checkpoint, family) in FIGURES.items():
        model = load(checkpoint, fabric.device)
        data: Any = open_dataset(family, "test", model.image_size, 5)
        grid = visualization_grid(visualize_images(model, data, 5, fabric))
        write_atomically(folder / file, encode_png(grid))


def main(
    docs: Path = Path("docs"),
    checkpoints: bool = False,
    textured_renders: Path | None = None,
    plain_renders: Path | None = None,
) -> None:
    """Write the tables and the curves of results.md again, from results.json.

    With `checkpoints`, the checkpoints of this package are evaluated and their outputs drawn first. With renders,
    folders with images/ and masks/, they are evaluated on the last of them.
    """
    given = {"textured": textured_renders, "plain": plain_renders}
    if checkpoints:
        evaluate_checkpoints(docs)
        draw_images(docs / "img")
    evaluate_renders(docs, {family: folder for family, folder in given.items() if folder is not None})
    write_results(None, docs)


if __name__ == "__main__":
    tyro.cli(main)
