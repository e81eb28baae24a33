"""Ray casting of a batch of scenes: images, masks and pixel counts, in plain torch on any device.

On CUDA the kernels of `render_triton` do the same in one pass. The code here is the reference.

- The mask of a pixel is what the ray through its centre hits.
- The color of a pixel is the mean of four more rays. Each has its own point on the key light, which gives soft shadows.
- Rays and objects are paired by bounding balls first. Only these pairs are intersected. All hits are shaded at once.
- Every operation is elementwise, in an order that does not depend on the batch. So a scene has the same pixels alone
  and in any batch.
- An image of (H, W) is the centre crop of the square image with side max(H, W). Only rays of the crop are cast.

Vectors have their components first. Shapes: S scenes (one frame each), n rays of each scene, K objects; lists of
(scene, ray, object) have length m.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from cutslots.devices import resolve_device
from cutslots.scenes import materials, shapes, variation
from cutslots.scenes.scene_batch import Layout, SceneBatch, VariedSceneBatch, tensor
from cutslots.scenes.shapes import dot

try:
    from cutslots.scenes import render_triton as kernels
except ImportError:  # Triton comes with the CUDA builds of torch
    kernels = None  # type: ignore[assignment]

# Offsets of the color samples from the centre of a pixel, in pixels.
SAMPLES = ((-0.125, -0.375), (0.375, -0.125), (0.125, 0.375), (-0.375, 0.125))

LIGHT_RADIUS = 0.7

GRAIN_STEP = 37  # rows by which the noise of a sensor moves from frame to frame

PIXELS_PER_CHUNK = {"cpu": 16 * 64**2, "cuda": 128 * 128**2}  # in torch

PIXELS_PER_LAUNCH = 2**28  # of the kernels, which need no memory but their results: at most 2 GiB of them at once


@dataclass
class FrameLayout:
    """One frame of the layouts of S scenes as tensors. `Layout` describes the fields."""

    eye: Tensor  # (3, S)
    view: Tensor  # (3, 3, S) vectors to the right border, to the lower border, forward
    present: Tensor  # (S, K)
    shape: Tensor  # (S, K)
    size: Tensor  # (S, K)
    radius: Tensor  # (S, K) of the bounding ball
    centre: Tensor  # (3, S, K)
    rotation: Tensor  # (3, 3, S, K)


@dataclass
class FrameBatch(FrameLayout):
    """One frame of each of S scenes as tensors. `SceneBatch` describes the fields."""

    material: Tensor  # (S, K + 1)
    palette: Tensor  # (3 colors, 3, S, K + 1)
    finish: Tensor  # (6, S, K + 1)
    key_light: Tensor  # (3, S)
    fill_light: Tensor  # (3, S)
    light_strength: Tensor  # (3, S)
    light_radius: Tensor  # (S,) of the key light


@dataclass
class VariedFrameBatch(FrameBatch):
    """The same of varied scenes."""

    light: Tensor  # (6, S)
    sensor: Tensor  # (9, S)


@dataclass
class Rays:
    origin: Tensor  # (3, S, n) or (3, S, 1)
    direction: Tensor  # (3, S, n), of unit length


class Rendered(NamedTuple):
    """F frames of B scenes with up to K objects."""

    image: Tensor  # (B, F, 3, H, W) uint8
    mask: Tensor  # (B, F, H, W) uint8, 0 for the ground, k for object k
    visible_pixels: Tensor  # (B, F, K) pixels that show each object
    unoccluded_pixels: Tensor  # (B, F, K) pixels that would show it if nothing were in front of it


def render(scenes: SceneBatch, image_size: tuple[int, int], device: torch.device | str = "cpu") -> Rendered:
    """Render every frame of every scene at (H, W)."""
    device = resolve_device(device)
    scenes = scenes.to(device if device.type == "cuda" else "cpu")  # others may have no float64
    B, F = scenes.position.shape[:2]
    with torch.no_grad():
        done = [
            _render(_to(_frames(scenes, *at), device), image_size)
            for at in _chunks(scenes, math.prod(image_size), device)
        ]
    if not done:
        K = scenes.shape.shape[1]
        image = torch.zeros(B, F, 3, *image_size, dtype=torch.uint8, device=device)
        counts = torch.zeros(B, F, K, dtype=torch.long, device=device)
        return Rendered(image, image[:, :, 0], counts, counts)
    parts = zip(*done, strict=True)
    return Rendered(*((part[0] if len(part) == 1 else torch.cat(part)).unflatten(0, (B, F)) for part in parts))


def count_visible_pixels(scenes: Layout, size: int) -> Tensor:
    """Return how many of size x size pixels show each object (B, F, K).

    The size is a power of two, so that every device accepts the same scenes: on CUDA torch divides by a number by
    multiplying by its reciprocal, which has to be exact.
    """
    counts = [torch.zeros(0, scenes.shape.shape[1], dtype=torch.long, device=scenes.count.device)]
    with torch.no_grad():
        for at in _chunks(scenes, size**2 // 4, scenes.count.device):
            counts.append(_count_first_hits(_layouts(scenes, *at), size))
    return torch.cat(counts).unflatten(0, scenes.position.shape[:2])


def _count_first_hits(batch: FrameLayout, size: int) -> Tensor:
    """Return how many of size x size pixels show each object (S, K)."""
    if _has_kernels(batch.eye.device):
        return kernels.count_visible_pixels(batch, (size, size))
    _, surface, _, _ = _first_hit(batch, _camera_rays(batch, (size, size), ((0.0, 0.0),)), count=0)
    return _count_pixels(batch, surface)


def _has_kernels(device: torch.device) -> bool:
    return kernels is not None and kernels.is_supported(device)


def _chunks(scenes: Layout, pixels: int, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield rows and frames of all frames of all scenes, as many at once as the device renders well."""
    (B, F), home = scenes.position.shape[:2], scenes.count.device
    rows, frames = torch.arange(B, device=home).repeat_interleave(F), torch.arange(F, device=home).repeat(B)
    at_once = PIXELS_PER_LAUNCH if _has_kernels(device) else PIXELS_PER_CHUNK.get(device.type, 1)
    step = max(1, at_once // pixels)
    for i in range(0, B * F, step):
        yield rows[i : i + step], frames[i : i + step]


def _to(batch: FrameBatch, device: torch.device) -> FrameBatch:
    return type(batch)(**{name: value.to(device) for name, value in vars(batch).items()})


def _count_pixels(batch: FrameLayout, surface: Tensor) -> Tensor:
    """Return how many rays of surface (S, n) hit each object (S, K)."""
    return torch.stack([(surface == k + 1).sum(1) for k in range(batch.shape.shape[1])], 1)


def _put(x: Tensor, leading: int = 0) -> Tensor:
    """Convert to float32, with the last `leading` axes first."""
    axes = [*range(x.ndim - leading, x.ndim), *range(x.ndim - leading)]
    return x.permute(axes).to(torch.float32).contiguous()


def _layouts(scenes: Layout, rows: Tensor, frames: Tensor) -> FrameLayout:
    """Return the layout of frame frames[i] of scene rows[i], for every i."""
    shape, size = scenes.shape[rows], scenes.size[rows]
    camera = scenes.cameras(rows)
    half_width = camera.half_widths[:, None]
    outer_radius = tensor(shapes.OUTER_RADIUS, size.device)[shape]
    view = torch.stack([camera.right * half_width, camera.down * half_width, camera.forward], 1)
    return FrameLayout(
        eye=_put(camera.eye, 1),
        view=_put(view, 2),
        present=torch.arange(shape.shape[1], device=size.device) < scenes.count[rows, None],
        shape=shape,
        size=_put(size),
        radius=_put(outer_radius * size * 1.001),
        centre=_put(scenes.position[rows, frames], 1),
        rotation=_put(scenes.rotation[rows, frames], 2),
    )


def _frames(scenes: SceneBatch, rows: Tensor, frames: Tensor) -> FrameBatch:
    """Return frame frames[i] of scene rows[i], for every i."""
    fields = dict(
        **vars(_layouts(scenes, rows, frames)),
        material=scenes.material[rows],
        palette=_put(scenes.palette[rows], 2),
        finish=_put(scenes.finish[rows], 1),
        key_light=_put(scenes.key_light[rows], 1),
        fill_light=_put(scenes.fill_light[rows], 1),
        light_strength=_put(scenes.light_strength[rows], 1),
    )
    if not isinstance(scenes, VariedSceneBatch):
        return FrameBatch(**fields, light_radius=torch.full_like(fields["key_light"][0], LIGHT_RADIUS))
    sensor = _put(scenes.sensor[rows], 1)
    sensor[7] += GRAIN_STEP * frames  # every frame has noise of its own
    return VariedFrameBatch(
        **fields, light_radius=_put(scenes.light_radius[rows]), light=_put(scenes.light[rows], 1), sensor=sensor
    )


def _render(batch: FrameBatch, image_size: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the fields of `Rendered` for one frame of each scene, (S, ...)."""
    if _has_kernels(batch.eye.device):
        varied = torch.cat([batch.light, batch.sensor]) if isinstance(batch, VariedFrameBatch) else None
        return kernels.render(batch, image_size, _sample_table(batch.eye.device), varied)
    S, n = batch.eye.shape[1], math.prod(image_size)
    rays = _camera_rays(batch, image_size, ((0.0, 0.0), *SAMPLES))
    distance, surface, normal, unoccluded = _first_hit(batch, rays, count=n)
    mask = surface[:, :n]
    samples = Rays(rays.origin, rays.direction[..., n:])
    color = _shade(batch, samples, distance[:, n:], surface[:, n:], normal[..., n:])
    color = color.reshape(3, S, len(SAMPLES), *image_size)
    mean = ((color[:, :, 0] + color[:, :, 1]) + (color[:, :, 2] + color[:, :, 3])) / len(SAMPLES)
    image = (_expose(batch, mean) * 255 + 0.5).to(torch.uint8)
    image, label = image.transpose(0, 1).contiguous(), mask.to(torch.uint8).reshape(S, *image_size)
    return image, label, _count_pixels(batch, mask), unoccluded


def _expose(batch: FrameBatch, linear: Tensor) -> Tensor:
    """Return values of sRGB, approximated by the root, of linear colors (3, S, H, W)."""
    if isinstance(batch, VariedFrameBatch):
        return variation.expose(batch.sensor, linear, max(linear.shape[2:]))
    return linear.clamp(0, 1).sqrt()


def _camera_rays(batch: FrameLayout, image_size: tuple[int, int], samples: tuple[tuple[float, float], ...]) -> Rays:
    """Return rays (3, S, n) through each pixel, sample by sample.

    A sample (x, y) is an offset in pixels to the right of and below the centre of each pixel.
    """
    right, down, forward = batch.view[..., None, None]
    side = max(image_size)
    # Centres of the pixels of the crop within the square image.
    y_centre, x_centre = (torch.arange(n, device=right.device) + (side - n) // 2 + 0.5 for n in image_size)
    parts = []
    for x, y in samples:
        u, v = (x_centre + x) / side * 2 - 1, (y_centre + y) / side * 2 - 1
        parts.append((forward + u * right + v[:, None] * down).flatten(2))
    d = torch.cat(parts, 2)
    return Rays(batch.eye[..., None], d / dot(d, d).sqrt())


def _pair_by_bounds(batch: FrameLayout, rays: Rays) -> tuple[Tensor, Tensor, Tensor]:
    """Return the (scene, ray, object) triples whose ray hits the bounding ball of the object."""
    c, o, d = batch.centre[:, :, None], rays.origin[..., None], rays.direction[..., None]
    along = dot(c, d) - dot(o, d)
    square = dot(c, c) - 2 * dot(c, o) + dot(o, o)
    radius = batch.radius[:, None]
    hit = (square - along * along < radius * radius) & (along > -radius) & batch.present[:, None]
    scene, ray, obj = hit.nonzero(as_tuple=True)
    return scene, ray, obj


def _intersect(batch: FrameLayout, rays: Rays, scene: Tensor, ray: Tensor, obj: Tensor) -> tuple[Tensor, Tensor]:
    """Return the distance (m,) from each ray's origin to its object, and the normal (3, m) in object axes."""
    object_index, ray_index = scene * batch.shape.shape[1] + obj, scene * rays.direction.shape[2] + ray
    rotation, size = _gather(batch.rotation, object_index), _gather(batch.size, object_index)
    origin = _gather(rays.origin, ray_index if rays.origin.shape[2] > 1 else scene)
    o = _rotate_back(rotation, origin - _gather(batch.centre, object_index)) / size
    d = _rotate_back(rotation, _gather(rays.direction, ray_index)) / size
    shape = _gather(batch.shape, object_index)
    t, normal = torch.full_like(o[0], torch.inf), torch.zeros_like(o)
    for i, (intersect, *_) in enumerate(shapes.SHAPES.values()):
        rows = (shape == i).nonzero()[:, 0]
        if len(rows):
            distance, out = intersect(o.index_select(1, rows), d.index_select(1, rows))
            t.index_copy_(0, rows, distance)
            normal.index_copy_(1, rows, out)
    return t, normal


def _gather(x: Tensor, index: Tensor) -> Tensor:
    """Return entries (..., m) of x (..., a, b) by flat indices into its last two axes."""
    return x.flatten(-2).index_select(-1, index)


def _rotate(rotation: Tensor, x: Tensor) -> Tensor:
    """Return vectors in object axes as vectors in world axes."""
    return torch.stack([dot(row, x) for row in rotation])


def _rotate_back(rotation: Tensor, x: Tensor) -> Tensor:
    """Return vectors in world axes as vectors in object axes."""
    return rotation[0] * x[0] + rotation[1] * x[1] + rotation[2] * x[2]


def _first_hit(batch: FrameLayout, rays: Rays, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Find the first surface that each ray hits.

    Returns its distance (S, n), its index (S, n; 0 is the ground), its normal in object axes (3, S, n), and how many of
    the first `count` rays hit each object, occluded or not (S, K).
    """
    _, S, n = rays.direction.shape
    K = batch.shape.shape[1]
    scene, ray, obj = _pair_by_bounds(batch, rays)
    t, normal = _intersect(batch, rays, scene, ray, obj)
    to_ground = rays.origin[2] / (-rays.direction[2]).clamp(min=1e-6)
    flat = scene * n + ray
    nearest = to_ground.reshape(-1).scatter_reduce(0, flat, t, "amin")
    # Of two objects at the same distance the lower index wins, so that the order of the list does not matter.
    first = (t == nearest[flat]).nonzero()[:, 0]
    surface = torch.full_like(nearest, K + 1, dtype=torch.long)
    surface = surface.scatter_reduce(0, flat[first], obj[first] + 1, "amin")
    visible = first[surface[flat[first]] == obj[first] + 1]
    normals = torch.zeros(3, S * n, device=t.device)
    normals[2] = 1.0  # of the ground
    normals.index_copy_(1, flat[visible], normal.index_select(1, visible))
    counted = ((ray < count) & t.isfinite()).long()
    unoccluded = torch.zeros(S * K, dtype=torch.long, device=t.device).index_add_(0, scene * K + obj, counted)
    surface = (surface % (K + 1)).reshape(S, n)
    return nearest.reshape(S, n), surface, normals.reshape(3, S, n), unoccluded.reshape(S, K)


def _shade(batch: FrameBatch, rays: Rays, distance: Tensor, surface: Tensor, normal: Tensor) -> Tensor:
    """Return the linear color (3, S, n) where each ray ends. Each sample has its own point on the key light."""
    point = rays.origin + distance * rays.direction
    albedo, normal, gloss, metal = _surface_properties(batch, surface, point, normal)
    normal = normal / dot(normal, normal).clamp(min=1e-12).sqrt()
    normal = torch.where(dot(normal, rays.direction) > 0, -normal, normal)

    key_position = _key_light_samples(batch, distance.shape[1])
    key, fill, ambient = batch.light_strength[..., None]
    key = key * _unshadowed(batch, point, normal, key_position)
    sky = _visible_sky(batch, point, normal)
    if isinstance(batch, VariedFrameBatch):
        ambient = variation.vary_ambient(batch.light, point, ambient)
    color = albedo * (ambient * (0.7 + 0.3 * normal[2]) * sky)
    lights = [(key_position, key), (batch.fill_light[..., None], fill)]
    matte = 1 - 0.65 * metal
    if isinstance(batch, VariedFrameBatch):
        lights = variation.vary_lights(batch.light, point, lights)
        matte = variation.matte(batch.light, metal)
    for light, strength in lights:
        to_light = light - point
        to_light = to_light / dot(to_light, to_light).sqrt()
        half = to_light - rays.direction
        half = half / dot(half, half).clamp(min=1e-12).sqrt()
        facing = dot(normal, to_light).clamp(min=0)
        highlight = dot(normal, half).clamp(min=0) ** (4 + 160 * gloss * gloss)
        specular = (1.2 * metal + 0.6 * gloss) * highlight * (facing > 0) * strength
        color = color + albedo * (facing * strength * matte) + (1 - 0.4 * metal * (1 - albedo)) * specular
    # Metal reflects a bright sky above and a darker ground below.
    reflected_z = rays.direction[2] - 2 * dot(rays.direction, normal) * normal[2]
    above = (1.5 * reflected_z).clamp(0, 1)
    reflected = 0.15 + 1.1 * above * above * (3 - 2 * above)
    if isinstance(batch, VariedFrameBatch):
        reflected = variation.reflection(batch.light, reflected_z, reflected)
    return color + albedo * (metal * reflected * (0.3 + 0.7 * sky))


def _key_light_samples(batch: FrameBatch, n: int) -> Tensor:
    """Return the point on the key light (3, S, n) for each of n rays, which are ordered by sample."""
    offsets = batch.light_radius[:, None] * _key_light_offsets(batch.eye.device)[:, None]
    points = batch.key_light[..., None] + offsets
    return points.repeat_interleave(n // len(SAMPLES), 2)


def _key_light_offsets(device: torch.device) -> Tensor:
    """Return the point on a key light of radius 1 (3, samples) for each sample, relative to its centre."""
    angles = [2 * math.pi * (i + 0.5) / len(SAMPLES) for i in range(len(SAMPLES))]
    rows = [[f(a) for a in angles] for f in (math.cos, math.sin, lambda _: 0.0)]
    return torch.tensor(rows, dtype=torch.float32, device=device)


@functools.cache
def _sample_table(device: torch.device) -> Tensor:
    """Return the offset of each sample in pixels and that of its point on a key light of radius 1, (samples, 4)."""
    # Made on the CPU: the copy waits until it is done, so that any stream may use the table.
    pixels = torch.tensor(SAMPLES, dtype=torch.float32, device="cpu")
    return torch.cat([pixels, _key_light_offsets(torch.device("cpu"))[:2].T], 1).to(device)


def _surface_properties(
    batch: FrameBatch, surface: Tensor, point: Tensor, normal: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return albedo, bumped normal in world axes, gloss and metal of the points, each (..., S, n)."""
    S, n = surface.shape
    K = batch.shape.shape[1]
    rows = torch.arange(S, device=surface.device)[:, None]
    surface_index = (rows * (K + 1) + surface).reshape(-1)
    local, normal = point.reshape(3, -1).clone(), normal.reshape(3, -1)  # points in object coordinates
    hit = surface.reshape(-1).nonzero()[:, 0]
    obj = (rows * K + surface - 1).reshape(-1)[hit]
    rotation = _gather(batch.rotation, obj)
    local.index_copy_(1, hit, _rotate_back(rotation, local.index_select(1, hit) - _gather(batch.centre, obj)))

    material = _gather(batch.material, surface_index)
    scale, bump, roughness, *offset = _gather(batch.finish, surface_index)
    albedo, slope = _textures(batch, surface_index, material, local * scale + 7 * torch.stack(offset), normal)
    # The relief raises the surface by BUMP times the height, so the normal tilts against the slope along the surface.
    normal = normal - materials.BUMP * bump * scale * (slope - dot(slope, normal) * normal)
    normal.index_copy_(1, hit, _rotate(rotation, normal.index_select(1, hit)))
    metal = (material == materials.NAMES.index("metal")).float()
    gloss = torch.where(material < 2, 0.15 + 0.7 * metal, 0.6 * (1 - roughness))
    return albedo.reshape(3, S, n), normal.reshape(3, S, n), gloss.reshape(S, n), metal.reshape(S, n)


def _textures(
    batch: FrameBatch, surface_index: Tensor, material: Tensor, p: Tensor, normal: Tensor
) -> tuple[Tensor, Tensor]:
    """Return albedo (3, m) and slope of the relief (3, m) at points p (3, m) of the patterns."""
    x, y, z = normal.abs()
    x_side, y_side = (x >= y) & (x >= z), (y > x) & (y >= z)
    albedo, slope = _gather(batch.palette[0], surface_index), torch.zeros_like(p)
    atlas = materials.noise(p.device)
    for i, (name, function) in enumerate(materials.MATERIALS.items()):
        rows = (material == i).nonzero()[:, 0]
        if len(rows) and name not in ("rubber", "metal"):
            pattern, gradient = _pattern(function, p.index_select(1, rows), x_side[rows], y_side[rows], atlas)
            first, second, third = _gather(batch.palette, surface_index[rows])
            mixed = first + (second - first) * pattern.second
            albedo.index_copy_(1, rows, mixed + (third - mixed) * pattern.third)
            slope.index_copy_(1, rows, gradient)
    return albedo, slope


def _pattern(
    function: materials.Material, p: Tensor, x_side: Tensor, y_side: Tensor, atlas: materials.Noise
) -> tuple[materials.Pattern, Tensor]:
    """Return the pattern at points p (3, m) and the slope of its height (3, m) by finite differences."""
    m, step = p.shape[1], 0.02
    points = torch.cat([p, *(p + step * axis[:, None] for axis in torch.eye(3, device=p.device))], 1)
    x, y, z = points
    x_side, y_side = x_side.repeat(4), y_side.repeat(4)
    face = torch.stack([torch.where(x_side, y, x), torch.where(x_side | y_side, z, y)])
    pattern = function(points, face, atlas)
    height, *shifted = pattern.height.split(m)
    slope = torch.stack([(other - height) / step for other in shifted])
    return materials.Pattern(pattern.second[:m], pattern.third[:m], height), slope.clamp(-40, 40)


def _unshadowed(batch: FrameLayout, point: Tensor, normal: Tensor, light: Tensor) -> Tensor:
    """Return 1 where the light is visible from the point and 0 in shadow, (S, n)."""
    to_light = light - point
    distance = dot(to_light, to_light).sqrt()
    rays = Rays(point + 2e-3 * normal, to_light / distance)
    scene, ray, obj = _pair_by_bounds(batch, rays)
    t, _ = _intersect(batch, rays, scene, ray, obj)
    flat = scene * distance.shape[1] + ray
    blocked = (t < _gather(distance, flat)).float()
    shadow = torch.zeros(distance.numel(), device=t.device)
    return 1 - shadow.scatter_reduce(0, flat, blocked, "amax").reshape(distance.shape)


def _visible_sky(batch: FrameLayout, point: Tensor, normal: Tensor) -> Tensor:
    """Return the share (S, n) of the sky not covered by bounding balls: ambient occlusion, dark where objects touch."""
    share = torch.ones_like(point[0])
    for k in range(batch.shape.shape[1]):
        offset = batch.centre[:, :, k, None] - point
        square = dot(offset, offset).clamp(min=1e-6)
        radius = (0.75 * batch.radius[:, k] * batch.present[:, k])[:, None]
        facing = dot(normal, offset).clamp(min=0) / square.sqrt()
        share = share * (1 - 0.85 * facing * (radius * radius / square).clamp(max=1.0))
    return share
