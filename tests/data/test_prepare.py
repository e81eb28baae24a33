"""`cutslots prepare`: the caches that it writes, and its command line."""

import re

import numpy as np
import pytest
from PIL import Image

from cutslots.data import prepare as preparing
from cutslots.data import prepared
from cutslots.data.open import open_dataset
from cutslots.data.prepare import prepare
from cutslots.data.published import PUBLISHED
from cutslots.files import Notice
from tests.data.prepare_helpers import (
    ARRAYS,
    CLEVR,
    MOVI,
    NAMES,
    SIZE,
    TEX,
    WRITE,
    arrays,
    contents,
    dataset,
    halved,
    only_arrays,
    read,
    tex,
    write_parts,
)
from tests.data.reference_resize import resized
from tests.data.small_files import (
    clevrtex_files,
    framed,
    image_png,
    movi_features,
    palette_png,
    png,
    scene,
    video,
    write_clevr,
    write_files,
    write_movi,
    write_records,
    write_tar,
    write_zip,
)
from tests.small_runs import Command


def expected(image, labels, left, upper, side, size, library):
    box = slice(upper, upper + side), slice(left, left + side)
    return resized(image[box], labels[box], size, library)


def assert_rows(out, scenes, left, upper, side, size, library):
    """Compare every pixel of every frame."""
    images, masks, objects = arrays(out)
    assert images.dtype == masks.dtype == objects.dtype == np.uint8
    assert objects.tolist() == [made.objects for made in scenes]
    assert len(images) == len(masks) == len(scenes)
    for made, image, mask in zip(scenes, images, masks, strict=True):
        is_video = made.image.ndim == 4
        inputs, labels = (made.image, made.labels) if is_video else (made.image[None], made.labels[None])
        assert image.shape == (len(inputs), 3, size, size) and mask.shape == (len(inputs), size, size)
        for got, got_mask, *given in zip(image, mask, inputs, labels, strict=True):
            wanted, wanted_mask = expected(*given, left, upper, side, size, library)
            assert np.array_equal(got, wanted) and np.array_equal(got_mask, wanted_mask)


# ---------------------------------------------------------------------------------------------------------- round trips


@pytest.mark.parametrize("protocol, top, library", [("clevrtex", 24, "torch"), ("slot-attention", 29, "tensorflow")])
@pytest.mark.parametrize("size, compressed", [(192, True), (128, True), (128, False), (64, False)])
def test_clevr(tmp_path, size, protocol, top, library, compressed):
    source = write_clevr(tmp_path / "source", CLEVR[:4], compressed)
    assert prepare("clevr", source, tmp_path / "out", size, protocol, quiet=True)
    assert_rows(tmp_path / "out", [scene(i, n) for i, n in enumerate(CLEVR[:4])], 64, top, 192, size, library)


@pytest.mark.parametrize("size", [192, 128, 64])
@pytest.mark.parametrize("variant, alpha", [*((variant, True) for variant in NAMES), ("full", False), ("outd", False)])
def test_clevrtex(tmp_path, size, variant, alpha):
    source = write_files(tmp_path / "source", clevrtex_files(variant, TEX[:3], alpha))
    assert prepare(NAMES[variant], source, tmp_path / "out", size, quiet=True)
    assert_rows(tmp_path / "out", [scene(i, n) for i, n in enumerate(TEX[:3])], 64, 24, 192, size, "pillow")


@pytest.mark.parametrize("side, left, crop", [(128, 13, 102), (64, 6, 51)])
@pytest.mark.parametrize("size", [128, 64])
def test_movi_a(tmp_path, side, left, crop, size):
    source = write_movi(tmp_path / "source", MOVI, side)
    assert prepare("movi-a", source, tmp_path / "out", size, quiet=True)
    assert_rows(tmp_path / "out", [video(i, 3 + i, side) for i in range(5)], left, left, crop, size, "pillow")
    assert read(tmp_path / "out")["splits"] == {"train": [0, 3], "val": [3, 5], "test": [3, 5]}


@pytest.mark.parametrize("side, size", [(128, None), (256, None), (64, 64), (32, 64)])
def test_movi_a_as_savi(tmp_path, side, size):
    """Whole frames, 64x64 unless another size is asked for."""
    source = write_movi(tmp_path / "source", {"train": [1], "validation": [1]}, side)
    assert prepare("movi-a", source, tmp_path / "out", size, "savi", quiet=True)
    videos = [video(i, 3 + i, side) for i in range(2)]
    assert_rows(tmp_path / "out", videos, 0, 0, side, size or 64, "tensorflow")
    said = read(tmp_path / "out")
    assert said["request"]["size"] == (size or 64) and said["crop"] == 1.0 and said["resize"] == "tensorflow"
    if (side, size) == (128, None):  # of every 2x2 pixels the mean, and the label at the bottom right
        images, masks, _ = arrays(tmp_path / "out")
        means = videos[0].image.reshape(24, 64, 2, 64, 2, 3).mean((2, 4)).transpose(0, 3, 1, 2)
        assert np.abs(images[0] - means).max() <= 0.5
        assert np.array_equal(masks[0], videos[0].labels[:, 1::2, 1::2])


def bicubic(image, size):
    """Keys' cubic convolution with a = -3/4 at (i + 1/2) side / size - 1/2, the edges repeated: (size, size, C)."""

    def kernel(x):
        x = abs(x)
        return (1.25 * x - 2.25) * x * x + 1 if x <= 1 else -0.75 * (((x - 5) * x + 8) * x - 4) if x < 2 else 0.0

    side = len(image)
    weights = np.zeros((size, side))
    for i in range(size):
        at = (i + 0.5) * side / size - 0.5
        for x in range(int(np.floor(at)) - 1, int(np.floor(at)) + 3):
            weights[i, min(max(x, 0), side - 1)] += kernel(at - x)
    return np.einsum("oh,hwc,pw->opc", weights, image.astype(float), weights, optimize=True).clip(0, 255)


@pytest.mark.parametrize("protocol, size, mask_size", [("videosaur", 224, 224), ("dinosaur", 224, 128), (None, 48, 48)])
@pytest.mark.parametrize("variant", ["c", "e"])
def test_movi_c_and_e(tmp_path, variant, protocol, size, mask_size):
    """Whole frames, bicubic; masks by the nearest pixel, of their own size in the protocol dinosaur."""
    source = write_movi(tmp_path / "source", {"train": [1], "validation": [1]}, 32, variant)
    given = size if protocol is None else None
    assert prepare(f"movi-{variant}", source, tmp_path / "out", given, protocol, quiet=True)
    images, masks, objects = arrays(tmp_path / "out")
    assert images.shape == (2, 24, 3, size, size) and masks.shape == (2, 24, mask_size, mask_size)
    nearest = np.array([(2 * i + 1) * 32 // (2 * mask_size) for i in range(mask_size)])
    for i in range(2):
        made = video(i, 3 + i, 32)
        assert np.array_equal(masks[i], made.labels[:, nearest][:, :, nearest]) and objects[i] == 3 + i
        for frame in (0, 23):
            wanted = bicubic(made.image[frame], size).transpose(2, 0, 1)
            assert np.abs(images[i, frame] - wanted).max() <= 0.501
    assert open_dataset(f"movi-{variant}:{tmp_path / 'out'}", "val", videos=True).ignore_label is None


@pytest.mark.parametrize("variant, most", [("c", 10), ("e", 23)])
def test_movi_e_has_more_objects(tmp_path, variant, most):
    def write(label):
        labels = np.zeros((24, 16, 16), dtype=np.uint8)
        labels[5, 3, 3] = label
        features = movi_features(0, 3, 16) | {"segmentations": ([png(Image.fromarray(x)) for x in labels], "byte")}
        source = write_movi(tmp_path / str(label), {"train": [1], "validation": [1]}, 16, variant)
        write_records(source / f"movi_{variant}-train.tfrecord-00000-of-00001", [framed(features)])
        return source

    assert prepare(f"movi-{variant}", write(most), tmp_path / "out", 16, quiet=True)
    with pytest.raises(ValueError, match=rf"a pixel has the label {most + 1}; expected 0 to {most}$"):
        prepare(f"movi-{variant}", write(most + 1), tmp_path / "more", 16, quiet=True)


@pytest.mark.parametrize("parts, backwards", [(1, False), (2, True), (5, False)])
@pytest.mark.parametrize(
    "write, ending", [(write_tar, ".tar"), (write_tar, ".tar.gz"), (write_tar, ".tgz"), (write_zip, ".zip")]
)
def test_archives_and_folders_give_the_same_cache(tmp_path, clean, write, ending, parts, backwards):
    source = write_parts(tmp_path / "source", write, ending, parts, backwards)
    prepare("clevrtex", source if parts > 1 else next(source.iterdir()), tmp_path / "out", SIZE, quiet=True)
    assert only_arrays(tmp_path / "out") == only_arrays(clean("clevrtex"))


def test_source_may_be_the_root_or_the_variant_or_hold_other_variants(tmp_path, clean):
    root = WRITE["clevrtex"](tmp_path / "source")
    write_files(root, clevrtex_files("outd", TEX[:2]))
    for i, source in enumerate((root, root / "clevrtex_full", root / "clevrtex_full" / "0")):
        prepare("clevrtex", source, tmp_path / str(i), SIZE, quiet=True)
        assert contents(tmp_path / str(i)) == contents(clean("clevrtex"))
    prepare("clevrtex-ood", root, tmp_path / "outd", SIZE, quiet=True)
    assert len(np.load(tmp_path / "outd" / "objects.npy")) == 2


def test_images_in_several_folders(tmp_path, clean):
    source = write_files(tmp_path / "source", clevrtex_files("full", TEX, folder_of=4))
    assert sorted(path.name for path in (source / "clevrtex_full").iterdir()) == ["0", "1"]
    prepare("clevrtex", source, tmp_path / "out", SIZE, quiet=True)
    assert contents(tmp_path / "out") == contents(clean("clevrtex"))


def test_clevr_source_may_be_the_file_or_its_folder(tmp_path, clean):
    file = WRITE["clevr"](tmp_path / "source")
    for i, source in enumerate((file, file.parent)):
        prepare("clevr", source, tmp_path / str(i), SIZE, quiet=True)
        assert contents(tmp_path / str(i)) == contents(clean("clevr"))


def test_movi_a_without_dataset_info(tmp_path, clean):
    source = WRITE["movi-a"](tmp_path / "source")
    (source / "dataset_info.json").unlink()
    prepare("movi-a", source, tmp_path / "out", SIZE, quiet=True)
    assert contents(tmp_path / "out") == contents(clean("movi-a"))


@pytest.mark.parametrize("kind", WRITE)
def test_number_of_workers_does_not_change_the_cache(tmp_path, clean, kind):
    WRITE[kind](tmp_path / "source")
    for workers in (1, 5):
        prepare(dataset(kind), tmp_path / "source", tmp_path / str(workers), SIZE, workers=workers, quiet=True)
        assert contents(tmp_path / str(workers)) == contents(clean(kind))


def test_manifest(clean):
    out = clean("clevr")
    said = read(out)
    assert set(contents(out)) == {*ARRAYS, "manifest.json", "request.json"}
    assert said["rows"] == 5 and said["published"] == 100_000 and said["crop"] == 0.8 and said["resize"] == "torch"
    assert said["request"]["dataset"] == "clevr" and said["request"]["protocol"] == "clevrtex"
    assert [file["name"] for file in said["source"]] == ["clevr_with_masks_train.tfrecords"]
    assert {name: facts["bytes"] for name, facts in said["files"].items()} == {
        name: len(content) for name, content in only_arrays(out).items()
    }
    assert said["source"][0]["sha256"] == preparing.sha256(out.parent / "source" / said["source"][0]["name"])


# --------------------------------------------------------------------------------------------------------------- splits


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Open one source of each dataset; `splits` is called with more rows than they have."""
    root = tmp_path_factory.mktemp("sources")
    clevr = write_clevr(root / "clevr", CLEVR[:1])
    movi = write_movi(root / "movi", {"train": [1], "validation": [1]}, 32)
    for variant in NAMES:
        write_files(root, clevrtex_files(variant, TEX[:1]))
    opened = {name: PUBLISHED[name].open(root, SIZE, "clevrtex") for name in NAMES.values()}
    opened["movi-a"] = PUBLISHED["movi-a"].open(movi, SIZE, "clevrtex")
    opened["clevr"] = PUBLISHED["clevr"].open(clevr, SIZE, "clevrtex")
    opened["clevr, slot-attention"] = PUBLISHED["clevr"].open(clevr, SIZE, "slot-attention")
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
        ("clevrtex-pbg", 20_000, (4_000, 20_000), (2_000, 4_000), (0, 2_000)),
        ("clevrtex-vbg", 19, (3, 19), (1, 3), (0, 1)),
        ("clevrtex-grassbg", 20_000, (4_000, 20_000), (2_000, 4_000), (0, 2_000)),
        ("clevrtex-ood", 10_000, (0, 0), (0, 10_000), (0, 10_000)),
        ("clevrtex-ood", 3, (0, 0), (0, 3), (0, 3)),
    ],
)
def test_splits(sources, name, rows, train, val, test):
    assert sources[name].splits(rows) == {"train": train, "val": val, "test": test}


@pytest.mark.parametrize("name", ["clevr", "clevr, slot-attention", "clevrtex", "clevrtex-camo", "clevrtex-vbg"])
def test_splits_are_disjoint_and_complete(sources, name):
    for rows in (*range(40), 99, 1_000, 14_999, 15_000, 69_999, 70_001, 84_999, 99_999, 100_000):
        shared = [i for a, b in sources[name].splits(rows).values() for i in range(a, b)]
        assert sorted(shared) == list(range(rows))


def test_movi_a_uses_validation_for_test_too(sources):
    sources["movi-a"].num_videos = {"train": 9_703, "validation": 250}
    assert sources["movi-a"].splits(9_953) == {"train": (0, 9_703), "val": (9_703, 9_953), "test": (9_703, 9_953)}


# ---------------------------------------------------------------------------------------------------- number of objects


@pytest.fixture(scope="module")
def clevr_caches(tmp_path_factory):
    """Six scenes of CLEVR, prepared by both protocols."""
    root = tmp_path_factory.mktemp("clevr")
    source = write_clevr(root / "source", CLEVR)
    for name in ("clevrtex", "slot-attention"):
        prepare("clevr", source, root / name, SIZE, name, quiet=True)
    return root


def test_background_is_not_counted_as_an_object(clevr_caches):
    for name in ("clevrtex", "slot-attention"):
        assert np.load(clevr_caches / name / "objects.npy").tolist() == CLEVR


def test_slot_attention_protocol_keeps_at_most_six_objects(clevr_caches):
    out = clevr_caches / "slot-attention"
    kept = open_dataset(f"clevr:{out}", "train")
    assert kept.rows.tolist() == [0, 1, 4, 5] and kept.num_objects[kept.rows].tolist() == [3, 6, 0, 1]
    assert read(out)["objects"] == [0, 6] and read(out)["rows"] == 6, "rows are filtered when read, not when written"
    assert open_dataset(f"clevr:{out}:0-10", "train").rows.tolist() == list(range(6))


@pytest.mark.parametrize(
    "objects, rows",
    [("", range(6)), (":0-6", [0, 1, 4, 5]), (":6-6", [1]), (":7-7", [2]), (":7-10", [2, 3]), (":0-0", [4])],
)
def test_range_of_objects_in_the_name(clevr_caches, objects, rows):
    out = clevr_caches / "clevrtex"
    data = open_dataset(f"clevr:{out}{objects}", "test")
    images, masks, _ = arrays(out)
    assert [data.name(i) for i in range(len(data))] == [f"{row:06d}" for row in rows]
    assert np.array_equal(data.get_batch(range(len(data))).image, images[list(rows), 0])
    assert np.array_equal(data.get_batch(range(len(data))).mask, masks[list(rows), 0])


def test_no_scene_with_so_many_objects(clevr_caches):
    with pytest.raises(ValueError, match=r"clevrtex has nothing for test with 8 to 9 objects \(it has test 6, val 0, "):
        open_dataset(f"clevr:{clevr_caches / 'clevrtex'}:8-9", "test")


def test_objects_outside_the_crop_are_counted(tmp_path):
    """objects.npy counts the objects of the scene; `inspect` counts those in the crop."""
    labels = np.zeros((240, 320), dtype=np.uint8)
    labels[0, 0], labels[100:110, 100:110] = 4, 2
    files = {"CLEVRTEX_full_000000.png": image_png(scene(0, 0).image, False)}
    write_files(tmp_path / "source", files | {"CLEVRTEX_full_000000_flat.png": palette_png(labels)})
    prepare("clevrtex", tmp_path / "source", tmp_path / "out", 192, quiet=True)
    _, masks, objects = arrays(tmp_path / "out")
    assert objects.tolist() == [2] and np.unique(masks).tolist() == [0, 2]


# --------------------------------------------------------------------------------------- arguments and the command line


def test_invalid_arguments(tmp_path):
    source = WRITE["clevrtex"](tmp_path / "source")
    (tmp_path / "file").write_text("")
    for options, sentence in [
        (
            {"dataset": "cocoa"},
            "dataset is 'cocoa'; expected one of clevr, clevrtex, clevrtex-ood, clevrtex-camo, clevrtex-pbg, "
            "clevrtex-vbg, clevrtex-grassbg, movi-a, movi-c, movi-e, coco, voc, davis, ytvis",
        ),
        ({"protocol": "slot-attention"}, "protocol is 'slot-attention'; for clevrtex expected one of clevrtex"),
        ({"protocol": "savi"}, "protocol is 'savi'; for clevrtex expected one of clevrtex"),
        ({"size": 0}, "size is 0; expected a side of 1 to 1024 pixels"),
        ({"source": tmp_path / "gone"}, f"there is no {tmp_path}/gone; expected CLEVRTEX as published"),
        ({"out": tmp_path / "file"}, f"{tmp_path}/file is a file; expected a folder to write to"),
        ({"out": source}, f"{source} holds clevrtex_full, which is not part of a cache; choose another folder"),
    ]:
        request = {"dataset": "clevrtex", "source": source, "out": tmp_path / "out"} | options
        with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
            prepare(**request, quiet=True)
    assert not (tmp_path / "out" / "manifest.json").exists()


def words(source, out, *more):
    return ["prepare", "clevrtex", "--source", str(source), "--out", str(out), "--size", str(SIZE), *more]


def test_part_of_clevr_says_which_rows_of_which_split_there_are(tmp_path):
    out = tmp_path / "out"
    with pytest.warns(Notice) as caught:
        prepare("clevr", write_clevr(tmp_path / "source", [3, 4, 5]), out, SIZE, quiet=True)
    splits = "test 3 of 15,000 (rows 0-2), val none of 15,000 (rows 15,000-29,999), train none of 70,000 "
    expected = f"{out}: the source holds 3 of the published 100,000 rows: {splits}(rows 30,000-99,999)"
    assert [str(warning.message) for warning in caught] == [expected]
    sizes = "it has test 3, val 0, train 0"
    held = re.escape(f"{out} has no rows for train ({sizes}): its source held 3 of the published 100,000")
    with pytest.raises(ValueError, match=f"^{held}$"):
        open_dataset(f"clevr:{out}", "train")
    assert len(open_dataset(f"clevr:{out}", "test")) == 3


def test_command(tmp_path, folder, clean):
    out, log = tmp_path / "out", tmp_path / "log"
    command = Command(words(folder, out), log)
    assert command.end() == 0, command.said()
    said = command.said().splitlines()
    assert said[-1] == f"wrote 6 rows to {out} (test 0, val 1, train 5); use it as --data clevrtex:{out}"
    splits = "test none of 5,000 (rows 0-4,999), val 1 of 5,000 (rows 0-0), train 5 of 40,000 (rows 1-5)"
    assert f"cutslots: {out}: the source holds 6 of the published 50,000 rows: {splits}" in said
    assert contents(out) == contents(clean("clevrtex"))
    command = Command(words(folder, out), log)
    assert command.end() == 0 and command.said() == f"{out} is up to date\n"


def test_command_prints_one_sentence(tmp_path, folder):
    halved(tex(folder, 3))
    errors = tmp_path / "errors"
    command = Command(words(folder, tmp_path / "out"), tmp_path / "log", errors=errors)
    assert command.end() == 1 and "Traceback" not in command.said()
    assert re.fullmatch(rf"cutslots: {tex(folder, 3)}: it cannot be read as a PNG: [^\n]+\n", errors.read_text())


def test_command_prints_one_sentence_for_an_archive(tmp_path):
    (tmp_path / "clevrtex_full.tar").write_text("not an archive" * 99)
    command = Command(words(tmp_path / "clevrtex_full.tar", tmp_path / "out"), tmp_path / "log")
    assert command.end() == 1
    assert re.fullmatch(r"cutslots: \S+clevrtex_full.tar cannot be read as an archive: [^\n]+\n", command.said())


def test_command_on_a_full_disk(tmp_path, folder):
    """Files are limited to 10,000 bytes: as on a full disk, writing fails."""
    command = Command(words(folder, tmp_path / "out"), tmp_path / "log", largest=10_000)
    assert command.end() == 1
    assert re.search(r"^cutslots: \S+/out/(images|masks).npy.part: File too large$", command.said(), re.MULTILINE)
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_cache_of_another_version_is_refused(finished, monkeypatch):
    """Increasing FORMAT makes every older cache one to prepare again."""
    monkeypatch.setattr(prepared, "FORMAT", preparing.FORMAT + 1)
    with pytest.raises(ValueError, match=r"manifest.json is of another version \(2; expected 3\); prepare it again$"):
        open_dataset(f"clevrtex:{finished}", "train")
