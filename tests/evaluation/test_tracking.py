"""HOTA and IDF1 against a literal restatement of TrackEval's definition, and by hand."""

import math

import numpy as np
import pytest
import torch
from scipy.optimize import linear_sum_assignment

from cutslots.evaluation.metrics import video_metrics
from cutslots.evaluation.tracking import TRACK_METRICS, hota, idf1


def random_video(seed):
    """Return similarities (T, O, K) and which detections there are; a similarity without detections is 0."""
    rng = np.random.default_rng(seed)
    T, O, K = rng.integers(1, 7), rng.integers(1, 5), rng.integers(1, 6)
    objects, tracks = rng.random((T, O)) < 0.7, rng.random((T, K)) < 0.7
    objects[0, 0] = tracks[-1, -1] = True
    similarity = rng.random((T, O, K)) * (rng.random((T, O, K)) < 0.6)
    if seed % 3 == 0:
        similarity = np.round(similarity * 20) / 20  # exactly on the thresholds
    return similarity * objects[:, :, None] * tracks[:, None], objects, tracks


def literal_hota(similarity, objects, tracks):
    """The definition, frame by frame, pair by pair and threshold by threshold, with plain loops."""
    T, O, K = similarity.shape
    potential = np.zeros((O, K))
    for t in range(T):
        for o in range(O):
            for k in range(K):
                total = similarity[t, :, k].sum() + similarity[t, o, :].sum() - similarity[t, o, k]
                if total > np.finfo(float).eps:
                    potential[o, k] += similarity[t, o, k] / total
    frames_of_object, frames_of_track = objects.sum(0), tracks.sum(0)
    results = []
    for alpha in np.arange(0.05, 0.99, 0.05):
        pairs, fn, fp = [], 0, 0
        for t in range(T):
            present_o, present_k = np.flatnonzero(objects[t]), np.flatnonzero(tracks[t])
            score = np.zeros((len(present_o), len(present_k)))
            for i, o in enumerate(present_o):
                for j, k in enumerate(present_k):
                    align = potential[o, k] / (frames_of_object[o] + frames_of_track[k] - potential[o, k])
                    score[i, j] = align * similarity[t, o, k]
            rows, columns = linear_sum_assignment(-score)
            found = [(present_o[i], present_k[j]) for i, j in zip(rows, columns, strict=True)]
            found = [(o, k) for o, k in found if similarity[t, o, k] >= alpha - np.finfo(float).eps]
            pairs += found
            fn, fp = fn + len(present_o) - len(found), fp + len(present_k) - len(found)
        jaccard = []
        for pair in pairs:
            tpa = pairs.count(pair)
            jaccard.append(tpa / (frames_of_object[pair[0]] + frames_of_track[pair[1]] - tpa))
        det_a = len(pairs) / (len(pairs) + fn + fp)
        ass_a = sum(jaccard) / max(1, len(pairs))
        results.append((math.sqrt(det_a * ass_a), det_a, ass_a))
    return np.mean(results, 0)


def literal_idf1(similarity, objects, tracks):
    """Objects and tracks, each with a dummy for staying unmatched, assigned at the smallest number of errors."""
    T, O, K = similarity.shape
    common = np.zeros((O, K))
    for t in range(T):
        for o, k in np.argwhere(similarity[t] >= 0.5):
            common[o, k] += 1
    length_o, length_k = objects.sum(0), tracks.sum(0)
    misses, false = np.full((2, O + K, O + K), 0.0)
    misses[:O, K:] = false[O:, :K] = 1e10
    for o in range(O):
        misses[o, :K], misses[o, K + o] = length_o[o] - common[o], length_o[o]
    for k in range(K):
        false[:O, k], false[O + k, k] = length_k[k] - common[:, k], length_k[k]
    rows, columns = linear_sum_assignment(misses + false)
    idfn, idfp = misses[rows, columns].sum(), false[rows, columns].sum()
    idtp = length_o.sum() - idfn
    return idtp / (idtp + 0.5 * idfp + 0.5 * idfn)


@pytest.mark.parametrize("seed", range(60))
def test_equals_the_literal_definition(seed):
    video = random_video(seed)
    np.testing.assert_allclose(hota(*video), literal_hota(*video), rtol=1e-12)
    np.testing.assert_allclose(idf1(*video), literal_idf1(*video), rtol=1e-12)


def values(true, predicted, **options):
    metrics = video_metrics(torch.tensor([true]), torch.tensor([predicted]), **options)
    return [round(metrics[name].item(), 6) for name in TRACK_METRICS]


@pytest.mark.parametrize(
    "case, true, predicted, expected",  # HOTA, DetA, AssA, IDF1
    [
        ("perfect", [[0, 0, 1, 2]] * 3, [[7, 7, 5, 4]] * 3, (1, 1, 1, 1)),
        # The object has 4 frames, in two tracks of 2 frames: each detection has 2 frames of 4 + 2 - 2.
        ("the track changes", [[0, 0, 1]] * 4, [[3, 3, 1]] * 2 + [[3, 3, 2]] * 2, (math.sqrt(0.5), 1, 0.5, 0.5)),
        # IoU 1/2 is a match at 10 of 19 thresholds; track 3 is the background.
        ("half of the mask", [[0, 0, 1, 1]], [[3, 3, 3, 1]], (10 / 19, 10 / 19, 10 / 19, 1)),
        # The background is split: one slot is the background, the other a false detection in each frame.
        ("a false track", [[0, 0, 0, 1]] * 2, [[3, 3, 2, 1]] * 2, (math.sqrt(0.5), 0.5, 1, 2 / 3)),
        ("nothing is found", [[0, 0, 0, 1]] * 2, [[3, 3, 3, 3]] * 2, (0, 0, 0, 0)),
        ("one frame is missed", [[0, 0, 0, 1]] * 2, [[3, 3, 3, 1], [3, 3, 3, 3]], (0.5, 0.5, 0.5, 2 / 3)),
    ],
)
def test_by_hand(case, true, predicted, expected):
    assert values(true, predicted) == pytest.approx(expected, abs=1e-6), case


def test_without_background_every_track_is_a_detection():
    assert values([[1, 1, 2, 2]], [[0, 0, 3, 3]]) == [1, 1, 1, 1]


def test_videos_without_objects_have_no_value():
    assert all(math.isnan(value) for value in values([[0, 0]] * 2, [[0, 1]] * 2))


def test_ignored_pixels_do_not_count():
    """The track covers the object and void pixels, which would halve its IoU."""
    true, predicted = [[0, 0, 0, 1, 1, 255, 255]] * 2, [[0, 0, 0, 2, 2, 2, 2]] * 2
    assert values(true, predicted, ignore_label=255) == [1, 1, 1, 1]
    assert values(true, predicted)[0] < 1


def test_order_of_tracks_does_not_matter():
    true, predicted = torch.randint(0, 5, (2, 3, 6, 40), generator=torch.Generator().manual_seed(0))
    one = video_metrics(true, predicted)
    other = video_metrics(true, torch.tensor([3, 0, 4, 1, 2])[predicted])
    for name in TRACK_METRICS:
        torch.testing.assert_close(one[name], other[name])
