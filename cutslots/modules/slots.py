"""Slot modules: features (B, C, H, W) to slots (B, K, D) and masks (B, K, H, W).

`CutSlots` pools features under the masks of a partition. It is a drop-in replacement for Slot Attention
(slot_attention.py), which has the same interface.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal, NamedTuple

import torch
from torch import Tensor, nn

from cutslots.modules.base import LayerNorm, PartModule, downcast_half, exportable, mlp
from cutslots.modules.partition import PARTITIONS, CutPartitionConfig, PartitionConfig, PartitionModule
from cutslots.modules.position import POSITION_DIM, SoftPositionEmbedding, append_positions
from cutslots.registry import PartConfig, Range, Registry

Pool = Literal["image_mean", "mask_mean"]


@dataclass(frozen=True)
class SlotsConfig(PartConfig):
    """Base of the configs of slot modules."""

    num_slots: Annotated[int, Range(1, 255)] = 11
    """Number of slots, the background slot included."""
    slot_dim: Annotated[int, Range(1, 65_536)] = 64
    """Dimension of a slot."""
    relative_positions: bool = False
    """Keep the last three components of a slot for the position of its mask, which the decoder uses."""


SLOTS = Registry("slot module", SlotsConfig)


@exportable
class Slots(NamedTuple):
    slots: Tensor  # (B, K, D)
    masks: Tensor  # (B, K, H, W), summing to one over K


class SlotModule(PartModule):
    """Base class of slot modules. Subclasses implement `forward`, which maps features to `Slots`."""

    has_background = False  # whether slot 0 is the background
    spacetime = False  # whether features are those of clips, (B, T, C, H, W)

    def __init__(self, num_slots: int, slot_dim: int, relative_positions: bool = False) -> None:
        super().__init__()
        self.num_slots, self.slot_dim = num_slots, slot_dim
        self.position_dim = POSITION_DIM if relative_positions else 0
        if slot_dim <= self.position_dim:
            positions = " with relative_positions" if relative_positions else ""
            raise ValueError(f"slot_dim is {slot_dim}; expected more than {self.position_dim}{positions}")
        self.content_dim = slot_dim - self.position_dim  # the part of a slot that is learned

    def with_positions(self, slots: Tensor, masks: Tensor) -> Tensor:
        """Return slots (B, K, content_dim) as (B, K, slot_dim): with the positions of their masks, if so configured."""
        return append_positions(slots, masks, self.has_background) if self.position_dim else slots


class PartitionSlots(SlotModule):
    """Base class of slot modules that pool features under the masks of a partition. Subclasses implement `pooled`.

    `partition` is a config or a module. With a spacetime partition all tensors have a frame axis after B.
    """

    def __init__(
        self,
        in_channels: int,
        num_slots: int,
        size: Sequence[int],
        slot_dim: int,
        relative_positions: bool,
        partition: PartitionConfig | PartitionModule,
    ) -> None:
        super().__init__(num_slots, slot_dim, relative_positions)
        self.position = SoftPositionEmbedding(in_channels, size)
        self.partition: PartitionModule = (
            PARTITIONS.build(partition, in_channels=in_channels, num_slots=num_slots, size=size)
            if isinstance(partition, PartitionConfig)
            else partition
        )
        self.has_background, self.spacetime = self.partition.has_background, self.partition.spacetime

    def pooled(self, x: Tensor, masks: Tensor) -> Tensor:
        """Return slots (B, K, D) of features (B, C, H, W) under masks (B, K, H, W)."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Slots:
        if self.spacetime:
            return self._forward_clips(x)
        x = self.position(x)
        masks = self.partition.masks(x)
        return Slots(self.pooled(x, masks), masks)

    def _forward_clips(self, x: Tensor) -> Slots:
        frames = self.position(x.flatten(0, 1))
        masks = self.partition.masks(frames.unflatten(0, x.shape[:2]))
        return Slots(self.pooled(frames, masks.flatten(0, 1)).unflatten(0, x.shape[:2]), masks)


@dataclass(frozen=True)
class CutSlotsConfig(SlotsConfig):
    feature_dim: Annotated[int, Range(1, 65_536)] = 64
    """Hidden dimension of the MLP that pixels pass before pooling."""
    mlp_dim: Annotated[int, Range(1, 65_536)] = 128
    """Hidden dimension of the MLP that slots pass after pooling."""
    pool: Pool = "image_mean"
    """Divide a masked sum of features by the size of the image (the paper) or by that of the mask."""
    partition: PartitionConfig = field(default_factory=CutPartitionConfig)
    """How features are partitioned."""


@SLOTS.register("cut-slots", CutSlotsConfig)
class CutSlots(PartitionSlots):
    """Features pooled under the masks of a partition, by default of graph cuts (the paper's algorithm 2).

    Position embedding, partition, MLP on pixels, mean over H and W, MLP on slots. `pool="image_mean"` divides a masked
    sum by the size of the image, as printed; "mask_mean" by that of the mask. `partition` is a config or a module.
    `relative_positions` keeps the last three components of a slot for the position of its mask. With a spacetime
    partition all tensors have a frame axis after B.

    >>> slots, masks = CutSlots(in_channels=64, num_slots=11, size=(64, 64))(torch.randn(2, 64, 64, 64))
    >>> slots.shape, masks.shape
    (torch.Size([2, 11, 64]), torch.Size([2, 11, 64, 64]))
    """

    def __init__(
        self,
        in_channels: int,
        num_slots: int,
        size: Sequence[int],
        slot_dim: int = 64,
        *,
        feature_dim: int = 64,
        mlp_dim: int = 128,
        pool: Pool = "image_mean",
        relative_positions: bool = False,
        partition: PartitionConfig | PartitionModule | None = None,
    ) -> None:
        partition = CutPartitionConfig() if partition is None else partition
        super().__init__(in_channels, num_slots, size, slot_dim, relative_positions, partition)
        if pool not in ("image_mean", "mask_mean"):
            raise ValueError(f"pool is {pool!r}; expected 'image_mean' or 'mask_mean'")
        self.pool = pool
        self.pixel_mlp = nn.Sequential(LayerNorm(in_channels), nn.Linear(in_channels, feature_dim), nn.ReLU())
        self.projection = nn.Linear(feature_dim, self.content_dim)
        self.slot_mlp = mlp(self.content_dim, mlp_dim, self.content_dim)

    def pooled(self, x: Tensor, masks: Tensor) -> Tensor:
        weights = masks.flatten(2)
        total = weights.shape[-1] if self.pool == "image_mean" else weights.sum(-1, keepdim=True) + 1e-6
        slots = pool_projected(self.pixel_mlp(x.flatten(2).mT), weights / total, self.projection)
        return self.with_positions(self.slot_mlp(slots), masks)


def pool_projected(features: Tensor, weights: Tensor, projection: nn.Linear) -> Tensor:
    """Return the sums (B, K, D) of projected features (B, HW, C) under weights (B, K, HW).

    Pooling is linear. So the projection is applied after it, to K vectors instead of HW: the same function for less
    work.
    """
    sums = torch.nn.functional.linear(weights.to(features.dtype) @ features, projection.weight)
    return downcast_half(sums + weights.sum(-1, keepdim=True) * projection.bias, projection.weight)
