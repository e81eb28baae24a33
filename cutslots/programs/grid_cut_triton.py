"""Triton kernels of `GridCut` for float32 images on CUDA. Each one replaces several passes over memory by one.

`vertices` and `vertices_adjoint` keep one cut of at most 64 x 64 pixels in registers. They read the six weights of
every pixel, compute the divergence and multiply by the four cosine matrices on the tensor cores. Device memory
transfers each weight once and each result once.

Larger cuts are solved in overlapping tiles of 64 x 64 pixels (`vertices_in_tiles`), the overlap-save method. The effect
of a pixel decays by a constant factor per pixel. A tile with a margin of MARGIN pixels therefore contains everything
that its inner pixels need, if that factor is small enough (`fits_tiles`). Tiles are reflected at the border of the
image, which is exact: cosine modes are even there. The terminals change the constant mode only, which is the mean of
the image: p = filter(q - mean) + response * mean.

Cuts of a longer reach use `divergence` and `differences`, and `TritonFFTDCT` where the transform is an FFT.

Products multiply halves: x = high + low in float16, which keeps 22 bits, and three products high * high + high * low +
low * high with float32 sums. Values are scaled by powers of two, which are exact, to the range of float16:

    |q| < 8,   tables 8 C,   spectrum at most 1/8

The matrices C are orthonormal, and differences of their columns have a norm of sqrt(2). So after two products values
are below 8 * 64 * 64 = 32768, and after the third below 32768 / 8 * 8 sqrt(2) = 46341. float16 ends at 65504. With a
long reach the entries of the spectrum differ by orders of magnitude. Then the modes are scaled once more (RESCALE).
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from cutslots.programs.dct import FFTDCT, dct_matrix

MAX_FUSED_SIZE = 64  # the largest side of a cut in registers
TILE, MARGIN = 64, 12  # of overlapping tiles
MAX_TILE_ERROR = 1.5e-7  # what remains of the effect of a pixel at the distance MARGIN; about an epsilon of float32
MAX_SPECTRUM_RANGE = 256  # between the modes of one cut, up to which one scale is enough for float16
FUSED_WARPS, FUSED_ADJOINT_WARPS = 4, 4  # of a program that solves one cut
TILE_WARPS = 4  # of a program that solves one tile
BLOCK_H, BLOCK_W = 8, 128  # the pixels of a program without products


@triton.jit
def _split_columns(a, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    """Return the columns 4k, 4k + 1, 4k + 2 and 4k + 3 of a. One thread loads all four, so nothing moves."""
    even, odd = tl.split(tl.reshape(a, (HEIGHT, WIDTH // 4, 2, 2)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def _join_columns(first, second, third, fourth, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    """Invert `_split_columns`."""
    return tl.reshape(tl.join(tl.join(first, third), tl.join(second, fourth)), (HEIGHT, WIDTH))


@triton.jit
def _previous(a, border):
    """Return a[:, k - 1], and `border` for k = 0. The values come from other threads of the same warp."""
    k = tl.arange(0, a.shape[1])[None, :] + tl.zeros(a.shape, tl.int32)
    return tl.where(k > 0, tl.gather(a, tl.maximum(k - 1, 0), 1), border)


@triton.jit
def _next(a, border):
    """Return a[:, k + 1], and `border` for the last k."""
    k, last = tl.arange(0, a.shape[1])[None, :] + tl.zeros(a.shape, tl.int32), a.shape[1] - 1
    return tl.where(k < last, tl.gather(a, tl.minimum(k + 1, last), 1), border)


@triton.jit
def _drops(q, before, after, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    """Return q minus its next column and q minus its previous column, given the columns on both sides of q."""
    a, b, c, d = _split_columns(q, HEIGHT, WIDTH)
    right = _join_columns(a - b, b - c, c - d, d - _next(a, after), HEIGHT, WIDTH)
    return right, _join_columns(a - _previous(d, before), b - a, c - b, d - c, HEIGHT, WIDTH)


@triton.jit
def _divergence(w, N, y0, x0, H, W, BLOCK_H: tl.constexpr, BLOCK_W: tl.constexpr):
    """Return B'w on the block of pixels at (y0, x0) for the weights w of row y0.

    Loads are 16 bytes wide: they are masked by the grid only, and the values of edges that leave it are dropped
    afterwards. Neighbours along x are loaded once and shifted in registers; only those beyond the block are loaded.
    """
    y, x = y0 + tl.arange(0, BLOCK_H)[:, None], x0 + tl.arange(0, BLOCK_W)[None, :]
    inside, down, up = (y < H) & (x < W), (y < H - 1) & (x < W), (y > 0) & (y < H) & (x < W)
    row = w + tl.arange(0, BLOCK_H)[:, None] * W
    w = row + x
    right = tl.where(x < W - 1, tl.load(w, inside, 0.0), 0.0)
    left = tl.where(x > 0, tl.load(w + N, inside, 0.0), 0.0)
    before = tl.load(row + x0 - 1, (y < H) & (x0 > 0), 0.0)
    after = tl.load(row + N + x0 + BLOCK_W, (y < H) & (x0 + BLOCK_W < W), 0.0)
    _, flow = _drops(right, before, 0.0, BLOCK_H, BLOCK_W)
    back, _ = _drops(left, 0.0, after, BLOCK_H, BLOCK_W)
    out = tl.where(x < W, flow + back, 0.0)
    out += tl.load(w + 5 * N, inside, 0.0) - tl.load(w + 4 * N, inside, 0.0)
    out += tl.load(w + 2 * N, down, 0.0) - tl.load(w + 2 * N - W, up, 0.0)
    out += tl.load(w + 3 * N, up, 0.0) - tl.load(w + 3 * N + W, down, 0.0)
    return out


@triton.jit
def _halves(a):
    """Return a as the sum of two float16 numbers."""
    high = a.to(tl.float16)
    return high, (a - high.to(tl.float32)).to(tl.float16)


@triton.jit
def _product(a, high, low):
    """Return a @ (high + low)."""
    a_high, a_low = _halves(a)
    out = tl.dot(a_low, high)
    out = tl.dot(a_high, low, out)
    return tl.dot(a_high, high, out)


@triton.jit
def _load_table(table, which, SIZE: tl.constexpr):
    """Return the halves of one matrix of `table` (matrices, SIZE, SIZE), whose entries are the bits of both.

    Entries are as wide as those of images. Narrower ones would spread the loads of images over twice as many sectors
    of memory, because the compiler assigns the same pixels to a thread in all loads.
    """
    bits = tl.load(table + which * SIZE * SIZE + tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :])
    return bits.to(tl.int16).to(tl.float16, bitcast=True), (bits >> 16).to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def _power_of_two(a):
    """Return a power of two with |a| * power < 8, its largest value at least 4, and the inverse power.

    Both stay normal numbers. NaN and infinity remain what they are when multiplied.
    """
    top = tl.max(tl.max(tl.abs(a), 1), 0)
    exponent = tl.minimum(tl.maximum((top.to(tl.int32, bitcast=True) >> 23) & 255, 3), 254)
    return ((256 - exponent) << 23).to(tl.float32, bitcast=True), ((exponent - 2) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _modes(q, table_x, table_y, spectrum, TILE_H: tl.constexpr, TILE_W: tl.constexpr, RESCALE: tl.constexpr):
    """Return the filtered modes (x, y) of q, scaled, and two factors that undo the scale.

    The factors are applied one after the other: their product may leave the range of float32.
    """
    power, inverse = _power_of_two(q)
    high, low = _load_table(table_x, 0, TILE_W)
    t = _product(q * power, tl.trans(high), tl.trans(low))
    high, low = _load_table(table_y, 0, TILE_H)
    t = _product(tl.trans(t), tl.trans(high), tl.trans(low))
    t *= tl.load(spectrum + tl.arange(0, TILE_W)[:, None] * TILE_H + tl.arange(0, TILE_H)[None, :])
    gain = tl.load(spectrum + TILE_W * TILE_H)
    if RESCALE:
        power, again = _power_of_two(t)
        t *= power
        gain *= again
    return t, gain, inverse


@triton.jit
def _filter(q, table_x, table_y, spectrum, TILE_H: tl.constexpr, TILE_W: tl.constexpr, RESCALE: tl.constexpr):
    """Multiply the cosine modes of a tile by the spectrum."""
    t, gain, inverse = _modes(q, table_x, table_y, spectrum, TILE_H, TILE_W, RESCALE)
    high, low = _load_table(table_y, 0, TILE_H)
    t = tl.trans(_product(t, high, low))
    high, low = _load_table(table_x, 0, TILE_W)
    return _product(t, high, low) * gain * inverse


@triton.jit
def _vertices_kernel(
    w,
    p,
    table_x,
    table_y,
    spectrum,
    H: tl.constexpr,
    W: tl.constexpr,
    TILE_H: tl.constexpr,
    TILE_W: tl.constexpr,
    RESCALE: tl.constexpr,
):
    if H == W:  # load one table instead of two
        table_y = table_x
    cut = tl.program_id(0).to(tl.int64)
    y, x = tl.arange(0, TILE_H)[:, None], tl.arange(0, TILE_W)[None, :]
    q = _divergence(w + cut * (6 * H * W), H * W, 0, 0, H, W, TILE_H, TILE_W)
    q = _filter(q, table_x, table_y, spectrum, TILE_H, TILE_W, RESCALE)
    tl.store(p + cut * (H * W) + y * W + x, q, (y < H) & (x < W))


@triton.jit
def _adjoint_kernel(
    p,
    w,
    table_x,
    table_y,
    spectrum,
    H: tl.constexpr,
    W: tl.constexpr,
    TILE_H: tl.constexpr,
    TILE_W: tl.constexpr,
    RESCALE: tl.constexpr,
):
    """Filter one image and store its differences.

    Differences along y are products with the differences of the cosines: shifting rows between threads takes longer.
    Each result is stored at once, because three of them at a time need too many registers.
    """
    if H == W:  # load one table instead of two
        table_y = table_x
    cut = tl.program_id(0).to(tl.int64)
    y, x = tl.arange(0, TILE_H)[:, None], tl.arange(0, TILE_W)[None, :]
    N: tl.constexpr = H * W
    at, here = y * W + x, (y < H) & (x < W)
    q = tl.load(p + cut * N + at, here, 0.0)
    w += cut * (6 * N)
    t, gain, inverse = _modes(q, table_x, table_y, spectrum, TILE_H, TILE_W, RESCALE)
    cos_high, cos_low = _load_table(table_x, 0, TILE_W)
    high, low = _load_table(table_y, 1, TILE_H)
    y_high, y_low = _load_table(table_y, 0, TILE_H)
    down = _product(tl.trans(_product(t, high, low)), cos_high, cos_low) * gain * inverse
    tl.store(w + 2 * N + at, down, here)
    tl.store(w + 3 * N + W + at, -down, (y < H - 1) & (x < W))
    t = tl.trans(_product(t, y_high, y_low))
    q = _product(t, cos_high, cos_low) * gain * inverse
    tl.store(w + 4 * N + at, -q, here)
    tl.store(w + 5 * N + at, q, here)
    right, left = _drops(q, 0.0, 0.0, TILE_H, TILE_W)
    tl.store(w + at, tl.where(x < W - 1, right, 0.0), here)
    tl.store(w + N + at, tl.where(x > 0, left, 0.0), here)
    tl.store(w + 3 * N + at, 0.0, here & (y == 0))


@triton.jit
def _tile_position(H, W, KEPT: tl.constexpr):
    """Return cut, y and x of the first pixel that this program keeps."""
    columns = tl.cdiv(W, KEPT)
    tiles = tl.cdiv(H, KEPT) * columns
    tile = tl.program_id(0) % tiles
    return (tl.program_id(0) // tiles).to(tl.int64), (tile // columns) * KEPT, (tile % columns) * KEPT


@triton.jit
def _reflect(y, size):
    """Return the pixels of an axis that stand for y, which is at most one tile outside."""
    y = tl.where(y < 0, -1 - y, y)
    return tl.where(y < size, y, 2 * size - 1 - y)


@triton.jit
def _load_tile(q, y0, x0, H, W, TILE: tl.constexpr, INNER: tl.constexpr):
    """Load the tile at (y0, x0), reflected at the border of the image. An INNER tile is inside the image."""
    i, j = tl.arange(0, TILE)[:, None], tl.arange(0, TILE)[None, :]
    if INNER:
        q += y0.to(tl.int64) * W + x0 + i * W + j
    else:
        q += _reflect(y0 + i, H).to(tl.int64) * W + _reflect(x0 + j, W)
    return tl.load(q)


@triton.jit
def _store_tile(p, t, y0, x0, H, W, TILE: tl.constexpr, MARGIN: tl.constexpr, INNER: tl.constexpr):
    """Store a tile without its margin; (y0, x0) is the first pixel that is kept."""
    i, j = tl.arange(0, TILE)[:, None] - MARGIN, tl.arange(0, TILE)[None, :] - MARGIN
    kept = (i >= 0) & (i < TILE - 2 * MARGIN) & (j >= 0) & (j < TILE - 2 * MARGIN)
    if not INNER:
        kept = kept & (i < H - y0) & (j < W - x0)
    tl.store(p + y0.to(tl.int64) * W + x0 + i * W + j, t, kept)


@triton.jit
def _is_inner(y0, x0, H, W, TILE: tl.constexpr):
    """Return whether the tile at (y0, x0) is inside the image."""
    return (y0 >= 0) & (x0 >= 0) & (y0 + TILE <= H) & (x0 + TILE <= W)


@triton.jit
def _tile_kernel(q, sums, p, table, spectrum, H, W, TILE: tl.constexpr, MARGIN: tl.constexpr, RESCALE: tl.constexpr):
    """Filter tiles of q, given its sum.

    Both branches contain all steps: values that meet behind a branch would pass through shared memory, because the
    loads of a reflected tile are 4 bytes wide.
    """
    N = tl.cast(H, tl.int64) * W
    cut, y0, x0 = _tile_position(H, W, TILE - 2 * MARGIN)
    mean = tl.load(sums + cut) * tl.load(spectrum + TILE * TILE + 1)
    constant = mean * tl.load(spectrum + TILE * TILE + 2)
    q += cut * N
    p += cut * N
    if _is_inner(y0 - MARGIN, x0 - MARGIN, H, W, TILE):
        t = _load_tile(q, y0 - MARGIN, x0 - MARGIN, H, W, TILE, True) - mean
        t = _filter(t, table, table, spectrum, TILE, TILE, RESCALE) + constant
        _store_tile(p, t, y0, x0, H, W, TILE, MARGIN, True)
    else:
        t = _load_tile(q, y0 - MARGIN, x0 - MARGIN, H, W, TILE, False) - mean
        t = _filter(t, table, table, spectrum, TILE, TILE, RESCALE) + constant
        _store_tile(p, t, y0, x0, H, W, TILE, MARGIN, False)


@triton.jit
def _block_pixels(H, W, BLOCK_H: tl.constexpr, BLOCK_W: tl.constexpr):
    """Return the cut, the first pixel and the pixels (y, x) of this program's block."""
    columns = tl.cdiv(W, BLOCK_W)
    blocks = tl.cdiv(H, BLOCK_H) * columns
    block = tl.program_id(0) % blocks
    y0, x0 = (block // columns) * BLOCK_H, (block % columns) * BLOCK_W
    y, x = y0 + tl.arange(0, BLOCK_H)[:, None], x0 + tl.arange(0, BLOCK_W)[None, :]
    return (tl.program_id(0) // blocks).to(tl.int64), y0, x0, y, x


@triton.jit
def _divergence_kernel(w, out, H, W, sums, SUM: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_W: tl.constexpr):
    """Store B'w, and the sum of each block if SUM."""
    cut, y0, x0, y, x = _block_pixels(H, W, BLOCK_H, BLOCK_W)
    N, start = tl.cast(H, tl.int64) * W, y0.to(tl.int64) * W
    q = _divergence(w + cut * 6 * N + start, N, y0, x0, H, W, BLOCK_H, BLOCK_W)
    tl.store(out + cut * N + start + (y - y0) * W + x, q, (y < H) & (x < W))
    if SUM:
        tl.store(sums + tl.program_id(0), tl.sum(tl.sum(q, 1), 0))


@triton.jit
def _differences_kernel(p, w, H, W, BLOCK_H: tl.constexpr, BLOCK_W: tl.constexpr):
    cut, y0, x0, y, x = _block_pixels(H, W, BLOCK_H, BLOCK_W)
    N, start = tl.cast(H, tl.int64) * W, y0.to(tl.int64) * W
    inside, down, up = (y < H) & (x < W), (y < H - 1) & (x < W), (y > 0) & (y < H) & (x < W)
    row = p + cut * N + start + (y - y0) * W
    p = row + x
    w += cut * 6 * N + start + (y - y0) * W + x
    here = tl.load(p, inside, 0.0)
    before = tl.load(row + x0 - 1, (y < H) & (x0 > 0), 0.0)
    after = tl.load(row + x0 + BLOCK_W, (y < H) & (x0 + BLOCK_W < W), 0.0)
    right, left = _drops(here, before, after, BLOCK_H, BLOCK_W)
    tl.store(w, tl.where(x < W - 1, right, 0.0), inside)
    tl.store(w + N, tl.where(x > 0, left, 0.0), inside)
    tl.store(w + 2 * N, tl.where(down, here - tl.load(p + W, down, 0.0), 0.0), inside)
    tl.store(w + 3 * N, tl.where(up, here - tl.load(p - W, up, 0.0), 0.0), inside)
    tl.store(w + 4 * N, -here, inside)
    tl.store(w + 5 * N, here, inside)


@triton.jit
def _reorder_kernel(q, out, H, W, INVERSE: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_W: tl.constexpr):
    cut, _, _, y, x = _block_pixels(H, W, BLOCK_H, BLOCK_W)
    inside = (y < H) & (x < W)
    if INVERSE:
        from_y, from_x = tl.where(y % 2 == 0, y // 2, H - 1 - y // 2), tl.where(x % 2 == 0, x // 2, W - 1 - x // 2)
    else:
        from_y = tl.where(2 * y < H, 2 * y, 2 * (H - 1 - y) + 1)
        from_x = tl.where(2 * x < W, 2 * x, 2 * (W - 1 - x) + 1)
    start = cut * H * W
    tl.store(out + start + y * W + x, tl.load(q + start + from_y * W + from_x, inside, 0.0), inside)


@triton.jit
def _complex_product(a, b, c, d):
    """Return (a + ib)(c + id)."""
    return a * c - b * d, a * d + b * c


@triton.jit
def _scale_modes_kernel(V, out, spectrum, phases_x, phases_y, H, W, BLOCK_H: tl.constexpr, BLOCK_W: tl.constexpr):
    half = W // 2 + 1
    cut, _, _, y, x = _block_pixels(H, half, BLOCK_H, BLOCK_W)
    inside = (y < H) & (x < half)
    my, mx = (H - y) % H, (W - x) % W  # the mirrored modes
    start = cut * H * half * 2
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
    return _launch_blocks(_reorder_kernel, q, torch.empty_like(q, memory_format=torch.contiguous_format), inverse)


def scale_modes(V: Tensor, spectrum: Tensor, phases_x: Tensor, phases_y: Tensor) -> Tensor:
    """Compute `FFTDCT.scale_modes` for complex V (..., H, W // 2 + 1); phases are pairs (n, 2) of real numbers."""
    H, W = spectrum.shape
    pairs = torch.view_as_real(V.contiguous())
    out = torch.empty_like(pairs)
    cuts = V.numel() // (H * (W // 2 + 1))
    if cuts:
        with device_of(V):
            grid = (cuts * triton.cdiv(H, 8) * triton.cdiv(W // 2 + 1, 64),)
            _scale_modes_kernel[grid](pairs, out, spectrum, phases_x, phases_y, H, W, 8, 64)
    return torch.view_as_complex(out)


class FilterTables(nn.Module):
    """The constants of a filter by products of halves, in tiles of at most 64 x 64 pixels.

    `response` (H, W) is the factor of every mode of a tile, in float64. `constant` is that of the constant mode of an
    image of `pixels`, where the tile is only a part of it.

    Tables are the cosines and the differences of neighbouring cosines, as bits of float16: a conversion of the layer to
    another precision leaves them alone. An entry is an int32: the low half is in the upper 16 bits, the high half in
    the lower ones. Entries outside the tile are zero. `spectrum` is transposed and scaled. Behind it are the factor
    that undoes all scales, 1 / pixels, and `constant`. All are vectors: `.to(memory_format=...)` would reorder the
    memory of a tensor with four dimensions, which the kernels read as it is.
    """

    spectrum: Tensor
    table_x: Tensor
    table_y: Tensor

    def __init__(self, response: Tensor, device: torch.device, pixels: int = 1, constant: float = 0.0) -> None:
        super().__init__()
        self.shape = tuple(response.shape)
        self.tile = tuple(max(16, triton.next_power_of_2(n)) for n in self.shape)
        top = 2.0 ** math.ceil(math.log2(response.abs().max().item()))
        self.rescale = response.abs().max().item() > MAX_SPECTRUM_RANGE * _smallest_mode(response)
        spectrum = torch.zeros(self.tile[::-1], dtype=torch.float64, device="cpu")
        spectrum[: self.shape[1], : self.shape[0]] = response.T / (8 * top)
        scales = torch.tensor([top / 512, 1 / pixels, constant], dtype=torch.float64, device="cpu")
        self.register_buffer("spectrum", torch.cat([spectrum.flatten(), scales]).to(device, torch.float32), False)
        for axis, name in enumerate(("table_y", "table_x")):
            table = _half_tables(self.shape[axis], self.tile[axis]).flatten()
            self.register_buffer(name, table.to(device), False)


def _smallest_mode(response: Tensor) -> float:
    """Return the smallest factor of a mode that is not constant."""
    others = response.abs().flatten()[1:]
    return others.min().item() if len(others) else math.inf


def _half_tables(n: int, size: int) -> Tensor:
    """Return 8 C and 8 times the differences of its columns (2, size, size): the bits of both halves."""
    tables = torch.zeros(2, size, size, dtype=torch.float64, device="cpu")
    tables[0, :n, :n] = 8 * dct_matrix(n)
    tables[1, :n, : n - 1] = tables[0, :n, : n - 1] - tables[0, :n, 1:n]
    high = tables.half()
    low = (tables - high.double()).half()
    return (low.view(torch.int16).int() << 16) | (high.view(torch.int16).int() & 0xFFFF)


def vertices(w: Tensor, tables: FilterTables) -> Tensor:
    """Return p (..., H, W) for w (..., 6, H, W)."""
    out = w.new_empty(*w.shape[:-3], *w.shape[-2:])
    return _launch_fused(_vertices_kernel, w, out, tables, FUSED_WARPS)


def vertices_adjoint(p: Tensor, tables: FilterTables) -> Tensor:
    """Return the gradient of w (..., 6, H, W) for a gradient of p (..., H, W)."""
    out = p.new_empty(*p.shape[:-2], 6, *p.shape[-2:])
    return _launch_fused(_adjoint_kernel, p, out, tables, FUSED_ADJOINT_WARPS)


def vertices_in_tiles(w: Tensor, tables: FilterTables) -> Tensor:
    """Return p (..., H, W) for w (..., 6, H, W)."""
    H, W = w.shape[-2:]
    blocks = triton.cdiv(H, BLOCK_H) * triton.cdiv(W, BLOCK_W)
    sums = w.new_empty(*w.shape[:-3], blocks)
    q = _launch_blocks(_divergence_kernel, w, w.new_empty(*w.shape[:-3], H, W), sums, True)
    return _filter_tiles(q, sums.sum(-1), tables)


def adjoint_in_tiles(p: Tensor, tables: FilterTables) -> Tensor:
    """Return the gradient of w (..., 6, H, W) for a gradient of p (..., H, W)."""
    return differences(_filter_tiles(p, p.sum((-2, -1)), tables))


def divergence(w: Tensor) -> Tensor:
    """Return B'w (..., H, W) on the pixels for w (..., 6, H, W)."""
    out = w.new_empty(*w.shape[:-3], *w.shape[-2:])
    return _launch_blocks(_divergence_kernel, w, out, w, False)  # w stands for the sums, which are not stored


def differences(p: Tensor) -> Tensor:
    """Return Bp (..., 6, H, W) on the edges for p (..., H, W), the terminals at zero."""
    return _launch_blocks(_differences_kernel, p, p.new_empty(*p.shape[:-2], 6, *p.shape[-2:]))


def _launch_fused(kernel: Any, x: Tensor, out: Tensor, tables: FilterTables, warps: int) -> Tensor:
    """Run a kernel with one program per cut."""
    cuts = _count_cuts(x, out)
    if cuts:
        constants = (tables.table_x, tables.table_y, tables.spectrum, *tables.shape, *tables.tile, tables.rescale)
        with device_of(x):
            kernel[(cuts,)](x.contiguous(), out, *constants, num_warps=warps)
    return out


def _filter_tiles(q: Tensor, sums: Tensor, tables: FilterTables) -> Tensor:
    """Filter images q (..., H, W), given their sums, with one program per image and overlapping tile."""
    H, W = q.shape[-2:]
    kept, out = TILE - 2 * MARGIN, torch.empty_like(q, memory_format=torch.contiguous_format)
    tiles = _count_cuts(q, out) * triton.cdiv(H, kept) * triton.cdiv(W, kept)
    if tiles:
        constants = (tables.table_x, tables.spectrum, H, W, TILE, MARGIN, tables.rescale)
        with device_of(q):
            _tile_kernel[(tiles,)](q.contiguous(), sums, out, *constants, num_warps=TILE_WARPS)
    return out


def _launch_blocks(kernel: Any, x: Tensor, out: Tensor, *options: Any) -> Tensor:
    """Run a kernel with one program per cut and block of pixels."""
    H, W = out.shape[-2:]
    blocks = _count_cuts(x, out) * triton.cdiv(H, BLOCK_H) * triton.cdiv(W, BLOCK_W)
    if blocks:
        with device_of(x):
            kernel[(blocks,)](x.contiguous(), out, H, W, *options, BLOCK_H, BLOCK_W)
    return out


def _count_cuts(x: Tensor, out: Tensor) -> int:
    """Return the number of cuts; the smaller of the two tensors has one value per pixel."""
    return min(x.numel(), out.numel()) // math.prod(out.shape[-2:])


def fits_tiles(shape: tuple[int, ...], decay: float) -> bool:
    """Return whether an image is solved in overlapping tiles.

    `decay` is the factor per pixel by which the effect of a pixel decays along an axis. Tiles are reflected once at
    each border, so neither side may be shorter than a tile without one margin.
    """
    return min(shape) >= TILE - MARGIN and decay**MARGIN <= MAX_TILE_ERROR


def is_supported(device: torch.device) -> bool:
    """Return whether the kernels run on this device: an NVIDIA GPU of compute capability 8.0 or later."""
    return device.type == "cuda" and not torch.version.hip and torch.cuda.get_device_capability(device) >= (8, 0)


def device_of(x: Tensor) -> AbstractContextManager[object]:
    """Make the device of x the current one, where Triton launches kernels; compiled code does so itself.

    On the CPU, where Triton's interpreter runs kernels, there is nothing to do.
    """
    return torch.cuda.device_of(x) if x.is_cuda and not torch.compiler.is_compiling() else nullcontext()
