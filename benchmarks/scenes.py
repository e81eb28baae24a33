"""Measure how fast built-in scenes are generated, and compare two devices.

    python benchmarks/scenes.py                  # the CPU: 64 x 64
    python benchmarks/scenes.py --device cuda    # a GPU: 128 x 128

`sample` decides what the scenes contain, always on the CPU. `render` renders the images. `get_batch` does both and
overlaps them on a GPU. On CUDA the masks are compared with the CPU's, pixel by pixel.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch

from cutslots.scenes import FAMILIES, Scenes
from cutslots.scenes.render import render


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--size", type=int, help="side of the images; default 64, or 128 on CUDA")
    parser.add_argument("--count", type=int, help="scenes at a time; default 48, or 1024 on CUDA")
    args = parser.parse_args()
    size, count = args.size or (64, 128)[args.device == "cuda"], args.count or (48, 1024)[args.device == "cuda"]
    name = torch.cuda.get_device_name() if args.device == "cuda" else f"{torch.get_num_threads()} CPU threads"
    print(f"{name}, {size} x {size}, five rays per pixel, {count} scenes at a time\n")
    print("| family | sample ms | render ms | get_batch, images/s | mask pixels that differ from the CPU |")
    print("|---|---|---|---|---|")
    for family in FAMILIES:
        print(row(Scenes(family, size=size), count, args.device), flush=True)


def row(scenes: Scenes, count: int, device: str) -> str:
    """Return the row of a family in the table."""
    batch = max(2, count // scenes.frames)
    images = batch * scenes.frames
    contents = scenes.sample(np.arange(batch))
    sample = seconds(lambda run: scenes.sample(np.arange(batch) + run * batch), "cpu")
    rendering = seconds(lambda _: render(contents, scenes.image_size, device), device)
    both = seconds(lambda run: scenes.get_batch(np.arange(batch) + run * batch, device), device)
    differ = ""
    if device == "cuda":
        indices = np.arange(16 // scenes.frames + 1)
        cpu, cuda = (scenes.get_batch(indices, name).mask.cpu() for name in ("cpu", "cuda"))
        differ = f"{(cpu != cuda).float().mean():.4%}"
    sample_ms, render_ms = 1e3 * sample / images, 1e3 * rendering / images
    return f"| {scenes.family} | {sample_ms:.2f} | {render_ms:.2f} | {images / both:.0f} | {differ} |"


if __name__ == "__main__":
    main()
