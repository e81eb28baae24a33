"""The unrelaxed problems, for reference and for hard decisions: minimum cut and minimum-cost matching.

The functions take arrays, lists or tensors and return numpy arrays. They are not differentiable. The cuts solve one
instance at a time; `min_matching` takes any batch.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from scipy import optimize, sparse

from cutslots.programs.graph import Graph

MAX_CAPACITY = 2**30 - 1  # flows are int32, and a capacity minus a flow in the other direction may be twice as large


class ExactCut(NamedTuple):
    side: np.ndarray  # (vertices,) bool, True on the source's side
    value: float  # the weight of the edges from the source's side to the sink's


def min_cut(graph: Graph, w: Any) -> ExactCut:
    """Return a minimum s-t cut for weights w (edges,) of at least zero, by maximum flow.

    scipy's maximum flow takes integers, so weights are rounded to 2^-29 of their sum at the source or the sink. The
    result is a minimum cut of the rounded weights; `value` is its weight under w. Of several minimum cuts it is the one
    with the smallest source side: the vertices that the residual graph reaches from the source.
    """
    w = _check_weights(graph, w)
    tails, heads = graph.edges.T
    # The flow is at most what leaves the source or enters the sink; an edge of twice that is never cut.
    bound = 2 * min(w[tails == graph.source].sum(), w[heads == graph.sink].sum())
    rounded = np.rint(np.minimum(w, bound) * (MAX_CAPACITY / bound)) if bound > 0 else w > 0
    capacity = sparse.coo_array((rounded.astype(np.int64), (tails, heads)), shape=(graph.num_vertices,) * 2).tocsr()
    capacity.data = np.minimum(capacity.data, MAX_CAPACITY)
    capacity = sparse.csr_array(capacity, dtype=np.int32)
    flow = sparse.csgraph.maximum_flow(capacity, graph.source, graph.sink).flow
    residual = (capacity.astype(np.int64) - flow.astype(np.int64)) > 0
    reached = sparse.csgraph.breadth_first_order(residual, graph.source, return_predecessors=False)
    side = np.zeros(graph.num_vertices, dtype=bool)
    side[reached] = True
    return ExactCut(side, cut_value(graph, w, side))


def min_cut_lp(graph: Graph, w: Any) -> ExactCut:
    """Solve the paper's linear program (eq. 1) by HiGHS: d >= p_u - p_v, p_s - p_t >= 1, d >= 0, p >= 0.

    The simplex method returns a vertex of the feasible set, where the optimum is integral. This is slow: use it to
    check `min_cut`.
    """
    w = _check_weights(graph, w)
    V, E = graph.num_vertices, graph.num_edges
    terminals = sparse.csr_array(([-1.0, 1.0], ([0, 0], [graph.source, graph.sink])), shape=(1, V))
    A = sparse.block_array([[graph.incidence(), -sparse.eye_array(E)], [terminals, None]], format="csr")
    result = optimize.linprog(
        np.concatenate([np.zeros(V), w]), A_ub=A, b_ub=np.append(np.zeros(E), -1.0), bounds=(0, None), method="highs-ds"
    )
    if result.status != 0:
        raise RuntimeError(f"HiGHS did not solve the linear program of the cut: {result.message}")
    p = result.x[:V]
    return ExactCut(p - p[graph.sink] > 0.5, float(result.fun))


def cut_value(graph: Graph, w: Any, side: np.ndarray) -> float:
    """Return the weight of the edges from `side` (vertices,) to its complement."""
    tails, heads = graph.edges.T
    return float(_as_float64(w)[side[tails] & ~side[heads]].sum())


def min_matching(cost: Any) -> np.ndarray:
    """Return the minimum-cost matching for cost (..., rows, cols) as 0/1 matrices with min(rows, cols) ones."""
    cost = _as_float64(cost)
    if cost.ndim < 2:
        raise ValueError(f"cost has shape {cost.shape}; expected (..., rows, cols)")
    if not np.isfinite(cost).all():
        raise ValueError("cost contains NaN or infinity; expected finite numbers")
    d = np.zeros_like(cost)
    for index in np.ndindex(cost.shape[:-2]):
        d[index][optimize.linear_sum_assignment(cost[index])] = 1.0
    return d


def _check_weights(graph: Graph, w: Any) -> np.ndarray:
    w = _as_float64(w)
    if w.shape != (graph.num_edges,):
        raise ValueError(f"w has shape {w.shape}; expected ({graph.num_edges},), a weight for each edge of the graph")
    if not np.isfinite(w).all():
        raise ValueError("w contains NaN or infinity; expected finite numbers")
    if (w < 0).any():
        raise ValueError(
            f"w contains {w.min():g}; a minimum cut needs weights of at least zero: clamp or shift them first"
        )
    return w


def _as_float64(x: Any) -> np.ndarray:
    """Return an array, list or tensor as a float64 array."""
    return np.asarray(x.detach().cpu().double() if hasattr(x, "detach") else x, dtype=np.float64)
