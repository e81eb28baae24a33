"""Features of a frozen encoder on disk, computed once instead of at every step.

A frozen transformer computes the same features of an image in every epoch. With `cache_dir` they are written to a file
that is mapped into memory, and training reads them in the place of images:

    CACHE_DIR/features-KEY/
      request.json     what determines the features: encoder, images, image size, precision
      features.npy     (frames, h, w, C), float32 for 32-true and float16 for bf16-mixed
      checksums.npy    (frames,) the CRC-32 of each row; a row is compared with it when it is read first
      progress.json    how many rows are written; an interrupted run resumes after them

With float32 nothing is rounded: losses are those of a run without a cache. With bf16-mixed the network rounds features
to bfloat16, which has three significant bits less than float16. Channels are last, as a transformer returns them.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import torch
from lightning_fabric import Fabric
from torch import Tensor, nn

from cutslots.data.builtin import TexturedSceneConfig
from cutslots.data.video import VideoFrames
from cutslots.dataset import (
    Dataset,
    Indices,
    Sample,
    VideoDataset,
    check_indices,
    create_memmap,
    open_memmap,
    take_rows,
)
from cutslots.files import Layout, errors_name_path, output_folder, progress, read_json, write_json
from cutslots.models.discovery import Discovery, ModelOutput
from cutslots.modules.encoders import Encoder
from cutslots.training.augment import BatchAugmentation
from cutslots.training.config import TrainConfig
from cutslots.training.data import open_training_data, training_samples
from cutslots.training.losses import LOSSES

FORMAT = 1
LAYOUT = Layout("feature cache", ("features.npy", "checksums.npy", "progress.json"), exclusive=True)
DTYPES = {"32-true": "float32", "bf16-mixed": "float16"}  # of features, by the precision of the run
SAVE_BYTES = 2**28  # written between two notes of the progress


class FromFeatures(nn.Module):
    """A model that takes features in the place of images."""

    def __init__(self, model: Discovery) -> None:
        super().__init__()
        self.model = model

    def forward(self, features: Tensor) -> ModelOutput:
        return self.model.forward_features(features)


class CachedFeatures(VideoDataset):
    """Features in the place of images: (B, C, h, w), or (B, T, C, h, w) of videos, float32. Masks are empty."""

    memory_mapped, has_masks = True, False

    def __init__(self, folder: Path, frames: int) -> None:
        self.folder, self.frames = folder, frames
        self.features, self.checksums = (open_memmap(folder / f"{name}.npy") for name in ("features", "checksums"))
        self.image_size = (self.features.shape[1], self.features.shape[2])
        self.verified = np.zeros(len(self.features), dtype=bool)

    def __len__(self) -> int:
        return len(self.features) // self.frames

    def get_batch(self, indices: Indices, device: torch.device | str = "cpu") -> Sample:
        rows = check_indices(indices, len(self))[:, None] * self.frames + np.arange(self.frames)
        sample = self._read(rows.reshape(-1), device)
        return sample if self.frames == 1 else Sample(*(x.unflatten(0, rows.shape) for x in sample))

    def get_frames(self, videos: Indices, frames: Indices, device: torch.device | str = "cpu") -> Sample:
        rows = check_indices(videos, len(self)) * self.frames + check_indices(frames, self.frames)
        return self._read(rows, device)

    def _read(self, rows: np.ndarray, device: torch.device | str) -> Sample:
        self._verify(rows[~self.verified[rows]])
        features = take_rows(self.features, rows, device).float().permute(0, 3, 1, 2)
        return Sample(features, torch.zeros(len(rows), 0, 0, dtype=torch.uint8, device=device))

    def _verify(self, rows: np.ndarray) -> None:
        """Raise a ValueError if a row differs from what was written."""
        for row in rows:
            if zlib.crc32(self.features[row]) != self.checksums[row]:
                file = self.folder / "features.npy"
                raise ValueError(f"{file} is damaged at row {row}; delete {self.folder} to create the cache again")
        self.verified[rows] = True


def cached_features(config: TrainConfig, fabric: Fabric, model: Discovery) -> Dataset | None:
    """Return the features of the training images, or clips, from the cache folder, which is filled first.

    Returns None, and says why, if features change during training or do not fit on the disk. Without a cache folder or
    a frozen encoder there is nothing to say.
    """
    encoder = model.encoder.fingerprint() if isinstance(model.encoder, Encoder) else None
    if config.cache_dir is None or encoder is None:
        return None
    reason = _no_cache_reason(config)
    if reason is None:
        data = open_training_data(config, fabric)
        plan = _plan(config, model, data, encoder)
        with fabric.rank_zero_first(local=True):  # one process computes, the others wait and read
            reason = _no_space_reason(plan)
            if reason is None:
                _fill(plan, config, fabric, model, data)
    if reason is None:
        return training_samples(CachedFeatures(plan.folder, data.frames), config)
    if fabric.global_rank == 0:
        print(f"features are computed at every step, not cached: {reason}")
    return None


def _no_cache_reason(config: TrainConfig) -> str | None:
    """Return why the images of a run, or its loss, do not allow cached features, or None."""
    data, loss = config.data, LOSSES.build(config.loss)
    if config.horizontal_flips:
        return "images are flipped at random (--no-horizontal-flips)"
    if config.augmentation != BatchAugmentation():
        return "images are augmented at random (--min-crop-area, --brightness-jitter and the like)"
    if config.mix_data is not None:
        return "images of another dataset are mixed in at random (--mix-data)"
    if config.num_images == "endless":
        return "images never repeat (--num-images endless)"
    if isinstance(data, TexturedSceneConfig) and (data.texture_ramp_end or data.low_contrast):
        return "textures change over time (--data.texture-ramp-end, --data.low-contrast)"
    if loss.needs_image:
        return f"the loss {LOSSES.part_of(config.loss).name} needs the images"
    return None


class Plan(NamedTuple):
    """What a cache holds."""

    folder: Path
    request: dict[str, Any]  # everything that determines the features
    shape: tuple[int, ...]  # (frames, h, w, C)

    @property
    def arrays(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shape and type of each file."""
        return {"features.npy": (self.shape, self.request["dtype"]), "checksums.npy": (self.shape[:1], "uint32")}

    @property
    def num_bytes(self) -> int:
        return int(np.prod(self.shape)) * np.dtype(self.request["dtype"]).itemsize


def _plan(config: TrainConfig, model: Discovery, data: Dataset, encoder: dict[str, Any]) -> Plan:
    request = {
        "command": "cache features",
        "format": FORMAT,
        "encoder": encoder,
        "data": data.fingerprint(),
        "image_size": config.model.image_size,
        "precision": config.precision,
        "dtype": DTYPES[config.precision],
    }
    key = hashlib.sha256(json.dumps(request).encode()).hexdigest()
    module = cast(Encoder, model.encoder)
    shape = (len(data) * data.frames, *module.out_size(config.model.image_size), module.out_channels)
    return Plan(cast(Path, config.cache_dir) / f"features-{key[:16]}", request, shape)


def _no_space_reason(plan: Plan) -> str | None:
    """Return why a cache cannot be started, or None. One that was started has its disk space."""
    if plan.request["data"] is None:
        return "the dataset has no fingerprint, by which other images would be noticed"
    if (plan.folder / "features.npy").is_file():
        return None
    parent = plan.folder.parent
    with errors_name_path(parent):
        parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(parent).free
    if plan.num_bytes <= free:
        return None
    return f"they take {plan.num_bytes / 1e9:,.1f} GB, and {parent} has {free / 1e9:,.1f} GB free"


def _fill(plan: Plan, config: TrainConfig, fabric: Fabric, model: Discovery, data: Dataset) -> None:
    """Compute the features that the cache lacks. If another process does so, this one waits for it."""
    complete, quiet = partial(_is_complete, plan), fabric.global_rank > 0
    with output_folder(plan.folder, LAYOUT, plan.request, None, is_complete=complete, wait=True) as done:
        if not quiet:
            what = f"features of {plan.shape[0]:,} images, {plan.num_bytes / 1e6:,.1f} MB,"
            print(f"{'reading' if done else 'caching'} {what} in {plan.folder}", flush=True)
        if not done:
            images = VideoFrames(cast(VideoDataset, data)) if data.frames > 1 else data
            size = config.batch_size // fabric.world_size * config.model.frames
            _write(plan, size, partial(_compute, model, images, fabric), quiet)


def _is_complete(plan: Plan) -> bool:
    """Return whether all rows are written. Raises a ValueError if the files do not fit to that."""
    if _num_written(plan.folder) < plan.shape[0]:
        return False
    _open_arrays(plan)
    return True


def _num_written(folder: Path) -> int:
    done = (read_json(folder / "progress.json") or {}).get("done", 0)
    return done if isinstance(done, int) else 0


def _open_arrays(plan: Plan, mode: Literal["r", "r+"] = "r") -> list[np.memmap]:
    """Map features and checksums into memory. Raises a ValueError if they are not those of the plan."""
    for name, (shape, dtype) in plan.arrays.items():
        array = open_memmap(plan.folder / name)  # before opening for writing, which extends a file that was cut short
        if array.shape != shape or array.dtype != dtype:
            raise ValueError(
                f"{plan.folder / name} is {array.dtype} {array.shape}; expected {dtype} {shape}: delete {plan.folder} "
                "to create the cache again"
            )
    return [open_memmap(plan.folder / name, mode) for name in plan.arrays]


def _create_arrays(plan: Plan) -> list[np.memmap]:
    return [create_memmap(plan.folder / name, *kind) for name, kind in plan.arrays.items()]


def _write(plan: Plan, size: int, compute: Callable[[np.ndarray], Tensor], quiet: bool) -> None:
    """Write the rows that are missing, `size` at once, and note the progress after every `SAVE_BYTES`."""
    rows, start = plan.shape[0], _num_written(plan.folder)
    features, checksums = _open_arrays(plan, "r+") if start else _create_arrays(plan)
    saved = start
    with progress(quiet) as bar:
        task = bar.add_task("features", total=rows, completed=start)
        for first in range(start, rows, size):
            last = min(first + size, rows)
            # A batch is always full: with the shapes of training, kernels round as they do there.
            batch = compute(np.minimum(np.arange(first, first + size), rows - 1))[: last - first]
            features[first:last] = _checked(batch.to(getattr(torch, plan.request["dtype"])), first).numpy()
            checksums[first:last] = [zlib.crc32(features[row]) for row in range(first, last)]
            if last == rows or (last - saved) * features[0].nbytes >= SAVE_BYTES:
                _save(plan.folder, features, checksums, saved := last)
            bar.advance(task, last - first)


def _save(folder: Path, features: np.memmap, checksums: np.memmap, done: int) -> None:
    """Note how many rows are written, once they are on the disk."""
    features.flush()
    checksums.flush()
    write_json(folder / "progress.json", {"done": done})


@torch.no_grad()
def _compute(model: Discovery, images: Dataset, fabric: Fabric, indices: np.ndarray) -> Tensor:
    """Return the features (B, h, w, C) of images, in the precision of training."""
    with fabric.autocast():
        features = model.features(images.get_batch(indices, fabric.device).image)
    return features.permute(0, 2, 3, 1).cpu()


def _checked(features: Tensor, first: int) -> Tensor:
    """Return features unchanged, or raise a ValueError if some are infinite, as beyond the range of float16."""
    finite = features.isfinite().flatten(1).all(1)
    if not finite.all():
        row, dtype = first + int((~finite).nonzero()[0]), str(features.dtype).removeprefix("torch.")
        raise ValueError(
            f"the features of image {row} are not finite in {dtype}; expected finite ones: check the checkpoint of the "
            "encoder, or leave out --cache-dir"
        )
    return features
