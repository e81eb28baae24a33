"""COCO, PASCAL VOC, DAVIS and YouTube-VIS: every pixel of a cache equals a recomputation from the files."""

import json
import pickle

import numpy as np
import pytest
import torch
from PIL import Image
from pycocotools.coco import COCO
from torch.nn.functional import interpolate

from cutslots.data.memory import InMemory, load_to_memory
from cutslots.data.open import open_dataset
from cutslots.data.prepare import prepare
from cutslots.dataset import masks_to_show
from tests.data.prepare_helpers import read
from tests.data.small_photographs import write_coco, write_davis, write_voc, write_ytvis

COUNTS = {"train": 3, "val": 5}


def center(array, size):
    """torchvision's center_crop of (..., H, W): the offset is half the difference, rounded to even."""
    top, left = (round((side - size) / 2) for side in array.shape[-2:])
    return array[..., top : top + size, left : left + size]


def shorter_side(width, height, size):
    """torchvision's Resize(size): (height, width)."""
    short, long = min(width, height), max(width, height)
    longer = int(size * long / short)
    return (size, longer) if width >= height else (longer, size)


def as_tensor(image):
    return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)[None].float() / 255


def bicubic(image, shape):
    """(1, 3, H, W) in [0, 1] as uint8 levels."""
    resized = interpolate(image, shape, mode="bicubic").clamp(0, 1) * 255
    return resized[0].numpy()


def nearest_exact(labels, shape):
    return interpolate(torch.from_numpy(labels)[None, None].float(), shape, mode="nearest-exact")[0, 0].numpy()


def pillow_nearest(labels, shape):
    return np.asarray(Image.fromarray(labels).resize(shape[::-1], Image.Resampling.NEAREST))


def expected_image(path, protocol, size=224):
    image = Image.open(path).convert("RGB")
    shape = shorter_side(*image.size, size)
    if protocol == "spot":
        return center(np.asarray(image.resize(shape[::-1], Image.Resampling.BILINEAR)).transpose(2, 0, 1), size)
    return center(bicubic(as_tensor(image), shape), size)


def expected_mask(labels, protocol, size=320):
    shape = shorter_side(labels.shape[1], labels.shape[0], size)
    return center((pillow_nearest if protocol == "spot" else nearest_exact)(labels, shape), size)


def assert_image(got, wanted):
    """Pixels are those of Pillow, or the nearest levels of PyTorch's."""
    assert got.shape == wanted.shape
    assert np.array_equal(got, wanted) if wanted.dtype == np.uint8 else np.abs(got - wanted).max() <= 0.501


# ---------------------------------------------------------------------------------------------------------------- COCO


def coco_labels(coco, image, protocol):
    """Return the objects and the classes of every pixel by the rules of the two papers' code."""
    annotations = [a for a in coco.loadAnns(coco.getAnnIds(image["id"])) if protocol == "spot" or not a["iscrowd"]]
    masks = [coco.annToMask(a) for a in annotations]
    objects, classes = np.zeros((2, image["height"], image["width"]), dtype=np.uint8)
    for y, x in np.ndindex(objects.shape):
        here = [i for i, mask in enumerate(masks) if mask[y, x]]
        categories = [annotations[i]["category_id"] for i in here]
        if len(here) == 1:
            objects[y, x], classes[y, x] = here[0] + 1, categories[0]
        elif here:
            objects[y, x], classes[y, x] = 255, 255 if protocol == "spot" else max(categories)
    return objects, classes


@pytest.mark.parametrize("protocol", ["dinosaur", "spot"])
def test_coco(tmp_path, protocol):
    source = write_coco(tmp_path / "source", COUNTS, nested=protocol == "spot")
    assert prepare("coco", source, tmp_path / "out", protocol=protocol, quiet=True)
    images, masks, classes, objects = (
        np.load(tmp_path / "out" / f"{n}.npy") for n in ("images", "masks", "classes", "objects")
    )
    assert images.shape == (8, 1, 3, 224, 224) and masks.shape == classes.shape == (8, 1, 320, 320)
    row, overlaps = 0, 0
    for split in COUNTS:
        coco = COCO(source / "annotations" / f"instances_{split}2017.json")
        folder = source / ("images" if protocol == "spot" else "") / f"{split}2017"
        for image in coco.dataset["images"]:
            labels = coco_labels(coco, image, protocol)
            assert_image(images[row, 0], expected_image(folder / image["file_name"], protocol))
            assert np.array_equal(masks[row, 0], expected_mask(labels[0], protocol))
            assert np.array_equal(classes[row, 0], expected_mask(labels[1], protocol))
            assert objects[row] == len(set(np.unique(labels[0])) - {0, 255})
            overlaps += (labels[0] == 255).any()
            row += 1
    assert overlaps >= 3
    assert read(tmp_path / "out")["splits"] == {"train": [0, 3], "val": [3, 8], "test": [3, 8]}


def test_coco_as_a_dataset(tmp_path):
    source = write_coco(tmp_path / "source", {"val": 4})
    prepare("coco", source, tmp_path / "out", 64, quiet=True)
    data = open_dataset(f"coco:{tmp_path / 'out'}", "val")
    assert data.has_classes and data.ignore_label == 255 and data.image_size == (64, 64) and len(data) == 4
    sample, classes = data.get_batch([2, 0]), data.get_classes([2, 0])
    assert sample.image.shape == (2, 3, 64, 64) and sample.mask.shape == classes.shape == (2, 320, 320)
    assert torch.equal(classes[0], torch.from_numpy(np.load(tmp_path / "out" / "classes.npy")[2, 0]))
    again = pickle.loads(pickle.dumps(data))
    assert torch.equal(again.get_classes([2, 0]), classes) and len(pickle.dumps(data)) < 10_000, "arrays are not copied"
    shown = masks_to_show(sample, data.ignore_label)
    assert shown.mask.shape == (2, 64, 64) and not (shown.mask == 255).any()
    assert torch.equal(shown.mask[0], torch.where(sample.mask[0, 2::5, 2::5] == 255, 0, sample.mask[0, 2::5, 2::5]))
    with pytest.raises(ValueError, match="has no rows for train"):
        open_dataset(f"coco:{tmp_path / 'out'}", "train")


def test_classes_and_ignored_pixels_in_memory(tmp_path, monkeypatch):
    prepare("coco", write_coco(tmp_path / "source", {"val": 3}), tmp_path / "out", 16, quiet=True)
    data = open_dataset(f"coco:{tmp_path / 'out'}", "val")
    monkeypatch.setattr(type(data), "memory_mapped", False)  # as on CUDA: it is copied
    held = load_to_memory(data, quiet=True)
    assert isinstance(held, InMemory) and held.ignore_label == 255 and held.has_classes
    assert torch.equal(held.get_classes([2, 1]), data.get_classes([2, 1]))
    assert torch.equal(held.get_batch([2, 1]).mask, data.get_batch([2, 1]).mask)
    alone = InMemory(*held.get_batch([0]))
    with pytest.raises(ValueError, match=r"^InMemory has no classes"):
        alone.get_classes([0])


def test_datasets_without_classes_say_so(tmp_path):
    data = open_dataset("plain", "val", 16, 1)
    assert not data.has_classes and data.ignore_label is None
    with pytest.raises(ValueError, match=r"^Scenes has no classes; expected a dataset with has_classes$"):
        data.get_classes([0])


# ----------------------------------------------------------------------------------------------------------------- VOC


@pytest.mark.parametrize("protocol", ["dinosaur", "spot"])
@pytest.mark.parametrize("augmented", [True, False])
def test_voc(tmp_path, protocol, augmented):
    lists = {"train": ["2007_01", "2007_02"], "val": ["2008_03", "2008_04"]}
    lists |= {"trainaug": ["2007_02", "2011_05"]} if augmented else {}
    source = write_voc(tmp_path / "source", lists, unlabelled=("2011_05",))
    assert prepare("voc", source, tmp_path / "out", protocol=protocol, quiet=True)
    arrays = [np.load(tmp_path / "out" / f"{n}.npy") for n in ("images", "masks", "classes", "objects")]
    folder = source / "VOCdevkit" / "VOC2012"
    names = lists["trainaug" if augmented else "train"] + lists["val"]
    assert len(arrays[0]) == len(names) == 4
    for name, image, mask, classes, objects in zip(names, *arrays, strict=True):
        assert_image(image[0], expected_image(folder / "JPEGImages" / f"{name}.jpg", protocol))
        if name == "2011_05":
            assert (mask == 255).all() and (classes == 255).all() and objects == 0
            continue
        for kind, got in (("SegmentationObject", mask), ("SegmentationClass", classes)):
            labels = np.array(Image.open(folder / kind / f"{name}.png"))
            assert (labels == 255).any()
            if protocol == "spot":
                labels[labels == 255] = 0
            assert np.array_equal(got[0], expected_mask(labels, protocol))
        assert objects == len(set(np.unique(Image.open(folder / "SegmentationObject" / f"{name}.png"))) - {0, 255})


# --------------------------------------------------------------------------------------------------------------- videos


def central_square(array):
    return center(array, min(array.shape[-2:]))


@pytest.mark.parametrize("annotations", ["Annotations", "Annotations_unsupervised"])
def test_davis(tmp_path, annotations):
    source = write_davis(tmp_path / "source", {"train": {"bear": 25}, "val": {"cows": 49, "dog": 23}}, annotations)
    assert prepare("davis", source, tmp_path / "out", 20, quiet=True)
    images, masks = (np.load(tmp_path / "out" / f"{n}.npy") for n in ("images", "masks"))
    clips = [("bear", 0), ("cows", 0), ("cows", 24)]
    assert images.shape == (3, 24, 3, 20, 20) and masks.shape == (3, 24, 20, 20)
    for (name, start), clip, labels in zip(clips, images, masks, strict=True):
        for t in range(24):
            stem = f"480p/{name}/{start + t:05d}"
            image = as_tensor(Image.open(source / "DAVIS" / "JPEGImages" / f"{stem}.jpg"))
            assert_image(clip[t], bicubic(central_square(image), (20, 20)))
            mask = np.array(Image.open(source / "DAVIS" / annotations / f"{stem}.png"))
            assert np.array_equal(labels[t], nearest_exact(central_square(mask), (20, 20)))
    data = open_dataset(f"davis:{tmp_path / 'out'}", "test", videos=True)
    assert data.frames == 24 and len(data) == 2 and data.ignore_label == 255 and not data.has_classes
    frames = open_dataset(f"davis:{tmp_path / 'out'}", "test")
    assert frames.ignore_label == 255 and len(frames) == 48


def test_ytvis(tmp_path, monkeypatch):
    monkeypatch.setattr("cutslots.data.ytvis.NUM_VAL", 2)
    lengths = [13, 5, 6, 7]
    source = write_ytvis(tmp_path / "source", lengths)
    assert prepare("ytvis", source, tmp_path / "out", 24, quiet=True)
    images, masks = (np.load(tmp_path / "out" / f"{n}.npy") for n in ("images", "masks"))
    content = json.loads((source / "train" / "instances.json").read_text())
    clips = [(0, 0), (0, 6), (2, 0), (3, 0)]
    assert len(images) == len(masks) == len(clips)
    for (v, start), clip, labels in zip(clips, images, masks, strict=True):
        video = content["videos"][v]
        tracks = [a for a in content["annotations"] if a["video_id"] == video["id"] and not a["iscrowd"]]
        for t in range(6):
            image = as_tensor(Image.open(source / "train" / "JPEGImages" / video["file_names"][start + t]))
            scaled = shorter_side(video["width"], video["height"], 320)
            image = interpolate(image, scaled, mode="nearest-exact")
            assert_image(clip[t], bicubic(central_square(image), (24, 24)))
            truth = ytvis_labels(tracks, start + t, video["height"], video["width"])
            truth = nearest_exact(central_square(nearest_exact(truth, scaled)), (24, 24))
            assert np.array_equal(labels[t], truth)
    assert read(tmp_path / "out")["splits"] == {"train": [0, 2], "val": [2, 4], "test": [2, 4]}


def ytvis_labels(tracks, frame, height, width):
    covering = [[[] for _ in range(width)] for _ in range(height)]
    for label, track in enumerate(tracks, 1):
        at = 0
        for n, run in enumerate((track["segmentations"][frame] or {"counts": []})["counts"]):
            for pixel in range(at, at + run) if n % 2 else ():
                covering[pixel % height][pixel // height].append(label)
            at += run
    return np.array([[0 if not c else c[0] if len(c) == 1 else 255 for c in row] for row in covering], dtype=np.uint8)
