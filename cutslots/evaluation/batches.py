"""The batches of an evaluation: read in groups, counted on the device, finished on the CPU.

    read_batches     batches from the dataset; on a GPU many at once, since it renders and copies large groups faster
    count_batch      what metrics are computed from, on the device; nothing waits for it
    batch_metrics    the metrics, on the CPU; a thread does that while the device works on the next batch

Shapes: B images or videos, T frames, K slots, H W image.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from cutslots.dataset import AnnotatedSample, Dataset
from cutslots.evaluation import metrics
from cutslots.evaluation.counting import HostCopy, Tables, can_count, count_labels, wait_for_tables
from cutslots.evaluation.labels import EVALUATED_MASKS
from cutslots.evaluation.objects import count_objects, found_objects, object_areas, object_groups
from cutslots.models.discovery import FeatureOutput, ModelOutput, to_float

ERRORS = ("mse", "feature_mse")
FINITE = "finite_"  # the prefix of what says whether an output is finite
PIXELS_AT_ONCE = 2**24  # of images that are read at once on a GPU: 1,024 of 128 x 128


def read_batches(
    data: Dataset, batches: Sequence[np.ndarray], numbers: Sequence[int], device: torch.device | str
) -> Iterator[tuple[int, AnnotatedSample]]:
    """Yield the batches, indices of `data`, with these numbers."""
    pixels = data.frames * data.image_size[0] * data.image_size[1] * (len(batches[0]) if batches else 1)
    on_cuda = torch.device(device).type == "cuda"
    return grouped(data, batches, numbers, device, max(1, PIXELS_AT_ONCE // pixels) if on_cuda else 1)


def grouped(
    data: Dataset, batches: Sequence[np.ndarray], numbers: Sequence[int], device: torch.device | str, at_once: int
) -> Iterator[tuple[int, AnnotatedSample]]:
    """Yield the same batches, of which so many are read at once."""
    for i in range(0, len(numbers), at_once):
        group = numbers[i : i + at_once]
        sample, start = data.get_annotated(np.concatenate([batches[b] for b in group]), device), 0
        for b in group:
            yield b, sample.select(slice(start, start + len(batches[b])))
            start += len(batches[b])


class Counts(NamedTuple):
    """What the metrics of a batch are computed from."""

    copy: HostCopy  # errors, tables unless they are in `tables`, and whether outputs are finite
    tables: dict[str, list[Tables]]  # by "masks" or "classes", for each kind of masks
    kinds: list[str]
    num_slots: int
    num_pixels: int  # of a true mask

    def wait(self) -> Arrived:
        arrived = self.copy.wait()
        tables, columns = dict(self.tables), (arrived["largest"] + 1).tolist() if "largest" in arrived else []
        for name in ("masks", "classes"):
            if name in arrived:
                pairs = zip(arrived[name], columns, strict=True)
                tables[name] = [Tables.trim(counts, each, self.num_slots) for counts, each in pairs]
        errors = {name: x for name, x in arrived.items() if name in ERRORS}
        finite = {name.removeprefix(FINITE): bool(x) for name, x in arrived.items() if name.startswith(FINITE)}
        return Arrived(errors, tables, finite)


class Arrived(NamedTuple):
    """The same, on the CPU."""

    errors: dict[str, Tensor]  # (B,), by name
    tables: dict[str, list[Tables]]
    finite: dict[str, bool]  # whether an output is, by its name


def count_batch(
    sample: AnnotatedSample,
    labels: dict[str, Tensor],
    num_slots: int,
    ignore_label: int | None,
    errors: dict[str, Tensor],
    finite: dict[str, Tensor],
    per_frame: bool,
) -> Counts:
    """Start to count the labels (B, [T,] H, W) of every kind of masks.

    The counts are copied to the CPU with errors (B,) and with the tensors that say whether outputs are finite. Labels
    of every kind are indices of slots: a slot that was merged into another one is empty and keeps its index.
    """
    copied, tables, predicted = errors | {FINITE + name: x for name, x in finite.items()}, {}, list(labels.values())
    for name, true in (("masks", sample.mask), ("classes", sample.classes)):
        if true is None or not predicted:
            continue
        of_frames = per_frame and name == "masks"
        if can_count(true, num_slots):
            parts = [count_labels(true, each, num_slots, ignore_label, of_frames) for each in predicted]
            copied |= {name: torch.stack(parts), "largest": torch.stack([each.amax() for each in predicted])}
        else:
            slots = num_slots if name == "masks" else None
            tables[name] = [wait_for_tables(true, each, slots, ignore_label, of_frames) for each in predicted]
    num_pixels = sample.mask.shape[-2] * sample.mask.shape[-1]
    return Counts(HostCopy(copied), tables, list(labels), num_slots, num_pixels)


def reconstruction_errors(image: Tensor, output: ModelOutput) -> dict[str, Tensor]:
    """Return the reconstruction error (B,) of images: "mse", or "feature_mse" of a model that reconstructs features."""
    if isinstance(output, FeatureOutput):
        error = output.reconstruction - output.target
        error = error.cpu() if error.device.type == "mps" else error  # which has no float64
        return {"feature_mse": error.double().square().mean((1, 2, 3))}
    return {"mse": metrics.summed_squares(to_float(image), output.reconstruction)}


def batch_metrics(counts: Counts, arrived: Arrived, visibility: Tensor | None, by_group: bool) -> dict[str, Tensor]:
    """Return the metrics (B,) of a batch, those of every kind of masks under their prefixed names, and the errors.

    `by_group` adds the objects found, by size and by occlusion.
    """
    tables = arrived.tables
    if "masks" not in tables:
        return arrived.errors
    groups = object_groups(object_areas(tables["masks"][0].counts, counts.num_pixels), visibility)
    numbers = count_objects(groups)
    columns = numbers if by_group else {"num_objects": numbers["num_objects"]}
    for k, (kind, table) in enumerate(zip(counts.kinds, tables["masks"], strict=True)):
        is_video = table.counts.ndim == 4
        values = (metrics.video_table_metrics if is_video else metrics.image_table_metrics)(*table)
        if "classes" in tables:
            values |= metrics.class_table_metrics(tables["classes"][k].counts)
        if by_group:
            values |= found_objects(table.counts.sum(1) if is_video else table.counts, groups)
        columns |= {EVALUATED_MASKS[kind].prefix + name: value for name, value in values.items()}
    return columns | arrived.errors
