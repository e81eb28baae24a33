"""The notebook is valid, holds no outputs, and runs from top to bottom."""

import json
import re

import matplotlib as mpl
import pytest

from .pages import DOCS

NOTEBOOKS = sorted((DOCS / "notebooks").glob("*.ipynb"))


def cells(path, kind):
    for cell in json.loads(path.read_text())["cells"]:
        if cell["cell_type"] == kind:
            yield "".join(cell["source"])


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_the_format_is_version_4(path):
    notebook = json.loads(path.read_text())
    assert notebook.keys() == {"cells", "metadata", "nbformat", "nbformat_minor"}
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    for cell in notebook["cells"]:
        required = {"cell_type", "id", "metadata", "source"}
        code = {"execution_count", "outputs"} if cell["cell_type"] == "code" else set()
        assert cell["cell_type"] in ("code", "markdown") and cell.keys() == required | code
        assert re.fullmatch(r"[\w-]{1,64}", cell["id"]) and all(isinstance(line, str) for line in cell["source"])
        assert not cell.get("outputs") and cell.get("execution_count") is None
    ids = [cell["id"] for cell in notebook["cells"]]
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_it_runs(path, folder, capsys):
    with mpl.rc_context():
        mpl.use("Agg")
        namespace = {"__name__": "__main__"}
        for code in cells(path, "code"):
            exec(compile(code, path.name, "exec"), namespace)
        namespace["plt"].close("all")
    assert "ARI-FG" in capsys.readouterr().out


def test_there_is_one_and_its_links_are_valid():
    assert NOTEBOOKS
    for path in NOTEBOOKS:
        for text in cells(path, "markdown"):
            for link in re.findall(r"\]\(([^)#]+)", text):
                assert (path.parent / link).is_file(), link
