"""Run the mutants of some modules; write the survivors to out/mutants/MODULE.txt.

A second run takes only mutants that no test has failed for, so that it tells what new tests achieve. Mutants listed in
equivalent.txt are not run.
"""

from __future__ import annotations

import os

os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TORCHINDUCTOR_COMPILE_THREADS": "1"}

import argparse
import contextlib
import functools
import gc
import hashlib
import importlib
import importlib.util
import itertools
import json
import pickle
import random
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from datetime import date
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import Any

import pytest
import torch  # noqa: F401, so that the processes that fork have it

from tests.mutants.measure import Test, measure
from tests.mutants.mutate import Mutant, equivalent, save_mutants
from tests.mutants.processes import Job, run_jobs, run_pytest

OUT = Path("out/mutants")
SURVIVORS = ("survived", "untested", "unmutated")
UNMUTATED = 99  # exit status where tests pass with another copy of the module
RESULTS = {
    None: "timeout",
    UNMUTATED: "unmutated",
    int(pytest.ExitCode.OK): "survived",
    int(pytest.ExitCode.NO_TESTS_COLLECTED): "survived",  # the mutant has changed the names of the tests
}
TABLE = Path("CONTRIBUTING.md")
HEADER = "| module | mutants | run | killed | date |\n|---|---|---|---|---|\n"
MORE_TESTS = {  # of other packages, for modules that are tested through them
    "programs": ["tests/contracts/test_contracts.py"],
    "modules": ["tests/models/test_discovery.py", "tests/contracts/test_contracts.py"],
    "models": ["tests/inference/test_predictor.py"],
}


def main() -> None:
    parser = argparse.ArgumentParser("python -m tests.mutants", description=__doc__)
    parser.add_argument("modules", nargs="+", help="files, for example cutslots/training/losses.py")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--minutes", type=float, default=600, help="stop after this time; run again to resume")
    parser.add_argument("--slowest", type=float, default=10, help="leave out tests that take more seconds")
    parser.add_argument("--seconds", type=float, default=30, help="time of all tests of one mutant, without mutation")
    parser.add_argument("--tests", nargs="+", help="test files; by default those of the package")
    parser.add_argument("--sample", type=int, help="run so many mutants of each module, always the same ones")
    parser.add_argument("--record", action="store_true", help=f"write the results to {TABLE}")
    options = parser.parse_args()
    deadline = time.monotonic() + 60 * options.minutes
    tests, everything = prepare(options.modules, options.jobs, options.tests)
    made = {path: choose(mutants, options.sample) for path, mutants in everything.items()}
    run_jobs(jobs(options, tests, made), options.jobs, deadline)
    for path in made:
        write_report(path, made[path])
    if options.record:
        write_table(everything, made)


def choose(mutants: list[Mutant], count: int | None = None) -> list[Mutant]:
    """Return the mutants, or a sample of them, without those that are equivalent to the original."""
    chosen = range(len(mutants))
    if count is not None and count < len(mutants):
        chosen = sorted(random.Random(0).sample(chosen, count))
    return [mutants[i] for i in chosen if mutants[i].change not in equivalent()[mutants[i].path]]


def prepare(
    paths: list[str], count: int, given: list[str] | None = None
) -> tuple[dict[str, dict[str, Test]], dict[str, list[Mutant]]]:
    """Return the tests of each package and the mutants of each module; import here what the tests import."""
    packages = {path: Path(path).parts[1] for path in paths}
    folder = OUT / "prepared"
    folder.mkdir(parents=True, exist_ok=True)
    made = {path: folder / f"{path.replace('/', '.')}-{digest([Path(path)])}.pickle" for path in paths}
    common = [file for name in ("cutslots", "tests") for file in Path(name).rglob("*.py") if file.stem[:5] != "test_"]
    measured = {
        (package, file): folder / f"{package}-{file.replace('/', '.')}-{digest([*common, Path(file)])}.json"
        for package in dict.fromkeys(packages.values())
        for file in given or test_files(package)
    }
    todo = [
        Job(measure, (sorted(map(str, Path("cutslots", package).glob("*.py"))), file, answer), timeout=400)
        for (package, file), answer in measured.items()
        if not answer.exists()
    ]
    todo += [Job(save_mutants, (path, file), timeout=400) for path, file in made.items() if not file.exists()]
    run_jobs(todo, count)
    tests: dict[str, dict[str, Test]] = {package: {} for package in packages.values()}
    for (package, file), answer in measured.items():
        tests[package] |= usable_tests(file, answer)
    gc.freeze()
    return tests, {path: pickle.loads(file.read_bytes()) for path, file in made.items()}


def digest(files: Iterable[Path]) -> str:
    """Return a hash of files. What was measured holds until one of them changes."""
    return hashlib.sha256(b"".join(file.read_bytes() for file in sorted(files))).hexdigest()[:16]


def test_files(package: str) -> list[str]:
    """Return the files with tests of a package, and its modules with doctests."""
    own = [*Path("tests", package).glob("test_*.py")]
    own += [file for file in Path("cutslots", package).glob("*.py") if ">>>" in file.read_text()]
    return [*sorted(map(str, own)), *MORE_TESTS.get(package, [])]


def usable_tests(file: str, answer: Path) -> dict[str, Test]:
    if not answer.exists():
        print(f"{file}: not collected, so not used")
        return {}
    found = json.loads(answer.read_text())
    if found["failed"]:
        print(f"{file}: failed, so not used: {', '.join(found['failed'])}")
    preload(found["imported"])
    return {name: Test(*test) for name, test in found["tests"].items()}


def preload(names: list[str]) -> None:
    """Import libraries once, for all mutants."""
    for name in names:
        if name.split(".")[0] not in ("cutslots", "tests", "__main__") and name not in sys.modules:
            with contextlib.suppress(Exception):
                importlib.import_module(name)


def jobs(
    options: argparse.Namespace, tests: dict[str, dict[str, Test]], made: dict[str, list[Mutant]]
) -> Iterator[Job]:
    """Yield the mutants that were not killed yet: the new ones of all modules first, then the survivors."""
    known = {path: read_results(path) for path in made}
    for again in (False, True):
        for path in made:
            wanted = SURVIVORS if again else (None,)
            todo = [mutant for mutant in made[path] if known[path].get(mutant.key) in wanted]
            print(f"{path}: {len(todo)} {'survivors' if again else 'new mutants'}", flush=True)
            for mutant in todo:
                chosen, seconds = select(mutant, tests[Path(path).parts[1]], options)
                done = functools.partial(record, mutant)
                if chosen:
                    yield Job(attempt, (mutant, chosen), 15 + 3 * seconds, done)
                else:
                    record(mutant, None, "untested")


def select(mutant: Mutant, tests: dict[str, Test], options: argparse.Namespace) -> tuple[list[str], float]:
    """Return the tests that run the statement of a mutant, the fastest first, and their time."""
    chosen, total = [], 0.0
    for name, test in sorted(tests.items(), key=lambda item: item[1].seconds):
        runs = mutant.lines is None or not set(mutant.lines).isdisjoint(test.lines[mutant.path])
        if runs and test.seconds <= options.slowest and total + test.seconds <= options.seconds:
            total += test.seconds
            chosen.append(name)
    return chosen, total


def attempt(mutant: Mutant, tests: list[str]) -> None:
    """Exit with pytest's status: 0 if the mutant survives."""
    finder = Finder(mutant)
    sys.meta_path.insert(0, finder)
    files = dict.fromkeys(test.split("::")[0] for test in tests)
    status = run_pytest(files, Selection(tests), "-x", "--assert=plain")  # pytest would rewrite the original
    loader = getattr(sys.modules.get(finder.name), "__loader__", None)
    os._exit(status if status or isinstance(loader, Loader) else UNMUTATED)


class Selection:
    """A pytest plugin: run some tests only, in their order."""

    def __init__(self, tests: list[str]) -> None:
        self.order = {test: i for i, test in enumerate(tests)}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = sorted((i for i in items if i.nodeid in self.order), key=lambda i: self.order[i.nodeid])


class Finder:
    """Import the mutated module from memory."""

    def __init__(self, mutant: Mutant) -> None:
        self.mutant, self.name = mutant, mutant.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        if name != self.name:
            return None
        loader = Loader(name, str(Path(self.mutant.path).resolve()))
        loader.source = self.mutant.source
        return importlib.util.spec_from_file_location(name, loader.path, loader=loader)


class Loader(SourceFileLoader):
    source: str

    def get_code(self, fullname: str) -> CodeType:
        return compile(self.source, self.path, "exec", dont_inherit=True)


def results_file(path: str, suffix: str) -> Path:
    return OUT / f"{path.removesuffix('.py').replace('/', '.')}.{suffix}"


def record(mutant: Mutant, status: int | None, result: str | None = None) -> None:
    result = result or RESULTS.get(status, "killed")
    OUT.mkdir(parents=True, exist_ok=True)
    with results_file(mutant.path, "jsonl").open("a") as file:
        print(json.dumps([mutant.key, result]), file=file)


def read_results(path: str) -> dict[str, str]:
    file = results_file(path, "jsonl")
    return dict(json.loads(line) for line in file.read_text().splitlines()) if file.exists() else {}


def write_report(path: str, made: list[Mutant]) -> None:
    """Write the counts and the diffs of the survivors."""
    results = read_results(path)
    by_result = {mutant: results.get(mutant.key, "not run") for mutant in made}
    killed, ended = count(path, made)
    counts = ", ".join(f"{n} {name}" for name, n in sorted(Counter(by_result.values()).items()))
    summary = f"{path}: {100 * killed / max(ended, 1):.1f} % of {ended} killed; {counts}"
    print(summary)
    shown = [f"{result}\n{mutant.diff}" for mutant, result in by_result.items() if result in SURVIVORS]
    results_file(path, "txt").write_text("\n\n".join([summary, *shown]) + "\n")


def count(path: str, made: list[Mutant]) -> tuple[int, int]:
    """Return how many mutants are killed, and how many have run."""
    results = read_results(path)
    ended = [results[mutant.key] for mutant in made if mutant.key in results]
    return sum(result in ("killed", "timeout") for result in ended), len(ended)


def write_table(everything: dict[str, list[Mutant]], made: dict[str, list[Mutant]]) -> None:
    """Replace or add the rows of modules in the table of the docs."""
    before, header, rest = TABLE.read_text().partition(HEADER)
    lines = rest.splitlines()
    old = list(itertools.takewhile(lambda line: line.startswith("| `"), lines))
    rows = {row.split("`")[1]: row for row in old}
    for path, mutants in made.items():
        killed, ended = count(path, mutants)
        name = path.removeprefix("cutslots/")
        percent = f"{100 * killed / max(ended, 1):.1f} %"
        rows[name] = f"| `{name}` | {len(choose(everything[path]))} | {ended} | {percent} | {date.today()} |"
    after = "\n".join([*(rows[name] for name in sorted(rows)), *lines[len(old) :]])
    TABLE.write_text(f"{before}{header}{after}\n")


if __name__ == "__main__":
    main()
