"""Draw the idea in three figures: the graph, the steps from an image to its slots, the reach of a weight.

    python examples/idea.py --out out/idea

Writes idea_graph.png, idea_steps.png and reach.png; docs/idea.md explains them.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch

from cutslots import GridCut, Scenes, load
from cutslots.models.discovery import to_float
from cutslots.modules.partition import KPartition
from cutslots.modules.slots import CutSlots

matplotlib.use("Agg")
import matplotlib.pyplot as plt

GREY, BLUE, RED, GREEN = "#9aa5b1", "#2b6cb0", "#c53030", "#2f855a"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("out/idea"), help="folder to write to")
    parser.add_argument("--scene", type=int, default=25, help="index of the test scene")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for name, figure in {"idea_graph": graph(), "idea_steps": steps(args.scene), "reach": reach()}.items():
        figure.savefig(args.out / f"{name}.png", dpi=100)
        print(f"wrote {args.out / f'{name}.png'}")


def graph(side: int = 4, pixel: tuple[int, int] = (1, 2)) -> plt.Figure:
    """Return a figure of a pixel grid between source and sink, with the six weights of one pixel in color."""
    figure, axis = plt.subplots(figsize=(6.4, 4.2), layout="constrained")
    position = lambda i, j: (1.5 * j - 0.55 * i, -0.5 * i)
    source, sink = (1.5, 2.1), (1.35, -3.6)
    for i, j in np.ndindex(side, side):
        x, y = position(i, j)
        for end in (source, sink):
            axis.plot([x, end[0]], [y, end[1]], color=GREY, lw=0.5, alpha=0.5, zorder=0)
        for k, l in ((i, j + 1), (i + 1, j)):
            if k < side and l < side:
                axis.plot(*zip((x, y), position(k, l), strict=True), color=GREY, lw=1.2, zorder=1)
        axis.scatter(x, y, s=90, color="white", edgecolors=GREY, lw=1.5, zorder=3)
    i, j = pixel
    centre = position(i, j)
    ends = [
        (position(i, j + 1), BLUE),
        (position(i, j - 1), BLUE),
        (position(i + 1, j), BLUE),
        (position(i - 1, j), BLUE),
    ]
    for end, color in [*ends, (sink, RED)]:
        arrow(axis, centre, end, color)
    arrow(axis, source, centre, GREEN)
    axis.scatter(*centre, s=110, color=BLUE, zorder=4)
    for (x, y), text, color in ((source, "source s", GREEN), (sink, "sink t", RED)):
        axis.scatter(x, y, s=160, color=color, zorder=4)
        axis.annotate(text, (x, y), (14, -4), textcoords="offset points", color=color, fontsize=12)
    axis.annotate("a pixel and its six weights", centre, (60, 52), textcoords="offset points", color=BLUE, fontsize=11)
    axis.set_axis_off()
    return figure


def arrow(axis: plt.Axes, start: tuple[float, float], end: tuple[float, float], color: str) -> None:
    """Draw an arrow between two points."""
    style = {"arrowstyle": "-|>", "color": color, "lw": 2, "shrinkA": 5, "shrinkB": 7}
    axis.annotate("", end, start, arrowprops=style, zorder=2)


def steps(scene: int) -> plt.Figure:
    """Return a figure of edge weights, vertex variables, masks, slots and reconstruction of one test scene."""
    model = load("tiny-64")
    assert isinstance(model.slots, CutSlots) and isinstance(model.slots.partition, KPartition)
    image = Scenes("plain", "test", size=model.image_size, num_objects=(2, 5)).get_batch([scene]).image
    with torch.no_grad():
        features = model.slots.position(model.encoder(model.normalize(image)))
        w = model.slots.partition.edge_weights(features)
        p = model.slots.partition.vertices(w)[0]
        output = model(image)
    slots = output.slot_reconstructions[0] * output.masks[0][:, None] + (1 - output.masks[0][:, None])
    best = int(output.masks[0, 1:].amax((1, 2)).argmax())
    figure, axes = plt.subplots(5, 7, figsize=(11, 8.4), layout="constrained")
    for axis in axes.flat:
        axis.set_axis_off()
    show(axes[0, 0], channels_last(to_float(image)[0]), "image")
    limit = float(w[0, 2 + best].abs().max())
    for k, name in enumerate(("right", "left", "down", "up", "source", "sink")):
        show(axes[0, k + 1], w[0, 2 + best, k], f"w, object {best + 1}, {name}", cmap="RdBu", vmin=-limit, vmax=limit)
    for k, each in enumerate(p):
        name = ("background", "foreground")[k] if k < 2 else f"object {k - 1}"
        limit = float((p[:2] if k < 2 else p[2:]).abs().max())
        show(axes[1, k], each, f"p, {name}", cmap="RdBu", vmin=-limit, vmax=limit)
    rows = {"partition": output.partition_masks[0], "mask": output.masks[0], "slot": slots}
    for row, (name, images) in enumerate(rows.items(), start=2):
        for k, each in enumerate(images):
            pixels = channels_last(each) if each.ndim == 3 else each
            show(axes[row, k], pixels, f"{name} {k + 1}", cmap="gray", vmin=0, vmax=1)
    show(axes[4, 6], channels_last(output.reconstruction[0]), "reconstruction")
    return figure


def reach(side: int = 48) -> plt.Figure:
    """Return a figure of p for a noisy disc tied to the source at four reaches, and around one tied pixel."""
    y, x = np.mgrid[:side, :side] - side / 2 + 0.5
    disc_weights = torch.from_numpy((np.hypot(y, x) < side / 4) + np.random.default_rng(0).normal(0, 0.8, (side, side)))
    pixel_weights = torch.zeros(side, side, dtype=torch.float64)
    pixel_weights[side // 2, side // 2] = 1.0
    w = torch.zeros(2, 6, side, side, dtype=torch.float64)
    w[:, 4] = torch.stack([disc_weights, pixel_weights])  # source -> pixel
    figure, axes = plt.subplots(1, 6, figsize=(11, 2.1), layout="constrained", width_ratios=[1, 1, 1, 1, 1, 1.5])
    show(axes[0], disc_weights, "w, source", cmap="RdBu", vmin=-2, vmax=2)
    for axis, each in zip(axes[1:5], (None, 2.0, 4.0, 8.0), strict=True):
        disc, pixel = GridCut((side, side), reach=each).double()(w)
        largest = float(disc.abs().max())
        title = "p, reach 0.71 (paper)" if each is None else f"p, reach {each:g}"
        show(axis, disc, title, cmap="RdBu", vmin=-largest, vmax=largest)
        axes[5].plot(np.arange(-12, 13), (pixel / pixel.max())[side // 2, side // 2 - 12 : side // 2 + 13].numpy())
    for axis in axes[:5]:
        axis.set_axis_off()
    axes[5].legend(("0.71", "2", "4", "8"), frameon=False, fontsize=7, title="reach", title_fontsize=7)
    axes[5].set_title("p around one tied pixel", fontsize=9)
    axes[5].tick_params(labelsize=7)
    axes[5].spines[["top", "right"]].set_visible(False)
    return figure


def channels_last(x: torch.Tensor) -> np.ndarray:
    """Return an image (3, H, W) as (H, W, 3) in [0, 1]."""
    return x.clamp(0, 1).permute(1, 2, 0).numpy()


def show(axis: plt.Axes, image: Any, title: str, **kwargs: Any) -> None:
    """Draw an image with a title."""
    axis.imshow(image.numpy() if isinstance(image, torch.Tensor) else image, **kwargs)
    axis.set_title(title, fontsize=9)


if __name__ == "__main__":
    main()
