"""`cutslots parts`: everything that can be named on the command line, with one line each."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import cutslots.data.open
import cutslots.models.checkpoints  # noqa: F401  both register parts
from cutslots.models.checkpoints import SHIPPED, checkpoint_names
from cutslots.registry import REGISTRIES, load_entry_points, load_plugins
from cutslots.training.presets import SUMMARIES
from cutslots.training.pretrain_presets import PRETRAIN_SUMMARIES

# The kinds of parts and the options that select them, in the order in which data flows through a model.
FLAGS = {
    "dataset": "--data",
    "model": "--model",
    "encoder": "--encoder",
    "slot module": "--slots",
    "partition": "--slots.partition",
    "decoder": "--decoder",
    "loss": "--loss",
    "objective": "--objective",
}


def print_parts(plugins: Iterable[str | Path] = ()) -> None:
    """Print the parts, the presets and the checkpoints."""
    load_plugins(plugins)
    load_entry_points()
    for kind, flag in FLAGS.items():
        registry = next(registry for registry in REGISTRIES if registry.kind == kind)
        rows = {
            part.name: part.summary + (f" (plugin {part.plugin})" if part.plugin else "")
            for part in registry.parts.values()
        }
        _print_group(f"{kind} ({flag} NAME)", rows)
    _print_group("preset (cutslots train NAME)", SUMMARIES)
    _print_group("preset (cutslots pretrain NAME)", PRETRAIN_SUMMARIES)
    _print_group("checkpoint (cutslots predict NAME)", {name: checkpoint_summary(name) for name in checkpoint_names()})


def _print_group(title: str, rows: dict[str, str]) -> None:
    print(title)
    width = max(map(len, rows), default=0)
    for name, summary in rows.items():
        print(f"  {name:{width}s}  {summary}")


def checkpoint_summary(name: str) -> str:
    """Return the first sentence of a checkpoint's model card."""
    lines = (SHIPPED / name / "README.md").read_text().split("\n---\n", 1)[-1].splitlines()
    return next((line for line in lines if line and not line.startswith("#")), "").split(". ")[0].rstrip(".")
