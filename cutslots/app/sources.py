"""Images to work on: a built-in scene, an uploaded image, or the first frames of an uploaded video."""

from __future__ import annotations

import contextlib
import itertools
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image

from cutslots.data.folder import EXTENSIONS, read_image
from cutslots.inference.video import has_pyav, open_video
from cutslots.scenes import Scenes

FAMILIES = ("plain", "textured", "ood", "camo")

SCENE_SIZE = 192  # pixels; a scene is rendered at the largest multiple of the model's size up to this

MAX_IMAGE_SIZE = 768  # pixels of the longer side; larger images are downscaled, and the page says so

MAX_PHOTOGRAPH = 12_500_000  # pixels of an image to segment; the same

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


def open_upload(file: Any, open_path: Callable[[Path], Source]) -> Source:
    """Open the uploaded file that Gradio describes by `file`, and remove it from disk: the frames are in memory.

    `open_path` is `open_source` or `open_photograph`. Raises ValueError for files outside of Gradio's folder of
    uploads."""
    path, folder = Path(file["path"]), os.environ.get("GRADIO_TEMP_DIR")
    if not folder or Path(folder).resolve() not in path.resolve().parents or not path.is_file():
        raise ValueError(f"the server does not store {path.name}; upload it again")
    try:
        return open_path(path)
    finally:
        with contextlib.suppress(OSError):  # another visitor uploaded the same file, or the folder holds more
            path.unlink()
            path.parent.rmdir()


def open_source(path: Path) -> Source:
    """Open an uploaded image, or the first `MAX_FRAMES` frames of a video.

    Raises ValueError with the file's name, but not its folder, if the file cannot be read."""
    with _reading(path) as is_video:
        frames = itertools.islice(open_video(path).frames, MAX_FRAMES) if is_video else [read_image(path)]
        small, sizes = _downscale(frames, MAX_FRAME_SIZE if is_video else MAX_IMAGE_SIZE)
    note = f"Downscaled from {sizes}; the commands predict and track keep the full size." if sizes else ""
    return Source(_name(path), small, note)


def open_photograph(path: Path) -> Source:
    """Open an uploaded image, or the first frame of a video, with about `MAX_PHOTOGRAPH` pixels at most.

    Raises ValueError as `open_source` does."""
    with _reading(path) as is_video:
        image = next(iter(open_video(path).frames)) if is_video else read_image(path)
    scale = (MAX_PHOTOGRAPH / (image.width * image.height)) ** 0.5
    small, sizes = _downscale([image], int(max(image.size) * min(scale, 1)))
    note = f"Downscaled from {sizes}; the command segment keeps the full size." if sizes else ""
    return Source(_name(path), small, note)


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[bool]:
    """Check the suffix of a file; errors name the file without its folder. Yields whether the file is a video."""
    suffix = path.suffix.lower()
    if suffix not in UPLOAD_SUFFIXES:
        raise ValueError(f"{path.name} cannot be opened; expected a file that ends with {', '.join(UPLOAD_SUFFIXES)}")
    try:
        with warnings.catch_warnings(action="ignore"):  # Pillow warns of files that it reads nevertheless
            yield suffix in VIDEO_SUFFIXES or _is_animated(path)
    except ValueError as error:
        raise ValueError(str(error).replace(str(path), path.name)) from None


def _name(path: Path) -> str:
    return path.stem.replace(".", "_")[:40]


def _downscale(frames: Iterable[Image.Image], max_size: int) -> tuple[list[Image.Image], str]:
    """Shrink frames whose longer side exceeds `max_size`. Also returns both sizes, or "" if nothing was shrunk."""
    small = []
    for frame in frames:
        before = frame.size
        frame.thumbnail((max_size, max_size), Image.Resampling.LANCZOS)
        small.append(frame)
    return small, "{}x{} to {}x{}".format(*before, *frame.size) if before != frame.size else ""


def _is_animated(path: Path) -> bool:
    with contextlib.suppress(Exception), Image.open(path, formats=("PNG", "GIF", "WEBP")) as image:
        return getattr(image, "n_frames", 1) > 1
    return False  # read_image reports what is wrong with the file
