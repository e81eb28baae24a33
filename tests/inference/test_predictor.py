"""Preprocessing and upsampling of images of any size."""

import numpy as np
import pytest
import torch
from PIL import Image

from cutslots.evaluation.visualize import colorize
from cutslots.inference import prediction, predictor
from cutslots.inference.prediction import draw_overlay
from cutslots.inference.predictor import (
    crop_output,
    predict_image,
    preprocess,
    upsample_labels,
)
from cutslots.inference.prepare import Box
from cutslots.models.checkpoints import load
from cutslots.models.discovery import DiscoveryOutput
from cutslots.models.refinement import select_masks
from cutslots.scenes import Scenes
from cutslots.viz.images import blend_colors


@pytest.fixture(scope="module")
def model():
    return load("tiny-64")


def random_image(width, height, seed=0):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


class Wide:
    """A model of images (20, 50)."""

    image_size = (20, 50)

    def parameters(self):
        return iter([torch.zeros(1)])


@pytest.mark.parametrize(
    "size, box",
    [
        ((50, 20), (0, 0, 20, 50)),
        ((500, 200), (0, 0, 20, 50)),
        ((20, 20), (0, 15, 20, 20)),
        ((100, 20), (5, 0, 10, 50)),
        ((40, 20), (0, 5, 20, 40)),
        ((1, 9999), (0, 24, 20, 1)),
        ((9999, 1), (9, 0, 1, 50)),
        ((1, 1), (0, 15, 20, 20)),
    ],
)
def test_padding_keeps_the_aspect_ratio(size, box):
    image = random_image(*size)
    pixels, found = preprocess(Wide(), image)
    assert found == box and pixels.shape == (1, 3, 20, 50) and pixels.dtype == torch.uint8
    scaled = np.array(image.resize((found.width, found.height), Image.Resampling.BILINEAR))
    assert np.array_equal(found.crop(pixels)[0].permute(1, 2, 0), scaled)


def test_padding_repeats_the_border():
    pixels, box = preprocess(Wide(), random_image(20, 20))
    assert torch.equal(pixels[..., : box.left], pixels[..., box.left, None].expand(-1, -1, -1, box.left))
    last = box.left + box.width - 1
    assert torch.equal(pixels[..., last:], pixels[..., last, None].expand(-1, -1, -1, 50 - last))


@pytest.mark.parametrize("size", [(50, 20), (25, 10), (175, 70), (5, 2)])
def test_image_with_the_aspect_ratio_of_the_model_is_only_scaled(size):
    padded, stretched = (preprocess(Wide(), random_image(*size), resize) for resize in ("pad", "stretch"))
    assert torch.equal(padded[0], stretched[0]) and padded[1] == stretched[1] == (0, 0, 20, 50)


def test_stretching_fills_the_image():
    image = random_image(7, 30)
    pixels, box = preprocess(Wide(), image, "stretch")
    assert box == (0, 0, 20, 50)
    assert np.array_equal(pixels[0].permute(1, 2, 0), np.array(image.resize((50, 20), Image.Resampling.BILINEAR)))


def test_unknown_resize():
    with pytest.raises(ValueError, match=r"\Aresize is 'crop'; expected one of pad, stretch\Z"):
        preprocess(Wide(), random_image(7, 30), "crop")


def test_crop_output():
    masks, pixels = torch.rand(1, 4, 6, 8), torch.rand(1, 4, 3, 6, 8)
    output = DiscoveryOutput(torch.rand(1, 4, 5), masks, torch.rand(1, 4, 3, 4), pixels.sum(1), pixels)
    cropped = crop_output(output, Box(1, 2, 3, 4))
    assert torch.equal(cropped.masks, masks[..., 1:4, 2:6])
    assert torch.equal(cropped.slot_reconstructions, pixels[..., 1:4, 2:6])
    assert torch.equal(cropped.reconstruction, pixels.sum(1)[..., 1:4, 2:6])
    assert cropped.slots is output.slots and cropped.partition_masks is output.partition_masks


@pytest.mark.parametrize("resize", ["pad", "stretch"])
@pytest.mark.parametrize("size", [(64, 40), (30, 64), (200, 100)])
def test_labels_and_reconstruction_have_the_size_of_the_image(model, size, resize):
    found = predict_image(model, random_image(*size), resize=resize)
    assert found.labels.shape == size[::-1] and found.reconstruction.size == size
    assert found.slot_scores.shape == (model.num_slots,)


@torch.no_grad()
def test_padding_is_not_refined(model):
    """Masks are refined on the pixels of the image alone."""
    scene = Scenes("plain", "test", 64, count=1).get_batch([0]).image[0, :, 10:50]
    image = Image.fromarray(scene.permute(1, 2, 0).numpy())
    pixels, box = preprocess(model, image)
    assert box == (12, 0, 40, 64) and torch.equal(box.crop(pixels)[0], scene)
    masks = select_masks("refined", crop_output(model(pixels), box), scene[None])[0]
    assert np.array_equal(predict_image(model, image).labels, masks.argmax(0))


def test_unknown_masks(model):
    with pytest.raises(ValueError, match=r"\Amasks is 'soft'; expected one of decoder, refined, high-recall\Z"):
        predict_image(model, random_image(8, 8), "soft")


# --------------------------------------------------------------------------------------------------------- large images


def test_overlay_of_a_large_image_is_drawn_in_strips(monkeypatch, rng):
    monkeypatch.setattr(prediction, "MAX_PIXELS", 16 * 100)
    image, labels = Image.fromarray(rng.integers(0, 256, (150, 7, 3), dtype=np.uint8)), rng.integers(0, 6, (150, 7))
    expected = blend_colors(np.asarray(image), colorize(labels))
    draw_overlay(image, labels)
    assert np.array_equal(image, expected)


def test_scores_of_more_pixels_than_float32_can_count():
    """A running sum in float32 would not pass 2^24."""
    labels, scores = upsample_labels(torch.tensor([0.9, 0.1]).reshape(2, 1, 1), (5000, 5000))
    assert scores[0] == pytest.approx(0.9, abs=1e-6) and not scores[1] and not labels.any()


@pytest.mark.parametrize("shape", [(300, 7), (7, 300), (1, 90), (90, 1), (200, 150)])
def test_masks_of_a_large_image_are_upsampled_in_strips(monkeypatch, shape):
    masks = torch.randn(5, 16, 12, generator=torch.Generator().manual_seed(0)).softmax(0)
    at_once = upsample_labels(masks, shape)
    monkeypatch.setattr(predictor, "MAX_PIXELS", 40)
    in_strips = upsample_labels(masks, shape)
    assert np.array_equal(at_once[0], in_strips[0])
    np.testing.assert_allclose(at_once[1], in_strips[1], rtol=1e-5)
