"""Images to learn from and to be judged by: scenes, published datasets, folders, all through one small interface.

A dataset has a length, and `render(indices, device)` returns a `Sample`: images (B, 3, S, S) uint8 and masks (B, S, S)
uint8. Films have a frame axis after B, and `stills(films, frames, device)` for single frames. `open_data` finds one by
what the user wrote; `hold` keeps its pictures in the memory of the training device.
"""

from __future__ import annotations

import math
import os
import re
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from cutslots.data.folder import Folder
from cutslots.data.prepared import Prepared, is_prepared
from cutslots.data.published import DATASETS
from cutslots.disk import progress
from cutslots.scenes import FAMILIES, Scenes
from cutslots.scenes.dataset import Cached, Indices, Sample, whole_numbers
from cutslots.scenes.draw import FEWEST_OBJECTS, MOST_OBJECTS

SIZE = 128  # the side of pictures, unless another is asked for
HOLD = 8 * 2**30  # bytes of pictures that are kept in memory rather than made again


class Images(Protocol):
    """What training and evaluation ask of a dataset."""

    def __len__(self) -> int: ...

    def render(self, indices: Indices, device: torch.device | str = "cpu") -> Sample: ...


class Films(Images, Protocol):
    """What is asked of a dataset of videos besides."""

    @property
    def frames(self) -> int: ...

    def stills(self, films: Indices, frames: Indices, device: torch.device | str = "cpu") -> Sample: ...


class Frames:
    """The frames of films as so many images, one film after the other."""

    def __init__(self, films: Films, count: int | None = None) -> None:
        self.films = films
        total = len(films) * films.frames
        self.count = total if count is None else min(count, total)

    def __len__(self) -> int:
        return self.count

    def name(self, index: int) -> str:
        film, frame = divmod(index, self.films.frames)
        named = self.films.name(film) if hasattr(self.films, "name") else f"{film:06d}"
        return f"{named}-{frame:02d}"

    def render(self, indices: Indices, device: torch.device | str = "cpu") -> Sample:
        return self.films.stills(*np.divmod(whole_numbers(indices, len(self)), self.films.frames), device)


class Clips:
    """All runs of so many neighbouring frames of films: images (B, T, 3, S, S)."""

    def __init__(self, films: Films, length: int) -> None:
        self.films, self.length, self.starts = films, length, films.frames - length + 1
        if self.starts < 1:
            raise ValueError(
                f"the films have {films.frames} frames; expected at least {length} (--data moving, movi-a:DIR)"
            )

    def __len__(self) -> int:
        return len(self.films) * self.starts

    def render(self, indices: Indices, device: torch.device | str = "cpu") -> Sample:
        film, start = np.divmod(whole_numbers(indices, len(self)), self.starts)
        frames = start[:, None] + np.arange(self.length)
        made = self.films.stills(film.repeat(self.length), frames.reshape(-1), device)
        return Sample(*(x.unflatten(0, (len(film), self.length)) for x in made))


class Held:
    """Pictures or films in memory, on the device that wants them."""

    def __init__(self, image: Tensor, mask: Tensor, has_masks: bool = True) -> None:
        self.image, self.mask, self.has_masks = image, mask, has_masks

    def __len__(self) -> int:
        return len(self.image)

    @property
    def frames(self) -> int:
        return self.image.shape[1] if self.image.ndim == 5 else 1

    def render(self, indices: Indices, device: torch.device | str = "cpu") -> Sample:
        return self._chosen(whole_numbers(indices, len(self)), device=device)

    def stills(self, films: Indices, frames: Indices, device: torch.device | str = "cpu") -> Sample:
        at = whole_numbers(films, len(self)), whole_numbers(frames, self.frames)
        return self._chosen(*at[: self.image.ndim - 3], device=device)

    def _chosen(self, *numbers: np.ndarray, device: torch.device | str) -> Sample:
        at = tuple(torch.from_numpy(n) for n in numbers)
        if self.image.is_cuda:
            at = tuple(n.pin_memory().to(self.image.device, non_blocking=True) for n in at)
        return Sample(self.image[at].to(device), self.mask[at].to(device))


def open_data(
    name: str, split: str, size: int | None = None, count: int | None = None, masks: bool = True
) -> Scenes | Folder | Prepared | Frames:
    """The images a user named: a family of scenes (plain), a prepared dataset (clevrtex:DIR), or a folder.

    Numbers of objects may follow: plain:2-5, clevr:DIR:0-6. Films are handed out frame by frame. `count` takes the
    first so many images. Without `masks` those of a folder are not looked at. `size` is 128, or what was prepared."""
    kind, colon, _ = name.partition(":")
    known, path = kind in FAMILIES or (kind in DATASETS and colon), Path(name)
    if not known and path.is_dir() and ((path / "images").is_dir() or not is_prepared(path)):
        return Folder(Path(name), split, size or SIZE, count, masks)
    films = open_films(name, split, size, frames=count)
    return films if films.frames == 1 else Frames(films, count)


def open_films(
    name: str, split: str, size: int | None = None, count: int | None = None, frames: int | None = None
) -> Scenes | Prepared:
    """The films a user named: moving, movi-a:DIR; or stills, which have one frame. The first `count` of them, or as
    many as have so many `frames`."""
    if frames is not None:
        count = math.ceil(frames / open_films(name, split, size, 0).frames)
    kind, _, rest = name.partition(":")
    if kind in FAMILIES:
        bounds = _bounds(rest)
        if rest and bounds is None:
            raise ValueError(f"data is {name!r}; expected numbers of objects as in {kind}:2-5")
        return Scenes(kind, split, size or SIZE, count=count, objects=bounds or (FEWEST_OBJECTS, MOST_OBJECTS))
    if kind in DATASETS and rest:
        place, _, numbers = rest.rpartition(":")
        bounds = _bounds(numbers)
        named = bool(bounds and place)
        data = Prepared(Path(place if named else rest), split, size, count, bounds if named else None)
        if data.dataset != kind:
            raise ValueError(f"data is {name!r}, but {data.folder} holds {data.dataset}")
        return data
    if Path(name).is_dir() and is_prepared(Path(name)):
        return Prepared(Path(name), split, size, count)
    known = ", ".join([*FAMILIES, *(f"{kind}:DIR" for kind in DATASETS)])
    raise ValueError(f"data is {name!r}; expected one of {known}, or a folder that holds images/")


def _bounds(numbers: str) -> tuple[int, int] | None:
    """2-5 as (2, 5)."""
    found = re.fullmatch(r"(\d+)-(\d+)", numbers)
    return (int(found[1]), int(found[2])) if found else None


def hold(data: Images, device: torch.device | str = "cpu", quiet: bool = False, title: str = "images") -> Images:
    """The same images, kept in the device's memory if they fit; else as they are, to be made batch by batch."""
    if len(data) == 0:
        raise ValueError(f"{title}: there are no images")
    if torch.device(device).type == "cpu" and isinstance(data, Cached | Prepared):
        return data  # mapped into memory as it is
    first = data.render([0], device)
    if len(data) * (first.image.nbytes + first.mask.nbytes) > min(HOLD, _free(device) // 2):
        return data
    image, mask = (torch.empty((len(data), *x.shape[1:]), dtype=x.dtype, device=device) for x in first)
    step = 512 if torch.device(device).type == "cuda" and getattr(data, "frames", 1) == 1 else 32
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


__all__ = [
    "Clips",
    "Films",
    "Folder",
    "Frames",
    "Held",
    "Images",
    "Prepared",
    "Sample",
    "hold",
    "open_data",
    "open_films",
]
