"""`cutslots track`: the files that it writes."""

import json
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from cutslots.inference import video
from cutslots.inference.track import track
from cutslots.inference.video import VideoWriter, open_video
from cutslots.models.checkpoints import load
from cutslots.models.tracker import Tracker
from cutslots.scenes import Scenes
from tests.inference.conftest import FRAMES, with_display_matrix
from tests.small_runs import Command


def test_files(source, tmp_path, capsys):
    out = tmp_path / "out"
    track("tiny-64", source, out, "cpu")
    record = json.loads((out / "tracks.json").read_text())
    assert (record["width"], record["height"], len(record["frames"])) == (64, 48, FRAMES)
    assert record["fps"] == (12 if source.is_dir() else 10)
    assert {p.name for p in out.iterdir()} == {"overlay.mp4", "masks", "tracks.json", "request.json", ".lock"}
    masks = sorted((out / "masks").glob("*.png"))
    assert len(masks) == FRAMES and len(list(open_video(out / "overlay.mp4").frames)) == FRAMES
    for frame, path in zip(record["frames"], masks, strict=True):
        labels = np.asarray(Image.open(path))
        assert labels.shape == (48, 64) and labels.min() >= 1
        assert {each["track"]: each["area"] for each in frame} == dict(
            zip(*(v.tolist() for v in np.unique(labels, return_counts=True)), strict=True)
        )
        for each in frame:
            left, top, width, height = each["bbox"]
            inside = labels[top : top + height, left : left + width] == each["track"]
            assert inside.sum() == each["area"] and inside[:, [0, -1]].any(0).all() and inside[[0, -1]].any(1).all()
    assert f"wrote {FRAMES} frames to {out}" in capsys.readouterr().out
    track("tiny-64", source, out, "cpu")  # the same again
    with pytest.raises(
        ValueError,
        match=r"holds another tracking \(differing in association\); choose another folder or pass --overwrite",
    ):
        track("tiny-64", source, out, "cpu", association="hungarian")
    track("tiny-64", source, out, "cpu", association="hungarian", overlay="gif", overwrite=True)
    assert (out / "overlay.gif").is_file() and not (out / "overlay.mp4").exists()


def test_masks_equal_those_of_the_tracker(tmp_path):
    """On a clip of the model's own size, the masks that are written are those of `Tracker`."""
    scene = Scenes("moving", "test", 64, count=1).get_batch([0]).image[0, :4]
    (tmp_path / "frames").mkdir()
    for t, frame in enumerate(scene):
        Image.fromarray(frame.permute(1, 2, 0).numpy()).save(tmp_path / "frames" / f"{t}.png")
    track("tiny-64", tmp_path / "frames", tmp_path / "out", "cpu", overlay="none", masks="decoder")
    tracker = Tracker(load("tiny-64"))
    for t, frame in enumerate(scene):
        labels = np.asarray(Image.open(tmp_path / "out" / "masks" / f"{t:06d}.png"))
        assert torch.equal(torch.from_numpy(labels.astype(np.int64)), tracker(frame[None]).masks[0].argmax(0) + 1)


@pytest.mark.parametrize("suffix", ["mp4", "gif", "webm"])
@pytest.mark.parametrize("content", [b"", b"\0junk" * 100])
def test_file_that_is_not_a_video(tmp_path, suffix, content):
    path = tmp_path / f"video.{suffix}"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"^video: {path} (is empty|cannot be read)") as error:
        track("tiny-64", path, tmp_path / "out", "cpu")
    assert "\n" not in str(error.value) and not (tmp_path / "out").exists()


@pytest.mark.parametrize("suffix", ["mp4", "gif"])
def test_truncated_video(tmp_path, clip, suffix):
    path = tmp_path / f"video.{suffix}"
    with VideoWriter(path, 10.0) as writer:
        for frame in clip:
            writer.add(frame)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(ValueError, match=rf"^video: {path} cannot be read") as error:
        track("tiny-64", path, tmp_path / "out", "cpu")
    assert "\n" not in str(error.value) and not (tmp_path / "out" / "tracks.json").exists()
    assert not list((tmp_path / "out").glob("overlay.*")) if (tmp_path / "out").exists() else True


def test_rotated_video(tmp_path, clip):
    """A phone's video, rotated by its header, has the masks of the upright video."""
    with_display_matrix(tmp_path / "phone.mp4", clip, (0, 1, -1, 0))
    (tmp_path / "frames").mkdir()
    with_display_matrix(tmp_path / "flat.mp4", clip, (1, 0, 0, 1))
    for t, frame in enumerate(open_video(tmp_path / "flat.mp4").frames):
        frame.rotate(-90, expand=True).save(tmp_path / "frames" / f"{t}.png")  # Pillow's angles are counterclockwise
    track("tiny-64", tmp_path / "phone.mp4", tmp_path / "a", "cpu")
    track("tiny-64", tmp_path / "frames", tmp_path / "b", "cpu")
    for path in (tmp_path / "a" / "masks").iterdir():
        mask = np.asarray(Image.open(path))
        assert mask.shape == (64, 48) and (mask == np.asarray(Image.open(tmp_path / "b" / "masks" / path.name))).all()


def test_without_pyav(tmp_path, clip, monkeypatch):
    monkeypatch.setitem(sys.modules, "av", None)
    assert not video.has_pyav()
    (tmp_path / "video.mp4").write_bytes(b"\0\0\0\x18ftypmp42")
    with pytest.raises(ValueError, match=r"reading video.mp4 needs PyAV: pip install 'cutslots\[video\]'"):
        open_video(tmp_path / "video.mp4")
    with VideoWriter(tmp_path / "video.gif", 10.0) as writer:
        writer.add(clip[0])
        writer.add(clip[1])
    track("tiny-64", tmp_path / "video.gif", tmp_path / "out", "cpu")
    assert (tmp_path / "out" / "overlay.gif").is_file()


def test_command_prints_one_sentence(tmp_path, clip):
    (tmp_path / "bad.mp4").write_bytes(b"\0junk")
    video, out = str(tmp_path / "bad.mp4"), str(tmp_path / "out")
    command = Command(["track", "tiny-64", video, "-o", out], tmp_path / "log", errors=tmp_path / "errors")
    assert command.end() == 1 and command.said() == ""
    (line,) = (tmp_path / "errors").read_text().strip().splitlines()
    assert line.startswith(f"cutslots: video: {video} cannot be read as a video")


def test_padding_or_stretching(tmp_path, clip):
    """On frames of another aspect ratio than the model's; the masks have the size of the frames."""
    (tmp_path / "frames").mkdir()
    for t, frame in enumerate(clip[:2]):
        Image.fromarray(frame[:, :30]).save(tmp_path / "frames" / f"{t}.png")
    labels = {}
    for resize in ("pad", "stretch"):
        track("tiny-64", tmp_path / "frames", tmp_path / resize, "cpu", overlay="none", resize=resize)
        labels[resize] = np.asarray(Image.open(tmp_path / resize / "masks" / "000001.png"))
        assert labels[resize].shape == (48, 30)
    assert not np.array_equal(labels["pad"], labels["stretch"])


@pytest.mark.parametrize("overwrite", [False, True])
def test_masks_of_something_else_are_left_alone(tmp_path, source, overwrite):
    (tmp_path / "out" / "masks").mkdir(parents=True)
    (tmp_path / "out" / "masks" / "000000.png").write_text("mine")
    with pytest.raises(
        ValueError, match=r"(is not empty and holds no|holds masks but no request.json of a) tracking; ch"
    ):
        track("tiny-64", source, tmp_path / "out", "cpu", overwrite=overwrite)
    assert (tmp_path / "out" / "masks" / "000000.png").read_text() == "mine"


def test_folder_of_another_command_is_refused(tmp_path, source):
    (tmp_path / "request.json").write_text('{"command": "predict"}')
    with pytest.raises(ValueError, match=r"request.json is not the request of a tracking; choose another folder"):
        track("tiny-64", source, tmp_path, "cpu", overwrite=True)
