"""Metrics of videos against scikit-learn and on cases computed by hand."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import adjusted_rand_score

from cutslots.evaluation.metrics import IMAGE_METRICS, image_metrics, video_metrics
from cutslots.evaluation.tracking import TRACK_METRICS


def values(true, predicted):
    """Return the metrics of one video, a list of frames."""
    metrics = video_metrics(torch.tensor([true]), torch.tensor([predicted]))
    return {name: value.item() for name, value in metrics.items()}


@pytest.mark.parametrize("seed", range(10))
def test_video_ari_equals_sklearn(seed):
    rng = np.random.default_rng(seed)
    true = rng.integers(0, rng.integers(1, 8), size=(3, 5, 7, 6))
    noise = rng.random(true.shape) < rng.random()
    predicted = np.where(noise, rng.integers(0, 6, true.shape), true)
    ours = video_metrics(torch.from_numpy(true), torch.from_numpy(predicted))
    for b in range(3):
        t, p = true[b].ravel(), predicted[b].ravel()
        assert ours["ari"][b].item() == pytest.approx(adjusted_rand_score(t, p), abs=1e-9)
        assert ours["ari_fg"][b].item() == pytest.approx(adjusted_rand_score(t[t > 0], p[t > 0]), abs=1e-9)
        frames = [(t.ravel(), p.ravel()) for t, p in zip(true[b], predicted[b], strict=True)]
        means = [np.mean([adjusted_rand_score(t[t > low], p[t > low]) for t, p in frames]) for low in (-1, 0)]
        assert [ours["frame_ari"][b].item(), ours["frame_ari_fg"][b].item()] == pytest.approx(means, abs=1e-9)


def test_metrics_of_a_video_are_those_of_one_long_image():
    true, predicted = torch.randint(0, 5, (2, 3, 4, 6, 6))
    ours, theirs = video_metrics(true, predicted), image_metrics(true.flatten(1), predicted.flatten(1))
    per_frame = {"frame_ari", "frame_ari_fg", "frame_mbo_i"}
    assert set(ours) == {*IMAGE_METRICS, *TRACK_METRICS, *per_frame, "id_switches"}
    assert all(torch.equal(ours[name], theirs[name]) for name in IMAGE_METRICS)


def test_video_ari_by_hand():
    """Two objects that swap labels: perfect in every frame, no better than chance as a video."""
    true = [[0, 0, 1, 1, 2, 2]] * 2
    kept = values(true, [[3, 3, 4, 4, 5, 5]] * 2)
    swapped = values(true, [[3, 3, 4, 4, 5, 5], [3, 3, 5, 5, 4, 4]])
    assert kept["ari"] == kept["ari_fg"] == kept["frame_ari_fg"] == 1 and kept["id_switches"] == 0
    # Of 28 pairs of 8 pixels both labelings group 12; 4 are grouped by both. Expected: 144/28.
    assert swapped["ari_fg"] == pytest.approx((4 - 144 / 28) / (12 - 144 / 28))
    assert swapped["frame_ari"] == swapped["frame_ari_fg"] == 1 and swapped["id_switches"] == 2


@pytest.mark.parametrize(
    "case, true, predicted, switches",
    [
        ("one object, one label", [[1, 0], [1, 0], [0, 1]], [[5, 2], [5, 2], [2, 5]], 0),
        ("the label changes", [[1, 0], [1, 0], [1, 0]], [[5, 2], [4, 2], [4, 2]], 1),
        ("the label changes and changes back", [[1, 0], [1, 0], [1, 0]], [[5, 2], [4, 2], [5, 2]], 2),
        ("hidden, then the same label", [[1, 0], [0, 0], [1, 0]], [[5, 2], [2, 2], [5, 2]], 0),
        ("hidden, then another label", [[1, 0], [0, 0], [0, 0], [1, 0]], [[5, 2], [2, 2], [4, 2], [4, 2]], 1),
        ("it appears late", [[0, 0], [0, 1], [0, 1]], [[2, 2], [2, 5], [2, 5]], 0),
        ("two objects swap", [[1, 2], [1, 2]], [[3, 4], [4, 3]], 2),
        ("only one of two changes", [[1, 2, 0], [1, 2, 0]], [[3, 4, 0], [3, 5, 0]], 1),
        ("two objects share a label", [[1, 2], [1, 2]], [[3, 3], [3, 3]], 0),
        ("the background has no identity", [[0, 1], [0, 1], [0, 1]], [[7, 5], [8, 5], [9, 5]], 0),
        ("the majority keeps its label", [[1, 1, 1], [1, 1, 1]], [[5, 5, 4], [4, 5, 5]], 0),
        ("the majority changes its label", [[1, 1, 1], [1, 1, 1]], [[5, 5, 4], [4, 4, 5]], 1),
        ("one frame", [[1, 2, 0]], [[1, 2, 0]], 0),
        ("no object", [[0, 0], [0, 0]], [[1, 2], [2, 1]], 0),
    ],
)
def test_id_switches_by_hand(case, true, predicted, switches):
    assert values(true, predicted)["id_switches"] == switches, case


@pytest.mark.parametrize("pixels, switches", [(1, 0), (2, 2)])
def test_tiny_objects_are_not_visible(pixels, switches):
    """Of 1,600 pixels an object needs two. With fewer it is not visible and keeps the label it had before."""
    true, predicted = torch.zeros(1, 3, 40, 40, dtype=torch.long), torch.zeros(1, 3, 40, 40, dtype=torch.long)
    for t, (size, label) in enumerate([(9, 5), (pixels, 4), (9, 5)]):
        true[0, t, 0, :size], predicted[0, t, 0, :size] = 1, label
    metrics = video_metrics(true.repeat(2, 1, 1, 1), predicted.repeat(2, 1, 1, 1))
    assert metrics["id_switches"].tolist() == [switches] * 2 and metrics["id_switches"].dtype == torch.float64


def test_videos_of_a_batch_are_independent():
    true, predicted = torch.randint(0, 4, (2, 3, 5, 4, 4))
    together = video_metrics(true, predicted)
    for b in range(3):
        for name, value in video_metrics(true[b : b + 1], predicted[b : b + 1]).items():
            assert value.item() == pytest.approx(together[name][b].item(), abs=1e-12), name


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.permutations(range(5)), st.permutations(range(1, 4)))
def test_order_of_tracks_and_objects_does_not_matter(seed, names, objects):
    generator = torch.Generator().manual_seed(seed)
    true = torch.randint(0, 4, (2, 4, 6), generator=generator)
    predicted = torch.randint(0, 5, (2, 4, 6), generator=generator)
    one = video_metrics(true, predicted)
    other = video_metrics(torch.tensor([0, *objects])[true], torch.tensor(names)[predicted])
    for name in ("ari", "ari_fg", "frame_ari", "frame_ari_fg", "id_switches"):  # for miou see test_miou.py
        torch.testing.assert_close(one[name], other[name], msg=name)
    torch.testing.assert_close(one["miou_gt"], other["miou_gt"], rtol=0, atol=1e-6)  # IoUs are float32


def test_bad_labels():
    good = torch.zeros(2, 3, 4, 4, dtype=torch.long)
    for true, predicted in ((good, good[:, :2]), (good[0, 0], good[0, 0]), (good, good[0])):
        with pytest.raises(ValueError, match=r"^true has shape .*, predicted .*; expected equal \(B, T, ...\)$"):
            video_metrics(true, predicted)
    with pytest.raises(TypeError, match=r"predicted is of type torch\.float32"):
        video_metrics(good, good.float())
    with pytest.raises(ValueError, match="a label is -1"):
        video_metrics(good, good - 1)


def test_large_labels_keep_their_identity_over_frames():
    """Ranks are those of the whole video: a label that one frame lacks does not shift the others."""
    names = torch.tensor([0, 300, 10**6, 2**40])
    true, predicted = torch.tensor([[[0, 1, 2, 3], [0, 0, 2, 3]]]), torch.tensor([[[0, 1, 2, 3], [0, 0, 2, 1]]])
    small, large = video_metrics(true, predicted, 256), video_metrics(names[true], names[predicted], 2**41)
    assert small["id_switches"].item() == 1
    assert all(torch.equal(small[name], large[name]) for name in small)
