"""`cutslots segment`: the segmentation of a photograph by scribbles, as files.

OUT/labels.png         palette PNG in the colors of the scribbles, value = label, from 1
OUT/alpha_01.png ...   the soft mask of each label, 255 inside
OUT/overlay.png        the image with every pixel in the color of its label
OUT/result.json        colors and areas of the labels, duality gap and iterations; written last
OUT/request.json       what was asked for
"""

from __future__ import annotations

from pathlib import Path

import cutslots
from cutslots.files import Layout, output_folder
from cutslots.inference.segmentation import CAPACITY, MAX_LABELS, TOLERANCE, alpha_name, segment

FILES = {"labels.png", "overlay.png", "result.json", *map(alpha_name, range(MAX_LABELS))}


def segment_file(
    image: Path,
    scribbles: Path,
    out: Path,
    capacity: float = CAPACITY,
    tolerance: float = TOLERANCE,
    overwrite: bool = False,
) -> None:
    """Write the segmentation of an image by scribbles to `out`. `overwrite` replaces an earlier one in the folder."""
    found = segment(image, scribbles, capacity, tolerance)  # before anything is written: the input may be bad
    request = {
        "command": "segment",
        "image": str(image),
        "scribbles": str(scribbles),
        "capacity": capacity,
        "tolerance": tolerance,
        "version": cutslots.__version__,
    }
    with output_folder(out, Layout("segmentation", FILES, marker="result.json"), request, overwrite):
        found.save(out)
    result = found.to_dict()
    print(f"wrote {len(result['labels'])} labels of {result['width']}x{result['height']} pixels to {out}")
    for row in result["labels"]:
        share = row["area"] / (result["width"] * result["height"])
        print(f"  label {row['label']}: color {', '.join(map(str, row['color']))}; {share:.1%} of the pixels")
