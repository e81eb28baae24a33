"""The encoder `patch-vit`: a vision transformer that is trained from scratch, as in `cutslots pretrain patch-vit`.

Patches are embedded by one convolution. Sines and cosines of their positions are added, so that images may have any
size that the patch size divides. Then come layers of attention and an MLP, each after a LayerNorm and with a residual,
and a last LayerNorm. There is no token besides the patches: features are a grid.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cutslots.modules.base import HALF, LayerNorm, is_transformed, upcast_half
from cutslots.modules.encoders import ENCODERS, Encoder, EncoderConfig
from cutslots.registry import Range

WIDENING = 4  # of the hidden layer of an MLP
MAX_WAVELENGTH = 10_000.0  # of position embeddings, in patches, as in the first transformer


@dataclass(frozen=True)
class PatchViTConfig(EncoderConfig):
    channels: Annotated[int, Range(4, 65_536)] = 192
    """Channels of every layer; a multiple of 4 and of the heads."""
    num_layers: Annotated[int, Range(1, 64)] = 6
    """Layers of the transformer."""
    num_heads: Annotated[int, Range(1, 1024)] = 3
    """Attention heads."""
    patch_size: Annotated[int, Range(1, 256)] = 8
    """Height and width of the patches, in pixels."""


@ENCODERS.register("patch-vit", PatchViTConfig)
class PatchViTEncoder(Encoder):
    """A vision transformer trained from scratch."""

    def __init__(self, channels: int = 192, num_layers: int = 6, num_heads: int = 3, patch_size: int = 8) -> None:
        super().__init__()
        if channels % 4 or channels % num_heads:
            raise ValueError(f"encoder.channels is {channels}; expected a multiple of 4 and of {num_heads} heads")
        self.out_channels, self.patch_size = channels, patch_size
        self.patches = nn.Conv2d(3, channels, patch_size, patch_size)
        self.layers = nn.ModuleList(TransformerLayer(channels, num_heads) for _ in range(num_layers))
        self.norm = LayerNorm(channels)

    def out_size(self, image_size: tuple[int, int]) -> tuple[int, int]:
        height, width = image_size
        if height % self.patch_size or width % self.patch_size:
            expected = f"expected multiples of {self.patch_size} (encoder.patch_size)"
            raise ValueError(f"image_size is {(height, width)}; {expected}")
        return height // self.patch_size, width // self.patch_size

    def forward(self, x: Tensor) -> Tensor:
        size = self.out_size((x.shape[2], x.shape[3]))
        tokens = self.patches(x).flatten(2).mT
        tokens = tokens + sine_positions(size, self.out_channels, x.device).to(tokens.dtype)
        for layer in self.layers:
            tokens = layer(tokens)
        return self.norm(tokens).mT.unflatten(2, size)


def sine_positions(size: tuple[int, int], channels: int, device: torch.device | str = "cpu") -> Tensor:
    """Return sines and cosines (h * w, channels) of rows, then of columns, at channels / 4 wavelengths each."""
    count = channels // 4
    exponents = torch.arange(count, device=device, dtype=torch.float32) / count
    frequencies = torch.exp(-math.log(MAX_WAVELENGTH) * exponents)
    rows, columns = (torch.arange(n, device=device, dtype=torch.float32)[:, None] * frequencies for n in size)
    angles = torch.cat([rows[:, None].expand(*size, -1), columns[None].expand(*size, -1)], -1).flatten(0, 1)
    return torch.cat([angles.sin(), angles.cos()], -1)


class TransformerLayer(nn.Module):
    """Attention between patches (B, N, C) and an MLP, each after a LayerNorm and with a residual."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norms = nn.ModuleList(LayerNorm(dim) for _ in range(2))
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, WIDENING * dim), nn.GELU(), nn.Linear(WIDENING * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self._attend(self.norms[0](x))
        return x + self.mlp(self.norms[1](x))

    def _attend(self, x: Tensor) -> Tensor:
        heads = (each.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        return self.out(attention(*heads).transpose(1, 2).flatten(2))


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return the attention (B, heads, N, C) of each position to all positions.

    Torch's fused function, which has first derivatives only, saves memory on CUDA in half precision. Otherwise the
    operations are written out and have derivatives of any order.
    """
    if q.is_cuda and q.dtype in HALF and not is_transformed():
        return F.scaled_dot_product_attention(q, k, v)
    weights = (upcast_half(q @ k.mT) * q.shape[-1] ** -0.5).softmax(-1)
    return weights.to(v.dtype) @ v
