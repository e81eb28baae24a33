"""The patterns of `materials` as functions of Triton's language, with the same operations in the same order.

A pattern is a function of points (x, y, z) in object coordinates, of coordinates (u, v) on the face they lie on, and of
the noise atlas (`materials.noise(device).volume`). It returns the shares of the second and third color and the height.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

from cutslots.scenes import materials

LAST = tl.constexpr(materials.ATLAS_SIZE)  # the last index along a side of the atlas
ROW = tl.constexpr(materials.ATLAS_SIZE + 1)
BRICK_FREQUENCY, TILE_FREQUENCY = tl.constexpr(5 / materials.ATLAS_SIZE), tl.constexpr(7 / materials.ATLAS_SIZE)
FBM, TURBULENCE, CENTRE, WALL, CELL, SPECK = (tl.constexpr(i) for i in range(6))  # channels of the atlas
ROOT3, HEXAGON_Y, HALF_ROOT3 = (tl.constexpr(x) for x in (math.sqrt(3), 2.2 / math.sqrt(3), 0.5 * math.sqrt(3)))
STEP = tl.constexpr(0.02)  # of the finite differences
CLOUDY, MARBLE, WOOD, BRICK, TILES, STRIPES, PEBBLES, CRACKS, SCRATCHES, DOTS, WEAVE, CHECKS, RUST, GRANITE = (
    tl.constexpr(materials.NAMES.index(name)) for name in materials.TRAINING
)
ZIGZAG, HEXAGONS, RINGS, PLAID, RIPPLES, PATCHES, TRIANGLES = (
    tl.constexpr(materials.NAMES.index(name)) for name in materials.UNSEEN
)


@triton.jit
def textures(atlas, material, x, y, z, x_side, y_side, inside):
    """Return the shares of the second and third color and the slope of the relief at points of the patterns.

    `x_side` and `y_side` say which points lie on a face along x or y. Materials that no point has are left out.
    """
    zero = tl.zeros_like(x)
    second, third, height, height_x, height_y, height_z = zero, zero, zero, zero, zero, zero
    some = tl.max(tl.where(inside, material, 0), 0) > 1
    if some:
        for i in range(4):
            px, py = x + tl.where(i == 1, STEP, 0.0), y + tl.where(i == 2, STEP, 0.0)
            pz = z + tl.where(i == 3, STEP, 0.0)
            u, v = tl.where(x_side, py, px), tl.where(x_side | y_side, pz, py)
            a, b, here = _pattern(atlas, material, px, py, pz, u, v, inside)
            second, third = tl.where(i == 0, a, second), tl.where(i == 0, b, third)
            height, height_x = tl.where(i == 0, here, height), tl.where(i == 1, here, height_x)
            height_y, height_z = tl.where(i == 2, here, height_y), tl.where(i == 3, here, height_z)
    return second, third, _slope(height_x, height), _slope(height_y, height), _slope(height_z, height)


@triton.jit
def _slope(shifted, height):
    return tl.minimum(tl.maximum(tl.div_rn(shifted - height, STEP), -40.0), 40.0)


@triton.jit
def _pattern(atlas, material, x, y, z, u, v, inside):
    """Return the pattern of each point's own material."""
    second, third, height = tl.zeros_like(x), tl.zeros_like(x), tl.zeros_like(x)
    present = tl.reduce(tl.where(inside, 1 << material, 0), 0, _or)  # a bit for each material
    if (present >> CLOUDY) & 1:
        a, b, c = _cloudy(atlas, material == CLOUDY, x, y, z)
        second, third, height = _choose(material == CLOUDY, a, b, c, second, third, height)
    if (present >> MARBLE) & 1:
        a, b, c = _marble(atlas, material == MARBLE, x, y, z)
        second, third, height = _choose(material == MARBLE, a, b, c, second, third, height)
    if (present >> WOOD) & 1:
        a, b, c = _wood(atlas, material == WOOD, x, y, z)
        second, third, height = _choose(material == WOOD, a, b, c, second, third, height)
    if (present >> BRICK) & 1:
        a, b, c = _brick(atlas, material == BRICK, x, y, z, u, v)
        second, third, height = _choose(material == BRICK, a, b, c, second, third, height)
    if (present >> TILES) & 1:
        a, b, c = _tiles(atlas, material == TILES, x, y, z, u, v)
        second, third, height = _choose(material == TILES, a, b, c, second, third, height)
    if (present >> STRIPES) & 1:
        a, b, c = _stripes(u, v)
        second, third, height = _choose(material == STRIPES, a, b, c, second, third, height)
    if (present >> PEBBLES) & 1:
        a, b, c = _pebbles(atlas, material == PEBBLES, x, y, z)
        second, third, height = _choose(material == PEBBLES, a, b, c, second, third, height)
    if (present >> CRACKS) & 1:
        a, b, c = _cracks(atlas, material == CRACKS, x, y, z)
        second, third, height = _choose(material == CRACKS, a, b, c, second, third, height)
    if (present >> SCRATCHES) & 1:
        a, b, c = _scratches(atlas, material == SCRATCHES, x, y, z)
        second, third, height = _choose(material == SCRATCHES, a, b, c, second, third, height)
    if (present >> DOTS) & 1:
        a, b, c = _dots(u, v)
        second, third, height = _choose(material == DOTS, a, b, c, second, third, height)
    if (present >> WEAVE) & 1:
        a, b, c = _weave(u, v)
        second, third, height = _choose(material == WEAVE, a, b, c, second, third, height)
    if (present >> CHECKS) & 1:
        a, b, c = _checks(u, v)
        second, third, height = _choose(material == CHECKS, a, b, c, second, third, height)
    if (present >> RUST) & 1:
        a, b, c = _rust(atlas, material == RUST, x, y, z)
        second, third, height = _choose(material == RUST, a, b, c, second, third, height)
    if (present >> GRANITE) & 1:
        a, b, c = _granite(atlas, material == GRANITE, x, y, z)
        second, third, height = _choose(material == GRANITE, a, b, c, second, third, height)
    if (present >> ZIGZAG) & 1:
        a, b, c = _zigzag(u, v)
        second, third, height = _choose(material == ZIGZAG, a, b, c, second, third, height)
    if (present >> HEXAGONS) & 1:
        a, b, c = _hexagons(u, v)
        second, third, height = _choose(material == HEXAGONS, a, b, c, second, third, height)
    if (present >> RINGS) & 1:
        a, b, c = _rings(u, v)
        second, third, height = _choose(material == RINGS, a, b, c, second, third, height)
    if (present >> PLAID) & 1:
        a, b, c = _plaid(u, v)
        second, third, height = _choose(material == PLAID, a, b, c, second, third, height)
    if (present >> RIPPLES) & 1:
        a, b, c = _ripples(u, v)
        second, third, height = _choose(material == RIPPLES, a, b, c, second, third, height)
    if (present >> PATCHES) & 1:
        a, b, c = _patches(atlas, material == PATCHES, x, y, z)
        second, third, height = _choose(material == PATCHES, a, b, c, second, third, height)
    if (present >> TRIANGLES) & 1:
        a, b, c = _triangles(u, v)
        second, third, height = _choose(material == TRIANGLES, a, b, c, second, third, height)
    return second, third, height


@triton.jit
def _or(a, b):
    return a | b


@triton.jit
def _choose(chosen, a, b, c, second, third, height):
    return tl.where(chosen, a, second), tl.where(chosen, b, third), tl.where(chosen, c, height)


@triton.jit
def _noise(atlas, mask, channel, x, y, z, frequency):
    """Return a channel of the atlas at points, interpolated as by `grid_sample`. It repeats after 1 / frequency.

    The compiler unrolls the loop over the corners of a voxel. Written out, eight loads in each pattern would make
    Triton's analysis of memory accesses take most of a minute.
    """
    x, y, z = _texel(x * frequency), _texel(y * frequency), _texel(z * frequency)
    left, top, front = tl.floor(x), tl.floor(y), tl.floor(z)
    i, j, k = left.to(tl.int32), top.to(tl.int32), front.to(tl.int32)
    atlas += channel * ROW * ROW * ROW
    out = tl.zeros_like(x)
    for corner in range(8):
        right, down, back = corner % 2, corner // 2 % 2, corner // 4
        # At the last index the weight of the next one is zero.
        column, row, plane = tl.minimum(i + right, LAST), tl.minimum(j + down, LAST), tl.minimum(k + back, LAST)
        weight = _share(x, left, right) * _share(y, top, down) * _share(z, front, back)
        out += tl.load(atlas + (plane * ROW + row) * ROW + column, mask, 0.0) * weight
    return out


@triton.jit
def _share(x, low, next_one):
    """Return the weight of a lattice point in linear interpolation between low and low + 1."""
    return tl.where(next_one == 1, x - low, low + 1 - x)


@triton.jit
def _texel(x):
    """Return the coordinate in the atlas, rounded as by `grid_sample` with corners aligned."""
    return ((_fraction(x) * 2 - 1) + 1) * 0.5 * LAST


@triton.jit
def _fraction(x):
    return x - tl.floor(x)


@triton.jit
def _odd(x):
    """Return 1 where the integer x is odd and 0 where it is even."""
    return x - 2 * tl.floor(0.5 * x)


@triton.jit
def _step(low: tl.constexpr, high: tl.constexpr, x):
    """Return a smooth step from 0 at low to 1 at high."""
    t = tl.minimum(tl.maximum(tl.div_rn(x - low, high - low), 0.0), 1.0)
    return t * t * (3 - 2 * t)


@triton.jit
def _wave(x):
    """Return a smooth triangle wave of period 1 between 0 and 1."""
    t = tl.abs(_fraction(x) * 2 - 1)
    return t * t * (3 - 2 * t)


@triton.jit
def _edge(x):
    """Return the distance to the nearest integer."""
    return 0.5 - tl.abs(_fraction(x) - 0.5)


# Materials of `textured` and `camo`.


@triton.jit
def _cloudy(atlas, mask, x, y, z):
    a = _noise(atlas, mask, FBM, x, y, z, 0.35)
    return _step(0.3, 0.7, a), tl.zeros_like(x), a


@triton.jit
def _marble(atlas, mask, x, y, z):
    vein = _wave(0.9 * x + 0.5 * z + 2.5 * _noise(atlas, mask, TURBULENCE, x, y, z, 0.3))
    return vein * vein * vein, tl.zeros_like(x), 0.15 * vein


@triton.jit
def _wood(atlas, mask, x, y, z):
    warp, grain = _noise(atlas, mask, FBM, x, y, z * 0.25, 0.25), _noise(atlas, mask, FBM, x, y, z * 0.06, 1.0)
    ring = _fraction(3.5 * tl.sqrt_rn((x + 0.8) * (x + 0.8) + (y - 0.5) * (y - 0.5)) + 1.6 * warp)
    second = _step(0.2, 0.9, ring) * 0.8 + 0.4 * (grain - 0.5)
    return tl.minimum(tl.maximum(second, 0.0), 1.0), tl.zeros_like(x), 0.3 * grain


@triton.jit
def _brick(atlas, mask, x, y, z, u, v):
    u, v = 2.2 * u, 4.6 * v
    row = tl.floor(v)
    u = u + 0.5 * _odd(row)
    tone = _noise(atlas, mask, SPECK, tl.floor(u), row, row, BRICK_FREQUENCY)
    mortar = 1 - _step(0.04, 0.09, tl.minimum(_edge(u) * 2, _edge(v)))
    return 0.75 * tone, mortar, 1 - mortar + 0.2 * _noise(atlas, mask, FBM, x, y, z, 0.8)


@triton.jit
def _tiles(atlas, mask, x, y, z, u, v):
    u, v = 2.6 * u, 2.6 * v
    column = tl.floor(u)
    tone = _noise(atlas, mask, SPECK, column, tl.floor(v), column, TILE_FREQUENCY)
    grout = 1 - _step(0.03, 0.06, tl.minimum(_edge(u), _edge(v)))
    return 0.4 * tone + 0.3 * _noise(atlas, mask, FBM, x, y, z, 0.4), grout, 1 - grout


@triton.jit
def _stripes(u, v):
    band = _step(0.44, 0.56, _wave(1.4 * (u + v)))
    return band, tl.zeros_like(u), 0.4 * band


@triton.jit
def _pebbles(atlas, mask, x, y, z):
    gap = 1 - _step(0.03, 0.14, _noise(atlas, mask, WALL, x, y, z, 0.3))
    height = 1 - _noise(atlas, mask, CENTRE, x, y, z, 0.3) - gap
    return _noise(atlas, mask, CELL, x, y, z, 0.3), gap, height


@triton.jit
def _cracks(atlas, mask, x, y, z):
    shift = 0.15 * _noise(atlas, mask, FBM, x, y, z, 0.5)
    crack = 1 - _step(0.0, 0.07, _noise(atlas, mask, WALL, x + shift, y + shift, z + shift, 0.22))
    return _noise(atlas, mask, FBM, x, y, z, 0.4) * 0.7, crack, 1 - crack


@triton.jit
def _scratches(atlas, mask, x, y, z):
    a = _noise(atlas, mask, FBM, x * 0.12, y * 1.3, z * 1.3, 0.7)
    b = _noise(atlas, mask, FBM, x * 1.3 + 0.37, y * 0.12 + 0.37, z * 1.3 + 0.37, 0.7)
    mark = tl.maximum(_step(0.6, 0.72, a), _step(0.64, 0.74, b))
    return mark, tl.zeros_like(x), -0.5 * mark


@triton.jit
def _dots(u, v):
    u, v = 2.4 * u, 2.4 * v
    u = u + 0.5 * _odd(tl.floor(v))
    u, v = _fraction(u) - 0.5, _fraction(v) - 0.5
    spot = 1 - _step(0.26, 0.31, tl.sqrt_rn(u * u + v * v))
    return spot, tl.zeros_like(u), 0.5 * spot


@triton.jit
def _weave(u, v):
    u, v = 3.2 * u, 3.2 * v
    over = _odd(tl.floor(u) + tl.floor(v)) > 0
    thread = tl.where(over, _edge(u), _edge(v)) * 2
    return tl.where(over, 0.9, 0.1) * _step(0.0, 0.3, thread), 0.6 * (1 - _step(0.0, 0.25, thread)), thread


@triton.jit
def _checks(u, v):
    check = tl.abs(_step(0.47, 0.53, _wave(1.9 * u)) - _step(0.47, 0.53, _wave(1.9 * v)))
    return check, tl.zeros_like(u), tl.zeros_like(u)


@triton.jit
def _rust(atlas, mask, x, y, z):
    fine = _noise(atlas, mask, FBM, x, y, z, 1.1)
    rust = _step(0.45, 0.55, _noise(atlas, mask, FBM, x, y, z, 0.28) + 0.2 * (fine - 0.5))
    return rust, rust * _step(0.5, 0.75, fine), 0.6 * rust * fine


@triton.jit
def _granite(atlas, mask, x, y, z):
    speck, large = _noise(atlas, mask, SPECK, x, y, z, 0.35), _noise(atlas, mask, CELL, x, y, z, 0.6)
    return _step(0.35, 0.65, 0.5 * speck + 0.5 * large), _step(0.78, 0.85, speck), 0.2 * speck


# Materials of `ood`.


@triton.jit
def _zigzag(u, v):
    band = _step(0.44, 0.56, _wave(1.8 * v + 0.5 * (2 * _edge(1.6 * u))))
    return band, tl.zeros_like(u), 0.4 * band


@triton.jit
def _hexagons(u, v):
    u, v = u * 2.2, v * HEXAGON_Y
    a, b = _fraction(u) - 0.5, (_fraction(v) - 0.5) * ROOT3
    c, d = _fraction(u + 0.5) - 0.5, (_fraction(v + 0.5) - 0.5) * ROOT3
    nearer = (a * a + b * b) < (c * c + d * d)
    x, y = tl.abs(tl.where(nearer, a, c)), tl.abs(tl.where(nearer, b, d))
    line = 1 - _step(0.03, 0.08, 0.5 - tl.maximum(x, 0.5 * x + HALF_ROOT3 * y))
    return tl.where(nearer, 0.8, 0.0), line, 1 - line


@triton.jit
def _rings(u, v):
    u, v = _fraction(1.1 * u) - 0.5, _fraction(1.1 * v) - 0.5
    ring = _step(0.42, 0.58, _wave(4.0 * tl.sqrt_rn(u * u + v * v)))
    return ring, tl.zeros_like(u), 0.4 * ring


@triton.jit
def _plaid(u, v):
    u, v = 1.1 * u, 1.1 * v
    thin = tl.maximum(1 - _step(0.03, 0.05, _edge(u)), 1 - _step(0.03, 0.05, _edge(v)))
    return 0.5 * _step(0.5, 0.55, _wave(u)) + 0.5 * _step(0.5, 0.55, _wave(v)), 0.8 * thin, tl.zeros_like(u)


@triton.jit
def _ripples(u, v):
    wave = _wave(1.6 * u + 0.35 * _wave(0.9 * v))
    return wave * wave, tl.zeros_like(u), 1.2 * wave


@triton.jit
def _patches(atlas, mask, x, y, z):
    a = _noise(atlas, mask, FBM, x, y, z, 0.24)
    b = _noise(atlas, mask, FBM, x + 0.43, y + 0.43, z + 0.43, 0.3)
    return _step(0.48, 0.5, a), _step(0.56, 0.58, b), tl.zeros_like(x)


@triton.jit
def _triangles(u, v):
    first, second = 1.9 * (u + tl.div_rn(v, ROOT3)), 1.9 * tl.div_rn(2 * v, ROOT3)
    upper = (_fraction(first) + _fraction(second)) > 1
    return tl.where(upper, 0.9, 0.0), tl.zeros_like(u), tl.where(upper, 0.3, 0.0)
