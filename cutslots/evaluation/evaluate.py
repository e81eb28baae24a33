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
from typing import TYPE_CHECKING, Any, NamedTuple

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
from cutslots.models.discovery import Discovery, FeatureOutput, ModelOutput, check_finite, to_float
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
    the reconstruction error only, "mse" or "feature_mse". A `title` shows a progress bar. Slots of videos are
    associated over time by `association`, by default the first of `model.associations`.
    """
    indices = np.arange(len(data) if num_images is None else min(num_images, len(data)))
    size = _batch_size(model, data)
    batches = [indices[i : i + size] for i in range(0, len(indices), size)]
    rows, was_training = metrics.MetricRows(), model.training
    model.eval()
    with progress(not title or fabric.global_rank > 0) as bar:
        for b in bar.track(range(fabric.global_rank, len(batches), fabric.world_size), description=title):
            sample = data.get_batch(batches[b], fabric.device)
            truth = Truth.of(data, batches[b], sample)
            torch.manual_seed(b)  # Slot Attention samples its initial slots
            with fabric.autocast():
                if data.frames > 1:
                    columns = _video_columns(sample, track_clip(model, sample.image, association), truth)
                else:
                    output = model(sample.image)
                    check_finite(model, masks=output.masks, reconstruction=output.reconstruction)
                    columns = _image_columns(sample, output, truth if data.has_masks else None)
            rows.add(batches[b], columns)
    model.train(was_training)
    rows.gather()
    return rows


def _batch_size(model: Discovery, data: Dataset) -> int:
    if data.frames == 1:
        return IMAGE_BATCH_SIZE
    return 1 if model.spacetime else VIDEO_BATCH_SIZE  # a spacetime model decodes all frames of a video at once


class Truth(NamedTuple):
    """True labels ([B,] [T,] H, W) of a batch, its true classes if there are any, and the label of ignored pixels."""

    mask: Tensor
    classes: Tensor | None
    ignore_label: int | None

    @staticmethod
    def of(data: Dataset, indices: np.ndarray, sample: Sample) -> Truth:
        classes = data.get_classes(indices, sample.mask.device) if data.has_classes else None
        return Truth(sample.mask, classes, data.ignore_label)

    def num_objects(self) -> Tensor:
        background = (0,) if self.ignore_label is None else (0, self.ignore_label)
        return torch.tensor([sum(label not in background for label in mask.unique().tolist()) for mask in self.mask])


def _image_columns(sample: Sample, output: ModelOutput, truth: Truth | None) -> dict[str, Tensor]:
    columns = _error_columns(sample.image, output)
    if truth is None:
        return columns
    labels = hard_labels(output, sample.image, truth.mask.shape[-2:])
    return _mask_columns(truth, labels, output.masks.shape[1], metrics.image_metrics) | columns


def _error_columns(image: Tensor, output: ModelOutput) -> dict[str, Tensor]:
    """Return the reconstruction error of images: "mse", or "feature_mse" of a model that reconstructs features."""
    if isinstance(output, FeatureOutput):
        return {"feature_mse": (output.reconstruction - output.target).cpu().double().square().mean((1, 2, 3))}
    return {"mse": metrics.squared_error(to_float(image), output.reconstruction)}


def _video_columns(sample: Sample, outputs: list[ModelOutput], truth: Truth) -> dict[str, Tensor]:
    frames = [_error_columns(sample.image[:, t], output) for t, output in enumerate(outputs)]
    errors = {name: torch.stack([frame[name] for frame in frames]).mean(0) for name in frames[0]}
    labels = video_hard_labels(outputs, sample.image, truth.mask.shape[-2:])
    columns = _mask_columns(truth, labels, outputs[0].masks.shape[1], metrics.video_metrics)
    return columns | errors


def _mask_columns(
    truth: Truth,
    labels: dict[str, Tensor],
    num_slots: int,
    metric: Callable[[Tensor, Tensor, int, int | None], dict[str, Tensor]],
) -> dict[str, Tensor]:
    """Return the number of true objects, and the metrics of every kind of masks under their prefixed names.

    Labels of every kind are indices of slots: a slot that was merged into another one is empty and keeps its index.
    """
    columns = {"num_objects": truth.num_objects()}
    for kind, predicted in labels.items():
        values = metric(truth.mask, predicted, num_slots, truth.ignore_label)
        if truth.classes is not None:
            values |= metrics.class_metrics(truth.classes, predicted, truth.ignore_label)
        columns |= {EVALUATED_MASKS[kind].prefix + name: value for name, value in values.items()}
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
    writer.writerows({name: "" if value != value else value for name, value in row.items()} for row in rows)  # NaN
    return text.getvalue().encode()


def _run_folder(checkpoint: str) -> Path | None:
    """Return the run folder that contains the checkpoint, or None."""
    folder = checkpoint_file(checkpoint).parent
    return folder if (folder / "metrics.jsonl").is_file() else None
