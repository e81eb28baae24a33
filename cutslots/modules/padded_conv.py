"""Convolutions with padded channels: `PaddedConv2d`.

Tensor cores multiply half-precision channels in groups of 8. For other numbers of channels, such as the paper's 100,
cuDNN copies the input of every convolution to a padded tensor and its output back, in the forward pass and twice in the
backward pass. `PaddedConv2d` pads inputs and weights with zeros before cuDNN sees them and slices the output. Compiled,
the padding is part of the kernel that computes the input, such as a batch normalisation with its ReLU, and the slice is
a view. Without compilation the copies would only move from cuDNN to torch, so nothing is padded.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cutslots.modules.base import HALF

ALIGNMENT = 8  # the channels of a half-precision convolution are a multiple of this
MIN_PADDED = 8  # fewer channels are images; cuDNN has kernels for them


class PaddedConv2d(nn.Conv2d):
    """`nn.Conv2d` that pads its channels where it `pads`: in half precision on CUDA, compiled.

    The parameters are those of `nn.Conv2d`. The input may already be padded with zeros, by `pad_channels`.
    """

    always_pads = False  # for tests: on every device, in every dtype

    def forward(self, x: Tensor) -> Tensor:
        if not self.pads(x):
            return super().forward(x)
        before, after = pad_size(self.in_channels), pad_size(self.out_channels)
        weight = F.pad(self.weight, (0, 0, 0, 0, 0, before, 0, after))
        bias = None if self.bias is None else F.pad(self.bias, (0, after))
        if x.shape[1] == self.in_channels:
            x = pad_channels(x)
        return unpad_channels(self._conv_forward(x, weight, bias), self.out_channels)

    def pads(self, x: Tensor) -> bool:
        """Return whether channels are padded for x."""
        if not pad_size(self.in_channels) and not pad_size(self.out_channels):
            return False
        return self.always_pads or (x.is_cuda and torch.compiler.is_compiling() and compute_dtype(self.weight) in HALF)


def pad_channels(x: Tensor) -> Tensor:
    """Return images (B, C, H, W) with zeros for further channels, up to the next multiple of ALIGNMENT."""
    return F.pad(x, (0, 0, 0, 0, 0, pad_size(x.shape[1])))


def unpad_channels(x: Tensor, channels: int) -> Tensor:
    """Return the first channels of images (B, C, H, W); x itself if it has no further ones."""
    return _FirstChannels.apply(x, channels) if x.shape[1] > channels else x


class _FirstChannels(torch.autograd.Function):
    """A slice whose gradient keeps the memory format. That of a plain slice is compiled to one more copy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, channels: int) -> Tensor:
        ctx.missing = x.shape[1] - channels
        return x[:, :channels]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return F.pad(gradients[0], (0, 0, 0, 0, 0, ctx.missing)), None


def pad_size(channels: int) -> int:
    """Return how many channels are missing to a multiple of ALIGNMENT; 0 for fewer channels than MIN_PADDED.

    >>> [pad_size(channels) for channels in (3, 64, 100)]
    [0, 0, 4]
    """
    return -channels % ALIGNMENT if channels >= MIN_PADDED else 0


def compute_dtype(weight: Tensor) -> torch.dtype:
    """Return the dtype in which a convolution with this weight runs."""
    kind = weight.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
