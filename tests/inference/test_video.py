"""Reading and writing videos of every format."""

import gc
import sys
import tracemalloc
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from PIL import Image

from cutslots.inference import video
from cutslots.inference.video import VideoWriter, open_video
from cutslots.models.checkpoints import load
from cutslots.models.tracker import Tracker
from tests.inference.conftest import FRAMES, with_display_matrix


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


# The display matrix (a, b, c, d) of a file shows pixel (x, y) at (a x + c y, b x + d y): ISO/IEC 14496-12, 8.3.2.
ORIENTATIONS = {
    (1, 0, 0, 1): lambda frame: frame,
    (0, 1, -1, 0): lambda frame: np.rot90(frame, -1),  # clockwise: a phone held upright
    (-1, 0, 0, -1): lambda frame: np.rot90(frame, 2),
    (0, -1, 1, 0): lambda frame: np.rot90(frame, 1),
    (-1, 0, 0, 1): lambda frame: frame[:, ::-1],
    (1, 0, 0, -1): lambda frame: frame[::-1],
    (0, 1, 1, 0): lambda frame: frame.transpose(1, 0, 2),
    (0, -1, -1, 0): lambda frame: np.rot90(frame, 2).transpose(1, 0, 2),
    (0, 0, 0, 0): lambda frame: frame,  # written by some programs
}


@pytest.mark.parametrize("matrix", ORIENTATIONS)
def test_frames_are_upright(tmp_path, clip, matrix):
    with_display_matrix(tmp_path / "phone.mp4", clip, matrix)
    frames = np.stack([np.asarray(frame) for frame in open_video(tmp_path / "phone.mp4").frames])
    expected = np.stack([ORIENTATIONS[matrix](frame) for frame in clip])
    assert frames.shape == expected.shape and np.abs(frames.astype(int) - expected).mean() < 4


@pytest.mark.parametrize("degrees, expected", [(0, 0), (90, 1), (180, 2), (270, 3)])
def test_rotations_are_those_that_pyav_writes(tmp_path, clip, degrees, expected):
    path = tmp_path / "rotated.mp4"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=10, width=64, height=48, pix_fmt="yuv420p")
        stream.set_display_rotation(degrees)
        container.mux(stream.encode(av.VideoFrame.from_ndarray(clip[0], format="rgb24")))
        container.mux(stream.encode(None))
    (frame,) = open_video(path).frames
    wanted = np.rot90(clip[0], expected)  # counterclockwise, as PyAV's argument
    assert np.abs(np.asarray(frame).astype(int) - wanted).mean() < 4


@pytest.mark.parametrize("rotation, expected", [(0, 0), (90, 1), (180, 2), (-180, 2), (-90, 3)])
def test_rotations_beside_side_data_that_pyav_does_not_know(clip, rotation, expected):
    class Frame:
        @property
        def side_data(self):
            raise ValueError("1234 is not a valid Type")

        def to_image(self):
            return Image.fromarray(clip[0])

    Frame.rotation = rotation
    assert (np.asarray(video._upright(Frame())) == np.rot90(clip[0], expected)).all()


def test_rotations_by_other_angles_are_named(tmp_path, clip):
    with_display_matrix(tmp_path / "odd.mp4", clip, (0.7071, 0.7071, -0.7071, 0.7071))
    with pytest.raises(
        ValueError, match=r"odd\.mp4 cannot be read at frame 0: its header rotates it by an angle that is"
    ):
        list(open_video(tmp_path / "odd.mp4").frames)


# Playlists: each makes FFmpeg open video.mp4 beside it, unless it is told not to. The control character makes them pass
# for binary files.
CONCAT = b"ffconcat version 1.0\n# \x01\nfile video.mp4\n"
HLS = b"#EXTM3U\n#EXT-X-TARGETDURATION:10\n#EXT-X-VERSION:3\n# \x01\n#EXTINF:1,\nvideo.mp4\n#EXT-X-ENDLIST\n"
SDP = b"v=0\no=- 0 0 IN IP4 127.0.0.1\ns=\x01\nc=IN IP4 127.0.0.1\nm=video 5004 RTP/AVP 96\na=rtpmap:96 H264/9000"
DASH = b"""<?xml version="1.0"?><!--\x01--><MPD xmlns="urn:mpeg:dash:schema:mpd:2011" type="static"
profiles="urn:mpeg:dash:profile:full:2011" mediaPresentationDuration="PT1S"><Period><AdaptationSet mimeType="video/mp4">
<Representation id="0" bandwidth="1" width="64" height="48"><BaseURL>video.mp4</BaseURL></Representation>
</AdaptationSet></Period></MPD>"""


@pytest.mark.parametrize("content", [CONCAT, HLS, SDP, DASH], ids=["concat", "hls", "sdp", "dash"])
@pytest.mark.parametrize("suffix", ["mp4", "ffconcat", "m3u8", "sdp", "mpd", "avi"])
def test_playlists_open_no_other_file(tmp_path, clip, content, suffix):
    with VideoWriter(tmp_path / "video.mp4", 10.0) as writer:
        writer.add(clip[0])
    path = tmp_path / f"playlist.{suffix}"
    path.write_bytes(content)
    with pytest.raises(
        ValueError, match=rf"^video: {path} (is damaged or in a format that is not accepted; exp|cannot)"
    ):
        list(open_video(path).frames)
    path.write_bytes(content.replace(b"\x01", b"1"))
    with pytest.raises(ValueError, match="is text, not a video"):
        open_video(path)


def test_names_are_neither_patterns_nor_addresses(tmp_path, clip, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("concat:a.mp4", "%03d.mp4", "http:a.mp4", "file:a.mp4"):
        with VideoWriter(tmp_path / name, 10.0) as writer:
            writer.add(clip[0])
        assert len(list(open_video(Path(name)).frames)) == 1


def test_image_patterns_are_not_opened(tmp_path, clip):
    Image.fromarray(clip[0]).save(tmp_path / "001.jpg")
    (tmp_path / "%03d.jpg").write_bytes(b"\x01")
    with pytest.raises(ValueError, match=r"%03d\.jpg (is damaged or in|cannot be read)"):
        list(open_video(tmp_path / "%03d.jpg").frames)


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
        if t in (40, 199):
            gc.collect()  # cycles that wait for the collector are no growth
        held[t] = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert len(held) == 200 and held[199] - held[40] < 100_000


def test_odd_sides(tmp_path):
    with VideoWriter(tmp_path / "odd.mp4", 24.0) as writer:
        for _ in range(3):
            writer.add(np.zeros((33, 47, 3), dtype=np.uint8))
    assert {frame.size for frame in open_video(tmp_path / "odd.mp4").frames} == {(46, 32)}


@pytest.mark.parametrize("height, width", [(1, 1), (1, 40), (33, 1)])
def test_sides_of_one_pixel(tmp_path, height, width):
    with VideoWriter(tmp_path / "thin.mp4", 24.0) as writer:
        writer.add(np.full((height, width, 3), 200, dtype=np.uint8))
    (frame,) = open_video(tmp_path / "thin.mp4").frames
    assert frame.size == (max(width // 2 * 2, 2), max(height // 2 * 2, 2)) and np.asarray(frame).min() > 190


def test_error_of_the_encoder_names_the_file(tmp_path):
    path = tmp_path / "wide.mp4"
    message = rf"^{path} cannot hold frames of 20000x2 \(H.264\); pass --overlay gif or none$"
    with pytest.raises(ValueError, match=message), VideoWriter(path, 24.0) as writer:
        writer.add(np.zeros((2, 20_000, 3), dtype=np.uint8))
    assert not list(tmp_path.iterdir())
