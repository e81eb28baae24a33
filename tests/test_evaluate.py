import csv
import json
import shutil

import numpy as np
import pytest
import torch

from cutslots import evaluate as evaluation
from cutslots import metrics
from cutslots.devices import make_fabric
from cutslots.evaluate import BATCH, evaluate, judge, look
from cutslots.model import Discovery, as_floats, load, save
from cutslots.reading import eager, read
from cutslots.scenes import Scenes
from cutslots.scenes.files import generate
from tests.small_runs import sentence, small, two

COUNT = 3 * BATCH + 4
SCORES = [prefix + name for prefix in ("", "joined_", "eager_", "partition_") for name in metrics.NAMES]


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """A model that draws its slots, whose scores would show if batches were seeded by who judges them."""
    folder = tmp_path_factory.mktemp("weights")
    torch.manual_seed(0)
    save(Discovery(small(folder, module="attention").model), folder)
    return folder


@pytest.fixture(scope="module")
def plain(weights, tmp_path_factory):
    """What one process writes."""
    out = tmp_path_factory.mktemp("plain")
    evaluate(str(weights), ("plain",), out, "test", COUNT, make_fabric("cpu"))
    return out


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The same scenes as files."""
    folder = tmp_path_factory.mktemp("scenes")
    generate(Scenes("plain", "test", 16, count=COUNT), folder, quiet=True)
    return folder


def results(out):
    return json.loads((out / "results.json").read_text())["results"]


def table(out):
    with (out / "per_image.csv").open() as file:
        return list(csv.DictReader(file))


def words(weights, out, data="plain", *more):
    return ["evaluate", str(weights), "--out", str(out), "--accelerator", "cpu", "--data", str(data), *more]


def test_what_it_leaves(plain, weights):
    assert {p.name for p in plain.iterdir()} == {"results.json", "per_image.csv", "report.html"}
    record = json.loads((plain / "results.json").read_text())
    assert record["weights"] == str(weights) and record["model"]["size"] == 16 and record["model"]["slots"] == 3
    assert record["results"]["plain"]["split"] == "test" and record["results"]["plain"]["images"] == COUNT
    assert set(record["results"]["plain"]) == {"split", "images", "objects", "mse", *SCORES}
    page = (plain / "report.html").read_text()
    assert "ARI-FG" in page and "plain" in page


def test_the_means_are_those_of_the_table(plain):
    rows = table(plain)
    assert [row["image"] for row in rows] == [f"{i:06d}" for i in range(COUNT)]
    assert {row["data"] for row in rows} == {"plain"}
    for name in ("objects", "mse", *SCORES):
        assert np.mean([float(row[name]) for row in rows]) == results(plain)["plain"][name], name


def test_the_table_by_hand(plain, weights):
    """Every image's scores from its own masks, in batches seeded by their number."""
    model, scenes = load(weights), Scenes("plain", "test", 16, count=COUNT)
    rows = table(plain)
    for b, start in enumerate(range(0, COUNT, BATCH)):
        chosen = np.arange(start, min(start + BATCH, COUNT))
        image, mask = scenes.render(chosen)
        torch.manual_seed(b)
        with torch.no_grad():
            found = model(image)
        larger = torch.nn.Upsample(scale_factor=2, mode="bilinear")(found.partition)
        every = {"": found.masks, "partition_": larger, "joined_": read(found, image)}
        every["eager_"] = eager(every["joined_"])
        for prefix, labels in ((prefix, masks.argmax(1)) for prefix, masks in every.items()):
            for name, values in metrics.score(mask, labels).items():
                assert [float(rows[i][prefix + name]) for i in chosen] == values.tolist(), name
        mse = (as_floats(image) - found.reconstruction).double().square().sum((1, 2, 3))
        assert [float(rows[i]["mse"]) for i in chosen] == pytest.approx(mse.tolist(), rel=1e-6)
        assert [int(rows[i]["objects"]) for i in chosen] == [len(set(m.flatten().tolist()) - {0}) for m in mask]


def test_files_score_as_their_scenes(plain, files, weights, tmp_path):
    evaluate(str(weights), (str(files),), tmp_path, "test", None, make_fabric("cpu"))
    assert results(tmp_path)[str(files)] == results(plain)["plain"]
    expected = [row | {"data": str(files)} for row in table(plain)]
    assert table(tmp_path) == expected


def test_two_processes_give_the_same_bytes(plain, weights, tmp_path):
    commands = two(words(weights, tmp_path / "out", "plain", "--images", str(COUNT), "--devices", "2"), tmp_path)
    assert [command.end() for command in commands] == [0, 0], "".join(command.said() for command in commands)
    for name in ("results.json", "per_image.csv"):
        assert (tmp_path / "out" / name).read_bytes() == (plain / name).read_bytes(), name
    assert "wrote" in commands[0].said() and "wrote" not in commands[1].said()


def test_several_datasets_and_fewer_images(weights, tmp_path, plain, capsys):
    evaluate(str(weights), ("plain", "camo"), tmp_path, "test", BATCH, make_fabric("cpu"))
    assert list(results(tmp_path)) == ["plain", "camo"] and len(table(tmp_path)) == 2 * BATCH
    assert table(tmp_path)[:BATCH] == table(plain)[:BATCH]
    said = capsys.readouterr().out
    assert "camo" in said and str(tmp_path / "results.json") in said


def test_splits(weights, files, tmp_path):
    for split, count in (("test", COUNT), ("val", COUNT // 10), ("train", COUNT - COUNT // 10)):
        evaluate(str(weights), (str(files),), tmp_path / split, split, None, make_fabric("cpu"))
        assert results(tmp_path / split)[str(files)]["images"] == count
    names = {split: {row["image"] for row in table(tmp_path / split)} for split in ("test", "val", "train")}
    assert names["val"] | names["train"] == names["test"] and not names["val"] & names["train"]


def test_it_writes_beside_the_weights(weights, tmp_path, monkeypatch):
    shutil.copytree(weights, tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    evaluate("run", ("plain",), None, "val", 2, make_fabric("cpu"))
    evaluate("run/model.safetensors", ("plain",), None, "val", 2, make_fabric("cpu"))
    assert len(table(tmp_path / "run" / "evaluation")) == len(table(tmp_path / "evaluation")) == 2


def test_the_model_is_left_as_it_was(weights):
    model, scenes, fabric = load(weights), Scenes("plain", "val", 16, count=4), make_fabric("cpu")
    for training in (True, False):
        model.train(training)
        judge(model, scenes, fabric)
        look(model, scenes, 2, fabric)
        assert model.training == training and all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("count, images", [(None, 5), (3, 3), (99, 5)])
def test_how_many_are_judged(weights, count, images):
    assert len(judge(load(weights), Scenes("plain", "val", 16, count=5), make_fabric("cpu"), count).rows) == images


def test_no_masks(weights, files, tmp_path, monkeypatch):
    shutil.copytree(files / "images", tmp_path / "data" / "images")
    said = sentence(monkeypatch, words(weights, tmp_path / "out", tmp_path / "data"))
    assert said.startswith(f"cutslots: {tmp_path / 'data'} holds no masks/") and "cutslots predict" in said
    assert not (tmp_path / "out").exists()


def test_a_missing_mask(weights, files, tmp_path, monkeypatch):
    for kind in ("images", "masks"):
        (tmp_path / "data" / kind).mkdir(parents=True)
        for name in ("000000.png", "000001.png"):
            shutil.copy(files / kind / name, tmp_path / "data" / kind)
    (tmp_path / "data" / "masks" / "000001.png").unlink()
    assert "000001.png is missing" in sentence(monkeypatch, words(weights, tmp_path / "out", tmp_path / "data"))


@pytest.mark.parametrize(
    "data, message",
    [
        ("marble", "data is 'marble'; expected one of plain, textured, ood, camo, moving, clevr:DIR"),
        ("plain:5", "data is 'plain:5'; expected numbers of objects as in plain:2-5"),
        ("plain:0-3", "objects is (0, 3); expected a range between 1 and 10"),
        ("/", "/ holds no folder images/"),
    ],
)
def test_unknown_data(weights, tmp_path, monkeypatch, data, message):
    """Found before anything is judged, be it the last that was named."""
    monkeypatch.setattr(evaluation, "judge", None)
    assert message in sentence(monkeypatch, words(weights, tmp_path / "out", "plain", data))
    assert not (tmp_path / "out").exists()


def test_missing_weights(tmp_path, monkeypatch):
    said = sentence(monkeypatch, words(tmp_path / "nowhere", tmp_path / "out"))
    assert f"there is no {tmp_path / 'nowhere'}; expected a run folder" in said and not (tmp_path / "out").exists()
    (tmp_path / "empty").mkdir()
    assert "model.safetensors; expected" in sentence(monkeypatch, words(tmp_path / "empty", tmp_path / "out"))
    (tmp_path / "model.pt").write_bytes(b"")
    assert "pickled checkpoints may run code" in sentence(monkeypatch, words(tmp_path / "model.pt", tmp_path / "out"))


@pytest.mark.parametrize(
    "more, message",
    [
        (["--images", "0"], "images is 0; expected at least 1"),
        (["--images", "-2"], "images is -2; expected at least 1"),
        (["--devices", "0"], "devices is 0"),
    ],
)
def test_bad_arguments(weights, tmp_path, monkeypatch, more, message):
    assert message in sentence(monkeypatch, words(weights, tmp_path / "out", "plain", *more))
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be(weights, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        assert str(tmp_path / "file") in sentence(monkeypatch, words(weights, out, "plain", "--images", "2"))


def test_a_folder_that_cannot_be_is_found_first(weights, tmp_path, monkeypatch):
    monkeypatch.setattr(evaluation, "judge", None)
    (tmp_path / "file").write_text("")
    assert str(tmp_path / "file") in sentence(monkeypatch, words(weights, tmp_path / "file"))


def test_no_data(weights, tmp_path, monkeypatch):
    assert "data" in sentence(monkeypatch, ["evaluate", str(weights), "--out", str(tmp_path / "out"), "--data"])
