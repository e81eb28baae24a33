"""Decoders that reconstruct the features of a frozen encoder instead of the image.

Features of a pre-trained network tell objects of photographs apart better than colors do (DINOSAUR, Seitzer et al.,
2023). Both decoders take slots (B, K, D) and the features (B, C, h, w) to reconstruct, with N = h w patches:

    mlp           for every slot and patch, an MLP of slot + position gives features y_k and a logit;
                      m = softmax(logits),    y = sum_k m_k y_k
    transformer   predicts each patch from the patches before it, in the order of rows, and from the slots, which it
                  attends to; m is the attention of the last layer, averaged over heads

The masks m of patches are upsampled to the image, bilinearly: they still sum to one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cutslots.modules.base import (
    HALF,
    LayerNorm,
    check_features,
    check_size,
    downcast_half,
    exportable,
    is_transformed,
    upcast_half,
)
from cutslots.modules.decoders import DECODERS, Decoder, DecoderConfig
from cutslots.registry import Range

POSITION_SCALE = 0.02  # standard deviation of initial position embeddings, as in DINOSAUR and ViT
WIDENING = 4  # of the hidden layer of a transformer


@exportable
class FeatureDecoderOutput(NamedTuple):
    masks: Tensor  # (B, K, H, W), summing to one over K
    reconstruction: Tensor  # (B, C, h, w)
    target: Tensor  # (B, C, h, w): the features that are reconstructed


class FeatureDecoder(Decoder):
    """Base class of decoders of features. Subclasses implement `decode_patches`.

    `feature_channels` and `feature_size` (h, w) are those of the encoder.
    """

    def __init__(self, image_size: Sequence[int], feature_channels: int, feature_size: Sequence[int]) -> None:
        super().__init__()
        self.image_size, self.feature_size = check_size(image_size), check_size(feature_size)
        self.feature_channels, self.num_patches = feature_channels, self.feature_size[0] * self.feature_size[1]

    def decode_patches(self, slots: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Return masks (B, K, N) and features (B, N, C) for slots (B, K, D) and target features (B, N, C)."""
        raise NotImplementedError

    def forward(self, slots: Tensor, features: Tensor) -> FeatureDecoderOutput:
        check_features(features, self.feature_channels, self.feature_size)
        masks, patches = self.decode_patches(slots, features.flatten(2).mT)
        grid = masks.unflatten(2, self.feature_size)
        upsampled = F.interpolate(grid, self.image_size, mode="bilinear", align_corners=False)
        reconstruction = upcast_half(patches).mT.unflatten(2, self.feature_size)
        return FeatureDecoderOutput(upsampled, reconstruction, upcast_half(features))


@dataclass(frozen=True)
class MLPDecoderConfig(DecoderConfig):
    hidden_dims: Annotated[tuple[int, ...], Range(1, 65_536)] = (1024, 1024, 1024)
    """Hidden dimensions of the MLP."""


@DECODERS.register("mlp", MLPDecoderConfig)
class MLPDecoder(FeatureDecoder):
    """Features: an MLP of slot and patch position, mixed by masks (DINOSAUR).

    Linear layers are applied before slots are combined with positions, and after they are mixed: the same function for
    less work.

    >>> decoder = MLPDecoder(64, (56, 56), feature_channels=32, feature_size=(4, 4), hidden_dims=(48, 48))
    >>> output = decoder(torch.rand(2, 5, 64), torch.rand(2, 32, 4, 4))
    >>> output.masks.shape, output.reconstruction.shape
    (torch.Size([2, 5, 56, 56]), torch.Size([2, 32, 4, 4]))
    """

    def __init__(
        self,
        slot_dim: int,
        image_size: Sequence[int],
        feature_channels: int,
        feature_size: Sequence[int],
        hidden_dims: Sequence[int] = (1024, 1024, 1024),
        position_dim: int = 0,
    ) -> None:
        super().__init__(image_size, feature_channels, feature_size)
        if not hidden_dims:
            raise ValueError("hidden_dims is (); expected at least one hidden layer")
        self.position = nn.Parameter(POSITION_SCALE * torch.randn(self.num_patches, slot_dim))
        self.input = nn.Linear(slot_dim, hidden_dims[0])
        layers: list[nn.Module] = [nn.ReLU()]
        for before, after in pairwise(hidden_dims):
            layers += [nn.Linear(before, after), nn.ReLU()]
        self.hidden = nn.Sequential(*layers)
        self.logit = nn.Linear(hidden_dims[-1], 1)
        self.features = nn.Linear(hidden_dims[-1], feature_channels)

    def decode_patches(self, slots: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        slots = downcast_half(slots, self.input.weight)
        x = self.input(slots)[:, :, None] + F.linear(self.position, self.input.weight)  # (B, K, N, hidden)
        x = self.hidden(x)
        masks = upcast_half(self.logit(x)[..., 0]).softmax(1)
        mixed = (masks[..., None] * x).sum(1)
        return masks, self.features(downcast_half(mixed, self.features.weight))


@dataclass(frozen=True)
class TransformerDecoderConfig(DecoderConfig):
    num_layers: Annotated[int, Range(1, 64)] = 4
    """Layers of the transformer."""
    num_heads: Annotated[int, Range(1, 1024)] = 6
    """Attention heads; a divisor of the encoder's channels."""


@DECODERS.register("transformer", TransformerDecoderConfig)
class TransformerDecoder(FeatureDecoder):
    """Features: an autoregressive transformer that attends to slots (DINOSAUR, SPOT).

    In training and in use it is given the true features of the patches before the one it predicts.
    """

    def __init__(
        self,
        slot_dim: int,
        image_size: Sequence[int],
        feature_channels: int,
        feature_size: Sequence[int],
        num_layers: int = 4,
        num_heads: int = 6,
        position_dim: int = 0,
    ) -> None:
        super().__init__(image_size, feature_channels, feature_size)
        if feature_channels % num_heads:
            expected = f"expected a divisor of {feature_channels}, the channels of the encoder"
            raise ValueError(f"decoder.num_heads is {num_heads}; {expected}")
        dim = feature_channels
        self.first = nn.Parameter(POSITION_SCALE * torch.randn(1, dim))  # in place of a patch before the first one
        self.position = nn.Parameter(POSITION_SCALE * torch.randn(self.num_patches, dim))
        self.input = nn.Sequential(nn.Linear(dim, dim, bias=False), LayerNorm(dim))
        self.memory = nn.Sequential(nn.Linear(slot_dim, dim, bias=False), LayerNorm(dim))
        self.layers = nn.ModuleList(TransformerDecoderLayer(dim, num_heads) for _ in range(num_layers))
        self.output = nn.Sequential(LayerNorm(dim), nn.Linear(dim, dim))

    def decode_patches(self, slots: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        memory = self.memory(downcast_half(slots, self.first))
        first = self.first.to(target.dtype).expand(target.shape[0], -1, -1)
        x = self.input(torch.cat([first, target[:, :-1]], 1)) + self.position
        attention = x
        for layer in self.layers:
            x, attention = layer(x, memory)
        return attention.mean(1).mT, self.output(x)


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return the attention (B, heads, N, C) of each position to itself and those before it.

    Torch's fused function, which has first derivatives only, saves memory on CUDA in half precision. Otherwise the
    operations are written out and have derivatives of any order.
    """
    if q.is_cuda and q.dtype in HALF and not is_transformed():
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    N = q.shape[2]
    later = torch.ones(N, N, dtype=torch.bool, device=q.device).triu(1)
    attention = (upcast_half(q @ k.mT) * q.shape[-1] ** -0.5).masked_fill(later, -torch.inf).softmax(-1)
    return attention.to(v.dtype) @ v


class TransformerDecoderLayer(nn.Module):
    """Causal attention to patches, attention to slots, MLP; each after a LayerNorm and with a residual.

    Maps patches (B, N, C) and slots (B, K, C) to patches and the attention to slots (B, heads, N, K).
    """

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norms = nn.ModuleList(LayerNorm(dim) for _ in range(3))
        self.patch_qkv, self.patch_out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.slot_q, self.slot_kv = nn.Linear(dim, dim, bias=False), nn.Linear(dim, 2 * dim, bias=False)
        self.slot_out = nn.Linear(dim, dim, bias=False)
        self.mlp = nn.Sequential(nn.Linear(dim, WIDENING * dim), nn.ReLU(), nn.Linear(WIDENING * dim, dim))

    def forward(self, x: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        x = x + self._attend_patches(self.norms[0](x))
        change, attention = self._attend_slots(self.norms[1](x), slots)
        x = x + change
        return x + self.mlp(self.norms[2](x)), attention

    def _attend_patches(self, x: Tensor) -> Tensor:
        q, k, v = (self._split(each) for each in self.patch_qkv(x).chunk(3, -1))
        return self.patch_out(self._join(causal_attention(q, k, v)))

    def _attend_slots(self, x: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        q = self._split(self.slot_q(x))
        k, v = (self._split(each) for each in self.slot_kv(slots).chunk(2, -1))
        attention = (upcast_half(q @ k.mT) * q.shape[-1] ** -0.5).softmax(-1)
        return self.slot_out(self._join(attention.to(v.dtype) @ v)), attention

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def _join(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2).flatten(2)
