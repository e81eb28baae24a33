"""Crop and resize as the libraries of the publishers' code do. A pixel i of `size` is made from pixels of a side:

    library      images                                                   masks
    pillow       bilinear, antialiased: a triangle as wide as a pixel     pixel floor((i + 1/2) side / size)
                 of the result, rounded after each axis
    torch        bilinear between the two pixels next to                  pixel floor(i side / size)
                 (i + 1/2) side / size - 1/2
    tensorflow   as torch                                                 pixel floor((i + 1/2) side / size)

torch is `torch.nn.functional.interpolate` with the modes bilinear (align_corners=False) and nearest, tensorflow is
`tf.image.resize` with the methods bilinear and nearest, both without antialiasing. They return floating-point images.
These are rounded to the nearest of 256 levels, halves to even: a cache is at most half a level away from them.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from PIL import Image

Box = tuple[int, int, int, int]  # left, top, right, bottom
Library = Literal["pillow", "torch", "tensorflow"]


def crop_image(image: np.ndarray, box: Box, size: int, library: Library) -> np.ndarray:
    """Crop an image (H, W, 3) uint8 to the box and resize it bilinearly: (3, size, size) uint8."""
    left, top, right, bottom = box
    crop = np.ascontiguousarray(image[top:bottom, left:right])
    if library == "pillow":
        resized = np.asarray(Image.fromarray(crop).resize((size, size), Image.Resampling.BILINEAR))
    else:
        values = _interpolate(_interpolate(crop.astype(np.float32), 0, size), 1, size)
        resized = np.rint(values).astype(np.uint8)
    return resized.transpose(2, 0, 1)


def crop_mask(labels: np.ndarray, box: Box, size: int, library: Library) -> np.ndarray:
    """Crop labels (..., H, W) to the box and take the nearest pixels: (..., size, size)."""
    left, top, right, bottom = box
    rows = top + nearest_indices(bottom - top, size, library)
    columns = left + nearest_indices(right - left, size, library)
    return np.ascontiguousarray(labels[..., rows[:, None], columns[None, :]])


def nearest_indices(side: int, size: int, library: Library) -> np.ndarray:
    """Return the pixel of a side that each of `size` pixels takes."""
    if library == "pillow":  # which sums up steps in float64: where a position is an integer, that decides
        pixels = Image.fromarray(np.arange(side, dtype=np.int32)[None])
        return np.asarray(pixels.resize((size, 1), Image.Resampling.NEAREST))[0]
    centers = np.arange(size, dtype=np.float32) + np.float32(0 if library == "torch" else 0.5)
    return np.minimum((centers * (np.float32(side) / np.float32(size))).astype(np.int64), side - 1)


def _interpolate(values: np.ndarray, axis: int, size: int) -> np.ndarray:
    """Resize one axis linearly, without antialiasing; pixel i has its center at i + 1/2."""
    side = values.shape[axis]
    positions = np.maximum((np.arange(size) + 0.5) * (side / size) - 0.5, 0)
    first = positions.astype(np.int64)
    lower, upper = values.take(first, axis), values.take(np.minimum(first + 1, side - 1), axis)
    weights = (positions - first).astype(np.float32)
    return lower + (upper - lower) * weights.reshape(-1, *[1] * (values.ndim - 1 - axis))
