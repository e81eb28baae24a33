"""Tracks of models whose slots are given, in an order shuffled for every frame, and of untrained models."""

import functools
import gc
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from cutslots.evaluation.metrics import video_metrics
from cutslots.models.discovery import Discovery, DiscoveryConfig, DiscoveryOutput, build
from cutslots.models.pair_discovery import PairDiscovery, PairDiscoveryConfig
from cutslots.models.spacetime_discovery import SpacetimeDiscovery, SpacetimeDiscoveryConfig
from cutslots.models.tracker import MIN_AREA, MOMENTUM, Tracker, assignment, reorder_slots, take_slots, track_clip
from cutslots.modules.decoders import DecoderOutput, SpatialBroadcastConfig
from cutslots.modules.encoders import CNNConfig
from cutslots.modules.partition import CutPartitionConfig, SpacetimePartitionConfig
from cutslots.modules.slots import CutSlotsConfig, Slots
from tests.conftest import DEVICES

SIDE, OBJECTS, FRAMES = 16, 4, 8  # the background is the first object
ASSOCIATIONS = [
    ("images", "area"),
    ("images", "hungarian"),
    ("pairs", "area"),
    ("pairs", "hungarian"),
    ("pairs", "learned"),
    ("pairs with areas", "learned"),
]


def small_model(kind):
    """An untrained model that is quick to run."""
    edge_net = {"edge_net_channels": 8, "edge_net_kernel_sizes": (3,)}
    partition = SpacetimePartitionConfig(**edge_net) if kind == "clips" else CutPartitionConfig(**edge_net)
    pairs_with_areas = functools.partial(PairDiscoveryConfig, match_half_area=0.03)
    config = {
        "images": DiscoveryConfig,
        "pairs": PairDiscoveryConfig,
        "pairs with areas": pairs_with_areas,
        "clips": SpacetimeDiscoveryConfig,
    }[kind]
    return build(
        config(
            image_size=(SIDE, SIDE),
            encoder=CNNConfig(channels=8, kernel_sizes=(3,)),
            slots=CutSlotsConfig(num_slots=3, slot_dim=16, feature_dim=16, mlp_dim=16, partition=partition),
            decoder=SpatialBroadcastConfig(channels=(8,)),
        )
    ).eval()


def random_video(batch=1, length=FRAMES):
    return torch.randint(0, 256, (batch, length, 3, SIDE, SIDE), dtype=torch.uint8)


def assert_same(one, other, exactly=True):
    for name, a, b in zip(DiscoveryOutput._fields, one, other, strict=True):
        torch.testing.assert_close(a, b, rtol=0 if exactly else 1e-4, atol=0 if exactly else 1e-5, msg=name)


# -------------------------------------------------------------------------------------------- models with given slots


class Given(Discovery):
    """Returns for every frame the slots (B, T, K, D) and masks (B, T, K, H, W) in `outputs`."""

    outputs: tuple[Tensor, Tensor]

    def look_up(self, image):
        """Slots and masks of frames whose first pixels hold the indices of video and frame."""
        index = image[..., 0, 0, 0].long(), image[..., 1, 0, 0].long()
        return tuple(x[index] for x in self.outputs)

    def encode(self, image):
        self.newest = self.look_up(image)
        return Slots(self.newest[0], F.avg_pool2d(self.newest[1], 2))

    def decode(self, slots):
        """The masks that belong to these slots."""
        return render_masks(take_slots(self.newest[1], torch.cdist(slots, self.newest[0]).argmin(-1)))


class GivenPairs(Given, PairDiscovery):
    def transform(self, s, r):
        return torch.stack([s, r], 1)


class GivenClips(SpacetimeDiscovery):
    """Returns for every clip the slots in `outputs`, in an order of its own."""

    def forward(self, image):
        slots, masks = Given.look_up(self, image)
        partition = F.avg_pool2d(masks.flatten(0, 2), 2).unflatten(0, masks.shape[:3])
        clip = {
            name: x.unflatten(0, masks.shape[:2]) for name, x in render_masks(masks.flatten(0, 1))._asdict().items()
        }
        output = DiscoveryOutput(slots, partition_masks=partition, **clip)
        order = torch.stack([torch.randperm(OBJECTS) for _ in image])
        moments = [reorder_slots(DiscoveryOutput(*(x[:, t] for x in output)), order) for t in range(image.shape[1])]
        return DiscoveryOutput(*(torch.stack(part, 1) for part in zip(*moments, strict=True)))


def render_masks(masks):
    slot_reconstructions = masks[:, :, None] * torch.linspace(0.1, 0.9, 3)[:, None, None]
    return DecoderOutput(masks, slot_reconstructions.sum(1), slot_reconstructions)


def expected_output(slots, masks):
    return DiscoveryOutput(slots, partition_masks=F.avg_pool2d(masks, 2), **render_masks(masks)._asdict())


def numbered_frames(batch, length):
    """Frames whose first pixels hold the indices of video and frame."""
    frames = torch.zeros(batch, length, 3, SIDE, SIDE, dtype=torch.uint8)
    frames[:, :, 0] = torch.arange(batch, dtype=torch.uint8)[:, None, None, None]
    frames[:, :, 1] = torch.arange(length, dtype=torch.uint8)[:, None, None]
    return frames


def moving_objects(seed, batch=2, length=FRAMES):
    """Slots and masks of the background and of three squares that cross the image; slots change little over time."""
    generator = torch.Generator().manual_seed(seed)
    base = torch.linalg.qr(torch.randn(batch, 16, 16, generator=generator)).Q[:, None, :OBJECTS]
    base = base * (1 + torch.rand(batch, 1, OBJECTS, 1, generator=generator))
    slots = base + 0.05 * torch.randn(batch, length, OBJECTS, 16, generator=generator)
    labels = torch.zeros(batch, length, SIDE, SIDE, dtype=torch.long)
    for t, k in itertools.product(range(length), range(1, OBJECTS)):
        labels[:, t, 4 * k : 4 * k + 3, t : t + 2 * k] = k
    masks = F.one_hot(labels, OBJECTS).movedim(-1, 2).float()
    order = torch.rand(batch, length, OBJECTS, generator=generator).argsort(-1)
    return slots, masks, order


def model_with(kind, slots, masks):
    parts = small_model(kind)
    pairs_with_areas = functools.partial(GivenPairs, match_half_area=0.03)
    models = {"images": Given, "pairs": GivenPairs, "pairs with areas": pairs_with_areas, "clips": GivenClips}
    model = models[kind](parts.encoder, parts.slots, parts.decoder)
    model.outputs = slots, masks
    return model


@pytest.mark.parametrize("kind, association", ASSOCIATIONS)
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_track_follows_one_object(kind, association, seed):
    """Track k stays the object of slot k in the first frame, however slots are shuffled from frame to frame."""
    slots, masks, order = moving_objects(seed)
    shuffled = [take_slots(x.flatten(0, 1), order.flatten(0, 1)).unflatten(0, x.shape[:2]) for x in (slots, masks)]
    for t, output in enumerate(track_clip(model_with(kind, *shuffled), numbered_frames(2, FRAMES), association)):
        first = take_slots(masks[:, t], order[:, 0])
        assert_same(output, expected_output(take_slots(slots[:, t], order[:, 0]), first))


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_clips_are_associated_by_the_frame_they_share(seed):
    """They have nothing else in common: objects are at random places in every frame."""
    torch.manual_seed(seed)
    slots, _, _ = moving_objects(seed)
    masks = F.one_hot(torch.randint(OBJECTS, (2, FRAMES, SIDE, SIDE)), OBJECTS).movedim(-1, 2).float()
    tracker = Tracker(model_with("clips", slots, masks))
    outputs = [tracker(frame) for frame in numbered_frames(2, FRAMES).unbind(1)]
    order = torch.cdist(outputs[0].slots, slots[:, 0]).argmin(-1)
    for t, output in enumerate(outputs):
        first = take_slots(masks[:, t], order)
        assert_same(output, expected_output(take_slots(slots[:, t], order), first))


def handover():
    """Return slots, masks and true labels of an object of 48 pixels that moves in three steps from slot 1 to slot 2.
    Each slot has a constant component of its own; slots 3 and 4 are always empty."""
    background, thing, *own = torch.eye(6)
    share = torch.tensor([0, 0, 1, 2, 3, 3]) / 3
    slots, labels = [], torch.zeros(len(share), SIDE * SIDE, dtype=torch.long)
    for t, u in enumerate(share):
        slots.append(torch.stack([background, (1 - u) * thing + 0.3 * own[0], u * thing + 0.3 * own[1], *own[2:]]))
        labels[t, :48] = 1 + (torch.arange(48) < 48 * u)
    truth = (labels > 0).long().unflatten(-1, (SIDE, SIDE))
    masks = F.one_hot(labels, 5).mT.unflatten(-1, (SIDE, SIDE)).float()
    return torch.stack(slots)[None], masks[None], truth[None]


@pytest.mark.parametrize(
    "kind, association, switches",
    [
        ("images", "area", 0),
        ("images", "hungarian", 1),
        ("pairs", "learned", 1),
        ("pairs with areas", "learned", 1),  # areas count less and less, the larger they are
    ],
)
def test_object_that_moves_to_another_slot(kind, association, switches):
    """Weighted by area, the object decides; without areas, the constant components of the empty slots do."""
    slots, masks, truth = handover()
    outputs = track_clip(model_with(kind, slots, masks), numbered_frames(1, len(slots[0])), association)
    tracks = torch.stack([output.masks.argmax(1) for output in outputs], 1)
    assert video_metrics(truth, tracks)["id_switches"].item() == switches
    assert (tracks[:, 0][truth[:, 0] > 0] == 1).all()
    assert (tracks[:, -1][truth[:, -1] > 0] == 1 + switches).all()


def test_area_maximises_the_sum_of_smaller_areas_times_cosines(rng):
    slots = torch.from_numpy(rng.standard_normal((1, 2, 4, 16))).float()
    labels = torch.from_numpy(rng.choice(4, (2, SIDE, SIDE), p=[0.5, 0.3, 0.15, 0.05]))
    masks = F.one_hot(labels, 4).movedim(-1, 1).float()[None]
    outputs = list(track_clip(model_with("images", slots, masks), numbered_frames(1, 2), "area"))
    (s, t), (a, b) = slots[0], masks[0].mean((-1, -2)) + MIN_AREA
    gain = torch.tensor(
        [
            [min(x, y) * torch.cosine_similarity(u, v, 0) for v, y in zip(t, b, strict=True)]
            for u, x in zip(s, a, strict=True)
        ]
    )
    best = max(itertools.permutations(range(4)), key=lambda order: sum(gain[i, j] for i, j in enumerate(order)))
    assert torch.equal(outputs[1].slots[0], t[list(best)])


def test_area_weighs_pairs_by_the_smaller_area():
    """With harmonic means of areas the two slots would change places."""
    first = torch.tensor([[1.0, 0, 0, 0], [0, 1, 0, 0]])
    second = torch.tensor([[0.14, 0.9, 0.1704**0.5, 0], [0, 0, 0, 1]])  # unit vectors
    labels = (torch.arange(SIDE) >= torch.tensor([[SIDE - 1], [SIDE // 2]])).long()  # areas 15/16, 1/16 and 1/2, 1/2
    masks = F.one_hot(labels[:, None].expand(2, SIDE, SIDE), 2).movedim(-1, 1).float()
    a, b = masks.mean((-1, -2))
    harmonic = (2 * a[:, None] * b / (a[:, None] + b)) * (first @ second.T)
    assert harmonic.trace() < harmonic.fliplr().trace()
    model = model_with("images", torch.stack([first, second])[None], masks[None])
    assert torch.equal(track_clip(model, numbered_frames(1, 2), "area")[1].slots[0], second)


def test_hungarian_compares_with_the_previous_frame_only():
    """Two orthogonal slots turn by 70 degrees a frame: a running mean would lag behind and swap them."""
    turn = torch.arange(FRAMES) * torch.pi * 70 / 180
    slots = torch.stack([torch.stack([turn.cos(), turn.sin()], -1), torch.stack([-turn.sin(), turn.cos()], -1)], 1)
    masks = F.one_hot(torch.arange(SIDE) % 2, 2).T[:, None].expand(FRAMES, 2, SIDE, SIDE).float()
    model = model_with("images", slots[None], masks[None])
    for t, output in enumerate(track_clip(model, numbered_frames(1, FRAMES), "hungarian")):
        assert torch.equal(output.slots[0], slots[t])


def hidden():
    """Return slots and masks of two objects. One is hidden in the third frame, and the other looks like it then."""
    background, first, second = torch.eye(16)[:3]
    frames = [(first, second)] * 2 + [(0.2 * background, first + second)] + [(second, first)]  # slots change places
    slots = torch.stack([torch.stack([background, *frame]) for frame in frames])
    labels = torch.zeros(len(frames), SIDE, SIDE, dtype=torch.long)
    labels[:, :6, :6], labels[:, 9:, 9:] = 1, 2
    labels[2, :6, :6] = 0
    return slots[None], F.one_hot(labels, 3).movedim(-1, 1).float()[None]


def test_a_track_waits_for_its_object():
    """With areas, learned matching compares with running means; without, with the frame before, where it was hidden."""
    slots, masks = hidden()
    ends = {}
    for kind in ("pairs", "pairs with areas"):
        outputs = track_clip(model_with(kind, slots, masks), numbered_frames(1, 4), "learned")
        ends[kind] = outputs[-1].slots[0, 1:].argmax(-1).tolist()
    assert ends == {"pairs": [2, 1], "pairs with areas": [1, 2]}


@pytest.mark.parametrize("kind, association", [("images", "area"), ("pairs with areas", "learned")])
def test_running_means_of_a_track(kind, association):
    slots, masks, _ = moving_objects(0)
    tracker = Tracker(model_with(kind, slots, masks), association)
    share = masks.mean((-1, -2))
    mean, area = slots[:, 0], share[:, 0]
    for t, frame in enumerate(numbered_frames(2, FRAMES).unbind(1)):
        tracker(frame)
        mean, area = (MOMENTUM * old + (1 - MOMENTUM) * new[:, t] for old, new in ((mean, slots), (area, share)))
        torch.testing.assert_close(tracker.mean, mean)
        torch.testing.assert_close(tracker.area, area, rtol=0, atol=2e-4)  # MIN_AREA is added


# ----------------------------------------------------------------------------------------------------- untrained models


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind, association", ASSOCIATIONS)
def test_clip_and_frames_one_by_one_give_the_same(kind, association, device):
    model, frames = small_model(kind).to(device), random_video(2).to(device)
    tracker = Tracker(model, association)
    one_by_one = [tracker(frame) for frame in frames.unbind(1)]
    for one, other in zip(track_clip(model, frames, association), one_by_one, strict=True):
        assert_same(one, other, exactly=device == "cpu")  # cuDNN may sum in another order each time
        assert not any(x.requires_grad for x in one)
        torch.testing.assert_close(one.reconstruction, (one.masks[:, :, None] * one.slot_reconstructions).sum(1))


@pytest.mark.parametrize("kind, association", [*ASSOCIATIONS, ("clips", "overlap")])
def test_videos_of_a_batch_are_independent(kind, association):
    model, frames = small_model(kind), random_video(2)
    alone = [track_clip(model, each[None], association) for each in frames]
    for t, output in enumerate(track_clip(model, frames, association)):
        for b in range(2):
            assert_same(DiscoveryOutput(*(x[b : b + 1] for x in output)), alone[b][t], exactly=False)


def test_association_only_reorders():
    """The slots of a frame are those of the model on this frame alone."""
    model, frames = small_model("images"), random_video(2)
    for association in ("area", "hungarian"):
        for t, output in enumerate(track_clip(model, frames, association)):
            with torch.no_grad():
                alone = model(frames[:, t])
            order = torch.cdist(output.slots, alone.slots).argmin(-1)
            assert torch.equal(order.sort(-1).values, torch.arange(3).expand(2, 3))
            assert_same(output, reorder_slots(alone, order), exactly=False)


def test_spacetime_model_on_a_clip_or_frame_by_frame():
    model, frames = small_model("clips"), random_video(2, 5)
    with torch.no_grad():
        whole, first = model(frames), model(frames[:, :1])
    for t, output in enumerate(track_clip(model, frames)):
        assert_same(output, DiscoveryOutput(*(x[:, t] for x in whole)))
    tracker = Tracker(model)
    assert_same(tracker(frames[:, 0]), DiscoveryOutput(*(x[:, 0] for x in first)))
    for t in range(1, 5):
        output = tracker(frames[:, t])
        with torch.no_grad():
            pair = model(frames[:, t - 1 : t + 1])
        assert torch.equal(output.reconstruction, pair.reconstruction[:, 1]), "of the newest two frames"


def tensors_held(tracker):
    held = [x for x in vars(tracker).values() if isinstance(x, Tensor)] + list(tracker.clip)
    return len(held), sum(x.untyped_storage().nbytes() for x in held)


def tensors_alive():
    gc.collect()
    return sum(type(x) is Tensor for x in gc.get_objects())


@pytest.mark.parametrize("kind, association", [("images", "area"), ("pairs", "learned"), ("clips", "overlap")])
def test_memory_does_not_grow(kind, association):
    tracker, held, alive = Tracker(small_model(kind), association), set(), set()
    for t in range(300):
        tracker(random_video()[:, 0])
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
    with pytest.raises(ValueError, match=r"^association is 'sort'; a Discovery expects area or hungarian$"):
        Tracker(small_model("images"), "sort")
    for kind in ("images", "clips"):
        for refused in (Tracker, lambda model, association: track_clip(model, random_video(), association)):
            with pytest.raises(ValueError, match=r"^association is 'learned'; a \w+ expects"):
                refused(small_model(kind), "learned")
    with pytest.raises(ValueError, match=r"^image has shape \(1, 8, 3, 16, 16\); expected \(B, 3, 16, 16\)$"):
        Tracker(small_model("images"))(random_video())
