"""How well masks agree with the truth: ARI, ARI-FG, mIoU by each of its denominators, MSE.

Every score is one number for each image, from the table n[t, k] of pixels that truth t and prediction k share; counts
are exact, on any device. Label 0 of the truth is the background.

- **ARI** is the adjusted Rand index over all pixels, **ARI-FG** over those whose true label is not the background. With
  no pairs to tell apart both are 1.
- **mIoU** pairs true masks (background included) with predicted ones, one to one, so that the sum of their
  intersections over unions is largest; the shorter list is filled up with empty masks. That sum is divided by
  `miou`: the pairs in which either mask has pixels (CLEVRTEX's evaluator); `miou_fg`: the same, sum and count without
  the background's pair; `miou_gt`: the true masks. Of pairings with equal sums, one that leaves the fewest pairs to
  count is taken, so that the names of slots do not matter. With nothing to count a score is 1.
- **Videos** (B, T, ...) are scored as one labelling of all their frames, for which a thing must keep its label;
  `frame_ari` and `frame_ari_fg` are means over single frames. **switches** counts, over the objects of a video, how
  often the label that covers most of an object differs from that of the frame before in which it was seen.
- **MSE** sums squared errors over channels and pixels, values being in [0, 1].
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

NAMES = ("ari", "ari_fg", "miou", "miou_fg", "miou_gt")


def score(true: Tensor, predicted: Tensor) -> dict[str, Tensor]:
    """All scores of labels against labels, whole numbers of shape (B, ...) each; float64 (B,) on the CPU.

    >>> true = torch.tensor([[0, 0, 1, 1, 2, 2]])
    >>> {name: round(value.item(), 3) for name, value in score(true, torch.tensor([[5, 5, 3, 3, 3, 3]])).items()}
    {'ari': 0.444, 'ari_fg': 0.0, 'miou': 0.5, 'miou_fg': 0.25, 'miou_gt': 0.5}
    """
    table = contingency(true, predicted)
    return {"ari": adjusted_rand(table), "ari_fg": adjusted_rand(table[:, 1:]), **mean_iou(table)}


SEEN = 1e-3  # of a frame's pixels: an object with fewer is not asked who it is


def score_films(true: Tensor, predicted: Tensor) -> dict[str, Tensor]:
    """Scores of videos, whole numbers (B, T, ...) each, as one labelling; those of single frames; identity switches.

    >>> true = torch.tensor([[[0, 1, 1, 2], [0, 1, 1, 2]]])  # two frames
    >>> found = score_films(true, torch.tensor([[[3, 4, 4, 5], [3, 5, 5, 4]]]))
    >>> [round(found[name].item(), 3) for name in ("ari_fg", "frame_ari_fg", "switches")]
    [-0.216, 1.0, 2.0]
    """
    if true.shape != predicted.shape or true.ndim < 3:
        raise ValueError(
            f"true has shape {tuple(true.shape)}, predicted {tuple(predicted.shape)}; expected (B, T, ...)"
        )
    frames = contingency(true.flatten(0, 1), predicted.flatten(0, 1)).unflatten(0, true.shape[:2])
    whole = frames.sum(1)
    single = {
        f"frame_{name}": adjusted_rand(table.flatten(0, 1)).unflatten(0, true.shape[:2]).mean(1)
        for name, table in (("ari", frames), ("ari_fg", frames[:, :, 1:]))
    }
    scores = {"ari": adjusted_rand(whole), "ari_fg": adjusted_rand(whole[:, 1:]), **mean_iou(whole)}
    return scores | single | {"switches": _switches(frames)}


def _switches(frames: Tensor) -> Tensor:
    """How often objects change their label, (B,), by tables (B, T, objects, labels)."""
    least = SEEN * frames[:, :1].sum((2, 3), keepdim=True)
    seen, best = frames.sum(3) >= least[..., 0].clamp(min=1), frames == frames.amax(3, keepdim=True)
    counts = torch.zeros(len(frames), dtype=torch.float64)
    last = torch.zeros_like(best[:, 0])  # (B, objects, labels): several, if they cover an object alike
    for t in range(frames.shape[1]):
        here, now = seen[:, t], best[:, t]
        same = now & last
        counts += (here & last.any(2) & ~same.any(2))[:, 1:].sum(1)  # the ground is nobody
        last = torch.where(here[..., None], torch.where(same.any(2, keepdim=True), same, now), last)
    return counts


def contingency(true: Tensor, predicted: Tensor) -> Tensor:
    """How many pixels have true label t and predicted label k: (B, T, K), int64, on the CPU."""
    if true.shape != predicted.shape or true.ndim < 2:
        raise ValueError(
            f"true has shape {tuple(true.shape)} and predicted {tuple(predicted.shape)}; expected equal (B, ...)"
        )
    for name, labels in (("true", true), ("predicted", predicted)):
        if labels.is_floating_point() or labels.dtype == torch.bool:
            raise TypeError(f"{name} is of type {labels.dtype}; expected whole numbers")
    true, predicted = true.flatten(1).long(), predicted.flatten(1).long()
    if true.numel() == 0:
        return torch.zeros(len(true), 1, 1, dtype=torch.long)
    low, T, K = (int(v) for v in torch.stack([torch.minimum(true.min(), predicted.min()), true.max(), predicted.max()]))
    if low < 0:
        raise ValueError(f"a label is {low}; expected zero or more")
    T, K = T + 1, K + 1
    cell = (torch.arange(len(true), device=true.device)[:, None] * T + true) * K + predicted
    return torch.bincount(cell.flatten(), minlength=len(true) * T * K).view(-1, T, K).cpu()


def adjusted_rand(table: Tensor) -> Tensor:
    """The adjusted Rand index (B,) of tables (B, T, K), by pairs of pixels."""
    n = table.double()
    total = n.sum((1, 2)) ** 2
    both, rows, cols = (n**2).sum((1, 2)), (n.sum(2) ** 2).sum(1), (n.sum(1) ** 2).sum(1)
    together, split, joined = both - n.sum((1, 2)), rows - both, cols - both  # in both; in truth; in prediction only
    apart = total - both - split - joined
    below = (together + split) * (split + apart) + (together + joined) * (joined + apart)
    value = 2 * (together * apart - split * joined) / below.where(below > 0, 1)
    return value.where((below > 0) & (split + joined > 0), 1.0)


def mean_iou(table: Tensor) -> dict[str, Tensor]:
    """mIoU (B,) of tables (B, T, K) by each denominator."""
    from scipy.optimize import linear_sum_assignment  # slow to import, and `cutslots predict` has no need of it

    B, T, K = table.shape
    n = np.zeros((B, max(T, K), max(T, K)))
    n[:, :T, :K] = table.numpy()
    rows, cols = n.sum(2), n.sum(1)
    union = rows[:, :, None] + cols[:, None] - n
    iou = n / np.where(union > 0, union, 1)
    out = np.zeros((3, B))
    for b in range(B):
        # Pairings of equal sums may count differently: take one that pairs the most masks that both have pixels.
        both = (rows[b][:, None] > 0) & (cols[b] > 0)
        pairs = linear_sum_assignment(iou[b] + 1e-9 * both, maximize=True)
        values, seen = iou[b][pairs], (rows[b][pairs[0]] > 0) | (cols[b][pairs[1]] > 0)
        sums = values.sum(), values[1:].sum(), values.sum()
        counts = seen.sum(), seen[1:].sum(), (rows[b] > 0).sum()
        out[:, b] = [s / c if c else 1.0 for s, c in zip(sums, counts, strict=True)]
    return dict(zip(NAMES[2:], torch.from_numpy(out), strict=True))


def squared_error(image: Tensor, reconstruction: Tensor) -> Tensor:
    """(B,): squared errors summed over channels and pixels, values in [0, 1]."""
    return (image.cpu().double() - reconstruction.cpu().double()).square().flatten(1).sum(1)


class Scores:
    """Rows of scores, one for each image, gathered over a dataset and over processes.

    Every image is known by its number, and means are taken in that order: they do not depend, to the last bit, on how
    images were dealt out to processes."""

    def __init__(self) -> None:
        self.rows: dict[int, dict[str, float]] = {}

    def add(self, numbers: Iterable[int], columns: dict[str, Tensor]) -> None:
        values = {name: column.tolist() for name, column in columns.items()}
        for row, number in enumerate(numbers):
            self.rows[int(number)] = {name: column[row] for name, column in values.items()}

    def gather(self) -> None:
        """Gives every process the rows of all."""
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            parts: list[Any] = [None] * torch.distributed.get_world_size()
            torch.distributed.all_gather_object(parts, self.rows)
            self.rows = {number: row for part in parts for number, row in part.items()}

    def table(self) -> list[tuple[int, dict[str, float]]]:
        return sorted(self.rows.items())

    def means(self) -> dict[str, float]:
        rows = [row for _, row in self.table()]
        names: Sequence[str] = list(rows[0]) if rows else ()
        return {name: float(np.mean([row[name] for row in rows])) for name in names}
