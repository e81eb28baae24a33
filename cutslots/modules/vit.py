"""The encoder `vit`: patch features of a pre-trained vision transformer, by Hugging Face's transformers.

A checkpoint is a folder, or the name of one on the Hugging Face Hub that was downloaded before: nothing is downloaded
here. Weights are safetensors only, because a pickled file may run code.

    normalize    the mean and the standard deviation of preprocessor_config.json
    tokens       of the last layer, after the final norm of the architecture; CLS and register tokens are left out
    positions    embeddings are interpolated to the grid of patches, as the architecture does it
    MAE          sees all patches: nothing is masked

backbone.py says how a frozen transformer is saved and loaded.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cutslots.modules.backbone import BackboneConfig, BackboneEncoder
from cutslots.modules.encoders import ENCODERS

MODEL_TYPES = ("vit", "dinov2", "dinov2_with_registers", "vit_mae")  # in config.json; DINO's is vit
WEIGHTS = ("model.safetensors", "model.safetensors.index.json")  # one of them: large checkpoints have several files
PREPROCESSOR = "preprocessor_config.json"
UNUSED = ("pooler.", "mask_token")  # weights that patch features do not depend on
SINES = "position_embeddings"  # of an MAE: sines and cosines, which are not trained


@dataclass(frozen=True)
class ViTConfig(BackboneConfig):
    checkpoint: str = "facebook/dinov2-small"
    """Folder of a DINO, DINOv2, MAE or ViT checkpoint, or its name on the Hugging Face Hub, downloaded before."""


class Normalization(NamedTuple):
    """Mean and standard deviation of each channel of images in [0, 1]."""

    mean: tuple[float, ...]
    std: tuple[float, ...]


@ENCODERS.register("vit", ViTConfig)
class ViTEncoder(BackboneEncoder):
    """Patch features of a pre-trained vision transformer: DINO, DINOv2, MAE or ViT.

    `checkpoint` is a folder or a name on the Hub. The size of images has to be a multiple of the patch size.
    """

    def __init__(self, checkpoint: str | Path, frozen: bool = True, lr_scale: float = 0.1) -> None:
        super().__init__(checkpoint, frozen, lr_scale)
        self.normalization = read_normalization(find_folder(self.checkpoint))
        config: Any = self.backbone.config
        self.out_channels: int = config.hidden_size
        self.patch_size = _pair(config.patch_size)
        self.num_extra_tokens: int = 1 + getattr(config, "num_register_tokens", 0)
        fixed = (*UNUSED, SINES) if config.model_type == "vit_mae" else UNUSED
        for name, parameter in self.backbone.named_parameters():
            if any(part in name for part in fixed):
                parameter.requires_grad_(False)

    def load_backbone(self) -> Any:
        return load_backbone(find_folder(self.checkpoint))

    def out_size(self, image_size: tuple[int, int]) -> tuple[int, int]:
        (height, width), (rows, columns) = image_size, self.patch_size
        if height % rows or width % columns:
            nearest = tuple(max(1, round(a / b)) * b for a, b in zip(image_size, self.patch_size, strict=True))
            raise ValueError(
                f"image_size is {(height, width)}; expected multiples of {self.patch_size}, the size of the patches "
                f"of {self.checkpoint}, such as {nearest}"
            )
        return height // rows, width // columns

    def normalize(self, image: Tensor) -> Tensor:
        channels = zip(image.unbind(1), *self.normalization, strict=True)
        return torch.stack([(x - mean) / std for x, mean, std in channels], 1)

    def forward(self, x: Tensor) -> Tensor:
        self.materialize(x)
        if x.shape[0] == 0:  # transformers cannot reshape an empty batch
            return self(x.new_zeros(1, *x.shape[1:]) + x.sum())[:0]
        size = self.out_size((x.shape[2], x.shape[3]))
        tokens: Tensor = self.backbone(x, **self._options(x, size)).last_hidden_state
        return tokens[:, self.num_extra_tokens :].mT.unflatten(2, size)

    def _options(self, x: Tensor, size: tuple[int, int]) -> dict[str, Any]:
        """Return the arguments for positions of any size, and for all patches of an MAE in their order."""
        kind = self.backbone.config.model_type
        options: dict[str, Any] = {"interpolate_pos_encoding": True} if kind in ("vit", "vit_mae") else {}
        if kind == "vit_mae":  # it sorts patches by this, and keeps all of them: load_backbone sets the mask ratio
            options["noise"] = torch.arange(size[0] * size[1], device=x.device).expand(x.shape[0], -1)
        return options

    def fingerprint(self) -> dict[str, Any] | None:
        if not self.frozen:
            return None
        digest = hashlib.sha256((find_folder(self.checkpoint) / "config.json").read_bytes()).hexdigest()
        return {"weight_norm": int(self.weight_norm), "config": digest, "normalization": self.normalization}


# --------------------------------------------------------------------------------------------------------- checkpoints


def find_folder(checkpoint: str) -> Path:
    """Return the folder of a checkpoint: itself, or where the Hub's client has downloaded it to."""
    from huggingface_hub import snapshot_download

    path = Path(checkpoint).expanduser()
    if not checkpoint or not path.is_dir():
        try:
            path = Path(snapshot_download(checkpoint, local_files_only=True))
        except (OSError, ValueError):
            raise ValueError(
                f"encoder.checkpoint is {checkpoint!r}, which is no folder and was not downloaded; expected a folder, "
                f"or a name on the Hugging Face Hub after `hf download {_hub_name(checkpoint)}`"
            ) from None
    if not (path / "config.json").is_file() or not any((path / name).is_file() for name in WEIGHTS):
        raise ValueError(
            f"encoder.checkpoint is {checkpoint!r}; expected config.json and model.safetensors in {path}, "
            "as save_pretrained of transformers writes them (pickled weights may run code and are not loaded)"
        )
    return path


def _hub_name(checkpoint: str) -> str:
    is_name = checkpoint.count("/") == 1 and not checkpoint.startswith((".", "/", "~")) and not checkpoint.endswith("/")
    return checkpoint if is_name else ViTConfig.checkpoint


def load_backbone(folder: Path) -> Any:
    """Return the transformer of a checkpoint in evaluation mode; on the meta device its weights are not read."""
    if importlib.util.find_spec("transformers") is None:
        raise ValueError("encoder vit needs the package transformers: pip install 'cutslots[vit]'")
    kind = _read_json(folder / "config.json").get("model_type")
    if kind not in MODEL_TYPES:
        raise ValueError(f"encoder.checkpoint: {folder} has model_type {kind!r}; expected {', '.join(MODEL_TYPES)}")
    from transformers import AutoConfig, AutoModel

    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        config.mask_ratio = 0.0  # of an MAE; the others have none
        if torch.get_default_device().type == "meta":
            return _without_pooler(AutoModel.from_config(config))
        model = _read_weights(AutoModel, folder, config)
    except ValueError:
        raise
    except Exception as error:  # transformers and safetensors raise whatever a damaged file leads them to
        first = str(error).strip().split("\n")[0]
        raise ValueError(f"encoder.checkpoint: {folder} cannot be loaded: {first:.200}") from None
    return _without_pooler(model).to(torch.get_default_dtype()).eval()


def _read_weights(auto_model: Any, folder: Path, config: Any) -> Any:
    options = {"local_files_only": True, "use_safetensors": True, "trust_remote_code": False}
    with _quiet():
        model, found = auto_model.from_pretrained(folder, config=config, output_loading_info=True, **options)
    missing = sorted(name for name in found["missing_keys"] if not any(part in name for part in UNUSED))
    if missing:
        raise ValueError(f"encoder.checkpoint: the weights in {folder} lack {missing[0]}; expected a complete file")
    return model


def _without_pooler(model: Any) -> Any:
    """Remove the layer for classification, whose weights would never get a gradient."""
    if getattr(model, "pooler", None) is not None:
        model.pooler = None
    return model


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence transformers' progress bar and its report of weights that are not used, such as a decoder's."""
    from transformers.utils import logging

    verbosity, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bar:
            logging.enable_progress_bar()


def read_normalization(folder: Path) -> Normalization:
    """Return how the checkpoint's own preprocessing normalises images."""
    path = folder / PREPROCESSOR
    if not path.is_file():
        raise ValueError(
            f"encoder.checkpoint: there is no {path}, which says how images are normalised; "
            'expected a JSON object with "image_mean" and "image_std"'
        )
    values = _read_json(path)
    if values.get("do_normalize") is False:
        return Normalization((0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
    mean: Any = values.get("image_mean")
    std: Any = values.get("image_std")
    if not _is_channels(mean) or not _is_channels(std) or not all(x > 0 for x in std):
        raise ValueError(
            f"encoder.checkpoint: {path} has image_mean {mean!r:.99} and image_std {std!r:.99}; expected three numbers "
            "each, those of image_std positive"
        )
    return Normalization(tuple(mean), tuple(std))


def _is_channels(values: Any) -> bool:
    return isinstance(values, list) and len(values) == 3 and all(isinstance(x, int | float) for x in values)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text())
    except (ValueError, OSError, RecursionError):
        values = None
    if not isinstance(values, dict):
        raise ValueError(f"encoder.checkpoint: {path} is not readable as a JSON object")
    return values


def _pair(size: Any) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else (size[0], size[1])
