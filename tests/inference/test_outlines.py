"""Outlines at the resolution of the image, on shapes whose outline is known."""

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional as F

from cutslots.inference import outlines
from cutslots.inference.outlines import BoundingBox, find_box, log_odds, sample, sharpen_outlines
from cutslots.inference.predictor import upsample_labels

SIZE, SMALL = 160, 16


def scene(*discs):
    """Discs (row, column, radius) on gray: the true labels, the image with noise, and masks of a sixteenth of it."""
    rows, columns = np.mgrid[:SIZE, :SIZE]
    labels, pixels = np.zeros((SIZE, SIZE), np.uint8), np.full((SIZE, SIZE, 3), 90.0)
    for k, (row, column, radius) in enumerate(discs, 1):
        inside = (rows - row) ** 2 + (columns - column) ** 2 < radius**2
        labels[inside] = k
        pixels[inside] = np.eye(3)[k % 3] * 150 + 60
    pixels += 8 * np.random.default_rng(0).standard_normal(pixels.shape)
    one_hot = F.one_hot(torch.from_numpy(labels).long(), len(discs) + 2).movedim(-1, 0).float()  # one slot is empty
    blurred = F.avg_pool2d(F.avg_pool2d(one_hot, SIZE // SMALL), 3, 1, 1, count_include_pad=False)
    return labels, Image.fromarray(pixels.clip(0, 255).astype(np.uint8)), blurred / blurred.sum(0)


def iou(a, b):
    return (a & b).sum() / (a | b).sum()


@pytest.mark.parametrize("max_pixels", [outlines.MAX_PIXELS, 3_000], ids=["own resolution", "lower resolution"])
def test_outlines_become_exact(max_pixels, monkeypatch):
    monkeypatch.setattr(outlines, "MAX_PIXELS", max_pixels)
    true, image, masks = scene((45, 50, 22), (110, 100, 30))
    upsampled, _ = upsample_labels(masks, (SIZE, SIZE))
    sharp = sharpen_outlines(upsampled, masks, image, 0)
    for k in (1, 2):
        assert iou(upsampled == k, true == k) < 0.94
        assert iou(sharp == k, true == k) > (0.99 if max_pixels > 3_000 else 0.96)
    assert sharp.dtype == np.uint8 and set(np.unique(sharp)) == {0, 1, 2}


def test_objects_that_touch_share_one_outline():
    true, image, masks = scene((80, 60, 30), (80, 100, 30))
    sharp = sharpen_outlines(upsample_labels(masks, (SIZE, SIZE))[0], masks, image, 0)
    assert (sharp == true).mean() > 0.995


def test_images_that_are_not_square():
    true, image, masks = scene((45, 50, 22))
    wide = image.resize((2 * SIZE, SIZE), Image.Resampling.NEAREST)
    upsampled, _ = upsample_labels(masks, (SIZE, 2 * SIZE))
    sharp = sharpen_outlines(upsampled, masks, wide, 0)
    assert iou(sharp == 1, np.repeat(true, 2, 1) == 1) > 0.98


def test_huge_images_keep_their_labels(monkeypatch):
    monkeypatch.setattr(outlines, "MAX_IMAGE_PIXELS", SIZE * SIZE - 1)
    _, image, masks = scene((45, 50, 22))
    upsampled, _ = upsample_labels(masks, (SIZE, SIZE))
    assert sharpen_outlines(upsampled, masks, image, 0) is upsampled


def test_background_alone_stays_as_it_is():
    labels, image = np.zeros((40, 60), np.uint8), Image.new("RGB", (60, 40))
    assert np.array_equal(sharpen_outlines(labels, torch.ones(1, 4, 6), image, 0), labels)


def test_a_single_slot_that_is_not_the_background():
    labels, image = np.zeros((40, 60), np.uint8), Image.new("RGB", (60, 40))
    assert np.array_equal(sharpen_outlines(labels, torch.ones(1, 4, 6), image, 5), labels)


def test_boxes_have_a_margin_inside_the_image():
    mask = np.zeros((100, 80), bool)
    mask[30:41, 2:10] = True
    assert find_box(mask, (5.0, 4.0)) == BoundingBox(20, 51, 0, 18)
    assert find_box(np.ones((6, 7), bool), (5.0, 4.0)) == BoundingBox(0, 6, 0, 7)


def test_odds_are_those_against_the_best_other_slot():
    masks = torch.tensor([0.5, 0.2, 0.3]).log()[:, None, None]
    assert log_odds(masks, 0).exp().item() == pytest.approx(0.5 / 0.3)
    assert log_odds(masks, 1).exp().item() == pytest.approx(0.2 / 0.5)


def test_samples_of_a_box_are_a_crop_of_the_upsampled_mask():
    x, box = torch.rand(5, 7), BoundingBox(3, 20, 6, 31)
    whole = F.interpolate(x[None, None], (30, 42), mode="bilinear", align_corners=False)[0, 0]
    torch.testing.assert_close(sample(x, (30, 42), box, box.shape), whole[box.slices], rtol=0, atol=1e-5)
