"""Images of any kind become the same tensors; values out of range are refused, never rescaled."""

import re

import numpy as np
import pytest
import torch
from PIL import Image

from cutslots import Discovery, PairDiscovery, build, load, prepare_images
from cutslots.inference.prepare import open_images
from tests.models.configs import PAIRS

SIZE = (24, 40)
RGB = np.random.default_rng(0).integers(0, 256, (*SIZE, 3), dtype=np.uint8)
GRAY = RGB[..., 0]
BATCH = torch.from_numpy(RGB).permute(2, 0, 1)[None]
GRAY_BATCH = torch.from_numpy(GRAY)[None, None].expand(1, 3, *SIZE)


def tensor(array):
    return torch.from_numpy(array).movedim(-1, 0)


@pytest.fixture(scope="module")
def model():
    return load("tiny-64")


@pytest.mark.parametrize(
    "image",
    [
        pytest.param(RGB, id="uint8 array"),
        pytest.param(RGB.astype(np.uint16) * 257, id="uint16 array"),
        pytest.param(RGB / np.float32(255), id="float32 array"),
        pytest.param(RGB / 255, id="float64 array"),
        pytest.param(RGB[None], id="batch of arrays"),
        pytest.param([RGB], id="list"),
        pytest.param(tensor(RGB), id="uint8 tensor"),
        pytest.param(tensor(RGB) / 255, id="float tensor"),
        pytest.param(tensor(RGB)[None], id="batch of tensors"),
        pytest.param(Image.fromarray(RGB), id="PIL"),
        pytest.param(Image.fromarray(RGB).convert("RGBA"), id="PIL with alpha"),
    ],
)
def test_kinds_of_color_images(image):
    batch = prepare_images(image, SIZE)
    assert batch.dtype == torch.uint8 and torch.equal(batch, BATCH)


@pytest.mark.parametrize(
    "image",
    [
        pytest.param(GRAY, id="array"),
        pytest.param(GRAY[..., None], id="array, one channel"),
        pytest.param(GRAY.astype(np.uint16) * 257, id="uint16"),
        pytest.param(torch.from_numpy(GRAY), id="tensor"),
        pytest.param(torch.from_numpy(GRAY)[None] / 255, id="tensor, one channel"),
        pytest.param(Image.fromarray(GRAY), id="PIL L"),
        pytest.param(Image.fromarray(GRAY.astype(np.uint16) * 257), id="PIL I;16"),
        pytest.param(Image.fromarray(GRAY.astype(np.int32) * 257), id="PIL I"),
        pytest.param(Image.fromarray((GRAY / 255).astype(np.float32)), id="PIL F"),
    ],
)
def test_kinds_of_gray_images(image):
    assert torch.equal(prepare_images(image, SIZE), GRAY_BATCH)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype):
    batch = prepare_images(tensor(RGB).to(dtype) / 255, SIZE)
    assert (batch.int() - BATCH.int()).abs().max() <= 1


def test_paths_folders_and_names(tmp_path):
    Image.fromarray(RGB).save(tmp_path / "b.png")
    Image.fromarray(GRAY).save(tmp_path / "a.png")
    both = torch.cat([GRAY_BATCH, BATCH])
    assert torch.equal(prepare_images(tmp_path, SIZE), both) and torch.equal(prepare_images(str(tmp_path), SIZE), both)
    assert torch.equal(prepare_images([tmp_path / "b.png"], SIZE), BATCH)
    assert [name for name, _ in open_images([tmp_path / "b.png", GRAY])] == ["b.png", "image_1"]


def test_exif_orientation_of_an_opened_image(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    Image.fromarray(RGB).save(tmp_path / "a.png", exif=exif)
    with Image.open(tmp_path / "a.png") as image:
        assert torch.equal(prepare_images(image, SIZE[::-1]), BATCH.rot90(-1, (2, 3)))


def test_own_image_is_not_changed():
    image = Image.fromarray(RGB)
    (_, opened), *_ = open_images(image)
    opened.paste((0, 0, 0), (0, 0, *opened.size))
    assert np.array_equal(image, RGB)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("convert", [np.asarray, tensor, lambda a: Image.fromarray(a[..., 0])])
def test_values_that_are_not_finite(convert, value):
    image = (RGB / 255).astype(np.float32)
    image[3, 4] = value
    with pytest.raises(ValueError, match=r"\Aimage is an? .* with values that are not finite; expected .* \[0, 1\]\Z"):
        prepare_images(convert(image), SIZE)


@pytest.mark.parametrize(
    "low, high, advice", [(0, 255, "; divide by 255, or pass uint8"), (-1, 1, ""), (0, 1.01, None), (0, 65535, "")]
)
@pytest.mark.parametrize("convert", [np.asarray, tensor])
def test_scale_is_not_guessed(convert, low, high, advice):
    image = np.linspace(low, high, 24 * 40 * 3, dtype=np.float32).reshape(*SIZE, 3)
    kind = "an array" if convert is np.asarray else "a tensor"
    said = re.escape(f"image is {kind} of floats from {low} to {high}; expected values in [0, 1]{advice or ''}")
    with pytest.raises(ValueError, match=rf"\A{said}" + ("" if advice is None else r"\Z")):
        prepare_images(convert(image), SIZE)


@pytest.mark.parametrize(
    "image, error, said",
    [
        (RGB.astype(np.int64), TypeError, r"image is an array of int64; expected uint8, uint16 or floats in \[0, 1\]"),
        (GRAY > 5, TypeError, r"image is an array of bool; expected uint8"),
        (tensor(RGB).long(), TypeError, r"image is a tensor of int64; expected uint8"),
        (np.zeros((4, 5, 4), np.uint8), ValueError, r"image is an array \(4, 5, 4\); expected \(height, width\), "),
        (np.zeros((0, 5, 3), np.uint8), ValueError, r"image is an array \(0, 5, 3\); expected .* at least one pixel"),
        (np.zeros(5, np.uint8), ValueError, r"image is an array \(5,\); expected"),
        (torch.zeros(4, 5, 3), ValueError, r"image is a tensor \(4, 5, 3\); expected \(3, height, width\)"),
        (
            Image.fromarray(np.full((4, 4), 70000, np.int32)),
            ValueError,
            r"image has values from 70000 to 70000 in mode I",
        ),
        (5, TypeError, r"images are a int; expected paths, PIL images, arrays, tensors or a list"),
        ([None], TypeError, r"image is a NoneType; expected a path, a PIL image, an array or a tensor"),
        ([], ValueError, "images are empty; expected at least one image"),
        ("nowhere.png", ValueError, "images: there is no nowhere.png; expected an image or a folder of images"),
    ],
)
def test_what_is_not_an_image(image, error, said):
    with pytest.raises(error, match=rf"\A{said}") as raised:
        prepare_images(image, SIZE)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("image", [RGB[None], Image.fromarray(RGB), "a.png", [RGB]])
def test_models_name_the_function(model, image):
    with pytest.raises(TypeError, match=r"\Aimage is a \w+; expected a tensor \(cutslots.prepare_images makes one of"):
        model(image)
    pairs = build(PAIRS)
    assert isinstance(pairs, PairDiscovery)
    with pytest.raises(TypeError, match="expected a tensor"):
        pairs(image)


def test_model_takes_what_is_prepared(model: Discovery):
    with torch.no_grad():
        assert model(prepare_images([RGB, Image.fromarray(GRAY)], model.image_size)).masks.shape == (2, 6, 64, 64)


@pytest.mark.filterwarnings("ignore")
def test_forward_looks_at_no_values(model: Discovery):
    """Fake tensors have no values: reading one, as a check of the range would, raises. So does compiling it as one
    graph."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True):
        model.normalize(torch.rand(1, 3, 64, 64) * 255)
    compiled = torch.compile(model.normalize, backend="eager", fullgraph=True)
    assert torch.equal(compiled(torch.ones(1, 3, 64, 64)), model.normalize(torch.ones(1, 3, 64, 64)))
