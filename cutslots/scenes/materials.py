"""Procedural materials: the color pattern and the relief of a surface.

A material is a function of points (3, m) in object coordinates, of coordinates (2, m) on the face they lie on, and of
the noise atlas. It returns the shares of the second and third color and the height of the relief, each (m,).

The atlas is a periodic volume of noise. It is computed once from integers, additions and products, so that it is the
same on every machine.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

ATLAS_SIZE = 64  # voxels along each side
CELLS = 6  # cells along each side in the cellular noise channels


class Pattern(NamedTuple):
    """Value of a material at m points."""

    second: Tensor  # (m,) share of the second color
    third: Tensor  # (m,) share of the third color, over the other two
    height: Tensor  # (m,) relief, in units of BUMP


class Noise:
    """The noise atlas on a device.

    Channels: fractal noise, turbulence, distance to the cell centre, distance to the cell wall, one random number per
    cell, one random number per voxel.
    """

    def __init__(self, volume: Tensor) -> None:
        self.volume = volume
        self.channels: dict[tuple[int, ...], Tensor] = {}

    def __call__(self, p: Tensor, frequency: float | Tensor, *channels: int) -> Tensor:
        """Return noise (channels, m) at points p (3, m). It repeats after 1 / frequency."""
        if channels not in self.channels:
            self.channels[channels] = self.volume[:, channels].contiguous()
        grid = (_fraction(p * frequency) * 2 - 1).T[None, None, None]
        return F.grid_sample(self.channels[channels], grid, align_corners=True)[0, :, 0, 0]


FBM, TURBULENCE, CENTRE, WALL, CELL, SPECK = range(6)  # channels of the atlas


@functools.cache
def noise(device: torch.device) -> Noise:
    """Return the noise atlas on this device, uploaded once."""
    return Noise(torch.as_tensor(_atlas(), dtype=torch.float32, device=device)[None])


@functools.cache
def _atlas() -> np.ndarray:
    """Return the channels (6, N + 1, N + 1, N + 1), N = ATLAS_SIZE.

    The last slice along each axis repeats the first, so that the atlas tiles without a seam.
    """
    octaves = [(n, 0.5**i) for i, n in enumerate((4, 8, 16, 32))]
    values = [(_value_noise(n, n), weight) for n, weight in octaves]
    total = sum(weight for _, weight in values)
    fbm = np.sum([v * weight for v, weight in values], 0) / total
    turbulence = np.sum([np.abs(2 * v - 1) * weight for v, weight in values], 0) / total
    centre, wall, cell = _cells()
    volume = np.stack([_rescale(fbm), _rescale(turbulence), centre, wall, cell, _lattice(ATLAS_SIZE, 99)])
    return np.pad(volume, ((0, 0), (0, 1), (0, 1), (0, 1)), mode="wrap")


def _lattice(n: int, seed: int) -> np.ndarray:
    """Return random numbers (n, n, n) in [0, 1), each a hash of its indices."""
    i = np.arange(n, dtype=np.uint64)
    x = i[:, None, None] * np.uint64(73856093) ^ i[:, None] * np.uint64(19349663) ^ i * np.uint64(83492791)
    x = x + np.uint64(seed * 2654435761)
    for shift, factor in ((33, 0xFF51AFD7ED558CCD), (33, 0xC4CEB9FE1A85EC53), (33, 1)):
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    return (x >> np.uint64(11)) * 2.0**-53


def _value_noise(n: int, seed: int) -> np.ndarray:
    """Return random numbers on an n^3 grid, interpolated smoothly to ATLAS_SIZE^3."""
    grid = _lattice(n, seed)
    at = np.arange(ATLAS_SIZE) * (n / ATLAS_SIZE)
    low = at.astype(int)
    f = at - low
    f = f * f * f * (f * (f * 6 - 15) + 10)
    for axis in range(3):
        weight = f.reshape([-1 if a == axis else 1 for a in range(3)])
        grid = np.take(grid, low, axis) * (1 - weight) + np.take(grid, (low + 1) % n, axis) * weight
    return grid


def _cells() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return cellular noise of CELLS^3 scattered points, three volumes of ATLAS_SIZE^3.

    They hold the distance to the nearest point, how much farther the second nearest is, and a random number of the
    nearest point.
    """
    jitter = np.stack([_lattice(CELLS, seed) for seed in (11, 12, 13)], -1)
    number = _lattice(CELLS, 14)
    at = np.stack(np.meshgrid(*[np.arange(ATLAS_SIZE) * (CELLS / ATLAS_SIZE)] * 3, indexing="ij"), -1)
    home = at.astype(int)
    first, second = np.full((2, ATLAS_SIZE, ATLAS_SIZE, ATLAS_SIZE), 9.0)
    owner = np.zeros((ATLAS_SIZE, ATLAS_SIZE, ATLAS_SIZE))
    for step in np.ndindex(3, 3, 3):
        cell = home + np.array(step) - 1
        i, j, k = np.moveaxis(cell % CELLS, -1, 0)
        gap = cell + jitter[i, j, k] - at
        distance = np.sqrt(gap[..., 0] ** 2 + gap[..., 1] ** 2 + gap[..., 2] ** 2)
        second = np.minimum(second, np.maximum(first, distance))
        owner = np.where(distance < first, number[i, j, k], owner)
        first = np.minimum(first, distance)
    return np.minimum(first, 1.0), np.minimum(second - first, 1.0), owner


def _rescale(x: np.ndarray) -> np.ndarray:
    """Return x rescaled to [0, 1]."""
    return (x - x.min()) / (x.max() - x.min())


def _fraction(x: Tensor) -> Tensor:
    return x - x.floor()


def _step(low: float, high: float, x: Tensor) -> Tensor:
    """Return a smooth step from 0 at low to 1 at high."""
    t = ((x - low) / (high - low)).clamp(0, 1)
    return t * t * (3 - 2 * t)


def _zero(p: Tensor) -> Tensor:
    return torch.zeros_like(p[0])


def _axes(p: Tensor, *factors: float) -> Tensor:
    """Return the factors as a column that multiplies the components of p."""
    return p.new_tensor(factors)[:, None]


def _wave(x: Tensor) -> Tensor:
    """Return a smooth triangle wave of period 1 between 0 and 1."""
    return _step(0, 1, (_fraction(x) * 2 - 1).abs())


def _edge(x: Tensor) -> Tensor:
    """Return the distance to the nearest integer."""
    return 0.5 - (_fraction(x) - 0.5).abs()


# Materials of `textured` and `camo`.


def _cloudy(p: Tensor, uv: Tensor, n: Noise) -> Pattern:
    a = n(p, 0.35, FBM, TURBULENCE)
    return Pattern(_step(0.3, 0.7, a[0]), _zero(p), a[0])


def _marble(p: Tensor, uv: Tensor, n: Noise) -> Pattern:
    t = n(p, 0.3, TURBULENCE)[0]
    vein = _wave(0.9 * p[0] + 0.5 * p[2] + 2.5 * t)
    return Pattern(vein**3, _zero(p), 0.15 * vein)


def _wood(p: Tensor, uv: Tensor, n: Noise) -> Pattern:
    warp, grain = n(p * _axes(p, 1.0, 1.0, 0.25), 0.25, FBM)[0], n(p * _axes(p, 1.0, 1.0, 0.06), 1.0, FBM)[0]
    ring = _fraction(3.5 * ((p[0] + 0.8) ** 2 + (p[1] - 0.5) ** 2).sqrt() + 1.6 * warp)
    second = _step(0.2, 0.9, ring) * 0.8 + 0.4 * (grain - 0.5)
    return Pattern(second.clamp(0, 1), _zero(p), 0.3 * grain)


def _brick(p: Tensor, uv: Tensor, n: Noise) -> Pattern:
    u, v = 2.2 * uv[0], 4.6 * uv[1]
    u = u + 0.5 * (v.floor() % 2)
    tone = n(torch.stack([u.floor(), v.floor(), v.floor()]), 5 / ATLAS_SIZE, SPECK)[0]
    mortar = 1 - _step(0.04, 0.09, torch.minimum(_edge(u) * 2, _edge(v)))
    return Pattern(0.75 * tone, mortar, 1 - mortar + 0.2 * n(p, 0.8, FBM)[0])


def _tiles(p: Tensor, uv: Tensor, n: Noise) -> Pattern:
    at = 2.6 * uv
    cell = at.floor()
    tone = n(torch.stack([cell[0], cell[1], cell[0]]), 7 / ATLAS_SIZE, SPECK)[0]
    grout = 1 - _step(0.03, 0.06, torch.minimum(_edge(at[0]), _edge(at[1])))
    return Pattern(0.4 * tone + 0.3 * n(p, 0.4, FBM)[0], grout, 1 - grout)


def _stripes(p: Tensor, uv: Tensor, n: Noise) -> Pattern:
    at = 1.4 * (uv[0] + uv[1])
    band = _step(0.44, 0.56, _wave(at))
    return Pattern(band, _zero(p), 0.4 * band)


def _pebbles(p: Tensor, uv: Tensor, n: Noise) -> Pattern:
    a = n(p, 0.3, CENTRE, WALL, CELL)
    gap = 1 - _step(0.03, 0.14, a[1])
    return Pattern(a[2], gap, 1 - a[0] - gap)


def _cracks(p: Tensor, uv: Tensor, n: Noise) -> Pattern:
    a = n(p + 0.15 * n(p, 0.5, FBM), 0.22, WALL)[0]
    crack = 1 - _step(0.0, 0.07, a)
    return Pattern(n(p, 0.4, FBM)[0] * 0.7, crack, 1 - crack)


def _scratches(p: Tensor, uv: Tensor, n: Noise) -> Pattern:
    a = n(p * _axes(p, 0.12, 1.3, 1.3), 0.7, FBM)[0]
    b = n(p * _axes(p, 1.3, 0.12, 1.3) + 0.37, 0.7, FBM)[0]
    mark = torch.maximum(_step(0.6, 0.72, a), _step(0.64, 0.74, b))
    return Pattern(mark, _zero(p), -0.5 * mark)


def _dots(p: Tensor, uv: Tensor, n: Noise) -> Pattern:
    at = 2.4 * uv
    at = torch.stack([at[0] + 0.5 * (at[1].floor() % 2), at[1]])
    gap = _fraction(at) - 0.5
    spot = 1 - _step(0.26, 0.31, (gap[0] ** 2 + gap[1] ** 2).sqrt())
    return Pattern(spot, _zero(p), 0.5 * spot)


def _weave(p: Tensor, uv: Tensor, n: Noise) -> Pattern:
    at = 3.2 * uv
    over = ((at[0].floor() + at[1].floor()) % 2) > 0
    thread = torch.where(over, _edge(at[0]), _edge(at[1])) * 2
    return Pattern(torch.where(over, 0.9, 0.1) * _step(0.0, 0.3, thread), 0.6 * (1 - _step(0.0, 0.25, thread)), thread)


def _checks(p: Tensor, uv: Tensor, n: Noise) -> Pattern:
    at = 1.9 * uv
    check = (_step(0.47, 0.53, _wave(at[0])) - _step(0.47, 0.53, _wave(at[1]))).abs()
    return Pattern(check, _zero(p), _zero(p))


def _rust(p: Tensor, uv: Tensor, n: Noise) -> Pattern:
    a = n(p, 0.28, FBM, TURBULENCE)
    fine = n(p, 1.1, FBM)[0]
    rust = _step(0.45, 0.55, a[0] + 0.2 * (fine - 0.5))
    return Pattern(rust, rust * _step(0.5, 0.75, fine), 0.6 * rust * fine)


def _granite(p: Tensor, uv: Tensor, n: Noise) -> Pattern:
    speck = n(p, 0.35, SPECK)[0]
    large = n(p, 0.6, CELL)[0]
    return Pattern(_step(0.35, 0.65, 0.5 * speck + 0.5 * large), _step(0.78, 0.85, speck), 0.2 * speck)


# Materials of `ood`. No other family uses them.


def _zigzag(p: Tensor, uv: Tensor, n: Noise) -> Pattern:
    at = 1.8 * uv[1] + 0.5 * (2 * _edge(1.6 * uv[0]))
    band = _step(0.44, 0.56, _wave(at))
    return Pattern(band, _zero(p), 0.4 * band)


def _hexagons(p: Tensor, uv: Tensor, n: Noise) -> Pattern:
    at = uv * _axes(uv, 2.2, 2.2 / math.sqrt(3))
    a, b = _fraction(at) - 0.5, _fraction(at + 0.5) - 0.5
    stretch = _axes(uv, 1.0, math.sqrt(3))
    a, b = a * stretch, b * stretch
    nearer = (a[0] ** 2 + a[1] ** 2) < (b[0] ** 2 + b[1] ** 2)
    h = torch.where(nearer, a, b).abs()
    wall = 0.5 - torch.maximum(h[0], 0.5 * h[0] + 0.5 * math.sqrt(3) * h[1])
    line = 1 - _step(0.03, 0.08, wall)
    return Pattern(torch.where(nearer, 0.8, 0.0), line, 1 - line)


def _rings(p: Tensor, uv: Tensor, n: Noise) -> Pattern:
    gap = _fraction(1.1 * uv) - 0.5
    ring = _step(0.42, 0.58, _wave(4.0 * (gap[0] ** 2 + gap[1] ** 2).sqrt()))
    return Pattern(ring, _zero(p), 0.4 * ring)


def _plaid(p: Tensor, uv: Tensor, n: Noise) -> Pattern:
    a, b = _step(0.5, 0.55, _wave(1.1 * uv[0])), _step(0.5, 0.55, _wave(1.1 * uv[1]))
    thin = torch.maximum(1 - _step(0.03, 0.05, _edge(1.1 * uv[0])), 1 - _step(0.03, 0.05, _edge(1.1 * uv[1])))
    return Pattern(0.5 * a + 0.5 * b, 0.8 * thin, _zero(p))


def _ripples(p: Tensor, uv: Tensor, n: Noise) -> Pattern:
    at = 1.6 * uv[0] + 0.35 * _wave(0.9 * uv[1])
    wave = _wave(at)
    return Pattern(wave * wave, _zero(p), 1.2 * wave)


def _patches(p: Tensor, uv: Tensor, n: Noise) -> Pattern:
    a, b = n(p, 0.24, FBM)[0], n(p + 0.43, 0.3, FBM)[0]
    return Pattern(_step(0.48, 0.5, a), _step(0.56, 0.58, b), _zero(p))


def _triangles(p: Tensor, uv: Tensor, n: Noise) -> Pattern:
    at = 1.9 * torch.stack([uv[0] + uv[1] / math.sqrt(3), 2 * uv[1] / math.sqrt(3)])
    upper = (_fraction(at[0]) + _fraction(at[1])) > 1
    return Pattern(torch.where(upper, 0.9, 0.0), _zero(p), torch.where(upper, 0.3, 0.0))


def _uniform(p: Tensor, uv: Tensor, n: Noise) -> Pattern:
    return Pattern(_zero(p), _zero(p), _zero(p))


Material = Callable[[Tensor, Tensor, Noise], Pattern]
MATERIALS: dict[str, Material] = {
    "rubber": _uniform,
    "metal": _uniform,
    "cloudy": _cloudy,
    "marble": _marble,
    "wood": _wood,
    "brick": _brick,
    "tiles": _tiles,
    "stripes": _stripes,
    "pebbles": _pebbles,
    "cracks": _cracks,
    "scratches": _scratches,
    "dots": _dots,
    "weave": _weave,
    "checks": _checks,
    "rust": _rust,
    "granite": _granite,
    "zigzag": _zigzag,
    "hexagons": _hexagons,
    "rings": _rings,
    "plaid": _plaid,
    "ripples": _ripples,
    "patches": _patches,
    "triangles": _triangles,
}
NAMES = tuple(MATERIALS)
TRAINING = NAMES[2:16]
UNSEEN = NAMES[16:]
BUMP = 0.035  # height of the relief in scene units at bump 1
