import numpy as np
import pytest

from cutslots.graph import Graph, grid_edges, matching_program


def test_counts_at_the_papers_size():
    program = Graph.grid((64, 64)).program()
    assert program.A.shape == (24_321, 52_739)
    assert [program.A[:, s].shape[1] for s in program.blocks.values()] == [4_098, 24_320, 24_320, 1]


def test_two_by_two_by_hand():
    graph = Graph.grid((2, 2))  # pixels 0 1 / 2 3, source 4, sink 5
    right, left = [[0, 1], [2, 3]], [[1, 0], [3, 2]]
    down, up = [[0, 2], [1, 3]], [[2, 0], [3, 1]]
    source, sink = [[4, 0], [4, 1], [4, 2], [4, 3]], [[0, 5], [1, 5], [2, 5], [3, 5]]
    assert graph.edges.tolist() == right + left + down + up + source + sink
    assert (graph.source, graph.sink) == (4, 5)


def test_a_clip_lists_time_first():
    graph = Graph.grid((2, 1, 1))
    assert graph.edges.tolist() == [[0, 1], [1, 0], [2, 0], [2, 1], [0, 3], [1, 3]]
    assert grid_edges((2, 1, 1)).squeeze((2, 3)).tolist()[:4] == [
        [True, False],
        [False, True],
        [False] * 2,
        [False] * 2,
    ]


@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (2, 3, 4)])
def test_grid_edges_lists_the_graphs_edges(shape):
    """Weights that name their own edge come out in the graph's order."""
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


def test_every_row_of_the_program_says_what_the_paper_says(rng):
    graph = Graph(rng.integers(0, 6, (11, 2)), 6, source=2, sink=5)
    program = graph.program()
    z = rng.standard_normal(program.A.shape[1])
    p, d, s, s_st = (z[program.blocks[k]] for k in ("p", "d", "s", "s_st"))
    tails, heads = graph.edges.T
    rows = program.A @ z
    assert np.allclose(rows[:-1], d - s - (p[tails] - p[heads]))
    assert np.isclose(rows[-1], p[2] - p[5] - s_st[0])
    assert program.b.tolist() == [0.0] * 11 + [1.0]
    assert np.allclose(graph.incidence() @ p, p[tails] - p[heads])


def test_objective_fills_the_d_block_only(rng):
    program = Graph.grid((2, 2)).program()
    w = rng.standard_normal((3, 16))
    c = program.objective(w)
    assert np.array_equal(c[:, program.blocks["d"]], w) and np.count_nonzero(c) == w.size


def test_matching_program_by_hand():
    program = matching_program(1, 2)  # d00 d01 | p | s ; one row node, two column nodes
    assert program.A.toarray().tolist() == [
        [1, 1, 1, 0, 0, 1, 0, 0],
        [1, 0, 0, 1, 0, 0, 1, 0],
        [0, 1, 0, 0, 1, 0, 0, 1],
    ]


@pytest.mark.parametrize("shape", [(4,), (0, 3), (2, 2, 2, 2), (2.5, 2), "ab"])
def test_bad_shapes(shape):
    with pytest.raises(ValueError, match=r"shape is .* expected \(H, W\) or \(T, H, W\)"):
        Graph.grid(shape)


@pytest.mark.parametrize(
    "edges, error, message",
    [
        ([[0, 3]], ValueError, r"edge 0 joins \[0, 3\], but the vertices are 0 to 2"),
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
