"""Metrics of mask tracks: HOTA with DetA and AssA, and IDF1, with the arithmetic of TrackEval.

A detection is the mask of a true object, or of a predicted track, in a frame in which it has pixels. Two detections of
a frame are as similar as their IoU. The track with the largest IoU with the true background, over the whole video, is
the predicted background and no detection; all other tracks are.

- **hota** (Luiten et al., 2021): in each frame objects and tracks are matched one to one, for the largest sum of
  similarities weighted by how well the two agree over the video. At a threshold a, pairs with a similarity of at least
  a are true positives. **deta** is TP / (TP + FN + FP). **assa** is the mean over true positives of the Jaccard index
  between the frames of the object and of the track, where the intersection are the frames in which the two are matched.
  HOTA is the square root of DetA x AssA. All three are means over a = 0.05, 0.1, ..., 0.95.
- **idf1** (Ristani et al., 2016): objects and tracks are matched one to one over the whole video for the largest number
  of frames with an IoU of at least 0.5; this number is IDTP. IDF1 is 2 IDTP / (true detections + predicted ones).

Values are NaN for videos without objects, and 0 without predicted detections. TrackEval (hota.py and identity.py in
github.com/JonathonLuiten/TrackEval) sums counts over videos before it divides; these values are of single videos.

Shapes: B videos, T frames, O objects, K tracks.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

THRESHOLDS = np.arange(0.05, 0.99, 0.05)
ID_THRESHOLD = 0.5
TRACK_METRICS = ("hota", "deta", "assa", "idf1")


def track_metrics(frames: Tensor) -> dict[str, Tensor]:
    """Return the metrics (B,) of contingency tables (B, T, O + 1, K), counts of pixels; row 0 is the background.

    >>> frames = torch.zeros(1, 2, 2, 3)  # an object of 4 pixels in two frames; track 0 is the background
    >>> frames[0, :, 0, 0], frames[0, 0, 1, 1], frames[0, 1, 1, 2] = 9, 4, 4  # its track changes
    >>> {name: value.item() for name, value in track_metrics(frames).items()}
    {'hota': 0.7071067811865476, 'deta': 1.0, 'assa': 0.5, 'idf1': 0.5}
    """
    rows = [_video_metrics(tables) for tables in frames.cpu().numpy().astype(np.float64)]
    values = torch.tensor(rows, dtype=torch.float64).reshape(-1, len(TRACK_METRICS))
    return dict(zip(TRACK_METRICS, values.unbind(1), strict=True))


def _video_metrics(tables: np.ndarray) -> tuple[float, ...]:
    true_pixels, predicted_pixels = tables.sum(2), tables.sum(1)
    objects, tracks = true_pixels[:, 1:] > 0, predicted_pixels > 0
    if not objects.any():
        return (np.nan,) * len(TRACK_METRICS)
    tracks[:, _background_tracks(tables.sum(0))] = False
    if not tracks.any():
        return (0.0,) * len(TRACK_METRICS)
    union = true_pixels[:, :, None] + predicted_pixels[:, None] - tables
    similarity = (tables / np.maximum(union, 1))[:, 1:]
    similarity = similarity * tracks[:, None]
    return *hota(similarity, objects, tracks), idf1(similarity, objects, tracks)


def _background_tracks(table: np.ndarray) -> list[int]:
    """Return the track with the largest IoU with the background, of a table (O + 1, K); none without background."""
    union = table[0].sum() + table.sum(0) - table[0]
    return [int((table[0] / np.maximum(union, 1)).argmax())] if table[0].any() else []


def hota(similarity: np.ndarray, objects: np.ndarray, tracks: np.ndarray) -> tuple[float, float, float]:
    """Return HOTA, DetA and AssA of a video.

    `similarity` (T, O, K) is in [0, 1]; `objects` (T, O) and `tracks` (T, K) tell which detections there are.
    """
    from scipy.optimize import linear_sum_assignment  # slow to import

    lengths = objects.sum(0)[:, None] + tracks.sum(0)  # (O, K): frames of the object plus frames of the track
    alignment = _alignment(similarity, lengths)
    matched = np.zeros((len(THRESHOLDS), *lengths.shape))  # frames in which the two are matched
    for t, scores in enumerate(similarity * alignment):
        rows, columns = np.flatnonzero(objects[t]), np.flatnonzero(tracks[t])
        i, j = linear_sum_assignment(scores[np.ix_(rows, columns)], maximize=True)
        o, k = rows[i], columns[j]
        matched[:, o, k] += similarity[t, o, k] >= THRESHOLDS[:, None] - np.finfo(float).eps
    positives = matched.sum((1, 2))
    jaccard = matched / np.maximum(lengths - matched, 1)
    detection = positives / (objects.sum() + tracks.sum() - positives)
    association = (matched * jaccard).sum((1, 2)) / np.maximum(positives, 1)
    return tuple(float(x.mean()) for x in (np.sqrt(detection * association), detection, association))  # type: ignore[return-value]


def _alignment(similarity: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return how well objects and tracks agree over the video, (O, K): a soft Jaccard index of their detections."""
    total = similarity.sum(1, keepdims=True) + similarity.sum(2, keepdims=True) - similarity
    share = np.divide(similarity, total, out=np.zeros_like(similarity), where=total > np.finfo(float).eps).sum(0)
    return share / np.maximum(lengths - share, np.finfo(float).eps)


def idf1(similarity: np.ndarray, objects: np.ndarray, tracks: np.ndarray) -> float:
    """Return IDF1 of a video; arguments as for `hota`."""
    from scipy.optimize import linear_sum_assignment  # slow to import

    present = objects[:, :, None] & tracks[:, None]
    common = ((similarity >= ID_THRESHOLD) & present).sum(0)
    rows, columns = linear_sum_assignment(common, maximize=True)
    return float(2 * common[rows, columns].sum() / (objects.sum() + tracks.sum()))
