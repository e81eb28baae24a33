import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from cutslots.modules.encoders import CNNEncoder, Encoder, FeaturePyramid, ResNetEncoder
from cutslots.modules.padded_conv import PaddedConv2d
from tests.modules.layers import convolutions, count_modules

ENCODERS = {
    "cnn": lambda: CNNEncoder(16),
    "cnn with pyramid": lambda: CNNEncoder(8, (3,), pyramid_levels=3),
    "resnet": lambda: ResNetEncoder(20),
    "resnet with batch norm": lambda: ResNetEncoder(20, batch_norm=True),
    "shallow resnet": lambda: ResNetEncoder(64, (3, 3)),
    "resnet with pyramid": lambda: ResNetEncoder(8, (7, 1), pyramid_levels=2),
}
SIZES = [(16, 16), (32, 32), (64, 64), (128, 128), (15, 15), (9, 9), (33, 20), (100, 37), (1, 1), (1, 6)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ENCODERS)
def test_out_size_and_out_channels_are_those_of_the_output(name, size):
    encoder = ENCODERS[name]()
    features = encoder(torch.randn(2, 3, *size))
    assert features.shape == (2, encoder.out_channels, *encoder.out_size(size)) and (features >= 0).all()


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 70), st.integers(1, 70), st.lists(st.sampled_from([1, 3, 5, 7]), min_size=2, max_size=3))
def test_out_size_for_any_image_size_and_kernel_sizes(height, width, kernel_sizes):
    for encoder in (CNNEncoder(2, kernel_sizes), ResNetEncoder(2, kernel_sizes, pyramid_levels=1)):
        images = torch.rand(1, 3, height, width)
        assert encoder.eval()(images).shape[2:] == encoder.out_size((height, width))


@pytest.mark.parametrize("size", [(16, 16), (32, 48), (128, 128)])
def test_even_sizes_are_halved(size):
    assert CNNEncoder().out_size(size) == ResNetEncoder().out_size(size) == (size[0] // 2, size[1] // 2)


def test_images_are_normalized_to_minus_one_to_one():
    image = torch.tensor([0.0, 0.25, 1.0])
    for encoder in (CNNEncoder(2), ResNetEncoder(2), Encoder()):
        assert encoder.normalize(image).tolist() == [-1.0, -0.5, 1.0]


def test_cnn_encoder_of_the_paper():
    net = CNNEncoder()
    assert convolutions(net) == [
        ("conv", 3, 64, 5, 2),
        ("conv", 64, 64, 5, 1),
        ("conv", 64, 64, 5, 1),
        ("conv", 64, 64, 5, 1),
    ]
    assert count_modules(net, nn.ReLU) == 4 and isinstance(net.layers[-1], nn.ReLU)


def test_resnet_encoder_of_the_paper():
    net = ResNetEncoder()
    first = [("conv", 64, 100, 3, 1), ("conv", 100, 100, 3, 1), ("conv", 64, 100, 1, 1)]  # the last is the skip
    others = 3 * [("conv", 100, 100, 3, 1), ("conv", 100, 100, 3, 1)]
    assert convolutions(net) == [("conv", 3, 64, 5, 2), *first, *others]
    assert count_modules(net, nn.BatchNorm2d) == 10
    assert count_modules(ResNetEncoder(batch_norm=False), nn.BatchNorm2d) == 0


def test_batch_norm_follows_every_convolution():
    net = ResNetEncoder(batch_norm=True)
    assert convolutions(net) == convolutions(ResNetEncoder(batch_norm=False))
    kinds = [type(m) for m in net.modules() if isinstance(m, nn.Conv2d | nn.BatchNorm2d)]
    assert kinds == len(convolutions(net)) * [PaddedConv2d, nn.BatchNorm2d]
    assert all(m.bias is None for m in net.modules() if isinstance(m, nn.Conv2d))


def test_residual_block_with_batch_norm_equals_its_formula():
    block = ResNetEncoder(20, (5, 3, 3), batch_norm=True).blocks[0].eval()
    for norm in (m for m in block.modules() if isinstance(m, nn.BatchNorm2d)):
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 2)
    x = torch.randn(2, 64, 6, 7)
    first, first_norm, _, second, second_norm = block.residual
    skip, skip_norm = block.skip
    expected = skip_norm(skip(x)) + second_norm(second(first_norm(first(x)).relu()))
    torch.testing.assert_close(block(x), expected.relu())


def test_residual_block_equals_its_formula():
    block = ResNetEncoder(20, (5, 3, 3), batch_norm=False).blocks[0]
    x = torch.randn(2, 64, 6, 7)
    first, _, second = block.residual
    torch.testing.assert_close(block(x), (block.skip(x) + second(first(x).relu())).relu())


@pytest.mark.parametrize("encoder, minimum", [(CNNEncoder, 1), (ResNetEncoder, 2)])
@pytest.mark.parametrize("kernel_sizes", [(), (4,), (3, 2, 3), (3, 0), (-1, 3)])
def test_bad_kernel_sizes(encoder, minimum, kernel_sizes):
    with pytest.raises(ValueError, match=rf"expected an odd integer for each of at least {minimum} layers$") as caught:
        encoder(8, kernel_sizes)
    assert f"kernel_sizes is {kernel_sizes!r}" in str(caught.value)


def test_resnet_needs_a_stem_and_a_block():
    with pytest.raises(ValueError, match=r"kernel_sizes is \(5,\); expected an odd integer for each of at least 2"):
        ResNetEncoder(8, (5,))


# ---------------------------------------------------------------------------------------------------- parameter groups


def test_parameter_groups_hold_all_parameters():
    net = ResNetEncoder(8, (3, 3), batch_norm=True, pyramid_levels=1)
    (group,) = net.parameter_groups()
    assert group["lr_scale"] == 1.0
    assert [id(p) for p in group["params"]] == [id(p) for p in net.parameters()]


def test_parameter_groups_leave_out_frozen_parameters():
    net = ResNetEncoder(8, (3, 3))
    net.stem.requires_grad_(False)
    (group,) = net.parameter_groups()
    assert [id(p) for p in group["params"]] == [id(p) for p in net.blocks.parameters()]


def test_an_encoder_may_give_groups_of_its_own():
    class TwoRates(CNNEncoder):
        def parameter_groups(self):
            first, rest = list(self.layers[0].parameters()), list(self.layers[1:].parameters())
            return [{"params": first, "lr_scale": 0.1}, {"params": rest, "lr_scale": 1.0}]

    net = TwoRates(4, (3, 3))
    groups = [{"params": g["params"], "lr": 0.1 * g["lr_scale"]} for g in net.parameter_groups()]
    before = [p.clone() for p in net.parameters()]
    optimizer = torch.optim.SGD(groups)
    net(torch.rand(1, 3, 8, 8)).sum().backward()
    optimizer.step()
    for i, (old, new) in enumerate(zip(before, net.parameters(), strict=True)):
        torch.testing.assert_close(old - new, (0.01 if i < 2 else 0.1) * new.grad, rtol=1e-3, atol=1e-6)


# ------------------------------------------------------------------------------------------------------ feature pyramid


@pytest.mark.parametrize("levels", [1, 2, 4])
@pytest.mark.parametrize("size", [(16, 16), (7, 12), (5, 3), (1, 1)])
def test_pyramid_keeps_the_shape(levels, size):
    net, x = FeaturePyramid(6, levels), torch.randn(2, 6, *size, requires_grad=True)
    out = net(x)
    assert out.shape == x.shape
    out.square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in net.parameters())


def test_pyramid_without_levels_is_the_identity():
    x = torch.randn(2, 6, 5, 7)
    assert FeaturePyramid(6, 0)(x) is x


def test_pyramid_equals_its_formula():
    net, x = FeaturePyramid(3, 2), torch.randn(1, 3, 8, 8)
    half = net.down[0](x).relu()
    quarter = net.down[1](half).relu()
    double = lambda x: x.repeat_interleave(2, -1).repeat_interleave(2, -2)
    half = half + net.up[0](double(quarter)).relu()
    torch.testing.assert_close(net(x), x + net.up[1](double(half)).relu())
    assert convolutions(net) == 2 * [("conv", 3, 3, 3, 2)] + 2 * [("conv", 3, 3, 3, 1)]


@pytest.mark.parametrize("levels, reaches", [(1, False), (2, False), (4, True)])
def test_enough_levels_reach_the_opposite_corner(levels, reaches):
    torch.manual_seed(1)
    net, x = FeaturePyramid(16, levels).double(), torch.randn(1, 16, 16, 16, dtype=torch.double)
    changed = x.clone()
    changed[..., 0, 0] += 5
    far = (net(changed) - net(x))[..., -1, -1].abs().max()
    assert (far > 0) == reaches


@pytest.mark.parametrize("encoder", [CNNEncoder, ResNetEncoder])
def test_an_encoder_ends_with_its_pyramid(encoder):
    with_pyramid, x = encoder(8, (3, 3), pyramid_levels=3), torch.randn(2, 3, 16, 16)
    assert len(with_pyramid.pyramid.down) == 3
    without = encoder(8, (3, 3))
    without.load_state_dict({k: v for k, v in with_pyramid.state_dict().items() if not k.startswith("pyramid")})
    torch.testing.assert_close(with_pyramid(x), with_pyramid.pyramid(without(x)))
