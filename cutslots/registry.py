"""Registries of parts, their configs, and plugins.

A part (encoder, slot module, partition, decoder, model, loss, dataset) is a frozen config dataclass and the class it
builds. One line registers both under a name:

    @dataclass(frozen=True)
    class PatchesConfig(EncoderConfig):
        channels: int = 64

    @ENCODERS.register("patches", PatchesConfig)
    class Patches(Encoder):
        def __init__(self, channels: int) -> None: ...

The fields of the config are keyword arguments of the class. The registry passes a few more that depend on the other
parts, such as `in_channels`. In JSON a part is its name and its options: {"name": "patches", "channels": 64}.

A plugin is a Python file or module that registers parts when it is imported. This module does not import torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import importlib.metadata
import importlib.util
import inspect
import itertools
import math
import reprlib
import sys
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar

T = TypeVar("T", bound=Callable[..., Any])

ENTRY_POINTS = "cutslots.plugins"  # the entry-point group of installed plugins
MAX_NUMBER = 65_536  # bound of integers and floats whose annotation gives no `Range`
MAX_LENGTH = 64  # of a tuple of any length
REGISTRIES: list[Registry] = []


@dataclass(frozen=True)
class Range:
    """Inclusive bounds of an option, as in `Annotated[int, Range(1, 255)]`."""

    min: float = -math.inf
    max: float = math.inf

    def __str__(self) -> str:
        if math.isinf(self.max):
            return f"at least {self.min:,}"
        return f"at most {self.max:,}" if math.isinf(self.min) else f"from {self.min:,} to {self.max:,}"


Steps = typing.Annotated[int, Range(0, 10**9)]  # the type of options that count training steps


@dataclass(frozen=True)
class PartConfig:
    """Base of all configs. Construction checks the type and the range of every option."""

    registry: ClassVar[Registry]

    def __post_init__(self) -> None:
        for name in options(type(self)):
            value = getattr(self, name)
            if isinstance(value, list):  # JSON has no tuples
                object.__setattr__(self, name, tuple(value))
        if not _deferred:
            self.validate()

    def validate(self) -> None:
        """Raise a ValueError if an option has the wrong type or is out of range. Subclasses may check more."""
        for name, hint in options(type(self)).items():
            check_option(name, getattr(self, name), hint)


_deferred: list[bool] = []


@contextlib.contextmanager
def deferred_validation() -> Iterator[None]:
    """Construct configs without checking them, for a command line that reports errors in words of its own.

    Call `validate_nested` on the result.
    """
    _deferred.append(True)
    try:
        yield
    finally:
        _deferred.pop()


def validate_nested(config: PartConfig, prefix: str = "") -> None:
    """Check a config and its nested parts. Errors name options by their path, as in encoder.channels."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if isinstance(value, PartConfig):
            validate_nested(value, f"{prefix}{field.name}.")
    try:
        config.validate()
    except ValueError as error:
        raise ValueError(f"{prefix}{error}") from None


class Part(NamedTuple):
    """An entry of a registry."""

    name: str
    config: type[PartConfig]
    build: Callable[..., Any]
    summary: str
    plugin: str | None  # the file or module that registered it; None for the parts of this package


class Registry:
    """Parts of one kind by name. `kind` is a noun for messages, such as "encoder"."""

    def __init__(self, kind: str, base: type[PartConfig]) -> None:
        self.kind, self.base = kind, base
        self.parts: dict[str, Part] = {}
        base.registry = self
        REGISTRIES.append(self)

    def register(self, name: str, config: type[PartConfig]) -> Callable[[T], T]:
        """Register the decorated class or function under `name`. The first line of its docstring is its summary."""
        if not issubclass(config, self.base):
            raise TypeError(f"config is {config.__name__}; expected a subclass of {self.base.__name__}")
        if name in self.parts:
            owner = self.parts[name].plugin or "cutslots"
            raise ValueError(f"{self.kind} {name!r} is already registered by {owner}; choose another name")
        for part in self.parts.values():  # a config has to tell which part it belongs to
            if part.config is config:
                raise ValueError(f"{config.__name__} is the config of {self.kind} {part.name!r}; register a subclass")
        for reserved in options(config).keys() & {"name", "plugins"}:  # also finds annotations that are not defined
            raise ValueError(f"{config.__name__} has an option {reserved!r}, which is reserved; choose another name")

        def add(build: T) -> T:
            summary = (inspect.getdoc(build) or "").split("\n")[0]
            self.parts[name] = Part(name, config, build, summary, _plugin_of(build))
            return build

        return add

    def names(self) -> list[str]:
        return list(self.parts)

    def __getitem__(self, name: str) -> Part:
        if name not in self.parts:
            load_entry_points()
        if name not in self.parts:
            known = ", ".join(self.parts)
            raise ValueError(
                f"{self.kind} is {name!r:.99}; expected one of {known}, or a part of a plugin (--plugin FILE)"
            )
        return self.parts[name]

    def part_of(self, config: PartConfig) -> Part:
        """Return the part that a config belongs to."""
        for part in self.parts.values():
            if part.config is type(config):
                return part
        raise ValueError(f"{type(config).__name__} is not the config of a registered {self.kind}")

    def build(self, config: PartConfig, **context: Any) -> Any:
        """Build the part: its options and `context` become keyword arguments."""
        given = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
        return self.part_of(config).build(**given, **context)

    def to_dict(self, config: PartConfig) -> dict[str, Any]:
        """Return the name and the options of a part, nested parts included, as JSON types."""
        return {"name": self.part_of(config).name} | {
            field.name: _to_json(getattr(config, field.name)) for field in dataclasses.fields(config)
        }

    def from_dict(self, values: Any) -> Any:
        """Return the config that `to_dict` was given. Options that are missing take their defaults."""
        if not isinstance(values, Mapping) or not isinstance(values.get("name"), str):
            raise ValueError(f'{self.kind} is {reprlib.repr(values)}; expected an object with a "name" and options')
        part = self[values["name"]]
        hints = options(part.config)
        given = {name: value for name, value in values.items() if name != "name"}
        for name, value in given.items():
            if name not in hints:
                raise ValueError(
                    f"{self.kind} {part.name!r} has no option {name!r}; its options are {', '.join(hints) or 'none'}"
                )
            given[name] = _from_json(value, hints[name])
        missing = [f.name for f in dataclasses.fields(part.config) if f.name not in given and _is_required(f)]
        if missing:
            raise ValueError(f"{self.kind} {part.name!r} lacks {', '.join(missing)}")
        return part.config(**given)

    def select(self, current: PartConfig, name: str) -> Any:
        """Return the config of another part. Options that both parts have keep their values, if both accept them."""
        part = self[name]
        if part.config is type(current):
            return current
        hints = options(part.config)
        shared = {option: getattr(current, option) for option in hints.keys() & options(type(current)).keys()}
        return part.config(**{option: value for option, value in shared.items() if not _problem(value, hints[option])})


def plugins_of(config: PartConfig) -> list[str]:
    """Return the plugins that a config and its nested parts need."""
    found = [config.registry.part_of(config).plugin]
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if isinstance(value, PartConfig):
            found += plugins_of(value)
    return list(dict.fromkeys(name for name in found if name is not None))


def _to_json(value: Any) -> Any:
    if isinstance(value, PartConfig):
        return value.registry.to_dict(value)
    if isinstance(value, tuple):
        return [_to_json(each) for each in value]
    return str(value) if isinstance(value, Path) else value


def _from_json(value: Any, hint: Any) -> Any:
    """Return a JSON value as the annotated type: a nested part, a path or a tuple. Other values stay as they are."""
    origin, choices = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return _from_json(value, choices[0])
    if origin in (typing.Union, types.UnionType):
        fitting = [choice for choice in choices if choice is not type(None)] if value is not None else []
        return _from_json(value, fitting[0]) if len(fitting) == 1 else value
    if origin is tuple and isinstance(value, list):
        hints = (choices[0],) * len(value) if choices[-1] is Ellipsis else choices
        if len(hints) != len(value):
            return tuple(value)  # the check says what was expected
        return tuple(_from_json(each, each_hint) for each, each_hint in zip(value, hints, strict=True))
    if isinstance(hint, type) and issubclass(hint, PartConfig):
        return hint.registry.from_dict(value)
    return Path(value) if hint is Path and isinstance(value, str) else value


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


# ------------------------------------------------------------------------------------------------------------- options


def options(config: Any) -> dict[str, Any]:
    """Return the annotation of every option of a config class."""
    return _options(config)  # apart from its cache, for which mypy would ask that dataclass types be hashable


@functools.cache
def _options(config: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(config, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(config)}


def check_option(name: str, value: Any, hint: Any) -> None:
    """Raise a ValueError unless `value` has the annotated type and lies in its range."""
    problem = _problem(value, hint)
    if problem:
        raise ValueError(f"{name} is {reprlib.repr(value)}; expected {problem}")


def _problem(value: Any, hint: Any, bounds: Range | None = None) -> str:
    """Return what was expected, or an empty string if the value is right."""
    origin, choices = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return _problem(value, choices[0], next((m for m in choices[1:] if isinstance(m, Range)), bounds))
    if origin is Literal:
        listed = ", ".join(map(str, choices))
        return "" if value in choices else f"one of {listed}" if len(choices) > 1 else listed
    if origin in (typing.Union, types.UnionType):
        problems = [_problem(value, choice, bounds) for choice in choices]
        return "" if "" in problems else " or ".join(problems)
    if origin is tuple:
        return _tuple_problem(value, choices, bounds)
    if hint is type(None):
        return "" if value is None else "none"
    if hint is bool:
        return "" if isinstance(value, bool) else "true or false"
    if hint in (int, float):
        return _number_problem(value, hint, bounds)
    if isinstance(hint, type) and not isinstance(value, hint):
        return f"a {hint.__name__}"
    return ""


def _tuple_problem(value: Any, choices: tuple[Any, ...], bounds: Range | None) -> str:
    any_length = len(choices) == 2 and choices[1] is Ellipsis
    length = f"at most {MAX_LENGTH}" if any_length else str(len(choices))
    inner = _problem(None, choices[0], bounds) or "values"
    expected = f"{length} values, each {inner}"
    if not isinstance(value, tuple) or (len(value) > MAX_LENGTH if any_length else len(value) != len(choices)):
        return expected
    hints = [choices[0]] * len(value) if any_length else choices
    return expected if any(_problem(v, h, bounds) for v, h in zip(value, hints, strict=True)) else ""


def _number_problem(value: Any, hint: type, bounds: Range | None) -> str:
    bounds = bounds or Range(0 if hint is int else -MAX_NUMBER, MAX_NUMBER)
    right = isinstance(value, int | float if hint is float else int) and not isinstance(value, bool)
    if right and bounds.min <= value <= bounds.max and (isinstance(value, int) or math.isfinite(value)):
        return ""
    return f"{'an integer' if hint is int else 'a number'} {bounds}"


# ------------------------------------------------------------------------------------------------------------- plugins

_importing: list[str] = []  # the plugin whose import is in progress
_loaded: dict[str, str] = {}  # what was imported, by resolved path or module name


def load_plugins(plugins: Iterable[str | Path]) -> None:
    """Import plugins: Python files, or names of installed modules. A plugin is imported once."""
    for plugin in plugins:
        load_plugin(plugin)


def load_plugin(plugin: str | Path) -> None:
    path = Path(plugin)
    is_file = path.suffix == ".py" or path.is_file()
    if is_file and not path.is_file():
        raise ValueError(f"plugin: there is no {path}; expected a Python file or the name of a module")
    key = str(path.resolve()) if is_file else str(plugin)
    if key in _loaded:
        return
    with _as_plugin(path.name if is_file else str(plugin), plugin):
        _import_file(path) if is_file else importlib.import_module(str(plugin))
    _loaded[key] = path.name if is_file else str(plugin)


def loaded_plugins() -> set[str]:
    """Return the names of the plugins that are imported: file names and module names."""
    return set(_loaded.values())


def load_entry_points() -> None:
    """Import the plugins of installed packages."""
    for entry in importlib.metadata.entry_points(group=ENTRY_POINTS):
        if entry.value not in _loaded:
            with _as_plugin(entry.value, entry.value):
                entry.load()
            _loaded[entry.value] = entry.value


def _plugin_of(build: Callable[..., Any]) -> str | None:
    """Return the plugin that registers a part: the one being imported, or the module of a part that is not ours."""
    if build.__module__.split(".")[0] == "cutslots":
        return None
    return _importing[-1] if _importing else build.__module__


@contextlib.contextmanager
def _as_plugin(name: str, shown: str | Path) -> Iterator[None]:
    """Mark registrations as the plugin's. A plugin that fails to import leaves no parts behind."""
    before = {id(registry): set(registry.parts) for registry in REGISTRIES}
    _importing.append(name)
    try:
        yield
    except Exception as error:
        for registry in REGISTRIES:
            known = before.get(id(registry), set())
            registry.parts = {k: part for k, part in registry.parts.items() if k in known or part.plugin != name}
        raise ValueError(f"plugin: {shown} cannot be imported: {type(error).__name__}: {error}") from error
    finally:
        _importing.pop()


def _import_file(path: Path) -> None:
    names = (f"cutslots_plugin_{path.stem}_{i}" for i in itertools.count())
    name = next(name for name in names if name not in sys.modules)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their annotations up there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
