import hashlib
import json
import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from cutslots.scenes import FAMILIES, Scenes


def digest(sample):
    return hashlib.sha256(sample.image.numpy().tobytes() + sample.mask.numpy().tobytes()).hexdigest()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_bytes_alone_in_a_batch_and_in_another_process(family):
    scenes = Scenes(family, "val", size=24)
    batch = scenes.render([3, 0, 7, 5])
    alone = scenes[7]
    assert torch.equal(batch.image[2], alone.image) and torch.equal(batch.mask[2], alone.mask)
    code = (
        "import sys, torch; torch.set_num_threads(2); from tests.scenes.test_dataset import *;"
        f"print(digest(Scenes({family!r}, 'val', size=24)[7]))"
    )
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == digest(alone)


def test_workers_give_the_same():
    scenes = Scenes("textured", size=16, count=8)
    loaded = [x.image for x in DataLoader(scenes, batch_size=4, num_workers=2)]
    assert torch.equal(torch.cat(loaded), scenes.render(range(8)).image)


def test_ground_truth_matches_the_mask():
    scenes = Scenes("textured", size=64)
    sample, facts = scenes.describe([0, 1, 2])
    for mask, fact in zip(sample.mask, facts, strict=True):
        ids = {entry["id"] for entry in fact["objects"]}
        assert set(mask.unique().tolist()) - {0} <= ids
        for entry in fact["objects"]:
            assert entry["pixels"] == int((mask == entry["id"]).sum()) and 0 <= entry["visible"] <= 1
    assert json.loads(json.dumps(facts)) == facts


def test_ids_persist_in_a_film():
    sample, (fact,) = Scenes("moving", size=32).describe([0])
    assert sample.image.shape == (1, 24, 3, 32, 32) and sample.mask.shape == (1, 24, 32, 32)
    for entry in fact["objects"]:
        where = np.array(entry["position"])
        assert where.shape == (24, 3) and np.array(entry["velocity"]).shape == (24, 3)
        assert entry["pixels"] == [int((frame == entry["id"]).sum()) for frame in sample.mask[0]]


def test_cache_in_memory_and_on_disk(tmp_path):
    scenes = Scenes("plain", size=16, count=5)
    direct = scenes.render(range(5))
    for cached in (scenes.cache(quiet=True), scenes.cache(tmp_path / "cache", batch=2, quiet=True)):
        assert len(cached) == 5 and torch.equal(cached.render([4, 1]).image, direct.image[[4, 1]])
        assert torch.equal(cached[3].mask, direct.mask[3])


def test_an_interrupted_cache_goes_on(tmp_path, monkeypatch):
    scenes = Scenes("plain", size=16, count=6)
    calls = []
    whole = Scenes.world

    def failing(self, indices):
        calls.append(list(indices))
        if len(calls) == 2:
            raise KeyboardInterrupt
        return whole(self, indices)

    monkeypatch.setattr(Scenes, "world", failing)
    with pytest.raises(KeyboardInterrupt):
        scenes.cache(tmp_path, batch=2, quiet=True)
    cached = scenes.cache(tmp_path, batch=2, quiet=True)
    assert calls == [[0, 1], [2, 3], [2, 3], [4, 5]]
    monkeypatch.undo()
    assert torch.equal(cached.render(range(6)).image, scenes.render(range(6)).image)
    with pytest.raises(ValueError, match=r"holds other scenes \(seed 0; wanted seed 1\)"):
        Scenes("plain", size=16, count=6, seed=1).cache(tmp_path)
    (tmp_path / "cache.json").write_text("{")
    with pytest.raises(ValueError, match="is not readable as JSON"):
        scenes.cache(tmp_path)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"family": "clevr"}, "family is 'clevr'; expected one of plain, textured, ood, camo, moving"),
        ({"family": "plain", "split": "dev"}, "split is 'dev'; expected one of train, val, test"),
        ({"family": "plain", "size": 0}, "size is 0; expected a side of 1 to 2048 pixels"),
        ({"family": "plain", "count": -1}, "count is -1; expected zero or more"),
        ({"family": "plain", "seed": -1}, "seed is -1; expected a whole number from 0"),
        ({"family": "plain", "seed": 2**32}, "seed is 4294967296; expected a whole number"),
        ({"family": "plain", "size": 16.0}, "size is 16.0; expected a side"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        Scenes(**arguments)


@pytest.mark.parametrize("cached", [False, True])
def test_indices(cached):
    scenes = Scenes("plain", count=3, size=8)
    scenes = scenes.cache(quiet=True) if cached else scenes
    for wrong in (3, -1):
        with pytest.raises(IndexError, match=f"scene {wrong} is out of range: there are 3"):
            scenes[wrong]
    with pytest.raises(TypeError, match="indices are of type float64; expected whole numbers"):
        scenes.render([0.5])
    with pytest.raises(TypeError, match="indices are of type bool"):
        scenes.render(np.array([True, False, True]))
    assert scenes.render([]).image.shape == (0, 3, 8, 8) and scenes.render([]).mask.shape == (0, 8, 8)
    assert torch.equal(scenes.render(torch.tensor([2, 1])).image, scenes.render(range(2, 0, -1)).image)


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("device", ["cuda:99", torch.device("cuda:99"), "nowhere", "hpu"])
def test_a_device_that_is_not_here(cached, device):
    scenes = Scenes("plain", count=1, size=8)
    scenes = scenes.cache(quiet=True) if cached else scenes
    with pytest.raises(ValueError, match=rf"\Adevice is '{device}', which cannot be used here: [^\n]*\Z"):
        scenes.render([0], device)


def test_a_damaged_or_foreign_cache_is_refused(tmp_path):
    scenes = Scenes("plain", size=16, count=4)
    scenes.cache(tmp_path / "cut", quiet=True)
    path = tmp_path / "cut" / "images.npy"
    path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(ValueError, match=r"images.npy is missing or cut short; delete .*cut"):
        scenes.cache(tmp_path / "cut", quiet=True)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "images.npy").write_bytes(b"mine")
    with pytest.raises(ValueError, match="is not empty and holds no cache"):
        scenes.cache(tmp_path / "mine", quiet=True)
    assert (tmp_path / "mine" / "images.npy").read_bytes() == b"mine"


def test_a_cache_on_disk_is_not_sent_to_workers(tmp_path):
    cached = Scenes("plain", size=32, count=6).cache(tmp_path, quiet=True)
    sent = pickle.dumps(cached)
    assert len(sent) < 2000 and torch.equal(pickle.loads(sent)[5].image, cached[5].image)


# ------------------------------------------------------------------------------------------------------ other surfaces


def test_textures_rise_from_scene_to_scene():
    """Scene 0 has none, the later the more; what stands where is the same."""
    rising, whole = (Scenes("textured", size=32, count=8, surfaces=kind) for kind in ("rising", "whole"))
    made, world = rising.world(range(8)), whole.world(range(8))
    assert (
        np.array_equal(made.finish[0, :, 1], 0 * world.finish[0, :, 1]) and np.ptp(made.paint[0], axis=1).max() < 1e-15
    )
    for i in range(8):
        assert np.allclose(made.finish[i, :, 1], i / 8 * world.finish[i, :, 1])
        spread, mean = np.ptp(world.paint[i], axis=1), world.paint[i].mean(1)
        assert np.allclose(np.ptp(made.paint[i], axis=1), i / 8 * spread) and np.allclose(made.paint[i].mean(1), mean)
    for name in ("material", "position", "shape", "size", "light", "camera"):
        assert np.array_equal(getattr(made, name), getattr(world, name)), name
    one, other = rising.render(range(8)), whole.render(range(8))
    assert torch.equal(one.mask, other.mask) and not torch.equal(one.image, other.image)
    assert torch.equal(rising.render([6, 2]).image, one.image[[6, 2]]), "by their numbers alone"


def test_objects_near_the_ground_in_colour():
    near, whole = (Scenes("textured", size=32, count=50, surfaces=kind) for kind in ("near", "whole"))
    made, world = near.world(range(50)), whole.world(range(50))
    assert np.array_equal(made.paint[:, 0], world.paint[:, 0]) and np.array_equal(made.finish, world.finish)
    assert np.array_equal(made.material, world.material), "what they are made of stays theirs"
    gap, before = (w.paint[:, 1:] - w.paint[:, :1] for w in (made, world))
    left = (gap * before).sum((1, 2, 3)) / (before**2).sum((1, 2, 3))
    assert np.allclose(gap, left[:, None, None, None] * before) and left.max() == 1 and 0.1 <= left.min() < 0.15
    assert np.histogram(1 - left, 3, (0, 0.9))[0].min() >= 15, "as many are a little near as are very near"
    assert torch.equal(near.render([7]).mask, whole.render([7]).mask)


def test_other_surfaces_are_other_scenes(tmp_path):
    """A cache of one kind is not taken for another; that of whole ones is what it always was."""
    whole, rising = (Scenes("textured", size=16, count=4, surfaces=kind) for kind in ("whole", "rising"))
    assert "surfaces" not in whole.request() and rising.request()["surfaces"] == "rising"
    whole.cache(tmp_path / "a")
    with pytest.raises(ValueError, match=r"holds other scenes \(surfaces None; wanted surfaces rising\)"):
        rising.cache(tmp_path / "a")
    rising.cache(tmp_path / "b")
    with pytest.raises(ValueError, match=r"holds other scenes \(surfaces rising; wanted surfaces None\)"):
        whole.cache(tmp_path / "b")
    with pytest.raises(ValueError, match=r"\Asurfaces is 'flat'; expected one of whole, rising, near\Z"):
        Scenes("textured", surfaces="flat")
