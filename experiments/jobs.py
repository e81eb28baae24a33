"""Runs of experiments in processes of their own, several at a time on one device."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

Process = subprocess.Popen[bytes]


def start_process(command: Sequence[str], log: Path, jobs: int) -> Process:
    """Start one of `jobs` processes, which share the processors. What it prints is added to the log."""
    log.parent.mkdir(parents=True, exist_ok=True)
    threads = str(max(1, (os.cpu_count() or 1) // jobs))
    env = {"OMP_NUM_THREADS": threads, "TORCHINDUCTOR_COMPILE_THREADS": threads, **os.environ}
    with log.open("ab") as file:
        return subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=env)


def run_processes(
    names: Sequence[str],
    start: Callable[[str], Process],
    is_ready: Callable[[str], bool],
    ended: Callable[[str, int, int], None],
    jobs: int,
    stop_after: float | None,
) -> bool:
    """Run every name that is ready, `jobs` at a time. Return whether all have ended without an error.

    `ended` is called with the name, the exit code and how many wait. A name that is not ready when nothing else runs
    fails. After `stop_after` minutes the running processes are told to save their state and stop.
    """
    end = time.monotonic() + 60 * (1e6 if stop_after is None else stop_after)
    waiting, failed = list(names), 0
    running: dict[str, Process] = {}
    while (waiting or running) and time.monotonic() < end:
        for name in list(waiting):
            if len(running) < jobs and is_ready(name):
                waiting.remove(name)
                running[name] = start(name)
        if not running:
            break
        time.sleep(0.2)
        for name, process in list(running.items()):
            code = process.poll()
            if code is not None:
                del running[name]
                ended(name, code, len(waiting))
                failed += code != 0
    stop(list(running.values()))
    return not (waiting or running or failed)


def stop(processes: Sequence[Process]) -> None:
    """Tell processes to save their state and stop. Kill those that do not within 30 s."""
    for process in processes:
        process.send_signal(signal.SIGTERM)
    for process in processes:
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()  # its locks end with it
