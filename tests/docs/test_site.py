"""The site builds without warnings, its links are valid, and it loads nothing from other hosts."""

import html.parser
import importlib.util
import re
import subprocess
import sys
from urllib.parse import unquote, urlsplit

import pytest

import cutslots
from cutslots import cli
from cutslots.listing import FLAGS
from cutslots.registry import REGISTRIES
from cutslots.training.presets import PRESETS

from .pages import DOCS, PAGES, ROOT, parse

NEEDED = ("mkdocs", "material", "latex2mathml", "mkdocstrings", "mkdocstrings_handlers.python")
pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name.partition(".")[0]) is None for name in NEEDED),
    reason="needs MkDocs: pip install 'cutslots[docs]'",
)


class Elements(html.parser.HTMLParser):
    """Names and attributes of all elements of a page, and its text."""

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
def folder(tmp_path_factory):
    """The folder of the site, built without a warning."""
    out = tmp_path_factory.mktemp("site")
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


@pytest.fixture(scope="module")
def site(folder):
    """The pages of the site by their paths."""
    return {page: Elements(page) for page in folder.rglob("*.html")}


def text_of(site, folder, name):
    return "".join(site[folder / name].text)


def test_every_page_is_in_the_site(site, folder):
    expected = {folder / page.relative_to(DOCS).with_suffix(".html") for page in PAGES}
    assert expected <= site.keys()


def test_links_are_valid(site):
    for page, content in site.items():
        if page.name == "404.html":  # its links start at the root of a server
            continue
        for tag, attributes in content.elements:
            link = attributes.get("href" if tag in ("a", "link") else "src")
            if not link or urlsplit(link).scheme:
                continue
            target = (page.parent / unquote(urlsplit(link).path)).resolve() if urlsplit(link).path else page
            assert target.is_file(), f"{page.name}: {link}"
            anchor = unquote(urlsplit(link).fragment)
            assert not anchor or target not in site or anchor in site[target].ids, f"{page.name}: {link}"


def test_nothing_is_loaded_from_other_hosts(site):
    for page, content in site.items():
        for tag, attributes in content.elements:
            if tag != "a":
                loaded = [attributes.get(name) or "" for name in ("src", "href", "srcset", "data", "poster", "action")]
                assert not any(urlsplit(link).netloc for link in loaded), f"{page.name}: <{tag} {attributes}>"
    styles = {path for page in site for path in page.parent.rglob("*.css")}
    assert styles
    for path in styles:
        loaded = re.findall(r"(?:url\(|@import)\s*['\"]?(?!data:)([^'\")\s]*)", path.read_text())
        assert not any(urlsplit(link).netloc for link in loaded), path


def test_formulas_are_mathml(site, folder):
    for page, content in site.items():
        text = "".join(content.text)
        assert not re.search(r"\\(frac|gamma|begin|left|sum|operatorname|mathrm)\b", text), page.name
    tags = [tag for tag, _ in site[folder / "cuts.html"].elements]
    assert tags.count("math") > 50 and "merror" not in tags


def test_examples_are_shown_in_full(site, folder):
    text = "".join(text_of(site, folder, "extending.html").split())
    for path in (ROOT / "examples").glob("own_*.py"):
        assert "".join(path.read_text().split()) in text, path.name


# ------------------------------------------------------------------------------------------------------------ reference


def flags(text):
    found = re.findall(r"(?<![\w-])--[a-z][a-z-]*(?:\.[a-z-]+)*", text)
    return {flag for flag in found if not re.search(r"(--|\.)no-|--tyro", flag)}


def selections():
    """Yield command lines of `train` and `pretrain` that select every preset and every part."""
    for preset in PRESETS:
        yield ["train", preset]
    for registry in REGISTRIES:
        command = "pretrain" if registry.kind == "objective" else "train"
        for part in registry.parts.values():
            needs_path = registry.kind == "dataset" and "path" in part.config.__dataclass_fields__
            yield [command, "tiny", FLAGS[registry.kind], part.name + (":DIR" if needs_path else "")]


def test_the_page_of_commands_lists_every_option(site, folder, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    page = text_of(site, folder, "commands.html")
    assert cli.COMMANDS.keys() | PRESETS.keys() <= set(page.split())
    assert {part for registry in REGISTRIES for part in registry.parts} <= set(page.split())
    words = [*selections(), *([name] for name in cli.COMMANDS if name != "train")]
    assert flags(page) - {"--help"} == flags("".join(parse([*each, "--help"]) for each in words)) - {"--help"}


def test_the_reference_documents_the_public_names(site, folder):
    text = "".join(text_of(site, folder, f"api/{path.stem}.html") for path in (DOCS / "api").glob("*.md"))
    shown = set(re.findall(r"\w+", text))
    configs = {name for name in cutslots.__all__ if name.endswith("Config")}
    assert set(cutslots.__all__) - configs - shown - {"PRESETS"} == set()
