"""Measure how long an evaluation takes, stage by stage, next to one that waits for the device after every step.

    python benchmarks/evaluation.py                                     # tiny-64 on 64 images, on a CPU
    python benchmarks/evaluation.py --device cuda --num-images 1000     # textured-128; well under a minute

`before` is the evaluation of earlier versions, kept here: one batch of 32 at a time is rendered, refined with boolean
indices, and copied to the CPU, which computes its metrics before the next batch starts; images of the report are
computed again. `after` is `cutslots.evaluation.evaluate`: scenes are rendered in large groups, labels are counted on
the device, and a thread computes metrics and keeps images of the report while the device works on the next batch.

The whole evaluation runs three times, from the loaded model to the written report: `after` first, which compiles
kernels and selects algorithms of convolutions (the cold time), then `before` and `after`. Stages are timed alone on
some of the images and scaled to all, with the device idle before and after each; in `after` they overlap, so their sum
is more than the whole.
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import tempfile
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from lightning_fabric import Fabric
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor

from cutslots.data.open import open_dataset
from cutslots.dataset import AnnotatedSample, Dataset, Sample
from cutslots.devices import make_fabric
from cutslots.evaluation import metrics
from cutslots.evaluation.batches import batch_metrics, count_batch, read_batches, reconstruction_errors
from cutslots.evaluation.evaluate import IMAGE_BATCH_SIZE, evaluate
from cutslots.evaluation.gallery import Gallery
from cutslots.evaluation.labels import EVALUATED_MASKS, hard_labels
from cutslots.evaluation.report import example_sections, image_rows
from cutslots.evaluation.visualize import NUM_SHOWN_IMAGES, visualize_image_rows, visualize_images
from cutslots.models import refinement
from cutslots.models.checkpoints import load
from cutslots.models.discovery import Discovery, check_finite, to_float
from cutslots.models.refinement import CUT_ITERATIONS, CUT_TOLERANCE, MIN_LOG_MASK, SlotOverlap, edge_capacities
from cutslots.programs.min_cut import MinCut
from cutslots.viz.html import page, section

DEFAULTS = {"cpu": ("tiny-64", "plain", 64), "cuda": ("textured-128", "textured", 1000)}
STAGE_IMAGES = 256  # images on which stages are timed alone

Batches = list[np.ndarray]


# -------------------------------------------------------------------------------------------------------------- before


def merge_slots_before(
    statistics: SlotOverlap,
    merge_threshold: float = refinement.MERGE_THRESHOLD,
    min_overlap: float = refinement.MIN_OVERLAP,
    histogram: Tensor | None = None,
    color_threshold: float = refinement.COLOR_THRESHOLD,
) -> Tensor:
    """Merge slots, with the images that have a pair to merge selected in every step."""
    overlap, distance, area = (x.clone() for x in statistics[:3])
    histogram = None if histogram is None else histogram.clone()
    B, K = area.shape
    target = torch.arange(K, device=area.device).repeat(B, 1)
    batch = torch.arange(B, device=area.device)
    diagonal = torch.eye(K, dtype=torch.bool, device=area.device)
    for _ in range(K - 1):
        apart = diagonal | (overlap < min_overlap) | (overlap == 0)
        apart = apart | refinement._differ_in_color(histogram, color_threshold)
        smallest, pair = (distance / overlap).masked_fill(apart, torch.inf).flatten(1).min(1)
        merge = smallest < merge_threshold * statistics.variance
        if not merge.any():
            break
        b, first, second = batch[merge], (pair // K)[merge], (pair % K)[merge]
        first_is_larger = area[b, first] > area[b, second]
        small, large = torch.where(first_is_larger, second, first), torch.where(first_is_larger, first, second)
        target[merge] = torch.where(target[merge] == small[:, None], large[:, None], target[merge])
        for x in (overlap, distance):
            x[b, large] += x[b, small]
            x[b, :, large] += x[b, :, small]
            x[b, small], x[b, :, small] = 0, 0
        area[b, large] += area[b, small]
        if histogram is not None:
            histogram[b, large] += histogram[b, small]
    return target


def cut_masks_before(
    masks: Tensor, image: Tensor, capacity: float = refinement.CAPACITY, edge_sigma: float = refinement.EDGE_SIGMA
) -> Tensor:
    """Cut the slots that have pixels, whose number the device is asked for."""
    present = masks.amax((2, 3)) > math.exp(MIN_LOG_MASK)
    owner, _ = present.nonzero(as_tuple=True)
    w = edge_capacities(image, capacity, edge_sigma)[owner]
    w[:, -2] = masks[present].float().clamp_min(math.exp(MIN_LOG_MASK)).log() - MIN_LOG_MASK
    cut = MinCut(masks.shape[2:], tolerance=CUT_TOLERANCE, max_iterations=CUT_ITERATIONS, warn=False)
    logits = torch.full_like(masks, -torch.inf, dtype=torch.float32)
    logits[present] = cut(w)
    return logits.softmax(1)


def labels_before(output: Any, image: Tensor, size: tuple[int, ...]) -> dict[str, Tensor]:
    with (
        mock.patch.object(refinement, "merge_slots", merge_slots_before),
        mock.patch.object(refinement, "cut_masks", cut_masks_before),
    ):
        return hard_labels(output, image, size)


def metrics_before(
    sample: AnnotatedSample, output: Any, labels: dict[str, Tensor], ignore_label: int | None
) -> dict[str, Tensor]:
    """Compute the metrics of a batch kind by kind, each from a table that is copied at once."""
    columns = {"num_objects": torch.tensor([sum(x > 0 for x in mask.unique().tolist()) for mask in sample.mask])}
    for kind, predicted in labels.items():
        values = metrics.image_metrics(sample.mask, predicted, output.masks.shape[1], ignore_label)
        columns |= {EVALUATED_MASKS[kind].prefix + name: value for name, value in values.items()}
    difference = to_float(sample.image).cpu().double() - output.reconstruction.cpu().double()
    return columns | {"mse": difference.square().flatten(1).sum(1)}


def report_before(model: Discovery, data: Dataset, fabric: Fabric) -> bytes:
    shown = visualize_images(model, data, NUM_SHOWN_IMAGES, fabric)
    return page("Evaluation", "", section("Results", image_rows(shown)))


@torch.no_grad()
def evaluate_before(model: Discovery, data: Dataset, batches: Batches, fabric: Fabric, out: Path) -> dict[str, float]:
    rows = metrics.MetricRows()
    for b, indices in enumerate(batches):
        sample = AnnotatedSample(*data.get_batch(indices, fabric.device))
        torch.manual_seed(b)
        with fabric.autocast():
            output = model(sample.image)
            check_finite(model, masks=output.masks, reconstruction=output.reconstruction)
            labels = labels_before(output, sample.image, sample.mask.shape[-2:])
            rows.add(indices, metrics_before(sample, output, labels, data.ignore_label))
    (out / "report.html").write_bytes(report_before(model, data, fabric))
    return rows.means()


# -------------------------------------------------------------------------------------------------------------- stages


class Stages:
    """The stages of an evaluation, each alone on the same batches, before and after."""

    def __init__(self, model: Discovery, data: Dataset, batches: Batches, fabric: Fabric) -> None:
        self.model, self.data, self.batches, self.fabric = model, data, batches, fabric
        read = read_batches(data, batches, range(len(batches)), fabric.device)
        self.samples = [sample for _, sample in read]
        self.outputs = self.run_model()
        self.labels = self.refine(hard_labels)
        self.gallery = Gallery(NUM_SHOWN_IMAGES)

    def calls(self) -> dict[str, tuple[Callable[[], object], Callable[[], object]]]:
        """Return the calls before and after by stage."""
        return {
            "data": (self.read_before, self.read_after),
            "model": (lambda: self.run_model(check=True), self.run_model),
            "labels, refinement": (lambda: self.refine(labels_before), lambda: self.refine(hard_labels)),
            "metrics": (self.metrics_before, self.metrics_after),
            "report": (lambda: report_before(self.model, self.data, self.fabric), self.report_after),
        }

    def read_before(self) -> None:
        for indices in self.batches:
            self.data.get_batch(indices, self.fabric.device)

    def read_after(self) -> None:
        for _ in read_batches(self.data, self.batches, range(len(self.batches)), self.fabric.device):
            pass

    def run_model(self, check: bool = False) -> list[Any]:
        outputs = []
        for b, sample in enumerate(self.samples):
            torch.manual_seed(b)
            with self.fabric.autocast():
                outputs.append(self.model(sample.image))
            if check:
                check_finite(self.model, masks=outputs[-1].masks, reconstruction=outputs[-1].reconstruction)
        return outputs

    def refine(self, function: Callable[..., dict[str, Tensor]]) -> list[dict[str, Tensor]]:
        with self.fabric.autocast():
            pairs = zip(self.samples, self.outputs, strict=True)
            return [function(output, sample.image, sample.mask.shape[-2:]) for sample, output in pairs]

    def metrics_before(self) -> None:
        for batch in zip(self.samples, self.outputs, self.labels, strict=True):
            metrics_before(*batch, self.data.ignore_label)

    def metrics_after(self) -> None:
        counted = []
        for sample, output, labels in zip(self.samples, self.outputs, self.labels, strict=True):
            errors = reconstruction_errors(sample.image, output)
            slots, ignored = output.masks.shape[1], self.data.ignore_label
            counted.append(count_batch(sample, labels, slots, ignored, errors, {}, per_frame=False))
        for sample, counts in zip(self.samples, counted, strict=True):
            batch_metrics(counts, counts.wait(), sample.visibility, by_group=True)

    def report_after(self) -> None:
        """Visualize and write as many images as before; a real evaluation has the worst ones too."""
        sample, output, labels = self.samples[0], self.outputs[0], self.labels[0]
        rows = list(range(min(NUM_SHOWN_IMAGES, len(sample.image))))
        shown = visualize_image_rows(Sample(sample.image, sample.mask), output, labels, rows)
        row = {"num_objects": 1.0, "mbo_i": 0.0, "found": 0.0}
        gallery = Gallery(NUM_SHOWN_IMAGES)
        gallery.add(range(len(shown)), [row] * len(shown), lambda rows: [shown[i] for i in rows])
        page("Evaluation", "", *example_sections(gallery.examples(self.data), "data"))


def seconds(call: Callable[[], object], device: torch.device) -> float:
    """Return the time of a call, with the device idle before and after."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


@torch.no_grad()
def time_stages(stages: Stages, scale: float) -> dict[str, tuple[float, float]]:
    """Return the times of all images, before and after, by stage: the lesser of two, in turns."""
    times = {}
    for name, calls in stages.calls().items():
        rounds = [[seconds(call, stages.fabric.device) for call in calls] for _ in range(2)]
        factor = 1.0 if name == "report" else scale
        times[name] = (factor * min(r[0] for r in rounds), factor * min(r[1] for r in rounds))
    return times


# --------------------------------------------------------------------------------------------------------------- table


def largest_difference(before: dict[str, float], after: dict[str, float]) -> str:
    """Return the metric whose means differ most, and both means."""
    name = max(before, key=lambda name: abs(before[name] - after[name]) / max(1.0, abs(before[name])))
    if before[name] == after[name]:
        return "none"
    return f"{name}, {before[name]:.6g} and {after[name]:.6g}"


def table(times: dict[str, tuple[float, float]], num_images: int) -> Table:
    result = Table("stage", box=box.MARKDOWN)
    for head in ("before, s", "after, s", "ratio", "after, images/s"):
        result.add_column(head, justify="right")
    for name, (before, after) in times.items():
        result.add_row(name, f"{before:.3f}", f"{after:.3f}", f"{before / after:.2f}", f"{num_images / after:,.0f}")
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=list(DEFAULTS))
    parser.add_argument("--checkpoint", help="by default tiny-64 on a CPU, textured-128 on a GPU")
    parser.add_argument("--data", help="by default plain on a CPU, textured on a GPU")
    parser.add_argument("--num-images", type=int, help="by default 64 on a CPU, 1,000 on a GPU")
    args = parser.parse_args()
    defaults = DEFAULTS[args.device]
    checkpoint, name = args.checkpoint or defaults[0], args.data or defaults[1]
    num_images = args.num_images or defaults[2]
    fabric = make_fabric(args.device)
    model = load(checkpoint, fabric.device)
    data = open_dataset(name, "test", model.image_size, num_images)
    batches = [np.arange(i, min(i + IMAGE_BATCH_SIZE, len(data))) for i in range(0, len(data), IMAGE_BATCH_SIZE)]
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:

        def after() -> None:
            with redirect_stdout(StringIO()):
                found["after"] = evaluate(checkpoint, (name,), Path(folder), "test", num_images, fabric)[name]

        def before() -> None:
            found["before"] = evaluate_before(model, data, batches, fabric, Path(folder))

        cold = seconds(after, fabric.device)
        whole = (seconds(before, fabric.device), seconds(after, fabric.device))
    part = batches[: max(1, STAGE_IMAGES // IMAGE_BATCH_SIZE)]
    with torch.no_grad():
        stages = Stages(model, data, part, fabric)
    times = time_stages(stages, len(data) / sum(map(len, part)))
    times |= {"sum": (sum(t[0] for t in times.values()), sum(t[1] for t in times.values())), "the evaluation": whole}
    device = torch.cuda.get_device_name() if args.device == "cuda" else f"{torch.get_num_threads()} CPU threads"
    versions = f"torch {torch.__version__}, Python {platform.python_version()}, load {os.getloadavg()[0]:.1f}"
    print(f"{checkpoint} on {len(data)} images of {name}, {device}, {versions}")
    print(f"the first evaluation of the process: {cold:.2f} s")
    print(f"the means that differ most, before and after: {largest_difference(found['before'], found['after'])}")
    Console(width=120).print(table(times, len(data)))


if __name__ == "__main__":
    main()
