"""PASCAL VOC 2012, segmentation: photographs with masks of objects and of classes.

Void pixels, label 255 in the files, are ignored by the protocol dinosaur and background by the protocol spot, as in the
code of the papers. Both train on trainaug.txt, which VOC itself does not contain; without it train.txt is read. Images
of trainaug.txt that VOC has no masks for have the ignore label everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np

from cutslots.data.photographs import IGNORE_LABEL, photo_row, read_labels, read_names, read_photo
from cutslots.data.source import DatasetSpec, Protocol, Row, Source, SourceRecord, Splits

MASK_FOLDERS = ("SegmentationObject", "SegmentationClass")


class Voc(Source):
    """The folder VOC2012, or one that contains it: JPEGImages/, SegmentationObject/, SegmentationClass/, ImageSets/."""

    def __init__(self, source: Path, size: int, protocol: str) -> None:
        self.size, self.name, self.protocol = size, protocol, PROTOCOLS[protocol]
        self.folder = _find_folder(source)
        lists = self.folder / "ImageSets" / "Segmentation"
        train = lists / "trainaug.txt"
        self.train = read_names(train if train.is_file() else lists / "train.txt")
        self.val = read_names(lists / "val.txt")
        self.files = [(path, path.stat().st_size) for path in self._list_files()]
        self.num_rows = self.num_records = len(self.train) + len(self.val)

    def _list_files(self) -> Iterator[Path]:
        names = {folder: {path.name for path in (self.folder / folder).iterdir()} for folder in MASK_FOLDERS}
        self.masked = {name for name in self.train if all(f"{name}.png" in found for found in names.values())}
        images = {path.name for path in (self.folder / "JPEGImages").iterdir()}
        for name in self.train + self.val:
            if f"{name}.jpg" not in images:
                raise ValueError(f"{self.folder / 'JPEGImages'} holds no {name}.jpg; expected all images of the lists")
            yield self.folder / "JPEGImages" / f"{name}.jpg"
        for name in self.val:
            for folder, found in names.items():
                if f"{name}.png" not in found:
                    raise ValueError(f"{self.folder / folder} holds no {name}.png; expected the masks of val.txt")
        self.masked |= set(self.val)
        yield from (self.folder / folder / f"{name}.png" for name in sorted(self.masked) for folder in MASK_FOLDERS)

    def records(self) -> Iterator[SourceRecord]:
        for row, name in enumerate(self.train + self.val):
            yield SourceRecord(str(self.folder / "JPEGImages" / f"{name}.jpg"), row, partial(self._load, name))

    def _load(self, name: str) -> Row:
        image = read_photo(self.folder / "JPEGImages" / f"{name}.jpg")
        return photo_row(image, self._labels(name, image.shape[:2]), self.protocol, self.size)

    def _labels(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """Return the objects and the classes of all pixels, (2, H, W)."""
        if name not in self.masked:
            return np.full((2, *shape), IGNORE_LABEL, dtype=np.uint8)
        size = (shape[1], shape[0])
        labels = np.stack([read_labels(self.folder / folder / f"{name}.png", size) for folder in MASK_FOLDERS])
        void = (labels == IGNORE_LABEL).any(0)
        labels[:, void] = 0 if self.name == "spot" else IGNORE_LABEL
        return labels

    def splits(self, num_rows: int) -> Splits:
        train = len(self.train)
        return {"train": (0, train), "val": (train, num_rows), "test": (train, num_rows)}


def _find_folder(source: Path) -> Path:
    wanted = ("JPEGImages", *MASK_FOLDERS, "ImageSets/Segmentation")
    for folder in (source, source / "VOC2012", source / "VOCdevkit" / "VOC2012"):
        if all((folder / name).is_dir() for name in wanted):
            return folder
    raise ValueError(f"{source} holds no VOC2012/ with {', '.join(wanted)}; expected PASCAL VOC 2012")


PROTOCOLS = {
    "dinosaur": Protocol(1.0, "torch-bicubic", size=224, mask_size=320, resize_first=True),
    "spot": Protocol(1.0, "pillow", size=224, mask_size=320, resize_first=True),
}
VOC = DatasetSpec("PASCAL VOC 2012", None, Voc, PROTOCOLS, has_classes=True, ignore_label=IGNORE_LABEL)
