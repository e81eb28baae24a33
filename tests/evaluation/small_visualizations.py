"""Random visualizations and results for tests of tables and pages."""

import numpy as np

from cutslots.evaluation.visualize import Visualization

PANELS = ["image", "reconstruction", "ground truth", "decoder masks", "refined masks", "partition masks"]


def random_visualization(rng, count=2, height=12, width=12, slots=3, shared_labels=False):
    colors = lambda *shape: rng.integers(0, 256, (*shape, height, width, 3), dtype=np.uint8)
    labels = lambda top: rng.integers(0, top, (count, height, width), dtype=np.uint8)
    return Visualization(
        image=colors(count),
        truth=labels(4),
        reconstruction=colors(count),
        decoder=labels(slots),
        partition=labels(slots),
        slots=colors(count, slots),
        refined=labels(slots),
        shared_labels=shared_labels,
    )


def result(start):
    """Metrics that a table shows as start, start + 1, ... percent, and an MSE of start + 10.5."""
    names = ["ari_fg", "ari", "miou", "miou_fg", "miou_gt"]
    names += [f"partition_{name}" for name in names]
    return {"num_images": 7, "mse": start + 10.5} | {name: (start + i) / 100 for i, name in enumerate(names)}
