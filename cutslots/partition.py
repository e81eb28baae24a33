"""A feature map parted into k soft masks by k minimum cuts (the paper's algorithm 1 and its background slot).

A small convolutional network turns features into weights, 6 for every pixel and cut; each cut gives every pixel a
value p; a softmax over the cuts makes masks of them:

    w_i = f_i(x),    p_i = cut(w_i),    z = softmax(p / temperature),    r_i = z_i * x

With a background there are two partitions, one of background and foreground and one of k - 1 objects, and the masks
are [ground, foreground * object_1, ...]. They sum to one.

Shapes: B batch, K parts, C channels, H W grid.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from cutslots.cut import GridCut
from cutslots.networks import checked_map, checked_size

SOURCE, SINK = -2, -1  # where GridCut keeps a pixel's terminal edges


class Partition(NamedTuple):
    parts: Tensor  # (B, K, C, H, W): the features, masked
    masks: Tensor  # (B, K, H, W)


class KPartition(nn.Module):
    """`parts` soft masks of a feature map (B, C, H, W), and the features masked by each.

    `background` says how the first part becomes the background: by a 2-partition of its own ("cuts"), by the terminal
    edges of one more cut ("terminals"), or not at all ("none"). `sharpen` is the temperature of a second softmax over
    the finished masks. `signed=False` passes the weights through a ReLU. `gamma`, `reach` and `anchor` are `GridCut`'s;
    `background_anchor` is for the cuts of the background alone, which need not be half of the picture then.

    >>> parts, masks = KPartition(in_channels=8, parts=5, size=(16, 16))(torch.randn(2, 8, 16, 16))
    >>> parts.shape, masks.shape
    (torch.Size([2, 5, 8, 16, 16]), torch.Size([2, 5, 16, 16]))
    """

    weights_per_cut = 6

    def __init__(
        self,
        in_channels: int,
        parts: int,
        size: Sequence[int],
        *,
        hidden: int = 32,
        kernels: Sequence[int] = (3, 3, 1),
        signed: bool = True,
        gamma: float = 0.5,
        reach: float | None = None,
        anchor: float = 0.0,
        temperature: float = 0.5,
        background: Literal["cuts", "terminals", "none"] = "cuts",
        background_temperature: float = 0.1,
        background_anchor: float | None = None,
        sharpen: float | None = None,
    ) -> None:
        super().__init__()
        extra = {"cuts": 1, "terminals": 0, "none": 0}
        if background not in extra:
            raise ValueError(f"background is {background!r}; expected one of {', '.join(extra)}")
        if background == "terminals" and self.weights_per_cut == 1:
            raise ValueError("background is 'terminals', but without the program there are none; expected 'cuts'")
        if sharpen is not None and not sharpen > 0:
            raise ValueError(f"sharpen is {sharpen}; expected a positive number or None")
        if background_anchor is not None and not 0 <= background_anchor <= 1:
            raise ValueError(f"background_anchor is {background_anchor}; expected a number from 0 to 1 or None")
        if parts < 2:
            raise ValueError(f"parts is {parts}; expected at least 2")
        if not kernels or any(kernel % 2 == 0 for kernel in kernels):
            raise ValueError(f"kernels is {kernels!r}; expected an odd side for each layer")
        for name, value in (("temperature", temperature), ("background_temperature", background_temperature)):
            if not value > 0:
                raise ValueError(f"{name} is {value}; expected a positive number")
        self.in_channels, self.size = in_channels, checked_size(size)
        self.cuts, self.signed, self.background = parts + extra[background], signed, background
        self.temperature, self.background_temperature, self.sharpen = temperature, background_temperature, sharpen
        maps = [in_channels] + [hidden] * (len(kernels) - 1) + [self.cuts * self.weights_per_cut]
        convs: list[nn.Module] = []
        for kernel, (before, after) in zip(kernels, pairwise(maps), strict=True):
            convs += [nn.Conv2d(before, after, kernel, padding=kernel // 2), nn.ReLU()]
        self.net = nn.Sequential(*convs[:-1])
        self.cut = self.ground_cut = GridCut(self.size, gamma, reach, anchor)
        if background_anchor not in (None, anchor):
            self.ground_cut = GridCut(self.size, gamma, reach, background_anchor)

    def forward(self, x: Tensor) -> Partition:
        masks = self.masks(x)
        return Partition(masks[:, :, None] * x[:, None], masks)

    def masks(self, x: Tensor) -> Tensor:
        """The masks (B, K, H, W) alone; they sum to one over K."""
        return self._masks(self.weights(checked_map(x, self.in_channels, self.size)))

    def _masks(self, w: Tensor) -> Tensor:
        if self.background == "none":
            masks = (self.vertices(w) / self.temperature).softmax(1)
        else:
            ground, objects = self._ground_and_objects(w)
            masks = torch.cat([ground[:, :1], ground[:, 1:] * objects], 1)
        return masks if self.sharpen is None else (masks / self.sharpen).softmax(1)

    def weights(self, x: Tensor) -> Tensor:
        """The weights (B, cuts, 6, H, W) of all cuts."""
        w = self.net(x)
        w = w if self.signed else w.relu()
        return w.unflatten(1, (self.cuts, self.weights_per_cut))

    def vertices(self, w: Tensor, ground: bool = False) -> Tensor:
        """The vertex variables p (B, cuts, H, W)."""
        return self.cut_for(w, ground)(w)

    def cut_for(self, w: Tensor, ground: bool = False) -> GridCut:
        """The program that these weights are for."""
        return self.ground_cut if ground else self.cut

    def _ground_and_objects(self, w: Tensor) -> tuple[Tensor, Tensor]:
        if self.background == "terminals":
            pair, p = self.cut_for(w, ground=True).solve(w[:, 0]).d[:, [SOURCE, SINK]], self.vertices(w[:, 1:])
        elif self.ground_cut is self.cut:
            pair, p = self.vertices(w).tensor_split([2], 1)
        else:
            pair, p = self.vertices(w[:, :2], ground=True), self.vertices(w[:, 2:])
        return (pair / self.background_temperature).softmax(1), (p / self.temperature).softmax(1)


class SoftmaxPartition(KPartition):
    """`KPartition` without the program: the network gives p itself. What it does as well, the cut does not bring."""

    weights_per_cut = 1

    def vertices(self, w: Tensor, ground: bool = False) -> Tensor:
        return w.squeeze(2).float()


class VolumePartition(KPartition):
    """`KPartition` of clips (B, T, C, H, W): the cuts go through space and time, so that a part stays the same part.

    The network sees one frame at a time; two more weights for every pixel tie it to the frames before and after. It was
    given `frames` to be built with, and cuts clips of any length.

    >>> parts, masks = VolumePartition(8, 5, (16, 16), frames=2)(torch.randn(2, 3, 8, 16, 16))
    >>> parts.shape, masks.shape
    (torch.Size([2, 3, 5, 8, 16, 16]), torch.Size([2, 3, 5, 16, 16]))
    """

    weights_per_cut = 8

    def __init__(self, in_channels: int, parts: int, size: Sequence[int], *, frames: int = 2, **options: Any) -> None:
        super().__init__(in_channels, parts, size, **options)
        one = self.ground_cut is self.cut
        self.cut, self.ground_cut = (self._through(frames, cut) for cut in (self.cut, self.ground_cut))
        self.ground_cut = self.cut if one else self.ground_cut
        self.longer: dict[tuple[int, bool], GridCut] = {}  # not modules of ours: they hold nothing that is learned

    def forward(self, x: Tensor) -> Partition:
        masks = self.masks(x)
        return Partition(masks[:, :, :, None] * x[:, :, None], masks)

    def masks(self, x: Tensor) -> Tensor:
        """The masks (B, T, K, H, W) alone; they sum to one over K."""
        if x.ndim != 5:
            raise ValueError(f"features have shape {tuple(x.shape)}; expected (B, T, C, H, W)")
        w = self.weights(checked_map(x.flatten(0, 1), self.in_channels, self.size)).unflatten(0, x.shape[:2])
        return self._masks(w.movedim(1, 3)).movedim(2, 1)

    def _through(self, frames: int, cut: GridCut) -> GridCut:
        return GridCut((frames, *self.size), cut.gamma, cut.reach, cut.anchor)

    def cut_for(self, w: Tensor, ground: bool = False) -> GridCut:
        frames, cut = w.shape[-3], super().cut_for(w, ground)
        if frames == cut.shape[0]:
            return cut
        if (frames, ground) not in self.longer:
            self.longer[frames, ground] = self._through(frames, cut)
        return self.longer[frames, ground].to(w.device, torch.float64 if w.dtype == torch.float64 else torch.float32)
