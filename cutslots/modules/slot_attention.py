"""Slot Attention (Locatello et al., 2020), the baseline.

It computes and is initialised as the reference, https://github.com/google-research/google-research (slot_attention),
which is written in Keras. `nn.GRUCell` has the equations of Keras' GRU cell; only its gates are in another order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor, nn

from cutslots.modules.base import LayerNorm, check_size, downcast_half, mlp, upcast_half
from cutslots.modules.position import SoftPositionEmbedding
from cutslots.modules.slots import SLOTS, SlotModule, Slots, SlotsConfig
from cutslots.registry import Range

LAYER_NORM_EPS = 1e-3  # Keras' default, which the reference uses


@dataclass(frozen=True)
class SlotAttentionConfig(SlotsConfig):
    num_iterations: Annotated[int, Range(1, 64)] = 3
    """Iterations of attention."""
    mlp_dim: Annotated[int, Range(1, 65_536)] = 128
    """Hidden dimension of the residual MLP."""


@SLOTS.register("slot-attention", SlotAttentionConfig)
class SlotAttention(SlotModule):
    """Slot Attention, with the position embedding, layer norm and MLP that precede it (the baseline).

    The reference's settings: 3 iterations, slots sampled from one learned Gaussian, attention normalised over slots
    and then averaged over pixels with epsilon 1e-8, a GRU and a residual MLP. Every call samples new initial slots
    from torch's generator.
    """

    def __init__(
        self,
        in_channels: int,
        num_slots: int,
        size: Sequence[int],
        slot_dim: int = 64,
        *,
        num_iterations: int = 3,
        mlp_dim: int = 128,
        relative_positions: bool = False,
        epsilon: float = 1e-8,
    ) -> None:
        super().__init__(num_slots, slot_dim, relative_positions)
        dim = self.content_dim
        self.size = check_size(size)
        self.num_iterations, self.epsilon = num_iterations, epsilon
        self.position = SoftPositionEmbedding(in_channels, size)
        self.features = mlp(in_channels, in_channels, in_channels, LAYER_NORM_EPS)
        self.norm_inputs = LayerNorm(in_channels, LAYER_NORM_EPS)
        self.norm_slots = LayerNorm(dim, LAYER_NORM_EPS)
        self.query = nn.Linear(dim, dim, bias=False)
        self.key_value = nn.Linear(in_channels, 2 * dim, bias=False)
        self.gru = nn.GRUCell(dim, dim)
        self.mlp = mlp(dim, mlp_dim, dim, LAYER_NORM_EPS)
        self.mean = nn.Parameter(torch.empty(1, 1, dim))
        self.log_scale = nn.Parameter(torch.empty(1, 1, dim))
        self._initialize()

    def _initialize(self) -> None:
        """Initialise as Keras does: Glorot-uniform weights, an orthogonal recurrent kernel, zero biases.

        The bound of a Glorot-uniform weight depends on its shape, so each is drawn in the shape that it has in Keras:
        key and value separately, the three gates of the GRU as one matrix, the mean and log scale as 1 x D.
        """
        linear = [m.weight for m in self.modules() if isinstance(m, nn.Linear) and m is not self.key_value]
        key_value = self.key_value.weight.detach().chunk(2)
        initial_slots = (self.mean.detach()[0], self.log_scale.detach()[0])
        for weight in (*linear, *key_value, *initial_slots, self.gru.weight_ih):
            nn.init.xavier_uniform_(weight)
        nn.init.orthogonal_(self.gru.weight_hh)
        for name, parameter in self.named_parameters():
            if "bias" in name:
                nn.init.zeros_(parameter)

    def forward(self, x: Tensor) -> Slots:
        x = self.position(x)
        pixels = self.norm_inputs(self.features(x.flatten(2).mT))
        key, value = self.key_value(pixels).chunk(2, -1)  # (B, HW, D)
        noise = torch.randn(x.shape[0], self.num_slots, self.content_dim, device=x.device)
        slots = downcast_half(self.mean + self.log_scale.exp() * noise, self.mean)
        attention = slots
        for _ in range(self.num_iterations):
            slots, attention = self._iterate(slots, key, value)
        masks = attention.unflatten(-1, self.size)
        return Slots(self.with_positions(slots, masks), masks)

    def _iterate(self, slots: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        query = self.query(self.norm_slots(slots)) * key.shape[-1] ** -0.5
        attention = upcast_half(query @ key.mT).softmax(1)  # (B, K, HW), over slots
        weights = attention + self.epsilon
        update = (weights / weights.sum(-1, keepdim=True)).to(value.dtype) @ value
        slots = slots.to(update.dtype)
        slots = gru_cell(self.gru, update, slots)
        return slots + self.mlp(slots), attention


def gru_cell(cell: nn.GRUCell, x: Tensor, h: Tensor) -> Tensor:
    """Return the next state (..., D) for input x and state h, like `cell`.

    The kernel of GRUCell on CUDA has no second derivative, no forward mode and no fake implementation, so torch.compile
    would break the graph at it.
    """
    reset, update, new = nn.functional.linear(x, cell.weight_ih, cell.bias_ih).chunk(3, -1)
    reset_h, update_h, new_h = nn.functional.linear(h, cell.weight_hh, cell.bias_hh).chunk(3, -1)
    new = torch.tanh(new + torch.sigmoid(reset + reset_h) * new_h)
    return new + torch.sigmoid(update + update_h) * (h - new)
