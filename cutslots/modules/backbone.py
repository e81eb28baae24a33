"""`BackboneEncoder`: an encoder whose network is read from a checkpoint of its own, frozen or fine-tuned.

A frozen network is not in the state dict. The config of the model names its checkpoint. It is read from there, and
again whenever the encoder moves to another device or precision: `to_empty` and `half` leave nothing behind. The state
dict holds the norm of its weights, by which another checkpoint in its place is noticed. A fine-tuned network is in the
state dict like any other part.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Self

import torch
from torch import Tensor, nn

from cutslots.modules.base import first_parameter
from cutslots.modules.encoders import Encoder, EncoderConfig
from cutslots.programs.constants import ConstantLayer
from cutslots.registry import Range

NORM_UNIT = 1e-6  # of the norm that the state dict holds, an integer so that half precision does not round it
NORM_TOLERANCE = 1e-5  # of the norm, relative: sums depend on their order, which depends on the version of libraries


@dataclass(frozen=True)
class BackboneConfig(EncoderConfig):
    """Base of the configs of encoders with a checkpoint of their own."""

    checkpoint: str = ""
    """Folder of the checkpoint."""
    frozen: bool = True
    """Keep the weights of the checkpoint. Feature reconstruction needs it; --encoder.no-frozen fine-tunes them."""
    lr_scale: Annotated[float, Range(0, 65_536)] = 0.1
    """Factor on the learning rate of a network that is fine-tuned."""


class BackboneEncoder(Encoder, ConstantLayer):
    """Base class of encoders whose network, `backbone`, is read from a checkpoint.

    Subclasses implement `load_backbone`, which on the meta device does not read weights.
    """

    weight_norm: Tensor

    def __init__(self, checkpoint: str | Path, frozen: bool = True, lr_scale: float = 0.1) -> None:
        super().__init__()
        self.checkpoint, self.frozen, self.lr_scale = str(checkpoint), frozen, lr_scale
        self.backbone = self.load_backbone()
        self.train(self.training)
        if frozen:
            self.backbone.requires_grad_(False)
            self.register_buffer("weight_norm", weight_norm(self.backbone))
            self.register_state_dict_post_hook(_drop_backbone)
            self.register_load_state_dict_post_hook(_expect_no_backbone)

    def load_backbone(self) -> Any:
        """Return the network of the checkpoint, in the default precision and on the default device."""
        raise NotImplementedError

    def parameter_groups(self) -> list[dict[str, Any]]:
        return [{"params": [p for p in self.parameters() if p.requires_grad], "lr_scale": self.lr_scale}]

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        if self.frozen:
            self.backbone.eval()  # dropout, stochastic depth and the statistics of batches would change the features
        return self

    def precompute(self) -> None:
        """Read frozen weights again, in the precision and on the device of the encoder."""
        if not self.frozen or self.device.type == "meta":
            return
        backbone = self.load_backbone()
        if first_parameter(self.backbone).device.type == "meta":
            self.backbone.to_empty(device=self.device)
        self.backbone.load_state_dict(backbone.state_dict())
        self.weight_norm = weight_norm(backbone).to(self.device)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        given = state_dict.get(f"{prefix}weight_norm")
        if self.frozen and given is not None and "meta" not in (given.device.type, self.device.type):
            expected, found = (int(x) * NORM_UNIT for x in (given, self.weight_norm))
            if abs(found - expected) > NORM_TOLERANCE * expected:
                raise ValueError(
                    f"encoder.checkpoint is {self.checkpoint!r}, whose weights have norm {found:.6g}; expected the "
                    f"checkpoint that the model was trained with, whose weights have norm {expected:.6g}"
                )
        super()._load_from_state_dict(state_dict, prefix, *args)


def weight_norm(backbone: nn.Module) -> Tensor:
    """Return the Euclidean norm of all weights and statistics in units of 1e-6, as an integer; zero on the meta device.

    Statistics are those of batch normalisation: features depend on them as on weights.
    """
    if first_parameter(backbone).device.type == "meta":
        return torch.zeros((), dtype=torch.int64)
    tensors = (x for x in backbone.state_dict().values() if x.is_floating_point())
    squares = sum(float(x.detach().double().square().sum()) for x in tensors)
    return torch.tensor(round(math.sqrt(squares) / NORM_UNIT), dtype=torch.int64)


def _drop_backbone(module: nn.Module, state: dict[str, Tensor], prefix: str, metadata: Any) -> None:
    for name in [name for name in state if name.startswith(f"{prefix}backbone.")]:
        del state[name]


def _expect_no_backbone(module: nn.Module, keys: Any) -> None:
    """Take the weights of the frozen network from the list of missing ones."""
    backbone: Any = module.backbone
    names = tuple(f"backbone.{name}" for name in backbone.state_dict())
    keys.missing_keys[:] = [key for key in keys.missing_keys if not key.endswith(names)]
