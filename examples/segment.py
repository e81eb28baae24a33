"""Segment two photographs of scikit-image by scribbles: cutslots.segment, without training.

    python examples/segment.py --out out/segment

Writes segment.png: the photographs with their scribbles, p, the soft mask and the labels. Also writes the photographs
and their scribbles as files for `cutslots segment`. docs/inference.md shows the figure.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import matplotlib
import numpy as np
from PIL import Image, ImageDraw
from skimage import data

from cutslots import Segmentation, segment

matplotlib.use("Agg")
import matplotlib.pyplot as plt

Strokes = dict[tuple[int, int, int], list[list[tuple[int, int]]]]  # color -> lines of points (x, y)

BLUE, ORANGE, GREEN = (0, 114, 178), (230, 159, 0), (0, 158, 115)
COFFEE: Strokes = {
    BLUE: [
        [(190, 110), (190, 60), (300, 30), (400, 60), (410, 130), (370, 210)],
        [(240, 140), (290, 150), (340, 130)],
        [(205, 125), (225, 95), (300, 75), (350, 90), (370, 120)],
        [(200, 170), (230, 225), (330, 230)],
        [(100, 150), (95, 230), (130, 300), (260, 350), (400, 330), (460, 250), (465, 170)],
        [(215, 290), (235, 250)],
        [(350, 300), (375, 260), (395, 250)],
        [(130, 180), (160, 120)],
    ],
    ORANGE: [
        [(15, 380), (15, 150), (120, 60), (250, 5), (580, 10), (585, 380), (470, 390)],
        [(520, 60), (530, 330)],
        [(30, 330), (90, 370), (200, 390)],
        [(20, 20), (120, 10)],
    ],
}
ASTRONAUT: Strokes = {
    BLUE: [
        [(215, 30), (165, 70), (170, 85), (250, 25), (285, 70), (285, 110)],
        [(215, 80), (215, 170)],
        [(190, 130), (250, 130)],
        [(150, 200), (210, 250), (280, 250), (295, 230)],
        [(135, 180), (145, 160), (180, 155)],
        [(100, 230), (60, 300), (40, 480), (120, 400), (170, 490), (330, 260), (345, 330)],
        [(150, 380), (190, 370)],
        [(140, 385), (140, 405), (165, 415)],
        [(128, 165), (130, 200), (160, 240), (240, 275)],
        [(150, 175), (165, 215)],
        [(410, 440), (430, 460)],
        [(245, 300), (245, 500), (262, 420), (268, 500)],
        [(290, 350), (318, 355)],
        [(300, 490), (290, 440), (310, 390), (400, 360), (460, 400), (485, 460), (500, 500)],
        [(340, 480), (360, 400), (430, 430)],
        [(160, 480), (190, 490), (120, 505)],
        [(75, 240), (60, 330), (70, 400)],
    ],
    GREEN: [
        [(415, 10), (420, 80), (428, 140)],
        [(385, 60), (385, 200), (370, 215)],
        [(440, 65), (443, 190), (420, 200)],
        [(402, 90), (410, 190), (425, 230), (415, 260), (395, 240)],
        [(380, 255), (380, 275), (450, 270)],
    ],
    ORANGE: [
        [(110, 20), (100, 120), (110, 190)],
        [(20, 30), (50, 60), (20, 180), (60, 130), (90, 190), (30, 200)],
        [(5, 250), (10, 320), (10, 440), (12, 500)],
        [(320, 20), (330, 150), (330, 200), (355, 300)],
        [(480, 20), (490, 200), (480, 250)],
        [(400, 320), (500, 300), (505, 400)],
    ],
}
PHOTOGRAPHS = {"coffee": COFFEE, "astronaut": ASTRONAUT}  # CC0 and public domain (NASA)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("out/segment"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)

    rows = []
    for name, strokes in PHOTOGRAPHS.items():
        image = Image.fromarray(getattr(data, name)())
        scribbles = draw(strokes, image.size)
        image.save(args.out / f"{name}.jpg", quality=95)
        scribbles.save(args.out / f"{name}-marks.png")
        start = time.perf_counter()
        found = segment(image, scribbles)
        seconds = time.perf_counter() - start
        print(
            f"{name}: {len(found.colors)} labels, gap {found.gap:.1e}, {found.iterations} iterations, {seconds:.2f} s"
        )
        rows.append((scribbles, found))
    save_figure(rows, args.out / "segment.png")
    print(f"wrote {args.out / 'segment.png'}")


def draw(strokes: Strokes, size: tuple[int, int]) -> Image.Image:
    """Return scribbles, RGBA: lines without soft edges on a transparent image."""
    image = Image.new("RGBA", size)
    pen = ImageDraw.Draw(image)
    for color, lines in strokes.items():
        for points in lines:
            pen.line(points, fill=(*color, 255), width=5)
    return image


def save_figure(rows: list[tuple[Image.Image, Segmentation]], path: Path) -> None:
    figure, axes = plt.subplots(len(rows), 4, figsize=(13, 5.8), layout="constrained", width_ratios=[1, 1.12, 1, 1])
    for row, (scribbles, found) in zip(axes, rows, strict=True):
        marked = found.image.convert("RGBA")
        marked.alpha_composite(scribbles)
        row[0].imshow(marked)
        shown = row[1].imshow(found.p[0], cmap="RdBu", vmin=-20, vmax=20)
        figure.colorbar(shown, ax=row[1], shrink=0.8)
        row[2].imshow(on_white(found.cutout(0)))
        row[3].imshow(found.overlay())
        titles = ("photograph and scribbles", "p of the blue label", "soft mask of the blue label", "labels")
        for axis, title in zip(row, titles, strict=True):
            axis.set_title(title, fontsize=10)
            axis.set_axis_off()
    figure.savefig(path, dpi=90)


def on_white(image: Image.Image) -> np.ndarray:
    """Return an RGBA image on a white background."""
    white = Image.new("RGBA", image.size, "white")
    white.alpha_composite(image)
    return np.asarray(white.convert("RGB"))


if __name__ == "__main__":
    main()
