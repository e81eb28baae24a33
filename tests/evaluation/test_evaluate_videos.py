"""The evaluate command on videos: the files it writes, against metrics computed by hand."""

import csv
import json
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from cutslots.data.memory import load_to_memory
from cutslots.devices import make_fabric
from cutslots.evaluation import evaluate as evaluation
from cutslots.evaluation.evaluate import evaluate, evaluate_model
from cutslots.evaluation.labels import video_hard_labels
from cutslots.evaluation.metrics import counted_by, image_metrics, video_metrics
from cutslots.evaluation.tables import METRIC_LABELS
from cutslots.evaluation.visualize import visualize_images, visualize_videos
from cutslots.models.checkpoints import load, save
from cutslots.models.discovery import to_float
from cutslots.models.tracker import track_clip
from cutslots.scenes import Scenes
from tests.evaluation.small_models import KINDS, small_model
from tests.small_runs import sentence, two
from tests.viz.html_page import HTMLPage

ASSOCIATIONS = [
    ("pairs", "area"),
    ("pairs", "learned"),
    ("images", "hungarian"),
    ("spacetime", "overlap"),
]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """A function that returns the folder of an untrained model of a kind."""
    folder, made = tmp_path_factory.mktemp("checkpoints"), {}

    def checkpoint(name):
        if name not in made:
            made[name] = folder / name
            made[name].mkdir()
            save(small_model(name), made[name])
        return made[name]

    return checkpoint


@pytest.fixture(scope="module")
def evaluated(checkpoints, tmp_path_factory):
    """A function that returns the folder that one process writes for a kind of model and two videos."""
    folder, made = tmp_path_factory.mktemp("evaluated"), {}

    def evaluation_of(kind, association=None):
        if (kind, association) not in made:
            out = made[kind, association] = folder / f"{kind}-{association}"
            evaluate(str(checkpoints(kind)), ("moving",), out, "val", 2, make_fabric("cpu"), association)
        return made[kind, association]

    return evaluation_of


def table(out):
    with (out / "per_image.csv").open() as file:
        return list(csv.DictReader(file))


def read_record(out):
    return json.loads((out / "results.json").read_text())


def command_line(checkpoint, out, *more):
    return ["evaluate", str(checkpoint), "--out", str(out), "--accelerator", "cpu", "--split", "val", *more]


@pytest.mark.parametrize("kind", KINDS)
def test_files_that_are_written(kind, evaluated):
    record = read_record(evaluated(kind))
    assert record["association"] == ("overlap" if kind == "spacetime" else "area")
    assert record["results"]["moving"]["num_images"] == 2
    rows = table(evaluated(kind))
    assert [(row["dataset"], row["image"]) for row in rows] == [("moving", "000000"), ("moving", "000001")]
    for name, value in record["results"]["moving"].items():
        if name not in ("split", "num_images") and not counted_by(name):
            assert np.mean([float(row[name]) for row in rows]) == value, name
    assert record["results"]["moving"]["num_objects"] == np.mean(
        [int(row["num_small"]) + int(row["num_medium"]) + int(row["num_large"]) for row in rows]
    )
    page = HTMLPage((evaluated(kind) / "report.html").read_text())
    assert len(page.all("div", **{"class": "player"})) == 2
    assert ("Frames 5 and 20 as a matched pair" in page.text) == (kind in ("pairs", "attention"))
    assert METRIC_LABELS["id_switches"] in page.text and "published on MOVi-A" in page.text
    assert "moving (2 videos)" in page.text


@pytest.mark.parametrize("kind, association", ASSOCIATIONS)
def test_table_by_hand(kind, association, evaluated, checkpoints):
    image, mask = Scenes("moving", "val", 16, count=2).get_batch(range(2))
    model = load(checkpoints(kind))
    if model.spacetime:  # one video at a time
        clips = []
        for b in range(2):
            torch.manual_seed(b)
            clips.append(track_clip(model, image[b : b + 1], association))
        outputs = [type(x)(*map(torch.cat, zip(x, y, strict=True))) for x, y in zip(*clips, strict=True)]
    else:
        torch.manual_seed(0)
        outputs = track_clip(model, image, association)
    prefixes = {"decoder": "", "partition": "partition_", "refined": "refined_"}
    metrics = {
        prefixes[labels_kind] + name: value
        for labels_kind, labels in video_hard_labels(outputs, image).items()
        for name, value in video_metrics(mask, labels, model.num_slots).items()
    }
    reconstruction = torch.stack([output.reconstruction for output in outputs], 1)
    errors = (to_float(image) - reconstruction).double().square().sum((2, 3, 4)).mean(1)
    assert read_record(evaluated(kind, association))["association"] == association
    for b, row in enumerate(table(evaluated(kind, association))):
        assert {name: float(row[name]) for name in metrics} == {name: x[b].item() for name, x in metrics.items()}
        assert float(row["mse"]) == pytest.approx(errors[b].item(), rel=1e-6)
        assert int(row["num_objects"]) == len(set(mask[b].flatten().tolist()) - {0})


def test_two_processes_give_the_same_bytes(checkpoints, evaluated, tmp_path):
    more = ["--data", "moving", "--num-images", "2", "--devices", "2"]
    commands = two(command_line(checkpoints("attention"), tmp_path / "two", *more), tmp_path)
    assert [command.end() for command in commands] == [0, 0], "".join(command.said() for command in commands)
    for name in ("results.json", "per_image.csv"):
        assert (tmp_path / "two" / name).read_bytes() == (evaluated("attention") / name).read_bytes(), name


def test_videos_are_distributed_over_processes(checkpoints, monkeypatch):
    """Two processes find together what one finds alone: the seed is the number of the batch."""
    monkeypatch.setattr(evaluation, "VIDEO_BATCH_SIZE", 1)
    model, data = load(checkpoints("attention")), load_to_memory(Scenes("moving", "val", 16, count=3), quiet=True)
    first, second, alone = (
        evaluate_model(
            model, data, SimpleNamespace(global_rank=rank, world_size=size, device="cpu", autocast=nullcontext)
        ).rows
        for rank, size in ((0, 2), (1, 2), (0, 1))
    )
    assert sorted(first) == [0, 2] and sorted(second) == [1] and first | second == alone


@pytest.mark.parametrize("data", [("plain", "moving"), ("moving", "plain")])
def test_images_and_videos_in_one_table(data, checkpoints, tmp_path):
    evaluate(str(checkpoints("images")), data, tmp_path, "val", 2, make_fabric("cpu"))
    rows = {name: [row for row in table(tmp_path) if row["dataset"] == name] for name in data}
    assert len(rows["plain"]) == len(rows["moving"]) == 2
    assert all(row["id_switches"] and row["frame_ari"] for row in rows["moving"])
    assert not any(row["id_switches"] or row["frame_ari"] for row in rows["plain"])


@pytest.mark.parametrize("kind", ["images", "spacetime"])
def test_association_that_the_model_does_not_have(kind, checkpoints, tmp_path, monkeypatch):
    more = ["--data", "moving", "--num-images", "1", "--association", "learned"]
    message = sentence(monkeypatch, command_line(checkpoints(kind), tmp_path, *more))
    assert message.startswith("cutslots: association is 'learned'; a ")


def test_model_of_clips_needs_videos(checkpoints, tmp_path, monkeypatch):
    more, checkpoint = ["--data", "moving", "plain", "--num-images", "2"], checkpoints("spacetime")
    message = sentence(monkeypatch, command_line(checkpoint, tmp_path / "out", *more))
    assert message.startswith(f"cutslots: data is 'plain', images, but {checkpoint} partitions clips")
    assert not (tmp_path / "out").exists()


def test_model_of_pairs_on_images(checkpoints):
    model, data = load(checkpoints("pairs")).eval(), Scenes("plain", "val", 16, count=2)
    found = evaluate_model(model, data, make_fabric("cpu")).means()
    sample = data.get_batch([0, 1])
    with torch.no_grad():
        labels = model(sample.image).masks.argmax(1)
    expected = image_metrics(sample.mask, labels, model.num_slots)["ari"].mean().item()
    assert found["ari"] == pytest.approx(expected) and "id_switches" not in found


def test_model_is_not_changed(checkpoints):
    model, data, fabric = load(checkpoints("pairs")), Scenes("moving", "val", 16, count=1), make_fabric("cpu")
    for training in (True, False):
        model.train(training)
        evaluate_model(model, data, fabric)
        visualize_videos(model, data, fabric)
        assert model.training == training and all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("kind", ["pairs", "spacetime"])
def test_visualization_of_videos(kind, checkpoints):
    data, fabric, model = Scenes("moving", "val", 16, count=2), make_fabric("cpu"), load(checkpoints(kind))
    image, mask = data.get_batch(range(2))
    shown = visualize_videos(model, data, fabric)
    assert len(shown.videos) == 2 and all(video.shared_labels for video in shown.videos)
    for b, video in enumerate(shown.videos):
        assert np.array_equal(video.image, image[b].movedim(1, -1)) and np.array_equal(video.truth, mask[b])
    assert (shown.pair is not None) == (kind == "pairs")
    if shown.pair:
        assert np.array_equal(shown.pair.image, image[0, [5, 20]].movedim(1, -1))
        with torch.no_grad():
            output = model(image[:1, [5, 20]])
        assert np.array_equal(shown.pair.decoder, output.masks[0].argmax(1)) and shown.pair.refined is None


def test_visualization_of_a_few_frames(checkpoints):
    data, fabric, model = Scenes("moving", "val", 16, count=2), make_fabric("cpu"), load(checkpoints("images"))
    shown = visualize_images(model, data, 4, fabric)
    assert np.array_equal(shown.image, data.get_batch([0]).image[0, [0, 8, 15, 23]].movedim(1, -1))
