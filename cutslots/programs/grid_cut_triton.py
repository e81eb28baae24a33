"""Triton kernels of `GridCut` for float32 images on CUDA. Each one replaces several passes over memory by one.

`vertices` and `vertices_adjoint` keep one cut of at most 64 x 64 pixels in registers. They read the six weights of
every pixel, compute the divergence and multiply by the four cosine matrices on the tensor cores. Device memory
transfers each weight once and each result once. Products run as three TF32 products (tf32x3), which keeps float32
accuracy.

Larger cuts use `divergence` and `differences`, tile by tile, and `TritonFFTDCT` where the transform is an FFT.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from cutslots.programs.dct import FFTDCT

MAX_FUSED_SIZE = 64  # the largest side of a cut in registers; at 128 the products are faster through cuBLAS


@triton.jit
def _divergence(w, N, y, x, H, W):
    """Return B'w on a tile of pixels (y, x)."""
    w += y * W + x
    inside = (y < H) & (x < W)
    right, left, down, up = inside & (x < W - 1), inside & (x > 0), inside & (y < H - 1), inside & (y > 0)
    out = tl.load(w + 5 * N, inside, 0.0) - tl.load(w + 4 * N, inside, 0.0)
    out += tl.load(w, right, 0.0) - tl.load(w - 1, left, 0.0)
    out += tl.load(w + N, left, 0.0) - tl.load(w + N + 1, right, 0.0)
    out += tl.load(w + 2 * N, down, 0.0) - tl.load(w + 2 * N - W, up, 0.0)
    out += tl.load(w + 3 * N, up, 0.0) - tl.load(w + 3 * N + W, down, 0.0)
    return out


@triton.jit
def _store_differences(w, N, p, here, y, x, H, W):
    """Store Bp on the neighbour edges of a tile with values `here`; the values of its neighbours are loaded from p."""
    at = y * W + x
    p += at
    w += at
    inside = (y < H) & (x < W)
    right, left, down, up = inside & (x < W - 1), inside & (x > 0), inside & (y < H - 1), inside & (y > 0)
    tl.store(w, tl.where(right, here - tl.load(p + 1, right, 0.0), 0.0), inside)
    tl.store(w + N, tl.where(left, here - tl.load(p - 1, left, 0.0), 0.0), inside)
    tl.store(w + 2 * N, tl.where(down, here - tl.load(p + W, down, 0.0), 0.0), inside)
    tl.store(w + 3 * N, tl.where(up, here - tl.load(p - W, up, 0.0), 0.0), inside)


@triton.jit
def _filter(q, cosines_x, cosines_y, spectrum, y, x, H, W):
    """Multiply the cosine modes of a tile by `spectrum`; outside the grid the matrices are zero."""
    y_, x_ = tl.trans(y), tl.trans(x)
    Cx = tl.load(cosines_x + x_ * W + x, (x_ < W) & (x < W), 0.0)
    Cy = tl.load(cosines_y + y * H + y_, (y < H) & (y_ < H), 0.0)
    q = tl.dot(q, tl.trans(Cx), input_precision="tf32x3")
    q = tl.dot(Cy, q, input_precision="tf32x3")
    q = q * tl.load(spectrum + y * W + x, (y < H) & (x < W), 0.0)
    q = tl.dot(tl.trans(Cy), q, input_precision="tf32x3")
    return tl.dot(q, Cx, input_precision="tf32x3")


@triton.jit
def _vertices_kernel(w, p, cosines_x, cosines_y, spectrum, H, W, TILE_H: tl.constexpr, TILE_W: tl.constexpr):
    N, cut = H * W, tl.program_id(0).to(tl.int64)
    y, x = tl.arange(0, TILE_H)[:, None], tl.arange(0, TILE_W)[None, :]
    q = _filter(_divergence(w + cut * 6 * N, N, y, x, H, W), cosines_x, cosines_y, spectrum, y, x, H, W)
    tl.store(p + cut * N + y * W + x, q, (y < H) & (x < W))


@triton.jit
def _adjoint_kernel(p, w, cosines_x, cosines_y, spectrum, H, W, TILE_H: tl.constexpr, TILE_W: tl.constexpr):
    N, cut = H * W, tl.program_id(0).to(tl.int64)
    y, x = tl.arange(0, TILE_H)[:, None], tl.arange(0, TILE_W)[None, :]
    at, inside = y * W + x, (y < H) & (x < W)
    w += cut * 6 * N
    q = _filter(tl.load(p + cut * N + at, inside, 0.0), cosines_x, cosines_y, spectrum, y, x, H, W)
    tl.store(w + 4 * N + at, -q, inside)
    tl.store(w + 5 * N + at, q, inside)
    tl.debug_barrier()  # the neighbours' values have just been written by other threads of this program
    _store_differences(w, N, w + 5 * N, q, y, x, H, W)


@triton.jit
def _tile_pixels(H, W, TILE_H: tl.constexpr, TILE_W: tl.constexpr):
    """Return the pixels (y, x) of this program's tile."""
    columns = tl.cdiv(W, TILE_W)
    y = (tl.program_id(1) // columns) * TILE_H + tl.arange(0, TILE_H)[:, None]
    x = (tl.program_id(1) % columns) * TILE_W + tl.arange(0, TILE_W)[None, :]
    return y, x


@triton.jit
def _divergence_kernel(w, out, H, W, TILE_H: tl.constexpr, TILE_W: tl.constexpr):
    N, cut = H * W, tl.program_id(0).to(tl.int64)
    y, x = _tile_pixels(H, W, TILE_H, TILE_W)
    tl.store(out + cut * N + y * W + x, _divergence(w + cut * 6 * N, N, y, x, H, W), (y < H) & (x < W))


@triton.jit
def _differences_kernel(p, w, H, W, TILE_H: tl.constexpr, TILE_W: tl.constexpr):
    N, cut = H * W, tl.program_id(0).to(tl.int64)
    y, x = _tile_pixels(H, W, TILE_H, TILE_W)
    at, inside = y * W + x, (y < H) & (x < W)
    p += cut * N
    w += cut * 6 * N
    here = tl.load(p + at, inside, 0.0)
    _store_differences(w, N, p, here, y, x, H, W)
    tl.store(w + 4 * N + at, -here, inside)
    tl.store(w + 5 * N + at, here, inside)


@triton.jit
def _reorder_kernel(q, out, H, W, INVERSE: tl.constexpr, TILE_H: tl.constexpr, TILE_W: tl.constexpr):
    y, x = _tile_pixels(H, W, TILE_H, TILE_W)
    inside = (y < H) & (x < W)
    if INVERSE:
        from_y, from_x = tl.where(y % 2 == 0, y // 2, H - 1 - y // 2), tl.where(x % 2 == 0, x // 2, W - 1 - x // 2)
    else:
        from_y = tl.where(2 * y < H, 2 * y, 2 * (H - 1 - y) + 1)
        from_x = tl.where(2 * x < W, 2 * x, 2 * (W - 1 - x) + 1)
    start = tl.program_id(0).to(tl.int64) * H * W
    tl.store(out + start + y * W + x, tl.load(q + start + from_y * W + from_x, inside, 0.0), inside)


@triton.jit
def _complex_product(a, b, c, d):
    """Return (a + ib)(c + id)."""
    return a * c - b * d, a * d + b * c


@triton.jit
def _scale_modes_kernel(V, out, spectrum, phases_x, phases_y, H, W, TILE_H: tl.constexpr, TILE_W: tl.constexpr):
    half = W // 2 + 1
    y, x = _tile_pixels(H, half, TILE_H, TILE_W)
    inside = (y < H) & (x < half)
    my, mx = (H - y) % H, (W - x) % W  # the mirrored modes
    start = tl.program_id(0).to(tl.int64) * H * half * 2
    here, mirror = V + start + 2 * (y * half + x), V + start + 2 * (my * half + x)
    cx, sx = tl.load(phases_x + 2 * x, x < half, 0.0), tl.load(phases_x + 2 * x + 1, x < half, 0.0)
    cy, sy = tl.load(phases_y + 2 * y, y < H, 0.0), tl.load(phases_y + 2 * y + 1, y < H, 0.0)
    a, b = _complex_product(tl.load(here, inside, 0.0), tl.load(here + 1, inside, 0.0), cx, sx)
    a, b = _complex_product(a, b, cy, sy)
    c, d = _complex_product(tl.load(mirror, inside, 0.0), tl.load(mirror + 1, inside, 0.0), cx, sx)
    c, d = _complex_product(c, d, cy, -sy)
    # (P + Q)/2 contains the modes (y, x) and (y, -x); i(P - Q)/2 contains (-y, x) and (-y, -x)
    re = (a + c) / 2 * tl.load(spectrum + y * W + x, inside, 0.0)
    im = (b + d) / 2 * tl.load(spectrum + y * W + mx, inside, 0.0)
    re += (a - c) / 2 * tl.load(spectrum + my * W + mx, inside, 0.0)
    im += (b - d) / 2 * tl.load(spectrum + my * W + x, inside, 0.0)
    re, im = _complex_product(re, im, cy, -sy)
    re, im = _complex_product(re, im, cx, -sx)
    to = out + start + 2 * (y * half + x)
    tl.store(to, re, inside)
    tl.store(to + 1, im, inside)


class TritonFFTDCT(FFTDCT):
    """`FFTDCT` of an image with two kernels around the FFTs: one reorders samples, one scales modes."""

    def filter(self, q: Tensor, spectrum: Tensor) -> Tensor:
        if not q.numel():  # FFT libraries reject empty batches
            return q
        V = self.scale_modes(torch.fft.rfftn(reorder(q), dim=[-2, -1]), spectrum)
        return reorder(torch.fft.irfftn(V, s=self.shape, dim=[-2, -1]), inverse=True)

    def scale_modes(self, V: Tensor, spectrum: Tensor) -> Tensor:
        return scale_modes(V, spectrum, self.get_buffer("phases1"), self.get_buffer("phases2"))


def reorder(q: Tensor, inverse: bool = False) -> Tensor:
    """Return q with the even samples of both axes first and the odd ones behind them in reverse, or invert that."""
    return _launch_tiled(_reorder_kernel, q, torch.empty_like(q, memory_format=torch.contiguous_format), inverse)


def scale_modes(V: Tensor, spectrum: Tensor, phases_x: Tensor, phases_y: Tensor) -> Tensor:
    """Compute `FFTDCT.scale_modes` for complex V (..., H, W // 2 + 1); phases are pairs (n, 2) of real numbers."""
    H, W = spectrum.shape
    pairs = torch.view_as_real(V.contiguous())
    out = torch.empty_like(pairs)
    grid = (V.numel() // (H * (W // 2 + 1)), triton.cdiv(H, 8) * triton.cdiv(W // 2 + 1, 64))
    if grid[0]:
        with device_of(V):
            _scale_modes_kernel[grid](pairs, out, spectrum, phases_x, phases_y, H, W, 8, 64)
    return torch.view_as_complex(out)


def vertices(w: Tensor, cosines_x: Tensor, cosines_y: Tensor, spectrum: Tensor) -> Tensor:
    """Return p (..., H, W) for w (..., 6, H, W)."""
    out = w.new_empty(*w.shape[:-3], *w.shape[-2:])
    return _launch_fused(_vertices_kernel, w, out, cosines_x, cosines_y, spectrum)


def vertices_adjoint(p: Tensor, cosines_x: Tensor, cosines_y: Tensor, spectrum: Tensor) -> Tensor:
    """Return the gradient of w (..., 6, H, W) for a gradient of p (..., H, W)."""
    out = p.new_empty(*p.shape[:-2], 6, *p.shape[-2:])
    return _launch_fused(_adjoint_kernel, p, out, cosines_x, cosines_y, spectrum)


def divergence(w: Tensor) -> Tensor:
    """Return B'w (..., H, W) on the pixels for w (..., 6, H, W)."""
    return _launch_tiled(_divergence_kernel, w, w.new_empty(*w.shape[:-3], *w.shape[-2:]))


def differences(p: Tensor) -> Tensor:
    """Return Bp (..., 6, H, W) on the edges for p (..., H, W), the terminals at zero."""
    return _launch_tiled(_differences_kernel, p, p.new_empty(*p.shape[:-2], 6, *p.shape[-2:]))


def _launch_fused(
    kernel: Any, x: Tensor, out: Tensor, cosines_x: Tensor, cosines_y: Tensor, spectrum: Tensor
) -> Tensor:
    """Run a kernel with one program per cut."""
    H, W = spectrum.shape
    cuts = min(x.numel(), out.numel()) // (H * W)
    if cuts:
        tile = [max(16, triton.next_power_of_2(n)) for n in (H, W)]
        with device_of(x):
            kernel[(cuts,)](x.contiguous(), out, cosines_x, cosines_y, spectrum, H, W, *tile)
    return out


def _launch_tiled(kernel: Any, x: Tensor, out: Tensor, *flags: bool) -> Tensor:
    """Run a kernel with one program per cut and tile of 8 x 128 pixels."""
    H, W = out.shape[-2:]
    cuts = min(x.numel(), out.numel()) // (H * W)
    if cuts:
        tiles = triton.cdiv(H, 8) * triton.cdiv(W, 128)
        with device_of(x):
            kernel[(cuts, tiles)](x.contiguous(), out, H, W, *flags, 8, 128)
    return out


def is_supported(device: torch.device) -> bool:
    """Return whether the kernels run on this device: an NVIDIA GPU of compute capability 8.0 or later."""
    return device.type == "cuda" and not torch.version.hip and torch.cuda.get_device_capability(device) >= (8, 0)


def device_of(x: Tensor) -> AbstractContextManager[object]:
    """Make the device of x the current one, where Triton launches kernels; compiled code does so itself."""
    return nullcontext() if torch.compiler.is_compiling() else torch.cuda.device_of(x)
