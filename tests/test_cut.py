import copy
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import sparse
from torch.autograd import gradcheck, gradgradcheck

import cutslots.cut
from cutslots import EqualityQP, Graph, GraphCut, GridCut
from cutslots.graph import Program, grid_edges
from tests.conftest import DEVICES, needs_cuda, solve_literal

SHAPES = [(1, 1), (1, 7), (5, 7), (16, 16), (64, 64), (4, 6, 5)]
SMALL = [(1, 1), (1, 7), (5, 7), (16, 16), (4, 6, 5)]


@pytest.fixture(params=["product", "fft"])
def transform(request, monkeypatch):
    """Both ways to take a cosine transform, at every size."""
    side = 10**6 if request.param == "product" else 0
    monkeypatch.setattr(cutslots.cut, "PRODUCT_SIDE", {"cpu": side, "cuda": side})


def weights(shape, batch=(3,), dtype=torch.float64, **kwargs):
    return torch.randn(*batch, 2 * len(shape) + 2, *shape, dtype=dtype, **kwargs)


def edge_list(w, shape):
    return w[..., torch.as_tensor(grid_edges(shape))]


def literal_cut(shape, w, gamma=0.5):
    """All variables of the literal program, laid out as GridCut's: p (..., N), d and s as edge lists, terminals."""
    program = Graph.grid(shape).program()
    z = solve_literal(program, program.objective(edge_list(w, shape).numpy()), gamma)
    N = int(np.prod(shape))
    p, d, s, s_st = (z[..., program.blocks[k]] for k in ("p", "d", "s", "s_st"))
    return p[..., :N], d, s, p[..., N:], s_st[..., 0]


def largest_difference(cut, literal, shape):
    ours = (
        cut.p.flatten(-len(shape)),
        edge_list(cut.d, shape),
        edge_list(cut.slack, shape),
        cut.terminals,
        cut.slack_st,
    )
    return max(np.abs(a.detach().numpy() - b).max() for a, b in zip(ours, literal, strict=True))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_grid_equals_the_literal_program(shape, transform):
    w = weights(shape)
    assert largest_difference(GridCut(shape).double().solve(w), literal_cut(shape, w), shape) < 1e-10


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_float32_layer_turned_double_is_as_exact(shape, transform):
    w = weights(shape)
    single = GridCut(shape, gamma=0.3)
    assert single(w.float()).dtype == torch.float32
    assert largest_difference(single.double().solve(w), literal_cut(shape, w, gamma=0.3), shape) < 1e-10


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_float32(shape, transform):
    w = weights(shape)
    p = GridCut(shape).float()(w.float()).flatten(-len(shape)).numpy()
    expected = literal_cut(shape, w)[0]
    assert np.abs(p - expected).max() < 1e-4 * np.abs(expected).max()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_graph_cut_equals_the_literal_program(shape):
    w, N = weights(shape), int(np.prod(shape))
    cut = GraphCut(Graph.grid(shape).edges[: -2 * N], N).double().solve(edge_list(w, shape))
    ours = (cut.p, cut.d, cut.slack, cut.terminals, cut.slack_st)
    for a, b in zip(ours, literal_cut(shape, w), strict=True):
        assert np.abs(a.numpy() - b).max() < 1e-10


@pytest.mark.parametrize("shape", SMALL, ids=str)
def test_equality_qp_equals_grid_cut(shape):
    w, N = weights(shape), int(np.prod(shape))
    program = Graph.grid(shape).program()
    z = EqualityQP(program.A, program.b, 0.5).double()(torch.tensor(program.objective(edge_list(w, shape).numpy())))
    assert (z[..., :N] - GridCut(shape).double()(w).flatten(-len(shape))).abs().max() < 1e-10


def test_graph_cut_with_terminals_among_the_vertices(rng):
    graph = Graph(rng.integers(0, 9, (30, 2)), 9, source=4, sink=0)
    w = rng.standard_normal((2, 3, 30))
    program = graph.program()
    z = solve_literal(program, program.objective(w), 0.5)
    cut = GraphCut(graph.edges, 9, terminals=(4, 0)).double().solve(torch.tensor(w))
    assert np.abs(cut.p.numpy() - z[..., program.blocks["p"]]).max() < 1e-10
    assert np.abs(cut.d.numpy() - z[..., program.blocks["d"]]).max() < 1e-10
    assert np.abs(cut.slack.numpy() - z[..., program.blocks["s"]]).max() < 1e-10


@pytest.mark.parametrize("reach", [0.3, 2.0, 8.0])
@pytest.mark.parametrize("shape", [(5, 7), (2, 3, 4)], ids=str)
def test_reach_is_the_program_with_its_own_gamma_for_neighbours(reach, shape):
    w, gamma = weights(shape), 0.4
    graph = Graph.grid(shape)
    program, N, E = graph.program(), int(np.prod(shape)), graph.num_edges
    between = (graph.edges < N).all(axis=1)
    G = np.full(program.A.shape[1], gamma)
    G[program.blocks["d"]] = G[program.blocks["s"]] = np.where(between, 2 * gamma * reach**2, gamma)
    z = solve_literal(program, program.objective(edge_list(w, shape).numpy()), G)
    cut = GridCut(shape, gamma, reach).double().solve(w)
    assert np.abs(cut.p.flatten(1).numpy() - z[:, :N]).max() < 1e-10
    assert np.abs(edge_list(cut.d, shape).numpy() - z[:, program.blocks["d"]]).max() < 1e-10
    assert np.abs(edge_list(cut.slack, shape).numpy() - z[:, program.blocks["s"]]).max() < 1e-10
    assert edge_list(w, shape).shape[-1] == E


def test_the_papers_reach_is_the_default():
    w = weights((6, 5))
    assert torch.allclose(GridCut((6, 5), reach=0.5**0.5).double()(w), GridCut((6, 5)).double()(w), atol=1e-14)


@pytest.mark.parametrize("anchor", [0.25, 0.9, 1.0])
def test_anchor_is_the_program_with_tied_terminals(anchor):
    """One more row, p_s + p_t - r = 0, with a regulariser of its own on r; for anchor 1 the row has no r."""
    shape, gamma, N = (5, 7), 0.5, 35
    w = weights(shape)
    program = Graph.grid(shape).program()
    tie = np.zeros((1, program.A.shape[1]))
    tie[0, [N, N + 1]] = 1
    c = program.objective(edge_list(w, shape).numpy())
    if anchor == 1:
        tied = Program(sparse.csr_array(sparse.vstack([program.A, tie])), np.append(program.b, 0), {})
        z = solve_literal(tied, c, gamma)
    else:
        A = sparse.block_array([[program.A, None], [tie, [[-1.0]]]])
        G = np.append(np.full(program.A.shape[1], gamma), gamma * (4 + N) / 8 * anchor / (1 - anchor))
        z = solve_literal(Program(sparse.csr_array(A), np.append(program.b, 0), {}), np.pad(c, ((0, 0), (0, 1))), G)
    cut = GridCut(shape, gamma, anchor=anchor).double().solve(w)
    assert np.abs(cut.p.flatten(1).numpy() - z[:, :N]).max() < 1e-10
    assert np.abs(cut.terminals.numpy() - z[:, N : N + 2]).max() < 1e-10


@pytest.mark.parametrize("shape", [(1, 1), (3, 4), (2, 3, 2)], ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_grid_gradients(shape, device, transform):
    cut = GridCut(shape, reach=2.0, anchor=0.3).double().to(device)
    w = weights(shape, (2,)).to(device).requires_grad_()
    assert gradcheck(cut, w) and gradgradcheck(cut, w)
    assert gradcheck(lambda w: tuple(cut.solve(w)), w)
    assert gradgradcheck(lambda w: cut(w.square()).square(), w)


@pytest.mark.parametrize("device", DEVICES)
def test_graph_gradients(device, rng):
    cut = GraphCut(rng.integers(0, 5, (7, 2)), 5).double().to(device)
    w = torch.randn(2, 17, dtype=torch.float64, device=device, requires_grad=True)
    assert gradcheck(cut, w) and gradgradcheck(cut, w)
    assert gradcheck(lambda w: tuple(cut.solve(w)), w)
    assert gradgradcheck(lambda w: cut(w.square()).square(), w)


sides = st.integers(1, 7)
seeds = st.integers(0, 2**32 - 1)


def drawn(seed, shape, batch=()):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*batch, 2 * len(shape) + 2, *shape, generator=generator, dtype=torch.float64)


@settings(max_examples=25, deadline=None)
@given(sides, sides, seeds, st.floats(-3, 3), st.floats(-3, 3))
def test_linear_in_w(H, W, seed, a, b):
    cut = GridCut((H, W)).double()
    w, v = drawn(seed, (H, W), (2,))
    assert torch.allclose(cut(a * w + b * v), a * cut(w) + b * cut(v), atol=1e-10)


@settings(max_examples=25, deadline=None)
@given(sides, sides, seeds, st.floats(0.01, 100))
def test_gamma_only_rescales(H, W, seed, gamma):
    w = drawn(seed, (H, W))
    assert torch.allclose(gamma * GridCut((H, W), gamma).double()(w), GridCut((H, W), 1.0).double()(w), atol=1e-10)


@settings(max_examples=25, deadline=None)
@given(sides, sides, seeds, st.floats(0.1, 10), st.sampled_from([None, 4.0]))
def test_the_mean_is_balanced(H, W, seed, gamma, reach):
    w, N = drawn(seed, (H, W)), H * W
    S, T = w[4].sum(), w[5].sum()
    mean = GridCut((H, W), gamma, reach).double()(w).mean()
    assert torch.isclose(mean, (S - T) / (gamma * N * (N + 4)), atol=1e-12)
    anchored = GridCut((H, W), gamma, reach, anchor=1.0).double()(w).mean()
    assert torch.isclose(anchored, (S - T) / (4 * gamma * N), atol=1e-12)


RIGHT, LEFT, DOWN, UP, SOURCE, SINK = range(6)


@settings(max_examples=25, deadline=None)
@given(sides, sides, seeds)
def test_symmetries_of_the_image(H, W, seed):
    w = drawn(seed, (H, W))
    p = GridCut((H, W)).double()(w)
    mirrored = w.flip(-1)[[LEFT, RIGHT, DOWN, UP, SOURCE, SINK]]
    upside_down = w.flip(-2)[[RIGHT, LEFT, UP, DOWN, SOURCE, SINK]]
    transposed = w.mT[[DOWN, UP, RIGHT, LEFT, SOURCE, SINK]]
    assert torch.allclose(GridCut((H, W)).double()(mirrored), p.flip(-1), atol=1e-12)
    assert torch.allclose(GridCut((H, W)).double()(upside_down), p.flip(-2), atol=1e-12)
    assert torch.allclose(GridCut((W, H)).double()(transposed), p.mT, atol=1e-12)


@settings(max_examples=25, deadline=None)
@given(st.sampled_from([(1, 1), (4, 5), (3, 2, 4)]), seeds)
def test_edges_that_leave_the_grid_do_nothing(shape, seed):
    cut = GridCut(shape).double()
    outside = torch.as_tensor(~grid_edges(shape))
    w = drawn(seed, shape).requires_grad_()
    noise = torch.where(outside, torch.full_like(w, 1e6), 0)
    assert torch.equal(cut(w + noise), cut(w))
    (grad,) = torch.autograd.grad(cut(w).square().sum(), w)
    assert (grad[outside] == 0).all() and (outside.all() or (grad[~outside] != 0).any())
    d = cut.solve(w + noise).d
    assert (d[outside] == 0).all()


def test_equal_weights_both_ways_cancel():
    """Only the difference of an edge and its reverse acts on p: a fact of the relaxation that users should know."""
    w = weights((5, 6), ())
    symmetric = w.clone()
    symmetric[RIGHT, :, :-1] += (shift := torch.rand(5, 5, dtype=torch.float64))
    symmetric[LEFT, :, 1:] += shift
    cut = GridCut((5, 6)).double()
    assert torch.allclose(cut(symmetric), cut(w), atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_runs_in_float32(dtype):
    w = weights((8, 8), dtype=torch.float32).to(dtype)
    expected = GridCut((8, 8))(w.float())
    assert torch.equal(GridCut((8, 8))(w), expected)
    assert torch.equal(GridCut((8, 8)).to(dtype)(w), expected)


@pytest.mark.parametrize("device", DEVICES)
def test_autocast_changes_nothing(device):
    cut = GridCut((8, 8)).to(device)
    w = weights((8, 8), dtype=torch.float32).to(device).requires_grad_()
    plain = cut(w)
    (grad,) = torch.autograd.grad(plain.square().sum(), w)
    with torch.autocast(device, dtype=torch.bfloat16):
        p = cut(w)
        (inside,) = torch.autograd.grad(p.square().sum(), w)
    assert torch.equal(p, plain)
    assert torch.allclose(inside, grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("device", DEVICES)
def test_vmap(device):
    cut = GridCut((6, 5)).to(device)
    w = weights((6, 5), (4, 3), torch.float32).to(device)
    assert torch.allclose(torch.func.vmap(cut, in_dims=1, out_dims=1)(w), cut(w), atol=1e-6)
    jacobian = torch.func.vmap(torch.func.jacrev(lambda w: cut(w).sum()))(w[0])
    assert torch.allclose(jacobian, torch.func.grad(lambda w: cut(w).sum())(w[0]), atol=1e-6)


@pytest.mark.parametrize("device", DEVICES)
def test_compile(device, transform):
    cut = GridCut((6, 5)).to(device)
    w = weights((6, 5), dtype=torch.float32).to(device).requires_grad_()
    compiled = torch.compile(cut, fullgraph=True)
    assert torch.allclose(compiled(w), cut(w), atol=1e-5)
    ours, theirs = (torch.autograd.grad(f(w).square().sum(), w)[0] for f in (cut, compiled))
    assert torch.allclose(ours, theirs, atol=1e-4)


@pytest.mark.parametrize(
    "cut, width", [(GridCut((4, 5)), None), (GraphCut([[0, 1], [1, 2]], 3), 8)], ids=["grid", "graph"]
)
def test_copies_pickles_and_empty_batches(cut, width):
    w = torch.randn(2, width) if width else weights((4, 5), (2,), torch.float32)
    for twin in (copy.deepcopy(cut), pickle.loads(pickle.dumps(cut))):
        assert torch.equal(twin(w), cut(w))
    assert cut(w[:0]).shape == (0, *cut(w).shape[1:])
    assert cut(w[0]).shape == cut(w).shape[1:]
    assert not cut.state_dict()


def test_built_on_meta():
    with torch.device("meta"):
        cut = GridCut((4, 5))
    w = weights((4, 5), dtype=torch.float32)
    assert torch.equal(cut.to_empty(device="cpu")(w), GridCut((4, 5))(w))


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"shape": (8,)}, r"shape is \(8,\); expected \(H, W\) or \(T, H, W\)"),
        ({"shape": (8, 8), "gamma": 0}, "gamma is 0; expected a positive number"),
        ({"shape": (8, 8), "gamma": float("nan")}, "gamma is nan; expected a positive number"),
        ({"shape": (8, 8), "reach": -1}, "reach is -1; expected a positive number"),
        ({"shape": (8, 8), "anchor": 1.5}, "anchor is 1.5; expected a number from 0"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        GridCut(**arguments)


def test_bad_weights():
    cut = GridCut((8, 9))
    for wrong, name in (([1.0], "list"), (np.zeros((6, 8, 9), np.float32), "ndarray")):
        with pytest.raises(TypeError, match=f"w is a {name}; expected a torch.Tensor"):
            cut(wrong)
    with pytest.raises(ValueError, match="shape is 4; expected"):
        GridCut(4)
    with pytest.raises(ValueError, match=r"num_vertices is 3\.0; expected a whole number"):
        GraphCut([[0, 1]], 3.0)
    assert GraphCut([], 3)(torch.zeros(6)).shape == (3,)
    with pytest.raises(ValueError, match=r"w has shape \(2, 6, 9, 8\); a GridCut of \(8, 9\) expects \(..., 6, 8, 9\)"):
        cut(torch.zeros(2, 6, 9, 8))
    with pytest.raises(
        TypeError, match=r"w has dtype torch.float64, but the GridCut is torch.float32: turn the layer with .double"
    ):
        cut(torch.zeros(6, 8, 9, dtype=torch.float64))
    with pytest.raises(
        ValueError, match=r"w has shape \(3,\); this GraphCut expects \(..., 8\), a weight for each edge"
    ):
        GraphCut([[0, 1], [1, 2]], 3)(torch.zeros(3))


@needs_cuda
@pytest.mark.parametrize("shape", [(1, 1), (16, 16), (33, 17), (64, 64), (70, 90), (300, 260)], ids=str)
def test_fused_kernels(shape):
    """The Triton kernels against the same cut on the CPU in float64, forward and backward."""
    w = weights(shape, dtype=torch.float32, device="cuda", requires_grad=True)
    cut = GridCut(shape).cuda()
    assert cut._kernels
    p = cut(w)
    (grad,) = torch.autograd.grad(p.square().sum(), w)
    v = w.detach().cpu().double().requires_grad_()
    expected = GridCut(shape).double()(v)
    (expected_grad,) = torch.autograd.grad(expected.square().sum(), v)
    assert (p.cpu() - expected).abs().max() < 1e-5 * expected.abs().max()
    assert (grad.cpu() - expected_grad).abs().max() < 1e-5 * expected_grad.abs().max()
