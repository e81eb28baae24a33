"""Atomic files, locks, output folders and progress bars: what every command that writes has in common.

`output_folder` is the one protocol by which a command claims, resumes and replaces the folder that it writes to:

    .lock           locked while a command writes
    request.json    what was asked for (run.json in a training run); it is written before anything else
    MARKER          a file that says that the output is complete; it is removed first and written last

A process can be killed at any moment. The same command then resumes, and an incomplete output is never taken for a
complete one. Files that the command did not write are never removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

LOCK = ".lock"
REPLACING = "replacing"  # key of a request file: the request whose output replaces this one


class Notice(UserWarning):
    """Something that a user should know. Commands print its text alone, once."""


def progress(quiet: bool = False, *columns: str) -> Progress:
    """Return a progress bar with the count and the time left; `columns` are further columns in rich's format."""
    bar, done, left = BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    return Progress("{task.description}", bar, done, *columns, left, disable=quiet)


@contextmanager
def errors_name_path(path: Path) -> Iterator[None]:
    """Re-raise every OSError with the path in its message: the error of a full disk does not name the file."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file under a temporary name, then rename it: a file with the final name is always complete."""
    part = path.with_name(path.name + ".part")
    with errors_name_path(path):
        try:
            part.write_bytes(content)
            os.replace(part, path)
        except OSError:
            part.unlink(missing_ok=True)
            raise


@contextmanager
def locked(path: Path, busy: str | None = None) -> Iterator[None]:
    """Hold the lock file at `path`. If another process holds it, wait, or raise ValueError(busy) if `busy` is given."""
    with errors_name_path(path):
        file = path.open("wb")
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (fcntl.LOCK_NB if busy else 0))
        except BlockingIOError:
            raise ValueError(busy) from None
        yield


def append_line(path: Path, line: bytes) -> None:
    """Append a line to a file."""
    with errors_name_path(path), path.open("ab") as file:
        file.write(line + b"\n")


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the JSON objects in a file of lines, [] if there is no file. Truncated and other lines are skipped."""
    found = []
    for line in path.read_bytes().splitlines() if path.is_file() else []:
        with contextlib.suppress(ValueError, RecursionError):  # not JSON, or not text
            found.append(json.loads(line))
    return [value for value in found if isinstance(value, dict)]


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in a file; None if there is no file, or it cannot be read, or it is not an object."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def escape_unprintable(text: object) -> str:
    """Return text that can be printed: file names may hold line breaks, terminal colors and bytes that are not text.

    >>> escape_unprintable("two\\nlines")
    'two\\\\nlines'
    """
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in str(text))


# ------------------------------------------------------------------------------------------------------ output folders


@dataclass(frozen=True)
class Layout:
    """What a command writes to its output folder."""

    kind: str
    """What messages call the output: "run", "prediction"."""
    owned: Collection[str]
    """Names of the files and folders that the command writes, besides the request and the lock."""
    marker: str | None = None
    """The file that says that the output is complete."""
    request: str = "request.json"
    """The file that holds the request."""
    exclusive: bool = False
    """Whether the folder must hold nothing else when an output is started or replaced."""
    may_change: Collection[str] = ()
    """Keys of the request that may differ when the command resumes."""
    restart_if_changed: Collection[str] = ()
    """Keys of the request whose change replaces an incomplete output unasked."""


@contextmanager
def output_folder(
    path: Path,
    layout: Layout,
    request: dict[str, Any],
    overwrite: bool | None = False,
    *,
    is_complete: Callable[[], bool] | None = None,
    clear: Callable[[dict[str, Any]], None] | None = None,
    wait: bool = False,
) -> Iterator[bool]:
    """Create the folder of a command, or resume or replace what it wrote before, and hold its lock.

    A folder with the same request is resumed. With another request it is refused, or replaced if `overwrite` is set; if
    `overwrite` is None, the command has no such option. A request is any JSON-able dictionary. Its key "command" tells
    the requests of several commands apart.

    Yields whether `is_complete`, called for a folder with the same request, says that nothing is left to do; such a
    folder is not changed. `clear` removes what an earlier request, which it is given, has written; by default all that
    the layout owns. `wait` waits for another process that holds the lock, instead of refusing.
    """
    request = json.loads(json.dumps(request, default=str))
    _plan(path, layout, request, overwrite)  # leaves nothing in a folder of something else
    with errors_name_path(path):
        path.mkdir(parents=True, exist_ok=True)
    busy = None if wait else f"{path} is in use by another command; wait for it or choose another folder"
    with locked(path / LOCK, busy):
        plan, previous = _plan(path, layout, request, overwrite)
        if plan == "resume" and is_complete is not None and is_complete():
            yield True
            return
        if layout.marker:
            (path / layout.marker).unlink(missing_ok=True)
        if plan == "replace":
            write_json(path / layout.request, previous | {REPLACING: request})  # killed from here on, this is redone
            clear(previous) if clear else remove(path, layout.owned)
        if read_json(path / layout.request) != request:
            write_json(path / layout.request, request)
        yield False


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write a JSON object atomically, indented for people to read."""
    write_atomically(path, json.dumps(value, indent=1).encode())


def remove(folder: Path, names: Collection[str]) -> None:
    """Remove these files and subfolders of a folder, and what is left of files that were being written."""
    for child in folder.iterdir():
        if child.name in names or child.name.removesuffix(".part") in names:
            shutil.rmtree(child) if child.is_dir() and not child.is_symlink() else child.unlink()


def _plan(
    path: Path, layout: Layout, request: dict[str, Any], overwrite: bool | None
) -> tuple[Literal["start", "resume", "replace"], dict[str, Any]]:
    """Return what to do with a folder and the request of its output; raise ValueError if the folder is refused."""
    if path.exists() and not path.is_dir():
        raise ValueError(f"{path} is a file; expected a folder to write to")
    own = {LOCK, layout.request, f"{layout.request}.part"}
    # Listed before the request is read: another process may write it at any time, and its other files only after it.
    found = {child.name for child in path.iterdir()} if path.is_dir() else set()
    names, previous = sorted(found - own), read_json(path / layout.request)
    if previous is None or previous.get("command") != request.get("command"):
        if layout.request in found:
            raise ValueError(f"{path / layout.request} is not the request of a {layout.kind}; choose another folder")
        _check_foreign(path, layout, names, overwrite)
        return "start", {}
    replacing = previous.pop(REPLACING, None)
    changed = differences(previous, request, layout.may_change)
    if not names:
        return "start", previous
    if not (changed or overwrite or replacing):
        return "resume", previous
    _check_exclusive(path, layout, names)
    incomplete = layout.marker is not None and layout.marker not in names
    restart = incomplete and replacing is None and set(changed) <= set(layout.restart_if_changed)
    if not (overwrite or restart or replacing == request):
        why = f"differing in {', '.join(changed)}" if changed else "which was being replaced"
        advice = "delete it" if overwrite is None else "pass --overwrite"
        raise ValueError(f"{path} holds another {layout.kind} ({why}); choose another folder or {advice}")
    return "replace", previous


def _check_foreign(path: Path, layout: Layout, names: list[str], overwrite: bool | None) -> None:
    """Raise ValueError if a folder without a request of this command holds anything that would be lost.

    With `overwrite`, files of other names may be there: they stay."""
    _check_exclusive(path, layout, names)
    taken = [name for name in names if name.removesuffix(".part") in layout.owned]
    if overwrite and taken:
        raise ValueError(f"{path} holds {taken[0]} but no {layout.request} of a {layout.kind}; choose another folder")
    if names and not overwrite:
        more = "" if taken or overwrite is None else " or pass --overwrite"
        raise ValueError(f"{path} is not empty and holds no {layout.kind}; choose another folder{more}")


def _check_exclusive(path: Path, layout: Layout, names: list[str]) -> None:
    strange = [name for name in names if name.removesuffix(".part") not in layout.owned]
    if layout.exclusive and strange:
        raise ValueError(f"{path} holds {strange[0]}, which is not part of a {layout.kind}; choose another folder")


def differences(old: dict[str, Any], new: dict[str, Any], ignored: Collection[str] = ()) -> list[str]:
    """Return the keys whose values differ; those of nested dictionaries are joined by dots.

    >>> differences({"lr": 1, "encoder": {"name": "cnn", "channels": 8}}, {"encoder": {"name": "cnn", "channels": 16}})
    ['encoder.channels', 'lr']
    """
    found = []
    for key in [*new, *(key for key in old if key not in new)]:
        if key in ignored or (key in old and key in new and old[key] == new[key]):
            continue
        if isinstance(old.get(key), dict) and isinstance(new.get(key), dict):
            found += [f"{key}.{name}" for name in differences(old[key], new[key])]
        else:
            found.append(key)
    return found
