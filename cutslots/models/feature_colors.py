"""Features as colors, for figures: their first three principal components."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from cutslots.models.discovery import FeatureOutput, ModelOutput

RANGE = (0.02, 0.98)  # quantiles of a component that are black and full color


def reconstruction_colors(output: ModelOutput, size: tuple[int, int] | None = None) -> Tensor:
    """Return the reconstruction as colors (..., 3, H, W), about in [0, 1]: itself, or those of features.

    Features are resized to `size`; without it they keep their grid.
    """
    if not isinstance(output, FeatureOutput):
        return output.reconstruction.float()
    return _resized(feature_colors(output.reconstruction, output.target), size)


def target_colors(output: FeatureOutput, size: tuple[int, int] | None = None) -> Tensor:
    """Return the features that are reconstructed as colors, the same for the same features."""
    return _resized(feature_colors(output.target, output.target), size)


def feature_colors(features: Tensor, reference: Tensor) -> Tensor:
    """Return features (..., C, h, w) as colors (..., 3, h, w) in [0, 1].

    The colors are the first three principal components of `reference`, over all of its positions, scaled to its range.

    >>> feature_colors(torch.rand(2, 16, 4, 5), torch.rand(2, 16, 4, 5)).shape
    torch.Size([2, 3, 4, 5])
    """
    rows = _rows(reference)
    mean, axes = rows.mean(0), principal_axes(rows)
    low, high = ((rows - mean) @ axes).quantile(torch.tensor(RANGE, dtype=rows.dtype, device=rows.device), 0)
    colors = ((_rows(features) - mean) @ axes - low) / (high - low).clamp(min=1e-12)
    shape = (*features.shape[:-3], *features.shape[-2:], 3)
    return colors.clamp(0, 1).float().reshape(shape).movedim(-1, -3)


def principal_axes(rows: Tensor) -> Tensor:
    """Return the first three principal axes (C, 3) of rows (n, C), zero where there are fewer.

    The sign of an axis is such that its largest component is positive, so that colors are the same every time.
    """
    vectors = torch.linalg.eigh(rows.T.cov(correction=0).reshape(rows.shape[1], -1)).eigenvectors.flip(1)[:, :3]
    largest = vectors.gather(0, vectors.abs().argmax(0, keepdim=True))
    return F.pad(vectors * largest.sign(), (0, 3 - vectors.shape[1]))


def _rows(features: Tensor) -> Tensor:
    """Return features (..., C, h, w) as rows (n, C) on the CPU: small, and float64 is not on every device."""
    return features.detach().movedim(-3, -1).flatten(0, -2).double().cpu()


def _resized(colors: Tensor, size: tuple[int, int] | None) -> Tensor:
    if size is None:
        return colors
    flat = colors.flatten(0, -4) if colors.ndim > 3 else colors[None]
    return F.interpolate(flat, size, mode="nearest").reshape(*colors.shape[:-2], *size)
