"""`MinCut` against prox_tv, the library that torch-submod calls: total variation with equal capacities both ways.

prox_tv.json holds solutions of prox_tv, so that the tests need no package that has to be compiled. Where prox_tv is
installed, larger random problems are compared too.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from cutslots import MinCut

PROBLEMS = json.loads(Path(__file__).with_name("prox_tv.json").read_text())["problems"]


def solve(f, right, down):
    w = np.zeros((6, *f.shape))
    w[0, :, :-1], w[1, :, 1:], w[2, :-1], w[3, 1:] = right, right, down, down
    w[4], w[5] = np.maximum(f, 0), np.maximum(-f, 0)
    return MinCut(f.shape, tolerance=1e-13, max_iterations=10**6).double()(torch.as_tensor(w)).numpy()


@pytest.mark.parametrize("problem", PROBLEMS, ids=[problem["kind"] for problem in PROBLEMS])
def test_equal_to_recorded_solutions_of_prox_tv(problem):
    f, right, down, expected = (np.array(problem[name]) for name in ("f", "right", "down", "p"))
    np.testing.assert_allclose(solve(f, right, down), expected, atol=1e-9)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("strength", [0.1, 0.5, 2.0])
def test_equal_to_prox_tv(strength, seed):
    prox_tv = pytest.importorskip("prox_tv")
    rng = np.random.default_rng(seed)
    height, width = rng.integers(2, 40, 2)
    f = rng.standard_normal((height, width))
    right, down = strength * rng.random((height, width - 1)), strength * rng.random((height - 1, width))
    expected = prox_tv.tv1w_2d(f, down, right, max_iters=20_000)
    np.testing.assert_allclose(solve(f, right, down), expected, atol=1e-6)
