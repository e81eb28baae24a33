"""Evaluate the labels that a teacher gives, refined with several parameters, for the table of docs/self_training.md.

    python -m experiments.labels textured-paper-128             # validation scenes of `textured` with flat textures
    python -m experiments.labels plain-128 --family plain

ARI-FG and mIoU are those of the labels against the true masks. The last column is the share of the objects' pixels that
the labels give to the background.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

import torch
import tyro
from torch import Tensor

from cutslots.evaluation.metrics import image_metrics
from cutslots.inference.predictor import find_background
from cutslots.models.checkpoints import load
from cutslots.models.discovery import Discovery
from cutslots.models.refinement import refine_masks
from cutslots.scenes import Scenes

PARAMETERS = ((0.5, 0.8), (0.2, 0.8), (0.5, 1.5), (0.2, 1.5), (0.5, 2.5))  # pixel_sigma, background_threshold
BATCH = 8


@torch.no_grad()
def evaluate_labels(
    teacher: Discovery, scenes: Scenes, num_images: int, parameters: Iterable[tuple[float, float]] = PARAMETERS
) -> dict[tuple[float, float], dict[str, float]]:
    """Return the mean metrics of the labels of the first images for each pair of parameters."""
    rows: dict[tuple[float, float], list[dict[str, Tensor]]] = {each: [] for each in parameters}
    for first in range(0, num_images, BATCH):
        image, truth = scenes.get_batch(range(first, min(first + BATCH, num_images)))
        output = teacher(image)
        for sigma, threshold in rows:
            labels = refine_masks(output, image, pixel_sigma=sigma, background_threshold=threshold).argmax(1)
            metrics = image_metrics(truth, labels)
            rows[sigma, threshold].append(
                {name: metrics[name] for name in ("ari_fg", "miou")} | {"lost": lost_pixels(truth, labels)}
            )
    return {
        each: {name: float(torch.cat([row[name] for row in rows[each]]).mean()) for name in rows[each][0]}
        for each in rows
    }


def lost_pixels(truth: Tensor, labels: Tensor) -> Tensor:
    """Return for every image the share of the objects' pixels whose label is that of the background."""
    background = torch.tensor([find_background(each) for each in labels.numpy()])
    is_object = truth != 0
    lost = is_object & (labels == background[:, None, None])
    return lost.flatten(1).sum(1) / is_object.flatten(1).sum(1).clamp(min=1)


def main(checkpoint: Annotated[str, tyro.conf.Positional], family: str = "textured", num_images: int = 48) -> None:
    """Print the metrics of a teacher's labels for each pair of parameters."""
    textures: dict[str, Any] = {"textures": "flat"} if family == "textured" else {}
    teacher = load(checkpoint)
    scenes = Scenes(family, "val", teacher.image_size, **textures)
    print("| pixel_sigma | background_threshold | ARI-FG / mIoU | object pixels in the background |\n|---|---|---|---|")
    for (sigma, threshold), row in evaluate_labels(teacher, scenes, num_images).items():
        ari_fg, miou, lost = (f"{100 * row[name]:.1f}" for name in ("ari_fg", "miou", "lost"))
        print(f"| {sigma} | {threshold} | {ari_fg} / {miou} | {lost} % |")


if __name__ == "__main__":
    tyro.cli(main)
