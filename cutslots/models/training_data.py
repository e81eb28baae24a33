"""What a checkpoint was trained on, and whether an image resembles it.

A checkpoint may have a file training_data.json beside its weights: a description of its training data and the largest
reconstruction errors on validation images. An image that is reconstructed worse is far from the training data. The
reverse does not hold: an image that is reconstructed well may still be of another kind.

Two errors are compared, because photographs exceed sometimes the one, sometimes the other:

    error             mean over pixels and channels of (x - reconstruction)^2
    relative error    error / variance of the image, the mean over channels
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from cutslots.files import write_json

if TYPE_CHECKING:
    from cutslots.models.discovery import Discovery

FILE = "training_data.json"
MIN_VARIANCE = 1e-4  # of an image, for the relative error: that of a constant image would be infinite


class TrainingData(NamedTuple):
    description: str  # "rendered scenes of ...": what the model is for
    measured_on: str  # the validation images
    max_error: float
    max_relative_error: float

    def familiarity(self, error: float, variance: float) -> float:
        """Return 1 for an image like the training data, else by how much its errors are too large, as a factor."""
        relative_error = error / max(variance, MIN_VARIANCE)
        limits = ((self.max_error, error), (self.max_relative_error, relative_error))
        return min(1.0, *(limit / value for limit, value in limits if value > limit))


def reconstruction_errors(reconstruction: Tensor, image: Tensor) -> tuple[Tensor, Tensor]:
    """Return the errors (B,) of reconstructions of images (B, 3, H, W), uint8 or in [0, 1], and variances (B,)."""
    pixels = image / 255.0 if image.dtype == torch.uint8 else image
    variance = pixels.float().var((2, 3), correction=0).mean(1)
    return (reconstruction.float() - pixels.float()).square().mean((1, 2, 3)), variance


@torch.no_grad()
def measure_training_data(
    model: Discovery, batches: Iterable[Tensor], description: str, measured_on: str
) -> TrainingData:
    """Return the largest errors of a model on batches of validation images (B, 3, H, W)."""
    device = next(model.parameters()).device
    errors, relative_errors = [], []
    for image in batches:
        error, variance = reconstruction_errors(model(image.to(device)).reconstruction, image.to(device))
        errors.append(error.max())
        relative_errors.append((error / variance.clamp(min=MIN_VARIANCE)).max())
    if not errors:
        raise ValueError("batches are empty; expected validation images")
    largest = (float(torch.stack(values).max()) for values in (errors, relative_errors))
    return TrainingData(description, measured_on, *largest)


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
