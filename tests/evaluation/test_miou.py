"""mIoU against a restatement of CLEVRTEX's evaluator: masks one by one, no contingency table."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment

from cutslots.evaluation.metrics import image_metrics, video_metrics

NAMES = ("miou", "miou_fg", "miou_gt")


def evaluator(true, predicted, num_masks):
    """Return miou, miou_fg and miou_gt of one image as the evaluator defines them. A division by zero is 1."""
    count = max(int(true.max()) + 1, num_masks)
    true_masks = [true == label for label in range(count)]
    predicted_masks = [predicted == label for label in range(count)]
    iou = torch.zeros(count, count)  # float32
    for t, true_mask in enumerate(true_masks):
        for k, predicted_mask in enumerate(predicted_masks):
            if true_mask.any() and predicted_mask.any():
                iou[t, k] = (true_mask & predicted_mask).float().sum() / (true_mask | predicted_mask).float().sum()
    rows, columns = linear_sum_assignment(iou.numpy(), maximize=True)
    values = iou[rows, columns].double()
    pairs = sum(bool(true_masks[t].any() or predicted_masks[k].any()) for t, k in zip(rows, columns, strict=True))
    divisors = pairs, pairs - 1, sum(bool(mask.any()) for mask in true_masks)
    sums = values.sum(), values[1:].sum(), values.sum()
    return [float(total / divisor) if divisor else 1.0 for total, divisor in zip(sums, divisors, strict=True)]


def label_maps(seed):
    """Return random true and predicted labels of an image, and the number of slots.

    Cells of a grid get labels. A prediction assigns true labels to slots at random, with some noise. Labels and slots
    may be unused, and there may be more true labels than slots.
    """
    rng = np.random.default_rng(seed)
    num_labels, num_masks = rng.integers(1, 13, 2)
    labels = rng.choice(num_labels, rng.integers(1, num_labels + 1), replace=False)
    slots = rng.choice(num_masks, rng.integers(1, num_masks + 1), replace=False)
    true = np.kron(rng.choice(labels, (6, 5)), np.ones((2, 2), dtype=int))
    noise = rng.random(true.shape) < rng.random()
    predicted = np.where(noise, rng.choice(slots, true.shape), rng.choice(slots, num_labels)[true])
    return torch.from_numpy(true), torch.from_numpy(predicted), int(num_masks)


def values(true, predicted, num_masks=None):
    metrics = image_metrics(true[None], predicted[None], num_masks)
    return [metrics[name].item() for name in NAMES]


SEEDS = range(600)


@pytest.mark.parametrize("start", range(0, len(SEEDS), 100))
def test_miou_equals_the_evaluator(start):
    for seed in SEEDS[start : start + 100]:
        true, predicted, num_masks = label_maps(seed)
        assert values(true, predicted, num_masks) == pytest.approx(evaluator(true, predicted, num_masks), abs=1e-6)


def test_label_maps_cover_the_cases():
    maps = [label_maps(seed) for seed in SEEDS]
    assert sum(len(predicted.unique()) < num_masks for _, predicted, num_masks in maps) > 100, "unused slots"
    assert sum(len(true.unique()) > num_masks for true, _, num_masks in maps) > 50, "more true masks than slots"
    assert sum((true == 0).sum() == 0 for true, _, _ in maps) > 100, "no background"
    assert sum(set(true.unique().tolist()) - {0} == {int(true.max())} for true, _, _ in maps) > 50, "one object"
    assert sum(bool(true.max() == 0) for true, _, _ in maps) > 10, "background only"
    assert sum(bool(predicted.min() == predicted.max()) for _, predicted, _ in maps) > 50, "one slot"


def test_images_of_a_batch_are_independent():
    """Images with 12 true labels do not change those with fewer, whatever the number of slots."""
    maps = [label_maps(seed)[:2] for seed in SEEDS[:100]]
    true, predicted = (torch.stack(each) for each in zip(*maps, strict=True))
    for num_masks in (None, 12):
        together = image_metrics(true, predicted, num_masks)
        for b in range(len(maps)):
            assert [together[name][b].item() for name in NAMES] == values(true[b], predicted[b], num_masks)


def test_default_number_of_masks_is_that_of_the_used_labels():
    for seed in SEEDS[:50]:
        true, predicted, _ = label_maps(seed)
        assert values(true, predicted) == values(true, predicted, int(predicted.max()) + 1)


def test_videos_are_one_long_image():
    true, predicted = torch.randint(0, 6, (2, 3, 4, 5, 5), generator=torch.Generator().manual_seed(0))
    metrics = video_metrics(true, predicted, 9)
    for b in range(3):
        expected = evaluator(true[b].flatten(), predicted[b].flatten(), 9)
        assert [metrics[name][b].item() for name in NAMES] == pytest.approx(expected, abs=1e-6)


def test_unmatched_masks_are_paired_in_the_order_of_scipy():
    """Background and object share slot 0, a second slot covers background: IoU 3/5 and two masks that are left over.

    They count as one pair if they have the same position among the masks that are left over, as two otherwise.
    """
    true = torch.tensor([0, 0, 0, 0, 4])
    together, apart = (torch.tensor([0, 0, 0, slot, 0]) for slot in (4, 5))
    assert values(true, together, 5) == pytest.approx([0.6 / 2, 0, 0.6 / 2])
    assert values(true, apart, 6) == pytest.approx([0.6 / 3, 0, 0.6 / 2])


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 5)), min_size=2, max_size=60), st.permutations(range(8)))
@settings(max_examples=50, deadline=None)
def test_miou_gt_does_not_depend_on_the_order_and_number_of_slots(pairs, names):
    true, predicted = torch.tensor(pairs).T
    expected = values(true, predicted, 6)[2]
    assert values(true, torch.tensor(names)[predicted], 8)[2] == pytest.approx(expected, abs=1e-6)


def test_nothing_to_divide_by():
    """One object covers the image. The pair of the background is empty, so miou_fg has a sum and no pair."""
    true, predicted = torch.ones(4, dtype=torch.long), torch.zeros(4, dtype=torch.long)
    assert values(true, predicted, 3) == [1, 1, 1]
    assert values(torch.zeros(4, dtype=torch.long), predicted, 3) == [1, 1, 1]


def test_too_few_masks():
    labels = torch.tensor([[0, 1, 4]])
    for metrics, given_labels in ((image_metrics, labels), (video_metrics, labels[None])):
        with pytest.raises(ValueError, match=r"^a predicted label is 4; expected less than num_masks, 4$"):
            metrics(given_labels, given_labels, 4)
        assert all(math.isfinite(value) for each in metrics(given_labels, given_labels, 5).values() for value in each)
