"""What encoders, slot modules and decoders have in common.

Shapes in this package: B batch, T frames, K slots, D slot dimension, C channels, H W a grid or an image.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from cutslots.programs.qp import MAX_POSITIVE, MIN_POSITIVE
from cutslots.registry import Range

HALF = (torch.float16, torch.bfloat16)
Positive = Annotated[float, Range(MIN_POSITIVE, MAX_POSITIVE)]  # the type of regularisers and temperatures


class PartModule(nn.Module):
    """Base class of the networks of a model. A part decides how its parameters are trained."""

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Return optimizer groups. "lr_scale" multiplies the learning rate of a group.

        Override this to train a part at a rate of its own. Parameters that do not require gradients are left out.
        """
        return [{"params": [p for p in self.parameters() if p.requires_grad], "lr_scale": 1.0}]


def upcast_half(x: Tensor) -> Tensor:
    """Return float16 and bfloat16 tensors as float32, others unchanged."""
    return x.float() if x.dtype in HALF else x


def downcast_half(x: Tensor, parameter: Tensor) -> Tensor:
    """Return x in the dtype of a float16 or bfloat16 parameter, to combine them; unchanged for other parameters.

    Cuts and masks are float32 in half-precision models too. Autocast has float32 parameters and casts by itself.
    """
    return x.to(parameter.dtype) if parameter.dtype in HALF else x


def mlp(in_dim: int, hidden_dim: int, out_dim: int, eps: float = 1e-5) -> nn.Sequential:
    """Return LayerNorm (with epsilon `eps`), Linear, ReLU, Linear."""
    layers = (nn.Linear(in_dim, hidden_dim), nn.ReLU(), nn.Linear(hidden_dim, out_dim))
    return nn.Sequential(nn.LayerNorm(in_dim, eps), *layers)


def check_size(size: Sequence[int]) -> tuple[int, int]:
    """Return `size` as (H, W), or raise."""
    sides = tuple(size) if isinstance(size, Sequence) else ()
    if len(sides) != 2 or not all(isinstance(n, int) and n >= 1 for n in sides):
        raise ValueError(f"size is {size!r}; expected (H, W), two integers of at least 1")
    return sides[0], sides[1]


def check_features(x: Tensor, channels: int, size: Sequence[int]) -> Tensor:
    """Return features unchanged if they are floating point of shape (B, channels, *size), or raise."""
    if x.ndim != 4 or x.shape[1:] != (channels, *size):
        expected = ", ".join(map(str, ("B", channels, *size)))
        raise ValueError(f"features have shape {tuple(x.shape)}; expected ({expected})")
    if not x.is_floating_point():
        raise TypeError(f"features have dtype {x.dtype}; expected a floating-point type")
    return x


def check_kernel_sizes(kernel_sizes: Sequence[int], minimum: int, name: str = "kernel_sizes") -> Sequence[int]:
    """Return kernel sizes unchanged if there are at least `minimum`, all odd, or raise."""
    if len(kernel_sizes) < minimum or any(kernel < 1 or kernel % 2 == 0 for kernel in kernel_sizes):
        raise ValueError(
            f"{name} is {tuple(kernel_sizes)!r}; expected an odd integer for each of at least {minimum} layers"
        )
    return kernel_sizes
