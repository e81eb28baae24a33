"""The intersections of `shapes` as functions of Triton's language, with the same operations in the same order.

Vectors are three values each. Rays are blocks. Objects are rows of a table in memory (`OBJECT_COLUMNS`), and so are
half-spaces (`plane_table`).
"""

from __future__ import annotations

import functools
import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from cutslots.scenes import shapes

OBJECT_COLUMNS = 16  # centre (3), rotation (9), size, radius of the bounding ball, shape, and one that is not used
SIZE, RADIUS, SHAPE = tl.constexpr(12), tl.constexpr(13), tl.constexpr(14)

INFINITY = tl.constexpr(math.inf)
SPHERE, CYLINDER, CONE, DOME, CAPSULE = (
    tl.constexpr(shapes.NAMES.index(name)) for name in ("sphere", "cylinder", "cone", "dome", "capsule")
)
CYLINDER_RADIUS, CYLINDER_SQUARE = tl.constexpr(shapes.CYLINDER), tl.constexpr(shapes.CYLINDER**2)
CONE_TOP, CONE_BASE_SQUARE = tl.constexpr(shapes.CONE[1]), tl.constexpr(shapes.CONE[0] ** 2)
CONE_SLOPE_SQUARE = tl.constexpr((shapes.CONE[0] / (2 * shapes.CONE[1])) * (shapes.CONE[0] / (2 * shapes.CONE[1])))
CAPSULE_RADIUS, CAPSULE_SQUARE = tl.constexpr(shapes.CAPSULE[0]), tl.constexpr(shapes.CAPSULE[0] ** 2)
CAPSULE_HALF = tl.constexpr(shapes.CAPSULE[1])


@functools.cache
def plane_table(device: torch.device) -> Tensor:
    """Return rows (first, last, 0, 0) of each shape, and after them the half-spaces (nx, ny, nz, h)."""
    ranges: list[list[float]] = []
    planes: list[list[float]] = []
    for name in shapes.NAMES:
        own = shapes._PLANES.get({"cylinder": "caps"}.get(name, name), [])
        first = len(shapes.NAMES) + len(planes)
        ranges.append([first, first + len(own), 0, 0])
        planes += own
    return torch.tensor([*ranges, *planes], dtype=torch.float32, device=device)


@triton.jit
def dot(ax, ay, az, bx, by, bz):
    return ax * bx + ay * by + az * bz


@triton.jit
def rotate(obj, x, y, z):
    """Return a vector in object axes as one in world axes. `obj` may be a block of objects."""
    return (
        dot(tl.load(obj + 3), tl.load(obj + 4), tl.load(obj + 5), x, y, z),
        dot(tl.load(obj + 6), tl.load(obj + 7), tl.load(obj + 8), x, y, z),
        dot(tl.load(obj + 9), tl.load(obj + 10), tl.load(obj + 11), x, y, z),
    )


@triton.jit
def rotate_back(obj, x, y, z):
    """Return a vector in world axes as one in object axes. `obj` may be a block of objects."""
    return (
        dot(tl.load(obj + 3), tl.load(obj + 6), tl.load(obj + 9), x, y, z),
        dot(tl.load(obj + 4), tl.load(obj + 7), tl.load(obj + 10), x, y, z),
        dot(tl.load(obj + 5), tl.load(obj + 8), tl.load(obj + 11), x, y, z),
    )


@triton.jit
def hits_bounds(obj, ox, oy, oz, dx, dy, dz):
    """Return which rays hit the bounding ball of the object."""
    cx, cy, cz, radius = tl.load(obj), tl.load(obj + 1), tl.load(obj + 2), tl.load(obj + RADIUS)
    along = dot(cx, cy, cz, dx, dy, dz) - dot(ox, oy, oz, dx, dy, dz)
    square = dot(cx, cy, cz, cx, cy, cz) - 2 * dot(cx, cy, cz, ox, oy, oz) + dot(ox, oy, oz, ox, oy, oz)
    return (square - along * along < radius * radius) & (along > -radius)


@triton.jit
def intersect(obj, planes, ox, oy, oz, dx, dy, dz):
    """Return the distance of the object along the rays, infinite for a miss, and the normal in object axes."""
    ox, oy, oz = rotate_back(obj, ox - tl.load(obj), oy - tl.load(obj + 1), oz - tl.load(obj + 2))
    dx, dy, dz = rotate_back(obj, dx, dy, dz)
    size = tl.load(obj + SIZE)
    ox, oy, oz = tl.div_rn(ox, size), tl.div_rn(oy, size), tl.div_rn(oz, size)
    dx, dy, dz = tl.div_rn(dx, size), tl.div_rn(dy, size), tl.div_rn(dz, size)
    shape = tl.load(obj + SHAPE).to(tl.int32)
    t, nx, ny, nz = tl.zeros_like(dx), tl.zeros_like(dx), tl.zeros_like(dx), tl.zeros_like(dx)
    if shape == SPHERE:
        t, nx, ny, nz = _sphere(ox, oy, oz, dx, dy, dz)
    elif shape == CONE:
        t, nx, ny, nz = _cone(ox, oy, oz, dx, dy, dz)
    elif shape == CAPSULE:
        t, nx, ny, nz = _capsule(ox, oy, oz, dx, dy, dz)
    else:
        entry, leave, nx, ny, nz = _planes(planes, shape, ox, oy, oz, dx, dy, dz)
        if shape == CYLINDER:
            t, nx, ny, nz = _cylinder(entry, leave, nx, ny, nz, ox, oy, oz, dx, dy, dz)
        elif shape == DOME:
            t, nx, ny, nz = _dome(entry, leave, nx, ny, nz, ox, oy, oz, dx, dy, dz)
        else:
            t = tl.where((entry < leave) & (entry > 0), entry, INFINITY)
    return t, nx, ny, nz


@triton.jit
def _planes(planes, shape, ox, oy, oz, dx, dy, dz):
    """Return entry, exit and entry normal of the half-spaces n.x <= h of a shape."""
    entry, leave = tl.full(dx.shape, -INFINITY, tl.float32), tl.full(dx.shape, INFINITY, tl.float32)
    normal_x, normal_y, normal_z = tl.zeros_like(dx), tl.zeros_like(dx), tl.zeros_like(dx)
    i, last = tl.load(planes + 4 * shape).to(tl.int32), tl.load(planes + 4 * shape + 1).to(tl.int32)
    while i < last:
        nx, ny, nz = tl.load(planes + 4 * i), tl.load(planes + 4 * i + 1), tl.load(planes + 4 * i + 2)
        speed = dot(nx, ny, nz, dx, dy, dz)
        gap = tl.load(planes + 4 * i + 3) - dot(nx, ny, nz, ox, oy, oz)
        t = tl.div_rn(gap, tl.where(speed == 0, 1e-20, speed))
        later = (speed < 0) & (t > entry)
        entry = tl.where(later, t, entry)
        normal_x, normal_y = tl.where(later, nx, normal_x), tl.where(later, ny, normal_y)
        normal_z = tl.where(later, nz, normal_z)
        parallel = tl.where(gap < 0, -INFINITY, INFINITY)
        leave = tl.minimum(leave, tl.where(speed > 0, t, tl.where(speed == 0, parallel, INFINITY)))
        i += 1
    return entry, leave, normal_x, normal_y, normal_z


@triton.jit
def _quadratic(a, b, c):
    """Return the span of t where a t^2 + 2 b t + c <= 0, for a > 0. An empty span is (inf, -inf)."""
    disc = b * b - a * c
    root = tl.sqrt_rn(tl.maximum(disc, 0.0))
    entry = tl.where(disc <= 0, INFINITY, tl.div_rn(-b - root, a))
    return entry, tl.where(disc <= 0, -INFINITY, tl.div_rn(-b + root, a))


@triton.jit
def _point(ox, oy, oz, dx, dy, dz, t):
    """Return the point of the ray at t, or its origin for a miss."""
    t = tl.where(tl.abs(t) == INFINITY, 0.0, t)
    return ox + t * dx, oy + t * dy, oz + t * dz


@triton.jit
def _ball(ox, oy, oz, dx, dy, dz, square):
    entry, _ = _quadratic(
        dot(dx, dy, dz, dx, dy, dz), dot(ox, oy, oz, dx, dy, dz), dot(ox, oy, oz, ox, oy, oz) - square
    )
    return tl.where(entry > 0, entry, INFINITY)


@triton.jit
def _sphere(ox, oy, oz, dx, dy, dz):
    t = _ball(ox, oy, oz, dx, dy, dz, 1.0)
    nx, ny, nz = _point(ox, oy, oz, dx, dy, dz, t)
    return t, nx, ny, nz


@triton.jit
def _clip(entry, leave, near, far):
    """Return where a ray enters the part of a quadric (near, far) inside the half-spaces (entry, leave)."""
    t = tl.maximum(entry, near)
    return tl.where((t < tl.minimum(leave, far)) & (t > 0), t, INFINITY)


@triton.jit
def _cylinder(entry, leave, nx, ny, nz, ox, oy, oz, dx, dy, dz):
    a, b = dx * dx + dy * dy, ox * dx + oy * dy
    near, far = _quadratic(tl.maximum(a, 1e-12), b, ox * ox + oy * oy - CYLINDER_SQUARE)
    t = _clip(entry, leave, near, far)
    x, y, _ = _point(ox, oy, oz, dx, dy, dz, t)
    side = near >= entry
    nx, ny = tl.where(side, tl.div_rn(x, CYLINDER_RADIUS), nx), tl.where(side, tl.div_rn(y, CYLINDER_RADIUS), ny)
    return t, nx, ny, tl.where(side, 0.0, nz)


@triton.jit
def _dome(entry, leave, nx, ny, nz, ox, oy, oz, dx, dy, dz):
    up = oz + 0.5
    square = dot(ox, oy, up, ox, oy, up) - 1.0
    near, far = _quadratic(dot(dx, dy, dz, dx, dy, dz), dot(ox, oy, up, dx, dy, dz), square)
    t = _clip(entry, leave, near, far)
    x, y, z = _point(ox, oy, oz, dx, dy, dz, t)
    side = near >= entry
    return t, tl.where(side, x, nx), tl.where(side, y, ny), tl.where(side, z + 0.5, nz)


@triton.jit
def _cone_root(disc, root, oz, dz):
    """Return the root if it lies on the side of the cone, else infinity."""
    on_side = (disc > 0) & (tl.abs(oz + root * dz) <= CONE_TOP) & (root > 0)
    return tl.where(on_side, root, INFINITY)


@triton.jit
def _cone(ox, oy, oz, dx, dy, dz):
    z, down_z = CONE_TOP - oz, -dz
    a = dx * dx + dy * dy - CONE_SLOPE_SQUARE * down_z * down_z
    b = ox * dx + oy * dy - CONE_SLOPE_SQUARE * z * down_z
    c = ox * ox + oy * oy - CONE_SLOPE_SQUARE * z * z
    a = tl.where(tl.abs(a) < 1e-9, 1e-9, a)
    disc = b * b - a * c
    root = tl.sqrt_rn(tl.maximum(disc, 0.0))
    near = _cone_root(disc, tl.div_rn(-b - root, a), oz, dz)
    side = tl.minimum(near, _cone_root(disc, tl.div_rn(-b + root, a), oz, dz))
    down = tl.div_rn(-CONE_TOP - oz, tl.where(dz == 0, 1e-20, dz))
    x, y = ox + down * dx, oy + down * dy
    bottom = tl.where((x * x + y * y <= CONE_BASE_SQUARE) & (down > 0), down, INFINITY)
    t = tl.minimum(side, bottom)
    x, y, z = _point(ox, oy, oz, dx, dy, dz, t)
    z = CONE_SLOPE_SQUARE * (CONE_TOP - z)
    length = tl.sqrt_rn(tl.maximum(dot(x, y, z, x, y, z), 1e-12))
    on_side = side <= bottom
    nx, ny = tl.where(on_side, tl.div_rn(x, length), 0.0), tl.where(on_side, tl.div_rn(y, length), 0.0)
    return t, nx, ny, tl.where(on_side, tl.div_rn(z, length), -1.0)


@triton.jit
def _capsule(ox, oy, oz, dx, dy, dz):
    a, b = dy * dy + dz * dz, oy * dy + oz * dz
    entry, _ = _quadratic(tl.maximum(a, 1e-12), b, oy * oy + oz * oz - CAPSULE_SQUARE)
    x, _, _ = _point(ox, oy, oz, dx, dy, dz, entry)
    t = tl.where((tl.abs(x) <= CAPSULE_HALF) & (entry > 0), entry, INFINITY)
    t = tl.minimum(t, _ball(ox + CAPSULE_HALF, oy, oz, dx, dy, dz, CAPSULE_SQUARE))
    t = tl.minimum(t, _ball(ox - CAPSULE_HALF, oy, oz, dx, dy, dz, CAPSULE_SQUARE))
    x, y, z = _point(ox, oy, oz, dx, dy, dz, t)
    x = x - tl.minimum(tl.maximum(x, -CAPSULE_HALF), CAPSULE_HALF)
    return t, tl.div_rn(x, CAPSULE_RADIUS), tl.div_rn(y, CAPSULE_RADIUS), tl.div_rn(z, CAPSULE_RADIUS)
