"""Read TFRecord files without TensorFlow.

A record is its length (8 bytes), a checksum of the length, the content and a checksum of the content. The file may be
compressed with GZIP. The content is an `Example`, a protobuf message that maps names to lists of byte strings, floats
or integers:

    Example { 1: Features { 1: { 1: name, 2: Feature { 1: bytes | 2: floats | 3: ints } }, ... } }

This module has its own parser. CLEVR stores each byte of an image as a string of one byte, over a million in a record.
Protobuf makes an object of each; here they are one strided view, because each takes exactly three bytes.

Nothing in a file is trusted: lengths are bounded, and the content may end anywhere.
"""

from __future__ import annotations

import gzip
import io
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
from crc32c import crc32c

MAX_RECORD_BYTES = 64 * 2**20  # a scene of CLEVR has 3.2 million, a video of MOVi less than 40 million
CHUNK = 2**20  # bytes read from a compressed stream at once, so that a wrong length costs no more memory
MAX_JOINED_BYTES = 8 * CHUNK  # of records that are joined from a list of chunks

BYTES, FLOATS, INTS = 1, 2, 3  # kinds of features
KIND_NAMES = ("nothing", "byte strings", "floats", "integers")


class DamagedFile(ValueError):
    """A file that is not a valid TFRecord file. The message names the record."""


def checksum(data: bytes | memoryview) -> int:
    """Return the CRC-32C, rotated and shifted as TFRecord stores it."""
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def read_records(path: Path) -> Iterator[bytes]:
    """Yield the content of one record after another, in constant memory.

    Raise `DamagedFile` at a record that is truncated or does not match its checksums.
    """
    with path.open("rb") as file:
        size = path.stat().st_size
        start = file.read(12)
        file.seek(0)
        is_plain = len(start) == 12 and checksum(start[:8]) == int.from_bytes(start[8:], "little")
        is_compressed = not is_plain and start[:2] == b"\x1f\x8b"
        if size == 0:
            raise DamagedFile(f"{path} is empty; expected a TFRecord file")
        stream = gzip.GzipFile(fileobj=file) if is_compressed else file
        index = 0
        while True:
            try:
                record = _next_record(stream, None if is_compressed else size - file.tell())  # type: ignore[arg-type]
            except EOFError:
                raise DamagedFile(f"{path} ends early: record {index} is truncated") from None
            except (DamagedFile, gzip.BadGzipFile, zlib.error) as error:
                raise DamagedFile(f"{path} is damaged at record {index}: {error}") from None
            except OSError as error:
                raise OSError(error.errno, error.strerror, str(path)) from None
            if record is None:
                return
            yield record
            index += 1


def _next_record(stream: BinaryIO, left: int | None) -> bytes | None:
    """Return the next record, None at the end. `left` is the rest of the file in bytes, None if it is compressed."""
    header = _read_exactly(stream, 12, may_end=True)
    if not header:
        return None
    length, expected = struct.unpack("<QI", header)
    if checksum(header[:8]) != expected:
        raise DamagedFile("its length does not match its checksum; expected a TFRecord file")
    if length > MAX_RECORD_BYTES:
        raise DamagedFile(f"its length is {length:,} bytes; expected at most {MAX_RECORD_BYTES:,}")
    if left is not None and length + 16 > left:
        raise EOFError
    data = _read_exactly(stream, length)
    if checksum(data) != int.from_bytes(_read_exactly(stream, 4), "little"):
        raise DamagedFile("its content does not match its checksum")
    return data


def _read_exactly(stream: BinaryIO, count: int, may_end: bool = False) -> bytes:
    chunks = _read_chunks(stream, count, may_end)
    if count <= MAX_JOINED_BYTES:
        return b"".join(chunks)
    # Slower, but it holds a large record once; joining a list of chunks would hold it twice.
    data = io.BytesIO()
    for chunk in chunks:
        data.write(chunk)
    return data.getvalue()


def _read_chunks(stream: BinaryIO, count: int, may_end: bool) -> Iterator[bytes]:
    missing = count
    while missing:
        chunk = stream.read(min(missing, CHUNK))
        if not chunk:
            if may_end and missing == count:
                return
            raise EOFError
        missing -= len(chunk)
        yield chunk


# ------------------------------------------------------------------------------------------------------------ Examples


class Feature(NamedTuple):
    """One list of an Example, not decoded yet."""

    kind: int  # 0 if it is empty
    data: memoryview

    def strings(self) -> list[bytes]:
        self._expect(BYTES)
        return [bytes(value) for field, value in _fields(self.data) if field == 1 and isinstance(value, memoryview)]

    def single_bytes(self) -> np.ndarray:
        """Return a list of strings of one byte each as a uint8 array, a view of the record."""
        self._expect(BYTES)
        count, rest = divmod(len(self.data), 3)
        heads = np.ndarray((count,), "<u2", self.data, strides=(3,)) if count else np.empty(0, "<u2")
        if rest or not (heads == 0x010A).all():  # field 1, one byte long
            raise DamagedFile("it has strings of other lengths; expected single bytes")
        return np.frombuffer(self.data, dtype=np.uint8)[2::3]

    def floats(self) -> np.ndarray:
        self._expect(FLOATS)
        chunks = [bytes(value) for field, value in _fields(self.data) if field == 1 and isinstance(value, memoryview)]
        if any(len(chunk) % 4 for chunk in chunks):
            raise DamagedFile("a list of floats has a length that is no multiple of 4 bytes")
        return np.frombuffer(b"".join(chunks), dtype="<f4")

    def ints(self) -> np.ndarray:
        self._expect(INTS)
        values: list[int] = []
        for field, value in _fields(self.data):
            if field != 1:
                continue
            if isinstance(value, int):
                values.append(value)
                continue
            at = 0
            while at < len(value):
                number, at = _varint(value, at)
                values.append(number)
        return np.array(values, dtype=np.uint64).astype(np.int64)

    def _expect(self, kind: int) -> None:
        if self.kind != kind:
            raise DamagedFile(f"a feature holds {KIND_NAMES[self.kind]}; expected {KIND_NAMES[kind]}")


def parse_example(record: bytes) -> dict[str, Feature]:
    """Return the features of an Example by name. As in protobuf, the last one wins; unknown fields are skipped."""
    features: dict[str, Feature] = {}
    for field, message in _fields(memoryview(record)):
        for inner, entry in _fields(_message(message)) if field == 1 else ():
            if inner == 1:
                name, feature = _entry(_message(entry))
                features[name] = feature
    return features


def _entry(entry: memoryview) -> tuple[str, Feature]:
    name, feature = "", Feature(0, memoryview(b""))
    for field, value in _fields(entry):
        if field == 1:
            try:
                name = bytes(_message(value)).decode()
            except UnicodeDecodeError:
                raise DamagedFile("the name of a feature is not UTF-8") from None
        elif field == 2:
            for kind, data in _fields(_message(value)):
                if kind in (BYTES, FLOATS, INTS):
                    feature = Feature(kind, _message(data))
    return name, feature


def _message(value: memoryview | int) -> memoryview:
    if isinstance(value, int):
        raise DamagedFile("it is no Example: it has an integer in place of a message")
    return value


def _fields(data: memoryview) -> Iterator[tuple[int, memoryview | int]]:
    """Yield the number and the value of each field of a message: an integer, or the bytes of anything else."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        wire = tag & 7
        if wire == 0:
            value, at = _varint(data, at)
            yield tag >> 3, value
            continue
        if wire not in (1, 2, 5):
            raise DamagedFile(f"it is no Example: a field has wire type {wire}")
        length = {1: 8, 5: 4}.get(wire, 0)
        if wire == 2:
            length, at = _varint(data, at)
        if length > len(data) - at:
            raise DamagedFile("it is no Example: a field is longer than its message")
        yield tag >> 3, data[at : at + length]
        at += length


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    """Return an integer of up to 64 bits, stored seven bits to the byte, and the position after it."""
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            raise DamagedFile("it is no Example: an integer is truncated")
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value & 0xFFFFFFFFFFFFFFFF, at
    raise DamagedFile("it is no Example: an integer has more than 64 bits")
