"""Small models of every kind, and what tests of models share."""

import os
from dataclasses import replace

import torch
from torch import nn

from cutslots.models.discovery import DiscoveryConfig, DiscoveryOutput, build
from cutslots.models.pair_discovery import PairDiscoveryConfig
from cutslots.models.spacetime_discovery import SpacetimeDiscoveryConfig
from cutslots.modules.decoders import PixelShuffleConfig, SpatialBroadcastConfig
from cutslots.modules.encoders import CNNConfig, ResNetConfig
from cutslots.modules.graph_ocl import GraphOCLCutConfig, GraphOCLDecoderConfig, GraphOCLSlotsConfig
from cutslots.modules.partition import CutPartitionConfig, SoftmaxPartitionConfig, SpacetimePartitionConfig
from cutslots.modules.slot_attention import SlotAttentionConfig
from cutslots.modules.slots import CutSlotsConfig

OUR_CUT = CutPartitionConfig(edge_net_kernel_sizes=(3, 3, 3), background_temperature=0.1, combined_temperature=None)
# The model of the preset tiny, and variants of it.
TINY = DiscoveryConfig(
    image_size=(64, 64),
    encoder=CNNConfig(channels=32, kernel_sizes=(5, 3, 3)),
    slots=CutSlotsConfig(num_slots=6, feature_dim=128, partition=OUR_CUT),
    decoder=PixelShuffleConfig(channels=(32, 32)),
)
SMALL = replace(TINY, image_size=(16, 16))
SOFTMAX = replace(SMALL, slots=replace(SMALL.slots, partition=SoftmaxPartitionConfig(edge_net_kernel_sizes=(3, 3, 3))))
ATTENTION = replace(SMALL, slots=SlotAttentionConfig(num_slots=6))
RELATIVE = replace(
    SMALL,
    encoder=ResNetConfig(channels=16, kernel_sizes=(5, 3), batch_norm=False, pyramid_levels=2),
    slots=replace(SMALL.slots, relative_positions=True, partition=CutPartitionConfig(background_anchor=1.0)),
)
# The authors' released code.
GRAPH_OCL = DiscoveryConfig(
    image_size=(16, 16),
    encoder=ResNetConfig(channels=8, kernel_sizes=(5, 3, 3, 3, 3)),
    slots=GraphOCLSlotsConfig(num_slots=12, partition=GraphOCLCutConfig(edge_net_channels=8)),
    decoder=GraphOCLDecoderConfig(channels=(8,)),
)
CLEVR = DiscoveryConfig(image_size=(32, 32), slots=CutSlotsConfig(num_slots=12))
CLEVRTEX = replace(CLEVR, encoder=ResNetConfig())

# Models that are quick to run: three slots of 16 components, images of 16x16 pixels.
PARTS = {
    "image_size": (16, 16),
    "encoder": CNNConfig(channels=8, kernel_sizes=(3,)),
    "slots": CutSlotsConfig(
        num_slots=3,
        slot_dim=16,
        feature_dim=16,
        mlp_dim=16,
        partition=CutPartitionConfig(edge_net_channels=8, edge_net_kernel_sizes=(3,)),
    ),
    "decoder": SpatialBroadcastConfig(channels=(8,)),
}
SLOTS = {
    "cut": PARTS["slots"],
    "softmax": replace(
        PARTS["slots"], partition=SoftmaxPartitionConfig(edge_net_channels=8, edge_net_kernel_sizes=(3,))
    ),
    "attention": SlotAttentionConfig(num_slots=3, slot_dim=16, mlp_dim=16),
}
SPACETIME_SLOTS = replace(
    PARTS["slots"], partition=SpacetimePartitionConfig(edge_net_channels=8, edge_net_kernel_sizes=(3,))
)
IMAGES = DiscoveryConfig(**PARTS)
PAIRS = PairDiscoveryConfig(**PARTS)
SPACETIME = SpacetimeDiscoveryConfig(**PARTS | {"slots": SPACETIME_SLOTS})
KINDS = {"images": IMAGES, "pairs": PAIRS, "spacetime": SPACETIME}

CONFIGS = {
    "tiny": TINY,
    "softmax": SOFTMAX,
    "attention": ATTENTION,
    "relative": RELATIVE,
    "graph-ocl": GRAPH_OCL,
    "clevr": CLEVR,
    "clevrtex": CLEVRTEX,
    "images": IMAGES,
    "pairs": PAIRS,
    "spacetime": SPACETIME,
    "non-square": replace(IMAGES, image_size=(12, 20)),
    "odd": replace(PAIRS, image_size=(15, 17)),
    "odd spacetime": replace(SPACETIME, image_size=(13, 9)),
}


def small_model(kind, **changes):
    """Return a model for "images", "pairs" or "spacetime" in evaluation mode, with random weights."""
    return randomize_zeros(build(replace(KINDS[kind], **changes)).eval())


def randomize_zeros(model):
    """Return the model with random values for weights that begin with zeros, as those of pairings do."""
    for parameter in model.parameters():
        if not parameter.is_meta and not parameter.any():
            nn.init.uniform_(parameter, -0.2, 0.2)
    return model


def random_input(config, batch=2):
    """Return images, or clips for a model that takes them."""
    clips = torch.rand(batch, config.frames, 3, *config.image_size)
    return clips if config.frames > 1 else clips[:, 0]


def clips(batch=2, length=2):
    return torch.rand(batch, length, 3, 16, 16)


def run_seeded(model, image):
    """Return the output without gradients. Slot Attention samples its slots from the same seed every time."""
    torch.manual_seed(0)
    with torch.no_grad():
        return model(image)


def assert_same(one, other):
    for name, a, b in zip(DiscoveryOutput._fields, one, other, strict=True):
        assert torch.equal(a, b), name


def assert_trains(model, loss):
    """Check that every parameter gets a finite gradient that is not zero."""
    loss.backward()
    for name, value in model.named_parameters():
        assert value.grad is not None and torch.isfinite(value.grad).all() and value.grad.any(), name


class RunsCode:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder),)
