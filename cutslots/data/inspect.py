"""What is in a dataset: how many images each split has, how many objects they hold, what the masks look like."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from cutslots.data import Images, open_data, open_films
from cutslots.data.folder import Folder
from cutslots.data.prepare import sha256
from cutslots.data.prepared import Prepared
from cutslots.data.published import DATASETS
from cutslots.disk import progress, write_atomically
from cutslots.scenes.draw import SPLITS
from cutslots.scenes.files import contact_sheet, png

SAMPLED = 200  # scenes of a family that are looked at, unless more are asked for
TOGETHER = 64  # images at once


def inspect(data: str, images: int | None = None, out: Path | None = None, quiet: bool = False) -> dict[str, Any]:
    """Counts, histogram of objects and each label's share of the pixels, by split, printed and returned; a contact
    sheet is written. Of a prepared cache the checksums are compared first."""
    splits = _open(data)
    shown = next(iter(splits.values()))
    if isinstance(shown, Prepared):
        _verify(shown, quiet)
    facts = {}
    for split, dataset in splits.items():
        whole = isinstance(dataset, Prepared | Folder)
        count = min(len(dataset), images or (len(dataset) if whole else SAMPLED))
        facts[split] = {"images": len(dataset), "looked_at": count}
        if getattr(dataset, "has_masks", True):
            facts[split] |= look_at(dataset, count, f"{data}, {split}", quiet)
    if out is None:
        out = shown.folder / "contact_sheet.png" if isinstance(shown, Prepared) else Path(f"{_plain(data)}-sheet.png")
    write_atomically(out, png(contact_sheet(shown)))
    if not quiet:
        _print(data, shown, facts)
        print(f"wrote {out}")
    return facts


def _open(data: str) -> dict[str, Any]:
    """The splits that hold something. A folder is all of one kind to look at, unless it holds train/, val/ or test/."""
    parts = [split for split in SPLITS if (Path(data) / split / "images").is_dir()]
    if parts and not (Path(data) / "images").is_dir():
        return {split: open_data(data, split) for split in parts}
    opened = open_data(data, "test", count=0)
    if isinstance(opened, Folder):
        return {"all": open_data(data, "test")}
    found = {}
    for split in SPLITS:
        films = open_films(data, split, count=0)
        if not isinstance(films, Prepared) or films.holds > 0:
            found[split] = open_films(data, split)
    if not found:
        open_films(data, "test")  # which says what there is
    return found


def _plain(data: str) -> str:
    return Path(data).name.replace(":", "-")


def _verify(data: Prepared, quiet: bool) -> None:
    with progress(quiet) as bar:
        for name, facts in bar.track(data.manifest["files"].items(), description="checksums"):
            if sha256(data.folder / name) != facts["sha256"]:
                raise ValueError(
                    f"{data.folder / name} does not fit its checksum; delete {data.folder} and prepare it again"
                )


def look_at(dataset: Images, count: int, title: str, quiet: bool = False) -> dict[str, Any]:
    """How many images have 0, 1, 2... objects in sight, the labels' shares of the pixels, the largest share of one."""
    objects, shares = np.zeros(256, dtype=int), np.zeros(256)
    pixels, largest = 0, 0.0
    step = max(1, TOGETHER // getattr(dataset, "frames", 1))
    with progress(quiet) as bar:
        for start in bar.track(range(0, count, step), description=title):
            masks = dataset.render(np.arange(start, min(start + step, count))).mask.numpy()
            for mask in masks:
                seen = np.bincount(mask.ravel(), minlength=256)
                objects[int((seen[1:] > 0).sum())] += 1
                shares += seen
                pixels += mask.size
                largest = max(largest, float(seen[1:].max() / mask.size))
    last = int(np.nonzero(objects)[0].max(initial=0))
    labels = {int(i): float(shares[i] / pixels) for i in np.nonzero(shares)[0]}
    return {
        "objects": objects[: last + 1].tolist(),
        "labels": labels,
        "largest_object": largest,
    }


def _print(data: str, dataset: Any, facts: dict[str, Any]) -> None:
    console = Console()
    if isinstance(dataset, Prepared):
        kind, rows = DATASETS[dataset.dataset], dataset.manifest["rows"]
        part = f" of the published {kind.count:,}" if kind.count and kind.count != rows else ""
        size = f"{dataset.size}x{dataset.size}" + (f", {dataset.frames} frames" if dataset.frames > 1 else "")
        kept = dataset.manifest["objects"]
        only = f", scenes of {kept[0]} to {kept[1]} objects" if kept else ""
        print(
            f"{data}: {kind.title}, {rows:,}{part}, {size}, splits of {dataset.manifest['request']['convention']}{only}"
        )
    if not all("labels" in each for each in facts.values()):
        print(", ".join(f"{split} {each['images']:,} images" for split, each in facts.items()) + ", no masks/")
        return
    heads = [f"{split}\n{each['looked_at']:,} of {each['images']:,}" for split, each in facts.items()]
    table = Table("objects in sight", *heads)
    for n in range(max(len(each["objects"]) for each in facts.values())):
        seen = [each["objects"][n] if n < len(each["objects"]) else 0 for each in facts.values()]
        if any(seen):
            table.add_row(str(n), *(f"{count:,}" for count in seen))
    console.print(table)
    table = Table("label", *(f"{split}\nshare of pixels" for split in facts))
    for label in sorted({label for each in facts.values() for label in each["labels"]}):
        shares = (f"{100 * each['labels'].get(label, 0):.2f} %" for each in facts.values())
        table.add_row("0, ground" if label == 0 else str(label), *shares)
    table.add_row("largest object", *(f"{100 * each['largest_object']:.1f} %" for each in facts.values()))
    console.print(table)
