"""What a checkpoint says of its training data, and which images are unlike it."""

import json
import re
import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest
import skimage
import torch
from PIL import Image

from cutslots import Scenes, load
from cutslots.inference.predict import predict
from cutslots.inference.track import track
from cutslots.models.checkpoints import checkpoint_names, save
from cutslots.models.discovery import build
from cutslots.models.training_data import (
    FILE,
    TrainingData,
    measure_training_data,
    read_training_data,
    reconstruction_errors,
    write_training_data,
)
from tests.models.configs import SMALL

DATA = TrainingData("rendered scenes", "10 images", 0.02, 0.5, 0.1)


@pytest.mark.parametrize(
    "errors, expected",
    [
        ((0.0, 0.0), 1.0),
        ((0.02, 0.04), 1.0),
        ((0.01, 0.03), 1.0),
        ((0.04, 1.0), 0.5),
        ((0.01, 0.01), 0.5),
        ((0.08, 0.04), 0.25),
        ((0.01, 0.03, 0.1), 1.0),
        ((0.01, 0.03, 0.4), 0.25),
        ((0.04, 1.0, 0.4), 0.25),
    ],
)
def test_familiarity(errors, expected):
    assert DATA.familiarity(*errors) == pytest.approx(expected)


@pytest.mark.parametrize("size", [(16, 24), (13, 20), (1, 50), (5, 3)])
def test_errors_are_those_of_numpy(size):
    """Means over blocks of 8x8 pixels; those at the right and at the bottom may be smaller."""
    rng = np.random.default_rng(0)
    image, reconstruction = rng.integers(0, 256, (2, 3, *size), dtype=np.uint8), rng.random((2, 3, *size))
    rows, columns = (range(0, side, 8) for side in size)

    def blocks(x):
        return np.array([[[c[y : y + 8, x : x + 8].mean() for x in columns] for y in rows] for c in x])

    for given in (torch.from_numpy(image), torch.from_numpy(image / 255)):
        error, variance, detail = reconstruction_errors(torch.from_numpy(reconstruction), given)
        for b in range(2):
            expected = np.mean((blocks(image[b] / 255) - blocks(reconstruction[b])) ** 2)
            assert float(error[b]) == pytest.approx(expected, rel=1e-4)
            pixels = np.mean((image[b] / 255 - reconstruction[b]) ** 2)
            assert float(detail[b]) == pytest.approx(pixels - expected, rel=1e-3, abs=1e-6)
            assert float(variance[b]) == pytest.approx(blocks(image[b] / 255).var((1, 2)).mean(), rel=1e-4, abs=1e-9)


def test_limits_are_measured_and_stored(tmp_path):
    model, images = build(SMALL).eval(), torch.randint(0, 256, (7, 3, 16, 16), dtype=torch.uint8)
    data = measure_training_data(model, images.split(3), "noise", "7 images")
    with torch.no_grad():
        found = reconstruction_errors(model(images).reconstruction, images)
        error, variance, detail = (x.numpy() for x in found)
    assert data.max_error == pytest.approx(np.quantile(error, 0.98), rel=1e-4)
    assert data.max_relative_error == pytest.approx(np.quantile(error / variance.clip(1e-4), 0.98), rel=1e-4)
    assert data.max_detail_error == pytest.approx(np.quantile(detail, 0.98), rel=1e-4)
    save(model, tmp_path)
    assert load(tmp_path).training_data is None, "the file is optional"
    write_training_data(data, tmp_path)
    assert load(tmp_path).training_data == data == load(tmp_path / "model.safetensors").training_data
    with pytest.raises(ValueError, match="batches are empty"):
        measure_training_data(model, [], "", "")


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        "torn {",
        json.dumps(DATA._asdict() | {"more": 1}),
        json.dumps(DATA._asdict() | {"max_error": 0}),
        json.dumps(DATA._asdict() | {"max_error": "0.1"}),
        json.dumps(DATA._asdict() | {"max_error": float("nan")}),
        json.dumps(DATA._asdict() | {"max_relative_error": float("inf")}),
        json.dumps(DATA._asdict() | {"description": 5}),
    ],
)
def test_damaged_file(tmp_path, content):
    (tmp_path / FILE).write_text(content)
    with pytest.raises(ValueError, match=rf"\A{re.escape(str(tmp_path / FILE))} does not describe training data; exp"):
        read_training_data(tmp_path / FILE)


FAMILIES = {
    "tiny-64": ("plain", (2, 5)),
    "plain-128": ("plain", None),
    "plain-paper-128": ("plain", None),
    "textured-128": ("textured", None),
    "textured-paper-128": ("textured", None),
    "moving-128": ("moving", None),
    "moving-paper-128": ("moving", None),
}
PHOTOGRAPHS = ["astronaut", "coffee", "camera", "coins", "chelsea"]  # with scikit-image


def photograph(name):
    return Path(skimage.__file__).parent / "data" / f"{name}.png"


@pytest.mark.parametrize("name", checkpoint_names())
def test_scenes_are_familiar_and_photographs_are_not(name):
    model = load(name)
    assert model.training_data.description.startswith("rendered scenes of ")
    family, num_objects = FAMILIES[name]
    options = {"num_objects": num_objects} if num_objects else {}
    scenes, _ = Scenes(family, "test", model.image_size[0], **options).get_batch(range(1 if family == "moving" else 8))
    scenes = scenes[0, :8] if family == "moving" else scenes  # the frames of a video
    with warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always")
        predictions = model.predict(scenes)
    assert sum(each.familiarity < 1 for each in predictions) <= 1 and len(raised) <= 1
    with pytest.warns(
        UserWarning, match=r"far from the training data of this checkpoint \(rendered scenes of"
    ) as raised:
        predictions = model.predict([photograph(each) for each in PHOTOGRAPHS])
    assert len(raised) == 1, "one warning for all images"
    assert str(raised[0].message).endswith("for photographs see docs/photographs.md")
    assert all(each.familiarity < 1 for each in predictions)


def test_command_warns_once_and_lowers_scores(tmp_path, capsys):
    for name in PHOTOGRAPHS[:2]:
        shutil.copy(photograph(name), tmp_path)
    predict("tiny-64", tmp_path, tmp_path / "out", "cpu")
    said = capsys.readouterr().err
    assert said.startswith(
        "cutslots: warning: 2 of 2 images (the first is astronaut.png) are far from the training data"
    )
    assert said.count("warning") == 1 and "rendered scenes of" in said
    annotations = json.loads((tmp_path / "out" / "coco.json").read_text())["annotations"]
    assert max(each["score"] for each in annotations) < 0.5


def test_without_training_data_nothing_is_said(tmp_path):
    save(build(SMALL), tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (found,) = load(tmp_path).predict(photograph("coffee"))
    assert found.familiarity is None and (found.scores > 0).all()


@pytest.mark.parametrize("factor, warned", [(1.0, False), (1e-9, True)])
def test_track_warns_of_a_video(tmp_path, capsys, factor, warned):
    model = build(SMALL)
    save(model, tmp_path)
    write_training_data(TrainingData("rendered scenes", "none", 1e6 * factor, 1e6 * factor, 1e6 * factor), tmp_path)
    (tmp_path / "frames").mkdir()
    for t in range(3):
        Image.new("RGB", (16, 16), (250, 60 * t, 0)).save(tmp_path / "frames" / f"{t}.png")
    track(str(tmp_path), tmp_path / "frames", tmp_path / "out", "cpu", overlay="none")
    said = capsys.readouterr().err
    assert ("cutslots: warning: frames is far from the training data" in said) == warned == bool(said)
