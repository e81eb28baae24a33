"""`cutslots prepare` on damaged sources: one sentence, and the run resumes once the source is repaired."""

import errno
import gzip
import re
import shutil
import tarfile

import numpy as np
import pytest
from PIL import Image

from cutslots.data.prepare import prepare
from cutslots.data.source import decode_png
from tests.data.prepare_helpers import (
    CLEVR,
    SIZE,
    TEX,
    WRITE,
    assert_refused,
    contents,
    dataset,
    emptied,
    flipped,
    halved,
    only_arrays,
    refusal,
    rewrite,
    tex,
)
from tests.data.small_files import (
    boundaries,
    clevr_features,
    clevr_record,
    clevrtex_files,
    frame,
    framed,
    image_png,
    movi_features,
    movi_record,
    palette_png,
    png,
    scene,
    single_bytes,
    write_files,
    write_records,
    write_tar,
    write_zip,
)


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


GRAY = Image.new("L", (320, 240))
PNG = "CLEVRTEX_full_000003.png: "
MASK = rf"{PNG}its mask CLEVRTEX_full_000003_flat.png: "
LACKS = r"source lacks CLEVRTEX_full_{}.png; expected all images with their masks, from 0 on$"
CLEVRTEX_FAULTS = [
    ("missing mask", lambda r: tex(r, 3, True).unlink(), LACKS.format("000003_flat")),
    ("missing image", lambda r: tex(r, 3).unlink(), LACKS.format("000003")),
    ("missing pair", lambda r: (tex(r, 3).unlink(), tex(r, 3, True).unlink()), LACKS.format("000003")),
    ("missing start", lambda r: (tex(r, 0).unlink(), tex(r, 0, True).unlink()), LACKS.format("000000")),
    ("missing last image", lambda r: tex(r, 5).unlink(), LACKS.format("000005")),
    ("half an image", lambda r: halved(tex(r, 3)), rf"{PNG}it cannot be read as a PNG: "),
    ("half a mask", lambda r: halved(tex(r, 3, True)), rf"{MASK}it cannot be read as a PNG: "),
    ("empty image", lambda r: emptied(tex(r, 3)), rf"{PNG}it cannot be read as a PNG: "),
    ("flipped bit in an image", lambda r: flipped(0.5)(tex(r, 3)), rf"{PNG}it cannot be read as a PNG: "),
    ("flipped bit in a mask", lambda r: flipped(0.9)(tex(r, 3, True)), rf"{MASK}it cannot be read as a PNG: "),
    ("flipped bit in the first", lambda r: flipped(0.5)(tex(r, 0)), r"CLEVRTEX_full_000000.png: it cannot be read as"),
    ("flipped bit in the last", lambda r: flipped(0.5)(tex(r, 5)), r"CLEVRTEX_full_000005.png: it cannot be read as"),
    (
        "two damaged images, the first is named",
        lambda r: [flipped(0.5)(tex(r, i)) for i in (2, 3)],
        r"CLEVRTEX_full_000002.png: it cannot be read as a PNG: ",
    ),
    ("not an image", lambda r: tex(r, 3).write_text("something else"), rf"{PNG}it cannot be read as a PNG: "),
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
        "image of another size",
        lambda r: write_to(tex(r, 3), image_png(scene(3, 0, 240, 320).image, False)),
        rf"{PNG}it is 240x320; expected 320x240$",
    ),
    (
        "mask of another size",
        lambda r: write_to(tex(r, 3, True), palette_png(scene(3, 0, 160, 120).labels)),
        rf"{MASK}it is 160x120; expected 320x240$",
    ),
    ("gray image", lambda r: write_to(tex(r, 3), png(GRAY)), rf"{PNG}it has mode L; expected one of RGB, RGBA$"),
    (
        "RGB mask",
        lambda r: shutil.copy(tex(r, 3), tex(r, 3, True)),
        rf"{MASK}it has mode RGB; expected one of P, L$",
    ),
    ("duplicate", again, r"CLEVRTEX_full_000001.png is there twice: .*source/clevrtex_full/0/.* and .*source/more/"),
    (
        "another variant",
        lambda r: replaced(r, clevrtex_files("outd", TEX)),
        r"source holds no images CLEVRTEX_full_000000.png \(those of CLEVRTEX_outd\); expected the folder",
    ),
    (
        "another folder",
        lambda r: replaced(r, {"images/a.png": b""}),
        r"source holds no images CLEVRTEX_full_000000.png \(none\); expected the folder clevrtex_full",
    ),
]


def clevr_file(root):
    return root / "clevr_with_masks_train.tfrecords"


def clevr_with(root, record):
    """Write CLEVR's file with another record 3."""
    records = [clevr_record(i, n) for i, n in enumerate(CLEVR[:5])]
    write_records(clevr_file(root), [*records[:3], record, records[4]])


def changed(**features):
    return lambda root: clevr_with(root, framed({**small_scene(), **features}))


def small_scene():
    """Return features of the wrong sizes, which are fast to write."""
    return {
        "image": single_bytes(np.zeros(10, int)),
        "mask": single_bytes(np.zeros(10, int)),
        "visibility": ([1.0] * 11, "float"),
    }


def truncate_clevr(root, offset):
    """Truncate the file at an offset from the start of record 3."""
    at = boundaries([clevr_record(i, n) for i, n in enumerate(CLEVR[:5])])[3] + offset
    rewrite(lambda data: data[:at])(clevr_file(root))


def compress_and_truncate(root):
    data = gzip.compress(clevr_file(root).read_bytes(), 1)
    clevr_file(root).write_bytes(data[: len(data) // 2])


def without_background(root):
    features = clevr_features(3, 2) | {"visibility": ([0.0, 1.0, 1.0] + [0.0] * 8, "float")}
    clevr_with(root, framed(features))


RECORD = r"clevr_with_masks_train.tfrecords, record 3: "
CLEVR_FAULTS = [
    ("truncated in a record", lambda r: truncate_clevr(r, 1000), r"train.tfrecords ends early: record 3 is truncated$"),
    ("truncated after a byte", lambda r: truncate_clevr(r, 1), r"train.tfrecords ends early: record 3 is truncated$"),
    ("truncated before a byte", lambda r: truncate_clevr(r, -1), r"train.tfrecords ends early: record 2 is truncated$"),
    ("compressed and truncated", compress_and_truncate, r"train.tfrecords ends early: record [1-3] is truncated$"),
    (
        "flipped bit",
        lambda r: flipped(0.7)(clevr_file(r)),
        r"train.tfrecords is damaged at record 3: its content does not match its checksum$",
    ),
    (
        "flipped bit at the start",
        lambda r: flipped(0)(clevr_file(r)),
        r"train.tfrecords is damaged at record 0: its length does not match its checksum; expected a TFRecord file$",
    ),
    ("empty", lambda r: emptied(clevr_file(r)), r"train.tfrecords is empty; expected a TFRecord file$"),
    (
        "empty gzip file",
        lambda r: write_to(clevr_file(r), gzip.compress(b"")),
        r"train.tfrecords holds no records; expected CLEVR with masks$",
    ),
    (
        "no Example",
        lambda r: clevr_with(r, frame(b"\xff" * 20)),
        rf"{RECORD}it is no Example: an integer has more than",
    ),
    (
        "no mask",
        lambda r: clevr_with(r, framed({"image": ([b"a"], "byte")})),
        rf"{RECORD}it has no feature 'mask'; exp",
    ),
    ("not an image", changed(image=([1.0], "float")), rf"{RECORD}a feature holds floats; expected byte strings$"),
    (
        "longer strings",
        changed(image=([b"ab"], "byte")),
        rf"{RECORD}it has strings of other lengths; expected single bytes$",
    ),
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
    """Write the first shard with changed features of the second video."""
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
        "truncated between two records",
        lambda r: write_records(shard(r), [movi_record(0, 3, 32)]),
        rf"{SHARD} ends early: it has 1 records; expected 2$",
    ),
    ("truncated in a record", lambda r: halved(shard(r)), rf"{SHARD} ends early: record [01] is truncated$"),
    ("emptied", lambda r: emptied(shard(r)), rf"{SHARD} is empty; expected a TFRecord file$"),
    ("flipped bit", lambda r: flipped(0.7)(shard(r)), rf"{SHARD} is damaged at record 1: its content does not match"),
    ("flipped bit in the last", lambda r: flipped(0.5)(shard(r, "validation", 1)), r"damaged at record 0: its content"),
    ("invalid dataset_info", lambda r: described(r, "{"), r"dataset_info.json cannot be read; expected TFDS' de"),
    (
        "dataset_info without splits",
        lambda r: described(r, '{"splits": 3}'),
        r"dataset_info.json cannot be read; expected TF",
    ),
    (
        "dataset_info of other files",
        lambda r: described(r, '{"splits": [{"name": "train", "shardLengths": ["3"]}]}'),
        r"dataset_info.json lists 1 files for train; there are 2$",
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
    ("gray frames", lambda r: movi_with(r, video=frames(mode="L")), rf"{VIDEO}it has mode L; expected one of RGB$"),
    ("half a frame", lambda r: movi_with(r, video=([b[:60] for b in frames()[0]], "byte")), rf"{VIDEO}it cannot be"),
]


def part(root, number=2, ending=".tar"):
    return root / f"clevrtex_full_part{number}{ending}"


def members(path):
    with tarfile.open(path) as archive:
        return archive.getmembers()


def truncate_between(path):
    """Truncate before the third file, so that only complete files are left."""
    at = members(path)[3].offset
    rewrite(lambda data: data[:at])(path)


def flipped_header(path):
    at = members(path)[3].offset + 20
    rewrite(lambda data: data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])(path)


def only_one(root, damage):
    """Replace the parts by a single archive, so that no other part shows that files are missing."""
    replaced(root, {})
    root.mkdir()
    write_tar(root / "clevrtex_full.tar", clevrtex_files("full", TEX))
    damage(root / "clevrtex_full.tar")


def archived(write, ending, change):
    """Return a function that replaces the parts by an archive with changed contents."""

    def damage(root):
        replaced(root, {})
        root.mkdir()
        files = dict(clevrtex_files("full", TEX))
        change(files)
        write(root / f"clevrtex_full{ending}", files)

    return damage


def encrypted(path):
    """Set the flag of encryption of each file in a zip."""
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
    (
        "truncated between two files",
        lambda r: truncate_between(part(r)),
        r"source lacks CLEVRTEX_full_|part2.tar ends early",
    ),
    ("single archive truncated between two files", lambda r: only_one(r, truncate_between), r"clevrtex_full.tar "),
    ("single archive with a damaged header", lambda r: only_one(r, flipped_header), r"clevrtex_full.tar "),
    (
        "duplicate archive",
        lambda r: shutil.copy(part(r), part(r, 3)),
        r"_full_00000\d(_flat)?.png is there twice: .* and ",
    ),
    (
        "a file missing",
        archived(write_tar, ".tar", lambda files: files.pop(THIRD)),
        r"source lacks CLEVRTEX_full_000003.png; expected all images with their masks, from 0 on$",
    ),
    (
        "a damaged image",
        archived(write_tar, ".tar", lambda files: files.update({THIRD: files[THIRD][:500]})),
        rf"clevrtex_full.tar, {THIRD}: it cannot be read as a PNG: ",
    ),
    (
        "another variant",
        archived(write_tar, ".tar", lambda files: (files.clear(), files.update(clevrtex_files("outd", TEX)))),
        r"source holds no images CLEVRTEX_full_000000.png",
    ),
]
ZIP_FAULTS = [
    ("half an archive", lambda r: halved(part(r, 2, ".zip")), r"part2.zip cannot be read as an archive: "),
    ("no archive", lambda r: part(r, 2, ".zip").write_text("something"), r"part2.zip cannot be read as an archive: "),
    ("flipped bit", lambda r: flipped(0.5)(part(r, 2, ".zip")), r"part2.zip cannot be read as an archive: "),
    ("encrypted", lambda r: encrypted(part(r, 2, ".zip")), r"part2.zip cannot be read as an archive: "),
    (
        "a decompression bomb",
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


@pytest.mark.parametrize("kind, damage, sentence", FAULTS)
def test_damaged_source_is_one_sentence_and_the_run_resumes_once_it_is_repaired(
    tmp_path, clean, kind, damage, sentence
):
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
def test_flipped_bit_of_a_png_is_detected_or_has_no_effect(mode):
    """Smooth images compress so well that one bit changes many pixels. Pillow alone misses some of them."""
    slope = np.add.outer(np.arange(240), np.arange(320)) // 3
    colors = np.stack([slope, slope // 2, 255 - slope], -1).astype(np.uint8)
    image = Image.fromarray(colors) if mode == "RGB" else Image.fromarray((slope // 30).astype(np.uint8)).convert("P")
    data, true = png(image), np.asarray(image)
    missed = []
    for at in range(len(data)):
        changed = bytearray(data)
        changed[at] ^= 1 << at % 8
        try:
            found = np.asarray(decode_png(bytes(changed), (mode,), (320, 240)))
        except ValueError:
            continue
        if not np.array_equal(found, true):
            missed.append(at)
    assert missed == []


@pytest.mark.parametrize("write, ending", [(write_tar, ".tar"), (write_tar, ".tar.gz"), (write_zip, ".zip")])
def test_flipped_bit_of_an_archive_is_detected_or_has_no_effect(tmp_path, write, ending):
    """In the contents, and at both ends, where headers and directories are."""
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


def failing_disk(*_, **__):
    raise OSError(errno.EIO, "Input/output error")


@pytest.mark.parametrize(
    "kind, reader, name",
    [
        ("clevrtex", "pathlib.Path.read_bytes", "CLEVRTEX_full_000000.png"),
        ("clevr", "cutslots.data.tfrecord._read_exactly", "clevr_with_masks_train.tfrecords"),
        ("movi-a", "cutslots.data.tfrecord._read_exactly", "movi_a-train.tfrecord-00000-of-00002"),
        ("tar", "tarfile.ExFileObject.read", "clevrtex_full_part1.tar"),
        ("zip", "zipfile.ZipFile.read", "clevrtex_full_part1.zip"),
    ],
)
def test_read_errors_name_the_file(tmp_path, clean, monkeypatch, kind, reader, name):
    source, out = tmp_path / "source", tmp_path / "out"
    WRITE[kind](source)
    with monkeypatch.context() as patch:
        patch.setattr(reader, failing_disk)
        with pytest.raises((OSError, ValueError), match=f"{name}.*Input/output|Input/output error: '.*{name}'"):
            prepare(dataset(kind), source, out, SIZE, workers=1, quiet=True)
    assert_refused(dataset(kind), out)
    assert prepare(dataset(kind), source, out, SIZE, workers=1, quiet=True)
    assert contents(out) == contents(clean(kind))
