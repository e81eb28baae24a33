"""The evaluate command on images: the files it writes, against metrics computed by hand."""

import csv
import json
import re
import shutil

import numpy as np
import pytest
import torch

from cutslots.devices import make_fabric
from cutslots.evaluation import evaluate as evaluation
from cutslots.evaluation import metrics
from cutslots.evaluation.batches import grouped, read_batches
from cutslots.evaluation.evaluate import IMAGE_BATCH_SIZE, evaluate, evaluate_model
from cutslots.evaluation.gallery import Gallery
from cutslots.evaluation.objects import GROUPS
from cutslots.evaluation.visualize import NUM_SHOWN_IMAGES, visualize_images
from cutslots.models.checkpoints import load, save
from cutslots.models.discovery import build, to_float
from cutslots.models.refinement import DEFAULTS, high_recall_masks, refine_masks
from cutslots.scenes import Scenes
from cutslots.scenes.export import generate
from tests.small_runs import sentence, small, two

COUNT = 3 * IMAGE_BATCH_SIZE + 4
PREFIXES = ("", "refined_", "high_recall_", "partition_")
METRICS = [prefix + name for prefix in PREFIXES for name in metrics.IMAGE_METRICS]
FOUND = [prefix + name for prefix in PREFIXES for name in ("found", *(f"found_{group}" for group in GROUPS))]
NUMBERS = ["num_objects", *(f"num_{group}" for group in GROUPS)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A model that samples its slots: its metrics would show if seeds of batches depended on the process."""
    folder = tmp_path_factory.mktemp("checkpoint")
    torch.manual_seed(0)
    save(build(small(folder, slots="slot-attention").model), folder)
    return folder


@pytest.fixture(scope="module")
def plain(checkpoint, tmp_path_factory):
    """The folder that one process writes."""
    out = tmp_path_factory.mktemp("plain")
    evaluate(str(checkpoint), ("plain",), out, "test", COUNT, make_fabric("cpu"))
    return out


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The same scenes as files."""
    folder = tmp_path_factory.mktemp("scenes")
    generate(Scenes("plain", "test", 16, count=COUNT), folder, quiet=True)
    return folder


def results(out):
    return json.loads((out / "results.json").read_text())["results"]


def page_of(out):
    return (out / "report.html").read_text()


def table(out):
    with (out / "per_image.csv").open() as file:
        return list(csv.DictReader(file))


def command_line(checkpoint, out, data="plain", *more):
    return ["evaluate", str(checkpoint), "--out", str(out), "--accelerator", "cpu", "--data", str(data), *more]


def test_files_that_are_written(plain, checkpoint):
    assert {p.name for p in plain.iterdir()} == {"results.json", "per_image.csv", "report.html"}
    record = json.loads((plain / "results.json").read_text())
    assert record["checkpoint"] == str(checkpoint) and record["model"]["image_size"] == [16, 16]
    assert record["model"]["slots"]["num_slots"] == 3
    assert record["results"]["plain"]["split"] == "test" and record["results"]["plain"]["num_images"] == COUNT
    assert set(record["results"]["plain"]) == {"split", "num_images", "mse", *NUMBERS, *METRICS, *FOUND}
    assert record["refinement"] == DEFAULTS and "association" not in record
    page = (plain / "report.html").read_text()
    assert "ARI-FG" in page and "plain" in page


def test_means_are_those_of_the_table(plain):
    rows = table(plain)
    assert [row["image"] for row in rows] == [f"{i:06d}" for i in range(COUNT)]
    assert {row["dataset"] for row in rows} == {"plain"}
    for name in ("mse", *NUMBERS, *METRICS):
        assert np.mean([float(row[name]) for row in rows]) == results(plain)["plain"][name], name
    for name in FOUND:  # those of the objects of all images
        number = metrics.counted_by(name)
        found = sum(round(float(row[name]) * int(row[number])) for row in rows if row[name])
        assert found / sum(int(row[number]) for row in rows) == results(plain)["plain"][name], name


def test_table_by_hand(plain, checkpoint):
    """The metrics of every image from its own masks, in batches seeded by their number."""
    model, scenes = load(checkpoint), Scenes("plain", "test", 16, count=COUNT)
    rows = table(plain)
    for b, start in enumerate(range(0, COUNT, IMAGE_BATCH_SIZE)):
        chosen = np.arange(start, min(start + IMAGE_BATCH_SIZE, COUNT))
        image, mask = scenes.get_batch(chosen)
        torch.manual_seed(b)
        with torch.no_grad():
            output = model(image)
        resized = torch.nn.Upsample(scale_factor=2, mode="bilinear")(output.partition_masks)
        kinds = {"": output.masks, "partition_": resized, "refined_": refine_masks(output, image)}
        kinds["high_recall_"] = high_recall_masks(kinds["refined_"])
        for prefix, labels in ((prefix, masks.argmax(1)) for prefix, masks in kinds.items()):
            for name, values in metrics.image_metrics(mask, labels, model.num_slots).items():
                assert [float(rows[i][prefix + name]) for i in chosen] == values.tolist(), name
        mse = (to_float(image) - output.reconstruction).double().square().sum((1, 2, 3))
        assert [float(rows[i]["mse"]) for i in chosen] == pytest.approx(mse.tolist(), rel=1e-6)
        assert [int(rows[i]["num_objects"]) for i in chosen] == [len(set(m.flatten().tolist()) - {0}) for m in mask]


def test_objects_found_by_hand(plain, checkpoint):
    """Every object of the first batch on its own: its mask, what it would show alone, and the masks of all slots."""
    model, scenes = load(checkpoint), Scenes("plain", "test", 16, count=COUNT)
    sample, truths = scenes.describe(np.arange(IMAGE_BATCH_SIZE))
    torch.manual_seed(0)
    with torch.no_grad():
        output = model(sample.image)
    labels = refine_masks(output, sample.image).argmax(1)
    for row, mask, predicted, truth in zip(table(plain), sample.mask, labels, truths, strict=False):
        outcomes = {group: [] for group in GROUPS}
        for entry in truth["objects"]:
            true = mask == entry["id"]
            if not true.any():
                continue
            slots = [predicted == k for k in range(model.num_slots)]
            found = any((true & slot).sum() / (true | slot).sum() > 0.5 for slot in slots)
            percent = 100 * entry["pixels"] / 16**2
            outcomes["small" if percent < 1 else "medium" if percent < 4 else "large"].append(found)
            hidden = 1 - entry["visible"]
            occlusion = "heavily_occluded" if hidden > 0.5 else "partly_occluded" if hidden > 0 else "unoccluded"
            outcomes[occlusion].append(found)
        for group, each in outcomes.items():
            assert int(row[f"num_{group}"]) == len(each), group
            assert row[f"refined_found_{group}"] == (str(sum(each) / len(each)) if each else ""), group


def test_report_shows_the_worst_images_first(plain):
    """Captions are in the order of mBO-i, and those of the first images follow."""
    captions = re.findall(r'<p class="example">(\d{6}): (\d+) of (\d+) objects found, mBO-i ([0-9.]+)', page_of(plain))
    rows = {row["image"]: row for row in table(plain)}
    worst = sorted(rows, key=lambda name: (float(rows[name]["refined_mbo_i"]), name))[:NUM_SHOWN_IMAGES]
    first = sorted(rows)[:NUM_SHOWN_IMAGES]
    assert [name for name, *_ in captions] == worst + first
    for name, found, count, overlap in captions:
        assert int(found) == round(float(rows[name]["refined_found"]) * int(count))
        assert count == rows[name]["num_objects"] and overlap == f"{100 * float(rows[name]['refined_mbo_i']):.1f}"


def test_report_shows_what_was_scored(checkpoint):
    """The model samples its slots: a second run on an image would give other masks."""
    model, data = load(checkpoint), Scenes("plain", "test", 16, count=COUNT)
    gallery = Gallery(2)
    evaluate_model(model, data, make_fabric("cpu"), by_group=True, gallery=gallery)
    for index, shown in gallery.kept.items():
        b, row = divmod(index, IMAGE_BATCH_SIZE)
        image, mask = data.get_batch(np.arange(b * IMAGE_BATCH_SIZE, min((b + 1) * IMAGE_BATCH_SIZE, COUNT)))
        torch.manual_seed(b)
        with torch.no_grad():
            output = model(image)
        assert np.array_equal(shown.decoder[0], output.masks.argmax(1)[row])
        assert np.array_equal(shown.refined[0], refine_masks(output, image).argmax(1)[row])
        assert np.array_equal(shown.image[0], image[row].movedim(0, -1)) and np.array_equal(shown.truth[0], mask[row])


@pytest.mark.parametrize("name", ["masks", "reconstruction"])
def test_outputs_that_are_not_finite(checkpoint, monkeypatch, name):
    model, data = load(checkpoint), Scenes("plain", "test", 16, count=3)
    forward = model.forward
    monkeypatch.setattr(model, "forward", lambda x: (o := forward(x))._replace(**{name: getattr(o, name) * torch.nan}))
    with pytest.raises(ValueError, match=f"returns NaN or infinity in its {name}"):
        evaluate_model(model, data, make_fabric("cpu"))


def test_groups_of_batches_that_are_read_at_once():
    """A GPU reads several batches at once; each is what it would be alone."""
    data = Scenes("plain", "test", 16, count=10)
    batches = [np.arange(0, 4), np.arange(4, 8), np.arange(8, 10)]
    alone = {b: sample for b, sample in read_batches(data, batches, [0, 2], "cpu")}
    groups = list(grouped(data, batches, [0, 2], "cpu", 2))
    assert [b for b, _ in groups] == list(alone) == [0, 2]
    for b, sample in groups:
        assert torch.equal(sample.image, alone[b].image) and torch.equal(sample.mask, alone[b].mask)
        assert torch.equal(sample.visibility.nan_to_num(-1), alone[b].visibility.nan_to_num(-1))
        assert torch.equal(sample.image, data.get_batch(batches[b]).image)


def test_folder_of_scenes_equals_the_scenes(plain, files, checkpoint, tmp_path):
    evaluate(str(checkpoint), (str(files),), tmp_path, "test", None, make_fabric("cpu"))
    assert results(tmp_path)[str(files)] == results(plain)["plain"]
    expected = [row | {"dataset": str(files)} for row in table(plain)]
    assert table(tmp_path) == expected


def test_two_processes_give_the_same_bytes(plain, checkpoint, tmp_path):
    more = ["--num-images", str(COUNT), "--devices", "2"]
    commands = two(command_line(checkpoint, tmp_path / "out", "plain", *more), tmp_path)
    assert [command.end() for command in commands] == [0, 0], "".join(command.said() for command in commands)
    for name in ("results.json", "per_image.csv"):
        assert (tmp_path / "out" / name).read_bytes() == (plain / name).read_bytes(), name
    assert "wrote" in commands[0].said() and "wrote" not in commands[1].said()


def test_several_datasets_and_fewer_images(checkpoint, tmp_path, plain, capsys):
    evaluate(str(checkpoint), ("plain", "camo"), tmp_path, "test", IMAGE_BATCH_SIZE, make_fabric("cpu"))
    assert list(results(tmp_path)) == ["plain", "camo"] and len(table(tmp_path)) == 2 * IMAGE_BATCH_SIZE
    assert table(tmp_path)[:IMAGE_BATCH_SIZE] == table(plain)[:IMAGE_BATCH_SIZE]
    printed = capsys.readouterr().out
    assert "camo" in printed and str(tmp_path / "results.json") in printed


def test_splits(checkpoint, files, tmp_path):
    for split, count in (("test", COUNT), ("val", COUNT // 10), ("train", COUNT - COUNT // 10)):
        evaluate(str(checkpoint), (str(files),), tmp_path / split, split, None, make_fabric("cpu"))
        assert results(tmp_path / split)[str(files)]["num_images"] == count
    names = {split: {row["image"] for row in table(tmp_path / split)} for split in ("test", "val", "train")}
    assert names["val"] | names["train"] == names["test"] and not names["val"] & names["train"]


def test_default_folder_is_next_to_the_checkpoint(checkpoint, tmp_path, monkeypatch):
    shutil.copytree(checkpoint, tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    evaluate("run", ("plain",), None, "val", 2, make_fabric("cpu"))
    evaluate("run/model.safetensors", ("plain",), None, "val", 2, make_fabric("cpu"))
    assert len(table(tmp_path / "run" / "evaluation")) == len(table(tmp_path / "evaluation")) == 2


def test_model_is_not_changed(checkpoint):
    model, scenes, fabric = load(checkpoint), Scenes("plain", "val", 16, count=4), make_fabric("cpu")
    for training in (True, False):
        model.train(training)
        evaluate_model(model, scenes, fabric)
        visualize_images(model, scenes, 2, fabric)
        assert model.training == training and all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("num_images, expected", [(None, 5), (3, 3), (99, 5)])
def test_number_of_images(checkpoint, num_images, expected):
    data = Scenes("plain", "val", 16, count=5)
    assert len(evaluate_model(load(checkpoint), data, make_fabric("cpu"), num_images).rows) == expected


def test_data_without_masks(checkpoint, files, tmp_path, monkeypatch):
    shutil.copytree(files / "images", tmp_path / "data" / "images")
    message = sentence(monkeypatch, command_line(checkpoint, tmp_path / "out", tmp_path / "data"))
    assert message.startswith(f"cutslots: data: {tmp_path / 'data'} contains no masks/")
    assert "cutslots predict" in message
    assert not (tmp_path / "out").exists()


def test_missing_mask(checkpoint, files, tmp_path, monkeypatch):
    for kind in ("images", "masks"):
        (tmp_path / "data" / kind).mkdir(parents=True)
        for name in ("000000.png", "000001.png"):
            shutil.copy(files / kind / name, tmp_path / "data" / kind)
    (tmp_path / "data" / "masks" / "000001.png").unlink()
    message = sentence(monkeypatch, command_line(checkpoint, tmp_path / "out", tmp_path / "data"))
    assert "000001.png is missing" in message


@pytest.mark.parametrize(
    "data, message",
    [
        ("marble", "data is 'marble'; expected one of plain, textured, ood, camo, moving, clevr:DIR"),
        ("plain:5", "data is 'plain:5'; expected numbers of objects as in plain:2-5"),
        ("plain:0-3", "objects is (0, 3); expected a range between 1 and 10"),
        ("/", "/ holds no folder images/"),
    ],
)
def test_unknown_data(checkpoint, tmp_path, monkeypatch, data, message):
    """All datasets are validated before the first one is evaluated."""
    monkeypatch.setattr(evaluation, "evaluate_model", None)
    assert message in sentence(monkeypatch, command_line(checkpoint, tmp_path / "out", "plain", data))
    assert not (tmp_path / "out").exists()


def test_missing_checkpoint(tmp_path, monkeypatch):
    message = sentence(monkeypatch, command_line(tmp_path / "nowhere", tmp_path / "out"))
    assert f"there is no {tmp_path / 'nowhere'}; expected a run folder" in message and not (tmp_path / "out").exists()
    (tmp_path / "empty").mkdir()
    assert "model.safetensors; expected" in sentence(monkeypatch, command_line(tmp_path / "empty", tmp_path / "out"))
    (tmp_path / "model.pt").write_bytes(b"")
    message = sentence(monkeypatch, command_line(tmp_path / "model.pt", tmp_path / "out"))
    assert "pickled checkpoints may run code" in message


@pytest.mark.parametrize(
    "more, message",
    [
        (["--num-images", "0"], "num_images is 0; expected at least 1"),
        (["--num-images", "-2"], "num_images is -2; expected at least 1"),
        (["--devices", "0"], "devices is 0"),
    ],
)
def test_bad_arguments(checkpoint, tmp_path, monkeypatch, more, message):
    assert message in sentence(monkeypatch, command_line(checkpoint, tmp_path / "out", "plain", *more))
    assert not (tmp_path / "out").exists()


def test_folder_that_cannot_be_created(checkpoint, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        message = sentence(monkeypatch, command_line(checkpoint, out, "plain", "--num-images", "2"))
        assert str(tmp_path / "file") in message


def test_folder_is_created_before_the_evaluation(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(evaluation, "evaluate_model", None)
    (tmp_path / "file").write_text("")
    assert str(tmp_path / "file") in sentence(monkeypatch, command_line(checkpoint, tmp_path / "file"))


def test_no_data(checkpoint, tmp_path, monkeypatch):
    assert "data" in sentence(monkeypatch, ["evaluate", str(checkpoint), "--out", str(tmp_path / "out"), "--data"])
