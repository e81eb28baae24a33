"""The first tab: what a model finds in a scene, a picture or a film, how it is looked at, and how that is shown.

Shapes: T frames, K slots, S side the model sees, H W the picture.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import html
import io
import itertools
import json
import math
import time
import warnings
import zipfile
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from scipy import ndimage
from torch import Tensor

from cutslots.data.folder import ENDINGS, read_image
from cutslots.model import Discovery, load, shipped_names, weights_file
from cutslots.predict import Masks, annotate, at_size, empty_record, mask_files, paint_over, read_as, seen_by
from cutslots.report import as_bytes
from cutslots.scenes import Scenes
from cutslots.scenes.files import PALETTE
from cutslots.track import Tracker
from cutslots.video import has_pyav, open_video

FAMILIES = ("plain", "textured", "ood", "camo")
SCENE = 192  # the side of a drawn scene, or below it the largest multiple of the model's
LARGEST = 768  # the longer side of a picture; larger ones are shrunk, and the page says so
LARGEST_FRAME = 320  # the same of a film's frames
MOST_FRAMES = 16  # of a film
FILMS = (".mp4", ".mov", ".webm", ".mkv", ".avi") if has_pyav() else ()
OPENED = (*ENDINGS, ".gif", *FILMS)  # endings of files that can be opened
MODELS = 2  # held at once; the one used longest ago goes first

# ------------------------------------------------------------------------------------------------------------- pictures


class Source(NamedTuple):
    """What there is to look at: a picture, or the first frames of a film."""

    name: str
    frames: list[Image.Image]
    note: str = ""


def scene(family: str, seed: int, objects: int, side: int) -> Source:
    """A scene drawn on the spot, at a multiple of the side that the model sees."""
    if family not in FAMILIES:
        raise ValueError(f"family is {family!r}; expected one of {', '.join(FAMILIES)}")
    size = side * max(1, SCENE // side)
    image = Scenes(family, "test", size, seed, count=1, objects=(objects, objects))[0].image
    return Source(f"{family}_{seed}_{objects}", [Image.fromarray(image.permute(1, 2, 0).numpy().copy())])


def opened(path: Path) -> Source:
    """An uploaded picture, or the first frames of a film; whatever is wrong with it is a sentence that names it."""
    ending, small = path.suffix.lower(), []
    if ending not in OPENED:
        raise ValueError(f"{path.name} cannot be opened; expected a file that ends with {', '.join(OPENED)}")
    try:
        with warnings.catch_warnings(action="ignore"):  # Pillow's: what matters is raised
            moving = ending in FILMS or _moves(path)
            most = LARGEST_FRAME if moving else LARGEST
            for frame in itertools.islice(open_video(path).frames, MOST_FRAMES) if moving else [read_image(path)]:
                before = frame.size
                frame.thumbnail((most, most), Image.Resampling.LANCZOS)
                small.append(frame)
    except ValueError as error:
        raise ValueError(str(error).replace(str(path), path.name)) from None
    sizes = "{}x{} to {}x{}".format(*before, *frame.size)
    note = f"Shrunk from {sizes}; the commands predict and track keep the size."
    return Source(path.stem.replace(".", "_")[:40], small, note if before != frame.size else "")


def _moves(path: Path) -> bool:
    with contextlib.suppress(Exception), Image.open(path, formats=("PNG", "GIF", "WEBP")) as picture:
        return getattr(picture, "n_frames", 1) > 1
    return False  # whatever is wrong with it, read_image says it


# --------------------------------------------------------------------------------------------------------------- slots


class Seen(NamedTuple):
    """What a model has found in the first T frames of a source, and how a visitor looks at it."""

    source: Source
    masks: Tensor  # (T, K, S, S), summing to one over K
    pictures: np.ndarray  # (T, K, S, S, 3): each slot's
    reconstruction: np.ndarray  # (T, S, S, 3)
    seconds: float
    to: tuple[int, ...]  # (K,) the slot that each has been merged into, itself if none
    frame: int = 0
    hidden: Collection[int] = ()
    picked: int | None = None


class Parts(NamedTuple):
    """Which pixel is whose in one frame."""

    labels: np.ndarray  # (H, W) from 0
    scores: np.ndarray  # (K,) how sure the pixels of each are, on average
    areas: np.ndarray  # (K,) shares of the picture


def model_names(more: Sequence[str] = ()) -> list[str]:
    """The shipped models and those asked for."""
    return list(dict.fromkeys([*more, *shipped_names()]))


def model_for(weights: str, device: str = "cpu") -> Discovery:
    """The model of that name or path, from memory if it was used lately and its file is the same."""
    file = weights_file(Path(str(weights).strip()).expanduser())
    return _loaded(str(file), file.stat().st_mtime_ns, device)


@functools.lru_cache(maxsize=MODELS)
def _loaded(file: str, changed: int, device: str) -> Discovery:
    return load(file, device)


@torch.no_grad()
def find(model: Discovery, source: Source, masks: Masks = "joined", frames: int = 1, seconds: float = math.inf) -> Seen:
    """The slots of the first frames, by masks as `predict` reads them; of films, by the decoder's, as `track`. After
    so many seconds no further frame is begun."""
    start = time.perf_counter()
    wanted = source.frames[: max(1, frames)]
    torch.manual_seed(0)  # Slot Attention draws its slots
    tracker, seen = Tracker(model), []
    for frame in wanted:
        image = seen_by(model, frame)
        found = tracker(image)
        soft = read_as(masks if len(wanted) == 1 else "decoder", found, image)
        seen.append((soft[0].float().cpu(), as_bytes(found.pictures[0]), as_bytes(found.reconstruction[0])))
        if time.perf_counter() - start > seconds:
            break
    whole, pictures, redrawn = zip(*seen, strict=True)
    slots, took = tuple(range(model.config.slots)), time.perf_counter() - start
    return Seen(source, torch.stack(whole), np.stack(pictures), np.stack(redrawn), took, slots)


def merged(seen: Seen, slots: Collection[int]) -> Seen:
    """With these slots as one, the first of them: masks are added."""
    if len(set(slots)) < 2 or not set(slots) <= set(range(len(seen.to))):
        raise ValueError("expected at least two slots to merge: tick them first")
    chosen = {seen.to[k] for k in slots}
    to = tuple(min(chosen) if k in chosen else k for k in seen.to)
    return seen._replace(to=to, hidden=(), picked=None)


def parted(seen: Seen) -> Seen:
    """With all merging undone."""
    return seen._replace(to=tuple(range(len(seen.to))), hidden=(), picked=None)


def joint(seen: Seen) -> Tensor:
    """Masks (K, S, S) of the frame with those of merged slots added up."""
    masks = seen.masks[seen.frame]
    return torch.zeros_like(masks).index_add_(0, torch.tensor(seen.to), masks)


def parts(seen: Seen) -> Parts:
    width, height = seen.source.frames[seen.frame].size
    labels, scores = at_size(joint(seen), (height, width))
    return Parts(labels, scores, np.bincount(labels.ravel(), minlength=len(seen.to)) / labels.size)


def by_frame(seen: Seen) -> list[Parts]:
    return [parts(seen._replace(frame=t)) for t in range(len(seen.masks))]


def in_use(seen: Seen) -> list[int]:
    """The slots that hold a pixel of some frame."""
    return np.flatnonzero(sum(found.areas for found in by_frame(seen))).tolist()


def slot_at(found: Parts, x: float, y: float) -> int:
    """The slot of a pixel; beyond the border, that of the nearest."""
    row, column = np.clip((int(y), int(x)), 0, np.array(found.labels.shape) - 1)
    return int(found.labels[row, column])


def border(labels: np.ndarray) -> np.ndarray:
    """Where a pixel (H, W) differs from the one above or to the left."""
    lowest, highest = (f(labels, footprint=[[0, 1], [1, 1]]) for f in (ndimage.minimum_filter, ndimage.maximum_filter))
    return lowest != highest


def overlay(seen: Seen, found: Parts) -> np.ndarray:
    """The frame under the colours of its slots, each with a white border; those hidden as they are."""
    image = seen.source.frames[seen.frame]
    over = image.copy()
    paint_over(over, found.labels)
    painted = np.where(border(found.labels)[..., None], np.uint8(255), np.asarray(over))
    return np.where(np.isin(found.labels, list(seen.hidden))[..., None], np.asarray(image), painted)


def redrawn(seen: Seen) -> np.ndarray:
    """The reconstruction (S, S, 3), white where hidden slots are."""
    gone = joint(seen)[np.isin(range(len(seen.to)), list(seen.hidden))].sum(0)[..., None].numpy()
    return ((1 - gone) * seen.reconstruction[seen.frame] + 255 * gone).round().astype(np.uint8)


def alone(seen: Seen, slot: int) -> np.ndarray:
    """What one slot draws (S, S, 3), with all that were merged into it; white elsewhere."""
    among = np.array(seen.to) == slot
    masks = seen.masks[seen.frame][among][..., None].numpy()
    return ((masks * seen.pictures[seen.frame][among]).sum(0) + 255 * (1 - masks.sum(0))).round().astype(np.uint8)


def middles(labels: np.ndarray) -> dict[int, tuple[float, float]]:
    """Where to write a slot's number: its pixel furthest from any border, as shares of width and height."""
    depth = ndimage.distance_transform_cdt(np.pad(~border(labels), 1))[1:-1, 1:-1]
    slots, (height, width) = np.unique(labels).tolist(), labels.shape
    places = ndimage.maximum_position(depth, labels, slots)
    return {k: ((x + 0.5) / width, (y + 0.5) / height) for k, (y, x) in zip(slots, places, strict=True)}


def archive(seen: Seen) -> bytes:
    """A zip of masks.json and, for each frame, NAME/labels.png and NAME/slot_01.png ..., as `predict` writes them.

    Hidden slots are left out: 0 in labels.png."""
    record, data = empty_record(), io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as out:
        for t, found in enumerate(by_frame(seen)):
            name = seen.source.name + (f"_{t:03d}" if len(seen.masks) > 1 else "")
            labels = np.where(np.isin(found.labels, list(seen.hidden)), 0, found.labels + 1).astype(np.uint8)
            for file, content in mask_files(labels):
                out.writestr(f"{name}/{file}", content)
            annotate(record, f"{name}.png", found.labels, found.scores)
        kept = [each for each in record["annotations"] if each["slot"] - 1 not in seen.hidden]
        out.writestr("masks.json", json.dumps(record | {"annotations": kept}))
    return data.getvalue()


# ------------------------------------------------------------------------------------------------------------- as HTML


def picture_url(picture: Image.Image | np.ndarray) -> str:
    """The picture itself as an address: small ones as they are, photographs as JPEG."""
    data, picture = io.BytesIO(), picture if isinstance(picture, Image.Image) else Image.fromarray(picture)
    kind = "png" if max(picture.size) <= SCENE else "jpeg"
    picture.save(data, kind, quality=90)
    return f"data:image/{kind};base64,{base64.b64encode(data.getvalue()).decode()}"


def figure(picture: Image.Image | np.ndarray, caption: str, alt: str, over: str = "", name: str = "") -> str:
    """A picture, what is written over it, and what it is: under it, and in words for those who do not see it."""
    image = f'<img src="{picture_url(picture)}" alt="{alt}">'
    return f'<figure class="{name}"><div>{image}{over}</div><figcaption>{caption}</figcaption></figure>'


def found_html(seen: Seen) -> str:
    """The picture under its slots, the picture, what was redrawn; every slot alone, as buttons; the slot picked."""
    found, image = parts(seen), seen.source.frames[seen.frame]
    places = {k: place for k, place in middles(found.labels).items() if k not in seen.hidden}
    told = ", ".join(f"slot {k + 1} {_share(found.areas[k])}" for k in places) or "none shown"
    numbers = "".join(f'<span style="left:{x:.1%};top:{y:.1%}">{k + 1}</span>' for k, (x, y) in places.items())
    under = f"The picture under its slots: {told}"
    return f"""<div style="--ratio:{image.width}/{image.height}"><div class="pictures">
        {figure(overlay(seen, found), "found objects: click one", under, numbers, "big")}
        {figure(image, "image", "The picture")}
        {figure(redrawn(seen), "redrawn", "The picture as the slots shown redraw it")}</div>
        <p class="status hint" role="status">{html.escape(_status(seen, found))}</p>
        <div class="slots" role="group" aria-label="Each slot alone">{_slots_html(seen, found)}</div>
        <div id="picked">{_picked_html(seen, found)}</div></div>"""


def _slots_html(seen: Seen, found: Parts) -> str:
    return "".join(
        f"""<button type="button" class="slot {"faded" * hidden}" data-slot="{k}" style="{_colour(k)}"
        aria-pressed="{json.dumps(k == seen.picked)}"><img src="{picture_url(alone(seen, k))}" alt="Slot {k + 1} alone">
        <span>{k + 1} · {_share(found.areas[k])}{" · hidden" * hidden}</span></button>"""
        for k, hidden in ((k, k in seen.hidden) for k in np.flatnonzero(found.areas).tolist())
    )


def _picked_html(seen: Seen, found: Parts) -> str:
    """One slot: which it is, its pixels, and what it draws."""
    if seen.picked is None:
        return '<p class="hint">Click an object, or choose a slot with Tab and Enter, to see that slot alone.</p>'
    k = seen.to[seen.picked]
    name = f"Slot {k + 1}" + (f" (merged: {_group(seen, k)})" if seen.to.count(k) > 1 else "")
    sure = f", sure of them to {found.scores[k]:.2f} on average" if found.areas[k] else ""
    pixels = np.where((found.labels == k)[..., None], np.asarray(seen.source.frames[seen.frame]), np.uint8(255))
    said = f"{name}: {_share(found.areas[k])} of the pixels{sure}."
    return f"""<p class="said" role="status" style="{_colour(k)}">{said}</p><div class="pictures">
        {figure(pixels, "its pixels", f"The pixels of slot {k + 1}, white elsewhere")}
        {figure(alone(seen, k), "what it draws", f"What slot {k + 1} draws alone")}</div>"""


def _status(seen: Seen, found: Parts) -> str:
    here, frames = np.count_nonzero(found.areas), len(seen.masks)
    said = [f"{seen.source.name}: {here} of {len(seen.to)} slots hold pixels; {seen.seconds:.2f} s."]
    said += [f"Followed through {frames} frames."] if frames > 1 else []
    said += [f"Merged: {_group(seen, k)}." for k in sorted(set(seen.to)) if seen.to.count(k) > 1]
    return " ".join([*said, seen.source.note])


def _group(seen: Seen, slot: int) -> str:
    """The numbers of the slots that are one with it."""
    return ", ".join(str(k + 1) for k, to in enumerate(seen.to) if to == slot)


def _colour(slot: int) -> str:
    return f"--colour:rgb({','.join(map(str, PALETTE[slot + 1]))})"


def _share(area: float) -> str:
    return f"{100 * area:.1f} %" if area >= 0.0005 else "under 0.1 %"
