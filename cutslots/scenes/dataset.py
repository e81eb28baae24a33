"""Scenes as a dataset: by number, by batch on any device, or from a cache in memory or on disk."""

from __future__ import annotations

import json
import operator
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

import cutslots
from cutslots.disk import locked, naming, progress, write_atomically
from cutslots.scenes import materials, physics, shapes
from cutslots.scenes.draw import COLOURS, FAMILIES, FEWEST_OBJECTS, MOST_OBJECTS, SPLITS, draw
from cutslots.scenes.render import Rendered, render, usable
from cutslots.scenes.world import World

TOGETHER = 128  # scenes drawn and rendered at once
Indices = Sequence[int] | np.ndarray | Tensor
LENGTH = {"train": 50_000, "val": 1_000, "test": 1_000}
Surfaces = Literal["whole", "rising", "near"]
NEAREST = 0.9  # the largest share of the ground's colours that objects take on
GOLDEN = 0.6180339887  # its multiples are spread evenly, whatever the number of scenes


class Sample(NamedTuple):
    """Scenes with a leading frame axis where the family moves. Batches lead with B."""

    image: Tensor  # (B, [F,] 3, size, size) uint8
    mask: Tensor  # (B, [F,] size, size) uint8, 0 for the ground, else the number of the object


class Scenes(Dataset[Sample]):
    """Scene i of (family, split, seed), the same bytes alone, in a batch, in any process.

    Families: plain, textured, ood, camo, moving. Splits: train, val, test; a number means another scene in each.
    `objects` is how many there are, at least and at most. `surfaces` may make them easier or harder than they are: in
    scene i of n that are "rising" textures are at i / n of their strength, in those that are "near" objects take on up
    to nine tenths of the ground's colours.

    >>> scenes = Scenes("textured", split="train", size=32)
    >>> image, mask = scenes[7]
    >>> image.shape, mask.shape, len(scenes)
    (torch.Size([3, 32, 32]), torch.Size([32, 32]), 50000)
    >>> scenes.render([0, 7], device="cpu").image.shape
    torch.Size([2, 3, 32, 32])
    """

    def __init__(
        self,
        family: str,
        split: str = "train",
        size: int = 128,
        seed: int = 0,
        count: int | None = None,
        objects: tuple[int, int] = (FEWEST_OBJECTS, MOST_OBJECTS),
        surfaces: Surfaces = "whole",
    ) -> None:
        if family not in FAMILIES:
            raise ValueError(f"family is {family!r}; expected one of {', '.join(FAMILIES)}")
        if split not in SPLITS:
            raise ValueError(f"split is {split!r}; expected one of {', '.join(SPLITS)}")
        if not (isinstance(size, int) and 1 <= size <= 2048):
            raise ValueError(f"size is {size!r}; expected a side of 1 to 2048 pixels")
        if not (isinstance(seed, int) and 0 <= seed < 2**32):
            raise ValueError(f"seed is {seed!r}; expected a whole number from 0 to 2^32 - 1")
        if count is not None and not (isinstance(count, int) and count >= 0):
            raise ValueError(f"count is {count!r}; expected zero or more")
        if not (len(objects) == 2 and 1 <= objects[0] <= objects[1] <= MOST_OBJECTS):
            raise ValueError(f"objects is {objects!r}; expected a range between 1 and {MOST_OBJECTS}, as in (3, 10)")
        if surfaces not in get_args(Surfaces):
            raise ValueError(f"surfaces is {surfaces!r}; expected one of {', '.join(get_args(Surfaces))}")
        self.family, self.split, self.size, self.seed, self.surfaces = family, split, size, seed, surfaces
        self.objects = list(objects)
        self.count = LENGTH[split] if count is None else count

    @property
    def frames(self) -> int:
        """1, or the number of frames of a moving scene."""
        return FAMILIES[self.family].frames

    @property
    def kind(self) -> str:
        """The split, or what is special about its surfaces."""
        return self.split if self.surfaces == "whole" else self.surfaces

    def request(self) -> dict[str, Any]:
        """What was asked for: written beside files, so that a later run knows whether they are the same scenes."""
        asked = {**vars(self), "version": cutslots.__version__}
        return {name: value for name, value in asked.items() if (name, value) != ("surfaces", "whole")}

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Sample:
        sample = self.render([operator.index(index)])
        return Sample(sample.image[0], sample.mask[0])

    def render(self, indices: Indices, device: torch.device | str = "cpu") -> Sample:
        """A batch, made on the device it is wanted on."""
        chosen = whole_numbers(indices, self.count)
        pieces = [chosen[i : i + TOGETHER] for i in range(0, max(len(chosen), 1), TOGETHER)]
        if usable(device).type == "cpu":
            made = [render(self.world(piece), self.size, device) for piece in pieces]
        else:  # the CPU draws the next scenes while the device renders these
            with ThreadPoolExecutor(2) as pool:
                made = [render(world, self.size, device) for world in pool.map(self.world, pieces)]
        parts = (torch.cat(part) for part in list(zip(*made, strict=True))[:2])
        return Sample(*(x[:, 0] if self.frames == 1 else x for x in parts))

    def stills(self, films: Indices, frames: Indices, device: torch.device | str = "cpu") -> Sample:
        """One frame of each film, (B, 3, size, size). The films are made whole: ask for neighbours together."""
        chosen, place = np.unique(whole_numbers(films, self.count), return_inverse=True)
        made = self.render(chosen, device)
        at = torch.from_numpy(place).to(device), torch.from_numpy(whole_numbers(frames, self.frames)).to(device)
        return Sample(*(x[at[:1] if self.frames == 1 else at] for x in made))

    def world(self, indices: Indices) -> World:
        """What the scenes hold, as arrays."""
        chosen = whole_numbers(indices, self.count)
        world = draw(self.family, self.split, self.seed, chosen, (self.objects[0], self.objects[1]))
        if self.surfaces == "rising":
            return world.flattened(chosen / self.count)
        return world.drawn_near(NEAREST * (chosen * GOLDEN % 1)) if self.surfaces == "near" else world

    def describe(self, indices: Indices) -> tuple[Sample, list[dict[str, Any]]]:
        """A batch on the CPU and, for each scene, its ground truth as plain values."""
        chosen = whole_numbers(indices, self.count)
        world = self.world(chosen)
        made = render(world, self.size)
        sample = Sample(*(x[:, 0] if self.frames == 1 else x for x in made[:2]))
        return sample, [self._truth(int(i), world, row, made) for row, i in enumerate(chosen)]

    def _truth(self, index: int, world: World, row: int, made: Rendered) -> dict[str, Any]:
        colours = list(COLOURS)
        objects = []
        for k in range(world.count[row]):
            each = {
                "position": world.position[row, :, k],
                "rotation": world.rotation[row, :, k],
                "velocity": world.velocity[row, :, k],
                "pixels": made.pixels[row, :, k].numpy(),
                "visible": (made.pixels[row, :, k] / made.whole[row, :, k].clamp(min=1)).numpy(),
            }
            if self.frames == 1:
                del each["velocity"]
            objects.append(
                {
                    "id": k + 1,
                    "shape": shapes.NAMES[world.shape[row, k]],
                    "material": materials.NAMES[world.material[row, k + 1]],
                    "colour": colours[world.colour[row, k]] if world.colour[row, k] >= 0 else None,
                    "size": float(world.size[row, k]),
                    **{name: np.round(v[0] if self.frames == 1 else v, 5).tolist() for name, v in each.items()},
                }
            )
        return {
            "index": index,
            "family": self.family,
            "split": self.split,
            "seed": self.seed,
            "ground": materials.NAMES[world.material[row, 0]],
            "camera": {name: np.round(getattr(world, name)[row], 5).tolist() for name in ("camera", "target")},
            **({"frames_a_second": physics.FRAMES_A_SECOND} if self.frames > 1 else {}),
            "objects": objects,
        }

    def cache(
        self, folder: str | Path | None = None, device: torch.device | str = "cpu", batch: int = 64, quiet: bool = False
    ) -> Cached:
        """All `count` scenes rendered once: in memory, or in a folder of memory-mapped files that later runs reuse.

        Interrupted, it goes on where it stopped. A folder that holds other scenes is refused.
        """
        shape = (self.count, self.frames, self.size, self.size)
        if folder is None:
            images = np.empty((*shape[:2], 3, *shape[2:]), dtype=np.uint8)
            masks = np.empty(shape, dtype=np.uint8)
            self._fill(images, masks, 0, device, batch, quiet, lambda done: None)
            return Cached(images, masks)
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder.with_name(folder.name + ".lock")):  # another run may be making the same
            return self._cache(folder, device, batch, quiet)

    def _cache(self, folder: Path, device: torch.device | str, batch: int, quiet: bool) -> Cached:
        shape = (self.count, self.frames, self.size, self.size)
        stamp = self.request()
        done = _read_state(folder, stamp)
        paths = folder / "images.npy", folder / "masks.npy"
        if done == self.count:
            return Cached(*(reopened(path) for path in paths))
        write_atomically(folder / "cache.json", json.dumps({**stamp, "done": done}).encode())
        images = _array(paths[0], (*shape[:2], 3, *shape[2:]), keep=done > 0)
        masks = _array(paths[1], shape, keep=done > 0)

        def save(done: int) -> None:
            for array in (images, masks):
                array.flush()
            write_atomically(folder / "cache.json", json.dumps({**stamp, "done": done}).encode())

        self._fill(images, masks, done, device, batch, quiet, save)
        return Cached(*(reopened(path) for path in paths))

    def _fill(
        self, images: np.ndarray, masks: np.ndarray, start: int, device: Any, batch: int, quiet: bool, save: Any
    ) -> None:
        batch = max(1, batch // self.frames)
        together = batch if self.frames == 1 else TOGETHER  # physics takes hardly longer for many films than for one
        with progress(quiet) as bar:
            task = bar.add_task(f"{self.family} {self.kind} {self.size}x{self.size}", total=self.count, completed=start)
            for first in range(start, self.count, together):
                world = self.world(np.arange(first, min(first + together, self.count)))
                for i in range(0, len(world), batch):
                    made = render(world.pick(slice(i, i + batch)), self.size, device)
                    chosen = slice(first + i, first + i + len(made.image))
                    images[chosen], masks[chosen] = made.image.cpu().numpy(), made.mask.cpu().numpy()
                    save(chosen.stop)
                    bar.advance(task, len(made.image))


class Cached(Dataset[Sample]):
    """Scenes that are already pictures, handed out as `Scenes` does: by number or by batch."""

    def __init__(self, images: np.ndarray, masks: np.ndarray) -> None:
        self.images, self.masks = images, masks

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Sample:
        sample = self.render([operator.index(index)])
        return Sample(sample.image[0], sample.mask[0])

    @property
    def frames(self) -> int:
        return self.images.shape[1]

    def render(self, indices: Indices, device: torch.device | str = "cpu") -> Sample:
        chosen = whole_numbers(indices, len(self))
        parts = (_taken(a, chosen, device) for a in (self.images, self.masks))
        return Sample(*(x[:, 0] if self.frames == 1 else x for x in parts))

    def stills(self, films: Indices, frames: Indices, device: torch.device | str = "cpu") -> Sample:
        """One frame of each of the films, (B, 3, size, size)."""
        chosen = whole_numbers(films, len(self)) * self.frames + whole_numbers(frames, self.frames)
        return Sample(*(_taken(a.reshape(-1, *a.shape[2:]), chosen, device) for a in (self.images, self.masks)))

    def __getstate__(self) -> dict[str, Any]:
        """A worker opens the files again; it is not sent their contents."""
        return {k: Path(str(v.filename)) if isinstance(v, np.memmap) else v for k, v in vars(self).items()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, reopened(value) if isinstance(value, Path) else value)


def _taken(array: np.ndarray, chosen: np.ndarray, device: torch.device | str) -> Tensor:
    """Rows of an array, read into memory that the device can copy from while it works."""
    pinned = usable(device).type == "cuda"
    rows = torch.empty((len(chosen), *array.shape[1:]), dtype=torch.uint8, pin_memory=pinned)
    np.take(array, chosen, axis=0, out=rows.numpy(), mode="clip")  # checked before; "raise" would copy twice
    return rows.to(device, non_blocking=pinned)


def whole_numbers(indices: Indices, count: int) -> np.ndarray:
    """The numbers of scenes as an array, or a sentence on which of them is none."""
    chosen = np.asarray(indices)
    if chosen.size and not np.issubdtype(chosen.dtype, np.integer):
        raise TypeError(f"indices are of type {chosen.dtype}; expected whole numbers")
    chosen = chosen.astype(np.int64).reshape(-1)
    wrong = chosen[(chosen < 0) | (chosen >= count)]
    if len(wrong):
        raise IndexError(f"scene {wrong[0]} is out of range: there are {count}, from 0 on")
    return chosen


def _read_state(folder: Path, stamp: dict[str, Any]) -> int:
    """How many scenes of the cache in the folder are done; a sentence if it is another cache, or none."""
    path = folder / "cache.json"
    if not path.exists():
        if any(folder.iterdir()):
            raise ValueError(f"{folder} is not empty and holds no cache; choose another folder")
        return 0
    try:
        state = dict(json.loads(path.read_text()))
    except (ValueError, TypeError):
        raise ValueError(f"{path} is not readable as JSON; delete the folder to make the cache again") from None
    names = [*stamp, *(name for name in state if name not in stamp and name != "done")]
    other = [name for name in names if state.get(name) != stamp.get(name)]
    if other:
        seen = ", ".join(f"{name} {state.get(name)}" for name in other)
        wanted = ", ".join(f"{name} {stamp.get(name)}" for name in other)
        raise ValueError(f"{folder} holds other scenes ({seen}; wanted {wanted}): choose another folder or delete it")
    return int(state.get("done", 0))


def reopened(path: Path, mode: Literal["r", "r+"] = "r") -> np.memmap:
    try:
        return np.load(path, mmap_mode=mode)
    except Exception:  # NumPy raises whatever it meets in a head: TokenError, TypeError...
        raise ValueError(f"{path} is missing or cut short; delete {path.parent} to make the cache again") from None


def _array(path: Path, shape: tuple[int, ...], keep: bool) -> np.memmap:
    """A uint8 array in a file, opened again or made anew. Its room is taken at once: a map of a file that the disk
    turns out too small for would end the process."""
    if keep:
        reopened(path)  # whole? To write in it would stretch a short file with zeros
        return reopened(path, "r+")
    with naming(path):
        array = np.lib.format.open_memmap(path, mode="w+", dtype=np.uint8, shape=shape)
        if hasattr(os, "posix_fallocate"):
            with path.open("r+b") as file:
                os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
        return array
