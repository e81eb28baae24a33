"""Sampling of scenes: what each one contains, as a pure function of its address.

The address of a scene is (family, split, seed, index). Every random number is a hash of the address, the name of the
number and a counter. So scene i is the same alone, in any batch, in any process and on any device. Whole batches are
sampled at once, in float64, by operations that IEEE 754 defines to the last bit; others run on the CPU. Only roots in
the checks of what is in view may differ in their last bit, which has not changed a scene in tests. Nothing here depends
on the size of the image.

Units are those of CLEVR: the camera is about 11 units away from the origin and objects have radii of 0.4 to 0.85.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from cutslots.scenes import materials, physics, render, shapes
from cutslots.scenes.physics import CANDIDATES
from cutslots.scenes.scene_batch import Camera, Layout, SceneBatch, VariedLayout, VariedSceneBatch, tensor
from cutslots.scenes.variation import GRAIN_SIZE, RANGES, Variation

try:
    from cutslots.scenes import sample_triton as kernels
except ImportError:  # Triton comes with the CUDA builds of torch
    kernels = None  # type: ignore[assignment]

SPLITS = ("train", "val", "test")

MIN_OBJECTS, MAX_OBJECTS = 3, 10

FRAMES = 24  # of a moving scene

# A scene is accepted if at least MIN_VISIBLE_RAYS of VISIBILITY_SIZE x VISIBILITY_SIZE rays hit each object first. In a
# moving scene this must hold in at least MIN_VISIBLE_FRAMES frames.
VISIBILITY_SIZE = 32

MIN_VISIBLE_RAYS = 3

MIN_VISIBLE_FRAMES = 6

MAX_ATTEMPTS = 1000  # per scene

LOOK = ("color", "material", "palette", "finish", "key_light", "fill_light", "light_strength")  # of a `SceneBatch`

BORDER = 0.92  # largest image coordinate of the centre of an object, if scenes are not varied

# The scenes that are left share this many attempts at once, up to MAX_TRIES each: in torch, and where kernels make
# attempts cheap. There the number of batches counts.
ATTEMPTS_PER_BATCH, MAX_TRIES = (64, 4096), (8, 16)


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
    changes the scenes. Numbers are on the device of `indices`. Integers of torch wrap around as those of 64 bits do.
    """

    def __init__(self, family: str, split: str, seed: int, indices: Any, attempt: Any) -> None:
        indices, attempt = torch.as_tensor(indices), torch.as_tensor(attempt)
        group = (zlib.crc32(f"{family}/{split}".encode()) << 32) + seed
        key = _mix(torch.full_like(indices[:1], _signed(group)) if len(indices) else indices)
        key = _mix(key + indices * _signed(0x9E3779B97F4A7C15))
        self.key = _mix(key + attempt * _signed(0xD1B54A32D192ED03))

    @classmethod
    def from_keys(cls, key: Tensor) -> Self:
        """Return the random numbers of addresses by their hashes (B,)."""
        rng = cls.__new__(cls)
        rng.key = key
        return rng

    def __call__(self, name: str, *shape: int) -> Tensor:
        """Return uniform numbers in [0, 1) of shape (B, *shape)."""
        number = _signed(zlib.crc32(name.encode()) * 0x2545F4914F6CDD1D)
        if _has_kernels(self.key.device):
            return kernels.uniform(self.key, number, math.prod(shape)).reshape(len(self.key), *shape)
        counter = torch.arange(1, math.prod(shape) + 1, device=self.key.device)
        stream = _mix(self.key ^ number)
        bits = _mix(stream[:, None] + counter * _signed(0x9E3779B97F4A7C15))
        return (_shift(bits, 11).double() * 2.0**-53).reshape(len(self.key), *shape)

    def uniform(self, name: str, low: float, high: float, *shape: int) -> Tensor:
        """Return uniform numbers in [low, high) of shape (B, *shape)."""
        return low + (high - low) * self(name, *shape)

    def choice(self, name: str, options: Sequence[float], *shape: int) -> Tensor:
        """Return options of shape (B, *shape), each equally likely."""
        number = (self(name, *shape) * len(options)).long()
        return tensor(options, self.key.device)[number]


def _has_kernels(device: torch.device) -> bool:
    return kernels is not None and kernels.is_supported(device)


def _signed(x: int) -> int:
    """Return the signed integer with the lower 64 bits of x."""
    return (x + (1 << 63)) % (1 << 64) - (1 << 63)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Return x shifted to the right, filled with zeros."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shift(x, 31)


def _on_host(function: Callable[[np.ndarray], np.ndarray], x: Tensor) -> Tensor:
    """Return a function of NumPy. Those of torch differ in their last bits from device to device."""
    return torch.from_numpy(function(x.cpu().numpy())).to(x.device)


def sample_scenes(
    family: str,
    split: str,
    seed: int,
    indices: Sequence[int] | np.ndarray,
    num_objects: tuple[int, int] = (MIN_OBJECTS, MAX_OBJECTS),
    device: torch.device | str = "cpu",
    variation: Variation = "none",
) -> SceneBatch:
    """Return the scenes at these addresses as tensors, on the device if it is a GPU of CUDA, else on the CPU.

    An invalid scene is sampled again, independently of the others. Varied scenes have addresses of their own.
    """
    group = family if variation == "none" else f"{family} {variation}"
    make, complete = (_attempt, _complete) if variation == "none" else (_attempt_varied, _complete_varied)
    index = np.asarray(indices, dtype=np.int64).reshape(-1)
    device = torch.device(device if torch.device(device).type == "cuda" else "cpu")  # others may have no float64
    at = torch.from_numpy(index).to(device)
    # All attempts at a scene have the same number of objects. Otherwise crowded scenes would be rare.
    low, high = num_objects
    count = HashRNG(group, split, seed, at, 0 * at).choice("count", range(low, high + 1))
    has_kernels = _has_kernels(at.device) and FAMILIES[family].frames == 1  # videos are simulated on the CPU
    remaining, attempt = np.arange(len(index)), 0
    accepted: list[Layout] = []
    keys: list[Tensor] = []  # of the accepted attempts
    accepted_rows: list[np.ndarray] = []
    while len(remaining) or not accepted:
        # The last few scenes make several attempts at once; the first valid attempt counts.
        tries = ATTEMPTS_PER_BATCH[has_kernels] // max(len(remaining), 1)
        tries = min(max(tries, 1), MAX_TRIES[has_kernels])
        row = torch.from_numpy(remaining).to(device).repeat_interleave(tries)
        number = torch.arange(attempt, attempt + tries, device=device).repeat(len(remaining))
        rng = HashRNG(group, split, seed, at[row], number)
        layouts, is_valid = make(family, rng, count[row])
        valid = is_valid.cpu().numpy().reshape(len(remaining), tries)
        found = valid.any(1)
        first = torch.from_numpy((np.arange(len(remaining)) * tries + valid.argmax(1))[found]).to(device)
        accepted.append(layouts.select(first))
        keys.append(rng.key[first])
        accepted_rows.append(remaining[found])
        remaining, attempt = remaining[~found], attempt + tries
        if len(remaining) and attempt > MAX_ATTEMPTS:
            raise RuntimeError(
                f"scene {index[remaining[0]]} of {family} has no valid arrangement after {MAX_ATTEMPTS} attempts; "
                "use another seed or fewer objects"
            )
    order = torch.from_numpy(np.argsort(np.concatenate(accepted_rows), kind="stable")).to(device)
    return complete(
        family, type(accepted[0]).concatenate(accepted).select(order), HashRNG.from_keys(torch.cat(keys)[order])
    )


def _attempt(name: str, rng: HashRNG, count: Tensor) -> tuple[Layout, Tensor]:
    """Return one attempt at the layout of every scene, and which of them are valid (B,)."""
    family, K, device = FAMILIES[name], MAX_OBJECTS, rng.key.device
    shape = rng.choice("shape", [shapes.NAMES.index(s) for s in family.shapes], K)
    size = rng.choice("size", family.sizes, K)
    eye = tensor([7.36, -6.93, 4.96], device) + rng.uniform("eye", -0.5, 0.5, 3)
    target = rng.uniform("target", -0.25, 0.25, 3) * tensor([1, 1, 0], device) + tensor([-0.45, 0.42, 0.2], device)
    position, rotation, velocity, valid = _arrange(family, rng, Camera(eye, target), count, shape, size)
    layouts = Layout(count, shape, size, position, rotation, velocity, eye, target)
    return layouts, valid & _all_visible(layouts, family)


def _arrange(
    family: Family,
    rng: HashRNG,
    camera: Camera,
    count: Tensor,
    shape: Tensor,
    size: Tensor,
    border: float | Tensor = BORDER,
) -> tuple[Tensor, ...]:
    """Return position, rotation and velocity of all objects in all frames, and which scenes had room (B,)."""
    if family.frames > 1:
        return physics.simulate(rng, count, shape, size, family.frames)
    position, valid = _place(rng, camera, count, shape, size, border)
    rotation = _yaw(rng.uniform("turn", 0, 2 * np.pi, MAX_OBJECTS))[:, None]
    return position[:, None], rotation, torch.zeros_like(position)[:, None], valid


def _all_visible(scenes: Layout, family: Family) -> Tensor:
    """Return whether enough rays hit every object (B,)."""
    visible = render.count_visible_pixels(scenes, VISIBILITY_SIZE) >= MIN_VISIBLE_RAYS
    visible = visible.sum(1) >= min(MIN_VISIBLE_FRAMES, family.frames)
    padding = torch.arange(MAX_OBJECTS, device=visible.device) >= scenes.count[:, None]
    return (visible | padding).all(1)


def _complete(name: str, layouts: Layout, rng: HashRNG) -> SceneBatch:
    """Return scenes with these layouts. Surfaces and lights do not decide whether an attempt is valid."""
    look = (*_surfaces(FAMILIES[name], rng), *_lights(rng))
    return SceneBatch(**vars(layouts), **dict(zip(LOOK, look, strict=True)))


def _lights(rng: HashRNG) -> tuple[Tensor, Tensor, Tensor]:
    """Return positions of key and fill light and the strengths of key, fill and ambient light, each (B, 3)."""
    key = tensor([-2.0, -7.0, 7.0], rng.key.device) + rng.uniform("key", -1.5, 1.5, 3)
    fill = tensor([6.0, 3.0, 5.0], rng.key.device) + rng.uniform("fill", -1.0, 1.0, 3)
    ranges = (("k", 0.85, 1.15), ("f", 0.2, 0.4), ("a", 0.3, 0.45))
    return key, fill, torch.stack([rng.uniform(name, low, high) for name, low, high in ranges], 1)


def _place(
    rng: HashRNG, camera: Camera, count: Tensor, shape: Tensor, size: Tensor, border: float | Tensor
) -> tuple[Tensor, Tensor]:
    """Return centres (B, K, 3) of objects on the ground, in view and not touching, and which scenes had room (B,)."""
    (B, K), device = shape.shape, shape.device
    radius, height = (tensor(x, device)[shape] * size for x in (shapes.GROUND_RADIUS, shapes.REST_HEIGHT))
    candidates = rng.uniform("spot", -3.6, 3.6, K, CANDIDATES, 2)
    candidates = torch.cat([candidates, height[..., None, None].expand(B, K, CANDIDATES, 1)], -1)
    in_view = (camera.project(candidates).abs() < border).all(-1)
    position, valid = candidates.new_zeros(B, K, 3), torch.ones(B, dtype=torch.bool, device=device)
    for k in range(K):
        offset = candidates[:, k, :, None, :2] - position[:, None, :k, :2]
        distance = radius[:, None, :k] + radius[:, k, None, None] + 0.1
        apart = offset[..., 0] * offset[..., 0] + offset[..., 1] * offset[..., 1] > distance * distance
        free = in_view[:, k] & apart.all(-1)
        found = candidates[torch.arange(B, device=device), k, free.int().argmax(1)]
        valid &= free.any(1) | (k >= count)
        padding = tensor([1e3 + 10 * k, 1e3, 0.0], device)  # far away
        position[:, k] = torch.where((k >= count)[:, None], padding, found)
    return position, valid


def _surfaces(family: Family, rng: HashRNG) -> tuple[Tensor, ...]:
    """Return color, material, palette and finish of the ground (surface 0) and of every object."""
    (B,), S, device = rng.key.shape, MAX_OBJECTS + 1, rng.key.device
    material = rng.choice("material", [materials.NAMES.index(m) for m in family.materials], S)
    palette = _sample_palette(rng, S)
    scale = _on_host(np.exp, rng.uniform("scale", np.log(0.4), np.log(1.5), S, 1))
    bump, roughness = rng.uniform("bump", 0.0, 1.0, S, 1), rng.uniform("rough", 0.1, 0.9, S, 1)
    finish = torch.cat([scale, bump, roughness, rng.uniform("offset", 0.0, 1.0, S, 3)], -1)
    color = torch.full((B, MAX_OBJECTS), -1, device=device)
    if not family.textured:
        color = rng.choice("colour", range(len(COLORS)), MAX_OBJECTS)
        colors = tensor(srgb_to_linear(np.array(list(COLORS.values())) / 255.0), device)
        palette[:, 1:] = colors[color][:, :, None]
        palette[:, 0] = rng.uniform("grey", 0.32, 0.42, 1, 1)
        material[:, 0] = materials.NAMES.index("rubber")
    if family.one_material:
        material, palette = material[:, :1].expand(B, S), palette[:, :1].expand(B, S, 3, 3)
        finish = torch.cat([finish[:, :1, :3].expand(B, S, 3), finish[:, :, 3:]], -1)
    return color, material, palette, finish


def _sample_palette(rng: HashRNG, S: int) -> Tensor:
    """Return three linear RGB colors (B, S, 3, 3) for each surface: one hue, a similar hue and any other hue."""
    close, other = rng.uniform("close", -0.12, 0.12, S, 1), rng("other", S, 1)
    hue = rng("hue", S, 1) + torch.cat([0 * close, close, other], -1)
    saturation = rng.uniform("saturation", 0.05, 0.75, S, 1) * rng.uniform("less", 0.5, 1.0, S, 3)
    value = rng.uniform("value", 0.25, 0.85, S, 1)
    second = value + rng.choice("sign", [-1.0, 1.0], S, 1) * rng.uniform("contrast", 0.2, 0.6, S, 1)
    value = torch.cat([value, second.clamp(0.08, 0.9), rng.uniform("third", 0.1, 0.9, S, 1)], -1)
    wheel = ((hue[..., None] + tensor([0.0, 2 / 3, 1 / 3], hue.device)) % 1 * 6 - 3).abs() - 1
    return srgb_to_linear(value[..., None] * (1 - saturation[..., None] * (1 - wheel.clamp(0, 1))))


def srgb_to_linear(srgb: Any) -> Any:
    """Return linear values of sRGB in [0, 1], approximated by the square, which is the same on every machine."""
    return srgb * srgb


def _yaw(angle: Tensor) -> Tensor:
    """Return rotations (..., 3, 3) about the vertical axis."""
    c, s = _on_host(lambda x: np.stack([np.cos(x), np.sin(x)]), angle)
    zero, one = torch.zeros_like(angle), torch.ones_like(angle)
    return torch.stack([c, -s, zero, s, c, zero, zero, zero, one], -1).reshape(*angle.shape, 3, 3)


# -------------------------------------------------------------------------------------------------------------- varied


def _attempt_varied(name: str, rng: HashRNG, count: Tensor) -> tuple[Layout, Tensor]:
    """Return one attempt at the layout of every varied scene, and which of them are valid (B,)."""
    family, K, device = FAMILIES[name], MAX_OBJECTS, rng.key.device
    shape = rng.choice("shape", [shapes.NAMES.index(s) for s in family.shapes], K)
    size = rng.choice("size", family.sizes, K) * _vary(rng, "object size", K)
    target = rng.uniform("target", -0.4, 0.4, 3) * tensor([1, 1, 0], device) + tensor([0, 0, 0.2], device)
    eye = target + _on_sphere(rng, ["camera"], [_vary(rng, "camera distance")])[0]
    half_width = _on_host(np.tan, _vary(rng, "field of view") * (np.pi / 360))
    camera, border = Camera(eye, target, half_width), _vary(rng, "border")[:, None, None, None]
    position, rotation, velocity, valid = _arrange(family, rng, camera, count, shape, size, border)
    layouts = VariedLayout(count, shape, size, position, rotation, velocity, eye, target, half_width)
    return layouts, valid & _all_visible(layouts, family)


def _complete_varied(name: str, layouts: Layout, rng: HashRNG) -> SceneBatch:
    """Return varied scenes with these layouts."""
    look = (*_varied_surfaces(FAMILIES[name], rng), *_varied_lights(rng))
    names = (*LOOK, "light_radius", "light", "sensor")
    return VariedSceneBatch(**vars(layouts), **dict(zip(names, look, strict=True)))


def _vary(rng: HashRNG, name: str, *shape: int) -> Tensor:
    return rng.uniform(name, *RANGES[name], *shape)


def _on_sphere(rng: HashRNG, names: Sequence[str], radii: Sequence[Tensor]) -> Tensor:
    """Return points (names, B, 3) at the azimuths and elevations of these names, by one copy to the CPU and back."""
    angles = [_vary(rng, f"{name} {angle}") * (np.pi / 180) for angle in ("azimuth", "elevation") for name in names]
    cos, sin = _on_host(lambda x: np.stack([np.cos(x), np.sin(x)]), torch.stack(angles))
    radius, n = torch.stack(list(radii)), len(names)
    across = radius * cos[n:]
    return torch.stack([across * cos[:n], across * sin[:n], radius * sin[n:]], 2)


def _varied_lights(rng: HashRNG) -> tuple[Tensor, ...]:
    """Return the fields of light, and those of `VariedSceneBatch`."""
    names = ("key", "fill", "back")
    distances = [rng.uniform(f"{name} distance", *RANGES["light distance"]) for name in names]
    positions = _on_sphere(rng, names, distances)
    key = torch.ones_like(positions[0][:, 0])
    fill, back, ambient = (_vary(rng, f"{name} strength") for name in ("fill", "back", "ambient"))
    # The sum of what the lights give to the ground at the origin is the exposure. So no scene is too dark or bright.
    heights = _heights(positions)
    given = ambient + key * heights[0] + fill * heights[1] + back * heights[2]
    gain = _vary(rng, "exposure") / given
    strength = torch.stack([key, fill, ambient], 1) * gain[:, None]
    light = torch.cat([positions[2], torch.stack([back * gain, _vary(rng, "falloff"), _vary(rng, "polish")], 1)], 1)
    return positions[0], positions[1], strength, _vary(rng, "key radius"), light, _sensor(rng)


def _heights(position: Tensor) -> Tensor:
    """Return the sines of the elevations of points (..., 3)."""
    x, y, z = position.unbind(-1)
    return z / _on_host(np.sqrt, x * x + y * y + z * z)  # of torch on a CPU, the last bit may differ


def _sensor(rng: HashRNG) -> Tensor:
    """Return the properties of the sensor (B, 9), in the order of `VariedSceneBatch`."""
    warmth, tint = _vary(rng, "warmth"), _vary(rng, "tint")
    others = [_vary(rng, name) for name in ("tone", "haze", "vignette", "noise")]
    place = rng.choice("grain", range(GRAIN_SIZE), 2).double()
    return torch.cat([torch.stack([1 + warmth, 1 + tint, 1 - warmth, *others], 1), place], 1)


def _varied_surfaces(family: Family, rng: HashRNG) -> tuple[Tensor, ...]:
    """Return color, material, palette and finish of the ground and of every object, with other patterns and grays."""
    color, material, palette, finish = _surfaces(family, rng)
    if family.textured:
        # Surfaces of one material share their pattern.
        S = 1 if family.one_material else MAX_OBJECTS + 1
        low, high = np.log(RANGES["pattern scale"])
        scale = _on_host(np.exp, rng.uniform("pattern scale", low, high, S, 1)).expand(-1, MAX_OBJECTS + 1, 1)
        finish = torch.cat([scale, finish[..., 1:]], 2)
        palette = _scale_about_mean(palette, _vary(rng, "pattern contrast", S, 1, 1), 2)
    else:
        palette[:, 0] = _vary(rng, "ground", 1, 1)
    saturation = _vary(rng, "scene saturation", 1, 1, 1)
    return color, material, _scale_about_mean(palette, saturation, 3).clamp(0, 1), finish


def _scale_about_mean(x: Tensor, factor: Tensor, dim: int) -> Tensor:
    """Return x with its differences from the mean of the three entries along an axis scaled."""
    first, second, third = x.unbind(dim)
    mean = ((first + second + third) / (0 * first + 3)).unsqueeze(dim)  # CUDA divides inexactly by a number
    return mean + factor * (x - mean)
