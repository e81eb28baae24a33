"""How fast presets train, where the time of a step goes, and how much of the device's arithmetic it uses.

    python benchmarks/training.py                                # tiny on a CPU, every preset for images on a GPU
    python benchmarks/training.py --presets clevr --seconds 3    # one preset, in short

The step is that of cutslots/train.py: a batch of uint8 images held on the device, forward (bf16 autocast and
torch.compile on CUDA), squared error, backward, clipping, Adam; nothing is logged or judged. Its parts are timed alone,
forward and backward, compiled as the whole is, from inputs as they reach them in a step; step and parts take turns,
and times are medians over the rounds. The sum of the parts need not be the step: the compiler fuses across their
borders, a thread makes the next batch while the device works, and where the device waits for Python the parts wait too.

FLOPs are those of convolutions and matrix products as the model is defined, counted on the CPU; the same function by
another route (`cutslots.tail` on CUDA) counts the same. The peak is the best of a large matrix product in the same
precision (8192 x 8192 on CUDA, 2048 x 2048 on a CPU), which takes its turns with the step.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning_fabric import Fabric
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from cutslots.data import Images, hold, open_data
from cutslots.devices import make_fabric
from cutslots.model import Discovery, as_floats, build, channels_last
from cutslots.networks import BroadcastDecoder
from cutslots.presets import PRESETS, TrainConfig
from cutslots.slots import CutSlots
from cutslots.train import Batches, price, resolved

ROUNDS = 7  # measurements of each time; at least 3 where a call is long
BATCHES = 2  # held on the device, to draw batches from
PEAK_SIDE = {"cpu": 2048, "cuda": 8192}  # of the matrices whose product is the peak
IMAGES = [name for name, config in PRESETS.items() if config.model.frames == 1]

Call = Callable[[], object]
Times = dict[str, list[float]]  # seconds a call, by round


class Learner(NamedTuple):
    """A preset's model and optimiser as train.py makes them."""

    raw: Discovery
    model: Any  # compiled, and wrapped by Fabric
    optimizer: Any


# ------------------------------------------------------------------------------------------------------------ the step


def learner(config: TrainConfig, fabric: Fabric, lr: float) -> Learner:
    torch.manual_seed(config.seed)
    raw = channels_last(build(config.model)).to(fabric.device)
    optimizer = torch.optim.Adam(raw.parameters(), lr, fused=True)
    return Learner(raw, *fabric.setup(compiled(raw, config), optimizer))


def compiled(forward: Any, config: TrainConfig) -> Any:
    return torch.compile(forward) if config.compile == "on" else forward


def loss(config: TrainConfig, image: Tensor, reconstruction: Tensor, masks: Tensor) -> Tensor:
    error = (reconstruction - as_floats(image)).square().mean()
    return error + price(config, config.steps) * (1 - masks.select(-3, 0)).mean()


def update(config: TrainConfig, fabric: Fabric, model: Any, optimizer: Any) -> None:
    fabric.clip_gradients(model, optimizer, max_norm=config.clip or math.inf, error_if_nonfinite=False)
    optimizer.step()


def step(config: TrainConfig, fabric: Fabric, made: Learner, batches: Batches) -> None:
    image = next(batches)
    found = made.model(image)
    fabric.backward(loss(config, image, found.reconstruction, found.masks))
    update(config, fabric, made.model, made.optimizer)
    made.optimizer.zero_grad()


# ----------------------------------------------------------------------------------------------------------- its parts


def both_ways(
    fabric: Fabric, forward: Callable[..., Tensor], learned: Sequence[nn.Module], *inputs: Tensor
) -> tuple[Call, Tensor]:
    """What runs `forward` and its backward pass, to inputs and weights; and the result, for the part that follows."""
    inputs = tuple(x.detach().requires_grad_(x.is_floating_point()) for x in inputs)
    wanted = [x for x in inputs if x.requires_grad] + [p for module in learned for p in module.parameters()]
    with fabric.autocast():
        result = forward(*inputs).detach()
    gradient = torch.randn_like(result)

    def call() -> None:
        with fabric.autocast():
            y = forward(*inputs)
        torch.autograd.grad(y, wanted, gradient, allow_unused=True)

    return call, result


def parts(config: TrainConfig, fabric: Fabric, model: Discovery, images: Images) -> dict[str, Call]:
    """The parts of a step in the order in which it runs them."""
    order, counter = Batches(images, config, fabric, 0), itertools.count()
    calls: dict[str, Call] = {"data": lambda: images.render(order.numbers(next(counter)), fabric.device)}
    image = images.render(order.numbers(0), fabric.device).image

    def add(name: str, forward: Callable[..., Tensor], learned: Sequence[nn.Module], *inputs: Tensor) -> Tensor:
        calls[name], result = both_ways(fabric, forward, learned, *inputs)
        return result

    encode = compiled(lambda x: model.encoder(model._prepared(x)), config)
    features = add("encoder", encode, [model.encoder], image)
    if isinstance(module := model.slots, CutSlots):
        partition, position = module.partition, module.position
        weigh = compiled(lambda x: partition.weights(position(x)), config)
        w = add("weight network", weigh, [position, partition.net], features)
        masks = add("cut, softmax", compiled(partition._masks, config), [], w)
        with torch.no_grad(), fabric.autocast():
            positioned = position(features)
        slots = add("pooling", compiled(module.pooled, config), [module.streams], positioned, masks)
    else:
        slots = add("slot attention", compiled(lambda x: module(x).slots, config), [module], features)
    decode = compiled(model.decode, config)

    def redraw(slots: Tensor) -> Tensor:
        drawn = decode(slots)
        return loss(config, image, drawn["reconstruction"], drawn["masks"])

    add("decoder, mixing, loss", redraw, [model.decoder], slots)
    calls["clipping, Adam"] = updating(config, fabric)
    return calls


def updating(config: TrainConfig, fabric: Fabric) -> Call:
    """Of a model of its own, at a rate of zero: the same gradients again and again would lead anywhere."""
    raw, model, optimizer = learner(dataclasses.replace(config, compile="off"), fabric, lr=0.0)
    for parameter in raw.parameters():
        parameter.grad = torch.randn_like(parameter)
    return lambda: update(config, fabric, model, optimizer)


def tails(config: TrainConfig, fabric: Fabric, decoder: BroadcastDecoder, seconds: float) -> dict[str, float]:
    """The last layers of a BroadcastDecoder as layers and as its tail computes them, forward and backward, in turns:
    their milliseconds, the ratio, and how far their results differ."""
    numbers, tail = config.model, decoder.tail
    layers: Any = decoder.layers[-tail.length :]
    side, maps = numbers.size // 2, layers[0].in_channels
    x = torch.randn(config.batch * numbers.slots, maps, side, side, device=fabric.device, dtype=working_type(config))
    x = x.contiguous(memory_format=torch.channels_last)
    plain, one = both_ways(fabric, compiled(lambda x: layers(x), config), [layers], x)
    ours, other = both_ways(fabric, compiled(lambda x: tail.fast(x, layers), config), [layers], x)
    times = clock({"plain": plain, "ours": ours}, [seconds / 2] * 2, fabric)
    ratios = [a / b for a, b in zip(times["plain"], times["ours"], strict=True)]
    differ = (one.float() - other.float()).abs().max() / one.float().abs().max()
    return {
        "plain_ms": 1e3 * statistics.median(times["plain"]),
        "tail_ms": 1e3 * statistics.median(times["ours"]),
        "plain_over_tail": statistics.median(ratios),
        "least_ratio": min(ratios),
        "largest_ratio": max(ratios),
        "difference": float(differ),
    }


# ----------------------------------------------------------------------------------------------------------- measuring


def clock(runs: dict[str, Call], seconds: Sequence[float], fabric: Fabric) -> Times:
    """Seconds a call of each takes, by round; they take turns, each for about as many `seconds` in all as it is given.

    The device is waited for after the calls of a turn, not between them: training does not wait either."""

    def spent(run: Call, calls: int) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            run()
        if fabric.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    for run in runs.values():  # compiles, and lets cuDNN choose
        spent(run, 2)
    once = [spent(run, 1) for run in runs.values()]
    rounds = min(ROUNDS, max(3, int(sum(seconds) / sum(once))))
    calls = [max(1, round(given / rounds / each)) for given, each in zip(seconds, once, strict=True)]
    times: Times = {name: [] for name in runs}
    for _ in range(rounds):
        for (name, run), count in zip(runs.items(), calls, strict=True):
            times[name].append(spent(run, count) / count)
    return times


def flops(config: TrainConfig) -> int:
    """Of forward and backward for one image; on the CPU, where every layer is computed as it is written."""
    image = torch.zeros(1, 3, config.model.size, config.model.size)
    with FlopCounterMode(display=False) as counter:
        found = build(config.model)(image)
        loss(config, image, found.reconstruction, found.masks).backward()
    return counter.get_total_flops()


def product(config: TrainConfig, fabric: Fabric) -> tuple[Call, int]:
    """A large square matrix product, and its FLOPs."""
    n = PEAK_SIDE[fabric.device.type]
    a, b = (torch.randn(n, n, device=fabric.device, dtype=working_type(config)) for _ in range(2))
    return lambda: a @ b, 2 * n**3


def working_type(config: TrainConfig) -> torch.dtype:
    """What convolutions and products are computed in; float32 products may use TF32 (see devices.py)."""
    return torch.bfloat16 if config.precision == "bf16-mixed" else torch.float32


def measured(config: TrainConfig, fabric: Fabric, seconds: float) -> dict[str, Any]:
    """All about one preset."""
    data = open_data(config.data, "train", config.model.size, BATCHES * config.batch, masks=False)
    images = hold(data, fabric.device, quiet=True)
    made = learner(config, fabric, config.lr)
    batches = Batches(images, config, fabric, 0)
    multiply, product_flops = product(config, fabric)
    runs = {"product": multiply, **parts(config, fabric, made.raw, images)}
    with batches:
        whole: dict[str, Call] = {"step": lambda: step(config, fabric, made, batches)}
        times = clock(whole | runs, [seconds, *[seconds / len(runs)] * len(runs)], fabric)
    rates = [config.batch / each for each in times.pop("step")]
    peak = product_flops / min(times.pop("product"))
    rate, work = statistics.median(rates), flops(config)
    result: dict[str, Any] = {
        "batch": config.batch,
        "images_per_second": rate,
        "least": min(rates),
        "largest": max(rates),
        "step_ms": 1e3 * config.batch / rate,
        "parts_ms": {name: 1e3 * statistics.median(each) for name, each in times.items()},
        "gflop_per_image": work / 1e9,
        "tflops": work * rate / 1e12,
        "peak_tflops": peak / 1e12,
        "of_peak": work * rate / peak,
    }
    decoder = made.raw.decoder
    if isinstance(decoder, BroadcastDecoder) and decoder.tail.able and working_type(config) != torch.float32:
        result["tails"] = tails(config, fabric, decoder, seconds)
    return result


# ------------------------------------------------------------------------------------------------------------- telling


def table(*heads: str, rows: Sequence[Sequence[str]]) -> Table:
    made = Table(heads[0], box=box.MARKDOWN)
    for head in heads[1:]:
        made.add_column(head, justify="right")
    for row in rows:
        made.add_row(*row)
    return made


def tell(console: Console, name: str, result: dict[str, Any]) -> None:
    each: dict[str, float] = result["parts_ms"]
    total, whole = sum(each.values()), result["step_ms"]
    rows = [(part, f"{ms:.3f}", f"{ms / total:.1%}") for part, ms in each.items()]
    rows += [("sum of the parts", f"{total:.3f}", "100.0%"), ("the whole step", f"{whole:.3f}", f"{whole / total:.1%}")]
    rate, least, largest = (a_second(result[key]) for key in ("images_per_second", "least", "largest"))
    console.print(f"\n{name}, batch {result['batch']}: {rate} images a second ({least} to {largest})")
    console.print(table("part", "ms", "of the sum", rows=rows))
    if "tails" in result:
        told = "plain layers {plain_ms:.3f} ms, Tail {tail_ms:.3f} ms, {plain_over_tail:.2f} times as fast "
        told += "({least_ratio:.2f} to {largest_ratio:.2f}), results {difference:.0e} apart"
        console.print("tail of the decoder: " + told.format(**result["tails"]))


def a_second(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def summary(results: dict[str, dict[str, Any]]) -> Table:
    heads = ("preset", "batch", "images a second", "ms a step", "GFLOP an image", "TFLOP/s", "peak TFLOP/s", "of peak")
    rows = []
    for name, result in results.items():
        rate = a_second(result["images_per_second"])
        work = f"{result['gflop_per_image']:.2f}", f"{result['tflops']:.3g}", f"{result['peak_tflops']:.3g}"
        rows.append((name, str(result["batch"]), rate, f"{result['step_ms']:.1f}", *work, f"{result['of_peak']:.1%}"))
    return table(*heads, rows=rows)


def circumstances(config: TrainConfig, cuda: bool) -> dict[str, Any]:
    return {
        "date": time.strftime("%d %B %Y"),
        "device": torch.cuda.get_device_name() if cuda else f"{torch.get_num_threads()} CPU threads",
        "load": f"load {os.getloadavg()[0]:.1f} before",
        "torch": f"torch {torch.__version__}",
        "precision": config.precision,
        "compile": "compiled" if config.compile == "on" else "not compiled",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--presets", nargs="+", choices=IMAGES, help="default tiny, or all for images on CUDA")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--compile", default="auto", choices=("auto", "on", "off"), help="auto: on for CUDA")
    parser.add_argument("--seconds", type=float, default=10.0, help="for the step, as many for its parts together")
    parser.add_argument("--batch", type=int, help="default: the preset's")
    parser.add_argument("--json", type=Path, help="write all of it here")
    args = parser.parse_args()
    fabric, console = make_fabric(args.device), Console(width=140, highlight=False)
    cuda = fabric.device.type == "cuda"
    configs = {
        name: resolved(dataclasses.replace(PRESETS[name], accelerator=args.device, compile=args.compile))
        for name in args.presets or (IMAGES if cuda else ["tiny"])
    }
    facts = circumstances(next(iter(configs.values())), cuda)
    console.print(", ".join(facts.values()))
    results: dict[str, dict[str, Any]] = {}
    for name, config in configs.items():
        torch.compiler.reset()  # else shapes that differ from the last preset's are compiled as unknown
        config = dataclasses.replace(config, batch=args.batch or config.batch)
        results[name] = measured(config, fabric, args.seconds)
        tell(console, name, results[name])
        if args.json:
            args.json.write_text(json.dumps({**facts, "presets": results}, indent=1))
    console.print()
    console.print(summary(results))


if __name__ == "__main__":
    main()
