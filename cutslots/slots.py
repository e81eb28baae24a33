"""From a feature map to slots: by graph cuts, by the same network without them, by Slot Attention.

All three take features (B, C, H, W) and return `Slots`: vectors (B, K, D) and the masks (B, K, H, W) they came from.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from cutslots.networks import EVERYWHERE, PLACE, PositionCode, checked_size, places
from cutslots.partition import KPartition, SoftmaxPartition, VolumePartition


class Slots(NamedTuple):
    slots: Tensor  # (B, K, D)
    masks: Tensor  # (B, K, H, W), summing to one over K


class CutSlots(nn.Module):
    """Slots by graph cuts (the paper's algorithm 2): position code, partition, mean over H and W, MLP.

    Drops in where Slot Attention stood. `pool="mean"` divides a masked sum by the size of the picture, as printed;
    "weighted" by that of the mask. `streams` > 1 runs several feature MLPs side by side, each followed by a residual
    MLP, and adds their slots. `weight_maps` is the width of the weight network, `feature_maps` and
    `hidden` are those of the MLPs before and after pooling. `placed` keeps the last three numbers of a slot for where
    its mask is (the background is everywhere), for a decoder to draw around. Other options are those of `KPartition`.

    >>> slots, masks = CutSlots(in_channels=64, slots=11, size=(64, 64))(torch.randn(2, 64, 64, 64))
    >>> slots.shape, masks.shape
    (torch.Size([2, 11, 64]), torch.Size([2, 11, 64, 64]))
    """

    partition_type: type[KPartition] = KPartition

    def __init__(
        self,
        in_channels: int,
        slots: int,
        size: Sequence[int],
        slot_dim: int = 64,
        *,
        feature_maps: int = 64,
        hidden: int = 128,
        pool: Literal["mean", "weighted"] = "mean",
        streams: int = 1,
        weight_maps: int = 32,
        placed: bool = False,
        **partition: Any,
    ) -> None:
        super().__init__()
        if pool not in ("mean", "weighted"):
            raise ValueError(f"pool is {pool!r}; expected 'mean' or 'weighted'")
        self.pool, self.placed = pool, placed
        self.position = PositionCode(in_channels, size)
        self.partition = self.partition_type(in_channels, slots, size, hidden=weight_maps, **partition)
        self.streams = nn.ModuleList(
            Stream(in_channels, feature_maps, hidden, slot_dim - PLACE * placed, residual=streams > 1)
            for _ in range(streams)
        )

    def forward(self, x: Tensor) -> Slots:
        x = self.position(x)
        masks = self.partition.masks(x)
        return Slots(self.pooled(x, masks), masks)

    def pooled(self, x: Tensor, masks: Tensor) -> Tensor:
        """Slots (B, K, D) of features (B, C, H, W) under masks (B, K, H, W)."""
        pixels, where = x.flatten(2).mT, masks.flatten(2)
        where = where / (where.shape[-1] if self.pool == "mean" else where.sum(-1, keepdim=True) + 1e-6)
        slots = torch.stack([stream(pixels, where) for stream in self.streams]).sum(0)
        return with_places(slots, masks, self.partition.background != "none") if self.placed else slots


def with_places(slots: Tensor, masks: Tensor, ground: bool) -> Tensor:
    """Slots (B, K, D) followed by the places of their masks: (B, K, D + 3). The ground's, the first, is everywhere."""
    place = places(masks)
    if ground:
        place = torch.cat([place.new_tensor(EVERYWHERE).expand_as(place[:, :1]), place[:, 1:]], 1)
    return torch.cat([slots.to(place.dtype), place], -1)


class Stream(nn.Module):
    """Pixels (B, HW, C) through an MLP, pooled by weights (B, K, HW), through another: slots (B, K, D).

    Pooling is linear, so the first MLP's last layer is applied after it, to K vectors instead of HW: the same function
    for half the work.
    """

    def __init__(self, channels: int, maps: int, hidden: int, slot_dim: int, residual: bool) -> None:
        super().__init__()
        self.before = nn.Sequential(nn.LayerNorm(channels), nn.Linear(channels, maps), nn.ReLU())
        self.last = nn.Linear(maps, slot_dim)
        self.after = _mlp(slot_dim, hidden, slot_dim, norm=True)
        self.residual = residual

    def forward(self, pixels: Tensor, weights: Tensor) -> Tensor:
        hidden = self.before(pixels)
        pooled = nn.functional.linear(weights.to(hidden.dtype) @ hidden, self.last.weight)
        pooled = pooled + weights.sum(-1, keepdim=True) * self.last.bias
        return pooled + self.after(pooled) if self.residual else self.after(pooled)


class SoftmaxSlots(CutSlots):
    """`CutSlots` with the softmax of the network's outputs in place of the program: the control."""

    partition_type = SoftmaxPartition


class VolumeSlots(CutSlots):
    """`CutSlots` of clips (B, T, C, H, W), parted by cuts through space and time: slots (B, T, K, D), masks
    (B, T, K, H, W), slot k being the same thing in every frame."""

    partition_type = VolumePartition

    def forward(self, x: Tensor) -> Slots:
        frames = self.position(x.flatten(0, 1))
        masks = self.partition.masks(frames.unflatten(0, x.shape[:2]))
        return Slots(self.pooled(frames, masks.flatten(0, 1)).unflatten(0, x.shape[:2]), masks)


class SlotAttention(nn.Module):
    """Slot Attention (Locatello et al., 2020), with the position code, normalisation and MLP that precede it.

    The reference's settings: 3 iterations, slots drawn from one learned Gaussian, attention normalised over slots and
    then averaged over pixels with epsilon 1e-8, a GRU and a residual MLP of 128. Every call draws its slots anew, from
    torch's generator.
    """

    def __init__(
        self,
        in_channels: int,
        slots: int,
        size: Sequence[int],
        slot_dim: int = 64,
        *,
        iterations: int = 3,
        hidden: int = 128,
        epsilon: float = 1e-8,
        placed: bool = False,
    ) -> None:
        super().__init__()
        self.placed = placed
        slot_dim -= PLACE * placed
        self.size = checked_size(size)
        self.slots, self.iterations, self.epsilon = slots, iterations, epsilon
        self.position = PositionCode(in_channels, size)
        self.features = _mlp(in_channels, in_channels, in_channels, norm=True)
        self.norm_inputs = nn.LayerNorm(in_channels)
        self.norm_slots = nn.LayerNorm(slot_dim)
        self.query = nn.Linear(slot_dim, slot_dim, bias=False)
        self.key_value = nn.Linear(in_channels, 2 * slot_dim, bias=False)
        self.gru = nn.GRUCell(slot_dim, slot_dim)
        self.mlp = _mlp(slot_dim, hidden, slot_dim, norm=True)
        self.mean = nn.Parameter(nn.init.xavier_uniform_(torch.empty(1, 1, slot_dim)))
        self.log_scale = nn.Parameter(nn.init.xavier_uniform_(torch.empty(1, 1, slot_dim)))
        self._initialise()

    def _initialise(self) -> None:
        """As the reference, which is TensorFlow's: Glorot weights, orthogonal recurrent ones, no biases."""
        for name, parameter in self.named_parameters():
            if name.startswith("gru.weight"):
                for gate in parameter.detach().chunk(3):
                    nn.init.orthogonal_(gate) if name.endswith("hh") else nn.init.xavier_uniform_(gate)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
        for name, parameter in self.named_parameters():
            if "bias" in name:
                nn.init.zeros_(parameter)

    def forward(self, x: Tensor) -> Slots:
        x = self.position(x)
        pixels = self.norm_inputs(self.features(x.flatten(2).mT))
        key, value = self.key_value(pixels).chunk(2, -1)  # (B, HW, D)
        noise = torch.randn(len(x), self.slots, self.mean.shape[-1], device=x.device)
        slots = self.mean + self.log_scale.exp() * noise
        attention = slots
        for _ in range(self.iterations):
            slots, attention = self._iterate(slots, key, value)
        masks = attention.unflatten(-1, self.size)
        return Slots(with_places(slots, masks, ground=False) if self.placed else slots, masks)

    def _iterate(self, slots: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        query = self.query(self.norm_slots(slots)) * key.shape[-1] ** -0.5
        attention = (query @ key.mT).float().softmax(1)  # (B, K, HW), over slots
        weights = attention + self.epsilon
        update = (weights / weights.sum(-1, keepdim=True)).to(value.dtype) @ value
        slots = self.gru(update.flatten(0, 1), slots.to(update.dtype).flatten(0, 1)).view_as(slots)
        return slots + self.mlp(slots), attention


def _mlp(before: int, hidden: int, after: int, norm: bool = False) -> nn.Sequential:
    layers = [nn.Linear(before, hidden), nn.ReLU(), nn.Linear(hidden, after)]
    return nn.Sequential(nn.LayerNorm(before), *layers) if norm else nn.Sequential(*layers)
