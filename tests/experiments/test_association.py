"""Associations of slots over time, those of `Tracker` and by the true masks."""

import json
from pathlib import Path

import pytest
import torch

from cutslots import Scenes, load
from cutslots.evaluation.metrics import video_metrics
from cutslots.models.tracker import track_clip
from experiments import association
from experiments.association import ari_fg_by_true_masks, video_scores
from experiments.study import marks


@pytest.mark.parametrize("one_to_one", [False, True])
def test_labels_may_have_another_name_in_every_frame(rng, one_to_one):
    truth = torch.from_numpy(rng.integers(0, 4, (5, 8, 9)))
    names = torch.stack([torch.from_numpy(rng.permutation(4)) for _ in range(5)])
    renamed = torch.stack([names[t][truth[t]] for t in range(5)])
    assert ari_fg_by_true_masks(truth, renamed, one_to_one) == 1
    assert video_metrics(truth[None], renamed[None])["ari_fg"] < 0.9


@pytest.mark.parametrize("one_to_one", [False, True])
def test_errors_of_masks_remain(one_to_one):
    truth = torch.tensor([[[0, 1, 1, 1, 2, 2]]] * 2)
    labels = torch.tensor([[[7, 3, 3, 3, 3, 3]], [[7, 5, 5, 5, 6, 6]]])  # one label covers both objects at first
    as_found = torch.tensor([[[0, 1, 1, 1, 1, 1]], [[0, 1, 1, 1, 2, 2]]])
    expected = video_metrics(truth[None], as_found[None])["ari_fg"]
    assert ari_fg_by_true_masks(truth, labels, one_to_one) == pytest.approx(float(expected)) and expected < 1


def test_two_labels_of_an_object_are_one_only_many_to_one():
    truth = torch.tensor([[[0, 1, 1, 1, 2, 2]]])
    labels = torch.tensor([[[9, 4, 4, 6, 8, 8]]])
    expected = float(video_metrics(truth[None], labels[None])["ari_fg"])
    assert ari_fg_by_true_masks(truth, labels) == 1 > ari_fg_by_true_masks(truth, labels, one_to_one=True)
    assert ari_fg_by_true_masks(truth, labels, one_to_one=True) == pytest.approx(expected)


def test_a_label_is_not_named_after_an_object_that_it_does_not_cover():
    """One to one, objects have labels 3 and 6. In the first frame label 6 covers only a pixel of the first object."""
    truth = torch.tensor([[[1, 1, 1, 1, 1, 1, 2, 2]]] * 2)
    labels = torch.tensor([[[3, 3, 3, 3, 3, 6, 3, 3]], [[3, 3, 3, 3, 3, 3, 6, 6]]])
    as_found = torch.tensor([[[1, 1, 1, 1, 1, 5, 1, 1]], [[1, 1, 1, 1, 1, 1, 2, 2]]])
    expected, named = (float(video_metrics(truth[None], each[None])["ari_fg"]) for each in (as_found, labels))
    assert ari_fg_by_true_masks(truth, labels, one_to_one=True) == pytest.approx(expected) != pytest.approx(named)


def test_scores_are_those_of_the_metrics_of_videos():
    model = load("moving-128")
    image, truth = Scenes("moving", "test", 128, count=1).get_batch([0])
    image, truth = image[:, :6], truth[:, :6]
    found = video_scores(model, image[0], truth[0])
    for name in model.associations:
        labels = torch.stack([output.masks.argmax(1) for output in track_clip(model, image, name)], 1)
        assert found[name] == pytest.approx(float(video_metrics(truth, labels)["ari_fg"])), name
        assert found["many_to_one"] >= found["one_to_one"] > found[name] - 1e-9, name
    assert found["learned_ahead"] == found["learned"] - found["hungarian"]


@pytest.mark.parametrize(
    "checkpoint, num_videos, message",
    [("tiny-64", 2, "tiny-64 has no learned matching"), ("moving-128", 1, "--num-videos is 1")],
)
def test_what_cannot_be_evaluated_is_named(tmp_path, checkpoint, num_videos, message):
    with pytest.raises(SystemExit, match=message):
        association.main((checkpoint,), num_videos, tmp_path)
    assert not any(tmp_path.iterdir())


def test_main_writes_the_record_and_the_table(tmp_path, monkeypatch):
    values = iter([0.25, 0.75, 0.5, 0.5])
    monkeypatch.setattr(association, "video_scores", lambda *_: dict.fromkeys(association.COLUMNS, next(values)))
    page = tmp_path / "matching.md"
    page.write_text("before\n<!-- associations -->\nold\n<!-- end of associations -->\nafter\n")
    for name in ("moving-128", "moving-paper-128"):  # the second keeps the first in the record
        association.main((name,), num_videos=2, docs=tmp_path)
    lines = page.read_text().splitlines()
    assert lines[0] == "before" and lines[-1] == "after" and "old" not in lines
    assert lines[4:6] == [
        "| `moving-128` | 11 | 2 |" + " 50.0 ± 25.0 |" * 6,
        "| `moving-paper-128` | 8 | 2 |" + " 50.0 ± 0.0 |" * 6,
    ]
    record = json.loads((tmp_path / "association.json").read_text())["moving-128, 2 videos"]
    assert record["ari_fg"]["area"] == [0.5, 0.25] and record["num_videos"] == 2


def test_page_in_the_repository_is_that_of_its_record():
    docs = Path(__file__).parents[2] / "docs"
    results = json.loads((docs / "association.json").read_text())
    start, end = marks("associations")
    assert start + association.table(results) + end in (docs / "matching.md").read_text()
