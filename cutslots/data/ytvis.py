"""YouTube-VIS 2021: videos with instance annotations, as clips of 6 frames.

The masks of the published validation videos are not public. As in VideoSAUR's code, the last 300 training videos are
for validation. Frames are scaled to a shorter side of 320 by the nearest pixel, cropped to the central square and
resized to 224x224, as VideoSAUR's code does in two steps. Pixels that several objects cover have the ignore label.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from cutslots.data.annotations import AnnotationFile, decode_segmentation
from cutslots.data.photographs import IGNORE_LABEL, MAX_LABEL, fit_image, fit_mask, is_inside, read_photo
from cutslots.data.source import DatasetSpec, Protocol, Row, Source, SourceRecord, Splits, count_objects

FRAMES = 6  # of a clip
NUM_VAL = 300  # videos
FIELDS = {"file_names": list, "height": int, "width": int}


class YoutubeVis(Source):
    """The folder of the training videos: instances.json and JPEGImages/, or the folder that holds it as train/.

    A row is a clip. Clips do not overlap; frames after the last whole clip of a video are left out.
    """

    def __init__(self, source: Path, size: int, protocol: str) -> None:
        self.size, self.protocol = size, PROTOCOLS[protocol]
        folder = source if (source / "instances.json").is_file() else source / "train"
        if not (folder / "instances.json").is_file() or not (folder / "JPEGImages").is_dir():
            raise ValueError(f"{source} holds no train/ with instances.json and JPEGImages/; expected YouTube-VIS 2021")
        self.images = folder / "JPEGImages"
        self.annotations = AnnotationFile(folder / "instances.json", "videos", "video_id", FIELDS)
        lengths = [len(item["file_names"]) // FRAMES for item in self.annotations.items]
        self.clips = [(video, FRAMES * i) for video, length in enumerate(lengths) for i in range(length)]
        self.num_train = sum(lengths[:-NUM_VAL])
        self.num_rows = self.num_records = len(self.clips)
        self.files = [(self.annotations.path, self.annotations.path.stat().st_size), *self._list_frames()]

    def _list_frames(self) -> Iterator[tuple[Path, int]]:
        for video, start in self.clips:
            for name in self.annotations.items[video]["file_names"][start : start + FRAMES]:
                path = self.images / str(name)
                if not isinstance(name, str) or not is_inside(name) or not path.is_file():
                    raise ValueError(
                        f"{self.images} holds no {name!r}, which instances.json lists; expected all frames"
                    )
                yield path, path.stat().st_size

    def records(self) -> Iterator[SourceRecord]:
        for row, (video, start) in enumerate(self.clips):
            name = self.annotations.items[video]["file_names"][start]
            yield SourceRecord(str(self.images / name), row, partial(self._load, video, start))

    def _load(self, video: int, start: int) -> Row:
        item = self.annotations.items[video]
        tracks = [each for each in self.annotations.annotations(video) if not each.get("iscrowd")]
        if len(tracks) > MAX_LABEL:
            raise ValueError(f"its video has {len(tracks)} objects; expected at most {MAX_LABEL}")
        size = (item["width"], item["height"])
        frames = range(start, start + FRAMES)
        images = [read_photo(self.images / item["file_names"][t], size) for t in frames]
        labels = np.stack([_labels(tracks, t, item["height"], item["width"]) for t in frames])
        return {
            "images": np.stack([fit_image(image, self.protocol, self.size) for image in images]),
            "masks": fit_mask(labels, self.protocol, self.protocol.mask_size or self.size),
            "objects": count_objects(labels, IGNORE_LABEL),
        }

    def splits(self, num_rows: int) -> Splits:
        return {"train": (0, self.num_train), "val": (self.num_train, num_rows), "test": (self.num_train, num_rows)}


def _labels(tracks: list[dict[str, Any]], frame: int, height: int, width: int) -> np.ndarray:
    """Return the objects (H, W) of a frame. An object that is not visible in it has no segmentation there."""
    labels, covered = np.zeros((2, height, width), dtype=np.uint8)
    for label, track in enumerate(tracks, 1):
        segmentations = track.get("segmentations")
        if not isinstance(segmentations, list) or len(segmentations) <= frame:
            raise ValueError(
                f"its annotation {track.get('id')} has no segmentation for frame {frame}; expected all frames"
            )
        if segmentations[frame] is None:
            continue
        try:
            mask = decode_segmentation(segmentations[frame], height, width)
        except ValueError as error:
            raise ValueError(f"its annotation {track.get('id')}, frame {frame}: {error}") from None
        labels[mask] = label
        covered += mask
    labels[covered > 1] = IGNORE_LABEL
    return labels


PROTOCOLS = {"videosaur": Protocol(1.0, "torch-bicubic", size=224, prescale=320)}
YTVIS = DatasetSpec("YouTube-VIS 2021", None, YoutubeVis, PROTOCOLS, frames=FRAMES, ignore_label=IGNORE_LABEL)
