"""Contingency tables that are counted on the device, against those of metrics.py."""

import numpy as np
import pytest
import torch

from cutslots.evaluation import counting
from cutslots.evaluation.counting import HostCopy, Tables, can_count, count_labels, wait_for_tables
from cutslots.evaluation.metrics import image_metrics, image_table_metrics, video_metrics, video_table_metrics
from tests.conftest import DEVICES

SLOTS = 6


def random_labels(rng, *shape, top=9):
    true = rng.integers(0, top, shape).astype(np.uint8)
    true[rng.random(shape) < 0.4] = 0
    true[rng.random(shape) < 0.1] = 255
    return torch.from_numpy(true), torch.from_numpy(rng.integers(0, SLOTS - 1, shape))


def tables_of(true, predicted, ignore_label, per_frame, device="cpu"):
    counts = count_labels(true.to(device), predicted.to(device), SLOTS, ignore_label, per_frame)
    return Tables.trim(counts.cpu(), int(predicted.max()) + 1, SLOTS)


def same(one, other):
    return all(np.array_equal(one[name], other[name], equal_nan=True) for name in one | other)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("ignore_label", [None, 255, 0, 3])
def test_tables_of_images(rng, device, ignore_label):
    true, predicted = random_labels(rng, 7, 12, 10)
    ours = tables_of(true, predicted, ignore_label, False, device)
    expected = wait_for_tables(true, predicted, SLOTS, ignore_label, False)
    assert torch.equal(ours.counts, expected.counts) and np.array_equal(ours.num_masks, expected.num_masks)
    assert same(image_table_metrics(*ours), image_metrics(true, predicted, SLOTS, ignore_label))


@pytest.mark.parametrize("ignore_label", [None, 255])
def test_tables_of_frames(rng, ignore_label):
    true, predicted = random_labels(rng, 3, 4, 12, 10)
    ours = tables_of(true, predicted, ignore_label, True)
    expected = wait_for_tables(true, predicted, SLOTS, ignore_label, True)
    assert torch.equal(ours.counts, expected.counts) and np.array_equal(ours.num_masks, expected.num_masks)
    assert same(video_table_metrics(*ours), video_metrics(true, predicted, SLOTS, ignore_label))


def test_image_of_ignored_pixels_only(rng):
    true, predicted = torch.full((2, 4, 4), 255, dtype=torch.uint8), torch.zeros(2, 4, 4, dtype=torch.long)
    ours = tables_of(true, predicted, 255, False)
    assert ours.counts.tolist() == [[[0]], [[0]]] and ours.num_masks.tolist() == [SLOTS, SLOTS]
    assert same(image_table_metrics(*ours), image_metrics(true, predicted, SLOTS, 255))


@pytest.mark.parametrize("with_ignored", [False, True])
def test_counting_without_waiting(rng, with_ignored):
    """What runs on a GPU counts the same on a CPU."""
    cell = torch.from_numpy(rng.integers(0, 50, 1000))
    counted = torch.from_numpy(rng.random(1000) < 0.7) if with_ignored else None
    assert torch.equal(counting._count_without_waiting(cell, counted, 60), counting._count(cell, counted, 60))


def test_labels_that_need_another_table():
    labels = torch.zeros(1, 2, 2, dtype=torch.uint8)
    assert can_count(labels, 256) and not can_count(labels, 257) and not can_count(labels.long(), 6)
    assert not can_count(labels[:0], 6)


@pytest.mark.parametrize("device", DEVICES)
def test_copies_arrive(device):
    x = torch.arange(5, device=device)
    arrived = HostCopy({"x": x, "y": x.double() / 2}).wait()
    assert arrived["x"].tolist() == [0, 1, 2, 3, 4] and arrived["y"].tolist() == [0, 0.5, 1, 1.5, 2]
    assert all(value.device.type == "cpu" for value in arrived.values())
