"""Varied scenes, `variation="v1"`: what varies, and how lights, metal and the sensor use it.

The families have one look: the key light comes from the left, the camera has one height, the ground is evenly lit. A
model learns to rely on it. Varied scenes have light from any side, other cameras, reflections and exposures. `RANGES`
lists everything that varies, and `sample` draws it. Scenes of "v1" stay as they are: other ranges need another name.

Vectors have their components first, as in `render`: S scenes, n rays of each scene.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from cutslots.scenes.shapes import dot

Variation = Literal["none", "v1"]

# Every value is uniform in its range. Angles are in degrees, lengths in the units of CLEVR. The names are hashed.
RANGES: dict[str, tuple[float, float]] = {
    # camera
    "camera azimuth": (0, 360),
    "camera elevation": (18, 36),
    "camera distance": (10, 13.5),  # from its target
    "field of view": (27, 34),
    "border": (0.85, 1.3),  # largest image coordinate of the centre of an object; at 1 it lies on the border
    # objects and surfaces
    "object size": (0.87, 1.15),  # factor, for each object
    "pattern scale": (0.1, 1.2),  # for each surface; the logarithm is uniform
    "pattern contrast": (0.3, 1),  # factor, for each surface
    "scene saturation": (0.4, 1.1),  # factor, for each scene
    "ground": (0.12, 0.55),  # linear gray value, where surfaces have no texture
    "polish": (0, 1),  # share of the mirror image in the reflections of metal
    # light
    "key azimuth": (0, 360),
    "key elevation": (25, 75),
    "key radius": (0.1, 1.6),
    "fill azimuth": (0, 360),
    "fill elevation": (20, 60),
    "fill strength": (0.1, 0.7),  # of the key light's
    "back azimuth": (0, 360),
    "back elevation": (20, 60),
    "back strength": (0, 0.5),  # of the key light's
    "ambient strength": (0.1, 0.6),  # of the key light's
    "light distance": (5, 12),  # of all lights, from the origin
    "falloff": (0, 1),  # 0: light is equally strong everywhere; 1: it falls with the squared distance
    "exposure": (0.75, 1.6),  # light on the ground at the origin
    # sensor
    "warmth": (-0.1, 0.15),  # gain of red, and loss of blue
    "tint": (-0.05, 0.05),  # gain of green
    "tone": (-0.3, 0.3),  # bends the response: below 0 darker midtones
    "haze": (0, 0.2),  # share of a mid gray, which lowers the contrast
    "vignette": (0, 0.35),  # darkening of the corners
    "noise": (0, 0.02),  # standard deviation, for values from 0 to 1
}

AMBIENT_RADIUS = 6.0  # at this distance from the origin ambient light is halved, if the falloff is 1

HAZE = 0.45  # its gray

GRAIN_SIZE = 256  # the noise repeats after as many pixels

Light = tuple[Tensor, Tensor]  # position (3, S, n or 1) and strength (S, n or 1)


# --------------------------------------------------------------------------------------------------------------- light


def vary_lights(light: Tensor, point: Tensor, lights: Sequence[Light]) -> list[Light]:
    """Return the lights and the back light, weakened with the distance to the points (3, S, n). `light` is (6, S)."""
    *position, strength, falloff, _ = light[..., None]
    return [
        (at, power * _attenuation(at, point, falloff)) for at, power in [*lights, (torch.stack(position), strength)]
    ]


def vary_ambient(light: Tensor, point: Tensor, strength: Tensor) -> Tensor:
    """Return the strength of ambient light (S, n) at the points: it comes from the lit part of the ground."""
    falloff, across = light[4][:, None], point[0] * point[0] + point[1] * point[1]
    return strength * (AMBIENT_RADIUS**2 / (AMBIENT_RADIUS**2 + falloff * across))


def _attenuation(at: Tensor, point: Tensor, falloff: Tensor) -> Tensor:
    """Return r^2 / (r^2 + falloff (d^2 - r^2)) for lights at distance r from the origin and d from the point."""
    offset = at - point
    near, far = dot(at, at), dot(offset, offset)
    return near / (near + falloff * (far - near))


def matte(light: Tensor, metal: Tensor) -> Tensor:
    """Return the share of diffuse light (S, n) where `metal` is 1 for metal: polished metal has hardly any."""
    return 1 - (0.65 + 0.3 * light[5][:, None]) * metal


def reflection(light: Tensor, reflected_z: Tensor, dull: Tensor) -> Tensor:
    """Return what metal reflects from directions with these z (S, n), by its polish, where dull metal reflects `dull`.

    Polished metal shows the lit ground below, a dark horizon, and a sky that is brighter further up.
    """
    polish = light[5][:, None]
    above, below = reflected_z.clamp(0, 1), (-4 * reflected_z).clamp(0, 1)
    mirror = 0.06 + 0.8 * below + 1.2 * above * above
    return dull + polish * (mirror - dull)


# -------------------------------------------------------------------------------------------------------------- sensor


def expose(sensor: Tensor, linear: Tensor, side: int) -> Tensor:
    """Return values from 0 to 1 (3, S, H, W) of linear colors, which are the centre crop of squares of this side.

    `sensor` is (9, S). Gains and vignette change the light, then come the root of sRGB, tone, haze and noise.
    """
    red, green, blue, tone, haze, vignette, noise, row, column = sensor[..., None, None]
    y, x = (torch.arange(n, device=linear.device) + (side - n) // 2 for n in linear.shape[2:])
    u, v = ((at + 0.5) / side * 2 - 1 for at in (x, y))
    dimmed = 1 - 0.5 * vignette * (u * u + (v * v)[:, None])
    value = (linear * torch.stack([red, green, blue]) * dimmed).clamp(0, 1).sqrt()
    value = value + tone * value * (1 - value)
    value = value + haze * (HAZE - value)
    rows, columns = (y[:, None] + row.long()) % GRAIN_SIZE, (x + column.long()) % GRAIN_SIZE
    return (value + noise * grain(linear.device)[:, rows, columns]).clamp(0, 1)


@functools.cache
def grain(device: torch.device) -> Tensor:
    """Return the noise of sensors on this device, uploaded once: (3, GRAIN_SIZE, GRAIN_SIZE)."""
    return torch.from_numpy(_grain()).to(device)


@functools.cache
def _grain() -> np.ndarray:
    """Return noise (3, GRAIN_SIZE, GRAIN_SIZE) of mean 0 and variance 1: sums of twelve uniform numbers, less six."""
    uniform = np.random.Generator(np.random.PCG64(0)).random((12, 3, GRAIN_SIZE, GRAIN_SIZE))
    return (uniform.sum(0) - 6).astype(np.float32)
