"""Lights and sensor of `variation` as functions of Triton's language, with the same operations in the same order.

`light` points to six values of a scene and `sensor` to nine. `VariedSceneBatch` lists them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from cutslots.scenes import variation
from cutslots.scenes.shapes_triton import dot

AMBIENT_SQUARE = tl.constexpr(variation.AMBIENT_RADIUS**2)
HAZE = tl.constexpr(variation.HAZE)
GRAIN_SIZE = tl.constexpr(variation.GRAIN_SIZE)
BACK_STRENGTH, FALLOFF, POLISH = (tl.constexpr(i) for i in (3, 4, 5))  # of a light
TONE, HAZE_SHARE, VIGNETTE, NOISE, GRAIN_ROW, GRAIN_COLUMN = (tl.constexpr(i) for i in range(3, 9))  # of a sensor


@triton.jit
def attenuation(light, lx, ly, lz, px, py, pz):
    """Return the factor by which a light at (lx, ly, lz) is weakened with the distance to the points."""
    x, y, z = lx - px, ly - py, lz - pz
    near, far = dot(lx, ly, lz, lx, ly, lz), dot(x, y, z, x, y, z)
    return tl.div_rn(near, near + tl.load(light + FALLOFF) * (far - near))


@triton.jit
def vary_ambient(light, px, py, strength):
    """Return the strength of ambient light at the points."""
    total = AMBIENT_SQUARE + tl.load(light + FALLOFF) * (px * px + py * py)
    return strength * (tl.div_rn(1.0, total) * AMBIENT_SQUARE)  # torch divides a number by a tensor in this way


@triton.jit
def back_light(light, px, py, pz):
    """Return the position of the back light and its strength at the points."""
    x, y, z = tl.load(light), tl.load(light + 1), tl.load(light + 2)
    return x, y, z, tl.load(light + BACK_STRENGTH) * attenuation(light, x, y, z, px, py, pz)


@triton.jit
def diffuse_share(light, metal):
    """Return the share of diffuse light, which is `matte` in torch."""
    return 1 - (0.65 + 0.3 * tl.load(light + POLISH)) * metal


@triton.jit
def reflection(light, reflected_z, dull):
    """Return what metal reflects from directions with these z, where dull metal reflects `dull`."""
    above = tl.minimum(tl.maximum(reflected_z, 0.0), 1.0)
    below = tl.minimum(tl.maximum(-4 * reflected_z, 0.0), 1.0)
    mirror = 0.06 + 0.8 * below + 1.2 * above * above
    return dull + tl.load(light + POLISH) * (mirror - dull)


@triton.jit
def dimming(sensor, x, y, side):
    """Return the factor of the vignette at centres of pixels (x, y) of the square image."""
    u, v = tl.div_rn(x, side) * 2 - 1, tl.div_rn(y, side) * 2 - 1
    return 1 - 0.5 * tl.load(sensor + VIGNETTE) * (u * u + v * v)


@triton.jit
def grain_index(sensor, x, y):
    """Return indices into a channel of the grain of pixels with these centres."""
    row = (y.to(tl.int32) + tl.load(sensor + GRAIN_ROW).to(tl.int32)) % GRAIN_SIZE
    column = (x.to(tl.int32) + tl.load(sensor + GRAIN_COLUMN).to(tl.int32)) % GRAIN_SIZE
    return row * GRAIN_SIZE + column


@triton.jit
def expose(sensor, grain, linear, channel: tl.constexpr, dimmed, index):
    """Return values from 0 to 1 of one channel of linear colors."""
    gained = linear * tl.load(sensor + channel) * dimmed
    value = tl.sqrt_rn(tl.minimum(tl.maximum(gained, 0.0), 1.0))
    value = value + tl.load(sensor + TONE) * value * (1 - value)
    value = value + tl.load(sensor + HAZE_SHARE) * (HAZE - value)
    noise = tl.load(grain + channel * GRAIN_SIZE * GRAIN_SIZE + index)
    return tl.minimum(tl.maximum(value + tl.load(sensor + NOISE) * noise, 0.0), 1.0)
