"""Coarse to fine: the coarse problem by its definition, and the same solutions as from zero."""

import numpy as np
import pytest
import torch
from skimage import data

from cutslots.models.refinement import edge_capacities
from cutslots.programs import min_cut_grids
from cutslots.programs.min_cut import MinCut
from cutslots.programs.min_cut_grids import coarsen, refine_flow, solve_pyramid
from cutslots.programs.min_cut_solver import FIRST_CHECK, GridEdges, solve, solve_grids_compiled


def smooth_problem(height, width, batch=1, seed=0, dtype=torch.float64):
    """Weights with large regions: random capacities, and terminals that agree over blocks."""
    rng = np.random.default_rng(seed)
    w = rng.uniform(0, 3, (batch, 6, height, width))
    blocks = rng.normal(0, 1, (batch, height // 12 + 1, width // 12 + 1))
    blocks = blocks.repeat(12, 1).repeat(12, 2)[:, :height, :width]
    w[:, 4], w[:, 5] = blocks + rng.normal(0, 0.5, blocks.shape), 0
    return torch.tensor(w, dtype=dtype)


def energy(w, p):
    """The value of the problem at p (H, W), in loops."""
    right, left, down, up, source, sink = w.tolist()
    H, W = p.shape
    total = 0.0
    for i in range(H):
        for j in range(W):
            total += (float(p[i, j]) - (source[i][j] - sink[i][j])) ** 2 / 2 - (source[i][j] - sink[i][j]) ** 2 / 2
            if j + 1 < W:
                d = float(p[i, j] - p[i, j + 1])
                total += max(d, 0) * right[i][j] + max(-d, 0) * left[i][j + 1]
            if i + 1 < H:
                d = float(p[i, j] - p[i + 1, j])
                total += max(d, 0) * down[i][j] + max(-d, 0) * up[i + 1][j]
    return total


@pytest.mark.parametrize("seed", range(3))
def test_the_coarse_problem_is_a_quarter_of_the_fine_one_on_blocks(seed):
    w = torch.tensor(np.random.default_rng(seed).uniform(0, 2, (1, 6, 6, 8)))
    p = torch.tensor(np.random.default_rng(seed + 10).normal(size=(3, 4)))
    fine = p.repeat_interleave(2, 0).repeat_interleave(2, 1)
    assert energy(coarsen(w)[0], p) == pytest.approx(energy(w[0], fine) / 4)


def test_the_flow_has_the_divergence_of_the_block_in_every_pixel():
    y = torch.randn(2, 2, 3, 4, dtype=torch.float64)
    y[:, 0, :, -1], y[:, 1, -1] = 0, 0
    coarse = GridEdges((3, 4), y.device).divergence(y.flatten(1)).view(2, 3, 4)
    flow = refine_flow(y.flatten(1), torch.zeros(2, 6, 6, 8))
    fine = GridEdges((6, 8), y.device).divergence(flow).view(2, 6, 8)
    expected = coarse.repeat_interleave(2, 1).repeat_interleave(2, 2)
    torch.testing.assert_close(fine, expected)


@pytest.mark.parametrize("shape", [(1, 1), (1, 90), (33, 33), (70, 45), (64, 128), (101, 67)])
@pytest.mark.parametrize("compiled", [True, False])
def test_the_solution_is_that_of_the_layer(shape, compiled, monkeypatch):
    if not compiled:
        monkeypatch.setattr(min_cut_grids, "solve_grids_compiled", lambda *_: None)
    w = smooth_problem(*shape, batch=2)
    found = solve_pyramid(w, 1e-9, 20_000)
    expected = MinCut(shape, tolerance=1e-9, max_iterations=20_000).double()(w)
    assert found.gap.max() <= 1e-9
    torch.testing.assert_close(found.q.view_as(expected), expected, atol=1e-4, rtol=0)


def test_a_photograph_takes_fewer_iterations():
    """Of white noise the coarse problem says nothing; neighbors in a photograph are alike."""
    image = torch.tensor(data.astronaut()[:300, :300] / 255.0, dtype=torch.float32).permute(2, 0, 1)[None]
    w = edge_capacities(image, 10.0, 0.05)
    w[:, 4] = 4 * (image[:, 0] - image[:, 0].mean())
    direct = MinCut((300, 300), tolerance=1e-3).solve(w)
    found = solve_pyramid(w, 1e-3, 2_000)
    assert found.gap.max() <= 1e-3
    assert found.iterations.max() < 0.7 * direct.iterations.max()


def test_an_initial_flow_that_is_the_solution_is_done_at_the_first_check():
    w = smooth_problem(20, 30)
    edges = GridEdges((20, 30), w.device)
    lo, hi = edges.bounds(w)
    c = (w[:, 4] - w[:, 5]).flatten(1)
    first = solve(edges, lo, hi, c, 1 / 8, 1e-6, 10_000)
    before = first.y.clone()
    for again in (
        solve(edges, lo, hi, c, 1 / 8, 1e-6, 10_000, first.y),
        solve_grids_compiled(w, 1e-6, 10_000, first.y),
    ):
        if again is not None:
            assert again.iterations.max() == FIRST_CHECK
    assert torch.equal(first.y, before)
