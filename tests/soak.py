"""Hard use for as long as one likes: python -m tests.soak [--moments 50] [--minutes 5] [--only kill predict]

Prints a table of what was tried and what failed; the exit status is 1 if anything did. tests/hard/ has quick cases of
the same.
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

from tests.hard import checkpoints, pictures, visitors
from tests.hard.commands import (
    Doomed,
    Job,
    changes,
    complaint,
    contents,
    faults,
    gone_on_with,
    is_locked,
    jobs,
    killed,
    small_disk,
)
from tests.small_runs import Command

Result = Iterator[list[str]]  # for every case what failed, which is nothing if all is well
SHOWN = 8  # failures of a case that are printed
GROWTH = 64 * 2**20  # bytes by which the memory of the app may differ
LARGEST = 1.2 * 2**30  # bytes that a prediction may take, whatever it is shown


class Soak:
    """What the cases share: a place to write, a run of each command that nothing has disturbed."""

    def __init__(self, place: Path, moments: int, minutes: float, seed: int) -> None:
        self.place, self.moments, self.minutes = place, moments, minutes
        self.rng, self.jobs = np.random.default_rng(seed), jobs(place / "given")
        self.whole: dict[str, dict[str, bytes]] = {}
        self.out, self.log = place / "out" / "folder", place / "log"
        self.out.parent.mkdir()

    def undisturbed(self, name: str) -> Job:
        job = self.jobs[name]
        if name not in self.whole:
            self.afresh()
            assert Command(job.words(self.out), self.log).end() == 0, self.log.read_text()
            self.whole[name] = contents(name, self.out)
        return job

    def afresh(self) -> None:
        shutil.rmtree(self.out, ignore_errors=True)

    # ---------------------------------------------------------------------------------------------------------- killed

    def moments_of(self, name: str) -> Result:
        """SIGKILL at moments drawn from the time that the command takes; killed twice every third time."""
        job = self.undisturbed(name)
        self.afresh()
        began = time.monotonic()
        Command(job.words(self.out), self.log).end()
        took = time.monotonic() - began
        for i in range(self.moments if name != "generate moving" else self.moments // 5):  # which takes long
            self.afresh()
            wrong = []
            for _ in range(1 + (i % 3 == 0)):
                after = self.rng.uniform(0, 1.05 * took)
                killed(Command(job.words(self.out), self.log), after)
                wrong += [f"killed after {after:.2f} s: {x}" for x in self.faults(name, job)]
            yield wrong + gone_on_with(name, job, self.out, self.whole[name], self.log)

    def operations_of(self, name: str, over: bool = False) -> Result:
        """SIGKILL before some file is opened for writing, renamed, made or removed; `over` what another request has
        left, with --overwrite."""
        job, more = self.undisturbed(name), ["--overwrite"] if over else []
        shutil.rmtree(self.place / "other", ignore_errors=True)
        before = self.other(name, job, self.place / "other") if over else {}
        for at in self.some_changes(job, more, over):
            self.afresh()
            if over:
                shutil.copytree(self.place / "other", self.out)
            if Doomed([*job.words(self.out), *more], self.log, self.out, at).end() != -signal.SIGKILL:
                continue
            wrong = [f"killed at change {at}: {x}" for x in self.faults(name, job, before)]
            again = gone_on_with(name, job, self.out, self.whole[name] if not over else {}, self.log, *more)
            yield wrong + (again if not over else [x for x in again if not x.startswith("other bytes")])

    def some_changes(self, job: Job, more: list[str], over: bool) -> list[int]:
        """The first and the last and some between, more of them towards the ends."""
        self.afresh()
        if over:
            shutil.copytree(self.place / "other", self.out)
        count = changes([*job.words(self.out), *more], self.log, self.out)
        share = (1 - np.cos(np.pi * np.linspace(0, 1, self.moments // 2))) / 2
        return np.unique((share * (count - 1)).round().astype(int)).tolist()

    def other(self, name: str, job: Job, out: Path) -> dict[str, bytes]:
        """A folder that another request has filled."""
        words = job.words(out)
        if name.startswith("generate"):
            words += ["--seed", "1"]
        elif name == "train":
            words += ["--lr", "0.002"]
        elif name == "prepare":
            words[-1] = "32"
        elif name == "predict":
            words[2] = str(self.place / "given" / "other pictures")
        else:
            words += ["--join", "hungarian"]
        assert Command(words, self.log).end() == 0, self.log.read_text()
        return contents(name, out)

    def faults(self, name: str, job: Job, before: dict[str, bytes] | None = None) -> list[str]:
        return faults(name, job, self.out, [self.whole[name], *([before] if before else [])])

    # ----------------------------------------------------------------------------------------------------- a full disk

    def sizes_of(self, name: str) -> Result:
        """Disks from too small for anything to too small for the last file."""
        job = self.undisturbed(name)
        need = sum(4096 * -(-len(data) // 4096) for data in self.whole[name].values())  # of train, not all of it
        disk = self.place / "disk"
        for share in np.linspace(0.02, 0.97, max(2, self.moments // 4)):
            with small_disk(disk, int(share * need) // 4096 * 4096 + 4096) as resize:
                if resize is None:
                    return
                out = disk / "folder"
                command = Command(job.words(out), self.log)
                status, said = command.end(), complaint(command)
                if status == 0 and share > 0.8:  # it took less than was thought
                    continue
                wrong = [] if status == 1 else [f"exit status {status} on a full disk"]
                if said is None or str(disk) not in said:
                    wrong.append(f"it says {command.said().strip()[-300:]!r}")
                wrong += faults(name, job, out, [self.whole[name]])
                left = [p.name for p in out.rglob("*.part")] if name != "prepare" else []
                wrong += [f"{left[0]} is left"] if left else []
                resize(2**28)
                wrong += gone_on_with(name, job, out, self.whole[name], self.log)
                yield [f"{share:.0%} of the room: {x}" for x in wrong]

    # --------------------------------------------------------------------------------------------------------- at once

    def two_of(self, name: str) -> Result:
        """While a first command is stopped in the middle, a second one is refused; then the first goes on."""
        job = self.undisturbed(name)
        self.afresh()
        first = Command(job.words(self.out), self.place / "first")
        first.wait_for(lambda: is_locked(self.out))
        if first.process.exitcode is not None:
            yield ["it takes no lock"]
            return
        first.signal(signal.SIGSTOP)
        for more in ([], ["--overwrite"]):
            second = Command([*job.words(self.out), *more], self.log)
            status, said = second.end(), complaint(second)
            right = status == 1 and said and str(self.out) in said and "another" in said
            yield [] if right else [f"{more}: exit status {status}, {second.said()[-300:]!r}"]
        first.signal(signal.SIGCONT)
        status = first.end()
        yield [] if status == 0 and contents(name, self.out) == self.whole[name] else ["the first was disturbed"]

    # -------------------------------------------------------------------------------------------- pictures, checkpoints

    def hostile(self, count: int = 500, large: bool = True) -> Result:
        folder, out = self.place / "hostile", self.place / "hostile out"
        expected = pictures.write_hostile(folder, count)
        if large:  # nearly the largest picture there may be, in 86 kB
            (folder / "large.png").write_bytes(pictures.grey(9_400, 9_400))
            expected[b"large.png"] = "good"
        shown = pictures.predicted(folder, out)
        yield from pictures.judged(expected, folder, out, shown).values()
        yield [] if shown.peak < LARGEST else [f"it took {shown.peak / 2**30:.1f} GiB"]

    def checkpoints(self) -> Result:
        yield from checkpoints.absurd(self.place / "absurd")
        yield from checkpoints.spoilt(self.place / "spoilt", 20 * self.moments, self.rng)

    # --------------------------------------------------------------------------------------------------------- the app

    def visits(self) -> Result:
        """Visitors of the app, one after the other: it answers, and in the last third of the time it has no more memory
        than in the second."""
        if importlib.util.find_spec("gradio") is None:
            return
        held: list[int] = []
        with visitors.app(self.place / "app") as server:
            end = time.monotonic() + 60 * self.minutes
            while time.monotonic() < end:
                if len(held) % 40 == 0:
                    visitor = visitors.Visitor(server, self.rng)
                try:
                    visitor.do_anything()
                    yield []
                except Exception as error:
                    yield [f"{type(error).__name__}: {error}"]
                held.append(server.held())
            yield server.faults()
        third = len(held) // 3
        grown = float(np.median(held[2 * third :]) - np.median(held[third : 2 * third]))
        yield [] if grown < GROWTH else [f"the app had {grown / 2**20:.0f} MiB more after {len(held)} requests"]


def cases(soak: Soak) -> dict[str, Callable[[], Result]]:
    found: dict[str, Callable[[], Result]] = {"hostile pictures": soak.hostile, "checkpoints": soak.checkpoints}
    for name in soak.jobs:
        found[f"kill {name}, moments"] = lambda name=name: soak.moments_of(name)
    for name in soak.jobs:
        found[f"kill {name}, changes"] = lambda name=name: soak.operations_of(name)
        found[f"kill {name}, changes, over another"] = lambda name=name: soak.operations_of(name, over=True)
    for name in soak.jobs:
        found[f"full disk, {name}"] = lambda name=name: soak.sizes_of(name)
        found[f"two at once, {name}"] = lambda name=name: soak.two_of(name)
    return found | {"requests to the app": soak.visits}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--moments", type=int, default=50, help="kills of each command; other cases go by it")
    parser.add_argument("--minutes", type=float, default=5, help="of requests to the app")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", default=[], help="cases whose names hold all of these words")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    failed, rows = 0, []
    with tempfile.TemporaryDirectory() as place, contextlib.chdir(place):
        soak = Soak(Path(place), options.moments, options.minutes, options.seed)
        for title, case in cases(soak).items():
            if not all(word in title for word in options.only):
                continue
            began, tried, wrong = time.monotonic(), 0, []
            for result in case():
                tried += 1
                wrong += [result] if result else []
            rows.append(f"{title:52s} {tried:6d} {len(wrong):9d} {time.monotonic() - began:8.0f} s")
            print(rows[-1], *(f"    {'; '.join(x)}" for x in wrong[:SHOWN]), sep="\n", flush=True)
            failed += len(wrong)
    print(f"\n{'case':52s}  tried  failures     took", *rows, sep="\n")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
