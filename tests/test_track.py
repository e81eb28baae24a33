"""Tracks against models that find what they were told, in an order shuffled for every frame."""

import dataclasses
import gc
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from cutslots.metrics import score_films
from cutslots.model import Discovery, Found, PairDiscovery, VolumeDiscovery, build
from cutslots.presets import PRESETS
from cutslots.slots import Slots
from cutslots.track import MEMORY, Tracker, assignment, follow, reordered, taken
from tests.conftest import DEVICES
from tests.small_runs import MODEL

SIDE, THINGS, LENGTH = 16, 4, 8
JOINS = [("images", "area"), ("images", "hungarian"), ("pairs", "area"), ("pairs", "hungarian"), ("pairs", "matching")]


def tiny_config(**changes):
    """The configuration of a film model that is quick to run; with frames=1 that of images."""
    return dataclasses.replace(PRESETS["movi"].model, **(MODEL | changes))


def tiny_model(kind, **changes):
    kinds = {"images": {"frames": 1}, "pairs": {"frames": 2}, "volumes": {"frames": 2, "volume": True}}
    return build(tiny_config(**kinds[kind], **changes)).eval()


def film(batch=1, length=LENGTH):
    return torch.randint(0, 256, (batch, length, 3, SIDE, SIDE), dtype=torch.uint8)


def assert_same(one, other, exactly=True):
    for name, a, b in zip(Found._fields, one, other, strict=True):
        torch.testing.assert_close(a, b, rtol=0 if exactly else 1e-4, atol=0 if exactly else 1e-5, msg=name)


# ------------------------------------------------------------------------------------------------- models that are told


class Known(Discovery):
    """Finds in a frame what `told` holds for it: slots (B, T, K, D) and masks (B, T, K, S, S)."""

    told: tuple[Tensor, Tensor]

    def at(self, image):
        """Slots and masks of frames whose first pixels say (film, moment)."""
        place = image[..., 0, 0, 0].long(), image[..., 1, 0, 0].long()
        return tuple(x[place] for x in self.told)

    def encode(self, image):
        self.seen = self.at(image)
        return Slots(self.seen[0], F.avg_pool2d(self.seen[1], 2))

    def decode(self, slots):
        """The masks that were seen with these slots."""
        return drawn(taken(self.seen[1], torch.cdist(slots, self.seen[0]).argmin(-1)))


class KnownPairs(Known, PairDiscovery):
    def paired(self, s, r):
        return torch.stack([s, r], 1)


class KnownVolumes(VolumeDiscovery):
    """Finds in every clip what it was told, its slots in an order of that clip's own."""

    def forward(self, image):
        slots, masks = Known.at(self, image)
        partition = F.avg_pool2d(masks.flatten(0, 2), 2).unflatten(0, masks.shape[:3])
        clip = {name: x.unflatten(0, masks.shape[:2]) for name, x in drawn(masks.flatten(0, 1)).items()}
        found = Found(slots, partition=partition, **clip)
        order = torch.stack([torch.randperm(THINGS) for _ in image])
        moments = [reordered(Found(*(x[:, t] for x in found)), order) for t in range(image.shape[1])]
        return Found(*(torch.stack(part, 1) for part in zip(*moments, strict=True)))


def drawn(masks):
    pictures = masks[:, :, None] * torch.linspace(0.1, 0.9, 3)[:, None, None]
    return {"masks": masks, "pictures": pictures, "reconstruction": pictures.sum(1)}


def numbered(batch, length):
    """Frames whose first pixels say which they are."""
    frames = torch.zeros(batch, length, 3, SIDE, SIDE, dtype=torch.uint8)
    frames[:, :, 0] = torch.arange(batch, dtype=torch.uint8)[:, None, None, None]
    frames[:, :, 1] = torch.arange(length, dtype=torch.uint8)[:, None, None]
    return frames


def things(seed, batch=2, length=LENGTH):
    """Slots and masks of the ground and of three squares that cross the picture, each like itself over time."""
    generator = torch.Generator().manual_seed(seed)
    base = torch.linalg.qr(torch.randn(batch, 16, 16, generator=generator)).Q[:, None, :THINGS]
    base = base * (1 + torch.rand(batch, 1, THINGS, 1, generator=generator))
    slots = base + 0.05 * torch.randn(batch, length, THINGS, 16, generator=generator)
    labels = torch.zeros(batch, length, SIDE, SIDE, dtype=torch.long)
    for t, k in itertools.product(range(length), range(1, THINGS)):
        labels[:, t, 4 * k : 4 * k + 3, t : t + 2 * k] = k
    masks = F.one_hot(labels, THINGS).movedim(-1, 2).float()
    order = torch.rand(batch, length, THINGS, generator=generator).argsort(-1)
    return slots, masks, order


def told(kind, slots, masks):
    model = {"images": Known, "pairs": KnownPairs, "volumes": KnownVolumes}[kind](tiny_model(kind).config)
    model.told = slots, masks
    return model


@pytest.mark.parametrize("kind, join", JOINS)
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_a_track_is_one_thing(kind, join, seed):
    """However the slots are shuffled from frame to frame, track k stays what it was in the first frame."""
    slots, masks, order = things(seed)
    shuffled = [taken(x.flatten(0, 1), order.flatten(0, 1)).unflatten(0, x.shape[:2]) for x in (slots, masks)]
    for t, found in enumerate(follow(told(kind, *shuffled), numbered(2, LENGTH), join)):
        first = taken(masks[:, t], order[:, 0])
        expected = drawn(first) | {"slots": taken(slots[:, t], order[:, 0]), "partition": F.avg_pool2d(first, 2)}
        assert_same(found, Found(**expected))


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_clips_are_joined_by_the_frame_they_share(seed):
    """Which is all they have in common: things are somewhere else in every frame."""
    torch.manual_seed(seed)
    slots, _, _ = things(seed)
    masks = F.one_hot(torch.randint(THINGS, (2, LENGTH, SIDE, SIDE)), THINGS).movedim(-1, 2).float()
    tracker = Tracker(told("volumes", slots, masks))
    founds = [tracker(frame) for frame in numbered(2, LENGTH).unbind(1)]
    order = torch.cdist(founds[0].slots, slots[:, 0]).argmin(-1)
    for t, found in enumerate(founds):
        first = taken(masks[:, t], order)
        expected = drawn(first) | {"slots": taken(slots[:, t], order), "partition": F.avg_pool2d(first, 2)}
        assert_same(found, Found(**expected))


def hand_over():
    """An object of 48 pixels passes in three steps from slot 1 to slot 2; slots keep a part that is their own, and
    slots 3 and 4 are empty all the time. Returns slots, masks, and the truth."""
    ground, thing, *own = torch.eye(6)
    share = torch.tensor([0, 0, 1, 2, 3, 3]) / 3
    slots, labels = [], torch.zeros(len(share), SIDE * SIDE, dtype=torch.long)
    for t, u in enumerate(share):
        slots.append(torch.stack([ground, (1 - u) * thing + 0.3 * own[0], u * thing + 0.3 * own[1], *own[2:]]))
        labels[t, :48] = 1 + (torch.arange(48) < 48 * u)
    truth = (labels > 0).long().unflatten(-1, (SIDE, SIDE))
    masks = F.one_hot(labels, 5).mT.unflatten(-1, (SIDE, SIDE)).float()
    return torch.stack(slots)[None], masks[None], truth[None]


@pytest.mark.parametrize("join, switches", [("area", 0), ("hungarian", 1)])
def test_a_thing_that_passes_from_one_slot_to_another(join, switches):
    """Its area outvotes what empty slots have of their own; without areas these keep the slots where they were."""
    slots, masks, truth = hand_over()
    founds = follow(told("images", slots, masks), numbered(1, len(slots[0])), join)
    tracks = torch.stack([found.masks.argmax(1) for found in founds], 1)
    assert score_films(truth, tracks)["switches"].item() == switches
    assert (tracks[:, 0][truth[:, 0] > 0] == 1).all()
    assert (tracks[:, -1][truth[:, -1] > 0] == 1 + switches).all()


def test_hungarian_looks_at_the_frame_before_and_no_further():
    """Two things at right angles turn by 70 degrees a frame: a mean over time would be late, and take the other."""
    turn = torch.arange(LENGTH) * torch.pi * 70 / 180
    slots = torch.stack([torch.stack([turn.cos(), turn.sin()], -1), torch.stack([-turn.sin(), turn.cos()], -1)], 1)
    masks = F.one_hot(torch.arange(SIDE) % 2, 2).T[:, None].expand(LENGTH, 2, SIDE, SIDE).float()
    for t, found in enumerate(follow(told("images", slots[None], masks[None]), numbered(1, LENGTH), "hungarian")):
        assert torch.equal(found.slots[0], slots[t])


def test_what_is_remembered_of_a_track():
    slots, masks, _ = things(0)
    tracker = Tracker(told("images", slots, masks))
    share = masks.mean((-1, -2))
    mean, area = slots[:, 0], share[:, 0]
    for t, frame in enumerate(numbered(2, LENGTH).unbind(1)):
        tracker(frame)
        mean, area = (MEMORY * old + (1 - MEMORY) * new[:, t] for old, new in ((mean, slots), (area, share)))
        torch.testing.assert_close(tracker.mean, mean)
        torch.testing.assert_close(tracker.area, area, rtol=0, atol=2e-4)  # never quite nothing


# ----------------------------------------------------------------------------------------------------- untrained models


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind, join", JOINS)
def test_a_film_is_its_frames_one_by_one(kind, join, device):
    model, frames = tiny_model(kind).to(device), film(2).to(device)
    tracker = Tracker(model, join)
    for one, other in zip(follow(model, frames, join), [tracker(frame) for frame in frames.unbind(1)], strict=True):
        assert_same(one, other, exactly=device == "cpu")  # cuDNN may sum in another order each time
        assert not any(x.requires_grad for x in one)
        torch.testing.assert_close(one.reconstruction, (one.masks[:, :, None] * one.pictures).sum(1))


@pytest.mark.parametrize("kind, join", [*JOINS, ("volumes", "area")])
def test_films_do_not_see_each_other(kind, join):
    model, frames = tiny_model(kind), film(2)
    alone = [follow(model, each[None], join) for each in frames]
    for t, found in enumerate(follow(model, frames, join)):
        for b in range(2):
            assert_same(Found(*(x[b : b + 1] for x in found)), alone[b][t], exactly=False)


def test_joining_only_reorders():
    """A frame's slots are what the model finds in it alone."""
    model, frames = tiny_model("images"), film(2)
    for join in ("area", "hungarian"):
        for t, found in enumerate(follow(model, frames, join)):
            with torch.no_grad():
                alone = model(frames[:, t])
            order = torch.cdist(found.slots, alone.slots).argmin(-1)
            assert torch.equal(order.sort(-1).values, torch.arange(3).expand(2, 3))
            assert_same(found, reordered(alone, order), exactly=False)


def test_volumes_are_cut_whole_or_as_they_come():
    model, frames = tiny_model("volumes"), film(2, 5)
    with torch.no_grad():
        whole, first = model(frames), model(frames[:, :1])
    for t, found in enumerate(follow(model, frames)):
        assert_same(found, Found(*(x[:, t] for x in whole)))
    tracker = Tracker(model)
    assert_same(tracker(frames[:, 0]), Found(*(x[:, 0] for x in first)))
    for t in range(1, 5):
        found = tracker(frames[:, t])
        with torch.no_grad():
            pair = model(frames[:, t - 1 : t + 1])
        assert torch.equal(found.reconstruction, pair.reconstruction[:, 1]), "of the newest two frames"


def tensors_held(tracker):
    held = [x for x in vars(tracker).values() if isinstance(x, Tensor)] + list(tracker.clip)
    return len(held), sum(x.untyped_storage().nbytes() for x in held)


def tensors_alive():
    gc.collect()
    return sum(type(x) is Tensor for x in gc.get_objects())


@pytest.mark.parametrize("kind, join", [("images", "area"), ("pairs", "matching"), ("volumes", "area")])
def test_memory_does_not_grow(kind, join):
    tracker, held, alive = Tracker(tiny_model(kind), join), set(), set()
    for t in range(300):
        tracker(film()[:, 0])
        if t >= 4:
            held.add(tensors_held(tracker))
        if t in (4, 299):
            alive.add(tensors_alive())
    assert len(held) == len(alive) == 1


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 4), st.integers(0, 2**32 - 1))
def test_assignment_has_the_largest_sum(count, seed):
    gain = torch.randn(2, count, count, generator=torch.Generator().manual_seed(seed))
    for each, order in zip(gain, assignment(gain), strict=True):
        best = max(itertools.permutations(range(count)), key=lambda p: sum(each[i, j] for i, j in enumerate(p)))
        assert order.tolist() == list(best)


def test_bad_arguments():
    with pytest.raises(ValueError, match=r"^join is 'sort'; expected area, matching or hungarian$"):
        Tracker(tiny_model("images"), "sort")
    for kind in ("images", "volumes"):
        for refused in (Tracker, lambda model, join: follow(model, film(), join)):
            with pytest.raises(ValueError, match=r"^join is 'matching', which this model has not learned; expected"):
                refused(tiny_model(kind), "matching")
    with pytest.raises(ValueError, match=r"^image has shape \(1, 8, 3, 16, 16\); expected \(B, 3, 16, 16\)$"):
        Tracker(tiny_model("images"))(film())
