import io

import numpy as np
import pytest
import torch
from PIL import Image

from cutslots.viz.images import GRID_GRAY, blend_colors, encode_png, image_grid, palette_image, to_uint8
from cutslots.viz.palette import PALETTE

RNG = np.random.default_rng(0)


def random_image(height, width):
    return RNG.integers(0, 256, (height, width, 3), dtype=np.uint8)


def test_to_uint8_rounds_clamps_and_moves_channels_last():
    x = torch.tensor([-0.5, 0.0, 0.499 / 255, 0.501 / 255, 1.0, 2.0]).reshape(1, 1, 2, 3)
    assert to_uint8(x).tolist() == [[[[0], [0], [0]], [[1], [255], [255]]]]
    assert to_uint8(torch.rand(2, 5, 3, 4, 7)).shape == (2, 5, 4, 7, 3)


def test_blend_colors_darkens_the_background():
    image = random_image(3, 5)
    assert np.array_equal(blend_colors(image, np.zeros_like(image)), (0.35 * image).astype(np.uint8))
    assert np.array_equal(blend_colors(image, np.full_like(image, 200)), (0.35 * image + 130).astype(np.uint8))


@pytest.mark.parametrize("height, width", [(4, 4), (3, 7), (8, 5), (1, 1)])
@pytest.mark.parametrize("gap", [0, 2])
def test_image_grid_places_cells_of_any_size(height, width, gap):
    rows = [[random_image(height, width) for _ in range(n)] for n in (3, 1)]
    grid = np.asarray(image_grid(rows, gap))
    assert grid.shape == (2 * height + gap, 3 * width + 2 * gap, 3)
    covered = np.zeros(grid.shape[:2], dtype=bool)
    for i, row in enumerate(rows):
        for j, cell in enumerate(row):
            at = np.s_[i * (height + gap) :, j * (width + gap) :]
            assert np.array_equal(grid[at][:height, :width], cell)
            covered[at][:height, :width] = True
    assert (grid[~covered] == GRID_GRAY).all()


@pytest.mark.parametrize("height, width", [(6, 6), (3, 7)])
def test_palette_image_keeps_labels(height, width):
    mask = RNG.integers(0, 256, (height, width), dtype=np.uint8)
    opened = Image.open(io.BytesIO(encode_png(palette_image(mask))))
    assert opened.mode == "P" and np.array_equal(np.asarray(opened), mask)
    assert np.array_equal(np.asarray(opened.convert("RGB")), PALETTE[mask])


def test_encode_png_of_arrays_and_images():
    image = random_image(3, 7)
    assert encode_png(image) == encode_png(Image.fromarray(image))
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(encode_png(image)))), image)
