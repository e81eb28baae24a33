"""Measure the time of a batch of min-cut QPs by several methods, side by side in one run.

    python benchmarks/solvers.py                    # the CPU, sides 16 to 1024, 12 cuts
    python benchmarks/solvers.py --device cuda      # a GPU, 768 cuts of 64 x 64 and as many pixels at other sides

The task is the same for every row: from weights w (cuts, 6, side, side) to the vertex variables p, and from a gradient
of p back to a gradient of w. `setup` is done once per size: tables, factors, inverses, compilation. Every result is
compared with GridCut in float64 before it is timed. On the CPU each cell runs in its own process, to measure its peak
memory and to stop it at the time limit. On CUDA peak memory is the allocator's, and device time is the replay of a
captured graph where the work can be captured.

The floor is the time to move each input and each output once at the bandwidth measured in this run.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy import sparse
from scipy.sparse import linalg

from cutslots import Graph, GraphCut, GridCut
from cutslots.programs.graph import grid_edges
from cutslots.programs.linear_solvers import SparseFactor, SparseMatrix
from cutslots.programs.qp import linear_map

GAMMA = 0.5
CPU_CUTS, CUDA_CUTS = 12, 768
Forward = Callable[[torch.Tensor], torch.Tensor]


class Method(NamedTuple):
    """A method built for one side and device; its functions take weights w (cuts, 6, side, side)."""

    forward: Callable[[torch.Tensor], Any]  # p
    both: Callable[[torch.Tensor], Any] | None  # p and the gradient of w
    solves: Callable[[torch.Tensor], Any] | None = None  # for the literal QP: its triangular solves alone
    captures: bool = (
        True  # whether a CUDA graph captures the work; kernels that other libraries launch are not captured
    )


class Unavailable(Exception):
    """Raised with the reason why a method cannot be measured here."""


def autograd_method(layer: Forward) -> Method:
    """Return the method of a differentiable layer of w (cuts, 6, side, side)."""

    def forward(w: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return layer(w)

    def both(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        w = w.detach().requires_grad_()
        p = layer(w)
        return p, torch.autograd.grad(p, w, p.detach())[0]

    return Method(forward, both)


class Edges:
    """Convert between weights (cuts, 6, side, side) and edge lists: rows (cuts, edges) or columns (edges, cuts)."""

    def __init__(self, side: int, device: str) -> None:
        self.shape = (6, side, side)
        self.index = torch.as_tensor(np.flatnonzero(grid_edges((side, side))), device=device)

    def rows(self, w: torch.Tensor) -> torch.Tensor:
        return w.flatten(1).index_select(1, self.index)

    def columns(self, w: torch.Tensor) -> torch.Tensor:
        return self.rows(w).T.contiguous()

    def to_grid(self, columns: torch.Tensor) -> torch.Tensor:
        out = columns.new_zeros(columns.shape[1], 6 * self.shape[1] ** 2)
        return out.index_copy_(1, self.index, columns.T).unflatten(1, self.shape)


def gridcut(side: int, device: str) -> Method:
    return autograd_method(GridCut((side, side), GAMMA).to(device))


def gridcut_compiled(side: int, device: str) -> Method:
    torch._dynamo.reset()
    return autograd_method(torch.compile(GridCut((side, side), GAMMA).to(device), fullgraph=True))


def reduced_cholesky(side: int, device: str) -> Method:
    """GraphCut: I + B'B/2 + aa' by cholespy."""
    at_most(side, 512)
    N = side * side
    cut = GraphCut(Graph.grid((side, side)).edges[: -2 * N], N, GAMMA, solver="cholesky").to(device)
    edges = Edges(side, device)
    return autograd_method(lambda w: cut(edges.rows(w)))._replace(captures=False)


def reduced_superlu(side: int, device: str) -> Method:
    """The same matrix by scipy's SuperLU, in float64 and numpy."""
    cpu_only(device)
    at_most(side, 512)
    graph = Graph.grid((side, side))
    B = graph.incidence()
    lu = splu(graph.reduced_matrix())
    a = np.zeros((graph.num_vertices, 1))
    a[graph.source], a[graph.sink] = 1, -1
    N, edges = side * side, Edges(side, device)

    def forward(w: torch.Tensor) -> np.ndarray:
        return lu.solve(a - B.T @ edges.columns(w.double()).numpy() / (2 * GAMMA))[:N].T

    def both(w: torch.Tensor) -> tuple[np.ndarray, torch.Tensor]:
        p = forward(w)
        grad = np.zeros((graph.num_vertices, len(p)))
        grad[:N] = p.T
        return p, edges.to_grid(torch.as_tensor(B @ lu.solve(grad) / (-2 * GAMMA), dtype=torch.float32))

    return Method(forward, both)


def reduced_inverse(side: int, device: str) -> Method:
    """The dense inverse of the same matrix, as one matrix product."""
    at_most(side, 64 if device == "cpu" else 128)
    graph = Graph.grid((side, side))
    N = side * side
    inverse = (
        torch.linalg.inv(torch.as_tensor(graph.reduced_matrix().toarray(), device=device))[:N, :].float().contiguous()
    )
    B = SparseMatrix.of(graph.incidence(), torch.device(device), torch.float32)
    Bt = B.T
    edges = Edges(side, device)

    def forward(w: torch.Tensor) -> torch.Tensor:
        return (inverse @ (Bt.matmul(edges.columns(w)) / (-2 * GAMMA))).T

    def adjoint(p: torch.Tensor) -> torch.Tensor:
        return edges.to_grid(B.matmul(inverse.T @ p.T) / (-2 * GAMMA))

    # As a layer: GridCut is timed with autograd too.
    return autograd_method(lambda w: linear_map(w, forward, adjoint))


def literal_method(
    side: int, device: str, solve: Callable[[torch.Tensor], torch.Tensor], captures: bool = True
) -> Method:
    """The literal QP, given a solver for AA': z = -(c + A'l)/gamma, l = -(AA')^-1 (Ac + gamma b)."""
    graph = Graph.grid((side, side))
    qp = graph.qp()
    A = SparseMatrix.of(qp.A, torch.device(device), torch.float32)
    At = A.T
    b = torch.as_tensor(qp.b, dtype=torch.float32, device=device)[:, None]
    edges, d, N = Edges(side, device), qp.blocks["d"], side * side

    def kkt(c: torch.Tensor, b: torch.Tensor | float) -> torch.Tensor:
        return -(c + At.matmul(solve(-(A.matmul(c) + GAMMA * b)))) / GAMMA

    def forward(w: torch.Tensor) -> torch.Tensor:
        c = w.new_zeros(qp.A.shape[1], len(w))
        c[d] = edges.columns(w)
        return kkt(c, b)[:N].T

    def both(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        p = forward(w)
        grad = w.new_zeros(qp.A.shape[1], len(w))
        grad[:N] = p.T
        return p, edges.to_grid(kkt(grad, 0.0)[d])

    rhs = torch.randn(len(b), 1, device=device)
    return Method(forward, both, lambda w: solve(rhs.expand(-1, len(w)).contiguous()), captures)


def literal_cholesky(side: int, device: str) -> Method:
    """AA' factored as in the paper, by cholespy."""
    cpu_only(device)  # on CUDA the factorisation takes minutes
    at_most(side, 64)
    A = Graph.grid((side, side)).qp().A
    return literal_method(side, device, SparseFactor(A @ A.T, torch.device(device), torch.float32))


def literal_cupy(side: int, device: str) -> Method:
    """AA' factored on the CPU; sparse triangular solves by CuPy, as in the authors' code."""
    cuda_only(device)
    at_most(side, 64)
    try:
        import cupy
        from cupyx.scipy.sparse.linalg import SuperLU
    except ImportError as error:
        raise Unavailable(f"not installed ({error.name})") from None
    A = Graph.grid((side, side)).qp().A
    solver = SuperLU(splu(A @ A.T))
    solver.L, solver.U = solver.L.astype(cupy.float32), solver.U.astype(cupy.float32)

    def solve(rhs: torch.Tensor) -> torch.Tensor:
        return torch.from_dlpack(cupy.ascontiguousarray(solver.solve(cupy.from_dlpack(rhs.contiguous()))))

    return literal_method(side, device, solve, captures=False)


def literal_inverse(side: int, device: str) -> Method:
    """The dense (AA')^-1, as one matrix product."""
    at_most(side, 32 if device == "cpu" else 64)
    A = Graph.grid((side, side)).qp().A
    S = torch.as_tensor((A @ A.T).toarray(), device=device)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(S)).float()
    del S
    return literal_method(side, device, lambda rhs: inverse @ rhs)


def osqp_method(side: int, device: str) -> Method:
    """OSQP on the literal QP, equalities only, one cut at a time, forward only."""
    cpu_only(device)
    at_most(side, 128)
    try:
        import osqp
    except ImportError:
        raise Unavailable("not installed (osqp)") from None
    qp = Graph.grid((side, side)).qp()
    n = qp.A.shape[1]
    solver = osqp.OSQP()
    P, A = sparse.csc_matrix(GAMMA * sparse.eye_array(n)), sparse.csc_matrix(qp.A)
    tight = {"eps_abs": 1e-5, "eps_rel": 1e-5, "verbose": False}
    solver.setup(P, np.zeros(n), A, qp.b, qp.b, **tight)
    N, edges = side * side, Edges(side, device)

    def forward(w: torch.Tensor) -> np.ndarray:
        out = []
        for c in qp.objective(edges.rows(w).double().numpy()):
            solver.update(q=c)
            out.append(solver.solve().x[:N].copy())
        return np.stack(out)

    return Method(forward, None)


def qpth_method(side: int, device: str) -> Method:
    """qpth (OptNet) on the literal QP."""
    at_most(side, 16)
    try:
        from qpth.qp import QPFunction
    except ImportError:
        raise Unavailable("not installed (qpth; it needs a separate environment)") from None
    qp = Graph.grid((side, side)).qp()
    n, N, edges = qp.A.shape[1], side * side, Edges(side, device)
    Q = GAMMA * torch.eye(n, dtype=torch.float64, device=device)
    A, b = torch.as_tensor(qp.A.toarray(), device=device), torch.as_tensor(qp.b, device=device)
    zeros, one = torch.zeros(1, n).to(A), torch.ones(1).to(A)  # qpth requires an inequality: 0 z <= 1

    def layer(w: torch.Tensor) -> torch.Tensor:
        c = torch.zeros(len(w), n, dtype=torch.float64, device=device)
        c[:, qp.blocks["d"]] = edges.rows(w).double()
        return QPFunction(verbose=-1)(Q, c, zeros, one, A, b)[:, :N]

    return autograd_method(layer)


def cvxpylayers_method(side: int, device: str) -> Method:
    """cvxpylayers on the literal QP, with its default solver."""
    at_most(side, 16)
    try:
        import cvxpy
        from cvxpylayers.torch import CvxpyLayer
    except ImportError as error:
        raise Unavailable(f"not installed ({error.name})") from None
    qp = Graph.grid((side, side)).qp()
    z, c = cvxpy.Variable(qp.A.shape[1]), cvxpy.Parameter(qp.A.shape[1])
    objective = cvxpy.Minimize(GAMMA / 2 * cvxpy.sum_squares(z) + c @ z)
    solve = CvxpyLayer(cvxpy.Problem(objective, [qp.A @ z == qp.b]), parameters=[c], variables=[z])
    N, edges = side * side, Edges(side, device)

    def layer(w: torch.Tensor) -> torch.Tensor:
        full = w.new_zeros(len(w), qp.A.shape[1])
        full[:, qp.blocks["d"]] = edges.rows(w)
        return solve(full)[0][:, :N]

    return autograd_method(layer)


METHODS: dict[str, Callable[[int, str], Method]] = {
    "GridCut": gridcut,
    "GridCut, compiled": gridcut_compiled,
    "reduced, sparse Cholesky (GraphCut)": reduced_cholesky,
    "reduced, SuperLU": reduced_superlu,
    "reduced, dense inverse": reduced_inverse,
    "literal, sparse Cholesky (cholespy)": literal_cholesky,
    "literal, triangular solves (CuPy)": literal_cupy,
    "literal, dense inverse": literal_inverse,
    "OSQP": osqp_method,
    "qpth": qpth_method,
    "cvxpylayers": cvxpylayers_method,
}


def splu(matrix: Any) -> Any:
    symmetric = {"SymmetricMode": True}
    return linalg.splu(sparse.csc_matrix(matrix), "MMD_AT_PLUS_A", diag_pivot_thresh=0.0, options=symmetric)


def at_most(side: int, limit: int) -> None:
    if side > limit:
        raise Unavailable(f"not tried above side {limit}")


def cpu_only(device: str) -> None:
    if device != "cpu":
        raise Unavailable("CPU only")


def cuda_only(device: str) -> None:
    if device != "cuda":
        raise Unavailable("CUDA only")


def measure(method: str, side: int, cuts: int, device: str) -> dict[str, Any]:
    """Return setup time, error, times and peak memory of one method: one cell of the results."""
    torch.manual_seed(0)
    w = torch.randn(cuts, 6, side, side).to(device)
    reference = GridCut((side, side), GAMMA).double()(w[:2].double().cpu()).flatten(-2).numpy()
    before = peak_memory(device, reset=True)
    start = time.perf_counter()
    built = METHODS[method](side, device)
    cell: dict[str, Any] = {"setup_s": time.perf_counter() - start}
    p = built.forward(w)
    p = np.asarray(p.detach().cpu() if isinstance(p, torch.Tensor) else p).reshape(cuts, -1)[:2]
    cell["error"] = float(np.abs(p - reference).max() / np.abs(reference).max())
    for name in ("forward", "both", "solves"):
        if (function := getattr(built, name)) is not None:
            times = clock(function, w, device, capture=built.captures)
            cell.update({f"{name}_{kind}": t for kind, t in times.items()})
    cell["peak_mb"] = (peak_memory(device) - before) / 2**20
    return cell


def clock(
    function: Callable[[Any], Any], argument: Any, device: str, capture: bool = True, budget: float = 2.0
) -> dict[str, float]:
    """Return the median wall time of a call in seconds and, on CUDA, the median device time."""
    seconds = []
    for _ in range(2):  # the first call may compile
        start = time.perf_counter()
        function(argument)
        synchronize(device)
        seconds.append(time.perf_counter() - start)
        if seconds[-1] > 5 * budget:
            return {"wall_s": seconds[-1]}
    repeats = int(np.clip(budget / seconds[-1], 1, 200))
    for _ in range(min(repeats, 10)):
        function(argument)
    times = []
    for _ in range(repeats):
        synchronize(device)
        start = time.perf_counter()
        function(argument)
        synchronize(device)
        times.append(time.perf_counter() - start)
    result = {"wall_s": float(np.median(times))}
    if device == "cuda" and capture:
        result["device_s"] = replay_time(function, argument)
    return result


def replay_time(function: Callable[[Any], Any], argument: Any) -> float:
    """Return the device time in seconds by replaying a captured graph, or NaN if the work cannot be captured."""
    try:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                function(argument)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            function(argument)
    except Exception:
        torch.cuda.synchronize()
        return float("nan")
    times = []
    for _ in range(50):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return float(np.median(times))


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def peak_memory(device: str, reset: bool = False) -> int:
    """Return the peak memory in bytes since the last reset: of the process on the CPU, of the allocator on CUDA."""
    if device == "cuda":
        if reset:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        return torch.cuda.max_memory_allocated()
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("VmHWM:")[1].split()[0])


def bandwidth(device: str) -> float:
    """Return the bytes per second, reads and writes, of scaling a large tensor."""
    x = torch.empty(2**28 if device == "cuda" else 2**26, device=device)
    y = torch.empty_like(x)
    seconds = clock(lambda _: torch.mul(x, 1.0, out=y), None, device)  # a kernel, because the copy engine is slower
    return 2 * x.nbytes / seconds.get("device_s", seconds["wall_s"])


def run_cell(method: str, side: int, cuts: int, device: str, limit: float) -> dict[str, Any]:
    """Run `measure`, on the CPU in its own process; a cell that cannot be measured has a note."""
    if device == "cuda":
        try:
            return measure(method, side, cuts, device)
        except Unavailable as reason:
            return {"note": str(reason)}
        except Exception as error:
            return {"note": f"failed: {str(error).splitlines()[0][:80]}"}
    command = [sys.executable, __file__, "--cell", json.dumps([method, side, cuts, device])]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return {"note": f"stopped after {limit:.0f} s"}
    if done.returncode:
        return {"note": f"failed: {(done.stderr.strip().splitlines() or ['no message'])[-1][:80]}"}
    return json.loads(done.stdout.splitlines()[-1])


def table(cells: list[dict[str, Any]], floors: dict[int, float], device: str) -> str:
    """Return a Markdown table with a row for each method and side, times in milliseconds."""
    heads = ["side", "cuts", "method", "setup s", "forward ms", "forward + backward ms"]
    heads += ["of GridCut", "of the floor", "peak MB", "error"]
    rows = [heads, ["---"] * len(heads)]
    for side, floor in floors.items():
        here = [cell for cell in cells if cell["side"] == side]
        ours = next((seconds_of(c, "both", device) for c in here if c["method"] == "GridCut"), None)
        for c in here:
            row = [str(side), str(c["cuts"]), c["method"]]
            if "note" in c:
                rows.append([*row, c["note"], *[""] * 6])
                continue
            both, forward = seconds_of(c, "both", device), seconds_of(c, "forward", device)
            solves = f" (solves alone {c['solves_wall_s'] * 1e3:.1f})" if "solves_wall_s" in c else ""
            row += [f"{c['setup_s']:.2f}", f"{forward * 1e3:.3f}{solves}" if forward else ""]
            row += (
                [f"{both * 1e3:.3f}", f"{both / ours:.1f}x" if ours else "", f"{both / floor:.1f}x"]
                if both
                else [""] * 3
            )
            rows.append([*row, f"{c['peak_mb']:.0f}", f"{c['error']:.0e}"])
        rows.append([str(side), str(here[0]["cuts"]), "*floor*", "", "", f"{floor * 1e3:.3f}", "", "1.0x", "", ""])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def seconds_of(cell: dict[str, Any], what: str, device: str) -> float | None:
    """Return the device time if it was measured, else the wall time."""
    value = cell.get(f"{what}_device_s")
    return value if value is not None and value == value else cell.get(f"{what}_wall_s")


def plot(cells: list[dict[str, Any]], floors: dict[int, float], device: str, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8.5, 5.5), layout="constrained")
    for i, method in enumerate(METHODS):
        of_method = [(c, seconds_of(c, "both", device)) for c in cells if c["method"] == method]
        points = [(c["side"], t / c["cuts"] * 1e3) for c, t in of_method if t]
        if points:
            ours = {"GridCut": "black", "GridCut, compiled": "grey"}.get(method)
            style: dict[str, Any] = (
                {"linewidth": 2.5, "color": ours} if ours else {"linewidth": 1.2, "color": f"C{i - 2}"}
            )
            axes.plot(*zip(*sorted(points), strict=True), marker="o", markersize=4, label=method, **style)
    cuts = {c["side"]: c["cuts"] for c in cells}
    axes.plot(list(floors), [t / cuts[s] * 1e3 for s, t in floors.items()], "k:", label="floor (memory traffic)")
    axes.set(xscale="log", yscale="log", xlabel="side of the grid", ylabel="ms per cut, forward + backward")
    axes.set_xticks(sorted(floors), [str(s) for s in sorted(floors)])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, frameon=False)
    axes.set_title(f"Minimum cuts on a grid, {machine(device)}", fontsize=10)
    figure.savefig(path, dpi=140)


def machine(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    return f"{torch.get_num_threads()} CPU threads"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--sides", type=int, nargs="+", default=[16, 32, 64, 128, 256, 512, 1024])
    parser.add_argument("--cuts", type=int, help="cuts per side; default 12, on CUDA 768 x 64 x 64 pixels")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS), metavar="METHOD")
    parser.add_argument("--limit", type=float, default=900.0, help="time limit of a cell on the CPU in seconds")
    parser.add_argument("--out", type=Path, default=Path("out/solvers"))
    parser.add_argument("--cell", help=argparse.SUPPRESS)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    if args.cell:
        try:
            print(json.dumps(measure(*json.loads(args.cell))))
        except Unavailable as reason:
            print(json.dumps({"note": str(reason)}))
        return

    args.out.mkdir(parents=True, exist_ok=True)
    rate = bandwidth(args.device)
    versions = f"torch {torch.__version__}, Python {platform.python_version()}"
    print(f"{machine(args.device)}, {versions}, float32; {rate / 1e9:.0f} GB/s of memory traffic")
    cells, floors = [], {}
    for side in args.sides:
        cuts = args.cuts or (CPU_CUTS if args.device == "cpu" else int(np.clip(CUDA_CUTS * 64**2 // side**2, 16, 768)))
        floors[side] = 14 * 4 * cuts * side**2 / rate  # 6 channels and p, each way
        for method in args.methods:
            cell = {"method": method, "side": side, "cuts": cuts}
            cell |= run_cell(method, side, cuts, args.device, args.limit)
            cells.append(cell)
            seconds = seconds_of(cell, "both", args.device) or seconds_of(cell, "forward", args.device)
            print(f"  {side:5d} {method:38s} {cell.get('note') or f'{1e3 * (seconds or 0):.3f} ms'}", flush=True)
            (args.out / f"{args.device}.json").write_text(json.dumps({"bandwidth": rate, "cells": cells}, indent=1))
    text = table(cells, floors, args.device)
    (args.out / f"{args.device}.md").write_text(text + "\n")
    plot(cells, floors, args.device, args.out / f"{args.device}.png")
    print(f"\n{text}\n\nwrote {args.out / args.device}.md, .json and .png")


if __name__ == "__main__":
    main()
