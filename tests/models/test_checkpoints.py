"""Saving and loading, and every way in which a checkpoint can be wrong."""

import json
import math
import pickle
import re
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from cutslots.models.checkpoints import config_to_dict, load, read_config, save
from cutslots.models.discovery import Discovery, build
from cutslots.models.pair_discovery import PairDiscovery
from cutslots.models.spacetime_discovery import SpacetimeDiscovery
from cutslots.modules.checkpoint_files import MAX_CONFIG_BYTES
from cutslots.modules.decoders import PixelShuffleDecoder
from cutslots.modules.encoders import CNNEncoder
from cutslots.modules.slots import CutSlots
from tests.models.configs import (
    CONFIGS,
    GRAPH_OCL,
    IMAGES,
    PAIRS,
    SMALL,
    RunsCode,
    assert_same,
    random_input,
    run_seeded,
    small_model,
)

CLASSES = {"images": Discovery, "pairs": PairDiscovery, "spacetime": SpacetimeDiscovery}


@pytest.fixture
def folder(tmp_path):
    """A saved model."""
    save(build(SMALL), tmp_path)
    return tmp_path


def refused(path, *words):
    """Check that loading fails with one sentence that holds these words."""
    with pytest.raises(ValueError, match=r"\A[^\n]+\Z") as caught:
        load(path)
    for word in words:
        assert str(word) in str(caught.value), str(caught.value)


def edit(folder, change):
    """Write config.json again as `change` returns it."""
    path = folder / "config.json"
    path.write_text(json.dumps(change(json.loads(path.read_text()))))


# --------------------------------------------------------------------------------------------------------- round trips


@pytest.mark.parametrize("name", CONFIGS)
def test_save_and_load(name, tmp_path):
    config = CONFIGS[name]
    model, image = build(config), random_input(config)
    run_seeded(model, image)  # changes the running means of batch normalisation
    save(model, tmp_path)
    for path in (tmp_path, str(tmp_path), tmp_path / "model.safetensors"):
        again = load(path)
        assert type(again) is type(model) and again.config == config and not again.training
        assert_same(run_seeded(again, image), run_seeded(model.eval(), image))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize("kind", CLASSES)
def test_hub_round_trip(kind, tmp_path):
    """`save_pretrained` writes the same files as `save`."""
    model = small_model(kind)
    image = random_input(model.config)
    (tmp_path / "ours").mkdir()
    save(model, tmp_path / "ours")
    model.save_pretrained(tmp_path / "hub")
    for folder in (tmp_path / "ours", tmp_path / "hub"):
        for again in (load(folder), CLASSES[kind].from_pretrained(folder), Discovery.from_pretrained(str(folder))):
            assert type(again) is type(model) is CLASSES[kind] and again.config == model.config and not again.training
            assert_same(run_seeded(again, image), run_seeded(model, image))
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "ours" / name).read_bytes() == (tmp_path / "hub" / name).read_bytes()


def test_config_json_names_every_part(folder):
    values = json.loads((folder / "config.json").read_text())
    assert values == config_to_dict(SMALL)
    assert values["name"] == "discovery" and values["image_size"] == [16, 16] and values["plugins"] == []
    assert values["encoder"] == {"name": "cnn", "channels": 32, "kernel_sizes": [5, 3, 3], "pyramid_levels": 0}
    assert values["slots"]["name"] == "cut-slots" and values["slots"]["partition"]["name"] == "cut"
    assert values["decoder"] == {"name": "pixel-shuffle", "channels": [32, 32]}
    assert read_config(folder / "config.json") == SMALL


def test_loading_does_not_change_the_random_state(folder):
    torch.manual_seed(0)
    build(SMALL)
    expected = torch.rand(3)
    torch.manual_seed(0)
    load(folder)
    assert torch.equal(torch.rand(3), expected), "the model is initialised once"


def test_a_model_of_modules_cannot_be_saved(tmp_path):
    model = Discovery(CNNEncoder(8, (3,)), CutSlots(8, 3, (8, 8)), PixelShuffleDecoder(64, (16, 16)))
    for saved in (lambda: save(model, tmp_path), lambda: model.save_pretrained(tmp_path)):
        with pytest.raises(ValueError, match=r"^model has no config, because it was built from modules; expected"):
            saved()
    assert not list(tmp_path.iterdir())


def test_missing_options_take_their_defaults(tmp_path):
    """All of them: only names of parts are needed."""
    config = replace(IMAGES, encoder=type(IMAGES.encoder)(), slots=type(IMAGES.slots)(), decoder=type(IMAGES.decoder)())
    model = build(config)
    save(model, tmp_path)
    named = {"name": "discovery", "image_size": [16, 16], "encoder": {"name": "cnn"}, "slots": {"name": "cut-slots"}}
    edit(tmp_path, lambda c: named)
    assert load(tmp_path).config == config
    image = random_input(config)
    assert_same(run_seeded(load(tmp_path), image), run_seeded(model.eval(), image))


def test_a_default_that_does_not_fit_the_weights(tmp_path):
    config = replace(SMALL, encoder=replace(SMALL.encoder, pyramid_levels=1))
    save(build(config), tmp_path)
    edit(tmp_path, lambda c: c | {"encoder": {k: v for k, v in c["encoder"].items() if k != "pyramid_levels"}})
    refused(tmp_path, tmp_path / "model.safetensors", "does not fit its config.json", "encoder.pyramid")


# ------------------------------------------------------------------------------------------------- what can be missing


def test_missing_checkpoint(tmp_path):
    refused(tmp_path / "nowhere", tmp_path / "nowhere", "there is no", "expected a run folder", "tiny-64")
    refused(tmp_path, tmp_path / "model.safetensors", "there is no")


@pytest.mark.parametrize("checkpoint", ["", ".", "..", "./tiny", "tiny"])
def test_only_names_of_checkpoints_are_looked_up_in_the_package(checkpoint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refused(checkpoint, "checkpoint: there is no", "expected a run folder, a .safetensors file or a name (moving-128,")
    with pytest.raises(ValueError, match="there is no") as caught:
        load(checkpoint)
    assert "weights" not in str(caught.value)


def test_missing_config(folder):
    (folder / "config.json").unlink()
    refused(folder, f"there is no {folder / 'config.json'}, which describes the model")


def test_config_that_is_too_large(folder):
    (folder / "config.json").write_bytes(b" " * (MAX_CONFIG_BYTES + 1))
    refused(folder, folder / "config.json", "has 1,048,577 bytes; expected at most 1,048,576")


# ----------------------------------------------------------------------------------------------------- bad config.json


def nested(config, part, **options):
    return config | {part: config[part] | options}


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda c: c | {"depth": 3}, "model 'discovery' has no option 'depth'; its options are image_size, encoder,"),
        (lambda c: nested(c, "encoder", depth=3), "encoder 'cnn' has no option 'depth'; its options are channels, ker"),
        (lambda c: nested(c, "decoder", extra_layers=1), "'pixel-shuffle' has no option 'extra_layers'; its options"),
        (lambda c: nested(c, "encoder", channels=0), "channels is 0; expected an integer from 1 to 65,536"),
        (lambda c: nested(c, "encoder", channels=10**400), "expected an integer from 1 to 65,536"),
        (lambda c: nested(c, "encoder", channels="many"), "channels is 'many'; expected an integer"),
        (lambda c: nested(c, "encoder", channels=True), "channels is True; expected an integer"),
        (lambda c: nested(c, "encoder", kernel_sizes=3), "kernel_sizes is 3; expected at most 64 values, each an int"),
        (lambda c: nested(c, "encoder", kernel_sizes=[2]), "kernel_sizes is (2,); expected an odd integer"),
        (
            lambda c: nested(c, "encoder", name="unet"),
            "encoder is 'unet'; expected one of cnn, resnet, patch-vit, pretrained, vit",
        ),
        (lambda c: nested(c, "slots", partition={"name": "knife"}), "partition is 'knife'; expected one of cut, softm"),
        (lambda c: c | {"slots": {"num_slots": 3}}, 'expected an object with a "name" and options'),
        (
            lambda c: c | {"slots": "cut-slots"},
            "slot module is 'cut-slots'; expected an object with a \"name\" and options",
        ),
        (lambda c: c | {"name": "diffusion"}, "model is 'diffusion'; expected one of discovery, pair-discovery, spac"),
        (lambda c: c | {"image_size": [16]}, "image_size is (16,); expected 2 values, each an integer from 8 to 2,048"),
        (lambda c: c | {"image_size": 16}, "image_size is 16; expected 2 values"),
        (lambda c: [], "model is []; expected an object"),
        (lambda c: c | {"plugins": [[1], None]} | {"depth": 3}, "model 'discovery' has no option 'depth'"),
        (lambda c: c | {"plugins": {"a": 1}} | {"depth": 3}, "model 'discovery' has no option 'depth'"),
    ],
)
def test_bad_config(folder, change, words):
    edit(folder, change)
    refused(folder, folder / "config.json", "is not the config of a model:", words)


@pytest.mark.parametrize("content", [b"{'image_size': 64}", b"", b"\xff\xfe\x00", b'{"name": 6', b"[" * 10**5])
def test_config_that_is_not_json(folder, content):
    (folder / "config.json").write_bytes(content)
    refused(folder, folder / "config.json", "is not readable as JSON")


@pytest.mark.parametrize("content", ["3", "null", "[1]", '[["name", "discovery"]]', '"discovery"'])
def test_config_that_is_no_object(folder, content):
    (folder / "config.json").write_text(content)
    shown = repr(json.loads(content))
    refused(folder, folder / "config.json", f"is not the config of a model: model is {shown}; expected an object")


def test_plugins_that_are_not_needed_are_not_asked_for(folder):
    """A model whose parts are all registered loads, whatever config.json says about plugins."""
    for plugins in (["gone.py"], "gone.py", None, [[]]):
        edit(folder, lambda c, plugins=plugins: c | {"plugins": plugins})
        assert load(folder).config == SMALL


def test_a_model_that_is_too_large_takes_no_memory(folder):
    edit(folder, lambda c: nested(c, "encoder", channels=65_536, kernel_sizes=[255] * 64))
    refused(folder, folder / "config.json", "the model would have", "parameters; expected at most 1e+09")


@pytest.mark.parametrize("name, value", [("partition", "softmax"), ("partition", "cut")])
def test_models_for_clips_need_slots_for_clips(tmp_path, name, value):
    save(small_model("spacetime"), tmp_path)
    edit(tmp_path, lambda c: nested(c, "slots", **{name: {"name": value}}))
    refused(tmp_path, tmp_path / "config.json", "slots partition images; expected clips")


def test_models_for_images_need_slots_for_images(folder):
    edit(folder, lambda c: nested(c, "slots", partition={"name": "spacetime-cut"}))
    refused(folder, folder / "config.json", "slots partition clips; expected a slot module for images")


# --------------------------------------------------------------------------------------------------------- bad weights


@pytest.mark.parametrize("keep", [0, 4, 100, -3])
def test_truncated_weights(folder, keep):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    refused(folder, file, "is not a complete safetensors file")


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("name", ["model.pt", "model.safetensors"])
def test_pickles_are_refused_and_not_run(folder, name, zipped):
    made, file = folder / "executed", folder / name
    torch.save(RunsCode(made), file) if zipped else file.write_bytes(pickle.dumps(RunsCode(made)))
    reason = "may run code and are not loaded" if name.endswith(".pt") else "not a complete safetensors file"
    refused(file, file, reason)
    assert not made.exists()
    if not zipped:
        pickle.loads(file.read_bytes())
        assert made.exists(), "there was code to run"


@pytest.mark.parametrize(
    "part, options, reason",
    [
        ("slots", {"num_slots": 7}, "has shape (42,), expected (48,)"),
        ("encoder", {"kernel_sizes": [5, 3]}, "encoder.layers.4.bias is unexpected"),
        ("encoder", {"kernel_sizes": [5, 3, 3, 3]}, "encoder.layers.6.bias is missing"),
    ],
)
def test_weights_of_another_model(folder, part, options, reason):
    edit(folder, lambda c: nested(c, part, **options))
    refused(folder, folder / "model.safetensors", "does not fit its config.json", reason)


def test_weights_of_an_image_model_are_not_those_of_pairs(tmp_path):
    save(build(IMAGES), tmp_path)
    edit(tmp_path, lambda c: config_to_dict(PAIRS))
    refused(tmp_path, "does not fit its config.json: pairing.frames.bias is missing")


# ------------------------------------------------------------------------------------------------------ half precision


def with_statistics(config):
    """Return a model whose batch normalisation has seen a batch."""
    model = build(config)
    model(random_input(config))
    return model.eval()


def assert_holds(model, tensors):
    """Check that the model is float32, in evaluation mode, and has these values."""
    assert not model.training and {p.dtype for p in model.parameters()} == {torch.float32}
    state = model.state_dict()
    assert state.keys() == tensors.keys()
    for name, value in state.items():
        assert torch.equal(value, tensors[name].to(value.dtype)), name
        assert value.dtype == (torch.int64 if name.endswith("num_batches_tracked") else torch.float32), name


@pytest.mark.parametrize("config", [SMALL, GRAPH_OCL], ids=["plain", "batch norm"])
def test_half_is_saved_as_float16_and_loaded_as_float32(tmp_path, config):
    model = with_statistics(config)
    save(model, tmp_path, half=True)
    saved = load_file(tmp_path / "model.safetensors")
    for name, value in model.state_dict().items():
        assert torch.equal(saved[name], value.half() if value.is_floating_point() else value), name
        assert saved[name].dtype == (torch.float16 if value.is_floating_point() else torch.int64), name
    assert any(name.endswith("num_batches_tracked") for name in saved) == (config is GRAPH_OCL)
    for again in (load(tmp_path), Discovery.from_pretrained(tmp_path), Discovery.from_pretrained(str(tmp_path))):
        assert_holds(again, saved)
        assert again.config == config
    image = random_input(config)
    torch.testing.assert_close(load(tmp_path)(image).masks, model(image).masks, rtol=0, atol=0.02)
    assert {p.dtype for p in model.parameters()} == {torch.float32}, "saving does not change the model"


def test_half_takes_half_the_space(tmp_path):
    sizes = []
    for half in (False, True):
        save(build(SMALL), tmp_path, half)
        sizes.append((tmp_path / "model.safetensors").stat().st_size)
    assert sizes[1] < 0.55 * sizes[0]


def test_bfloat16_loads_as_float32(tmp_path):
    model = with_statistics(GRAPH_OCL)
    save(model, tmp_path)
    saved = {k: v.bfloat16() if v.is_floating_point() else v for k, v in model.state_dict().items()}
    save_file(saved, tmp_path / "model.safetensors")
    assert_holds(load(tmp_path), saved)
    assert_holds(Discovery.from_pretrained(tmp_path), saved)


@pytest.mark.parametrize("value", [7e4, -1e30, float("inf"), float("nan")])
def test_half_refuses_values_that_float16_cannot_hold(tmp_path, value):
    model = build(SMALL)
    with torch.no_grad():
        model.decoder.layers[-2].weight.view(-1)[3] = value
    seen = re.escape(f"{abs(value):.6g}")
    message = rf"\Ahalf: decoder\.\S+ holds {seen}; expected finite values up to 65,504\Z"
    with pytest.raises(ValueError, match=message):
        save(model, tmp_path, half=True)
    assert not list(tmp_path.iterdir()), "nothing was written"
    save(model, tmp_path)
    if math.isfinite(value):
        load(tmp_path)  # float32 holds it
        return
    refused(tmp_path, "model.safetensors holds values in decoder.", "that are not finite; expected")


def test_half_holds_the_largest_and_the_smallest(tmp_path):
    model = build(SMALL)
    with torch.no_grad():
        model.decoder.layers[-2].weight.view(-1)[:3] = torch.tensor([65504.0, -65504.0, 1e-12])
    save(model, tmp_path, half=True)
    assert load(tmp_path).decoder.layers[-2].weight.view(-1)[:3].tolist() == [65504.0, -65504.0, 0.0]


def test_integer_tensors_are_not_weights(tmp_path):
    save(with_statistics(GRAPH_OCL), tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    count = next(name for name in tensors if name.endswith("num_batches_tracked"))
    for name, dtype in (("encoder.stem.0.weight", torch.int8), (count, torch.float16)):
        save_file(tensors | {name: tensors[name].to(dtype)}, file)
        refused(tmp_path, f"does not fit its config.json: {name} has dtype {dtype}, expected")
