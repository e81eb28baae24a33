"""Images of any kind as the tensors that a model takes: paths, PIL images, arrays and tensors.

This is the only place where values are checked. A model checks the type and the shape of its input alone: looking at
the values would make the CPU wait for the GPU in every step.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias, get_args

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from cutslots.data.images import ImageWarning, list_images, read_image

Resize = Literal["pad", "stretch"]

ImageLike: TypeAlias = str | os.PathLike[str] | Image.Image | np.ndarray | Tensor
Images: TypeAlias = ImageLike | Sequence[ImageLike]


class Box(NamedTuple):
    """The pixels of a model's image that are not padding."""

    top: int
    left: int
    height: int
    width: int

    def crop(self, x: Tensor) -> Tensor:
        """Return the pixels (..., h, w) of x (..., H, W) inside the box."""
        return x[..., self.top : self.top + self.height, self.left : self.left + self.width]


class NamedImage(NamedTuple):
    name: str  # that of the file, or image_0, image_1, ...
    image: Image.Image  # RGB


def prepare_images(images: Images, size: tuple[int, int], resize: Resize = "pad") -> Tensor:
    """Return images as one batch (B, 3, H, W), uint8, for a model whose image size (H, W) is `size`.

    Args:
        images: One image, a folder of images, or a sequence of images of any sizes. An image is one of these:

            - a path;
            - a PIL image of any mode;
            - an array (height, width), (height, width, 1) or (height, width, 3);
            - a tensor (height, width), (1, height, width) or (3, height, width);
            - one of a batch (B, height, width, C) of arrays or (B, C, height, width) of tensors.

            Arrays and tensors are uint8, uint16 (the full range, 0 to 65,535) or floating point in [0, 1]. Values out
            of range or not finite are a ValueError: the scale is never guessed.
        size: Height and width, as in `model.image_size`.
        resize: "pad" keeps the aspect ratio: the image is scaled to fit and its border pixels are repeated around it.
            "stretch" scales height and width separately.

    >>> prepare_images([np.zeros((20, 30, 3), np.uint8), torch.rand(3, 64, 64)], (64, 64)).shape
    torch.Size([2, 3, 64, 64])
    """
    return torch.cat([fit_image(image, size, resize)[0] for _, image in open_images(images)])


def open_images(images: Images) -> Iterator[NamedImage]:
    """Yield the names and the RGB images of what `prepare_images` accepts, one at a time."""
    if isinstance(images, str | os.PathLike):
        for file in find_images(Path(images)):
            yield NamedImage(file.name, open_image(file))
        return
    if isinstance(images, Image.Image) or (isinstance(images, np.ndarray | Tensor) and images.ndim < 4):
        images = [images]
    elif not isinstance(images, Sequence | np.ndarray | Tensor):
        expected = "paths, PIL images, arrays, tensors or a list of them"
        raise TypeError(f"images are a {type(images).__name__}; expected {expected}")
    if not len(images):
        raise ValueError("images are empty; expected at least one image")
    for number, image in enumerate(images):
        yield NamedImage(_name(image, number), open_image(image))


def _name(image: object, number: int) -> str:
    return Path(image).name if isinstance(image, str | os.PathLike) else f"image_{number}"


def open_image(image: ImageLike) -> Image.Image:
    """Return an image of any kind as RGB of 8 bits; see `prepare_images`."""
    if isinstance(image, str | os.PathLike):
        with warnings.catch_warnings(action="ignore"):  # Pillow's: what matters is raised
            warnings.simplefilter("default", ImageWarning)
            return read_image(Path(image))
    if isinstance(image, Image.Image):
        return _from_pil(image)
    if isinstance(image, Tensor):
        if image.ndim == 3 and image.shape[0] not in (1, 3):
            raise ValueError(
                f"image is a tensor {tuple(image.shape)}; expected (3, height, width) or (1, height, width)"
            )
        array: np.ndarray = (image.float() if image.is_floating_point() else image).detach().cpu().numpy()
        return _from_array(array.transpose(1, 2, 0) if image.ndim == 3 else array, "tensor")
    if isinstance(image, np.ndarray):
        return _from_array(image, "array")
    raise TypeError(f"image is a {type(image).__name__}; expected a path, a PIL image, an array or a tensor")


def _from_pil(image: Image.Image) -> Image.Image:
    """Return an upright RGB copy. Transparency is dropped, as for files."""
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I"):
        array = np.asarray(image)
        if array.size and not 0 <= array.min() <= array.max() <= 65535:
            raise ValueError(f"image has values {_range(array)} in mode {image.mode}; expected 0 to 65,535")
        return _from_array(array.astype(np.uint16), "PIL image")
    if image.mode == "F":
        return _from_array(np.asarray(image), "PIL image")
    if "transparency" in image.info and image.mode != "RGB":
        image = image.convert("RGBA")
    return image.convert("RGB") if image.mode != "RGB" else image.copy()


def _from_array(array: np.ndarray, kind: str) -> Image.Image:
    gray = array.ndim == 2 or (array.ndim == 3 and array.shape[2] == 1)
    if not (gray or (array.ndim == 3 and array.shape[2] == 3)) or not array.size:
        shapes = "(height, width), (height, width, 1) or (height, width, 3)"
        raise ValueError(f"image is an array {array.shape}; expected {shapes}, at least one pixel")
    if array.dtype == np.uint16:
        array = array / np.float32(65535)
    elif array.dtype.kind == "f":
        _check_values(array, kind)
    elif array.dtype != np.uint8:
        raise TypeError(f"image is {_article(kind)} of {array.dtype}; expected uint8, uint16 or floats in [0, 1]")
    if array.dtype != np.uint8:
        array = (array * 255).round().astype(np.uint8)
    return Image.fromarray(np.ascontiguousarray(array.squeeze(2) if gray and array.ndim == 3 else array)).convert("RGB")


def _check_values(array: np.ndarray, kind: str) -> None:
    if not np.isfinite(array).all():
        raise ValueError(f"image is {_article(kind)} with values that are not finite; expected values in [0, 1]")
    if array.min() < 0 or array.max() > 1:
        advice = "; divide by 255, or pass uint8" if array.min() >= 0 and 1 < array.max() <= 255 else ""
        raise ValueError(f"image is {_article(kind)} of floats {_range(array)}; expected values in [0, 1]{advice}")


def _range(array: np.ndarray) -> str:
    return f"from {array.min():.6g} to {array.max():.6g}"


def _article(kind: str) -> str:
    return f"{'an' if kind == 'array' else 'a'} {kind}"


def find_images(path: Path) -> list[Path]:
    """Return a file itself, or the images of a folder, or of its subfolder images/ as `generate` writes it."""
    if path.exists() and not path.is_dir():
        return [path]
    if not path.is_dir():
        raise ValueError(f"images: there is no {path}; expected an image or a folder of images")
    inner = path / "images"
    files = (list_images(inner, by_name=True) if inner.is_dir() else []) or list_images(path, by_name=True)
    if not files:
        raise ValueError(f"images: {path} holds no images")
    return files


def fit_image(image: Image.Image, size: tuple[int, int], resize: Resize = "pad") -> tuple[Tensor, Box]:
    """Return an RGB image as uint8 (1, 3, H, W) with `size` = (H, W), and where it lies in it."""
    if resize not in get_args(Resize):
        raise ValueError(f"resize is {resize!r}; expected one of {', '.join(get_args(Resize))}")
    height, width = size
    box = _fit(image.size, size) if resize == "pad" else Box(0, 0, height, width)
    pixels = np.array(image.resize((box.width, box.height), Image.Resampling.BILINEAR))
    bottom, right = height - box.top - box.height, width - box.left - box.width
    pixels = np.pad(pixels, ((box.top, bottom), (box.left, right), (0, 0)), mode="edge")
    return torch.from_numpy(pixels).permute(2, 0, 1)[None], box


def _fit(size: tuple[int, int], shape: tuple[int, int]) -> Box:
    """Return the largest centred box in (H, W) with the aspect ratio of an image of size (width, height)."""
    (width, height), (H, W) = size, shape
    scale = min(H / height, W / width)
    h, w = (max(1, min(round(scale * side), limit)) for side, limit in ((height, H), (width, W)))
    return Box((H - h) // 2, (W - w) // 2, h, w)
