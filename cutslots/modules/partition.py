"""Features to k soft masks by k minimum cuts (the paper's algorithm 1 and its background slot).

A small convolutional network, the edge net, turns features x into edge weights w, 6 for every pixel and cut. Each cut
gives every pixel a value p. A softmax over the cuts turns them into masks z:

    w_i = f_i(x),    p_i = cut(w_i),    z = softmax(p / temperature)

With a background there are two partitions, one of background and foreground and one of k - 1 objects. The combined
masks are [background, foreground * object_1, ...]. They sum to one. Another softmax, over the combined masks and with
the temperature `combined_temperature`, sharpens them.

`KPartition` has the paper's relaxed cuts (`GridCut`), `MinCutPartition` the minimum cuts themselves (`MinCut`), and
`SoftmaxPartition` none: its network gives p.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn

from cutslots.modules.base import Positive, check_features, check_kernel_sizes, check_size, exportable, upcast_half
from cutslots.modules.padded_conv import PaddedConv2d
from cutslots.programs.grid_cut import GridCut
from cutslots.programs.min_cut import MAX_ITERATIONS, MinCut
from cutslots.programs.qp import check_positive
from cutslots.registry import PartConfig, Range, Registry, Steps

Background = Literal["cuts", "none"]
Anchor = Annotated[float, Range(0, 1)]


@dataclass(frozen=True)
class PartitionConfig(PartConfig):
    """Base of the configs of partitions."""


PARTITIONS = Registry("partition", PartitionConfig)


@dataclass(frozen=True)
class SoftmaxPartitionConfig(PartitionConfig):
    edge_net_channels: Annotated[int, Range(1, 65_536)] = 32
    """Hidden channels of the network that gives the logits (edge weights, for cuts)."""
    edge_net_kernel_sizes: Annotated[tuple[int, ...], Range(1, 255)] = (3, 3, 1)
    """Kernel size of each of its layers."""
    temperature: Positive = 0.5
    """Temperature of the softmax over objects."""
    background: Background = "cuts"
    """How slot 0 becomes the background: by a partition in two of its own (cuts), or not at all (none)."""
    background_temperature: Positive = 0.5
    """Temperature of the softmax between background and foreground."""
    combined_temperature: Positive | None = 0.1
    """Temperature of a softmax over the combined masks of background and objects; None for no such softmax."""


@dataclass(frozen=True)
class CutPartitionConfig(SoftmaxPartitionConfig):
    signed_weights: bool = True
    """Allow negative edge weights; otherwise they pass a ReLU."""
    gamma: Positive = 0.5
    """Regulariser of the min-cut QP."""
    reach: Positive | None = None
    """Distance in feature pixels over which an edge weight acts; None is the paper, 0.71."""
    anchor: Anchor = 0.0
    """0 leaves the terminals free, which balances every cut (the paper); 1 fixes them."""
    background_anchor: Anchor | None = None
    """The anchor of the cuts of the background; that of all cuts by default."""


@dataclass(frozen=True)
class SpacetimePartitionConfig(CutPartitionConfig):
    pass


@dataclass(frozen=True)
class MinCutPartitionConfig(SoftmaxPartitionConfig):
    gamma: Positive = 1.0
    """Divides p. It changes no cut, and acts as another factor of all temperatures."""
    initial_capacity: Positive = 1e-3
    """The capacity that an output of zero of the edge net means; with a small one the start is the softmax's."""
    capacity_ramp_steps: Steps = 0
    """Training steps over which a factor of all capacities grows from 0 to 1; 0 for no such factor."""
    straight_through: bool = False
    """Assign each pixel to its largest mask; gradients are those of the soft masks."""
    tolerance: Annotated[float, Range(1e-12, 0.5)] = 1e-3
    """Duality gap at which the iterations stop, relative to the value of the cut."""
    max_iterations: Annotated[int, Range(1, MAX_ITERATIONS)] = 100
    """Iterations after which they stop in any case, without a warning."""


@exportable
class Partition(NamedTuple):
    parts: Tensor  # (B, K, C, H, W): the masked features
    masks: Tensor  # (B, K, H, W), summing to one over K


class PartitionModule(nn.Module):
    """Base class of partitions. `forward` returns masked features and masks. Subclasses implement `masks`."""

    has_background = False  # whether mask 0 is the background
    spacetime = False  # whether features are those of clips, (B, T, C, H, W)

    def forward(self, x: Tensor) -> Partition:
        masks = self.masks(x)
        return Partition(masks.unsqueeze(-3) * x.unsqueeze(-4), masks)

    def masks(self, x: Tensor) -> Tensor:
        """Return masks (B, K, H, W) of features (B, C, H, W). They sum to one over K."""
        raise NotImplementedError


class EdgeNetPartition(PartitionModule):
    """Base class of partitions by an edge net and a softmax over p. Subclasses implement `vertices`.

    The options are those of `SoftmaxPartitionConfig`.
    """

    weights_per_cut: int  # outputs of the edge net for each pixel and cut

    def __init__(
        self,
        in_channels: int,
        num_slots: int,
        size: Sequence[int],
        *,
        edge_net_channels: int = 32,
        edge_net_kernel_sizes: Sequence[int] = (3, 3, 1),
        temperature: float = 0.5,
        background: Background = "cuts",
        background_temperature: float = 0.5,
        combined_temperature: float | None = 0.1,
    ) -> None:
        super().__init__()
        extra_cuts = {"cuts": 1, "none": 0}
        if background not in extra_cuts:
            raise ValueError(f"background is {background!r}; expected one of {', '.join(extra_cuts)}")
        if num_slots < 2:
            raise ValueError(f"num_slots is {num_slots}; expected at least 2")
        check_temperatures(
            temperature=temperature,
            background_temperature=background_temperature,
            combined_temperature=combined_temperature,
        )
        self.in_channels, self.size = in_channels, check_size(size)
        self.num_cuts = num_slots + extra_cuts[background]
        self.background, self.has_background = background, background != "none"
        self.temperature, self.background_temperature = temperature, background_temperature
        self.combined_temperature = combined_temperature
        out_channels = self.num_cuts * self.weights_per_cut
        self.edge_net = make_edge_net(in_channels, edge_net_channels, out_channels, edge_net_kernel_sizes)

    def masks(self, x: Tensor) -> Tensor:
        """Return the masks (B, K, H, W) alone. They sum to one over K."""
        return self._masks(self.edge_weights(check_features(x, self.in_channels, self.size)))

    def _masks(self, w: Tensor) -> Tensor:
        if self.background == "none":
            return (self.vertices(w) / self.temperature).softmax(1)
        pair, objects = self._background_and_objects(w)
        pair, objects = (pair / self.background_temperature).softmax(1), (objects / self.temperature).softmax(1)
        masks = torch.cat([pair[:, :1], pair[:, 1:] * objects], 1)
        return masks if self.combined_temperature is None else (masks / self.combined_temperature).softmax(1)

    def edge_weights(self, x: Tensor) -> Tensor:
        """Return the edge weights (B, cuts, weights of a pixel, H, W) of all cuts."""
        return self.edge_net(x).unflatten(1, (self.num_cuts, self.weights_per_cut))

    def vertices(self, w: Tensor, background: bool = False) -> Tensor:
        """Return the vertex variables p (B, cuts, H, W)."""
        raise NotImplementedError

    def _background_and_objects(self, w: Tensor) -> tuple[Tensor, Tensor]:
        """Return p of the two cuts of the background, and p of the cuts of the objects."""
        pair, objects = self.vertices(w).tensor_split([2], 1)
        return pair, objects


@PARTITIONS.register("cut", CutPartitionConfig)
class KPartition(EdgeNetPartition):
    """Partition of each image by minimum cuts (the paper).

    Takes features (B, C, H, W); returns `num_slots` masked features and masks. `background` says how mask 0 becomes
    the background: by a partition in two ("cuts"), or not at all ("none"). `gamma`, `reach` and `anchor` are those of
    `GridCut`. `background_anchor` applies to the cuts of the background alone: an anchored background need not cover
    half of the image. The other options are those of `CutPartitionConfig`.

    >>> parts, masks = KPartition(in_channels=8, num_slots=5, size=(16, 16))(torch.randn(2, 8, 16, 16))
    >>> parts.shape, masks.shape
    (torch.Size([2, 5, 8, 16, 16]), torch.Size([2, 5, 16, 16]))
    """

    weights_per_cut = 6

    def __init__(
        self,
        in_channels: int,
        num_slots: int,
        size: Sequence[int],
        *,
        signed_weights: bool = True,
        gamma: float = 0.5,
        reach: float | None = None,
        anchor: float = 0.0,
        background_anchor: float | None = None,
        **options: Any,
    ) -> None:
        super().__init__(in_channels, num_slots, size, **options)
        if background_anchor is not None and not 0 <= background_anchor <= 1:
            raise ValueError(f"background_anchor is {background_anchor}; expected a number from 0 to 1, or None")
        self.signed_weights = signed_weights
        self.cut = self.background_cut = GridCut(self.size, gamma, reach, anchor)
        self.has_background_cut = False  # of its own
        if background_anchor is not None and background_anchor != anchor:
            self.has_background_cut = True
            self.background_cut = GridCut(self.size, gamma, reach, background_anchor)

    def edge_weights(self, x: Tensor) -> Tensor:
        """Return the edge weights (B, cuts, 6, H, W) of all cuts."""
        w = super().edge_weights(x)
        return w if self.signed_weights else w.relu()

    def vertices(self, w: Tensor, background: bool = False) -> Tensor:
        return self.cut_for(w, background)(w)

    def cut_for(self, w: Tensor, background: bool = False) -> GridCut:
        """Return the layer that solves the cuts of these edge weights."""
        return self.background_cut if background else self.cut

    def _background_and_objects(self, w: Tensor) -> tuple[Tensor, Tensor]:
        if not self.has_background_cut:
            return super()._background_and_objects(w)
        return self.vertices(w[:, :2], background=True), self.vertices(w[:, 2:])


@PARTITIONS.register("softmax", SoftmaxPartitionConfig)
class SoftmaxPartition(EdgeNetPartition):
    """The no-cut ablation: the network gives p itself, and a softmax the masks."""

    weights_per_cut = 1

    def vertices(self, w: Tensor, background: bool = False) -> Tensor:
        return upcast_half(w.squeeze(2))


@PARTITIONS.register("spacetime-cut", SpacetimePartitionConfig)
class SpacetimePartition(KPartition):
    """Partition of clips by minimum cuts through space and time: a mask follows its object.

    Takes features (B, T, C, H, W) of clips of any length. The edge net sees one frame at a time. Two more weights for
    every pixel connect it to the frames before and after.

    >>> parts, masks = SpacetimePartition(8, 5, (16, 16))(torch.randn(2, 3, 8, 16, 16))
    >>> parts.shape, masks.shape
    (torch.Size([2, 3, 5, 8, 16, 16]), torch.Size([2, 3, 5, 16, 16]))
    """

    weights_per_cut = 8
    spacetime = True

    def __init__(self, in_channels: int, num_slots: int, size: Sequence[int], **options: Any) -> None:
        super().__init__(in_channels, num_slots, size, **options)
        self.clip_cuts = nn.ModuleDict()  # by length; nothing in them is learned

    def masks(self, x: Tensor) -> Tensor:
        """Return the masks (B, T, K, H, W) alone. They sum to one over K."""
        if x.ndim != 5:
            raise ValueError(f"features have shape {tuple(x.shape)}; expected (B, T, C, H, W)")
        w = self.edge_weights(check_features(x.flatten(0, 1), self.in_channels, self.size)).unflatten(0, x.shape[:2])
        return self._masks(w.movedim(1, 3)).movedim(2, 1)

    def cut_for(self, w: Tensor, background: bool = False) -> GridCut:
        return self.prepare(w.shape[-3], background)

    def prepare(self, frames: int, background: bool = False) -> GridCut:
        """Return the layer for clips of so many frames. It is made once, at best before the model is compiled."""
        cut = self.background_cut if background else self.cut
        key = f"{frames}_{'background' if background and self.has_background_cut else 'objects'}"
        if key not in self.clip_cuts:
            made = GridCut((frames, *self.size), cut.gamma, cut.reach, cut.anchor)
            self.clip_cuts[key] = made.to(cut.device, cut.dtype)
        return cast(GridCut, self.clip_cuts[key])


@PARTITIONS.register("min-cut", MinCutPartitionConfig)
class MinCutPartition(EdgeNetPartition):
    """Partition of each image by minimum cuts with all their inequalities (`MinCut`).

    The edge net gives every pixel five numbers for each cut. Four become the capacities to its neighbours by a
    softplus, the fifth is source - sink. Without capacities p is the fifth divided by `gamma`: `SoftmaxPartition`.
    Capacities hold neighbours together. `initial_capacity` is the capacity that an output of zero means.

    With `capacity_ramp_steps` N, capacities are multiplied by min(1, steps / N). The buffer `steps` counts the calls in
    training mode and is saved with the weights, so training resumes where it was. With `straight_through` masks are 0
    or 1: a pixel belongs to its largest soft mask, and gradients are those of the soft masks.

    Iterations start from zero flow: the flow of the last training step is that of other images.

    >>> parts, masks = MinCutPartition(in_channels=8, num_slots=5, size=(16, 16))(torch.randn(2, 8, 16, 16))
    >>> parts.shape, masks.shape
    (torch.Size([2, 5, 8, 16, 16]), torch.Size([2, 5, 16, 16]))
    """

    weights_per_cut = 5
    steps: Tensor

    def __init__(
        self,
        in_channels: int,
        num_slots: int,
        size: Sequence[int],
        *,
        gamma: float = 1.0,
        initial_capacity: float = 1e-3,
        capacity_ramp_steps: int = 0,
        straight_through: bool = False,
        tolerance: float = 1e-3,
        max_iterations: int = 100,
        **options: Any,
    ) -> None:
        super().__init__(in_channels, num_slots, size, **options)
        if capacity_ramp_steps < 0:
            raise ValueError(f"capacity_ramp_steps is {capacity_ramp_steps}; expected at least 0")
        self.initial_capacity = check_positive("initial_capacity", initial_capacity)
        self.capacity_ramp_steps, self.straight_through = capacity_ramp_steps, straight_through
        self.cut = MinCut(self.size, gamma, tolerance, max_iterations, warn=False)
        if capacity_ramp_steps:
            self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def masks(self, x: Tensor) -> Tensor:
        masks = super().masks(x)
        if self.capacity_ramp_steps and self.training:
            self.steps.add_(1)
        return masks

    def edge_weights(self, x: Tensor) -> Tensor:
        """Return the edge weights (B, cuts, 6, H, W) of all cuts, in the order of `MinCut`. The sink's are zero."""
        w = upcast_half(super().edge_weights(x))
        shift = self.initial_capacity + math.log(-math.expm1(-self.initial_capacity))  # softplus(shift) is it
        capacity = nn.functional.softplus(w[:, :, :4] + shift)
        if self.capacity_ramp_steps:
            capacity = capacity * (self.steps / self.capacity_ramp_steps).clamp(max=1).to(w.dtype)
        return torch.cat([capacity, w[:, :, 4:], torch.zeros_like(w[:, :, 4:])], 2)

    def vertices(self, w: Tensor, background: bool = False) -> Tensor:
        return self.cut(w)

    def _masks(self, w: Tensor) -> Tensor:
        masks = super()._masks(w)
        if not self.straight_through:
            return masks
        hard = nn.functional.one_hot(masks.argmax(1), masks.shape[1]).movedim(-1, 1).to(masks.dtype)
        return masks + (hard - masks).detach()


def make_edge_net(
    in_channels: int,
    hidden: int,
    out_channels: int,
    kernel_sizes: Sequence[int],
    activation: type[nn.Module] = nn.ReLU,
) -> nn.Sequential:
    """Return convolutions that keep the size, with activations between them."""
    check_kernel_sizes(kernel_sizes, 1, "edge_net_kernel_sizes")
    channels = [in_channels] + [hidden] * (len(kernel_sizes) - 1) + [out_channels]
    layers: list[nn.Module] = []
    for kernel, (before, after) in zip(kernel_sizes, pairwise(channels), strict=True):
        layers += [PaddedConv2d(before, after, kernel, padding=kernel // 2), activation()]
    return nn.Sequential(*layers[:-1])


def check_temperatures(**named: float | None) -> None:
    """Raise a ValueError that names a temperature if it is out of range. None stands for no softmax."""
    for name, value in named.items():
        if value is not None:
            check_positive(name, value)
