"""CLEVRTEX and its variants: PNGs in folders, or in tar and zip archives."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

import numpy as np

from cutslots.data.archives import ARCHIVE_EXTENSIONS, list_archive, read_archive
from cutslots.data.resize import crop_image, crop_mask
from cutslots.data.source import (
    HEIGHT,
    WIDTH,
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
from cutslots.files import errors_name_path


class Clevrtex(Source):
    """clevrtex_VARIANT/*/CLEVRTEX_VARIANT_000000.png and ..._flat.png, its mask; unpacked or in archives."""

    def __init__(self, source: Path, size: int, protocol: str, variant: str) -> None:
        self.source, self.size, self.variant = source, size, variant
        self.box, self.resize = PROTOCOLS[protocol].box(WIDTH, HEIGHT), PROTOCOLS[protocol].resize
        self.name = re.compile(rf"CLEVRTEX_{variant}_(\d{{6}})(_flat)?\.png")
        self.archives = [source] if source.is_file() else []
        found = [] if self.archives else sorted(source.rglob("CLEVRTEX_*.png"))
        self.pairs = self._pair_up((str(path), path.name) for path in found)
        if not self.pairs and not self.archives:
            self.archives = sorted(p for p in source.iterdir() if p.name.lower().endswith(ARCHIVE_EXTENSIONS))
        if self.archives:
            self.pairs = self._pair_up(
                (f"{a}, {name}", Path(name).name) for a in self.archives for name in list_archive(a)
            )
        read = self.archives or [path for path in found if self.name.fullmatch(path.name)]
        self.files = [(path, path.stat().st_size) for path in read]
        self._check_pairs(found)
        self.num_rows = len(self.pairs)
        self.num_records = self.num_rows * (2 if self.archives else 1)

    def _pair_up(self, files: Iterable[tuple[str, str]]) -> dict[int, list[str | None]]:
        """Return where the image and the mask of each index are. `files` are pairs (where, name)."""
        pairs: dict[int, list[str | None]] = {}
        for where, name in files:
            match = self.name.fullmatch(name)
            if match is None:
                continue
            pair, is_mask = pairs.setdefault(int(match[1]), [None, None]), match[2] is not None
            if pair[is_mask] is not None:
                raise ValueError(f"{name} is there twice: {pair[is_mask]} and {where}")
            pair[is_mask] = where
        return pairs

    def _check_pairs(self, found: list[Path]) -> None:
        """Raise a ValueError unless every index from 0 on has an image and a mask."""
        if not self.pairs:
            others = sorted({path.name.split("_")[1] for path in found})
            seen = f"those of CLEVRTEX_{', '.join(others)}" if others else "none"
            raise ValueError(
                f"{self.source} holds no images CLEVRTEX_{self.variant}_000000.png ({seen}); expected the folder "
                f"clevrtex_{self.variant}, unpacked or in {', '.join(ARCHIVE_EXTENSIONS)}"
            )
        for index in range(max(self.pairs) + 1):
            for where, suffix in zip(self.pairs.get(index, (None, None)), ("", "_flat"), strict=True):
                if where is None:
                    name = f"CLEVRTEX_{self.variant}_{index:06d}{suffix}.png"
                    raise ValueError(f"{self.source} lacks {name}; expected all images with their masks, from 0 on")

    def records(self) -> Iterator[SourceRecord]:
        if not self.archives:
            for row in range(len(self.pairs)):
                image, mask = (Path(str(path)) for path in self.pairs[row])
                yield SourceRecord(str(image), row, partial(self._load_pair, image, mask))
            return
        for archive in self.archives:
            for name, data in read_archive(archive, lambda name: self.name.fullmatch(Path(name).name) is not None):
                match = self.name.fullmatch(Path(name).name)
                assert match is not None
                load = partial(self._load_mask if match[2] else self._load_image, data)
                yield SourceRecord(f"{archive}, {name}", int(match[1]), load)

    def _load_pair(self, image: Path, mask: Path) -> Row:
        row = self._load_image(_read_bytes(image))
        try:
            return row | self._load_mask(_read_bytes(mask))
        except ValueError as error:
            raise ValueError(f"its mask {mask.name}: {error}") from None

    def _load_image(self, data: bytes) -> Row:
        image = decode_png(data, ("RGB", "RGBA"), (WIDTH, HEIGHT)).convert("RGB")
        return {"images": crop_image(np.asarray(image), self.box, self.size, self.resize)[None]}

    def _load_mask(self, data: bytes) -> Row:
        labels = decode_labels(data, (WIDTH, HEIGHT))
        masks = crop_mask(labels, self.box, self.size, self.resize)
        return {"masks": masks[None], "objects": count_objects(labels)}

    def splits(self, num_rows: int) -> Splits:
        if self.variant == "outd":  # only for evaluation
            return {"train": (0, 0), "val": (0, num_rows), "test": (0, num_rows)}
        first, second = int(0.1 * num_rows), int(0.2 * num_rows)
        return {"test": (0, first), "val": (first, second), "train": (second, num_rows)}


def _read_bytes(path: Path) -> bytes:
    with errors_name_path(path):
        return path.read_bytes()


PROTOCOLS = {"clevrtex": Protocol(0.8, "pillow")}


def _spec(variant: str, count: int, title: str) -> DatasetSpec:
    return DatasetSpec(title, count, partial(Clevrtex, variant=variant), PROTOCOLS)


CLEVRTEX = _spec("full", 50_000, "CLEVRTEX")
CLEVRTEX_OOD = _spec("outd", 10_000, "CLEVRTEX, out of distribution")
# The number of images of these is that of the 20 folders of 1,000 which Invariant Slot Attention's preprocessing reads.
CLEVRTEX_CAMO = _spec("camo", 20_000, "CLEVRTEX, camouflage")
CLEVRTEX_PBG = _spec("pbg", 20_000, "CLEVRTEX, plain background")
CLEVRTEX_VBG = _spec("vbg", 20_000, "CLEVRTEX, varied background")
CLEVRTEX_GRASSBG = _spec("grassbg", 20_000, "CLEVRTEX, grass background")
