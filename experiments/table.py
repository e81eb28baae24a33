"""The table: every model on every family of scenes, the studies, the plateau. Interrupted, the same command goes on.

    python -m experiments.table --runs runs/table --docs docs        # trains what is missing, judges, writes
    python -m experiments.table ... --together 8 --stop-after 9      # eight at a time on one GPU, for nine minutes
    python -m experiments.table ... --only studies                   # or headline, ours, rising, plateau, renders
    python -m experiments.table ... --quick                          # a few steps on a few tiny pictures, to try it all

A run is a preset with a few numbers changed; its folder holds all that is told of it: run.json, metrics.jsonl,
machine.json, evaluation/results.json. What is trained and judged is not done again. docs/results.json collects the
records, and the tables, curves and pictures of docs/results.md are made from it; the words around them are not.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import tyro

from cutslots.disk import read_lines, write_atomically
from cutslots.presets import PRESETS, TrainConfig

Group = Literal["headline", "ours", "rising", "plateau", "studies", "renders"]
SEEDS = (0, 1, 2)
UNSEEN = {"plain": ("plain",), "textured": ("textured", "ood", "camo")}  # what a model of a family is judged on
METHODS = ("paper", "free", "ground", "anchored", "attention", "softmax")
COURSES = {
    "ground-textured-1": (2_000, 5_000),
    "softmax-textured-0": (1_500, 3_500),
    "softmax-textured-1": (2_500, 7_000),
}
FIRST = "ours/ground-textured-1"  # whose weights others begin with
RISING = ("ground", "softmax", "attention")  # compared on one course, that of preset `best`
SAME: dict[str, Any] = {"images": 24_000, "eval_every": 500, "eval_images": 128}  # for all of the headline


@dataclass(frozen=True)
class Run:
    group: Group
    config: TrainConfig
    judged: tuple[str, ...]  # on the test split of each


@dataclass
class Options:
    runs: Path
    """Where the run folders are, or come to be."""
    docs: Path = Path("docs")
    """Where results.json and the tables in results.md are written."""
    renders: Path | None = None
    """A folder with train/ and val/ of rendered pictures, for rows on them; left out without it."""
    only: tuple[Group, ...] = ("headline", "ours", "rising", "plateau", "studies", "renders")
    """Which runs."""
    minutes: float = 8.5
    """Of training, for each run of the headline, of ours and on renders."""
    together: int = 1
    """Runs at a time, sharing the device."""
    stop_after: float | None = None
    """Minutes after which what runs is saved and stopped; the same command goes on."""
    images: int = 1000
    """Of each family's test split, to judge by."""
    write: bool = True
    """Whether to write the documents."""
    quick: bool = False
    """A few steps on a few tiny pictures."""
    one: str | None = None
    """Only this run, in this process."""


def main(options: Options) -> None:
    options.runs = options.runs.resolve()  # what begins with another run's weights names them by their path
    runs = {name: run for name, run in all_runs(options).items() if run.group in options.only}
    if options.one is not None:
        if options.one not in all_runs(options):
            sys.exit(f"--one is {options.one!r}; expected a run, as in {next(iter(runs), 'studies/base-0')}")
        do(options.runs / options.one, all_runs(options)[options.one], options)
        return
    finished = do_all(runs, options)
    if options.write:
        from experiments.results import write_results

        note_blocks(options.runs / "blocks.json", options)
        write_results(options.runs, options.docs, list(all_runs(options)))
    if not finished:
        sys.exit("some runs are not done; the same command goes on")


# ---------------------------------------------------------------------------------------------------------------- runs


def all_runs(options: Options) -> dict[str, Run]:
    """Every run by the name of its folder."""
    runs = {}
    for family in UNSEEN:
        for method in METHODS:
            config = replace(headline(method, family), minutes=options.minutes, steps=10**6)
            runs[f"headline/{method}-{family}-0"] = Run("headline", config, UNSEEN[family])
    for name, config in ours(options.runs / FIRST).items():
        config = replace(config, minutes=options.minutes, steps=10**6)
        runs[f"ours/{name}"] = Run("ours", config, UNSEEN[config.data])
    for method in RISING:
        for seed in SEEDS:
            runs[f"rising/{method}-textured-{seed}"] = Run("rising", rising(method, seed), UNSEEN["textured"])
    for method in ("ground", "attention"):
        for seed in SEEDS[1:]:  # the headline's run is the first
            config = replace(headline(method, "textured"), seed=seed, steps=3_000)
            runs[f"plateau/{method}-textured-{seed}"] = Run("plateau", config, ())
    for name, config in studies().items():
        for seed in SEEDS:
            family = config.data.partition(":")[0]
            judged = tuple(f"{unseen}:3-6" for unseen in UNSEEN[family] if unseen != "ood")
            runs[f"studies/{name}-{seed}"] = Run("studies", replace(config, seed=seed), judged)
    if options.renders is not None:
        config = replace(headline("free", "textured"), data=str(options.renders), flips=True, minutes=options.minutes)
        config = replace(config, steps=10**6, eval_images=100)
        runs["renders/alone-0"] = Run("renders", config, ())
        config = replace(config, model=PRESETS["best"].model, start=str(options.runs / FIRST), seed=1, blur=0.0)
        config = replace(config, lr=5e-4, warmup=100, decay_steps=2_500)
        runs["renders/started-1"] = Run("renders", config, ())
    return {name: quickened(run) for name, run in runs.items()} if options.quick else runs


def quickened(run: Run) -> Run:
    model = replace(run.config.model, size=16, context=min(run.config.model.context, 1), reach=None)
    few: dict[str, Any] = {"steps": 4, "batch": 4, "images": 8, "eval_every": 2, "eval_images": 4, "compile": "off"}
    return replace(run, config=replace(run.config, model=model, **few))


def headline(method: str, family: str) -> TrainConfig:
    """The paper's preset for a family; cuts with free terminals in our network, with the background's or all anchored;
    the baseline and the control in our network. Textures are whole from the start."""
    if method == "paper":
        return replace(PRESETS["clevr" if family == "plain" else "clevrtex"], **SAME)
    free = replace(PRESETS["best"], data=family, flat_until=0, whole_from=0, **SAME)
    free = replace(free, model=replace(free.model, background_anchor=None))
    changed: dict[str, dict[str, Any]] = {
        "free": {},
        "ground": {"background_anchor": 1.0},
        "anchored": {"anchor": 1.0},
    }
    return replace(free, model=replace(free.model, **changed.get(method, {"module": method})))


def ours(first: Path) -> dict[str, TrainConfig]:
    """Past the paper: textures that rise, with the cut of preset `best` and its control; the first of them gone on with
    among scenes whose objects are near the ground in colour; the control on plain scenes, with a slot to spare."""
    best = replace(PRESETS["best"], **SAME | {"eval_every": 1_000})
    found = {}
    for name, (flat, whole) in COURSES.items():
        module: Any = "softmax" if name.startswith("softmax") else "cut"
        config = replace(best, model=replace(best.model, module=module), seed=int(name[-1]), images=48_000)
        found[name] = replace(config, flat_until=flat, whole_from=whole)
    near = replace(best, seed=1, flat_until=0, whole_from=0, near=0.5, start=str(first))
    found["near-textured-1"] = replace(near, blur=0.0, lr=5e-4, warmup=100, decay_steps=4_500)
    plain = replace(best.model, module="softmax", slots=12)
    found["softmax-plain-0"] = replace(best, data="plain", model=plain, flat_until=0, whole_from=0)
    return found


def rising(method: str, seed: int) -> TrainConfig:
    """A method of the headline with textures that rise as in preset `best`, for as many steps whatever it costs."""
    course = PRESETS["best"]
    config = replace(headline(method, "textured"), flat_until=course.flat_until, whole_from=course.whole_from)
    return replace(config, seed=seed, steps=10_000)


def studies() -> dict[str, TrainConfig]:
    """One number changed at a time: a small network at 64x64, the paper's numbers in its partition."""
    base = replace(PRESETS["tiny"], data="textured:3-6", batch=32, steps=2_000, images=20_000, compile="off")
    base = replace(base, model=replace(base.model, slots=8), lr=8e-4, warmup=200, decay_steps=2_000)
    base = replace(base, eval_every=250, eval_images=128)
    plain = replace(base, data="plain:3-6")
    changed: dict[str, dict[str, Any]] = {
        "base": {},
        "softmax": {"module": "softmax"},
        "attention": {"module": "attention"},
        "reach-2": {"reach": 2.0},
        "reach-4": {"reach": 4.0},
        "reach-8": {"reach": 8.0},
        "temperature-0.2": {"temperature": 0.2},
        "temperature-1": {"temperature": 1.0},
        "gamma-0.1": {"gamma": 0.1},
        "gamma-2": {"gamma": 2.0},
        "pool-weighted": {"pool": "weighted"},
        "background-none": {"background": "none"},
        "relu": {"signed": False},
        "placed": {"placed": True},
        "placed-context": {"placed": True, "context": 3},
        "decoder-transposed": {"decoder": "transposed", "decoder_maps": (64,), "decoder_extra": 1},
        "features-64": {"feature_maps": 64},
    }
    found = {name: replace(base, model=replace(base.model, **change)) for name, change in changed.items()}
    found["rate-4e-4"] = replace(base, lr=4e-4)
    found["batch-64"] = replace(base, batch=64)
    for name in ("base", "softmax"):
        found[f"plain-{name}"] = replace(plain, model=replace(plain.model, **changed[name]))
    return found


# ------------------------------------------------------------------------------------------------------------- one run


def do(folder: Path, run: Run, options: Options) -> None:
    """Trains a run, or goes on with it, and judges it."""
    from cutslots.devices import make_fabric
    from cutslots.evaluate import evaluate
    from cutslots.train import train

    if not brought(folder):
        train(replace(run.config, out=folder, cache=options.runs / "cache", save_minutes=2.0))
        note_machine(folder / "machine.json")
    fabric = make_fabric("auto", 1, 1, "32-true")
    judged = run.judged
    on_renders = run.group == "renders" or folder in (options.runs / "headline/free-textured-0", options.runs / FIRST)
    if options.renders is not None and on_renders:
        evaluate(str(folder), (str(options.renders),), folder / "renders", "val", None, fabric)
    if judged:
        evaluate(str(folder), judged, folder / "evaluation", "test", options.images, fabric)
    write_atomically(folder / "done", b"")


def done(folder: Path) -> bool:
    return (folder / "done").is_file()


def brought(folder: Path) -> bool:
    """Whether weights were trained elsewhere, to the end: their training state stayed there."""
    return (folder / "model.safetensors").is_file() and not (folder / "state.pt").is_file()


def note_machine(file: Path) -> None:
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{torch.get_num_threads()} CPU threads"
    facts = {"device": device, "torch": torch.__version__, "python": platform.python_version()}
    write_atomically(file, json.dumps(facts | {"date": f"{datetime.date.today()}"}).encode())


def note_blocks(file: Path, options: Options) -> None:
    """What one scores who looks at nothing: every picture parted into the same blocks, as many as there are slots."""
    import torch
    from scipy.cluster.vq import kmeans2

    from cutslots import metrics
    from cutslots.data import open_data

    asked = [options.images, options.quick]
    if file.is_file() and json.loads(file.read_text()).get("asked") == asked:
        return
    found: dict[str, Any] = {"asked": asked}
    for name in ("headline/free-plain-0", "headline/free-textured-0", "studies/plain-base-0", "studies/base-0"):
        run = all_runs(options)[name]
        for family in run.judged:
            size, scores = run.config.model.size, metrics.Scores()
            pixels = torch.cartesian_prod(*2 * [torch.arange(size, dtype=torch.float64)]).numpy()
            blocks = torch.from_numpy(kmeans2(pixels, run.config.model.slots, iter=50, minit="++", seed=0)[1])
            data = open_data(family, "test", size, options.images)
            for numbers in torch.arange(len(data)).split(32):
                truth = data.render(numbers.numpy(), torch.device("cpu")).mask
                scores.add(numbers.tolist(), metrics.score(truth, blocks.view(1, size, size).expand_as(truth)))
            found[family] = {"slots": run.config.model.slots, "images": len(data), **scores.means()}
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, json.dumps(found).encode())


# ------------------------------------------------------------------------------------------------------------ all runs


def do_all(runs: dict[str, Run], options: Options) -> bool:
    """Each missing run in a process of its own, so many at a time. Whether all are done now."""
    end = time.monotonic() + 60 * (1e6 if options.stop_after is None else options.stop_after)
    missing = [name for name in runs if not done(options.runs / name)]
    going: dict[str, subprocess.Popen[bytes]] = {}
    failed: set[str] = set()

    def compiles(name: str) -> bool:
        """Whether a run that was begun compiles this one's network now: to wait is faster, for it is kept on disk."""
        config = runs[name].config
        same = [other for other in going if runs[other].config.model == config.model and config.compile != "off"]
        return bool(same) and not any((options.runs / other / "metrics.jsonl").is_file() for other in same)

    def waits(name: str) -> bool:
        """Whether it begins with the weights of a run that is not done; if that is not to come either, it is let go."""
        first = runs[name].config.start
        if first is None or done(Path(first)):
            return False
        if not any(first == str(options.runs / other) for other in (*missing, *going)):
            missing.remove(name)
            failed.add(name)
            print(f"{name}: begins with {first}, which is not done", flush=True)
        return True

    options.runs.mkdir(parents=True, exist_ok=True)
    while (missing or going) and time.monotonic() < end:
        for name in list(missing):
            if len(going) < options.together and not waits(name) and not compiles(name):
                missing.remove(name)
                going[name] = begin(name, options)
        time.sleep(0.2)
        for name, process in list(going.items()):
            if process.poll() is not None:
                del going[name]
                tell(name, process.returncode, options.runs, f"{len(missing)} waiting")
                if process.returncode:
                    failed.add(name)
    for process in going.values():
        process.send_signal(signal.SIGTERM)
    for process in going.values():
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
    return not (missing or going or failed)


def begin(name: str, options: Options) -> subprocess.Popen[bytes]:
    log = options.runs / "logs" / f"{name.replace('/', '-')}.txt"
    log.parent.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "experiments.table", "--one", name, "--runs", str(options.runs)]
    command += ["--minutes", str(options.minutes), "--images", str(options.images)]
    command += ["--renders", str(options.renders)] if options.renders else []
    command += ["--quick"] if options.quick else []
    threads = str(max(1, (os.cpu_count() or 1) // options.together))
    env = {"OMP_NUM_THREADS": threads, "TORCHINDUCTOR_COMPILE_THREADS": threads, **os.environ}
    with log.open("ab") as file:
        return subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=env)


def tell(name: str, code: int, runs: Path, more: str) -> None:
    lines = read_lines(runs / name / "metrics.jsonl")
    scores = next((line["val"] for line in reversed(lines) if "ari_fg" in line.get("val", {})), None)
    step = next((line["step"] for line in reversed(lines)), 0)
    seen = f"ARI-FG {100 * scores['ari_fg']:.1f}, mIoU {100 * scores['miou']:.1f}" if scores else "no scores"
    outcome = "" if code == 0 else f" FAILED ({code}), see {runs / 'logs' / name.replace('/', '-')}.txt"
    print(f"{name}: step {step:,}, {seen}{outcome}; {more}", flush=True)


if __name__ == "__main__":
    main(tyro.cli(Options))
