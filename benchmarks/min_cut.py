"""Measure the time of a batch of minimum cuts by several methods, side by side in one run.

    python benchmarks/min_cut.py                    # the CPU, sides 16 to 1024, batches of 1, 8 and 64
    python benchmarks/min_cut.py --device cuda      # a GPU, up to 768 grids

The task: grids of noisy blobs (batch, 6, side, side) with random directed capacities of mean 1/2, to the solution p or,
where a method has no p, to the cut. Every method is measured with what a user calls, so PyMaxflow and scipy include
building their graph. The gap is that of MinCut, relative to the value. Where a method returns a cut, the column
`excess` says how much more than the minimum it costs. Maximum flows and the conjugate gradients have no gradient of the
capacities or solve another problem: the screened Poisson system (I + B'CB) p = f, whose cut is no minimum cut.

PyMaxflow and prox_tv are measured if they are installed: pip install PyMaxflow prox_tv (which needs LAPACKE's headers,
as in Debian's liblapacke-dev). prox_tv takes equal capacities in both directions, so it solves a problem with their
means. Its gap is that of its value to the value of MinCut at a gap of 1e-7. It runs its default of 35 iterations, as
torch-submod calls it for the forward pass.
"""

from __future__ import annotations

import argparse
import contextlib
import platform
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy import ndimage

from cutslots import Graph, MinCut, exact
from cutslots.programs import native
from cutslots.programs.graph import grid_edges

SIDES, BATCHES = (16, 32, 64, 128, 256, 512, 1024), {"cpu": (1, 8, 64), "cuda": (1, 16, 768)}
MAX_PIXELS = {"cpu": 8 * 1024**2, "cuda": 16 * 1024**2}  # of a batch
TOLERANCES = (1e-3, 1e-5)
LIMIT_S = 60.0  # a method that needs longer is left out of larger problems


class Measured(NamedTuple):
    forward: float  # seconds for a batch
    both: float | None
    cut: torch.Tensor | None  # (batch, side, side)
    gap: float | None


Method = Callable[[torch.Tensor, int], Measured]  # of w and a number of repetitions


class Unavailable(Exception):
    """Raised with the reason why a method cannot be measured here."""


def problems(batch: int, side: int) -> torch.Tensor:
    """Return weights (batch, 6, side, side): blobs in noise as unaries, random capacities."""
    generator = np.random.default_rng(0)
    f = np.stack([ndimage.gaussian_filter(generator.standard_normal((side, side)), 3) for _ in range(min(batch, 16))])
    f = np.resize(f / f.std(), (batch, side, side)) + 0.5 * generator.standard_normal((batch, side, side))
    capacities = generator.random((batch, 4, side, side))
    return torch.as_tensor(
        np.concatenate([capacities, np.maximum(f, 0)[:, None], np.maximum(-f, 0)[:, None]], 1)
    ).float()


def seconds(run: Callable[[], Any], repetitions: int, device: str = "cpu") -> float:
    """Return the least time of several calls, after one to warm up."""
    times = []
    for _ in range(repetitions + 1):
        start = time.perf_counter()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return min(times[1:]) if repetitions else times[0]


# ------------------------------------------------------------------------------------------------------------ methods


def min_cut(tolerance: float, compiled: bool = True) -> Method:
    def measure(w: torch.Tensor, repetitions: int) -> Measured:
        if not compiled:
            on_cpu(w)
        layer, device = MinCut(w.shape[2:], tolerance=tolerance, max_iterations=10_000).to(w.device), w.device.type
        leaf = w.clone().requires_grad_()

        def both() -> None:
            p = layer(leaf)
            torch.autograd.grad(p, leaf, p.detach())

        with contextlib.nullcontext() if compiled else native.disabled():
            with torch.no_grad():
                forward = seconds(lambda: layer(w), repetitions, device)
            found = layer.solve(w)
            return Measured(forward, seconds(both, repetitions, device), found.cut, float(found.gap.max()))

    return measure


def scipy_maximum_flow(w: torch.Tensor, repetitions: int) -> Measured:
    on_cpu(w)
    graph, edges = Graph.grid(w.shape[2:]), w[:, torch.as_tensor(grid_edges(tuple(w.shape[2:])))].double().numpy()

    def run() -> list[np.ndarray]:
        return [exact.min_cut(graph, each).side[:-2] for each in edges]

    return Measured(seconds(run, repetitions), None, torch.as_tensor(np.stack(run())).view(-1, *w.shape[2:]), None)


def pymaxflow(w: torch.Tensor, repetitions: int) -> Measured:
    on_cpu(w)
    try:
        import maxflow  # type: ignore[import-not-found]
    except ImportError:
        raise Unavailable("PyMaxflow is not installed") from None
    directions = {0: (1, 2), 1: (1, 0), 2: (2, 1), 3: (0, 1)}  # of a 3 x 3 neighbourhood, by channel
    structures = {channel: np.zeros((3, 3)) for channel in directions}
    for channel, place in directions.items():
        structures[channel][place] = 1
    arrays = w.double().numpy()

    def one(x: np.ndarray) -> np.ndarray:
        graph = maxflow.Graph[float](x[0].size, 4 * x[0].size)
        nodes = graph.add_grid_nodes(x.shape[1:])
        for channel, structure in structures.items():
            graph.add_grid_edges(nodes, x[channel], structure)
        graph.add_grid_tedges(nodes, x[4], x[5])
        graph.maxflow()
        return ~graph.get_grid_segments(nodes)

    def run() -> list[np.ndarray]:
        return [one(x) for x in arrays]

    return Measured(seconds(run, repetitions), None, torch.as_tensor(np.stack(run())), None)


def prox_tv(w: torch.Tensor, repetitions: int) -> Measured:
    on_cpu(w)
    try:
        import prox_tv as tv  # type: ignore[import-not-found]
    except ImportError:
        raise Unavailable("prox_tv is not installed") from None
    w, threads = equal_capacities(w), torch.get_num_threads()
    x, best = w.numpy(), tv_values(w, MinCut(w.shape[2:], tolerance=1e-7, max_iterations=100_000).double()(w))

    def run() -> list[np.ndarray]:
        return [tv.tv1w_2d(each[4] - each[5], each[2, :-1], each[0, :, :-1], n_threads=threads) for each in x]

    gap = float((tv_values(w, torch.as_tensor(np.stack(run()))) / best - 1).max())
    return Measured(seconds(run, repetitions), None, None, gap)


def equal_capacities(w: torch.Tensor) -> torch.Tensor:
    """Return weights in float64 with the mean capacity of both directions in each."""
    w = w.double()
    right, down = (w[:, 0, :, :-1] + w[:, 1, :, 1:]) / 2, (w[:, 2, :-1] + w[:, 3, 1:]) / 2
    w[:, 0, :, :-1], w[:, 1, :, 1:], w[:, 2, :-1], w[:, 3, 1:] = right, right, down, down
    return w


def tv_values(w: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """Return the value of the problem that prox_tv and MinCut solve, at p."""
    horizontal, vertical = w[:, 0, :, :-1] * p.diff(dim=2).abs(), w[:, 2, :-1] * p.diff(dim=1).abs()
    return (p - w[:, 4] + w[:, 5]).square().sum((1, 2)) / 2 + horizontal.sum((1, 2)) + vertical.sum((1, 2))


def screened_poisson(w: torch.Tensor, repetitions: int) -> Measured:
    """Batched conjugate gradients on (I + B'CB) p = f, as SoftCut has it, to a relative residual of 1e-3."""
    horizontal, vertical = w[:, 0, :, :-1], w[:, 2, :-1]
    f = w[:, 4] - w[:, 5]

    def matrix(p: torch.Tensor) -> torch.Tensor:
        x, y, out = horizontal * (p[:, :, :-1] - p[:, :, 1:]), vertical * (p[:, :-1] - p[:, 1:]), p.clone()
        out[:, :, :-1] += x
        out[:, :, 1:] -= x
        out[:, :-1] += y
        out[:, 1:] -= y
        return out

    def run() -> torch.Tensor:
        p, r = torch.zeros_like(f), f.clone()
        d, square = r, r.square().sum((1, 2), keepdim=True)
        first = square
        while bool((square > 1e-6 * first).any()):
            q = matrix(d)
            step = square / (d * q).sum((1, 2), keepdim=True)
            p, r = p + step * d, r - step * q
            new = r.square().sum((1, 2), keepdim=True)
            d, square = r + new / square * d, new
        return p

    with torch.no_grad():
        return Measured(seconds(run, repetitions, w.device.type), None, run() > 0, None)


def on_cpu(w: torch.Tensor) -> None:
    if w.device.type != "cpu":
        raise Unavailable("it runs on the CPU")


METHODS: dict[str, Method] = {
    **{f"MinCut, gap {tolerance:g}": min_cut(tolerance) for tolerance in TOLERANCES},
    "MinCut, gap 0.001, torch": min_cut(1e-3, compiled=False),
    "PyMaxflow": pymaxflow,
    "scipy maximum_flow": scipy_maximum_flow,
    "prox_tv, equal capacities": prox_tv,
    "screened Poisson, CG": screened_poisson,
}


# -------------------------------------------------------------------------------------------------------------- table


def cut_values(w: torch.Tensor, cut: torch.Tensor) -> torch.Tensor:
    """Return the total capacity of the edges from the side of the source to that of the sink."""
    right, left, down, up, source, sink = w.double().unbind(1)
    inside = cut.to(w.device).double()
    outside = 1 - inside
    value = (source * outside + sink * inside).sum((1, 2))
    value += (right[:, :, :-1] * inside[:, :, :-1] * outside[:, :, 1:]).sum((1, 2))
    value += (left[:, :, 1:] * inside[:, :, 1:] * outside[:, :, :-1]).sum((1, 2))
    value += (down[:, :-1] * inside[:, :-1] * outside[:, 1:]).sum((1, 2))
    return value + (up[:, 1:] * inside[:, 1:] * outside[:, :-1]).sum((1, 2))


def row(name: str, w: torch.Tensor, found: Measured, best: torch.Tensor, base: float) -> str:
    batch, side = len(w), w.shape[-1]
    excess = "" if found.cut is None else f"{float((cut_values(w, found.cut) / best - 1).max()):.0e}"
    both = "" if found.both is None else f"{1e3 * found.both:,.2f}"
    gap = "" if found.gap is None else f"{found.gap:.0e}"
    cells = [
        str(side),
        str(batch),
        name,
        f"{1e3 * found.forward:,.2f}",
        both,
        f"{found.forward / base:.1f}x",
        gap,
        excess,
    ]
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--sides", type=int, nargs="+", default=SIDES)
    parser.add_argument("--batches", type=int, nargs="+")
    parser.add_argument("--repetitions", type=int, default=3)
    options = parser.parse_args()
    device = torch.cuda.get_device_name() if options.device == "cuda" else f"{torch.get_num_threads()} CPU threads"
    versions = f"torch {torch.__version__}, Python {platform.python_version()}"
    print(f"{device}, {versions}, float32, least of {options.repetitions}\n")
    print("| side | grids | method | forward ms | forward + backward ms | of MinCut | gap | excess |")
    print("|" + " --- |" * 8)
    slow: set[str] = set()
    for side in options.sides:
        for batch in options.batches or BATCHES[options.device]:
            if batch * side * side <= MAX_PIXELS[options.device]:
                measure(problems(batch, side).to(options.device), options.repetitions, slow)


def measure(w: torch.Tensor, repetitions: int, slow: set[str]) -> None:
    """Print a row for every method."""
    reference = MinCut(w.shape[2:], tolerance=1e-6, max_iterations=20_000, warn=False).to(w.device)
    best, base = cut_values(w, reference.solve(w).cut), None
    for name, method in METHODS.items():
        if name in slow:
            continue
        try:
            found = method(w, repetitions)
        except Unavailable:
            continue
        base = base or found.forward
        print(row(name, w, found, best, base), flush=True)
        if found.forward * 4 > LIMIT_S:
            slow.add(name)


if __name__ == "__main__":
    main()
