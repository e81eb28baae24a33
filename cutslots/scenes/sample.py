"""Sampling of scenes: what each one contains, as a pure function of its address.

The address of a scene is (family, split, seed, index). Every random number is a hash of the address, the name of the
number and a counter. So scene i is the same alone, in any batch and in any process. Whole batches are sampled at once,
in float64. Nothing here depends on the size of the image.

Units are those of CLEVR: the camera is about 11 units away from the origin and objects have radii of 0.4 to 0.85.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cutslots.scenes import materials, physics, render, shapes
from cutslots.scenes.physics import CANDIDATES
from cutslots.scenes.scene_batch import Camera, SceneBatch

SPLITS = ("train", "val", "test")

MIN_OBJECTS, MAX_OBJECTS = 3, 10

FRAMES = 24  # of a moving scene

# A scene is accepted if at least MIN_VISIBLE_RAYS of VISIBILITY_SIZE x VISIBILITY_SIZE rays hit each object first. In a
# moving scene this must hold in at least MIN_VISIBLE_FRAMES frames.
VISIBILITY_SIZE = 32

MIN_VISIBLE_RAYS = 3

MIN_VISIBLE_FRAMES = 6

MAX_ATTEMPTS = 1000  # per scene

ATTEMPTS_PER_BATCH = 64  # the last scenes of a batch share these


# CLEVR's eight colors, in sRGB.
COLORS = {
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
    """What the scenes of a family are sampled from."""

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


class HashRNG:
    """Random numbers of a batch of addresses: hashes of (address, name, counter) by the finalizer of SplitMix64.

    Family and split are hashed into the upper half of a 64-bit word and the seed, below 2^32, is its lower half. So no
    two of (family, split, seed) share a key. Names of families, splits and numbers are hashed: renaming one of them
    changes the scenes.
    """

    def __init__(self, family: str, split: str, seed: int, indices: np.ndarray, attempt: np.ndarray) -> None:
        group = zlib.crc32(f"{family}/{split}".encode()) << 32
        with np.errstate(over="ignore"):
            key = _mix(np.array([group], dtype=np.uint64) + np.uint64(seed))
            key = _mix(key + indices.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15))
            self.key = _mix(key + attempt.astype(np.uint64) * np.uint64(0xD1B54A32D192ED03))

    def __call__(self, name: str, *shape: int) -> np.ndarray:
        """Return uniform numbers in [0, 1) of shape (B, *shape)."""
        n = int(np.prod(shape, dtype=int))
        counter = np.arange(1, n + 1, dtype=np.uint64)
        with np.errstate(over="ignore"):
            stream = _mix(self.key ^ np.uint64(zlib.crc32(name.encode()) * 0x2545F4914F6CDD1D & 0xFFFFFFFFFFFFFFFF))
            bits = _mix(stream[:, None] + counter * np.uint64(0x9E3779B97F4A7C15))
        return ((bits >> np.uint64(11)) * 2.0**-53).reshape(len(self.key), *shape)

    def uniform(self, name: str, low: float, high: float, *shape: int) -> np.ndarray:
        """Return uniform numbers in [low, high) of shape (B, *shape)."""
        return low + (high - low) * self(name, *shape)

    def choice(self, name: str, options: Sequence[float] | np.ndarray, *shape: int) -> np.ndarray:
        """Return options of shape (B, *shape), each equally likely."""
        return np.asarray(options)[(self(name, *shape) * len(options)).astype(int)]


def _mix(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def sample_scenes(
    family: str,
    split: str,
    seed: int,
    indices: Sequence[int] | np.ndarray,
    num_objects: tuple[int, int] = (MIN_OBJECTS, MAX_OBJECTS),
) -> SceneBatch:
    """Return the scenes at these addresses. An invalid scene is sampled again, independently of the others."""
    indices = np.asarray(indices, dtype=np.int64).reshape(-1)
    # All attempts at a scene have the same number of objects. Otherwise crowded scenes would be rare.
    low, high = num_objects
    count = HashRNG(family, split, seed, indices, 0 * indices).choice("count", np.arange(low, high + 1))
    remaining, attempt = np.arange(len(indices)), 0
    accepted: list[SceneBatch] = []
    accepted_rows: list[np.ndarray] = []
    while len(remaining) or not accepted:
        # The last few scenes make several attempts at once; the first valid attempt counts.
        tries = int(np.clip(ATTEMPTS_PER_BATCH // max(len(remaining), 1), 1, 8))
        rows, attempts = np.repeat(remaining, tries), attempt + np.tile(np.arange(tries), len(remaining))
        scenes, valid = _attempt(family, HashRNG(family, split, seed, indices[rows], attempts), count[rows])
        valid = valid.reshape(len(remaining), tries)
        found = valid.any(1)
        accepted.append(scenes.select((np.arange(len(remaining)) * tries + valid.argmax(1))[found]))
        accepted_rows.append(remaining[found])
        remaining, attempt = remaining[~found], attempt + tries
        if len(remaining) and attempt > MAX_ATTEMPTS:
            raise RuntimeError(
                f"scene {indices[remaining[0]]} of {family} has no valid arrangement after {MAX_ATTEMPTS} attempts; "
                "use another seed or fewer objects"
            )
    return SceneBatch.concatenate(accepted).select(np.argsort(np.concatenate(accepted_rows), kind="stable"))


def _attempt(name: str, rng: HashRNG, count: np.ndarray) -> tuple[SceneBatch, np.ndarray]:
    """Return one attempt at every scene, and which of them are valid (B,)."""
    family, B, K = FAMILIES[name], len(rng.key), MAX_OBJECTS
    shape = rng.choice("shape", [shapes.NAMES.index(s) for s in family.shapes], K)
    size = rng.choice("size", family.sizes, K)
    eye = np.array([7.36, -6.93, 4.96]) + rng.uniform("eye", -0.5, 0.5, 3)
    target = rng.uniform("target", -0.25, 0.25, 3) * [1, 1, 0] + [-0.45, 0.42, 0.2]
    if family.frames == 1:
        position, valid = _place(rng, Camera(eye, target), count, shape, size)
        rotation = _yaw(rng.uniform("turn", 0, 2 * np.pi, K))[:, None]
        position, velocity = position[:, None], np.zeros((B, 1, K, 3))
    else:
        position, rotation, velocity, valid = physics.simulate(rng, count, shape, size, family.frames)
    color, material, palette, finish = _surfaces(family, rng)
    scenes = SceneBatch(
        count, shape, size, color, position, rotation, velocity, material, palette, finish, eye, target, *_lights(rng)
    )
    visible = render.count_visible_pixels(scenes, VISIBILITY_SIZE) >= MIN_VISIBLE_RAYS
    visible = visible.sum(1) >= min(MIN_VISIBLE_FRAMES, family.frames)
    return scenes, valid & (visible | (np.arange(K) >= count[:, None])).all(1)


def _lights(rng: HashRNG) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return positions of key and fill light and the strengths of key, fill and ambient light, each (B, 3)."""
    key = np.array([-2.0, -7.0, 7.0]) + rng.uniform("key", -1.5, 1.5, 3)
    fill = np.array([6.0, 3.0, 5.0]) + rng.uniform("fill", -1.0, 1.0, 3)
    ranges = (("k", 0.85, 1.15), ("f", 0.2, 0.4), ("a", 0.3, 0.45))
    return key, fill, np.stack([rng.uniform(name, low, high) for name, low, high in ranges], 1)


def _place(
    rng: HashRNG, camera: Camera, count: np.ndarray, shape: np.ndarray, size: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return centres (B, K, 3) of objects on the ground, in view and not touching, and which scenes had room (B,)."""
    B, K = shape.shape
    radius, height = shapes.GROUND_RADIUS[shape] * size, shapes.REST_HEIGHT[shape] * size
    candidates = rng.uniform("spot", -3.6, 3.6, K, CANDIDATES, 2)
    candidates = np.concatenate([candidates, np.broadcast_to(height[..., None, None], (B, K, CANDIDATES, 1))], -1)
    in_view = (np.abs(camera.project(candidates)) < 0.92).all(-1)
    position, valid = np.zeros((B, K, 3)), np.ones(B, dtype=bool)
    for k in range(K):
        offset = candidates[:, k, :, None, :2] - position[:, None, :k, :2]
        distance = radius[:, None, :k] + radius[:, k, None, None] + 0.1
        free = in_view[:, k] & (offset[..., 0] ** 2 + offset[..., 1] ** 2 > distance**2).all(-1)
        position[:, k] = candidates[np.arange(B), k, free.argmax(1)]
        valid &= free.any(1) | (k >= count)
        position[k >= count, k] = [1e3 + 10 * k, 1e3, 0]  # padding is far away
    return position, valid


def _surfaces(family: Family, rng: HashRNG) -> tuple[np.ndarray, ...]:
    """Return color, material, palette and finish of the ground (surface 0) and of every object."""
    B, S = len(rng.key), MAX_OBJECTS + 1
    material = rng.choice("material", [materials.NAMES.index(m) for m in family.materials], S)
    palette = _sample_palette(rng, S)
    finish = np.concatenate(
        [
            np.exp(rng.uniform("scale", np.log(0.4), np.log(1.5), S, 1)),
            rng.uniform("bump", 0.0, 1.0, S, 1),
            rng.uniform("rough", 0.1, 0.9, S, 1),
            rng.uniform("offset", 0.0, 1.0, S, 3),
        ],
        -1,
    )
    color = np.full((B, MAX_OBJECTS), -1)
    if not family.textured:
        color = rng.choice("colour", np.arange(len(COLORS)), MAX_OBJECTS)
        palette[:, 1:] = srgb_to_linear(np.array(list(COLORS.values())) / 255.0)[color][:, :, None]
        grey = rng.uniform("grey", 0.32, 0.42, 1, 1)
        palette[:, 0], material[:, 0] = grey, materials.NAMES.index("rubber")
    if family.one_material:
        material[:], palette[:], finish[:, :, :3] = material[:, :1], palette[:, :1], finish[:, :1, :3]
    return color, material, palette, finish


def _sample_palette(rng: HashRNG, S: int) -> np.ndarray:
    """Return three linear RGB colors (B, S, 3, 3) for each surface: one hue, a similar hue and any other hue."""
    close, other = rng.uniform("close", -0.12, 0.12, S, 1), rng("other", S, 1)
    hue = rng("hue", S, 1) + np.concatenate([0 * close, close, other], -1)
    saturation = rng.uniform("saturation", 0.05, 0.75, S, 1) * rng.uniform("less", 0.5, 1.0, S, 3)
    value = rng.uniform("value", 0.25, 0.85, S, 1)
    second = np.clip(value + rng.choice("sign", [-1.0, 1.0], S, 1) * rng.uniform("contrast", 0.2, 0.6, S, 1), 0.08, 0.9)
    value = np.concatenate([value, second, rng.uniform("third", 0.1, 0.9, S, 1)], -1)
    wheel = np.abs((hue[..., None] + [0.0, 2 / 3, 1 / 3]) % 1 * 6 - 3) - 1
    return srgb_to_linear(value[..., None] * (1 - saturation[..., None] * (1 - np.clip(wheel, 0, 1))))


def srgb_to_linear(srgb: np.ndarray) -> np.ndarray:
    """Return linear values of sRGB in [0, 1], approximated by the square, which is the same on every machine."""
    return srgb * srgb


def _yaw(angle: np.ndarray) -> np.ndarray:
    """Return rotations (..., 3, 3) about the vertical axis."""
    c, s, zero, one = np.cos(angle), np.sin(angle), np.zeros_like(angle), np.ones_like(angle)
    return np.stack([c, -s, zero, s, c, zero, zero, zero, one], -1).reshape(*angle.shape, 3, 3)
