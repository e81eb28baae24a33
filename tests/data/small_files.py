"""Small datasets in the published formats, written without the code under test.

TFRecords come from the `tfrecord` package and protobuf, images from Pillow, archives from the standard library. A scene
is an image of noise with labels; tests compute the expected cache from these arrays.
"""

from __future__ import annotations

import functools
import gzip
import io
import json
import os
import tarfile
import zipfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image
from tfrecord.writer import TFRecordWriter

WIDTH, HEIGHT, MAX_OBJECTS, FRAMES = 320, 240, 10, 24
BYTES = np.array([bytes([value]) for value in range(256)], dtype=object)
PALETTE = np.random.default_rng(5).integers(0, 256, (256, 3), dtype=np.uint8)


class Scene(NamedTuple):
    image: np.ndarray  # ([24,] H, W, 3)
    labels: np.ndarray  # ([24,] H, W), 0 the background
    objects: int


@functools.cache
def scene(seed: int, objects: int, width: int = WIDTH, height: int = HEIGHT) -> Scene:
    """Return noise, so that all pixels differ, with a visible rectangle for each object."""
    rng = np.random.default_rng([seed, objects])
    image = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
    labels = np.zeros((height, width), dtype=np.uint8)
    for label in range(1, objects + 1):
        y, x = rng.integers(0, height - 2), rng.integers(0, width - 2)
        labels[y : y + height // 3, x : x + width // 3] = label
    for label in range(1, objects + 1):  # a pixel of each that no other object covers, outside the crop
        labels[0, label] = label
    return Scene(image, labels, objects)


@functools.cache
def video(seed: int, objects: int, side: int) -> Scene:
    frames = [scene(1000 * seed + frame, objects, side, side) for frame in range(FRAMES)]
    return Scene(np.stack([f.image for f in frames]), np.stack([f.labels for f in frames]), objects)


# ----------------------------------------------------------------------------------------------------------- TFRecords


def framed(features: dict[str, tuple[object, str]]) -> bytes:
    """Return an Example as a record of a TFRecord file, with its length and checksums."""
    writer = TFRecordWriter(os.devnull)
    writer.close()
    writer.file = io.BytesIO()
    writer.write(features)
    return writer.file.getvalue()


def frame(content: bytes) -> bytes:
    """Return any content as a record, with its length and checksums."""
    length = len(content).to_bytes(8, "little")
    return length + TFRecordWriter.masked_crc(length) + content + TFRecordWriter.masked_crc(content)


def write_records(path: Path, records: list[bytes], compressed: bool = False) -> Path:
    data = b"".join(records)
    path.write_bytes(gzip.compress(data, 1, mtime=1) if compressed else data)
    return path


def boundaries(records: list[bytes]) -> list[int]:
    """Return the offsets at which records begin and end in an uncompressed file."""
    return [0, *np.cumsum([len(record) for record in records]).tolist()]


def single_bytes(values: np.ndarray) -> tuple[object, str]:
    """Return each byte as a string, as CLEVR stores them."""
    return BYTES[values.ravel()].tolist(), "byte"


@functools.cache
def clevr_record(seed: int, objects: int) -> bytes:
    return framed(clevr_features(seed, objects))


def clevr_features(seed: int, objects: int) -> dict[str, tuple[object, str]]:
    made, rng = scene(seed, objects), np.random.default_rng(seed)
    layers = np.uint8(255) * (made.labels == np.arange(MAX_OBJECTS + 1)[:, None, None])
    features: dict[str, tuple[object, str]] = {
        "image": single_bytes(made.image),
        "mask": single_bytes(layers),
        "visibility": ([1.0] * (objects + 1) + [0.0] * (MAX_OBJECTS - objects), "float"),  # the first is the background
        "pixel_coords": (rng.random(33).tolist(), "float"),
    }
    features |= {name: (rng.random(11).tolist(), "float") for name in ("x", "y", "z", "rotation")}
    return features | {name: single_bytes(rng.integers(0, 9, 11)) for name in ("size", "material", "shape", "color")}


def write_clevr(folder: Path, objects: list[int], compressed: bool = True) -> Path:
    """Write clevr_with_masks_train.tfrecords with a scene for each number of objects."""
    folder.mkdir(parents=True, exist_ok=True)
    records = [clevr_record(i, n) for i, n in enumerate(objects)]
    return write_records(folder / "clevr_with_masks_train.tfrecords", records, compressed)


def movi_features(seed: int, objects: int, side: int) -> dict[str, tuple[object, str]]:
    made = video(seed, objects, side)
    return {
        "video": ([png(Image.fromarray(image)) for image in made.image], "byte"),
        "segmentations": ([png(Image.fromarray(labels)) for labels in made.labels], "byte"),
        "metadata/video_name": ([str(seed).encode()], "byte"),
        "metadata/num_instances": ([objects], "int"),
        "metadata/width": ([side], "int"),
        "instances/mass": ([0.5] * objects, "float"),
        "instances/shape_label": (list(range(objects)), "int"),
    }


@functools.cache
def movi_record(seed: int, objects: int, side: int) -> bytes:
    return framed(movi_features(seed, objects, side))


def write_movi(folder: Path, shards: dict[str, list[int]], side: int, variant: str = "a") -> Path:
    """Write the TFDS folder with so many videos in each shard of each split; video i has 3 + i objects."""
    folder.mkdir(parents=True)
    first = 0
    for split, lengths in shards.items():
        for i, length in enumerate(lengths):
            path = folder / f"movi_{variant}-{split}.tfrecord-{i:05d}-of-{len(lengths):05d}"
            write_records(path, [movi_record(n, 3 + n, side) for n in range(first, first + length)])
            first += length
    features = {"type": "tensorflow_datasets.core.features.features_dict.FeaturesDict", "content": {"video": {}}}
    (folder / "features.json").write_text(json.dumps(features))
    splits = [{"name": n, "numBytes": "1", "shardLengths": [str(x) for x in l]} for n, l in shards.items()]
    (folder / "dataset_info.json").write_text(json.dumps({"name": "movi_a", "splits": splits, "version": "1.0.0"}))
    return folder


# ------------------------------------------------------------------------------------------------------------ CLEVRTEX


def png(image: Image.Image, **options: object) -> bytes:
    data = io.BytesIO()
    image.save(data, "PNG", compress_level=1, **options)
    return data.getvalue()


def palette_png(labels: np.ndarray, colors: int = 256) -> bytes:
    """Encode as a palette PNG; with few colors Pillow stores two pixels in a byte."""
    image = Image.fromarray(labels).convert("P")
    image.putpalette(PALETTE[:colors].tobytes())
    return png(image)


def image_png(image: np.ndarray, alpha: bool) -> bytes:
    if not alpha:
        return png(Image.fromarray(image))
    transparency = np.random.default_rng(1).integers(0, 256, (*image.shape[:2], 1), dtype=np.uint8)
    return png(Image.fromarray(np.concatenate([image, transparency], -1)))


@functools.cache
def clevrtex_files(variant: str, objects: tuple[int, ...], alpha: bool = False, folder_of: int = 1000) -> dict:
    """Return the content of every file by its path, a scene for each number of objects."""
    files = {}
    for i, n in enumerate(objects):
        stem = f"clevrtex_{variant}/{i // folder_of}/CLEVRTEX_{variant}_{i:06d}"
        made = scene(i, n)
        files[f"{stem}.png"] = image_png(made.image, alpha)
        files[f"{stem}_flat.png"] = palette_png(made.labels, 16 if i % 2 else 256)
        files[f"{stem}.json"] = b"{}"
    return files


def write_files(root: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    return root


def write_tar(path: Path, files: dict[str, bytes]) -> Path:
    mode = "w:gz" if path.name.endswith((".gz", ".tgz")) else "w:"
    with tarfile.open(path, mode) as archive:
        folder = tarfile.TarInfo("clevrtex_full")
        folder.type = tarfile.DIRTYPE
        archive.addfile(folder)
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def write_zip(path: Path, files: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in {"clevrtex_full/": b"", **files}.items():
            archive.writestr(
                zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED, 1
            )  # no date: the bytes are reproducible
    return path
