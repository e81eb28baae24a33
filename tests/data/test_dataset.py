import numpy as np
import pytest
import torch

from cutslots.dataset import Dataset, MemmapDataset, Sample, check_image_size, check_indices
from cutslots.scenes import Scenes
from tests.data.arrays import Arrays


class Minimal(Dataset):
    image_size = (4, 5)

    def __len__(self):
        return 3

    def get_batch(self, indices, device="cpu"):
        rows = torch.from_numpy(check_indices(indices, 3)).to(torch.uint8)
        return Sample(rows[:, None, None, None].expand(-1, 3, 4, 5), rows[:, None, None].expand(-1, 4, 5))


def same(sample, image, mask):
    return torch.equal(sample.image, torch.as_tensor(image)) and torch.equal(sample.mask, torch.as_tensor(mask))


def test_defaults_of_the_base_class():
    data = Minimal()
    assert (data.frames, data.has_masks, data.memory_mapped, data.image_size) == (1, True, False, (4, 5))
    assert data.name(7) == "000007" and data.as_videos() is data and data.without_masks() is data
    image, mask = data[2]
    assert image.shape == (3, 4, 5) and (image == 2).all() and (mask == 2).all()
    assert data[np.int64(1)].mask[0, 0] == 1
    with pytest.raises(TypeError):
        data[1.0]


def test_length_and_get_batch_are_required():
    class Incomplete(Dataset):
        def __len__(self):
            return 0

    with pytest.raises(TypeError, match="get_batch"):
        Incomplete()


@pytest.mark.parametrize("frames", [1, 4])
def test_default_get_frames_reads_each_video_once(frames):
    data = Arrays(5, frames)
    videos, times = [4, 0, 4, 2], [0, 0, frames - 1, frames // 2]
    image, mask = (x if frames > 1 else x[:, None] for x in (data.image, data.mask))
    assert same(data.get_frames(videos, times), image[videos, times], mask[videos, times]) and data.calls == 1
    with pytest.raises(IndexError, match=f"index {frames} is out of range; expected 0 to {frames - 1}"):
        data.get_frames([0], [frames])
    with pytest.raises(IndexError, match="index 5 is out of range; expected 0 to 4"):
        data.get_frames([5], [0])


@pytest.mark.parametrize("frames", [1, 4])
def test_memmap_dataset_of_images_that_are_not_square(frames):
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (5, frames, 3, 6, 10), dtype=np.uint8)
    masks = rng.integers(0, 4, (5, frames, 6, 10), dtype=np.uint8)
    data = MemmapDataset(images, masks)
    assert len(data) == 5 and data.frames == frames and data.image_size == (6, 10) and data.memory_mapped
    rows = [3, 0, 3]
    expected = (images[rows], masks[rows]) if frames > 1 else (images[rows, 0], masks[rows, 0])
    assert same(data.get_batch(rows), *expected)
    at = rows, [frames - 1, 0, 0]
    assert same(data.get_frames(*at), images[at], masks[at])


@pytest.mark.parametrize("family", ["plain", "moving"])
def test_scenes_have_the_protocol(family):
    data = Scenes(family, "val", 16, count=2)
    assert isinstance(data, Dataset) and data.has_masks and data.image_size == (16, 16)
    assert data.get_batch([0]).image.shape[1:-3] == ((data.frames,) if data.frames > 1 else ())
    assert data.name(1) == "000001" and data.as_videos() is data


@pytest.mark.parametrize("indices", [[2, 0], np.array([2, 0]), torch.tensor([2, 0]), (2, 0), [[2], [0]]])
def test_indices_of_any_type(indices):
    assert check_indices(indices, 3).tolist() == [2, 0] and check_indices(indices, 3).dtype == np.int64


def test_wrong_indices():
    assert check_indices([], 3).shape == (0,) and check_indices(range(0), 0).shape == (0,)
    for wrong in (-1, 3):
        with pytest.raises(IndexError, match=rf"^index {wrong} is out of range; expected 0 to 2$"):
            check_indices([0, wrong], 3)
    with pytest.raises(IndexError, match=r"^index 0 is out of range; expected none, there are no images$"):
        check_indices([0], 0)
    with pytest.raises(TypeError, match=r"^indices are of type float64; expected integers$"):
        check_indices([0.0], 3)


def test_image_size():
    assert check_image_size(8) == check_image_size((8, 8)) == check_image_size([8, 8]) == (8, 8)
    assert check_image_size((6, np.int64(10))) == (6, 10)
