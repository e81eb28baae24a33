"""What a scene holds, drawn from its address alone.

A scene's address is (family, split, seed, index). Every random number is a hash of the address, the number's name and
a counter, so that scene i is the same whatever else is drawn with it, in whatever process. A whole batch of scenes is
drawn at once, in float64; nothing here depends on the size of the picture.

Units are those of CLEVR: the camera stands about 11 away from the origin, objects have radii of 0.4 to 0.85.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cutslots.scenes import materials, physics, render, shapes
from cutslots.scenes.physics import CANDIDATES
from cutslots.scenes.world import Camera, World

SPLITS = ("train", "val", "test")
FEWEST_OBJECTS, MOST_OBJECTS = 3, 10
FRAMES = 24  # of a moving scene
RAYS = 32  # side of the view that decides whether an object is seen
SEEN = 3  # of its RAYS x RAYS rays must meet an object for it to count as visible
SEEN_FRAMES = 6  # in so many frames of a moving scene
ATTEMPTS = 1000
TOGETHER = 64  # scenes drawn at once, at the least

# CLEVR's eight colours, in sRGB.
COLOURS = {
    "gray": (87, 87, 87),
    "red": (173, 35, 35),
    "blue": (42, 75, 215),
    "green": (29, 105, 20),
    "brown": (129, 74, 25),
    "purple": (129, 38, 192),
    "cyan": (41, 208, 208),
    "yellow": (255, 238, 51),
}


@dataclass(frozen=True)
class Family:
    """What a family draws from."""

    shapes: tuple[str, ...]
    materials: tuple[str, ...]
    sizes: tuple[float, ...]
    textured: bool = True
    one_material: bool = False
    frames: int = 1


TRAINING_SHAPES = ("sphere", "cube", "cylinder", "cone")
UNSEEN_SHAPES = ("pyramid", "prism", "dome", "capsule", "wedge")

FAMILIES = {
    "plain": Family(("sphere", "cube", "cylinder"), ("rubber", "metal"), (0.7, 0.4), textured=False),
    "textured": Family(TRAINING_SHAPES, materials.TRAINING, (0.85, 0.6, 0.4)),
    "ood": Family(UNSEEN_SHAPES, materials.UNSEEN, (0.85, 0.6, 0.4)),
    "camo": Family(TRAINING_SHAPES, materials.TRAINING, (0.85, 0.6, 0.4), one_material=True),
    "moving": Family(("sphere", "cube", "cylinder"), ("rubber", "metal"), (0.7, 0.4), textured=False, frames=FRAMES),
}


class Dice:
    """Uniform numbers for a batch of addresses: a hash of (address, name, counter), by the finaliser of SplitMix64.

    Family and split take the upper half of a word and the seed, below 2^32, the lower: no two share a key."""

    def __init__(self, family: str, split: str, seed: int, indices: np.ndarray, attempt: np.ndarray) -> None:
        kind = zlib.crc32(f"{family}/{split}".encode()) << 32
        with np.errstate(over="ignore"):
            key = _mix(np.array([kind], dtype=np.uint64) + np.uint64(seed))
            key = _mix(key + indices.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15))
            self.key = _mix(key + attempt.astype(np.uint64) * np.uint64(0xD1B54A32D192ED03))

    def __call__(self, name: str, *shape: int) -> np.ndarray:
        """Numbers in [0, 1) of shape (B, *shape)."""
        n = int(np.prod(shape, dtype=int))
        counter = np.arange(1, n + 1, dtype=np.uint64)
        with np.errstate(over="ignore"):
            stream = _mix(self.key ^ np.uint64(zlib.crc32(name.encode()) * 0x2545F4914F6CDD1D & 0xFFFFFFFFFFFFFFFF))
            bits = _mix(stream[:, None] + counter * np.uint64(0x9E3779B97F4A7C15))
        return ((bits >> np.uint64(11)) * 2.0**-53).reshape(len(self.key), *shape)

    def between(self, name: str, low: float, high: float, *shape: int) -> np.ndarray:
        return low + (high - low) * self(name, *shape)

    def choice(self, name: str, options: Sequence[float] | np.ndarray, *shape: int) -> np.ndarray:
        return np.asarray(options)[(self(name, *shape) * len(options)).astype(int)]


def _mix(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def draw(
    family: str,
    split: str,
    seed: int,
    indices: Sequence[int] | np.ndarray,
    objects: tuple[int, int] = (FEWEST_OBJECTS, MOST_OBJECTS),
) -> World:
    """The scenes at these addresses. Those that fail a rule are drawn again, each by itself, until they keep it."""
    indices = np.asarray(indices, dtype=np.int64).reshape(-1)
    # How many objects there are does not change from attempt to attempt, or crowded scenes would be rare.
    count = Dice(family, split, seed, indices, 0 * indices).choice("count", np.arange(objects[0], objects[1] + 1))
    left, attempt = np.arange(len(indices)), 0
    done: list[World] = []
    where: list[np.ndarray] = []
    while len(left) or not done:
        # The last few scenes make several attempts at once; the first that succeeds counts.
        tries = int(np.clip(TOGETHER // max(len(left), 1), 1, 8))
        rows, attempts = np.repeat(left, tries), attempt + np.tile(np.arange(tries), len(left))
        world, good = _attempt(family, Dice(family, split, seed, indices[rows], attempts), count[rows])
        good = good.reshape(len(left), tries)
        found = good.any(1)
        done.append(world.pick((np.arange(len(left)) * tries + good.argmax(1))[found]))
        where.append(left[found])
        left, attempt = left[~found], attempt + tries
        if len(left) and attempt > ATTEMPTS:
            raise RuntimeError(f"scene {indices[left[0]]} of {family} found no arrangement in {ATTEMPTS} attempts")
    return World.join(done).pick(np.argsort(np.concatenate(where), kind="stable"))


def _attempt(name: str, dice: Dice, count: np.ndarray) -> tuple[World, np.ndarray]:
    """One draw of every scene, and which of them keep the rules."""
    family, B, K = FAMILIES[name], len(dice.key), MOST_OBJECTS
    shape = dice.choice("shape", [shapes.NAMES.index(s) for s in family.shapes], K)
    size = dice.choice("size", family.sizes, K)
    eye = np.array([7.36, -6.93, 4.96]) + dice.between("eye", -0.5, 0.5, 3)
    target = dice.between("target", -0.25, 0.25, 3) * [1, 1, 0] + [-0.45, 0.42, 0.2]
    camera = Camera(eye, target)

    if family.frames == 1:
        position, good = _place(dice, camera, count, shape, size)
        rotation = _upright(dice.between("turn", 0, 2 * np.pi, K))[:, None]
        position, velocity = position[:, None], np.zeros((B, 1, K, 3))
    else:
        position, rotation, velocity, good = physics.simulate(dice, count, shape, size, family.frames)
    colour, material, paint, finish = _surfaces(name, family, dice)
    key = np.array([-2.0, -7.0, 7.0]) + dice.between("key", -1.5, 1.5, 3)
    fill = np.array([6.0, 3.0, 5.0]) + dice.between("fill", -1.0, 1.0, 3)
    light = np.stack([dice.between(n, a, b) for n, a, b in (("k", 0.85, 1.15), ("f", 0.2, 0.4), ("a", 0.3, 0.45))], 1)
    world = World(
        count, shape, size, colour, position, rotation, velocity, material, paint, finish, eye, target, key, fill, light
    )
    seen = (render.visible(world, RAYS) >= SEEN).sum(1) >= min(SEEN_FRAMES, family.frames)
    return world, good & (seen | (np.arange(K) >= count[:, None])).all(1)


def _place(
    dice: Dice, camera: Camera, count: np.ndarray, shape: np.ndarray, size: np.ndarray
) -> tuple[np.ndarray, ...]:
    """Centres (B, K, 3) of objects that stand on the ground, in view and apart; False where one found no place."""
    B, K = shape.shape
    radius, height = shapes.GROUND_RADIUS[shape] * size, shapes.REST_HEIGHT[shape] * size
    spots = dice.between("spot", -3.6, 3.6, K, CANDIDATES, 2)
    spots = np.concatenate([spots, np.broadcast_to(height[..., None, None], (B, K, CANDIDATES, 1))], -1)
    in_view = (np.abs(camera.project(spots)) < 0.92).all(-1)
    position, good = np.zeros((B, K, 3)), np.ones(B, dtype=bool)
    row = np.arange(B)
    for k in range(K):
        gap = spots[:, k, :, None, :2] - position[:, None, :k, :2]
        least = radius[:, None, :k] + radius[:, k, None, None] + 0.1
        apart = (gap[..., 0] ** 2 + gap[..., 1] ** 2 > least**2).all(-1)
        fits = in_view[:, k] & apart
        position[:, k] = spots[row, k, fits.argmax(1)]
        good &= fits.any(1) | (k >= count)
        position[k >= count, k] = [1e3 + 10 * k, 1e3, 0]  # padding stands far away
    return position, good


def _surfaces(name: str, family: Family, dice: Dice) -> tuple[np.ndarray, ...]:
    """Colour, material, paint and finish of the ground (surface 0) and of every object."""
    B, S = len(dice.key), MOST_OBJECTS + 1
    material = dice.choice("material", [materials.NAMES.index(m) for m in family.materials], S)
    paint = _palette(dice, S)
    finish = np.concatenate(
        [
            np.exp(dice.between("scale", np.log(0.4), np.log(1.5), S, 1)),
            dice.between("bump", 0.0, 1.0, S, 1),
            dice.between("rough", 0.1, 0.9, S, 1),
            dice.between("offset", 0.0, 1.0, S, 3),
        ],
        -1,
    )
    colour = np.full((B, MOST_OBJECTS), -1)
    if name in ("plain", "moving"):
        colour = dice.choice("colour", np.arange(len(COLOURS)), MOST_OBJECTS)
        paint[:, 1:] = linear(np.array(list(COLOURS.values())) / 255.0)[colour][:, :, None]
        grey = dice.between("grey", 0.32, 0.42, 1, 1)
        paint[:, 0], material[:, 0] = grey, materials.NAMES.index("rubber")
    if family.one_material:
        material[:], paint[:], finish[:, :, :3] = material[:, :1], paint[:, :1], finish[:, :1, :3]
    return colour, material, paint, finish


def _palette(dice: Dice, S: int) -> np.ndarray:
    """Three colours (B, S, 3, 3) that go together: a hue, one close to it and any other, from pale to deep."""
    close, other = dice.between("close", -0.12, 0.12, S, 1), dice("other", S, 1)
    hue = dice("hue", S, 1) + np.concatenate([0 * close, close, other], -1)
    saturation = dice.between("saturation", 0.05, 0.75, S, 1) * dice.between("less", 0.5, 1.0, S, 3)
    value = dice.between("value", 0.25, 0.85, S, 1)
    second = np.clip(
        value + dice.choice("sign", [-1.0, 1.0], S, 1) * dice.between("contrast", 0.2, 0.6, S, 1), 0.08, 0.9
    )
    value = np.concatenate([value, second, dice.between("third", 0.1, 0.9, S, 1)], -1)
    wheel = np.abs((hue[..., None] + [0.0, 2 / 3, 1 / 3]) % 1 * 6 - 3) - 1
    return linear(value[..., None] * (1 - saturation[..., None] * (1 - np.clip(wheel, 0, 1))))


def linear(srgb: np.ndarray) -> np.ndarray:
    """sRGB in [0, 1] to linear light (by the square, which is close and exact on every machine)."""
    return srgb * srgb


def _upright(angle: np.ndarray) -> np.ndarray:
    """Rotations (..., 3, 3) about the vertical."""
    c, s, zero, one = np.cos(angle), np.sin(angle), np.zeros_like(angle), np.ones_like(angle)
    return np.stack([c, -s, zero, s, c, zero, zero, zero, one], -1).reshape(*angle.shape, 3, 3)
