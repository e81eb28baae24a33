"""`ConstantLayer`: tensors that a layer computes from its arguments and does not keep in the state dict."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor, nn


class ConstantLayer(nn.Module):
    """A layer with constants, which `precompute` computes for the layer's device and precision.

    When the layer moves, the constants are computed again, not copied: a float32 layer converted with `.double()` is as
    exact as one built in float64, and `to_empty` leaves no constant uninitialised. A layer converted to half precision
    keeps its constants in float32. Constants are not in the state dict.

    A layer on the meta device has no constants yet. `to_empty` computes them. So does `materialize`, which `forward`
    calls: `load_state_dict(assign=True)` moves parameters and leaves constants behind.
    """

    _like: Tensor  # empty; moves and converts with the layer

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("_like", torch.empty(0), persistent=False)

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64 if self._like.dtype == torch.float64 else torch.float32

    @property
    def device(self) -> torch.device:
        return self._like.device

    def precompute(self) -> None:
        """Compute the constants for `self.device` and `self.dtype`. Constructors call it last."""
        raise NotImplementedError

    def materialize(self, x: Tensor) -> None:
        """Compute the constants on the device of x if the layer is still on the meta device."""
        if self.device.type == "meta" and x.device.type != "meta":
            self._like = torch.empty_like(self._like, device=x.device)
            self.precompute()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        before = self._like
        super()._apply(fn, recurse)
        if self._like is not before:
            self.precompute()
        return self
