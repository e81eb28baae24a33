"""Damaged checkpoints: `load` refuses each in a sentence, or loads it, and takes no more memory than it needs."""

from __future__ import annotations

import json
import math
import reprlib
import resource
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from cutslots.models.checkpoints import SHIPPED, load

MAX_GROWTH = 2**29  # bytes by which a process may grow while it loads one

INVALID: list[Any] = [
    10**9, 2**30, 2**62, 10**40, -1, 0, 1, 3, 1.5, 1e300, 1e-300, -1e-300, math.nan, math.inf, None, True, False,
    "", "64", "cut", "graph-ocl-cut", [], [3], [0], [10**9], [5, "5"], [1.5], [[3]], [3] * 65, [2**15] * 60, {},
    {"name": "cnn"}, "a" * 10_000,
]  # fmt: skip


def refusal(folder: Path) -> str | None:
    """Return the sentence with which `load` refuses a checkpoint, None if it loads it. Other errors are raised."""
    try:
        load(folder)
    except (ValueError, OSError) as error:
        said = str(error)
        assert "\n" not in said and str(folder) in said and len(said) < 2_000, said[:500]
        return said
    return None


def try_damaged_files(folder: Path, count: int, rng: np.random.Generator) -> Iterator[list[str]]:
    """Damage a checkpoint at random so many times; yield the failures of each trial."""
    for number in range(count):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(SHIPPED / "tiny-64", folder)
        yield try_load(folder, (_change_values, _change_bytes, _change_header)[number % 3](folder, rng))


def try_invalid_values(folder: Path) -> Iterator[list[str]]:
    """Set every key of config.json to every invalid value; yield the failures of each trial."""
    shutil.copytree(SHIPPED / "tiny-64", folder)
    values = json.loads((folder / "config.json").read_text())
    for key in config_keys(values):
        for value in INVALID:
            (folder / "config.json").write_text(json.dumps(with_value(values, key, value)))
            yield try_load(folder, f"{key} is {reprlib.repr(value)}")


def config_keys(values: dict[str, Any]) -> Iterator[str]:
    """Yield the keys of a nested dictionary, as "slots" and "slots.num_slots"."""
    for key, value in values.items():
        yield key
        if isinstance(value, dict):
            yield from (f"{key}.{inner}" for inner in config_keys(value))


def with_value(values: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    """Return a nested dictionary with another value for a key such as "slots.num_slots"."""
    first, _, rest = key.partition(".")
    inner = values.get(first)
    return values | {first: with_value(inner if isinstance(inner, dict) else {}, rest, value) if rest else value}


def try_load(folder: Path, what: str) -> list[str]:
    """Load a checkpoint; return the failures: an error that is not a sentence, or too much memory."""
    before = peak_memory()
    try:
        refusal(folder)
    except Exception as error:
        return [f"{what}: {type(error).__name__}: {str(error)[:200]}"]
    grown = peak_memory() - before
    return [] if grown < MAX_GROWTH else [f"{what}: took {grown / 2**30:.1f} GiB"]


def peak_memory() -> int:
    """Return the peak memory of this process in bytes."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _change_values(folder: Path, rng: np.random.Generator) -> str:
    """Change values in config.json."""
    file = folder / "config.json"
    values = json.loads(file.read_text())
    keys = list(config_keys(values))
    changed = {str(rng.choice(keys)): INVALID[rng.integers(len(INVALID))] for _ in range(rng.integers(1, 4))}
    for key, value in changed.items():
        values = with_value(values, key, value)
    file.write_text(json.dumps(values))
    return f"config.json with {changed}"[:300]


def _change_bytes(folder: Path, rng: np.random.Generator) -> str:
    """Truncate either file, or change some bytes, mostly near its start."""
    file = folder / str(rng.choice(["config.json", "model.safetensors"]))
    data = bytearray(file.read_bytes())
    end = len(data) if rng.random() < 0.3 else min(len(data), 3000)
    where = rng.integers(0, end, rng.integers(1, 5)).tolist()
    if rng.random() < 0.3:
        file.write_bytes(data[: where[0]])
        return f"{file.name} truncated after {where[0]}"
    for at in where:
        data[at] = rng.integers(256)
    file.write_bytes(data)
    return f"{file.name} with other bytes at {where}"


def _change_header(folder: Path, rng: np.random.Generator) -> str:
    """Rewrite the header of the safetensors file; its stated length is right or wrong."""
    file = folder / "model.safetensors"
    data = file.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    name = str(rng.choice([key for key in header if key != "__metadata__"]))
    choices = {
        "dtype": ["F64", "F16", "BF16", "I64", "U8", "BOOL", "C64", "F8_E4M3", "X", 7, None],
        "shape": [[], [0], [1], [2**40], [2**40, 2**40], [-1], [1.5], "x", None],
        "data_offsets": [[0, 0], [0, 2**60], [5, 1], [-1, 4], [0], None],
    }
    key = str(rng.choice(list(choices)))
    header[name][key] = choices[key][rng.integers(len(choices[key]))]
    text = json.dumps(header).encode()
    stated = len(text) if rng.random() < 0.9 else int(rng.choice([0, 2**20, 2**40, 2**63 - 1]))
    file.write_bytes(struct.pack("<Q", stated) + text + data[8 + length :])
    return f"{name} with {key} {header[name][key]}, a header of {stated} bytes"
