"""Crop and resize as the libraries of the publishers' code do. A pixel i of `size` is made from pixels of a side:

    library        images                                                   masks
    pillow         bilinear, antialiased: a triangle as wide as a pixel     pixel floor((i + 1/2) side / size)
                   of the result, rounded after each axis
    torch          bilinear between the two pixels next to                  pixel floor(i side / size)
                   (i + 1/2) side / size - 1/2
    tensorflow     as torch                                                 pixel floor((i + 1/2) side / size)
    torch-bicubic  bicubic between the four pixels next to it               pixel floor((i + 1/2) side / size)

torch is `torch.nn.functional.interpolate` with the modes bilinear (align_corners=False) and nearest, torch-bicubic with
the modes bicubic and nearest-exact; tensorflow is `tf.image.resize` with the methods bilinear and nearest. None of them
antialiases. They return floating-point images. These are clamped and rounded to the nearest of 256 levels, halves to
even: a cache is at most half a level away from them.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from PIL import Image
from torch.nn import functional as F

Box = tuple[int, int, int, int]  # left, top, right, bottom
Library = Literal["pillow", "torch", "tensorflow", "torch-bicubic"]


def crop_image(image: np.ndarray, box: Box, size: int, library: Library) -> np.ndarray:
    """Crop an image (H, W, 3) uint8 to the box and resize it bilinearly: (3, size, size) uint8."""
    left, top, right, bottom = box
    return resize_image(image[top:bottom, left:right], (size, size), library).transpose(2, 0, 1)


def crop_mask(labels: np.ndarray, box: Box, size: int, library: Library) -> np.ndarray:
    """Crop labels (..., H, W) to the box and take the nearest pixels: (..., size, size)."""
    left, top, right, bottom = box
    return resize_mask(labels[..., top:bottom, left:right], (size, size), library)


def resize_image(image: np.ndarray, shape: tuple[int, int], library: Library) -> np.ndarray:
    """Resize an image (H, W, 3) uint8 to a height and width."""
    image = np.ascontiguousarray(image)
    if library == "pillow":
        return np.asarray(Image.fromarray(image).resize(shape[::-1], Image.Resampling.BILINEAR))
    if library == "torch-bicubic":
        pixels = torch.from_numpy(image.astype(np.float32)).permute(2, 0, 1)[None]
        values = F.interpolate(pixels, shape, mode="bicubic", align_corners=False)[0].permute(1, 2, 0).numpy()
    else:
        values = _interpolate(_interpolate(image.astype(np.float32), 0, shape[0]), 1, shape[1])
    return np.rint(np.clip(values, 0, 255)).astype(np.uint8)


def resize_mask(labels: np.ndarray, shape: tuple[int, int], library: Library) -> np.ndarray:
    """Take the nearest pixels of labels (..., H, W): (..., *shape)."""
    rows, columns = (nearest_indices(*each, library) for each in zip(labels.shape[-2:], shape, strict=True))
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
