"""An encoder as a plugin: patches of 2x2 pixels, then depthwise convolutions.

From the command line:

    cutslots train tiny --plugin examples/own_encoder.py --encoder patches --encoder.depth 2 --out runs/patches
    cutslots evaluate runs/patches --plugin examples/own_encoder.py --data plain:2-5
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from torch import Tensor, nn

from cutslots import ENCODERS, Encoder, EncoderConfig
from cutslots.registry import Range


@dataclass(frozen=True)
class PatchesConfig(EncoderConfig):
    channels: Annotated[int, Range(1, 4096)] = 32
    """Channels of every layer."""
    depth: Annotated[int, Range(0, 64)] = 3
    """Number of depthwise convolutions."""


@ENCODERS.register("patches", PatchesConfig)
class PatchesEncoder(Encoder):
    """Patches of 2x2 pixels, then depthwise 7x7 convolutions with residual connections."""

    def __init__(self, channels: int, depth: int) -> None:
        super().__init__()
        self.out_channels = channels
        self.stem = nn.Conv2d(3, channels, 2, stride=2)
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(channels, channels, 7, padding=3, groups=channels),
                nn.GELU(),
                nn.Conv2d(channels, channels, 1),
            )
            for _ in range(depth)
        )

    def out_size(self, image_size: tuple[int, int]) -> tuple[int, int]:
        return image_size[0] // 2, image_size[1] // 2

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = x + layer(x)
        return x
