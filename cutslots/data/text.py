"""Datasets as text, as in --data.

    plain                         a registered dataset with its default options
    plain:2-5                     num_objects
    clevrtex:DIR                  path; clevrtex:DIR:2-5 has both
    folder:DIR,resize=crop        other options by name; path=DIR and num_objects=2-5 work too
    DIR                           a folder of images, or a cache written by `cutslots prepare`

Values: integers, floats, true and false, none, text, MIN-MAX for a pair of integers, JSON lists for other tuples. A
JSON string is needed only for text that would read as something else.
"""

from __future__ import annotations

import dataclasses
import json
import re
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from cutslots.data.prepared import is_prepared, read_manifest
from cutslots.data.registry import DATASETS, DatasetConfig
from cutslots.registry import Part, load_entry_points, options

PAIR = re.compile(r"(\d+)-(\d+)")


def parse_data(text: str) -> DatasetConfig:
    """Return the config of the dataset that a text names."""
    name, colon, rest = text.partition(":")
    is_folder = bool(text) and Path(text).is_dir()
    if name not in DATASETS.parts and not is_folder:
        load_entry_points()
    if name in DATASETS.parts and (colon or not _has_required(DATASETS[name])):
        return DATASETS.from_dict({"name": name} | (_parse_options(text, DATASETS[name], rest) if colon else {}))
    if is_folder:
        return _parse_folder(text)
    raise ValueError(f"data is {text!r}; expected one of {', '.join(_forms())}, or a folder that holds images/")


def named_options(text: str) -> set[str]:
    """Return the options that a text sets, as in {"num_objects"} for plain:2-5."""
    name, _, rest = text.partition(":")
    return set(_parse_options(text, DATASETS[name], rest)) if name in DATASETS.parts and rest else set()


def data_text(config: DatasetConfig) -> str:
    """Return the shortest text that `parse_data` turns into this config.

    Options that only training reads are left out.
    """
    part = DATASETS.part_of(config)
    given = {
        field.name: getattr(config, field.name)
        for field in dataclasses.fields(config)
        if getattr(config, field.name) != field.default and not field.metadata.get("training")
    }
    wanted = DATASETS.from_dict({"name": part.name} | given)
    for text in _candidates(part.name, given):
        if _parses_to(text, wanted):
            return text
    raise ValueError(f"dataset {part.name!r} has options that have no text: {', '.join(given)}")


# ---------------------------------------------------------------------------------------------------------------- parse


def _parse_folder(path: str) -> DatasetConfig:
    """Return the config of a folder of images or of a prepared cache."""
    name = "folder"
    if is_prepared(Path(path)) and not (Path(path) / "images").is_dir():
        name = read_manifest(Path(path))["request"]["dataset"]
    return DATASETS.from_dict({"name": name, "path": path})


def _parse_options(text: str, part: Part, rest: str) -> dict[str, Any]:
    """Return the options after the colon: PATH or MIN-MAX or both, then options by name."""
    hints = options(part.config)
    keys = "|".join(map(re.escape, hints))
    named = re.search(rf"(?:\A|,)(?=(?:{keys})=)", rest) if keys else None
    short, named_options = (rest[: named.start()], rest[named.end() :]) if named else (rest, "")
    unknown = re.match(r"(\w+)=", short)
    if unknown and not ("path" in hints and Path(rest).exists()):
        return {unknown[1]: None}  # the registry's error lists the known options
    given = _parse_short(text, part, short) if short or not named else {}
    items = _split(named_options, keys) if named else {}
    return given | {name: _parse_value(text, name, value, hints[name]) for name, value in items.items()}


def _parse_short(text: str, part: Part, short: str) -> dict[str, Any]:
    """Return the options of PATH, PATH:MIN-MAX or MIN-MAX."""
    hints = options(part.config)
    path, _, last = short.rpartition(":") if "path" in hints else ("", "", short)
    bounds = PAIR.fullmatch(last) if "num_objects" in hints else None
    num_objects = {"num_objects": (int(bounds[1]), int(bounds[2]))} if bounds else {}
    if "path" in hints and short:
        return {"path": path} | num_objects if bounds and path else {"path": short}
    if "path" in hints or not bounds:
        raise ValueError(f"data is {text!r}; expected {_form(part)}")
    return num_objects


def _split(named: str, keys: str) -> dict[str, str]:
    """Return the values of key=value,key=value. A comma starts an option only before the name of one and "="."""
    item = re.compile(rf'({keys})=("(?:[^"\\]|\\.)*"(?=,(?:{keys})=|\Z)|.*?)(?:,(?=(?:{keys})=)|\Z)', re.DOTALL)
    return {found[1]: found[2] for found in item.finditer(named)}


def _parse_value(text: str, name: str, value: str, hint: Any) -> Any:
    """Return a value of the annotated type; the config checks its range."""
    for kind in _alternatives(hint):
        parsed = _parse_as(value, kind)
        if parsed is not None or (kind is type(None) and value == "none"):
            return parsed
    raise ValueError(f"data is {text!r}, where {name} is {value!r}; expected {_describe(hint)}")


def _alternatives(hint: Any) -> list[Any]:
    """Return the types of a union, text last because any value is text."""
    if typing.get_origin(hint) is typing.Annotated:
        return _alternatives(typing.get_args(hint)[0])
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        kinds = [kind for each in typing.get_args(hint) for kind in _alternatives(each)]
        return sorted(kinds, key=lambda kind: kind in (str, Path))
    return [hint]


def _parse_as(value: str, kind: Any) -> Any:
    """Return the value as one type, or None if it is not of that type."""
    if kind in (str, Path) or typing.get_origin(kind) is Literal:
        value = json.loads(value) if _is_quoted(value) else value
    if kind in (str, Path):
        return kind(value)
    if kind is bool:
        return {"true": True, "false": False}.get(value)
    if kind is int or kind is float:
        try:
            return kind(value)
        except ValueError:
            return None
    if typing.get_origin(kind) is Literal:
        return next((choice for choice in typing.get_args(kind) if str(choice) == value), None)
    if typing.get_origin(kind) is tuple:
        return _parse_tuple(value)
    return None


def _parse_tuple(value: str) -> tuple[Any, ...] | None:
    pair = PAIR.fullmatch(value)
    if pair:
        return int(pair[1]), int(pair[2])
    try:
        parsed = json.loads(value)
    except ValueError:
        return None
    return tuple(parsed) if isinstance(parsed, list) else None


def _is_quoted(value: str) -> bool:
    try:
        return value.startswith('"') and isinstance(json.loads(value), str)
    except ValueError:
        return False


# --------------------------------------------------------------------------------------------------------------- format


def _candidates(name: str, given: dict[str, Any]) -> Iterator[str]:
    """Yield texts of the options, the shortest first. Paths with colons or commas need a longer one."""
    short = [key for key in ("path", "num_objects") if key in given]
    named = _named_options({key: value for key, value in given.items() if key not in short}, quoted=False)
    yield ",".join([":".join([name, *(_format_value(given[key], quoted=False) for key in short)]), *named])
    for quoted in (False, True):
        yield f"{name}:" + ",".join(_named_options(given, quoted))


def _named_options(given: dict[str, Any], quoted: bool) -> list[str]:
    return [f"{key}={_format_value(value, quoted)}" for key, value in given.items()]


def _format_value(value: Any, quoted: bool) -> str:
    if isinstance(value, str | Path):
        return json.dumps(str(value)) if quoted else str(value)
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    if isinstance(value, tuple):
        is_pair = len(value) == 2 and all(isinstance(each, int) and not isinstance(each, bool) for each in value)
        return f"{value[0]}-{value[1]}" if is_pair and min(value) >= 0 else json.dumps(value)
    return str(value)


def _parses_to(text: str, config: DatasetConfig) -> bool:
    try:
        return parse_data(text) == config
    except ValueError:
        return False


def _has_required(part: Part) -> bool:
    """Return whether the dataset has options without a default."""
    fields = dataclasses.fields(part.config)
    return any(f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING for f in fields)


def _forms() -> list[str]:
    return [_form(part) if _has_required(part) else part.name for part in DATASETS.parts.values()]


def _form(part: Part) -> str:
    """Return how the options of a dataset are written, for error messages."""
    hints = options(part.config)
    if "path" in hints:
        return f"{part.name}:DIR"
    if "num_objects" in hints:
        return f"numbers of objects as in {part.name}:2-5 or options as in {part.name}:num_objects=2-5"
    first = next(iter(hints), None)
    return f"options as in {part.name}:{first}=..." if first else f"{part.name} without options"


def _describe(hint: Any) -> str:
    names = []
    for kind in _alternatives(hint):
        if typing.get_origin(kind) is Literal:
            names.append(f"one of {', '.join(map(str, typing.get_args(kind)))}")
        elif typing.get_origin(kind) is tuple:
            names.append("MIN-MAX or a JSON list")
        else:
            known = {int: "an integer", float: "a number", bool: "true or false", type(None): "none", str: "text"}
            names.append(known.get(kind, str(kind)))
    return " or ".join(names)
