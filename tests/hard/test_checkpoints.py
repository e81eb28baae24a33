"""Configurations and weights that were meddled with; see tests/test_model.py for those that only lack something."""

import dataclasses
import json
import os
import shutil

import numpy as np
import pytest
from PIL import Image

from cutslots.model import SHIPPED
from cutslots.presets import PRESETS
from tests.hard.checkpoints import ROOM, absurd, peak, refusal, spoilt
from tests.small_runs import sentence


@pytest.fixture
def folder(tmp_path):
    return shutil.copytree(SHIPPED / "tiny", tmp_path / "weights")


def configured(folder, **values):
    file = SHIPPED / "tiny" / "config.json"
    (folder / "config.json").write_text(json.dumps(json.loads(file.read_text()) | values))


@pytest.mark.parametrize(
    "values, said",
    [
        ({"slots": 10**9}, "slots is 1000000000; expected at least 1 and at most 255"),
        ({"size": 2**30}, "size is 1073741824; expected at least 1 and at most 2,048"),
        ({"size": 64.0}, "size is 64.0; expected at least 1 and at most 2,048"),
        ({"size": True}, "size is True; expected at least 1 and at most 2,048"),
        ({"slots": "6"}, "slots is '6'; expected at least 1 and at most 255"),
        ({"decoder_extra": 10**9}, "decoder_extra is 1000000000; expected at least 0 and at most 64"),
        ({"encoder_kernels": 5}, "encoder_kernels is 5; expected at most 64 whole numbers from 1 to 65,536"),
        ({"encoder_kernels": "555"}, "encoder_kernels is '555'; expected at most 64 whole numbers"),
        ({"gamma": float("nan")}, "gamma is nan; expected a number of at most 65,536"),
        ({"gamma": None}, "gamma is None; expected a number of at most 65,536"),
        ({"reach": float("inf")}, "reach is inf; expected a number of at most 65,536"),
        ({"signed": "no"}, "signed is 'no'; expected true or false"),
        ({"encoder_maps": 60_000}, "encoder_maps is 60000, with which the model would have 4.1e+11 weights; expected"),
        ({"encoder_kernels": [65_535] * 3}, "encoder_maps is 32, with which the model would have 2.6e+13 weights"),
        ({"hidden": 65_536, "slot_dim": 60_000}, "weights; expected at most 1e+09"),
        (
            {"frames": 65_536, "volume": True},
            "frames is 65536 and size 64; expected clips of at most 67,108,864 pixels",
        ),
    ],
)
def test_absurd_numbers(folder, values, said):
    configured(folder, **values)
    before = peak()
    assert said in refusal(folder)
    assert peak() - before < ROOM


def test_every_number_may_be_absurd(tmp_path):
    results = list(absurd(tmp_path / "weights"))
    assert len(results) > 1000 and not any(results), [x for x in results if x]


def test_presets_are_far_from_absurd():
    """Four times as wide a model as any preset is no reason to complain."""
    for preset in PRESETS.values():
        wide = {name: 4 * getattr(preset.model, name) for name in ("encoder_maps", "weight_maps", "hidden", "slot_dim")}
        dataclasses.replace(preset.model, **wide, decoder_maps=tuple(4 * n for n in preset.model.decoder_maps))


@pytest.mark.parametrize("content", [b"[" * 100_000, b'{"a":' * 100_000, b"{" + b" " * 2**21 + b"}", b"1" * 10_000])
def test_a_configuration_that_is_none(folder, content):
    (folder / "config.json").write_bytes(content)
    assert str(folder / "config.json") in refusal(folder)


def test_a_configuration_that_is_huge_is_not_read(folder):
    os.truncate(folder / "config.json", 2**40)
    assert "config.json has 1,099,511,627,776 bytes; expected a configuration of at most 1,048,576" in refusal(folder)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_a_configuration_that_is_no_file(folder, make):
    (folder / "config.json").unlink()
    make(folder / "config.json")
    assert f"there is no {folder / 'config.json'}" in refusal(folder)


def test_files_spoilt_at_random(tmp_path):
    assert not [x for x in spoilt(tmp_path / "weights", 150, np.random.default_rng(1)) if x]


def test_the_commands(folder, tmp_path, monkeypatch):
    configured(folder, slots=10**9)
    (tmp_path / "pictures").mkdir()
    Image.new("RGB", (9, 9)).save(tmp_path / "pictures" / "a.png")
    for command in ("predict", "track"):
        words = [command, str(folder), str(tmp_path / "pictures"), "-o", str(tmp_path / "out")]
        said = f"{folder / 'config.json'} is not the configuration of a Discovery model: slots is 1000000000; expected"
        assert sentence(monkeypatch, words).startswith(f"cutslots: {said}") and not (tmp_path / "out").exists()


def test_batches_that_nothing_could_hold(tmp_path, monkeypatch):
    said = sentence(monkeypatch, ["train", "tiny", "--batch", str(10**9), "--out", str(tmp_path / "run")])
    assert said == "cutslots: batch is 1000000000; expected at most 65,536" and not (tmp_path / "run").exists()
