"""The min-cut QP on any directed graph as a differentiable layer: `GraphCut`.

It solves the paper's regularised minimum cut (eq. 2) exactly. For fixed vertex variables p each edge is a two-variable
problem, d = delta/2 - w/(2 gamma) and s = -delta/2 - w/(2 gamma) with delta = p_u - p_v. Eliminating the edges leaves

    (I + B'B/2 + aa') p = a - B'w / (2 gamma),     B the edge-vertex incidence, a = e_source - e_sink.

The matrix depends on the graph but not on the weights. The layer picks one of three solvers for its graph and device:

    "cholesky"   factors the matrix once; each solve is two triangular substitutions
    "cg"         conjugate gradients: no setup, and tens of products with the matrix per solve. For graphs without small
                 separators, a random one for example, whose factor would be nearly dense
    "inverse"    stores the inverse; each solve is a matrix product. Faster on CUDA for small graphs

The matrix is diagonally dominant and its eigenvalues are at least 1, so conjugate gradients with the Jacobi
preconditioner take few iterations.

On a grid `GridCut` solves the same system without a factorisation.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from cutslots.programs.fill import estimate_fill
from cutslots.programs.graph import Graph
from cutslots.programs.grid_cut import CutSolution
from cutslots.programs.linear_solvers import ConjugateGradients, Solver, SparseFactor, SparseMatrix
from cutslots.programs.qp import Map, SolverLayer, check_positive, linear_map

SOLVERS = ("cholesky", "cg", "inverse")
DEFAULT_TOLERANCE = {torch.float32: 1e-7, torch.float64: 1e-13}
MIN_CG_VERTICES = 2048  # a dense factor of fewer vertices takes a fraction of a second
MAX_FILL = 30  # entries of the factor for each entry of the matrix; a solve by conjugate gradients takes 20 products
MAX_DENSE_VERTICES = 4608  # the inverse takes 170 MB in float32; that of a 64x64 image with terminals fits


class GraphCut(SolverLayer):
    """Solve the min-cut QP of a directed graph for its vertex variables p.

    `edges` (E, 2) holds the tail and the head of each edge between `num_vertices` vertices. A source and a sink
    connected to every vertex are added, and w is (..., E + 2N): the edges, then source -> v for every v, then v ->
    sink. With `terminals=(s, t)` two of the vertices are the source and the sink instead, and w is (..., E).

    `solver` is "cholesky", "cg" or "inverse". By default it is the inverse on CUDA for graphs of at most
    MAX_DENSE_VERTICES vertices, terminals included; otherwise sparse Cholesky, unless its factor would have more than
    MAX_FILL times as many entries as the matrix. `tolerance` is the relative residual at which conjugate gradients
    stop, by default 1e-7 in float32 and 1e-13 in float64. They raise RuntimeError if they do not reach it.

    >>> cut = GraphCut([[0, 1], [1, 0], [1, 2], [2, 1]], num_vertices=3)
    >>> cut(torch.zeros(5, 4 + 2 * 3)).shape
    torch.Size([5, 3])
    """

    def __init__(
        self,
        edges: Any,
        num_vertices: int,
        gamma: float = 0.5,
        terminals: tuple[int, int] | None = None,
        solver: str | None = None,
        tolerance: float | None = None,
    ) -> None:
        super().__init__()
        edges = np.asarray(edges.detach().cpu() if isinstance(edges, Tensor) else edges)
        self.graph = (
            Graph.with_terminals(edges, num_vertices) if terminals is None else Graph(edges, num_vertices, *terminals)
        )
        self.num_vertices = num_vertices
        self.gamma = check_positive("gamma", gamma)
        if solver not in (None, *SOLVERS):
            raise ValueError(f"solver is {solver!r}; expected None or one of {', '.join(map(repr, SOLVERS))}")
        self.solver = solver
        if tolerance is not None and not 0 < tolerance < 1:
            raise ValueError(f"tolerance is {tolerance}; expected a number between 0 and 1")
        self.tolerance = tolerance
        self.precompute()

    def precompute(self) -> None:
        if self.device.type == "meta":
            return
        self._operators: GraphOperators = self._make_operators()
        a = torch.zeros(1, self.graph.num_vertices, device=self.device, dtype=self.dtype)
        a[0, self.graph.source], a[0, self.graph.sink] = 1.0, -1.0
        self._p_at_zero = self._operators.solve(a)[0]  # p for w = 0
        self._home = self.device

    def _make_operators(self) -> GraphOperators:
        matrix, solver = self.graph.reduced_matrix(), self.solver
        if solver is None and self.device.type == "cuda" and self.graph.num_vertices <= MAX_DENSE_VERTICES:
            solver = "inverse"
        if solver == "inverse":
            return DenseOperators(self.graph, self.device, self.dtype)
        if solver is None:
            solver = choose_sparse_solver(matrix)
        if solver == "cholesky":
            return SparseOperators(self.graph, SparseFactor(matrix, self.device, self.dtype), self.device, self.dtype)
        tolerance = self.tolerance or DEFAULT_TOLERANCE[self.dtype]
        iterations = ConjugateGradients(matrix, self.device, self.dtype, tolerance)
        return SparseOperators(self.graph, iterations, self.device, self.dtype)

    def forward(self, w: Tensor) -> Tensor:
        """Return p (..., num_vertices) for the weights w (..., edges)."""
        return self._all_vertices(self._check(w))[..., : self.num_vertices]

    def solve(self, w: Tensor) -> CutSolution:
        """Return all variables: p, the edge variables d, the slacks, the terminals."""
        w = self._check(w)
        p = self._all_vertices(w)
        delta = linear_map(p, self._differences, self._divergence, traced=True)
        shift = w / (2 * self.gamma)
        terminals = torch.stack([p[..., self.graph.source], p[..., self.graph.sink]], -1)
        slack_st = terminals[..., 0] - terminals[..., 1] - 1
        return CutSolution(p[..., : self.num_vertices], delta / 2 - shift, -delta / 2 - shift, terminals, slack_st)

    def _all_vertices(self, w: Tensor) -> Tensor:
        return self._p_at_zero + linear_map(w, self._vertices, self._vertices_adjoint, traced=True)

    def _vertices(self, w: Tensor) -> Tensor:
        operators, scale = self._operators, -1 / (2 * self.gamma)
        return self._apply_to_rows(lambda x: operators.solve(scale * operators.divergence(x)), w)

    def _vertices_adjoint(self, p: Tensor) -> Tensor:
        operators, scale = self._operators, -1 / (2 * self.gamma)
        return self._apply_to_rows(lambda x: operators.differences(operators.solve(scale * x)), p)

    def _differences(self, p: Tensor) -> Tensor:
        return self._apply_to_rows(self._operators.differences, p)

    def _divergence(self, w: Tensor) -> Tensor:
        return self._apply_to_rows(self._operators.divergence, w)

    @staticmethod
    def _apply_to_rows(apply: Map, x: Tensor) -> Tensor:
        """Apply a map of (rows, n) to x (..., n)."""
        y = apply(x.reshape(math.prod(x.shape[:-1]), x.shape[-1]))
        return y.reshape(*x.shape[:-1], y.shape[-1])

    def _check(self, w: Tensor) -> Tensor:
        w, E = self.cast("w", w), self.graph.num_edges
        if not w.ndim or w.shape[-1] != E:
            raise ValueError(
                f"w has shape {tuple(w.shape)}; this GraphCut expects (..., {E}), a weight for each edge"
                + ("" if E == 0 or self.graph.num_vertices == self.num_vertices else ", then for source and sink")
            )
        return w

    def extra_repr(self) -> str:
        return f"{self.num_vertices} vertices, {self.graph.num_edges} edges, gamma={self.gamma}"

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k not in ("_operators", "_p_at_zero")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.precompute()


class GraphOperators(Protocol):
    """The linear maps of a graph cut, on rows: w is (rows, edges), p is (rows, vertices)."""

    def solve(self, rhs: Tensor) -> Tensor:
        """Return (I + B'B/2 + aa')^-1 rhs."""
        ...

    def differences(self, p: Tensor) -> Tensor:
        """Return Bp."""
        ...

    def divergence(self, w: Tensor) -> Tensor:
        """Return B'w."""
        ...


def choose_sparse_solver(matrix: Any) -> str:
    """Return "cg" if the Cholesky factor of a large matrix would have much fill, else "cholesky"."""
    if matrix.shape[0] < MIN_CG_VERTICES:
        return "cholesky"
    return "cg" if estimate_fill(matrix) > MAX_FILL * matrix.nnz else "cholesky"


class SparseOperators:
    """A solver of the sparse system and sparse matrices."""

    def __init__(self, graph: Graph, solver: Solver, device: torch.device, dtype: torch.dtype) -> None:
        self.solver = solver
        self.B = SparseMatrix.of(graph.incidence(), device, dtype)
        self.Bt = self.B.T

    def solve(self, rhs: Tensor) -> Tensor:
        return self.solver(rhs.T.contiguous()).T

    def differences(self, p: Tensor) -> Tensor:
        return self.B.matmul(p.T.contiguous()).T

    def divergence(self, w: Tensor) -> Tensor:
        return self.Bt.matmul(w.T.contiguous()).T


class DenseOperators:
    """The inverse of the system and lists of edges.

    Training lets CUDA multiply float32 matrices in TF32, which keeps 11 significant bits. Each float32 factor is
    therefore split into its first 11 bits and the rest. Three products of the pieces have the accuracy of float32.
    """

    def __init__(self, graph: Graph, device: torch.device, dtype: torch.dtype) -> None:
        matrix = torch.as_tensor(graph.reduced_matrix().toarray(), dtype=torch.float64, device=device)
        inverse = torch.cholesky_inverse(torch.linalg.cholesky(matrix))
        self.inverse = inverse if dtype == torch.float64 else round_to_tf32(inverse.to(dtype))
        self.rest = (inverse - self.inverse).to(dtype)  # zero in float64
        self.num_vertices = graph.num_vertices
        self.tails, self.heads = (torch.tensor(ends, device=device) for ends in graph.edges.T)

    def solve(self, rhs: Tensor) -> Tensor:
        if rhs.dtype == torch.float64:
            return rhs @ self.inverse
        first = round_to_tf32(rhs)
        return first @ self.inverse + (first @ self.rest + (rhs - first) @ self.inverse)

    def differences(self, p: Tensor) -> Tensor:
        return p.index_select(1, self.tails) - p.index_select(1, self.heads)

    def divergence(self, w: Tensor) -> Tensor:
        out = w.new_zeros(w.shape[0], self.num_vertices)
        return out.index_add(1, self.tails, w).index_add(1, self.heads, w, alpha=-1)


def round_to_tf32(x: Tensor) -> Tensor:
    """Return float32 values rounded to 11 significant bits."""
    dropped = 1 << 13  # float32 has 24 significant bits
    return (x.view(torch.int32) + dropped // 2 & -dropped).view(torch.float32)
