"""The curves of a run, as TensorBoard shows them and as metrics.jsonl has them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.small_runs import lines

Curves = dict[str, list[tuple[int, float]]]  # (step, value) by name


def tensorboard_curves(folder: Path) -> Curves:
    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    return {name: [(e.step, e.value) for e in events.Scalars(name)] for name in events.Tags()["scalars"]}


def metrics_curves(folder: Path) -> Curves:
    curves: Curves = {}
    for line in lines(folder):
        values = {f"val/{name}": value for name, value in line.get("val", {}).items()}
        values |= {f"train/{k}": line[k] for k in ("loss", "grad_norm", "lr", "images_per_second") if k in line}
        for name, value in values.items():
            curves.setdefault(name, []).append((line["step"], float(np.float32(value))))
    return curves
