"""Weights for cutting a photograph in two, as interactive segmentation has them (Boykov and Jolly, 2001).

What is known: a box inside the object, and that the frame of the picture is background. Each gives a histogram of
colours. A pixel is tied to the source by how unlikely its colour is in the background, to the sink by how unlikely it
is in the object; neighbours are tied by how alike they are. All weights are at least zero.
"""

from __future__ import annotations

import numpy as np
import torch
from skimage import data, transform

BINS = 8


def photograph(height: int = 128) -> np.ndarray:
    """A cup of coffee (H, W, 3) with values in [0, 1]; the picture is in the public domain (CC0), from scikit-image."""
    image = data.coffee() / 255.0
    width = round(height * image.shape[1] / image.shape[0])
    return transform.resize(image, (height, width), anti_aliasing=True)


def seeds(height: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """The box in the cup and the frame of the picture, as masks (H, W)."""
    inside, frame = np.zeros((2, height, width), dtype=bool)
    inside[int(0.20 * height) : int(0.78 * height), int(0.34 * width) : int(0.62 * width)] = True
    frame[: height // 20], frame[:, : width // 14], frame[:, -width // 14 :] = True, True, True
    return inside, frame


def unlikelihood(image: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """-log of each pixel's colour under the histogram of the colours in the mask."""
    cell = np.minimum((image * BINS).astype(int), BINS - 1) @ [BINS * BINS, BINS, 1]
    counts = np.bincount(cell[mask], minlength=BINS**3) + 1.0
    return -np.log(counts / counts.sum())[cell]


def ties(image: np.ndarray) -> np.ndarray:
    """The weights (2, H, W) from the source to each pixel and from each to the sink; what is known ties hard."""
    inside, frame = seeds(*image.shape[:2])
    return np.stack([unlikelihood(image, frame) + 10.0 * inside, unlikelihood(image, inside) + 10.0 * frame])


def weights(image: np.ndarray, contrast: float = 10.0) -> torch.Tensor:
    """w (6, H, W) for `GridCut`: right, left, down, up, source, sink."""
    H, W, _ = image.shape
    likeness = [np.exp(-np.square(np.diff(image, axis=axis)).sum(-1) / 0.01) for axis in (1, 0)]
    w = np.zeros((6, H, W))
    w[0, :, :-1] = w[1, :, 1:] = contrast * likeness[0]
    w[2, :-1] = w[3, 1:] = contrast * likeness[1]
    w[4], w[5] = ties(image)
    return torch.tensor(w)
