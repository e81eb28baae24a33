"""The min-cut QP on images and clips as a differentiable layer: `GridCut`.

It solves the paper's regularised minimum cut (eq. 2) exactly. For fixed vertex variables p each edge is a two-variable
problem, d = delta/2 - w/(2 gamma) and s = -delta/2 - w/(2 gamma) with delta = p_u - p_v. Eliminating the edges leaves

    (I + B'B/2 + aa') p = a - B'w / (2 gamma),     B the edge-vertex incidence, a = e_source - e_sink.

On a grid no factorisation is needed. Restricted to the pixels the matrix is 2I + L, where L is the Laplacian with
reflecting ends. The cosine transform (orthonormal DCT-II) diagonalises it. The terminals act on the pixels only through
p_source + p_sink, a constant over the image. They change one eigenvalue, that of the constant mode:

    p = IDCT( DCT(-div w / (2 gamma)) / eigenvalue ),      div w = out - in over the edges of a pixel
    eigenvalue(i, j) = 2 + (2 - 2 cos(pi i/H)) + (2 - 2 cos(pi j/W)),   but  (N + 4)/2  for i = j = 0, N = HW.

The layer picks two objects for its shape, dtype and device: a cosine transform (`dct.MatmulDCT`, `dct.FFTDCT`) and the
operators on the edges (`GridOperators`, or its subclasses: compiled code for small images on the CPU, Triton kernels on
CUDA).
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.nn import functional as F

from cutslots.programs import native
from cutslots.programs.dct import DCT, FFTDCT, MatmulDCT, use_fft
from cutslots.programs.graph import Shape, check_shape, grid_axes, grid_edges
from cutslots.programs.qp import SolverLayer, check_positive, linear_map

SOURCE = Path(__file__).with_name("grid_cut.c")
MAX_NATIVE_WORK = 600_000  # multiplications along an axis, up to which compiled code is faster than torch

try:
    from cutslots.programs import grid_cut_triton as kernels
except ImportError:  # Triton comes with the CUDA builds of torch
    kernels = None  # type: ignore[assignment]


class CutSolution(NamedTuple):
    """All variables of the min-cut QP. Where a grid has no edge, d and slack are zero."""

    p: Tensor  # (..., H, W) or (..., N)
    d: Tensor  # like w
    slack: Tensor  # like w
    terminals: Tensor  # (..., 2): p_source, p_sink
    slack_st: Tensor  # (...)


class GridCut(SolverLayer):
    """Solve the min-cut QP of an image or a clip for its vertex variables p.

    `shape` is (H, W) or (T, H, W). `gamma` is the paper's regulariser. `reach` is the distance in pixels over which a
    change in w has an effect: sqrt(gamma_n / 2 gamma), where gamma_n regularises the edges between neighbours. None is
    the paper's choice, gamma_n = gamma, a reach of 0.71. `anchor` in [0, 1] controls the mean of p. At 0, the paper's
    choice, free terminals hold the mean near zero. At 1 the QP imposes p_source + p_sink = 0. In between
    (p_source + p_sink)^2 is penalised with gamma (4 + N)/16 * anchor/(1 - anchor).

    The solution is linear in w. The layer runs in float32, also under autocast and in half-precision models, or in
    float64. It does not check w for NaN or infinity, because that would stall a GPU: they propagate to p.

    >>> cut = GridCut((64, 64))
    >>> w = torch.randn(8, 12, 6, 64, 64)  # right, left, down, up, source, sink
    >>> cut(w).shape
    torch.Size([8, 12, 64, 64])
    """

    _spectrum: Tensor
    _dct: DCT
    _operators: GridOperators

    def __init__(
        self, shape: Sequence[int], gamma: float = 0.5, reach: float | None = None, anchor: float = 0.0
    ) -> None:
        super().__init__()
        self.shape = check_shape(shape)
        self.channels = 2 * len(self.shape) + 2
        self.gamma = check_positive("gamma", gamma)
        self.reach = None if reach is None else check_positive("reach", reach)
        if not 0 <= anchor <= 1:
            raise ValueError(f"anchor is {anchor}; expected a number from 0 (free terminals) to 1 (anchored)")
        self.anchor = float(anchor)
        self.precompute()

    @property
    def gamma_n(self) -> float:
        """The regulariser of the edges between neighbours."""
        return self.gamma if self.reach is None else 2 * self.gamma * self.reach**2

    def precompute(self) -> None:
        self.register_buffer("_spectrum", self._response().to(self.device, self.dtype), persistent=False)
        self._dct, self._operators = _choose_solver(self)

    def use_matmul(self) -> None:
        """Solve by matrix products at any size, until the layer moves: exporters do not support FFTs."""
        self._dct, self._operators = MatmulDCT(self.shape, self.device, self.dtype), GridOperators(self.shape)

    @property
    def decay(self) -> float:
        """The factor by which the effect of a change in w decays per pixel along an axis, the mean of p aside."""
        ratio = self.gamma / self.gamma_n
        return 1 / (1 + ratio + math.sqrt(ratio * (ratio + 2)))  # r + 1/r = 2 + 2 gamma / gamma_n

    def _response(self) -> Tensor:
        """Return the factor from div w to p of every mode: -1/2 ((gamma_p + gamma_t) I + gamma_n L)^-1.

        The terminals are in the entry of the constant mode.
        """
        response = self._response_without_terminals(self.shape)
        response.view(-1)[0] = self._mean_response()
        return response

    def _response_without_terminals(self, shape: Shape) -> Tensor:
        """Return the factors of a grid of any shape whose terminals are fixed."""
        laplacian = torch.zeros(shape, dtype=torch.float64, device="cpu")
        for axis, n in enumerate(shape):
            modes = 2 - 2 * torch.cos(torch.arange(n, dtype=torch.float64, device="cpu") * math.pi / n)
            laplacian += modes.reshape(-1, *[1] * (len(shape) - 1 - axis))
        return -0.5 / (2 * self.gamma + self.gamma_n * laplacian)

    def _mean_response(self) -> float:
        """Return the factor from the mean of div w to the mean of p, which depends on the terminals."""
        free, anchored = -1 / (self.gamma * (math.prod(self.shape) + 4)), -1 / (4 * self.gamma)
        return (1 - self.anchor) * free + self.anchor * anchored

    def forward(self, w: Tensor) -> Tensor:
        """Return p (..., *shape) for w (..., channels, *shape).

        The channels are [later, earlier,] right, left, down, up, source, sink. Weights of edges that leave the grid
        are ignored.
        """
        return linear_map(self._check(w), self._vertices, self._vertices_adjoint)

    def solve(self, w: Tensor) -> CutSolution:
        """Return all variables: p, the edge variables d, the slacks, the terminals."""
        w = self._check(w)
        p = linear_map(w, self._vertices, self._vertices_adjoint)
        N, grid = math.prod(self.shape), tuple(range(-len(self.shape), 0))
        S, T = (w.select(-len(self.shape) - 1, i).sum(grid) for i in (-2, -1))
        total = (1 - self.anchor) * (T - S) / (self.gamma * (N + 4))  # p_source + p_sink
        difference = (2 - (S + T) / (2 * self.gamma)) / (3 + N / 2)  # p_source - p_sink
        source, sink = (total + difference) / 2, (total - difference) / 2

        on_grid = (..., *[None] * len(self.shape))
        ends = F.pad(torch.stack([source, -sink], -1), (self.channels - 2, 0))
        delta = linear_map(p, self._operators.differences, self._operators.divergence) + ends[on_grid]
        gamma = w.new_tensor([self.gamma_n] * (self.channels - 2) + [self.gamma] * 2)
        shift = w / (2 * gamma[on_grid])
        exists = torch.as_tensor(grid_edges(self.shape), device=w.device)
        d, slack = (torch.where(exists, half - shift, 0) for half in (delta / 2, -delta / 2))
        return CutSolution(p, d, slack, torch.stack([source, sink], -1), difference - 1)

    def _vertices(self, w: Tensor) -> Tensor:
        return self._operators.vertices(w, self._dct, self._spectrum)

    def _vertices_adjoint(self, p: Tensor) -> Tensor:
        return self._operators.vertices_adjoint(p, self._dct, self._spectrum)

    def _check(self, w: Tensor) -> Tensor:
        w, expected = self.cast("w", w), (self.channels, *self.shape)
        if w.shape[-len(expected) :] != expected:
            listed = ", ".join(map(str, expected))
            raise ValueError(f"w has shape {tuple(w.shape)}; a GridCut of {self.shape} expects (..., {listed})")
        return w

    def extra_repr(self) -> str:
        return f"{self.shape}, gamma={self.gamma}, reach={self.reach}, anchor={self.anchor}"


class GridOperators(nn.Module):
    """The linear maps of a grid cut in torch operations, for any shape, device and dtype."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.axes = grid_axes(shape)

    def vertices(self, w: Tensor, dct: DCT, spectrum: Tensor) -> Tensor:
        """Return p (..., *shape) for w (..., channels, *shape)."""
        return dct.filter(self.divergence(w), spectrum)

    def vertices_adjoint(self, p: Tensor, dct: DCT, spectrum: Tensor) -> Tensor:
        """Return the gradient of w for a gradient of p: the adjoint of `vertices`."""
        return self.differences(dct.filter(p, spectrum))

    def divergence(self, w: Tensor) -> Tensor:
        """Return B'w on the pixels: what flows out of each pixel minus what flows in."""
        *neighbours, source, sink = w.unbind(-len(self.shape) - 1)
        out = sink - source
        for axis, forward, backward in zip(self.axes, neighbours[::2], neighbours[1::2], strict=True):
            n = self.shape[axis] - 1
            flow = forward.narrow(axis, 0, n) - backward.narrow(axis, 1, n)
            out.narrow(axis, 0, n).add_(flow)
            out.narrow(axis, 1, n).sub_(flow)
        return out

    def differences(self, p: Tensor) -> Tensor:
        """Return Bp on the edges with the terminals at zero: the adjoint of `divergence`."""
        if torch.compiler.is_compiling():
            return self._differences_out_of_place(p)
        out = p.new_empty(*p.shape[: p.ndim - len(self.shape)], 2 * len(self.shape) + 2, *self.shape)
        *neighbours, source, sink = out.unbind(-len(self.shape) - 1)
        for axis, forward, backward in zip(self.axes, neighbours[::2], neighbours[1::2], strict=True):
            n = self.shape[axis] - 1
            low, high = p.narrow(axis, 0, n), p.narrow(axis, 1, n)
            torch.sub(low, high, out=forward.narrow(axis, 0, n))
            torch.sub(high, low, out=backward.narrow(axis, 1, n))
            forward.narrow(axis, n, 1).zero_()
            backward.narrow(axis, 0, 1).zero_()
        torch.neg(p, out=source)
        sink.copy_(p)
        return out

    def _differences_out_of_place(self, p: Tensor) -> Tensor:
        """Return the differences without in-place writes: the compiler fuses these, but copies in-place ones."""
        channels = []
        for axis in self.axes:
            n = self.shape[axis] - 1
            drop = p.narrow(axis, 0, n) - p.narrow(axis, 1, n)
            inner = [0] * (-2 * axis - 2)
            channels += [F.pad(drop, [*inner, 0, 1]), F.pad(-drop, [*inner, 1, 0])]
        return torch.stack([*channels, -p, p], -len(self.shape) - 1)


class NativeOperators(GridOperators):
    """A whole solve as one call of compiled code, for a few small images on the CPU: operations of torch cost more."""

    def vertices(self, w: Tensor, dct: DCT, spectrum: Tensor) -> Tensor:
        batch = math.prod(w.shape[:-3])
        library = self._library(w, batch)
        if library is None:
            return super().vertices(w, dct, spectrum)
        p = w.new_empty(*w.shape[:-3], *self.shape)
        return self._call(library.vertices, w.contiguous(), p, batch, dct, spectrum)

    def vertices_adjoint(self, p: Tensor, dct: DCT, spectrum: Tensor) -> Tensor:
        batch = math.prod(p.shape[:-2])
        library = self._library(p, batch)
        if library is None:
            return super().vertices_adjoint(p, dct, spectrum)
        w = p.new_empty(*p.shape[:-2], 6, *self.shape)
        return self._call(library.vertices_adjoint, p.contiguous(), w, batch, dct, spectrum)

    def _library(self, x: Tensor, batch: int) -> ctypes.CDLL | None:
        """Return the compiled code if it is faster; None for what has no memory, as in a trace."""
        if batch * math.prod(self.shape) * sum(self.shape) > MAX_NATIVE_WORK or torch.compiler.is_compiling():
            return None
        is_plain = type(x) in (Tensor, nn.Parameter) and x.device.type == "cpu" and not is_functorch_wrapped_tensor(x)
        is_traced = torch.jit.is_tracing() or torch._C._len_torch_dispatch_stack() > 0
        has_values = not (x.is_neg() or x._is_zerotensor())  # in its memory, as they stand
        return native.load(SOURCE, x.dtype) if is_plain and has_values and not is_traced else None

    def _call(self, function: Any, x: Tensor, out: Tensor, batch: int, dct: DCT, spectrum: Tensor) -> Tensor:
        assert isinstance(dct, MatmulDCT)
        height, width = self.shape
        scratch = x.new_empty(2 * height * width + height * height + width * width)
        pointers = [ctypes.c_void_p(a.data_ptr()) for a in (x, out, dct.matrix(-1), dct.matrix(-2), spectrum, scratch)]
        function(*pointers[:2], *map(ctypes.c_int64, (batch, height, width)), *pointers[2:])
        return out


class TiledOperators(GridOperators):
    """Divergence and differences as one Triton kernel each, for float32 images on CUDA."""

    def divergence(self, w: Tensor) -> Tensor:
        return kernels.divergence(w)

    def differences(self, p: Tensor) -> Tensor:
        return kernels.differences(p)


class FusedOperators(TiledOperators):
    """The whole solve as one Triton kernel, for float32 images of at most MAX_FUSED_SIZE a side.

    The kernels have tables of their own instead of a transform and a spectrum.
    """

    def __init__(self, cut: GridCut) -> None:
        super().__init__(cut.shape)
        self.tables = kernels.FilterTables(cut._response(), cut.device)

    def vertices(self, w: Tensor, dct: DCT, spectrum: Tensor) -> Tensor:
        return kernels.vertices(w, self.tables)

    def vertices_adjoint(self, p: Tensor, dct: DCT, spectrum: Tensor) -> Tensor:
        return kernels.vertices_adjoint(p, self.tables)


class OverlapOperators(TiledOperators):
    """The solve in overlapping tiles by Triton kernels, for larger float32 images and a decay that `fits_tiles`."""

    def __init__(self, cut: GridCut) -> None:
        super().__init__(cut.shape)
        response = cut._response_without_terminals((kernels.TILE, kernels.TILE))
        pixels, constant = math.prod(cut.shape), cut._mean_response()
        self.tables = kernels.FilterTables(response, cut.device, pixels, constant)

    def vertices(self, w: Tensor, dct: DCT, spectrum: Tensor) -> Tensor:
        return kernels.vertices_in_tiles(w, self.tables)

    def vertices_adjoint(self, p: Tensor, dct: DCT, spectrum: Tensor) -> Tensor:
        return kernels.adjoint_in_tiles(p, self.tables)


def _choose_solver(cut: GridCut) -> tuple[DCT, GridOperators]:
    """Return the fastest transform and operators for a grid."""
    shape, device, dtype = cut.shape, cut.device, cut.dtype
    fft = use_fft(shape, device)
    if kernels is None or not kernels.is_supported(device) or dtype != torch.float32 or len(shape) != 2:
        use_native = device.type == "cpu" and len(shape) == 2 and not fft
        operators = NativeOperators if use_native else GridOperators
        return (FFTDCT if fft else MatmulDCT)(shape, device, dtype), operators(shape)
    transform = (kernels.TritonFFTDCT if fft else MatmulDCT)(shape, device, dtype)
    if max(shape) <= kernels.MAX_FUSED_SIZE:
        return transform, FusedOperators(cut)
    return transform, OverlapOperators(cut) if kernels.fits_tiles(shape, cut.decay) else TiledOperators(shape)
