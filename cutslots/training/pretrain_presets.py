"""Presets of `cutslots pretrain`: every hyperparameter of every named run.

    tiny        learns in minutes on two CPU cores
    resnet      the encoder of preset `ours`: a ResNet with a feature pyramid
    patch-vit   a small vision transformer

The default objective is SimCLR. Its batch sizes and rates are those for scenes with few objects, not for ImageNet.
"""

from __future__ import annotations

from dataclasses import replace

from cutslots.data.builtin import TexturedConfig
from cutslots.modules.encoders import ResNetConfig
from cutslots.modules.patch_vit import PatchViTConfig
from cutslots.training.config import PretrainConfig
from cutslots.training.objectives import SimCLRConfig

PRETRAIN_PRESETS: dict[str, PretrainConfig] = {}
PRETRAIN_SUMMARIES: dict[str, str] = {}


def add_pretrain_preset(name: str, summary: str, config: PretrainConfig) -> None:
    """Add a preset for `cutslots pretrain NAME`. A plugin may call this."""
    if name in PRETRAIN_PRESETS:
        raise ValueError(f"preset {name!r} exists; choose another name")
    PRETRAIN_PRESETS[name], PRETRAIN_SUMMARIES[name] = replace(config, preset=name), summary


SIMCLR = SimCLRConfig(
    temperature=0.2, hidden_dim=512, projection_dim=128, min_crop=0.2, jitter=0.8, grayscale=0.2, blur=0.5
)
RESNET = PretrainConfig(
    encoder=ResNetConfig(channels=96, kernel_sizes=(5, 3, 3, 3, 3), batch_norm=False, pyramid_levels=4),
    objective=SIMCLR,
    data=TexturedConfig(),
    image_size=(128, 128),
    preset="resnet",
    batch_size=128,
    max_steps=20_000,
    lr=1e-3,
    warmup_steps=500,
    lr_decay=0.5,
    lr_decay_steps=5_000,
    grad_clip=1.0,
    eval_every=1_000,
    num_eval_images=320,
)

add_pretrain_preset(
    "tiny",
    "learns in minutes on two CPU cores",
    replace(
        RESNET,
        encoder=ResNetConfig(channels=32, kernel_sizes=(5, 3, 3), batch_norm=False, pyramid_levels=3),
        objective=replace(SIMCLR, hidden_dim=128, projection_dim=64),
        data=TexturedConfig(num_objects=(3, 6)),
        image_size=(64, 64),
        batch_size=32,
        max_steps=600,
        warmup_steps=50,
        lr_decay_steps=300,
        eval_every=200,
        num_eval_images=96,
        num_images=4_000,
    ),
)
add_pretrain_preset("resnet", "the encoder of preset `ours`: a ResNet with a feature pyramid", RESNET)
add_pretrain_preset(
    "patch-vit",
    "a small vision transformer",
    replace(
        RESNET,
        encoder=PatchViTConfig(channels=192, num_layers=6, num_heads=3, patch_size=8),
        lr=5e-4,
        warmup_steps=2_000,
    ),
)
