"""A dataset of your own: judged from Python, and written as a folder for the command line.

python examples/own_dataset.py --out out/discs
cutslots evaluate tiny --data out/discs
cutslots train tiny --data out/discs --steps 100
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from cutslots import load
from cutslots.data import Sample
from cutslots.devices import make_fabric
from cutslots.evaluate import judge
from cutslots.scenes.dataset import Indices


class Discs:
    """Coloured discs on grey, the later ones in front. Image i is the same on every call."""

    def __init__(self, count: int, size: int = 64) -> None:
        self.count, self.size = count, size

    def __len__(self) -> int:
        return self.count

    def draw(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        """The image (size, size, 3) and its mask (size, size), both bytes; 0 in the mask is the background."""
        rng = np.random.default_rng(i)
        image = np.full((self.size, self.size, 3), 128, np.uint8)
        mask = np.zeros((self.size, self.size), np.uint8)
        rows, cols = np.mgrid[: self.size, : self.size] / self.size
        for number in range(1, int(rng.integers(2, 6)) + 1):
            (y, x), radius = rng.uniform(0.15, 0.85, 2), rng.uniform(0.07, 0.16)
            inside = np.hypot(rows - y, cols - x) < radius
            image[inside], mask[inside] = rng.integers(0, 256, 3), number
        return image, mask

    def render(self, indices: Indices, device: torch.device | str = "cpu") -> Sample:
        """All that training and judging ask of a dataset, besides its length."""
        pairs = [self.draw(int(i)) for i in indices]
        image, mask = (torch.from_numpy(np.stack(part)).to(device) for part in zip(*pairs, strict=True))
        return Sample(image.permute(0, 3, 1, 2), mask)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("out/discs"))
    parser.add_argument("--count", type=int, default=32)
    args = parser.parse_args()
    discs = Discs(args.count)
    scores = judge(load("tiny"), discs, make_fabric("cpu"), title="discs").means()
    print(f"ARI-FG {100 * scores['ari_fg']:.1f}, mIoU {100 * scores['miou']:.1f}")

    for kind in ("images", "masks"):
        (args.out / kind).mkdir(parents=True, exist_ok=True)
    for i in range(len(discs)):
        for kind, picture in zip(("images", "masks"), discs.draw(i), strict=True):
            Image.fromarray(picture).save(args.out / kind / f"{i:06d}.png")
    print(f"wrote {len(discs)} images and masks to {args.out}")


if __name__ == "__main__":
    main()
