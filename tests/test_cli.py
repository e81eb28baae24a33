import subprocess
import sys

import pytest

import cutslots


def run(*arguments):
    return subprocess.run([sys.executable, "-m", "cutslots", *arguments], capture_output=True, text=True)


def test_help_does_not_import_torch():
    code = """
import sys, cutslots.cli
sys.argv = ["cutslots", "--help"]
try:
    cutslots.cli.main()
finally:
    assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and "info" in done.stdout, done.stderr


def test_version_and_info():
    assert run("--version").stdout.strip() == cutslots.__version__
    assert f"cutslots {cutslots.__version__}" in run("info").stdout


def test_unknown_command():
    done = run("frobnicate")
    assert done.returncode != 0 and "frobnicate" in done.stderr + done.stdout


def test_the_public_surface_loads():
    for name in cutslots.__all__:
        assert getattr(cutslots, name) is not None
    assert set(cutslots.__all__) <= set(dir(cutslots))
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = cutslots.Nothing
