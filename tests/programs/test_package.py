import ast
from pathlib import Path

import pytest

import cutslots.programs

MODULES = sorted(Path(cutslots.programs.__file__).parent.glob("*.py"))


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_programs_import_nothing_else_of_cutslots(path):
    for node in ast.walk(ast.parse(path.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or "."] if isinstance(node, ast.ImportFrom) else []
        assert not [name for name in names if name.startswith(("cutslots", ".")) and name.split(".")[1] != "programs"]


@pytest.mark.parametrize("path", [path for path in MODULES if path.stem != "__init__"], ids=lambda path: path.stem)
def test_the_package_docstring_lists_every_module(path):
    assert f"\n    {path.stem} " in cutslots.programs.__doc__
