"""Measure slot modules side by side, and the share of the cuts in a training step.

    python benchmarks/slots.py                  # the CPU
    python benchmarks/slots.py --device cuda    # a GPU: bf16 autocast, compiled and not

The sizes are the paper's: 64 feature channels on a 64 x 64 grid, 12 slots of dimension 64, batch size 64. Times are of
forward and backward, the minimum of several medians. The modules take turns.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

from cutslots.devices import keep_memory
from cutslots.models.discovery import build, channels_last
from cutslots.modules.partition import CutPartitionConfig, SoftmaxPartitionConfig
from cutslots.modules.slot_attention import SlotAttention
from cutslots.modules.slots import CutSlots, CutSlotsConfig
from cutslots.programs.grid_cut import GridCut
from cutslots.training.presets import PRESETS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--no-step", action="store_true", help="do not measure the training step")
    args = parser.parse_args()
    keep_memory()
    name = torch.cuda.get_device_name() if args.device == "cuda" else f"{torch.get_num_threads()} CPU threads"
    print(f"{name}, torch {torch.__version__}, batch size {args.batch_size}\n")
    measure_modules(args.device, args.batch_size)
    if not args.no_step:
        measure_step(args.device, args.batch_size if args.device == "cuda" else 2)


def measure_modules(device: str, batch_size: int) -> None:
    """Print the times of the cut, the no-cut ablation and Slot Attention."""
    modules = {
        "CutSlots": CutSlots(64, 12, (64, 64)).to(device),
        "CutSlots, no-cut ablation (softmax)": CutSlots(64, 12, (64, 64), partition=SoftmaxPartitionConfig()).to(
            device
        ),
        "SlotAttention": SlotAttention(64, 12, (64, 64)).to(device),
    }
    x = (
        torch.randn(batch_size, 64, 64, 64, device=device)
        .contiguous(memory_format=torch.channels_last)
        .requires_grad_()
    )
    runs = {name: forward_backward(module, x, device) for name, module in modules.items()}
    if device == "cuda":
        for name, module in modules.items():
            runs[f"{name}, compiled"] = forward_backward(torch.compile(module), x, device)  # type: ignore[arg-type]
    times = measure_times(runs, device)
    print("| slots | forward + backward ms | of SlotAttention |\n|---|---|---|")
    for name, ms in times.items():
        base = times["SlotAttention, compiled" if "compiled" in name else "SlotAttention"]
        print(f"| {name} | {ms:.2f} | {ms / base:.2f} |", flush=True)


def forward_backward(module: nn.Module, x: torch.Tensor, device: str) -> Callable[[], object]:
    def call() -> None:
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            slots, masks = module(x)
        (slots.float().square().mean() + masks.float().square().mean()).backward()

    return call


def measure_step(device: str, batch_size: int) -> None:
    """Print the time of the cuts of a step of preset clevr, forward and backward, and of the whole step."""
    config = PRESETS["clevr"].model
    assert isinstance(config.slots, CutSlotsConfig) and isinstance(config.slots.partition, CutPartitionConfig)
    model = channels_last(build(config).to(device))
    optimizer = torch.optim.Adam(model.parameters(), 4e-4, fused=True)
    run = torch.compile(model) if device == "cuda" else model
    image = torch.rand(batch_size, 3, *config.image_size, device=device)

    def step() -> None:
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss = (run(image).reconstruction - image).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    size = config.image_size[0] // 2, config.image_size[1] // 2
    cut = GridCut(size, config.slots.partition.gamma).to(device)
    w = torch.randn(batch_size, config.slots.num_slots + 1, 6, *size, device=device, requires_grad=True)
    times = measure_times({"step": step, "cut": lambda: cut(w).sum().backward()}, device, rounds=3)
    rate = 1000 * batch_size / times["step"]
    print(f"\npreset clevr: {times['step']:.1f} ms/step, {rate:.0f} images/s")
    print(
        f"the cuts alone, in eager mode: {times['cut']:.3f} ms, {100 * times['cut'] / times['step']:.1f} % of the step"
    )


def measure_times(runs: dict[str, Callable[[], object]], device: str, rounds: int = 5) -> dict[str, float]:
    """Return the milliseconds of each function: the minimum of `rounds` medians. They take turns."""
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    repeats = 10 if device == "cuda" else 3
    best = dict.fromkeys(runs, float("inf"))
    for turn in range(rounds + 1):
        for name, run in runs.items():
            times = []
            for _ in range(repeats):
                synchronize()
                start = time.perf_counter()
                run()
                synchronize()
                times.append(1000 * (time.perf_counter() - start))
            if turn:  # the first turn warms up
                best[name] = min(best[name], statistics.median(times))
    return best


if __name__ == "__main__":
    main()
