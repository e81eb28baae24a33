"""The command line as a whole: help, version, listings, completion. Options of `train` are in tests/training."""

import subprocess
import sys
from typing import NamedTuple, get_args, get_type_hints

import pytest

import cutslots
from cutslots import cli
from cutslots.cli import COMMANDS
from cutslots.data.published import PUBLISHED
from cutslots.models.checkpoints import checkpoint_names
from cutslots.registry import REGISTRIES
from cutslots.scenes import FAMILIES
from cutslots.training.presets import PRESETS, SUMMARIES
from cutslots.training.pretrain_presets import PRETRAIN_PRESETS


class Done(NamedTuple):
    returncode: int | str
    stdout: str
    stderr: str


@pytest.fixture
def run(monkeypatch, capsys):
    """A function that runs a command in this process."""
    monkeypatch.setenv("COLUMNS", "200")

    def run_command(*words):
        monkeypatch.setattr(sys, "argv", ["cutslots", *words])
        code = 0
        try:
            cli.main()
        except SystemExit as ended:
            code = ended.code or 0
        return Done(code, *capsys.readouterr())

    return run_command


HELP = """
import contextlib, io, sys, cutslots.cli
for words in {words!r}:
    sys.argv = ["cutslots", *words]
    with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.suppress(SystemExit):
        cutslots.cli.main()
    assert "usage: cutslots" in printed.getvalue(), words
    assert "torch" not in sys.modules, words
"""


def test_help_does_not_import_torch():
    """Only `train --help` and `pretrain --help` do: their options are those of registered parts."""
    words = [["--help"], *([command, "--help"] for command in COMMANDS if command not in ("train", "pretrain"))]
    done = subprocess.run([sys.executable, "-c", HELP.format(words=words)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


WITHOUT_STEPS = "sys.argv = ['cutslots', 'train', 'tiny', '--max-steps', '-1']; cli.main()"  # ends with an error


@pytest.mark.parametrize(
    "code, imported",
    [
        (WITHOUT_STEPS, False),
        ("cli._import_fabric(); import torchmetrics", True),
        ("import torchmetrics; cli._import_fabric(); import torchmetrics", True),
    ],
)
def test_training_does_not_import_torchmetrics(tmp_path, code, imported):
    (tmp_path / "torchmetrics.py").write_text("__version__ = '1.0'; print('imported')")
    begin = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from cutslots import cli; "
    done = subprocess.run([sys.executable, "-c", begin + code], capture_output=True, text=True)
    assert done.stdout == ("imported\n" if imported else "")
    assert done.stderr.startswith("cutslots: max_steps is -1; expected") == (code == WITHOUT_STEPS)


def test_help_lists_the_commands(run):
    done = run("--help")
    assert done.returncode == 0 and all(f" {command} " in done.stdout for command in COMMANDS)


def test_help_of_train_lists_the_presets(run):
    done = run("train", "--help")
    assert done.returncode == 0 and all(name in done.stdout for name in PRESETS)
    assert SUMMARIES["tiny"] in done.stdout


def test_version_of_the_module():
    done = subprocess.run([sys.executable, "-m", "cutslots", "--version"], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout == f"{cutslots.__version__}\n", done.stderr


def test_info(run):
    done = run("info")
    assert done.returncode == 0 and f"cutslots {cutslots.__version__}" in done.stdout and "torch" in done.stdout


def test_parts_lists_parts_presets_and_checkpoints(run):
    listed = run("parts").stdout.splitlines()
    rows = {line.split()[0]: line.split(maxsplit=1)[1:] for line in listed if line.startswith("  ")}
    registered = {name for registry in REGISTRIES for name in registry.names()}
    assert set(rows) == registered | set(PRESETS) | set(PRETRAIN_PRESETS) | set(checkpoint_names())
    assert all(rows.values()), "everything has a summary"
    titles = [line for line in listed if not line.startswith("  ")]
    assert any("--encoder NAME" in title for title in titles) and any("--data NAME" in title for title in titles)
    assert any("--slots.partition NAME" in title for title in titles)


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_completion_scripts_know_the_options_of_train(shell, run):
    done = run("--tyro-print-completion", shell)
    assert done.returncode == 0, done.stderr
    for word in (
        "evaluate",
        "graph-ocl",
        "--max-steps",
        "--encoder.channels",
        "--num-images",
        "--objective.temperature",
    ):
        assert word in done.stdout, word


def test_an_unknown_command(run):
    done = run("frobnicate")
    assert done.returncode == 2 and "frobnicate" in done.stderr + done.stdout


def test_no_command(run):
    done = run()
    assert done.returncode == 2 and "evaluate" in done.stderr + done.stdout


def test_an_error_is_one_sentence(tmp_path, run):
    done = run("evaluate", str(tmp_path / "nowhere"), "--data", "plain", "--accelerator", "cpu")
    assert str(done.returncode).startswith("cutslots: ") and "\n" not in str(done.returncode) and not done.stderr


def test_the_public_names_load():
    for name in cutslots.__all__:
        assert getattr(cutslots, name) is not None
    assert set(cutslots.__all__) <= set(dir(cutslots))
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = cutslots.Nothing


def test_choices_are_those_of_the_package():
    """The command line does not import torch, so it spells some lists itself."""
    families, datasets = (
        get_args(get_args(get_type_hints(command, include_extras=True)[name])[0])
        for command, name in ((cli.generate, "family"), (cli.prepare, "dataset"))
    )
    assert list(families) == list(FAMILIES) and list(datasets) == list(PUBLISHED)
    protocols = get_args(get_args(get_type_hints(cli.prepare)["protocol"])[0])  # or None
    assert set(protocols) == {name for spec in PUBLISHED.values() for name in spec.protocols}
