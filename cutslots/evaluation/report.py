"""Sections of report pages, and the page of an evaluation.

Pages show visualizations, tables and training curves. `cutslots.training.report` writes the page of a run from the same
sections.
"""

from __future__ import annotations

import datetime
import html
import importlib.metadata
import json
import platform
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

import cutslots
from cutslots.evaluation.gallery import Example, Examples
from cutslots.evaluation.tables import found_section, metrics_section, sample_noun
from cutslots.evaluation.visualize import DISTANT_FRAMES, Visualization
from cutslots.files import read_lines, write_atomically
from cutslots.viz.curves import training_curves
from cutslots.viz.html import (
    figure,
    frame_strip,
    key_figures,
    page,
    player,
    png_image,
    preformatted,
    scroll_box,
    section,
)

STEP_IMAGES = "visualizations"  # the folder of a run with an image grid for every evaluation
NUM_STEP_IMAGES = 6
NUM_SHOWN_FRAMES = 8
TRACK_NOTE = " A track keeps its color. It has the color of the true object that it covers."


def write_evaluation_report(
    path: Path, record: dict[str, Any], examples: list[str], training: list[str] | None = None
) -> None:
    """Write the page of an evaluation.

    `record` is the content of results.json, `examples` are the sections of `example_sections` for all datasets, and
    `training` are those of `training_sections` if the checkpoint is in a run folder.
    """
    results = record["results"]
    summary = (
        f"Checkpoint {record['checkpoint']}. The model is trained without labels to reconstruct images from slots. The "
        "mask of each slot is an object it has found. Metrics compare these masks with the true masks."
    )
    sections = [key_figures(_key_figures(results)), metrics_section(results), found_section(results), *examples]
    if training is not None:
        sections += training
    else:
        sections.append(section("Model configuration", preformatted(json.dumps(record["model"], indent=1))))
    sections.append(environment_section())
    write_atomically(path, page(f"Evaluation on {', '.join(results)}", summary, *sections))


def example_sections(examples: Examples, name: str) -> list[str]:
    """Return the sections of a dataset: the worst images or videos, then the first ones."""
    if not examples.worst:
        return []
    is_video = examples.worst[0].visualization.shared_labels
    noun, rows = ("videos", _video_players) if is_video else ("images", _captioned_rows)
    note = "By mBO-i of the refined masks, or of the decoder masks where there are no refined ones."
    sections = [section(f"Worst {noun} of {name}", rows(examples.worst), note=f"{note}{TRACK_NOTE * is_video}")]
    if is_video:
        slots = _slot_rows(examples.worst[0].visualization.subsample(NUM_SHOWN_FRAMES))
        sections.append(section("Slots over time, the worst video", slots))
    if examples.pair is not None:
        heading = "Frames {} and {} as a matched pair".format(*DISTANT_FRAMES)
        note = "The slots of the two frames are matched, without the frames between them, and decoded to both frames."
        sections.append(section(heading, image_rows(examples.pair), note=note))
    if examples.first:
        note = f"The first {noun} of the dataset: they are not selected."
        sections.append(section(f"First {noun} of {name}", rows(examples.first), note=note))
    return sections


def _captioned_rows(examples: list[Example]) -> str:
    with ThreadPoolExecutor() as threads:  # PNG files are compressed without the interpreter's lock
        rows = threads.map(lambda each: image_rows(each.visualization, each.caption), examples)
        return "".join(
            f'<p class="example">{html.escape(each.caption)}</p>{row}' for each, row in zip(examples, rows, strict=True)
        )


def _video_players(examples: list[Example]) -> str:
    return "".join(
        f'<p class="example">{html.escape(each.caption)}</p>{video_player(each.visualization, each.caption)}'
        for each in examples
    )


def _key_figures(results: dict[str, Any]) -> dict[str, str]:
    figures = {}
    for name, means in results.items():
        kind, prefix = ("refined", "refined_") if "refined_ari_fg" in means else ("decoder", "")
        figures[f"ARI-FG on {name}, {kind} masks"] = f"{100 * means[prefix + 'ari_fg']:.1f}"
        if prefix + "found" in means:
            figures[f"percent of objects found on {name}"] = f"{100 * means[prefix + 'found']:.1f}"
    first = next(iter(results.values()))
    return figures | {sample_noun(first): str(first["num_images"])}


def image_rows(visualization: Visualization, name: str = "") -> str:
    """Return a row of captioned panels for every image, the slots in a group of their own.

    `name` is that of a single image; by default images are numbered.
    """
    rows = []
    for i in range(len(visualization.image)):
        groups = {False: "", True: ""}  # by whether it is a slot
        for caption, panel in visualization.panels(i).items():
            groups[caption.startswith("slot")] += figure(png_image(panel, caption), caption)
        cells = "".join(f"<div>{group}</div>" for group in groups.values())
        label = html.escape(name or f"image {i + 1}")
        rows.append(f'<div class="row" role="group" aria-label="{label}">{cells}</div>')
    return "".join(rows)


def _slot_rows(video: Visualization) -> str:
    rows = {"image": list(video.image), "reconstruction": list(video.reconstruction)}
    rows |= {f"slot {k + 1}": [frame[k] for frame in video.slots] for k in range(video.slots.shape[1])}
    return "".join(
        f'<div class="row frames"><span>{label}</span><div>{"".join(png_image(x, label) for x in images)}</div></div>'
        for label, images in rows.items()
    )


def video_player(video: Visualization, name: str) -> str:
    """Return a player of the frames of a video next to what the model finds in them."""
    frames = [video.panels(t) for t in range(len(video.image))]
    most = max(frames, key=len)  # a frame without objects has no panel of the ground truth
    captions = [caption for caption in most if not caption.startswith("slot")]
    strips = {c: frame_strip([panels.get(c, panels["image"]) for panels in frames], f"{name}, {c}") for c in captions}
    return player(name, len(frames), *(figure(strip, caption) for caption, strip in strips.items()))


def training_sections(run: Path, curves: Callable[[list[dict[str, Any]]], str] = training_curves) -> list[str]:
    """Return sections with the curves, the validation images over time and the configuration of a run."""
    history, sections = read_lines(run / "metrics.jsonl"), []
    if history:
        sections.append(section("Training curves", curves(history)))
    files = sorted((run / STEP_IMAGES).glob("step_*.png"))
    if files:
        sections.append(section("Validation images during training", _step_images(files)))
    if (run / "run.json").is_file():
        sections.append(section("Run configuration", preformatted((run / "run.json").read_text(errors="replace"))))
    return sections


def _step_images(files: list[Path]) -> str:
    chosen = sorted({round(x) for x in np.linspace(0, len(files) - 1, NUM_STEP_IMAGES)})
    figures = ""
    for file in (files[i] for i in chosen):
        step = f"step {int(file.stem.removeprefix('step_'))}"
        figures += figure(png_image(Image.open(file), f"Validation images at {step}"), step, wide=True)
    return scroll_box("validation images by step", figures)


def environment_section(device: str = "") -> str:
    """Return the section with versions, device and date."""
    packages = ", ".join(
        f"{name} {importlib.metadata.version(name)}" for name in ("torch", "numpy", "lightning-fabric")
    )
    parts = [f"cutslots {cutslots.__version__}", f"Python {platform.python_version()}", packages, device]
    parts.append(f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}")
    return section("Environment", f'<p class="soft">{html.escape(", ".join(filter(None, parts)))}</p>')
