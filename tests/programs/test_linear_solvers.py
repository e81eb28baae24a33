"""Sparse solvers in code that inductor compiles, in programs that another process loads, and after their layer.

tests/contracts compiles and exports every layer.
"""

import copy
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import sparse

import cutslots
from cutslots import EqualityQP, GraphCut
from cutslots.programs import linear_solvers

PACKAGE = str(Path(cutslots.__file__).parents[1])
EDGES = np.random.default_rng(0).integers(0, 5, (7, 2))
A = np.random.default_rng(0).standard_normal((3, 6)) + 3 * np.eye(3, 6)
CASES = {
    "GraphCut": lambda: (GraphCut(EDGES, 5, solver="cholesky"), (17,)),
    "EqualityQP": lambda: (EqualityQP(sparse.csr_array(A), [1.0, 2.0, 3.0]), (6,)),
}


@pytest.fixture(autouse=True)
def nothing_compiled():
    torch.compiler.reset()  # dynamo counts recompilations of a module's code over all its layers


@pytest.mark.parametrize("name", CASES)
def test_compiled_by_inductor(name):
    layer, shape = CASES[name]()
    x = torch.randn(3, *shape, requires_grad=True)
    compiled = torch.compile(layer, fullgraph=True)
    torch.testing.assert_close(compiled(x), layer(x), rtol=0, atol=1e-5)
    one, other = (torch.autograd.grad(f(x).square().sum(), x)[0] for f in (compiled, layer))
    torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


def test_solvers_are_released_with_their_layer():
    before = len(linear_solvers._SOLVERS)
    cut = GraphCut(EDGES, 5, solver="cholesky")
    twin = copy.deepcopy(cut)
    assert len(linear_solvers._SOLVERS) == before + 2
    del cut, twin
    assert len(linear_solvers._SOLVERS) == before


def test_exported_program_runs_in_another_process(tmp_path):
    layer, shape = CASES["GraphCut"]()
    x = torch.randn(2, *shape)
    torch.export.save(torch.export.export(layer, (x,)), tmp_path / "cut.pt2")
    torch.save(x, tmp_path / "x.pt")
    script = (
        "import sys, torch, cutslots.programs.linear_solvers\n"
        "folder = sys.argv[1]\n"
        "p = torch.export.load(folder + '/cut.pt2').module()(torch.load(folder + '/x.pt'))\n"
        "torch.save(p, folder + '/p.pt')\n"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True, env=os.environ | {"PYTHONPATH": PACKAGE})
    torch.testing.assert_close(torch.load(tmp_path / "p.pt"), layer(x), rtol=0, atol=1e-6)
