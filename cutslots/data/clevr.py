"""CLEVR with masks, from DeepMind's multi-object datasets: one TFRecord file."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np

from cutslots.data.resize import crop_image, crop_mask
from cutslots.data.source import (
    HEIGHT,
    MAX_OBJECTS,
    WIDTH,
    DatasetSpec,
    Protocol,
    Row,
    Source,
    SourceRecord,
    Splits,
)
from cutslots.data.tfrecord import Feature, parse_example, read_records

SHAPES = {  # of the features that are read
    "image": (HEIGHT, WIDTH, 3),
    "mask": (MAX_OBJECTS + 1, HEIGHT, WIDTH),  # a layer for the background and for each object
    "visibility": (MAX_OBJECTS + 1,),
}


class Clevr(Source):
    """clevr_with_masks_train.tfrecords, or the folder that holds it."""

    def __init__(self, source: Path, size: int, protocol: str) -> None:
        found = [source] if source.is_file() else sorted(source.glob("*.tfrecord*"))
        if len(found) != 1:
            raise ValueError(
                f"{source} holds {len(found)} *.tfrecords; expected clevr_with_masks_train.tfrecords or its folder"
            )
        self.path, self.size, self.protocol = found[0], size, protocol
        self.box, self.resize = CLEVR.protocols[protocol].box(WIDTH, HEIGHT), CLEVR.protocols[protocol].resize
        self.files = [(self.path, self.path.stat().st_size)]

    def records(self) -> Iterator[SourceRecord]:
        for row, record in enumerate(read_records(self.path)):
            yield SourceRecord(f"{self.path}, record {row}", row, partial(self._load, record))

    def _load(self, record: bytes) -> Row:
        image, mask, visibility = self._features(parse_example(record))
        layers = crop_mask(mask, self.box, self.size, self.resize)
        return {
            "images": crop_image(image, self.box, self.size, self.resize)[None],
            "masks": layers.argmax(0).astype(np.uint8)[None],
            # Visibility counts the background too.
            "objects": np.array((visibility > 0).sum() - 1, dtype=np.uint8),
        }

    def _features(self, example: dict[str, Feature]) -> list[np.ndarray]:
        """Return image, mask and visibility in their shapes."""
        missing = [name for name in SHAPES if name not in example]
        if missing:
            raise ValueError(f"it has no feature {missing[0]!r}; expected a scene of CLEVR with masks")
        arrays = [example["image"].single_bytes(), example["mask"].single_bytes(), example["visibility"].floats()]
        for array, (name, shape) in zip(arrays, SHAPES.items(), strict=True):
            if array.size != np.prod(shape):
                raise ValueError(f"its {name} has {array.size:,} entries; expected {np.prod(shape):,}")
        if not arrays[2][0] > 0:
            raise ValueError("its visibility does not count the background; expected 1 in the first place")
        return [array.reshape(shape) for array, shape in zip(arrays, SHAPES.values(), strict=True)]

    def splits(self, num_rows: int) -> Splits:
        if self.protocol == "slot-attention":
            bounds = {"train": (0, 70_000), "val": (70_000, 85_000), "test": (85_000, 100_000)}
        else:
            bounds = {"test": (0, 15_000), "val": (15_000, 30_000), "train": (30_000, 100_000)}
        return {
            name: (min(start, num_rows), num_rows if end == 100_000 else min(end, num_rows))
            for name, (start, end) in bounds.items()
        }


CLEVR = DatasetSpec(
    "CLEVR with masks",
    100_000,
    Clevr,
    {
        # CLEVRTEX's experiments read CLEVR as tensors, CLEVRTEX itself with Pillow.
        "clevrtex": Protocol(0.8, "torch"),
        "slot-attention": Protocol((64, 29, 256, 221), "tensorflow", num_objects=(0, 6)),
    },
)
