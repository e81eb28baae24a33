import pytest
import torch

from cutslots.data import memory
from cutslots.data.memory import InMemory, load_to_memory
from cutslots.data.open import open_dataset
from cutslots.dataset import MemmapDataset
from tests.data.arrays import Arrays


@pytest.mark.parametrize("count", [1, 32, 33])
def test_images_in_memory_are_the_same(count):
    data = open_dataset("plain", "val", 16, count)
    loaded = load_to_memory(data, quiet=True)
    assert isinstance(loaded, InMemory) and len(loaded) == count
    indices = [count - 1, 0, count // 2]
    for one, other in zip(loaded.get_batch(indices), data.get_batch(indices), strict=True):
        assert torch.equal(one, other) and one.dtype == torch.uint8
    with pytest.raises(IndexError, match=f"{count} is out of range"):
        loaded.get_batch([count])


@pytest.mark.parametrize("frames", [1, 3])
def test_images_that_are_not_square(frames):
    data = Arrays(5, frames)
    loaded = load_to_memory(data, quiet=True)
    assert isinstance(loaded, InMemory) and loaded.image_size == (6, 10) and loaded.frames == frames
    at = [4, 0], [frames - 1, 0]
    for one, other in zip(loaded.get_frames(*at), data.get_frames(*at), strict=True):
        assert torch.equal(one, other)


def test_has_masks_is_kept():
    data = Arrays(2)
    assert load_to_memory(data, quiet=True).has_masks
    data.has_masks = False
    assert not load_to_memory(data, quiet=True).has_masks


def test_dataset_that_does_not_fit_stays_as_it_is(monkeypatch):
    data = Arrays(3)
    monkeypatch.setattr(memory, "MAX_MEMORY", 3 * 4 * 6 * 10)
    assert isinstance(load_to_memory(data, quiet=True), InMemory)
    monkeypatch.setattr(memory, "MAX_MEMORY", 3 * 4 * 6 * 10 - 1)
    assert load_to_memory(data, quiet=True) is data


def test_mapped_files_stay_as_they_are():
    data = MemmapDataset(Arrays(2, 3).image.numpy(), Arrays(2, 3).mask.numpy())
    assert load_to_memory(data, quiet=True) is data


def test_empty_dataset_is_refused():
    with pytest.raises(ValueError, match=r"^validation: there are no images$"):
        load_to_memory(open_dataset("plain", "val", 16, 0), title="validation")
