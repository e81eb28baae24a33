import types

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import sparse
from torch.autograd import gradcheck, gradgradcheck
from torch.fx.experimental.proxy_tensor import make_fx

from cutslots import EqualityQP, Graph, GridCut
from cutslots.programs import dct, grid_cut, native
from cutslots.programs.graph import SparseQP, grid_edges
from cutslots.programs.grid_cut import (
    FusedOperators,
    GridOperators,
    NativeOperators,
    OverlapOperators,
    TiledOperators,
)
from tests.conftest import DEVICES
from tests.programs.literal import edge_list, literal_cut, random_weights, solve_literal

SHAPES = [(1, 1), (1, 7), (5, 7), (16, 16), (64, 64), (4, 6, 5)]
SMALL_SHAPES = [(1, 1), (1, 7), (5, 7), (16, 16), (4, 6, 5)]
RIGHT, LEFT, DOWN, UP, SOURCE, SINK = range(6)


@pytest.fixture(params=["matmul", "fft"])
def transform(request, monkeypatch):
    """Use one cosine transform at every size."""
    limit = 10**6 if request.param == "matmul" else 0
    for device in ("cpu", "cuda"):
        monkeypatch.setitem(dct.MAX_DCT_MATMUL_SIZE, device, limit)


def max_difference(solution, literal, shape):
    """Return the largest difference between a CutSolution and the variables of `literal_cut`."""
    ours = (
        solution.p.flatten(-len(shape)),
        edge_list(solution.d, shape),
        edge_list(solution.slack, shape),
        solution.terminals,
        solution.slack_st,
    )
    return max(np.abs(a.detach().numpy() - b).max() for a, b in zip(ours, literal, strict=True))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_solution_equals_the_literal_qp(shape, transform):
    w = random_weights(shape)
    assert max_difference(GridCut(shape).double().solve(w), literal_cut(shape, w), shape) < 1e-10


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_float32_layer_converted_to_double_is_exact(shape, transform):
    w = random_weights(shape)
    single = GridCut(shape, gamma=0.3)
    assert single(w.float()).dtype == torch.float32
    assert max_difference(single.double().solve(w), literal_cut(shape, w, gamma=0.3), shape) < 1e-10


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_float32_is_close_to_the_literal_qp(shape, transform):
    w = random_weights(shape)
    p = GridCut(shape).float()(w.float()).flatten(-len(shape)).numpy()
    expected = literal_cut(shape, w)[0]
    assert np.abs(p - expected).max() < 1e-4 * np.abs(expected).max()


@pytest.mark.parametrize("shape", SMALL_SHAPES, ids=str)
def test_equality_qp_equals_grid_cut(shape):
    w, N = random_weights(shape), int(np.prod(shape))
    qp = Graph.grid(shape).qp()
    z = EqualityQP(qp.A, qp.b, 0.5).double()(torch.tensor(qp.objective(edge_list(w, shape).numpy())))
    assert (z[..., :N] - GridCut(shape).double()(w).flatten(-len(shape))).abs().max() < 1e-10


@pytest.mark.parametrize("reach", [0.3, 2.0, 8.0])
@pytest.mark.parametrize("shape", [(5, 7), (2, 3, 4)], ids=str)
def test_reach_equals_the_literal_qp_with_a_gamma_for_neighbours(reach, shape):
    w, gamma = random_weights(shape), 0.4
    graph = Graph.grid(shape)
    qp, N, E = graph.qp(), int(np.prod(shape)), graph.num_edges
    between_pixels = (graph.edges < N).all(axis=1)
    G = np.full(qp.A.shape[1], gamma)
    G[qp.blocks["d"]] = G[qp.blocks["s"]] = np.where(between_pixels, 2 * gamma * reach**2, gamma)
    z = solve_literal(qp, qp.objective(edge_list(w, shape).numpy()), G)
    cut = GridCut(shape, gamma, reach).double().solve(w)
    assert np.abs(cut.p.flatten(1).numpy() - z[:, :N]).max() < 1e-10
    assert np.abs(edge_list(cut.d, shape).numpy() - z[:, qp.blocks["d"]]).max() < 1e-10
    assert np.abs(edge_list(cut.slack, shape).numpy() - z[:, qp.blocks["s"]]).max() < 1e-10
    assert edge_list(w, shape).shape[-1] == E


def test_default_reach_is_the_papers():
    w = random_weights((6, 5))
    assert torch.allclose(GridCut((6, 5), reach=0.5**0.5).double()(w), GridCut((6, 5)).double()(w), atol=1e-14)


@pytest.mark.parametrize("anchor", [0.25, 0.9, 1.0])
def test_anchor_equals_the_literal_qp_with_a_penalty_on_the_terminals(anchor):
    """The QP has one more row, p_s + p_t - r = 0, and a separate regulariser on r; for anchor 1 the row has no r."""
    shape, gamma, N = (5, 7), 0.5, 35
    w = random_weights(shape)
    qp = Graph.grid(shape).qp()
    row = np.zeros((1, qp.A.shape[1]))
    row[0, [N, N + 1]] = 1
    c = qp.objective(edge_list(w, shape).numpy())
    if anchor == 1:
        constrained = SparseQP(sparse.csr_array(sparse.vstack([qp.A, row])), np.append(qp.b, 0), {})
        z = solve_literal(constrained, c, gamma)
    else:
        A = sparse.block_array([[qp.A, None], [row, [[-1.0]]]])
        G = np.append(np.full(qp.A.shape[1], gamma), gamma * (4 + N) / 8 * anchor / (1 - anchor))
        z = solve_literal(SparseQP(sparse.csr_array(A), np.append(qp.b, 0), {}), np.pad(c, ((0, 0), (0, 1))), G)
    cut = GridCut(shape, gamma, anchor=anchor).double().solve(w)
    assert np.abs(cut.p.flatten(1).numpy() - z[:, :N]).max() < 1e-10
    assert np.abs(cut.terminals.numpy() - z[:, N : N + 2]).max() < 1e-10


@pytest.mark.parametrize("shape", [(1, 1), (3, 4), (2, 3, 2)], ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_gradients(shape, device, transform):
    cut = GridCut(shape, reach=2.0, anchor=0.3).double().to(device)
    w = random_weights(shape, (1,)).to(device).requires_grad_()
    assert gradcheck(lambda w: tuple(cut.solve(w)), w, check_forward_ad=True)
    assert gradgradcheck(lambda w: cut(w.square()).square(), w, fast_mode=True)


sides = st.integers(1, 7)
seeds = st.integers(0, 2**32 - 1)


def seeded_weights(seed, shape, batch=()):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*batch, 2 * len(shape) + 2, *shape, generator=generator, dtype=torch.float64)


@settings(max_examples=25, deadline=None)
@given(sides, sides, seeds, st.floats(-3, 3), st.floats(-3, 3))
def test_solution_is_linear_in_w(H, W, seed, a, b):
    cut = GridCut((H, W)).double()
    w, v = seeded_weights(seed, (H, W), (2,))
    assert torch.allclose(cut(a * w + b * v), a * cut(w) + b * cut(v), atol=1e-10)


@settings(max_examples=25, deadline=None)
@given(sides, sides, seeds, st.floats(0.01, 100))
def test_solution_scales_with_one_over_gamma(H, W, seed, gamma):
    w = seeded_weights(seed, (H, W))
    assert torch.allclose(gamma * GridCut((H, W), gamma).double()(w), GridCut((H, W), 1.0).double()(w), atol=1e-10)


@settings(max_examples=25, deadline=None)
@given(sides, sides, seeds, st.floats(0.1, 10), st.sampled_from([None, 4.0]))
def test_mean_of_p_has_a_closed_form(H, W, seed, gamma, reach):
    w, N = seeded_weights(seed, (H, W)), H * W
    S, T = w[4].sum(), w[5].sum()
    mean = GridCut((H, W), gamma, reach).double()(w).mean()
    assert torch.isclose(mean, (S - T) / (gamma * N * (N + 4)), atol=1e-12)
    anchored = GridCut((H, W), gamma, reach, anchor=1.0).double()(w).mean()
    assert torch.isclose(anchored, (S - T) / (4 * gamma * N), atol=1e-12)


@settings(max_examples=25, deadline=None)
@given(sides, sides, seeds)
def test_flipping_and_transposing_the_image(H, W, seed):
    w = seeded_weights(seed, (H, W))
    p = GridCut((H, W)).double()(w)
    flipped_x = w.flip(-1)[[LEFT, RIGHT, DOWN, UP, SOURCE, SINK]]
    flipped_y = w.flip(-2)[[RIGHT, LEFT, UP, DOWN, SOURCE, SINK]]
    transposed = w.mT[[DOWN, UP, RIGHT, LEFT, SOURCE, SINK]]
    assert torch.allclose(GridCut((H, W)).double()(flipped_x), p.flip(-1), atol=1e-12)
    assert torch.allclose(GridCut((H, W)).double()(flipped_y), p.flip(-2), atol=1e-12)
    assert torch.allclose(GridCut((W, H)).double()(transposed), p.mT, atol=1e-12)


@settings(max_examples=25, deadline=None)
@given(st.sampled_from([(1, 1), (4, 5), (3, 2, 4)]), seeds)
def test_edges_that_leave_the_grid_are_ignored(shape, seed):
    cut = GridCut(shape).double()
    outside = torch.as_tensor(~grid_edges(shape))
    w = seeded_weights(seed, shape).requires_grad_()
    noise = torch.where(outside, torch.full_like(w, 1e6), 0)
    assert torch.equal(cut(w + noise), cut(w))
    (grad,) = torch.autograd.grad(cut(w).square().sum(), w)
    assert (grad[outside] == 0).all() and (outside.all() or (grad[~outside] != 0).any())
    d = cut.solve(w + noise).d
    assert (d[outside] == 0).all()


def test_equal_weights_in_both_directions_cancel():
    """Only the difference between an edge and its reverse acts on p. docs/cuts.md tells users so."""
    w = random_weights((5, 6), ())
    symmetric = w.clone()
    symmetric[RIGHT, :, :-1] += (shift := torch.rand(5, 5, dtype=torch.float64))
    symmetric[LEFT, :, 1:] += shift
    cut = GridCut((5, 6)).double()
    assert torch.allclose(cut(symmetric), cut(w), atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_runs_in_float32(dtype):
    w = random_weights((8, 8), dtype=torch.float32).to(dtype)
    expected = GridCut((8, 8))(w.float())
    assert torch.equal(GridCut((8, 8))(w), expected)
    assert torch.equal(GridCut((8, 8)).to(dtype)(w), expected)


@pytest.mark.parametrize("device", DEVICES)
def test_autocast_changes_nothing(device):
    cut = GridCut((8, 8)).to(device)
    w = random_weights((8, 8), dtype=torch.float32).to(device).requires_grad_()
    expected = cut(w)
    (expected_grad,) = torch.autograd.grad(expected.square().sum(), w)
    with torch.autocast(device, dtype=torch.bfloat16):
        p = cut(w)
        (grad,) = torch.autograd.grad(p.square().sum(), w)
    assert torch.equal(p, expected)
    assert torch.allclose(grad, expected_grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("device", DEVICES)
def test_compiled_equals_eager(device, transform):
    cut = GridCut((6, 5)).to(device)
    w = random_weights((6, 5), dtype=torch.float32).to(device).requires_grad_()
    compiled = torch.compile(cut, fullgraph=True)
    assert torch.allclose(compiled(w), cut(w), atol=1e-5)
    eager_grad, compiled_grad = (torch.autograd.grad(f(w).square().sum(), w)[0] for f in (cut, compiled))
    assert torch.allclose(eager_grad, compiled_grad, atol=1e-4)


def test_empty_and_missing_batches(transform):
    cut, w = GridCut((4, 5)), random_weights((4, 5), (2,), torch.float32)
    assert cut(w[:0]).shape == (0, 4, 5) and cut(w[0]).shape == (4, 5)


def test_conversion_to_the_same_dtype_keeps_the_fft():
    cut, w = GridCut((2, 400)), random_weights((2, 400), dtype=torch.float32)
    assert torch.equal(cut.to(torch.float32)(w), GridCut((2, 400))(w))


def test_defaults_are_the_paper_s():
    """gamma 0.5 for all edges, free terminals."""
    cut, w = GridCut((4, 5)), random_weights((4, 5), dtype=torch.float32)
    assert (cut.gamma, cut.reach, cut.anchor, cut.gamma_n) == (0.5, None, 0.0, 0.5)
    assert torch.equal(cut(w), GridCut((4, 5), 0.5, None, 0.0)(w))
    assert GridCut((4, 5), 0.3, 2.0).gamma_n == pytest.approx(2 * 0.3 * 4)


def test_both_ends_of_the_anchor_are_allowed():
    assert isinstance(GridCut((4, 5), anchor=1).anchor, float) and GridCut((4, 5), anchor=0).anchor == 0
    for anchor in (-0.1, 1.1):
        message = rf"^anchor is {anchor}; expected a number from 0 \(free terminals\) to 1 \(anchored\)$"
        with pytest.raises(ValueError, match=message):
            GridCut((4, 5), anchor=anchor)


def test_repr():
    assert repr(GridCut((4, 5), 0.3, 2.0, 0.1)).startswith("GridCut(\n  (4, 5), gamma=0.3, reach=2.0, anchor=0.1\n")


def test_one_pixel_by_hand():
    """p is (source - sink) / (5 gamma) with free terminals: (N + 4) gamma N with N = 1."""
    w = torch.zeros(6, 1, 1, dtype=torch.float64)
    w[SOURCE], w[SINK] = 3.0, 1.0
    assert GridCut((1, 1), 0.5).double()(w).item() == pytest.approx(2 / (5 * 0.5))
    assert GridCut((1, 1), 0.5, anchor=1.0).double()(w).item() == pytest.approx(2 / (4 * 0.5))


def test_matrix_products_on_request():
    """Exporters do not support FFTs."""
    cut, w = GridCut((2, 400)), random_weights((2, 400), dtype=torch.float32)
    expected = cut(w)
    assert type(cut._dct) is dct.FFTDCT
    cut.use_matmul()
    assert type(cut._dct) is dct.MatmulDCT and type(cut._operators) is GridOperators
    torch.testing.assert_close(cut(w), expected, rtol=1e-4, atol=1e-5)
    double = GridCut((2, 4)).double()
    double.use_matmul()
    assert double(random_weights((2, 4))).dtype == torch.float64
    assert type(cut.double()._dct) is dct.FFTDCT, "until the layer moves"


@pytest.mark.parametrize("shape", SMALL_SHAPES, ids=str)
def test_differences_are_the_adjoint_of_the_divergence(shape):
    operators, w, p = GridOperators(shape), random_weights(shape, (2,)), torch.randn(2, *shape, dtype=torch.float64)
    w = w * torch.as_tensor(grid_edges(shape))
    torch.testing.assert_close((operators.divergence(w) * p).sum(), (w * operators.differences(p)).sum())
    assert torch.equal(operators._differences_out_of_place(p), operators.differences(p))
    assert not operators.differences(p)[:, ~torch.as_tensor(grid_edges(shape))].any()


def test_operators_do_not_change_their_input():
    shape = (4, 5)
    w, p = random_weights(shape, (2,)), torch.randn(2, *shape, dtype=torch.float64)
    before = w.clone(), p.clone()
    GridOperators(shape).divergence(w)
    GridOperators(shape).differences(p)
    assert torch.equal(w, before[0]) and torch.equal(p, before[1])


class Kernels(types.SimpleNamespace):
    """Stands in for the Triton kernels."""

    MAX_FUSED_SIZE, TILE = 64, 8

    class TritonFFTDCT(dct.FFTDCT):
        pass

    class FilterTables(torch.nn.Module):
        def __init__(self, *constants):
            super().__init__()
            self.constants = constants

    @staticmethod
    def fits_tiles(shape, decay):
        return min(shape) > 8 and decay < 0.3

    @staticmethod
    def is_supported(device):
        return device.type == "cpu"


@pytest.mark.parametrize(
    "shape, dtype, reach, operators, transform",
    [
        ((64, 64), torch.float32, None, FusedOperators, dct.MatmulDCT),
        ((64, 64), torch.float32, 9.0, FusedOperators, dct.MatmulDCT),
        ((64, 65), torch.float32, None, OverlapOperators, dct.MatmulDCT),
        ((64, 65), torch.float32, 9.0, TiledOperators, dct.MatmulDCT),
        ((9, 385), torch.float32, 0.5, OverlapOperators, Kernels.TritonFFTDCT),
        ((2, 385), torch.float32, None, TiledOperators, Kernels.TritonFFTDCT),
        ((64, 64), torch.float64, None, NativeOperators, dct.MatmulDCT),
        ((2, 385), torch.float64, None, GridOperators, dct.FFTDCT),
        ((2, 8, 8), torch.float32, None, GridOperators, dct.MatmulDCT),
    ],
)
def test_kernels_are_for_float32_images_on_supported_devices(monkeypatch, shape, dtype, reach, operators, transform):
    monkeypatch.setattr(grid_cut, "kernels", Kernels())
    cut = GridCut(shape, reach=reach).to(dtype)
    assert (type(cut._dct), type(cut._operators)) == (transform, operators)
    assert cut._dct.shape == cut._operators.shape == shape and next(cut._dct.buffers()).dtype == dtype


def test_kernels_and_devices(monkeypatch):
    monkeypatch.setattr(grid_cut, "kernels", Kernels())
    with torch.device("meta"):
        cut = GridCut((2, 193))
    assert type(cut._dct) is dct.FFTDCT and type(cut._operators) is GridOperators, "a device without kernels"
    assert next(cut._dct.buffers()).is_meta
    monkeypatch.setattr(Kernels, "is_supported", staticmethod(lambda device: True))
    with torch.device("meta"):
        cut = GridCut((2, 193))
    assert type(cut._dct) is Kernels.TritonFFTDCT and next(cut._dct.buffers()).is_meta
    cut = GridCut((9, 70))
    assert type(cut._operators) is OverlapOperators
    cut.use_matmul()
    assert type(cut._operators) is GridOperators
    assert type(cut.double()._operators) is NativeOperators, "operators change with the precision"
    assert type(cut.float()._operators) is OverlapOperators


def test_kernels_get_their_tables(monkeypatch):
    names = ("vertices", "vertices_adjoint", "vertices_in_tiles", "adjoint_in_tiles", "divergence", "differences")
    kernels = Kernels(**{name: lambda *given, name=name: (name, *given) for name in names})
    monkeypatch.setattr(grid_cut, "kernels", kernels)
    fused, overlap = GridCut((3, 4), anchor=0.5), GridCut((9, 70), gamma=0.3, anchor=0.5)
    tables = fused._operators.tables
    assert fused._vertices("w") == ("vertices", "w", tables)
    assert fused._vertices_adjoint("p") == ("vertices_adjoint", "p", tables)
    response, device = tables.constants
    assert torch.equal(response, fused._response()) and device == torch.device("cpu")
    tables = overlap._operators.tables
    assert overlap._vertices("w") == ("vertices_in_tiles", "w", tables)
    assert overlap._vertices_adjoint("p") == ("adjoint_in_tiles", "p", tables)
    response, device, pixels, constant = tables.constants
    assert pixels == 630 and constant == overlap._response()[0, 0]
    expected = GridCut((8, 8), gamma=0.3)._response()
    assert response[0, 0] == -1 / (4 * 0.3) and torch.equal(response.view(-1)[1:], expected.view(-1)[1:])
    assert overlap._operators.divergence("w") == ("divergence", "w")
    assert TiledOperators((3, 4)).differences("p") == ("differences", "p")


@pytest.mark.parametrize("gamma, reach", [(0.5, None), (0.1, 0.5), (2.0, 3.0), (0.5, 1e-6), (0.5, 1e6)])
def test_decay_is_that_of_the_solution(gamma, reach):
    """In one row with fixed terminals the solution for a single pixel is r^distance."""
    cut = GridCut((1, 400), gamma, reach)
    C = dct.dct_matrix(400)
    row = C.T[200] * cut._response_without_terminals((1, 400))[0] @ C
    expected = row[201] / row[200]
    assert cut.decay == pytest.approx(expected.item(), rel=1e-4 if reach != 1e6 else 0.1, abs=1e-12)


def test_constants_are_computed_on_the_cpu_and_moved():
    with torch.device("meta"):
        cut = GridCut((3, 4))
        assert cut._response().device.type == "cpu"
    assert cut._spectrum.is_meta and all(buffer.is_meta for buffer in cut._dct.buffers())
    cut.use_matmul()
    assert all(buffer.is_meta for buffer in cut._dct.buffers())


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"shape": (8,)}, r"shape is \(8,\); expected \(H, W\) or \(T, H, W\)"),
        ({"shape": (8, 8), "gamma": 0}, "gamma is 0; expected a number from 1e-06 to 1,000,000"),
        ({"shape": (8, 8), "gamma": float("nan")}, "gamma is nan; expected a number from 1e-06 to 1,000,000"),
        ({"shape": (8, 8), "reach": -1}, "reach is -1; expected a number from 1e-06 to 1,000,000"),
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
    with pytest.raises(ValueError, match=r"w has shape \(2, 6, 9, 8\); a GridCut of \(8, 9\) expects \(..., 6, 8, 9\)"):
        cut(torch.zeros(2, 6, 9, 8))
    with pytest.raises(
        TypeError, match=r"w has dtype torch.float64, but the GridCut is torch.float32: convert the layer with .double"
    ):
        cut(torch.zeros(6, 8, 9, dtype=torch.float64))


# -------------------------------------------------------------------------------------------------------- compiled code


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (5, 1), (3, 4), (16, 16), (9, 30), (64, 64)], ids=str)
@pytest.mark.parametrize("batch", [(), (0,), (1,), (2, 3)], ids=str)
def test_compiled_code_equals_the_operations(shape, batch, dtype):
    if native.load(grid_cut.SOURCE, dtype) is None:
        pytest.skip("needs a C compiler")
    cut = GridCut(shape, reach=2.0, anchor=0.3).to(dtype)
    w = torch.randn(*batch, 6, *shape, dtype=dtype, requires_grad=True)
    strided = torch.randn(*batch, *shape, 6, dtype=dtype).movedim(-1, -3).requires_grad_()
    for x in (w, strided):
        found = [p := cut(x), *torch.autograd.grad(p.square().sum(), x, create_graph=True)]
        with native.disabled():
            expected = [p := cut(x), *torch.autograd.grad(p.square().sum(), x)]
        torch.testing.assert_close(found, expected, atol=1e-5 if dtype == torch.float32 else 1e-13, rtol=0)


def test_compiled_code_is_called_for_few_small_images_on_the_cpu(monkeypatch):
    if native.load(grid_cut.SOURCE, torch.float32) is None:
        pytest.skip("needs a C compiler")
    calls = []
    call = grid_cut.NativeOperators._call
    monkeypatch.setattr(grid_cut.NativeOperators, "_call", lambda *args: calls.append(args[2].shape) or call(*args))
    cut = GridCut((16, 16))
    cut(torch.randn(12, 6, 16, 16, requires_grad=True)).sum().backward()
    assert calls == [(12, 6, 16, 16), (12, 16, 16)]
    calls.clear()
    cut(torch.randn(96, 6, 16, 16))
    torch.func.vmap(cut)(torch.randn(2, 6, 16, 16))
    GridCut((2, 16, 16))(torch.randn(8, 2, 16, 16))
    assert calls == [(2, 6, 16, 16)], "vmap calls the layer with a batch; large batches and clips use the operations"


def test_compiled_code_reads_values_that_memory_does_not_hold():
    cut, w = GridCut((6, 7)).double(), torch.randn(2, 6, 6, 7, dtype=torch.float64)
    torch.testing.assert_close(cut(torch._neg_view(w)), -cut(w))
    zeros = torch._efficientzerotensor((2, 6, 6, 7), dtype=torch.float64)
    assert not cut._operators._library(zeros, 2)
    graph = make_fx(cut, tracing_mode="real")(w)
    other = torch.randn_like(w)
    torch.testing.assert_close(graph(other), cut(other))
