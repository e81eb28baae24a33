"""Decoders of features. References are formulas written out, and torch's own transformer layers."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from cutslots.modules.feature_decoders import FeatureDecoder, MLPDecoder, TransformerDecoder

B, K, D, C, GRID, IMAGE = 2, 5, 16, 12, (3, 4), (18, 24)
N = GRID[0] * GRID[1]
DECODERS = {
    "mlp": lambda: MLPDecoder(D, IMAGE, C, GRID, hidden_dims=(20, 14)),
    "shallow mlp": lambda: MLPDecoder(D, IMAGE, C, GRID, hidden_dims=(20,)),
    "transformer": lambda: TransformerDecoder(D, IMAGE, C, GRID, num_layers=2, num_heads=3),
}


@pytest.fixture(params=DECODERS)
def decoder(request):
    torch.manual_seed(0)
    return DECODERS[request.param]().double()


@pytest.fixture
def slots():
    return torch.randn(B, K, D, dtype=torch.float64)


@pytest.fixture
def features():
    return torch.randn(B, C, *GRID, dtype=torch.float64)


def test_shapes_and_masks(decoder, slots, features):
    masks, reconstruction, target = decoder(slots, features)
    assert masks.shape == (B, K, *IMAGE) and reconstruction.shape == (B, C, *GRID) and target is features
    torch.testing.assert_close(masks.sum(1), torch.ones(B, *IMAGE, dtype=torch.float64))
    assert (masks >= 0).all() and decoder.image_size == IMAGE


def test_masks_are_those_of_patches_upsampled(decoder, slots, features):
    patch_masks, patches = decoder.decode_patches(slots, features.flatten(2).mT)
    assert patch_masks.shape == (B, K, N) and patches.shape == (B, N, C)
    expected = F.interpolate(patch_masks.reshape(B, K, *GRID), IMAGE, mode="bilinear")
    output = decoder(slots, features)
    torch.testing.assert_close(output.masks, expected)
    torch.testing.assert_close(output.reconstruction.flatten(2).mT, patches)


def test_slots_are_interchangeable(decoder, slots, features):
    order = torch.randperm(K)
    one, other = decoder(slots, features), decoder(slots[:, order], features)
    torch.testing.assert_close(one.masks[:, order], other.masks)
    torch.testing.assert_close(one.reconstruction, other.reconstruction)


def test_every_parameter_gets_a_gradient(decoder, slots, features):
    output = decoder(slots.requires_grad_(), features)
    ((output.reconstruction - features).square().mean() + output.masks[:, 0].square().mean()).backward()
    for name, value in decoder.named_parameters():
        assert value.grad is not None and value.grad.isfinite().all(), name
        assert value.grad.any(), name
    assert slots.grad.any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(decoder, slots, features, dtype):
    output = decoder.to(dtype)(slots.float(), features.to(dtype))
    assert all(x.dtype == torch.float32 for x in output)
    torch.testing.assert_close(output.masks.sum(1), torch.ones(B, *IMAGE))


def test_features_of_another_shape_are_an_error(decoder, slots):
    with pytest.raises(ValueError, match=r"^features have shape \(2, 12, 4, 3\); expected \(B, 12, 3, 4\)$"):
        decoder(slots, torch.randn(2, C, 4, 3))


# ----------------------------------------------------------------------------------------------------------------- mlp


@pytest.mark.parametrize("name", ["mlp", "shallow mlp"])
def test_mlp_is_an_mlp_of_slot_and_position(name, slots, features):
    """Layers on all slots and patches, the last with a channel for the logit, as DINOSAUR has it."""
    decoder = DECODERS[name]().double()
    x = slots[:, :, None] + decoder.position  # (B, K, N, D)
    x = decoder.hidden(decoder.input(x))
    patches, alpha = decoder.features(x), decoder.logit(x).softmax(1)
    output = decoder(slots, features)
    torch.testing.assert_close(output.reconstruction.flatten(2).mT, (alpha * patches).sum(1))
    expected = F.interpolate(alpha[..., 0].reshape(B, K, *GRID), IMAGE, mode="bilinear")
    torch.testing.assert_close(output.masks, expected)


def test_layers_of_the_mlp():
    decoder = MLPDecoder(D, IMAGE, C, GRID)
    sizes = [(m.in_features, m.out_features) for m in decoder.modules() if isinstance(m, nn.Linear)]
    assert sizes == [(D, 1024), (1024, 1024), (1024, 1024), (1024, 1), (1024, C)]
    assert decoder.position.shape == (N, D) and sum(isinstance(m, nn.ReLU) for m in decoder.modules()) == 3


def test_mlp_does_not_see_the_target(slots, features):
    decoder = DECODERS["mlp"]().double()
    one, other = decoder(slots, features), decoder(slots, -features)
    assert one.masks.equal(other.masks) and one.reconstruction.equal(other.reconstruction)


def test_mlp_without_layers_is_an_error():
    with pytest.raises(ValueError, match=r"^hidden_dims is \(\); expected at least one hidden layer$"):
        MLPDecoder(D, IMAGE, C, GRID, hidden_dims=())


# --------------------------------------------------------------------------------------------------------- transformer


def torch_layer(layer):
    """Return torch's own layer with the same weights."""
    made = nn.TransformerDecoderLayer(C, 3, 4 * C, 0.0, "relu", batch_first=True, norm_first=True).double()
    with torch.no_grad():
        for attention in (made.self_attn, made.multihead_attn):
            attention.in_proj_bias.zero_()
            attention.out_proj.bias.zero_()
        made.self_attn.in_proj_weight.copy_(layer.patch_qkv.weight)
        made.self_attn.out_proj.weight.copy_(layer.patch_out.weight)
        made.multihead_attn.in_proj_weight.copy_(torch.cat([layer.slot_q.weight, layer.slot_kv.weight]))
        made.multihead_attn.out_proj.weight.copy_(layer.slot_out.weight)
    made.linear1.load_state_dict(layer.mlp[0].state_dict())
    made.linear2.load_state_dict(layer.mlp[2].state_dict())
    for norm, ours in zip((made.norm1, made.norm2, made.norm3), layer.norms, strict=True):
        norm.load_state_dict(ours.state_dict())
    return made


def test_transformer_consists_of_the_layers_of_torch(slots, features):
    decoder = DECODERS["transformer"]().double()
    target = features.flatten(2).mT
    x = torch.cat([decoder.first.expand(B, 1, -1), target[:, :-1]], 1)
    x, memory = decoder.input(x) + decoder.position, decoder.memory(slots)
    causal = nn.Transformer.generate_square_subsequent_mask(N, dtype=torch.float64)
    for layer in map(torch_layer, decoder.layers):
        before, x = x, layer(x, memory, tgt_mask=causal)
    query = layer.norm2(before + layer.self_attn(*[layer.norm1(before)] * 3, attn_mask=causal)[0])
    attention = layer.multihead_attn(query, memory, memory)[1]  # averaged over heads
    masks, patches = decoder.decode_patches(slots, target)
    torch.testing.assert_close(patches, decoder.output(x))
    torch.testing.assert_close(masks.mT, attention)


def test_transformer_sees_the_patches_before(slots, features):
    decoder = DECODERS["transformer"]().double()
    target = features.flatten(2).mT
    for n in (0, 5, N - 1):
        changed = target.clone()
        changed[:, n] += 1
        difference = (decoder.decode_patches(slots, changed)[1] - decoder.decode_patches(slots, target)[1]).abs()
        assert not difference[:, : n + 1].any() and (difference[:, n + 1 :].amax(-1) > 0).all()


def test_heads_divide_the_channels():
    message = r"^decoder.num_heads is 5; expected a divisor of 12, the channels of the encoder$"
    with pytest.raises(ValueError, match=message):
        TransformerDecoder(D, IMAGE, C, GRID, num_heads=5)


def test_base_class_leaves_patches_to_subclasses(slots, features):
    with pytest.raises(NotImplementedError):
        FeatureDecoder(IMAGE, C, GRID)(slots, features)
