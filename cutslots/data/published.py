"""The datasets of the field, read from the files as published: CLEVR with masks, CLEVRTEX and its variants, MOVi-A.

A source checks what lies there and hands out `Piece`s in an order that is the same every time: rows of the cache to
be, or halves of rows where an archive brings a picture and its mask apart. Each is read and cut to size by whoever
calls `make`. What the field agreed on stands in `DATASETS`: counts, boxes, splits.
"""

from __future__ import annotations

import abc
import dataclasses
import io
import json
import lzma
import re
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from cutslots.data.tfrecord import parse_example, read_records
from cutslots.disk import naming

Splits = dict[str, tuple[int, int]]
Columns = dict[str, np.ndarray]  # image (F, 3, S, S), mask (F, S, S), objects (): what there is of a row, all uint8
WIDTH, HEIGHT = 320, 240  # of CLEVR's and CLEVRTEX's pictures
MOST_OBJECTS = 10
MOST_PIXELS = 2**20  # of a picture: a megapixel
LARGEST_MEMBER = 2**24  # bytes of a file in an archive
ENDINGS = (".tar", ".tar.gz", ".tgz", ".zip")


class Piece(NamedTuple):
    where: str  # for sentences: the file, and the record in it
    row: int
    make: Callable[[], Columns]


class Source(abc.ABC):
    """A dataset as it lies on disk. Making one checks what can be checked without reading everything."""

    files: list[tuple[Path, int]]  # what is read, and its bytes
    rows: int | None = None  # where that is known before all is read
    pieces_expected: int | None = None

    @abc.abstractmethod
    def pieces(self) -> Iterator[Piece]: ...

    @abc.abstractmethod
    def splits(self, rows: int) -> Splits: ...


@dataclasses.dataclass(frozen=True)
class Convention:
    """How a dataset is cut and shared out."""

    box: tuple[int, int, int, int] | None  # left, upper, right, lower; None for the middle of any size
    objects: tuple[int, int] | None = None  # the numbers of objects that are meant, if not all


@dataclasses.dataclass(frozen=True)
class Published:
    title: str
    count: int | None  # scenes or videos, where the publisher gives it
    open: Callable[[Path, int, str], Source]
    conventions: dict[str, Convention]
    frames: int = 1


# ------------------------------------------------------------------------------------------------------------ pictures


def centre(width: int, height: int) -> tuple[int, int, int, int]:
    """The middle square of int(0.8 x the shorter side), as CLEVRTEX's loader and the paper have it."""
    side = int(0.8 * min(width, height))
    left, upper = (width - side) // 2, (height - side) // 2
    return left, upper, left + side, upper + side


def cut(picture: Image.Image, box: tuple[int, int, int, int], size: int) -> np.ndarray:
    """The box at the wanted size, (3, size, size): bilinear."""
    part = picture.convert("RGB").crop(box).resize((size, size), Image.Resampling.BILINEAR)
    return np.asarray(part).transpose(2, 0, 1)


def nearest(side: int, size: int) -> np.ndarray:
    """The places that a side of so many pixels is looked at for `size` of them: the nearest, as Pillow takes it."""
    return ((np.arange(size) + 0.5) * (side / size)).astype(np.int64)


def cut_mask(labels: np.ndarray, box: tuple[int, int, int, int], size: int) -> np.ndarray:
    """The box of (..., H, W) at the wanted size, each pixel the nearest of the labels."""
    left, upper, right, lower = box
    rows, columns = upper + nearest(lower - upper, size), left + nearest(right - left, size)
    return np.ascontiguousarray(labels[..., rows[:, None], columns[None, :]])


def decode(data: bytes, modes: tuple[str, ...], shape: tuple[int, int] | None) -> Image.Image:
    """A PNG that is whole, of one of the modes and of the published shape (width, height)."""
    try:
        picture = Image.open(io.BytesIO(data), formats=("PNG",))
        if picture.width * picture.height > MOST_PIXELS:
            raise ValueError(f"it has {picture.width}x{picture.height} pixels; expected at most {MOST_PIXELS:,}")
        if shape is not None and picture.size != shape:
            raise ValueError(f"it is {picture.width}x{picture.height}; expected {shape[0]}x{shape[1]}")
        if picture.mode not in modes:
            raise ValueError(f"it has mode {picture.mode}; expected one of {', '.join(modes)}")
        Image.open(io.BytesIO(data), formats=("PNG",)).verify()  # load() does not compare the pixels' checksums
        picture.load()
    except ValueError:
        raise
    except Exception as error:  # Pillow's readers raise whatever they meet: SyntaxError, struct.error, OSError...
        raise ValueError(f"it cannot be read as a PNG: {error}") from None
    return picture


def decode_labels(data: bytes, shape: tuple[int, int] | None) -> np.ndarray:
    labels = np.asarray(decode(data, ("P", "L"), shape))
    if labels.max() > MOST_OBJECTS:
        raise ValueError(f"a pixel has the label {labels.max()}; expected 0 to {MOST_OBJECTS}")
    return labels


def number_of_objects(labels: np.ndarray) -> np.ndarray:
    return np.array((np.bincount(labels.ravel(), minlength=1)[1:] > 0).sum(), dtype=np.uint8)


# --------------------------------------------------------------------------------------------------------------- CLEVR


class Clevr(Source):
    """clevr_with_masks_train.tfrecords, of DeepMind's multi-object datasets."""

    def __init__(self, source: Path, size: int, convention: str) -> None:
        found = [source] if source.is_file() else sorted(source.glob("*.tfrecord*"))
        if len(found) != 1:
            raise ValueError(
                f"{source} holds {len(found)} *.tfrecords; expected clevr_with_masks_train.tfrecords or its folder"
            )
        self.path, self.size, self.convention = found[0], size, convention
        self.box = DATASETS["clevr"].conventions[convention].box or centre(WIDTH, HEIGHT)
        self.files = [(self.path, self.path.stat().st_size)]

    def pieces(self) -> Iterator[Piece]:
        for number, record in enumerate(read_records(self.path)):
            yield Piece(f"{self.path}, record {number}", number, partial(self._make, record))

    def _make(self, record: bytes) -> Columns:
        example = parse_example(record)
        missing = [name for name in ("image", "mask", "visibility") if name not in example]
        if missing:
            raise ValueError(f"it has no feature {missing[0]!r}; expected a scene of CLEVR with masks")
        image, mask = example["image"].octets(), example["mask"].octets()
        visible = example["visibility"].floats()
        for name, values, shape in (
            ("image", image, (HEIGHT, WIDTH, 3)),
            ("mask", mask, (MOST_OBJECTS + 1, HEIGHT, WIDTH)),
            ("visibility", visible, (MOST_OBJECTS + 1,)),
        ):
            if values.size != np.prod(shape):
                raise ValueError(f"its {name} has {values.size:,} entries; expected {np.prod(shape):,}")
        if not visible[0] > 0:
            raise ValueError("its visibility does not count the background; expected 1 in the first place")
        layers = cut_mask(mask.reshape(MOST_OBJECTS + 1, HEIGHT, WIDTH), self.box, self.size)
        left, upper, right, lower = self.box
        inside = np.ascontiguousarray(image.reshape(HEIGHT, WIDTH, 3)[upper:lower, left:right])
        return {
            "images": cut(Image.fromarray(inside), (0, 0, right - left, lower - upper), self.size)[None],
            "masks": layers.argmax(0).astype(np.uint8)[None],
            # The background is counted among the visible: what is wanted is the number of objects.
            "objects": np.array((visible > 0).sum() - 1, dtype=np.uint8),
        }

    def splits(self, rows: int) -> Splits:
        if self.convention == "slot-attention":
            bounds = {"train": (0, 70_000), "val": (70_000, 85_000), "test": (85_000, 100_000)}
        else:
            bounds = {"test": (0, 15_000), "val": (15_000, 30_000), "train": (30_000, 100_000)}
        return {name: (min(a, rows), rows if b == 100_000 else min(b, rows)) for name, (a, b) in bounds.items()}


# ------------------------------------------------------------------------------------------------------------ CLEVRTEX


class Clevrtex(Source):
    """clevrtex_VARIANT/*/CLEVRTEX_VARIANT_000000.png and ..._flat.png, unpacked or in tar and zip archives."""

    def __init__(self, source: Path, size: int, convention: str, variant: str) -> None:
        self.source, self.size, self.variant = source, size, variant
        self.box = centre(WIDTH, HEIGHT)
        self.name = re.compile(rf"CLEVRTEX_{variant}_(\d{{6}})(_flat)?\.png")
        self.archives = [source] if source.is_file() else []
        found = [] if self.archives else sorted(source.rglob("CLEVRTEX_*.png"))
        self.pairs = self._listed((str(path), path.name) for path in found)
        if not self.pairs and not self.archives:
            self.archives = sorted(path for path in source.iterdir() if path.name.lower().endswith(ENDINGS))
        if self.archives:
            self.pairs = self._listed(
                (f"{a}, {name}", Path(name).name) for a in self.archives for name in list_archive(a)
            )
        read = self.archives or [path for path in found if self.name.fullmatch(path.name)]
        self.files = [(path, path.stat().st_size) for path in read]
        if not self.pairs:
            other = sorted({path.name.split("_")[1] for path in found})
            seen = f"those of CLEVRTEX_{', '.join(other)}" if other else "none"
            raise ValueError(
                f"{source} holds no pictures CLEVRTEX_{variant}_000000.png ({seen}); expected the folder "
                f"clevrtex_{variant}, unpacked or in {', '.join(ENDINGS)}"
            )
        self._check()
        self.rows = len(self.pairs)
        self.pieces_expected = self.rows * (2 if self.archives else 1)

    def _listed(self, files: Iterable[tuple[str, str]]) -> dict[int, list[str | None]]:
        """Where the picture and the mask of each index are, of (where, name)."""
        pairs: dict[int, list[str | None]] = {}
        for where, name in files:
            match = self.name.fullmatch(name)
            if match is None:
                continue
            pair, half = pairs.setdefault(int(match[1]), [None, None]), match[2] is not None
            if pair[half] is not None:
                raise ValueError(f"{name} is there twice: {pair[half]} and {where}")
            pair[half] = where
        return pairs

    def _check(self) -> None:
        for index in range(max(self.pairs) + 1):
            for found, ending in zip(self.pairs.get(index, (None, None)), ("", "_flat"), strict=True):
                if found is None:
                    name = f"CLEVRTEX_{self.variant}_{index:06d}{ending}.png"
                    raise ValueError(f"{self.source} lacks {name}; expected all pictures with their masks, from 0 on")

    def pieces(self) -> Iterator[Piece]:
        if not self.archives:
            for row in range(len(self.pairs)):
                image, mask = (Path(str(path)) for path in self.pairs[row])
                yield Piece(str(image), row, partial(self._pair, image, mask))
            return
        for archive in self.archives:
            for name, data in read_archive(archive, lambda name: self.name.fullmatch(Path(name).name) is not None):
                match = self.name.fullmatch(Path(name).name)
                assert match is not None
                make = partial(self._mask if match[2] else self._image, data)
                yield Piece(f"{archive}, {name}", int(match[1]), make)

    def _pair(self, image: Path, mask: Path) -> Columns:
        columns = self._image(_read(image))
        try:
            return columns | self._mask(_read(mask))
        except ValueError as error:
            raise ValueError(f"its mask {mask.name}: {error}") from None

    def _image(self, data: bytes) -> Columns:
        return {"images": cut(decode(data, ("RGB", "RGBA"), (WIDTH, HEIGHT)), self.box, self.size)[None]}

    def _mask(self, data: bytes) -> Columns:
        labels = decode_labels(data, (WIDTH, HEIGHT))
        return {"masks": cut_mask(labels, self.box, self.size)[None], "objects": number_of_objects(labels)}

    def splits(self, rows: int) -> Splits:
        if self.variant == "outd":  # all of it is for judging
            return {"train": (0, 0), "val": (0, rows), "test": (0, rows)}
        first, second = int(0.1 * rows), int(0.2 * rows)
        return {"test": (0, first), "val": (first, second), "train": (second, rows)}


def _read(path: Path) -> bytes:
    with naming(path):
        return path.read_bytes()


def list_archive(path: Path) -> Iterator[str]:
    """The names of the files in a tar or zip."""
    with _archive(path):
        if path.name.lower().endswith(".zip"):
            with zipfile.ZipFile(path) as archive:
                yield from (info.filename for info in archive.infolist() if not info.is_dir())
        else:
            with tarfile.open(path, "r:*") as tar:
                yield from (member.name for member in tar if member.isfile())
                assert tar.fileobj is not None
                tar.fileobj.seek(tar.offset)  # tarfile takes a damaged head, or the end of the file, for the end
                if tar.fileobj.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
                    raise EOFError


def read_archive(path: Path, wanted: Callable[[str], bool]) -> Iterator[tuple[str, bytes]]:
    """Name and content of the wanted files, in the order of the archive. Nothing is unpacked to disk."""
    with _archive(path):
        if path.name.lower().endswith(".zip"):
            with zipfile.ZipFile(path) as archive:
                for info in archive.infolist():
                    if not info.is_dir() and wanted(info.filename):
                        _bounded(f"{path}, {info.filename}", info.file_size)
                        yield info.filename, archive.read(info)
        else:
            with tarfile.open(path, "r|*") as tar:
                for member in tar:
                    if member.isfile() and wanted(member.name):
                        _bounded(f"{path}, {member.name}", member.size)
                        file = tar.extractfile(member)
                        assert file is not None
                        data = file.read()
                        if len(data) != member.size:
                            raise EOFError
                        yield member.name, data


def _bounded(name: str, size: int) -> None:
    if size > LARGEST_MEMBER:
        raise ValueError(f"{name} has {size:,} bytes; expected at most {LARGEST_MEMBER:,}")


class _archive:
    """Makes what goes wrong with an archive a sentence that names it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: Any, _: Any) -> None:
        if isinstance(error, EOFError):
            raise ValueError(f"{self.path} ends early; expected a whole archive") from None
        kinds = tarfile.TarError | zipfile.BadZipFile | zlib.error | lzma.LZMAError | OSError | RuntimeError
        if isinstance(error, kinds | UnicodeDecodeError):  # RuntimeError: encrypted, or packed in a way unknown
            reason = str(error).partition("\n")[0].rstrip(":")
            raise ValueError(f"{self.path} cannot be read as an archive: {reason}") from None


# -------------------------------------------------------------------------------------------------------------- MOVi-A


class MoviA(Source):
    """The TFDS folder of Kubric's MOVi-A: movi_a-SPLIT.tfrecord-00000-of-00000 for train and validation."""

    def __init__(self, source: Path, size: int, convention: str) -> None:
        folders = sorted({path.parent for path in source.rglob("movi_a-*.tfrecord-*")}) if source.is_dir() else []
        if len(folders) != 1:
            seen = f"{len(folders)} folders with such files" if folders else "none"
            raise ValueError(f"{source} holds {seen}; expected a folder of movi_a-train.tfrecord-00000-of-...")
        self.folder, self.size = folders[0], size
        if not (self.folder / "features.json").is_file():
            raise ValueError(f"{self.folder} holds no features.json; expected the folder as TFDS has it")
        self.shards = {split: self._shards(split) for split in ("train", "validation")}
        self.lengths = self._lengths()
        self.counts: dict[str, int] = {}
        self.files = [(path, path.stat().st_size) for paths in self.shards.values() for path in paths]
        self.frames = DATASETS["movi-a"].frames

    def _shards(self, split: str) -> list[Path]:
        found = sorted(self.folder.glob(f"movi_a-{split}.tfrecord-*-of-*"))
        if not found:
            raise ValueError(
                f"{self.folder} holds no movi_a-{split}.tfrecord-00000-of-...; expected train and validation"
            )
        total = found[0].name.rsplit("-", 1)[1]
        wanted = [f"movi_a-{split}.tfrecord-{i:05d}-of-{total}" for i in range(int(total) if total.isdigit() else 0)]
        missing = sorted(set(wanted) - {path.name for path in found})
        if missing:
            raise ValueError(f"{self.folder} lacks {missing[0]}; expected all {len(wanted)} of them")
        if len(found) != len(wanted):
            raise ValueError(f"{self.folder} holds {found[-1].name} among {len(wanted)}; expected one set of files")
        return found

    def _lengths(self) -> dict[str, int]:
        """How many records each file should have, where dataset_info.json says so: a file that was cut between two
        records shows by nothing else."""
        info = self.folder / "dataset_info.json"
        if not info.is_file():
            return {}
        try:
            said = {s["name"]: [int(n) for n in s["shardLengths"]] for s in json.loads(info.read_text())["splits"]}
        except (ValueError, KeyError, TypeError):
            raise ValueError(
                f"{info} cannot be read; expected TFDS' description with splits and shardLengths"
            ) from None
        lengths: dict[str, int] = {}
        for split, paths in self.shards.items():
            if len(said.get(split, [])) != len(paths):
                raise ValueError(
                    f"{info} speaks of {len(said.get(split, []))} files for {split}; there are {len(paths)}"
                )
            lengths |= {path.name: n for path, n in zip(paths, said[split], strict=True)}
        return lengths

    def pieces(self) -> Iterator[Piece]:
        row = 0
        for split, paths in self.shards.items():
            first = row
            for path in paths:
                number = -1
                for number, record in enumerate(read_records(path)):
                    yield Piece(f"{path}, record {number}", row, partial(self._make, record))
                    row += 1
                expected = self.lengths.get(path.name, number + 1)
                if number + 1 != expected:
                    raise ValueError(f"{path} ends early: it has {number + 1} records; expected {expected}")
            self.counts[split] = row - first

    def _make(self, record: bytes) -> Columns:
        example = parse_example(record)
        films = {}
        for name in ("video", "segmentations"):
            if name not in example:
                raise ValueError(f"it has no feature {name!r}; expected a video of MOVi-A")
            films[name] = example[name].strings()
            if len(films[name]) != self.frames:
                raise ValueError(f"its {name} has {len(films[name])} frames; expected {self.frames}")
        pictures = [decode(data, ("RGB",), None) for data in films["video"]]
        shape = pictures[0].size
        if any(picture.size != shape for picture in pictures):
            raise ValueError("its frames are not all of one size")
        labels = np.stack([decode_labels(data, shape) for data in films["segmentations"]])
        box = centre(*shape)
        return {
            "images": np.stack([cut(picture, box, self.size) for picture in pictures]),
            "masks": cut_mask(labels, box, self.size),
            "objects": number_of_objects(labels),
        }

    def splits(self, rows: int) -> Splits:
        train = self.counts["train"]  # there is no test split: validation serves for both
        return {"train": (0, train), "val": (train, rows), "test": (train, rows)}


def _clevrtex(variant: str, count: int | None, title: str) -> Published:
    return Published(title, count, partial(Clevrtex, variant=variant), {"clevrtex": Convention(centre(WIDTH, HEIGHT))})


DATASETS = {
    "clevr": Published(
        "CLEVR with masks",
        100_000,
        Clevr,
        {
            "clevrtex": Convention(centre(WIDTH, HEIGHT)),
            "slot-attention": Convention((64, 29, 256, 221), objects=(0, 6)),
        },
    ),
    "clevrtex": _clevrtex("full", 50_000, "CLEVRTEX"),
    "clevrtex-ood": _clevrtex("outd", 10_000, "CLEVRTEX, out of distribution"),
    "clevrtex-camo": _clevrtex("camo", None, "CLEVRTEX, camouflage"),
    "movi-a": Published("MOVi-A", None, MoviA, {"clevrtex": Convention(None)}, frames=24),
}
