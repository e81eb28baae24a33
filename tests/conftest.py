"""What several test modules share: the literal program solved by scipy, the judge of every fast layer; what to do
where a test lacks something."""

from __future__ import annotations

import os
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from scipy import sparse
from scipy.sparse.linalg import splu

from cutslots.graph import Program

torch.set_num_threads(1)  # the suite runs in several processes


def solve_literal(program: Program, c: np.ndarray, gamma: float | np.ndarray) -> np.ndarray:
    """z (..., variables) of the program for objectives c (..., variables), by a sparse LU of the whole KKT system."""
    m, n = program.A.shape
    G = sparse.diags_array(np.broadcast_to(np.asarray(gamma, dtype=float), (n,)))
    kkt = sparse.csc_matrix(sparse.block_array([[G, program.A.T], [program.A, None]]))
    flat = c.reshape(-1, n)
    rhs = np.concatenate([-flat, np.broadcast_to(program.b, (len(flat), m))], axis=1)
    return splu(kkt).solve(rhs.T)[:n].T.reshape(c.shape)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def need(there: object, missing: str) -> None:
    """Skips a test for what is missing; where CUTSLOTS_REQUIRE_BROWSER is 1, as in .ci/run, fails it instead."""
    if not there and os.environ.get("CUTSLOTS_REQUIRE_BROWSER") == "1":
        pytest.fail(f"{missing}. CUTSLOTS_REQUIRE_BROWSER is 1, so this test may not be skipped", pytrace=False)
    if not there:
        pytest.skip(missing)


@pytest.fixture(scope="session")
def gradio() -> None:
    need(find_spec("gradio"), "there is no Gradio: pip install 'cutslots[app]'")


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=needs_cuda)]
