import numpy as np
import pytest
import torch

from cutslots.dataset import Sample
from cutslots.viz.contact_sheet import contact_sheet
from cutslots.viz.palette import PALETTE


class RandomData:
    """A dataset that has no more than a contact sheet needs."""

    has_masks, ignore_label = True, None

    def __init__(self, count, image_size, frames=1):
        self.image_size, self.frames = image_size, frames
        shape = (count, *([frames] if frames > 1 else []))
        self.images = torch.randint(0, 256, (*shape, 3, *image_size), dtype=torch.uint8)
        self.masks = torch.randint(0, 5, (*shape, *image_size), dtype=torch.uint8)

    def __len__(self):
        return len(self.images)

    def get_batch(self, indices, device="cpu"):
        return Sample(self.images[indices], self.masks[indices])


@pytest.mark.parametrize("height, width", [(5, 5), (4, 9), (7, 3)])
@pytest.mark.parametrize("count, shown, rows, columns", [(3, 3, 1, 3), (10, 10, 2, 8), (40, 16, 2, 8)])
def test_images_are_above_their_masks(height, width, count, shown, rows, columns):
    data = RandomData(count, (height, width))
    sheet = np.asarray(contact_sheet(data))
    assert sheet.shape == (rows * 2 * (height + 2) - 2, columns * (width + 2) - 2, 3)
    for i in range(shown):
        y, x = i // columns * 2 * (height + 2), i % columns * (width + 2)
        assert np.array_equal(sheet[y : y + height, x : x + width], data.images[i].permute(1, 2, 0))
        below = sheet[y + height + 2 : y + 2 * height + 2, x : x + width]
        assert np.array_equal(below, PALETTE[data.masks[i].numpy()])


def test_a_row_shows_frames_of_one_video():
    data = RandomData(3, (4, 6), frames=24)
    sheet = np.asarray(contact_sheet(data))
    assert sheet.shape == (2 * 2 * 6 - 2, 8 * 8 - 2, 3)
    for video in range(2):
        top = video * 12
        assert np.array_equal(sheet[top : top + 4, :6], data.images[video, 0].permute(1, 2, 0))
        assert np.array_equal(sheet[top : top + 4, -6:], data.images[video, 23].permute(1, 2, 0))


def test_an_empty_dataset_gives_a_white_image():
    sheet = contact_sheet(RandomData(0, (4, 6)))
    assert sheet.size == (6, 4) and (np.asarray(sheet) == 255).all()


def test_masks_of_another_size_are_shown_at_the_size_of_images():
    data = RandomData(2, (8, 12))
    data.masks, data.ignore_label = data.masks.repeat_interleave(3, 1).repeat_interleave(2, 2), 4
    other = RandomData(2, (8, 12))
    other.images, other.masks = data.images, torch.where(data.masks[:, ::3, ::2] == 4, 0, data.masks[:, ::3, ::2])
    assert np.array_equal(np.asarray(contact_sheet(data)), np.asarray(contact_sheet(other)))
