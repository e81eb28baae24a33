"""The CUDA kernels of scenes against the torch code on the CPU.

Where there is Triton but no GPU, the last test runs this file under Triton's interpreter.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec

import numpy as np
import pytest
import torch

from cutslots.scenes import FAMILIES, materials, render, sample, shapes
from tests.conftest import needs_cuda

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton") is not None
DEVICE = "cpu" if INTERPRETED else "cuda"
needs_kernels = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(), reason="needs a CUDA device or Triton's interpreter"
)
METAL = materials.NAMES.index("metal")
IMAGE_FAMILIES = [name for name, family in FAMILIES.items() if family.frames == 1]
VARIATIONS = ("none", "v1")
CASES = [(family, variation, 16, (64, 64)) for family in IMAGE_FAMILIES for variation in VARIATIONS]
if INTERPRETED:
    CASES = [
        ("plain", "none", 1, (8, 8)),
        ("ood", "none", 1, (5, 8)),
        ("plain", "v1", 2, (8, 5)),
        ("camo", "v1", 1, (5, 8)),
    ]


@pytest.fixture(autouse=True)
def supported(monkeypatch):
    """Let the CPU use the kernels under the interpreter, with few programs: each operation takes microseconds."""
    if INTERPRETED:
        for module in (render.kernels, sample.kernels):
            monkeypatch.setattr(module, "is_supported", lambda device: True)
        monkeypatch.setattr(render.kernels, "TILE_H", 32)
        monkeypatch.setattr(render.kernels, "TILE_W", 32)


def by_torch(function, *args, **options):
    """Return what the torch code computes, on the CPU unless the arguments name another device."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (render, sample):
            patch.setattr(module, "kernels", None)
        return function(*args, **options)


def assert_same(scenes, image_size, device="cpu"):
    """Masks and counts are those of torch; images differ in the rounding of highlights and textures.

    A ray that touches an object may hit it on one device only: of five million pixels of 64 scenes of each family, one.
    """
    expected, found = by_torch(render.render, scenes, image_size, device), render.render(scenes, image_size, DEVICE)
    different = int((found.mask.cpu() != expected.mask.cpu()).sum())
    assert different <= 1
    for name in ("visible_pixels", "unoccluded_pixels"):
        assert (getattr(found, name) - getattr(expected, name).to(DEVICE)).abs().sum() <= 2 * different, name
    gap = (found.image.cpu().int() - expected.image.cpu().int()).abs()
    assert (gap > 0).float().mean() < 0.005 and gap.float().mean() < 0.01


@needs_kernels
@pytest.mark.parametrize("family, variation, count, image_size", CASES)
def test_rendering_equals_the_torch_code(family, variation, count, image_size):
    scenes = by_torch(sample.sample_scenes, family, "val", 0, np.arange(count), variation=variation)
    assert_same(scenes, image_size)


@needs_cuda
@pytest.mark.parametrize("variation", VARIATIONS)
@pytest.mark.parametrize("family", IMAGE_FAMILIES)
def test_rendering_equals_the_torch_code_on_the_same_device(family, variation):
    scenes = sample.sample_scenes(family, "test", 0, np.arange(16), device="cuda", variation=variation)
    assert_same(scenes, (64, 64), "cuda")


@needs_cuda
@pytest.mark.parametrize("family", FAMILIES)
def test_a_varied_scene_is_the_same_alone_and_in_a_batch(family):
    scenes = sample.sample_scenes(family, "val", 0, [3, 0, 7], device="cuda", variation="v1")
    together = render.render(scenes, (48, 40), "cuda")
    for row, index in enumerate((3, 0, 7)):
        alone = render.render(
            sample.sample_scenes(family, "val", 0, [index], device="cuda", variation="v1"), (48, 40), "cuda"
        )
        for name, value in alone._asdict().items():
            assert torch.equal(value[0], getattr(together, name)[row]), name


@needs_kernels
@pytest.mark.parametrize("family, variation", [("textured", "none"), ("ood", "none"), ("textured", "v1")])
def test_counts_of_visible_pixels_equal_the_torch_code(family, variation):
    """Sampling accepts scenes by these counts: one pixel more on one device would give it other scenes."""
    indices = np.arange(3 if INTERPRETED else 300)
    scenes = by_torch(sample.sample_scenes, family, "train", 0, indices, variation=variation)
    found = render.count_visible_pixels(scenes.to(DEVICE), 32)
    assert torch.equal(found.cpu(), by_torch(render.count_visible_pixels, scenes, 32))


@needs_kernels
def test_random_numbers_equal_the_torch_code():
    rng = sample.HashRNG(
        "ood", "val", 2**32 - 1, torch.tensor([0, 7, 10**12], device=DEVICE), torch.arange(3).to(DEVICE)
    )
    for shape in ((), (1,), (5, 3), (700, 2)):
        expected = by_torch(sample.HashRNG.from_keys(rng.key.cpu()), "spot", *shape)
        assert torch.equal(rng("spot", *shape).cpu(), expected)


@needs_cuda
@pytest.mark.parametrize("name", shapes.NAMES)
def test_every_shape_equals_the_torch_code(name):
    scenes = sample.sample_scenes("textured", "train", 3, np.arange(8))
    assert_same(replace(scenes, shape=torch.full_like(scenes.shape, shapes.NAMES.index(name))), (48, 48))


@needs_cuda
@pytest.mark.parametrize("name", materials.NAMES)
def test_every_material_equals_the_torch_code(name):
    scenes = sample.sample_scenes("textured", "train", 4, np.arange(8))
    assert_same(replace(scenes, material=torch.full_like(scenes.material, materials.NAMES.index(name))), (48, 48))


@needs_cuda
@pytest.mark.parametrize("polish", [0.0, 1.0])
def test_polished_metal_and_falling_light_equal_the_torch_code(polish):
    scenes = sample.sample_scenes("plain", "train", 5, np.arange(8), variation="v1")
    light = scenes.light.clone()
    light[:, 4], light[:, 5] = 1 - polish, polish
    assert_same(replace(scenes, material=torch.full_like(scenes.material, METAL), light=light), (48, 48))


@needs_cuda
@pytest.mark.parametrize("variation", VARIATIONS)
@pytest.mark.parametrize("height, width", [(48, 48), (48, 31), (17, 48), (1, 48), (48, 1)])
def test_a_rectangular_image_is_the_centre_crop_of_the_square(height, width, variation):
    contents = sample.sample_scenes("textured", "train", 0, [1, 2], device="cuda", variation=variation)
    square, crop = (render.render(contents, size, "cuda") for size in ((48, 48), (height, width)))
    top, left = (48 - height) // 2, (48 - width) // 2
    assert torch.equal(crop.image, square.image[..., top : top + height, left : left + width])
    assert torch.equal(crop.mask, square.mask[..., top : top + height, left : left + width])


@needs_cuda
@pytest.mark.parametrize("variation", VARIATIONS)
def test_no_scenes_and_videos(variation):
    empty = sample.sample_scenes("plain", "train", 0, [], device="cuda", variation=variation)
    assert render.render(empty, (16, 16), "cuda").image.shape == (0, 1, 3, 16, 16)
    assert_same(sample.sample_scenes("moving", "train", 0, [0], variation=variation), (32, 32))


@needs_cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a CUDA device, and a second one")
def test_kernels_run_on_the_device_of_the_scenes():
    contents = sample.sample_scenes("plain", "train", 0, [1, 2], device="cuda:1")
    found = render.render(contents, (32, 32), "cuda:1")
    assert found.image.device.index == 1
    assert torch.equal(found.mask.cpu(), render.render(contents, (32, 32), "cuda:0").mask.cpu())


@pytest.mark.skipif(
    find_spec("triton") is None or INTERPRETED or torch.cuda.is_available(), reason="needs Triton and no CUDA device"
)
def test_under_the_interpreter():
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", __file__]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:]
