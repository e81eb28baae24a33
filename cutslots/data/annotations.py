"""Annotation files of COCO and YouTube-VIS: large JSON files, read element by element, and their segmentations.

`AnnotationFile` reads a file once and keeps what images need and where the annotations of each are in the file. These
are decoded when an image is loaded, so memory does not grow with the size of segmentations.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cutslots.files import errors_name_path

CHUNK = 2**20  # bytes that are read at once
MAX_VALUE = 2**26  # bytes of one image or annotation
WHITESPACE = " \t\r\n"
DELIMITERS = tuple(f"{WHITESPACE},:]}}")  # what may follow a value
MAX_NUMBER = 100  # characters
MAX_SIDE = 2**16  # of an image


class Element(NamedTuple):
    """An element of an array of the file's object."""

    name: str  # of the array
    offset: int  # in bytes
    length: int
    value: Any


class AnnotationFile:
    """A JSON file with an array of images or videos and an array of annotations.

    `items` is the name of the first array, `key` the field of an annotation that refers to its elements, and `fields`
    are the fields of an element that are kept.
    """

    def __init__(self, path: Path, items: str, key: str, fields: dict[str, type]) -> None:
        self.path, self.what, self.key = path, items, key
        self.items: list[dict[str, Any]] = []
        owners, places = array("q"), array("q")  # ids of images, and (offset, length) of annotations
        ids: dict[int, int] = {}
        seen = set()
        for element in read_elements(path):
            seen.add(element.name)
            if element.name == items:
                self._add_item(element.value, ids, fields)
            elif element.name == "annotations":
                owners.append(self._owner(element.value, len(owners)))
                places.extend((element.offset, element.length))
        missing = [name for name in (items, "annotations") if name not in seen]
        if missing:
            raise ValueError(f"{path} has no {missing[0]}; expected an object with {items} and annotations")
        self._sort(np.array(owners, dtype=np.int64), np.array(places, dtype=np.int64).reshape(-1, 2), ids)

    def _add_item(self, value: Any, ids: dict[int, int], fields: dict[str, type]) -> None:
        kept: dict[str, Any] = {name: value.get(name) for name in fields} if isinstance(value, dict) else {}
        wrong = [name for name, kind in fields.items() if not isinstance(kept.get(name), kind)]
        if wrong or not isinstance(value.get("id"), int):
            where = f"{self.what}[{len(self.items)}]"
            raise ValueError(
                f"{self.path}: {where} has no valid {(wrong or ['id'])[0]}; expected {', '.join(fields)}, id"
            )
        if value["id"] in ids:
            raise ValueError(f"{self.path}: two {self.what} have the id {value['id']}; expected different ones")
        for side in ("height", "width"):
            if not 1 <= kept[side] <= MAX_SIDE:
                raise ValueError(f"{self.path}: id {value['id']} has the {side} {kept[side]}; expected 1 to {MAX_SIDE}")
        ids[value["id"]] = len(self.items)
        self.items.append(kept)

    def _owner(self, annotation: Any, number: int) -> int:
        owner = annotation.get(self.key) if isinstance(annotation, dict) else None
        if not isinstance(owner, int):
            raise ValueError(f"{self.path}: annotations[{number}] has no valid {self.key}; expected an integer")
        return owner

    def _sort(self, owners: np.ndarray, places: np.ndarray, ids: dict[int, int]) -> None:
        """Keep the places of annotations by the index of their image, in the order of the file."""
        unknown = [owner for owner in np.unique(owners).tolist() if owner not in ids]
        if unknown:
            raise ValueError(f"{self.path}: an annotation has the {self.key} {unknown[0]}; no {self.what} has this id")
        rows = np.array([ids[owner] for owner in owners.tolist()], dtype=np.int64)
        order = rows.argsort(kind="stable")
        self.places = places[order]
        self.first = np.searchsorted(rows[order], np.arange(len(self.items) + 1))

    def annotations(self, index: int) -> list[dict[str, Any]]:
        """Return the annotations of an image or video, in the order of the file."""
        places = self.places[self.first[index] : self.first[index + 1]].tolist()
        with errors_name_path(self.path), self.path.open("rb") as file:
            parts = [(file.seek(offset), file.read(length))[1] for offset, length in places]
        try:
            return [json.loads(part) for part in parts]
        except ValueError:
            raise ValueError(f"{self.path} was changed while it was read; start again") from None


def read_elements(path: Path) -> Iterator[Element]:
    """Yield the elements of all arrays of the object in a JSON file, in bounded memory. Other values are skipped."""
    with errors_name_path(path), path.open("rb") as file:
        reader = _Reader(file)
        try:
            reader.take("{")
            while not reader.try_take("}"):
                name = reader.value().value
                reader.take(":")
                if reader.try_take("["):
                    while not reader.try_take("]"):
                        yield reader.value()._replace(name=name)
                        reader.separator("]")
                else:
                    reader.value()
                reader.separator("}")
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path} cannot be read as JSON: {error}") from None


class _Reader:
    """Values of a JSON file, one after another. Text is decoded as Latin-1: its indices are then offsets in bytes."""

    def __init__(self, file: Any) -> None:
        self.file, self.text, self.at, self.start, self.ended = file, "", 0, 0, False
        self.decoder = json.JSONDecoder()

    def read(self, size: int) -> None:
        data = self.file.read(size)
        self.ended = not data
        self.text, self.start, self.at = self.text[self.at :] + data.decode("latin-1"), self.start + self.at, 0

    def peek(self) -> str:
        """Return the next character that is no whitespace, "" at the end."""
        while True:
            while self.at < len(self.text) and self.text[self.at] in WHITESPACE:
                self.at += 1
            if self.at < len(self.text) or self.ended:
                return self.text[self.at : self.at + 1]
            self.read(CHUNK)

    def try_take(self, character: str) -> bool:
        found = self.peek() == character
        self.at += found
        return found

    def take(self, character: str) -> None:
        if not self.try_take(character):
            seen = repr(self.peek()) if self.peek() else "the end of the file"
            raise ValueError(f"there is {seen} at byte {self.start + self.at}; expected {character!r}")

    def separator(self, end: str) -> None:
        """Take a comma, unless the end of the array or object comes next."""
        if self.peek() != end:
            self.take(",")

    def value(self) -> Element:
        size = CHUNK
        self.peek()
        while True:
            try:
                value, end = self.decoder.raw_decode(self.text, self.at)
                if self.ended or self.text[end : end + 1] in DELIMITERS or len(self.text) - end > MAX_NUMBER:
                    break  # else a number may go on, as 1 in 1.5
            except ValueError:
                if self.ended or len(self.text) - self.at > MAX_VALUE:
                    what = "ends early or is damaged" if self.ended else "is damaged"
                    raise ValueError(f"it {what} after byte {self.start + self.at}") from None
            self.read(size)
            size *= 2
        if not (text := self.text[self.at : end]).isascii():
            value = json.loads(text.encode("latin-1"))
        element = Element("", self.start + self.at, end - self.at, value)
        self.at = end
        return element


# -------------------------------------------------------------------------------------------------------- segmentations


def decode_segmentation(segmentation: Any, height: int, width: int) -> np.ndarray:
    """Return the mask (H, W), bool, of a segmentation: polygons or run lengths, compressed or not."""
    if isinstance(segmentation, dict):
        return _decode_runs(segmentation, height, width)
    if not isinstance(segmentation, list) or not segmentation or not all(map(_is_polygon, segmentation)):
        raise ValueError("its segmentation is damaged; expected polygons of at least 3 points, or run lengths")
    try:
        from pycocotools import mask
    except ImportError:
        raise ValueError("polygons need pycocotools: pip install 'cutslots[coco]'") from None
    return mask.decode(mask.merge(mask.frPyObjects(segmentation, height, width))).astype(bool)


def _is_polygon(points: Any) -> bool:
    numbers = isinstance(points, list) and all(isinstance(x, int | float) and abs(x) <= MAX_SIDE for x in points)
    return numbers and len(points) >= 6 and len(points) % 2 == 0


def _decode_runs(segmentation: dict[str, Any], height: int, width: int) -> np.ndarray:
    """Decode run lengths: background and object in turn, column by column."""
    counts, size = segmentation.get("counts"), segmentation.get("size")
    if size != [height, width]:
        raise ValueError(f"its segmentation has the size {size}; expected {[height, width]}")
    runs = _decompress(counts) if isinstance(counts, str) else counts
    if not isinstance(runs, list) or not all(isinstance(run, int) and run >= 0 for run in runs):
        raise ValueError("its run lengths are damaged; expected integers from 0, or text")
    if sum(runs) != height * width:
        raise ValueError(f"its run lengths add up to {sum(runs):,}; expected {height * width:,} pixels")
    return np.repeat(np.arange(len(runs)) % 2 == 1, runs).reshape(width, height).T


def _decompress(text: str) -> list[int]:
    """Return the run lengths of COCO's text: 5 bits in each character; from the fourth run on, differences to the run
    before the last."""
    runs: list[int] = []
    value, shift = 0, 0
    for character in text:
        bits = ord(character) - 48
        value |= (bits & 31) << shift
        shift += 5
        if bits & 32 and shift < 64:
            continue
        value -= (bits >> 4 & 1) << shift  # the sign
        runs.append(value + (runs[-2] if len(runs) > 2 else 0))
        value, shift = 0, 0
    return runs
