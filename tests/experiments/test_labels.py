"""The labels of a teacher, by number."""

import pytest
import torch

from cutslots import Scenes, load
from cutslots.evaluation.metrics import image_metrics
from cutslots.training.teacher import label_images
from experiments import labels
from experiments.labels import evaluate_labels, lost_pixels


def test_they_are_the_labels_of_self_training():
    teacher, scenes = load("tiny-64"), Scenes("plain", "val", 64, num_objects=(2, 5))
    found = evaluate_labels(teacher, scenes, 9, [(0.2, 1.5), (0.05, 0.8)])  # 9: a batch and an image
    image, truth = scenes.get_batch(range(9))
    for (sigma, threshold), row in found.items():
        with torch.no_grad():
            given = label_images(teacher, image, pixel_sigma=sigma, background_threshold=threshold).long()
        metrics = image_metrics(truth, given)
        for name in ("ari_fg", "miou"):
            assert row[name] == pytest.approx(float(metrics[name].mean()), abs=1e-6)
        assert row["lost"] == pytest.approx(float(lost_pixels(truth, given).mean()))


def test_lost_pixels():
    truth, given = torch.zeros(2, 4, 4, dtype=torch.long), torch.full((2, 4, 4), 3)
    truth[0, 1:3, 1:3] = 1
    given[0, 1, 1:3] = 0
    assert lost_pixels(truth, given).tolist() == [0.5, 0.0], "an image without objects loses none"


def test_main_prints_a_row_for_each_pair(capsys):
    labels.main("tiny-64", "plain", 2)
    assert len(capsys.readouterr().out.splitlines()) == 2 + len(labels.PARAMETERS)
