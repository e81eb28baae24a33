from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cutslots.models import discovery
from cutslots.models.pair_discovery import PairDiscovery, PairDiscoveryConfig
from cutslots.models.tracker import assignment
from cutslots.modules.decoders import PixelShuffleDecoder
from cutslots.modules.encoders import CNNEncoder
from cutslots.modules.slots import CutSlots
from cutslots.programs.matching import Matching, match_slots
from tests.conftest import DEVICES
from tests.models.configs import (
    IMAGES,
    PAIRS,
    SLOTS,
    SPACETIME_SLOTS,
    assert_same,
    assert_trains,
    clips,
    randomize_zeros,
    run_seeded,
    small_model,
)

HALF_AREA = 0.03


def build(config):
    """Return a model with random weights."""
    return randomize_zeros(discovery.build(config))


seeds = st.integers(0, 2**32 - 1)


@pytest.mark.parametrize("slots", SLOTS)
@pytest.mark.parametrize("frame", [0, 1])
def test_the_loss_of_one_frame_reaches_both(slots, frame):
    model, image = small_model("pairs", slots=SLOTS[slots]), clips().requires_grad_()
    assert_trains(model, (model(image).reconstruction - image.detach())[:, frame].square().mean())
    assert image.grad[:, 0].any() and image.grad[:, 1].any()


def test_the_matching_alone_carries_a_gradient():
    """Without the MLP between the frames, frame 2 depends on frame 1 through the matching weights only."""
    model, image = build(replace(PAIRS, pairing="separate")), clips().requires_grad_()
    for value in model.pairing.motion[-1].parameters():
        torch.nn.init.zeros_(value)
    output = model(image)
    first, second = ((output.reconstruction - image.detach())[:, t].square().mean() for t in (0, 1))
    (grad,) = torch.autograd.grad(second, image, retain_graph=True)
    assert grad[:, 0].any() and grad[:, 1].any()
    (grad,) = torch.autograd.grad(first, image)
    assert grad[:, 0].any() and not grad[:, 1].any(), "frame 1 is reconstructed from its own slots"


def joint(pairing, s, r):
    both = (s + r) / 2 + pairing.joint(torch.cat([s, r], -1))
    first, second = pairing.frames(both).tensor_split(2, -1)
    return torch.stack([both + first, both + second], 1)


def shared(pairing, s, r):
    mean = (s + r) / 2
    return torch.stack([mean + pairing.motion(torch.cat([mean, pairing.code(x)], -1)) for x in (s, r)], 1)


def separate(pairing, s, r):
    pair = torch.cat([s, r], -1)
    return (pair + pairing.motion(pair)).unflatten(-1, (2, -1)).movedim(-2, 1)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("formula", [joint, shared, separate])
def test_algorithm_3_written_out(device, formula):
    """Slots of each frame, matched, transformed by the MLP, decoded. A partner is a mean under the weights."""
    model, image = build(replace(PAIRS, pairing=formula.__name__)).to(device), clips().to(device)
    with torch.no_grad():
        output = model(image)
        (s, s_masks), (t, t_masks) = model.encode(image[:, 0]), model.encode(image[:, 1])
        r, weights = model.match(s, t)
        torch.testing.assert_close(r, weights @ t)
        transformed = formula(model.pairing, s, r)
        torch.testing.assert_close(output.slots, transformed)
        torch.testing.assert_close(model.transform(s, r), transformed)
        matched = torch.einsum("bij,bjyx->biyx", weights, t_masks)
        torch.testing.assert_close(output.partition_masks, torch.stack([s_masks, matched], 1))
        for k, slots in enumerate(transformed.unbind(1)):
            for name, x in model.decode(slots)._asdict().items():
                torch.testing.assert_close(getattr(output, name)[:, k], x)


def test_a_frame_is_decoded_as_a_pair_of_itself():
    model, slots = small_model("pairs"), torch.randn(2, 3, 16)
    with torch.no_grad():
        expected = model.decode(model.transform(slots, slots)[:, 1])
        for a, b in zip(model.decode_frame(slots), expected, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("pairing", ["joint", "shared", "separate"])
def test_an_image_is_a_pair_of_itself(pairing):
    model, image = build(replace(PAIRS, pairing=pairing)).eval(), torch.rand(2, 3, 16, 16)
    with torch.no_grad():
        output, (slots, masks) = model(image), model.encode(image)
        expected = model.decode(model.transform(slots, slots)[:, 1])
    assert torch.equal(output.slots, slots) and torch.equal(output.partition_masks, masks)
    for name, value in expected._asdict().items():
        assert torch.equal(getattr(output, name), value), name


@pytest.mark.parametrize("pairing", ["joint", "shared", "separate"])
def test_at_first_a_pair_is_decoded_as_single_frames(pairing):
    """So training on pairs can begin with the weights of a model of single frames and loses nothing."""
    images, pairs = discovery.build(IMAGES).eval(), discovery.build(replace(PAIRS, pairing=pairing)).eval()
    pairs.load_state_dict(images.state_dict() | {k: v for k, v in pairs.state_dict().items() if "pairing" in k})
    image = torch.rand(2, 3, 16, 16)
    assert_same(run_seeded(pairs, image), run_seeded(images, image))
    s, r = torch.randn(2, 2, 3, 16)
    expected = torch.stack([s, r] if pairing == "separate" else 2 * [(s + r) / 2], 1)
    torch.testing.assert_close(pairs.transform(s, r), expected)


@pytest.mark.parametrize("pairing", ["joint", "shared", "separate"])
def test_all_weights_are_trained_from_the_second_step_on(pairing):
    model, image = discovery.build(replace(PAIRS, pairing=pairing)), clips()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    (model(image).reconstruction - image).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    assert_trains(model, (model(image).reconstruction - image).square().mean())


@pytest.mark.parametrize("slots", ["cut", "attention"])
def test_shapes(slots):
    output = small_model("pairs", slots=SLOTS[slots])(clips(5))
    assert output.slots.shape == (5, 2, 3, 16) and output.masks.shape == (5, 2, 3, 16, 16)
    assert output.partition_masks.shape == (5, 2, 3, 8, 8)
    assert output.slot_reconstructions.shape == (5, 2, 3, 3, 16, 16)
    assert output.reconstruction.shape == (5, 2, 3, 16, 16)
    torch.testing.assert_close(output.masks.sum(2), torch.ones(5, 2, 16, 16))
    assert small_model("pairs", slots=SLOTS[slots])(clips(0)).masks.shape == (0, 2, 3, 16, 16)


@pytest.mark.parametrize("size", [(8, 8), (15, 9), (24, 40)])
def test_image_sizes(size):
    model = build(replace(PAIRS, image_size=size))
    assert model(torch.rand(1, 2, 3, *size)).masks.shape == (1, 2, 3, *size) and model.image_size == size


def test_bytes_and_floats_are_the_same_clip():
    model, image = small_model("pairs"), torch.randint(0, 256, (2, 2, 3, 16, 16), dtype=torch.uint8)
    assert_same(run_seeded(model, image), run_seeded(model, image / 255))


def test_a_model_of_modules():
    parts = CNNEncoder(8, (3,)), CutSlots(8, 4, (8, 10), 20), PixelShuffleDecoder(20, (16, 20))
    model = PairDiscovery(*parts, match_gamma=0.2, match_temperature=0.3, pairing="separate", motion_dim=5)
    assert model.frames == 2 and model.config is None
    assert model.pairing.motion[1].out_features == 5 and model.pairing.motion[1].in_features == 40
    assert model(torch.rand(1, 2, 3, 16, 20)).masks.shape == (1, 2, 4, 16, 20)
    s, t = torch.randn(2, 1, 4, 20)
    unit_s, unit_t = (torch.nn.functional.normalize(x, dim=-1) for x in (s, t))
    torch.testing.assert_close(model.match(s, t).weights, match_slots(unit_s, unit_t, 0.2, 0.3).weights)


# ------------------------------------------------------------------------------------------------------------- matching


def test_separate_slots_follow_a_permutation_of_partners_and_joint_ones_do_not():
    """Without its MLP, `separate` decodes the same second frame for any order of partners; `joint` mixes each pair."""
    s, r = torch.randn(2, 2, 3, 16)
    order = torch.tensor([2, 0, 1])
    separate_model, joint_model = (build(replace(PAIRS, pairing=name)) for name in ("separate", "joint"))
    torch.nn.init.zeros_(separate_model.pairing.motion[-1].weight)
    torch.nn.init.zeros_(separate_model.pairing.motion[-1].bias)
    first, second = separate_model.transform(s, r[:, order]).unbind(1)
    assert torch.equal(first, s) and torch.equal(second, r[:, order])
    for one, other in zip(
        joint_model.transform(s, r).unbind(1), joint_model.transform(s, r[:, order]).unbind(1), strict=True
    ):
        assert not torch.isclose(one, other).all(-1).any(), "every slot of both frames depends on its partner"


def test_both_frames_of_a_joint_pair_depend_on_one_slot():
    model = build(PAIRS).double()
    s, r = torch.randn(2, 1, 1, 16, dtype=torch.double)
    jacobian = torch.autograd.functional.jacobian(lambda x: model.pairing(*x.split(16, -1)), torch.cat([s, r], -1))
    assert torch.linalg.matrix_rank(jacobian.reshape(32, 32)) == 16


@pytest.mark.parametrize("value", [-0.1, 1.1, float("nan")])
def test_areas_are_shares_of_the_image(value):
    parts = CNNEncoder(8, (3,)), CutSlots(8, 4, (8, 10), 20), PixelShuffleDecoder(20, (16, 20))
    with pytest.raises(ValueError, match=rf"^match_half_area is {value}; expected a number from 0 to 1$"):
        PairDiscovery(*parts, match_half_area=value)


def test_a_pairing_that_does_not_exist():
    parts = CNNEncoder(8, (3,)), CutSlots(8, 4, (8, 10), 20), PixelShuffleDecoder(20, (16, 20))
    with pytest.raises(ValueError, match=r"^pairing is 'mixed'; expected one of joint, shared, separate$"):
        PairDiscovery(*parts, pairing="mixed")


def test_slots_are_matched_by_their_projection():
    model = build(replace(PAIRS, match_dim=4))
    s, t = torch.randn(2, 2, 3, 16)
    project = torch.nn.functional.normalize(s @ model.match_projection.weight.T, dim=-1)
    other = torch.nn.functional.normalize(t @ model.match_projection.weight.T, dim=-1)
    r, weights = model.match(s, t)
    torch.testing.assert_close(weights, match_slots(project, other, model.match_gamma, model.match_temperature).weights)
    torch.testing.assert_close(r, weights @ t)


@pytest.mark.parametrize("pairing", ["joint", "shared", "separate"])
@pytest.mark.parametrize("match_dim", [0, 4])
def test_the_order_of_the_second_slots_does_not_matter(pairing, match_dim):
    """A model of pairs trains the same whether or not the slots of the second frame are shuffled."""
    model = build(replace(PAIRS, pairing=pairing, match_dim=match_dim))
    s, t = torch.randn(2, 2, 3, 16)
    order = torch.tensor([2, 0, 1])
    expected, shuffled = (model.transform(s, model.match(s, x).slots) for x in (t, t[:, order]))
    torch.testing.assert_close(shuffled, expected)


def with_areas(**changes):
    return build(replace(PAIRS, match_half_area=HALF_AREA, **changes))


@pytest.mark.parametrize("match_dim", [0, 4])
def test_pairs_weighted_by_areas_written_out(match_dim):
    model = with_areas(match_dim=match_dim)
    s, t = torch.randn(2, 2, 3, 16)
    a, b = torch.rand(2, 2, 3)
    project = model.match_projection if match_dim else (lambda x: x)
    gain = torch.nn.functional.cosine_similarity(project(s)[:, :, None], project(t)[:, None], dim=-1)
    area = a[:, :, None].minimum(b[:, None])
    d = Matching(3, 3, model.match_gamma)(-gain * area / (area + HALF_AREA))
    weights = model.match(s, t, a, b).weights
    torch.testing.assert_close(weights, torch.softmax(d / model.match_temperature, -1))


def test_empty_slots_do_not_decide_a_matching():
    """An object moves from slot 0 to slot 1 and changes; what is left in slot 0 is still like it. The empty slot 1
    resembles the object's new slot even more, so that without areas the two stay where they are."""
    thing, own = torch.eye(16)[:2]
    s = torch.stack([thing, own])[None]  # the object, an empty slot
    t = torch.stack([0.4 * thing + own.roll(5), 0.6 * thing + own])[None]  # an empty slot, the object
    s_area, t_area = torch.tensor([[0.3, 0.0]]), torch.tensor([[0.0, 0.3]])
    without, weighted = small_model("pairs").match(s, t).weights, with_areas().match(s, t, s_area, t_area).weights
    assert assignment(without).tolist() == [[0, 1]] and assignment(weighted).tolist() == [[1, 0]]


def test_areas_of_a_forward_pass_are_those_of_the_partition():
    model, image = with_areas(match_temperature=0.05), clips()
    with torch.no_grad():
        (s, s_masks), (t, t_masks) = model.encode(image[:, 0]), model.encode(image[:, 1])
        s_area, t_area = (masks.sum((-1, -2)) / masks[0, 0].numel() for masks in (s_masks, t_masks))
        r, weights = model.match(s, t, s_area, t_area)
        output = model(image)
        torch.testing.assert_close(output.slots, model.transform(s, r))
        matched = torch.einsum("bij,bjyx->biyx", weights, t_masks)
        torch.testing.assert_close(output.partition_masks[:, 1], matched)
        assert not torch.allclose(weights, model.match(s, t, t_area, s_area).weights, rtol=1e-4), "areas differ"


def test_areas_are_needed_where_they_count():
    s, t = torch.randn(2, 2, 3, 16)
    expected = r"^s_area or t_area is None; a model with match_half_area expects the areas of both$"
    with pytest.raises(ValueError, match=expected):
        with_areas().match(s, t)


@pytest.mark.parametrize("pairing", ["joint", "shared", "separate"])
def test_positions_belong_to_their_frames(pairing):
    """Slots are matched and transformed by what they contain; positions follow the slots of each frame."""
    slots = replace(PAIRS.slots, relative_positions=True)
    model, plain = (build(replace(PAIRS, pairing=pairing, slots=each)) for each in (slots, PAIRS.slots))
    s, t = torch.randn(2, 2, 3, 16)
    other = torch.cat([t[..., :-3], torch.randn(2, 3, 3)], -1)
    (r, weights), (_, same) = model.match(s, t), model.match(s, other)
    assert torch.equal(weights, same) and r.shape == s.shape
    first, second = model.transform(s, r).unbind(1)
    assert torch.equal(first[..., -3:], s[..., -3:]) and torch.equal(second[..., -3:], (weights @ t)[..., -3:])
    content = model.pairing(s[..., :-3], r[..., :-3])
    torch.testing.assert_close(model.transform(s, r)[..., :-3], content)
    assert model(clips()).masks.shape == plain(clips()).masks.shape


def orthogonal_slots(seed, count=5, batch=2):
    """Return orthogonal slots (B, K, D) of lengths from one to three."""
    generator = torch.Generator().manual_seed(seed)
    slots = torch.linalg.qr(torch.randn(batch, 16, 16, generator=generator)).Q[:, :count]
    return slots * (1 + 2 * torch.rand(batch, count, 1, generator=generator))


@settings(max_examples=30, deadline=None)
@given(st.permutations(range(5)), seeds)
def test_matching_recovers_a_permutation(order, seed):
    model, slots = small_model("pairs"), orthogonal_slots(seed)
    partner, weights = model.match(slots, slots[:, order])
    inverse = torch.tensor(order).argsort()
    assert torch.equal(weights.argmax(-1), inverse.expand(2, 5))
    expected = torch.nn.functional.one_hot(inverse, 5).float().expand(2, 5, 5)
    torch.testing.assert_close(weights, expected, rtol=0, atol=1e-4)
    torch.testing.assert_close(partner, slots, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 5))


@settings(max_examples=15, deadline=None)
@given(seeds)
def test_matching_weights_sum_to_one_and_depend_on_angles_only(seed):
    s, t = torch.randn(2, 3, 4, 16, generator=torch.Generator().manual_seed(seed)) * 10
    model = small_model("pairs")
    weights = model.match(s, t).weights
    torch.testing.assert_close(weights.sum(-1), torch.ones(3, 4))
    assert (weights >= 0).all()
    torch.testing.assert_close(model.match(3 * s, t / 7).weights, weights, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_matching_stays_in_float32(device):
    model, s = small_model("pairs").to(device), torch.randn(2, 4, 16, device=device)
    t = s.flip(1) + 0.3 * torch.randn_like(s)
    plain = model.match(s, t)
    with torch.autocast(device, dtype=torch.bfloat16):
        inside = model.match(s, t)
        assert all(x.dtype == torch.float32 for x in inside)
        assert all(x.dtype == torch.float32 for x in model.match(s.bfloat16(), t.bfloat16()))
        output = model(clips().to(device))
    assert all(torch.equal(a, b) for a, b in zip(inside, plain, strict=True))
    assert output.masks.dtype == output.reconstruction.dtype == torch.float32


# --------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    "shape, message",
    [
        ((3, 16, 16), r"image has shape \(3, 16, 16\); expected clips \(B, 2, 3, H, W\)"),
        ((2, 3, 3, 16, 16), r"image has shape \(2, 3, 3, 16, 16\); expected clips \(B, 2, 3, H, W\)"),
        ((1, 2, 3, 16, 17), r"image has shape \(2, 3, 16, 17\); expected \(B, 3, 16, 16\)"),
        ((1, 2, 1, 16, 16), r"image has shape \(2, 1, 16, 16\); expected \(B, 3, 16, 16\)"),
    ],
)
def test_bad_clips(shape, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        small_model("pairs")(torch.rand(shape))


def test_clips_of_integers():
    with pytest.raises(TypeError, match=r"^image has dtype torch\.int64; expected uint8 or a floating-point type$"):
        small_model("pairs")(torch.zeros(1, 2, 3, 16, 16, dtype=torch.int64))


def test_slots_for_images_are_expected():
    with pytest.raises(ValueError, match=r"^slots partition clips; expected a slot module for images"):
        build(replace(PAIRS, slots=SPACETIME_SLOTS))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"pairing": "mixed"}, "pairing is 'mixed'; expected one of joint, shared, separate"),
        ({"match_dim": -1}, "match_dim is -1; expected an integer from 0 to 65,536"),
        ({"motion_dim": 0}, "motion_dim is 0; expected an integer from 1 to 65,536"),
        ({"match_gamma": "small"}, "match_gamma is 'small'; expected a number"),
        ({"match_half_area": -0.1}, "match_half_area is -0.1; expected a number from 0 to 1"),
    ],
)
def test_bad_options(changes, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        PairDiscoveryConfig(**changes)
