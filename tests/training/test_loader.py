"""The images of each step: their order, flips, the texture ramp, low contrast, the shares of processes."""

import time
import types

import numpy as np
import pytest
import torch

from cutslots.dataset import Dataset, Sample
from cutslots.scenes import Scenes
from cutslots.training.data import Curriculum
from cutslots.training.loader import TrainLoader, select_images
from cutslots.training.schedules import texture_range
from tests.small_runs import small


def process(rank=0, world_size=1, device="cpu"):
    """Stands in for Fabric."""
    return types.SimpleNamespace(world_size=world_size, global_rank=rank, device=device)


# ---------------------------------------------------------------------------------------------------------------- order


def test_every_epoch_takes_every_image_once_in_another_order():
    data, config = Scenes("plain", size=16, count=10), small(None, batch_size=4)
    loader = TrainLoader(data, config, process(), 0)
    batches = [list(loader.indices(step)) for step in range(10)]
    flat = np.concatenate(batches).tolist()
    epochs = [flat[i : i + 10] for i in range(0, 40, 10)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs) and len(set(map(tuple, epochs))) == 4
    assert list(loader.indices(7)) == batches[7], "the order depends on the step alone"


def test_processes_share_the_images_of_a_step():
    data, config = Scenes("plain", size=16, count=10), small(None, batch_size=4)
    loaders = [TrainLoader(data, config, process(*of), 0) for of in ((0, 1), (0, 2), (1, 2))]
    for step in range(10):
        one, first, second = (list(loader.indices(step)) for loader in loaders)
        assert one == first + second


def test_the_order_is_the_same_in_every_version():
    """So that a run resumes with the images it would have seen: NumPy's permutation for (seed, epoch)."""
    loader = TrainLoader(Scenes("plain", size=16, count=10), small(None, batch_size=5, seed=3), process(), 0)
    for epoch in range(3):
        expected = np.random.default_rng([3, epoch]).permutation(10).tolist()
        assert [*loader.indices(2 * epoch), *loader.indices(2 * epoch + 1)] == expected


def test_an_epoch_is_shuffled_once():
    loader = TrainLoader(Scenes("plain", size=16, count=10), small(None, batch_size=2), process(), 0)
    orders = []
    for step in range(10):
        loader.indices(step)
        orders.append(loader.order)
    assert all(order is orders[0] for order in orders[:5]) and all(order is orders[5] for order in orders[5:])
    assert orders[0] is not orders[5]


# ---------------------------------------------------------------------------------------------------------------- flips


class RandomImages(Dataset):
    """Images, or clips, that differ from their mirror images."""

    def __init__(self, *shape):
        self.image = torch.randint(0, 256, shape, dtype=torch.uint8)
        self.image_size = shape[-2:]

    def __len__(self):
        return len(self.image)

    def get_batch(self, indices, device="cpu"):
        return Sample(self.image[torch.as_tensor(indices)], torch.empty(0))


def flip_loader(data, step=0, **changes):
    config = small(None, batch_size=8, **({"horizontal_flips": True} | changes))
    return TrainLoader(data, config, process(), step)


def flipped(loader, step):
    """Return which images of a step are flipped; the others must be unchanged."""
    originals = loader.data.get_batch(loader.indices(step)).image
    found = []
    for image, original in zip(loader._prepare(step), originals, strict=True):
        assert torch.equal(image, original) != torch.equal(image, original.flip(-1))
        found.append(not torch.equal(image, original))
    return found


@pytest.mark.parametrize("shape", [(3, 4, 4), (2, 3, 4, 4)], ids=["images", "clips"])
def test_half_of_the_images_are_flipped(shape):
    data = RandomImages(20, *shape)
    loader = flip_loader(data)
    found = [flipped(loader, step) for step in range(50)]
    assert 160 < sum(map(sum, found)) < 240, "of 400"
    assert len(set(map(tuple, found))) > 40, "not the same ones at every step"
    later, other = flip_loader(data, step=30), flip_loader(data, seed=1)
    assert [flipped(later, step) for step in range(50)] == found, "flips depend on the step alone"
    assert [flipped(other, step) for step in range(50)] != found, "and on the seed"


def test_flips_are_the_same_in_every_version():
    """NumPy's random numbers for (seed, step) and stream 1."""
    loader = flip_loader(RandomImages(20, 3, 4, 4), seed=5)
    for step in range(10):
        assert flipped(loader, step) == (np.random.default_rng([5, step, 1]).random(8) < 0.5).tolist()


def test_nothing_is_flipped_by_default():
    loader = flip_loader(RandomImages(20, 3, 4, 4), horizontal_flips=False)
    assert not any(any(flipped(loader, step)) for step in range(5))


# -------------------------------------------------------------------------------------------------------- augmentations

STRONG = {
    "min_crop_area": 0.4,
    "brightness_jitter": 0.4,
    "contrast_jitter": 0.3,
    "saturation_jitter": 0.2,
    "hue_jitter": 0.1,
    "blur_probability": 0.5,
    "noise_sigma": 0.1,
}


def augmenting_loader(data, rank=0, world_size=1, **changes):
    config = small(None, batch_size=4, **(STRONG | changes))
    return TrainLoader(data, config, process(rank, world_size), 0)


@pytest.mark.parametrize("shape", [(3, 16, 16), (2, 3, 16, 16)], ids=["images", "clips"])
def test_augmentations_depend_on_the_seed_and_the_step_alone(shape):
    data = RandomImages(8, *shape)
    loader, again, other = (augmenting_loader(data, seed=seed) for seed in (0, 0, 1))
    again._prepare(0)
    images = loader._prepare(7)
    assert images.dtype == torch.uint8 and images.shape == (4, *shape)
    assert torch.equal(again._prepare(7), images)
    original = data.get_batch(loader.indices(7)).image
    assert not any(torch.equal(a, b) for a, b in zip(images, original, strict=True))
    assert not torch.equal(other._prepare(7), images)


def test_processes_augment_their_share_as_one_process_does():
    data = RandomImages(8, 3, 16, 16)
    one, first, second = (augmenting_loader(data, *of)._prepare(5) for of in ((0, 1), (0, 2), (1, 2)))
    assert torch.equal(torch.cat([first, second]), one)


@pytest.mark.parametrize("option", STRONG)
def test_each_augmentation_has_an_option_of_its_own(option):
    data = RandomImages(8, 3, 64, 64)
    off = {name: 1.0 if name == "min_crop_area" else 0.0 for name in STRONG}
    as_is, changed = (augmenting_loader(data, **(off | on)) for on in ({}, {option: STRONG[option]}))
    originals = [data.get_batch(as_is.indices(step)).image for step in range(5)]
    assert all(torch.equal(as_is._prepare(step), image) for step, image in enumerate(originals))
    found = [not torch.equal(changed._prepare(step), image) for step, image in enumerate(originals)]
    assert all(found) if option != "blur_probability" else any(found), "half of the images are blurred, some hardly"


def test_augmentations_are_the_same_in_every_version():
    """NumPy's random numbers for (seed, step) and stream 10."""
    data = RandomImages(8, 3, 4, 4)
    off = {name: 1.0 if name == "min_crop_area" else 0.0 for name in STRONG}
    loader = augmenting_loader(data, **(off | {"brightness_jitter": 0.5}), seed=5)
    for step in range(3):
        factor = 1 + 0.5 * (2 * np.random.default_rng([5, step, 10]).random((4, 1)) - 1)
        original = data.get_batch(loader.indices(step)).image.double()
        expected = (original * torch.from_numpy(factor).view(4, 1, 1, 1)).clamp(max=255)
        assert (loader._prepare(step).double() - expected).abs().max() < 0.51


def test_the_thread_prepares_the_images_of_each_step():
    loader = flip_loader(RandomImages(20, 3, 4, 4), step=3)
    with loader:
        images = [next(loader) for _ in range(4)]
    for step, image in enumerate(images, start=3):
        assert torch.equal(image, loader._prepare(step))


def test_the_thread_has_ended_after_training():
    """So that it does not use a dataset that is closed."""

    class Slow(RandomImages):
        def get_batch(self, indices, device="cpu"):
            time.sleep(0.05)
            return super().get_batch(indices, device)

    loader = flip_loader(Slow(20, 3, 4, 4))
    with loader:
        next(loader)
    assert loader.ahead.done() and loader.step == 1


def test_images_are_selected_one_by_one():
    a, b = torch.zeros(3, 2, 3, 4, 4), torch.ones(3, 2, 3, 4, 4)
    selected = select_images(np.array([True, False, True]), a, b)
    assert selected.flatten(1).unique(dim=1).tolist() == [[0], [1], [0]] and selected.shape == a.shape


# ----------------------------------------------------------------------------------------------------------- curriculum


class Numbered(Dataset):
    """Images whose only value is their number, from `first` on."""

    image_size = (1, 1)

    def __init__(self, count, first):
        self.values = torch.arange(first, first + count)

    def __len__(self):
        return len(self.values)

    def get_batch(self, indices, device="cpu"):
        values = self.values[torch.as_tensor(indices)].view(-1, 1, 1, 1)
        return Sample(values.to(torch.device(device)), torch.empty(0))


RAMP = {"data__texture_ramp_start": 10, "data__texture_ramp_end": 30}
LOW_CONTRAST = {"data__low_contrast": 0.25, "data__low_contrast_start": 40}


def curriculum_loader(rank=0, world_size=1, device="cpu", **changes):
    """Images 0-99; those of the ramp are 1000-1999, those of low contrast 5000-5049."""
    config = small(None, **{"batch_size": 8, "data": "textured", **RAMP, **LOW_CONTRAST, **changes})
    scenes = Curriculum(config.data, Numbered(1000, 1000), Numbered(50, 5000))
    return TrainLoader(Numbered(100, 0), config, process(rank, world_size, device), 0, scenes)


@pytest.fixture(scope="module")
def prepared():
    loader = curriculum_loader()
    return [loader._prepare(step).flatten().tolist() for step in range(240)]


def test_textures_are_as_strong_as_the_step_asks_for(prepared):
    data = curriculum_loader().config.data
    for step in range(30):
        low, high = texture_range(data, step)
        assert all(1000 * low - 1 < value - 1000 <= 1000 * high for value in prepared[step]), step


def test_after_the_ramp_images_are_those_of_the_dataset(prepared):
    loader = curriculum_loader()
    assert all(set(prepared[step]) == set(loader.indices(step)) for step in range(30, 40))


def test_a_share_of_images_has_low_contrast(prepared):
    counts = [sum(value >= 5000 for value in values) for values in prepared[40:]]
    assert 340 < sum(counts) < 460 and max(counts) < 8, "a quarter of 1,600"
    loader = curriculum_loader()
    for step in range(40, 240):
        pairs = zip(prepared[step], loader.indices(step), strict=True)
        assert all(value == index for value, index in pairs if value < 5000), "the others are those of the dataset"


def test_every_scene_of_low_contrast_is_used(prepared):
    assert {value for values in prepared for value in values if value >= 5000} == set(range(5000, 5050))


def test_low_contrast_starts_with_its_step():
    loader = curriculum_loader(data__low_contrast=1.0)
    assert max(loader._prepare(39).flatten().tolist()) < 100
    assert min(loader._prepare(40).flatten().tolist()) >= 5000


def test_the_curriculum_is_the_same_in_every_version(prepared):
    """NumPy's random numbers for (seed, step) and stream 7, textures, or 8, low contrast."""
    low, high = texture_range(curriculum_loader().config.data, 20)
    strength = np.random.default_rng([0, 20, 7]).uniform(low, high, 8)
    assert prepared[20] == [1000 + int(1000 * each) for each in strength]
    random = np.random.default_rng([0, 60, 8])
    scenes, share = random.integers(0, 50, 8), random.random(8)
    indices = curriculum_loader().indices(60)
    expected = [5000 + scenes[i] if share[i] < 0.25 else indices[i] for i in range(8)]
    assert prepared[60] == expected and max(expected) >= 5000


@pytest.mark.parametrize("step", [5, 35, 60])
def test_images_are_made_on_the_device(step):
    assert curriculum_loader(device="meta", horizontal_flips=True)._prepare(step).device.type == "meta"


def test_the_curriculum_depends_on_seed_and_step_alone(prepared):
    assert len({tuple(values) for values in prepared}) == 240, "every step has other images"
    assert curriculum_loader()._prepare(55).flatten().tolist() == prepared[55]
    other = curriculum_loader(seed=1)
    assert [other._prepare(step).flatten().tolist() for step in range(240)] != prepared


def test_processes_share_the_images_of_the_curriculum(prepared):
    loaders = [curriculum_loader(rank, 2) for rank in (0, 1)]
    for step in (5, 25, 35, 60):
        assert torch.cat([loader._prepare(step) for loader in loaders]).flatten().tolist() == prepared[step], step


# ------------------------------------------------------------------------------------------------------- mixed datasets


def mixing_loader(rank=0, world_size=1, device="cpu", **changes):
    """Images 0-99, mixed with 1000-1049."""
    config = small(None, **{"batch_size": 8, "mix_data": "plain", **changes})
    mixed = Numbered(50, 1000)
    return TrainLoader(Numbered(100, 0), config, process(rank, world_size, device), 0, mixed=mixed)


def test_a_fraction_of_images_is_of_the_second_dataset():
    """NumPy's random numbers for (seed, step) and stream 16."""
    loader, values = mixing_loader(mix_fraction=0.3), []
    for step in range(200):
        random = np.random.default_rng([0, step, 16])
        others, share = 1000 + random.integers(0, 50, 8), random.random(8)
        expected = np.where(share < 0.3, others, loader.indices(step)).tolist()
        values += (found := loader._prepare(step).flatten().tolist())
        assert found == expected, step
    assert 420 < sum(value >= 1000 for value in values) < 540, "0.3 of 1,600"
    assert {value for value in values if value >= 1000} == set(range(1000, 1050))


def test_all_or_none_of_the_images_are_of_the_second_dataset():
    assert min(mixing_loader(mix_fraction=1.0)._prepare(3).flatten().tolist()) >= 1000
    assert max(mixing_loader(mix_fraction=0.0)._prepare(3).flatten().tolist()) < 100


def test_processes_share_mixed_batches():
    loaders = [mixing_loader(rank, 2) for rank in (0, 1)]
    for step in range(5):
        assert torch.equal(torch.cat([loader._prepare(step) for loader in loaders]), mixing_loader()._prepare(step))


def test_images_are_mixed_before_they_are_flipped():
    """Images of both datasets are flipped: with probability 1/2, so some of each in 50 steps."""
    config = small(None, batch_size=8, mix_data="plain", horizontal_flips=True)
    loader = TrainLoader(Ramps(0), config, process(0, 1, "cpu"), 0, mixed=Ramps(10))
    found = set()
    for step in range(50):
        rows = loader._prepare(step)[:, 0, 0]
        found |= {(bool(row[0] >= 10), bool(row[0] > row[-1])) for row in rows}
    assert found == {(False, False), (False, True), (True, False), (True, True)}


class Ramps(Dataset):
    """Images whose values rise from left to right, from `first` on."""

    image_size = (1, 4)

    def __init__(self, first):
        self.first = first

    def __len__(self):
        return 20

    def get_batch(self, indices, device="cpu"):
        row = torch.arange(self.first, self.first + 4)
        return Sample(row.expand(len(indices), 1, 1, 4), torch.empty(0))
