"""Bipartite matching as a differentiable layer (the paper's section 3.2, its appendix and algorithm 3).

The matching QP for a cost c (rows, cols), with a variable d for every pair and variables p and s for every node:

    minimise <c, d> + gamma/2 (|d|^2 + |p|^2 + |s|^2)
    subject to  sum_v d_uv + p_u + s_u = 1,   sum_u d_uv + p_v + s_v = 1.

The paper prints the constraint per edge, p_u + d_uv + s_u = 1. With one slack per node that would force all d_uv of a
node to be equal. This module takes the sum over the edges of a node instead, which is the relaxation of matching. Then
AA' = [[(cols + 2) I, 11'], [11', (rows + 2) I]], and the QP has a closed form in O(rows cols).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from cutslots.programs.qp import check_positive


class MatchingSolution(NamedTuple):
    """All variables of the matching QP. The slack of a node equals its p."""

    d: Tensor  # (..., rows, cols)
    p_rows: Tensor  # (..., rows)
    p_cols: Tensor  # (..., cols)


class Matching(nn.Module):
    """Solve the bipartite matching QP in closed form for its edge variables d, differentiable to any order.

    d is affine in the cost and not limited to [0, 1]: follow it with a softmax, as `match_slots` does.

    >>> Matching(2, 2)(torch.tensor([[-1.0, 0.0], [0.0, -1.0]]))
    tensor([[ 7., -3.],
            [-3.,  7.]])
    """

    def __init__(self, rows: int, cols: int, gamma: float = 0.1) -> None:
        super().__init__()
        if rows < 1 or cols < 1:
            raise ValueError(f"rows and cols are {rows} and {cols}; expected at least one node on each side")
        self.rows, self.cols, self.gamma = rows, cols, check_positive("gamma", gamma)

    def forward(self, cost: Tensor) -> Tensor:
        """Return d (..., rows, cols) for cost (..., rows, cols)."""
        return self.solve(cost).d

    def solve(self, cost: Tensor) -> MatchingSolution:
        """Return d and the node variables p."""
        if not isinstance(cost, Tensor):
            raise TypeError(f"cost is a {type(cost).__name__}; expected a torch.Tensor")
        if cost.shape[-2:] != (self.rows, self.cols):
            raise ValueError(f"cost has shape {tuple(cost.shape)}; expected (..., {self.rows}, {self.cols})")
        if not cost.is_floating_point():
            raise TypeError(f"cost has dtype {cost.dtype}; expected a floating-point tensor")
        if cost.dtype in (torch.float16, torch.bfloat16):
            cost = cost.float()
        k1, k2 = self.rows, self.cols
        scaled = cost / self.gamma
        r1, r2 = -scaled.sum(-1) - 1, -scaled.sum(-2) - 1
        # (k2 + 2) l_u + sum l_v = r_u and (k1 + 2) l_v + sum l_u = r_v; their sums are two equations for the two sums
        R1, R2 = r1.sum(-1, keepdim=True), r2.sum(-1, keepdim=True)
        det = 2 * (k1 + k2 + 2)
        sum1, sum2 = ((k1 + 2) * R1 - k1 * R2) / det, ((k2 + 2) * R2 - k2 * R1) / det
        l1, l2 = (r1 - sum2) / (k2 + 2), (r2 - sum1) / (k1 + 2)
        return MatchingSolution(-scaled - l1.unsqueeze(-1) - l2.unsqueeze(-2), -l1, -l2)

    def extra_repr(self) -> str:
        return f"{self.rows}, {self.cols}, gamma={self.gamma}"


class MatchedSlots(NamedTuple):
    slots: Tensor  # (..., K1, D): for every slot of s, the mean of t under the weights
    weights: Tensor  # (..., K1, K2): rows sum to one


def match_slots(
    s: Tensor, t: Tensor, gamma: float = 0.1, temperature: float = 1.0, importance: Tensor | None = None
) -> MatchedSlots:
    """Match every slot of s (..., K1, D) to the slots of t (..., K2, D): the paper's algorithm 3.

    The cost is -<s_i, t_j>, times `importance` (..., K1, K2) of the pair if given. The weights are a softmax over j of
    d / temperature, where d solves the matching QP. The matched slot is the mean of t under the weights. The scale of
    the slots acts like 1/temperature: normalise slots whose scale may drift.
    """
    if not (isinstance(s, Tensor) and isinstance(t, Tensor)) or s.dtype != t.dtype:
        kinds = " and ".join(str(x.dtype) if isinstance(x, Tensor) else type(x).__name__ for x in (s, t))
        raise TypeError(f"s and t are {kinds}; expected two tensors of one dtype")
    if s.ndim < 2 or t.ndim < 2 or s.shape[-1] != t.shape[-1]:
        raise ValueError(f"s and t have shapes {tuple(s.shape)} and {tuple(t.shape)}; expected (..., K, D) with one D")
    check_positive("temperature", temperature)
    cost = -s @ t.transpose(-1, -2)
    if importance is not None:
        shape = tuple(getattr(importance, "shape", ()))
        if shape[-2:] != cost.shape[-2:]:
            expected = f"(..., {cost.shape[-2]}, {cost.shape[-1]}), one value for every pair"
            raise ValueError(f"importance has shape {shape}; expected {expected}")
        cost = cost * importance
    weights = torch.softmax(Matching(s.shape[-2], t.shape[-2], gamma)(cost) / temperature, dim=-1).to(t.dtype)
    return MatchedSlots(weights @ t, weights)


def pairwise_min(a: Tensor, b: Tensor) -> Tensor:
    """Return the smaller value (..., K1, K2) of each pair of values a (..., K1) and b (..., K2).

    Of two areas it is the largest overlap that they can have.

    >>> pairwise_min(torch.tensor([0.0, 2.0]), torch.tensor([1.0, 3.0]))
    tensor([[0., 0.],
            [1., 2.]])
    """
    return torch.minimum(a.unsqueeze(-1), b.unsqueeze(-2))
