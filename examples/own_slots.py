"""A slot module as a plugin: soft k-means over features and positions.

From the command line:

    cutslots train tiny --plugin examples/own_slots.py --slots k-means --slots.num-iterations 3 --out runs/k-means
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor, nn

from cutslots import SLOTS, SlotModule, SlotsConfig
from cutslots.modules.position import SoftPositionEmbedding
from cutslots.modules.slots import Slots
from cutslots.registry import Range


@dataclass(frozen=True)
class KMeansConfig(SlotsConfig):  # num_slots, slot_dim and relative_positions come from SlotsConfig
    num_iterations: Annotated[int, Range(1, 64)] = 3
    """Updates of the cluster centers."""


@SLOTS.register("k-means", KMeansConfig)
class KMeansSlots(SlotModule):
    """Soft k-means: learned centers, moved to the mean of the pixels nearest to them."""

    def __init__(
        self,
        in_channels: int,
        size: tuple[int, int],
        num_slots: int,
        slot_dim: int,
        relative_positions: bool,
        num_iterations: int,
    ) -> None:
        super().__init__(num_slots, slot_dim, relative_positions)
        self.num_iterations = num_iterations
        self.position = SoftPositionEmbedding(in_channels, size)
        self.features = nn.Sequential(nn.LayerNorm(in_channels), nn.Linear(in_channels, self.content_dim))
        self.centers = nn.Parameter(torch.randn(num_slots, self.content_dim))

    def forward(self, x: Tensor) -> Slots:
        pixels = self.features(self.position(x).flatten(2).mT)  # (B, HW, D)
        centers = self.centers.expand(len(x), -1, -1)
        for _ in range(self.num_iterations):
            assignment = (-torch.cdist(centers, pixels)).softmax(1)  # (B, K, HW), sums to one over K
            centers = assignment @ pixels / (assignment.sum(-1, keepdim=True) + 1e-6)
        masks = assignment.unflatten(-1, x.shape[-2:])
        return Slots(self.with_positions(centers, masks), masks)
