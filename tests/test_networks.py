import numpy as np
import pytest
import torch
from torch import nn

from cutslots.networks import (
    EVERYWHERE,
    NARROWEST,
    BroadcastDecoder,
    CNNEncoder,
    Context,
    PositionCode,
    ResNetEncoder,
    SubpixelDecoder,
    places,
)

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


# -------------------------------------------------------------------------------------------------------------- places


@pytest.mark.parametrize("size", [(9, 9), (5, 12), (1, 7)])
def test_places_are_the_moments_of_masks(size, rng):
    masks = rng.random((2, 3, *size)) ** 4
    y, x = np.linspace(0, 1, size[0]), np.linspace(0, 1, size[1])
    expected = np.empty((2, 3, 3))
    for b, k in np.ndindex(2, 3):
        rows, columns = masks[b, k].sum(1), masks[b, k].sum(0)
        cy, cx = np.average(y, weights=rows), np.average(x, weights=columns)
        both = np.average((y - cy) ** 2, weights=rows), np.average((x - cx) ** 2, weights=columns)
        expected[b, k] = cy, cx, np.mean(both) ** 0.5
    np.testing.assert_allclose(places(torch.from_numpy(masks)), expected, rtol=1e-5)
    np.testing.assert_allclose(places(torch.from_numpy(masks).float()), expected, rtol=1e-4)


def test_places_do_not_depend_on_how_much_there_is():
    masks = torch.rand(2, 3, 8, 8)
    torch.testing.assert_close(places(0.1 * masks), places(masks), rtol=1e-4, atol=1e-5)


def test_a_pixel_is_as_narrow_as_can_be():
    masks = torch.zeros(1, 2, 9, 5)
    masks[0, 0, 2, 3] = masks[0, 1, 8, 0] = 1
    torch.testing.assert_close(places(masks), torch.tensor([[[0.25, 0.75, NARROWEST], [1.0, 0.0, NARROWEST]]]))


def test_the_uniform_mask_is_everywhere():
    """Up to the grid: between 0 and 1 there are n points, whose spread is a little larger than the interval's."""
    for n in (8, 32, 128):
        place = places(torch.full((1, 1, n, n), 0.3))[0, 0]
        torch.testing.assert_close(place, torch.tensor(EVERYWHERE), rtol=1.1 / (n - 1), atol=1e-5)


def test_the_place_of_nothing_is_finite():
    masks = torch.zeros(1, 1, 6, 6, requires_grad=True)
    place = places(masks)
    place.sum().backward()
    assert place.isfinite().all() and masks.grad.isfinite().all() and place[0, 0, 2] == np.float32(NARROWEST)


@pytest.mark.parametrize("dtype, off", [(torch.float16, 1e-3), (torch.bfloat16, 1e-2)])
def test_places_of_half_precision_are_float32(dtype, off):
    masks = torch.rand(2, 3, 64, 64)  # 4,096 pixels are more than such numbers can count
    got = places(masks.to(dtype))
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, places(masks), rtol=0, atol=off)
    assert places(masks.double()).dtype == torch.float64


def test_places_are_not_autocast():
    masks = torch.rand(2, 3, 32, 32)
    with torch.autocast("cpu", torch.bfloat16):
        got = places(masks)
    assert got.dtype == torch.float32 and torch.equal(got, places(masks))


def test_gradient_of_places():
    masks = torch.rand(2, 2, 4, 5, dtype=torch.double, requires_grad=True)
    assert torch.autograd.gradcheck(places, masks)


@pytest.mark.parametrize("size", [(5, 7), (8, 8)])
def test_a_code_around_everywhere_is_the_plain_one(size):
    code, x = PositionCode(6, size), torch.randn(3, 6, *size)
    torch.testing.assert_close(code(x, torch.tensor(EVERYWHERE).expand(3, 3)), code(x), rtol=0, atol=1e-6)


def test_a_placed_code_equals_its_formula():
    H, W = 5, 7
    code, x = PositionCode(6, (H, W)), torch.randn(2, 6, H, W)
    place = torch.tensor([[0.2, 0.7, 0.1], [0.9, 0.4, 0.3]])
    out = code(x, place)
    for b, (cy, cx, spread) in enumerate(place.tolist()):
        for i in range(H):
            for j in range(W):
                v, u = 0.5 + (i / 4 - cy) * 12**-0.5 / spread, 0.5 + (j / 6 - cx) * 12**-0.5 / spread
                expected = x[b, :, i, j] + code.linear(torch.tensor([v, u, 1 - v, 1 - u]))
                torch.testing.assert_close(out[b, :, i, j], expected, rtol=1e-4, atol=1e-5)


def test_a_code_moves_with_its_place():
    code, x = PositionCode(4, (6, 9)).double(), torch.zeros(1, 4, 6, 9, dtype=torch.double)
    at = lambda y, x_, spread=0.2: code(x, torch.tensor([[y, x_, spread]], dtype=torch.double))
    torch.testing.assert_close(at(0.4 + 1 / 5, 0.3)[..., 1:, :], at(0.4, 0.3)[..., :-1, :])
    torch.testing.assert_close(at(0.4, 0.3 - 2 / 8)[..., :-2], at(0.4, 0.3)[..., 2:])
    wide, narrow = (at(0.0, 0.0, spread) for spread in (0.4, 0.2))
    torch.testing.assert_close(narrow[..., :3, :5], wide[..., ::2, ::2], msg="half as wide, twice as fast")


def test_gradient_of_a_placed_code():
    code = PositionCode(3, (3, 4)).double()
    x = torch.randn(2, 3, 3, 4, dtype=torch.double, requires_grad=True)
    place = torch.tensor([[0.2, 0.7, 0.1], [0.9, 0.4, 0.3]], dtype=torch.double, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, place, *_: code(x, place), (x, place, *code.parameters()))


@pytest.mark.parametrize("decoder", DECODERS)
def test_what_is_drawn_moves_with_its_place(decoder):
    """One step of the 8x8 grid is 4 of 32 pixels. Far enough from the border, whose padding stays where it is."""
    net, margin = decoder(12, 32, maps=(8,), placed=True).double(), 9
    here, down, left = torch.randn(12, dtype=torch.double).repeat(3, 1)
    for slot, y, x in ((here, 0.5, 0.4), (down, 0.5 + 1 / 7, 0.4), (left, 0.5, 0.4 - 1 / 7)):
        slot[-3:] = torch.tensor([y, x, 0.2])
    with torch.no_grad():
        drawn = net(torch.stack([here, down, left])[None])[0, ..., margin:-margin, margin:-margin]
    torch.testing.assert_close(drawn[1, :, 4:], drawn[0, :, :-4])
    torch.testing.assert_close(drawn[2, :, :, :-4], drawn[0, :, :, 4:])
    change = (drawn[0, :, 4:] - drawn[0, :, :-4]).abs().max()
    assert change > 1e-4, "there is something to see"


@pytest.mark.parametrize("decoder", DECODERS)
def test_a_slot_that_is_everywhere_is_drawn_as_one_without_a_place(decoder):
    plain, placed = decoder(9, 16, maps=(8,)), decoder(12, 16, maps=(8,), placed=True)
    placed.load_state_dict(plain.state_dict())
    slots = torch.randn(2, 3, 9)
    everywhere = torch.cat([slots, torch.tensor(EVERYWHERE).expand(2, 3, 3)], -1)
    torch.testing.assert_close(placed(everywhere), plain(slots), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("decoder", DECODERS)
def test_places_learn_from_what_is_drawn(decoder):
    slots = (torch.rand(2, 3, 12) + 0.1).requires_grad_()
    decoder(12, 16, maps=(8,), placed=True)(slots).square().sum().backward()
    assert slots.grad.isfinite().all() and (slots.grad[..., -3:] != 0).all()


# ------------------------------------------------------------------------------------------------------------- context


@pytest.mark.parametrize("levels", [1, 2, 4])
@pytest.mark.parametrize("size", [(16, 16), (7, 12), (5, 3), (1, 1)])
def test_context_keeps_the_shape(levels, size):
    net, x = Context(6, levels), torch.randn(2, 6, *size, requires_grad=True)
    out = net(x)
    assert out.shape == x.shape
    out.square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in net.parameters())


def test_context_written_out():
    net, x = Context(3, 2), torch.randn(1, 3, 8, 8)
    half = net.down[0](x).relu()
    quarter = net.down[1](half).relu()
    double = lambda x: x.repeat_interleave(2, -1).repeat_interleave(2, -2)
    half = half + net.up[0](double(quarter)).relu()
    torch.testing.assert_close(net(x), x + net.up[1](double(half)).relu())
    assert convolutions(net) == 2 * [("conv", 3, 3, 3, 2)] + 2 * [("conv", 3, 3, 3, 1)]


@pytest.mark.parametrize("levels, reaches", [(1, False), (2, False), (4, True)])
def test_enough_levels_reach_the_opposite_corner(levels, reaches):
    torch.manual_seed(1)
    net, x = Context(16, levels).double(), torch.randn(1, 16, 16, 16, dtype=torch.double)
    changed = x.clone()
    changed[..., 0, 0] += 5
    far = (net(changed) - net(x))[..., -1, -1].abs().max()
    assert (far > 0) == reaches


def test_an_encoder_may_be_followed_by_context():
    net = nn.Sequential(CNNEncoder(8, (3,)), Context(8, 3))
    assert net(torch.randn(2, 3, 16, 16)).shape == (2, 8, 8, 8)
