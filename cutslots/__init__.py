"""Objects in images and video without labels, by differentiable graph cuts.

The names below are the public surface; everything else may change. They load on first use, so that the command line
answers at once.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

__all__ = [
    "PRESETS",
    "CutSlots",
    "Discovery",
    "EqualityQP",
    "Graph",
    "GraphCut",
    "GridCut",
    "KPartition",
    "Matching",
    "Scenes",
    "SlotAttention",
    "SoftmaxSlots",
    "exact",
    "graph",
    "load",
    "match_slots",
    "metrics",
]

_HOME = {
    "PRESETS": "presets",
    "CutSlots": "slots",
    "Discovery": "model",
    "EqualityQP": "qp",
    "Graph": "graph",
    "GridCut": "cut",
    "GraphCut": "cut",
    "KPartition": "partition",
    "Matching": "matching",
    "Scenes": "scenes",
    "SlotAttention": "slots",
    "SoftmaxSlots": "slots",
    "load": "model",
    "match_slots": "matching",
}

if TYPE_CHECKING:
    from cutslots import exact, graph, metrics
    from cutslots.cut import GraphCut, GridCut
    from cutslots.graph import Graph
    from cutslots.matching import Matching, match_slots
    from cutslots.model import Discovery, load
    from cutslots.partition import KPartition
    from cutslots.presets import PRESETS
    from cutslots.qp import EqualityQP
    from cutslots.scenes import Scenes
    from cutslots.slots import CutSlots, SlotAttention, SoftmaxSlots


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'cutslots' has no attribute {name!r}")
    module = importlib.import_module(f"cutslots.{_HOME.get(name, name)}")
    return getattr(module, name) if name in _HOME else module


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
