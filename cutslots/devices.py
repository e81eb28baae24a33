"""Where the work runs: devices, precision and processes, by Lightning Fabric."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import warnings

import torch
from lightning_fabric import Fabric
from lightning_fabric.strategies import DDPStrategy


def settled(accelerator: str, precision: str) -> tuple[str, str]:
    """What "auto" means here, or a sentence on what is not here."""
    if accelerator == "cuda" and not torch.cuda.is_available():
        raise ValueError("accelerator is cuda; there is no CUDA device here")
    if accelerator == "mps" and not torch.backends.mps.is_available():
        raise ValueError("accelerator is mps; there is no such device here")
    if accelerator == "auto":
        accelerator = "cuda" if torch.cuda.is_available() else "cpu"
    if precision == "auto":
        precision = "bf16-mixed" if accelerator == "cuda" and torch.cuda.is_bf16_supported() else "32-true"
    return accelerator, precision


def make_fabric(accelerator: str = "auto", devices: int = 1, nodes: int = 1, precision: str = "auto") -> Fabric:
    """Launched: with several devices every process returns from here on its own. Under torchrun their number is taken
    from there; under SLURM `devices` and `nodes` must say what was asked of it."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        devices = int(os.environ["LOCAL_WORLD_SIZE"])
        nodes = int(os.environ["WORLD_SIZE"]) // devices
    if devices < 1 or nodes < 1:
        raise ValueError(f"devices is {devices} and nodes {nodes}; expected at least 1 of each")
    accelerator, precision = settled(accelerator, precision)
    several = devices * nodes > 1 or int(os.environ.get("WORLD_SIZE", 1)) > 1
    # Buffers are constants (cosines, grids) or in step by themselves (statistics of SyncBatchNorm), and evaluation runs
    # at every process's own pace.
    strategy = DDPStrategy(broadcast_buffers=False) if several else "auto"
    warnings.filterwarnings("ignore", message=".*broadcast_buffers")  # newer torch has another name for it
    fabric = Fabric(
        accelerator=accelerator,
        devices=devices,
        num_nodes=nodes,
        precision=precision,  # type: ignore[arg-type]
        strategy=strategy,
    )
    keep_memory()
    if accelerator == "cuda":
        torch.backends.cudnn.benchmark = True
        torch.set_float32_matmul_precision("high")
    fabric.launch()
    return fabric


def keep_memory() -> None:
    """Makes glibc keep freed memory for the next step: else every large tensor is handed back and faulted in again,
    which costs a sixth of a step on a CPU."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            libc = ctypes.CDLL("libc.so.6")
            libc.mallopt(-3, 1 << 30)  # M_MMAP_THRESHOLD
            libc.mallopt(-1, (1 << 31) - 1)  # M_TRIM_THRESHOLD
