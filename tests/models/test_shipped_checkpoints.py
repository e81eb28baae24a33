"""Checkpoints that come with the package, and `from_pretrained`."""

import json
import re
import socket
import subprocess
import sys

import huggingface_hub
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from cutslots.evaluation.metrics import image_metrics
from cutslots.models import checkpoints
from cutslots.models.checkpoints import SHIPPED, checkpoint_names, config_to_dict, load, save
from cutslots.models.discovery import Discovery, build
from cutslots.models.pair_discovery import PairDiscovery
from cutslots.models.spacetime_discovery import SpacetimeDiscovery
from cutslots.scenes import Scenes
from tests.models.configs import PAIRS, SMALL, SPACETIME, TINY
from tests.models.test_checkpoints import assert_holds

NAMES = [
    "moving-128",
    "moving-paper-128",
    "plain-128",
    "plain-paper-128",
    "textured-128",
    "textured-paper-128",
    "tiny-64",
]


@pytest.fixture
def no_network(monkeypatch):
    """Fail whenever the network is used, although the Hub's library is not told to be offline."""

    def refuse(*args, **kwargs):
        raise AssertionError("the network was used")

    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    for name in ("connect", "connect_ex", "sendto"):
        monkeypatch.setattr(socket.socket, name, refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.fixture
def shipped(tmp_path, monkeypatch):
    """A package that ships a checkpoint of each kind in half precision."""
    home = tmp_path / "weights"
    for name, config in {"textured-128": SMALL, "pairs": PAIRS, "spacetime": SPACETIME}.items():
        (home / name).mkdir(parents=True)
        save(build(config), home / name, half=True)
    monkeypatch.setattr(checkpoints, "SHIPPED", home)
    monkeypatch.chdir(tmp_path)
    return home


def test_names():
    assert checkpoint_names() == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_shipped_checkpoints_need_no_network(name, no_network):
    tensors = load_file(SHIPPED / name / "model.safetensors")
    for model in (load(name), Discovery.from_pretrained(name)):
        assert type(model) is (PairDiscovery if name.startswith("moving") else Discovery)
        assert_holds(model, tensors)
    assert Discovery.from_pretrained(name).config == load(name).config
    size = int(name.split("-")[-1])
    assert load(name).image_size == (size, size)


@pytest.mark.parametrize("name", NAMES)
def test_config_json_is_complete(name):
    """Every option is written out, so that other defaults would not change a checkpoint."""
    assert json.loads((SHIPPED / name / "config.json").read_text()) == config_to_dict(load(name).config)


@pytest.mark.parametrize("name", NAMES)
def test_shipped_checkpoints_are_small_and_have_a_card(name):
    assert (SHIPPED / name / "model.safetensors").stat().st_size <= 4e6
    card = (SHIPPED / name / "README.md").read_text()
    head, _, text = card.removeprefix("---\n").partition("---\n")
    assert "license: apache-2.0" in head and "library_name: cutslots" in head
    for section in ("Training data", "Metrics", "Limitations", f'from_pretrained("{name}")', f"# {name}\n"):
        assert section in text, section
    assert re.search(r"[Ss]eed \d", text) and re.search(r"[\d,]+ steps", text) and re.search(r"20\d\d", text)


def test_the_tiny_checkpoint_discovers_objects():
    model = load("tiny-64")
    assert model.config == TINY and not model.training
    image, truth = Scenes("plain", "test", 64, num_objects=(2, 5)).get_batch(range(8))
    assert image_metrics(truth, model(image).masks.argmax(1))["ari_fg"].mean() > 0.4


def test_half_precision_may_be_shipped(shipped, no_network):
    tensors = load_file(shipped / "textured-128" / "model.safetensors")
    assert {v.dtype for v in tensors.values()} == {torch.float16}
    for model in (load("textured-128"), Discovery.from_pretrained("textured-128")):
        assert_holds(model, tensors)
    model = Discovery.from_pretrained("textured-128", device="cpu", local_files_only=True)
    assert_holds(model, tensors)


def test_a_shipped_model_can_be_saved_again(shipped, tmp_path):
    model = Discovery.from_pretrained("textured-128")
    model.save_pretrained(tmp_path / "mine")
    assert json.loads((tmp_path / "mine" / "config.json").read_text())["image_size"] == [16, 16]
    assert_holds(load(tmp_path / "mine"), model.state_dict())


def test_a_folder_has_precedence_over_a_name(shipped, tmp_path):
    own = build(SMALL)
    (tmp_path / "textured-128").mkdir()
    save(own, tmp_path / "textured-128")
    for model in (load("textured-128"), Discovery.from_pretrained("textured-128")):
        assert_holds(model, own.state_dict())


def test_a_folder_without_a_checkpoint_has_no_precedence(shipped, tmp_path):
    (tmp_path / "textured-128").mkdir()
    assert_holds(load("textured-128"), load_file(shipped / "textured-128" / "model.safetensors"))


# ----------------------------------------------------------------------------------------------------- from_pretrained


@pytest.mark.parametrize("name", ["plian-128", "runs/of/mine", "/nowhere", "./mine", "tiny"])
def test_a_misspelt_name_is_not_looked_up_on_the_hub(no_network, name):
    with pytest.raises(ValueError, match=r"\Aname_or_path is [^\n]*\Z") as refused:
        Discovery.from_pretrained(name)
    for part in (repr(name), f"a name ({', '.join(NAMES)})", "a folder with config.json", "OWNER/NAME"):
        assert part in str(refused.value)


def test_a_local_path_is_not_looked_up_on_the_hub(no_network, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine" / "empty").mkdir(parents=True)
    (tmp_path / "mine" / "photo.png").touch()
    for name in ("mine/empty", "mine/photo.png"):
        with pytest.raises(ValueError, match=rf"\Aname_or_path is '{name}'; expected [^\n]*\Z"):
            Discovery.from_pretrained(name)


def test_other_names_are_downloaded_from_the_hub(shipped, monkeypatch):
    folder, asked, name = shipped / "textured-128", [], "someone/textured-128"

    def download(repo_id, filename, **options):
        asked.append((repo_id, filename, options["revision"]))
        return str(folder / filename)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    model = Discovery.from_pretrained(name, revision="v2")
    assert asked == [(name, "config.json", "v2"), (name, "model.safetensors", "v2")]
    assert_holds(model, load_file(folder / "model.safetensors"))


def test_another_kind_of_model_is_refused(shipped, no_network):
    kinds = {"textured-128": Discovery, "pairs": PairDiscovery, "spacetime": SpacetimeDiscovery}
    for name, kind in kinds.items():
        assert type(kind.from_pretrained(name)) is type(load(name)) is type(Discovery.from_pretrained(name)) is kind
        for other in {PairDiscovery, SpacetimeDiscovery} - {kind}:
            message = rf"\A{name} is a {kind.__name__}; expected a {other.__name__} \(see cutslots\.load\)\Z"
            with pytest.raises(ValueError, match=message):
                other.from_pretrained(name)


def test_predict_imports_few_libraries(tmp_path):
    """Idle OpenMP threads sleep, unless the user says otherwise, and libraries that are not needed stay unloaded."""
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    code = """
import os, sys, cutslots.cli
os.environ.pop("OMP_WAIT_POLICY", None)
sys.argv = ["cutslots", "predict", "tiny-64", sys.argv[1], "-o", sys.argv[2], "--device", "cpu"]
cutslots.cli.main()
assert os.environ["OMP_WAIT_POLICY"] == "passive"
unneeded = {"scipy.optimize", "matplotlib", "lightning_fabric", "cholespy", "tensorboardX", "av"} & set(sys.modules)
assert not unneeded, unneeded
"""
    command = [sys.executable, "-c", code, str(tmp_path / "a.png"), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and (tmp_path / "out" / "a" / "labels.png").exists(), done.stderr
