import numpy as np
import pytest
import torch

from cutslots.programs.graph import Graph, check_shape, grid_axes, grid_edges, matching_qp


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


def test_a_terminal_below_zero():
    with pytest.raises(ValueError, match=r"^source is -1, but the vertices are 0 to 2$"):
        Graph(np.array([[0, 1]]), 3, -1, 2)
    with pytest.raises(ValueError, match=r"^sink is 3, but the vertices are 0 to 2$"):
        Graph(np.array([[0, 1]]), 3, 0, 3)
    assert Graph(np.array([[0, 1]]), 3, 2, 0).source == 2


@pytest.mark.parametrize("num_vertices", [0, -1, 2.0, "3"])
def test_bad_numbers_of_vertices(num_vertices):
    with pytest.raises(ValueError, match=r"^num_vertices is .*; expected an integer of at least 1$"):
        Graph.with_terminals(np.zeros((0, 2), dtype=int), num_vertices)


@pytest.mark.parametrize("edges", [[[0, -1]], [[0, 1], [3, 0]], [[-1, 0]]])
def test_edges_to_vertices_that_do_not_exist(edges):
    bad = len(edges) - 1
    with pytest.raises(
        ValueError, match=rf"^edge {bad} connects \[{edges[bad][0]}, {edges[bad][1]}\], but the vertices"
    ):
        Graph(np.array(edges), 3, 0, 1)


def test_edges_with_three_columns():
    with pytest.raises(
        ValueError, match=r"^edges has shape \(1, 3\); expected \(E, 2\), the tail and the head of each edge$"
    ):
        Graph(np.array([[0, 1, 2]]), 3, 0, 1)


def test_graphs_may_have_one_vertex_or_no_edges():
    graph = Graph.with_terminals([], np.int64(1))
    assert graph.edges.tolist() == [[1, 0], [0, 2]] and (graph.num_vertices, graph.source, graph.sink) == (3, 1, 2)
    assert graph.edges.dtype == np.int64 and graph.edges.shape == (2, 2)
    empty = Graph(np.zeros((0, 2)), 2, 0, 1)
    assert empty.edges.shape == (0, 2) and empty.edges.dtype == np.int64 and empty.num_edges == 0


def test_edges_of_small_integers():
    assert Graph(np.array([[0, 1]], dtype=np.uint8), 2, 0, 1).edges.dtype == np.int64


@pytest.mark.parametrize("terminals", [(1, 3), (3, 0)])
def test_reduced_matrix_eliminates_the_edges(terminals, rng):
    graph = Graph(rng.integers(0, 5, (9, 2)), 5, *terminals)
    B, a = graph.incidence().toarray(), np.zeros(5)
    a[terminals[0]], a[terminals[1]] = 1, -1
    assert np.allclose(graph.reduced_matrix().toarray(), np.eye(5) + B.T @ B / 2 + np.outer(a, a))
    assert graph.incidence().shape == (9, 5)


def test_vertices_without_edges_keep_their_rows():
    graph = Graph(np.array([[0, 1]]), 6, 0, 1)
    assert graph.incidence().shape == (1, 6) and graph.reduced_matrix().shape == (6, 6)
    qp = graph.qp()
    assert qp.A.shape == (2, 6 + 1 + 1 + 1) and [qp.blocks[k].start for k in ("p", "d", "s", "s_st")] == [None, 6, 7, 8]


def test_objective_has_the_type_of_the_weights():
    qp = Graph.grid((1, 1)).qp()
    assert qp.objective(np.ones(2, dtype=np.float32)).dtype == np.float32
    assert qp.objective([[1.0, 2.0]]).shape == (1, qp.A.shape[1])


def test_matching_qp_of_a_square():
    qp = matching_qp(2, 3)
    assert qp.A.shape == (5, 6 + 5 + 5) and qp.b.tolist() == [1.0] * 5
    assert qp.A[:, qp.blocks["d"]].toarray().tolist() == [
        [1, 1, 1, 0, 0, 0],
        [0, 0, 0, 1, 1, 1],
        [1, 0, 0, 1, 0, 0],
        [0, 1, 0, 0, 1, 0],
        [0, 0, 1, 0, 0, 1],
    ]
    for block in ("p", "s"):
        assert np.array_equal(qp.A[:, qp.blocks[block]].toarray(), np.eye(5))


def test_axes_are_in_the_order_of_the_channels():
    assert grid_axes((4, 5)) == [-1, -2] and grid_axes((3, 4, 5)) == [-3, -1, -2]


def test_shapes_are_tuples_of_ints():
    for shape in ([2, 3], torch.Size([2, 3]), np.array([2, 3]), (np.int32(2), 3)):
        checked = check_shape(shape)
        assert checked == (2, 3) and all(type(n) is int for n in checked)
    assert check_shape((1, 1, 1)) == (1, 1, 1)
    for shape in ((0, 1), (1, 0), (1,), (1, 1, 1, 1), 7, (-1, 2)):
        message = r"expected \(H, W\) or \(T, H, W\) with sides of at least 1$"
        with pytest.raises(ValueError, match=message):
            check_shape(shape)


def test_edges_of_a_row_and_a_column():
    """Weights to the right of the last pixel and to the left of the first one belong to no edge."""
    assert grid_edges((1, 3))[:, 0].tolist() == [
        [True, True, False],
        [False, True, True],
        [False] * 3,
        [False] * 3,
        [True] * 3,
        [True] * 3,
    ]
    assert grid_edges((1, 3)).dtype == bool
