"""`cutslots predict`: the objects in images, as files.

    OUT/coco.json                 all masks in COCO's format: run lengths, boxes, areas; written last
    OUT/NAME/overlay.png          the image blended with the colors of its slots
    OUT/NAME/labels.png           palette PNG, value = slot, from 1
    OUT/NAME/slot_01.png ...      the mask of each slot that wins a pixel, 255 inside
    OUT/NAME/reconstruction.png   the model's reconstruction
    OUT/request.json              what was asked for, and every NAME

Folders of images that are not in coco.json, written before, are removed.

NAME is the file name of the image without its suffix; dots are written as underscores. Images may have up to 178
megapixels; masks have the size of their image.
"""

from __future__ import annotations

import contextlib
import json
import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

import cutslots
from cutslots.data.images import ImageWarning, read_image
from cutslots.devices import resolve_device
from cutslots.files import (
    Layout,
    differences,
    escape_unprintable,
    output_folder,
    progress,
    read_json,
    remove,
    write_atomically,
    write_json,
)
from cutslots.inference.coco import add_annotations, new_coco
from cutslots.inference.predictor import draw_overlay, predict_image
from cutslots.inference.prepare import Resize, find_images
from cutslots.models.checkpoints import load
from cutslots.models.discovery import Discovery
from cutslots.models.mask_kinds import DEFAULT_MASK_KIND, MaskKind
from cutslots.viz.images import encode_png, palette_image


def predict(
    checkpoint: str,
    images: Path,
    out: Path,
    device: str = "auto",
    overwrite: bool = False,
    masks: MaskKind = DEFAULT_MASK_KIND,
    resize: Resize = "pad",
    plugins: Iterable[str | Path] = (),
) -> bool:
    """Write the objects in an image, or in all images of a folder, to `out`.

    Returns False if some image cannot be read: a message names it, and the others are written. `overwrite` replaces an
    earlier prediction in the folder. `plugins` register the parts of a model that has its own.
    """
    names = _folder_names(find_images(images), out)
    model = load(checkpoint, resolve_device(device), plugins)
    if model.frames > 1:
        raise ValueError(f"checkpoint: {checkpoint} was trained on videos, not images; see cutslots track")
    request: dict[str, Any] = {
        "command": "predict",
        "checkpoint": str(checkpoint),
        "images": str(images),
        "masks": masks,
    }
    request |= {"resize": resize, "version": cutslots.__version__, "folders": sorted(set(names.values()))}
    layout = Layout("prediction", {"coco.json", *names.values()}, marker="coco.json", may_change=("folders",))
    coco, failed = new_coco(), 0
    request = _keep_folders(out, request)
    with output_folder(out, layout, request, overwrite, clear=partial(_clear, out)), progress() as bar:
        for name in set(request["folders"]).difference(names.values()):
            _remove_image(out, name)
        for file, name in bar.track(names.items(), description="images"):
            try:
                with warnings.catch_warnings(action="ignore"):  # Pillow's: what matters is raised
                    warnings.simplefilter("default", ImageWarning)
                    image = read_image(file)
            except ValueError as error:
                failed += 1
                _remove_image(out, name)
                message = f"cutslots: {escape_unprintable(error)}"
                bar.console.print(message, style="red", markup=False, highlight=False, emoji=False, soft_wrap=True)
                continue
            labels, scores = _write(model, image, out / name, masks, resize)
            add_annotations(coco, file.name, labels, scores)
            del image, labels  # before the next is read: two large images take twice the memory
        write_json(out / "request.json", request | {"folders": sorted(names.values())})
        write_atomically(out / "coco.json", json.dumps(coco).encode())
    print(f"wrote {len(names) - failed} of {len(names)} images to {out}; all masks are in {out / 'coco.json'}")
    if failed:
        print(f"cutslots: {failed} of {len(names)} images could not be read", file=sys.stderr)
    return not failed


def _folder_names(files: list[Path], out: Path) -> dict[Path, str]:
    """Return the name of the folder in `out` that each image is written to; raise ValueError if two are the same."""
    names = {file: file.stem.replace(".", "_") for file in files}
    for name in (name for name, count in Counter(names.values()).items() if count > 1):
        same = ", ".join(file.name for file in files if names[file] == name)
        raise ValueError(f"images: {same} would all be written to {out / name}; expected names that differ")
    return names


def _keep_folders(out: Path, request: dict[str, Any]) -> dict[str, Any]:
    """Return the request with the folders that it wrote before, from images that are not there now: they are listed
    until they are removed."""
    before = read_json(out / "request.json") or {}
    if differences(before, request, ("folders",)):
        return request
    return request | {"folders": sorted({*request["folders"], *before.get("folders", [])})}


def _clear(out: Path, request: dict[str, Any]) -> None:
    """Remove what an earlier prediction wrote."""
    remove(out, ("coco.json",))
    for name in request.get("folders", []):
        _remove_image(out, name)


def _remove_image(out: Path, name: str) -> None:
    """Remove what was written for an image. Its folder goes only if nothing else is in it."""
    folder = out / name
    if folder.parent == out and folder.is_dir() and not folder.is_symlink():
        slots = {file.name.removesuffix(".part") for file in folder.glob("slot_*.png*")}
        remove(folder, {"overlay.png", "labels.png", "reconstruction.png"} | slots)
        with contextlib.suppress(OSError):  # it is not empty
            folder.rmdir()


def _write(
    model: Discovery, image: Image.Image, folder: Path, masks: MaskKind, resize: Resize
) -> tuple[np.ndarray, np.ndarray]:
    """Write the files of one image; return its labels and scores. Draws the overlay into the image itself."""
    labels, scores, reconstruction = predict_image(model, image, masks, resize)
    folder.mkdir(exist_ok=True)
    for old in folder.glob("slot_*.png"):
        old.unlink()
    write_atomically(folder / "reconstruction.png", encode_png(reconstruction))
    del reconstruction
    draw_overlay(image, labels)
    write_atomically(folder / "overlay.png", encode_png(image))
    for name, content in mask_files(labels + 1):
        write_atomically(folder / name, content)
    return labels, scores


def mask_files(labels: np.ndarray) -> Iterator[tuple[str, bytes]]:
    """Yield name and content of labels.png and of slot_01.png ... for labels (height, width), from 1; 0 is no slot."""
    yield "labels.png", encode_png(palette_image(labels))
    for k in np.unique(labels[labels > 0]):
        yield f"slot_{k:02d}.png", encode_png(np.uint8(255) * (labels == k))
