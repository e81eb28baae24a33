import copy
import pickle

import numpy as np
import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from cutslots import Graph, GraphCut
from tests.conftest import DEVICES
from tests.programs.literal import edge_list, literal_cut, random_weights, solve_literal

SHAPES = [(1, 1), (1, 7), (5, 7), (16, 16), (64, 64), (4, 6, 5)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_solution_equals_the_literal_qp_of_a_grid(shape):
    w, N = random_weights(shape), int(np.prod(shape))
    cut = GraphCut(Graph.grid(shape).edges[: -2 * N], N).double().solve(edge_list(w, shape))
    ours = (cut.p, cut.d, cut.slack, cut.terminals, cut.slack_st)
    for a, b in zip(ours, literal_cut(shape, w), strict=True):
        assert np.abs(a.numpy() - b).max() < 1e-10


def test_terminals_among_the_vertices(rng):
    graph = Graph(rng.integers(0, 9, (30, 2)), 9, source=4, sink=0)
    w = rng.standard_normal((2, 3, 30))
    qp = graph.qp()
    z = solve_literal(qp, qp.objective(w), 0.5)
    cut = GraphCut(graph.edges, 9, terminals=(4, 0)).double().solve(torch.tensor(w))
    assert np.abs(cut.p.numpy() - z[..., qp.blocks["p"]]).max() < 1e-10
    assert np.abs(cut.d.numpy() - z[..., qp.blocks["d"]]).max() < 1e-10
    assert np.abs(cut.slack.numpy() - z[..., qp.blocks["s"]]).max() < 1e-10


@pytest.mark.parametrize("device", DEVICES)
def test_gradients(device, rng):
    cut = GraphCut(rng.integers(0, 5, (7, 2)), 5).double().to(device)
    w = torch.randn(2, 17, dtype=torch.float64, device=device, requires_grad=True)
    assert gradcheck(cut, w) and gradgradcheck(cut, w)
    assert gradcheck(lambda w: tuple(cut.solve(w)), w)
    assert gradgradcheck(lambda w: cut(w.square()).square(), w)


def test_copies_pickles_and_empty_batches():
    cut, w = GraphCut([[0, 1], [1, 2]], 3), torch.randn(2, 8)
    for twin in (copy.deepcopy(cut), pickle.loads(pickle.dumps(cut))):
        assert torch.equal(twin(w), cut(w))
    assert cut(w[:0]).shape == (0, 3) and cut(w[0]).shape == (3,)
    assert not cut.state_dict()


def test_built_on_meta_and_moved():
    with torch.device("meta"):
        cut = GraphCut([[0, 1], [1, 2]], 3)
        moved = cut.to_empty(device="cpu").double().float()
    w = torch.randn(2, 8)
    assert torch.equal(moved(w), GraphCut([[0, 1], [1, 2]], 3)(w))


def test_graph_without_edges():
    assert GraphCut([], 3)(torch.zeros(6)).shape == (3,)


def test_bad_input():
    with pytest.raises(ValueError, match=r"num_vertices is 3\.0; expected an integer of at least 1"):
        GraphCut([[0, 1]], 3.0)
    with pytest.raises(
        ValueError, match=r"w has shape \(3,\); this GraphCut expects \(..., 8\), a weight for each edge"
    ):
        GraphCut([[0, 1], [1, 2]], 3)(torch.zeros(3))
