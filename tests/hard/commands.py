"""The commands that write, each on something small, and what may be found in a folder where one was killed."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file

from cutslots import cli
from cutslots.data.prepared import read_manifest
from cutslots.model import load
from cutslots.video import open_video
from tests.data.small_files import clevrtex_files, write_files
from tests.small_runs import FORKED, Command, lines, train_command

WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
CHANGES = ("os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate")


class Job(NamedTuple):
    """A command; `last` is the file it writes last, which says that all is there."""

    words: Callable[[Path], list[str]]
    last: str | None


def jobs(place: Path) -> dict[str, Job]:
    """All of them, with what they read, made in `place`."""
    rng = np.random.default_rng(0)
    write_files(place / "clevrtex", clevrtex_files("full", (3, 1, 4, 1, 5, 9, 2, 6)))
    for number in range(8):
        folder = place / ("pictures" if number < 4 else "other pictures")
        folder.mkdir(exist_ok=True)
        noise = rng.integers(0, 256, (30, 40, 3), dtype=np.uint8)
        Image.fromarray(noise).resize((80, 60)).save(folder / f"{number % 4}.png")
    frames = [Image.fromarray(np.roll(noise, 3 * t, 1)) for t in range(10)]
    frames[0].save(place / "film.gif", save_all=True, append_images=frames[1:], duration=100)
    film, source = str(place / "film.gif"), str(place / "clevrtex")
    return {
        "train": Job(lambda out: train_command(out, steps=16, save_minutes=0.001), None),
        "generate": Job(lambda out: ["generate", "plain", "--count", "6", "--size", "16", "--out", str(out)], SHEET),
        "generate moving": Job(
            lambda out: ["generate", "moving", "--count", "2", "--size", "16", "--out", str(out)], SHEET
        ),
        "prepare": Job(
            lambda out: ["prepare", "clevrtex", "--source", source, "--out", str(out), "--size", "64"], "manifest.json"
        ),
        "predict": Job(lambda out: ["predict", "tiny", str(place / "pictures"), "-o", str(out)], "masks.json"),
        "track": Job(lambda out: ["track", "tiny", film, "-o", str(out)], "tracks.json"),
        "track gif": Job(lambda out: ["track", "tiny", film, "-o", str(out), "--overlay", "gif"], "tracks.json"),
    }


SHEET = "contact_sheet.png"


def contents(name: str, out: Path) -> dict[str, bytes]:
    """What a command has made, as far as two runs of it give the same bytes; unfinished files among it."""
    files = {str(p.relative_to(out)): p for p in sorted(out.rglob("*")) if p.is_file() and p.name != ".lock"}
    if name != "train":
        return {key: _sizes(path) if key.endswith(".mp4") else path.read_bytes() for key, path in files.items()}
    same = {k: p.read_bytes() for k, p in files.items() if k.endswith((".safetensors", ".png", ".part", "config.json"))}
    return same | {"scores": json.dumps([line for line in lines(out) if "val" in line]).encode()}


def _sizes(path: Path) -> bytes:
    """Those of a film's frames: its bytes are the encoder's affair."""
    return repr([frame.size for frame in open_video(path).frames]).encode()


def faults(name: str, job: Job, out: Path, whole: list[dict[str, bytes]]) -> list[str]:
    """What is wrong in a folder that a command was stopped in: files under their own names that are not whole, and a
    last file though not all is there. `whole` is what it would hold in the end, or did before."""
    found = []
    for path in sorted(p for p in out.rglob("*") if p.is_file()) if out.exists() else ():
        try:
            _read(path)
        except Exception as error:
            found.append(f"{path.relative_to(out)} is broken: {type(error).__name__}: {error}")
    if job.last and (out / job.last).exists():
        there = contents(name, out)
        if not any(there | each == there for each in whole):
            found.append(f"{job.last} is there, but not all is")
    return found


def _read(path: Path) -> object:
    """Reads a file to its end, by its kind."""
    if path.suffix == ".png":
        with Image.open(path) as picture:
            return picture.load()
    if path.suffix in (".gif", ".mp4"):
        return [frame.load() for frame in open_video(path).frames]
    if path.suffix == ".json":
        if path.name == "manifest.json":
            read_manifest(path.parent)
        return json.loads(path.read_text())
    if path.suffix == ".jsonl":  # the last line may be cut, which the next run drops
        return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]
    if path.suffix == ".safetensors":
        return load_file(path), load(path)
    if path.suffix == ".pt":
        return torch.load(path, weights_only=True)
    if path.suffix == ".npy":
        return np.load(path)
    if path.suffix == ".html":
        assert path.read_text().rstrip().endswith("</html>"), "the page has no end"
    return None


# --------------------------------------------------------------------------------------------------- killed and stopped


class Doomed(Command):
    """A command that SIGKILL ends before it changes something below `out` for the time number `at`."""

    def __init__(self, words: list[str], log: Path, out: Path, at: int) -> None:
        self.log = log
        self.process = FORKED.Process(target=_doomed, args=(words, log, str(out), at))
        self.process.start()


def _doomed(words: list[str], log: Path, out: str, at: int) -> None:
    torch.set_num_threads(1)
    with log.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    left = at

    def watch(event: str, details: tuple) -> None:
        nonlocal left
        changes = event in CHANGES or (event == "open" and details[2] & WRITES)
        if changes and isinstance(details[0], str | os.PathLike) and os.fspath(details[0]).startswith(out):
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.argv = ["cutslots", *words]
    sys.addaudithook(watch)
    cli.main()
    print(f"changes: {at - left}")


def changes(words: list[str], log: Path, out: Path) -> int:
    """How many changes the command makes below `out`, where it is let do so."""
    command = Doomed(words, log, out, 10**9)
    assert command.end() == 0, command.said()
    return int(command.said().split("changes: ")[1])


def is_locked(out: Path) -> bool:
    with contextlib.suppress(FileNotFoundError), (out / ".lock").open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def complaint(command: Command) -> str | None:
    """The only sentence that a command ended with; None if there is none, or a traceback, or more than one."""
    said = [line for line in command.said().splitlines() if line.startswith("cutslots: ")]
    return said[0] if len(said) == 1 and "Traceback" not in command.said() else None


def killed(command: Command, after: float) -> bool:
    """Kills it after so many seconds; False if it had ended by then."""
    time.sleep(after)
    alive = command.process.exitcode is None
    command.end(0)
    return alive


def gone_on_with(name: str, job: Job, out: Path, whole: dict[str, bytes], log: Path, *more: str) -> list[str]:
    """What is wrong after the same command is given once more."""
    command = Command([*job.words(out), *more], log)
    if command.end() != 0:
        return [f"it does not go on: {command.said().strip().splitlines()[-1:]}"]
    there = contents(name, out)
    differ = sorted(k for k in there.keys() | whole.keys() if there.get(k) != whole.get(k))
    return [f"other bytes in {', '.join(differ[:5])}"] if differ else []


# --------------------------------------------------------------------------------------------------------- a small disk


@contextlib.contextmanager
def small_disk(place: Path, size: int) -> Iterator[Callable[[int], None] | None]:
    """A disk of so many bytes, and what makes it another size; None where one may not mount."""
    place.mkdir(parents=True, exist_ok=True)
    mount = shutil.which("mount") if os.geteuid() == 0 else None
    options = ["-t", "tmpfs", "-o", f"size={size}", "none", str(place)]
    if mount is None or subprocess.run([mount, *options], capture_output=True).returncode:
        yield None
        return
    try:
        yield lambda size: subprocess.run([mount, "-o", f"remount,size={size}", str(place)], check=True)
    finally:
        subprocess.run(["umount", str(place)], check=True)
