"""What features carry, before any slots: their effective rank, and the ARI-FG of their clusters.

    effective rank    exp of the entropy of the normalised singular values (Roy and Vetterli, 2007; RankMe, Garrido et
                      al., 2023). Of n alike directions it is n; features that have collapsed to one direction have 1
    clusters          k-means of the features of one image, with as many clusters as the image has labels. Features
                      that tell objects apart have clusters like the true masks

Features are normalised at each position as the encoder `pretrained` does it, with its default options.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from cutslots.dataset import Dataset, Sample
from cutslots.evaluation.metrics import MetricRows, image_metrics

if TYPE_CHECKING:
    from lightning_fabric import Fabric

BATCH_SIZE = 32
NUM_RESTARTS, NUM_ITERATIONS = 3, 20  # of k-means


@torch.no_grad()
def evaluate_features(encoder: Any, data: Dataset, fabric: Fabric) -> dict[str, float]:
    """Return the effective rank of the features of images and of positions, and, with masks, the ARI-FG of clusters.

    `image_rank` is that of the mean features of images. `position_rank` is that of features minus the mean of their
    image: the directions in which positions of one image differ. `encoder` maps images in [0, 1] to features. Every
    process evaluates all images.
    """
    rows, moments = MetricRows(), Moments()
    for i in range(0, len(data), BATCH_SIZE):
        indices = np.arange(i, min(i + BATCH_SIZE, len(data)))
        sample = data.get_batch(indices, fabric.device)
        with fabric.autocast():
            features = normalized(encoder(sample.image / 255.0))
        moments.add(features)
        if data.has_masks:
            rows.add(indices, {"cluster_ari_fg": cluster_ari_fg(features, sample, data.ignore_label)})
    return moments.ranks() | rows.means()


def normalized(features: Tensor) -> Tensor:
    """Return features (B, C, h, w) with mean 0 and variance 1 over the channels of each position, float32."""
    return F.layer_norm(features.float().movedim(1, -1), features.shape[1:2]).movedim(-1, 1)


class Moments:
    """Second moments of features over images: of their means, and of the differences from these."""

    def __init__(self) -> None:
        self.images: Any = 0.0
        self.positions: Any = 0.0

    def add(self, features: Tensor) -> None:
        rows = features.flatten(2).mT.cpu().double()  # (B, N, C)
        means = rows.mean(1)
        self.images = self.images + means.mT @ means
        differences = (rows - means[:, None]).flatten(0, 1)
        self.positions = self.positions + differences.mT @ differences

    def ranks(self) -> dict[str, float]:
        return {"image_rank": effective_rank(self.images), "position_rank": effective_rank(self.positions)}


def effective_rank(moment: Tensor) -> float:
    """Return the effective rank of rows x with second moments (C, C), the sum of x x^T; 0 if all rows are zero.

    >>> round(effective_rank(torch.eye(5)), 6)
    5.0
    """
    singular = torch.linalg.eigvalsh(moment).clamp(min=0).sqrt()
    if singular.sum() == 0:
        return 0.0
    shares = singular / singular.sum()
    return float(torch.exp(-torch.xlogy(shares, shares).sum()))


# ----------------------------------------------------------------------------------------------------------- clusters


def cluster_ari_fg(features: Tensor, sample: Sample, ignore_label: int | None = None) -> Tensor:
    """Return the ARI-FG (B,) of k-means clusters of features (B, C, h, w) against the masks of a sample."""
    true = sample.mask
    seen = true if ignore_label is None else true.where(true != ignore_label, 0)
    num_labels = torch.tensor([len(mask.unique()) for mask in seen])
    clusters = kmeans(features.flatten(2).mT, num_labels).view(-1, 1, *features.shape[2:])
    labels = F.interpolate(clusters.float(), true.shape[-2:], mode="nearest")[:, 0].long()
    return image_metrics(true, labels, ignore_label=ignore_label)["ari_fg"]


def kmeans(points: Tensor, num_clusters: Tensor, seed: int = 0) -> Tensor:
    """Return the cluster (B, N) of points (B, N, C), of which each set has its own number of clusters (B,).

    The best of a few restarts by k-means++ counts. The random numbers follow from `seed`.

    >>> points = torch.tensor([[[0.0], [0.1], [5.0], [5.2]]])
    >>> labels = kmeans(points, torch.tensor([2]))[0]
    >>> (labels == labels[0]).tolist()
    [True, True, False, False]
    """
    num_clusters = num_clusters.to(points.device)
    generator = torch.Generator().manual_seed(seed)
    best, labels = None, None
    for _ in range(NUM_RESTARTS):
        random = torch.rand(int(num_clusters.max()), len(points), generator=generator).to(points)
        found, error = _lloyd(points, _initial_centers(points, random), num_clusters)
        better = error < best if best is not None else torch.ones_like(error, dtype=torch.bool)
        labels = found if labels is None else torch.where(better[:, None], found, labels)
        best = error if best is None else torch.minimum(error, best)
    assert labels is not None
    return labels


def _initial_centers(points: Tensor, random: Tensor) -> Tensor:
    """Return centers (B, K, C): points, sampled with a probability that grows with the distance from earlier ones."""
    B, N, _ = points.shape
    rows = torch.arange(B, device=points.device)
    centers = [points[rows, (random[0] * N).long().clamp(max=N - 1)]]
    distances = points.new_full((B, N), torch.inf)
    for uniform in random[1:]:
        distances = torch.minimum(distances, (points - centers[-1][:, None]).square().sum(-1))
        cumulated = distances.cumsum(1)
        chosen = torch.searchsorted(cumulated, (uniform * cumulated[:, -1])[:, None])[:, 0]
        centers.append(points[rows, chosen.clamp(max=N - 1)])
    return torch.stack(centers, 1)


def _lloyd(points: Tensor, centers: Tensor, num_clusters: Tensor) -> tuple[Tensor, Tensor]:
    """Return clusters (B, N) and summed squared distances (B,) after some iterations from these centers."""
    unused = torch.arange(centers.shape[1], device=points.device) >= num_clusters[:, None]
    for _ in range(NUM_ITERATIONS):
        assigned = F.one_hot(_nearest(points, centers, unused)[0], centers.shape[1]).to(points.dtype)
        sizes = assigned.sum(1)[..., None]
        centers = torch.where(sizes > 0, assigned.mT @ points / sizes.clamp(min=1), centers)
    labels, distances = _nearest(points, centers, unused)
    return labels, distances.sum(1)


def _nearest(points: Tensor, centers: Tensor, unused: Tensor) -> tuple[Tensor, Tensor]:
    distances = torch.cdist(points, centers).square().masked_fill(unused[:, None], torch.inf)
    smallest, labels = distances.min(2)
    return labels, smallest
