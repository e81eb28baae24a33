"""The encoder `vit`: patch features of a pre-trained vision transformer, by Hugging Face's transformers.

A checkpoint is a folder, or the name of one on the Hugging Face Hub that was downloaded before: nothing is downloaded
here. Weights are safetensors only, because a pickled file may run code.

    normalize    the mean and the standard deviation of preprocessor_config.json
    tokens       of the last layer, after the final norm of the architecture; CLS and register tokens are left out
    positions    embeddings are interpolated to the grid of patches, as the architecture does it
    MAE          sees all patches: nothing is masked

A frozen transformer is not in the state dict. The config of the model names it. It is read from its own checkpoint, and
again whenever the encoder moves to another device or precision: `to_empty` and `half` leave nothing behind. The state
dict holds the norm of its weights, by which another checkpoint in its place is noticed. A fine-tuned transformer is in
the state dict like any other part.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from cutslots.modules.base import first_parameter
from cutslots.modules.encoders import ENCODERS, Encoder, EncoderConfig
from cutslots.programs.constants import ConstantLayer
from cutslots.registry import Range

MODEL_TYPES = ("vit", "dinov2", "dinov2_with_registers", "vit_mae")  # in config.json; DINO's is vit
WEIGHTS = ("model.safetensors", "model.safetensors.index.json")  # one of them: large checkpoints have several files
PREPROCESSOR = "preprocessor_config.json"
UNUSED = ("pooler.", "mask_token")  # weights that patch features do not depend on
NORM_UNIT = 1e-6  # of the norm that the state dict holds, an integer so that half precision does not round it
NORM_TOLERANCE = 1e-5  # of the norm, relative: sums depend on their order, which depends on transformers' version
SINES = "position_embeddings"  # of an MAE: sines and cosines, which are not trained


@dataclass(frozen=True)
class ViTConfig(EncoderConfig):
    checkpoint: str = "facebook/dinov2-small"
    """Folder of a DINO, DINOv2, MAE or ViT checkpoint, or its name on the Hugging Face Hub, downloaded before."""
    frozen: bool = True
    """Keep the weights of the checkpoint. Feature reconstruction needs it; --encoder.no-frozen fine-tunes them."""
    lr_scale: Annotated[float, Range(0, 65_536)] = 0.1
    """Factor on the learning rate of a transformer that is fine-tuned."""


class Normalization(NamedTuple):
    """Mean and standard deviation of each channel of images in [0, 1]."""

    mean: tuple[float, ...]
    std: tuple[float, ...]


@ENCODERS.register("vit", ViTConfig)
class ViTEncoder(Encoder, ConstantLayer):
    """Patch features of a pre-trained vision transformer: DINO, DINOv2, MAE or ViT.

    `checkpoint` is a folder or a name on the Hub. The size of images has to be a multiple of the patch size.
    """

    weight_norm: Tensor

    def __init__(self, checkpoint: str | Path, frozen: bool = True, lr_scale: float = 0.1) -> None:
        super().__init__()
        self.checkpoint, self.frozen, self.lr_scale = str(checkpoint), frozen, lr_scale
        folder = find_folder(self.checkpoint)
        self.normalization = read_normalization(folder)
        self.backbone = load_backbone(folder)
        config: Any = self.backbone.config
        self.out_channels: int = config.hidden_size
        self.patch_size = _pair(config.patch_size)
        self.num_extra_tokens: int = 1 + getattr(config, "num_register_tokens", 0)
        fixed = (*UNUSED, SINES) if config.model_type == "vit_mae" else UNUSED
        for name, parameter in self.backbone.named_parameters():
            if frozen or any(part in name for part in fixed):
                parameter.requires_grad_(False)
        self.train(self.training)
        if frozen:
            self.register_buffer("weight_norm", weight_norm(self.backbone))
            self.register_state_dict_post_hook(_drop_backbone)
            self.register_load_state_dict_post_hook(_expect_no_backbone)

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

    def parameter_groups(self) -> list[dict[str, Any]]:
        return [{"params": [p for p in self.parameters() if p.requires_grad], "lr_scale": self.lr_scale}]

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        if self.frozen:
            self.backbone.eval()  # dropout and stochastic depth would change the features
        return self

    def precompute(self) -> None:
        """Read frozen weights again, in the precision and on the device of the encoder."""
        if not self.frozen or self.device.type == "meta":
            return
        backbone = load_backbone(find_folder(self.checkpoint))
        if first_parameter(self.backbone).device.type == "meta":
            self.backbone.to_empty(device=self.device)
        self.backbone.load_state_dict(backbone.state_dict())
        self.weight_norm = weight_norm(backbone).to(self.device)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        given = state_dict.get(f"{prefix}weight_norm")
        if self.frozen and given is not None and "meta" not in (given.device.type, self.device.type):
            expected, found = (int(x) * NORM_UNIT for x in (given, self.weight_norm))
            if abs(found - expected) > NORM_TOLERANCE * expected:
                raise ValueError(
                    f"encoder.checkpoint is {self.checkpoint!r}, whose weights have norm {found:.6g}; expected the "
                    f"checkpoint that the model was trained with, whose weights have norm {expected:.6g}"
                )
        super()._load_from_state_dict(state_dict, prefix, *args)


def weight_norm(backbone: nn.Module) -> Tensor:
    """Return the Euclidean norm of all weights in units of 1e-6, as an integer; zero on the meta device."""
    if first_parameter(backbone).device.type == "meta":
        return torch.zeros((), dtype=torch.int64)
    squares = sum(float(p.detach().double().square().sum()) for p in backbone.parameters())
    return torch.tensor(round(math.sqrt(squares) / NORM_UNIT), dtype=torch.int64)


def _drop_backbone(module: nn.Module, state: dict[str, Tensor], prefix: str, metadata: Any) -> None:
    for name in [name for name in state if name.startswith(f"{prefix}backbone.")]:
        del state[name]


def _expect_no_backbone(module: nn.Module, keys: Any) -> None:
    """Take the weights of the frozen transformer from the list of missing ones."""
    backbone: Any = module.backbone
    names = dict(backbone.named_parameters())
    keys.missing_keys[:] = [key for key in keys.missing_keys if key.rpartition("backbone.")[2] not in names]


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
