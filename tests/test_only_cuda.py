"""The option --only-cuda of conftest.py: which tests it runs, and what it prints."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
FAILING = """
import pytest
from tests.conftest import needs_cuda

@needs_cuda
def test_on_cuda(): assert 1 == 2, "of one"

def test_elsewhere(): pass
"""
# As if there were a device: the tests of the file above do not touch it.
PRETEND = "import sys, torch, pytest; torch.cuda.is_available = lambda: True; sys.exit(pytest.main(sys.argv[1:]))"


def run(*words: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, *words], cwd=ROOT, env=environment, capture_output=True, text=True)


def test_tests_that_need_cuda_are_selected():
    path = "tests/evaluation/test_counting.py"
    listed = run("-m", "pytest", "--only-cuda", "--collect-only", "-q", path).stdout.splitlines()
    found = [line for line in listed if line.startswith(path)]
    assert len(found) == 5 and all(line.endswith("cuda]") for line in found)


@pytest.mark.skipif(torch.cuda.is_available(), reason="has CUDA")
def test_without_a_device_it_is_a_mistake():
    done = run("-m", "pytest", "--only-cuda", "tests/evaluation/test_counting.py")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "--only-cuda is given and there is no CUDA device here; expected one" in done.stderr


def test_failures_are_printed_before_the_summary(tmp_path):
    file = tmp_path / "test_failing.py"
    file.write_text(FAILING)
    printed = run("-c", PRETEND, "--only-cuda", "-p", "tests.conftest", f"--rootdir={ROOT}", str(file)).stdout
    before, summary, _ = printed.partition("= FAILURES =")
    assert "FAILED " in before and "test_on_cuda: " in before and "of one" in before and summary
    assert "1 failed" in printed and "passed" not in printed
