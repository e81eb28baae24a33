"""A prepared cache as a dataset: pictures by number or batch, straight from files that are mapped into memory."""

from __future__ import annotations

import json
import operator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from cutslots.data.prepare import FORMAT
from cutslots.data.published import DATASETS
from cutslots.scenes.dataset import Cached, Indices, Sample, reopened, whole_numbers
from cutslots.scenes.draw import SPLITS


class Prepared(Dataset[Sample]):
    """A split of what `cutslots prepare` wrote, as `Scenes` hands out scenes; videos have a leading frame axis.

    `objects` keeps scenes with at least and at most so many; without it, those the dataset's convention means."""

    def __init__(
        self,
        folder: Path,
        split: str = "train",
        size: int | None = None,
        count: int | None = None,
        objects: tuple[int, int] | None = None,
    ) -> None:
        if split not in SPLITS:
            raise ValueError(f"split is {split!r}; expected one of {', '.join(SPLITS)}")
        self.manifest = read_manifest(folder)
        request = self.manifest["request"]
        self.folder, self.split = folder, split
        self.dataset, self.size, self.frames = request["dataset"], request["size"], request["frames"]
        if size is not None and size != self.size:
            raise ValueError(
                f"{folder} is prepared at {self.size}x{self.size} and {size}x{size} is wanted; prepare it again with "
                f"--size {size} and another --out"
            )
        images, masks, counts = (reopened(folder / f"{name}.npy") for name in ("images", "masks", "objects"))
        rows = self.manifest["rows"]
        for array, shape in (
            (images, (rows, self.frames, 3, self.size, self.size)),
            (masks, (rows, self.frames, self.size, self.size)),
            (counts, (rows,)),
        ):
            if array.shape != shape or array.dtype != np.uint8:
                raise ValueError(f"{array.filename} is {array.dtype} {array.shape}; expected {shape}: prepare it again")
        self.cached, self.counts = Cached(images, masks), np.array(counts)
        rows = np.arange(*self.manifest["splits"][split])
        least, most = objects or self.manifest["objects"] or (0, 255)
        meant = rows[(self.counts[rows] >= least) & (self.counts[rows] <= most)]
        self.holds, self.rows = len(meant), meant[:count]
        if len(self.rows) == 0 and count != 0:
            shared = ", ".join(f"{name} {b - a:,}" for name, (a, b) in self.manifest["splits"].items())
            raise ValueError(f"{folder} has nothing for {split} with {least} to {most} objects (it has {shared})")

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Sample:
        sample = self.render([operator.index(index)])
        return Sample(sample.image[0], sample.mask[0])

    def name(self, index: int) -> str:
        return f"{self.rows[index]:06d}"

    def render(self, indices: Indices, device: torch.device | str = "cpu") -> Sample:
        return self.cached.render(self.rows[whole_numbers(indices, len(self))], device)

    def stills(self, films: Indices, frames: Indices, device: torch.device | str = "cpu") -> Sample:
        """One frame of each of the films, (B, 3, size, size)."""
        return self.cached.stills(self.rows[whole_numbers(films, len(self))], frames, device)


def is_prepared(folder: Path) -> bool:
    return (folder / "manifest.json").is_file() or (folder / "progress.json").is_file()


def read_manifest(folder: Path) -> dict[str, Any]:
    """What the cache is; a sentence if there is none, or it is not whole."""
    path = folder / "manifest.json"
    if not path.is_file():
        if (folder / "progress.json").is_file():
            raise ValueError(f"{folder} is not finished; run its cutslots prepare again, it goes on where it stopped")
        raise ValueError(f"{folder} holds no manifest.json; expected a folder that cutslots prepare has written")
    try:
        manifest = dict(json.loads(path.read_text()))
        request, files = manifest["request"], manifest["files"]
        sizes = {name: int(facts["bytes"]) for name, facts in files.items()}
        manifest["splits"] = {name: (int(a), int(b)) for name, (a, b) in manifest["splits"].items()}
        _ = (
            [request[name] for name in ("size", "frames", "format", "dataset")],
            [manifest[name] for name in ("rows", "objects")],
        )
        _ = [manifest["splits"][name] for name in SPLITS]
    except Exception:
        raise ValueError(f"{path} cannot be read as a manifest; delete {folder} and prepare it again") from None
    if request["format"] != FORMAT or request["dataset"] not in DATASETS:
        raise ValueError(f"{path} is of another version ({request['format']}; expected {FORMAT}); prepare it again")
    for name, size in sizes.items():
        seen = (folder / name).stat().st_size if (folder / name).is_file() else 0
        if seen != size:
            raise ValueError(f"{folder / name} has {seen:,} bytes; expected {size:,}: prepare it again")
    return manifest
