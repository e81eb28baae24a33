"""Every layer under PyTorch's transforms: forward mode, torch.func, vmap, compile, export."""

import copy
import io
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from scipy import sparse
from torch import nn
from torch.autograd import forward_ad, gradcheck, gradgradcheck

import cutslots
from cutslots import EqualityQP, GraphCut, GridCut, Matching, match_slots
from cutslots.programs import dct

PACKAGE = str(Path(cutslots.__file__).parents[1])
EDGES = np.random.default_rng(0).integers(0, 5, (7, 2))
A = np.random.default_rng(0).standard_normal((3, 6)) + 3 * np.eye(3, 6)


class MatchSlots(nn.Module):
    def forward(self, x):
        return match_slots(x[..., :3, :], x[..., 3:, :]).slots


class Case(NamedTuple):
    layer: nn.Module
    shape: tuple[int, ...]


CASES = {
    "GridCut": lambda: Case(GridCut((3, 4)), (6, 3, 4)),
    "GridCut of a clip": lambda: Case(GridCut((2, 3, 2), reach=2.0), (8, 2, 3, 2)),
    "GridCut by FFT": lambda: Case(GridCut((2, 400)), (6, 2, 400)),
    "GraphCut": lambda: Case(GraphCut(EDGES, 5, solver="cholesky"), (17,)),
    "GraphCut, inverse": lambda: Case(GraphCut(EDGES, 5, solver="inverse"), (17,)),
    "GraphCut, cg": lambda: Case(GraphCut(EDGES, 5, solver="cg", tolerance=1e-14), (17,)),
    "EqualityQP": lambda: Case(EqualityQP(A, [1.0, 2.0, 3.0]), (6,)),
    "EqualityQP, sparse": lambda: Case(EqualityQP(sparse.csr_array(A), [1.0, 2.0, 3.0]), (6,)),
    "Matching": lambda: Case(Matching(3, 4), (3, 4)),
    "match_slots": lambda: Case(MatchSlots(), (7, 2)),
}
SMALL = [name for name in CASES if name != "GridCut by FFT"]


@pytest.fixture(autouse=True)
def nothing_compiled():
    torch.compiler.reset()  # dynamo counts recompilations of a module's code over all its layers


@pytest.fixture(params=CASES)
def case(request):
    """A layer in float64 and the shape of one input."""
    layer, shape = CASES[request.param]()
    return Case(layer.double(), shape)


@pytest.fixture(params=SMALL)
def small(request):
    layer, shape = CASES[request.param]()
    return Case(layer.double(), shape)


def test_derivatives_in_forward_mode(small):
    layer, shape = small
    x = torch.randn(2, *shape, dtype=torch.float64, requires_grad=True)
    assert gradcheck(layer, x, check_forward_ad=True)
    nonlinear = lambda x: layer(x.square()).square()
    assert gradgradcheck(nonlinear, x, check_fwd_over_rev=True)


def test_solutions_have_derivatives_in_forward_mode():
    w = torch.randn(2, 17, dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda w: tuple(GraphCut(EDGES, 5).double().solve(w)), w, check_forward_ad=True)
    c, b = (torch.randn(2, n, dtype=torch.float64, requires_grad=True) for n in (6, 3))
    assert gradcheck(lambda *cb: tuple(EqualityQP(A, [0.0] * 3).double().solve(*cb)), (c, b), check_forward_ad=True)


def test_forward_mode_by_fft(monkeypatch):
    monkeypatch.setitem(dct.MAX_DCT_MATMUL_SIZE, "cpu", 0)
    x = torch.randn(6, 3, 4, dtype=torch.float64, requires_grad=True)
    assert gradcheck(GridCut((3, 4)).double(), x, check_forward_ad=True)


def test_jvp_of_a_linear_layer_is_the_layer(case):
    layer, shape = case
    x, v = torch.randn(2, 3, *shape, dtype=torch.float64)
    out, tangent = torch.func.jvp(layer, (x,), (v,))
    torch.testing.assert_close(out, layer(x))
    if not isinstance(layer, MatchSlots):
        torch.testing.assert_close(tangent, layer(v) - layer(torch.zeros_like(v)), rtol=0, atol=1e-12)
    with forward_ad.dual_level():
        dual = forward_ad.unpack_dual(layer(forward_ad.make_dual(x, v)))
    torch.testing.assert_close(dual.tangent, tangent)


def test_jacobians_agree(small):
    layer, shape = small
    x = torch.randn(*shape, dtype=torch.float64)
    forward, reverse = torch.func.jacfwd(layer)(x), torch.func.jacrev(layer)(x)
    torch.testing.assert_close(forward, reverse, rtol=0, atol=1e-12)
    torch.testing.assert_close(torch.autograd.functional.jacobian(layer, x), forward, rtol=0, atol=1e-12)


def test_hessian_of_a_nonlinear_function(small):
    layer, shape = small
    x = torch.randn(*shape, dtype=torch.float64)
    loss = lambda x: layer(x.sin()).pow(3).sum()
    expected = torch.autograd.functional.hessian(loss, x)  # reverse over reverse
    torch.testing.assert_close(torch.func.hessian(loss)(x), expected)
    torch.testing.assert_close(torch.func.jacrev(torch.func.jacfwd(loss))(x), expected)


def test_vmap_equals_a_loop(case):
    layer, shape = case
    x = torch.randn(*shape, 4, 2, dtype=torch.float64)
    loop = torch.stack([torch.stack([layer(x[..., i, j]) for j in range(2)]) for i in range(4)])
    nested = torch.func.vmap(torch.func.vmap(layer, in_dims=-1), in_dims=-2)
    torch.testing.assert_close(nested(x), loop, rtol=0, atol=1e-12)
    grads = torch.func.vmap(torch.func.grad(lambda x: layer(x).square().sum()), in_dims=-1)(x[..., 0, :])
    one = x[..., 0, 1].clone().requires_grad_()
    torch.testing.assert_close(grads[1], torch.autograd.grad(layer(one).square().sum(), one)[0], rtol=0, atol=1e-12)


def test_compiled_in_one_graph(case):
    layer, shape = case
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for batch in ((3,), (5,), (2, 2), (0,)):
        x = torch.randn(*batch, *shape, dtype=torch.float64, requires_grad=True)
        torch.testing.assert_close(compiled(x), layer(x), rtol=0, atol=1e-12)
        one, other = (torch.autograd.grad(f(x).square().sum(), x)[0] for f in (compiled, layer))
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["GraphCut", "EqualityQP, sparse"])
def test_compiled_by_inductor(name):
    layer, shape = CASES[name]()
    x = torch.randn(3, *shape, requires_grad=True)
    compiled = torch.compile(layer, fullgraph=True)
    torch.testing.assert_close(compiled(x), layer(x), rtol=0, atol=1e-5)
    one, other = (torch.autograd.grad(f(x).square().sum(), x)[0] for f in (compiled, layer))
    torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


@pytest.mark.parametrize("strict", [False, True])
def test_exported_program_equals_the_layer(case, strict):
    layer, shape = case
    x = torch.randn(3, *shape, dtype=torch.float64)
    batch = torch.export.Dim("batch", min=2, max=64)
    program = torch.export.export(layer, (x,), dynamic_shapes=({0: batch},), strict=strict)
    saved = io.BytesIO()
    torch.export.save(program, saved)
    saved.seek(0)
    loaded = torch.export.load(saved).module()
    y = torch.randn(5, *shape, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(loaded(y), layer(y), rtol=0, atol=1e-12)
    one, other = (torch.autograd.grad(f(y).square().sum(), y)[0] for f in (loaded, layer))
    torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["GraphCut", "GraphCut, cg", "EqualityQP, sparse"])
def test_ops_meet_the_contract_of_custom_ops(name):
    layer, _ = CASES[name]()
    layer = layer.double()
    solver, matrix = (layer._operators.solver, layer._operators.B) if "Graph" in name else (layer._solver, layer.A)
    ops = torch.ops.cutslots
    rows, columns = (len(csr.crow) - 1 for csr in (matrix.csr, matrix.transposed))
    rhs = torch.randn(len(solver.csr.crow) - 1, 2, dtype=torch.float64, requires_grad=True)
    torch.library.opcheck(ops.spd_solve.default, (rhs, *solver.csr, solver.tolerance))
    x = torch.randn(columns, 2, dtype=torch.float64, requires_grad=True)
    arguments = (*matrix.csr, *matrix.transposed)
    torch.library.opcheck(ops.csr_matmul.default, (x, *arguments))
    assert gradgradcheck(lambda x: ops.csr_matmul(x, *arguments).square(), x)
    assert gradgradcheck(lambda x: ops.spd_solve(x, *solver.csr, solver.tolerance).square(), rhs)
    batch = torch.randn(columns, 3, 2, dtype=torch.float64)
    looped = torch.stack([ops.csr_matmul(batch[:, i], *arguments) for i in range(3)])
    torch.testing.assert_close(torch.vmap(lambda x: ops.csr_matmul(x, *arguments), 1)(batch), looped)
    assert looped.shape == (3, rows, 2)


def test_solvers_are_released_with_their_layer():
    from cutslots.programs import linear_solvers

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
