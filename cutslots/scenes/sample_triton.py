"""A Triton kernel for CUDA of `HashRNG`: it replaces about thirty launches for every name of a random number by one."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cutslots.scenes.render_triton import device_of
from cutslots.scenes.render_triton import is_supported as is_supported

BLOCK = 1024
FIRST, SECOND = tl.constexpr(0xBF58476D1CE4E5B9), tl.constexpr(0x94D049BB133111EB)
STEP = tl.constexpr(0x9E3779B97F4A7C15)
UNIT = tl.constexpr(2.0**-53)


@triton.jit
def _mix(x):
    x = (x ^ (x >> 30)) * FIRST
    x = (x ^ (x >> 27)) * SECOND
    return x ^ (x >> 31)


@triton.jit(do_not_specialize=["name", "size", "count"])
def _uniform_kernel(key, name, out, size, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    stream = _mix((tl.load(key + at // size, at < count, 0) ^ name).to(tl.uint64))
    bits = _mix(stream + (at % size + 1).to(tl.uint64) * STEP)
    tl.store(out + at, (bits >> 11).to(tl.float64) * UNIT, at < count)


def uniform(key: Tensor, name: int, size: int) -> Tensor:
    """Return numbers in [0, 1) of shape (B, size) for keys (B,) and the hash of a name."""
    out = torch.empty(len(key), size, dtype=torch.float64, device=key.device)
    if out.numel():
        with device_of(key):
            _uniform_kernel[(triton.cdiv(out.numel(), BLOCK),)](key, name, out, size, out.numel(), BLOCK)
    return out
