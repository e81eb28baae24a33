"""Training curves as inline images, drawn by matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cutslots.viz.html import svg_image

SHOWN_METRICS = {
    "ari_fg": ("ARI-FG", "o-", "#cc3311"),
    "ari": ("ARI", "^-", "#999933"),
    "miou": ("mIoU", "s-", "#009988"),
}


def training_curves(history: Sequence[dict[str, Any]]) -> str:
    """Return HTML of two plots against the training step: the reconstruction loss, and validation metrics.

    `history` is the content of a run's metrics.jsonl. Lines have a "step" and a "loss", or a "step" and metrics "val".
    The alternative text of each plot names its last values.
    """
    losses = [(line["step"], line["loss"]) for line in history if "loss" in line]
    validated = [line for line in history if "ari_fg" in line.get("val", {})]
    return f'<div class="curves">{_loss_curve(losses)}{_metric_curves(validated)}</div>'


def _loss_curve(losses: list[tuple[int, float]]) -> str:
    figure, axes = _axes()
    alt = "Curve of the reconstruction loss"
    if losses:
        axes.plot(*zip(*losses, strict=True), color="#4477aa", lw=1.2)
        alt += f": {losses[-1][1]:.3g} at step {losses[-1][0]}"
    axes.set(xlabel="step", title="reconstruction loss (mean squared error)", yscale="log")
    return svg_image(figure, alt)


def _metric_curves(validated: list[dict[str, Any]]) -> str:
    figure, axes = _axes()
    alt = "Curves of the validation metrics"
    steps = [line["step"] for line in validated]
    for name, (label, style, color) in SHOWN_METRICS.items():
        values = [100 * line["val"][name] for line in validated]
        axes.plot(steps, values, style, ms=4, lw=1.2, color=color, label=label)
    axes.set(xlabel="step", title="validation metrics (%)", ylim=(-2, 100))
    if validated:
        axes.legend(frameon=False)
        last = ", ".join(
            f"{label} {100 * validated[-1]['val'][name]:.1f}" for name, (label, *_) in SHOWN_METRICS.items()
        )
        alt += f", in percent: {last} at step {steps[-1]}"
    return svg_image(figure, alt)


def _axes() -> tuple[Any, Any]:
    from matplotlib.figure import Figure  # slow to import

    figure = Figure(figsize=(5, 3.2), layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    return figure, axes
