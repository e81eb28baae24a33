"""The steps of the training loop, when it ends, and what it refuses."""

import contextlib
import json
import os
import re
import signal
import types
from pathlib import Path

import pytest
import torch
from lightning_fabric.utilities.rank_zero import rank_zero_only

import cutslots
from cutslots.data.video import Clips
from cutslots.models.checkpoints import load
from cutslots.models.discovery import build
from cutslots.training import loop
from cutslots.training import step as step_module
from cutslots.training.data import open_split
from cutslots.training.loader import TrainLoader
from cutslots.training.logger import LOG_EVERY
from cutslots.training.loop import Interrupted, Stop, resolve, train, validate
from tests.small_runs import line_kinds, lines, small, state, weights

ADAM_EPSILON = 1e-8  # torch's default


def largest_moves(config):
    """Return how far a run moves each parameter, in learning rates."""
    torch.manual_seed(config.seed)
    before = dict(build(config.model).named_parameters())
    after = load(train(config)).named_parameters()
    return {name: (value - before[name]).abs().max().item() / config.lr for name, value in after}


def flat(model):
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def test_gradients_are_clipped(tmp_path):
    """The first step of Adam is lr g / (|g| + epsilon), so gradients far below epsilon hardly move the weights."""
    moves = largest_moves(small(tmp_path / "run", max_steps=1, warmup_steps=0, grad_clip=0.01 * ADAM_EPSILON))
    assert 0 < max(moves.values()) <= 0.01


def test_without_clipping_gradients_keep_their_norm(tmp_path):
    moves = largest_moves(small(tmp_path / "run", max_steps=1, warmup_steps=0, grad_clip=0.0))
    assert moves == {name: pytest.approx(1.0, rel=0.05) for name in moves}


@pytest.mark.parametrize("seed", [0, 3])
def test_a_run_written_out(tmp_path, seed):
    """Slot Attention samples its initial slots, so that the random numbers of each step count."""
    options = {"slots": "slot-attention", "max_steps": 3, "warmup_steps": 2, "lr_decay": 0.5, "lr_decay_steps": 1}
    config = small(tmp_path / "run", **options, seed=seed, grad_clip=0.05, lr=0.01)
    torch.manual_seed(seed)
    model = build(config.model)
    start, optimizer = flat(model), torch.optim.Adam(model.parameters())
    process = types.SimpleNamespace(world_size=1, global_rank=0, device="cpu")
    data = open_split(config, "train", 24)
    loader = TrainLoader(data, config, process, 0)
    losses, norms = [], []
    for step, lr in enumerate((0.005, 0.01 / 2, 0.01 / 4)):
        optimizer.param_groups[0]["lr"] = lr
        torch.manual_seed((seed << 32) + step)
        image = data.get_batch(loader.indices(step)).image
        loss = (model(image).reconstruction - image / 255).square().mean()
        optimizer.zero_grad()
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05).item())
        optimizer.step()
        losses.append(loss.item())
    ours, expected = (flat(each) for each in (load(train(config)), model))
    assert (ours - expected).norm() < 1e-3 * (ours - start).norm()  # Adam enlarges gradients that are rounding errors
    line = lines(tmp_path / "run")[0]
    assert line["step"] == 3 and line["loss"] == pytest.approx(sum(losses) / 3, rel=1e-3)
    assert line["grad_norm"] == pytest.approx(sum(norms) / 3, rel=1e-3) and line["lr"] == pytest.approx(0.0025)


def test_losses_evaluations_and_the_last_step_are_logged(tmp_path):
    folder = train(small(tmp_path / "run", max_steps=LOG_EVERY + 1, eval_every=8))
    assert line_kinds(folder) == [(8, "val"), (16, "val"), (20, "loss"), (21, "loss"), (21, "val")]


@pytest.mark.parametrize("minutes, expected", [(0.0, [1, 2, 3]), (1000.0, [3])])
def test_checkpoints_are_saved_when_they_are_due_and_at_the_end(tmp_path, monkeypatch, minutes, expected):
    saved, save = [], loop.RunLogger.save

    def record(self, model, optimizer, state):
        saved.append(state["step"])
        save(self, model, optimizer, state)

    monkeypatch.setattr(loop.RunLogger, "save", record)
    train(small(tmp_path / "run", max_steps=3, checkpoint_minutes=minutes))
    assert saved == expected


def test_an_interrupted_run_saves_its_state_and_resumes(tmp_path, monkeypatch):
    expected = weights(train(small(tmp_path / "alone", max_steps=5)))
    rate = step_module.learning_rate

    def interrupt(config, step):
        if step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return rate(config, step)

    config = small(tmp_path / "run", max_steps=5, checkpoint_minutes=1000.0)
    with monkeypatch.context() as patch:
        patch.setattr(step_module, "learning_rate", interrupt)
        with pytest.raises(Interrupted) as caught:
            train(config)
    folder = tmp_path / "run"
    assert str(caught.value) == f"stopped after step 3; the state is saved in {folder}" and caught.value.report is True
    saved = state(folder)
    assert saved["step"] == 3 and saved["seconds"] > 0 and not (folder / "report.html").exists()
    assert weights(train(config)) == expected
    assert state(folder)["seconds"] > saved["seconds"], "the time of resumed runs adds up"


def test_a_signal_at_the_last_step_does_not_interrupt(tmp_path, monkeypatch):
    rate = step_module.learning_rate

    def interrupt(config, step):
        os.kill(os.getpid(), signal.SIGTERM)
        return rate(config, step)

    monkeypatch.setattr(step_module, "learning_rate", interrupt)
    assert (train(small(tmp_path / "run", max_steps=1)) / "report.html").exists()


def test_a_complete_run_says_so(tmp_path, capsys):
    config = small(tmp_path / "run", max_steps=1)
    folder = train(config)
    capsys.readouterr()
    assert train(config) == folder == tmp_path / "run"
    assert capsys.readouterr().out == f"{folder} is complete; nothing is left to do\n"


def test_a_finished_run_that_was_killed_before_its_report(tmp_path, monkeypatch):
    config = small(tmp_path / "run", max_steps=1)
    folder = train(config)
    before = weights(folder)
    (folder / "report.html").unlink()
    monkeypatch.setattr(loop, "training_data", None)  # it is not opened
    assert train(config) == folder
    assert (folder / "report.html").exists() and weights(folder) == before


def test_another_run_is_replaced_on_request_only(tmp_path):
    train(small(tmp_path / "run", max_steps=1))
    with pytest.raises(ValueError, match=r"differing in lr"):
        train(small(tmp_path / "run", max_steps=2, lr=0.5))
    train(small(tmp_path / "run", max_steps=2, lr=0.5, overwrite=True))
    assert state(tmp_path / "run")["step"] == 2


def test_adam_is_fused_and_has_the_learning_rate_of_the_step(tmp_path):
    folder = train(small(tmp_path / "run", max_steps=2, lr=0.01, warmup_steps=4))
    groups = state(folder)["optimizer"]["param_groups"]
    assert groups and all(group["fused"] is True and group["lr_scale"] == 1.0 for group in groups)
    assert [group["lr"] for group in groups] == pytest.approx([0.005] * len(groups), rel=0.01)


@pytest.mark.parametrize("option, compiled", [("on", 1), ("off", 0)])
def test_the_model_is_compiled_on_request(tmp_path, monkeypatch, option, compiled):
    calls = []
    monkeypatch.setattr(torch, "compile", lambda model: calls.append(model) or model)
    train(small(tmp_path / "run", compile=option, max_steps=1))
    assert len(calls) == compiled


# ------------------------------------------------------------------------------------------------------------ the end


class Processes:
    """Stands in for Fabric with several processes, of which `others` sum up to some condition."""

    device = "cpu"

    def __init__(self, world_size=2, others=0.0, step=0, global_rank=1):
        self.world_size, self.others, self.step, self.global_rank, self.asked = world_size, others, step, global_rank, 0

    def all_reduce(self, value, reduce_op):
        assert reduce_op == "sum" and value.dtype == torch.float32 and value.device.type == "cpu"
        self.asked += 1
        return value + self.others

    def broadcast(self, value):
        return self.step


@pytest.mark.parametrize(
    "step, seconds, max_minutes, expected",
    [
        (9, 0.0, None, False),
        (10, 0.0, None, True),
        (11, 0.0, None, True),
        (9, 1e9, None, False),
        (9, 120.0, 2.0, False),
        (9, 120.1, 2.0, True),
        (10, 0.0, 2.0, True),
        (0, 0.1, 0.0, True),
    ],
)
def test_a_run_is_finished_after_its_steps_or_its_time(step, seconds, max_minutes, expected):
    config = small(None, max_steps=10, **({} if max_minutes is None else {"max_minutes": max_minutes}))
    assert loop._is_finished(config, step, seconds) is expected
    assert Stop(config, Processes(world_size=1)).finished(step, seconds) is expected


def test_several_processes_stop_together_when_they_log():
    config = small(None, max_steps=100, max_minutes=1.0)
    for others, mine, expected in ((0.0, False, False), (1.0, False, True), (0.0, True, True), (2.0, True, True)):
        fabric = Processes(others=others)
        stop = Stop(config, fabric)
        stop.signalled = mine
        assert not stop.interrupted(LOG_EVERY + 1, 0.0) and fabric.asked == 0, "between lines they do not wait"
        assert stop.interrupted(2 * LOG_EVERY, 0.0) is expected and fabric.asked == 1
        assert stop.finished(2 * LOG_EVERY, 61.0 if mine else 0.0) is expected and fabric.asked == 2
        assert not stop.finished(LOG_EVERY + 1, 61.0) and fabric.asked == 2
        assert stop.finished(100, 0.0) and fabric.asked == 2, "all know the last step"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_are_handled_during_training_only(number):
    before = signal.getsignal(number)
    stop = Stop(small(None), Processes(world_size=1))
    assert stop.signalled is False
    with stop:
        os.kill(os.getpid(), number)
        assert stop.signalled is True and stop.interrupted(1, 0.0) is True
    assert signal.getsignal(number) is before


def test_processes_with_different_states(tmp_path):
    found = {"step": 5, "seconds": 0.0}
    loop._check_same_state(found, tmp_path, Processes(step=5))
    for fabric in (Processes(step=4), Processes(step=5, others=1.0)):
        message = f"processes found different states in {tmp_path}; expected a file system that all nodes share"
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            loop._check_same_state(found, tmp_path, fabric)


@pytest.mark.parametrize(
    "error, world_size, lost",
    [
        (RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer"), 2, True),
        (torch.distributed.DistBackendError("NCCL communicator was aborted"), 2, True),
        (RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer"), 1, False),
        (RuntimeError("out of memory"), 2, False),
        (ValueError("gloo"), 2, False),
    ],
)
def test_a_process_that_loses_the_others_says_so(error, world_size, lost):
    fabric = Processes(world_size)
    with pytest.raises(ConnectionError if lost else type(error)) as caught, loop._lost_processes(Path("run"), fabric):
        raise error
    expected = (
        "process 1 of 2 lost the others, which ended or cannot be reached; "
        "run the same command again, on every node, to resume from run"
    )
    assert str(caught.value) == (expected if lost else str(error))


def test_training_that_loses_a_process_names_its_folder(tmp_path, monkeypatch):
    def lost(*_):
        raise RuntimeError("gloo: connection closed")

    fabric = types.SimpleNamespace(world_size=2, global_rank=0, broadcast=lost)
    monkeypatch.setattr(loop, "make_fabric", lambda *_: fabric)
    with pytest.raises(ConnectionError, match=rf"^process 0 of 2 lost the others, .* resume from {tmp_path / 'run'}$"):
        train(small(tmp_path / "run", devices=2))


# ------------------------------------------------------------------------------------------------------- before the run


@pytest.mark.parametrize(
    "changes, name",
    [({}, "tiny-plain-2-5-0"), ({"seed": 7}, "tiny-plain-2-5-7"), ({"data": "textured"}, "tiny-textured-0")],
)
def test_the_default_run_folder(changes, name):
    assert resolve(small(None, **changes)).out == Path("runs") / name
    assert resolve(small(Path("here"), **changes)).out == Path("here")


@pytest.mark.parametrize("accelerator, compiled", [("cuda", "on"), ("cpu", "off"), ("mps", "off")])
def test_models_are_compiled_on_cuda(monkeypatch, accelerator, compiled):
    asked = []
    monkeypatch.setattr(loop, "resolve_accelerator", lambda *given: asked.append(given) or (accelerator, "32-true"))
    resolved = resolve(small(None, accelerator="auto"))
    assert (resolved.accelerator, resolved.precision, resolved.compile) == (accelerator, "32-true", compiled)
    assert asked == [("auto", "auto")]
    for option in ("on", "off"):
        assert resolve(small(None, compile=option)).compile == option


def test_validation_leaves_no_trace():
    """It builds the model, but a run starts from the random numbers it would have without."""
    torch.manual_seed(5)
    before = torch.get_rng_state()
    validate(small(None))
    assert torch.equal(torch.get_rng_state(), before) and torch.is_grad_enabled()


def test_validation_runs_the_model_without_gradients_and_in_evaluation_mode(monkeypatch):
    seen, build_model = [], loop.build

    def spied(config):
        model = build_model(config)
        note = lambda module, args: seen.append((args[0].shape, torch.is_grad_enabled(), module.training))
        model.register_forward_pre_hook(note)
        return model

    monkeypatch.setattr(loop, "build", spied)
    validate(small(None))
    assert seen == [((1, 3, 16, 16), False, False)]


def test_validation_opens_both_splits(monkeypatch):
    opened, clips = [], []
    monkeypatch.setattr(loop, "open_split", lambda config, split, count: opened.append((split, count)) or split)
    monkeypatch.setattr(loop, "Clips", lambda *given: clips.append(given))
    validate(small(None))
    assert opened == [("train", None), ("val", None)] and clips == []
    validate(small(None, "movi", max_frame_gap=3))
    assert clips == [("train", 2, 3), ("val", 2, 3)] and Clips is not loop.Clips


def test_validation_asks_the_loss():
    with pytest.raises(ValueError, match=r"^loss\.blur is 17\.0; expected at most the image size, 16$"):
        validate(small(None, loss__blur=17.0))


@pytest.mark.parametrize("node", [False, True], ids=["rank", "node"])
def test_a_process_that_was_started_alone(tmp_path, monkeypatch, node):
    """Started as the second of several, or on the second node, it would be the only one."""
    monkeypatch.setenv("NODE_RANK", str(int(node)))
    monkeypatch.setattr(rank_zero_only, "rank", int(not node))
    make_fabric = loop.make_fabric

    def without_nodes(*options):
        monkeypatch.delenv("NODE_RANK")
        return make_fabric(*options)

    monkeypatch.setattr(loop, "make_fabric", without_nodes)
    with pytest.raises(ValueError, match=r"^devices is 1 and num_nodes 1; expected as many processes as were started$"):
        train(small(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_fabric_is_made_of_the_options(tmp_path, monkeypatch):
    given = []

    def make(*options):
        given.extend(options)
        raise InterruptedError

    monkeypatch.setattr(loop, "make_fabric", make)
    with contextlib.suppress(InterruptedError):
        train(small(tmp_path / "run", devices=2, num_nodes=3, precision="bf16-mixed"))
    assert given == ["cpu", 2, 3, "bf16-mixed"]


def test_run_json_has_the_version(tmp_path):
    values = json.loads((train(small(tmp_path / "run", max_steps=1)) / "run.json").read_text())
    assert values["version"] == cutslots.__version__ and values["max_steps"] == 1


def test_the_weights_of_processes_are_the_same(tmp_path):
    """The initial weights depend on the seed alone; batch normalisation of one process stays as it is."""
    config = small(tmp_path / "run", encoder="resnet", encoder__kernel_sizes=(3, 3), encoder__batch_norm=True)
    fabric = types.SimpleNamespace(world_size=1, device=torch.device("cpu"))
    torch.manual_seed(1)
    model = loop._prepare_model(config, tmp_path / "run", fabric)
    torch.manual_seed(1)
    for (name, value), expected in zip(model.named_parameters(), build(config.model).parameters(), strict=True):
        assert torch.equal(value, expected), name
    kinds = {type(module) for module in model.modules()}
    assert torch.nn.BatchNorm2d in kinds and torch.nn.SyncBatchNorm not in kinds
    plain = small(tmp_path / "run")
    fabric.world_size = 2
    assert loop._prepare_model(plain, tmp_path / "run", fabric).training, (
        "without batch normalisation any device will do"
    )
    assert next(
        loop._prepare_model(plain, tmp_path / "run", types.SimpleNamespace(world_size=1, device="meta")).parameters()
    ).is_meta


@pytest.mark.parametrize("world_size, device, converted", [(1, "cuda", 0), (2, "cuda", 1), (2, "cpu", 0)])
def test_processes_on_cuda_share_the_statistics_of_batch_normalisation(
    tmp_path, monkeypatch, world_size, device, converted
):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = torch.nn.BatchNorm2d(3)

        def to(self, device):
            self.moved = device
            return self

    model, given = Model(), []
    fabric = types.SimpleNamespace(world_size=world_size, device=types.SimpleNamespace(type=device))
    monkeypatch.setattr(loop, "channels_last", lambda _: model)
    monkeypatch.setattr(torch.nn.SyncBatchNorm, "convert_sync_batchnorm", lambda each: given.append(each) or each)
    expected = pytest.raises(ValueError, match=r"^batch normalisation needs one process or CUDA: ")
    with expected if device == "cpu" else contextlib.nullcontext():
        assert loop._prepare_model(small(tmp_path / "run"), tmp_path / "run", fabric).moved is fabric.device
    assert given == [model] * converted


def test_groups_of_a_part_have_the_learning_rate_of_the_run_unless_they_say_so(monkeypatch):
    model = build(small(None).model)
    first, *others = model.encoder.parameters()
    groups = [{"params": [first]}, {"params": others, "lr_scale": 0.5}]
    monkeypatch.setattr(model.encoder, "parameter_groups", lambda: groups, raising=False)
    found = loop.parameter_groups(model)
    assert [group["lr_scale"] for group in found[:2]] == [1.0, 0.5]
    assert sorted(id(p) for group in found for p in group["params"]) == sorted(map(id, model.parameters()))


def test_consecutive_frames_are_all_that_a_model_of_images_takes():
    with pytest.raises(ValueError, match=r"^max_frame_gap is 2; a model of images expects 1$"):
        validate(small(None, max_frame_gap=2))


def test_the_loader_starts_at_the_step_with_the_curriculum(tmp_path, monkeypatch):
    train(small(tmp_path / "run", max_steps=2))
    given, curriculum = [], []

    def loader(*arguments):
        given.extend(arguments)
        raise InterruptedError

    monkeypatch.setattr(loop, "curriculum", lambda *arguments: curriculum.extend(arguments) or "scenes")
    monkeypatch.setattr(loop, "TrainLoader", loader)
    with contextlib.suppress(InterruptedError):
        train(small(tmp_path / "run", max_steps=4))
    data, config, fabric, step, scenes, mixed = given
    assert (len(data), config.max_steps, fabric.world_size, step, scenes, mixed) == (24, 4, 1, 2, "scenes", None)
    assert curriculum == [config, fabric, 24, 2]


def test_a_gradient_that_is_not_finite_is_reported_by_the_logger(tmp_path):
    with pytest.raises(ValueError, match=r"^the .* is (nan|inf) at step \d+; "):
        train(small(tmp_path / "run", lr=60_000, grad_clip=0.0))
