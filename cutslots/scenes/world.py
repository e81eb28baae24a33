"""What a batch of scenes holds, as arrays, and how it is seen. Units are those of CLEVR."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

FIELD_OF_VIEW = 30.7  # degrees: CLEVR's camera after the benchmark's crop to 0.8 of the height


@dataclass
class World:
    """A batch of scenes. Objects are numbered from 1; surface 0 is the ground. K objects, F frames."""

    count: np.ndarray  # (B,) objects in each scene; the rest of each row is padding
    shape: np.ndarray  # (B, K) index into shapes.NAMES
    size: np.ndarray  # (B, K)
    colour: np.ndarray  # (B, K) index into draw.COLOURS, or -1 where the material brings its own
    position: np.ndarray  # (B, F, K, 3) centres
    rotation: np.ndarray  # (B, F, K, 3, 3), object to world
    velocity: np.ndarray  # (B, F, K, 3), units a second
    material: np.ndarray  # (B, K + 1) index into materials.NAMES
    paint: np.ndarray  # (B, K + 1, 3, 3) three linear RGB colours
    finish: np.ndarray  # (B, K + 1, 6) scale, bump, roughness, and an offset of the pattern
    camera: np.ndarray  # (B, 3)
    target: np.ndarray  # (B, 3) what the camera looks at
    key: np.ndarray  # (B, 3) position of the key light
    fill: np.ndarray  # (B, 3)
    light: np.ndarray  # (B, 3) strength of key, fill and ambient light

    def __len__(self) -> int:
        return len(self.count)

    def pick(self, rows: np.ndarray | slice) -> World:
        return World(**{name: value[rows] for name, value in vars(self).items()})

    def flattened(self, strength: np.ndarray) -> World:
        """Textures at these strengths (B,): at 0 a surface has one colour and no relief, at 1 it is as it was."""
        a = strength[:, None]
        mean = self.paint.mean(2, keepdims=True)
        finish = self.finish.copy()
        finish[:, :, 1] *= a
        return replace(self, paint=mean + a[..., None, None] * (self.paint - mean), finish=finish)

    def drawn_near(self, share: np.ndarray) -> World:
        """Objects take on these shares (B,) of the ground's colours; their materials stay theirs."""
        paint = self.paint.copy()
        paint[:, 1:] += share[:, None, None, None] * (paint[:, :1] - paint[:, 1:])
        return replace(self, paint=paint)

    @staticmethod
    def join(worlds: Sequence[World]) -> World:
        return World(**{name: np.concatenate([vars(w)[name] for w in worlds]) for name in vars(worlds[0])})


class Camera:
    """The view of each scene and where a point falls in it. Arrays are (B, ...)."""

    def __init__(self, eye: np.ndarray, target: np.ndarray) -> None:
        self.eye = eye
        self.forward = target - eye
        self.forward /= np.sqrt(dot(self.forward, self.forward))[..., None]
        self.right = np.cross(self.forward, [0.0, 0.0, 1.0])
        self.right /= np.sqrt(dot(self.right, self.right))[..., None]
        self.down = np.cross(self.forward, self.right)
        self.half = np.tan(np.radians(FIELD_OF_VIEW) / 2)

    def project(self, points: np.ndarray) -> np.ndarray:
        """Places (B, ..., 2) in the picture, [-1, 1] inside, of points (B, ..., 3)."""
        wide = (-1, *[1] * (points.ndim - 2), 3)
        away = points - self.eye.reshape(wide)
        x, y, z = (dot(away, axis.reshape(wide)) for axis in (self.right, self.down, self.forward))
        return np.stack([x, y], -1) / (self.half * z)[..., None]


def dot(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Inner product over the last axis, added in one order whatever the batch."""
    return a[..., 0] * b[..., 0] + a[..., 1] * b[..., 1] + a[..., 2] * b[..., 2]


def cross(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Cross product over the last axis, without numpy's care for other axes, which costs more than the product."""
    (x, y, z), (u, v, w) = (np.moveaxis(part, -1, 0) for part in (a, b))
    return np.stack([y * w - z * v, z * u - x * w, x * v - y * u], -1)
