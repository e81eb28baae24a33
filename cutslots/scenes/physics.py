"""Rigid-body simulation of objects thrown onto the ground, for a batch of scenes in float64.

- A body has a mass proportional to its volume and the same moment of inertia about every axis.
- It touches the ground at points of its surface: the lowest point of a sphere, the corners of a cube, the rims of a
  cylinder. Each contact is one impulse with restitution and Coulomb friction.
- Two bodies collide as their bounding balls.
- No step adds energy. Separating overlapping bodies can raise them, so speeds are reduced afterwards where needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from cutslots.scenes import shapes
from cutslots.scenes.scene_batch import cross, dot

if TYPE_CHECKING:
    from cutslots.scenes.sample import HashRNG

GRAVITY = 9.8
FRAMES_PER_SECOND = 12
SUBSTEPS = 16  # per frame
RESTITUTION, FRICTION = 0.45, 0.45
MAX_SPEED = 10.0  # units per second
MAX_STEP = 1.0  # distance between two frames; a scene that exceeds it is sampled again
MAX_CONTACTS = 4  # contact points of a body per step, the lowest first
CANDIDATES = 24  # positions tried for an object before the scene is sampled again

_CORNERS = np.array([[x, y, z] for x in (-1, 1) for y in (-1, 1) for z in (-1, 1)]) * shapes.CUBE
_RIM = np.array([[np.cos(a), np.sin(a)] for a in np.arange(8) * np.pi / 4])
_RIMS = np.concatenate([np.column_stack([_RIM, np.full(8, z)]) for z in (-1, 1)]) * shapes.CYLINDER
CONTACT_POINTS = {"cube": np.concatenate([_CORNERS, _CORNERS]), "cylinder": _RIMS}  # (16, 3) each


class Bodies:
    """State of all bodies (B, K, ...): position `x`, velocity `v`, angular velocity `w`, `rotation`."""

    def __init__(self, shape: np.ndarray, size: np.ndarray, present: np.ndarray) -> None:
        self.present, self.size = present, size
        self.radius = shapes.OUTER_RADIUS[shape] * size
        self.mass = size**3
        self.inertia = 0.4 * self.mass * size**2
        self.round = shape == shapes.NAMES.index("sphere")
        points = np.zeros((len(shapes.NAMES), 16, 3))
        for name, own in CONTACT_POINTS.items():
            points[shapes.NAMES.index(name)] = own
        self.points = points[shape] * size[..., None, None]  # (B, K, 16, 3)
        self.x, self.v, self.w = (np.zeros((*shape.shape, 3)) for _ in range(3))
        self.rotation = np.broadcast_to(np.eye(3), (*shape.shape, 3, 3)).copy()

    def energy(self) -> np.ndarray:
        """Return the energy of every scene (B,): linear, rotational and potential."""
        each = self.mass * (dot(self.v, self.v) / 2 + GRAVITY * self.x[..., 2]) + self.inertia * dot(self.w, self.w) / 2
        return (each * self.present).sum(-1)

    def step(self, dt: float) -> None:
        """Advance all scenes by `dt` seconds."""
        before = self.energy()
        self.v[..., 2] -= GRAVITY * dt
        self.collide()
        touching = self.hit_ground()
        damping = 1 - dt * np.where(touching, 1.5, 0.05)[..., None]
        self.v *= damping
        self.w *= damping
        self.v *= np.minimum(1, MAX_SPEED / np.sqrt(dot(self.v, self.v) + 1e-12))[..., None]
        self.x += dt * self.v
        self.rotation = rotate(self.w * dt, self.rotation)
        self.separate()
        self.limit_energy(before)

    def hit_ground(self) -> np.ndarray:
        """Apply impulses at the lowest contact points. Return which bodies touch the ground (B, K)."""
        arms = np.stack([dot(self.rotation[..., None, i, :], self.points) for i in range(3)], -1)
        arms[self.round] = 0
        arms[self.round, :, 2] = -self.size[self.round][:, None]
        lowest = np.argsort(arms[..., 2], axis=-1, kind="stable")[..., :MAX_CONTACTS]
        touching = np.zeros(self.present.shape, dtype=bool)
        for i in range(MAX_CONTACTS):
            arm = np.take_along_axis(arms, lowest[..., i, None, None], axis=2)[..., 0, :]
            below = (self.x[..., 2] + arm[..., 2] < 0) & self.present
            touching |= below
            if below.any():
                self.hit_ground_at(arm, below)
        return touching

    def hit_ground_at(self, arm: np.ndarray, below: np.ndarray) -> None:
        """Apply one impulse of the ground at the points x + arm that are below it and move down."""
        velocity = self.v + cross(self.w, arm)
        sinking = -velocity[..., 2]
        inverse_mass = 1 / self.mass + (arm[..., 0] ** 2 + arm[..., 1] ** 2) / self.inertia
        restitution = np.where(sinking > 0.4, RESTITUTION, 0.0)
        normal_impulse = np.where(below & (sinking > 0), (1 + restitution) * sinking / inverse_mass, 0.0)
        self.apply(arm, normal_impulse[..., None] * [0.0, 0.0, 1.0])
        tangential = self.v + cross(self.w, arm)
        tangential[..., 2] = 0
        speed = np.sqrt(dot(tangential, tangential)) + 1e-12
        direction = tangential / speed[..., None]
        lever = cross(arm, direction)
        inverse_mass = 1 / self.mass + dot(lever, lever) / self.inertia
        friction = np.minimum(FRICTION * normal_impulse, speed / inverse_mass)
        self.apply(arm, -friction[..., None] * direction)

    def apply(self, arm: np.ndarray, impulse: np.ndarray) -> None:
        """Change linear and angular velocity by an impulse at x + arm."""
        self.v += impulse / self.mass[..., None]
        self.w += cross(arm, impulse) / self.inertia[..., None]

    def pairs(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return direction, gap between bounding balls, and whether both bodies exist, of all pairs (B, K, K)."""
        offset = self.x[:, None] - self.x[:, :, None]
        distance = np.sqrt(dot(offset, offset)) + 1e-9
        both = self.present[:, None] & self.present[:, :, None] & ~np.eye(self.present.shape[1], dtype=bool)
        return offset / distance[..., None], distance - self.radius[:, None] - self.radius[:, :, None], both

    def collide(self) -> None:
        """Apply impulses between bodies that overlap and approach each other."""
        direction, gap, both = self.pairs()
        closing = -dot(self.v[:, None] - self.v[:, :, None], direction)
        hit = both & (gap < 0) & (closing > 0)
        if hit.any():
            reduced = 1 / (1 / self.mass[:, None] + 1 / self.mass[:, :, None])
            impulse = np.where(hit, (1 + RESTITUTION) * closing * reduced, 0.0)
            impulse /= np.maximum(hit.sum(-1, keepdims=True), hit.sum(-2, keepdims=True)).clip(1)
            self.v -= (impulse[..., None] * direction).sum(2) / self.mass[..., None]

    def separate(self) -> None:
        """Move overlapping bodies apart, and bodies below the ground up."""
        for _ in range(2):
            direction, gap, both = self.pairs()
            overlap = np.where(both & (gap < 0), -gap, 0.0)
            if not overlap.any():
                break
            share = self.mass[:, None] / (self.mass[:, None] + self.mass[:, :, None])  # the lighter body moves more
            self.x -= ((overlap * share)[..., None] * direction).sum(2)
        clearance = np.where(self.round, self.size, -self.depth())
        self.x[..., 2] += 0.5 * np.maximum(0, clearance - self.x[..., 2]) * self.present

    def depth(self) -> np.ndarray:
        """Return the height of the lowest contact point relative to the centre (B, K), at most zero."""
        return dot(self.rotation[..., None, 2, :], self.points).min(-1)

    def limit_energy(self, before: np.ndarray) -> None:
        """Scale speeds down so that no scene has more energy than before."""
        height = (self.mass * GRAVITY * self.x[..., 2] * self.present).sum(-1)
        motion = self.energy() - height
        scale = np.sqrt(np.clip((before - height) / (motion + 1e-12), 0, 1))[:, None, None]
        self.v *= scale
        self.w *= scale


def rotate(angle: np.ndarray, rotation: np.ndarray) -> np.ndarray:
    """Return `rotation` followed by the rotation vector `angle` (Rodrigues), orthonormalized."""
    size = np.sqrt(dot(angle, angle))[..., None, None] + 1e-12
    x, y, z = np.moveaxis(angle / size[..., 0], -1, 0)
    zero = np.zeros_like(x)
    skew = np.stack([zero, -z, y, z, zero, -x, -y, x, zero], -1).reshape(rotation.shape)
    small = np.eye(3) + np.sin(size) * skew + (1 - np.cos(size)) * _matmul(skew, skew)
    rotation = _matmul(small, rotation)
    x, y = rotation[..., 0], rotation[..., 1]
    x = x / np.sqrt(dot(x, x))[..., None]
    y = y - dot(x, y)[..., None] * x
    y = y / np.sqrt(dot(y, y))[..., None]
    return np.stack([x, y, cross(x, y)], -1)


def _matmul(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the product of 3 x 3 matrices. The order of additions does not depend on the batch."""
    return a[..., :, :1] * b[..., :1, :] + a[..., :, 1:2] * b[..., 1:2, :] + a[..., :, 2:] * b[..., 2:, :]


def simulate(rng: HashRNG, count: Tensor, shape: Tensor, size: Tensor, frames: int) -> tuple[Tensor, ...]:
    """Throw the objects of B scenes and simulate them, on the CPU.

    Returns positions (B, F, K, 3), rotations (B, F, K, 3, 3), velocities (B, F, K, 3), and whether every object found a
    free start position and moved at most MAX_STEP per frame (B,).
    """
    bodies, valid = _throw(rng, *(x.cpu().numpy() for x in (count, shape, size)))
    padding = ~bodies.present
    states = []
    for _ in range(frames):
        states.append((bodies.x.copy(), bodies.rotation.copy(), bodies.v.copy()))
        for _ in range(SUBSTEPS):
            bodies.step(1 / (FRAMES_PER_SECOND * SUBSTEPS))
            bodies.x[padding] = states[0][0][padding]
            bodies.v[padding] = 0
            bodies.w[padding] = 0
    position, rotation, velocity = (np.stack(part, 1) for part in zip(*states, strict=True))
    step = np.diff(position, axis=1)
    valid &= (dot(step, step) <= MAX_STEP**2).all((1, 2))
    return tuple(torch.from_numpy(x).to(count.device) for x in (position, rotation, velocity, valid))


def _throw(rng: HashRNG, count: np.ndarray, shape: np.ndarray, size: np.ndarray) -> tuple[Bodies, np.ndarray]:
    """Return bodies thrown from free start positions toward the middle, and which scenes had room for all (B,)."""
    B, K = shape.shape

    def uniform(name: str, low: float, high: float, *shape: int) -> np.ndarray:
        return rng.uniform(name, low, high, *shape).cpu().numpy()

    bodies = Bodies(shape, size, np.arange(K) < count[:, None])
    candidates = np.stack(
        [uniform(f"start {i}", *span, K, CANDIDATES) for i, span in enumerate([(-3, 3)] * 2 + [(0, 3)])], -1
    )
    candidates[..., 2] += bodies.radius[..., None]
    valid = np.ones(B, dtype=bool)
    for k in range(K):
        offset = candidates[:, k, :, None] - bodies.x[:, None, :k]
        distance = bodies.radius[:, None, :k] + bodies.radius[:, k, None, None] + 0.02
        free = (dot(offset, offset) > distance**2).all(-1)
        bodies.x[:, k] = candidates[np.arange(B), k, free.argmax(1)]
        valid &= free.any(1) | (k >= count)
        bodies.x[k >= count, k] = [1e3 + 10 * k, 1e3, 0]  # padding is far away
    aim = uniform("aim", -1.5, 1.5, K, 3) * [1, 1, 0] - bodies.x * [1, 1, 0]
    aim /= np.sqrt(dot(aim, aim))[..., None] + 1e-9
    present = bodies.present[..., None]
    bodies.v = present * (aim * uniform("throw", 0.0, 4.0, K, 1) + [0, 0, 1] * uniform("lift", -1.0, 2.0, K, 1))
    bodies.w = present * uniform("spin", -4.0, 4.0, K, 3)
    bodies.rotation = rotate(uniform("pose", -2.0, 2.0, K, 3), bodies.rotation)
    return bodies, valid
