"""The page of a training run, report.html: key figures, validation metrics, visualizations, curves, configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning_fabric import Fabric

from cutslots.data.text import data_text
from cutslots.evaluation.report import environment_section, image_rows, training_sections
from cutslots.evaluation.tables import metrics_section
from cutslots.evaluation.visualize import Visualization
from cutslots.files import read_lines, write_atomically
from cutslots.training.config import RunConfig
from cutslots.viz.html import key_figures, page, section


def write_training_report(
    folder: Path, config: RunConfig, num_images: int, visualization: Visualization, fabric: Fabric
) -> None:
    """Write report.html of the run in `folder`, which was validated on `num_images` images or videos."""
    history = read_lines(folder / "metrics.jsonl")
    means = next((line["val"] for line in reversed(history) if "ari_fg" in line.get("val", {})), None)
    data = data_text(config.data)
    results = {data: {"num_images": num_images, **means}} if means else {}
    title = f"Training: {config.preset} on {data}"
    figures = _key_figures(config.seed, history, means)
    write_training_page(folder / "report.html", title, folder, figures, results, visualization, device_name(fabric))


def device_name(fabric: Fabric) -> str:
    """Return the device that a run used, in words."""
    cuda = fabric.device.type == "cuda"
    return torch.cuda.get_device_name() if cuda else f"{torch.get_num_threads()} CPU threads"


def _key_figures(seed: int, history: list[dict[str, Any]], means: dict[str, float] | None) -> dict[str, str]:
    figures: dict[str, str] = {}
    if means:
        figures |= {"ARI-FG": f"{100 * means['ari_fg']:.1f}", "mIoU": f"{100 * means['miou']:.1f}"}
    return figures | run_figures(seed, history)


def run_figures(seed: int, history: list[dict[str, Any]]) -> dict[str, str]:
    """Return the seed, steps, minutes and speed of a run, from the lines of its metrics.jsonl."""
    figures = {"seed": str(seed)}
    losses = [line for line in history if "loss" in line]
    if losses:
        figures |= {"steps": f"{losses[-1]['step']:,}", "minutes": f"{losses[-1]['seconds'] / 60:.1f}"}
        figures["images per second"] = f"{np.median([line['images_per_second'] for line in losses]):,.0f}"
    return figures


def write_training_page(
    path: Path,
    title: str,
    run: Path,
    figures: dict[str, str],
    results: dict[str, Any],
    visualization: Visualization,
    device: str,
) -> None:
    """Write the page of a run from its folder, key figures by label, results by dataset, and validation images."""
    summary = "The model is trained to reconstruct images from slots, without labels."
    sections = [
        key_figures(figures),
        metrics_section(results) if results else "",
        section("Results on validation images", image_rows(visualization)),
        *training_sections(run),
        environment_section(device),
    ]
    write_atomically(path, page(title, summary, *sections))
