"""Label maps: the slot with the largest mask at every pixel, for every kind of masks that is evaluated.

Shapes: B batch, T frames, H W image.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from cutslots.models.discovery import ModelOutput
from cutslots.models.mask_kinds import MASK_KINDS, MaskKindInfo
from cutslots.models.refinement import can_refine, high_recall_masks, refine_masks, refine_video_masks

PARTITION = MaskKindInfo("partition_", "Masks of the slot module on its feature grid, resized to the image.")
EVALUATED_MASKS: dict[str, MaskKindInfo] = MASK_KINDS | {"partition": PARTITION}


def hard_labels(
    output: ModelOutput, image: Tensor | None = None, size: tuple[int, ...] | None = None
) -> dict[str, Tensor]:
    """Return the slot of every pixel, (B, H, W), by kind of masks.

    Refined and high-recall masks are included if `image` (B, 3, H, W) is given and the decoder gives slot
    reconstructions or reconstructs features. Masks are resized bilinearly to `size`, by default that of the decoder
    masks, before the largest is chosen: published evaluations compare at the size of the true masks.
    """
    size = output.masks.shape[-2:] if size is None else size
    masks = {"decoder": output.masks, "partition": output.partition_masks}
    if image is not None and can_refine(output):
        refined = refine_masks(output, image)
        masks |= {"refined": refined, "high-recall": high_recall_masks(refined)}
    return {kind: largest_mask(each, size) for kind, each in masks.items()}


def largest_mask(masks: Tensor, size: tuple[int, ...]) -> Tensor:
    """Return the largest of masks (B, K, h, w) at every pixel of a size (H, W): (B, H, W)."""
    if masks.shape[-2:] != tuple(size):
        masks = F.interpolate(masks.float(), tuple(size), mode="bilinear", align_corners=False)
    return masks.argmax(1)


def video_hard_labels(
    outputs: Sequence[ModelOutput], image: Tensor, size: tuple[int, ...] | None = None
) -> dict[str, Tensor]:
    """Return the track of every pixel, (B, T, H, W), by kind of masks, from T outputs and frames (B, T, 3, H, W).

    Slots must be in the order of tracks, as `track_clip` gives them. There are no high-recall masks of videos. For
    `size` see `hard_labels`.
    """
    frames = [hard_labels(output, size=size) for output in outputs]
    if all(map(can_refine, outputs)):
        for frame, masks in zip(frames, refine_video_masks(outputs, image), strict=True):
            frame["refined"] = largest_mask(masks, outputs[0].masks.shape[-2:] if size is None else size)
    return {kind: torch.stack([frame[kind] for frame in frames], 1) for kind in frames[0]}
