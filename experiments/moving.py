"""Videos: what the cut, learned matching and the association of slots over time contribute. Writes docs/moving.md.

    python -m experiments.moving --runs runs/moving --docs docs    # trains and evaluates what is missing, writes
    python -m experiments.moving ... --parallel                    # all training runs at once on one GPU

Every run is preset `ours-video` with a few options changed, trained for the same time on `moving` scenes. Every model
is evaluated on test videos with every association that it has, and with refined masks by its default association.
Run the same command again to resume.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import tyro

from cutslots.devices import make_fabric
from cutslots.evaluation.evaluate import evaluate_model
from cutslots.evaluation.published import PAPER, published_results
from cutslots.evaluation.visualize import visualization_grid, visualize_videos
from cutslots.files import read_lines, write_atomically
from cutslots.models.checkpoints import load
from cutslots.scenes import Scenes
from cutslots.viz.images import encode_png
from experiments.study import write_table


class Run(NamedTuple):
    method: str
    trained_on: str
    changes: list[str]  # of preset ours-video


FRAMES = ["--model", "discovery", "--batch-size", "32"]
SPACETIME = ["--model", "spacetime-discovery", "--slots.partition", "spacetime-cut"]
RUNS = {
    "cut-pairs-0": Run("cut", "matched pairs", []),
    "cut-pairs-1": Run("cut", "matched pairs", ["--seed", "1"]),
    "cut-frames-0": Run("cut", "single frames", FRAMES),
    "spacetime-0": Run("spacetime cut", "clips of 2 frames", SPACETIME),
}
ROWS = {  # association and prefix of metrics, with their names in the table
    ("learned", ""): ("learned matching", "decoder"),
    ("hungarian", ""): ("Hungarian", "decoder"),
    ("area", ""): ("area (ours)", "decoder"),
    ("area", "refined_"): ("area (ours)", "refined"),
    ("overlap", ""): ("none: one cut of the video", "decoder"),
    ("overlap", "refined_"): ("none: one cut of the video", "refined"),
}
METRICS = ("ari_fg", "ari", "frame_ari_fg", "frame_ari")


@dataclasses.dataclass
class Options:
    runs: Path
    """Folder of the run folders."""
    docs: Path
    """Folder of moving.json, moving.md and img/moving.png."""
    max_minutes: float = 8.2
    """Training time of each run."""
    num_videos: int = 64
    """Videos of the test split to evaluate on."""
    parallel: bool = False
    """Train all runs at once, sharing the device."""
    shown: str = "cut-frames-0"
    """The run in the figure."""


def main(options: Options) -> None:
    train(options)
    path = options.docs / "moving.json"
    results = json.loads(path.read_text()) if path.is_file() else {}
    fabric = make_fabric("auto", 1, 1, "auto")
    for name in RUNS:
        facts = {"training": training_facts(options.runs / name), "videos": options.num_videos}
        if any(results.get(name, {}).get(key) != value for key, value in facts.items()):
            results[name] = {**facts, "scores": {}}
        scores = results[name]["scores"]
        model = load(options.runs / name, fabric.device)
        missing = [association for association in model.associations if not is_evaluated(association, scores)]
        scenes = Scenes("moving", "test", model.image_size, count=options.num_videos)
        videos = scenes.cache(options.runs / f"videos-{options.num_videos}", fabric.device)
        if name == options.shown and not (options.docs / "img" / "moving.png").is_file():
            shown = visualize_videos(model, videos, fabric, 1).videos[0].subsample(6)
            write_atomically(options.docs / "img" / "moving.png", encode_png(visualization_grid(shown)))
        for association in missing:
            title = f"{name}, {association}"
            means = evaluate_model(model, videos, fabric, title=title, association=association).means()
            scores[association] = means | scores.get(association, {})  # recorded values stay
            results[name]["date"] = f"{datetime.date.today()}"
            write_atomically(path, json.dumps(results, indent=1).encode())
    write_table(options.docs / "moving.md", table(results))
    print(f"wrote {path} and the table in {options.docs / 'moving.md'}")


def train(options: Options) -> None:
    processes: list[subprocess.Popen[bytes]] = []
    for name, run in RUNS.items():
        if (options.runs / name / "model.safetensors").is_file() and not (options.runs / name / "state.pt").is_file():
            continue  # trained on another machine, where the training state remained
        command = [sys.executable, "-m", "cutslots", "train", "ours-video", "--max-steps", "1000000", *run.changes]
        command += ["--max-minutes", str(options.max_minutes), "--out", str(options.runs / name)]
        processes.append(subprocess.Popen([*command, "--cache-dir", str(options.runs / "cache")]))
        if not options.parallel and processes[-1].wait():
            break
    if any([process.wait() for process in processes]):
        sys.exit("a training run failed or was interrupted; run the same command again to resume")


def training_facts(run: Path) -> dict[str, Any]:
    """Return the seed, steps and seconds of a run."""
    last = [line for line in read_lines(run / "metrics.jsonl") if "loss" in line][-1]
    seed = json.loads((run / "run.json").read_text())["seed"]
    return {"seed": seed, "steps": last["step"], "seconds": round(last["seconds"])}


def is_evaluated(association: str, scores: dict[str, Any]) -> bool:
    """Return whether every row of this association has its metrics."""
    return all(prefix + METRICS[0] in scores.get(association, {}) for each, prefix in ROWS if each == association)


def table(results: dict[str, Any]) -> str:
    heads = "method | trained on | association | masks | seed | steps"
    heads += " | ARI-FG | ARI | ARI-FG per frame | ARI per frame | ID switches"
    lines = [f"| {heads} |", "|" + "---|" * (heads.count("|") + 1)]
    for name, run in RUNS.items():
        facts, scores = results[name]["training"], results[name]["scores"]
        for (association, prefix), labels in ROWS.items():
            if association not in scores:
                continue
            means = scores[association]
            cells = [run.method, run.trained_on, *labels, str(facts["seed"]), f"{facts['steps']:,}"]
            cells += [f"{100 * means[prefix + metric]:.1f}" for metric in METRICS]
            lines.append("| " + " | ".join([*cells, f"{means[prefix + 'id_switches']:.1f}"]) + " |")
    for dataset, method, metrics in published_results(["moving"]):
        row = "the paper | matched pairs |" if method == PAPER else "Slot Attention | single frames | Hungarian"
        scores = f"{metrics['ari_fg']} | {metrics['ari']}"
        lines.append(f"| {row.replace(' |', f', published, {dataset} |', 1)} | | | | {scores} | | | |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main(tyro.cli(Options))
