"""Runs that were killed, interrupted or damaged, and how they resume."""

import contextlib
import json
import os
import pickle
import re
import resource
import shutil
import signal
import sys
import time
import types

import pytest
import torch

from cutslots import cli
from cutslots.models.checkpoints import load
from cutslots.training import logger, loop
from cutslots.training.logger import LOG_EVERY, RunLogger
from cutslots.training.loop import train
from tests.conftest import needs_cuda
from tests.small_runs import (
    Command,
    effective_weights,
    line_kinds,
    lines,
    sentence,
    small,
    state,
    train_command,
    weights,
)
from tests.training.curves import metrics_curves, tensorboard_curves

SENTENCE = r"\A[^\n]+\Z"
CURRICULUM = {"data__texture_ramp_start": 2, "data__texture_ramp_end": 6}
CURRICULUM |= {"data__low_contrast": 0.5, "data__low_contrast_start": 8}


def count_lines(folder):
    """Return the number of lines of metrics.jsonl, also while they are being written."""
    file = folder / "metrics.jsonl"
    return len(file.read_bytes().splitlines()) if file.exists() else 0


# ---------------------------------------------------------------------------------------------------- kills and signals


@pytest.mark.parametrize("slots, moments", [("cut-slots", (0, 2, 5)), ("slot-attention", (2,))])
def test_a_killed_run_resumes_to_the_same_bytes(slots, moments, tmp_path, finished_run, rng):
    """SIGKILL some time after so many lines of metrics.jsonl."""
    if slots != "cut-slots":
        finished_run = train(small(tmp_path / "finished", slots=slots, max_steps=24))
    folder = tmp_path / "run"
    steps = state(finished_run)["step"]
    words = train_command(folder, slots=slots, max_steps=steps, checkpoint_minutes=0.002)
    for count in moments:
        command = Command(words, tmp_path / "log")
        command.wait_for(lambda: (folder / "visualizations").exists() and count_lines(folder) >= count)  # noqa: B023
        time.sleep(rng.uniform(0, 0.1))
        command.signal(signal.SIGKILL)
        command.end()
    command = Command(words, tmp_path / "log")
    assert command.end() == 0, command.said()
    assert weights(folder) == weights(finished_run)
    assert line_kinds(folder) == line_kinds(finished_run)
    assert [x for x in lines(folder) if "val" in x] == [x for x in lines(finished_run) if "val" in x]
    assert not list(folder.rglob("*.part"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_the_state_and_prints_the_command_that_resumes(number, tmp_path, finished_run):
    folder = tmp_path / "run"
    words = train_command(folder, checkpoint_minutes=60)
    command = Command(words, tmp_path / "log")
    command.wait_for(lambda: count_lines(folder) >= 2)
    command.signal(number)
    assert command.end() == 130, command.said()
    said = command.said()
    stopped = re.search(r"^cutslots: stopped after step (\d+); the state is saved in (.*)$", said, re.M)
    assert stopped and stopped[2] == str(folder) and "Traceback" not in said, said
    assert f"resume with: cutslots {' '.join(words)}\n" in said
    assert state(folder)["step"] == int(stopped[1]) < 48
    train(small(folder))
    assert weights(folder) == weights(finished_run) and line_kinds(folder) == line_kinds(finished_run)


def test_the_command_that_resumes_does_not_overwrite(tmp_path, monkeypatch, capsys):
    def interrupted(config):
        raise loop.Interrupted("stopped after step 1", report=True)

    monkeypatch.setattr(loop, "train", interrupted)
    monkeypatch.setattr(sys, "argv", ["cutslots", *train_command(tmp_path, overwrite=True)])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    said = capsys.readouterr().out
    assert caught.value.code == 130 and "resume with: cutslots train" in said and "--overwrite" not in said


def test_a_second_signal_ends_the_run_at_once():
    before = signal.getsignal(signal.SIGINT)
    stop = loop.Stop(small(None), types.SimpleNamespace(world_size=1))
    with stop:
        assert not stop.interrupted(step=1, seconds=0.0)
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.interrupted(step=1, seconds=0.0) and not stop.finished(step=1, seconds=0.0)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def killed_before_the_weights(monkeypatch, folder, call, **changes):
    """Train until the given call that writes weights, just after a state, and end there as SIGKILL does."""
    calls = []

    def save(model, folder):
        calls.append(folder)
        if len(calls) == call:
            raise InterruptedError
        original(model, folder)

    original = logger.save
    with monkeypatch.context() as patch:
        patch.setattr(logger, "save", save)
        with pytest.raises(InterruptedError):
            train(small(folder, **changes))


@pytest.mark.parametrize("call", [1, 48])
def test_killed_between_state_and_weights(tmp_path, finished_run, monkeypatch, call):
    killed_before_the_weights(monkeypatch, tmp_path / "run", call)
    assert state(tmp_path / "run")["step"] == call and not (tmp_path / "run" / "report.html").exists()
    assert (tmp_path / "run" / "model.safetensors").exists() == (call > 1)
    train(small(tmp_path / "run"))
    assert weights(tmp_path / "run") == weights(finished_run) and (tmp_path / "run" / "report.html").exists()


def test_killed_while_the_folder_was_created(tmp_path):
    (tmp_path / "run.json.part").write_text("{")
    train(small(tmp_path, max_steps=1))


# ------------------------------------------------------------------------------------------------------ what is resumed


def test_more_steps_continue_a_run(run, finished_run):
    assert state(run)["step"] == 8
    train(small(run, cache_dir=run.parent / "cache"))
    assert state(run)["step"] == 48 and weights(run) == weights(finished_run)


def test_a_resumed_run_says_so(run, capsys):
    train(small(run, max_steps=9))
    assert "resuming after step 8" in capsys.readouterr().out


def test_lines_after_the_state_are_dropped(run, finished_run):
    """A killed run may have written lines after its newest state, the last one cut short."""
    later = [
        line for line in (finished_run / "metrics.jsonl").read_bytes().splitlines() if json.loads(line)["step"] > 8
    ]
    before = (run / "metrics.jsonl").read_bytes()
    (run / "metrics.jsonl").write_bytes(before + b"\n".join(later[:3]) + b'\n{"step": 2')
    train(small(run))
    assert line_kinds(run) == sorted([(8, "loss"), *line_kinds(finished_run)])
    assert (run / "metrics.jsonl").read_bytes().startswith(before)


def contents(folder):
    return {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in folder.rglob("*") if p.is_file() and p.name != ".lock"}


def test_a_finished_run_stays_as_it_is(run, monkeypatch, capsys):
    def render(*_):
        raise AssertionError("data was rendered")

    before = contents(run)
    monkeypatch.setattr("cutslots.scenes.Scenes.get_batch", render)
    capsys.readouterr()
    assert train(small(run, max_steps=8)) == train(small(run, max_steps=3)) == run
    assert contents(run) == before
    assert capsys.readouterr().out == f"{run} is complete; nothing is left to do\n" * 2


def test_a_finished_run_without_a_report_renders_validation_data_only(run, monkeypatch):
    monkeypatch.setattr("cutslots.training.loop.training_data", None)
    (run / "report.html").unlink()
    train(small(run, max_steps=8))
    assert (run / "report.html").exists() and state(run)["step"] == 8


def test_the_report_of_a_run_that_continues_is_not_left(run, monkeypatch):
    killed_before_the_weights(monkeypatch, run, 4, max_steps=16)
    assert not (run / "report.html").exists()


def test_max_minutes_ends_a_run(tmp_path):
    folder = train(small(tmp_path / "run", max_steps=10**6, max_minutes=1e-9))
    assert 1 <= state(folder)["step"] == lines(folder)[-1]["step"] <= LOG_EVERY
    assert "val" in lines(folder)[-1] and (folder / "report.html").exists()
    before = weights(folder)
    train(small(tmp_path / "run", max_steps=10**6, max_minutes=1e-9))
    assert weights(folder) == before, "a run whose time is up is finished"


def test_augmentations_are_the_same_after_resuming(tmp_path):
    options = {"min_crop_area": 0.5, "brightness_jitter": 0.3, "blur_probability": 0.5, "noise_sigma": 0.05}
    augmented = weights(train(small(tmp_path / "one", max_steps=6, **options)))
    for steps in (3, 6):
        train(small(tmp_path / "resumed", max_steps=steps, **options))
    assert weights(tmp_path / "resumed") == augmented
    assert weights(train(small(tmp_path / "none", max_steps=6))) != augmented


def test_flips_are_the_same_after_resuming(tmp_path):
    flipped = weights(train(small(tmp_path / "one", max_steps=6, horizontal_flips=True)))
    for steps in (3, 6):
        train(small(tmp_path / "resumed", max_steps=steps, horizontal_flips=True))
    assert weights(tmp_path / "resumed") == flipped
    assert weights(train(small(tmp_path / "none", max_steps=6))) != flipped


def test_the_curriculum_is_the_same_after_resuming(tmp_path):
    data = {"data": "textured:1-2", "num_images": 8, "num_eval_images": 2, "eval_every": 99}
    expected = weights(train(small(tmp_path / "one", max_steps=10, **data, **CURRICULUM)))
    for steps in (3, 7, 10):
        train(small(tmp_path / "resumed", max_steps=steps, cache_dir=tmp_path / "cache", **data, **CURRICULUM))
    assert weights(tmp_path / "resumed") == expected
    assert weights(train(small(tmp_path / "none", max_steps=10, **data))) != expected


def test_the_ramp_of_capacities_is_the_same_after_resuming(tmp_path):
    ramp = {"slots__partition": "min-cut", "slots__partition__capacity_ramp_steps": 8, "eval_every": 3}
    expected = weights(train(small(tmp_path / "one", max_steps=10, **ramp)))
    for steps in (3, 7, 10):
        train(small(tmp_path / "resumed", max_steps=steps, **ramp))
    assert weights(tmp_path / "resumed") == expected
    model = load(tmp_path / "resumed")
    assert model.slots.partition.steps == 10, "evaluation does not count"


@needs_cuda
def test_resuming_on_cuda(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)  # two runs add in the same order
    cuda = {"accelerator": "cuda", "compile": "off", "precision": "32-true"}
    train(small(tmp_path / "one", **cuda, max_steps=8))
    train(small(tmp_path / "resumed", **cuda, max_steps=4))
    train(small(tmp_path / "resumed", **cuda, max_steps=8))
    resumed = effective_weights(tmp_path / "resumed")
    for name, value in effective_weights(tmp_path / "one").items():
        torch.testing.assert_close(resumed[name], value, rtol=1e-3, atol=1e-4)


# ---------------------------------------------------------------------------------------------------------- TensorBoard


def test_tensorboard_keeps_its_curves(run):
    time.sleep(1.1)  # event files are named by the second
    train(small(run, max_steps=20))
    assert tensorboard_curves(run) == metrics_curves(run)


def test_tensorboard_is_on_disk_when_a_state_is(tmp_path, monkeypatch):
    """A copy of the folder just after a state was saved is what SIGKILL leaves."""

    def save_and_copy(self, model, optimizer, state):
        save(self, model, optimizer, state)
        if state["step"] in (9, 17, 21):
            shutil.copytree(self.folder, tmp_path / "copies" / str(state["step"]))

    save = RunLogger.save
    monkeypatch.setattr(RunLogger, "save", save_and_copy)
    train(small(tmp_path / "run", max_steps=24))
    copies = sorted((tmp_path / "copies").iterdir())
    assert len(copies) == 3
    for copy in copies:
        assert tensorboard_curves(copy) == metrics_curves(copy)


# ------------------------------------------------------------------------------------------------------- damaged states


def damaged_states(run):
    """Bytes that are not the state of this run, by what is wrong with them."""
    good = state(run)
    yield "empty", b""
    yield "truncated", (run / "state.pt").read_bytes()[:-1000]
    yield "noise", bytes(range(256)) * 20
    for name, content in (
        ("list", [1, 2]),
        ("no step", {k: v for k, v in good.items() if k != "step"}),
        ("no moments", good | {"optimizer": {"state": {}, "param_groups": []}}),
        ("other model", good | {"model": {k: v[:1] for k, v in good["model"].items()}}),
    ):
        torch.save(content, run.parent / name)
        yield name, (run.parent / name).read_bytes()


def test_a_damaged_state_is_one_sentence(run):
    for name, content in damaged_states(run):
        (run / "state.pt").write_bytes(content)
        with pytest.raises(ValueError, match=SENTENCE) as caught:
            train(small(run, max_steps=9))
        said = str(caught.value)
        assert said.startswith(f"{run / 'state.pt'} is not a training state of this model ("), name
        assert said.endswith("); restore it, or pass --overwrite to begin again"), name
        assert (run / "state.pt").read_bytes() == content and len(line_kinds(run)) == 2, name
    train(small(run, max_steps=2, overwrite=True))
    assert state(run)["step"] == 2 and line_kinds(run) == [(2, "loss"), (2, "val")]


@pytest.mark.parametrize("kept", ["model.safetensors", "report.html"])
def test_trained_weights_without_a_state_are_refused(run, monkeypatch, kept):
    for name in {"state.pt", "model.safetensors", "report.html"} - {kept}:
        (run / name).unlink()
    before = contents(run)
    said = sentence(monkeypatch, train_command(run, max_steps=9))
    assert said == (
        f"cutslots: {run} holds {kept} of a trained run but no state.pt to resume from; restore state.pt, choose "
        "another folder, or pass --overwrite to begin again"
    )
    assert contents(run) == before
    train(small(run, max_steps=2, overwrite=True))
    assert state(run)["step"] == 2


def test_a_run_killed_before_its_first_state_begins_again(run):
    for name in ("state.pt", "model.safetensors", "report.html"):
        (run / name).unlink()
    train(small(run, max_steps=8))
    assert state(run)["step"] == 8 and line_kinds(run) == [(8, "loss"), (8, "val")]


class Code:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder),)


@pytest.mark.parametrize("zipped", [False, True])
def test_code_in_a_state_is_not_run(run, zipped):
    code = Code(run.parent / "executed")
    torch.save(code, run / "state.pt") if zipped else (run / "state.pt").write_bytes(pickle.dumps(code, 2))
    with pytest.raises(ValueError, match=r"state\.pt is not a training state of this model \(.*\); restore it"):
        train(small(run, max_steps=9))
    assert not (run.parent / "executed").exists()


# ------------------------------------------------------------------------------------------------------------ full disk


@contextlib.contextmanager
def max_file_size(size):
    """Let the kernel refuse to write more than so many bytes to a file, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_leaves_the_last_state(run, finished_run, monkeypatch):
    before = {p.name: p.read_bytes() for p in run.iterdir() if p.is_file()}
    with max_file_size(60_000):
        said = sentence(monkeypatch, train_command(run))
    assert said == f"cutslots: {run / 'state.pt'}: File too large"
    assert (run / "state.pt").read_bytes() == before["state.pt"] and not list(run.rglob("*.part"))
    load(run)
    with max_file_size(1_000):
        assert sentence(monkeypatch, train_command(run)).startswith(f"cutslots: {run}/")
    assert state(run)["step"] == 8
    train(small(run))
    assert weights(run) == weights(finished_run)


def test_a_full_disk_under_tensorboard_is_one_sentence(tmp_path):
    folder = tmp_path / "run"
    words = train_command(folder, eval_every=1, checkpoint_minutes=60, num_eval_images=4)
    command = Command(words, tmp_path / "log", largest=30_000)
    assert command.end(60) == 1, command.said()
    assert f"cutslots: {folder / 'tensorboard'}" in command.said() and "Traceback" not in command.said()
