"""Edge weights for cutting a photograph in two, as in interactive segmentation (Boykov and Jolly, 2001).

The user marks a box inside the object; the border of the image is background. Each region gives a histogram of colours.
The edge from the source to a pixel weighs as much as its colour is unlikely in the background, the edge to the sink as
much as it is unlikely in the object. Edges between neighbours weigh as much as their colours are similar. All weights
are at least zero.
"""

from __future__ import annotations

import numpy as np
import torch
from skimage import data, transform

BINS = 8


def photograph(height: int = 128) -> np.ndarray:
    """Return an image (H, W, 3) of a cup of coffee in [0, 1]: public domain (CC0), from scikit-image."""
    image = data.coffee() / 255.0
    width = round(height * image.shape[1] / image.shape[0])
    return transform.resize(image, (height, width), anti_aliasing=True)


def seeds(height: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Return masks (H, W) of the box in the cup and of the border of the image."""
    inside, border = np.zeros((2, height, width), dtype=bool)
    inside[int(0.20 * height) : int(0.78 * height), int(0.34 * width) : int(0.62 * width)] = True
    border[: height // 20], border[:, : width // 14], border[:, -width // 14 :] = True, True, True
    return inside, border


def negative_log_likelihood(image: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Return -log of each pixel's probability under the colour histogram of the mask."""
    cell = np.minimum((image * BINS).astype(int), BINS - 1) @ [BINS * BINS, BINS, 1]
    counts = np.bincount(cell[mask], minlength=BINS**3) + 1.0
    return -np.log(counts / counts.sum())[cell]


def terminal_weights(image: np.ndarray) -> np.ndarray:
    """Return the weights (2, H, W) from the source to each pixel and from each pixel to the sink.

    Pixels of the box and of the border have an additional weight to their terminal.
    """
    inside, border = seeds(*image.shape[:2])
    from_source = negative_log_likelihood(image, border) + 10.0 * inside
    to_sink = negative_log_likelihood(image, inside) + 10.0 * border
    return np.stack([from_source, to_sink])


def weights(image: np.ndarray, contrast: float = 10.0) -> torch.Tensor:
    """Return w (6, H, W) for `GridCut`: right, left, down, up, source, sink."""
    H, W, _ = image.shape
    similarity = [np.exp(-np.square(np.diff(image, axis=axis)).sum(-1) / 0.01) for axis in (1, 0)]
    w = np.zeros((6, H, W))
    w[0, :, :-1] = w[1, :, 1:] = contrast * similarity[0]
    w[2, :-1] = w[3, 1:] = contrast * similarity[1]
    w[4], w[5] = terminal_weights(image)
    return torch.tensor(w)
