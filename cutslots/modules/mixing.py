"""Mix what slots reconstruct: `mix`. Colors x_k and logits give masks and a reconstruction:

    m = softmax(logits),    x' = sum_k m_k x_k

On CUDA in half precision one kernel reads the components and writes all results, and one computes the gradient
(`mixing_triton`). Elsewhere, and for higher derivatives and torch.func, it is a few operations of torch.

Shapes: components (B, K, 4, H, W) hold colors in about [-1, 1] and a logit.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cutslots.modules.base import HALF, is_transformed, upcast_half

try:
    from cutslots.modules import mixing_triton as kernels
except ImportError:  # Triton comes with the CUDA builds of torch
    kernels = None  # type: ignore[assignment]


def mix(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return masks (B, K, H, W), the reconstruction (B, 3, H, W) and colors (B, K, 3, H, W) in about [0, 1]."""
    fits = x.is_cuda and x.dtype in HALF and not is_transformed()
    return mix_fused(x) if fits else mix_layers(x)


def mix_layers(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the same by operations of torch."""
    x = upcast_half(x)
    colors, masks = x[:, :, :3] / 2 + 0.5, x[:, :, 3].softmax(1)
    return masks, (masks[:, :, None] * colors).sum(1), colors


@torch.library.custom_op("cutslots::mix", mutates_args=())
def mix_fused(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the same by one kernel where there is one."""
    if not _has_kernels(x):
        return tuple(out.contiguous() for out in mix_layers(x))  # type: ignore[return-value]
    return kernels.mix(_components_last(x))


@mix_fused.register_fake
def _(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    B, K, _, H, W = x.shape
    dtype = torch.float32 if x.dtype in HALF else x.dtype
    return tuple(x.new_empty(shape, dtype=dtype) for shape in ((B, K, H, W), (B, 3, H, W), (B, K, 3, H, W)))  # type: ignore[return-value]


@torch.library.custom_op("cutslots::mix_backward", mutates_args=())
def mix_backward(x: Tensor, masks_grad: Tensor, reconstruction_grad: Tensor, colors_grad: Tensor) -> Tensor:
    """Return the gradient of the components, in memory with the components last."""
    if _has_kernels(x):
        grad = kernels.mix_backward(_components_last(x), masks_grad, reconstruction_grad, colors_grad)
        return grad.permute(0, 1, 4, 2, 3)
    masks, _, colors = mix_layers(x)
    masks_grad = masks_grad + (colors * reconstruction_grad[:, None]).sum(2)
    logits_grad = masks * (masks_grad - (masks * masks_grad).sum(1, keepdim=True))
    colors_grad = (masks[:, :, None] * reconstruction_grad[:, None] + colors_grad) / 2
    grad = torch.cat([colors_grad, logits_grad[:, :, None]], 2).to(x.dtype)
    return _components_last(grad).permute(0, 1, 4, 2, 3)


@mix_backward.register_fake
def _(x: Tensor, masks_grad: Tensor, reconstruction_grad: Tensor, colors_grad: Tensor) -> Tensor:
    B, K, _, H, W = x.shape
    return x.new_empty(B, K, H, W, 4).permute(0, 1, 4, 2, 3)


def _save(ctx: Any, inputs: tuple[Tensor], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.save_for_backward(inputs[0])


def _backward(ctx: Any, *gradients: Tensor) -> Tensor:
    (x,) = ctx.saved_tensors
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # for higher derivatives
        return torch.autograd.grad(mix_layers(x), x, gradients, create_graph=True)[0]
    return mix_backward(x, *gradients)


mix_fused.register_autograd(_backward, setup_context=_save)


def _has_kernels(x: Tensor) -> bool:
    return kernels is not None and kernels.is_supported(x.device) and x.shape[1] <= kernels.MAX_SLOTS


def _components_last(x: Tensor) -> Tensor:
    """Return components as contiguous (B, K, H, W, 4)."""
    return x.permute(0, 1, 3, 4, 2).contiguous()
