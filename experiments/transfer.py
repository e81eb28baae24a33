"""What keeps a checkpoint from scenes of another look: one property of the built-in scenes changed at a time.

    python -m experiments.transfer --checkpoint plain-128 --family plain --num-images 40

Every row scores the same scenes with one change: of the light, the camera, the objects, the surfaces or the image.
Writes a table of ARI-FG and mIoU of decoder and refined masks, and their differences to the scenes as they are.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import tyro
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from cutslots.evaluation.metrics import MetricRows, image_metrics
from cutslots.files import write_atomically
from cutslots.models.checkpoints import load
from cutslots.models.discovery import Discovery
from cutslots.models.refinement import refine_masks
from cutslots.scenes import materials, render
from cutslots.scenes.sample import sample_scenes
from cutslots.scenes.scene_batch import Camera, SceneBatch
from cutslots.training.losses import gaussian_blur

SIZE, BATCH = 128, 10

Scene = Callable[[SceneBatch], SceneBatch]
ImageMap = Callable[[Tensor], Tensor]  # of uint8 images (B, 3, H, W)


@dataclass(frozen=True)
class Change:
    """What a row changes: the contents, constants of the renderer, the image, the size at which it is rendered."""

    scene: Scene = lambda scenes: scenes
    constants: dict[str, Any] = dataclasses.field(default_factory=dict)
    image: ImageMap = lambda image: image
    size: int = SIZE
    flip_mask: bool = False


# --------------------------------------------------------------------------------------------------------------- scenes


def mirrored_light(scenes: SceneBatch) -> SceneBatch:
    """Move both lights to the other side of the plane through the camera, its target and the vertical."""
    across = Camera(scenes.camera, scenes.target).right

    def mirror(x: Tensor) -> Tensor:
        offset = ((x - scenes.camera) * across).sum(1, keepdim=True)
        return x - 2 * offset * across

    return replace(scenes, key_light=mirror(scenes.key_light), fill_light=mirror(scenes.fill_light))


def strengths(key: float, fill: float, ambient: float) -> Scene:
    def change(scenes: SceneBatch) -> SceneBatch:
        return replace(scenes, light_strength=scenes.light_strength * torch.tensor([key, fill, ambient]).double())

    return change


def key_light(x: float, y: float, z: float) -> Scene:
    return lambda scenes: replace(scenes, key_light=torch.tensor([x, y, z]).double().expand_as(scenes.key_light))


def camera(distance: float = 1.0, up: float = 0.0) -> Scene:
    def change(scenes: SceneBatch) -> SceneBatch:
        eye = scenes.target + distance * (scenes.camera - scenes.target)
        return replace(scenes, camera=eye + torch.tensor([0.0, 0.0, up]).double())

    return change


def sizes(factor: float) -> Scene:
    def change(scenes: SceneBatch) -> SceneBatch:
        position = scenes.position.clone()
        position[..., 2] *= factor  # objects stay on the ground
        return replace(scenes, size=factor * scenes.size, position=position)

    return change


def material(name: str) -> Scene:
    def change(scenes: SceneBatch) -> SceneBatch:
        found = scenes.material.clone()
        found[:, 1:] = materials.NAMES.index(name)
        return replace(scenes, material=found)

    return change


def finish(column: int, value: float) -> Scene:
    def change(scenes: SceneBatch) -> SceneBatch:
        found = scenes.finish.clone()
        found[..., column] = value
        return replace(scenes, finish=found)

    return change


def ground(factor: float) -> Scene:
    def change(scenes: SceneBatch) -> SceneBatch:
        palette = scenes.palette.clone()
        palette[:, 0] = (factor * palette[:, 0]).clamp(0, 1)
        return replace(scenes, palette=palette)

    return change


# --------------------------------------------------------------------------------------------------------------- images


def in_float(function: ImageMap) -> ImageMap:
    """Apply a function of values from 0 to 1 to uint8 images."""
    return lambda image: (255 * function(image / 255).clamp(0, 1) + 0.5).to(torch.uint8)


def noise(sigma: float) -> ImageMap:
    def change(image: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        return image + sigma / 255 * torch.randn(image.shape, generator=generator)

    return in_float(change)


def saturation(factor: float) -> ImageMap:
    return in_float(lambda image: image.mean(1, keepdim=True) + factor * (image - image.mean(1, keepdim=True)))


def jpeg(quality: int) -> ImageMap:
    def change(image: Tensor) -> Tensor:
        made = []
        for each in image:
            data = io.BytesIO()
            Image.fromarray(each.permute(1, 2, 0).numpy()).save(data, "JPEG", quality=quality)
            made.append(torch.from_numpy(np.array(Image.open(data))).permute(2, 0, 1))
        return torch.stack(made)

    return change


def resampled(side: int) -> ImageMap:
    def change(image: Tensor) -> Tensor:
        small = F.interpolate(image, (side, side), mode="bilinear", antialias=True)
        return F.interpolate(small, (SIZE, SIZE), mode="bilinear", antialias=True)

    return in_float(change)


def cast(*gains: float) -> ImageMap:
    return in_float(lambda image: image * torch.tensor(gains)[:, None, None])


CHANGES = {
    "as they are": Change(),
    "light: from the other side": Change(mirrored_light),
    "light: from above": Change(key_light(0, 0, 9)),
    "light: from behind the camera": Change(key_light(7, -7, 7)),
    "light: from behind the scene": Change(key_light(-6, 6, 6)),
    "light: key only": Change(strengths(1, 0, 1)),
    "light: fill as strong as key": Change(strengths(0.7, 2.3, 1)),
    "light: ambient only": Change(strengths(0, 0, 2.5)),
    "light: ambient halved": Change(strengths(1, 1, 0.5)),
    "shadows: hard": Change(constants={"LIGHT_RADIUS": 0.0}),
    "shadows: three times as soft": Change(constants={"LIGHT_RADIUS": 2.1}),
    "shadows: none": Change(constants={"_unshadowed": lambda batch, point, *_: torch.ones_like(point[0])}),
    "ambient occlusion: none": Change(constants={"_visible_sky": lambda batch, point, *_: torch.ones_like(point[0])}),
    "camera: closer, 0.85": Change(camera(0.85)),
    "camera: further, 1.2": Change(camera(1.2)),
    "camera: 2 units higher": Change(camera(up=2.0)),
    "camera: 2 units lower": Change(camera(up=-2.0)),
    "objects: 0.8 of the size": Change(sizes(0.8)),
    "objects: 1.15 of the size": Change(sizes(1.15)),
    "objects: all of rubber": Change(material("rubber")),
    "objects: all of metal": Change(material("metal")),
    "surfaces: no relief": Change(finish(1, 0.0)),
    "surfaces: smooth": Change(finish(2, 0.1)),
    "surfaces: rough": Change(finish(2, 0.9)),
    "ground: half as bright": Change(ground(0.5)),
    "ground: 1.6 times as bright": Change(ground(1.6)),
    "image: mirrored": Change(image=lambda image: image.flip(-1), flip_mask=True),
    "image: noise of 5": Change(image=noise(5)),
    "image: noise of 15": Change(image=noise(15)),
    "image: blur of 1 pixel": Change(image=in_float(lambda image: gaussian_blur(image, 1.0))),
    "image: JPEG, quality 75": Change(image=jpeg(75)),
    "image: JPEG, quality 30": Change(image=jpeg(30)),
    "image: resampled from 96": Change(image=resampled(96)),
    "image: half the saturation": Change(image=saturation(0.5)),
    "image: 1.5 times the saturation": Change(image=saturation(1.5)),
    "image: brighter, 1.25": Change(image=cast(1.25, 1.25, 1.25)),
    "image: darker, 0.7": Change(image=cast(0.7, 0.7, 0.7)),
    "image: warm": Change(image=cast(1.1, 1.0, 0.85)),
    "image: gamma of 1.4": Change(image=in_float(lambda image: image**1.4)),
}


# -------------------------------------------------------------------------------------------------------------- scoring


@dataclass
class Options:
    checkpoint: str = "textured-128"
    """A name of shipped weights, or a run folder."""
    family: str = "textured"
    """Family of built-in scenes."""
    num_images: int = 40
    """Validation scenes."""
    out: Path = Path("out/transfer")
    """Folder of the results."""
    only: str = ""
    """Only the changes whose names contain this."""


@contextlib.contextmanager
def constants(values: dict[str, Any]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for name, value in values.items():
            stack.enter_context(mock.patch.object(render, name, value))
        yield


@torch.no_grad()
def score(model: Discovery, scenes: SceneBatch, change: Change) -> dict[str, float]:
    """Return ARI-FG and mIoU of decoder and refined masks."""
    rows = {"": MetricRows(), "refined_": MetricRows()}
    for first in range(0, len(scenes), BATCH):
        part = change.scene(scenes.select(slice(first, first + BATCH)))
        with constants(change.constants):
            rendered = render.render(part, (change.size, change.size))
        image, mask = change.image(rendered.image[:, 0]), rendered.mask[:, 0].long()
        mask = mask.flip(-1) if change.flip_mask else mask
        output = model(image)
        for prefix, masks in (("", output.masks), ("refined_", refine_masks(output, image))):
            numbers = list(range(first, first + len(image)))
            rows[prefix].add(numbers, image_metrics(mask, masks.argmax(1), masks.shape[1]))
    means = {prefix: found.means() for prefix, found in rows.items()}
    return {prefix + name: means[prefix][name] for prefix in rows for name in ("ari_fg", "miou")}


def main(options: Options) -> None:
    model = load(options.checkpoint).eval()
    scenes = sample_scenes(options.family, "val", 0, np.arange(options.num_images))
    results: dict[str, dict[str, float]] = {}
    options.out.mkdir(parents=True, exist_ok=True)
    print(f"{options.checkpoint} on {options.num_images} scenes of {options.family}: ARI-FG / mIoU\n")
    print("| change | decoder masks | refined masks | ARI-FG, refined, less |\n|---|---|---|---|")
    for name, change in CHANGES.items():
        if options.only in name or name == "as they are":
            results[name] = found = score(model, scenes, change)
            cells = [f"{100 * found[p + 'ari_fg']:.1f} / {100 * found[p + 'miou']:.1f}" for p in ("", "refined_")]
            less = 100 * (results["as they are"]["refined_ari_fg"] - found["refined_ari_fg"])
            print(f"| {name} | {' | '.join(cells)} | {less:.1f} |", flush=True)
    write_atomically(options.out / f"{options.family}.json", json.dumps(results, indent=1).encode())


if __name__ == "__main__":
    main(tyro.cli(Options))
