"""`cutslots predict`: the objects in images, as files.

    OUT/coco.json                 all masks in COCO's format: run lengths, boxes, areas; written last
    OUT/NAME/overlay.png          the image with its objects in the colors of their slots
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
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import cutslots
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
from cutslots.inference.coco import new_coco
from cutslots.inference.predictor import check_takes_images, is_unfamiliar, predict_image, unfamiliar_sentence
from cutslots.inference.prepare import Resize, find_images, open_image
from cutslots.models.checkpoints import load
from cutslots.models.mask_kinds import DEFAULT_MASK_KIND, MaskKind


def predict(
    checkpoint: str,
    images: str | Path | Sequence[str | Path],
    out: Path,
    device: str = "auto",
    overwrite: bool = False,
    masks: MaskKind = DEFAULT_MASK_KIND,
    resize: Resize = "pad",
    plugins: Iterable[str | Path] = (),
    background: bool = True,
) -> bool:
    """Write the objects in images, each an image or a folder of images, to `out`.

    Returns False if some image cannot be read: a message names it, and the others are written. `overwrite` replaces an
    earlier prediction in the folder. `plugins` register the parts of a model that has its own. Without `background` the
    background has no mask and no annotation.
    """
    paths = [Path(path) for path in ([images] if isinstance(images, str | Path) else images)]
    if not paths:
        raise ValueError("images: there are none; expected an image or a folder of images")
    names = _folder_names([file for path in paths for file in find_images(path)], out)
    model = load(checkpoint, resolve_device(device), plugins)
    check_takes_images(model, f"checkpoint: {checkpoint}")
    request: dict[str, Any] = {
        "command": "predict",
        "checkpoint": str(checkpoint),
        "images": [str(path) for path in paths],
        "masks": masks,
    }
    request |= {
        "resize": resize,
        "background": background,
        "version": cutslots.__version__,
        "folders": sorted(set(names.values())),
    }
    layout = Layout("prediction", {"coco.json", *names.values()}, marker="coco.json", may_change=("folders",))
    coco, failed, unfamiliar = new_coco(), 0, []
    request = _keep_folders(out, request)
    with output_folder(out, layout, request, overwrite, clear=partial(_clear, out)), progress() as bar:
        for name in set(request["folders"]).difference(names.values()):
            _remove_image(out, name)
        for file, name in bar.track(names.items(), description="images"):
            try:
                image = open_image(file)
            except ValueError as error:
                failed += 1
                _remove_image(out, name)
                message = f"cutslots: {escape_unprintable(error)}"
                bar.console.print(message, style="red", markup=False, highlight=False, emoji=False, soft_wrap=True)
                continue
            prediction = predict_image(model, image, masks, resize, file.name)
            prediction.save(out / name, background)
            prediction.add_to(coco, background)
            unfamiliar += [file.name] if is_unfamiliar(prediction) else []
            del image, prediction  # before the next is read: two large images take twice the memory
        write_json(out / "request.json", request | {"folders": sorted(names.values())})
        write_atomically(out / "coco.json", json.dumps(coco).encode())
    print(f"wrote {len(names) - failed} of {len(names)} images to {out}; all masks are in {out / 'coco.json'}")
    if unfamiliar:
        sentence = escape_unprintable(unfamiliar_sentence(model, unfamiliar, len(names) - failed))
        print(f"cutslots: warning: {sentence}", file=sys.stderr)
    if failed:
        print(f"cutslots: {failed} of {len(names)} images could not be read", file=sys.stderr)
    return not failed


def _folder_names(files: list[Path], out: Path) -> dict[Path, str]:
    """Return the name of the folder in `out` that each image is written to; raise ValueError if two are the same."""
    names = {file: file.stem.replace(".", "_") for file in files}
    for name in (name for name, count in Counter(names.values()).items() if count > 1):
        same = ", ".join(str(file) for file in names if names[file] == name)
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
