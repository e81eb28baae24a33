"""The strokes that a visitor draws on an image.

The browser sends strokes, not pixels: a request is small, and the same strokes mark the image at any resolution. A
stroke is [label, diameter, x, y, x, y, ...] in pixels of the canvas; label 0 erases. `read_strokes` checks what the
browser sends, `draw_strokes` makes marks of it for `cutslots.segment`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from PIL import Image, ImageDraw

# Names and colors of labels from 1, distinct to color-blind readers (Okabe and Ito 2008).
COLORS = {
    "blue": (0, 114, 178),
    "orange": (213, 94, 0),
    "green": (0, 158, 115),
    "yellow": (240, 228, 66),
    "pink": (204, 121, 167),
    "sky": (86, 180, 233),
}

MAX_STROKES = 1_000
MAX_POINTS = 20_000  # of all strokes
MAX_DIAMETER = 200  # pixels of the canvas
MAX_NUMBER = 1e9  # NaN, infinity and integers that exceed a float's range are not below it


class Stroke(NamedTuple):
    label: int  # from 1; 0 erases
    diameter: float
    points: list[tuple[float, float]]  # x, y


def read_strokes(value: Any, size: tuple[int, int]) -> list[Stroke]:
    """Return the strokes in what the browser sends for a canvas of `size` (width, height). Raises ValueError."""
    if not isinstance(value, list) or not all(isinstance(each, list) for each in value):
        raise ValueError(f"the scribbles are a {type(value).__name__}; expected a list of strokes: reload the page")
    if len(value) > MAX_STROKES:
        raise ValueError(f"there are {len(value):,} strokes; expected at most {MAX_STROKES:,}: clear the scribbles")
    numbers = sum(map(len, value))
    if numbers > 2 * MAX_POINTS:
        raise ValueError(f"the strokes have {numbers // 2:,} points; expected at most {MAX_POINTS:,}: clear them")
    return [_read_stroke(each, size) for each in value]


def _read_stroke(stroke: list[Any], size: tuple[int, int]) -> Stroke:
    """Return one stroke. Each sentence tells to reload the page: no visitor can draw such a stroke."""
    if not all(type(each) in (int, float) and abs(each) < MAX_NUMBER for each in stroke):
        raise ValueError("a stroke has a value that is no number below 1e9; reload the page")
    if len(stroke) < 4 or len(stroke) % 2:
        raise ValueError(
            f"a stroke has {len(stroke)} numbers; expected a label, a diameter and points: reload the page"
        )
    label, diameter, *xy = stroke
    if label not in range(len(COLORS) + 1):
        raise ValueError(f"a stroke has label {label}; expected 0 to {len(COLORS)}: reload the page")
    if not 1 <= diameter <= MAX_DIAMETER:
        raise ValueError(f"a stroke is {diameter} pixels wide; expected 1 to {MAX_DIAMETER}: reload the page")
    points = list(zip(xy[::2], xy[1::2], strict=True))
    if any(not (0 <= x <= size[0] and 0 <= y <= size[1]) for x, y in points):
        width, height = size
        raise ValueError(f"a stroke is outside of the image of {width}x{height} pixels; reload the page")
    return Stroke(int(label), float(diameter), points)


def draw_strokes(strokes: list[Stroke], canvas: tuple[int, int], size: tuple[int, int]) -> np.ndarray:
    """Return the labels (H, W) uint8 that strokes on a canvas mark in an image of `size` (width, height); 0 is none."""
    image = Image.new("L", size)
    pen, scale = ImageDraw.Draw(image), (size[0] / canvas[0], size[1] / canvas[1])
    for label, diameter, points in strokes:
        radius = max(0, round((diameter * max(scale) - 1) / 2))  # around the center of a pixel
        pixels = [tuple(min(int(x * s), n - 1) for x, s, n in zip(xy, scale, size, strict=True)) for xy in points]
        pen.line(pixels, fill=label, width=2 * radius + 1)
        pen.point(pixels, fill=label)
        for x, y in pixels if radius else []:  # round ends and joints
            pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill=label)
    return np.asarray(image)
