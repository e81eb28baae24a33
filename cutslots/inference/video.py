"""Videos, frame by frame: files (with PyAV, the `video` extra), GIFs and other animated images, folders of frames.

Reading and writing an MP4 keeps a few frames in memory. A GIF is assembled in memory, so its length is limited.
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

from cutslots.data.images import check_image, list_images, read_image
from cutslots.files import errors_name_path, write_atomically

DEFAULT_FPS = 12.0  # of a source that does not say

ANIMATED_IMAGES = (".gif", ".webp", ".apng", ".png")

# FFmpeg reads more. Some of its formats open further files or hosts: concat, hls, dash, image2, sdp, vobsub, ...
CONTAINERS = (
    "asf,av1,avi,dv,flv,h264,hevc,ivf,m4v,matroska,mjpeg,mov,mpeg,mpegts,mpegvideo,mxf,nut,ogg,webm,yuv4mpegpipe"
)
CONTAINER_OPTIONS = {"format_whitelist": CONTAINERS, "protocol_whitelist": "file"}

# Display matrices (a, b, c, d): pixel (x, y) is shown at (a x + c y, b x + d y). Pillow rotates counterclockwise.
TRANSPOSES = {
    (-1, 0, 0, -1): Image.Transpose.ROTATE_180,
    (0, -1, 1, 0): Image.Transpose.ROTATE_90,
    (0, 1, -1, 0): Image.Transpose.ROTATE_270,
    (-1, 0, 0, 1): Image.Transpose.FLIP_LEFT_RIGHT,
    (1, 0, 0, -1): Image.Transpose.FLIP_TOP_BOTTOM,
    (0, 1, 1, 0): Image.Transpose.TRANSPOSE,
    (0, -1, -1, 0): Image.Transpose.TRANSVERSE,
}
RIGHT_ANGLES = (
    (1, 0, 0, 1),
    (0, -1, 1, 0),
    (-1, 0, 0, -1),
    (0, 1, -1, 0),
)  # counterclockwise by 0, 90, 180, 270 degrees

MAX_GIF_FRAMES = 500


class Video(NamedTuple):
    """RGB frames of one size, frames per second, and the number of frames if it is known."""

    frames: Iterator[Image.Image]
    fps: float
    length: int | None


def open_video(path: Path) -> Video:
    """Open a video. Raises ValueError, here or while frames are read, with a sentence that names the file."""
    if path.is_dir():
        files = list_images(path)
        if not files:
            raise ValueError(f"video: {path} holds no images; expected frames NAME.png, in the order of their names")
        return Video(_same_size((read_image(file) for file in files), path), DEFAULT_FPS, len(files))
    if not path.is_file():
        raise ValueError(f"video: there is no {path}; expected a video, a GIF or a folder of frames")
    if path.stat().st_size == 0:
        raise ValueError(f"video: {path} is empty")
    if path.suffix.lower() in ANIMATED_IMAGES:
        return _open_animated_image(path)
    return _open_file(path)


def _open_animated_image(path: Path) -> Video:
    try:
        with Image.open(path) as image:
            check_image(image)
            image.load()  # some formats know the duration of a frame only then
            count, duration = getattr(image, "n_frames", 1), image.info.get("duration", 0)
    except Exception as error:  # Pillow's readers raise exceptions of any type
        raise ValueError(f"video: {path} cannot be read: {error}") from None

    def frames() -> Iterator[Image.Image]:
        with Image.open(path) as image:
            for number in range(count):
                try:
                    image.seek(number)
                    frame = image.convert("RGB")
                except Exception as error:
                    raise ValueError(f"video: {path} cannot be read at frame {number}: {error}") from None
                yield frame

    return Video(_same_size(frames(), path), 1000 / duration if duration else DEFAULT_FPS, count)


def _open_file(path: Path) -> Video:
    if _is_text(path):
        raise ValueError(f"video: {path} is text, not a video; expected a video, a GIF or a folder of frames")
    av = _pyav(f"reading {path.name}")
    try:
        container = av.open(f"file:{path}", options=CONTAINER_OPTIONS)
        stream = container.streams.video[0]
    except av.error.ArgumentError:  # FFmpeg's answer to a format that is not allowed, and to some damaged headers
        raise ValueError(
            f"video: {path} is damaged or in a format that is not accepted; expected MP4, MOV, WebM, Matroska, AVI, ..."
        ) from None
    except (av.error.FFmpegError, IndexError, ValueError) as error:
        raise ValueError(f"video: {path} cannot be read as a video: {_reason(error)}") from None

    def frames() -> Iterator[Image.Image]:
        number = 0
        with container:
            try:
                for frame in container.decode(stream):
                    yield _upright(frame)
                    number += 1
            except (av.error.FFmpegError, ValueError) as error:
                raise ValueError(f"video: {path} cannot be read at frame {number}: {_reason(error)}") from None

    return Video(_same_size(frames(), path), float(stream.average_rate or DEFAULT_FPS), stream.frames or None)


def _upright(frame: Any) -> Image.Image:
    """Return a decoded frame as a player shows it: rotated and flipped by the display matrix of its header."""
    matrix = _display_matrix(frame)
    if matrix == (1, 0, 0, 1):
        return frame.to_image()
    if matrix not in TRANSPOSES:
        raise ValueError("its header rotates it by an angle that is no multiple of 90 degrees")
    return frame.to_image().transpose(TRANSPOSES[matrix])


def _display_matrix(frame: Any) -> tuple[int, ...]:
    """Return (a, b, c, d) of the display matrix without its scale; those of the identity if there is none."""
    try:
        data = frame.side_data.get("DISPLAYMATRIX")
    except ValueError:  # PyAV knows not all types of side data; then flips are not known either
        return RIGHT_ANGLES[round(frame.rotation / 90) % 4]
    matrix = np.frombuffer(data, dtype=np.int32)[[0, 1, 3, 4]] if data else np.zeros(4)
    scale = np.abs(matrix).max()
    return tuple((matrix / scale).round().astype(int).tolist()) if scale else (1, 0, 0, 1)


def _is_text(path: Path) -> bool:
    """Return whether the first bytes are text, which FFmpeg would decode as a video."""
    with path.open("rb") as file:
        head = file.read(1024)
    control = set(range(32)) - set(b"\b\t\n\f\r\x1b")
    return not control.intersection(head) and not head.startswith(b"YUV4MPEG2")


def _reason(error: Exception) -> str:
    if isinstance(error, IndexError):
        return "it has no video stream"
    return getattr(error, "strerror", None) or str(error)


def _same_size(frames: Iterable[Image.Image], path: Path) -> Iterator[Image.Image]:
    """Yield the frames; raise ValueError at the first of another size, or if there are none."""
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
    """Return whether PyAV is installed."""
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


class VideoWriter:
    """Write frames to an MP4 or a GIF, as a context manager. The file gets its name when it is complete."""

    def __init__(self, path: Path, fps: float) -> None:
        self.path, self.fps, self.part = path, fps, path.with_name(path.name + ".part")
        self.images: list[Image.Image] = []
        self.container: Any = None
        if path.suffix == ".mp4":
            self.av = _pyav("writing an MP4")

    def __enter__(self) -> VideoWriter:
        return self

    def add(self, frame: np.ndarray) -> None:
        """Add a frame (height, width, 3) uint8.

        H.264 needs even sizes. An MP4 loses the last row or column of an odd size; a single one is repeated."""
        if self.path.suffix == ".gif":
            if len(self.images) == MAX_GIF_FRAMES:
                raise ValueError(f"{self.path} would have over {MAX_GIF_FRAMES} frames; write an MP4 (--overlay mp4)")
            self.images.append(Image.fromarray(frame))
            return
        frame = np.pad(frame, [(0, int(side == 1)) for side in frame.shape], mode="edge")
        frame = frame[: frame.shape[0] // 2 * 2, : frame.shape[1] // 2 * 2]
        if self.container is None:
            with errors_name_path(self.path):
                self.container = self.av.open(str(self.part), "w", format="mp4")
            self.stream = self.container.add_stream("libx264", rate=Fraction(self.fps).limit_denominator(1000))
            self.stream.width, self.stream.height = frame.shape[1], frame.shape[0]
            self.stream.pix_fmt, self.stream.options = "yuv420p", {"crf": "18"}
        self._encode(self.av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24"))

    def _encode(self, frame: Any) -> None:
        try:
            with errors_name_path(self.path):
                for packet in self.stream.encode(frame):
                    self.container.mux(packet)
        except self.av.error.ExternalError:  # of libx264, which says no more
            size = f"{self.stream.width}x{self.stream.height}"
            raise ValueError(f"{self.path} cannot hold frames of {size} (H.264); pass --overlay gif or none") from None

    def __exit__(self, kind: Any, *_: object) -> None:
        if self.container is not None:
            try:
                with errors_name_path(self.path):
                    if kind is None:
                        self._encode(None)
                    self.container.close()
                    if kind is None:
                        os.replace(self.part, self.path)
            finally:
                self.part.unlink(missing_ok=True)
        elif self.images and kind is None:
            data = io.BytesIO()
            first, *rest = self.images
            first.save(data, "GIF", save_all=True, append_images=rest, duration=round(1000 / self.fps), loop=0)
            write_atomically(self.path, data.getvalue())
