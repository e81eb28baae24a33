"""Estimate the fill of a sparse Cholesky factor without factoring. Uses numpy and scipy only.

Any order of elimination ends with a dense block for a separator: a set of vertices that splits the graph of the matrix
in halves. Its size s decides the cost: about sqrt(n) for planar graphs, a constant share of n for random ones. The
estimate of the fill is 10 s^2, measured on grids of two and three dimensions. For random graphs it is too large by
about ten, but there the fill is far beyond every limit.

The separator is one level of a breadth-first search, the level of the median vertex. Two kinds of vertices would hide a
small one and are removed first: hubs, which an ordering eliminates last, and vertices with at most two neighbours,
which are eliminated first and cause no fill to speak of.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy import sparse
from scipy.sparse import csgraph

FILL_OF_SEPARATOR = 10


def estimate_fill(matrix: Any) -> int:
    """Return the estimated number of entries of the Cholesky factor of a sparse symmetric matrix."""
    pattern = _without_diagonal(sparse.csr_array(matrix, dtype=np.float32, copy=True))
    n = pattern.shape[0]
    hubs = np.diff(pattern.indptr) > 10 * np.sqrt(n)
    kernel = _eliminate_chains(sparse.csr_array(pattern[~hubs][:, ~hubs]))
    separator = int(hubs.sum()) + (_separator_size(kernel) if kernel.shape[0] else 0)
    return pattern.nnz // 2 + n + FILL_OF_SEPARATOR * separator**2


def _without_diagonal(pattern: sparse.csr_array) -> sparse.csr_array:
    """Return the off-diagonal pattern with ones as entries."""
    pattern.setdiag(0)
    pattern.eliminate_zeros()
    pattern.data[:] = 1  # products of patterns count paths, and counts would grow
    return pattern


def _eliminate_chains(pattern: sparse.csr_array) -> sparse.csr_array:
    """Eliminate vertices with at most two neighbours, many at a time, until few are left.

    Vertices that are eliminated together must not be neighbours: a vertex is chosen if its random number is smaller
    than those of its neighbours.
    """
    rng = np.random.default_rng(0)
    while True:
        n, degrees = pattern.shape[0], np.diff(pattern.indptr)
        low = np.flatnonzero(degrees <= 2)
        if len(low) <= n // 20:
            return pattern
        number, least = np.full((2, n), n)
        number[low] = rng.permutation(len(low))
        connected = np.flatnonzero(degrees)
        if len(connected):
            least[connected] = np.minimum.reduceat(number[pattern.indices], pattern.indptr[connected])
        chosen = number < least
        kept = pattern[~chosen]
        to_chosen = kept[:, chosen]
        pattern = _without_diagonal(sparse.csr_array(kept[:, ~chosen] + to_chosen @ to_chosen.T))


def _separator_size(pattern: sparse.csr_array) -> int:
    """Return the number of vertices at the median distance from one end of the largest component."""
    _, component = csgraph.connected_components(pattern, directed=False)
    start = int(np.argmax(component == np.bincount(component).argmax()))
    end = csgraph.breadth_first_order(pattern, start, return_predecessors=False)[-1]
    order, predecessors = csgraph.breadth_first_order(pattern, end)
    position = np.empty(pattern.shape[0], dtype=np.int64)
    position[order] = np.arange(len(order))
    parents = position[predecessors[order[1:]]]  # sorted, so a level is a range
    first, last = 0, 1
    while last <= len(order) // 2:
        first, last = last, 1 + int(np.searchsorted(parents, last))
    return last - first
