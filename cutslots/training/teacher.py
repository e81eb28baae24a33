"""Labels of a teacher: self-training on refined masks.

Refined masks are better than the masks that they are made from. With `teacher` a run starts by labelling its training
images with the refined masks of a checkpoint, and the loss teaches the model these labels (`label_weight`). Errors
differ from image to image, so that the model can get better than its teacher; then it can be the next teacher.

`LabeledImages` returns images (B, 4, H, W): the fourth channel is the label of each pixel. The loader flips and crops
it with the image. Labels are numbered from the largest to the smallest of an image: label 0 is the background, and a
model with fewer slots than its teacher leaves the smallest out. Frames of videos are labelled one by one, and a label
may be another object in each frame. With `label_tracks` videos are tracked first: labels are numbered in the whole
video, and a label is one object in all frames. With `cache_dir` labels are written to a file, for other runs:

    CACHE_DIR/labels-KEY.npz    "labels", (N, H, W) uint8; KEY depends on the images and on `label_request`
"""

from __future__ import annotations

import hashlib
import inspect
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from lightning_fabric import Fabric
from torch import Tensor
from torch.nn.functional import avg_pool2d, one_hot

import cutslots
from cutslots.data.builtin import TexturedSceneConfig
from cutslots.data.memory import fits_in_memory
from cutslots.data.video import VideoFrames
from cutslots.dataset import Dataset, Indices, Sample, VideoDataset, check_indices
from cutslots.files import errors_name_path, locked, progress, write_atomically
from cutslots.models.checkpoints import checkpoint_file, load
from cutslots.models.discovery import Discovery, check_finite
from cutslots.models.refinement import DEFAULTS, can_refine, refine_masks
from cutslots.models.tracker import Tracker
from cutslots.training.augment import MAX_LABELS
from cutslots.training.config import RunConfig
from cutslots.training.losses import Loss

FORMAT = 3  # raised when labels change: older ones in cache folders are made again
IMAGES_PER_BATCH = {"cuda": 256}  # labelled at once; 16 on other devices
VIDEOS_PER_BATCH = {"cuda": 64}  # 1 on other devices


class LabeledImages(VideoDataset):
    """Images, or videos, with the labels (N, [T,] H, W) of a teacher as a fourth channel: (B, [T,] 4, H, W) uint8.

    Masks are empty.
    """

    has_masks = False

    def __init__(self, data: Dataset, labels: Tensor) -> None:
        self.data, self.labels, self.image_size, self.frames = data, labels, data.image_size, data.frames

    def __len__(self) -> int:
        return len(self.data)

    def get_batch(self, indices: Indices, device: torch.device | str = "cpu") -> Sample:
        return self._with_labels(self.data.get_batch(indices, device).image, check_indices(indices, len(self)))

    def get_frames(self, videos: Indices, frames: Indices, device: torch.device | str = "cpu") -> Sample:
        at = check_indices(videos, len(self)), check_indices(frames, self.frames)
        image = cast(VideoDataset, self.data).get_frames(videos, frames, device).image
        return self._with_labels(image, *at[: self.labels.ndim - 2])

    def _with_labels(self, image: Tensor, *indices: np.ndarray) -> Sample:
        at = tuple(torch.from_numpy(each) for each in indices)
        if self.labels.is_cuda:
            at = tuple(each.pin_memory().to(self.labels.device, non_blocking=True) for each in at)
        labels = self.labels[at].to(image.device).unsqueeze(-3)
        no_masks = torch.zeros(*image.shape[:-3], 0, 0, dtype=torch.uint8, device=image.device)
        return Sample(torch.cat([image, labels], -3), no_masks)


def split_labels(image: Tensor) -> tuple[Tensor, Tensor]:
    """Return the images (B, [T,] 3, H, W) and the labels (B, [T,] H, W) of a batch of `LabeledImages`."""
    return image[..., :3, :, :], image[..., 3, :, :]


def with_labels(
    data: Dataset, config: RunConfig, fabric: Fabric, title: str, fingerprint: str | None, seen: Dataset | None = None
) -> Dataset:
    """Return the images, or videos, with the labels of the run's teacher; without a teacher, as they are.

    The teacher sees the images, or others in their place: `seen`. `fingerprint` is that of what it sees.
    """
    if config.teacher is None:
        return data
    labels = torch.from_numpy(_labels(data if seen is None else seen, config, fabric, title, fingerprint))
    return LabeledImages(data, labels.to(fabric.device) if fits_in_memory(labels.nbytes, fabric.device) else labels)


def _labels(seen: Dataset, config: RunConfig, fabric: Fabric, title: str, fingerprint: str | None) -> np.ndarray:
    """Return the labels (N, [T,] H, W) of images, or of videos, in the cache folder or made now."""
    images = VideoFrames(cast(VideoDataset, seen)) if seen.frames > 1 else seen
    path = _cache_path(fingerprint, config, fabric)

    def label() -> np.ndarray:
        return _label(images, seen.frames, config, fabric, title)

    if path is None:
        labels = label()
    else:
        with fabric.rank_zero_first(local=True):  # one process labels, the others wait and read
            labels = _cached_labels(path, (len(images), *config.image_size), label)
    return labels.reshape(len(seen), seen.frames, *config.image_size) if seen.frames > 1 else labels


# --------------------------------------------------------------------------------------------------------------- checks


def check_teacher(config: RunConfig, model: Discovery, loss: Loss) -> None:
    """Raise a ValueError if options of a run do not fit to its teacher, or need one."""
    if config.teacher is None:
        _check_no_teacher(config, loss)
        return
    if "labels" not in inspect.signature(loss).parameters:
        given = f"teacher is {config.teacher}, but the loss {type(loss).__name__} takes no labels"
        raise ValueError(f"{given}; expected --loss mse, or one whose __call__ takes labels")
    if not loss.label_weight:
        raise ValueError(f"teacher is {config.teacher}, but its labels have no weight; expected --loss.label-weight")
    _check_images(config)
    if config.label_tracks and model.frames == 1:
        raise ValueError("loss.label_tracks is True, but the model is one of images; expected a model of clips")
    slots = open_teacher(config).num_slots
    if config.augmentation.camouflage and slots > MAX_LABELS:
        given = f"teacher is {config.teacher}, which has {slots} slots"
        raise ValueError(f"{given}; with --camouflage expected at most {MAX_LABELS}")


def _check_no_teacher(config: RunConfig, loss: Loss) -> None:
    """Raise a ValueError for the first option that only means something with labels."""
    given: dict[str, tuple[Any, Any]] = {  # values and defaults
        "loss.label_weight": (loss.label_weight, 0),
        "loss.label_tracks": (config.label_tracks, False),
        "loss.label_background_weight": (getattr(loss, "label_background_weight", 1), 1),
        **{f"label_{name}": (value, DEFAULTS[name]) for name, value in config.label_refinement.items()},
        "label_dilation": (config.label_dilation, 0),
        "camouflage": (config.augmentation.camouflage, 0),
        "data.flat_teacher": (isinstance(config.data, TexturedSceneConfig) and config.data.flat_teacher, False),
    }
    for name, (value, default) in given.items():
        if value != default:
            raise ValueError(f"{name} is {value}, but there are no labels; expected --teacher too")


def _check_images(config: RunConfig) -> None:
    """Raise a ValueError if the images of a run change over time: labels are those of fixed images."""
    data: Any = config.data
    if config.num_images == "endless":
        raise ValueError("num_images is endless; expected a number: --teacher labels images before training")
    if isinstance(data, TexturedSceneConfig) and (data.texture_ramp_end or data.low_contrast):
        given = f"data.texture_ramp_end is {data.texture_ramp_end} and data.low_contrast {data.low_contrast}"
        raise ValueError(f"{given}; expected 0 for both: --teacher labels images before training")


@torch.no_grad()
def open_teacher(config: RunConfig) -> Discovery:
    """Load the teacher. Raises a ValueError if it cannot label the images of the run."""
    assert config.teacher is not None
    try:
        teacher = load(config.teacher)
    except ValueError as error:
        raise ValueError(f"teacher: {str(error).removeprefix('checkpoint: ')}") from None
    if teacher.spacetime or teacher.reconstructs_features or not _can_refine(teacher):
        given = f"teacher is {config.teacher}, which cannot label single images"
        raise ValueError(f"{given}; expected a model of images or of pairs")
    if teacher.image_size != config.image_size:
        given = f"teacher is {config.teacher}, a model of {teacher.image_size} images"
        raise ValueError(f"{given}; expected the image size of the run, {config.image_size}")
    return teacher


def _can_refine(teacher: Discovery) -> bool:
    """Return whether a model of images returns what refinement needs."""
    return can_refine(teacher(torch.zeros(1, 3, *teacher.image_size)))


# --------------------------------------------------------------------------------------------------------------- labels


def label_request(config: RunConfig) -> dict[str, Any]:
    """Return what labels depend on, besides the images and the device."""
    assert config.teacher is not None
    weights = checkpoint_file(config.teacher)
    files = (weights, weights.with_name("config.json"))
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in files if file.is_file())).hexdigest()
    return {
        "teacher": digest,
        "refinement": DEFAULTS | config.label_refinement,
        "dilation": config.label_dilation,
        "tracks": config.label_tracks,
        "format": FORMAT,
        "version": cutslots.__version__,
    }


def _cache_path(fingerprint: str | None, config: RunConfig, fabric: Fabric) -> Path | None:
    """Return the file of the labels; None if labels are not kept or the dataset cannot tell its images apart."""
    if config.cache_dir is None or fingerprint is None:
        return None
    images = {"data": fingerprint, "image_size": config.image_size, "device": fabric.device.type}
    key = hashlib.sha256(json.dumps(label_request(config) | images).encode()).hexdigest()
    return config.cache_dir / f"labels-{key[:16]}.npz"


def _cached_labels(path: Path, shape: tuple[int, ...], label: Callable[[], np.ndarray]) -> np.ndarray:
    """Return the labels (N, H, W) in a file, which is written first if there is none."""
    with errors_name_path(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
    with locked(path.with_suffix(".lock")):
        if not path.is_file():
            content = io.BytesIO()
            np.savez_compressed(content, labels=label())
            write_atomically(path, content.getvalue())
    return _read_labels(path, shape)


def _read_labels(path: Path, shape: tuple[int, ...]) -> np.ndarray:
    try:
        with np.load(path) as file:
            labels: np.ndarray = file["labels"]
    except Exception:  # a damaged archive raises BadZipFile, EOFError, zlib.error...
        labels = np.empty(0)
    if labels.shape != shape or labels.dtype != np.uint8:
        raise ValueError(f"{path} is damaged; delete it to label the images again")
    return labels


@torch.no_grad()
def _label(data: Dataset, frames: int, config: RunConfig, fabric: Fabric, title: str) -> np.ndarray:
    """Return the labels (N, H, W) of all images, or of the frames of all videos, which have some `frames`."""
    teacher = open_teacher(config).to(fabric.device)
    labels = np.empty((len(data), *config.image_size), np.uint8)
    size = _batch_size(frames if config.label_tracks else 1, fabric.device.type)
    with progress(fabric.global_rank > 0) as bar:
        task: Any = bar.add_task(f"labels of {title}", total=len(data))
        for first in range(0, len(data), size):
            rows = np.arange(first, min(first + size, len(data)))
            image = data.get_batch(rows, fabric.device).image
            if config.label_tracks:
                found = label_videos(teacher, image.unflatten(0, (-1, frames)), **config.label_refinement).flatten(0, 1)
            else:
                found = label_images(teacher, image, **config.label_refinement)
            labels[rows] = dilate_labels(found, config.label_dilation).cpu().numpy()
            bar.advance(task, len(rows))
    return labels


def _batch_size(frames: int, device: str) -> int:
    """Return how many images are labelled at once: whole videos, of which one frame is labelled at a time."""
    return IMAGES_PER_BATCH.get(device, 16) if frames == 1 else VIDEOS_PER_BATCH.get(device, 1) * frames


@torch.no_grad()
def label_images(teacher: Discovery, image: Tensor, **refinement: float) -> Tensor:
    """Return the label (B, H, W) of every pixel of images (B, 3, H, W), uint8: the slot with the largest refined mask.

    Labels are numbered from the largest to the smallest in the image. `refinement` has arguments of `refine_masks`.
    """
    output = teacher(image)
    check_finite(teacher, masks=output.masks)
    return number_by_area(refine_masks(output, image, **refinement).argmax(1)[:, None], teacher.num_slots)[:, 0]


@torch.no_grad()
def label_videos(teacher: Discovery, clips: Tensor, **refinement: float) -> Tensor:
    """Return the labels (B, T, H, W) of videos (B, T, 3, H, W), uint8. A label is a track of `Tracker`.

    Every frame is refined on its own, so a missed object that refinement adds may have another label in every frame.
    Labels are numbered from the largest to the smallest in the video.
    """
    tracker = Tracker(teacher, "area")
    labels = [refine_masks(tracker(frame), frame, **refinement).argmax(1) for frame in clips.unbind(1)]
    return number_by_area(torch.stack(labels, 1), teacher.num_slots)


def number_by_area(labels: Tensor, count: int) -> Tensor:
    """Return labels (B, T, H, W) below `count`, numbered by their area in T frames, the largest first, uint8."""
    area = one_hot(labels.flatten(1), count).sum(1)
    rank = area.argsort(dim=1, descending=True, stable=True).argsort(1)
    return rank.gather(1, labels.flatten(1)).view_as(labels).clamp(max=255).to(torch.uint8)


def dilate_labels(labels: Tensor, pixels: int) -> Tensor:
    """Return labels (B, H, W) whose objects are grown by some pixels over the background, label 0.

    A pixel of the background next to objects gets the label that most of its eight neighbours have.
    """
    if not pixels:
        return labels
    objects = one_hot(labels.long()).movedim(-1, 1).to(torch.float32)
    objects[:, 0] = 0
    for _ in range(pixels):
        count, most = avg_pool2d(objects, 3, 1, 1).max(1)
        grows = (objects.sum(1) == 0) & (count > 0)
        objects = torch.where(grows[:, None], one_hot(most, objects.shape[1]).movedim(-1, 1), objects)
        labels = torch.where(grows, most.to(labels.dtype), labels)
    return labels
