import pytest

from cutslots import registry

from .pages import ROOT


@pytest.fixture
def registries(monkeypatch):
    """Parts and plugins that a test registers are removed after it."""
    monkeypatch.setattr(registry, "_loaded", dict(registry._loaded))
    before = [(each, dict(each.parts)) for each in registry.REGISTRIES]
    yield
    for each, parts in before:
        each.parts = parts


@pytest.fixture
def folder(tmp_path, monkeypatch, registries):
    """A working directory with what the commands of the docs name: examples/, and photos/ with images/."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "photos" / "images").mkdir(parents=True)
    return tmp_path
