"""The estimate of a Cholesky factor's fill, on graphs whose separators are known."""

from itertools import pairwise

import numpy as np
import pytest
from scipy import sparse

from cutslots.programs.fill import _eliminate_chains, _separator_size, _without_diagonal, estimate_fill
from cutslots.programs.graph import Graph


def adjacency(edges, n):
    """Return the matrix of an undirected graph, with a diagonal."""
    i, j = np.array(edges).reshape(-1, 2).T
    ones = sparse.csr_array((np.full(len(i), 2.0), (i, j)), shape=(n, n))
    return sparse.csr_array(ones + ones.T + 5 * sparse.eye_array(n))


def grid(height, width):
    """Return a grid without terminals."""
    edges = Graph.grid((height, width)).edges[: -2 * height * width]
    return adjacency(edges, height * width)


def pattern(matrix):
    return _without_diagonal(sparse.csr_array(matrix, dtype=np.float32, copy=True))


def cycle(n):
    return adjacency([(i, (i + 1) % n) for i in range(n)], n)


def test_the_matrix_is_not_changed():
    matrix = cycle(5)
    before = matrix.toarray()
    estimate_fill(matrix)
    assert np.array_equal(matrix.toarray(), before)


def test_pattern_has_ones_off_the_diagonal():
    assert pattern(cycle(4)).toarray().tolist() == [[0, 1, 0, 1], [1, 0, 1, 0], [0, 1, 0, 1], [1, 0, 1, 0]]


@pytest.mark.parametrize("height, width", [(5, 40), (9, 60), (40, 5)])
def test_separator_of_a_long_grid_is_about_its_short_side(height, width):
    """A level of a breadth-first search from a corner is a diagonal: as many vertices as the short side has."""
    assert _separator_size(pattern(grid(height, width))) == min(height, width)


def test_separator_of_a_path_is_one_vertex():
    assert _separator_size(pattern(adjacency([(i, i + 1) for i in range(20)], 21))) == 1


def test_separator_of_a_star_is_all_of_its_leaves():
    """From a leaf: the leaf, the center, all others. The median vertex is a leaf."""
    assert _separator_size(pattern(adjacency([(0, i) for i in range(1, 12)], 12))) == 10


def test_separator_is_that_of_the_largest_component():
    small, large = [(i, i + 1) for i in range(5)], Graph.grid((4, 30)).edges[: -2 * 120] + 6
    assert _separator_size(pattern(adjacency(np.concatenate([small, large]), 126))) == 4
    large = Graph.grid((4, 30)).edges[: -2 * 120]
    assert _separator_size(pattern(adjacency(np.concatenate([large, np.array(small) + 120]), 126))) == 4


@pytest.mark.parametrize("n", [3, 50, 400])
def test_chains_and_cycles_are_eliminated(n):
    for edges in ([(i, i + 1) for i in range(n - 1)], [(i, (i + 1) % n) for i in range(n)]):
        assert _eliminate_chains(pattern(adjacency(edges, n))).shape[0] <= max(2, n // 20)


def test_vertices_without_neighbours_are_eliminated():
    assert _eliminate_chains(pattern(adjacency([], 7))).shape == (0, 0)


def test_elimination_connects_the_neighbours():
    """A complete graph of 5 vertices, with a vertex of degree two in every edge, becomes the complete graph again."""
    pairs = [(i, j) for i in range(5) for j in range(i)]
    edges = [edge for k, (i, j) in enumerate(pairs) for edge in ((i, 5 + k), (5 + k, j))]
    kernel = _eliminate_chains(pattern(adjacency(edges, 15)))
    assert np.array_equal(kernel.toarray(), 1 - np.eye(5))


def complete(n, first=0):
    return [(first + i, first + j) for i in range(n) for j in range(i)]


def test_neighbours_are_not_eliminated_together():
    """With two vertices in every edge, eliminating both at once would lose the edge."""
    edges = []
    for k, (i, j) in enumerate(complete(5)):
        a, b = 5 + 2 * k, 6 + 2 * k
        edges += [(i, a), (a, b), (b, j)]
    kernel = _eliminate_chains(pattern(adjacency(edges, 25)))
    assert np.array_equal(kernel.toarray(), 1 - np.eye(5))


def test_elimination_keeps_edges_that_are_there():
    """A complete graph whose edges also have a vertex beside them, and another complete graph apart from it."""
    edges = complete(5) + complete(6, first=15)
    for k, (i, j) in enumerate(complete(5)):
        edges += [(i, 5 + k), (5 + k, j)]
    kernel = _eliminate_chains(pattern(adjacency(edges, 21)))
    assert sorted(np.diff(kernel.indptr)) == [4] * 5 + [5] * 6 and set(kernel.data) == {1}


def test_separator_of_one_vertex():
    assert _separator_size(pattern(adjacency([], 1))) == 1


def test_separator_is_the_level_of_the_median_vertex():
    """Levels of 1, 3 and 4 vertices from any of the last ones: the fifth of eight vertices is in the last level."""
    edges = [(i, j) for i in (1, 2, 3) for j in (0, 4, 5, 6, 7)]
    assert _separator_size(pattern(adjacency(edges, 8))) == 4


def test_search_starts_at_an_end():
    """The first vertex is in the middle of a path, from where levels have two vertices."""
    order = [*range(10, 0, -1), 0, *range(11, 21)]
    assert _separator_size(pattern(adjacency(list(pairwise(order)), 21))) == 1


def test_hubs_have_more_than_ten_times_the_root_of_n_neighbours():
    """A star has no kernel. Among 400 vertices its center is a hub from 201 neighbours on."""
    for leaves, separator in ((200, 0), (201, 1)):
        fill = estimate_fill(adjacency([(0, i) for i in range(1, leaves + 1)], 400))
        assert fill == leaves + 400 + 10 * separator and isinstance(fill, int)


def test_vertices_with_three_neighbours_stay():
    cube = grid(6, 6)
    cube = sparse.csr_array(sparse.kron(cube, np.ones((2, 2))))  # at least 5 neighbours each
    assert _eliminate_chains(pattern(cube)).shape == (72, 72)


def test_fill_by_hand():
    """A chain has no kernel: its entries and its diagonal. A complete graph of 8 has a separator of 7 vertices."""
    assert estimate_fill(adjacency([(i, i + 1) for i in range(99)], 100)) in (99 + 100, 99 + 100 + 10)
    complete = adjacency([(i, j) for i in range(8) for j in range(i)], 8)
    assert estimate_fill(complete) == 28 + 8 + 10 * 7**2


def test_fill_of_a_long_grid():
    height, width = 12, 200
    fill = estimate_fill(grid(height, width))
    entries = height * (width - 1) + width * (height - 1) + height * width
    assert entries + 10 * 11**2 <= fill <= entries + 10 * 13**2


def test_hubs_are_counted_and_removed():
    """A vertex that is connected to all others adds one to the separator and hides nothing."""
    height, width = 6, 100
    n = height * width
    edges = Graph.grid((height, width)).edges[: -2 * n]
    without = estimate_fill(adjacency(edges, n))
    star = np.stack([np.full(n, n), np.arange(n)], 1)
    hub = estimate_fill(adjacency(np.concatenate([edges, star]), n + 1))
    separator = round(((without - n - len(edges) // 2) / 10) ** 0.5)
    assert separator == 6 and hub == without + n + 1 + 10 * (7**2 - 6**2)


def test_an_empty_graph_has_its_diagonal():
    assert estimate_fill(sparse.eye_array(6)) == 6
