import contextlib
import errno
import gzip
import itertools
import json
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from cutslots.data import Frames, Prepared, open_data, open_films, prepared
from cutslots.data import prepare as preparing
from cutslots.data.prepare import prepare
from cutslots.data.published import DATASETS, decode
from cutslots.devices import make_fabric
from cutslots.evaluate import evaluate
from cutslots.train import train
from tests.data.small_files import (
    boundaries,
    clevr_features,
    clevr_record,
    clevrtex_files,
    film,
    frame,
    framed,
    image_png,
    movi_features,
    movi_record,
    octets,
    palette_png,
    png,
    scene,
    write_clevr,
    write_files,
    write_movi,
    write_records,
    write_tar,
    write_zip,
)
from tests.small_runs import FORKED, Command, lines, small, train_command, two

CLEVR = [3, 6, 7, 10, 0, 1]  # objects of each scene
TEX = (3, 10, 1, 0, 7, 5)
MOVI = {"train": [2, 1], "validation": [1, 1]}  # videos in each shard; the first has 3 objects, the next 4...
ARRAYS = ("images.npy", "masks.npy", "objects.npy")
NAMES = {"full": "clevrtex", "outd": "clevrtex-ood", "camo": "clevrtex-camo"}


@pytest.fixture(autouse=True)
def often(monkeypatch):
    """How far it is, is noted after every piece: what an unlucky moment could show, every test shows."""
    monkeypatch.setattr(preparing, "SAVE_EVERY", -1.0)


def contents(out):
    """All that a cache is, byte by byte."""
    return {path.name: path.read_bytes() for path in sorted(out.iterdir()) if path.name != ".lock"}


def times(out):
    return {path.name: path.stat().st_mtime_ns for path in out.iterdir() if path.name != ".lock"}


def only_arrays(out):
    return {name: content for name, content in contents(out).items() if name in ARRAYS}


def arrays(out):
    return [np.load(out / name) for name in ARRAYS]


# ------------------------------------------------------------------ what should be there, without Pillow and without us


def filter_weights(side, size):
    """Pillow's triangle, as wide as the pixels it makes are, in fixed point with 22 bits: (size, side)."""
    scale = side / size
    wide = max(scale, 1.0)
    out = np.zeros((size, side))
    for i in range(size):
        middle = (i + 0.5) * scale
        first, end = max(int(middle - wide + 0.5), 0), min(int(middle + wide + 0.5), side)
        values = [max(0.0, 1.0 - abs((x - middle + 0.5) * (1.0 / wide))) for x in range(first, end)]
        total = sum(values)
        out[i, first:end] = [int(0.5 + value / total * 2**22) for value in values]
    return out


def bilinear(image, size):
    """(H, W, C) uint8 to (size, size, C): along the rows, rounded to 8 bits, then along the columns."""

    def one_way(values, side):  # sums of a few products below 2^31: doubles are exact
        sums = np.einsum("os,st->ot", filter_weights(side, size), values.reshape(side, -1).astype(float), optimize=True)
        return np.clip((sums.astype(np.int64) + 2**21) >> 22, 0, 255)

    height, width, channels = image.shape
    rows = one_way(image.transpose(1, 0, 2), width).reshape(size, height, channels).transpose(1, 0, 2)
    return one_way(rows, height).reshape(size, size, channels).astype(np.uint8)


def nearest(labels, size):
    """floor((i + 1/2) * side / size), in whole numbers."""
    height, width = labels.shape
    rows, columns = ([(2 * i + 1) * side // (2 * size) for i in range(size)] for side in (height, width))
    return labels[rows][:, columns]


def expected(image, labels, left, upper, side, size):
    box = slice(upper, upper + side), slice(left, left + side)
    return bilinear(image[box], size).transpose(2, 0, 1), nearest(labels[box], size)


def assert_rows(out, scenes, left, upper, side, size):
    """Every pixel of every frame is as expected."""
    images, masks, objects = arrays(out)
    assert images.dtype == masks.dtype == objects.dtype == np.uint8
    assert objects.tolist() == [made.objects for made in scenes]
    assert len(images) == len(masks) == len(scenes)
    for made, image, mask in zip(scenes, images, masks, strict=True):
        film = made.image.ndim == 4
        pictures, labels = (made.image, made.labels) if film else (made.image[None], made.labels[None])
        assert image.shape == (len(pictures), 3, size, size) and mask.shape == (len(pictures), size, size)
        for got, got_mask, *given in zip(image, mask, pictures, labels, strict=True):
            wanted, wanted_mask = expected(*given, left, upper, side, size)
            assert np.array_equal(got, wanted) and np.array_equal(got_mask, wanted_mask)


def test_the_judge_is_right_where_one_can_see_it():
    image = np.arange(0, 240, 10, dtype=np.uint8).reshape(4, 6, 1)
    assert np.array_equal(bilinear(image[:, :4], 4), image[:, :4]), "nothing to do"
    flat = np.full((8, 8, 3), 77, dtype=np.uint8)
    assert (bilinear(flat, 5) == 77).all() and (bilinear(flat, 20) == 77).all()
    halves = bilinear(np.array([[0, 0, 100, 100]] * 4, dtype=np.uint8)[..., None], 2)[..., 0]
    assert halves.tolist() == [[14, 86]] * 2, "weights 3, 3, 1 of seven"
    assert nearest(np.arange(16).reshape(4, 4), 2).tolist() == [[5, 7], [13, 15]]


# ---------------------------------------------------------------------------------------------------------- round trips


@pytest.mark.parametrize("splits, upper", [("clevrtex", 24), ("slot-attention", 29)])
@pytest.mark.parametrize("size, packed", [(192, True), (128, True), (128, False), (64, False)])
def test_clevr(tmp_path, size, splits, upper, packed):
    source = write_clevr(tmp_path / "source", CLEVR[:4], packed)
    assert prepare("clevr", source, tmp_path / "out", size, splits, quiet=True)
    assert_rows(tmp_path / "out", [scene(i, n) for i, n in enumerate(CLEVR[:4])], 64, upper, 192, size)


@pytest.mark.parametrize("size", [192, 128, 64])
@pytest.mark.parametrize("variant, alpha", [("full", True), ("full", False), ("outd", False), ("camo", True)])
def test_clevrtex(tmp_path, size, variant, alpha):
    source = write_files(tmp_path / "source", clevrtex_files(variant, TEX[:3], alpha))
    assert prepare(NAMES[variant], source, tmp_path / "out", size, quiet=True)
    assert_rows(tmp_path / "out", [scene(i, n) for i, n in enumerate(TEX[:3])], 64, 24, 192, size)


@pytest.mark.parametrize("side, left, cut", [(128, 13, 102), (64, 6, 51)])
@pytest.mark.parametrize("size", [128, 64])
def test_movi_a(tmp_path, side, left, cut, size):
    source = write_movi(tmp_path / "source", MOVI, side)
    assert prepare("movi-a", source, tmp_path / "out", size, quiet=True)
    assert_rows(tmp_path / "out", [film(i, 3 + i, side) for i in range(5)], left, left, cut, size)
    assert read(tmp_path / "out")["splits"] == {"train": [0, 3], "val": [3, 5], "test": [3, 5]}


def read(out):
    return json.loads((out / "manifest.json").read_text())


@pytest.fixture(scope="module")
def clean(tmp_path_factory):
    """What a run that nothing disturbs makes of each source; not to be written to."""
    made = {}

    def get(kind):
        if kind not in made:
            root = tmp_path_factory.mktemp(kind)
            WRITE[kind](root / "source")
            prepare(dataset(kind), root / "source", root / "out", SIZE, quiet=True)
            made[kind] = root / "out"
        return made[kind]

    return get


def in_parts(files, parts):
    """Shares files out to archives, a picture not always with its mask."""
    names = list(files)
    return [{name: files[name] for name in names[i::parts]} for i in range(parts)]


def write_parts(root, write, ending, parts=2, backwards=False):
    root.mkdir(parents=True)
    files = clevrtex_files("full", TEX)
    for i, part in enumerate(in_parts(dict(reversed(files.items())) if backwards else files, parts)):
        write(root / f"clevrtex_full_part{i + 1}{ending}", part)
    return root


SIZE = 32
WRITE = {
    "clevr": lambda root: write_clevr(root, CLEVR[:5], packed=False),
    "clevrtex": lambda root: write_files(root, clevrtex_files("full", TEX)),
    "tar": lambda root: write_parts(root, write_tar, ".tar"),
    "zip": lambda root: write_parts(root, write_zip, ".zip"),
    "movi-a": lambda root: write_movi(root / "1.0.0", MOVI, 32),
}


def dataset(kind):
    return "clevrtex" if kind in ("tar", "zip") else kind


@pytest.mark.parametrize("parts, backwards", [(1, False), (2, True), (5, False)])
@pytest.mark.parametrize(
    "write, ending", [(write_tar, ".tar"), (write_tar, ".tar.gz"), (write_tar, ".tgz"), (write_zip, ".zip")]
)
def test_archives_give_the_bytes_of_the_folder(tmp_path, clean, write, ending, parts, backwards):
    source = write_parts(tmp_path / "source", write, ending, parts, backwards)
    prepare("clevrtex", source if parts > 1 else next(source.iterdir()), tmp_path / "out", SIZE, quiet=True)
    assert only_arrays(tmp_path / "out") == only_arrays(clean("clevrtex"))


def test_the_folder_may_be_the_root_or_the_variant_or_hold_others(tmp_path, clean):
    root = WRITE["clevrtex"](tmp_path / "source")
    write_files(root, clevrtex_files("outd", TEX[:2]))
    for i, source in enumerate((root, root / "clevrtex_full", root / "clevrtex_full" / "0")):
        prepare("clevrtex", source, tmp_path / str(i), SIZE, quiet=True)
        assert contents(tmp_path / str(i)) == contents(clean("clevrtex"))
    prepare("clevrtex-ood", root, tmp_path / "outd", SIZE, quiet=True)
    assert len(np.load(tmp_path / "outd" / "objects.npy")) == 2


def test_pictures_in_several_folders(tmp_path, clean):
    source = write_files(tmp_path / "source", clevrtex_files("full", TEX, folder_of=4))
    assert sorted(path.name for path in (source / "clevrtex_full").iterdir()) == ["0", "1"]
    prepare("clevrtex", source, tmp_path / "out", SIZE, quiet=True)
    assert contents(tmp_path / "out") == contents(clean("clevrtex"))


def test_clevrs_file_or_its_folder(tmp_path, clean):
    file = WRITE["clevr"](tmp_path / "source")
    for i, source in enumerate((file, file.parent)):
        prepare("clevr", source, tmp_path / str(i), SIZE, quiet=True)
        assert contents(tmp_path / str(i)) == contents(clean("clevr"))


def test_movi_a_without_a_description(tmp_path, clean):
    source = WRITE["movi-a"](tmp_path / "source")
    (source / "dataset_info.json").unlink()
    prepare("movi-a", source, tmp_path / "out", SIZE, quiet=True)
    assert contents(tmp_path / "out") == contents(clean("movi-a"))


@pytest.mark.parametrize("kind", WRITE)
def test_any_number_of_threads_gives_the_same_bytes(tmp_path, clean, kind):
    WRITE[kind](tmp_path / "source")
    for workers in (1, 5):
        prepare(dataset(kind), tmp_path / "source", tmp_path / str(workers), SIZE, workers=workers, quiet=True)
        assert contents(tmp_path / str(workers)) == contents(clean(kind))


def test_what_the_manifest_says(clean):
    out = clean("clevr")
    said = read(out)
    assert set(contents(out)) == {*ARRAYS, "manifest.json"}
    assert said["rows"] == 5 and said["published"] == 100_000 and said["crop"] == [64, 24, 256, 216]
    assert said["request"]["dataset"] == "clevr" and said["request"]["convention"] == "clevrtex"
    assert [file["name"] for file in said["source"]] == ["clevr_with_masks_train.tfrecords"]
    assert {name: facts["bytes"] for name, facts in said["files"].items()} == {
        name: len(content) for name, content in only_arrays(out).items()
    }
    assert said["source"][0]["sha256"] == preparing.sha256(out.parent / "source" / said["source"][0]["name"])


# --------------------------------------------------------------------------------------------------------------- splits


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """One of each, whose splits are asked for more rows than any test writes."""
    root = tmp_path_factory.mktemp("sources")
    clevr = write_clevr(root / "clevr", CLEVR[:1])
    movi = write_movi(root / "movi", {"train": [1], "validation": [1]}, 32)
    for variant in NAMES:
        write_files(root, clevrtex_files(variant, TEX[:1]))
    opened = {name: DATASETS[name].open(root, SIZE, "clevrtex") for name in NAMES.values()}
    opened["movi-a"] = DATASETS["movi-a"].open(movi, SIZE, "clevrtex")
    opened["clevr"] = DATASETS["clevr"].open(clevr, SIZE, "clevrtex")
    opened["clevr, slot-attention"] = DATASETS["clevr"].open(clevr, SIZE, "slot-attention")
    return opened


@pytest.mark.parametrize(
    "name, rows, train, val, test",
    [
        ("clevr", 100_000, (30_000, 100_000), (15_000, 30_000), (0, 15_000)),
        ("clevr", 40_000, (30_000, 40_000), (15_000, 30_000), (0, 15_000)),
        ("clevr", 15_001, (15_001, 15_001), (15_000, 15_001), (0, 15_000)),
        ("clevr", 6, (6, 6), (6, 6), (0, 6)),
        ("clevr, slot-attention", 100_000, (0, 70_000), (70_000, 85_000), (85_000, 100_000)),
        ("clevr, slot-attention", 70_001, (0, 70_000), (70_000, 70_001), (70_001, 70_001)),
        ("clevr, slot-attention", 6, (0, 6), (6, 6), (6, 6)),
        ("clevrtex", 50_000, (10_000, 50_000), (5_000, 10_000), (0, 5_000)),
        ("clevrtex", 12, (2, 12), (1, 2), (0, 1)),
        ("clevrtex", 1, (0, 1), (0, 0), (0, 0)),
        ("clevrtex-camo", 20_000, (4_000, 20_000), (2_000, 4_000), (0, 2_000)),
        ("clevrtex-camo", 30, (6, 30), (3, 6), (0, 3)),
        ("clevrtex-ood", 10_000, (0, 0), (0, 10_000), (0, 10_000)),
        ("clevrtex-ood", 3, (0, 0), (0, 3), (0, 3)),
    ],
)
def test_splits(sources, name, rows, train, val, test):
    assert sources[name].splits(rows) == {"train": train, "val": val, "test": test}


@pytest.mark.parametrize("name", ["clevr", "clevr, slot-attention", "clevrtex", "clevrtex-camo"])
def test_splits_are_disjoint_and_complete(sources, name):
    for rows in (*range(40), 99, 1_000, 14_999, 15_000, 69_999, 70_001, 84_999, 99_999, 100_000):
        shared = [i for a, b in sources[name].splits(rows).values() for i in range(a, b)]
        assert sorted(shared) == list(range(rows))


def test_movi_as_validation_serves_for_tests_too(sources):
    sources["movi-a"].counts = {"train": 9_703, "validation": 250}
    assert sources["movi-a"].splits(9_953) == {"train": (0, 9_703), "val": (9_703, 9_953), "test": (9_703, 9_953)}


# --------------------------------------------------------------------------------------------------- numbers of objects


@pytest.fixture(scope="module")
def clevr_caches(tmp_path_factory):
    """CLEVR's six scenes by both conventions."""
    root = tmp_path_factory.mktemp("clevr")
    source = write_clevr(root / "source", CLEVR)
    for name in ("clevrtex", "slot-attention"):
        prepare("clevr", source, root / name, SIZE, name, quiet=True)
    return root


def test_the_background_is_no_object(clevr_caches):
    for name in ("clevrtex", "slot-attention"):
        assert np.load(clevr_caches / name / "objects.npy").tolist() == CLEVR


def test_slot_attention_keeps_six_objects_and_drops_seven(clevr_caches):
    out = clevr_caches / "slot-attention"
    kept = open_data(f"clevr:{out}", "train")
    assert kept.rows.tolist() == [0, 1, 4, 5] and kept.counts[kept.rows].tolist() == [3, 6, 0, 1]
    assert read(out)["objects"] == [0, 6] and read(out)["rows"] == 6, "dropped when read, not when written"
    assert open_data(f"clevr:{out}:0-10", "train").rows.tolist() == list(range(6))


@pytest.mark.parametrize(
    "objects, rows",
    [("", range(6)), (":0-6", [0, 1, 4, 5]), (":6-6", [1]), (":7-7", [2]), (":7-10", [2, 3]), (":0-0", [4])],
)
def test_numbers_of_objects_may_be_asked_for(clevr_caches, objects, rows):
    out = clevr_caches / "clevrtex"
    data = open_data(f"clevr:{out}{objects}", "test")
    images, masks, _ = arrays(out)
    assert [data.name(i) for i in range(len(data))] == [f"{row:06d}" for row in rows]
    assert np.array_equal(data.render(range(len(data))).image, images[list(rows), 0])
    assert np.array_equal(data.render(range(len(data))).mask, masks[list(rows), 0])


def test_nothing_with_so_many_objects(clevr_caches):
    with pytest.raises(ValueError, match=r"clevrtex has nothing for test with 8 to 9 objects \(it has test 6, val 0, "):
        open_data(f"clevr:{clevr_caches / 'clevrtex'}:8-9", "test")


def test_an_object_in_sight_outside_the_crop_counts(tmp_path):
    """The number is of the scene; what is left of it in the crop, `inspect` says."""
    labels = np.zeros((240, 320), dtype=np.uint8)
    labels[0, 0], labels[100:110, 100:110] = 4, 2
    files = {"CLEVRTEX_full_000000.png": image_png(scene(0, 0).image, False)}
    write_files(tmp_path / "source", files | {"CLEVRTEX_full_000000_flat.png": palette_png(labels)})
    prepare("clevrtex", tmp_path / "source", tmp_path / "out", 192, quiet=True)
    _, masks, objects = arrays(tmp_path / "out")
    assert objects.tolist() == [2] and np.unique(masks).tolist() == [0, 2]


# --------------------------------------------------------------------------------------------------------------- faults


def tex(root, index, mask=False):
    return root / "clevrtex_full" / "0" / f"CLEVRTEX_full_{index:06d}{'_flat' * mask}.png"


def rewrite(change):
    """A change of one file's content."""
    return lambda path: path.write_bytes(change(path.read_bytes()))


halved = rewrite(lambda data: data[: len(data) // 2])
emptied = rewrite(lambda data: b"")


def flipped(at):
    """A bit turned over at a part of the way through; the file keeps its length."""

    def flip(path):
        data = bytearray(path.read_bytes())
        data[int(at * len(data))] ^= 16
        path.write_bytes(data)

    return flip


def with_label(label):
    labels = scene(3, 0).labels.copy()
    labels[50, 60] = label
    return labels


def again(root):
    (root / "more").mkdir()
    shutil.copy(tex(root, 1), root / "more")


def replaced(root, files):
    shutil.rmtree(root)
    write_files(root, files)


def write_to(path, content):
    path.write_bytes(content)


GREY = Image.new("L", (320, 240))
PNG = "CLEVRTEX_full_000003.png: "
MASK = rf"{PNG}its mask CLEVRTEX_full_000003_flat.png: "
LACKS = r"source lacks CLEVRTEX_full_{}.png; expected all pictures with their masks, from 0 on$"
CLEVRTEX_FAULTS = [
    ("missing mask", lambda r: tex(r, 3, True).unlink(), LACKS.format("000003_flat")),
    ("missing picture", lambda r: tex(r, 3).unlink(), LACKS.format("000003")),
    ("missing pair", lambda r: (tex(r, 3).unlink(), tex(r, 3, True).unlink()), LACKS.format("000003")),
    ("missing start", lambda r: (tex(r, 0).unlink(), tex(r, 0, True).unlink()), LACKS.format("000000")),
    ("missing last picture", lambda r: tex(r, 5).unlink(), LACKS.format("000005")),
    ("half a picture", lambda r: halved(tex(r, 3)), rf"{PNG}it cannot be read as a PNG: "),
    ("half a mask", lambda r: halved(tex(r, 3, True)), rf"{MASK}it cannot be read as a PNG: "),
    ("empty picture", lambda r: emptied(tex(r, 3)), rf"{PNG}it cannot be read as a PNG: "),
    ("flipped bit in a picture", lambda r: flipped(0.5)(tex(r, 3)), rf"{PNG}it cannot be read as a PNG: "),
    ("flipped bit in a mask", lambda r: flipped(0.9)(tex(r, 3, True)), rf"{MASK}it cannot be read as a PNG: "),
    ("flipped bit in the first", lambda r: flipped(0.5)(tex(r, 0)), r"CLEVRTEX_full_000000.png: it cannot be read as"),
    ("flipped bit in the last", lambda r: flipped(0.5)(tex(r, 5)), r"CLEVRTEX_full_000005.png: it cannot be read as"),
    (
        "two broken, the first is named",
        lambda r: [flipped(0.5)(tex(r, i)) for i in (2, 3)],
        r"CLEVRTEX_full_000002.png: it cannot be read as a PNG: ",
    ),
    ("no picture", lambda r: tex(r, 3).write_text("something else"), rf"{PNG}it cannot be read as a PNG: "),
    (
        "a JPEG",
        lambda r: Image.fromarray(scene(3, 0).image).save(tex(r, 3), "JPEG"),
        rf"{PNG}it cannot be read as a PNG: ",
    ),
    (
        "label 11",
        lambda r: write_to(tex(r, 3, True), palette_png(with_label(11))),
        rf"{MASK}a pixel has the label 11; expected 0 to 10$",
    ),
    (
        "label 255",
        lambda r: write_to(tex(r, 3, True), palette_png(with_label(255))),
        rf"{MASK}a pixel has the label 255; expected 0 to 10$",
    ),
    (
        "picture of another size",
        lambda r: write_to(tex(r, 3), image_png(scene(3, 0, 240, 320).image, False)),
        rf"{PNG}it is 240x320; expected 320x240$",
    ),
    (
        "mask of another size",
        lambda r: write_to(tex(r, 3, True), palette_png(scene(3, 0, 160, 120).labels)),
        rf"{MASK}it is 160x120; expected 320x240$",
    ),
    ("grey picture", lambda r: write_to(tex(r, 3), png(GREY)), rf"{PNG}it has mode L; expected one of RGB, RGBA$"),
    (
        "coloured mask",
        lambda r: shutil.copy(tex(r, 3), tex(r, 3, True)),
        rf"{MASK}it has mode RGB; expected one of P, L$",
    ),
    ("twice", again, r"CLEVRTEX_full_000001.png is there twice: .*source/clevrtex_full/0/.* and .*source/more/"),
    (
        "another variant",
        lambda r: replaced(r, clevrtex_files("outd", TEX)),
        r"source holds no pictures CLEVRTEX_full_000000.png \(those of CLEVRTEX_outd\); expected the folder",
    ),
    (
        "another folder",
        lambda r: replaced(r, {"images/a.png": b""}),
        r"source holds no pictures CLEVRTEX_full_000000.png \(none\); expected the folder clevrtex_full",
    ),
]


def clevr_file(root):
    return root / "clevr_with_masks_train.tfrecords"


def clevr_with(root, record):
    """CLEVR's file with another record 3."""
    records = [clevr_record(i, n) for i, n in enumerate(CLEVR[:5])]
    write_records(clevr_file(root), [*records[:3], record, records[4]])


def changed(**features):
    return lambda root: clevr_with(root, framed({**small_scene(), **features}))


def small_scene():
    """Features of a scene that is wrong in its sizes, quick to write."""
    return {"image": octets(np.zeros(10, int)), "mask": octets(np.zeros(10, int)), "visibility": ([1.0] * 11, "float")}


def cut_clevr(root, cut):
    """Cut at a place that is reckoned from where record 3 begins."""
    at = boundaries([clevr_record(i, n) for i, n in enumerate(CLEVR[:5])])[3] + cut
    rewrite(lambda data: data[:at])(clevr_file(root))


def packed_and_cut(root):
    data = gzip.compress(clevr_file(root).read_bytes(), 1)
    clevr_file(root).write_bytes(data[: len(data) // 2])


def without_background(root):
    features = clevr_features(3, 2) | {"visibility": ([0.0, 1.0, 1.0] + [0.0] * 8, "float")}
    clevr_with(root, framed(features))


RECORD = r"clevr_with_masks_train.tfrecords, record 3: "
CLEVR_FAULTS = [
    ("cut in a record", lambda r: cut_clevr(r, 1000), r"train.tfrecords ends early: record 3 is cut short$"),
    ("cut after a byte", lambda r: cut_clevr(r, 1), r"train.tfrecords ends early: record 3 is cut short$"),
    ("cut before a byte", lambda r: cut_clevr(r, -1), r"train.tfrecords ends early: record 2 is cut short$"),
    ("packed and cut", packed_and_cut, r"train.tfrecords ends early: record [1-3] is cut short$"),
    (
        "flipped bit",
        lambda r: flipped(0.7)(clevr_file(r)),
        r"train.tfrecords is damaged at record 3: its content does not fit its checksum$",
    ),
    (
        "flipped bit at the start",
        lambda r: flipped(0)(clevr_file(r)),
        r"train.tfrecords is damaged at record 0: its length does not fit its checksum; expected a TFRecord file$",
    ),
    ("empty", lambda r: emptied(clevr_file(r)), r"train.tfrecords is empty; expected a TFRecord file$"),
    (
        "nothing packed",
        lambda r: write_to(clevr_file(r), gzip.compress(b"")),
        r"train.tfrecords holds no records; expected CLEVR with masks$",
    ),
    ("no Example", lambda r: clevr_with(r, frame(b"\xff" * 20)), rf"{RECORD}it is no Example: a number has more than"),
    (
        "no mask",
        lambda r: clevr_with(r, framed({"image": ([b"a"], "byte")})),
        rf"{RECORD}it has no feature 'mask'; exp",
    ),
    ("no picture", changed(image=([1.0], "float")), rf"{RECORD}a feature holds floats, not byte strings$"),
    ("longer strings", changed(image=([b"ab"], "byte")), rf"{RECORD}a list that should be of single bytes is not$"),
    ("too few pixels", changed(), rf"{RECORD}its image has 10 entries; expected 230,400$"),
    ("no background", without_background, rf"{RECORD}its visibility does not count the background; expected 1 in the"),
    (
        "two files",
        lambda r: shutil.copy(clevr_file(r), r / "b.tfrecords"),
        r"source holds 2 \*.tfrecords; expected cle",
    ),
    (
        "no file",
        lambda r: clevr_file(r).unlink(),
        r"source holds 0 \*.tfrecords; expected clevr_with_masks_train.tfrec",
    ),
]


def shard(root, split="train", number=0):
    return root / "1.0.0" / f"movi_a-{split}.tfrecord-{number:05d}-of-00002"


def movi_with(root, **features):
    """The second video with other features."""
    write_records(shard(root), [movi_record(0, 3, 32), framed(movi_features(1, 4, 32) | features)])


def frames(count=24, side=32, mode="RGB", label=0):
    made = [png(Image.new(mode, (side, side), label)) for _ in range(24)]
    return made[:count], "byte"


def described(root, text):
    (root / "1.0.0" / "dataset_info.json").write_text(text)


SHARD = r"1.0.0/movi_a-train.tfrecord-00000-of-00002"
VIDEO = rf"{SHARD}, record 1: "
MOVI_FAULTS = [
    ("shard missing", lambda r: shard(r).unlink(), rf"1.0.0 lacks {SHARD[6:]}; expected all 2 of them$"),
    (
        "last shard missing",
        lambda r: shard(r, "validation", 1).unlink(),
        r"1.0.0 lacks movi_a-validation.tfrecord-00001-of-00002; expected all 2 of them$",
    ),
    (
        "no validation",
        lambda r: [shard(r, "validation", i).unlink() for i in (0, 1)],
        r"1.0.0 holds no movi_a-validation.tfrecord-00000-of-...; expected train and validation$",
    ),
    (
        "shard of another set",
        lambda r: shutil.copy(shard(r), shard(r).with_name("movi_a-train.tfrecord-00002-of-00003")),
        r"1.0.0 holds movi_a-train.tfrecord-00002-of-00003 among 2; expected one set of files$",
    ),
    (
        "no features.json",
        lambda r: (r / "1.0.0" / "features.json").unlink(),
        r"1.0.0 holds no features.json; expected the folder as TFDS has it$",
    ),
    (
        "another folder",
        lambda r: replaced(r, {"images/a.png": b""}),
        r"source holds none; expected a folder of movi_a-train.tfrecord-00000-of-...$",
    ),
    (
        "two folders",
        lambda r: shutil.copytree(r / "1.0.0", r / "1.0.1"),
        r"source holds 2 folders with such files; expected a folder of movi_a-train.tfrecord-00000-of-...$",
    ),
    (
        "cut between two records",
        lambda r: write_records(shard(r), [movi_record(0, 3, 32)]),
        rf"{SHARD} ends early: it has 1 records; expected 2$",
    ),
    ("cut in a record", lambda r: halved(shard(r)), rf"{SHARD} ends early: record [01] is cut short$"),
    ("emptied", lambda r: emptied(shard(r)), rf"{SHARD} is empty; expected a TFRecord file$"),
    ("flipped bit", lambda r: flipped(0.7)(shard(r)), rf"{SHARD} is damaged at record 1: its content does not fit its"),
    ("flipped bit in the last", lambda r: flipped(0.5)(shard(r, "validation", 1)), r"damaged at record 0: its content"),
    ("garbage for a description", lambda r: described(r, "{"), r"dataset_info.json cannot be read; expected TFDS' de"),
    ("another description", lambda r: described(r, '{"splits": 3}'), r"dataset_info.json cannot be read; expected TF"),
    (
        "a description of others",
        lambda r: described(r, '{"splits": [{"name": "train", "shardLengths": ["3"]}]}'),
        r"dataset_info.json speaks of 1 files for train; there are 2$",
    ),
    ("a frame too few", lambda r: movi_with(r, video=frames(23)), rf"{VIDEO}its video has 23 frames; expected 24$"),
    ("no segmentations", lambda r: write_records(shard(r), [framed({"video": frames()})] * 2), r"no feature 'segm"),
    (
        "masks too few",
        lambda r: movi_with(r, segmentations=frames(0, mode="L")),
        rf"{VIDEO}its segmentations has 0 frames; expected 24$",
    ),
    (
        "label 11",
        lambda r: movi_with(r, segmentations=frames(mode="L", label=11)),
        rf"{VIDEO}a pixel has the label 11; expected 0 to 10$",
    ),
    (
        "masks of another size",
        lambda r: movi_with(r, segmentations=frames(mode="L", side=16)),
        rf"{VIDEO}it is 16x16; expected 32x32$",
    ),
    (
        "frames of two sizes",
        lambda r: movi_with(r, video=(frames()[0][:12] + frames(side=16)[0][12:], "byte")),
        rf"{VIDEO}its frames are not all of one size$",
    ),
    ("grey frames", lambda r: movi_with(r, video=frames(mode="L")), rf"{VIDEO}it has mode L; expected one of RGB$"),
    ("half a frame", lambda r: movi_with(r, video=([b[:60] for b in frames()[0]], "byte")), rf"{VIDEO}it cannot be"),
]


def part(root, number=2, ending=".tar"):
    return root / f"clevrtex_full_part{number}{ending}"


def members(path):
    with tarfile.open(path) as archive:
        return archive.getmembers()


def cut_between(path):
    """Cut where its third file would begin: what is left is whole, and less."""
    at = members(path)[3].offset
    rewrite(lambda data: data[:at])(path)


def flipped_header(path):
    at = members(path)[3].offset + 20
    rewrite(lambda data: data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])(path)


def only_one(root, damage):
    """A single archive, where nothing else can tell that files are missing."""
    replaced(root, {})
    root.mkdir()
    write_tar(root / "clevrtex_full.tar", clevrtex_files("full", TEX))
    damage(root / "clevrtex_full.tar")


def archived(write, ending, change):
    """The archives with other contents."""

    def damage(root):
        replaced(root, {})
        root.mkdir()
        files = dict(clevrtex_files("full", TEX))
        change(files)
        write(root / f"clevrtex_full{ending}", files)

    return damage


def encrypted(path):
    """Says of each file that it is encrypted, where zip notes that."""
    data = bytearray(path.read_bytes())
    for mark, at in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        for found in re.finditer(mark, bytes(data)):
            data[found.start() + at] |= 1
    path.write_bytes(data)


THIRD = "clevrtex_full/0/CLEVRTEX_full_000003.png"
TAR_FAULTS = [
    ("half an archive", lambda r: halved(part(r)), r"part2.tar (ends early|cannot be read as an archive)"),
    ("half the first", lambda r: halved(part(r, 1)), r"part1.tar (ends early|cannot be read as an archive)"),
    ("an archive missing", lambda r: part(r).unlink(), r"source lacks CLEVRTEX_full_00000\d(_flat)?.png"),
    ("no archive", lambda r: part(r).write_text("something else" * 99), r"part2.tar cannot be read as an archive: "),
    ("emptied", lambda r: emptied(part(r)), r"part2.tar cannot be read as an archive: "),
    ("cut between two files", lambda r: cut_between(part(r)), r"source lacks CLEVRTEX_full_|part2.tar ends early"),
    ("the only one cut between two", lambda r: only_one(r, cut_between), r"clevrtex_full.tar "),
    ("the only one with a damaged head", lambda r: only_one(r, flipped_header), r"clevrtex_full.tar "),
    (
        "one of them twice",
        lambda r: shutil.copy(part(r), part(r, 3)),
        r"_full_00000\d(_flat)?.png is there twice: .* and ",
    ),
    (
        "a file missing",
        archived(write_tar, ".tar", lambda files: files.pop(THIRD)),
        r"source lacks CLEVRTEX_full_000003.png; expected all pictures with their masks, from 0 on$",
    ),
    (
        "a broken picture",
        archived(write_tar, ".tar", lambda files: files.update({THIRD: files[THIRD][:500]})),
        rf"clevrtex_full.tar, {THIRD}: it cannot be read as a PNG: ",
    ),
    (
        "another variant",
        archived(write_tar, ".tar", lambda files: (files.clear(), files.update(clevrtex_files("outd", TEX)))),
        r"source holds no pictures CLEVRTEX_full_000000.png",
    ),
]
ZIP_FAULTS = [
    ("half an archive", lambda r: halved(part(r, 2, ".zip")), r"part2.zip cannot be read as an archive: "),
    ("no archive", lambda r: part(r, 2, ".zip").write_text("something"), r"part2.zip cannot be read as an archive: "),
    ("flipped bit", lambda r: flipped(0.5)(part(r, 2, ".zip")), r"part2.zip cannot be read as an archive: "),
    ("encrypted", lambda r: encrypted(part(r, 2, ".zip")), r"part2.zip cannot be read as an archive: "),
    (
        "a bomb",
        archived(write_zip, ".zip", lambda files: files.update({THIRD: bytes(2**24 + 1)})),
        r"clevrtex_full.zip.*CLEVRTEX_full_000003.png has 16,777,217 bytes; expected at most 16,777,216$",
    ),
]
FAULTS = [
    pytest.param(kind, damage, sentence, id=f"{kind}, {name}")
    for kind, faults in {
        "clevrtex": CLEVRTEX_FAULTS,
        "clevr": CLEVR_FAULTS,
        "movi-a": MOVI_FAULTS,
        "tar": TAR_FAULTS,
        "zip": ZIP_FAULTS,
    }.items()
    for name, damage, sentence in faults
]


def assert_refused(name, out):
    """No manifest, and nobody takes it for a dataset."""
    assert not (out / "manifest.json").exists()
    for data in (f"{name}:{out}", str(out)):
        with pytest.raises(ValueError, match=re.escape(str(out))):
            open_data(data, "test")


@pytest.mark.parametrize("kind, damage, sentence", FAULTS)
def test_a_fault_is_one_sentence_and_once_mended_the_run_goes_on(tmp_path, clean, kind, damage, sentence):
    source, out = tmp_path / "source", tmp_path / "out"
    WRITE[kind](source)
    damage(source)
    with pytest.raises(ValueError, match=sentence) as caught:
        prepare(dataset(kind), source, out, SIZE, workers=1, quiet=True)
    said = str(caught.value)
    assert "\n" not in said and str(source) in said
    assert_refused(dataset(kind), out)
    shutil.rmtree(source)
    WRITE[kind](source)
    assert prepare(dataset(kind), source, out, SIZE, workers=1, quiet=True)
    assert contents(out) == contents(clean(kind))


@pytest.mark.parametrize("mode", ["RGB", "P"])
def test_no_flipped_bit_of_a_png_changes_a_picture(mode):
    """Smooth pictures are packed so well that a bit stands for much. Pillow alone overlooks some."""
    slope = np.add.outer(np.arange(240), np.arange(320)) // 3
    colours = np.stack([slope, slope // 2, 255 - slope], -1).astype(np.uint8)
    picture = (
        Image.fromarray(colours) if mode == "RGB" else Image.fromarray((slope // 30).astype(np.uint8)).convert("P")
    )
    data, true = png(picture), np.asarray(picture)
    overlooked = []
    for at in range(len(data)):
        changed = bytearray(data)
        changed[at] ^= 1 << at % 8
        try:
            found = np.asarray(decode(bytes(changed), (mode,), (320, 240)))
        except ValueError:
            continue
        if not np.array_equal(found, true):
            overlooked.append(at)
    assert overlooked == []


def refusal(function, *arguments, **options):
    """The sentence with which something is refused; None if it is not."""
    try:
        function(*arguments, **options)
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.parametrize("write, ending", [(write_tar, ".tar"), (write_tar, ".tar.gz"), (write_zip, ".zip")])
def test_a_flipped_bit_of_an_archive_is_noticed_or_harmless(tmp_path, write, ending):
    """In the contents, and at both ends, where the heads and lists of contents are."""
    archive, rng = tmp_path / f"clevrtex_full{ending}", np.random.default_rng(0)
    write(archive, clevrtex_files("full", TEX[:2]))
    data = archive.read_bytes()
    prepare("clevrtex", archive, tmp_path / "whole", 16, quiet=True)
    places = [*rng.integers(0, len(data), 10), *rng.integers(0, 600, 5), *(len(data) - rng.integers(1, 900, 20))]
    for i, at in enumerate(places):
        changed, out = bytearray(data), tmp_path / str(i)
        changed[at] ^= 1 << i % 8
        archive.write_bytes(changed)
        said = refusal(prepare, "clevrtex", archive, out, 16, quiet=True)
        if said is None:
            assert only_arrays(out) == only_arrays(tmp_path / "whole"), at
        else:
            assert str(archive) in said and "\n" not in said
            assert not (out / "manifest.json").exists()


def broken_disk(*_, **__):
    raise OSError(errno.EIO, "Input/output error")


@pytest.mark.parametrize(
    "kind, reader, name",
    [
        ("clevrtex", "pathlib.Path.read_bytes", "CLEVRTEX_full_000000.png"),
        ("clevr", "cutslots.data.tfrecord._exactly", "clevr_with_masks_train.tfrecords"),
        ("movi-a", "cutslots.data.tfrecord._exactly", "movi_a-train.tfrecord-00000-of-00002"),
        ("tar", "tarfile.ExFileObject.read", "clevrtex_full_part1.tar"),
        ("zip", "zipfile.ZipFile.read", "clevrtex_full_part1.zip"),
    ],
)
def test_a_disk_that_cannot_be_read(tmp_path, clean, monkeypatch, kind, reader, name):
    source, out = tmp_path / "source", tmp_path / "out"
    WRITE[kind](source)
    with monkeypatch.context() as patch:
        patch.setattr(reader, broken_disk)
        with pytest.raises((OSError, ValueError), match=f"{name}.*Input/output|Input/output error: '.*{name}'"):
            prepare(dataset(kind), source, out, SIZE, workers=1, quiet=True)
    assert_refused(dataset(kind), out)
    assert prepare(dataset(kind), source, out, SIZE, workers=1, quiet=True)
    assert contents(out) == contents(clean(kind))


def test_requests_that_make_no_sense(tmp_path):
    source = WRITE["clevrtex"](tmp_path / "source")
    (tmp_path / "file").write_text("")
    for options, sentence in [
        (
            {"dataset": "coco"},
            "dataset is 'coco'; expected one of clevr, clevrtex, clevrtex-ood, clevrtex-camo, movi-a",
        ),
        ({"splits": "slot-attention"}, "splits is 'slot-attention'; for clevrtex expected one of clevrtex"),
        ({"size": 0}, "size is 0; expected a side of 1 to 1024 pixels"),
        ({"source": tmp_path / "gone"}, f"there is no {tmp_path}/gone; expected CLEVRTEX as published"),
        ({"out": tmp_path / "file"}, f"{tmp_path}/file is a file; expected a folder to write to"),
        ({"out": source}, f"{source} holds clevrtex_full, which is of no cache; choose another folder"),
    ]:
        request = {"dataset": "clevrtex", "source": source, "out": tmp_path / "out"} | options
        with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
            prepare(**request, quiet=True)
    assert not (tmp_path / "out" / "manifest.json").exists()


# -------------------------------------------------------------------------------------------------------- interruptions


@pytest.fixture
def folder(tmp_path):
    return WRITE["clevrtex"](tmp_path / "source")


def go(source, out, size=SIZE, **options):
    return prepare("clevrtex", source, out, size, **{"workers": 1, "quiet": True} | options)


def failing(function, number, error, after=False):
    """The function, which raises at call `number`, before or after it has done its work."""
    calls = itertools.count()

    def call(*arguments, **options):
        if next(calls) != number:
            return function(*arguments, **options)
        if after:
            function(*arguments, **options)
        raise error

    return call


WRITES = 3 * len(TEX)


@pytest.mark.parametrize("at", [0, 1, 2, 3, 10, WRITES - 1])
@pytest.mark.parametrize("kind", ["clevrtex", "tar"])
def test_a_full_disk(tmp_path, clean, monkeypatch, kind, at):
    source, out = tmp_path / "source", tmp_path / "out"
    WRITE[kind](source)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", failing(os.pwrite, at, OSError(errno.ENOSPC, "No space left on device")))
        with pytest.raises(OSError, match=r"No space left on device: '.*/out/(images|masks|objects).npy.part'$"):
            go(source, out)
    assert_refused("clevrtex", out)
    assert go(source, out)
    assert contents(out) == contents(clean(kind))


@pytest.mark.parametrize("name", ["progress.json", "manifest.json"])
def test_a_disk_too_full_for_the_last_words(tmp_path, folder, clean, monkeypatch, name):
    write = Path.write_bytes

    def full(path, content):
        if path.name == f"{name}.part":
            write(path, content[:3])
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(path, content)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        with pytest.raises(OSError, match=rf"No space left on device: '.*/out/{name}'$"):
            go(folder, tmp_path / "out")
    assert_refused("clevrtex", tmp_path / "out")
    assert go(folder, tmp_path / "out")
    assert contents(tmp_path / "out") == contents(clean("clevrtex"))


def test_a_disk_too_small_is_found_out_before(tmp_path, folder, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(ValueError, match=r"out needs 0.0 GB more, and its disk has 0.0 GB free$"):
        go(folder, tmp_path / "out")
    assert not (tmp_path / "out" / "images.npy.part").exists()


def test_a_disk_that_takes_a_little_at_a_time(tmp_path, folder, clean, monkeypatch):
    write = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, data, at: write(file, data[:1000], at))
    go(folder, tmp_path / "out")
    assert contents(tmp_path / "out") == contents(clean("clevrtex"))


@pytest.mark.parametrize(
    "kind, every", [("clevrtex", -1.0), ("tar", -1.0), ("clevrtex", 1e9)], ids=["folder", "archives", "seldom noted"]
)
def test_interrupted_at_any_write(tmp_path, clean, monkeypatch, kind, every):
    monkeypatch.setattr(preparing, "SAVE_EVERY", every)
    source = tmp_path / "source"
    WRITE[kind](source)
    for at in range(WRITES):
        out = tmp_path / str(at)
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", failing(os.pwrite, at, KeyboardInterrupt(), after=at % 2))
            with pytest.raises(KeyboardInterrupt):
                go(source, out)
        assert_refused("clevrtex", out)
        assert go(source, out)
        assert contents(out) == contents(clean(kind)), at


@pytest.mark.parametrize("kind", WRITE)
def test_a_run_goes_on_where_it_stopped(tmp_path, clean, monkeypatch, kind):
    """What is done is not written again; every source hands out its pieces in one order."""
    source, out, write = tmp_path / "source", tmp_path / "out", os.pwrite
    WRITE[kind](source)

    def writes(most):
        """Where a run writes, interrupted after so many."""
        places = []

        def spy(file, data, at):
            if len(places) == most:
                raise KeyboardInterrupt
            places.append((os.fstat(file).st_ino, at))
            return write(file, data, at)

        monkeypatch.setattr(os, "pwrite", spy)
        with contextlib.suppress(KeyboardInterrupt):
            prepare(dataset(kind), source, out, SIZE, workers=1, quiet=True)
        return set(places)

    first, second = writes(5), writes(1000)
    assert len(first) == 5 and len(first & second) < 3, "at most the piece that was interrupted is written again"
    assert contents(out) == contents(clean(kind))


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("name", [*ARRAYS, "manifest.json"])
def test_killed_between_the_renames_at_the_end(tmp_path, folder, clean, monkeypatch, name, after):
    out, replace = tmp_path / "out", os.replace

    def killed(old, new):
        if after or Path(new).name != name:
            replace(old, new)
        if Path(new).name == name:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            go(folder, out)
    if name == "manifest.json" and after:  # only the note of progress is left
        assert go(folder, out) is False
    else:
        assert_refused("clevrtex", out)
        assert go(folder, out) is True
    assert contents(out) == contents(clean("clevrtex"))
    assert len(open_data(f"clevrtex:{out}", "train")) == 5


@pytest.mark.parametrize("damage", ["cut", "gone"])
@pytest.mark.parametrize("name", ARRAYS)
def test_what_an_interrupted_run_left_is_damaged(tmp_path, folder, clean, monkeypatch, name, damage):
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", failing(os.pwrite, 13, KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            go(folder, out)
    file = out / f"{name}.part"
    file.unlink() if damage == "gone" else os.truncate(file, file.stat().st_size - 1)
    assert go(folder, out)
    assert contents(out) == contents(clean("clevrtex"))


@pytest.mark.parametrize("garbage", [b"", b"{", b"\xff\xfe", b"[]", b"null", b"{}"])
def test_a_note_of_progress_that_is_garbage(tmp_path, folder, clean, monkeypatch, garbage):
    """Nothing finished is lost by starting again."""
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", failing(os.pwrite, 13, KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            go(folder, out)
    (out / "progress.json").write_bytes(garbage)
    assert_refused("clevrtex", out)
    assert go(folder, out)
    assert contents(out) == contents(clean("clevrtex"))


def test_a_mended_picture_of_the_same_length_among_others(tmp_path, folder, clean):
    """What comes after the fault is written while the fault is reported: it does not count as done."""
    for index in range(len(TEX)):
        out = tmp_path / str(index)
        flipped(0.5)(tex(folder, index))
        with pytest.raises(ValueError, match=f"{index:06d}.png: it cannot be read"):
            go(folder, out)
        flipped(0.5)(tex(folder, index))
        assert go(folder, out)
        assert contents(out) == contents(clean("clevrtex")), index


def stuck(source, out, at, marker):
    """A run that stops for good before write number `at`, or before the first rename at the end."""
    calls, write, replace = itertools.count(), os.pwrite, os.replace

    def wait():
        marker.touch()
        time.sleep(600)

    def stuck_write(*arguments):
        if next(calls) == at:
            wait()
        return write(*arguments)

    def stuck_replace(old, new):
        if Path(new).name == "masks.npy":
            wait()
        replace(old, new)

    os.pwrite, os.replace, preparing.SAVE_EVERY = stuck_write, stuck_replace, -1.0
    go(source, out)


@pytest.mark.parametrize("at", [0, 8, 1000], ids=["at the start", "midway", "at the end"])
def test_killed_and_gone_on_with(tmp_path, folder, clean, at):
    """SIGKILL leaves no time for anything. While the other lives, nobody else may write here."""
    out, marker = tmp_path / "out", tmp_path / "marker"
    process = FORKED.Process(target=stuck, args=(folder, out, at, marker))
    process.start()
    while not marker.exists() and process.is_alive():
        time.sleep(0.01)
    before = contents(out)
    with pytest.raises(
        ValueError, match=rf"^{out} is being prepared by another command; wait for it or choose another"
    ):
        go(folder, out)
    with pytest.raises(ValueError, match="is being prepared by another command"):
        go(folder, out, overwrite=True)
    assert contents(out) == before
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert_refused("clevrtex", out)
    assert go(folder, out)
    assert contents(out) == contents(clean("clevrtex"))


# ------------------------------------------------------------------------------------------------------ finished caches


@pytest.fixture
def finished(tmp_path, clean):
    """A copy of a clean cache, to be damaged."""
    return Path(shutil.copytree(clean("clevrtex"), tmp_path / "out"))


@pytest.mark.parametrize("kind", WRITE)
def test_a_second_run_changes_nothing(tmp_path, kind):
    WRITE[kind](tmp_path / "source")
    assert prepare(dataset(kind), tmp_path / "source", tmp_path / "out", SIZE, quiet=True) is True
    before = times(tmp_path / "out"), contents(tmp_path / "out")
    assert prepare(dataset(kind), tmp_path / "source", tmp_path / "out", SIZE, quiet=True) is False
    assert (times(tmp_path / "out"), contents(tmp_path / "out")) == before


@pytest.mark.parametrize("name", ARRAYS)
@pytest.mark.parametrize("change", [lambda data: data[:-1], lambda data: data + b"x", lambda data: b""])
def test_an_array_of_another_length(folder, finished, clean, name, change):
    rewrite(change)(finished / name)
    with pytest.raises(ValueError, match=rf"out/{name} has [\d,]+ bytes; expected [\d,]+: prepare it again$"):
        open_data(f"clevrtex:{finished}", "train")
    assert go(folder, finished)
    assert contents(finished) == contents(clean("clevrtex"))


def test_an_array_that_is_gone(folder, finished, clean):
    (finished / "images.npy").unlink()
    with pytest.raises(ValueError, match=r"out/images.npy has 0 bytes; expected [\d,]+: prepare it again$"):
        open_data(f"clevrtex:{finished}", "train")
    assert go(folder, finished)
    assert contents(finished) == contents(clean("clevrtex"))


@pytest.mark.parametrize("name", ARRAYS)
def test_an_array_with_a_damaged_head(finished, name):
    """Any bit of what says how the numbers lie; the length stays what it was."""
    data, whole = (finished / name).read_bytes(), arrays(finished)
    for at in range(preparing.HEAD):
        (finished / name).write_bytes(data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :])
        said = refusal(open_data, f"clevrtex:{finished}", "train")
        assert said is None or str(finished) in said
        if said is None:
            image, mask = open_data(f"clevrtex:{finished}", "train").render(range(5))
            assert np.array_equal(image, whole[0][1:, 0]) and np.array_equal(mask, whole[1][1:, 0]), at


@pytest.mark.parametrize(
    "garbage",
    [b"", b"{", b"\xff\xfe\x00", b"[]", b"[1]", b'"ab"', b"3", b"null", b"{}", b'{"request": 1, "files": {}}'],
)
def test_a_manifest_that_is_garbage(finished, garbage):
    (finished / "manifest.json").write_bytes(garbage)
    with pytest.raises(
        ValueError, match=r"out/manifest.json cannot be read as a manifest; delete .*out and prepare it"
    ):
        open_data(f"clevrtex:{finished}", "train")


@pytest.mark.parametrize("garbage", [b"", b"{", b"\xff\xfe\x00", b"[]", b"null", b"{}"])
def test_arrays_without_a_manifest_that_can_be_read_are_not_dropped_unasked(folder, finished, clean, garbage):
    """They may be anybody's."""
    (finished / "manifest.json").write_bytes(garbage)
    before = (finished / "images.npy").read_bytes()
    with pytest.raises(ValueError, match=r"out holds arrays but no readable manifest.json; choose another"):
        go(folder, finished)
    assert (finished / "images.npy").read_bytes() == before
    assert go(folder, finished, overwrite=True)
    assert contents(finished) == contents(clean("clevrtex"))


@pytest.mark.parametrize("name", ["request", "rows", "splits", "objects", "files"])
def test_a_manifest_that_lacks_something(finished, name):
    said = read(finished)
    del said[name]
    (finished / "manifest.json").write_text(json.dumps(said))
    with pytest.raises(
        ValueError, match=r"out/manifest.json cannot be read as a manifest; delete .*out and prepare it"
    ):
        open_data(f"clevrtex:{finished}", "train")


@pytest.mark.parametrize(
    "where, value",
    [
        (("splits", "train"), [0]),
        (("splits", "train"), ["a", "b"]),
        (("files", "images.npy", "bytes"), "many"),
        (("request", "format"), 99),
        (("request", "dataset"), "coco"),
    ],
)
def test_a_manifest_with_other_values(finished, where, value):
    said = read(finished)
    inner = said
    for name in where[:-1]:
        inner = inner[name]
    inner[where[-1]] = value
    (finished / "manifest.json").write_text(json.dumps(said))
    with pytest.raises(ValueError, match=r"out/manifest.json .*prepare it again$"):
        open_data(f"clevrtex:{finished}", "train")


def test_a_finished_cache_is_not_dropped_for_another(tmp_path, folder, finished):
    other = WRITE["clevr"](tmp_path / "clevr")
    before = times(finished), contents(finished)
    for request, what in [
        (("clevrtex", folder, finished, 16), "size"),
        (("clevr", other, finished, SIZE), "dataset, source"),
        (("clevr", other, finished, SIZE, "slot-attention"), "dataset, convention, source"),
    ]:
        with pytest.raises(
            ValueError, match=rf"^{finished} holds another cache \(its {what} differ\); pass --overwrite"
        ):
            prepare(*request, quiet=True)
    write_files(folder, {"more/CLEVRTEX_full_000006.png": b"", "more/CLEVRTEX_full_000006_flat.png": b""})
    with pytest.raises(ValueError, match=r"holds another cache \(its source differ\); pass --overwrite to replace it$"):
        go(folder, finished)
    assert (times(finished), contents(finished)) == before


def test_overwrite_replaces_it(tmp_path, folder, finished, clean):
    other = WRITE["clevr"](tmp_path / "clevr")
    assert prepare("clevr", other, finished, SIZE, overwrite=True, quiet=True)
    assert contents(finished) == contents(clean("clevr"))
    assert go(folder, finished, overwrite=True) and contents(finished) == contents(clean("clevrtex"))
    before = times(finished)
    assert go(folder, finished, overwrite=True) and contents(finished) == contents(clean("clevrtex"))
    assert times(finished) != before, "made again, as was asked"


def test_interrupted_while_it_replaces(tmp_path, folder, finished, clean, monkeypatch):
    """What was there is gone from the start; the old manifest does not stand over new arrays."""
    for at in (0, 9):
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", failing(os.pwrite, at, KeyboardInterrupt()))
            with pytest.raises(KeyboardInterrupt):
                go(folder, finished, 16, overwrite=True)
        assert_refused("clevrtex", finished)
    with pytest.raises(ValueError, match=r"holds another cache \(its size differ\); pass --overwrite to replace it$"):
        go(folder, finished)
    assert go(folder, finished, 16)
    go(folder, tmp_path / "sixteen", 16)
    assert contents(finished) == contents(tmp_path / "sixteen")


def test_a_folder_of_something_else_is_left_alone(folder, finished):
    (finished / "thesis.tex").write_text("years of work")
    for overwrite in (False, True):
        with pytest.raises(ValueError, match=r"out holds thesis.tex, which is of no cache; choose another folder$"):
            go(folder, finished, 16, overwrite=overwrite)
    assert (finished / "thesis.tex").read_text() == "years of work" and (finished / "manifest.json").exists()


# --------------------------------------------------------------------------------------------------- caches as datasets


@pytest.fixture(scope="module")
def caches(tmp_path_factory):
    """Thirty scenes of CLEVRTEX at 16x16, to learn from, and five videos of MOVi-A."""
    root = tmp_path_factory.mktemp("caches")
    objects = tuple(i % 11 for i in range(30))
    prepare("clevrtex", write_files(root / "a", clevrtex_files("full", objects)), root / "clevrtex", 16, quiet=True)
    prepare("movi-a", WRITE["movi-a"](root / "b"), root / "movi-a", 16, quiet=True)
    return root


@pytest.mark.parametrize("split, rows", [("test", range(3)), ("val", range(3, 6)), ("train", range(6, 30))])
def test_a_cache_hands_out_its_arrays(caches, split, rows):
    images, masks, _ = arrays(caches / "clevrtex")
    for name in (f"clevrtex:{caches / 'clevrtex'}", str(caches / "clevrtex")):
        data = open_data(name, split)
        assert isinstance(data, Prepared) and len(data) == len(rows) and data.size == 16 and data.frames == 1
        chosen = np.random.default_rng(0).permutation(len(rows))
        sample = data.render(chosen)
        assert sample.image.dtype == sample.mask.dtype == torch.uint8
        assert np.array_equal(sample.image, images[rows.start + chosen, 0])
        assert np.array_equal(sample.mask, masks[rows.start + chosen, 0])
        for i in range(len(data)):
            assert np.array_equal(data[i].image, images[rows[i], 0]) and np.array_equal(data[i].mask, masks[rows[i], 0])
            assert data.name(i) == f"{rows[i]:06d}"
        with pytest.raises(IndexError, match=f"{len(rows)} is out of range"):
            data.render([len(rows)])


def test_count_takes_the_first(caches):
    name = f"clevrtex:{caches / 'clevrtex'}"
    assert open_data(name, "train", count=5).rows.tolist() == list(range(6, 11))
    assert open_data(f"{name}:2-4", "train", count=4).rows.tolist() == [13, 14, 15, 24], "the first that are wanted"
    assert len(open_data(name, "train", count=1000)) == 24 and len(open_data(name, "train", count=0)) == 0


def test_another_size_is_wanted(caches):
    assert len(open_data(f"clevrtex:{caches / 'clevrtex'}", "train", 16)) == 24
    for name in (f"clevrtex:{caches / 'clevrtex'}", str(caches / "clevrtex")):
        with pytest.raises(
            ValueError, match=r"is prepared at 16x16 and 32x32 is wanted; prepare it again with --size 32"
        ):
            open_data(name, "train", 32)


def test_another_dataset_is_there(caches):
    folder = caches / "clevrtex"
    with pytest.raises(ValueError, match=rf"^data is 'clevr:{folder}', but {folder} holds clevrtex$"):
        open_data(f"clevr:{folder}", "train")
    with pytest.raises(ValueError, match=rf"^data is 'clevrtex-ood:{folder}:0-3', but {folder} holds clevrtex$"):
        open_data(f"clevrtex-ood:{folder}:0-3", "train")


def test_nothing_is_there(tmp_path):
    with pytest.raises(
        ValueError, match=rf"^{tmp_path} holds no manifest.json; expected a folder that cutslots prepare"
    ):
        open_data(f"clevrtex:{tmp_path}", "train")
    with pytest.raises(ValueError, match=r"gone holds no manifest.json; expected a folder that cutslots prepare"):
        open_data(f"clevrtex:{tmp_path / 'gone'}", "train")
    with pytest.raises(ValueError, match=r"split is 'dev'; expected one of train, val, test$"):
        Prepared(tmp_path, "dev")


def test_an_unfinished_cache(tmp_path, folder, monkeypatch):
    monkeypatch.setattr(os, "pwrite", failing(os.pwrite, 7, KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        go(folder, tmp_path / "out")
    for name in (f"clevrtex:{tmp_path / 'out'}", str(tmp_path / "out")):
        with pytest.raises(ValueError, match=r"out is not finished; run its cutslots prepare again, it goes on where"):
            open_data(name, "train")


def test_there_is_nothing_to_learn_from_in_outd(tmp_path):
    source = write_files(tmp_path / "source", clevrtex_files("outd", TEX[:3]))
    prepare("clevrtex-ood", source, tmp_path / "out", 16, quiet=True)
    assert len(open_data(f"clevrtex-ood:{tmp_path / 'out'}", "val")) == 3
    with pytest.raises(
        ValueError, match=r"out has nothing for train with 0 to 255 objects \(it has train 0, val 3, test 3"
    ):
        open_data(f"clevrtex-ood:{tmp_path / 'out'}", "train")


def test_films_frame_by_frame(caches):
    images, masks, _ = arrays(caches / "movi-a")
    name = f"movi-a:{caches / 'movi-a'}"
    data = open_data(name, "val")
    assert isinstance(data, Frames) and len(data) == 2 * 24
    assert [data.name(i) for i in (0, 23, 24, 47)] == ["000003-00", "000003-23", "000004-00", "000004-23"]
    chosen = [47, 0, 24, 23, 24]
    sample = data.render(chosen)
    assert np.array_equal(sample.image, images[3:].reshape(-1, 3, 16, 16)[chosen])
    assert np.array_equal(sample.mask, masks[3:].reshape(-1, 16, 16)[chosen])
    assert len(open_data(name, "train", count=30)) == 30 and len(open_data(name, "train", count=1000)) == 3 * 24
    with pytest.raises(IndexError, match="48 is out of range"):
        data.render([48])


def test_films_whole(caches):
    images, masks, _ = arrays(caches / "movi-a")
    films = open_films(f"movi-a:{caches / 'movi-a'}", "train")
    assert isinstance(films, Prepared) and films.frames == 24 and len(films) == 3
    assert np.array_equal(films.render([2, 0]).image, images[[2, 0]])
    assert np.array_equal(films[1].mask, masks[1]) and films[1].image.shape == (24, 3, 16, 16)
    stills = films.stills([2, 2, 0], [5, 23, 0])
    assert np.array_equal(stills.image, images[[2, 2, 0], [5, 23, 0]])
    assert np.array_equal(stills.mask, masks[[2, 2, 0], [5, 23, 0]])
    with pytest.raises(IndexError, match="24 is out of range"):
        films.stills([0], [24])
    assert open_films(f"movi-a:{caches / 'movi-a'}:4-5", "train").rows.tolist() == [1, 2]


def test_workers_open_the_files_again(caches):
    data = open_data(f"clevrtex:{caches / 'clevrtex'}", "train")
    sent = pickle.dumps(data)
    assert len(sent) < 24 * 3 * 16 * 16 / 2, "no pictures are sent"
    copy = pickle.loads(sent)
    everything = data.render(range(len(data)))
    assert all(torch.equal(*pair) for pair in zip(copy.render(range(len(data))), everything, strict=True))
    loader = DataLoader(data, batch_size=6, num_workers=1, multiprocessing_context=FORKED)
    batches = list(loader)
    assert torch.equal(torch.cat([batch.image for batch in batches]), everything.image)
    assert torch.equal(torch.cat([batch.mask for batch in batches]), everything.mask)


# -------------------------------------------------------------------------------------------- learning and being judged


def test_learns_and_is_judged_from_a_cache(caches, tmp_path):
    name = f"clevrtex:{caches / 'clevrtex'}"
    run = train(small(tmp_path / "run", data=name, steps=4, eval_every=2, eval_images=3))
    losses = [line["loss"] for line in lines(run) if "loss" in line]
    assert losses and np.isfinite(losses).all() and [line["step"] for line in lines(run) if "val" in line] == [2, 4]
    results = evaluate(str(run), (name,), tmp_path / "one", "val", None, make_fabric("cpu"))
    assert results[name]["images"] == 3
    assert {k: v for k, v in results[name].items() if k not in ("split", "images")} == lines(run)[-1]["val"]
    words = ["evaluate", str(run), "--data", name, "--split", "val", "--accelerator", "cpu", "--devices", "2"]
    commands = two([*words, "--out", str(tmp_path / "two")], tmp_path)
    assert [command.end() for command in commands] == [0, 0], "".join(command.said() for command in commands)
    for file in ("results.json", "per_image.csv"):
        assert (tmp_path / "two" / file).read_bytes() == (tmp_path / "one" / file).read_bytes()


def test_two_processes_learn_the_same_from_a_cache(caches, tmp_path):
    changes = {"data": f"clevrtex:{caches / 'clevrtex'}", "steps": 4, "eval_every": 4, "eval_images": 3}
    one = train(small(tmp_path / "one", **changes))
    commands = two(train_command(tmp_path / "two", **changes, devices=2), tmp_path)
    assert [command.end() for command in commands] == [0, 0], "".join(command.said() for command in commands)
    a, b = ([line.get("loss") or line["val"]["mse"] for line in lines(run)] for run in (one, tmp_path / "two"))
    assert len(a) == 2 and b == pytest.approx(a, rel=1e-3)


def test_learns_from_the_frames_of_films(caches, tmp_path):
    run = train(small(tmp_path / "run", data=f"movi-a:{caches / 'movi-a'}", steps=2, eval_every=2, eval_images=3))
    assert [line["step"] for line in lines(run) if "val" in line] == [2]


def test_a_cache_of_another_size_is_refused_before_the_run(caches, tmp_path):
    with pytest.raises(ValueError, match=r"is prepared at 16x16 and 32x32 is wanted"):
        train(small(tmp_path / "run", data=f"clevrtex:{caches / 'clevrtex'}", size=32))
    assert not (tmp_path / "run").exists()


# ----------------------------------------------------------------------------------------------------- the command line


def words(source, out, *more):
    return ["prepare", "clevrtex", "--source", str(source), "--out", str(out), "--size", str(SIZE), *more]


def test_the_command(tmp_path, folder, clean):
    out, log = tmp_path / "out", tmp_path / "log"
    command = Command(words(folder, out), log)
    assert command.end() == 0, command.said()
    said = command.said().splitlines()
    assert said[-2] == f"wrote 6 rows to {out} (test 0, val 1, train 5); use it as --data clevrtex:{out}"
    assert said[-1] == "the source holds 6 of the published 50,000: splits are of these"
    assert contents(out) == contents(clean("clevrtex"))
    command = Command(words(folder, out), log)
    assert command.end() == 0 and command.said() == f"{out} is up to date\n"


def test_the_command_refuses_in_a_sentence(tmp_path, folder):
    halved(tex(folder, 3))
    done = subprocess.run(
        [sys.executable, "-m", "cutslots", *words(folder, tmp_path / "out")], capture_output=True, text=True
    )
    assert done.returncode == 1 and "Traceback" not in done.stdout + done.stderr
    assert re.fullmatch(rf"cutslots: {tex(folder, 3)}: it cannot be read as a PNG: [^\n]+\n", done.stderr)


def test_the_command_refuses_an_archive_in_a_sentence(tmp_path):
    (tmp_path / "clevrtex_full.tar").write_text("not an archive" * 99)
    command = Command(words(tmp_path / "clevrtex_full.tar", tmp_path / "out"), tmp_path / "log")
    assert command.end() == 1
    assert re.fullmatch(r"cutslots: \S+clevrtex_full.tar cannot be read as an archive: [^\n]+\n", command.said())


def test_the_command_on_a_full_disk(tmp_path, folder):
    """No file may have more than 10,000 bytes: as on a disk that is full, writing fails."""
    command = Command(words(folder, tmp_path / "out"), tmp_path / "log", largest=10_000)
    assert command.end() == 1
    assert re.search(r"^cutslots: \S+/out/(images|masks).npy.part: File too large$", command.said(), re.MULTILINE)
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_a_version_of_the_cache_is_written_down(finished, monkeypatch):
    """Raising FORMAT makes every older cache one to prepare again."""
    monkeypatch.setattr(prepared, "FORMAT", preparing.FORMAT + 1)
    with pytest.raises(ValueError, match=r"manifest.json is of another version \(1; expected 2\); prepare it again$"):
        open_data(f"clevrtex:{finished}", "train")
