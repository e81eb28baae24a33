import errno
import json
import pathlib
import signal

import numpy as np
import pytest
from PIL import Image

from cutslots.scenes import Scenes, export
from tests.small_runs import Command


@pytest.fixture
def run(tmp_path_factory):
    """Return the exit status of a command and what it prints."""
    log = tmp_path_factory.mktemp("log") / "log"

    def run_command(*words):
        command = Command(list(words), log)
        return command.end(), command.said()

    return run_command


def read_files(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_files_of_images(tmp_path):
    scenes = Scenes("textured", size=24, count=3)
    export.generate(scenes, tmp_path, quiet=True)
    sample = scenes.get_batch(range(3))
    lines = [json.loads(line) for line in (tmp_path / "scenes.jsonl").read_text().splitlines()]
    assert [line["index"] for line in lines] == [0, 1, 2]
    for i in range(3):
        mask = Image.open(tmp_path / "masks" / f"{i:06d}.png")
        assert mask.mode == "P" and np.array_equal(np.array(mask), sample.mask[i].numpy())
        image = np.array(Image.open(tmp_path / "images" / f"{i:06d}.png"))
        assert np.array_equal(image, sample.image[i].permute(1, 2, 0).numpy())
    assert Image.open(tmp_path / "contact_sheet.png").size == (3 * 26 - 2, 2 * 26 - 2)


def test_files_of_videos(tmp_path):
    export.generate(Scenes("moving", size=16, count=1), tmp_path, quiet=True)
    assert len(list((tmp_path / "images" / "000000").glob("*.png"))) == 24
    assert len(list((tmp_path / "masks" / "000000").glob("*.png"))) == 24
    assert Image.open(tmp_path / "previews" / "000000.gif").n_frames == 24


def test_a_killed_command_resumes(tmp_path, run):
    """After SIGKILL in the middle, the same command writes the same files as an uninterrupted one."""
    command = ["generate", "plain", "--count", "40", "--image-size", "24", "24", "--out"]
    assert run(*command, str(tmp_path / "uninterrupted"))[0] == 0
    killed = Command([*command, str(tmp_path / "killed")], tmp_path / "log")
    killed.wait_for(lambda: len(list((tmp_path / "killed").glob("images/*.png"))) > 3)
    killed.signal(signal.SIGKILL)
    killed.end()
    truth = tmp_path / "killed" / "scenes.jsonl"
    truth.write_bytes(truth.read_bytes() + b'{"index": ')  # an incomplete last line
    status, said = run(*command, str(tmp_path / "killed"))
    assert status == 0, said
    assert read_files(tmp_path / "killed") == read_files(tmp_path / "uninterrupted")


def test_a_missing_file_is_written_again(tmp_path):
    scenes = Scenes("plain", size=16, count=4)
    export.generate(scenes, tmp_path, quiet=True)
    before = read_files(tmp_path)
    (tmp_path / "images" / "000002.png").unlink()
    (tmp_path / "scenes.jsonl").write_bytes(before["scenes.jsonl"] + b"{}\n")
    export.generate(scenes, tmp_path, quiet=True)
    assert read_files(tmp_path) == before


def test_other_files_are_left_alone(tmp_path, run):
    (tmp_path / "diary.txt").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path.parent)
    command = ["generate", "plain", "--count", "1", "--image-size", "8", "8", "--out", str(tmp_path)]
    status, said = run(*command)
    assert status != 0 and "is not empty and holds no set of scenes; choose another" in said
    assert sorted(p.name for p in tmp_path.iterdir()) == ["diary.txt", "link"]
    for seed in (0, 1):
        export.generate(Scenes("plain", size=8, count=1, seed=seed), tmp_path, overwrite=True, quiet=True)
    assert (tmp_path / "diary.txt").read_text() == "mine" and (tmp_path / "link").is_symlink()


def test_overwrite_removes_other_scenes(tmp_path):
    export.generate(Scenes("moving", size=8, count=2), tmp_path, quiet=True)
    with pytest.raises(ValueError, match=r"holds another set of scenes \(differing in family, count\); choose another"):
        export.generate(Scenes("plain", size=8, count=1), tmp_path, quiet=True)
    export.generate(Scenes("plain", size=8, count=1), tmp_path, overwrite=True, quiet=True)
    assert not (tmp_path / "previews").exists()
    assert [p.name for p in (tmp_path / "images").iterdir()] == ["000000.png"]


def test_images_of_something_else_are_left_alone(tmp_path):
    (tmp_path / "images").mkdir()
    with pytest.raises(ValueError, match=r"holds images but no request.json of a set of scenes; choose another folder"):
        export.generate(Scenes("plain", size=8, count=1), tmp_path, overwrite=True, quiet=True)
    assert [p.name for p in tmp_path.iterdir()] == ["images"]


def test_a_full_disk_leaves_no_broken_files(tmp_path, monkeypatch):
    """The error names the file that does not fit."""
    written = []
    original = pathlib.Path.write_bytes

    def full(self, data):
        if len(written) == 3:
            original(self, data[: len(data) // 2])
            raise OSError(errno.ENOSPC, "No space left on device")
        written.append(self)
        return original(self, data)

    monkeypatch.setattr(pathlib.Path, "write_bytes", full)
    with pytest.raises(OSError, match=r"No space left on device: .*images.*png") as caught:
        export.generate(Scenes("plain", size=16, count=4), tmp_path, quiet=True)
    assert caught.value.filename.endswith(".png")
    monkeypatch.undo()
    assert not list(tmp_path.rglob("*.part"))
    for path in tmp_path.rglob("*.png"):
        Image.open(path).load()
    export.generate(Scenes("plain", size=16, count=4), tmp_path, quiet=True)
    assert len(list((tmp_path / "masks").glob("*.png"))) == 4


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["plain", "--count", "-3"], "count is -3; expected at least 1"),
        (["plain", "--image-size", "0", "0"], "size is (0, 0); expected 1 to 2048 pixels"),
        (["marble"], "marble"),
    ],
)
def test_invalid_arguments(tmp_path, run, arguments, message):
    status, said = run("generate", *arguments, "--out", str(tmp_path / "out"))
    assert status != 0 and message in said and "Traceback" not in said
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_created(tmp_path, run):
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        status, said = run("generate", "plain", "--count", "1", "--image-size", "8", "8", "--out", str(out))
        assert status != 0 and str(tmp_path / "file") in said and "Traceback" not in said
