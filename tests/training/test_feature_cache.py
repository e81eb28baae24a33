"""Cached features: the same weights as without a cache, resumed, keyed by what determines them, and verified."""

import json
import shutil
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from cutslots import cli
from cutslots.data.folder import Folder
from cutslots.models.discovery import build
from cutslots.modules.vit import ViTEncoder
from cutslots.training import feature_cache
from cutslots.training.data import open_split
from cutslots.training.feature_cache import CachedFeatures, _plan
from cutslots.training.loop import resolve, train
from tests.modules.small_vits import CHANNELS, make_vit
from tests.small_runs import lines, sentence, small, train_command, two, weights

FEATURES = {"encoder": "vit", "decoder": "mlp", "decoder__hidden_dims": (16, 16), "loss": "feature-mse"}
RUN = {"max_steps": 7, "num_images": 10, "num_eval_images": 2, "eval_every": 7}


@pytest.fixture(scope="module")
def vit(tmp_path_factory):
    """The folder of a small ViT. Read only."""
    folder = tmp_path_factory.mktemp("checkpoints") / "vit"
    make_vit(folder)
    return folder


@pytest.fixture
def encoded(monkeypatch):
    """The number of images of each call of the encoder."""
    counts, forward = [], ViTEncoder.forward

    def counting(self, x):
        counts.append(len(x))
        return forward(self, x)

    monkeypatch.setattr(ViTEncoder, "forward", counting)
    return counts


def options(vit, **changes):
    return FEATURES | {"encoder__checkpoint": vit} | RUN | changes


def run(folder, vit, preset="tiny", **changes):
    return train(small(folder, preset, **options(vit, **changes)))


def caches(folder):
    return sorted(folder.glob("features-*"))


def write_photos(folder: Path, count: int = 5) -> Path:
    (folder / "images").mkdir(parents=True)
    for i in range(count):
        pixels = np.random.default_rng(i).integers(0, 256, (20, 24, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / "images" / f"{i}.png")
    return folder


# ------------------------------------------------------------------------------------------------------ the same losses

KINDS = {
    "mlp": ("tiny", {}),
    "transformer": ("tiny", {"decoder": "transformer", "decoder__num_layers": 1, "decoder__num_heads": 3}),
    "attention": ("tiny", {"slots": "slot-attention"}),
    "pairs": ("movi", {"data": "moving", "num_images": 24, "max_steps": 3, "eval_every": 3}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_losses_are_those_of_a_run_without_a_cache(kind, vit, tmp_path):
    preset, changes = KINDS[kind]
    if "decoder" in changes:
        changes = {"decoder__hidden_dims": None} | changes
    values = {name: value for name, value in options(vit, **changes).items() if value is not None}
    plain = train(small(tmp_path / "plain", preset, **values))
    cached = train(small(tmp_path / "cached", preset, **values, cache_dir=tmp_path / "cache"))
    assert len(caches(tmp_path / "cache")) == 1
    expected = [line["loss"] for line in lines(plain) if "loss" in line]
    assert expected and [line["loss"] for line in lines(cached) if "loss" in line] == expected
    assert weights(cached) == weights(plain)


def test_cached_features_are_those_of_the_model(vit, tmp_path):
    photos = write_photos(tmp_path / "photos")
    config = small(tmp_path / "run", **options(vit, data=photos, num_images=4, cache_dir=tmp_path / "cache"))
    train(config)
    (folder,) = caches(tmp_path / "cache")
    cached = CachedFeatures(folder, frames=1)
    encoder = ViTEncoder(vit)
    images = Folder(photos, "train", config.model.image_size).get_batch(range(4)).image
    with torch.no_grad():
        expected = encoder(encoder.normalize(images / 255.0).contiguous(memory_format=torch.channels_last))
    features = cached.get_batch([0, 3, 1]).image
    assert features.dtype == torch.float32 and features.shape == (3, CHANNELS, 4, 4)
    assert features.stride() == expected[:3].contiguous(memory_format=torch.channels_last).stride()
    torch.testing.assert_close(features, expected[[0, 3, 1]], rtol=1e-6, atol=1e-6)


def test_the_encoder_runs_once_for_each_image(vit, tmp_path, encoded):
    for name in ("first", "second"):
        encoded.clear()
        run(tmp_path / name, vit, cache_dir=tmp_path / "cache", max_steps=1)
        one_step = sum(encoded)
        encoded.clear()
        run(tmp_path / name, vit, cache_dir=tmp_path / "cache", max_steps=7)
        assert sum(encoded) <= one_step, "of validation and of the report"
        # The second run computes none: the first one had 10 images in full batches of 4.
        if name == "first":
            first = one_step
    assert first - one_step == 12


def test_precision_decides_the_type(vit, tmp_path):
    losses = {}
    for name, cache_dir in (("plain", None), ("cached", tmp_path / "cache")):
        changes = {} if cache_dir is None else {"cache_dir": cache_dir}
        folder = run(tmp_path / name, vit, precision="bf16-mixed", **changes)
        losses[name] = [line["loss"] for line in lines(folder) if "loss" in line]
    (folder,) = caches(tmp_path / "cache")
    assert np.load(folder / "features.npy").dtype == np.float16
    assert losses["cached"] == pytest.approx(losses["plain"], rel=2e-3)
    run(tmp_path / "float32", vit, cache_dir=tmp_path / "cache")
    assert len(caches(tmp_path / "cache")) == 2


def test_features_beyond_the_range_of_float16_are_one_sentence(vit, tmp_path, monkeypatch):
    forward = ViTEncoder.forward
    monkeypatch.setattr(ViTEncoder, "forward", lambda self, x: 1e6 * forward(self, x))
    changes = options(vit, precision="bf16-mixed", cache_dir=tmp_path / "cache")
    message = sentence(monkeypatch, train_command(tmp_path / "run", **changes))
    assert "the features of image 0 are not finite in float16" in message


# ---------------------------------------------------------------------------------------------------------------- files


def test_the_size_is_said_before_it_is_written(vit, tmp_path, capsys):
    run(tmp_path / "a", vit, cache_dir=tmp_path / "cache", max_steps=1)
    (folder,) = caches(tmp_path / "cache")
    size = 10 * 4 * 4 * CHANNELS * 4
    assert (folder / "features.npy").stat().st_size == size + 128  # the header of .npy
    said = f"features of 10 images, {size / 1e6:,.1f} MB, in {folder}"
    assert f"caching {said}" in capsys.readouterr().out.replace("\n", " ")
    run(tmp_path / "b", vit, cache_dir=tmp_path / "cache", max_steps=1)
    assert f"reading {said}" in capsys.readouterr().out.replace("\n", " ")


def test_a_killed_build_resumes(vit, tmp_path, monkeypatch, encoded):
    plain = run(tmp_path / "plain", vit)
    monkeypatch.setattr(feature_cache, "SAVE_BYTES", 1)
    compute, calls = feature_cache._compute, []

    def killed(model, images, fabric, indices):
        calls.append(indices.tolist())
        if len(calls) == 3:
            raise KeyboardInterrupt
        return compute(model, images, fabric, indices)

    monkeypatch.setattr(feature_cache, "_compute", killed)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "cached", vit, cache_dir=tmp_path / "cache")
    (folder,) = caches(tmp_path / "cache")
    assert json.loads((folder / "progress.json").read_text()) == {"done": 8}
    cached = run(tmp_path / "cached", vit, cache_dir=tmp_path / "cache")
    assert calls == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 9, 9], [8, 9, 9, 9]]
    assert weights(cached) == weights(plain)


def folder_of(vit, cache, **changes):
    """Return the folder of the cache of a run."""
    config = resolve(small(None, **options(vit, cache_dir=cache, **changes)))
    model, data = build(config.model), open_split(config, "train", config.num_images)
    return _plan(config, model, data, model.encoder.fingerprint()).folder


def test_another_checkpoint_has_another_cache(vit, tmp_path):
    make_vit(tmp_path / "other", initializer_range=0.5)
    shutil.copytree(vit, tmp_path / "copy")
    for number, checkpoint in ((1, vit), (1, tmp_path / "copy"), (2, tmp_path / "other")):
        run(tmp_path / f"run-{checkpoint.name}", checkpoint, cache_dir=tmp_path / "cache", max_steps=1)
        assert len(caches(tmp_path / "cache")) == number
    assert folder_of(vit, tmp_path / "cache") in caches(tmp_path / "cache")


def test_the_key_is_everything_that_determines_features(vit, tmp_path):
    photos = write_photos(tmp_path / "photos")
    shutil.copytree(vit, tmp_path / "normalized")
    preprocessor = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    (tmp_path / "normalized" / "preprocessor_config.json").write_text(json.dumps(preprocessor))
    folder = partial(folder_of, vit, tmp_path / "cache")
    assert folder() == folder(slots__num_slots=4, seed=3, batch_size=2, lr=1.0, decoder__hidden_dims=(3,))
    changes = [
        {},
        {"encoder__checkpoint": tmp_path / "normalized"},
        {"image_size": (20, 16)},
        {"precision": "bf16-mixed"},
        {"num_images": 3},
        {"data": "plain:2-3"},
        {"data": "moving"},
        {"data": photos, "num_images": 4},
        {"data": f"folder:path={photos},resize=crop", "num_images": 4},
    ]
    assert len({folder(**each) for each in changes}) == len(changes)
    before = folder(data=photos)
    Image.new("RGB", (20, 24)).save(photos / "images" / "1.png")
    assert folder(data=photos) != before


def flip_a_byte(folder):
    with (folder / "features.npy").open("r+b") as file:
        file.seek(128 + 4 * 16 * CHANNELS * 6 + 2)  # in the seventh row
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 64]))


def cut_short(folder):
    with (folder / "features.npy").open("r+b") as file:
        file.truncate(1000)


def replace_by_others(folder):
    np.save(folder / "features.npy", np.zeros((10, 4, 4, CHANNELS), dtype=np.float64))


def remove_checksums(folder):
    (folder / "checksums.npy").unlink()


@pytest.mark.parametrize(
    "damage, said",
    [
        (flip_a_byte, "features.npy is damaged at row 6; delete"),
        (cut_short, "features.npy is missing or truncated; delete"),
        (replace_by_others, "features.npy is float64 (10, 4, 4, 24); expected float32 (10, 4, 4, 24): delete"),
        (remove_checksums, "checksums.npy is missing or truncated; delete"),
    ],
)
def test_a_damaged_cache_is_noticed(damage, said, vit, tmp_path, monkeypatch):
    run(tmp_path / "first", vit, cache_dir=tmp_path / "cache", max_steps=1)
    (folder,) = caches(tmp_path / "cache")
    damage(folder)
    words = train_command(tmp_path / "second", **options(vit, cache_dir=tmp_path / "cache"))
    assert said in sentence(monkeypatch, words)
    shutil.rmtree(folder)
    monkeypatch.setattr(sys, "argv", ["cutslots", *map(str, words)])
    cli.main()


def test_two_processes_share_a_cache(vit, tmp_path):
    one = run(tmp_path / "one", vit, cache_dir=tmp_path / "cache", max_steps=4)
    shutil.rmtree(tmp_path / "cache")
    changes = options(vit, cache_dir=tmp_path / "cache", max_steps=4, devices=2)
    commands = two(train_command(tmp_path / "two", **changes), tmp_path)
    assert [command.end() for command in commands] == [0, 0], "".join(command.said() for command in commands)
    assert "caching features of 10 images" in commands[0].said() and len(caches(tmp_path / "cache")) == 1
    a, b = ([line["loss"] for line in lines(folder) if "loss" in line] for folder in (one, tmp_path / "two"))
    assert a and b == pytest.approx(a, rel=1e-3)


# ----------------------------------------------------------------------------------------------------------- not cached


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"horizontal_flips": True}, "images are flipped at random (--no-horizontal-flips)"),
        ({"hue_jitter": 0.1}, "images are augmented at random (--min-crop-area, --brightness-jitter and the like)"),
        ({"mix_data": "plain"}, "images of another dataset are mixed in at random (--mix-data)"),
        ({"num_images": "endless"}, "images never repeat (--num-images endless)"),
        ({"data": "textured", "data__texture_ramp_end": 5}, "textures change over time"),
        ({"decoder": "pixel-shuffle", "decoder__channels": (8,), "loss": "mse"}, "the loss mse needs the images"),
    ],
)
def test_what_changes_during_training_is_not_cached(changes, reason, vit, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("cutslots.training.data.MAX_MIXED_SCENES", 8)  # 16,000 take a while
    values = options(vit, cache_dir=tmp_path / "cache", max_steps=1) | changes
    if changes.get("loss") == "mse":
        del values["decoder__hidden_dims"]
    train(small(tmp_path / "run", **values))
    said = capsys.readouterr().out.replace("\n", " ")
    assert f"features are computed at every step, not cached: {reason}" in said
    assert not caches(tmp_path / "cache")


def test_an_encoder_that_is_trained_is_not_cached_and_nothing_is_said(vit, tmp_path, capsys):
    train(small(tmp_path / "run", max_steps=1, num_images=4, num_eval_images=2, cache_dir=tmp_path / "cache"))
    assert "features" not in capsys.readouterr().out and not caches(tmp_path / "cache")
    assert ViTEncoder(vit, frozen=False).fingerprint() is None


def test_a_disk_that_is_too_small(vit, tmp_path, capsys, monkeypatch):
    plain = run(tmp_path / "plain", vit)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1_000))
    trained = run(tmp_path / "run", vit, cache_dir=tmp_path / "cache")
    said = capsys.readouterr().out.replace("\n", " ")
    assert f"not cached: they take 0.0 GB, and {tmp_path / 'cache'} has 0.0 GB free" in said
    assert weights(trained) == weights(plain) and not caches(tmp_path / "cache")


def test_a_dataset_without_a_fingerprint(vit, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(Folder, "fingerprint", lambda self: None)
    photos = write_photos(tmp_path / "photos")
    run(tmp_path / "run", vit, data=photos, num_images=4, max_steps=1, cache_dir=tmp_path / "cache")
    assert "the dataset has no fingerprint" in capsys.readouterr().out.replace("\n", " ")
