"""Visualizations: what a model finds in a few images or videos, as arrays that grids and report pages show.

Shapes: B images, T frames, K slots, H W image.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from cutslots.dataset import Dataset, Sample, masks_to_show
from cutslots.evaluation.labels import hard_labels, video_hard_labels
from cutslots.evaluation.metrics import contingency
from cutslots.models.discovery import Discovery, FeatureOutput, ModelOutput, map_output, to_float
from cutslots.models.feature_colors import reconstruction_colors, target_colors
from cutslots.models.tracker import track_clip
from cutslots.viz.images import blend_colors, image_grid, to_uint8
from cutslots.viz.palette import PALETTE

if TYPE_CHECKING:
    from lightning_fabric import Fabric

NUM_SHOWN_IMAGES = 8  # in a report
NUM_SHOWN_VIDEOS = 3
DISTANT_FRAMES = (5, 20)  # the pair of frames that the paper matches in its figures


class Visualization(NamedTuple):
    """What a model finds in B images, as uint8 arrays on the CPU."""

    image: np.ndarray  # (B, H, W, 3)
    truth: np.ndarray  # (B, H, W): true labels, all zero if unknown
    reconstruction: np.ndarray  # (B, H, W, 3); principal components if features are reconstructed
    decoder: np.ndarray  # (B, H, W): slot of each pixel by the decoder masks
    partition: np.ndarray  # (B, H, W): by the partition masks
    slots: np.ndarray  # (B, K, H, W, 3): each slot reconstruction, white outside its mask
    refined: np.ndarray | None = None  # (B, H, W): by the refined masks, where there are any
    features: np.ndarray | None = None  # (B, H, W, 3): principal components of the features, if these are reconstructed
    shared_labels: bool = False  # whether a label means the same slot in all images, as in the frames of a video

    @classmethod
    def from_output(
        cls, sample: Sample, output: ModelOutput, labels: dict[str, Tensor], shared_labels: bool = False
    ) -> Visualization:
        """Return the visualization of a model's output on a sample, with labels from `hard_labels`."""
        image, masks = to_float(sample.image), output.masks[:, :, None].float()
        slots = None if isinstance(output, FeatureOutput) else output.slot_reconstructions
        content = image[:, None] if slots is None else slots.float()
        size = (image.shape[-2], image.shape[-1])
        maps = {kind: value.cpu().numpy().astype(np.uint8) for kind, value in labels.items()}
        return cls(
            image=to_uint8(image),
            truth=sample.mask.cpu().numpy(),
            reconstruction=to_uint8(reconstruction_colors(output, size)),
            decoder=maps["decoder"],
            partition=maps["partition"],
            slots=to_uint8(content * masks + (1 - masks)),
            refined=maps.get("refined"),
            features=to_uint8(target_colors(output, size)) if isinstance(output, FeatureOutput) else None,
            shared_labels=shared_labels,
        )

    def panels(self, i: int) -> dict[str, np.ndarray]:
        """Return the panels (H, W, 3) of one image by their captions."""
        image = self.image[i]
        panels = {"image": image} | ({} if self.features is None else {"features": self.features[i]})
        panels["reconstruction"] = self.reconstruction[i]
        if self.truth[i].any():
            panels["ground truth"] = blend_colors(image, PALETTE[self.truth[i]])
        panels["decoder masks"] = blend_colors(image, self.colors(self.decoder, i))
        if self.refined is not None:
            panels["refined masks"] = blend_colors(image, self.colors(self.refined, i))
        panels["partition masks"] = blend_colors(image, self.colors(self.partition, i))
        return panels | {f"slot {k + 1}": slot for k, slot in enumerate(self.slots[i])}

    def colors(self, labels: np.ndarray, i: int) -> np.ndarray:
        """Return colors (H, W, 3) of image i of labels (B, H, W). A label has the color of the object it covers."""
        truth, all_labels = (self.truth, labels) if self.shared_labels else (self.truth[i], labels[i])
        return PALETTE[palette_indices(all_labels, truth if truth.any() else None)[labels[i]]]

    def select(self, rows: Sequence[int] | np.ndarray) -> Visualization:
        """Return some of the images."""
        chosen: Any = np.asarray(rows)
        arrays = {name: value for name, value in self._asdict().items() if isinstance(value, np.ndarray)}
        return self._replace(**{name: value[chosen] for name, value in arrays.items()})

    def subsample(self, count: int) -> Visualization:
        """Return at most `count` of the images, evenly spaced."""
        return self.select(np.linspace(0, len(self.image) - 1, min(count, len(self.image))).round().astype(int))


class VideoVisualization(NamedTuple):
    """What a model finds in videos, and in a pair of distant frames if it is a model that matches pairs."""

    videos: list[Visualization]
    pair: Visualization | None = None


@torch.no_grad()
def visualize_images(model: Discovery, data: Dataset, count: int, fabric: Fabric) -> Visualization:
    """Return the visualization of the first `count` images, or of `count` frames of the first video."""
    if data.frames > 1:
        return visualize_videos(model, data, fabric, 1).videos[0].subsample(count)
    sample = masks_to_show(data.get_batch(np.arange(min(count, len(data))), fabric.device), data.ignore_label)
    was_training = model.training
    model.eval()
    torch.manual_seed(0)  # Slot Attention samples its initial slots
    with fabric.autocast():
        output = model(sample.image)
    model.train(was_training)
    return Visualization.from_output(sample, output, hard_labels(output, sample.image))


@torch.no_grad()
def visualize_videos(
    model: Discovery,
    data: Dataset,
    fabric: Fabric,
    count: int = NUM_SHOWN_VIDEOS,
    association: str | None = None,
) -> VideoVisualization:
    """Return the visualization of the first `count` videos, with tracked slots, and of a pair of distant frames."""
    sample = masks_to_show(data.get_batch(np.arange(min(count, len(data))), fabric.device), data.ignore_label)
    was_training = model.training
    model.eval()
    torch.manual_seed(0)  # Slot Attention samples its initial slots
    with fabric.autocast():
        videos = _tracked_videos(model, sample, association)
        pair = _matched_pair(model, sample)
    model.train(was_training)
    return VideoVisualization(videos, pair)


def _tracked_videos(model: Discovery, sample: Sample, association: str | None) -> list[Visualization]:
    outputs = track_clip(model, sample.image, association)
    return _video_visualizations(sample, outputs, video_hard_labels(outputs, sample.image))


def _video_visualizations(sample: Sample, outputs: list[ModelOutput], labels: dict[str, Tensor]) -> list[Visualization]:
    videos = []
    for b in range(len(sample.image)):
        frames = _video_output(outputs, b)
        video_labels = {kind: value[b] for kind, value in labels.items()}
        video = Sample(sample.image[b], sample.mask[b])
        videos.append(Visualization.from_output(video, frames, video_labels, shared_labels=True))
    return videos


def visualize_image_rows(
    sample: Sample, output: ModelOutput, labels: dict[str, Tensor], rows: list[int]
) -> list[Visualization]:
    """Return the visualizations of some images of an evaluated batch, one for each.

    `sample` is from `masks_to_show`, and `labels` are those of `hard_labels`.
    """
    if not rows:
        return []
    sample, output = Sample(*(x[rows] for x in sample)), map_output(lambda x: x[rows], output)
    if _have_size_of(sample.image, labels):
        labels = {kind: value[rows] for kind, value in labels.items()}
    else:  # they were compared at the size of the true masks
        labels = hard_labels(output, sample.image)
    shown = Visualization.from_output(sample, output, labels)
    return [shown.select([i]) for i in range(len(rows))]


def visualize_video_rows(
    sample: Sample, outputs: list[ModelOutput], labels: dict[str, Tensor], rows: list[int]
) -> list[Visualization]:
    """Return the visualizations of some videos of an evaluated batch, like `visualize_image_rows`."""
    if not rows:
        return []
    sample, outputs = Sample(*(x[rows] for x in sample)), [map_output(lambda x: x[rows], each) for each in outputs]
    if _have_size_of(sample.image, labels):
        labels = {kind: value[rows] for kind, value in labels.items()}
    else:
        labels = video_hard_labels(outputs, sample.image)
    return _video_visualizations(sample, outputs, labels)


def _have_size_of(image: Tensor, labels: dict[str, Tensor]) -> bool:
    return all(value.shape[-2:] == image.shape[-2:] for value in labels.values())


@torch.no_grad()
def visualize_pair(model: Discovery, data: Dataset, index: int, fabric: Fabric) -> Visualization | None:
    """Return two distant frames of a video, decoded as one pair; None if the model does not match pairs."""
    if "learned" not in model.associations:
        return None
    sample = masks_to_show(data.get_batch([index], fabric.device), data.ignore_label)
    was_training = model.training
    model.eval()
    torch.manual_seed(0)  # Slot Attention samples its initial slots
    with fabric.autocast():
        pair = _matched_pair(model, sample)
    model.train(was_training)
    return pair


def _video_output(outputs: list[ModelOutput], b: int) -> ModelOutput:
    """Return the outputs for the frames of video b as one, with a frame axis in place of the batch."""
    return map_output(lambda *frames: torch.stack([x[b] for x in frames]), *outputs)


def _matched_pair(model: Discovery, sample: Sample) -> Visualization | None:
    """Return two distant frames of the first video, decoded as one pair, if the model matches pairs."""
    if "learned" not in model.associations or sample.image.shape[1] <= max(DISTANT_FRAMES):
        return None
    frames = Sample(*(x[0, list(DISTANT_FRAMES)] for x in sample))
    output = map_output(lambda x: x[0], model(frames.image[None]))
    return Visualization.from_output(frames, output, hard_labels(output), shared_labels=True)


def visualization_grid(visualization: Visualization) -> Image.Image:
    """Return all panels as one image, a row for each image."""
    return image_grid([list(visualization.panels(i).values()) for i in range(len(visualization.image))])


def colorize(labels: np.ndarray, truth: np.ndarray | None = None) -> np.ndarray:
    """Return colors (..., 3) of labels. Given true labels, a label has the color of the object that it covers."""
    return PALETTE[palette_indices(labels, truth)[labels]]


def palette_indices(labels: np.ndarray, truth: np.ndarray | None = None) -> np.ndarray:
    """Return the palette index of each label 0, 1, ...

    Without true labels, label k has index k + 1. With them, labels and objects are matched one to one by overlap: a
    matched label has the index of its object, and the others have indices that no object has.
    """
    count = int(labels.max()) + 1
    if truth is None:
        return np.arange(1, count + 1)
    from scipy.optimize import linear_sum_assignment  # slow to import

    table = contingency(torch.from_numpy(truth)[None], torch.from_numpy(labels)[None])[0].numpy()
    rows, cols = linear_sum_assignment(table / (table.sum(1, keepdims=True) + table.sum(0) + 1), maximize=True)
    matched = table[rows, cols] > 0
    free = np.setdiff1d(np.arange(1, len(PALETTE)), np.unique(truth))
    indices = free[np.arange(count) % len(free)]
    indices[cols[matched]] = rows[matched]
    return indices
