"""Position embeddings, and the positions of masks.

A slot may carry the position of its mask in its last three components, (y, x, scale), for a decoder that places what
it reconstructs there. The idea is Invariant Slot Attention's (Biza et al., 2023).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from cutslots.modules.base import check_features, check_size, downcast_half, upcast_half
from cutslots.programs.constants import ConstantLayer

POSITION_DIM = 3  # components of a mask's position: y, x, scale
FULL_IMAGE = (0.5, 0.5, 12**-0.5)  # the position of a mask that covers the image evenly
MIN_SCALE = 0.04  # of masks of a few pixels, which would be enlarged without bound


class SoftPositionEmbedding(ConstantLayer):
    """Adds a learned linear function of (y, x, 1 - y, 1 - x) to every pixel, as Slot Attention does."""

    grid: Tensor

    def __init__(self, channels: int, size: Sequence[int]) -> None:
        super().__init__()
        self.size = check_size(size)
        self.linear = nn.Linear(4, channels)
        self.precompute()

    def precompute(self) -> None:
        yx = _coordinates(*self.size)  # float32, as in Slot Attention's reference, also for a float64 layer
        self.register_buffer("grid", torch.cat([yx, 1 - yx], -1).to(self.device, self.dtype), persistent=False)

    def forward(self, x: Tensor, position: Tensor | None = None) -> Tensor:
        """Return `x` (B, C, H, W) with the embedding added.

        With a `position` (B, 3) for each image, coordinates are relative to it (see `mask_positions`).
        """
        self.materialize(x)
        check_features(x, self.linear.out_features, self.size)
        if position is None:
            return x + self._embed(self.grid).permute(2, 0, 1)
        center, scale = position[:, None, None, :2], position[:, None, None, 2:]
        yx = FULL_IMAGE[0] + (self.grid[..., :2] - center) * (FULL_IMAGE[2] / scale)
        return x + self._embed(torch.cat([yx, 1 - yx], -1)).permute(0, 3, 1, 2)

    def _embed(self, grid: Tensor) -> Tensor:
        return self.linear(downcast_half(grid, self.linear.weight))


def mask_positions(masks: Tensor) -> Tensor:
    """Return the center (y, x) and the scale of masks (B, K, H, W), as (B, K, 3) in units of the image sides.

    The scale is the root mean square distance from the center along an axis. Half precision is computed in float32.
    """
    masks = upcast_half(masks)
    yx = _coordinates(*masks.shape[-2:], masks.device).to(masks.dtype).flatten(0, 1)
    weight = masks.flatten(2)
    with torch.autocast(masks.device.type, enabled=False):
        weight = weight / (weight.sum(-1, keepdim=True) + 1e-6)
        center, square = weight @ yx, weight @ yx.square()
        variance = (square - center.square()).mean(-1, keepdim=True)
        return torch.cat([center, variance.clamp(min=MIN_SCALE**2).sqrt()], -1)


def append_positions(slots: Tensor, masks: Tensor, has_background: bool) -> Tensor:
    """Append the positions of masks to slots (B, K, D): (B, K, D + 3). The position of a background is the image."""
    position = mask_positions(masks)
    if has_background:
        # not new_tensor: a copy from the host makes the device wait, and cannot be part of a CUDA graph
        background = torch.stack([position.new_full((position.shape[0], 1), value) for value in FULL_IMAGE], -1)
        position = torch.cat([background, position[:, 1:]], 1)
    return torch.cat([slots.to(position.dtype), position], -1)


def _coordinates(height: int, width: int, device: torch.device | str = "cpu") -> Tensor:
    axes = (torch.linspace(0, 1, n, dtype=torch.float32, device=device) for n in (height, width))
    return torch.stack(torch.meshgrid(*axes, indexing="ij"), -1)
