"""`cutslots app`: a page to try models and cuts on, served from this machine to this machine.

    Objects   a model's slots in a scene drawn on the spot, a picture or a film: shown, picked, hidden, merged, saved
    The cut   one picture, scribbles for source and sink: the relaxed cut, its edge variables, the exact minimum cut

Choices: pictures travel inside the page (data URLs), so that the server keeps no files but uploads, and those only for
minutes; what a visitor looks at is held in a few bounded sessions; a policy that the server sends forbids browsers to
ask anybody else for anything. The functions behind the page come first and know nothing of Gradio, which is imported
when the page is made.

Shapes: T frames, K slots, S side the model sees, H W the picture.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import html
import importlib
import io
import ipaddress
import itertools
import json
import math
import os
import re
import signal
import socket
import sys
import tempfile
import threading
import time
import warnings
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from scipy import ndimage
from torch import Tensor

from cutslots import exact
from cutslots.cut import GridCut
from cutslots.data.folder import ENDINGS, read_image
from cutslots.disk import one_line
from cutslots.graph import Graph, grid_edges
from cutslots.model import SHIPPED, Discovery, load, weights_file
from cutslots.predict import Masks, annotate, at_size, usable
from cutslots.reading import read
from cutslots.report import as_bytes, blend
from cutslots.scenes import Scenes
from cutslots.scenes.files import PALETTE, palette_image, png
from cutslots.track import Tracker
from cutslots.video import has_pyav, open_video

OLDEST = (6, 31)  # of Gradio, as in pyproject.toml; older ones ask other hosts for scripts or lack what we use
FAMILIES = ("plain", "textured", "ood", "camo")
SCENE = 192  # the side of a drawn scene, or below it the largest multiple of the model's
LARGEST = 768  # the longer side of a picture; larger ones are shrunk, and the page says so
LARGEST_FRAME = 320  # the same of a film's frames
MOST_FRAMES = 16  # of a film
FIRST_LOOK = 1.0  # seconds for which a film is followed unless more of it is asked for
MOST_UPLOAD = "20mb"
FILMS = (".mp4", ".mov", ".webm", ".mkv", ".avi")  # where PyAV is installed
GRID = 96  # the longer side of the picture that is cut
SESSIONS, MODELS = 8, 2  # held at once; the one used longest ago goes first
KEPT = 600  # seconds that an upload stays on disk
FOLDER = "cutslots-app-"  # how the name of the temporary folder begins
SOURCE, SINK = 1, 2  # marks
COLOURS = np.array([(213, 94, 0), (255, 255, 255), (0, 114, 178)])  # sink, neither, source: told apart by all eyes

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


def endings() -> list[str]:
    """Of the files that can be opened."""
    return [*ENDINGS, ".gif", *(FILMS if has_pyav() else ())]


def opened(path: Path) -> Source:
    """An uploaded picture, or the first frames of a film; whatever is wrong with it is a sentence that names it."""
    ending = path.suffix.lower()
    if ending not in endings():
        raise ValueError(f"{path.name} cannot be opened; expected a file that ends with {', '.join(endings())}")
    try:
        with warnings.catch_warnings(action="ignore"):  # Pillow's: what matters is raised
            moving = ending in FILMS or _count(path) > 1
            frames = itertools.islice(open_video(path).frames, MOST_FRAMES) if moving else iter([read_image(path)])
            most = LARGEST_FRAME if moving else LARGEST
            sizes, small = zip(*((frame.size, _shrunk(frame, most)) for frame in frames), strict=True)
    except ValueError as error:
        raise ValueError(str(error).replace(str(path), path.name)) from None
    shrunk = sizes[0] != small[0].size
    note = f"shrunk from {_by(sizes[0])} to {_by(small[0].size)}; the commands predict and track keep the size"
    return Source(path.stem.replace(".", "_")[:40] or "picture", list(small), note if shrunk else "")


def uploaded(file: str | None) -> Source:
    """What was uploaded. Gradio leaves an empty file beside the uploads each time, in our folder; they go away."""
    folder = Path(os.environ.get("GRADIO_TEMP_DIR", ""))
    for each in folder.glob("tmp*") if folder.name.startswith(FOLDER) else ():
        if each.is_file() and not each.stat().st_size:
            each.unlink(missing_ok=True)
    return opened(Path(file or ""))


def _count(path: Path) -> int:
    try:
        with Image.open(path, formats=("PNG", "GIF", "WEBP")) as picture:
            return getattr(picture, "n_frames", 1)
    except Exception:  # whatever is wrong with it, read_image says it
        return 1


def _shrunk(picture: Image.Image, most: int) -> Image.Image:
    picture = picture.copy()
    picture.thumbnail((most, most), Image.Resampling.LANCZOS)
    return picture


def _by(size: tuple[int, int]) -> str:
    return f"{size[0]}x{size[1]}"


# --------------------------------------------------------------------------------------------------------------- slots


class Seen(NamedTuple):
    """What a model has found in a source."""

    name: str
    frames: list[np.ndarray]  # T of (H, W, 3)
    masks: Tensor  # (T, K, S, S), summing to one over K
    pictures: np.ndarray  # (T, K, S, S, 3): each slot's
    reconstruction: np.ndarray  # (T, S, S, 3)
    to: tuple[int, ...]  # (K,) the slot that each has been merged into, itself if none
    seconds: float
    note: str = ""


class Parts(NamedTuple):
    """Which pixel is whose in one frame."""

    labels: np.ndarray  # (H, W) from 0
    scores: np.ndarray  # (K,) how sure the pixels of each are, on average
    areas: np.ndarray  # (K,) shares of the picture


def model_names(more: Sequence[str] = ()) -> list[str]:
    """The shipped models and those asked for."""
    return list(dict.fromkeys([*more, *sorted(p.name for p in SHIPPED.glob("*") if p.is_dir())]))


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
    start, side, device = time.perf_counter(), model.config.size, next(model.parameters()).device
    wanted = source.frames[: max(1, min(int(frames), MOST_FRAMES))]
    torch.manual_seed(0)  # Slot Attention draws its slots
    soft: list[Tensor] = []
    tracker, pictures, reconstruction = Tracker(model), [], []
    for frame in wanted:
        if soft and time.perf_counter() - start > seconds:
            break
        small = np.asarray(frame.resize((side, side), Image.Resampling.BILINEAR))
        image = torch.from_numpy(small.copy()).permute(2, 0, 1)[None].to(device)
        found = tracker(image)
        whole = read(found, image) if masks == "joined" and len(wanted) == 1 else found.masks
        soft.append(whole[0].float().cpu())
        pictures.append(as_bytes(found.pictures[0]))
        reconstruction.append(as_bytes(found.reconstruction[0]))
    return Seen(
        source.name,
        [np.asarray(frame) for frame in wanted[: len(soft)]],
        torch.stack(soft),
        np.stack(pictures),
        np.stack(reconstruction),
        tuple(range(model.config.slots)),
        time.perf_counter() - start,
        source.note,
    )


def merged(seen: Seen, slots: Sequence[int]) -> Seen:
    """With these slots as one, the first of them: masks are added."""
    if len(set(slots)) < 2 or not set(slots) <= set(range(len(seen.to))):
        raise ValueError("expected at least two slots to merge: tick them first")
    chosen = {seen.to[k] for k in slots}
    return seen._replace(to=tuple(min(chosen) if k in chosen else k for k in seen.to))


def parted(seen: Seen) -> Seen:
    """With all merging undone."""
    return seen._replace(to=tuple(range(len(seen.to))))


def joint(seen: Seen, frame: int) -> Tensor:
    """Masks (K, S, S) of a frame with those of merged slots added up."""
    masks, to = seen.masks[frame].float(), torch.tensor(seen.to)
    return torch.zeros_like(masks).index_add_(0, to, masks)


def parts(seen: Seen, frame: int = 0) -> Parts:
    shape = seen.frames[frame].shape[:2]
    winner, best = at_size(joint(seen, frame), (shape[0], shape[1]))
    labels, sure, count = winner.numpy().astype(np.uint8), best.double().numpy().ravel(), len(seen.to)
    pixels = np.bincount(labels.ravel(), minlength=count)
    scores = np.bincount(labels.ravel(), weights=sure, minlength=count) / np.maximum(pixels, 1)
    return Parts(labels, scores, pixels / labels.size)


def in_use(seen: Seen) -> list[int]:
    """The slots that hold a pixel of some frame."""
    return sorted({int(k) for t in range(len(seen.frames)) for k in np.unique(parts(seen, t).labels)})


def slot_at(found: Parts, x: int, y: int) -> int:
    """The slot of a pixel; beyond the border, that of the nearest."""
    height, width = found.labels.shape
    return int(found.labels[min(max(int(y), 0), height - 1), min(max(int(x), 0), width - 1)])


def overlay(seen: Seen, frame: int, found: Parts, hidden: Sequence[int] = ()) -> np.ndarray:
    """The frame under the colours of its slots, each with a white border; those hidden as they are."""
    image, labels = seen.frames[frame], found.labels
    shown = ~np.isin(labels, list(hidden))
    painted = np.where(shown[..., None], blend(image, PALETTE[labels + 1]), image)
    return np.where((_border(labels) & shown)[..., None], 255, painted).astype(np.uint8)


def _border(labels: np.ndarray) -> np.ndarray:
    edge = np.zeros(labels.shape, dtype=bool)
    edge[:, 1:] |= labels[:, 1:] != labels[:, :-1]
    edge[1:] |= labels[1:] != labels[:-1]
    return edge


def redrawn(seen: Seen, frame: int, hidden: Sequence[int] = ()) -> np.ndarray:
    """The reconstruction (S, S, 3), white where hidden slots are."""
    gone = joint(seen, frame)[list(hidden)].sum(0)[..., None].numpy()
    return _bytes((1 - gone) * seen.reconstruction[frame] + 255 * gone)


def alone(seen: Seen, frame: int, slot: int) -> np.ndarray:
    """What one slot draws (S, S, 3), with all that were merged into it; white elsewhere."""
    masks = (seen.masks[frame] * (torch.tensor(seen.to) == slot)[:, None, None])[..., None].numpy()
    return _bytes((masks * seen.pictures[frame]).sum(0) + 255 * (1 - masks.sum(0)))


def _bytes(x: np.ndarray) -> np.ndarray:
    return x.clip(0, 255).round().astype(np.uint8)


def middles(labels: np.ndarray) -> dict[int, tuple[float, float]]:
    """Where to write a slot's number: the pixel furthest from its border, as shares of width and height."""
    step = max(1, max(labels.shape) // GRID)
    small = np.pad(labels[::step, ::step].astype(int), 1, constant_values=-1)
    places = {}
    for k in np.unique(small[1:-1, 1:-1]):
        depth = ndimage.distance_transform_edt(small == k)
        y, x = np.unravel_index(depth.argmax(), depth.shape)
        places[int(k)] = ((x - 0.5) / (small.shape[1] - 2), (y - 0.5) / (small.shape[0] - 2))
    return places


def archive(seen: Seen, hidden: Sequence[int] = ()) -> bytes:
    """A zip of masks.json and, for each frame, NAME/labels.png and NAME/slot_01.png ..., as `predict` writes them.

    Hidden slots are left out: 0 in labels.png."""
    record: dict[str, Any] = {"images": [], "annotations": [], "categories": [{"id": 1, "name": "object"}]}
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as out:
        for t in range(len(seen.frames)):
            name = seen.name if len(seen.frames) == 1 else f"{seen.name}_{t:03d}"
            found = parts(seen, t)
            labels = np.where(np.isin(found.labels, list(hidden)), 0, found.labels + 1).astype(np.uint8)
            out.writestr(f"{name}/labels.png", png(palette_image(labels)))
            for k in sorted(set(np.unique(labels).tolist()) - {0}):
                out.writestr(f"{name}/slot_{k:02d}.png", png(((labels == k) * 255).astype(np.uint8)))
            annotate(record, f"{name}.png", found.labels, found.scores)
        kept = [each for each in record["annotations"] if each["slot"] - 1 not in set(hidden)]
        out.writestr("masks.json", json.dumps(record | {"annotations": kept}))
    return data.getvalue()


# ----------------------------------------------------------------------------------------------------------------- cuts


class Cuts(NamedTuple):
    """A picture (H, W, 3) cut in two, softly and exactly."""

    p: np.ndarray  # (H, W) the relaxed cut's vertex variables, positive on the source's side
    soft: np.ndarray  # (H, W) softmax of (p, -p) / temperature: the share of the source's side
    d: np.ndarray  # (H, W) the largest variable of the edges from a pixel to its neighbours
    side: np.ndarray  # (H, W) bool, the exact minimum cut
    value: float  # its weight


def example() -> tuple[np.ndarray, np.ndarray]:
    """A picture to cut and its marks: a scene, a cross on its largest object and a frame on the ground."""
    sample = Scenes("textured", "test", GRID, seed=35, count=1, objects=(4, 4))[0]
    image, mask = sample.image.permute(1, 2, 0).numpy().copy(), sample.mask.numpy()
    core = ndimage.binary_erosion(mask == np.bincount(mask[mask > 0]).argmax(), iterations=3)
    y, x = (int(np.median(places)) for places in np.nonzero(core))
    marks = np.zeros(mask.shape, dtype=np.uint8)
    marks[y - 1 : y + 2, core[y]] = marks[core[:, x], x - 1 : x + 2] = SOURCE
    marks[3:6, 6:-6] = marks[-6:-3, 6:-6] = marks[6:-6, 3:6] = marks[6:-6, -6:-3] = SINK
    return image, marks


def picture_to_cut(source: Source) -> tuple[np.ndarray, np.ndarray]:
    """The first frame, small enough to be cut while one looks, and no marks."""
    small = np.asarray(_shrunk(source.frames[0], GRID))
    return small, np.zeros(small.shape[:2], dtype=np.uint8)


def read_marks(text: Any, shape: tuple[int, int]) -> np.ndarray:
    """Marks (H, W) from the digits that the page sends, one for each pixel: 0 nothing, 1 source, 2 sink."""
    if not isinstance(text, str) or len(text) != shape[0] * shape[1] or set(text) - set("012"):
        raise ValueError("the scribbles do not fit the picture; reload the page")
    return (np.frombuffer(text.encode(), dtype=np.uint8) - ord("0")).reshape(shape)


def unlikelihood(image: np.ndarray, marked: np.ndarray, most: int = 200, spread: float = 0.1) -> np.ndarray:
    """How unlike each pixel is to those marked, from 0 to 1: -log of a mean of Gaussians around their colours."""
    chosen = image[marked]
    chosen = chosen[np.linspace(0, len(chosen) - 1, min(len(chosen), most)).astype(int)]
    apart = np.square(image[:, :, None] - chosen).sum(-1)
    floor = 1e-3
    return np.log((np.exp(-apart / (2 * spread**2)).mean(-1) + floor) / (1 + floor)) / np.log(floor / (1 + floor))


def edge_weights(image: np.ndarray, marks: np.ndarray, tie: float) -> Tensor:
    """w (6, H, W) for `GridCut`: neighbours are tied by how alike they are, pixels to the source by how unlike they are
    to what is marked as sink and the other way round; marks themselves by 1 more."""
    image = image / 255.0
    steps = [np.square(np.diff(image, axis=axis)).sum(-1) for axis in (1, 0)]
    usual = max(float(np.mean(np.concatenate([step.ravel() for step in steps]))), 1e-6)
    w = np.zeros((6, *marks.shape), dtype=np.float32)
    w[0, :, :-1] = w[1, :, 1:] = tie * np.exp(-steps[0] / (2 * usual))
    w[2, :-1] = w[3, 1:] = tie * np.exp(-steps[1] / (2 * usual))
    w[4] = unlikelihood(image, marks == SINK) + (marks == SOURCE)
    w[5] = unlikelihood(image, marks == SOURCE) + (marks == SINK)
    return torch.from_numpy(w)


def cuts(image: np.ndarray, marks: np.ndarray, gamma: float, temperature: float, reach: float, tie: float) -> Cuts:
    for name, value in {"gamma": gamma, "temperature": temperature, "reach": reach}.items():
        if not (value > 0 and np.isfinite(value)):
            raise ValueError(f"{name} is {value}; expected a positive number")
    if not (tie >= 0 and np.isfinite(tie)):
        raise ValueError(f"tie is {tie}; expected zero or more")
    shape = (image.shape[0], image.shape[1])
    w = edge_weights(image, marks, tie)
    solved = GridCut(shape, gamma, reach, anchor=1.0).solve(w)
    p = solved.p.numpy()
    exists = torch.from_numpy(grid_edges(shape))
    d = torch.where(exists, solved.d, -torch.inf)[:4].amax(0).numpy() if max(shape) > 1 else np.zeros(shape)
    best = exact.min_cut(Graph.grid(shape), w[exists].numpy())
    soft = 1 / (1 + np.exp(-np.clip(2 * p / temperature, -50, 50)))
    return Cuts(p, soft, d, best.side[:-2].reshape(shape), best.value)


def heat(p: np.ndarray) -> np.ndarray:
    """Colours of p: blue at 1 and beyond, white at 0, orange at -1 and beyond."""
    place = np.clip(p, -1, 1)[..., None]
    return np.where(place > 0, _mix(COLOURS[1], COLOURS[2], place), _mix(COLOURS[1], COLOURS[0], -place)).astype(
        np.uint8
    )


def _mix(a: np.ndarray, b: np.ndarray, share: np.ndarray) -> np.ndarray:
    return (1 - share) * a + share * b


def grey(x: np.ndarray, low: float, high: float) -> np.ndarray:
    """Values from low to high as greys (H, W, 3), from black to white."""
    level = np.clip((x - low) / max(high - low, 1e-12), 0, 1) * 255
    return np.repeat(level.round().astype(np.uint8)[..., None], 3, -1)


def cutout(image: np.ndarray, side: np.ndarray) -> np.ndarray:
    """The picture on one side of a cut, faded on the other, the border drawn."""
    shown = np.where(side[..., None], image, 0.2 * image + 0.8 * 255)
    return np.where(_border(side)[..., None], COLOURS[0], shown).astype(np.uint8)


# ----------------------------------------------------------------------------------------------------------- the page's


def picture_url(picture: np.ndarray, exactly: bool = False) -> str:
    data, kind = io.BytesIO(), "PNG" if exactly or max(picture.shape) <= SCENE else "JPEG"
    Image.fromarray(picture).save(data, kind, **({} if kind == "PNG" else {"quality": 90}))
    return f"data:image/{kind.lower()};base64,{base64.b64encode(data.getvalue()).decode()}"


def figure(picture: np.ndarray, caption: str, alt: str, name: str = "") -> str:
    return (
        f'<figure class="{name}"><img src="{picture_url(picture)}" alt="{html.escape(alt)}">'
        f"<figcaption>{html.escape(caption)}</figcaption></figure>"
    )


def _share(area: float) -> str:
    return f"{100 * area:.1f} %" if area >= 0.0005 else "under 0.1 %"


def found_html(seen: Seen, frame: int, hidden: Sequence[int], picked: int | None) -> str:
    """The picture under its slots, the picture, what was redrawn, and every slot alone, as buttons."""
    found = parts(seen, frame)
    here = [int(k) for k in np.unique(found.labels)]
    told = ", ".join(f"slot {k + 1} {_share(found.areas[k])}" for k in here if k not in hidden) or "none shown"
    numbers = "".join(
        f'<span class="number" style="left:{100 * x:.1f}%;top:{100 * y:.1f}%">{k + 1}</span>'
        for k, (x, y) in middles(found.labels).items()
        if k not in hidden
    )
    url = picture_url(overlay(seen, frame, found, hidden))
    big = (
        f'<figure class="big"><div class="stage"><img data-pick src="{url}" alt="The picture under its slots: {told}">'
        f"{numbers}</div><figcaption>found objects: click one</figcaption></figure>"
    )
    image = figure(seen.frames[frame], "image", "The picture")
    drawn = figure(redrawn(seen, frame, hidden), "redrawn", "The picture as the slots shown redraw it")
    slots = "".join(_slot_html(seen, frame, k, found, k in hidden, k == picked) for k in here)
    return (
        f'<div class="pictures" {_ratio(seen)}>{big}{image}{drawn}</div>'
        f'<p class="status" role="status">{_status(seen, here)}</p>'
        f'<div class="slots" {_ratio(seen)} role="group" aria-label="Each slot alone">{slots}</div>'
    )


def _ratio(seen: Seen) -> str:
    """The model sees and draws squares; they are shown in the shape of the picture."""
    height, width = seen.frames[0].shape[:2]
    return f'style="--ratio:{width}/{height}"'


def _slot_html(seen: Seen, frame: int, k: int, found: Parts, hidden: bool, picked: bool) -> str:
    colour = ",".join(map(str, PALETTE[k + 1]))
    drawn = picture_url(alone(seen, frame, k), exactly=True)
    said = f"{k + 1} · {_share(found.areas[k])}" + (" · hidden" if hidden else "")
    name, pressed = "slot faded" if hidden else "slot", "true" if picked else "false"
    return (
        f'<button type="button" class="{name}" data-slot="{k}" aria-pressed="{pressed}" style="--colour:rgb({colour})">'
        f'<img src="{drawn}" alt="Slot {k + 1} alone"><span>{said}</span></button>'
    )


def _status(seen: Seen, here: Sequence[int]) -> str:
    count, frames = len(seen.to), len(seen.frames)
    film = f" Followed through {frames} frames." if frames > 1 else ""
    joins = [[k + 1 for k, to in enumerate(seen.to) if to == each] for each in sorted(set(seen.to))]
    merges = "".join(f" Merged: {', '.join(map(str, group))}." for group in joins if len(group) > 1)
    note = f" {seen.note[0].upper()}{seen.note[1:]}." if seen.note else ""
    said = f"{seen.name}: {len(here)} of {count} slots hold pixels; {seen.seconds:.2f} s."
    return html.escape(f"{said}{film}{merges}{note}")


def picked_html(seen: Seen, frame: int, picked: int | None) -> str:
    """One slot: which it is, its pixels, and what it draws."""
    if picked is None:
        return '<p class="hint">Click an object, or choose a slot with Tab and Enter, to see that slot alone.</p>'
    found = parts(seen, frame)
    picked = seen.to[picked]
    mask = found.labels == picked
    group = [k + 1 for k, to in enumerate(seen.to) if to == picked]
    name = f"Slot {picked + 1}" + (f" (merged: {', '.join(map(str, group))})" if len(group) > 1 else "")
    sure = f", sure of them to {found.scores[picked]:.2f} on average" if mask.any() else ""
    said = f"{name}: {_share(found.areas[picked])} of the pixels{sure}."
    pixels = np.where(mask[..., None], seen.frames[frame], 255).astype(np.uint8)
    colour = ",".join(map(str, PALETTE[picked + 1]))
    return (
        f'<p class="said" role="status" style="--colour:rgb({colour})">{html.escape(said)}</p>'
        f'<div class="pictures" {_ratio(seen)}>'
        + figure(pixels, "its pixels", f"The pixels of slot {picked + 1}, white elsewhere")
        + figure(alone(seen, frame, picked), "what it draws", f"What slot {picked + 1} draws alone")
        + "</div>"
    )


def cuts_html(image: np.ndarray, marks: np.ndarray, gamma: float, temperature: float, reach: float, tie: float) -> str:
    """The pictures of both cuts, and their numbers in a sentence each."""
    missing = [name for name, mark in (("object", SOURCE), ("background", SINK)) if not (marks == mark).any()]
    if missing:
        return f'<p class="hint">Scribble on the {" and on the ".join(missing)} to see the cut.</p>'
    start = time.perf_counter()
    cut = cuts(image, marks, gamma, temperature, reach, tie)
    agree, seconds = ((cut.p > 0) == cut.side).mean(), time.perf_counter() - start
    low, high = np.quantile(cut.d, [0.02, 0.98])
    figures = [
        figure(
            heat(cut.p), f"p, from {cut.p.min():.2f} to {cut.p.max():.2f}", "Heat map of p: blue source, orange sink"
        ),
        figure(grey(cut.soft, 0, 1), "softmax of (p, -p)", "Share of the source's side, black 0, white 1"),
        figure(
            grey(cut.d, low, high), f"d, from {cut.d.min():.2f} to {cut.d.max():.2f}", "Edge variables d, high is white"
        ),
        figure(cutout(image, cut.p > 0), "relaxed: p > 0", "The picture where p is above zero, faded elsewhere"),
        figure(
            cutout(image, cut.side), "exact minimum cut", "The picture on the source's side of the exact minimum cut"
        ),
    ]
    facts = (
        f"<li><b>{100 * agree:.1f} %</b> of the pixels are on the same side of both cuts.</li>"
        f"<li><b>{100 * cut.side.mean():.1f} %</b> of the pixels are the object by the exact cut, "
        f"<b>{100 * (cut.p > 0).mean():.1f} %</b> by the relaxed one.</li>"
        f"<li><b>{cut.value:.1f}</b> is the weight of the edges that the exact cut severs; no cut severs less.</li>"
        f"<li><b>{seconds:.2f} s</b> for both, {image.shape[1]}x{image.shape[0]} pixels.</li>"
    )
    return f'<div class="pictures cuts">{"".join(figures)}</div><ul class="numbers" role="status">{facts}</ul>'


def board(image: np.ndarray, marks: np.ndarray) -> dict[str, Any]:
    """What the page needs to be scribbled on."""
    height, width = marks.shape
    digits = "".join(map(str, marks.ravel().tolist()))
    return {"image": picture_url(image, exactly=True), "width": width, "height": height, "marks": digits}


EXPLAINED = """**p** is the relaxed cut: 1 and beyond is blue (source), 0 white, -1 and beyond orange (sink).
**d** is the largest variable of the edges from a pixel to its neighbours: white where p falls across an edge that is
cheap to sever. **Weights**: neighbours are tied by how alike their colours are; pixels to the source by how unlike they
are to what is scribbled as background, to the sink by how unlike they are to what is scribbled as object, the scribbles
themselves by 1 more. **The exact cut** is by maximum flow, for the same weights."""

STYLE = """
.gradio-container .pictures { display: flex; flex-wrap: wrap; gap: 10px; align-items: flex-start; }
.gradio-container .cuts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(210px, 46%), 1fr)); }
.gradio-container figure { margin: 0; flex: 1 1 150px; max-width: 320px; min-width: 0; }
.gradio-container figure.big { flex: 2 1 280px; max-width: 480px; }
.gradio-container #picked figure { max-width: 240px; }
.gradio-container :is(figure, .slot, .board) img { width: 100%; display: block; border-radius: 4px; margin: 0; }
.gradio-container :is(#found, #picked) img { aspect-ratio: var(--ratio); }
.gradio-container figure img { outline: 1px solid var(--border-color-primary); }
.gradio-container :is(.cuts, .board) img { image-rendering: pixelated; }
.gradio-container :is(figcaption, .status, .hint, legend) { font-size: .85rem; color: var(--body-text-color-subdued);
  margin: .25rem 0 0; }
.gradio-container .stage { position: relative; } .gradio-container [data-pick] { cursor: crosshair; }
.gradio-container .number { position: absolute; transform: translate(-50%, -50%); pointer-events: none; color: #fff;
  background: rgba(0, 0, 0, .75); border-radius: 1em; padding: 0 .45em; font: 600 .8rem/1.4 system-ui, sans-serif; }
.gradio-container .slots { display: grid; grid-template-columns: repeat(auto-fill, minmax(92px, 1fr)); gap: 8px;
  margin-top: .6rem; }
.gradio-container .slot { border: 4px solid var(--colour); border-radius: 8px; padding: 0; cursor: pointer;
  overflow: hidden; background: var(--background-fill-secondary); color: var(--body-text-color);
  font: 600 .75rem/1.9 system-ui, sans-serif; }
.gradio-container .slot.faded { opacity: .45; }
.gradio-container .slot[aria-pressed=true] { outline: 3px solid var(--body-text-color); outline-offset: 2px; }
.gradio-container .said { border-left: 10px solid var(--colour); padding-left: .6rem; margin: .6rem 0 .5rem;
  font-weight: 600; }
.gradio-container .numbers { padding-left: 1.2rem; margin: .8rem 0 0; list-style: disc; }
.gradio-container .board { position: relative; max-width: 480px; touch-action: none; }
.gradio-container .board canvas { position: absolute; inset: 0; width: 100%; height: 100%; cursor: crosshair;
  image-rendering: pixelated; }
.gradio-container .brushes { display: flex; flex-wrap: wrap; gap: .2rem .5rem; margin: 0 0 .5rem; border: 0;
  padding: 0; }
.gradio-container .brushes label { display: flex; gap: .35rem; align-items: center; padding: .25rem .6rem;
  cursor: pointer; border: 2px solid var(--border-color-primary); border-radius: 8px; }
.gradio-container .brushes label:has(:checked) { border-color: var(--body-text-color); font-weight: 600; }
.gradio-container .brushes input { appearance: auto; accent-color: var(--body-text-color); margin: 0; }
.gradio-container .brushes i { width: 14px; height: 14px; border-radius: 3px; }
.gradio-container :is(.board canvas, .slot, .brushes label):is(:focus-visible, :has(:focus-visible)) {
  outline: 3px solid #0072b2; outline-offset: 2px; }
"""

PICK = """
element.addEventListener('click', (event) => {
  const slot = event.target.closest('[data-slot]');
  if (slot) return trigger('select', { slot: Number(slot.dataset.slot) });
  const picture = event.target.closest('[data-pick]');
  if (!picture) return;
  const box = picture.getBoundingClientRect();
  trigger('select', { x: Math.floor((event.clientX - box.left) / box.width * picture.naturalWidth),
                      y: Math.floor((event.clientY - box.top) / box.height * picture.naturalHeight) });
});
"""

BOARD = """
<fieldset class="brushes"><legend class="hint">Scribble with</legend>
<label><input type="radio" name="brush" value="1" checked><i style="background:#0072b2"></i>object (source)</label>
<label><input type="radio" name="brush" value="2"><i style="background:#d55e00"></i>background (sink)</label>
<label><input type="radio" name="brush" value="0">eraser</label></fieldset>
<div class="board"><img src="${value.image}" alt="The picture that is cut">
<canvas width="${value.width}" height="${value.height}" tabindex="0" role="application"
 aria-label="Scribbles. Draw with the pointer; or move with the arrow keys and mark with the space bar."></canvas></div>
"""

# Marks are kept here, a digit for each pixel; the page is told of them when a stroke ends.
SCRIBBLE = """
const COLOURS = [[0, 0, 0, 0], [0, 114, 178, 255], [213, 94, 0, 255]];
let canvas, marks, width, height, last = null, cursor = null;
const start = () => {
  canvas = element.querySelector('canvas');
  [width, height] = [canvas.width, canvas.height];
  marks = Uint8Array.from(props.value.marks, Number);
  cursor = null;
  draw();
};
const draw = () => {
  const pen = canvas.getContext('2d'), picture = pen.createImageData(width, height);
  marks.forEach((mark, i) => picture.data.set(COLOURS[mark], 4 * i));
  if (cursor) for (const i of around(cursor[0], cursor[1])) picture.data.set([0, 0, 0, 255], 4 * i);
  pen.putImageData(picture, 0, 0);
};
const around = (x, y) => {
  const found = [];
  for (let v = Math.max(0, y - 1); v <= Math.min(height - 1, y + 1); v++)
    for (let u = Math.max(0, x - 1); u <= Math.min(width - 1, x + 1); u++) found.push(v * width + u);
  return found;
};
const mark = (x, y) => {
  const brush = Number(element.querySelector('input[name=brush]:checked').value);
  for (const i of around(x, y)) marks[i] = brush;
};
const stroke = ([x0, y0], [x1, y1]) => {
  const steps = Math.max(Math.abs(x1 - x0), Math.abs(y1 - y0), 1);
  for (let i = 0; i <= steps; i++)
    mark(Math.round(x0 + (x1 - x0) * i / steps), Math.round(y0 + (y1 - y0) * i / steps));
  draw();
};
const place = (event) => {
  const box = canvas.getBoundingClientRect();
  return [Math.floor((event.clientX - box.left) / box.width * width),
          Math.floor((event.clientY - box.top) / box.height * height)];
};
const tell = () => trigger('input', { marks: marks.join('') });
element.addEventListener('pointerdown', (event) => {
  if (event.target !== canvas || event.button) return;
  canvas.setPointerCapture(event.pointerId);
  cursor = null;
  last = place(event);
  stroke(last, last);
});
element.addEventListener('pointermove', (event) => {
  if (!last) return;
  const next = place(event);
  stroke(last, next);
  last = next;
});
for (const end of ['pointerup', 'pointercancel'])
  element.addEventListener(end, () => { if (last) { last = null; tell(); } });
element.addEventListener('keydown', (event) => {
  if (event.target !== canvas) return;
  const step = { ArrowLeft: [-2, 0], ArrowRight: [2, 0], ArrowUp: [0, -2], ArrowDown: [0, 2], ' ': [0, 0] }[event.key];
  if (!step) return;
  event.preventDefault();
  cursor = cursor || [width >> 1, height >> 1];
  cursor = [Math.min(Math.max(cursor[0] + step[0], 0), width - 1),
            Math.min(Math.max(cursor[1] + step[1], 0), height - 1)];
  if (event.key === ' ') { mark(...cursor); tell(); }
  draw();
});
element.addEventListener('focusout', (event) => { if (event.target === canvas) { cursor = null; draw(); } });
watch('value', start);
start();
"""

SAVE = """(data) => {
  if (!data) return;
  const bytes = Uint8Array.from(atob(data), (c) => c.charCodeAt(0)), link = document.createElement('a');
  link.href = URL.createObjectURL(new Blob([bytes], { type: 'application/zip' }));
  link.download = 'masks.zip';
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}"""

# ------------------------------------------------------------------------------------------------------------- serving

# Gradio's own greys are too faint to read.
READABLE = {
    "body_text_color_subdued": "*neutral_600",
    "body_text_color_subdued_dark": "*neutral_300",
    "block_info_text_color": "*neutral_600",
    "block_info_text_color_dark": "*neutral_300",
    "block_label_text_color": "*neutral_700",
    "block_label_text_color_dark": "*neutral_200",
}
HEADERS = [
    (b"content-security-policy", b"default-src 'self' 'unsafe-inline' 'unsafe-eval' data: blob:; form-action 'self'"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-content-type-options", b"nosniff"),
]


class Alone:
    """Between server and browser: sends the policy along, and takes addresses of others out of the page itself."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        whole, start = scope["path"] == "/", None  # the page comes whole, all else as it is sent

        async def sent(message: Any) -> None:
            nonlocal start
            if message["type"] == "http.response.start":
                message = message | {"headers": [*message["headers"], *HEADERS]}
                if whole:
                    start = message
                    return
            elif whole and start:
                body = without_foreign(message.get("body", b""))
                length = (b"content-length", str(len(body)).encode())
                kept = [header for header in start["headers"] if header[0].lower() != b"content-length"]
                await send(start | {"headers": [*kept, length]})
                start, message = None, message | {"body": body}
            await send(message)

        await self.app(scope, receive, sent)


def without_foreign(page: bytes) -> bytes:
    """The page without the addresses of other hosts that it names for those who would share or script it."""
    page = re.sub(rb"<meta\s[^>]*content=\"https?://[^>]*>", b"", page)
    return re.sub(rb"https?://(?:github\.com|raw\.githubusercontent\.com)/[^\"]*", b"", page)


def gradio() -> Any:
    """Gradio, asked not to report on its users; if there is none, what to do about it."""
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    os.environ["GRADIO_RUN_HISTORY"] = "False"
    os.environ.pop("GRADIO_ALLOWED_PATHS", None)
    try:
        gradio: Any = importlib.import_module("gradio")
    except ImportError:
        gradio = None
    if gradio is None or tuple(map(int, gradio.__version__.split(".")[:2])) < OLDEST:
        raise ValueError(f"the app needs Gradio {'.'.join(map(str, OLDEST))} or later: pip install 'cutslots[app]'")
    return gradio


def build(names: Sequence[str], own_paths: bool = True, device: str = "cpu") -> Any:
    """The page, a `gradio.Blocks`. With `own_paths` visitors may name weights on this machine."""
    gr = gradio()
    model_for(names[0], device)  # what is wrong with it is said before anybody waits for a page
    with gr.Blocks(title="cutslots", analytics_enabled=False, delete_cache=(60, KEPT)) as page:
        gr.Markdown("# cutslots\nObjects found without labels, by differentiable graph cuts.")
        with gr.Tab("Objects"):
            _objects(gr, page, names, own_paths, device)
        with gr.Tab("The cut"):
            _the_cut(gr, page)
    return page.queue(max_size=32, default_concurrency_limit=1, api_open=False)


def kept(state: Any) -> Any:
    """What a session holds; sessions that nobody uses are forgotten."""
    if state is None:
        raise ValueError("this page was idle for too long and has been forgotten; reload it")
    return state


def _told(gr: Any, work: Callable[..., Any]) -> Callable[..., Any]:
    """The function, whatever is wrong with what it was given being shown in the page."""

    @functools.wraps(work)
    def told(*given: Any) -> Any:
        try:
            return work(*given)
        except (ValueError, TypeError, KeyError, OSError) as error:
            gr.Warning(html.escape(one_line(error)), title="That did not work")
            return gr.skip()  # all stays as it was; an error would be written over every part of the page

    return told


def _objects(gr: Any, page: Any, names: Sequence[str], own_paths: bool, device: str) -> None:
    more = "; or the path of a run folder or a .safetensors file on this machine" if own_paths else ""
    options = {"api_visibility": "private", "concurrency_id": "work", "show_progress": "minimal"}
    seen, source, picked = (gr.State(None, time_to_live=3600) for _ in range(3))
    packed = gr.Textbox(visible=False)
    with gr.Row():
        with gr.Column(scale=2, min_width=300):
            weights = gr.Dropdown(
                list(names), value=names[0], label="Model", allow_custom_value=own_paths, info=f"A shipped model{more}."
            )
            family = gr.Radio(FAMILIES, value="plain", label="Scenes", info="Each is drawn on the spot.")
            with gr.Row():
                seed = gr.Number(0, label="Seed", precision=0, minimum=0, maximum=2**32 - 1, min_width=80)
                objects = gr.Slider(1, 10, 4, step=1, label="Objects", scale=2, min_width=180)
            another = gr.Button("Draw another scene", variant="primary")
            upload = gr.File(
                label=f"Or your picture or film, up to {MOST_UPLOAD.upper()}",
                file_types=endings(),
                height=150,
                elem_id="upload",
            )
            frames = gr.Slider(1, 2, 1, step=1, label="Frames to follow", visible=False, elem_id="frames")
            masks = gr.Radio(
                ["joined", "decoder"],
                value="joined",
                label="Masks",
                info="Joined: the picture is evidence, and slots that draw the same are one. Decoder: as drawn.",
            )
        with gr.Column(scale=5, min_width=320):
            shown = gr.HTML(js_on_load=PICK, apply_default_css=False, elem_id="found")
            frame = gr.Slider(1, 2, 1, step=1, label="Frame shown", visible=False, elem_id="frame")
            closer = gr.HTML(apply_default_css=False, elem_id="picked")
            hide = gr.CheckboxGroup(
                [], label="Hide slots", info="Hidden slots are left out of the download too.", elem_id="hide"
            )
            merge = gr.CheckboxGroup(
                [], label="Merge slots", info="Tick two or more; their masks are added up.", elem_id="merge"
            )
            with gr.Row():
                join = gr.Button("Merge ticked slots", size="md", min_width=140)
                part = gr.Button("Undo merging", size="md", min_width=140)
            save = gr.Button("Download masks", size="md")

    def chosen(values: Any) -> list[int]:
        return [int(value) for value in values or ()]

    def slots(found: Seen) -> Any:
        return gr.CheckboxGroup(choices=[(f"Slot {k + 1}", str(k)) for k in in_use(found)], value=[])

    def look(made: Source, found: Seen) -> list[Any]:
        """Everything anew, for what was found anew."""
        now, most = len(found.frames), len(made.frames)
        sliders = gr.Slider(1, max(now, 2), 1, visible=now > 1), gr.Slider(1, max(most, 2), now, visible=most > 1)
        pictures = found_html(found, 0, [], None), picked_html(found, 0, None)
        return [made, found, None, *pictures, slots(found), slots(found), *sliders]

    def draw(weights: str, family: str, seed: int | None, objects: int, masks: Masks) -> list[Any]:
        model = model_for(weights, device)
        made = scene(family, int(seed or 0), int(objects), model.config.size)
        return look(made, find(model, made, masks))

    def open_file(weights: str, file: str | None, masks: Masks) -> list[Any]:
        model = model_for(weights, device)
        made = uploaded(file)
        return look(made, find(model, made, masks, MOST_FRAMES, FIRST_LOOK))

    def again(weights: str, made: Source | None, masks: Masks, frames: int) -> list[Any]:
        return look(kept(made), find(model_for(weights, device), kept(made), masks, frames))

    def turned(found: Seen | None, frame: int, hidden: Any, slot: int | None) -> list[Any]:
        found = kept(found)
        t = min(max(int(frame), 1), len(found.frames)) - 1
        return [found_html(found, t, chosen(hidden), slot), picked_html(found, t, slot)]

    def pick(found: Seen | None, frame: int, hidden: Any, event: Any) -> list[Any]:
        found, asked = kept(found), event._data
        t = min(max(int(frame), 1), len(found.frames)) - 1
        slot = int(asked["slot"]) if "slot" in asked else slot_at(parts(found, t), asked["x"], asked["y"])
        if not 0 <= slot < len(found.to):
            raise ValueError(f"slot is {slot + 1}; expected one of {len(found.to)}")
        return [slot, *turned(found, frame, hidden, slot)]

    def regrouped(new: Seen, frame: int) -> list[Any]:
        return [new, None, *turned(new, frame, [], None), slots(new), slots(new)]

    def join_ticked(found: Seen | None, ticked: Any, frame: int) -> list[Any]:
        return regrouped(merged(kept(found), chosen(ticked)), frame)

    def part_all(found: Seen | None, frame: int) -> list[Any]:
        return regrouped(parted(kept(found)), frame)

    def zipped(found: Seen | None, hidden: Any) -> str:
        return base64.b64encode(archive(kept(found), chosen(hidden))).decode()

    pick.__annotations__["event"] = gr.EventData  # which is how Gradio knows
    told = functools.partial(_told, gr)
    quiet = options | {"show_progress": "hidden"}
    anew = [source, seen, picked, shown, closer, hide, merge, frame, frames]
    gr.on(
        [page.load, family.change, seed.change, objects.change],
        told(draw),
        [weights, family, seed, objects, masks],
        anew,
        trigger_mode="always_last",
        **options,
    )
    another.click(lambda seed: (int(seed or 0) + 1) % 2**32, seed, seed, **quiet)
    came = upload.upload(told(open_file), [weights, upload, masks], anew, **options)
    came.then(lambda: None, None, upload, **quiet)  # so that the next can be dropped there
    gr.on(
        [weights.change, masks.change, frames.input],
        told(again),
        [weights, source, masks, frames],
        anew,
        trigger_mode="always_last",
        **options,
    )
    changed = [hide.input, frame.change]
    gr.on(changed, told(turned), [seen, frame, hide, picked], [shown, closer], trigger_mode="always_last", **quiet)
    shown.select(told(pick), [seen, frame, hide], [picked, shown, closer], **quiet)
    outputs = [seen, picked, shown, closer, hide, merge]
    join.click(told(join_ticked), [seen, merge, frame], outputs, **options)
    part.click(told(part_all), [seen, frame], outputs, **options)
    saved = save.click(told(zipped), [seen, hide], packed, **options)
    saved.success(None, packed, None, js=SAVE).then(lambda: "", None, packed, **quiet)


def _the_cut(gr: Any, page: Any) -> None:
    image, marks = example()
    options = {"api_visibility": "private", "concurrency_id": "work", "show_progress": "hidden"}
    told = functools.partial(_told, gr)
    picture, scribbles = (gr.State(None, time_to_live=3600) for _ in range(2))
    with gr.Row():
        with gr.Column(scale=2, min_width=300):
            canvas = gr.HTML(
                board(image, marks),
                html_template=BOARD,
                js_on_load=SCRIBBLE,
                apply_default_css=False,
                elem_id="board",
            )
            with gr.Row():
                upload = gr.UploadButton(
                    "Open a picture", file_types=endings(), size="md", min_width=80, elem_id="photograph"
                )
                restart = gr.Button("Example", size="md", min_width=80)
                clear = gr.Button("Clear", size="md", min_width=80)
            gamma = gr.Slider(
                0.05,
                2,
                0.5,
                step=0.05,
                label="gamma",
                info="The regulariser. p is the weights divided by gamma, filtered: it scales p and moves no border.",
            )
            temperature = gr.Slider(
                0.05,
                2,
                0.5,
                step=0.05,
                label="temperature",
                info="Of the softmax over the two sides: small makes it a decision, large a blur.",
            )
            reach = gr.Slider(
                0.2,
                12,
                2,
                step=0.1,
                label="reach",
                info="How many pixels away a weight is felt in p. 0.71 is the paper's; longer joins neighbours.",
            )
            tie = gr.Slider(
                0,
                2,
                0.5,
                step=0.05,
                label="tie",
                info="What it costs to part two neighbours of one colour. The exact cut follows it; in p equal weights "
                "both ways cancel, so that it shows in d alone.",
            )
        with gr.Column(scale=5, min_width=320):
            numbers = (0.5, 0.5, 2.0, 0.5)
            shown = gr.HTML(cuts_html(image, marks, *numbers), apply_default_css=False, elem_id="cuts")
            gr.Markdown(EXPLAINED)
    sliders = [gamma, temperature, reach, tie]

    def scribbled(
        image: np.ndarray, gamma: float, temperature: float, reach: float, tie: float, event: Any
    ) -> list[Any]:
        height, width = kept(image).shape[:2]
        new = read_marks(event._data["marks"], (height, width))
        return [new, cuts_html(image, new, gamma, temperature, reach, tie)]

    def put(image: np.ndarray, marks: np.ndarray, *numbers: float) -> list[Any]:
        return [image, marks, board(image, marks), cuts_html(image, marks, *numbers)]

    def open_file(file: str | None, *numbers: float) -> list[Any]:
        return put(*picture_to_cut(uploaded(file)), *numbers)

    def cleared(image: np.ndarray, *numbers: float) -> list[Any]:
        return put(image, np.zeros(kept(image).shape[:2], dtype=np.uint8), *numbers)

    def moved(image: np.ndarray, marks: np.ndarray, *numbers: float) -> str:
        return cuts_html(kept(image), kept(marks), *numbers)

    scribbled.__annotations__["event"] = gr.EventData
    outputs = [picture, scribbles, canvas, shown]
    page.load(lambda: (image, marks), None, [picture, scribbles], **options)
    canvas.input(told(scribbled), [picture, *sliders], [scribbles, shown], trigger_mode="always_last", **options)
    upload.upload(told(open_file), [upload, *sliders], outputs, **options)
    restart.click(told(lambda *numbers: put(image, marks, *numbers)), sliders, outputs, **options)
    clear.click(told(cleared), [picture, *sliders], outputs, **options)
    gr.on(
        [slider.change for slider in sliders],
        told(moved),
        [picture, scribbles, *sliders],
        shown,
        trigger_mode="always_last",
        **options,
    )


def serve(weights: Sequence[str] = (), host: str = "127.0.0.1", port: int = 7860, device: str = "auto") -> None:
    """Serves the page until it is interrupted. All that is written is in a temporary folder, gone at the end."""
    port = free_port(host, port)
    with _temporary(), _ended_by(signal.SIGTERM):
        gr = gradio()
        page = build(model_names(weights), own_paths=is_loopback(host), device=usable(device))
        fonts = {"font": ("system-ui", "sans-serif"), "font_mono": ("ui-monospace", "monospace")}
        theme = gr.themes.Default(primary_hue="blue", **fonts).set(**READABLE)
        page.launch(
            server_name=host,
            server_port=port,
            theme=theme,
            css=STYLE,
            max_file_size=MOST_UPLOAD,
            state_session_capacity=SESSIONS,
            app_kwargs={"middleware": [(Alone, (), {})], "docs_url": None, "redoc_url": None, "openapi_url": None},
            footer_links=[],
            share=False,
            ssr_mode=False,
            pwa=False,
            mcp_server=False,
            enable_monitoring=False,
            inbrowser=False,
            quiet=True,
            prevent_thread_lock=True,
        )
        try:
            print(
                f"cutslots: the app is at http://{f'[{host}]' if ':' in host else host}:{port}; Ctrl-C ends it",
                flush=True,
            )
            threading.Event().wait()
        except KeyboardInterrupt:
            print("cutslots: the app has ended", file=sys.stderr)
        finally:
            page.close(verbose=False)


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def free_port(host: str, port: int) -> int:
    """The port, or for 0 any that is free; a sentence if it is taken."""
    if not 0 <= port < 2**16:
        raise ValueError(f"port is {port}; expected a number from 0 to 65535")
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            return int(probe.getsockname()[1])
    except OSError as error:
        raise ValueError(f"{host}:{port} cannot be listened on ({error}); choose another --host or --port") from None


@contextlib.contextmanager
def _temporary() -> Iterator[None]:
    """A folder of its own for all temporary files, also those of Gradio and of Matplotlib, which Gradio calls."""
    names, before = ("GRADIO_TEMP_DIR", "MPLCONFIGDIR"), tempfile.tempdir
    kept = {name: os.environ.get(name) for name in names}
    with tempfile.TemporaryDirectory(prefix=FOLDER, ignore_cleanup_errors=True) as folder:
        tempfile.tempdir = folder
        os.environ.update(dict.fromkeys(names, folder))
        try:
            yield
        finally:
            tempfile.tempdir = before
            for name, value in kept.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})


@contextlib.contextmanager
def _ended_by(number: signal.Signals) -> Iterator[None]:
    """That signal ends what is in here as Ctrl-C does, so that what is temporary goes away."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(number, interrupt)
    try:
        yield
    finally:
        signal.signal(number, before)
