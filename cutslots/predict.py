"""The objects in anybody's pictures, as files.

    OUT/masks.json                every mask, in COCO's format: run lengths, boxes, areas
    OUT/NAME/overlay.png          the picture under the colours of its slots
    OUT/NAME/labels.png           palette PNG, value = slot, from 1 on
    OUT/NAME/slot_01.png ...      a mask for each slot that holds a pixel, 255 inside
    OUT/NAME/reconstruction.png   how the model redrew it
    OUT/predict.json              what was asked for

NAME is that of the picture without its ending, dots written as underscores. Pictures may have any size; the model sees
them at its own, and masks come back at theirs.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

import cutslots
from cutslots.data.folder import list_images, read_image
from cutslots.disk import claimed, one_line, progress, write_atomically
from cutslots.model import Discovery, Found, load
from cutslots.reading import eager, read
from cutslots.report import as_bytes, blend, paint
from cutslots.scenes.files import palette_image, png
from cutslots.scenes.render import usable

PIXELS = 2**22  # of a large picture that are worked on at once

Masks = Literal["joined", "eager", "decoder"]


def predict(
    weights: str, images: Path, out: Path, device: str = "auto", overwrite: bool = False, masks: Masks = "joined"
) -> bool:
    """Writes what the model finds; False if some picture could not be read, which is said and stops no other."""
    files = _files(images)
    names = {file: file.stem.replace(".", "_") for file in files}
    for name in (name for name, count in Counter(names.values()).items() if count > 1):
        same = ", ".join(file.name for file in files if names[file] == name)
        raise ValueError(f"images: {same} would all be written to {out / name}; expected names that differ")
    model = load(weights, chosen(device))
    if model.config.frames > 1:
        raise ValueError(f"weights: {weights} learned from films, not images; see cutslots track")
    request = {"weights": str(weights), "images": str(images), "masks": masks, "version": cutslots.__version__}
    record = empty_record()
    failed = 0
    with claimed(out, "predict.json", request, overwrite, last="masks.json"), progress() as bar:
        for file in bar.track(files, description="pictures"):
            try:
                with warnings.catch_warnings(action="ignore"):  # Pillow's: what matters is raised
                    picture = read_image(file)
            except ValueError as error:
                failed += 1
                said = f"cutslots: {one_line(error)}"
                bar.console.print(said, style="red", markup=False, highlight=False, emoji=False, soft_wrap=True)
                continue
            labels, scores = _write(model, picture, out / names[file], masks)
            annotate(record, file.name, labels, scores)
            del picture, labels  # before the next is read: two large ones take twice the room
        write_atomically(out / "masks.json", json.dumps(record).encode())
    print(f"wrote {len(files) - failed} of {len(files)} pictures to {out}; all masks are in {out / 'masks.json'}")
    if failed:
        print(f"cutslots: {failed} of {len(files)} pictures could not be read", file=sys.stderr)
    return not failed


def chosen(device: str) -> torch.device:
    """The device, "auto" being CUDA where there is one; a sentence if it cannot be used here."""
    return usable(device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu")


def _files(images: Path) -> list[Path]:
    if images.exists() and not images.is_dir():
        return [images]
    if not images.is_dir():
        raise ValueError(f"images: there is no {images}; expected a picture or a folder of pictures")
    inner = images / "images"  # as `generate` writes them
    found = (list_images(inner, by_name=True) if inner.is_dir() else []) or list_images(images, by_name=True)
    if not found:
        raise ValueError(f"images: {images} holds no pictures")
    return found


@torch.no_grad()
def find(model: Discovery, picture: Image.Image, masks: Masks = "joined") -> tuple[np.ndarray, np.ndarray, Image.Image]:
    """The slot of every pixel (H, W), from 0; how sure it is, by slot (K,); and the reconstruction, as large."""
    torch.manual_seed(0)  # Slot Attention draws its slots
    image = seen_by(model, picture)
    found = model(image)
    soft = read_as(masks, found, image)[0]
    labels, scores = at_size(soft, (picture.height, picture.width))
    drawn = Image.fromarray(as_bytes(found.reconstruction[0]))
    return labels, scores, drawn.resize(picture.size, Image.Resampling.BICUBIC)


def read_as(masks: Masks, found: Found, image: Tensor) -> Tensor:
    """The masks (B, K, S, S) that were asked for."""
    if masks not in get_args(Masks):
        raise ValueError(f"masks is {masks!r}; expected one of {', '.join(get_args(Masks))}")
    if masks == "decoder":
        return found.masks
    soft = read(found, image)
    return eager(soft) if masks == "eager" else soft


def seen_by(model: Discovery, picture: Image.Image) -> Tensor:
    """The picture (1, 3, S, S) at the size and on the device of a model."""
    side = model.config.size
    small = np.array(picture.resize((side, side), Image.Resampling.BILINEAR))
    return torch.from_numpy(small).permute(2, 0, 1)[None].to(next(model.parameters()).device)


def at_size(masks: Tensor, shape: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """The winning slot of every pixel (H, W) uint8, and how sure the pixels of each are, on average (K,). Of a large
    picture only the labels are held whole."""
    masks, count = masks.float().cpu(), len(masks)
    labels, pixels, sure = np.empty(shape, dtype=np.uint8), np.zeros(count), np.zeros(count)
    for rows in strips(shape, PIXELS):
        best, winner = torch.tensor(-1.0), torch.tensor(0, dtype=torch.uint8)
        for k, mask in enumerate(masks):
            mask = enlarged(mask, shape, rows)
            winner, best = torch.where(mask > best, k, winner), torch.fmax(best, mask)
        labels[rows] = winner
        pixels += torch.bincount(winner.flatten(), minlength=count).numpy()
        sure += torch.bincount(winner.flatten(), best.flatten().double(), count).numpy()  # float32 counts to 2^24
    return labels, sure / np.maximum(pixels, 1)


def enlarged(mask: Tensor, shape: tuple[int, int], rows: slice) -> Tensor:
    """Some rows of a mask (S, S) that is enlarged to (H, W), bilinearly."""
    (height, width), side = shape, len(mask)
    if rows.stop - rows.start < height:  # torch enlarges to all rows or none
        place = (torch.arange(rows.start, rows.stop, dtype=torch.float64) + 0.5) * side / height - 0.5
        place = place.clamp(0, side - 1)
        above, below = place.floor().long(), place.ceil().long()
        mask = mask[above].lerp(mask[below], (place - above).float()[:, None])
        height = len(mask)
    return F.interpolate(mask[None, None], (height, width), mode="bilinear", align_corners=False)[0, 0]


def strips(shape: tuple[int, ...], pixels: int) -> Iterator[slice]:
    """The rows of a picture (H, W), so many at once that they hold about so many pixels."""
    height, width = shape
    step = max(1, pixels // width)
    return (slice(y, min(y + step, height)) for y in range(0, height, step))


def paint_over(picture: Image.Image, labels: np.ndarray) -> None:
    """Lays the colours of its slots over the picture itself, some rows at a time: they are mixed in float64."""
    for rows in strips(labels.shape, PIXELS // 16):
        strip = picture.crop((0, rows.start, picture.width, rows.stop))
        picture.paste(Image.fromarray(blend(np.asarray(strip), paint(labels[rows]))), (0, rows.start))


def _write(model: Discovery, picture: Image.Image, folder: Path, masks: Masks) -> tuple[np.ndarray, np.ndarray]:
    labels, scores, redrawn = find(model, picture, masks)
    folder.mkdir(exist_ok=True)
    for old in folder.glob("slot_*.png"):
        old.unlink()
    write_atomically(folder / "reconstruction.png", png(redrawn))
    del redrawn
    paint_over(picture, labels)  # none as large need be held beside it
    write_atomically(folder / "overlay.png", png(picture))
    for name, content in mask_files(labels + 1):
        write_atomically(folder / name, content)
    return labels, scores


def mask_files(labels: np.ndarray) -> Iterator[tuple[str, bytes]]:
    """labels.png, and slot_01.png ... of the slots that hold a pixel (H, W): from 1 on, 0 being nobody's."""
    yield "labels.png", png(palette_image(labels))
    for k in np.unique(labels[labels > 0]):
        yield f"slot_{k:02d}.png", png(np.uint8(255) * (labels == k))


def empty_record() -> dict[str, Any]:
    """COCO's, before any image is added."""
    return {"images": [], "annotations": [], "categories": [{"id": 1, "name": "object"}]}


def annotate(record: dict[str, Any], name: str, labels: np.ndarray, scores: np.ndarray) -> None:
    """Adds an image and its masks. A slot's number is in "slot"; "score" is how sure its pixels are, on average."""
    height, width = labels.shape
    number = len(record["images"]) + 1
    record["images"].append({"id": number, "file_name": name, "width": width, "height": height})
    for k in np.unique(labels):
        mask = labels == k
        record["annotations"].append(
            {
                "id": len(record["annotations"]) + 1,
                "image_id": number,
                "category_id": 1,
                "slot": int(k) + 1,
                "score": round(float(scores[k]), 4),
                "segmentation": run_lengths(mask),
                "area": int(mask.sum()),
                "bbox": box_of(mask),
                "iscrowd": 0,
            }
        )


def box_of(mask: np.ndarray) -> list[int]:
    """Left, top, width and height of the box around a mask (H, W) that holds a pixel."""
    rows, cols = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    return [int(v) for v in (cols[0], rows[0], cols[-1] - cols[0] + 1, rows[-1] - rows[0] + 1)]


def run_lengths(mask: np.ndarray) -> dict[str, Any]:
    """COCO's compressed run lengths of a mask (H, W): lengths of runs down the columns, zeros first, written as
    differences to the length two before, five bits to a character from "0" on, the sixth saying that more follow.

    >>> run_lengths(np.array([[0, 1], [1, 1]], dtype=bool))
    {'size': [2, 2], 'counts': '13'}
    """
    flat = np.concatenate([[False], mask.T.ravel(), [False]])
    ends = np.flatnonzero(flat[1:] != flat[:-1])
    edges = np.concatenate([[0], ends, [mask.size] if len(ends) == 0 or ends[-1] != mask.size else []]).astype(int)
    runs = np.diff(edges)
    runs[3:] = runs[3:] - runs[1:-2]
    return {"size": list(mask.shape), "counts": "".join(map(_characters, runs.tolist()))}


def _characters(value: int) -> str:
    text = ""
    while True:
        low, value = value & 31, value >> 5
        more = value != (-1 if low & 16 else 0)
        text += chr(48 + low + 32 * more)
        if not more:
            return text
