"""The pass without mutations: how long each test takes, and which lines it runs."""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import sys
import threading
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import pytest

from tests.mutants.processes import run_pytest

MAX_SECONDS = 240  # for one file of tests

Lines = dict[str, set[int]]  # by path


class Test(NamedTuple):
    __test__ = False
    seconds: float
    lines: dict[str, list[int]]


class Recorder:
    """A pytest plugin: the seconds of each test, and the lines of some files that it runs."""

    def __init__(self, paths: list[str]) -> None:
        self.paths = {str(Path(path).resolve()): path for path in paths}
        self.lines: Lines = {path: set() for path in paths}
        self.of_fixture: dict[object, Lines] = {}
        self.tests: dict[str, Test] = {}
        self.failed: set[str] = set()
        self.skipped: set[str] = set()

    def trace(self, frame: FrameType, event: str, arg: object) -> Any:
        path = self.paths.get(frame.f_code.co_filename)
        if path is None:
            return None
        self.lines[path].add(frame.f_lineno)
        return self.trace

    @contextlib.contextmanager
    def separate(self) -> Iterator[Lines]:
        """Give the lines run in this context; add them to the outer ones."""
        outer, self.lines = self.lines, {path: set() for path in self.lines}
        inner = self.lines
        try:
            yield inner
        finally:  # a fixture may skip
            for path, lines in outer.items():
                lines |= inner[path]
            self.lines = outer

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Generator[None, Any, Any]:
        with self.separate() as lines:
            result = yield
        self.of_fixture[fixturedef] = lines  # it runs once; the tests that share it run these lines too
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: Any) -> Generator[None, Any, Any]:
        clear_caches()
        started = time.monotonic()
        with self.separate() as lines, self.tracing():
            result = yield
        seconds = time.monotonic() - started
        for fixture in self.fixtures(item):
            for path, shared in self.of_fixture.get(fixture, {}).items():
                lines[path] |= shared
        self.tests[item.nodeid] = Test(seconds, {path: sorted(numbers) for path, numbers in lines.items()})
        if sum(test.seconds for test in self.tests.values()) > MAX_SECONDS:
            item.session.shouldstop = "the other tests of this file are not used"
        return result

    @staticmethod
    def fixtures(item: Any) -> list[object]:
        known = getattr(item, "_fixtureinfo", None)  # a doctest may have none
        return [fixture for each in known.name2fixturedefs.values() for fixture in each] if known else []

    @contextlib.contextmanager
    def tracing(self) -> Iterator[None]:
        sys.settrace(self.trace)
        threading.settrace(self.trace)
        yield
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.add(report.nodeid)
        elif report.skipped:
            self.skipped.add(report.nodeid)


def clear_caches() -> None:
    """Empty all functools caches, so that each test runs the lines that fill them."""
    for cached in gc.get_objects():
        if type(cached) is functools._lru_cache_wrapper and cached.__module__.startswith(("cutslots", "tests")):
            cached.cache_clear()


def measure(paths: list[str], file: str, answer: Path) -> None:
    """Run the tests of a file; write those that pass, those that fail, and the imported modules."""
    recorder = Recorder(paths)
    status = run_pytest([file], recorder)
    if recorder.tests or status == pytest.ExitCode.NO_TESTS_COLLECTED:
        other = recorder.failed | recorder.skipped
        passed = {name: test for name, test in recorder.tests.items() if name not in other}
        found = {"tests": passed, "failed": sorted(recorder.failed), "imported": sorted(sys.modules)}
        answer.write_text(json.dumps(found))
