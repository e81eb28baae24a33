"""The best possible association of slots over time."""

import pytest
import torch

from cutslots import Scenes, load
from cutslots.evaluation.metrics import video_metrics
from cutslots.models.tracker import track_clip
from experiments import association
from experiments.association import association_bounds, bound_of_labels


@pytest.mark.parametrize("one_to_one", [False, True])
def test_labels_may_have_another_name_in_every_frame(rng, one_to_one):
    truth = torch.from_numpy(rng.integers(0, 4, (5, 8, 9)))
    names = torch.stack([torch.from_numpy(rng.permutation(4)) for _ in range(5)])
    renamed = torch.stack([names[t][truth[t]] for t in range(5)])
    assert bound_of_labels(truth, renamed, one_to_one) == 1
    assert video_metrics(truth[None], renamed[None])["ari_fg"] < 0.9


@pytest.mark.parametrize("one_to_one", [False, True])
def test_errors_of_masks_remain(one_to_one):
    truth = torch.tensor([[[0, 1, 1, 1, 2, 2]]] * 2)
    labels = torch.tensor([[[7, 3, 3, 3, 3, 3]], [[7, 5, 5, 5, 6, 6]]])  # one label covers both objects at first
    as_found = torch.tensor([[[0, 1, 1, 1, 1, 1]], [[0, 1, 1, 1, 2, 2]]])
    expected = video_metrics(truth[None], as_found[None])["ari_fg"]
    assert bound_of_labels(truth, labels, one_to_one) == pytest.approx(float(expected)) and expected < 1


def test_two_labels_of_an_object_are_one_only_if_each_is_on_its_own():
    truth = torch.tensor([[[0, 1, 1, 1, 2, 2]]])
    labels = torch.tensor([[[9, 4, 4, 6, 8, 8]]])
    expected = float(video_metrics(truth[None], labels[None])["ari_fg"])
    assert bound_of_labels(truth, labels) == 1 > bound_of_labels(truth, labels, one_to_one=True)
    assert bound_of_labels(truth, labels, one_to_one=True) == pytest.approx(expected)


def test_it_is_at_least_as_good_as_the_associations_of_the_tracker():
    model = load("moving-128")
    image, truth = Scenes("moving", "test", 128, count=1).get_batch([0])
    image, truth = image[:, :6], truth[:, :6]
    one_to_one, each = association_bounds(model, image[0], truth[0])
    for name in ("hungarian", "area"):
        labels = torch.stack([output.masks.argmax(1) for output in track_clip(model, image, name)], 1)
        assert each >= one_to_one > float(video_metrics(truth, labels)["ari_fg"]) - 1e-9, name


def test_main_prints_a_line_for_each_checkpoint(capsys, monkeypatch):
    monkeypatch.setattr(association, "association_bounds", lambda model, video, truth: (0.5, 0.75))
    association.main(("moving-128", "moving-128"), num_videos=2)
    expected = "moving-128: ARI-FG 50.0 one to one, 75.0 each slot on its own, 2 videos\n"
    assert capsys.readouterr().out.count(expected) == 2
