"""Images to learn from and to be judged by: built-in scenes or folders, all through one small interface.

A dataset has a length, and `render(indices, device)` returns a `Sample`: images (B, 3, S, S) uint8 and masks (B, S, S)
uint8. `open_data` finds one by what the user wrote; `hold` keeps its pictures in the memory of the training device.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from cutslots.data.folder import Folder
from cutslots.disk import progress
from cutslots.scenes import FAMILIES, Scenes
from cutslots.scenes.dataset import Indices, Sample, whole_numbers

HOLD = 8 * 2**30  # bytes of pictures that are kept in memory rather than made again


class Images(Protocol):
    """What training and evaluation ask of a dataset."""

    def __len__(self) -> int: ...

    def render(self, indices: Indices, device: torch.device | str = "cpu") -> Sample: ...


class Held:
    """Pictures in memory, on the device that wants them."""

    def __init__(self, image: Tensor, mask: Tensor, has_masks: bool = True) -> None:
        self.image, self.mask, self.has_masks = image, mask, has_masks

    def __len__(self) -> int:
        return len(self.image)

    def render(self, indices: Indices, device: torch.device | str = "cpu") -> Sample:
        chosen = torch.from_numpy(whole_numbers(indices, len(self)))
        if self.image.is_cuda:
            chosen = chosen.pin_memory().to(self.image.device, non_blocking=True)
        return Sample(self.image[chosen].to(device), self.mask[chosen].to(device))


def open_data(name: str, split: str, size: int, count: int | None = None, masks: bool = True) -> Scenes | Folder:
    """The dataset a user named: a family of scenes, with numbers of objects if wanted (plain:2-5), or a folder.

    `count` takes the first so many images. Without `masks` those of a folder are not looked at."""
    family, _, numbers = name.partition(":")
    if family in FAMILIES and FAMILIES[family].frames == 1:
        if not numbers:
            return Scenes(family, split, size, count=count)
        bounds = re.fullmatch(r"(\d+)-(\d+)", numbers)
        if bounds is None:
            raise ValueError(f"data is {name!r}; expected numbers of objects as in {family}:2-5")
        return Scenes(family, split, size, count=count, objects=(int(bounds[1]), int(bounds[2])))
    if Path(name).is_dir():
        return Folder(Path(name), split, size, count, masks)
    still = ", ".join(family for family in FAMILIES if FAMILIES[family].frames == 1)
    raise ValueError(f"data is {name!r}; expected one of {still}, or a folder that holds images/")


def hold(data: Images, device: torch.device | str = "cpu", quiet: bool = False, title: str = "images") -> Images:
    """The same images, kept in the device's memory if they fit; else as they are, to be made batch by batch."""
    if len(data) == 0:
        raise ValueError(f"{title}: there are no images")
    first = data.render([0], device)
    if len(data) * (first.image.nbytes + first.mask.nbytes) > min(HOLD, _free(device) // 2):
        return data
    image, mask = (torch.empty((len(data), *x.shape[1:]), dtype=x.dtype, device=device) for x in first)
    step = 512 if torch.device(device).type == "cuda" else 32
    with progress(quiet) as bar:
        task: Any = bar.add_task(title, total=len(data))
        for start in range(0, len(data), step):
            chosen = np.arange(start, min(start + step, len(data)))
            part = data.render(chosen, device)
            image[start : start + step], mask[start : start + step] = part.image, part.mask
            bar.advance(task, len(chosen))
    return Held(image, mask, getattr(data, "has_masks", True))


def _free(device: torch.device | str) -> int:
    """Bytes of memory that nobody uses yet."""
    if torch.device(device).type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if hasattr(os, "sysconf") and "SC_AVPHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return HOLD


__all__ = ["Folder", "Held", "Images", "Sample", "hold", "open_data"]
