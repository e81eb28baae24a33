"""The two files of a checkpoint, of a model or of an encoder: config.json and model.safetensors.

Reading them never runs code: weights are safetensors, and a plugin is imported only if the caller names it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cutslots.files import write_atomically
from cutslots.registry import loaded_plugins

CONFIG, WEIGHTS = "config.json", "model.safetensors"
MAX_CONFIG_BYTES = 2**20
MAX_PARAMETERS = 10**9  # of a network; a config.json that anybody wrote may ask for any number


def write_checkpoint(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Write config.json and model.safetensors to a folder."""
    from safetensors.torch import save as to_bytes

    write_atomically(folder / CONFIG, json.dumps(config, indent=1).encode())
    write_atomically(folder / WEIGHTS, to_bytes(tensors, metadata={"format": "pt"}))


def tensors_to_save(module: nn.Module) -> dict[str, Tensor]:
    """Return the state dict with a copy of each tensor that shares memory: safetensors has no shared ones."""
    seen: set[int] = set()
    untied = {}
    for name, value in module.state_dict().items():
        value = value.contiguous()
        pointer = value.untyped_storage().data_ptr()
        untied[name] = value.clone() if pointer in seen else value
        seen.add(pointer)
    return untied


def parse_config(path: Path, kind: str, parse: Callable[[dict[str, Any]], Any]) -> Any:
    """Return what `parse` makes of config.json; whatever is wrong with it becomes one sentence that names the file.

    `kind` is what the file describes: "model" or "encoder".
    """
    if not path.is_file():
        raise ValueError(f"there is no {path}, which describes the {kind}; expected it beside {WEIGHTS}")
    if path.stat().st_size > MAX_CONFIG_BYTES:
        raise ValueError(f"{path} has {path.stat().st_size:,} bytes; expected at most {MAX_CONFIG_BYTES:,}")
    try:
        values = json.loads(path.read_text())
    except (ValueError, RecursionError):
        raise ValueError(f"{path} is not readable as JSON") from None
    plugins = values.pop("plugins", []) if isinstance(values, dict) else []
    named = [name for name in plugins if isinstance(name, str)] if isinstance(plugins, list) else []
    missing = [name for name in named if name not in loaded_plugins()]
    try:
        return parse(values)
    except (ValueError, TypeError, IndexError) as error:
        if missing:
            raise ValueError(_missing_plugins(path, kind, missing)) from None
        raise ValueError(f"{path} is not the config of {'an' if kind[0] in 'aeiou' else 'a'} {kind}: {error}") from None


def _missing_plugins(path: Path, kind: str, plugins: list[str]) -> str:
    named = ", ".join(plugins)
    flags = " ".join(f"--plugin {name}" for name in plugins)
    described = f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}"
    return f"{path} describes {described} with parts of the plugin {named}; pass {flags}, or plugins=[...] in Python"


def check_num_parameters(kind: str, make: Callable[[], nn.Module], plugins: list[str]) -> None:
    """Refuse a network that is too large before it takes any memory. `plugins` are those that it needs."""
    try:
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            count = sum(x.numel() for x in make().state_dict().values())  # has no frozen network
    except (RuntimeError, NotImplementedError) as error:  # a plugin need not support the meta device
        if plugins:
            return
        raise ValueError(f"the {kind} cannot be built: {error}") from None
    if count > MAX_PARAMETERS:
        raise ValueError(f"the {kind} would have {count:.1e} parameters; expected at most {MAX_PARAMETERS:.0e}")


def load_weights(module: nn.Module, file: Path) -> None:
    """Load a .safetensors file into a network; half precision becomes the network's. Raise if it does not fit."""
    tensors = _read_tensors(file)
    problem = _difference(module.state_dict(), tensors)
    if problem:
        raise ValueError(f"{file} does not fit its config.json: {problem}")
    module.load_state_dict(tensors)
    for name, value in module.state_dict().items():
        if not value.isfinite().all():
            raise ValueError(f"{file} holds values in {name} that are not finite; expected the weights of a good run")


def _read_tensors(file: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(file)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} is not a complete safetensors file ({error})") from None


def _difference(expected: dict[str, Tensor], given: dict[str, Tensor]) -> str:
    """Return the first difference between two state dicts in words, or an empty string."""
    for name in sorted(expected.keys() | given.keys()):
        if name not in given:
            return f"{name} is missing"
        if name not in expected:
            return f"{name} is unexpected"
        if expected[name].shape != given[name].shape:
            return f"{name} has shape {tuple(given[name].shape)}, expected {tuple(expected[name].shape)}"
        if expected[name].is_floating_point() != given[name].is_floating_point():
            return f"{name} has dtype {given[name].dtype}, expected {expected[name].dtype}"
    return ""
