"""The second tab: one picture, scribbles for source and sink; the relaxed cut, its edge variables, the exact cut.

The page holds picture and marks, and sends both whenever something has changed: the server remembers nothing.
"""

from __future__ import annotations

import base64
import io
import time
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image, ImageOps
from scipy import ndimage
from torch import Tensor

from cutslots import exact
from cutslots.app.objects import Source, border, figure, picture_url
from cutslots.cut import GridCut
from cutslots.graph import Graph, grid_edges
from cutslots.scenes import Scenes

GRID = 96  # the longer side of the picture that is cut
SOURCE, SINK = 1, 2  # marks
BLUE, ORANGE = (0, 114, 178), (213, 94, 0)  # theirs: told apart by all eyes

NUMBERS = {  # from, to, at first, step; what it does
    "gamma": (0.05, 2, 0.5, 0.05, "The regulariser: p is the weights divided by it, filtered. It moves no border."),
    "temperature": (0.05, 2, 0.5, 0.05, "Of the softmax over the two sides: small makes it a decision, large a blur."),
    "reach": (0.2, 12, 2, 0.1, "How many pixels away a weight is felt in p. 0.71 is the paper's; longer joins."),
    "tie": (0, 2, 0.5, 0.05, "What it costs to part two neighbours of one colour. In p it cancels, not in d."),
}


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
    marks = np.pad(np.pad(np.zeros((GRID - 12, GRID - 12), dtype=np.uint8), 3, constant_values=SINK), 3)
    marks[y - 1 : y + 2, core[y]] = marks[core[:, x], x - 1 : x + 2] = SOURCE
    return image, marks


def picture_to_cut(source: Source) -> tuple[np.ndarray, np.ndarray]:
    """The first frame, shrunk, so that it can be cut while one looks; and no marks."""
    frame = source.frames[0]
    frame.thumbnail((GRID, GRID), Image.Resampling.LANCZOS)
    return np.asarray(frame), np.zeros((frame.height, frame.width), dtype=np.uint8)


def board(image: np.ndarray, marks: np.ndarray) -> dict[str, Any]:
    """What the page needs to be scribbled on; of the marks a digit for each pixel."""
    height, width = marks.shape
    return {"image": picture_url(image), "width": width, "height": height, "marks": "".join(map(str, marks.flat))}


def read_board(value: Any) -> tuple[np.ndarray, np.ndarray]:
    """The picture (H, W, 3) and its marks (H, W), as the page sends them back."""
    data, marks = base64.b64decode(str(value["image"]).partition(",")[2]), str(value["marks"])
    with Image.open(io.BytesIO(data), formats=["PNG"]) as picture:
        width, height = picture.size
        if max(width, height) > GRID or len(marks) != width * height or set(marks) - set("012"):
            raise ValueError("the scribbles do not fit the picture; reload the page")
        image = np.asarray(picture.convert("RGB"))
    return image, (np.frombuffer(marks.encode(), dtype=np.uint8) - ord("0")).reshape(height, width)


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
    for (name, (low, high, *_)), value in zip(NUMBERS.items(), (gamma, temperature, reach, tie), strict=True):
        if value is None or not low <= value <= high:
            raise ValueError(f"{name} is {value}; expected {low} to {high}")
    shape = (image.shape[0], image.shape[1])
    w, exists = edge_weights(image, marks, tie), torch.from_numpy(grid_edges(shape))
    solved = GridCut(shape, gamma, reach, anchor=1.0).solve(w)
    d = torch.where(exists, solved.d, -torch.inf)[:4].amax(0)
    soft = torch.sigmoid(2 * solved.p / temperature)
    best = exact.min_cut(Graph.grid(shape), w[exists])
    return Cuts(solved.p.numpy(), soft.numpy(), d.numpy(), best.side[:-2].reshape(shape), best.value)


# ------------------------------------------------------------------------------------------------------------- as HTML


def grey(x: np.ndarray, low: float, high: float) -> Image.Image:
    """Values from low to high as greys, from black to white."""
    level = np.clip((x - low) / max(high - low, 1e-12), 0, 1) * 255
    return Image.fromarray(level.round().astype(np.uint8))


def heat(p: np.ndarray) -> Image.Image:
    """Colours of p: blue at 1 and beyond, white at 0, orange at -1 and beyond."""
    return ImageOps.colorize(grey(p, -1, 1), ORANGE, BLUE, mid="white")


def cutout(image: np.ndarray, side: np.ndarray) -> np.ndarray:
    """The picture on one side of a cut, faded on the other, the border drawn."""
    shown = np.where(side[..., None], image, 0.2 * image + 0.8 * 255)
    return np.where(border(side)[..., None], ORANGE, shown).astype(np.uint8)


def cuts_html(image: np.ndarray, marks: np.ndarray, *numbers: float) -> str:
    """The pictures of both cuts, and their numbers in a sentence each."""
    missing = [name for name, mark in (("object", SOURCE), ("background", SINK)) if not (marks == mark).any()]
    if missing:
        return f'<p class="hint">Scribble on the {" and on the ".join(missing)} to see the cut.</p>'
    start = time.perf_counter()
    p, soft, d, side, value = cuts(image, marks, *numbers)
    seconds = time.perf_counter() - start
    relaxed, (low, high) = p > 0, np.quantile(d, [0.02, 0.98])
    figures = [
        figure(heat(p), f"p, from {p.min():.2f} to {p.max():.2f}", "Heat map of p: blue source, orange sink"),
        figure(grey(soft, 0, 1), "softmax of (p, -p)", "Share of the source's side, black 0, white 1"),
        figure(grey(d, low, high), f"d, from {d.min():.2f} to {d.max():.2f}", "Edge variables d, high is white"),
        figure(cutout(image, relaxed), "relaxed: p > 0", "The picture where p is above zero, faded elsewhere"),
        figure(cutout(image, side), "exact minimum cut", "The picture on the source's side of the exact minimum cut"),
    ]
    facts = (
        f"<li><b>{100 * (relaxed == side).mean():.1f} %</b> of the pixels are on the same side of both cuts.</li>"
        f"<li><b>{100 * side.mean():.1f} %</b> of the pixels are the object by the exact cut, "
        f"<b>{100 * relaxed.mean():.1f} %</b> by the relaxed one.</li>"
        f"<li><b>{value:.1f}</b> is the weight of the edges that the exact cut severs; no cut severs less.</li>"
        f"<li><b>{seconds:.2f} s</b> for both, {image.shape[1]}x{image.shape[0]} pixels.</li>"
    )
    return f'<div class="pictures cuts">{"".join(figures)}</div><ul class="numbers" role="status">{facts}</ul>'
