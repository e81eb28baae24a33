import numpy as np
import pytest

from cutslots.scenes import materials, shapes
from cutslots.scenes.sample import FAMILIES, SPLITS, HashRNG, sample_scenes

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


def test_splits_seeds_and_families_share_no_scene():
    positions = set()
    for family in ("plain", "textured", "camo"):
        for split in SPLITS:
            for seed in (0, 1):
                scenes = sample_scenes(family, split, seed, np.arange(20))
                positions |= {tuple(p) for p in scenes.position[:, 0, 0]}
    assert len(positions) == 3 * 3 * 2 * 20


@pytest.mark.parametrize("family", IMAGE_FAMILIES)
def test_objects_stand_on_the_ground_without_overlap(family):
    scenes = sample_scenes(family, "test", 0, np.arange(60))
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
        scenes = sample_scenes(family, "train", 0, np.arange(6 if family == "moving" else 60))
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
    x, y = rng("a", 10), rng("b", 10)
    assert abs(x.mean() - 0.5) < 0.01 and abs(x.var() - 1 / 12) < 0.005
    assert abs(np.corrcoef(x.ravel(), y.ravel())[0, 1]) < 0.03
    assert abs(np.corrcoef(x[:-1].ravel(), x[1:].ravel())[0, 1]) < 0.03
    assert x.min() >= 0 and x.max() < 1
