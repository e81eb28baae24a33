"""Resizing as Pillow, PyTorch and TensorFlow do it, restated: what the caches of `cutslots prepare` must hold."""

import functools
from fractions import Fraction

import numpy as np


@functools.cache
def filter_weights(side, size):
    """Return Pillow's triangle filter (size, side), as wide as a pixel of the result, in fixed point with 22 bits."""
    scale = side / size
    wide = max(scale, 1.0)
    out = np.zeros((size, side))
    for i in range(size):
        middle = (i + 0.5) * scale
        first, end = max(int(middle - wide + 0.5), 0), min(int(middle + wide + 0.5), side)
        values = [max(0.0, 1.0 - abs((x - middle + 0.5) * (1.0 / wide))) for x in range(first, end)]
        total = sum(values)
        out[i, first:end] = [int(0.5 + value / total * 2**22) for value in values]
    return out


def antialiased(image, size):
    """Resize (H, W, C) uint8 to (size, size, C): along rows, rounded to 8 bits, then along columns."""

    def one_way(values, side):  # sums of a few products below 2^31: doubles are exact
        sums = np.einsum("os,st->ot", filter_weights(side, size), values.reshape(side, -1).astype(float), optimize=True)
        return np.clip((sums.astype(np.int64) + 2**21) >> 22, 0, 255)

    height, width, channels = image.shape
    rows = one_way(image.transpose(1, 0, 2), width).reshape(size, height, channels).transpose(1, 0, 2)
    return one_way(rows, height).reshape(size, size, channels).astype(np.uint8)


@functools.cache
def tent(side, size):
    """Return the weights (size, side) of linear interpolation at (i + 1/2) side / size - 1/2, the edges repeated."""
    out = np.zeros((size, side))
    for i in range(size):
        at = min(max(Fraction(2 * i + 1, 2) * Fraction(side, size) - Fraction(1, 2), 0), side - 1)
        out[i] = [float(max(0, 1 - abs(at - x))) for x in range(side)]
    return out


def bilinear(image, size):
    """Interpolate (H, W, C) bilinearly without antialiasing: (size, size, C), in double precision."""
    height, width, _ = image.shape
    return np.einsum("oh,hwc,pw->opc", tent(height, size), image.astype(float), tent(width, size), optimize=True)


def rounded(values):
    """Round to integers, halves to even."""
    return np.array([round(value) for value in values.ravel().tolist()], dtype=np.uint8).reshape(values.shape)


def centered(side, size):
    """Return the pixels floor((i + 1/2) side / size), in integer arithmetic."""
    return [(2 * i + 1) * side // (2 * size) for i in range(size)]


def cornered(side, size):
    """Return the pixels floor(i side / size), in integer arithmetic."""
    return [i * side // size for i in range(size)]


IMAGES = {
    "pillow": antialiased,
    "torch": lambda image, size: rounded(bilinear(image, size)),
    "tensorflow": lambda image, size: rounded(bilinear(image, size)),
}
PIXELS = {"pillow": centered, "torch": cornered, "tensorflow": centered}


def resized(image, labels, size, library):
    """Return an image (H, W, 3) and its labels (H, W) as a cache holds them: (3, size, size) and (size, size)."""
    rows, columns = (PIXELS[library](side, size) for side in labels.shape)
    return IMAGES[library](image, size).transpose(2, 0, 1), labels[rows][:, columns]
