import pytest
import torch
from torch import nn

from cutslots.networks import BroadcastDecoder, CNNEncoder, PositionCode, ResNetEncoder, SubpixelDecoder

SIZES = [16, 32, 64, 128]
DECODERS = [BroadcastDecoder, SubpixelDecoder]


def convolutions(module):
    """(kind, maps before, maps after, side of the kernel, stride) of every convolution, in order."""
    kinds = {nn.Conv2d: "conv", nn.ConvTranspose2d: "transposed"}
    return [
        (kinds[type(m)], m.in_channels, m.out_channels, m.kernel_size[0], m.stride[0])
        for m in module.modules()
        if type(m) in kinds
    ]


def count(module, kind):
    return sum(isinstance(m, kind) for m in module.modules())


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    "encoder, maps",
    [
        (CNNEncoder(16), 16),
        (ResNetEncoder(20), 20),
        (ResNetEncoder(20, norm=True), 20),
        (ResNetEncoder(64, (3, 3)), 64),
    ],
)
def test_encoders_halve_the_picture(encoder, maps, size):
    features = encoder(torch.randn(2, 3, size, size))
    assert features.shape == (2, maps, size // 2, size // 2) and (features >= 0).all()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("decoder", DECODERS)
def test_decoders_draw_colours_and_a_logit_for_every_slot(decoder, size):
    assert decoder(12, size, maps=(8,))(torch.randn(2, 3, 12)).shape == (2, 3, 4, size, size)


@pytest.mark.parametrize("decoder", DECODERS)
def test_slots_are_drawn_apart(decoder):
    net, slots = decoder(12, 32, maps=(8,)), torch.randn(2, 3, 12)
    alone = torch.cat([net(slots[:, k : k + 1]) for k in range(3)], 1)
    torch.testing.assert_close(net(slots), alone, rtol=1e-4, atol=1e-5)


def test_the_papers_cnn_encoder():
    net = CNNEncoder()
    assert convolutions(net) == [
        ("conv", 3, 64, 5, 2),
        ("conv", 64, 64, 5, 1),
        ("conv", 64, 64, 5, 1),
        ("conv", 64, 64, 5, 1),
    ]
    assert count(net, nn.ReLU) == 4 and isinstance(net.layers[-1], nn.ReLU)


def test_the_papers_resnet_encoder():
    net = ResNetEncoder()
    first = [("conv", 64, 100, 3, 1), ("conv", 100, 100, 3, 1), ("conv", 64, 100, 1, 1)]  # the last is the skip
    others = 3 * [("conv", 100, 100, 3, 1), ("conv", 100, 100, 3, 1)]
    assert convolutions(net) == [("conv", 3, 64, 5, 2), *first, *others]
    assert count(net, nn.BatchNorm2d) == 0


def test_norm_follows_every_convolution_but_the_skip():
    net = ResNetEncoder(norm=True)
    assert convolutions(net) == convolutions(ResNetEncoder())
    normed = [m for m in net.modules() if isinstance(m, nn.Conv2d) and m.bias is None]
    assert count(net, nn.BatchNorm2d) == len(normed) == len(convolutions(net)) - 1


def test_residual_block_written_out():
    block = ResNetEncoder(20, (5, 3, 3)).blocks[0]
    x = torch.randn(2, 64, 6, 7)
    first, _, second = block.residual
    torch.testing.assert_close(block(x), (block.skip(x) + second(first(x).relu())).relu())


def test_the_papers_decoder():
    net = BroadcastDecoder(64, 128)
    assert convolutions(net) == [
        *4 * [("transposed", 64, 64, 5, 2)],  # 8 to 16, 32, 64, 128
        ("conv", 64, 64, 5, 1),
        ("conv", 64, 4, 3, 1),
    ]
    assert count(net, nn.ReLU) == 5 and isinstance(net.layers[-1], nn.Conv2d)


def test_the_released_decoder():
    net = BroadcastDecoder(64, 128, extra=2, style="leaky")
    assert convolutions(net)[4:] == [("conv", 64, 64, 5, 1), ("conv", 64, 64, 5, 1), ("conv", 64, 4, 3, 1)]
    assert count(net, nn.LeakyReLU) == 6 and count(net, nn.ReLU) == 0
    with torch.no_grad():
        net.layers[-1].bias.fill_(3.0)
        colours, logits = net(torch.randn(1, 2, 64)).split([3, 1], dim=2)
    assert colours.abs().max() <= 1 and logits.max() > 1, "tanh bounds colours, not logits"


def test_the_last_width_is_repeated():
    assert [c[1:3] for c in convolutions(BroadcastDecoder(10, 64, maps=(8, 6), extra=0))] == [
        (10, 8),
        (8, 6),
        (6, 6),
        (6, 4),
    ]
    assert [c[1:3] for c in convolutions(SubpixelDecoder(10, 128, maps=(8, 6)))] == [
        (10, 32),
        (8, 24),
        (6, 24),
        (6, 16),
    ]


@pytest.mark.parametrize("size", SIZES)
def test_subpixel_decoder_does_no_work_at_full_size(size):
    net = SubpixelDecoder(12, size)
    seen = []
    for layer in net.layers:
        if isinstance(layer, nn.Conv2d):
            layer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].shape[-1]))
    net(torch.randn(1, 1, 12))
    assert seen == [n for n in (8, 16, 32, 64) if n < size]
    assert all(c[3:] == (3, 1) for c in convolutions(net)) and isinstance(net.layers[-1], nn.PixelShuffle)


@pytest.mark.parametrize("size", [(5, 7), (8, 8), (1, 1)])
def test_position_code_equals_its_formula(size):
    H, W = size
    code, x = PositionCode(6, size), torch.randn(2, 6, H, W)
    out = code(x)
    weight, bias = code.linear.weight, code.linear.bias
    for i in range(H):
        for j in range(W):
            v, u = i / max(H - 1, 1), j / max(W - 1, 1)
            place = torch.tensor([v, u, 1 - v, 1 - u])
            torch.testing.assert_close(out[:, :, i, j], x[:, :, i, j] + weight @ place + bias)
    assert set(code.state_dict()) == {"linear.weight", "linear.bias"}, "the grid is no weight"


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("size", [24, 8, 0, -16, 1])
def test_bad_sizes(decoder, size):
    with pytest.raises(ValueError, match=f"size is {size}; expected a power of two from 16 on"):
        decoder(8, size)


def test_bad_position_codes():
    with pytest.raises(ValueError, match=r"size is \(5, 0\); expected \(H, W\) with sides of at least 1"):
        PositionCode(4, (5, 0))
    with pytest.raises(ValueError, match=r"features have shape \(1, 4, 6, 5\); expected \(B, 4, 5, 6\)"):
        PositionCode(4, (5, 6))(torch.randn(1, 4, 6, 5))


@pytest.mark.parametrize("style", ["relu", "leaky"])
@pytest.mark.parametrize("extra", [0, 1, 2])
@pytest.mark.parametrize("size", [16, 32])
def test_the_phased_tail_is_the_same_function(size, extra, style):
    torch.manual_seed(0)
    net = BroadcastDecoder(6, size, maps=(5, 4), extra=extra, style=style).double()
    x = torch.randn(3, 6, 8, 8, dtype=torch.double, requires_grad=True)
    body = len(net.layers) - net.tail.length
    outputs = net.layers(x), net.tail(net.layers[:body](x), net.layers[body:])
    torch.testing.assert_close(*outputs, rtol=1e-12, atol=1e-12)
    weights = torch.randn_like(outputs[0])
    wanted, got = (
        torch.autograd.grad((out * weights).sum(), [x, *net.layers.parameters()], retain_graph=True) for out in outputs
    )
    for one, other in zip(wanted, got, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_the_tail_has_no_weights_of_its_own():
    assert not [name for name in BroadcastDecoder(8, 32).state_dict() if name.startswith("tail")]
