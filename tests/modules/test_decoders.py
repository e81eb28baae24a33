import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from cutslots.modules.decoders import (
    BROADCAST_SIZE,
    DecoderOutput,
    MixtureDecoder,
    PixelShuffleDecoder,
    SpatialBroadcastDecoder,
    broadcast_grid,
)
from cutslots.modules.position import FULL_IMAGE
from tests.modules.layers import convolutions, count_modules

DECODERS = [SpatialBroadcastDecoder, PixelShuffleDecoder]
POWERS_OF_TWO = [16, 32, 64, 128]
SIZES = [(n, n) for n in POWERS_OF_TWO] + [(224, 224), (96, 160), (100, 37), (9, 9), (8, 8), (8, 100), (65, 64)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("decoder", DECODERS)
def test_components_are_colors_and_a_logit_for_every_slot_and_pixel(decoder, size):
    net = decoder(12, size, channels=(4,))
    assert net.image_size == size
    assert net.components(torch.randn(2, 3, 12)).shape == (2, 3, 4, *size)


@settings(max_examples=25, deadline=None)
@given(st.integers(8, 150), st.integers(8, 150))
def test_any_image_size(height, width):
    for decoder in DECODERS:
        output = decoder(5, (height, width), channels=(2,))(torch.randn(1, 2, 5))
        assert output.masks.shape == (1, 2, height, width)
        assert output.slot_reconstructions.shape == (1, 2, 3, height, width)


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("size", [(32, 32), (21, 34)])
def test_output_is_the_mixture_of_components(decoder, size):
    net, slots = decoder(12, size, channels=(8,)), torch.randn(2, 3, 12)
    output = net(slots)
    assert isinstance(output, DecoderOutput)
    colors, logits = net.components(slots).split([3, 1], dim=2)
    masks = logits[:, :, 0].exp() / logits[:, :, 0].exp().sum(1, keepdim=True)
    torch.testing.assert_close(output.masks, masks)
    torch.testing.assert_close(output.masks.sum(1), torch.ones(2, *size))
    torch.testing.assert_close(output.slot_reconstructions, (colors + 1) / 2)
    torch.testing.assert_close(output.reconstruction, sum(masks[:, k, None] * (colors[:, k] + 1) / 2 for k in range(3)))


@pytest.mark.parametrize("decoder", DECODERS)
def test_slots_are_decoded_independently(decoder):
    net, slots = decoder(12, (32, 32), channels=(8,)), torch.randn(2, 3, 12)
    alone = torch.cat([net.components(slots[:, k : k + 1]) for k in range(3)], 1)
    torch.testing.assert_close(net.components(slots), alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_masks_and_colors_of_half_precision_are_float32(decoder, dtype):
    net = decoder(12, (16, 16), channels=(8,)).to(dtype)
    output = net(torch.randn(2, 3, 12).to(dtype))
    assert all(x.dtype == torch.float32 for x in output)
    torch.testing.assert_close(output.masks.sum(1), torch.ones(2, 16, 16))


def test_a_decoder_needs_components_only():
    class Constant(MixtureDecoder):
        image_size = (4, 5)

        def components(self, slots):
            return torch.tensor([1.0, -1.0, 0.0, 7.0])[:, None, None].expand(*slots.shape[:2], 4, 4, 5)

    output = Constant()(torch.randn(2, 4, 3))
    assert torch.equal(output.masks, torch.full((2, 4, 4, 5), 0.25))
    assert output.reconstruction[1, :, 2, 3].tolist() == [1.0, 0.0, 0.5]


# -------------------------------------------------------------------------------------------------- the broadcast grid


@pytest.mark.parametrize("size", [*POWERS_OF_TWO, 256, 1024, 2048])
def test_the_grid_of_a_power_of_two_is_8x8(size):
    doublings, grid = broadcast_grid((size, size))
    assert grid == (8, 8) and size == 8 * 2**doublings


@pytest.mark.parametrize(
    "size, doublings, grid",
    [
        ((224, 224), 5, (7, 7)),
        ((96, 160), 4, (6, 10)),
        ((100, 37), 4, (7, 3)),
        ((9, 9), 1, (5, 5)),
        ((8, 8), 1, (4, 4)),
        ((64, 128), 4, (4, 8)),
        ((8, 2048), 8, (1, 8)),
    ],
)
def test_grids_of_other_sizes(size, doublings, grid):
    assert broadcast_grid(size) == (doublings, grid)


@given(st.integers(8, 2048), st.integers(8, 2048))
def test_the_grid_is_the_smallest_whose_doublings_cover_the_image(height, width):
    doublings, grid = broadcast_grid((height, width))
    assert doublings >= 1
    for side, cells in zip((height, width), grid, strict=True):
        assert (cells - 1) * 2**doublings < side <= cells * 2**doublings
    assert max(grid) <= 1.5 * BROADCAST_SIZE
    assert max(grid) >= BROADCAST_SIZE / 2**0.5 or doublings == 1


@pytest.mark.parametrize("size", [(33, 40), (9, 9), (30, 32)])
def test_the_image_is_the_center_of_what_is_decoded(size):
    net = PixelShuffleDecoder(6, size, channels=(4,))
    slots = torch.randn(1, 2, 6)
    uncropped = net.upsample(net._broadcast(slots)).unflatten(0, (1, 2))
    top, left = ((a - b) // 2 for a, b in zip(uncropped.shape[3:], size, strict=True))
    expected = uncropped[..., top : top + size[0], left : left + size[1]]
    assert torch.equal(net.components(slots), expected)


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("size", [24, 0, (0, 5), (5, -1), (8,), (8, 8, 8), (8.0, 8.0), "88"])
def test_bad_image_sizes(decoder, size):
    with pytest.raises(ValueError, match=r"expected \(H, W\), two integers of at least 1$") as caught:
        decoder(8, size)
    assert f"size is {size!r}" in str(caught.value)


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("channels", [(), (0,), (8, -1)])
def test_bad_channels(decoder, channels):
    with pytest.raises(ValueError, match="expected at least one positive integer") as caught:
        decoder(8, (32, 32), channels=channels)
    assert f"channels is {channels!r}" in str(caught.value)


# -------------------------------------------------------------------------------------------------------------- layers


def test_decoder_of_the_paper():
    net = SpatialBroadcastDecoder(64, (128, 128))
    assert convolutions(net) == [
        *4 * [("transposed", 64, 64, 5, 2)],  # 8 to 16, 32, 64, 128
        ("conv", 64, 64, 5, 1),
        ("conv", 64, 4, 3, 1),
    ]
    assert count_modules(net, nn.ReLU) == 5 and isinstance(net.layers[-1], nn.Conv2d)


@pytest.mark.parametrize("size, skipped", [((128, 128), 1), ((64, 64), 2), ((40, 64), 1), ((100, 37), 3)])
def test_skipped_doublings(size, skipped):
    """The literal network without these layers, upsampled. The layers have their weights, which are not trained."""
    net, slots = SpatialBroadcastDecoder(6, size, (4,), skipped_doublings=skipped), torch.randn(2, 3, 6)
    *upsampling, extra, activation, last = net.layers
    x = net._broadcast(slots)
    for layer in upsampling[: len(upsampling) - 2 * skipped]:
        x = layer(x)
    x = nn.functional.interpolate(last(activation(extra(x))), scale_factor=2**skipped, mode="bilinear")
    top, left = ((a - b) // 2 for a, b in zip(x.shape[2:], size, strict=True))
    expected = x[..., top : top + size[0], left : left + size[1]].unflatten(0, (2, 3))
    torch.testing.assert_close(net.components(slots), expected)
    net.components(slots).sum().backward()
    frozen = [name for name, p in net.named_parameters() if p.grad is None]
    end = len(upsampling)
    expected = [f"layers.{i}.{kind}" for i in range(end - 2 * skipped, end, 2) for kind in ("weight", "bias")]
    assert frozen == expected and not any(dict(net.named_parameters())[name].requires_grad for name in frozen)


def test_skipped_layers_upsample_bilinearly():
    layer, x = SpatialBroadcastDecoder(4, (64, 64), (4,), skipped_doublings=1).layers[4], torch.randn(2, 4, 9, 12)
    expected = nn.functional.interpolate(x, scale_factor=2, mode="bilinear")
    inner = (..., slice(1, -1), slice(1, -1))  # at borders a transposed convolution sees zeros
    torch.testing.assert_close(layer(x)[inner], expected[inner])


@torch.no_grad()
def test_a_decoder_that_skips_less_begins_with_the_same_images():
    """A pointwise last layer commutes with upsampling: images are the same but at borders. Wider kernels are close."""
    coarse, fine = (SpatialBroadcastDecoder(8, (64, 64), (8,), 0, skipped_doublings=n) for n in (1, 0))
    kernel = coarse.layers[-1].weight
    kernel[:, :, [0, 2]] = 0
    kernel[:, :, :, [0, 2]] = 0
    fine.load_state_dict(coarse.state_dict())
    slots, inner = 10 * torch.randn(2, 3, 8), (..., slice(6, -6), slice(6, -6))
    torch.testing.assert_close(fine.components(slots)[inner], coarse.components(slots)[inner])


@pytest.mark.parametrize("skipped", [-1, 3, 4])
def test_too_many_skipped_doublings(skipped):
    expected = rf"^skipped_doublings is {skipped}; expected an integer from 0 to 2 for images of \(64, 64\)$"
    with pytest.raises(ValueError, match=expected):
        SpatialBroadcastDecoder(8, (64, 64), skipped_doublings=skipped)


def test_skipped_doublings_have_equal_channels():
    given = "skipped_doublings is 1, and channels of the doublings are [8, 8, 4]"
    with pytest.raises(ValueError, match=re.escape(f"{given}; expected equal channels from number 2 on")):
        SpatialBroadcastDecoder(8, (64, 64), (8, 8, 4), skipped_doublings=1)
    net = SpatialBroadcastDecoder(8, (64, 64), (8, 4), skipped_doublings=1)
    assert net.components(torch.randn(1, 2, 8)).shape == (1, 2, 4, 64, 64)


@torch.no_grad()
def test_the_fused_head_has_the_layers_that_are_left():
    net = SpatialBroadcastDecoder(8, (64, 64), (16,), skipped_doublings=1)
    layers = net.layers[:4] + net.layers[6:]
    x = layers[:2](net._broadcast(torch.randn(1, 2, 8)))
    torch.testing.assert_close(net.head.forward_fused(x, layers[2:]), layers[2:](x), rtol=1e-4, atol=1e-5)


def test_the_last_channels_are_repeated():
    spatial = SpatialBroadcastDecoder(10, (64, 64), channels=(8, 6), extra_layers=0)
    assert [c[1:3] for c in convolutions(spatial)] == [(10, 8), (8, 6), (6, 6), (6, 4)]
    shuffle = PixelShuffleDecoder(10, (128, 128), channels=(8, 6))
    assert [c[1:3] for c in convolutions(shuffle)] == [(10, 32), (8, 24), (6, 24), (6, 16)]


@pytest.mark.parametrize("size", POWERS_OF_TWO)
def test_pixel_shuffle_decoder_has_no_convolution_at_full_resolution(size):
    net = PixelShuffleDecoder(12, (size, size))
    seen = []
    for layer in net.layers:
        if isinstance(layer, nn.Conv2d):
            layer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].shape[-1]))
    net(torch.randn(1, 1, 12))
    assert seen == [n for n in (8, 16, 32, 64) if n < size]
    assert all(c[3:] == (3, 1) for c in convolutions(net)) and isinstance(net.layers[-1], nn.PixelShuffle)


@pytest.mark.parametrize("decoder", DECODERS)
def test_parameter_groups(decoder):
    net = decoder(12, (16, 16), channels=(8,))
    net.position.requires_grad_(False)
    (group,) = net.parameter_groups()
    assert group["lr_scale"] == 1.0 and {id(p) for p in group["params"]} == {id(p) for p in net.layers.parameters()}


# --------------------------------------------------------------------------------------------------- relative positions


@pytest.mark.parametrize("decoder", DECODERS)
def test_what_a_slot_reconstructs_moves_with_its_position(decoder):
    """One cell of the 8x8 grid is 4 of 32 pixels. The border, where padding has an effect, is left out."""
    net, margin = decoder(12, (32, 32), channels=(8,), position_dim=3).double(), 9
    here, down, left = torch.randn(12, dtype=torch.double).repeat(3, 1)
    for slot, y, x in ((here, 0.5, 0.4), (down, 0.5 + 1 / 7, 0.4), (left, 0.5, 0.4 - 1 / 7)):
        slot[-3:] = torch.tensor([y, x, 0.2])
    with torch.no_grad():
        out = net.components(torch.stack([here, down, left])[None])[0, ..., margin:-margin, margin:-margin]
    torch.testing.assert_close(out[1, :, 4:], out[0, :, :-4])
    torch.testing.assert_close(out[2, :, :, :-4], out[0, :, :, 4:])
    change = (out[0, :, 4:] - out[0, :, :-4]).abs().max()
    assert change > 1e-4, "the image is not constant"


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("size", [(16, 16), (12, 20)])
def test_a_slot_with_the_position_of_the_image_is_decoded_as_one_without_a_position(decoder, size):
    plain, relative = decoder(9, size, channels=(8,)), decoder(12, size, channels=(8,), position_dim=3)
    relative.load_state_dict(plain.state_dict())
    slots = torch.randn(2, 3, 9)
    full_image = torch.cat([slots, torch.tensor(FULL_IMAGE).expand(2, 3, 3)], -1)
    torch.testing.assert_close(relative.components(full_image), plain.components(slots), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("decoder", DECODERS)
def test_positions_get_gradients_from_the_decoder(decoder):
    slots = (torch.rand(2, 3, 12) + 0.1).requires_grad_()
    decoder(12, (16, 16), channels=(8,), position_dim=3).components(slots).square().sum().backward()
    assert slots.grad.isfinite().all() and (slots.grad[..., -3:] != 0).all()
