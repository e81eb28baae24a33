"""Scenes with one property changed."""

import numpy as np
import pytest
import torch

from cutslots import load
from cutslots.scenes import Scenes, render
from cutslots.scenes.sample import sample_scenes
from experiments import transfer
from experiments.transfer import CHANGES, constants, mirrored_light


@pytest.fixture(scope="module")
def scenes():
    return sample_scenes("textured", "val", 0, np.arange(2))


def make(scenes, change, size=32):
    with constants(change.constants):
        rendered = render.render(change.scene(scenes), (size, size))
    return change.image(rendered.image[:, 0]), rendered.mask[:, 0]


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_gives_images(scenes, name, monkeypatch):
    monkeypatch.setattr(transfer, "SIZE", 32)
    image, mask = make(scenes, CHANGES[name])
    assert image.shape == (2, 3, 32, 32) and image.dtype == torch.uint8 and mask.shape == (2, 32, 32)
    original = Scenes("textured", "val", 32).get_batch([0, 1]).image
    assert torch.equal(image, original) == (name == "as they are")


def test_mirroring_the_light_twice_changes_nothing(scenes):
    once, twice = mirrored_light(scenes), mirrored_light(mirrored_light(scenes))
    assert not torch.allclose(once.key_light, scenes.key_light)
    torch.testing.assert_close(twice.key_light, scenes.key_light)
    centre = (scenes.target - scenes.camera)[:, :2]
    across = torch.stack([centre[:, 1], -centre[:, 0]], 1)
    before, after = (((x.key_light - scenes.camera)[:, :2] * across).sum(1) for x in (scenes, once))
    torch.testing.assert_close(after, -before)


def test_the_renderer_is_as_before(scenes):
    before = render.LIGHT_RADIUS
    make(scenes, CHANGES["shadows: hard"])
    assert before == render.LIGHT_RADIUS


def test_scores(scenes, monkeypatch):
    monkeypatch.setattr(transfer, "SIZE", 64)
    change = transfer.Change(size=64)
    found = transfer.score(load("tiny-64"), scenes, change)
    assert set(found) == {"ari_fg", "miou", "refined_ari_fg", "refined_miou"}
    assert all(-1 <= value <= 1 for value in found.values())
