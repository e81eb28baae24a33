"""`MinCut` and `GraphMinCut`: against maximum flows, against a QP solver, by gradcheck, by properties."""

import contextlib
import copy
import os
import pickle
import subprocess
import sys
import warnings

import numpy as np
import osqp
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import sparse
from torch._subclasses import FakeTensorMode
from torch.autograd import gradcheck
from torch.fx.experimental.proxy_tensor import make_fx

from cutslots.programs import exact, min_cut, min_cut_solver, native
from cutslots.programs.graph import Graph, grid_edges
from cutslots.programs.min_cut import GraphMinCut, MinCut
from tests.conftest import DEVICES

EXACT = {"tolerance": 1e-10, "max_iterations": 200_000}


@pytest.fixture(params=["compiled", "torch"])
def path(request):
    """The compiled code of the CPU, and the torch operations that replace it where there is no compiler."""
    if request.param == "compiled" and native.load(min_cut_solver.SOURCE, torch.float64) is None:
        pytest.skip("needs a C compiler")
    with native.disabled() if request.param == "torch" else contextlib.nullcontext():
        yield request.param


def capacities(kind, generator, *size):
    """Weights of a kind: all of them multiples of 2^-10, so that maximum flows are exact."""
    if kind == "integer":
        return generator.integers(0, 20, size).astype(float)
    if kind == "real":
        return np.rint(generator.exponential(1, size) * 1024) / 1024
    if kind == "sparse":
        return generator.integers(1, 20, size) * (generator.random(size) < 0.3).astype(float)
    return np.full(size, 3.0)  # "equal": ties everywhere


def random_graph(generator, num_vertices):
    edges = generator.integers(0, num_vertices, (4 * num_vertices, 2))
    return edges[edges[:, 0] != edges[:, 1]]


def as_graph(shape, w):
    return Graph.grid(shape), w[..., grid_edges(shape)]


KINDS = ["integer", "real", "sparse", "equal"]
SHAPES = [(1, 1), (1, 9), (7, 1), (6, 7), (12, 10), (3, 4, 5), (2, 1, 6)]


@pytest.fixture
def threads():
    """Set the number of threads of torch, and restore it."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("kind", ["symmetric", "directed", "infinite", "nan"])
@pytest.mark.parametrize("shape", [(40, 30), (37, 1), (2, 50), (5, 12, 9)], ids=str)
def test_a_team_of_threads_computes_what_one_does(monkeypatch, threads, shape, kind, dtype):
    if native.load(min_cut_solver.SOURCE, dtype) is None:
        pytest.skip("needs a C compiler")
    monkeypatch.setattr(min_cut_solver, "MIN_PART", 1)
    generator = torch.Generator().manual_seed(0)
    w = torch.rand(1, 2 * len(shape) + 2, *shape, generator=generator, dtype=dtype) * 3
    if kind == "symmetric":
        edges = min_cut_solver.GridEdges(shape, w.device)
        for i, (axis, n) in enumerate(edges._last()):
            w[:, 2 * i + 1].narrow(axis, 1, n).copy_(w[:, 2 * i].narrow(axis, 0, n))
    if kind in ("infinite", "nan"):
        w[0, 0, 1] = torch.inf if kind == "infinite" else torch.nan
    found = []
    for count in (1, 2, 3, 7):
        threads(count)
        found.append(min_cut_solver.solve_grids_compiled(w, 1e-6, 2_000))
    for other in found[1:]:
        for name in ("q", "y", "regions", "gap", "iterations"):
            torch.testing.assert_close(getattr(other, name), getattr(found[0], name), rtol=0, atol=0, equal_nan=True)
    if kind != "nan":
        expected = min_cut_solver.solve(*min_cut_solver.grid_problem(w), 1 / (4 * len(shape)), 1e-6, 2_000)
        torch.testing.assert_close(found[0].q, expected.q, atol=1e-2, rtol=1e-2)


def test_a_team_is_for_few_large_grids(threads):
    threads(4)
    assert [min_cut_solver._team(batch, 1024 * 1024) for batch in (1, 3, 4, 5, 8, 400)] == [4, 4, 1, 4, 1, 1]
    assert [min_cut_solver._team(1, n) for n in (100, 131_072, 200_000, 10**7)] == [1, 2, 3, 4]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_cuts_of_grids_are_minimum_cuts(shape, kind):
    """520 problems here and in the next test."""
    generator, layer = np.random.default_rng(0), MinCut(shape, gamma=0.7, tolerance=1e-6).double()
    layer.max_iterations = 100_000
    w = capacities(kind, generator, 14, layer.channels, *shape)
    found = layer.solve(torch.as_tensor(w))
    assert found.gap.max() <= 1e-6
    for weights, cut in zip(w, found.cut.numpy(), strict=True):
        graph, edges = as_graph(shape, weights)
        value = exact.cut_value(graph, edges, np.append(cut.ravel(), [True, False]))
        assert value == pytest.approx(exact.min_cut(graph, edges).value, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_cuts_of_graphs_are_minimum_cuts(kind):
    generator = np.random.default_rng(1)
    for num_vertices in (2, 5, 12, 30):
        edges = random_graph(generator, num_vertices)
        layer = GraphMinCut(edges, num_vertices, gamma=2.0, tolerance=1e-6, max_iterations=100_000).double()
        w = capacities(kind, generator, 8, len(edges) + 2 * num_vertices)
        found = layer.solve(torch.as_tensor(w))
        assert found.gap.max() <= 1e-6
        for weights, cut in zip(w, found.cut.numpy(), strict=True):
            value = exact.cut_value(layer.graph, weights, np.append(cut, [True, False]))
            assert value == pytest.approx(exact.min_cut(layer.graph, weights).value, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("theta", [-2.0, -0.7, 0.3, 1.1, 4.0])
@pytest.mark.parametrize("shape", [(8, 9), (3, 4, 4)], ids=str)
def test_level_sets_are_cuts_of_shifted_problems(shape, theta):
    generator, layer = np.random.default_rng(2), MinCut(shape, gamma=0.5, **EXACT).double()
    w = capacities("real", generator, 6, layer.channels, *shape)
    p = layer(torch.as_tensor(w)).numpy()
    shift = layer.gamma * theta
    w[:, -2 if shift < 0 else -1] += abs(shift)
    for weights, level in zip(w, p > theta, strict=True):
        graph, edges = as_graph(shape, weights)
        value = exact.cut_value(graph, edges, np.append(level.ravel(), [True, False]))
        assert value == pytest.approx(exact.min_cut(graph, edges).value, rel=1e-6)


@pytest.mark.parametrize("shape", [(5, 6), (2, 3, 4)], ids=str)
def test_solution_is_that_of_a_qp_solver(shape, path):
    """The same problem for OSQP, with a slack variable for each edge: s >= p_u - p_v, s >= 0."""
    generator, layer = np.random.default_rng(3), MinCut(shape, gamma=0.8, **EXACT).double()
    w = generator.exponential(1, (layer.channels, *shape))
    graph, weights = as_graph(shape, w)
    N = graph.num_vertices - 2
    inner = graph.edges[: -2 * N]
    a, f = weights[: len(inner)], (w[-2] - w[-1]).ravel() / layer.gamma
    B = sparse.csr_array(graph.incidence())[: len(inner), :N]
    E = len(inner)
    P = sparse.csc_matrix(sparse.block_diag([layer.gamma * sparse.eye_array(N), sparse.csc_array((E, E))]))
    A = sparse.csc_matrix(sparse.block_array([[-B, sparse.eye_array(E)], [None, sparse.eye_array(E)]]))
    for matrix in (P, A):
        matrix.indices, matrix.indptr = matrix.indices.astype(np.int32), matrix.indptr.astype(np.int32)
    solver = osqp.OSQP()
    solver.setup(
        P, np.append(-layer.gamma * f, a), A, np.zeros(2 * E), np.full(2 * E, np.inf),
        eps_abs=1e-10, eps_rel=1e-10, max_iter=200_000, polishing=True, verbose=False,
    )  # fmt: skip
    expected = solver.solve().x[:N].reshape(shape)
    assert np.abs(layer(torch.as_tensor(w)).numpy() - expected).max() < 1e-6


def test_constant_without_capacities_and_mean_with_infinite_ones(path):
    w = torch.rand(2, 6, 5, 4, dtype=torch.float64)
    f = w[:, 4] - w[:, 5]
    w[:, :4] = 0
    torch.testing.assert_close(MinCut((5, 4), **EXACT).double()(w), f)
    w[:, :4] = torch.inf
    mean = f.mean((1, 2), keepdim=True).expand_as(f)
    torch.testing.assert_close(MinCut((5, 4), **EXACT).double()(w), mean)


def test_infinite_capacity_in_one_direction(path):
    """The second vertex may not be below the first."""
    layer = GraphMinCut([[0, 1]], 2, **EXACT).double()
    w = torch.tensor([[torch.inf, 3.0, 0.0, 0.0, 1.0], [torch.inf, 0.0, 3.0, 0.0, 1.0]], dtype=torch.float64)
    torch.testing.assert_close(layer(w), torch.tensor([[1.0, 1.0], [0.0, 2.0]], dtype=torch.float64))


def test_edges_that_leave_the_grid_are_ignored(path):
    layer, w = MinCut((4, 5)), torch.rand(6, 4, 5)
    p = layer(w)
    w[~torch.as_tensor(grid_edges((4, 5)))] = 1e6
    assert torch.equal(layer(w), p)


# ---------------------------------------------------------------------------------------------------------- gradients


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(3, 4), (2, 2, 2)], ids=str)
def test_gradients_of_grids(shape, device, path):
    generator = torch.Generator().manual_seed(0)
    layer = MinCut(shape, gamma=0.7, **EXACT).double().to(device)
    w = torch.rand(2, layer.channels, *shape, generator=generator, dtype=torch.float64).to(device).requires_grad_()
    assert gradcheck(layer, w)


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_of_graphs(device, path):
    edges = random_graph(np.random.default_rng(4), 8)
    layer = GraphMinCut(edges, 8, gamma=0.7, **EXACT).double().to(device)
    w = torch.rand(2, len(edges) + 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(device)
    assert gradcheck(layer, w.requires_grad_())


def test_gradient_is_zero_only_where_nothing_moves():
    """Every capacity between two regions has a gradient, no capacity inside a region has."""
    torch.manual_seed(0)
    layer, w = MinCut((6, 6), **EXACT).double(), torch.rand(6, 6, 6, dtype=torch.float64)
    w[:4] *= 0.3
    w.requires_grad_()
    p = layer(w)
    (grad,) = torch.autograd.grad((p * torch.randn_like(p)).sum(), w)
    falls = p[:, :-1] - p[:, 1:]
    assert torch.equal(grad[0, :, :-1] != 0, falls > 0) and torch.equal(grad[1, :, 1:] != 0, falls < 0)
    assert bool(((falls > 0).any() and (falls == 0).any()).item())


# --------------------------------------------------------------------------------------------------------- properties

sides = st.integers(1, 9)
seeds = st.integers(0, 2**32 - 1)


@settings(max_examples=40, deadline=None)
@given(sides, sides, st.integers(0, 3), seeds, st.floats(0.1, 10))
def test_compiled_code_equals_torch(H, W, T, seed, scale):
    shape = (T, H, W) if T else (H, W)
    layer = MinCut(shape, tolerance=1e-8, max_iterations=300).double()
    w = torch.rand(3, layer.channels, *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    w[:, :-2] *= scale
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(action="ignore"):
        compiled = layer.solve(w)
        patch.setattr(native, "load", lambda source, real: None)
        expected = layer.solve(w)
    assert torch.equal(compiled.iterations, expected.iterations)
    for name in ("p", "flow", "gap"):
        torch.testing.assert_close(getattr(compiled, name), getattr(expected, name), rtol=1e-7, atol=1e-9)


@settings(max_examples=25, deadline=None)
@given(seeds, st.floats(0.2, 5))
def test_gamma_scales_p_and_changes_no_cut(seed, gamma):
    w = torch.rand(4, 6, 7, 8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    one, other = (MinCut((7, 8), g, **EXACT).double()(w) for g in (1.0, gamma))
    torch.testing.assert_close(one, gamma * other)


@settings(max_examples=25, deadline=None)
@given(seeds)
def test_solution_is_between_the_unaries_and_keeps_their_mean(seed):
    w = torch.rand(4, 6, 7, 8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    f, p = w[:, 4] - w[:, 5], MinCut((7, 8), **EXACT).double()(w)
    torch.testing.assert_close(p.mean((1, 2)), f.mean((1, 2)))  # capacities move mass and create none
    assert bool((p.amax((1, 2)) <= f.amax((1, 2)) + 1e-9).all() and (p.amin((1, 2)) >= f.amin((1, 2)) - 1e-9).all())


@settings(max_examples=15, deadline=None)
@given(seeds)
def test_transposed_and_mirrored_problems(seed):
    w = torch.rand(6, 5, 7, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    p = MinCut((5, 7), **EXACT).double()(w)
    transposed = w[[2, 3, 0, 1, 4, 5]].mT
    torch.testing.assert_close(MinCut((7, 5), **EXACT).double()(transposed), p.mT)
    torch.testing.assert_close(MinCut((5, 7), **EXACT).double()(w[[1, 0, 2, 3, 4, 5]].flip(-1)), p.flip(-1))


def test_a_grid_is_a_graph():
    w = torch.rand(3, 6, 5, 6, dtype=torch.float64)
    graph = Graph.grid((5, 6))
    layer = GraphMinCut(graph.edges[:-60], 30, **EXACT).double()
    weights = w[..., torch.as_tensor(grid_edges((5, 6)))]
    torch.testing.assert_close(layer(weights), MinCut((5, 6), **EXACT).double()(w).flatten(1))


def test_flow_is_dual_feasible_and_explains_p():
    w = torch.rand(6, 6, 7, dtype=torch.float64)
    found = MinCut((6, 7), **EXACT).double().solve(w)
    x, y = found.flow
    assert not x[:, -1].any() and not y[-1].any()
    assert bool((x[:, :-1] <= w[0, :, :-1]).all() and (x[:, :-1] >= -w[1, :, 1:]).all())
    assert bool((y[:-1] <= w[2, :-1]).all() and (y[:-1] >= -w[3, 1:]).all())
    p = w[4] - w[5] - (x - x.roll(1, 1)) - (y - y.roll(1, 0))
    torch.testing.assert_close(p, found.p, rtol=0, atol=1e-4)  # flows converge with the square root of the gap


def test_antiparallel_and_repeated_edges_add_up(path):
    w = torch.rand(4, dtype=torch.float64)
    ends = torch.tensor([2.0, 0.0, 0.0, 1.0], dtype=torch.float64)
    many = GraphMinCut([[0, 1], [1, 0], [0, 1], [1, 0]], 2, **EXACT).double()
    two = GraphMinCut([[0, 1], [1, 0]], 2, **EXACT).double()
    torch.testing.assert_close(many(torch.cat([w, ends])), two(torch.cat([w[:2] + w[2:], ends])))
    assert many.pairs.tolist() == [[0, 1]]


# ---------------------------------------------------------------------------------------------------------- contracts


@pytest.mark.parametrize("name", ["grid", "graph"])
def test_operators(name, path):
    w = torch.rand(2, 6, 3, 4, requires_grad=True)
    if name == "grid":
        torch.library.opcheck(min_cut.min_cut_grid, (w, 1e-4, 500, True))
        return
    u, v, step = torch.tensor([0, 1]), torch.tensor([1, 2]), torch.full((2,), 1 / 3)
    a, b, c = (torch.rand(2, n, requires_grad=True) for n in (2, 2, 3))
    torch.library.opcheck(min_cut.min_cut_graph, (a, b, c, u, v, step, 1e-4, 500, True))


def layers():
    return [(MinCut((4, 5)), torch.rand(3, 6, 4, 5)), (GraphMinCut([[0, 1], [2, 1]], 3), torch.rand(3, 8))]


@pytest.mark.parametrize("layer, w", layers(), ids=["grid", "graph"])
def test_torch_transforms(layer, w):
    p = layer(w)
    assert torch.equal(torch.func.vmap(layer)(w), p) and torch.equal(torch.func.vmap(layer, 1)(w.movedim(0, 1)), p)
    assert torch.equal(torch.compile(layer, backend="aot_eager", fullgraph=True)(w), p)
    assert torch.equal(torch.export.export(layer, (w,)).module()(w), p)
    assert torch.equal(copy.deepcopy(layer)(w), p) and torch.equal(pickle.loads(pickle.dumps(layer))(w), p)
    jacobian = torch.func.vmap(torch.func.jacrev(layer))(w)
    torch.testing.assert_close(jacobian[0], torch.autograd.functional.jacobian(layer, w[0]))
    assert layer.state_dict() == {} and layer(w[:0]).shape == (0, *p.shape[1:])


@pytest.mark.parametrize("layer, w", layers(), ids=["grid", "graph"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(layer, w, dtype):
    assert layer(w.to(dtype)).dtype == torch.float32
    with torch.autocast("cpu", dtype):
        assert torch.equal(layer(w), layer(w.float()))


@pytest.mark.parametrize("layer, w", layers(), ids=["grid", "graph"])
def test_any_batch(layer, w):
    torch.testing.assert_close(layer(w.view(3, 1, *w.shape[1:])), layer(w).unsqueeze(1))
    assert torch.equal(layer(w[1]), layer(w)[1])
    assert torch.equal(layer(w.movedim(0, -1).contiguous().movedim(-1, 0)), layer(w)), "any strides"


def test_threads_change_nothing():
    w, threads = torch.rand(9, 6, 64, 64), torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = MinCut((64, 64))(w)
        torch.set_num_threads(3)
        assert torch.equal(MinCut((64, 64))(w), one)
    finally:
        torch.set_num_threads(threads)


# ---------------------------------------------------------------------------------------------------------- bad input


def test_a_gap_above_the_tolerance_is_a_warning(path):
    w = torch.rand(2, 6, 16, 16)
    layer = MinCut((16, 16), tolerance=1e-5, max_iterations=3)
    with pytest.warns(
        UserWarning, match=r"relative duality gap of \d\.\de-\d\d after 3 iterations; expected at most 1e-05"
    ):
        found = layer.solve(w)
    assert bool((found.gap > 1e-5).all()) and found.iterations.tolist() == [3, 3]


@pytest.mark.parametrize("layer, w", layers(), ids=["grid", "graph"])
def test_the_warning_can_be_left_out(layer, w, path):
    silent = copy.copy(layer)
    silent.tolerance, silent.max_iterations, silent.warn = 1e-12, 1, False
    with warnings.catch_warnings(action="error"):
        assert bool((silent.solve(w).gap > 1e-12).any())


def test_nan_ends_the_iterations_at_the_first_check(path):
    w = torch.rand(2, 6, 8, 8)
    w[0, 4, 3, 3] = torch.nan
    with pytest.warns(UserWarning, match="gap of nan after"):
        found = MinCut((8, 8)).solve(w)
    assert found.iterations[0] == 10 and found.p[0].isnan().any() and found.p[1].isfinite().all()


@pytest.mark.parametrize(
    "make, said",
    [
        (lambda: MinCut((4,)), "shape is"),
        (lambda: MinCut((4, 4), gamma=0), "gamma is 0"),
        (lambda: MinCut((4, 4), tolerance=0), "tolerance is 0; expected a number between 0 and 1"),
        (lambda: MinCut((4, 4), max_iterations=0), "max_iterations is 0; expected an integer from 1 to 1,000,000"),
        (lambda: MinCut((4, 4))(torch.rand(5, 4, 4)), r"a MinCut of \(4, 4\) expects \(\.\.\., 6, 4, 4\)"),
        (lambda: MinCut((4, 4), validate=True)(-torch.ones(6, 4, 4)), "w has the capacity -1; expected capacities of"),
        (lambda: GraphMinCut([[0, 3]], 3), r"edge 0 connects \[0, 3\], but the vertices are 0 to 2"),
        (lambda: GraphMinCut([[0, 1]], 2)(torch.rand(4)), r"1 edges and 2 vertices expects \(\.\.\., 5\)"),
    ],
)
def test_bad_arguments(make, said):
    with pytest.raises(ValueError, match=said):
        make()


# ------------------------------------------------------------------------------------------------------ compiled code


@pytest.fixture
def uncached(monkeypatch, tmp_path):
    """No library is loaded or on disk."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    native.load_cached.cache_clear()
    yield tmp_path
    native.load_cached.cache_clear()


def test_library_is_compiled_once(uncached):
    if native.load(min_cut_solver.SOURCE, torch.float32) is None:
        pytest.skip("needs a C compiler")
    (library,) = (uncached / "cutslots" / "native").iterdir()
    before = library.stat().st_mtime_ns
    native.load_cached.cache_clear()
    assert native.load(min_cut_solver.SOURCE, torch.float32) is not None
    assert library.stat().st_mtime_ns == before and library.suffix == ".so"


@pytest.mark.parametrize("compiler", ["false", "no-such-compiler"])
def test_a_compiler_that_fails_is_a_warning(compiler, uncached, monkeypatch):
    monkeypatch.setenv("CC", compiler)
    with pytest.warns(UserWarning, match=r"min_cut\.c is not compiled \(.*\); torch computes instead"):
        p = MinCut((4, 4))(torch.rand(6, 4, 4))
    assert p.isfinite().all() and not list((uncached / "cutslots" / "native").iterdir())


def test_a_folder_of_others_is_not_trusted(uncached):
    (uncached / "cutslots" / "native").mkdir(parents=True)
    (uncached / "cutslots" / "native").chmod(0o777)
    with pytest.warns(UserWarning, match="can be written to by other users"):
        assert native.load(min_cut_solver.SOURCE, torch.float32) is None


def test_compiled_code_can_be_turned_off(uncached, monkeypatch):
    monkeypatch.setenv("CUTSLOTS_NATIVE", "0")
    assert native.load(min_cut_solver.SOURCE, torch.float32) is None


@pytest.mark.parametrize("value", [None, "0", "1"])
def test_compiled_code_can_be_turned_off_in_a_block(monkeypatch, value):
    monkeypatch.delenv("CUTSLOTS_NATIVE", raising=False)
    if value:
        monkeypatch.setenv("CUTSLOTS_NATIVE", value)
    before = native.load(min_cut_solver.SOURCE, torch.float32)
    with native.disabled():
        assert native.load(min_cut_solver.SOURCE, torch.float32) is None
    assert os.environ.get("CUTSLOTS_NATIVE") == value
    assert native.load(min_cut_solver.SOURCE, torch.float32) is before


def test_failed_allocation_is_a_memory_error():
    with pytest.raises(MemoryError, match="memory for the arrays of compiled code"):
        native.in_threads(lambda: 0, 2)


# ------------------------------------------------------------------------------------------------------ calls, traces


def test_first_call_does_not_import_the_compiler():
    """Without gradients the operator is not called: its first call imports torch's compiler, which takes a second."""
    code = (
        "import sys, torch; from cutslots.programs.min_cut import MinCut;"
        "torch.set_grad_enabled(False); MinCut((8, 8))(torch.rand(2, 6, 8, 8)); print('torch._dynamo' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_call_without_gradients_equals_one_with_gradients():
    w = torch.rand(3, 6, 9, 7)
    assert torch.equal(MinCut((9, 7))(w), MinCut((9, 7))(w.requires_grad_()).detach())


@pytest.mark.filterwarnings("ignore")  # torch.jit.trace is deprecated
@pytest.mark.parametrize("tracer", ["make_fx", "jit"])
def test_traced_layer_solves_other_weights(tracer):
    cut, w, other = MinCut((6, 5)), torch.rand(2, 6, 6, 5), torch.rand(2, 6, 6, 5)
    with torch.no_grad():
        traced = make_fx(cut)(w) if tracer == "make_fx" else torch.jit.trace(cut, w)
        assert torch.equal(traced(other), cut(other)), "the solution of w is no constant of the trace"


def test_fake_tensors_have_shapes():
    with FakeTensorMode(), torch.no_grad():
        assert MinCut((6, 5))(torch.rand(2, 6, 6, 5)).shape == (2, 6, 5)
