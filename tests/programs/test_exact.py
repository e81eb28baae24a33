import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cutslots import Graph
from cutslots.programs import exact


def brute_force(graph, w):
    """Return the smallest weight over all sides with the source and without the sink."""
    free = [v for v in range(graph.num_vertices) if v not in (graph.source, graph.sink)]
    best = np.inf
    for chosen in itertools.product([False, True], repeat=len(free)):
        side = np.zeros(graph.num_vertices, dtype=bool)
        side[graph.source], side[free] = True, chosen
        best = min(best, exact.cut_value(graph, w, side))
    return best


@settings(max_examples=40, deadline=None)
@given(st.integers(3, 7), st.integers(0, 12), st.integers(0, 2**32 - 1))
def test_min_cut_and_min_cut_lp_equal_brute_force(vertices, edges, seed):
    rng = np.random.default_rng(seed)
    graph = Graph(rng.integers(0, vertices, (edges, 2)), vertices, 0, vertices - 1)
    w = rng.exponential(size=edges)
    best = brute_force(graph, w)
    by_flow, by_lp = exact.min_cut(graph, w), exact.min_cut_lp(graph, w)
    assert np.isclose(by_flow.value, best, rtol=1e-6, atol=1e-9)
    assert np.isclose(by_lp.value, best, atol=1e-7)
    assert by_flow.side[0] and not by_flow.side[-1] and by_lp.side[0] and not by_lp.side[-1]


def test_min_cut_by_hand():
    """The left pixel is tied to the source, the right one to the sink; the edge between pixels 1 and 2 is cheapest."""
    graph = Graph.grid((1, 4))
    right, left = [5.0, 1.0, 5.0], [5.0, 1.0, 5.0]
    w = np.array([*right, *left, 9, 0, 0, 0, 0, 0, 0, 9.0])
    cut = exact.min_cut(graph, w)
    assert cut.side[:4].tolist() == [True, True, False, False] and cut.value == 1.0


def test_of_several_minimum_cuts_the_source_side_is_smallest():
    """A path of equal weights: every edge is a minimum cut, and the first one leaves the source alone."""
    graph = Graph(np.array([[0, 1], [1, 2], [2, 3]]), 4, 0, 3)
    cut = exact.min_cut(graph, [2.0, 2.0, 2.0])
    assert cut.side.tolist() == [True, False, False, False] and cut.value == 2.0 and isinstance(cut.value, float)
    assert cut.side.dtype == bool


def test_edges_are_directed():
    """An edge from the sink's side to the source's is not cut."""
    graph = Graph(np.array([[0, 1], [1, 2], [2, 1], [1, 0]]), 3, 0, 2)
    cut = exact.min_cut(graph, [1.0, 3.0, 100.0, 100.0])
    assert cut.value == 1.0 and cut.side.tolist() == [True, False, False]
    assert exact.min_cut_lp(graph, [1.0, 3.0, 100.0, 100.0]).value == pytest.approx(1.0)
    assert exact.cut_value(graph, [1.0, 3.0, 100.0, 7.0], np.array([False, True, False])) == 10.0


def test_parallel_edges_add_up():
    graph = Graph(np.array([[0, 1], [0, 1], [1, 2]]), 3, 0, 2)
    assert exact.min_cut(graph, [1.0, 1.0, 3.0]).side.tolist() == [True, False, False]
    assert exact.min_cut(graph, [2.0, 2.0, 3.0]).side.tolist() == [True, True, False]


@pytest.mark.parametrize("scale", [1e-9, 1.0, 1e9])
def test_weights_may_have_any_scale(scale, rng):
    graph = Graph.grid((3, 4))
    w = rng.exponential(size=graph.num_edges)
    one, scaled = exact.min_cut(graph, w), exact.min_cut(graph, scale * w)
    assert np.array_equal(one.side, scaled.side) and scaled.value == pytest.approx(scale * one.value)


def test_weights_are_rounded_to_2_to_the_minus_29_of_the_flow():
    """Two edges in a row whose weights differ by a little: the lighter one is cut."""
    graph = Graph(np.array([[0, 1], [1, 2], [2, 3]]), 4, 0, 3)
    assert exact.min_cut(graph, [1.0, 1 - 1e-8, 1.0]).side.tolist() == [True, True, False, False]
    assert exact.min_cut(graph, [1.0, 1.0, 1 - 1e-8]).side.tolist() == [True, True, True, False]


@pytest.mark.parametrize(
    "w, side",
    [([0.3, 0.2, 1e9], [True, True, False, False]), ([1e9, 0.3, 0.2], [True, True, True, False])],
    ids=["source", "sink"],
)
def test_heavy_edges_at_one_terminal_do_not_round_the_others_away(w, side):
    """The flow is bounded by the lighter terminal, so weights keep 29 bits of its sum."""
    cut = exact.min_cut(Graph(np.array([[0, 1], [1, 2], [2, 3]]), 4, 0, 3), w)
    assert cut.side.tolist() == side and cut.value == 0.2


def test_edges_of_weight_zero_connect_nothing():
    graph = Graph(np.array([[0, 1], [1, 0]]), 3, 0, 2)
    assert exact.min_cut(graph, [0.0, 1.0]).side.tolist() == [True, False, False]


def test_the_sink_need_not_be_the_last_vertex():
    graph = Graph(np.array([[3, 0], [0, 2], [2, 1]]), 5, source=3, sink=1)
    for solve in (exact.min_cut, exact.min_cut_lp):
        cut = solve(graph, [3.0, 1.0, 2.0])
        assert cut.value == pytest.approx(1.0) and cut.side[[3, 0]].all() and not cut.side[[2, 1]].any()


def test_a_capacity_and_a_flow_fit_into_int32():
    assert exact.MAX_CAPACITY > 2**29 and np.iinfo(np.int32).max >= 2 * exact.MAX_CAPACITY


def test_one_terminal_may_be_without_edges():
    """Nothing flows, so the source side is what the source reaches."""
    graph = Graph(np.array([[0, 1], [1, 2]]), 4, 0, 3)
    cut = exact.min_cut(graph, [1.0, 1.0])
    assert cut.value == 0.0 and cut.side.tolist() == [True, True, True, False]


def test_tensors_and_lists_are_weights():
    graph = Graph(np.array([[0, 1]]), 2, 0, 1)
    for w in ([2], np.array([2], dtype=np.int32), torch.tensor([2.0], dtype=torch.bfloat16, requires_grad=True)):
        assert exact.min_cut(graph, w).value == exact.min_cut_lp(graph, w).value == 2.0


def test_a_linear_program_that_is_not_solved(monkeypatch):
    result = exact.optimize.OptimizeResult(status=4, message="numerical difficulties")
    monkeypatch.setattr(exact.optimize, "linprog", lambda *_, **__: result)
    with pytest.raises(
        RuntimeError, match=r"^HiGHS did not solve the linear program of the cut: numerical difficulties"
    ):
        exact.min_cut_lp(Graph.grid((2, 2)), np.ones(16))


def test_min_cut_equals_min_cut_lp_on_a_grid(rng):
    graph = Graph.grid((9, 11))
    w = rng.exponential(size=graph.num_edges)
    assert np.isclose(exact.min_cut(graph, w).value, exact.min_cut_lp(graph, w).value, rtol=1e-6)


def test_min_cut_does_not_overflow_for_heavy_edges():
    """Edges between neighbours are so much heavier than those of the terminals that capacities reach their limit."""
    graph = Graph.grid((8, 8))
    for seed in range(10):
        w = np.random.default_rng(seed).random(graph.num_edges)
        w[:-128] *= 1e5
        cut = exact.min_cut(graph, torch.tensor(w, requires_grad=True))
        assert cut.side[graph.source] and not cut.side[graph.sink]
        assert np.isclose(cut.value, exact.min_cut_lp(graph, w).value, rtol=1e-5)


def test_min_cut_of_zero_weights():
    graph = Graph.grid((2, 2))
    assert exact.min_cut(graph, np.zeros(16)).value == 0


def test_min_matching_equals_brute_force(rng):
    cost = rng.standard_normal((2, 4, 4))
    d = exact.min_matching(cost)
    for c, x in zip(cost, d, strict=True):
        best = min(c[np.arange(4), list(perm)].sum() for perm in itertools.permutations(range(4)))
        assert np.isclose((c * x).sum(), best) and (x.sum(0) == 1).all() and (x.sum(1) == 1).all()
    assert exact.min_matching(cost[0, :2]).sum() == 2
    matching = exact.min_matching([[3, 1], [1, 0]])
    assert matching.tolist() == [[0.0, 1.0], [1.0, 0.0]] and matching.dtype == np.float64
    batches = torch.tensor(cost)[None, :, None].repeat(3, 1, 2, 1, 1)
    assert np.array_equal(exact.min_matching(batches), np.broadcast_to(d[None, :, None], (3, 2, 2, 4, 4)))


def test_bad_input(rng):
    graph = Graph.grid((2, 2))
    with pytest.raises(ValueError, match=r"w has shape \(3,\); expected \(16,\)"):
        exact.min_cut(graph, np.zeros(3))
    with pytest.raises(ValueError, match="w contains -1; a minimum cut needs weights of at least zero"):
        exact.min_cut(graph, -np.ones(16))
    with pytest.raises(ValueError, match="w contains NaN or infinity"):
        exact.min_cut_lp(graph, np.full(16, np.nan))
    with pytest.raises(ValueError, match="cost contains NaN or infinity"):
        exact.min_matching(np.full((2, 2), np.inf))
    with pytest.raises(ValueError, match=r"cost has shape \(2,\)"):
        exact.min_matching(np.zeros(2))
