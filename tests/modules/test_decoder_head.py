import pytest
import torch
from torch import nn
from torch.autograd import gradcheck

from cutslots.modules import decoder_head
from cutslots.modules.decoder_head import FusedDecoderHead
from cutslots.modules.decoders import SpatialBroadcastDecoder
from tests.conftest import needs_cuda


def last_layers(in_channels: int, channels: int, extra_layers: int, slope: float) -> nn.Sequential:
    act = nn.LeakyReLU(slope) if slope else nn.ReLU()
    layers = [nn.ConvTranspose2d(in_channels, channels, 5, stride=2, padding=2, output_padding=1), act]
    for _ in range(extra_layers):
        layers += [nn.Conv2d(channels, channels, 5, padding=2), act]
    return nn.Sequential(*layers, nn.Conv2d(channels, 4, 3, padding=1))


def output_and_gradients(forward, layers: nn.Sequential, x: torch.Tensor) -> list[torch.Tensor]:
    """Return the output for x and the gradients of x and of the parameters of `layers`."""
    x = x.detach().requires_grad_()
    y = forward(x)
    g = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y)
    return [y, *torch.autograd.grad(y, [x, *layers.parameters()], g)]


@pytest.mark.parametrize("slope", [0.0, 0.1])
@pytest.mark.parametrize("extra_layers", [0, 1, 2])
@pytest.mark.parametrize("size", [(16, 16), (4, 10), (32, 16)], ids=str)
def test_output_and_gradients_equal_the_layers(size, extra_layers, slope):
    layers = last_layers(6, 4, extra_layers, slope).double()
    head = FusedDecoderHead(extra_layers).double()
    x = torch.randn(3, 6, size[0] // 2, size[1] // 2, dtype=torch.double)
    expected = output_and_gradients(layers, layers, x)
    actual = output_and_gradients(lambda x: head.forward_fused(x, layers), layers, x)
    assert actual[0].shape == (3, 4, *size)
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


class FusedDecoder(nn.Module):
    def __init__(self, head: FusedDecoderHead, layers: nn.Sequential) -> None:
        super().__init__()
        self.head, self.layers = head, layers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head.forward_fused(x, self.layers)


def test_gradcheck():
    layers = last_layers(2, 3, 1, 0.2).double()
    x = torch.randn(2, 2, 3, 4, dtype=torch.double, requires_grad=True)
    decoder = FusedDecoder(FusedDecoderHead(1).double(), layers)
    names = [f"layers.{name}" for name, _ in layers.named_parameters()]
    weights = [weight.detach().requires_grad_() for weight in layers.parameters()]
    assert gradcheck(
        lambda x, *weights: torch.func.functional_call(decoder, dict(zip(names, weights, strict=True)), (x,)),
        (x, *weights),
    )


def test_state_dict_is_empty():
    assert not FusedDecoderHead(1).state_dict()
    assert not [name for name in SpatialBroadcastDecoder(8, (32, 32)).state_dict() if name.startswith("head")]


def test_supports_half_precision_powers_of_two_and_known_channels():
    head = FusedDecoderHead(1)
    x, layers = torch.zeros(1, 8, 16, 8, dtype=torch.bfloat16), last_layers(8, 32, 1, 0.0)
    assert not head.has_kernels and not head.supports(x, layers), "there are no kernels for the CPU"
    head.has_kernels = True
    assert head.supports(x, layers) and head.supports(x.mT, layers) and head.supports(x[:0].half(), layers)
    assert not head.supports(x.float(), layers)
    assert not head.supports(x[:, :, :12], layers) and not head.supports(x[..., :4], layers)
    assert not head.supports(x[:, :, :12].mT, layers) and not head.supports(x[..., :4].mT, layers)
    assert not head.supports(x, last_layers(8, 24, 1, 0.0)) and not head.supports(x, last_layers(8, 8, 1, 0.0))
    assert not head.supports(x.expand(2**17, -1, -1, -1), layers), "cuDNN's indices would overflow"


def test_unsupported_sizes_run_layer_by_layer():
    layers, head = last_layers(8, 32, 1, 0.0).bfloat16(), FusedDecoderHead(1).bfloat16()
    head.has_kernels = True
    x = torch.randn(1, 8, 12, 8, dtype=torch.bfloat16)
    assert torch.equal(head(x, layers), layers(x))


def test_decoder_uses_the_fused_head_where_it_is_supported(monkeypatch):
    slots = torch.randn(2, 3, 8)
    decoder = SpatialBroadcastDecoder(8, (32, 64), channels=(16,))
    exact = decoder.components(slots)
    monkeypatch.setattr(decoder.bfloat16().head, "has_kernels", True)
    calls: list[FusedDecoderHead] = []
    original = FusedDecoderHead.forward_fused
    monkeypatch.setattr(
        FusedDecoderHead, "forward_fused", lambda self, *args: calls.append(self) or original(self, *args)
    )
    output = decoder.components(slots.bfloat16())
    assert calls == [decoder.head] and (output - exact).norm() < 0.02 * exact.norm()


@pytest.mark.parametrize("extra_layers", [0, 1])
def test_empty_batch(extra_layers):
    layers = last_layers(6, 4, extra_layers, 0.0)
    x = torch.zeros(0, 6, 8, 4, requires_grad=True)
    out = FusedDecoderHead(extra_layers).forward_fused(x, layers)
    assert out.shape == (0, 4, 16, 8) and torch.autograd.grad(out.sum(), x)[0].shape == x.shape


def test_second_derivatives_are_refused():
    layers, head = last_layers(6, 4, 1, 0.0), FusedDecoderHead(1)
    x = torch.randn(1, 6, 8, 8, requires_grad=True)
    loss = head.forward_fused(x, layers).square().sum()
    with pytest.raises(NotImplementedError, match="first derivatives only; run the decoder in float32"):
        torch.autograd.grad(loss, x, create_graph=True)
    expected, actual = (
        torch.autograd.grad(f(x).square().sum(), x, create_graph=True)[0] for f in (layers, lambda x: head(x, layers))
    )
    assert torch.equal(actual, expected) and actual.requires_grad, "layer by layer there are second derivatives"


@pytest.mark.parametrize("slope", [0.0, 0.1])
def test_compiled_equals_eager(slope):
    layers, head = last_layers(6, 4, 1, slope), FusedDecoderHead(1)
    x = torch.randn(2, 6, 4, 8)
    forward = lambda x: head.forward_fused(x, layers)
    eager = output_and_gradients(forward, layers, x)
    compiled = output_and_gradients(torch.compile(forward, fullgraph=True), layers, x)
    for a, b in zip(eager, compiled, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@needs_cuda
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    "channels, size, extra_layers, slope",
    [(64, (64, 64), 1, 0.0), (16, (16, 16), 2, 0.1), (32, (256, 256), 0, 0.0), (32, (32, 128), 1, 0.0)],
    ids=str,
)
def test_error_on_cuda_is_that_of_autocast(channels, size, extra_layers, slope, compiled):
    layers = last_layers(24, channels, extra_layers, slope).cuda()
    x = torch.randn(3, 24, size[0] // 2, size[1] // 2, device="cuda")
    exact = output_and_gradients(layers, layers, x)
    head = FusedDecoderHead(extra_layers).cuda()
    forward = torch.compile(head) if compiled else head
    assert head.supports(x.bfloat16(), layers)
    with torch.autocast("cuda", torch.bfloat16):
        autocast = output_and_gradients(layers, layers, x)
        fused = output_and_gradients(lambda x: forward(x.bfloat16(), layers), layers, x)
    for a, b, c in zip(exact, autocast, fused, strict=True):
        assert c.shape == a.shape and c.dtype == b.dtype
        assert (c - a).norm() < 1.5 * (b - a).norm() + 1e-3 * a.norm()


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(2, 16, 16, 16), (1, 64, 32, 256), (2, 32, 128, 16)], ids=str)
def test_triton_kernels_equal_the_cpu(shape, dtype):
    N, C, H, W = shape
    x = torch.randn(N, 2 * C, H // 2, W, device="cuda").to(dtype).contiguous(memory_format=torch.channels_last)
    weight, bias = torch.randn(4, C, 3, 3, device="cuda").to(dtype), torch.randn(4, device="cuda").to(dtype)
    g = torch.randn(N, 4, H, W, device="cuda").to(dtype)
    cpu_x, cpu_weight, cpu_bias, cpu_g = (t.cpu().double() for t in (x, weight, bias, g))
    output = decoder_head.output_conv(x, weight, bias).cpu().double()
    torch.testing.assert_close(output, decoder_head.output_conv(cpu_x, cpu_weight, cpu_bias), rtol=0.02, atol=0.05)
    gradients = decoder_head.output_conv_backward(g, x, weight, 0.1)
    expected = decoder_head.output_conv_backward(cpu_g, cpu_x, cpu_weight, 0.1)
    for a, b in zip(gradients, expected, strict=True):
        assert (a.cpu().double() - b).norm() < 0.01 * b.norm()
    kernel = torch.randn(2 * C, 2 * C, 3, 5, device="cuda").to(dtype)
    output = decoder_head.conv_relu(x, kernel, bias.repeat(C // 2))
    assert output.shape == x.shape and output.is_contiguous(memory_format=torch.channels_last)
