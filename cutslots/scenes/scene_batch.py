"""The contents of a batch of scenes, and the camera that views them. Units are those of CLEVR."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

FIELD_OF_VIEW = 30.7  # degrees: CLEVR's camera after the benchmark's crop to 0.8 of the height


@dataclass
class Layout:
    """Where the objects of B scenes with up to K objects and F frames are, and the camera.

    All fields are tensors on one device, in float64 or int64, or all are arrays.
    """

    count: Any  # (B,) objects in each scene; the rest of each row is padding
    shape: Any  # (B, K) index into shapes.NAMES
    size: Any  # (B, K)
    position: Any  # (B, F, K, 3) centres
    rotation: Any  # (B, F, K, 3, 3) object to world
    velocity: Any  # (B, F, K, 3) units per second
    camera: Any  # (B, 3)
    target: Any  # (B, 3) point that the camera looks at

    def __len__(self) -> int:
        return len(self.count)

    def select(self, rows: Any) -> Self:
        """Return the scenes in these rows."""
        return type(self)(**{name: value[rows] for name, value in vars(self).items()})

    def cameras(self, rows: Any = slice(None)) -> Camera:
        """Return the cameras of the scenes in these rows, which are tensors."""
        return Camera(self.camera[rows], self.target[rows])

    @classmethod
    def concatenate(cls, batches: Sequence[Self]) -> Self:
        """Return all scenes of these batches, in order."""
        join: Any = torch.cat if isinstance(batches[0].count, Tensor) else np.concatenate
        return cls(**{name: join([vars(b)[name] for b in batches]) for name in vars(batches[0])})


@dataclass
class SceneBatch(Layout):
    """B scenes: where their objects are, and how they look. Surface 0 is the ground, surface k is object k."""

    color: Any  # (B, K) index into sample.COLORS, or -1 where the material has its own colors
    material: Any  # (B, K + 1) index into materials.NAMES
    palette: Any  # (B, K + 1, 3, 3) three linear RGB colors of each surface
    finish: Any  # (B, K + 1, 6) pattern scale, bump, roughness, pattern offset (3)
    key_light: Any  # (B, 3) position
    fill_light: Any  # (B, 3) position
    light_strength: Any  # (B, 3) key, fill and ambient light

    def to(self, device: torch.device | str) -> SceneBatch:
        """Return the scenes as tensors on the device."""
        return type(self)(**{name: torch.as_tensor(value).to(device) for name, value in vars(self).items()})

    def numpy(self) -> SceneBatch:
        """Return the scenes as arrays."""
        return type(self)(**{name: torch.as_tensor(value).cpu().numpy() for name, value in vars(self).items()})

    def scale_textures(self, strength: Any) -> SceneBatch:
        """Return the scenes with textures at these strengths (B,) in [0, 1].

        At 0 each surface has one color and no relief. At 1 it is unchanged.
        """
        strength = strength[:, None]
        first, second, third = (self.palette[:, :, i : i + 1] for i in range(3))
        mean = (first + second + third) / (0 * first + 3)  # CUDA divides by a number that is no tensor inexactly
        finish = self.finish + 0
        finish[:, :, 1] *= strength
        return replace(self, palette=mean + strength[..., None, None] * (self.palette - mean), finish=finish)

    def blend_into_ground(self, share: Any) -> SceneBatch:
        """Return the scenes with object colors moved toward the ground's by these shares (B,). Materials are kept."""
        palette = self.palette + 0
        palette[:, 1:] += share[:, None, None, None] * (palette[:, :1] - palette[:, 1:])
        return replace(self, palette=palette)


@dataclass
class VariedLayout(Layout):
    """The layouts of scenes of `variation="v1"`, whose cameras have fields of view of their own."""

    half_width: Any  # (B,) of the image plane at distance 1

    def cameras(self, rows: Any = slice(None)) -> Camera:
        return Camera(self.camera[rows], self.target[rows], self.half_width[rows])


@dataclass
class VariedSceneBatch(SceneBatch):
    """Scenes of `variation="v1"`, whose light and camera have more properties. See `variation.RANGES`."""

    half_width: Any  # (B,) of the image plane at distance 1
    light_radius: Any  # (B,) of the key light
    light: Any  # (B, 6) position of the back light (3), its strength, falloff, polish of metal
    sensor: Any  # (B, 9) gains of red, green and blue, tone, haze, vignette, noise, row and column of the noise

    def cameras(self, rows: Any = slice(None)) -> Camera:
        return Camera(self.camera[rows], self.target[rows], self.half_width[rows])


class Camera:
    """Pinhole cameras of B scenes. Tensors have shape (B, ...)."""

    half_width = math.tan(math.radians(FIELD_OF_VIEW) / 2)  # of the image plane at distance 1

    def __init__(self, eye: Tensor, target: Tensor, half_width: Tensor | None = None) -> None:
        self.eye = eye
        self.half_widths = torch.full_like(eye[:, 0], self.half_width) if half_width is None else half_width  # (B,)
        self.forward = _normalize(target - eye)
        self.right = _normalize(cross(self.forward, tensor([0.0, 0.0, 1.0], eye.device).to(eye).expand_as(eye)))
        self.down = cross(self.forward, self.right)

    def project(self, points: Tensor) -> Tensor:
        """Return image coordinates (B, ..., 2) of points (B, ..., 3). Inside the image they lie in [-1, 1]."""
        broadcast = (-1, *[1] * (points.ndim - 2), 3)
        offset = points - self.eye.reshape(broadcast)
        x, y, z = (dot(offset, axis.reshape(broadcast)) for axis in (self.right, self.down, self.forward))
        return torch.stack([x, y], -1) / (self.half_widths.reshape(broadcast[:-1]) * z)[..., None]


def tensor(values: Any, device: torch.device | str) -> Tensor:
    """Return constants as int64 or float64 on the device. They are copied there once: a copy waits for the GPU."""
    array = np.asarray(values)
    return _constant(array.tobytes(), array.dtype.str, array.shape, torch.device(device))


@functools.cache
def _constant(data: bytes, dtype: str, shape: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.from_numpy(np.frombuffer(data, dtype).reshape(shape).copy()).to(device)


def _normalize(x: Tensor) -> Tensor:
    return x / dot(x, x).sqrt()[..., None]


def dot(a: Any, b: Any) -> Any:
    """Return the inner product over the last axis. The order of additions does not depend on the batch."""
    return a[..., 0] * b[..., 0] + a[..., 1] * b[..., 1] + a[..., 2] * b[..., 2]


def cross(a: Any, b: Any) -> Any:
    """Return the cross product over the last axis. `np.cross` spends more time on axis handling than on the product."""
    (x, y, z), (u, v, w) = ([part[..., i] for i in range(3)] for part in (a, b))
    stack: Any = torch.stack if isinstance(x, Tensor) else np.stack
    return stack([y * w - z * v, z * u - x * w, x * v - y * u], -1)
