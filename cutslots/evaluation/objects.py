"""Objects found, by size and by occlusion.

An object is **found** if the mask of some slot has an IoU above 0.5 with it. A pixel has one true and one predicted
label, so such pairs are one to one without an assignment: with an IoU above 0.5 more than half of the object lies in
the mask and more than half of the mask in the object, and that holds for one pair only (Kirillov et al., 2019,
"Panoptic Segmentation"). The masks of all slots count; the background, label 0, is no object.

Objects are grouped by

    size         small, medium, large: less than 1 % of the image, less than 4 %, or more. A square of these areas has a
                 tenth and a fifth of the sides of a square image.
    occlusion    unoccluded, partly occluded, heavily occluded: the share of its pixels that other objects hide is zero,
                 at most a half, or more. Only datasets that know what is hidden have these groups.

The size is that of the visible pixels, at the resolution of the true masks. In a video it is the mean over the frames
in which the object has pixels, and what is hidden counts over all frames. Ignored pixels belong to no object.

Values are those of single images. `MetricRows.means` pools them: the fraction of all objects of a group in a dataset.

Shapes: B images, T frames, O objects; index o is label o + 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cutslots.evaluation.metrics import MIN_LOCALIZED_IOU, best_overlaps

SMALL, LARGE = 0.01, 0.04  # fractions of the image
HALF_VISIBLE = 0.5
SIZES = {
    "small": f"Less than {100 * SMALL:.0f} % of the image.",
    "medium": f"From {100 * SMALL:.0f} % to less than {100 * LARGE:.0f} % of the image.",
    "large": f"At least {100 * LARGE:.0f} % of the image.",
}
OCCLUSIONS = {
    "unoccluded": "No other object hides a pixel of it.",
    "partly_occluded": "Other objects hide at most half of it.",
    "heavily_occluded": "Other objects hide more than half of it.",
}
GROUPS = SIZES | OCCLUSIONS

Groups = dict[str, Tensor]  # (B, O) bool: which objects are in a group, by its name; "objects" are all


def object_groups(area: Tensor, visibility: Tensor | None = None) -> Groups:
    """Return the groups of objects by their area (B, O) and, if it is known, by their visibility (B, L).

    Areas are fractions of the image. Objects without area are in no group.

    >>> groups = object_groups(torch.tensor([[0.005, 0.1, 0.0]]), torch.tensor([[1.0, 0.25]]))
    >>> {name: group[0].tolist() for name, group in groups.items() if group.any()}
    {'objects': [True, True, False], 'small': [True, False, False], 'large': [False, True, False], \
'unoccluded': [True, False, False], 'heavily_occluded': [False, True, False]}
    """
    present = area > 0
    groups = {"objects": present, "small": present & (area < SMALL), "large": area >= LARGE}
    groups["medium"] = present & ~groups["small"] & ~groups["large"]
    if visibility is not None:
        v = _fit(visibility, area.shape[1])  # comparisons with NaN, of an unknown visibility, are false
        groups["unoccluded"] = present & (v >= 1)
        groups["partly_occluded"] = present & (v >= HALF_VISIBLE) & (v < 1)
        groups["heavily_occluded"] = present & (v < HALF_VISIBLE)
    return {name: groups[name] for name in ("objects", *GROUPS) if name in groups}


def _fit(visibility: Tensor, num_objects: int) -> Tensor:
    """Return visibility (B, L) for the first `num_objects` labels, NaN for those that it does not have."""
    missing = max(0, num_objects - visibility.shape[1])
    return torch.nn.functional.pad(visibility, (0, missing), value=torch.nan)[:, :num_objects]


def object_areas(table: Tensor, num_pixels: int) -> Tensor:
    """Return the areas (B, O) of objects from contingency tables (B, [T,] L, K), as fractions of `num_pixels`.

    In videos they are means over the frames in which an object has pixels.
    """
    pixels = table.sum(-1)[..., 1:].double() / num_pixels
    if table.ndim == 3:
        return pixels
    return pixels.sum(1) / (pixels > 0).sum(1).clamp(min=1)


def count_objects(groups: Groups) -> dict[str, Tensor]:
    """Return the number of objects (B,) of every group: num_objects, num_small, ..."""
    return {f"num_{name}": group.sum(1) for name, group in groups.items()}


def found_objects(table: Tensor, groups: Groups) -> dict[str, Tensor]:
    """Return the fraction of objects found (B,), of all and of every group, from contingency tables (B, L, K).

    The names are found, found_small, ... Images without such objects have NaN.
    """
    found = best_overlaps(table) > MIN_LOCALIZED_IOU  # objects without pixels have NaN
    fractions = {name: (found & group).sum(1).double() / group.sum(1) for name, group in groups.items()}
    return {"found" if name == "objects" else f"found_{name}": value for name, value in fractions.items()}
