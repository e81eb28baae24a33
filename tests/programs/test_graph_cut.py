import copy
import types

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import sparse
from scipy.sparse import linalg
from torch.autograd import gradcheck, gradgradcheck

from cutslots import Graph, GraphCut
from cutslots.programs import graph_cut, linear_solvers
from cutslots.programs.fill import estimate_fill
from cutslots.programs.graph_cut import SOLVERS, DenseOperators, SparseOperators, choose_sparse_solver, round_to_tf32
from cutslots.programs.linear_solvers import ConjugateGradients, SparseFactor
from tests.conftest import DEVICES, needs_cuda
from tests.programs.literal import edge_list, literal_cut, random_weights, solve_literal

SHAPES = [(1, 1), (1, 7), (5, 7), (16, 16), (64, 64), (4, 6, 5)]


@pytest.mark.parametrize(
    "shape, solver",
    [(shape, solver) for shape in SHAPES for solver in SOLVERS if solver != "inverse" or shape != (64, 64)],
)
def test_solution_equals_the_literal_qp_of_a_grid(shape, solver):
    w, N = random_weights(shape), int(np.prod(shape))
    cut = GraphCut(Graph.grid(shape).edges[: -2 * N], N, solver=solver).double().solve(edge_list(w, shape))
    ours = (cut.p, cut.d, cut.slack, cut.terminals, cut.slack_st)
    for a, b in zip(ours, literal_cut(shape, w), strict=True):
        assert np.abs(a.numpy() - b).max() < 1e-10


@pytest.mark.parametrize("solver", SOLVERS)
def test_terminals_among_the_vertices(solver, rng):
    graph = Graph(rng.integers(0, 9, (30, 2)), 9, source=4, sink=0)
    w = rng.standard_normal((2, 3, 30))
    qp = graph.qp()
    z = solve_literal(qp, qp.objective(w), 0.5)
    cut = GraphCut(graph.edges, 9, terminals=(4, 0), solver=solver).double().solve(torch.tensor(w))
    assert np.abs(cut.p.numpy() - z[..., qp.blocks["p"]]).max() < 1e-10
    assert np.abs(cut.d.numpy() - z[..., qp.blocks["d"]]).max() < 1e-10
    assert np.abs(cut.slack.numpy() - z[..., qp.blocks["s"]]).max() < 1e-10


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("solver", SOLVERS)
def test_gradients(device, solver, rng):
    cut = GraphCut(rng.integers(0, 5, (7, 2)), 5, solver=solver).double().to(device)
    w = torch.randn(2, 17, dtype=torch.float64, device=device, requires_grad=True)
    assert gradcheck(lambda w: tuple(cut.solve(w)), w, check_forward_ad=True)
    assert gradgradcheck(lambda w: cut(w.square()).square(), w)


@pytest.mark.parametrize("solver", SOLVERS)
def test_missing_batches_and_state(solver):
    cut, w = GraphCut([[0, 1], [1, 2]], 3, solver=solver), torch.randn(2, 8)
    assert cut(w[0]).shape == (3,)
    assert not cut.state_dict()


@pytest.mark.parametrize("solver", SOLVERS)
def test_graph_without_edges(solver):
    assert GraphCut([], 3, solver=solver)(torch.zeros(6)).shape == (3,)


# -------------------------------------------------------------------------------------------------- conjugate gradients


def random_edges(rng, n, degree):
    return rng.integers(0, n, (n * degree // 2, 2))


GRAPHS = {
    "random": lambda rng: (random_edges(rng, 300, 6), 300),
    "dense": lambda rng: (random_edges(rng, 60, 100), 60),
    "star": lambda rng: (np.stack([np.arange(1, 300), np.zeros(299, dtype=int)], 1), 300),
    "path": lambda rng: (np.stack([np.arange(299), np.arange(1, 300)], 1), 300),
    "repeated edges and loops": lambda rng: (np.tile([[0, 1], [1, 0], [2, 2]], (200, 1)), 4),
    "two cliques": lambda rng: (np.concatenate([random_edges(rng, 80, 40), 80 + random_edges(rng, 80, 40)]), 160),
}


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("mean", [0.0, 100.0])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (torch.float64, 1e-11)])
def test_conjugate_gradients_are_as_exact_as_a_factor(name, mean, dtype, tolerance, rng):
    edges, n = GRAPHS[name](rng)
    exact = GraphCut(edges, n, solver="inverse").double()
    w = (mean + torch.tensor(rng.standard_normal((3, exact.graph.num_edges)))).to(dtype)
    weights = torch.randn(3, n, dtype=dtype)

    def solve(cut):
        v = w.to(cut.dtype).requires_grad_()
        p = cut(v)
        return p.detach(), torch.autograd.grad(p, v, weights.to(cut.dtype))[0]

    expected = solve(exact)
    cg, factor = (
        [float((x - y).abs().max() / y.abs().max()) for x, y in zip(solve(cut), expected, strict=True)]
        for cut in (GraphCut(edges, n, solver=solver).to(dtype) for solver in ("cg", "cholesky"))
    )
    assert all(one < tolerance + 4 * other for one, other in zip(cg, factor, strict=True))


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 30), st.integers(0, 90), st.integers(0, 2**32 - 1), st.floats(-6, 6))
def test_conjugate_gradients_equal_a_dense_solution(n, num_edges, seed, scale):
    rng = np.random.default_rng(seed)
    graph = Graph.with_terminals(rng.integers(0, n, (num_edges, 2)), n)
    matrix = graph.reduced_matrix()
    solver = ConjugateGradients(matrix, torch.device("cpu"), torch.float64, 1e-13)
    rhs = rng.standard_normal((n + 2, 3)) * 10.0 ** (scale * np.arange(3))  # columns of different scales
    expected = np.linalg.solve(matrix.toarray(), rhs)
    assert (np.abs(solver(torch.tensor(rhs)).numpy() - expected).max(0) <= 1e-11 * np.abs(expected).max(0)).all()


def test_zero_columns_nan_and_empty_batches(rng):
    cut = GraphCut(random_edges(rng, 50, 6), 50, solver="cg")
    solve = cut._operators.solve
    rhs = torch.randn(3, 52)
    rhs[1] = 0
    alone = solve(rhs[:1])
    rhs[2, 4] = float("nan")
    assert torch.equal(solve(rhs)[1], torch.zeros(52))
    torch.testing.assert_close(solve(rhs)[:1], alone)
    assert solve(rhs)[2].isnan().any()
    assert solve(rhs[:0]).shape == (0, 52)


def test_tolerance_bounds_the_residual(rng):
    edges = random_edges(rng, 400, 6)
    exact = GraphCut(edges, 400, solver="cholesky").double()
    w = torch.tensor(rng.standard_normal((1, exact.graph.num_edges)))
    errors = [
        float((GraphCut(edges, 400, solver="cg", tolerance=t).double()(w) - exact(w)).abs().max())
        for t in (1e-2, 1e-5, 1e-8)
    ]
    assert errors[0] > 10 * errors[1] > 100 * errors[2] and errors[1] < 1e-3 and errors[2] < 1e-6


def test_error_if_conjugate_gradients_do_not_converge(rng, monkeypatch):
    cut = GraphCut(random_edges(rng, 50, 6), 50, solver="cg")
    monkeypatch.setattr(linear_solvers, "MAX_ITERATIONS", 2)
    with pytest.raises(
        RuntimeError, match=r"conjugate gradients reached a residual of .* in 2 iterations; expected 1e-07"
    ):
        cut(torch.randn(1, cut.graph.num_edges))


def test_solver_fits_the_graph(rng):
    n = 4000
    planar = Graph.grid((64, 64)), Graph.grid((2, 3000)), Graph.grid((14, 14, 14))
    trees = (np.arange(1, n) - 1) // 2, (rng.random(n - 1) * np.arange(1, n)).astype(int), np.zeros(n - 1, dtype=int)
    rooted = [Graph.with_terminals(np.stack([np.arange(1, n), parents], 1), n) for parents in trees]
    for graph in (*planar, *rooted, Graph.with_terminals(random_edges(rng, n, 1), n)):
        assert choose_sparse_solver(graph.reduced_matrix()) == "cholesky"
    for graph in (Graph.with_terminals(random_edges(rng, n, d), n) for d in (6, 12)):
        assert choose_sparse_solver(graph.reduced_matrix()) == "cg"
    assert choose_sparse_solver(Graph.with_terminals(random_edges(rng, 1000, 6), 1000).reduced_matrix()) == "cholesky"


@pytest.mark.parametrize("shape", [(40, 40), (80, 80), (12, 12, 12)], ids=str)
def test_estimated_fill_is_near_that_of_a_factor(shape):
    matrix = Graph.grid(shape).reduced_matrix()
    options = {"permc_spec": "MMD_AT_PLUS_A", "diag_pivot_thresh": 0.0, "options": {"SymmetricMode": True}}
    fill = linalg.splu(matrix.tocsc(), **options).L.nnz
    assert fill / 4 < estimate_fill(matrix) < 4 * fill


def test_random_graph_of_20000_vertices_is_not_factored(rng, monkeypatch):
    """A factor takes two minutes."""

    def fail(*_):
        raise AssertionError("factored")

    monkeypatch.setattr(linear_solvers, "_Cholesky", fail)
    cut = GraphCut(random_edges(rng, 20_000, 6), 20_000).double()
    w = torch.tensor(rng.standard_normal((2, cut.graph.num_edges)))
    p = cut._all_vertices(w).numpy()
    a = np.zeros(20_002)
    a[-2:] = 1, -1
    rhs = a - (w.numpy() @ cut.graph.incidence()) / (2 * cut.gamma)
    assert np.abs(p @ cut.graph.reduced_matrix() - rhs).max() < 1e-9 * np.abs(rhs).max()


# ------------------------------------------------------------------------------------------------------ dense operators


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-14), (torch.float32, 1e-6)])
def test_the_inverse_and_the_factor_agree(dtype, tolerance, rng):
    graph = Graph.with_terminals(rng.integers(0, 40, (120, 2)), 40)
    cpu = torch.device("cpu")
    factored = SparseOperators(graph, SparseFactor(graph.reduced_matrix(), cpu, dtype), cpu, dtype)
    dense = DenseOperators(graph, cpu, dtype)
    w, p = (torch.randn(5, n, dtype=dtype) for n in (graph.num_edges, graph.num_vertices))
    for name, x in (("solve", p), ("differences", p), ("divergence", w)):
        torch.testing.assert_close(getattr(dense, name)(x), getattr(factored, name)(x), rtol=0, atol=20 * tolerance)


def test_products_of_two_11_bit_factors_have_the_accuracy_of_float32(rng):
    """The factors of each product are exact in TF32, or smaller by 11 bits."""
    graph = Graph.grid((6, 9))
    exact, single = (DenseOperators(graph, torch.device("cpu"), dtype) for dtype in (torch.float64, torch.float32))
    x = torch.randn(7, graph.num_vertices)
    for whole, rest in ((single.inverse, single.rest), (round_to_tf32(x), x - round_to_tf32(x))):
        assert torch.equal(round_to_tf32(whole), whole) and (rest.abs() <= 2**-11 * whole.abs()).all()
    torch.testing.assert_close(single.inverse.double() + single.rest, exact.inverse, rtol=1e-10, atol=0)
    truncated = round_to_tf32(x) @ single.inverse
    truncated += round_to_tf32(x) @ round_to_tf32(single.rest) + round_to_tf32(x - round_to_tf32(x)) @ single.inverse
    for solved in (single.solve(x), truncated):
        assert (solved - exact.solve(x.double())).abs().max() < 1e-6


@needs_cuda
def test_tf32_does_not_change_a_solution_on_cuda():
    """TF32 alone is wrong by 1e-3."""
    shape, N = (64, 64), 64 * 64
    cut = GraphCut(Graph.grid(shape).edges[: -2 * N], N)
    w = edge_list(random_weights(shape, (8,), torch.float32), shape)
    expected = copy.deepcopy(cut).double()(w.double())
    cut = cut.cuda()
    assert isinstance(cut._operators, DenseOperators)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        for solver in (cut, torch.compile(cut, fullgraph=True)):
            torch.testing.assert_close(solver(w.cuda()).cpu().double(), expected, rtol=0, atol=1e-5)
    finally:
        torch.set_float32_matmul_precision(before)


def test_defaults_are_the_paper_s():
    """gamma 0.5; the first 1e-7 or 1e-13 of a residual is left by conjugate gradients."""
    cut = GraphCut([[0, 1]], 3)
    assert (cut.gamma, cut.solver, cut.tolerance) == (0.5, None, None)
    w = torch.randn(2, 7)
    assert torch.equal(cut(w), GraphCut([[0, 1]], 3, gamma=0.5)(w))
    for dtype, tolerance in ((torch.float32, 1e-7), (torch.float64, 1e-13)):
        assert GraphCut([[0, 1]], 3, solver="cg").to(dtype)._operators.solver.tolerance == tolerance
    assert GraphCut([[0, 1]], 3, solver="cg", tolerance=0.1)._operators.solver.tolerance == 0.1


@pytest.mark.parametrize("solver, kind", [(None, SparseFactor), ("cholesky", SparseFactor), ("cg", ConjugateGradients)])
def test_solvers_by_name(solver, kind):
    cut = GraphCut([[0, 1]], 3, solver=solver)
    assert type(cut._operators) is SparseOperators and type(cut._operators.solver) is kind
    assert type(GraphCut([[0, 1]], 3, solver="inverse")._operators) is DenseOperators


def test_edges_may_be_a_tensor():
    w = torch.randn(2, 8)
    edges = torch.tensor([[0, 1], [1, 2]])
    assert torch.equal(GraphCut(edges, 3)(w), GraphCut([[0, 1], [1, 2]], 3)(w))


@pytest.mark.parametrize("gamma", [0.1, 2.0])
def test_gamma_equals_the_literal_qp(gamma, rng):
    graph = Graph(rng.integers(0, 6, (15, 2)), 6, source=1, sink=4)
    w, qp = rng.standard_normal((2, 15)), graph.qp()
    z = solve_literal(qp, qp.objective(w), gamma)
    cut = GraphCut(graph.edges, 6, gamma, (1, 4)).double().solve(torch.tensor(w))
    assert np.abs(cut.p.numpy() - z[:, qp.blocks["p"]]).max() < 1e-10
    assert np.abs(cut.d.numpy() - z[:, qp.blocks["d"]]).max() < 1e-10
    assert np.abs(cut.slack_st.numpy() - z[:, qp.blocks["s_st"]][:, 0]).max() < 1e-10
    assert np.abs(cut.terminals.numpy() - z[:, [1, 4]]).max() < 1e-10


def test_choice_between_factor_and_conjugate_gradients(monkeypatch):
    """A matrix of 2,048 rows or more is not factored if the factor has more than 30 entries for each of its own."""
    eye = lambda n: sparse.eye_array(n, format="csr")
    for fill, n, expected in ((31, 2048, "cg"), (30, 2048, "cholesky"), (31, 2047, "cholesky")):
        monkeypatch.setattr(graph_cut, "estimate_fill", lambda matrix, fill=fill: fill * matrix.nnz)
        assert choose_sparse_solver(eye(n)) == expected


@pytest.mark.parametrize(
    "device, vertices, solver, expected",
    [
        ("cuda", 4608, None, ["dense"]),
        ("cuda", 4609, None, ["factor", "sparse"]),
        ("cpu", 3, None, ["factor", "sparse"]),
        ("cuda", 3, "cholesky", ["factor", "sparse"]),
        ("cuda", 3, "cg", ["iterations", "sparse"]),
        ("cpu", 3, "inverse", ["dense"]),
    ],
)
def test_operators_by_device_and_size(monkeypatch, device, vertices, solver, expected):
    """The inverse is the default on CUDA for at most 4,608 vertices, those of a 64x64 image with terminals."""
    made, where = [], types.SimpleNamespace(type=device)
    for name, kind in (("dense", "DenseOperators"), ("factor", "SparseFactor"), ("iterations", "ConjugateGradients")):
        monkeypatch.setattr(graph_cut, kind, lambda *given, name=name: made.append((name, *given)) or name)
    monkeypatch.setattr(graph_cut, "SparseOperators", lambda *given: made.append(("sparse", *given)) or "sparse")
    monkeypatch.setattr(graph_cut, "choose_sparse_solver", lambda matrix: "cholesky")
    graph = types.SimpleNamespace(reduced_matrix=lambda: "matrix", num_vertices=vertices)
    layer = types.SimpleNamespace(graph=graph, solver=solver, device=where, dtype=torch.float32, tolerance=0.5)
    assert GraphCut._make_operators(layer) == expected[-1] and [call[0] for call in made] == expected
    for call in made:
        assert where in call and torch.float32 in call, "the constants are made for the layer"
    assert graph_cut.MAX_DENSE_VERTICES >= 64 * 64 + 2


def test_pickles_hold_no_constants():
    cut = GraphCut([[0, 1]], 3)
    assert not {"_operators", "_p_at_zero"} & cut.__getstate__().keys()


def test_messages_name_the_argument():
    with pytest.raises(ValueError, match=r"^gamma is 0; expected a number from 1e-06 to 1,000,000$"):
        GraphCut([[0, 1]], 3, gamma=0)
    with pytest.raises(TypeError, match=r"^w is a list; expected a torch\.Tensor of torch\.float32$"):
        GraphCut([[0, 1]], 3)([1.0])


def test_a_layer_on_the_meta_device_computes_nothing():
    with torch.device("meta"):
        cut = GraphCut([[0, 1]], 3)
    assert not hasattr(cut, "_operators")
    assert torch.equal(cut(torch.zeros(7)), GraphCut([[0, 1]], 3)(torch.zeros(7))), "until it is called"


def test_rounding_to_tf32_by_hand():
    """11 significant bits: 1 + 2^-10 is kept, 1 + 2^-12 is not, 1 + 3/4 2^-10 goes to the nearer neighbour."""
    x = torch.tensor([1 + 2**-10, 1 + 2**-12, 1 + 0.75 * 2**-10, -(1 + 2**-12), 0.0])
    assert round_to_tf32(x).tolist() == [1 + 2**-10, 1.0, 1 + 2**-10, -1.0, 0.0]


def test_repr():
    assert repr(GraphCut([[0, 1]], 3, gamma=0.2)) == "GraphCut(3 vertices, 7 edges, gamma=0.2)"


def test_messages_about_weights():
    with pytest.raises(ValueError, match=r"expects \(..., 8\), a weight for each edge, then for source and sink$"):
        GraphCut([[0, 1], [1, 2]], 3)(torch.zeros(3))
    with pytest.raises(ValueError, match=r"expects \(..., 2\), a weight for each edge$"):
        GraphCut([[0, 1], [1, 2]], 3, terminals=(0, 2))(torch.zeros(3))
    with pytest.raises(ValueError, match=r"^w has shape \(\); this GraphCut expects"):
        GraphCut([[0, 1]], 3)(torch.tensor(1.0))


@pytest.mark.parametrize("tolerance", [-0.1, 0.0, 1.0, 2.0, float("nan")])
def test_bad_tolerances(tolerance):
    with pytest.raises(ValueError, match=rf"^tolerance is {tolerance}; expected a number between 0 and 1$"):
        GraphCut([[0, 1]], 3, tolerance=tolerance)


def test_bad_input():
    with pytest.raises(ValueError, match=r"num_vertices is 3\.0; expected an integer of at least 1"):
        GraphCut([[0, 1]], 3.0)
    with pytest.raises(
        ValueError, match=r"w has shape \(3,\); this GraphCut expects \(..., 8\), a weight for each edge"
    ):
        GraphCut([[0, 1], [1, 2]], 3)(torch.zeros(3))
    with pytest.raises(ValueError, match=r"solver is 'lu'; expected None or one of 'cholesky', 'cg', 'inverse'"):
        GraphCut([[0, 1]], 3, solver="lu")
    with pytest.raises(ValueError, match=r"tolerance is 0; expected a number between 0 and 1"):
        GraphCut([[0, 1]], 3, solver="cg", tolerance=0)
