"""COCO 2017: photographs with instance annotations (instances_train2017.json, instances_val2017.json).

Pixels that several objects cover have the ignore label in instance masks. The two protocols follow the code of the
papers:

                               dinosaur                                    spot
    crowd annotations          no objects                                  objects as others
    classes where objects      the largest category id                     the ignore label
    overlap
    images                     shorter side to 224, bicubic, then center   the same, Pillow's bilinear
    masks                      the same at 320, nearest pixel              the same
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from cutslots.data.annotations import AnnotationFile, decode_segmentation
from cutslots.data.photographs import IGNORE_LABEL, MAX_LABEL, is_inside, photo_row, read_photo
from cutslots.data.source import DatasetSpec, Protocol, Row, Source, SourceRecord, Splits

FIELDS = {"file_name": str, "height": int, "width": int}


class Coco(Source):
    """A folder with annotations/instances_SPLIT2017.json and SPLIT2017/ or images/SPLIT2017/; train, val or both."""

    def __init__(self, source: Path, size: int, protocol: str) -> None:
        self.size, self.name, self.protocol = size, protocol, PROTOCOLS[protocol]
        self.parts: dict[str, tuple[AnnotationFile, Path]] = {}
        for split in ("train", "val"):
            path = source / "annotations" / f"instances_{split}2017.json"
            if path.is_file():
                folder = _image_folder(source, f"{split}2017")
                self.parts[split] = (AnnotationFile(path, "images", "image_id", FIELDS), folder)
        if not self.parts:
            raise ValueError(f"{source} holds no annotations/instances_val2017.json; expected the folder of COCO 2017")
        self.num_rows = self.num_records = sum(len(file.items) for file, _ in self.parts.values())
        self.files = [file for part in self.parts.values() for file in _list_files(*part)]

    def records(self) -> Iterator[SourceRecord]:
        row = 0
        for file, folder in self.parts.values():
            for index, item in enumerate(file.items):
                yield SourceRecord(str(folder / item["file_name"]), row, partial(self._load, file, folder, index))
                row += 1

    def _load(self, file: AnnotationFile, folder: Path, index: int) -> Row:
        item = file.items[index]
        image = read_photo(folder / item["file_name"], (item["width"], item["height"]))
        labels = self._labels(file.annotations(index), item["height"], item["width"])
        return photo_row(image, labels, self.protocol, self.size)

    def _labels(self, annotations: list[dict[str, Any]], height: int, width: int) -> np.ndarray:
        """Return the objects and the classes of all pixels, (2, H, W)."""
        if self.name != "spot":
            annotations = [each for each in annotations if not each.get("iscrowd")]
        if len(annotations) > MAX_LABEL:
            raise ValueError(f"it has {len(annotations)} objects; expected at most {MAX_LABEL}")
        objects, classes, covered = np.zeros((3, height, width), dtype=np.uint8)
        for label, annotation in enumerate(annotations, 1):
            try:
                mask = decode_segmentation(annotation.get("segmentation"), height, width)
                objects[mask] = label
                np.maximum(classes, np.uint8(_category(annotation)), out=classes, where=mask)
                covered += mask
            except ValueError as error:
                raise ValueError(f"its annotation {annotation.get('id')}: {error}") from None
        objects[covered > 1] = IGNORE_LABEL
        if self.name == "spot":
            classes[covered > 1] = IGNORE_LABEL
        return np.stack([objects, classes])

    def splits(self, num_rows: int) -> Splits:
        train = len(self.parts["train"][0].items) if "train" in self.parts else 0
        return {"train": (0, train), "val": (train, num_rows), "test": (train, num_rows)}


def _category(annotation: dict[str, Any]) -> int:
    category = annotation.get("category_id")
    if not isinstance(category, int) or not 1 <= category <= MAX_LABEL:
        raise ValueError(f"its category_id is {category!r}; expected 1 to {MAX_LABEL}")
    return category


def _image_folder(source: Path, name: str) -> Path:
    for folder in (source / name, source / "images" / name):
        if folder.is_dir():
            return folder
    raise ValueError(f"{source} holds no folder {name}/ or images/{name}/; expected the images of its annotations")


def _list_files(file: AnnotationFile, folder: Path) -> list[tuple[Path, int]]:
    """Return the annotations and the images with their sizes. Raise a ValueError if an image is missing."""
    sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
    found = [(file.path, file.path.stat().st_size)]
    for item in file.items:
        name = item["file_name"]
        if not is_inside(name) or name not in sizes:
            raise ValueError(f"{folder} holds no {name!r}, which {file.path.name} lists; expected all images")
        found.append((folder / name, sizes[name]))
    return found


PROTOCOLS = {
    "dinosaur": Protocol(1.0, "torch-bicubic", size=224, mask_size=320, resize_first=True),
    "spot": Protocol(1.0, "pillow", size=224, mask_size=320, resize_first=True),
}
COCO = DatasetSpec("COCO 2017", None, Coco, PROTOCOLS, has_classes=True, ignore_label=IGNORE_LABEL)
