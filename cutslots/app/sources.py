"""Images to work on: a built-in scene, an uploaded image, or the first frames of an uploaded video."""

from __future__ import annotations

import contextlib
import itertools
import os
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image

from cutslots.data.folder import EXTENSIONS, read_image
from cutslots.inference.video import has_pyav, open_video
from cutslots.scenes import Scenes

FAMILIES = ("plain", "textured", "ood", "camo")

SCENE_SIZE = 192  # pixels; a scene is rendered at the largest multiple of the model's size up to this

MAX_IMAGE_SIZE = 768  # pixels of the longer side; larger images are downscaled, and the page says so

MAX_FRAME_SIZE = 320  # the same for the frames of a video

MAX_FRAMES = 16  # of a video

VIDEO_SUFFIXES = (".mp4", ".mov", ".webm", ".mkv", ".avi") if has_pyav() else ()

UPLOAD_SUFFIXES = (*EXTENSIONS, ".gif", *VIDEO_SUFFIXES)


class Source(NamedTuple):
    """An image (one frame), or the first frames of a video."""

    name: str
    frames: list[Image.Image]  # RGB, all of one size
    note: str = ""  # shown to the visitor


def generate_scene(family: str, seed: int, objects: int, image_size: tuple[int, int]) -> Source:
    """Render a square scene at a multiple of the shorter side of the model's `image_size` (H, W)."""
    if family not in FAMILIES:
        raise ValueError(f"family is {family!r}; expected one of {', '.join(FAMILIES)}")
    side = min(image_size)
    size = side * max(1, SCENE_SIZE // side)
    image = Scenes(family, "test", size, seed, count=1, num_objects=(objects, objects))[0].image
    return Source(f"{family}_{seed}_{objects}", [Image.fromarray(image.permute(1, 2, 0).numpy().copy())])


def open_upload(file: Any) -> Source:
    """Open the uploaded file that Gradio describes by `file`, and remove it from disk: the frames are in memory.

    Raises ValueError for files outside of Gradio's folder of uploads."""
    path, folder = Path(file["path"]), os.environ.get("GRADIO_TEMP_DIR")
    if not folder or Path(folder).resolve() not in path.resolve().parents or not path.is_file():
        raise ValueError(f"the server does not store {path.name}; upload it again")
    try:
        return open_source(path)
    finally:
        with contextlib.suppress(OSError):  # another visitor uploaded the same file, or the folder holds more
            path.unlink()
            path.parent.rmdir()


def open_source(path: Path) -> Source:
    """Open an uploaded image, or the first `MAX_FRAMES` frames of a video.

    Raises ValueError with the file's name, but not its folder, if the file cannot be read."""
    suffix = path.suffix.lower()
    if suffix not in UPLOAD_SUFFIXES:
        raise ValueError(f"{path.name} cannot be opened; expected a file that ends with {', '.join(UPLOAD_SUFFIXES)}")
    try:
        with warnings.catch_warnings(action="ignore"):  # Pillow warns of files that it reads nevertheless
            is_video = suffix in VIDEO_SUFFIXES or _is_animated(path)
            frames = itertools.islice(open_video(path).frames, MAX_FRAMES) if is_video else [read_image(path)]
            small, note = _downscale(frames, MAX_FRAME_SIZE if is_video else MAX_IMAGE_SIZE)
    except ValueError as error:
        raise ValueError(str(error).replace(str(path), path.name)) from None
    return Source(path.stem.replace(".", "_")[:40], small, note)


def _downscale(frames: Iterable[Image.Image], max_size: int) -> tuple[list[Image.Image], str]:
    """Shrink frames whose longer side exceeds `max_size`. Also returns a sentence that says so, or ""."""
    small = []
    for frame in frames:
        before = frame.size
        frame.thumbnail((max_size, max_size), Image.Resampling.LANCZOS)
        small.append(frame)
    sizes = "{}x{} to {}x{}".format(*before, *frame.size)
    note = f"Downscaled from {sizes}; the commands predict and track keep the full size."
    return small, note if before != frame.size else ""


def _is_animated(path: Path) -> bool:
    with contextlib.suppress(Exception), Image.open(path, formats=("PNG", "GIF", "WEBP")) as image:
        return getattr(image, "n_frames", 1) > 1
    return False  # read_image reports what is wrong with the file
