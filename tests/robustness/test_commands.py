"""A few cases of tests/soak.py: commands that are killed, fill the disk, or run at the same time."""

import pytest

from tests.soak import Soak

COMMANDS = [
    "generate",
    "predict",
    "track",
    "segment",
]  # tests/training and tests/data have such tests for train and prepare


@pytest.fixture(scope="module")
def soak(tmp_path_factory):
    return Soak(tmp_path_factory.mktemp("soak"), moments=8, minutes=0, seed=0)


def assert_no_failures(results, min_trials=1):
    results = list(results)
    assert len(results) >= min_trials and not any(results), [x for x in results if x]


@pytest.mark.parametrize("name", COMMANDS)
def test_killed_at_a_change(soak, name):
    """No file is incomplete under its final name, and the same command resumes to the same bytes."""
    assert_no_failures(soak.kill_at_changes(name), min_trials=3)


@pytest.mark.parametrize("name", ["predict", "track"])
def test_killed_while_it_overwrites(soak, name):
    """The output of another request is never taken for that of this one."""
    assert_no_failures(soak.kill_at_changes(name, over=True), min_trials=3)


@pytest.mark.parametrize("name", COMMANDS)
def test_full_disk(soak, name):
    results = list(soak.fill_disk(name))
    if not results:
        pytest.skip("only root may mount a small disk")
    assert_no_failures(results)


@pytest.mark.parametrize("name", COMMANDS)
def test_two_at_once(soak, name):
    assert_no_failures(soak.run_two(name), min_trials=3)
