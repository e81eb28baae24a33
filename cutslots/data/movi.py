"""MOVi-A, MOVi-C and MOVi-E of Kubric: videos in the TFRecord shards of a TFDS folder."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np

from cutslots.data.resize import crop_image, crop_mask
from cutslots.data.source import (
    MAX_OBJECTS,
    DatasetSpec,
    Protocol,
    Row,
    Source,
    SourceRecord,
    Splits,
    count_objects,
    decode_labels,
    decode_png,
)
from cutslots.data.tfrecord import parse_example, read_records

FRAMES = 24


class Movi(Source):
    """The TFDS folder: movi_VARIANT-SPLIT.tfrecord-00000-of-00000 for the splits train and validation."""

    def __init__(self, source: Path, size: int, protocol: str, variant: str, max_objects: int) -> None:
        self.name, self.title, self.max_objects = f"movi_{variant}", f"MOVi-{variant.upper()}", max_objects
        pattern = f"{self.name}-*.tfrecord-*"
        folders = sorted({path.parent for path in source.rglob(pattern)}) if source.is_dir() else []
        if len(folders) != 1:
            seen = f"{len(folders)} folders with such files" if folders else "none"
            raise ValueError(f"{source} holds {seen}; expected a folder of {self.name}-train.tfrecord-00000-of-...")
        self.folder, self.size, self.protocol = folders[0], size, PROTOCOLS[variant][protocol]
        if not (self.folder / "features.json").is_file():
            raise ValueError(f"{self.folder} holds no features.json; expected the folder as TFDS has it")
        self.shards = {split: self._list_shards(split) for split in ("train", "validation")}
        self.shard_lengths = self._read_shard_lengths()
        self.num_videos: dict[str, int] = {}  # by split, known once all records are read
        self.files = [(path, path.stat().st_size) for paths in self.shards.values() for path in paths]

    def _list_shards(self, split: str) -> list[Path]:
        found = sorted(self.folder.glob(f"{self.name}-{split}.tfrecord-*-of-*"))
        if not found:
            raise ValueError(
                f"{self.folder} holds no {self.name}-{split}.tfrecord-00000-of-...; expected train and validation"
            )
        total = found[0].name.rsplit("-", 1)[1]
        count = int(total) if total.isdigit() else 0
        wanted = [f"{self.name}-{split}.tfrecord-{i:05d}-of-{total}" for i in range(count)]
        missing = sorted(set(wanted) - {path.name for path in found})
        if missing:
            raise ValueError(f"{self.folder} lacks {missing[0]}; expected all {len(wanted)} of them")
        if len(found) != len(wanted):
            raise ValueError(f"{self.folder} holds {found[-1].name} among {len(wanted)}; expected one set of files")
        return found

    def _read_shard_lengths(self) -> dict[str, int]:
        """Return the number of records of each shard, if dataset_info.json has it.

        Nothing else shows that a shard was truncated between two records.
        """
        info = self.folder / "dataset_info.json"
        if not info.is_file():
            return {}
        try:
            known = {s["name"]: [int(n) for n in s["shardLengths"]] for s in json.loads(info.read_text())["splits"]}
        except (ValueError, KeyError, TypeError):
            raise ValueError(
                f"{info} cannot be read; expected TFDS' description with splits and shardLengths"
            ) from None
        lengths: dict[str, int] = {}
        for split, paths in self.shards.items():
            if len(known.get(split, [])) != len(paths):
                raise ValueError(f"{info} lists {len(known.get(split, []))} files for {split}; there are {len(paths)}")
            lengths |= {path.name: length for path, length in zip(paths, known[split], strict=True)}
        return lengths

    def records(self) -> Iterator[SourceRecord]:
        row = 0
        for split, paths in self.shards.items():
            first = row
            for path in paths:
                index = -1
                for index, record in enumerate(read_records(path)):
                    yield SourceRecord(f"{path}, record {index}", row, partial(self._load, record))
                    row += 1
                expected = self.shard_lengths.get(path.name, index + 1)
                if index + 1 != expected:
                    raise ValueError(f"{path} ends early: it has {index + 1} records; expected {expected}")
            self.num_videos[split] = row - first

    def _load(self, record: bytes) -> Row:
        example = parse_example(record)
        frames: dict[str, list[bytes]] = {}
        for name in ("video", "segmentations"):
            if name not in example:
                raise ValueError(f"it has no feature {name!r}; expected a video of {self.title}")
            frames[name] = example[name].strings()
            if len(frames[name]) != FRAMES:
                raise ValueError(f"its {name} has {len(frames[name])} frames; expected {FRAMES}")
        images = [decode_png(data, ("RGB",), None) for data in frames["video"]]
        size = images[0].size
        if any(image.size != size for image in images):
            raise ValueError("its frames are not all of one size")
        labels = np.stack([decode_labels(data, size, self.max_objects) for data in frames["segmentations"]])
        box, resize = self.protocol.box(*size), self.protocol.resize
        return {
            "images": np.stack([crop_image(np.asarray(image), box, self.size, resize) for image in images]),
            "masks": crop_mask(labels, box, self.protocol.mask_size or self.size, resize),
            "objects": count_objects(labels),
        }

    def splits(self, num_rows: int) -> Splits:
        train = self.num_videos["train"]  # there is no test split: validation serves as both
        return {"train": (0, train), "val": (train, num_rows), "test": (train, num_rows)}


PAPERS_ON_C_AND_E = {  # whole frames
    "videosaur": Protocol(1.0, "torch-bicubic", size=224),
    "dinosaur": Protocol(1.0, "torch-bicubic", size=224, mask_size=128),
}
PROTOCOLS = {
    "a": {
        "clevrtex": Protocol(0.8, "pillow"),  # the paper's crop; it does not say how it resizes
        "savi": Protocol(1.0, "tensorflow", size=64),  # the small configuration of SAVi's code: whole frames
    },
    "c": PAPERS_ON_C_AND_E,
    "e": PAPERS_ON_C_AND_E,
}


def _spec(variant: str, max_objects: int) -> DatasetSpec:
    source = partial(Movi, variant=variant, max_objects=max_objects)
    return DatasetSpec(f"MOVi-{variant.upper()}", None, source, PROTOCOLS[variant], frames=FRAMES)


MOVI_A = _spec("a", MAX_OBJECTS)
MOVI_C = _spec("c", MAX_OBJECTS)
MOVI_E = _spec("e", 23)
