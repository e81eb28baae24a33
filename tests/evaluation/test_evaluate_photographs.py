"""The evaluate command on datasets with classes, ignored pixels and masks of another size than images."""

import csv
import json

import pytest
import torch
from torch.nn.functional import interpolate

from cutslots.data.inspect import inspect
from cutslots.data.open import open_dataset
from cutslots.data.prepare import prepare
from cutslots.devices import make_fabric
from cutslots.evaluation.evaluate import evaluate, evaluate_model
from cutslots.evaluation.metrics import IMAGE_METRICS, class_metrics, image_metrics, video_metrics
from cutslots.evaluation.tracking import TRACK_METRICS
from cutslots.models.checkpoints import save
from cutslots.models.tracker import track_clip
from tests.data.small_photographs import write_coco, write_davis
from tests.evaluation.small_models import small_model


@pytest.fixture(scope="module")
def coco(tmp_path_factory):
    root = tmp_path_factory.mktemp("coco")
    prepare("coco", write_coco(root / "source", {"val": 4}), root / "out", 16, quiet=True)
    return root / "out"


@pytest.fixture(scope="module")
def davis(tmp_path_factory):
    root = tmp_path_factory.mktemp("davis")
    source = write_davis(root / "source", {"train": {"bear": 24}, "val": {"cows": 24}})
    prepare("davis", source, root / "out", 16, quiet=True)
    return root / "out"


def test_images_by_hand(coco):
    """Decoder masks are resized to the size of true masks, and ignored pixels are left out."""
    model, data = small_model("images"), open_dataset(f"coco:{coco}", "val")
    rows = evaluate_model(model, data, make_fabric("cpu"))
    sample, classes = data.get_batch(range(4)), data.get_classes(range(4))
    with torch.no_grad():
        masks = model(sample.image).masks
    labels = interpolate(masks, (320, 320), mode="bilinear").argmax(1)
    expected = image_metrics(sample.mask, labels, masks.shape[1], 255) | class_metrics(classes, labels, 255)
    for i, row in rows.table():
        for name, value in expected.items():
            assert row[name] == pytest.approx(value[i].item(), abs=1e-9, nan_ok=True), name
        assert row["num_objects"] == len(set(sample.mask[i].unique().tolist()) - {0, 255})
    assert rows.table()[3][1]["num_objects"] == 0, "the last image has no objects"
    defined = expected["mbo_c"][:3]
    assert rows.means()["mbo_c"] == pytest.approx(defined.mean().item()) and not defined.isnan().any()


def test_files_of_images(coco, tmp_path, capsys):
    (tmp_path / "checkpoint").mkdir()
    save(small_model("images"), tmp_path / "checkpoint")
    evaluate(str(tmp_path / "checkpoint"), (f"coco:{coco}",), tmp_path / "out", "val", None, make_fabric("cpu"))
    means = json.loads((tmp_path / "out" / "results.json").read_text())["results"][f"coco:{coco}"]
    assert {*IMAGE_METRICS, "mbo_c", "partition_mbo_c", "refined_mbo_i"} <= set(means)
    with (tmp_path / "out" / "per_image.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["mbo_i"] == "" for row in rows] == [False, False, False, True]
    head = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("dataset"))
    assert {"mBO-i", "mBO-c", "CorLoc"} <= set(head.split())
    assert "mBO-c" in (tmp_path / "out" / "report.html").read_text()


def test_videos_by_hand(davis, tmp_path):
    model, data = small_model("pairs"), open_dataset(f"davis:{davis}", "val", videos=True)
    rows = evaluate_model(model, data, make_fabric("cpu"))
    sample = data.get_batch([0])
    with torch.no_grad():
        outputs = track_clip(model, sample.image)
    labels = torch.stack([output.masks.argmax(1) for output in outputs], 1)
    expected = video_metrics(sample.mask, labels, outputs[0].masks.shape[1], 255)
    assert set(TRACK_METRICS) < set(expected) and (sample.mask == 255).any()
    for name, value in expected.items():
        assert rows.table()[0][1][name] == pytest.approx(value.item(), abs=1e-9), name


def test_inspect_counts_objects_without_ignored_pixels(coco, capsys):
    facts = inspect(f"coco:{coco}")
    data = open_dataset(f"coco:{coco}", "val")
    counts = [len(set(data[i].mask.unique().tolist()) - {0, 255}) for i in range(4)]
    assert set(facts) == {"val", "test"}
    assert facts["val"]["objects"] == [counts.count(n) for n in range(max(counts) + 1)]
    assert facts["val"]["labels"][255] > 0
    printed = capsys.readouterr().out
    assert "COCO 2017, 4, 16x16, protocol dinosaur" in printed and "255, ignored" in printed
