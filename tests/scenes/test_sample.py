import zlib

import numpy as np
import pytest
import torch

from cutslots.scenes import Scenes, materials, physics, shapes
from cutslots.scenes.sample import FAMILIES, SPLITS, HashRNG, sample_scenes
from tests.conftest import DEVICES, needs_cuda

IMAGE_FAMILIES = [name for name, family in FAMILIES.items() if family.frames == 1]


def fields(scenes, row):
    return {name: value[row] for name, value in vars(scenes).items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_scene_does_not_depend_on_the_batch(family):
    together = sample_scenes(family, "train", 3, [9, 4, 11])
    for row, index in enumerate((9, 4, 11)):
        alone = sample_scenes(family, "train", 3, [index])
        for name, value in fields(alone, 0).items():
            assert np.array_equal(value, fields(together, row)[name]), name


@pytest.mark.parametrize("device", DEVICES)
def test_videos_are_simulated_no_more_often_on_a_gpu(device, monkeypatch):
    """Attempts are simulated on the CPU, whatever device renders: a batch of 64 videos makes one attempt each."""
    counts, simulate = [], physics.simulate

    def counted(rng, count, *rest):
        counts.append(len(count))
        return simulate(rng, count, *rest)

    monkeypatch.setattr(physics, "simulate", counted)
    sample_scenes("moving", "train", 0, np.arange(64), device=device)
    assert counts[0] == 64 and all(count <= 64 for count in counts)


def test_splits_seeds_and_families_share_no_scene():
    positions = set()
    for family in ("plain", "textured", "camo"):
        for split in SPLITS:
            for seed in (0, 1):
                scenes = sample_scenes(family, split, seed, np.arange(20))
                positions |= {tuple(p) for p in scenes.position[:, 0, 0].tolist()}
    assert len(positions) == 3 * 3 * 2 * 20


@pytest.mark.parametrize("family", IMAGE_FAMILIES)
def test_objects_stand_on_the_ground_without_overlap(family):
    scenes = sample_scenes(family, "test", 0, np.arange(60)).numpy()
    for b in range(60):
        n = scenes.count[b]
        assert 3 <= n <= 10
        centre, size = scenes.position[b, 0, :n], scenes.size[b, :n]
        radius = shapes.GROUND_RADIUS[scenes.shape[b, :n]] * size
        gap = np.hypot(*(centre[:, None, :2] - centre[None, :, :2]).transpose(2, 0, 1))
        np.fill_diagonal(gap, np.inf)
        assert (gap > radius[:, None] + radius).all()
        assert np.allclose(centre[:, 2], shapes.REST_HEIGHT[scenes.shape[b, :n]] * size)


def test_numbers_of_objects_are_equally_likely():
    """Crowded scenes need more attempts, but are not replaced by emptier ones."""
    count = sample_scenes("textured", "train", 0, np.arange(400)).count
    shares = np.bincount(count, minlength=11)[3:] / 400
    assert shares.min() > 0.07 and shares.max() < 0.19


def test_shapes_and_materials_of_each_family():
    shape_names, material_names = {}, {}
    for family in FAMILIES:
        scenes = sample_scenes(family, "train", 0, np.arange(6 if family == "moving" else 60)).numpy()
        present = np.arange(scenes.shape.shape[1]) < scenes.count[:, None]
        shape_names[family] = {shapes.NAMES[s] for s in scenes.shape[present]}
        material_names[family] = {materials.NAMES[m] for m in scenes.material[:, 1:][present]}
        if family == "camo":
            assert (scenes.material == scenes.material[:, :1]).all() and (scenes.palette == scenes.palette[:, :1]).all()
    assert shape_names["plain"] == {"sphere", "cube", "cylinder"} and material_names["plain"] == {"rubber", "metal"}
    assert len(shape_names["textured"]) >= 4 and len(material_names["textured"]) >= 12
    assert len(shape_names["ood"]) >= 4 and len(material_names["ood"]) >= 6
    for other in set(FAMILIES) - {"ood"}:
        assert not shape_names["ood"] & shape_names[other] and not material_names["ood"] & material_names[other]


def test_random_numbers_are_uniform_and_uncorrelated():
    rng = HashRNG("plain", "train", 0, np.arange(2000), np.zeros(2000, dtype=int))
    x, y = rng("a", 10).numpy(), rng("b", 10).numpy()
    assert abs(x.mean() - 0.5) < 0.01 and abs(x.var() - 1 / 12) < 0.005
    assert abs(np.corrcoef(x.ravel(), y.ravel())[0, 1]) < 0.03
    assert abs(np.corrcoef(x[:-1].ravel(), x[1:].ravel())[0, 1]) < 0.03
    assert x.min() >= 0 and x.max() < 1


def reference_numbers(family, split, seed, index, attempt, name, count):
    """SplitMix64's finalizer in Python's own integers."""

    def mix(x):
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
        return x ^ (x >> 31)

    key = mix(((zlib.crc32(f"{family}/{split}".encode()) << 32) + seed) % 2**64)
    key = mix((key + index * 0x9E3779B97F4A7C15) % 2**64)
    key = mix((key + attempt * 0xD1B54A32D192ED03) % 2**64)
    stream = mix(key ^ (zlib.crc32(name.encode()) * 0x2545F4914F6CDD1D % 2**64))
    return [(mix((stream + i * 0x9E3779B97F4A7C15) % 2**64) >> 11) * 2.0**-53 for i in range(1, count + 1)]


@pytest.mark.parametrize("device", DEVICES)
def test_random_numbers_are_those_of_splitmix64(device):
    indices, attempts = torch.tensor([0, 7, 2**31, 10**12], device=device), torch.tensor([0, 1, 5, 999], device=device)
    found = HashRNG("ood", "val", 2**32 - 1, indices, attempts)("spot", 3, 2)
    for row, (index, attempt) in enumerate(zip(indices.tolist(), attempts.tolist(), strict=True)):
        expected = reference_numbers("ood", "val", 2**32 - 1, index, attempt, "spot", 6)
        assert found[row].flatten().tolist() == expected


@needs_cuda
@pytest.mark.parametrize("family", FAMILIES)
def test_scenes_are_the_same_on_every_device(family):
    """Every bit of what a scene contains, and so which scenes are accepted."""
    indices = np.arange(4 if family == "moving" else 2000)
    expected, found = (vars(sample_scenes(family, "train", 1, indices, device=d).numpy()) for d in ("cpu", "cuda"))
    for name, value in expected.items():
        assert np.array_equal(found[name], value), name


@needs_cuda
@pytest.mark.parametrize("textures", ["ramp", "low-contrast"])
def test_textures_are_the_same_on_every_device(textures):
    scenes = Scenes("textured", size=32, count=500, textures=textures)
    expected, found = (scenes._sample(np.arange(500), torch.device(d)).numpy() for d in ("cpu", "cuda"))
    assert np.array_equal(found.palette, expected.palette) and np.array_equal(found.finish, expected.finish)
