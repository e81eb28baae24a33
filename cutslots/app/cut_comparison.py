"""The paper's relaxed cut (p and d) of an image with scribbles, next to the exact minimum cut.

`edge_weights` turns the image and its scribbles into the weights of a grid graph, `solve_cuts` solves both cuts, and
`cuts_html` shows them in the second tab.

Shapes: H W of the image.
"""

from __future__ import annotations

import time
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from cutslots.app.figures import boundaries, figure_html
from cutslots.programs import exact
from cutslots.programs.graph import Graph, grid_edges
from cutslots.programs.grid_cut import GridCut

MAX_SIZE = 96  # pixels of the longer side of the image that is cut

SOURCE, SINK = 1, 2  # values of scribbles; 0 is none

BLUE, ORANGE = (0, 114, 178), (213, 94, 0)  # source and sink, distinct to color-blind readers


class Hyperparameter(NamedTuple):
    low: float
    high: float
    default: float
    step: float
    info: str


HYPERPARAMETERS = {
    "gamma": Hyperparameter(0.05, 2, 0.5, 0.05, "Regularization. It scales p and does not move the boundary."),
    "temperature": Hyperparameter(0.05, 2, 0.5, 0.05, "Temperature of the softmax. Smaller values sharpen it."),
    "reach": Hyperparameter(0.2, 12, 2, 0.1, "Distance in pixels over which a weight affects p. 0.71 in the paper."),
    "smoothness": Hyperparameter(0, 2, 0.5, 0.05, "Weight of edges between similar neighbors. It changes d, not p."),
}

EXPLANATION = """**p** is the solution of the relaxed cut. Blue (1 or more) is the source: the object. Orange (-1 or
less) is the sink: the background. White is 0.

**d** is the largest edge variable from a pixel to its neighbors. It is high (white) where p falls across an edge of
small weight.

**Edge weights.** Neighbors are connected by `smoothness` times the similarity of their colors. A pixel is connected to
the source by how much its color differs from the background scribbles, and to the sink by how much it differs from the
object scribbles. Scribbled pixels get 1 more.

**The exact minimum cut** is computed by maximum flow from the same weights."""


class CutResult(NamedTuple):
    """The relaxed and the exact cut of an image."""

    p: np.ndarray  # (H, W) vertex variables of the relaxed cut, positive on the source's side
    probability: np.ndarray  # (H, W) of the source's side: softmax of (p, -p) / temperature
    d: np.ndarray  # (H, W) largest edge variable from a pixel to its neighbors
    exact: np.ndarray  # (H, W) bool, the source's side of the exact minimum cut
    value: float  # total weight of the edges that the exact cut removes


def color_nll(image: np.ndarray, marked: np.ndarray, max_samples: int = 200, sigma: float = 0.1) -> np.ndarray:
    """Return the negative log-likelihood of each pixel's color (H, W), scaled to [0, 1].

    The density is a mean of Gaussians around the colors of the marked pixels (H, W), in an image in [0, 1]."""
    colors = image[marked]
    colors = colors[np.linspace(0, len(colors) - 1, min(len(colors), max_samples)).astype(int)]
    distances = np.square(image[:, :, None] - colors).sum(-1)
    floor = 1e-3  # of the likelihood, so that its logarithm is bounded
    likelihood = (np.exp(-distances / (2 * sigma**2)).mean(-1) + floor) / (1 + floor)
    return np.log(likelihood) / np.log(floor / (1 + floor))


def edge_weights(image: np.ndarray, scribbles: np.ndarray, smoothness: float) -> Tensor:
    """Return w (6, H, W) for `GridCut`.

    Edges between neighbors weigh `smoothness` times the similarity of their colors. The edge from the source is the
    negative log-likelihood of the pixel under the sink's scribbles, and the other way round; scribbles add 1."""
    image = image / 255.0
    steps = [np.square(np.diff(image, axis=axis)).sum(-1) for axis in (1, 0)]
    mean_step = max(float(np.mean(np.concatenate([step.ravel() for step in steps]))), 1e-6)
    w = np.zeros((6, *scribbles.shape), dtype=np.float32)
    w[0, :, :-1] = w[1, :, 1:] = smoothness * np.exp(-steps[0] / (2 * mean_step))
    w[2, :-1] = w[3, 1:] = smoothness * np.exp(-steps[1] / (2 * mean_step))
    w[4] = color_nll(image, scribbles == SINK) + (scribbles == SOURCE)
    w[5] = color_nll(image, scribbles == SOURCE) + (scribbles == SINK)
    return torch.from_numpy(w)


def solve_cuts(
    image: np.ndarray, scribbles: np.ndarray, gamma: float, temperature: float, reach: float, smoothness: float
) -> CutResult:
    """Solve the relaxed and the exact cut of an image (H, W, 3) uint8 with scribbles (H, W)."""
    values = (gamma, temperature, reach, smoothness)
    for (name, (low, high, *_)), value in zip(HYPERPARAMETERS.items(), values, strict=True):
        if value is None or not low <= value <= high:
            raise ValueError(f"{name} is {value}; expected {low} to {high}")
    shape = (image.shape[0], image.shape[1])
    w, is_edge = edge_weights(image, scribbles, smoothness), torch.from_numpy(grid_edges(shape))
    relaxed = GridCut(shape, gamma, reach, anchor=1.0).solve(w)
    d = torch.where(is_edge, relaxed.d, -torch.inf)[:4].amax(0)
    probability = torch.sigmoid(2 * relaxed.p / temperature)
    best = exact.min_cut(Graph.grid(shape), w[is_edge])
    side = best.side[:-2].reshape(shape)  # without the two terminals
    return CutResult(relaxed.p.numpy(), probability.numpy(), d.numpy(), side, best.value)


# ---------------------------------------------------------------------------------------------------------------- HTML


def gray_image(x: np.ndarray, low: float, high: float) -> Image.Image:
    """Return values (H, W) as gray levels, `low` black and `high` white."""
    level = np.clip((x - low) / max(high - low, 1e-12), 0, 1) * 255
    return Image.fromarray(level.round().astype(np.uint8))


def heat_map(p: np.ndarray) -> Image.Image:
    """Return p (H, W) in color: blue at 1 or more, white at 0, orange at -1 or less."""
    return ImageOps.colorize(gray_image(p, -1, 1), ORANGE, BLUE, mid="white")


def masked_image(image: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Return the image (H, W, 3), faded outside the mask, with the boundary of the mask in orange."""
    faded = np.where(mask[..., None], image, 0.2 * image + 0.8 * 255)
    return np.where(boundaries(mask)[..., None], ORANGE, faded).astype(np.uint8)


def cuts_html(image: np.ndarray, scribbles: np.ndarray, *values: float) -> str:
    """Return both cuts as figures and their statistics as a list. `values` are those of `HYPERPARAMETERS`."""
    missing = [name for name, value in (("object", SOURCE), ("background", SINK)) if not (scribbles == value).any()]
    if missing:
        return f'<p class="hint">Scribble on the {" and on the ".join(missing)} to see the cut.</p>'
    start = time.perf_counter()
    cuts = solve_cuts(image, scribbles, *values)
    seconds = time.perf_counter() - start
    return f'<div class="images cuts">{_figures_html(image, cuts)}</div>{_statistics_html(cuts, seconds)}'


def _figures_html(image: np.ndarray, cuts: CutResult) -> str:
    (p, probability, d, exact_mask, _), (low, high) = cuts, np.quantile(cuts.d, [0.02, 0.98])
    figures: list[tuple[Image.Image | np.ndarray, str, str]] = [
        (heat_map(p), f"p, from {p.min():.2f} to {p.max():.2f}", "Heat map of p: blue source, orange sink"),
        (gray_image(probability, 0, 1), "softmax of (p, -p)", "Probability of the source's side: black 0, white 1"),
        (gray_image(d, low, high), f"d, from {d.min():.2f} to {d.max():.2f}", "Edge variables d: high is white"),
        (masked_image(image, p > 0), "relaxed cut: p > 0", "The image where p is positive, faded elsewhere"),
        (masked_image(image, exact_mask), "exact minimum cut", "The image on the source's side of the exact cut"),
    ]
    return "".join(figure_html(*figure) for figure in figures)


def _statistics_html(cuts: CutResult, seconds: float) -> str:
    relaxed, (height, width) = cuts.p > 0, cuts.p.shape
    items = (
        f"<b>{(relaxed == cuts.exact).mean():.1%}</b> of the pixels are on the same side of both cuts.",
        f"<b>{cuts.exact.mean():.1%}</b> of the pixels are object in the exact cut, "
        f"<b>{relaxed.mean():.1%}</b> in the relaxed cut.",
        f"<b>{cuts.value:.1f}</b> is the value of the exact cut: the total weight of the edges it removes.",
        f"<b>{seconds:.2f} s</b> run time of both cuts, {width}x{height} pixels.",
    )
    return f'<ul role="status">{"".join(f"<li>{item}</li>" for item in items)}</ul>'
