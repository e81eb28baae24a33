"""Objectives of `cutslots pretrain`: what an encoder learns from images without labels.

    simclr    the views of one image are alike, those of different images are not (Chen et al., 2020). With
              z the projected means of features of 2 B views, at a temperature t,
                  loss = mean_i -log( exp(z_i z_j / t) / sum_{k != i} exp(z_i z_k / t) ),    j the other view of i
    simmim    pixels of masked patches are predicted from the others (Xie et al., 2022):
                  loss = mean over masked pixels of | prediction - image |

Both take any encoder that returns a feature map. An objective holds the layers that only pre-training needs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cutslots.modules.base import PartModule, Positive, check_size, to_channels_last, upcast_half
from cutslots.modules.encoders import Encoder
from cutslots.registry import PartConfig, Range, Registry
from cutslots.training.augment import ViewAugmentation, augment_view, crop_and_flip

Probability = Annotated[float, Range(0, 1)]


@dataclass(frozen=True)
class ObjectiveConfig(PartConfig):
    """Base of the configs of objectives."""


OBJECTIVES = Registry("objective", ObjectiveConfig)


class ObjectiveOutput(NamedTuple):
    loss: Tensor  # minimised and logged
    metrics: dict[str, Tensor]  # logged for validation images


class Objective(PartModule):
    """Base class of objectives. Subclasses implement `forward`.

    They are built with `feature_channels` and `feature_size` of the encoder, and `image_size`.
    """

    min_images: int = 1  # of a batch in each process

    def forward(self, encoder: Encoder, image: Tensor) -> ObjectiveOutput:
        """Return the loss of an encoder on images (B, 3, H, W) with values in [0, 1]."""
        raise NotImplementedError


@dataclass(frozen=True)
class SimCLRConfig(ObjectiveConfig):
    temperature: Positive = 0.2
    """Temperature of the softmax over images. Smaller values separate images that are alike."""
    hidden_dim: Annotated[int, Range(1, 65_536)] = 512
    """Hidden dimension of the projection, which is not part of the encoder."""
    projection_dim: Annotated[int, Range(1, 65_536)] = 128
    """Dimension in which views are compared."""
    min_crop: Annotated[float, Range(1e-4, 1)] = 0.2
    """Augmentation: smallest area of a crop, relative to the image."""
    jitter: Probability = 0.8
    """Augmentation: strength of changes of brightness, contrast, saturation and hue; 0 for none."""
    grayscale: Probability = 0.2
    """Augmentation: share of views without color."""
    blur: Probability = 0.5
    """Augmentation: share of views that are blurred."""


@OBJECTIVES.register("simclr", SimCLRConfig)
class SimCLR(Objective):
    """Contrastive: views of one image are alike, those of different images are not.

    Images are compared with those of the same process.
    """

    min_images = 2

    def __init__(
        self,
        feature_channels: int,
        feature_size: Sequence[int],
        image_size: Sequence[int],
        temperature: float = 0.2,
        hidden_dim: int = 512,
        projection_dim: int = 128,
        min_crop: float = 0.2,
        jitter: float = 0.8,
        grayscale: float = 0.2,
        blur: float = 0.5,
    ) -> None:
        super().__init__()
        self.temperature, self.strength = temperature, ViewAugmentation(min_crop, jitter, grayscale, blur)
        layers = (nn.Linear(feature_channels, hidden_dim), nn.ReLU(), nn.Linear(hidden_dim, projection_dim))
        self.projection = nn.Sequential(*layers)

    def forward(self, encoder: Encoder, image: Tensor) -> ObjectiveOutput:
        views = torch.cat([augment_view(image, self.strength) for _ in range(2)])
        features = encoder(to_channels_last(encoder.normalize(views)))
        return nt_xent(self.projection(features.mean((2, 3))), self.temperature)


def nt_xent(z: Tensor, temperature: float) -> ObjectiveOutput:
    """Return the contrastive loss of projections (2 B, D), first those of one view of every image, then of the other.

    The accuracy is the share of views whose most similar view is the other one of the same image. Similarities are
    float32, also under autocast.

    >>> nt_xent(torch.eye(4).repeat(2, 1), 0.1).metrics["accuracy"].item()
    1.0
    """
    with torch.autocast(z.device.type, enabled=False):
        z = F.normalize(upcast_half(z), dim=1)
        logits = z @ z.mT / temperature
    logits = logits.masked_fill(torch.eye(len(z), dtype=torch.bool, device=z.device), -torch.inf)
    other = torch.arange(len(z), device=z.device).roll(len(z) // 2)
    accuracy = (logits.argmax(1) == other).float().mean()
    return ObjectiveOutput(F.cross_entropy(logits, other), {"accuracy": accuracy})


@dataclass(frozen=True)
class SimMIMConfig(ObjectiveConfig):
    mask_ratio: Annotated[float, Range(0.01, 0.99)] = 0.6
    """Share of the patches that are masked."""
    mask_size: Annotated[int, Range(1, 1024)] = 16
    """Height and width of masked patches, in pixels."""
    min_crop: Annotated[float, Range(1e-4, 1)] = 0.2
    """Augmentation: smallest area of a crop, relative to the image."""


@OBJECTIVES.register("simmim", SimMIMConfig)
class SimMIM(Objective):
    """Masked: pixels of masked patches are predicted from the others."""

    def __init__(
        self,
        feature_channels: int,
        feature_size: Sequence[int],
        image_size: Sequence[int],
        mask_ratio: float = 0.6,
        mask_size: int = 16,
        min_crop: float = 0.2,
    ) -> None:
        super().__init__()
        self.image_size, self.mask_ratio, self.mask_size = check_size(image_size), mask_ratio, mask_size
        self.grid = tuple(math.ceil(n / mask_size) for n in self.image_size)
        self.num_masked = round(mask_ratio * self.grid[0] * self.grid[1])
        if not 0 < self.num_masked < self.grid[0] * self.grid[1]:
            raise ValueError(
                f"objective.mask_size is {mask_size}, which gives {self.grid[0]}x{self.grid[1]} patches, of which "
                f"{self.num_masked} would be masked; expected a smaller one"
            )
        self.min_crop = min_crop
        strides = tuple(math.ceil(n / m) for n, m in zip(self.image_size, feature_size, strict=True))
        if strides[0] != strides[1]:
            given = f"the features of images of {self.image_size} are {tuple(feature_size)}"
            raise ValueError(f"objective is simmim, but {given}; expected an encoder with one stride for both sides")
        self.stride = strides[0]
        self.mask_token = nn.Parameter(torch.zeros(3))
        self.prediction = nn.Conv2d(feature_channels, 3 * self.stride**2, 1)

    def forward(self, encoder: Encoder, image: Tensor) -> ObjectiveOutput:
        view = crop_and_flip(image, self.min_crop)
        masked = self.random_mask(view)
        seen = torch.where(masked, self.mask_token.to(view.dtype)[:, None, None], encoder.normalize(view))
        error = (upcast_half(self.predict(encoder(to_channels_last(seen)))) - view).abs()
        return ObjectiveOutput((error * masked).sum() / (3 * masked.sum()), {})

    def random_mask(self, image: Tensor) -> Tensor:
        """Return which pixels (B, 1, H, W) are masked: as many patches of every image."""
        order = torch.rand(image.shape[0], self.grid[0] * self.grid[1], device=image.device).argsort(1).argsort(1)
        patches = (order < self.num_masked).unflatten(1, self.grid)
        for axis in (1, 2):
            patches = patches.repeat_interleave(self.mask_size, axis)
        return patches[:, None, : self.image_size[0], : self.image_size[1]]

    def predict(self, features: Tensor) -> Tensor:
        """Return predicted images (B, 3, H, W): each position predicts its block of pixels."""
        pixels = F.pixel_shuffle(self.prediction(features), self.stride)
        return pixels[..., : self.image_size[0], : self.image_size[1]]
