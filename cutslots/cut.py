"""Minimum s-t cuts as differentiable layers: `GridCut` on images and clips, `GraphCut` on any graph.

Both solve the paper's regularised program (eq. 2) exactly. For fixed vertex variables p each edge is a two-variable
problem, d = delta/2 - w/(2 gamma) and s = -delta/2 - w/(2 gamma) with delta = p_u - p_v, which leaves

    (I + B'B/2 + aa') p = a - B'w / (2 gamma),     B the edge-vertex incidence, a = e_source - e_sink.

`GraphCut` factors that matrix. On a grid nothing needs factoring: restricted to pixels it is 2I + L, L the Laplacian
with reflecting ends, which the cosine transform (orthonormal DCT-II) diagonalises. The terminals touch the pixels only
through p_source + p_sink, a constant over the picture, so they amount to another eigenvalue for the constant mode:

    p = IDCT( DCT(-div w / (2 gamma)) / eigenvalue ),      div w = out - in over the edges of a pixel
    eigenvalue(i, j) = 2 + (2 - 2 cos(pi i/H)) + (2 - 2 cos(pi j/W)),   but  (N + 4)/2  for i = j = 0, N = HW.

Shapes: H W grid, T frames, N vertices without the terminals, E edges; `...` is any batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from cutslots.graph import Graph, checked_shape, grid_axes, grid_edges
from cutslots.qp import Precomputed, SparseFactor, linear_map, sparse_tensor

try:
    from cutslots import fused
except ImportError:  # Triton comes with the CUDA builds of torch
    fused = None  # type: ignore[assignment]

# Up to this side a cosine transform is a matrix product, beyond it an FFT: about where the two are equally fast.
PRODUCT_SIDE = {"cpu": 384, "cuda": 192}


class Cut(NamedTuple):
    """All variables of the program. Where a grid has no edge, d and slack are zero."""

    p: Tensor  # (..., H, W) or (..., N)
    d: Tensor  # like w
    slack: Tensor  # like w
    terminals: Tensor  # (..., 2): p_source, p_sink
    slack_st: Tensor  # (...)


class GridCut(Precomputed):
    """The vertex variables of a minimum cut of an image or a clip, exact, by cosine transforms.

    `shape` is (H, W) or (T, H, W). `gamma` is the paper's regulariser. `reach` is the distance in pixels over which a
    change in w is felt, sqrt(gamma_n / 2 gamma) with gamma_n the regulariser of neighbour edges; None is the paper,
    where gamma_n = gamma and the reach is 0.71. `anchor` releases the balance that free terminals impose on the mean
    of p: 0 is the paper, 1 imposes p_source + p_sink = 0; in between (p_source + p_sink)^2 is penalised with
    gamma (4 + N)/16 * anchor/(1 - anchor).

    The cut is linear in w. It runs in float32, also under autocast and in half-precision models, or in float64.
    NaN or infinity in w is not looked for (that would stall a GPU); it comes out as it went in.

    >>> cut = GridCut((64, 64))
    >>> w = torch.randn(8, 12, 6, 64, 64)  # right, left, down, up, source, sink
    >>> cut(w).shape
    torch.Size([8, 12, 64, 64])
    """

    _spectrum: Tensor
    _cosines1: Tensor
    _cosines2: Tensor

    def __init__(
        self, shape: Sequence[int], gamma: float = 0.5, reach: float | None = None, anchor: float = 0.0
    ) -> None:
        super().__init__()
        self.shape = checked_shape(shape)
        self.axes = grid_axes(self.shape)
        self.channels = 2 * len(self.shape) + 2
        self.gamma = _positive("gamma", gamma)
        self.reach = None if reach is None else _positive("reach", reach)
        if not 0 <= anchor <= 1:
            raise ValueError(f"anchor is {anchor}; expected a number from 0 (free terminals) to 1 (anchored)")
        self.anchor = float(anchor)
        self.precompute()

    @property
    def gamma_n(self) -> float:
        """The regulariser of the edges between neighbours."""
        return self.gamma if self.reach is None else 2 * self.gamma * self.reach**2

    def precompute(self) -> None:
        limit = PRODUCT_SIDE.get(self.device.type, PRODUCT_SIDE["cuda"])
        self._fast = max(self.shape) > limit
        self._kernels = _fused_kernels(self)
        tables = {"_spectrum": self._response()}
        for axis in self.axes:
            tables[f"_cosines{-axis}"] = (_cosine_phases if self._fast else _cosine_matrix)(self.shape[axis])
        for name, table in tables.items():
            dtype = self.dtype.to_complex() if table.is_complex() else self.dtype
            self.register_buffer(name, table.to(self.device, dtype), persistent=False)

    def _response(self) -> Tensor:
        """From div w to p on every mode: -1/2 ((gamma_p + gamma_t) I + gamma_n L)^-1, the terminals in the constant."""
        laplacian = torch.zeros(self.shape, dtype=torch.float64)
        for axis, n in enumerate(self.shape):
            modes = 2 - 2 * torch.cos(torch.arange(n, dtype=torch.float64) * math.pi / n)
            laplacian += modes.reshape(-1, *[1] * (len(self.shape) - 1 - axis))
        response = -0.5 / (2 * self.gamma + self.gamma_n * laplacian)
        free, anchored = -1 / (self.gamma * (math.prod(self.shape) + 4)), -1 / (4 * self.gamma)
        response.view(-1)[0] = (1 - self.anchor) * free + self.anchor * anchored
        return response

    def forward(self, w: Tensor) -> Tensor:
        """p (..., *shape) for w (..., channels, *shape): [later, earlier,] right, left, down, up, source, sink.

        Weights of edges that leave the grid are ignored.
        """
        return linear_map(self._checked(w), self._vertices, self._vertices_adjoint)

    def solve(self, w: Tensor) -> Cut:
        """All variables: p, the edge variables d, the slacks, the terminals."""
        w = self._checked(w)
        p = linear_map(w, self._vertices, self._vertices_adjoint)
        N, grid = math.prod(self.shape), tuple(range(-len(self.shape), 0))
        S, T = (w.select(-len(self.shape) - 1, i).sum(grid) for i in (-2, -1))
        total = (1 - self.anchor) * (T - S) / (self.gamma * (N + 4))  # p_source + p_sink
        apart = (2 - (S + T) / (2 * self.gamma)) / (3 + N / 2)  # p_source - p_sink
        source, sink = (total + apart) / 2, (total - apart) / 2

        on_grid = (..., *[None] * len(self.shape))
        ends = F.pad(torch.stack([source, -sink], -1), (self.channels - 2, 0))
        delta = linear_map(p, self._differences, self._divergence) + ends[on_grid]
        gamma = w.new_tensor([self.gamma_n] * (self.channels - 2) + [self.gamma] * 2)
        shift = w / (2 * gamma[on_grid])
        exists = torch.as_tensor(grid_edges(self.shape), device=w.device)
        d, slack = (torch.where(exists, half - shift, 0) for half in (delta / 2, -delta / 2))
        return Cut(p, d, slack, torch.stack([source, sink], -1), apart - 1)

    def _vertices(self, w: Tensor) -> Tensor:
        if self._kernels == "whole":
            return fused.vertices(w, self._cosines1, self._cosines2, self._spectrum)
        return self._filter(self._divergence(w))

    def _vertices_adjoint(self, p: Tensor) -> Tensor:
        if self._kernels == "whole":
            return fused.vertices_adjoint(p, self._cosines1, self._cosines2, self._spectrum)
        return self._differences(self._filter(p))

    def _divergence(self, w: Tensor) -> Tensor:
        """B'w on the pixels: what flows out of each less what flows in."""
        if self._kernels:
            return fused.divergence(w)
        *neighbours, source, sink = w.unbind(-len(self.shape) - 1)
        out = sink - source
        for axis, forth, back in zip(self.axes, neighbours[::2], neighbours[1::2], strict=True):
            n = self.shape[axis] - 1
            flow = forth.narrow(axis, 0, n) - back.narrow(axis, 1, n)
            out.narrow(axis, 0, n).add_(flow)
            out.narrow(axis, 1, n).sub_(flow)
        return out

    def _differences(self, p: Tensor) -> Tensor:
        """Bp on the edges, the terminals at zero: the adjoint of the divergence."""
        if self._kernels:
            return fused.differences(p)
        if torch.compiler.is_compiling():
            return self._differences_as_one_expression(p)
        out = p.new_empty(*p.shape[: p.ndim - len(self.shape)], self.channels, *self.shape)
        *neighbours, source, sink = out.unbind(-len(self.shape) - 1)
        for axis, forth, back in zip(self.axes, neighbours[::2], neighbours[1::2], strict=True):
            n = self.shape[axis] - 1
            low, high = p.narrow(axis, 0, n), p.narrow(axis, 1, n)
            torch.sub(low, high, out=forth.narrow(axis, 0, n))
            torch.sub(high, low, out=back.narrow(axis, 1, n))
            forth.narrow(axis, n, 1).zero_()
            back.narrow(axis, 0, 1).zero_()
        torch.neg(p, out=source)
        sink.copy_(p)
        return out

    def _differences_as_one_expression(self, p: Tensor) -> Tensor:
        """Nothing written in place: the compiler fuses this, where the above becomes a chain of copies."""
        channels = []
        for axis in self.axes:
            n = self.shape[axis] - 1
            drop = p.narrow(axis, 0, n) - p.narrow(axis, 1, n)
            inner = [0] * (-2 * axis - 2)
            channels += [F.pad(drop, [*inner, 0, 1]), F.pad(-drop, [*inner, 1, 0])]
        return torch.stack([*channels, -p, p], -len(self.shape) - 1)

    def _filter(self, q: Tensor) -> Tensor:
        """Multiplies every cosine mode of q (..., *shape) by its response."""
        tables = {axis: self.get_buffer(f"_cosines{-axis}") for axis in self.axes}
        if self._fast:
            return self._filter_by_fft(q, tables)
        for axis, C in tables.items():
            q = _product(C, q, axis)
        q = q.mul_(self._spectrum)
        for axis, C in tables.items():
            q = _product(C.T, q, axis)
        return q

    def _filter_by_fft(self, q: Tensor, phases: dict[int, Tensor]) -> Tensor:
        axes = sorted(phases)
        if self._kernels:
            V = torch.fft.rfftn(fused.reorder(q), dim=axes)
            V = fused.scale_modes(V, self._spectrum, phases[-1], phases[-2])
            return fused.reorder(torch.fft.irfftn(V, s=self.shape, dim=axes), back=True)
        for axis in axes:
            q = _reorder(q, axis)
        V = _scale_modes(torch.fft.rfftn(q, dim=axes), self._spectrum, phases)
        q = torch.fft.irfftn(V, s=self.shape, dim=axes)
        for axis in axes:
            q = _reorder_back(q, axis)
        return q

    def _checked(self, w: Tensor) -> Tensor:
        w, expected = self.cast("w", w), (self.channels, *self.shape)
        if w.shape[-len(expected) :] != expected:
            listed = ", ".join(map(str, expected))
            raise ValueError(f"w has shape {tuple(w.shape)}; a GridCut of {self.shape} expects (..., {listed})")
        return w

    def extra_repr(self) -> str:
        return f"{self.shape}, gamma={self.gamma}, reach={self.reach}, anchor={self.anchor}"


class GraphCut(Precomputed):
    """The vertex variables of a minimum cut of any directed graph, exact, by sparse Cholesky.

    `edges` (E, 2) holds the tail and head of each edge between `num_vertices` vertices. A source and a sink joined to
    every vertex are added, and w is (..., E + 2N): the edges, then source -> v for every v, then v -> sink. With
    `terminals=(s, t)` two of the vertices play that part instead, nothing is added, and w is (..., E).

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
        self.gamma = _positive("gamma", gamma)
        self.precompute()

    def precompute(self) -> None:
        if self.device.type == "meta":
            return
        self._factor = SparseFactor(self.graph.reduced(), self.device, self.dtype)
        B = self.graph.incidence()
        self._B, self._Bt = (sparse_tensor(M).to(self.device, self.dtype) for M in (B, B.T))
        a = torch.zeros(self.graph.num_vertices, 1, device=self.device, dtype=self.dtype)
        a[self.graph.source], a[self.graph.sink] = 1.0, -1.0
        self._apart = self._factor(a)[:, 0]  # p when w = 0

    def forward(self, w: Tensor) -> Tensor:
        """p (..., num_vertices) for the weights w (..., edges)."""
        return self._all_vertices(self._checked(w))[..., : self.num_vertices]

    def solve(self, w: Tensor) -> Cut:
        """All variables: p, the edge variables d, the slacks, the terminals."""
        w = self._checked(w)
        p = self._all_vertices(w)
        delta = linear_map(p, self._differences, self._divergence)
        shift = w / (2 * self.gamma)
        terminals = torch.stack([p[..., self.graph.source], p[..., self.graph.sink]], -1)
        apart = terminals[..., 0] - terminals[..., 1]
        return Cut(p[..., : self.num_vertices], delta / 2 - shift, -delta / 2 - shift, terminals, apart - 1)

    def _all_vertices(self, w: Tensor) -> Tensor:
        return self._apart + linear_map(w, self._vertices, self._vertices_adjoint)

    def _vertices(self, w: Tensor) -> Tensor:
        return self._columns(lambda x: self._factor(self._Bt @ x / (-2 * self.gamma)), w)

    def _vertices_adjoint(self, p: Tensor) -> Tensor:
        return self._columns(lambda x: self._B @ self._factor(x / (-2 * self.gamma)), p)

    def _differences(self, p: Tensor) -> Tensor:
        return self._columns(lambda x: self._B @ x, p)

    def _divergence(self, w: Tensor) -> Tensor:
        return self._columns(lambda x: self._Bt @ x, w)

    @staticmethod
    def _columns(apply: Any, x: Tensor) -> Tensor:
        """Applies a map of (n, columns) to x (..., n)."""
        y = apply(x.reshape(x.shape[:-1].numel(), x.shape[-1]).T.contiguous())
        return y.T.reshape(*x.shape[:-1], len(y))

    def _checked(self, w: Tensor) -> Tensor:
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
        return {k: v for k, v in self.__dict__.items() if k not in ("_factor", "_B", "_Bt", "_apart")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.precompute()


def _cosine_matrix(n: int) -> Tensor:
    """The orthonormal DCT-II as a matrix (modes, positions)."""
    k = torch.arange(n, dtype=torch.float64)
    C = torch.cos(math.pi / n * k[:, None] * (k + 0.5)) * math.sqrt(2 / n)
    C[0] /= math.sqrt(2)
    return C


def _cosine_phases(n: int) -> Tensor:
    """exp(-i pi k / 2n): the phases between an FFT of reordered samples and their DCT-II (Makhoul 1980)."""
    return torch.polar(torch.ones(n, dtype=torch.float64), -math.pi / (2 * n) * torch.arange(n, dtype=torch.float64))


def _scale_modes(V: Tensor, spectrum: Tensor, phases: dict[int, Tensor]) -> Tensor:
    """Multiplies cosine modes by `spectrum`, given and returned as the real FFT V of the reordered samples.

    With the even samples of an axis first and the odd ones behind them in reverse, DCT[k] = Re(phase_k V_k) and
    DCT[n - k] = -Im(phase_k V_k): along the last axis one complex number carries two modes. Along the others, where
    the values are complex themselves, DCT[k] = (phase_k V_k + conj(phase_k) V_-k) / 2.
    """
    *others, _ = sorted(phases)
    last = phases[-1][: V.shape[-1]]
    V = V * last
    for axis in others:
        phase = _along(phases[axis], axis)
        V = (phase * V).addcmul_(phase.conj(), _mirror(V, axis)).mul_(0.5)
    two_modes = torch.stack([spectrum, _mirror(spectrum, -1)], -1)[..., : V.shape[-1], :]
    V = torch.view_as_complex(torch.view_as_real(V) * two_modes)
    for axis in others:
        phase = _along(phases[axis], axis).conj()
        rest = -1j * phase
        rest.select(axis, 0).zero_()  # there is no mode n - 0
        V = (phase * V).addcmul_(rest, _mirror(V, axis))
    return V * last.conj()


def _along(x: Tensor, axis: int) -> Tensor:
    """A vector, shaped to broadcast along one axis."""
    return x.reshape(-1, *[1] * (-axis - 1))


def _mirror(x: Tensor, axis: int) -> Tensor:
    """x at -k modulo n."""
    return x.flip(axis).roll(1, axis)


def _reorder(x: Tensor, axis: int) -> Tensor:
    x = x.movedim(axis, -1)
    return torch.cat([x[..., ::2], x[..., 1::2].flip(-1)], -1).movedim(-1, axis)


def _reorder_back(x: Tensor, axis: int) -> Tensor:
    n = x.shape[axis]
    out = torch.empty_like(x)
    even, odd = x.narrow(axis, 0, (n + 1) // 2), x.narrow(axis, (n + 1) // 2, n // 2)
    out.movedim(axis, -1)[..., ::2] = even.movedim(axis, -1)
    out.movedim(axis, -1)[..., 1::2] = odd.flip(axis).movedim(axis, -1)
    return out


def _product(matrix: Tensor, x: Tensor, axis: int) -> Tensor:
    """The matrix applied along one axis of x."""
    if axis == -1:
        return x @ matrix.T
    return (matrix @ x.flatten(axis + 1)).reshape(x.shape) if axis < -2 else matrix @ x


def _fused_kernels(cut: GridCut) -> str:
    """Which of the Triton kernels serve this cut: "whole", "parts" (divergence and differences) or none, ""."""
    if fused is None or not fused.able(cut.device) or cut.dtype != torch.float32 or len(cut.shape) != 2:
        return ""
    return "whole" if max(cut.shape) <= fused.SIDE and not cut._fast else "parts"


def _positive(name: str, value: float) -> float:
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name} is {value}; expected a positive number")
    return float(value)
