"""Moving objects: what the cut brings, what learned matching brings, what the join of slots over time brings.

    python -m experiments.moving --runs runs/moving --docs docs    # trains what is missing, judges, writes the table
    python -m experiments.moving ... --together                    # all trainings at once on one GPU

Every row is `movi11` with a few numbers changed, trained for the same time on `moving` scenes; every model is judged on
unseen films by every join it can be followed with, and with masks as read (cutslots.reading) by the join by area.
Interrupted, the same command goes on.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import tyro

from cutslots.data import open_films
from cutslots.devices import make_fabric
from cutslots.disk import read_lines, write_atomically
from cutslots.evaluate import judge, watch
from cutslots.model import PairDiscovery, VolumeDiscovery, load
from cutslots.report import sheet
from cutslots.scenes.files import png
from cutslots.track import Join

STILLS = ["--frames", "1", "--batch", "32"]
ATTENTION = ["--module", "attention", "--area-price", "0"]
RUNS: dict[str, tuple[str, str, list[str]]] = {  # model, trained on, what differs from movi11
    "cut-pairs-0": ("cut", "matched pairs", []),
    "cut-pairs-1": ("cut", "matched pairs", ["--seed", "1"]),
    "cut-frames-0": ("cut", "single frames", STILLS),
    "attention-pairs-0": ("Slot Attention", "matched pairs", ATTENTION),
    "attention-frames-0": ("Slot Attention", "single frames", [*ATTENTION, *STILLS]),
    "volume-0": ("cut through time", "clips of 2 frames", ["--volume"]),
}
ROWS = {  # what slots are joined over time by, and what the names of the masks' scores begin with
    ("matching", ""): "learned matching",
    ("hungarian", ""): "Hungarian",
    ("area", ""): "by area (ours)",
    ("area", "joined_"): "by area, masks read and joined",
}
SCORES = ("ari_fg", "ari", "frame_ari_fg", "frame_ari")


@dataclasses.dataclass
class Options:
    runs: Path
    """Where the run folders are, or come to be."""
    docs: Path
    """Where moving.json, the table in moving.md and moving.png are written."""
    minutes: float = 8.2
    """Of training, for each run."""
    films: int = 64
    """Of the test split, to judge by."""
    together: bool = False
    """Train all runs at once, sharing the device."""
    shown: str = "cut-frames-0"
    """The run in the picture."""


def main(options: Options) -> None:
    train(options)
    path = options.docs / "moving.json"
    results = json.loads(path.read_text()) if path.is_file() else {}
    fabric = make_fabric("auto", 1, 1, "auto")
    for name in RUNS:
        facts = {"training": training_facts(options.runs / name), "films": options.films}
        if any(results.get(name, {}).get(key) != value for key, value in facts.items()):
            results[name] = {**facts, "scores": {}}
        scores = results[name]["scores"]
        model = load(options.runs / name, fabric.device)
        missing = [join for join in joins(model) if not is_judged(join, scores)]
        films = open_films("moving", "test", model.config.size, options.films)
        films = films.cache(options.runs / f"films-{options.films}", fabric.device)  # type: ignore[union-attr, assignment]
        if name == options.shown and not (options.docs / "img" / "moving.png").is_file():
            pictures = watch(model, films, fabric, 1).films[0].some(6)
            write_atomically(options.docs / "img" / "moving.png", png(sheet(pictures)))
        for join in missing:
            means = judge(model, films, fabric, title=f"{name}, {join}", join=join).means()
            scores[join] = means | scores.get(join, {})  # what is recorded stays
            results[name]["date"] = f"{datetime.date.today()}"
            write_atomically(path, json.dumps(results, indent=1).encode())
    write_table(options.docs / "moving.md", results)
    print(f"wrote {path} and the table in {options.docs / 'moving.md'}")


def train(options: Options) -> None:
    waiting: list[subprocess.Popen[bytes]] = []
    for name, (_, _, changes) in RUNS.items():
        if (options.runs / name / "model.safetensors").is_file() and not (options.runs / name / "state.pt").is_file():
            continue  # weights that were brought here
        command = [sys.executable, "-m", "cutslots", "train", "movi11", "--steps", "1000000", *changes]
        command += ["--minutes", str(options.minutes), "--out", str(options.runs / name)]
        waiting.append(subprocess.Popen([*command, "--cache", str(options.runs / "cache")]))
        if not options.together and waiting[-1].wait():
            break
    if any([process.wait() for process in waiting]):
        sys.exit("a training failed or was interrupted; the same command goes on")


def training_facts(run: Path) -> dict[str, Any]:
    """Seed, steps and seconds, as the run noted them."""
    last = [line for line in read_lines(run / "metrics.jsonl") if "loss" in line][-1]
    seed = json.loads((run / "run.json").read_text())["seed"]
    return {"seed": seed, "steps": last["step"], "seconds": round(last["seconds"])}


def joins(model: Any) -> list[Join]:
    """What the slots of a model can be joined by."""
    if isinstance(model, VolumeDiscovery):
        return ["area"]  # whole films are one cut: nothing is joined
    return ["matching", "hungarian", "area"] if isinstance(model, PairDiscovery) else ["hungarian", "area"]


def is_judged(join: str, scores: dict[str, Any]) -> bool:
    """Whether every row of this join has its scores."""
    return all(prefix + SCORES[0] in scores.get(join, {}) for each, prefix in ROWS if each == join)


def write_table(path: Path, results: dict[str, Any]) -> None:
    """Puts the table between its two marks."""
    heads = "slots | trained on | joined over time by | seed | steps | ARI-FG | ARI | by frame | by frame | switches"
    lines = [f"| {heads} |", "|---|---|---|---|---|---|---|---|---|---|"]
    for name, (kind, data, _) in RUNS.items():
        facts, scores = results[name]["training"], results[name]["scores"]
        for (join, prefix), how in ROWS.items():
            if join not in scores:
                continue
            if kind == "cut through time":
                how = "one cut of the film" + (", masks read and joined" if prefix else "")
            cells = [kind, data, how, str(facts["seed"]), f"{facts['steps']:,}"]
            cells += [f"{100 * scores[join][prefix + score]:.1f}" for score in SCORES]
            cells.append(f"{scores[join][f'{prefix}switches']:.1f}")
            lines.append("| " + " | ".join(cells) + " |")
    lines += [
        "| Slot Attention | single frames | Hungarian, published, MOVi-A | | | 4.2 | 0.3 | | | |",
        "| the paper | matched pairs | published, MOVi-A | | | 65.6 | 77.7 | | | |",
    ]
    before, rest = path.read_text().split("<!-- table -->\n")
    after = rest.split("<!-- end of table -->")[1]
    text = before + "<!-- table -->\n" + "\n".join(lines) + "\n<!-- end of table -->" + after
    write_atomically(path, text.encode())


if __name__ == "__main__":
    main(tyro.cli(Options))
