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
PRETRAINING_METRICS = {
    "accuracy": ("contrastive accuracy", "o-", "#4477aa"),
    "cluster_ari_fg": ("ARI-FG of clusters", "s--", "#ee6677"),
}


def training_curves(history: Sequence[dict[str, Any]]) -> str:
    """Return HTML of two plots against the training step: the reconstruction loss, and validation metrics.

    `history` is the content of a run's metrics.jsonl. Lines have a "step" and a "loss", or a "step" and metrics "val".
    The alternative text of each plot names its last values.
    """
    loss = _loss_curve(history, "reconstruction loss", " (mean squared error)", "log")
    return f'<div class="curves">{loss}{_metric_curves(history, SHOWN_METRICS)}</div>'


def pretraining_curves(history: Sequence[dict[str, Any]]) -> str:
    """Return the same for a run of `cutslots pretrain`: the loss of its objective, and what its features carry."""
    loss = _loss_curve(history, "loss", "", "linear")
    return f'<div class="curves">{loss}{_metric_curves(history, PRETRAINING_METRICS)}</div>'


def _loss_curve(history: Sequence[dict[str, Any]], name: str, unit: str, scale: str) -> str:
    losses = [(line["step"], line["loss"]) for line in history if "loss" in line]
    figure, axes = _axes()
    alt = f"Curve of the {name}"
    if losses:
        axes.plot(*zip(*losses, strict=True), color="#4477aa", lw=1.2)
        alt += f": {losses[-1][1]:.3g} at step {losses[-1][0]}"
    axes.set(xlabel="step", title=f"{name}{unit}", yscale=scale)
    return svg_image(figure, alt)


def _metric_curves(history: Sequence[dict[str, Any]], shown: dict[str, tuple[str, str, str]]) -> str:
    figure, axes = _axes()
    alt, last = "Curves of the validation metrics", []
    for name, (label, style, color) in shown.items():
        curve = [(line["step"], 100 * line["val"][name]) for line in history if name in line.get("val", {})]
        if curve:
            axes.plot(*zip(*curve, strict=True), style, ms=4, lw=1.2, color=color, label=label)
            last.append((f"{label} {curve[-1][1]:.1f}", curve[-1][0]))
    axes.set(xlabel="step", title="validation metrics (%)", ylim=(-2, 100))
    if last:
        axes.legend(frameon=False)
        alt += f", in percent: {', '.join(text for text, _ in last)} at step {last[-1][1]}"
    return svg_image(figure, alt)


def _axes() -> tuple[Any, Any]:
    from matplotlib.figure import Figure  # slow to import

    figure = Figure(figsize=(5, 3.2), layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    return figure, axes
