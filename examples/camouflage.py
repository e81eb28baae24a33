"""The camouflage augmentation: training images, the labels of a teacher, and the images with hidden objects.

python examples/camouflage.py --out out/camouflage.png
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch

from cutslots import Scenes, load
from cutslots.evaluation.visualize import colorize
from cutslots.training.augment import camouflage
from cutslots.training.teacher import label_images
from cutslots.viz.images import blend_colors, image_grid, to_uint8

SCENES = range(24, 32)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("out/camouflage.png"))
    args = parser.parse_args()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    image, mask = Scenes("textured", "train").get_batch(SCENES)
    labels = label_images(load("textured-128"), image)
    numbers = torch.rand(2, len(image), generator=torch.Generator().manual_seed(0))
    hidden = to_uint8(camouflage(image / 255, labels, torch.ones(len(image)), *numbers))
    shown = to_uint8(image / 255.0)
    colors = [colorize(a.astype(np.int64), b) for a, b in zip(labels.numpy(), mask.numpy(), strict=True)]
    overlays = [blend_colors(a, b) for a, b in zip(shown, colors, strict=True)]
    image_grid([list(shown), overlays, list(hidden)]).save(args.out)
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
