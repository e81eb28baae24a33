"""Devices, precision and processes. Lightning Fabric runs them; it is slow to import, so only `make_fabric` does."""

from __future__ import annotations

import contextlib
import ctypes
import inspect
import os
import sys
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from lightning_fabric import Fabric


def resolve_device(device: torch.device | str = "auto") -> torch.device:
    """Return the device; "auto" is CUDA where it is available, else the CPU. Raise ValueError if it cannot be used."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, ImportError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"device is '{device}', which cannot be used here: {reason}") from None


def resolve_accelerator(accelerator: str, precision: str) -> tuple[str, str]:
    """Return the accelerator and the precision with "auto" replaced; raise ValueError if the accelerator is missing."""
    if accelerator == "cuda" and not torch.cuda.is_available():
        raise ValueError("accelerator is cuda; there is no CUDA device here")
    if accelerator == "mps" and not torch.backends.mps.is_available():
        raise ValueError("accelerator is mps; there is no such device here")
    if accelerator == "auto":
        accelerator = "cuda" if torch.cuda.is_available() else "cpu"
    if precision == "auto":
        precision = "bf16-mixed" if accelerator == "cuda" and torch.cuda.is_bf16_supported() else "32-true"
    return accelerator, precision


def make_fabric(accelerator: str = "auto", devices: int = 1, num_nodes: int = 1, precision: str = "auto") -> Fabric:
    """Return a launched Fabric. With several devices, every process returns from here on its own.

    torchrun's environment overrides `devices` and `num_nodes`. Under SLURM they must equal what the job asked for.
    """
    from lightning_fabric import Fabric
    from lightning_fabric.strategies import DDPStrategy

    if "TORCHELASTIC_RUN_ID" in os.environ:
        devices = int(os.environ["LOCAL_WORLD_SIZE"])
        num_nodes = int(os.environ["WORLD_SIZE"]) // devices
    if devices < 1 or num_nodes < 1:
        raise ValueError(f"devices is {devices} and num_nodes {num_nodes}; expected at least 1 of each")
    accelerator, precision = resolve_accelerator(accelerator, precision)
    distributed = devices * num_nodes > 1 or int(os.environ.get("WORLD_SIZE", 1)) > 1
    strategy = DDPStrategy(**_without_buffer_broadcast()) if distributed else "auto"
    fabric = Fabric(
        accelerator=accelerator,
        devices=devices,
        num_nodes=num_nodes,
        precision=precision,  # type: ignore[arg-type]
        strategy=strategy,
    )
    keep_memory()
    if accelerator == "cuda":
        # The fastest algorithm differs from run to run, and algorithms round differently.
        torch.backends.cudnn.benchmark = not torch.backends.cudnn.deterministic
        torch.set_float32_matmul_precision("high")
    fabric.launch()
    return fabric


def _without_buffer_broadcast() -> dict[str, Any]:
    """Return the argument of DistributedDataParallel that leaves buffers alone in forward; torch 2.13 renames it.

    Buffers are constants (cosines, grids) or statistics that SyncBatchNorm keeps equal, and processes evaluate at their
    own pace.
    """
    known = inspect.signature(torch.nn.parallel.DistributedDataParallel).parameters
    return {"forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers": False}


def keep_memory() -> None:
    """Make glibc keep freed memory for the next step.

    Otherwise every large tensor is returned to the system and faulted in again, a sixth of a training step on a CPU.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            libc = ctypes.CDLL("libc.so.6")
            libc.mallopt(-3, 1 << 30)  # M_MMAP_THRESHOLD
            libc.mallopt(-1, (1 << 31) - 1)  # M_TRIM_THRESHOLD
