"""Evaluation: the metrics of every image of a dataset, for every kind of masks.

Processes evaluate batches in turn, a batch is seeded by its number, and rows are sorted before means are taken: the
results do not depend on the number of processes.

`evaluate` writes

    results.json     the checkpoint, the model's configuration, refinement settings, mean metrics of every dataset
    per_image.csv    metrics of every image or video
    report.html      tables, visualizations, and the training curves if the checkpoint is in a run folder
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from cutslots.data.open import open_dataset
from cutslots.dataset import Dataset, Sample
from cutslots.evaluation import metrics
from cutslots.evaluation.labels import EVALUATED_MASKS, hard_labels, video_hard_labels
from cutslots.evaluation.report import write_evaluation_report
from cutslots.evaluation.tables import table_text
from cutslots.evaluation.visualize import (
    NUM_SHOWN_IMAGES,
    VideoVisualization,
    Visualization,
    visualize_images,
    visualize_videos,
)
from cutslots.files import progress, write_atomically
from cutslots.models import refinement
from cutslots.models.checkpoints import checkpoint_file, load
from cutslots.models.discovery import Discovery, DiscoveryOutput, check_finite, to_float
from cutslots.models.tracker import track_clip

if TYPE_CHECKING:
    from lightning_fabric import Fabric

IMAGE_BATCH_SIZE = 32
VIDEO_BATCH_SIZE = 16


@torch.no_grad()
def evaluate_model(
    model: Discovery,
    data: Dataset,
    fabric: Fabric,
    num_images: int | None = None,
    title: str = "",
    association: str | None = None,
) -> metrics.MetricRows:
    """Return the metrics of the first `num_images` images or videos, gathered from all processes.

    Names of metrics begin with the prefix of their kind of masks (see `EVALUATED_MASKS`). A dataset without masks has
    "mse" only. A `title` shows a progress bar. Slots of videos are associated over time by `association`, by default
    the first of `model.associations`.
    """
    indices = np.arange(len(data) if num_images is None else min(num_images, len(data)))
    size = _batch_size(model, data)
    batches = [indices[i : i + size] for i in range(0, len(indices), size)]
    rows, was_training = metrics.MetricRows(), model.training
    model.eval()
    with progress(not title or fabric.global_rank > 0) as bar:
        for b in bar.track(range(fabric.global_rank, len(batches), fabric.world_size), description=title):
            sample = data.get_batch(batches[b], fabric.device)
            torch.manual_seed(b)  # Slot Attention samples its initial slots
            with fabric.autocast():
                if data.frames > 1:
                    columns = _video_columns(sample, track_clip(model, sample.image, association))
                else:
                    output = model(sample.image)
                    check_finite(model, masks=output.masks, reconstruction=output.reconstruction)
                    columns = _image_columns(sample, output, data.has_masks)
            rows.add(batches[b], columns)
    model.train(was_training)
    rows.gather()
    return rows


def _batch_size(model: Discovery, data: Dataset) -> int:
    if data.frames == 1:
        return IMAGE_BATCH_SIZE
    return 1 if model.spacetime else VIDEO_BATCH_SIZE  # a spacetime model decodes all frames of a video at once


def _image_columns(sample: Sample, output: DiscoveryOutput, has_masks: bool) -> dict[str, Tensor]:
    columns = {"mse": metrics.squared_error(to_float(sample.image), output.reconstruction)}
    if not has_masks:
        return columns
    labels = hard_labels(output, sample.image)
    return _mask_columns(sample.mask, labels, output.masks.shape[1], metrics.image_metrics) | columns


def _video_columns(sample: Sample, outputs: list[DiscoveryOutput]) -> dict[str, Tensor]:
    image = to_float(sample.image)
    errors = [metrics.squared_error(image[:, t], output.reconstruction) for t, output in enumerate(outputs)]
    labels = video_hard_labels(outputs, sample.image)
    columns = _mask_columns(sample.mask, labels, outputs[0].masks.shape[1], metrics.video_metrics)
    return columns | {"mse": torch.stack(errors).mean(0)}


def _mask_columns(
    true: Tensor,
    labels: dict[str, Tensor],
    num_slots: int,
    metric: Callable[[Tensor, Tensor, int], dict[str, Tensor]],
) -> dict[str, Tensor]:
    """Return the number of true objects, and the metrics of every kind of masks under their prefixed names.

    Labels of every kind are indices of slots: a slot that was merged into another one is empty and keeps its index.
    """
    columns = {"num_objects": torch.tensor([int((mask.unique() > 0).sum()) for mask in true])}
    for kind, predicted in labels.items():
        prefix = EVALUATED_MASKS[kind].prefix
        columns |= {prefix + name: value for name, value in metric(true, predicted, num_slots).items()}
    return columns


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
    results: dict[str, Any] = {}
    rows: list[dict[str, Any]] = []
    shown: dict[str, Visualization | VideoVisualization] = {}
    for name, dataset in opened.items():
        found = evaluate_model(model, dataset, fabric, title=f"{name}, {split}", association=association)
        results[name] = {"split": split, "num_images": len(found.rows), **found.means()}
        rows += [{"dataset": name, "image": dataset.name(i), **row} for i, row in found.table()]
        if dataset.frames > 1:
            shown[name] = visualize_videos(model, dataset, fabric, association=association)
        else:
            shown[name] = visualize_images(model, dataset, NUM_SHOWN_IMAGES, fabric)
    if fabric.global_rank == 0:
        record = _record(checkpoint, results, association or model.associations[0])
        write_atomically(folder / "results.json", json.dumps(record, indent=1).encode())
        write_atomically(folder / "per_image.csv", _csv_bytes(rows))
        write_evaluation_report(folder / "report.html", record, shown, _run_folder(checkpoint))
        print(table_text(results))
        print(f"wrote {folder / 'results.json'}, per_image.csv and {folder / 'report.html'}")
    return results


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
        if model.frames > 1 and dataset.frames == 1:
            raise ValueError(
                f"data is {name!r}, images, but {checkpoint} was trained on videos; expected moving or movi-a:DIR"
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
    writer.writerows(rows)
    return text.getvalue().encode()


def _run_folder(checkpoint: str) -> Path | None:
    """Return the run folder that contains the checkpoint, or None."""
    folder = checkpoint_file(checkpoint).parent
    return folder if (folder / "metrics.jsonl").is_file() else None
