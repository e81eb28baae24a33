"""Files that are whole or not there, and progress that shows: what every command that writes has in common."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn


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


def claim(out: Path, stamp: str, request: dict[str, Any], overwrite: bool) -> None:
    """Makes the folder that a command writes to. It must be new, or hold what the same request has left before, which
    the file `stamp` says."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"out: {out} is a file; expected a folder to write to")
    if out.is_dir() and any(out.iterdir()) and not overwrite:
        try:
            same = json.loads((out / stamp).read_text()) == request
        except (OSError, ValueError):
            same = False
        if not same:
            raise ValueError(f"out: {out} holds something else; choose another folder or pass --overwrite")
    out.mkdir(parents=True, exist_ok=True)
    write_atomically(out / stamp, json.dumps(request, indent=1).encode())


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
