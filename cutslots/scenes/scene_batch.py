"""The contents of a batch of scenes as arrays, and the camera that views them. Units are those of CLEVR."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

FIELD_OF_VIEW = 30.7  # degrees: CLEVR's camera after the benchmark's crop to 0.8 of the height


@dataclass
class SceneBatch:
    """B scenes with up to K objects and F frames. Surface 0 is the ground, surface k is object k."""

    count: np.ndarray  # (B,) objects in each scene; the rest of each row is padding
    shape: np.ndarray  # (B, K) index into shapes.NAMES
    size: np.ndarray  # (B, K)
    color: np.ndarray  # (B, K) index into sample.COLORS, or -1 where the material has its own colors
    position: np.ndarray  # (B, F, K, 3) centres
    rotation: np.ndarray  # (B, F, K, 3, 3) object to world
    velocity: np.ndarray  # (B, F, K, 3) units per second
    material: np.ndarray  # (B, K + 1) index into materials.NAMES
    palette: np.ndarray  # (B, K + 1, 3, 3) three linear RGB colors of each surface
    finish: np.ndarray  # (B, K + 1, 6) pattern scale, bump, roughness, pattern offset (3)
    camera: np.ndarray  # (B, 3)
    target: np.ndarray  # (B, 3) point that the camera looks at
    key_light: np.ndarray  # (B, 3) position
    fill_light: np.ndarray  # (B, 3) position
    light_strength: np.ndarray  # (B, 3) key, fill and ambient light

    def __len__(self) -> int:
        return len(self.count)

    def select(self, rows: np.ndarray | slice) -> SceneBatch:
        """Return the scenes in these rows."""
        return SceneBatch(**{name: value[rows] for name, value in vars(self).items()})

    def scale_textures(self, strength: np.ndarray) -> SceneBatch:
        """Return the scenes with textures at these strengths (B,) in [0, 1].

        At 0 each surface has one color and no relief. At 1 it is unchanged.
        """
        strength = strength[:, None]
        mean = self.palette.mean(2, keepdims=True)
        finish = self.finish.copy()
        finish[:, :, 1] *= strength
        return replace(self, palette=mean + strength[..., None, None] * (self.palette - mean), finish=finish)

    def blend_into_ground(self, share: np.ndarray) -> SceneBatch:
        """Return the scenes with object colors moved toward the ground's by these shares (B,). Materials are kept."""
        palette = self.palette.copy()
        palette[:, 1:] += share[:, None, None, None] * (palette[:, :1] - palette[:, 1:])
        return replace(self, palette=palette)

    @staticmethod
    def concatenate(batches: Sequence[SceneBatch]) -> SceneBatch:
        """Return all scenes of these batches, in order."""
        return SceneBatch(**{name: np.concatenate([vars(b)[name] for b in batches]) for name in vars(batches[0])})


class Camera:
    """Pinhole cameras of B scenes. Arrays have shape (B, ...)."""

    def __init__(self, eye: np.ndarray, target: np.ndarray) -> None:
        self.eye = eye
        self.forward = target - eye
        self.forward /= np.sqrt(dot(self.forward, self.forward))[..., None]
        self.right = np.cross(self.forward, [0.0, 0.0, 1.0])
        self.right /= np.sqrt(dot(self.right, self.right))[..., None]
        self.down = np.cross(self.forward, self.right)
        self.half_width = np.tan(np.radians(FIELD_OF_VIEW) / 2)  # of the image plane at distance 1

    def project(self, points: np.ndarray) -> np.ndarray:
        """Return image coordinates (B, ..., 2) of points (B, ..., 3). Inside the image they lie in [-1, 1]."""
        broadcast = (-1, *[1] * (points.ndim - 2), 3)
        offset = points - self.eye.reshape(broadcast)
        x, y, z = (dot(offset, axis.reshape(broadcast)) for axis in (self.right, self.down, self.forward))
        return np.stack([x, y], -1) / (self.half_width * z)[..., None]


def dot(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the inner product over the last axis. The order of additions does not depend on the batch."""
    return a[..., 0] * b[..., 0] + a[..., 1] * b[..., 1] + a[..., 2] * b[..., 2]


def cross(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the cross product over the last axis. `np.cross` spends more time on axis handling than on the product."""
    (x, y, z), (u, v, w) = (np.moveaxis(part, -1, 0) for part in (a, b))
    return np.stack([y * w - z * v, z * u - x * w, x * v - y * u], -1)
