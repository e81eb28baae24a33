"""The encoder `pretrained`: an encoder that `cutslots pretrain` has trained, frozen or fine-tuned.

Its checkpoint is a folder with config.json, which names the encoder and its options, and model.safetensors:

    {"name": "resnet", "channels": 64, ..., "plugins": []}

Two things make features of convolutions a target to reconstruct, as those of a ViT are. Both are options:

    pool          averages blocks of positions: a grid of 64x64 has more positions than a decoder of features can decode
    layer_norm    normalises the features of each position, as the last layer of a ViT does; otherwise a few channels
                  with large values make up the loss
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cutslots.modules.backbone import BackboneConfig, BackboneEncoder
from cutslots.modules.base import LayerNorm
from cutslots.modules.checkpoint_files import (
    CONFIG,
    WEIGHTS,
    check_num_parameters,
    load_weights,
    parse_config,
    tensors_to_save,
    write_checkpoint,
)
from cutslots.modules.encoders import ENCODERS, Encoder, EncoderConfig
from cutslots.registry import Range, plugins_of


@dataclass(frozen=True)
class PretrainedConfig(BackboneConfig):
    checkpoint: str = "runs/features"
    """Folder that `cutslots pretrain` has written."""
    pool: Annotated[int, Range(1, 256)] = 1
    """Average the features of blocks of so many positions, in each direction; 1 for all positions."""
    layer_norm: bool = True
    """Normalise the features of each position to mean 0 and variance 1."""


@ENCODERS.register("pretrained", PretrainedConfig)
class PretrainedEncoder(BackboneEncoder):
    """An encoder that `cutslots pretrain` has trained, frozen or fine-tuned."""

    def __init__(
        self,
        checkpoint: str | Path,
        frozen: bool = True,
        lr_scale: float = 0.1,
        pool: int = 1,
        layer_norm: bool = True,
    ) -> None:
        super().__init__(checkpoint, frozen, lr_scale)
        self.pool, self.out_channels = pool, self.backbone.out_channels
        self.norm = PositionNorm(self.out_channels) if layer_norm else nn.Identity()

    def load_backbone(self) -> Encoder:
        return load_encoder(self.checkpoint)

    def out_size(self, image_size: tuple[int, int]) -> tuple[int, int]:
        grid: tuple[int, int] = self.backbone.out_size(image_size)
        if self.pool > min(grid):
            raise ValueError(f"encoder.pool is {self.pool}; expected at most {min(grid)}, the smaller side of the grid")
        return grid[0] // self.pool, grid[1] // self.pool

    def normalize(self, image: Tensor) -> Tensor:
        return self.backbone.normalize(image)

    def forward(self, x: Tensor) -> Tensor:
        self.materialize(x)
        features = self.backbone(x)
        return self.norm(F.avg_pool2d(features, self.pool) if self.pool > 1 else features)

    def fingerprint(self) -> dict[str, Any] | None:
        if not self.frozen:
            return None
        files = (Path(self.checkpoint).expanduser() / name for name in (CONFIG, WEIGHTS))
        digests = [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]
        return {"checkpoint": digests, "pool": self.pool, "layer_norm": not isinstance(self.norm, nn.Identity)}


class PositionNorm(nn.Module):
    """`LayerNorm` over the channels of features (B, C, h, w), without learned scale and shift."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = LayerNorm(channels, elementwise_affine=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.movedim(1, -1)).movedim(-1, 1)


# --------------------------------------------------------------------------------------------------------- checkpoints


def save_encoder(encoder: nn.Module, config: EncoderConfig, folder: Path) -> None:
    """Write config.json and model.safetensors of an encoder to a folder."""
    write_checkpoint(folder, ENCODERS.to_dict(config) | {"plugins": plugins_of(config)}, tensors_to_save(encoder))


def load_encoder(folder: str | Path) -> Encoder:
    """Return the encoder of a checkpoint in evaluation mode; on the meta device its weights are not read."""
    path = Path(folder).expanduser()
    if not (path / CONFIG).is_file() or not (path / WEIGHTS).is_file():
        raise ValueError(
            f"encoder.checkpoint is {str(folder)!r}; expected a folder with {CONFIG} and {WEIGHTS}, "
            f"as `cutslots pretrain` writes it"
        )
    try:
        config: EncoderConfig = parse_config(path / CONFIG, "encoder", _checked_config)
        with torch.random.fork_rng(devices=[]):  # the initial weights are of no use
            encoder: Encoder = ENCODERS.build(config)
        if torch.get_default_device().type != "meta":
            load_weights(encoder, path / WEIGHTS)
    except ValueError as error:
        raise ValueError(f"encoder.checkpoint: {error}") from None
    return encoder.eval()


def _checked_config(values: dict[str, Any]) -> EncoderConfig:
    config: EncoderConfig = ENCODERS.from_dict(values)
    check_num_parameters("encoder", lambda: ENCODERS.build(config), plugins_of(config))
    return config
