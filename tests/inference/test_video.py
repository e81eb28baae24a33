"""Reading and writing videos of every format."""

import sys
import tracemalloc

import numpy as np
import pytest
import torch
from PIL import Image

from cutslots.inference import video
from cutslots.inference.video import VideoWriter, open_video
from cutslots.models.checkpoints import load
from cutslots.models.tracker import Tracker
from tests.inference.conftest import FRAMES


def test_frames_are_read_back(source, clip):
    opened = open_video(source)
    frames = np.stack([np.asarray(frame) for frame in opened.frames])
    assert frames.shape == clip.shape
    assert opened.length in (FRAMES, None) and opened.fps == (12 if source.is_dir() else 10)
    exact = source.is_dir() or source.suffix == ".webp"
    difference = np.abs(frames.astype(int) - clip).mean()
    assert difference == 0 if exact else difference < 4


@pytest.mark.parametrize("pyav", [True, False])
@pytest.mark.parametrize("name", ["video.mp4", "notes.txt"])
def test_text_is_not_a_video(tmp_path, monkeypatch, name, pyav):
    if not pyav:
        monkeypatch.setitem(sys.modules, "av", None)
    (tmp_path / name).write_text("Dear Sir or Madam,\nno video, though the \x1b[1mname\x1b[0m says so: ä, 図\n")
    with pytest.raises(
        ValueError, match=rf"^video: {tmp_path / name} is text, not a video; expected a video, a GIF or"
    ):
        open_video(tmp_path / name)


def test_folders_that_are_not_videos(tmp_path, clip):
    with pytest.raises(ValueError, match="there is no"):
        open_video(tmp_path / "nothing")
    with pytest.raises(ValueError, match="holds no images"):
        open_video(tmp_path)
    for t, size in enumerate([(64, 48), (64, 50)]):
        Image.new("RGB", size).save(tmp_path / f"{t}.png")
    with pytest.raises(ValueError, match=r"frame 1 of .* is 64x50, the first 64x48; expected one size"):
        list(open_video(tmp_path).frames)


def test_failed_writer_leaves_no_file(tmp_path, clip):
    def write(path):
        with VideoWriter(path, 10.0) as writer:
            writer.add(clip[0])
            raise RuntimeError

    for suffix in ("mp4", "gif"):
        with pytest.raises(RuntimeError):
            write(tmp_path / f"video.{suffix}")
    assert not list(tmp_path.iterdir())


def test_length_of_a_gif_is_limited(tmp_path, clip, monkeypatch):
    monkeypatch.setattr(video, "MAX_GIF_FRAMES", 3)
    writer = VideoWriter(tmp_path / "video.gif", 10.0)
    for frame in clip[:3]:
        writer.add(frame)
    with pytest.raises(ValueError, match="would have over 3 frames"):
        writer.add(clip[3])


def test_memory_does_not_grow_with_the_video(tmp_path, clip):
    """Python's own allocations at frame 199 are those at frame 40."""
    path = tmp_path / "long.mp4"
    with VideoWriter(path, 10.0) as writer:
        for t in range(200):
            writer.add(clip[t % FRAMES])
    tracker, held = Tracker(load("tiny-64")), {}
    tracemalloc.start()
    for t, image in enumerate(open_video(path).frames):
        small = torch.from_numpy(np.asarray(image.resize((64, 64))).copy()).permute(2, 0, 1)[None]
        tracker(small)
        held[t] = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert len(held) == 200 and held[199] - held[40] < 100_000


def test_odd_sides(tmp_path):
    with VideoWriter(tmp_path / "odd.mp4", 24.0) as writer:
        for _ in range(3):
            writer.add(np.zeros((33, 47, 3), dtype=np.uint8))
    assert {frame.size for frame in open_video(tmp_path / "odd.mp4").frames} == {(46, 32)}
