"""Where Triton kernels run. Needs torch only, not Triton."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def is_supported(device: torch.device) -> bool:
    """Return whether the kernels run on this device: an NVIDIA GPU of compute capability 8.0 or later."""
    return device.type == "cuda" and not torch.version.hip and torch.cuda.get_device_capability(device) >= (8, 0)


def device_of(x: Tensor) -> AbstractContextManager[object]:
    """Make the device of x the current one, where Triton launches kernels; compiled code does so itself.

    On the CPU, where Triton's interpreter runs kernels, there is nothing to do.
    """
    return torch.cuda.device_of(x) if x.is_cuda and not torch.compiler.is_compiling() else nullcontext()
