"""The idea in three pictures: the graph, what the shipped model makes of one scene, how far a weight is felt.

    python examples/idea.py --out out/idea

Writes idea_graph.png, idea_steps.png and reach.png; docs/idea.md says what to see in them.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch

from cutslots import GridCut, Scenes, load
from cutslots.model import as_floats
from cutslots.slots import CutSlots

matplotlib.use("Agg")
import matplotlib.pyplot as plt

GREY, BLUE, RED, GREEN = "#9aa5b1", "#2b6cb0", "#c53030", "#2f855a"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("out/idea"))
    parser.add_argument("--scene", type=int, default=25, help="number of the test scene")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for name, figure in {"idea_graph": graph(), "idea_steps": steps(args.scene), "reach": reach()}.items():
        figure.savefig(args.out / f"{name}.png", dpi=100)
        print(f"wrote {args.out / f'{name}.png'}")


def graph(side: int = 4, shown: tuple[int, int] = (1, 2)) -> plt.Figure:
    """A grid of pixels between the source and the sink, the six weights of one pixel in colour."""
    figure, axis = plt.subplots(figsize=(6.4, 4.2), layout="constrained")
    place = lambda i, j: (1.5 * j - 0.55 * i, -0.5 * i)
    source, sink = (1.5, 2.1), (1.35, -3.6)
    for i, j in np.ndindex(side, side):
        x, y = place(i, j)
        for end in (source, sink):
            axis.plot([x, end[0]], [y, end[1]], color=GREY, lw=0.5, alpha=0.5, zorder=0)
        for k, l in ((i, j + 1), (i + 1, j)):
            if k < side and l < side:
                axis.plot(*zip((x, y), place(k, l), strict=True), color=GREY, lw=1.2, zorder=1)
        axis.scatter(x, y, s=90, color="white", edgecolors=GREY, lw=1.5, zorder=3)
    i, j = shown
    here = place(i, j)
    ends = [(place(i, j + 1), BLUE), (place(i, j - 1), BLUE), (place(i + 1, j), BLUE), (place(i - 1, j), BLUE)]
    for end, colour in [*ends, (sink, RED)]:
        arrow(axis, here, end, colour)
    arrow(axis, source, here, GREEN)
    axis.scatter(*here, s=110, color=BLUE, zorder=4)
    for (x, y), text, colour in ((source, "source s", GREEN), (sink, "sink t", RED)):
        axis.scatter(x, y, s=160, color=colour, zorder=4)
        axis.annotate(text, (x, y), (14, -4), textcoords="offset points", color=colour, fontsize=12)
    axis.annotate("a pixel and its six weights", here, (60, 52), textcoords="offset points", color=BLUE, fontsize=11)
    axis.set_axis_off()
    return figure


def arrow(axis: plt.Axes, start: tuple[float, float], end: tuple[float, float], colour: str) -> None:
    style = {"arrowstyle": "-|>", "color": colour, "lw": 2, "shrinkA": 5, "shrinkB": 7}
    axis.annotate("", end, start, arrowprops=style, zorder=2)


def steps(scene: int) -> plt.Figure:
    """Weights, vertex variables, masks, slots and the redrawn picture of one test scene, by the shipped model."""
    model = load("tiny")
    assert isinstance(model.slots, CutSlots)
    image = Scenes("plain", "test", size=model.config.size, objects=(2, 5)).render([scene]).image
    with torch.no_grad():
        features = model.slots.position(model.encoder(as_floats(image) * 2 - 1))
        w = model.slots.partition.weights(features)
        p = model.slots.partition.vertices(w)[0]
        found = model(image)
    slots = found.pictures[0] * found.masks[0][:, None] + (1 - found.masks[0][:, None])
    which = int(found.masks[0, 1:].amax((1, 2)).argmax())  # the object that is drawn most firmly
    figure, axes = plt.subplots(5, 7, figsize=(11, 8.4), layout="constrained")
    for axis in axes.flat:
        axis.set_axis_off()
    show(axes[0, 0], colours(as_floats(image)[0]), "image")
    limit = float(w[0, 2 + which].abs().max())
    for k, name in enumerate(("right", "left", "down", "up", "source", "sink")):
        show(axes[0, k + 1], w[0, 2 + which, k], f"w, object {which + 1}, {name}", cmap="RdBu", vmin=-limit, vmax=limit)
    for k, each in enumerate(p):
        name = ("ground", "the rest")[k] if k < 2 else f"object {k - 1}"
        limit = float((p[:2] if k < 2 else p[2:]).abs().max())
        show(axes[1, k], each, f"p, {name}", cmap="RdBu", vmin=-limit, vmax=limit)
    rows = {"part": found.partition[0], "mask": found.masks[0], "slot": slots}
    for row, (name, pictures) in enumerate(rows.items(), start=2):
        for k, each in enumerate(pictures):
            shown = colours(each) if each.ndim == 3 else each
            show(axes[row, k], shown, f"{name} {k + 1}", cmap="gray", vmin=0, vmax=1)
    show(axes[4, 6], colours(found.reconstruction[0]), "redrawn")
    return figure


def reach(side: int = 48) -> plt.Figure:
    """p of a noisy disc that is tied to the source, for four reaches; and of one tied pixel, along a row through it."""
    y, x = np.mgrid[:side, :side] - side / 2 + 0.5
    tied = torch.from_numpy((np.hypot(y, x) < side / 4) + np.random.default_rng(0).normal(0, 0.8, (side, side)))
    alone = torch.zeros(side, side, dtype=torch.float64)
    alone[side // 2, side // 2] = 1.0
    w = torch.zeros(2, 6, side, side, dtype=torch.float64)
    w[:, 4] = torch.stack([tied, alone])  # source -> pixel
    figure, axes = plt.subplots(1, 6, figsize=(11, 2.1), layout="constrained", width_ratios=[1, 1, 1, 1, 1, 1.5])
    show(axes[0], tied, "w, source", cmap="RdBu", vmin=-2, vmax=2)
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


def colours(x: torch.Tensor) -> np.ndarray:
    return x.clamp(0, 1).permute(1, 2, 0).numpy()


def show(axis: plt.Axes, picture: Any, title: str, **kwargs: Any) -> None:
    axis.imshow(picture.numpy() if isinstance(picture, torch.Tensor) else picture, **kwargs)
    axis.set_title(title, fontsize=9)


if __name__ == "__main__":
    main()
