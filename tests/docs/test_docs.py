"""The documentation: the site builds, asks nobody for anything, its links lead somewhere, what it shows runs."""

import contextlib
import functools
import html.parser
import importlib.util
import io
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import tyro

from cutslots import cli
from cutslots.presets import PRESETS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
if not (ROOT / "mkdocs.yml").is_file():
    pytest.skip("there is no mkdocs.yml: this is not a checkout", allow_module_level=True)
needs_mkdocs = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("mkdocs", "material", "latex2mathml")),
    reason="needs MkDocs: pip install 'cutslots[docs]'",
)
PAGES = sorted(path.name for path in DOCS.glob("*.md"))
EXAMPLES = {
    "idea.py": ["--out", "."],
    "shipped.py": ["--out", "shipped.png", "--scenes", "1"],
    "own_encoder.py": ["--steps", "2"],
    "own_slots.py": [],
    "own_dataset.py": ["--count", "4", "--out", "discs"],
    "own_metric.py": ["--images", "16"],
}


# ------------------------------------------------------------------------------------------------------------ the site


class Elements(html.parser.HTMLParser):
    """Names and attributes of all elements, and the text."""

    def __init__(self, page):
        super().__init__()
        self.elements, self.text = [], []
        self.feed(page.read_text())
        self.ids = {value for _, attributes in self.elements if (value := attributes.get("id"))}

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_data(self, data):
        self.text.append(data)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The pages of the site by their paths, built without a single warning."""
    out = tmp_path_factory.mktemp("site")
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(out)]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return {page: Elements(page) for page in out.rglob("*.html")}


@needs_mkdocs
def test_every_page_is_in_the_site(site):
    names = {page.name for page in site}
    assert {page.replace(".md", ".html") for page in PAGES} | {"index.html"} <= names


@needs_mkdocs
def test_links_lead_somewhere(site):
    for page, content in site.items():
        if page.name == "404.html":  # whose links are from the root of a server
            continue
        for tag, attributes in content.elements:
            link = attributes.get("href" if tag in ("a", "link") else "src")
            if not link or urlsplit(link).scheme:
                continue
            target = (page.parent / unquote(urlsplit(link).path)).resolve() if urlsplit(link).path else page
            assert target.is_file(), f"{page.name}: {link}"
            anchor = unquote(urlsplit(link).fragment)
            assert not anchor or target not in site or anchor in site[target].ids, f"{page.name}: {link}"


@needs_mkdocs
def test_no_other_host_is_asked(site):
    for page, content in site.items():
        for tag, attributes in content.elements:
            if tag != "a":
                asked = [attributes.get(name) or "" for name in ("src", "href", "srcset", "data", "poster", "action")]
                assert not any(urlsplit(link).netloc for link in asked), f"{page.name}: <{tag} {attributes}>"
    styles = [path for page in site for path in page.parent.rglob("*.css")]
    assert styles
    for path in set(styles):
        asked = re.findall(r"(?:url\(|@import)\s*['\"]?(?!data:)([^'\")\s]*)", path.read_text())
        assert not any(urlsplit(link).netloc for link in asked), path


@needs_mkdocs
def test_formulas_are_mathml(site):
    for page, content in site.items():
        text = "".join(content.text)
        assert not re.search(r"\\(frac|gamma|begin|left|sum|operatorname|mathrm)\b", text), page.name
    tags = [tag for page in site if page.name == "cuts.html" for tag, _ in site[page].elements]
    assert tags.count("math") > 50 and "merror" not in tags


@needs_mkdocs
def test_the_page_of_commands_is_the_help(site):
    def options(text):
        return set(re.findall(r"(?<![\w-])--(?!no-)[a-z][a-z-]*", text))

    page = "".join(next(content for page, content in site.items() if page.name == "commands.html").text)
    assert cli.COMMANDS.keys() | PRESETS.keys() <= set(page.split())
    words = [["train", preset] for preset in PRESETS] + [[name] for name in cli.COMMANDS]
    assert options(page) == options("".join(parsed([*each, "--help"]) for each in words))


# ------------------------------------------------------------------------------------------------------- what it shows


def parsed(words):
    """What is printed when a command is parsed and not run."""
    idle = {name: functools.wraps(command)(lambda **_: None) for name, command in cli.COMMANDS.items()}
    said, status = io.StringIO(), 0
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            tyro.extras.subcommand_cli_from_dict(idle, prog="cutslots", args=words)
    except SystemExit as error:
        status = error.code
    assert not status, f"cutslots {' '.join(words)}\n{said.getvalue()}"
    return said.getvalue()


def parts(text):
    """A page, taken apart: fenced blocks by their language ("python", "bash", ""), then line by line what is indented
    ("    ") and prose (None)."""
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


def commands(text):
    """The words after `cutslots` of every command in blocks of code; and of those in the prose that have arguments."""
    for kind, code in parts(text.replace("\\\n", " ")):
        found = r"`cutslots ([a-z]+ [^`]*)`" if kind is None else r"^(?:.*[ /])?cutslots ([a-z]+(?: .*)?)$"
        for line in re.findall(found, code, re.MULTILINE) if kind in (None, "    ", "", "bash", "text") else ():
            yield [{"PRESET": "tiny", "S": "0"}.get(word, word) for word in shlex.split(line, comments=True)]


def test_commands_are_found():
    text = (
        "Say `cutslots track` or `cutslots train PRESET --seed S`.\n\n    .venv/bin/cutslots info  # why\n\n```bash\n"
    )
    text += "torchrun -m cutslots train tiny \\\n    --steps 2\n```\n\n```python\nfrom cutslots import load\n```\n"
    expected = [["train", "tiny", "--seed", "0"], ["info"], ["train", "tiny", "--steps", "2"]]
    assert list(commands(text)) == expected
    with pytest.raises(AssertionError, match="--sead"):
        parsed(["train", "tiny", "--sead", "0"])
    parsed(["train", "tiny", "--seed", "0"])


@pytest.mark.parametrize("page", PAGES)
def test_commands_parse(page):
    for words in commands((DOCS / page).read_text()):
        parsed(words)


def snippets():
    for page in PAGES:
        blocks = [code for kind, code in parts((DOCS / page).read_text()) if kind == "python"]
        for number, code in enumerate(blocks):
            needs = "needs a GPU" if '"cuda"' in code else "needs a dataset" if '"data/' in code else ""
            marks = [pytest.mark.skip(reason=needs)] if needs else []
            yield pytest.param(code, id=f"{page}-{number}", marks=marks)


@pytest.mark.parametrize("code", list(snippets()))
def test_python_runs(code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "snippet", "exec"), {"__name__": "snippet"})


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_run(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [name, *EXAMPLES[name]])
    runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
    assert capsys.readouterr().out


def test_the_examples_are_those_of_the_page():
    shown = re.findall(r"^<!-- examples/(.*) -->$", (DOCS / "extending.md").read_text(), re.MULTILINE)
    assert shown and set(shown) == {name for name in EXAMPLES if name.startswith("own_")}


@needs_mkdocs
def test_examples_are_shown_whole(site):
    page = next(content for page, content in site.items() if page.name == "extending.html")
    text = "".join("".join(page.text).split())
    for name in EXAMPLES:
        if name.startswith("own_"):
            assert "".join((ROOT / "examples" / name).read_text().split()) in text, name
