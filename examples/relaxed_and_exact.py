"""Compare the relaxed, the soft and the exact minimum cut of one photograph.

    python examples/relaxed_and_exact.py --out out/demo

Writes relaxed_and_exact.png: the vertex variables p of the min-cut QP at the paper's reach and at longer ones, their
softmax over the two sides, and the exact minimum cut of the same weights by maximum flow. docs/cuts.md explains the
figure.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
from photograph import photograph, seeds, weights

from cutslots import Graph, GridCut
from cutslots.programs import exact
from cutslots.programs.graph import grid_edges

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("out/demo"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)

    image = photograph()
    shape, w = image.shape[:2], weights(image)
    relaxed = {reach: GridCut(shape, reach=reach, anchor=1.0).double()(w).numpy() for reach in (None, 2.0, 6.0)}
    start = time.perf_counter()
    cut = exact.min_cut(Graph.grid(shape), w[torch.as_tensor(grid_edges(shape))].numpy())
    seconds = time.perf_counter() - start
    side = cut.side[:-2].reshape(shape)
    path = args.out / "relaxed_and_exact.png"
    save_figure(image, relaxed, side, path)

    print(f"exact minimum cut: value {cut.value:.1f}, {side.mean():.1%} of the pixels, {seconds:.2f} s")
    for reach, p in relaxed.items():
        agreement = ((p > 0) == side).mean()
        print(f"p > 0 at reach {reach or 0.71:g}: {(p > 0).mean():.1%} of the pixels, {agreement:.1%} as the exact cut")
    print(f"wrote {path}")


def save_figure(image: np.ndarray, relaxed: dict[float | None, np.ndarray], side: np.ndarray, path: Path) -> None:
    figure, axes = plt.subplots(3, 4, figsize=(13, 7.4), layout="constrained")
    inside, border = seeds(*side.shape)
    marked = image.copy()
    marked[inside] = 0.6 * marked[inside] + [0.0, 0.4, 0.0]
    marked[border] = 0.6 * marked[border] + [0.4, 0.0, 0.0]
    show(axes[0, 0], marked, "photograph; known object and background")
    show(axes[1, 0], np.where(side[..., None], image, 1.0), "exact minimum cut")
    outline = np.zeros_like(side)
    outline[:, 1:] |= side[:, 1:] != side[:, :-1]
    outline[1:] |= side[1:] != side[:-1]
    show(axes[2, 0], np.where(outline[..., None], [1.0, 0.2, 0.0], image), "its border")
    for row, (reach, p) in enumerate(relaxed.items()):
        name = "reach 0.71, the paper" if reach is None else f"reach {reach:g}"
        largest = np.abs(p).max()
        show(axes[row, 1], p, f"p, {name}", cmap="RdBu", vmin=-largest, vmax=largest)
        soft = 1 / (1 + np.exp(-2 * p / 0.5))
        show(axes[row, 2], soft, "softmax of (p, -p), temperature 0.5", cmap="gray", vmin=0, vmax=1)
        agreement = ((p > 0) == side).mean()
        show(axes[row, 3], np.where((p > 0)[..., None], image, 1.0), f"p > 0 ({agreement:.1%} as the exact cut)")
    figure.savefig(path, dpi=110)


def show(axis: plt.Axes, image: np.ndarray, title: str, **kwargs: Any) -> None:
    axis.imshow(image, **kwargs)
    axis.set_title(title, fontsize=9)
    axis.set_axis_off()


if __name__ == "__main__":
    main()
