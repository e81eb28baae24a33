"""The CUDA kernels of GridCut against float64 on the CPU.

Where there is Triton but no GPU, the last test runs this file under Triton's interpreter.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch

from cutslots import GridCut
from cutslots.programs import grid_cut
from cutslots.programs.grid_cut import FusedOperators, OverlapOperators, TiledOperators
from tests.conftest import needs_cuda
from tests.programs.literal import random_weights

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton") is not None
DEVICE = "cpu" if INTERPRETED else "cuda"
needs_kernels = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(), reason="needs a CUDA device or Triton's interpreter"
)
kernels = grid_cut.kernels
RIGHT, LEFT, DOWN, UP, SOURCE, SINK = range(6)
SHAPES = [(33, 17), (65, 70)]  # one for each set of kernels
INTERPRETED_SHAPES = [(1, 7), (16, 16), (20, 64)] if INTERPRETED else []  # each takes seconds to compile


@pytest.fixture(autouse=True)
def supported(monkeypatch):
    """Let a layer on the CPU use the kernels under the interpreter."""
    if INTERPRETED:
        monkeypatch.setattr(kernels, "is_supported", lambda device: True)


def weights(shape, cuts=2):
    return random_weights(shape, (cuts,), dtype=torch.float32)


def solve(cut, w, g):
    """Return p and the gradient of w for a gradient g of p."""
    w = w.detach().requires_grad_()
    p = cut(w)
    (grad,) = torch.autograd.grad(p, w, g)
    return p.detach(), grad


def expected(cut, w, g):
    """Return the same in float64 on the CPU."""
    reference = GridCut(cut.shape, cut.gamma, cut.reach, cut.anchor).double()
    return solve(reference, w.cpu().double(), g.cpu().double())


def errors(cut, w, g):
    """Return the largest errors of p and of the gradient, relative to the largest values."""
    pairs = zip(solve(cut, w.to(DEVICE), g.to(DEVICE)), expected(cut, w, g), strict=True)
    return [((a.cpu() - b).abs().max() / b.abs().max()).item() for a, b in pairs]


@needs_kernels
@pytest.mark.parametrize("shape", [(1, 1), (33, 17), (64, 64), *INTERPRETED_SHAPES], ids=str)
def test_small_images(shape):
    cut = GridCut(shape).to(DEVICE)
    assert type(cut._operators) is FusedOperators and not cut._operators.tables.rescale
    assert max(errors(cut, weights(shape), torch.randn(2, *shape))) < 1e-6


@needs_kernels
@pytest.mark.parametrize("shape", [(65, 65), (52, 131), (80, 96), (121, 90)], ids=str)
def test_large_images(shape):
    cut = GridCut(shape).to(DEVICE)
    assert type(cut._operators) is OverlapOperators
    assert max(errors(cut, weights(shape), torch.randn(2, *shape))) < 1e-6


@needs_kernels
@pytest.mark.parametrize("shape", [(51, 70), (193, 8)], ids=str)
@pytest.mark.parametrize("reach", [None, 3.0])
def test_images_that_do_not_fit_tiles(shape, reach):
    cut = GridCut(shape, reach=reach).to(DEVICE)
    assert type(cut._operators) is TiledOperators
    assert type(cut._dct).__name__ == ("TritonFFTDCT" if shape == (193, 8) and DEVICE == "cuda" else "MatmulDCT")
    assert max(errors(cut, weights(shape), torch.randn(2, *shape))) < 1e-6


@needs_kernels
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("gamma, reach, anchor", [(0.5, 1e-3, 0.0), (1e-6, 0.3, 0.5), (3e5, None, 1.0)])
def test_regularisers_and_anchors(shape, gamma, reach, anchor):
    cut = GridCut(shape, gamma, reach, anchor).to(DEVICE)
    assert type(cut._operators) is (FusedOperators if shape == SHAPES[0] else OverlapOperators)
    assert max(errors(cut, weights(shape), torch.randn(2, *shape))) < 1e-6


@needs_kernels
@pytest.mark.parametrize("reach", [8.0, 100.0, 1e4, 1e6])
def test_long_reach(reach):
    """The spectrum spans up to fourteen orders of magnitude, and float16 nine."""
    cut = GridCut((33, 17), reach=reach).to(DEVICE)
    assert cut._operators.tables.rescale
    w, g = weights((33, 17)), torch.randn(2, 33, 17)
    limits = [2 * error + 1e-6 for error in plain_errors(cut, w, g)]
    assert all(error < limit for error, limit in zip(errors(cut, w, g), limits, strict=True))


@needs_kernels
@pytest.mark.parametrize("reach", [8.0, 1e3])
def test_small_entries_of_the_spectrum(reach):
    """Noise without a mean leaves the largest entry aside; without a second scale the modes vanish in float16."""
    cut, g = GridCut((64, 64), reach=reach, anchor=1.0).to(DEVICE), torch.randn(1, 64, 64)
    g -= g.double().mean()
    w = torch.zeros(1, 6, 64, 64)
    w[:, SINK] = g
    limits = [2 * error + 1e-6 for error in plain_errors(cut, w, g)]
    assert all(error < limit for error, limit in zip(errors(cut, w, g), limits, strict=True))


def plain_errors(cut, w, g):
    """Return the errors of float32 torch operations."""
    cut = GridCut(cut.shape, cut.gamma, cut.reach, cut.anchor)
    cut.use_matmul()
    pairs = zip(solve(cut, w, g), expected(cut, w, g), strict=True)
    return [((a - b).abs().max() / b.abs().max()).item() for a, b in pairs]


@needs_kernels
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("offset", [1e2, 1e4])
def test_large_constants(shape, offset):
    """A constant takes digits from what remains. The kernels lose no more than float32 operations."""
    cut, w, g = GridCut(shape).to(DEVICE), weights(shape), torch.randn(2, *shape) + offset
    w[:, SINK] += offset
    limits = [2 * error + 1e-6 for error in plain_errors(cut, w, g)]
    assert all(error < limit for error, limit in zip(errors(cut, w, g), limits, strict=True))


@needs_kernels
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_powers_of_two_are_exact(shape):
    """Scales from 1e-30 to 1e30 change the exponents only."""
    cut, w, g = GridCut(shape).to(DEVICE), weights(shape).to(DEVICE), torch.randn(2, *shape).to(DEVICE)
    p, grad = solve(cut, w, g)
    for power in (2.0**-100, 2.0**100):
        scaled = solve(cut, w * power, g * power)
        assert torch.equal(scaled[0], p * power) and torch.equal(scaled[1], grad * power)


@needs_kernels
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_extreme_values(shape):
    """Zeros, subnormal numbers and large numbers stay in their own cut.

    The batch to compare with has the same size: torch adds up the pixels of a gradient in an order that depends on it.
    """
    cut, w, g = GridCut(shape).to(DEVICE), weights(shape, 4), torch.randn(4, *shape)
    p_before, grad_before = solve(cut, w.to(DEVICE), g.to(DEVICE))
    for x in (w, g):
        x[0] = 0
        x[1] *= 1e-42
        x[2] *= 1e34
    p, grad = solve(cut, w.to(DEVICE), g.to(DEVICE))
    assert not p[0].any() and not grad[0].any()
    assert p[1].abs().max() < 1e-40 and grad[1].abs().max() < 1e-40
    assert p.isfinite().all() and grad.isfinite().all()
    assert torch.equal(p[3], p_before[3]) and torch.equal(grad[3], grad_before[3])


@needs_kernels
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, under the interpreter
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("bad, channel", [(float("nan"), RIGHT), (float("inf"), SOURCE), (-float("inf"), UP)])
def test_nan_and_infinity_spread_over_their_cut(shape, bad, channel):
    cut, w, g = GridCut(shape).to(DEVICE), weights(shape, 3).to(DEVICE), torch.randn(3, *shape).to(DEVICE)
    p, grad = solve(cut, w, g)
    w[1, channel, 3, 4] = bad
    g[1, 2, 1] = bad
    spread, spread_grad = solve(cut, w, g)
    assert spread[1].isnan().all() and spread_grad[1, SOURCE:].isnan().all()
    assert spread_grad[1, RIGHT, :5, :5].isnan().any()
    others = [0, 2]
    assert torch.equal(spread[others], p[others]) and torch.equal(spread_grad[others], grad[others])


@needs_kernels
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_weights_of_edges_that_leave_the_grid_are_ignored(shape):
    cut, w = GridCut(shape).to(DEVICE), weights(shape).to(DEVICE)
    before = cut(w)
    w[:, RIGHT, :, -1], w[:, LEFT, :, 0], w[:, DOWN, -1], w[:, UP, 0] = (float("nan"),) * 4
    assert torch.equal(cut(w), before)
    _, grad = solve(cut, w, torch.randn(2, *shape).to(DEVICE))
    for outside in (grad[:, RIGHT, :, -1], grad[:, LEFT, :, 0], grad[:, DOWN, -1], grad[:, UP, 0]):
        assert not outside.any()


@needs_kernels
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_batches(shape):
    """Any leading dimensions, none, an empty batch, strides, vmap."""
    cut, w = GridCut(shape).to(DEVICE), weights(shape, 4).to(DEVICE)
    p = cut(w)
    assert torch.equal(cut(w.reshape(2, 2, 6, *shape)), p.reshape(2, 2, *shape))
    assert torch.equal(cut(w[0]), p[0]) and cut(w[:0]).shape == (0, *shape)
    assert torch.equal(cut(w.movedim(1, -1).contiguous().movedim(-1, 1)), p)
    assert torch.equal(torch.vmap(cut, in_dims=1, out_dims=1)(w.reshape(2, 2, 6, *shape)).flatten(0, 1), p)
    none = w[:0].clone().requires_grad_()
    assert torch.autograd.grad(cut(none).sum(), none)[0].shape == none.shape


@needs_kernels
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_second_derivatives(shape):
    """The gradient of |p|^2 / 2 is A'A w; its derivative along v is A'A v."""
    cut, w, v = GridCut(shape).to(DEVICE), weights(shape).to(DEVICE), weights(shape).to(DEVICE)
    w.requires_grad_()
    (grad,) = torch.autograd.grad(cut(w).square().sum() / 2, w, create_graph=True)
    (second,) = torch.autograd.grad(grad, w, v)
    _, reference = expected(cut, v, solve(GridCut(shape).double(), v.cpu().double(), torch.ones(2, *shape).double())[0])
    assert (second.cpu() - reference).abs().max() < 2e-6 * reference.abs().max()


@needs_kernels
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_tables_survive_conversions(shape):
    """`.float()` of a float32 layer and `.to(memory_format=...)` convert buffers without computing them again."""
    cut, w = GridCut(shape).to(DEVICE), weights(shape).to(DEVICE)
    p = cut(w)
    channels_last = lambda layer: layer.to(memory_format=torch.channels_last)
    for convert in (channels_last, torch.nn.Module.float, torch.nn.Module.half, lambda layer: layer.double().float()):
        assert torch.equal(convert(cut)(w), p)
    assert not cut.state_dict()


@pytest.mark.skipif(kernels is None, reason="needs Triton")
def test_reach_decides_on_tiles():
    """A margin of 12 pixels covers the paper's reach, 0.707, and hardly more."""
    for reach, fits in ((None, True), (0.1, True), (0.71, True), (0.72, False), (5.0, False)):
        assert kernels.fits_tiles((52, 1000), GridCut((52, 80), reach=reach).decay) is fits
    assert not kernels.fits_tiles((51, 1000), 0.1)


@needs_cuda
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_compiled(shape):
    cut, w, g = GridCut(shape).cuda(), weights(shape).cuda(), torch.randn(2, *shape).cuda()
    for found, eager in zip(solve(torch.compile(cut), w, g), solve(cut, w, g), strict=True):
        torch.testing.assert_close(found, eager, rtol=0, atol=1e-6 * eager.abs().max().item())


@needs_cuda
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_cuda_graphs(shape):
    cut, w, g = GridCut(shape).cuda(), weights(shape).cuda(), torch.randn(2, *shape).cuda()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        solve(cut, w, g)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = solve(cut, w, g)
    w.copy_(weights(shape))
    graph.replay()
    assert all(map(torch.equal, captured, solve(cut, w, g)))


@pytest.mark.skipif(
    find_spec("triton") is None or INTERPRETED or torch.cuda.is_available(), reason="needs Triton and no CUDA device"
)
def test_under_the_interpreter():
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", __file__]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:]
