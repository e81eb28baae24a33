"""Scenes as a dataset: by index, by batch on any device, or from a cache in memory or on disk."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch

import cutslots
from cutslots.dataset import (
    AnnotatedSample,
    ImageSize,
    Indices,
    MemmapDataset,
    Sample,
    VideoDataset,
    check_indices,
    create_memmap,
    open_memmap,
)
from cutslots.devices import resolve_device
from cutslots.files import Layout, output_folder, progress, read_json, write_atomically
from cutslots.scenes import materials, physics, shapes
from cutslots.scenes.render import Rendered, render
from cutslots.scenes.sample import COLORS, FAMILIES, MAX_OBJECTS, MIN_OBJECTS, SPLITS, sample_scenes
from cutslots.scenes.scene_batch import SceneBatch, VariedSceneBatch
from cutslots.scenes.variation import Variation

SCENES_PER_BATCH = (128, 1024)  # scenes sampled and rendered at once, and images on CUDA

CACHE = Layout("cache", ("images.npy", "masks.npy", "progress.json"), exclusive=True)

DEFAULT_COUNT = {"train": 50_000, "val": 1_000, "test": 1_000}

MAX_SIZE = 2048  # pixels along each side

Textures = Literal["full", "flat", "ramp", "low-contrast"]

FLAT_STRENGTH = 0.15  # of textures that hardly show; the strongest before a texture ramp

MAX_BLEND = 0.9  # largest share of the ground's colors that objects of low-contrast scenes take on

GOLDEN = 0.6180339887  # the fractional parts of its multiples are evenly distributed for any number of scenes


class Scenes(VideoDataset):
    """Built-in scenes. Scene i has the same bytes alone, in any batch and in any process.

    Args:
        family: plain, textured, ood, camo or moving.
        split: train, val or test. Splits share no scene.
        size: Side of a square image, or (height, width), in pixels. Images of (height, width) are the centre crop of
            the square images with side max(height, width).
        seed: From 0 to 2^32 - 1. Seeds share no scene.
        count: Number of scenes. By default 50,000 in train, 1,000 in val and test.
        num_objects: Smallest and largest number of objects in a scene.
        textures: "full"; or "flat": textures hardly show; or "ramp": scene i of n has textures at i / n of their
            strength; or "low-contrast": objects take on up to nine tenths of the ground's colors.
        variation: "none"; or "v1": light from any side, other cameras, surfaces and exposures. See docs/scenes.md.

    >>> scenes = Scenes("textured", split="train", size=32)
    >>> image, mask = scenes[7]
    >>> image.shape, mask.shape, len(scenes)
    (torch.Size([3, 32, 32]), torch.Size([32, 32]), 50000)
    >>> scenes.get_batch([0, 7], device="cpu").image.shape
    torch.Size([2, 3, 32, 32])
    >>> Scenes("textured", size=(24, 40))[7].image.shape
    torch.Size([3, 24, 40])
    """

    def __init__(
        self,
        family: str,
        split: str = "train",
        size: ImageSize = 128,
        seed: int = 0,
        count: int | None = None,
        num_objects: tuple[int, int] = (MIN_OBJECTS, MAX_OBJECTS),
        textures: Textures = "full",
        variation: Variation = "none",
    ) -> None:
        if family not in FAMILIES:
            raise ValueError(f"family is {family!r}; expected one of {', '.join(FAMILIES)}")
        if split not in SPLITS:
            raise ValueError(f"split is {split!r}; expected one of {', '.join(SPLITS)}")
        if not (isinstance(seed, int) and 0 <= seed < 2**32):
            raise ValueError(f"seed is {seed!r}; expected an integer from 0 to 2^32 - 1")
        if count is not None and not (isinstance(count, int) and count >= 0):
            raise ValueError(f"count is {count!r}; expected an integer of at least 0")
        if not (len(num_objects) == 2 and 1 <= num_objects[0] <= num_objects[1] <= MAX_OBJECTS):
            raise ValueError(
                f"num_objects is {num_objects!r}; expected a range between 1 and {MAX_OBJECTS}, as in (3, 10)"
            )
        if textures not in get_args(Textures):
            raise ValueError(f"textures is {textures!r}; expected one of {', '.join(get_args(Textures))}")
        if variation not in get_args(Variation):
            raise ValueError(f"variation is {variation!r}; expected one of {', '.join(get_args(Variation))}")
        self.family, self.split, self.seed, self.textures, self.variation = family, split, seed, textures, variation
        self.image_size = _image_size(size)  # (H, W)
        self.num_objects = (num_objects[0], num_objects[1])
        self.count = DEFAULT_COUNT[split] if count is None else count
        self.frames = FAMILIES[family].frames  # 1 for images

    def request(self) -> dict[str, Any]:
        """Return the arguments as JSON values. Files of scenes keep them, so that a later run can compare its own."""
        values = {
            "family": self.family,
            "split": self.split,
            "image_size": list(self.image_size),
            "seed": self.seed,
            "count": self.count,
            "num_objects": list(self.num_objects),
            "textures": self.textures,
            **({"variation": self.variation} if self.variation != "none" else {}),  # files of before have none
        }
        return {**values, "version": cutslots.__version__}

    @property
    def cache_name(self) -> str:
        """A folder name for the cache of these scenes, as in textured-train-128x128-50000."""
        parts = [self.family, self.split, "{}x{}".format(*self.image_size), str(self.count)]
        if self.num_objects != (MIN_OBJECTS, MAX_OBJECTS):
            parts.insert(1, "{}-{}".format(*self.num_objects))
        if self.textures != "full":
            parts.append(self.textures)
        if self.variation != "none":
            parts.append(self.variation)
        if self.seed:
            parts.append(f"seed{self.seed}")
        return "-".join(parts)

    def __len__(self) -> int:
        return self.count

    def get_batch(self, indices: Indices, device: torch.device | str = "cpu") -> Sample:
        """Render scenes on the device: images (B, 3, H, W) and masks (B, H, W), videos with a frame axis after B."""
        rendered = self._render(indices, device)
        return self._to_sample(rendered.image, rendered.mask)

    def get_annotated(self, indices: Indices, device: torch.device | str = "cpu") -> AnnotatedSample:
        """Render scenes, with the visibility of their objects: rays count what they hit behind the first surface."""
        rendered = self._render(indices, device)
        visible, unoccluded = (x.sum(1).cpu().double() for x in (rendered.visible_pixels, rendered.unoccluded_pixels))
        return AnnotatedSample(*self._to_sample(rendered.image, rendered.mask), visibility=visible / unoccluded)

    def _render(self, indices: Indices, device: torch.device | str) -> Rendered:
        indices, device = check_indices(indices, self.count), resolve_device(device)
        size = SCENES_PER_BATCH[device.type == "cuda" and self.frames == 1]
        chunks = [indices[i : i + size] for i in range(0, max(len(indices), 1), size)]
        rendered = [render(self._sample(chunk, device), self.image_size, device) for chunk in chunks]
        return Rendered(*map(torch.cat, zip(*rendered, strict=True)))

    def _to_sample(self, images: torch.Tensor, masks: torch.Tensor) -> Sample:
        """Drop the frame axis of images (B, F, 3, H, W) and masks (B, F, H, W) that are not videos."""
        return Sample(images[:, 0], masks[:, 0]) if self.frames == 1 else Sample(images, masks)

    def sample(self, indices: Indices) -> SceneBatch:
        """Return the contents of scenes as arrays, without rendering them."""
        return self._sample(check_indices(indices, self.count), torch.device("cpu")).numpy()

    def _sample(self, indices: np.ndarray, device: torch.device) -> SceneBatch:
        """Return the contents of scenes as tensors. See `sample_scenes` for their device."""
        address = (self.family, self.split, self.seed, indices)
        scenes = sample_scenes(*address, self.num_objects, device, self.variation)
        if self.textures in ("flat", "ramp"):
            strength = np.full(len(indices), FLAT_STRENGTH) if self.textures == "flat" else indices / self.count
            return scenes.scale_textures(torch.from_numpy(strength).to(scenes.count.device))
        if self.textures == "low-contrast":
            return scenes.blend_into_ground(
                torch.from_numpy(MAX_BLEND * (indices * GOLDEN % 1)).to(scenes.count.device)
            )
        return scenes

    def describe(self, indices: Indices) -> tuple[Sample, list[dict[str, Any]]]:
        """Return a batch on the CPU and the ground truth of each scene as JSON values."""
        indices = check_indices(indices, self.count)
        scenes = self.sample(indices)
        rendered = render(scenes, self.image_size)
        truths = [self._ground_truth(int(i), scenes, row, rendered) for row, i in enumerate(indices)]
        return self._to_sample(rendered.image, rendered.mask), truths

    def _ground_truth(self, index: int, scenes: SceneBatch, row: int, rendered: Rendered) -> dict[str, Any]:
        return {
            "index": index,
            "family": self.family,
            "split": self.split,
            "seed": self.seed,
            "ground": materials.NAMES[scenes.material[row, 0]],
            **({"variation": self.variation} if self.variation != "none" else {}),
            "camera": self._camera_truth(scenes, row),
            **({"frames_per_second": physics.FRAMES_PER_SECOND} if self.frames > 1 else {}),
            "objects": [self._object_truth(scenes, row, k, rendered) for k in range(scenes.count[row])],
        }

    def _camera_truth(self, scenes: SceneBatch, row: int) -> dict[str, Any]:
        """Return the camera of a scene. Its field of view is in degrees, where it is not that of all scenes."""
        truth = {name: np.round(getattr(scenes, name)[row], 5).tolist() for name in ("camera", "target")}
        if isinstance(scenes, VariedSceneBatch):
            truth["field_of_view"] = round(math.degrees(2 * math.atan(scenes.half_width[row])), 5)
        return truth

    def _object_truth(self, scenes: SceneBatch, row: int, k: int, rendered: Rendered) -> dict[str, Any]:
        """Return what is known of object k + 1. Values that change over time have one entry per frame of a video."""
        pixels, unoccluded = rendered.visible_pixels[row, :, k], rendered.unoccluded_pixels[row, :, k]
        by_frame = {
            "position": scenes.position[row, :, k],
            "rotation": scenes.rotation[row, :, k],
            "velocity": scenes.velocity[row, :, k],
            "pixels": pixels.numpy(),
            "visible": (pixels / unoccluded.clamp(min=1)).numpy(),
        }
        if self.frames == 1:
            del by_frame["velocity"]
        color = scenes.color[row, k]
        return {
            "id": k + 1,
            "shape": shapes.NAMES[scenes.shape[row, k]],
            "material": materials.NAMES[scenes.material[row, k + 1]],
            "color": list(COLORS)[color] if color >= 0 else None,
            "size": float(scenes.size[row, k]),
            **{name: np.round(v[0] if self.frames == 1 else v, 5).tolist() for name, v in by_frame.items()},
        }

    def cache(
        self, folder: str | Path | None = None, device: torch.device | str = "cpu", batch: int = 64, quiet: bool = False
    ) -> MemmapDataset:
        """Render all `count` scenes once: into memory, or into a folder of memory-mapped files that later runs reuse.

        All scenes take `cache_bytes`, which is printed first unless `quiet`. An interrupted call resumes. A folder with
        other scenes is refused. If another process is rendering into the same folder, this one waits for it.
        """
        shape = (self.count, self.frames, *self.image_size)
        if folder is None:
            self._announce("memory", quiet)
            images = np.empty((*shape[:2], 3, *shape[2:]), dtype=np.uint8)
            masks = np.empty(shape, dtype=np.uint8)
            self._fill(images, masks, 0, device, batch, quiet, lambda done: None)
            return MemmapDataset(images, masks)
        folder = Path(folder)
        request = {"command": "cache", **self.request()}
        complete = partial(self._is_cached, folder)
        with output_folder(folder, CACHE, request, None, is_complete=complete, wait=True) as done:
            if not done:
                self._cache(folder, device, batch, quiet)
        return MemmapDataset(open_memmap(folder / "images.npy"), open_memmap(folder / "masks.npy"))

    @property
    def cache_bytes(self) -> int:
        """Bytes of all images and masks."""
        return self.count * self.frames * 4 * self.image_size[0] * self.image_size[1]

    def fingerprint(self) -> str:
        return json.dumps(self.request())

    def _announce(self, where: str, quiet: bool) -> None:
        if not quiet:
            print(f"rendering {self.count:,} scenes, {self.cache_bytes / 1e6:,.1f} MB, to {where}", flush=True)

    def _is_cached(self, folder: Path) -> bool:
        return _count_cached(folder) == self.count

    def _cache(self, folder: Path, device: torch.device | str, batch: int, quiet: bool) -> None:
        """Render the scenes that the folder lacks."""
        shape = (self.count, self.frames, *self.image_size)
        start = _count_cached(folder)
        self._announce(str(folder), quiet)
        images = _array(folder / "images.npy", (*shape[:2], 3, *shape[2:]), keep=start > 0)
        masks = _array(folder / "masks.npy", shape, keep=start > 0)

        def save(done: int) -> None:
            for array in (images, masks):
                array.flush()
            write_atomically(folder / "progress.json", json.dumps({"done": done}).encode())

        self._fill(images, masks, start, device, batch, quiet, save)

    def _fill(
        self,
        images: np.ndarray,
        masks: np.ndarray,
        start: int,
        device: torch.device | str,
        batch: int,
        quiet: bool,
        save: Callable[[int], None],
    ) -> None:
        """Render scenes from `start` on into the arrays, and tell `save` after each batch how many are done."""
        images_per_batch = SCENES_PER_BATCH[1] if resolve_device(device).type == "cuda" else batch
        batch = max(1, images_per_batch // self.frames)
        # The simulation takes hardly longer for many videos than for one.
        sampled = batch if self.frames == 1 else SCENES_PER_BATCH[0]
        with progress(quiet) as bar:
            task = bar.add_task(self.cache_name, total=self.count, completed=start)
            for first in range(start, self.count, sampled):
                scenes = self._sample(np.arange(first, min(first + sampled, self.count)), resolve_device(device))
                for i in range(0, len(scenes), batch):
                    rendered = render(scenes.select(slice(i, i + batch)), self.image_size, device)
                    rows = slice(first + i, first + i + len(rendered.image))
                    images[rows], masks[rows] = rendered.image.cpu().numpy(), rendered.mask.cpu().numpy()
                    save(rows.stop)
                    bar.advance(task, len(rendered.image))


def _image_size(size: ImageSize) -> tuple[int, int]:
    """Return (H, W) of an integer or a pair of integers."""
    sides = (size, size) if isinstance(size, int) else tuple(size) if isinstance(size, (tuple, list)) else ()
    if not (len(sides) == 2 and all(isinstance(n, int) and 1 <= n <= MAX_SIZE for n in sides)):
        raise ValueError(f"size is {size!r}; expected 1 to {MAX_SIZE} pixels, as one integer or as (height, width)")
    return sides[0], sides[1]


def _count_cached(folder: Path) -> int:
    """Return how many scenes the cache in the folder holds."""
    done = (read_json(folder / "progress.json") or {}).get("done", 0)
    return done if isinstance(done, int) else 0


def _array(path: Path, shape: tuple[int, ...], keep: bool) -> np.memmap:
    """Open or create a memory-mapped uint8 array."""
    if not keep:
        return create_memmap(path, shape)
    open_memmap(path)  # refuses a file that was cut short, which opening for writing would extend with zeros
    return open_memmap(path, "r+")
