"""The color of each label in masks and overlays.

Label 0 is black. The colors of labels 1 to 12 were chosen by a search, so that they differ with normal vision, with
protanopia, deuteranopia and tritanopia, and in grayscale print. CIEDE2000 distances are at least 20 among labels 0 to 8
and at least 15 among labels 0 to 12. The colors of labels 13 to 255 vary in hue and lightness. They are distinct, but
not to every kind of vision.
"""

from __future__ import annotations

import colorsys

import numpy as np

# (256, 3) uint8 RGB
PALETTE = np.array(
    [(0, 0, 0), (137, 49, 241), (148, 248, 254), (207, 203, 0), (33, 156, 127), (103, 52, 3), (139, 121, 0)]
    + [(0, 0, 145), (165, 155, 255), (90, 87, 124), (238, 159, 185), (41, 86, 71), (207, 223, 167)]
    + [
        tuple(round(255 * c) for c in colorsys.hls_to_rgb(i * 0.3819660113 % 1, (0.62, 0.42, 0.78)[i % 3], 0.7))
        for i in range(12, 255)
    ],
    dtype=np.uint8,
)
