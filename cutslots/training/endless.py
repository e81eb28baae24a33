"""`EndlessLoader`: built-in scenes that never repeat, rendered while the network trains.

Step s trains on scenes s * batch_size to (s + 1) * batch_size - 1 of the training split, which is unlimited. They have
the seed of the run; without `endless`, all runs have the scenes of seed 0. Before the texture ramp, only the first
`num_flat_scenes` are used, if the data say so. A thread renders scenes several steps ahead, on a GPU in a stream of its
own.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch
from lightning_fabric import Fabric
from torch import Tensor

from cutslots.data.builtin import TexturedSceneConfig
from cutslots.data.text import data_text
from cutslots.dataset import Dataset
from cutslots.scenes import Scenes
from cutslots.scenes.dataset import MAX_BLEND
from cutslots.scenes.render import render
from cutslots.scenes.sample import sample_scenes
from cutslots.scenes.scene_batch import SceneBatch
from cutslots.training.config import RunConfig
from cutslots.training.data import open_split
from cutslots.training.loader import LOW_CONTRAST, TEXTURE_STRENGTH, TrainLoader
from cutslots.training.schedules import has_flat_textures, texture_range

# Rendered at once. Beside a training that fills the device every small kernel of the sampler waits, so that the time of
# a block hardly depends on its size.
IMAGES_PER_BLOCK = {"cpu": 64, "cuda": 4096}
MAX_BLOCK_BYTES = 2**28


class Block(NamedTuple):
    """The images of a few steps."""

    images: Tensor  # (steps, B, 3, H, W), uint8
    rendered: torch.cuda.Event | None


class EndlessLoader(TrainLoader):
    """Iterates over the images of steps, from `step` on. Images follow from (seed, step), not from the block's size."""

    def __init__(self, config: RunConfig, fabric: Fabric, step: int, mixed: Dataset | None = None) -> None:
        self.scenes = endless_scenes(config)
        super().__init__(self.scenes, config, fabric, step, mixed=mixed)
        size = config.batch_size // fabric.world_size
        images = min(
            IMAGES_PER_BLOCK.get(fabric.device.type, 64), MAX_BLOCK_BYTES // (3 * math.prod(config.image_size))
        )
        self.num_steps = max(1, min(images // size, config.max_steps))  # of a block
        self.stream = torch.cuda.Stream(fabric.device, priority=-1) if fabric.device.type == "cuda" else None  # first
        self.blocks: dict[int, Future[Block]] = {}
        self.rendering = threading.Lock()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        with self.rendering, super().paused():
            yield

    def __enter__(self) -> None:
        self.renderer = ThreadPoolExecutor(1)
        self._order_block(self.step // self.num_steps)
        super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self.renderer.shutdown(wait=True, cancel_futures=True)

    def _order_block(self, number: int) -> None:
        if number not in self.blocks:
            self.blocks[number] = self.renderer.submit(self._render, number)

    def _images(self, step: int) -> Tensor:
        number, row = divmod(step, self.num_steps)
        self._order_block(number)
        self._order_block(number + 1)
        self.blocks = {n: block for n, block in self.blocks.items() if n >= number}
        images, rendered = self.blocks[number].result()
        if rendered is not None:
            stream = torch.cuda.current_stream(images.device)
            stream.wait_event(rendered)
            images.record_stream(stream)
        return images[row]

    def _render(self, number: int) -> Block:
        steps = range(number * self.num_steps, (number + 1) * self.num_steps)
        with self.rendering, torch.no_grad(), self._own_stream():
            images = render(self._contents(steps), self.scenes.image_size, self.fabric.device).image[:, 0]
            rendered = None if self.stream is None else self.stream.record_event()
        return Block(images.unflatten(0, (self.num_steps, -1)), rendered)

    @contextlib.contextmanager
    def _own_stream(self) -> Iterator[None]:
        if self.stream is None:
            yield
        else:
            with torch.cuda.stream(self.stream):
                yield

    def _contents(self, steps: range) -> SceneBatch:
        """Return what the scenes of these steps contain, with the textures that the steps ask for."""
        scenes, indices = self.scenes, np.concatenate([self.indices(step) for step in steps])
        address = (scenes.family, "train", self.config.seed, indices)
        contents = sample_scenes(*address, scenes.num_objects, self.fabric.device, scenes.variation)
        device = contents.count.device
        strength = np.concatenate([self._strength(step) for step in steps])
        if (strength < 1).any():
            contents = contents.scale_textures(torch.from_numpy(strength).to(device))
        blend = np.concatenate([self._blend(step) for step in steps])
        return contents.blend_into_ground(torch.from_numpy(blend).to(device)) if blend.any() else contents

    def indices(self, step: int) -> np.ndarray:
        """Return the scenes of this process at a step."""
        size, options = self.config.batch_size, self.config.data
        indices = np.arange(step * size, (step + 1) * size)
        if isinstance(options, TexturedSceneConfig) and options.num_flat_scenes and has_flat_textures(options, step):
            indices %= options.num_flat_scenes
        return self._share(indices)

    def _strength(self, step: int) -> np.ndarray:
        """Return the strength of the textures of each image."""
        options, size = self.config.data, self.config.batch_size
        if not isinstance(options, TexturedSceneConfig) or step >= options.texture_ramp_end:
            return self._share(np.ones(size))
        return self._share(self._random(step, TEXTURE_STRENGTH).uniform(*texture_range(options, step), size))

    def _blend(self, step: int) -> np.ndarray:
        """Return how far the colors of objects are moved toward the ground's, in each image."""
        options, size = self.config.data, self.config.batch_size
        if not isinstance(options, TexturedSceneConfig) or step < max(
            options.low_contrast_start, options.texture_ramp_end
        ):
            return self._share(np.zeros(size))
        random = self._random(step, LOW_CONTRAST)
        blend, replaced = MAX_BLEND * random.random(size), random.random(size) < options.low_contrast
        return self._share(np.where(replaced, blend, 0.0))


def endless_scenes(config: RunConfig) -> Scenes:
    """Return the built-in scenes of a run. Raises a ValueError if its data are something else."""
    data = open_split(config, "train", None)
    if not (isinstance(data, Scenes) and data.frames == 1):
        raise ValueError(
            f"num_images is endless, but data is {data_text(config.data)!r}; expected built-in scenes of images, "
            "such as textured, or a number of images"
        )
    return data
