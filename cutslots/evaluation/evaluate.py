"""Evaluation: the metrics of every image of a dataset, for every kind of masks.

Processes evaluate batches in turn, a batch is seeded by its number, and rows are sorted before means are taken: the
results do not depend on the number of processes.

`evaluate` writes

    results.json     the checkpoint, the model's configuration, refinement settings, mean metrics of every dataset
    per_image.csv    metrics of every image or video
    report.html      tables, the worst images, and the training curves if the checkpoint is in a run folder

The device does not wait for metrics: a thread computes them, and keeps images to show, while the next batch runs.
"""

from __future__ import annotations

import csv
import io
import json
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from cutslots.data.open import open_dataset
from cutslots.dataset import AnnotatedSample, Dataset, Sample, masks_to_show
from cutslots.evaluation import metrics
from cutslots.evaluation.batches import Counts, batch_metrics, count_batch, read_batches, reconstruction_errors
from cutslots.evaluation.gallery import Examples, Gallery
from cutslots.evaluation.labels import hard_labels, video_hard_labels
from cutslots.evaluation.report import example_sections, training_sections, write_evaluation_report
from cutslots.evaluation.tables import found_text, table_text
from cutslots.evaluation.visualize import (
    NUM_SHOWN_IMAGES,
    NUM_SHOWN_VIDEOS,
    visualize_image_rows,
    visualize_pair,
    visualize_video_rows,
)
from cutslots.files import progress, write_atomically
from cutslots.models import refinement
from cutslots.models.checkpoints import checkpoint_file, load
from cutslots.models.discovery import Discovery, ModelOutput, are_finite, raise_unless_finite
from cutslots.models.tracker import track_clip

if TYPE_CHECKING:
    from lightning_fabric import Fabric

IMAGE_BATCH_SIZE = 32
VIDEO_BATCH_SIZE = 16
MAX_PENDING = 2  # batches whose metrics are not finished when the next one starts; their outputs stay in memory


@torch.no_grad()
def evaluate_model(
    model: Discovery,
    data: Dataset,
    fabric: Fabric,
    num_images: int | None = None,
    title: str = "",
    association: str | None = None,
    by_group: bool = False,
    gallery: Gallery | None = None,
) -> metrics.MetricRows:
    """Return the metrics of the first `num_images` images or videos, gathered from all processes.

    Names of metrics begin with the prefix of their kind of masks (see `EVALUATED_MASKS`). A dataset without masks has
    the reconstruction error only, "mse" or "feature_mse". A `title` shows a progress bar. Slots of videos are
    associated over time by `association`, by default the first of `model.associations`. `by_group` adds the objects
    found, by size and by occlusion; a `gallery` needs them, and keeps images or videos to show.
    """
    indices = np.arange(len(data) if num_images is None else min(num_images, len(data)))
    size = _batch_size(model, data)
    batches = [indices[i : i + size] for i in range(0, len(indices), size)]
    numbers = range(fabric.global_rank, len(batches), fabric.world_size)
    rows, was_training = metrics.MetricRows(), model.training
    finish = partial(_finish, model, data, by_group, gallery)
    model.eval()
    with progress(not title or fabric.global_rank > 0) as bar, ThreadPoolExecutor(1) as thread:
        pending: deque[Future[tuple[np.ndarray, dict[str, Tensor]]]] = deque()
        reader = read_batches(data, batches, numbers, fabric.device)
        for b, sample in bar.track(reader, total=len(numbers), description=title):
            torch.manual_seed(b)  # Slot Attention samples its initial slots
            with fabric.autocast():
                evaluated = _evaluate_batch(model, data, sample, association)
            pending.append(thread.submit(finish, batches[b], sample, evaluated))
            del evaluated  # the outputs of a batch are large
            while len(pending) > (MAX_PENDING if data.frames == 1 else 0):
                rows.add(*pending.popleft().result())
        for each in pending:
            rows.add(*each.result())
    model.train(was_training)
    rows.gather()
    return rows


def _batch_size(model: Discovery, data: Dataset) -> int:
    if data.frames == 1:
        return IMAGE_BATCH_SIZE
    return 1 if model.spacetime else VIDEO_BATCH_SIZE  # a spacetime model decodes all frames of a video at once


class EvaluatedBatch(NamedTuple):
    """What a model returns for a batch, its labels, and the counts that metrics are computed from."""

    outputs: ModelOutput | list[ModelOutput]  # a list of frames for videos
    labels: dict[str, Tensor]
    counts: Counts


def _evaluate_batch(
    model: Discovery, data: Dataset, sample: AnnotatedSample, association: str | None
) -> EvaluatedBatch:
    """Run the model and count. Nothing here waits for a GPU, if the data are images."""
    size, labels = sample.mask.shape[-2:], {}
    if data.frames > 1:
        outputs = track_clip(model, sample.image, association)
        frames = [reconstruction_errors(sample.image[:, t], output) for t, output in enumerate(outputs)]
        errors = {name: torch.stack([frame[name] for frame in frames]).mean(0) for name in frames[0]}
        labels = video_hard_labels(outputs, sample.image, size)
        counts = count_batch(sample, labels, outputs[0].masks.shape[1], data.ignore_label, errors, {}, per_frame=True)
        return EvaluatedBatch(outputs, labels, counts)
    output = model(sample.image)
    finite = are_finite(masks=output.masks, reconstruction=output.reconstruction)
    if data.has_masks:
        labels = hard_labels(output, sample.image, size)
    errors = reconstruction_errors(sample.image, output)
    counts = count_batch(sample, labels, output.masks.shape[1], data.ignore_label, errors, finite, per_frame=False)
    return EvaluatedBatch(output, labels, counts)


@torch.no_grad()
def _finish(
    model: Discovery,
    data: Dataset,
    by_group: bool,
    gallery: Gallery | None,
    indices: np.ndarray,
    sample: AnnotatedSample,
    evaluated: EvaluatedBatch,
) -> tuple[np.ndarray, dict[str, Tensor]]:
    """Wait for the counts of a batch; return its indices and its metrics (B,) by name."""
    outputs, labels, counts = evaluated
    arrived = counts.wait()
    raise_unless_finite(model, arrived.finite)
    columns = batch_metrics(counts, arrived, sample.visibility, by_group)
    if gallery is not None:
        shown = masks_to_show(Sample(sample.image, sample.mask), data.ignore_label)
        visualize = visualize_video_rows if isinstance(outputs, list) else visualize_image_rows
        gallery.add(indices, metrics.to_rows(columns), partial(visualize, shown, outputs, labels))  # type: ignore[arg-type]
    return indices, columns


def evaluate(
    checkpoint: str,
    data: tuple[str, ...],
    out: Path | None,
    split: str,
    num_images: int | None,
    fabric: Fabric,
    association: str | None = None,
    plugins: Iterable[str | Path] = (),
) -> dict[str, Any]:
    """Evaluate a checkpoint on datasets; print a table; write results.json, per_image.csv and report.html.

    Args:
        checkpoint: A run folder, a .safetensors file or the name of a shipped checkpoint.
        data: Names of datasets, as `open_dataset` takes them.
        out: The folder to write to; by default evaluation/ in the run folder, or here.
        split: train, val or test.
        num_images: How many images or videos of each dataset; None means all.
        fabric: The processes and their devices.
        association: How slots of videos are associated over time; None means the first of `model.associations`.
        plugins: Python files or modules that register parts of the model, or datasets.

    Returns:
        For every dataset the split, the number of images and the mean of every metric.
    """
    model = load(checkpoint, fabric.device, plugins)
    folder = out or (Path(checkpoint) / "evaluation" if Path(checkpoint).is_dir() else Path("evaluation"))
    opened = _open_all(checkpoint, model, data, split, num_images)
    if fabric.global_rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
    run = _run_folder(checkpoint) if fabric.global_rank == 0 else None
    results: dict[str, Any] = {}
    rows: list[dict[str, Any]] = []
    with ThreadPoolExecutor(1) as thread:  # writes the page while the device works
        sections: list[Future[list[str]]] = []
        training = thread.submit(training_sections, run) if run else None
        for name, dataset in opened.items():
            found, examples = _evaluate_dataset(model, name, dataset, split, fabric, association)
            results[name] = {"split": split, "num_images": len(found.rows), **found.means()}
            rows += [{"dataset": name, "image": dataset.name(i), **row} for i, row in found.table()]
            if fabric.global_rank == 0:
                sections.append(thread.submit(example_sections, examples, name))
        if fabric.global_rank == 0:
            record = _record(checkpoint, results, association or model.associations[0])
            _write_files(folder, record, rows, sections, training)
    return results


def _write_files(
    folder: Path,
    record: dict[str, Any],
    rows: list[dict[str, Any]],
    sections: list[Future[list[str]]],
    training: Future[list[str]] | None,
) -> None:
    """Write the files and print the tables; sections of the page, by dataset, may still be on their way."""
    write_atomically(folder / "results.json", json.dumps(record, indent=1).encode())
    write_atomically(folder / "per_image.csv", _csv_bytes(rows))
    shown = [section for each in sections for section in each.result()]
    write_evaluation_report(folder / "report.html", record, shown, training.result() if training else None)
    print(table_text(record["results"]))
    print(found_text(record["results"]))
    print(f"wrote {folder / 'results.json'}, per_image.csv and {folder / 'report.html'}")


def _evaluate_dataset(
    model: Discovery, name: str, data: Dataset, split: str, fabric: Fabric, association: str | None
) -> tuple[metrics.MetricRows, Examples]:
    """Return the metrics of a dataset, and what the report shows of it."""
    gallery = Gallery(NUM_SHOWN_IMAGES if data.frames == 1 else NUM_SHOWN_VIDEOS)
    title = f"{name}, {split}"
    found = evaluate_model(model, data, fabric, None, title, association, by_group=True, gallery=gallery)
    gallery.gather()
    examples = gallery.examples(data)
    if data.frames > 1 and fabric.global_rank == 0 and gallery.worst():
        examples = examples._replace(pair=visualize_pair(model, data, gallery.worst()[0], fabric))
    return found, examples


def _record(checkpoint: str, results: dict[str, Any], association: str) -> dict[str, Any]:
    """Return the content of results.json."""
    config = json.loads(checkpoint_file(checkpoint).with_name("config.json").read_text())
    record: dict[str, Any] = {"checkpoint": str(checkpoint), "model": config, "refinement": refinement.DEFAULTS}
    if any("id_switches" in means for means in results.values()):
        record["association"] = association
    return record | {"results": results}


def _open_all(
    checkpoint: str, model: Discovery, data: tuple[str, ...], split: str, num_images: int | None
) -> dict[str, Dataset]:
    """Return the datasets by name. Validates all of them before the first one is evaluated."""
    if not data:
        raise ValueError("data is empty; expected names of datasets or folders")
    opened = {name: _open_with_masks(name, split, model.image_size, num_images) for name in data}
    for name, dataset in opened.items():
        if dataset.frames == 1 and model.spacetime:
            raise ValueError(
                f"data is {name!r}, images, but {checkpoint} partitions clips; expected moving or movi-a:DIR"
            )
    return opened


def _open_with_masks(name: str, split: str, image_size: tuple[int, int], num_images: int | None) -> Dataset:
    dataset = open_dataset(name, split, image_size, num_images, videos=True)
    if not dataset.has_masks:
        raise ValueError(f"data: {name} contains no masks/; expected masks to evaluate on, or use cutslots predict")
    return dataset


def _csv_bytes(rows: list[dict[str, Any]]) -> bytes:
    text = io.StringIO()
    names = list(dict.fromkeys(name for row in rows for name in row)) or ["dataset"]
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: "" if value != value else value for name, value in row.items()} for row in rows)  # NaN
    return text.getvalue().encode()


def _run_folder(checkpoint: str) -> Path | None:
    """Return the run folder that contains the checkpoint, or None."""
    folder = checkpoint_file(checkpoint).parent
    return folder if (folder / "metrics.jsonl").is_file() else None
