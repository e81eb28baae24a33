import copy
import pickle

import numpy as np
import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from cutslots import Graph, GraphCut
from cutslots.programs.graph_cut import DenseOperators, SparseOperators, round_to_tf32
from tests.conftest import DEVICES, needs_cuda
from tests.programs.literal import edge_list, literal_cut, random_weights, solve_literal

SHAPES = [(1, 1), (1, 7), (5, 7), (16, 16), (64, 64), (4, 6, 5)]


@pytest.mark.parametrize(
    "shape, dense", [(shape, dense) for shape in SHAPES for dense in (False, True) if not dense or shape != (64, 64)]
)
def test_solution_equals_the_literal_qp_of_a_grid(shape, dense):
    w, N = random_weights(shape), int(np.prod(shape))
    cut = GraphCut(Graph.grid(shape).edges[: -2 * N], N, dense=dense).double().solve(edge_list(w, shape))
    ours = (cut.p, cut.d, cut.slack, cut.terminals, cut.slack_st)
    for a, b in zip(ours, literal_cut(shape, w), strict=True):
        assert np.abs(a.numpy() - b).max() < 1e-10


@pytest.mark.parametrize("dense", [False, True])
def test_terminals_among_the_vertices(dense, rng):
    graph = Graph(rng.integers(0, 9, (30, 2)), 9, source=4, sink=0)
    w = rng.standard_normal((2, 3, 30))
    qp = graph.qp()
    z = solve_literal(qp, qp.objective(w), 0.5)
    cut = GraphCut(graph.edges, 9, terminals=(4, 0), dense=dense).double().solve(torch.tensor(w))
    assert np.abs(cut.p.numpy() - z[..., qp.blocks["p"]]).max() < 1e-10
    assert np.abs(cut.d.numpy() - z[..., qp.blocks["d"]]).max() < 1e-10
    assert np.abs(cut.slack.numpy() - z[..., qp.blocks["s"]]).max() < 1e-10


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dense", [False, True])
def test_gradients(device, dense, rng):
    cut = GraphCut(rng.integers(0, 5, (7, 2)), 5, dense=dense).double().to(device)
    w = torch.randn(2, 17, dtype=torch.float64, device=device, requires_grad=True)
    assert gradcheck(cut, w) and gradgradcheck(cut, w)
    assert gradcheck(lambda w: tuple(cut.solve(w)), w)
    assert gradgradcheck(lambda w: cut(w.square()).square(), w)


@pytest.mark.parametrize("dense", [False, True])
def test_copies_pickles_and_empty_batches(dense):
    cut, w = GraphCut([[0, 1], [1, 2]], 3, dense=dense), torch.randn(2, 8)
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


@pytest.mark.parametrize("dense", [False, True])
def test_graph_without_edges(dense):
    assert GraphCut([], 3, dense=dense)(torch.zeros(6)).shape == (3,)


# ------------------------------------------------------------------------------------------------------ dense operators


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-14), (torch.float32, 1e-6)])
def test_the_inverse_and_the_factor_agree(dtype, tolerance, rng):
    graph = Graph.with_terminals(rng.integers(0, 40, (120, 2)), 40)
    sparse, dense = (kind(graph, torch.device("cpu"), dtype) for kind in (SparseOperators, DenseOperators))
    w, p = (torch.randn(5, n, dtype=dtype) for n in (graph.num_edges, graph.num_vertices))
    for name, x in (("solve", p), ("differences", p), ("divergence", w)):
        torch.testing.assert_close(getattr(dense, name)(x), getattr(sparse, name)(x), rtol=0, atol=20 * tolerance)


def test_products_of_two_11_bit_factors_have_the_accuracy_of_float32(rng):
    """The factors of each product are exact in TF32, or smaller by 11 bits."""
    graph = Graph.grid((6, 9))
    exact, single = (DenseOperators(graph, torch.device("cpu"), dtype) for dtype in (torch.float64, torch.float32))
    x = torch.randn(7, graph.num_vertices)
    for whole, rest in ((single.inverse, single.rest), (round_to_tf32(x), x - round_to_tf32(x))):
        assert torch.equal(round_to_tf32(whole), whole) and (rest.abs() <= 2**-11 * whole.abs()).all()
    torch.testing.assert_close(single.inverse.double() + single.rest, exact.inverse, rtol=1e-10, atol=0)
    truncated = round_to_tf32(x) @ single.inverse
    truncated += round_to_tf32(x) @ round_to_tf32(single.rest) + round_to_tf32(x - round_to_tf32(x)) @ single.inverse
    for solved in (single.solve(x), truncated):
        assert (solved - exact.solve(x.double())).abs().max() < 1e-6


@needs_cuda
def test_tf32_does_not_change_a_solution_on_cuda():
    """TF32 alone is wrong by 1e-3."""
    shape, N = (64, 64), 64 * 64
    cut = GraphCut(Graph.grid(shape).edges[: -2 * N], N)
    w = edge_list(random_weights(shape, (8,), torch.float32), shape)
    expected = copy.deepcopy(cut).double()(w.double())
    cut = cut.cuda()
    assert isinstance(cut._operators, DenseOperators)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        for solver in (cut, torch.compile(cut, fullgraph=True)):
            torch.testing.assert_close(solver(w.cuda()).cpu().double(), expected, rtol=0, atol=1e-5)
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("dense", [False, True])
def test_compiled_layer_equals_the_layer(dense):
    cut, w = GraphCut([[0, 1], [1, 2]], 3, dense=dense), torch.randn(2, 8, requires_grad=True)
    compiled = torch.compile(cut, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(w), cut(w))
    one, other = (torch.autograd.grad(solver(w).square().sum(), w) for solver in (compiled, cut))
    torch.testing.assert_close(one, other)


def test_bad_input():
    with pytest.raises(ValueError, match=r"num_vertices is 3\.0; expected an integer of at least 1"):
        GraphCut([[0, 1]], 3.0)
    with pytest.raises(
        ValueError, match=r"w has shape \(3,\); this GraphCut expects \(..., 8\), a weight for each edge"
    ):
        GraphCut([[0, 1], [1, 2]], 3)(torch.zeros(3))
