"""Training with the encoder `vit`: from the command line, resumed, saved and loaded."""

import json
import shutil
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from cutslots import cli
from cutslots.models.checkpoints import load
from cutslots.models.discovery import build
from cutslots.training.loop import parameter_groups, train
from tests.data.small_photographs import write_coco
from tests.modules.small_vits import make_vit
from tests.small_runs import lines, sentence, small, state, train_command, weights


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
        assert [name for name in names if name.startswith("encoder.")] == ["encoder.weight_norm"] and len(names) > 9
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


def test_a_model_whose_vit_was_replaced_is_not_loaded(vit, tmp_path, monkeypatch):
    shutil.copytree(vit, tmp_path / "copy")
    words = train_command(tmp_path / "run", **options(tmp_path / "copy", max_steps=1))
    run_command(monkeypatch, words)
    make_vit(tmp_path / "copy", initializer_range=0.5)
    expected = "expected the checkpoint that the model was trained with"
    assert expected in sentence(monkeypatch, ["evaluate", str(tmp_path / "run"), "--data", "plain"])
    assert expected in sentence(monkeypatch, [*map(str, words), "--max-steps", "2"])


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


# ---------------------------------------------------------------------------------------------- feature reconstruction

MLP = {"decoder": "mlp", "decoder__hidden_dims": (16, 16), "loss": "feature-mse"}
TRANSFORMER = {"decoder": "transformer", "decoder__num_layers": 1, "decoder__num_heads": 3, "loss": "feature-mse"}
DECODERS = {"mlp": MLP, "transformer": TRANSFORMER}


@pytest.fixture(params=DECODERS)
def decoder(request):
    return DECODERS[request.param]


def test_features_are_reconstructed_from_the_command_line(decoder, vit, tmp_path, monkeypatch, capsys):
    """Train, interrupt, resume, evaluate, predict."""
    changes = options(vit, **decoder)
    run_command(monkeypatch, train_command(tmp_path / "whole", **changes))
    run_command(monkeypatch, train_command(tmp_path / "run", **changes | {"max_steps": 3}))
    run_command(monkeypatch, train_command(tmp_path / "run", **changes))
    assert weights(tmp_path / "whole") == weights(tmp_path / "run")
    run = tmp_path / "run"
    assert "feature MSE" in capsys.readouterr().out
    assert {"feature_mse", "refined_ari_fg", "ari_fg"} <= lines(run)[-1]["val"].keys()
    assert "mse" not in lines(run)[-1]["val"]

    run_command(monkeypatch, ["evaluate", run, "--data", "plain", "--num-images", "3", "--accelerator", "cpu"])
    assert "feature MSE" in capsys.readouterr().out
    results = json.loads((run / "evaluation" / "results.json").read_text())["results"]["plain"]
    assert results["feature_mse"] > 0 and 0 <= results["refined_miou"] <= 1
    report = (run / "evaluation" / "report.html").read_text()
    assert "Squared error of reconstructed features" in report and ">features<" in report

    photo = tmp_path / "photo.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (30, 50, 3), dtype=np.uint8)).save(photo)
    run_command(monkeypatch, ["predict", run, photo, "--out", tmp_path / "out", "--device", "cpu"])
    assert Image.open(next((tmp_path / "out").rglob("reconstruction.png"))).size == (50, 30)


@pytest.mark.parametrize("preset", ["movi", "ours-video"])
def test_features_of_pairs_are_reconstructed(preset, decoder, vit, tmp_path):
    changes = options(vit, data="moving", num_images=12, num_eval_images=24, **decoder)
    if preset == "ours-video":
        changes["slots__partition__background_anchor"] = 0.0
    folder = train(small(tmp_path / "run", preset, **changes))
    means = lines(folder)[-1]["val"]
    assert means["feature_mse"] > 0 and "refined_ari_fg" in means and "id_switches" in means


@pytest.mark.parametrize(
    "changes, message",
    [
        (MLP | {"loss": "mse"}, "expected --loss feature-mse"),
        ({"loss": "feature-mse"}, "loss is feature-mse, but the decoder reconstructs the image; expected --loss mse"),
        (MLP | {"encoder__frozen": False}, "expected a frozen encoder, such as --encoder vit"),
        (TRANSFORMER | {"decoder__num_heads": 5}, "decoder.num_heads is 5; expected a divisor of 24"),
    ],
)
def test_parts_that_do_not_fit_are_one_sentence(changes, message, vit, tmp_path, monkeypatch):
    assert message in sentence(monkeypatch, train_command(tmp_path / "run", **options(str(vit), **changes)))


def test_an_encoder_that_is_trained_is_no_target(tmp_path, monkeypatch):
    words = train_command(tmp_path / "run", **MLP)
    assert "reconstructs the features of an encoder that is trained" in sentence(monkeypatch, words)


def test_the_loss_falls(decoder, vit, tmp_path):
    folder = train(small(tmp_path / "run", **options(vit, max_steps=60, lr=3e-3, warmup_steps=0, **decoder)))
    losses = [line["val"]["feature_mse"] for line in lines(folder) if "val" in line]
    assert losses[-1] < 0.8 * losses[0]


def test_coco_from_its_files_to_predictions(tmp_path, monkeypatch):
    """Prepare, train, resume, evaluate and predict, on photographs in COCO's format."""
    write_coco(tmp_path / "coco", {"train": 6, "val": 4})
    make_vit(tmp_path / "vit", "dinov2", image_size=56, patch_size=28)  # positions are interpolated to 224
    data, run = tmp_path / "data", tmp_path / "run"
    run_command(monkeypatch, ["prepare", "coco", "--source", tmp_path / "coco", "--out", data])
    changes = options(tmp_path / "vit", image_size=(224, 224), data=f"coco:{data}", max_steps=4, **MLP)
    changes |= {"num_images": 4, "num_eval_images": 2, "batch_size": 2}
    run_command(monkeypatch, train_command(run, **changes | {"max_steps": 2}))
    run_command(monkeypatch, train_command(run, **changes))
    assert state(run)["step"] == 4
    run_command(monkeypatch, ["evaluate", run, "--data", f"coco:{data}", "--split", "val", "--accelerator", "cpu"])
    (results,) = json.loads((run / "evaluation" / "results.json").read_text())["results"].values()
    assert results["feature_mse"] > 0 and 0 <= results["refined_mbo_i"] <= 1
    photo = next((tmp_path / "coco").rglob("*.jpg"))
    run_command(monkeypatch, ["predict", run, photo, "--out", tmp_path / "out", "--device", "cpu"])
    assert Image.open(next((tmp_path / "out").rglob("labels.png"))).size == Image.open(photo).size
