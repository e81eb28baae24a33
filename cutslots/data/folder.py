"""A folder of pictures as a dataset: images/NAME.png|jpg|webp and, where there is truth, masks/NAME.png.

A mask is a palette or grey PNG of the image's size; the value of a pixel is its object, 0 the background. Pictures are
brought to a square by resizing, so that every pixel keeps a place: bilinear for images, nearest for masks.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps, TiffImagePlugin
from torch.utils.data import Dataset

from cutslots.scenes.dataset import Indices, Sample, whole_numbers
from cutslots.scenes.draw import SPLITS

ENDINGS = (".png", ".jpg", ".jpeg", ".webp")
# Of what Pillow reads, some would start other programs (EPS) or have unpacked without end (FITS).
FORMATS = ("PNG", "JPEG", "MPO", "WEBP", "GIF", "BMP", "PPM", "TIFF", "JPEG2000", "AVIF")
MOST_PIXELS = 89_478_485  # Pillow's own bound, beyond which it warns of decompression bombs
LONGEST_SIDE = 1_000_000  # libpng's own bound; to resize takes memory for each row and column
PIECE = 2**20  # values that are brought to bytes at once
HELD_OUT = 10  # every tenth image is for validation, when a folder is learned from


class Folder(Dataset[Sample]):
    """Split "test" is all of the folder; "val" is every tenth image, in order of names, and "train" the others. A
    folder that holds train/, val/ or test/, each with images/, says itself what they are.

    Without `masks` those that are there are not looked at."""

    def __init__(
        self, path: Path, split: str = "test", size: int = 128, count: int | None = None, masks: bool = True
    ) -> None:
        if split not in SPLITS:
            raise ValueError(f"split is {split!r}; expected one of {', '.join(SPLITS)}")
        parted = not (path / "images").is_dir() and any((path / name / "images").is_dir() for name in SPLITS)
        path = path / split if parted else path
        if not (path / "images").is_dir():
            raise ValueError(f"{path} holds no folder images/; expected images/NAME.png and, for truth, masks/NAME.png")
        if count is not None and count < 0:
            raise ValueError(f"count is {count}; expected zero or more")
        found = list_images(path / "images")
        if not found:
            raise ValueError(f"{path / 'images'} holds no pictures ({', '.join(ENDINGS)})")
        chosen = {"test": found, "val": found[::HELD_OUT]}.get(
            split, [p for i, p in enumerate(found) if i % HELD_OUT or len(found) == 1]
        )
        chosen = found if parted else chosen
        self.path, self.size, self.files = path, size, chosen[:count]
        self.has_masks = masks and (path / "masks").is_dir() and bool(list_images(path / "masks"))

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Sample:
        sample = self.render([index])
        return Sample(sample.image[0], sample.mask[0])

    def name(self, index: int) -> str:
        return self.files[index].stem

    def render(self, indices: Indices, device: torch.device | str = "cpu") -> Sample:
        chosen = [self.files[i] for i in whole_numbers(indices, len(self))]
        if not chosen:
            empty = torch.empty(0, self.size, self.size, dtype=torch.uint8, device=device)
            return Sample(empty[:, None].expand(-1, 3, -1, -1), empty)
        with ThreadPoolExecutor(8) as pool:
            pairs = list(pool.map(self._read, chosen))
        image, mask = (torch.from_numpy(np.stack(part)) for part in zip(*pairs, strict=True))
        return Sample(image.permute(0, 3, 1, 2).to(device), mask.to(device))

    def _read(self, file: Path) -> tuple[np.ndarray, np.ndarray]:
        picture = read_image(file)
        image = np.asarray(picture.resize((self.size, self.size), Image.Resampling.BILINEAR))
        if not self.has_masks:
            return image, np.zeros((self.size, self.size), dtype=np.uint8)
        return image, read_mask(self.path / "masks" / f"{file.stem}.png", picture.size, self.size)


def list_images(folder: Path, by_name: bool = False) -> list[Path]:
    """The pictures in a folder, in the order of names; what has the name of one and is no file only if so asked. Two of
    one stem are refused: they would share a mask."""
    named = (p for p in folder.iterdir() if p.suffix.lower() in ENDINGS and not p.name.startswith("."))
    files = sorted(p for p in named if by_name or p.is_file())
    seen: dict[str, Path] = {}
    for file in files:
        if file.stem in seen:
            raise ValueError(f"{folder} holds both {seen[file.stem].name} and {file.name}; expected one of each name")
        seen[file.stem] = file
    return files


def read_image(file: Path) -> Image.Image:
    """A picture of any mode as RGB, the right way up. 16 bits become 8; transparency is dropped."""

    def convert(picture: Image.Image) -> Image.Image:
        picture = _ycbcr(picture)
        ImageOps.exif_transpose(picture, in_place=True)
        if picture.mode.startswith("I") or picture.mode == "F":
            return _deep(np.asarray(picture))
        if "transparency" in picture.info and picture.mode != "RGB":
            picture = picture.convert("RGBA")
        if picture.mode != "RGB":
            picture = picture.convert("RGB")
        picture.load()
        picture.info = {}  # what it says of itself is not said of what is made of it
        return picture

    return _opened(file, convert)


def _ycbcr(picture: Image.Image) -> Image.Image:
    """The picture; if it is a TIFF of YCbCr that is not compressed, in that mode. Pillow before 13 takes it for RGBX,
    which is what libtiff makes of compressed ones (its issue 9770)."""
    if not isinstance(picture, TiffImagePlugin.TiffImageFile) or picture.mode != "RGB":
        return picture
    meant = picture.tag_v2.get(TiffImagePlugin.PHOTOMETRIC_INTERPRETATION)
    tiles: Any = picture.tile
    if meant != 6 or any(tile.codec_name != "raw" for tile in tiles):
        return picture
    picture.tile = [tile._replace(args=(tile.args[0].removesuffix("X"), *tile.args[1:])) for tile in tiles]
    return Image.merge("YCbCr", picture.split())


def _deep(values: np.ndarray) -> Image.Image:
    """Grey values of 16 bits, or floating point in [0, 1] or [0, 255], as RGB of 8."""
    if not np.isfinite(values).all():
        raise ValueError("it holds values that are not finite")
    top = 65535.0 if values.dtype.kind in "iu" else 1.0 if values.max(initial=0) <= 1 else 255.0
    grey = np.empty(values.shape, dtype=np.uint8)
    for start in range(0, values.size, PIECE):
        part = slice(start, start + PIECE)
        grey.reshape(-1)[part] = (np.clip(values.reshape(-1)[part] / top, 0, 1) * 255).round()
    return Image.fromarray(grey).convert("RGB")


def read_mask(file: Path, shape: tuple[int, int], size: int) -> np.ndarray:
    """Labels (size, size) uint8 of a palette or grey PNG that is as large as its image, `shape` (width, height)."""
    if not file.is_file():
        raise ValueError(f"{file} is missing; expected a mask for every image, or no folder masks/")

    def convert(picture: Image.Image) -> np.ndarray:
        if picture.mode not in ("P", "L", "1"):
            raise ValueError(f"it has mode {picture.mode}; expected a palette or grey PNG, value = object")
        if picture.size != shape:
            raise ValueError(f"it is {picture.size[0]}x{picture.size[1]}, its image {shape[0]}x{shape[1]}")
        return np.asarray(picture.resize((size, size), Image.Resampling.NEAREST)).astype(np.uint8)

    return _opened(file, convert)


def check_picture(picture: Image.Image) -> None:
    """Before any pixel of it is read."""
    if picture.format not in FORMATS:
        raise ValueError(f"it is {picture.format}; expected one of {', '.join(FORMATS)}")
    if picture.width * picture.height > MOST_PIXELS:
        raise ValueError(f"it has {picture.width}x{picture.height} pixels; expected at most {MOST_PIXELS:,}")
    if max(picture.size) > LONGEST_SIDE:
        raise ValueError(f"it has {picture.width}x{picture.height} pixels; expected sides of at most {LONGEST_SIDE:,}")


def _opened(file: Path, convert: Callable[[Image.Image], Any]) -> Any:
    """What `convert` makes of the file; whatever is wrong with it is said in a sentence that names it."""
    try:
        if file.exists() and not file.is_file():  # to open a pipe would wait for somebody to write to it
            raise ValueError("it is no file")
        with Image.open(file) as picture:
            check_picture(picture)
            return convert(picture)
    except FileNotFoundError:
        raise ValueError(f"there is no {file}") from None
    except Exception as error:  # Pillow's readers raise whatever they meet: SyntaxError, struct.error, EOFError...
        raise ValueError(f"{file} cannot be read as a picture: {error}") from None
