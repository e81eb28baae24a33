"""Training steps as CUDA graphs: the same losses and weights as without."""

import dataclasses
import types

import pytest
import torch

from cutslots.models.discovery import build
from cutslots.training import step as step_module
from cutslots.training.loop import train
from cutslots.training.losses import Loss, MSELoss
from cutslots.training.step import GraphStep, TrainStep, no_graph_reason
from tests.conftest import needs_cuda
from tests.small_runs import MASK_BIAS, QUERY_BIAS, effective_weights, lines, small, weights

CUDA = {"accelerator": "cuda", "compile": "off", "precision": "32-true", "checkpoint_minutes": 1000.0}
CASES = {
    "cut": {},
    "blur": {"loss__blur": 1.4, "loss__blur_steps": 20, "max_steps": 24},
    "penalty": {"loss__foreground_penalty": 0.1, "loss__foreground_penalty_start": 4},
    "mask consistency": {"loss__mask_consistency": 0.1, "loss__mask_consistency_start": 4},
    "no clipping": {"grad_clip": 0.0},
    "flips": {"horizontal_flips": True},
    "augmentation": {"min_crop_area": 0.5, "hue_jitter": 0.1, "blur_probability": 0.5, "noise_sigma": 0.05},
    "bf16": {"precision": "bf16-mixed"},
    "compiled": {"compile": "on"},
    "compiled, bf16": {"compile": "on", "precision": "bf16-mixed"},
    "random slots": {"slots": "slot-attention"},
    "compiled, random slots": {"slots": "slot-attention", "compile": "on"},
    "no cut": {"slots__partition": "softmax"},
    "relative positions": {"slots__relative_positions": True},
    "compiled, relative positions": {"slots__relative_positions": True, "compile": "on"},
    "minimum cuts": {"slots__partition": "min-cut", "slots__partition__capacity_ramp_steps": 8},
}


def test_on_a_cpu_there_are_none(tmp_path, capsys):
    expected = weights(train(small(tmp_path / "off", max_steps=2)))
    assert "CUDA graphs" not in capsys.readouterr().out
    assert weights(train(small(tmp_path / "on", max_steps=2, cuda_graphs="on"))) == expected
    assert "training without CUDA graphs: the device is cpu\n" in capsys.readouterr().out


def fabric(device="cuda", world_size=1):
    return types.SimpleNamespace(device=torch.device(device), world_size=world_size, global_rank=0)


def test_reasons():
    assert no_graph_reason(fabric(), MSELoss()) is None
    assert no_graph_reason(fabric("cpu"), MSELoss()) == "the device is cpu"
    assert no_graph_reason(fabric(world_size=2), MSELoss()) == "2 processes share the gradients"
    assert no_graph_reason(fabric(), Loss()) == "Loss does not implement Loss.phase"
    for name, reason in (("__call__", "Mine does not implement Loss.phase"), ("in_phase", None)):
        mine = type("Mine", (MSELoss,), {name: lambda *_: None})
        assert no_graph_reason(fabric(), mine()) == reason


@pytest.mark.parametrize(
    "options, expected",
    [
        ({"cuda_graphs": "off"}, ""),
        ({"cuda_graphs": "auto"}, "graph"),
        ({"cuda_graphs": "auto", "plugins": ("own_parts.py",)}, "plugins are loaded; --cuda-graphs on captures"),
        ({"cuda_graphs": "on", "plugins": ("own_parts.py",)}, "graph"),
    ],
)
def test_choices(options, expected, monkeypatch, capsys):
    monkeypatch.setattr(step_module, "GraphStep", lambda *_, paused: "graph")
    optimizer = types.SimpleNamespace(param_groups=[])
    config = dataclasses.replace(small(None), **options)
    made = step_module.make_step(config, fabric(), None, optimizer, MSELoss(), None)
    printed = capsys.readouterr().out
    assert made == "graph" if expected == "graph" else isinstance(made, TrainStep)
    assert (expected in printed) == (expected != "graph") and bool(printed) == (expected not in ("", "graph"))


def test_phases_of_the_blur_are_its_radii():
    loss = MSELoss(blur=2.0, blur_steps=10)
    assert [loss.phase(step) for step in range(11)] == [6, 6, 5, 5, 4, 3, 3, 2, 2, 0, 0]


@pytest.mark.parametrize("step", [0, 3, 7, 9, 40])
def test_the_loss_of_a_phase_is_the_loss_of_its_steps(step):
    loss = MSELoss(blur=2.0, blur_steps=10, foreground_penalty=0.3, foreground_penalty_start=5)
    output = types.SimpleNamespace(reconstruction=torch.rand(2, 3, 16, 16), masks=torch.rand(2, 4, 16, 16).softmax(1))
    image = torch.randint(0, 256, (2, 3, 16, 16), dtype=torch.uint8)
    found = loss.in_phase(output, image, torch.tensor(step), loss.phase(step))
    torch.testing.assert_close(tuple(found), tuple(loss(output, image, step)))


@pytest.fixture
def deterministic(monkeypatch):
    """Let cuDNN use only kernels that add in one order: two runs with others differ more than a graph may change."""
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)


@pytest.mark.parametrize("slots", ["cut-slots", "slot-attention"])
def test_weights_that_are_not_compared_have_no_effect(slots):
    model, image = build(small(None, slots=slots).model).eval(), torch.rand(2, 3, 16, 16)
    outputs, found = [], dict(model.named_parameters())
    for shift in (0.0, 0.3):
        with torch.no_grad():
            found[MASK_BIAS].unflatten(0, (4, -1))[3].add_(shift)
            if QUERY_BIAS in found:
                found[QUERY_BIAS].add_(shift)
            torch.manual_seed(0)
            outputs.append(model(image))
    assert (QUERY_BIAS in found) == (slots == "slot-attention")
    for one, other in zip(*outputs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


def compare(tmp_path, options):
    runs = {}
    for graphs in ("off", "on"):
        config = small(tmp_path / graphs, **{"max_steps": 14, "lr": 1e-3} | CUDA | options, cuda_graphs=graphs)
        runs[graphs] = train(config)
    tolerance = 2e-2 if options.get("precision") == "bf16-mixed" else 1e-4
    losses = [[line["loss"] for line in lines(runs[g]) if "loss" in line] for g in ("off", "on")]
    assert losses[1] == pytest.approx(losses[0], rel=tolerance)
    one, other = (effective_weights(runs[g]) for g in ("off", "on"))
    for name, value in one.items():
        torch.testing.assert_close(other[name], value, rtol=10 * tolerance, atol=tolerance)


@needs_cuda
@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_graphs_give_the_same_losses_and_weights(tmp_path, options, monkeypatch, deterministic):
    captured = []
    capture = GraphStep._capture
    monkeypatch.setattr(GraphStep, "_capture", lambda self: captured.append(self.phase) or capture(self))
    compare(tmp_path, options)
    assert captured == ([4, 3, 2, 0] if "loss__blur" in options else [0])


@needs_cuda
@pytest.mark.parametrize("compiled", ["off", "on"])
def test_graphs_with_the_labels_of_a_teacher(tmp_path, compiled, deterministic):
    teacher = train(small(tmp_path / "teacher", **CUDA, max_steps=4))
    labels = {"teacher": str(teacher), "loss__label_weight": 0.1, "camouflage": 0.5, "horizontal_flips": True}
    compare(tmp_path, labels | {"compile": compiled})


@needs_cuda
def test_a_resumed_run_has_the_same_losses(tmp_path, deterministic):
    options = CUDA | {"lr": 1e-3, "cuda_graphs": "on"}
    whole = train(small(tmp_path / "whole", **options, max_steps=16))
    train(small(tmp_path / "parts", **options, max_steps=8))
    parts = train(small(tmp_path / "parts", **options, max_steps=16))
    one, other = effective_weights(whole), effective_weights(parts)
    for name, value in one.items():
        torch.testing.assert_close(other[name], value, rtol=1e-3, atol=1e-4)


@needs_cuda
def test_a_loss_without_phases_is_not_captured(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(MSELoss, "phase", lambda self, step: None if step == 0 else 0)
    made = []
    monkeypatch.setattr(step_module, "TrainStep", lambda *parts: made.append(1) or TrainStep(*parts))
    train(small(tmp_path / "run", **CUDA, max_steps=2, cuda_graphs="on"))
    assert made and "training without CUDA graphs: MSELoss does not implement Loss.phase" in capsys.readouterr().out


@needs_cuda
def test_a_step_that_cannot_be_captured_runs_without_a_graph(tmp_path, monkeypatch, capsys):
    in_phase = MSELoss.in_phase

    def waiting(self, output, image, step, phase):
        float(output.reconstruction.sum())
        return in_phase(self, output, image, step, phase)

    monkeypatch.setattr(MSELoss, "in_phase", waiting)
    folder = train(small(tmp_path / "run", **CUDA, max_steps=24, cuda_graphs="on"))
    assert capsys.readouterr().out.count("training without CUDA graphs: ") == 1
    assert any("loss" in line for line in lines(folder))
