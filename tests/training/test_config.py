"""The options of a run: defaults, ranges, JSON."""

import dataclasses
from pathlib import Path

import pytest

from cutslots.modules.partition import CutPartitionConfig
from cutslots.training.config import TrainConfig
from cutslots.training.presets import PRESETS

TINY = PRESETS["tiny"]


def test_defaults():
    """What a preset does not say: all images, one process, no augmentation, and a checkpoint every minute."""
    defaults = {
        field.name: field.default
        for field in dataclasses.fields(TrainConfig)
        if field.default is not dataclasses.MISSING
    }
    expected = {
        "num_images": None,
        "max_frame_gap": 1,
        "mix_data": None,
        "mix_fraction": 0.25,
        "teacher": None,
        "label_pixel_sigma": 0.5,
        "label_merge_threshold": 0.25,
        "label_background_threshold": 0.8,
        "label_dilation": 0,
        "camouflage": 0.0,
        "horizontal_flips": False,
        "min_crop_area": 1.0,
        "brightness_jitter": 0.0,
        "contrast_jitter": 0.0,
        "saturation_jitter": 0.0,
        "hue_jitter": 0.0,
        "blur_probability": 0.0,
        "noise_sigma": 0.0,
        "init_from": None,
        "seed": 0,
        "max_minutes": None,
        "out": None,
        "overwrite": False,
        "checkpoint_minutes": 1.0,
        "cache_dir": None,
        "plugins": (),
        "accelerator": "auto",
        "devices": 1,
        "num_nodes": 1,
        "precision": "auto",
        "compile": "auto",
        "cuda_graphs": "auto",
    }
    assert defaults == expected and defaults["horizontal_flips"] is defaults["overwrite"] is False


@pytest.mark.parametrize(
    "option, low, high",
    [
        ("batch_size", 1, 65_536),
        ("max_steps", 1, 10**9),
        ("warmup_steps", 0, 10**9),
        ("lr_decay_steps", 1, 10**9),
        ("eval_every", 1, 10**9),
        ("num_eval_images", 1, 10**9),
        ("num_images", 1, 10**9),
        ("max_frame_gap", 1, 10_000),
        ("seed", 0, 4_294_967_295),
        ("devices", 1, 65_536),
        ("num_nodes", 1, 65_536),
    ],
)
def test_ranges_of_integers(option, low, high):
    for value in (low, high):
        dataclasses.replace(TINY, **{option: value}).validate()
    for value in (low - 1, high + 1):
        with pytest.raises(ValueError, match=rf"^{option} is {value}; expected an integer from {low:,} to {high:,}"):
            dataclasses.replace(TINY, **{option: value}).validate()


@pytest.mark.parametrize(
    "option, low, high",
    [
        ("lr", 1e-12, 65_536),
        ("lr_decay", 1e-12, 65_536),
        ("grad_clip", 0, 1e12),
        ("max_minutes", 0, 10**6),
        ("checkpoint_minutes", 0, 10**6),
        ("mix_fraction", 0, 1),
        ("min_crop_area", 0.01, 1),
        ("brightness_jitter", 0, 1),
        ("contrast_jitter", 0, 1),
        ("saturation_jitter", 0, 1),
        ("hue_jitter", 0, 0.5),
        ("blur_probability", 0, 1),
        ("noise_sigma", 0, 1),
    ],
)
def test_ranges_of_numbers(option, low, high):
    for value in (float(low), float(high)):
        dataclasses.replace(TINY, **{option: value}).validate()
    for value in (low - 1e-13, high * (1 + 1e-9)):
        with pytest.raises(ValueError, match=rf"^{option} is .*; expected a number from {low:,} to {high:,}"):
            dataclasses.replace(TINY, **{option: value}).validate()


@pytest.mark.parametrize(
    "option, choices",
    [
        ("accelerator", ["auto", "cpu", "cuda", "mps"]),
        ("precision", ["auto", "32-true", "bf16-mixed"]),
        ("compile", ["auto", "on", "off"]),
    ],
)
def test_choices(option, choices):
    for choice in choices:
        dataclasses.replace(TINY, **{option: choice}).validate()
    with pytest.raises(ValueError, match=rf"^{option} is 'tpu'; expected one of {', '.join(choices)}$"):
        dataclasses.replace(TINY, **{option: "tpu"}).validate()


def test_options_of_parts_are_checked_and_named_by_their_path():
    partition = CutPartitionConfig()
    object.__setattr__(partition, "gamma", -1.0)
    model = dataclasses.replace(TINY.model, slots=dataclasses.replace(TINY.model.slots, partition=partition))
    with pytest.raises(ValueError, match=r"^slots\.partition\.gamma is -1\.0; "):
        dataclasses.replace(TINY, model=model).validate()
    loss = dataclasses.replace(TINY.loss)
    object.__setattr__(loss, "blur", -1.0)
    with pytest.raises(ValueError, match=r"^loss\.blur is -1\.0; "):
        dataclasses.replace(TINY, loss=loss).validate()


def test_folders_and_plugins_are_not_checked_as_options():
    """Their types have no range; a path that cannot be used is an error of the file system."""
    dataclasses.replace(TINY, out=Path("runs"), cache_dir=Path("cache"), plugins=("parts.py",)).validate()


def test_json_has_text_for_paths_and_the_names_of_parts():
    config = dataclasses.replace(TINY, out=Path("runs/one"), cache_dir=Path("cache"))
    values = config.to_dict()
    assert (values["out"], values["cache_dir"], values["plugins"]) == ("runs/one", "cache", [])
    assert type(values["out"]) is type(values["cache_dir"]) is str
    assert [values[part]["name"] for part in ("model", "data", "loss")] == ["discovery", "plain", "mse"]
    assert list(values) == [field.name for field in dataclasses.fields(TrainConfig)]
    assert (TINY.to_dict()["out"], TINY.to_dict()["cache_dir"]) == (None, None)


def test_a_config_is_read_from_its_json():
    config = dataclasses.replace(TINY, out=Path("runs/one"), cache_dir=Path("cache"), seed=3)
    read = TrainConfig.from_dict(config.to_dict() | {"version": "0.1.0"})
    assert read == config and isinstance(read.out, Path) and isinstance(read.cache_dir, Path)
    without = {name: value for name, value in TINY.to_dict().items() if name not in ("out", "seed")}
    assert TrainConfig.from_dict(without) == TINY
    assert TrainConfig.from_dict(TINY.to_dict() | {"plugins": ["there.py"]}).plugins == ()
