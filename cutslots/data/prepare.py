"""Convert a dataset from the files as published to a cache of memory-mapped arrays.

    images.npy    (rows, frames, 3, S, S) uint8        objects.npy    (rows,) uint8: number of objects in the scene
    masks.npy     (rows, frames, M, M) uint8           manifest.json  describes the cache; written last
    classes.npy   as masks, if there are classes       request.json   what was asked for

Masks are of the size of images unless the protocol evaluates at another size.

Until the cache is complete, the arrays are called .part and progress.json says how many source records are in them: an
interrupted run resumes there. Rows are written with pwrite, not through a map: a full disk is then an error, not a
crash.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import os
import shutil
import time
import warnings
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import cutslots
from cutslots.data.published import PUBLISHED
from cutslots.data.source import Row, Source, SourceRecord
from cutslots.files import Layout, Notice, errors_name_path, output_folder, progress, read_json, remove, write_json

FORMAT = 2  # version of the cache; increased whenever the same source would give other bytes
SAVE_EVERY = 2.0  # seconds between updates of progress.json
HEADER_SIZE = 128  # bytes of an .npy file before its data
ARRAYS = ("images", "masks", "classes", "objects")
LAYOUT = Layout(
    "cache",
    (*(f"{name}.npy" for name in ARRAYS), "progress.json", "manifest.json", "contact_sheet.png"),
    marker="manifest.json",
    exclusive=True,
    restart_if_changed=("source",),  # a source that was repaired after a run had failed on it
)


def prepare(
    dataset: str,
    source: Path,
    out: Path,
    size: int | None = None,
    protocol: str | None = None,
    workers: int | None = None,
    overwrite: bool = False,
    quiet: bool = False,
) -> bool:
    """Make the cache of a dataset in `out`; return False if it is there already.

    The protocol is by default the first of the dataset, and has a default size.
    """
    if dataset not in PUBLISHED:
        raise ValueError(f"dataset is {dataset!r}; expected one of {', '.join(PUBLISHED)}")
    kind = PUBLISHED[dataset]
    protocol = next(iter(kind.protocols)) if protocol is None else protocol
    if protocol not in kind.protocols:
        raise ValueError(f"protocol is {protocol!r}; for {dataset} expected one of {', '.join(kind.protocols)}")
    size = kind.protocols[protocol].size if size is None else size
    if not 1 <= size <= 1024:
        raise ValueError(f"size is {size}; expected a side of 1 to 1024 pixels")
    if workers is not None and workers < 1:
        raise ValueError(f"workers is {workers}; expected at least 1")
    if not source.exists():
        raise ValueError(f"there is no {source}; expected {kind.title} as published")
    opened = kind.open(source, size, protocol)
    request = {
        "command": "prepare",
        "format": FORMAT,
        "dataset": dataset,
        "size": size,
        "frames": kind.frames,
        "protocol": protocol,
        "source": _fingerprint(opened),
    }
    with output_folder(out, LAYOUT, request, overwrite, is_complete=partial(_is_complete, out)) as complete:
        if complete:
            return False
        done = _resume(out)
        _check_disk_space(out, opened, row_shapes(request))
        rows = _fill(out, opened, request, done, workers or os.cpu_count() or 1, quiet)
        _finish(out, opened, request, rows, quiet)
    if kind.count is not None and rows != kind.count:
        warnings.warn(_describe_partial(out, rows, kind.count, opened), Notice, stacklevel=2)
    return True


def _describe_partial(out: Path, rows: int, published: int, source: Source) -> str:
    """Return which rows of which split a source holds that is not complete."""
    splits = []
    expected = source.splits(published)
    for name, (start, end) in source.splits(rows).items():
        first, last = expected[name] if start == end else (start, end)
        where = f" (rows {first:,}-{last - 1:,})" if first < last else ""
        held, size = end - start, expected[name][1] - expected[name][0]
        splits.append(f"{name} {f'{held:,}' if held else 'none'} of {size:,}{where}")
    return f"{out}: the source holds {rows:,} of the published {published:,} rows: {', '.join(splits)}"


def _fingerprint(source: Source) -> str:
    """Return a short description of the source: number and size of its files, and a digest of their names and sizes."""
    listing = "\n".join(sorted(f"{path.name} {size}" for path, size in source.files))
    total = sum(size for _, size in source.files)
    digest = hashlib.sha256(listing.encode()).hexdigest()
    return f"{len(source.files)} files, {total} bytes, SHA-256 of names and sizes {digest}"


def _is_complete(out: Path) -> bool:
    """Return whether the cache is complete. Raise ValueError if only its manifest is missing or damaged: the arrays may
    be good."""
    manifest = read_json(out / "manifest.json") or {}
    interrupted = (out / "progress.json").is_file()
    if "rows" not in manifest and not interrupted and any((out / f"{name}.npy").exists() for name in ARRAYS):
        raise ValueError(f"{out} holds arrays but no readable manifest.json; choose another folder or pass --overwrite")
    files = manifest.get("files", {})
    complete = bool(files) and all(
        (out / name).is_file() and (out / name).stat().st_size == facts["bytes"] for name, facts in files.items()
    )
    if complete:
        (out / "progress.json").unlink(missing_ok=True)  # of a run that was killed before its last statement
    return complete


def _resume(out: Path) -> int:
    """Return how many source records an interrupted run has written; remove its files if they cannot be used."""
    state = read_json(out / "progress.json") or {}
    if {"records", "sizes"} <= state.keys():
        for name in ARRAYS:  # killed while the finished arrays were being renamed
            if (out / f"{name}.npy").exists():
                os.replace(out / f"{name}.npy", _part(out, name))
        sizes = {name: path.stat().st_size for name in ARRAYS if (path := _part(out, name)).is_file()}
        if all(sizes.get(name, -1) >= size for name, size in state["sizes"].items()):
            return int(state["records"])
    remove(out, LAYOUT.owned)
    return 0


def _part(out: Path, name: str) -> Path:
    return out / f"{name}.npy.part"


def row_shapes(request: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shape of a row of each array of a cache."""
    frames, size, kind = request["frames"], request["size"], PUBLISHED[request["dataset"]]
    mask_size = kind.protocols[request["protocol"]].mask_size or size
    masks = dict.fromkeys(("masks", "classes") if kind.has_classes else ("masks",), (frames, mask_size, mask_size))
    return {"images": (frames, 3, size, size), **masks, "objects": ()}


def _check_disk_space(out: Path, source: Source, shapes: dict[str, tuple[int, ...]]) -> None:
    """Raise ValueError if the disk is too small, where the number of rows is known: writing may take hours."""
    if source.num_rows is None:
        return
    present = sum(path.stat().st_size for path in out.iterdir())
    row = sum(int(np.prod(shape)) for shape in shapes.values())
    need, free = source.num_rows * row - present, shutil.disk_usage(out).free
    if need > free:
        raise ValueError(f"{out} needs {need / 1e9:.1f} GB more, and its disk has {free / 1e9:.1f} GB free")


def _fill(out: Path, source: Source, request: dict[str, Any], done: int, workers: int, quiet: bool) -> int:
    """Write all source records from record `done` on; return the number of rows."""
    shapes = row_shapes(request)
    lengths = {name: int(np.prod(shape)) for name, shape in shapes.items()}
    count, saved = done, time.monotonic()
    with ThreadPoolExecutor(workers) as pool, progress(quiet, "{task.fields[speed]}") as bar:
        files = {name: _open(_part(out, name)) for name in shapes}
        try:
            task = bar.add_task(request["dataset"], total=source.num_records, completed=done, speed="")
            start = time.monotonic()

            def save(records: int) -> None:
                for name, file in files.items():
                    with errors_name_path(_part(out, name)):
                        os.fsync(file)
                sizes = {name: os.fstat(file).st_size for name, file in files.items()}
                write_json(out / "progress.json", {"records": records, "sizes": sizes})

            save(done)
            records = itertools.islice(source.records(), done, None)
            for record, row in _in_order(pool, records, 4 * workers):
                for name, values in row.items():
                    with errors_name_path(_part(out, name)):
                        _write(files[name], values, HEADER_SIZE + record.row * lengths[name])
                count += 1
                bar.update(task, advance=1, speed=f"{(count - done) / (time.monotonic() - start):.0f}/s")
                if time.monotonic() - saved > SAVE_EVERY:
                    save(count)
                    saved = time.monotonic()
            save(count)
        finally:
            for file in files.values():
                os.close(file)
    if count == 0:
        raise ValueError(f"{source.files[0][0]} holds no records; expected {PUBLISHED[request['dataset']].title}")
    return source.num_rows or count  # a record is a row, unless the source says how many rows there are


def _in_order(
    pool: ThreadPoolExecutor, records: Iterable[SourceRecord], ahead: int
) -> Iterator[tuple[SourceRecord, Row]]:
    """Yield the records and their rows in order; up to `ahead` rows are made by threads meanwhile. Threads suffice:
    reading, decompressing and resizing release Python's lock."""
    waiting: deque[tuple[SourceRecord, Future[Row]]] = deque()

    def first() -> tuple[SourceRecord, Row]:
        record, future = waiting.popleft()
        try:
            return record, future.result()
        except ValueError as error:
            raise ValueError(f"{record.where}: {error}") from None

    fault, records = None, iter(records)
    while True:
        try:
            record = next(records)
        except StopIteration:
            break
        except ValueError as error:  # the rows before the fault are kept for the run that resumes
            fault = error
            break
        waiting.append((record, pool.submit(record.load)))
        if len(waiting) >= ahead:
            yield first()
    while waiting:
        yield first()
    if fault is not None:
        raise fault


def _open(path: Path) -> int:
    with errors_name_path(path):
        return os.open(path, os.O_RDWR | os.O_CREAT, 0o644)


def _write(file: int, values: np.ndarray, offset: int) -> None:
    data = memoryview(values.tobytes())
    while data:
        written = os.pwrite(file, data, offset)
        data, offset = data[written:], offset + written


def _finish(out: Path, opened: Source, request: dict[str, Any], rows: int, quiet: bool) -> None:
    """Give the arrays their headers and final names, then write the manifest."""
    facts: dict[str, Any] = {}
    for name, shape in row_shapes(request).items():
        part, path = _part(out, name), out / f"{name}.npy"
        with errors_name_path(part), part.open("r+b") as file:
            file.write(_header((rows, *shape)))
            os.fsync(file.fileno())
        expected = HEADER_SIZE + rows * int(np.prod(shape))
        if part.stat().st_size != expected:
            raise ValueError(
                f"{part} has {part.stat().st_size:,} bytes; expected {expected:,}: delete {out} and start again"
            )
        facts[path.name] = {"bytes": expected, "sha256": sha256(part)}
    kind = PUBLISHED[request["dataset"]]
    protocol = kind.protocols[request["protocol"]]
    manifest = {
        "request": request,
        "rows": rows,
        "published": kind.count,
        "splits": opened.splits(rows),
        "objects": protocol.num_objects,
        "crop": protocol.crop,
        "resize": protocol.resize,
        "ignore_label": kind.ignore_label,
        "files": facts,
        "source": _checksums(opened, quiet),
        "version": cutslots.__version__,
    }
    for name in row_shapes(request):
        os.replace(_part(out, name), out / f"{name}.npy")
    write_json(out / "manifest.json", manifest)
    (out / "progress.json").unlink(missing_ok=True)


def _header(shape: tuple[int, ...]) -> bytes:
    data = io.BytesIO()
    np.lib.format.write_array_header_1_0(data, {"descr": "|u1", "fortran_order": False, "shape": shape})
    assert len(data.getvalue()) == HEADER_SIZE, "the .npy header has another length"
    return data.getvalue()


def _checksums(source: Source, quiet: bool) -> list[dict[str, Any]]:
    """Return name, size and SHA-256 of archives and record files, [] for single images, which are too many."""
    records = [file for file in source.files if file[0].suffix not in (".png", ".jpg")]
    with progress(quiet) as bar:
        files = bar.track(records, description="checksums")
        return [{"name": path.name, "bytes": size, "sha256": sha256(path)} for path, size in files]


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with errors_name_path(path), path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
