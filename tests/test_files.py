"""Atomic files and the protocol by which commands claim, resume and replace their output folders."""

import errno
import json
import os
import threading
from pathlib import Path

import pytest

from cutslots import files
from cutslots.files import LOCK, Layout, differences, locked, output_folder, read_json, read_lines, write_atomically

LAYOUT = Layout("drawing", ("a.txt", "b", "done"), marker="done", may_change=("speed",))
EXCLUSIVE = Layout("drawing", ("a.txt", "b", "done"), marker="done", exclusive=True, restart_if_changed=("source",))
REQUEST = {"command": "draw", "size": 3, "pen": {"color": "red", "width": 1}, "speed": 1, "source": "x"}
OTHER = REQUEST | {"size": 4, "pen": {"color": "red", "width": 2}}


def draw(folder, request=REQUEST, overwrite=False, layout=LAYOUT, stop_after=9, **options):
    """A command that writes three files, the marker last; returns whether everything was there already."""
    with output_folder(folder, layout, request, overwrite, **options) as complete:
        if not complete:
            (folder / "b").mkdir(exist_ok=True)
            for path in [folder / "a.txt", folder / "b" / "c.txt", folder / "done"][:stop_after]:
                path.write_text(json.dumps(request))
        return complete


def contents(folder):
    return {str(p.relative_to(folder)): p.read_text() for p in sorted(folder.rglob("*")) if p.is_file()}


def refusal(*arguments, **options):
    with pytest.raises(ValueError, match=r"\A[^\n]+\Z") as caught:
        draw(*arguments, **options)
    return str(caught.value)


@pytest.fixture
def out(tmp_path):
    return tmp_path / "deep" / "out"


def test_new_folder(out):
    assert draw(out) is False
    assert json.loads((out / "request.json").read_text()) == REQUEST
    assert set(contents(out)) == {LOCK, "request.json", "a.txt", "b/c.txt", "done"}


def test_same_request_resumes_without_the_marker(out):
    draw(out)
    draw(out, stop_after=0)
    assert not (out / "done").exists() and (out / "a.txt").exists()


@pytest.mark.parametrize("overwrite, advice", [(False, "pass --overwrite"), (None, "delete it")])
def test_another_request_is_refused(out, overwrite, advice):
    draw(out)
    before = contents(out)
    differ = "holds another drawing (differing in size, pen.width); choose another folder or"
    assert refusal(out, OTHER, overwrite) == f"{out} {differ} {advice}"
    assert contents(out) == before


def test_keys_that_may_change(out):
    draw(out)
    draw(out, REQUEST | {"speed": 9}, stop_after=0)
    assert json.loads((out / "request.json").read_text())["speed"] == 9 and (out / "a.txt").exists()


def test_overwrite_removes_what_is_owned(out):
    draw(out)
    (out / "notes.md").write_text("mine")
    (out / "a.txt.part").write_text("half")
    draw(out, OTHER, overwrite=True, stop_after=0)
    assert set(contents(out)) == {LOCK, "request.json", "notes.md"}
    draw(out, OTHER, overwrite=True)
    assert (out / "notes.md").read_text() == "mine"


def test_overwrite_removes_links_not_what_they_point_to(out, tmp_path):
    draw(out, stop_after=1)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "diary.txt").write_text("mine")
    (out / "b").rmdir()
    (out / "b").symlink_to(tmp_path / "elsewhere")
    draw(out, OTHER, overwrite=True, stop_after=0)
    assert not (out / "b").is_symlink() and (tmp_path / "elsewhere" / "diary.txt").exists()


def test_clear_is_given_the_earlier_request(out):
    draw(out)
    cleared = []
    draw(out, OTHER, overwrite=True, clear=cleared.append)
    assert cleared == [REQUEST] and (out / "a.txt").exists()


def test_killed_while_it_replaces(out):
    """The old files are never taken for those of the new request; the same request continues without --overwrite."""
    draw(out)

    def killed(previous):
        (out / "a.txt").unlink()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        draw(out, OTHER, overwrite=True, clear=killed)
    assert not (out / "done").exists() and (out / "b" / "c.txt").exists()
    assert "holds another drawing (which was being replaced); choose" in refusal(out, REQUEST)
    cleared = []
    draw(out, OTHER, clear=cleared.append)
    assert cleared == [REQUEST] and read_json(out / "request.json") == OTHER


def test_complete_folder_is_not_changed(out):
    draw(out)
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.name != LOCK}
    assert draw(out, is_complete=lambda: True) is True
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.name != LOCK} == before
    assert draw(out, is_complete=lambda: False) is False
    assert draw(out, overwrite=True, is_complete=lambda: True) is False, "made again, as was asked"


def test_restart_if_changed(out):
    """An incomplete output is replaced unasked if its source has changed, a complete one is not."""
    changed = REQUEST | {"source": "y"}
    draw(out, layout=EXCLUSIVE)
    assert "(differing in source)" in refusal(out, changed, layout=EXCLUSIVE)
    (out / "done").unlink()
    draw(out, changed, layout=EXCLUSIVE, stop_after=0)
    assert set(contents(out)) == {LOCK, "request.json"}


# ------------------------------------------------------------------------------------------------ folders of others


def test_file_in_place_of_a_folder(tmp_path):
    (tmp_path / "file").write_text("")
    assert refusal(tmp_path / "file") == f"{tmp_path / 'file'} is a file; expected a folder to write to"
    with pytest.raises(OSError, match="below"):
        draw(tmp_path / "file" / "below")


def test_folder_of_something_else(out):
    out.mkdir(parents=True)
    (out / "diary.txt").write_text("mine")
    expected = "is not empty and holds no drawing; choose another folder or pass --overwrite"
    assert refusal(out) == f"{out} {expected}"
    assert [p.name for p in out.iterdir()] == ["diary.txt"], "no lock is left in it"
    draw(out, overwrite=True)
    assert (out / "diary.txt").read_text() == "mine"


@pytest.mark.parametrize("name", ["a.txt", "b", "done"])
def test_overwrite_never_replaces_files_of_something_else(out, name):
    (out / name).mkdir(parents=True)
    assert refusal(out) == f"{out} is not empty and holds no drawing; choose another folder"
    expected = f"holds {name} but no request.json of a drawing; choose another folder"
    assert refusal(out, overwrite=True) == f"{out} {expected}"
    assert [p.name for p in out.iterdir()] == [name]


@pytest.mark.parametrize("content", ["", "{", "[1]", "3", "[" * 100_000, '{"command": "paint"}', "{}"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_request_of_something_else(out, content, overwrite):
    out.mkdir(parents=True)
    (out / "request.json").write_text(content)
    expected = f"{out / 'request.json'} is not the request of a drawing; choose another folder"
    assert refusal(out, overwrite=overwrite) == expected
    assert (out / "request.json").read_text() == content


@pytest.mark.parametrize("overwrite", [False, True])
def test_exclusive_folder(out, overwrite):
    """It may hold nothing else when an output is started or replaced; resuming does not mind."""
    out.mkdir(parents=True)
    (out / "diary.txt").write_text("mine")
    expected = f"{out} holds diary.txt, which is not part of a drawing; choose another folder"
    assert refusal(out, overwrite=overwrite, layout=EXCLUSIVE) == expected
    (out / "diary.txt").unlink()
    draw(out, layout=EXCLUSIVE)
    (out / "diary.txt").write_text("mine")
    assert refusal(out, OTHER, overwrite, layout=EXCLUSIVE) == expected
    draw(out, layout=EXCLUSIVE)


def test_request_without_output_may_be_replaced(out):
    """A command that failed before it wrote anything does not keep the folder."""
    draw(out, layout=EXCLUSIVE, stop_after=0)
    (out / "b").rmdir()
    (out / "request.json.part").write_text("{")
    draw(out, OTHER, layout=EXCLUSIVE)
    assert read_json(out / "request.json") == OTHER


# -------------------------------------------------------------------------------------------------- locks and disks


def test_folder_in_use(out):
    draw(out)
    with locked(out / LOCK):
        for overwrite in (False, True):
            expected = f"{out} is in use by another command; wait for it or choose another folder"
            assert refusal(out, overwrite=overwrite) == expected
    draw(out)


def test_wait_for_a_folder_in_use(out):
    draw(out)
    waiting = threading.Thread(target=draw, args=(out,), kwargs={"wait": True, "stop_after": 0})
    with locked(out / LOCK):
        waiting.start()
        waiting.join(0.2)
        assert waiting.is_alive() and (out / "done").exists()
    waiting.join(10)
    assert not waiting.is_alive() and not (out / "done").exists()


def test_two_processes_claim_a_new_folder_at_once(out, monkeypatch):
    """The second looks for a request just before the first writes it."""

    def read_and_lose_the_race(path):
        found = read_json(path)
        if not others:
            others.append(draw_in_between())
        return found

    def draw_in_between():
        with monkeypatch.context() as patch:
            patch.setattr(files, "read_json", read_json)
            return draw(out)

    others = []
    monkeypatch.setattr(files, "read_json", read_and_lose_the_race)
    assert draw(out, is_complete=lambda: (out / "done").exists()) is True and others == [False]


@pytest.mark.parametrize("at", range(3))
def test_full_disk_while_it_replaces(out, monkeypatch, at):
    draw(out)
    write, calls = Path.write_bytes, []

    def full(path, content):
        calls.append(path)
        if len(calls) == at + 1:
            write(path, content[:3])
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(path, content)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        if at < 2:
            with pytest.raises(OSError, match=r"No space left on device: '.*request.json'"):
                draw(out, OTHER, overwrite=True)
        else:
            draw(out, OTHER, overwrite=True)
    assert not list(out.glob("*.part"))
    draw(out, OTHER, overwrite=True)
    assert read_json(out / "request.json") == OTHER


def test_write_atomically_keeps_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_atomically(path, b"old")
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, "Input/output error")))
    with pytest.raises(OSError, match=f"Input/output error: '{path}'"):
        write_atomically(path, b"new")
    assert [p.name for p in tmp_path.iterdir()] == ["file"] and path.read_bytes() == b"old"


def test_truncated_line_is_skipped(tmp_path):
    (tmp_path / "lines").write_text('{"a": 1}\n3\n{"a": 2}\n{"a": ')
    assert read_lines(tmp_path / "lines") == [{"a": 1}, {"a": 2}] and read_lines(tmp_path / "none") == []


def test_damaged_lines_are_skipped(tmp_path):
    (tmp_path / "lines").write_bytes(
        b'{"a": 1}\n\xff\xfe\n[["a", 2]]\n3\n' + b"[" * 10**5 + b'\n{"a": 3}\n{"a": \x80"}'
    )
    assert read_lines(tmp_path / "lines") == [{"a": 1}, {"a": 3}]


@pytest.mark.parametrize("content", [b"\xff", b"[[1, 2]]", b"3", b"null", b"{", b"[" * 10**5])
def test_json_that_is_no_object(tmp_path, content):
    (tmp_path / "file").write_bytes(content)
    assert read_json(tmp_path / "file") is None


def test_differences():
    assert differences(REQUEST, REQUEST) == []
    assert differences({"a": {"b": {"c": 1}}}, {"a": {"b": {"c": 2}}}) == ["a.b.c"]
    assert differences({"a": {"b": 1}}, {"a": 3, "c": None}) == ["a", "c"]
    assert differences({"a": 1, "b": 1}, {"a": 2}, ("b",)) == ["a"]
