"""A folder of hostile image files, and what `cutslots predict` must do with each.

It predicts "good" ones and refuses "bad" ones in a sentence. For "either" both are right: Pillow decides whether it can
read a file that was truncated or has a flipped bit. It does not mention "ignored" ones, as any file that is not named
like an image.
"""

from __future__ import annotations

import functools
import io
import json
import os
import re
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import warnings
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image, PngImagePlugin

Case = tuple[bytes, str, Callable[[Path], object]]  # name, expected outcome, function that writes the file


def noise(rng: np.random.Generator, width: int = 23, height: int = 17, channels: int = 3) -> np.ndarray:
    return rng.integers(0, 256, (height, width, channels), dtype=np.uint8).squeeze()


def encode(image: Image.Image, kind: str, **options: object) -> bytes:
    data = io.BytesIO()
    image.save(data, kind, **options)
    return data.getvalue()


def chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png(width: int, height: int, pixels: bytes, *more: bytes, depth: int = 8, color: int = 0) -> bytes:
    """Return a PNG written by hand, 8-bit grayscale by default, with more chunks before the pixels."""
    head = struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + b"".join(more) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


@functools.cache
def zeros(size: int) -> bytes:
    """Return so many zeros, compressed without ever being in memory."""
    packer, piece = zlib.compressobj(9), bytes(2**20)
    parts = [packer.compress(piece[: min(2**20, size - at)]) for at in range(0, size, 2**20)]
    return b"".join([*parts, packer.flush()])


def gray_png(width: int, height: int, *more: bytes) -> bytes:
    return png(width, height, zeros((width + 1) * height), *more)


def intact_files(rng: np.random.Generator) -> dict[str, bytes]:
    """Return images of every format that is truncated and damaged below."""
    image, frames = Image.fromarray(noise(rng)), [Image.fromarray(noise(rng)) for _ in range(3)]
    exif = Image.Exif()
    exif[0x0112] = 6
    moving = {"save_all": True, "append_images": frames, "duration": 40}
    return {
        "plain.png": encode(image, "PNG"),
        "moving.png": encode(image, "PNG", **moving),
        "baseline.jpg": encode(image, "JPEG", exif=exif),
        "progressive.jpg": encode(image, "JPEG", progressive=True),
        "lossy.webp": encode(image, "WEBP"),
        "lossless.webp": encode(image, "WEBP", lossless=True),
        "moving webp.webp": encode(image, "WEBP", **moving),
        "gif.png": encode(image, "GIF", **moving),
        "tiff.png": encode(image, "TIFF", compression="tiff_lzw"),
    }


def modes(rng: np.random.Generator) -> Iterator[tuple[str, str, bytes]]:
    """Yield images of every mode."""
    rgb, values = Image.fromarray(noise(rng)), noise(rng, channels=1)
    palette = rgb.quantize(16)
    yield "one pixel.png", "good", encode(Image.new("RGB", (1, 1), (9, 8, 7)), "PNG")
    yield "one row.png", "good", encode(Image.new("RGB", (4000, 1)), "PNG")
    yield "one column.webp", "good", encode(Image.new("RGB", (1, 4000)), "WEBP")
    for mode in ("L", "LA", "RGBA", "1", "P", "PA", "CMYK", "YCbCr", "LAB"):
        kind = "TIFF" if mode in ("PA", "CMYK", "YCbCr", "LAB") else "PNG"
        made = palette.convert("PA") if mode == "PA" else rgb.convert(mode)
        if mode != "PA":  # which TIFF cannot keep
            yield f"mode {mode}.png", "good", encode(made, kind)
    yield "cmyk.jpg", "good", encode(rgb.convert("CMYK"), "JPEG")
    yield "palette, transparent.png", "good", encode(palette, "PNG", transparency=3)
    yield "palette, see-through.png", "good", encode(palette, "PNG", transparency=bytes(range(16)))
    yield "sixteen bits.png", "good", encode(Image.fromarray(values.astype(np.uint16) * 257), "PNG")
    yield "sixteen bits, color.png", "good", png(2, 2, zlib.compress(bytes(26)), depth=16, color=2)
    yield "numbers.png", "good", encode(Image.fromarray((values / 255).astype(np.float32)), "TIFF")
    yield "not a number.png", "bad", encode(Image.fromarray(np.full((5, 5), np.nan, np.float32)), "TIFF")
    yield "infinite.png", "bad", encode(Image.fromarray(np.full((5, 5), np.inf, np.float32)), "TIFF")
    for turn in range(0, 10):
        exif = Image.Exif()
        exif[0x0112] = turn
        yield f"rotated {turn}.jpg", "good", encode(rgb, "JPEG", exif=exif)


def impostors() -> Iterator[tuple[str, str, bytes]]:
    """Yield files that are named like images but are not, or claim a size that is too large."""
    yield "empty.png", "bad", b""
    yield "text.png", "bad", b"Dear Sir or Madam,\n" * 99
    yield "page.jpg", "bad", b"<!doctype html><title>404</title>"
    yield "drawing.webp", "bad", b"<svg xmlns='http://www.w3.org/2000/svg' width='9' height='9'/>"
    yield "program.png", "bad", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n"
    yield "only a head.png", "bad", gray_png(9, 9)[:33]
    yield "only a mark.png", "bad", b"\x89PNG\r\n\x1a\n"
    yield "only a mark, jpg.jpg", "bad", b"\xff\xd8\xff"
    yield "nothing wide.png", "bad", gray_png(0, 9)
    yield "20,000 wide.png", "bad", png(20_000, 20_000, zlib.compress(bytes(99)))
    yield "2^31 wide.png", "bad", png(2**31 - 1, 2**31 - 1, zlib.compress(bytes(99)))
    yield "14,000 wide.png", "bad", gray_png(14_000, 14_000)
    yield "10,000 wide, of nothing.png", "bad", png(9_999, 8_900, zlib.compress(b""))
    jpeg = bytearray(encode(Image.new("RGB", (8, 8)), "JPEG"))
    at = jpeg.index(b"\xff\xc0") + 5
    jpeg[at : at + 4] = struct.pack(">HH", 65_000, 65_000)
    yield "65,000 wide.jpg", "bad", bytes(jpeg)
    yield "gif, 60,000 wide.png", "bad", b"GIF89a" + struct.pack("<HH", 60_000, 60_000) + b"\x80\0\0" + bytes(6) + b";"
    yield "words that unpack.png", "either", gray_png(9, 9, chunk(b"iTXt", b"a\0\1\0\0\0" + zeros(2**28)))
    yield "more words.png", "either", gray_png(9, 9, chunk(b"zTXt", b"a\0\0" + zeros(2**28)))
    yield "many words.png", "either", gray_png(9, 9, *[chunk(b"zTXt", b"a\0\0" + zeros(2**20 - 9))] * 99)
    yield "profile that unpacks.png", "either", gray_png(9, 9, chunk(b"iCCP", b"a\0\0" + zeros(2**28)))
    yield "pixels that go on.png", "either", png(9, 9, zeros(2**28))
    wrong = gray_png(9, 9, chunk(b"eXIf", b"MM\0*\0\0\0\x08" + b"\xff" * 40))
    yield "wrong exif.png", "good", wrong
    yield "wrong exif, jpg.jpg", "good", encode(Image.new("RGB", (9, 9)), "JPEG", exif=b"Exif\0\0" + b"\xff" * 40)
    info = PngImagePlugin.PngInfo()
    info.add_text("XML:com.adobe.xmp", "<x:xmpmeta xmlns:x='adobe:ns:meta/'><" * 99)
    yield "wrong xmp.png", "good", encode(Image.new("RGB", (9, 9)), "PNG", pnginfo=info)


def names(rng: np.random.Generator) -> Iterator[tuple[bytes, str, bytes]]:
    """Yield good and bad images with names that are hard to print."""
    odd = (
        b"with spaces ",
        b"with\nnew\nlines",
        b"with\ttabs\x1b[31m and colors",
        b"not \xff\xfe utf-8",
        "übergroß 図 🐈 \u202e desrever".encode(),
        b"$(touch executed); `touch executed` [red]",
        b"%s%n{0} \\ \" '",
        b"-o",
        b"a" * 240,
        b"request.json",
        b"coco.json",
        b"masks",
        b"..._",
    )
    for name in odd:
        hidden = name.startswith(b".")
        yield name + b".png", "ignored" if hidden else "good", encode(Image.fromarray(noise(rng)), "PNG")
        yield name + b" bad.PNG", "ignored" if hidden else "bad", b"not an image"


def special_files() -> Iterator[Case]:
    """Yield what is not a regular file."""
    yield b"folder.png", "bad", lambda path: path.mkdir()
    yield b"pipe.png", "bad", os.mkfifo
    yield b"loop.png", "bad", lambda path: path.symlink_to(path.name)
    yield b"loop of two.jpg", "bad", lambda path: path.symlink_to("loop of three.jpg")
    yield b"loop of three.jpg", "bad", lambda path: path.symlink_to("loop of two.jpg")
    yield b"dangling.png", "bad", lambda path: path.symlink_to("nowhere.png")
    yield b"to a pipe.png", "bad", lambda path: path.symlink_to("pipe.png")
    yield b"to the dark.png", "bad", lambda path: path.symlink_to("/dev/zero")
    yield b"to a good one.png", "good", lambda path: path.symlink_to("good 0.png")
    yield b"nobody's.png", "forbidden", lambda path: (path.write_bytes(gray_png(9, 9)), path.chmod(0))
    yield b"notes.txt", "ignored", lambda path: path.write_text("not an image by its name either")
    yield b".hidden.png", "ignored", lambda path: path.write_text("not an image")


def write_hostile(folder: Path, count: int = 500, seed: int = 0, root: bool | None = None) -> dict[bytes, str]:
    """Write so many files, at least one of each kind; return the expected outcome by name.

    `root` can read files without read permission."""
    rng, expected = np.random.default_rng(seed), {}
    root = os.geteuid() == 0 if root is None else root
    folder.mkdir(parents=True)

    def add(name: bytes, outcome: str, make: Callable[[Path], object]) -> None:
        make(folder / os.fsdecode(name))
        expected[name] = {"forbidden": "good" if root else "bad"}.get(outcome, outcome)

    def content(data: bytes) -> Callable[[Path], object]:
        return lambda path: path.write_bytes(data)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow's, of what is written here
        for i in range(10):
            add(f"good {i}.png".encode(), "good", content(encode(Image.fromarray(noise(rng)), "PNG")))
        for name, outcome, data in [*modes(rng), *impostors()]:
            add(name.encode(), outcome, content(data))
        for odd, outcome, data in names(rng):
            add(odd, outcome, content(data))
        for case in special_files():
            add(*case)
        intact = intact_files(rng)
        for name, data in intact.items():
            add(f"intact {name}".encode(), "good", content(data))
    i = 0
    while len(expected) < count:
        stem, suffix = list(intact)[i % len(intact)].split(".")
        data = intact[f"{stem}.{suffix}"]
        if i % 3 < 2:  # truncated anywhere, each format at evenly spread lengths
            left = int(len(data) * ((i // len(intact) * 0.618) % 1))
            add(f"truncated {stem} {i} after {left}.{suffix}".encode(), "either", content(data[:left]))
        else:
            damaged = bytearray(data)
            for at in rng.integers(0, len(data), 1 + i % 4):
                damaged[at] ^= 1 << rng.integers(8)
            add(f"damaged {stem} {i}.{suffix}".encode(), "either", content(bytes(damaged)))
        i += 1
    return expected


# ------------------------------------------------------------------------------------------------ checks of the outcome


class Result(NamedTuple):
    """What a command printed, its exit status (None if it did not end) and its peak memory in bytes."""

    said: str
    status: int | None
    peak: int


# Leaves the status of its process, which holds the peak of its own memory: that of `wait4` counts the parent's too, as
# it was when the process was started.
MAIN = """
import atexit, pathlib, sys
status, here = pathlib.Path("/proc/self/status"), pathlib.Path(sys.argv.pop(1))
atexit.register(lambda: here.write_text(status.read_text()) if status.exists() else None)
from cutslots.cli import main
main()
"""


def run_predict(images: Path, out: Path, seconds: float = 600, **options: object) -> Result:
    """Run `cutslots predict` in a process of its own, on a terminal that accepts only valid UTF-8."""
    words = ["predict", "tiny-64", str(images), "-o", str(out), "--device", "cpu"]
    environment = os.environ | {"PYTHONIOENCODING": "utf-8:strict", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryFile() as log, tempfile.NamedTemporaryFile() as status_file:
        command = [sys.executable, "-c", MAIN, status_file.name, *words]
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment, **options)
        timer = threading.Timer(seconds, process.kill)
        timer.start()
        _, status, used = os.wait4(process.pid, 0)
        timer.cancel()
        process.returncode = os.waitstatus_to_exitcode(status)  # for Popen, which did not wait
        log.seek(0)
        said = log.read().decode()
        own = re.search(r"VmHWM:\s+(\d+) kB", Path(status_file.name).read_text())
    ended = None if process.returncode == -signal.SIGKILL else process.returncode
    return Result(said, ended, 1024 * (int(own[1]) if own else used.ru_maxrss))


def find_failures(expected: dict[bytes, str], folder: Path, out: Path, result: Result) -> dict[bytes, list[str]]:
    """Return the failures for each image, and under b"" those of the whole command."""
    record = {}
    if (out / "coco.json").is_file():
        record = {each["file_name"]: each for each in json.loads((out / "coco.json").read_text())["images"]}
    lines = result.said.splitlines()
    wrong = {name: _find_failures(name, outcome, folder, out, lines, record) for name, outcome in expected.items()}
    missing, unread = f"cutslots: there is no {folder}", " cannot be read as an image: "
    refused = sum(x.startswith(missing) or (x.startswith(f"cutslots: {folder}") and unread in x) for x in lines)
    asked = sum(outcome != "ignored" for outcome in expected.values())
    whole = [] if result.status == 1 else [f"exit status {result.status}"]
    whole += [] if "Traceback" not in result.said else ["a traceback"]
    for line in (f"wrote {len(record)} of {asked} images", f"{refused} of {asked} images could not be read"):
        whole += [] if any(line in each for each in lines) else [f"it does not say: {line}"]
    whole += [f"{each.name} is left" for each in out.rglob("*.part")]
    return wrong | {b"": whole}


def _find_failures(name: bytes, outcome: str, folder: Path, out: Path, lines: list[str], record: dict) -> list[str]:
    path = folder / os.fsdecode(name)
    printed = "".join(c if c.isprintable() else repr(c)[1:-1] for c in str(path))
    sentences = sum(line.startswith(f"cutslots: {printed} cannot be read as an image: ") for line in lines)
    sentences += f"cutslots: there is no {printed}" in lines
    made, done = out / path.stem.replace(".", "_"), path.name in record
    wrong = []
    if (int(done), sentences) not in {"good": {(1, 0)}, "bad": {(0, 1)}, "ignored": {(0, 0)}}.get(
        outcome, {(1, 0), (0, 1)}
    ):
        wrong.append(f"it is {outcome}: written {done}, {sentences} sentences")
    if done != made.is_dir():
        wrong.append(f"in coco.json {done}, a folder {made.is_dir()}")
    if done:
        size = (record[path.name]["width"], record[path.name]["height"])
        files = sorted(made.iterdir())
        masks = [file for file in files if file.name.startswith("slot_")]
        if len(files) != 3 + len(masks) or not masks:
            wrong.append(f"its folder holds {[file.name for file in files]}")
        for file in files:
            with warnings.catch_warnings(action="ignore"), Image.open(file) as image:
                image.load()
                wrong += [] if image.size == size else [f"{file.name} has another size"]
    return [f"{printed}: {each}" for each in wrong]
