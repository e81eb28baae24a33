import dataclasses
import hashlib
import json
import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from cutslots.scenes import FAMILIES, Scenes, dataset
from cutslots.scenes.render import render
from tests.conftest import DEVICES


def digest(sample):
    return hashlib.sha256(sample.image.numpy().tobytes() + sample.mask.numpy().tobytes()).hexdigest()


@pytest.fixture(scope="module")
def elsewhere():
    """Digests of scene 7 of every family, of another process with two threads."""
    code = (
        "import sys, torch; torch.set_num_threads(2); from tests.scenes.test_dataset import *;"
        "print(json.dumps({family: digest(Scenes(family, 'val', size=24)[7]) for family in FAMILIES}))"
    )
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return json.loads(other.stdout)


@pytest.mark.parametrize("family", FAMILIES)
def test_bytes_are_the_same_alone_in_a_batch_and_in_another_process(family, elsewhere):
    scenes = Scenes(family, "val", size=24)
    batch = scenes.get_batch([3, 0, 7, 5])
    alone = scenes[7]
    assert torch.equal(batch.image[2], alone.image) and torch.equal(batch.mask[2], alone.mask)
    assert elsewhere[family] == digest(alone)


def test_workers_return_the_same_bytes():
    scenes = Scenes("textured", size=16, count=8)
    loaded = [x.image for x in DataLoader(scenes, batch_size=4, num_workers=2)]
    assert torch.equal(torch.cat(loaded), scenes.get_batch(range(8)).image)


# -------------------------------------------------------------------------------------------------------- ground truth


@pytest.mark.parametrize("size", [64, (64, 40)])
def test_ground_truth_matches_the_mask(size):
    sample, truths = Scenes("textured", size=size).describe([0, 1, 2])
    for mask, truth in zip(sample.mask, truths, strict=True):
        ids = {entry["id"] for entry in truth["objects"]}
        assert set(mask.unique().tolist()) - {0} <= ids
        for entry in truth["objects"]:
            assert entry["pixels"] == int((mask == entry["id"]).sum()) and 0 <= entry["visible"] <= 1
    assert json.loads(json.dumps(truths)) == truths


@pytest.mark.parametrize("family, size", [("plain", 48), ("textured", (32, 48)), ("moving", 24)])
def test_visibility_of_objects_rendered_alone(family, size):
    """An object without the others has the pixels that it would show if nothing were in front of it."""
    scenes = Scenes(family, "val", size=size, count=3)
    sample, contents = scenes.get_annotated(range(3)), scenes.sample(range(3))
    plain = scenes.get_batch(range(3))
    assert torch.equal(sample.image, plain.image) and torch.equal(sample.mask, plain.mask) and sample.classes is None
    for b in range(3):
        for k in range(contents.shape.shape[1]):
            if k >= contents.count[b]:
                assert sample.visibility[b, k].isnan()
                continue
            alone = contents.select(slice(b, b + 1))
            per_object = {"shape": 1, "size": 1, "position": 2, "rotation": 2}
            moved = {name: getattr(alone, name).copy() for name in per_object}
            for name, axis in per_object.items():
                index = [slice(None)] * moved[name].ndim
                index[axis] = 0
                moved[name][tuple(index)] = np.take(getattr(alone, name), k, axis)
            rendered = render(dataclasses.replace(alone, count=np.array([1]), **moved), scenes.image_size)
            visible, whole = int((sample.mask[b] == k + 1).sum()), int((rendered.mask == 1).sum())
            assert sample.visibility[b, k].item() == visible / whole
    assert (sample.visibility < 1).any() and (sample.visibility == 1).any()


def test_object_ids_persist_over_a_video():
    sample, (truth,) = Scenes("moving", size=32).describe([0])
    assert sample.image.shape == (1, 24, 3, 32, 32) and sample.mask.shape == (1, 24, 32, 32)
    for entry in truth["objects"]:
        assert np.array(entry["position"]).shape == (24, 3) and np.array(entry["velocity"]).shape == (24, 3)
        assert entry["pixels"] == [int((frame == entry["id"]).sum()) for frame in sample.mask[0]]


# ------------------------------------------------------------------------------------------------------------ protocol


def test_protocol_of_images_and_videos():
    images, videos = Scenes("plain", size=(16, 24), count=3), Scenes("moving", "val", size=8)
    assert (len(images), images.frames, images.has_masks, images.image_size) == (3, 1, True, (16, 24))
    assert (len(videos), videos.frames, videos.has_masks, videos.image_size) == (1000, 24, True, (8, 8))
    assert images.name(2) == "000002"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("height, width", [(24, 40), (37, 23), (33, 33)])
def test_any_image_size(family, height, width):
    """Scenes of (H, W) are the centre crop of the square scenes with side max(H, W)."""
    side = max(height, width)
    square, scenes = Scenes(family, size=side, count=5), Scenes(family, size=(height, width), count=5)
    top, left = (side - height) // 2, (side - width) // 2
    for whole, crop in zip(square.get_batch([4, 1]), scenes.get_batch([4, 1]), strict=True):
        assert torch.equal(crop, whole[..., top : top + height, left : left + width])
    sample, _ = scenes.describe([4])
    assert torch.equal(sample.image, scenes.get_batch([4]).image)


@pytest.mark.parametrize("size", [16, (12, 20)])
def test_frames_of_videos(size):
    scenes = Scenes("moving", size=size, count=3)
    videos = scenes.get_batch(range(3))
    frames = scenes.get_frames([2, 0, 2], [23, 5, 0])
    for whole, chosen in zip(videos, frames, strict=True):
        assert torch.equal(chosen, whole[[2, 0, 2], [23, 5, 0]])


# -------------------------------------------------------------------------------------------------------------- caches


@pytest.mark.parametrize("size", [16, (16, 11)])
def test_cache_in_memory_and_on_disk(tmp_path, size):
    scenes = Scenes("plain", size=size, count=5)
    direct = scenes.get_batch(range(5))
    for cached in (scenes.cache(quiet=True), scenes.cache(tmp_path / "cache", batch=2, quiet=True)):
        assert len(cached) == 5 and torch.equal(cached.get_batch([4, 1]).image, direct.image[[4, 1]])
        assert torch.equal(cached[3].mask, direct.mask[3])
    again = scenes.cache(tmp_path / "cache", quiet=True)
    assert torch.equal(again.get_batch(range(5)).image, direct.image)


@pytest.mark.parametrize("device", DEVICES)
def test_cache_of_videos(tmp_path, device, monkeypatch):
    monkeypatch.setattr(dataset, "SCENES_PER_BATCH", (2, 48))
    scenes = Scenes("moving", size=16, count=3)
    cached = scenes.cache(tmp_path, device, quiet=True).get_batch(range(3))
    for found, expected in zip(cached, scenes.get_batch(range(3), device), strict=True):
        assert torch.equal(found, expected.cpu())


def test_cache_says_how_much_it_writes(tmp_path, capsys):
    scenes = Scenes("plain", size=(16, 32), count=50)
    assert scenes.cache_bytes == 50 * 4 * 16 * 32
    cached = scenes.cache(tmp_path / "cache")
    assert scenes.cache_bytes == cached.images.nbytes + cached.masks.nbytes
    assert f"rendering 50 scenes, 0.1 MB, to {tmp_path / 'cache'}\n" in capsys.readouterr().out
    scenes.cache(tmp_path / "cache")
    scenes.cache(quiet=True)
    assert capsys.readouterr().out == "", "nothing is left to render"
    assert Scenes("textured").cache_bytes == 3_276_800_000 and Scenes("moving", count=2).frames == 24
    assert Scenes("moving", count=2).cache_bytes == 2 * 24 * 4 * 128 * 128


def test_cache_names_tell_scenes_apart():
    assert Scenes("textured").cache_name == "textured-train-128x128-50000"
    other = Scenes("plain", "val", (64, 96), seed=2, count=7, num_objects=(2, 5), textures="ramp")
    assert other.cache_name == "plain-2-5-val-64x96-7-ramp-seed2"


def test_an_interrupted_cache_resumes(tmp_path, monkeypatch):
    scenes = Scenes("plain", size=16, count=6)
    calls = []
    original = Scenes._sample

    def failing(self, indices, device):
        calls.append(list(indices))
        if len(calls) == 2:
            raise KeyboardInterrupt
        return original(self, indices, device)

    monkeypatch.setattr(Scenes, "_sample", failing)
    with pytest.raises(KeyboardInterrupt):
        scenes.cache(tmp_path, batch=2, quiet=True)
    cached = scenes.cache(tmp_path, batch=2, quiet=True)
    assert calls == [[0, 1], [2, 3], [2, 3], [4, 5]]
    monkeypatch.undo()
    assert torch.equal(cached.get_batch(range(6)).image, scenes.get_batch(range(6)).image)
    with pytest.raises(ValueError, match=r"holds another cache \(differing in seed\); choose another folder or delete"):
        Scenes("plain", size=16, count=6, seed=1).cache(tmp_path)
    (tmp_path / "request.json").write_text("{")
    with pytest.raises(ValueError, match=r"request.json is not the request of a cache; choose another folder"):
        scenes.cache(tmp_path)


def test_a_damaged_or_foreign_cache_is_refused(tmp_path):
    scenes = Scenes("plain", size=16, count=4)
    scenes.cache(tmp_path / "cut", quiet=True)
    path = tmp_path / "cut" / "images.npy"
    path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(ValueError, match=r"images.npy is missing or truncated; delete .*cut"):
        scenes.cache(tmp_path / "cut", quiet=True)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "images.npy").write_bytes(b"mine")
    with pytest.raises(ValueError, match="is not empty and holds no cache"):
        scenes.cache(tmp_path / "mine", quiet=True)
    assert (tmp_path / "mine" / "images.npy").read_bytes() == b"mine"


def test_pickling_a_cache_on_disk_sends_no_images(tmp_path):
    cached = Scenes("plain", size=32, count=6).cache(tmp_path, quiet=True)
    sent = pickle.dumps(cached)
    assert len(sent) < 2000 and torch.equal(pickle.loads(sent)[5].image, cached[5].image)


# ---------------------------------------------------------------------------------------------------- invalid arguments


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"family": "clevr"}, "family is 'clevr'; expected one of plain, textured, ood, camo, moving"),
        ({"family": "plain", "split": "dev"}, "split is 'dev'; expected one of train, val, test"),
        ({"family": "plain", "size": 0}, "size is 0; expected 1 to 2048 pixels, as one integer or as"),
        ({"family": "plain", "size": 16.0}, "size is 16.0; expected 1 to 2048 pixels"),
        ({"family": "plain", "size": (16, 2049)}, r"size is \(16, 2049\); expected 1 to 2048 pixels"),
        ({"family": "plain", "size": (16,)}, r"size is \(16,\); expected"),
        ({"family": "plain", "size": (3, 16, 16)}, r"size is \(3, 16, 16\); expected"),
        ({"family": "plain", "size": "16"}, "size is '16'; expected"),
        ({"family": "plain", "count": -1}, "count is -1; expected an integer of at least 0"),
        ({"family": "plain", "seed": -1}, "seed is -1; expected an integer from 0"),
        ({"family": "plain", "seed": 2**32}, "seed is 4294967296; expected an integer"),
        ({"family": "plain", "num_objects": (5, 2)}, r"num_objects is \(5, 2\); expected a range between 1 and 10"),
        ({"family": "plain", "num_objects": (0, 2)}, r"num_objects is \(0, 2\); expected a range"),
        ({"family": "plain", "textures": "no"}, r"textures is 'no'; expected one of full, flat, ramp, low-contrast\Z"),
    ],
)
def test_invalid_arguments(arguments, message):
    with pytest.raises(ValueError, match=rf"\A{message}"):
        Scenes(**arguments)


@pytest.mark.parametrize("cached", [False, True])
def test_indices(cached):
    scenes = Scenes("plain", count=3, size=8)
    scenes = scenes.cache(quiet=True) if cached else scenes
    for wrong in (3, -1):
        with pytest.raises(IndexError, match=f"index {wrong} is out of range; expected 0 to 2"):
            scenes[wrong]
    with pytest.raises(TypeError, match="indices are of type float64; expected integers"):
        scenes.get_batch([0.5])
    with pytest.raises(TypeError, match="indices are of type bool"):
        scenes.get_batch(np.array([True, False, True]))
    assert scenes.get_batch([]).image.shape == (0, 3, 8, 8) and scenes.get_batch([]).mask.shape == (0, 8, 8)
    assert torch.equal(scenes.get_batch(torch.tensor([2, 1])).image, scenes.get_batch(range(2, 0, -1)).image)


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("device", ["cuda:99", torch.device("cuda:99"), "nowhere", "hpu"])
def test_unavailable_devices(cached, device):
    scenes = Scenes("plain", count=1, size=8)
    scenes = scenes.cache(quiet=True) if cached else scenes
    with pytest.raises(ValueError, match=rf"\Adevice is '{device}', which cannot be used here: [^\n]*\Z"):
        scenes.get_batch([0], device)


# ------------------------------------------------------------------------------------------------------------ textures


def test_textures_ramp_up_from_scene_to_scene():
    """Scene 0 has none and later scenes have more. Everything else is the same."""
    ramp, full = (Scenes("textured", size=32, count=8, textures=name) for name in ("ramp", "full"))
    changed, original = ramp.sample(range(8)), full.sample(range(8))
    assert not changed.finish[0, :, 1].any() and np.ptp(changed.palette[0], axis=1).max() < 1e-15
    for i in range(8):
        assert np.allclose(changed.finish[i, :, 1], i / 8 * original.finish[i, :, 1])
        assert np.allclose(np.ptp(changed.palette[i], axis=1), i / 8 * np.ptp(original.palette[i], axis=1))
        assert np.allclose(changed.palette[i].mean(1), original.palette[i].mean(1))
    for name in ("material", "position", "shape", "size", "light_strength", "camera"):
        assert np.array_equal(getattr(changed, name), getattr(original, name)), name
    sample, reference = ramp.get_batch(range(8)), full.get_batch(range(8))
    assert torch.equal(sample.mask, reference.mask) and not torch.equal(sample.image, reference.image)
    assert torch.equal(ramp.get_batch([6, 2]).image, sample.image[[6, 2]]), "a scene depends on its index alone"


def test_objects_of_low_contrast():
    low, full = (Scenes("textured", size=32, count=50, textures=name) for name in ("low-contrast", "full"))
    changed, original = low.sample(range(50)), full.sample(range(50))
    assert np.array_equal(changed.palette[:, 0], original.palette[:, 0])
    assert np.array_equal(changed.finish, original.finish) and np.array_equal(changed.material, original.material)
    gap, before = (scenes.palette[:, 1:] - scenes.palette[:, :1] for scenes in (changed, original))
    contrast = (gap * before).sum((1, 2, 3)) / (before**2).sum((1, 2, 3))
    assert np.allclose(gap, contrast[:, None, None, None] * before)
    assert contrast.max() == 1 and 0.1 <= contrast.min() < 0.15
    assert np.histogram(1 - contrast, 3, (0, 0.9))[0].min() >= 15, "shares are evenly distributed"
    assert torch.equal(low.get_batch([7]).mask, full.get_batch([7]).mask)


def test_a_cache_of_other_textures_is_refused(tmp_path):
    full, ramp = (Scenes("textured", size=16, count=4, textures=name) for name in ("full", "ramp"))
    assert full.request()["textures"] == "full" and ramp.request()["textures"] == "ramp"
    full.cache(tmp_path / "a")
    with pytest.raises(ValueError, match=r"holds another cache \(differing in textures\)"):
        ramp.cache(tmp_path / "a")
    ramp.cache(tmp_path / "b")
    with pytest.raises(ValueError, match=r"holds another cache \(differing in textures\)"):
        full.cache(tmp_path / "b")
