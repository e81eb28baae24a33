"""mBO-i, mBO-c, CorLoc and ignored pixels, against literal restatements of the published evaluations and by hand."""

import json
import math

import numpy as np
import pytest
import torch
from sklearn.metrics import adjusted_rand_score

from cutslots.evaluation.metrics import MetricRows, class_metrics, image_metrics, video_metrics

VOID = 255


def literal_best_ious(true, predicted, num_slots, ignore):
    """Return the largest IoU of every true object, as the evaluators of DINOSAUR and SPOT have it: one binary mask for
    each label, ignored pixels set to zero in all of them, empty true masks removed."""
    masks = np.stack([true == label for label in range(1, 255)]) & ~ignore
    masks = masks[masks.reshape(len(masks), -1).any(1)]
    slots = np.stack([predicted == k for k in range(num_slots)]) & ~ignore
    best = []
    for mask in masks:
        ious = []
        for slot in slots:
            union = (mask | slot).sum()
            ious.append((mask & slot).sum() / union if union else 0.0)
        best.append(max(ious))
    return best


@pytest.mark.parametrize("seed", range(30))
def test_equals_the_published_evaluators(seed):
    rng = np.random.default_rng(seed)
    true = rng.integers(0, rng.integers(1, 7), (3, 9, 11))
    predicted = np.where(rng.random(true.shape) < 0.4, rng.integers(0, 6, true.shape), (true * 5 + 1) % 6)
    true = np.where(rng.random(true.shape) < 0.2, VOID, true).astype(np.uint8)
    ours = image_metrics(torch.from_numpy(true), torch.from_numpy(predicted), 6, VOID)
    classes = class_metrics(torch.from_numpy(true), torch.from_numpy(predicted), VOID)
    for b in range(3):
        best = literal_best_ious(true[b], predicted[b], 6, true[b] == VOID)
        expected = [np.mean(best), float(any(iou > 0.5 for iou in best))] if best else [np.nan, np.nan]
        np.testing.assert_allclose([ours["mbo_i"][b], ours["corloc"][b]], expected, rtol=1e-12)
        np.testing.assert_allclose(classes["mbo_c"][b], expected[0], rtol=1e-12)


@pytest.mark.parametrize("seed", range(10))
def test_ignored_pixels_are_left_out_of_every_metric(seed):
    """Metrics are those of the other pixels alone, and ARI those of scikit-learn."""
    rng = np.random.default_rng(seed)
    true, predicted = rng.integers(0, 5, (2, 1, 200))
    ignored = rng.random(true.shape) < 0.3
    marked = torch.from_numpy(np.where(ignored, VOID, true))
    ours = image_metrics(marked, torch.from_numpy(predicted), 5, VOID)
    theirs = image_metrics(torch.from_numpy(true[~ignored][None]), torch.from_numpy(predicted[~ignored][None]), 5)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    t, p = true[~ignored], predicted[~ignored]
    assert ours["ari_fg"].item() == pytest.approx(adjusted_rand_score(t[t > 0], p[t > 0]), abs=1e-9)
    assert ours["ari"].item() == pytest.approx(adjusted_rand_score(t, p), abs=1e-9)


def test_without_an_ignore_label_255_is_an_object():
    true, predicted = torch.tensor([[0, 0, 255, 255]]), torch.tensor([[0, 0, 1, 1]])
    assert image_metrics(true, predicted)["mbo_i"].item() == 1
    assert math.isnan(image_metrics(true, predicted, ignore_label=255)["mbo_i"].item())


@pytest.mark.parametrize(
    "case, true, predicted, mbo, corloc",
    [
        ("perfect", [0, 0, 1, 1, 2, 2], [4, 4, 0, 0, 2, 2], 1, 1),
        ("two objects share a mask", [0, 0, 1, 1, 2, 2], [0, 0, 1, 1, 1, 1], 1 / 2, 0),
        ("an IoU of one half is not above it", [1, 1, 0, 0], [5, 0, 0, 0], 1 / 2, 0),
        ("the slot of the background is a mask as others", [0, 1, 1, 1], [3, 3, 3, 3], 3 / 4, 1),
        ("one of two is found", [0, 1, 1, 2, 2], [0, 1, 1, 3, 0], (1 + 1 / 2) / 2, 1),
        ("predictions on ignored pixels are free", [1, 1, 0, 255, 255], [5, 5, 0, 5, 5], 1, 1),
        ("predictions on the background are not", [1, 1, 0, 0], [5, 5, 5, 5], 1 / 2, 0),
    ],
)
def test_by_hand(case, true, predicted, mbo, corloc):
    metrics = image_metrics(torch.tensor([true]), torch.tensor([predicted]), ignore_label=255)
    assert metrics["mbo_i"].item() == pytest.approx(mbo, abs=1e-12), case
    assert metrics["corloc"].item() == corloc, case


def test_video_mbo_is_over_whole_tracks():
    """Two objects swap their labels in the second of two frames: every frame is perfect, each track covers half of each
    object and half of the other: IoU 2 / 6."""
    true = torch.tensor([[[0, 1, 1, 2, 2], [0, 1, 1, 2, 2]]])
    metrics = video_metrics(true, torch.tensor([[[0, 1, 1, 2, 2], [0, 2, 2, 1, 1]]]))
    assert metrics["mbo_i"].item() == pytest.approx(1 / 3) and metrics["frame_mbo_i"].item() == 1


def test_frames_without_objects_do_not_count():
    true = torch.tensor([[[0, 0, 0, 1], [0, 0, 0, 0]]])
    metrics = video_metrics(true, torch.tensor([[[0, 0, 2, 2], [0, 0, 2, 2]]]))
    assert metrics["frame_mbo_i"].item() == 1 / 2 and metrics["mbo_i"].item() == 1 / 4


def test_means_leave_out_images_without_objects():
    rows = MetricRows()
    rows.add([0, 1, 2], {"mbo_i": torch.tensor([0.5, math.nan, 1.0]), "corloc": torch.full((3,), math.nan)})
    assert rows.means() == {"mbo_i": 0.75}
    json.dumps(rows.means(), allow_nan=False)
