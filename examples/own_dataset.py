"""A dataset of your own: a config and a class, registered under a name.

From the command line, as a plugin:

    cutslots evaluate tiny-64 --plugin examples/own_dataset.py --data discs
    cutslots evaluate tiny-64 --plugin examples/own_dataset.py --data discs:max_discs=3

From Python, without the registry:

    python examples/own_dataset.py
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch

from cutslots import load
from cutslots.data import DATASETS, DatasetConfig
from cutslots.dataset import Dataset, Indices, Sample, check_indices
from cutslots.devices import make_fabric
from cutslots.evaluation.evaluate import evaluate_model
from cutslots.registry import Range

LENGTHS = {"train": 10_000, "val": 200, "test": 200}


@dataclass(frozen=True)
class DiscsConfig(DatasetConfig):
    max_discs: Annotated[int, Range(2, 10)] = 5
    """Largest number of discs in an image."""


@DATASETS.register("discs", DiscsConfig)
class Discs(Dataset):
    """Colored discs on gray, later ones in front."""

    def __init__(self, split: str, image_size: tuple[int, int], count: int | None, max_discs: int) -> None:
        self.split, self.image_size, self.max_discs = split, image_size, max_discs
        self.count = LENGTHS[split] if count is None else min(count, LENGTHS[split])

    def __len__(self) -> int:
        return self.count

    def draw(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Return an image (H, W, 3) and its mask (H, W), uint8. They depend on the split and the index only."""
        rng = np.random.default_rng([list(LENGTHS).index(self.split), index])
        height, width = self.image_size
        image, mask = np.full((height, width, 3), 128, np.uint8), np.zeros((height, width), np.uint8)
        y, x = np.mgrid[:height, :width]
        for label in range(1, int(rng.integers(2, self.max_discs + 1)) + 1):
            center, radius = rng.uniform(0.15, 0.85, 2) * self.image_size, rng.uniform(0.07, 0.16) * min(height, width)
            inside = np.hypot(y - center[0], x - center[1]) < radius
            image[inside], mask[inside] = rng.integers(0, 256, 3), label
        return image, mask

    def get_batch(self, indices: Indices, device: torch.device | str = "cpu") -> Sample:
        images, masks = zip(*(self.draw(i) for i in check_indices(indices, len(self)).tolist()), strict=True)
        image, mask = (torch.from_numpy(np.stack(each)).to(device) for each in (images, masks))
        return Sample(image.permute(0, 3, 1, 2), mask)


def main() -> None:
    model = load("tiny-64")
    discs = Discs("test", (64, 64), count=32, max_discs=5)
    scores = evaluate_model(model, discs, make_fabric("cpu"), title="discs").means()
    print(f"ARI-FG {100 * scores['ari_fg']:.1f}, mIoU {100 * scores['miou']:.1f}")


if __name__ == "__main__":
    main()
