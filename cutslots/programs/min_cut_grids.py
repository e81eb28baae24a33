"""Minimum cuts of grids: `solve_grids` selects the backend, `solve_pyramid` solves large images coarse to fine.

A step of the solver moves flow by one pixel, so a large image takes many. Here the image at half the size is solved
first, and its flow is where the iterations start. That changes how many they are, not the solution.

Let p be constant on blocks of 2x2 pixels. A block then has four times the mean of source - sink, and twice the mean
capacity on each side. Divided by four this is a problem of half the size. Its flow y is 2y on each edge between blocks.
Inside a block the flow is the mean of what enters and what leaves, so it has the divergence of the block everywhere.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cutslots.programs.min_cut_solver import Dual, GridEdges, grid_problem, solve, solve_grids_compiled

try:
    from cutslots.programs import min_cut_triton as kernels
except ImportError:  # Triton comes with torch's CUDA builds
    kernels = None  # type: ignore[assignment]

MIN_SIZE = 32  # of a side, in pixels: smaller images are solved directly


def solve_grids(w: Tensor, tolerance: float, max_iterations: int, initial: Tensor | None = None) -> Dual:
    """Solve grids w (B, channels, *shape): by kernels or compiled code where there are some.

    `initial` (B, pairs) is the flow to start from, within the capacities; zero by default.
    """
    if kernels is not None and kernels.solves(w):
        return kernels.solve_grids(w, tolerance, max_iterations, initial)
    found = solve_grids_compiled(w, tolerance, max_iterations, initial)
    if found is None:
        found = solve(*grid_problem(w), 1 / (4 * (w.ndim - 2)), tolerance, max_iterations, initial)
    return found


def solve_pyramid(w: Tensor, tolerance: float, max_iterations: int) -> Dual:
    """Solve images w (B, 6, H, W), with the channels of `MinCut` at gamma = 1, coarse to fine.

    Every level stops at `tolerance` or after `max_iterations`. The gap and the iterations are those of the last level.
    """
    initial = _coarse_flow(w, tolerance, max_iterations) if min(w.shape[2:]) > MIN_SIZE else None
    return solve_grids(w, tolerance, max_iterations, initial)


def _coarse_flow(w: Tensor, tolerance: float, max_iterations: int) -> Tensor:
    """Return the flow (B, 2 H W) of the coarse problem, within the capacities of w."""
    flow = refine_flow(solve_pyramid(coarsen(w), tolerance, max_iterations).y, w)
    lo, hi = GridEdges((w.shape[2], w.shape[3]), w.device).bounds(w)
    return torch.minimum(torch.maximum(flow, lo), hi)


def coarsen(w: Tensor) -> Tensor:
    """Return the problem of half the size, (B, 6, ceil(H / 2), ceil(W / 2))."""
    w = nn.functional.pad(w, (0, w.shape[3] % 2, 0, w.shape[2] % 2))  # pixels without capacities
    right, left, down, up = w[:, 0, :, 1::2], w[:, 1, :, ::2], w[:, 2, 1::2], w[:, 3, ::2]
    sides = [(x[:, ::2] + x[:, 1::2]) / 4 for x in (right, left)]
    sides += [(x[:, :, ::2] + x[:, :, 1::2]) / 4 for x in (down, up)]
    return torch.cat([torch.stack(sides, 1), nn.functional.avg_pool2d(w[:, 4:], 2)], 1)


def refine_flow(y: Tensor, w: Tensor) -> Tensor:
    """Return the flow (B, 2 H W) for the problem w (B, 6, H, W) from that of the coarse one."""
    height, width = w.shape[2:]
    right, down = y.view(len(w), 2, (height + 1) // 2, (width + 1) // 2).unbind(1)
    right = _interleave(right, 2).repeat_interleave(2, 1)
    down = _interleave(down, 1).repeat_interleave(2, 2)
    return torch.stack([right[:, :height, :width], down[:, :height, :width]], 1).flatten(1)


def _interleave(y: Tensor, axis: int) -> Tensor:
    """Return the flow along one axis at twice the resolution: inside a block, then to the next block."""
    zero = torch.zeros_like(y.narrow(axis, 0, 1))
    before = torch.cat([zero, y.narrow(axis, 0, y.shape[axis] - 1)], axis)
    return torch.stack([before + y, 2 * y], axis + 1).flatten(axis, axis + 1)
