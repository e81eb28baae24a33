"""What a checkpoint was trained on, and whether an image resembles it.

A checkpoint may have a file training_data.json beside its weights: a description of its training data, and limits of
the reconstruction error that 98 % of validation images keep. An image that exceeds one of them is far from the training
data. The reverse does not hold: an image that is reconstructed well may still be of another kind.

Errors are those of blocks of 8x8 pixels. A decoder leaves out the texture of a scene that it has learned, but not its
coarse structure; that of a photograph it does. There are three limits, because different photographs exceed different
ones:

    error             mean over blocks and channels of (x - reconstruction)^2, of means over blocks
    relative error    error / variance of the image's blocks, the mean over channels
    detail error      mean over pixels of (x - reconstruction)^2, less the error: what is lost within blocks
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from cutslots.files import write_json

if TYPE_CHECKING:
    from cutslots.models.discovery import Discovery, ModelOutput

FILE = "training_data.json"
BLOCK = 8  # pixels of the side of a block
QUANTILE = 0.98  # of validation images that keep each limit
MIN_VARIANCE = 1e-4  # of an image, for the relative error: that of a constant image would be infinite
MIN_DETAIL = 1e-6  # features have no detail error, and a limit is not zero


class TrainingData(NamedTuple):
    description: str  # "rendered scenes of ...": what the model is for
    measured_on: str  # the validation images
    max_error: float
    max_relative_error: float
    max_detail_error: float

    def familiarity(self, error: float, variance: float, detail: float = 0.0) -> float:
        """Return 1 for an image like the training data, else by how much its errors are too large, as a factor."""
        relative_error = error / max(variance, MIN_VARIANCE)
        errors = (error, relative_error, detail)
        limits = zip((self.max_error, self.max_relative_error, self.max_detail_error), errors, strict=True)
        return min([1.0, *(limit / value for limit, value in limits if value > limit)])


class Errors(NamedTuple):
    """Errors of reconstructions, each of shape (B,)."""

    error: Tensor  # of blocks
    variance: Tensor  # of the images' blocks
    detail: Tensor  # of pixels, less that of blocks


def reconstruction_errors(reconstruction: Tensor, image: Tensor) -> Errors:
    """Return the errors of reconstructions of images (B, 3, H, W), uint8 or in [0, 1]."""
    pixels = image / 255.0 if image.dtype == torch.uint8 else image
    pixels, reconstruction = pixels.float(), reconstruction.float()
    blocks = _block_means(pixels)
    error = (_block_means(reconstruction) - blocks).square().mean((1, 2, 3))
    detail = (reconstruction - pixels).square().mean((1, 2, 3)) - error
    return Errors(error, blocks.var((2, 3), correction=0).mean(1), detail)


def output_errors(output: ModelOutput, image: Tensor) -> Errors:
    """Return the same of a model's output on images. Of features the errors are those of positions, not of blocks."""
    from cutslots.models.discovery import FeatureOutput

    if not isinstance(output, FeatureOutput):
        return reconstruction_errors(output.reconstruction, image)
    target = output.target.float()
    error = (output.reconstruction.float() - target).square().mean((1, 2, 3))
    return Errors(error, target.var((2, 3), correction=0).mean(1), torch.zeros_like(error))


def _block_means(x: Tensor) -> Tensor:
    return F.avg_pool2d(x, BLOCK, ceil_mode=True, count_include_pad=False)  # blocks at the border may be smaller


@torch.no_grad()
def measure_training_data(
    model: Discovery, batches: Iterable[Tensor], description: str, measured_on: str
) -> TrainingData:
    """Return the limits that 98 % of validation images, in batches (B, 3, H, W), keep."""
    device = next(model.parameters()).device
    found = [output_errors(model(image.to(device)), image.to(device)) for image in batches]
    if not found:
        raise ValueError("batches are empty; expected validation images")
    error, variance, detail = (torch.cat(values) for values in zip(*found, strict=True))
    errors = (error, error / variance.clamp(min=MIN_VARIANCE), detail.clamp(min=MIN_DETAIL))
    return TrainingData(description, measured_on, *(float(values.quantile(QUANTILE)) for values in errors))


def write_training_data(data: TrainingData, folder: Path) -> None:
    """Write training_data.json beside the weights of a checkpoint."""
    write_json(folder / FILE, data._asdict())


def read_training_data(path: Path) -> TrainingData | None:
    """Read training_data.json; None if there is no such file, which is optional."""
    if not path.is_file():
        return None
    try:
        values: dict[str, Any] = json.loads(path.read_text())
        data = TrainingData(**values)
        texts, limits = data[:2], data[2:]
        valid = all(isinstance(text, str) for text in texts) and all(0 < limit < float("inf") for limit in limits)
    except (ValueError, TypeError, RecursionError):
        valid = False
    if not valid:
        fields = ", ".join(TrainingData._fields)
        raise ValueError(f"{path} does not describe training data; expected a JSON object with {fields}")
    return data
