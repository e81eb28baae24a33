import numpy as np
import pytest
import torch
from scipy.fft import dctn, idctn

from cutslots.programs import dct, grid_cut
from cutslots.programs.dct import FFTDCT, MatmulDCT, dct_matrix, reorder, restore_order
from tests.conftest import DEVICES

SHAPES = [(1, 1), (1, 7), (5, 7), (16, 16), (33, 18), (4, 6, 5), (1, 3, 2)]
CPU = torch.device("cpu")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("transform", [MatmulDCT, FFTDCT])
def test_filter_equals_scipy(transform, shape, device, rng):
    q, spectrum = rng.standard_normal((2, 3, *shape)), rng.standard_normal(shape)
    axes = tuple(range(-len(shape), 0))
    expected = idctn(spectrum * dctn(q, norm="ortho", axes=axes), norm="ortho", axes=axes)
    layer = transform(shape, torch.device(device), torch.float64)
    filtered = layer.filter(torch.tensor(q, device=device), torch.tensor(spectrum, device=device))
    assert np.abs(filtered.cpu().numpy() - expected).max() < 1e-12


@pytest.mark.parametrize("n", [1, 2, 7, 16])
def test_dct_matrix_is_orthonormal(n):
    assert torch.allclose(dct_matrix(n) @ dct_matrix(n).T, torch.eye(n, dtype=torch.float64), atol=1e-14)


@pytest.mark.parametrize("n", [1, 2, 7, 8])
def test_restore_order_inverts_reorder(n):
    x = torch.randn(3, n, 4)
    assert torch.equal(restore_order(reorder(x, -2), -2), x)
    assert reorder(torch.arange(7), -1).tolist() == [0, 2, 4, 6, 5, 3, 1]


def test_use_fft_depends_on_the_longest_side_and_the_device():
    assert not dct.use_fft((384, 2), CPU) and dct.use_fft((2, 385), CPU)
    assert not dct.use_fft((192, 192), torch.device("cuda")) and dct.use_fft((193, 8), torch.device("cuda"))
    assert dct.use_fft((193, 8), torch.device("xpu")), "an unknown device counts as an accelerator"


@pytest.mark.parametrize("shape, expected", [((8, 384), MatmulDCT), ((8, 385), FFTDCT), ((385, 2, 2), FFTDCT)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_grid_cut_chooses_its_transform(shape, expected, dtype):
    cut = grid_cut.GridCut(shape).to(dtype)
    assert type(cut._dct) is expected and type(cut._operators) is grid_cut.GridOperators


@pytest.mark.parametrize("transform", [MatmulDCT, FFTDCT])
def test_tables_are_not_in_the_state_dict(transform):
    layer = transform((4, 6), CPU, torch.float32)
    assert not layer.state_dict() and len(list(layer.buffers())) == 2
    assert all(buffer.dtype == torch.float32 for buffer in layer.buffers())
