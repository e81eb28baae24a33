"""docs/results.md: tables, curves and pictures from the records of runs (see experiments/table.py)."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from cutslots.disk import read_lines, write_atomically
from cutslots.report import KINDS, PAPER

Record = dict[str, Any]
CALLED = {
    "paper": "cut, the paper's preset",
    "free": "cut in our network",
    "ground": "the same, background anchored",
    "anchored": "the same, all cuts anchored",
    "attention": "Slot Attention in our network",
    "softmax": "softmax control in our network",
}
OURS = {
    "softmax-plain-0": "softmax control, 12 slots",
    "ground-textured-1": "cut (`best`), textures whole from step 5,000",
    "near-textured-1": "the same, gone on with, half of the scenes near",
    "softmax-textured-0": "softmax control, textures whole from step 3,500",
    "softmax-textured-1": "softmax control, textures whole from step 7,000",
}
RISING = {"ground": "cut (`best`)", "softmax": "softmax control", "attention": "Slot Attention"}
# Whose weights are in the package, by what they have learned from.
SHIPPED = {"plain": "ours/softmax-plain-0", "textured": "ours/near-textured-1"}
FAMILIES = ("plain", "textured", "ood", "camo")
IN_PER_CENT = ("ari_fg", "ari", "miou", "miou_fg", "miou_gt")
STUDIES = {
    "base": "base: cut, reach 0.71 px, temperature 0.5, gamma 0.5, mean, background by cuts, signed",
    "softmax": "no program: softmax of the same network",
    "attention": "Slot Attention",
    "reach-2": "reach 2 px",
    "reach-4": "reach 4 px",
    "reach-8": "reach 8 px",
    "temperature-0.2": "temperature 0.2",
    "temperature-1": "temperature 1",
    "gamma-0.1": "gamma 0.1",
    "gamma-2": "gamma 2",
    "pool-weighted": "mask-weighted mean",
    "background-none": "no background cut",
    "relu": "weights through a ReLU",
    "placed": "placed slots (ours)",
    "placed-context": "placed slots, encoder with context (ours)",
    "decoder-transposed": "the paper's decoder: transposed, 64 maps, one more layer",
    "features-64": "64 feature maps before pooling, as the paper; the base has 128",
    "rate-4e-4": "learning rate 4e-4, as the paper; the base has 8e-4",
    "batch-64": "batch 64, as the paper; the base has 32",
    "plain-base": "plain scenes: base",
    "plain-softmax": "plain scenes: no program",
}


def write_results(runs: Path, docs: Path, names: Iterable[str]) -> None:
    """Collects what run folders say into docs/results.json, and fills the marked parts of docs/results.md with it."""
    path = docs / "results.json"
    records: dict[str, Record] = json.loads(path.read_text()) if path.is_file() else {}
    records |= {name: record(runs / name) for name in names if (runs / name / "done").is_file()}
    if (runs / "blocks.json").is_file():
        records["blocks"] = json.loads((runs / "blocks.json").read_text())
    rows = (f"{json.dumps(name)}: {json.dumps(records[name])}" for name in sorted(records))  # a line for each run
    write_atomically(path, ("{\n" + ",\n".join(rows) + "\n}\n").encode())
    page = docs / "results.md"
    text = page.read_text()
    makers = (bars, ours, rising, headline, studies, plateau, renders)
    parts = {make.__name__: make for make in makers}
    for name, make in parts.items():
        before, mark, rest = text.partition(f"<!-- {name} -->\n")
        if not mark:
            raise ValueError(f"{page} has no place for {name}; expected the line <!-- {name} -->")
        _, end, after = rest.partition("<!-- end -->")
        if not end:
            raise ValueError(f"{page} has no line <!-- end --> after <!-- {name} -->")
        text = before + mark + make(records) + end + after
    write_atomically(page, text.encode())
    draw_curves(records, docs / "img" / "results-curves.png")
    draw_pictures(runs, docs / "img")
    print(f"wrote {path}, {page} and pictures in {docs / 'img'}")


def record(folder: Path) -> Record:
    """What a run folder says."""
    lines = read_lines(folder / "metrics.jsonl")
    losses = {line["step"]: line for line in lines if "loss" in line}
    last = losses[max(losses)]
    curve = [
        [line["step"], _seconds(losses, line["step"]), line["val"]["ari_fg"], line["val"]["miou"]]
        for line in lines
        if "ari_fg" in line.get("val", {})
    ]
    run = json.loads((folder / "run.json").read_text())
    speed = float(np.median([line["images_per_second"] for line in losses.values()]))
    found = {
        "seed": run["seed"],
        "steps": last["step"],
        "batch": run["batch"],
        "seconds": round(last["seconds"]),
        "images_per_second": round(speed),
        "machine": json.loads((folder / "machine.json").read_text()),
        "curve": curve,
        "joined": [
            [line["step"], line["val"]["joined_ari_fg"], line["val"]["joined_miou"]]
            for line in lines
            if "joined_ari_fg" in line.get("val", {})
        ],
        "scores": _scores(folder / "evaluation" / "results.json"),
        "renders": {Path(name).name: told for name, told in _scores(folder / "renders" / "results.json").items()},
    }
    return found


def _seconds(losses: dict[int, Any], step: int) -> float:
    """When a step was done: losses are not noted at every one, so between its neighbours."""
    steps = sorted(losses)
    return float(np.interp(step, steps, [losses[known]["seconds"] for known in steps]))


def _scores(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text())["results"] if file.is_file() else {}


# -------------------------------------------------------------------------------------------------------------- tables


def bars(records: dict[str, Record]) -> str:
    """The weights that are shipped against the paper's figures on the sets that the families stand for."""
    rows = []
    for family in FAMILIES:
        scores = records.get(shipped(family), {}).get("scores", {}).get(family, {})
        iou, fg, _ = PAPER[family][1]["the paper"]
        for kind in ("decoder", "joined", "eager"):
            if KINDS[kind] + "miou" not in scores:
                continue
            cells = [family, kind]
            for name, bar in (("ari_fg", fg), ("miou", iou)):
                ours = 100 * scores[KINDS[kind] + name]
                cells += [f"{ours:.1f}", f"{bar:.1f}", "held" if ours >= bar else "missed"]
            rows.append(cells)
    return _table("scenes | masks | ARI-FG, ours | the paper | | mIoU, ours | the paper |", rows)


def learned(family: str) -> str:
    """The family that a model judged on this one has learned from."""
    return "plain" if family == "plain" else "textured"


def shipped(family: str) -> str:
    """The run whose weights the package has for a family."""
    return SHIPPED[learned(family)]


HEADS = "scenes | slots | masks | ARI-FG | ARI | mIoU | mIoU, objects | mIoU, true masks | MSE | steps | images/s"


def ours(records: dict[str, Record]) -> str:
    """Past the paper, and the controls of that."""
    names = {f"ours/{name}": called for name, called in OURS.items()}
    rows = [row for family in FAMILIES for row in judged(records, family, names)]
    return _facts(records, "ours/") + _table(HEADS, rows)


def rising(records: dict[str, Record]) -> str:
    """Ours, its control and the baseline on one course, by seeds; what is clear is told against the control."""
    rows = []
    for family, kind in itertools.product(FAMILIES[1:], ("decoder", "joined", "eager")):
        found: dict[str, list[list[float]]] = {}
        for method in RISING:
            runs = [records[name] for seed in range(9) if (name := f"rising/{method}-textured-{seed}") in records]
            scores = [run["scores"][family] for run in runs if family in run["scores"]]
            found[method] = [[100 * each[KINDS[kind] + score] for each in scores] for score in ("ari_fg", "miou")]
        for method, values in found.items():
            if values[0]:
                told = [
                    verdict(*pair) if method != "softmax" else "" for pair in zip(values, found["softmax"], strict=True)
                ]
                rows.append([family, kind, RISING[method], str(len(values[0])), *map(spread, values), *told])
    heads, gains = "scenes | masks | slots | seeds | ARI-FG | mIoU", " | ARI-FG, gain | mIoU, gain"
    if not any("".join(row[6:]) for row in rows):  # too few seeds
        rows, gains = [row[:6] for row in rows], ""
    return _facts(records, "rising/") + _table(heads + gains, rows)


def judged(records: dict[str, Record], family: str, names: dict[str, str]) -> list[list[str]]:
    """What these runs score on a family, each called something: a row for each kind of masks."""
    rows = []
    for name, called in names.items():
        run = records.get(name, {})
        scores = run.get("scores", {}).get(family, {})
        facts = [f"{scores['mse']:.0f}", f"{run['steps']:,}", f"{run['images_per_second']:,}"] if scores else []
        for i, cells in enumerate(_by_kind(scores)):
            rows.append([*([family, called] if i == 0 else ["", ""]), *cells, *(facts if i == 0 else [""] * 3)])
    return rows


def _by_kind(scores: dict[str, Any]) -> list[list[str]]:
    """For each kind of masks that was judged, its name and scores in per cent. Older runs were not read eagerly."""
    there = {kind: prefix for kind, prefix in KINDS.items() if prefix + "miou" in scores}
    return [[kind, *(f"{100 * scores[prefix + s]:.1f}" for s in IN_PER_CENT)] for kind, prefix in there.items()]


def headline(records: dict[str, Record]) -> str:
    rows: list[list[str]] = []
    for family in FAMILIES:
        dataset, published = PAPER[family]
        names = {f"headline/{method}-{learned(family)}-0": called for method, called in CALLED.items()}
        rows += judged(records, family, names)
        if (nothing := records.get("blocks", {}).get(family)) and any(row[0] == family for row in rows):
            values = [f"{100 * nothing[name]:.1f}" for name in IN_PER_CENT]
            rows.append(["", f"{nothing['slots']} fixed blocks, which look at nothing", "", *values, "", "", ""])
        for model, (iou, fg, mse) in published.items() if any(row[0] == family for row in rows) else ():
            who = f"{model}, published, {dataset}"
            rows.append(["", who, "", f"{fg:.1f}", "", f"{iou:.1f}", "", "", f"{mse}", "", ""])
    return _facts(records, "headline/") + _table(HEADS, rows)


def _facts(records: dict[str, Record], start: str) -> str:
    """Seed, time, device and date of the runs whose names begin so."""
    chosen = [run for name, run in records.items() if name.startswith(start)]
    if not chosen:
        return "\n"
    seeds = ", ".join(sorted({str(run["seed"]) for run in chosen}))
    devices = ", ".join(sorted({f"{run['machine']['device']}, torch {run['machine']['torch']}" for run in chosen}))
    dates = ", ".join(sorted({run["machine"]["date"] for run in chosen}))
    minutes = [run["seconds"] / 60 for run in chosen]
    each = f"{min(minutes):.1f} to {max(minutes):.1f} minutes each"
    return f"{len(chosen)} runs, seeds {seeds}, {each}, {devices}, {dates}.\n\n"


def reached(points: list[list[Any]], bar: float = 0.5) -> int | None:
    """The first step at which a validation saw an ARI-FG of that much: of a run's "curve", or "joined"."""
    return next((step for step, *_, ari_fg, _ in points if ari_fg >= bar), None)


def studies(records: dict[str, Record]) -> str:
    rows = []
    for name, called in STUDIES.items():
        runs = [records[key] for seed in range(9) if (key := f"studies/{name}-{seed}") in records]
        base = "plain-base" if name.startswith("plain") else "base"
        bases = [records[key] for seed in range(9) if (key := f"studies/{base}-{seed}") in records]
        if not runs:
            continue
        family = "plain:3-6" if name.startswith("plain") else "textured:3-6"
        cells = [called, str(len(runs))]
        for data, score in ((family, "ari_fg"), (family, "miou"), ("camo:3-6", "ari_fg")):
            values = [100 * run["scores"][data][score] for run in runs if data in run["scores"]]
            cells.append(spread(values))
        steps = [reached(run["curve"]) for run in runs]
        known = [step for step in steps if step is not None]
        cells.append(spread(known, 0) + ("" if len(known) == len(steps) else f" ({len(steps) - len(known)} never)"))
        for score in ("ari_fg", "miou"):
            both = ([100 * run["scores"][family][score] for run in some] for some in (runs, bases))
            cells.append(verdict(*both) if name != base else "")
        rows.append(cells)
    for scenes in ("textured", "plain"):
        nothing = records.get("blocks", {}).get(f"{scenes}:3-6")
        if nothing and rows:
            cells = [f"{100 * nothing[score]:.1f}" for score in ("ari_fg", "miou")]
            rows.append(
                [f"{scenes} scenes: {nothing['slots']} fixed blocks, which look at nothing", "", *cells, *[""] * 4]
            )
    heads = "what is changed | seeds | ARI-FG | mIoU | ARI-FG, camo | steps to ARI-FG 50"
    return _facts(records, "studies/") + _table(f"{heads} | ARI-FG, gain | mIoU, gain", rows)


def verdict(mine: list[float], theirs: list[float]) -> str:
    """The gain of the means, and whether it is clear: Welch's test at 5 %. Nothing for single seeds."""
    from scipy.stats import ttest_ind

    if min(len(mine), len(theirs)) < 2:
        return ""
    gain = float(np.mean(mine) - np.mean(theirs))
    clear = ttest_ind(mine, theirs, equal_var=False).pvalue < 0.05
    return f"{gain:+.1f}" + (f", {'better' if gain > 0 else 'worse'}" if clear else "")


def spread(values: list[Any], digits: int = 1) -> str:
    """Mean and standard deviation."""
    if not values:
        return ""
    mean = f"{np.mean(values):,.{digits}f}"
    return f"{mean} ± {np.std(values, ddof=1):,.{digits}f}" if len(values) > 1 else mean


def plateau(records: dict[str, Record]) -> str:
    names = {
        f"{'plateau' if seed else 'headline'}/{method}-textured-{seed}": called
        for method, called in CALLED.items()
        for seed in range(9)
    }
    names |= {f"ours/{name}": called for name, called in OURS.items() if "textures" in called}
    for method, called in RISING.items():
        names |= {f"rising/{method}-textured-{seed}": f"{called}, textures rising" for seed in range(9)}
    rows = []
    for name, called in names.items():
        if run := records.get(name):
            at = {step: (ari_fg, miou) for step, _, ari_fg, miou in run["curve"]}
            steps = range(500, 3001, 500)
            marks = [f"{100 * at[step][0]:.1f} / {100 * at[step][1]:.0f}" if step in at else "" for step in steps]
            past = [f"{step:,}" if (step := reached(run[kind])) else "never" for kind in ("curve", "joined")]
            rows.append([called, str(run["seed"]), str(run["batch"]), *marks, *past])
    heads = "slots | seed | batch | 500 | 1,000 | 1,500 | 2,000 | 2,500 | 3,000 | first past 50 | joined"
    return _table(heads, rows)


def renders(records: dict[str, Record]) -> str:
    rows = []
    called = {
        "renders/alone-0": "rendered scenes alone",
        "headline/free-textured-0": "built-in scenes alone",
        "ours/ground-textured-1": "built-in scenes alone, textures rising",
        "renders/started-1": "the same, then rendered scenes",
    }
    for name, source in called.items():
        for scores in records.get(name, {}).get("renders", {}).values():
            facts = [f"{scores['mse']:.0f}", f"{records[name]['steps']:,}", str(scores["images"])]
            for i, cells in enumerate(_by_kind(scores)):
                rows.append([source if i == 0 else "", *cells, *(facts if i == 0 else [""] * 3)])
    heads = "learned from | masks | ARI-FG | ARI | mIoU | mIoU, objects | mIoU, true masks | MSE | steps | images"
    return _table(heads, rows)


def _table(heads: str, rows: list[list[str]]) -> str:
    if not rows:
        return "These runs were not made yet.\n"
    lines = [f"| {heads} |", "|" + "---|" * (heads.count("|") + 1)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows]) + "\n"


# ------------------------------------------------------------------------------------------------------------ pictures


def draw_curves(records: dict[str, Record], file: Path) -> None:
    """ARI-FG on validation images by how many images were seen, for the headline and for ours from the start."""
    import io

    import matplotlib.pyplot as plt

    if not any(name.startswith(("headline/", "ours/")) for name in records):
        return
    figure, axes = plt.subplots(1, 2, figsize=(12, 3.4), sharey=True, layout="constrained")
    for axis, family in zip(axes, ("plain", "textured"), strict=True):
        names = {
            f"headline/{method}-{family}-0": called.replace("the same", "cut") for method, called in CALLED.items()
        }
        names |= {f"ours/{name}": called.replace("`", "") for name, called in OURS.items() if "near" not in name}
        for i, (name, label) in enumerate(names.items()):
            run = records.get(name)
            if run and family in name:
                seen = [step * run["batch"] / 1000 for step, _, _, _ in run["curve"]]
                scores = [100 * ari_fg for _, _, ari_fg, _ in run["curve"]]
                axis.plot(seen, scores, color=f"C{i}", linestyle="--" if "ours" in name else "-", label=label)
        if nothing := records.get("blocks", {}).get(family):
            axis.axhline(100 * nothing["ari_fg"], color="grey", linestyle=":", label="fixed blocks (unseen scenes)")
        axis.set(title=family, xlabel="thousand images seen", ylim=(0, 100))
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("ARI-FG, validation")
    shown = {label: line for axis in axes for line, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend(shown.values(), shown.keys(), fontsize=8, loc="outside right upper")
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=110)
    plt.close(figure)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, data.getvalue())


def draw_pictures(runs: Path, folder: Path) -> None:
    """What the shipped models see in unseen scenes, if their weights are here."""
    from cutslots.data import open_data
    from cutslots.devices import make_fabric
    from cutslots.evaluate import look
    from cutslots.model import load
    from cutslots.report import sheet
    from cutslots.scenes.files import png

    fabric = make_fabric("auto", 1, 1, "32-true")
    for family in FAMILIES:
        run = runs / shipped(family)
        if (run / "done").is_file() and (run / "model.safetensors").is_file():
            folder.mkdir(parents=True, exist_ok=True)
            model = load(run, fabric.device)
            data: Any = open_data(family, "test", model.config.size, 5)
            write_atomically(folder / f"results-{family}.png", png(sheet(look(model, data, 5, fabric))))
