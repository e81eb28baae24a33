"""The equality-constrained quadratic program (QP) as a differentiable layer (the paper's eq. 4 to 6).

    minimise 1/2 z'Gz + c'z  subject to  Az = b            [ G  A' ] [ z      ]   [ -c ]
    with G = gamma I or a positive diagonal                [ A  0  ] [ lambda ] = [  b ]

A and G are fixed, so S = A G^-1 A' is factored once; each solve is then two triangular substitutions:

    S lambda = -(A G^-1 c + b),   z = -G^-1 (c + A' lambda).

The solution is linear in (c, b) and its matrix is symmetric. The backward pass is therefore the same solve, and so are
derivatives of any order, in forward and in reverse mode. `linear_map` tells autograd so; the cut layers use it too.

The paper prints gamma ||z||^2 in one place and G = gamma I in another, which differ by a factor of two in gamma. This
module takes G = gamma I, as the paper's solution formula does.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy import sparse
from torch import Tensor

from cutslots.programs.constants import ConstantLayer
from cutslots.programs.linear_solvers import DenseFactor, Solver, SparseFactor, SparseMatrix

Map = Callable[[Tensor], Tensor]

# Bounds of regularisers, reaches and temperatures. Beyond them float32 overflows: 1e-6 twice is a factor of 1e12 on w.
MIN_POSITIVE, MAX_POSITIVE = 1e-6, 10**6


class _ReverseLinearMap(torch.autograd.Function):
    """A linear map with derivatives in reverse mode."""

    @staticmethod
    def forward(x: Tensor, apply: Map, adjoint: Map) -> Tensor:
        if not torch.is_autocast_enabled(x.device.type):
            return apply(x)
        with torch.autocast(x.device.type, enabled=False):
            return apply(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Map, Map], output: Tensor) -> None:
        _, ctx.map, ctx.adjoint = inputs

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return linear_map(grad, ctx.adjoint, ctx.map), None, None


class _LinearMap(_ReverseLinearMap):
    """A linear map with derivatives in both modes and a rule for vmap."""

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        return linear_map(tangent, ctx.map, ctx.adjoint)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int, None, None], x: Tensor, apply: Map, adjoint: Map) -> tuple[Tensor, int]:
        return linear_map(x.movedim(in_dims[0], 0), apply, adjoint), 0


# torch inspects this signature on every call, and computing it takes longer than a small cut.
_LinearMap.forward.__signature__ = inspect.signature(_LinearMap.forward)  # type: ignore[attr-defined]


def linear_map(x: Tensor, apply: Map, adjoint: Map) -> Tensor:
    """Return `apply(x)`, differentiated by `adjoint` instead of through the operations inside `apply`.

    Both are linear, act on trailing dimensions and accept any leading ones. Nothing is saved for the backward pass. In
    forward mode the map is its own derivative.
    """
    if torch.compiler.is_compiling():  # torch.compile does not trace functions with a jvp
        return _ReverseLinearMap.apply(x, apply, adjoint)
    return _LinearMap.apply(x, apply, adjoint)


class SolverLayer(ConstantLayer):
    """A layer that solves a problem with fixed constants. They are computed in float64 and rounded to its precision.

    A layer converted to half precision computes in float32. The state dict is empty.
    """

    def cast(self, name: str, x: Tensor) -> Tensor:
        """Return x in the layer's dtype if x is in it or in half precision; raise TypeError otherwise."""
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} is a {type(x).__name__}; expected a torch.Tensor of {self.dtype}")
        self.materialize(x)
        if x.dtype == self.dtype:
            return x
        if x.dtype in (torch.float16, torch.bfloat16):
            return x.to(self.dtype)
        convert = {torch.float32: ".float()", torch.float64: ".double()"}.get(x.dtype)
        advice = f"convert the layer with {convert}, or cast {name}" if convert else f"cast {name} to {self.dtype}"
        raise TypeError(f"{name} has dtype {x.dtype}, but the {type(self).__name__} is {self.dtype}: {advice}")


class Solution(NamedTuple):
    z: Tensor  # (..., n)
    dual: Tensor  # (..., m)


class EqualityQP(SolverLayer):
    """Solve min 1/2 z'Gz + c'z subject to Az = b, differentiable in c and in b.

    `A` (m, n) is a dense array or tensor (dense Cholesky) or a scipy or torch sparse matrix (sparse Cholesky). `gamma`
    is the diagonal of G: one positive number, or n of them.

    >>> qp = EqualityQP(A=[[1.0, 1.0, 1.0]], b=[1.0], gamma=1.0)
    >>> qp(torch.tensor([[0.0, 0.0, 0.0], [1.0, 0.0, 0.0]]))
    tensor([[ 0.3333,  0.3333,  0.3333],
            [-0.3333,  0.6667,  0.6667]])
    """

    def __init__(self, A: Any, b: Any, gamma: Any = 0.5) -> None:
        super().__init__()
        self._A = _as_matrix(A)
        m, n = self._A.shape
        self._b = _check_finite("b", _as_numpy(b))
        self._gamma = _check_finite("gamma", _as_numpy(gamma))
        if self._b.shape != (m,):
            raise ValueError(
                f"b has shape {self._b.shape}, but A is {m} x {n}: expected ({m},), one entry per row of A"
            )
        if self._gamma.shape not in ((), (n,)):
            raise ValueError(f"gamma has shape {self._gamma.shape}; expected one number or {n}, one per column of A")
        if not (self._gamma > 0).all():
            raise ValueError(f"gamma contains {self._gamma.min():g}; expected positive numbers only")
        self.precompute()

    def precompute(self) -> None:
        if self.device.type == "meta":
            return
        A, gamma = self._A, np.broadcast_to(self._gamma, self._A.shape[1:])
        self._solver = _factor_constraints(A, gamma, self.device, self.dtype)
        self.A = (
            SparseMatrix.of(A, self.device, self.dtype)
            if sparse.issparse(A)
            else torch.as_tensor(A, device=self.device, dtype=self.dtype)
        )
        self.At = self.A.T if isinstance(self.A, SparseMatrix) else None
        self.b = torch.as_tensor(self._b, device=self.device, dtype=self.dtype)
        self.gamma = torch.as_tensor(gamma.copy(), device=self.device, dtype=self.dtype)

    def forward(self, c: Tensor, b: Tensor | None = None) -> Tensor:
        """Return the minimiser z (..., n) for c (..., n). b (..., m) replaces the layer's b."""
        return self.solve(c, b).z

    def solve(self, c: Tensor, b: Tensor | None = None) -> Solution:
        """Return the minimiser and the dual variables lambda of Gz + c + A'lambda = 0."""
        m, n = self._A.shape
        c = self._check("c", c, n)
        b = self.b if b is None else self._check("b", b, m)
        batch = torch.broadcast_shapes(c.shape[:-1], b.shape[:-1])
        rhs = torch.cat([-c.expand(*batch, n), b.expand(*batch, m)], dim=-1)
        return Solution(*linear_map(rhs, self._kkt, self._kkt).split([n, m], dim=-1))

    def _kkt(self, rhs: Tensor) -> Tensor:
        """Solve the symmetric system at the top of this file for rhs (..., n + m)."""
        m, n = self._A.shape
        flat = rhs.reshape(math.prod(rhs.shape[:-1]), n + m).T
        c, b = -flat[:n], flat[n:]
        G = self.gamma[:, None]
        dual = self._solver(-(self.A.matmul(c / G) + b))
        At = self.A.T if self.At is None else self.At
        z = -(c + At.matmul(dual)) / G
        return torch.cat([z, dual]).T.reshape(rhs.shape)

    def _check(self, name: str, x: Tensor, size: int) -> Tensor:
        m, n = self._A.shape
        x = self.cast(name, x)
        if not x.ndim or x.shape[-1] != size:
            raise ValueError(f"{name} has shape {tuple(x.shape)}, but A is {m} x {n}: expected (..., {size})")
        if not _seen_finite(x):
            raise ValueError(f"{name} contains NaN or infinity; expected finite numbers")
        return x

    def extra_repr(self) -> str:
        m, n = self._A.shape
        kind = "sparse" if sparse.issparse(self._A) else "dense"
        return f"{n} variables, {m} constraints, {kind} A"

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k not in ("_solver", "A", "At")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.precompute()


def _factor_constraints(A: Any, gamma: np.ndarray, device: torch.device, dtype: torch.dtype) -> Solver:
    """Factor A G^-1 A'; raise ValueError that names the dependent rows of A if there are any."""
    is_sparse = sparse.issparse(A)
    S = A @ sparse.diags_array(1 / gamma) @ A.T if is_sparse else (A / gamma) @ A.T
    kind = SparseFactor if is_sparse else DenseFactor
    tolerance = 1e-13 if dtype == torch.float64 else 1e-6
    try:
        factor = kind(S, device, dtype)
        null = _null_vector(factor, S, tolerance, device, dtype)
    except np.linalg.LinAlgError:
        ridge = 1e-9 * (S.diagonal().max() or 1.0)
        shifted = S + ridge * (sparse.eye_array(A.shape[0]) if is_sparse else np.eye(A.shape[0]))
        null = _null_vector(kind(shifted, device, torch.float64), S, 1.0, device, torch.float64)
    if null is not None:
        rows = np.flatnonzero(np.abs(null) > 0.1 * np.abs(null).max())
        listed = ", ".join(map(str, rows[:8])) + (", ..." if len(rows) > 8 else "")
        what = f"row {listed} is" if len(rows) == 1 else f"a combination of rows {listed} is"
        raise ValueError(
            f"A ({A.shape[0]} x {A.shape[1]}) has dependent rows: {what} zero or nearly so; "
            "drop a redundant constraint, or add a slack variable to it"
        )
    return factor


def _null_vector(
    factor: Solver, S: Any, tolerance: float, device: torch.device, dtype: torch.dtype
) -> np.ndarray | None:
    """Return a vector x with |Sx| <= tolerance |S| |x| if inverse iteration finds one, else None."""
    x = np.random.default_rng(0).standard_normal((S.shape[0], 1))
    for _ in range(3):
        x = factor(torch.as_tensor(x, device=device, dtype=dtype)).double().cpu().numpy()
        x = x / np.abs(x).max()
    small = np.linalg.norm(S @ x) <= tolerance * S.diagonal().max() * np.linalg.norm(x)
    return x.ravel() if small else None


def _as_matrix(A: Any) -> Any:
    """Return A as a float64 numpy array or a scipy csr array."""
    if isinstance(A, Tensor) and A.layout != torch.strided:
        coo = A.detach().cpu().to_sparse_coo().coalesce()
        A = sparse.coo_array((coo.values().numpy(), tuple(coo.indices().numpy())), shape=tuple(coo.shape))
    A = sparse.csr_array(A, dtype=np.float64) if sparse.issparse(A) else _as_numpy(A)
    if A.ndim != 2 or 0 in A.shape:
        raise ValueError(f"A has shape {A.shape}; expected a matrix (constraints, variables) with at least one of each")
    if A.shape[0] > A.shape[1]:
        raise ValueError(f"A is {A.shape[0]} x {A.shape[1]}: more constraints than variables; drop the redundant ones")
    _check_finite("A", A.data if sparse.issparse(A) else A)
    return A


def _as_numpy(x: Any) -> np.ndarray:
    return np.asarray(x.detach().cpu() if isinstance(x, Tensor) else x, dtype=np.float64)


def _check_finite(name: str, x: np.ndarray) -> np.ndarray:
    bad = np.size(x) - int(np.isfinite(x).sum())
    if bad:
        raise ValueError(
            f"{name} contains {bad} NaN or infinite {'entry' if bad == 1 else 'entries'}; expected finite numbers"
        )
    return x


def _seen_finite(x: Tensor) -> bool:
    """Return whether x is finite; True in traces and under vmap, where values cannot be seen."""
    if torch.compiler.is_compiling():
        return True
    try:
        return bool(torch.isfinite(x).all())
    except RuntimeError as error:
        if "vmap" not in str(error):
            raise
        return True


def check_positive(name: str, value: float) -> float:
    """Return the value as a float; raise ValueError if it is not from MIN_POSITIVE to MAX_POSITIVE."""
    if not MIN_POSITIVE <= value <= MAX_POSITIVE:
        raise ValueError(f"{name} is {value}; expected a number from {MIN_POSITIVE} to {MAX_POSITIVE:,}")
    return float(value)
