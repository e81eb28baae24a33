"""Build 27 matching instances from the Cora citation graph (Wilder, Dilkina and Tambe, 2019).

An instance has two sides of 50 papers; a pair is correct if one cites the other. Instances are built from the public
files, deterministically:

1. METIS partitions the graph into 27 parts.
2. Every part is trimmed or filled to 100 papers, by the number of citations of a paper within the part.
3. A local search splits each part into halves such that many citations cross; the best of 20 starts is used.

`load` reads a folder with cora.content and cora.cites (LINQS), one with ind.cora.* (Planetoid), or an instances.npz.
"""

from __future__ import annotations

import io
import pickle
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy import sparse
from scipy.sparse.csgraph import maximum_bipartite_matching

PARTS, PAPERS, STARTS = 27, 100, 20


class Instances(NamedTuple):
    left: np.ndarray  # (27, 50, words) uint8, 1 where a paper has a word
    right: np.ndarray  # (27, 50, words)
    cites: np.ndarray  # (27, 50, 50) uint8, 1 where one of a pair cites the other


def load(source: Path) -> Instances:
    """Return the instances of an .npz file, or build them from the public files in a folder."""
    if source.is_dir():
        return build(*read_public(source))
    if source.suffix != ".npz":
        raise ValueError(f"{source} is neither a folder nor an .npz file")
    try:
        with np.load(source, allow_pickle=False) as arrays:
            instances = Instances(*(np.asarray(arrays[name]) for name in ("Xl", "Xr", "Y")))
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"{source} holds no instances ({error}); expected arrays Xl, Xr and Y") from None
    count, side, words = instances.left.shape
    if instances.right.shape != (count, side, words) or instances.cites.shape != (count, side, side):
        shapes = ", ".join(str(x.shape) for x in instances)
        raise ValueError(f"{source} has arrays of shapes {shapes}; expected (n, k, words) twice and (n, k, k)")
    return instances


def save(instances: Instances, file: Path) -> None:
    np.savez_compressed(file, Xl=instances.left, Xr=instances.right, Y=instances.cites)


# -------------------------------------------------------------------------------------------------------- public files


def read_public(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return words (papers, words) uint8 and citations (n, 2), each pair once, from either public distribution."""
    if (folder / "cora.content").is_file() and (folder / "cora.cites").is_file():
        return _read_linqs(folder)
    if (folder / "ind.cora.allx").is_file():
        return _read_planetoid(folder)
    raise ValueError(f"{folder} holds neither cora.content and cora.cites nor ind.cora.*")


def _read_linqs(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    rows = [line.split("\t") for line in (folder / "cora.content").read_text().splitlines()]
    index = {row[0]: i for i, row in enumerate(rows)}
    words = np.array([row[1:-1] for row in rows], dtype=np.uint8)
    pairs = [line.split() for line in (folder / "cora.cites").read_text().splitlines()]
    return words, _tidy([(index[a], index[b]) for a, b in pairs if a in index and b in index])


def _read_planetoid(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Papers of `tx` have the indices that test.index lists; the others are in order."""
    allx, tx, graph = (read_pickle(folder / f"ind.cora.{name}") for name in ("allx", "tx", "graph"))
    test_indices = np.array((folder / "ind.cora.test.index").read_text().split(), dtype=int)
    words = np.zeros((max(len(graph), allx.shape[0] + tx.shape[0]), allx.shape[1]), dtype=np.uint8)
    words[: allx.shape[0]] = allx.toarray() > 0
    words[test_indices] = tx.toarray() > 0
    return words, _tidy([(int(a), int(b)) for a, others in graph.items() for b in others])


def _tidy(pairs: Sequence[tuple[int, int]]) -> np.ndarray:
    return np.array(sorted({(min(pair), max(pair)) for pair in pairs if pair[0] != pair[1]}), dtype=np.int64)


# The classes of a pickle of arrays, in old and new versions of the libraries. Anything else might run code.
ALLOWED_CLASSES = {
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("scipy.sparse.csr", "csr_matrix"),
    ("scipy.sparse._csr", "csr_matrix"),
    ("collections", "defaultdict"),
    ("__builtin__", "list"),
    ("builtins", "list"),
}


class ArraysOnly(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ALLOWED_CLASSES:
            raise pickle.UnpicklingError(f"it contains {module}.{name}, which is not an array")
        if name == "csr_matrix":
            return sparse.csr_matrix
        return super().find_class(module, name)


def read_pickle(file: Path) -> Any:
    """Return the arrays of a pickle of Python 2 or 3. Other objects are refused before they are constructed."""
    try:
        return ArraysOnly(io.BytesIO(file.read_bytes()), encoding="latin1").load()
    except FileNotFoundError:
        raise ValueError(f"there is no {file}") from None
    except Exception as error:  # a damaged pickle raises anything
        raise ValueError(f"{file} is not a pickle of arrays: {error}") from None


# ----------------------------------------------------------------------------------------------------------- instances


def build(words: np.ndarray, cites: np.ndarray, parts: int = PARTS, papers: int = PAPERS) -> Instances:
    """Return the instances. METIS and every start of the local search are seeded."""
    count = len(words)
    if count < parts * papers:
        raise ValueError(f"there are {count} papers; expected at least {parts} x {papers}")
    graph = sparse.coo_matrix((np.ones(len(cites)), cites.T), shape=(count, count)).tocsr()
    graph = ((graph + graph.T) > 0).astype(np.int64)
    groups = equalize(graph, _metis(graph, parts), papers)
    instances = []
    for i, group in enumerate(groups):
        inside = graph[group][:, group].toarray()
        side = largest_cut(inside, np.random.default_rng(i))
        left, right = group[side], group[~side]
        instances.append((words[left], words[right], graph[left][:, right].toarray().astype(np.uint8)))
    return Instances(*(np.stack(part) for part in zip(*instances, strict=True)))


def _metis(graph: sparse.csr_matrix, parts: int) -> np.ndarray:
    import pymetis

    adjacency = pymetis.CSRAdjacency(graph.indptr, graph.indices)
    _, labels = pymetis.part_graph(parts, adjacency, options=pymetis.Options(seed=0))
    return np.asarray(labels)


def equalize(graph: sparse.csr_matrix, labels: np.ndarray, papers: int) -> list[np.ndarray]:
    """Return the members of every part, `papers` each.

    Parts that are too large lose the papers with the fewest citations inside. Parts that are too small gain the free
    papers with the most citations into them.
    """
    labels = labels.copy()
    for part in range(labels.max() + 1):
        members = np.flatnonzero(labels == part)
        inner = np.asarray(graph[members][:, members].sum(1)).ravel()
        labels[members[np.lexsort((members, inner))][: max(0, len(members) - papers)]] = -1
    for part in range(labels.max() + 1):
        while (labels == part).sum() < papers:
            free, members = np.flatnonzero(labels < 0), np.flatnonzero(labels == part)
            ties = np.asarray(graph[free][:, members].sum(1)).ravel()
            labels[free[np.argmax(ties)]] = part
    return [np.flatnonzero(labels == part) for part in range(labels.max() + 1)]


def largest_cut(graph: np.ndarray, rng: np.random.Generator, starts: int = STARTS) -> np.ndarray:
    """Return one half, as a boolean mask, of a balanced split that many edges cross.

    From random halves, the best swap of two papers is made as long as one increases the number of edges that cross.
    """
    n = len(graph)
    best, best_value = np.zeros(n, dtype=bool), -1
    for _ in range(starts):
        side = np.zeros(n, dtype=bool)
        side[rng.permutation(n)[: n // 2]] = True
        while True:
            sign = np.where(side, 1, -1)
            gain = sign * (graph @ sign)  # edges within the own side minus edges across: the gain of moving
            swap = gain[side][:, None] + gain[~side][None] + 2 * graph[side][:, ~side]
            if swap.max() <= 0:
                break
            a, b = np.unravel_index(swap.argmax(), swap.shape)
            one, other = np.flatnonzero(side)[a], np.flatnonzero(~side)[b]
            side[one], side[other] = False, True
        value = int(graph[side][:, ~side].sum())
        if value > best_value:
            best, best_value = side.copy(), value
    return best


def checksum(instances: Instances) -> int:
    """Return a checksum that identifies the instances."""
    return zlib.crc32(b"".join(np.ascontiguousarray(part).tobytes() for part in instances))


def facts(instances: Instances) -> dict[str, float]:
    """Return the mean number of citations that cross an instance and the mean size of its largest matching."""
    sizes = [(maximum_bipartite_matching(sparse.csr_matrix(y)) >= 0).sum() for y in instances.cites]
    return {"crossing": float(instances.cites.sum((1, 2)).mean()), "largest matching": float(np.mean(sizes))}
