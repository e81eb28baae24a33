"""Triton kernels for CUDA: what `cut.py` and `tail.py` do in many passes over memory, in one.

`vertices` and its adjoint hold one cut of up to 64 x 64 pixels in registers: they read the six weights of every pixel,
take the divergence and go through the four cosine products on the tensor cores, so that device memory sees each weight
once and each answer once. Products run as three TF32 products (tf32x3), which keeps float32 accuracy. Larger cuts take
`divergence` and `differences`, tile by tile, around the FFT.

`narrow` and `narrow_backward` are a decoder's last convolution, whose few maps leave cuDNN's tiles nearly empty.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

SIDE = 64  # the largest side held whole; at 128 the products through cuBLAS are faster
ROWS, COLUMNS = 32, 128  # of a picture, that a program goes through (backward), and takes at a time, at most

# --------------------------------------------------------------------------------------------------------------- cuts


@triton.jit
def _divergence(w, N, y, x, H, W):
    """B'w on a tile of pixels (y, x)."""
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
    """Bp on the neighbour edges of a tile whose values are `here`; those of its neighbours are read from p."""
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
    """Multiplies the cosine modes of a tile by `spectrum`; beyond the grid the tables read zero."""
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
    tl.debug_barrier()  # neighbours are read back from what the other threads of this program have just written
    _store_differences(w, N, w + 5 * N, q, y, x, H, W)


@triton.jit
def _tile(H, W, TILE_H: tl.constexpr, TILE_W: tl.constexpr):
    across = tl.cdiv(W, TILE_W)
    y = (tl.program_id(1) // across) * TILE_H + tl.arange(0, TILE_H)[:, None]
    x = (tl.program_id(1) % across) * TILE_W + tl.arange(0, TILE_W)[None, :]
    return y, x


@triton.jit
def _divergence_kernel(w, out, H, W, TILE_H: tl.constexpr, TILE_W: tl.constexpr):
    N, cut = H * W, tl.program_id(0).to(tl.int64)
    y, x = _tile(H, W, TILE_H, TILE_W)
    tl.store(out + cut * N + y * W + x, _divergence(w + cut * 6 * N, N, y, x, H, W), (y < H) & (x < W))


@triton.jit
def _differences_kernel(p, w, H, W, TILE_H: tl.constexpr, TILE_W: tl.constexpr):
    N, cut = H * W, tl.program_id(0).to(tl.int64)
    y, x = _tile(H, W, TILE_H, TILE_W)
    at, inside = y * W + x, (y < H) & (x < W)
    p += cut * N
    w += cut * 6 * N
    here = tl.load(p + at, inside, 0.0)
    _store_differences(w, N, p, here, y, x, H, W)
    tl.store(w + 4 * N + at, -here, inside)
    tl.store(w + 5 * N + at, here, inside)


@triton.jit
def _reorder_kernel(given, out, H, W, BACK: tl.constexpr, TILE_H: tl.constexpr, TILE_W: tl.constexpr):
    y, x = _tile(H, W, TILE_H, TILE_W)
    inside = (y < H) & (x < W)
    if BACK:
        from_y, from_x = tl.where(y % 2 == 0, y // 2, H - 1 - y // 2), tl.where(x % 2 == 0, x // 2, W - 1 - x // 2)
    else:
        from_y = tl.where(2 * y < H, 2 * y, 2 * (H - 1 - y) + 1)
        from_x = tl.where(2 * x < W, 2 * x, 2 * (W - 1 - x) + 1)
    start = tl.program_id(0).to(tl.int64) * H * W
    tl.store(out + start + y * W + x, tl.load(given + start + from_y * W + from_x, inside, 0.0), inside)


@triton.jit
def _times(a, b, c, d):
    """(a + ib)(c + id)."""
    return a * c - b * d, a * d + b * c


@triton.jit
def _scale_modes_kernel(V, out, spectrum, phases_x, phases_y, H, W, TILE_H: tl.constexpr, TILE_W: tl.constexpr):
    half = W // 2 + 1
    y, x = _tile(H, half, TILE_H, TILE_W)
    inside = (y < H) & (x < half)
    my, mx = (H - y) % H, (W - x) % W  # the mirrored modes
    start = tl.program_id(0).to(tl.int64) * H * half * 2
    here, mirror = V + start + 2 * (y * half + x), V + start + 2 * (my * half + x)
    cx, sx = tl.load(phases_x + 2 * x, x < half, 0.0), tl.load(phases_x + 2 * x + 1, x < half, 0.0)
    cy, sy = tl.load(phases_y + 2 * y, y < H, 0.0), tl.load(phases_y + 2 * y + 1, y < H, 0.0)
    a, b = _times(tl.load(here, inside, 0.0), tl.load(here + 1, inside, 0.0), cx, sx)
    a, b = _times(a, b, cy, sy)
    c, d = _times(tl.load(mirror, inside, 0.0), tl.load(mirror + 1, inside, 0.0), cx, sx)
    c, d = _times(c, d, cy, -sy)
    # (P + Q)/2 holds the modes (y, x) and (y, -x); i(P - Q)/2 holds (-y, x) and (-y, -x)
    re = (a + c) / 2 * tl.load(spectrum + y * W + x, inside, 0.0)
    im = (b + d) / 2 * tl.load(spectrum + y * W + mx, inside, 0.0)
    re += (a - c) / 2 * tl.load(spectrum + my * W + mx, inside, 0.0)
    im += (b - d) / 2 * tl.load(spectrum + my * W + x, inside, 0.0)
    re, im = _times(re, im, cy, -sy)
    re, im = _times(re, im, cx, -sx)
    to = out + start + 2 * (y * half + x)
    tl.store(to, re, inside)
    tl.store(to + 1, im, inside)


def reorder(q: Tensor, back: bool = False) -> Tensor:
    """The even samples of both axes first, the odd ones behind them in reverse; or back from that."""
    return _tiled(_reorder_kernel, q, torch.empty_like(q, memory_format=torch.contiguous_format), back)


def scale_modes(V: Tensor, spectrum: Tensor, phases_x: Tensor, phases_y: Tensor) -> Tensor:
    """`cutslots.cut._scale_modes` for V (..., H, W // 2 + 1) complex."""
    H, W = spectrum.shape
    given = torch.view_as_real(V.contiguous())
    out = torch.empty_like(given)
    grid = (V.numel() // (H * (W // 2 + 1)), triton.cdiv(H, 8) * triton.cdiv(W // 2 + 1, 64))
    if grid[0]:
        phases = (torch.view_as_real(phases_x), torch.view_as_real(phases_y))
        with _where(V):
            _scale_modes_kernel[grid](given, out, spectrum, *phases, H, W, 8, 64)
    return torch.view_as_complex(out)


def vertices(w: Tensor, cosines_x: Tensor, cosines_y: Tensor, spectrum: Tensor) -> Tensor:
    """p (..., H, W) for w (..., 6, H, W)."""
    out = w.new_empty(*w.shape[:-3], *w.shape[-2:])
    return _whole(_vertices_kernel, w, out, cosines_x, cosines_y, spectrum)


def vertices_adjoint(p: Tensor, cosines_x: Tensor, cosines_y: Tensor, spectrum: Tensor) -> Tensor:
    """The gradient of w (..., 6, H, W) for a gradient of p (..., H, W)."""
    out = p.new_empty(*p.shape[:-2], 6, *p.shape[-2:])
    return _whole(_adjoint_kernel, p, out, cosines_x, cosines_y, spectrum)


def divergence(w: Tensor) -> Tensor:
    return _tiled(_divergence_kernel, w, w.new_empty(*w.shape[:-3], *w.shape[-2:]))


def differences(p: Tensor) -> Tensor:
    return _tiled(_differences_kernel, p, p.new_empty(*p.shape[:-2], 6, *p.shape[-2:]))


def _whole(kernel: Any, given: Tensor, out: Tensor, cosines_x: Tensor, cosines_y: Tensor, spectrum: Tensor) -> Tensor:
    H, W = spectrum.shape
    cuts = min(given.numel(), out.numel()) // (H * W)
    if cuts:
        tile = [max(16, triton.next_power_of_2(n)) for n in (H, W)]
        with _where(given):
            kernel[(cuts,)](given.contiguous(), out, cosines_x, cosines_y, spectrum, H, W, *tile)
    return out


def _tiled(kernel: Any, given: Tensor, out: Tensor, *flags: bool) -> Tensor:
    H, W = out.shape[-2:]
    cuts = min(given.numel(), out.numel()) // (H * W)
    if cuts:
        tiles = triton.cdiv(H, 8) * triton.cdiv(W, 128)
        with _where(given):
            kernel[(cuts, tiles)](given.contiguous(), out, H, W, *flags, 8, 128)
    return out


def able(device: torch.device) -> bool:
    """Whether the kernels are for such a device."""
    return device.type == "cuda" and not torch.version.hip and torch.cuda.get_device_capability(device) >= (8, 0)


def _where(x: Tensor) -> AbstractContextManager[object]:
    """Kernels start on the current device, which need not be that of x; compiled code sees to it by itself."""
    return nullcontext() if torch.compiler.is_compiling() else torch.cuda.device_of(x)


# ------------------------------------------------------------------------------- the last convolution of a decoder


@triton.jit
def _narrow_kernel(x, taps, bias, out, half, W, C: tl.constexpr, COLUMNS: tl.constexpr):
    """Two rows of a picture, from the four around them."""
    start = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[:, None]
    h = tl.program_id(0) % half + tl.zeros_like(column)  # not a single number, for Triton's interpreter
    map_, made = tl.arange(0, C), tl.arange(0, 16)
    weights = taps + map_[:, None] * 16 + made[None, :]
    x += start * W * 2 * C + map_[None, :]
    sums = tl.zeros((COLUMNS, 16), tl.float32)
    for j in tl.static_range(3):
        beside = column + j - 1
        for row in tl.static_range(4):  # the pair above's second, this pair's two, the pair below's first
            pair, phase = (row + 1) // 2 - 1, (row + 1) % 2
            inside = (beside >= 0) & (beside < W) & (h + pair >= 0) & (h + pair < half)
            there = tl.load(x + (pair * W + beside) * 2 * C + phase * C, inside, 0.0)
            sums += tl.dot(there, tl.load(weights + (j * 4 + row) * C * 16))
    to_phase, map_after = made // 4, made % 4
    sums += tl.load(bias + map_after).to(tl.float32)[None, :]
    out += start // half * 8 * half * W
    to = (map_after[None, :] * 2 * half + 2 * h + to_phase[None, :]) * W + column
    tl.store(out + to, sums.to(out.dtype.element_ty), (to_phase < 2)[None, :] & (column < W))


@triton.jit
def _narrow_backward_kernel(
    g, x, taps, of_x, of_taps, of_bias, slope, H, W, C: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Some rows of a picture; what becomes of weights and biases is summed up outside."""
    program = tl.program_id(0)
    tap, map_ = tl.arange(0, 64), tl.arange(0, C)
    map_after, i, j = tap % 4, tap // 12, tap // 4 % 3
    kernel = tl.load(taps + tap[:, None] * C + map_[None, :])
    sums, of_map = tl.zeros((64, C), tl.float32), tl.zeros((C,), tl.float32)
    n, first = (program * ROWS // H).to(tl.int64), program * ROWS % H
    g += n * H * W * 4
    x += n * H * W * C
    of_x += n * H * W * C
    for y in range(first, first + ROWS):
        for start in range(0, W, COLUMNS):
            column = start + tl.arange(0, COLUMNS)[:, None]
            row_after, column_after = y + 1 - i[None, :], column + 1 - j[None, :]
            inside = (row_after >= 0) & (row_after < H) & (column_after >= 0) & (column_after < W)
            after = g + (map_after[None, :] * H + row_after) * W + column_after
            after = tl.load(after, inside & (tap < 36)[None, :], 0.0)
            at = (y // 2 * W + column) * 2 * C + y % 2 * C + map_[None, :]
            here = tl.load(x + at)
            before = tl.dot(after, kernel)
            before = tl.where(here > 0, before, slope * before)
            tl.store(of_x + at, before.to(of_x.dtype.element_ty))
            of_map += tl.sum(before, 0)
            sums += tl.dot(tl.trans(after), here)
    tl.store(of_taps + (program.to(tl.int64) * 64 + tap[:, None]) * C + map_[None, :], sums)
    tl.store(of_bias + program * C + map_, of_map)


def narrow(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """`cutslots.tail.narrow`."""
    N, maps, half, W = x.shape
    C, columns = maps // 2, min(W, COLUMNS)
    taps = weight.permute(3, 2, 1, 0)  # column, row, map before, map after
    both = x.new_zeros(3, 4, C, 4, 4)  # column, row of four, map before, row phase (two are empty), map after
    both[:, :3, :, 0] = taps
    both[:, 1:, :, 1] = taps
    out = x.new_empty(N, 4, 2 * half, W)
    with _where(x):
        _narrow_kernel[(N * half, W // columns)](x, both, bias, out, half, W, C, columns)
    return out


def narrow_backward(g: Tensor, x: Tensor, weight: Tensor, slope: float) -> tuple[Tensor, Tensor, Tensor]:
    """`cutslots.tail.narrow_backward`."""
    N, maps, half, W = x.shape
    C, H = maps // 2, 2 * half
    rows = min(H, ROWS)
    programs = N * H // rows
    taps = x.new_zeros(64, C)
    taps[:36] = weight.permute(2, 3, 0, 1).reshape(36, C)  # row, column, map after; map before
    of_x, of_bias = torch.empty_like(x), x.new_empty(programs, C, dtype=torch.float32)
    of_taps = x.new_empty(programs, 64, C, dtype=torch.float32)
    with _where(x):
        _narrow_backward_kernel[(programs,)](
            g.contiguous(), x, taps, of_x, of_taps, of_bias, slope, H, W, C, rows, min(W, COLUMNS), num_stages=1
        )
    of_weight = of_taps.sum(0)[:36].view(3, 3, 4, C).permute(2, 3, 0, 1).to(x.dtype)
    return of_x, of_weight.contiguous(memory_format=torch.channels_last), of_bias.sum(0).to(x.dtype)
