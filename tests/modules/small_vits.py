"""Small vision transformers with random weights, saved as folders by transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers

PATCH, SIZE, CHANNELS = 4, 16, 24  # pixels of a patch; of the images of pre-training; of features
COMMON = {
    "hidden_size": CHANNELS,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "image_size": SIZE,
    "patch_size": PATCH,
    "hidden_dropout_prob": 0.1,  # of no effect in evaluation mode
}
KINDS = {
    "vit": (transformers.ViTModel, transformers.ViTConfig, {"intermediate_size": 40}),
    "mae": (transformers.ViTMAEModel, transformers.ViTMAEConfig, {"intermediate_size": 40}),
    "dinov2": (transformers.Dinov2Model, transformers.Dinov2Config, {"mlp_ratio": 2}),
    "dinov2 with registers": (
        transformers.Dinov2WithRegistersModel,
        transformers.Dinov2WithRegistersConfig,
        {"mlp_ratio": 2, "num_register_tokens": 3},
    ),
}
MEAN, STD = [0.4, 0.5, 0.6], [0.2, 0.25, 0.5]


def make_vit(folder: Path, kind: str = "vit", **changes: Any) -> Any:
    """Write a checkpoint to a folder, and return the model in evaluation mode."""
    model, config, options = KINDS[kind]
    transformers.utils.logging.disable_progress_bar()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        made = model(config(**COMMON | options | changes))
        with torch.no_grad():
            for parameter in made.parameters():  # the norms and the register tokens start at constants
                parameter.add_(0.1 * torch.randn_like(parameter))
    made.save_pretrained(folder)
    preprocessor = {"do_normalize": True, "image_mean": MEAN, "image_std": STD}
    (folder / "preprocessor_config.json").write_text(json.dumps(preprocessor))
    return made.eval()
