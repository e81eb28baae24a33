"""The iterations of `MinCut` and `GraphMinCut`: accelerated projected gradient on the dual.

The problem is min_q 1/2 |q - c|^2 + sum over edges u -> v of a_uv max(0, q_u - q_v). Every pair of neighbours u, v has
one dual variable y between lo = -a_vu and hi = a_uv, and q = c - B'y. A step is y = clip(z + step (q_u - q_v)), with
Nesterov's momentum in z and adaptive restart (O'Donoghue and Candes 2015): none where it opposes the gradient step.

The duality gap is a sum over edges, cost - y (q_u - q_v), each of which is at least zero. Edges with lo < y < hi
connect vertices to regions, on which the solution is constant. The means of q over regions are exact as soon as the
regions are right, which happens long before q has converged: the solver stops by the gap of either and returns the
better one.

Here are the iterations in torch operations, for any device. On the CPU compiled code (`min_cut.c`) does the same, on
CUDA the kernels of `min_cut_triton` do.
"""

from __future__ import annotations

import ctypes
import math
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from cutslots.programs import native
from cutslots.programs.graph import Shape, grid_axes

SOURCE = Path(__file__).with_name("min_cut.c")
MIN_VERTICES = 16_384  # a thread takes longer to start than to solve fewer
MIN_PART = 65_536  # vertices of each thread where several solve a grid together; they meet twice in an iteration
MAX_RATIO = 32  # of the gap to the tolerance, up to which the means over regions are tried
FIRST_CHECK = 10  # iterations before the first check of the gap; the period grows by a quarter each time


class Dual(NamedTuple):
    """A solution for each of B problems."""

    q: Tensor  # (B, N)
    y: Tensor  # (B, M)
    regions: Tensor  # (B, N), int32: a vertex of each region
    gap: Tensor  # (B,), float64, relative to the value
    iterations: Tensor  # (B,), int64


class Edges(Protocol):
    """The maps between N vertices and M pairs of neighbours u, v."""

    @property
    def ends(self) -> tuple[Tensor, Tensor]:
        """Return u and v (M,)."""

    def differences(self, q: Tensor) -> Tensor:
        """Return q_u - q_v (B, M) for q (B, N)."""

    def divergence(self, y: Tensor) -> Tensor:
        """Return B'y (B, N) for y (B, M): the adjoint of `differences`."""


class GraphEdges:
    """Pairs of neighbours in a list."""

    def __init__(self, u: Tensor, v: Tensor, num_vertices: int) -> None:
        self.ends, self.num_vertices = (u, v), num_vertices

    def differences(self, q: Tensor) -> Tensor:
        return q[:, self.ends[0]] - q[:, self.ends[1]]

    def divergence(self, y: Tensor) -> Tensor:
        out = y.new_zeros(len(y), self.num_vertices)
        return out.index_add_(1, self.ends[0], y).index_add_(1, self.ends[1], -y)


class GridEdges:
    """The neighbours in a grid: for each axis, in the order of the channels, one variable at every vertex.

    The last vertices of an axis have no neighbour there. Their variable is zero, because lo and hi are.
    """

    def __init__(self, shape: Shape, device: torch.device) -> None:
        self.shape, self.axes = shape, grid_axes(shape)
        vertices = torch.arange(math.prod(shape), device=device).view(shape)
        above = [torch.cat([vertices.narrow(a, 1, n), vertices.narrow(a, n, 1)], a) for a, n in self._last()]
        self.ends = (vertices.flatten().repeat(len(shape)), torch.stack(above).flatten())

    def _last(self) -> list[tuple[int, int]]:
        return [(axis, self.shape[axis] - 1) for axis in self.axes]

    def differences(self, q: Tensor) -> Tensor:
        q = q.view(-1, *self.shape)
        out = q.new_zeros(len(q), len(self.shape), *self.shape)
        for i, (axis, n) in enumerate(self._last()):
            torch.sub(q.narrow(axis, 0, n), q.narrow(axis, 1, n), out=out[:, i].narrow(axis, 0, n))
        return out.flatten(1)

    def divergence(self, y: Tensor) -> Tensor:
        y = y.view(-1, len(self.shape), *self.shape)
        out = y.sum(1)
        for i, (axis, n) in enumerate(self._last()):
            out.narrow(axis, 1, n).sub_(y[:, i].narrow(axis, 0, n))
        return out.flatten(1)

    def bounds(self, w: Tensor) -> tuple[Tensor, Tensor]:
        """Return lo and hi (B, M) for capacities w (B, channels, *shape)."""
        lo, hi = w.new_zeros(2, len(w), len(self.shape), *self.shape)
        for i, (axis, n) in enumerate(self._last()):
            hi[:, i].narrow(axis, 0, n).copy_(w[:, 2 * i].narrow(axis, 0, n))
            lo[:, i].narrow(axis, 0, n).copy_(w[:, 2 * i + 1].narrow(axis, 1, n)).neg_()
        return lo.flatten(1), hi.flatten(1)


def solve(
    edges: Edges,
    lo: Tensor,
    hi: Tensor,
    c: Tensor,
    step: Tensor | float,
    tolerance: float,
    max_iterations: int,
    initial: Tensor | None = None,
) -> Dual:
    """Solve B problems at once: lo and hi (B, M), c (B, N). All run until the last one has converged.

    `initial` (B, M) is the y to start from, between lo and hi; zero by default.
    """
    y = torch.zeros_like(hi) if initial is None else initial
    z, t, check, period = y, torch.ones(len(c), 1, dtype=c.dtype, device=c.device), FIRST_CHECK, FIRST_CHECK
    found: Dual | None = None
    for k in range(max_iterations + 1):
        if k in (check, max_iterations):
            found = _keep_converged(found, evaluate(edges, lo, hi, c, y, k, tolerance, k == max_iterations), tolerance)
            if bool(_is_done(found.gap, tolerance).all()):
                break
            check, period = k + period, period + period // 4
        new = torch.minimum(torch.maximum(z + step * edges.differences(c - edges.divergence(z)), lo), hi)
        change = new - y
        back = ((z - new) * change / step).sum(1, keepdim=True) > 0
        t = torch.where(back, 1.0, t)
        following = (1 + (1 + 4 * t * t).sqrt()) / 2
        z, y, t = torch.where(back, new, new + (t - 1) / following * change), new, following
    assert found is not None
    return found


def _is_done(gap: Tensor, tolerance: float) -> Tensor:
    return (gap <= tolerance) | gap.isnan()


def _keep_converged(old: Dual | None, new: Dual, tolerance: float) -> Dual:
    """Return the new state of problems that had not converged: like one at a time, each stops where it may."""
    if old is None:
        return new
    keep = _is_done(old.gap, tolerance)
    return Dual(*(torch.where(keep.view(-1, *[1] * (a.ndim - 1)), a, b) for a, b in zip(old, new, strict=True)))


def evaluate(
    edges: Edges, lo: Tensor, hi: Tensor, c: Tensor, y: Tensor, iterations: int, tolerance: float, last: bool
) -> Dual:
    """Return the better of q and its means over regions, with its gap.

    Means are costly. They are tried where the gap of q is near the tolerance, and at the last iteration.
    """
    q = c - edges.divergence(y)
    value, gap = _value(edges, lo, hi, c, q, y)
    near = (gap <= MAX_RATIO * tolerance * value) | ~value.isfinite() | last
    regions = torch.zeros_like(q, dtype=torch.int32)
    if bool(near.any()):
        regions = connect(*edges.ends, (lo < y) & (y < hi), q.shape[1]).int()
        means = take_means(edges, lo, hi, c, q, y, regions, value, gap)
        q = torch.where(near[:, None], means[0], q)
        value, gap = (torch.where(near, a, b) for a, b in zip(means[1:], (value, gap), strict=True))
    relative = torch.where(value.isfinite(), torch.where(gap > 0, gap / value, 0.0), value)
    return Dual(q, y, regions, relative, torch.full_like(relative, iterations, dtype=torch.int64))


def take_means(
    edges: Edges, lo: Tensor, hi: Tensor, c: Tensor, q: Tensor, y: Tensor, regions: Tensor, value: Tensor, gap: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return q or its means over regions, whichever has the lower value, with its value and gap."""
    mean = region_means(q, regions)
    averaged, _ = _value(edges, lo, hi, c, mean, y)
    dual = torch.where(value.isfinite(), value - gap, ((c - q).double() * (c + q).double()).sum(1) / 2)
    better = averaged <= value
    q = torch.where(better[:, None], mean, q)
    return q, torch.where(better, averaged, value), torch.where(better, averaged - dual, gap)


def _value(edges: Edges, lo: Tensor, hi: Tensor, c: Tensor, q: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return the value of the problem at q, and the duality gap between q and y if q = c - B'y."""
    d = edges.differences(q)
    cost = _costs(d, lo, hi)
    value = (q.double() - c.double()).square().sum(1) / 2 + cost.sum(1, dtype=torch.float64)
    return value, (cost - y * d).sum(1, dtype=torch.float64)


def _costs(d: Tensor, lo: Tensor, hi: Tensor) -> Tensor:
    """Return what each difference costs. A capacity may be infinite."""
    return torch.where(d > 0, hi * d, torch.where(d < 0, lo * d, 0))


def best_level_set(edges: Edges, lo: Tensor, hi: Tensor, c: Tensor, dual: Dual) -> Tensor:
    """Return the best cut (B, N), bool, among the level sets of q near zero: {q > 0} if q is exact.

    The gap bounds the error of q. Vertices of q = 0 may be on either side, but not each as rounding errors have it.
    """
    value, _ = _value(edges, lo, hi, c, dual.q, dual.y)
    noise = 16 * torch.finfo(c.dtype).eps * (c.abs().amax(1) + dual.y.abs().sum(1) / dual.y.shape[1])
    error = torch.maximum((2 * dual.gap * value).sqrt(), noise.double()).nan_to_num()
    best, cost = dual.q > 0, torch.full_like(value, torch.inf)
    for factor in (0.0, *(sign * 2.0**-i for i in range(8) for sign in (1, -1))):
        side = dual.q > (factor * error).to(c.dtype)[:, None]
        variation = _costs(edges.differences(side.to(c.dtype)), lo, hi).sum(1, dtype=torch.float64)
        new = variation - torch.where(side, c, 0).sum(1, dtype=torch.float64)
        best, cost = torch.where((new < cost)[:, None], side, best), torch.minimum(new, cost)
    return best


def connect(u: Tensor, v: Tensor, joined: Tensor, num_vertices: int) -> Tensor:
    """Return the smallest vertex (B, N) of each region: sets of vertices that the edges of `joined` (B, M) connect."""
    label = torch.arange(num_vertices, device=joined.device).expand(len(joined), -1).contiguous()
    u, v = u.expand_as(joined), v.expand_as(joined)
    while True:
        lower = torch.minimum(label.gather(1, u), label.gather(1, v))
        lower = torch.where(joined, lower, num_vertices)
        new = label
        for end in (u, v):  # of the two labels the higher one points to the lower one
            new = new.scatter_reduce(1, label.gather(1, end), lower, "amin")
        new = new.gather(1, new).gather(1, new.gather(1, new))
        if torch.equal(new, label):
            return label
        label = new


def region_means(x: Tensor, regions: Tensor) -> Tensor:
    """Return the mean of x (B, N) over the region of each vertex."""
    index = regions.long()
    zeros = torch.zeros_like(x, dtype=torch.float64)
    sums, counts = zeros.scatter_add(1, index, x.double()), zeros.scatter_add(1, index, torch.ones_like(zeros))
    return (sums / counts.clamp_min(1)).gather(1, index).to(x.dtype)


def grid_problem(w: Tensor) -> tuple[GridEdges, Tensor, Tensor, Tensor]:
    """Return the edges, lo, hi and c of grids w (B, channels, *shape)."""
    edges = GridEdges(tuple(w.shape[2:]), w.device)
    return edges, *edges.bounds(w), (w[:, -2] - w[:, -1]).flatten(1)


# ---------------------------------------------------------------------------------------------------------- compiled


def solve_grids_compiled(
    w: Tensor, tolerance: float, max_iterations: int, initial: Tensor | None = None
) -> Dual | None:
    """Solve grids w (B, channels, *shape) on the CPU by compiled code; None if there is none. See `solve`."""
    library = native.load(SOURCE, w.dtype) if w.device.type == "cpu" else None
    if library is None:
        return None
    w, batch, shape = w.contiguous(), len(w), w.shape[2:]
    frames, (height, width) = shape[0] if len(shape) == 3 else 0, shape[-2:]
    size = (batch, len(shape) * math.prod(shape))
    y = w.new_zeros(size) if initial is None else initial.reshape(size).clone()  # the C code writes to it
    team = _team(batch, math.prod(shape))
    sizes = [ctypes.c_int64(n) for n in (batch, frames, height, width, team)]
    tasks = 1 if team > 1 else _tasks(batch, math.prod(shape))
    return _call(library.solve_grids, [_pointer(w), *sizes], y, math.prod(shape), tolerance, max_iterations, tasks)


def solve_graphs_compiled(
    edges: GraphEdges, lo: Tensor, hi: Tensor, c: Tensor, step: Tensor, tolerance: float, max_iterations: int
) -> Dual | None:
    """Solve graphs on the CPU by compiled code; None if there is none."""
    library = native.load(SOURCE, c.dtype) if c.device.type == "cpu" else None
    if library is None:
        return None
    u, v = (end.int() for end in edges.ends)
    lo, hi, c, step = (x.contiguous() for x in (lo, hi, c, step))
    sizes = [ctypes.c_int64(n) for n in (hi.shape[1], c.shape[1], len(c))]
    arguments = [_pointer(u), _pointer(v), *sizes, *map(_pointer, (hi, lo, c, step))]
    y, tasks = torch.zeros_like(hi), _tasks(*c.shape)
    return _call(library.solve_graphs, arguments, y, c.shape[1], tolerance, max_iterations, tasks)


def _team(batch: int, num_vertices: int) -> int:
    """Return the number of threads that solve a grid together: one if all have grids of their own to solve."""
    threads = torch.get_num_threads()
    team = max(1, min(threads, num_vertices // MIN_PART))
    return team if batch / team < -(-batch // threads) else 1


def _tasks(batch: int, num_vertices: int) -> int:
    """Return the number of threads that are worth starting for problems of one thread each."""
    return min(batch, 1 + batch * num_vertices // MIN_VERTICES)


def _call(
    function: Any, arguments: list[Any], y: Tensor, num_vertices: int, tolerance: float, max_iterations: int, tasks: int
) -> Dual:
    batch = len(y)
    q, regions = y.new_empty(batch, num_vertices), y.new_empty(batch, num_vertices, dtype=torch.int32)
    results, following = torch.empty(batch, 3, dtype=torch.float64), ctypes.c_int64(0)  # gap, value, iterations (int64)
    limits = [ctypes.c_double(tolerance), ctypes.c_int64(max_iterations)]
    outputs = [*map(_pointer, (y, q, regions, results)), ctypes.byref(following)]
    native.in_threads(lambda: function(*arguments, *limits, *outputs), tasks)
    return Dual(q, y, regions, results[:, 0].clone(), results.view(torch.int64)[:, 2].clone())


def _pointer(x: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(x.data_ptr())
