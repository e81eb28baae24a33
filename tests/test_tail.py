import pytest
import torch
from torch import nn
from torch.autograd import gradcheck

from cutslots import tail
from cutslots.networks import BroadcastDecoder
from cutslots.tail import Tail
from tests.conftest import needs_cuda


def last_layers(before: int, maps: int, extra: int, slope: float) -> nn.Sequential:
    act = nn.LeakyReLU(slope) if slope else nn.ReLU()
    layers = [nn.ConvTranspose2d(before, maps, 5, stride=2, padding=2, output_padding=1), act]
    for _ in range(extra):
        layers += [nn.Conv2d(maps, maps, 5, padding=2), act]
    return nn.Sequential(*layers, nn.Conv2d(maps, 4, 3, padding=1))


def both_ways(forward, layers: nn.Sequential, x: torch.Tensor) -> list[torch.Tensor]:
    """What it makes of x, and the gradients of x and weights."""
    x = x.detach().requires_grad_()
    y = forward(x)
    g = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y)
    return [y, *torch.autograd.grad(y, [x, *layers.parameters()], g)]


@pytest.mark.parametrize("slope", [0.0, 0.1])
@pytest.mark.parametrize("extra", [0, 1, 2])
@pytest.mark.parametrize("size", [(16, 16), (4, 10)])
def test_the_same_function_and_gradients(size, extra, slope):
    layers = last_layers(6, 4, extra, slope).double()
    x = torch.randn(3, 6, size[0] // 2, size[1] // 2, dtype=torch.double)
    wanted = both_ways(layers, layers, x)
    got = both_ways(lambda x: Tail(extra).double().fast(x, layers), layers, x)
    for one, other in zip(wanted, got, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_gradcheck():
    layers = last_layers(2, 3, 1, 0.2).double()
    x = torch.randn(2, 2, 3, 4, dtype=torch.double, requires_grad=True)
    held = Applied(Tail(1).double(), layers)
    names = [f"layers.{name}" for name, _ in layers.named_parameters()]
    weights = [weight.detach().requires_grad_() for weight in layers.parameters()]
    assert gradcheck(
        lambda x, *weights: torch.func.functional_call(held, dict(zip(names, weights, strict=True)), (x,)),
        (x, *weights),
    )


class Applied(nn.Module):
    def __init__(self, applied: Tail, layers: nn.Sequential) -> None:
        super().__init__()
        self.applied, self.layers = applied, layers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.applied.fast(x, self.layers)


def test_no_weights_of_its_own():
    assert not Tail(1).state_dict()
    assert not [name for name in BroadcastDecoder(8, 32).state_dict() if name.startswith("tail")]


def test_what_there_are_kernels_for():
    applied = Tail(1)
    half, layers = torch.zeros(1, 8, 16, 8, dtype=torch.bfloat16), last_layers(8, 32, 1, 0.0)
    assert not applied.able and not applied.serves(half, layers), "on a CPU"
    applied.able = True
    assert applied.serves(half, layers) and applied.serves(half[:0].half(), layers)
    assert not applied.serves(half.float(), layers)
    assert not applied.serves(half[:, :, :12], layers) and not applied.serves(half[..., :4], layers)
    assert not applied.serves(half, last_layers(8, 24, 1, 0.0)) and not applied.serves(half, last_layers(8, 8, 1, 0.0))
    assert not applied.serves(half.expand(2**17, -1, -1, -1), layers), "as many numbers as cuDNN cannot count"


def test_a_decoder_takes_the_fast_way_where_there_is_one(monkeypatch):
    slots = torch.randn(2, 3, 8)
    net = BroadcastDecoder(8, 32, maps=(16,))
    exact = net(slots)
    monkeypatch.setattr(net.bfloat16().tail, "able", True)
    taken: list[Tail] = []
    monkeypatch.setattr(Tail, "fast", lambda self, *given, fast=Tail.fast: taken.append(self) or fast(self, *given))
    got = net(slots.bfloat16())
    assert taken == [net.tail] and (got - exact).norm() < 0.02 * exact.norm()


@pytest.mark.parametrize("extra", [0, 1])
def test_no_pictures(extra):
    layers = last_layers(6, 4, extra, 0.0)
    x = torch.zeros(0, 6, 8, 4, requires_grad=True)
    out = Tail(extra).fast(x, layers)
    assert out.shape == (0, 4, 16, 8) and torch.autograd.grad(out.sum(), x)[0].shape == x.shape


def test_second_derivatives_are_refused():
    layers = last_layers(6, 4, 1, 0.0)
    x = torch.randn(1, 6, 8, 8, requires_grad=True)
    out = Tail(1).fast(x, layers).square().sum()
    with pytest.raises(NotImplementedError, match="first derivatives only; expected float32 for higher ones"):
        torch.autograd.grad(out, x, create_graph=True)
    ours, theirs = (
        torch.autograd.grad(f(x).square().sum(), x, create_graph=True)[0]
        for f in (layers, lambda x: Tail(1)(x, layers))
    )
    assert torch.equal(ours, theirs) and ours.requires_grad, "the layers have them"


def test_operations_keep_their_promises():
    """What the compiler is told of them is what they do."""
    x = torch.randn(2, 8, 4, 6).contiguous(memory_format=torch.channels_last)
    weight = torch.randn(4, 4, 3, 3).contiguous(memory_format=torch.channels_last)
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(tail.narrow, (x, weight, torch.randn(4)), test_utils=tests)
    torch.library.opcheck(tail.narrow_backward, (torch.randn(2, 4, 8, 6), x, weight, 0.1), test_utils=tests)


@pytest.mark.parametrize("slope", [0.0, 0.1])
def test_compiled(slope):
    layers, applied = last_layers(6, 4, 1, slope), Tail(1)
    x = torch.randn(2, 6, 4, 8)
    usual = both_ways(lambda x: applied.fast(x, layers), layers, x)
    got = both_ways(torch.compile(lambda x: applied.fast(x, layers), fullgraph=True), layers, x)
    for one, other in zip(usual, got, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


# ---------------------------------------------------------------------------------------------------------------- CUDA


@needs_cuda
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("maps, side, extra, slope", [(64, 64, 1, 0.0), (16, 16, 2, 0.1), (32, 256, 0, 0.0)])
def test_as_near_as_autocast_on_cuda(maps, side, extra, slope, compiled):
    layers = last_layers(24, maps, extra, slope).cuda()
    x = torch.randn(3, 24, side // 2, side // 2, device="cuda")
    wanted = both_ways(layers, layers, x)
    applied = Tail(extra).cuda()
    forward = torch.compile(applied) if compiled else applied
    assert applied.serves(x.bfloat16(), layers)
    with torch.autocast("cuda", torch.bfloat16):
        usual = both_ways(layers, layers, x)
        got = both_ways(lambda x: forward(x.bfloat16(), layers), layers, x)
    for exact, one, other in zip(wanted, usual, got, strict=True):
        assert other.shape == exact.shape and other.dtype == one.dtype
        assert (other - exact).norm() < 1.5 * (one - exact).norm() + 1e-3 * exact.norm()


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(2, 16, 16, 16), (1, 64, 32, 256)])
def test_kernels_on_cuda(shape, dtype):
    N, C, H, W = shape
    x = torch.randn(N, 2 * C, H // 2, W, device="cuda").to(dtype).contiguous(memory_format=torch.channels_last)
    weight, bias = torch.randn(4, C, 3, 3, device="cuda").to(dtype), torch.randn(4, device="cuda").to(dtype)
    g = torch.randn(N, 4, H, W, device="cuda").to(dtype)
    on_cpu = [t.cpu().double() for t in (x, weight, bias, g)]
    torch.testing.assert_close(
        tail.narrow(x, weight, bias).cpu().double(), tail.narrow(*on_cpu[:3]), rtol=0.02, atol=0.05
    )
    got = tail.narrow_backward(g, x, weight, 0.1)
    wanted = tail.narrow_backward(on_cpu[3], on_cpu[0], on_cpu[1], 0.1)
    for one, other in zip(got, wanted, strict=True):
        assert (one.cpu().double() - other).norm() < 0.01 * other.norm()
    made = tail.conv_relu(x, torch.randn(2 * C, 2 * C, 3, 5, device="cuda").to(dtype), bias.repeat(C // 2))
    assert made.shape == x.shape and made.is_contiguous(memory_format=torch.channels_last)
