"""Losses: what training minimises.

A loss is called with a model's output, the images and the step, and with the labels of a teacher if the run has one. It
returns the value to minimise and the value to log.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d, one_hot

from cutslots.models.discovery import Discovery, DiscoveryOutput, FeatureOutput, to_float
from cutslots.registry import PartConfig, Range, Registry, Steps

MIN_BLUR = 0.3  # pixels; a smaller blur changes nothing
MIN_MASK = 1e-6  # added to a mask in a logarithm


@dataclass(frozen=True)
class LossConfig(PartConfig):
    """Base of the configs of losses."""


LOSSES = Registry("loss", LossConfig)


class LossOutput(NamedTuple):
    loss: Tensor  # minimised
    logged: Tensor  # written to metrics.jsonl as "loss"


class Loss:
    """Base class of losses. Subclasses implement `__call__`."""

    needs_image = True  # False: `image` may be anything, such as cached features in its place
    label_weight: float = 0.0  # of the labels of a teacher; a loss that has some takes `labels` (B, [T,] H, W)

    def validate(self, model: Discovery) -> None:
        """Raise a ValueError if the loss does not fit the model."""

    def __call__(self, output: Any, image: Tensor, step: int) -> LossOutput:
        """Return the loss for the output of images (B, 3, H, W), or clips, at a step.

        The output is a `DiscoveryOutput`, or a `FeatureOutput` if the decoder reconstructs features.
        """
        raise NotImplementedError

    def phase(self, step: int) -> Hashable | None:
        """Return what the operations of `in_phase` depend on at this step; None if they are not for a CUDA graph.

        A loss with the same operations at every step returns a constant.
        """
        return None

    def in_phase(self, output: Any, image: Tensor, step: Tensor, phase: Any) -> LossOutput:
        """Return the loss at any step of a phase. A CUDA graph of it is captured and replayed: `step` is a tensor."""
        return self(output, image, step)  # type: ignore[arg-type]


@dataclass(frozen=True)
class MSEConfig(LossConfig):
    blur: Annotated[float, Range(0, 2048)] = 0.0
    """Standard deviation in pixels of a blur of the reconstruction error, which decays to zero; 0 for none."""
    blur_steps: Steps = 0
    """Steps over which the blur decays, linearly."""
    foreground_penalty: Annotated[float, Range(0, 65_536)] = 0.0
    """Penalty for each pixel not assigned to slot 0, in units of squared error; 0 for none (the paper)."""
    foreground_penalty_start: Steps = 0
    """Step at which the penalty sets in; it rises linearly over as many steps again."""
    mask_consistency: Annotated[float, Range(0, 65_536)] = 0.0
    """Weight of the cross-entropy of the slot module's masks given those of the decoder; 0 for none (the paper)."""
    mask_consistency_start: Steps = 0
    """Step at which this term sets in; it rises linearly over as many steps again."""
    label_weight: Annotated[float, Range(0, 65_536)] = 0.0
    """Weight of the cross-entropy of all masks given the labels of a teacher (--teacher); 0 for none."""
    label_background_weight: Annotated[float, Range(0, 65_536)] = 1.0
    """Factor on the weight of background pixels, those of the largest label, in this term. Below 1, masks of objects
    are wider."""
    label_tracks: bool = False
    """Labels of videos are tracks: the teacher's slots are associated over time, and a label goes to one slot for all
    frames of a clip. Otherwise every frame is labelled on its own. For models of clips."""


@LOSSES.register("mse", MSEConfig)
class MSELoss(Loss):
    """Mean squared error of the reconstruction, optionally blurred at first, and three optional terms.

    A blur that decays favours objects over texture. The penalty on foreground pixels leaves the background to slot 0.
    Mask consistency teaches the slot module the decoder's masks, which follow objects more closely than its own. Labels
    of a teacher teach both. The plain mean squared error is logged.
    """

    def __init__(
        self,
        blur: float = 0.0,
        blur_steps: int = 0,
        foreground_penalty: float = 0.0,
        foreground_penalty_start: int = 0,
        mask_consistency: float = 0.0,
        mask_consistency_start: int = 0,
        label_weight: float = 0.0,
        label_background_weight: float = 1.0,
        label_tracks: bool = False,
    ) -> None:
        self.blur, self.blur_steps = blur, blur_steps
        self.foreground_penalty, self.foreground_penalty_start = foreground_penalty, foreground_penalty_start
        self.mask_consistency, self.mask_consistency_start = mask_consistency, mask_consistency_start
        self.label_weight, self.label_tracks = label_weight, label_tracks
        self.label_background_weight = label_background_weight

    def validate(self, model: Discovery) -> None:
        if model.reconstructs_features:
            raise ValueError(
                "loss is mse, which compares a reconstruction with the image, but the decoder reconstructs features; "
                "expected --loss feature-mse"
            )
        if self.foreground_penalty and not model.slots.has_background:
            given = f"loss.foreground_penalty is {self.foreground_penalty}"
            raise ValueError(f"{given}, but no slot of this model is the background; expected 0")
        if self.blur > min(model.image_size):
            raise ValueError(f"loss.blur is {self.blur}; expected at most the image size, {min(model.image_size)}")

    def __call__(self, output: DiscoveryOutput, image: Tensor, step: int, labels: Tensor | None = None) -> LossOutput:
        # A tensor here too: a division by a number rounds differently on CUDA.
        number = torch.full((), step, device=output.reconstruction.device)
        return self.in_phase(output, image, number, self.phase(step), labels)

    def phase(self, step: int) -> int:
        """Return the radius of the blur in pixels."""
        return blur_radius(self.sigma_at(step))

    def in_phase(
        self, output: DiscoveryOutput, image: Tensor, step: Tensor, phase: int, labels: Tensor | None = None
    ) -> LossOutput:
        difference = output.reconstruction - to_float(image)
        error = difference.square().mean()
        blurred = gaussian_blur(difference, self.sigma_at(step), phase).square().mean()
        foreground = (1 - output.masks.select(-3, 0)).mean()
        loss = blurred + self.penalty_at(step) * foreground
        if self.mask_consistency:
            weight = self.mask_consistency * _rise(step, self.mask_consistency_start)
            loss = loss + weight * mask_cross_entropy(output.partition_masks, output.masks)
        if labels is not None:
            term = label_cross_entropy(output, labels, self.label_background_weight, self.label_tracks)
            loss = loss + self.label_weight * term
        return LossOutput(loss, error)

    def sigma_at(self, step: int | Tensor) -> Any:
        """Return the standard deviation of the blur: it decays linearly to zero."""
        return self.blur * _clip(1 - step / max(self.blur_steps, 1))

    def penalty_at(self, step: int | Tensor) -> Any:
        """Return the penalty on a foreground pixel: zero at first, so that objects form; then it rises linearly."""
        return self.foreground_penalty * _rise(step, self.foreground_penalty_start)


@dataclass(frozen=True)
class FeatureMSEConfig(LossConfig):
    pass


@LOSSES.register("feature-mse", FeatureMSEConfig)
class FeatureMSELoss(Loss):
    """Mean squared error of reconstructed features, for decoders of features."""

    needs_image = False

    def validate(self, model: Discovery) -> None:
        if not model.reconstructs_features:
            raise ValueError(
                "loss is feature-mse, but the decoder reconstructs the image; expected --loss mse, "
                "or a decoder of features: --decoder mlp"
            )

    def __call__(self, output: FeatureOutput, image: Tensor, step: int) -> LossOutput:
        error = (output.reconstruction - output.target).square().mean()
        return LossOutput(error, error)

    def phase(self, step: int) -> int:
        return 0


def mask_cross_entropy(masks: Tensor, target: Tensor) -> Tensor:
    """Return the cross-entropy of masks (..., K, h, w) given others (..., K, H, W), which get no gradient."""
    height, width = masks.shape[-2:]
    target = adaptive_avg_pool2d(target.detach().float().flatten(0, -4), (height, width))
    log_masks = (masks.float() + MIN_MASK).log().flatten(0, -4)
    return -(target * log_masks).sum(-3).mean()


def label_cross_entropy(
    output: DiscoveryOutput, labels: Tensor, background_weight: float = 1.0, tracks: bool = False
) -> Tensor:
    """Return the cross-entropy of the masks of decoder and slot module, added, given labels (B, [T,] H, W).

    Labels are slots of another model: each goes to the slot whose mask it overlaps most, in every frame on its own, or
    with `tracks` in all frames of a clip together. A pixel weighs in inverse proportion to the square root of the area
    of its label, so that a large background does not outweigh objects, and one of the background, label 0, times
    `background_weight`. Labels of K or more, K being the number of slots, are left out.
    """
    masks, partition_masks = (x.flatten(0, -4) for x in (output.masks, output.partition_masks))
    K = masks.shape[1]
    target = one_hot(labels.flatten(0, -3).long().clamp(max=K), K + 1)[..., :K].movedim(-1, 1).float()
    area = target.mean((2, 3), keepdim=True)
    weight = (target * area.clamp(min=1e-6).rsqrt()).sum(1, keepdim=True)
    weight = weight * (1 + (background_weight - 1) * target[:, :1])
    T = labels.shape[1] if tracks and labels.ndim == 4 else 1
    label = match_labels(_join_frames(target, T), _join_frames(masks, T)).repeat_interleave(T, 0)
    target = target.gather(1, label[:, :, None, None].expand_as(target))
    target = target * (weight / weight.mean((2, 3), keepdim=True).clamp(min=1e-6))
    return mask_cross_entropy(masks, target) + mask_cross_entropy(partition_masks, target)


def _join_frames(masks: Tensor, T: int) -> Tensor:
    """Return masks (B T, K, H, W) of clips with their frames below each other, (B, K, T H, W)."""
    return masks.unflatten(0, (-1, T)).transpose(1, 2).flatten(2, 3)


@torch.no_grad()
def match_labels(target: Tensor, masks: Tensor) -> Tensor:
    """Return the label (B, K) of each slot, from the masks (B, K, H, W) of labels and slots.

    The pair with the largest IoU is matched first, then the largest one of the labels and slots that are left.
    """
    a, b = target.flatten(2).float(), masks.flatten(2).float()
    overlap = a @ b.mT
    iou = overlap / (a.sum(2)[:, :, None] + b.sum(2)[:, None] - overlap).clamp(min=1e-6)
    B, K, _ = iou.shape
    matched = torch.zeros_like(iou)
    for _ in range(K):
        pair = one_hot(iou.flatten(1).argmax(1), K * K).view(B, K, K)
        matched = matched + pair
        taken = (pair.sum(1, keepdim=True) + pair.sum(2, keepdim=True)) > 0
        iou = iou.masked_fill(taken, -1)
    return matched.argmax(1)


def _rise(step: int | Tensor, start: int) -> Any:
    """Return 0 before a step, then a linear rise to 1 over as many steps again."""
    return _clip((step + 1 - start) / max(start, 1))


def _clip(x: float | Tensor) -> Any:
    return x.clamp(0, 1) if isinstance(x, Tensor) else min(1.0, max(0.0, x))


def blur_radius(sigma: float) -> int:
    """Return the radius at which a Gaussian is truncated; 0 if it is too small to change anything."""
    return math.ceil(3 * sigma) if sigma >= MIN_BLUR else 0


def gaussian_blur(x: Tensor, sigma: Any, radius: int | None = None) -> Tensor:
    """Return images (..., H, W) blurred by a Gaussian, truncated at three sigma, with borders replicated.

    `sigma` is a number, or a tensor together with the radius.
    """
    radius = blur_radius(sigma) if radius is None else radius
    if not radius:
        return x
    offsets = torch.arange(-radius, radius + 1, device=x.device, dtype=x.dtype)
    weights = torch.exp(-0.5 * (offsets / sigma) ** 2)
    rows, columns = (_filter_matrix(weights / weights.sum(), size) for size in x.shape[-2:])
    return rows @ x @ columns.mT


def _filter_matrix(weights: Tensor, size: int) -> Tensor:
    """Return the matrix (size, size) of a filter with replicated borders.

    Unlike that of padding, the gradient of a product adds in one order on CUDA.
    """
    if size == 1:
        return torch.ones(1, 1, device=weights.device, dtype=weights.dtype)
    radius = len(weights) // 2
    shift = torch.arange(size + 2 * radius, device=weights.device) - torch.arange(size, device=weights.device)[:, None]
    padded = torch.where((shift >= 0) & (shift <= 2 * radius), weights[shift.clamp(0, 2 * radius)], 0)
    left, right = padded[:, : radius + 1], padded[:, radius + size - 1 :]
    inner = padded[:, radius + 1 : radius + size - 1]
    return torch.cat([left.sum(1, keepdim=True), inner, right.sum(1, keepdim=True)], 1)
