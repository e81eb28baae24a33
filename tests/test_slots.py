import pytest
import torch

from cutslots.networks import EVERYWHERE, places
from cutslots.slots import CutSlots, SlotAttention, SoftmaxSlots, VolumeSlots
from tests.conftest import DEVICES

KINDS = [CutSlots, SoftmaxSlots, SlotAttention]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [(16, 16), (7, 12), (1, 5)])
def test_shapes_and_masks(device, kind, size):
    module = kind(in_channels=8, slots=5, size=size, slot_dim=24).to(device)
    x = torch.randn(3, 8, *size, device=device, requires_grad=True)
    slots, masks = module(x)
    assert slots.shape == (3, 5, 24) and masks.shape == (3, 5, *size)
    torch.testing.assert_close(masks.sum(1), torch.ones(3, *size, device=device))
    (slots.square().sum() + masks.square().sum()).backward()
    assert torch.isfinite(x.grad).all() and all(p.grad is not None for p in module.parameters())


@pytest.mark.parametrize("pool", ["mean", "weighted"])
@pytest.mark.parametrize("streams", [1, 3])
def test_algorithm_2_written_out(pool, streams):
    """Pooling commutes with the last layer of the feature MLP; written out, it does not, and gives the same slots."""
    module = CutSlots(8, 4, (6, 9), slot_dim=10, pool=pool, streams=streams).double()
    x = torch.randn(2, 8, 6, 9, dtype=torch.double)
    slots, masks = module(x)
    coded = x + module.position.linear(module.position.grid).permute(2, 0, 1)
    expected = 0
    for stream in module.streams:
        features = stream.last(stream.before(coded.permute(0, 2, 3, 1))).permute(0, 3, 1, 2)
        masked = masks[:, :, None] * features[:, None]  # r_i of algorithm 1
        share = 1.0 if pool == "mean" else masks.mean((2, 3))[..., None]
        r = masked.mean((3, 4)) / share
        expected = expected + (stream.after(r) if streams == 1 else r + stream.after(r))
    torch.testing.assert_close(slots, expected, rtol=1e-4, atol=1e-4 if pool == "weighted" else 1e-9)


def test_cut_slots_gradient():
    module = CutSlots(3, 3, (4, 5), slot_dim=4, hidden=6, weight_maps=4).double()
    x = torch.randn(1, 3, 4, 5, dtype=torch.double, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: module(x), x)


def test_slot_attention_written_out():
    """The published algorithm, step by step, on the same noise."""
    module = SlotAttention(8, 4, (5, 6), slot_dim=12).double()
    x = torch.randn(2, 8, 5, 6, dtype=torch.double)
    torch.manual_seed(3)
    with torch.no_grad():
        slots, masks = module(x)
    torch.manual_seed(3)
    noise = torch.randn(2, 4, 12)
    coded = x + module.position.linear(module.position.grid).permute(2, 0, 1)
    inputs = module.norm_inputs(module.features(coded.flatten(2).transpose(1, 2)))
    k, v = module.key_value(inputs).split(12, dim=-1)
    s = module.mean + module.log_scale.exp() * noise
    for _ in range(3):
        before = s
        q = module.query(module.norm_slots(s))
        attention = torch.softmax(torch.einsum("bkd,bnd->bnk", q, k) / 12**0.5, dim=-1)
        weights = (attention + 1e-8) / (attention + 1e-8).sum(1, keepdim=True)
        update = torch.einsum("bnk,bnd->bkd", weights, v)
        s = torch.stack([module.gru(update[:, i], before[:, i]) for i in range(4)], 1)
        s = s + module.mlp(s)
    torch.testing.assert_close(slots, s, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(masks.flatten(2), attention.mT.float(), rtol=1e-5, atol=1e-5, check_dtype=False)


def test_slot_attention_draws_from_torchs_generator():
    module, x = SlotAttention(8, 4, (5, 6)), torch.randn(2, 8, 5, 6)
    one, other = module(x).slots, module(x).slots
    assert not torch.equal(one, other)
    torch.manual_seed(0)
    first = module(x).slots
    torch.manual_seed(0)
    assert torch.equal(first, module(x).slots)


@pytest.mark.parametrize("kind", KINDS)
def test_compiles(kind):
    module, x = kind(8, 3, (8, 8), slot_dim=8), torch.randn(2, 8, 8, 8)
    torch.manual_seed(0)
    expected = module(x)
    torch.manual_seed(0)
    with torch.no_grad():
        got = torch.compile(module, backend="aot_eager", fullgraph=True)(x)
    torch.testing.assert_close(got.slots, expected.slots)
    torch.testing.assert_close(got.masks, expected.masks)


def test_bad_arguments():
    with pytest.raises(ValueError, match="pool is 'max'; expected 'mean' or 'weighted'"):
        CutSlots(8, 3, (8, 8), pool="max")
    for kind in KINDS:
        with pytest.raises(ValueError, match=r"features have shape \(2, 8, 8, 7\); expected \(B, 8, 8, 8\)"):
            kind(8, 3, (8, 8))(torch.randn(2, 8, 8, 7))


# -------------------------------------------------------------------------------------------------------- placed slots

PLACED = [
    (CutSlots, {}),
    (CutSlots, {"background": "terminals", "pool": "weighted"}),
    (CutSlots, {"background": "none"}),
    (CutSlots, {"streams": 2}),
    (SoftmaxSlots, {}),
    (SoftmaxSlots, {"background": "none"}),
    (SlotAttention, {}),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind, options", PLACED)
@pytest.mark.parametrize("size", [(16, 16), (7, 12)])
def test_placed_slots_end_with_their_places(device, kind, options, size):
    module = kind(8, 5, size, slot_dim=24, placed=True, **options).to(device)
    slots, masks = module(torch.randn(3, 8, *size, device=device))
    assert slots.shape == (3, 5, 24) and masks.shape == (3, 5, *size)
    expected = places(masks)
    if kind is not SlotAttention and options.get("background") != "none":
        assert (slots[:, 0, -3:] == slots.new_tensor(EVERYWHERE)).all(), "the ground is everywhere"
        assert not torch.allclose(expected[:, 0], slots.new_tensor(EVERYWHERE), atol=1e-6), "though its mask is not"
        slots, expected = slots[:, 1:], expected[:, 1:]
    assert torch.equal(slots[..., -3:], expected)


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_placed_slot_says_besides(kind):
    """Its other numbers are those of a shorter slot that has no place."""
    placed, plain = kind(8, 4, (6, 6), slot_dim=11, placed=True), kind(8, 4, (6, 6), slot_dim=8)
    plain.load_state_dict(placed.state_dict())
    x, found = torch.randn(2, 8, 6, 6), []
    for module in (placed, plain):
        torch.manual_seed(0)
        found.append(module(x))
    assert torch.equal(found[0].masks, found[1].masks) and torch.equal(found[0].slots[..., :-3], found[1].slots)


@pytest.mark.parametrize("kind", [CutSlots, SoftmaxSlots])
def test_places_alone_teach_the_weight_network(kind):
    module, x = kind(8, 4, (8, 8), slot_dim=12, placed=True), torch.randn(2, 8, 8, 8)
    net = dict(module.partition.net.named_parameters())
    place = module(x).slots[..., -3:]
    ground = torch.autograd.grad(place[:, 0].sum(), list(net.values()), retain_graph=True)
    assert not any(gradient.any() for gradient in ground), "the ground's is no function of its mask"
    for k in range(1, 4):
        gradients = torch.autograd.grad(place[:, k].square().sum(), list(net.values()), retain_graph=True)
        for name, gradient in zip(net, gradients, strict=True):
            assert gradient.isfinite().all() and gradient.any(), (k, name)


def test_places_alone_teach_slot_attention():
    module = SlotAttention(8, 4, (8, 8), slot_dim=12, placed=True)
    module(torch.randn(2, 8, 8, 8)).slots[..., -3:].square().sum().backward()
    for layer in (module.query, module.key_value, module.position.linear):
        assert layer.weight.grad.isfinite().all() and layer.weight.grad.any()


def test_placed_cut_slots_gradient():
    module = CutSlots(3, 3, (4, 5), slot_dim=7, hidden=6, weight_maps=4, placed=True).double()
    x = torch.randn(1, 3, 4, 5, dtype=torch.double, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: module(x), x)


@pytest.mark.parametrize("kind", KINDS)
def test_places_are_whole_under_autocast(kind):
    module, x = kind(8, 4, (16, 16), slot_dim=16, placed=True), torch.randn(2, 8, 16, 16)
    with torch.autocast("cpu", torch.bfloat16):
        slots, masks = module(x)
    assert slots.dtype == torch.float32 and torch.equal(slots[:, 1:, -3:], places(masks)[:, 1:])
    centre = (places(masks)[:, 1:, :2] * 256).frac()
    assert centre.any(), "not rounded to 8 bits"


@pytest.mark.parametrize("kind", KINDS)
def test_placed_slots_compile(kind):
    module, x = kind(8, 3, (8, 8), slot_dim=8, placed=True), torch.randn(2, 8, 8, 8)
    torch.manual_seed(0)
    expected = module(x).slots
    torch.manual_seed(0)
    with torch.no_grad():
        got = torch.compile(module, backend="aot_eager", fullgraph=True)(x).slots
    torch.testing.assert_close(got, expected)


def test_slots_of_clips_are_placed_in_every_frame():
    module = VolumeSlots(8, 4, (6, 9), slot_dim=12, placed=True, frames=2)
    slots, masks = module(torch.randn(2, 3, 8, 6, 9))
    assert slots.shape == (2, 3, 4, 12) and (slots[:, :, 0, -3:] == torch.tensor(EVERYWHERE)).all()
    for t in range(3):
        torch.testing.assert_close(slots[:, t, 1:, -3:], places(masks[:, t])[:, 1:])
