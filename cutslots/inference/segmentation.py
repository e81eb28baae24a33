"""Interactive segmentation of photographs by scribbles and minimum cuts, without training.

The user marks some pixels of every label. A mixture of Gaussians for each label models the colors of its marks, and the
minimum cut finds the labels of all other pixels (Boykov and Jolly 2001; Rother et al. 2004):

    evidence     log-likelihood ratio of the pixel's color, of a label against the best other one. A uniform density
                 with a small weight is part of every mixture, so colors that no mark has are evidence for no label.
    capacity     capacity * exp(-|x_u - x_v|^2 / (2 sigma^2)) between neighbors, sigma^2 the mean of |x_u - x_v|^2
    marks        have an evidence that exceeds all capacities of a pixel, so no cut can change their label

Two labels are one minimum cut, which is exact. More labels are one cut for each against the rest, and the label of a
pixel is the one with the largest p. That is no exact minimum over all labelings; alpha-expansion is not used.
`alpha` is the softmax of p / 2 over labels: for two labels, the sigmoid of p of the first one.

Shapes: L labels, H W the image.
"""

from __future__ import annotations

import functools
import math
import os
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from PIL import Image, ImageOps
from scipy.cluster.vq import kmeans2
from torch import Tensor

from cutslots.data.images import open_file
from cutslots.files import Notice, write_atomically, write_json
from cutslots.inference.prediction import strips
from cutslots.inference.prepare import ImageLike, open_image
from cutslots.models.refinement import edge_capacities
from cutslots.programs.min_cut_grids import solve_pyramid
from cutslots.viz.images import blend_colors, encode_png
from cutslots.viz.palette import PALETTE

CAPACITY = 40.0
TOLERANCE = 1e-3  # of the duality gap: below it 0.4 and 0.7 % of the labels of two photographs changed
MAX_ITERATIONS = 5_000  # of each level of the pyramid
MAX_LABELS = 20  # more colors are those of a photograph or of blurred strokes
MAX_CUT_PIXELS = 64_000_000  # pixels times cuts: about 8 GB of memory

COMPONENTS = 8  # of a mixture
MAX_SAMPLES = 5_000  # marked pixels that a mixture is fitted to
MIN_VARIANCE = 1e-4  # added to the covariances, for colors in [0, 1]
OUTLIERS = 0.01  # weight of the uniform density in a mixture
STRIP = 2**16  # pixels of the overlay that are processed at once: what is computed for them stays in the cache
DENSITY_STRIP = (
    2**12
)  # the same for densities; matrix products of this size are computed by one thread, which is faster

Scribbles: TypeAlias = str | os.PathLike[str] | Image.Image | np.ndarray | Tensor


class Marks(NamedTuple):
    """The pixels that a user marked."""

    labels: np.ndarray  # (H, W) int16, -1 where nothing is marked
    colors: np.ndarray  # (L, 3) uint8: of each label


class Mixture(NamedTuple):
    """A mixture of Gaussians over colors in [0, 1]."""

    weights: np.ndarray  # (K,)
    means: np.ndarray  # (K, 3)
    covariances: np.ndarray  # (K, 3, 3)


@dataclass(frozen=True, eq=False)
class Segmentation:
    """The labels of an image. Label k is row k of `colors`, `alpha` and `p`."""

    image: Image.Image
    """The image, RGB."""
    colors: np.ndarray
    """(L, 3) uint8: the color of each label in the scribbles, in ascending order."""
    labels: np.ndarray
    """(H, W) uint8: the label of every pixel, from 0."""
    alpha: np.ndarray
    """(L, H, W) float32 in [0, 1]: soft masks, which sum to one."""
    p: np.ndarray
    """(L, H, W) float32: the solution of each label's minimum cut against the rest, in units of log-likelihood."""
    gap: float
    """The largest duality gap of the cuts, relative to their values."""
    iterations: int
    """The most iterations of a cut at full resolution."""

    def overlay(self) -> Image.Image:
        """Return the image with every pixel in the color of its label."""
        image = self.image.copy()
        for rows in strips(self.labels.shape, STRIP):
            strip = np.asarray(self.image.crop((0, rows.start, image.width, rows.stop)))
            image.paste(Image.fromarray(blend_colors(strip, self.colors[self.labels[rows]])), (0, rows.start))
        return image

    def cutout(self, label: int) -> Image.Image:
        """Return the image with the soft mask of a label as transparency, RGBA."""
        image = self.image.copy()
        image.putalpha(Image.fromarray(_to_bytes(self.alpha[label])))
        return image

    def label_image(self) -> Image.Image:
        """Return the labels as a palette image in their colors, value = label, from 1."""
        image = Image.fromarray(self.labels + np.uint8(1)).convert("P")
        image.putpalette(bytes(3) + self.colors.tobytes())
        return image

    def to_dict(self) -> dict[str, Any]:
        """Return the contents of result.json; its labels are from 1, as those of all files."""
        areas = np.bincount(self.labels.ravel(), minlength=len(self.colors))
        labels = [
            {"label": k + 1, "color": color.tolist(), "area": int(area)}
            for k, (color, area) in enumerate(zip(self.colors, areas, strict=True))
        ]
        height, width = self.labels.shape
        return {
            "width": width,
            "height": height,
            "labels": labels,
            "gap": self.gap,
            "iterations": self.iterations,
        }

    def save(self, folder: str | Path) -> None:
        """Write labels.png, overlay.png, alpha_01.png ... and, last, result.json. Old alpha_*.png are removed."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "result.json").unlink(missing_ok=True)
        for old in folder.glob("alpha_*.png"):
            old.unlink()
        images: dict[str, Callable[[], Image.Image | np.ndarray]] = {"overlay.png": self.overlay}
        images |= {alpha_name(k): functools.partial(_to_bytes, alpha) for k, alpha in enumerate(self.alpha)}
        images |= {"labels.png": self.label_image}
        with ThreadPoolExecutor(torch.get_num_threads()) as threads:  # compression runs without Python's lock
            list(threads.map(lambda name: write_atomically(folder / name, encode_png(images[name]())), images))
        write_json(folder / "result.json", self.to_dict())


def alpha_name(label: int) -> str:
    """Return the name of the file of a label's soft mask."""
    return f"alpha_{label + 1:02d}.png"


def _to_bytes(alpha: np.ndarray) -> np.ndarray:
    return (alpha * 255).round().astype(np.uint8)


def segment(
    image: ImageLike, scribbles: Scribbles, capacity: float = CAPACITY, tolerance: float = TOLERANCE
) -> Segmentation:
    """Segment an image by scribbles: a `Segmentation`, without training.

    Args:
        image: A path, a PIL image, an array or a tensor; see `prepare_images`.
        scribbles: The marks, at the size of the image. An image file or PIL image: every color is one label; black or
            transparent pixels are unmarked. An array or tensor (H, W) of integers: every value is one label; 0 is
            unmarked. Labels are numbered in ascending order of (R, G, B), or of their values.
        capacity: How strongly neighbors of one color are held together. Larger values give smoother outlines.
        tolerance: The iterations stop at this duality gap, relative to the value of the cut problem.

    >>> image = np.zeros((40, 60, 3), np.uint8)
    >>> image[:, 25:] = (250, 200, 0)
    >>> marks = np.zeros((40, 60), int)
    >>> marks[20, 5], marks[20, 50] = 1, 2
    >>> print(segment(image, marks).labels[0].sum())  # pixels of the second label in a row
    35
    """
    if not capacity >= 0 or capacity == np.inf:
        raise ValueError(f"capacity is {capacity}; expected a number of at least 0")
    if not 0 < tolerance < 1:
        raise ValueError(f"tolerance is {tolerance}; expected a number between 0 and 1")
    photograph = open_image(image)
    marks = read_scribbles(scribbles, photograph.size)
    cuts = 1 if len(marks.colors) == 2 else len(marks.colors)
    if cuts * marks.labels.size > MAX_CUT_PIXELS:
        most = MAX_CUT_PIXELS // cuts
        raise ValueError(f"image has {marks.labels.size:,} pixels; expected at most {most:,} for {cuts} cuts")
    pixels = np.asarray(photograph)
    w = cut_weights(pixels, marks, capacity)
    found = solve_pyramid(w, tolerance, MAX_ITERATIONS)
    p = found.q.view(len(w), *marks.labels.shape)
    p = torch.cat([p, -p]) if len(marks.colors) == 2 else p
    labels, alpha = _hard_labels(p.numpy(), marks.labels), _alpha(p, marks.labels)
    gap, iterations = float(found.gap.max()), int(found.iterations.max())
    if not gap <= tolerance:
        message = f"the cut has a duality gap of {gap:.1e} after {iterations:,} iterations; expected {tolerance:g}"
        warnings.warn(message, Notice, stacklevel=2)
    return Segmentation(photograph, marks.colors, labels, alpha, p.numpy(), gap, iterations)


def cut_weights(pixels: np.ndarray, marks: Marks, capacity: float) -> Tensor:
    """Return the weights of a `MinCut` for each label (L, 6, H, W); for two labels, those of the first alone."""
    evidence = label_evidence(color_densities(pixels, marks), marks.labels, capacity)
    evidence = evidence[:1] if len(evidence) == 2 else evidence
    w = neighbor_capacities(pixels, capacity).expand(len(evidence), -1, -1, -1).clone()
    w[:, -2], w[:, -1] = evidence.clamp(min=0), -evidence.clamp(max=0)
    return w


def neighbor_capacities(pixels: np.ndarray, capacity: float) -> Tensor:
    """Return the weights of a `MinCut` (1, 6, H, W) between neighbors, those of the terminals zero."""
    x = torch.from_numpy(pixels / np.float32(255)).permute(2, 0, 1)[None]
    squares = [x.diff(dim=axis).square().sum(1) for axis in (2, 3)]
    mean = sum(float(s.sum(dtype=torch.float64)) for s in squares) / max(1, sum(s.numel() for s in squares))
    return edge_capacities(x, capacity, max(mean, 1 / 255**2) ** 0.5)  # one gray level, for an image of one color


def label_evidence(densities: Tensor, marks: np.ndarray, capacity: float) -> Tensor:
    """Return source - sink (L, H, W) of each label against the rest, from log-densities (L, H, W).

    A marked pixel has more than its four capacities can add up to: its own p has the sign of its mark.
    """
    best, second = densities.topk(2, 0).values
    evidence = densities - torch.where(densities == best, second, best)
    hard = 4 * capacity + 1
    for k, row in enumerate(evidence):
        row[torch.from_numpy(marks >= 0)] = -hard
        row[torch.from_numpy(marks == k)] = hard
    return evidence


def _hard_labels(p: np.ndarray, marks: np.ndarray) -> np.ndarray:
    labels, best = np.zeros(marks.shape, dtype=np.uint8), p[0]
    for k in range(1, len(p)):  # argmax along the first axis takes ten times as long
        labels[p[k] > best] = k
        best = np.maximum(best, p[k])
    return np.where(marks >= 0, marks, labels).astype(np.uint8)


def _alpha(p: Tensor, marks: np.ndarray) -> np.ndarray:
    alpha: np.ndarray = (p / 2).softmax(0).numpy()
    for k, row in enumerate(alpha):
        row[marks >= 0] = 0
        row[marks == k] = 1
    return alpha


# ------------------------------------------------------------------------------------------------------- color models


def color_densities(pixels: np.ndarray, marks: Marks) -> Tensor:
    """Return the log-density (L, H, W) of each pixel's color under the mixture of each label's marks."""
    mixtures = [fit_mixture(_sample(pixels[marks.labels == k])) for k in range(len(marks.colors))]
    out = np.empty((len(mixtures), *marks.labels.shape), dtype=np.float32)
    for rows in strips(marks.labels.shape, DENSITY_STRIP):
        x = pixels[rows].reshape(-1, 3).T / np.float32(255)
        for k, density in enumerate(log_densities(x, mixtures)):
            out[k, rows] = density.reshape(out[k, rows].shape)
    return torch.from_numpy(out)


def _sample(colors: np.ndarray) -> np.ndarray:
    """Return colors (n, 3) in [0, 1], at most MAX_SAMPLES of them, evenly spaced."""
    index = np.linspace(0, len(colors) - 1, min(len(colors), MAX_SAMPLES)).astype(int)
    return colors[index] / 255.0


def fit_mixture(colors: np.ndarray) -> Mixture:
    """Fit a Gaussian to each of the clusters that k-means finds in colors (n, 3). The result is deterministic."""
    clusters = min(COMPONENTS, len(np.unique(colors, axis=0)))
    with warnings.catch_warnings(action="ignore"):  # of an empty cluster, which is left out
        _, cluster = kmeans2(colors, clusters, minit="++", seed=0)
    parts = [colors[cluster == k] for k in np.unique(cluster)]
    weights = np.array([len(part) for part in parts]) / len(colors)
    covariances = [np.cov(part.T, bias=True) + MIN_VARIANCE * np.eye(3) for part in parts]
    return Mixture(weights, np.stack([part.mean(0) for part in parts]), np.stack(covariances))


def log_densities(x: np.ndarray, mixtures: list[Mixture]) -> Iterator[np.ndarray]:
    """Yield the log-density (n,) of colors x (3, n), float32, under each mixture with a uniform part.

    Differences from the means, in units of the standard deviations, are one matrix product with x and 1 for all
    Gaussians. Their squares are added after it: products of x with itself would cancel in float32.
    """
    features = np.concatenate([x - np.float32(0.5), np.ones_like(x[:1])])
    for mixture in mixtures:
        factors, log_norm = _whitening(mixture)
        distances = factors @ features
        np.square(distances, out=distances)
        exponents = log_norm[:, None] - distances.reshape(-1, 3, x.shape[1]).sum(1)
        yield np.log(np.exp(exponents, out=exponents).sum(0) + np.float32(OUTLIERS))


def _whitening(mixture: Mixture) -> tuple[np.ndarray, np.ndarray]:
    """Return the factors (3 K, 4) of x - 0.5 and 1, and the logarithm (K,) of each weighted Gaussian at its mean."""
    rows = np.linalg.cholesky(np.linalg.inv(mixture.covariances)).swapaxes(1, 2) / math.sqrt(2)
    shift = -rows @ (mixture.means - 0.5)[:, :, None]
    log_norm = np.log(mixture.weights * (1 - OUTLIERS)) - np.linalg.slogdet(2 * np.pi * mixture.covariances)[1] / 2
    return np.concatenate([rows, shift], 2).reshape(-1, 4).astype(np.float32), log_norm.astype(np.float32)


# ---------------------------------------------------------------------------------------------------------- scribbles


def read_scribbles(scribbles: Scribbles, size: tuple[int, int]) -> Marks:
    """Return the marks in scribbles for an image of `size` (width, height); see `segment`."""
    if isinstance(scribbles, str | os.PathLike):
        name, codes = str(scribbles), open_file(Path(scribbles), _color_codes)
    elif isinstance(scribbles, Image.Image):
        name, codes = "scribbles", _color_codes(scribbles, "scribbles")
    else:
        name, codes = "scribbles", _value_codes(scribbles)
    height, width = codes.shape
    if (width, height) != size:
        raise ValueError(f"{name}: {width}x{height} pixels; expected {size[0]}x{size[1]}, the size of the image")
    values = np.unique(codes)
    values = values[values != 0]
    if len(values) < 2:
        what = "one label" if len(values) else "no marks"
        raise ValueError(f"{name}: {what}; expected marks in at least two colors that are not black")
    if len(values) > MAX_LABELS:
        raise ValueError(
            f"{name}: {len(values):,} colors; expected one for each label, at most {MAX_LABELS}: draw on a black or "
            "transparent image with a brush without soft edges, and save it as PNG"
        )
    labels = np.searchsorted(values, codes).astype(np.int16)
    labels[codes == 0] = -1
    return Marks(labels, _colors(values, isinstance(scribbles, np.ndarray | Tensor)))


def _colors(values: np.ndarray, are_numbers: bool) -> np.ndarray:
    if are_numbers:
        return PALETTE[1 : len(values) + 1]
    return np.stack([values >> 16 & 255, values >> 8 & 255, values & 255], 1).astype(np.uint8)


def _color_codes(image: Image.Image, name: str = "it") -> np.ndarray:
    """Return each pixel's color as 256 * (256 R + G) + B, (H, W) int64; 0 where it is black or transparent."""
    if image.mode not in ("1", "L", "LA", "P", "PA", "RGB", "RGBA"):
        raise ValueError(f"{name} has mode {image.mode}; expected RGB, RGBA, a palette or 8-bit gray")
    pixels = np.asarray(ImageOps.exif_transpose(image).convert("RGBA")).astype(np.int32)
    transparency, codes = pixels[..., 3], pixels[..., :3] @ np.array([1 << 16, 1 << 8, 1], dtype=np.int32)
    if ((transparency > 0) & (transparency < 255)).any():
        raise ValueError(f"{name} has half-transparent pixels; expected strokes without soft edges")
    if (transparency == 0).any() and ((transparency > 0) & (codes == 0)).any():
        raise ValueError(f"{name} has black and transparent pixels; expected one of them, for what is not marked")
    return np.where(transparency > 0, codes, 0)


def _value_codes(scribbles: np.ndarray | Tensor) -> np.ndarray:
    if not isinstance(scribbles, np.ndarray | Tensor):
        kinds = "a path, a PIL image, an array or a tensor"
        raise TypeError(f"scribbles are a {type(scribbles).__name__}; expected {kinds}")
    values = scribbles.detach().cpu().numpy() if isinstance(scribbles, Tensor) else scribbles
    if values.ndim != 2 or values.dtype.kind not in "biu":
        kind = f"{values.dtype} of shape {values.shape}"
        raise ValueError(f"scribbles are {kind}; expected integers (H, W), 0 where nothing is marked")
    if values.size and values.min() < 0:
        raise ValueError(f"scribbles have the value {values.min()}; expected 0 where nothing is marked, labels from 1")
    return values.astype(np.int64)
