"""The pages of the documentation, their blocks of code and the commands in them."""

from __future__ import annotations

import contextlib
import functools
import io
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import tyro

from cutslots import cli
from cutslots.training import loop  # noqa: F401  registers all models
from cutslots.training.options import parse_pretrain, parse_train

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
if not (ROOT / "mkdocs.yml").is_file():
    pytest.skip("there is no mkdocs.yml: this is not a checkout", allow_module_level=True)
PAGES = sorted(DOCS.rglob("*.md"))
TEXTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES]
PARSERS = {"train": parse_train, "pretrain": parse_pretrain}
PLACEHOLDERS = {"PRESET": "tiny", "DATA": "plain", "S": "0", "HEIGHT": "64", "WIDTH": "64", "FOLDER": "photos/"}


def page_id(path: Path) -> str:
    return str(path.relative_to(ROOT))


def blocks(text: str) -> Iterator[tuple[str | None, str]]:
    """Yield fenced blocks with their language ("python", "bash", ""), then indented lines ("    ") and prose (None)."""
    fence, lines = None, []
    for line in text.splitlines():
        if line.startswith("```"):
            if fence is None:
                fence, lines = line[3:], []
            else:
                yield fence, "\n".join(lines) + "\n"
                fence = None
        elif fence is not None:
            lines.append(line)
        else:
            yield ("    " if line.startswith("    ") else None), line


def commands(text: str) -> Iterator[list[str]]:
    """Yield the words after `cutslots` of commands in blocks of code, and of those in prose that have arguments."""
    prose = " ".join(code for kind, code in blocks(text.replace("\\\n", " ")) if kind is None)
    found = re.findall(r"`cutslots ([a-z]+ [^`]*)`", prose)
    for kind, code in blocks(text.replace("\\\n", " ")):
        if kind in ("    ", "", "bash", "text"):
            found += re.findall(r"^(?:.*[ /])?cutslots ([a-z]+(?: .*)?)$", code, re.MULTILINE)
    for line in found:
        yield [PLACEHOLDERS.get(word, word) for word in shlex.split(line, comments=True)]


def parse(words: list[str]) -> str:
    """Parse a command without running it; return what is printed. Fails if the command line is wrong."""
    idle = {name: functools.wraps(command)(lambda **_: None) for name, command in cli.COMMANDS.items()}
    printed, status = io.StringIO(), 0
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            if words[0] in PARSERS:
                PARSERS[words[0]](words[1:])
            else:
                tyro.extras.subcommand_cli_from_dict(idle, prog="cutslots", args=words)
    except SystemExit as error:
        status = error.code
    except ValueError as error:
        status = str(error)
    assert not status, f"cutslots {' '.join(words)}\n{printed.getvalue()}{status}"
    return printed.getvalue()
