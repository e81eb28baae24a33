"""Compare the solvers of `GraphCut` on graphs that are not images, side by side in one run.

    python benchmarks/graphs.py                # minutes: the factor of the largest random graph takes most of them
    python benchmarks/graphs.py --device cuda

Every row builds a GraphCut (setup) and takes weights (cuts, edges) to the vertex variables and back to a gradient of
the weights. `error` is the largest difference from conjugate gradients in float64, relative to the largest value. The
solver that GraphCut chooses by itself is marked with a star.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch
from scipy.spatial import Delaunay

from cutslots import Graph, GraphCut
from cutslots.programs.graph_cut import MAX_DENSE_VERTICES, SOLVERS, choose_sparse_solver


def random_graph(num_vertices: int, num_edges: int) -> tuple[np.ndarray, int]:
    return np.random.default_rng(0).integers(0, num_vertices, (num_edges, 2)), num_vertices


def mesh(num_vertices: int) -> tuple[np.ndarray, int]:
    """Return the triangulation of random points in a square."""
    triangles = Delaunay(np.random.default_rng(0).random((num_vertices, 2))).simplices
    return np.concatenate([triangles[:, [0, 1]], triangles[:, [1, 2]], triangles[:, [2, 0]]]), num_vertices


def volume(side: int) -> tuple[np.ndarray, int]:
    n = side**3
    return Graph.grid((side,) * 3).edges[: -2 * n], n


GRAPHS: dict[str, Callable[[], tuple[np.ndarray, int]]] = {
    "mesh, 20,000 points": lambda: mesh(20_000),
    "volume, 24 x 24 x 24": lambda: volume(24),
    "random, 2,500 vertices, 7,500 edges": lambda: random_graph(2_500, 7_500),
    "random, 5,000 vertices, 15,000 edges": lambda: random_graph(5_000, 15_000),
    "random, 20,000 vertices, 60,000 edges": lambda: random_graph(20_000, 60_000),
}


def measure(edges: np.ndarray, num_vertices: int, solver: str, w: torch.Tensor, exact: torch.Tensor) -> list[float]:
    """Return setup in seconds, forward and backward in milliseconds, and the error."""
    start = time.perf_counter()
    cut = GraphCut(edges, num_vertices, solver=solver).to(w.device)
    setup = time.perf_counter() - start
    times = []
    for _ in range(5):
        start = time.perf_counter()
        p = cut(w)
        torch.autograd.grad(p, w, p.detach())[0].sum().item()
        times.append(time.perf_counter() - start)
    return [setup, 1e3 * float(np.median(times)), float((p.detach() - exact).abs().max() / exact.abs().max())]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--cuts", type=int, default=12)
    args = parser.parse_args()
    print(f"{torch.get_num_threads()} CPU threads, torch {torch.__version__}, float32, {args.cuts} cuts")
    print("| graph | solver | setup s | forward + backward ms | setup, of cg | error |\n|---|---|---|---|---|---|")
    for name, make in GRAPHS.items():
        edges, n = make()
        reference = GraphCut(edges, n, solver="cg").double()
        w = torch.randn(args.cuts, reference.graph.num_edges, generator=torch.Generator().manual_seed(0))
        exact = reference(w.double()).to(args.device)
        w = w.to(args.device).requires_grad_()
        chosen = choose_sparse_solver(reference.graph.reduced_matrix())
        results = {s: measure(edges, n, s, w, exact) for s in SOLVERS if s != "inverse" or n <= MAX_DENSE_VERTICES}
        for solver, (setup, ms, error) in results.items():
            star = " *" if solver == chosen else ""
            ratio = f"{setup / results['cg'][0]:.1f}x"
            print(f"| {name} | {solver}{star} | {setup:.2f} | {ms:.1f} | {ratio} | {error:.0e} |", flush=True)


if __name__ == "__main__":
    main()
