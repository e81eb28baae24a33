import errno
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from PIL import Image
from skimage.color import deltaE_ciede2000, rgb2lab

from cutslots.scenes import Scenes, files


def run(*arguments):
    return subprocess.run([sys.executable, "-m", "cutslots", *arguments], capture_output=True, text=True)


def everything(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_still_scenes(tmp_path):
    scenes = Scenes("textured", size=24, count=3)
    files.generate(scenes, tmp_path, quiet=True)
    sample = scenes.render(range(3))
    lines = [json.loads(line) for line in (tmp_path / "scenes.jsonl").read_text().splitlines()]
    assert [line["index"] for line in lines] == [0, 1, 2]
    for i in range(3):
        mask = Image.open(tmp_path / "masks" / f"{i:06d}.png")
        assert mask.mode == "P" and np.array_equal(np.array(mask), sample.mask[i].numpy())
        image = np.array(Image.open(tmp_path / "images" / f"{i:06d}.png"))
        assert np.array_equal(image, sample.image[i].permute(1, 2, 0).numpy())
    assert Image.open(tmp_path / "contact_sheet.png").size == (3 * 26 - 2, 2 * 26 - 2)


def test_moving_scenes(tmp_path):
    files.generate(Scenes("moving", size=16, count=1), tmp_path, quiet=True)
    assert len(list((tmp_path / "images" / "000000").glob("*.png"))) == 24
    assert len(list((tmp_path / "masks" / "000000").glob("*.png"))) == 24
    assert Image.open(tmp_path / "previews" / "000000.gif").n_frames == 24


def test_killed_and_started_again(tmp_path):
    """SIGKILL somewhere in the middle; the same command then gives what an undisturbed one gives."""
    command = ["generate", "plain", "--count", "40", "--size", "24", "--out"]
    assert run(*command, str(tmp_path / "whole")).returncode == 0
    process = subprocess.Popen(
        [sys.executable, "-m", "cutslots", *command, str(tmp_path / "cut")], stdout=subprocess.DEVNULL
    )
    while not (tmp_path / "cut" / "scenes.jsonl").exists() and process.poll() is None:
        time.sleep(0.02)
    time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    truth = tmp_path / "cut" / "scenes.jsonl"
    truth.write_bytes(truth.read_bytes() + b'{"index": ')  # as if the last line had been cut
    done = run(*command, str(tmp_path / "cut"))
    assert done.returncode == 0, done.stderr
    assert everything(tmp_path / "cut") == everything(tmp_path / "whole")


def test_a_lost_file_is_made_again(tmp_path):
    scenes = Scenes("plain", size=16, count=4)
    files.generate(scenes, tmp_path, quiet=True)
    before = everything(tmp_path)
    (tmp_path / "images" / "000002.png").unlink()
    (tmp_path / "scenes.jsonl").write_bytes(before["scenes.jsonl"] + b"{}\n")
    files.generate(scenes, tmp_path, quiet=True)
    assert everything(tmp_path) == before


def test_refuses_what_it_did_not_make(tmp_path):
    (tmp_path / "diary.txt").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path.parent)
    done = run("generate", "plain", "--count", "1", "--size", "8", "--out", str(tmp_path))
    assert done.returncode != 0 and "holds something else" in done.stderr
    assert (tmp_path / "diary.txt").exists()
    assert (
        run("generate", "plain", "--count", "1", "--size", "8", "--out", str(tmp_path), "--overwrite").returncode == 0
    )
    assert not (tmp_path / "diary.txt").exists()


def test_a_full_disk(tmp_path, monkeypatch):
    """A file does not fit: one sentence names it, and no file with a right name is broken."""
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
        files.generate(Scenes("plain", size=16, count=4), tmp_path, quiet=True)
    assert caught.value.filename.endswith(".png")
    monkeypatch.undo()
    assert not list(tmp_path.rglob("*.part"))
    for path in tmp_path.rglob("*.png"):
        Image.open(path).load()
    files.generate(Scenes("plain", size=16, count=4), tmp_path, quiet=True)
    assert len(list((tmp_path / "masks").glob("*.png"))) == 4


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["plain", "--count", "-3"], "--count is -3; expected at least 1"),
        (["plain", "--size", "0"], "size is 0; expected a side of 1 to 2048 pixels"),
        (["marble"], "marble"),
    ],
)
def test_bad_arguments(tmp_path, arguments, message):
    done = run("generate", *arguments, "--out", str(tmp_path / "out"))
    assert done.returncode != 0 and message in done.stderr + done.stdout and "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be(tmp_path):
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        done = run("generate", "plain", "--count", "1", "--size", "8", "--out", str(out))
        assert done.returncode != 0 and str(tmp_path / "file") in done.stderr and "Traceback" not in done.stderr


# Machado, Oliveira and Fernandes (2009), severity 1: what becomes of linear RGB.
EYES = {
    "normal": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}


def seen(colours, eyes):
    """Bytes (N, 3) of sRGB as CIELAB, as these eyes see them."""
    x = colours / 255
    light = np.where(x <= 0.04045, x / 12.92, ((x + 0.055) / 1.055) ** 2.4) @ np.transpose(EYES[eyes])
    light = light.clip(0, 1)
    return rgb2lab(np.where(light <= 0.0031308, 12.92 * light, 1.055 * light ** (1 / 2.4) - 0.055))


def least(colours, eyes):
    lab = seen(colours, eyes)
    i, j = np.triu_indices(len(lab), 1)
    return deltaE_ciede2000(lab[i], lab[j]).min()


@pytest.mark.parametrize("eyes", EYES)
def test_colours_are_told_apart_by_all_eyes(eyes):
    assert least(files.PALETTE[:6], eyes) > 24
    assert least(files.PALETTE[:9], eyes) > 20
    assert least(files.PALETTE[:13], eyes) > 15.5
    half = 0.35 * 127 + 0.65 * files.PALETTE  # as overlays show them, on grey
    assert least(half[:9], eyes) > 15 and least(half[:13], eyes) > 11.5


def test_colours_are_told_apart_in_grey():
    lightness = seen(files.PALETTE, "normal")[:, 0]
    assert np.diff(np.sort(lightness[:9])).min() > 6.5 and np.diff(np.sort(lightness[:13])).min() > 5
    assert lightness[:13].max() < 95, "none is taken for the white of paper"


def test_every_label_has_a_colour_of_its_own():
    assert files.PALETTE.shape == (256, 3) and not files.PALETTE[0].any()
    assert len(np.unique(files.PALETTE, axis=0)) == 256
