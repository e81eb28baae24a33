"""The images or videos that a report shows: the worst ones, and the first ones.

They are visualized while a dataset is evaluated, from the outputs that the metrics are of. So the report shows what was
scored, also for models that sample their slots, and nothing is computed twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from cutslots.dataset import Dataset
from cutslots.evaluation.labels import EVALUATED_MASKS
from cutslots.evaluation.visualize import Visualization

RANKED_MASKS = ("refined", "decoder")  # the first kind that a model has decides which images are the worst
RANK_METRIC = "mbo_i"


class Example(NamedTuple):
    """An image or a video of a report."""

    caption: str
    visualization: Visualization


class Examples(NamedTuple):
    """What a report shows of a dataset. An example is an image, or all frames of a video."""

    worst: list[Example]  # the worst one first
    first: list[Example] = []  # in the order of the dataset, if not all of them are among the worst
    pair: Visualization | None = None  # two distant frames of the worst video, as a model of pairs matches them


class Gallery:
    """Keeps the first `count` images or videos, and the `count` worst, as visualizations."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.rows: dict[int, dict[str, float]] = {}  # metrics of what is kept, by index
        self.kept: dict[int, Visualization] = {}

    def add(
        self,
        indices: Iterable[int],
        rows: Sequence[dict[str, float]],
        visualize: Callable[[list[int]], list[Visualization]],
    ) -> None:
        """Keep what is among the worst so far, or among the first, of a batch with these indices and metrics.

        `visualize` takes positions in the batch, and is called for what is kept.
        """
        batch = {int(index): (position, row) for position, (index, row) in enumerate(zip(indices, rows, strict=True))}
        self.rows |= {index: row for index, (_, row) in batch.items()}
        self._drop()
        new = [index for index in batch if index in self.rows]
        self.kept |= dict(zip(new, visualize([batch[index][0] for index in new]), strict=True))

    def _drop(self) -> None:
        """Forget what is neither among the worst nor among the first."""
        shown = {*self.worst(), *range(self.count)}
        self.rows = {index: row for index, row in self.rows.items() if index in shown}
        self.kept = {index: each for index, each in self.kept.items() if index in shown}

    def worst(self) -> list[int]:
        """Return the indices of the worst, worst first. Images without objects come last."""
        return sorted(self.rows, key=lambda index: (_rank(self.rows[index]), index))[: self.count]

    def gather(self) -> None:
        """Give every process what all processes have kept."""
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            parts: list[Any] = [None] * torch.distributed.get_world_size()
            torch.distributed.all_gather_object(parts, (self.rows, self.kept))
            for rows, kept in parts:
                self.rows, self.kept = self.rows | rows, self.kept | kept
            self._drop()

    def examples(self, data: Dataset) -> Examples:
        """Return what the report shows."""
        worst = self.worst()
        first = sorted(index for index in self.rows if index < self.count)
        made = {index: Example(_caption(data.name(index), self.rows[index]), self.kept[index]) for index in self.rows}
        return Examples([made[i] for i in worst], [made[i] for i in first] if set(first) - set(worst) else [])


def _ranked_prefix(row: dict[str, float]) -> str:
    """Return the prefix of the metrics that images are ranked by."""
    prefixes = (EVALUATED_MASKS[kind].prefix for kind in RANKED_MASKS)
    return next(prefix for prefix in prefixes if prefix + RANK_METRIC in row)


def _rank(row: dict[str, float]) -> float:
    value = row[_ranked_prefix(row) + RANK_METRIC]
    return math.inf if math.isnan(value) else value


def _caption(name: str, row: dict[str, float]) -> str:
    prefix, count = _ranked_prefix(row), int(row["num_objects"])
    if not count:
        return f"{name}: no objects"
    found = round(count * row[f"{prefix}found"])
    return f"{name}: {found} of {count} objects found, mBO-i {100 * row[prefix + RANK_METRIC]:.1f}"
