"""Resizing by the rules of Pillow, PyTorch and TensorFlow."""

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn.functional import interpolate

from cutslots.data.resize import crop_image, crop_mask, nearest_indices
from cutslots.data.source import Protocol
from tests.data.reference_resize import antialiased, bilinear, centered, cornered, rounded

SIDES = (1, 2, 3, 7, 51, 64, 102, 128, 192, 204, 205, 256)
EXACT = [(192, 128), (192, 64), (192, 96), (128, 64), (256, 64), (256, 128), (64, 128), (51, 128), (102, 64)]
LIBRARIES = ("pillow", "torch", "tensorflow", "torch-bicubic")


def noise(height, width):
    return np.random.default_rng([height, width]).integers(0, 256, (height, width, 3), dtype=np.uint8)


def whole(image):
    return 0, 0, image.shape[1], image.shape[0]


def by_torch(image, size, dtype):
    """Return the image in [0, 255], interpolated by PyTorch: (size, size, 3)."""
    floats = torch.from_numpy(image).permute(2, 0, 1)[None].to(dtype)
    out = interpolate(floats, size=(size, size), mode="bilinear", align_corners=False, antialias=False)
    return out[0].permute(1, 2, 0).numpy()


def test_references_on_examples_computed_by_hand():
    image = np.arange(0, 240, 10, dtype=np.uint8).reshape(4, 6, 1)
    assert np.array_equal(antialiased(image[:, :4], 4), image[:, :4]), "the same size"
    flat = np.full((8, 8, 3), 77, dtype=np.uint8)
    assert (antialiased(flat, 5) == 77).all() and (antialiased(flat, 20) == 77).all()
    row = np.array([[0, 0, 100, 100]] * 4, dtype=np.uint8)[..., None]
    assert antialiased(row, 2)[..., 0].tolist() == [[14, 86]] * 2, "weights 3/7, 3/7, 1/7"
    assert bilinear(row, 2)[..., 0].tolist() == [[0, 100]] * 2, "the mean of two pixels"
    ramp = np.array([[0, 100, 200]] * 3, dtype=np.uint8)[..., None]
    assert bilinear(ramp, 2)[0, :, 0].tolist() == [25, 175], "at 1/4 and 7/4"
    assert bilinear(ramp, 6)[0, :, 0].tolist() == [0, 25, 75, 125, 175, 200], "at -1/4, 1/4, 3/4, ..., 9/4"
    assert rounded(np.array([0.5, 1.5, 2.5, 254.5, 254.51])).tolist() == [0, 2, 2, 254, 255], "halves to even"
    assert centered(4, 2) == [1, 3] and cornered(4, 2) == [0, 2]
    assert centered(6, 4) == [0, 2, 3, 5] and cornered(6, 4) == [0, 1, 3, 4], "as from 192 to 128"


@pytest.mark.parametrize("library", ["torch", "tensorflow"])
@pytest.mark.parametrize("side, size", EXACT)
def test_images_equal_those_of_torch_rounded(side, size, library):
    """The weights are multiples of 1/256 here, so that every value is exact, and many lie between two levels."""
    image = noise(side, side)
    got = crop_image(image, whole(image), size, library).transpose(1, 2, 0)
    assert np.array_equal(got, rounded(by_torch(image, size, torch.float32)))
    assert np.array_equal(got, rounded(by_torch(image, size, torch.float64)))
    assert np.array_equal(got, rounded(bilinear(image, size)))


@pytest.mark.parametrize("library", ["torch", "tensorflow"])
@pytest.mark.parametrize("height, width", [(192, 192), (120, 77), (5, 300), (1, 1), (2, 3)])
def test_images_are_within_half_a_level_of_torch(height, width, library):
    image = noise(height, width)
    for size in (1, 2, 10, 100, 129, 191, 224):
        got = crop_image(image, whole(image), size, library).transpose(1, 2, 0)
        assert got.dtype == np.uint8 and got.shape == (size, size, 3)
        assert np.abs(got - bilinear(image, size)).max() <= 0.5 + 1e-4
        assert np.abs(got - by_torch(image, size, torch.float64)).max() <= 0.5 + 1e-4
        # PyTorch's positions in float32 are off by up to 2^-16 of a pixel, along each axis.
        assert np.abs(got - by_torch(image, size, torch.float32)).max() <= 0.5 + 2 * 255 * 2**-16


@pytest.mark.parametrize("library", ["torch", "tensorflow"])
def test_floats_in_other_ranges_round_to_the_same_levels(library):
    """CLEVRTEX's code resizes values in [0, 1], Slot Attention's in [-1, 1]: both are linear in the 256 levels."""
    image = noise(192, 192)
    got = crop_image(image, whole(image), 128, library).transpose(1, 2, 0)
    for low, high in ((0, 1), (-1, 1)):
        floats = torch.from_numpy(image).permute(2, 0, 1)[None].float() / 255 * (high - low) + low
        out = interpolate(floats, size=(128, 128), mode="bilinear", align_corners=False)[0].permute(1, 2, 0).numpy()
        assert np.abs(got - (out - low) / (high - low) * 255).max() <= 0.5 + 1e-3


def test_pillow_resizes_with_antialiasing():
    image = noise(192, 192)
    got = crop_image(image, whole(image), 128, "pillow").transpose(1, 2, 0)
    assert np.array_equal(got, np.asarray(Image.fromarray(image).resize((128, 128), Image.Resampling.BILINEAR)))
    assert np.array_equal(got, antialiased(image, 128))
    assert not np.array_equal(got, crop_image(image, whole(image), 128, "torch").transpose(1, 2, 0))


@pytest.mark.parametrize("side", SIDES)
def test_nearest_pixels_are_those_of_each_library(side):
    pixels = np.arange(side, dtype=np.float32)
    for size in (*range(1, 40), 64, 96, 100, 128, 192, 257, 300):
        of_torch = interpolate(torch.from_numpy(pixels)[None, None], size=size, mode="nearest")[0, 0]
        assert nearest_indices(side, size, "torch").tolist() == of_torch.long().tolist()
        of_pillow = Image.fromarray(pixels[None]).resize((size, 1), Image.Resampling.NEAREST)
        assert nearest_indices(side, size, "pillow").tolist() == np.asarray(of_pillow)[0].tolist()
        scale = np.float32(side) / np.float32(size)  # TensorFlow's kernel, with half_pixel_centers
        of_tensorflow = [min(int(np.floor((np.float32(i) + np.float32(0.5)) * scale)), side - 1) for i in range(size)]
        assert nearest_indices(side, size, "tensorflow").tolist() == of_tensorflow


@pytest.mark.parametrize("side, size", EXACT)
def test_nearest_pixels_by_integer_arithmetic(side, size):
    assert nearest_indices(side, size, "torch").tolist() == cornered(side, size)
    for library in ("pillow", "tensorflow"):
        assert nearest_indices(side, size, library).tolist() == centered(side, size)
    exact = interpolate(torch.arange(side).float()[None, None], size=size, mode="nearest-exact")
    assert exact[0, 0].long().tolist() == centered(side, size) == nearest_indices(side, size, "torch-bicubic").tolist()


@pytest.mark.parametrize("library", LIBRARIES)
def test_crop_comes_before_resizing(library):
    """Pixels outside the box have no influence."""
    image, labels, box = noise(24, 32), np.arange(24 * 32).reshape(24, 32), (5, 3, 20, 18)
    crop = image[3:18, 5:20]
    assert np.array_equal(crop_image(image, box, 10, library), crop_image(crop, whole(crop), 10, library))
    rows, columns = (nearest_indices(15, 10, library) for _ in range(2))
    expected = labels[3:18, 5:20][rows][:, columns]
    assert np.array_equal(crop_mask(labels, box, 10, library), expected)
    stack = np.stack([labels, labels + 1])
    assert np.array_equal(crop_mask(stack, box, 10, library), np.stack([expected, expected + 1]))


@pytest.mark.parametrize("library", LIBRARIES)
def test_same_size_changes_nothing(library):
    image, labels = noise(16, 16), np.arange(256).reshape(16, 16)
    assert np.array_equal(crop_image(image, (0, 0, 16, 16), 16, library), image.transpose(2, 0, 1))
    assert np.array_equal(crop_mask(labels, (0, 0, 16, 16), 16, library), labels)


def test_boxes_of_protocols():
    assert Protocol(0.8, "torch").box(320, 240) == (64, 24, 256, 216)
    assert Protocol(0.8, "pillow").box(128, 128) == (13, 13, 115, 115)
    assert Protocol(1.0, "tensorflow").box(256, 256) == (0, 0, 256, 256)
    assert Protocol((64, 29, 256, 221), "tensorflow").box(320, 240) == (64, 29, 256, 221)
    with pytest.raises(ValueError, match=r"^it has 1x1 pixels; expected more to crop 0.8 of a side$"):
        Protocol(0.8, "torch").box(1, 1)
