"""TFRecord files without TensorFlow: records in a stream, `Example`s taken apart.

A record is its length (8 bytes), a checksum of that, the content, a checksum of that; the file may be compressed with
GZIP. An `Example` is a protobuf message, a map from names to lists of byte strings, floats or whole numbers:

    Example { 1: Features { 1: { 1: name, 2: Feature { 1: bytes | 2: floats | 3: ints } }, ... } }

We take it apart ourselves. CLEVR stores each byte of a picture as a string of its own, over a million in a record:
protobuf makes an object of each, where we see that all have the same three bytes' shape and take every third.

Nothing in the file is trusted: not a length, not that what follows is there.
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

LARGEST = 64 * 2**20  # bytes of a record; a scene of CLEVR has 3.2 million, a video of MOVi less than 40
PIECE = 2**20  # what is asked of a compressed stream at once: a length that lies costs no more
JOINED = 8 * PIECE


class Broken(ValueError):
    """A file that is not what it says; the sentence names the record."""


def checksum(data: bytes | memoryview) -> int:
    """CRC-32C, turned and shifted as TFRecord has it."""
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def read_records(path: Path) -> Iterator[bytes]:
    """The contents of one record after another, in constant memory.

    A file that ends inside a record, or whose bits do not fit their checksums, raises `Broken` at that record."""
    with path.open("rb") as file:
        size = path.stat().st_size
        start = file.read(12)
        file.seek(0)
        plain = len(start) == 12 and checksum(start[:8]) == int.from_bytes(start[8:], "little")
        packed = not plain and start[:2] == b"\x1f\x8b"
        if size == 0:
            raise Broken(f"{path} is empty; expected a TFRecord file")
        stream = gzip.GzipFile(fileobj=file) if packed else file
        number = 0
        while True:
            try:
                record = _next_record(stream, None if packed else size - file.tell())  # type: ignore[arg-type]
            except EOFError:
                raise Broken(f"{path} ends early: record {number} is cut short") from None
            except (Broken, gzip.BadGzipFile, zlib.error) as error:
                raise Broken(f"{path} is damaged at record {number}: {error}") from None
            except OSError as error:
                raise OSError(error.errno, error.strerror, str(path)) from None
            if record is None:
                return
            yield record
            number += 1


def _next_record(stream: BinaryIO, left: int | None) -> bytes | None:
    """The next record, None at the end. `left` are the bytes that the file still has, where that is known."""
    head = _exactly(stream, 12, may_end=True)
    if not head:
        return None
    length, check = struct.unpack("<QI", head)
    if checksum(head[:8]) != check:
        raise Broken("its length does not fit its checksum; expected a TFRecord file")
    if length > LARGEST:
        raise Broken(f"it says that it has {length:,} bytes; expected at most {LARGEST:,}")
    if left is not None and length + 16 > left:
        raise EOFError
    data = _exactly(stream, length)
    if checksum(data) != int.from_bytes(_exactly(stream, 4), "little"):
        raise Broken("its content does not fit its checksum")
    return data


def _exactly(stream: BinaryIO, count: int, may_end: bool = False) -> bytes:
    pieces = _pieces(stream, count, may_end)
    if count <= JOINED:
        return b"".join(pieces)
    found = (
        io.BytesIO()
    )  # slower, but holds a large record once, where a list of its pieces would be joined into another
    for piece in pieces:
        found.write(piece)
    return found.getvalue()


def _pieces(stream: BinaryIO, count: int, may_end: bool) -> Iterator[bytes]:
    missing = count
    while missing:
        piece = stream.read(min(missing, PIECE))
        if not piece:
            if may_end and missing == count:
                return
            raise EOFError
        missing -= len(piece)
        yield piece


# ------------------------------------------------------------------------------------------------------------ Examples


class Feature(NamedTuple):
    """One list of an Example, still as it lies in the record; asked for what it is, it is taken apart."""

    kind: int  # 1 bytes, 2 floats, 3 whole numbers
    data: memoryview

    def strings(self) -> list[bytes]:
        self._expect(1, "byte strings")
        return [bytes(value) for field, value in _fields(self.data) if field == 1 and isinstance(value, memoryview)]

    def octets(self) -> np.ndarray:
        """A list of strings of one byte each as an array: a view of the record, nothing is copied."""
        self._expect(1, "byte strings")
        count, rest = divmod(len(self.data), 3)
        heads = np.ndarray((count,), "<u2", self.data, strides=(3,)) if count else np.empty(0, "<u2")
        if rest or not (heads == 0x010A).all():  # field 1, one byte long
            raise Broken("a list that should be of single bytes is not")
        return np.frombuffer(self.data, dtype=np.uint8)[2::3]

    def floats(self) -> np.ndarray:
        self._expect(2, "floats")
        pieces = [bytes(value) for field, value in _fields(self.data) if field == 1 and isinstance(value, memoryview)]
        if any(len(piece) % 4 for piece in pieces):
            raise Broken("a list of floats has a broken length")
        return np.frombuffer(b"".join(pieces), dtype="<f4")

    def ints(self) -> np.ndarray:
        self._expect(3, "whole numbers")
        found: list[int] = []
        for field, value in _fields(self.data):
            if field != 1:
                continue
            if isinstance(value, int):
                found.append(value)
                continue
            at = 0
            while at < len(value):
                number, at = _varint(value, at)
                found.append(number)
        return np.array(found, dtype=np.uint64).astype(np.int64)

    def _expect(self, kind: int, name: str) -> None:
        if self.kind != kind:
            raise Broken(
                f"a feature holds {('nothing', 'byte strings', 'floats', 'whole numbers')[self.kind]}, not {name}"
            )


def parse_example(record: bytes) -> dict[str, Feature]:
    """The features of an Example by name. As in protobuf, the last of several wins and what is unknown is skipped."""
    found: dict[str, Feature] = {}
    for field, features in _fields(memoryview(record)):
        for inner, entry in _fields(_message(features)) if field == 1 else ():
            if inner == 1:
                name, feature = _entry(_message(entry))
                found[name] = feature
    return found


def _entry(entry: memoryview) -> tuple[str, Feature]:
    name, feature = "", Feature(0, memoryview(b""))
    for field, value in _fields(entry):
        if field == 1:
            try:
                name = bytes(_message(value)).decode()
            except UnicodeDecodeError:
                raise Broken("the name of a feature is not text") from None
        elif field == 2:
            for kind, data in _fields(_message(value)):
                if kind in (1, 2, 3):
                    feature = Feature(kind, _message(data))
    return name, feature


def _message(value: memoryview | int) -> memoryview:
    if isinstance(value, int):
        raise Broken("it is no Example: a number stands where a message should")
    return value


def _fields(data: memoryview) -> Iterator[tuple[int, memoryview | int]]:
    """Number and value of each field of a message: a number, or the bytes of what is not one."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        wire = tag & 7
        if wire == 0:
            value, at = _varint(data, at)
            yield tag >> 3, value
            continue
        if wire not in (1, 2, 5):
            raise Broken(f"it is no Example: a field has wire type {wire}")
        length = {1: 8, 5: 4}.get(wire, 0)
        if wire == 2:
            length, at = _varint(data, at)
        if length > len(data) - at:
            raise Broken("it is no Example: a field is longer than what holds it")
        yield tag >> 3, data[at : at + length]
        at += length


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    """A number of up to 64 bits, seven to the byte, and where it ends."""
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            raise Broken("it is no Example: a number is cut short")
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value & 0xFFFFFFFFFFFFFFFF, at
    raise Broken("it is no Example: a number has more than 64 bits")
