"""Masks in the format of COCO's annotation files: images, annotations with compressed run lengths, two categories.

COCO's "info" may hold a date. This one does not: the same prediction gives the same bytes.
"""

from __future__ import annotations

from typing import Any

import numpy as np

import cutslots

OBJECT, BACKGROUND = 1, 2  # ids of the categories


def new_coco() -> dict[str, Any]:
    """Return a COCO dictionary without images. pycocotools 2.0.9 and 2.0.10 need "info" to load results."""
    return {
        "info": {"description": "Objects discovered by cutslots", "version": cutslots.__version__},
        "licenses": [],
        "images": [],
        "annotations": [],
        "categories": [  # "isthing" is that of COCO's panoptic format
            {"id": OBJECT, "name": "object", "isthing": 1},
            {"id": BACKGROUND, "name": "background", "isthing": 0},
        ],
    }


def add_annotations(
    coco: dict[str, Any],
    name: str,
    labels: np.ndarray,
    scores: np.ndarray,
    background: int | None = None,
    include_background: bool = True,
) -> None:
    """Add an image and its masks to a COCO dictionary.

    `labels` (height, width) holds the slot of every pixel, from 0; `scores` (K,) the scores of the slots. `background`
    is the slot that gets the category "background", or no annotation. Beside COCO's keys an annotation has "slot", from
    1, and "score".
    """
    height, width = labels.shape
    image_id = len(coco["images"]) + 1
    coco["images"].append({"id": image_id, "file_name": name, "width": width, "height": height})
    for k in np.unique(labels):
        if k == background and not include_background:
            continue
        mask = labels == k
        coco["annotations"].append(
            {
                "id": len(coco["annotations"]) + 1,
                "image_id": image_id,
                "category_id": BACKGROUND if k == background else OBJECT,
                "slot": int(k) + 1,
                "score": round(float(scores[k]), 4),
                "segmentation": encode_rle(mask),
                "area": int(mask.sum()),
                "bbox": bounding_box(mask),
                "iscrowd": 0,
            }
        )


def bounding_box(mask: np.ndarray) -> list[int]:
    """Return left, top, width and height of the smallest box around a mask (height, width), which must not be empty."""
    rows, cols = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    return [int(v) for v in (cols[0], rows[0], cols[-1] - cols[0] + 1, rows[-1] - rows[0] + 1)]


def encode_rle(mask: np.ndarray) -> dict[str, Any]:
    """Return COCO's compressed run-length encoding of a mask (height, width).

    The runs go down the columns and start with zeros. A length is written as its difference to the length two before,
    in five-bit digits, lowest first; the sixth bit of a character says that more digits follow.

    >>> encode_rle(np.array([[0, 1], [1, 1]], dtype=bool))
    {'size': [2, 2], 'counts': '13'}
    """
    flat = np.concatenate([[False], mask.T.ravel(), [False]])
    ends = np.flatnonzero(flat[1:] != flat[:-1])
    edges = np.concatenate([[0], ends, [mask.size] if len(ends) == 0 or ends[-1] != mask.size else []]).astype(int)
    runs = np.diff(edges)
    runs[3:] = runs[3:] - runs[1:-2]
    return {"size": list(mask.shape), "counts": "".join(map(_encode_integer, runs.tolist()))}


def _encode_integer(value: int) -> str:
    text = ""
    while True:
        low, value = value & 31, value >> 5
        more = value != (-1 if low & 16 else 0)
        text += chr(48 + low + 32 * more)
        if not more:
            return text
