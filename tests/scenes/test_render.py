import numpy as np
import pytest
import torch

from cutslots.scenes import FAMILIES, Scenes, materials, render, sample
from tests.conftest import needs_cuda


@pytest.mark.parametrize("family", FAMILIES)
def test_every_object_is_visible(family):
    """At the size of the visibility check, the mask has the pixels that were counted there."""
    scenes = Scenes(family, "val", size=sample.VISIBILITY_SIZE)
    indices = np.arange(2 if family == "moving" else 12)
    contents = scenes.sample(indices)
    rendered = render.render(contents, scenes.image_size)
    for b in indices:
        n = contents.count[b]
        visible = rendered.visible_pixels[b, :, :n].numpy() >= sample.MIN_VISIBLE_RAYS
        assert (visible.sum(0) >= min(sample.MIN_VISIBLE_FRAMES, scenes.frames)).all()
        counted = [(rendered.mask[b] == k + 1).flatten(1).sum(1) for k in range(n)]
        assert torch.equal(torch.stack(counted, 1), rendered.visible_pixels[b, :, :n])
        assert rendered.mask[b].max() <= n and (rendered.visible_pixels[b, :, n:] == 0).all()
        assert (rendered.visible_pixels <= rendered.unoccluded_pixels).all()


def test_the_mask_of_a_sphere_matches_its_projection():
    """The reference computes the distance of the rays through pixel centres from the sphere's centre."""
    contents = sample.sample_scenes("plain", "train", 0, np.arange(40)).numpy()
    spheres = [(b, k) for b in range(40) for k in range(contents.count[b]) if contents.shape[b, k] == 0]
    b, k = spheres[0]
    one = contents.select(slice(b, b + 1))
    for name in ("shape", "size"):
        getattr(one, name)[:, 0] = getattr(one, name)[:, k]
    one.position[:, :, 0] = one.position[:, :, k]
    one.count[:] = 1
    size = 96
    mask = render.render(one, (size, size)).mask[0, 0].numpy()
    eye, target = one.camera[0], one.target[0]
    forward = (target - eye) / np.linalg.norm(target - eye)
    right = np.cross(forward, [0, 0, 1])
    right /= np.linalg.norm(right)
    down = np.cross(forward, right)
    coordinate = ((np.arange(size) + 0.5) / size * 2 - 1) * np.tan(np.radians(30.7 / 2))
    d = forward + coordinate[None, :, None] * right + coordinate[:, None, None] * down
    d /= np.linalg.norm(d, axis=-1, keepdims=True)
    centre = one.position[0, 0, 0] - eye
    distance = np.sqrt(centre @ centre - (d @ centre) ** 2)
    clear = np.abs(distance - one.size[0, 0]) > 1e-4
    assert ((mask == 1) == (distance < one.size[0, 0]))[clear].all() and (mask == 1).sum() > 50


def test_images_are_antialiased():
    """An image is close to the mean of one rendered at four times the size."""
    contents = sample.sample_scenes("plain", "train", 0, [1])
    small, large = (render.render(contents, (size, size)).image[0, 0].float() for size in (48, 192))
    mean = large.reshape(3, 48, 4, 48, 4).mean((2, 4))
    assert (small - mean).abs().mean() < 2.5


@pytest.mark.parametrize("name", materials.NAMES)
def test_patterns_return_shares_and_finite_heights(name):
    p = torch.rand(3, 2000) * 8 - 4
    pattern = materials.MATERIALS[name](p, p[:2], materials.noise(torch.device("cpu")))
    for share in (pattern.second, pattern.third):
        assert share.shape == (2000,) and share.min() >= 0 and share.max() <= 1
    assert pattern.height.isfinite().all()
    if name not in ("rubber", "metal"):
        assert pattern.second.std() + pattern.third.std() > 0.02


def test_the_noise_atlas_tiles_without_a_seam():
    noise = materials.noise(torch.device("cpu"))
    p = torch.rand(3, 500)
    assert torch.allclose(noise(p, 1.0, 0, 1, 5), noise(p + 1, 1.0, 0, 1, 5), atol=1e-4)


@needs_cuda
@pytest.mark.parametrize("family", FAMILIES)
def test_two_devices_agree(family):
    scenes = Scenes(family, size=64)
    indices = np.arange(2 if family == "moving" else 16)
    here, there = (scenes.get_batch(indices, device) for device in ("cpu", "cuda"))
    assert (here.mask != there.mask.cpu()).float().mean() < 0.005
    assert (here.image.float() - there.image.cpu().float()).abs().mean() < 1.0
    alone = scenes.get_batch(indices[-1:], "cuda")
    assert torch.equal(alone.image[0], there.image[-1])


@pytest.mark.parametrize("height, width", [(48, 48), (48, 31), (17, 48), (47, 48), (1, 48), (48, 1)])
def test_a_rectangular_image_is_the_centre_crop_of_the_square(height, width):
    contents = sample.sample_scenes("textured", "train", 0, [1, 2])
    square, crop = render.render(contents, (48, 48)), render.render(contents, (height, width))
    top, left = (48 - height) // 2, (48 - width) // 2
    assert crop.image.shape == (2, 1, 3, height, width)
    assert torch.equal(crop.image, square.image[..., top : top + height, left : left + width])
    assert torch.equal(crop.mask, square.mask[..., top : top + height, left : left + width])
    counts = torch.stack([(crop.mask == k + 1).sum((2, 3)) for k in range(contents.shape.shape[1])], -1)
    assert torch.equal(crop.visible_pixels, counts)
    assert (crop.visible_pixels <= crop.unoccluded_pixels).all()
