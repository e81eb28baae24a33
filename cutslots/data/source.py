"""Published datasets as they are on disk: what a reader provides, and what all readers share.

A `Source` checks the files and yields a `SourceRecord` for each row of the cache, or for half a row where an archive
stores an image and its mask apart. Their order is always the same. `SourceRecord.load` decodes, crops and resizes, in
any thread. A `DatasetSpec` holds the number of scenes and the protocols, a `Protocol` how to crop and resize.
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

from cutslots.data.resize import Box, Library

Splits = dict[str, tuple[int, int]]  # first row and end of each split
Row = dict[str, np.ndarray]  # images (T, 3, S, S), masks and classes (T, M, M), objects (), all uint8; or some of them

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
    """How a paper or its code crops and resizes a dataset and which scenes it keeps."""

    crop: Box | float  # a box, or the side of a central square as a fraction of the image's shorter side
    resize: Library  # whose resizing
    size: int = 128  # height and width of the result, unless the user asks for another
    num_objects: tuple[int, int] | None = None  # smallest and largest number of objects; None: all scenes
    mask_size: int | None = None  # height and width of masks; None: those of images
    resize_first: bool = False  # the shorter side is resized, then the center is cropped
    prescale: int | None = None  # the shorter side is scaled to this first, by the nearest pixel

    def box(self, width: int, height: int) -> Box:
        """Return the crop of an image."""
        return center_box(width, height, self.crop) if isinstance(self.crop, float) else self.crop


@dataclasses.dataclass(frozen=True)
class DatasetSpec:
    """A published dataset: its title, its number of scenes if the publisher gives it, its reader and protocols."""

    title: str
    count: int | None
    open: Callable[[Path, int, str], Source]  # (source, size, protocol)
    protocols: dict[str, Protocol]
    frames: int = 1
    has_classes: bool = False  # there are semantic masks
    ignore_label: int | None = None  # the label of pixels that metrics leave out


# --------------------------------------------------------------------------------------------------------------- images


def center_box(width: int, height: int, fraction: float) -> Box:
    """Return the central square with a side of int(fraction x the shorter side)."""
    side = int(fraction * min(width, height))
    if side < 1:
        raise ValueError(f"it has {width}x{height} pixels; expected more to crop {fraction} of a side")
    left, top = (width - side) // 2, (height - side) // 2
    return left, top, left + side, top + side


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


def decode_labels(data: bytes, size: tuple[int, int] | None, max_objects: int = MAX_OBJECTS) -> np.ndarray:
    """Decode the labels (H, W) of a mask."""
    labels = np.asarray(decode_png(data, ("P", "L"), size))
    if labels.max() > max_objects:
        raise ValueError(f"a pixel has the label {labels.max()}; expected 0 to {max_objects}")
    return labels


def count_objects(labels: np.ndarray, ignore_label: int | None = None) -> np.ndarray:
    """Return the number of labels other than 0 and the ignored one, as a uint8 scalar."""
    areas = np.bincount(labels.ravel(), minlength=256)
    areas[0 if ignore_label is None else [0, ignore_label]] = 0
    return np.array((areas > 0).sum(), dtype=np.uint8)
