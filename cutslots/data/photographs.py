"""What the readers of photographs and real videos share: decoding, crops and resizing, and clips.

Objects have labels from 1; `IGNORE_LABEL` marks pixels that metrics leave out.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import TypeVar

import numpy as np
from PIL import Image

from cutslots.data.images import MAX_PIXELS
from cutslots.data.resize import nearest_indices, resize_image, resize_mask
from cutslots.data.source import Protocol, Row, count_objects, decode_png
from cutslots.files import errors_name_path

IGNORE_LABEL = 255
MAX_LABEL = IGNORE_LABEL - 1

T = TypeVar("T")


def read_photo(path: Path, size: tuple[int, int] | None = None) -> np.ndarray:
    """Return the pixels (H, W, 3) of a JPEG, as they are stored: EXIF's orientation is not applied, as masks are not
    rotated. `size` is the expected (width, height)."""

    def decode(data: bytes) -> np.ndarray:
        image = Image.open(io.BytesIO(data), formats=("JPEG", "PNG"))
        if image.width * image.height > MAX_PIXELS:
            raise ValueError(f"it has {image.width}x{image.height} pixels; expected at most {MAX_PIXELS:,}")
        if size is not None and image.size != size:
            raise ValueError(f"it is {image.width}x{image.height}; expected {size[0]}x{size[1]}")
        return np.asarray(image.convert("RGB"))

    return _read(path, decode)


def read_labels(path: Path, size: tuple[int, int]) -> np.ndarray:
    """Return the labels (H, W) of a palette or grayscale PNG of a size (width, height)."""
    return _read(path, lambda data: np.asarray(decode_png(data, ("P", "L"), size)))


def _read(path: Path, decode: Callable[[bytes], T]) -> T:
    """Return what `decode` makes of a file. Errors name the file."""
    with errors_name_path(path):
        data = path.read_bytes()
    try:
        return decode(data)
    except ValueError as error:
        raise ValueError(f"{path.name}: {error}") from None
    except Exception as error:  # Pillow's readers raise SyntaxError, struct.error, OSError...
        raise ValueError(f"{path.name}: it cannot be read as an image: {error}") from None


def read_names(path: Path) -> list[str]:
    """Return the lines of a text file, the names of images or videos."""
    if not path.is_file():
        raise ValueError(f"there is no {path}; expected a name in each line")
    with errors_name_path(path):
        names = path.read_text(errors="replace").split()
    if not names:
        raise ValueError(f"{path} is empty; expected a name in each line")
    wrong = [name for name in names if not is_inside(name)]
    if wrong:
        raise ValueError(f"{path} holds {wrong[0]!r}; expected names without folders")
    return names


def is_inside(name: str) -> bool:
    """Return whether a name from a file stays inside the folder it is appended to."""
    path = PurePosixPath(name)
    return bool(name) and "\0" not in name and not path.is_absolute() and ".." not in path.parts


# ---------------------------------------------------------------------------------------------------- crop and resize


def fit_image(image: np.ndarray, protocol: Protocol, size: int) -> np.ndarray:
    """Return an image (H, W, 3) as the protocol crops and resizes it: (3, size, size)."""
    image = _prescale(image, protocol, 0)
    if protocol.resize_first:
        image = resize_image(image, _scaled(image.shape[:2], size), protocol.resize)
        return np.ascontiguousarray(image[_center(image.shape[:2], size)].transpose(2, 0, 1))
    square = image[_center(image.shape[:2], min(image.shape[:2]))]
    return np.ascontiguousarray(resize_image(square, (size, size), protocol.resize).transpose(2, 0, 1))


def fit_mask(labels: np.ndarray, protocol: Protocol, size: int) -> np.ndarray:
    """Return labels (..., H, W) as the protocol crops and resizes them: (..., size, size)."""
    labels = _prescale(labels, protocol, labels.ndim - 2)
    shape = labels.shape[-2:]
    if protocol.resize_first:
        shape = _scaled(shape, size)
        return np.ascontiguousarray(resize_mask(labels, shape, protocol.resize)[..., *_center(shape, size)])
    return resize_mask(labels[..., *_center(shape, min(shape))], (size, size), protocol.resize)


def photo_row(image: np.ndarray, labels: np.ndarray, protocol: Protocol, size: int) -> Row:
    """Return what a prepared dataset stores of a photograph (H, W, 3) and its objects and classes (2, H, W)."""
    objects, classes = (fit_mask(each, protocol, protocol.mask_size or size)[None] for each in labels)
    count = count_objects(labels[0], IGNORE_LABEL)
    return {"images": fit_image(image, protocol, size)[None], "masks": objects, "classes": classes, "objects": count}


def _prescale(array: np.ndarray, protocol: Protocol, axis: int) -> np.ndarray:
    """Scale the shorter of two sides, `axis` and the next, to `protocol.prescale` by the nearest pixel."""
    if protocol.prescale is None:
        return array
    shape = _scaled(array.shape[axis : axis + 2], protocol.prescale)
    for i, size in enumerate(shape):
        array = array.take(nearest_indices(array.shape[axis + i], size, "torch-bicubic"), axis + i)
    return array


def _scaled(shape: tuple[int, ...], size: int) -> tuple[int, int]:
    """Return (height, width) with the shorter side scaled to `size`, as torchvision rounds the longer one."""
    height, width = shape
    return (size, int(size * width / height)) if height <= width else (int(size * height / width), size)


def _center(shape: tuple[int, ...], size: int) -> tuple[slice, slice]:
    """Return rows and columns of the central square, as torchvision's center_crop has them: halves go to even."""
    top, left = (round((side - size) / 2) for side in shape)
    return slice(top, top + size), slice(left, left + size)
