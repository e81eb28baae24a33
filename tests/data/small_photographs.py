"""Small COCO, VOC, DAVIS and YouTube-VIS folders in the published formats, written by Pillow, json and pycocotools."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from PIL import Image
from pycocotools import mask as coco_mask

from tests.data.small_files import PALETTE

SIZES = [(50, 40), (33, 61), (48, 48), (41, 30)]  # width, height
CATEGORIES = [3, 90, 17]


def photo(seed: int, width: int, height: int) -> Image.Image:
    """Return smooth noise, which JPEG keeps."""
    rng = np.random.default_rng(seed)
    small = Image.fromarray(rng.integers(0, 256, (6, 6, 3), dtype=np.uint8))
    return small.resize((width, height), Image.Resampling.BICUBIC)


def write_photo(path: Path, seed: int, width: int, height: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    photo(seed, width, height).save(path, "JPEG", quality=95)


def box_mask(rng: np.random.Generator, width: int, height: int) -> np.ndarray:
    mask = np.zeros((height, width), dtype=np.uint8)
    y, x = rng.integers(0, height - 8), rng.integers(0, width - 8)
    mask[y : y + rng.integers(6, height // 2), x : x + rng.integers(6, width // 2)] = 1
    return mask


def uncompressed(mask: np.ndarray) -> dict:
    """Return run lengths, column by column, beginning with the background."""
    runs, last, count = [], 0, 0
    for value in mask.ravel(order="F").tolist():
        if value != last:
            runs, last, count = [*runs, count], value, 0
        count += 1
    return {"counts": [*runs, count], "size": list(mask.shape)}


def compressed(mask: np.ndarray) -> dict:
    encoded = coco_mask.encode(np.asfortranarray(mask))
    return {"counts": encoded["counts"].decode(), "size": list(encoded["size"])}


# ---------------------------------------------------------------------------------------------------------------- COCO


def write_coco(root: Path, splits: dict[str, int], seed: int = 0, nested: bool = False) -> Path:
    """Write so many images of each split, each with polygons, run lengths and a crowd; the last one without objects."""
    for s, (split, count) in enumerate(splits.items()):
        images, annotations = [], []
        for i in range(count):
            width, height = SIZES[i % len(SIZES)]
            number, name = 1000 * s + 7 * (count - i), f"{1000 * s + i:012d}.jpg"  # ids are not in order
            folder = root / ("images" if nested else "") / f"{split}2017"
            write_photo(folder / name, seed + 100 * s + i, width, height)
            images.append({"id": number, "file_name": name, "height": height, "width": width, "license": 3})
            if i < count - 1:
                annotations += _annotations(seed + 10 * i + s, number, width, height, len(annotations))
        np.random.default_rng(1).shuffle(annotations)  # those of one image are not together
        categories = [{"id": c, "name": f"käse {c}", "supercategory": "x"} for c in CATEGORIES]
        content = {"info": {"year": 2017}, "licenses": [], "categories": categories}
        content |= {"images": images, "annotations": annotations}
        (root / "annotations").mkdir(parents=True, exist_ok=True)
        text = json.dumps(content, ensure_ascii=False, indent=1 if s else None)
        (root / "annotations" / f"instances_{split}2017.json").write_text(text, encoding="utf-8")
    return root


def _annotations(seed: int, image: int, width: int, height: int, first: int) -> list[dict]:
    rng = np.random.default_rng(seed)
    polygon = lambda: (rng.random((5, 2)) * [width, height]).round(2).ravel().tolist()
    segmentations = [
        ([polygon(), polygon()], 0),
        (uncompressed(box_mask(rng, width, height)), 1),
        (compressed(box_mask(rng, width, height)), 0),
        ([polygon()], 0),
    ]
    return [
        {"id": first + n, "image_id": image, "category_id": CATEGORIES[n % 3], "segmentation": s, "iscrowd": crowd}
        for n, (s, crowd) in enumerate(segmentations)
    ]


# ----------------------------------------------------------------------------------------------------------------- VOC


def write_voc(root: Path, lists: dict[str, list[str]], unlabelled: tuple[str, ...] = ()) -> Path:
    """Write VOCdevkit/VOC2012 with the lists of names; images that are not in `unlabelled` have masks."""
    folder = root / "VOCdevkit" / "VOC2012"
    (folder / "ImageSets" / "Segmentation").mkdir(parents=True)
    for name, names in lists.items():
        (folder / "ImageSets" / "Segmentation" / f"{name}.txt").write_text("".join(f"{n}\n" for n in names))
    for i, name in enumerate(dict.fromkeys(n for names in lists.values() for n in names)):
        width, height = SIZES[i % len(SIZES)]
        write_photo(folder / "JPEGImages" / f"{name}.jpg", i, width, height)
        objects, classes = voc_labels(i, width, height)
        for kind, labels in (("SegmentationObject", objects), ("SegmentationClass", classes)):
            (folder / kind).mkdir(exist_ok=True)
            if name not in unlabelled:
                save_labels(folder / kind / f"{name}.png", labels)
    return root


def voc_labels(seed: int, width: int, height: int) -> np.ndarray:
    """Return objects and classes (2, H, W), with a void border between objects."""
    rng = np.random.default_rng(seed)
    labels = np.zeros((2, height, width), dtype=np.uint8)
    for label in range(1, 4):
        mask = box_mask(rng, width, height) > 0
        labels[:, mask] = np.array([[label], [5 * label]], dtype=np.uint8)
    labels[:, rng.random((height, width)) < 0.1] = 255
    return labels


def save_labels(path: Path, labels: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.fromarray(labels).convert("P")
    image.putpalette(PALETTE.tobytes())
    image.save(path)


# --------------------------------------------------------------------------------------------------------------- videos


def write_davis(root: Path, splits: dict[str, dict[str, int]], annotations: str = "Annotations") -> Path:
    """Write DAVIS with videos of so many frames in each split."""
    folder, seed = root / "DAVIS", 0
    (folder / "ImageSets" / "2017").mkdir(parents=True)
    for split, videos in splits.items():
        (folder / "ImageSets" / "2017" / f"{split}.txt").write_text("\n".join(videos))
        for name, frames in videos.items():
            for t in range(frames):
                seed += 1
                write_photo(folder / "JPEGImages" / "480p" / name / f"{t:05d}.jpg", seed, 50, 30)
                labels = voc_labels(seed, 50, 30)[0]
                save_labels(folder / annotations / "480p" / name / f"{t:05d}.png", labels)
    return root


def write_ytvis(root: Path, lengths: list[int]) -> Path:
    """Write train/ with videos of so many frames; the object of odd videos is hidden in their second frame."""
    videos, annotations = [], []
    for v, length in enumerate(lengths):
        width, height = SIZES[v % len(SIZES)]
        names = [f"{v:010x}/{5 * t:05d}.jpg" for t in range(length)]
        for t, name in enumerate(names):
            write_photo(root / "train" / "JPEGImages" / name, 50 * v + t, width, height)
        videos.append({"id": v + 1, "file_names": names, "height": height, "width": width, "length": length})
        for n, crowd in enumerate((0, 0, 1)):
            rng = np.random.default_rng([v, n])
            runs = [uncompressed(box_mask(rng, width, height)) for _ in range(length)]
            runs = [None if v % 2 and n == 0 and t == 1 else each for t, each in enumerate(runs)]
            row = {"id": len(annotations) + 1, "video_id": v + 1, "category_id": 1 + n, "iscrowd": crowd}
            annotations.append(row | {"segmentations": runs, "length": length})
    content = {"info": {}, "videos": videos, "categories": [], "annotations": annotations}
    (root / "train" / "instances.json").write_text(json.dumps(content))
    return root
