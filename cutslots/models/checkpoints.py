"""Checkpoints: config.json, which names the parts of a model, and model.safetensors.

A checkpoint never runs code: weights are safetensors, and a plugin that registers parts is imported only if the caller
names it. The checkpoints that come with the package are in weights/, a folder for each name.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import cutslots.models.pair_discovery
import cutslots.models.spacetime_discovery  # noqa: F401  both register their models
from cutslots.models.discovery import MODELS, Discovery, ModelConfig, build
from cutslots.models.training_data import FILE as TRAINING_DATA
from cutslots.models.training_data import read_training_data
from cutslots.modules.checkpoint_files import (
    check_num_parameters,
    load_weights,
    parse_config,
    tensors_to_save,
    write_checkpoint,
)
from cutslots.registry import load_plugins, plugins_of

SHIPPED = Path(__file__).parent / "weights"


def save(model: Discovery, folder: Path, half: bool = False) -> None:
    """Write config.json and model.safetensors to a folder. With `half`, floating-point weights become float16."""
    if model.config is None:
        raise ValueError("model has no config, because it was built from modules; expected one that `build` has made")
    tensors = tensors_to_save(model)
    if half:
        tensors = {name: _to_half(name, value) for name, value in tensors.items()}
    write_checkpoint(folder, config_to_dict(model.config), tensors)


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
    load_weights(model, file)  # casts to float32
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
    config: ModelConfig = parse_config(path, "model", _checked_config)
    return config


def _checked_config(values: dict[str, Any]) -> ModelConfig:
    config: ModelConfig = MODELS.from_dict(values)
    check_num_parameters("model", lambda: MODELS.build(config), plugins_of(config))
    return config
