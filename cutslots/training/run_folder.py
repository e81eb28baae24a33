"""The folder of a training run: how it is created, resumed and replaced, and the training state in it.

    run.json            the config of the run             metrics.jsonl       loss, speed and metrics by step
    config.json         the config of the model           model.safetensors   the newest weights
    state.pt            the newest training state         tensorboard/        the same curves, for TensorBoard
    visualizations/     outputs over time                 report.html         all of it on one page

`cutslots evaluate` adds evaluation/.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cutslots.files import Layout, output_folder, write_atomically

# What may change when a run is resumed: none of it changes the weights that a step leads to.
MAY_CHANGE = {"out", "overwrite", "cache_dir", "max_steps", "max_minutes", "checkpoint_minutes"}
MAY_CHANGE |= {"accelerator", "devices", "num_nodes", "compile", "cuda_graphs", "plugins"}

OWNED = {"metrics.jsonl", "config.json", "model.safetensors", "state.pt", "report.html"}
OWNED |= {"tensorboard", "visualizations", "evaluation"}

LAYOUT = Layout("run", OWNED, marker="report.html", request="run.json", exclusive=True, may_change=MAY_CHANGE)


@contextmanager
def open_run(
    folder: Path, values: dict[str, Any], overwrite: bool, is_finished: Callable[[int, float], bool]
) -> Iterator[bool]:
    """Create, resume or replace the folder of a run and hold its lock; `values` is the JSON-able configuration.

    Yields whether the run is complete: `is_finished(step, seconds)` holds for its state, and its report is there.
    """

    def is_complete() -> bool:
        _check_state_exists(folder)
        state = read_state(folder / "state.pt")
        written = all((folder / name).is_file() for name in ("model.safetensors", "report.html"))
        return written and is_finished(state["step"], state["seconds"])

    with output_folder(folder, LAYOUT, values, overwrite, is_complete=is_complete) as complete:
        yield complete


def _check_state_exists(folder: Path) -> None:
    """Raise a ValueError if a folder holds trained weights but not the state they are resumed from.

    The state is saved before the weights, so a killed run never looks like this.
    """
    kept = [name for name in ("model.safetensors", "report.html") if (folder / name).exists()]
    if kept and not (folder / "state.pt").exists():
        raise ValueError(
            f"{folder} holds {kept[0]} of a trained run but no state.pt to resume from; restore state.pt, "
            "choose another folder, or pass --overwrite to begin again"
        )


def save_state(file: Path, model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Write the training state: weights, the optimizer's moments and `state`, the step and the seconds so far."""
    data = io.BytesIO()
    torch.save({**state, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, data)
    write_atomically(file, data.getvalue())


def read_state(file: Path) -> dict[str, Any]:
    """Read a training state; its step and seconds are zero if there is no file."""
    if not file.exists():
        return {"step": 0, "seconds": 0.0}
    with _state_errors(file):
        state = dict(torch.load(file, map_location="cpu", weights_only=True))
        return state | {"step": int(state["step"]), "seconds": float(state["seconds"])}


def load_state(file: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Load the newest training state into model and optimizer; return its step and seconds, zeros if there is none."""
    state = read_state(file)
    if file.exists():
        with _state_errors(file):
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
    return {"step": state["step"], "seconds": state["seconds"]}


@contextmanager
def _state_errors(file: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # torch.load raises whatever a damaged file leads it to
        first = str(error).split("\n")[0]
        raise ValueError(
            f"{file} is not a training state of this model ({first}); restore it, or pass --overwrite to begin again"
        ) from None
