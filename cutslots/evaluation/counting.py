"""Contingency tables of a batch: counted on the device, copied to the CPU while the device works on the next batch.

`metrics.contingency` asks the device for the largest labels to make a table of that size. `count_labels` does not wait
for the device: masks are uint8, so a table has 256 rows, and a column for every slot. `Tables` cuts it to the labels
that are used, after the copy. So metrics are the same, to the last bit, as those of `metrics.image_metrics`.

Shapes: B images or videos, T frames, K slots.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from cutslots.evaluation.metrics import MAX_TABLE_LABEL, Labels, contingency

NUM_ROWS = MAX_TABLE_LABEL + 1


class Tables(NamedTuple):
    """Contingency tables on the CPU, and the number of masks of each image (B,) for `mean_iou`."""

    counts: Tensor  # (B, [T,] labels, K) int64
    num_masks: np.ndarray

    @staticmethod
    def trim(counts: Tensor, num_columns: int, num_slots: int) -> Tables:
        """Return the tables of counts (B, [T,] 256, K) for the labels that occur and `num_columns` slots."""
        used = counts.sum(-1) > 0
        used = used.any(1) if counts.ndim == 4 else used  # (B, 256)
        num_rows = (used * torch.arange(1, NUM_ROWS + 1)).amax(1).clamp(min=1)  # the largest label of each, plus one
        trimmed = counts[..., : int(num_rows.max()), :num_columns]
        return Tables(trimmed.long(), num_rows.clamp(min=num_slots).numpy())


def can_count(true: Tensor, num_slots: int) -> bool:
    """Return whether `count_labels` can make the tables: labels are below 256."""
    return true.dtype == torch.uint8 and num_slots <= NUM_ROWS and true.numel() > 0


def count_labels(true: Tensor, predicted: Tensor, num_slots: int, ignore_label: int | None, per_frame: bool) -> Tensor:
    """Return the number of pixels with each true and predicted label, (B, [T,] 256, K) int32, on their device.

    `true` is uint8 and `predicted` is below `num_slots`, both (B, [T,] H, W). There is a table for each frame with
    `per_frame`. Pixels with the true label `ignore_label` are left out.
    """
    shape, num_images = true.shape[: 1 + per_frame], true.shape[: 1 + per_frame].numel()
    true, predicted = true.reshape(num_images, -1), predicted.reshape(num_images, -1)
    first = torch.arange(num_images, device=true.device)[:, None] * NUM_ROWS
    cell = ((first + true) * num_slots + predicted).flatten()
    counted = None if ignore_label is None else (true != ignore_label).flatten()
    return _count(cell, counted, num_images * NUM_ROWS * num_slots).view(*shape, NUM_ROWS, num_slots)


def _count(cell: Tensor, counted: Tensor | None, size: int) -> Tensor:
    """Return how often each of `size` cells occurs where it is counted, int32."""
    if cell.device.type == "cpu":
        return torch.bincount(cell if counted is None else cell[counted], minlength=size).int()
    return _count_without_waiting(cell, counted, size)


def _count_without_waiting(cell: Tensor, counted: Tensor | None, size: int) -> Tensor:
    """Count on a GPU. `bincount`, and an index of booleans, would have to wait for the number of values."""
    ones = torch.ones_like(cell, dtype=torch.int32) if counted is None else counted.int()
    return torch.zeros(size, dtype=torch.int32, device=cell.device).scatter_add_(0, cell, ones)


def wait_for_tables(
    true: Tensor, predicted: Tensor, num_slots: int | None, ignore_label: int | None, per_frame: bool
) -> Tables:
    """Return the tables of any labels (B, [T,] H, W), from the device to the CPU at once."""
    labels = Labels.of(true, predicted, num_slots, ignore_label)
    if not per_frame:
        return Tables(contingency(labels.true, labels.predicted, labels.counted), labels.num_masks)
    frames = [None if x is None else x.flatten(0, 1) for x in (labels.true, labels.predicted, labels.counted)]
    return Tables(contingency(*frames).unflatten(0, true.shape[:2]), labels.num_masks)  # type: ignore[arg-type]


class HostCopy:
    """Tensors on their way to the CPU. `wait` returns them; the thread that made it goes on."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        on_cuda = {name for name, x in tensors.items() if x.is_cuda}
        self.tensors = {name: _start_copy(x) if name in on_cuda else x for name, x in tensors.items()}
        self.event = torch.cuda.Event() if on_cuda else None
        if self.event is not None:
            self.event.record()

    def wait(self) -> dict[str, Tensor]:
        if self.event is not None:
            self.event.synchronize()
        return {name: x.cpu() for name, x in self.tensors.items()}


def _start_copy(x: Tensor) -> Tensor:
    """Return a copy in pinned memory that the device fills when it gets there."""
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)
