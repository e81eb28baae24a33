import copy
import re

import numpy as np
import osqp
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import sparse
from torch.autograd import gradcheck, gradgradcheck

from cutslots import EqualityQP, Graph
from cutslots.programs.graph import SparseQP
from cutslots.programs.linear_solvers import DenseFactor, SparseFactor, SparseMatrix
from cutslots.programs.qp import _norm, _row_scales, check_positive, linear_map
from tests.conftest import DEVICES
from tests.programs.literal import solve_literal


def random_qp(rng, m=5, n=12, density=0.6):
    """Return a QP with full row rank as (dense A, b, diagonal of G)."""
    A = rng.standard_normal((m, n)) * (rng.random((m, n)) < density)
    A[:, :m] += 3 * np.eye(m)
    return A, rng.standard_normal(m), rng.uniform(0.2, 2.0, n)


KINDS = {
    "dense": lambda A: A,
    "tensor": torch.tensor,
    "scipy": sparse.csc_matrix,
    "torch sparse": lambda A: torch.tensor(A).to_sparse(),
    "torch csr": lambda A: torch.tensor(A).to_sparse_csr(),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("diagonal", [False, True])
@pytest.mark.parametrize("device", DEVICES)
def test_solution_equals_the_literal_qp(rng, kind, diagonal, device):
    A, b, gamma = random_qp(rng)
    gamma = gamma if diagonal else 0.7
    c = rng.standard_normal((2, 3, 12))
    expected = solve_literal(SparseQP(sparse.csr_array(A), b, {}), c, gamma)
    qp = EqualityQP(KINDS[kind](A), b, gamma).double().to(device)
    z, dual = qp.solve(torch.tensor(c, device=device))
    assert np.abs(z.cpu().numpy() - expected).max() < 1e-10
    stationary = gamma * z.cpu().numpy() + c + dual.cpu().numpy() @ A
    assert np.abs(stationary).max() < 1e-10
    single = EqualityQP(KINDS[kind](A), b, gamma).to(device)(torch.tensor(c, dtype=torch.float32, device=device))
    assert np.abs(single.cpu().numpy() - expected).max() < 1e-4 * np.abs(expected).max()


@pytest.mark.parametrize("seed", range(5))
def test_solution_agrees_with_osqp(seed):
    A, b, gamma = random_qp(np.random.default_rng(seed))
    c = np.random.default_rng(seed + 100).standard_normal(12)
    solver = osqp.OSQP()
    A_csc = sparse.csc_matrix(A)
    solver.setup(sparse.diags(gamma, format="csc"), c, A_csc, b, b, eps_abs=1e-10, eps_rel=1e-10, verbose=False)
    z = EqualityQP(A, b, gamma).double()(torch.tensor(c))
    assert np.abs(z.numpy() - solver.solve().x).max() < 1e-6


@pytest.mark.parametrize("kind", ["dense", "scipy"])
@pytest.mark.parametrize("device", DEVICES)
def test_gradients_of_first_and_second_order(rng, kind, device):
    A, b, gamma = random_qp(rng, m=3, n=6)
    qp = EqualityQP(KINDS[kind](A), b, gamma).double().to(device)
    c = torch.randn(2, 6, dtype=torch.float64, device=device, requires_grad=True)
    b = torch.randn(3, dtype=torch.float64, device=device, requires_grad=True)
    assert gradcheck(lambda c, b: qp.solve(c, b), (c, b), check_forward_ad=True)
    assert gradgradcheck(lambda c, b: qp.solve(c, b), (c, b))
    assert gradgradcheck(lambda c, b: qp(c.square(), b.square()), (c, b))


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 6), st.integers(0, 6), st.integers(0, 2**32 - 1))
def test_solution_is_feasible_and_optimal(m, extra, seed):
    """Az = b, and no feasible step improves the objective."""
    rng = np.random.default_rng(seed)
    A, b, gamma = random_qp(rng, m, m + extra)
    c = rng.standard_normal(m + extra)
    z = EqualityQP(A, b, gamma).double()(torch.tensor(c)).numpy()
    assert np.allclose(A @ z, b, atol=1e-8)
    step = rng.standard_normal(m + extra)
    step -= np.linalg.pinv(A) @ (A @ step)
    cost = lambda z: (gamma * z * z / 2 + c * z).sum()
    assert cost(z) <= cost(z + 0.1 * step) + 1e-9 and cost(z) <= cost(z - 0.1 * step) + 1e-9


def test_conversion_to_float32_and_back_is_exact(rng):
    A, b, gamma = random_qp(rng)
    c = torch.tensor(rng.standard_normal(12))
    converted = EqualityQP(A, b, gamma).float().half().double()
    assert torch.equal(converted(c), EqualityQP(A, b, gamma).double()(c))


@pytest.mark.parametrize("kind", ["dense", "scipy"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_error_names_dependent_rows(rng, kind, dtype):
    A, b, _ = random_qp(rng)
    A[3] = 2 * A[1]
    with pytest.raises(ValueError, match=r"A \(5 x 12\) has dependent rows: a combination of rows 1, 3 is zero"):
        EqualityQP(KINDS[kind](A), b).to(dtype)
    A[3] = 0
    with pytest.raises(ValueError, match="row 3 is zero or nearly so; drop a redundant constraint"):
        EqualityQP(KINDS[kind](A), b).to(dtype)


# --------------------------------------------------------------------------------------------------------- conditioning


def solve_by_svd(A, b, gamma, c):
    """Return z: the projection of -G^-1 c onto the constraints in the metric of G, with the condition number of A."""
    root = np.sqrt(gamma)
    y = -c / root
    return (y + np.linalg.lstsq(A / root, b - (A / root) @ y, rcond=None)[0]) / root


def with_condition(rng, condition, m=6, n=15):
    """Return a matrix with singular values from 1 to 1 / condition."""
    U, V = np.linalg.qr(rng.standard_normal((m, m)))[0], np.linalg.qr(rng.standard_normal((n, m)))[0]
    return U @ np.diag(np.geomspace(1, 1 / condition, m)) @ V.T


def nearly_parallel(rng, distance):
    A = rng.standard_normal((4, 9))
    A[2] = A[0] + distance * A[2]
    return A


@pytest.mark.parametrize("kind", ["dense", "scipy"])
@pytest.mark.parametrize("dtype, error", [(torch.float32, 1e-4), (torch.float64, 1e-12)])
def test_rows_of_any_scale(rng, kind, dtype, error):
    A, b, gamma = random_qp(rng)
    scale = 10.0 ** np.array([-12, 8, 0, -5, 12])
    c = rng.standard_normal(12)
    expected = solve_by_svd(A, b, gamma, c)
    z, dual = (
        EqualityQP(KINDS[kind](scale[:, None] * A), scale * b, gamma).to(dtype).solve(torch.tensor(c, dtype=dtype))
    )
    assert np.abs(z.numpy() - expected).max() < error * np.abs(expected).max()
    stationary = gamma * z.double().numpy() + c + (dual.double().numpy() * scale) @ A
    assert np.abs(stationary).max() < 10 * error


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 6), st.integers(0, 6), st.lists(st.integers(-200, 200), min_size=6), st.integers(0, 2**32 - 1))
def test_row_scales_change_nothing(m, extra, exponents, seed):
    """Powers of two are exact, so the solution is the same to the last bit, or nearly."""
    rng = np.random.default_rng(seed)
    A, b, gamma = random_qp(rng, m, m + extra)
    scale = 2.0 ** np.array(exponents[:m])
    c = torch.tensor(rng.standard_normal(m + extra))
    expected = EqualityQP(A, b, gamma).double()(c)
    scaled = EqualityQP(scale[:, None] * A, scale * b, gamma).double()(c)
    assert torch.allclose(scaled, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", ["dense", "scipy"])
@pytest.mark.parametrize("condition", [10, 1_400, 1e5, 1e6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_ill_conditioned_systems(rng, kind, condition, dtype):
    """The error is that of rounding z and A, times the condition number of A: not of A A'."""
    A = with_condition(rng, condition)
    c, z0 = rng.standard_normal((2, 15)).astype(np.float32).astype(float)
    b = (A @ z0).astype(np.float32).astype(float)  # solutions of moderate size
    gamma = rng.uniform(0.5, 2.0, 15)
    expected = solve_by_svd(A, b, gamma, c)
    z = EqualityQP(KINDS[kind](A), b, gamma).to(dtype)(torch.tensor(c, dtype=dtype))
    assert z.dtype == dtype
    error = 20 * condition * 2.2e-16 + (1e-4 if condition == 10 else 1e-6) * (dtype == torch.float32)
    assert np.abs(z.numpy() - expected).max() < error * np.abs(expected).max()


@pytest.mark.parametrize("distance", [1e-1, 1e-3, 1e-5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_nearly_parallel_rows(rng, distance, dtype):
    A = nearly_parallel(rng, distance)
    c = rng.standard_normal(9).astype(np.float32)
    b = (A @ rng.standard_normal(9)).astype(np.float32)
    expected = solve_by_svd(A, b.astype(float), 0.5 * np.ones(9), c.astype(float))
    z = EqualityQP(A, b).to(dtype)(torch.tensor(c, dtype=dtype)).double().numpy()
    assert np.abs(z - expected).max() < (1e-5 if dtype == torch.float32 else 1e-9) * np.abs(expected).max()


@pytest.mark.parametrize("kind", ["dense", "scipy"])
def test_gradients_of_ill_conditioned_systems(rng, kind):
    A, scale = nearly_parallel(rng, 1e-4), np.array([1e-4, 1.0, 1e4, 1.0])
    b = scale * (A @ rng.standard_normal(9))
    qp = EqualityQP(KINDS[kind](scale[:, None] * A), b).double()
    assert qp._refinements
    c = torch.randn(2, 9, dtype=torch.float64, requires_grad=True)
    assert gradcheck(qp, c, check_forward_ad=True) and gradgradcheck(lambda c: qp(c.square()).square(), c)
    right = torch.tensor(b, requires_grad=True)
    (grad,) = torch.autograd.grad(qp(c.detach(), right).sum(), right)
    assert np.allclose(grad.numpy() * scale, 2 * np.linalg.pinv(A).sum(0), rtol=1e-8)  # two rows of c
    compiled = torch.compile(qp, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(c), qp(c), rtol=0, atol=1e-10)


def test_well_conditioned_layers_compute_in_their_own_dtype(rng):
    A, b, gamma = random_qp(rng)
    assert EqualityQP(A, b, gamma)._precision == torch.float32
    min_cut = Graph.grid((8, 8)).qp()
    layer = EqualityQP(min_cut.A, min_cut.b)
    assert layer._precision == torch.float32 and not layer._refinements


@pytest.mark.parametrize("kind", ["dense", "scipy"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_error_tells_conditioning_from_rank(rng, kind, dtype):
    A = nearly_parallel(rng, 1e-9) * np.array([[1.0], [1e5], [1e-5], [1.0]])
    expected = r"A \(4 x 9\) has full rank but a condition number of \de\+(09|10).*at most 7e\+06: rows 0, 2 are nearly"
    with pytest.raises(ValueError, match=expected):
        EqualityQP(KINDS[kind](A), np.zeros(4)).to(dtype)
    A = nearly_parallel(rng, 0.0) * np.array([[1.0], [1e5], [1e-5], [1.0]])
    with pytest.raises(ValueError, match=r"A \(4 x 9\) has dependent rows: a combination of rows 0, 2 is zero"):
        EqualityQP(KINDS[kind](A), np.zeros(4)).to(dtype)


# ---------------------------------------------------------------------------------------------------------- linear maps


MATRIX = torch.tensor([[1.0, 2.0, 0.0], [0.0, -1.0, 3.0]], dtype=torch.float64)


def product(x, traced=False):
    """Return Mx for x (..., 3), which autograd differentiates by M' alone."""
    return linear_map(x, lambda x: x.detach() @ MATRIX.T, lambda y: y.detach() @ MATRIX, traced=traced)


def test_a_linear_map_has_derivatives_of_any_order_in_both_modes():
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(product(x), x @ MATRIX.T)
    assert gradcheck(product, x, check_forward_ad=True, check_batched_grad=True)
    assert gradgradcheck(lambda x: product(x.square()).square(), x)
    (jacobian,) = torch.autograd.functional.jacobian(lambda x: product(x), (x[0].detach(),), vectorize=True)
    assert torch.equal(jacobian, MATRIX)
    assert torch.equal(torch.func.jacfwd(product)(x[0].detach()), MATRIX)


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_a_linear_map_under_vmap(dim):
    x = torch.randn(2, 4, 3, dtype=torch.float64)
    torch.testing.assert_close(torch.func.vmap(product, dim, dim)(x.movedim(0, dim)), (x @ MATRIX.T).movedim(0, dim))


def test_a_linear_map_runs_without_autocast():
    seen = []

    def apply(x):
        seen.append(torch.is_autocast_enabled("cpu"))
        return x

    for traced in (False, True):
        with torch.autocast("cpu", torch.bfloat16):
            linear_map(torch.ones(2, requires_grad=True), apply, apply, traced=traced).sum().backward()
            assert torch.is_autocast_enabled("cpu")
    assert len(seen) == 4 and not any(seen[::2])


@pytest.mark.parametrize("traced", [False, True])
def test_a_compiled_linear_map(traced):
    """With `traced`, compiled code differentiates the operations inside, here without the adjoint."""
    torch.compiler.reset()
    adjoint = (lambda y: y @ MATRIX) if not traced else None
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    compiled = torch.compile(
        lambda x: linear_map(x, lambda x: x @ MATRIX.T, adjoint, traced=traced), backend="aot_eager", fullgraph=True
    )
    torch.testing.assert_close(compiled(x), x @ MATRIX.T)
    (grad,) = torch.autograd.grad(compiled(x).sum(), x)
    torch.testing.assert_close(grad, MATRIX.sum(0).expand(4, 3))


@pytest.mark.parametrize("traced", [False, True])
def test_what_a_compiler_sees_of_a_linear_map(monkeypatch, traced):
    """The adjoint is not the transpose here, which shows what is differentiated: `apply` or `adjoint`."""
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    seen = []

    def apply(x):
        seen.append(torch.is_autocast_enabled("cpu"))
        return 2 * x

    x = torch.ones(3, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = linear_map(x, apply, lambda y: 7 * y, traced=traced)
    assert y.tolist() == [2.0] * 3 and seen == [False]
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert grad.tolist() == [2.0 if traced else 7.0] * 3


# -------------------------------------------------------------------------------------------------------------- details


def test_defaults_and_repr(rng):
    """gamma is 0.5, as in the paper."""
    A, b, _ = random_qp(rng)
    c = torch.randn(12)
    assert torch.equal(EqualityQP(A, b)(c), EqualityQP(A, b, 0.5)(c))
    assert repr(EqualityQP(A, b)) == "EqualityQP(12 variables, 5 constraints, dense A)"
    assert repr(EqualityQP(sparse.csr_array(A), b)) == "EqualityQP(12 variables, 5 constraints, sparse A)"


@pytest.mark.parametrize("shapes", [((12,), (4, 5)), ((4, 12), (5,)), ((3, 1, 12), (4, 5))])
def test_batches_of_c_and_b_broadcast(rng, shapes):
    A, b, gamma = random_qp(rng)
    qp = EqualityQP(A, b, gamma).double()
    c, b = (torch.randn(shape, dtype=torch.float64) for shape in shapes)
    z = qp(c, b)
    batch = torch.broadcast_shapes(c.shape[:-1], b.shape[:-1])
    assert z.shape == (*batch, 12)
    torch.testing.assert_close(z @ torch.tensor(A).T, b.expand(*batch, 5))
    one = (0,) * len(batch)
    torch.testing.assert_close(z[one], qp(c.expand(*batch, 12)[one], b.expand(*batch, 5)[one]))


def test_rows_of_equal_norms_are_not_scaled(rng):
    A, b, _ = random_qp(rng)
    A /= np.linalg.norm(A, axis=1, keepdims=True)
    for kind in (KINDS["dense"], KINDS["scipy"]):
        assert EqualityQP(kind(A), b, 1.0)._scale is None
        scaled = EqualityQP(kind(A * np.array([[1.0], [1.0], [1.0], [8.0], [0.25]])), b, 1.0)
        assert scaled._scale.ravel().tolist() == [1.0, 1.0, 1.0, 0.125, 4.0], "powers of two"


@pytest.mark.parametrize("kind", ["dense", "scipy"])
def test_scaled_rows_have_similar_norms(rng, kind):
    """In the metric of G, within a factor of two; also rows with few and with many entries, and rows of zeros."""
    A = np.zeros((4, 64))
    A[0, 0], A[1, 1:], A[2] = 3.0, 3.0, 1e-5 * rng.standard_normal(64)
    gamma = 10.0 ** rng.uniform(-3, 3, 64)
    matrix = KINDS["scipy"](A).tocsr() if kind == "scipy" else A
    scale = _row_scales(matrix, gamma)
    assert np.array_equal(np.log2(scale), np.round(np.log2(scale))), "powers of two"
    norms = np.linalg.norm(scale[:, None] * A / np.sqrt(gamma), axis=1)[:3]
    assert norms.max() <= 2 * norms.min()
    assert np.array_equal(_row_scales(np.ones((3, 5)), np.ones(5)), np.ones(3))


def test_float32_matrices_are_computed_with_in_float64(rng):
    A, b, gamma = (x.astype(np.float32) for x in random_qp(rng))
    c = torch.tensor(rng.standard_normal(12))
    expected = EqualityQP(A.astype(float), b.astype(float), gamma.astype(float)).double()(c)
    found = EqualityQP(torch.tensor(A), torch.tensor(b), torch.tensor(gamma)).double()(c)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-14)


def test_pickles_hold_no_factor(rng):
    A, b, gamma = random_qp(rng)
    for kind in (KINDS["dense"], KINDS["scipy"]):
        assert not {"_solver", "A", "At"} & EqualityQP(kind(A), b, gamma).__getstate__().keys()


def test_sparse_tensors_with_empty_columns(rng):
    """The last variable is in no constraint."""
    A, b, _ = random_qp(rng)
    A[:, -2:] = 0
    c = torch.randn(12)
    torch.testing.assert_close(EqualityQP(torch.tensor(A).to_sparse(), b)(c), EqualityQP(A, b)(c))


def test_dense_matrices_stay_dense(rng):
    A, b, _ = random_qp(rng)
    assert isinstance(EqualityQP(A, b).A, torch.Tensor) and isinstance(EqualityQP(A, b)._solver, DenseFactor)
    layer = EqualityQP(sparse.csr_array(A), b)
    assert isinstance(layer.A, SparseMatrix) and isinstance(layer._solver, SparseFactor)


def test_a_layer_on_the_meta_device_computes_when_it_is_called(rng):
    A, b, gamma = random_qp(rng)
    with torch.device("meta"):
        layer = EqualityQP(A, b, gamma)
    assert not hasattr(layer, "_solver")
    c = torch.randn(12)
    assert torch.equal(layer(c), EqualityQP(A, b, gamma)(c))


def test_finite_numbers_are_not_seen_under_vmap(rng):
    A, b, gamma = random_qp(rng)
    qp, c = EqualityQP(A, b, gamma), torch.randn(3, 12)
    torch.testing.assert_close(torch.func.vmap(qp)(c), qp(c))


@pytest.mark.parametrize("gamma", [1.0, 4.0, 0.01])
def test_condition_number_by_hand(gamma):
    """The rows (1, 0) and (1, d) have singular values of sqrt(2) and d / sqrt(2), nearly, for any gamma."""
    message = (
        "A (2 x 3) has full rank but a condition number of 2e+09, with rows scaled to equal norms and columns divided "
        "by the square root of gamma; expected at most 7e+06: rows 0, 1 are nearly dependent; "
        "replace one of them by their difference, or drop it"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        EqualityQP([[1.0, 0.0, 0.0], [1.0, 1e-9, 0.0]], [0.0, 0.0], gamma)


def test_norm_of_a_matrix(rng):
    S = rng.standard_normal((6, 6))
    S = S @ S.T
    assert 0.9 * np.linalg.norm(S, 2) < _norm(S) <= np.linalg.norm(S, 2) * (1 + 1e-12)
    assert _norm(np.zeros((3, 3))) == 0.0


@pytest.mark.parametrize("rows, listed", [(8, "0, 1, 2, 3, 4, 5, 6, 7"), (9, "0, 1, 2, 3, 4, 5, 6, 7, ...")])
def test_at_most_eight_rows_are_listed(rows, listed):
    A = np.concatenate([np.eye(rows - 1, rows + 3), np.ones((1, rows - 1)) @ np.eye(rows - 1, rows + 3)])
    with pytest.raises(ValueError, match=rf"a combination of rows {re.escape(listed)} is zero or nearly so; "):
        EqualityQP(A, np.zeros(rows))


def test_messages_about_types():
    qp = EqualityQP([[1.0, 1.0]], [1.0])
    with pytest.raises(TypeError, match=r"^c is a list; expected a torch\.Tensor of torch\.float32$"):
        qp([0.0, 0.0])
    message = (
        "c has dtype torch.float64, but the EqualityQP is torch.float32: convert the layer with .double(), or cast c"
    )
    with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
        qp(torch.zeros(2).double())
    message = (
        "c has dtype torch.float32, but the EqualityQP is torch.float64: convert the layer with .float(), or cast c"
    )
    with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
        copy.deepcopy(qp).double()(torch.zeros(2))
    message = "c has dtype torch.int64, but the EqualityQP is torch.float32: cast c to torch.float32"
    with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
        qp(torch.zeros(2).long())
    with pytest.raises(ValueError, match=r"^gamma contains 1 NaN or infinite entry; expected finite numbers$"):
        EqualityQP([[1.0, 1.0]], [1.0], [1.0, np.nan])
    with pytest.raises(ValueError, match=r"^c has shape \(\), but A is 1 x 2: expected \(..., 2\)$"):
        qp(torch.tensor(0.0))
    with pytest.raises(ValueError, match=r"^b has shape \(3,\), but A is 1 x 2: expected \(..., 1\)$"):
        qp(torch.zeros(2), torch.zeros(3))


@pytest.mark.parametrize("value", [1e-6, 1.0, 10**6])
def test_positive_numbers(value):
    checked = check_positive("gamma", value)
    assert checked == value and isinstance(checked, float)
    for wrong in (0.9e-6, 1.1e6, -1.0, np.nan, np.inf):
        with pytest.raises(ValueError, match=rf"^gamma is {wrong}; expected a number from 1e-06 to 1,000,000$"):
            check_positive("gamma", wrong)


def test_bad_input(rng):
    A, b, gamma = random_qp(rng)
    qp = EqualityQP(A, b, gamma)
    broken = A.copy()
    broken[0, 0] = np.nan
    for arguments, message in [
        ((broken, b), "A contains 1 NaN or infinite entry"),
        ((sparse.csr_array(broken), b), "A contains 1 NaN or infinite entry"),
        ((A, b * np.inf), "b contains 5 NaN or infinite entries"),
        ((A, b[:-1]), r"b has shape \(4,\), but A is 5 x 12: expected \(5,\)"),
        ((A[0], b), r"A has shape \(12,\); expected a matrix"),
        ((A.T, gamma), "A is 12 x 5: more constraints than variables"),
        ((A, b, gamma[:3]), r"gamma has shape \(3,\); expected one number or 12"),
        ((A, b, 0.0), "gamma contains 0; expected positive"),
    ]:
        with pytest.raises(ValueError, match=message):
            EqualityQP(*arguments)
    with pytest.raises(ValueError, match=r"c has shape \(3, 11\), but A is 5 x 12: expected \(..., 12\)"):
        qp(torch.zeros(3, 11))
    with pytest.raises(ValueError, match="c contains NaN or infinity"):
        qp(torch.full((12,), float("nan")))
    with pytest.raises(
        TypeError, match=r"c has dtype torch.float64, but the EqualityQP is torch.float32: convert the layer"
    ):
        qp(torch.zeros(12, dtype=torch.float64))
    with pytest.raises(TypeError, match=r"c has dtype torch\.int64"):
        qp(torch.zeros(12, dtype=torch.int64))


def test_solution_of_the_min_cut_qp_at_16(rng):
    min_cut = Graph.grid((16, 16)).qp()
    c = min_cut.objective(rng.standard_normal((3, 1_472)))
    z = EqualityQP(min_cut.A, min_cut.b, 0.5).double()(torch.tensor(c)).numpy()
    assert np.abs(z - solve_literal(min_cut, c, 0.5)).max() < 1e-10
