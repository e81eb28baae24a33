"""Files that are whole or not there, and progress that shows: what every command that writes has in common."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

LOCK = ".lock"


def progress(quiet: bool = False, *more: str) -> Progress:
    """A bar with what is done and the time left, and `more` between them, as rich formats it."""
    bar, done, left = BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    return Progress("{task.description}", bar, done, *more, left, disable=quiet)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Makes what goes wrong with a file name it: a full disk does not by itself."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


def write_atomically(path: Path, content: bytes) -> None:
    """Writes to a temporary name first, so that a file with the right name is always whole."""
    part = path.with_name(path.name + ".part")
    with naming(path):
        try:
            part.write_bytes(content)
            os.replace(part, path)
        except OSError:
            part.unlink(missing_ok=True)
            raise


@contextmanager
def claimed(
    out: Path, stamp: str, request: dict[str, Any], overwrite: bool, last: str, empty: bool = False
) -> Iterator[None]:
    """Makes the folder that a command writes to and holds its lock. It must be new, or hold what the same request has
    left before, which the file `stamp` says; others are written over, or with `empty` taken away, if told to.

    The file `last` says that all is there: it is taken away first."""
    _check_ours(out, stamp, request, overwrite)  # before anything is left in a folder of somebody else's
    out.mkdir(parents=True, exist_ok=True)
    busy = f"out: {out} is being written to by another command; wait for it or choose another folder"
    with locked(out / LOCK, busy=busy):
        _check_ours(out, stamp, request, overwrite)
        (out / last).unlink(missing_ok=True)
        if empty and overwrite:
            (out / stamp).unlink(missing_ok=True)  # first: what is left of its folder is its folder no more
            for child in [child for child in out.iterdir() if child.name != LOCK]:
                shutil.rmtree(child) if child.is_dir() and not child.is_symlink() else child.unlink()
        write_atomically(out / stamp, json.dumps(request, indent=1).encode())
        yield


def _check_ours(out: Path, stamp: str, request: dict[str, Any], overwrite: bool) -> None:
    if out.exists() and not out.is_dir():
        raise ValueError(f"out: {out} is a file; expected a folder to write to")
    made = {LOCK, f"{stamp}.part"}  # all that one leaves who is killed before the stamp is there
    if overwrite or not out.is_dir() or all(child.name in made for child in out.iterdir()):
        return
    try:
        same = json.loads((out / stamp).read_text()) == request
    except (OSError, ValueError, RecursionError):
        same = False
    if not same:
        raise ValueError(f"out: {out} holds something else; choose another folder or pass --overwrite")


@contextmanager
def locked(path: Path, busy: str | None = None) -> Iterator[None]:
    """Holds the lock file at `path`. Where another process holds it: waits, or says `busy`."""
    with naming(path):
        file = path.open("wb")
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (fcntl.LOCK_NB if busy else 0))
        except BlockingIOError:
            raise ValueError(busy) from None
        yield


def append_line(path: Path, line: bytes) -> None:
    with naming(path), path.open("ab") as file:
        file.write(line + b"\n")


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The JSON objects of a file of lines, if there is one; a line that was cut short is left out."""
    found = []
    for line in path.read_text().splitlines() if path.is_file() else []:
        try:
            found.append(dict(json.loads(line)))
        except (ValueError, TypeError):
            continue
    return found


def one_line(text: object) -> str:
    """Text that can be printed: names of files may hold line breaks, colours for terminals and bytes that are no text.

    >>> one_line("two\\nlines")
    'two\\\\nlines'
    """
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in str(text))
