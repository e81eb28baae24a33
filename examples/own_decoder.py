"""A decoder as a plugin: one MLP that sees a slot and the position of a pixel.

From the command line:

    cutslots train tiny --plugin examples/own_decoder.py --decoder pixel-mlp --decoder.hidden-dim 64 --out runs/mlp
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from torch import Tensor, nn

from cutslots import DECODERS, DecoderConfig
from cutslots.modules.decoders import MixtureDecoder
from cutslots.modules.position import SoftPositionEmbedding
from cutslots.registry import Range


@dataclass(frozen=True)
class PixelMLPDecoderConfig(DecoderConfig):
    hidden_dim: Annotated[int, Range(1, 4096)] = 64
    """Hidden dimension of the MLP."""


@DECODERS.register("pixel-mlp", PixelMLPDecoderConfig)
class PixelMLPDecoder(MixtureDecoder):
    """An MLP applied to every pixel, as 1x1 convolutions. `MixtureDecoder` turns logits into masks and mixes colors."""

    def __init__(self, slot_dim: int, position_dim: int, image_size: tuple[int, int], hidden_dim: int) -> None:
        super().__init__()
        self.image_size = image_size
        self.position = SoftPositionEmbedding(slot_dim, image_size)
        self.layers = nn.Sequential(
            nn.Conv2d(slot_dim, hidden_dim, 1), nn.ReLU(), nn.Conv2d(hidden_dim, hidden_dim, 1), nn.ReLU(),
            nn.Conv2d(hidden_dim, 4, 1),
        )  # fmt: skip

    def components(self, slots: Tensor) -> Tensor:
        """Return three color channels in [-1, 1] and a logit, (B, K, 4, H, W), for slots (B, K, D)."""
        grid = slots.flatten(0, 1)[:, :, None, None].expand(-1, -1, *self.image_size)
        return self.layers(self.position(grid)).unflatten(0, slots.shape[:2])
