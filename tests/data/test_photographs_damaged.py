"""Damaged COCO, VOC, DAVIS and YouTube-VIS folders: one sentence each. Large annotation files: bounded memory."""

import json
import re
import shutil
import sys
import tracemalloc

import numpy as np
import pytest
from PIL import Image
from pycocotools import mask as coco_mask

from cutslots.data.annotations import CHUNK, AnnotationFile, decode_segmentation, read_elements
from cutslots.data.prepare import prepare
from tests.data.prepare_helpers import assert_refused, emptied, halved, only_arrays
from tests.data.small_photographs import compressed, uncompressed, write_coco, write_davis, write_voc, write_ytvis

WRITE = {
    "coco": lambda root: write_coco(root, {"val": 3}),
    "voc": lambda root: write_voc(root, {"train": ["a"], "val": ["b", "c"]}),
    "davis": lambda root: write_davis(root, {"train": {"bear": 24}, "val": {"cows": 24}}),
    "ytvis": lambda root: write_ytvis(root, [6, 7]),
}
COCO_FILE, YTVIS_FILE = "annotations/instances_val2017.json", "train/instances.json"
VOC, FRAME = "VOCdevkit/VOC2012", "train/JPEGImages/0000000001/00005.jpg"


def change(name, edit):
    """Return a function that edits the content of a JSON file."""

    def go(root):
        content = json.loads((root / name).read_text())
        edit(content)
        (root / name).write_text(json.dumps(content))

    return go


def in_annotation(name, number=0, file=COCO_FILE):
    """Return a function that sets a field of an annotation."""
    return lambda value: change(
        file, lambda content: content["annotations"][number].update({name: value, "iscrowd": 0})
    )


def resized(name):
    return lambda root: Image.open(root / name).resize((9, 9)).save(root / name)


def on(name, damage):
    return lambda root: damage(root / name)


unlinked = lambda path: path.unlink()
segmentation = in_annotation("segmentation")
image = lambda **fields: change(COCO_FILE, lambda content: content["images"][1].update(fields))

CASES = [
    (
        "coco",
        "no annotations",
        on("annotations", shutil.rmtree),
        r"source holds no annotations/instances_val2017.json; e",
    ),
    (
        "coco",
        "no images",
        on("val2017", shutil.rmtree),
        r"source holds no folder val2017/ or images/val2017/; expected",
    ),
    (
        "coco",
        "an image too few",
        on("val2017/000000000001.jpg", unlinked),
        r"val2017 holds no '000000000001.jpg', which",
    ),
    (
        "coco",
        "half an image",
        on("val2017/000000000001.jpg", halved),
        r"000000000001.jpg: .*000000000001.jpg: it cannot b",
    ),
    (
        "coco",
        "an empty image",
        on("val2017/000000000001.jpg", emptied),
        r"000000000001.jpg: it cannot be read as an imag",
    ),
    ("coco", "another size", resized("val2017/000000000001.jpg"), r"it is 9x9; expected 33x61$"),
    (
        "coco",
        "half of the JSON",
        on(COCO_FILE, halved),
        r"instances_val2017.json cannot be read as JSON: it ends early or",
    ),
    ("coco", "an empty JSON", on(COCO_FILE, emptied), r"JSON: there is the end of the file at byte 0; expected '{'$"),
    ("coco", "a list", lambda r: (r / COCO_FILE).write_text("[1]"), r"JSON: there is '\[' at byte 0; expected '{'$"),
    (
        "coco",
        "nothing",
        lambda r: (r / COCO_FILE).write_text("{}"),
        r"json has no images; expected an object with images a",
    ),
    (
        "coco",
        "a word",
        lambda r: (r / COCO_FILE).write_text('{"images": [x]}'),
        r"it ends early or is damaged after byte 12$",
    ),
    (
        "coco",
        "no comma",
        lambda r: (r / COCO_FILE).write_text('{"a": [1 2]}'),
        r"there is '2' at byte 9; expected ','$",
    ),
    (
        "coco",
        "no file_name",
        image(file_name=None),
        r"images\[1\] has no valid file_name; expected file_name, height, w",
    ),
    ("coco", "no id", image(id="x"), r"images\[1\] has no valid id; expected file_name, height, width, id$"),
    ("coco", "an id twice", image(id=7), r"two images have the id 7; expected different ones$"),
    ("coco", "a height of 0", image(height=0), r"has the height 0; expected 1 to 65536$"),
    (
        "coco",
        "another folder",
        image(file_name="../x.jpg"),
        r"val2017 holds no '../x.jpg', which instances_val2017.json l",
    ),
    (
        "coco",
        "no image_id",
        in_annotation("image_id", 2)(None),
        r"annotations\[2\] has no valid image_id; expected an int",
    ),
    (
        "coco",
        "unknown image_id",
        in_annotation("image_id", 2)(5),
        r"an annotation has the image_id 5; no images has this",
    ),
    (
        "coco",
        "no category",
        in_annotation("category_id")(0),
        r"its annotation \d+: its category_id is 0; expected 1 to 2",
    ),
    (
        "coco",
        "no segmentation",
        segmentation(None),
        r"its annotation \d+: its segmentation is damaged; expected polygons",
    ),
    ("coco", "no polygons", segmentation([]), r"its segmentation is damaged; expected polygons of at least 3 points"),
    ("coco", "two points", segmentation([[1, 2, 3, 4]]), r"its segmentation is damaged; expected polygons"),
    ("coco", "seven numbers", segmentation([[1, 2, 3, 4, 5, 6, 7]]), r"its segmentation is damaged; expected polygons"),
    ("coco", "a far point", segmentation([[1, 2, 3, 4, 5, 1e9]]), r"its segmentation is damaged; expected polygons"),
    ("coco", "runs of another size", segmentation({"counts": [4], "size": [2, 2]}), r"has the size \[2, 2\]; expected"),
    (
        "voc",
        "no lists",
        on(f"{VOC}/ImageSets", shutil.rmtree),
        r"source holds no VOC2012/ with JPEGImages, Segmentation",
    ),
    (
        "voc",
        "an empty list",
        on(f"{VOC}/ImageSets/Segmentation/val.txt", emptied),
        r"val.txt is empty; expected a name",
    ),
    (
        "voc",
        "no train list",
        on(f"{VOC}/ImageSets/Segmentation/train.txt", unlinked),
        r"^there is no .*train.txt; expected a name in eac",
    ),
    (
        "voc",
        "an image too few",
        on(f"{VOC}/JPEGImages/b.jpg", unlinked),
        r"JPEGImages holds no b.jpg; expected all imag",
    ),
    (
        "voc",
        "a mask too few",
        on(f"{VOC}/SegmentationClass/b.png", unlinked),
        r"SegmentationClass holds no b.png; expect",
    ),
    ("voc", "half a mask", on(f"{VOC}/SegmentationObject/b.png", halved), r"b.jpg: b.png: it cannot be read as a PNG"),
    ("voc", "a mask of another size", resized(f"{VOC}/SegmentationClass/b.png"), r"b.png: it is 9x9; expected 33x61$"),
    ("voc", "half an image", on(f"{VOC}/JPEGImages/b.jpg", halved), r"b.jpg: b.jpg: it cannot be read as an image"),
    (
        "davis",
        "no frames",
        on("DAVIS/JPEGImages", shutil.rmtree),
        r"source holds no JPEGImages/480p/ with Annotations/480",
    ),
    (
        "davis",
        "a video too few",
        on("DAVIS/Annotations/480p/cows", shutil.rmtree),
        r"lacks the frames or the masks of cows",
    ),
    (
        "davis",
        "a mask too few",
        on("DAVIS/Annotations/480p/cows/00003.png", unlinked),
        r"00003.png; expected a mask for e",
    ),
    (
        "davis",
        "half a mask",
        on("DAVIS/Annotations/480p/cows/00003.png", halved),
        r"cows: 00003.png: it cannot be read",
    ),
    (
        "davis",
        "half a frame",
        on("DAVIS/JPEGImages/480p/cows/00003.jpg", halved),
        r"cows: 00003.jpg: it cannot be read",
    ),
    (
        "davis",
        "a path",
        lambda r: (r / "DAVIS/ImageSets/2017/val.txt").write_text("../x"),
        r"val.txt holds '../x'; expect",
    ),
    (
        "ytvis",
        "no annotations",
        on(YTVIS_FILE, unlinked),
        r"source holds no train/ with instances.json and JPEGImages/",
    ),
    (
        "ytvis",
        "a frame too few",
        on(FRAME, unlinked),
        r"JPEGImages holds no '0000000001/00005.jpg', which instances.jso",
    ),
    ("ytvis", "half a frame", on(FRAME, halved), r"00005.jpg: it cannot be read as an image"),
    (
        "ytvis",
        "few segmentations",
        in_annotation("segmentations", 1, YTVIS_FILE)([None]),
        r"its annotation 2 has no segm",
    ),
    (
        "ytvis",
        "damaged runs",
        in_annotation("segmentations", 1, YTVIS_FILE)([{"counts": [5, -1], "size": [40, 50]}] * 6),
        r"its annotation 2, frame 0: its run lengths are damaged; expected integers from 0, or text$",
    ),
    (
        "ytvis",
        "too few pixels",
        in_annotation("segmentations", 1, YTVIS_FILE)([{"counts": [5, 3], "size": [40, 50]}] * 6),
        r"its annotation 2, frame 0: its run lengths add up to 8; expected 2,000 pixels$",
    ),
]


@pytest.mark.parametrize("dataset, case, damage, message", CASES, ids=[f"{c[0]}-{c[1]}" for c in CASES])
def test_one_sentence(tmp_path, dataset, case, damage, message):
    source = tmp_path / "source"
    WRITE[dataset](source)
    damage(source)
    with pytest.raises((ValueError, OSError), match=message) as caught:
        prepare(dataset, source, tmp_path / "out", 16, quiet=True)
    assert "\n" not in str(caught.value)
    assert_refused(dataset, tmp_path / "out")


@pytest.mark.parametrize("dataset", WRITE)
def test_a_repaired_source_resumes(tmp_path, dataset):
    """The second run, on the repaired source, gives the cache of an undamaged one."""
    source = tmp_path / "source"
    WRITE[dataset](source)
    prepare(dataset, source, tmp_path / "clean", 16, quiet=True)
    last = sorted(source.rglob("*.jpg"))[-1] if dataset != "ytvis" else source / FRAME
    content = last.read_bytes()
    last.write_bytes(content[:-500] if len(content) > 600 else b"")
    with pytest.raises(ValueError, match="cannot be read"):
        prepare(dataset, source, tmp_path / "out", 16, quiet=True)
    last.write_bytes(content)
    assert prepare(dataset, source, tmp_path / "out", 16, quiet=True)
    assert not prepare(dataset, source, tmp_path / "out", 16, quiet=True), "it is up to date"
    assert only_arrays(tmp_path / "out") == only_arrays(tmp_path / "clean")
    classes = [tmp_path / name / "classes.npy" for name in ("out", "clean")]
    assert not any(path.exists() for path in classes) or classes[0].read_bytes() == classes[1].read_bytes()


def test_without_pycocotools(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pycocotools", None)
    with pytest.raises(ValueError, match=r"polygons need pycocotools: pip install 'cutslots\[coco\]'$"):
        prepare("coco", WRITE["coco"](tmp_path / "source"), tmp_path / "out", 16, quiet=True)
    assert prepare("ytvis", WRITE["ytvis"](tmp_path / "videos"), tmp_path / "more", 16, quiet=True), "runs do without"


# -------------------------------------------------------------------------------------------------------- segmentations


@pytest.mark.parametrize("seed", range(40))
def test_segmentations_equal_pycocotools(seed):
    rng = np.random.default_rng(seed)
    height, width = rng.integers(1, 60, 2).tolist()
    mask = (rng.random((height, width)) < rng.random()).astype(np.uint8)
    if seed % 4 == 0:
        mask = np.repeat(np.repeat(mask, 20, 0), 20, 1)  # runs of several characters
        height, width = mask.shape
    for runs in (uncompressed(mask), compressed(mask)):
        assert np.array_equal(decode_segmentation(runs, height, width), mask)
    polygons = [(rng.random(2 * rng.integers(3, 9)) * max(height, width) * 1.2 - 2).tolist() for _ in range(2)]
    theirs = coco_mask.decode(coco_mask.frPyObjects(polygons, height, width)).any(2)
    assert np.array_equal(decode_segmentation(polygons, height, width), theirs)


# ---------------------------------------------------------------------------------------------------------- large files


@pytest.mark.parametrize("indent, ascii", [(None, True), (1, False)])
def test_elements_equal_json(tmp_path, monkeypatch, indent, ascii):
    """Whatever the chunks, elements are those of the standard library, and so are the bytes at their offsets."""
    content = {"info": {"a": [1, {"b": None}]}, "x": [1, 23456, -1.5e3, 'é\\"]}', [], {}, True, None], "empty": []}
    content |= {"images": [{"name": "käse ☃", "n": list(range(50))}] * 3, "last": 12}
    text = json.dumps(content, indent=indent, ensure_ascii=ascii)
    path = tmp_path / "file.json"
    path.write_text(text, encoding="utf-8")
    for chunk in (1, 2, 3, 7, 64, CHUNK):
        monkeypatch.setattr("cutslots.data.annotations.CHUNK", chunk)
        elements = list(read_elements(path))
        assert [(e.name, e.value) for e in elements] == [(k, v) for k in ("x", "images") for v in content[k]]
        data = path.read_bytes()
        assert all(json.loads(data[e.offset : e.offset + e.length]) == e.value for e in elements)


def test_memory_does_not_grow_with_segmentations(tmp_path):
    """Of 16 MB of annotations less than 5 MB are ever in memory."""
    path = tmp_path / "instances.json"
    with path.open("w") as file:
        file.write('{"images": [{"id": 1, "file_name": "a.jpg", "height": 9, "width": 9}], "annotations": [')
        # Of long numbers: tracemalloc takes as long for each of them, and 16 MB of short ones are many more.
        annotation = json.dumps({"image_id": 1, "segmentation": [[0.1234567890123456] * 750]})
        file.write(", ".join([annotation] * 1070))
        file.write("]}")
    assert path.stat().st_size > 16e6
    tracemalloc.start()
    opened = AnnotationFile(path, "images", "image_id", {"file_name": str, "height": int, "width": int})
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 5e6 and opened.first.tolist() == [0, 1070]


def test_a_changed_file_is_noticed(tmp_path):
    source = WRITE["coco"](tmp_path)
    opened = AnnotationFile(source / COCO_FILE, "images", "image_id", {"file_name": str, "height": int, "width": int})
    emptied(source / COCO_FILE)
    with pytest.raises(ValueError, match=re.escape("was changed while it was read; start again")):
        opened.annotations(0)
