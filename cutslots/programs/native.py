"""C code for the CPU, compiled on first use and kept in a folder of the user.

`load(source, real)` returns the library of a C file of this package, or None where there is no compiler. Callers fall
back to torch then. `CUTSLOTS_NATIVE=0` turns compiled code off; `disabled` does so in a block.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

REAL = {torch.float32: "float", torch.float64: "double"}
# Sums may be reordered, so that they are vectorised. NaN and infinity keep their meaning.
FLAGS = (
    "-std=c11",
    "-O3",
    "-pthread",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fassociative-math",
    "-fno-signed-zeros",
)
MARCH = {"AVX2": ("-march=x86-64-v3",), "AVX512": ("-march=x86-64-v4", "-mprefer-vector-width=512")}


def load(source: Path, real: torch.dtype) -> ctypes.CDLL | None:
    """Return the library of a C file, compiled with -DREAL=float or double. CUTSLOTS_NATIVE is read at every call."""
    return None if os.environ.get("CUTSLOTS_NATIVE") == "0" else load_cached(source, real)


@contextlib.contextmanager
def disabled() -> Iterator[None]:
    """Turn compiled code off in a block, in all threads: torch computes instead. For tests and benchmarks."""
    before = os.environ.get("CUTSLOTS_NATIVE")
    os.environ["CUTSLOTS_NATIVE"] = "0"
    try:
        yield
    finally:
        os.environ.pop("CUTSLOTS_NATIVE", None)
        os.environ |= {} if before is None else {"CUTSLOTS_NATIVE": before}


@functools.cache
def load_cached(source: Path, real: torch.dtype) -> ctypes.CDLL | None:
    """Compile a C file unless that was done before, and load it. None if it cannot be compiled."""
    compiler = shlex.split(os.environ.get("CC", "")) or [shutil.which("cc") or ""]
    if not compiler[0] or sys.platform == "win32":
        return None
    flags = [*FLAGS, *MARCH.get(torch.backends.cpu.get_cpu_capability(), ()), f"-DREAL={REAL[real]}"]
    key = hashlib.sha256(" ".join([*compiler, *flags]).encode() + source.read_bytes()).hexdigest()[:20]
    try:
        library = _folder() / f"{source.stem}-{key}.so"
        if not library.is_file():
            _compile([*compiler, *flags], source, library)
        return ctypes.CDLL(str(library))
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", b"") or str(error).encode()
        reason = said.decode(errors="replace").strip().splitlines()[:1]
        warnings.warn(f"{source.name} is not compiled ({', '.join(reason)}); torch computes instead", stacklevel=2)
        return None


def _folder() -> Path:
    """Return a folder that only this user can write to: what lies there is run."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = Path(base) / "cutslots" / "native"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    status = folder.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise OSError(f"{folder} can be written to by other users")
    return folder


def _compile(command: list[str], source: Path, library: Path) -> None:
    """Write the library under another name first: another process may be compiling it, too."""
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        made = Path(folder) / library.name
        subprocess.run(
            [*command, "-shared", "-fPIC", str(source), "-o", str(made), "-lm"], check=True, capture_output=True
        )
        made.rename(library)


def in_threads(work: Callable[[], int], tasks: int) -> None:
    """Call `work` in as many threads as torch uses, at most `tasks`. C code runs without Python's lock.

    `work` returns 0 if it could not allocate memory."""
    failures: list[int] = []

    def call() -> None:
        if not work():
            failures.append(1)

    threads = [threading.Thread(target=call) for _ in range(min(torch.get_num_threads(), tasks) - 1)]
    for thread in threads:
        thread.start()
    call()
    for thread in threads:
        thread.join()
    if failures:
        raise MemoryError("there is not enough memory for the arrays of compiled code; use smaller inputs or batches")
