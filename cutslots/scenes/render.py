"""Pictures and masks of a batch of scenes, by casting rays: plain torch, on any device.

A pixel's mask is what the ray through its centre meets. Its colour is the mean over four more rays, each with its own
point of the key light, which softens shadows as it smooths edges. Rays and objects are paired by their bounding balls
first, so that little is computed for nothing; what is seen is then shaded all at once.

Every operation works on elements alone, in an order that does not depend on the batch: a scene has the same pixels
alone and in company.

Vectors have their components first. Shapes: S scenes (one frame of each), n rays of each scene, K objects; lists of
(scene, ray, object) run over m.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from cutslots.scenes import materials, shapes
from cutslots.scenes.shapes import dot
from cutslots.scenes.world import Camera, World

SAMPLES = ((-0.125, -0.375), (0.375, -0.125), (0.125, 0.375), (-0.375, 0.125))  # of a pixel, in pixels from its centre
LIGHT_RADIUS = 0.7
CHUNK = {"cpu": 16 * 64**2, "cuda": 128 * 128**2}  # pixels at a time


@dataclass
class Batch:
    """A frame of each of S scenes, as tensors; for the fields see `World`."""

    eye: Tensor  # (3, S)
    view: Tensor  # (3, 3, S) to the right border, to the lower border, forward
    present: Tensor  # (S, K)
    shape: Tensor  # (S, K)
    size: Tensor  # (S, K)
    outer: Tensor  # (S, K) radius of the ball around each object
    centre: Tensor  # (3, S, K)
    rotation: Tensor  # (3, 3, S, K)
    material: Tensor  # (S, K + 1)
    paint: Tensor  # (3 colours, 3, S, K + 1)
    finish: Tensor  # (6, S, K + 1)
    key: Tensor  # (3, S)
    fill: Tensor  # (3, S)
    light: Tensor  # (3, S)


@dataclass
class Rays:
    origin: Tensor  # (3, S, n) or (3, S, 1)
    direction: Tensor  # (3, S, n), of unit length


class Rendered(NamedTuple):
    """F frames of B scenes, with K objects at the most."""

    image: Tensor  # (B, F, 3, size, size) uint8
    mask: Tensor  # (B, F, size, size) uint8, 0 for the ground, else the number of the object
    pixels: Tensor  # (B, F, K) how many pixels show each object
    whole: Tensor  # (B, F, K) how many would, if nothing stood before it


def usable(device: torch.device | str) -> torch.device:
    """The device, or a sentence if it cannot be used here."""
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, ImportError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"device is '{device}', which cannot be used here: {reason}") from None


def render(world: World, size: int, device: torch.device | str = "cpu") -> Rendered:
    """Every frame of every scene."""
    device = usable(device)
    B, F = world.position.shape[:2]
    rows, frames = (index.ravel() for index in np.indices((B, F)))
    step = max(1, CHUNK.get(device.type, 1) // size**2)
    pieces = [slice(i, i + step) for i in range(0, B * F, step)]
    with torch.no_grad():
        done = [_render(_upload(world, rows[piece], frames[piece], device), size) for piece in pieces]
    if not done:
        K, image = world.shape.shape[1], torch.zeros(B, F, 3, size, size, dtype=torch.uint8, device=device)
        none = torch.zeros(B, F, K, dtype=torch.long, device=device)
        return Rendered(image, image[:, :, 0], none, none)
    return Rendered(*(torch.cat(part).unflatten(0, (B, F)) for part in zip(*done, strict=True)))


def visible(world: World, size: int) -> np.ndarray:
    """How many of size x size pixels show each object (B, F, K). On the CPU always: all machines decide alike."""
    B, F = world.position.shape[:2]
    rows, frames = (index.ravel() for index in np.indices((B, F)))
    step = max(1, CHUNK["cpu"] * 4 // size**2)
    counts = [torch.zeros(0, world.shape.shape[1], dtype=torch.long)]
    with torch.no_grad():
        for i in range(0, B * F, step):
            batch = _upload(world, rows[i : i + step], frames[i : i + step], torch.device("cpu"))
            _, surface, _, _ = _first_hit(batch, _primary(batch, size, ((0.0, 0.0),)), count=0)
            counts.append(_pixels(batch, surface))
    return torch.cat(counts).unflatten(0, (B, F)).numpy()


def _pixels(batch: Batch, surface: Tensor) -> Tensor:
    """How often each object's number stands in surface (S, n): (S, K)."""
    return torch.stack([(surface == k + 1).sum(1) for k in range(batch.shape.shape[1])], 1)


def _upload(world: World, rows: np.ndarray, frames: np.ndarray, device: torch.device) -> Batch:
    def put(x: np.ndarray, leading: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
        """To the device, with so many of the last axes first."""
        axes = [*range(x.ndim - leading, x.ndim), *range(x.ndim - leading)]
        return torch.as_tensor(np.ascontiguousarray(x.transpose(axes)), dtype=dtype).to(device, non_blocking=True)

    shape, size = world.shape[rows], world.size[rows]
    camera = Camera(world.camera[rows], world.target[rows])
    return Batch(
        eye=put(camera.eye, 1),
        view=put(np.stack([camera.right * camera.half, camera.down * camera.half, camera.forward], 1), 2),
        present=put(np.arange(shape.shape[1]) < world.count[rows, None], dtype=torch.bool),
        shape=put(shape, dtype=torch.long),
        size=put(size),
        outer=put(shapes.OUTER_RADIUS[shape] * size * 1.001),
        centre=put(world.position[rows, frames], 1),
        rotation=put(world.rotation[rows, frames], 2),
        material=put(world.material[rows], dtype=torch.long),
        paint=put(world.paint[rows], 2),
        finish=put(world.finish[rows], 1),
        key=put(world.key[rows], 1),
        fill=put(world.fill[rows], 1),
        light=put(world.light[rows], 1),
    )


def _render(batch: Batch, size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    S, n = batch.eye.shape[1], size * size
    rays = _primary(batch, size, ((0.0, 0.0), *SAMPLES))
    far, surface, normal, whole = _first_hit(batch, rays, count=n)
    mask = surface[:, :n]
    samples = Rays(rays.origin, rays.direction[..., n:])
    colour = _shade(batch, samples, far[:, n:], surface[:, n:], normal[..., n:])
    colour = colour.reshape(3, S, len(SAMPLES), size, size)
    mean = ((colour[:, :, 0] + colour[:, :, 1]) + (colour[:, :, 2] + colour[:, :, 3])) / len(SAMPLES)
    image = (mean.clamp(0, 1).sqrt() * 255 + 0.5).to(torch.uint8)  # from linear light
    return image.transpose(0, 1).contiguous(), mask.to(torch.uint8).reshape(S, size, size), _pixels(batch, mask), whole


def _primary(batch: Batch, size: int, samples: tuple[tuple[float, float], ...]) -> Rays:
    """The rays from the eye, sample by sample, through places so many pixels right of and below each pixel's centre."""
    right, down, forward = batch.view[..., None, None]
    pixel = torch.arange(size, device=right.device) + 0.5
    parts = []
    for x, y in samples:
        u, v = ((pixel + offset) / size * 2 - 1 for offset in (x, y))
        parts.append((forward + u * right + v[:, None] * down).flatten(2))
    d = torch.cat(parts, 2)
    return Rays(batch.eye[..., None], d / dot(d, d).sqrt())


def _near(batch: Batch, rays: Rays) -> tuple[Tensor, Tensor, Tensor]:
    """The (scene, ray, object) where a ray meets the ball around an object."""
    c, o, d = batch.centre[:, :, None], rays.origin[..., None], rays.direction[..., None]
    along = dot(c, d) - dot(o, d)
    square = dot(c, c) - 2 * dot(c, o) + dot(o, o)
    radius = batch.outer[:, None]
    near = (square - along * along < radius * radius) & (along > -radius) & batch.present[:, None]
    scene, ray, obj = near.nonzero(as_tuple=True)
    return scene, ray, obj


def _meet(batch: Batch, rays: Rays, scene: Tensor, ray: Tensor, obj: Tensor) -> tuple[Tensor, Tensor]:
    """How far (m,) each ray goes to its object, and the normal (3, m) there in the object's own axes."""
    which, that = scene * batch.shape.shape[1] + obj, scene * rays.direction.shape[2] + ray
    rotation, size = _take(batch.rotation, which), _take(batch.size, which)
    origin = _take(rays.origin, that if rays.origin.shape[2] > 1 else scene)
    o = _turn_back(rotation, origin - _take(batch.centre, which)) / size
    d = _turn_back(rotation, _take(rays.direction, that)) / size
    kind = _take(batch.shape, which)
    t, normal = torch.full_like(o[0], torch.inf), torch.zeros_like(o)
    for i, (meet, *_) in enumerate(shapes.SHAPES.values()):
        at = (kind == i).nonzero()[:, 0]
        if len(at):
            far, out = meet(o.index_select(1, at), d.index_select(1, at))
            t.index_copy_(0, at, far)
            normal.index_copy_(1, at, out)
    return t, normal


def _take(x: Tensor, which: Tensor) -> Tensor:
    """Entries of x (..., a, b), counted over its last two axes, as (..., m)."""
    return x.flatten(-2).index_select(-1, which)


def _turn(rotation: Tensor, x: Tensor) -> Tensor:
    return torch.stack([dot(row, x) for row in rotation])


def _turn_back(rotation: Tensor, x: Tensor) -> Tensor:
    return rotation[0] * x[0] + rotation[1] * x[1] + rotation[2] * x[2]


def _first_hit(batch: Batch, rays: Rays, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """How far each ray goes (S, n), what it meets (S, n; 0 is the ground), the normal there (3, S, n), own axes; and
    how many of the first `count` rays meet each object, hidden or not (S, K)."""
    _, S, n = rays.direction.shape
    K = batch.shape.shape[1]
    scene, ray, obj = _near(batch, rays)
    t, normal = _meet(batch, rays, scene, ray, obj)
    to_ground = rays.origin[2] / (-rays.direction[2]).clamp(min=1e-6)
    flat = scene * n + ray
    nearest = to_ground.reshape(-1).scatter_reduce(0, flat, t, "amin")
    # Of two objects at the same distance the lower number wins, whatever the order of the list.
    first = (t == nearest[flat]).nonzero()[:, 0]
    surface = torch.full_like(nearest, K + 1, dtype=torch.long)
    surface = surface.scatter_reduce(0, flat[first], obj[first] + 1, "amin")
    shown = first[surface[flat[first]] == obj[first] + 1]
    own = torch.zeros(3, S * n, device=t.device)
    own[2] = 1.0
    own.index_copy_(1, flat[shown], normal.index_select(1, shown))
    met = ((ray < count) & t.isfinite()).long()
    whole = torch.zeros(S * K, dtype=torch.long, device=t.device).index_add_(0, scene * K + obj, met)
    return nearest.reshape(S, n), (surface % (K + 1)).reshape(S, n), own.reshape(3, S, n), whole.reshape(S, K)


def _shade(batch: Batch, rays: Rays, far: Tensor, surface: Tensor, normal: Tensor) -> Tensor:
    """Linear colour (3, S, n) where each ray ends, the key light's point moving from sample to sample."""
    n = far.shape[1]
    point = rays.origin + far * rays.direction
    albedo, normal, gloss, metal = _surfaces(batch, surface, point, normal)
    normal = normal / dot(normal, normal).clamp(min=1e-12).sqrt()
    normal = torch.where(dot(normal, rays.direction) > 0, -normal, normal)

    turns = [2 * math.pi * (i + 0.5) / len(SAMPLES) for i in range(len(SAMPLES))]
    aside = point.new_tensor([[f(a) for a in turns] for f in (math.cos, math.sin, lambda _: 0.0)])
    window = (batch.key[..., None] + LIGHT_RADIUS * aside[:, None]).repeat_interleave(n // len(SAMPLES), 2)
    key, fill, ambient = batch.light[..., None]
    sky = _open_sky(batch, point, normal)
    colour = albedo * (ambient * (0.7 + 0.3 * normal[2]) * sky)
    for lamp, power in ((window, key * _lit(batch, point, normal, window)), (batch.fill[..., None], fill)):
        to = lamp - point
        to = to / dot(to, to).sqrt()
        half = to - rays.direction
        half = half / dot(half, half).clamp(min=1e-12).sqrt()
        facing = dot(normal, to).clamp(min=0)
        sharp = dot(normal, half).clamp(min=0) ** (4 + 160 * gloss * gloss)
        shine = (1.2 * metal + 0.6 * gloss) * sharp * (facing > 0) * power
        colour = colour + albedo * (facing * power * (1 - 0.65 * metal)) + (1 - 0.4 * metal * (1 - albedo)) * shine
    # What metal mirrors: a bright sky above, a darker ground below.
    mirrored = rays.direction[2] - 2 * dot(rays.direction, normal) * normal[2]
    above = (1.5 * mirrored).clamp(0, 1)
    return colour + albedo * (metal * (0.15 + 1.1 * above * above * (3 - 2 * above)) * (0.3 + 0.7 * sky))


def _surfaces(batch: Batch, surface: Tensor, point: Tensor, normal: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Albedo, bumped normal (world axes), gloss and metal of the points, each (..., S, n)."""
    S, n = surface.shape
    K = batch.shape.shape[1]
    rows = torch.arange(S, device=surface.device)[:, None]
    which = (rows * (K + 1) + surface).reshape(-1)  # the surface of every point, counted over all scenes
    own, normal = point.reshape(3, -1).clone(), normal.reshape(3, -1)
    hit = surface.reshape(-1).nonzero()[:, 0]
    obj = (rows * K + surface - 1).reshape(-1)[hit]
    rotation = _take(batch.rotation, obj)
    own.index_copy_(1, hit, _turn_back(rotation, own.index_select(1, hit) - _take(batch.centre, obj)))

    kind = _take(batch.material, which)
    scale, bump, rough, *offset = _take(batch.finish, which)
    p = own * scale + 7 * torch.stack(offset)
    x, y, z = normal.abs()
    x_side, y_side = (x >= y) & (x >= z), (y > x) & (y >= z)
    albedo, slope = _take(batch.paint[0], which), torch.zeros_like(own)
    atlas = materials.noise(own.device)
    for i, (name, pattern) in enumerate(materials.MATERIALS.items()):
        at = (kind == i).nonzero()[:, 0]
        if len(at) and name not in ("rubber", "metal"):
            look, steep = _pattern(pattern, p.index_select(1, at), x_side[at], y_side[at], atlas)
            first, second, third = _take(batch.paint, which[at])
            mixed = first + (second - first) * look.second
            albedo.index_copy_(1, at, mixed + (third - mixed) * look.third)
            slope.index_copy_(1, at, steep)
    # The surface rises by BUMP times the height, so its normal leans against the slope along it.
    normal = normal - materials.BUMP * bump * scale * (slope - dot(slope, normal) * normal)
    normal.index_copy_(1, hit, _turn(rotation, normal.index_select(1, hit)))
    metal = (kind == materials.NAMES.index("metal")).float()
    gloss = torch.where(kind < 2, 0.15 + 0.7 * metal, 0.6 * (1 - rough))
    return albedo.reshape(3, S, n), normal.reshape(3, S, n), gloss.reshape(S, n), metal.reshape(S, n)


def _pattern(
    pattern: materials.Material, p: Tensor, x_side: Tensor, y_side: Tensor, atlas: materials.Noise
) -> tuple[materials.Pattern, Tensor]:
    """The pattern at points p (3, m) and the slope of its height (3, m), by differences."""
    m, step = p.shape[1], 0.02
    nearby = torch.cat([p, *(p + step * axis[:, None] for axis in torch.eye(3, device=p.device))], 1)
    x, y, z = nearby
    x_side, y_side = x_side.repeat(4), y_side.repeat(4)
    face = torch.stack([torch.where(x_side, y, x), torch.where(x_side | y_side, z, y)])
    look = pattern(nearby, face, atlas)
    here, *moved = look.height.split(m)
    slope = torch.stack([(height - here) / step for height in moved])
    return materials.Pattern(look.second[:m], look.third[:m], here), slope.clamp(-40, 40)


def _lit(batch: Batch, point: Tensor, normal: Tensor, lamp: Tensor) -> Tensor:
    """One (S, n) where the lamp is seen from the point, zero in shadow."""
    to = lamp - point
    distance = dot(to, to).sqrt()
    rays = Rays(point + 2e-3 * normal, to / distance)
    scene, ray, obj = _near(batch, rays)
    t, _ = _meet(batch, rays, scene, ray, obj)
    flat = scene * distance.shape[1] + ray
    blocked = (t < _take(distance, flat)).float()
    shadow = torch.zeros(distance.numel(), device=t.device)
    return 1 - shadow.scatter_reduce(0, flat, blocked, "amax").reshape(distance.shape)


def _open_sky(batch: Batch, point: Tensor, normal: Tensor) -> Tensor:
    """The share (S, n) of the sky that the balls around the objects leave open, which darkens where things touch."""
    share = torch.ones_like(point[0])
    for k in range(batch.shape.shape[1]):
        to = batch.centre[:, :, k, None] - point
        square = dot(to, to).clamp(min=1e-6)
        radius = (0.75 * batch.outer[:, k] * batch.present[:, k])[:, None]
        facing = dot(normal, to).clamp(min=0) / square.sqrt()
        share = share * (1 - 0.85 * facing * (radius * radius / square).clamp(max=1.0))
    return share
