"""Videos in and out, and `cutslots track`, on files of every kind that it reads."""

import json
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest
import torch
from PIL import Image

from cutslots import video
from cutslots.model import load
from cutslots.scenes import Scenes
from cutslots.track import Tracker, track
from cutslots.video import Movie, open_video

FRAMES = 6


@pytest.fixture(scope="module")
def film():
    """Six frames (T, 48, 64, 3) of discs that move."""
    y, x = np.mgrid[:48, :64]
    frames = np.full((FRAMES, 48, 64, 3), 128, dtype=np.uint8)
    for t in range(FRAMES):
        frames[t][(y - 20) ** 2 + (x - 12 - 6 * t) ** 2 < 64] = (200, 40, 40)
        frames[t][(y - 34 + 2 * t) ** 2 + (x - 50) ** 2 < 36] = (40, 60, 220)
    return frames


@pytest.fixture(params=["folder", "gif", "webp", "mp4"])
def source(request, tmp_path, film):
    if request.param == "folder":
        (tmp_path / "frames").mkdir()
        for t, frame in enumerate(film):
            Image.fromarray(frame).save(tmp_path / "frames" / f"{t:03d}.png")
        return tmp_path / "frames"
    path = tmp_path / f"film.{request.param}"
    if request.param == "webp":
        first, *rest = (Image.fromarray(frame) for frame in film)
        first.save(path, save_all=True, append_images=rest, duration=100, lossless=True)
        return path
    with Movie(path, 10.0) as movie:
        for frame in film:
            movie.add(frame)
    return path


def test_frames_come_back(source, film):
    opened = open_video(source)
    frames = np.stack([np.asarray(frame) for frame in opened.frames])
    assert frames.shape == film.shape
    assert opened.length in (FRAMES, None) and opened.rate == (12 if source.is_dir() else 10)
    exact = source.is_dir() or source.suffix == ".webp"
    difference = np.abs(frames.astype(int) - film).mean()
    assert difference == 0 if exact else difference < 4


def test_track_writes_everything(source, tmp_path, capsys):
    out = tmp_path / "out"
    track("tiny", source, out, "cpu")
    record = json.loads((out / "tracks.json").read_text())
    assert (record["width"], record["height"], len(record["frames"])) == (64, 48, FRAMES)
    masks = sorted((out / "masks").glob("*.png"))
    assert len(masks) == FRAMES and len(list(open_video(out / "overlay.mp4").frames)) == FRAMES
    for frame, path in zip(record["frames"], masks, strict=True):
        labels = np.asarray(Image.open(path))
        assert labels.shape == (48, 64) and labels.min() >= 1
        assert {each["track"]: each["area"] for each in frame} == dict(
            zip(*(v.tolist() for v in np.unique(labels, return_counts=True)), strict=True)
        )
        for each in frame:
            left, top, width, height = each["box"]
            inside = labels[top : top + height, left : left + width] == each["track"]
            assert inside.sum() == each["area"] and inside[:, [0, -1]].any(0).all() and inside[[0, -1]].any(1).all()
    assert f"wrote {FRAMES} frames to {out}" in capsys.readouterr().out
    track("tiny", source, out, "cpu")  # the same again
    with pytest.raises(ValueError, match="holds something else"):
        track("tiny", source, out, "cpu", join="hungarian")
    track("tiny", source, out, "cpu", join="hungarian", overlay="gif", overwrite=True)
    assert (out / "overlay.gif").is_file() and not (out / "overlay.mp4").exists()


def test_masks_are_those_of_the_tracker(tmp_path):
    """On a film of the model's own size, what is written is what `Tracker` finds."""
    scene = Scenes("moving", "test", 64, count=1).render([0]).image[0, :4]
    (tmp_path / "frames").mkdir()
    for t, frame in enumerate(scene):
        Image.fromarray(frame.permute(1, 2, 0).numpy()).save(tmp_path / "frames" / f"{t}.png")
    track("tiny", tmp_path / "frames", tmp_path / "out", "cpu", overlay="none")
    tracker = Tracker(load("tiny"))
    for t, frame in enumerate(scene):
        labels = np.asarray(Image.open(tmp_path / "out" / "masks" / f"{t:06d}.png"))
        assert torch.equal(torch.from_numpy(labels.astype(np.int64)), tracker(frame[None]).masks[0].argmax(0) + 1)


@pytest.mark.parametrize("ending", ["mp4", "gif", "webm"])
@pytest.mark.parametrize("content", [b"", b"\0junk" * 100])
def test_no_video(tmp_path, ending, content):
    path = tmp_path / f"film.{ending}"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"^video: {path} (is empty|cannot be read)") as error:
        track("tiny", path, tmp_path / "out", "cpu")
    assert "\n" not in str(error.value) and not (tmp_path / "out").exists()


@pytest.mark.parametrize("pyav", [True, False])
@pytest.mark.parametrize("name", ["film.mp4", "notes.txt"])
def test_text_is_no_video(tmp_path, monkeypatch, name, pyav):
    if not pyav:
        monkeypatch.setitem(sys.modules, "av", None)
    (tmp_path / name).write_text("Dear Sir or Madam,\nno film, though the \x1b[1mname\x1b[0m says so: ä, 図\n")
    with pytest.raises(ValueError, match=rf"^video: {tmp_path / name} is text, not a film; expected a video, a GIF or"):
        open_video(tmp_path / name)


@pytest.mark.parametrize("ending", ["mp4", "gif"])
def test_cut_short(tmp_path, film, ending):
    path = tmp_path / f"film.{ending}"
    with Movie(path, 10.0) as movie:
        for frame in film:
            movie.add(frame)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(ValueError, match=rf"^video: {path} cannot be read") as error:
        track("tiny", path, tmp_path / "out", "cpu")
    assert "\n" not in str(error.value) and not (tmp_path / "out" / "tracks.json").exists()
    assert not list((tmp_path / "out").glob("overlay.*")) if (tmp_path / "out").exists() else True


def test_folders_that_are_no_videos(tmp_path, film):
    with pytest.raises(ValueError, match="there is no"):
        open_video(tmp_path / "nothing")
    with pytest.raises(ValueError, match="holds no pictures"):
        open_video(tmp_path)
    for t, size in enumerate([(64, 48), (64, 50)]):
        Image.new("RGB", size).save(tmp_path / f"{t}.png")
    with pytest.raises(ValueError, match=r"frame 1 of .* is 64x50, the first 64x48; expected one size"):
        list(open_video(tmp_path).frames)


def test_without_pyav(tmp_path, film, monkeypatch):
    monkeypatch.setitem(sys.modules, "av", None)
    assert not video.has_pyav()
    (tmp_path / "film.mp4").write_bytes(b"\0\0\0\x18ftypmp42")
    with pytest.raises(ValueError, match=r"reading film.mp4 needs PyAV: pip install 'cutslots\[video\]'"):
        open_video(tmp_path / "film.mp4")
    with Movie(tmp_path / "film.gif", 10.0) as movie:
        movie.add(film[0])
        movie.add(film[1])
    track("tiny", tmp_path / "film.gif", tmp_path / "out", "cpu")
    assert (tmp_path / "out" / "overlay.gif").is_file()


def test_nothing_is_left_of_a_movie_that_failed(tmp_path, film):
    def write(path):
        with Movie(path, 10.0) as movie:
            movie.add(film[0])
            raise RuntimeError

    for ending in ("mp4", "gif"):
        with pytest.raises(RuntimeError):
            write(tmp_path / f"film.{ending}")
    assert not list(tmp_path.iterdir())


def test_a_gif_may_not_be_long(tmp_path, film, monkeypatch):
    monkeypatch.setattr(video, "LONGEST_GIF", 3)
    movie = Movie(tmp_path / "film.gif", 10.0)
    for frame in film[:3]:
        movie.add(frame)
    with pytest.raises(ValueError, match="would have over 3 frames"):
        movie.add(film[3])


def test_memory_does_not_grow_with_the_video(tmp_path, film):
    """Python's own allocations at frame 199 are those at frame 40."""
    path = tmp_path / "long.mp4"
    with Movie(path, 10.0) as movie:
        for t in range(200):
            movie.add(film[t % FRAMES])
    tracker, held = Tracker(load("tiny")), {}
    tracemalloc.start()
    for t, picture in enumerate(open_video(path).frames):
        small = torch.from_numpy(np.asarray(picture.resize((64, 64))).copy()).permute(2, 0, 1)[None]
        tracker(small)
        held[t] = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert len(held) == 200 and held[199] - held[40] < 100_000


def test_odd_sides(tmp_path):
    with Movie(tmp_path / "odd.mp4", 24.0) as movie:
        for _ in range(3):
            movie.add(np.zeros((33, 47, 3), dtype=np.uint8))
    assert {frame.size for frame in open_video(tmp_path / "odd.mp4").frames} == {(46, 32)}


def test_the_command(tmp_path, film):
    (tmp_path / "bad.mp4").write_bytes(b"\0junk")
    command = [sys.executable, "-m", "cutslots", "track", "tiny", "bad.mp4", "-o", "out"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.startswith("cutslots: video: bad.mp4 cannot be read as a video")
    assert len(done.stderr.strip().splitlines()) == 1
