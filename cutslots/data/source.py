"""Published datasets as they are on disk: what a reader provides, and the crops that all readers share.

A `Source` checks the files and yields a `SourceRecord` for each row of the cache, or for half a row where an archive
stores an image and its mask apart. Their order is always the same. `SourceRecord.load` decodes, crops and resizes, in
any thread. A `DatasetSpec` holds what papers agree on: counts, crops, splits.
"""

from __future__ import annotations

import abc
import dataclasses
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

Splits = dict[str, tuple[int, int]]  # first row and end of each split
Box = tuple[int, int, int, int]  # left, top, right, bottom
Row = dict[str, np.ndarray]  # images (T, 3, S, S), masks (T, S, S), objects (), all uint8; or some of them

WIDTH, HEIGHT = 320, 240  # of CLEVR's and CLEVRTEX's images
MAX_OBJECTS = 10
MAX_PIXELS = 2**20  # of an image


class SourceRecord(NamedTuple):
    """What a source stores in one place: a scene, a video, an image or a mask."""

    where: str  # the file and the record in it, for messages
    row: int  # of the cache
    load: Callable[[], Row]


class Source(abc.ABC):
    """The files of a published dataset. The constructor checks what it can without reading everything."""

    files: list[tuple[Path, int]]  # what is read, with sizes in bytes
    num_rows: int | None = None  # if it is known before everything is read
    num_records: int | None = None  # likewise

    @abc.abstractmethod
    def records(self) -> Iterator[SourceRecord]: ...

    @abc.abstractmethod
    def splits(self, num_rows: int) -> Splits: ...


@dataclasses.dataclass(frozen=True)
class Protocol:
    """How papers crop a dataset and which scenes they keep."""

    crop: Box | None  # None: `center_box` of any image size
    num_objects: tuple[int, int] | None = None  # smallest and largest number of objects; None: all scenes


@dataclasses.dataclass(frozen=True)
class DatasetSpec:
    """A published dataset: its title, its number of scenes if the publisher gives it, its reader and protocols."""

    title: str
    count: int | None
    open: Callable[[Path, int, str], Source]  # (source, size, protocol)
    protocols: dict[str, Protocol]
    frames: int = 1


# --------------------------------------------------------------------------------------------------------------- images


def center_box(width: int, height: int) -> Box:
    """Return the central square with a side of int(0.8 x the shorter side), as in CLEVRTEX's loader and the paper."""
    side = int(0.8 * min(width, height))
    left, top = (width - side) // 2, (height - side) // 2
    return left, top, left + side, top + side


def crop_image(image: Image.Image, box: Box, size: int) -> np.ndarray:
    """Crop an image to the box and resize it bilinearly: (3, size, size)."""
    crop = image.convert("RGB").crop(box).resize((size, size), Image.Resampling.BILINEAR)
    return np.asarray(crop).transpose(2, 0, 1)


def crop_mask(labels: np.ndarray, box: Box, size: int) -> np.ndarray:
    """Crop labels (..., H, W) to the box and take the nearest pixels: (..., size, size)."""
    left, top, right, bottom = box
    rows, columns = top + nearest_indices(bottom - top, size), left + nearest_indices(right - left, size)
    return np.ascontiguousarray(labels[..., rows[:, None], columns[None, :]])


def nearest_indices(side: int, size: int) -> np.ndarray:
    """Return the pixel of a side that is nearest to each of `size` pixels, as Pillow rounds."""
    return ((np.arange(size) + 0.5) * (side / size)).astype(np.int64)


def decode_png(data: bytes, modes: tuple[str, ...], size: tuple[int, int] | None) -> Image.Image:
    """Decode a PNG. Raise a ValueError unless it is intact, of one of the modes and of the size (width, height)."""
    try:
        image = Image.open(io.BytesIO(data), formats=("PNG",))
        if image.width * image.height > MAX_PIXELS:
            raise ValueError(f"it has {image.width}x{image.height} pixels; expected at most {MAX_PIXELS:,}")
        if size is not None and image.size != size:
            raise ValueError(f"it is {image.width}x{image.height}; expected {size[0]}x{size[1]}")
        if image.mode not in modes:
            raise ValueError(f"it has mode {image.mode}; expected one of {', '.join(modes)}")
        Image.open(io.BytesIO(data), formats=("PNG",)).verify()  # load() does not check the checksums of the pixels
        image.load()
    except ValueError:
        raise
    except Exception as error:  # Pillow's readers raise SyntaxError, struct.error, OSError...
        raise ValueError(f"it cannot be read as a PNG: {error}") from None
    return image


def decode_labels(data: bytes, size: tuple[int, int] | None) -> np.ndarray:
    """Decode the labels (H, W) of a mask."""
    labels = np.asarray(decode_png(data, ("P", "L"), size))
    if labels.max() > MAX_OBJECTS:
        raise ValueError(f"a pixel has the label {labels.max()}; expected 0 to {MAX_OBJECTS}")
    return labels


def count_objects(labels: np.ndarray) -> np.ndarray:
    """Return the number of labels other than 0, as a uint8 scalar."""
    return np.array((np.bincount(labels.ravel(), minlength=1)[1:] > 0).sum(), dtype=np.uint8)
