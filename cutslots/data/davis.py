"""DAVIS 2017: videos with a mask of every frame, as clips of 24 frames."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np

from cutslots.data.photographs import IGNORE_LABEL, fit_image, fit_mask, read_labels, read_names, read_photo
from cutslots.data.source import DatasetSpec, Protocol, Row, Source, SourceRecord, Splits, count_objects

FRAMES = 24  # of a clip; videos have 25 to 104


class Davis(Source):
    """The folder DAVIS: JPEGImages/480p, Annotations_unsupervised/480p or Annotations/480p, ImageSets/2017.

    A row is a clip. Clips do not overlap; frames after the last whole clip of a video are left out.
    """

    def __init__(self, source: Path, size: int, protocol: str) -> None:
        self.size, self.protocol = size, PROTOCOLS[protocol]
        self.folder = source if (source / "JPEGImages").is_dir() else source / "DAVIS"
        self.images = self.folder / "JPEGImages" / "480p"
        annotations = [self.folder / name / "480p" for name in ("Annotations_unsupervised", "Annotations")]
        found = [folder for folder in annotations if folder.is_dir()]
        if not self.images.is_dir() or not found:
            raise ValueError(f"{source} holds no JPEGImages/480p/ with Annotations/480p/; expected DAVIS 2017")
        self.masks = found[0]
        lists = self.folder / "ImageSets" / "2017"
        self.clips = {split: self._list_clips(read_names(lists / f"{split}.txt")) for split in ("train", "val")}
        self.num_rows = self.num_records = sum(map(len, self.clips.values()))
        images = [path for clips in self.clips.values() for clip in clips for path in clip]
        self.files = [(path, path.stat().st_size) for image in images for path in (image, self._mask(image))]

    def _list_clips(self, videos: list[str]) -> list[list[Path]]:
        """Return the frames of every clip, by the paths of their images."""
        clips = []
        for name in videos:
            if not (self.images / name).is_dir() or not (self.masks / name).is_dir():
                raise ValueError(f"{self.folder} lacks the frames or the masks of {name}; expected all listed videos")
            frames = sorted((self.images / name).glob("*.jpg"))
            clips += [frames[i : i + FRAMES] for i in range(0, len(frames) - FRAMES + 1, FRAMES)]
        return clips

    def _mask(self, image: Path) -> Path:
        path = self.masks / image.parent.name / f"{image.stem}.png"
        if not path.is_file():
            raise ValueError(f"there is no {path}; expected a mask for every frame")
        return path

    def records(self) -> Iterator[SourceRecord]:
        for row, clip in enumerate(self.clips["train"] + self.clips["val"]):
            yield SourceRecord(str(clip[0].parent), row, partial(self._load, clip))

    def _load(self, clip: list[Path]) -> Row:
        images, labels, used = [], [], np.zeros(256, dtype=bool)
        for path in clip:
            image = read_photo(path)
            mask = read_labels(self._mask(path), (image.shape[1], image.shape[0]))
            used[np.unique(mask)] = True
            images.append(fit_image(image, self.protocol, self.size))
            labels.append(fit_mask(mask, self.protocol, self.protocol.mask_size or self.size))
        return {
            "images": np.stack(images),
            "masks": np.stack(labels),
            "objects": count_objects(np.flatnonzero(used), IGNORE_LABEL),
        }

    def splits(self, num_rows: int) -> Splits:
        train = len(self.clips["train"])
        return {"train": (0, train), "val": (train, num_rows), "test": (train, num_rows)}


PROTOCOLS = {"videosaur": Protocol(1.0, "torch-bicubic", size=224)}
DAVIS = DatasetSpec("DAVIS 2017", None, Davis, PROTOCOLS, frames=FRAMES, ignore_label=IGNORE_LABEL)
