"""A few of the cases of tests/soak.py: commands that are killed, run out of disk, or meet each other."""

import pytest

from tests.soak import Soak

NEW = ["generate", "predict", "track"]  # train and prepare have more of their own: tests/test_train.py, tests/data/


@pytest.fixture(scope="module")
def soak(tmp_path_factory):
    return Soak(tmp_path_factory.mktemp("soak"), moments=8, minutes=0, seed=0)


def assert_well(results, least=1):
    results = list(results)
    assert len(results) >= least and not any(results), [x for x in results if x]


@pytest.mark.parametrize("name", NEW)
def test_killed_at_some_change(soak, name):
    """Nothing is there that is not whole, and the same command goes on to the same bytes."""
    assert_well(soak.operations_of(name), least=3)


@pytest.mark.parametrize("name", ["predict", "track"])
def test_killed_while_it_overwrites(soak, name):
    """What another request has left is never taken for what this one asked for."""
    assert_well(soak.operations_of(name, over=True), least=3)


@pytest.mark.parametrize("name", NEW)
def test_a_full_disk(soak, name):
    results = list(soak.sizes_of(name))
    if not results:
        pytest.skip("only root may mount a small disk")
    assert_well(results)


@pytest.mark.parametrize("name", NEW)
def test_two_at_once(soak, name):
    assert_well(soak.two_of(name), least=3)
