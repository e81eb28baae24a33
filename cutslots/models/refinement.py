"""Mask refinement: sharper masks with fewer fragments, computed from a model's output without training.

The masks of a decoder are blurred, and several slots may share the background or one object. Three steps correct much
of that:

    posterior   The masks m are a prior, and the pixel x is evidence. With slot reconstructions r_k,
                    posterior_k  proportional to  m_k exp(-|x - r_k|^2 / (2 pixel_sigma^2))
    merging     Slots k and j are merged, the most similar pair first, while
                    sum m_k m_j |r_k - r_j|^2 / sum m_k m_j  <  merge_threshold * variance of the reconstruction
                The sums are over pixels; squares and variance are means over channels. Slots are compared only
                where their masks overlap: elsewhere a slot's reconstruction is not trained.
    cut         The logarithm of each mask is smoothed by a minimum cut (`MinCut`), whose capacities are high between
                pixels of one color and low across edges of the image:
                    capacity * exp(-|x_u - x_v|^2 / (2 edge_sigma^2))

`refine_masks` does all three. A model that reconstructs features has no colors to compare: its masks, upsampled from
the feature grid, are cut, but there is no posterior, and nothing is merged.

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
from cutslots.programs.min_cut import MinCut

PIXEL_SIGMA = 0.2  # standard deviation of a pixel's channel around its slot reconstruction
MERGE_THRESHOLD = 1.0  # slots less different than this fraction of the reconstruction's variance are merged
VIDEO_MERGE_THRESHOLD = 0.3  # lower than for images: slots of a video are merged in all frames at once
BACKGROUND_WEIGHT = 1 / 50  # factor on the background in high-recall masks
MIN_CONFIDENCE = 0.55  # mean mask value a slot needs on the pixels that it gains from the background
MIN_OVERLAP = 1 / 800  # fraction of the image in which two slots must overlap to be compared

# Chosen on 40 validation scenes of each family; see docs/results.md.
CAPACITY = 6.0  # of an edge between pixels of one color, in units of log-probability
EDGE_SIGMA = 0.09  # a difference in color, summed over channels, that is an edge
MIN_LOG_MASK = -10.0  # a mask below e^-10 is as good as none
CUT_TOLERANCE, CUT_ITERATIONS = 1e-2, 300  # a smaller gap changes no metric by more than 0.3 points
MAX_KERNEL_SIZE = 128  # of a side: one CUDA kernel does all iterations of such a cut

DEFAULTS = {  # recorded with every evaluation
    "pixel_sigma": PIXEL_SIGMA,
    "merge_threshold": MERGE_THRESHOLD,
    "video_merge_threshold": VIDEO_MERGE_THRESHOLD,
    "background_weight": BACKGROUND_WEIGHT,
    "min_confidence": MIN_CONFIDENCE,
    "min_overlap": MIN_OVERLAP,
    "capacity": CAPACITY,
    "edge_sigma": EDGE_SIGMA,
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
) -> Tensor:
    """Return posterior masks (B, K, H, W) with similar slots merged, cut along the edges of the image.

    They sum to one over K. A slot that is merged into another one is empty. `image` (B, 3, H, W) is uint8, or floating
    point in [0, 1]. A negative `merge_threshold` merges nothing; a `capacity` of 0 cuts nothing.

    >>> from cutslots import load
    >>> image = torch.rand(2, 3, 64, 64)
    >>> refine_masks(load("tiny-64")(image), image).shape
    torch.Size([2, 6, 64, 64])
    """
    target = merge_slots(slot_overlap(output), merge_threshold, min_overlap)
    masks = merge_masks(posterior_masks(output, image, pixel_sigma), target)
    return cut_masks(masks, image, capacity, edge_sigma)


def refine_video_masks(
    outputs: Sequence[ModelOutput],
    image: Tensor,
    pixel_sigma: float = PIXEL_SIGMA,
    merge_threshold: float = VIDEO_MERGE_THRESHOLD,
    min_overlap: float = MIN_OVERLAP,
    capacity: float = CAPACITY,
    edge_sigma: float = EDGE_SIGMA,
) -> list[Tensor]:
    """Return refined masks of tracked videos, T tensors (B, K, H, W), from T outputs and frames (B, T, 3, H, W).

    The overlap of slots is averaged over the frames, so two slots are merged in all frames of a video or in none.
    """
    target = merge_video_slots(map(slot_overlap, outputs), merge_threshold, min_overlap)
    return [
        cut_masks(merge_masks(posterior_masks(output, frame, pixel_sigma), target), frame, capacity, edge_sigma)
        for output, frame in zip(outputs, image.unbind(1), strict=True)
    ]


def merge_video_slots(
    overlaps: Iterable[SlotOverlap],
    merge_threshold: float = VIDEO_MERGE_THRESHOLD,
    min_overlap: float = MIN_OVERLAP,
) -> Tensor:
    """Return the slot that each slot of videos is merged into, (B, K), from the overlap of slots in every frame.

    Frames are read one at a time, so a long video takes no more memory than a frame. See `merge_slots`.
    """
    total, count = None, 0
    for overlap in overlaps:
        total = overlap if total is None else SlotOverlap(*(a + b for a, b in zip(total, overlap, strict=True)))
        count += 1
    if total is None:
        raise ValueError("overlaps are empty; expected that of at least one frame")
    return merge_slots(SlotOverlap(*(x / count for x in total)), merge_threshold, min_overlap)


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
    # Distances are small differences of large sums.
    dtype = torch.float32 if output.masks.device.type == "mps" else torch.float64
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
    statistics: SlotOverlap, merge_threshold: float = MERGE_THRESHOLD, min_overlap: float = MIN_OVERLAP
) -> Tensor:
    """Return the slot that each slot is merged into, (B, K). A slot that is not merged maps to itself.

    The most similar pair of overlapping slots is merged first, the smaller slot into the larger one. Then the pairs are
    compared again, until no pair is similar enough.
    """
    overlap, distance, area = (x.clone() for x in statistics[:3])
    B, K = area.shape
    target = torch.arange(K, device=area.device).repeat(B, 1)
    batch = torch.arange(B, device=area.device)
    diagonal = torch.eye(K, dtype=torch.bool, device=area.device)
    for _ in range(K - 1):
        apart = diagonal | (overlap < min_overlap) | (overlap == 0)
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
    return target


def merge_masks(masks: Tensor, target: Tensor) -> Tensor:
    """Return masks (B, K, H, W) with that of every slot added to the slot that it is merged into, `target` (B, K)."""
    return torch.zeros_like(masks).scatter_add_(1, target[:, :, None, None].expand_as(masks), masks)


def can_refine(output: ModelOutput) -> bool:
    """Return whether the output has what `refine_masks` needs."""
    return isinstance(output, FeatureOutput) or output.slot_reconstructions is not None


def _slot_reconstructions(output: DiscoveryOutput) -> Tensor:
    if output.slot_reconstructions is None:
        raise ValueError("slot_reconstructions is None; expected a tensor to refine masks with, else use decoder masks")
    return output.slot_reconstructions
