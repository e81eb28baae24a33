"""Caches that `cutslots prepare` writes, as datasets: clevr, clevrtex, movi-a, coco, ytvis..."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
import torch

from cutslots.data.prepare import FORMAT, row_shapes
from cutslots.data.published import PUBLISHED
from cutslots.data.registry import DATASETS, DatasetConfig, check_split
from cutslots.dataset import (
    EmptySplit,
    ImageSize,
    Indices,
    MemmapDataset,
    Sample,
    VideoDataset,
    check_image_size,
    check_indices,
    open_memmap,
)
from cutslots.registry import Range
from cutslots.scenes.sample import SPLITS

NumObjects = Annotated[int, Range(0, 255)]


class Prepared(VideoDataset):
    """A split of a cache. Images and masks are read from files that are mapped into memory.

    `image_size` must be the cache's, or None. `count` keeps the first images or videos. `num_objects` keeps scenes with
    at least and at most so many objects; by default those of the protocol that the cache was prepared with.
    """

    memory_mapped = True

    def __init__(
        self,
        folder: str | Path,
        split: str = "train",
        image_size: ImageSize | None = None,
        count: int | None = None,
        num_objects: tuple[int, int] | None = None,
    ) -> None:
        check_split(split)
        self.folder, self.split = Path(folder), split
        self.manifest = read_manifest(self.folder)
        request = self.manifest["request"]
        self.dataset, self.frames = request["dataset"], request["frames"]
        self.image_size = (request["size"], request["size"])
        if image_size is not None:
            self._check_image_size(check_image_size(image_size))
        self.ignore_label = self.manifest.get("ignore_label")
        self.cached, self.num_objects = self._open_arrays()
        self.has_classes = self.cached.has_classes
        self.rows = self._select_rows(count, num_objects or self.manifest["objects"] or (0, 255))

    def _check_image_size(self, wanted: tuple[int, int]) -> None:
        if wanted != self.image_size:
            height, width = wanted
            remedy = (
                f"prepare it again with --size {height} and another --out"
                if height == width
                else "prepared datasets are square"
            )
            cached = self.image_size[0]
            raise ValueError(f"{self.folder} is prepared at {cached}x{cached} and {width}x{height} is wanted; {remedy}")

    def _open_arrays(self) -> tuple[MemmapDataset, np.ndarray]:
        """Return all images and masks of the cache and the number of objects of every row."""
        shapes = row_shapes(self.manifest["request"])
        arrays = {name: open_memmap(self.folder / f"{name}.npy") for name in shapes}
        for name, array in arrays.items():
            shape = (self.manifest["rows"], *shapes[name])
            if array.shape != shape or array.dtype != np.uint8:
                raise ValueError(f"{array.filename} is {array.dtype} {array.shape}; expected {shape}: prepare it again")
        return MemmapDataset(arrays["images"], arrays["masks"], arrays.get("classes")), np.array(arrays["objects"])

    def _select_rows(self, count: int | None, bounds: tuple[int, int]) -> np.ndarray:
        """Return the rows of the split with so many objects, the first `count` of them."""
        low, high = bounds
        rows = np.arange(*self.manifest["splits"][self.split])
        if len(rows) == 0 and count != 0:
            raise EmptySplit(self._describe_empty())
        rows = rows[(self.num_objects[rows] >= low) & (self.num_objects[rows] <= high)]
        if len(rows) == 0 and count != 0:
            wanted = f"{self.split} with {low} to {high} objects"
            raise EmptySplit(f"{self.folder} has nothing for {wanted} ({self._sizes()})")
        return rows[:count]

    def _describe_empty(self) -> str:
        rows, published = self.manifest["rows"], self.manifest.get("published")
        text = f"{self.folder} has no rows for {self.split} ({self._sizes()})"
        if published in (None, rows):
            return text
        return f"{text}: its source held {rows:,} of the published {published:,}"

    def _sizes(self) -> str:
        return "it has " + ", ".join(
            f"{name} {end - start:,}" for name, (start, end) in self.manifest["splits"].items()
        )

    def __len__(self) -> int:
        return len(self.rows)

    def name(self, index: int) -> str:
        return f"{self.rows[index]:06d}"

    def fingerprint(self) -> str:
        rows = hashlib.sha256(self.rows.astype("<i8").tobytes()).hexdigest()
        return f"{self.manifest['files']['images.npy']}, rows {rows}"

    def get_batch(self, indices: Indices, device: torch.device | str = "cpu") -> Sample:
        return self.cached.get_batch(self.rows[check_indices(indices, len(self))], device)

    def get_classes(self, indices: Indices, device: torch.device | str = "cpu") -> torch.Tensor:
        return self.cached.get_classes(self.rows[check_indices(indices, len(self))], device)

    def get_frames(self, videos: Indices, frames: Indices, device: torch.device | str = "cpu") -> Sample:
        return self.cached.get_frames(self.rows[check_indices(videos, len(self))], frames, device)


def is_prepared(folder: Path) -> bool:
    """Return whether a folder holds a cache, finished or not."""
    return (folder / "manifest.json").is_file() or (folder / "progress.json").is_file()


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of a cache. Raise a ValueError if there is none or a file has another size than it says."""
    path = folder / "manifest.json"
    if not path.is_file():
        if (folder / "progress.json").is_file():
            raise ValueError(f"{folder} is not finished; run the same cutslots prepare again to resume")
        raise ValueError(f"{folder} holds no manifest.json; expected a folder written by cutslots prepare")
    try:
        manifest = dict(json.loads(path.read_text()))
        request, files = manifest["request"], manifest["files"]
        sizes = {name: int(facts["bytes"]) for name, facts in files.items()}
        manifest["splits"] = {name: (int(a), int(b)) for name, (a, b) in manifest["splits"].items()}
        _ = (
            [request[name] for name in ("size", "frames", "format", "dataset", "protocol")],
            [manifest[name] for name in ("rows", "objects")],
        )
        _ = [manifest["splits"][name] for name in SPLITS]
    except Exception:
        raise ValueError(f"{path} cannot be read as a manifest; delete {folder} and prepare it again") from None
    published = PUBLISHED.get(request["dataset"])
    if request["format"] != FORMAT or published is None or request["protocol"] not in published.protocols:
        raise ValueError(f"{path} is of another version ({request['format']}; expected {FORMAT}); prepare it again")
    for name, size in sizes.items():
        found = (folder / name).stat().st_size if (folder / name).is_file() else 0
        if found != size:
            raise ValueError(f"{folder / name} has {found:,} bytes; expected {size:,}: prepare it again")
    return manifest


# ----------------------------------------------------------------------------------------------------------- registry


@dataclass(frozen=True)
class PreparedConfig(DatasetConfig):
    """Options of all prepared datasets."""

    default_image_size: ClassVar[tuple[int, int] | None] = None

    path: str
    """The folder that `cutslots prepare` wrote."""
    num_objects: tuple[NumObjects, NumObjects] | None = None
    """Smallest and largest number of objects in a scene; by default all that the protocol keeps."""

    def validate(self) -> None:
        super().validate()
        if self.num_objects and self.num_objects[0] > self.num_objects[1]:
            raise ValueError(f"num_objects is {self.num_objects}; expected the smaller number first")


@dataclass(frozen=True)
class ClevrConfig(PreparedConfig):
    pass


@dataclass(frozen=True)
class ClevrtexConfig(PreparedConfig):
    pass


@dataclass(frozen=True)
class ClevrtexOodConfig(PreparedConfig):
    pass


@dataclass(frozen=True)
class ClevrtexCamoConfig(PreparedConfig):
    pass


@dataclass(frozen=True)
class ClevrtexPbgConfig(PreparedConfig):
    pass


@dataclass(frozen=True)
class ClevrtexVbgConfig(PreparedConfig):
    pass


@dataclass(frozen=True)
class ClevrtexGrassbgConfig(PreparedConfig):
    pass


@dataclass(frozen=True)
class MoviAConfig(PreparedConfig):
    pass


@dataclass(frozen=True)
class MoviCConfig(PreparedConfig):
    pass


@dataclass(frozen=True)
class MoviEConfig(PreparedConfig):
    pass


@dataclass(frozen=True)
class CocoConfig(PreparedConfig):
    pass


@dataclass(frozen=True)
class VocConfig(PreparedConfig):
    pass


@dataclass(frozen=True)
class DavisConfig(PreparedConfig):
    pass


@dataclass(frozen=True)
class YtvisConfig(PreparedConfig):
    pass


def register_prepared(name: str, config: type[PreparedConfig]) -> None:
    def open_prepared(
        split: str,
        image_size: tuple[int, int] | None,
        count: int | None,
        path: str,
        num_objects: tuple[int, int] | None,
    ) -> Prepared:
        data = Prepared(path, split, image_size, count, num_objects)
        if data.dataset != name:
            raise ValueError(f"{path} holds {data.dataset}; expected {name}, or --data {data.dataset}:{path}")
        return data

    open_prepared.__doc__ = f"{PUBLISHED[name].title}, prepared by `cutslots prepare {name}`."
    DATASETS.register(name, config)(open_prepared)


register_prepared("clevr", ClevrConfig)
register_prepared("clevrtex", ClevrtexConfig)
register_prepared("clevrtex-ood", ClevrtexOodConfig)
register_prepared("clevrtex-camo", ClevrtexCamoConfig)
register_prepared("clevrtex-pbg", ClevrtexPbgConfig)
register_prepared("clevrtex-vbg", ClevrtexVbgConfig)
register_prepared("clevrtex-grassbg", ClevrtexGrassbgConfig)
register_prepared("movi-a", MoviAConfig)
register_prepared("movi-c", MoviCConfig)
register_prepared("movi-e", MoviEConfig)
register_prepared("coco", CocoConfig)
register_prepared("voc", VocConfig)
register_prepared("davis", DavisConfig)
register_prepared("ytvis", YtvisConfig)
