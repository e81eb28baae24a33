"""Metrics of predicted labels against true labels: ARI, mIoU, mean best overlap, CorLoc, MSE and metrics of videos.

Every metric is one value per image, computed from the contingency table n[t, k]: the number of pixels with true label t
and predicted label k. Counts are exact on every device. True label 0 is the background. Labels may be any integers from
0: in an image with labels above 255 they are replaced by their ranks, so memory grows with the number of distinct
labels, not with their values. Unused labels are then empty masks behind the used ones. Pixels whose true label is
`ignore_label` (void, overlapping objects) are left out of every count, of true and of predicted masks.

- **ari** is the adjusted Rand index over all pixels. **ari_fg** (ARI-FG) is the same over the pixels of true objects.
  Both are 1 if there are no two groups to distinguish.
- **miou**, **miou_fg** and **miou_gt** are those of CLEVRTEX's evaluator for one image (clevrtex_eval.py in
  github.com/karazijal/clevrtex). True masks, the background included, are matched to the masks of all slots, one to
  one, with the largest sum of IoUs. The shorter list is padded with empty masks. `num_masks` is the number of slots.
    - miou divides the sum by the number of pairs in which a mask has pixels.
    - miou_fg omits the pair of the background from the sum and subtracts 1 from the number of pairs.
    - miou_gt divides the sum by the number of true masks that have pixels.
  IoUs are float32. Masks without overlap are paired in the order that SciPy's linear_sum_assignment returns, so the
  number of pairs, and with it miou and miou_fg, may depend on the order of slots and on the number of empty ones. ARI
  and miou_gt do not. With nothing to divide by the metric is 1; the evaluator has NaN or infinity there.
- **mbo_i** (mBO-i) is the mean over true objects of the largest IoU with a predicted mask. Several objects may share a
  mask. The masks of all slots count; the background is no object. **mbo_c** is the same over true classes instead of
  objects. **corloc** is 1 if the largest IoU of some object is above 0.5, else 0. They are NaN, and left out of means,
  for images without objects. These are the definitions of DINOSAUR's and SPOT's code (ocl/metrics/masks.py in
  github.com/amazon-science/object-centric-learning-framework, ocl_metrics.py in github.com/gkakogeorgiou/spot).
- **Videos** (B, T, ...) are evaluated as one label map over all frames, so an object must keep its label: `mbo_i` is
  then the video mBO of VideoSAUR. `frame_ari`, `frame_ari_fg` and `frame_mbo_i` are means over single frames.
  **id_switches** counts, over all objects of a video, how often the label that covers most of an object differs from
  the one in the last frame in which the object was visible. For **hota** and **idf1** see tracking.py.
- **mse** is the squared error, summed over channels and pixels, of images in [0, 1].
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from cutslots.evaluation.tracking import track_metrics

MIOUS = ("miou", "miou_fg", "miou_gt")
IMAGE_METRICS = ("ari", "ari_fg", *MIOUS, "mbo_i", "corloc")
MIN_LOCALIZED_IOU = 0.5  # CorLoc counts objects with a larger IoU
MAX_TABLE_LABEL = 255  # images with larger labels have a row or a column of the table for used labels only
MIN_VISIBLE = 1e-3  # fraction of a frame's pixels below which an object does not count as visible


def image_metrics(
    true: Tensor, predicted: Tensor, num_masks: int | None = None, ignore_label: int | None = None
) -> dict[str, Tensor]:
    """Return all metrics of predicted against true labels, integers of shape (B, ...). Values are float64 (B,), CPU.

    `num_masks` is the number of slots, unused ones included. By default it is the largest predicted label of an image,
    plus one. Pixels with the true label `ignore_label` do not count.

    >>> true = torch.tensor([[0, 0, 1, 1, 2, 2]])
    >>> metrics = image_metrics(true, torch.tensor([[5, 5, 3, 3, 3, 3]]), num_masks=6)
    >>> {name: round(value.item(), 3) for name, value in metrics.items()}
    {'ari': 0.444, 'ari_fg': 0.0, 'miou': 0.5, 'miou_fg': 0.25, 'miou_gt': 0.5, 'mbo_i': 0.5, 'corloc': 0.0}
    """
    labels = Labels.of(true, predicted, num_masks, ignore_label)
    return image_table_metrics(contingency(labels.true, labels.predicted, labels.counted), labels.num_masks)


def image_table_metrics(table: Tensor, num_masks: np.ndarray) -> dict[str, Tensor]:
    """Return the metrics of images (B,) from contingency tables (B, T, K) on the CPU. See `mean_iou`."""
    aris = {"ari": adjusted_rand_index(table), "ari_fg": adjusted_rand_index(table[:, 1:])}
    best = best_overlaps(table)
    return aris | mean_iou(table, num_masks) | {"mbo_i": mean_overlap(best), "corloc": correct_localization(best)}


def class_metrics(classes: Tensor, predicted: Tensor, ignore_label: int | None = None) -> dict[str, Tensor]:
    """Return `mbo_c` (B,) of predicted labels against true classes, integers of shape (B, ...). Class 0 is background.

    >>> classes = torch.tensor([[0, 0, 7, 7, 7, 255]])
    >>> class_metrics(classes, torch.tensor([[0, 0, 1, 2, 2, 2]]), ignore_label=255)["mbo_c"].item()  # 2 of 3 pixels
    0.6666666666666666
    """
    labels = Labels.of(classes, predicted, None, ignore_label)
    return class_table_metrics(contingency(labels.true, labels.predicted, labels.counted))


def class_table_metrics(table: Tensor) -> dict[str, Tensor]:
    """Return `mbo_c` (B,) from contingency tables (B, T, K) of classes."""
    return {"mbo_c": mean_overlap(best_overlaps(table))}


def video_metrics(
    true: Tensor, predicted: Tensor, num_masks: int | None = None, ignore_label: int | None = None
) -> dict[str, Tensor]:
    """Return all metrics of videos from integer labels (B, T, ...), values (B,).

    They are those of `image_metrics` over all frames at once, those of `track_metrics`, `frame_ari`, `frame_ari_fg`,
    `frame_mbo_i` and `id_switches`. `num_masks` is the number of tracks.

    >>> true = torch.tensor([[[0, 1, 1, 2], [0, 1, 1, 2]]])  # two frames
    >>> metrics = video_metrics(true, torch.tensor([[[3, 4, 4, 5], [3, 5, 5, 4]]]))
    >>> [round(metrics[name].item(), 3) for name in ("ari_fg", "frame_ari_fg", "id_switches")]
    [-0.216, 1.0, 2.0]
    """
    if true.shape != predicted.shape or true.ndim < 3:
        raise ValueError(
            f"true has shape {tuple(true.shape)}, predicted {tuple(predicted.shape)}; expected equal (B, T, ...)"
        )
    labels = Labels.of(true, predicted, num_masks, ignore_label)
    counted = None if labels.counted is None else labels.counted.flatten(0, 1)
    frames = contingency(labels.true.flatten(0, 1), labels.predicted.flatten(0, 1), counted).unflatten(
        0, true.shape[:2]
    )
    return video_table_metrics(frames, labels.num_masks)


def video_table_metrics(frames: Tensor, num_masks: np.ndarray) -> dict[str, Tensor]:
    """Return the metrics of videos (B,) from the contingency tables of their frames (B, T, objects, labels), CPU."""
    whole = image_table_metrics(frames.sum(1), num_masks)
    return whole | _frame_metrics(frames) | {"id_switches": id_switches(frames)} | track_metrics(frames)


def _frame_metrics(frames: Tensor) -> dict[str, Tensor]:
    """Return the means over single frames, (B,), from contingency tables (B, T, objects, labels)."""
    tables = frames.flatten(0, 1)
    values = {
        "frame_ari": adjusted_rand_index(tables),
        "frame_ari_fg": adjusted_rand_index(tables[:, 1:]),
        "frame_mbo_i": mean_overlap(best_overlaps(tables)),  # NaN for frames without objects
    }
    return {name: value.unflatten(0, frames.shape[:2]).nanmean(1) for name, value in values.items()}


def id_switches(frames: Tensor) -> Tensor:
    """Return how often objects change their label, (B,), from contingency tables (B, T, objects, labels)."""
    min_pixels = MIN_VISIBLE * frames.sum((2, 3), keepdim=True)
    visible = frames.sum(3) >= min_pixels[..., 0].clamp(min=1)
    best = frames == frames.amax(3, keepdim=True)  # several labels, if they cover an object equally
    counts = torch.zeros(len(frames), dtype=torch.float64)
    last = torch.zeros_like(best[:, 0])  # (B, objects, labels): of the last frame in which the object was visible
    for t in range(frames.shape[1]):
        seen, now = visible[:, t], best[:, t]
        same = now & last
        counts += (seen & last.any(2) & ~same.any(2))[:, 1:].sum(1)  # the background has no identity
        last = torch.where(seen[..., None], torch.where(same.any(2, keepdim=True), same, now), last)
    return counts


class Labels(NamedTuple):
    """Labels (B, ...) that fit into tables, and the number of masks of each image (B,) for `mean_iou`."""

    true: Tensor
    predicted: Tensor
    num_masks: np.ndarray
    counted: Tensor | None  # (B, ...) bool: which pixels count; None: all

    @staticmethod
    def of(true: Tensor, predicted: Tensor, num_masks: int | None, ignore_label: int | None = None) -> Labels:
        """Check labels, rank those of images with labels above MAX_TABLE_LABEL, and count masks.

        The number of masks is that of a batch of one image, so metrics do not depend on the other images of a batch.
        """
        counted = None if ignore_label is None else true != ignore_label
        true = true if counted is None else true.where(counted, 0)  # so that the label is no mask
        _check_labels(true, predicted)
        counts = [_count(labels) for labels in (true, predicted)]
        if num_masks is not None:
            largest = max(counts[1], default=0)
            if num_masks < largest:
                raise ValueError(f"a predicted label is {largest - 1}; expected less than num_masks, {num_masks}")
            counts[1] = np.full_like(counts[1], min(num_masks, 2**62))
        true, predicted = rank_labels(true), rank_labels(predicted)
        # With an empty mask for every used label, more of them change nothing but the order of ties.
        enough = np.maximum(_count(true) + _count(predicted), MAX_TABLE_LABEL + 1)
        return Labels(true, predicted, np.minimum(np.maximum(*counts), enough), counted)


def rank_labels(labels: Tensor) -> Tensor:
    """Return labels (B, ...) with those of images that have labels above MAX_TABLE_LABEL replaced by their ranks.

    Label 0 stays 0, and no other label becomes 0.
    """
    large = np.flatnonzero(_count(labels) > MAX_TABLE_LABEL + 1)
    if not len(large):
        return labels
    ranks = labels.long().clone()
    for b in large.tolist():
        used, inverse = labels[b].unique(return_inverse=True)
        ranks[b] = inverse + int(used[0] > 0)
    return ranks


def _count(labels: Tensor) -> np.ndarray:
    """Return the largest label of each image, plus one: (B,)."""
    if labels.numel() == 0:
        return np.zeros(len(labels), dtype=np.int64)
    return np.minimum(labels.flatten(1).amax(1).cpu().numpy().astype(np.int64), 2**62) + 1  # 2^63 would overflow


def _check_labels(true: Tensor, predicted: Tensor) -> None:
    if true.shape != predicted.shape or true.ndim < 2:
        raise ValueError(
            f"true has shape {tuple(true.shape)} and predicted {tuple(predicted.shape)}; expected equal (B, ...)"
        )
    for name, labels in (("true", true), ("predicted", predicted)):
        if labels.is_floating_point() or labels.dtype == torch.bool:
            raise TypeError(f"{name} is of type {labels.dtype}; expected an integer type")
    if true.numel():
        smallest = int(torch.minimum(true.min(), predicted.min()))
        if smallest < 0:
            raise ValueError(f"a label is {smallest}; expected zero or more")


def contingency(true: Tensor, predicted: Tensor, counted: Tensor | None = None) -> Tensor:
    """Return the number of pixels with true label t and predicted label k: (B, T, K), int64, on the CPU.

    T and K are the largest labels, plus one: pass large labels through `rank_labels`. Pixels where `counted` is False
    are left out.
    """
    _check_labels(true, predicted)
    true, predicted = true.flatten(1).long(), predicted.flatten(1).long()
    if true.numel() == 0:
        return torch.zeros(len(true), 1, 1, dtype=torch.long)
    T, K = (int(v) + 1 for v in torch.stack([true.max(), predicted.max()]))  # one transfer from the device
    cell = (torch.arange(len(true), device=true.device)[:, None] * T + true) * K + predicted
    cell = cell.flatten() if counted is None else cell[counted.flatten(1)]
    return torch.bincount(cell, minlength=len(true) * T * K).view(-1, T, K).cpu()


def adjusted_rand_index(table: Tensor) -> Tensor:
    """Return the adjusted Rand index (B,) of contingency tables (B, T, K).

    Pairs of pixels are counted by whether the two pixels share a label in both labelings, in one, or in none.
    """
    n = table.double()
    total = n.sum((1, 2)) ** 2
    squares, rows, cols = (n**2).sum((1, 2)), (n.sum(2) ** 2).sum(1), (n.sum(1) ** 2).sum(1)
    both, only_true, only_predicted = squares - n.sum((1, 2)), rows - squares, cols - squares
    neither = total - squares - only_true - only_predicted
    denominator = (both + only_true) * (only_true + neither) + (both + only_predicted) * (only_predicted + neither)
    value = 2 * (both * neither - only_true * only_predicted) / denominator.where(denominator > 0, 1)
    return value.where((denominator > 0) & (only_true + only_predicted > 0), 1.0)


def mean_iou(table: Tensor, num_masks: np.ndarray) -> dict[str, Tensor]:
    """Return miou, miou_fg and miou_gt, (B,) each, of contingency tables (B, T, K).

    `num_masks` (B,) is the number of true and of predicted masks of each image, empty ones included.
    """
    from scipy.optimize import linear_sum_assignment  # slow to import, and `cutslots predict` does not need it

    sums, counts = np.zeros((2, 3, len(table)))
    for side in np.unique(num_masks).tolist():
        rows = np.flatnonzero(num_masks == side)
        n = _square_tables(table.numpy()[rows], side)
        true_pixels, predicted_pixels = n.sum(2), n.sum(1)
        union = true_pixels[:, :, None] + predicted_pixels[:, None] - n
        iou = n.astype(np.float32) / np.maximum(union, 1).astype(np.float32)  # the evaluator's precision
        columns = np.stack([linear_sum_assignment(each, maximize=True)[1] for each in iou])  # of rows 0, 1, ...
        values = np.take_along_axis(iou, columns[:, :, None], 2)[:, :, 0].astype(np.float64)
        matched_pixels = np.take_along_axis(predicted_pixels, columns, 1)
        pairs = ((true_pixels > 0) | (matched_pixels > 0)).sum(1)
        sums[:, rows] = values.sum(1), values[:, 1:].sum(1), values.sum(1)
        counts[:, rows] = pairs, pairs - 1, (true_pixels > 0).sum(1)
    means = np.where(counts > 0, sums / np.maximum(counts, 1), 1.0)
    return dict(zip(MIOUS, torch.from_numpy(means), strict=True))


def _square_tables(tables: np.ndarray, side: int) -> np.ndarray:
    """Return tables (B, T, K) padded or cut to (B, side, side). What is cut off is zero."""
    n = np.zeros((len(tables), side, side), dtype=np.int64)
    T, K = (min(side, size) for size in tables.shape[1:])
    n[:, :T, :K] = tables[:, :T, :K]
    return n


def best_overlaps(table: Tensor) -> Tensor:
    """Return the largest IoU of each true object with a predicted mask, (B, T - 1), from contingency tables (B, T, K).

    The background, row 0, is no object. Objects without pixels have NaN.
    """
    n = table.double()
    true_pixels = n.sum(2)
    iou = n / (true_pixels[:, :, None] + n.sum(1)[:, None] - n)  # 0 / 0 is NaN: neither mask has pixels
    return iou.nan_to_num(0).amax(2).where(true_pixels > 0, torch.nan)[:, 1:]


def mean_overlap(best: Tensor) -> Tensor:
    """Return the mean best overlap (B,) of best overlaps (B, T), NaN without objects."""
    return best.nanmean(1)


def correct_localization(best: Tensor) -> Tensor:
    """Return 1 where the best overlap of some object is above 0.5, else 0: (B,), NaN without objects."""
    return (best > MIN_LOCALIZED_IOU).any(1).double().where(~best.isnan().all(1), torch.nan)


def squared_error(image: Tensor, reconstruction: Tensor) -> Tensor:
    """Return squared errors summed over channels and pixels, (B,) on the CPU, of images with values in [0, 1]."""
    return summed_squares(image, reconstruction).cpu()


def summed_squares(x: Tensor, y: Tensor) -> Tensor:
    """Return the squared differences of x and y (B, ...), summed over all but the batch: (B,) float64, on the device.

    MPS has no float64: there the result is on the CPU.
    """
    x, y = (a.cpu() if a.device.type == "mps" else a for a in (x, y))
    return (x.double() - y.double()).square().flatten(1).sum(1)


def to_rows(columns: dict[str, Tensor]) -> list[dict[str, float]]:
    """Return the metrics of every image by name, from values (B,) by name."""
    values = {name: column.tolist() for name, column in columns.items()}
    return [dict(zip(values, row, strict=True)) for row in zip(*values.values(), strict=True)]


class MetricRows:
    """Metrics of single images, collected over batches and processes.

    Rows are stored by image index and averaged in that order, so the means do not depend, to the last bit, on how
    images were distributed over processes.
    """

    def __init__(self) -> None:
        self.rows: dict[int, dict[str, float]] = {}

    def add(self, indices: Iterable[int], columns: dict[str, Tensor]) -> None:
        """Add the metrics of some images: for every name the values (B,) of the images with these indices."""
        self.rows |= {int(index): row for index, row in zip(indices, to_rows(columns), strict=True)}

    def gather(self) -> None:
        """Give every process the rows of all processes."""
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            parts: list[Any] = [None] * torch.distributed.get_world_size()
            torch.distributed.all_gather_object(parts, self.rows)
            self.rows = {index: row for part in parts for index, row in part.items()}

    def table(self) -> list[tuple[int, dict[str, float]]]:
        """Return (index, metrics) of every image, by index."""
        return sorted(self.rows.items())

    def means(self) -> dict[str, float]:
        """Return the mean of every metric over the images that it is defined for; without any it is left out.

        Fractions of objects ("found", "found_small", ...) are those of the objects of all images: their weights are the
        numbers of objects ("num_objects", "num_small", ...).
        """
        rows = [row for _, row in self.table()]
        names: Sequence[str] = list(rows[0]) if rows else ()
        values = {name: [row for row in rows if not math.isnan(row[name])] for name in names}
        return {name: _mean(name, defined) for name, defined in values.items() if defined}


def _mean(name: str, rows: list[dict[str, float]]) -> float:
    """Return the mean of a metric over rows in which it is defined."""
    values, counted = np.array([row[name] for row in rows]), counted_by(name)
    if counted is None:
        return float(np.mean(values))
    counts = np.array([row[counted] for row in rows])
    return float((values * counts).round().sum() / counts.sum())  # the products are numbers of objects


def counted_by(name: str) -> str | None:
    """Return which metric counts the objects that a metric is a fraction of, None for other metrics.

    >>> counted_by("refined_found_small"), counted_by("found"), counted_by("ari")
    ('num_small', 'num_objects', None)
    """
    _, found, group = name.rpartition("found")
    return f"num{group or '_objects'}" if found else None
