"""Triton kernels of `MinCut` for float32 images on CUDA. See `min_cut_solver` for the method.

A small image is solved by one program, which keeps its dual variables in registers for all iterations. Larger images,
and many of a medium size, are cut into tiles: `_iterate_tiles` does `STEPS` iterations on tiles that overlap by as many
pixels on each side, so memory is read once in so many iterations. In both, values of neighbours pass through a scratch
buffer that stays in the cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cutslots.programs.grid_cut_triton import device_of, is_supported
from cutslots.programs.min_cut_solver import Dual, grid_problem, take_means

MAX_SIDE = 128  # of an image in one program
MAX_FAST_SIDE, MANY = 64, 64  # above this side, so many images are solved faster in tiles
FIRST_CHECK = 20
MAX_RATIO = 8  # of the gap to the tolerance, up to which the means over regions are tried: they cost 40 iterations
TILE, STEPS = 64, 8  # the side of a tile with its margins, and the iterations for which they last
PROGRAMS = 1_024  # that share the tiles; each has its own scratch buffer
BLOCK = 1_024  # pixels of a program without tiles
MAX_BATCH = 32_768  # a launch has at most 65,535 programs along its second axis


# ----------------------------------------------------------------------------------------------------- parts of kernels


@triton.jit
def _pixels(row, column, H, W, BLOCK_H: tl.constexpr, BLOCK_W: tl.constexpr):
    """Return the pixels of a block from (row, column) on, in the image and in the block, and their neighbours."""
    i, j = tl.arange(0, BLOCK_H)[:, None], tl.arange(0, BLOCK_W)[None, :]
    row, column = row + i, column + j
    inside = (row >= 0) & (row < H) & (column >= 0) & (column < W)
    right, left = inside & (column < W - 1) & (j < BLOCK_W - 1), inside & (column > 0) & (j > 0)
    down, up = inside & (row < H - 1) & (i < BLOCK_H - 1), inside & (row > 0) & (i > 0)
    return row * W + column, i * BLOCK_W + j, inside, right, down, left, up


@triton.jit
def _problem(w, N, W, at, inside, right, down):
    """Return the bounds of the dual variables, and c."""
    hi_x, lo_x = tl.load(w + at, right, 0.0), -tl.load(w + N + at + 1, right, 0.0)
    hi_y, lo_y = tl.load(w + 2 * N + at, down, 0.0), -tl.load(w + 3 * N + at + W, down, 0.0)
    c = tl.load(w + 4 * N + at, inside, 0.0) - tl.load(w + 5 * N + at, inside, 0.0)
    return lo_x, hi_x, lo_y, hi_y, c


@triton.jit
def _vertices(c, x, y, scratch, spot, left, up, BLOCK_H: tl.constexpr, BLOCK_W: tl.constexpr):
    """Return q = c - B'y for dual variables x (to the right) and y (downwards)."""
    tl.store(scratch + spot, x)
    tl.store(scratch + BLOCK_H * BLOCK_W + spot, y)
    tl.debug_barrier()
    before = tl.load(scratch + spot - 1, left, 0.0)
    before += tl.load(scratch + BLOCK_H * BLOCK_W + spot - BLOCK_W, up, 0.0)
    return c - x - y + before


@triton.jit
def _differences(q, scratch, spot, right, down, BLOCK_W: tl.constexpr):
    """Return q minus q of the pixel to the right, and minus that below."""
    tl.store(scratch + spot, q)
    tl.debug_barrier()
    x = tl.where(right, q - tl.load(scratch + spot + 1, right, 0.0), 0.0)
    y = tl.where(down, q - tl.load(scratch + spot + BLOCK_W, down, 0.0), 0.0)
    return x, y


@triton.jit
def _clip(x, lo, hi):
    """Return x between lo and hi. NaN stays, as on the CPU."""
    low = tl.maximum(x, lo, propagate_nan=tl.PropagateNan.ALL)
    return tl.minimum(low, hi, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _cost(d, lo, hi):
    """Return what a difference costs. A capacity may be infinite."""
    return tl.where(d > 0, hi * d, tl.where(d < 0, lo * d, 0.0))


@triton.jit
def _values(q, c, dx, dy, lo_x, hi_x, lo_y, hi_y):
    """Return the value of the problem, pixel by pixel."""
    return tl.where(q == c, 0.0, (q - c) * (q - c) / 2) + _cost(dx, lo_x, hi_x) + _cost(dy, lo_y, hi_y)


@triton.jit
def _gaps(dx, dy, yx, yy, lo_x, hi_x, lo_y, hi_y):
    """Return the duality gap, pixel by pixel: zero or more."""
    return tl.maximum(_cost(dx, lo_x, hi_x) - yx * dx, 0.0) + tl.maximum(_cost(dy, lo_y, hi_y) - yy * dy, 0.0)


# ----------------------------------------------------------------------------------------------- one program, one image


@triton.jit
def _connect_image(label, at, inside, joined_x, joined_y, W):
    """Store in `label` the smallest pixel of each region."""
    tl.store(label + at, at, inside)
    tl.debug_barrier()
    changed = 1
    while changed > 0:
        here = tl.load(label + at, inside, 0)
        beside, below = tl.load(label + at + 1, joined_x, 0), tl.load(label + at + W, joined_y, 0)
        tl.debug_barrier()
        # Of the two labels the higher one points to the lower one.
        tl.atomic_min(label + tl.maximum(here, beside), tl.minimum(here, beside), joined_x & (here != beside))
        tl.atomic_min(label + tl.maximum(here, below), tl.minimum(here, below), joined_y & (here != below))
        tl.debug_barrier()
        new = tl.load(label + at, inside, 0)
        for _ in range(3):
            new = tl.load(label + new, inside, 0)
        tl.debug_barrier()
        tl.store(label + at, new, inside)
        changed = tl.sum(tl.where((joined_x & (here != beside)) | (joined_y & (here != below)), 1, 0))
        tl.debug_barrier()


@triton.jit
def _region_means(q, label, sums, at, inside, N):
    """Return the mean of q over the region of each pixel."""
    tl.store(sums + at, 0.0, inside)
    tl.store(sums + N + at, 0.0, inside)
    tl.debug_barrier()
    root = tl.load(label + at, inside, 0)
    tl.atomic_add(sums + root, q, inside)
    tl.atomic_add(sums + N + root, 1.0, inside)
    tl.debug_barrier()
    return tl.load(sums + root, inside, 0.0) / tl.load(sums + N + root, inside, 1.0)


@triton.jit
def _solve_image(
    w, y, q_out, label, sums, scratch, value_out, gap_out, iterations, tolerance, max_iterations, N, H, W,
    FIRST: tl.constexpr, RATIO: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    at, spot, inside, right, down, left, up = _pixels(0, 0, H, W, BLOCK_H, BLOCK_W)
    lo_x, hi_x, lo_y, hi_y, c = _problem(w + 6 * b * N, N, W, at, inside, right, down)
    label, sums, scratch = label + b * N, sums + 2 * b * N, scratch + 3 * b * BLOCK_H * BLOCK_W
    of_q = scratch + 2 * BLOCK_H * BLOCK_W
    yx = tl.zeros_like(c)
    yy, zx, zy = yx, yx, yx
    t, k, check, period, running = 1.0, 0, FIRST, FIRST, 1
    while running == 1:
        q = _vertices(c, zx, zy, scratch, spot, left, up, BLOCK_H, BLOCK_W)
        dx, dy = _differences(q, of_q, spot, right, down, BLOCK_W)
        new_x = _clip(zx + dx / 8, lo_x, hi_x)
        new_y = _clip(zy + dy / 8, lo_y, hi_y)
        change_x, change_y = new_x - yx, new_y - yy
        back = tl.sum((zx - new_x) * change_x + (zy - new_y) * change_y)
        t = tl.where(back > 0, 1.0, t)
        following = (1 + tl.sqrt(1 + 4 * t * t)) / 2
        beta = (t - 1) / following
        t, yx, yy = following, new_x, new_y
        zx, zy = new_x + beta * change_x, new_y + beta * change_y
        k += 1
        if (k == check) | (k == max_iterations):
            tl.debug_barrier()
            q = _vertices(c, yx, yy, scratch, spot, left, up, BLOCK_H, BLOCK_W)
            dx, dy = _differences(q, of_q, spot, right, down, BLOCK_W)
            value = tl.sum(_values(q, c, dx, dy, lo_x, hi_x, lo_y, hi_y).to(tl.float64))
            gap = tl.sum(_gaps(dx, dy, yx, yy, lo_x, hi_x, lo_y, hi_y).to(tl.float64))
            finite = value < float("inf")
            if (gap <= RATIO * tolerance * value) | (not finite) | (k == max_iterations):
                joined_x, joined_y = right & (lo_x < yx) & (yx < hi_x), down & (lo_y < yy) & (yy < hi_y)
                _connect_image(label, at, inside, joined_x, joined_y, W)
                mean = _region_means(q, label, sums, at, inside, N)
                dual = tl.where(finite, value - gap, tl.sum(((c - q) * (c + q) / 2).to(tl.float64)))
                dx, dy = _differences(mean, of_q, spot, right, down, BLOCK_W)
                averaged = tl.sum(_values(mean, c, dx, dy, lo_x, hi_x, lo_y, hi_y).to(tl.float64))
                better = averaged <= value
                q = tl.where(better, mean, q)
                value, gap = tl.where(better, averaged, value), tl.where(better, averaged - dual, gap)
            running = tl.where(((gap > tolerance * value) | (value == float("inf"))) & (k < max_iterations), 1, 0)
            check, period = k + period, period + period // 4
            if running == 0:
                tl.store(q_out + b * N + at, q, inside)
                tl.store(value_out + b, value)
                tl.store(gap_out + b, gap)
            tl.debug_barrier()
    tl.store(y + 2 * b * N + at, yx, inside)
    tl.store(y + (2 * b + 1) * N + at, yy, inside)
    tl.store(iterations + b, k)


def _solve_small(w: Tensor, tolerance: float, max_iterations: int) -> Dual:
    batch, _, H, W = w.shape
    N, blocks = H * W, {"BLOCK_H": triton.next_power_of_2(H), "BLOCK_W": triton.next_power_of_2(W)}
    size = blocks["BLOCK_H"] * blocks["BLOCK_W"]
    q, y, sums, scratch = (w.new_empty(batch, n) for n in (N, 2 * N, 2 * N, 3 * size))
    value, gap = torch.zeros(2, batch, dtype=torch.float64, device=w.device)
    iterations = torch.zeros(batch, dtype=torch.int64, device=w.device)
    label = torch.empty(batch, N, dtype=torch.int32, device=w.device)
    if batch:
        options = {"FIRST": FIRST_CHECK, "RATIO": MAX_RATIO, "num_warps": max(1, min(32, size // 256)), **blocks}
        limits = (tolerance, max_iterations, N, H, W)
        _solve_image[(batch,)](w, y, q, label, sums, scratch, value, gap, iterations, *limits, **options)
    return Dual(q, y, label, _relative(gap, value), iterations)


def _relative(gap: Tensor, value: Tensor) -> Tensor:
    return torch.where(value.isfinite(), torch.where(gap > 0, gap / value, 0.0), value).double()


# ---------------------------------------------------------------------------------------------------------------- tiles


@triton.jit
def _iterate_tiles(
    w, y, z, new_y, new_z, scratch, t_in, t_out, back_in, back_out, num_tiles, tiles_w, N, H, W,
    STEPS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Do `STEPS` iterations from y and z. `back` is above zero if the last one points back: then momentum restarts."""
    b = tl.program_id(1).to(tl.int64)
    scratch += (b * tl.num_programs(0) + tl.program_id(0)) * 3 * TILE * TILE
    first_t = tl.load(t_in + b)
    restart = tl.load(back_in + b) > 0
    first_t = tl.where(restart, 1.0, first_t)
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        row, column = tile // tiles_w * (TILE - 2 * STEPS) - STEPS, tile % tiles_w * (TILE - 2 * STEPS) - STEPS
        at, spot, inside, right, down, left, up = _pixels(row, column, H, W, TILE, TILE)
        lo_x, hi_x, lo_y, hi_y, c = _problem(w + 6 * b * N, N, W, at, inside, right, down)
        x_at, y_at = 2 * b * N + at, (2 * b + 1) * N + at
        yx, yy = tl.load(y + x_at, inside, 0.0), tl.load(y + y_at, inside, 0.0)
        zx = tl.where(restart, yx, tl.load(z + x_at, inside, 0.0))
        zy = tl.where(restart, yy, tl.load(z + y_at, inside, 0.0))
        t, back = first_t, tl.zeros_like(c)
        for _ in range(STEPS):
            q = _vertices(c, zx, zy, scratch, spot, left, up, TILE, TILE)
            dx, dy = _differences(q, scratch + 2 * TILE * TILE, spot, right, down, TILE)
            new_x = _clip(zx + dx / 8, lo_x, hi_x)
            change_x = new_x - yx
            following = (1 + tl.sqrt(1 + 4 * t * t)) / 2
            beta = (t - 1) / following
            back = (zx - new_x) * change_x
            zx, yx = new_x + beta * change_x, new_x
            new_x = _clip(zy + dy / 8, lo_y, hi_y)
            change_x = new_x - yy
            back += (zy - new_x) * change_x
            zy, yy, t = new_x + beta * change_x, new_x, following
        margin = (spot // TILE >= STEPS) & (spot // TILE < TILE - STEPS)
        inner = inside & margin & (spot % TILE >= STEPS) & (spot % TILE < TILE - STEPS)
        tl.store(new_y + x_at, yx, inner)
        tl.store(new_y + y_at, yy, inner)
        tl.store(new_z + x_at, zx, inner)
        tl.store(new_z + y_at, zy, inner)
        tl.atomic_add(back_out + b, tl.sum(tl.where(inner, back, 0.0)))
        if tile == 0:
            tl.store(t_out + b, t)
        tl.debug_barrier()


@triton.jit
def _evaluate_tiles(w, y, q_out, scratch, values, gaps, num_tiles, tiles_w, N, H, W, TILE: tl.constexpr):
    """Store q, and the value and the gap of every tile."""
    b = tl.program_id(1).to(tl.int64)
    scratch += (b * tl.num_programs(0) + tl.program_id(0)) * 3 * TILE * TILE
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        row, column = tile // tiles_w * (TILE - 2) - 1, tile % tiles_w * (TILE - 2) - 1
        at, spot, inside, right, down, left, up = _pixels(row, column, H, W, TILE, TILE)
        lo_x, hi_x, lo_y, hi_y, c = _problem(w + 6 * b * N, N, W, at, inside, right, down)
        yx = tl.load(y + 2 * b * N + at, inside, 0.0)
        yy = tl.load(y + (2 * b + 1) * N + at, inside, 0.0)
        q = _vertices(c, yx, yy, scratch, spot, left, up, TILE, TILE)
        dx, dy = _differences(q, scratch + 2 * TILE * TILE, spot, right, down, TILE)
        margin = (spot // TILE >= 1) & (spot // TILE < TILE - 1)
        inner = inside & margin & (spot % TILE >= 1) & (spot % TILE < TILE - 1)
        value = _values(q, c, dx, dy, lo_x, hi_x, lo_y, hi_y)
        gap = _gaps(dx, dy, yx, yy, lo_x, hi_x, lo_y, hi_y)
        tl.store(q_out + b * N + at, q, inner)
        tl.store(values + b * num_tiles + tile, tl.sum(tl.where(inner, value, 0.0)))
        tl.store(gaps + b * num_tiles + tile, tl.sum(tl.where(inner, gap, 0.0)))
        tl.debug_barrier()


@triton.jit
def _joined(w, y, N, H, W, BLOCK: tl.constexpr):
    """Return the pixels of a program, and whether they are in one region with the next to the right and below."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < N
    right, down = inside & (at % W < W - 1), inside & (at < N - W)
    lo_x, hi_x, lo_y, hi_y, _ = _problem(w, N, W, at, inside, right, down)
    yx, yy = tl.load(y + at, inside, 0.0), tl.load(y + N + at, inside, 0.0)
    return at, inside, right & (lo_x < yx) & (yx < hi_x), down & (lo_y < yy) & (yy < hi_y)


@triton.jit
def _hook(w, y, label, changed, N, H, W, BLOCK: tl.constexpr):
    """Point the higher of two labels in one region to the lower one."""
    b = tl.program_id(1).to(tl.int64)
    at, inside, joined_x, joined_y = _joined(w + 6 * b * N, y + 2 * b * N, N, H, W, BLOCK)
    label += b * N
    here = tl.load(label + at, inside, 0)
    beside, below = tl.load(label + at + 1, joined_x, 0), tl.load(label + at + W, joined_y, 0)
    joined_x, joined_y = joined_x & (here != beside), joined_y & (here != below)
    tl.atomic_min(label + tl.maximum(here, beside), tl.minimum(here, beside), joined_x)
    tl.atomic_min(label + tl.maximum(here, below), tl.minimum(here, below), joined_y)
    if tl.sum(tl.where(joined_x | joined_y, 1, 0)) > 0:
        tl.store(changed, 1)


@triton.jit
def _jump(label, N, JUMPS: tl.constexpr, BLOCK: tl.constexpr):
    """Replace each label by the label of its label, several times."""
    label += tl.program_id(1).to(tl.int64) * N
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    new = tl.load(label + at, at < N, 0)
    for _ in range(JUMPS):
        new = tl.load(label + new, at < N, 0)
    tl.store(label + at, new, at < N)


def _connect(w: Tensor, y: Tensor) -> Tensor:
    """Return the smallest pixel (B, N) of each region."""
    batch, _, H, W = w.shape
    N, grid = H * W, (triton.cdiv(H * W, BLOCK), batch)
    label = torch.arange(N, dtype=torch.int32, device=w.device).repeat(batch, 1)
    changed = torch.ones(1, dtype=torch.int32, device=w.device)
    while changed.item():
        changed.zero_()
        _hook[grid](w, y, label, changed, N, H, W, BLOCK=BLOCK)
        _jump[grid](label, N, JUMPS=6, BLOCK=BLOCK)
    return label


class _Tiles:
    """The tiles of images w (B, 6, H, W), and the calls of their kernels."""

    def __init__(self, w: Tensor) -> None:
        self.w, (self.batch, _, H, W) = w, w.shape
        self.sizes = (H * W, H, W)
        self.programs = max(1, min(triton.cdiv(PROGRAMS, self.batch), self._tiles(STEPS)[0]))
        self.scratch = w.new_empty(self.programs * self.batch, 3 * TILE * TILE)

    def _tiles(self, margin: int) -> tuple[int, int]:
        rows, columns = (triton.cdiv(n, TILE - 2 * margin) for n in self.sizes[1:])
        return rows * columns, columns

    def iterate(self, y: Tensor, z: Tensor, t: Tensor, back: Tensor, steps: int) -> tuple[Tensor, ...]:
        """Return y, z, t and back after `steps` iterations."""
        new_y, new_z, new_t, new_back = (torch.empty_like(x) for x in (y, z, t, back))
        states = (y, z, new_y, new_z, self.scratch, t, new_t, back, new_back.zero_())
        ends, options = (*self._tiles(steps), *self.sizes), {"STEPS": steps, "TILE": TILE, "num_warps": 16}
        _iterate_tiles[(self.programs, self.batch)](self.w, *states, *ends, **options)
        return new_y, new_z, new_t, new_back

    def evaluate(self, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, the value and the duality gap."""
        tiles, columns = self._tiles(1)
        q, (values, gaps) = self.w.new_empty(self.batch, self.sizes[0]), self.w.new_empty(2, self.batch, tiles)
        ends = (tiles, columns, *self.sizes)
        _evaluate_tiles[(self.programs, self.batch)](
            self.w, y, q, self.scratch, values, gaps, *ends, TILE=TILE, num_warps=16
        )
        return q, values.double().sum(1), gaps.double().sum(1)


def _solve_large(w: Tensor, tolerance: float, max_iterations: int, initial: Tensor | None) -> Dual:
    """Solve images tile by tile, all until the last one has converged."""
    tiles, batch, N = _Tiles(w), len(w), w.shape[2] * w.shape[3]
    y = w.new_zeros(batch, 2 * N) if initial is None else initial.contiguous()
    z, t, back = y, w.new_ones(batch), w.new_zeros(batch)
    k, check, period = 0, FIRST_CHECK, FIRST_CHECK
    while True:
        steps = min(STEPS, max_iterations - k)
        y, z, t, back = tiles.iterate(y, z, t, back, steps)
        k += steps
        if k < min(check, max_iterations):
            continue
        found = _evaluate_large(tiles, y, tolerance, k, k == max_iterations)
        if found is not None and (k == max_iterations or not bool((found.gap > tolerance).any())):
            return found
        check, period = k + period, period + period // 4


def _evaluate_large(tiles: _Tiles, y: Tensor, tolerance: float, k: int, last: bool) -> Dual | None:
    """Return the better of q and its means over regions, or None where the gap is still far above the tolerance."""
    q, value, gap = tiles.evaluate(y)
    near = (gap <= MAX_RATIO * tolerance * value) | ~value.isfinite()
    if not (last or bool(near.all())):
        return None
    regions = _connect(tiles.w, y)
    q, value, gap = take_means(*grid_problem(tiles.w), q, y, regions, value, gap)
    return Dual(q, y, regions, _relative(gap, value), torch.full_like(gap, k, dtype=torch.int64))


# -------------------------------------------------------------------------------------------------------------- choices


def solves(w: Tensor) -> bool:
    """Return whether the kernels solve these grids (B, channels, *shape).

    They add in no fixed order, so two equal calls may differ in the last digits: torch operations run instead where
    deterministic algorithms are asked for.
    """
    is_image = w.dtype == torch.float32 and w.ndim == 4
    return is_image and is_supported(w.device) and not torch.are_deterministic_algorithms_enabled()


def solve_grids(w: Tensor, tolerance: float, max_iterations: int, initial: Tensor | None = None) -> Dual:
    """Solve images w (B, 6, H, W). `initial` is as for `min_cut_solver.solve`."""
    w = w.contiguous()
    if len(w) > MAX_BATCH:
        parts = zip(w.split(MAX_BATCH), (w if initial is None else initial).split(MAX_BATCH), strict=True)
        found = [solve_grids(a, tolerance, max_iterations, None if initial is None else b) for a, b in parts]
        return Dual(*(torch.cat(part) for part in zip(*found, strict=True)))
    with device_of(w):
        return _solve(w, tolerance, max_iterations, initial)


def _solve(w: Tensor, tolerance: float, max_iterations: int, initial: Tensor | None) -> Dual:
    side = max(w.shape[2:])
    # Tiles wait for the host, which a CUDA graph cannot hold.
    is_one_program = len(w) < MANY or torch.cuda.is_current_stream_capturing()
    is_small = side <= MAX_FAST_SIDE or (side <= MAX_SIDE and is_one_program)
    if not len(w) or (initial is None and is_small):
        return _solve_small(w, tolerance, max_iterations)
    return _solve_large(w, tolerance, max_iterations, initial)
