"""Metrics of images against scikit-learn, against brute force, and on cases computed by hand."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import adjusted_rand_score

from cutslots.evaluation.metrics import (
    IMAGE_METRICS,
    MetricRows,
    contingency,
    image_metrics,
    rank_labels,
    squared_error,
)


def values(true, predicted):
    metrics = image_metrics(torch.tensor([true]), torch.tensor([predicted]))
    return {name: value.item() for name, value in metrics.items()}


@pytest.mark.parametrize("seed", range(20))
def test_ari_equals_sklearn(seed):
    rng = np.random.default_rng(seed)
    true = rng.integers(0, rng.integers(1, 12), size=(5, 17, 13))
    noise = rng.random(true.shape) < rng.random()
    predicted = np.where(noise, rng.integers(0, rng.integers(1, 13), true.shape), true)
    ours = image_metrics(torch.from_numpy(true), torch.from_numpy(predicted))
    for b in range(5):
        t, p = true[b].ravel(), predicted[b].ravel()
        assert abs(ours["ari"][b].item() - adjusted_rand_score(t, p)) < 1e-9
        assert abs(ours["ari_fg"][b].item() - adjusted_rand_score(t[t > 0], p[t > 0])) < 1e-9


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=40))
@settings(max_examples=200, deadline=None)
def test_ari_equals_sklearn_on_any_labels(pairs):
    true, predicted = zip(*pairs, strict=True)
    assert abs(values(true, predicted)["ari"] - adjusted_rand_score(true, predicted)) < 1e-9


def test_large_counts_are_exact():
    rng = np.random.default_rng(0)
    true, predicted = rng.integers(0, 11, (2, 1, 1024, 1024))
    ours = image_metrics(torch.from_numpy(true), torch.from_numpy(predicted))["ari"].item()
    assert abs(ours - adjusted_rand_score(true.ravel(), predicted.ravel())) < 1e-9


def largest_iou_sum(true, predicted):
    """Return the largest sum of IoUs over all matchings, by trying every one."""
    count = max(max(true), max(predicted)) + 1
    true, predicted = np.array(true), np.array(predicted)
    iou = np.zeros((count, count))
    for t, k in itertools.product(range(count), repeat=2):
        union = ((true == t) | (predicted == k)).sum()
        iou[t, k] = ((true == t) & (predicted == k)).sum() / union if union else 0
    return max(sum(iou[t, k] for t, k in enumerate(order)) for order in itertools.permutations(range(count)))


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4)), min_size=1, max_size=30))
@settings(max_examples=100, deadline=None)
def test_miou_takes_the_best_matching(pairs):
    true, predicted = zip(*pairs, strict=True)
    assert values(true, predicted)["miou_gt"] * len(set(true)) == pytest.approx(largest_iou_sum(true, predicted))


@pytest.mark.parametrize(
    "case, true, predicted, miou, miou_fg, miou_gt",
    [
        # three true masks, all predicted, with other labels
        ("perfect", [0, 0, 1, 1, 2, 2], [4, 4, 0, 0, 2, 2], 1, 1, 1),
        # one slot covers everything: it matches one of the three masks (IoU 1/3), the two others match empty slots
        ("one slot", [0, 0, 1, 1, 2, 2], [3, 3, 3, 3, 3, 3], (1 / 3) / 3, None, (1 / 3) / 3),
        # the background is split over two slots: the larger matches it (2/3), the extra one matches an empty mask
        ("extra slot", [0, 0, 0, 1], [0, 0, 1, 2], (2 / 3 + 1) / 3, 1 / 2, (2 / 3 + 1) / 2),
        # half of one object is missed: background 2/3, object 1/2
        ("one object", [0, 0, 1, 1], [0, 0, 0, 1], (2 / 3 + 1 / 2) / 2, 1 / 2, (2 / 3 + 1 / 2) / 2),
        # no object, one slot
        ("no object", [0, 0, 0, 0], [2, 2, 2, 2], 1, 1, 1),
        # no object, but half of the image in a second slot, which matches an empty mask
        ("no object, false positive", [0, 0, 0, 0], [0, 0, 1, 1], (1 / 2) / 2, 0, 1 / 2),
        # objects 1 and 2 share a slot, which matches the larger
        ("merged", [0, 0, 1, 2, 2], [0, 0, 1, 1, 1], (1 + 2 / 3) / 3, (2 / 3) / 2, (1 + 2 / 3) / 3),
    ],
)
def test_miou_by_hand(case, true, predicted, miou, miou_fg, miou_gt):
    got = values(true, predicted)
    assert got["miou"] == pytest.approx(miou), case
    assert got["miou_gt"] == pytest.approx(miou_gt), case
    if miou_fg is not None:  # None: the one slot may match any of three equal masks
        assert got["miou_fg"] == pytest.approx(miou_fg), case


def test_degenerate_labels_agree():
    assert values([0, 0, 0], [1, 1, 1])["ari"] == 1
    assert values([0, 0, 0], [0, 1, 2])["ari_fg"] == 1, "no foreground"
    assert values([0, 0, 3], [0, 1, 2])["ari_fg"] == 1, "one pixel of foreground"
    assert values([1, 1, 1, 1], [0, 1, 0, 1])["ari_fg"] == 0, "one object in two pieces"


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 5)), min_size=2, max_size=60), st.permutations(range(6)))
@settings(max_examples=50, deadline=None)
def test_order_of_slots_does_not_matter(pairs, names):
    true, predicted = zip(*pairs, strict=True)
    one, other = values(true, predicted), values(true, [names[k] for k in predicted])
    for name in ("ari", "ari_fg", "miou_gt"):  # for miou see test_miou.py
        assert one[name] == pytest.approx(other[name], abs=1e-6)


def test_contingency_by_hand():
    true, predicted = torch.tensor([[0, 1, 1, 1], [0, 0, 0, 0]]), torch.tensor([[2, 0, 2, 2], [1, 1, 0, 1]])
    table = contingency(true, predicted)
    assert table.tolist() == [[[0, 0, 1], [1, 0, 2]], [[1, 3, 0], [0, 0, 0]]]
    assert table.dtype == torch.int64
    assert torch.equal(contingency(true.to(torch.uint8), predicted.to(torch.int16)), table)


def test_metrics_are_float64():
    labels = torch.zeros(2, 4, dtype=torch.uint8)
    assert all(value.dtype == torch.float64 and value.shape == (2,) for value in image_metrics(labels, labels).values())


def test_ious_are_float32():
    """As the evaluator's: the mean of 2/3 and 1/2 has the error of 2/3."""
    assert values([0, 0, 1, 1], [0, 0, 0, 1])["miou"] == (float(np.float32(2 / 3)) + 0.5) / 2


@pytest.mark.parametrize("num_masks", [None, 0, 5])
@pytest.mark.parametrize("shape", [(0, 4, 4), (2, 0)], ids=["images", "pixels"])
def test_no_images_and_no_pixels(shape, num_masks):
    """Without pixels there is nothing to divide by."""
    nothing = torch.zeros(shape, dtype=torch.long)
    metrics = image_metrics(nothing, nothing, num_masks)
    overlaps = [metrics.pop(name) for name in ("mbo_i", "corloc")]
    assert all(value.isnan().all() and value.shape == shape[:1] for value in overlaps), "of no objects"
    assert {name: value.tolist() for name, value in metrics.items()} == dict.fromkeys(
        IMAGE_METRICS[:5], [1.0] * shape[0]
    )
    table = contingency(nothing, nothing)
    assert table.tolist() == [[[0]]] * shape[0] and table.dtype == torch.int64


@pytest.mark.parametrize("label", [3, 125, 200, 254, 255, 256, 257, 1000])
def test_labels_may_be_unused(label):
    """Half of the object is missed: IoUs of 2/3 for the background and 1/2 for the object, whatever their labels."""
    few, many = torch.tensor([[0, 0, 1, 1], [0, 0, 0, label]])
    for num_masks in (None, label + 1, 2**40):
        metrics = image_metrics(few[None], many[None], num_masks)
        expected = {"miou": 7 / 12, "miou_fg": 1 / 2, "miou_gt": 7 / 12}
        assert {name: metrics[name].item() for name in expected} == pytest.approx(expected), num_masks
    metrics = image_metrics(many[None], few[None], 2)  # the matched pairs are the same
    assert {name: metrics[name].item() for name in expected} == pytest.approx(expected)


def test_squared_error_by_hand():
    image, other = torch.full((2, 2, 3, 2, 2), 0.25)
    other[1, 0, 0, 0], other[1, 2, 1, 1] = 0.75, 1.25
    assert squared_error(image, other).tolist() == squared_error(other, image).tolist() == [0, 1.25]
    assert squared_error(image, other).dtype == torch.float64


def test_means_do_not_depend_on_the_order_of_batches():
    rng = np.random.default_rng(0)
    rows = torch.from_numpy(rng.random(100))
    forward, backward = MetricRows(), MetricRows()
    forward.add(range(100), {"x": rows})
    for i in reversed(range(0, 100, 10)):
        backward.add(range(i, i + 10), {"x": rows[i : i + 10]})
    assert forward.means() == backward.means()
    assert MetricRows().means() == {}


def test_rows_by_hand():
    rows = MetricRows()
    rows.add(torch.tensor([7, 3]), {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([4.0, 8.0])})
    rows.gather()
    assert rows.table() == [(3, {"a": 2.0, "b": 8.0}), (7, {"a": 1.0, "b": 4.0})], "one process has all rows"
    assert rows.means() == {"a": 1.5, "b": 6.0}
    rows.rows.pop(3)
    assert rows.means() == {"a": 1.0, "b": 4.0}


def test_rows_of_all_processes(monkeypatch):
    """Stands in for two processes: each has the rows of one image, and an image may be in both."""
    rows, others = MetricRows(), {1: {"a": 3.0}, 0: {"a": 1.0}}
    rows.add([0], {"a": torch.tensor([1.0])})

    def gather(parts, own):
        assert parts == [None, None]
        parts[:] = [own, others]

    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    rows.gather()
    assert rows.table() == [(0, {"a": 1.0}), (1, {"a": 3.0})]
    assert rows.means() == {"a": 2.0}


def test_bad_labels():
    good = torch.zeros(2, 4, 4, dtype=torch.long)
    with pytest.raises(ValueError, match=r"true has shape \(2, 4, 4\) and predicted \(2, 4\)"):
        image_metrics(good, good[..., 0])
    with pytest.raises(TypeError, match=r"^predicted is of type torch\.float32; expected an integer type$"):
        image_metrics(good, good.float())
    with pytest.raises(TypeError, match=r"^true is of type torch\.bool; expected an integer type$"):
        image_metrics(good.bool(), good)
    with pytest.raises(ValueError, match=r"^true has shape \(4,\) and predicted \(4,\); expected equal \(B, ...\)$"):
        image_metrics(good[0, 0], good[0, 0])
    with pytest.raises(ValueError, match=r"^a label is -3; expected zero or more$"):
        image_metrics(good - 3, good)
    with pytest.raises(ValueError, match="a label is -1"):
        image_metrics(good, good - 1)
    assert contingency(good[:0], good[:0]).shape == (0, 1, 1)
    assert set(image_metrics(good, good)) == set(IMAGE_METRICS)


@pytest.mark.parametrize("largest", [10**6, 2**40, 2**63])
def test_large_labels(largest):
    """Metrics of large labels are those of small ones. A table of all labels up to 10^6 would take terabytes."""
    rng = np.random.default_rng(0)
    names = np.append(0, rng.integers(256, largest - 2, 9))
    names[-1] = largest - 1
    true, predicted = rng.integers(0, 10, (2, 3, 8, 8))
    small = image_metrics(torch.from_numpy(true), torch.from_numpy(predicted), num_masks=256)
    for num_masks in (None, largest + 1):
        ours = image_metrics(torch.from_numpy(names[true]), torch.from_numpy(names[predicted]), num_masks)
        for name in ("ari", "ari_fg", "miou_gt"):
            torch.testing.assert_close(ours[name], small[name], rtol=0, atol=1e-12)
    for b in range(3):
        assert ours["ari"][b].item() == pytest.approx(adjusted_rand_score(true[b].ravel(), predicted[b].ravel()))


def test_large_labels_in_order_have_the_same_miou():
    """The names are sorted, so masks are listed in the same order, and empty ones follow."""
    rng = np.random.default_rng(0)
    for _ in range(50):
        true, predicted = rng.integers(0, 6, (2, 1, 6, 6))
        true[0, 0, :], predicted[0, 1, :] = range(6), range(6)
        names = np.append(0, np.sort(rng.choice(10**6, 5, replace=False)) + 256)
        small = image_metrics(torch.from_numpy(true), torch.from_numpy(predicted), num_masks=256)
        large = image_metrics(torch.from_numpy(names[true]), torch.from_numpy(names[predicted]), num_masks=2**40)
        assert {k: v.item() for k, v in large.items()} == {k: v.item() for k, v in small.items()}


def test_large_labels_do_not_change_other_images():
    true, predicted = torch.randint(0, 6, (2, 2, 10, 10), generator=torch.Generator().manual_seed(0))
    far = true.clone()
    far[1, 0, 0] = 2**40
    together = image_metrics(far, predicted)
    for name, value in image_metrics(true[:1], predicted[:1]).items():
        assert together[name][0] == value[0]


def test_ranks_keep_the_background():
    labels = torch.tensor([[0, 7, 2**40, 7], [300, 5, 5, 300], [0, 1, 255, 2]])
    assert rank_labels(labels).tolist() == [[0, 1, 2, 1], [2, 1, 1, 2], [0, 1, 255, 2]]
    assert torch.equal(rank_labels(labels[2:]), labels[2:])
    assert rank_labels(torch.tensor([[0, 256], [1, 300], [1, 255]])).tolist() == [[0, 1], [1, 2], [1, 255]]


def test_all_pixels_have_their_own_large_label():
    """400 distinct labels: the table has as many rows and columns."""
    true = 10**6 * torch.arange(400).view(1, 20, 20)
    metrics = image_metrics(true, true.flip(1))
    assert all(metrics[name].item() == 1 for name in IMAGE_METRICS)


def test_num_masks_bounds_the_label_of_one_pixel():
    with pytest.raises(ValueError, match=r"^a predicted label is 2; expected less than num_masks, 2$"):
        image_metrics(torch.tensor([[0]]), torch.tensor([[2]]), 2)


def test_num_masks_bounds_large_labels():
    labels = torch.tensor([[0, 2**40]])
    with pytest.raises(ValueError, match=r"a predicted label is 1099511627776; expected less than num_masks, 11"):
        image_metrics(labels, labels, 11)
