"""`cutslots inspect`: sizes of splits, numbers of objects and label shares of a dataset, and a contact sheet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from cutslots.data.folder import FolderConfig, folder_splits
from cutslots.data.open import open_dataset
from cutslots.data.prepare import sha256
from cutslots.data.prepared import Prepared
from cutslots.data.published import PUBLISHED
from cutslots.data.registry import DatasetConfig
from cutslots.data.text import parse_data
from cutslots.dataset import Dataset, EmptySplit
from cutslots.files import progress, write_atomically
from cutslots.scenes import Scenes
from cutslots.scenes.sample import SPLITS
from cutslots.viz.contact_sheet import contact_sheet
from cutslots.viz.images import encode_png

NUM_SCENES = 200  # of each split of built-in scenes that are inspected by default
BATCH_SIZE = 64  # images, or frames of videos


def inspect(data: str, num_images: int | None = None, out: Path | None = None, quiet: bool = False) -> dict[str, Any]:
    """Print and return statistics of each split, and write a contact sheet.

    `num_images` is how many of each split to inspect: by default all, of built-in scenes the first 200. The checksums
    of a prepared cache are verified first.
    """
    splits = _open_splits(parse_data(data))
    shown = next(iter(splits.values()))
    if isinstance(shown, Prepared):
        _verify(shown, quiet)
    facts = {}
    for split, dataset in splits.items():
        count = min(len(dataset), num_images or (NUM_SCENES if isinstance(dataset, Scenes) else len(dataset)))
        facts[split] = {"num_images": len(dataset), "inspected": count}
        if dataset.has_masks:
            facts[split] |= mask_statistics(dataset, count, f"{data}, {split}", quiet)
    if out is None:
        name = Path(f"{Path(data).name.replace(':', '-')}-sheet.png")
        out = shown.folder / "contact_sheet.png" if isinstance(shown, Prepared) else name
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, encode_png(contact_sheet(shown)))
    if not quiet:
        _print(data, shown, facts)
        print(f"wrote {out}")
    return facts


def _open_splits(config: DatasetConfig) -> dict[str, Dataset]:
    """Return the splits that have images. A folder without splits of its own is one split, "all"."""
    if isinstance(config, FolderConfig) and not folder_splits(Path(config.path)):
        return {"all": open_dataset(config, "test")}
    splits, error = {}, None
    for split in SPLITS:
        try:
            splits[split] = open_dataset(config, split, videos=True)
        except EmptySplit as empty:
            error = empty
    if not splits and error is not None:
        raise error
    return splits


def _verify(data: Prepared, quiet: bool) -> None:
    """Raise a ValueError if a file of a cache does not match its checksum."""
    with progress(quiet) as bar:
        for name, facts in bar.track(data.manifest["files"].items(), description="checksums"):
            if sha256(data.folder / name) != facts["sha256"]:
                raise ValueError(
                    f"{data.folder / name} does not match its checksum; delete {data.folder} and prepare it again"
                )


def mask_statistics(dataset: Dataset, count: int, title: str, quiet: bool = False) -> dict[str, Any]:
    """Return statistics of the first `count` masks.

    objects: how many images have 0, 1, 2... visible objects. labels: the share of pixels of each label.
    largest_object: the largest share of one image, or video, that one object covers.
    """
    objects, pixels = np.zeros(256, dtype=int), np.zeros(256)
    total, largest = 0, 0.0
    step = max(1, BATCH_SIZE // dataset.frames)
    with progress(quiet) as bar:
        for start in bar.track(range(0, count, step), description=title):
            masks = dataset.get_batch(np.arange(start, min(start + step, count))).mask.numpy()
            for mask in masks:
                areas = np.bincount(mask.ravel(), minlength=256)
                pixels += areas
                total += mask.size
                if dataset.ignore_label is not None:
                    areas[dataset.ignore_label] = 0
                objects[int((areas[1:] > 0).sum())] += 1
                largest = max(largest, float(areas[1:].max() / mask.size))
    last = int(np.nonzero(objects)[0].max(initial=0))
    return {
        "objects": objects[: last + 1].tolist(),
        "labels": {int(label): float(pixels[label] / total) for label in np.nonzero(pixels)[0]},
        "largest_object": largest,
    }


def _print(data: str, dataset: Dataset, facts: dict[str, Any]) -> None:
    if isinstance(dataset, Prepared):
        print(f"{data}: {_describe(dataset)}")
    if not all("labels" in each for each in facts.values()):
        print(", ".join(f"{split} {each['num_images']:,} images" for split, each in facts.items()) + ", no masks/")
        return
    console = Console()
    console.print(_object_table(facts))
    console.print(_label_table(facts, dataset.ignore_label))


def _describe(data: Prepared) -> str:
    spec, rows = PUBLISHED[data.dataset], data.manifest["rows"]
    part = f" of the published {spec.count:,}" if spec.count and spec.count != rows else ""
    height, width = data.image_size
    size = f"{width}x{height}" + (f", {data.frames} frames" if data.frames > 1 else "")
    kept = data.manifest["objects"]
    only = f", scenes of {kept[0]} to {kept[1]} objects" if kept else ""
    return f"{spec.title}, {rows:,}{part}, {size}, protocol {data.manifest['request']['protocol']}{only}"


def _object_table(facts: dict[str, Any]) -> Table:
    heads = [f"{split}\n{each['inspected']:,} of {each['num_images']:,}" for split, each in facts.items()]
    table = Table("visible objects", *heads)
    for n in range(max(len(each["objects"]) for each in facts.values())):
        counts = [each["objects"][n] if n < len(each["objects"]) else 0 for each in facts.values()]
        if any(counts):
            table.add_row(str(n), *(f"{count:,}" for count in counts))
    return table


def _label_table(facts: dict[str, Any], ignore_label: int | None) -> Table:
    table = Table("label", *(f"{split}\nshare of pixels" for split in facts))
    for label in sorted({label for each in facts.values() for label in each["labels"]}):
        shares = (f"{100 * each['labels'].get(label, 0):.2f} %" for each in facts.values())
        names = {ignore_label: f"{label}, ignored", 0: "0, background"}
        table.add_row(names.get(label, str(label)), *shares)
    table.add_row("largest object", *(f"{100 * each['largest_object']:.1f} %" for each in facts.values()))
    return table
