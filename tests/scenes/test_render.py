import numpy as np
import pytest
import torch

from cutslots.scenes import FAMILIES, Scenes, draw, materials, render
from tests.conftest import needs_cuda


@pytest.mark.parametrize("family", FAMILIES)
def test_every_object_is_seen(family):
    """By so many of the 32 x 32 rays that decide it, so by so many pixels of a 32 x 32 mask."""
    scenes = Scenes(family, "val", size=draw.RAYS)
    few = np.arange(2 if family == "moving" else 12)
    world = scenes.world(few)
    made = render.render(world, scenes.size)
    for b in few:
        n = world.count[b]
        shown = made.pixels[b, :, :n].numpy() >= draw.SEEN
        assert (shown.sum(0) >= min(draw.SEEN_FRAMES, scenes.frames)).all()
        counted = [(made.mask[b] == k + 1).flatten(1).sum(1) for k in range(n)]
        assert torch.equal(torch.stack(counted, 1), made.pixels[b, :, :n])
        assert made.mask[b].max() <= n and (made.pixels[b, :, n:] == 0).all()
        assert (made.pixels <= made.whole).all()


def test_a_mask_is_what_the_pixels_centre_sees():
    """One object alone: its mask is where the ray through the pixel's centre meets its ball, worked out by hand."""
    world = draw.draw("plain", "train", 0, np.arange(40))
    spheres = [(b, k) for b in range(40) for k in range(world.count[b]) if world.shape[b, k] == 0]
    b, k = spheres[0]
    one = world.pick(slice(b, b + 1))
    for name in ("shape", "size"):
        getattr(one, name)[:, 0] = getattr(one, name)[:, k]
    one.position[:, :, 0] = one.position[:, :, k]
    one.count[:] = 1
    size = 96
    mask = render.render(one, size).mask[0, 0].numpy()
    eye, target = one.camera[0], one.target[0]
    forward = (target - eye) / np.linalg.norm(target - eye)
    right = np.cross(forward, [0, 0, 1])
    right /= np.linalg.norm(right)
    down = np.cross(forward, right)
    at = ((np.arange(size) + 0.5) / size * 2 - 1) * np.tan(np.radians(30.7 / 2))
    d = forward + at[None, :, None] * right + at[:, None, None] * down
    d /= np.linalg.norm(d, axis=-1, keepdims=True)
    to = one.position[0, 0, 0] - eye
    off = np.sqrt(to @ to - (d @ to) ** 2)
    clear = np.abs(off - one.size[0, 0]) > 1e-4
    assert ((mask == 1) == (off < one.size[0, 0]))[clear].all() and (mask == 1).sum() > 50


def test_pictures_are_smooth_where_masks_are_sharp():
    """Antialiasing: a picture is close to the mean of one rendered four times as fine."""
    world = draw.draw("plain", "train", 0, [1])
    small, large = (render.render(world, size).image[0, 0].float() for size in (48, 192))
    mean = large.reshape(3, 48, 4, 48, 4).mean((2, 4))
    assert (small - mean).abs().mean() < 2.5


@pytest.mark.parametrize("name", materials.NAMES)
def test_patterns_are_shares(name):
    p = torch.rand(3, 2000) * 8 - 4
    look = materials.MATERIALS[name](p, p[:2], materials.noise(torch.device("cpu")))
    for share in (look.second, look.third):
        assert share.shape == (2000,) and share.min() >= 0 and share.max() <= 1
    assert look.height.isfinite().all()
    if name not in ("rubber", "metal"):
        assert look.second.std() + look.third.std() > 0.02


def test_the_atlas_repeats_without_a_seam():
    noise = materials.noise(torch.device("cpu"))
    p = torch.rand(3, 500)
    assert torch.allclose(noise(p, 1.0, 0, 1, 5), noise(p + 1, 1.0, 0, 1, 5), atol=1e-4)


@needs_cuda
@pytest.mark.parametrize("family", FAMILIES)
def test_two_devices_agree(family):
    scenes = Scenes(family, size=64)
    few = np.arange(2 if family == "moving" else 16)
    here, there = (scenes.render(few, device) for device in ("cpu", "cuda"))
    assert (here.mask != there.mask.cpu()).float().mean() < 0.005
    assert (here.image.float() - there.image.cpu().float()).abs().mean() < 1.0
    alone = scenes.render(few[-1:], "cuda")
    assert torch.equal(alone.image[0], there.image[-1])
