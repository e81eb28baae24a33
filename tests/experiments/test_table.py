import dataclasses
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from cutslots.model import load
from cutslots.presets import PRESETS
from cutslots.train import check
from experiments import table
from experiments.results import CALLED, OURS, RISING, SHIPPED, STUDIES
from experiments.table import Options, Run, all_runs, do_all, done
from tests.small_runs import lines, weights

ROOT = Path(__file__).parents[2]


@pytest.fixture
def options(tmp_path, monkeypatch):
    """As a user would give them, at the top of the repository."""
    monkeypatch.chdir(ROOT)
    return Options(runs=tmp_path / "runs", docs=tmp_path / "docs", quick=True, together=2, write=False)


def chosen(options):
    return {name: run for name, run in all_runs(options).items() if run.group in options.only}


def group(name, **changes):
    return {k: run for k, run in all_runs(Options(Path("runs"), **changes)).items() if run.group == name}


def differences(one, other):
    """What two flat dataclasses do not agree on."""
    return {f.name for f in dataclasses.fields(one) if getattr(one, f.name) != getattr(other, f.name)}


# ---------------------------------------------------------------------------------------------------------------- runs


def test_every_run_is_named_for_what_it_is():
    runs = all_runs(Options(Path("runs"), renders=Path("pictures")))
    for name, run in runs.items():
        folder, _, rest = name.partition("/")
        assert folder == run.group and rest.endswith(f"-{run.config.seed}") and ":" not in rest
    assert len({(run.group, repr(run.config)) for run in runs.values()}) == len(runs), "none is done twice"
    groups = {group: sum(run.group == group for run in runs.values()) for group in table.Group.__args__}
    counts = {
        "headline": 2 * len(CALLED),
        "ours": 5,
        "rising": 9,
        "plateau": 4,
        "studies": 3 * len(STUDIES),
        "renders": 2,
    }
    assert groups == counts
    assert "renders/alone-0" not in all_runs(Options(Path("runs")))


def test_the_headline_is_learned_for_the_same_time():
    runs = group("headline", minutes=3.5)
    assert set(runs) == {f"headline/{method}-{family}-0" for method in CALLED for family in ("plain", "textured")}
    for name, run in runs.items():
        config = run.config
        assert config.minutes == 3.5 and config.steps == 10**6 and config.seed == 0, name
        assert (config.images, config.eval_every, config.eval_images) == (24_000, 500, 128), name
        assert config.data == ("plain" if "plain" in name else "textured"), name
        assert run.judged == (("plain",) if "plain" in name else ("textured", "ood", "camo")), name


def test_the_baseline_and_the_control_differ_from_ours_in_the_slots_alone():
    runs = group("headline")
    for family in ("plain", "textured"):
        free, attention, softmax = (runs[f"headline/{m}-{family}-0"].config for m in ("free", "attention", "softmax"))
        for other in (attention, softmax):
            assert differences(free, other) == {"model"} and differences(free.model, other.model) == {"module"}
        assert (free.model.module, softmax.model.module, attention.model.module) == ("cut", "softmax", "attention")
    papers = [runs[f"headline/paper-{family}-0"].config.preset for family in ("plain", "textured")]
    assert papers == ["clevr", "clevrtex"]


def test_the_plateau_is_the_headline_with_other_seeds():
    runs, first = group("plateau"), group("headline")
    assert set(runs) == {f"plateau/{method}-textured-{seed}" for method in ("ground", "attention") for seed in (1, 2)}
    for name, run in runs.items():
        method = name.partition("/")[2].partition("-")[0]
        changed = differences(run.config, first[f"headline/{method}-textured-0"].config)
        assert changed == {"seed", "steps", "minutes"} and run.config.steps == 3_000 and run.judged == (), name


def test_one_course_is_the_presets_and_differs_in_seeds_and_slots_alone():
    runs = group("rising")
    assert set(runs) == {f"rising/{method}-textured-{seed}" for method in RISING for seed in range(3)}
    first, best = runs["rising/ground-textured-0"].config, PRESETS["best"]
    assert first.model == best.model and differences(first, best) <= {"steps", "images", "eval_images", "eval_every"}
    for name, run in runs.items():
        assert differences(run.config, first) <= {"seed", "model"} and run.judged == ("textured", "ood", "camo"), name
        assert differences(run.config.model, first.model) <= {"module", "background_anchor"}, name


def test_every_study_has_three_seeds_and_one_change():
    runs = group("studies")
    seeds = {name: [seed for seed in range(9) if f"studies/{name}-{seed}" in runs] for name in STUDIES}
    assert sum(map(len, seeds.values())) == len(runs), "the table names every study"
    several = {"placed-context": {"placed", "context"}}
    several["decoder-transposed"] = {"decoder", "decoder_maps", "decoder_extra"}
    for study, found in seeds.items():
        assert len(found) >= 3, study
        first, *others = (runs[f"studies/{study}-{seed}"].config for seed in found)
        assert first.seed == found[0] and all(differences(first, other) == {"seed"} for other in others), study
        base = runs[f"studies/{'plain-base' if study.startswith('plain') else 'base'}-0"].config
        changed = (differences(first, base) - {"model"}) | differences(first.model, base.model)
        one = len(changed) == (not study.endswith("base"))
        assert changed == several[study] if study in several else one, study
    judged = {name: run.judged for name, run in runs.items()}
    assert judged["studies/base-2"] == ("textured:3-6", "camo:3-6") and judged["studies/plain-base-0"] == ("plain:3-6",)


def test_ours_are_the_preset_and_its_control():
    """They differ in their slots, and in when textures are whole; others go on with the first of them."""
    runs = group("ours", minutes=3.5)
    assert {f"ours/{name}" for name in OURS} == set(runs) and {SHIPPED[name] for name in SHIPPED} <= set(runs)
    first = runs["ours/ground-textured-1"].config
    assert first.model == PRESETS["best"].model
    changed = {"images", "eval_every", "eval_images", "steps", "seed", "minutes"}
    assert differences(first, PRESETS["best"]) == changed
    for name in ("ours/softmax-textured-0", "ours/softmax-textured-1"):
        control = runs[name].config
        assert differences(control, first) - {"seed"} == {"model", "flat_until", "whole_from"}, name
        assert control.model == dataclasses.replace(first.model, module="softmax"), name
    near = runs["ours/near-textured-1"].config
    assert near.model == first.model and near.start == "runs/ours/ground-textured-1" and near.near == 0.5
    assert {run.config.minutes for run in runs.values()} == {3.5}
    assert {run.config.data: run.judged for run in runs.values()} == table.UNSEEN


def test_rendered_pictures_are_learned_from_alone_and_after_built_in_scenes():
    alone, started = group("renders", renders=Path("pictures"), minutes=2.0).values()
    free = group("headline")["headline/free-textured-0"].config
    assert differences(alone.config, free) == {"data", "flips", "minutes", "eval_images"}
    for run in (alone, started):
        assert (run.config.data, run.config.flips, run.config.minutes) == ("pictures", True, 2.0)
    assert started.config.start == "runs/ours/ground-textured-1"
    assert started.config.model == group("ours")["ours/ground-textured-1"].config.model


def test_every_run_can_begin(tmp_path):
    """One of each kind, in short: the numbers go together."""
    seen = {}
    for run in all_runs(Options(tmp_path, quick=True)).values():
        seen.setdefault(repr(dataclasses.replace(run.config, seed=0, minutes=None)), run.config)
    for config in seen.values():
        assert (config.steps, config.model.size, config.compile) == (4, 16, "off")
        check(dataclasses.replace(config, accelerator="cpu"))


# ------------------------------------------------------------------------------------------------------------ all runs


def stands_in(monkeypatch, code):
    """Processes that run this code instead; `name` and `folder` are the run's. What was begun."""
    begun = []

    def begin(name, options):
        begun.append(name)
        folder = options.runs / name
        told = f"import pathlib, time; name, folder = {name!r}, pathlib.Path({str(folder)!r})\n"
        return subprocess.Popen([sys.executable, "-c", told + code])

    monkeypatch.setattr(table, "begin", begin)
    return begun


FINISHES = "folder.mkdir(parents=True, exist_ok=True); (folder / 'done').touch()"


def some(*names):
    return {name: Run("studies", table.studies()["base"], ()) for name in names}


def test_what_is_done_is_not_done_again(options, monkeypatch, capsys):
    begun = stands_in(monkeypatch, FINISHES)
    assert do_all(some("a/1", "a/2", "b/1"), options) and begun == ["a/1", "a/2", "b/1"]
    assert sorted(capsys.readouterr().out.splitlines())[0].startswith("a/1: step 0, no scores; ")
    assert do_all(some("a/1", "a/2", "b/1"), options) and len(begun) == 3
    assert do_all(some("a/1", "c/1"), options) and begun[3:] == ["c/1"]
    assert do_all({}, options)


def test_so_many_at_a_time(options, monkeypatch):
    """Each notes when it began and ended."""
    code = FINISHES + "; n = time.time(); time.sleep(0.5); (folder / 'when').write_text(f'{n} {time.time()}')"
    stands_in(monkeypatch, code)
    names = [f"a/{i}" for i in range(4)]
    assert do_all(some(*names), dataclasses.replace(options, together=2))
    spans = [tuple(map(float, (options.runs / name / "when").read_text().split())) for name in names]
    most = max(sum(start <= at < end for start, end in spans) for at, _ in spans)
    assert most <= 2


def test_what_is_compiled_is_waited_for(options, monkeypatch):
    """Runs of one network, one after another until the first has got through its compiling."""
    code = "folder.mkdir(parents=True); n = time.time(); time.sleep(1); (folder / 'metrics.jsonl').touch(); "
    stands_in(monkeypatch, code + "time.sleep(1); (folder / 'when').write_text(str(n)); (folder / 'done').touch()")
    runs = {f"a/{i}": Run("plateau", table.headline("free", "plain"), ()) for i in range(3)}
    assert do_all(runs, dataclasses.replace(options, together=3))
    first, *others = sorted(float((options.runs / name / "when").read_text()) for name in runs)
    assert all(other > first + 1 for other in others)


def test_a_run_waits_for_the_weights_that_it_begins_with(options, monkeypatch):
    begun = stands_in(monkeypatch, "time.sleep(0.3)\n" + FINISHES)
    runs = some("a/1", "a/2", "a/3")
    config = dataclasses.replace(runs["a/1"].config, start=str(options.runs / "a" / "3"))
    runs["a/1"] = dataclasses.replace(runs["a/1"], config=config)
    assert do_all(runs, dataclasses.replace(options, together=3)) and begun == ["a/2", "a/3", "a/1"]
    elsewhere = {"b/1": runs["a/1"]}
    assert do_all(elsewhere, options) and begun[3:] == ["b/1"], "they are there"


def test_a_run_does_not_begin_with_weights_that_are_not_done(options, monkeypatch, capsys):
    """Because their run failed, or was not asked for: else it would learn on from unfinished ones."""
    begun = stands_in(monkeypatch, f"if name == 'a/3': raise SystemExit(3)\n{FINISHES}")
    runs = some("a/1", "a/2", "a/3")
    config = dataclasses.replace(runs["a/1"].config, start=str(options.runs / "a" / "3"))
    runs["a/1"] = dataclasses.replace(runs["a/1"], config=config)
    for asked in (runs, {"a/1": runs["a/1"]}):
        assert not do_all(asked, options) and "a/1" not in begun
        assert f"a/1: begins with {options.runs}/a/3, which is not done\n" in capsys.readouterr().out


def test_a_run_that_fails_does_not_stop_the_others(options, monkeypatch, capsys):
    stands_in(monkeypatch, f"if name == 'a/1': raise SystemExit(3)\n{FINISHES}")
    assert not do_all(some("a/1", "a/2", "a/3"), options)
    assert [done(options.runs / f"a/{i}") for i in (1, 2, 3)] == [False, True, True]
    failed = [line for line in capsys.readouterr().out.splitlines() if "FAILED" in line]
    assert len(failed) == 1 and f"a/1: step 0, no scores FAILED (3), see {options.runs}/logs/a-1.txt;" in failed[0]


def test_stopped_after_a_while(options, monkeypatch):
    """What runs is asked to stop, and has time to save; what waits is not begun."""
    saves = "import signal, sys; folder.mkdir(parents=True); (folder / 'begun').touch()\n"
    saves += "def stop(*_): (folder / 'saved').touch(); sys.exit(143)\n"
    saves += "signal.signal(signal.SIGTERM, stop); time.sleep(60)"
    begun = stands_in(monkeypatch, saves)
    before = time.monotonic()
    assert not do_all(some("a/1", "a/2", "a/3"), dataclasses.replace(options, stop_after=3 / 60))
    assert time.monotonic() - before < 30 and begun == ["a/1", "a/2"]
    assert all((options.runs / name / "saved").exists() for name in begun)


def test_the_last_scores_are_told(options, capsys):
    folder = options.runs / "a" / "1"
    folder.mkdir(parents=True)
    told = [{"step": 500, "val": {"ari_fg": 0.5, "miou": 0.1}}, {"step": 1000, "val": {"ari_fg": 0.725, "miou": 0.31}}]
    told += [{"step": 1020, "loss": 0.1}]
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, told)))
    table.tell("a/1", 0, options.runs, "2 waiting")
    assert capsys.readouterr().out == "a/1: step 1,020, ARI-FG 72.5, mIoU 31.0; 2 waiting\n"


def test_interrupted_all_go_on(options):
    """Four tiny runs in processes of their own: stopped almost at once, gone on with, and then left as they are."""
    options = dataclasses.replace(options, only=("plateau",))
    runs = chosen(options)
    assert len(runs) == 4
    assert not do_all(runs, dataclasses.replace(options, stop_after=0.005))
    assert not any(done(options.runs / name) for name in runs)
    assert do_all(runs, options), "\n".join(p.read_text() for p in (options.runs / "logs").iterdir())
    for name, run in runs.items():
        folder = options.runs / name
        assert lines(folder)[-1]["step"] == 4 and load(folder).config == run.config.model, name
        facts = json.loads((folder / "machine.json").read_text())
        assert facts["torch"] == torch.__version__ and set(facts) == {"device", "torch", "python", "date"}
    before = {p: p.stat().st_mtime_ns for p in options.runs.rglob("*") if p.is_file()}
    assert do_all(runs, options)
    assert {p: p.stat().st_mtime_ns for p in options.runs.rglob("*") if p.is_file()} == before, "nothing is left to do"


# ------------------------------------------------------------------------------------------------------------- one run


@pytest.fixture
def one(options):
    """The smallest run that is judged."""
    options = dataclasses.replace(options, images=3)
    run = all_runs(options)["studies/plain-base-0"]
    return options, dataclasses.replace(run, config=dataclasses.replace(run.config, accelerator="cpu"))


def test_a_run_is_trained_and_judged(one):
    options, run = one
    folder = options.runs / "studies" / "plain-base-0"
    table.do(folder, run, options)
    results = json.loads((folder / "evaluation" / "results.json").read_text())["results"]
    assert list(results) == ["plain:3-6"] and results["plain:3-6"]["images"] == 3
    assert done(folder) and not table.brought(folder) and not (folder / "renders").exists()


def test_weights_that_were_brought_are_judged_only(one):
    options, run = one
    folder = options.runs / "studies" / "plain-base-0"
    table.do(folder, run, options)
    for name in ("state.pt", "done"):
        (folder / name).unlink()
    before, metrics = weights(folder), lines(folder)
    table.do(folder, dataclasses.replace(run, judged=("camo:3-6",)), options)
    assert done(folder) and not (folder / "state.pt").exists()
    assert weights(folder) == before and lines(folder) == metrics
    assert list(json.loads((folder / "evaluation" / "results.json").read_text())["results"]) == ["camo:3-6"]


def test_what_fixed_blocks_score(options):
    """They part the picture evenly, so they know nothing of the ground; they are judged once for a number of images."""
    file, options = options.runs / "blocks.json", dataclasses.replace(options, images=8)
    table.note_blocks(file, options)
    found = json.loads(file.read_text())
    assert found.pop("asked") == [8, True]
    assert set(found) == {"plain", "textured", "ood", "camo", "textured:3-6", "camo:3-6", "plain:3-6"}
    assert {each["slots"] for each in found.values()} == {8, 11}
    assert all(each["images"] == 8 and each["ari"] < 0.2 and each["miou"] < 0.4 for each in found.values())
    before = file.stat().st_mtime_ns
    table.note_blocks(file, options)
    assert file.stat().st_mtime_ns == before
    table.note_blocks(file, dataclasses.replace(options, images=4))
    assert json.loads(file.read_text())["plain"]["images"] == 4
