"""Outlines at the resolution of the image.

Masks have the resolution of the model. Upsampled to a larger image they have blurred outlines. `sharpen_outlines`
solves a minimum cut for each object in its bounding box: the upsampled log-odds of its mask are the unaries, so they
decide where they are clear, and the edges of the image decide where they are not.

An image s times as large has s^2 times the unaries and s times the length of outlines. The capacities of
`refinement.cut_masks` are multiplied by s, so that the same outline is best at every resolution.
"""

from __future__ import annotations

import math
import warnings
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from cutslots.inference.coco import bounding_box
from cutslots.models.refinement import CAPACITY, EDGE_SIGMA, MIN_LOG_MASK, edge_capacities
from cutslots.programs.min_cut import MinCut

MARGIN = 2.0  # pixels of the mask around an object: an outline may move as far
MAX_PIXELS = 1 << 20  # of a bounding box; a larger one is cut at a lower resolution
MAX_IMAGE_PIXELS = 1 << 24  # of an image; a larger one would take gigabytes
TOLERANCE, MAX_ITERATIONS = 2e-2, 100


class BoundingBox(NamedTuple):
    top: int
    bottom: int
    left: int
    right: int

    @property
    def slices(self) -> tuple[slice, slice]:
        return slice(self.top, self.bottom), slice(self.left, self.right)

    @property
    def shape(self) -> tuple[int, int]:
        return self.bottom - self.top, self.right - self.left


def sharpen_outlines(labels: np.ndarray, masks: Tensor, image: Image.Image, background: int) -> np.ndarray:
    """Return labels (H, W) whose outlines follow the edges of the image.

    `labels` are the winners of masks (K, h, w), upsampled to the image. Every object gets the pixels of its cut. Where
    no cut has a pixel it is of the background, where several have it, of the one with the largest p. An image of more
    than 16 megapixels keeps its labels.
    """
    if labels.size > MAX_IMAGE_PIXELS:
        return labels
    best, out = np.zeros(labels.shape, np.float32), np.full_like(labels, background)
    log_masks = masks.float().clamp_min(math.exp(MIN_LOG_MASK)).log()
    for slot in np.unique(labels):
        if slot != background:
            box = find_box(labels == slot, (labels.shape[0] / masks.shape[1], labels.shape[1] / masks.shape[2]))
            p = cut_object(log_odds(log_masks, int(slot)), image, box)
            won = p > best[box.slices]
            out[box.slices][won] = slot
            best[box.slices][won] = p[won]
    return out


def find_box(mask: np.ndarray, scale: tuple[float, float]) -> BoundingBox:
    """Return the bounding box of a mask (H, W) with a margin. `scale` is the size of a pixel of the model."""
    left, top, width, height = bounding_box(mask)
    y, x = (math.ceil(MARGIN * size) for size in scale)
    bottom, right = min(mask.shape[0], top + height + y), min(mask.shape[1], left + width + x)
    return BoundingBox(max(0, top - y), bottom, max(0, left - x), right)


def log_odds(log_masks: Tensor, slot: int) -> Tensor:
    """Return log m_k - log max m_j over the other slots (h, w)."""
    others = torch.cat([log_masks[:slot], log_masks[slot + 1 :]])
    return log_masks[slot] - (others.amax(0) if len(others) else MIN_LOG_MASK)


def cut_object(odds: Tensor, image: Image.Image, box: BoundingBox) -> np.ndarray:
    """Return p of the minimum cut of an object in its box: positive inside."""
    shrink = min(1.0, math.sqrt(MAX_PIXELS / math.prod(box.shape)))
    height, width = (max(1, round(shrink * n)) for n in box.shape)
    crop = image.crop((box.left, box.top, box.right, box.bottom))
    if shrink < 1:
        crop = crop.resize((width, height), Image.Resampling.BOX)
    pixels = torch.from_numpy(np.asarray(crop).copy()).permute(2, 0, 1)[None]
    scale = math.sqrt(image.height * image.width / odds.numel()) * shrink
    w = edge_capacities(pixels, CAPACITY * scale, EDGE_SIGMA)
    w[0, -2] = sample(odds, (image.height, image.width), box, (height, width))
    cut = MinCut((height, width), tolerance=TOLERANCE, max_iterations=MAX_ITERATIONS)
    with warnings.catch_warnings(action="ignore"):  # of a gap: p > 0 changes no more
        p = cut(w)
    if shrink == 1:
        return p[0].numpy()
    # Clamped, so that the outline is halfway between a pixel inside and one outside.
    return F.interpolate(p[None].clamp(-1, 1), box.shape, mode="bilinear", align_corners=False)[0, 0].numpy()


def sample(x: Tensor, shape: tuple[int, int], box: BoundingBox, size: tuple[int, int]) -> Tensor:
    """Return x (h, w), upsampled to an image of `shape`, in a box of the image: `size` samples, bilinear."""
    ends = ((box.top, box.bottom), (box.left, box.right))
    y, x_ = (
        (start + (torch.arange(n) + 0.5) * (stop - start) / n) * 2 / whole - 1
        for (start, stop), n, whole in zip(ends, size, shape, strict=True)
    )
    grid = torch.stack(torch.meshgrid(x_, y, indexing="xy"), -1)[None].to(x.dtype)
    return F.grid_sample(x[None, None], grid, align_corners=False, padding_mode="border")[0, 0]
