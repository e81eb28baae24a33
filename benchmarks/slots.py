"""Slots by graph cuts against Slot Attention, side by side; and what the cut costs in a training step.

    python benchmarks/slots.py                  # the CPU
    python benchmarks/slots.py --device cuda    # a GPU: bf16 autocast, compiled and not

At the paper's size: features of 64 maps on a 64 x 64 grid, 12 slots of 64, batch 64. Times are of forward and backward,
the least of several medians, the modules taking turns.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

from cutslots.cut import GridCut
from cutslots.devices import keep_memory
from cutslots.model import Discovery, channels_last
from cutslots.presets import PRESETS
from cutslots.slots import CutSlots, SlotAttention, SoftmaxSlots


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--no-step", action="store_true", help="leave the whole training step out")
    args = parser.parse_args()
    keep_memory()
    name = torch.cuda.get_device_name() if args.device == "cuda" else f"{torch.get_num_threads()} CPU threads"
    print(f"{name}, torch {torch.__version__}, batch {args.batch}\n")
    modules(args.device, args.batch)
    if not args.no_step:
        step(args.device, args.batch if args.device == "cuda" else 2)


def modules(device: str, batch: int) -> None:
    kinds = {"CutSlots": CutSlots, "SoftmaxSlots": SoftmaxSlots, "SlotAttention": SlotAttention}
    x = torch.randn(batch, 64, 64, 64, device=device).contiguous(memory_format=torch.channels_last).requires_grad_()
    made = {name: kind(64, 12, (64, 64)).to(device) for name, kind in kinds.items()}
    runs: dict[str, Callable[[], object]] = {name: work(module, x, device) for name, module in made.items()}
    if device == "cuda":
        runs |= {f"{n}, compiled": work(torch.compile(m), x, device) for n, m in made.items()}  # type: ignore[arg-type]
    times = clock(runs, device)
    print("| slots | forward + backward ms | of SlotAttention |\n|---|---|---|")
    for name, ms in times.items():
        base = times["SlotAttention, compiled" if "compiled" in name else "SlotAttention"]
        print(f"| {name} | {ms:.2f} | {ms / base:.2f} |", flush=True)


def work(module: nn.Module, x: torch.Tensor, device: str) -> Callable[[], object]:
    def both() -> None:
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            slots, masks = module(x)
        (slots.float().square().mean() + masks.float().square().mean()).backward()

    return both


def step(device: str, batch: int) -> None:
    """The cuts of a step of the clevr preset, forward and backward, against the whole step."""
    config = PRESETS["clevr"].model
    model = channels_last(Discovery(config).to(device))
    optimizer = torch.optim.Adam(model.parameters(), 4e-4, fused=True)
    run = torch.compile(model) if device == "cuda" else model
    image = torch.rand(batch, 3, config.size, config.size, device=device)

    def whole() -> None:
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss = (run(image).reconstruction - image).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    side = config.size // 2
    cut = GridCut((side, side), config.gamma).to(device)
    w = torch.randn(batch, config.slots + 1, 6, side, side, device=device, requires_grad=True)
    times = clock({"step": whole, "cut": lambda: cut(w).sum().backward()}, device, rounds=3)
    rate = 1000 * batch / times["step"]
    print(
        f"\nclevr preset: {times['step']:.1f} ms a step, {rate:.0f} images a second; the cuts alone, called eagerly, "
    )
    print(f"{times['cut']:.3f} ms: {100 * times['cut'] / times['step']:.1f} % of the step")


def clock(runs: dict[str, Callable[[], object]], device: str, rounds: int = 5) -> dict[str, float]:
    """Milliseconds of each, which take turns: the least of `rounds` medians."""
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    repeats = 10 if device == "cuda" else 3
    best = dict.fromkeys(runs, float("inf"))
    for turn in range(rounds + 1):
        for name, run in runs.items():
            times = []
            for _ in range(repeats):
                wait()
                start = time.perf_counter()
                run()
                wait()
                times.append(1000 * (time.perf_counter() - start))
            if turn:  # the first turn warms up
                best[name] = min(best[name], statistics.median(times))
    return best


if __name__ == "__main__":
    main()
