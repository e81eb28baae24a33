"""Decoders: slots (B, K, D) to a reconstruction, masks and what each slot reconstructs.

Both decoders broadcast every slot to a small grid, add a position embedding and double the resolution up to the image,
each slot on its own (Watters et al., 2019). The result is a color and a logit for every pixel and slot; a softmax of
the logits over slots gives the masks:

    m = softmax(logits),    x' = sum_k m_k x_k

Images may have any size: the grid is the smallest whose doublings cover the image, which is cut from its center. The
grid of a power of two is 8x8.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, NamedTuple, cast

import torch
from torch import Tensor, nn

from cutslots.modules.base import PartModule, check_size, downcast_half, exportable, to_channels_last
from cutslots.modules.decoder_head import FusedDecoderHead
from cutslots.modules.mixing import mix
from cutslots.modules.position import SoftPositionEmbedding
from cutslots.registry import PartConfig, Range, Registry

BROADCAST_SIZE = 8  # about the longer side of the grid that a slot is broadcast to


@dataclass(frozen=True)
class DecoderConfig(PartConfig):
    """Base of the configs of decoders."""


DECODERS = Registry("decoder", DecoderConfig)


@exportable
class DecoderOutput(NamedTuple):
    masks: Tensor  # (B, K, H, W), summing to one over K
    reconstruction: Tensor  # (B, 3, H, W), about in [0, 1]
    slot_reconstructions: Tensor  # (B, K, 3, H, W)


class Decoder(PartModule):
    """Base class of decoders. Subclasses set `image_size` and implement `forward`, which returns `DecoderOutput`."""

    image_size: tuple[int, int]


class MixtureDecoder(Decoder):
    """Base class of decoders that mix colors with the softmax of logits. Subclasses implement `components`."""

    def components(self, slots: Tensor) -> Tensor:
        """Return colors in about [-1, 1] and a logit, (B, K, 4, H, W), for slots (B, K, D)."""
        raise NotImplementedError

    def forward(self, slots: Tensor) -> DecoderOutput:
        return DecoderOutput(*mix(self.components(slots)))


@dataclass(frozen=True)
class SpatialBroadcastConfig(DecoderConfig):
    channels: Annotated[tuple[int, ...], Range(1, 65_536)] = (64,)
    """Channels after each doubling of the resolution; the last is repeated as needed."""
    extra_layers: Annotated[int, Range(0, 64)] = 1
    """Convolutions at full resolution before the last one."""
    skipped_doublings: Annotated[int, Range(0, 8)] = 0
    """Skip the last doublings and upsample the result instead: early stages of progressive training."""


@dataclass(frozen=True)
class PixelShuffleConfig(DecoderConfig):
    channels: Annotated[tuple[int, ...], Range(1, 65_536)] = (32, 32)
    """Channels after each doubling of the resolution but the last; the last is repeated as needed."""


class BroadcastDecoder(MixtureDecoder):
    """Broadcasts slots to a grid, runs `upsample` on it and crops the result to the image.

    The last `position_dim` components of a slot are the position of its mask: coordinates are relative to it.
    """

    def __init__(self, slot_dim: int, image_size: Sequence[int], position_dim: int) -> None:
        super().__init__()
        self.image_size = check_size(image_size)
        self.doublings, self.grid_size = broadcast_grid(self.image_size)
        self.content_dim = slot_dim - position_dim
        self.position = SoftPositionEmbedding(self.content_dim, self.grid_size)

    def upsample(self, x: Tensor) -> Tensor:
        """Return (N, 4, H', W') for a grid (N, D, h, w), with H' and W' doubled `doublings` times."""
        raise NotImplementedError

    def components(self, slots: Tensor) -> Tensor:
        x = self._crop(self.upsample(self._broadcast(slots)))
        return x.unflatten(0, slots.shape[:2])

    def _broadcast(self, slots: Tensor) -> Tensor:
        slots = slots.flatten(0, 1)
        content, position = slots[:, : self.content_dim], slots[:, self.content_dim :]
        content = downcast_half(content, self.position.linear.weight)
        x = content[:, :, None, None].expand(-1, -1, *self.grid_size)
        x = self.position(x, position if position.shape[1] else None)
        return to_channels_last(x)

    def _crop(self, x: Tensor) -> Tensor:
        if x.shape[2:] == self.image_size:
            return x
        (height, width), (top, left) = (
            self.image_size,
            ((a - b) // 2 for a, b in zip(x.shape[2:], self.image_size, strict=True)),
        )
        return x[:, :, top : top + height, left : left + width]


@DECODERS.register("spatial-broadcast", SpatialBroadcastConfig)
class SpatialBroadcastDecoder(BroadcastDecoder):
    """Transposed 5x5 convolutions, then convolutions at full resolution (the decoder of Slot Attention and the paper).

    `extra_layers` 5x5 convolutions precede a 3x3 one to 4 channels. With `skipped_doublings` n the last n transposed
    convolutions are skipped, and the result is upsampled bilinearly: four times cheaper for each. At first their
    weights are those of bilinear upsampling, and they are not trained. So a decoder that skips fewer begins, with the
    weights of this one, with about the same images (progressive growing; Karras et al., 2018).
    """

    activation: type[nn.Module] = nn.ReLU

    def __init__(
        self,
        slot_dim: int,
        image_size: Sequence[int],
        channels: Sequence[int] = (64,),
        extra_layers: int = 1,
        position_dim: int = 0,
        skipped_doublings: int = 0,
    ) -> None:
        super().__init__(slot_dim, image_size, position_dim)
        widths = [self.content_dim, *_widths(channels, self.doublings)]
        layers: list[nn.Module] = []
        for before, after in pairwise(widths):
            layers += [nn.ConvTranspose2d(before, after, 5, stride=2, padding=2, output_padding=1), self.activation()]
        for _ in range(extra_layers):
            layers += [nn.Conv2d(widths[-1], widths[-1], 5, padding=2), self.activation()]
        layers += [nn.Conv2d(widths[-1], 4, 3, padding=1)]
        self.layers = nn.Sequential(*layers)
        self.head = FusedDecoderHead(extra_layers)
        self.skipped_doublings = skipped_doublings
        self._init_skipped(widths)

    def _init_skipped(self, widths: Sequence[int]) -> None:
        """Make the skipped doublings upsample their input, for a decoder that will have them."""
        first = self.doublings - self.skipped_doublings
        if not 0 < first <= self.doublings:
            expected = f"an integer from 0 to {self.doublings - 1} for images of {self.image_size}"
            raise ValueError(f"skipped_doublings is {self.skipped_doublings}; expected {expected}")
        if len(set(widths[first:])) > 1:
            given = f"skipped_doublings is {self.skipped_doublings}, and channels of the doublings are {widths[1:]}"
            raise ValueError(f"{given}; expected equal channels from number {first} on")
        for i in range(first, self.doublings):
            init_as_upsampling(cast(nn.ConvTranspose2d, self.layers[2 * i].requires_grad_(False)))

    def upsample(self, x: Tensor) -> Tensor:
        end = 2 * self.doublings
        kept = cast(nn.Sequential, self.layers[: end - 2 * self.skipped_doublings])
        layers = kept + cast(nn.Sequential, self.layers[end:]) if self.skipped_doublings else self.layers
        body = len(layers) - self.head.length
        x = self.head(layers[:body](x), layers[body:])
        if not self.skipped_doublings:
            return x
        return nn.functional.interpolate(x, scale_factor=2**self.skipped_doublings, mode="bilinear")


@DECODERS.register("pixel-shuffle", PixelShuffleConfig)
class PixelShuffleDecoder(BroadcastDecoder):
    """3x3 convolutions at the lower resolution, each followed by a pixel shuffle: far cheaper at full resolution.

    The last doubling gives colors and logits themselves.
    """

    def __init__(
        self,
        slot_dim: int,
        image_size: Sequence[int],
        channels: Sequence[int] = (32, 32),
        position_dim: int = 0,
    ) -> None:
        super().__init__(slot_dim, image_size, position_dim)
        widths = [self.content_dim, *_widths(channels, self.doublings - 1), 4]
        layers: list[nn.Module] = []
        for before, after in pairwise(widths):
            layers += [nn.Conv2d(before, 4 * after, 3, padding=1), PixelShuffle(2), nn.ReLU()]
        self.layers = nn.Sequential(*layers[:-1])

    def upsample(self, x: Tensor) -> Tensor:
        return self.layers(x)


class PixelShuffle(nn.PixelShuffle):
    """`nn.PixelShuffle` with gradients for empty batches, which torch 2.13 does not have."""

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0]:
            return super().forward(x)
        r = self.upscale_factor
        return x.reshape(0, x.shape[1] // r**2, r * x.shape[2], r * x.shape[3])


def broadcast_grid(image_size: tuple[int, int]) -> tuple[int, tuple[int, int]]:
    """Return how often a grid is doubled to cover an image (H, W), and the size of the grid.

    >>> broadcast_grid((128, 128)), broadcast_grid((224, 224)), broadcast_grid((96, 160))
    ((4, (8, 8)), (5, (7, 7)), (4, (6, 10)))
    """
    doublings = max(1, round(math.log2(max(image_size) / BROADCAST_SIZE)))
    return doublings, (-(-image_size[0] // 2**doublings), -(-image_size[1] // 2**doublings))


@torch.no_grad()
def init_as_upsampling(layer: nn.ConvTranspose2d) -> None:
    """Make a transposed 5x5 convolution of stride 2 upsample each channel bilinearly."""
    taps = layer.weight.new_tensor([0, 0.25, 0.75, 0.75, 0.25])
    nn.init.dirac_(layer.weight)
    layer.weight.copy_(layer.weight[:, :, 2:3, 2:3] * taps[:, None] * taps)
    nn.init.zeros_(cast(Tensor, layer.bias))


def _widths(channels: Sequence[int], count: int) -> list[int]:
    """Return `count` widths; the last is repeated if there are too few."""
    if not channels or any(n < 1 for n in channels):
        raise ValueError(f"channels is {tuple(channels)!r}; expected at least one positive integer")
    return [channels[min(i, len(channels) - 1)] for i in range(count)]
