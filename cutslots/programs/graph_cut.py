"""The min-cut QP on any directed graph as a differentiable layer: `GraphCut`.

It solves the paper's regularised minimum cut (eq. 2) exactly. For fixed vertex variables p each edge is a two-variable
problem, d = delta/2 - w/(2 gamma) and s = -delta/2 - w/(2 gamma) with delta = p_u - p_v. Eliminating the edges leaves

    (I + B'B/2 + aa') p = a - B'w / (2 gamma),     B the edge-vertex incidence, a = e_source - e_sink.

The matrix depends on the graph but not on the weights. It is factored once, by sparse Cholesky; each solve is then two
triangular substitutions. On a grid `GridCut` solves the same system without a factorisation.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from cutslots.programs.graph import Graph
from cutslots.programs.grid_cut import CutSolution
from cutslots.programs.qp import SolverLayer, SparseFactor, check_positive, linear_map, sparse_tensor


class GraphCut(SolverLayer):
    """Solve the min-cut QP of a directed graph for its vertex variables p.

    `edges` (E, 2) holds the tail and the head of each edge between `num_vertices` vertices. A source and a sink
    connected to every vertex are added, and w is (..., E + 2N): the edges, then source -> v for every v, then v ->
    sink. With `terminals=(s, t)` two of the vertices are the source and the sink instead, and w is (..., E).

    >>> cut = GraphCut([[0, 1], [1, 0], [1, 2], [2, 1]], num_vertices=3)
    >>> cut(torch.zeros(5, 4 + 2 * 3)).shape
    torch.Size([5, 3])
    """

    def __init__(
        self, edges: Any, num_vertices: int, gamma: float = 0.5, terminals: tuple[int, int] | None = None
    ) -> None:
        super().__init__()
        edges = np.asarray(edges.detach().cpu() if isinstance(edges, Tensor) else edges)
        self.graph = (
            Graph.with_terminals(edges, num_vertices) if terminals is None else Graph(edges, num_vertices, *terminals)
        )
        self.num_vertices = num_vertices
        self.gamma = check_positive("gamma", gamma)
        self.precompute()

    def precompute(self) -> None:
        if self.device.type == "meta":
            return
        self._factor = SparseFactor(self.graph.reduced_matrix(), self.device, self.dtype)
        B = self.graph.incidence()
        self._B, self._Bt = (sparse_tensor(M).to(self.device, self.dtype) for M in (B, B.T))
        a = torch.zeros(self.graph.num_vertices, 1, device=self.device, dtype=self.dtype)
        a[self.graph.source], a[self.graph.sink] = 1.0, -1.0
        self._p_at_zero = self._factor(a)[:, 0]  # p for w = 0

    def forward(self, w: Tensor) -> Tensor:
        """Return p (..., num_vertices) for the weights w (..., edges)."""
        return self._all_vertices(self._check(w))[..., : self.num_vertices]

    def solve(self, w: Tensor) -> CutSolution:
        """Return all variables: p, the edge variables d, the slacks, the terminals."""
        w = self._check(w)
        p = self._all_vertices(w)
        delta = linear_map(p, self._differences, self._divergence)
        shift = w / (2 * self.gamma)
        terminals = torch.stack([p[..., self.graph.source], p[..., self.graph.sink]], -1)
        slack_st = terminals[..., 0] - terminals[..., 1] - 1
        return CutSolution(p[..., : self.num_vertices], delta / 2 - shift, -delta / 2 - shift, terminals, slack_st)

    def _all_vertices(self, w: Tensor) -> Tensor:
        return self._p_at_zero + linear_map(w, self._vertices, self._vertices_adjoint)

    def _vertices(self, w: Tensor) -> Tensor:
        return self._apply_to_columns(lambda x: self._factor(self._Bt @ x / (-2 * self.gamma)), w)

    def _vertices_adjoint(self, p: Tensor) -> Tensor:
        return self._apply_to_columns(lambda x: self._B @ self._factor(x / (-2 * self.gamma)), p)

    def _differences(self, p: Tensor) -> Tensor:
        return self._apply_to_columns(lambda x: self._B @ x, p)

    def _divergence(self, w: Tensor) -> Tensor:
        return self._apply_to_columns(lambda x: self._Bt @ x, w)

    @staticmethod
    def _apply_to_columns(apply: Any, x: Tensor) -> Tensor:
        """Apply a map of (n, columns) to x (..., n)."""
        y = apply(x.reshape(x.shape[:-1].numel(), x.shape[-1]).T.contiguous())
        return y.T.reshape(*x.shape[:-1], len(y))

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
        return {k: v for k, v in self.__dict__.items() if k not in ("_factor", "_B", "_Bt", "_p_at_zero")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.precompute()
