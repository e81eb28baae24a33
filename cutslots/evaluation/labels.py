"""Label maps: the slot with the largest mask at every pixel, for every kind of masks that is evaluated.

Shapes: B batch, T frames, H W image.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from cutslots.models.discovery import DiscoveryOutput
from cutslots.models.mask_kinds import MASK_KINDS, MaskKindInfo
from cutslots.models.refinement import high_recall_masks, refine_masks, refine_video_masks

PARTITION = MaskKindInfo("partition_", "Masks of the slot module on its feature grid, resized to the image.")
EVALUATED_MASKS: dict[str, MaskKindInfo] = MASK_KINDS | {"partition": PARTITION}


def hard_labels(output: DiscoveryOutput, image: Tensor | None = None) -> dict[str, Tensor]:
    """Return the slot of every pixel, (B, H, W), by kind of masks.

    Refined and high-recall masks are included if `image` (B, 3, H, W) is given and the decoder gives slot
    reconstructions.
    """
    size = output.masks.shape[-2:]
    partition = F.interpolate(output.partition_masks.float(), size, mode="bilinear", align_corners=False)
    labels = {"decoder": output.masks.argmax(1), "partition": partition.argmax(1)}
    if image is None or output.slot_reconstructions is None:
        return labels
    refined = refine_masks(output, image)
    return labels | {"refined": refined.argmax(1), "high-recall": high_recall_masks(refined).argmax(1)}


def video_hard_labels(outputs: Sequence[DiscoveryOutput], image: Tensor) -> dict[str, Tensor]:
    """Return the track of every pixel, (B, T, H, W), by kind of masks, from T outputs and frames (B, T, 3, H, W).

    Slots must be in the order of tracks, as `track_clip` gives them. There are no high-recall masks of videos.
    """
    frames = [hard_labels(output) for output in outputs]
    if all(output.slot_reconstructions is not None for output in outputs):
        for frame, masks in zip(frames, refine_video_masks(outputs, image), strict=True):
            frame["refined"] = masks.argmax(1)
    return {kind: torch.stack([frame[kind] for frame in frames], 1) for kind in frames[0]}
