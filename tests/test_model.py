import dataclasses
import json
import os
import pickle

import pytest
import torch

from cutslots.metrics import score
from cutslots.model import Discovery, Found, PairDiscovery, build, load, save
from cutslots.presets import PRESETS, ModelConfig
from cutslots.scenes import Scenes

SMALL = dataclasses.replace(PRESETS["tiny"].model, size=16)
CONFIGS = {name: dataclasses.replace(p.model, size=64 if name == "tiny" else 32) for name, p in PRESETS.items()}
CONFIGS |= {module: dataclasses.replace(SMALL, module=module) for module in ("softmax", "attention")}


def look(model, image):
    torch.manual_seed(0)  # Slot Attention draws its slots
    with torch.no_grad():
        return model(image)


def assert_same(one: Found, other: Found):
    for name, a, b in zip(Found._fields, one, other, strict=True):
        assert torch.equal(a, b), name


@pytest.fixture
def folder(tmp_path):
    """A saved model."""
    save(Discovery(SMALL), tmp_path)
    return tmp_path


def test_every_preset_builds():
    for name, preset in PRESETS.items():
        assert preset.preset == name and build(preset.model).config == preset.model


def test_models_of_films_are_not_taken_for_models_of_images(tmp_path):
    """The Hub's mixin would leave out what it has no place for."""
    save(build(dataclasses.replace(SMALL, frames=2)), tmp_path)
    with pytest.raises(ValueError, match=r"frames is 2; expected 1, or PairDiscovery"):
        Discovery.from_pretrained(tmp_path)
    assert PairDiscovery.from_pretrained(tmp_path).config.frames == 2


@pytest.mark.parametrize("name", CONFIGS)
def test_forward_and_backward(name):
    config = CONFIGS[name]
    model, image = build(config), torch.rand(2, config.frames, 3, config.size, config.size)
    image = image if config.frames > 1 else image[:, 0]
    found = model(image)
    K, S = config.slots, config.size
    if config.frames > 1:  # a frame is as good as an image
        found, image = Found(*(x[:, 0] for x in found)), image[:, 0]
    assert found.slots.shape == (2, K, config.slot_dim) and found.masks.shape == (2, K, S, S)
    assert found.partition.shape == (2, K, S // 2, S // 2) and found.pictures.shape == (2, K, 3, S, S)
    assert found.reconstruction.shape == image.shape
    torch.testing.assert_close(found.masks.sum(1), torch.ones(2, S, S))
    torch.testing.assert_close(found.partition.sum(1), torch.ones(2, S // 2, S // 2))
    torch.testing.assert_close(
        found.reconstruction, sum(found.masks[:, k, None] * found.pictures[:, k] for k in range(K))
    )
    (found.reconstruction - image).square().mean().backward()
    for parameter, value in model.named_parameters():
        assert value.grad is not None and torch.isfinite(value.grad).all() and value.grad.any(), parameter


@pytest.mark.parametrize("module", ["cut", "softmax", "attention"])
def test_bytes_and_floats_are_one_image(module):
    model = Discovery(dataclasses.replace(SMALL, module=module))
    image = torch.randint(0, 256, (2, 3, 16, 16), dtype=torch.uint8)
    assert_same(look(model, image), look(model, image / 255))


def test_the_encoder_sees_values_from_minus_one_to_one():
    model, image = Discovery(SMALL), torch.rand(2, 3, 16, 16)
    slots, partition = model.slots(model.encoder(image * 2 - 1))
    found = model(image)
    torch.testing.assert_close((found.slots, found.partition), (slots, partition))


def test_decode_draws_what_forward_does():
    model, image = Discovery(SMALL), torch.rand(2, 3, 16, 16)
    found = look(model, image)
    drawn = model.decode(found.slots)
    assert all(torch.equal(drawn[name], getattr(found, name)) for name in ("masks", "pictures", "reconstruction"))


def test_no_images_are_no_trouble():
    assert Discovery(SMALL)(torch.rand(0, 3, 16, 16)).masks.shape == (0, 6, 16, 16)


@pytest.mark.parametrize("name", CONFIGS)
def test_save_and_load(name, tmp_path):
    model = build(CONFIGS[name])
    image = torch.rand(2, model.config.frames, 3, model.config.size, model.config.size)
    image = image if model.config.frames > 1 else image[:, 0]
    look(model, image)  # moves the running means of batch normalisation off their start
    save(model, tmp_path)
    for path in (tmp_path, str(tmp_path), tmp_path / "model.safetensors"):
        again = load(path)
        assert again.config == model.config and not again.training
        assert_same(look(again, image), look(model.eval(), image))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


def test_pretrained_round_trip(tmp_path):
    model, image = Discovery(SMALL).eval(), torch.rand(2, 3, 16, 16)
    model.save_pretrained(tmp_path / "hub")
    again = Discovery.from_pretrained(tmp_path / "hub")
    assert isinstance(again.config, ModelConfig)
    assert again.config == SMALL
    assert_same(look(again.eval(), image), look(model, image))


def test_the_hubs_files_and_ours_are_the_same(folder):
    ours = load(folder)
    ours.save_pretrained(folder / "hub")
    image = torch.rand(2, 3, 16, 16)
    assert load(folder / "hub").config == SMALL
    assert_same(look(load(folder / "hub"), image), look(ours, image))
    assert_same(look(Discovery.from_pretrained(folder).eval(), image), look(ours, image))


def refused(path, *words):
    """Loading gives one sentence that holds the words, the path among them."""
    with pytest.raises(ValueError, match=r"\A[^\n]+\Z") as caught:
        load(path)
    for word in words:
        assert str(word) in str(caught.value)


def test_missing_weights(tmp_path):
    refused(tmp_path / "nowhere", tmp_path / "nowhere", "there is no", "expected a run folder")
    refused(tmp_path, tmp_path / "model.safetensors", "there is no")


def test_missing_config(folder):
    (folder / "config.json").unlink()
    refused(folder, f"there is no {folder / 'config.json'}")


@pytest.mark.parametrize(
    "content, words",
    [
        (lambda c: {k: v for k, v in c.items() if k != "gamma"}, ["missing or unknown are gamma"]),
        (lambda c: c | {"depth": 3}, ["missing or unknown are depth"]),
        (lambda c: [], ["missing or unknown are anchor"]),
        (lambda c: 3, ["not readable as JSON"]),
    ],
)
def test_bad_config(folder, content, words):
    path = folder / "config.json"
    path.write_text(json.dumps(content(json.loads(path.read_text()))))
    refused(folder, path, *words)


def without(path, *names):
    """Takes keys from a file of JSON."""
    path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k not in names}))


def test_weights_that_are_older_than_context_and_places(folder):
    image, expected = torch.rand(2, 3, 16, 16), load(folder)
    without(folder / "config.json", "context", "placed")
    for model in (load(folder), Discovery.from_pretrained(folder)):
        assert model.config == SMALL and model.config.context == 0 and not model.config.placed
        assert_same(look(model, image), look(expected, image))


def test_newer_weights_are_not_taken_for_older_ones(tmp_path):
    """Without context in config.json the weights beside it are one network too many."""
    save(Discovery(dataclasses.replace(SMALL, context=1)), tmp_path)
    without(tmp_path / "config.json", "context")
    refused(tmp_path, tmp_path / "model.safetensors", "does not fit its config.json")


def test_older_files_hold_nothing_unknown_either(folder):
    without(folder / "config.json", "context", "placed")
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"depth": 3}))
    refused(folder, path, "missing or unknown are depth")
    without(path, "depth", "gamma")
    refused(folder, path, "missing or unknown are gamma")


@pytest.mark.parametrize("content", [b"{'size': 64}", b"", b"\xff\xfe\x00", b'{"size": 6'])
def test_config_that_is_not_json(folder, content):
    (folder / "config.json").write_bytes(content)
    refused(folder, folder / "config.json", "not readable as JSON")


@pytest.mark.parametrize("keep", [0, 4, 100, -3])
def test_truncated_weights(folder, keep):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    refused(folder, file, "is not a whole safetensors file")


class Code:
    """Makes a folder when it is unpickled."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("name", ["model.pt", "model.safetensors"])
def test_pickles_are_refused_and_not_run(folder, name, zipped):
    mark, file = folder / "executed", folder / name
    torch.save(Code(mark), file) if zipped else file.write_bytes(pickle.dumps(Code(mark)))
    reason = "may run code and are not read" if name.endswith(".pt") else "not a whole safetensors file"
    refused(file, file, reason)
    assert not mark.exists()
    if not zipped:
        pickle.loads(file.read_bytes())
        assert mark.exists(), "there was code to run"


@pytest.mark.parametrize(
    "change, reason",
    [
        ({"slots": 7}, "has shape (42,), expected (48,)"),
        ({"encoder_kernels": (5, 3)}, "encoder.layers.4.bias is unexpected"),
        ({"encoder_kernels": (5, 3, 3, 3)}, "encoder.layers.6.bias is missing"),
    ],
)
def test_weights_of_another_model(folder, change, reason):
    other = dataclasses.asdict(dataclasses.replace(SMALL, **change))
    (folder / "config.json").write_text(json.dumps(other))
    refused(folder, folder / "model.safetensors", "does not fit its config.json", reason)


def test_bad_images():
    model = Discovery(SMALL)
    for shape in [(2, 3, 16, 17), (2, 1, 16, 16), (3, 16, 16), (2, 16, 16, 3)]:
        with pytest.raises(ValueError, match=r"^image has shape \(.*\); expected \(B, 3, 16, 16\)$") as caught:
            model(torch.rand(shape))
        assert str(shape) in str(caught.value)
    for dtype in (torch.int64, torch.bool):
        with pytest.raises(TypeError, match=f"^image is of type {dtype}; expected uint8 or floating point$"):
            model(torch.zeros(1, 3, 16, 16, dtype=dtype))


def test_shipped_weights_load_by_name():
    model = load("tiny")
    assert model.config == PRESETS["tiny"].model and not model.training
    image, truth = Scenes("plain", "test", 64, objects=(2, 5)).render(range(8))
    assert score(truth, model(image).masks.argmax(1))["ari_fg"].mean() > 0.4, "they find objects"
