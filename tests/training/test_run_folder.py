"""The folder of a run: what it holds, how it is claimed, replaced and refused."""

import dataclasses
import fcntl
import json

import pytest
import torch
from PIL import Image

import cutslots
from cutslots.devices import make_fabric
from cutslots.evaluation.evaluate import evaluate
from cutslots.models.checkpoints import load, read_config
from cutslots.training.config import TrainConfig
from cutslots.training.loop import resolve, train, validate
from cutslots.training.schedules import learning_rate
from tests.small_runs import line_kinds, lines, sentence, small, state, train_command, weights
from tests.training.curves import tensorboard_curves

SENTENCE = r"\A[^\n]+\Z"


def run_values(folder):
    return json.loads((folder / "run.json").read_text())


# -------------------------------------------------------------------------------------------------------- what it holds


def test_files_of_a_run(finished_run):
    names = {"run.json", "config.json", "metrics.jsonl", "model.safetensors", "state.pt", "report.html"}
    assert {p.name for p in finished_run.iterdir()} == names | {"tensorboard", "visualizations", ".lock"}
    assert state(finished_run)["step"] == 48
    assert "tiny on plain:2-5" in (finished_run / "report.html").read_text()


def test_metrics_of_a_run(finished_run):
    config = small(finished_run)
    expected = [(step, "loss") for step in (20, 40, 48)] + [(step, "val") for step in range(8, 49, 8)]
    assert line_kinds(finished_run) == sorted(expected)
    for line in lines(finished_run):
        if "val" in line:
            assert {"ari", "ari_fg", "miou", "mse", "partition_ari_fg"} <= set(line["val"])
        else:
            assert line["lr"] == learning_rate(config, line["step"] - 1)
            assert line["images_per_second"] > 0 and line["seconds"] > 0 and line["grad_norm"] > 0


def test_the_loss_decreases(finished_run):
    losses = [line["loss"] for line in lines(finished_run) if "loss" in line]
    assert losses[0] > 1.3 * losses[-1] > 0


def test_visualizations_by_step(finished_run):
    images = sorted((finished_run / "visualizations").iterdir())
    assert [p.name for p in images] == [f"step_{step:07d}.png" for step in range(8, 49, 8)]
    assert Image.open(images[-1]).height == 4 * 18 - 2


def test_run_json_is_the_resolved_config(finished_run):
    values = run_values(finished_run)
    assert values["max_steps"] == 48 and values["lr"] == 1e-3 and values["out"] == str(finished_run)
    assert (values["accelerator"], values["precision"], values["compile"]) == ("cpu", "32-true", "off")
    assert values["version"] == cutslots.__version__
    assert TrainConfig.from_dict(values) == resolve(small(finished_run))


@pytest.mark.parametrize(
    "preset, changes",
    [
        ("tiny", {}),
        ("tiny", {"slots": "slot-attention", "decoder": "spatial-broadcast", "max_minutes": 2.5, "num_images": None}),
        ("ours", {"encoder__kernel_sizes": (3, 3), "data": "camo:1-2", "horizontal_flips": True, "init_from": "x"}),
        ("movi", {"cache_dir": "some/cache", "model": "pair-discovery", "match_gamma": 0.5}),
    ],
)
def test_run_json_round_trip(preset, changes, tmp_path):
    config = small(tmp_path / "run", preset, **changes)
    values = json.loads(json.dumps(config.to_dict()))
    assert TrainConfig.from_dict(values) == config
    assert TrainConfig.from_dict(values | {"version": "0.0"}) == config


def test_config_json_is_the_model_of_run_json(finished_run):
    config = json.loads((finished_run / "config.json").read_text())
    assert config.pop("plugins") == [] and config == run_values(finished_run)["model"]
    assert read_config(finished_run / "config.json") == small(finished_run).model


def test_the_checkpoint_has_the_weights_of_the_state(finished_run):
    model = load(finished_run)
    assert model.config == small(finished_run).model
    tensors = model.state_dict()
    for name, value in state(finished_run)["model"].items():
        assert torch.equal(value, tensors[name])


def test_the_last_validation_equals_evaluate(finished_run, tmp_path):
    results = evaluate(str(finished_run), ("plain:2-5",), tmp_path, "val", 8, make_fabric("cpu"))["plain:2-5"]
    last = lines(finished_run)[-1]["val"]
    assert {name: results[name] for name in last} == last


def test_the_default_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert str(train(small(None, max_steps=1, seed=3))) == "runs/tiny-plain-2-5-3"
    assert (tmp_path / "runs" / "tiny-plain-2-5-3" / "model.safetensors").exists()
    assert run_values(tmp_path / "runs" / "tiny-plain-2-5-3")["out"] == "runs/tiny-plain-2-5-3"


def test_the_default_folder_of_data_in_a_folder(tmp_path):
    (tmp_path / "my photos" / "images").mkdir(parents=True)
    assert str(resolve(small(None, data=tmp_path / "my photos")).out) == "runs/tiny-my photos-0"
    (tmp_path / "my photos" / "images").rmdir()


# ---------------------------------------------------------------------------------------------------------- another run


@pytest.mark.parametrize(
    "changes, named",
    [
        ({"lr": 0.5}, "lr"),
        ({"data": "plain:3-4"}, "data.num_objects"),
        ({"data": "textured:2-5"}, "data.name"),
        ({"seed": 1, "batch_size": 8}, "batch_size, seed"),
        ({"slots__num_slots": 4, "encoder__channels": 9}, "model.encoder.channels, model.slots.num_slots"),
        ({"num_images": 12, "loss__blur": 1.0}, "loss.blur, num_images"),
        ({"horizontal_flips": True}, "horizontal_flips"),
        ({"init_from": "tiny-64"}, "init_from"),
    ],
)
def test_another_run_is_refused(tmp_path, monkeypatch, changes, named):
    monkeypatch.setattr("cutslots.training.loop._initialized", lambda config: None)  # tiny-64 is another model
    values = resolve(small(tmp_path)).to_dict() | {"version": cutslots.__version__}
    (tmp_path / "run.json").write_text(json.dumps(values))
    (tmp_path / "state.pt").write_bytes(b"of that run")
    before = (tmp_path / "run.json").read_bytes()
    with pytest.raises(ValueError, match=SENTENCE) as caught:
        train(small(tmp_path, **changes))
    said = str(caught.value)
    assert said.startswith(f"{tmp_path} holds another run (differing in ") and "--overwrite" in said
    for name in named.split(", "):
        assert name in said
    assert (tmp_path / "run.json").read_bytes() == before


def test_some_options_may_change_when_a_run_resumes(run):
    changed = {"max_minutes": 5.0, "checkpoint_minutes": 1.0, "cache_dir": run.parent / "cache"}
    train(small(run, max_steps=9, **changed))
    values = run_values(run)
    assert state(run)["step"] == 9 and values["max_minutes"] == 5.0 and values["max_steps"] == 9


def test_overwrite_replaces_a_run(run):
    (run / "evaluation").mkdir()
    train(small(run, max_steps=2, lr=0.5, overwrite=True))
    assert line_kinds(run) == [(2, "loss"), (2, "val")] and not (run / "evaluation").exists()
    assert [p.name for p in (run / "visualizations").iterdir()] == ["step_0000002.png"]
    assert {step for curve in tensorboard_curves(run).values() for step, _ in curve} == {2}


def test_overwrite_removes_links_but_not_what_they_point_to(run, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "diary.txt").write_text("mine")
    (run / "evaluation").symlink_to(tmp_path / "elsewhere")
    train(small(run, max_steps=1, lr=0.5, overwrite=True))
    assert not (run / "evaluation").exists() and (tmp_path / "elsewhere" / "diary.txt").exists()


def test_overwrite_replaces_runs_only(run, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "state.pt").write_text("mine")
    with pytest.raises(ValueError, match=r"mine holds state\.pt but no run\.json of a run; choose another folder"):
        train(small(tmp_path / "mine", overwrite=True))
    (run / "diary.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"holds diary\.txt, which is not part of a run; choose another folder"):
        train(small(run, lr=0.5, overwrite=True))
    assert (run / "diary.txt").exists() and (run / "state.pt").exists()


# ------------------------------------------------------------------------------------------------------- something else


@pytest.mark.parametrize("content", [None, "{", "[1]", "3"])
def test_a_folder_with_other_files_is_refused(tmp_path, content):
    (tmp_path / "diary.txt").write_text("mine")
    if content is not None:
        (tmp_path / "run.json").write_text(content)
    with pytest.raises(ValueError, match=SENTENCE) as caught:
        train(small(tmp_path))
    assert str(tmp_path) in str(caught.value) and "choose another folder" in str(caught.value)
    assert (tmp_path / "diary.txt").read_text() == "mine"
    assert not (tmp_path / "state.pt").exists() and not (tmp_path / ".lock").exists()


def test_a_file_in_the_place_of_the_folder(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    said = sentence(monkeypatch, train_command(tmp_path / "file"))
    assert said == f"cutslots: {tmp_path / 'file'} is a file; expected a folder to write to"
    assert str(tmp_path / "file" / "below") in sentence(monkeypatch, train_command(tmp_path / "file" / "below"))


def test_a_folder_in_use(run):
    with (run / ".lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for overwrite in (False, True):
            with pytest.raises(ValueError, match=f"^{run} is in use by another command; wait for it or choose another"):
                train(small(run, overwrite=overwrite))
    assert state(run)["step"] == 8
    train(small(run, max_steps=9))  # the lock ends with its owner


# ------------------------------------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    "mistake",
    [
        {"batch_size": 0},
        {"slots__num_slots": 1},
        {"encoder__kernel_sizes": (2,)},
        {"loss__blur": 99.0},
        pytest.param({"accelerator": "cuda"}, marks=pytest.mark.skipif(torch.cuda.is_available(), reason="has CUDA")),
    ],
)
def test_a_mistake_leaves_no_folder(tmp_path, mistake):
    with pytest.raises(ValueError, match=SENTENCE):
        train(small(tmp_path / "run", **mistake))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("slots", ["cut-slots", "graph-ocl-slots"])
def test_one_slot_is_refused_by_the_name_of_the_option(tmp_path, monkeypatch, slots):
    preset = {"cut-slots": "tiny", "graph-ocl-slots": "graph-ocl"}[slots]
    words = ["train", preset, "--slots.num-slots", "1", "--out", str(tmp_path / "run")]
    assert sentence(monkeypatch, words) == "cutslots: num_slots is 1; expected at least 2"


def test_validate_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = torch.random.get_rng_state()
    config = small(None, cache_dir=tmp_path / "cache")
    validate(config)
    assert not list(tmp_path.iterdir()) and torch.equal(torch.random.get_rng_state(), before)
    assert config == small(None, cache_dir=tmp_path / "cache")


def test_a_run_does_not_depend_on_the_random_state_before(tmp_path):
    runs = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        runs.append(train(small(tmp_path / str(seed), max_steps=2)))
    assert weights(runs[0]) == weights(runs[1])


def test_two_configs_of_one_command_are_equal():
    assert small(None) == small(None) and dataclasses.replace(small(None), seed=1) == small(None, seed=1)
