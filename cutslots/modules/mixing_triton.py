"""Triton kernels for CUDA of `mixing.mix` and its backward pass, each in one pass over memory.

The components x are in memory as (image, slot, pixel, component), as `decoder_head.output_conv` writes them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cutslots.programs.grid_cut_triton import device_of
from cutslots.programs.grid_cut_triton import is_supported as is_supported

ELEMENTS = 512  # slots times pixels of a program; slots are rounded up to a power of two
MAX_SLOTS = 128
NUM_WARPS = 4


@triton.jit
def _load_components(x, at, inside, SLOTS: tl.constexpr, PIXELS: tl.constexpr):
    """Return the three colors and the softmax of the logits, each (SLOTS, PIXELS) in float32."""
    components = tl.load(x + at[:, :, None] * 4 + tl.arange(0, 4)[None, None, :], inside[:, :, None], 0.0)
    even, odd = tl.split(tl.reshape(components.to(tl.float32), (SLOTS, PIXELS, 2, 2)))
    red, blue = tl.split(even)
    green, logits = tl.split(odd)
    logits = tl.where(inside, logits, float("-inf"))
    exponentials = tl.exp(logits - tl.max(logits, 0, keep_dims=True))
    masks = exponentials / tl.sum(exponentials, 0, keep_dims=True)
    return red * 0.5 + 0.5, green * 0.5 + 0.5, blue * 0.5 + 0.5, masks


@triton.jit
def _indices(K, N, SLOTS: tl.constexpr, PIXELS: tl.constexpr):
    """Return the indices (SLOTS, PIXELS) of slots and pixels of a program's image, and which of them exist."""
    slot = tl.program_id(1).to(tl.int64) * K + tl.arange(0, SLOTS)[:, None]
    pixel = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)[None, :]
    return slot, pixel, (tl.arange(0, SLOTS)[:, None] < K) & (pixel < N)


@triton.jit
def _mix_kernel(x, masks, reconstruction, colors, K, N, SLOTS: tl.constexpr, PIXELS: tl.constexpr):
    """Mix PIXELS of the N pixels of one image."""
    slot, pixel, inside = _indices(K, N, SLOTS, PIXELS)
    red, green, blue, mask = _load_components(x, slot * N + pixel, inside, SLOTS, PIXELS)
    tl.store(masks + slot * N + pixel, mask, inside)
    colors += slot * 3 * N + pixel
    tl.store(colors, red, inside)
    tl.store(colors + N, green, inside)
    tl.store(colors + 2 * N, blue, inside)
    reconstruction += tl.program_id(1).to(tl.int64) * 3 * N + pixel
    tl.store(reconstruction, tl.sum(mask * red, 0, keep_dims=True), pixel < N)
    tl.store(reconstruction + N, tl.sum(mask * green, 0, keep_dims=True), pixel < N)
    tl.store(reconstruction + 2 * N, tl.sum(mask * blue, 0, keep_dims=True), pixel < N)


@triton.jit
def _mix_backward_kernel(
    x, masks_grad, reconstruction_grad, colors_grad, x_grad, K, N, SLOTS: tl.constexpr, PIXELS: tl.constexpr
):
    """Compute the gradient of the components of PIXELS pixels of one image."""
    slot, pixel, inside = _indices(K, N, SLOTS, PIXELS)
    at = slot * N + pixel
    red, green, blue, mask = _load_components(x, at, inside, SLOTS, PIXELS)
    reconstruction_grad += tl.program_id(1).to(tl.int64) * 3 * N + pixel
    to_red = tl.load(reconstruction_grad, pixel < N, 0.0)
    to_green = tl.load(reconstruction_grad + N, pixel < N, 0.0)
    to_blue = tl.load(reconstruction_grad + 2 * N, pixel < N, 0.0)
    mask_grad = tl.load(masks_grad + at, inside, 0.0) + red * to_red + green * to_green + blue * to_blue
    mask_grad = tl.where(inside, mask_grad, 0.0)
    logits_grad = mask * (mask_grad - tl.sum(mask * mask_grad, 0, keep_dims=True))
    colors_grad += slot * 3 * N + pixel
    red_grad = (mask * to_red + tl.load(colors_grad, inside, 0.0)) * 0.5
    green_grad = (mask * to_green + tl.load(colors_grad + N, inside, 0.0)) * 0.5
    blue_grad = (mask * to_blue + tl.load(colors_grad + 2 * N, inside, 0.0)) * 0.5
    grad = tl.join(tl.join(red_grad, blue_grad), tl.join(green_grad, logits_grad))
    grad = tl.reshape(grad, (SLOTS, PIXELS, 4)).to(x_grad.dtype.element_ty)
    tl.store(x_grad + at[:, :, None] * 4 + tl.arange(0, 4)[None, None, :], grad, inside[:, :, None])


def mix(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `mixing.mix` for contiguous components (B, K, H, W, 4)."""
    B, K, H, W, _ = x.shape
    masks, colors = (x.new_empty(*shape, dtype=torch.float32) for shape in ((B, K, H, W), (B, K, 3, H, W)))
    reconstruction = x.new_empty(B, 3, H, W, dtype=torch.float32)
    _launch(_mix_kernel, x, masks, reconstruction, colors)
    return masks, reconstruction, colors


def mix_backward(x: Tensor, masks_grad: Tensor, reconstruction_grad: Tensor, colors_grad: Tensor) -> Tensor:
    """Compute `mixing.mix_backward` for contiguous components (B, K, H, W, 4)."""
    gradients = (g.contiguous() for g in (masks_grad, reconstruction_grad, colors_grad))
    x_grad = torch.empty_like(x)
    _launch(_mix_backward_kernel, x, *gradients, x_grad)
    return x_grad


def _launch(kernel: triton.JITFunction, x: Tensor, *tensors: Tensor) -> None:
    B, K, H, W, _ = x.shape
    slots = max(2, triton.next_power_of_2(K))
    pixels = max(16, ELEMENTS // slots)
    if x.numel():
        with device_of(x):
            kernel[(-(-H * W // pixels), B)](x, *tensors, K, H * W, slots, pixels, num_warps=NUM_WARPS)
