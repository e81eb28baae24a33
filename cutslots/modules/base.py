"""What encoders, slot modules and decoders have in common.

Shapes in this package: B batch, T frames, K slots, D slot dimension, C channels, H W a grid or an image.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils._pytree import _register_namedtuple

from cutslots.programs.qp import MAX_POSITIVE, MIN_POSITIVE
from cutslots.registry import Range

T = TypeVar("T")
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


def exportable(kind: type[T]) -> type[T]:
    """Let `torch.export.save` write programs that return this kind of NamedTuple. To load them, import its module."""
    _register_namedtuple(kind, serialized_type_name=f"{kind.__module__}.{kind.__name__}")
    return kind


def is_transformed() -> bool:
    """Return whether torch.func or forward mode is at work. Their tensors support fewer operations."""
    if torch.compiler.is_compiling():
        return False
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def to_channels_last(x: Tensor) -> Tensor:
    """Return images in the memory format in which convolutions are fastest; unchanged where vmap may not support it."""
    return x if is_transformed() else x.contiguous(memory_format=torch.channels_last)


def first_parameter(module: nn.Module) -> Tensor:
    """Return a parameter, for its dtype. Those of a replica of `nn.DataParallel` are plain attributes."""
    for parameter in module.parameters():
        return parameter
    return next(x for m in module.modules() for x in vars(m).values() if isinstance(x, Tensor))


class LayerNorm(nn.LayerNorm):
    """`nn.LayerNorm` over the last dimension with second derivatives that are right in every mode.

    Those of torch 2.13 are wrong in forward mode and in torch.func (pytorch/pytorch#196700).
    """

    def forward(self, x: Tensor) -> Tensor:
        if not is_transformed():
            return super().forward(x)
        centered = upcast_half(x)
        centered = centered - centered.mean(-1, keepdim=True)
        scale = (centered.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        normalized = centered * scale
        return (normalized * self.weight + self.bias if self.elementwise_affine else normalized).to(x.dtype)


def mlp(in_dim: int, hidden_dim: int, out_dim: int, eps: float = 1e-5) -> nn.Sequential:
    """Return LayerNorm (with epsilon `eps`), Linear, ReLU, Linear."""
    layers = (nn.Linear(in_dim, hidden_dim), nn.ReLU(), nn.Linear(hidden_dim, out_dim))
    return nn.Sequential(LayerNorm(in_dim, eps), *layers)


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
