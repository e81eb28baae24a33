"""Datasets in the memory of the training device."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cutslots.dataset import Dataset, Indices, Sample, VideoDataset, check_indices
from cutslots.files import progress

MAX_MEMORY = 8 * 2**30  # bytes of images and masks that are kept in memory


class InMemory(VideoDataset):
    """Images (N, [T,] 3, H, W) and masks (N, [T,] H, W) as tensors on one device.

    `source` is the dataset they are from, if there is one: classes are read there.
    """

    def __init__(self, image: Tensor, mask: Tensor, has_masks: bool = True, source: Dataset | None = None) -> None:
        self.image, self.mask, self.has_masks, self.source = image, mask, has_masks, source
        self.frames = image.shape[1] if image.ndim == 5 else 1
        self.image_size = (image.shape[-2], image.shape[-1])
        if source is not None:
            self.has_classes, self.ignore_label = source.has_classes, source.ignore_label

    def get_classes(self, indices: Indices, device: torch.device | str = "cpu") -> Tensor:
        if self.source is None:
            return super().get_classes(indices, device)
        return self.source.get_classes(indices, device)

    def __len__(self) -> int:
        return len(self.image)

    def get_batch(self, indices: Indices, device: torch.device | str = "cpu") -> Sample:
        return self._select(check_indices(indices, len(self)), device=device)

    def get_frames(self, videos: Indices, frames: Indices, device: torch.device | str = "cpu") -> Sample:
        at = check_indices(videos, len(self)), check_indices(frames, self.frames)
        return self._select(*at[: self.image.ndim - 3], device=device)

    def _select(self, *indices: np.ndarray, device: torch.device | str) -> Sample:
        at = tuple(torch.from_numpy(each) for each in indices)
        if self.image.is_cuda:
            at = tuple(each.pin_memory().to(self.image.device, non_blocking=True) for each in at)
        return Sample(self.image[at].to(device), self.mask[at].to(device))


def load_to_memory(
    data: Dataset, device: torch.device | str = "cpu", quiet: bool = False, title: str = "images"
) -> Dataset:
    """Return the dataset in the device's memory if it fits there, else the dataset itself.

    It fits if it takes at most `MAX_MEMORY` bytes and half of the free memory. Files that are mapped into memory stay
    as they are on the CPU.
    """
    if len(data) == 0:
        raise ValueError(f"{title}: there are no images")
    if torch.device(device).type == "cpu" and data.memory_mapped:
        return data
    first = data.get_batch([0], device)
    if not fits_in_memory(len(data) * (first.image.nbytes + first.mask.nbytes), device):
        return data
    image, mask = (torch.empty((len(data), *x.shape[1:]), dtype=x.dtype, device=device) for x in first)
    step = 512 if torch.device(device).type == "cuda" and data.frames == 1 else 32
    with progress(quiet) as bar:
        task: Any = bar.add_task(title, total=len(data))
        for start in range(0, len(data), step):
            indices = np.arange(start, min(start + step, len(data)))
            image[start : start + step], mask[start : start + step] = data.get_batch(indices, device)
            bar.advance(task, len(indices))
    return InMemory(image, mask, data.has_masks, data)


def fits_in_memory(num_bytes: int, device: torch.device | str) -> bool:
    """Return whether data of this size may be kept in the memory of a device."""
    return num_bytes <= min(MAX_MEMORY, _free_memory(device) // 2)


def _free_memory(device: torch.device | str) -> int:
    """Return the bytes of free memory on the device."""
    if torch.device(device).type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if hasattr(os, "sysconf") and "SC_AVPHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return MAX_MEMORY
