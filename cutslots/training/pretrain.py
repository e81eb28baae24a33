"""`pretrain`: an encoder learns from images without labels. The loop is that of `train`.

A run folder holds what that of `train` holds. Its checkpoint, config.json and model.safetensors, is the encoder alone:
`--encoder pretrained --encoder.checkpoint FOLDER` takes it. Validation metrics are those of the objective, and what
evaluation/features.py says of features.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning_fabric import Fabric
from PIL import Image
from torch import Tensor, nn

from cutslots.data.text import data_text
from cutslots.dataset import Dataset
from cutslots.evaluation.features import evaluate_features
from cutslots.evaluation.report import environment_section, training_sections
from cutslots.files import read_lines, write_atomically
from cutslots.models.discovery import check_is_tensor, to_float
from cutslots.models.feature_colors import feature_colors
from cutslots.modules.base import to_channels_last
from cutslots.modules.encoders import ENCODERS, Encoder
from cutslots.modules.pretrained import save_encoder
from cutslots.training.config import PretrainConfig
from cutslots.training.data import open_split
from cutslots.training.endless import endless_scenes
from cutslots.training.logger import NUM_REPORTED, NUM_SHOWN, RunLogger
from cutslots.training.loop import Task, run, to_device
from cutslots.training.losses import Loss, LossOutput
from cutslots.training.objectives import OBJECTIVES, Objective, ObjectiveOutput
from cutslots.training.report import device_name, run_figures
from cutslots.viz.curves import pretraining_curves
from cutslots.viz.html import figure, key_figures, page, png_image, section
from cutslots.viz.images import image_grid

EVALUATION_SEED = 0  # of the views and masks of validation images: the same at every evaluation
MAX_BATCH = 64  # images of a batch of an evaluation; the contrastive accuracy depends on it


def pretrain(config: PretrainConfig) -> Path:
    """Start or resume a run of `cutslots pretrain`; return its folder, which holds the encoder's checkpoint."""
    return run(Pretrain(config))


class PretrainingModel(nn.Module):
    """An encoder and the objective that it is trained by: maps images (B, 3, H, W), uint8, to a loss."""

    def __init__(self, encoder: Encoder, objective: Objective) -> None:
        super().__init__()
        self.encoder, self.objective = encoder, objective

    def forward(self, image: Tensor) -> ObjectiveOutput:
        check_is_tensor(image)
        return self.objective(self.encoder, to_float(image))

    def features(self, image: Tensor) -> Tensor:
        """Return the features (B, C, h, w) of images in [0, 1]."""
        return self.encoder(to_channels_last(self.encoder.normalize(image)))


def build_pretraining(config: PretrainConfig) -> PretrainingModel:
    """Build the encoder and the objective of a config."""
    encoder: Encoder = ENCODERS.build(config.encoder)
    context = {"feature_channels": encoder.out_channels, "feature_size": encoder.out_size(config.image_size)}
    objective: Objective = OBJECTIVES.build(config.objective, **context, image_size=config.image_size)
    return PretrainingModel(encoder, objective)


class Pretrain(Task):
    """Training of an encoder."""

    command = "pretrain"
    config: PretrainConfig

    def validate(self) -> None:
        """Build the model and open the data once, so that whatever is wrong is reported before anything is written."""
        config = self.config
        config.validate()
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            model = build_pretraining(config).eval()
            self._check(model)
            model(torch.zeros(model.objective.min_images, 3, *config.image_size, dtype=torch.uint8))
        if config.num_images == "endless":
            endless_scenes(config)
        for split in ("train", "val"):
            open_split(config, split, None)

    def _check(self, model: PretrainingModel) -> None:
        if not any(p.requires_grad for p in model.encoder.parameters()):
            name = ENCODERS.part_of(self.config.encoder).name
            raise ValueError(f"encoder is {name}, whose weights are frozen; expected one to train: --encoder.no-frozen")
        processes = self.config.devices * self.config.num_nodes
        if self.config.batch_size < model.objective.min_images * processes:
            name = OBJECTIVES.part_of(self.config.objective).name
            expected = f"expected at least {model.objective.min_images} images in each process"
            raise ValueError(f"batch_size is {self.config.batch_size}; for the objective {name}, {expected}")

    def prepare_model(self, folder: Path, fabric: Fabric) -> PretrainingModel:
        return to_device(build_pretraining(self.config), fabric)

    def make_loss(self) -> Loss:
        return ObjectiveLoss()

    def make_logger(self, folder: Path, fabric: Fabric, state: dict[str, Any]) -> RunLogger:
        return PretrainLogger(folder, self.config, fabric, state)


class ObjectiveLoss(Loss):
    """The loss that an objective has computed."""

    def __call__(self, output: ObjectiveOutput, image: Tensor, step: int) -> LossOutput:
        return LossOutput(output.loss, output.loss)

    def phase(self, step: int) -> int:
        return 0


class PretrainLogger(RunLogger):
    """Writes what a run of `cutslots pretrain` produces."""

    config: PretrainConfig

    def _status(self, loss: float) -> str:
        accuracy = f"  accuracy {100 * self.newest['accuracy']:.1f}" if "accuracy" in self.newest else ""
        return f"loss {loss:.4f}  {self.speed:.0f} images/s{accuracy}"

    def measure(self, model: Any, data: Dataset) -> dict[str, float]:
        was_training = model.training
        model.eval()
        metrics = evaluate_objective(model, data, self.fabric) | evaluate_features(model.features, data, self.fabric)
        model.train(was_training)
        return metrics

    def visualize(self, model: Any, data: Dataset) -> Image.Image:
        return feature_grid(model, data, NUM_SHOWN, self.fabric)

    def describe(self) -> str:
        percent = {"accuracy": "accuracy", "cluster_ari_fg": "ARI-FG of clusters"}
        shares = [f"{label} {100 * self.newest[name]:.1f}" for name, label in percent.items() if name in self.newest]
        ranks = f"ranks {self.newest['image_rank']:.1f} and {self.newest['position_rank']:.1f}"
        return "  ".join([f"loss {self.newest['loss']:.4f}", *shares, ranks])

    def save_checkpoint(self, model: Any) -> None:
        save_encoder(model.encoder, self.config.encoder, self.folder)

    def write_report(self, model: Any, data: Dataset) -> None:
        grid = feature_grid(model, data, NUM_REPORTED, self.fabric)
        write_pretraining_report(self.folder, self.config, grid, device_name(self.fabric))


@torch.no_grad()
def evaluate_objective(model: PretrainingModel, data: Dataset, fabric: Fabric) -> dict[str, float]:
    """Return the mean loss and the mean metrics of the objective over validation images, with the same views always."""
    sums: dict[str, float] = {}
    size = min(MAX_BATCH, len(data))
    batches = range(0, len(data) - size + 1, size)  # whole ones: the loss depends on how many images are compared
    devices = [fabric.device] if fabric.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), fabric.autocast():
        for i in batches:
            torch.manual_seed(EVALUATION_SEED + i)
            output = model(data.get_batch(np.arange(i, i + size), fabric.device).image)
            for name, value in {"loss": output.loss, **output.metrics}.items():
                sums[name] = sums.get(name, 0.0) + float(value)
    return {name: value / len(batches) for name, value in sums.items()}


@torch.no_grad()
def feature_grid(model: PretrainingModel, data: Dataset, count: int, fabric: Fabric) -> Image.Image:
    """Return validation images next to the first three principal components of their features."""
    was_training = model.training
    model.eval()
    image = data.get_batch(np.arange(min(count, len(data))), fabric.device).image
    with fabric.autocast():
        features = model.features(to_float(image)).float()
    model.train(was_training)
    colors = nn.functional.interpolate(feature_colors(features, features), image.shape[-2:], mode="nearest")
    pairs = zip(image.cpu(), (255 * colors).round().to(torch.uint8), strict=True)
    return image_grid([[x.movedim(0, -1).numpy() for x in pair] for pair in pairs])


def write_pretraining_report(folder: Path, config: PretrainConfig, grid: Image.Image, device: str) -> None:
    """Write report.html of the run in `folder`, with an image of features."""
    history = read_lines(folder / "metrics.jsonl")
    means: dict[str, float] = next((line["val"] for line in reversed(history) if "val" in line), {})
    shares = {"contrastive accuracy": "accuracy", "ARI-FG of clusters": "cluster_ari_fg"}
    figures = {label: f"{100 * means[name]:.1f}" for label, name in shares.items() if name in means}
    ranks = {"rank of images": "image_rank", "rank of positions": "position_rank"}
    figures |= {label: f"{means[name]:.1f}" for label, name in ranks.items() if name in means}
    caption = "Images and the first three principal components of their features"
    summary = "The encoder is trained on images without labels. Discovery can reconstruct its features."
    sections = [
        key_figures(figures | run_figures(config.seed, history)),
        section("Features of validation images", figure(png_image(grid, caption), caption, wide=True)),
        *training_sections(folder, pretraining_curves),
        environment_section(device),
    ]
    title = f"Pre-training: {config.preset} on {data_text(config.data)}"
    write_atomically(folder / "report.html", page(title, summary, *sections))
