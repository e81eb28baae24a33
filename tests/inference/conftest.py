"""A short video in every format that is read."""

import struct

import numpy as np
import pytest
from PIL import Image

from cutslots.inference.video import VideoWriter

FRAMES = 6


def with_display_matrix(path, clip, matrix):
    """Write an MP4 whose track header has the display matrix (a, b, c, d)."""
    with VideoWriter(path, 10.0) as writer:
        for frame in clip:
            writer.add(frame)
    data = bytearray(path.read_bytes())
    start = data.index(b"tkhd") + 44
    a, b, c, d = (round(value * 2**16) for value in matrix)
    data[start : start + 36] = struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 2**30)
    path.write_bytes(data)


@pytest.fixture(scope="module")
def clip():
    """Six frames (T, 48, 64, 3) of discs that move."""
    y, x = np.mgrid[:48, :64]
    frames = np.full((FRAMES, 48, 64, 3), 128, dtype=np.uint8)
    for t in range(FRAMES):
        frames[t][(y - 20) ** 2 + (x - 12 - 6 * t) ** 2 < 64] = (200, 40, 40)
        frames[t][(y - 34 + 2 * t) ** 2 + (x - 50) ** 2 < 36] = (40, 60, 220)
    return frames


@pytest.fixture(params=["folder", "gif", "webp", "mp4"])
def source(request, tmp_path, clip):
    if request.param == "folder":
        (tmp_path / "frames").mkdir()
        for t, frame in enumerate(clip):
            Image.fromarray(frame).save(tmp_path / "frames" / f"{t:03d}.png")
        return tmp_path / "frames"
    path = tmp_path / f"video.{request.param}"
    if request.param == "webp":
        first, *rest = (Image.fromarray(frame) for frame in clip)
        first.save(path, save_all=True, append_images=rest, duration=100, lossless=True)
        return path
    with VideoWriter(path, 10.0) as writer:
        for frame in clip:
            writer.add(frame)
    return path
