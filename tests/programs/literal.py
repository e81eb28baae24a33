"""Reference solutions: the QPs as explicit sparse matrices, solved by a sparse LU of the full KKT system."""

from __future__ import annotations

import numpy as np
import torch
from scipy import sparse
from scipy.sparse.linalg import splu

from cutslots.programs.graph import Graph, SparseQP, grid_edges


def solve_literal(qp: SparseQP, c: np.ndarray, gamma: float | np.ndarray) -> np.ndarray:
    """Return z (..., variables) for objectives c (..., variables); gamma is the diagonal of G or one number."""
    m, n = qp.A.shape
    G = sparse.diags_array(np.broadcast_to(np.asarray(gamma, dtype=float), (n,)))
    kkt = sparse.csc_matrix(sparse.block_array([[G, qp.A.T], [qp.A, None]]))
    flat = c.reshape(-1, n)
    rhs = np.concatenate([-flat, np.broadcast_to(qp.b, (len(flat), m))], axis=1)
    return splu(kkt).solve(rhs.T)[:n].T.reshape(c.shape)


def literal_cut(shape, w, gamma=0.5):
    """Return all variables of the min-cut QP in GridCut's order: p (..., N), d and s as edge lists, terminals, s_st."""
    qp = Graph.grid(shape).qp()
    z = solve_literal(qp, qp.objective(edge_list(w, shape).numpy()), gamma)
    N = int(np.prod(shape))
    p, d, s, s_st = (z[..., qp.blocks[k]] for k in ("p", "d", "s", "s_st"))
    return p[..., :N], d, s, p[..., N:], s_st[..., 0]


def random_weights(shape, batch=(3,), dtype=torch.float64, **kwargs):
    """Return normal weights (*batch, channels, *shape) for a GridCut."""
    return torch.randn(*batch, 2 * len(shape) + 2, *shape, dtype=dtype, **kwargs)


def edge_list(w, shape):
    """Return weights (..., channels, *shape) in the edge order of `Graph.grid`."""
    return w[..., torch.as_tensor(grid_edges(shape))]
