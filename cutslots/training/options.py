"""The command lines of `cutslots train` and `cutslots pretrain`: from words to a `TrainConfig` or a `PretrainConfig`.

The first word is a preset. Then `--encoder NAME` selects a part, and `--encoder.OPTION VALUE` sets one of its options;
parts are selected first, so that `--help` shows the options of the selected parts only. Options that the preset's part
and the selected one have in common keep the preset's values.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import tyro

from cutslots.data.text import data_text, named_options, parse_data
from cutslots.models.discovery import MODELS
from cutslots.registry import PartConfig, deferred_validation, load_entry_points, load_plugins, options
from cutslots.training.config import PretrainConfig, RunConfig, TrainConfig
from cutslots.training.presets import PRESETS, SUMMARIES
from cutslots.training.pretrain_presets import PRETRAIN_PRESETS, PRETRAIN_SUMMARIES

Config = TypeVar("Config", bound=RunConfig)

Path = tuple[str, ...]  # of fields, from the config of a run to a part


class Command(NamedTuple):
    """A command with presets."""

    name: str
    description: str
    presets: Mapping[str, RunConfig]
    summaries: Mapping[str, str]


TRAIN = Command("train", "Train a model.", PRESETS, SUMMARIES)
PRETRAIN = Command("pretrain", "Train an encoder on images without labels.", PRETRAIN_PRESETS, PRETRAIN_SUMMARIES)


def parse_train(words: Sequence[str]) -> TrainConfig:
    """Return the config of a training run. Prints help, or an error of tyro's, and exits if asked to or if needed."""
    config: TrainConfig = _parse(TRAIN, words)
    return config


def parse_pretrain(words: Sequence[str]) -> PretrainConfig:
    """Return the config of a run of `cutslots pretrain`, as `parse_train` does."""
    config: PretrainConfig = _parse(PRETRAIN, words)
    return config


def _parse(command: Command, words: Sequence[str]) -> Any:
    plugins, words = _split_plugins(words)
    load_plugins(plugins)
    if not words or words[0] not in command.presets:
        load_entry_points()
    if not words or words[0] not in command.presets:
        _choose_preset(command, words[:1])
    preset, rest = words[0], words[1:]
    prog, description = f"cutslots {command.name} {preset}", f"{preset}: {command.summaries[preset]}."
    with deferred_validation():  # the loop validates: its errors are one sentence, and all options are known by then
        config = select_parts(dataclasses.replace(command.presets[preset], plugins=tuple(plugins)), rest)
        check_options(config, rest)
        return tyro.cli(command_line(config), prog=prog, description=description, args=rest).config


def _choose_preset(command: Command, words: Sequence[str]) -> None:
    """Print the presets, for --help, or tyro's error for a preset that does not exist. Exits."""
    commands = {}
    for name, summary in command.summaries.items():
        commands[name] = lambda: None
        commands[name].__doc__ = summary
    description = f"{command.description} `cutslots {command.name} PRESET --help` lists the options."
    tyro.extras.subcommand_cli_from_dict(
        commands, prog=f"cutslots {command.name}", description=description, args=words, sort_subcommands=False
    )
    raise SystemExit(2)


def _split_plugins(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the values of --plugin, which may precede the preset, and the other words."""
    plugins, others, i = [], [], 0
    while i < len(words):
        name, equals, value = words[i].partition("=")
        if name != "--plugin" or (not equals and i + 1 == len(words)):
            others.append(words[i])
        elif equals:
            plugins.append(value)
        else:
            i += 1
            plugins.append(words[i])
        i += 1
    return plugins, others


# --------------------------------------------------------------------------------------------------------------- parts


def part_paths(config: Any, path: Path = ()) -> dict[str, Path]:
    """Return the flag of every part of a config, nested ones included, and the path to it."""
    found: dict[str, Path] = {}
    for name in config.parts if isinstance(config, RunConfig) else options(type(config)):
        value = getattr(config, name)
        if isinstance(value, PartConfig):
            found[_flag((*path, name))] = (*path, name)
            found |= part_paths(value, (*path, name))
    return found


def _flag(path: Path) -> str:
    """Return --slots.partition for (model, slots, partition): the model itself is the only one to name the model."""
    names = path[1:] if len(path) > 1 and path[0] == "model" else path
    return "--" + ".".join(names).replace("_", "-")


def select_parts(config: Config, words: Sequence[str]) -> Config:
    """Return the config with the parts that the words select, outer parts before the parts inside them."""
    done: set[str] = set()
    while True:
        paths = part_paths(config)
        flag = next((flag for flag in paths if flag not in done and _values(words, flag)), None)
        if flag is None:
            return config
        name, current = _values(words, flag)[-1], _get(config, paths[flag])
        selected = _select_data(current, name) if flag == "--data" else current.registry.select(current, name)
        config = _replace(config, paths[flag], selected)
        done.add(flag)


def _select_data(current: Any, text: str) -> Any:
    """Return the dataset that a text names. Options of the training curriculum keep the preset's values."""
    new = parse_data(text)
    curriculum = {each.name for each in dataclasses.fields(new) if each.metadata.get("training")}
    kept = (curriculum & options(type(current)).keys()) - named_options(text)
    return dataclasses.replace(new, **{name: getattr(current, name) for name in kept})


def check_options(config: RunConfig, words: Sequence[str]) -> None:
    """Raise a ValueError that names the right part if an option belongs to a part that is not selected."""
    paths = part_paths(config)
    for word in words:
        flag = word.partition("=")[0].replace("_", "-")
        owner, _, option = flag.rpartition(".")
        if not flag.startswith("--") or flag in paths:
            continue
        if not owner:  # an option of the run, of the model, or of tyro
            owner, option = "--model", flag[2:]
            if not _is_of_another_model(config, option.replace("-", "_")):
                continue
        if owner not in paths:
            raise ValueError(f"{flag}: there is no {owner}; expected one of {', '.join(paths)}")
        part = _get(config, paths[owner])
        option = option.replace("-", "_")
        option = option if option in options(type(part)) else option.removeprefix("no_")
        if option not in options(type(part)):
            raise ValueError(_not_an_option(flag, owner, option, part))


def _is_of_another_model(config: RunConfig, option: str) -> bool:
    if not isinstance(config, TrainConfig):
        return False
    known = options(TrainConfig).keys() | options(type(config.model)).keys()
    return option not in known and any(option in options(part.config) for part in MODELS.parts.values())


def _not_an_option(flag: str, owner: str, option: str, part: PartConfig) -> str:
    registry = part.registry
    name = registry.part_of(part).name
    others = [each.name for each in registry.parts.values() if option in options(each.config)]
    if not others:
        known = ", ".join(f"{owner}.{each.replace('_', '-')}" for each in options(type(part)))
        return f"{flag} is not an option of the {registry.kind} {name}; expected one of {known or 'none'}"
    return (
        f"{flag} is an option of the {registry.kind} {', '.join(others)}, but {name} is selected; "
        f"pass {owner} {others[0]} too, or leave it out"
    )


def _get(config: Any, path: Path) -> Any:
    for name in path:
        config = getattr(config, name)
    return config


def _replace(config: Any, path: Path, value: Any) -> Any:
    if not path:
        return value
    return dataclasses.replace(config, **{path[0]: _replace(getattr(config, path[0]), path[1:], value)})


def _values(words: Sequence[str], flag: str) -> list[str]:
    """Return the values given for a flag, as --flag VALUE or --flag=VALUE."""
    found = []
    for i, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name.replace("_", "-") != flag:
            continue
        if equals:
            found.append(value)
        elif i + 1 < len(words):
            found.append(words[i + 1])
    return found


# ----------------------------------------------------------------------------------------------------------------- tyro


def command_line(config: RunConfig) -> type[Any]:
    """Return a dataclass for tyro: a flag that selects each part, then the config with the selected parts."""
    if isinstance(config, TrainConfig):
        for name in options(type(config.model)).keys() & options(TrainConfig).keys():
            raise ValueError(f"{type(config.model).__name__} has an option {name!r}, which is an option of the run")
    fields: list[Any] = []
    for flag, path in part_paths(config).items():
        part = _get(config, path)
        names = part.registry.names()
        if flag == "--data":
            kind: Any = Annotated[str, tyro.conf.arg(name="data", help=f"Dataset: {', '.join(names)}, or a folder.")]
            default = data_text(part)
        else:
            summary = f"{part.registry.kind.capitalize()}; see `cutslots parts`."
            kind = Annotated[Literal[tuple(names)], tyro.conf.arg(name=flag[2:], help=summary)]
            default = part.registry.part_of(part).name
        fields.append((flag[2:].replace(".", "_").replace("-", "_") + "_name", kind, field(default=default)))
    plugin = Annotated[
        tyro.conf.UseAppendAction[tuple[str, ...]],
        tyro.conf.arg(name="plugin", help="Python file or module that registers parts; may be repeated."),
    ]
    fields.append(("plugin_files", plugin, field(default=())))
    fields.append(("config", Annotated[type(config), tyro.conf.arg(name="")], field(default=config)))
    return dataclasses.make_dataclass("Run", fields)
