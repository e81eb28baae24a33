import numpy as np
import pytest

from cutslots.programs.graph import Graph, grid_edges, matching_qp


def test_qp_has_the_papers_size():
    qp = Graph.grid((64, 64)).qp()
    assert qp.A.shape == (24_321, 52_739)
    assert [qp.A[:, s].shape[1] for s in qp.blocks.values()] == [4_098, 24_320, 24_320, 1]


def test_edges_of_a_2x2_grid():
    graph = Graph.grid((2, 2))  # pixels 0 1 / 2 3, source 4, sink 5
    right, left = [[0, 1], [2, 3]], [[1, 0], [3, 2]]
    down, up = [[0, 2], [1, 3]], [[2, 0], [3, 1]]
    source, sink = [[4, 0], [4, 1], [4, 2], [4, 3]], [[0, 5], [1, 5], [2, 5], [3, 5]]
    assert graph.edges.tolist() == right + left + down + up + source + sink
    assert (graph.source, graph.sink) == (4, 5)


def test_edges_of_a_clip_list_time_first():
    graph = Graph.grid((2, 1, 1))
    assert graph.edges.tolist() == [[0, 1], [1, 0], [2, 0], [2, 1], [0, 3], [1, 3]]
    assert grid_edges((2, 1, 1)).squeeze((2, 3)).tolist()[:4] == [
        [True, False],
        [False, True],
        [False] * 2,
        [False] * 2,
    ]


@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (2, 3, 4)])
def test_grid_edges_are_in_the_order_of_the_graph(shape):
    """Arrays with the tail and head of every weight, indexed by `grid_edges`, list the edges of the graph."""
    graph, exists = Graph.grid(shape), grid_edges(shape)
    N = int(np.prod(shape))
    assert exists.sum() == graph.num_edges
    step = {-1: 1, -2: shape[-1], -3: shape[-1] * shape[-2]}
    axes = [-3, -1, -2] if len(shape) == 3 else [-1, -2]
    tail, head = np.empty((2, *exists.shape), dtype=int)
    pixel = np.arange(N).reshape(shape)
    for i, axis in enumerate(axes):
        for j, sign in enumerate((1, -1)):
            tail[2 * i + j], head[2 * i + j] = pixel, pixel + sign * step[axis]
    tail[-2], head[-2], tail[-1], head[-1] = N, pixel, pixel, N + 1
    assert np.array_equal(np.stack([tail[exists], head[exists]], 1), graph.edges)


def test_rows_of_the_qp_are_the_papers_constraints(rng):
    graph = Graph(rng.integers(0, 6, (11, 2)), 6, source=2, sink=5)
    qp = graph.qp()
    z = rng.standard_normal(qp.A.shape[1])
    p, d, s, s_st = (z[qp.blocks[k]] for k in ("p", "d", "s", "s_st"))
    tails, heads = graph.edges.T
    rows = qp.A @ z
    assert np.allclose(rows[:-1], d - s - (p[tails] - p[heads]))
    assert np.isclose(rows[-1], p[2] - p[5] - s_st[0])
    assert qp.b.tolist() == [0.0] * 11 + [1.0]
    assert np.allclose(graph.incidence() @ p, p[tails] - p[heads])


def test_objective_fills_the_d_block_only(rng):
    qp = Graph.grid((2, 2)).qp()
    w = rng.standard_normal((3, 16))
    c = qp.objective(w)
    assert np.array_equal(c[:, qp.blocks["d"]], w) and np.count_nonzero(c) == w.size


def test_matching_qp_by_hand():
    qp = matching_qp(1, 2)  # d00 d01 | p | s ; one row node, two column nodes
    assert qp.A.toarray().tolist() == [
        [1, 1, 1, 0, 0, 1, 0, 0],
        [1, 0, 0, 1, 0, 0, 1, 0],
        [0, 1, 0, 0, 1, 0, 0, 1],
    ]


@pytest.mark.parametrize("shape", [(4,), (0, 3), (2, 2, 2, 2), (2.5, 2), "ab"])
def test_bad_shape(shape):
    with pytest.raises(ValueError, match=r"shape is .* expected \(H, W\) or \(T, H, W\)"):
        Graph.grid(shape)


@pytest.mark.parametrize(
    "edges, error, message",
    [
        ([[0, 3]], ValueError, r"edge 0 connects \[0, 3\], but the vertices are 0 to 2"),
        ([0, 1], ValueError, r"edges has shape \(2,\); expected \(E, 2\)"),
        ([[0.0, 1.0]], TypeError, "edges has dtype float64; expected integers"),
    ],
)
def test_bad_edges(edges, error, message):
    with pytest.raises(error, match=message):
        Graph.with_terminals(np.array(edges), 3)


def test_bad_terminals():
    with pytest.raises(ValueError, match="sink is 7, but the vertices are 0 to 2"):
        Graph(np.array([[0, 1]]), 3, 0, 7)
    with pytest.raises(ValueError, match="both vertex 1"):
        Graph(np.array([[0, 1]]), 3, 1, 1)
