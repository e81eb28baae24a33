import dataclasses
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from cutslots.models.checkpoints import load
from cutslots.training.loop import validate
from cutslots.training.presets import PRESETS
from experiments import comparison, study, table
from experiments.results import ABLATIONS, PAPER_RUNS, PARTITION, SLOT_ATTENTION_LR, TEMPERATURE
from experiments.table import Options, Run, all_runs, is_done, run_all
from tests.small_runs import Module, lines, weights

ROOT = Path(__file__).parents[2]


@pytest.fixture
def options(tmp_path, monkeypatch):
    """Options as a user gives them, at the top of the repository."""
    monkeypatch.chdir(ROOT)
    return Options(runs=tmp_path / "runs", docs=tmp_path / "docs", quick=True, jobs=2, write=False)


def selected(options):
    return all_runs(options, options.only)


def group(name):
    return all_runs(Options(Path("runs")), [name])


def flatten(value, prefix=""):
    """Return the options of a config by path. The name of a part is an option too."""
    flat = {prefix: type(value).__name__} if prefix else {}
    for field in dataclasses.fields(value):
        path, each = f"{prefix}.{field.name}".lstrip("."), getattr(value, field.name)
        flat |= flatten(each, path) if dataclasses.is_dataclass(each) else {path: each}
    return flat


def differences(one, other):
    """Return the paths of options that differ. Of a part that is another, only its name."""
    a, b = flatten(one), flatten(other)
    different = {path for path in a.keys() | b.keys() if a.get(path) != b.get(path)}
    return {path for path in different if not any(path.startswith(f"{part}.") for part in different)}


# ---------------------------------------------------------------------------------------------------------------- runs


def test_run_names_give_group_and_seed():
    runs = all_runs(Options(Path("runs")))
    for name, run in runs.items():
        folder, _, rest = name.partition("/")
        assert folder == run.group and rest.endswith(f"-{run.config.seed}") and ":" not in rest
    assert len({(run.group, repr(run.config)) for run in runs.values()}) == len(runs), "no run twice"
    counts = {
        "paper": 4,
        "partition": 6,
        "temperature": 11,
        "slot_attention_lr": len(SLOT_ATTENTION_LR),
        "ablations": 3 * len(ABLATIONS),
    }
    assert counts == {group: sum(run.group == group for run in runs.values()) for group in table.Group.__args__}


def test_runs_of_the_papers_presets_change_the_schedule_alone():
    runs = group("paper")
    assert {name.partition("/")[2].rpartition("-")[0] for name in runs} == set(PAPER_RUNS), "the table lists every run"
    schedule = {"seed", "num_images", "lr_decay_steps", "max_steps", "eval_every"}
    schedule |= {"data.texture_ramp_start", "data.texture_ramp_end"}
    for name, run in runs.items():
        assert differences(run.config, PRESETS[run.config.preset]) <= schedule, name
        assert run.test_data == (("plain",) if "plain" in name else ("textured", "ood", "camo")), name
    seeds = {name: [f"paper/{name}-{seed}" in runs for seed in range(3)] for name in PAPER_RUNS}
    assert all(seeds["clevrtex-textured"])


def test_partition_runs_differ_in_the_partition_alone():
    runs = group("partition")
    assert {name.partition("/")[2].rpartition("-")[0] for name in runs} == set(PARTITION), "the table lists every run"
    for seed in range(3):
        cut, softmax = (runs[f"partition/{name}-{seed}"] for name in ("cut", "softmax"))
        assert differences(cut.config, softmax.config) == {"model.slots.partition"}
        assert cut.config.model.encoder == PRESETS["clevrtex"].model.encoder and cut.config.model.encoder.batch_norm
        assert cut.test_data == softmax.test_data == ("textured:3-6", "camo:3-6")


def test_readings_of_the_temperature_differ_in_nothing_else():
    runs = group("temperature")
    listed = {name.rpartition("-")[0] for name in runs} | {"partition/cut"}
    assert listed == set(TEMPERATURE), "the table lists every run"
    pairs = [(runs[f"temperature/background-plain-{s}"], runs[f"temperature/combined-plain-{s}"]) for s in range(4)]
    cuts = group("partition")
    pairs += [(runs[f"temperature/background-textured-{s}"], cuts[f"partition/cut-{s}"]) for s in range(3)]
    for one, other in pairs:
        partition = "model.slots.partition"
        changed = {f"{partition}.background_temperature", f"{partition}.combined_temperature"}
        assert differences(one.config, other.config) == changed and one.test_data == other.test_data
        assert other.config.model.slots.partition.combined_temperature == 0.1


def test_sweep_of_slot_attention_is_a_shorter_comparison_with_other_learning_rates():
    runs = group("slot_attention_lr")
    assert set(runs) == {f"slot_attention_lr/{name}-8" for name in SLOT_ATTENTION_LR}, "the table lists every run"
    attention = comparison.run_config("slot-attention-0", study.Options(Path("runs")))
    shorter = {"lr", "warmup_steps", "seed", "max_steps", "num_images", "num_eval_images", "data.num_flat_scenes"}
    for name, (lr, warmup) in SLOT_ATTENTION_LR.items():
        run = runs[f"slot_attention_lr/{name}-8"]
        config = run.config
        assert differences(config, attention) <= shorter, name
        assert (config.lr, config.warmup_steps, config.max_steps) == (float(lr), warmup, 4_000), name
        assert config.max_steps % config.eval_every == 0 and run.test_data == (), "evaluated on validation scenes"
    swept = {(run.config.lr, run.config.warmup_steps) for run in runs.values()}
    assert len(swept) == 8 and (attention.lr, attention.warmup_steps) in swept, "the comparison has one of them"
    others = {run.config.seed for name, run in all_runs(Options(Path("runs"))).items() if name not in runs}
    assert not (others | set(study.SEEDS)) & {run.config.seed for run in runs.values()}, (
        "no result has the seed of the sweep"
    )


def test_ablations_have_three_seeds_and_one_change():
    runs = group("ablations")
    seeds = {name: [seed for seed in range(9) if f"ablations/{name}-{seed}" in runs] for name in ABLATIONS}
    assert sum(map(len, seeds.values())) == len(runs), "the table lists every ablation"
    two_changes = {"relative-positions-pyramid": {"model.slots.relative_positions", "model.encoder.pyramid_levels"}}
    for name, found in seeds.items():
        assert len(found) >= 3, name
        first, *others = (runs[f"ablations/{name}-{seed}"].config for seed in found)
        assert first.seed == found[0] and all(differences(first, other) == {"seed"} for other in others), name
        base = runs[f"ablations/{'plain-base' if name.startswith('plain') else 'base'}-0"].config
        changed = differences(first, base)
        one = len(changed) == (not name.endswith("base"))
        assert changed == two_changes[name] if name in two_changes else one, name
    decoder = runs["ablations/spatial-broadcast-0"].config.model.decoder
    assert (decoder.channels, decoder.extra_layers) == ((64,), 1), "the paper's"


def test_ablations_are_evaluated_on_scenes_like_those_of_training():
    runs = group("ablations")
    assert runs["ablations/base-2"].test_data == ("textured:3-6", "camo:3-6")
    assert runs["ablations/plain-base-0"].test_data == ("plain:3-6",)


def test_every_config_is_valid(tmp_path):
    """One run of each kind, with quick options."""
    seen = {}
    for run in all_runs(Options(tmp_path, quick=True)).values():
        seen.setdefault(repr(dataclasses.replace(run.config, seed=0)), run.config)
    for config in seen.values():
        assert (config.max_steps, config.model.image_size, config.compile) == (4, (16, 16), "off")
        validate(dataclasses.replace(config, accelerator="cpu"))


# ------------------------------------------------------------------------------------------------------------ all runs


def replace_processes(monkeypatch, code):
    """Start processes that run this code, with `name` and `folder` of the run. Return the names of started runs."""
    started = []

    def start(name, options):
        started.append(name)
        folder = options.runs / name
        setup = f"import pathlib, time; name, folder = {name!r}, pathlib.Path({str(folder)!r})\n"
        return subprocess.Popen([sys.executable, "-c", setup + code])

    monkeypatch.setattr(table, "start", start)
    return started


FINISH = "folder.mkdir(parents=True, exist_ok=True); (folder / 'done').touch()"


def some_runs(*names):
    return {name: Run("ablations", table.parse(table.ABLATION_BASE), ()) for name in names}


def test_finished_runs_are_skipped(options, monkeypatch, capsys):
    started = replace_processes(monkeypatch, FINISH)
    assert run_all(some_runs("a/1", "a/2", "b/1"), options) and started == ["a/1", "a/2", "b/1"]
    assert sorted(capsys.readouterr().out.splitlines())[0].startswith("a/1: step 0, no metrics; ")
    assert run_all(some_runs("a/1", "a/2", "b/1"), options) and len(started) == 3
    assert run_all(some_runs("a/1", "c/1"), options) and started[3:] == ["c/1"]
    assert run_all({}, options)


def test_number_of_jobs(options, monkeypatch):
    """Each process writes when it began and ended."""
    code = FINISH + "; n = time.time(); time.sleep(0.5); (folder / 'when').write_text(f'{n} {time.time()}')"
    replace_processes(monkeypatch, code)
    names = [f"a/{i}" for i in range(4)]
    assert run_all(some_runs(*names), dataclasses.replace(options, jobs=2))
    spans = [tuple(map(float, (options.runs / name / "when").read_text().split())) for name in names]
    assert max(sum(start <= at < end for start, end in spans) for at, _ in spans) <= 2


def test_runs_of_one_network_wait_until_it_is_compiled(options, monkeypatch):
    code = "folder.mkdir(parents=True); n = time.time(); time.sleep(1); (folder / 'metrics.jsonl').touch(); "
    code += "time.sleep(1); (folder / 'when').write_text(str(n)); (folder / 'done').touch()"
    replace_processes(monkeypatch, code)
    runs = {f"a/{i}": Run("partition", table.parse(table.PARTITION_BASE), ()) for i in range(3)}
    assert run_all(runs, dataclasses.replace(options, jobs=3))
    first, *others = sorted(float((options.runs / name / "when").read_text()) for name in runs)
    assert all(other > first + 1 for other in others)


def test_failed_run_does_not_stop_the_others(options, monkeypatch, capsys):
    replace_processes(monkeypatch, f"if name == 'a/1': raise SystemExit(3)\n{FINISH}")
    assert not run_all(some_runs("a/1", "a/2", "a/3"), options)
    assert [is_done(options.runs / f"a/{i}") for i in (1, 2, 3)] == [False, True, True]
    failed = [line for line in capsys.readouterr().out.splitlines() if "FAILED" in line]
    assert len(failed) == 1 and f"a/1: step 0, no metrics FAILED (3), see {options.runs}/logs/a-1.txt;" in failed[0]


def test_stop_after(options, monkeypatch):
    """Running processes get SIGTERM and time to save; waiting runs are not started."""
    code = "import signal, sys; folder.mkdir(parents=True); (folder / 'begun').touch()\n"
    code += "def stop(*_): (folder / 'saved').touch(); sys.exit(143)\n"
    code += "signal.signal(signal.SIGTERM, stop); time.sleep(60)"
    started = replace_processes(monkeypatch, code)
    before = time.monotonic()
    assert not run_all(some_runs("a/1", "a/2", "a/3"), dataclasses.replace(options, stop_after=3 / 60))
    assert time.monotonic() - before < 30 and started == ["a/1", "a/2"]
    assert all((options.runs / name / "saved").exists() for name in started)


def test_report_prints_the_last_metrics(options, capsys):
    folder = options.runs / "a" / "1"
    folder.mkdir(parents=True)
    logged = [{"step": step, "val": {"ari_fg": a, "miou": b}} for step, a, b in ((500, 0.5, 0.1), (1000, 0.725, 0.31))]
    logged += [{"step": 1020, "loss": 0.1}]
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, logged)))
    table.report("a/1", 0, options.runs, "2 waiting")
    assert capsys.readouterr().out == "a/1: step 1,020, ARI-FG 72.5, mIoU 31.0; 2 waiting\n"


def test_interrupted_runs_resume(options, monkeypatch):
    """Two tiny runs in processes of their own: stopped almost at once, resumed, then left unchanged."""
    options = dataclasses.replace(options, only=("slot_attention_lr",))
    runs = {name: run for name, run in selected(options).items() if "/lr-1e-4-" in name}
    assert len(runs) == 2
    assert not run_all(runs, dataclasses.replace(options, stop_after=0.005))
    assert not any(is_done(options.runs / name) for name in runs)
    monkeypatch.setattr(table, "start_process", Module.start)
    assert run_all(runs, options), "\n".join(p.read_text() for p in (options.runs / "logs").iterdir())
    for name, run in runs.items():
        folder = options.runs / name
        assert lines(folder)[-1]["step"] == 4 and load(folder).config == run.config.model, name
        facts = json.loads((folder / "machine.json").read_text())
        assert facts["torch"] == torch.__version__ and set(facts) == {"device", "torch", "scipy", "python", "date"}
    before = {p: p.stat().st_mtime_ns for p in options.runs.rglob("*") if p.is_file()}
    assert run_all(runs, options)
    assert {p: p.stat().st_mtime_ns for p in options.runs.rglob("*") if p.is_file()} == before, "nothing is left to do"


# ------------------------------------------------------------------------------------------------------------- one run


@pytest.fixture
def one(options):
    """The smallest run that is evaluated."""
    options = dataclasses.replace(options, num_images=3)
    run = all_runs(options, ["ablations"])["ablations/plain-base-0"]
    return options, dataclasses.replace(run, config=dataclasses.replace(run.config, accelerator="cpu"))


def test_run_is_trained_and_evaluated(one):
    options, run = one
    folder = options.runs / "ablations" / "plain-base-0"
    table.run_one(folder, run, options)
    results = json.loads((folder / "evaluation" / "results.json").read_text())["results"]
    assert list(results) == ["plain:3-6"] and results["plain:3-6"]["num_images"] == 3
    assert is_done(folder) and not table.is_imported(folder)


def test_imported_weights_are_only_evaluated(one):
    options, run = one
    folder = options.runs / "ablations" / "plain-base-0"
    table.run_one(folder, run, options)
    for name in ("state.pt", "done"):
        (folder / name).unlink()
    before, metrics = weights(folder), lines(folder)
    table.run_one(folder, dataclasses.replace(run, test_data=("camo:3-6",)), options)
    assert is_done(folder) and not (folder / "state.pt").exists()
    assert weights(folder) == before and lines(folder) == metrics
    assert list(json.loads((folder / "evaluation" / "results.json").read_text())["results"]) == ["camo:3-6"]


def test_fixed_grid_baseline(options):
    """It ignores the images, so its ARI is low. It is evaluated once for a number of images."""
    file, options = options.runs / "fixed_grid.json", dataclasses.replace(options, num_images=8)
    table.evaluate_fixed_grid(file, options)
    found = json.loads(file.read_text())
    assert found.pop("request") == [8, True]
    assert set(found) == {"plain", "textured", "ood", "camo", "textured:3-6", "camo:3-6", "plain:3-6"}
    assert {family: each["num_slots"] for family, each in found.items()} == {
        family: 8 if ":" in family else 11 for family in found
    }
    assert all(each["num_images"] == 8 and each["ari"] < 0.2 and each["miou"] < 0.4 for each in found.values())
    before = file.stat().st_mtime_ns
    table.evaluate_fixed_grid(file, options)
    assert file.stat().st_mtime_ns == before
    table.evaluate_fixed_grid(file, dataclasses.replace(options, num_images=4))
    assert json.loads(file.read_text())["plain"]["num_images"] == 4
