"""Self-training: the labels of a teacher, how they are kept, what training does with them, and what it refuses."""

import shutil
from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy.ndimage import binary_dilation
from scipy.optimize import linear_sum_assignment
from torch.nn import functional as F

from cutslots import Scenes, load
from cutslots.data.video import Clips
from cutslots.devices import make_fabric
from cutslots.evaluation.metrics import image_metrics
from cutslots.models.discovery import DiscoveryOutput
from cutslots.models.refinement import refine_masks
from cutslots.models.tracker import track_clip
from cutslots.registry import Part
from cutslots.training import teacher as teacher_module
from cutslots.training.data import mixed_data, training_data
from cutslots.training.loader import TrainLoader
from cutslots.training.loop import Interrupted, Stop, train, validate
from cutslots.training.losses import (
    LOSSES,
    MSEConfig,
    MSELoss,
    label_cross_entropy,
    mask_cross_entropy,
    match_labels,
)
from cutslots.training.teacher import LabeledImages, dilate_labels, label_images, label_videos, split_labels
from tests.small_runs import small, weights


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A teacher with three slots."""
    return str(train(small(tmp_path_factory.mktemp("teacher") / "run", max_steps=4, num_images=4)))


def taught(out, checkpoint, **changes):
    return small(out, **({"teacher": checkpoint, "loss__label_weight": 0.1} | changes))


def fabric():
    return make_fabric("cpu", 1, 1, "32-true")


# --------------------------------------------------------------------------------------------------------------- labels


def by_area(labels):
    """Labels numbered from the most frequent to the least frequent of each image or video, by NumPy."""
    found = []
    for each in labels.numpy():
        kinds, counts = np.unique(each, return_counts=True)
        order = kinds[np.argsort(-counts, kind="stable")].tolist()
        found.append(np.vectorize(order.index)(each))
    return torch.from_numpy(np.stack(found)).to(torch.uint8)


def test_labels_are_the_largest_refined_masks():
    model, image = load("tiny-64"), Scenes("plain", size=64).get_batch(range(6)).image
    with torch.no_grad():
        labels, expected = label_images(model, image), refine_masks(model(image), image).argmax(1)
    assert labels.dtype == torch.uint8 and len(expected.unique()) > 4 and torch.equal(labels, by_area(expected))


def test_labels_of_videos_are_tracks():
    """Every frame is refined on its own; a label is one track in all of them."""
    image, truth = (x[:, :4] for x in Scenes("moving", "val", size=128, count=2).get_batch([0, 1]))
    model = load("moving-128")
    labels = label_videos(model, image)
    with torch.no_grad():
        frames = zip(track_clip(model, image, "area"), image.unbind(1), strict=True)
        tracks = torch.stack([refine_masks(output, frame).argmax(1) for output, frame in frames], 1)
        single = torch.stack([label_images(model, frame) for frame in image.unbind(1)], 1)
    assert labels.dtype == torch.uint8 and torch.equal(labels, by_area(tracks))
    tracked, alone = (image_metrics(truth.flatten(1, 2), x.flatten(1, 2))["ari_fg"].mean() for x in (labels, single))
    assert tracked > alone + 0.05, "over all frames as one image, objects keep their labels"


def test_a_teacher_may_be_a_model_of_pairs(tmp_path):
    options = {"data": "moving", "model": "pair-discovery", "num_images": 48}
    pairs = str(train(small(tmp_path / "pairs", **options | {"max_steps": 2, "num_eval_images": 24})))
    data = training_data(taught(None, pairs, **options, loss__label_tracks=True), fabric())
    videos, labels = split_labels(data.videos.get_batch([0, 1]).image)
    assert torch.equal(labels, label_videos(load(pairs), videos))
    images = training_data(taught(None, pairs, num_images=4), fabric()).get_batch(range(4)).image
    assert torch.equal(split_labels(images)[1], label_images(load(pairs), split_labels(images)[0]))


def test_objects_of_labels_grow_over_the_background():
    labels = torch.zeros(2, 9, 9, dtype=torch.uint8)
    labels[0, 4, 4], labels[0, 4, 6] = 2, 3
    labels[1, :2, :6] = 1
    assert torch.equal(dilate_labels(labels, 0), labels)
    grown = dilate_labels(labels, 1)
    assert grown.dtype == torch.uint8
    assert torch.equal(grown[0, 3:6, 3:8], torch.tensor([[2, 2, 2, 3, 3]] * 3)), "a tie goes to the smaller number"
    assert torch.equal(grown[1] == 1, (torch.arange(9) < 3)[:, None] & (torch.arange(9) < 7))
    large = torch.ones(1, 4, 9, dtype=torch.uint8)
    large[..., 6:] = 0
    assert torch.equal(dilate_labels(large, 1)[0, 0], torch.tensor([1] * 7 + [0] * 2)), "the background is label 0"
    assert torch.equal(dilate_labels(torch.zeros_like(large), 2), torch.zeros_like(large))
    radius = dilate_labels(labels[1:], 3)[0]
    assert torch.equal(radius == 1, (torch.arange(9) < 5)[:, None] & (torch.arange(9) < 9))


@pytest.mark.parametrize("seed", range(3))
def test_dilation_is_that_of_scipy_for_one_object(seed):
    labels = (random_masks(K=3, size=(12, 15), seed=seed)[:1, 0] > 0.9).to(torch.uint8)
    expected = binary_dilation(labels[0].numpy() == 1, np.ones((3, 3)), iterations=2)
    assert 0 < labels.sum() < 60 and np.array_equal(dilate_labels(labels, 2)[0].numpy() == 1, expected)


def test_grown_labels_are_trained_on():
    thin, wide = (
        training_data(taught(None, "tiny-64", image_size=(64, 64), num_images=3, label_dilation=n), fabric())
        for n in (0, 2)
    )
    thin, wide = (split_labels(data.get_batch(range(3)).image)[1] for data in (thin, wide))
    assert torch.equal(wide, dilate_labels(thin, 2)) and not torch.equal(wide, thin)


def test_labels_are_a_fourth_channel(checkpoint):
    data = training_data(taught(None, checkpoint, num_images=20), fabric())
    scenes = Scenes("plain", size=16, num_objects=(2, 5))
    assert len(data) == 20 and data.image_size == (16, 16) and not data.has_masks
    batch = data.get_batch([17, 2]).image
    assert batch.shape == (2, 4, 16, 16) and batch.dtype == torch.uint8
    image, labels = split_labels(batch)
    assert torch.equal(image, scenes.get_batch([17, 2]).image)
    with torch.no_grad():
        assert torch.equal(labels, label_images(load(checkpoint), image))


def test_without_a_teacher_there_are_no_labels():
    assert training_data(small(None), fabric()).get_batch([0]).image.shape == (1, 3, 16, 16)


def test_frames_of_clips_have_labels(checkpoint):
    config = taught(None, checkpoint, data="moving", model="pair-discovery", num_images=48, max_frame_gap=2)
    data = training_data(config, fabric())
    image, labels = split_labels(data.get_batch([0, 23, 50]).image)
    clips = Clips(Scenes("moving", size=16, count=2), 2, 2)  # frames 0 and 1, 0 and 2 of the first video; the second
    assert torch.equal(image, clips.get_batch([0, 23, 50]).image)
    with torch.no_grad():
        expected = label_images(load(checkpoint), image.flatten(0, 1))
    assert labels.shape == (3, 2, 16, 16) and torch.equal(labels.flatten(0, 1), expected)
    videos, labels = split_labels(data.videos.get_batch([1]).image)
    assert torch.equal(videos, Scenes("moving", size=16, count=2).get_batch([1]).image)
    with torch.no_grad():
        assert torch.equal(labels[0], label_images(load(checkpoint), videos[0]))


def test_images_that_are_mixed_in_have_labels_too(checkpoint):
    config = taught(None, checkpoint, mix_data="textured:2-3")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cutslots.training.data.MAX_MIXED_SCENES", 5)
        batch = mixed_data(config, fabric()).get_batch([4]).image
    image, labels = split_labels(batch)
    assert torch.equal(image, Scenes("textured", size=16, num_objects=(2, 3)).get_batch([4]).image)
    with torch.no_grad():
        assert torch.equal(labels, label_images(load(checkpoint), image))


def test_a_teacher_may_see_flat_textures(checkpoint):
    """The model sees the textures; the labels are those of the same scenes without."""
    config = taught(None, checkpoint, data="textured", data__flat_teacher=True, num_images=6)
    image, labels = split_labels(training_data(config, fabric()).get_batch(range(6)).image)
    full, flat = (Scenes("textured", size=16, count=6, textures=kind).get_batch(range(6)) for kind in ("full", "flat"))
    assert torch.equal(full.mask, flat.mask), "the same objects"
    assert torch.equal(image, full.image) and not torch.equal(image, flat.image)
    with torch.no_grad():
        assert torch.equal(labels, label_images(load(checkpoint), flat.image))


def test_flat_scenes_hardly_have_textures():
    full, flat = (Scenes("textured", size=64, textures=kind).get_batch(range(8)) for kind in ("full", "flat"))

    def contrast(sample):
        return torch.stack([image[:, mask == 0].float().std(1).mean() for image, mask in zip(*sample, strict=True)])

    assert contrast(flat).mean() < 0.6 * contrast(full).mean()


def test_labels_are_kept_in_the_cache_folder(tmp_path, checkpoint, monkeypatch):
    config = taught(None, checkpoint, cache_dir=str(tmp_path), num_images=6)
    first = training_data(config, fabric()).get_batch(range(6)).image
    (file,) = tmp_path.glob("labels-*.npz")
    with np.load(file) as content:
        assert np.array_equal(content["labels"], split_labels(first)[1])
    monkeypatch.setattr(teacher_module, "_label", lambda *_: pytest.fail("labels are there"))
    assert torch.equal(training_data(config, fabric()).get_batch(range(6)).image, first)


def test_other_teachers_images_and_refinements_have_other_labels(tmp_path, checkpoint, monkeypatch):
    other = train(small(tmp_path / "other", max_steps=2, num_images=4, seed=1))
    cached = {"cache_dir": str(tmp_path / "cache"), "num_images": 4}
    for config in (
        taught(None, checkpoint, **cached),
        taught(None, str(other), **cached),
        taught(None, checkpoint, **cached | {"num_images": 5}),
    ):
        training_data(config, fabric())
    training_data(taught(None, checkpoint, **cached, label_pixel_sigma=0.123), fabric())
    training_data(taught(None, checkpoint, **cached, label_dilation=1), fabric())
    monkeypatch.setitem(teacher_module.DEFAULTS, "capacity", 7.0)
    training_data(taught(None, checkpoint, **cached), fabric())
    assert len(list((tmp_path / "cache").glob("labels-*.npz"))) == 6


def test_tracks_are_kept_apart_from_labels_of_frames(tmp_path, checkpoint):
    options = {"data": "moving", "model": "pair-discovery", "num_images": 24, "cache_dir": str(tmp_path)}
    for tracks in (False, True):
        training_data(taught(None, checkpoint, **options, loss__label_tracks=tracks), fabric())
    assert len(list(tmp_path.glob("labels-*.npz"))) == 2


@pytest.mark.parametrize("changed", [{"pixel_sigma": 0.05}, {"background_threshold": 5.0}])
def test_labels_may_be_refined_with_other_parameters(changed):
    options = {"image_size": (64, 64), "num_images": 4, **{f"label_{name}": value for name, value in changed.items()}}
    image, labels = split_labels(training_data(taught(None, "tiny-64", **options), fabric()).get_batch(range(4)).image)
    teacher = load("tiny-64")
    with torch.no_grad():
        assert torch.equal(labels, by_area(refine_masks(teacher(image), image, **changed).argmax(1)))
        assert not torch.equal(labels, label_images(teacher, image))


# ------------------------------------------------------------------------------------------------------------- the loss


def output(masks, partition=None):
    empty = torch.empty(0)
    return DiscoveryOutput(empty, masks, masks if partition is None else partition, empty, empty)


def random_masks(K=4, size=(8, 12), seed=0):
    return (3 * torch.randn(2, K, *size, generator=torch.Generator().manual_seed(seed))).softmax(1)


@pytest.mark.parametrize("background_weight", [1.0, 2.5, 0.0])
def test_label_cross_entropy_written_out(background_weight):
    masks, partition = random_masks(), random_masks(size=(4, 6), seed=1)
    labels = random_masks(seed=2).argmax(1).to(torch.uint8)
    expected = []
    for m, p, label in zip(masks, partition, labels.long(), strict=True):
        area = [(label == l).double().mean().item() for l in range(4)]
        factor = [background_weight, 1, 1, 1]  # label 0 is the background
        weight = torch.tensor([[factor[l] * max(area[l], 1e-6) ** -0.5 for l in row] for row in label.tolist()])
        weight = weight / weight.mean()
        slot = greedy([[iou(label == l, m[k]) for k in range(4)] for l in range(4)])
        target = torch.stack([sum((label == l) * weight for l in range(4) if slot[l] == k) for k in range(4)])
        small_target = F.avg_pool2d(target[None], 2)[0]
        fine, coarse = ((-t * (x + 1e-6).log()).sum(0).mean() for t, x in ((target, m), (small_target, p)))
        expected.append((fine + coarse).item())
    found = label_cross_entropy(output(masks, partition), labels, background_weight)
    assert found.item() == pytest.approx(np.mean(expected), rel=1e-5)


def iou(label, mask):
    overlap = (label * mask).sum().item()
    return overlap / (label.sum().item() + mask.sum().item() - overlap)


def greedy(table):
    """The slot of each label: the largest entry first."""
    pairs = sorted(((-value, l, k) for l, row in enumerate(table) for k, value in enumerate(row)))
    slots = {}
    for _, l, k in pairs:
        if l not in slots and k not in slots.values():
            slots[l] = k
    return slots


@pytest.mark.parametrize("seed", range(5))
def test_labels_are_matched_as_the_hungarian_algorithm_does_where_it_is_clear(seed):
    generator = torch.Generator().manual_seed(seed)
    labels = random_masks(K=6, seed=seed).argmax(1)
    target = F.one_hot(labels, 6).movedim(-1, 1).float()
    order = torch.randperm(6, generator=generator)
    masks = (2 * target[:, order] + torch.rand(2, 6, 8, 12, generator=generator)).softmax(1)
    found = match_labels(target, masks)
    for label, t, m in zip(found, target.flatten(2), masks.flatten(2), strict=True):
        both = t @ m.T
        _, columns = linear_sum_assignment(-(both / (t.sum(1)[:, None] + m.sum(1) - both)).numpy())
        assert label.tolist() == np.argsort(columns).tolist() == order.tolist()


def test_numbers_of_labels_do_not_matter():
    masks, labels = random_masks(), random_masks(seed=2).argmax(1)
    found = [
        label_cross_entropy(output(masks), order[labels]) for order in (torch.arange(4), torch.tensor([2, 0, 3, 1]))
    ]
    torch.testing.assert_close(*found)


def test_frames_of_clips_are_labelled_on_their_own():
    masks, partition_masks = (torch.randn(2, 2, 3, n, n).softmax(2) for n in (8, 4))
    labels = torch.randint(0, 3, (2, 2, 8, 8))
    output = SimpleNamespace(masks=masks, partition_masks=partition_masks)
    frames = SimpleNamespace(masks=masks.flatten(0, 1), partition_masks=partition_masks.flatten(0, 1))
    expected = label_cross_entropy(frames, labels.flatten(0, 1))
    torch.testing.assert_close(label_cross_entropy(output, labels), expected)


@pytest.mark.parametrize("tracks", [True, False])
def test_tracks_teach_a_matching(tracks):
    """The slots of the second frame come in another order. A matching that begins wrong is mended by tracks alone."""
    labels = torch.zeros(1, 2, 8, 8, dtype=torch.long)
    labels[:, :, :3, :3], labels[:, :, 5:, 5:] = 1, 2
    first, second = (F.one_hot(labels, 3).movedim(-1, 2).float() * 0.97 + 0.01).unbind(1)
    logits = torch.tensor([[4.0, 0, 0], [0, 0, 1], [0, 1, 0]]).requires_grad_()  # slots 1 and 2 are swapped
    optimizer = torch.optim.Adam([logits], 0.1)
    for _ in range(60):
        partner = (logits.softmax(1) @ second.flatten(2)).view_as(second)
        masks = torch.stack([first, partner], 1)
        optimizer.zero_grad()
        label_cross_entropy(SimpleNamespace(masks=masks, partition_masks=masks), labels, tracks=tracks).backward()
        optimizer.step()
    assert logits.argmax(1).tolist() == ([0, 1, 2] if tracks else [0, 2, 1])


def test_the_loss_takes_labels_for_tracks():
    masks, labels = torch.randn(2, 2, 3, 8, 8).softmax(2), torch.randint(0, 3, (2, 2, 8, 8))
    image = torch.rand(2, 2, 3, 8, 8)
    clips = DiscoveryOutput(torch.empty(0), masks, masks, image, torch.empty(0))
    for tracks in (False, True):
        loss, _ = MSELoss(label_weight=1.0, label_tracks=tracks)(clips, image, 0, labels)
        torch.testing.assert_close(loss, label_cross_entropy(clips, labels, tracks=tracks))


def test_tracks_go_to_one_slot_in_all_frames():
    """Objects that swap their slots have a loss with tracks, and none if every frame is labelled on its own."""
    labels = torch.zeros(1, 2, 8, 8, dtype=torch.long)
    labels[:, :, :3, :3], labels[:, :, 5:, 5:] = 1, 2
    same = F.one_hot(labels, 3).movedim(-1, 2).float() * 0.97 + 0.01
    swapped = same.clone()
    swapped[:, 1] = same[:, 1, [0, 2, 1]]
    kept, lost = (SimpleNamespace(masks=masks, partition_masks=masks) for masks in (same, swapped))
    on_their_own = label_cross_entropy(lost, labels)
    torch.testing.assert_close(on_their_own, label_cross_entropy(kept, labels, tracks=True))
    assert label_cross_entropy(lost, labels, tracks=True) > 5 * on_their_own
    other = SimpleNamespace(masks=same[:, :, [2, 0, 1]], partition_masks=same[:, :, [2, 0, 1]])
    torch.testing.assert_close(label_cross_entropy(other, labels, tracks=True), on_their_own)


def test_tracks_of_one_frame_are_labels_of_images():
    masks, partition = random_masks(), random_masks(size=(4, 6), seed=1)
    labels = random_masks(seed=2).argmax(1)
    of_images = label_cross_entropy(output(masks, partition), labels, tracks=True)
    torch.testing.assert_close(of_images, label_cross_entropy(output(masks, partition), labels))
    clips = SimpleNamespace(masks=masks[:, None], partition_masks=partition[:, None])
    found = label_cross_entropy(clips, labels[:, None], tracks=True)
    torch.testing.assert_close(found, label_cross_entropy(output(masks, partition), labels))


def test_labels_without_a_slot_are_left_out():
    """Labels are numbered by area: a model with fewer slots learns the largest."""
    masks, labels = random_masks(K=3), random_masks(K=5, seed=2).argmax(1)
    masks.requires_grad_()
    label_cross_entropy(output(masks), labels).backward()
    left_out = (labels >= 3)[:, None].expand_as(masks)
    assert left_out.any() and torch.all(masks.grad[left_out] == 0) and torch.all(masks.grad.sum(1)[labels < 3] != 0)
    assert label_cross_entropy(output(masks), torch.full_like(labels, 3)) == 0, "nothing is left"


def test_masks_equal_to_the_labels_have_no_loss():
    labels = random_masks().argmax(1)
    masks = F.one_hot(labels, 4).movedim(-1, 1).float()
    assert label_cross_entropy(output(masks), labels).abs() < 1e-5
    assert label_cross_entropy(output(masks[:, [1, 2, 3, 0]]), labels).abs() < 1e-5


def test_a_small_object_weighs_more_than_as_much_background():
    labels = torch.zeros(1, 8, 8, dtype=torch.long)
    labels[0, :2, :2] = 1
    sure = F.one_hot(labels, 2).movedim(-1, 1) * 0.98 + 0.01
    losses = []
    for row in (0, 6):  # one pixel of the object, or of the background, is wrong
        masks = sure.clone()
        masks[0, :, row, 0] = masks[0, :, row, 0].flip(0)
        losses.append(label_cross_entropy(output(masks), labels).item())
    ratio = (60 / 4) ** 0.5
    base = label_cross_entropy(output(sure), labels).item()
    assert (losses[0] - base) / (losses[1] - base) == pytest.approx(ratio, rel=1e-3)


def test_labels_reach_both_masks_with_their_weight():
    masks, partition = random_masks().requires_grad_(), random_masks(size=(4, 6), seed=1).requires_grad_()
    labels, image = random_masks(seed=2).argmax(1), torch.rand(2, 3, 8, 12)
    empty = torch.empty(0)
    found = DiscoveryOutput(empty, masks, partition, torch.rand(2, 3, 8, 12), empty)
    plain, logged = MSELoss()(found, image, 0)
    loss, logged_too = MSELoss(label_weight=0.25, label_background_weight=3.0)(found, image, 0, labels)
    torch.testing.assert_close(loss - plain, 0.25 * label_cross_entropy(found, labels, 3.0))
    assert torch.equal(logged, logged_too), "the mean squared error is logged"
    loss.backward()
    assert masks.grad.abs().sum() > 0 and partition.grad.abs().sum() > 0
    assert mask_cross_entropy(masks, masks).requires_grad


# --------------------------------------------------------------------------------------------------------------- a run


def test_a_run_learns_its_teachers_labels(tmp_path, checkpoint):
    with_labels = train(taught(tmp_path / "a", checkpoint, max_steps=40, num_images=8, eval_every=40))
    without = train(small(tmp_path / "b", max_steps=40, num_images=8, eval_every=40))
    image = Scenes("plain", size=16, num_objects=(2, 5)).get_batch(range(8)).image
    with torch.no_grad():
        labels = label_images(load(checkpoint), image)
        far, near = (label_cross_entropy(load(run)(image), labels) for run in (without, with_labels))
    assert near < 0.8 * far


@pytest.mark.parametrize("model", ["pair-discovery", "spacetime-discovery"])
def test_a_model_of_clips_learns_the_labels_of_a_teacher_of_images(tmp_path, checkpoint, model):
    partition = {"slots__partition": "spacetime-cut"} if model == "spacetime-discovery" else {}
    options = {"data": "moving", "model": model, "num_images": 24, "num_eval_images": 24, "max_steps": 40} | partition
    with_labels = train(taught(tmp_path / "a", checkpoint, horizontal_flips=True, eval_every=40, **options))
    without = train(small(tmp_path / "b", eval_every=40, **options))
    clips = Clips(Scenes("moving", size=16, count=1), 2).get_batch(range(8)).image
    with torch.no_grad():
        labels = label_images(load(checkpoint), clips.flatten(0, 1)).unflatten(0, (8, 2))
        far, near = (label_cross_entropy(load(run)(clips), labels) for run in (without, with_labels))
    assert near < 0.8 * far


def test_a_model_of_pairs_learns_tracks(tmp_path):
    options = {"data": "moving", "data__num_objects": (2, 2), "model": "pair-discovery", "image_size": (64, 64)}
    options |= {"num_images": 24, "num_eval_images": 24, "max_steps": 30, "eval_every": 30, "slots__num_slots": 6}
    with_labels = train(taught(tmp_path / "a", "tiny-64", loss__label_tracks=True, **options))
    without = train(small(tmp_path / "b", **options))
    video = Scenes("moving", size=64, num_objects=(2, 2), count=1).get_batch([0]).image
    labels = label_videos(load("tiny-64"), video)[0]
    assert len(labels.unique()) > 2
    clips, labels = (torch.stack([x[t : t + 2] for t in range(23)]) for x in (video[0], labels))
    with torch.no_grad():
        far, near = (label_cross_entropy(load(run)(clips), labels, tracks=True) for run in (without, with_labels))
    assert near < 0.95 * far


def test_a_run_with_a_teacher_resumes(tmp_path, checkpoint, monkeypatch):
    options = {"max_steps": 6, "camouflage": 0.5, "horizontal_flips": True, "min_crop_area": 0.5, "noise_sigma": 0.1}
    whole, parts = (taught(tmp_path / name, checkpoint, **options) for name in ("whole", "parts"))
    train(whole)
    with monkeypatch.context() as patch:
        patch.setattr(Stop, "interrupted", lambda self, step, seconds: step == 3)
        with pytest.raises(Interrupted):
            train(parts)
    train(parts)
    assert weights(whole.out) == weights(parts.out)


NO_TEACHER = {"teacher": None, "loss__label_weight": 0.0}


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"teacher": None}, r"loss.label_weight is 0.1, but there are no labels; expected --teacher too"),
        ({"loss__label_weight": 0.0}, r"but its labels have no weight; expected --loss.label-weight"),
        (
            {"camouflage": 0.5, **NO_TEACHER},
            r"camouflage is 0.5, but there are no labels; expected --teacher too",
        ),
        (
            {"label_background_threshold": 1.5, **NO_TEACHER},
            r"label_background_threshold is 1.5, but there are no labels; expected --teacher too",
        ),
        (
            {"data": "textured", "data__flat_teacher": True, **NO_TEACHER},
            r"data.flat_teacher is True, but there are no labels; expected --teacher too",
        ),
        ({"num_images": "endless"}, r"num_images is endless; expected a number: --teacher labels images"),
        (
            {"data": "textured", "data__texture_ramp_end": 9},
            r"data.texture_ramp_end is 9 and data.low_contrast 0.0; expected 0 for both",
        ),
        ({"data": "textured", "data__low_contrast": 0.5}, r"data.low_contrast 0.5; expected 0 for both"),
        ({"teacher": "nowhere"}, r"teacher: .*nowhere"),
        (
            {"teacher": "tiny-64"},
            r"teacher is tiny-64, a model of \(64, 64\) images; expected the image size of the run",
        ),
        (
            {"loss__label_background_weight": 2.0, **NO_TEACHER},
            r"loss.label_background_weight is 2.0, but there are no labels; expected --teacher too",
        ),
        ({"label_dilation": 1, **NO_TEACHER}, r"label_dilation is 1, but there are no labels; expected --teacher too"),
        ({"loss__label_tracks": True, **NO_TEACHER}, r"loss.label_tracks is True, but there are no labels; expected"),
        ({"loss__label_tracks": True}, r"loss.label_tracks is True, but the model is one of images; expected a model"),
    ],
)
def test_what_does_not_fit_a_teacher(tmp_path, checkpoint, changes, message):
    config = taught(tmp_path / "run", checkpoint, **{k: v for k, v in changes.items() if v is not None})
    if changes.get("teacher", "") is None:
        config = small(
            tmp_path / "run", **{"loss__label_weight": 0.1} | {k: v for k, v in changes.items() if v is not None}
        )
    with pytest.raises(ValueError, match=message):
        validate(config)
    assert not (tmp_path / "run").exists()


def test_a_model_of_clips_as_one_cannot_label_images(tmp_path):
    options = {"data": "moving", "model": "spacetime-discovery", "slots__partition": "spacetime-cut"}
    folder = train(small(tmp_path / "clips", **options, num_images=24, num_eval_images=24, max_steps=1))
    with pytest.raises(
        ValueError, match=r"teacher is .*clips, which cannot label single images; expected a model of images or"
    ):
        validate(taught(tmp_path / "run", str(folder)))


def test_a_model_may_have_fewer_slots_than_its_teacher(tmp_path, checkpoint):
    trained = load(train(taught(tmp_path / "run", checkpoint, slots__num_slots=2, max_steps=2)))
    assert trained.num_slots == 2 < load(checkpoint).num_slots


def test_a_teacher_in_the_run_folder_is_kept(tmp_path, checkpoint):
    """Overwriting the folder would delete it."""
    folder = tmp_path / "run"
    shutil.copytree(checkpoint, folder)
    before = weights(folder)
    with pytest.raises(ValueError, match=r"teacher is .*run, the run folder itself; expected another checkpoint"):
        train(taught(folder, str(folder), overwrite=True))
    assert weights(folder) == before


def test_a_run_does_not_resume_with_other_labels(tmp_path, checkpoint):
    teacher = tmp_path / "teacher"
    shutil.copytree(checkpoint, teacher)
    config = taught(tmp_path / "run", str(teacher), max_steps=1)
    train(config)
    train(small(teacher, max_steps=5, num_images=4))  # the teacher is trained further
    with pytest.raises(ValueError, match=r"labels"):
        train(replace(config, max_steps=2))


def test_a_run_does_not_resume_with_wider_labels(tmp_path, checkpoint):
    config = taught(tmp_path / "run", checkpoint, max_steps=1)
    train(config)
    with pytest.raises(ValueError, match=r"labels\.dilation"):
        train(replace(config, label_dilation=1, max_steps=2))


@dataclass(frozen=True)
class UnlabeledConfig(MSEConfig):
    pass


class UnlabeledLoss(MSELoss):
    """A loss of a plugin that does not know of labels."""

    def __call__(self, output, image, step):
        return super().__call__(output, image, step)


def test_a_loss_without_labels_is_refused(tmp_path, checkpoint):
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(LOSSES.parts, "unlabeled", Part("unlabeled", UnlabeledConfig, UnlabeledLoss, "", None))
        config = replace(taught(tmp_path / "run", checkpoint), loss=UnlabeledConfig(label_weight=0.1))
        with pytest.raises(ValueError, match=r"the loss UnlabeledLoss takes no labels; expected --loss mse"):
            validate(config)


@pytest.mark.parametrize("damage", ["cut", "empty", "other"])
def test_a_damaged_cache_is_named(tmp_path, checkpoint, damage):
    config = taught(None, checkpoint, cache_dir=str(tmp_path), num_images=6)
    training_data(config, fabric())
    (file,) = tmp_path.glob("labels-*.npz")
    if damage == "other":
        np.savez_compressed(file, labels=np.zeros((5, 16, 16), np.uint8))
    else:
        file.write_bytes(file.read_bytes()[: 50 if damage == "cut" else 0])
    with pytest.raises(ValueError, match=r"labels-.*npz is damaged; delete it to label the images again"):
        training_data(config, fabric())


def test_labels_are_flipped_with_their_images(checkpoint):
    """Each process prepares its share of what one process does."""
    config = taught(None, checkpoint, horizontal_flips=True, batch_size=8, num_images=16)
    data = training_data(config, fabric())
    one, *shares = (
        TrainLoader(data, config, SimpleNamespace(global_rank=rank, world_size=size, device="cpu"), 0)
        for rank, size in ((0, 1), (0, 2), (1, 2))
    )
    batch, original = one._prepare(3), data.get_batch(one.indices(3)).image
    flipped = [torch.equal(a, b.flip(-1)) for a, b in zip(batch, original, strict=True)]
    assert 0 < sum(flipped) < 8
    assert all(torch.equal(a, b) for a, b, f in zip(batch, original, flipped, strict=True) if not f)
    assert torch.equal(torch.cat([loader._prepare(3) for loader in shares]), batch)


def test_labeled_images_have_empty_masks():
    data = LabeledImages(Scenes("plain", size=16, count=3), torch.zeros(3, 16, 16, dtype=torch.uint8))
    assert len(data) == 3 and not data.has_masks and data.get_batch([0, 1]).mask.shape == (2, 0, 0)
    with pytest.raises(IndexError, match="index 3 is out of range"):
        data.get_batch([3])
