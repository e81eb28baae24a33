"""The unrelaxed programs: minimum cut and minimum-cost matching, exact, for reference and for hardening.

Not differentiable; numpy in, numpy out; one instance at a time.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from scipy import optimize, sparse

from cutslots.graph import Graph

MOST = 2**30 - 1  # capacity: the flow is in int32, and a capacity less a flow the other way may be twice as much


class ExactCut(NamedTuple):
    side: np.ndarray  # (vertices,) bool, True on the source's side
    value: float  # the weight of the edges from the source's side to the sink's


def min_cut(graph: Graph, w: Any) -> ExactCut:
    """A minimum s-t cut of the weights w (edges,), all at least zero, by maximum flow.

    scipy's flow takes whole numbers, so weights are first rounded to 2^-29 of their sum at the source or the sink: the
    cut returned is a minimum cut of weights that agree with w to that precision, and `value` is its weight under w.
    The side is the smallest one possible, the vertices that the residual graph still reaches from the source.
    """
    w = _checked_weights(graph, w)
    tails, heads = graph.edges.T
    # No more can flow than leaves the source or enters the sink; an edge of twice that is never part of the cut.
    bound = 2 * min(w[tails == graph.source].sum(), w[heads == graph.sink].sum())
    whole = np.rint(np.minimum(w, bound) * (MOST / bound)) if bound > 0 else w > 0
    capacity = sparse.coo_array((whole.astype(np.int64), (tails, heads)), shape=(graph.num_vertices,) * 2).tocsr()
    capacity.data = np.minimum(capacity.data, MOST)
    capacity = sparse.csr_array(capacity, dtype=np.int32)
    flow = sparse.csgraph.maximum_flow(capacity, graph.source, graph.sink).flow
    residual = (capacity.astype(np.int64) - flow.astype(np.int64)) > 0
    reached = sparse.csgraph.breadth_first_order(residual, graph.source, return_predecessors=False)
    side = np.zeros(graph.num_vertices, dtype=bool)
    side[reached] = True
    return ExactCut(side, cut_value(graph, w, side))


def min_cut_lp(graph: Graph, w: Any) -> ExactCut:
    """The paper's linear program (eq. 1) by HiGHS: d >= p_u - p_v, p_s - p_t >= 1, d >= 0, p >= 0.

    Its optimum is integral at a vertex of the feasible set, which the simplex method returns. Slow: for checking.
    """
    w = _checked_weights(graph, w)
    V, E = graph.num_vertices, graph.num_edges
    apart = sparse.csr_array(([-1.0, 1.0], ([0, 0], [graph.source, graph.sink])), shape=(1, V))
    A = sparse.block_array([[graph.incidence(), -sparse.eye_array(E)], [apart, None]], format="csr")
    result = optimize.linprog(
        np.concatenate([np.zeros(V), w]), A_ub=A, b_ub=np.append(np.zeros(E), -1.0), bounds=(0, None), method="highs-ds"
    )
    if result.status != 0:
        raise RuntimeError(f"HiGHS did not solve the cut program: {result.message}")
    p = result.x[:V]
    return ExactCut(p - p[graph.sink] > 0.5, float(result.fun))


def cut_value(graph: Graph, w: Any, side: np.ndarray) -> float:
    """The weight of the edges that lead from side to its complement."""
    tails, heads = graph.edges.T
    return float(_numbers(w)[side[tails] & ~side[heads]].sum())


def min_matching(cost: Any) -> np.ndarray:
    """The minimum-cost matching of cost (..., rows, cols) as 0/1 matrices; the smaller side is matched whole."""
    cost = _numbers(cost)
    if cost.ndim < 2:
        raise ValueError(f"cost has shape {cost.shape}; expected (..., rows, cols)")
    if not np.isfinite(cost).all():
        raise ValueError("cost holds NaN or infinity; expected finite numbers")
    d = np.zeros_like(cost)
    for index in np.ndindex(cost.shape[:-2]):
        d[index][optimize.linear_sum_assignment(cost[index])] = 1.0
    return d


def _checked_weights(graph: Graph, w: Any) -> np.ndarray:
    w = _numbers(w)
    if w.shape != (graph.num_edges,):
        raise ValueError(f"w has shape {w.shape}; expected ({graph.num_edges},), a weight for each edge of the graph")
    if not np.isfinite(w).all():
        raise ValueError("w holds NaN or infinity; expected finite numbers")
    if (w < 0).any():
        raise ValueError(
            f"w holds {w.min():g}; a minimum cut needs weights of at least zero: clamp or shift them first"
        )
    return w


def _numbers(x: Any) -> np.ndarray:
    """Arrays, lists and tensors alike, in float64."""
    return np.asarray(x.detach().cpu().double() if hasattr(x, "detach") else x, dtype=np.float64)
