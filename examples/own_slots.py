"""A slot module of your own: soft k-means over features and positions.

python examples/own_slots.py
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from cutslots import PRESETS, Discovery, Scenes
from cutslots.networks import PositionCode
from cutslots.slots import Slots


class KMeansSlots(nn.Module):
    """Features (B, C, H, W) to slots (B, K, D): learned centres, moved a few times to the mean of what is nearest."""

    def __init__(self, in_channels: int, slots: int, size: Sequence[int], slot_dim: int, iterations: int = 3) -> None:
        super().__init__()
        self.iterations = iterations
        self.position = PositionCode(in_channels, size)
        self.pixels = nn.Sequential(nn.LayerNorm(in_channels), nn.Linear(in_channels, slot_dim))
        self.centres = nn.Parameter(torch.randn(slots, slot_dim))

    def forward(self, x: Tensor) -> Slots:
        pixels = self.pixels(self.position(x).flatten(2).mT)  # (B, HW, D)
        centres = self.centres.expand(len(x), -1, -1)
        for _ in range(self.iterations):
            masks = (-torch.cdist(centres, pixels)).softmax(1)  # (B, K, HW): each pixel shared out among centres
            centres = masks @ pixels / (masks.sum(-1, keepdim=True) + 1e-6)
        return Slots(centres, masks.unflatten(-1, x.shape[-2:]))


def main() -> None:
    torch.manual_seed(0)
    config = PRESETS["tiny"].model
    model = Discovery(config)
    model.slots = KMeansSlots(config.encoder_maps, config.slots, (config.size // 2,) * 2, config.slot_dim)
    found = model(Scenes("plain", size=config.size).render([0, 1]).image)
    found.reconstruction.mean().backward()
    print(
        f"slots {tuple(found.slots.shape)}, masks {tuple(found.masks.shape)}, partition {tuple(found.partition.shape)}"
    )


if __name__ == "__main__":
    main()
