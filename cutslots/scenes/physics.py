"""Objects thrown onto the ground: simple rigid bodies, a batch of scenes at a time, in float64.

Each body has a mass that grows with its volume and the same inertia about every axis. It meets the ground at points of
its own surface (the lowest of a ball, the corners of a cube, the rims of a cylinder), one impulse at a time with
restitution and Coulomb friction, and other bodies as the ball around it. A step never adds energy: gravity is
integrated so that it cannot, an impulse cannot, and where pushing overlapping bodies apart would, speeds give way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from cutslots.scenes import shapes
from cutslots.scenes.world import cross, dot

if TYPE_CHECKING:
    from cutslots.scenes.draw import Dice

GRAVITY = 9.8
FRAMES_A_SECOND = 12
SUBSTEPS = 16  # a frame
BOUNCE, FRICTION = 0.45, 0.45
FASTEST = 10.0  # units a second
MOST_STEP = 1.0  # no body moves farther in a frame, or the scene is drawn again
CONTACTS = 4  # points of a body that may touch the ground in one step, the lowest ones
CANDIDATES = 24  # places tried for an object before the scene is drawn again

_CORNERS = np.array([[x, y, z] for x in (-1, 1) for y in (-1, 1) for z in (-1, 1)]) * shapes.CUBE
_RIM = np.array([[np.cos(a), np.sin(a)] for a in np.arange(8) * np.pi / 4])
_RIMS = np.concatenate([np.column_stack([_RIM, np.full(8, z)]) for z in (-1, 1)]) * shapes.CYLINDER
POINTS = {"cube": np.concatenate([_CORNERS, _CORNERS]), "cylinder": _RIMS}  # (16, 3) each


class Bodies:
    """The state of all bodies of B scenes, (B, K, ...)."""

    def __init__(self, shape: np.ndarray, size: np.ndarray, present: np.ndarray) -> None:
        self.present, self.size = present, size
        self.radius = shapes.OUTER_RADIUS[shape] * size
        self.mass = size**3
        self.inertia = 0.4 * self.mass * size**2
        self.round = shape == shapes.NAMES.index("sphere")
        points = np.zeros((len(shapes.NAMES), 16, 3))
        for name, own in POINTS.items():
            points[shapes.NAMES.index(name)] = own
        self.points = points[shape] * size[..., None, None]  # (B, K, 16, 3)
        self.x, self.v, self.w = (np.zeros((*shape.shape, 3)) for _ in range(3))
        self.turn = np.broadcast_to(np.eye(3), (*shape.shape, 3, 3)).copy()

    def energy(self) -> np.ndarray:
        """Of every scene, (B,): motion, spin and height."""
        each = self.mass * (dot(self.v, self.v) / 2 + GRAVITY * self.x[..., 2]) + self.inertia * dot(self.w, self.w) / 2
        return (each * self.present).sum(-1)

    def step(self, dt: float) -> None:
        before = self.energy()
        self.v[..., 2] -= GRAVITY * dt
        self.collide()
        touching = self.touch_ground()
        still = 1 - dt * np.where(touching, 1.5, 0.05)[..., None]
        self.v *= still
        self.w *= still
        self.v *= np.minimum(1, FASTEST / np.sqrt(dot(self.v, self.v) + 1e-12))[..., None]
        self.x += dt * self.v
        self.turn = rotate(self.w * dt, self.turn)
        self.keep_apart()
        self.lose(before)

    def touch_ground(self) -> np.ndarray:
        """Impulses at the lowest points; which bodies touch (B, K)."""
        arms = np.stack([dot(self.turn[..., None, i, :], self.points) for i in range(3)], -1)
        arms[self.round] = 0
        arms[self.round, :, 2] = -self.size[self.round][:, None]
        lowest = np.argsort(arms[..., 2], axis=-1, kind="stable")[..., :CONTACTS]
        touching = np.zeros(self.present.shape, dtype=bool)
        for i in range(CONTACTS):
            arm = np.take_along_axis(arms, lowest[..., i, None, None], axis=2)[..., 0, :]
            below = (self.x[..., 2] + arm[..., 2] < 0) & self.present
            touching |= below
            if below.any():
                self.strike(arm, below)
        return touching

    def strike(self, arm: np.ndarray, below: np.ndarray) -> None:
        """One impulse from the ground at x + arm, where the point is below it and sinking."""
        at = self.v + cross(self.w, arm)
        sinking = -at[..., 2]
        give = 1 / self.mass + (arm[..., 0] ** 2 + arm[..., 1] ** 2) / self.inertia
        bounce = np.where(sinking > 0.4, BOUNCE, 0.0)
        push = np.where(below & (sinking > 0), (1 + bounce) * sinking / give, 0.0)
        self.apply(arm, push[..., None] * [0.0, 0.0, 1.0])
        slide = self.v + cross(self.w, arm)
        slide[..., 2] = 0
        speed = np.sqrt(dot(slide, slide)) + 1e-12
        along = slide / speed[..., None]
        lever = cross(arm, along)
        give = 1 / self.mass + dot(lever, lever) / self.inertia
        grip = np.minimum(FRICTION * push, speed / give)
        self.apply(arm, -grip[..., None] * along)

    def apply(self, arm: np.ndarray, impulse: np.ndarray) -> None:
        self.v += impulse / self.mass[..., None]
        self.w += cross(arm, impulse) / self.inertia[..., None]

    def pairs(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """From each body to each other (B, K, K): direction, gap between their balls, and whether both are there."""
        to = self.x[:, None] - self.x[:, :, None]
        distance = np.sqrt(dot(to, to)) + 1e-9
        both = self.present[:, None] & self.present[:, :, None] & ~np.eye(self.present.shape[1], dtype=bool)
        return to / distance[..., None], distance - self.radius[:, None] - self.radius[:, :, None], both

    def collide(self) -> None:
        direction, gap, both = self.pairs()
        closing = -dot(self.v[:, None] - self.v[:, :, None], direction)
        hit = both & (gap < 0) & (closing > 0)
        if hit.any():
            reduced = 1 / (1 / self.mass[:, None] + 1 / self.mass[:, :, None])
            impulse = np.where(hit, (1 + BOUNCE) * closing * reduced, 0.0)
            impulse /= np.maximum(hit.sum(-1, keepdims=True), hit.sum(-2, keepdims=True)).clip(1)
            self.v -= (impulse[..., None] * direction).sum(2) / self.mass[..., None]

    def keep_apart(self) -> None:
        """Moves overlapping balls apart, and what has sunk up."""
        for _ in range(2):
            direction, gap, both = self.pairs()
            overlap = np.where(both & (gap < 0), -gap, 0.0)
            if not overlap.any():
                break
            share = self.mass[:, None] / (self.mass[:, None] + self.mass[:, :, None])  # the lighter moves more
            self.x -= ((overlap * share)[..., None] * direction).sum(2)
        reach = np.where(self.round, self.size, -self.depth())
        self.x[..., 2] += 0.5 * np.maximum(0, reach - self.x[..., 2]) * self.present

    def depth(self) -> np.ndarray:
        """How far the lowest point of a body lies from its centre, as a height (B, K)."""
        return dot(self.turn[..., None, 2, :], self.points).min(-1)

    def lose(self, before: np.ndarray) -> None:
        """Scales speeds so that no scene holds more energy than before."""
        height = (self.mass * GRAVITY * self.x[..., 2] * self.present).sum(-1)
        motion = self.energy() - height
        scale = np.sqrt(np.clip((before - height) / (motion + 1e-12), 0, 1))[:, None, None]
        self.v *= scale
        self.w *= scale


def rotate(angle: np.ndarray, turn: np.ndarray) -> np.ndarray:
    """The rotation by the vector `angle` applied after `turn` (Rodrigues), made orthonormal again."""
    size = np.sqrt(dot(angle, angle))[..., None, None] + 1e-12
    x, y, z = np.moveaxis(angle / size[..., 0], -1, 0)
    zero = np.zeros_like(x)
    skew = np.stack([zero, -z, y, z, zero, -x, -y, x, zero], -1).reshape(turn.shape)
    small = np.eye(3) + np.sin(size) * skew + (1 - np.cos(size)) * _product(skew, skew)
    turn = _product(small, turn)
    x, y = turn[..., 0], turn[..., 1]
    x = x / np.sqrt(dot(x, x))[..., None]
    y = y - dot(x, y)[..., None] * x
    y = y / np.sqrt(dot(y, y))[..., None]
    return np.stack([x, y, cross(x, y)], -1)


def _product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return a[..., :, :1] * b[..., :1, :] + a[..., :, 1:2] * b[..., 1:2, :] + a[..., :, 2:] * b[..., 2:, :]


def simulate(
    dice: Dice, count: np.ndarray, shape: np.ndarray, size: np.ndarray, frames: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Positions (B, F, K, 3), rotations, velocities, and whether all found a place and none jumped (B,)."""
    B, K = shape.shape
    bodies = Bodies(shape, size, np.arange(K) < count[:, None])
    spots = np.stack(
        [dice.between(f"start {i}", *span, K, CANDIDATES) for i, span in enumerate([(-3, 3)] * 2 + [(0, 3)])], -1
    )
    spots[..., 2] += bodies.radius[..., None]
    good = np.ones(B, dtype=bool)
    for k in range(K):
        to = spots[:, k, :, None] - bodies.x[:, None, :k]
        apart = (dot(to, to) > (bodies.radius[:, None, :k] + bodies.radius[:, k, None, None] + 0.02) ** 2).all(-1)
        bodies.x[:, k] = spots[np.arange(B), k, apart.argmax(1)]
        good &= apart.any(1) | (k >= count)
        bodies.x[k >= count, k] = [1e3 + 10 * k, 1e3, 0]  # padding lies far away
    aim = dice.between("aim", -1.5, 1.5, K, 3) * [1, 1, 0] - bodies.x * [1, 1, 0]
    aim /= np.sqrt(dot(aim, aim))[..., None] + 1e-9
    there = bodies.present[..., None]
    bodies.v = there * (aim * dice.between("throw", 0.0, 4.0, K, 1) + [0, 0, 1] * dice.between("lift", -1.0, 2.0, K, 1))
    bodies.w = there * dice.between("spin", -4.0, 4.0, K, 3)
    bodies.turn = rotate(dice.between("pose", -2.0, 2.0, K, 3), bodies.turn)

    states = []
    for _ in range(frames):
        states.append((bodies.x.copy(), bodies.turn.copy(), bodies.v.copy()))
        for _ in range(SUBSTEPS):
            bodies.step(1 / (FRAMES_A_SECOND * SUBSTEPS))
            bodies.x[~bodies.present] = states[0][0][~bodies.present]
            bodies.v[~bodies.present] = 0
            bodies.w[~bodies.present] = 0
    position, rotation, velocity = (np.stack(part, 1) for part in zip(*states, strict=True))
    step = np.diff(position, axis=1)
    good &= (dot(step, step) <= MOST_STEP**2).all((1, 2))
    return position, rotation, velocity, good
