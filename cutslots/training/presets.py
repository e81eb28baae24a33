"""Presets: every hyperparameter of every named training run, in one place.

    tiny        discovers objects on two CPU cores in minutes
    clevr       the paper's text, for plain scenes: a CNN encoder with 64 channels
    clevrtex    the paper's text, for textured scenes: a ResNet encoder with 4 blocks of 100 channels
    graph-ocl   the authors' released code: the same network and schedule
    ours        for images: slots with relative positions, a feature pyramid, a texture ramp
    movi        the paper's text, for pairs of frames: clevr with 8 slots
    ours-video  for pairs of frames: 11 slots, a cheaper network, a foreground penalty

The paper gives batch size, learning rate and "exponential decay", and needs no warm-up. Warm-up, gradient clipping and
the rate of decay are those of runs that learned.
"""

from __future__ import annotations

from dataclasses import replace

import cutslots.models.spacetime_discovery  # noqa: F401  no preset has it, but --model does
from cutslots.data.builtin import MovingConfig, PlainConfig, TexturedConfig
from cutslots.models.discovery import DiscoveryConfig
from cutslots.models.pair_discovery import PairDiscoveryConfig
from cutslots.modules.decoders import PixelShuffleConfig, SpatialBroadcastConfig
from cutslots.modules.encoders import CNNConfig, ResNetConfig
from cutslots.modules.graph_ocl import GraphOCLCutConfig, GraphOCLDecoderConfig, GraphOCLSlotsConfig
from cutslots.modules.partition import CutPartitionConfig
from cutslots.modules.slots import CutSlotsConfig
from cutslots.training.config import TrainConfig
from cutslots.training.losses import MSEConfig

PRESETS: dict[str, TrainConfig] = {}
SUMMARIES: dict[str, str] = {}


def add_preset(name: str, summary: str, config: TrainConfig) -> None:
    """Add a preset for `cutslots train NAME`. A plugin may call this."""
    if name in PRESETS:
        raise ValueError(f"preset {name!r} exists; choose another name")
    PRESETS[name], SUMMARIES[name] = replace(config, preset=name), summary


# ----------------------------------------------------------------------------------------------------- the paper's text

CUT = CutPartitionConfig(
    edge_net_channels=32,
    edge_net_kernel_sizes=(3, 3, 1),
    signed_weights=True,
    gamma=0.5,
    reach=None,
    anchor=0.0,
    temperature=0.5,
    background="cuts",
    background_temperature=0.5,
    background_anchor=None,
    combined_temperature=0.1,
)
CUT_SLOTS = CutSlotsConfig(
    num_slots=12,
    slot_dim=64,
    relative_positions=False,
    feature_dim=64,
    mlp_dim=128,
    pool="image_mean",
    partition=CUT,
)
CLEVR = DiscoveryConfig(
    image_size=(128, 128),
    encoder=CNNConfig(channels=64, kernel_sizes=(5, 5, 5, 5), pyramid_levels=0),
    slots=CUT_SLOTS,
    decoder=SpatialBroadcastConfig(channels=(64,), extra_layers=1),
)
CLEVRTEX = replace(
    CLEVR, encoder=ResNetConfig(channels=100, kernel_sizes=(5, 3, 3, 3, 3), batch_norm=True, pyramid_levels=0)
)
NO_BLUR_NO_PENALTY = MSEConfig(blur=0.0, blur_steps=0, foreground_penalty=0.0, foreground_penalty_start=0)

add_preset(
    "clevr",
    "the paper's text, for plain scenes",
    TrainConfig(
        model=CLEVR,
        data=PlainConfig(),
        loss=NO_BLUR_NO_PENALTY,
        preset="clevr",
        batch_size=64,
        max_steps=100_000,
        lr=4e-4,
        warmup_steps=500,
        lr_decay=0.5,
        lr_decay_steps=20_000,
        grad_clip=1.0,
        eval_every=1_000,
        num_eval_images=320,
    ),
)
add_preset(
    "clevrtex",
    "the paper's text, for textured scenes",
    replace(PRESETS["clevr"], model=CLEVRTEX, data=TexturedConfig()),
)

# ------------------------------------------------------------------------------------------- the authors' released code

GRAPH_OCL = DiscoveryConfig(
    image_size=(128, 128),
    encoder=ResNetConfig(channels=100, kernel_sizes=(5, 3, 3, 3, 3), batch_norm=True, pyramid_levels=0),
    slots=GraphOCLSlotsConfig(
        num_slots=12,
        slot_dim=64,
        relative_positions=False,
        feature_dim=256,
        mlp_dim=128,
        partition=GraphOCLCutConfig(
            edge_net_channels=100,
            edge_net_kernel_sizes=(3, 3),
            gamma=0.5,
            temperature=0.5,
            combined_temperature=0.1,
        ),
    ),
    decoder=GraphOCLDecoderConfig(channels=(64,), extra_layers=2),
)
# 312,500 steps are 500 epochs of CLEVRTEX's 40,000 training images. The authors' loss is over colors in [-1, 1], so
# four times ours: with Adam this changes nothing but the relative size of its epsilon.
add_preset(
    "graph-ocl",
    "the authors' released code: the same network and schedule",
    replace(
        PRESETS["clevrtex"],
        model=GRAPH_OCL,
        batch_size=64,
        max_steps=312_500,
        lr=4e-4,
        warmup_steps=0,
        lr_decay=0.8,
        lr_decay_steps=62_500,
        grad_clip=0.0,
        precision="32-true",
    ),
)

# ----------------------------------------------------------------------------------------------------------------- ours

# These presets predate the paper's softmax over the combined masks: they sharpen the background instead.
OUR_CUT = replace(CUT, edge_net_kernel_sizes=(3, 3, 3), background_temperature=0.1, combined_temperature=None)

# Small enough for two CPU cores.
TINY = DiscoveryConfig(
    image_size=(64, 64),
    encoder=CNNConfig(channels=32, kernel_sizes=(5, 3, 3), pyramid_levels=0),
    slots=replace(CUT_SLOTS, num_slots=6, feature_dim=128, partition=OUR_CUT),
    decoder=PixelShuffleConfig(channels=(32, 32)),
)
add_preset(
    "tiny",
    "discovers objects on two CPU cores in minutes",
    TrainConfig(
        model=TINY,
        data=PlainConfig(num_objects=(2, 5)),
        loss=NO_BLUR_NO_PENALTY,
        preset="tiny",
        batch_size=16,
        max_steps=1_000,
        lr=1e-3,
        warmup_steps=0,
        lr_decay=0.5,
        lr_decay_steps=700,
        grad_clip=1.0,
        eval_every=200,
        num_eval_images=96,
        num_images=1_100,
    ),
)

# Relative positions, the pyramid, a blur that decays and a texture ramp make slots follow objects instead of regions.
# An anchored background need not cover half of the image.
OURS = DiscoveryConfig(
    image_size=(128, 128),
    encoder=ResNetConfig(channels=96, kernel_sizes=(5, 3, 3, 3, 3), batch_norm=False, pyramid_levels=4),
    slots=replace(
        CUT_SLOTS,
        num_slots=11,
        relative_positions=True,
        feature_dim=128,
        partition=replace(OUR_CUT, background_anchor=1.0),
    ),
    decoder=PixelShuffleConfig(channels=(64, 64, 32)),
)
add_preset(
    "ours",
    "our best for images: relative positions, a feature pyramid, a texture ramp",
    replace(
        PRESETS["clevr"],
        model=OURS,
        data=TexturedConfig(texture_ramp_start=2_000, texture_ramp_end=5_000),
        loss=replace(NO_BLUR_NO_PENALTY, blur=5.0, blur_steps=2_000),
        batch_size=32,
        max_steps=16_000,
        lr=1e-3,
        warmup_steps=200,
        lr_decay_steps=4_000,
        eval_every=500,
    ),
)

# --------------------------------------------------------------------------------------------------------------- videos

# The paper says 8 slots, fewer than there may be objects; 11 are enough for all and the background.
MOVI = PairDiscoveryConfig(
    image_size=CLEVR.image_size,
    encoder=CLEVR.encoder,
    slots=replace(CUT_SLOTS, num_slots=8),
    decoder=CLEVR.decoder,
    match_gamma=0.1,
    match_temperature=0.5,
    match_dim=0,
    pairing="joint",
    motion_dim=128,
    code_dim=8,
)
add_preset(
    "movi",
    "the paper's text, for pairs of frames of videos",
    replace(PRESETS["clevr"], model=MOVI, data=MovingConfig(), batch_size=32, num_images=36_000),
)

# A cheaper encoder and decoder, and a foreground penalty, with which the background becomes one slot.
OURS_VIDEO = replace(
    MOVI,
    pairing="separate",
    encoder=CNNConfig(channels=64, kernel_sizes=(5, 5, 3, 3), pyramid_levels=0),
    slots=replace(CUT_SLOTS, num_slots=11, feature_dim=128, partition=OUR_CUT),
    decoder=PixelShuffleConfig(channels=(64, 64, 32)),
)
add_preset(
    "ours-video",
    "our best for videos: more slots, a cheaper network, a foreground penalty",
    replace(
        PRESETS["movi"],
        model=OURS_VIDEO,
        loss=replace(NO_BLUR_NO_PENALTY, foreground_penalty=7e-4, foreground_penalty_start=3_000),
        batch_size=16,
        max_steps=24_000,
        lr=8e-4,
        warmup_steps=200,
        lr_decay_steps=5_000,
        eval_every=2_500,
        num_eval_images=480,
    ),
)

# The order in which commands list them.
for _name in ("tiny", "ours", "clevr", "clevrtex", "graph-ocl", "movi", "ours-video"):
    PRESETS[_name], SUMMARIES[_name] = PRESETS.pop(_name), SUMMARIES.pop(_name)
