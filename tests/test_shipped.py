"""Weights in half precision, and weights that come with the package."""

import dataclasses
import json
import math
import re
import socket
import subprocess
import sys

import huggingface_hub
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from cutslots import model as models
from cutslots.model import SHIPPED, Discovery, PairDiscovery, VolumeDiscovery, build, load, save
from cutslots.presets import PRESETS

SMALL = dataclasses.replace(PRESETS["tiny"].model, size=16)
NORMED = dataclasses.replace(PRESETS["released"].model, size=16, encoder_maps=8, weight_maps=8, decoder_maps=(8,))
NAMES = sorted(p.name for p in SHIPPED.iterdir() if p.is_dir())


def trained(config):
    """Not quite: but batch normalisation has seen something."""
    model = build(config)
    model(torch.rand(2, 3, config.size, config.size))
    return model.eval()


def assert_holds(model, tensors):
    """The model is float32, ready to use, and has these numbers."""
    assert not model.training and {p.dtype for p in model.parameters()} == {torch.float32}
    state = model.state_dict()
    assert state.keys() == tensors.keys()
    for name, value in state.items():
        assert torch.equal(value, tensors[name].to(value.dtype)), name
        assert value.dtype == (torch.int64 if name.endswith("num_batches_tracked") else torch.float32), name


@pytest.fixture
def no_network(monkeypatch):
    """Nothing can be reached, and the Hub's library has not been told."""

    def refuse(*args, **kwargs):
        raise AssertionError("the network was asked")

    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    for name in ("connect", "connect_ex", "sendto"):
        monkeypatch.setattr(socket.socket, name, refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.fixture
def shipped(tmp_path, monkeypatch):
    """A package that ships half precision under the name textured, and pairs and volumes."""
    home = tmp_path / "weights"
    configs = {
        "textured": SMALL,
        "pairs": dataclasses.replace(SMALL, frames=2),
        "volumes": dataclasses.replace(SMALL, frames=2, volume=True),
    }
    for name, config in configs.items():
        (home / name).mkdir(parents=True)
        save(build(config), home / name, half=True)
    monkeypatch.setattr(models, "SHIPPED", home)
    monkeypatch.chdir(tmp_path)
    return home


@pytest.mark.parametrize("config", [SMALL, NORMED], ids=["plain", "normed"])
def test_half_is_kept_as_float16_and_loaded_as_float32(tmp_path, config):
    model = trained(config)
    save(model, tmp_path, half=True)
    kept = load_file(tmp_path / "model.safetensors")
    for name, value in model.state_dict().items():
        assert torch.equal(kept[name], value.half() if value.is_floating_point() else value), name
        assert kept[name].dtype == (torch.float16 if value.is_floating_point() else torch.int64), name
    assert any(name.endswith("num_batches_tracked") for name in kept) == config.encoder_norm
    for again in (load(tmp_path), Discovery.from_pretrained(tmp_path), Discovery.from_pretrained(str(tmp_path))):
        assert_holds(again, kept)
        assert again.config == config
    image = torch.rand(2, 3, 16, 16)
    torch.testing.assert_close(load(tmp_path)(image).masks, model(image).masks, rtol=0, atol=0.02)
    assert {p.dtype for p in model.parameters()} == {torch.float32}, "what was saved is as it was"


def test_half_takes_half_the_room(tmp_path):
    sizes = []
    for half in (False, True):
        save(Discovery(SMALL), tmp_path, half)
        sizes.append((tmp_path / "model.safetensors").stat().st_size)
    assert sizes[1] < 0.55 * sizes[0]


def test_bfloat16_loads_as_float32(tmp_path):
    model = trained(NORMED)
    save(model, tmp_path)
    kept = {k: v.bfloat16() if v.is_floating_point() else v for k, v in model.state_dict().items()}
    save_file(kept, tmp_path / "model.safetensors")
    assert_holds(load(tmp_path), kept)
    assert_holds(Discovery.from_pretrained(tmp_path), kept)


@pytest.mark.parametrize("value", [7e4, -1e30, float("inf"), float("nan")])
def test_half_refuses_what_float16_cannot_hold(tmp_path, value):
    model = Discovery(SMALL)
    with torch.no_grad():
        model.decoder.layers[-2].weight.view(-1)[3] = value
    seen = re.escape(f"{abs(value):.6g}")
    with pytest.raises(
        ValueError, match=rf"\Ahalf: decoder\.\S+ holds {seen}; expected finite values up to 65,504.*\Z"
    ):
        save(model, tmp_path, half=True)
    assert not list(tmp_path.iterdir()), "nothing was written"
    save(model, tmp_path)
    if math.isfinite(value):
        load(tmp_path)  # float32 holds it
        return
    with pytest.raises(
        ValueError, match=r"model\.safetensors holds values in decoder\.\S+ that are not finite; expected"
    ):
        load(tmp_path)


def test_half_holds_the_largest_and_the_smallest(tmp_path):
    model = Discovery(SMALL)
    with torch.no_grad():
        model.decoder.layers[-2].weight.view(-1)[:3] = torch.tensor([65504.0, -65504.0, 1e-12])
    save(model, tmp_path, half=True)
    assert load(tmp_path).decoder.layers[-2].weight.view(-1)[:3].tolist() == [65504.0, -65504.0, 0.0]


def test_whole_numbers_are_not_taken_for_weights(tmp_path):
    save(trained(NORMED), tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    count = next(name for name in tensors if name.endswith("num_batches_tracked"))
    for name, dtype in (("encoder.stem.0.weight", torch.int8), (count, torch.float16)):
        save_file(tensors | {name: tensors[name].to(dtype)}, file)
        with pytest.raises(ValueError, match=rf"does not fit its config.json: {name} is of type {dtype}, expected"):
            load(tmp_path)


@pytest.mark.parametrize("name", NAMES)
def test_shipped_names_need_no_network(name, no_network):
    tensors = load_file(SHIPPED / name / "model.safetensors")
    kind = type(load(name))
    for model in (load(name), kind.from_pretrained(name)):
        assert_holds(model, tensors)
    assert kind.from_pretrained(name).config == load(name).config


@pytest.mark.parametrize("name", NAMES)
def test_shipped_weights_are_small_and_have_a_card(name):
    """What it learned from, how long, how well it does, and what it is not for."""
    assert (SHIPPED / name / "model.safetensors").stat().st_size <= 4e6
    card = (SHIPPED / name / "README.md").read_text()
    head, _, rest = card.removeprefix("---\n").partition("---\n")
    assert "license: apache-2.0" in head and "library_name: cutslots" in head
    for part in ("Learned from", "Scores", "Limits", f'from_pretrained("{name}")'):
        assert part in rest, part
    assert re.search(r"seed \d", rest) and re.search(r"[\d,]+ steps", rest) and re.search(r"20\d\d", rest)


def test_half_is_shipped_as_well(shipped, no_network):
    tensors = load_file(shipped / "textured" / "model.safetensors")
    assert {v.dtype for v in tensors.values()} == {torch.float16}
    for model in (load("textured"), Discovery.from_pretrained("textured")):
        assert_holds(model, tensors)
    model = Discovery.from_pretrained("textured", map_location="cpu", strict=True, local_files_only=True)
    assert_holds(model, tensors)


def test_a_shipped_model_can_be_saved_as_any_other(shipped, tmp_path):
    model = Discovery.from_pretrained("textured")
    model.save_pretrained(tmp_path / "mine")
    assert json.loads((tmp_path / "mine" / "config.json").read_text())["size"] == 16
    assert_holds(load(tmp_path / "mine"), model.state_dict())


def test_a_folder_of_ones_own_goes_before_a_shipped_name(shipped, tmp_path):
    own = Discovery(SMALL)
    (tmp_path / "textured").mkdir()
    save(own, tmp_path / "textured")
    for model in (load("textured"), Discovery.from_pretrained("textured")):
        assert_holds(model, own.state_dict())


@pytest.mark.parametrize("name", ["plian", "runs/of/mine", "/nowhere", "./mine"])
def test_a_misspelt_name_is_not_asked_of_the_hub(no_network, name):
    with pytest.raises(ValueError, match=r"\Apretrained_model_name_or_path is [^\n]*\Z") as refused:
        Discovery.from_pretrained(name)
    for part in (repr(name), f"a name ({', '.join(NAMES)})", "a folder of config.json", "OWNER/NAME"):
        assert part in str(refused.value)


def test_what_is_here_is_not_asked_of_the_hub(no_network, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine" / "empty").mkdir(parents=True)
    (tmp_path / "mine" / "photo.png").touch()
    for name in ("mine/empty", "mine/photo.png"):
        with pytest.raises(ValueError, match=rf"\Apretrained_model_name_or_path is '{name}'; expected [^\n]*\Z"):
            Discovery.from_pretrained(name)


def test_other_names_are_the_hubs(shipped, monkeypatch):
    folder, asked, name = shipped / "textured", [], "someone/textured"

    def download(repo_id, filename, **options):
        asked.append((repo_id, filename, options["revision"]))
        return str(folder / filename)

    monkeypatch.setattr(huggingface_hub.hub_mixin, "hf_hub_download", download)
    model = Discovery.from_pretrained(name, revision="v2")
    assert asked == [(name, "config.json", "v2"), (name, "model.safetensors", "v2")]
    assert_holds(model, load_file(folder / "model.safetensors"))


def test_names_of_another_kind_of_model_are_refused(shipped, no_network):
    for kind, name in ((Discovery, "textured"), (PairDiscovery, "pairs"), (VolumeDiscovery, "volumes")):
        assert type(kind.from_pretrained(name)) is type(load(name)) is kind
    wrong = {
        (PairDiscovery, "textured"): "frames is 1; expected 2",
        (PairDiscovery, "volumes"): "volume is set; expected 2 frames",
        (VolumeDiscovery, "textured"): "volume is not set; expected",
        (VolumeDiscovery, "pairs"): "volume is not set; expected",
        (Discovery, "pairs"): "frames is 2; expected 1",
        (Discovery, "volumes"): "frames is 2; expected 1",
    }
    for (kind, name), reason in wrong.items():
        with pytest.raises(ValueError, match=rf"\A{reason}[^\n]* \(see cutslots\.load\)\Z"):
            kind.from_pretrained(name)


def test_predict_starts_with_little(tmp_path):
    """Threads that sleep while they wait, unless the user has said otherwise; and no library it has no need of."""
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    code = """
import os, sys, cutslots.cli
os.environ.pop("OMP_WAIT_POLICY", None)
sys.argv = ["cutslots", "predict", "tiny", sys.argv[1], "-o", sys.argv[2], "--device", "cpu"]
cutslots.cli.main()
assert os.environ["OMP_WAIT_POLICY"] == "passive"
unneeded = {"scipy.optimize", "matplotlib", "lightning_fabric", "cholespy", "tensorboardX", "av"} & set(sys.modules)
assert not unneeded, unneeded
"""
    command = [sys.executable, "-c", code, str(tmp_path / "a.png"), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and (tmp_path / "out" / "a" / "labels.png").exists(), done.stderr
