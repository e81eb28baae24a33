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
    operators = grid_cut.NativeOperators if shape == (8, 384) else grid_cut.GridOperators
    assert type(cut._dct) is expected and type(cut._operators) is operators


@pytest.mark.parametrize("transform", [MatmulDCT, FFTDCT])
def test_tables_are_not_in_the_state_dict(transform):
    layer = transform((4, 6), CPU, torch.float32)
    assert not layer.state_dict() and len(list(layer.buffers())) == 2
    assert all(buffer.dtype == torch.float32 for buffer in layer.buffers())


@pytest.mark.parametrize("transform", [MatmulDCT, FFTDCT])
def test_tables_have_the_device_and_precision_of_the_layer(transform):
    layer = transform((4, 6, 5), torch.device("meta"), torch.float64)
    assert [buffer.dtype for buffer in layer.buffers()] == [torch.float64] * 3
    assert all(buffer.is_meta for buffer in layer.buffers())
    assert repr(layer) == f"{transform.__name__}((4, 6, 5))"


def test_dct_by_hand():
    """Of two samples: the mean and the difference, orthonormal. Modes are rows."""
    root = 0.5**0.5
    torch.testing.assert_close(dct_matrix(2), torch.tensor([[root, root], [root, -root]], dtype=torch.float64))
    assert dct_matrix(1).tolist() == [[1.0]] and dct_matrix(3).dtype == torch.float64
    layer = MatmulDCT((2, 3), CPU, torch.float64)
    assert torch.equal(layer.matrix(-1), dct_matrix(3)) and torch.equal(layer.matrix(-2), dct_matrix(2))


def test_phases_by_hand():
    """exp(-i pi k / 2n)"""
    expected = torch.tensor([1, np.exp(-0.25j * np.pi)], dtype=torch.complex128)
    torch.testing.assert_close(dct.dct_phases(2), expected)
    torch.testing.assert_close(FFTDCT((3, 2), CPU, torch.float64).phases(-1), expected)


def test_tables_are_computed_on_the_cpu():
    """Also where another device is the default: a layer built on the meta device is moved later."""
    with torch.device("meta"):
        assert dct_matrix(3).device.type == dct.dct_phases(3).device.type == "cpu"


def test_empty_batches():
    for transform in (MatmulDCT, FFTDCT):
        layer, spectrum = transform((3, 4), CPU, torch.float32), torch.ones(3, 4)
        assert layer.filter(torch.zeros(0, 3, 4), spectrum).shape == (0, 3, 4)


@pytest.mark.parametrize("transform", [MatmulDCT, FFTDCT])
@pytest.mark.parametrize("shape", [(3, 4), (5, 4), (2, 3, 5)], ids=str)
def test_one_mode_passes(transform, shape):
    """A spectrum that is 1 at one mode projects onto its cosine, in any batch."""
    spectrum = torch.zeros(shape, dtype=torch.float64)
    spectrum[(1,) * len(shape)] = 1
    mode = torch.ones((), dtype=torch.float64)
    for n in shape:
        mode = mode[..., None] * dct_matrix(n)[1]
    q = torch.randn(2, 3, *shape, dtype=torch.float64)
    expected = (q * mode).sum(tuple(range(-len(shape), 0)), keepdim=True) * mode
    filtered = transform(shape, CPU, torch.float64).filter(q, spectrum)
    torch.testing.assert_close(filtered, expected)
