"""What the site does beyond Markdown, at build time:

- formulas become MathML, which browsers draw by themselves;
- commands.md is given the options of every command and the numbers of every preset, read from the code;
- a link to a source file outside docs/ leads to a page that shows the file;
- a comment that names a file under examples/ becomes that file.
"""

from __future__ import annotations

import ast
import dataclasses
import html
import inspect
import re
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

from cutslots import cli, presets

ROOT = Path(__file__).parent.parent
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)
SOURCE = re.compile(r"\]\(\.\./([\w/]+\.py)\)")
EXAMPLE = re.compile(r"^<!-- (examples/\w+\.py) -->$", re.MULTILINE)


def on_page_content(html_text: str, **_: Any) -> str:
    def mathml(found: re.Match[str]) -> str:
        latex = html.unescape(found[3]).strip().replace("{aligned}", "{align*}")  # the name that the converter knows
        return convert(latex, display="block" if found[1] == "div" else "inline")

    return FORMULA.sub(mathml, html_text)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds a page for every source file that a page links to."""
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
    markdown = EXAMPLE.sub(r"```python\n--8<--\n\1\n--8<--\n```", markdown)  # which pymdownx.snippets fills in
    return SOURCE.sub(r"](source/\1.md)", markdown)


# ------------------------------------------------------------------------------------------------------------ commands


class Option(typing.NamedTuple):
    names: list[str]  # --out, -o; or WEIGHTS
    kind: Any  # the type of what it takes
    default: Any  # MISSING where one must be given
    meaning: str


def command(name: str) -> str:
    function = cli.COMMANDS[name]
    described = docstring_parser.parse(function.__doc__ or "")
    listed = list(options(function))
    if name == "train":
        usage = "cutslots train PRESET [options]"
        body = "| | |\n|---|---|\n" + "\n".join(f"| `{k}` | {v} |" for k, v in cli.described.items())
        body += "\n\nThe options of every preset, its [numbers](#presets) being their defaults:\n\n"
        body += table(option for kind in (presets.TrainConfig, presets.ModelConfig) for option in fields(kind))
    else:
        needed = [each for each in listed if each.default is dataclasses.MISSING]
        words = [first if first.isupper() else f"{first} {follows(kind)}" for (first, *_), kind, *_ in needed]
        usage = " ".join(["cutslots", name, *words, *(["[options]"] if len(needed) < len(listed) else [])])
        body = table(listed) if listed else "It has no options."
    return f"## {name}\n\n{described.description}\n\n```text\n{usage}\n```\n\n{body}"


def table(listed: Iterable[Option]) -> str:
    rows = ["| | |", "|---|---|"]
    for names, kind, default, meaning in listed:
        choices = typing.get_args(kind) if typing.get_origin(kind) is typing.Literal else ()
        if choices:
            meaning += " One of " + ", ".join(f"`{choice}`" for choice in choices) + "."
        if default not in (dataclasses.MISSING, None, ()) and default is not False:
            meaning += f" Default: `{written(default)}`."
        named = ", ".join(f"`{name}`" for name in names)
        after = "" if choices or names[0].isupper() else follows(kind)
        rows.append(f"| {named}&nbsp;{after.replace(' ', '&nbsp;')} | {meaning} |")
    return "\n".join(rows)


def options(function: Callable[..., None]) -> Iterator[Option]:
    """Read off the signature, as tyro does."""
    hints = typing.get_type_hints(function, include_extras=True)
    told = {each.arg_name: each.description or "" for each in docstring_parser.parse(function.__doc__ or "").params}
    for name, parameter in inspect.signature(function).parameters.items():
        kind, *marks = typing.get_args(hints[name]) if hasattr(hints[name], "__metadata__") else (hints[name],)
        placed = any(mark in typing.get_args(tyro.conf.Positional[str]) for mark in marks)
        aliases = [alias for mark in marks for alias in getattr(mark, "aliases", None) or ()]
        names = [name.upper()] if placed else [flag(name), *aliases]
        default = dataclasses.MISSING if parameter.default is parameter.empty else parameter.default
        yield Option(names, kind, default, " ".join(told.get(name, "").split()))


def fields(kind: type) -> Iterator[Option]:
    """Of a configuration whose fields are followed by what they mean."""
    hints = typing.get_type_hints(kind)
    body = ast.parse(inspect.getsource(kind)).body[0].body  # type: ignore[attr-defined]
    for field, text in pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
            name, meaning = field.target.id, " ".join(ast.literal_eval(text.value).split())  # type: ignore[union-attr]
            default = dataclasses.MISSING if field.value is None else ast.literal_eval(field.value)
            yield Option([flag(name)], hints[name], default, meaning)


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def follows(kind: Any) -> str:
    """What an option of this type is followed by."""
    inner = typing.get_args(kind)
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        return follows(next(each for each in inner if each is not types.NoneType))
    if typing.get_origin(kind) is tuple:
        return follows(inner[0]) + (" ..." if inner[1] is ... else " " + follows(inner[1]))
    return {bool: "", int: "INT", float: "FLOAT", Path: "PATH"}.get(kind, "TEXT")


def written(value: Any) -> str:
    if isinstance(value, tuple):
        return " ".join(map(written, value))
    if isinstance(value, bool) or value is None:
        return {None: "none", True: "yes", False: "no"}[value]
    return f"{value:g}" if isinstance(value, float) else str(value)


def preset_table() -> str:
    """A row for each number, a column for each preset; in bold what differs from the paper's text for CLEVR."""
    rows = [f"| | {' | '.join(f'`{name}`' for name in presets.PRESETS)} |", "|---" * (len(presets.PRESETS) + 1) + "|"]
    for kind, of in ((presets.TrainConfig, lambda c: c), (presets.ModelConfig, lambda c: c.model)):
        for field in dataclasses.fields(kind):
            values = [getattr(of(config), field.name) for config in presets.PRESETS.values()]
            same = field.default is not dataclasses.MISSING and all(value == field.default for value in values)
            if field.name in ("model", "preset") or same:
                continue
            base = getattr(of(presets.PRESETS["clevr"]), field.name)
            cells = [written(value) if value == base else f"**{written(value)}**" for value in values]
            rows.append(f"| `{flag(field.name)}` | {' | '.join(cells)} |")
    return "\n".join(rows)
