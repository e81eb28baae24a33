"""Weights that somebody has meddled with: each is refused in a sentence, or is as good as any, and none takes memory
that it does not need."""

from __future__ import annotations

import dataclasses
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

from cutslots.model import SHIPPED, load
from cutslots.presets import ModelConfig

ROOM = 2**29  # bytes by which a process may grow while it looks at them

ABSURD: list[Any] = [
    10**9, 2**30, 2**62, 10**40, -1, 0, 1, 3, 1.5, 1e300, -1e-300, math.nan, math.inf, None, True, False, "", "64",
    "cut", [], [3], [0], [10**9], [5, "5"], [1.5], [[3]], [3] * 65, [2**15] * 60, {}, {"size": 64}, "a" * 10_000,
]  # fmt: skip


def refusal(folder: Path) -> str | None:
    """The sentence with which weights are refused; None if they are not. Anything else than a sentence is raised."""
    try:
        load(folder)
    except (ValueError, OSError) as error:
        said = str(error)
        assert "\n" not in said and str(folder) in said and len(said) < 2_000, said[:500]
        return said
    return None


def spoilt(folder: Path, count: int, rng: np.random.Generator) -> Iterator[list[str]]:
    """So many of them, drawn at random; what is wrong with how each was received."""
    for number in range(count):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(SHIPPED / "tiny", folder)
        yield received(folder, (_numbers, _bytes, _head)[number % 3](folder, rng))


def absurd(folder: Path) -> Iterator[list[str]]:
    """Every number of config.json as every value that makes no sense, or little."""
    shutil.copytree(SHIPPED / "tiny", folder)
    values = json.loads((folder / "config.json").read_text())
    for name in (field.name for field in dataclasses.fields(ModelConfig)):
        for value in ABSURD:
            (folder / "config.json").write_text(json.dumps(values | {name: value}))
            yield received(folder, f"{name} is {reprlib.repr(value)}")


def received(folder: Path, what: str) -> list[str]:
    """What is wrong with how these weights are received."""
    before = peak()
    try:
        refusal(folder)
    except Exception as error:
        return [f"{what}: {type(error).__name__}: {str(error)[:200]}"]
    grown = peak() - before
    return [] if grown < ROOM else [f"{what}: took {grown / 2**30:.1f} GiB"]


def peak() -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _numbers(folder: Path, rng: np.random.Generator) -> str:
    """Other values in config.json."""
    file = folder / "config.json"
    values = json.loads(file.read_text())
    changed = {str(rng.choice(list(values))): ABSURD[rng.integers(len(ABSURD))] for _ in range(rng.integers(1, 4))}
    file.write_text(json.dumps(values | changed))
    return f"config.json with {changed}"[:300]


def _bytes(folder: Path, rng: np.random.Generator) -> str:
    """Either file cut, or with bytes changed, mostly at its head."""
    file = folder / str(rng.choice(["config.json", "model.safetensors"]))
    data = bytearray(file.read_bytes())
    end = len(data) if rng.random() < 0.3 else min(len(data), 3000)
    where = rng.integers(0, end, rng.integers(1, 5)).tolist()
    if rng.random() < 0.3:
        file.write_bytes(data[: where[0]])
        return f"{file.name} cut after {where[0]}"
    for at in where:
        data[at] = rng.integers(256)
    file.write_bytes(data)
    return f"{file.name} with other bytes at {where}"


def _head(folder: Path, rng: np.random.Generator) -> str:
    """The head of the weights, which says what they are, rewritten; its length fits or lies."""
    file = folder / "model.safetensors"
    data = file.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    head = json.loads(data[8 : 8 + length])
    name = str(rng.choice([key for key in head if key != "__metadata__"]))
    choices = {
        "dtype": ["F64", "F16", "BF16", "I64", "U8", "BOOL", "C64", "F8_E4M3", "X", 7, None],
        "shape": [[], [0], [1], [2**40], [2**40, 2**40], [-1], [1.5], "x", None],
        "data_offsets": [[0, 0], [0, 2**60], [5, 1], [-1, 4], [0], None],
    }
    key = str(rng.choice(list(choices)))
    head[name][key] = choices[key][rng.integers(len(choices[key]))]
    text = json.dumps(head).encode()
    claimed = len(text) if rng.random() < 0.9 else int(rng.choice([0, 2**20, 2**40, 2**63 - 1]))
    file.write_bytes(struct.pack("<Q", claimed) + text + data[8 + length :])
    return f"{name} with {key} {head[name][key]}, a head of {claimed} bytes"
