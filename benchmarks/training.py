"""Measure how fast presets train, where the time of a step goes, and the share of the device's peak that it uses.

    python benchmarks/training.py                                # tiny on a CPU, every preset for images on a GPU
    python benchmarks/training.py --presets clevr --seconds 3    # one preset, a short measurement
    python benchmarks/training.py --json steps.json --figure docs/img/step_time.png

The step is that of cutslots/training/step.py: a batch of uint8 images in device memory, forward (bf16 autocast and
torch.compile on CUDA), squared error, backward, clipping, Adam. Nothing is logged or evaluated. On CUDA it is replayed
as a CUDA graph, and in turns run without one. Its parts are timed alone, forward and backward, compiled as the whole
step is, from the inputs that they have in a step, on CUDA as graphs too. Steps and parts take turns; times are medians
over rounds. The sum of the parts differs from the step: the compiler fuses across parts, and a thread prepares the next
batch while the device works.

FLOPs are those of convolutions and matrix products as the model defines them, counted on the CPU. `FusedDecoderHead`
computes the same function in another way on CUDA and counts the same. The peak is the best of a large matrix product in
the same precision (8192 x 8192 on CUDA, 2048 x 2048 on a CPU), which takes turns with the step.
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
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning_fabric import Fabric
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from cutslots.data.memory import load_to_memory
from cutslots.data.open import open_dataset
from cutslots.dataset import Dataset
from cutslots.devices import make_fabric
from cutslots.models.discovery import Discovery, build, channels_last, to_float
from cutslots.modules.decoders import SpatialBroadcastDecoder
from cutslots.modules.partition import EdgeNetPartition
from cutslots.modules.slots import CutSlots
from cutslots.training.config import TrainConfig
from cutslots.training.loader import TrainLoader
from cutslots.training.loop import parameter_groups, resolve
from cutslots.training.losses import LOSSES
from cutslots.training.presets import PRESETS
from cutslots.training.step import NUM_WARMUP_STEPS, TrainStep, make_step

NUM_ROUNDS = 7  # measurements of each time; at least 3 where a call is long
NUM_BATCHES = 2  # in device memory, to sample batches from
PEAK_SIZE = {"cpu": 2048, "cuda": 8192}  # of the matrices whose product gives the peak
IMAGE_PRESETS = [name for name, config in PRESETS.items() if config.model.frames == 1]

Call = Callable[[], object]
Times = dict[str, list[float]]  # seconds a call, by round


class Learner(NamedTuple):
    """The model of a preset and its step, as the training loop makes them."""

    raw: Discovery
    model: Any  # compiled, and wrapped by Fabric
    optimizer: Any
    step: TrainStep


# ------------------------------------------------------------------------------------------------------------ the step


def learner(config: TrainConfig, fabric: Fabric, lr: float) -> Learner:
    torch.manual_seed(config.seed)
    raw = channels_last(build(config.model)).to(fabric.device)
    optimizer = torch.optim.Adam(parameter_groups(raw), lr, fused=True)
    model, optimizer = fabric.setup(compiled(raw, config), optimizer)
    loss_of = LOSSES.build(config.loss)
    return Learner(raw, model, optimizer, make_step(config, fabric, model, optimizer, loss_of, nullcontext))


def compiled(forward: Any, config: TrainConfig) -> Any:
    return torch.compile(forward) if config.compile == "on" else forward


def loss(config: TrainConfig, image: Tensor, reconstruction: Tensor, masks: Tensor) -> Tensor:
    """Return the loss at the end of training, when the blur has decayed and the foreground penalty is full."""
    error = (reconstruction - to_float(image)).square().mean()
    return error + LOSSES.build(config.loss).penalty_at(config.max_steps) * (1 - masks.select(-3, 0)).mean()


def update(config: TrainConfig, fabric: Fabric, model: Any, optimizer: Any) -> None:
    fabric.clip_gradients(model, optimizer, max_norm=config.grad_clip or math.inf, error_if_nonfinite=False)
    optimizer.step()


def step_calls(config: TrainConfig, fabric: Fabric, images: Dataset) -> tuple[Discovery, dict[str, Call]]:
    """Return the model, and a call of its step on the next batch; on CUDA also one without a graph."""
    order, counter = TrainLoader(images, config, fabric, 0), itertools.count()

    def call(step: TrainStep) -> None:
        image = images.get_batch(order.indices(next(counter)), fabric.device).image
        step(image, config.max_steps - 1)  # the blur has decayed and the foreground penalty is full

    trained = learner(config, fabric, config.lr)
    calls: dict[str, Call] = {"step": lambda: call(trained.step)}
    if fabric.device.type == "cuda":
        other = learner(dataclasses.replace(config, cuda_graphs="off"), fabric, config.lr)
        calls["without a graph"] = lambda: call(other.step)
    return trained.raw, calls


# ----------------------------------------------------------------------------------------------------------- its parts


def forward_backward(
    fabric: Fabric, forward: Callable[..., Tensor], modules: Sequence[nn.Module], *inputs: Tensor
) -> tuple[Call, Tensor]:
    """Return a call of `forward` and its backward pass to inputs and weights, and the result for the next part."""
    inputs = tuple(x.detach().requires_grad_(x.is_floating_point()) for x in inputs)
    wanted = [x for x in inputs if x.requires_grad] + [p for module in modules for p in module.parameters()]
    with fabric.autocast():
        result = forward(*inputs).detach()
    gradient = torch.randn_like(result)

    def call() -> None:
        with fabric.autocast():
            y = forward(*inputs)
        torch.autograd.grad(y, wanted, gradient, allow_unused=True)

    return captured(call, fabric), result


def captured(call: Call, fabric: Fabric) -> Call:
    """Return the call as a CUDA graph, so that its time is the device's; on a CPU the call itself."""
    if fabric.device.type != "cuda":
        return call
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        for _ in range(3):  # compiles, lets cuDNN choose algorithms and allocates memory
            call()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        call()

    def replay(_inputs: Call = call) -> None:  # the graph reads tensors that the call holds
        graph.replay()

    return replay


def parts(config: TrainConfig, fabric: Fabric, model: Discovery, images: Dataset) -> dict[str, Call]:
    """Return a call of each part of a step, in order."""
    order, counter = TrainLoader(images, config, fabric, 0), itertools.count()
    calls: dict[str, Call] = {"data": lambda: images.get_batch(order.indices(next(counter)), fabric.device)}
    image = images.get_batch(order.indices(0), fabric.device).image

    def add(name: str, forward: Callable[..., Tensor], modules: Sequence[nn.Module], *inputs: Tensor) -> Tensor:
        calls[name], result = forward_backward(fabric, forward, modules, *inputs)
        return result

    encode = compiled(lambda x: model.encoder(model.normalize(x)), config)
    features = add("encoder", encode, [model.encoder], image)
    module = model.slots
    if isinstance(module, CutSlots) and isinstance(module.partition, EdgeNetPartition):
        partition, position = module.partition, module.position
        edge_weights = compiled(lambda x: partition.edge_weights(position(x)), config)
        w = add("edge net", edge_weights, [position, partition.edge_net], features)
        masks = add("cut, softmax", compiled(partition._masks, config), [], w)
        with torch.no_grad(), fabric.autocast():
            positioned = position(features)
        pooling = [module.pixel_mlp, module.projection, module.slot_mlp]
        slots = add("pooling", compiled(module.pooled, config), pooling, positioned, masks)
    else:
        slots = add("slot module", compiled(lambda x: module(x).slots, config), [module], features)
    decode = compiled(model.decode, config)

    def reconstruction_loss(slots: Tensor) -> Tensor:
        decoded = decode(slots)
        return loss(config, image, decoded.reconstruction, decoded.masks)

    add("decoder, mixing, loss", reconstruction_loss, [model.decoder], slots)
    calls["clipping, Adam"] = update_call(config, fabric)
    return calls


def update_call(config: TrainConfig, fabric: Fabric) -> Call:
    """Return a call of `update` on another model, at learning rate zero: repeated gradients would ruin the weights."""
    raw, model, optimizer, _ = learner(dataclasses.replace(config, compile="off"), fabric, lr=0.0)
    for parameter in raw.parameters():
        parameter.grad = torch.randn_like(parameter)
    return captured(lambda: update(config, fabric, model, optimizer), fabric)


def decoder_heads(
    config: TrainConfig, fabric: Fabric, decoder: SpatialBroadcastDecoder, seconds: float
) -> dict[str, float]:
    """Compare the last layers of a decoder, layer by layer and fused, forward and backward, in turns."""
    head = decoder.head
    layers: Any = decoder.layers[-head.length :]
    (height, width), channels = (side // 2 for side in config.model.image_size), layers[0].in_channels
    shape = config.batch_size * config.model.slots.num_slots, channels, height, width
    x = torch.randn(shape, device=fabric.device, dtype=compute_dtype(config))
    x = x.contiguous(memory_format=torch.channels_last)
    plain, plain_result = forward_backward(fabric, compiled(lambda x: layers(x), config), [layers], x)
    fused, fused_result = forward_backward(
        fabric, compiled(lambda x: head.forward_fused(x, layers), config), [layers], x
    )
    times = measure_times({"plain": plain, "fused": fused}, [seconds / 2] * 2, fabric)
    ratios = [a / b for a, b in zip(times["plain"], times["fused"], strict=True)]
    difference = (plain_result.float() - fused_result.float()).abs().max() / plain_result.float().abs().max()
    return {
        "plain_ms": 1e3 * statistics.median(times["plain"]),
        "fused_ms": 1e3 * statistics.median(times["fused"]),
        "speedup": statistics.median(ratios),
        "min_speedup": min(ratios),
        "max_speedup": max(ratios),
        "difference": float(difference),
    }


# ----------------------------------------------------------------------------------------------------------- measuring


def measure_times(runs: dict[str, Call], seconds: Sequence[float], fabric: Fabric) -> Times:
    """Return the seconds per call of each function, by round. They take turns, for about `seconds` each in total.

    The device is synchronised after the calls of a turn, not between them: training does not synchronise either.
    """

    def elapsed(run: Call, calls: int) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            run()
        if fabric.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    for run in runs.values():  # compiles, lets cuDNN choose algorithms and captures graphs
        elapsed(run, NUM_WARMUP_STEPS + 2)
    once = [elapsed(run, 1) for run in runs.values()]
    rounds = min(NUM_ROUNDS, max(3, int(sum(seconds) / sum(once))))
    calls = [max(1, round(given / rounds / each)) for given, each in zip(seconds, once, strict=True)]
    times: Times = {name: [] for name in runs}
    for _ in range(rounds):
        for (name, run), count in zip(runs.items(), calls, strict=True):
            times[name].append(elapsed(run, count) / count)
    return times


def flops(config: TrainConfig) -> int:
    """Return the FLOPs of forward and backward for one image, on the CPU, where no layer is fused."""
    image = torch.zeros(1, 3, *config.model.image_size)
    with FlopCounterMode(display=False) as counter:
        output = build(config.model)(image)
        loss(config, image, output.reconstruction, output.masks).backward()
    return counter.get_total_flops()


def matrix_product(config: TrainConfig, fabric: Fabric) -> tuple[Call, int]:
    """Return a call of a large square matrix product, and its FLOPs."""
    n = PEAK_SIZE[fabric.device.type]
    a, b = (torch.randn(n, n, device=fabric.device, dtype=compute_dtype(config)) for _ in range(2))
    return lambda: a @ b, 2 * n**3


def compute_dtype(config: TrainConfig) -> torch.dtype:
    """Return the dtype of convolutions and products; float32 products may use TF32 (see devices.py)."""
    return torch.bfloat16 if config.precision == "bf16-mixed" else torch.float32


def measure(config: TrainConfig, fabric: Fabric, seconds: float) -> dict[str, Any]:
    """Return all measurements of one preset."""
    count = NUM_BATCHES * config.batch_size
    data = open_dataset(config.data, "train", config.model.image_size, count, masks=False)
    images = load_to_memory(data, fabric.device, quiet=True)
    model, steps = step_calls(config, fabric, images)
    multiply, product_flops = matrix_product(config, fabric)
    runs = {"product": multiply, **parts(config, fabric, model, images)}
    limits = [seconds / len(steps)] * len(steps) + [seconds / len(runs)] * len(runs)
    times = measure_times(steps | runs, limits, fabric)
    rates = [config.batch_size / each for each in times.pop("step")]
    without = times.pop("without a graph", None)
    peak = product_flops / min(times.pop("product"))
    rate, work = statistics.median(rates), flops(config)
    result: dict[str, Any] = {
        "batch_size": config.batch_size,
        "images_per_second": rate,
        "min_images_per_second": min(rates),
        "max_images_per_second": max(rates),
        "step_ms": 1e3 * config.batch_size / rate,
        "without_graph": config.batch_size / statistics.median(without) if without else None,
        "parts_ms": {name: 1e3 * statistics.median(each) for name, each in times.items()},
        "gflop_per_image": work / 1e9,
        "tflops": work * rate / 1e12,
        "peak_tflops": peak / 1e12,
        "of_peak": work * rate / peak,
    }
    decoder, is_half = model.decoder, compute_dtype(config) != torch.float32
    if isinstance(decoder, SpatialBroadcastDecoder) and decoder.head.has_kernels and is_half:
        result["decoder_head"] = decoder_heads(config, fabric, decoder, seconds)
    return result


# ------------------------------------------------------------------------------------------------------------- output


def table(*heads: str, rows: Sequence[Sequence[str]]) -> Table:
    result = Table(heads[0], box=box.MARKDOWN)
    for head in heads[1:]:
        result.add_column(head, justify="right")
    for row in rows:
        result.add_row(*row)
    return result


def print_result(console: Console, name: str, result: dict[str, Any]) -> None:
    each: dict[str, float] = result["parts_ms"]
    total, whole = sum(each.values()), result["step_ms"]
    rows = [(part, f"{ms:.3f}", f"{ms / total:.1%}") for part, ms in each.items()]
    rows += [("sum of the parts", f"{total:.3f}", "100.0%"), ("the whole step", f"{whole:.3f}", f"{whole / total:.1%}")]
    rate, low, high = (format_rate(result[f"{prefix}images_per_second"]) for prefix in ("", "min_", "max_"))
    console.print(f"\n{name}, batch size {result['batch_size']}: {rate} images/s ({low} to {high})")
    console.print(table("part", "ms", "of the sum", rows=rows))
    if "decoder_head" in result:
        text = "layer by layer {plain_ms:.3f} ms, fused {fused_ms:.3f} ms, {speedup:.2f} times as fast "
        text += "({min_speedup:.2f} to {max_speedup:.2f}), relative difference {difference:.0e}"
        console.print("decoder head: " + text.format(**result["decoder_head"]))


def format_rate(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def summary(results: dict[str, dict[str, Any]]) -> Table:
    heads = (
        "preset",
        "batch size",
        "images/s",
        "without a graph",
        "ratio",
        "ms/step",
        "GFLOP/image",
        "TFLOP/s",
        "peak TFLOP/s",
        "of peak",
    )
    rows = []
    for name, result in results.items():
        rate = format_rate(result["images_per_second"])
        work = f"{result['gflop_per_image']:.2f}", f"{result['tflops']:.3g}", f"{result['peak_tflops']:.3g}"
        other = result["without_graph"]
        compared = (format_rate(other), f"{result['images_per_second'] / other:.2f}") if other else ("", "")
        speed = rate, *compared, f"{result['step_ms']:.1f}"
        rows.append((name, str(result["batch_size"]), *speed, *work, f"{result['of_peak']:.1%}"))
    return table(*heads, rows=rows)


def draw(path: Path, results: dict[str, dict[str, Any]], facts: dict[str, Any]) -> None:
    """Draw a bar for each preset: the parts of its step."""
    import matplotlib.pyplot as plt

    names = list(dict.fromkeys(part for result in results.values() for part in result["parts_ms"]))
    figure, axes = plt.subplots(figsize=(8, 1.2 + 0.6 * len(results)), layout="constrained")
    colors = {name: f"C{i}" for i, name in enumerate(names)}
    for row, result in enumerate(results.values()):
        start = 0.0
        for name, ms in result["parts_ms"].items():
            axes.barh(row, ms, left=start, color=colors[name], label=name, height=0.7)
            start += ms
        rate = format_rate(result["images_per_second"])
        axes.text(start, row, f"  {rate} images/s", va="center", fontsize=9)
    axes.set_yticks(range(len(results)), results)
    axes.invert_yaxis()
    axes.margins(x=0.2)
    axes.set_xlabel(f"ms of the device, parts one after the other ({facts['device']}, {facts['date']})")
    handles = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    figure.legend(handles.values(), handles.keys(), loc="outside upper center", ncols=4, frameon=False, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=140)


def conditions(config: TrainConfig, cuda: bool) -> dict[str, Any]:
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
    parser.add_argument("--presets", nargs="+", choices=IMAGE_PRESETS, help="default tiny, or all for images on CUDA")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--compile", default="auto", choices=("auto", "on", "off"), help="auto: on for CUDA")
    parser.add_argument("--seconds", type=float, default=10.0, help="for the step, and as many for its parts together")
    parser.add_argument("--batch-size", type=int, help="default: the preset's")
    parser.add_argument("--json", type=Path, help="write all measurements to this file")
    parser.add_argument("--figure", type=Path, help="draw where the time of a step goes")
    args = parser.parse_args()
    fabric, console = make_fabric(args.device), Console(width=140, highlight=False)
    cuda = fabric.device.type == "cuda"
    configs = {
        name: resolve(dataclasses.replace(PRESETS[name], accelerator=args.device, compile=args.compile))
        for name in args.presets or (IMAGE_PRESETS if cuda else ["tiny"])
    }
    facts = conditions(next(iter(configs.values())), cuda)
    console.print(", ".join(facts.values()))
    results: dict[str, dict[str, Any]] = {}
    for name, config in configs.items():
        torch.compiler.reset()  # otherwise other shapes than those of the last preset are compiled as dynamic
        config = dataclasses.replace(config, batch_size=args.batch_size or config.batch_size)
        results[name] = measure(config, fabric, args.seconds)
        print_result(console, name, results[name])
        if args.json:
            args.json.write_text(json.dumps({**facts, "presets": results}, indent=1))
    console.print()
    console.print(summary(results))
    if args.figure:
        draw(args.figure, results, facts)


if __name__ == "__main__":
    main()
