"""What the shipped weights find in the first unseen scenes: redrawn, their objects, and the slots that draw most.

    python examples/shipped.py --out out/shipped.png

A row for each scene: image, redrawn, the objects as they are read, seven slots alone. The README opens with it.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch

from cutslots import Scenes, load
from cutslots.reading import read
from cutslots.report import as_bytes, blend, paint, tiled

SLOTS = 7


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("out/shipped.png"))
    parser.add_argument("--scenes", type=int, default=2, help="of each family")
    args = parser.parse_args()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    tiled([row for name in ("plain", "textured") for row in rows(name, args.scenes)]).save(args.out)
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


if __name__ == "__main__":
    main()
