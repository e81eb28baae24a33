"""The equality-constrained quadratic program (QP) as a differentiable layer (the paper's eq. 4 to 6).

    minimise 1/2 z'Gz + c'z  subject to  Az = b            [ G  A' ] [ z      ]   [ -c ]
    with G = gamma I or a positive diagonal                [ A  0  ] [ lambda ] = [  b ]

A and G are fixed, so S = A G^-1 A' is factored once; each solve is then two triangular substitutions:

    S lambda = -(A G^-1 c + b),   z = -G^-1 (c + A' lambda).

Rows of A are first scaled to similar norms, by powers of two, which are exact. If S is still ill-conditioned for the
precision of the layer, the layer computes in float64 and refines each solution by its residuals in the system above,
which depend on the condition number of A and not on its square, that of S.

The solution is linear in (c, b) and its matrix is symmetric. The backward pass is therefore the same solve, and so are
derivatives of any order, in forward and in reverse mode. `linear_map` tells autograd so; the cut layers use it too.

The paper prints gamma ||z||^2 in one place and G = gamma I in another, which differ by a factor of two in gamma. This
module takes G = gamma I, as the paper's solution formula does.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy import sparse
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor, is_legacy_batchedtensor
from torch.autograd import forward_ad

from cutslots.programs.constants import ConstantLayer
from cutslots.programs.linear_solvers import DenseFactor, Solver, SparseFactor, SparseMatrix

Map = Callable[[Tensor], Tensor]

# Bounds of regularisers, reaches and temperatures. Beyond them float32 overflows: 1e-6 twice is a factor of 1e12 on w.
MIN_POSITIVE, MAX_POSITIVE = 1e-6, 10**6
# Largest condition number of S times machine epsilon: about the relative error of one solve.
MAX_ERROR = {torch.float32: 1e-3, torch.float64: 1e-2}  # float64 is refined
REFINED_ERROR = 1e-9  # from this error in float64 on, solutions are refined
REFINEMENTS = 3
MAX_VMAP_LEVELS = 64  # of torch's older vmap


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
    def forward(x: Tensor, apply: Map, adjoint: Map) -> Tensor:
        if is_legacy_batchedtensor(x):
            apply = partial(_apply_legacy_batched, apply)
        y = _ReverseLinearMap.forward(x, apply, adjoint)
        in_forward_mode = forward_ad._current_level >= 0  # where a view needs a tangent of the same strides
        return y.clone(memory_format=torch.contiguous_format) if in_forward_mode and y._is_view() else y

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        return linear_map(tangent, ctx.map, ctx.adjoint)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int, None, None], x: Tensor, apply: Map, adjoint: Map) -> tuple[Tensor, int]:
        return linear_map(x.movedim(in_dims[0], 0), apply, adjoint), 0


# torch inspects this signature on every call, and computing it takes longer than a small cut.
_LinearMap.forward.__signature__ = inspect.signature(_LinearMap.forward)  # type: ignore[attr-defined]


def _apply_legacy_batched(apply: Map, x: Tensor) -> Tensor:
    """Apply a map to a batched tensor of torch's older vmap: a batch is a leading dimension.

    `torch.autograd.grad(is_grads_batched=True)` and `torch.autograd.functional.jacobian(vectorize=True)` use that vmap.
    It has no rules for in-place writes, sparse products and kernels. Which level of vmap it is, is found by trial:
    torch counts levels by thread, and the backward pass on CUDA has a thread of its own.
    """
    for level in range(1, MAX_VMAP_LEVELS + 1):
        whole = torch._remove_batch_dim(x, level, 1, 0)  # 1 is not used if x has a batch at this level
        if not is_legacy_batchedtensor(whole):
            return torch._add_batch_dim(apply(whole).contiguous(), 0, level)
    raise RuntimeError("torch's older vmap is nested; expected one level of it")


def linear_map(x: Tensor, apply: Map, adjoint: Map, *, traced: bool = False) -> Tensor:
    """Return `apply(x)`, differentiated by `adjoint` instead of through the operations inside `apply`.

    Both are linear, act on trailing dimensions and accept any leading ones. Nothing is saved for the backward pass. In
    forward mode the map is its own derivative. With `traced`, compiled code differentiates the operations inside
    `apply`: torch 2.11 traces a function that is its own adjoint to a gradient of zero, without an error.
    """
    if torch.compiler.is_compiling():  # torch.compile does not trace functions with a jvp
        if not traced:
            return _ReverseLinearMap.apply(x, apply, adjoint)
        with torch.autocast(x.device.type, enabled=False):
            return apply(x)
    if needs_no_derivative(x):
        return _ReverseLinearMap.forward(x, apply, adjoint)
    return _LinearMap.apply(x, apply, adjoint)


def needs_no_derivative(x: Tensor) -> bool:
    """Return whether x is a plain tensor outside autograd. A function of autograd takes longer than a small cut."""
    in_reverse_mode = x.requires_grad and torch.is_grad_enabled()
    in_forward_mode = forward_ad._current_level >= 0
    return not (in_reverse_mode or in_forward_mode or is_functorch_wrapped_tensor(x) or is_legacy_batchedtensor(x))


class SolverLayer(ConstantLayer):
    """A layer that solves a problem with fixed constants. They are computed in float64 and rounded to its precision.

    A layer converted to half precision computes in float32. The state dict is empty.
    """

    _home: torch.device | None = None  # of constants that are not buffers

    def materialize(self, x: Tensor) -> None:
        super().materialize(x)
        if self._home is not None and self._home != self.device:  # a replica of nn.DataParallel: only buffers move
            self.precompute()

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
    is the diagonal of G: one positive number, or n of them. A float32 layer computes in float64 if A needs it.

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
        gamma = np.broadcast_to(self._gamma, self._A.shape[1:])
        scale = _row_scales(self._A, gamma)
        A = (
            sparse.csr_array(sparse.diags_array(scale) @ self._A)
            if sparse.issparse(self._A)
            else scale[:, None] * self._A
        )
        self._solver, self._precision, error = _factor_constraints(A, gamma, self.device, self.dtype)
        self._refinements = REFINEMENTS if self._precision == torch.float64 and error > REFINED_ERROR else 0
        self.A = (
            SparseMatrix.of(A, self.device, self._precision)
            if sparse.issparse(A)
            else torch.as_tensor(A, device=self.device, dtype=self._precision)
        )
        self.At = self.A.T if isinstance(self.A, SparseMatrix) else None
        as_tensor = partial(torch.tensor, device=self.device, dtype=self._precision)
        self._scale = as_tensor(scale)[:, None] if (scale != 1).any() else None
        self.gamma = as_tensor(gamma)
        self.b = torch.tensor(self._b, device=self.device, dtype=self.dtype)
        self._home = self.device

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
        return Solution(*linear_map(rhs, self._kkt, self._kkt, traced=True).split([n, m], dim=-1))

    def _kkt(self, rhs: Tensor) -> Tensor:
        """Solve the symmetric system at the top of this file for rhs (..., n + m)."""
        m, n = self._A.shape
        flat = rhs.reshape(math.prod(rhs.shape[:-1]), n + m).T.to(self._precision)
        r, b = flat[:n], flat[n:] if self._scale is None else self._scale * flat[n:]
        z, dual = self._scaled_kkt(r, b)
        for _ in range(self._refinements):
            z_error, dual_error = self._scaled_kkt(*self._residuals(r, b, z, dual))
            z, dual = z + z_error, dual + dual_error
        dual = dual if self._scale is None else self._scale * dual
        return torch.cat([z, dual]).T.reshape(rhs.shape).to(rhs.dtype)

    def _scaled_kkt(self, r: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Solve Gz + A'lambda = r, Az = b for the scaled A, r (n, columns) and b (m, columns)."""
        G = self.gamma[:, None]
        dual = self._solver(self.A.matmul(r / G) - b)
        return (r - self._transposed().matmul(dual)) / G, dual

    def _residuals(self, r: Tensor, b: Tensor, z: Tensor, dual: Tensor) -> tuple[Tensor, Tensor]:
        return r - self.gamma[:, None] * z - self._transposed().matmul(dual), b - self.A.matmul(z)

    def _transposed(self) -> Any:
        return self.A.T if self.At is None else self.At

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


def _row_scales(A: Any, gamma: np.ndarray) -> np.ndarray:
    """Return powers of two (m,) that give the rows of A G^-1/2 similar norms; 1 where they all have."""
    W = abs(A @ sparse.diags_array(gamma**-0.5) if sparse.issparse(A) else A * gamma**-0.5)
    largest = np.asarray(W.max(axis=1).toarray() if sparse.issparse(W) else W.max(axis=1)).ravel()
    largest[largest == 0] = 1.0
    W = _scale_rows(W, 1 / largest)  # squares of the rows themselves may overflow
    exponents = np.round(np.log2(largest) + np.log2(np.maximum((W * W).sum(axis=1), 1)) / 2)
    return np.exp2(np.round(np.median(exponents)) - exponents) if np.ptp(exponents) else np.ones_like(largest)


def _scale_rows(A: Any, scale: np.ndarray) -> Any:
    return sparse.csr_array(sparse.diags_array(scale) @ A) if sparse.issparse(A) else A * scale[:, None]


def _factor_constraints(
    A: Any, gamma: np.ndarray, device: torch.device, dtype: torch.dtype
) -> tuple[Solver, torch.dtype, float]:
    """Factor A G^-1 A' in `dtype`, or in float64 if that is not enough.

    Return the factor, its precision and the relative error of a solve. Raise ValueError if float64 is not enough.
    """
    is_sparse = sparse.issparse(A)
    S = A @ sparse.diags_array(1 / gamma) @ A.T if is_sparse else (A / gamma) @ A.T
    kind = SparseFactor if is_sparse else DenseFactor
    for precision in dict.fromkeys((dtype, torch.float64)):
        try:
            factor = kind(S, device, precision)
        except np.linalg.LinAlgError:
            continue
        inverse_norm, _ = _inverse_iteration(factor, A.shape[0], device, precision)
        error = inverse_norm * _norm(S) * torch.finfo(precision).eps
        if error <= MAX_ERROR[precision]:
            return factor, precision, error
    ridge = 1e-10 * (_norm(S) or 1.0)
    shifted = S + ridge * (sparse.eye_array(A.shape[0]) if is_sparse else np.eye(A.shape[0]))
    _, x = _inverse_iteration(kind(shifted, device, torch.float64), A.shape[0], device, torch.float64)
    smallest = float(np.linalg.norm((x @ A) * gamma**-0.5)) / (_norm(S) ** 0.5 or 1.0)
    raise ValueError(_describe_dependence(A, x, smallest))


def _norm(S: Any) -> float:
    """Return the 2-norm of a symmetric matrix, by power iteration: a lower bound, exact to some percent."""
    x = np.random.default_rng(0).standard_normal(S.shape[0])
    norm = 0.0
    for _ in range(20):
        x = S @ (x / (np.linalg.norm(x) or 1.0))
        norm = max(norm, float(np.linalg.norm(x)))
    return norm


def _inverse_iteration(
    factor: Solver, size: int, device: torch.device, precision: torch.dtype
) -> tuple[float, np.ndarray]:
    """Return the norm of the inverse and a unit vector near the eigenvector of the smallest eigenvalue."""
    x = torch.as_tensor(np.random.default_rng(0).standard_normal((size, 1)), device=device, dtype=precision)
    growth = 0.0
    for _ in range(5):
        y = factor(x / x.norm())
        growth = float(y.norm())
        if not (math.isfinite(growth) and growth):
            return math.inf, x.double().cpu().numpy().ravel()
        x = y
    return growth, (x / x.norm()).double().cpu().numpy().ravel()


def _describe_dependence(A: Any, x: np.ndarray, smallest: float) -> str:
    """Return the error for rows whose combination x'A is nearly zero; `smallest` is one over the condition number."""
    rows = np.flatnonzero(np.abs(x) > 0.1 * np.abs(x).max())
    listed = ", ".join(map(str, rows[:8])) + (", ..." if len(rows) > 8 else "")
    size = f"A ({A.shape[0]} x {A.shape[1]})"
    if smallest < 1e-12:
        what = f"row {listed} is" if len(rows) == 1 else f"a combination of rows {listed} is"
        return (
            f"{size} has dependent rows: {what} zero or nearly so; "
            "drop a redundant constraint, or add a slack variable to it"
        )
    limit = (MAX_ERROR[torch.float64] / torch.finfo(torch.float64).eps) ** 0.5
    return (
        f"{size} has full rank but a condition number of {1 / smallest:.0e}, with rows scaled to equal norms and "
        f"columns divided by the square root of gamma; expected at most {limit:.0e}: rows {listed} are nearly "
        "dependent; replace one of them by their difference, or drop it"
    )


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
