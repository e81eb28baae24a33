"""Runs that several modules share."""

from __future__ import annotations

from pathlib import Path

import pytest

from cutslots.training.loop import train
from tests.small_runs import small


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 48 steps that was never interrupted. Read only."""
    return train(small(tmp_path_factory.mktemp("runs") / "finished"))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of 8 steps, to be resumed or damaged."""
    return train(small(tmp_path / "run", max_steps=8))


@pytest.fixture(autouse=True)
def small_reports(no_curves: None) -> None:
    """Every test of a run is faster without curves."""
