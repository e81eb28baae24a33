"""Videos, frame by frame: files (through PyAV, the `video` extra), GIFs and other moving pictures, folders of frames.

Neither reading nor writing an MP4 holds more than a few frames. A GIF is put together in memory, so it may not be long.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from cutslots.data.folder import check_picture, list_images, read_image
from cutslots.disk import naming, write_atomically

RATE = 12.0  # frames a second, where a source does not say
MOVING_PICTURES = (".gif", ".webp", ".apng", ".png")
LONGEST_GIF = 500  # frames


class Video(NamedTuple):
    frames: Iterator[Image.Image]
    rate: float  # frames a second
    length: int | None  # in frames, where that is known


def open_video(path: Path) -> Video:
    """The frames of a video, all of one size, as RGB; whatever is wrong with it is said in a sentence that names it."""
    if path.is_dir():
        files = list_images(path)
        if not files:
            raise ValueError(f"video: {path} holds no pictures; expected frames NAME.png, in the order of names")
        return Video(_same_size((read_image(file) for file in files), path), RATE, len(files))
    if not path.is_file():
        raise ValueError(f"video: there is no {path}; expected a video, a GIF or a folder of frames")
    if path.stat().st_size == 0:
        raise ValueError(f"video: {path} is empty")
    if path.suffix.lower() in MOVING_PICTURES:
        return _open_pictures(path)
    return _open_file(path)


def _open_pictures(path: Path) -> Video:
    try:
        with Image.open(path) as picture:
            check_picture(picture)
            picture.load()  # some kinds tell the duration of a frame only then
            count, duration = getattr(picture, "n_frames", 1), picture.info.get("duration", 0)
    except Exception as error:  # Pillow's readers raise whatever they meet
        raise ValueError(f"video: {path} cannot be read: {error}") from None

    def frames() -> Iterator[Image.Image]:
        with Image.open(path) as picture:
            for number in range(count):
                try:
                    picture.seek(number)
                    frame = picture.convert("RGB")
                except Exception as error:
                    raise ValueError(f"video: {path} cannot be read at frame {number}: {error}") from None
                yield frame

    return Video(_same_size(frames(), path), 1000 / duration if duration else RATE, count)


def _open_file(path: Path) -> Video:
    if _is_text(path):
        raise ValueError(f"video: {path} is text, not a film; expected a video, a GIF or a folder of frames")
    av = _pyav(f"reading {path.name}")
    try:
        container = av.open(str(path))
        stream = container.streams.video[0]
    except (av.error.FFmpegError, IndexError, ValueError) as error:
        raise ValueError(f"video: {path} cannot be read as a video: {_reason(error)}") from None

    def frames() -> Iterator[Image.Image]:
        number = 0
        with container:
            try:
                for frame in container.decode(stream):
                    yield frame.to_image()
                    number += 1
            except av.error.FFmpegError as error:
                raise ValueError(f"video: {path} cannot be read at frame {number}: {_reason(error)}") from None

    return Video(_same_size(frames(), path), float(stream.average_rate or RATE), stream.frames or None)


def _is_text(path: Path) -> bool:
    """Whether the first bytes are: FFmpeg would show some texts as films, and without it nobody else says so."""
    with path.open("rb") as file:
        head = file.read(1024)
    control = set(range(32)) - set(b"\b\t\n\f\r\x1b")
    return not control.intersection(head) and not head.startswith(b"YUV4MPEG2")


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or "it has no pictures"


def _same_size(frames: Iterable[Image.Image], path: Path) -> Iterator[Image.Image]:
    size = None
    for number, frame in enumerate(frames):
        size = size or frame.size
        if frame.size != size:
            seen, wanted = ("x".join(map(str, s)) for s in (frame.size, size))
            raise ValueError(f"video: frame {number} of {path} is {seen}, the first {wanted}; expected one size")
        yield frame
    if size is None:
        raise ValueError(f"video: {path} holds no frames")


def has_pyav() -> bool:
    try:
        import av  # noqa: F401
    except ImportError:
        return False
    return True


def _pyav(what: str) -> Any:
    try:
        import av
    except ImportError:
        raise ValueError(
            f"{what} needs PyAV: pip install 'cutslots[video]'; GIFs and folders of frames need nothing"
        ) from None
    return av


class Movie:
    """Writes frames (H, W, 3) uint8 to an MP4 or a GIF, which has its name once it is whole."""

    def __init__(self, path: Path, rate: float) -> None:
        self.path, self.rate, self.part = path, rate, path.with_name(path.name + ".part")
        self.pictures: list[Image.Image] = []
        self.container: Any = None
        if path.suffix == ".mp4":
            self.av = _pyav("writing an MP4")

    def __enter__(self) -> Movie:
        return self

    def add(self, frame: np.ndarray) -> None:
        if self.path.suffix == ".gif":
            if len(self.pictures) == LONGEST_GIF:
                raise ValueError(f"{self.path} would have over {LONGEST_GIF} frames; write an MP4 (--overlay mp4)")
            self.pictures.append(Image.fromarray(frame))
            return
        frame = frame[: max(frame.shape[0] // 2 * 2, 2), : max(frame.shape[1] // 2 * 2, 2)]  # H.264 wants even sides
        if self.container is None:
            with naming(self.path):
                self.container = self.av.open(str(self.part), "w", format="mp4")
            self.stream = self.container.add_stream("libx264", rate=Fraction(self.rate).limit_denominator(1000))
            self.stream.width, self.stream.height = frame.shape[1], frame.shape[0]
            self.stream.pix_fmt, self.stream.options = "yuv420p", {"crf": "18"}
        picture = self.av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24")
        self._encode(picture)

    def _encode(self, picture: Any) -> None:
        with naming(self.path):
            for packet in self.stream.encode(picture):
                self.container.mux(packet)

    def __exit__(self, kind: Any, *_: object) -> None:
        if self.container is not None:
            try:
                with naming(self.path):
                    if kind is None:
                        self._encode(None)
                    self.container.close()
                    if kind is None:
                        os.replace(self.part, self.path)
            finally:
                self.part.unlink(missing_ok=True)
        elif self.pictures and kind is None:
            data = io.BytesIO()
            first, *rest = self.pictures
            first.save(data, "GIF", save_all=True, append_images=rest, duration=round(1000 / self.rate), loop=0)
            write_atomically(self.path, data.getvalue())
