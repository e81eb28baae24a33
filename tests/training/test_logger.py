"""Metrics, TensorBoard, checkpoints by the clock, and losses that are not finite."""

import math
import types

import pytest
import torch

from cutslots.models.checkpoints import load
from cutslots.training.logger import LOG_EVERY, RunLogger
from cutslots.training.loop import train
from tests.small_runs import line_kinds, small, state
from tests.training.curves import metrics_curves, tensorboard_curves


def make_logger(folder, world_size=1, rank=0, step=0, **changes):
    folder.mkdir(exist_ok=True)
    fabric = types.SimpleNamespace(global_rank=rank, world_size=world_size)
    return RunLogger(folder, small(folder, **changes), fabric, {"step": step, "seconds": 0.0})


def test_tensorboard_shows_the_curves_of_metrics_jsonl(finished_run):
    assert tensorboard_curves(finished_run) == metrics_curves(finished_run)


def test_validation_is_printed(tmp_path, capsys):
    train(small(tmp_path / "run", max_steps=1))
    printed = capsys.readouterr().out
    assert "step 1: ARI-FG" in printed and f"wrote {tmp_path / 'run' / 'model.safetensors'} and" in printed


@pytest.mark.parametrize("minutes, expected", [(0.0, True), (60.0, False)])
def test_checkpoints_are_due_by_the_clock(tmp_path, minutes, expected):
    log = make_logger(tmp_path / "run", checkpoint_minutes=minutes)
    log.saved_at -= 1
    assert log.checkpoint_due(1) is expected


def test_several_processes_save_when_they_log(tmp_path):
    first, second = (make_logger(tmp_path / "run", world_size=2, rank=rank) for rank in (0, 1))
    assert not first.checkpoint_due(LOG_EVERY + 1) and first.checkpoint_due(LOG_EVERY)
    assert not second.checkpoint_due(LOG_EVERY), "only process 0 writes"


def test_only_process_0_writes(tmp_path):
    make_logger(tmp_path / "other", world_size=2, rank=1)
    assert not list((tmp_path / "other").iterdir())
    make_logger(tmp_path / "first", world_size=2, rank=0)
    assert [p.name for p in (tmp_path / "first").iterdir()] == ["visualizations"]


@pytest.mark.parametrize("values", [(math.nan, 1.0), (math.inf, 1.0)])
def test_the_first_step_that_is_not_finite_is_named(tmp_path, values):
    log = make_logger(tmp_path / "run")
    for loss, norm in ((0.5, 1.0), values, (math.nan, math.nan)):
        log.record(torch.tensor(loss), torch.tensor(norm))
    with pytest.raises(
        ValueError, match=rf"^the loss is {values[0]} at step 6; no state was saved before; try a lower"
    ):
        log.check_finite(7)


def test_a_gradient_norm_that_is_not_finite(tmp_path):
    log = make_logger(tmp_path / "run")
    log.record(torch.tensor(0.5), torch.tensor(math.inf))
    with pytest.raises(ValueError, match=r"^the gradient norm is inf at step 1; no state was saved before"):
        log.check_finite(1)


def test_a_loss_that_is_not_finite_ends_the_run(tmp_path):
    wrong = {"lr": 60_000.0, "grad_clip": 0.0}
    with pytest.raises(
        ValueError, match=rf"^the loss is (nan|inf) at step \d+; the last good state is {tmp_path}.*--lr\Z"
    ):
        train(small(tmp_path / "saved", **wrong))
    for values in state(tmp_path / "saved")["optimizer"]["state"].values():
        assert all(torch.isfinite(v).all() for v in values.values())
    assert all(torch.isfinite(v).all() for v in load(tmp_path / "saved").state_dict().values())
    with pytest.raises(ValueError, match=r"at step \d+; no state was saved before; try a lower --lr\Z"):
        train(small(tmp_path / "unsaved", **wrong, checkpoint_minutes=60, eval_every=1000))
    assert not (tmp_path / "unsaved" / "state.pt").exists() and line_kinds(tmp_path / "unsaved") == []
