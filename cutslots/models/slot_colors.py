"""The colors of slots, by which `refinement.py` corrects masks.

Colors are histograms of COLOR_BINS^3 bins. How far they tell objects from the background is the separation s: the mean
of the three largest squared Hellinger distances of slots with enough pixels to the background b, the largest slot. It
is about 0.7 on textured scenes, 0.9 on plain ones and 0.2 on camouflaged ones, where colors hardly count.

Shapes: B batch, K slots, H W image.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from cutslots.models.discovery import to_float

COLOR_BINS = 8  # of a channel, in histograms
MASK_LEVELS = 256  # masks are rounded for histograms: sums of integers are exact in any order
NUM_DISTINCT = 3  # slots that differ most from the background and say how much objects do
MIN_DISTINCT_AREA = 1 / 200  # fraction of the image; the histogram of a smaller slot differs because it has few pixels

# Chosen on validation scenes and on renders; see "self-training", for the first, "merging by reconstructions and by
# colors" and "colors of slots" in docs/log.md.
BACKGROUND_THRESHOLD = 0.8  # slots whose colors differ less from the background's are merged into it
COLOR_WEIGHT = 1.0  # of the logarithm of how common a pixel's color is in a slot
MIN_SEPARATION, FULL_SEPARATION = 0.25, 0.4  # colors begin to count, and count fully
RARE_COLOR = 0.01  # of the background's pixels; a region of rarer colors is an object
MIN_OBJECT_AREA, MAX_OBJECT_AREA = 0.004, 0.2  # of the image, of such a region: a colorful background is no object
WEIGHT_SMOOTHING, RARE_SMOOTHING = 1e-3, 1e-4  # added to the share of a color: a histogram has few pixels
NUM_PASSES = 8  # over an image; most regions need two or three


class SlotColors(NamedTuple):
    """Means over the pixels of an image: the colors of slots, and how certain they are of their pixels."""

    histogram: Tensor  # (B, K, COLOR_BINS^3): mean of the mask where the image has a color; its sum is the area
    overlap: Tensor  # (B, K, K): mean of m_k m_j


def slot_colors(masks: Tensor, image: Tensor) -> SlotColors:
    """Return the color statistics of slots with masks (B, K, H, W) in an image (B, 3, H, W)."""
    m = masks.to(wide_dtype(masks)).flatten(2)
    return SlotColors(color_histogram(masks, color_bins(image)), m @ m.mT / m.shape[2])


def color_histogram(masks: Tensor, color: Tensor) -> Tensor:
    """Return the mean (B, K, COLOR_BINS^3) of masks (B, K, H, W) where `color` (B, H, W) is that of the bin."""
    B, K, H, W = masks.shape
    levels = (masks.to(wide_dtype(masks)) * MASK_LEVELS).round().flatten(2)
    integer = torch.int32 if masks.device.type == "mps" else torch.int64
    counts = torch.zeros(B, K, COLOR_BINS**3, dtype=integer, device=masks.device)
    counts.scatter_add_(2, color.flatten(1)[:, None].expand(B, K, -1), levels.to(integer))
    return counts.to(levels.dtype) / (MASK_LEVELS * H * W)


def color_bins(image: Tensor) -> Tensor:
    """Return the bin (B, H, W) of each pixel of an image (B, 3, H, W)."""
    red, green, blue = (to_float(image).float() * COLOR_BINS).long().clamp(0, COLOR_BINS - 1).unbind(1)
    return (red * COLOR_BINS + green) * COLOR_BINS + blue


def wide_dtype(x: Tensor) -> torch.dtype:
    """Return float64, which autocast leaves alone: distances are small differences of large sums. MPS has none."""
    return torch.float32 if x.device.type == "mps" else torch.float64


def color_shares(histogram: Tensor) -> Tensor:
    """Return the share (B, K, N) of each color in a slot, from histograms (B, K, N)."""
    return histogram / histogram.sum(2, keepdim=True).clamp(min=1e-9)


def color_distances(histogram: Tensor) -> Tensor:
    """Return the squared Hellinger distances (B, K, K), from 0 to 1, of histograms (B, K, N)."""
    roots = color_shares(histogram).sqrt()
    return (1 - roots @ roots.mT).clamp(min=0)


class Background(NamedTuple):
    """The largest slot, and how other slots differ from it."""

    slot: Tensor  # (B, 1)
    others: Tensor  # (B, K): other slots that are not empty
    distance: Tensor  # (B, K): of colors to those of the background
    separation: Tensor  # (B, 1): the mean of the largest distances


def compare_with_background(histogram: Tensor) -> Background:
    """Compare the colors of slots, given as a histogram (B, K, N), with those of the largest slot."""
    area = histogram.sum(2)
    slot = area.argmax(1, keepdim=True)
    others = (area > 0).scatter(1, slot, False)
    distance = color_distances(histogram).gather(2, slot[:, None].expand(-1, area.shape[1], -1)).squeeze(2)
    return Background(slot, others, distance, _mean_of_largest(distance, others & (area > MIN_DISTINCT_AREA)))


def _mean_of_largest(values: Tensor, counted: Tensor) -> Tensor:
    """Return the mean (B, 1) of the NUM_DISTINCT largest of values (B, K) of at least 0 that are counted, or of all."""
    largest = values.where(counted, 0).topk(min(NUM_DISTINCT, values.shape[1]), 1).values
    return largest.sum(1, keepdim=True) / counted.sum(1, keepdim=True).clamp(1, NUM_DISTINCT)


def merge_background(
    statistics: SlotColors, target: Tensor, background_threshold: float = BACKGROUND_THRESHOLD
) -> Tensor:
    """Return the slot that each slot is merged into, (B, K), with slots that have the background's colors merged too.

    `target` (B, K) says which slots are merged already: see `merge_slots`. The background is the largest slot then.
    """
    merged = F.one_hot(target, target.shape[1]).to(statistics.overlap)  # (B, K, K): from slots to slots
    histogram = merged.mT @ statistics.histogram
    background = compare_with_background(histogram)
    area = histogram.sum(2).clamp(min=1e-9)
    confidence = (merged.mT @ statistics.overlap @ merged).diagonal(dim1=1, dim2=2) / area
    limit = background_threshold * (1 - confidence).clamp(min=0).sqrt() * background.separation.square()
    joins = background.others & (background.distance < limit)
    return torch.where(joins.gather(1, target), background.slot, target)


def weigh_colors(masks: Tensor, image: Tensor, color_weight: float = COLOR_WEIGHT) -> Tensor:
    """Return masks (B, K, H, W), each times how common the color of the pixel is in the slot."""
    color = color_bins(image)
    histogram = color_histogram(masks, color)
    common = (
        color_shares(histogram).gather(2, color.flatten(1)[:, None].expand(-1, masks.shape[1], -1)).view(masks.shape)
    )
    weight = color_weight * _reliability(compare_with_background(histogram).separation)
    return (masks.log() + weight[:, :, None, None].float() * (common.float() + WEIGHT_SMOOTHING).log()).softmax(1)


def _reliability(separation: Tensor) -> Tensor:
    """Return how far colors count: from 0, where they hardly tell objects from the background, to 1."""
    return ((separation - MIN_SEPARATION) / (FULL_SEPARATION - MIN_SEPARATION)).clamp(0, 1)


class MissedObjects(NamedTuple):
    """Pixels of the background that are objects: regions of colors that are rare in the background."""

    slot: Tensor  # (B, H, W): the slot that they are moved to, which wins no pixel; -1 elsewhere
    background: Tensor  # (B, 1)

    def move(self, masks: Tensor) -> Tensor:
        """Return masks (B, K, H, W) with the background's masks of these pixels moved to their slots.

        These slots are emptied before.
        """
        slots = torch.arange(masks.shape[1], device=masks.device)
        moved, is_background = self.slot[:, None] == slots[:, None, None], (self.background == slots)[:, :, None, None]
        kept = masks.where(~moved.any(3).any(2)[:, :, None, None], 0)
        total = kept.sum(1, keepdim=True)
        kept = torch.where(total > 0, kept / total.clamp(min=torch.finfo(masks.dtype).tiny), is_background.to(masks))
        value = kept.where(is_background, 0).sum(1, keepdim=True)
        return torch.where(moved, value, kept.where(~(is_background & moved.any(1, keepdim=True)), 0))


def find_missed_objects(masks: Tensor, image: Tensor, rare_color: float = RARE_COLOR) -> MissedObjects:
    """Return regions of the background, the largest slot, of colors that less than `rare_color` of its pixels have.

    Each region goes to a slot that wins no pixel, the largest region first, as long as there are such slots. Shares
    of colors are at least 1e-4, so a lower `rare_color` finds nothing.
    """
    color = color_bins(image)
    histogram = color_histogram(masks, color)
    background = compare_with_background(histogram)
    inside = masks.argmax(1) == background.slot[:, :, None]
    index = background.slot[:, :, None].expand(-1, -1, histogram.shape[2])
    share = color_shares(histogram).gather(1, index).squeeze(1)
    surprise = -(share.gather(1, color.flatten(1)) + RARE_SMOOTHING).log().view(inside.shape).float()
    is_reliable = _reliability(background.separation) > 0.5
    rare = _high_values(surprise, inside & is_reliable[:, :, None], -math.log(rare_color))
    return MissedObjects(_assign_slots(connected_regions(rare), masks), background.slot)


def _high_values(values: Tensor, inside: Tensor, limit: float) -> Tensor:
    """Return the pixels inside where values (B, H, W) are high: the mean over the pixels inside nearby is above the
    limit, or such a pixel is near and the value itself is."""
    radius = max(1, round(max(values.shape[1:]) / 64))
    weight = inside.float()
    total, count = (F.avg_pool2d(x[:, None], 2 * radius + 1, 1, radius)[:, 0] for x in (values * weight, weight))
    high = inside & (total > limit * count)
    near = F.max_pool2d(high[:, None].float(), 2 * radius + 1, 1, radius)[:, 0] > 0
    return inside & (high | (near & (values > limit)))


def connected_regions(mask: Tensor) -> Tensor:
    """Return the region of each pixel of a mask (B, H, W), from 1 on, or 0. Diagonal neighbours are connected."""
    if mask.is_cuda:
        return regions_by_passes(mask)
    from scipy import ndimage

    regions = [ndimage.label(each, np.ones((3, 3)))[0] for each in mask.cpu().numpy()]
    return torch.from_numpy(np.stack(regions)).to(mask.device, torch.int64)


def regions_by_passes(mask: Tensor) -> Tensor:
    """Compute `connected_regions` without waiting for a GPU.

    A region has the number of one of its pixels. In each pass regions that touch get the larger of their numbers; what
    that region is called by then is looked up until it is its own name. Numbers are exact up to 2^24 pixels. A region
    of intricate shape may be left in parts.
    """
    B, H, W = mask.shape
    numbers = torch.arange(H * W + 1, device=mask.device, dtype=torch.float32).expand(B, -1)
    region = numbers[:, 1:].where(mask.flatten(1), 0)
    for _ in range(NUM_PASSES):
        largest = F.max_pool2d(region.view(B, 1, H, W), 3, 1, 1).flatten(1).where(region > 0, 0)
        name = numbers.scatter_reduce(1, region.long(), largest, "amax").long()
        for _ in range((H * W).bit_length()):
            name = name.gather(1, name)
        region = name.gather(1, region.long()).float()
    return region.long().view(B, H, W)


def _assign_slots(regions: Tensor, masks: Tensor) -> Tensor:
    """Return the slot of each pixel of the largest regions (B, H, W), one that wins no pixel; -1 elsewhere."""
    (B, K), pixels, labels = masks.shape[:2], regions[0].numel(), masks.argmax(1).flatten(1)
    ones = torch.ones_like(labels, dtype=torch.int32)
    sizes = torch.zeros(B, pixels + 1, dtype=torch.int32, device=masks.device)
    size, region = sizes.scatter_add_(1, regions.flatten(1), ones)[:, 1:].topk(min(K, pixels), 1)
    won = torch.zeros(B, K, dtype=torch.int32, device=masks.device).scatter_add_(1, labels, ones)
    order = (won > 0).int().argsort(stable=True, dim=1)[:, : size.shape[1]]
    fits = (size >= MIN_OBJECT_AREA * pixels) & (size <= MAX_OBJECT_AREA * pixels) & (won == 0).gather(1, order)
    slots = torch.full((B, pixels + 1), -1, device=masks.device).scatter_(1, region + 1, order.where(fits, -1))
    return slots.gather(1, regions.flatten(1)).view(regions.shape)
