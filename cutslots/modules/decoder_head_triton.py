"""Triton kernels for CUDA of `decoder_head.output_conv` and its backward pass: a 3x3 convolution to 4 channels.

4 channels leave cuDNN's tiles nearly empty. These kernels put both output rows of a pair (forward) or all taps
(backward) into one matrix product. The input x is in memory as (image, row pair, column, row phase, channel).

Shapes: N images, C channels before the convolution, H W the size of an image, both powers of two.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cutslots.programs.grid_cut_triton import device_of
from cutslots.programs.grid_cut_triton import is_supported as is_supported

MAX_ROWS = 32  # of an image, for one program of the backward kernel
MAX_COLUMNS = 128  # of an image, for one step of a program


@triton.jit
def _output_conv_kernel(x, taps, bias, out, half, W, C: tl.constexpr, COLUMNS: tl.constexpr):
    """Compute one pair of output rows from the four input rows around it."""
    start = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[:, None]
    h = tl.program_id(0) % half + tl.zeros_like(column)  # a tensor, because Triton's interpreter takes no scalar here
    channel, output = tl.arange(0, C), tl.arange(0, 16)
    weights = taps + channel[:, None] * 16 + output[None, :]
    x += start * W * 2 * C + channel[None, :]
    sums = tl.zeros((COLUMNS, 16), tl.float32)
    for j in tl.static_range(3):
        in_column = column + j - 1
        for row in tl.static_range(
            4
        ):  # the second row of the pair above, both of this pair, the first of the pair below
            pair, phase = (row + 1) // 2 - 1, (row + 1) % 2
            inside = (in_column >= 0) & (in_column < W) & (h + pair >= 0) & (h + pair < half)
            values = tl.load(x + (pair * W + in_column) * 2 * C + phase * C, inside, 0.0)
            sums += tl.dot(values, tl.load(weights + (j * 4 + row) * C * 16))
    out_phase, out_channel = output // 4, output % 4
    sums += tl.load(bias + out_channel).to(tl.float32)[None, :]
    out += start // half * 8 * half * W
    at = (out_channel[None, :] * 2 * half + 2 * h + out_phase[None, :]) * W + column
    tl.store(out + at, sums.to(out.dtype.element_ty), (out_phase < 2)[None, :] & (column < W))


@triton.jit
def _output_conv_backward_kernel(
    g, x, taps, x_grad, taps_grad, bias_grad, slope, H, W, C: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Process ROWS rows of an image. The caller sums the gradients of taps and bias over all programs."""
    program = tl.program_id(0)
    tap, channel = tl.arange(0, 64), tl.arange(0, C)
    out_channel, i, j = tap % 4, tap // 12, tap // 4 % 3
    kernel = tl.load(taps + tap[:, None] * C + channel[None, :])
    taps_sum, bias_sum = tl.zeros((64, C), tl.float32), tl.zeros((C,), tl.float32)
    n, first = (program * ROWS // H).to(tl.int64), program * ROWS % H
    g += n * H * W * 4
    x += n * H * W * C
    x_grad += n * H * W * C
    for y in range(first, first + ROWS):
        for start in range(0, W, COLUMNS):
            column = start + tl.arange(0, COLUMNS)[:, None]
            out_row, out_column = y + 1 - i[None, :], column + 1 - j[None, :]
            inside = (out_row >= 0) & (out_row < H) & (out_column >= 0) & (out_column < W)
            out_grad = g + (out_channel[None, :] * H + out_row) * W + out_column
            out_grad = tl.load(out_grad, inside & (tap < 36)[None, :], 0.0)
            at = (y // 2 * W + column) * 2 * C + y % 2 * C + channel[None, :]
            value = tl.load(x + at)
            grad = tl.dot(out_grad, kernel)
            grad = tl.where(value > 0, grad, slope * grad)
            tl.store(x_grad + at, grad.to(x_grad.dtype.element_ty))
            bias_sum += tl.sum(grad, 0)
            taps_sum += tl.dot(tl.trans(out_grad), value)
    tl.store(taps_grad + (program.to(tl.int64) * 64 + tap[:, None]) * C + channel[None, :], taps_sum)
    tl.store(bias_grad + program * C + channel, bias_sum)


def output_conv(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Compute `decoder_head.output_conv`."""
    N, channels, half, W = x.shape
    C, columns = channels // 2, min(W, MAX_COLUMNS)
    taps = weight.permute(3, 2, 1, 0)  # column, row, input channel, output channel
    phase_taps = x.new_zeros(3, 4, C, 4, 4)  # column, row of four, input channel, row phase (2 unused), output channel
    phase_taps[:, :3, :, 0] = taps
    phase_taps[:, 1:, :, 1] = taps
    out = x.new_empty(N, 4, 2 * half, W)
    with device_of(x):
        _output_conv_kernel[(N * half, W // columns)](x, phase_taps, bias, out, half, W, C, columns)
    return out


def output_conv_backward(g: Tensor, x: Tensor, weight: Tensor, slope: float) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `decoder_head.output_conv_backward`."""
    N, channels, half, W = x.shape
    C, H = channels // 2, 2 * half
    rows = min(H, MAX_ROWS)
    programs = N * H // rows
    taps = x.new_zeros(64, C)
    taps[:36] = weight.permute(2, 3, 0, 1).reshape(36, C)  # row, column, output channel; input channel
    x_grad, bias_grad = torch.empty_like(x), x.new_empty(programs, C, dtype=torch.float32)
    taps_grad = x.new_empty(programs, 64, C, dtype=torch.float32)
    with device_of(x):
        _output_conv_backward_kernel[(programs,)](
            g.contiguous(),
            x,
            taps,
            x_grad,
            taps_grad,
            bias_grad,
            slope,
            H,
            W,
            C,
            rows,
            min(W, MAX_COLUMNS),
            num_stages=1,
        )
    weight_grad = taps_grad.sum(0)[:36].view(3, 3, 4, C).permute(2, 3, 0, 1).to(x.dtype)
    return x_grad, weight_grad.contiguous(memory_format=torch.channels_last), bias_grad.sum(0).to(x.dtype)
