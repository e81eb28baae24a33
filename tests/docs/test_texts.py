"""What the texts promise: a short README, valid links, a complete list of files, terms that people search for."""

import re

import pytest

from .pages import DOCS, PAGES, ROOT, TEXTS, page_id

SEARCHED = ["resume", "checkpoint", "fine-tune", "inference", "augmentation", "confidence", "preset", "plugin"]


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 100


@pytest.mark.parametrize("path", TEXTS, ids=page_id)
def test_relative_links_are_valid(path):
    for link in re.findall(r"\]\((?!\w+:|#)([^)#\s]+)", path.read_text()):
        assert (path.parent / link).exists(), link


@pytest.mark.parametrize("term", SEARCHED)
def test_terms_appear(term):
    assert any(term in page.read_text().lower() for page in PAGES)


def test_the_page_of_architecture_lists_every_file():
    text = (DOCS / "architecture.md").read_text()
    for path in (ROOT / "cutslots").rglob("*.py"):
        package = path.parent.name + "/"
        assert package in text and (path.name in text), path.relative_to(ROOT)
