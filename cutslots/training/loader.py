"""`TrainLoader`: the images of each step.

They follow from (seed, step) alone, so that a resumed run sees what an uninterrupted one sees, on any number of
processes. A thread prepares the next step while the device works.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from lightning_fabric import Fabric
from torch import Tensor

from cutslots.dataset import Dataset
from cutslots.training.augment import BatchAugmentation, augment_batch
from cutslots.training.config import RunConfig
from cutslots.training.data import Curriculum
from cutslots.training.schedules import texture_range

FLIP, TEXTURE_STRENGTH, LOW_CONTRAST, MIXED = 1, 7, 8, 16  # streams of random numbers
AUGMENTATIONS = {
    "crop": 9,
    "brightness": 10,
    "contrast": 11,
    "saturation": 12,
    "hue": 13,
    "blur": 14,
    "noise": 15,
    "camouflage": 17,
}


class TrainLoader:
    """Iterates over the images of steps, from `step` on.

    With a curriculum, images come from its ramp until `texture_ramp_end`, with textures as strong as the step asks
    for. From `low_contrast_start` on, once textures have full strength, a share of them has low contrast. Images of
    `mixed` replace some of every batch.
    """

    def __init__(
        self,
        data: Dataset,
        config: RunConfig,
        fabric: Fabric,
        step: int,
        curriculum: Curriculum | None = None,
        mixed: Dataset | None = None,
    ) -> None:
        self.data, self.config, self.fabric, self.step = data, config, fabric, step
        self.curriculum, self.mixed = curriculum, mixed
        self.epoch, self.order = -1, np.empty(0, dtype=np.int64)
        self.preparing = threading.Lock()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Keep the loader's threads off the device in a block."""
        with self.preparing:
            yield

    def __enter__(self) -> None:
        self.pool = ThreadPoolExecutor(1)
        self.ahead = self.pool.submit(self._prepare, self.step)

    def __exit__(self, *_: object) -> None:
        self.pool.shutdown(wait=True, cancel_futures=True)

    def __next__(self) -> Tensor:
        image = self.ahead.result()
        self.step += 1
        self.ahead = self.pool.submit(self._prepare, self.step)
        return image

    def _prepare(self, step: int) -> Tensor:
        image = self._images(step)
        with self.preparing:
            return self._augmented(step, self._flipped(step, self._with_mixed(step, image)))

    def _with_mixed(self, step: int, image: Tensor) -> Tensor:
        if self.mixed is None:
            return image
        return self._replaced(image, self.mixed, self.config.mix_fraction, self._random(step, MIXED))

    def _flipped(self, step: int, image: Tensor) -> Tensor:
        if not self.config.horizontal_flips:
            return image
        flipped = self._share(self._random(step, FLIP).random(self.config.batch_size)) < 0.5
        return select_images(flipped, image.flip(-1), image)

    def _augmented(self, step: int, image: Tensor) -> Tensor:
        if self.config.augmentation == BatchAugmentation():
            return image

        def draw(name: str, count: int) -> Tensor:
            numbers = self._random(step, AUGMENTATIONS[name]).random((self.config.batch_size, count))
            return torch.from_numpy(self._share(numbers).T.copy())

        return augment_batch(
            image, self.config.augmentation, draw, lambda shape: self._noise(step, shape, image.device)
        )

    def _noise(self, step: int, shape: Sequence[int], device: torch.device) -> Tensor:
        """Return normal numbers for the images of this process, which are those of one process: all are drawn."""
        seed = int(self._random(step, AUGMENTATIONS["noise"]).integers(2**63))
        generator = torch.Generator(device).manual_seed(seed)
        noise = torch.randn(self.config.batch_size, *shape[1:], generator=generator, device=device)
        return noise[self.fabric.global_rank * shape[0] :][: shape[0]]

    def _images(self, step: int) -> Tensor:
        with self.preparing:
            image = self._from_curriculum(step)
            return self._with_low_contrast(step, self._from_data(step)) if image is None else image

    def _from_data(self, step: int) -> Tensor:
        return self.data.get_batch(self.indices(step), self.fabric.device).image

    def _from_curriculum(self, step: int) -> Tensor | None:
        if self.curriculum is None or self.curriculum.ramp is None:
            return None
        options, ramp = self.curriculum.options, self.curriculum.ramp
        if step >= options.texture_ramp_end:
            return None
        bounds = texture_range(options, step)
        strength = self._random(step, TEXTURE_STRENGTH).uniform(*bounds, self.config.batch_size)
        return ramp.get_batch((len(ramp) * self._share(strength)).astype(np.int64), self.fabric.device).image

    def _with_low_contrast(self, step: int, image: Tensor) -> Tensor:
        if self.curriculum is None or self.curriculum.low_contrast is None:
            return image
        options, scenes = self.curriculum.options, self.curriculum.low_contrast
        if step < options.low_contrast_start:
            return image
        return self._replaced(image, scenes, options.low_contrast, self._random(step, LOW_CONTRAST))

    def _replaced(self, image: Tensor, data: Dataset, fraction: float, random: np.random.Generator) -> Tensor:
        """Return the images with a fraction of them, on average, replaced by others at random."""
        indices = self._share(random.integers(0, len(data), self.config.batch_size))
        replaced = np.flatnonzero(self._share(random.random(self.config.batch_size)) < fraction)
        if not len(replaced):
            return image
        others = data.get_batch(indices[replaced], self.fabric.device).image
        return image.index_copy(0, torch.from_numpy(replaced).to(image.device), others)

    def _random(self, step: int, stream: int) -> np.random.Generator:
        return np.random.default_rng([self.config.seed, step, stream])

    def _share(self, values: np.ndarray) -> np.ndarray:
        """Return this process's share of what was sampled for a whole batch."""
        size = self.config.batch_size // self.fabric.world_size
        return values[self.fabric.global_rank * size :][:size]

    def indices(self, step: int) -> np.ndarray:
        """Return the images of this process at a step: its share of the next batch of an order shuffled every epoch."""
        first = step * self.config.batch_size
        return np.array([self._shuffled(i) for i in self._share(np.arange(first, first + self.config.batch_size))])

    def _shuffled(self, i: int) -> int:
        epoch, position = divmod(i, len(self.data))
        if epoch != self.epoch:
            self.epoch = epoch
            self.order = np.random.default_rng([self.config.seed, epoch]).permutation(len(self.data))
        return int(self.order[position])


def select_images(condition: np.ndarray, a: Tensor, b: Tensor) -> Tensor:
    """Return for each image that of `a` where the condition holds, else that of `b`."""
    return torch.where(torch.from_numpy(condition).to(a.device).view(-1, *[1] * (a.ndim - 1)), a, b)
