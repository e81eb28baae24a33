"""The Triton kernels of the decoder head and of mixing against float64 on the CPU.

Where there is Triton but no GPU, the last test runs this file under Triton's interpreter.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch

from cutslots.modules import decoder_head, mixing

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton") is not None
DEVICE = "cpu" if INTERPRETED else "cuda"
needs_kernels = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(), reason="needs a CUDA device or Triton's interpreter"
)
DTYPES = [torch.float16] if INTERPRETED else [torch.float16, torch.bfloat16]  # numpy has no bfloat16
SIZES = [(2, 16, 16, 16), (3, 32, 16, 64)]
CUDA_SIZES = [] if INTERPRETED else [(5, 64, 128, 128), (2, 128, 32, 64), (1, 256, 16, 32), (1, 32, 16, 512)]
LAUNCHES = {
    "a program crosses images": {"columns": 64, "steps": 3},
    "a program has several parts of a row": {"columns": 16, "steps": 5},
    "a program has half of the channels": {"columns": 16, "steps": 100, "channels": 32},
    "a product has fewer rows than a warp group": {"columns": 32, "steps": 7},
}


def randn(*shape, dtype=torch.float32):
    return torch.randn(*shape, device=DEVICE).to(dtype)


def features(size, dtype):
    """Return features in row phases."""
    N, C, H, W = size
    return randn(N, 2 * C, H // 2, W, dtype=dtype).contiguous(memory_format=torch.channels_last)


def assert_equal(actual, expected, error):
    for a, b in zip(actual, expected, strict=True):
        assert a.shape == b.shape and a.stride() == b.stride()
        assert (a.cpu().double() - b).norm() < error * b.norm()


def launch(kind, **options):
    """Return the launch with other options; None, for the kernels to choose, without any."""
    return getattr(decoder_head.kernels, kind)._replace(**options) if options else None


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES + CUDA_SIZES, ids=str)
@pytest.mark.parametrize("options", [{}, *LAUNCHES.values()], ids=["default", *LAUNCHES])
def test_output_conv(size, dtype, options):
    x, weight, bias = features(size, dtype), randn(4, size[1], 3, 3, dtype=dtype), randn(4, dtype=dtype)
    g = randn(size[0], 4, *size[2:], dtype=dtype)
    exact = [t.cpu().double() for t in (x, weight, bias, g)]
    output = decoder_head.kernels.output_conv(x, weight, bias, launch("FORWARD", **options))
    assert_equal([output], [decoder_head.output_conv(*exact[:3])], 0.005)
    gradients = decoder_head.kernels.output_conv_backward(g, x, weight, 0.1, launch("BACKWARD", **options))
    assert_equal(gradients, decoder_head.output_conv_backward(exact[3], *exact[:2], 0.1), 0.01)
    for _ in range(0 if INTERPRETED else 50):  # a race shows in some launches only
        again = decoder_head.kernels.output_conv_backward(g, x, weight, 0.1, launch("BACKWARD", **options))
        assert all(map(torch.equal, again, gradients))


@needs_kernels
def test_narrow_launches_have_one_stage():
    stages = [decoder_head.kernels._backward_stages(decoder_head.kernels.BACKWARD, columns) for columns in (16, 32, 64)]
    assert stages == [1, 1, decoder_head.kernels.BACKWARD.num_stages] and stages[2] > 1


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES + CUDA_SIZES, ids=str)
def test_activation_backward(size, dtype):
    y, g = features(size, dtype), features(size, dtype)
    actual = decoder_head.kernels.activation_backward(g, y, 0.1, size[1], launch("ACTIVATION", columns=16, steps=3))
    assert_equal(actual, decoder_head.activation_backward(g.cpu().double(), y.cpu().double(), 0.1, size[1]), 0.01)


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_empty_batch(dtype):
    x, weight, bias = features((0, 16, 16, 16), dtype), randn(4, 16, 3, 3, dtype=dtype), randn(4, dtype=dtype)
    assert decoder_head.kernels.output_conv(x, weight, bias).shape == (0, 4, 16, 16)
    g = randn(0, 4, 16, 16, dtype=dtype)
    x_grad, weight_grad, bias_grad = decoder_head.kernels.output_conv_backward(g, x, weight, 0.0)
    assert x_grad.shape == x.shape and not weight_grad.any() and not bias_grad.any()
    y_grad, bias_grad = decoder_head.kernels.activation_backward(x, x, 0.0, 16)
    assert y_grad.shape == x.shape and not bias_grad.any()


@needs_kernels
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, under the interpreter
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float32], ids=str)
@pytest.mark.parametrize("size", [(2, 12, 16, 16), (3, 7, 13, 11), (1, 1, 5, 3), (0, 2, 4, 4)], ids=str)
def test_mix(size, dtype):
    B, K, H, W = size
    x = randn(B, K, H, W, 4, dtype=dtype)
    gradients = [randn(B, K, H, W), randn(B, 3, H, W), randn(B, K, 3, H, W)]
    exact = [t.cpu().double() for t in (x.permute(0, 1, 4, 2, 3), *gradients)]
    for a, b in zip(mixing.kernels.mix(x), mixing.mix_layers(exact[0]), strict=True):
        torch.testing.assert_close(a.cpu().double(), b, rtol=1e-5, atol=1e-6)
    x_grad = mixing.kernels.mix_backward(x, *gradients).permute(0, 1, 4, 2, 3).cpu().double()
    error = 1e-5 if dtype == torch.float32 else 0.01
    torch.testing.assert_close(x_grad, mixing.mix_backward(*exact), rtol=error, atol=error / 10)


@pytest.mark.skipif(
    find_spec("triton") is None or INTERPRETED or torch.cuda.is_available(), reason="needs Triton and no CUDA device"
)
def test_under_the_interpreter():
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", __file__]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:]
