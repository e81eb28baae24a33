"""Measure how fast published datasets are read, prepared and loaded, from published files to batches of images.

    python benchmarks/loading.py    # about two minutes

The files are generated in a temporary folder in the published formats: scenes of discs with noise, which compress about
as well as rendered images. Everything is read from the page cache. The table gives images or records per second: the
median of several repeats and their range.

`read` takes records to arrays (CLEVR: image, mask and visibility) or to PNGs (MOVi-A), with cutslots and with the
tfrecord package in turns, after both gave the same values. The package verifies no checksums, and it decompresses a
file once more to learn its length. `prepare` is the whole command: read, crop, write, compute checksums. `load` takes
random images and masks of 128 x 128 from a prepared cache, in batches of 64: with `get_batch`, and with the training
loader on the CPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import io
import itertools
import os
import platform
import statistics
import struct
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from rich import box
from rich.console import Console
from rich.table import Table
from tfrecord.reader import tfrecord_loader

from cutslots.data.memory import load_to_memory
from cutslots.data.open import open_dataset
from cutslots.data.prepare import prepare
from cutslots.data.tfrecord import checksum, parse_example, read_records
from cutslots.devices import make_fabric
from cutslots.training.loader import TrainLoader
from cutslots.training.presets import PRESETS

BATCH_SIZE, NUM_BATCHES = 64, 100
TARGET = 4_000  # images per second that two cores should load
MASKS, FRAMES = 11, 24  # of a scene of CLEVR, of a video of MOVi-A
SCENES = 32  # distinct scenes of CLEVR
CLEVR = {"image": "byte", "mask": "byte", "visibility": "float"}
MOVI = {"video": "byte", "segmentations": "byte"}


class Row(NamedTuple):
    what: str
    unit: str
    rates: list[float]  # per second, by repeat
    note: str = ""


# --------------------------------------------------------------------------------------------------------------- files


def scene(rng: np.random.Generator, height: int, width: int, noise: float) -> tuple[np.ndarray, np.ndarray]:
    """Return an image (H, W, 3) of 3 to 10 discs on a smooth background, and the labels (H, W), both uint8."""
    y, x = np.ogrid[:height, :width]
    image = np.stack([110 + 40 * np.sin(x / 150 + c) + 30 * np.cos(y / 100 + c) for c in range(3)], -1)
    labels = np.zeros((height, width), dtype=np.uint8)
    for label in range(1, rng.integers(4, MASKS + 1)):
        radius = rng.uniform(0.05, 0.15) * height
        distance = ((x - rng.uniform(0, width)) ** 2 + (y - rng.uniform(0, height)) ** 2) / radius**2
        inside = distance < 1
        labels[inside] = label
        image[inside] = rng.uniform(60, 240, 3) * (1 - 0.7 * distance[inside, None])
    image += rng.normal(0, noise, image.shape)
    return image.clip(0, 255).astype(np.uint8), labels


def varint(number: int) -> bytes:
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    return bytes([*out, number])


def field(number: int, data: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(data)) + data


def record(features: dict[str, tuple[int, bytes]]) -> bytes:
    """Encode an Example with its length and checksums. A feature is (kind, encoded list), 1 for bytes, 2 for floats."""
    data = b"".join(field(1, field(1, name.encode()) + field(2, field(*f))) for name, f in features.items())
    data = field(1, data)
    length = struct.pack("<Q", len(data))
    return b"".join([length, struct.pack("<I", checksum(length)), data, struct.pack("<I", checksum(data))])


def single_bytes(values: np.ndarray) -> tuple[int, bytes]:
    """Encode every byte as a string, as CLEVR does."""
    triples = np.empty((values.size, 3), dtype=np.uint8)
    triples[:] = 0x0A, 1, 0
    triples[:, 2] = values.ravel()
    return 1, triples.tobytes()


def clevr_record(rng: np.random.Generator) -> bytes:
    image, labels = scene(rng, 240, 320, noise=2)
    mask = (labels == np.arange(MASKS, dtype=np.uint8)[:, None, None]) * np.uint8(255)
    visible = mask.any((1, 2)).astype("<f4").tobytes()
    return record({"image": single_bytes(image), "mask": single_bytes(mask), "visibility": (2, field(1, visible))})


def write_clevr(path: Path, count: int) -> None:
    """Write one GZIP stream. Repeated scenes are compressed once: after a full flush, compressed data does not refer to
    earlier data and can be copied."""
    rng = np.random.default_rng(0)
    records = [clevr_record(rng) for _ in range(min(count, SCENES))]
    compressor = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    packed = [compressor.compress(data) + compressor.flush(zlib.Z_FULL_FLUSH) for data in records]
    crc = length = 0
    with path.open("wb") as file:
        file.write(b"\x1f\x8b\x08" + bytes(6) + b"\xff")
        for i in range(count):
            file.write(packed[i % len(packed)])
            crc, length = zlib.crc32(records[i % len(packed)], crc), length + len(records[i % len(packed)])
        file.write(compressor.flush() + struct.pack("<II", crc, length & 0xFFFFFFFF))


def png(values: np.ndarray) -> bytes:
    data = io.BytesIO()
    Image.fromarray(values).save(data, "PNG")
    return data.getvalue()


def write_clevrtex(folder: Path, count: int) -> None:
    """Write the unpacked folder, all images in its first part."""
    rng = np.random.default_rng(1)
    part = folder / "clevrtex_full" / "0"
    part.mkdir(parents=True)
    for i in range(count):
        image, labels = scene(rng, 240, 320, noise=4)
        (part / f"CLEVRTEX_full_{i:06d}.png").write_bytes(png(image))
        (part / f"CLEVRTEX_full_{i:06d}_flat.png").write_bytes(png(labels))


def write_movi(folder: Path, counts: dict[str, int]) -> None:
    """Write the TFDS folder, one file for each split."""
    rng = np.random.default_rng(2)
    folder.mkdir()
    (folder / "features.json").write_text("{}")
    for split, count in counts.items():
        with (folder / f"movi_a-{split}.tfrecord-00000-of-00001").open("wb") as file:
            for _ in range(count):
                frames = [scene(rng, 256, 256, noise=1) for _ in range(FRAMES)]
                lists = (b"".join(field(1, png(x)) for x in part) for part in zip(*frames, strict=True))
                file.write(record({name: (1, data) for name, data in zip(MOVI, lists, strict=True)}))


# --------------------------------------------------------------------------------------------------------------- times


def measure_rates(functions: dict[str, Callable[[], int]], repeats: int) -> dict[str, list[float]]:
    """Return the rate of each function by repeat. They take turns; the first turn is a warm-up."""
    rates: dict[str, list[float]] = {name: [] for name in functions}
    for turn in range(repeats + 1):
        for name, function in functions.items():
            start = time.perf_counter()
            count = function()
            if turn:
                rates[name].append(count / (time.perf_counter() - start))
    return rates


def our_clevr(path: Path) -> Iterator[list[np.ndarray]]:
    for data in read_records(path):
        example = parse_example(data)
        arrays = [np.ascontiguousarray(example[name].single_bytes()) for name in ("image", "mask")]
        yield [*arrays, example["visibility"].floats()]


def their_clevr(path: Path) -> Iterator[list[np.ndarray]]:
    for example in tfrecord_loader(str(path), None, CLEVR, compression_type="gzip"):
        yield [example["image"].view(np.uint8), example["mask"].view(np.uint8), example["visibility"]]


def our_movi(path: Path) -> Iterator[list[list[bytes]]]:
    for data in read_records(path):
        example = parse_example(data)
        yield [example[name].strings() for name in MOVI]


def their_movi(path: Path) -> Iterator[list[list[bytes]]]:
    for example in tfrecord_loader(str(path), None, MOVI):
        yield [example[name].tolist() for name in MOVI]


def reading(what: str, path: Path, ours: Callable[[Path], Iterator[Any]], theirs: Any, repeats: int) -> list[Row]:
    for mine, yours in zip(ours(path), theirs(path), strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(mine, yours, strict=True)), "the two readers differ"

    def counted(reader: Callable[[Path], Iterator[Any]]) -> Callable[[], int]:
        return lambda: sum(1 for _ in reader(path))

    rates = measure_rates({"cutslots": counted(ours), "tfrecord": counted(theirs)}, repeats)
    ratios = [a / b for a, b in zip(*rates.values(), strict=True)]
    notes = {"cutslots": f"{statistics.median(ratios):.1f} times tfrecord ({min(ratios):.1f} to {max(ratios):.1f})"}
    return [Row(f"read {what}, {name}", "records", rates[name], notes.get(name, "")) for name in rates]


def preparing(dataset: str, source: Path, out: Path, images: int, repeats: int) -> Row:
    """Prepare into out/0, out/1, ..."""
    index = itertools.count()

    def run() -> int:
        prepare(dataset, source, out / str(next(index)), quiet=True)
        return images

    return Row(f"prepare {dataset}", "images", measure_rates({dataset: run}, repeats)[dataset])


def loading(cache: Path, repeats: int) -> list[Row]:
    data, rng = open_dataset(f"clevr:{cache}", "test"), np.random.default_rng(0)

    def get_batches() -> int:
        for _ in range(NUM_BATCHES):
            data.get_batch(rng.integers(0, len(data), BATCH_SIZE))
        return BATCH_SIZE * NUM_BATCHES

    fabric = make_fabric("cpu")
    config = dataclasses.replace(PRESETS["clevr"], batch_size=BATCH_SIZE)

    def load_batches() -> int:
        loader = TrainLoader(load_to_memory(data, fabric.device), config, fabric, 0)
        with loader:
            for _ in range(NUM_BATCHES):
                next(loader)
        return BATCH_SIZE * NUM_BATCHES

    rates = measure_rates({"Prepared.get_batch": get_batches, "TrainLoader": load_batches}, repeats)
    return [
        Row(f"load, {name}", "images", each, f"{statistics.median(each) / TARGET:.1f} times the target of {TARGET:,}")
        for name, each in rates.items()
    ]


def table(rows: list[Row]) -> Table:
    result = Table("what", "unit", box=box.MARKDOWN)
    for head in ("per second", "range", "s for 1,000"):
        result.add_column(head, justify="right")
    result.add_column("note")
    for row in rows:
        rate, low, high = (f(row.rates) for f in (statistics.median, min, max))
        digits = 1 if rate < 1000 else 0
        interval = f"{low:,.{digits}f} to {high:,.{digits}f}"
        result.add_row(row.what, row.unit, f"{rate:,.{digits}f}", interval, f"{1000 / rate:.3g}", row.note)
    return result


def measure(folder: Path, scenes: int, repeats: int) -> list[Row]:
    few, clevr, clevrtex, movi = (folder / name for name in ("few.tfrecords", "clevr.tfrecords", "clevrtex", "movi"))
    write_clevr(few, 16)
    write_clevr(clevr, scenes)
    write_clevrtex(clevrtex, 200)
    write_movi(movi, {"train": 8, "validation": 2})
    rows = reading("CLEVR, gzip", few, our_clevr, their_clevr, repeats)
    rows += reading(
        "MOVi-A, uncompressed", movi / "movi_a-train.tfrecord-00000-of-00001", our_movi, their_movi, repeats
    )
    out = folder / "prepared"
    rows.append(preparing("clevr", clevr, out / "clevr", scenes, repeats))
    rows.append(preparing("clevrtex", clevrtex, out / "clevrtex", 200, repeats))
    rows.append(preparing("movi-a", movi, out / "movi", 10 * FRAMES, repeats))
    return rows + loading(out / "clevr" / "0", repeats)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--scenes", type=int, default=1000, help="scenes of CLEVR to prepare")
    args = parser.parse_args()
    before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(Path(folder), args.scenes, args.repeats)
    load = f"load {before:.1f} before and {os.getloadavg()[0]:.1f} after"
    versions = f"torch {torch.__version__}, Python {platform.python_version()}"
    print(f"{os.cpu_count()} CPU cores, {load}, {versions}, {args.repeats} repeats")
    Console(width=140).print(table(rows))


if __name__ == "__main__":
    main()
