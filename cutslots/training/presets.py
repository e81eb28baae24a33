"""Presets: every hyperparameter of every named training run, in one place.

    tiny        discovers objects on two CPU cores in minutes
    clevr       the paper's text, for plain scenes: a CNN encoder with 64 channels
    clevrtex    the paper's text, for textured scenes: a ResNet encoder with 4 blocks of 100 channels
    graph-ocl   the authors' released code: the same network and schedule
    ours        for images: slots with relative positions, a feature pyramid, a texture ramp
    movi        the paper's text, for pairs of frames: clevr with 8 slots
    ours-video  for pairs of frames: 11 slots, a cheaper network, a foreground penalty
    coco        photographs: reconstructs DINOv2's features, with DINOSAUR's hyperparameters for COCO
    voc         the same with DINO's features, a transformer decoder and DINOSAUR's hyperparameters for PASCAL VOC
    movi-c      frames of MOVi-C: DINOSAUR's hyperparameters
    movi-e      the same with 24 slots
    ytvis       pairs of frames of YouTube-VIS: VideoSAUR's hyperparameters

The paper gives batch size, learning rate and "exponential decay", and needs no warm-up. Warm-up, gradient clipping and
the rate of decay are those of runs that learned.
"""

from __future__ import annotations

from dataclasses import replace

import cutslots.models.spacetime_discovery  # noqa: F401  no preset has it, but --model does
from cutslots.data.builtin import MovingConfig, PlainConfig, TexturedConfig
from cutslots.data.prepared import CocoConfig, MoviCConfig, MoviEConfig, VocConfig, YtvisConfig
from cutslots.models.discovery import DiscoveryConfig
from cutslots.models.pair_discovery import PairDiscoveryConfig
from cutslots.modules.decoders import PixelShuffleConfig, SpatialBroadcastConfig
from cutslots.modules.encoders import CNNConfig, ResNetConfig
from cutslots.modules.feature_decoders import MLPDecoderConfig, TransformerDecoderConfig
from cutslots.modules.graph_ocl import GraphOCLCutConfig, GraphOCLDecoderConfig, GraphOCLSlotsConfig
from cutslots.modules.partition import CutPartitionConfig
from cutslots.modules.slots import CutSlotsConfig
from cutslots.modules.vit import ViTConfig
from cutslots.training.config import TrainConfig
from cutslots.training.losses import FeatureMSEConfig, MSEConfig

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
# An anchored background need not cover half of the image. Mask consistency makes the cut's masks those of the objects.
# On textured scenes of 64x64 decoder masks gain 4 to 8 points of ARI-FG by it, two seeds; plain scenes lose 4
# (docs/preset.md).
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
        data=TexturedConfig(texture_ramp_start=2_000, texture_ramp_end=5_000, num_flat_scenes=450),
        loss=replace(
            NO_BLUR_NO_PENALTY, blur=5.0, blur_steps=2_000, mask_consistency=1e-3, mask_consistency_start=2_000
        ),
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
    match_half_area=0.0,
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

# ---------------------------------------------------------------------------------------------------------- photographs

# Published hyperparameters with our slot module. Sources:
#   [D] amazon-science/object-centric-learning-framework, configs/experiment/projects/bridging/dinosaur/:
#       _base_feature_recon.yaml for all of DINOSAUR's models, then coco_feat_rec_dino_base16.yaml,
#       voc2012_trainaug_feat_rec_dino_base16_auto.yaml, movi_c_feat_rec.yaml, movi_e_feat_rec.yaml
#   [V] martius-lab/videosaur, configs/: dinosaur/coco_base14_dinov2.yml, videosaur/ytvis.yml
# Ours are the cuts, which are those of the paper, the number of validation images and the steps between evaluations.
# docs/photographs.md says what cannot be expressed here.

# [V] coco_base14_dinov2.yml: ViT-B/14 of DINOv2 at 224x224, 7 slots of 256, three hidden layers of 2048. The pixel MLP
# is as wide as the features and the slot MLP four times as wide as a slot, as in [D].
COCO_SLOTS = CutSlotsConfig(
    num_slots=7,
    slot_dim=256,
    relative_positions=False,
    feature_dim=768,
    mlp_dim=1024,
    pool="image_mean",
    partition=CUT,
)
COCO = DiscoveryConfig(
    image_size=(224, 224),
    encoder=ViTConfig(checkpoint="facebook/dinov2-base", frozen=True, lr_scale=0.1),
    slots=COCO_SLOTS,
    decoder=MLPDecoderConfig(hidden_dims=(2048, 2048, 2048)),
)
# [V] coco_base14_dinov2.yml and [D] agree: batches of 64, Adam at 4e-4, 10,000 steps of warm-up, half the rate every
# 100,000 steps, gradients clipped at 1, 500,000 steps. Both flip images.
add_preset(
    "coco",
    "photographs: COCO with DINOv2's features and DINOSAUR's hyperparameters",
    TrainConfig(
        model=COCO,
        data=CocoConfig(path="data/coco"),
        loss=FeatureMSEConfig(),
        preset="coco",
        batch_size=64,
        max_steps=500_000,
        lr=4e-4,
        warmup_steps=10_000,
        lr_decay=0.5,
        lr_decay_steps=100_000,
        grad_clip=1.0,
        eval_every=10_000,
        num_eval_images=1_000,
        horizontal_flips=True,
    ),
)

# [D] voc2012_trainaug_feat_rec_dino_base16_auto.yaml: ViT-B/16 of DINO, 6 slots of 256, a transformer of 4 layers with
# 4 heads, 300,000 steps.
VOC = replace(
    COCO,
    encoder=ViTConfig(checkpoint="facebook/dino-vitb16", frozen=True, lr_scale=0.1),
    slots=replace(COCO_SLOTS, num_slots=6),
    decoder=TransformerDecoderConfig(num_layers=4, num_heads=4),
)
add_preset(
    "voc",
    "photographs: PASCAL VOC with DINO's features and DINOSAUR's hyperparameters",
    replace(PRESETS["coco"], model=VOC, data=VocConfig(path="data/voc"), max_steps=300_000),
)

# [D] movi_c_feat_rec.yaml and movi_e_feat_rec.yaml: ViT-S/8 of DINO, slots of 128, hidden layers of 1024, no flips.
# VideoSAUR's models of MOVi are trained by similarities over time alone, so these presets follow DINOSAUR.
MOVI_C = replace(
    COCO,
    encoder=ViTConfig(checkpoint="facebook/dino-vits8", frozen=True, lr_scale=0.1),
    slots=replace(COCO_SLOTS, num_slots=11, slot_dim=128, feature_dim=384, mlp_dim=512),
    decoder=MLPDecoderConfig(hidden_dims=(1024, 1024, 1024)),
)
add_preset(
    "movi-c",
    "frames of MOVi-C with DINO's features and DINOSAUR's hyperparameters",
    replace(
        PRESETS["coco"],
        model=MOVI_C,
        data=MoviCConfig(path="data/movi-c"),
        num_eval_images=960,
        horizontal_flips=False,
    ),
)
MOVI_E = replace(MOVI_C, slots=replace(MOVI_C.slots, num_slots=24))
add_preset(
    "movi-e",
    "frames of MOVi-E with DINO's features and DINOSAUR's hyperparameters",
    replace(PRESETS["movi-c"], model=MOVI_E, data=MoviEConfig(path="data/movi-e")),
)

# [V] ytvis.yml: ViT-B/16 of DINO, 7 slots of 64, a pixel MLP twice as wide as the features, three hidden layers of 1024
# in the decoder; batches of 128 clips, Adam at 1e-4 for every 32 clips, 2,500 steps of warm-up, half the rate after
# 100,000 steps, gradients clipped at 0.05. It has no slot MLP and trains on 4 frames. Here the slot MLP is as in [D],
# and pairs of frames are matched as in the paper.
YTVIS = PairDiscoveryConfig(
    image_size=(224, 224),
    encoder=ViTConfig(checkpoint="facebook/dino-vitb16", frozen=True, lr_scale=0.1),
    slots=replace(COCO_SLOTS, slot_dim=64, feature_dim=1536, mlp_dim=256),
    decoder=MLPDecoderConfig(hidden_dims=(1024, 1024, 1024)),
    match_gamma=0.1,
    match_temperature=0.5,
    match_dim=0,
    match_half_area=0.0,
    pairing="joint",
    motion_dim=128,
    code_dim=8,
)
add_preset(
    "ytvis",
    "videos: YouTube-VIS with DINO's features and VideoSAUR's hyperparameters, on pairs of frames",
    replace(
        PRESETS["coco"],
        model=YTVIS,
        data=YtvisConfig(path="data/ytvis"),
        batch_size=128,
        max_steps=100_000,
        warmup_steps=2_500,
        grad_clip=0.05,
        eval_every=5_000,
        num_eval_images=960,
    ),
)

# The order in which commands list them.
_photographs = ("coco", "voc", "movi-c", "movi-e", "ytvis")
for _name in ("tiny", "ours", "clevr", "clevrtex", "graph-ocl", "movi", "ours-video", *_photographs):
    PRESETS[_name], SUMMARIES[_name] = PRESETS.pop(_name), SUMMARIES.pop(_name)
