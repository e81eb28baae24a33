"""Fine-tuning: a run that starts from the weights of a checkpoint."""

import itertools
import json

import pytest
import torch

from cutslots.models.checkpoints import load, save
from cutslots.training.loop import train
from cutslots.training.options import parse_train
from tests.small_runs import line_kinds, sentence, small, state, train_command, weights

FROZEN = {"max_steps": 1, "lr": 1e-12}  # one step that changes no weight
TINY = ["train", "tiny", "--num-images", "4", "--batch-size", "2", "--max-steps", "1", "--lr", "1e-12"]
TINY += ["--num-eval-images", "2", "--accelerator", "cpu", "--init-from", "tiny-64"]


def assert_starts_from(folder, checkpoint):
    actual, expected = load(folder).state_dict(), load(checkpoint).state_dict()
    assert actual.keys() == expected.keys()
    for name, value in actual.items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-10, msg=name)


def test_a_run_starts_from_a_run_folder(run, tmp_path):
    folder = train(small(tmp_path / "new", init_from=run, **FROZEN))
    assert_starts_from(folder, run)
    assert json.loads((folder / "run.json").read_text())["init_from"] == str(run)


def test_a_run_starts_from_a_safetensors_file(run, tmp_path):
    assert_starts_from(train(small(tmp_path / "new", init_from=run / "model.safetensors", **FROZEN)), run)


def test_a_run_starts_from_half_precision(run, tmp_path):
    (tmp_path / "half").mkdir()
    save(load(run), tmp_path / "half", half=True)
    assert_starts_from(train(small(tmp_path / "new", init_from=tmp_path / "half", **FROZEN)), tmp_path / "half")


def test_seed_and_data_may_differ(run, tmp_path):
    assert_starts_from(train(small(tmp_path / "new", init_from=run, seed=3, data="textured", **FROZEN)), run)


def test_a_run_starts_from_a_checkpoint_of_the_package(tmp_path):
    assert_starts_from(train(parse_train([*TINY[1:], "--out", str(tmp_path / "run")])), "tiny-64")


def test_a_model_of_another_kind_starts_from_the_same_parts(run, tmp_path):
    """Pairs of frames begin with what a model of images has learned, and images with what pairs have learned."""
    pairs = train(small(tmp_path / "pairs", init_from=run, model="pair-discovery", data="moving", **FROZEN))
    images = train(small(tmp_path / "images", init_from=pairs, **FROZEN))
    assert_starts_from(images, run)
    options = {"model": "pair-discovery", "data": "moving", "match_half_area": 0.1, "pairing": "shared"}
    others = train(small(tmp_path / "others", init_from=pairs, **options, **FROZEN))
    for part, started in itertools.product(("encoder", "slots", "decoder"), (pairs, others)):
        actual, expected = (getattr(load(each), part).state_dict() for each in (started, run))
        for name, value in actual.items():
            torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-10, msg=name)


def test_options_that_change_no_weight_may_differ(run, tmp_path, capsys):
    options = {"slots__partition__temperature": 0.1, "slots__partition__gamma": 2.0, "slots__pool": "mask_mean"}
    folder = train(small(tmp_path / "new", init_from=run, **options, **FROZEN))
    assert_starts_from(folder, run)
    names = "slots.pool, slots.partition.temperature, slots.partition.gamma"
    assert f"begins with {run}, which differs in {names} (--init-from)" in capsys.readouterr().out
    slots = load(folder).slots
    assert (slots.partition.temperature, slots.partition.cut.gamma, slots.pool) == (0.1, 2.0, "mask_mean")


@pytest.mark.parametrize("skipped", [2, 1])
def test_progressive_training(tmp_path, skipped):
    """A decoder that skips doublings trains the other layers; one that skips fewer starts from all its weights."""
    options = {"image_size": (64, 64), "decoder": "spatial-broadcast", "decoder__channels": (4,)}
    coarse = train(small(tmp_path / "coarse", max_steps=2, decoder__skipped_doublings=skipped, **options))
    assert_starts_from(train(small(tmp_path / "fine", init_from=coarse, **options, **FROZEN)), coarse)
    parameters = dict(load(tmp_path / "fine").decoder.named_parameters())
    assert all(each.requires_grad for each in parameters.values()) and f"layers.{6 - 2 * skipped}.weight" in parameters


def test_a_model_of_pairs_keeps_all_its_weights(run, tmp_path):
    """Also those of the pairing, if only options that change no shape differ."""
    pairs = {"model": "pair-discovery", "data": "moving", "match_dim": 4}
    first = train(small(tmp_path / "first", max_steps=1, **pairs))
    second = train(small(tmp_path / "second", init_from=first, slots__pool="mask_mean", **pairs, **FROZEN))
    assert "match_projection.weight" in load(second).state_dict()
    assert_starts_from(second, first)


def test_without_init_from_weights_are_random(run, tmp_path):
    random, trained = load(train(small(tmp_path / "new", **FROZEN))), load(run)
    assert not torch.equal(random.encoder.layers[0].weight, trained.encoder.layers[0].weight)


def test_a_fine_tuned_run_resumes_from_its_own_state(run, tmp_path):
    options = {"init_from": run, "seed": 1}
    expected = weights(train(small(tmp_path / "one", max_steps=8, **options)))
    for steps in (3, 8):
        train(small(tmp_path / "resumed", max_steps=steps, **options))
    assert weights(tmp_path / "resumed") == expected and line_kinds(tmp_path / "resumed")[-1] == (8, "val")
    assert state(tmp_path / "resumed")["step"] == 8, "steps are counted from the start of the new run"
    with pytest.raises(ValueError, match=r"holds another run \(differing in init_from\)"):
        train(small(tmp_path / "resumed", max_steps=9, seed=1))


def test_a_run_resumes_without_the_checkpoint_it_started_from(run, tmp_path):
    options = {"init_from": run, "seed": 1}
    train(small(tmp_path / "new", max_steps=2, **options))
    (run / "model.safetensors").unlink()
    train(small(tmp_path / "new", max_steps=3, **options))
    assert state(tmp_path / "new")["step"] == 3


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"slots__num_slots": 4}, "slots.num_slots"),
        ({"slots__partition": "softmax"}, "slots.partition.name, "),
        ({"slots__mlp_dim": 9}, "slots.mlp_dim"),
        ({"image_size": (16, 24)}, "image_size"),
        ({"slots": "slot-attention"}, "slots.name, "),
        ({"model": "pair-discovery", "data": "moving", "slots__num_slots": 4}, "slots.num_slots;"),
        ({"model": "pair-discovery", "data": "moving", "image_size": (16, 24)}, "image_size;"),
    ],
)
def test_a_checkpoint_of_another_model(finished_run, tmp_path, monkeypatch, changes, message):
    said = sentence(monkeypatch, train_command(tmp_path / "new", init_from=finished_run, **changes))
    expected = f"cutslots: init_from is {finished_run}, whose model differs from the run's in {message}"
    assert said.startswith(expected) and not (tmp_path / "new").exists()
    expected = (
        "images of the same size"
        if "image_size" in changes
        else "weights of the same shapes in encoder, slots and decoder"
    )
    assert said.endswith(f"; expected {expected}")


def test_a_checkpoint_that_does_not_exist(tmp_path, monkeypatch):
    said = sentence(monkeypatch, train_command(tmp_path / "new", init_from=tmp_path / "nowhere"))
    assert said.startswith(f"cutslots: init_from: there is no {tmp_path / 'nowhere'}; expected a run folder")
    assert not (tmp_path / "new").exists()


def test_a_damaged_checkpoint(run, tmp_path, monkeypatch):
    (run / "model.safetensors").write_bytes(b"short")
    said = sentence(monkeypatch, train_command(tmp_path / "new", init_from=run))
    assert "safetensors" in said and str(run / "model.safetensors") in said and not (tmp_path / "new").exists()


def test_a_run_does_not_start_from_its_own_folder(run):
    (run / "state.pt").unlink()
    with pytest.raises(ValueError, match=rf"^init_from is {run}, the run folder itself; expected another checkpoint$"):
        train(small(run, init_from=run))
