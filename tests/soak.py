"""Long robustness tests: python -m tests.soak [--moments 50] [--minutes 5] [--only kill predict]

Prints a table of cases and failures; the exit status is 1 if any case failed. tests/robustness/ runs a few of the same
cases quickly.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from tests.robustness import app, checkpoints, images
from tests.robustness.commands import (
    Job,
    KilledCommand,
    contents,
    count_changes,
    error_sentence,
    find_faults,
    is_locked,
    kill_after,
    make_jobs,
    resume,
    small_disk,
)
from tests.small_runs import Command

Result = Iterator[list[str]]  # the failures of every trial, [] if there are none
MAX_PRINTED = 8  # failures of a case that are printed
MAX_GROWTH = 64 * 2**20  # bytes by which the memory of the app may grow
MAX_MEMORY = 1.2 * 2**30  # bytes that a prediction may take, whatever the images


class Soak:
    """What the cases share: a folder, and the output of each command when nothing disturbs it."""

    def __init__(self, folder: Path, moments: int, minutes: float, seed: int) -> None:
        self.folder, self.moments, self.minutes = folder, moments, minutes
        self.rng, self.jobs = np.random.default_rng(seed), make_jobs(folder / "inputs")
        self.complete: dict[str, dict[str, bytes]] = {}
        self.out, self.log = folder / "out" / "folder", folder / "log"
        self.out.parent.mkdir()

    def run_undisturbed(self, name: str) -> Job:
        job = self.jobs[name]
        if name not in self.complete:
            self.remove_output()
            assert Command(job.arguments(self.out), self.log).end() == 0, self.log.read_text()
            self.complete[name] = contents(name, self.out)
        return job

    def remove_output(self) -> None:
        shutil.rmtree(self.out, ignore_errors=True)

    # ---------------------------------------------------------------------------------------------------------- killed

    def kill_at_random_times(self, name: str) -> Result:
        """SIGKILL at random times; every third trial kills the resumed command again."""
        job = self.run_undisturbed(name)
        self.remove_output()
        began = time.monotonic()
        Command(job.arguments(self.out), self.log).end()
        took = time.monotonic() - began
        for i in range(self.moments if name != "generate moving" else self.moments // 5):  # a slow one
            self.remove_output()
            wrong = []
            for _ in range(1 + (i % 3 == 0)):
                after = self.rng.uniform(0, 1.05 * took)
                kill_after(Command(job.arguments(self.out), self.log), after)
                wrong += [f"killed after {after:.2f} s: {x}" for x in self.find_faults(name, job)]
            yield wrong + resume(name, job, self.out, self.complete[name], self.log)

    def kill_at_changes(self, name: str, over: bool = False) -> Result:
        """SIGKILL before a file is opened for writing, renamed, created or removed. With `over`, the command replaces
        the output of another request with --overwrite."""
        job, more = self.run_undisturbed(name), ["--overwrite"] if over else []
        shutil.rmtree(self.folder / "other", ignore_errors=True)
        before = self.run_other_request(name, job, self.folder / "other") if over else {}
        for at in self.choose_changes(job, more, over):
            self.remove_output()
            if over:
                shutil.copytree(self.folder / "other", self.out)
            if KilledCommand([*job.arguments(self.out), *more], self.log, self.out, at).end() != -signal.SIGKILL:
                continue
            wrong = [f"killed at change {at}: {x}" for x in self.find_faults(name, job, before)]
            again = resume(name, job, self.out, self.complete[name] if not over else {}, self.log, *more)
            yield wrong + (again if not over else [x for x in again if not x.startswith("other bytes")])

    def choose_changes(self, job: Job, more: list[str], over: bool) -> list[int]:
        """Return numbers of changes from the first to the last, denser towards both ends."""
        self.remove_output()
        if over:
            shutil.copytree(self.folder / "other", self.out)
        count = count_changes([*job.arguments(self.out), *more], self.log, self.out)
        share = (1 - np.cos(np.pi * np.linspace(0, 1, self.moments // 2))) / 2
        return np.unique((share * (count - 1)).round().astype(int)).tolist()

    def run_other_request(self, name: str, job: Job, out: Path) -> dict[str, bytes]:
        """Write the output of another request to `out`."""
        words = job.arguments(out)
        if name.startswith("generate"):
            words += ["--seed", "1"]
        elif name == "train":
            words += ["--lr", "0.002"]
        elif name == "prepare":
            words[-1] = "32"
        elif name == "predict":
            words[2] = str(self.folder / "inputs" / "other images")
        else:
            words += ["--association", "hungarian"]
        assert Command(words, self.log).end() == 0, self.log.read_text()
        return contents(name, out)

    def find_faults(self, name: str, job: Job, before: dict[str, bytes] | None = None) -> list[str]:
        return find_faults(name, job, self.out, [self.complete[name], *([before] if before else [])])

    # ----------------------------------------------------------------------------------------------------- a full disk

    def fill_disk(self, name: str) -> Result:
        """Disks from too small for any file to too small for the last file."""
        job = self.run_undisturbed(name)
        need = sum(4096 * -(-len(data) // 4096) for data in self.complete[name].values())  # less than train needs
        disk = self.folder / "disk"
        for share in np.linspace(0.02, 0.97, max(2, self.moments // 4)):
            with small_disk(disk, int(share * need) // 4096 * 4096 + 4096) as resize:
                if resize is None:
                    return
                out = disk / "folder"
                command = Command(job.arguments(out), self.log)
                status, said = command.end(), error_sentence(command)
                if status == 0 and share > 0.8:  # it needed less than expected
                    continue
                wrong = [] if status == 1 else [f"exit status {status} on a full disk"]
                if said is None or str(disk) not in said:
                    wrong.append(f"it says {command.said().strip()[-300:]!r}")
                wrong += find_faults(name, job, out, [self.complete[name]])
                left = [p.name for p in out.rglob("*.part")] if name != "prepare" else []
                wrong += [f"{left[0]} is left"] if left else []
                resize(2**28)
                wrong += resume(name, job, out, self.complete[name], self.log)
                yield [f"{share:.0%} of the space: {x}" for x in wrong]

    # --------------------------------------------------------------------------------------------------------- at once

    def run_two(self, name: str) -> Result:
        """While a first command is stopped with SIGSTOP, a second one is refused; then the first continues."""
        job = self.run_undisturbed(name)
        self.remove_output()
        first = Command(job.arguments(self.out), self.folder / "first")
        first.wait_for(lambda: is_locked(self.out))
        if first.process.exitcode is not None:
            yield ["it takes no lock"]
            return
        first.signal(signal.SIGSTOP)
        for more in ([], ["--overwrite"]):
            second = Command([*job.arguments(self.out), *more], self.log)
            status, said = second.end(), error_sentence(second)
            right = status == 1 and said and str(self.out) in said and "another" in said
            yield [] if right else [f"{more}: exit status {status}, {second.said()[-300:]!r}"]
        first.signal(signal.SIGCONT)
        status = first.end()
        yield [] if status == 0 and contents(name, self.out) == self.complete[name] else ["the first was disturbed"]

    # ---------------------------------------------------------------------------------------------- images, checkpoints

    def hostile_images(self, count: int = 500, large: bool = True) -> Result:
        folder, out = self.folder / "hostile", self.folder / "hostile out"
        expected = images.write_hostile(folder, count)
        if large:  # nearly the largest image that is accepted, in 86 kB
            (folder / "large.png").write_bytes(images.gray_png(9_400, 9_400))
            expected[b"large.png"] = "good"
        result = images.run_predict(folder, out)
        yield from images.find_failures(expected, folder, out, result).values()
        yield [] if result.peak < MAX_MEMORY else [f"it took {result.peak / 2**30:.1f} GiB"]

    def damaged_checkpoints(self) -> Result:
        yield from checkpoints.try_invalid_values(self.folder / "invalid")
        yield from checkpoints.try_damaged_files(self.folder / "damaged", 20 * self.moments, self.rng)

    # --------------------------------------------------------------------------------------------------------- the app

    def use_app(self) -> Result:
        """Simulated users of the app, one after the other: it answers, and in the last third of the time it takes no
        more memory than in the second."""
        if importlib.util.find_spec("gradio") is None:
            return
        memory: list[int] = []
        with app.serve(self.folder / "app") as server:
            end = time.monotonic() + 60 * self.minutes
            while time.monotonic() < end:
                if len(memory) % 40 == 0:
                    user = app.User(server, self.rng)
                try:
                    user.do_anything()
                    yield []
                except Exception as error:
                    yield [f"{type(error).__name__}: {error}"]
                memory.append(server.memory())
            yield server.faults()
        third = len(memory) // 3
        grown = float(np.median(memory[2 * third :]) - np.median(memory[third : 2 * third]))
        yield [] if grown < MAX_GROWTH else [f"the app took {grown / 2**20:.0f} MiB more after {len(memory)} requests"]


def cases(soak: Soak) -> dict[str, Callable[[], Result]]:
    found: dict[str, Callable[[], Result]] = {
        "hostile images": soak.hostile_images,
        "checkpoints": soak.damaged_checkpoints,
    }
    for name in soak.jobs:
        found[f"kill {name}, random times"] = lambda name=name: soak.kill_at_random_times(name)
    for name in soak.jobs:
        found[f"kill {name}, changes"] = lambda name=name: soak.kill_at_changes(name)
        found[f"kill {name}, changes, with --overwrite"] = lambda name=name: soak.kill_at_changes(name, over=True)
    for name in soak.jobs:
        found[f"full disk, {name}"] = lambda name=name: soak.fill_disk(name)
        found[f"two at once, {name}"] = lambda name=name: soak.run_two(name)
    return found | {"requests to the app": soak.use_app}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--moments", type=int, default=50, help="kills of each command; scales the other cases too")
    parser.add_argument("--minutes", type=float, default=5, help="minutes of requests to the app")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", default=[], help="cases whose names contain all of these words")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    failed, rows = 0, []
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        soak = Soak(Path(folder), options.moments, options.minutes, options.seed)
        for title, case in cases(soak).items():
            if not all(word in title for word in options.only):
                continue
            began, tried, wrong = time.monotonic(), 0, []
            for result in case():
                tried += 1
                wrong += [result] if result else []
            rows.append(f"{title:52s} {tried:6d} {len(wrong):9d} {time.monotonic() - began:8.0f} s")
            print(rows[-1], *(f"    {'; '.join(x)}" for x in wrong[:MAX_PRINTED]), sep="\n", flush=True)
            failed += len(wrong)
    print(f"\n{'case':52s}  tried  failures     took", *rows, sep="\n")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
