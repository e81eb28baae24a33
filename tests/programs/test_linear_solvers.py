"""Solvers and sparse products against numpy, in compiled code, and in programs that another process loads.

tests/contracts compiles and exports every layer.
"""

import copy
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import sparse
from torch._subclasses.fake_tensor import FakeTensorMode

import cutslots
from cutslots import EqualityQP, GraphCut
from cutslots.programs import linear_solvers
from cutslots.programs.linear_solvers import (
    CSR,
    ConjugateGradients,
    DenseFactor,
    SparseFactor,
    SparseMatrix,
    csr_matmul,
    spd_solve,
)

CPU = torch.device("cpu")
SOLVERS = {
    "dense": lambda matrix, dtype: DenseFactor(matrix.toarray(), CPU, dtype),
    "sparse": lambda matrix, dtype: SparseFactor(matrix, CPU, dtype),
    "cg": lambda matrix, dtype: ConjugateGradients(matrix, CPU, dtype, 1e-6 if dtype == torch.float32 else 1e-13),
}


def spd_matrix(rng, n=12):
    """Return a sparse symmetric positive definite matrix."""
    B = sparse.random_array((n, n), density=0.3, rng=rng)
    return sparse.csr_array(B @ B.T + sparse.diags_array(np.linspace(1, 3, n)))


@pytest.mark.parametrize("name", SOLVERS)
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_solvers_equal_numpy(name, dtype, tolerance, rng):
    matrix, rhs = spd_matrix(rng), rng.standard_normal((12, 3))
    solver = SOLVERS[name](matrix, dtype)
    found = solver(torch.tensor(rhs, dtype=dtype))
    assert found.dtype == dtype and found.shape == (12, 3)
    assert np.abs(found.numpy() - np.linalg.solve(matrix.toarray(), rhs)).max() < tolerance
    transposed = torch.tensor(rhs.T.copy(), dtype=dtype).T  # not contiguous
    torch.testing.assert_close(solver(transposed), found)


@pytest.mark.parametrize("name", ["dense", "sparse"])
def test_matrices_that_are_not_positive_definite(name):
    matrix = sparse.csr_array(np.array([[1.0, 2.0], [2.0, 1.0]]))
    with pytest.raises(np.linalg.LinAlgError, match="ositive definite"):
        SOLVERS[name](matrix, torch.float64)


def test_a_float32_factor_is_rounded_after_factoring():
    """The factor of a matrix that float32 cannot hold apart from a singular one."""
    matrix = np.array([[1.0, 1.0 - 1e-9], [1.0 - 1e-9, 1.0]])
    assert DenseFactor(matrix, CPU, torch.float32).L.dtype == torch.float32


# ------------------------------------------------------------------------------------------------------ sparse matrices


def test_csr_by_hand():
    csr = CSR.of(np.array([[0.0, 2.0], [0.0, 0.0], [3.0, 4.0]]), CPU, torch.float32)
    assert (csr.crow.tolist(), csr.col.tolist(), csr.values.tolist()) == ([0, 1, 1, 3], [1, 0, 1], [2, 3, 4])
    assert csr.rows().tolist() == [0, 2, 2]
    assert csr.crow.dtype == csr.col.dtype == torch.int64 and csr.values.dtype == torch.float32
    assert csr.tensor(2).to_dense().tolist() == [[0, 2], [0, 0], [3, 4]] and csr.tensor(5).shape == (3, 5)


def test_csr_on_another_device():
    csr = CSR.of(np.eye(3), torch.device("meta"), torch.float64)
    assert all(part.is_meta for part in csr)


def test_sparse_matrices_and_their_transposes(rng):
    dense = rng.standard_normal((4, 6)) * (rng.random((4, 6)) < 0.5)
    matrix = SparseMatrix.of(sparse.csr_array(dense), CPU, torch.float64)
    x, y = torch.tensor(rng.standard_normal((6, 2))), torch.tensor(rng.standard_normal((4, 2)))
    torch.testing.assert_close(matrix.matmul(x), torch.tensor(dense) @ x)
    torch.testing.assert_close(matrix.T.matmul(y), torch.tensor(dense).T @ y)
    torch.testing.assert_close(matrix.T.T.matmul(x), torch.tensor(dense) @ x)


# -------------------------------------------------------------------------------------------------- conjugate gradients


def count_products(matrix, rhs, tolerance):
    """Return the solution and the number of products with the matrix."""
    solver = ConjugateGradients(matrix, CPU, torch.float64, tolerance)._solve
    counted, original = [], solver.matrix

    class Counted:
        def __matmul__(self, x):
            counted.append(1)
            return original @ x

    solver.matrix = Counted()
    return solver(torch.tensor(rhs)), len(counted)


def test_a_diagonal_matrix_takes_one_iteration(rng):
    """The preconditioner is its inverse. Convergence is tested every fourth iteration."""
    matrix, rhs = sparse.csr_array(sparse.diags_array(np.array([1.0, 5.0, 100.0]))), rng.standard_normal((3, 2))
    x, products = count_products(matrix, rhs, 1e-12)
    np.testing.assert_allclose(x.numpy(), rhs / np.array([[1.0], [5.0], [100.0]]), rtol=1e-14)
    assert products == 4
    assert count_products(matrix, np.zeros((3, 2)), 1e-12)[1] == 0


def test_residuals_end_below_the_tolerance_in_the_norm_of_the_preconditioner(rng):
    n = 200
    edges = rng.integers(0, n, (2, 600))
    adjacency = sparse.coo_array((np.ones(600), tuple(edges)), shape=(n, n))
    adjacency = sparse.csr_array(adjacency + adjacency.T)
    matrix = sparse.csr_array(sparse.diags_array(adjacency.sum(1) + 1) - adjacency)
    rhs, D = rng.standard_normal((n, 3)) * [1.0, 1e6, 1e-6], matrix.diagonal()[:, None]
    norm = lambda r: np.sqrt((r * r / D).sum(0))
    products = []
    for tolerance in (1e-2, 1e-5, 1e-8):
        x, count = count_products(matrix, rhs, tolerance)
        assert (norm(rhs - matrix @ x.numpy()) <= 1.01 * tolerance * norm(rhs)).all()
        products.append(count)
    assert products[0] < products[1] < products[2] < 60 and all(count % 4 == 0 for count in products)


def test_the_message_of_iterations_that_do_not_converge(monkeypatch):
    monkeypatch.setattr(linear_solvers, "MAX_ITERATIONS", 1)
    matrix = sparse.csr_array(np.array([[2.0, 1.0], [1.0, 2.0]]))
    solver = ConjugateGradients(matrix, CPU, torch.float64, 1e-9)
    # The first step is z = r/2 = (1/2, 0): x = (1/2, 0), and the residual (0, -1/2) is half of the right-hand side.
    message = (
        "conjugate gradients reached a residual of 5e-01 in 1 iterations; "
        "expected 1e-09: increase the tolerance, or factor the matrix"
    )
    with pytest.raises(RuntimeError, match=f"^{message}$"):
        solver(torch.tensor([[1.0], [0.0]], dtype=torch.float64))


def test_the_right_hand_side_is_not_changed(rng):
    matrix, rhs = spd_matrix(rng), torch.tensor(rng.standard_normal((12, 2)))
    before = rhs.clone()
    for make in SOLVERS.values():
        make(matrix, torch.float64)(rhs)
        assert torch.equal(rhs, before)


# ----------------------------------------------------------------------------------------------------------- custom ops


@pytest.mark.parametrize("tolerance", [0.0, 1e-13])
def test_ops_equal_numpy_and_have_gradients(tolerance, rng):
    matrix = spd_matrix(rng, 6)
    csr = CSR.of(matrix, CPU, torch.float64)
    rhs = torch.tensor(rng.standard_normal((6, 2)), requires_grad=True)
    np.testing.assert_allclose(
        spd_solve(rhs, *csr, tolerance).detach(), np.linalg.solve(matrix.toarray(), rhs.detach()), atol=1e-11
    )
    assert torch.autograd.gradcheck(lambda x: spd_solve(x, *csr, tolerance), rhs)


def test_product_op(rng):
    dense = rng.standard_normal((4, 6))
    csr, transposed = CSR.of(dense, CPU, torch.float64), CSR.of(dense.T, CPU, torch.float64)
    x = torch.tensor(rng.standard_normal((6, 2)), requires_grad=True)
    product = lambda x: csr_matmul(x, *csr, *transposed)
    np.testing.assert_allclose(product(x).detach(), dense @ x.detach().numpy(), atol=1e-13)
    assert torch.autograd.gradcheck(product, x) and torch.autograd.gradgradcheck(product, x)


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_ops_under_vmap(dim, rng):
    dense = rng.standard_normal((4, 6))
    csr, transposed = CSR.of(dense, CPU, torch.float64), CSR.of(dense.T, CPU, torch.float64)
    x = torch.tensor(rng.standard_normal((3, 6, 2)))
    product = torch.func.vmap(lambda x: csr_matmul(x, *csr, *transposed), dim)(x.movedim(0, dim))
    torch.testing.assert_close(product, torch.tensor(dense) @ x)
    matrix = spd_matrix(rng, 6)
    spd = CSR.of(matrix, CPU, torch.float64)
    solved = torch.func.vmap(lambda x: spd_solve(x, *spd, 0.0), dim)(x.movedim(0, dim))
    torch.testing.assert_close(torch.tensor(matrix.toarray()) @ solved, x)


def test_shapes_of_ops_on_the_meta_device():
    csr = [part.to("meta") for part in CSR.of(np.ones((4, 6)), CPU, torch.float64)]
    x = torch.empty(6, 2, device="meta", dtype=torch.float64)
    assert csr_matmul(x, *csr, *csr).shape == (4, 2)
    square = [part.to("meta") for part in CSR.of(np.eye(6), CPU, torch.float64)]
    assert spd_solve(x, *square, 0.0).shape == (6, 2)


def test_a_matrix_is_factored_once(rng, monkeypatch):
    made, original = [], linear_solvers._Cholesky
    monkeypatch.setattr(linear_solvers, "_Cholesky", lambda *given: made.append(1) or original(*given))
    matrix, rhs = spd_matrix(rng, 6), torch.ones(6, 1, dtype=torch.float64)
    solver = SparseFactor(matrix, CPU, torch.float64)
    for _ in range(2):
        solver(rhs)
        spd_solve(rhs, *solver.csr, 0.0)
    assert len(made) == 1
    SparseFactor(matrix, CPU, torch.float64)
    assert len(made) == 2, "another layer has another factor"


def test_solvers_of_ops_follow_the_tolerance(rng):
    for tolerance, kind in ((0.0, linear_solvers._Cholesky), (1e-9, linear_solvers._ConjugateGradients)):
        csr = CSR.of(spd_matrix(rng, 6), CPU, torch.float64)
        spd_solve(torch.ones(6, 1, dtype=torch.float64), *csr, tolerance)
        assert type(linear_solvers._SOLVERS[csr.values]) is kind


def test_matrices_have_the_precision_of_their_layer(rng):
    """A factor is computed from float64 whatever its own precision."""
    matrix = spd_matrix(rng, 6)
    for dtype in (torch.float32, torch.float64):
        product = SparseMatrix.of(matrix, CPU, dtype)
        assert product.csr.values.dtype == product.transposed.values.dtype == dtype
        assert ConjugateGradients(matrix, CPU, dtype, 0.1).csr.values.dtype == dtype
        assert SparseFactor(matrix.astype(np.float32), CPU, dtype).csr.values.dtype == torch.float64
    assert DenseFactor(np.eye(2), torch.device("meta"), torch.float32).L.is_meta


def test_fake_tensors_are_traced(rng):
    """The ops stand for solvers and products, which have no fake implementations."""
    matrix = spd_matrix(rng, 6)
    solver, product = SparseFactor(matrix, CPU, torch.float64), SparseMatrix.of(matrix[:4], CPU, torch.float64)
    transposed = product.T
    assert not linear_solvers._is_traced(torch.empty(2))
    with FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.empty(6, 2, dtype=torch.float64)
        assert linear_solvers._is_traced(x) and solver(x).shape == (6, 2)
        assert product.matmul(x).shape == (4, 2) and transposed.matmul(x[:4]).shape == (6, 2)


def test_cholespy_takes_128_columns_on_cuda():
    class OnCUDA(torch.Tensor):
        is_cuda = True

    solver, widths = linear_solvers._Cholesky.__new__(linear_solvers._Cholesky), []
    solver._solve = lambda rhs: widths.append(rhs.shape[1]) or 2 * rhs
    for columns, expected in ((128, [128]), (129, [128, 1]), (300, [128, 128, 44])):
        rhs = torch.randn(3, columns)
        assert torch.equal(torch.Tensor(solver(rhs.as_subclass(OnCUDA))), 2 * rhs) and widths == expected
        widths.clear()
    solver(torch.randn(3, 300))
    assert widths == [300], "on the CPU any number"


def test_factors_are_released_at_exit(monkeypatch):
    class Factor:
        solver = None

    factor = Factor()
    factor.solver = object()
    monkeypatch.setattr(linear_solvers, "_FACTORS", {factor})
    for _ in range(2):  # also if it is released already
        linear_solvers._release_solvers()
        assert not vars(factor)


def test_divisions_by_zero_are_by_one():
    assert linear_solvers._nonzero(torch.tensor([0.0, 2.0, -3.0])).tolist() == [1.0, 2.0, -3.0]


# ------------------------------------------------------------------------------------------------------------ in layers

PACKAGE = str(Path(cutslots.__file__).parents[1])
EDGES = np.random.default_rng(0).integers(0, 5, (7, 2))
A = np.random.default_rng(0).standard_normal((3, 6)) + 3 * np.eye(3, 6)
CASES = {
    "GraphCut": lambda: (GraphCut(EDGES, 5, solver="cholesky"), (17,)),
    "EqualityQP": lambda: (EqualityQP(sparse.csr_array(A), [1.0, 2.0, 3.0]), (6,)),
}


@pytest.fixture(autouse=True)
def nothing_compiled():
    torch.compiler.reset()  # dynamo counts recompilations of a module's code over all its layers


@pytest.mark.parametrize("name", CASES)
def test_compiled_by_inductor(name):
    layer, shape = CASES[name]()
    x = torch.randn(3, *shape, requires_grad=True)
    compiled = torch.compile(layer, fullgraph=True)
    torch.testing.assert_close(compiled(x), layer(x), rtol=0, atol=1e-5)
    one, other = (torch.autograd.grad(f(x).square().sum(), x)[0] for f in (compiled, layer))
    torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


def test_solvers_are_released_with_their_layer():
    before = len(linear_solvers._SOLVERS)
    cut = GraphCut(EDGES, 5, solver="cholesky")
    twin = copy.deepcopy(cut)
    assert len(linear_solvers._SOLVERS) == before + 2
    del cut, twin
    assert len(linear_solvers._SOLVERS) == before


def test_exported_program_runs_in_another_process(tmp_path):
    layer, shape = CASES["GraphCut"]()
    x = torch.randn(2, *shape)
    torch.export.save(torch.export.export(layer, (x,)), tmp_path / "cut.pt2")
    torch.save(x, tmp_path / "x.pt")
    script = (
        "import sys, torch, cutslots.programs.linear_solvers\n"
        "folder = sys.argv[1]\n"
        "p = torch.export.load(folder + '/cut.pt2').module()(torch.load(folder + '/x.pt'))\n"
        "torch.save(p, folder + '/p.pt')\n"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True, env=os.environ | {"PYTHONPATH": PACKAGE})
    torch.testing.assert_close(torch.load(tmp_path / "p.pt"), layer(x), rtol=0, atol=1e-6)
