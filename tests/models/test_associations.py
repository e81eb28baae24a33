"""The tracker against models of every kind. Tests of whole tracks are those of inference."""

import itertools
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from cutslots.models.discovery import DiscoveryOutput, build
from cutslots.models.tracker import Tracker, assignment, reorder_slots, take_slots, track_clip
from tests.models.configs import IMAGES, KINDS, PAIRS, SLOTS, SPACETIME, SPACETIME_SLOTS, clips, small_model

ASSOCIATIONS = [
    ("images", "area"),
    ("images", "hungarian"),
    ("pairs", "area"),
    ("pairs", "hungarian"),
    ("pairs", "learned"),
    ("spacetime", "overlap"),
]


def test_every_association_is_that_of_some_model():
    offered = [(kind, association) for kind in KINDS for association in small_model(kind).associations]
    assert sorted(offered) == sorted(ASSOCIATIONS)


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_association_of_a_model_is_the_default(kind):
    model = small_model(kind)
    assert Tracker(model).association == model.associations[0]


@pytest.mark.parametrize("kind, association", ASSOCIATIONS)
@pytest.mark.parametrize("size", [(16, 16), (9, 14)])
def test_shapes(kind, association, size):
    tracker = Tracker(build(replace(KINDS[kind], image_size=size)).eval(), association)
    for frame in torch.rand(3, 2, 3, *size):
        output = tracker(frame)
        assert output.slots.shape == (2, 3, 16) and output.masks.shape == (2, 3, *size)
        assert output.reconstruction.shape == frame.shape and output.slot_reconstructions.shape == (2, 3, 3, *size)
        torch.testing.assert_close(output.masks.sum(1), torch.ones(2, *size))
        assert not any(x.requires_grad for x in output)


@pytest.mark.parametrize("association", ["area", "hungarian"])
def test_bytes_and_floats_are_the_same_frame(association):
    image = torch.randint(0, 256, (1, 3, 3, 16, 16), dtype=torch.uint8)
    model = small_model("images")
    for one, other in zip(
        track_clip(model, image, association), track_clip(model, image / 255, association), strict=True
    ):
        for a, b in zip(one, other, strict=True):
            assert torch.equal(a, b)


def test_spacetime_clips_are_associated_by_the_overlap_of_the_shared_frame():
    # Without the softmax over the combined masks, which leaves nearly all to the background of an untrained model.
    partition = replace(SPACETIME_SLOTS.partition, background_temperature=0.1, combined_temperature=None)
    model, frames = small_model("spacetime", slots=replace(SPACETIME_SLOTS, partition=partition)), clips(2, 4)
    tracker, masks = Tracker(model), None
    for t in range(4):
        output = tracker(frames[:, t])
        with torch.no_grad():
            clip = model(frames[:, max(0, t - 1) : t + 1])
        if masks is not None:
            old, new = masks.flatten(2)[:, :, None], clip.masks[:, -2].flatten(2)[:, None]
            shared = (old * new).sum(-1)
            iou = shared / (old.sum(-1) + new.sum(-1) - shared)
            for b in range(2):
                best = max(
                    itertools.permutations(range(3)), key=lambda p, b=b: sum(iou[b, i, j] for i, j in enumerate(p))
                )
                torch.testing.assert_close(output.masks[b], clip.masks[b, -1, list(best)])
        masks = output.masks


def test_spacetime_tracks_use_as_many_frames_as_training():
    model = build(replace(SPACETIME, num_frames=3)).eval()
    tracker = Tracker(model)
    frames = clips(1, 5)
    for t in range(5):
        tracker(frames[:, t])
        assert len(tracker.clip) == min(t + 1, 3)


def test_slot_attention_can_be_tracked():
    model = build(replace(IMAGES, slots=SLOTS["attention"])).eval()
    assert len(track_clip(model, clips(1, 3))) == 3


@pytest.mark.parametrize("seed", range(3))
def test_area_association_maximises_similarity_weighted_by_area(seed):
    torch.manual_seed(seed)
    model, frames = small_model("images"), torch.rand(1, 2, 3, 16, 16)
    first, second = track_clip(model, frames, "area")
    with torch.no_grad():
        alone = model(frames[:, 1])
    areas = [F.one_hot(o.masks.argmax(1).flatten(1), 3).float().mean(1)[0] + 1e-4 for o in (first, alone)]
    gain = lambda i, j: (
        2 / (1 / areas[0][i] + 1 / areas[1][j]) * F.cosine_similarity(first.slots[0, i], alone.slots[0, j], dim=0)
    )
    best = max(itertools.permutations(range(3)), key=lambda p: sum(gain(i, j) for i, j in enumerate(p)))
    torch.testing.assert_close(second.slots[0], alone.slots[0, list(best)])


def test_the_learned_association_rounds_the_matching():
    model, frames = small_model("pairs"), clips(2, 2)
    with torch.no_grad():
        slots = [model.encode(frame).slots for frame in frames.unbind(1)]
        first = take_slots(slots[0], assignment(model.match(slots[0], slots[0]).weights))
        order = assignment(model.match(first, slots[1]).weights)
        decoded = model.decode(model.transform(first, take_slots(slots[1], order))[:, 1])
    output = track_clip(model, frames, "learned")[1]
    torch.testing.assert_close(output.slots, take_slots(slots[1], order))
    torch.testing.assert_close(output.masks, decoded.masks)


def test_reorder_slots_keeps_the_reconstruction():
    model = small_model("images")
    with torch.no_grad():
        output = model(clips(2, 1)[:, 0])
    order = torch.tensor([[2, 0, 1], [0, 2, 1]])
    reordered = reorder_slots(output, order)
    assert reordered.reconstruction is output.reconstruction
    for name in set(DiscoveryOutput._fields) - {"reconstruction"}:
        for b in range(2):
            assert torch.equal(getattr(reordered, name)[b], getattr(output, name)[b, order[b]]), name


@pytest.mark.parametrize(
    "kind, association, message",
    [
        ("images", "sort", "association is 'sort'; a Discovery expects area or hungarian"),
        ("images", "learned", "association is 'learned'; a Discovery expects area or hungarian"),
        ("images", "overlap", "association is 'overlap'; a Discovery expects area or hungarian"),
        ("pairs", "overlap", "association is 'overlap'; a PairDiscovery expects area or hungarian or learned"),
        ("spacetime", "area", "association is 'area'; a SpacetimeDiscovery expects overlap"),
        ("spacetime", "learned", "association is 'learned'; a SpacetimeDiscovery expects overlap"),
    ],
)
def test_bad_associations(kind, association, message):
    model = small_model(kind)
    for refused in (Tracker, lambda model, association: track_clip(model, clips(), association)):
        with pytest.raises(ValueError, match=f"^{message}$"):
            refused(model, association)


def test_bad_frames():
    for kind, association in ASSOCIATIONS:
        with pytest.raises(ValueError, match=r"^image has shape \(.*\); expected \(B, 3, 16, 16\)$"):
            Tracker(small_model(kind), association)(torch.rand(2, 3, 16, 17))


def test_pairs_are_tracked_through_odd_sizes():
    model = build(replace(PAIRS, image_size=(15, 17))).eval()
    assert track_clip(model, torch.rand(1, 3, 3, 15, 17), "learned")[2].masks.shape == (1, 3, 15, 17)
