"""Metrics of predicted labels against true labels: ARI, ARI-FG, mIoU with three denominators, MSE, ID switches.

Every metric is one value per image, computed from the contingency table n[t, k]: the number of pixels with true label t
and predicted label k. Counts are exact on every device. True label 0 is the background.

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
- **Videos** (B, T, ...) are evaluated as one label map over all frames, so an object must keep its label. `frame_ari`
  and `frame_ari_fg` are means over single frames. **id_switches** counts, over all objects of a video, how often the
  label that covers most of an object differs from the one in the last frame in which the object was visible.
- **mse** is the squared error, summed over channels and pixels, of images in [0, 1].
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

IMAGE_METRICS = ("ari", "ari_fg", "miou", "miou_fg", "miou_gt")
MIN_VISIBLE = 1e-3  # fraction of a frame's pixels below which an object does not count as visible


def image_metrics(true: Tensor, predicted: Tensor, num_masks: int | None = None) -> dict[str, Tensor]:
    """Return all metrics of predicted against true labels, integers of shape (B, ...). Values are float64 (B,), CPU.

    `num_masks` is the number of slots, unused ones included. By default it is the largest predicted label of an image,
    plus one.

    >>> true = torch.tensor([[0, 0, 1, 1, 2, 2]])
    >>> metrics = image_metrics(true, torch.tensor([[5, 5, 3, 3, 3, 3]]), num_masks=6)
    >>> {name: round(value.item(), 3) for name, value in metrics.items()}
    {'ari': 0.444, 'ari_fg': 0.0, 'miou': 0.5, 'miou_fg': 0.25, 'miou_gt': 0.5}
    """
    table = contingency(true, predicted)
    return _table_metrics(table, num_masks)


def _table_metrics(table: Tensor, num_masks: int | None) -> dict[str, Tensor]:
    aris = {"ari": adjusted_rand_index(table), "ari_fg": adjusted_rand_index(table[:, 1:])}
    return aris | mean_iou(table, num_masks)


def video_metrics(true: Tensor, predicted: Tensor, num_masks: int | None = None) -> dict[str, Tensor]:
    """Return all metrics of videos from integer labels (B, T, ...), values (B,): those of `image_metrics` over all
    frames at once, `frame_ari`, `frame_ari_fg` and `id_switches`. `num_masks` is the number of tracks.

    >>> true = torch.tensor([[[0, 1, 1, 2], [0, 1, 1, 2]]])  # two frames
    >>> metrics = video_metrics(true, torch.tensor([[[3, 4, 4, 5], [3, 5, 5, 4]]]))
    >>> [round(metrics[name].item(), 3) for name in ("ari_fg", "frame_ari_fg", "id_switches")]
    [-0.216, 1.0, 2.0]
    """
    if true.shape != predicted.shape or true.ndim < 3:
        raise ValueError(
            f"true has shape {tuple(true.shape)}, predicted {tuple(predicted.shape)}; expected equal (B, T, ...)"
        )
    frames = contingency(true.flatten(0, 1), predicted.flatten(0, 1)).unflatten(0, true.shape[:2])
    per_frame = {
        f"frame_{name}": adjusted_rand_index(table.flatten(0, 1)).unflatten(0, true.shape[:2]).mean(1)
        for name, table in (("ari", frames), ("ari_fg", frames[:, :, 1:]))
    }
    return _table_metrics(frames.sum(1), num_masks) | per_frame | {"id_switches": id_switches(frames)}


def id_switches(frames: Tensor) -> Tensor:
    """Return how often objects change their label, (B,), from contingency tables (B, T, objects, labels)."""
    min_pixels = MIN_VISIBLE * frames[:, :1].sum((2, 3), keepdim=True)
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


def contingency(true: Tensor, predicted: Tensor) -> Tensor:
    """Return the number of pixels with true label t and predicted label k: (B, T, K), int64, on the CPU."""
    if true.shape != predicted.shape or true.ndim < 2:
        raise ValueError(
            f"true has shape {tuple(true.shape)} and predicted {tuple(predicted.shape)}; expected equal (B, ...)"
        )
    for name, labels in (("true", true), ("predicted", predicted)):
        if labels.is_floating_point() or labels.dtype == torch.bool:
            raise TypeError(f"{name} is of type {labels.dtype}; expected an integer type")
    true, predicted = true.flatten(1).long(), predicted.flatten(1).long()
    if true.numel() == 0:
        return torch.zeros(len(true), 1, 1, dtype=torch.long)
    bounds = torch.stack([torch.minimum(true.min(), predicted.min()), true.max(), predicted.max()])
    smallest, T, K = (int(v) for v in bounds)  # one transfer from the device
    if smallest < 0:
        raise ValueError(f"a label is {smallest}; expected zero or more")
    T, K = T + 1, K + 1
    cell = (torch.arange(len(true), device=true.device)[:, None] * T + true) * K + predicted
    return torch.bincount(cell.flatten(), minlength=len(true) * T * K).view(-1, T, K).cpu()


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


def mean_iou(table: Tensor, num_masks: int | None = None) -> dict[str, Tensor]:
    """Return miou, miou_fg and miou_gt, (B,) each, of contingency tables (B, T, K).

    `num_masks` is the number of predicted masks, empty ones included. By default it is the largest predicted label of
    an image, plus one.
    """
    from scipy.optimize import linear_sum_assignment  # slow to import, and `cutslots predict` does not need it

    n, sides = _square_tables(table, num_masks)
    true_pixels, predicted_pixels = n.sum(2), n.sum(1)
    union = true_pixels[:, :, None] + predicted_pixels[:, None] - n
    iou = n.astype(np.float32) / np.maximum(union, 1).astype(np.float32)  # the evaluator's precision
    sums, counts = np.zeros((2, 3, len(n)))
    for b, side in enumerate(sides):
        rows, columns = linear_sum_assignment(iou[b, :side, :side], maximize=True)
        values = iou[b, rows, columns].astype(np.float64)
        pairs = ((true_pixels[b, rows] > 0) | (predicted_pixels[b, columns] > 0)).sum()
        sums[:, b] = values.sum(), values[1:].sum(), values.sum()
        counts[:, b] = pairs, pairs - 1, (true_pixels[b] > 0).sum()
    means = np.where(counts > 0, sums / np.maximum(counts, 1), 1.0)
    return dict(zip(IMAGE_METRICS[2:], torch.from_numpy(means), strict=True))


def _square_tables(table: Tensor, num_masks: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Return tables padded to squares, (B, S, S), and the number of masks of each image, (B,).

    The number of masks is that of a batch of one image, so metrics do not depend on the other images of a batch.
    """
    B, T, K = table.shape
    if num_masks is not None and num_masks < K:
        raise ValueError(f"a predicted label is {K - 1}; expected less than num_masks, {num_masks}")
    size = max(T, K, num_masks or 0)
    n = np.zeros((B, size, size), dtype=np.int64)
    n[:, :T, :K] = table.numpy()
    labels = np.arange(1, size + 1)
    num_true, num_predicted = (((pixels > 0) * labels).max(1) for pixels in (n.sum(2), n.sum(1)))
    return n, np.maximum(num_true, num_predicted if num_masks is None else num_masks)


def squared_error(image: Tensor, reconstruction: Tensor) -> Tensor:
    """Return squared errors summed over channels and pixels, (B,), of images with values in [0, 1]."""
    return (image.cpu().double() - reconstruction.cpu().double()).square().flatten(1).sum(1)


class MetricRows:
    """Metrics of single images, collected over batches and processes.

    Rows are stored by image index and averaged in that order, so the means do not depend, to the last bit, on how
    images were distributed over processes.
    """

    def __init__(self) -> None:
        self.rows: dict[int, dict[str, float]] = {}

    def add(self, indices: Iterable[int], columns: dict[str, Tensor]) -> None:
        """Add the metrics of some images: for every name the values (B,) of the images with these indices."""
        values = {name: column.tolist() for name, column in columns.items()}
        for row, index in enumerate(indices):
            self.rows[int(index)] = {name: column[row] for name, column in values.items()}

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
        """Return the mean of every metric."""
        rows = [row for _, row in self.table()]
        names: Sequence[str] = list(rows[0]) if rows else ()
        return {name: float(np.mean([row[name] for row in rows])) for name in names}
