"""The last layers of a `BroadcastDecoder`, from its last doubling on: where a step of training spends its time.

The same function as the layers, in shapes that tensor cores like and in fewer passes over memory. Rows are parted into
even and odd ones (phases), which become maps: C maps of a picture of H x W are held as 2 C of H/2 x W, ordered by
phase, then map. The transposed convolution is then a 3x3 one from C maps to 4 C, for column phases too; ordered by
column phase, row phase, map, with maps innermost in memory, columns stand side by side without being moved. A 5x5
convolution is a 3x5 one from 2 C to 2 C. Kernels are the decoder's, rearranged and filled up with zeros. The last
convolution makes 4 maps, too few for cuDNN to be good at it: Triton kernels do it (fused.py), the backward one with
all that the activation before it asks for.

Shapes: N pictures (slots of a batch), C maps before the last layer, H W the size of a picture.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

try:
    from cutslots import fused
except ImportError:  # Triton comes with the CUDA builds of torch
    fused = None  # type: ignore[assignment]

MAPS = (16, 32, 64, 128, 256)  # as many as there are kernels for
MOST = 2**31  # numbers in a tensor, from which on cuDNN's counters overflow


class Tail(nn.Module):
    """Applies the last layers, whose weights stay where they are. Where there are kernels, in half precision on CUDA,
    that is fast, and has first derivatives only."""

    up: Tensor
    wide: Tensor

    def __init__(self, extra: int) -> None:
        super().__init__()
        self.length = 2 * (1 + extra) + 1  # layers, activations among them
        self.register_buffer("up", _taps(5, transposed=True)[:, 0], persistent=False)
        self.register_buffer("wide", _taps(5), persistent=False)
        self._apply(lambda x: x)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Tail:
        super()._apply(fn, recurse)
        self.able = fused is not None and fused.able(self.up.device)  # asked here, where no compiler looks on
        return self

    def forward(self, x: Tensor, layers: nn.Sequential) -> Tensor:
        """`layers` applied to x (N, C, H/2, W/2): (N, 4, H, W)."""
        return self.fast(x, layers) if self.serves(x, layers) else layers(x)

    def serves(self, x: Tensor, layers: nn.Sequential) -> bool:
        """Whether there are kernels for this."""
        maps = cast(int, layers[0].out_channels)
        fits = maps in MAPS and all(n >= 8 and n & (n - 1) == 0 for n in x.shape[2:])
        fits = fits and 4 * maps * x.numel() // x.shape[1] < MOST
        return self.able and x.dtype in (torch.bfloat16, torch.float16) and fits

    def fast(self, x: Tensor, layers: nn.Sequential) -> Tensor:
        first, *middle, last = (cast(nn.Conv2d, layer) for layer in layers[::2])  # type: ignore[attr-defined]
        slope = getattr(layers[1], "negative_slope", 0.0)
        kernels = [torch.einsum("iokl,adk,cel->caoide", first.weight, self.up, self.up).flatten(0, 2)]
        for layer in middle:
            kernels.append(torch.einsum("oikl,abdk->aobidl", layer.weight, self.wide).flatten(2, 3).flatten(0, 1))
        weights = [*kernels, last.weight, *(cast(Tensor, layer.bias) for layer in (first, *middle, last))]
        with torch.autocast(x.device.type, enabled=False):
            return _Tail.apply(
                x.contiguous(memory_format=torch.channels_last), slope, *(w.to(x.dtype) for w in weights)
            )


def _taps(kernel: int, transposed: bool = False) -> Tensor:
    """Which tap of a kernel leads from phase b, d pairs of pixels further on, to phase a: (a, b, d, taps) of 0 and 1.

    Transposed ones have one phase to come from."""
    taps = torch.zeros(2, 1 if transposed else 2, 3, kernel)
    for a, b, d in itertools.product(range(2), range(taps.shape[1]), (-1, 0, 1)):
        tap = kernel // 2 + (a - 2 * d if transposed else 2 * d + b - a)
        if 0 <= tap < kernel:
            taps[a, b, d + 1, tap] = 1
    return taps


class _Tail(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, slope: float, *weights: Tensor) -> Tensor:
        *kernels, last = (w.contiguous(memory_format=torch.channels_last) for w in weights[: len(weights) // 2])
        *biases, last_bias = weights[len(weights) // 2 :]
        maps = [x]
        for kernel, bias in zip(kernels, biases, strict=True):
            y = _activated(maps[-1], kernel, bias.repeat(len(kernel) // len(bias)), slope)
            maps.append(_side_by_side(y) if len(maps) == 1 else y)
        ctx.slope = slope
        ctx.save_for_backward(*maps, *kernels, last)
        return narrow(maps[-1], last, last_bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise NotImplementedError("a fast tail has first derivatives only; expected float32 for higher ones")
        half = len(ctx.saved_tensors) // 2
        maps, (*kernels, last) = ctx.saved_tensors[:half], ctx.saved_tensors[half:]
        of_kernels, of_biases = [], [gradients[0].sum((0, 2, 3))]
        g, of_last, of_bias = narrow_backward(gradients[0], maps[-1], last, ctx.slope)
        for i, kernel in reversed(list(enumerate(kernels))):
            g, y = (_apart(g), _apart(maps[1])) if i == 0 else (g, maps[i + 1])
            known = i + 1 == len(kernels)  # the gradient before the activation, and of the bias
            g = g if known else torch.where(y > 0, g, ctx.slope * g)
            asked = [True, True, not known]
            g, of_kernel, of_phases = torch.ops.aten.convolution_backward(
                g, maps[i], kernel, [len(kernel)], [1, 1], _padding(kernel), [1, 1], False, [0, 0], 1, asked
            )
            of_kernels.append(of_kernel)
            of_biases.append(of_bias if known else of_phases.view(-1, last.shape[1]).sum(0))
        return g, None, *reversed(of_kernels), of_last, *reversed(of_biases)


def _activated(x: Tensor, weight: Tensor, bias: Tensor, slope: float) -> Tensor:
    if x.is_cuda and slope == 0:
        return conv_relu(x, weight, bias)
    x = F.leaky_relu(F.conv2d(x, weight, bias, padding=_padding(weight)), slope)
    return x.contiguous(memory_format=torch.channels_last)


def _padding(kernel: Tensor) -> list[int]:
    """What keeps the size."""
    return [side // 2 for side in kernel.shape[2:]]


def _side_by_side(x: Tensor) -> Tensor:
    """(N, (column phase, map), H, W/2) as (N, map, H, W)."""
    x = x.permute(0, 2, 3, 1)
    return x.reshape(*x.shape[:2], 2 * x.shape[2], x.shape[3] // 2).permute(0, 3, 1, 2)


def _apart(x: Tensor) -> Tensor:
    """What `_side_by_side` was given."""
    x = x.permute(0, 2, 3, 1)
    return x.reshape(*x.shape[:2], x.shape[2] // 2, 2 * x.shape[3]).permute(0, 3, 1, 2)


def _whole(x: Tensor) -> Tensor:
    """(N, (row phase, map), H/2, W) as (N, map, H, W)."""
    return x.unflatten(1, (2, x.shape[1] // 2)).permute(0, 2, 3, 1, 4).flatten(2, 3)


# ---------------------------------------------------------------------------------------------------------- operations


@torch.library.custom_op("cutslots::conv_relu", mutates_args=())
def conv_relu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """A convolution and the ReLU after it, in one pass over memory; not differentiable by itself."""
    return torch.cudnn_convolution_relu(x, weight, bias, [1, 1], _padding(weight), [1, 1], 1)


@conv_relu.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return _maps_like(x, x.shape[0], weight.shape[0], *x.shape[2:])


@torch.library.custom_op("cutslots::narrow", mutates_args=())
def narrow(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The last convolution, of x (N, 2 C, H/2, W) with its rows in phases: (N, 4, H, W)."""
    if not x.is_cuda:
        return F.conv2d(_whole(x), weight, bias, padding=1).contiguous()
    return fused.narrow(x, weight, bias)


@narrow.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], 4, 2 * x.shape[2], x.shape[3])


@torch.library.custom_op("cutslots::narrow_backward", mutates_args=())
def narrow_backward(g: Tensor, x: Tensor, weight: Tensor, slope: float) -> tuple[Tensor, Tensor, Tensor]:
    """For a gradient g of what `narrow` made: that of x before its activation, of the weight, and of x's bias."""
    if not x.is_cuda:
        image = _whole(x)
        same = [1, 1]
        of_x, of_weight, _ = torch.ops.aten.convolution_backward(
            g, image, weight, [0], same, same, same, False, [0, 0], 1, [True, True, False]
        )
        of_x = torch.where(image > 0, of_x, slope * of_x)
        parted = of_x.unflatten(2, (-1, 2)).permute(0, 3, 1, 2, 4).flatten(1, 2)
        parted, of_weight = (t.contiguous(memory_format=torch.channels_last) for t in (parted, of_weight))
        return parted, of_weight, of_x.sum((0, 2, 3))
    return fused.narrow_backward(g, x, weight, slope)


@narrow_backward.register_fake
def _(g: Tensor, x: Tensor, weight: Tensor, slope: float) -> tuple[Tensor, Tensor, Tensor]:
    return _maps_like(x, *x.shape), _maps_like(weight, *weight.shape), x.new_empty(weight.shape[1])


def _maps_like(x: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
