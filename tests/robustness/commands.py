"""The commands that write, each on a small input, and checks of the folder in which one was interrupted."""

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
from cutslots.inference.video import open_video
from cutslots.models.checkpoints import load
from tests.data.small_files import clevrtex_files, write_files
from tests.small_runs import FORKED, Command, lines, train_command

WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
CHANGES = ("os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate")


class Job(NamedTuple):
    """A command: its arguments for an output folder, and the marker, the file that it writes last."""

    arguments: Callable[[Path], list[str]]
    marker: str | None


def make_jobs(folder: Path) -> dict[str, Job]:
    """Return all commands; their inputs are written to `folder`."""
    rng = np.random.default_rng(0)
    write_files(folder / "clevrtex", clevrtex_files("full", (3, 1, 4, 1, 5, 9, 2, 6)))
    for number in range(8):
        images = folder / ("images" if number < 4 else "other images")
        images.mkdir(exist_ok=True)
        noise = rng.integers(0, 256, (30, 40, 3), dtype=np.uint8)
        Image.fromarray(noise).resize((80, 60)).save(images / f"{number % 4}.png")
    frames = [Image.fromarray(np.roll(noise, 3 * t, 1)) for t in range(10)]
    frames[0].save(folder / "video.gif", save_all=True, append_images=frames[1:], duration=100)
    marks = np.zeros((60, 80), dtype=np.uint8)
    marks[10:20, 10:70], marks[40:50, 10:70] = 100, 200
    Image.fromarray(marks).save(folder / "marks.png")
    photo, scribbles = str(folder / "images" / "0.png"), str(folder / "marks.png")
    video, source = str(folder / "video.gif"), str(folder / "clevrtex")
    return {
        "train": Job(lambda out: train_command(out, max_steps=16, checkpoint_minutes=0.001), None),
        "generate": Job(
            lambda out: ["generate", "plain", "--count", "6", "--image-size", "16", "16", "--out", str(out)], SHEET
        ),
        "generate moving": Job(
            lambda out: ["generate", "moving", "--count", "2", "--image-size", "16", "16", "--out", str(out)], SHEET
        ),
        "prepare": Job(
            lambda out: ["prepare", "clevrtex", "--source", source, "--out", str(out), "--size", "64"], "manifest.json"
        ),
        "predict": Job(lambda out: ["predict", "tiny-64", str(folder / "images"), "-o", str(out)], "coco.json"),
        "track": Job(lambda out: ["track", "tiny-64", video, "-o", str(out)], "tracks.json"),
        "track gif": Job(lambda out: ["track", "tiny-64", video, "-o", str(out), "--overlay", "gif"], "tracks.json"),
        "segment": Job(lambda out: ["segment", photo, "--scribbles", scribbles, "-o", str(out)], "result.json"),
    }


SHEET = "contact_sheet.png"


def contents(name: str, out: Path) -> dict[str, bytes]:
    """Return the files that a command has written, incomplete ones too, as far as two runs write the same bytes."""
    files = {str(p.relative_to(out)): p for p in sorted(out.rglob("*")) if p.is_file() and p.name != ".lock"}
    if name != "train":
        return {key: _sizes(path) if key.endswith(".mp4") else path.read_bytes() for key, path in files.items()}
    same = {k: p.read_bytes() for k, p in files.items() if k.endswith((".safetensors", ".png", ".part", "config.json"))}
    return same | {"scores": json.dumps([line for line in lines(out) if "val" in line]).encode()}


def _sizes(path: Path) -> bytes:
    """Return the sizes of the frames of a video: its bytes depend on the encoder."""
    return repr([frame.size for frame in open_video(path).frames]).encode()


def find_faults(name: str, job: Job, out: Path, complete: list[dict[str, bytes]]) -> list[str]:
    """Return what is wrong in a folder in which a command was interrupted: truncated files under their final names, or
    a marker though files are missing. `complete` lists the contents that a complete folder may have."""
    found = []
    for path in sorted(p for p in out.rglob("*") if p.is_file()) if out.exists() else ():
        try:
            _read(path)
        except Exception as error:
            found.append(f"{path.relative_to(out)} is broken: {type(error).__name__}: {error}")
    if job.marker and (out / job.marker).exists():
        present = contents(name, out)
        if not any(present | each == present for each in complete):
            found.append(f"{job.marker} exists, but files are missing")
    return found


def _read(path: Path) -> object:
    """Read a file of any format to its end."""
    if path.suffix == ".png":
        with Image.open(path) as image:
            return image.load()
    if path.suffix in (".gif", ".mp4"):
        return [frame.load() for frame in open_video(path).frames]
    if path.suffix == ".json":
        if path.name == "manifest.json":
            read_manifest(path.parent)
        return json.loads(path.read_text())
    if path.suffix == ".jsonl":  # the last line may be truncated: the next run drops it
        return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]
    if path.suffix == ".safetensors":
        return load_file(path), load(path)
    if path.suffix == ".pt":
        return torch.load(path, weights_only=True)
    if path.suffix == ".npy":
        return np.load(path)
    if path.suffix == ".html":
        assert path.read_text().rstrip().endswith("</html>"), "the page is truncated"
    return None


# --------------------------------------------------------------------------------------------------- interruptions


class KilledCommand(Command):
    """A command that gets SIGKILL before its change number `at` to the files below `out`."""

    def __init__(self, words: list[str], log: Path, out: Path, at: int) -> None:
        self.log = log
        self.process = FORKED.Process(target=_run_until_killed, args=(words, log, str(out), at))
        self.process.start()


def _run_until_killed(words: list[str], log: Path, out: str, at: int) -> None:
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


def count_changes(words: list[str], log: Path, out: Path) -> int:
    """Return how many changes an uninterrupted command makes to the files below `out`."""
    command = KilledCommand(words, log, out, 10**9)
    assert command.end() == 0, command.said()
    return int(command.said().split("changes: ")[1])


def is_locked(out: Path) -> bool:
    with contextlib.suppress(FileNotFoundError), (out / ".lock").open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def error_sentence(command: Command) -> str | None:
    """Return the sentence that a command failed with; None if there is none, more than one, or a traceback."""
    said = [line for line in command.said().splitlines() if line.startswith("cutslots: ")]
    return said[0] if len(said) == 1 and "Traceback" not in command.said() else None


def kill_after(command: Command, seconds: float) -> bool:
    """Kill a command after so many seconds; return False if it had ended by then."""
    time.sleep(seconds)
    alive = command.process.exitcode is None
    command.end(0)
    return alive


def resume(name: str, job: Job, out: Path, complete: dict[str, bytes], log: Path, *more: str) -> list[str]:
    """Run the same command again; return what is wrong then."""
    command = Command([*job.arguments(out), *more], log)
    if command.end() != 0:
        return [f"it does not resume: {command.said().strip().splitlines()[-1:]}"]
    present = contents(name, out)
    differ = sorted(k for k in present.keys() | complete.keys() if present.get(k) != complete.get(k))
    return [f"other bytes in {', '.join(differ[:5])}"] if differ else []


# ---------------------------------------------------------------------------------------------------------- small disks


@contextlib.contextmanager
def small_disk(path: Path, size: int) -> Iterator[Callable[[int], None] | None]:
    """Mount a disk of so many bytes; yield a function that resizes it, or None where mounting is not allowed."""
    path.mkdir(parents=True, exist_ok=True)
    mount = shutil.which("mount") if os.geteuid() == 0 else None
    options = ["-t", "tmpfs", "-o", f"size={size}", "none", str(path)]
    if mount is None or subprocess.run([mount, *options], capture_output=True).returncode:
        yield None
        return
    try:
        yield lambda size: subprocess.run([mount, "-o", f"remount,size={size}", str(path)], check=True)
    finally:
        subprocess.run(["umount", str(path)], check=True)
