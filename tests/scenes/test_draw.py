import numpy as np
import pytest

from cutslots.scenes import draw, materials, shapes
from cutslots.scenes.draw import FAMILIES, SPLITS

STILL = [name for name, family in FAMILIES.items() if family.frames == 1]


def fields(world, row):
    return {name: value[row] for name, value in vars(world).items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_scene_is_its_address(family):
    """Whatever is drawn with it, in whatever order."""
    together = draw.draw(family, "train", 3, [9, 4, 11])
    for row, index in enumerate((9, 4, 11)):
        alone = draw.draw(family, "train", 3, [index])
        for name, value in fields(alone, 0).items():
            assert np.array_equal(value, fields(together, row)[name]), name


def test_splits_seeds_and_families_share_nothing():
    places = set()
    for family in ("plain", "textured", "camo"):
        for split in SPLITS:
            for seed in (0, 1):
                world = draw.draw(family, split, seed, np.arange(20))
                places |= {tuple(p) for p in world.position[:, 0, 0]}
    assert len(places) == 3 * 3 * 2 * 20


@pytest.mark.parametrize("family", STILL)
def test_nothing_stands_inside_another(family):
    world = draw.draw(family, "test", 0, np.arange(60))
    for b in range(60):
        n = world.count[b]
        assert 3 <= n <= 10
        place, size = world.position[b, 0, :n], world.size[b, :n]
        radius = shapes.GROUND_RADIUS[world.shape[b, :n]] * size
        gap = np.hypot(*(place[:, None, :2] - place[None, :, :2]).transpose(2, 0, 1))
        np.fill_diagonal(gap, np.inf)
        assert (gap > radius[:, None] + radius).all()
        assert np.allclose(place[:, 2], shapes.REST_HEIGHT[world.shape[b, :n]] * size)


def test_counts_are_even():
    """Crowded scenes are redrawn more often, but not given up for emptier ones."""
    count = draw.draw("textured", "train", 0, np.arange(400)).count
    shares = np.bincount(count, minlength=11)[3:] / 400
    assert shares.min() > 0.07 and shares.max() < 0.19


def test_what_each_family_draws_from():
    kinds, made_of = {}, {}
    for family in FAMILIES:
        world = draw.draw(family, "train", 0, np.arange(6 if family == "moving" else 60))
        held = np.arange(world.shape.shape[1]) < world.count[:, None]
        kinds[family] = {shapes.NAMES[s] for s in world.shape[held]}
        made_of[family] = {materials.NAMES[m] for m in world.material[:, 1:][held]}
        if family == "camo":
            assert (world.material == world.material[:, :1]).all() and (world.paint == world.paint[:, :1]).all()
    assert kinds["plain"] == {"sphere", "cube", "cylinder"} and made_of["plain"] == {"rubber", "metal"}
    assert len(kinds["textured"]) >= 4 and len(made_of["textured"]) >= 12
    assert len(kinds["ood"]) >= 4 and len(made_of["ood"]) >= 6
    for other in set(FAMILIES) - {"ood"}:
        assert not kinds["ood"] & kinds[other] and not made_of["ood"] & made_of[other]


def test_the_dice_are_fair():
    dice = draw.Dice("plain", "train", 0, np.arange(2000), np.zeros(2000, dtype=int))
    x, y = dice("a", 10), dice("b", 10)
    assert abs(x.mean() - 0.5) < 0.01 and abs(x.var() - 1 / 12) < 0.005
    assert abs(np.corrcoef(x.ravel(), y.ravel())[0, 1]) < 0.03
    assert abs(np.corrcoef(x[:-1].ravel(), x[1:].ravel())[0, 1]) < 0.03
    assert x.min() >= 0 and x.max() < 1
