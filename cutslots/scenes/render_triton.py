"""Triton kernels of `render` for CUDA: one program casts and shades all rays of one tile of pixels.

Operations and their order are those of the torch code, without fused multiply-adds and with correctly rounded divisions
and roots. So masks and counts are those of torch on the same device, and a scene has the same pixels in any batch. The
powers of the highlights are rounded differently.

A program skips objects whose bounding ball no ray of its tile hits, and materials that no point of its tile has. It
keeps everything in registers: the kernels need no memory but their results, and the host waits for nothing. Loops over
objects are `while` loops, because Triton's interpreter takes no bounds from memory for `range`.

Scenes are rows of four tables in float32: camera, lights, objects and surfaces. Varied scenes have longer rows of
lights, and a version of the kernel of their own: that of other scenes does nothing for them.
"""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from cutslots.scenes import materials, variation
from cutslots.scenes.materials_triton import textures
from cutslots.scenes.shapes_triton import (
    INFINITY,
    OBJECT_COLUMNS,
    dot,
    hits_bounds,
    intersect,
    plane_table,
    rotate,
    rotate_back,
)
from cutslots.scenes.variation_triton import (
    attenuation,
    back_light,
    diffuse_share,
    dimming,
    expose,
    grain_index,
    reflection,
    vary_ambient,
)

if TYPE_CHECKING:
    from cutslots.scenes.render import FrameBatch, FrameLayout

TILE_H, TILE_W = 4, 8  # the pixels of a program
NUM_WARPS = 1  # of a program; in one warp, reductions over a tile need no shared memory

CAMERA_COLUMNS, COUNT = tl.constexpr(13), tl.constexpr(12)  # eye (3), view (9), number of objects
LIGHT_COLUMNS = tl.constexpr(10)  # key light (3), fill light (3), strengths (3), radius of the key light
FILL, STRENGTH, RADIUS = tl.constexpr(3), tl.constexpr(6), tl.constexpr(9)
VARIED_COLUMNS = tl.constexpr(25)  # of varied scenes: the same, their light (6) and sensor (9)
VARIED_LIGHT, SENSOR = tl.constexpr(10), tl.constexpr(16)
COLUMNS = tl.constexpr(OBJECT_COLUMNS)
SURFACE_COLUMNS = tl.constexpr(16)  # three colors (9), finish (6), material
FINISH, MATERIAL = tl.constexpr(9), tl.constexpr(15)
METAL = tl.constexpr(materials.NAMES.index("metal"))
BUMP = tl.constexpr(materials.BUMP)


@triton.jit
def _camera_ray(camera, x, y, side):
    """Return the direction of the rays through points (x, y) of the square image, in pixels."""
    u, v = tl.div_rn(x, side) * 2 - 1, tl.div_rn(y, side) * 2 - 1
    dx = tl.load(camera + 9) + u * tl.load(camera + 3) + v * tl.load(camera + 6)
    dy = tl.load(camera + 10) + u * tl.load(camera + 4) + v * tl.load(camera + 7)
    dz = tl.load(camera + 11) + u * tl.load(camera + 5) + v * tl.load(camera + 8)
    return _normalize(dx, dy, dz, 0.0)


@triton.jit
def _normalize(x, y, z, least):
    """Return the vector at unit length. `least` bounds the square of the length by which it is divided."""
    length = tl.sqrt_rn(tl.maximum(dot(x, y, z, x, y, z), least))
    return tl.div_rn(x, length), tl.div_rn(y, length), tl.div_rn(z, length)


@triton.jit
def _first_hit(objects, planes, count, inside, ox, oy, oz, dx, dy, dz, unoccluded, COUNT_ALL: tl.constexpr):
    """Return the distance and the index of the first surface that each ray hits, and its normal in object axes.

    Of two objects at the same distance the lower index wins. With COUNT_ALL the rays that hit each object, occluded or
    not, are added to `unoccluded`.
    """
    distance = tl.div_rn(oz, tl.maximum(-dz, 1e-6))
    surface = tl.zeros(dx.shape, tl.int32)
    nx, ny, nz = tl.zeros_like(dx), tl.zeros_like(dx), tl.full(dx.shape, 1.0, tl.float32)
    k = 0
    while k < count:
        obj = objects + k * COLUMNS
        near = hits_bounds(obj, ox, oy, oz, dx, dy, dz) & inside
        if tl.max(near.to(tl.int32), 0) > 0:
            t, x, y, z = intersect(obj, planes, ox, oy, oz, dx, dy, dz)
            if COUNT_ALL:
                tl.atomic_add(unoccluded + k, tl.sum((near & (t < INFINITY)).to(tl.int64), 0))
            first = near & ((t < distance) | ((t == distance) & (surface == 0)))
            distance, surface = tl.where(first, t, distance), tl.where(first, k + 1, surface)
            nx, ny, nz = tl.where(first, x, nx), tl.where(first, y, ny), tl.where(first, z, nz)
        k += 1
    return distance, surface, nx, ny, nz


@triton.jit
def _count_surfaces(surface, inside, count, visible):
    """Add the rays that hit each object first to `visible`."""
    k = 0
    while k < count:
        rays = tl.sum((inside & (surface == k + 1)).to(tl.int64), 0)
        if rays > 0:
            tl.atomic_add(visible + k, rays)
        k += 1


@triton.jit
def _is_blocked(objects, planes, count, inside, ox, oy, oz, dx, dy, dz, distance):
    """Return which rays hit an object before this distance."""
    blocked = distance < 0
    k = 0
    while k < count:
        obj = objects + k * COLUMNS
        near = hits_bounds(obj, ox, oy, oz, dx, dy, dz) & inside
        if tl.max(near.to(tl.int32), 0) > 0:
            t, _, _, _ = intersect(obj, planes, ox, oy, oz, dx, dy, dz)
            blocked = blocked | (near & (t < distance))
        k += 1
    return blocked


@triton.jit
def _visible_sky(objects, count, px, py, pz, nx, ny, nz):
    """Return the share of the sky that bounding balls do not cover."""
    share = tl.full(px.shape, 1.0, tl.float32)
    k = 0
    while k < count:
        obj = objects + k * COLUMNS
        x, y, z = tl.load(obj) - px, tl.load(obj + 1) - py, tl.load(obj + 2) - pz
        radius = 0.75 * tl.load(obj + 13)
        square = tl.maximum(dot(x, y, z, x, y, z), 1e-6)
        facing = tl.div_rn(tl.maximum(dot(nx, ny, nz, x, y, z), 0.0), tl.sqrt_rn(square))
        share *= 1 - 0.85 * facing * tl.minimum(tl.div_rn(radius * radius, square), 1.0)
        k += 1
    return share


@triton.jit
def _surface_properties(objects, surfaces, atlas, surface, inside, px, py, pz, nx, ny, nz):
    """Return albedo, bumped normal in world axes, gloss and metal of the points."""
    hit, row = surface > 0, surfaces + surface * SURFACE_COLUMNS
    obj = objects + tl.maximum(surface - 1, 0) * COLUMNS
    x, y, z = rotate_back(obj, px - tl.load(obj), py - tl.load(obj + 1), pz - tl.load(obj + 2))
    x, y, z = tl.where(hit, x, px), tl.where(hit, y, py), tl.where(hit, z, pz)
    scale, bump, roughness = tl.load(row + FINISH), tl.load(row + FINISH + 1), tl.load(row + FINISH + 2)
    x = x * scale + 7 * tl.load(row + FINISH + 3)
    y = y * scale + 7 * tl.load(row + FINISH + 4)
    z = z * scale + 7 * tl.load(row + FINISH + 5)
    material = tl.load(row + MATERIAL).to(tl.int32)
    ax, ay, az = tl.abs(nx), tl.abs(ny), tl.abs(nz)
    x_side, y_side = (ax >= ay) & (ax >= az), (ay > ax) & (ay >= az)
    second, third, sx, sy, sz = textures(atlas, material, x, y, z, x_side, y_side, inside)
    red, green, blue = _mix(row, second, third), _mix(row + 1, second, third), _mix(row + 2, second, third)
    # The relief raises the surface by BUMP times the height, so the normal tilts against the slope along the surface.
    along, height = dot(sx, sy, sz, nx, ny, nz), BUMP * bump * scale
    nx, ny, nz = nx - height * (sx - along * nx), ny - height * (sy - along * ny), nz - height * (sz - along * nz)
    x, y, z = rotate(obj, nx, ny, nz)
    nx, ny, nz = tl.where(hit, x, nx), tl.where(hit, y, ny), tl.where(hit, z, nz)
    metal = tl.where(material == METAL, 1.0, 0.0)
    gloss = tl.where(material <= METAL, 0.15 + 0.7 * metal, 0.6 * (1 - roughness))
    return red, green, blue, nx, ny, nz, gloss, metal


@triton.jit
def _mix(color, second_share, third_share):
    """Return one component of the three colors of a surface, mixed by the shares of the second and the third."""
    first, second, third = tl.load(color), tl.load(color + 3), tl.load(color + 6)
    mixed = first + (second - first) * second_share
    return mixed + (third - mixed) * third_share


@triton.jit
def _add_light(
    r, g, b, red, green, blue, lx, ly, lz, strength, px, py, pz, nx, ny, nz, dx, dy, dz, gloss, metal, matte
):
    """Return the color (r, g, b) of points of this albedo with the light of one more light at (lx, ly, lz)."""
    lx, ly, lz = _normalize(lx - px, ly - py, lz - pz, 0.0)
    hx, hy, hz = _normalize(lx - dx, ly - dy, lz - dz, 1e-12)
    facing = tl.maximum(dot(nx, ny, nz, lx, ly, lz), 0.0)
    highlight = tl.exp2((4 + 160 * gloss * gloss) * tl.log2(tl.maximum(dot(nx, ny, nz, hx, hy, hz), 0.0)))
    specular = (1.2 * metal + 0.6 * gloss) * tl.where(facing > 0, highlight, 0.0) * strength
    diffuse = facing * strength * matte
    r = r + red * diffuse + (1 - 0.4 * metal * (1 - red)) * specular
    g = g + green * diffuse + (1 - 0.4 * metal * (1 - green)) * specular
    return r, g, b + blue * diffuse + (1 - 0.4 * metal * (1 - blue)) * specular


@triton.jit
def _shade(
    lights,
    objects,
    surfaces,
    planes,
    atlas,
    count,
    surface,
    inside,
    px,
    py,
    pz,
    nx,
    ny,
    nz,
    dx,
    dy,
    dz,
    kx,
    ky,
    VARIED: tl.constexpr,
):
    """Return the linear color of points whose point on a key light of radius 1 is (kx, ky) away from its centre."""
    red, green, blue, nx, ny, nz, gloss, metal = _surface_properties(
        objects, surfaces, atlas, surface, inside, px, py, pz, nx, ny, nz
    )
    nx, ny, nz = _normalize(nx, ny, nz, 1e-12)
    away = dot(nx, ny, nz, dx, dy, dz) > 0
    nx, ny, nz = tl.where(away, -nx, nx), tl.where(away, -ny, ny), tl.where(away, -nz, nz)

    radius = tl.load(lights + RADIUS)
    kx, ky, kz = tl.load(lights) + radius * kx, tl.load(lights + 1) + radius * ky, tl.load(lights + 2)
    x, y, z = kx - px, ky - py, kz - pz
    distance = tl.sqrt_rn(dot(x, y, z, x, y, z))
    x, y, z = tl.div_rn(x, distance), tl.div_rn(y, distance), tl.div_rn(z, distance)
    start_x, start_y, start_z = px + 2e-3 * nx, py + 2e-3 * ny, pz + 2e-3 * nz
    blocked = _is_blocked(objects, planes, count, inside, start_x, start_y, start_z, x, y, z, distance)
    sky = _visible_sky(objects, count, px, py, pz, nx, ny, nz)
    key, fill = tl.where(blocked, 0.0, tl.load(lights + STRENGTH)), tl.load(lights + STRENGTH + 1)
    fx, fy, fz = tl.load(lights + FILL), tl.load(lights + FILL + 1), tl.load(lights + FILL + 2)
    ambient, matte = tl.load(lights + STRENGTH + 2), 1 - 0.65 * metal
    light = lights + VARIED_LIGHT
    if VARIED:
        key = key * attenuation(light, kx, ky, kz, px, py, pz)
        fill = fill * attenuation(light, fx, fy, fz, px, py, pz)
        ambient = vary_ambient(light, px, py, ambient)
        matte = diffuse_share(light, metal)
    ambient = ambient * (0.7 + 0.3 * nz) * sky
    r, g, b = red * ambient, green * ambient, blue * ambient
    r, g, b = _add_light(
        r, g, b, red, green, blue, kx, ky, kz, key, px, py, pz, nx, ny, nz, dx, dy, dz, gloss, metal, matte
    )
    r, g, b = _add_light(
        r, g, b, red, green, blue, fx, fy, fz, fill, px, py, pz, nx, ny, nz, dx, dy, dz, gloss, metal, matte
    )
    if VARIED:
        bx, by, bz, back = back_light(light, px, py, pz)
        r, g, b = _add_light(
            r, g, b, red, green, blue, bx, by, bz, back, px, py, pz, nx, ny, nz, dx, dy, dz, gloss, metal, matte
        )
    # Metal reflects a bright sky above and a darker ground below.
    reflected_z = dz - 2 * dot(dx, dy, dz, nx, ny, nz) * nz
    above = tl.minimum(tl.maximum(1.5 * reflected_z, 0.0), 1.0)
    reflected = 0.15 + 1.1 * above * above * (3 - 2 * above)
    if VARIED:
        reflected = reflection(light, reflected_z, reflected)
    reflected = metal * reflected * (0.3 + 0.7 * sky)
    return r + red * reflected, g + green * reflected, b + blue * reflected


@triton.jit
def _tile(H, W, TILE_H: tl.constexpr, TILE_W: tl.constexpr):
    """Return the scene, the rows and columns of pixels of this program."""
    across = tl.cdiv(W, TILE_W)
    tiles = across * tl.cdiv(H, TILE_H)
    tile, pixel = tl.program_id(0) % tiles, tl.arange(0, TILE_H * TILE_W)
    row, column = tile // across * TILE_H + pixel // TILE_W, tile % across * TILE_W + pixel % TILE_W
    return (tl.program_id(0) // tiles).to(tl.int64), row, column


@triton.jit
def _store_byte(pointer, value, inside):
    """Store a value from 0 to 1 as a byte."""
    tl.store(pointer, (value * 255 + 0.5).to(tl.uint8), inside)


@triton.jit
def _root(linear):
    """Return values of sRGB, approximated by the root, of linear values."""
    return tl.sqrt_rn(tl.minimum(tl.maximum(linear, 0.0), 1.0))


@triton.jit(do_not_specialize=["K", "H", "W"])  # compiled once for all sizes
def _render_kernel(
    cameras,
    lights,
    objects,
    surfaces,
    planes,
    samples,
    atlas,
    grain,
    image,
    mask,
    visible,
    unoccluded,
    K,
    H,
    W,
    TILE_H: tl.constexpr,
    TILE_W: tl.constexpr,
    VARIED: tl.constexpr,
):
    scene, row, column = _tile(H, W, TILE_H, TILE_W)
    inside, pixel, side = (row < H) & (column < W), row * W + column, tl.maximum(H, W)
    camera, objects = cameras + scene * CAMERA_COLUMNS, objects + scene * K * COLUMNS
    lights += scene * (VARIED_COLUMNS if VARIED else LIGHT_COLUMNS)
    surfaces += scene * (K + 1) * SURFACE_COLUMNS
    count, size = tl.load(camera + COUNT).to(tl.int32), side.to(tl.float32)
    ox, oy, oz = tl.load(camera), tl.load(camera + 1), tl.load(camera + 2)
    x, y = (column + (side - W) // 2).to(tl.float32) + 0.5, (row + (side - H) // 2).to(tl.float32) + 0.5

    dx, dy, dz = _camera_ray(camera, x, y, size)
    hits = unoccluded + scene * K
    _, surface, _, _, _ = _first_hit(objects, planes, count, inside, ox, oy, oz, dx, dy, dz, hits, True)
    _count_surfaces(surface, inside, count, visible + scene * K)
    tl.store(mask + scene * H * W + pixel, surface.to(tl.uint8), inside)

    # The torch code adds the colors of the first two samples, those of the last two, and then both sums.
    red, green, blue = tl.zeros_like(dx), tl.zeros_like(dx), tl.zeros_like(dx)
    other_red, other_green, other_blue = tl.zeros_like(dx), tl.zeros_like(dx), tl.zeros_like(dx)
    for i in range(4):
        sample = samples + 4 * i
        dx, dy, dz = _camera_ray(camera, x + tl.load(sample), y + tl.load(sample + 1), size)
        t, surface, nx, ny, nz = _first_hit(objects, planes, count, inside, ox, oy, oz, dx, dy, dz, hits, False)
        px, py, pz = ox + t * dx, oy + t * dy, oz + t * dz
        kx, ky = tl.load(sample + 2), tl.load(sample + 3)
        r, g, b = _shade(
            lights,
            objects,
            surfaces,
            planes,
            atlas,
            count,
            surface,
            inside,
            px,
            py,
            pz,
            nx,
            ny,
            nz,
            dx,
            dy,
            dz,
            kx,
            ky,
            VARIED,
        )
        red, green, blue = (
            red + tl.where(i < 2, r, 0.0),
            green + tl.where(i < 2, g, 0.0),
            blue + tl.where(i < 2, b, 0.0),
        )
        other_red, other_green = other_red + tl.where(i < 2, 0.0, r), other_green + tl.where(i < 2, 0.0, g)
        other_blue = other_blue + tl.where(i < 2, 0.0, b)
    red, green, blue = (red + other_red) * 0.25, (green + other_green) * 0.25, (blue + other_blue) * 0.25
    if VARIED:
        sensor = lights + SENSOR
        dimmed, index = dimming(sensor, x, y, size), grain_index(sensor, x, y)
        red = expose(sensor, grain, red, 0, dimmed, index)
        green = expose(sensor, grain, green, 1, dimmed, index)
        blue = expose(sensor, grain, blue, 2, dimmed, index)
    else:
        red, green, blue = _root(red), _root(green), _root(blue)
    image += scene * 3 * H * W + pixel
    _store_byte(image, red, inside)
    _store_byte(image + H * W, green, inside)
    _store_byte(image + 2 * H * W, blue, inside)


@triton.jit(do_not_specialize=["K", "H", "W"])
def _count_kernel(cameras, objects, planes, visible, K, H, W, TILE_H: tl.constexpr, TILE_W: tl.constexpr):
    scene, row, column = _tile(H, W, TILE_H, TILE_W)
    inside, side = (row < H) & (column < W), tl.maximum(H, W)
    camera, objects = cameras + scene * CAMERA_COLUMNS, objects + scene * K * COLUMNS
    count = tl.load(camera + COUNT).to(tl.int32)
    x, y = (column + (side - W) // 2).to(tl.float32) + 0.5, (row + (side - H) // 2).to(tl.float32) + 0.5
    ox, oy, oz = tl.load(camera), tl.load(camera + 1), tl.load(camera + 2)
    dx, dy, dz = _camera_ray(camera, x, y, side.to(tl.float32))
    _, surface, _, _, _ = _first_hit(objects, planes, count, inside, ox, oy, oz, dx, dy, dz, visible, False)
    _count_surfaces(surface, inside, count, visible + scene * K)


def render(
    batch: FrameBatch, image_size: tuple[int, int], samples: Tensor, varied: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return images (S, 3, H, W), masks (S, H, W), visible and unoccluded pixels of each object (S, K).

    `samples` (4, 4) are the offset of each sample in pixels and that of its point on a key light of radius 1. `varied`
    (15, S) are light and sensor of varied scenes.
    """
    (S, K), device = batch.shape.shape, batch.eye.device
    image, mask = (torch.empty(*n, *image_size, dtype=torch.uint8, device=device) for n in ((S, 3), (S,)))
    visible, unoccluded = torch.zeros(2, S, K, dtype=torch.long, device=device)
    tables = _camera_table(batch), _light_table(batch, varied), _object_table(batch), _surface_table(batch)
    noise = materials.noise(device).volume, None if varied is None else variation.grain(device)
    results = image, mask, visible, unoccluded
    args = *tables, plane_table(device), samples, *noise, *results, K
    _launch(_render_kernel, S, image_size, *args, VARIED=varied is not None)
    return image, mask, visible, unoccluded


def count_visible_pixels(batch: FrameLayout, image_size: tuple[int, int]) -> Tensor:
    """Return how many pixels show each object (S, K)."""
    (S, K), device = batch.shape.shape, batch.eye.device
    visible = torch.zeros(S, K, dtype=torch.long, device=device)
    tables = _camera_table(batch), _object_table(batch), plane_table(device)
    _launch(_count_kernel, S, image_size, *tables, visible, K)
    return visible


def _launch(
    kernel: Any, S: int, image_size: tuple[int, int], cameras: Tensor, *args: Tensor | int | None, **constants: bool
) -> None:
    """Run a kernel with one program for each tile of each scene."""
    tiles = S * triton.cdiv(image_size[0], TILE_H) * triton.cdiv(image_size[1], TILE_W)
    options = {"num_warps": NUM_WARPS, "num_stages": 1, "enable_fp_fusion": False}
    if tiles:
        with device_of(cameras):
            kernel[(tiles,)](cameras, *args, *image_size, TILE_H, TILE_W, **constants, **options)


def _camera_table(batch: FrameLayout) -> Tensor:
    """Return the camera and the number of objects of each scene (S, CAMERA_COLUMNS)."""
    return torch.cat([batch.eye, batch.view.flatten(0, 1), batch.present.sum(1)[None].float()]).T.contiguous()


def _light_table(batch: FrameBatch, varied: Tensor | None) -> Tensor:
    """Return the lights of each scene (S, LIGHT_COLUMNS), or of each varied scene (S, VARIED_COLUMNS)."""
    parts = [batch.key_light, batch.fill_light, batch.light_strength, batch.light_radius[None]]
    return torch.cat(parts if varied is None else [*parts, varied]).T.contiguous()


def _object_table(batch: FrameLayout) -> Tensor:
    """Return the objects of each scene (S, K, OBJECT_COLUMNS)."""
    shape = batch.shape.float()
    rest = torch.stack([batch.size, batch.radius, shape, shape])
    return torch.cat([batch.centre, batch.rotation.flatten(0, 1), rest]).permute(1, 2, 0).contiguous()


def _surface_table(batch: FrameBatch) -> Tensor:
    """Return the surfaces of each scene (S, K + 1, SURFACE_COLUMNS)."""
    parts = [batch.palette.flatten(0, 1), batch.finish, batch.material.float()[None]]
    return torch.cat(parts).permute(1, 2, 0).contiguous()


@functools.cache
def is_supported(device: torch.device) -> bool:
    """Return whether the kernels run on this device: an NVIDIA GPU of compute capability 8.0 or later."""
    return device.type == "cuda" and not torch.version.hip and torch.cuda.get_device_capability(device) >= (8, 0)


def device_of(x: Tensor) -> AbstractContextManager[object]:
    """Make the device of x the current one, where Triton launches kernels. Its interpreter runs them on the CPU."""
    return torch.cuda.device_of(x) if x.is_cuda else nullcontext()
