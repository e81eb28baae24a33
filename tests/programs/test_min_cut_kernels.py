"""The CUDA kernels of MinCut, against the compiled code of the CPU and the torch operations."""

from __future__ import annotations

import pytest
import torch

from cutslots import MinCut
from cutslots.programs import min_cut_grids
from cutslots.programs.min_cut_grids import solve_grids, solve_pyramid
from cutslots.programs.min_cut_solver import grid_problem, solve
from tests.conftest import needs_cuda

pytestmark = needs_cuda
SMALL = [(1, 1), (1, 9), (16, 16), (33, 20), (64, 64), (50, 128), (128, 128)]
LARGE = [(129, 1), (2, 300), (130, 140), (256, 256), (301, 200)]


def problem(*size: int, scale: float = 0.5) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(size))
    w = torch.rand(size[0], 6, *size[1:], generator=generator)
    w[:, :4] *= scale
    return w


def same(found, expected, atol=2e-4):
    torch.testing.assert_close(found.q.cpu(), expected.q, atol=atol, rtol=0)


@pytest.mark.parametrize("shape", SMALL + LARGE, ids=str)
@pytest.mark.parametrize("scale", [0.05, 0.5, 3.0])
def test_kernels_solve_what_the_cpu_solves(shape, scale):
    w = problem(3, *shape, scale=scale)
    found, expected = solve_grids(w.cuda(), 1e-6, 20_000), solve_grids(w.double(), 1e-9, 50_000)
    assert found.gap.max() <= 1e-6
    same(found, expected._replace(q=expected.q.float()), 2e-3 * scale)
    value = torch.linalg.vector_norm(expected.q)
    assert torch.linalg.vector_norm(found.q.cpu() - expected.q) <= 2e-3 * value


def test_many_images_of_a_medium_size():
    """They are solved in tiles, few in one program each."""
    w = problem(64, 100, 70)
    found, expected = solve_grids(w.cuda(), 1e-6, 20_000), solve_grids(w[:8].double(), 1e-9, 50_000)
    few = solve_grids(w[:8].cuda(), 1e-6, 20_000)
    for q in (found.q[:8], few.q):
        torch.testing.assert_close(q.cpu(), expected.q.float(), atol=1e-3, rtol=0)
    assert found.gap.max() <= 1e-6 and len(found.iterations.unique()) == 1


@pytest.mark.parametrize("shape", SMALL + LARGE, ids=str)
def test_gaps_and_regions_are_those_of_the_torch_operations(shape):
    """The kernels' y, regions and gap satisfy the definitions, restated by the operations for any device."""
    w = problem(2, *shape).cuda()
    found = solve_grids(w, 1e-5, 20_000)
    edges, lo, hi, c = grid_problem(w)
    assert bool(((lo <= found.y) & (found.y <= hi)).all())
    u, v = edges.ends
    joined, regions = (lo < found.y) & (found.y < hi), found.regions.long()
    assert bool((regions[:, u] == regions[:, v])[joined].all())
    again = solve(edges, lo, hi, c, 0.125, 1e-5, 1, initial=found.y)
    assert again.gap.max() <= 2e-5


@pytest.mark.parametrize("shape", [(20, 30), (150, 140)], ids=str)
def test_gradients_are_those_of_the_cpu(shape):
    w = problem(2, *shape)
    layer = MinCut(shape, tolerance=1e-7, max_iterations=50_000)
    grad = torch.randn(2, *shape, generator=torch.Generator().manual_seed(1))
    grads = []
    for device in ("cpu", "cuda"):
        leaf = w.to(device, copy=True).requires_grad_()
        layer.to(device)(leaf).backward(grad.to(device))
        grads.append(leaf.grad.cpu())
    close = (grads[0] - grads[1]).abs() <= 1e-3
    assert close.float().mean() > 0.999  # ties may fall to either side


@pytest.mark.parametrize("shape", [(12, 10), (140, 135)], ids=str)
def test_infinite_and_zero_capacities(shape):
    w = problem(2, *shape)
    w[:, 0, :, ::3], w[:, 3, ::4], w[:, 2, :, ::5] = torch.inf, torch.inf, 0
    found, expected = solve_grids(w.cuda(), 1e-5, 30_000), solve_grids(w.double(), 1e-9, 100_000)
    same(found, expected._replace(q=expected.q.float()), 5e-3)


def test_an_empty_batch():
    found = MinCut((8, 8)).cuda().solve(torch.rand(0, 6, 8, 8, device="cuda"))
    assert found.p.shape == (0, 8, 8) and found.gap.shape == (0,)
    assert MinCut((150, 8)).cuda()(torch.rand(0, 6, 150, 8, device="cuda")).shape == (0, 150, 8)


@pytest.mark.parametrize("shape", [(40, 40), (150, 150)], ids=str)
@pytest.mark.parametrize("limit", [1, 7, 33])
def test_iterations_stop_at_the_limit(shape, limit):
    found = solve_grids(problem(2, *shape, scale=3).cuda(), 1e-9, limit)
    assert found.iterations.tolist() == [limit, limit]


def test_a_pyramid_solves_the_same():
    """The problem is strongly convex: half the squared distance to the solution is at most the duality gap."""
    w = problem(2, 200, 180)
    found, expected = solve_pyramid(w.cuda(), 1e-6, 20_000), solve_grids(w.double(), 1e-10, 50_000)
    assert found.gap.max() <= 1e-6
    same(found, expected._replace(q=expected.q.float()), 1e-3)
    edges, lo, hi, c = grid_problem(w.double())
    q = expected.q
    differences = edges.differences(q)
    value = ((q - c) ** 2 / 2).sum(1) + (hi * differences.clamp(min=0) + lo * differences.clamp(max=0)).sum(1)
    distance = (found.q.cpu() - q).square().sum(1) / 2
    assert (distance <= 1.01e-6 * value).all()


def test_kernels_are_in_use():
    assert min_cut_grids.kernels is not None and min_cut_grids.kernels.solves(problem(1, 4, 4).cuda())
