"""Shapes of objects and their intersections with rays.

Every shape is convex and about the size of a unit ball. The z axis points up. A polyhedron is an intersection of
half-spaces; cylinder and dome are a quadric inside half-spaces. A ray enters an intersection at the last entry into its
members and leaves it at the first exit.

Each intersection function takes a ray o + t d in the coordinates of the shape, with o and d of shape (3, m). It returns
t (m,), infinite for a miss, and the outward normal (3, m). Components come first, so that each is contiguous in memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

Hit = tuple[Tensor, Tensor]
Span = tuple[Tensor, Tensor]  # entry and exit

CUBE = 0.75  # half the side
CYLINDER = 0.85  # radius and half the height
CONE = (0.95, 0.85)  # base radius, half the height
HEXAGON = 0.75 / math.cos(math.pi / 6)  # circumradius of the prism
CAPSULE = (0.5, 0.55)  # radius, half the distance between the centres of the end caps; the axis is x


def dot(a: Tensor, b: Tensor) -> Tensor:
    """Return the inner product over the first axis. The order of additions does not depend on the batch."""
    return a[0] * b[0] + a[1] * b[1] + a[2] * b[2]


def _quadratic(a: Tensor, b: Tensor, c: Tensor) -> Span:
    """Return the span of t where a t^2 + 2 b t + c <= 0, for a > 0. An empty span is (inf, -inf)."""
    disc = b * b - a * c
    root = disc.clamp(min=0).sqrt()
    miss = disc <= 0
    return ((-b - root) / a).masked_fill(miss, torch.inf), ((-b + root) / a).masked_fill(miss, -torch.inf)


def _planes(o: Tensor, d: Tensor, name: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return entry (m,), exit (m,) and entry normal (3, m) of the half-spaces n.x <= h."""
    nx, ny, nz, h = o.new_tensor(_PLANES[name]).T[:, :, None]
    speed = nx * d[0] + ny * d[1] + nz * d[2]  # (planes, m)
    gap = h - (nx * o[0] + ny * o[1] + nz * o[2])
    t = gap / torch.where(speed == 0, 1e-20, speed)
    entry, which = torch.where(speed < 0, t, -torch.inf).max(0)
    exit_ = torch.where(speed > 0, t, torch.where((speed == 0) & (gap < 0), -torch.inf, torch.inf)).amin(0)
    return entry, exit_, torch.stack([n[:, 0][which] for n in (nx, ny, nz)])


def _point(o: Tensor, d: Tensor, t: Tensor) -> Tensor:
    """Return the point of the ray at t, or its origin for a miss."""
    return o + torch.where(t.isinf(), 0, t) * d


def _clipped_quadric(o: Tensor, d: Tensor, span: Span, normal_of: Callable[[Tensor], Tensor], planes: str) -> Hit:
    """Intersect a ray with the part of a quadric inside the half-spaces."""
    entry, exit_, flat = _planes(o, d, planes)
    t = torch.maximum(entry, span[0])
    t = torch.where((t < torch.minimum(exit_, span[1])) & (t > 0), t, torch.inf)
    return t, torch.where(span[0] >= entry, normal_of(_point(o, d, t)), flat)


def _polyhedron(name: str) -> Callable[[Tensor, Tensor], Hit]:
    def intersect(o: Tensor, d: Tensor) -> Hit:
        entry, exit_, normal = _planes(o, d, name)
        return torch.where((entry < exit_) & (entry > 0), entry, torch.inf), normal

    return intersect


def _ball(o: Tensor, d: Tensor, radius: float) -> Tensor:
    """Return t (m,) for a ball of this radius around the origin."""
    entry, _ = _quadratic(dot(d, d), dot(o, d), dot(o, o) - radius**2)
    return torch.where(entry > 0, entry, torch.inf)


def sphere(o: Tensor, d: Tensor) -> Hit:
    t = _ball(o, d, 1.0)
    return t, _point(o, d, t)


def cylinder(o: Tensor, d: Tensor) -> Hit:
    a, b = d[0] * d[0] + d[1] * d[1], o[0] * d[0] + o[1] * d[1]
    span = _quadratic(a.clamp(min=1e-12), b, o[0] * o[0] + o[1] * o[1] - CYLINDER**2)
    return _clipped_quadric(o, d, span, lambda p: torch.stack([p[0], p[1], 0 * p[2]]) / CYLINDER, "caps")


def cone(o: Tensor, d: Tensor) -> Hit:
    """Intersect with x^2 + y^2 <= (k (top - z))^2 below the apex, leaving out the upper half of the double cone."""
    base, top = CONE
    k = base / (2 * top)
    z, dz = top - o[2], -d[2]
    a = d[0] * d[0] + d[1] * d[1] - k * k * dz * dz
    b = o[0] * d[0] + o[1] * d[1] - k * k * z * dz
    c = o[0] * o[0] + o[1] * o[1] - k * k * z * z
    a = torch.where(a.abs() < 1e-9, 1e-9, a)
    disc = b * b - a * c
    root = disc.clamp(min=0).sqrt()
    roots = torch.stack([(-b - root) / a, (-b + root) / a])
    on_side = (disc > 0) & ((o[2] + roots * d[2]).abs() <= top) & (roots > 0)
    side = torch.where(on_side, roots, torch.inf).amin(0)
    down = (-top - o[2]) / torch.where(d[2] == 0, 1e-20, d[2])
    x, y = o[0] + down * d[0], o[1] + down * d[1]
    bottom = torch.where((x * x + y * y <= base**2) & (down > 0), down, torch.inf)
    t = torch.minimum(side, bottom)
    p = _point(o, d, t)
    slope = torch.stack([p[0], p[1], k * k * (top - p[2])])
    slope = slope / dot(slope, slope).clamp(min=1e-12).sqrt()
    return t, torch.where(side <= bottom, slope, p.new_tensor([[0.0], [0.0], [-1.0]]))


def dome(o: Tensor, d: Tensor) -> Hit:
    """Intersect with the upper half of a ball. The origin is at half its height."""
    up = o.new_tensor([[0.0], [0.0], [0.5]])
    c = o + up
    span = _quadratic(dot(d, d), dot(c, d), dot(c, c) - 1.0)
    return _clipped_quadric(o, d, span, lambda p: p + up, "dome")


def capsule(o: Tensor, d: Tensor) -> Hit:
    """Intersect with a cylinder along x and a ball at each end; the nearest of the three counts."""
    radius, half = CAPSULE
    a, b = d[1] * d[1] + d[2] * d[2], o[1] * d[1] + o[2] * d[2]
    entry, _ = _quadratic(a.clamp(min=1e-12), b, o[1] * o[1] + o[2] * o[2] - radius**2)
    on_side = (_point(o, d, entry)[0].abs() <= half) & (entry > 0)
    t = torch.where(on_side, entry, torch.inf)
    for end in (-half, half):
        t = torch.minimum(t, _ball(o - o.new_tensor([[end], [0.0], [0.0]]), d, radius))
    p = _point(o, d, t)
    return t, torch.stack([p[0] - p[0].clamp(-half, half), p[1], p[2]]) / radius


def _prism_planes(sides: int, inradius: float, low: float, high: float) -> list[list[float]]:
    """Return the half-spaces of an upright prism with a regular base."""
    angles = [2 * math.pi * i / sides for i in range(sides)]
    walls = [[math.cos(a), math.sin(a), 0.0, inradius] for a in angles]
    return [*walls, [0.0, 0.0, 1.0, high], [0.0, 0.0, -1.0, -low]]


def _pyramid_planes(sides: int, base: float, low: float, high: float) -> list[list[float]]:
    """Return the half-spaces of a pyramid with inradius `base` at the bottom."""
    slant = math.hypot(high - low, base)
    n, up = (high - low) / slant, base / slant
    angles = [2 * math.pi * i / sides for i in range(sides)]
    return [*[[n * math.cos(a), n * math.sin(a), up, up * high] for a in angles], [0.0, 0.0, -1.0, -low]]


_PLANES = {
    "cube": [[s * (i == 0), s * (i == 1), s * (i == 2), CUBE] for i in range(3) for s in (1.0, -1.0)],
    "caps": [[0.0, 0.0, 1.0, CYLINDER], [0.0, 0.0, -1.0, CYLINDER]],
    "dome": [[0.0, 0.0, -1.0, 0.5]],
    "pyramid": _pyramid_planes(4, 0.75, -0.75, 0.75),
    "prism": _prism_planes(6, 0.75, -0.7, 0.7),
    "wedge": [[0.8, 0.0, 0.6, 0.42], [-0.8, 0.0, 0.6, 0.42], [0, 1.0, 0, 0.7], [0, -1.0, 0, 0.7], [0, 0, -1.0, 0.6]],
}


# name: (intersection, radius of the bounding ball, radius of the footprint, height of the centre above the ground)
SHAPES: dict[str, tuple[Callable[[Tensor, Tensor], Hit], float, float, float]] = {
    "sphere": (sphere, 1.0, 1.0, 1.0),
    "cube": (_polyhedron("cube"), CUBE * 3**0.5, CUBE * 2**0.5, CUBE),
    "cylinder": (cylinder, CYLINDER * 2**0.5, CYLINDER, CYLINDER),
    "cone": (cone, math.hypot(*CONE), CONE[0], CONE[1]),
    "pyramid": (_polyhedron("pyramid"), math.hypot(0.75 * 2**0.5, 0.75), 0.75 * 2**0.5, 0.75),
    "prism": (_polyhedron("prism"), math.hypot(HEXAGON, 0.7), HEXAGON, 0.7),
    "dome": (dome, math.hypot(1.0, 0.5), 1.0, 0.5),
    "capsule": (capsule, sum(CAPSULE), sum(CAPSULE), CAPSULE[0]),
    "wedge": (_polyhedron("wedge"), 1.345, 1.21, 0.6),
}
NAMES = tuple(SHAPES)
OUTER_RADIUS, GROUND_RADIUS, REST_HEIGHT = (np.array([row[i] for row in SHAPES.values()]) for i in (1, 2, 3))
