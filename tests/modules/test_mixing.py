import pytest
import torch

from cutslots.modules import mixing
from cutslots.modules.decoders import PixelShuffleDecoder
from cutslots.modules.mixing import mix, mix_backward, mix_fused, mix_layers
from tests.conftest import needs_cuda

OPCHECKS = ("test_schema", "test_autograd_registration", "test_faketensor")


def components(*shape, dtype=torch.double):
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


def test_masks_colors_and_reconstruction_by_loops():
    x = components(2, 3, 4, 2, 2)
    masks, reconstruction, colors = mix(x)
    for b, i, j in ((0, 0, 1), (1, 1, 0)):
        weights = x[b, :, 3, i, j].exp()
        torch.testing.assert_close(masks[b, :, i, j], weights / weights.sum())
        expected = sum(w * (x[b, k, :3, i, j] + 1) / 2 for k, w in enumerate(weights / weights.sum()))
        torch.testing.assert_close(reconstruction[b, :, i, j], expected)
    assert torch.equal(colors, x[:, :, :3] / 2 + 0.5)


@pytest.mark.parametrize("shape", [(2, 3, 4, 5, 6), (1, 1, 4, 2, 2), (0, 2, 4, 2, 2)], ids=str)
def test_operator_equals_the_layers(shape):
    x = components(*shape)
    actual, expected = mix_fused(x), mix_layers(x)
    gradients = [torch.randn_like(t) for t in expected]
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b)
    pairs = zip(torch.autograd.grad(actual, x, gradients), torch.autograd.grad(expected, x, gradients), strict=True)
    for a, b in pairs:
        torch.testing.assert_close(a, b)


def test_operator_has_second_derivatives():
    x = components(1, 2, 4, 2, 1)
    assert torch.autograd.gradcheck(mix_fused, (x,)) and torch.autograd.gradgradcheck(mix_fused, (x,))


def test_an_output_without_gradient():
    x = components(1, 3, 4, 2, 2)
    for i in range(3):
        (a,), (b,) = (torch.autograd.grad(f(x)[i].square().sum(), x) for f in (mix_fused, mix_layers))
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_operators_are_registered_correctly(dtype):
    x = components(2, 3, 4, 4, 4, dtype=dtype)
    torch.library.opcheck(mix_fused, (x,), test_utils=OPCHECKS)
    gradients = [torch.randn_like(t) for t in mix_layers(x)]
    torch.library.opcheck(mix_backward, (x.detach(), *gradients), test_utils=OPCHECKS)


def test_compiled_operator_equals_the_layers():
    x = components(2, 3, 4, 4, 4)
    forward = lambda mix: lambda x: mix(x * 2)[1].square().mean()
    (a,), (b,) = (
        torch.autograd.grad(f(x), x)
        for f in (torch.compile(forward(mix_fused), fullgraph=True, backend="aot_eager"), forward(mix_layers))
    )
    torch.testing.assert_close(a, b)


@needs_cuda
@pytest.mark.parametrize("compiled", [False, True])
def test_on_cuda_half_precision_runs_the_kernels(compiled, monkeypatch):
    calls: list[str] = []
    original = mixing.kernels.mix
    monkeypatch.setattr(mixing.kernels, "mix", lambda x: calls.append("mix") or original(x))
    x = torch.randn(2, 5, 4, 33, 16, device="cuda")
    exact, half = x.double().requires_grad_(), x.bfloat16().requires_grad_()
    forward = torch.compile(mix) if compiled else mix
    for a, b in zip(forward(half), mix_layers(half), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert calls
    (a,), (b,) = (
        torch.autograd.grad(f(x)[1].square().sum() + f(x)[0][:, 0].sum(), x)
        for f, x in ((forward, half), (mix_layers, exact))
    )
    assert (a.double() - b).norm() < 0.01 * b.norm()


@needs_cuda
def test_torch_func_and_higher_derivatives_on_cuda():
    decoder = PixelShuffleDecoder(8, (16, 16)).cuda().bfloat16()
    slots = torch.randn(2, 3, 8, device="cuda").bfloat16()
    assert torch.func.vmap(lambda s: decoder(s[None]).reconstruction)(slots).shape == (2, 1, 3, 16, 16)
    x = torch.randn(1, 3, 4, 4, 4, device="cuda").bfloat16().requires_grad_()
    (g,) = torch.autograd.grad(mix(x)[1].square().sum(), x, create_graph=True)
    assert torch.autograd.grad(g.float().square().sum(), x)[0].any()
