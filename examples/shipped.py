"""What the shipped weights find in the first unseen scenes: redrawn, their objects, and the slots that draw most.

    python examples/shipped.py --out out/shipped.png

A row for each scene: image, redrawn, the objects as they are read, seven slots alone. The README opens with it.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from cutslots import Scenes, load
from cutslots.reading import read
from cutslots.report import as_bytes, blend, paint

GAP, SLOTS = 2, 7


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("out/shipped.png"))
    parser.add_argument("--scenes", type=int, default=2, help="of each family")
    args = parser.parse_args()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    picture([row for name in ("plain", "textured") for row in rows(name, args.scenes)]).save(args.out)
    print(f"wrote {args.out}")


@torch.no_grad()
def rows(name: str, count: int) -> list[list[np.ndarray]]:
    """The cells of the first scenes that this model was not trained on."""
    model = load(name)
    image, truth = Scenes(name, "test", size=model.config.size, count=count).render(range(count))
    found = model(image)
    labels = read(found, image).argmax(1).numpy()
    masks = found.masks[:, :, None]
    slots = as_bytes(found.pictures * masks + (1 - masks))
    most = masks.sum((2, 3, 4)).argsort(descending=True)[:, :SLOTS].numpy()
    pictures, redrawn = as_bytes(image / 255.0), as_bytes(found.reconstruction)
    return [
        [pictures[i], redrawn[i], blend(pictures[i], paint(labels[i], truth[i].numpy())), *slots[i, most[i]]]
        for i in range(count)
    ]


def picture(rows: list[list[np.ndarray]]) -> Image.Image:
    """Cells side by side, on grey."""
    side = len(rows[0][0]) + GAP
    page = np.full((len(rows) * side - GAP, len(rows[0]) * side - GAP, 3), 205, dtype=np.uint8)
    for y, row in enumerate(rows):
        for x, cell in enumerate(row):
            page[y * side : (y + 1) * side - GAP, x * side : (x + 1) * side - GAP] = cell
    return Image.fromarray(page)


if __name__ == "__main__":
    main()
