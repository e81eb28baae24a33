"""Procedural materials: what colour, relief and gloss a surface has at a point.

A material is a function of a point (3, m) in the object's own coordinates, a place (2, m) on its face and the noise
atlas. It gives how much of the second colour and of the third there is, and the height of the relief, each (m,). The
atlas is a periodic volume of noises made once from whole numbers, additions and products, so that every machine has the
same one.
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

SIDE = 64  # of the atlas
CELLS = 6  # a side, of its cellular noises


class Pattern(NamedTuple):
    second: Tensor  # share of the second colour
    third: Tensor  # share of the third, over the other two
    height: Tensor  # relief, in units of the bump


class Noise:
    """The atlas on a device; channels are fractal noise, turbulence, distance to a cell's heart, to its wall, and two
    random numbers, one for a cell and one for a speck."""

    def __init__(self, volume: Tensor) -> None:
        self.volume = volume
        self.parts: dict[tuple[int, ...], Tensor] = {}

    def __call__(self, p: Tensor, frequency: float | Tensor, *channels: int) -> Tensor:
        """Noise (channels, m) at points p (3, m); the atlas repeats after 1 / frequency."""
        if channels not in self.parts:
            self.parts[channels] = self.volume[:, channels].contiguous()
        at = (_fraction(p * frequency) * 2 - 1).T[None, None, None]
        return F.grid_sample(self.parts[channels], at, align_corners=True)[0, :, 0, 0]


FBM, TURBULENCE, HEART, WALL, CELL, SPECK = range(6)


@functools.cache
def noise(device: torch.device) -> Noise:
    return Noise(torch.as_tensor(_atlas(), dtype=torch.float32, device=device)[None])


@functools.cache
def _atlas() -> np.ndarray:
    """(6, SIDE + 1, SIDE + 1, SIDE + 1), its far faces equal to its near ones so that it repeats without a seam."""
    octaves = [(n, 0.5**i) for i, n in enumerate((4, 8, 16, 32))]
    values = [(_value_noise(n, n), weight) for n, weight in octaves]
    total = sum(weight for _, weight in values)
    fbm = np.sum([v * weight for v, weight in values], 0) / total
    turbulence = np.sum([np.abs(2 * v - 1) * weight for v, weight in values], 0) / total
    heart, wall, cell = _cells()
    volume = np.stack([_spread(fbm), _spread(turbulence), heart, wall, cell, _lattice(SIDE, 99)])
    return np.pad(volume, ((0, 0), (0, 1), (0, 1), (0, 1)), mode="wrap")


def _lattice(n: int, seed: int) -> np.ndarray:
    """Random numbers (n, n, n) in [0, 1) from a hash of their place."""
    i = np.arange(n, dtype=np.uint64)
    x = i[:, None, None] * np.uint64(73856093) ^ i[:, None] * np.uint64(19349663) ^ i * np.uint64(83492791)
    x = x + np.uint64(seed * 2654435761)
    for shift, factor in ((33, 0xFF51AFD7ED558CCD), (33, 0xC4CEB9FE1A85EC53), (33, 1)):
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    return (x >> np.uint64(11)) * 2.0**-53


def _value_noise(n: int, seed: int) -> np.ndarray:
    """Random numbers on n^3 points, joined smoothly, on SIDE^3."""
    grid = _lattice(n, seed)
    at = np.arange(SIDE) * (n / SIDE)
    low = at.astype(int)
    f = at - low
    f = f * f * f * (f * (f * 6 - 15) + 10)
    for axis in range(3):
        weight = f.reshape([-1 if a == axis else 1 for a in range(3)])
        grid = np.take(grid, low, axis) * (1 - weight) + np.take(grid, (low + 1) % n, axis) * weight
    return grid


def _cells() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Distance to the nearest of CELLS^3 scattered points, how much farther the second is, and the nearest's number."""
    jitter = np.stack([_lattice(CELLS, seed) for seed in (11, 12, 13)], -1)
    number = _lattice(CELLS, 14)
    at = np.stack(np.meshgrid(*[np.arange(SIDE) * (CELLS / SIDE)] * 3, indexing="ij"), -1)
    home = at.astype(int)
    first, second = np.full((2, SIDE, SIDE, SIDE), 9.0)
    owner = np.zeros((SIDE, SIDE, SIDE))
    for step in np.ndindex(3, 3, 3):
        cell = home + np.array(step) - 1
        i, j, k = np.moveaxis(cell % CELLS, -1, 0)
        gap = cell + jitter[i, j, k] - at
        distance = np.sqrt(gap[..., 0] ** 2 + gap[..., 1] ** 2 + gap[..., 2] ** 2)
        second = np.minimum(second, np.maximum(first, distance))
        owner = np.where(distance < first, number[i, j, k], owner)
        first = np.minimum(first, distance)
    return np.minimum(first, 1.0), np.minimum(second - first, 1.0), owner


def _spread(x: np.ndarray) -> np.ndarray:
    """Stretched to [0, 1]."""
    return (x - x.min()) / (x.max() - x.min())


def _fraction(x: Tensor) -> Tensor:
    return x - x.floor()


def _step(low: float, high: float, x: Tensor) -> Tensor:
    """Smoothly from 0 at low to 1 at high."""
    t = ((x - low) / (high - low)).clamp(0, 1)
    return t * t * (3 - 2 * t)


def _zero(p: Tensor) -> Tensor:
    return torch.zeros_like(p[0])


def _axes(p: Tensor, *factors: float) -> Tensor:
    """A factor for each component."""
    return p.new_tensor(factors)[:, None]


def _wave(x: Tensor) -> Tensor:
    """A smooth triangle of period 1 between 0 and 1."""
    return _step(0, 1, (_fraction(x) * 2 - 1).abs())


def _edge(x: Tensor) -> Tensor:
    """Distance to the nearest whole number."""
    return 0.5 - (_fraction(x) - 0.5).abs()


# The families of `textured` and `camo`.


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
    which = n(torch.stack([u.floor(), v.floor(), v.floor()]), 5 / SIDE, SPECK)[0]
    mortar = 1 - _step(0.04, 0.09, torch.minimum(_edge(u) * 2, _edge(v)))
    return Pattern(0.75 * which, mortar, 1 - mortar + 0.2 * n(p, 0.8, FBM)[0])


def _tiles(p: Tensor, uv: Tensor, n: Noise) -> Pattern:
    at = 2.6 * uv
    cell = at.floor()
    which = n(torch.stack([cell[0], cell[1], cell[0]]), 7 / SIDE, SPECK)[0]
    grout = 1 - _step(0.03, 0.06, torch.minimum(_edge(at[0]), _edge(at[1])))
    return Pattern(0.4 * which + 0.3 * n(p, 0.4, FBM)[0], grout, 1 - grout)


def _stripes(p: Tensor, uv: Tensor, n: Noise) -> Pattern:
    at = 1.4 * (uv[0] + uv[1])
    band = _step(0.44, 0.56, _wave(at))
    return Pattern(band, _zero(p), 0.4 * band)


def _pebbles(p: Tensor, uv: Tensor, n: Noise) -> Pattern:
    a = n(p, 0.3, HEART, WALL, CELL)
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
    board = (_step(0.47, 0.53, _wave(at[0])) - _step(0.47, 0.53, _wave(at[1]))).abs()
    return Pattern(board, _zero(p), _zero(p))


def _rust(p: Tensor, uv: Tensor, n: Noise) -> Pattern:
    a = n(p, 0.28, FBM, TURBULENCE)
    fine = n(p, 1.1, FBM)[0]
    spread = _step(0.45, 0.55, a[0] + 0.2 * (fine - 0.5))
    return Pattern(spread, spread * _step(0.5, 0.75, fine), 0.6 * spread * fine)


def _granite(p: Tensor, uv: Tensor, n: Noise) -> Pattern:
    speck = n(p, 0.35, SPECK)[0]
    large = n(p, 0.6, CELL)[0]
    return Pattern(_step(0.35, 0.65, 0.5 * speck + 0.5 * large), _step(0.78, 0.85, speck), 0.2 * speck)


# The families of `ood`, which appear nowhere else.


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


def _even(p: Tensor, uv: Tensor, n: Noise) -> Pattern:
    return Pattern(_zero(p), _zero(p), _zero(p))


Material = Callable[[Tensor, Tensor, Noise], Pattern]
MATERIALS: dict[str, Material] = {
    "rubber": _even,
    "metal": _even,
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
BUMP = 0.035  # height of the relief, in units of the scene, at full bump
