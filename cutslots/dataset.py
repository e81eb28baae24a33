"""The dataset protocol: what training, evaluation and reports use of a dataset.

A dataset has a length and returns batches of uint8 images and masks on any device. Derive yours from `Dataset`: it
needs a length, `get_batch` and `image_size`. A dataset of videos derives from `VideoDataset` and sets `frames`.

Shapes: B batch, T frames, H height, W width.
"""

from __future__ import annotations

import abc
import operator
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.utils.data
from numpy.typing import DTypeLike
from torch import Tensor

from cutslots.devices import resolve_device
from cutslots.files import errors_name_path

Indices = Sequence[int] | np.ndarray | Tensor
ImageSize = int | tuple[int, int]  # the side of a square, or (H, W)


class Sample(NamedTuple):
    """Images and their masks. Videos have a frame axis; a batch has a leading axis B."""

    image: Tensor  # ([B,] [T,] 3, H, W) uint8
    mask: Tensor  # ([B,] [T,] H', W') uint8: 0 is the background, other values are objects; usually of the image's size


class EmptySplit(ValueError):
    """The dataset has no images for the split."""


class Dataset(torch.utils.data.Dataset[Sample], abc.ABC):
    """Images with masks. Set or override the attributes whose defaults are wrong."""

    image_size: tuple[int, int]  # (H, W)
    frames: int = 1  # of each video; 1 for images
    has_masks: bool = True  # False: `get_batch` returns zeros for masks
    has_classes: bool = False  # True: `get_classes` returns semantic masks
    ignore_label: int | None = None  # the label of pixels that metrics leave out, such as void; None: all pixels count
    memory_mapped: bool = False  # True: `get_batch` copies from files that the system keeps in memory

    @abc.abstractmethod
    def __len__(self) -> int: ...

    @abc.abstractmethod
    def get_batch(self, indices: Indices, device: torch.device | str = "cpu") -> Sample:
        """Return images (B, [T,] 3, H, W) and masks (B, [T,] H, W) on the device."""

    def get_classes(self, indices: Indices, device: torch.device | str = "cpu") -> Tensor:
        """Return the class of every pixel, of the masks' shape, uint8: 0 is the background; the ignore label is that of
        masks."""
        raise ValueError(f"{type(self).__name__} has no classes; expected a dataset with has_classes")

    def __getitem__(self, index: int) -> Sample:
        sample = self.get_batch([operator.index(index)])
        return Sample(sample.image[0], sample.mask[0])

    def name(self, index: int) -> str:
        """Return the name of an image or video, for tables and files."""
        return f"{index:06d}"

    def as_videos(self) -> Dataset:
        """Return the dataset to evaluate: the videos where this one returns single frames of them, else itself."""
        return self

    def without_masks(self) -> Dataset:
        """Return a dataset that spares reading masks if it can."""
        return self

    def fingerprint(self) -> str | None:
        """Return a text that differs if an image differs; None if the dataset cannot tell without reading all images.

        With a fingerprint, what is computed from images may be cached.
        """
        return None


def masks_to_show(sample: Sample, ignore_label: int | None) -> Sample:
    """Return the sample with masks of its images' size, by the nearest pixel, and with ignored pixels as background."""
    mask, size = sample.mask, sample.image.shape[-2:]
    if mask.shape[-2:] != size:
        rows, columns = (
            ((torch.arange(new, device=mask.device) + 0.5) * (old / new)).long()
            for new, old in zip(size, mask.shape[-2:], strict=True)
        )
        mask = mask[..., rows[:, None], columns]
    return Sample(sample.image, mask if ignore_label is None else mask.where(mask != ignore_label, 0))


class VideoDataset(Dataset):
    """Videos of `frames` frames each. Images are videos of one frame, whose frame axis `get_batch` drops."""

    def get_frames(self, videos: Indices, frames: Indices, device: torch.device | str = "cpu") -> Sample:
        """Return frame `frames[i]` of video `videos[i]` for each i: images (B, 3, H, W) and masks (B, H, W).

        This default reads each video once, as a whole.
        """
        unique, position = np.unique(check_indices(videos, len(self)), return_inverse=True)
        sample = self.get_batch(unique, device)
        at = torch.from_numpy(position).to(device), torch.from_numpy(check_indices(frames, self.frames)).to(device)
        return Sample(*(x[at[:1] if self.frames == 1 else at] for x in sample))


class MemmapDataset(VideoDataset):
    """Images or videos in arrays, in memory or mapped from files: images (N, T, 3, H, W), masks (N, T, H', W'), uint8.

    `classes`, if given, has the shape of masks.
    """

    memory_mapped = True

    def __init__(self, images: np.ndarray, masks: np.ndarray, classes: np.ndarray | None = None) -> None:
        self.images, self.masks, self.classes = images, masks, classes
        self.has_classes = classes is not None
        self.frames = images.shape[1]
        self.image_size = (images.shape[3], images.shape[4])

    def __len__(self) -> int:
        return len(self.images)

    def get_batch(self, indices: Indices, device: torch.device | str = "cpu") -> Sample:
        rows = check_indices(indices, len(self))
        batch = (take_rows(array, rows, device) for array in (self.images, self.masks))
        return Sample(*(x[:, 0] if self.frames == 1 else x for x in batch))

    def get_classes(self, indices: Indices, device: torch.device | str = "cpu") -> Tensor:
        if self.classes is None:
            return super().get_classes(indices, device)
        batch = take_rows(self.classes, check_indices(indices, len(self)), device)
        return batch[:, 0] if self.frames == 1 else batch

    def get_frames(self, videos: Indices, frames: Indices, device: torch.device | str = "cpu") -> Sample:
        """Return one frame of each video; only these frames are read."""
        rows = check_indices(videos, len(self)) * self.frames + check_indices(frames, self.frames)
        return Sample(*(take_rows(a.reshape(-1, *a.shape[2:]), rows, device) for a in (self.images, self.masks)))

    def __getstate__(self) -> dict[str, Any]:
        """Replace mapped arrays by their paths: a worker process maps the files again."""
        return {k: Path(str(v.filename)) if isinstance(v, np.memmap) else v for k, v in vars(self).items()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, open_memmap(value) if isinstance(value, Path) else value)


def take_rows(array: np.ndarray, rows: np.ndarray, device: torch.device | str) -> Tensor:
    """Return rows of an array on the device, through pinned memory for CUDA so that the copy is asynchronous."""
    pinned = resolve_device(device).type == "cuda"
    dtype = torch.from_numpy(np.empty(0, array.dtype)).dtype
    batch = torch.empty((len(rows), *array.shape[1:]), dtype=dtype, pin_memory=pinned)
    np.take(array, rows, axis=0, out=batch.numpy(), mode="clip")  # rows are in range; "raise" would copy twice
    return batch.to(device, non_blocking=pinned)


def check_indices(indices: Indices, count: int) -> np.ndarray:
    """Return the indices as an int64 array (B,). Raise an IndexError unless all are from 0 to `count` - 1."""
    checked = np.asarray(indices)
    if checked.size and not np.issubdtype(checked.dtype, np.integer):
        raise TypeError(f"indices are of type {checked.dtype}; expected integers")
    checked = checked.astype(np.int64).reshape(-1)
    wrong = checked[(checked < 0) | (checked >= count)]
    if len(wrong):
        expected = f"0 to {count - 1}" if count else "none, there are no images"
        raise IndexError(f"index {wrong[0]} is out of range; expected {expected}")
    return checked


def check_image_size(image_size: ImageSize) -> tuple[int, int]:
    """Return (H, W). An integer is the side of a square."""
    try:
        height, width = image_size if isinstance(image_size, tuple | list) else (image_size, image_size)
        pair = operator.index(height), operator.index(width)
    except (TypeError, ValueError):
        pair = (0, 0)
    if min(pair) < 1:
        raise ValueError(f"image_size is {image_size!r}; expected a positive integer or (height, width)")
    return pair


def create_memmap(path: Path, shape: tuple[int, ...], dtype: DTypeLike = np.uint8) -> np.memmap:
    """Create an .npy file and map it into memory. It takes its disk space at once: on a disk that is too small, writing
    to the map would end the process."""
    with errors_name_path(path):
        array = np.lib.format.open_memmap(path, mode="w+", dtype=dtype, shape=shape)
        if hasattr(os, "posix_fallocate"):
            with path.open("r+b") as file:
                os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
        return array


def open_memmap(path: Path, mode: Literal["r", "r+"] = "r") -> np.memmap:
    """Map an .npy file into memory."""
    try:
        return np.load(path, mmap_mode=mode)
    except Exception:  # a damaged header makes NumPy raise TokenError, TypeError...
        raise ValueError(f"{path} is missing or truncated; delete {path.parent} to create the cache again") from None
