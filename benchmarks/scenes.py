"""Measure how fast built-in scenes are generated, and compare two devices.

    python benchmarks/scenes.py                  # the CPU: 64 x 64
    python benchmarks/scenes.py --device cuda    # a GPU: 128 x 128, operations of torch and kernels
    python benchmarks/scenes.py --variation v1   # varied scenes

`sample` decides what the scenes contain. `render` renders the images. `get_batch` does both. On CUDA everything is
measured twice: with operations of torch, and with the Triton kernels. The masks of the kernels are compared with the
CPU's, pixel by pixel.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch

from cutslots.scenes import FAMILIES, Scenes, render, sample


class Speed(NamedTuple):
    """How fast scenes are generated, and the memory that it needs."""

    sample: float  # ms per image
    render: float  # ms per image
    get_batch: float  # images per second
    memory: float  # GiB on the GPU

    def __str__(self) -> str:
        return f"{self.sample:.3f} | {self.render:.3f} | {self.get_batch:.0f} | {self.memory:.2f}"


def seconds(work: Callable[[int], object], device: str) -> float:
    """Return the best time of three runs after a warm-up. `work` receives the index of the run."""
    times = []
    for run in range(4):
        start = time.perf_counter()
        work(run)
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return min(times[1:])


@contextlib.contextmanager
def torch_only() -> Iterator[None]:
    """Generate scenes without the Triton kernels."""
    kernels = render.kernels, sample.kernels
    render.kernels = sample.kernels = None  # type: ignore[assignment]
    try:
        yield
    finally:
        render.kernels, sample.kernels = kernels


def measure(scenes: Scenes, count: int, device: str) -> Speed:
    batch = max(2, count // scenes.frames)
    images = batch * scenes.frames
    contents = scenes._sample(np.arange(batch), torch.device(device))
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    sampling = seconds(lambda run: scenes._sample(np.arange(batch) + run * batch, torch.device(device)), device)
    rendering = seconds(lambda _: render.render(contents, scenes.image_size, device), device)
    both = seconds(lambda run: scenes.get_batch(np.arange(batch) + run * batch, device), device)
    memory = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else 0.0
    return Speed(1e3 * sampling / images, 1e3 * rendering / images, images / both, memory)


def compare_masks(scenes: Scenes) -> float:
    """Return the share of mask pixels that differ between CUDA and the CPU."""
    indices = np.arange(16 // scenes.frames + 1)
    cpu, cuda = (scenes.get_batch(indices, name).mask.cpu() for name in ("cpu", "cuda"))
    return (cpu != cuda).float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--size", type=int, help="side of the images; default 64, or 128 on CUDA")
    parser.add_argument("--count", type=int, help="scenes at a time; default 48, or 1024 on CUDA")
    parser.add_argument("--variation", default="none", choices=("none", "v1"))
    args = parser.parse_args()
    size, count = args.size or (64, 128)[args.device == "cuda"], args.count or (48, 1024)[args.device == "cuda"]
    name = torch.cuda.get_device_name() if args.device == "cuda" else f"{torch.get_num_threads()} CPU threads"
    print(f"{name}, {size} x {size}, variation {args.variation}, five rays per pixel, {count} scenes at a time\n")
    print("| family | by | sample ms | render ms | get_batch, images/s | GiB | ratio | mask pixels that differ |")
    print("|---|---|---|---|---|---|---|---|")
    for family in FAMILIES:
        for line in rows(Scenes(family, size=size, variation=args.variation), count, args.device):
            print(line, flush=True)


def rows(scenes: Scenes, count: int, device: str) -> Iterator[str]:
    """Yield the rows of a family in the table. The ratio is that of get_batch."""
    with torch_only():
        before = measure(scenes, count, device)
    yield f"| {scenes.family} | torch | {before} | | |"
    if device == "cuda" and render.kernels is not None:
        after = measure(scenes, count, device)
        ratio = after.get_batch / before.get_batch
        yield f"| {scenes.family} | kernels | {after} | {ratio:.1f} | {compare_masks(scenes):.4%} |"


if __name__ == "__main__":
    main()
