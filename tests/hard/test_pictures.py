"""Folders that hold anything but pictures."""

import contextlib
import os
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from cutslots import predict as predicting
from cutslots.data.folder import read_image
from cutslots.predict import at_size, paint_over, predict
from cutslots.report import blend, paint
from tests.hard.pictures import encoded, grey, judged, noise, predicted, write_hostile
from tests.small_runs import FORKED


def test_a_folder_of_hostile_pictures(tmp_path):
    """Each bad one is refused in a sentence, all others are written, and little memory is taken."""
    expected = write_hostile(tmp_path / "in", count=150)
    shown = predicted(tmp_path / "in", tmp_path / "out", seconds=120)
    wrong = {name: x for name, x in judged(expected, tmp_path / "in", tmp_path / "out", shown).items() if x}
    assert not wrong, wrong
    assert shown.peak < 2**30


@pytest.mark.parametrize(
    "make, said",
    [
        (os.mkfifo, "a.png cannot be read as a picture: it is no file"),
        (lambda path: path.symlink_to("/dev/zero"), "a.png cannot be read as a picture: it is no file"),
        (
            lambda path: path.write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"),
            ": it is EPS; expected one",
        ),
    ],
)
def test_what_is_no_picture(tmp_path, capsys, make, said):
    make(tmp_path / "a.png")
    assert not predict("tiny", tmp_path / "a.png", tmp_path / "out", "cpu")
    assert said in capsys.readouterr().out


@pytest.mark.parametrize("behind", [b"", bytes(9999)])
@pytest.mark.parametrize("compression", ["raw", "tiff_lzw"])
def test_ycbcr_in_a_tiff(tmp_path, rng, compression, behind):
    """Lying on its side, with or without bytes behind the pixels: no Pillow takes it for other colours."""
    picture = Image.fromarray(noise(rng)).convert("YCbCr")
    data = encoded(picture, "TIFF", compression=compression, tiffinfo={274: 6})
    (tmp_path / "a.png").write_bytes(data + behind)
    expected = np.asarray(picture.convert("RGB").transpose(Image.Transpose.ROTATE_270), dtype=int)
    assert np.abs(np.asarray(read_image(tmp_path / "a.png"), dtype=int) - expected).max() <= 1


def as_nobody(images, out, log):
    """Predicts as a user who is not root; what is to be loaded for it was loaded as root."""
    with open(log, "w") as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
        predict("tiny", images / "yours.png", out.with_name("first"), "cpu")
        os.setuid(65534)
        sys.exit(not predict("tiny", images, out, "cpu"))


def test_a_picture_that_nobody_may_read():
    with tempfile.TemporaryDirectory() as place:
        os.chmod(place, 0o777)
        images, out, log = (Path(place) / name for name in ("images", "out", "log"))
        images.mkdir()
        for name, mode in (("mine", 0), ("yours", 0o644)):
            (images / f"{name}.png").write_bytes(grey(9, 9))
            (images / f"{name}.png").chmod(mode)
        if os.geteuid() == 0:
            process = FORKED.Process(target=as_nobody, args=(images, out, log))
            process.start()
            process.join()
            said, status = log.read_text(), process.exitcode
        else:
            said, status, _ = predicted(images, out)
        assert f"cutslots: {images / 'mine.png'} cannot be read as a picture: [Errno 13] Permission denied" in said
        assert status == 1 and "wrote 1 of 2 pictures" in said


def test_a_large_picture_is_coloured_in_parts(monkeypatch, rng):
    monkeypatch.setattr(predicting, "PIXELS", 16 * 100)
    picture, labels = Image.fromarray(rng.integers(0, 256, (150, 7, 3), dtype=np.uint8)), rng.integers(0, 6, (150, 7))
    expected = blend(np.asarray(picture), paint(labels))
    paint_over(picture, labels)
    assert np.array_equal(picture, expected)


def test_scores_of_more_pixels_than_float32_can_count():
    """A running sum in float32 would not pass 2^24."""
    labels, scores = at_size(torch.tensor([0.9, 0.1]).reshape(2, 1, 1), (5000, 5000))
    assert scores[0] == pytest.approx(0.9, abs=1e-6) and not scores[1] and not labels.any()


@pytest.mark.parametrize("shape", [(300, 7), (7, 300), (1, 90), (90, 1), (200, 150)])
def test_a_large_picture_is_parted_some_rows_at_a_time(monkeypatch, shape):
    masks = torch.randn(5, 16, 16, generator=torch.Generator().manual_seed(0)).softmax(0)
    whole = at_size(masks, shape)
    monkeypatch.setattr(predicting, "PIXELS", 40)
    parts = at_size(masks, shape)
    assert np.array_equal(whole[0], parts[0])
    np.testing.assert_allclose(whole[1], parts[1], rtol=1e-5)
