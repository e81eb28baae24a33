"""Scenes as files, for people and for other programs.

    images/000000.png       masks/000000.png (palette; the value is the object, 0 the ground)
    scenes.jsonl            a line of ground truth for each scene
    contact_sheet.png       the first scenes, each above its mask
    generate.json           what was asked for, which is how an interrupted run knows what to go on with

Moving scenes have a folder of frames in place of each file, and previews/000000.gif.
"""

from __future__ import annotations

import colorsys
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from cutslots.disk import append_line, claimed, progress, write_atomically
from cutslots.scenes.dataset import Scenes
from cutslots.scenes.draw import FAMILIES
from cutslots.scenes.physics import FRAMES_A_SECOND

SHEET = 16  # scenes on a contact sheet

# 0 is black, the ground. The twelve after it were searched for eyes of all kinds, colour-blind ones too, and for grey
# print: CIEDE2000 is at least 20 between the first nine and 15 between all. What comes after them changes in hue and
# in lightness, but repeats itself to some eyes.
PALETTE = np.array(
    [(0, 0, 0), (137, 49, 241), (148, 248, 254), (207, 203, 0), (33, 156, 127), (103, 52, 3), (139, 121, 0)]
    + [(0, 0, 145), (165, 155, 255), (90, 87, 124), (238, 159, 185), (41, 86, 71), (207, 223, 167)]
    + [
        tuple(round(255 * c) for c in colorsys.hls_to_rgb(i * 0.3819660113 % 1, (0.62, 0.42, 0.78)[i % 3], 0.7))
        for i in range(12, 255)
    ],
    dtype=np.uint8,
)


def generate(scenes: Scenes, out: Path, overwrite: bool = False, quiet: bool = False) -> None:
    """Writes all scenes below `out`; goes on with what an interrupted run of the same request has left."""
    request = scenes.request()
    stamped = claimed(out, "generate.json", request, overwrite, last="contact_sheet.png", empty=True)
    with stamped, progress(quiet) as bar:
        for name in ("images", "masks"):
            (out / name).mkdir(exist_ok=True)
        lines = _finished(out, request)
        task = bar.add_task(f"{scenes.family} {scenes.split}", total=len(scenes), completed=lines)
        step = max(1, 16 // scenes.frames)
        for i in range(lines, len(scenes), step):
            chosen = np.arange(i, min(i + step, len(scenes)))
            sample, facts = scenes.describe(chosen)
            for index, image, mask, fact in zip(chosen, sample.image.numpy(), sample.mask.numpy(), facts, strict=True):
                _write_scene(out, f"{index:06d}", image, mask)
                # The line comes after its files: a scene that has one is whole.
                append_line(out / "scenes.jsonl", json.dumps(fact).encode())
                bar.advance(task)
        write_atomically(out / "contact_sheet.png", png(contact_sheet(scenes)))


def _finished(out: Path, request: dict[str, Any]) -> int:
    """How many scenes, from the first on, have a whole line and their files; what comes after is written again."""
    truth = out / "scenes.jsonl"
    lines = truth.read_bytes().splitlines(keepends=True) if truth.exists() else []
    ending = ".png" if FAMILIES[request["family"]].frames == 1 else ""
    good = 0
    while good < min(len(lines), request["count"]) and lines[good].endswith(b"\n"):
        if not all((out / kind / f"{good:06d}{ending}").exists() for kind in ("images", "masks")):
            break
        good += 1
    if good < len(lines):
        write_atomically(truth, b"".join(lines[:good]))
    return good


def _write_scene(out: Path, name: str, image: np.ndarray, mask: np.ndarray) -> None:
    if image.ndim == 3:
        write_atomically(out / "images" / f"{name}.png", png(_picture(image)))
        write_atomically(out / "masks" / f"{name}.png", png(palette_image(mask)))
        return
    frames = [_picture(frame) for frame in image]
    for kind, pictures in (("images", frames), ("masks", [palette_image(frame) for frame in mask])):
        (out / kind / name).mkdir(exist_ok=True)
        for f, picture in enumerate(pictures):
            write_atomically(out / kind / name / f"{f:02d}.png", png(picture))
    (out / "previews").mkdir(exist_ok=True)
    film = io.BytesIO()
    frames[0].save(film, "GIF", save_all=True, append_images=frames[1:], duration=1000 // FRAMES_A_SECOND, loop=0)
    write_atomically(out / "previews" / f"{name}.gif", film.getvalue())


def _picture(image: np.ndarray) -> Image.Image:
    return Image.fromarray(np.ascontiguousarray(image.transpose(1, 2, 0)))


def palette_image(mask: np.ndarray) -> Image.Image:
    """A mask (H, W) as an indexed picture, the value of a pixel being its object."""
    picture = Image.fromarray(mask).convert("P")
    picture.putpalette(PALETTE.tobytes())
    return picture


def png(picture: Image.Image | np.ndarray) -> bytes:
    data = io.BytesIO()
    (picture if isinstance(picture, Image.Image) else Image.fromarray(picture)).save(data, "PNG")
    return data.getvalue()


def contact_sheet(scenes: Any, columns: int = 8) -> Image.Image:
    """The first scenes, or frames of the first moving ones, each above its mask. Any dataset will do."""
    frames, gap = getattr(scenes, "frames", 1), 2
    count = min(len(scenes), SHEET if frames == 1 else SHEET // columns)
    sample = scenes.render(np.arange(count))
    images, masks = sample.image.numpy(), sample.mask.numpy()
    size = images.shape[-1]
    if count == 0:
        return Image.new("RGB", (size, size), "white")
    if frames > 1:
        shown = np.linspace(0, frames - 1, columns).astype(int)
        images, masks = images[:, shown].reshape(-1, 3, size, size), masks[:, shown].reshape(-1, size, size)
    columns = min(columns, len(images))
    rows = -(-len(images) // columns)
    sheet = np.full((rows * 2 * (size + gap) - gap, columns * (size + gap) - gap, 3), 255, dtype=np.uint8)
    for i, (image, mask) in enumerate(zip(images, masks, strict=True)):
        y, x = (i // columns) * 2 * (size + gap), (i % columns) * (size + gap)
        sheet[y : y + size, x : x + size] = image.transpose(1, 2, 0)
        sheet[y + size + gap : y + 2 * size + gap, x : x + size] = PALETTE[mask]
    return Image.fromarray(sheet)
