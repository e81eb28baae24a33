"""What the tests of `cutslots prepare` share: small sources, and ways to damage files and to interrupt a run."""

import itertools
import json
import re

import numpy as np
import pytest

from cutslots.data.open import open_dataset
from cutslots.data.prepare import prepare
from tests.data.small_files import (
    clevrtex_files,
    write_clevr,
    write_files,
    write_movi,
    write_tar,
    write_zip,
)

CLEVR = [3, 6, 7, 10, 0, 1]  # objects of each scene
TEX = (3, 10, 1, 0, 7, 5)
MOVI = {"train": [2, 1], "validation": [1, 1]}  # videos in each shard; the first has 3 objects, the next 4...
ARRAYS = ("images.npy", "masks.npy", "objects.npy")
NAMES = {"full": "clevrtex", "outd": "clevrtex-ood"} | {v: f"clevrtex-{v}" for v in ("camo", "pbg", "vbg", "grassbg")}
SIZE = 32


def contents(out):
    """Return the files of a cache."""
    return {path.name: path.read_bytes() for path in sorted(out.iterdir()) if path.name != ".lock"}


def times(out):
    return {path.name: path.stat().st_mtime_ns for path in out.iterdir() if path.name != ".lock"}


def only_arrays(out):
    return {name: content for name, content in contents(out).items() if name in ARRAYS}


def arrays(out):
    return [np.load(out / name) for name in ARRAYS]


def read(out):
    return json.loads((out / "manifest.json").read_text())


def in_parts(files, parts):
    """Distribute files over archives, so that some images and masks are in different ones."""
    names = list(files)
    return [{name: files[name] for name in names[i::parts]} for i in range(parts)]


def write_parts(root, write, ending, parts=2, backwards=False):
    root.mkdir(parents=True)
    files = clevrtex_files("full", TEX)
    for i, part in enumerate(in_parts(dict(reversed(files.items())) if backwards else files, parts)):
        write(root / f"clevrtex_full_part{i + 1}{ending}", part)
    return root


WRITE = {
    "clevr": lambda root: write_clevr(root, CLEVR[:5], compressed=False),
    "clevrtex": lambda root: write_files(root, clevrtex_files("full", TEX)),
    "tar": lambda root: write_parts(root, write_tar, ".tar"),
    "zip": lambda root: write_parts(root, write_zip, ".zip"),
    "movi-a": lambda root: write_movi(root / "1.0.0", MOVI, 32),
}


def dataset(kind):
    return "clevrtex" if kind in ("tar", "zip") else kind


def go(source, out, size=SIZE, **options):
    return prepare("clevrtex", source, out, size, **{"workers": 1, "quiet": True} | options)


def failing(function, number, error, after=False):
    """Return the function, but call `number` raises an error, before or after doing its work."""
    calls = itertools.count()

    def call(*arguments, **options):
        if next(calls) != number:
            return function(*arguments, **options)
        if after:
            function(*arguments, **options)
        raise error

    return call


def tex(root, index, mask=False):
    return root / "clevrtex_full" / "0" / f"CLEVRTEX_full_{index:06d}{'_flat' * mask}.png"


def rewrite(change):
    """Return a function that changes the content of a file."""
    return lambda path: path.write_bytes(change(path.read_bytes()))


halved = rewrite(lambda data: data[: len(data) // 2])
emptied = rewrite(lambda data: b"")


def flipped(at):
    """Return a function that flips a bit at a fraction of a file's length."""

    def flip(path):
        data = bytearray(path.read_bytes())
        data[int(at * len(data))] ^= 16
        path.write_bytes(data)

    return flip


def assert_refused(name, out):
    """Check that there is no manifest and that the folder does not open as a dataset."""
    assert not (out / "manifest.json").exists()
    for data in (f"{name}:{out}", str(out)):
        with pytest.raises(ValueError, match=re.escape(str(out))):
            open_dataset(data, "test")


def refusal(function, *arguments, **options):
    """Return the message of the ValueError that a call raises; None if it raises none."""
    try:
        function(*arguments, **options)
    except ValueError as error:
        return str(error)
    return None
