"""Scenes that never repeat: each step has those of its own indices, whatever the blocks in which they are rendered."""

import threading
import types

import numpy as np
import pytest
import torch

from cutslots.scenes import Scenes
from cutslots.scenes.dataset import MAX_BLEND
from cutslots.scenes.export import generate
from cutslots.scenes.render import render
from cutslots.scenes.sample import sample_scenes
from cutslots.training import endless
from cutslots.training.endless import EndlessLoader
from cutslots.training.loader import LOW_CONTRAST, MIXED, TEXTURE_STRENGTH
from cutslots.training.loop import train
from cutslots.training.schedules import texture_range
from tests.conftest import DEVICES
from tests.small_runs import lines, small, weights


def config(**changes):
    return small(None, num_images="endless", batch_size=4, seed=5, **{"data": "plain"} | changes)


def fabric(device="cpu", rank=0, world_size=1):
    return types.SimpleNamespace(device=torch.device(device), global_rank=rank, world_size=world_size)


def steps(config, first=0, count=3, **where):
    loader = EndlessLoader(config, fabric(**where), first)
    with loader:
        return [next(loader) for _ in range(count)]


@pytest.mark.parametrize("device", DEVICES)
def test_images_are_those_of_the_training_split(device):
    expected = Scenes("plain", "train", 16, seed=5, count=12).get_batch(np.arange(12), device).image
    assert torch.equal(torch.cat(steps(config(), device=device)), expected)


@pytest.mark.parametrize("size", [1, 4, 9, 64])
def test_blocks_and_the_first_step_change_nothing(size, monkeypatch):
    expected = steps(config(), 0, 7)
    monkeypatch.setattr(endless, "IMAGES_PER_BLOCK", {"cpu": size})
    for first in (0, 3, 5):
        for image, other in zip(steps(config(), first, 7 - first), expected[first:], strict=True):
            assert torch.equal(image, other)


def test_processes_share_a_batch():
    whole = steps(config())
    parts = [steps(config(), rank=rank, world_size=2) for rank in (0, 1)]
    for step, image in enumerate(whole):
        assert torch.equal(torch.cat([part[step] for part in parts]), image)


def test_scenes_never_repeat_and_differ_between_seeds():
    images = torch.cat([*steps(config(), 0, 20), *steps(small(None, num_images="endless", seed=6), 0, 5)])
    assert len(images.flatten(1).unique(dim=0)) == len(images) == 100


def test_few_scenes_repeat_before_the_ramp():
    ramp = {"data": "textured", "data__texture_ramp_start": 5, "data__texture_ramp_end": 6}
    loader = EndlessLoader(config(**ramp, data__num_flat_scenes=6), fabric(), 0)
    assert [loader.indices(step).tolist() for step in range(7)] == [
        [0, 1, 2, 3],
        [4, 5, 0, 1],
        [2, 3, 4, 5],
        [0, 1, 2, 3],
        [4, 5, 0, 1],
        [20, 21, 22, 23],
        [24, 25, 26, 27],
    ]
    parts = [EndlessLoader(loader.config, fabric(rank=rank, world_size=2), 0).indices(1) for rank in (0, 1)]
    assert np.concatenate(parts).tolist() == [4, 5, 0, 1]


@pytest.mark.parametrize(
    "changes", [{"data": "plain"}, {"data": "textured", "data__num_flat_scenes": 6, "data__texture_ramp_start": 5}]
)
def test_none_repeat_without_a_ramp(changes):
    loader = EndlessLoader(config(**changes), fabric(), 0)
    assert loader.indices(3).tolist() == [12, 13, 14, 15]


def test_images_of_repeated_scenes_have_the_textures_of_their_step():
    ramp = {"data": "textured", "data__texture_ramp_start": 4, "data__texture_ramp_end": 6}
    run = config(**ramp, data__num_flat_scenes=6)
    for step, image in enumerate(steps(run, 0, 4)):
        contents = sample_scenes("textured", "train", 5, np.arange(4 * step, 4 * step + 4) % 6)
        strength = np.random.default_rng([5, step, TEXTURE_STRENGTH]).uniform(*texture_range(run.data, step), 4)
        expected = render(contents.scale_textures(torch.from_numpy(strength)), (16, 16)).image[:, 0]
        assert torch.equal(image, expected), step


def test_textures_follow_the_ramp():
    ramp = {"data": "textured", "data__texture_ramp_start": 2, "data__texture_ramp_end": 6}
    run = config(**ramp)
    for step, image in enumerate(steps(run, 0, 8)):
        contents = sample_scenes("textured", "train", 5, np.arange(4 * step, 4 * step + 4))
        if step < 6:
            random = np.random.default_rng([5, step, TEXTURE_STRENGTH])
            strength = random.uniform(*texture_range(run.data, step), 4)
            contents = contents.scale_textures(torch.from_numpy(strength))
        assert torch.equal(image, render(contents, (16, 16)).image[:, 0]), step


def test_a_share_of_scenes_has_low_contrast():
    options = {"texture_ramp_end": 0, "texture_ramp_start": 0, "low_contrast": 0.5, "low_contrast_start": 2}
    run = config(data="textured", **{f"data__{name}": value for name, value in options.items()})
    for step, image in enumerate(steps(run, 0, 6)):
        contents = sample_scenes("textured", "train", 5, np.arange(4 * step, 4 * step + 4))
        if step >= 2:
            random = np.random.default_rng([5, step, LOW_CONTRAST])
            blend = MAX_BLEND * random.random(4)
            blend[random.random(4) >= 0.5] = 0
            contents = contents.blend_into_ground(torch.from_numpy(blend))
        assert torch.equal(image, render(contents, (16, 16)).image[:, 0]), step


def test_another_dataset_is_mixed_in():
    """Where the random numbers of the step ask for it; the other images are the scenes of the step."""
    run, other = config(mix_data="textured", mix_fraction=0.5), Scenes("textured", "train", 16, count=9)
    loader = EndlessLoader(run, fabric(), 0, other)
    with loader:
        mixed = [next(loader) for _ in range(4)]
    for step, (image, scenes) in enumerate(zip(mixed, steps(config(), 0, 4), strict=True)):
        random = np.random.default_rng([5, step, MIXED])
        others = other.get_batch(random.integers(0, 9, 4)).image
        replaced = torch.from_numpy(random.random(4) < 0.5)
        assert torch.equal(image, torch.where(replaced[:, None, None, None], others, scenes)), step


def test_a_run_on_endless_scenes_resumes(tmp_path):
    """With images of another dataset mixed in."""
    generate(Scenes("plain", "train", 16, count=3), tmp_path / "other" / "train", quiet=True)
    options = {"num_images": "endless", "mix_data": str(tmp_path / "other"), "mix_fraction": 0.5}
    expected = weights(train(small(tmp_path / "whole", max_steps=6, **options)))
    train(small(tmp_path / "parts", max_steps=3, **options))
    folder = train(small(tmp_path / "parts", max_steps=6, **options))
    assert weights(folder) == expected and any("loss" in line for line in lines(folder))


@pytest.mark.parametrize("data", ["moving", "folder"])
def test_other_data_end(tmp_path, data):
    (tmp_path / "images").mkdir()
    options = {"data": "moving"} if data == "moving" else {"data": str(tmp_path / "images")}
    with pytest.raises(ValueError, match=r"num_images is endless, but data is 'moving'; expected|images"):
        train(small(tmp_path / "run", num_images="endless", **options))
    assert not (tmp_path / "run").exists()


def test_a_paused_loader_renders_nothing_and_a_block_does_not_hold_up_the_steps_before_it(monkeypatch):
    """While the block after next is rendered, the images of this block are still prepared."""
    monkeypatch.setattr(endless, "IMAGES_PER_BLOCK", {"cpu": 8})
    loader, begun, go_on = EndlessLoader(config(), fabric(), 0), threading.Event(), threading.Event()
    contents = EndlessLoader._contents

    def slow(self, steps):
        if steps.start == 2:
            begun.set()
            assert go_on.wait(30)
        return contents(self, steps)

    monkeypatch.setattr(EndlessLoader, "_contents", slow)
    with loader:
        next(loader)
        assert begun.wait(30)
        next(loader)
        assert not loader.rendering.acquire(blocking=False), "the second block is still being rendered"
        go_on.set()
        with loader.paused():
            assert loader.rendering.locked() and loader.preparing.locked()
        next(loader)
