"""What the site does beyond Markdown, at build time.

- Formulas become MathML, which browsers render without scripts.
- commands.md gets the options of every command, part and preset, read from the code.
- A link to a source file outside docs/ leads to a page that shows the file.
- A comment that names a file under examples/ becomes that file.
"""

from __future__ import annotations

import ast
import dataclasses
import html
import inspect
import re
import textwrap
import types
import typing
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import docstring_parser
import tyro
from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

from cutslots import cli
from cutslots.listing import FLAGS
from cutslots.registry import REGISTRIES, PartConfig, Registry
from cutslots.training import presets
from cutslots.training.config import PretrainConfig, TrainConfig
from cutslots.training.pretrain_presets import PRETRAIN_SUMMARIES

ROOT = Path(__file__).parent.parent
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)
SOURCE = re.compile(r"\]\(\.\./([\w/]+\.py)\)")
EXAMPLE = re.compile(r"^<!-- (examples/\w+\.py) -->$", re.MULTILINE)


def on_page_content(html_text: str, **_: Any) -> str:
    def mathml(match: re.Match[str]) -> str:
        latex = html.unescape(match[3]).strip().replace("{aligned}", "{align*}")  # the converter knows only this name
        return convert(latex, display="block" if match[1] == "div" else "inline")

    return FORMULA.sub(mathml, html_text)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for every source file that a page links to."""
    pages = [file.content_string for file in files.documentation_pages()]
    for name in sorted({name for page in pages for name in SOURCE.findall(page)}):
        text = (ROOT / name).read_text()
        content = f"---\nsearch: {{ exclude: true }}\n---\n# {name}\n\n`````python\n{text}`````\n"
        page = File.generated(config, f"source/{name}.md", content=content, inclusion=InclusionLevel.NOT_IN_NAV)
        files.append(page)
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    if page.file.src_uri == "commands.md":
        markdown = markdown.replace("<!-- commands -->", "\n\n".join(map(command, cli.COMMANDS)))
        markdown = markdown.replace("<!-- presets -->", preset_table())
    markdown = EXAMPLE.sub(r"```python\n--8<--\n\1\n--8<--\n```", markdown)  # pymdownx.snippets inserts the file
    up = "../" * page.file.src_uri.count("/")
    return SOURCE.sub(rf"]({up}source/\1.md)", markdown)


# ------------------------------------------------------------------------------------------------------------ commands


class Option(typing.NamedTuple):
    names: list[str]  # --out, -o; or CHECKPOINT
    kind: Any  # the type of its value
    default: Any  # MISSING for a required option
    meaning: str


def command(name: str) -> str:
    """Return the section of a command."""
    function = cli.COMMANDS[name]
    described = docstring_parser.parse(function.__doc__ or "")
    if name in RUN_OPTIONS:
        usage = f"```text\ncutslots {name} PRESET [options]\n```"
        return f"## {name}\n\n{described.description}\n\n{usage}\n\n{RUN_OPTIONS[name]()}"
    listed = list(options(function))
    required = [each for each in listed if each.default is dataclasses.MISSING]
    words = [names[0] if names[0].isupper() else f"{names[0]} {metavar(kind)}" for names, kind, *_ in required]
    usage = " ".join(["cutslots", name, *words, *(["[options]"] if len(required) < len(listed) else [])])
    body = table(listed) if listed else "It has no options."
    return f"## {name}\n\n{described.description}\n\n```text\n{usage}\n```\n\n{body}"


def train_options() -> str:
    """Return the presets, the options of a training run, and the parts with their options."""
    intro = "The defaults of these options come from the [preset](#presets)."
    kinds = [kind for kind in FLAGS if kind != "objective"]
    return run_options("train", presets.SUMMARIES, intro, TrainConfig, kinds)


def pretrain_options() -> str:
    """Return the same of a run of `cutslots pretrain`. Options of encoders and datasets are in the section of train."""
    intro = (
        "The defaults of these options come from the preset. Those of `--encoder` and `--data` are "
        "[those of train](#train)."
    )
    return run_options("pretrain", PRETRAIN_SUMMARIES, intro, PretrainConfig, ["objective"])


def run_options(name: str, summaries: dict[str, str], intro: str, config: type, kinds: list[str]) -> str:
    """Return the presets of a command, the options of its runs, and parts of these kinds with their options."""
    rows = "\n".join(f"| `{preset}` | {summary} |" for preset, summary in summaries.items())
    plugin = Option(["--plugin"], str, (), "Python file or module that registers parts; may be repeated.")
    run = table([plugin, *fields(config)])
    registries = {registry.kind: registry for registry in REGISTRIES}
    parts = "\n\n".join(part_options(name, registries[kind]) for kind in kinds)
    return f"| preset | |\n|---|---|\n{rows}\n\n{intro}\n\n{run}\n\n{parts}"


RUN_OPTIONS = {"train": train_options, "pretrain": pretrain_options}


def part_options(name: str, registry: Registry) -> str:
    """Return the parts of a registry, and a table of options for each that has any."""
    flag = FLAGS[registry.kind]
    text = [f"### {name} {flag}\n\n| `{flag}` | |\n|---|---|"]
    text[0] += "".join(f"\n| `{part.name}` | {part.summary} |" for part in registry.parts.values())
    for part in registry.parts.values():
        listed = list(fields(part.config, option_prefix(registry)))
        if listed:
            text.append(f"Options of `{flag} {part.name}`:\n\n{table(listed)}")
    return "\n\n".join(text)


def option_prefix(registry: Registry) -> str:
    """Return what the options of a part start with. Those of a model have no prefix."""
    return "--" if registry.kind == "model" else FLAGS[registry.kind] + "."


def table(listed: Iterable[Option]) -> str:
    rows = ["| option | |", "|---|---|"]
    for names, kind, default, meaning in listed:
        choices = typing.get_args(kind) if typing.get_origin(kind) is typing.Literal else ()
        if choices:
            meaning += " One of " + ", ".join(f"`{choice}`" for choice in choices) + "."
        if default not in (dataclasses.MISSING, None, ()) and default is not False:
            meaning += f" Default: `{format_value(default)}`."
        named = ", ".join(f"`{name}`" for name in names)
        value = "" if choices or names[0].isupper() else metavar(kind)
        rows.append(f"| {named}&nbsp;{value.replace(' ', '&nbsp;')} | {meaning} |")
    return "\n".join(rows)


def options(function: Callable[..., None]) -> Iterator[Option]:
    """Yield the options of a command, read from its signature as tyro does."""
    hints = typing.get_type_hints(function, include_extras=True)
    helps = {each.arg_name: each.description or "" for each in docstring_parser.parse(function.__doc__ or "").params}
    for name, parameter in inspect.signature(function).parameters.items():
        kind, *marks = typing.get_args(hints[name]) if hasattr(hints[name], "__metadata__") else (hints[name],)
        positional = any(mark in typing.get_args(tyro.conf.Positional[str]) for mark in marks)
        aliases = [alias for mark in marks for alias in getattr(mark, "aliases", None) or ()]
        own_name = next((mark.name for mark in marks if getattr(mark, "name", None)), name)
        own_help = next((mark.help for mark in marks if getattr(mark, "help", None)), helps.get(name, ""))
        names = [name.upper()] if positional else [to_flag(own_name), *aliases]
        default = dataclasses.MISSING if parameter.default is parameter.empty else parameter.default
        yield Option(names, kind, default, " ".join(own_help.split()))


def fields(kind: Any, prefix: str = "--") -> Iterator[Option]:
    """Yield the options of a config class. The string below a field is its meaning; nested parts are left out."""
    hints = typing.get_type_hints(kind)
    meanings = {name: text for base in reversed(kind.__mro__) for name, text in field_docs(base).items()}
    for field in dataclasses.fields(kind):
        is_part = isinstance(hints[field.name], type) and issubclass(hints[field.name], PartConfig)
        if not is_part and field.name in meanings:
            flag = prefix + field.name.replace("_", "-")
            yield Option([flag], hints[field.name], field.default, meanings[field.name])


def field_docs(kind: type) -> dict[str, str]:
    """Return the strings below the fields of a class."""
    if not dataclasses.is_dataclass(kind):
        return {}
    body = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0].body  # type: ignore[attr-defined]
    return {
        field.target.id: " ".join(ast.literal_eval(text.value).split())  # type: ignore[union-attr]
        for field, text in pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
    }


def to_flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def metavar(kind: Any) -> str:
    """Return what follows an option of this type."""
    inner = typing.get_args(kind)
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        return metavar(next(each for each in inner if each is not types.NoneType))
    if typing.get_origin(kind) is tuple:
        return metavar(inner[0]) + (" ..." if inner[1] is ... else " " + metavar(inner[1]))
    return {bool: "", int: "INT", float: "FLOAT", Path: "PATH"}.get(kind, "TEXT")


def format_value(value: Any) -> str:
    if isinstance(value, tuple):
        return " ".join(map(format_value, value))
    if isinstance(value, bool) or value is None:
        return {None: "none", True: "yes", False: "no"}[value]
    return f"{value:g}" if isinstance(value, float) else str(value)


# ------------------------------------------------------------------------------------------------------------- presets


def preset_table() -> str:
    """Return a row for each option and a column for each preset. What differs from `clevr` is bold."""
    columns = {name: dict(preset_values(config)) for name, config in presets.PRESETS.items()}
    flags = dict.fromkeys(flag for column in columns.values() for flag in column)
    rows = [f"| | {' | '.join(f'`{name}`' for name in columns)} |", "|---" * (len(columns) + 1) + "|"]
    for flag in flags:
        values = [column.get(flag, "") for column in columns.values()]
        base = columns["clevr"].get(flag, "")
        cells = [value if value == base or not value else f"**{value}**" for value in values]
        rows.append(f"| `{flag}` | {' | '.join(cells)} |")
    return "\n".join(rows)


def preset_values(config: Any, prefix: str = "--") -> Iterator[tuple[str, str]]:
    """Yield flag and value of every option of a preset, parts included."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if isinstance(value, PartConfig):
            yield FLAGS[value.registry.kind], value.registry.part_of(value).name
            yield from preset_values(value, option_prefix(value.registry))
        elif field.name not in ("preset", "plugins") and (
            not isinstance(config, TrainConfig) or value != field.default
        ):
            yield prefix + field.name.replace("_", "-"), format_value(value)
