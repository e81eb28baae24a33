"""Write the page of contracts: python -m tests.contracts --write docs/contracts.md"""

from __future__ import annotations

import argparse
from pathlib import Path

from tests.contracts.contracts import CONTRACTS
from tests.contracts.gaps import GAPS, NO_OPS
from tests.contracts.layers import GROUPS, LAYERS

INTRO = """# Contracts

Every layer of `cutslots` is tested against what PyTorch expects of a layer. This page says which layer works with which
transform, precision, device and copy. [The tests](../tests/contracts/test_contracts.py) run every "yes", and check that
every gap still is one.

## What is tested

| contract | |
|---|---|
"""
NOTES = """
- Derivatives are those of the input and of all parameters, in float64, with batch normalisation in evaluation mode.
- On a machine with CUDA the same tests run there, in float32 where there are kernels.
- A layer that is part of another one in a table is compiled and exported within that one.
- Before you load an exported program, import the module of its layer: it registers custom ops and types of outputs.
- PyTorch recommends `DistributedDataParallel`, which `cutslots train` uses, over `DataParallel`. With the latter,
  replicas of `GraphCut` and `EqualityQP` on other devices factor their matrix in every call.
- `python -m tests.contracts --write docs/contracts.md` writes this page.
"""


def cell(layer: str, contract: str, numbers: dict[str, int]) -> str:
    gap = GAPS.get((layer, contract))
    if gap is None:
        return "yes"
    return f"{'none' if gap is NO_OPS else 'no'} [{numbers[gap.reason]}](#gaps)"


def table(layers: list[str], numbers: dict[str, int]) -> str:
    """Return a row for each contract and a column for each layer."""
    rows = ["| | " + " | ".join(layers) + " |", "|---" * (len(layers) + 1) + "|"]
    for contract in CONTRACTS:
        rows.append(f"| {contract} | " + " | ".join(cell(layer, contract, numbers) for layer in layers) + " |")
    return "\n".join(rows)


def page() -> str:
    """Return the text of the page."""
    numbers = {reason: i for i, reason in enumerate(dict.fromkeys(gap.reason for gap in GAPS.values()), 1)}
    text = INTRO + "\n".join(f"| {name} | {each.what} |" for name, each in CONTRACTS.items()) + "\n" + NOTES
    for group in GROUPS:
        layers = [name for name, layer in LAYERS.items() if layer.group == group]
        text += f"\n## {group}\n\n{table(layers, numbers)}\n"
    return text + "\n## Gaps\n\n" + "\n".join(f"{i}. {reason}" for reason, i in numbers.items()) + "\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Print the page of contracts.")
    parser.add_argument("--write", type=Path, help="file to write instead")
    path = parser.parse_args().write
    print(page(), end="") if path is None else path.write_text(page())
