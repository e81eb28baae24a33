"""Encoders: images (B, 3, H, W) to features (B, C, h, w).

An encoder says what it returns (`out_channels`, `out_size`) and how it normalises images, so any encoder fits any slot
module. Images may have any size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, cast

from torch import Tensor, nn

from cutslots.modules.base import PartModule, check_kernel_sizes
from cutslots.modules.padded_conv import PaddedConv2d, pad_channels, unpad_channels
from cutslots.registry import PartConfig, Range, Registry

STEM_CHANNELS = 64  # of the ResNet, as in the authors' code


@dataclass(frozen=True)
class EncoderConfig(PartConfig):
    """Base of the configs of encoders."""


ENCODERS = Registry("encoder", EncoderConfig)


class Encoder(PartModule):
    """Base class of encoders. Subclasses set `out_channels` and implement `out_size` and `forward`."""

    out_channels: int

    def out_size(self, image_size: tuple[int, int]) -> tuple[int, int]:
        """Return (h, w) of the features of an image (H, W)."""
        raise NotImplementedError

    def normalize(self, image: Tensor) -> Tensor:
        """Map an image with values in [0, 1] to the range that the network expects, [-1, 1] by default."""
        return image * 2 - 1

    def fingerprint(self) -> dict[str, Any] | None:
        """Return JSON values that differ if the features of an image differ; None if training changes features.

        With a fingerprint, features may be computed once and cached.
        """
        return None


@dataclass(frozen=True)
class CNNConfig(EncoderConfig):
    channels: Annotated[int, Range(1, 65_536)] = 64
    """Channels of every layer."""
    kernel_sizes: Annotated[tuple[int, ...], Range(1, 255)] = (5, 5, 5, 5)
    """Kernel size of each layer. The first layer has stride 2."""
    pyramid_levels: Annotated[int, Range(0, 64)] = 0
    """Levels of a feature pyramid, which enlarges the receptive field; 0 for none."""


@dataclass(frozen=True)
class ResNetConfig(EncoderConfig):
    channels: Annotated[int, Range(1, 65_536)] = 100
    """Channels of every residual block."""
    kernel_sizes: Annotated[tuple[int, ...], Range(1, 255)] = (5, 3, 3, 3, 3)
    """Kernel size of the stem, which has stride 2, then of each residual block."""
    batch_norm: bool = True
    """Batch normalisation after each convolution."""
    pyramid_levels: Annotated[int, Range(0, 64)] = 0
    """Levels of a feature pyramid, which enlarges the receptive field; 0 for none."""


class HalfResolutionEncoder(Encoder):
    """Base class of encoders whose first layer has stride 2."""

    def out_size(self, image_size: tuple[int, int]) -> tuple[int, int]:
        return (image_size[0] + 1) // 2, (image_size[1] + 1) // 2


@ENCODERS.register("cnn", CNNConfig)
class CNNEncoder(HalfResolutionEncoder):
    """Convolutions with ReLU at half resolution (the paper's encoder for CLEVR)."""

    def __init__(self, channels: int = 64, kernel_sizes: Sequence[int] = (5, 5, 5, 5), pyramid_levels: int = 0) -> None:
        super().__init__()
        check_kernel_sizes(kernel_sizes, 1)
        self.out_channels = channels
        layers: list[nn.Module] = []
        for i, kernel in enumerate(kernel_sizes):
            stride = 2 if i == 0 else 1
            layers += [PaddedConv2d(channels if i else 3, channels, kernel, stride, padding=kernel // 2), nn.ReLU()]
        self.layers = nn.Sequential(*layers)
        self.pyramid = FeaturePyramid(channels, pyramid_levels)

    def forward(self, x: Tensor) -> Tensor:
        return self.pyramid(self.layers(x))


@ENCODERS.register("resnet", ResNetConfig)
class ResNetEncoder(HalfResolutionEncoder):
    """A stem of stride 2 and residual blocks (the paper's encoder for CLEVRTEX)."""

    def __init__(
        self,
        channels: int = 100,
        kernel_sizes: Sequence[int] = (5, 3, 3, 3, 3),
        batch_norm: bool = True,
        pyramid_levels: int = 0,
    ) -> None:
        super().__init__()
        stem, *blocks = check_kernel_sizes(kernel_sizes, 2)
        self.out_channels = channels
        self.stem = nn.Sequential(*_conv(3, STEM_CHANNELS, stem, batch_norm, stride=2), nn.ReLU())
        self.blocks = nn.Sequential(
            *(ResidualBlock(channels if i else STEM_CHANNELS, channels, k, batch_norm) for i, k in enumerate(blocks))
        )
        self.pyramid = FeaturePyramid(channels, pyramid_levels)

    def forward(self, x: Tensor) -> Tensor:
        return self.pyramid(unpad_channels(self.blocks(self.stem(x)), self.out_channels))


class ResidualBlock(nn.Module):
    """relu(skip(x) + conv(relu(conv(x)))). The skip is a 1x1 convolution where the number of channels changes.

    Where convolutions pad, input and output are padded with channels of zeros: so the next block need not copy them.
    """

    def __init__(self, in_channels: int, out_channels: int, kernel_size: int, batch_norm: bool) -> None:
        super().__init__()
        self.in_channels = in_channels
        self.residual = nn.Sequential(
            *_conv(in_channels, out_channels, kernel_size, batch_norm),
            nn.ReLU(),
            *_conv(out_channels, out_channels, kernel_size, batch_norm),
        )
        self.skip = nn.Identity() if in_channels == out_channels else _skip(in_channels, out_channels, batch_norm)

    def forward(self, x: Tensor) -> Tensor:
        y = (self.skip(unpad_channels(x, self.in_channels)) + self.residual(x)).relu()
        return pad_channels(y) if cast(PaddedConv2d, self.residual[0]).pads(x) else y


class FeaturePyramid(nn.Module):
    """Downsamples features `levels` times by 2 and adds the upsampled levels back, from coarse to fine.

    With 0 levels it returns its input.
    """

    def __init__(self, channels: int, levels: int) -> None:
        super().__init__()
        self.down = nn.ModuleList(PaddedConv2d(channels, channels, 3, stride=2, padding=1) for _ in range(levels))
        self.up = nn.ModuleList(PaddedConv2d(channels, channels, 3, padding=1) for _ in range(levels))

    def forward(self, x: Tensor) -> Tensor:
        finer = []
        for down in self.down:
            finer.append(x)
            x = down(x).relu()
        for up in self.up:
            skip = finer.pop()
            x = skip + up(nn.functional.interpolate(x, skip.shape[-2:])).relu()
        return x


def _skip(in_channels: int, out_channels: int, batch_norm: bool) -> nn.Module:
    layers = _conv(in_channels, out_channels, 1, batch_norm)
    return nn.Sequential(*layers) if batch_norm else layers[0]


def _conv(in_channels: int, out_channels: int, kernel_size: int, batch_norm: bool, stride: int = 1) -> list[nn.Module]:
    conv = PaddedConv2d(in_channels, out_channels, kernel_size, stride, padding=kernel_size // 2, bias=not batch_norm)
    return [conv, nn.BatchNorm2d(out_channels)] if batch_norm else [conv]
