"""Compare the minimum cut of a photograph (MinCut) with the paper's relaxation (GridCut) on the same weights.

    python examples/minimum_cuts.py --out out/minimum_cuts

Writes minimum_cuts.png: the photograph, p of both layers, p > 0 of both, and the level sets of MinCut.
docs/minimum_cuts.md explains the figure.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib
import numpy as np
import torch
from photograph import photograph, seeds, weights

from cutslots import Graph, GridCut, MinCut
from cutslots.programs import exact
from cutslots.programs.graph import grid_edges

matplotlib.use("Agg")
import matplotlib.pyplot as plt

THRESHOLDS = (-4.0, -2.0, 0.0, 2.0, 4.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("out/minimum_cuts"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)

    image = photograph()
    shape, w = image.shape[:2], weights(image)
    found = MinCut(shape, tolerance=1e-8, max_iterations=20_000).double().solve(w)
    relaxed = GridCut(shape, anchor=1.0).double()(w).numpy()
    same = GridCut(shape, anchor=1.0).double()(without_capacities(w)).numpy()
    save_figure(image, relaxed, found.p.numpy(), args.out / "minimum_cuts.png")

    print(f"MinCut: gap {float(found.gap):.1e} after {int(found.iterations)} iterations")
    print(f"GridCut without capacities between neighbours: p differs by at most {np.abs(relaxed - same).max():.1e}")
    for threshold in THRESHOLDS:
        shifted = w.clone()  # gamma is 1: source - sink is lowered by the threshold
        shifted[4] += max(-threshold, 0)
        shifted[5] += max(threshold, 0)
        cut = exact.min_cut(Graph.grid(shape), shifted[torch.as_tensor(grid_edges(shape))].numpy())
        side = cut.side[:-2].reshape(shape)
        agreement = ((found.p.numpy() > threshold) == side).mean()
        print(
            f"p > {threshold:g}: {side.mean():.1%} of the pixels; {agreement:.2%} as the maximum flow of these weights"
        )
    print(f"p > 0 of GridCut: {((relaxed > 0) == found.cut.numpy()).mean():.1%} of the pixels as the minimum cut")
    print(f"wrote {args.out / 'minimum_cuts.png'}")


def without_capacities(w: torch.Tensor) -> torch.Tensor:
    """Return the weights with zeros between neighbours."""
    return torch.cat([torch.zeros_like(w[:4]), w[4:]])


def save_figure(image: np.ndarray, relaxed: np.ndarray, p: np.ndarray, path: Path) -> None:
    figure, axes = plt.subplots(3, 3, figsize=(12, 7.6), layout="constrained")
    inside, border = seeds(*p.shape)
    marked = image.copy()
    marked[inside] = 0.6 * marked[inside] + [0.0, 0.4, 0.0]
    marked[border] = 0.6 * marked[border] + [0.4, 0.0, 0.0]
    rows = [(relaxed, "GridCut, the paper's relaxation"), (p, "MinCut, the minimum cut")]
    axes[0, 0].imshow(marked)
    axes[0, 0].set_title("photograph; known object and background", fontsize=10)
    axes[0, 2].imshow(np.digitize(p, THRESHOLDS), cmap="RdBu")
    axes[0, 2].set_title("level sets of MinCut: p > -4, -2, 0, 2, 4", fontsize=10)
    unary = weights(image)[4:]
    values = [((unary[0] - unary[1]).numpy(), "source - sink", axes[0, 1])]
    values += [(value, f"p of {name}", axes[row, 0]) for row, (value, name) in enumerate(rows, 1)]
    for value, title, axis in values:
        largest = np.quantile(np.abs(value), 0.98)
        axis.imshow(value, cmap="RdBu", vmin=-largest, vmax=largest)
        axis.set_title(title, fontsize=10)
    for row, (value, _) in enumerate(rows, 1):
        axes[row, 1].imshow(value > 0, cmap="gray")
        axes[row, 1].set_title("p > 0", fontsize=10)
        axes[row, 2].imshow(np.where((value > 0)[..., None], image, 1.0))
        axes[row, 2].set_title("photograph where p > 0", fontsize=10)
    for axis in axes.flat:
        axis.set_axis_off()
    figure.savefig(path, dpi=85)


if __name__ == "__main__":
    main()
