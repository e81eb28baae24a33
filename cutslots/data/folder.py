"""A folder of images as a dataset: images/NAME.png and, for evaluation, masks/NAME.png.

Images may be of any type in `EXTENSIONS` and in subfolders; the mask of images/a/b.jpg is masks/a/b.png. A mask is a
palette or grayscale PNG of the same size as its image. The value of a pixel is its object, 0 the background. Images are
resized bilinearly, masks to the nearest pixel.
"""

from __future__ import annotations

import copy
import hashlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from PIL import Image

from cutslots.data.images import EXTENSIONS, is_image, list_images, read_image, read_mask, shared_stems
from cutslots.data.registry import DATASETS, DatasetConfig, check_split
from cutslots.dataset import Dataset, EmptySplit, ImageSize, Indices, Sample, check_image_size, check_indices
from cutslots.scenes.sample import SPLITS

VAL_EVERY = 10  # every tenth image is for validation where a folder has no splits of its own

Resize = Literal["stretch", "crop"]


@dataclass(frozen=True)
class FolderConfig(DatasetConfig):
    path: str
    """A folder with images/ and, for evaluation, masks/; or with train/, val/ or test/, each with images/."""
    resize: Resize = "stretch"
    """How images get to the model's size: stretch both sides, or scale the shorter side and crop the center."""


@DATASETS.register("folder", FolderConfig)
class Folder(Dataset):
    """A folder of images, with masks to evaluate on.

    Split "test" is the whole folder, "val" every tenth image in the order of names and "train" the others. A folder
    with train/, val/ or test/, each with images/, has splits of its own.
    """

    def __init__(
        self,
        path: str | Path,
        split: str = "test",
        image_size: ImageSize = 128,
        count: int | None = None,
        resize: Resize = "stretch",
    ) -> None:
        check_split(split)
        if count is not None and count < 0:
            raise ValueError(f"count is {count}; expected zero or more")
        self.image_size, self.resize = check_image_size(image_size), resize
        own_splits = folder_splits(Path(path))
        self.path = Path(path) / split if own_splits else Path(path)
        files = self._list_files(split in own_splits or not own_splits)
        self.files = (files if own_splits else split_files(files, split))[:count]
        self.has_masks = any(map(is_image, (self.path / "masks").rglob("*")))
        self.shared = shared_stems(files)
        for same in self.shared.values() if self.has_masks else ():
            names = " and ".join(file.name for file in same)
            raise ValueError(f"{same[0].parent} holds {names}, which would share a mask; expected one of each name")

    def _list_files(self, split_exists: bool) -> list[Path]:
        images = self.path / "images"
        if not images.is_dir():
            error = ValueError if split_exists else EmptySplit
            raise error(f"{self.path} holds no folder images/; expected images/NAME.png and, for masks, masks/NAME.png")
        files = list_images(images, recursive=True)
        if not files:
            raise ValueError(f"{images} holds no images ({', '.join(EXTENSIONS)})")
        return files

    def __len__(self) -> int:
        return len(self.files)

    def name(self, index: int) -> str:
        path = self.files[index].relative_to(self.path / "images")
        return (path if self.files[index].with_suffix("") in self.shared else path.with_suffix("")).as_posix()

    def without_masks(self) -> Folder:
        data = copy.copy(self)
        data.has_masks = False
        return data

    def fingerprint(self) -> str:
        """Return a digest of the names, sizes and times of the files, which changes when a file does."""
        facts = ((file.relative_to(self.path).as_posix(), file.stat()) for file in self.files)
        listing = "\n".join(f"{name!r} {file.st_size} {file.st_mtime_ns}" for name, file in facts)
        return f"{self.resize}, {hashlib.sha256(listing.encode()).hexdigest()}"

    def get_batch(self, indices: Indices, device: torch.device | str = "cpu") -> Sample:
        files = [self.files[i] for i in check_indices(indices, len(self))]
        if not files:
            empty = torch.empty(0, *self.image_size, dtype=torch.uint8, device=device)
            return Sample(empty[:, None].expand(-1, 3, -1, -1), empty)
        with ThreadPoolExecutor(8) as pool:
            pairs = list(pool.map(self._read, files))
        image, mask = (torch.from_numpy(np.stack(each)) for each in zip(*pairs, strict=True))
        return Sample(image.permute(0, 3, 1, 2).to(device), mask.to(device))

    def _read(self, file: Path) -> tuple[np.ndarray, np.ndarray]:
        """Return the image (H, W, 3) and the mask (H, W) of a file."""
        image = read_image(file)
        pixels = np.asarray(resize_image(image, self.image_size, self.resize, Image.Resampling.BILINEAR))
        if not self.has_masks:
            return pixels, np.zeros(self.image_size, dtype=np.uint8)
        name = file.relative_to(self.path / "images").with_suffix(".png")
        mask = Image.fromarray(read_mask(self.path / "masks" / name, image.size))
        return pixels, np.asarray(resize_image(mask, self.image_size, self.resize, Image.Resampling.NEAREST))


def folder_splits(path: Path) -> list[str]:
    """Return the splits that a folder has folders for; none if it has images/ itself."""
    if (path / "images").is_dir():
        return []
    return [split for split in SPLITS if (path / split / "images").is_dir()]


def split_files(files: list[Path], split: str) -> list[Path]:
    """Return the images of a split. A single image is in all of them."""
    if split == "test" or len(files) == 1:
        return files
    return files[::VAL_EVERY] if split == "val" else [file for i, file in enumerate(files) if i % VAL_EVERY]


def resize_image(
    image: Image.Image, image_size: tuple[int, int], resize: Resize, filter: Image.Resampling
) -> Image.Image:
    """Return the image at (H, W), stretched or cropped to the center."""
    height, width = image_size
    if resize == "stretch":
        return image.resize((width, height), filter)
    scale = min(image.width / width, image.height / height)  # pixels of the image for one of the result
    left, top = (image.width - scale * width) / 2, (image.height - scale * height) / 2
    return image.resize((width, height), filter, box=(left, top, image.width - left, image.height - top))
