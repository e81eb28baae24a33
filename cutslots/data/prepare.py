"""From the files as published to a cache: arrays that are mapped into memory, and a manifest that says what they are.

    images.npy    (rows, frames, 3, S, S) uint8        objects.npy    (rows,) uint8: how many the scene has
    masks.npy     (rows, frames, S, S) uint8           manifest.json  written last: where it is, all is whole

Until then the arrays are called .part, and progress.json says how many pieces of the source are in them: an interrupted
run goes on there. Rows are written to the file, not through a map: a disk that fills is then an error, not a crash.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import os
import shutil
import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

import cutslots
from cutslots.data.published import DATASETS, Columns, Piece, Source
from cutslots.disk import locked, naming, progress, write_atomically

FORMAT = 1  # of the cache; raised whenever the same source would give other bytes
SAVE_EVERY = 2.0  # seconds between notes of how far it is
HEAD = 128  # bytes of an .npy file before its numbers


def prepare(
    dataset: str,
    source: Path,
    out: Path,
    size: int = 128,
    splits: str = "clevrtex",
    workers: int | None = None,
    overwrite: bool = False,
    quiet: bool = False,
) -> bool:
    """Makes the cache of a dataset in `out`; False if it was there already."""
    if dataset not in DATASETS:
        raise ValueError(f"dataset is {dataset!r}; expected one of {', '.join(DATASETS)}")
    kind = DATASETS[dataset]
    if splits not in kind.conventions:
        raise ValueError(f"splits is {splits!r}; for {dataset} expected one of {', '.join(kind.conventions)}")
    if not 1 <= size <= 1024:
        raise ValueError(f"size is {size}; expected a side of 1 to 1024 pixels")
    if workers is not None and workers < 1:
        raise ValueError(f"workers is {workers}; expected at least 1")
    if not source.exists():
        raise ValueError(f"there is no {source}; expected {kind.title} as published")
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file; expected a folder to write to")
    with naming(out):
        out.mkdir(parents=True, exist_ok=True)
    busy = f"{out} is being prepared by another command; wait for it or choose another --out"
    with locked(out / ".lock", busy=busy):
        opened = kind.open(source, size, splits)
        request = {
            "format": FORMAT,
            "dataset": dataset,
            "size": size,
            "frames": kind.frames,
            "convention": splits,
            "source": _fingerprint(opened),
        }
        done = _resume(out, request, overwrite)
        if done is None:
            return False
        _room(out, opened, size, kind.frames)
        rows = _fill(out, opened, request, done, workers or os.cpu_count() or 1, quiet)
        _finish(out, opened, request, rows, quiet)
        return True


def _fingerprint(source: Source) -> dict[str, Any]:
    """What the source is, short: how many files, and a digest of their names and sizes."""
    listing = "\n".join(sorted(f"{path.name} {size}" for path, size in source.files))
    return {
        "files": len(source.files),
        "bytes": sum(size for _, size in source.files),
        "names_and_sizes": hashlib.sha256(listing.encode()).hexdigest(),
    }


def _resume(out: Path, request: dict[str, Any], overwrite: bool) -> int | None:
    """How many pieces an earlier run of the same request has left here; None if it has finished."""
    ours = {".lock", "progress.json", "manifest.json", "contact_sheet.png"} | {
        f"{name}.npy" for name in _shapes(request)
    }
    others = [path for path in out.iterdir() if path.name.removesuffix(".part") not in ours]
    if others:
        raise ValueError(f"{out} holds {others[0].name}, which is of no cache; choose another folder")
    found = _load(out / "manifest.json") or _load(out / "progress.json") or None  # garbage is as good as nothing
    if found is None and not overwrite and any((out / f"{name}.npy").exists() for name in _shapes(request)):
        raise ValueError(f"{out} holds arrays but no readable manifest.json; choose another folder or pass --overwrite")
    before = found.get("request") if found else None
    if found is not None and before != request:
        differ = [k for k in request if not isinstance(before, dict) or before.get(k) != request[k]]
        # A source that was mended since a run failed on it: that run's rows are dropped, a finished cache never.
        if not overwrite and (differ != ["source"] or "rows" in found):
            raise ValueError(
                f"{out} holds another cache (its {', '.join(differ)} differ); pass --overwrite to replace it"
            )
        found = None
    if found is not None and "rows" in found and not overwrite and _whole(out, found):
        (out / "progress.json").unlink(missing_ok=True)  # of a run that was killed between the last two lines of it
        return None
    (out / "manifest.json").unlink(missing_ok=True)  # first: what is being replaced is whole no more
    if found is not None and not overwrite and {"pieces", "sizes"} <= found.keys():
        for name in _shapes(request):  # killed while the finished arrays were being named
            if (out / f"{name}.npy").exists():
                os.replace(out / f"{name}.npy", _part(out, name))
        sizes = {name: path.stat().st_size for name in _shapes(request) if (path := _part(out, name)).is_file()}
        if all(sizes.get(name, -1) >= size for name, size in found["sizes"].items()):
            return int(found["pieces"])
    for path in out.iterdir():
        if path.name != ".lock":
            path.unlink()
    return 0


def _load(path: Path) -> dict[str, Any] | None:
    try:
        return dict(json.loads(path.read_text()))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError):
        return {}


def _whole(out: Path, manifest: dict[str, Any]) -> bool:
    files = manifest.get("files", {})
    return bool(files) and all(
        (out / name).is_file() and (out / name).stat().st_size == facts["bytes"] for name, facts in files.items()
    )


def _part(out: Path, name: str) -> Path:
    return out / f"{name}.npy.part"


def _shapes(request: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The shape of a row of each array."""
    frames, size = request["frames"], request["size"]
    return {"images": (frames, 3, size, size), "masks": (frames, size, size), "objects": ()}


def _room(out: Path, source: Source, size: int, frames: int) -> None:
    """Where the number of rows is known, a disk that cannot hold them is found out before an hour has passed."""
    if source.rows is None:
        return
    there = sum(path.stat().st_size for path in out.iterdir())
    need, free = source.rows * frames * 4 * size * size - there, shutil.disk_usage(out).free
    if need > free:
        raise ValueError(f"{out} needs {need / 1e9:.1f} GB more, and its disk has {free / 1e9:.1f} GB free")


def _fill(out: Path, source: Source, request: dict[str, Any], done: int, workers: int, quiet: bool) -> int:
    """Writes all pieces from number `done` on; the number of rows."""
    shapes = _shapes(request)
    lengths = {name: int(np.prod(shape)) for name, shape in shapes.items()}
    count, saved = done, time.monotonic()
    with ThreadPoolExecutor(workers) as pool, progress(quiet, "{task.fields[speed]}") as bar:
        files = {name: _open(_part(out, name)) for name in shapes}
        try:
            task = bar.add_task(request["dataset"], total=source.pieces_expected, completed=done, speed="")
            began = time.monotonic()

            def save(pieces: int) -> None:
                for name, file in files.items():
                    with naming(_part(out, name)):
                        os.fsync(file)
                sizes = {name: os.fstat(file).st_size for name, file in files.items()}
                note = {"request": request, "pieces": pieces, "sizes": sizes}
                write_atomically(out / "progress.json", json.dumps(note).encode())

            save(done)
            pieces = itertools.islice(source.pieces(), done, None)
            for piece, columns in _in_order(pool, pieces, 4 * workers):
                for name, values in columns.items():
                    with naming(_part(out, name)):
                        _write(files[name], values, HEAD + piece.row * lengths[name])
                count += 1
                bar.update(task, advance=1, speed=f"{(count - done) / (time.monotonic() - began):.0f}/s")
                if time.monotonic() - saved > SAVE_EVERY:
                    save(count)
                    saved = time.monotonic()
            save(count)
        finally:
            for file in files.values():
                os.close(file)
    if count == 0:
        raise ValueError(f"{source.files[0][0]} holds no records; expected {DATASETS[request['dataset']].title}")
    return source.rows or count  # a piece is a row, unless the source has said how many rows there are


def _in_order(pool: ThreadPoolExecutor, pieces: Iterable[Piece], ahead: int) -> Iterator[tuple[Piece, Columns]]:
    """What the pieces hold, in their order, some being made while one is written. Reading, decompressing and resizing
    let go of Python's lock: threads are enough."""
    waiting: deque[tuple[Piece, Future[Columns]]] = deque()

    def first() -> tuple[Piece, Columns]:
        piece, future = waiting.popleft()
        try:
            return piece, future.result()
        except ValueError as error:
            raise ValueError(f"{piece.where}: {error}") from None

    fault, pieces = None, iter(pieces)
    while True:
        try:
            piece = next(pieces)
        except StopIteration:
            break
        except ValueError as error:  # what was read before the fault is kept for the run that goes on
            fault = error
            break
        waiting.append((piece, pool.submit(piece.make)))
        if len(waiting) >= ahead:
            yield first()
    while waiting:
        yield first()
    if fault is not None:
        raise fault


def _open(path: Path) -> int:
    with naming(path):
        return os.open(path, os.O_RDWR | os.O_CREAT, 0o644)


def _write(file: int, values: np.ndarray, at: int) -> None:
    data = memoryview(values.tobytes())
    while data:
        wrote = os.pwrite(file, data, at)
        data, at = data[wrote:], at + wrote


def _finish(out: Path, opened: Source, request: dict[str, Any], rows: int, quiet: bool) -> None:
    """Gives the arrays their headers and names, and writes the manifest."""
    facts: dict[str, Any] = {}
    for name, shape in _shapes(request).items():
        part, path = _part(out, name), out / f"{name}.npy"
        with naming(part), part.open("r+b") as file:
            file.write(_header((rows, *shape)))
            os.fsync(file.fileno())
        expected = HEAD + rows * int(np.prod(shape))
        if part.stat().st_size != expected:
            raise ValueError(
                f"{part} has {part.stat().st_size:,} bytes; expected {expected:,}: delete {out} and start again"
            )
        facts[path.name] = {"bytes": expected, "sha256": sha256(part)}
    kind = DATASETS[request["dataset"]]
    convention = kind.conventions[request["convention"]]
    manifest = {
        "request": request,
        "rows": rows,
        "published": kind.count,
        "splits": opened.splits(rows),
        "objects": convention.objects,
        "crop": convention.box or "the middle 0.8 of a side",
        "files": facts,
        "source": _checksums(opened, quiet),
        "version": cutslots.__version__,
    }
    for name in _shapes(request):
        os.replace(_part(out, name), out / f"{name}.npy")
    write_atomically(out / "manifest.json", json.dumps(manifest, indent=1).encode())
    (out / "progress.json").unlink(missing_ok=True)


def _header(shape: tuple[int, ...]) -> bytes:
    data = io.BytesIO()
    np.lib.format.write_array_header_1_0(data, {"descr": "|u1", "fortran_order": False, "shape": shape})
    assert len(data.getvalue()) == HEAD, "an .npy header of another length"
    return data.getvalue()


def _checksums(source: Source, quiet: bool) -> list[dict[str, Any]]:
    """Name, bytes and SHA-256 of archives and record files. Single pictures are too many: see `_fingerprint`."""
    if source.files[0][0].suffix == ".png":
        return []
    with progress(quiet) as bar:
        files = bar.track(source.files, description="checksums")
        return [{"name": path.name, "bytes": size, "sha256": sha256(path)} for path, size in files]


def sha256(path: Path) -> str:
    with naming(path), path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
