"""What features carry. References are NumPy, SciPy and features made of the true masks."""

import types

import numpy as np
import pytest
import torch
from scipy.cluster.vq import kmeans2

from cutslots.data.open import open_dataset
from cutslots.dataset import MemmapDataset, Sample
from cutslots.devices import make_fabric
from cutslots.evaluation.features import (
    Moments,
    cluster_ari_fg,
    effective_rank,
    evaluate_features,
    kmeans,
    normalized,
)


def literal_rank(rows):
    """The effective rank of rows, from their singular values."""
    singular = np.linalg.svd(rows, compute_uv=False)
    shares = singular / singular.sum()
    return float(np.exp(-sum(p * np.log(p) for p in shares if p > 0)))


def test_effective_rank_by_singular_values(rng):
    rows = rng.standard_normal((40, 6)) * np.array([5, 2, 1, 1, 0.1, 0.01])
    moment = torch.from_numpy(rows.T @ rows)
    assert effective_rank(moment) == pytest.approx(literal_rank(rows), rel=1e-6)
    assert effective_rank(100 * moment) == pytest.approx(effective_rank(moment))


def test_effective_rank_of_collapsed_features():
    direction = torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64)
    assert effective_rank(torch.outer(direction, direction)) == pytest.approx(1.0, abs=1e-5)
    assert effective_rank(torch.zeros(3, 3)) == 0.0


def test_ranks_of_images_and_of_positions(rng):
    batches = [torch.from_numpy(rng.standard_normal((n, 5, 2, 3))) for n in (4, 3)]
    moments = Moments()
    for features in batches:
        moments.add(features)
    rows = torch.cat(batches).flatten(2).mT.numpy()
    means = rows.mean(1)
    differences = (rows - means[:, None]).reshape(-1, 5)
    expected = {"image_rank": literal_rank(means), "position_rank": literal_rank(differences)}
    assert moments.ranks() == pytest.approx(expected, rel=1e-6)


def test_normalized_features():
    x = normalized(3 + 2 * torch.randn(2, 64, 4, 5))
    assert x.mean(1).abs().max() < 1e-5 and (x.var(1, correction=0) - 1).abs().max() < 1e-3


# ----------------------------------------------------------------------------------------------------------- clusters


def test_clusters_that_are_far_apart(rng):
    """Each set has its own number of clusters."""
    counts = [1, 3, 5]
    truth = np.stack([np.arange(40) % count for count in counts])
    points = 10 * truth[..., None] + rng.standard_normal((3, 40, 2))
    found = kmeans(torch.from_numpy(points), torch.tensor(counts)).numpy()
    for labels, expected, count in zip(found, truth, counts, strict=True):
        assert len(set(zip(labels, expected, strict=True))) == count == len(set(labels))


def test_clusters_are_as_tight_as_those_of_scipy(rng):
    points = rng.standard_normal((6, 80, 3))
    found = kmeans(torch.from_numpy(points), torch.full((6,), 4)).numpy()

    def error(x, labels):
        return sum(((x[labels == k] - x[labels == k].mean(0)) ** 2).sum() for k in set(labels))

    ours = [error(x, labels) for x, labels in zip(points, found, strict=True)]
    theirs = [error(x, kmeans2(x, 4, minit="++", seed=0)[1]) for x in points]
    assert np.mean(ours) <= 1.02 * np.mean(theirs)


def test_clusters_follow_from_the_seed():
    points = torch.randn(2, 30, 4)
    assert kmeans(points, torch.tensor([3, 4])).equal(kmeans(points, torch.tensor([3, 4])))


def test_equal_points_have_one_cluster():
    assert len(kmeans(torch.ones(1, 9, 2), torch.tensor([3])).unique()) == 1


def scenes():
    mask = torch.zeros(2, 8, 8, dtype=torch.uint8)
    mask[0, :3, :3], mask[0, 5:, 5:] = 1, 2
    mask[1, 2:4], mask[1, 6:] = 4, 9
    return Sample(torch.zeros(2, 3, 8, 8, dtype=torch.uint8), mask)


def test_features_that_are_the_masks_have_a_perfect_score():
    sample = scenes()
    features = torch.nn.functional.one_hot(sample.mask.long(), 10).movedim(-1, 1).float()
    assert cluster_ari_fg(features, sample).tolist() == [1.0, 1.0]
    assert cluster_ari_fg(torch.ones(2, 4, 8, 8), sample).max() <= 0.5


def test_ignored_pixels_do_not_count():
    """They have the features of another object, and are no label for which there is a cluster."""
    sample = scenes()
    wrong = sample.mask.clone()
    wrong[1, 2, :] = 9
    features = torch.nn.functional.one_hot(wrong.long(), 10).movedim(-1, 1).float()
    assert cluster_ari_fg(features, sample)[1] < 0.9
    ignored = sample.mask.where(wrong == sample.mask, 255)
    assert cluster_ari_fg(features, Sample(sample.image, ignored), 255).tolist() == [1.0, 1.0]


def test_features_of_a_dataset():
    """Colors of plain scenes tell their objects apart to some degree."""
    data = open_dataset("plain:2-5", "val", (32, 32), 40)
    fabric = make_fabric("cpu", precision="32-true")
    values = evaluate_features(lambda x: torch.cat([x, 1 - x, x.square()], 1)[..., ::2, ::2], data, fabric)
    assert values.keys() == {"image_rank", "position_rank", "cluster_ari_fg"}
    assert 1 <= values["position_rank"] <= 9 and 0.1 < values["cluster_ari_fg"] < 1


def test_features_of_a_dataset_without_masks():
    data = MemmapDataset(np.zeros((3, 1, 3, 8, 8), np.uint8), np.zeros((3, 1, 8, 8), np.uint8))
    data.has_masks = False
    fabric = types.SimpleNamespace(device=torch.device("cpu"), autocast=lambda: torch.autocast("cpu", enabled=False))
    values = evaluate_features(lambda x: torch.randn(len(x), 5, 4, 4), data, fabric)
    assert values.keys() == {"image_rank", "position_rank"}
