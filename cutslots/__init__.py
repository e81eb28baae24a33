"""Object discovery in images and video without labels, by differentiable graph cuts.

The names below are the public API; everything else may change. They are imported on first use, so that the command
line answers at once.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from cutslots.data.open import open_dataset
    from cutslots.data.registry import DATASETS, DatasetConfig
    from cutslots.dataset import Dataset, Sample
    from cutslots.evaluation import metrics
    from cutslots.inference.prediction import Prediction, to_coco
    from cutslots.inference.predictor import predict_images
    from cutslots.inference.prepare import prepare_images
    from cutslots.inference.segmentation import Segmentation, segment
    from cutslots.inference.tracking import track_video
    from cutslots.models.checkpoints import load
    from cutslots.models.discovery import Discovery, DiscoveryConfig, DiscoveryOutput, FeatureOutput, build
    from cutslots.models.pair_discovery import PairDiscovery
    from cutslots.models.refinement import high_recall_masks, posterior_masks, refine_masks, refine_video_masks
    from cutslots.models.spacetime_discovery import SpacetimeDiscovery
    from cutslots.models.tracker import Tracker, track_clip
    from cutslots.modules.decoders import DECODERS, Decoder, DecoderConfig
    from cutslots.modules.encoders import ENCODERS, Encoder, EncoderConfig
    from cutslots.modules.partition import PARTITIONS, KPartition, PartitionConfig
    from cutslots.modules.slot_attention import SlotAttention
    from cutslots.modules.slots import SLOTS, CutSlots, SlotModule, SlotsConfig
    from cutslots.programs import exact, graph
    from cutslots.programs.graph import Graph
    from cutslots.programs.graph_cut import GraphCut
    from cutslots.programs.grid_cut import GridCut
    from cutslots.programs.matching import Matching, match_slots
    from cutslots.programs.min_cut import GraphMinCut, MinCut
    from cutslots.programs.qp import EqualityQP
    from cutslots.registry import load_plugins
    from cutslots.scenes import Scenes
    from cutslots.training.config import PretrainConfig, TrainConfig
    from cutslots.training.loop import train
    from cutslots.training.losses import LOSSES, Loss, LossConfig
    from cutslots.training.objectives import OBJECTIVES, Objective, ObjectiveConfig
    from cutslots.training.presets import PRESETS
    from cutslots.training.pretrain import pretrain

_NAMES = {  # the public names of each module; a module that is public itself is in _MODULES
    "programs.qp": "EqualityQP",
    "programs.graph": "Graph",
    "programs.grid_cut": "GridCut",
    "programs.graph_cut": "GraphCut",
    "programs.min_cut": "GraphMinCut MinCut",
    "programs.matching": "Matching match_slots",
    "modules.encoders": "ENCODERS Encoder EncoderConfig",
    "modules.partition": "PARTITIONS KPartition PartitionConfig",
    "modules.slots": "SLOTS CutSlots SlotModule SlotsConfig",
    "modules.slot_attention": "SlotAttention",
    "modules.decoders": "DECODERS Decoder DecoderConfig",
    "models.discovery": "Discovery DiscoveryConfig DiscoveryOutput FeatureOutput build",
    "models.pair_discovery": "PairDiscovery",
    "models.spacetime_discovery": "SpacetimeDiscovery",
    "models.checkpoints": "load",
    "models.refinement": "high_recall_masks posterior_masks refine_masks refine_video_masks",
    "models.tracker": "Tracker track_clip",
    "scenes": "Scenes",
    "dataset": "Dataset Sample",
    "data.registry": "DATASETS DatasetConfig",
    "data.open": "open_dataset",
    "training.losses": "LOSSES Loss LossConfig",
    "training.config": "PretrainConfig TrainConfig",
    "training.objectives": "OBJECTIVES Objective ObjectiveConfig",
    "training.presets": "PRESETS",
    "training.loop": "train",
    "training.pretrain": "pretrain",
    "inference.prepare": "prepare_images",
    "inference.prediction": "Prediction to_coco",
    "inference.predictor": "predict_images",
    "inference.segmentation": "Segmentation segment",
    "inference.tracking": "track_video",
    "registry": "load_plugins",
}
_MODULES = {"exact": "programs", "graph": "programs", "metrics": "evaluation"}
_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = [
    "DATASETS",
    "DECODERS",
    "ENCODERS",
    "LOSSES",
    "OBJECTIVES",
    "PARTITIONS",
    "PRESETS",
    "SLOTS",
    "CutSlots",
    "Dataset",
    "DatasetConfig",
    "Decoder",
    "DecoderConfig",
    "Discovery",
    "DiscoveryConfig",
    "DiscoveryOutput",
    "Encoder",
    "EncoderConfig",
    "EqualityQP",
    "FeatureOutput",
    "Graph",
    "GraphCut",
    "GraphMinCut",
    "GridCut",
    "KPartition",
    "Loss",
    "LossConfig",
    "Matching",
    "MinCut",
    "Objective",
    "ObjectiveConfig",
    "PairDiscovery",
    "PartitionConfig",
    "Prediction",
    "PretrainConfig",
    "Sample",
    "Scenes",
    "Segmentation",
    "SlotAttention",
    "SlotModule",
    "SlotsConfig",
    "SpacetimeDiscovery",
    "Tracker",
    "TrainConfig",
    "build",
    "exact",
    "graph",
    "high_recall_masks",
    "load",
    "load_plugins",
    "match_slots",
    "metrics",
    "open_dataset",
    "posterior_masks",
    "predict_images",
    "prepare_images",
    "pretrain",
    "refine_masks",
    "refine_video_masks",
    "segment",
    "to_coco",
    "track_clip",
    "track_video",
    "train",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"cutslots.{_MODULES[name]}.{name}")
    if name in _HOME:
        return getattr(importlib.import_module(f"cutslots.{_HOME[name]}"), name)
    raise AttributeError(f"module 'cutslots' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
