"""Objects found by size and by occlusion, against single masks."""

import numpy as np
import pytest
import torch

from cutslots.evaluation.metrics import MetricRows, contingency, counted_by
from cutslots.evaluation.objects import (
    GROUPS,
    OCCLUSIONS,
    SIZES,
    count_objects,
    found_objects,
    object_areas,
    object_groups,
)

VOID = 255


def literal(true, predicted, visibility=None):
    """Return the objects of one image, pixels of VOID left out: a list of (found, names of groups)."""
    num_pixels, counted = true.size, true != VOID
    true, predicted = true[counted], predicted[counted]
    objects = []
    for label in sorted(set(true.tolist()) - {0}):
        mask = true == label
        ious = [(mask & (predicted == k)).sum() / (mask | (predicted == k)).sum() for k in set(predicted.tolist())]
        assert sum(iou > 0.5 for iou in ious) <= 1, "at most one mask is this similar"
        area = mask.sum() / num_pixels
        groups = ["small" if area < 0.01 else "medium" if area < 0.04 else "large"]
        if visibility is not None:
            v = visibility[label - 1]
            groups.append("unoccluded" if v == 1 else "partly_occluded" if v >= 0.5 else "heavily_occluded")
        objects.append((any(iou > 0.5 for iou in ious), groups))
    return objects


def random_labels(rng, count, side=20, labels=12):
    """Return true and predicted labels (B, side, side): patches of many sizes, predicted with some noise."""
    true = np.zeros((count, side, side), dtype=np.uint8)
    for image in true:
        for label in range(1, labels):
            y, x, h, w = *rng.integers(0, side, 2), *rng.integers(1, 8, 2)
            image[y : y + h, x : x + w] = label
    noisy = np.where(rng.random(true.shape) < 0.25, rng.integers(0, labels, true.shape), true)
    return true, noisy.astype(np.int64)


@pytest.mark.parametrize("ignored", [False, True])
def test_objects_found_one_by_one(rng, ignored):
    true, predicted = random_labels(rng, 30)
    visibility = rng.choice([0.2, 0.5, 0.75, 1.0], (30, 11))
    if ignored:
        true[rng.random(true.shape) < 0.2] = VOID
    counted = torch.from_numpy(true != VOID)
    table = contingency(torch.from_numpy(true).where(counted, 0), torch.from_numpy(predicted), counted)
    groups = object_groups(object_areas(table, 400), torch.from_numpy(visibility))
    columns = count_objects(groups) | found_objects(table, groups)
    rows = MetricRows()
    rows.add(range(30), columns)
    expected = [literal(*image) for image in zip(true, predicted, visibility, strict=True)]
    for row, objects in zip((row for _, row in rows.table()), expected, strict=True):
        for group in (None, *GROUPS):
            chosen = [found for found, names in objects if group is None or group in names]
            assert row[f"num_{group or 'objects'}"] == len(chosen)
            value = row[f"found_{group}" if group else "found"]
            assert value == sum(chosen) / len(chosen) if chosen else np.isnan(value)
    for group in GROUPS:
        pooled = [found for objects in expected for found, names in objects if group in names]
        assert len(pooled) > 4 and rows.means()[f"found_{group}"] == sum(pooled) / len(pooled), group


@pytest.mark.parametrize("pixels, size", [(99, "small"), (100, "medium"), (399, "medium"), (400, "large")])
def test_bounds_of_sizes(pixels, size):
    table = torch.tensor([[[10_000 - pixels, 0], [0, pixels]]])
    groups = object_groups(object_areas(table, 10_000))
    assert [name for name in SIZES if groups[name].item()] == [size] and not OCCLUSIONS.keys() & groups.keys()


@pytest.mark.parametrize(
    "visible, occlusion",
    [(1.0, "unoccluded"), (0.999, "partly_occluded"), (0.5, "partly_occluded"), (0.499, "heavily_occluded")],
)
def test_bounds_of_occlusions(visible, occlusion):
    groups = object_groups(torch.tensor([[0.1]]), torch.tensor([[visible]]))
    assert [name for name in OCCLUSIONS if groups[name].item()] == [occlusion]


def test_objects_of_unknown_visibility_are_in_no_group_of_occlusion():
    groups = object_groups(torch.tensor([[0.1, 0.1, 0.1, 0.0]]), torch.tensor([[torch.nan, 1.0]]))
    assert groups["objects"].tolist() == [[True, True, True, False]]
    assert {name: groups[name].sum().item() for name in OCCLUSIONS} == dict(zip(OCCLUSIONS, (1, 0, 0), strict=True))


def test_iou_of_exactly_one_half_is_not_found():
    true, predicted = torch.tensor([[1, 1, 0, 0]]), torch.tensor([[1, 0, 0, 0]])
    table = contingency(true, predicted)
    assert found_objects(table, object_groups(object_areas(table, 4)))["found"].item() == 0
    table = contingency(true, true)
    assert found_objects(table, object_groups(object_areas(table, 4)))["found"].item() == 1


def test_size_in_a_video_is_the_mean_over_frames_with_pixels():
    frames = torch.zeros(1, 3, 3, 2, dtype=torch.long)
    frames[0, :, 0, 0], frames[0, 0, 1, 1], frames[0, 1, 1, 1] = 80, 10, 30
    assert object_areas(frames, 100).tolist() == [[0.2, 0.0]]


def test_images_without_objects_do_not_count():
    rows = MetricRows()
    rows.add([0, 1], {"num_objects": torch.tensor([0, 3]), "found": torch.tensor([torch.nan, 1 / 3])})
    assert rows.means() == {"num_objects": 1.5, "found": 1 / 3}


def test_fractions_are_pooled_over_objects():
    rows = MetricRows()
    columns = {"num_small": torch.tensor([1, 9]), "refined_found_small": torch.tensor([1.0, 1 / 3]).double()}
    rows.add([0, 1], columns)
    assert rows.means()["refined_found_small"] == 4 / 10 and counted_by("refined_found_small") == "num_small"
