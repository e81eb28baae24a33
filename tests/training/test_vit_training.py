"""Training with the encoder `vit`: from the command line, resumed, saved and loaded."""

import json
import shutil
import sys

import pytest
import torch
from safetensors.torch import load_file

from cutslots import cli
from cutslots.models.checkpoints import load
from cutslots.models.discovery import build
from cutslots.training.loop import parameter_groups, train
from tests.modules.small_vits import make_vit
from tests.small_runs import sentence, small, state, train_command, weights


@pytest.fixture(scope="module")
def vit(tmp_path_factory):
    """The folder of a small ViT. Read only."""
    folder = tmp_path_factory.mktemp("checkpoints") / "vit"
    make_vit(folder)
    return folder


def options(vit, **changes):
    return {"encoder": "vit", "encoder__checkpoint": vit, "max_steps": 8, "num_images": 8} | changes


def run_command(monkeypatch, words):
    monkeypatch.setattr(sys, "argv", ["cutslots", *map(str, words)])
    cli.main()


@pytest.mark.parametrize("frozen", [True, False])
def test_a_run_resumes_to_the_same_bytes(frozen, vit, tmp_path, monkeypatch):
    changes = options(vit, encoder__frozen=frozen)
    run_command(monkeypatch, train_command(tmp_path / "whole", **changes))
    run_command(monkeypatch, train_command(tmp_path / "parts", **changes | {"max_steps": 3}))
    assert state(tmp_path / "parts")["step"] == 3
    run_command(monkeypatch, train_command(tmp_path / "parts", **changes))
    assert state(tmp_path / "parts")["step"] == 8
    assert weights(tmp_path / "whole") == weights(tmp_path / "parts")


def test_a_frozen_vit_is_not_saved(vit, tmp_path):
    folder = train(small(tmp_path / "run", **options(vit)))
    for names in (load_file(folder / "model.safetensors"), state(folder)["model"]):
        assert names and not any(name.startswith("encoder.") for name in names)
    loaded, original = load(folder).encoder.backbone.state_dict(), load_file(vit / "model.safetensors")
    assert loaded["layernorm.weight"].equal(original["layernorm.weight"])


def test_a_fine_tuned_vit_is_saved_at_its_own_rate(vit, tmp_path):
    config = small(tmp_path / "run", **options(vit, encoder__frozen=False, encoder__lr_scale=0.25))
    saved = load_file(train(config) / "model.safetensors")
    model = build(config.model)
    name = "encoder.backbone.layernorm.weight"
    assert not saved[name].equal(model.state_dict()[name])  # it has moved
    assert load(tmp_path / "run").state_dict()[name].equal(saved[name])
    groups = {id(p): group["lr_scale"] for group in parameter_groups(model) for p in group["params"]}
    assert groups[id(dict(model.named_parameters())[name])] == 0.25


def test_config_json_names_the_checkpoint(vit, tmp_path):
    folder = train(small(tmp_path / "run", **options(vit, max_steps=1)))
    encoder = json.loads((folder / "config.json").read_text())["encoder"]
    assert encoder == {"name": "vit", "checkpoint": str(vit), "frozen": True, "lr_scale": 0.1}


def test_a_model_whose_vit_is_gone_says_how_to_get_it(vit, tmp_path, monkeypatch):
    shutil.copytree(vit, tmp_path / "copy")
    folder = train(small(tmp_path / "run", **options(tmp_path / "copy", max_steps=1)))
    shutil.rmtree(tmp_path / "copy")
    message = sentence(monkeypatch, ["evaluate", str(folder), "--data", "plain"])
    assert str(folder / "config.json") in message and f"encoder.checkpoint is '{tmp_path / 'copy'}'" in message


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"image_size": (18, 16)}, "image_size is (18, 16); expected multiples of (4, 4)"),
        ({"encoder__checkpoint": "no/vit"}, "`hf download no/vit`"),
        ({"encoder__lr_scale": -1.0}, "encoder.lr_scale is -1.0; expected a number from 0"),
    ],
)
def test_what_does_not_fit_is_one_sentence(changes, message, vit, tmp_path, monkeypatch):
    assert message in sentence(monkeypatch, train_command(tmp_path / "run", **options(str(vit), **changes)))
    assert not (tmp_path / "run").exists()


def test_loading_does_not_change_the_random_state(vit, tmp_path):
    folder = train(small(tmp_path / "run", **options(vit, max_steps=1)))
    config = load(folder).config
    torch.manual_seed(0)
    build(config)
    expected = torch.rand(3)
    torch.manual_seed(0)
    load(folder)
    assert torch.rand(3).equal(expected)
