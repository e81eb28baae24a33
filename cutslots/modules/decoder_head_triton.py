"""Triton kernels for CUDA of the operations of `decoder_head` that are no matter of cuDNN.

`output_conv` is a 3x3 convolution to 4 channels, which leave cuDNN's tiles nearly empty. Its kernels read the features
once, a pair of rows at a time. A product of a pair with all taps has 32 (forward) or 64 (backward) columns. The input x
is in memory as (image, row pair, column, row phase, channel), the output as (image, row, column, channel).

Shapes: N images, C channels before the convolution, H W the size of an image, both powers of two.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from cutslots.programs.grid_cut_triton import device_of
from cutslots.programs.grid_cut_triton import is_supported as _is_supported


class Launch(NamedTuple):
    """How the work of a kernel is divided."""

    columns: int  # of an image, in one step of a program
    steps: int  # of a program
    num_warps: int
    num_stages: int  # of the loop over steps: loads are that far ahead
    channels: int = 128  # of a program of the backward kernel, both row phases together
    max_registers: int | None = None  # of a thread; fewer registers let more programs run at once


FORWARD = Launch(columns=128, steps=187, num_warps=8, num_stages=3)
BACKWARD = Launch(columns=64, steps=94, num_warps=8, num_stages=3, max_registers=128)
ACTIVATION = Launch(columns=64, steps=16, num_warps=8, num_stages=1)  # columns of 128 channels
MIN_PROGRAMS = 256  # below, a GPU is not filled
# Smallest number of rows of a product on a warp group. With fewer columns one of the two products of the backward
# kernel is not one, and in a loop of several stages its gradients of the taps were wrong in some launches on an H200,
# by up to 22 % (Triton 3.6).
WGMMA_ROWS = 64
LARGE_SHARED_MEMORY = 160 * 1024  # bytes, for three stages


def _fit(launch: Launch, work: int, device: torch.device) -> Launch:
    """Return the launch with fewer steps where there would be too few programs, and fewer stages on smaller GPUs."""
    steps = next((steps for steps in (launch.steps, 16) if work >= MIN_PROGRAMS * steps), 1)
    is_large = device.type != "cuda" or _shared_memory(device) >= LARGE_SHARED_MEMORY
    return launch._replace(steps=steps, num_stages=launch.num_stages if is_large else 2)


def _backward_stages(launch: Launch, columns: int) -> int:
    return launch.num_stages if columns >= WGMMA_ROWS else 1


@functools.cache
def _shared_memory(device: torch.device) -> int:
    """Return the bytes of shared memory of a program; 0 if torch does not say."""
    return getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 0)


def is_supported(device: torch.device) -> bool:
    """Return whether the kernels run on this device. They need a Triton that gathers."""
    return hasattr(tl, "gather") and _is_supported(device)


@triton.jit
def _output_conv_kernel(
    x,
    taps,
    bias,
    out,
    pairs,
    half,
    W,
    C: tl.constexpr,
    STEPS: tl.constexpr,
    COLUMNS: tl.constexpr,
    MARGIN: tl.constexpr,
):
    """Compute STEPS pairs of output rows. Each input row is loaded once and multiplied by the taps of all columns.

    The pair of rows above and the one below contribute one row each. Their products are added as the loop passes them.
    Columns are shifted afterwards: a product has a tap in each of its columns, for an output one column further.
    """
    first = tl.program_id(0) * STEPS
    local = tl.arange(0, COLUMNS)[:, None]
    column = tl.program_id(1) * (COLUMNS - 2 * MARGIN) - MARGIN + local
    channel, product = tl.arange(0, C), tl.arange(0, 32)
    weights = taps + channel[:, None] * 32 + product[None, :]
    above_second, first_row = tl.load(weights), tl.load(weights + C * 32)
    second_row, below_first = tl.load(weights + 2 * C * 32), tl.load(weights + 3 * C * 32)
    source = local + product[None, :] // 8 - 1  # products: column of four, row phase, channel
    shifted = tl.minimum(tl.maximum(source, 0), COLUMNS - 1)
    is_inside = (source >= 0) & (source < COLUMNS) & (product < 24)[None, :]
    output = tl.arange(0, 8)[None, :]  # row phase, channel
    offset = tl.load(bias + output % 4).to(tl.float32)
    kept = (local >= MARGIN) & (local < COLUMNS - MARGIN) & (column < W)
    x += column * 2 * C + channel[None, :]
    out += (output // 4 * W + column) * 4 + output % 4
    sums, from_above = tl.zeros((COLUMNS, 32), tl.float32), tl.zeros((COLUMNS, 32), tl.float32)
    for step in range(STEPS + 2):
        pair = first - 1 + step
        h = pair % half
        inside = (column >= 0) & (column < W) & (pair >= 0) & (pair < pairs)
        row0 = tl.load(x + pair * W * 2 * C, inside, 0.0)
        row1 = tl.load(x + pair * W * 2 * C + C, inside, 0.0)
        sums += tl.where(h > 0, tl.dot(row0, below_first), 0.0)  # now the sums of the pair before are complete
        total = tl.where(is_inside, tl.gather(sums, shifted, 0), 0.0)
        total = tl.sum(tl.reshape(total, (COLUMNS, 4, 8)), 1) + offset
        tl.store(out + (pair - 1) * 8 * W, total.to(out.dtype.element_ty), kept & (pair > first) & (pair <= pairs))
        sums = tl.dot(row1, second_row, tl.dot(row0, first_row, from_above))
        from_above = tl.where(h + 1 < half, tl.dot(row1, above_second), 0.0)


@triton.jit
def _output_conv_backward_kernel(
    g,
    x,
    taps,
    x_grad,
    taps_grad,
    bias_grad,
    slope,
    tiles,
    half,
    W,
    C2: tl.constexpr,
    CHANNELS: tl.constexpr,
    STEPS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Process STEPS tiles of COLUMNS columns of a row pair. The caller sums gradients of taps and bias.

    A row of the left factor holds the gradients of four rows and of three columns around a pixel. The four channels of
    these columns are contiguous in memory; a fourth column is there for the sake of powers of two.
    """
    program = tl.program_id(0)
    tap = tl.arange(0, 64)[None, :]  # row of four, column of four, channel
    row, offset = tap // 16, tap % 16 - 4
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)[None, :]
    local = tl.arange(0, COLUMNS)[:, None]
    kernel = tl.load(taps + tl.arange(0, 64)[:, None] * C2 + channel)
    taps_sum = tl.zeros((64, CHANNELS), tl.float32)
    bias_sum = tl.zeros((1, CHANNELS), tl.float32)
    for step in range(STEPS):
        tile = program * STEPS + step
        pair, start = tile // PARTS, tile % PARTS * COLUMNS
        out_row = pair % half * 2 - 1 + row
        at = (start + local) * 4 + offset
        inside = (out_row >= 0) & (out_row < 2 * half) & (at >= 0) & (at < 4 * W) & (offset < 8) & (tile < tiles)
        out_grad = tl.load(g + ((pair * 2 - 1 + row) * W * 4 + at), inside, 0.0)
        at = (pair * W + start + local) * C2 + channel
        value = tl.load(x + at, tile < tiles, 0.0)
        grad = tl.dot(out_grad, kernel)
        grad = tl.where(value > 0, grad, slope * grad)
        tl.store(x_grad + at, grad.to(x_grad.dtype.element_ty), tile < tiles)
        bias_sum += tl.sum(grad, 0, keep_dims=True)
        taps_sum = tl.dot(tl.trans(out_grad), value, taps_sum)
    tl.store(taps_grad + (program * 64 + tl.arange(0, 64)[:, None]) * C2 + channel, taps_sum)
    tl.store(bias_grad + program * C2 + channel, bias_sum)


@triton.jit
def _activation_backward_kernel(
    g,
    y,
    out,
    bias_grad,
    slope,
    rows,
    CHANNELS: tl.constexpr,
    STEPS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Process STEPS blocks of ROWS pixels: the gradient before a leaky ReLU, and its sum over pixels."""
    program = tl.program_id(0)
    channel = tl.arange(0, CHANNELS)[None, :]
    local = tl.arange(0, ROWS)[:, None]
    sums = tl.zeros((ROWS, CHANNELS), tl.float32)
    for step in tl.range(0, STEPS, loop_unroll_factor=2):
        row = (program * STEPS + step) * ROWS + local
        at = row * CHANNELS + channel
        inside = row < rows
        grad = tl.load(g + at, inside, 0.0)
        grad = tl.where(tl.load(y + at, inside, 0.0) > 0, grad, (slope * grad).to(grad.dtype))
        tl.store(out + at, grad, inside)
        sums += grad.to(tl.float32)
    tl.store(bias_grad + program * CHANNELS + tl.arange(0, CHANNELS), tl.sum(sums, 0))


def output_conv(x: Tensor, weight: Tensor, bias: Tensor, launch: Launch | None = None) -> Tensor:
    """Compute `decoder_head.output_conv`."""
    N, channels, half, W = x.shape
    C, pairs = channels // 2, N * half
    launch = launch or _fit(FORWARD, pairs, x.device)
    steps = launch.steps
    columns = min(W, launch.columns, 8192 // C)
    margin = int(columns < W)
    parts = -(-W // (columns - 2 * margin))
    taps = weight.permute(2, 1, 3, 0)  # row, input channel, column, output channel
    products = x.new_zeros(4, C, 4, 2, 4)  # row of four, input channel, column (the last unused), row phase, output
    products[:3, :, :3, 0] = taps
    products[1:, :, :3, 1] = taps
    out = torch.empty((N, 4, 2 * half, W), dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    if pairs:
        with device_of(x):
            _output_conv_kernel[(-(-pairs // steps), parts)](
                x,
                products,
                bias,
                out,
                pairs,
                half,
                W,
                C,
                steps,
                columns,
                margin,
                num_warps=launch.num_warps,
                num_stages=launch.num_stages if C <= 64 else 1,  # shared memory holds no further stages
                maxnreg=launch.max_registers,
            )
    return out


def output_conv_backward(
    g: Tensor, x: Tensor, weight: Tensor, slope: float, launch: Launch | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `decoder_head.output_conv_backward`."""
    N, channels, half, W = x.shape
    launch = launch or _fit(BACKWARD, N * half * W // min(W, BACKWARD.columns), x.device)
    width, columns, steps = min(channels, launch.channels), min(W, launch.columns), launch.steps
    C, tiles = channels // 2, N * half * W // columns
    programs = -(-tiles // steps)
    flipped = weight.flip(2, 3).permute(2, 3, 0, 1)  # row, column, output channel, input channel
    taps = x.new_zeros(4, 4, 4, 2, C)  # row of four, column (the last unused), output channel, row phase, input channel
    taps[:3, :3, :, 0] = flipped
    taps[1:, :3, :, 1] = flipped
    x_grad, bias_grad = torch.empty_like(x), x.new_empty(programs, 2, C, dtype=torch.float32)
    taps_grad = x.new_empty(programs, *taps.shape, dtype=torch.float32)
    if tiles:
        with device_of(x):
            _output_conv_backward_kernel[(programs, channels // width)](
                g.contiguous(memory_format=torch.channels_last),
                x,
                taps,
                x_grad,
                taps_grad,
                bias_grad,
                slope,
                tiles,
                half,
                W,
                channels,
                width,
                steps,
                columns,
                W // columns,
                num_warps=launch.num_warps,
                num_stages=_backward_stages(launch, columns),
                maxnreg=launch.max_registers,
            )
    taps_grad = taps_grad.sum(0)
    flipped = taps_grad[:3, :3, :, 0] + taps_grad[1:, :3, :, 1]
    weight_grad = flipped.permute(2, 3, 0, 1).flip(2, 3).to(x.dtype, memory_format=torch.channels_last)
    return x_grad, weight_grad, bias_grad.sum((0, 1)).to(x.dtype)


def activation_backward(
    g: Tensor, y: Tensor, slope: float, channels: int, launch: Launch | None = None
) -> tuple[Tensor, Tensor]:
    """Compute `decoder_head.activation_backward`."""
    rows, width = y.numel() // y.shape[1], y.shape[1]
    launch = launch or ACTIVATION
    block, steps = max(1, launch.columns * 128 // width), launch.steps
    programs = -(-rows // (block * steps))
    out, bias_grad = torch.empty_like(y), y.new_empty(programs, width // channels, channels, dtype=torch.float32)
    if rows:
        with device_of(y):
            _activation_backward_kernel[(programs,)](
                g.contiguous(memory_format=torch.channels_last),
                y,
                out,
                bias_grad,
                slope,
                rows,
                width,
                steps,
                block,
                num_warps=launch.num_warps,
                num_stages=launch.num_stages,
                maxnreg=launch.max_registers,
            )
    return out, bias_grad.sum((0, 1)).to(y.dtype)
