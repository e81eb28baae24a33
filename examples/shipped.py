"""The figure of the README: what the checkpoints of this package discover in the first test scenes.

    python examples/shipped.py --out out/shipped.png

A row for each scene. The columns are the image, the reconstruction, the refined masks as colors over the image, and
the seven largest slots.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont

from cutslots import Scenes, load
from cutslots.evaluation.visualize import colorize
from cutslots.models.refinement import refine_masks
from cutslots.viz.images import blend_colors, image_grid, to_uint8

NUM_SLOTS = 7
COLUMNS = ["image", "reconstruction", "objects", *(f"slot {k}" for k in range(1, NUM_SLOTS + 1))]
HEADER, FONT_SIZE = 24, 15  # pixels


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("out/shipped.png"))
    parser.add_argument("--scenes", type=int, default=2, help="scenes of each family")
    args = parser.parse_args()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    rows = [row for family in ("plain", "textured") for row in discover(f"{family}-128", family, args.scenes)]
    label_columns(image_grid(rows), COLUMNS).save(args.out)
    print(f"wrote {args.out}")


@torch.no_grad()
def discover(checkpoint: str, family: str, count: int) -> list[list[np.ndarray]]:
    """Return the cells of the first `count` test scenes of a family."""
    model = load(checkpoint)
    image, mask = Scenes(family, "test", model.image_size, count=count).get_batch(range(count))
    output = model(image)
    labels = refine_masks(output, image).argmax(1).numpy()
    masks = output.masks[:, :, None]
    slots = to_uint8(output.slot_reconstructions * masks + (1 - masks))  # on white
    largest = masks.sum((2, 3, 4)).argsort(descending=True)[:, :NUM_SLOTS].numpy()
    images, reconstructions = to_uint8(image / 255.0), to_uint8(output.reconstruction)
    return [
        [
            images[i],
            reconstructions[i],
            blend_colors(images[i], colorize(labels[i], mask[i].numpy())),
            *slots[i, largest[i]],
        ]
        for i in range(count)
    ]


def label_columns(grid: Image.Image, names: list[str]) -> Image.Image:
    """Return the grid below a row of column names."""
    out = Image.new("RGB", (grid.width, grid.height + HEADER), "white")
    out.paste(grid, (0, HEADER))
    draw, font = ImageDraw.Draw(out), ImageFont.load_default(FONT_SIZE)
    width = grid.width / len(names)
    for column, name in enumerate(names):
        draw.text(((column + 0.5) * width, HEADER / 2), name, "black", font, anchor="mm")
    return out


if __name__ == "__main__":
    main()
