"""Numbers of configs are bounded, and outputs that are not finite are refused."""

import dataclasses
import itertools
import math
import shutil
import typing

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from cutslots.inference.predictor import predict_image
from cutslots.models import checkpoints
from cutslots.models.discovery import build
from cutslots.models.pair_discovery import PairDiscovery
from cutslots.models.tracker import Tracker, track_clip
from cutslots.modules.partition import CutPartitionConfig, KPartition, MinCutPartitionConfig, SoftmaxPartitionConfig
from cutslots.programs.graph_cut import GraphCut
from cutslots.programs.grid_cut import GridCut
from cutslots.programs.matching import Matching, match_slots
from cutslots.registry import REGISTRIES, Range, options
from cutslots.training.config import TrainConfig
from tests.models.configs import CONFIGS, IMAGES, KINDS, random_input, run_seeded, small_model
from tests.small_runs import sentence

CONFIG_CLASSES = {
    f"{registry.kind} {part.name}": part.config
    for registry in REGISTRIES
    for part in registry.parts.values()
    if part.plugin is None and part.config.__module__.startswith("cutslots.")
} | {"training": TrainConfig}


def unbounded(hint, bounds=None):
    """Return whether an annotation has an integer or a float without finite bounds."""
    origin, choices = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        given = next((m for m in choices[1:] if isinstance(m, Range)), bounds)
        return unbounded(choices[0], given)
    if origin is typing.Literal:
        return False
    if choices:
        return any(unbounded(choice, bounds) for choice in choices)
    return hint in (int, float) and (bounds is None or not math.isfinite(bounds.max - bounds.min))


@pytest.mark.parametrize("config", CONFIG_CLASSES.values(), ids=CONFIG_CLASSES)
def test_every_number_of_a_config_has_bounds(config):
    assert not [name for name, hint in options(config).items() if unbounded(hint)]


def test_unbounded_numbers_are_found():
    numbers = (int, float, float | None, tuple[int, ...], typing.Annotated[float, Range(0)])
    assert all(map(unbounded, numbers))
    bounded = (bool, str, typing.Literal[1], typing.Annotated[tuple[int, int] | None, Range(0, 1)])
    assert not any(map(unbounded, bounded))


POSITIVE = "expected a number from 1e-06 to 1,000,000"
CONSTRUCTORS = {
    "GridCut gamma": lambda value: GridCut((4, 4), gamma=value),
    "GridCut reach": lambda value: GridCut((4, 4), reach=value),
    "GraphCut gamma": lambda value: GraphCut([[0, 1]], 2, gamma=value),
    "Matching gamma": lambda value: Matching(2, 2, gamma=value),
    "match_slots temperature": lambda value: match_slots(torch.ones(2, 3), torch.ones(2, 3), temperature=value),
    "KPartition temperature": lambda value: KPartition(2, 3, (4, 4), temperature=value),
    "KPartition background_temperature": lambda value: KPartition(2, 3, (4, 4), background_temperature=value),
    "KPartition combined_temperature": lambda value: KPartition(2, 3, (4, 4), combined_temperature=value),
    "PairDiscovery match_gamma": lambda value: pairs(match_gamma=value),
    "PairDiscovery match_temperature": lambda value: pairs(match_temperature=value),
}


def pairs(**options):
    model = build(IMAGES)
    return PairDiscovery(model.encoder, model.slots, model.decoder, **options)


@pytest.mark.parametrize("value", [1e-300, 9e-7, 1.1e6, 1e300, 0, -1.0, math.nan, math.inf])
@pytest.mark.parametrize("name", CONSTRUCTORS)
def test_constructors_have_the_same_bounds(name, value):
    with pytest.raises(ValueError, match=rf"^{name.split()[1]} is {str(value).replace('+', '.')}; {POSITIVE}$"):
        CONSTRUCTORS[name](value)


@pytest.mark.parametrize("values", list(itertools.product([1e-6, 1e6], repeat=4)))
@pytest.mark.parametrize("kind", [CutPartitionConfig, MinCutPartitionConfig, SoftmaxPartitionConfig])
def test_outputs_are_finite_at_all_bounds(values, kind):
    names = ("temperature", "background_temperature", "combined_temperature", "gamma")
    given = {name: value for name, value in zip(names, values, strict=True) if name in options(kind)}
    cut = {"reach": values[0], "anchor": 1.0} if kind is CutPartitionConfig else {}
    partition = kind(**given, **cut, edge_net_channels=8)
    config = dataclasses.replace(IMAGES, slots=dataclasses.replace(IMAGES.slots, partition=partition))
    assert all(x.isfinite().all() for x in run_seeded(build(config).eval(), random_input(config)))


@pytest.mark.parametrize("values", list(itertools.product([1e-6, 1e6], repeat=2)))
def test_pairs_are_finite_at_all_bounds(values):
    config = dataclasses.replace(CONFIGS["pairs"], match_gamma=values[0], match_temperature=values[1])
    assert all(x.isfinite().all() for x in run_seeded(build(config).eval(), random_input(config)))


@pytest.fixture
def overflowing(tmp_path):
    """A checkpoint of finite weights, the last of which are so large that float32 overflows."""
    folder = shutil.copytree(checkpoints.SHIPPED / "tiny-64", tmp_path / "overflowing")
    tensors = load_file(folder / "model.safetensors")
    last = max(name for name in tensors if name.startswith("decoder.layers"))
    tensors = {name: value.float() for name, value in tensors.items()}
    tensors[last.rpartition(".")[0] + ".weight"].fill_(3e38)
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture
def images(tmp_path):
    (tmp_path / "images").mkdir()
    for i in range(2):
        Image.new("RGB", (70, 64), (40 * i, 90, 200)).save(tmp_path / "images" / f"{i}.png")
    return tmp_path / "images"


@pytest.mark.parametrize("command", ["predict", "track", "evaluate"])
def test_commands_name_the_checkpoint(command, overflowing, images, tmp_path, monkeypatch):
    words = [command, str(overflowing), str(images), "-o", str(tmp_path / "out")]
    if command == "evaluate":
        words = [command, str(overflowing), "--num-images", "2", "--out", str(tmp_path / "out"), "--accelerator", "cpu"]
    said = sentence(monkeypatch, words)
    assert said == (
        f"cutslots: {overflowing / 'model.safetensors'} returns NaN or infinity in its masks; "
        "expected the weights and the config.json of a good run"
    )
    written = [path.name for path in (tmp_path / "out").rglob("*.json")] if (tmp_path / "out").exists() else []
    assert not {"coco.json", "tracks.json", "results.json"} & set(written)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_weights_that_are_not_finite(value, tmp_path):
    folder = shutil.copytree(checkpoints.SHIPPED / "tiny-64", tmp_path / "weights")
    tensors = load_file(folder / "model.safetensors")
    for name in tensors:
        changed = {key: tensor.clone() for key, tensor in tensors.items()}
        if not changed[name].is_floating_point():
            continue
        changed[name].view(-1)[-1] = value
        save_file(changed, folder / "model.safetensors")
        with pytest.raises(ValueError, match=rf"holds values in {name} that are not finite; expected the weights of"):
            checkpoints.load(folder)


@pytest.mark.parametrize("kind", KINDS)
def test_every_tracker_refuses(kind):
    model = small_model(kind)
    next(model.decoder.parameters()).data.fill_(math.nan)
    for association in model.associations:
        with pytest.raises(ValueError, match=r"^the model returns NaN or infinity in its masks; expected"):
            track_clip(model, torch.rand(1, 3, 3, 16, 16), association)
        tracker = Tracker(model, association)
        with pytest.raises(ValueError, match=r"^the model returns NaN or infinity in its masks; expected"):
            tracker(torch.rand(1, 3, 16, 16))


@pytest.mark.parametrize("association", ["area", "hungarian", "learned"])
def test_slots_that_are_not_finite(association):
    model = small_model("pairs")
    next(model.encoder.parameters()).data.fill_(math.nan)
    with pytest.raises(ValueError, match=r"^the model returns NaN or infinity in its slots; expected"):
        Tracker(model, association)(torch.rand(1, 3, 16, 16))


def test_images_in_python():
    model = small_model("images")
    list(model.decoder.parameters())[-1].data[:3] = math.inf  # colors alone
    with pytest.raises(ValueError, match=r"^the model returns NaN or infinity in its reconstruction; expected"):
        predict_image(model, Image.new("RGB", (20, 10)))


def test_checkpoint_is_recorded():
    assert checkpoints.load("tiny-64").checkpoint == str(checkpoints.SHIPPED / "tiny-64" / "model.safetensors")
    assert build(IMAGES).checkpoint is None
