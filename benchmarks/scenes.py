"""How fast built-in scenes are made, and whether two devices make the same ones.

    python benchmarks/scenes.py                  # the CPU: 64 x 64
    python benchmarks/scenes.py --device cuda    # a GPU: 128 x 128

`draw` decides what the scenes hold (always on the CPU), `render` makes the pictures, `both` is `Scenes.render`, which
overlaps the two. On CUDA the masks are compared with the CPU's, pixel by pixel.
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
    """The best of three after a warm-up; `work` is told which trial it is."""
    times = []
    for trial in range(4):
        start = time.perf_counter()
        work(trial)
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return min(times[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--size", type=int, help="default 64, or 128 on CUDA")
    parser.add_argument("--count", type=int, help="scenes at a time; default 48, or 1024 on CUDA")
    args = parser.parse_args()
    size, count = args.size or (64, 128)[args.device == "cuda"], args.count or (48, 1024)[args.device == "cuda"]
    name = torch.cuda.get_device_name() if args.device == "cuda" else f"{torch.get_num_threads()} CPU threads"
    print(f"{name}, {size} x {size}, five rays a pixel, {count} scenes at a time\n")
    print("| family | draw ms | render ms | both, images a second | mask pixels that differ from the CPU's |")
    print("|---|---|---|---|---|")
    for family in FAMILIES:
        print(row(Scenes(family, size=size), count, args.device), flush=True)


def row(scenes: Scenes, count: int, device: str) -> str:
    number = max(2, count // scenes.frames)
    images = number * scenes.frames
    world = scenes.world(np.arange(number))
    draw = seconds(lambda trial: scenes.world(np.arange(number) + trial * number), "cpu")
    made = seconds(lambda _: render(world, scenes.size, device), device)
    both = seconds(lambda trial: scenes.render(np.arange(number) + trial * number, device), device)
    differ = ""
    if device == "cuda":
        few = np.arange(16 // scenes.frames + 1)
        ours, theirs = (scenes.render(few, where).mask.cpu() for where in ("cpu", "cuda"))
        differ = f"{(ours != theirs).float().mean():.4%}"
    return (
        f"| {scenes.family} | {1e3 * draw / images:.2f} | {1e3 * made / images:.2f} | {images / both:.0f} | {differ} |"
    )


if __name__ == "__main__":
    main()
