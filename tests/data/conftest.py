"""Small caches for the tests of `cutslots prepare` and of prepared datasets."""

import shutil
from pathlib import Path

import pytest

from cutslots.data import prepare as preparing
from cutslots.data.prepare import prepare
from tests.data.prepare_helpers import SIZE, WRITE, dataset
from tests.data.small_files import (
    clevrtex_files,
    write_files,
)


@pytest.fixture(autouse=True)
def save_progress_often(monkeypatch):
    """Save progress after every record: interruptions are then tested at every one."""
    monkeypatch.setattr(preparing, "SAVE_EVERY", -1.0)


@pytest.fixture(scope="session")
def clean(tmp_path_factory):
    """Return the cache of an uninterrupted run for each source; tests must not write to it."""
    made = {}

    def get(kind):
        if kind not in made:
            root = tmp_path_factory.mktemp(kind)
            WRITE[kind](root / "source")
            prepare(dataset(kind), root / "source", root / "out", SIZE, quiet=True)
            made[kind] = root / "out"
        return made[kind]

    return get


@pytest.fixture
def folder(tmp_path):
    return WRITE["clevrtex"](tmp_path / "source")


@pytest.fixture
def finished(tmp_path, clean):
    """A copy of a clean cache, to damage."""
    return Path(shutil.copytree(clean("clevrtex"), tmp_path / "out"))


@pytest.fixture(scope="session")
def caches(tmp_path_factory):
    """Prepare thirty scenes of CLEVRTEX and five videos of MOVi-A at 16x16."""
    root = tmp_path_factory.mktemp("caches")
    objects = tuple(i % 11 for i in range(30))
    prepare("clevrtex", write_files(root / "a", clevrtex_files("full", objects)), root / "clevrtex", 16, quiet=True)
    prepare("movi-a", WRITE["movi-a"](root / "b"), root / "movi-a", 16, quiet=True)
    return root
