"""Write the page of contracts: python -m tests.contracts --write docs/contracts.md"""

from __future__ import annotations

import argparse
from pathlib import Path

from tests.contracts.contracts import CONTRACTS
from tests.contracts.gaps import GAPS, NO_OPS
from tests.contracts.layers import LAYERS

GROUPS = {"programs": "Solver layers", "modules": "Modules", "models": "Models"}
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
- A part of a layer in another row is compiled and exported with that layer.
- Before you load an exported program, import the module of its layer: it registers custom ops and types of outputs.
- PyTorch recommends `DistributedDataParallel`, which `cutslots train` uses, over `DataParallel`. With the latter,
  replicas of `GraphCut` and `EqualityQP` on other devices factor their matrix in every call.
- `python -m tests.contracts --write docs/contracts.md` writes this page.
"""


def cell(layer: str, contract: str, numbers: dict[str, int]) -> str:
    reason = GAPS.get((layer, contract))
    if reason is None:
        return "yes"
    return f"{'none' if reason == NO_OPS else 'no'} [{numbers[reason]}](#gaps)"


def table(layers: list[str], numbers: dict[str, int]) -> str:
    """Return a row for each layer and a column for each contract."""
    rows = ["| | " + " | ".join(CONTRACTS) + " |", "|---" * (len(CONTRACTS) + 1) + "|"]
    for layer in layers:
        cells = " | ".join(cell(layer, contract, numbers) for contract in CONTRACTS)
        rows.append(f"| {layer} | {cells} |")
    return "\n".join(rows)


def page() -> str:
    """Return the text of the page."""
    numbers = {reason: i for i, reason in enumerate(dict.fromkeys(GAPS.values()), 1)}
    text = INTRO + "\n".join(f"| {name} | {each.what} |" for name, each in CONTRACTS.items()) + "\n" + NOTES
    for package, title in GROUPS.items():
        layers = [name for name, layer in LAYERS.items() if layer.package == package]
        text += f"\n## {title}\n\n{table(layers, numbers)}\n"
    return text + "\n## Gaps\n\n" + "\n".join(f"{i}. {reason}" for reason, i in numbers.items()) + "\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Print the page of contracts.")
    parser.add_argument("--write", type=Path, help="file to write instead")
    path = parser.parse_args().write
    print(page(), end="") if path is None else path.write_text(page())
