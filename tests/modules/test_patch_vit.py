"""The encoder `patch-vit`. The reference is torch's own transformer."""

import math

import pytest
import torch
from torch import nn

from cutslots.modules.encoders import ENCODERS
from cutslots.modules.patch_vit import PatchViTConfig, PatchViTEncoder, TransformerLayer, sine_positions


def test_a_layer_is_that_of_torch():
    ours = TransformerLayer(12, 3).double()
    theirs = nn.TransformerEncoderLayer(12, 3, 48, 0.0, "gelu", batch_first=True, norm_first=True).double()
    pairs = [
        (theirs.self_attn.in_proj_weight, ours.qkv.weight),
        (theirs.self_attn.in_proj_bias, ours.qkv.bias),
        (theirs.self_attn.out_proj.weight, ours.out.weight),
        (theirs.self_attn.out_proj.bias, ours.out.bias),
    ]
    for a, b in ((theirs.linear1, ours.mlp[0]), (theirs.linear2, ours.mlp[2])):
        pairs += [(a.weight, b.weight), (a.bias, b.bias)]
    with torch.no_grad():
        for norm, own in ((theirs.norm1, ours.norms[0]), (theirs.norm2, ours.norms[1])):
            own.weight.uniform_(0.5, 2)
            pairs += [(norm.weight, own.weight), (norm.bias, own.bias)]
        for target, source in pairs:
            target.copy_(source)
    x = torch.randn(2, 7, 12, dtype=torch.float64)
    torch.testing.assert_close(ours(x), theirs(x))


def test_positions_written_out():
    positions = sine_positions((3, 5), 8)
    assert positions.shape == (15, 8)
    for y in range(3):
        for x in range(5):
            angles = [y, y / math.sqrt(10_000), x, x / math.sqrt(10_000)]
            expected = [math.sin(a) for a in angles] + [math.cos(a) for a in angles]
            assert positions[5 * y + x].tolist() == pytest.approx(expected, abs=1e-6)
    assert len(positions.unique(dim=0)) == 15


@pytest.mark.parametrize("size, grid", [((8, 12), (2, 3)), ((16, 4), (4, 1))])
def test_features_are_a_grid_of_patches(size, grid):
    encoder = PatchViTEncoder(16, 2, 2, patch_size=4).eval()
    x = torch.randn(2, 3, *size)
    features = encoder(x)
    assert features.shape == (2, 16, *grid) and encoder.out_size(size) == grid and encoder.out_channels == 16
    tokens = [
        encoder.patches(x[:, :, 4 * i : 4 * i + 4, 4 * j : 4 * j + 4]) for i in range(grid[0]) for j in range(grid[1])
    ]
    tokens = torch.cat([token.flatten(2) for token in tokens], 2).mT + sine_positions(grid, 16)
    for layer in encoder.layers:
        tokens = layer(tokens)
    torch.testing.assert_close(features.flatten(2).mT, encoder.norm(tokens))


def test_all_weights_get_a_gradient():
    encoder = PatchViTEncoder(8, 1, 2, 4)
    encoder(torch.randn(1, 3, 8, 8)).square().sum().backward()  # a sum would be constant after the norm
    assert all(p.grad is not None for p in encoder.parameters())


def test_sizes_that_do_not_fit():
    with pytest.raises(ValueError, match=r"^image_size is \(9, 8\); expected multiples of 4 \(encoder.patch_size\)$"):
        PatchViTEncoder(8, 1, 2, 4).out_size((9, 8))
    with pytest.raises(ValueError, match=r"^encoder.channels is 10; expected a multiple of 4 and of 2 heads$"):
        PatchViTEncoder(10, 1, 2, 4)


def test_config_builds_the_encoder():
    assert ENCODERS.build(PatchViTConfig(channels=8, num_layers=3, num_heads=2)).layers[2].num_heads == 2
