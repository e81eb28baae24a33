"""`cutslots predict` on folders of hostile images."""

import contextlib
import os
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from cutslots.data.images import read_image
from cutslots.inference.predict import predict
from tests.robustness.images import encode, find_failures, gray_png, noise, run_predict, write_hostile
from tests.small_runs import FORKED


def test_folder_of_hostile_images(tmp_path):
    """Each bad one is refused in a sentence, all others are predicted, with little memory."""
    expected = write_hostile(tmp_path / "in", count=150)
    result = run_predict(tmp_path / "in", tmp_path / "out", seconds=120)
    wrong = {name: x for name, x in find_failures(expected, tmp_path / "in", tmp_path / "out", result).items() if x}
    assert not wrong, wrong
    assert result.peak < 2**30


@pytest.mark.parametrize(
    "make, said",
    [
        (os.mkfifo, "a.png cannot be read as an image: it is no file"),
        (lambda path: path.symlink_to("/dev/zero"), "a.png cannot be read as an image: it is no file"),
        (
            lambda path: path.write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"),
            ": it is EPS; expected one",
        ),
    ],
)
def test_files_that_are_not_images(tmp_path, capsys, make, said):
    make(tmp_path / "a.png")
    assert not predict("tiny-64", tmp_path / "a.png", tmp_path / "out", "cpu")
    assert said in capsys.readouterr().out


@pytest.mark.parametrize("behind", [b"", bytes(9999)])
@pytest.mark.parametrize("compression", ["raw", "tiff_lzw"])
def test_ycbcr_in_a_tiff(tmp_path, rng, compression, behind):
    """Rotated, with or without bytes after the pixels: every version of Pillow reads the same colors."""
    image = Image.fromarray(noise(rng)).convert("YCbCr")
    data = encode(image, "TIFF", compression=compression, tiffinfo={274: 6})
    (tmp_path / "a.png").write_bytes(data + behind)
    expected = np.asarray(image.convert("RGB").transpose(Image.Transpose.ROTATE_270), dtype=int)
    assert np.abs(np.asarray(read_image(tmp_path / "a.png"), dtype=int) - expected).max() <= 1


def predict_as_nobody(images, out, log):
    """Predict as a user who is not root; the modules were loaded as root."""
    with open(log, "w") as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
        predict("tiny-64", images / "yours.png", out.with_name("first"), "cpu")
        os.setuid(65534)
        sys.exit(not predict("tiny-64", images, out, "cpu"))


def test_image_without_read_permission():
    with tempfile.TemporaryDirectory() as place:
        os.chmod(place, 0o777)
        images, out, log = (Path(place) / name for name in ("images", "out", "log"))
        images.mkdir()
        for name, mode in (("mine", 0), ("yours", 0o644)):
            (images / f"{name}.png").write_bytes(gray_png(9, 9))
            (images / f"{name}.png").chmod(mode)
        if os.geteuid() == 0:
            process = FORKED.Process(target=predict_as_nobody, args=(images, out, log))
            process.start()
            process.join()
            said, status = log.read_text(), process.exitcode
        else:
            said, status, _ = run_predict(images, out)
        assert f"cutslots: {images / 'mine.png'} cannot be read as an image: [Errno 13] Permission denied" in said
        assert status == 1 and "wrote 1 of 2 images" in said
