"""The Python code of the documentation runs: snippets, examples, and the commands of the plugins among them."""

import ast
import re
import runpy
import sys
from importlib.util import find_spec

import pytest

from cutslots import cli

from .pages import DOCS, ROOT, TEXTS, blocks, commands, page_id

SCRIPTS = {
    "idea.py": ["--out", "."],
    "shipped.py": ["--out", "shipped.png", "--scenes", "1"],
    "camouflage.py": ["--out", "camouflage.png"],
    "segment.py": ["--out", "."],
    "minimum_cuts.py": ["--out", "."],
    "learned_capacities.py": ["--out", ".", "--seeds", "1", "--scenes", "2", "--test-scenes", "4", "--steps", "2"],
    "own_dataset.py": [],
    "own_metric.py": ["--num-images", "16"],
}
PLUGINS = ["own_encoder.py", "own_slots.py", "own_decoder.py", "own_loss.py", "own_dataset.py"]
SHORT_TRAINING = [
    "--max-steps",
    "2",
    "--batch-size",
    "4",
    "--num-images",
    "16",
    "--num-eval-images",
    "4",
    "--accelerator",
    "cpu",
]


def snippets():
    for path in TEXTS:
        for number, code in enumerate(code for kind, code in blocks(path.read_text()) if kind == "python"):
            needs = "needs a GPU" if '"cuda"' in code else "needs a dataset" if '"data/' in code else ""
            if "onnxruntime" in code and find_spec("onnxruntime") is None:
                needs = "needs the onnx extra"
            marks = [pytest.mark.skip(reason=needs)] if needs else []
            yield pytest.param(code, id=f"{page_id(path)}-{number}", marks=marks)


@pytest.mark.parametrize("code", list(snippets()))
def test_snippets_run(code, folder, monkeypatch):
    from cutslots.training import presets

    monkeypatch.setattr(presets, "SUMMARIES", dict(presets.SUMMARIES))
    before = dict(presets.PRESETS)
    try:
        exec(compile(code, "snippet", "exec"), {"__name__": "snippet"})
    finally:
        presets.PRESETS.clear()
        presets.PRESETS.update(before)


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_run(name, folder, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [name, *SCRIPTS[name]])
    monkeypatch.syspath_prepend(ROOT / "examples")  # as for a script
    runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
    assert capsys.readouterr().out


@pytest.mark.parametrize("name", PLUGINS)
def test_plugins_run_from_the_command_line(name, folder, monkeypatch, capsys):
    """Run the commands in the docstring of the example, with fewer steps and images."""
    docstring = ast.get_docstring(ast.parse((ROOT / "examples" / name).read_text()), clean=False)
    found = list(commands(docstring))
    assert found
    for words in found:
        short = SHORT_TRAINING if words[0] == "train" else ["--num-images", "2"]
        monkeypatch.setattr(sys, "argv", ["cutslots", *words, *short, "--accelerator", "cpu"])
        cli.main()
    assert capsys.readouterr().out


def test_the_page_of_extending_shows_all_examples():
    shown = re.findall(r"^<!-- examples/(.*) -->$", (DOCS / "extending.md").read_text(), re.MULTILINE)
    assert set(shown) == {path.name for path in (ROOT / "examples").glob("own_*.py")}
