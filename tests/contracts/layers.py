"""The layers under contract: how to build a small one, and the shape of one example of its input."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from scipy import sparse
from torch import Tensor, nn

from cutslots.models.discovery import build
from cutslots.models.pair_discovery import JointPairing, SeparatePairing, SharedPairing
from cutslots.modules.base import is_transformed
from cutslots.modules.decoder_head import FusedDecoderHead
from cutslots.modules.decoders import PixelShuffleConfig, PixelShuffleDecoder, SpatialBroadcastDecoder
from cutslots.modules.encoders import ENCODERS, CNNEncoder, ResNetConfig, ResNetEncoder
from cutslots.modules.feature_decoders import MLPDecoder, MLPDecoderConfig, TransformerDecoder
from cutslots.modules.graph_ocl import (
    GraphOCLCutConfig,
    GraphOCLDecoder,
    GraphOCLDecoderConfig,
    GraphOCLPartition,
    GraphOCLSlots,
)
from cutslots.modules.partition import (
    CutPartitionConfig,
    KPartition,
    MinCutPartition,
    SoftmaxPartition,
    SpacetimePartition,
)
from cutslots.modules.patch_vit import PatchViTEncoder
from cutslots.modules.position import SoftPositionEmbedding
from cutslots.modules.pretrained import PretrainedEncoder, save_encoder
from cutslots.modules.slot_attention import SlotAttention, SlotAttentionConfig
from cutslots.modules.slots import CutSlots
from cutslots.modules.vit import ViTConfig, ViTEncoder
from cutslots.programs.graph_cut import GraphCut
from cutslots.programs.grid_cut import GridCut
from cutslots.programs.matching import Matching, match_slots
from cutslots.programs.min_cut import GraphMinCut, MinCut
from cutslots.programs.qp import EqualityQP
from tests.models.configs import IMAGES, PAIRS, SPACETIME, randomize_zeros
from tests.modules.small_vits import make_vit

Group = dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]]  # name to constructor and shape of an input

EDGES = np.random.default_rng(0).integers(0, 5, (7, 2))
A = np.random.default_rng(0).standard_normal((3, 6)) + 3 * np.eye(3, 6)
B = [1.0, 2.0, 3.0]
GRID, IMAGE = (4, 5), (8, 10)  # of features; of images
PATCHES, FEATURES = (2, 3), 4  # grid and channels of features that are reconstructed
FRAMES = 2
FOLDERS: list[tempfile.TemporaryDirectory[str]] = []
NET = {"edge_net_channels": 4, "edge_net_kernel_sizes": (3, 1)}
MIN_CUT = {"initial_capacity": 0.02, "tolerance": 1e-9, "max_iterations": 10_000}
SLOTS = {"slot_dim": 8, "mlp_dim": 6, "relative_positions": True}


@dataclass(frozen=True)
class Layer:
    """A column of the table. Inputs are uniform in [0, 1], as images are."""

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]  # of the input, without the batch
    group: str  # the heading of its table

    def make(self, device: str = "cpu", dtype: torch.dtype = torch.float64) -> nn.Module:
        torch.manual_seed(1)
        return self.build().eval().to(device, dtype)

    def input(self, *batch: int, device: str = "cpu", dtype: torch.dtype = torch.float64) -> Tensor:
        generator = torch.Generator().manual_seed(2)
        return torch.rand(*batch, *self.shape, generator=generator, dtype=torch.float64).to(device, dtype)


# ------------------------------------------------------------------------------- layers with more than one input tensor


class MatchSlots(nn.Module):
    """`match_slots` of the first three slots and the others."""

    def forward(self, x: Tensor) -> Tensor:
        return match_slots(x[..., :3, :], x[..., 3:, :]).slots


class Pairings(nn.Module):
    """The three pairings of `PairDiscovery`, on slots (B, 2, K, D)."""

    def __init__(self) -> None:
        super().__init__()
        pairings = JointPairing(4, 5), SharedPairing(4, 5, 2), SeparatePairing(4, 5)
        self.pairings = nn.ModuleList(map(randomize_zeros, pairings))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(pairing(x[:, 0], x[:, 1]) for pairing in self.pairings)


class DecoderHead(nn.Module):
    """The last layers of a decoder by fused functions: torch operations on the CPU, kernels on CUDA."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.ConvTranspose2d(3, 16, 5, 2, 2, 1),
            nn.ReLU(),
            nn.Conv2d(16, 16, 5, 1, 2),
            nn.ReLU(),
            nn.Conv2d(16, 4, 3, 1, 1),
        )
        self.head = FusedDecoderHead(1)

    def forward(self, x: Tensor) -> Tensor:
        self.head.materialize(x)
        x = x.to(self.layers[0].weight.dtype)
        if x.is_cuda or is_transformed():
            return self.head(x, self.layers)
        return self.head.forward_fused(x, self.layers)


class FeatureDecoding(nn.Module):
    """A decoder of features, on two slots of 8 components followed by the features of a grid."""

    def __init__(self, decoder: nn.Module) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.decoder(x[:, :16].unflatten(1, (2, 8)), x[:, 16:].unflatten(1, (FEATURES, *PATCHES)))


@functools.cache
def vit_folder() -> str:
    """Return the folder of a very small ViT, which is removed when the process ends."""
    folder = tempfile.TemporaryDirectory()
    FOLDERS.append(folder)
    sizes = {"hidden_size": FEATURES, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 5}
    make_vit(Path(folder.name), **sizes, image_size=8)
    return folder.name


@functools.cache
def encoder_folder() -> str:
    """Return the folder of a very small pre-trained encoder, which is removed when the process ends."""
    folder = tempfile.TemporaryDirectory()
    FOLDERS.append(folder)
    config = ResNetConfig(4, (3, 3), batch_norm=False)
    save_encoder(ENCODERS.build(config), config, Path(folder.name))
    return folder.name


class EmbeddingWithPosition(nn.Module):
    """`SoftPositionEmbedding` with coordinates relative to a position, which is read off the features."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = SoftPositionEmbedding(3, GRID)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.embedding(x), self.embedding(x, x[:, :, 0, 0] + 0.5)


def make_spacetime_partition() -> nn.Module:
    partition = SpacetimePartition(3, 3, GRID, **NET)
    partition.prepare(FRAMES)
    return partition


def solvers() -> Group:
    return {
        "GridCut, image": (lambda: GridCut((3, 4), reach=2.0, anchor=0.3), (6, 3, 4)),
        "GridCut, clip": (lambda: GridCut((2, 3, 2)), (8, 2, 3, 2)),
        "GridCut, by FFT": (lambda: GridCut((2, 385)), (6, 2, 385)),
        "GraphCut, Cholesky": (lambda: GraphCut(EDGES, 5, solver="cholesky"), (17,)),
        "GraphCut, CG": (lambda: GraphCut(EDGES, 5, solver="cg"), (17,)),
        "GraphCut, inverse": (lambda: GraphCut(EDGES, 5, solver="inverse"), (17,)),
        "MinCut": (lambda: MinCut((3, 4), tolerance=1e-9), (6, 3, 4)),
        "GraphMinCut": (lambda: GraphMinCut(EDGES, 5, tolerance=1e-9), (17,)),
        "EqualityQP, dense": (lambda: EqualityQP(A, B), (6,)),
        "EqualityQP, sparse": (lambda: EqualityQP(sparse.csr_array(A), B), (6,)),
        "Matching": (lambda: Matching(3, 4), (3, 4)),
        "match_slots": (MatchSlots, (7, 2)),
    }


def partitions_and_slots() -> Group:
    features, cut = (3, *GRID), CutPartitionConfig(background_anchor=1.0, **NET)
    return {
        "SoftPositionEmbedding": (EmbeddingWithPosition, features),
        "KPartition": (lambda: KPartition(3, 3, GRID, background_anchor=1.0, **NET), features),
        "SoftmaxPartition": (lambda: SoftmaxPartition(3, 3, GRID, **NET), features),
        "SpacetimePartition": (make_spacetime_partition, (FRAMES, *features)),
        "MinCutPartition": (lambda: MinCutPartition(3, 3, GRID, **MIN_CUT, **NET), features),
        "GraphOCLPartition": (lambda: GraphOCLPartition(3, 3, GRID, **NET), features),
        "CutSlots": (lambda: CutSlots(3, 3, GRID, feature_dim=6, partition=cut, **SLOTS), features),
        "GraphOCLSlots": (
            lambda: GraphOCLSlots(3, 3, GRID, feature_dim=6, partition=GraphOCLCutConfig(**NET), **SLOTS),
            features,
        ),
        "SlotAttention": (lambda: SlotAttention(3, 3, GRID, num_iterations=2, **SLOTS), features),
    }


def encoders_and_decoders() -> Group:
    return {
        "CNNEncoder": (lambda: CNNEncoder(4, (3, 3), pyramid_levels=1), (3, *IMAGE)),
        "ResNetEncoder": (lambda: ResNetEncoder(4, (3, 3), pyramid_levels=1), (3, *IMAGE)),
        "PatchViTEncoder": (lambda: PatchViTEncoder(8, 1, 2, 4), (3, 8, 12)),
        "PretrainedEncoder, fine-tuned": (lambda: PretrainedEncoder(encoder_folder(), frozen=False), (3, 8, 12)),
        "PretrainedEncoder, frozen": (lambda: PretrainedEncoder(encoder_folder(), pool=2), (3, 8, 12)),
        "ViTEncoder, fine-tuned": (lambda: ViTEncoder(vit_folder(), frozen=False), (3, 8, 12)),
        "ViTEncoder, frozen": (lambda: ViTEncoder(vit_folder()), (3, 8, 12)),
        "SpatialBroadcastDecoder": (lambda: SpatialBroadcastDecoder(8, IMAGE, (4,), 1, 3), (2, 8)),
        "PixelShuffleDecoder": (lambda: PixelShuffleDecoder(8, (15, 17), (4,), 3), (2, 8)),
        "GraphOCLDecoder": (lambda: GraphOCLDecoder(8, IMAGE, (4,), 1), (2, 8)),
        "MLPDecoder": (lambda: FeatureDecoding(MLPDecoder(8, IMAGE, FEATURES, PATCHES, (5, 6))), (16 + 24,)),
        "TransformerDecoder": (
            lambda: FeatureDecoding(TransformerDecoder(8, IMAGE, FEATURES, PATCHES, num_layers=2, num_heads=2)),
            (16 + 24,),
        ),
        "FusedDecoderHead": (DecoderHead, (3, 8, 8)),
    }


def models() -> Group:
    """Models of all encoders and decoders, and of most slot modules and partitions."""
    images = replace(
        IMAGES,
        image_size=IMAGE,
        encoder=ResNetConfig(4, (3, 3)),
        slots=SlotAttentionConfig(3, 8, relative_positions=True, num_iterations=2, mlp_dim=6),
        decoder=PixelShuffleConfig((4,)),
    )
    pairs = replace(PAIRS, image_size=IMAGE, match_dim=4, match_half_area=0.03)
    features = lambda: replace(
        IMAGES, image_size=(8, 12), encoder=ViTConfig(vit_folder()), decoder=MLPDecoderConfig((5,))
    )
    slots = replace(SPACETIME.slots, relative_positions=True)
    clips = replace(SPACETIME, image_size=IMAGE, slots=slots, decoder=GraphOCLDecoderConfig((4,), 1))
    return {
        "Discovery": (lambda: build(images), (3, *IMAGE)),
        "Discovery of features": (lambda: build(features()), (3, 8, 12)),
        "PairDiscovery": (lambda: randomize_zeros(build(pairs)), (2, 3, *IMAGE)),
        "pairings": (Pairings, (2, 3, 4)),
        "SpacetimeDiscovery": (lambda: build(clips), (FRAMES, 3, *IMAGE)),
    }


SOLVERS = "Solver layers"
GROUPS = {
    SOLVERS: solvers,
    "Partitions and slot modules": partitions_and_slots,
    "Encoders and decoders": encoders_and_decoders,
    "Models": models,
}
LAYERS = {name: Layer(*layer, group) for group, layers in GROUPS.items() for name, layer in layers().items()}
