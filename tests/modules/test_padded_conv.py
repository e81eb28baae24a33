import copy

import pytest
import torch
from torch import nn

from cutslots.modules.encoders import CNNEncoder, ResNetEncoder
from cutslots.modules.padded_conv import PaddedConv2d, pad_channels, unpad_channels
from cutslots.modules.partition import make_edge_net
from tests.conftest import needs_cuda

NETS = {
    "cnn": lambda: CNNEncoder(12, (3, 3)),
    "cnn with pyramid": lambda: CNNEncoder(12, (3, 3), pyramid_levels=2),
    "resnet": lambda: ResNetEncoder(12, (3, 3, 3)),
    "resnet without batch norm": lambda: ResNetEncoder(9, (3, 1, 3), batch_norm=False, pyramid_levels=1),
    "edge net": lambda: make_edge_net(3, 20, 18, (3, 3), nn.LeakyReLU),
}


def output_and_gradients(net: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """Return the output for x, the gradients of x and of the parameters, and batch statistics."""
    x = x.detach().requires_grad_()
    y = net(x)
    g = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y)
    return [y, *torch.autograd.grad(y, [x, *net.parameters()], g), *(b for b in net.buffers() if b.is_floating_point())]


def always_padding(net: nn.Module) -> nn.Module:
    for module in net.modules():
        if isinstance(module, PaddedConv2d):
            module.always_pads = True
    return net


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("before, after", [(100, 100), (64, 100), (100, 64), (3, 9), (9, 3), (16, 8)])
@pytest.mark.parametrize(
    "options", [{}, {"stride": 2, "padding": 1}, {"padding": 2, "padding_mode": "reflect"}], ids=str
)
def test_output_and_gradients_equal_those_of_conv2d(before, after, bias, options):
    exact = nn.Conv2d(before, after, 3, bias=bias, **options).double()
    padded = always_padding(PaddedConv2d(before, after, 3, bias=bias, **options).double())
    padded.load_state_dict(exact.state_dict())
    x = torch.randn(2, before, 6, 5, dtype=torch.double)
    for a, b in zip(output_and_gradients(padded, x), output_and_gradients(exact, x), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", NETS)
def test_networks_compute_the_same_with_padding(name):
    exact = NETS[name]().double()
    padded = always_padding(copy.deepcopy(exact))
    x = torch.randn(2, 3, 12, 10, dtype=torch.double)
    for a, b in zip(output_and_gradients(padded, x), output_and_gradients(exact, x), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_second_derivatives_of_a_padded_convolution():
    conv = always_padding(PaddedConv2d(9, 10, 3).double())
    x = torch.randn(1, 9, 4, 4, dtype=torch.double, requires_grad=True)
    assert torch.autograd.gradgradcheck(conv, (x,))


def test_a_padded_input_is_not_padded_again():
    conv, x = always_padding(PaddedConv2d(12, 20, 1)), torch.randn(1, 12, 2, 2)
    assert torch.equal(conv(pad_channels(x)), conv(x))


def test_pad_and_unpad_are_inverse_and_keep_the_memory_format():
    x = torch.randn(2, 100, 3, 4).contiguous(memory_format=torch.channels_last).requires_grad_()
    padded = pad_channels(x)
    assert padded.shape == (2, 104, 3, 4) and padded.is_contiguous(memory_format=torch.channels_last)
    assert not padded[:, 100:].any() and torch.equal(unpad_channels(padded, 100), x)
    (g,) = torch.autograd.grad(unpad_channels(padded, 100), padded, torch.ones_like(x))
    assert g.is_contiguous(memory_format=torch.channels_last) and g[:, :100].all() and not g[:, 100:].any()
    assert unpad_channels(x, 100) is x


def test_nothing_is_padded_on_the_cpu_or_for_multiples_of_8():
    x = torch.zeros(1, 100, 4, 4, dtype=torch.bfloat16)
    assert not PaddedConv2d(100, 100, 3).bfloat16().pads(x)
    assert not always_padding(PaddedConv2d(64, 104, 3)).pads(x), "these channels need no padding"
    assert not always_padding(PaddedConv2d(3, 64, 3)).pads(x), "cuDNN has kernels for images"


def test_compiled_equals_eager_under_autocast():
    net = always_padding(ResNetEncoder(12, (3, 3))).to(memory_format=torch.channels_last).eval()
    x = torch.randn(2, 3, 8, 8).contiguous(memory_format=torch.channels_last)
    with torch.autocast("cpu", torch.bfloat16):
        eager = output_and_gradients(net, x)
        compiled = output_and_gradients(torch.compile(net, fullgraph=True, backend="aot_eager"), x)
    for a, b in zip(compiled, eager, strict=True):
        assert a.shape == b.shape and (a - b).float().norm() <= 0.03 * b.float().norm()


@needs_cuda
def test_compiled_on_cuda_pads_and_has_the_error_of_autocast():
    net = ResNetEncoder(100, (5, 3, 3)).cuda().to(memory_format=torch.channels_last)
    x = torch.randn(4, 3, 32, 32, device="cuda")
    exact = output_and_gradients(copy.deepcopy(net).double(), x.double())
    with torch.autocast("cuda", torch.bfloat16):
        plain = output_and_gradients(copy.deepcopy(net), x)
        padded = output_and_gradients(torch.compile(net), x)
    for a, b, c in zip(exact, plain, padded, strict=True):
        assert c.shape == a.shape and c.dtype == b.dtype
        assert (c - a).norm() < 1.5 * (b - a).norm() + 1e-2 * a.norm()
