"""Image files: lists them, reads images as RGB and masks as labels."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps, TiffImagePlugin

from cutslots.files import Notice

EXTENSIONS = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".jp2", ".avif", ".ppm", ".pgm")
# Pillow reads more. Some of its formats start other programs (EPS) or decompress without a bound (FITS).
FORMATS = ("PNG", "JPEG", "MPO", "WEBP", "GIF", "BMP", "PPM", "TIFF", "JPEG2000", "AVIF")
MAX_PIXELS = 178_956_970  # Pillow's own bound, beyond which it refuses decompression bombs; it warns from half of it
MAX_SIDE = 1_000_000  # libpng's own bound; resizing takes memory for each row and column
MAX_NAMED = 5  # names in a message
CHUNK = 2**20  # values that are converted to uint8 at once
MAX_12_BITS = 2**12 - 1
YCBCR = 6  # the value of TIFF's tag PhotometricInterpretation


class ImageWarning(UserWarning):
    """How an image is read was decided by a rule; the message says which."""


def is_image(path: Path) -> bool:
    """Return whether a path is a file with the extension of an image."""
    return _has_extension(path) and path.is_file()


def list_images(folder: Path, by_name: bool = False, recursive: bool = False) -> list[Path]:
    """Return the images of a folder in the order of names, with those of its subfolders if `recursive`.

    `by_name` also lists what has the name of an image but is no file. A `Notice` says what else the folder holds;
    hidden files and folders are not counted.
    """
    children = sorted(folder.rglob("*") if recursive else folder.iterdir())
    found = [path for path in children if not any(part.startswith(".") for part in path.relative_to(folder).parts)]
    files = [path for path in found if _has_extension(path) and (by_name or path.is_file())]
    others = [path for path in found if not _has_extension(path) and not (recursive and path.is_dir())]
    if files and others:
        warnings.warn(_skipped(folder, others), Notice, stacklevel=2)
    return files


def _skipped(folder: Path, others: list[Path]) -> str:
    folders = [path.name for path in others if path.is_dir()]
    kinds = sorted({path.suffix.lower() or path.name for path in others if not path.is_dir()})
    parts = []
    if kinds:
        parts.append(f"{len(others) - len(folders)} files that are not images ({_shorten(kinds)})")
    if folders:
        parts.append(f"{len(folders)} subfolders ({_shorten(folders)})")
    return f"{folder}: skipped {' and '.join(parts)}"


def _shorten(names: list[str]) -> str:
    return ", ".join(names if len(names) <= MAX_NAMED else [*names[:MAX_NAMED], "..."])


def shared_stems(files: list[Path]) -> dict[Path, list[Path]]:
    """Return the files that differ in their extension only, by their path without it."""
    stems: dict[Path, list[Path]] = {}
    for file in files:
        stems.setdefault(file.with_suffix(""), []).append(file)
    return {stem: same for stem, same in stems.items() if len(same) > 1}


def _has_extension(path: Path) -> bool:
    return path.suffix.lower() in EXTENSIONS and not path.name.startswith(".")


def read_image(file: Path) -> Image.Image:
    """Read an image of any mode as upright RGB. Transparency is dropped.

    16-bit gray becomes 8-bit: 65535 is white, or 4095 if no value is above it, of which a warning tells."""

    def convert(image: Image.Image) -> Image.Image:
        image = _fix_ycbcr(image)
        ImageOps.exif_transpose(image, in_place=True)
        if image.mode.startswith("I") or image.mode == "F":
            return _to_8_bits(np.asarray(image))
        if "transparency" in image.info and image.mode != "RGB":
            image = image.convert("RGBA")
        if image.mode != "RGB":
            image = image.convert("RGB")
        image.load()
        image.info = {}  # metadata would be written with whatever is made of the image
        return image

    return open_file(file, convert)


def _fix_ycbcr(image: Image.Image) -> Image.Image:
    """Return uncompressed YCbCr TIFFs in that mode, other images as they are.

    Pillow before 13 takes them for RGBX, which is what libtiff makes of compressed ones (Pillow issue 9770).
    """
    if not isinstance(image, TiffImagePlugin.TiffImageFile) or image.mode != "RGB":
        return image
    tiles: Any = image.tile
    is_ycbcr = image.tag_v2.get(TiffImagePlugin.PHOTOMETRIC_INTERPRETATION) == YCBCR
    if not is_ycbcr or any(tile.codec_name != "raw" for tile in tiles):
        return image
    image.tile = [tile._replace(args=(tile.args[0].removesuffix("X"), *tile.args[1:])) for tile in tiles]
    return Image.merge("YCbCr", image.split())


def _to_8_bits(values: np.ndarray) -> Image.Image:
    """Return gray values of 12 or 16 bits, or floats in [0, 1] or [0, 255], as RGB of 8 bits."""
    if not np.isfinite(values).all():
        raise ValueError("it holds values that are not finite")
    top = _integer_range(values) if values.dtype.kind in "iu" else 1.0 if values.max(initial=0) <= 1 else 255.0
    gray = np.empty(values.shape, dtype=np.uint8)
    for start in range(0, values.size, CHUNK):
        chunk = slice(start, start + CHUNK)
        gray.reshape(-1)[chunk] = (np.clip(values.reshape(-1)[chunk] / top, 0, 1) * 255).round()
    return Image.fromarray(gray).convert("RGB")


def _integer_range(values: np.ndarray) -> float:
    """Return the value that is white. Cameras write 12 bits into files of 16, which do not say so."""
    largest = values.max(initial=0)
    if 0 < largest <= MAX_12_BITS:
        _warn_of_12_bits()
    return float(MAX_12_BITS) if largest <= MAX_12_BITS else 65535.0


@functools.cache  # once: a folder may hold many
def _warn_of_12_bits() -> None:
    warnings.warn(
        "a 16-bit image without values above 4095 is read as 12-bit: 4095 is white; scale it if 65535 is white",
        ImageWarning,
        stacklevel=2,
    )


def read_mask(file: Path, size: tuple[int, int]) -> np.ndarray:
    """Read the labels (H, W) uint8 of a palette or grayscale PNG. `size` is (width, height) of its image."""
    if not file.is_file():
        raise ValueError(f"{file} is missing; expected a mask for every image, or no folder masks/")

    def convert(mask: Image.Image) -> np.ndarray:
        if mask.mode not in ("P", "L", "1"):
            raise ValueError(f"it has mode {mask.mode}; expected a palette or grayscale PNG, value = object")
        if mask.size != size:
            raise ValueError(f"it is {mask.size[0]}x{mask.size[1]}, its image {size[0]}x{size[1]}")
        return np.asarray(mask).astype(np.uint8)

    return open_file(file, convert)


def check_image(image: Image.Image) -> None:
    """Raise a ValueError if the format or the size is not accepted. Reads no pixels."""
    if image.format not in FORMATS:
        raise ValueError(f"it is {image.format}; expected one of {', '.join(FORMATS)}")
    if image.width * image.height > MAX_PIXELS:
        raise ValueError(f"it has {image.width}x{image.height} pixels; expected at most {MAX_PIXELS:,}")
    if max(image.size) > MAX_SIDE:
        raise ValueError(f"it has {image.width}x{image.height} pixels; expected sides of at most {MAX_SIDE:,}")


def open_file(file: Path, convert: Callable[[Image.Image], Any]) -> Any:
    """Return `convert` of the image. Every error becomes a ValueError that names the file."""
    try:
        if file.exists() and not file.is_file():  # opening a pipe would wait for a writer
            raise ValueError("it is no file")
        with Image.open(file) as image:
            check_image(image)
            return convert(image)
    except FileNotFoundError:
        raise ValueError(f"there is no {file}") from None
    except Exception as error:  # Pillow's readers raise SyntaxError, struct.error, EOFError...
        raise ValueError(f"{file} cannot be read as an image: {error}") from None
