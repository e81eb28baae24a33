"""The authors' released network where it differs from their paper's text (github.com/alpz/graph-ocl).

The preset `graph-ocl` combines these parts with a ResNet encoder:

    graph-ocl-cut      two edge nets with LeakyReLU, one of the object cuts and one of a cut that gives the foreground;
                       edges between neighbours leave inner pixels only; a softmax over the combined masks
    graph-ocl-slots    three pixel MLPs behind one LayerNorm, pooled under the same masks; the slots are
                       s_1 + f_1(s_1) + f_2(s_2) + f_3(s_3)
    graph-ocl-decoder  LeakyReLU, tanh on the colors, and the initial scale of transposed convolutions

Given the same weights the outputs are the same (`cutslots.models.graph_ocl` converts them).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, cast

import numpy as np
import torch
from torch import Tensor, nn

from cutslots.modules.base import LayerNorm, Positive, check_features, check_size
from cutslots.modules.decoders import DECODERS, SpatialBroadcastConfig, SpatialBroadcastDecoder
from cutslots.modules.partition import (
    PARTITIONS,
    PartitionConfig,
    PartitionModule,
    check_temperatures,
    make_edge_net,
)
from cutslots.modules.slots import SLOTS, PartitionSlots, SlotsConfig, pool_projected
from cutslots.programs.graph_cut import GraphCut
from cutslots.registry import Range

NUM_BRANCHES = 3  # pixel MLPs and slot MLPs
MAX_PIXELS = 2**18  # of a cut; to factor a larger one takes many seconds and gigabytes


# ----------------------------------------------------------------------------------------------------------- partition


@dataclass(frozen=True)
class GraphOCLCutConfig(PartitionConfig):
    edge_net_channels: Annotated[int, Range(1, 65_536)] = 100
    """Hidden channels of the two networks that give the edge weights."""
    edge_net_kernel_sizes: Annotated[tuple[int, ...], Range(1, 255)] = (3, 3)
    """Kernel size of each of their layers."""
    gamma: Positive = 0.5
    """Regulariser of the min-cut QP."""
    temperature: Positive = 0.5
    """Temperature of the softmax over objects."""
    combined_temperature: Positive = 0.1
    """Temperature of the softmax over the combined masks."""


@PARTITIONS.register("graph-ocl-cut", GraphOCLCutConfig)
class GraphOCLPartition(PartitionModule):
    """Partition of each image by the minimum cuts of the authors' released code.

    Takes features (B, C, H, W); returns masks (B, K, H, W). One edge net gives the weights of K - 1 object cuts, the
    other those of one more cut. Of that cut, the edges of a pixel from the source and to the sink have variables d_s
    and d_t. The foreground is their softmax, e^d_s / (e^d_s + e^d_t), and mask 0 the rest.

    The authors impose p_source - p_sink = 10 where `GraphCut` has 1 and a slack. This changes neither p nor d_s - d_t:
    by symmetry it moves p_source and p_sink by opposite amounts, and every d_s and d_t by the same amount.
    """

    has_background = True

    def __init__(
        self,
        in_channels: int,
        num_slots: int,
        size: Sequence[int],
        *,
        edge_net_channels: int = 100,
        edge_net_kernel_sizes: Sequence[int] = (3, 3),
        gamma: float = 0.5,
        temperature: float = 0.5,
        combined_temperature: float = 0.1,
    ) -> None:
        super().__init__()
        if num_slots < 2:
            raise ValueError(f"num_slots is {num_slots}; expected at least 2")
        check_temperatures(temperature=temperature, combined_temperature=combined_temperature)
        self.in_channels, self.size = in_channels, check_size(size)
        if self.size[0] * self.size[1] > MAX_PIXELS:
            raise ValueError(f"size is {self.size}; expected at most {MAX_PIXELS:,} feature pixels for graph-ocl-cut")
        self.temperature, self.combined_temperature = temperature, combined_temperature
        self.object_net, self.foreground_net = (
            make_edge_net(in_channels, edge_net_channels, 6 * cuts, edge_net_kernel_sizes, nn.LeakyReLU)
            for cuts in (num_slots - 1, 1)
        )
        self.cut = GraphCut(inner_edges(self.size), self.size[0] * self.size[1], gamma)

    def masks(self, x: Tensor) -> Tensor:
        x = check_features(x, self.in_channels, self.size)
        foreground = self.foreground(self.foreground_net(x).relu().unflatten(1, (-1, 6)))
        objects = self.vertices(self.object_net(x).relu().unflatten(1, (-1, 6)))
        objects = (objects / self.temperature).softmax(1)
        masks = torch.cat([1 - foreground, foreground * objects], 1)
        return (masks / self.combined_temperature).softmax(1)

    def vertices(self, w: Tensor) -> Tensor:
        """Return p (..., H, W) for weights (..., 6, H, W), whose channels are those of `GridCut`."""
        return self.cut(inner_weights(w)).unflatten(-1, self.size)

    def foreground(self, w: Tensor) -> Tensor:
        """Return the softmax over the two terminal edges of each pixel, that from the source: (..., H, W)."""
        d_s, d_t = self.cut.solve(inner_weights(w)).d[..., -2 * self.cut.num_vertices :].chunk(2, -1)
        return (d_s - d_t).sigmoid().unflatten(-1, self.size)


def inner_edges(size: tuple[int, int]) -> np.ndarray:
    """Return the edges (E, 2) from all pixels but those of the border to their right, left, lower, upper neighbours.

    >>> inner_edges((3, 3)).tolist()
    [[4, 5], [4, 3], [4, 7], [4, 1]]
    """
    tails = np.arange(size[0] * size[1]).reshape(size)[1:-1, 1:-1].ravel()
    return np.concatenate([np.stack([tails, tails + step], 1) for step in (1, -1, size[1], -size[1])])


def inner_weights(w: Tensor) -> Tensor:
    """Return weights (..., 6, H, W) as those of `inner_edges`, then of the source, then of the sink: (..., edges)."""
    return torch.cat([w[..., :4, 1:-1, 1:-1].flatten(-3), w[..., 4:, :, :].flatten(-3)], -1)


# --------------------------------------------------------------------------------------------------------- slot module


@dataclass(frozen=True)
class GraphOCLSlotsConfig(SlotsConfig):
    feature_dim: Annotated[int, Range(1, 65_536)] = 256
    """Hidden dimension of the MLPs that pixels pass before pooling."""
    mlp_dim: Annotated[int, Range(1, 65_536)] = 128
    """Hidden dimension of the MLPs that slots pass after pooling."""
    partition: PartitionConfig = field(default_factory=GraphOCLCutConfig)
    """How features are partitioned."""


@SLOTS.register("graph-ocl-slots", GraphOCLSlotsConfig)
class GraphOCLSlots(PartitionSlots):
    """Features pooled by the three branches of the authors' released code.

    The partition sees the features with their position embedding, the pixel MLPs see them normalised. Sums under a
    mask are divided by the size of the image.

    >>> slots, masks = GraphOCLSlots(in_channels=8, num_slots=11, size=(16, 16))(torch.randn(2, 8, 16, 16))
    >>> slots.shape, masks.shape
    (torch.Size([2, 11, 64]), torch.Size([2, 11, 16, 16]))
    """

    def __init__(
        self,
        in_channels: int,
        num_slots: int,
        size: Sequence[int],
        slot_dim: int = 64,
        *,
        feature_dim: int = 256,
        mlp_dim: int = 128,
        relative_positions: bool = False,
        partition: PartitionConfig | PartitionModule | None = None,
    ) -> None:
        partition = GraphOCLCutConfig() if partition is None else partition
        super().__init__(in_channels, num_slots, size, slot_dim, relative_positions, partition)
        dim = self.content_dim
        self.norm = LayerNorm(in_channels)
        self.pixel_mlps = nn.ModuleList(_mlp(in_channels, feature_dim, dim) for _ in range(NUM_BRANCHES))
        self.slot_mlps = nn.ModuleList(_mlp(dim, mlp_dim, dim) for _ in range(NUM_BRANCHES))

    def pooled(self, x: Tensor, masks: Tensor) -> Tensor:
        pixels, weights = self.norm(x.flatten(2).mT), masks.flatten(2) / (masks.shape[2] * masks.shape[3])
        branches = [_pool(cast(nn.Sequential, pixel_mlp), pixels, weights) for pixel_mlp in self.pixel_mlps]
        slots = branches[0]  # the only branch with a residual connection
        for branch, slot_mlp in zip(branches, self.slot_mlps, strict=True):
            slots = slots + slot_mlp(branch)
        return self.with_positions(slots, masks)


def _pool(pixel_mlp: nn.Sequential, pixels: Tensor, weights: Tensor) -> Tensor:
    *hidden, projection = pixel_mlp
    for layer in hidden:
        pixels = layer(pixels)
    return pool_projected(pixels, weights, cast(nn.Linear, projection))


def _mlp(in_dim: int, hidden_dim: int, out_dim: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(in_dim, hidden_dim), nn.ReLU(), nn.Linear(hidden_dim, out_dim))


# ------------------------------------------------------------------------------------------------------------- decoder


@dataclass(frozen=True)
class GraphOCLDecoderConfig(SpatialBroadcastConfig):
    extra_layers: Annotated[int, Range(0, 64)] = 2
    """Convolutions at full resolution before the last one."""


@DECODERS.register("graph-ocl-decoder", GraphOCLDecoderConfig)
class GraphOCLDecoder(SpatialBroadcastDecoder):
    """The spatial broadcast decoder of the authors' released code: LeakyReLU, and a tanh on the colors.

    Its convolutions at full resolution are transposed ones in their code. With stride 1 that is the same function, of
    kernels that are flipped. The initial scale is that of transposed convolutions: the last layer starts four times
    larger.
    """

    activation = nn.LeakyReLU

    def __init__(
        self,
        slot_dim: int,
        image_size: Sequence[int],
        channels: Sequence[int] = (64,),
        extra_layers: int = 2,
        position_dim: int = 0,
        skipped_doublings: int = 0,
    ) -> None:
        super().__init__(slot_dim, image_size, channels, extra_layers, position_dim, skipped_doublings)
        for layer in self.layers:
            if isinstance(layer, nn.Conv2d):
                _init_as_transposed(layer)

    def components(self, slots: Tensor) -> Tensor:
        x = super().components(slots)
        return torch.cat([x[:, :, :3].tanh(), x[:, :, 3:]], 2)


def _init_as_transposed(layer: nn.Conv2d) -> None:
    """Initialise a convolution as `nn.ConvTranspose2d` does, whose bound has the output channels as its fan."""
    bound = (layer.out_channels * layer.kernel_size[0] * layer.kernel_size[1]) ** -0.5
    for parameter in layer.parameters():
        nn.init.uniform_(parameter, -bound, bound)
