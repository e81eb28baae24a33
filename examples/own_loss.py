"""A loss as a plugin: absolute error, with an entropy penalty on the masks.

From the command line:

    cutslots train tiny --plugin examples/own_loss.py --loss l1 --loss.entropy 0.01 --out runs/l1
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from torch import Tensor

from cutslots import LOSSES, DiscoveryOutput, Loss, LossConfig
from cutslots.models.discovery import to_float
from cutslots.registry import Range
from cutslots.training.losses import LossOutput


@dataclass(frozen=True)
class L1Config(LossConfig):
    entropy: Annotated[float, Range(0, 100)] = 0.0
    """Weight of the entropy of the masks at each pixel; 0 for none."""


@LOSSES.register("l1", L1Config)
class L1Loss(Loss):
    """Mean absolute error of the reconstruction, and the entropy of the masks. The error is logged."""

    def __init__(self, entropy: float) -> None:
        self.entropy = entropy

    def __call__(self, output: DiscoveryOutput, image: Tensor, step: int) -> LossOutput:
        error = (output.reconstruction - to_float(image)).abs().mean()
        entropy = -(output.masks * output.masks.clamp(min=1e-8).log()).sum(-3).mean()
        return LossOutput(error + self.entropy * entropy, error)
