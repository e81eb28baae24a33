"""Datasets of random arrays, for tests of the protocol."""

from __future__ import annotations

import numpy as np
import torch

from cutslots.dataset import Indices, Sample, VideoDataset, check_indices


class Arrays(VideoDataset):
    """`count` images or videos of random bytes, (H, W) = (6, 10). Counts the calls of `get_batch`."""

    image_size = (6, 10)

    def __init__(self, count: int, frames: int = 1) -> None:
        rng, shape = np.random.default_rng(0), (count, *((frames,) if frames > 1 else ()))
        self.frames, self.calls = frames, 0
        self.image = torch.from_numpy(rng.integers(0, 256, (*shape, 3, 6, 10), dtype=np.uint8))
        self.mask = torch.from_numpy(rng.integers(0, 4, (*shape, 6, 10), dtype=np.uint8))

    def __len__(self) -> int:
        return len(self.image)

    def get_batch(self, indices: Indices, device: torch.device | str = "cpu") -> Sample:
        self.calls += 1
        rows = torch.from_numpy(check_indices(indices, len(self)))
        return Sample(self.image[rows].to(device), self.mask[rows].to(device))
