import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck, gradgradcheck

from cutslots import EqualityQP, Matching, match_slots
from cutslots.programs import exact
from cutslots.programs.graph import matching_qp
from cutslots.programs.matching import pairwise_min
from tests.conftest import DEVICES
from tests.programs.literal import solve_literal

SIZES = [(1, 1), (1, 4), (3, 3), (5, 2), (12, 12)]


@pytest.mark.parametrize("rows, cols", SIZES)
@pytest.mark.parametrize("gamma", [0.1, 1.0])
def test_solution_equals_the_literal_qp(rows, cols, gamma, rng):
    qp = matching_qp(rows, cols)
    cost = rng.standard_normal((4, rows, cols))
    c = qp.objective(cost.reshape(4, -1))
    z = EqualityQP(qp.A, qp.b, gamma).double()(torch.tensor(c)).numpy()
    assert np.abs(z - solve_literal(qp, c, gamma)).max() < 1e-9
    ours = Matching(rows, cols, gamma).solve(torch.tensor(cost))
    p = torch.cat([ours.p_rows, ours.p_cols], -1).numpy()
    assert np.abs(ours.d.flatten(1).numpy() - z[:, qp.blocks["d"]]).max() < 1e-10
    assert np.abs(p - z[:, qp.blocks["p"]]).max() < 1e-10
    assert np.abs(p - z[:, qp.blocks["s"]]).max() < 1e-10


@pytest.mark.parametrize("device", DEVICES)
def test_gradients(device):
    matching = Matching(3, 4)
    cost = torch.randn(2, 3, 4, dtype=torch.float64, device=device, requires_grad=True)
    assert gradcheck(matching, cost) and gradgradcheck(lambda c: matching(c.square()).square(), cost)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 2**32 - 1))
def test_permuting_the_nodes_permutes_d(rows, cols, seed):
    rng = np.random.default_rng(seed)
    cost = torch.tensor(rng.standard_normal((rows, cols)))
    i, j = rng.permutation(rows), rng.permutation(cols)
    d = Matching(rows, cols)(cost)
    assert torch.allclose(Matching(rows, cols)(cost[i][:, j]), d[i][:, j], atol=1e-9)
    assert torch.allclose(Matching(cols, rows)(cost.T), d.T, atol=1e-9)


def test_match_slots_recovers_a_permutation():
    slots = torch.nn.functional.normalize(torch.randn(4, 8, 64), dim=-1)
    order = torch.stack([torch.randperm(8) for _ in range(4)])
    shuffled = slots.gather(1, order[..., None].expand_as(slots))
    matched = match_slots(slots, shuffled, temperature=0.1)
    assert torch.equal(matched.weights.argmax(-1), order.argsort(-1))
    assert (matched.weights.max(-1).values > 0.99).all()
    assert torch.allclose(matched.slots, slots, atol=0.05)
    assert torch.allclose(matched.weights.sum(-1), torch.ones(4, 8))


def test_match_slots_has_gradients_for_both_arguments():
    s, t = torch.randn(2, 3, 5, requires_grad=True), torch.randn(2, 6, 5, requires_grad=True)
    slots, weights = match_slots(s, t)
    assert slots.shape == (2, 3, 5) and weights.shape == (2, 3, 6)
    assert all((g != 0).any() for g in torch.autograd.grad(slots.square().sum(), (s, t)))


@settings(max_examples=25, deadline=None)
@given(st.integers(2, 6), st.integers(0, 2**32 - 1))
def test_argmax_equals_the_exact_matching_for_a_wide_margin(k, seed):
    rng = np.random.default_rng(seed)
    cost = rng.uniform(0, 0.1, (k, k))
    cost[np.arange(k), rng.permutation(k)] -= 1
    d = Matching(k, k)(torch.tensor(cost))
    assert np.array_equal(torch.nn.functional.one_hot(d.argmax(-1), k).numpy(), exact.min_matching(cost))


def test_matching_by_hand():
    """One row and one column: d + 2 p = 1 for both nodes, and at the optimum c + gamma d = 2 gamma p."""
    c, gamma = 0.3, 0.5
    d, p_rows, p_cols = Matching(1, 1, gamma).solve(torch.tensor([[c]], dtype=torch.float64))
    assert d.item() == pytest.approx((1 - c / gamma) / 2) and p_rows.item() == p_cols.item()
    assert d.item() + 2 * p_rows.item() == pytest.approx(1)


def test_defaults_are_the_paper_s():
    """gamma 0.1; a softmax at temperature 1."""
    assert Matching(2, 3).gamma == 0.1
    s, t = torch.randn(2, 4), torch.randn(3, 4)
    expected = torch.softmax(Matching(2, 3, 0.1)(-s @ t.T), -1)
    torch.testing.assert_close(match_slots(s, t).weights, expected)
    torch.testing.assert_close(match_slots(s, t).slots, expected @ t)


def test_options_of_match_slots():
    s, t = torch.randn(5, 2, 4), torch.randn(5, 3, 4)
    expected = torch.softmax(Matching(2, 3, 0.7)(-torch.einsum("bid,bjd->bij", s, t)) / 3, -1)
    torch.testing.assert_close(match_slots(s, t, 0.7, 3.0).weights, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_solved_in_float32(dtype):
    cost = torch.randn(3, 4).to(dtype)
    solution = Matching(3, 4).solve(cost)
    assert all(x.dtype == torch.float32 for x in solution)
    assert torch.equal(solution.d, Matching(3, 4)(cost.float()))
    slots, weights = match_slots(torch.randn(2, 4).to(dtype), torch.randn(3, 4).to(dtype))
    assert slots.dtype == weights.dtype == dtype


def test_float64_stays_float64():
    assert Matching(2, 2)(torch.zeros(2, 2, dtype=torch.float64)).dtype == torch.float64


def test_repr():
    assert repr(Matching(3, 4, 0.2)) == "Matching(3, 4, gamma=0.2)"


def test_bad_types_and_dimensions():
    with pytest.raises(TypeError, match=r"^cost is a list; expected a torch\.Tensor$"):
        Matching(1, 1)([[0.0]])
    for s, t, kinds in (
        (torch.zeros(2, 3), torch.zeros(2, 3).double(), "torch.float32 and torch.float64"),
        ([[0.0]], torch.zeros(1, 1), "list and torch.float32"),
        (torch.zeros(1, 1), [[0.0]], "torch.float32 and list"),
    ):
        with pytest.raises(TypeError, match=f"^s and t are {kinds}; expected two tensors of one dtype$"):
            match_slots(s, t)
    for s, t in ((torch.zeros(3), torch.zeros(2, 3)), (torch.zeros(2, 3), torch.zeros(3))):
        with pytest.raises(ValueError, match=r"^s and t have shapes .*; expected \(..., K, D\) with one D$"):
            match_slots(s, t)


def test_importance_multiplies_the_cost(rng):
    s, t = (torch.tensor(rng.standard_normal((2, k, 5))) for k in (3, 4))
    importance = torch.tensor(rng.random((2, 3, 4)))
    expected = torch.softmax(Matching(3, 4, 0.2)(-(s @ t.mT) * importance) / 0.7, -1)
    found = match_slots(s, t, 0.2, 0.7, importance)
    torch.testing.assert_close(found.weights, expected)
    torch.testing.assert_close(found.slots, expected @ t)
    with pytest.raises(ValueError, match=r"^importance has shape \(4, 3\); expected \(..., 3, 4\), one value"):
        match_slots(s, t, importance=torch.ones(4, 3))


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=4), st.lists(st.floats(0, 1), min_size=1, max_size=4))
def test_smaller_values_of_pairs(a, b):
    found = pairwise_min(*(torch.tensor([x, x], dtype=torch.float64) for x in (a, b)))
    assert found.tolist() == 2 * [[[min(x, y) for y in b] for x in a]]


def test_bad_input():
    with pytest.raises(ValueError, match="rows and cols are 0 and 3"):
        Matching(0, 3)
    with pytest.raises(ValueError, match=r"^rows and cols are 3 and 0; expected at least one node on each side$"):
        Matching(3, 0)
    with pytest.raises(ValueError, match="gamma is -1; expected a number from 1e-06 to 1,000,000"):
        Matching(3, 3, gamma=-1)
    with pytest.raises(ValueError, match=r"cost has shape \(2, 4, 3\); expected \(..., 3, 4\)"):
        Matching(3, 4)(torch.zeros(2, 4, 3))
    with pytest.raises(TypeError, match=r"cost has dtype torch\.int64"):
        Matching(2, 2)(torch.zeros(2, 2, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"s and t have shapes \(3, 4\) and \(3, 5\)"):
        match_slots(torch.zeros(3, 4), torch.zeros(3, 5))
    with pytest.raises(ValueError, match="temperature is 0; expected a number from 1e-06 to 1,000,000"):
        match_slots(torch.zeros(3, 4), torch.zeros(3, 4), temperature=0)
