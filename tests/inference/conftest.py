"""A short video in every format that is read."""

import numpy as np
import pytest
from PIL import Image

from cutslots.inference.video import VideoWriter

FRAMES = 6


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
