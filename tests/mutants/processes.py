"""Jobs in forked processes, and pytest within them."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import resource
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterable
from multiprocessing.connection import wait
from typing import Any, NamedTuple

import hypothesis
import pytest

MAX_MEMORY = 16 << 30  # bytes; some mutants would take all there is


class Job(NamedTuple):
    function: Callable[..., None]
    arguments: tuple[Any, ...]
    timeout: float
    done: Callable[[int | None], None] = lambda status: None  # called with the exit status; None after the timeout


class Running(NamedTuple):
    process: multiprocessing.Process
    job: Job
    deadline: float
    folder: str

    def ended(self) -> bool:
        """Return whether the job is over; end it if it is late."""
        late = self.process.is_alive() and time.monotonic() > self.deadline
        if self.process.is_alive() and not late:
            return False
        self.stop()
        self.job.done(None if late else self.process.exitcode)
        return True

    def stop(self) -> None:
        """End the process, and what its tests have started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.join()
        shutil.rmtree(self.folder, ignore_errors=True)


def run_jobs(jobs: Iterable[Job], count: int, deadline: float = float("inf")) -> None:
    """Run jobs, `count` at a time. Those that run at the deadline are stopped."""
    running: list[Running] = []
    queue = iter(jobs)
    try:
        while time.monotonic() < deadline:
            while len(running) < count and (job := next(queue, None)) is not None:
                running.append(_start(job))
            if not running:
                return
            wait([each.process.sentinel for each in running], timeout=0.5)
            running = [each for each in running if not each.ended()]
    finally:
        for each in running:
            each.stop()


def _start(job: Job) -> Running:
    folder = tempfile.mkdtemp(prefix="mutant-")
    process = multiprocessing.get_context("fork").Process(target=_isolated, args=(folder, job))
    process.start()
    return Running(process, job, time.monotonic() + job.timeout, folder)


def _isolated(folder: str, job: Job) -> None:
    os.setsid()
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(nothing, stream)
    job.function(*job.arguments)


def run_pytest(files: Iterable[str], plugin: object, *options: str) -> int:
    """Run tests; return pytest's exit status. Tests of hypothesis repeat the same examples, without a time limit."""
    hypothesis.settings.register_profile("mutants", deadline=None, derandomize=True, database=None)
    hypothesis.settings.load_profile("mutants")
    folder = os.environ["TMPDIR"]
    return int(
        pytest.main(
            ["-q", f"--basetemp={folder}/pytest", "-p", "no:unraisableexception", *options, *files], plugins=[plugin]
        )
    )
