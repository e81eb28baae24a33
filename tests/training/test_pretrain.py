"""`cutslots pretrain`: from the command line, resumed, killed, and its encoder in discovery."""

import json
import os
import signal
import sys
import types

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from cutslots import cli
from cutslots.models.checkpoints import load
from cutslots.modules.pretrained import PositionNorm, load_encoder
from cutslots.training import step as step_module
from cutslots.training.config import PretrainConfig
from cutslots.training.data import open_split
from cutslots.training.loader import TrainLoader
from cutslots.training.loop import Interrupted, parameter_groups, resolve, train
from cutslots.training.options import parse_pretrain
from cutslots.training.pretrain import Pretrain, build_pretraining, evaluate_objective, pretrain
from cutslots.training.pretrain_presets import PRETRAIN_PRESETS, PRETRAIN_SUMMARIES, add_pretrain_preset
from tests.small_runs import (
    Command,
    line_kinds,
    lines,
    pretrain_command,
    sentence,
    small,
    small_pretraining,
    state,
    train_command,
    weights,
)

OBJECTIVES = {"simclr": {}, "simmim": {"objective": "simmim", "objective__mask_size": 4}}
ENCODERS = {
    "cnn": {"encoder": "cnn", "encoder__channels": 6, "encoder__kernel_sizes": (3, 3)},
    "resnet": {"encoder__batch_norm": True},
    "patch-vit": {
        "encoder": "patch-vit",
        "encoder__channels": 8,
        "encoder__num_layers": 1,
        "encoder__num_heads": 2,
        "encoder__patch_size": 4,
    },
}


@pytest.fixture(scope="module")
def features(tmp_path_factory):
    """The folder of a small pre-training run. Read only."""
    return pretrain(small_pretraining(tmp_path_factory.mktemp("runs") / "features", max_steps=6))


def run_command(monkeypatch, words):
    monkeypatch.setattr(sys, "argv", ["cutslots", *map(str, words)])
    cli.main()


# --------------------------------------------------------------------------------------------------------- whole runs


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_run_resumes_to_the_same_bytes(objective, tmp_path, monkeypatch, capsys):
    changes = OBJECTIVES[objective] | {"max_steps": 8, "num_images": "endless" if objective == "simclr" else 8}
    run_command(monkeypatch, pretrain_command(tmp_path / "whole", **changes))
    assert ("accuracy" in capsys.readouterr().out) == (objective == "simclr")
    for steps in (3, 8):
        run_command(monkeypatch, pretrain_command(tmp_path / "parts", **changes | {"max_steps": steps}))
    assert state(tmp_path / "parts")["step"] == 8
    assert weights(tmp_path / "whole") == weights(tmp_path / "parts")
    assert lines(tmp_path / "whole")[-1] == lines(tmp_path / "parts")[-1], "the same validation metrics"


@pytest.mark.parametrize("encoder", ENCODERS)
def test_any_encoder_can_be_trained(encoder, tmp_path):
    config = small_pretraining(tmp_path / "run", **ENCODERS[encoder], max_steps=2)
    trained = load_encoder(pretrain(config))
    torch.manual_seed(config.seed)
    initial = build_pretraining(config).encoder
    moved = [not a.equal(b) for a, b in zip(trained.parameters(), initial.parameters(), strict=True)]
    assert all(moved)


def test_a_step_written_out(tmp_path):
    """The random numbers of views follow from the seed of the run and the step."""
    config = small_pretraining(tmp_path / "run", max_steps=2, seed=3, warmup_steps=0, grad_clip=0.0)
    torch.manual_seed(3)
    model = build_pretraining(config)
    optimizer = torch.optim.Adam(model.parameters())
    process = types.SimpleNamespace(world_size=1, global_rank=0, device="cpu")
    data = open_split(config, "train", 24)
    loader, losses = TrainLoader(data, config, process, 0), []
    for step in range(2):
        optimizer.param_groups[0]["lr"] = config.lr * config.lr_decay ** (step / config.lr_decay_steps)
        torch.manual_seed((3 << 32) + step)
        loss = model.objective(model.encoder, data.get_batch(loader.indices(step)).image / 255).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    folder = pretrain(config)
    assert lines(folder)[0]["loss"] == pytest.approx(np.mean(losses), rel=1e-4)
    for (name, value), expected in zip(
        load_encoder(folder).named_parameters(), model.encoder.parameters(), strict=True
    ):
        torch.testing.assert_close(value, expected, rtol=0, atol=0.2 * config.lr, msg=name)


def test_the_run_folder(features):
    names = {path.name for path in features.iterdir() if not path.name.startswith(".")}
    assert names == {
        "run.json",
        "config.json",
        "model.safetensors",
        "state.pt",
        "metrics.jsonl",
        "report.html",
        "tensorboard",
        "visualizations",
    }
    assert line_kinds(features) == [(6, "loss"), (6, "val")]
    metrics = lines(features)[-1]["val"]
    assert metrics.keys() == {"loss", "accuracy", "image_rank", "position_rank", "cluster_ari_fg"}
    assert 0 <= metrics["accuracy"] <= 1 and 1 <= metrics["image_rank"] <= 8 and metrics["cluster_ari_fg"] <= 1
    request = json.loads((features / "run.json").read_text())
    assert request["command"] == "pretrain" and request["objective"]["name"] == "simclr"
    report = (features / "report.html").read_text()
    assert "Pre-training: tiny on textured:3-6" in report and "contrastive accuracy" in report
    grid = Image.open(features / "visualizations" / "step_0000006.png")
    assert grid.size == (2 * 16 + 2, 4 * 16 + 3 * 2)


def test_the_checkpoint_holds_the_encoder_alone(features):
    names = load_file(features / "model.safetensors").keys()
    assert names == load_encoder(features).state_dict().keys() and not any("projection" in name for name in names)
    assert any(name.startswith("objective.projection") for name in state(features)["model"])


def test_a_complete_run_says_so(features, capsys):
    assert pretrain(small_pretraining(features, max_steps=6)) == features
    assert capsys.readouterr().out == f"{features} is complete; nothing is left to do\n"


def test_a_killed_run_resumes_to_the_same_bytes(tmp_path):
    expected = pretrain(small_pretraining(tmp_path / "alone", max_steps=24))
    folder = tmp_path / "run"
    words = pretrain_command(folder, max_steps=24)
    command = Command(words, tmp_path / "log")
    command.wait_for(lambda: len(line_kinds(folder)) >= 1)
    command.signal(signal.SIGKILL)
    command.end()
    assert 0 < state(folder)["step"] < 24, command.said()
    command = Command(words, tmp_path / "log")
    assert command.end() == 0, command.said()
    assert "resuming after step" in command.said()
    assert weights(folder) == weights(expected) and line_kinds(folder) == line_kinds(expected)
    assert [x for x in lines(folder) if "val" in x] == [x for x in lines(expected) if "val" in x]


def test_an_interrupted_run_prints_the_command_that_resumes(tmp_path, monkeypatch, capsys):
    rate = step_module.learning_rate

    def interrupt(config, step):
        if step == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return rate(config, step)

    monkeypatch.setattr(step_module, "learning_rate", interrupt)
    words = pretrain_command(tmp_path / "run", max_steps=4)
    with pytest.raises(SystemExit) as caught:
        run_command(monkeypatch, words)
    assert caught.value.code == 130 and f"resume with: cutslots {' '.join(words)}\n" in capsys.readouterr().out
    with pytest.raises(Interrupted):
        pretrain(small_pretraining(tmp_path / "other", max_steps=4))
    assert state(tmp_path / "run")["step"] == 2


def test_a_folder_of_photographs(tmp_path, rng):
    """Images without masks: there are no clusters to compare."""
    (tmp_path / "photos" / "images").mkdir(parents=True)
    for i in range(12):
        Image.fromarray(rng.integers(0, 256, (20, 30, 3), dtype=np.uint8)).save(
            tmp_path / "photos" / "images" / f"{i}.png"
        )
    changes = {"data": str(tmp_path / "photos"), "num_images": 8, "max_steps": 2}
    metrics = lines(pretrain(small_pretraining(tmp_path / "run", **changes)))[-1]["val"]
    assert metrics.keys() == {"loss", "accuracy", "image_rank", "position_rank"}


def test_frames_of_videos_are_images():
    config = small_pretraining(None, data="moving")
    for split in ("train", "val"):
        data = open_split(config, split, 24)
        assert (data.frames, len(data), data.get_batch([0]).image.shape) == (1, 24, (1, 3, 16, 16))


# ------------------------------------------------------------------------------------------------------------ metrics


def test_validation_has_the_same_views_every_time(features):
    config = small_pretraining(features, max_steps=6)
    model, data = build_pretraining(config).eval(), open_split(config, "val", 8)
    fabric = types.SimpleNamespace(device=torch.device("cpu"), autocast=lambda: torch.autocast("cpu", enabled=False))
    torch.manual_seed(1)
    first = evaluate_objective(model, data, fabric)
    after = torch.rand(3)
    torch.manual_seed(1)
    assert torch.rand(3).equal(after), "the random state stays as it is"
    assert evaluate_objective(model, data, fabric) == first and first.keys() == {"loss", "accuracy"}


def test_the_accuracy_rises(tmp_path):
    """Scenes differ in their colors: views of one scene are soon told from those of others."""
    changes = {"max_steps": 60, "eval_every": 30, "lr": 3e-3, "warmup_steps": 0, "objective__jitter": 0.0}
    changes |= {"objective__grayscale": 0.0, "objective__min_crop": 0.7, "batch_size": 8}
    metrics = [line for line in lines(pretrain(small_pretraining(tmp_path / "run", **changes))) if "val" in line]
    assert metrics[-1]["val"]["accuracy"] > 0.5 > 1 / 15, "chance is one of fifteen other views"


# ---------------------------------------------------------------------------------------------------------- discovery

MLP = {"decoder": "mlp", "decoder__hidden_dims": (16,), "loss": "feature-mse"}


def discovery(features, **changes):
    return {"encoder": "pretrained", "encoder__checkpoint": features, "max_steps": 6, "num_images": 8} | MLP | changes


def test_discovery_reconstructs_the_features(features, tmp_path, monkeypatch):
    changes = discovery(features, encoder__pool=2)
    run_command(monkeypatch, train_command(tmp_path / "whole", **changes))
    for steps in (2, 6):
        run_command(monkeypatch, train_command(tmp_path / "parts", **changes | {"max_steps": steps}))
    assert weights(tmp_path / "whole") == weights(tmp_path / "parts")
    saved = load_file(tmp_path / "whole" / "model.safetensors")
    assert [name for name in saved if name.startswith("encoder.")] == ["encoder.weight_norm"]
    run_command(monkeypatch, ["evaluate", tmp_path / "whole", "--data", "plain", "--num-images", "2"])


def test_discovery_does_not_change_the_encoder(features, tmp_path):
    model = load(train(small(tmp_path / "run", **discovery(features, slots="slot-attention", max_steps=2))))
    backbone, image = load_encoder(features), torch.rand(2, 3, 16, 16)
    assert all(value.equal(backbone.state_dict()[name]) for name, value in model.encoder.backbone.state_dict().items())
    target = model(image).target
    torch.testing.assert_close(target, PositionNorm(8)(backbone(image * 2 - 1)), rtol=0, atol=1e-5)
    assert target.shape == (2, 8, 8, 8)


def test_features_are_computed_once_with_a_cache(features, tmp_path, capsys):
    changes = discovery(features, encoder__pool=2, max_steps=4)
    expected = weights(train(small(tmp_path / "run", **changes)))
    cached = train(small(tmp_path / "cached", **changes, cache_dir=tmp_path / "cache"))
    assert "caching features of 8 images" in capsys.readouterr().out and weights(cached) == expected


def test_a_fine_tuned_encoder_is_saved(features, tmp_path, monkeypatch):
    changes = {"encoder": "pretrained", "encoder__checkpoint": features, "encoder__frozen": False}
    run_command(monkeypatch, train_command(tmp_path / "run", **changes, encoder__lr_scale=0.25, max_steps=2))
    model = load(tmp_path / "run")
    name = "stem.0.weight"
    assert not model.encoder.backbone.state_dict()[name].equal(load_encoder(features).state_dict()[name])
    rates = {id(p): group["lr_scale"] for group in parameter_groups(model) for p in group["params"]}
    assert {rates[id(p)] for p in model.encoder.parameters()} == {0.25}


def test_pretraining_can_go_on_from_a_checkpoint(features, tmp_path):
    changes = {"encoder": "pretrained", "encoder__checkpoint": features, "encoder__frozen": False, "max_steps": 1}
    trained = load_encoder(pretrain(small_pretraining(tmp_path / "run", **changes)))
    assert not trained.backbone.stem[0].weight.equal(load_encoder(features).stem[0].weight)


# ---------------------------------------------------------------------------------------------------- the command line


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"batch_size": 1}, "batch_size is 1; for the objective simclr, expected at least 2 images in each process"),
        ({"objective": "simmim", "objective__mask_size": 64}, "objective.mask_size is 64, which gives 1x1 patches"),
        ({"objective__temperature": 0.0}, "objective.temperature is 0.0; expected a number"),
        ({"num_images": "endless", "data": "moving"}, "num_images is endless, but data is 'moving'"),
        (ENCODERS["patch-vit"] | {"image_size": (18, 16)}, "image_size is (18, 16); expected multiples of 4"),
        ({"image_size": (4, 4)}, "image_size is (4, 4); expected 2 values, each an integer from 8"),
    ],
)
def test_what_does_not_fit_is_one_sentence(changes, message, tmp_path, monkeypatch):
    assert message in sentence(monkeypatch, pretrain_command(tmp_path / "run", **changes))
    assert not (tmp_path / "run").exists()


def test_a_frozen_encoder_cannot_be_trained(features, tmp_path, monkeypatch):
    words = pretrain_command(tmp_path / "run", encoder="pretrained", encoder__checkpoint=features)
    expected = "encoder is pretrained, whose weights are frozen; expected one to train: --encoder.no-frozen"
    assert sentence(monkeypatch, words) == f"cutslots: {expected}"


def test_runs_of_other_commands_are_not_resumed(features, monkeypatch):
    before = weights(features)
    message = sentence(monkeypatch, train_command(features))
    assert message == f"cutslots: {features / 'run.json'} is not the request of a run; choose another folder"
    assert "is not the config of a model: model is 'resnet'" in sentence(monkeypatch, ["evaluate", str(features)])
    assert weights(features) == before


def test_options_of_an_objective_that_is_not_selected(monkeypatch):
    message = sentence(monkeypatch, ["pretrain", "tiny", "--objective.mask-size", "3"])
    assert message.startswith("cutslots: --objective.mask-size is an option of the objective simmim, but simclr is")
    message = sentence(monkeypatch, ["pretrain", "tiny", "--slots.num-slots", "3"])
    assert message.endswith("there is no --slots; expected one of --encoder, --objective, --data")


def test_options_of_the_run_and_of_its_parts():
    config = parse_pretrain(["resnet", "--data", "textured", "--num-images", "endless", "--out", "runs/features"])
    assert isinstance(config, PretrainConfig) and config.num_images == "endless" and str(config.out) == "runs/features"
    config = parse_pretrain(["tiny", "--objective", "simmim", "--objective.mask-ratio", "0.3", "--encoder", "cnn"])
    assert config.objective.mask_ratio == 0.3 and config.encoder.channels == 32
    assert PretrainConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_default_run_folder():
    assert str(resolve(parse_pretrain(["tiny", "--seed", "4"])).out) == "runs/pretrain-tiny-textured-3-6-4"


@pytest.mark.parametrize("preset", PRETRAIN_PRESETS)
def test_presets_are_valid(preset):
    Pretrain(parse_pretrain([preset, "--accelerator", "cpu"])).validate()
    assert PRETRAIN_PRESETS[preset].preset == preset and PRETRAIN_SUMMARIES[preset]


def test_presets_have_names_of_their_own():
    with pytest.raises(ValueError, match=r"^preset 'tiny' exists; choose another name$"):
        add_pretrain_preset("tiny", "", PRETRAIN_PRESETS["tiny"])


def test_help(capsys):
    with pytest.raises(SystemExit):
        parse_pretrain(["--help"])
    assert "patch-vit" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        parse_pretrain(["tiny", "--help"])
    assert "--objective.temperature" in capsys.readouterr().out
