"""The minimum cut itself as a differentiable layer: `MinCut` on images and clips, `GraphMinCut` on any graph.

The paper drops the inequalities of the minimum cut and regularises edges and vertices. What is left is a linear filter,
in which equal capacities in both directions cancel (`GridCut`). Here the inequalities stay, and the vertices alone are
regularised. With capacities a_uv >= 0 on directed edges and f = (source - sink) / gamma:

    p = argmin  gamma/2 |p - f|^2 + sum over u -> v of a_uv max(0, p_u - p_v)

The problem is strongly convex: p is unique and continuous in all weights. For every theta the set {p > theta} is a
minimum cut of the graph with source - sink shifted by -gamma theta (Chambolle 2005; Hochbaum 2001). So {p > 0} is the
minimum cut, and one solution holds a nested family of cuts. gamma sets the scale of p and no cut.

p is constant on regions (see `min_cut_solver`), so its derivative by f is the mean over a region. Between regions with
p_u > p_v the edge u -> v is cut, and its capacity moves both: with m the gradient of p averaged over regions,
dL/df = m and dL/da_uv = -(m_u - m_v) / gamma. Forward mode is the adjoint of that. Where regions touch without a
difference (a tie) p has a kink, and this is one of its subgradients.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd import forward_ad

from cutslots.programs.graph import Graph, check_shape, grid_axes
from cutslots.programs.min_cut_grids import solve_grids
from cutslots.programs.min_cut_solver import (
    Dual,
    Edges,
    GraphEdges,
    best_level_set,
    grid_problem,
    region_means,
    solve,
    solve_graphs_compiled,
)
from cutslots.programs.qp import SolverLayer, check_positive, needs_no_derivative

MAX_ITERATIONS = 10**6
Outputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]  # of an operator: q, y, regions, gap, iterations
Problem = Callable[[], tuple[Edges, Tensor, Tensor, Tensor]]  # makes the edges, lo, hi and c


class MinCutSolution(NamedTuple):
    p: Tensor  # (..., *shape) or (..., N)
    cut: Tensor  # like p, bool: the side of the source; p > 0 beyond the error of p
    flow: Tensor  # (..., axes, *shape) or (..., pairs): the dual variables, what flows between neighbours
    gap: Tensor  # (...), float64: the duality gap relative to the value
    iterations: Tensor  # (...), int64


class _MinCutLayer(SolverLayer):
    """What both layers share: their options, and the check of the gap."""

    def __init__(self, gamma: float, tolerance: float, max_iterations: int, validate: bool, warn: bool) -> None:
        super().__init__()
        self.gamma = check_positive("gamma", gamma)
        if not 0 < tolerance < 1:
            raise ValueError(f"tolerance is {tolerance}; expected a number between 0 and 1")
        if not 1 <= max_iterations <= MAX_ITERATIONS:
            raise ValueError(f"max_iterations is {max_iterations}; expected an integer from 1 to {MAX_ITERATIONS:,}")
        self.tolerance, self.max_iterations = float(tolerance), int(max_iterations)
        self.validate, self.warn = bool(validate), bool(warn)

    def forward(self, w: Tensor) -> Tensor:
        """Return p (..., *vertices) for the weights w."""
        batch, _, (q, *_) = self._run(w)
        return q.view(*batch, *q.shape[1:]) / self.gamma

    def solve(self, w: Tensor) -> MinCutSolution:
        """Return p with the cut, the flow, the duality gap and the number of iterations. Only p has a gradient."""
        batch, problem, outputs = self._run(w)
        q, y, _, gap, iterations = outputs
        with torch.no_grad():
            cut = best_level_set(*problem(), Dual(q.flatten(1), *outputs[1:]))
        p, cut = (x.view(*batch, *q.shape[1:]) for x in (q / self.gamma, cut))
        flow = y.detach().view(*batch, *self._flow_shape())
        return MinCutSolution(p, cut, flow, gap.detach().view(batch), iterations.view(batch))

    def _run(self, w: Tensor) -> tuple[torch.Size, Problem, Outputs]:
        """Return the batch dimensions of w, the problem and what the operator returns, for one batch dimension."""
        raise NotImplementedError

    def _flow_shape(self) -> tuple[int, ...]:
        raise NotImplementedError

    def _check_capacities(self, a: Tensor) -> None:
        if self.validate and not bool((a >= 0).all()):
            raise ValueError(f"w has the capacity {a.min().item():g}; expected capacities of at least 0")

    def extra_repr(self) -> str:
        return f"gamma={self.gamma}, tolerance={self.tolerance:g}, max_iterations={self.max_iterations}"


class MinCut(_MinCutLayer):
    """Solve the minimum cut of an image or a clip, with gradients for every capacity.

    `shape` is (H, W) or (T, H, W). The channels of w (..., channels, *shape) are those of `GridCut`. Capacities of
    edges that leave the grid are ignored. Capacities are directed and at least 0: `validate=True` checks that,
    otherwise the result for negative ones is undefined. Iterations stop when the duality gap is below `tolerance`
    times the value, or after `max_iterations` with a warning, which `warn=False` leaves out.

    >>> cut = MinCut((32, 32))
    >>> w = torch.rand(8, 6, 32, 32, requires_grad=True)  # right, left, down, up, source, sink
    >>> p = cut(w)
    >>> p.sum().backward()
    >>> cut.solve(w).cut.shape
    torch.Size([8, 32, 32])
    """

    def __init__(
        self,
        shape: Sequence[int],
        gamma: float = 1.0,
        tolerance: float = 1e-4,
        max_iterations: int = 2_000,
        validate: bool = False,
        warn: bool = True,
    ) -> None:
        super().__init__(gamma, tolerance, max_iterations, validate, warn)
        self.shape = check_shape(shape)
        self.channels = 2 * len(self.shape) + 2

    def precompute(self) -> None:
        """Nothing: capacities differ from call to call."""

    def _run(self, w: Tensor) -> tuple[torch.Size, Problem, Outputs]:
        w = self._check(w)
        batch = w.shape[: w.ndim - len(self.shape) - 1]
        w = w.reshape(-1, *w.shape[len(batch) :])
        return batch, lambda: grid_problem(w), _solve_grid(w, self.tolerance, self.max_iterations, self.warn)

    def _flow_shape(self) -> tuple[int, ...]:
        return (len(self.shape), *self.shape)

    def _check(self, w: Tensor) -> Tensor:
        w, expected = self.cast("w", w), (self.channels, *self.shape)
        if w.shape[-len(expected) :] != expected:
            listed = ", ".join(map(str, expected))
            raise ValueError(f"w has shape {tuple(w.shape)}; a MinCut of {self.shape} expects (..., {listed})")
        self._check_capacities(w.narrow(-len(expected), 0, self.channels - 2))
        return w

    def extra_repr(self) -> str:
        return f"{self.shape}, {super().extra_repr()}"


class GraphMinCut(_MinCutLayer):
    """Solve the minimum cut of any graph, with gradients for every capacity.

    `edges` (E, 2) are directed edges u -> v between vertices 0 .. num_vertices - 1. Weights w (..., E + 2 num_vertices)
    are the capacities of the edges, then those from the source and those to the sink. See `MinCut` for the rest.

    >>> cut = GraphMinCut([[0, 1], [1, 2]], num_vertices=3, gamma=1.0)
    >>> w = torch.tensor([2.0, 1.0, 3.0, 0.0, 0.0, 0.0, 0.0, 4.0])  # 0 -> 1, 1 -> 2, source to each, each to the sink
    >>> cut(w)
    tensor([ 1.,  1., -3.])
    """

    def __init__(
        self,
        edges: Any,
        num_vertices: int,
        gamma: float = 1.0,
        tolerance: float = 1e-4,
        max_iterations: int = 2_000,
        validate: bool = False,
        warn: bool = True,
    ) -> None:
        super().__init__(gamma, tolerance, max_iterations, validate, warn)
        edges = np.asarray(edges.detach().cpu() if isinstance(edges, Tensor) else edges)
        self.graph, self.num_vertices = Graph.with_terminals(edges, num_vertices), num_vertices
        self._edges = self.graph.edges[: -2 * num_vertices]
        self.precompute()

    def precompute(self) -> None:
        """Join the edges between two vertices to one pair u < v, with a capacity for each direction."""
        if self.device.type == "meta":
            return
        ends, pair = np.unique(np.sort(self._edges, 1), axis=0, return_inverse=True)
        forward = self._edges[:, 0] < self._edges[:, 1]
        degree = np.bincount(ends.flatten(), minlength=self.num_vertices)
        index = pair.reshape(-1) + len(ends) * ~forward
        self._home = self.device
        self._edge_index = torch.as_tensor(index, device=self.device)
        u, v = torch.as_tensor(ends.T.copy(), device=self.device)
        self._pairs = GraphEdges(u, v, self.num_vertices)
        # Twice the Laplacian's bound, edge by edge: B B' is at most the sum of the degrees of both ends.
        self._step = torch.as_tensor(1 / degree[ends].sum(1), dtype=self.dtype, device=self.device)

    @property
    def pairs(self) -> Tensor:
        """Return the pairs of neighbours u < v (pairs, 2), in the order of the flow."""
        return torch.stack(self._pairs.ends, 1)

    def _run(self, w: Tensor) -> tuple[torch.Size, Problem, Outputs]:
        w = self._check(w)
        batch, M = w.shape[:-1], len(self._step)
        a, source, sink = w.reshape(-1, w.shape[-1]).split([len(self._edges), *[self.num_vertices] * 2], 1)
        both = a.new_zeros(a.shape[0], 2 * M).index_add(1, self._edge_index, a)  # u -> v of all pairs, then v -> u
        forward, backward, c = both[:, :M], both[:, M:], source - sink
        ends, options = self._pairs.ends, (self.tolerance, self.max_iterations, self.warn)
        outputs = _solve_graph(forward, backward, c, *ends, self._step, *options)
        return batch, lambda: (self._pairs, -backward, forward, c), outputs

    def _flow_shape(self) -> tuple[int, ...]:
        return (len(self._step),)

    def _check(self, w: Tensor) -> Tensor:
        w, expected = self.cast("w", w), len(self._edges) + 2 * self.num_vertices
        if w.ndim == 0 or w.shape[-1] != expected:
            raise ValueError(
                f"w has shape {tuple(w.shape)}; a GraphMinCut of {len(self._edges)} edges and {self.num_vertices} "
                f"vertices expects (..., {expected})"
            )
        self._check_capacities(w[..., : len(self._edges)])
        return w

    def extra_repr(self) -> str:
        return f"{len(self._edges)} edges, {self.num_vertices} vertices, {super().extra_repr()}"


# -------------------------------------------------------------------------------------------------------------- ops
# Custom operators, so that torch.compile, torch.export and vmap do not look inside.


def _min_cut_grid(w: Tensor, tolerance: float, max_iterations: int, warn: bool) -> Outputs:
    """Return q (B, *shape) and the rest of a `Dual` for w (B, channels, *shape), at gamma = 1."""
    return _outputs(solve_grids(w, tolerance, max_iterations), tuple(w.shape[2:]), tolerance, warn)


def _min_cut_graph(
    forward: Tensor,
    backward: Tensor,
    c: Tensor,
    u: Tensor,
    v: Tensor,
    step: Tensor,
    tolerance: float,
    max_iterations: int,
    warn: bool,
) -> Outputs:
    """Return q (B, N) and the rest of a `Dual` for capacities of pairs (B, M) and c (B, N), at gamma = 1."""
    edges = GraphEdges(u, v, c.shape[1])
    found = solve_graphs_compiled(edges, -backward, forward, c, step, tolerance, max_iterations)
    if found is None:
        found = solve(edges, -backward, forward, c, step, tolerance, max_iterations)
    return _outputs(found, (c.shape[1],), tolerance, warn)


def _outputs(found: Dual, shape: tuple[int, ...], tolerance: float, warn: bool) -> Outputs:
    """Return the tensors, with a warning for a gap above the tolerance; on a GPU that would have to wait for it."""
    batch = len(found.q)
    if warn and batch and found.gap.device.type == "cpu" and not float(found.gap.max()) <= tolerance:
        warnings.warn(
            f"a minimum cut has a relative duality gap of {float(found.gap.max()):.1e} after "
            f"{int(found.iterations.max()):,} iterations; expected at most {tolerance:g} (tolerance): "
            "raise max_iterations",
            stacklevel=2,
        )
    return found.q.view(batch, *shape), found.y, found.regions.view(batch, *shape), found.gap, found.iterations


min_cut_grid = torch.library.custom_op("cutslots::min_cut_grid", _min_cut_grid, mutates_args=())
min_cut_graph = torch.library.custom_op("cutslots::min_cut_graph", _min_cut_graph, mutates_args=())


@min_cut_grid.register_fake
def _(w: Tensor, tolerance: float, max_iterations: int, warn: bool) -> Outputs:
    batch, shape = w.shape[0], w.shape[2:]
    return _empty(w, batch, tuple(shape), len(shape) * math.prod(shape))


@min_cut_graph.register_fake
def _(forward: Tensor, backward: Tensor, c: Tensor, *_: Any) -> Outputs:
    return _empty(c, c.shape[0], (c.shape[1],), forward.shape[1])


def _empty(x: Tensor, batch: int, shape: tuple[int, ...], pairs: int) -> Outputs:
    return (
        x.new_empty(batch, *shape),
        x.new_empty(batch, pairs),
        x.new_empty(batch, *shape, dtype=torch.int32),
        x.new_empty(batch, dtype=torch.float64),
        x.new_empty(batch, dtype=torch.int64),
    )


def _save_solution(ctx: Any, inputs: Any, output: Outputs) -> None:
    saved = (output[0], output[2], *([inputs[3], inputs[4]] if len(inputs) > 4 else []))
    ctx.save_for_backward(*saved)
    if hasattr(ctx, "mark_non_differentiable"):  # a function's; an operator has neither
        ctx.mark_non_differentiable(*output[1:])
        if forward_ad._current_level >= 0:  # otherwise a cycle of references that only the collector frees
            ctx.save_for_forward(*saved)


def _grid_backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor, None, None, None]:
    q, regions = ctx.saved_tensors
    m = _region_means(grad, regions)
    channels = []
    for axis, n in ((axis, q.shape[axis] - 1) for axis in grid_axes(tuple(q.shape[1:]))):
        moved = m.narrow(axis, 1, n) - m.narrow(axis, 0, n)
        falls = q.narrow(axis, 0, n) - q.narrow(axis, 1, n)
        end = torch.zeros_like(m.narrow(axis, 0, 1))
        channels += [
            torch.cat([torch.where(falls > 0, moved, 0), end], axis),
            torch.cat([end, torch.where(falls < 0, -moved, 0)], axis),
        ]
    return torch.stack([*channels, m, -m], 1), None, None, None


def _grid_jvp(ctx: Any, tangent: Tensor, *_: None) -> tuple[Tensor, None, None, None, None]:
    """The adjoint of `_grid_backward`: what the capacities of cut edges and the unaries add to each region."""
    q, regions = ctx.saved_tensors
    *neighbours, source, sink = tangent.unbind(1)
    change = source - sink
    axes = grid_axes(tuple(q.shape[1:]))
    for axis, forward, backward in zip(axes, neighbours[::2], neighbours[1::2], strict=True):
        n = q.shape[axis] - 1
        falls = q.narrow(axis, 0, n) - q.narrow(axis, 1, n)
        flow = torch.where(falls > 0, forward.narrow(axis, 0, n), 0)
        flow = flow - torch.where(falls < 0, backward.narrow(axis, 1, n), 0)
        end = torch.zeros_like(q.narrow(axis, 0, 1))
        change = change - torch.cat([flow, end], axis) + torch.cat([end, flow], axis)
    return _region_means(change, regions), None, None, None, None


def _graph_backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    q, regions, u, v = ctx.saved_tensors
    m = _region_means(grad, regions)
    moved, falls = m[:, v] - m[:, u], q[:, u] - q[:, v]
    return torch.where(falls > 0, moved, 0), torch.where(falls < 0, -moved, 0), m, *[None] * 6


def _graph_jvp(
    ctx: Any, forward: Tensor, backward: Tensor, c: Tensor, *_: None
) -> tuple[Tensor, None, None, None, None]:
    q, regions, u, v = ctx.saved_tensors
    falls = q[:, u] - q[:, v]
    flow = torch.where(falls > 0, forward, 0) - torch.where(falls < 0, backward, 0)
    change = c.index_add(1, u, -flow).index_add(1, v, flow)
    return _region_means(change, regions), None, None, None, None


def _region_means(x: Tensor, regions: Tensor) -> Tensor:
    flat = (x.shape[0], math.prod(x.shape[1:]))
    return region_means(x.reshape(flat), regions.reshape(flat)).reshape(x.shape)


min_cut_grid.register_autograd(_grid_backward, setup_context=_save_solution)
min_cut_graph.register_autograd(_graph_backward, setup_context=_save_solution)


def _differentiable(
    operator: Callable[..., Outputs],
    function: Callable[..., Outputs],
    backward_rule: Callable[..., Any],
    jvp_rule: Callable[..., Any],
) -> Callable[..., Outputs]:
    """Return the operator of a function for torch.func and forward mode, which do not support operators' gradients."""

    class Call(torch.autograd.Function):
        generate_vmap_rule = True
        setup_context = staticmethod(_save_solution)
        backward = staticmethod(backward_rule)
        jvp = staticmethod(jvp_rule)

        @staticmethod
        def forward(*inputs: Any) -> Outputs:
            return operator(*inputs)

    def solve(*inputs: Any) -> Outputs:
        if torch.compiler.is_compiling():
            return operator(*inputs)
        if not _is_traced() and all(_is_plain(x) for x in inputs if isinstance(x, Tensor)):
            return function(*inputs)  # the first call of an operator imports torch's compiler, which takes a second
        return Call.apply(*inputs)

    return solve


def _is_traced() -> bool:
    """Return whether something records operators: torch.jit.trace, or a mode such as that of make_fx."""
    return torch.jit.is_tracing() or torch._C._len_torch_dispatch_stack() > 0


def _is_plain(x: Tensor) -> bool:
    """Return whether x has memory, and takes part in no derivative."""
    return type(x) in (Tensor, torch.nn.Parameter) and x.device.type in ("cpu", "cuda") and needs_no_derivative(x)


_solve_grid = _differentiable(min_cut_grid, _min_cut_grid, _grid_backward, _grid_jvp)
_solve_graph = _differentiable(min_cut_graph, _min_cut_graph, _graph_backward, _graph_jvp)


@min_cut_grid.register_vmap
def _(info: Any, in_dims: Any, w: Tensor, *options: Any) -> tuple[Outputs, tuple[int, ...]]:
    w = w.movedim(in_dims[0], 0)
    outputs = min_cut_grid(w.flatten(0, 1), *options)
    return tuple(x.unflatten(0, w.shape[:2]) for x in outputs), (0,) * 5


@min_cut_graph.register_vmap
def _(info: Any, in_dims: Any, *inputs: Any) -> tuple[Outputs, tuple[int, ...]]:
    n = info.batch_size
    batched = [
        x.movedim(d, 0) if d is not None else x.expand(n, *x.shape)
        for x, d in zip(inputs[:3], in_dims[:3], strict=True)
    ]
    outputs = min_cut_graph(*(x.flatten(0, 1) for x in batched), *inputs[3:])
    return tuple(x.unflatten(0, (n, -1)) for x in outputs), (0,) * 5
