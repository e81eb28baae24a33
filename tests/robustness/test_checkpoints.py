"""Damaged configurations and checkpoints."""

import json
import os
import shutil

import numpy as np
import pytest
from PIL import Image

from cutslots.models.checkpoints import SHIPPED, config_to_dict, read_config
from cutslots.training.presets import PRESETS
from tests.modules.small_vits import make_vit
from tests.robustness.checkpoints import (
    MAX_GROWTH,
    peak_memory,
    refusal,
    try_damaged_files,
    try_invalid_values,
    with_value,
)
from tests.small_runs import sentence


@pytest.fixture
def folder(tmp_path):
    return shutil.copytree(SHIPPED / "tiny-64", tmp_path / "weights")


def configure(folder, changes):
    """Write the config of tiny-64 with other values, by dotted keys."""
    values = json.loads((SHIPPED / "tiny-64" / "config.json").read_text())
    for key, value in changes.items():
        values = with_value(values, key, value)
    (folder / "config.json").write_text(json.dumps(values))


@pytest.mark.parametrize(
    "values, said",
    [
        ({"slots.num_slots": 10**9}, "num_slots is 1000000000; expected an integer from 1 to 255"),
        ({"slots.num_slots": "6"}, "num_slots is '6'; expected an integer from 1 to 255"),
        (
            {"image_size": [2**30, 64]},
            "image_size is (1073741824, 64); expected 2 values, each an integer from 8 to 2,048",
        ),
        ({"image_size": [64.0, 64]}, "image_size is (64.0, 64); expected 2 values, each an integer from 8 to 2,048"),
        ({"image_size": [True, 64]}, "image_size is (True, 64); expected 2 values, each an integer from 8 to 2,048"),
        ({"image_size": 64}, "image_size is 64; expected 2 values, each an integer from 8 to 2,048"),
        (
            {"decoder": {"name": "spatial-broadcast", "extra_layers": 10**9}},
            "extra_layers is 1000000000; expected an integer from 0 to 64",
        ),
        ({"encoder.kernel_sizes": 5}, "kernel_sizes is 5; expected at most 64 values, each an integer from 1 to 255"),
        ({"encoder.kernel_sizes": "555"}, "kernel_sizes is '555'; expected at most 64 values, each an integer from 1"),
        ({"slots.partition.gamma": float("nan")}, "gamma is nan; expected a number from 1e-06 to 1,000,000"),
        ({"slots.partition.gamma": 1e-300}, "gamma is 1e-300; expected a number from 1e-06 to 1,000,000"),
        ({"slots.partition.temperature": 1e-300}, "temperature is 1e-300; expected a number from 1e-06 to 1,000,000"),
        ({"slots.partition.anchor": 1.5}, "anchor is 1.5; expected a number from 0 to 1"),
        ({"slots.partition.gamma": None}, "gamma is None; expected a number from 1e-06 to 1,000,000"),
        ({"slots.partition.reach": float("inf")}, "reach is inf; expected a number from 1e-06 to 1,000,000 or none"),
        ({"slots.partition.signed_weights": "no"}, "signed_weights is 'no'; expected true or false"),
        ({"encoder.channels": 60_000}, "the model would have 6.5e+10 parameters; expected at most 1e+09"),
        (
            {"encoder.channels": 30_000, "encoder.kernel_sizes": [255] * 3},
            "the model would have 1.2e+14 parameters; expected at most 1e+09",
        ),
        ({"slots.mlp_dim": 65_536, "slots.slot_dim": 60_000}, "parameters; expected at most 1e+09"),
        (
            {"name": "spacetime-discovery", "num_frames": 65_536},
            "num_frames is 65536; expected an integer from 2 to 1,024",
        ),
    ],
)
def test_invalid_values(folder, values, said):
    configure(folder, values)
    before = peak_memory()
    assert said in refusal(folder)
    assert peak_memory() - before < MAX_GROWTH


def test_any_key_with_any_invalid_value(tmp_path):
    results = list(try_invalid_values(tmp_path / "checkpoint"))
    assert len(results) > 1000 and not any(results), [x for x in results if x]


@pytest.mark.parametrize("name", PRESETS)
def test_limits_are_far_above_the_presets(tmp_path, name):
    """A model four times as wide as any preset is accepted."""
    values = config_to_dict(PRESETS[name].model)
    keys = ["slots.mlp_dim", "slots.slot_dim", "slots.partition.edge_net_channels"]
    if values["encoder"]["name"] == "vit":  # its width is that of its checkpoint
        make_vit(tmp_path / "vit")
        values = with_value(values, "encoder.checkpoint", str(tmp_path / "vit"))
    else:
        keys.append("encoder.channels")
    for key in keys:
        inner = values
        for part in key.split("."):
            inner = inner[part]
        values = with_value(values, key, 4 * inner)
    (tmp_path / "config.json").write_text(json.dumps(values))
    config, preset = read_config(tmp_path / "config.json"), PRESETS[name].model
    assert config.slots.slot_dim == 4 * preset.slots.slot_dim
    assert getattr(config.encoder, "channels", 0) == 4 * getattr(preset.encoder, "channels", 0)


@pytest.mark.parametrize("content", [b"[" * 100_000, b'{"a":' * 100_000, b"{" + b" " * 2**21 + b"}", b"1" * 10_000])
def test_configuration_that_is_not_json(folder, content):
    (folder / "config.json").write_bytes(content)
    assert str(folder / "config.json") in refusal(folder)


def test_huge_configuration_is_not_read(folder):
    os.truncate(folder / "config.json", 2**40)
    assert "config.json has 1,099,511,627,776 bytes; expected at most 1,048,576" in refusal(folder)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_configuration_that_is_not_a_file(folder, make):
    (folder / "config.json").unlink()
    make(folder / "config.json")
    assert f"there is no {folder / 'config.json'}" in refusal(folder)


def test_randomly_damaged_files(tmp_path):
    assert not [x for x in try_damaged_files(tmp_path / "checkpoint", 150, np.random.default_rng(1)) if x]


def test_commands_print_one_sentence(folder, tmp_path, monkeypatch):
    configure(folder, {"slots.num_slots": 10**9})
    (tmp_path / "images").mkdir()
    Image.new("RGB", (9, 9)).save(tmp_path / "images" / "a.png")
    for command in ("predict", "track"):
        words = [command, str(folder), str(tmp_path / "images"), "-o", str(tmp_path / "out")]
        said = f"{folder / 'config.json'} is not the config of a model: num_slots is 1000000000; expected"
        assert sentence(monkeypatch, words).startswith(f"cutslots: {said}") and not (tmp_path / "out").exists()


def test_huge_batch_size(tmp_path, monkeypatch):
    said = sentence(monkeypatch, ["train", "tiny", "--batch-size", str(10**9), "--out", str(tmp_path / "run")])
    assert (
        said == "cutslots: batch_size is 1000000000; expected an integer from 1 to 65,536"
        and not (tmp_path / "run").exists()
    )
