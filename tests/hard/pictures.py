"""A folder of pictures that nobody would wish to be sent, and what should become of each.

"good" ones are written, "bad" ones are refused in a sentence, and for "either" one of the two will do: where a file is
cut or a bit flipped, the reader decides. "passed over" ones are not spoken of, as with any file that is no picture.
"""

from __future__ import annotations

import functools
import io
import json
import os
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

Case = tuple[bytes, str, Callable[[Path], object]]  # name, what should become of it, what makes it


def noise(rng: np.random.Generator, width: int = 23, height: int = 17, channels: int = 3) -> np.ndarray:
    return rng.integers(0, 256, (height, width, channels), dtype=np.uint8).squeeze()


def encoded(picture: Image.Image, kind: str, **options: object) -> bytes:
    data = io.BytesIO()
    picture.save(data, kind, **options)
    return data.getvalue()


def chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png(width: int, height: int, pixels: bytes, *more: bytes, depth: int = 8, colour: int = 0) -> bytes:
    """A PNG written by hand: grey of 8 bits, with other chunks before the pixels."""
    head = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + b"".join(more) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


@functools.cache
def zeros(size: int) -> bytes:
    """So many zeros, packed without ever being held."""
    packer, piece = zlib.compressobj(9), bytes(2**20)
    parts = [packer.compress(piece[: min(2**20, size - at)]) for at in range(0, size, 2**20)]
    return b"".join([*parts, packer.flush()])


def grey(width: int, height: int, *more: bytes) -> bytes:
    return png(width, height, zeros((width + 1) * height), *more)


def whole_files(rng: np.random.Generator) -> dict[str, bytes]:
    """Pictures of every kind that is cut into and damaged below."""
    picture, frames = Image.fromarray(noise(rng)), [Image.fromarray(noise(rng)) for _ in range(3)]
    exif = Image.Exif()
    exif[0x0112] = 6
    moving = {"save_all": True, "append_images": frames, "duration": 40}
    return {
        "plain.png": encoded(picture, "PNG"),
        "moving.png": encoded(picture, "PNG", **moving),
        "baseline.jpg": encoded(picture, "JPEG", exif=exif),
        "progressive.jpg": encoded(picture, "JPEG", progressive=True),
        "lossy.webp": encoded(picture, "WEBP"),
        "lossless.webp": encoded(picture, "WEBP", lossless=True),
        "moving webp.webp": encoded(picture, "WEBP", **moving),
        "gif.png": encoded(picture, "GIF", **moving),
        "tiff.png": encoded(picture, "TIFF", compression="tiff_lzw"),
    }


def modes(rng: np.random.Generator) -> Iterator[tuple[str, str, bytes]]:
    """Every mode that a picture may have."""
    rgb, values = Image.fromarray(noise(rng)), noise(rng, channels=1)
    palette = rgb.quantize(16)
    yield "one pixel.png", "good", encoded(Image.new("RGB", (1, 1), (9, 8, 7)), "PNG")
    yield "one row.png", "good", encoded(Image.new("RGB", (4000, 1)), "PNG")
    yield "one column.webp", "good", encoded(Image.new("RGB", (1, 4000)), "WEBP")
    for mode in ("L", "LA", "RGBA", "1", "P", "PA", "CMYK", "YCbCr", "LAB"):
        kind = "TIFF" if mode in ("PA", "CMYK", "YCbCr", "LAB") else "PNG"
        made = palette.convert("PA") if mode == "PA" else rgb.convert(mode)
        if mode != "PA":  # which TIFF cannot keep
            yield f"mode {mode}.png", "good", encoded(made, kind)
    yield "cmyk.jpg", "good", encoded(rgb.convert("CMYK"), "JPEG")
    yield "palette, transparent.png", "good", encoded(palette, "PNG", transparency=3)
    yield "palette, see-through.png", "good", encoded(palette, "PNG", transparency=bytes(range(16)))
    yield "sixteen bits.png", "good", encoded(Image.fromarray(values.astype(np.uint16) * 257), "PNG")
    yield "sixteen bits, colour.png", "good", png(2, 2, zlib.compress(bytes(26)), depth=16, colour=2)
    yield "numbers.png", "good", encoded(Image.fromarray((values / 255).astype(np.float32)), "TIFF")
    yield "not a number.png", "bad", encoded(Image.fromarray(np.full((5, 5), np.nan, np.float32)), "TIFF")
    yield "infinite.png", "bad", encoded(Image.fromarray(np.full((5, 5), np.inf, np.float32)), "TIFF")
    for turn in range(0, 10):
        exif = Image.Exif()
        exif[0x0112] = turn
        yield f"turned {turn}.jpg", "good", encoded(rgb, "JPEG", exif=exif)


def impostors() -> Iterator[tuple[str, str, bytes]]:
    """What is called a picture and is none, or says that it is larger than any."""
    yield "empty.png", "bad", b""
    yield "text.png", "bad", b"Dear Sir or Madam,\n" * 99
    yield "page.jpg", "bad", b"<!doctype html><title>404</title>"
    yield "drawing.webp", "bad", b"<svg xmlns='http://www.w3.org/2000/svg' width='9' height='9'/>"
    yield "program.png", "bad", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n"
    yield "only a head.png", "bad", grey(9, 9)[:33]
    yield "only a mark.png", "bad", b"\x89PNG\r\n\x1a\n"
    yield "only a mark, jpg.jpg", "bad", b"\xff\xd8\xff"
    yield "nothing wide.png", "bad", grey(0, 9)
    yield "20,000 wide.png", "bad", png(20_000, 20_000, zlib.compress(bytes(99)))
    yield "2^31 wide.png", "bad", png(2**31 - 1, 2**31 - 1, zlib.compress(bytes(99)))
    yield "12,000 wide.png", "bad", grey(12_000, 12_000)
    yield "10,000 wide, of nothing.png", "bad", png(9_999, 8_900, zlib.compress(b""))
    jpeg = bytearray(encoded(Image.new("RGB", (8, 8)), "JPEG"))
    at = jpeg.index(b"\xff\xc0") + 5
    jpeg[at : at + 4] = struct.pack(">HH", 65_000, 65_000)
    yield "65,000 wide.jpg", "bad", bytes(jpeg)
    yield "gif, 60,000 wide.png", "bad", b"GIF89a" + struct.pack("<HH", 60_000, 60_000) + b"\x80\0\0" + bytes(6) + b";"
    yield "words that unpack.png", "either", grey(9, 9, chunk(b"iTXt", b"a\0\1\0\0\0" + zeros(2**28)))
    yield "more words.png", "either", grey(9, 9, chunk(b"zTXt", b"a\0\0" + zeros(2**28)))
    yield "many words.png", "either", grey(9, 9, *[chunk(b"zTXt", b"a\0\0" + zeros(2**20 - 9))] * 99)
    yield "profile that unpacks.png", "either", grey(9, 9, chunk(b"iCCP", b"a\0\0" + zeros(2**28)))
    yield "pixels that go on.png", "either", png(9, 9, zeros(2**28))
    wrong = grey(9, 9, chunk(b"eXIf", b"MM\0*\0\0\0\x08" + b"\xff" * 40))
    yield "wrong exif.png", "good", wrong
    yield "wrong exif, jpg.jpg", "good", encoded(Image.new("RGB", (9, 9)), "JPEG", exif=b"Exif\0\0" + b"\xff" * 40)
    info = PngImagePlugin.PngInfo()
    info.add_text("XML:com.adobe.xmp", "<x:xmpmeta xmlns:x='adobe:ns:meta/'><" * 99)
    yield "wrong xmp.png", "good", encoded(Image.new("RGB", (9, 9)), "PNG", pnginfo=info)


def names(rng: np.random.Generator) -> Iterator[tuple[bytes, str, bytes]]:
    """Good pictures and bad ones, by names that are hard to print."""
    odd = (
        b"with spaces ",
        b"with\nnew\nlines",
        b"with\ttabs\x1b[31m and colours",
        b"not \xff\xfe utf-8",
        "übergroß 図 🐈 \u202e desrever".encode(),
        b"$(touch executed); `touch executed` [red]",
        b"%s%n{0} \\ \" '",
        b"-o",
        b"a" * 240,
        b"predict.json",
        b"masks",
        b"..._",
    )
    for name in odd:
        hidden = name.startswith(b".")
        yield name + b".png", "passed over" if hidden else "good", encoded(Image.fromarray(noise(rng)), "PNG")
        yield name + b" bad.PNG", "passed over" if hidden else "bad", b"no picture"


def things() -> Iterator[Case]:
    """What is no file at all."""
    yield b"folder.png", "bad", lambda path: path.mkdir()
    yield b"pipe.png", "bad", os.mkfifo
    yield b"loop.png", "bad", lambda path: path.symlink_to(path.name)
    yield b"loop of two.jpg", "bad", lambda path: path.symlink_to("loop of three.jpg")
    yield b"loop of three.jpg", "bad", lambda path: path.symlink_to("loop of two.jpg")
    yield b"dangling.png", "bad", lambda path: path.symlink_to("nowhere.png")
    yield b"to a pipe.png", "bad", lambda path: path.symlink_to("pipe.png")
    yield b"to the dark.png", "bad", lambda path: path.symlink_to("/dev/zero")
    yield b"to a good one.png", "good", lambda path: path.symlink_to("good 0.png")
    yield b"nobody's.png", "forbidden", lambda path: (path.write_bytes(grey(9, 9)), path.chmod(0))
    yield b"notes.txt", "passed over", lambda path: path.write_text("no picture by its name either")
    yield b".hidden.png", "passed over", lambda path: path.write_text("no picture")


def write_hostile(folder: Path, count: int = 500, seed: int = 0, root: bool | None = None) -> dict[bytes, str]:
    """Writes so many of them, at least one of each; by name, what should become of it.

    What nobody may read, `root` reads all the same."""
    rng, expected = np.random.default_rng(seed), {}
    root = os.geteuid() == 0 if root is None else root
    folder.mkdir(parents=True)

    def add(name: bytes, fate: str, make: Callable[[Path], object]) -> None:
        make(folder / os.fsdecode(name))
        expected[name] = {"forbidden": "good" if root else "bad"}.get(fate, fate)

    def content(data: bytes) -> Callable[[Path], object]:
        return lambda path: path.write_bytes(data)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow's, of what is written here
        for i in range(10):
            add(f"good {i}.png".encode(), "good", content(encoded(Image.fromarray(noise(rng)), "PNG")))
        for name, fate, data in [*modes(rng), *impostors()]:
            add(name.encode(), fate, content(data))
        for odd, fate, data in names(rng):
            add(odd, fate, content(data))
        for case in things():
            add(*case)
        wholes = whole_files(rng)
        for name, data in wholes.items():
            add(f"whole {name}".encode(), "good", content(data))
    i = 0
    while len(expected) < count:
        stem, ending = list(wholes)[i % len(wholes)].split(".")
        data = wholes[f"{stem}.{ending}"]
        if i % 3 < 2:  # cut anywhere, each kind at depths spread evenly
            left = int(len(data) * ((i // len(wholes) * 0.618) % 1))
            add(f"cut {stem} {i} after {left}.{ending}".encode(), "either", content(data[:left]))
        else:
            spoilt = bytearray(data)
            for at in rng.integers(0, len(data), 1 + i % 4):
                spoilt[at] ^= 1 << rng.integers(8)
            add(f"spoilt {stem} {i}.{ending}".encode(), "either", content(bytes(spoilt)))
        i += 1
    return expected


# ------------------------------------------------------------------------------------------------- what became of them


class Shown(NamedTuple):
    """What a command has said, its exit status (None if it did not end), and the most memory it had, in bytes."""

    said: str
    status: int | None
    peak: int


def predicted(images: Path, out: Path, seconds: float = 600, **options: object) -> Shown:
    """cutslots predict, in a process of its own, on a terminal that knows no bytes that are not text."""
    command = [sys.executable, "-m", "cutslots", "predict", "tiny", str(images), "-o", str(out), "--device", "cpu"]
    environment = os.environ | {"PYTHONIOENCODING": "utf-8:strict", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment, **options)
        timer = threading.Timer(seconds, process.kill)
        timer.start()
        _, status, used = os.wait4(process.pid, 0)
        timer.cancel()
        process.returncode = os.waitstatus_to_exitcode(status)  # for Popen, which did not wait
        log.seek(0)
        said = log.read().decode()
    ended = None if process.returncode == -signal.SIGKILL else process.returncode
    return Shown(said, ended, 1024 * used.ru_maxrss)


def judged(expected: dict[bytes, str], folder: Path, out: Path, shown: Shown) -> dict[bytes, list[str]]:
    """For each picture what is wrong with what became of it, and under b"" with the command as a whole."""
    record = {}
    if (out / "masks.json").is_file():
        record = {each["file_name"]: each for each in json.loads((out / "masks.json").read_text())["images"]}
    lines = shown.said.splitlines()
    wrong = {name: _judged(name, fate, folder, out, lines, record) for name, fate in expected.items()}
    refused = sum(line.startswith((f"cutslots: {folder}", f"cutslots: there is no {folder}")) for line in lines)
    asked = sum(fate != "passed over" for fate in expected.values())
    whole = [] if shown.status == 1 else [f"exit status {shown.status}"]
    whole += [] if "Traceback" not in shown.said else ["a traceback"]
    for line in (f"wrote {len(record)} of {asked} pictures", f"{refused} of {asked} pictures could not be read"):
        whole += [] if any(line in each for each in lines) else [f"it does not say: {line}"]
    whole += [f"{each.name} is left" for each in out.rglob("*.part")]
    return wrong | {b"": whole}


def _judged(name: bytes, fate: str, folder: Path, out: Path, lines: list[str], record: dict) -> list[str]:
    path = folder / os.fsdecode(name)
    printed = "".join(c if c.isprintable() else repr(c)[1:-1] for c in str(path))
    sentences = sum(line.startswith(f"cutslots: {printed} cannot be read as a picture: ") for line in lines)
    sentences += f"cutslots: there is no {printed}" in lines
    made, done = out / path.stem.replace(".", "_"), path.name in record
    wrong = []
    if (int(done), sentences) not in {"good": {(1, 0)}, "bad": {(0, 1)}, "passed over": {(0, 0)}}.get(
        fate, {(1, 0), (0, 1)}
    ):
        wrong.append(f"it is {fate}: written {done}, {sentences} sentences")
    if done != made.is_dir():
        wrong.append(f"in masks.json {done}, a folder {made.is_dir()}")
    if done:
        size = (record[path.name]["width"], record[path.name]["height"])
        files = sorted(made.iterdir())
        masks = [file for file in files if file.name.startswith("slot_")]
        if len(files) != 3 + len(masks) or not masks:
            wrong.append(f"its folder holds {[file.name for file in files]}")
        for file in files:
            with warnings.catch_warnings(action="ignore"), Image.open(file) as picture:
                picture.load()
                wrong += [] if picture.size == size else [f"{file.name} has another size"]
    return [f"{printed}: {each}" for each in wrong]
