"""Mask refinement: sharper masks with fewer fragments, computed from a model's output without training.

The masks of a decoder are blurred, several slots may share the background or one object, and the background may cover
objects. Seven steps correct much of that:

    posterior   The masks m are a prior, and the pixel x is evidence. With slot reconstructions r_k,
                    posterior_k  proportional to  m_k exp(-|x - r_k|^2 / (2 pixel_sigma^2))
    merging     Slots k and j are merged, the most similar pair first, while
                    sum m_k m_j |r_k - r_j|^2 / sum m_k m_j  <  merge_threshold * variance of the reconstruction
                and their colors are alike:
                    d_kj  <  color_threshold,    d_kj = 1 - sum sqrt(h_k h_j)
                The sums are over pixels; squares and variance are means over channels. Slots are compared only
                where their masks overlap: elsewhere a slot's reconstruction is not trained. h_k is the color histogram
                of the pixels of slot k: two objects that touch differ in it, even if their reconstructions are alike
                where they overlap.
    background  Slots of one texture may not overlap. The background b is the largest slot. Slot k is merged into b if
                    d_kb  <  background_threshold * sqrt(1 - c_k) * s^2
                where s is the mean of the three largest d_kb of slots with enough pixels, and c_k the mean posterior on
                the pixels of slot k. Where objects have the colors of the background, s is small and nothing is
                merged. A slot that is certain of its pixels has to be more similar.
    colors      Each mask is multiplied by (h_k(x) + 0.001)^a: how common the color of the pixel is in its slot. The
                power a is `color_weight`, less where colors hardly tell objects from the background.
    cut         The logarithm of each mask is smoothed by a minimum cut (`MinCut`), whose capacities are high between
                pixels of one color and low across edges of the image:
                    capacity * exp(-|x_u - x_v|^2 / (2 edge_sigma^2))
    fragments   A slot that wins less than `min_area` of the pixels is emptied; other slots get its pixels.
    missed      A region of the background becomes an object if its colors are rare there: less than `rare_color` of
                the background's pixels have them. It gets a slot that wins no pixel.

`refine_masks` does all seven; `slot_colors.py` has those that compare colors. A model that reconstructs features has no
colors to compare: its masks, upsampled from the feature grid, are cut, but there is no posterior, nothing is merged or
added, and small slots stay.

One more step is optional: `high_recall_masks` down-weights the background, the largest slot, in favor of slots with
enough confidence. `mask_kinds.py` lists the kinds of masks by name.

Shapes: B batch, K slots, T frames, H W image.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from cutslots.models.discovery import DiscoveryOutput, FeatureOutput, ModelOutput, to_float
from cutslots.models.mask_kinds import MASK_KINDS, MaskKind
from cutslots.models.slot_colors import (
    BACKGROUND_THRESHOLD,
    COLOR_WEIGHT,
    FULL_SEPARATION,
    MAX_OBJECT_AREA,
    MIN_OBJECT_AREA,
    MIN_SEPARATION,
    RARE_COLOR,
    SlotColors,
    color_distances,
    find_missed_objects,
    merge_background,
    slot_colors,
    weigh_colors,
    wide_dtype,
)
from cutslots.programs.min_cut import MinCut

VIDEO_PIXEL_SIGMA = 0.2  # smaller than for images: no videos were evaluated with another one yet
VIDEO_MERGE_THRESHOLD = 0.3  # not that of images: slots of a video are merged in all frames at once
BACKGROUND_WEIGHT = 1 / 50  # factor on the background in high-recall masks
MIN_CONFIDENCE = 0.55  # mean mask value a slot needs on the pixels that it gains from the background
MIN_OVERLAP = 1 / 800  # fraction of the image in which two slots must overlap to be compared

# Chosen on validation scenes of each family and on renders; see "self-training" and "merging by reconstructions and by
# colors" in docs/log.md.
PIXEL_SIGMA = 0.5  # standard deviation of a pixel's channel around its slot reconstruction
MERGE_THRESHOLD = 0.25  # slots less different than this multiple of the reconstruction's variance are merged
COLOR_THRESHOLD = 0.45  # slots whose histograms differ by this or more are not merged
MIN_AREA = 0.003  # of the image; slots that win less are fragments
VIDEO_BACKGROUND_THRESHOLD = 0.0  # off: no videos were evaluated with it yet

# Chosen on 40 validation scenes of each family; see docs/inference.md.
CAPACITY = 6.0  # of an edge between pixels of one color, in units of log-probability
EDGE_SIGMA = 0.09  # a difference in color, summed over channels, that is an edge
MIN_LOG_MASK = -10.0  # a mask below e^-10 is as good as none
CUT_TOLERANCE, CUT_ITERATIONS = 1e-2, 300  # a smaller gap changes no metric by more than 0.3 points
MAX_KERNEL_SIZE = 128  # of a side: one CUDA kernel does all iterations of such a cut

DEFAULTS = {  # recorded with every evaluation
    "pixel_sigma": PIXEL_SIGMA,
    "video_pixel_sigma": VIDEO_PIXEL_SIGMA,
    "merge_threshold": MERGE_THRESHOLD,
    "color_threshold": COLOR_THRESHOLD,
    "video_merge_threshold": VIDEO_MERGE_THRESHOLD,
    "background_weight": BACKGROUND_WEIGHT,
    "min_confidence": MIN_CONFIDENCE,
    "min_overlap": MIN_OVERLAP,
    "background_threshold": BACKGROUND_THRESHOLD,
    "video_background_threshold": VIDEO_BACKGROUND_THRESHOLD,
    "capacity": CAPACITY,
    "edge_sigma": EDGE_SIGMA,
    "min_area": MIN_AREA,
    "color_weight": COLOR_WEIGHT,
    "rare_color": RARE_COLOR,
    "min_separation": MIN_SEPARATION,
    "full_separation": FULL_SEPARATION,
    "min_object_area": MIN_OBJECT_AREA,
    "max_object_area": MAX_OBJECT_AREA,
}


def select_masks(kind: MaskKind, output: ModelOutput, image: Tensor) -> Tensor:
    """Return the masks (B, K, H, W) of one kind for the output of a model on `image` (B, 3, H, W)."""
    if kind not in MASK_KINDS:
        raise ValueError(f"masks is {kind!r}; expected one of {', '.join(MASK_KINDS)}")
    if kind == "decoder":
        return output.masks
    refined = refine_masks(output, image)
    return high_recall_masks(refined) if kind == "high-recall" else refined


def refine_masks(
    output: ModelOutput,
    image: Tensor,
    pixel_sigma: float = PIXEL_SIGMA,
    merge_threshold: float = MERGE_THRESHOLD,
    min_overlap: float = MIN_OVERLAP,
    capacity: float = CAPACITY,
    edge_sigma: float = EDGE_SIGMA,
    background_threshold: float = BACKGROUND_THRESHOLD,
    color_threshold: float = COLOR_THRESHOLD,
    min_area: float = MIN_AREA,
    color_weight: float = COLOR_WEIGHT,
    rare_color: float = RARE_COLOR,
) -> Tensor:
    """Return refined masks (B, K, H, W): the posterior, merged, weighed by colors, cut, with missed objects.

    They sum to one over K. A slot that is merged into another one, or is a fragment, is empty, unless it gets a missed
    object: then its slot reconstruction is not that of the object. `image` (B, 3, H, W) is
    uint8, or floating point in [0, 1]. A negative `merge_threshold` merges no similar slots, a `color_threshold` above
    1 ignores colors, a `background_threshold` of 0 merges none into the background, a `color_weight` of 0 leaves masks
    as they are, a `capacity` of 0 cuts nothing, a `min_area` of 0 keeps fragments, and a `rare_color` of 0 finds no
    missed objects.

    >>> from cutslots import load
    >>> image = torch.rand(2, 3, 64, 64)
    >>> refine_masks(load("tiny-64")(image), image).shape
    torch.Size([2, 6, 64, 64])
    """
    merged = merge_posterior(
        output, image, pixel_sigma, merge_threshold, min_overlap, background_threshold, color_threshold
    )
    return finish_masks(output, merged, image, capacity, edge_sigma, min_area, color_weight, rare_color)[0]


def merge_posterior(
    output: ModelOutput,
    image: Tensor,
    pixel_sigma: float = PIXEL_SIGMA,
    merge_threshold: float = MERGE_THRESHOLD,
    min_overlap: float = MIN_OVERLAP,
    background_threshold: float = BACKGROUND_THRESHOLD,
    color_threshold: float = COLOR_THRESHOLD,
) -> Tensor:
    """Return posterior masks (B, K, H, W) with similar slots merged. Scores are means of these: what later steps return
    is no probability."""
    posterior = posterior_masks(output, image, pixel_sigma)
    colors = slot_colors(posterior, image) if can_compare_colors(output) else None
    histogram = None if colors is None else colors.histogram
    target = merge_slots(slot_overlap(output), merge_threshold, min_overlap, histogram, color_threshold)
    if background_threshold > 0 and colors is not None:
        target = merge_background(colors, target, background_threshold)
    return merge_masks(posterior, target)


def refine_video_masks(
    outputs: Sequence[ModelOutput],
    image: Tensor,
    pixel_sigma: float = VIDEO_PIXEL_SIGMA,
    merge_threshold: float = VIDEO_MERGE_THRESHOLD,
    min_overlap: float = MIN_OVERLAP,
    capacity: float = CAPACITY,
    edge_sigma: float = EDGE_SIGMA,
    background_threshold: float = VIDEO_BACKGROUND_THRESHOLD,
) -> list[Tensor]:
    """Return refined masks of tracked videos, T tensors (B, K, H, W), from T outputs and frames (B, T, 3, H, W).

    The overlap of slots and their colors are averaged over the frames, so two slots are merged in all frames of a
    video or in none.
    """
    frames = list(zip(outputs, image.unbind(1), strict=True))
    target = merge_tracks(frames, pixel_sigma, merge_threshold, min_overlap, background_threshold)
    return [
        cut_masks(merge_masks(posterior_masks(output, frame, pixel_sigma), target), frame, capacity, edge_sigma)
        for output, frame in frames
    ]


def merge_tracks(
    frames: Iterable[tuple[ModelOutput, Tensor]],
    pixel_sigma: float = VIDEO_PIXEL_SIGMA,
    merge_threshold: float = VIDEO_MERGE_THRESHOLD,
    min_overlap: float = MIN_OVERLAP,
    background_threshold: float = VIDEO_BACKGROUND_THRESHOLD,
) -> Tensor:
    """Return the slot that each slot of videos is merged into, (B, K), from the output and the image of every frame.

    Frames are read one at a time, so a long video takes no more memory than a frame.
    """
    overlaps, colors = RunningMean(), RunningMean()
    for output, image in frames:
        overlaps.add(slot_overlap(output))
        if background_threshold > 0 and can_compare_colors(output):
            colors.add(slot_colors(posterior_masks(output, image, pixel_sigma), image))
    target = merge_slots(SlotOverlap(*overlaps.mean()), merge_threshold, min_overlap)
    return merge_background(SlotColors(*colors.mean()), target, background_threshold) if colors.count else target


def high_recall_masks(
    masks: Tensor, background_weight: float = BACKGROUND_WEIGHT, min_confidence: float = MIN_CONFIDENCE
) -> Tensor:
    """Return refined masks (B, K, H, W) with the background, the largest slot, down-weighted.

    Multiplying the background by `background_weight` would let other slots win some of its pixels. A slot whose mask
    averages more than `min_confidence` over all pixels that it would then win gets them. The other slots keep what
    they have.

    Fewer objects are missed, and outlines are too wide: ARI-FG, which ignores background pixels, rises; mIoU and ARI
    fall. The values of these masks are no measure of confidence; those of `masks` are.
    """
    K = masks.shape[1]
    is_background = nn.functional.one_hot(masks.mean((2, 3)).argmax(1), K).bool()  # (B, K)
    weighted = masks * torch.where(is_background, background_weight, 1.0)[:, :, None, None]
    won = nn.functional.one_hot(weighted.argmax(1), K).movedim(-1, 1)
    confident = (won * masks).sum((2, 3)) > min_confidence * won.sum((2, 3))  # false for a slot that wins nothing
    boosted = masks * torch.where(confident & ~is_background, 1 / background_weight, 1.0)[:, :, None, None]
    return boosted / boosted.sum(1, keepdim=True)


def posterior_masks(output: ModelOutput, image: Tensor, pixel_sigma: float = PIXEL_SIGMA) -> Tensor:
    """Return p(slot | pixel), (B, K, H, W): masks as prior, a Gaussian of width `pixel_sigma` around each slot
    reconstruction as likelihood. The masks of a model of features are returned as they are."""
    if isinstance(output, FeatureOutput):
        return output.masks.float()
    errors = (_slot_reconstructions(output).float() - to_float(image).float()[:, None]).square().sum(2)
    return (output.masks.float().clamp(min=1e-6).log() - errors / (2 * pixel_sigma**2)).softmax(1)


def cut_masks(masks: Tensor, image: Tensor, capacity: float = CAPACITY, edge_sigma: float = EDGE_SIGMA) -> Tensor:
    """Return masks (B, K, H, W) whose outlines follow the edges of the image: the softmax of one `MinCut` per slot.

    A slot without pixels stays empty.
    """
    if capacity == 0:
        return masks
    cut = MinCut(masks.shape[2:], tolerance=CUT_TOLERANCE, max_iterations=CUT_ITERATIONS, warn=False)
    capacities = edge_capacities(image, capacity, edge_sigma)
    in_one_kernel = masks.is_cuda and max(masks.shape[2:]) <= MAX_KERNEL_SIZE
    return (_cut_all if in_one_kernel else _cut_present)(cut, capacities, masks)


def finish_masks(
    output: ModelOutput,
    merged: Tensor,
    image: Tensor,
    capacity: float = CAPACITY,
    edge_sigma: float = EDGE_SIGMA,
    min_area: float = MIN_AREA,
    color_weight: float = COLOR_WEIGHT,
    rare_color: float = RARE_COLOR,
) -> tuple[Tensor, Tensor]:
    """Return merged masks (B, K, H, W) of an output, refined, and the merged masks with missed objects in their slots.

    Masks are weighed by colors and cut along the edges of the image. Fragments are dropped and missed objects added.
    """
    if not can_compare_colors(output):
        return cut_masks(merged, image, capacity, edge_sigma), merged
    weighed = weigh_colors(merged, image, color_weight) if color_weight > 0 else merged
    refined = drop_fragments(cut_masks(weighed, image, capacity, edge_sigma), min_area)
    if rare_color <= 0:
        return refined, merged
    missed = find_missed_objects(refined, image, rare_color)
    return missed.move(refined), missed.move(merged)


def drop_fragments(masks: Tensor, min_area: float = MIN_AREA) -> Tensor:
    """Return masks (B, K, H, W) in which slots that win less than `min_area` of the pixels are empty.

    Slots that win no pixel stay as they are: they may be objects that the background covers. They may win pixels of a
    fragment. So may the fragment itself, where no other slot has a mask.
    """
    largest = masks.argmax(1).flatten(1)
    ones = torch.ones_like(largest, dtype=torch.int32)
    pixels = torch.zeros(masks.shape[:2], dtype=torch.int32, device=masks.device).scatter_add_(1, largest, ones)
    is_fragment = (pixels > 0) & (pixels < min_area * largest.shape[1]) & (pixels < pixels.amax(1, keepdim=True))
    kept = masks.masked_fill(is_fragment[:, :, None, None], 0)
    total, tiny = kept.sum(1, keepdim=True), torch.finfo(masks.dtype).tiny
    return torch.where(is_fragment.any(1)[:, None, None, None] & (total > tiny), kept / total.clamp(min=tiny), masks)


def _cut_present(cut: MinCut, capacities: Tensor, masks: Tensor) -> Tensor:
    """Cut the slots that have pixels."""
    present = _is_present(masks)
    owner, _ = present.nonzero(as_tuple=True)
    w = capacities[owner]
    w[:, -2] = _log_masks(masks[present])
    logits = torch.full_like(masks, -torch.inf, dtype=torch.float32)
    logits[present] = cut(w)
    return logits.softmax(1)


def _cut_all(cut: MinCut, capacities: Tensor, masks: Tensor) -> Tensor:
    """Cut all slots: cuts of empty ones end at once in a kernel, and the CPU does not wait for their number."""
    w = capacities.repeat_interleave(masks.shape[1], 0)
    w[:, -2] = _log_masks(masks).flatten(0, 1)
    return torch.where(_is_present(masks)[:, :, None, None], cut(w).view(masks.shape), -torch.inf).softmax(1)


def _is_present(masks: Tensor) -> Tensor:
    """Return which slots have pixels, (B, K)."""
    return masks.amax((2, 3)) > math.exp(MIN_LOG_MASK)


def _log_masks(masks: Tensor) -> Tensor:
    """Return the logarithm of masks, from 0 for none on."""
    return masks.float().clamp_min(math.exp(MIN_LOG_MASK)).log() - MIN_LOG_MASK


def edge_capacities(image: Tensor, capacity: float, edge_sigma: float) -> Tensor:
    """Return the weights of a `MinCut` (B, 6, H, W) for an image (B, 3, H, W), those of the terminals zero."""
    x = to_float(image).float()
    w = x.new_zeros(x.shape[0], 6, *x.shape[2:])
    for first, axis in ((0, -1), (2, -2)):
        n = x.shape[axis] - 1
        weights = capacity * (x.diff(dim=axis).square().sum(1) / (-2 * edge_sigma**2)).exp()
        w[:, first].narrow(axis, 0, n).copy_(weights)
        w[:, first + 1].narrow(axis, 1, n).copy_(weights)
    return w


class SlotOverlap(NamedTuple):
    """Means over the pixels of an image, for every pair of slots: where they overlap and how they differ there."""

    overlap: Tensor  # (B, K, K): mean of m_k m_j
    distance: Tensor  # (B, K, K): mean of m_k m_j |r_k - r_j|^2 / 3
    area: Tensor  # (B, K): mean of m_k
    variance: Tensor  # (B,): of the reconstruction over pixels, averaged over channels


def slot_overlap(output: ModelOutput) -> SlotOverlap:
    """Return the overlap statistics of all pairs of slots, in float64 (float32 on MPS).

    Slots of a model of features are not compared: they do not overlap, by these statistics.
    """
    if isinstance(output, FeatureOutput):
        area = output.masks.float().mean((2, 3))
        none = area.new_zeros(*area.shape, area.shape[1])
        return SlotOverlap(none, none, area, area.new_zeros(len(area)))
    dtype = wide_dtype(output.masks)
    tensors = (output.masks, _slot_reconstructions(output), output.reconstruction)
    masks, slot_reconstructions, reconstruction = (x.to(dtype) for x in tensors)
    m, r = masks.flatten(2), slot_reconstructions.flatten(3).transpose(1, 2)  # (B, K, n), (B, 3, K, n)
    n = m.shape[-1]
    squares = m * r.square().mean(1)
    weighted = (m[:, None] * r).contiguous()
    distance = squares @ m.mT + m @ squares.mT - 2 * (weighted @ weighted.mT).mean(1)  # |a - b|^2 = a^2 + b^2 - 2ab
    variance = reconstruction.flatten(2).var(-1, correction=0).mean(1)
    return SlotOverlap(m @ m.mT / n, distance.clamp(min=0) / n, m.mean(-1), variance)


def merge_slots(
    statistics: SlotOverlap,
    merge_threshold: float = MERGE_THRESHOLD,
    min_overlap: float = MIN_OVERLAP,
    histogram: Tensor | None = None,
    color_threshold: float = COLOR_THRESHOLD,
) -> Tensor:
    """Return the slot that each slot is merged into, (B, K). A slot that is not merged maps to itself.

    The most similar pair of overlapping slots is merged first, the smaller slot into the larger one. Then the pairs are
    compared again, until no pair is similar enough. With a `histogram` of colors (B, K, N) of each slot, slots that
    differ in color are not merged.
    """
    overlap, distance, area = (x.clone() for x in statistics[:3])
    histogram = None if histogram is None else histogram.clone()
    B, K = area.shape
    target = torch.arange(K, device=area.device).repeat(B, 1)
    batch = torch.arange(B, device=area.device)
    diagonal = torch.eye(K, dtype=torch.bool, device=area.device)
    for _ in range(K - 1):
        apart = diagonal | (overlap < min_overlap) | (overlap == 0) | _differ_in_color(histogram, color_threshold)
        dissimilarity = (distance / overlap).masked_fill(apart, torch.inf)
        smallest, pair = dissimilarity.flatten(1).min(1)
        merge = smallest < merge_threshold * statistics.variance  # (B,): the images that have a pair to merge
        if not merge.is_cuda and not merge.any():  # a GPU does nothing K - 1 times sooner than the CPU hears from it
            break
        first, second = pair // K, pair % K
        first_is_larger = area[batch, first] > area[batch, second]
        small = torch.where(first_is_larger, second, first)
        large = torch.where(first_is_larger, first, second)
        target = torch.where(merge[:, None] & (target == small[:, None]), large[:, None], target)
        for x in (overlap, distance):
            x[batch, large] += torch.where(merge[:, None], x[batch, small], 0)
            x[batch, :, large] += torch.where(merge[:, None], x[batch, :, small], 0)
            x[batch, small] = torch.where(merge[:, None], 0, x[batch, small])
            x[batch, :, small] = torch.where(merge[:, None], 0, x[batch, :, small])
        area[batch, large] += torch.where(merge, area[batch, small], 0)
        if histogram is not None:
            histogram[batch, large] += torch.where(merge[:, None], histogram[batch, small], 0)
    return target


def _differ_in_color(histogram: Tensor | None, color_threshold: float) -> Tensor | bool:
    """Return which pairs of slots differ in color, (B, K, K); False if colors are not compared."""
    return False if histogram is None else color_distances(histogram) >= color_threshold


class RunningMean:
    """The mean of tuples of tensors that are added one at a time."""

    def __init__(self) -> None:
        self.total: tuple[Tensor, ...] = ()
        self.count = 0

    def add(self, values: Sequence[Tensor]) -> None:
        self.total = tuple(a + b for a, b in zip(self.total, values, strict=True)) if self.count else tuple(values)
        self.count += 1

    def mean(self) -> tuple[Tensor, ...]:
        if not self.count:
            raise ValueError("frames are empty; expected at least one")
        return tuple(x / self.count for x in self.total)


def merge_masks(masks: Tensor, target: Tensor) -> Tensor:
    """Return masks (B, K, H, W) with that of every slot added to the slot that it is merged into, `target` (B, K)."""
    return torch.zeros_like(masks).scatter_add_(1, target[:, :, None, None].expand_as(masks), masks)


def can_refine(output: ModelOutput) -> bool:
    """Return whether the output has what `refine_masks` needs."""
    return isinstance(output, FeatureOutput) or output.slot_reconstructions is not None


def can_compare_colors(output: ModelOutput) -> bool:
    """Return whether colors of slots are compared: not those of features, whose masks are coarse."""
    return isinstance(output, DiscoveryOutput)


def _slot_reconstructions(output: DiscoveryOutput) -> Tensor:
    if output.slot_reconstructions is None:
        raise ValueError("slot_reconstructions is None; expected a tensor to refine masks with, else use decoder masks")
    return output.slot_reconstructions
