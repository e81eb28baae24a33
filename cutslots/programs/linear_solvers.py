"""Solvers of symmetric positive definite systems, and sparse products, that torch can trace.

    DenseFactor          dense Cholesky
    SparseFactor         sparse Cholesky by cholespy
    ConjugateGradients   iterations with the Jacobi preconditioner: no factor to compute or to store

A solver is called with right-hand sides (n, columns). torch cannot trace sparse tensors or the objects of cholespy.
Compiled and exported code therefore calls two custom ops, which take a matrix as the plain tensors of its CSR form:

    cutslots::spd_solve    M^-1 x; an exported program factors M when it first runs
    cutslots::csr_matmul   Ax

Both ops are linear, so their derivatives of any order are the ops themselves.
"""

from __future__ import annotations

import atexit
import warnings
import weakref
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from scipy import sparse
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

MAX_ITERATIONS = 1000  # a graph cut takes tens


class Solver(Protocol):
    """A symmetric positive definite matrix (n, n); `solver(rhs)` solves for rhs (n, columns)."""

    def __call__(self, rhs: Tensor) -> Tensor: ...


class DenseFactor:
    """Dense Cholesky by torch."""

    def __init__(self, matrix: np.ndarray, device: torch.device, dtype: torch.dtype) -> None:
        L, failed = torch.linalg.cholesky_ex(torch.as_tensor(matrix, dtype=torch.float64, device="cpu"))
        if failed:
            raise np.linalg.LinAlgError("not positive definite")
        self.L = L.to(device, dtype)

    def __call__(self, rhs: Tensor) -> Tensor:
        return torch.cholesky_solve(rhs, self.L)


class CSR(NamedTuple):
    """The tensors of a sparse matrix."""

    crow: Tensor
    col: Tensor
    values: Tensor

    @staticmethod
    def of(matrix: Any, device: torch.device, dtype: torch.dtype) -> CSR:
        """Convert a scipy matrix."""
        csr = sparse.csr_array(matrix)
        crow, col = (torch.as_tensor(i.astype(np.int64), device=device) for i in (csr.indptr, csr.indices))
        return CSR(crow, col, torch.as_tensor(csr.data, device=device, dtype=dtype))

    def rows(self) -> Tensor:
        """Return the row of every entry."""
        return torch.arange(len(self.crow) - 1, device=self.crow.device).repeat_interleave(self.crow.diff())

    def tensor(self, num_columns: int) -> Tensor:
        """Return a torch sparse tensor that shares the memory."""
        with warnings.catch_warnings(action="ignore"):  # torch warns once that its CSR layout is in beta
            return torch.sparse_csr_tensor(*self, size=(len(self.crow) - 1, num_columns), device=self.crow.device)


class SparseMatrix:
    """A sparse matrix and its transpose. `matrix.matmul(x)` takes x (columns, n)."""

    def __init__(self, csr: CSR, transposed: CSR) -> None:
        self.csr, self.transposed = csr, transposed
        self._tensor = csr.tensor(len(transposed.crow) - 1)

    @staticmethod
    def of(matrix: Any, device: torch.device, dtype: torch.dtype) -> SparseMatrix:
        """Convert a scipy matrix."""
        return SparseMatrix(CSR.of(matrix, device, dtype), CSR.of(matrix.T, device, dtype))

    @property
    def T(self) -> SparseMatrix:
        return SparseMatrix(self.transposed, self.csr)

    def matmul(self, x: Tensor) -> Tensor:
        if _is_traced(x):
            return csr_matmul(x, *self.csr, *self.transposed)
        return self._tensor @ x


class SparseSolver:
    """A solver of a sparse matrix. In a trace it is the op `spd_solve`."""

    def __init__(self, csr: CSR, dtype: torch.dtype, tolerance: float) -> None:
        self.csr, self.tolerance = csr, tolerance
        self._solve = _solver(csr, dtype, tolerance)

    def __call__(self, rhs: Tensor) -> Tensor:
        if _is_traced(rhs):
            return spd_solve(rhs, *self.csr, self.tolerance)
        return self._solve(rhs)


class SparseFactor(SparseSolver):
    """Sparse Cholesky by cholespy (CHOLMOD on the CPU, its own kernels on CUDA)."""

    def __init__(self, matrix: Any, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(CSR.of(matrix, device, torch.float64), dtype, tolerance=0.0)


class ConjugateGradients(SparseSolver):
    """Conjugate gradients with the Jacobi preconditioner, all columns at once.

    A column r of the residuals ends below `tolerance` times its right-hand side, both in the norm of the
    preconditioner, sqrt(r' D^-1 r). Raises RuntimeError if it does not get there.
    """

    def __init__(self, matrix: Any, device: torch.device, dtype: torch.dtype, tolerance: float) -> None:
        super().__init__(CSR.of(matrix, device, dtype), dtype, tolerance)


def _is_traced(x: Tensor) -> bool:
    return torch.compiler.is_compiling() or type(x) is not Tensor


# ------------------------------------------------------------------------------------------------------ outside a trace


class _Cholesky:
    MAX_COLUMNS = 128  # cholespy's limit of right-hand sides per call on CUDA

    def __init__(self, csr: CSR, dtype: torch.dtype) -> None:
        import cholespy

        n, row, col = len(csr.crow) - 1, csr.rows().int(), csr.col.int()
        kind = cholespy.CholeskySolverD if dtype == torch.float64 else cholespy.CholeskySolverF
        try:
            self.solver = kind(n, row, col, csr.values, cholespy.MatrixType.COO)
        except ValueError as error:  # "Matrix is not positive definite!"
            raise np.linalg.LinAlgError(str(error)) from None
        _FACTORS.add(self)

    def __call__(self, rhs: Tensor) -> Tensor:
        if not rhs.is_cuda or rhs.shape[1] <= self.MAX_COLUMNS:
            return self._solve(rhs.contiguous())
        return torch.cat([self._solve(chunk.contiguous()) for chunk in rhs.split(self.MAX_COLUMNS, dim=1)], dim=1)

    def _solve(self, rhs: Tensor) -> Tensor:
        out = torch.zeros_like(rhs)
        if rhs.numel():
            self.solver.solve(rhs, out)
        return out


class _ConjugateGradients:
    def __init__(self, csr: CSR, tolerance: float) -> None:
        n = len(csr.crow) - 1
        self.matrix, self.tolerance = csr.tensor(n), tolerance
        self.inverse_diagonal = 1 / csr.values[csr.rows() == csr.col][:, None]

    def __call__(self, rhs: Tensor) -> Tensor:
        x, r = torch.zeros_like(rhs, memory_format=torch.contiguous_format), rhs.contiguous().clone()
        direction = z = self.inverse_diagonal * r
        rz = (r * z).sum(0)
        enough = self.tolerance**2 * rz
        for iteration in range(MAX_ITERATIONS):
            if iteration % 4 == 0 and not (rz > enough).any():  # a column with NaN ends at once
                return x
            product = self.matrix @ direction
            step = rz / _nonzero((direction * product).sum(0))
            x.addcmul_(step, direction)
            r.addcmul_(step, product, value=-1)
            z = self.inverse_diagonal * r
            rz, before = (r * z).sum(0), rz
            direction = z.addcmul_(rz / _nonzero(before), direction)
        residual = float((rz / _nonzero(enough)).max().sqrt() * self.tolerance)
        raise RuntimeError(
            f"conjugate gradients reached a residual of {residual:.0e} in {MAX_ITERATIONS} iterations; "
            f"expected {self.tolerance:g}: increase the tolerance, or factor the matrix"
        )


def _nonzero(x: Tensor) -> Tensor:
    return torch.where(x == 0, 1, x)


_FACTORS: weakref.WeakSet[_Cholesky] = weakref.WeakSet()
_SOLVERS = WeakTensorKeyDictionary()  # by the values of the matrix: ops take tensors only


def _solver(csr: CSR, dtype: torch.dtype, tolerance: float) -> Solver:
    """Return the solver of a matrix, from an earlier call if there was one."""
    solver: Solver | None = _SOLVERS.get(csr.values)
    if solver is None:
        solver = _ConjugateGradients(csr, tolerance) if tolerance else _Cholesky(csr, dtype)
        _SOLVERS[csr.values] = solver
    return solver


@atexit.register
def _release_solvers() -> None:
    """Release all solvers at exit: cholespy prints a report of leaks for those that outlive the interpreter."""
    for factor in _FACTORS:
        vars(factor).pop("solver", None)


# ----------------------------------------------------------------------------------------------------------- custom ops


@torch.library.custom_op("cutslots::spd_solve", mutates_args=())
def spd_solve(rhs: Tensor, crow: Tensor, col: Tensor, values: Tensor, tolerance: float) -> Tensor:
    """Solve Mx = rhs (n, columns), by a factor if the tolerance is zero and by conjugate gradients otherwise."""
    return _solver(CSR(crow, col, values), rhs.dtype, tolerance)(rhs)


@torch.library.custom_op("cutslots::csr_matmul", mutates_args=())
def csr_matmul(
    x: Tensor, crow: Tensor, col: Tensor, values: Tensor, crow_t: Tensor, col_t: Tensor, values_t: Tensor
) -> Tensor:
    """Return Ax for A and its transpose."""
    return CSR(crow, col, values).tensor(len(x)) @ x


@spd_solve.register_fake
def _(rhs: Tensor, crow: Tensor, col: Tensor, values: Tensor, tolerance: float) -> Tensor:
    return rhs.new_empty(rhs.shape)


@csr_matmul.register_fake
def _(x: Tensor, crow: Tensor, *parts: Tensor) -> Tensor:
    return x.new_empty(len(crow) - 1, x.shape[1])


def _save_solve(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, *parts, ctx.tolerance = inputs
    ctx.save_for_backward(*parts)


def _save_matmul(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:])


def _backward_solve(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return spd_solve(grad, *ctx.saved_tensors, ctx.tolerance), None, None, None, None


def _backward_matmul(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    parts = ctx.saved_tensors
    return csr_matmul(grad, *parts[3:], *parts[:3]), *[None] * 6


spd_solve.register_autograd(_backward_solve, setup_context=_save_solve)
csr_matmul.register_autograd(_backward_matmul, setup_context=_save_matmul)


def _as_columns(op: Any) -> Any:
    """Return the rule for vmap of an op on x (n, columns): a batch is more columns."""

    def vmap(info: Any, in_dims: tuple[int | None, ...], x: Tensor, *rest: Any) -> tuple[Tensor, int]:
        batched = x.movedim(in_dims[0], -1)  # type: ignore[arg-type]
        return op(batched.flatten(1), *rest).unflatten(1, batched.shape[1:]), 2

    return vmap


spd_solve.register_vmap(_as_columns(spd_solve))
csr_matmul.register_vmap(_as_columns(csr_matmul))
