"""Augmentations. References are Pillow, SciPy and formulas written out."""

import math

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance
from scipy.ndimage import gaussian_filter

from cutslots.training.augment import (
    MAX_SIGMA,
    BatchAugmentation,
    ViewAugmentation,
    adjust_brightness,
    adjust_contrast,
    adjust_saturation,
    augment_batch,
    augment_view,
    blur,
    camouflage,
    color_jitter,
    crop,
    crop_and_flip,
    luma,
    random_blur,
    random_boxes,
    random_crops,
    random_flips,
    random_grayscale,
    rotate_hue,
    to_boxes,
)

STRENGTH = ViewAugmentation()


@pytest.fixture
def image():
    return torch.rand(4, 3, 12, 20, generator=torch.Generator().manual_seed(0))


def to_pillow(image):
    return Image.fromarray((255 * image).round().to(torch.uint8).movedim(0, -1).numpy())


def from_pillow(image):
    return torch.from_numpy(np.array(image)).movedim(-1, 0) / 255


def quantized(image):
    return (255 * image).round() / 255


# ----------------------------------------------------------------------------------------------------------- geometry


def test_crops_are_those_of_pillow(image):
    height, width = image.shape[2:]
    boxes = torch.tensor([[0.0, 0.0, 1.0, 1.0], [0.25, 0.1, 0.5, 0.6], [0.0, 0.3, 0.4, 0.7], [0.55, 0.61, 0.45, 0.39]])
    views = crop(image, boxes)
    for x, view, (top, left, h, w) in zip(image, views, boxes.tolist(), strict=True):
        box = (left * width, top * height, (left + w) * width, (top + h) * height)
        for channel in range(3):
            source = Image.fromarray(x[channel].numpy())
            expected = np.array(source.resize((width, height), Image.Resampling.BILINEAR, box))
            torch.testing.assert_close(view[channel], torch.from_numpy(expected), rtol=0, atol=1e-5)
    torch.testing.assert_close(views[0], image[0])


def test_boxes_lie_in_the_image_and_have_the_areas_asked_for():
    torch.manual_seed(0)
    top, left, height, width = random_boxes(torch.zeros(4000, 3, 8, 8), 0.3).unbind(1)
    assert min(top.min(), left.min()) >= 0 and (top + height).max() <= 1 + 1e-6 and (left + width).max() <= 1 + 1e-6
    area, free = height * width, (height < 1) & (width < 1)  # a long box of a large area is cut off
    assert area[free].min() >= 0.3 - 1e-6 and area.max() <= 1
    assert torch.all((width / height)[free].log().abs() <= math.log(4 / 3) + 1e-5)
    assert (area < 0.4).any() and (area > 0.9).any() and (top > 0.3).any()


def test_full_boxes_change_nothing(image):
    boxes = torch.tensor([0.0, 0.0, 1.0, 1.0]).expand(4, -1)
    torch.testing.assert_close(crop(image, boxes), image)


def test_half_of_the_images_are_flipped():
    image = torch.rand(400, 3, 2, 6)
    torch.manual_seed(0)
    flipped = (random_flips(image) != image).flatten(1).any(1)
    assert random_flips(image).shape == image.shape and 150 < flipped.sum() < 250
    torch.manual_seed(0)
    view = random_flips(image)
    assert view[flipped].equal(image[flipped].flip(-1)) and view[~flipped].equal(image[~flipped])


# ------------------------------------------------------------------------------------------------------------- colors


@pytest.mark.parametrize(
    "adjust, enhance",
    [
        (adjust_brightness, ImageEnhance.Brightness),
        (adjust_contrast, ImageEnhance.Contrast),
        (adjust_saturation, ImageEnhance.Color),
    ],
)
def test_colors_change_as_in_pillow(image, adjust, enhance):
    factors = torch.tensor([0.0, 0.4, 1.0, 1.7])
    image = quantized(image)
    changed = adjust(image, factors)
    for x, y, factor in zip(image, changed, factors.tolist(), strict=True):
        expected = from_pillow(enhance(to_pillow(x)).enhance(factor))
        torch.testing.assert_close(y, expected, rtol=0, atol=2.1 / 255)  # Pillow rounds the mean and the result
    torch.testing.assert_close(changed[2], image[2])


def test_gray_is_that_of_pillow(image):
    image = quantized(image)
    gray = random_grayscale(image, 1.0)
    for x, y in zip(image, gray, strict=True):
        expected = torch.from_numpy(np.array(to_pillow(x).convert("L"))) / 255
        torch.testing.assert_close(y, expected.expand(3, -1, -1), rtol=0, atol=1.01 / 255)
    assert random_grayscale(image, 0.0).equal(image)


def test_hues_rotate_around_the_luma(image):
    muted = 0.5 + 0.1 * (image - 0.5)  # so that nothing is clipped
    turns = torch.tensor([0.1, -0.3, 0.5, 1.0])
    rotated = rotate_hue(muted, turns)
    torch.testing.assert_close(luma(rotated), luma(muted), rtol=0, atol=2e-4)  # YIQ has four digits
    torch.testing.assert_close(rotate_hue(rotated, -turns), muted, rtol=0, atol=1e-5)
    torch.testing.assert_close(rotated[3], muted[3], rtol=0, atol=1e-5)
    assert (rotated[:3] - muted[:3]).abs().amax((1, 2, 3)).min() > 0.01
    gray = luma(image).expand_as(image)
    torch.testing.assert_close(rotate_hue(gray, turns), gray, rtol=0, atol=2e-4)


def test_no_jitter_changes_nothing(image):
    torch.testing.assert_close(color_jitter(image, 0.0), image, rtol=0, atol=1e-6)


# --------------------------------------------------------------------------------------------------------------- blur


def test_blur_is_that_of_scipy(image):
    sigma = torch.tensor([0.3, 0.8, 1.1, 1.5])
    blurred = blur(image.double(), sigma.double(), 5)
    for x, y, s in zip(image, blurred, sigma.double().tolist(), strict=True):
        expected = gaussian_filter(x.double().numpy(), (0, s, s), mode="nearest", radius=(0, 5, 5))
        torch.testing.assert_close(y, torch.from_numpy(expected), rtol=0, atol=1e-10)


def test_blurs_at_random():
    image = torch.rand(8, 3, 96, 64)
    assert random_blur(image, 0.0).equal(image)
    torch.manual_seed(0)
    variances = random_blur(image, 1.0).flatten(1).var(1) / image.flatten(1).var(1)
    assert variances.max() <= 1 and variances.min() < 0.5 and variances.std() > 0.01, "widths differ"
    torch.testing.assert_close(random_blur(torch.full((2, 3, 64, 64), 0.3), 1.0), torch.full((2, 3, 64, 64), 0.3))


# ------------------------------------------------------------------------------------------------------------- views


def test_views_follow_from_the_seed(image):
    views = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        views.append(augment_view(image, STRENGTH))
    assert views[0].equal(views[1]) and not views[0].equal(views[2])


def test_views_are_the_same_under_autocast(image):
    """Half precision would move pixels."""
    views = []
    for enabled in (False, True):
        torch.manual_seed(0)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            views.append((augment_view(image, STRENGTH), crop_and_flip(image, 0.3)))
    assert all(a.equal(b) and a.dtype == torch.float32 for a, b in zip(*views, strict=True))


def test_every_image_has_a_view_of_its_own(image):
    torch.manual_seed(0)
    views = augment_view(image[:1].expand(6, -1, -1, -1), STRENGTH)
    assert all(not views[i].equal(views[j]) for i in range(6) for j in range(i))


def test_views_have_values_of_images(image):
    torch.manual_seed(0)
    for _ in range(20):
        view = augment_view(image, ViewAugmentation(0.05, 1.0, 0.5, 0.5))
        assert view.shape == image.shape and view.dtype == image.dtype and view.min() >= 0 and view.max() <= 1 + 1e-6


def test_crops_of_uniform_images_are_uniform():
    image = torch.tensor([0.2, 0.5, 0.9]).view(1, 3, 1, 1).expand(3, -1, 9, 7)
    torch.testing.assert_close(random_crops(image, 0.1), image)


# ------------------------------------------------------------------------------------------------------ cutslots train


def draws(**numbers):
    """Return what the loader passes: the numbers (count, B) of each change."""
    return lambda name, count: torch.tensor(numbers[name], dtype=torch.float64).reshape(count, -1)


def no_noise(shape):
    raise AssertionError("no noise was asked for")


@pytest.fixture
def pixels():
    return torch.randint(0, 256, (2, 3, 12, 20), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def to_bytes(image):
    return (255 * image.clamp(0, 1) + 0.5).to(torch.uint8)


def test_no_augmentation_returns_the_same_bytes(pixels):
    every = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(1, 3, 16, 16)
    for image in (pixels, every):
        assert augment_batch(image, BatchAugmentation(), draws(), no_noise).equal(image)


def test_augmented_crops(pixels):
    numbers = [[0.2, 0.9], [0.5, 0.1], [0.3, 0.0], [0.7, 1.0]]
    found = augment_batch(pixels, BatchAugmentation(min_crop_area=0.4), draws(crop=numbers), no_noise)
    for i, (area, aspect, top, left) in enumerate(zip(*numbers, strict=True)):
        area, ratio = 0.4 + 0.6 * area, math.exp(math.log(4 / 3) * (2 * aspect - 1))
        height, width = min(1, math.sqrt(area / ratio)), min(1, math.sqrt(area * ratio))
        box = torch.tensor([[top * (1 - height), left * (1 - width), height, width]])
        torch.testing.assert_close(to_boxes(torch.tensor(numbers), 0.4)[i : i + 1], box)
        expected = to_bytes(crop(pixels[i : i + 1] / 255, box))
        assert (found[i].int() - expected[0].int()).abs().max() <= 1


@pytest.mark.parametrize(
    "name, change",
    [
        ("brightness", lambda x, by: adjust_brightness(x, 1 + by)),
        ("contrast", lambda x, by: adjust_contrast(x, 1 + by)),
        ("saturation", lambda x, by: adjust_saturation(x, 1 + by)),
        ("hue", rotate_hue),
    ],
)
def test_augmented_colors(pixels, name, change):
    found = augment_batch(pixels, BatchAugmentation(**{name: 0.4}), draws(**{name: [[0.0, 0.75]]}), no_noise)
    assert found.equal(to_bytes(change(pixels / 255, torch.tensor([-0.4, 0.2]))))
    assert not found.equal(pixels)


def test_augmented_brightness_in_numbers():
    gray = torch.full((2, 3, 4, 4), 100, dtype=torch.uint8)
    found = augment_batch(gray, BatchAugmentation(brightness=0.4), draws(brightness=[[0.0, 1.0]]), no_noise)
    assert found.unique(dim=0)[:, 0, 0, 0].tolist() == [60, 140]


def test_some_images_are_blurred():
    image = torch.randint(0, 256, (3, 3, 120, 150), dtype=torch.uint8)
    numbers = [[0.5, 0.5, 1.0], [0.29, 0.31, 0.1]]  # widths, and the choice
    found = augment_batch(image, BatchAugmentation(blur=0.3), draws(blur=numbers), no_noise)
    assert found[1].equal(image[1])
    for i in (0, 2):
        sigma = MAX_SIGMA * 120 * (0.05 + 0.95 * numbers[0][i])
        smooth = gaussian_filter(image[i].double().numpy(), (0, sigma, sigma), mode="nearest", radius=(0, 4, 4))
        assert np.abs(found[i].numpy() - smooth).max() < 0.51


def test_noise_is_added(pixels):
    normal = torch.randn(pixels.shape, generator=torch.Generator().manual_seed(1))
    found = augment_batch(pixels, BatchAugmentation(noise=0.1), draws(noise=[[0.5, 0.0]]), lambda shape: normal)
    assert found[0].equal(to_bytes(pixels[0] / 255 + 0.05 * normal[0])) and found[1].equal(pixels[1])


def test_frames_of_a_clip_have_one_crop_and_one_color(pixels):
    clips = pixels[:, None].expand(-1, 3, -1, -1, -1)
    strength = BatchAugmentation(0.3, 0.4, 0.4, 0.4, 0.2, 0.9)
    numbers = {name: [[0.1, 0.8]] for name in ("brightness", "contrast", "saturation", "hue")}
    draw = draws(crop=[[0.2, 0.9]] * 4, blur=[[0.2, 0.9], [0.0, 0.0]], **numbers)
    found = augment_batch(clips, strength, draw, no_noise)
    assert found.shape == clips.shape and found.equal(found[:, :1].expand_as(found))
    assert found[:, 0].equal(augment_batch(pixels, strength, draw, no_noise))


# --------------------------------------------------------------------------------------------------------- with labels


def labeled(image, labels):
    return torch.cat([image, labels[:, None]], 1)


def test_labels_are_cropped_with_their_images():
    """The image shows its labels: they still agree inside of regions."""
    labels = torch.zeros(2, 32, 32, dtype=torch.uint8)
    labels[:, 8:20, 4:24] = 1
    labels[:, 22:, :] = 2
    image = (100 * labels)[:, None].expand(-1, 3, -1, -1)
    numbers = draws(crop=[[0.2, 0.9], [0.5, 0.1], [0.3, 0.0], [0.7, 1.0]])
    found = augment_batch(labeled(image, labels), BatchAugmentation(min_crop_area=0.3), numbers, no_noise)
    assert found.dtype == torch.uint8 and not found[:, 3].equal(labels)
    assert ((found[:, 0] / 100.0).round() == found[:, 3]).float().mean() > 0.95


def test_colors_leave_labels_alone(pixels):
    labels = torch.randint(0, 5, (2, 12, 20), dtype=torch.uint8)
    strength = BatchAugmentation(brightness=0.4, hue=0.3, noise=0.2)
    numbers = draws(brightness=[[0.0, 0.9]], hue=[[0.2, 0.8]], noise=[[1.0, 1.0]])
    found = augment_batch(labeled(pixels, labels), strength, numbers, torch.randn)
    assert found.shape == (2, 4, 12, 20) and found[:, 3].equal(labels) and not found[:, :3].equal(pixels)


def test_camouflaged_objects_have_the_colors_of_the_background():
    image = torch.empty(1, 3, 16, 16)
    image[:] = torch.tensor([0.2, 0.5, 0.7]).view(1, 3, 1, 1)
    labels = torch.zeros(1, 16, 16, dtype=torch.long)
    labels[0, 2:6, 3:9] = 4
    image[0, :, 2:6, 3:9] = torch.tensor([0.9, 0.1, 0.3]).view(3, 1, 1)
    for amount in (0.0, 0.25, 1.0):
        found = camouflage(image, labels, torch.tensor([amount]), torch.tensor([0.4]), torch.tensor([0.6]))
        expected = torch.lerp(torch.tensor([0.9, 0.1, 0.3]), torch.tensor([0.2, 0.5, 0.7]), amount**0.5)
        torch.testing.assert_close(found[0, :, 2:6, 3:9], expected.view(3, 1, 1).expand(-1, 4, 6))
        assert found[:, :, 8:].equal(image[:, :, 8:]), "the background stays as it is"


def test_camouflage_takes_texture_of_the_background_and_keeps_shading():
    torch.manual_seed(0)
    image, labels = torch.rand(1, 3, 64, 64) * 0.2 + 0.4, torch.zeros(1, 64, 64, dtype=torch.long)
    labels[0, 8:24, 8:24] = 1
    shade = torch.linspace(0.5, 1.5, 16)
    image[0, :, 8:24, 8:24] = 0.5 * shade[None, :, None]
    found = camouflage(image, labels, torch.ones(1), torch.tensor([0.5]), torch.tensor([0.5]))[0, :, 8:24, 8:24]
    texture = image[0, :, 40:56, 40:56]
    assert (found / texture).std((0, 2)).max() < 1e-5, "the same factor in all pixels of a row"
    factor = (found / texture)[0, :, 0]
    assert factor[2:-2].diff().min() > 0 and factor[1] < 0.7 and factor[-2] > 1.3, "lit from below, as before"


def test_the_background_is_label_0_even_if_an_object_is_larger():
    image, labels = torch.full((2, 3, 16, 16), 0.25), torch.ones(2, 16, 16, dtype=torch.long)
    labels[0, :, 12:] = 0
    image[0, :, :, 12:] = 0.75
    found = camouflage(image, labels, torch.ones(2), torch.zeros(2), torch.zeros(2))
    torch.testing.assert_close(found[0], torch.full((3, 16, 16), 0.75))
    assert torch.equal(found[1], image[1]), "no background to hide in"


def test_camouflage_of_a_fraction_of_the_images(pixels):
    labels = torch.zeros(2, 12, 20, dtype=torch.uint8)
    labels[:, 2:8, 2:8] = 3
    numbers = draws(camouflage=[[0.4, 0.6], [1.0, 1.0], [0.5, 0.5], [0.5, 0.5]])
    found = augment_batch(labeled(pixels, labels), BatchAugmentation(camouflage=0.5), numbers, no_noise)
    assert not found[0].equal(labeled(pixels, labels)[0]) and found[1].equal(labeled(pixels, labels)[1])


def test_camouflage_without_background_keeps_the_shading_once():
    image, labels = torch.full((1, 3, 16, 16), 0.5), torch.zeros(1, 16, 16, dtype=torch.long)
    labels[0, 4:12, 4:12] = 1
    shade = torch.linspace(-0.1, 0.1, 8)
    image[0, :, 4:12, 4:12] = 0.3 + shade[None, :, None]
    found = camouflage(image, labels, torch.ones(1), torch.zeros(1), torch.zeros(1))  # an object is where it is
    torch.testing.assert_close(found[0, :, 4:12, 4:12], (0.5 + shade)[None, :, None].expand(3, -1, 8))
