"""The families of built-in scenes, one row of pictures and one of masks for each.

python examples/scene_families.py --out out/scenes
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from PIL import Image

from cutslots.scenes import FAMILIES, Scenes
from cutslots.scenes.files import PALETTE


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("out/scenes"))
    parser.add_argument("--size", type=int, default=128)
    parser.add_argument("--columns", type=int, default=8)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    rows = []
    for family in FAMILIES:
        scenes = Scenes(family, "test", args.size)
        if scenes.frames == 1:
            image, mask = scenes.render(range(args.columns))
        else:  # one film instead of several scenes
            shown = np.linspace(0, scenes.frames - 1, args.columns).astype(int)
            image, mask = (x[0, shown] for x in scenes.render([0]))
        rows += [np.concatenate([*image.permute(0, 2, 3, 1).numpy()], 1), np.concatenate([*PALETTE[mask.numpy()]], 1)]
    path = args.out / "families.png"
    Image.fromarray(np.concatenate(rows)).save(path, optimize=True)
    print(f"rows: {', '.join(FAMILIES)}; wrote {path}")


if __name__ == "__main__":
    main()
