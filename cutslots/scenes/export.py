"""Scenes as files, for people and for other software.

    images/000000.png       masks/000000.png (palette PNG: the value is the object, 0 the background)
    scenes.jsonl            the ground truth, a line for each scene
    request.json            what was asked for
    contact_sheet.png       the first scenes, each above its mask; written last

Moving scenes have a folder of frames in place of each file, and previews/000000.gif.
"""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
from PIL import Image

from cutslots.files import Layout, append_line, output_folder, progress, write_atomically
from cutslots.scenes.dataset import Scenes
from cutslots.scenes.physics import FRAMES_PER_SECOND
from cutslots.viz.contact_sheet import contact_sheet
from cutslots.viz.images import encode_png, palette_image

OWNED = ("images", "masks", "previews", "scenes.jsonl", "contact_sheet.png")
LAYOUT = Layout("set of scenes", OWNED, marker="contact_sheet.png")


def generate(scenes: Scenes, out: Path, overwrite: bool = False, quiet: bool = False) -> None:
    """Write all scenes below `out`, or resume an interrupted run of the same request."""
    request = {"command": "generate", **scenes.request()}
    with output_folder(out, LAYOUT, request, overwrite), progress(quiet) as bar:
        for name in ("images", "masks"):
            (out / name).mkdir(exist_ok=True)
        start = _count_complete(out, scenes)
        task = bar.add_task(f"{scenes.family} {scenes.split}", total=len(scenes), completed=start)
        step = max(1, 16 // scenes.frames)
        for i in range(start, len(scenes), step):
            indices = np.arange(i, min(i + step, len(scenes)))
            sample, truth = scenes.describe(indices)
            for row, index in enumerate(indices):
                _write_scene(out, f"{index:06d}", sample.image[row].numpy(), sample.mask[row].numpy())
                # The line comes after its files: a scene that has a line is complete.
                append_line(out / "scenes.jsonl", json.dumps(truth[row]).encode())
                bar.advance(task)
        write_atomically(out / "contact_sheet.png", encode_png(contact_sheet(scenes)))


def _count_complete(out: Path, scenes: Scenes) -> int:
    """Return how many scenes, from the first on, have a complete line and their files; drop the lines after them."""
    truth = out / "scenes.jsonl"
    lines = truth.read_bytes().splitlines(keepends=True) if truth.exists() else []
    suffix = ".png" if scenes.frames == 1 else ""
    count = 0
    while count < min(len(lines), len(scenes)) and lines[count].endswith(b"\n"):
        if not all((out / kind / f"{count:06d}{suffix}").exists() for kind in ("images", "masks")):
            break
        count += 1
    if count < len(lines):
        write_atomically(truth, b"".join(lines[:count]))
    return count


def _write_scene(out: Path, name: str, image: np.ndarray, mask: np.ndarray) -> None:
    if image.ndim == 3:
        write_atomically(out / "images" / f"{name}.png", encode_png(_to_image(image)))
        write_atomically(out / "masks" / f"{name}.png", encode_png(palette_image(mask)))
        return
    frames = [_to_image(frame) for frame in image]
    for kind, images in (("images", frames), ("masks", [palette_image(frame) for frame in mask])):
        (out / kind / name).mkdir(exist_ok=True)
        for t, each in enumerate(images):
            write_atomically(out / kind / name / f"{t:02d}.png", encode_png(each))
    (out / "previews").mkdir(exist_ok=True)
    preview = io.BytesIO()
    frames[0].save(preview, "GIF", save_all=True, append_images=frames[1:], duration=1000 // FRAMES_PER_SECOND, loop=0)
    write_atomically(out / "previews" / f"{name}.gif", preview.getvalue())


def _to_image(pixels: np.ndarray) -> Image.Image:
    return Image.fromarray(np.ascontiguousarray(pixels.transpose(1, 2, 0)))
