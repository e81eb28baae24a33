"""Models that see several frames, scores of films, films as data, training and being judged on them, their report."""

import base64
import csv
import dataclasses
import io
import json
from contextlib import nullcontext
from html.parser import HTMLParser
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from sklearn.metrics import adjusted_rand_score

from cutslots import GridCut
from cutslots import evaluate as evaluation
from cutslots.data import Clips, Frames, hold, open_data, open_films
from cutslots.devices import make_fabric
from cutslots.evaluate import evaluate as evaluated
from cutslots.evaluate import film_labels, judge, watch
from cutslots.metrics import NAMES, score, score_films
from cutslots.model import Discovery, PairDiscovery, VolumeDiscovery, as_floats, build, load, save
from cutslots.partition import VolumePartition
from cutslots.presets import PRESETS, ModelConfig
from cutslots.reading import read_film
from cutslots.report import SCORES, FilmPictures, Pictures, films_html, player_html
from cutslots.scenes import Scenes
from cutslots.scenes.dataset import LENGTH, whole_numbers
from cutslots.scenes.files import generate
from cutslots.scenes.world import World
from cutslots.slots import VolumeSlots
from cutslots.track import follow
from cutslots.train import price, train
from tests.conftest import DEVICES
from tests.small_runs import MODEL, RUN, lines, sentence, two, weights
from tests.test_cut import literal_cut
from tests.test_model import assert_same, look
from tests.test_track import tiny_config, tiny_model

SENTENCE = r"\A[^\n]+\Z"
FRAMES = 24  # of every film of `moving`
seeds = st.integers(0, 2**32 - 1)


@pytest.fixture(scope="module", autouse=True)
def drawn_once():
    """To find out how things move takes a second: here it is done once for each film."""
    known, original = {}, Scenes.world

    def world(self, indices):
        keys = {i: (self.family, self.split, *self.objects, i) for i in whole_numbers(indices, self.count).tolist()}
        missing = [i for i, key in keys.items() if key not in known]
        made = original(self, missing)
        known.update((keys[i], made.pick(np.array([row]))) for row, i in enumerate(missing))
        return World.join([known[keys[int(i)]] for i in indices])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Scenes, "world", world)
        yield


def clips(batch=2, length=2):
    return torch.rand(batch, length, 3, 16, 16)


# ------------------------------------------------------------------------------------------------------- pairs, matched


@pytest.mark.parametrize("module", ["cut", "softmax", "attention"])
@pytest.mark.parametrize("redrawn", [0, 1])
def test_the_error_of_one_frame_reaches_both(module, redrawn):
    model, image = tiny_model("pairs", module=module), clips().requires_grad_()
    error = (model(image).reconstruction - image.detach())[:, redrawn].square().mean()
    error.backward()
    assert image.grad[:, 0].any() and image.grad[:, 1].any()
    for name, value in model.named_parameters():
        assert value.grad is not None and torch.isfinite(value.grad).all() and value.grad.any(), name


def test_the_matching_alone_carries_a_gradient():
    """With the MLP between the frames silenced, the second frame hangs on the first through the weights only."""
    model, image = tiny_model("pairs"), clips().requires_grad_()
    for value in model.motion[-1].parameters():
        torch.nn.init.zeros_(value)
    found = model(image)
    first, second = ((found.reconstruction - image.detach())[:, t].square().mean() for t in (0, 1))
    (grad,) = torch.autograd.grad(second, image, retain_graph=True)
    assert grad[:, 0].any() and grad[:, 1].any()
    (grad,) = torch.autograd.grad(first, image)
    assert grad[:, 0].any() and not grad[:, 1].any(), "the first frame is redrawn from its own slots"


@pytest.mark.parametrize("device", DEVICES)
def test_pairs_written_out(device):
    """Slots of each frame, matched, changed by the MLP, decoded; the partner's part is a mean under the weights."""
    model, image = tiny_model("pairs").to(device), clips().to(device)
    with torch.no_grad():
        found = model(image)
        (s, at_s), (t, at_t) = model.encode(image[:, 0]), model.encode(image[:, 1])
        r, weights = model.match(s, t)
        torch.testing.assert_close(r, weights @ t)
        both = torch.cat([s, r], -1)
        joined = (both + model.motion(both)).unflatten(-1, (2, -1)).movedim(-2, 1)
        torch.testing.assert_close(found.slots, joined)
        moved = torch.einsum("bij,bjyx->biyx", weights, at_t)
        torch.testing.assert_close(found.partition, torch.stack([at_s, moved], 1))
        for k, slots in enumerate(joined.unbind(1)):
            for name, x in model.decode(slots).items():
                torch.testing.assert_close(getattr(found, name)[:, k], x)


@pytest.mark.parametrize("module", ["cut", "attention"])
def test_shapes_of_pairs(module):
    found = tiny_model("pairs", module=module)(clips(5))
    assert found.slots.shape == (5, 2, 3, 16) and found.masks.shape == (5, 2, 3, 16, 16)
    assert found.partition.shape == (5, 2, 3, 8, 8) and found.pictures.shape == (5, 2, 3, 3, 16, 16)
    assert found.reconstruction.shape == (5, 2, 3, 16, 16)
    torch.testing.assert_close(found.masks.sum(2), torch.ones(5, 2, 16, 16))
    assert tiny_model("pairs", module=module)(clips(0)).masks.shape == (0, 2, 3, 16, 16)


@pytest.mark.parametrize("kind", ["pairs", "volumes"])
def test_the_order_of_the_batch_does_not_matter(kind):
    model, image, order = tiny_model(kind), clips(4), torch.randperm(4)
    one, other = look(model, image), look(model, image[order])
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a[order], b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["pairs", "volumes"])
def test_bytes_and_floats_are_one_clip(kind):
    model, image = tiny_model(kind), torch.randint(0, 256, (2, 2, 3, 16, 16), dtype=torch.uint8)
    assert_same(look(model, image), look(model, image / 255))


def apart(seed, count=5, batch=2):
    """Slots (B, K, D) at right angles, of lengths from one to three."""
    generator = torch.Generator().manual_seed(seed)
    slots = torch.linalg.qr(torch.randn(batch, 16, 16, generator=generator)).Q[:, :count]
    return slots * (1 + 2 * torch.rand(batch, count, 1, generator=generator))


@settings(max_examples=30, deadline=None)
@given(st.permutations(range(5)), seeds)
def test_matching_recovers_a_shuffle(order, seed):
    model, slots = tiny_model("pairs"), apart(seed)
    partner, weights = model.match(slots, slots[:, order])
    back = torch.tensor(order).argsort()
    assert torch.equal(weights.argmax(-1), back.expand(2, 5))
    torch.testing.assert_close(weights, torch.nn.functional.one_hot(back, 5).float().expand(2, 5, 5), rtol=0, atol=1e-4)
    torch.testing.assert_close(partner, slots, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 5))


@settings(max_examples=15, deadline=None)
@given(seeds)
def test_rows_sum_to_one_for_any_slots(seed):
    s, t = torch.randn(2, 3, 4, 16, generator=torch.Generator().manual_seed(seed)) * 10
    model = tiny_model("pairs")
    weights = model.match(s, t).weights
    torch.testing.assert_close(weights.sum(-1), torch.ones(3, 4))
    assert (weights >= 0).all()
    torch.testing.assert_close(model.match(3 * s, t / 7).weights, weights, rtol=1e-3, atol=1e-5)  # by angles alone


@pytest.mark.parametrize("device", DEVICES)
def test_matching_stays_in_float32(device):
    model, s = tiny_model("pairs").to(device), torch.randn(2, 4, 16, device=device)
    t = s.flip(1) + 0.3 * torch.randn_like(s)
    plain = model.match(s, t)
    with torch.autocast(device, dtype=torch.bfloat16):
        inside = model.match(s, t)
        assert all(x.dtype == torch.float32 for x in inside)
        assert all(x.dtype == torch.float32 for x in model.match(s.bfloat16(), t.bfloat16()))
        found = model(clips().to(device))
    assert all(torch.equal(a, b) for a, b in zip(inside, plain, strict=True))
    assert found.masks.dtype == found.reconstruction.dtype == torch.float32


@pytest.mark.parametrize("kind, length", [("images", None), ("pairs", 2), ("volumes", 2), ("volumes", 3)])
def test_models_turned_double(kind, length):
    """A check by finite differences, say, wants float64; it gives what float32 does, and gradients."""
    model = tiny_model(kind)
    image = clips(1, length or 1) if length else clips(1, 1)[:, 0]
    single = look(model, image)
    double = model.double()(image.double().requires_grad_())
    torch.testing.assert_close(double.reconstruction.float(), single.reconstruction, rtol=1e-3, atol=1e-4)
    double.reconstruction.sum().backward()


@pytest.mark.parametrize(
    "kind, shape, message",
    [
        ("pairs", (2, 3, 16, 16), r"image has shape \(2, 3, 16, 16\); expected clips \(B, 2, 3, S, S\)"),
        ("pairs", (2, 3, 3, 16, 16), r"image has shape \(2, 3, 3, 16, 16\); expected clips \(B, 2, 3, S, S\)"),
        ("pairs", (1, 2, 3, 16, 17), r"image has shape \(2, 3, 16, 17\); expected \(B, 3, 16, 16\)"),
        ("pairs", (1, 2, 1, 16, 16), r"image has shape \(2, 1, 16, 16\); expected \(B, 3, 16, 16\)"),
        ("volumes", (2, 3, 16, 16), r"image has shape \(2, 3, 16, 16\); expected clips \(B, T, 3, S, S\)"),
        ("volumes", (1, 2, 3, 32, 32), r"image has shape \(2, 3, 32, 32\); expected \(B, 3, 16, 16\)"),
    ],
)
def test_bad_clips(kind, shape, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        tiny_model(kind)(torch.rand(shape))


def test_clips_of_whole_numbers():
    for kind in ("pairs", "volumes"):
        with pytest.raises(TypeError, match=r"^image is of type torch\.int64; expected uint8 or floating point$"):
            tiny_model(kind)(torch.zeros(1, 2, 3, 16, 16, dtype=torch.int64))


# -------------------------------------------------------------------------------------------------------- save and load

CLASSES = {"images": Discovery, "pairs": PairDiscovery, "volumes": VolumeDiscovery}


@pytest.mark.parametrize("kind", CLASSES)
def test_what_was_saved_is_loaded(kind, tmp_path):
    model = tiny_model(kind)
    image = clips()[:, 0] if kind == "images" else clips()
    save(model, tmp_path)
    again = load(tmp_path)
    assert type(again) is type(model) is CLASSES[kind] and again.config == model.config and not again.training
    assert_same(look(again, image), look(model, image))
    model.save_pretrained(tmp_path / "hub")
    assert_same(look(CLASSES[kind].from_pretrained(tmp_path / "hub").eval(), image), look(model, image))
    assert_same(look(load(tmp_path / "hub"), image), look(model, image))


def test_weights_of_an_image_model_are_not_those_of_pairs(tmp_path):
    save(tiny_model("images"), tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | {"frames": 2}))
    with pytest.raises(ValueError, match=r"does not fit its config\.json: motion\.0\.bias is missing$"):
        load(tmp_path)


def test_the_shipped_model_is_of_images():
    assert type(load("tiny")) is Discovery


@pytest.mark.parametrize("name, kind", [("movi", PairDiscovery), ("movi11", PairDiscovery), ("clevr", Discovery)])
def test_presets_say_what_they_are_of(name, kind):
    assert type(build(PRESETS[name].model)) is kind


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"frames": 3}, "frames is 3; expected 1 or 2, or volume"),
        ({"frames": 0}, "frames is 0; expected at least 1"),
        ({"frames": 1, "volume": True}, "frames is 1 and volume is set; expected at least 2"),
        ({"volume": True, "module": "attention"}, "module is 'attention' and volume is set; expected 'cut'"),
        ({"volume": True, "module": "softmax"}, "module is 'softmax' and volume is set; expected 'cut'"),
    ],
)
def test_models_that_cannot_be(changes, message, tmp_path):
    with pytest.raises(ValueError, match=f"^{message}"):
        tiny_config(**changes)
    save(tiny_model("pairs"), tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | changes))
    with pytest.raises(ValueError, match=f"is not the configuration of a Discovery model: {message}"):
        load(tmp_path)


# ------------------------------------------------------------------------------------------ cuts through space and time


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("background", ["cuts", "terminals", "none"])
@pytest.mark.parametrize("length", [1, 2, 4])
def test_masks_of_clips_sum_to_one(device, background, length):
    """Clips may be as long as the partition was built for, or shorter, or longer."""
    partition = VolumePartition(8, 5, (6, 9), frames=2, background=background).to(device)
    x = torch.randn(2, length, 8, 6, 9, device=device)
    parts, masks = partition(x)
    assert masks.shape == (2, length, 5, 6, 9) and masks.dtype == torch.float32 and (masks >= 0).all()
    torch.testing.assert_close(masks.sum(2), torch.ones(2, length, 6, 9, device=device))
    torch.testing.assert_close(parts.sum(2), x, msg="a partition loses nothing")


@pytest.mark.parametrize("tie", [None, 1.0])
@pytest.mark.parametrize("length", [1, 2, 3])
def test_algorithm_1_through_time(length, tie):
    """The network on each frame alone, cuts of the clip one by one, softmax at each temperature."""
    options = {"temperature": 0.5, "background_temperature": 0.1, "background_anchor": tie}
    partition = VolumePartition(8, 4, (6, 9), frames=2, **options)
    x = torch.randn(2, length, 8, 6, 9)
    w = torch.stack([partition.net(frame).reshape(2, 5, 8, 6, 9) for frame in x.unbind(1)], 3)
    p = [GridCut((length, 6, 9), gamma=0.5, anchor=(tie or 0.0) if i < 2 else 0.0)(w[:, i]) for i in range(5)]
    ground = torch.softmax(torch.stack(p[:2], 2) / 0.1, 2)
    objects = torch.softmax(torch.stack(p[2:], 2) / 0.5, 2)
    masks = torch.cat([ground[:, :, :1], ground[:, :, 1:] * objects], 2)
    torch.testing.assert_close(partition.masks(x), masks)
    torch.testing.assert_close(partition(x).parts, masks[:, :, :, None] * x[:, :, None])


def test_terminals_of_a_clip_make_its_background():
    partition = VolumePartition(8, 3, (6, 9), background="terminals", background_temperature=1.0)
    x = torch.randn(2, 3, 8, 6, 9)
    w = torch.stack([partition.net(frame).reshape(2, 3, 8, 6, 9) for frame in x.unbind(1)], 3)
    cut = GridCut((3, 6, 9))
    ground = torch.softmax(cut.solve(w[:, 0]).d[:, 6:8], 1)
    objects = torch.softmax(torch.stack([cut(w[:, i]) for i in (1, 2)], 1) / 0.5, 1)
    torch.testing.assert_close(partition.masks(x), torch.cat([ground[:, :1], ground[:, 1:] * objects], 1).movedim(2, 1))


@pytest.mark.parametrize("silent", [False, True])
@pytest.mark.parametrize("length", [1, 2, 3])
def test_vertices_are_those_of_the_literal_program(length, silent):
    """Also where the weights between frames are zero: the frames hang together all the same."""
    partition, w = VolumePartition(8, 3, (4, 5), frames=2), torch.randn(2, 3, 8, length, 4, 5)
    if silent:
        w[:, :, :2] = 0
    expected = torch.from_numpy(literal_cut((length, 4, 5), w.double())[0]).unflatten(-1, (length, 4, 5))
    p = partition.vertices(w)
    torch.testing.assert_close(p.double(), expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(p, GridCut((length, 4, 5))(w))
    if silent and length > 1:
        frames = GridCut((4, 5))(w[:, :, 2:].movedim(3, 0)).movedim(0, 2)
        assert (p - frames).abs().max() > 0.01


@pytest.mark.parametrize("length", [2, 3])
def test_gradients_through_time(length):
    partition = VolumePartition(3, 3, (3, 4), frames=2, hidden=4).double()
    x = torch.randn(1, length, 3, 3, 4, dtype=torch.double, requires_grad=True)
    assert torch.autograd.gradcheck(partition.masks, x)


@pytest.mark.parametrize("background", ["cuts", "terminals", "none"])
def test_every_frame_moves_the_masks_of_all(background):
    partition = VolumePartition(8, 4, (6, 9), frames=2, background=background)
    x = torch.randn(2, 3, 8, 6, 9, requires_grad=True)
    for t in range(3):
        (grad,) = torch.autograd.grad(partition.masks(x)[:, t].square().sum(), x)
        assert grad.flatten(2).any(-1).all()


def test_lengths_leave_no_trace():
    """Another length now and then changes neither the state nor what is found at the first."""
    partition, x = VolumePartition(8, 3, (6, 9), frames=2), torch.randn(2, 5, 8, 6, 9)
    before, names = partition.masks(x[:, :2]), list(partition.state_dict())
    partition.masks(x)
    assert torch.equal(partition.masks(x[:, :2]), before) and list(partition.state_dict()) == names
    twin = VolumePartition(8, 3, (6, 9), frames=5)
    twin.load_state_dict(partition.state_dict())
    assert torch.equal(twin.masks(x), partition.masks(x)), "what it was built for does not matter"


def test_volume_slots_pool_each_frame():
    module, x = VolumeSlots(8, 3, (6, 9), 16), torch.randn(2, 4, 8, 6, 9)
    slots, masks = module(x)
    assert slots.shape == (2, 4, 3, 16) and masks.shape == (2, 4, 3, 6, 9)
    for t in range(4):
        torch.testing.assert_close(slots[:, t], module.pooled(module.position(x[:, t]), masks[:, t]))


@pytest.mark.parametrize("length", [1, 2, 5])
@pytest.mark.parametrize("background", ["cuts", "terminals"])
def test_volumes_of_any_length(length, background):
    model, image = tiny_model("volumes", background=background), clips(2, length)
    found = model(image)
    assert found.slots.shape == (2, length, 3, 16) and found.masks.shape == (2, length, 3, 16, 16)
    assert found.partition.shape == (2, length, 3, 8, 8) and found.pictures.shape == (2, length, 3, 3, 16, 16)
    assert found.reconstruction.shape == image.shape
    torch.testing.assert_close(found.masks.sum(2), torch.ones(2, length, 16, 16))
    torch.testing.assert_close(found.partition.sum(2), torch.ones(2, length, 8, 8))
    (found.reconstruction - image).square().mean().backward()
    for name, value in model.named_parameters():
        assert value.grad is not None and torch.isfinite(value.grad).all() and value.grad.any(), name


def test_bad_features_of_clips():
    partition = VolumePartition(8, 3, (6, 9))
    with pytest.raises(ValueError, match=r"^features have shape \(2, 8, 6, 9\); expected \(B, T, C, H, W\)$"):
        partition(torch.randn(2, 8, 6, 9))
    with pytest.raises(ValueError, match=r"^features have shape \(4, 8, 9, 6\); expected \(B, 8, 6, 9\)$"):
        partition(torch.randn(2, 2, 8, 9, 6))


# ------------------------------------------------------------------------------------------------------ scores of films


def films_by_hand(true, predicted):
    """Scores of one film, a list of frames."""
    scores = score_films(torch.tensor([true]), torch.tensor([predicted]))
    return {name: value.item() for name, value in scores.items()}


@pytest.mark.parametrize("seed", range(10))
def test_video_ari_equals_sklearn(seed):
    rng = np.random.default_rng(seed)
    true = rng.integers(0, rng.integers(1, 8), size=(3, 5, 7, 6))
    noise = rng.random(true.shape) < rng.random()
    predicted = np.where(noise, rng.integers(0, 6, true.shape), true)
    ours = score_films(torch.from_numpy(true), torch.from_numpy(predicted))
    for b in range(3):
        t, p = true[b].ravel(), predicted[b].ravel()
        assert ours["ari"][b].item() == pytest.approx(adjusted_rand_score(t, p), abs=1e-9)
        assert ours["ari_fg"][b].item() == pytest.approx(adjusted_rand_score(t[t > 0], p[t > 0]), abs=1e-9)
        frames = [(t.ravel(), p.ravel()) for t, p in zip(true[b], predicted[b], strict=True)]
        means = [np.mean([adjusted_rand_score(t[t > low], p[t > low]) for t, p in frames]) for low in (-1, 0)]
        assert [ours["frame_ari"][b].item(), ours["frame_ari_fg"][b].item()] == pytest.approx(means, abs=1e-9)


def test_scores_of_a_film_are_those_of_one_long_picture():
    true, predicted = torch.randint(0, 5, (2, 3, 4, 6, 6))
    ours, theirs = score_films(true, predicted), score(true.flatten(1), predicted.flatten(1))
    assert set(ours) == {*NAMES, "frame_ari", "frame_ari_fg", "switches"}
    assert all(torch.equal(ours[name], theirs[name]) for name in NAMES)


def test_video_ari_by_hand():
    """Two objects that change labels half-way: perfect in every frame, no better than chance as a film."""
    true = [[0, 0, 1, 1, 2, 2]] * 2
    kept = films_by_hand(true, [[3, 3, 4, 4, 5, 5]] * 2)
    swapped = films_by_hand(true, [[3, 3, 4, 4, 5, 5], [3, 3, 5, 5, 4, 4]])
    assert kept["ari"] == kept["ari_fg"] == kept["frame_ari_fg"] == 1 and kept["switches"] == 0
    # Of 28 pairs of 8 pixels both labellings join 12; 4 are joined by both. Expected: 144/28.
    assert swapped["ari_fg"] == pytest.approx((4 - 144 / 28) / (12 - 144 / 28))
    assert swapped["frame_ari"] == swapped["frame_ari_fg"] == 1 and swapped["switches"] == 2


@pytest.mark.parametrize(
    "case, true, predicted, switches",
    [
        ("one object, one label", [[1, 0], [1, 0], [0, 1]], [[5, 2], [5, 2], [2, 5]], 0),
        ("its label changes for good", [[1, 0], [1, 0], [1, 0]], [[5, 2], [4, 2], [4, 2]], 1),
        ("there and back", [[1, 0], [1, 0], [1, 0]], [[5, 2], [4, 2], [5, 2]], 2),
        ("gone and back with its label", [[1, 0], [0, 0], [1, 0]], [[5, 2], [2, 2], [5, 2]], 0),
        ("gone and back with another", [[1, 0], [0, 0], [0, 0], [1, 0]], [[5, 2], [2, 2], [4, 2], [4, 2]], 1),
        ("it comes late", [[0, 0], [0, 1], [0, 1]], [[2, 2], [2, 5], [2, 5]], 0),
        ("two objects swap", [[1, 2], [1, 2]], [[3, 4], [4, 3]], 2),
        ("only one of two changes", [[1, 2, 0], [1, 2, 0]], [[3, 4, 0], [3, 5, 0]], 1),
        ("two objects share a label", [[1, 2], [1, 2]], [[3, 3], [3, 3]], 0),
        ("the ground is nobody", [[0, 1], [0, 1], [0, 1]], [[7, 5], [8, 5], [9, 5]], 0),
        ("most of it counts", [[1, 1, 1], [1, 1, 1]], [[5, 5, 4], [4, 5, 5]], 0),
        ("most of it changes", [[1, 1, 1], [1, 1, 1]], [[5, 5, 4], [4, 4, 5]], 1),
        ("one frame", [[1, 2, 0]], [[1, 2, 0]], 0),
        ("no object", [[0, 0], [0, 0]], [[1, 2], [2, 1]], 0),
    ],
)
def test_identity_switches_by_hand(case, true, predicted, switches):
    assert films_by_hand(true, predicted)["switches"] == switches, case


@pytest.mark.parametrize("pixels, switches", [(1, 0), (2, 2)])
def test_who_is_too_small_is_not_asked(pixels, switches):
    """Of 1,600 pixels an object needs two. Shrunk to fewer it is not seen, and then has the label it had before."""
    true, predicted = torch.zeros(1, 3, 40, 40, dtype=torch.long), torch.zeros(1, 3, 40, 40, dtype=torch.long)
    for t, (size, label) in enumerate([(9, 5), (pixels, 4), (9, 5)]):
        true[0, t, 0, :size], predicted[0, t, 0, :size] = 1, label
    assert score_films(true, predicted)["switches"].item() == switches


def test_films_are_scored_one_by_one():
    true, predicted = torch.randint(0, 4, (2, 3, 5, 4, 4))
    together = score_films(true, predicted)
    for b in range(3):
        for name, value in score_films(true[b : b + 1], predicted[b : b + 1]).items():
            assert value.item() == pytest.approx(together[name][b].item(), abs=1e-12), name


@settings(max_examples=60, deadline=None)
@given(seeds, st.permutations(range(5)), st.permutations(range(1, 4)))
def test_names_of_tracks_and_objects_do_not_matter(seed, names, objects):
    generator = torch.Generator().manual_seed(seed)
    true = torch.randint(0, 4, (2, 4, 6), generator=generator)
    predicted = torch.randint(0, 5, (2, 4, 6), generator=generator)
    one = score_films(true, predicted)
    other = score_films(torch.tensor([0, *objects])[true], torch.tensor(names)[predicted])
    for name in ("ari", "ari_fg", "miou", "miou_gt", "frame_ari", "frame_ari_fg", "switches"):
        torch.testing.assert_close(one[name], other[name], msg=name)


def test_bad_films():
    good = torch.zeros(2, 3, 4, 4, dtype=torch.long)
    for true, predicted in ((good, good[:, :2]), (good[0, 0], good[0, 0]), (good, good[0])):
        with pytest.raises(ValueError, match=r"^true has shape \(.*\), predicted \(.*\); expected \(B, T, ...\)$"):
            score_films(true, predicted)
    with pytest.raises(TypeError, match=r"predicted is of type torch\.float32"):
        score_films(good, good.float())
    with pytest.raises(ValueError, match="a label is -1"):
        score_films(good, good - 1)


# -------------------------------------------------------------------------------------------------------- films as data


@pytest.fixture(scope="module")
def films():
    return Scenes("moving", "train", 16, count=3)


@pytest.fixture(scope="module")
def whole(films):
    """All of them: images (3, 24, 3, 16, 16) and masks."""
    return films.render(range(3))


@pytest.fixture(scope="module", params=["made", "held", "in memory", "on disk"])
def source(request, films, tmp_path_factory):
    """The same films, wherever they come from."""
    if request.param == "made":
        return films
    if request.param == "held":
        return hold(films, quiet=True)
    return films.cache(tmp_path_factory.mktemp("cache") if request.param == "on disk" else None, quiet=True)


def test_stills_wherever_films_come_from(source, whole):
    assert len(source) == 3 and source.frames == FRAMES
    number, moment = [2, 0, 2, 1, 2], [23, 0, 5, 7, 5]
    image, mask = source.stills(number, moment)
    assert torch.equal(image, whole.image[number, moment]) and torch.equal(mask, whole.mask[number, moment])
    for numbers, moments in (([3], [0]), ([0], [FRAMES]), ([-1], [0])):
        with pytest.raises(IndexError, match="is out of range"):
            source.stills(numbers, moments)


@pytest.mark.parametrize("kind", ["made", "held", "cached"])
def test_stills_of_pictures_that_do_not_move(kind):
    """Films of one frame are films too."""
    scenes = Scenes("plain", size=16, count=4)
    data = {
        "made": lambda: scenes,
        "held": lambda: hold(scenes, quiet=True),
        "cached": lambda: scenes.cache(quiet=True),
    }
    image, mask = data[kind]().stills([3, 1, 3], [0, 0, 0])
    expected = scenes.render([3, 1, 3])
    assert torch.equal(image, expected.image) and torch.equal(mask, expected.mask)


@pytest.mark.parametrize("length", [1, 2, 5, FRAMES])
def test_clips_are_all_runs_of_neighbours(source, whole, length):
    starts = FRAMES - length + 1
    data = Clips(source, length)
    assert len(data) == 3 * starts
    numbers = [0, starts - 1, starts % len(data), len(data) - 1, 0]
    image, mask = data.render(numbers)
    assert image.shape == (5, length, 3, 16, 16) and mask.shape == (5, length, 16, 16)
    for row, i in enumerate(numbers):
        run = i // starts, slice(i % starts, i % starts + length)
        assert torch.equal(image[row], whole.image[run]) and torch.equal(mask[row], whole.mask[run])
    with pytest.raises(IndexError, match=f"scene {len(data)} is out of range"):
        data.render([len(data)])


def test_films_that_are_too_short(films):
    with pytest.raises(ValueError, match=r"^the films have 24 frames; expected at least 25 \(--data moving"):
        Clips(films, FRAMES + 1)
    with pytest.raises(ValueError, match=r"^the films have 1 frames; expected at least 2"):
        Clips(Scenes("plain", size=16, count=2), 2)


def test_frames_are_images(source, whole):
    data = Frames(source)
    assert len(data) == 3 * FRAMES
    assert [data.name(i) for i in (0, 23, 24, 71)] == ["000000-00", "000000-23", "000001-00", "000002-23"]
    chosen = [71, 0, 24, 23, 24]
    image, mask = data.render(chosen)
    assert torch.equal(image, whole.image.flatten(0, 1)[chosen]) and torch.equal(mask, whole.mask.flatten(0, 1)[chosen])
    assert len(Frames(source, 30)) == 30 and len(Frames(source, 1000)) == 3 * FRAMES
    with pytest.raises(IndexError, match="scene 30 is out of range"):
        Frames(source, 30).render([30])


def test_moving_scenes_are_handed_out_frame_by_frame(whole):
    data = open_data("moving", "train", 16, 30)
    assert isinstance(data, Frames) and len(data) == 30 and len(data.films) == 2
    assert torch.equal(data.render([29, 0]).image, whole.image[[1, 0], [5, 0]])
    assert len(open_data("moving", "val", 16)) == LENGTH["val"] * FRAMES
    assert open_data("moving:2-3", "val", 16).films.objects == [2, 3]


@pytest.mark.parametrize("frames, count", [(1, 1), (24, 1), (25, 2), (48, 2), (49, 3), (None, LENGTH["train"])])
def test_as_many_films_as_have_so_many_frames(frames, count):
    assert len(open_films("moving", "train", 16, frames=frames)) == count
    assert len(open_films("plain", "train", 16, frames=frames)) == (frames or count)


# ------------------------------------------------------------------------------------------------------------- training

KINDS = {
    "pairs": {},
    "volumes": {"volume": True},
    "clips": {"volume": True, "frames": 3},
    "attention": {"module": "attention"},
    "images": {"frames": 1},
}
TYPES = {"volumes": VolumeDiscovery, "clips": VolumeDiscovery, "images": Discovery}


def film_run(out, **changes):
    """`movi`, small enough for tests: two films to learn from, two to be judged by."""
    values = MODEL | RUN | {"images": 2 * FRAMES, "eval_images": 2 * FRAMES, "steps": 4, "eval_every": 4} | changes
    names = {field.name for field in dataclasses.fields(ModelConfig)}
    model = dataclasses.replace(PRESETS["movi"].model, **{k: v for k, v in values.items() if k in names})
    return dataclasses.replace(
        PRESETS["movi"], model=model, out=out, **{k: v for k, v in values.items() if k not in names}
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run of each kind, made when it is first asked for. Not to be written to."""
    folder, made = tmp_path_factory.mktemp("runs"), {}

    def run(kind):
        if kind not in made:
            made[kind] = train(film_run(folder / kind, **KINDS[kind]))
        return made[kind]

    return run


@pytest.mark.parametrize("kind", KINDS)
def test_learning_from_films(kind, runs):
    run = runs(kind)
    assert type(load(run)) is TYPES.get(kind, PairDiscovery)
    assert [line["step"] for line in lines(run)] == [4, 4]
    for line in lines(run):
        if "val" in line:
            assert {"ari_fg", "frame_ari_fg", "switches", "partition_ari", "mse"} <= set(line["val"])
        else:
            assert np.isfinite([line["loss"], line["gradient"]]).all() and line["gradient"] > 0
    torch.manual_seed(0)
    before = build(film_run(run, **KINDS[kind]).model).state_dict()
    moved = [name for name, value in load(run).state_dict().items() if not torch.equal(value, before[name])]
    assert moved == [name for name, _ in load(run).named_parameters()], "everything is learned"
    assert "moving (2 films)" in (run / "report.html").read_text() and len(list((run / "pictures").iterdir())) == 1


@pytest.mark.parametrize("kind, steps", [("pairs", 1), ("attention", 3)])
def test_a_run_that_was_gone_on_with(kind, steps, runs, tmp_path):
    """To the bytes of one that was not stopped; films may come from a cache meanwhile."""
    train(film_run(tmp_path / "run", **KINDS[kind], steps=steps))
    train(film_run(tmp_path / "run", **KINDS[kind], cache=tmp_path / "cache"))
    assert weights(tmp_path / "run") == weights(runs(kind))
    assert lines(tmp_path / "run")[-1]["val"] == lines(runs(kind))[-1]["val"]


def test_price_by_hand():
    config = dataclasses.replace(PRESETS["movi11"], area_price=0.5, area_from=10)
    assert [price(config, step) for step in (0, 9, 10, 14, 19, 20, 999)] == [0, 0, 0.05, 0.25, 0.5, 0.5, 0.5]
    assert price(dataclasses.replace(config, area_from=0), 0) == 0.5
    assert price(PRESETS["movi"], 10**6) == 0


def test_the_price_is_paid_by_all_but_the_first_slot(runs, tmp_path):
    dear = train(film_run(tmp_path / "dear", area_price=10.0))
    image = open_films("moving", "train", 16, 1).render([0]).image[:, :2]
    share = [look(load(run), image).masks[:, :, 0].mean() for run in (runs("pairs"), dear)]
    assert share[1] > share[0], "the first slot takes more"


def test_what_a_film_model_cannot_learn_from(tmp_path, monkeypatch):
    generate(Scenes("plain", size=16, count=3), tmp_path / "files", quiet=True)
    for data, message in (
        ("plain", "the films have 1 frames; expected at least 2 (--data moving, movi-a:DIR)"),
        (str(tmp_path / "files"), f"data is {str(tmp_path / 'files')!r}, images; a model of 2 frames expects films"),
    ):
        words = ["train", "movi", "--out", str(tmp_path / "run"), "--size", "16", "--data", data, "--slots", "3"]
        assert sentence(monkeypatch, [*words, "--accelerator", "cpu"]) == f"cutslots: {message}"
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"module": "attention", "area_price": 0.1},
            "area_price is set, but Slot Attention has no slot for the ground",
        ),
        ({"area_price": -1.0}, "area_price is -1.0; expected zero or more"),
        ({"area_price": float("nan")}, "area_price is nan; expected zero or more"),
        ({"area_from": -1}, "area_from is -1; expected zero or more"),
        ({"volume": True, "frames": 25}, "the films have 24 frames; expected at least 25"),
    ],
)
def test_bad_arguments(tmp_path, changes, message):
    with pytest.raises(ValueError, match=SENTENCE) as caught:
        train(film_run(tmp_path / "run", **changes))
    assert str(caught.value).startswith(message) and not (tmp_path / "run").exists()


# --------------------------------------------------------------------------------------------------------- being judged


@pytest.fixture(scope="module")
def judged(runs, tmp_path_factory):
    """The folder that an evaluation of a kind of run has written, by one process, for two films."""
    folder, made = tmp_path_factory.mktemp("judged"), {}

    def judge(kind, join="area"):
        if (kind, join) not in made:
            made[kind, join] = folder / f"{kind}-{join}"
            evaluated(str(runs(kind)), ("moving",), made[kind, join], "val", 2, make_fabric("cpu"), join)
        return made[kind, join]

    return judge


def table(out):
    with (out / "per_image.csv").open() as file:
        return list(csv.DictReader(file))


class Page(HTMLParser):
    """The attributes of every tag by its name, and the text."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.text = [], ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text += data

    def all(self, tag, **wanted):
        return [attrs for name, attrs in self.tags if name == tag and wanted.items() <= attrs.items()]


@pytest.mark.parametrize("kind", KINDS)
def test_what_an_evaluation_of_films_leaves(kind, judged, runs):
    record = json.loads((judged(kind) / "results.json").read_text())
    assert record["join"] == "area" and record["results"]["moving"]["images"] == 2
    rows = table(judged(kind))
    assert [(row["data"], row["image"]) for row in rows] == [("moving", "000000"), ("moving", "000001")]
    for name, value in record["results"]["moving"].items():
        if name not in ("split", "images"):
            assert np.mean([float(row[name]) for row in rows]) == value, name
    last = lines(runs(kind))[-1]["val"]
    assert {k: v for k, v in record["results"]["moving"].items() if k in last} == last, "as training judged it"
    page = Page((judged(kind) / "report.html").read_text())
    assert len(page.all("div", **{"class": "player"})) == 2
    assert ("Frames 5 and 20, matched" in page.text) == (kind in ("pairs", "attention"))
    assert SCORES["switches"] in page.text and "published, MOVi-A" in page.text


@pytest.mark.parametrize("kind, join", [("pairs", "area"), ("pairs", "matching"), ("images", "hungarian")])
def test_the_table_of_films_by_hand(kind, join, judged, runs):
    image, mask = Scenes("moving", "val", 16, count=2).render(range(2))
    torch.manual_seed(0)
    found = follow(load(runs(kind)), image, join)
    scores = {
        prefix + name: value
        for prefix, labels in zip(("", "partition_", "joined_"), film_labels(found, image).values(), strict=True)
        for name, value in score_films(mask, labels).items()
    }
    redrawn = torch.stack([each.reconstruction for each in found], 1)
    errors = (as_floats(image) - redrawn).double().square().sum((2, 3, 4)).mean(1)
    rows = table(judged(kind, join))
    assert json.loads((judged(kind, join) / "results.json").read_text())["join"] == join
    for b, row in enumerate(rows):
        assert {name: float(row[name]) for name in scores} == {name: value[b].item() for name, value in scores.items()}
        assert float(row["mse"]) == pytest.approx(errors[b].item(), rel=1e-6)
        assert int(row["objects"]) == len(set(mask[b].flatten().tolist()) - {0})


def test_labels_of_films_are_those_of_their_frames():
    model, image = tiny_model("images"), torch.randint(0, 256, (2, 3, 3, 16, 16), dtype=torch.uint8)
    found = follow(model, image)
    labels = film_labels(found, image)
    for t in range(3):
        assert torch.equal(labels["decoder"][:, t], found[t].masks.argmax(1))
        larger = torch.nn.Upsample(scale_factor=2, mode="bilinear")(found[t].partition)
        assert torch.equal(labels["partition"][:, t], larger.argmax(1))
        assert torch.equal(labels["joined"][:, t], read_film(found, image)[t].argmax(1))


def words(run, out, *more):
    return ["evaluate", str(run), "--out", str(out), "--accelerator", "cpu", "--split", "val", *more]


def test_two_processes_judge_films_the_same(runs, judged, tmp_path):
    more = ["--data", "moving", "--images", "2", "--devices", "2"]
    commands = two(words(runs("attention"), tmp_path / "two", *more), tmp_path)
    assert [command.end() for command in commands] == [0, 0], "".join(command.said() for command in commands)
    for name in ("results.json", "per_image.csv"):
        assert (tmp_path / "two" / name).read_bytes() == (judged("attention") / name).read_bytes(), name


def test_films_are_dealt_out_to_processes(runs, monkeypatch):
    """Each takes its batches of films, and finds what one alone would: slots are drawn by the number of the batch."""
    monkeypatch.setattr(evaluation, "FILMS", 1)
    model, data = load(runs("attention")), hold(Scenes("moving", "val", 16, count=3), quiet=True)
    first, second, alone = (
        judge(model, data, SimpleNamespace(global_rank=r, world_size=n, device="cpu", autocast=nullcontext)).rows
        for r, n in ((0, 2), (1, 2), (0, 1))
    )
    assert sorted(first) == [0, 2] and sorted(second) == [1] and first | second == alone


@pytest.mark.parametrize("data", [("plain", "moving"), ("moving", "plain")])
def test_images_and_films_in_one_table(data, runs, tmp_path):
    evaluated(str(runs("images")), data, tmp_path, "val", 2, make_fabric("cpu"))
    rows = {name: [row for row in table(tmp_path) if row["data"] == name] for name in data}
    assert len(rows["plain"]) == len(rows["moving"]) == 2
    assert all(row["switches"] and row["frame_ari"] for row in rows["moving"])
    assert not any(row["switches"] or row["frame_ari"] for row in rows["plain"])


def test_what_cannot_be_judged(runs, tmp_path, monkeypatch):
    for kind in ("images", "volumes"):
        said = sentence(
            monkeypatch, words(runs(kind), tmp_path, "--data", "moving", "--images", "1", "--join", "matching")
        )
        assert said.startswith("cutslots: join is 'matching', which this model has not learned")
    for kind in ("pairs", "volumes"):
        said = sentence(monkeypatch, words(runs(kind), tmp_path / "out", "--data", "moving", "plain", "--images", "2"))
        assert said.startswith(f"cutslots: data is 'plain', images; {runs(kind)} learned from films")
    assert not (tmp_path / "out").exists()


def test_the_model_is_left_as_it_was(runs):
    model, data, fabric = load(runs("pairs")), Scenes("moving", "val", 16, count=1), make_fabric("cpu")
    for training in (True, False):
        model.train(training)
        judge(model, data, fabric)
        watch(model, data, fabric)
        assert model.training == training and all(p.grad is None for p in model.parameters())


# ----------------------------------------------------------------------------------------------------------- the report


def film_pictures(rng, length=6, side=12, slots=3):
    colours = lambda *shape: rng.integers(0, 256, (*shape, side, side, 3), dtype=np.uint8)
    labels = lambda top: rng.integers(0, top, (length, side, side), dtype=np.uint8)
    found = [labels(slots) for _ in range(3)]
    return Pictures(
        colours(length), labels(4), colours(length), *found[:2], colours(length, slots), found[2], together=True
    )


SHOWN = ["image", "redrawn", "true objects", "found objects", "joined", "its partition"]


def picture(attrs):
    head, _, data = attrs["src"].partition(",")
    return head, np.asarray(Image.open(io.BytesIO(base64.b64decode(data, validate=True))))


def test_a_player(rng):
    film = film_pictures(rng)
    page = Page(player_html(film, "film 1"))
    strips = page.all("img")
    assert [attrs["alt"] for attrs in strips] == [f"film 1, {caption}" for caption in SHOWN]
    for attrs, caption in zip(strips, SHOWN, strict=True):
        head, strip = picture(attrs)
        assert head == "data:image/jpeg;base64" and strip.shape == (12, 6 * 12, 3)
        expected = np.concatenate([film.columns(t)[caption] for t in range(6)], 1)
        assert abs(strip.mean((0, 1)) - expected.mean((0, 1))).max() < 5, "give or take what JPEG loses"
    (slider,) = page.all("input", type="range")
    assert (slider["min"], slider["max"], slider["value"]) == ("0", "5", "0")
    assert slider["aria-label"] == "frame of film 1"
    (button,) = page.all("button")
    assert button["aria-label"] == "play film 1"
    (player,) = page.all("div", **{"class": "player"})
    assert player["style"] == "--n:6" and all(caption in page.text for caption in SHOWN)


def test_a_player_without_truth(rng):
    film = film_pictures(rng)
    page = Page(player_html(film._replace(truth=np.zeros_like(film.truth)), "film 2"))
    expected = [f"film 2, {caption}" for caption in SHOWN if caption != "true objects"]
    assert [attrs["alt"] for attrs in page.all("img")] == expected


@pytest.mark.parametrize("empty", [0, 3])
def test_a_film_with_an_empty_frame_shows_its_truth(rng, empty):
    """An object may come late, or go for a while."""
    film = film_pictures(rng)
    film.truth[empty] = 0
    page = Page(player_html(film, "film 1"))
    assert [attrs["alt"] for attrs in page.all("img")] == [f"film 1, {caption}" for caption in SHOWN]


def test_a_track_has_one_colour(rng):
    film = film_pictures(rng)
    for labels in (film.decoder, film.partition):
        painted = np.stack([film.colours(labels, i) for i in range(len(labels))])
        for k in range(3):
            assert len(np.unique(painted[labels == k], axis=0)) == 1


def test_films_and_a_pair_on_the_page(rng):
    films, pair = [film_pictures(rng), film_pictures(rng, 10)], film_pictures(rng, 2)
    alone, both = (Page("".join(films_html(FilmPictures(films, x), "moving:2-3"))) for x in (None, pair))
    for page in (alone, both):
        assert [attrs["max"] for attrs in page.all("input")] == ["5", "9"]
        assert "What it follows in moving:2-3" in page.text and "Its slots over time" in page.text
        for row in ("image", "redrawn", "slot 1", "slot 2", "slot 3"):
            assert len(page.all("img", alt=row)) == 6 + (2 if page is both else 0), "all frames of a short film"
    assert "Frames 5 and 20" not in alone.text and "Frames 5 and 20, matched" in both.text
    assert len(both.all("img")) == len(alone.all("img")) + 2 * 9


def test_some_frames_of_a_film(rng):
    film = film_pictures(rng, 9)
    some = film.some(3)
    assert some.together and all(
        np.array_equal(getattr(some, name), getattr(film, name)[[0, 4, 8]]) for name in Pictures._fields[:-1]
    )
    assert len(film.some(99).image) == 9


def test_what_is_watched(runs):
    data, fabric = Scenes("moving", "val", 16, count=2), make_fabric("cpu")
    image, mask = data.render(range(2))
    for kind in ("pairs", "volumes"):
        model = load(runs(kind))
        seen = watch(model, data, fabric)
        assert len(seen.films) == 2 and all(film.together for film in seen.films)
        for b, film in enumerate(seen.films):
            assert np.array_equal(film.image, image[b].movedim(1, -1)) and np.array_equal(film.truth, mask[b])
        assert (seen.pair is not None) == (kind == "pairs")
        if seen.pair:
            assert np.array_equal(seen.pair.image, image[0, [5, 20]].movedim(1, -1))
            found = look(model, image[:1, [5, 20]])
            assert np.array_equal(seen.pair.decoder, found.masks[0].argmax(1))
