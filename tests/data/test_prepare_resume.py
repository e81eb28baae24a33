"""`cutslots prepare` after interruptions, on full disks and on folders with other or damaged caches."""

import contextlib
import errno
import itertools
import json
import os
import shutil
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from cutslots.data import prepare as preparing
from cutslots.data.open import open_dataset
from cutslots.data.prepare import prepare
from tests.data.prepare_helpers import (
    ARRAYS,
    SIZE,
    TEX,
    WRITE,
    arrays,
    assert_refused,
    contents,
    dataset,
    failing,
    flipped,
    go,
    read,
    refusal,
    rewrite,
    tex,
    times,
)
from tests.data.small_files import (
    write_files,
)
from tests.small_runs import FORKED

WRITES = 3 * len(TEX)


@pytest.mark.parametrize("at", [0, 1, 2, 3, 10, WRITES - 1])
@pytest.mark.parametrize("kind", ["clevrtex", "tar"])
def test_full_disk(tmp_path, clean, monkeypatch, kind, at):
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
def test_disk_too_full_for_the_last_files(tmp_path, folder, clean, monkeypatch, name):
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


def test_disk_space_is_checked_first(tmp_path, folder, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(ValueError, match=r"out needs 0.0 GB more, and its disk has 0.0 GB free$"):
        go(folder, tmp_path / "out")
    assert not (tmp_path / "out" / "images.npy.part").exists()


def test_partial_writes(tmp_path, folder, clean, monkeypatch):
    write = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, data, at: write(file, data[:1000], at))
    go(folder, tmp_path / "out")
    assert contents(tmp_path / "out") == contents(clean("clevrtex"))


@pytest.mark.parametrize(
    "kind, every",
    [("clevrtex", -1.0), ("tar", -1.0), ("clevrtex", 1e9)],
    ids=["folder", "archives", "progress seldom saved"],
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
def test_run_resumes_where_it_stopped(tmp_path, clean, monkeypatch, kind):
    """Finished records are not written again; every source yields its records in one order."""
    source, out, write = tmp_path / "source", tmp_path / "out", os.pwrite
    WRITE[kind](source)

    def writes(most):
        """Return where a run writes, interrupted after so many writes."""
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
    assert len(first) == 5 and len(first & second) < 3, "at most the interrupted record is written again"
    assert contents(out) == contents(clean(kind))


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("name", [*ARRAYS, "manifest.json"])
def test_killed_between_the_final_renames(tmp_path, folder, clean, monkeypatch, name, after):
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
    if name == "manifest.json" and after:  # only progress.json is left over
        assert go(folder, out) is False
    else:
        assert_refused("clevrtex", out)
        assert go(folder, out) is True
    assert contents(out) == contents(clean("clevrtex"))
    assert len(open_dataset(f"clevrtex:{out}", "train")) == 5


@pytest.mark.parametrize("damage", ["cut", "gone"])
@pytest.mark.parametrize("name", ARRAYS)
def test_damaged_arrays_of_an_interrupted_run(tmp_path, folder, clean, monkeypatch, name, damage):
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
def test_unreadable_progress(tmp_path, folder, clean, monkeypatch, garbage):
    """The run starts again: nothing finished is lost."""
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", failing(os.pwrite, 13, KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            go(folder, out)
    (out / "progress.json").write_bytes(garbage)
    assert_refused("clevrtex", out)
    assert go(folder, out)
    assert contents(out) == contents(clean("clevrtex"))


def test_repaired_image_of_the_same_length(tmp_path, folder, clean):
    """Records after the damaged one are written while the error is reported; they do not count as done."""
    for index in range(len(TEX)):
        out = tmp_path / str(index)
        flipped(0.5)(tex(folder, index))
        with pytest.raises(ValueError, match=f"{index:06d}.png: it cannot be read"):
            go(folder, out)
        flipped(0.5)(tex(folder, index))
        assert go(folder, out)
        assert contents(out) == contents(clean("clevrtex")), index


def stuck(source, out, at, marker):
    """Run, but stop forever before write number `at`, or before the first rename at the end."""
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
def test_killed_and_resumed(tmp_path, folder, clean, at):
    """SIGKILL, which cannot be handled. While the first process lives, a second is refused."""
    out, marker = tmp_path / "out", tmp_path / "marker"
    process = FORKED.Process(target=stuck, args=(folder, out, at, marker))
    process.start()
    while not marker.exists() and process.is_alive():
        time.sleep(0.01)
    before = contents(out)
    with pytest.raises(ValueError, match=rf"^{out} is in use by another command; wait for it or choose another"):
        go(folder, out)
    with pytest.raises(ValueError, match="is in use by another command"):
        go(folder, out, overwrite=True)
    assert contents(out) == before
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert_refused("clevrtex", out)
    assert go(folder, out)
    assert contents(out) == contents(clean("clevrtex"))


# ------------------------------------------------------------------------------------------------------ finished caches


@pytest.mark.parametrize("kind", WRITE)
def test_second_run_changes_nothing(tmp_path, kind):
    WRITE[kind](tmp_path / "source")
    assert prepare(dataset(kind), tmp_path / "source", tmp_path / "out", SIZE, quiet=True) is True
    before = times(tmp_path / "out"), contents(tmp_path / "out")
    assert prepare(dataset(kind), tmp_path / "source", tmp_path / "out", SIZE, quiet=True) is False
    assert (times(tmp_path / "out"), contents(tmp_path / "out")) == before


@pytest.mark.parametrize("name", ARRAYS)
@pytest.mark.parametrize("change", [lambda data: data[:-1], lambda data: data + b"x", lambda data: b""])
def test_array_of_another_length(folder, finished, clean, name, change):
    rewrite(change)(finished / name)
    with pytest.raises(ValueError, match=rf"out/{name} has [\d,]+ bytes; expected [\d,]+: prepare it again$"):
        open_dataset(f"clevrtex:{finished}", "train")
    assert go(folder, finished)
    assert contents(finished) == contents(clean("clevrtex"))


def test_missing_array(folder, finished, clean):
    (finished / "images.npy").unlink()
    with pytest.raises(ValueError, match=r"out/images.npy has 0 bytes; expected [\d,]+: prepare it again$"):
        open_dataset(f"clevrtex:{finished}", "train")
    assert go(folder, finished)
    assert contents(finished) == contents(clean("clevrtex"))


@pytest.mark.parametrize("name", ARRAYS)
def test_array_with_a_damaged_header(finished, name):
    """Flip any bit of the header; the length stays."""
    data, whole = (finished / name).read_bytes(), arrays(finished)
    for at in range(preparing.HEADER_SIZE):
        (finished / name).write_bytes(data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :])
        said = refusal(open_dataset, f"clevrtex:{finished}", "train")
        assert said is None or str(finished) in said
        if said is None:
            image, mask = open_dataset(f"clevrtex:{finished}", "train").get_batch(range(5))
            assert np.array_equal(image, whole[0][1:, 0]) and np.array_equal(mask, whole[1][1:, 0]), at


@pytest.mark.parametrize(
    "garbage",
    [b"", b"{", b"\xff\xfe\x00", b"[]", b"[1]", b'"ab"', b"3", b"null", b"{}", b'{"request": 1, "files": {}}'],
)
def test_unreadable_manifest(finished, garbage):
    (finished / "manifest.json").write_bytes(garbage)
    with pytest.raises(
        ValueError, match=r"out/manifest.json cannot be read as a manifest; delete .*out and prepare it"
    ):
        open_dataset(f"clevrtex:{finished}", "train")


@pytest.mark.parametrize("garbage", [b"", b"{", b"\xff\xfe\x00", b"[]", b"null", b"{}"])
def test_arrays_without_a_readable_manifest_are_kept(folder, finished, clean, garbage):
    """They may be good."""
    (finished / "manifest.json").write_bytes(garbage)
    before = (finished / "images.npy").read_bytes()
    with pytest.raises(ValueError, match=r"out holds arrays but no readable manifest.json; choose another"):
        go(folder, finished)
    assert (finished / "images.npy").read_bytes() == before
    assert go(folder, finished, overwrite=True)
    assert contents(finished) == contents(clean("clevrtex"))


@pytest.mark.parametrize("name", ["request", "rows", "splits", "objects", "files"])
def test_manifest_with_missing_keys(finished, name):
    said = read(finished)
    del said[name]
    (finished / "manifest.json").write_text(json.dumps(said))
    with pytest.raises(
        ValueError, match=r"out/manifest.json cannot be read as a manifest; delete .*out and prepare it"
    ):
        open_dataset(f"clevrtex:{finished}", "train")


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
def test_manifest_with_invalid_values(finished, where, value):
    said = read(finished)
    inner = said
    for name in where[:-1]:
        inner = inner[name]
    inner[where[-1]] = value
    (finished / "manifest.json").write_text(json.dumps(said))
    with pytest.raises(ValueError, match=r"out/manifest.json .*prepare it again$"):
        open_dataset(f"clevrtex:{finished}", "train")


def test_finished_cache_is_not_replaced_unasked(tmp_path, folder, finished):
    other = WRITE["clevr"](tmp_path / "clevr")
    before = times(finished), contents(finished)
    for request, what in [
        (("clevrtex", folder, finished, 16), "size"),
        (("clevr", other, finished, SIZE), "dataset, source"),
        (("clevr", other, finished, SIZE, "slot-attention"), "dataset, protocol, source"),
    ]:
        with pytest.raises(
            ValueError,
            match=rf"^{finished} holds another cache \(differing in {what}\); choose another folder or pass --over",
        ):
            prepare(*request, quiet=True)
    write_files(folder, {"more/CLEVRTEX_full_000006.png": b"", "more/CLEVRTEX_full_000006_flat.png": b""})
    with pytest.raises(
        ValueError, match=r"holds another cache \(differing in source\); choose another folder or pass --overwrite$"
    ):
        go(folder, finished)
    assert (times(finished), contents(finished)) == before


def test_overwrite_replaces_the_cache(tmp_path, folder, finished, clean):
    other = WRITE["clevr"](tmp_path / "clevr")
    assert prepare("clevr", other, finished, SIZE, overwrite=True, quiet=True)
    assert contents(finished) == contents(clean("clevr"))
    assert go(folder, finished, overwrite=True) and contents(finished) == contents(clean("clevrtex"))
    before = times(finished)
    assert go(folder, finished, overwrite=True) and contents(finished) == contents(clean("clevrtex"))
    assert times(finished) != before, "written again, as requested"


def test_interrupted_while_it_replaces(tmp_path, folder, finished, clean, monkeypatch):
    """The old manifest is removed first: it never describes new arrays."""
    for at in (0, 9):
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", failing(os.pwrite, at, KeyboardInterrupt()))
            with pytest.raises(KeyboardInterrupt):
                go(folder, finished, 16, overwrite=True)
        assert_refused("clevrtex", finished)
    with pytest.raises(
        ValueError, match=r"holds another cache \(differing in size\); choose another folder or pass --overwrite$"
    ):
        go(folder, finished)
    assert go(folder, finished, 16)
    go(folder, tmp_path / "sixteen", 16)
    assert contents(finished) == contents(tmp_path / "sixteen")


def test_folder_of_something_else_is_left_alone(folder, finished):
    (finished / "thesis.tex").write_text("years of work")
    for overwrite in (False, True):
        with pytest.raises(
            ValueError, match=r"out holds thesis.tex, which is not part of a cache; choose another folder$"
        ):
            go(folder, finished, 16, overwrite=overwrite)
    assert (finished / "thesis.tex").read_text() == "years of work" and (finished / "manifest.json").exists()
