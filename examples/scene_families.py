"""Draw the families of built-in scenes: a row of images above a row of masks for each family.

python examples/scene_families.py --out out/scenes
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import get_args

import numpy as np
from PIL import Image

from cutslots.scenes import FAMILIES, Scenes
from cutslots.scenes.variation import Variation
from cutslots.viz.palette import PALETTE


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("out/scenes"), help="folder to write to")
    parser.add_argument("--size", type=int, nargs="+", default=[128], help="side of the images, or height and width")
    parser.add_argument("--families", nargs="+", default=list(FAMILIES), choices=list(FAMILIES), help="which ones")
    parser.add_argument("--variation", default="none", choices=get_args(Variation), help="how much the scenes vary")
    parser.add_argument("--columns", type=int, default=8, help="scenes of each family, or frames of the video")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    rows = []
    for family in args.families:
        size = args.size[0] if len(args.size) == 1 else tuple(args.size)
        scenes = Scenes(family, "test", size, variation=args.variation)
        if scenes.frames == 1:
            image, mask = scenes.get_batch(range(args.columns))
        else:  # frames of one video
            frames = np.linspace(0, scenes.frames - 1, args.columns).astype(int)
            image, mask = scenes.get_frames(np.zeros_like(frames), frames)
        rows += [np.concatenate([*image.permute(0, 2, 3, 1).numpy()], 1), np.concatenate([*PALETTE[mask.numpy()]], 1)]
    path = args.out / ("families.png" if args.variation == "none" else "varied.png")
    Image.fromarray(np.concatenate(rows)).save(path, optimize=True)
    print(f"rows: {', '.join(args.families)}; wrote {path}")


if __name__ == "__main__":
    main()
