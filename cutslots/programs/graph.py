"""Graphs with a source and a sink, and the paper's QPs as explicit sparse matrices. Uses numpy and scipy only.

`Graph.qp()` returns the constraints of the regularised minimum cut (the paper's eq. 2) row by row; `matching_qp` those
of the bipartite matching in its appendix. They are the reference for what the layers compute. The layers never build
these matrices; tests and benchmarks do.

A grid of shape (H, W), or (T, H, W) for a clip, has one vertex per pixel in row-major order, then the source and the
sink. Its directed edges are listed channel by channel, in the order of the weights that `GridCut` takes:

    later, earlier (clips only), right, left, down, up, source -> pixel, pixel -> sink

Edges that would leave the grid do not exist.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import sparse

Shape = tuple[int, ...]


@dataclass(frozen=True)
class SparseQP:
    """The constraints of min 1/2 z'Gz + c'z subject to Az = b.

    `blocks` maps a name of the paper (`p`, `d`, `s`, `s_st`) to its slice of z. The objective c is zero outside `d`.
    """

    A: sparse.csr_array
    b: np.ndarray
    blocks: dict[str, slice]

    def objective(self, w: np.ndarray) -> np.ndarray:
        """Return the vector c (..., variables) for edge weights w (..., edges)."""
        w = np.asarray(w)
        c = np.zeros((*w.shape[:-1], self.A.shape[1]), dtype=w.dtype)
        c[..., self.blocks["d"]] = w
        return c


@dataclass(frozen=True)
class Graph:
    """A directed graph. `edges` (E, 2) holds the tail and the head of each edge; `source` and `sink` are vertices.

    >>> graph = Graph.grid((64, 64))
    >>> graph.num_vertices, graph.num_edges
    (4098, 24320)
    >>> graph.qp().A.shape  # constraints, variables
    (24321, 52739)
    """

    edges: np.ndarray
    num_vertices: int
    source: int
    sink: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "edges", _check_edges(self.edges, self.num_vertices))
        for name in ("source", "sink"):
            vertex = getattr(self, name)
            if not 0 <= vertex < self.num_vertices:
                raise ValueError(f"{name} is {vertex}, but the vertices are 0 to {self.num_vertices - 1}")
        if self.source == self.sink:
            raise ValueError(f"source and sink are both vertex {self.source}; they must differ")

    @staticmethod
    def with_terminals(edges: np.ndarray, num_vertices: int) -> Graph:
        """Add a source and a sink connected to every vertex: edges, then source -> v for all v, then v -> sink."""
        edges = _check_edges(edges, num_vertices)
        v = np.arange(num_vertices)
        s, t = num_vertices, num_vertices + 1
        from_source = np.stack([np.full_like(v, s), v], axis=1)
        to_sink = np.stack([v, np.full_like(v, t)], axis=1)
        return Graph(np.concatenate([edges, from_source, to_sink]), num_vertices + 2, s, t)

    @staticmethod
    def grid(shape: Sequence[int]) -> Graph:
        """Return the graph of an image (the paper's figure 1) or of a clip."""
        shape = check_shape(shape)
        vertex = np.arange(int(np.prod(shape))).reshape(shape)
        pairs = []
        for axis in grid_axes(shape):
            ahead = np.delete(vertex, 0, axis).ravel()
            behind = np.delete(vertex, -1, axis).ravel()
            pairs += [np.stack([behind, ahead], axis=1), np.stack([ahead, behind], axis=1)]
        return Graph.with_terminals(np.concatenate(pairs), vertex.size)

    @property
    def num_edges(self) -> int:
        return len(self.edges)

    def incidence(self) -> sparse.csr_array:
        """Return B (edges, vertices): +1 at the tail, -1 at the head of each edge."""
        e = np.arange(self.num_edges)
        rows = np.concatenate([e, e])
        data = np.repeat([1.0, -1.0], self.num_edges)
        return sparse.csr_array((data, (rows, self.edges.T.ravel())), shape=(self.num_edges, self.num_vertices))

    def qp(self) -> SparseQP:
        """Return the min-cut QP, z = (p, d, s, s_st): d - s = Bp for the edges and p_source - p_sink - s_st = 1."""
        V, E = self.num_vertices, self.num_edges
        eye = sparse.eye_array(E)
        terminals = sparse.csr_array(([1.0, -1.0], ([0, 0], [self.source, self.sink])), shape=(1, V))
        A = sparse.block_array([[-self.incidence(), eye, -eye, None], [terminals, None, None, [[-1.0]]]], format="csr")
        b = np.zeros(E + 1)
        b[-1] = 1.0
        blocks = {"p": slice(V), "d": slice(V, V + E), "s": slice(V + E, V + 2 * E), "s_st": slice(V + 2 * E, None)}
        return SparseQP(A, b, blocks)

    def reduced_matrix(self) -> sparse.csr_array:
        """Return I + B'B/2 + aa', a = e_source - e_sink: the system over the vertices, with d and s eliminated."""
        B = self.incidence()
        ends = [self.source, self.sink]
        rows, cols = np.repeat(ends, 2), np.tile(ends, 2)
        aa = sparse.csr_array(([1.0, -1.0, -1.0, 1.0], (rows, cols)), shape=(self.num_vertices, self.num_vertices))
        return sparse.csr_array(sparse.eye_array(self.num_vertices) + B.T @ B / 2 + aa)


def matching_qp(rows: int, cols: int) -> SparseQP:
    """Return the bipartite matching QP, z = (d, p, s): for every node, (sum of its d) + p + s = 1.

    d is (rows, cols) in row-major order; p and s list the row nodes and then the column nodes.
    """
    n = rows + cols
    of_row = sparse.kron(sparse.eye_array(rows), np.ones((1, cols)))
    of_col = sparse.kron(np.ones((1, rows)), sparse.eye_array(cols))
    A = sparse.hstack([sparse.vstack([of_row, of_col]), sparse.eye_array(n), sparse.eye_array(n)], format="csr")
    E = rows * cols
    return SparseQP(
        sparse.csr_array(A), np.ones(n), {"d": slice(E), "p": slice(E, E + n), "s": slice(E + n, E + 2 * n)}
    )


def grid_axes(shape: Shape) -> list[int]:
    """Return the axes of a grid in the order of the channels: time (clips only), then x, then y."""
    return [-3, -1, -2] if len(shape) == 3 else [-1, -2]


def grid_edges(shape: Sequence[int]) -> np.ndarray:
    """Return which weights of `GridCut` belong to an edge of the grid: a bool array (channels, *shape).

    `w[..., grid_edges(shape)]` lists the weights in the edge order of `Graph.grid(shape)`.
    """
    shape = check_shape(shape)
    channels = []
    for axis in grid_axes(shape):
        for border in (-1, 0):
            exists = np.ones(shape, dtype=bool)
            exists[(..., border, *[slice(None)] * (-axis - 1))] = False
            channels.append(exists)
    return np.stack([*channels, np.ones(shape, dtype=bool), np.ones(shape, dtype=bool)])


def check_shape(shape: Sequence[int]) -> Shape:
    """Return the shape of a grid as a tuple of ints; raise ValueError if it is not one."""
    sides = tuple(shape) if isinstance(shape, Iterable) else ()
    if len(sides) not in (2, 3) or not all(isinstance(n, int | np.integer) and n >= 1 for n in sides):
        raise ValueError(f"shape is {shape!r}; expected (H, W) or (T, H, W) with sides of at least 1")
    return tuple(int(n) for n in sides)


def _check_edges(edges: np.ndarray, num_vertices: int) -> np.ndarray:
    if not isinstance(num_vertices, int | np.integer) or num_vertices < 1:
        raise ValueError(f"num_vertices is {num_vertices!r}; expected an integer of at least 1")
    edges = np.asarray(edges)
    if edges.size == 0:
        return np.zeros((0, 2), dtype=np.int64)
    if edges.ndim != 2 or edges.shape[1] != 2:
        raise ValueError(f"edges has shape {edges.shape}; expected (E, 2), the tail and the head of each edge")
    if not np.issubdtype(edges.dtype, np.integer):
        raise TypeError(f"edges has dtype {edges.dtype}; expected integers, the indices of vertices")
    bad = np.flatnonzero(((edges < 0) | (edges >= num_vertices)).any(axis=1))
    if len(bad):
        raise ValueError(
            f"edge {bad[0]} connects {edges[bad[0]].tolist()}, but the vertices are 0 to {num_vertices - 1}"
        )
    return edges.astype(np.int64)
