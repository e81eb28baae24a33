"""Checkpoints: config.json, which names the parts of a model, and model.safetensors.

A checkpoint never runs code: weights are safetensors, and a plugin that registers parts is imported only if the caller
names it. The checkpoints that come with the package are in weights/, a folder for each name.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import cutslots.models.pair_discovery
import cutslots.models.spacetime_discovery  # noqa: F401  both register their models
from cutslots.files import write_atomically
from cutslots.models.discovery import MODELS, Discovery, ModelConfig, build
from cutslots.models.training_data import FILE as TRAINING_DATA
from cutslots.models.training_data import read_training_data
from cutslots.registry import load_plugins, loaded_plugins, plugins_of

SHIPPED = Path(__file__).parent / "weights"
MAX_CONFIG_BYTES = 2**20
MAX_PARAMETERS = 10**9  # of a model; a config.json that anybody wrote may ask for any number


def save(model: Discovery, folder: Path, half: bool = False) -> None:
    """Write config.json and model.safetensors to a folder. With `half`, floating-point weights become float16."""
    from safetensors.torch import save as to_bytes

    if model.config is None:
        raise ValueError("model has no config, because it was built from modules; expected one that `build` has made")
    tensors = _untied({name: value.contiguous() for name, value in model.state_dict().items()})
    if half:
        tensors = {name: _to_half(name, value) for name, value in tensors.items()}
    write_atomically(folder / "config.json", json.dumps(config_to_dict(model.config), indent=1).encode())
    write_atomically(folder / "model.safetensors", to_bytes(tensors, metadata={"format": "pt"}))


def _untied(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors with a copy of each that shares memory with an earlier one: safetensors has no shared ones."""
    seen: set[int] = set()
    untied = {}
    for name, value in tensors.items():
        pointer = value.untyped_storage().data_ptr()
        untied[name] = value.clone() if pointer in seen else value
        seen.add(pointer)
    return untied


def config_to_dict(config: ModelConfig) -> dict[str, Any]:
    """Return the content of config.json: the parts of the model, and the plugins that register them."""
    return MODELS.to_dict(config) | {"plugins": plugins_of(config)}


def _to_half(name: str, value: Tensor) -> Tensor:
    if not value.is_floating_point():
        return value
    half = value.half()
    if not half.isfinite().all():
        raise ValueError(f"half: {name} holds {value.abs().max():.6g}; expected finite values up to 65,504")
    return half


def load(checkpoint: str | Path, device: torch.device | str = "cpu", plugins: Iterable[str | Path] = ()) -> Discovery:
    """Load a model in evaluation mode from a run folder, a .safetensors file or the name of a checkpoint.

    Args:
        checkpoint: A folder with config.json and model.safetensors, that file, or a name such as "plain-128".
        device: The device to load to.
        plugins: Python files or modules that register the parts of the model, if it has any of its own.

    The model is float32, also where the file holds float16 or bfloat16. `model.training_data` says what it was trained
    on, if the folder holds a training_data.json.
    """
    load_plugins(plugins)
    file = checkpoint_file(checkpoint)
    model = build(read_config(file.with_name("config.json")))
    tensors = _read_tensors(file)
    problem = _difference(model.state_dict(), tensors)
    if problem:
        raise ValueError(f"{file} does not fit its config.json: {problem}")
    model.load_state_dict(tensors)  # casts to float32
    for name, value in model.state_dict().items():
        if not value.isfinite().all():
            raise ValueError(f"{file} holds values in {name} that are not finite; expected the weights of a good run")
    model.checkpoint = str(file)
    model.training_data = read_training_data(file.with_name(TRAINING_DATA))
    return model.to(device).eval()


def checkpoint_file(checkpoint: str | Path) -> Path:
    """Return the path of a checkpoint's model.safetensors."""
    path = Path(find_checkpoint(checkpoint))
    if path.is_dir():
        path = path / "model.safetensors"
    if not path.is_file():
        names = ", ".join(checkpoint_names())
        raise ValueError(
            f"checkpoint: there is no {path}; expected a run folder, a .safetensors file or a name ({names})"
        )
    if path.suffix != ".safetensors":
        raise ValueError(
            f"checkpoint: {path} is not a .safetensors file; pickled checkpoints may run code and are not loaded"
        )
    return path


def checkpoint_names() -> list[str]:
    """Return the names of the checkpoints that come with the package."""
    return sorted(path.name for path in SHIPPED.glob("*") if path.is_dir())


def find_checkpoint(checkpoint: str | Path) -> str | Path:
    """Return the folder of a checkpoint of this package, unless a file or folder of that name holds a checkpoint."""
    path = Path(checkpoint)
    own = path.is_file() or (path / "model.safetensors").is_file()
    return SHIPPED / path if str(path) in checkpoint_names() and not own else checkpoint


def read_config(path: Path) -> ModelConfig:
    """Read config.json; whatever is wrong with it becomes one sentence that names the file."""
    if not path.is_file():
        raise ValueError(f"there is no {path}, which describes the model; expected it beside model.safetensors")
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
        config = MODELS.from_dict(values)
        _check_parameters(config)
    except (ValueError, TypeError, IndexError) as error:
        if missing:
            raise ValueError(_missing_plugins(path, missing)) from None
        raise ValueError(f"{path} is not the config of a model: {error}") from None
    return config


def _missing_plugins(path: Path, plugins: list[str]) -> str:
    named = ", ".join(plugins)
    flags = " ".join(f"--plugin {name}" for name in plugins)
    return f"{path} describes a model with parts of the plugin {named}; pass {flags}, or plugins=[...] in Python"


def _check_parameters(config: ModelConfig) -> None:
    """Refuse a model that is too large before it takes any memory."""
    try:
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            count = sum(x.numel() for x in MODELS.build(config).state_dict().values())  # has no frozen ViT
    except (RuntimeError, NotImplementedError) as error:  # a plugin need not support the meta device
        if plugins_of(config):
            return
        raise ValueError(f"the model cannot be built: {error}") from None
    if count > MAX_PARAMETERS:
        raise ValueError(f"the model would have {count:.1e} parameters; expected at most {MAX_PARAMETERS:.0e}")


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
