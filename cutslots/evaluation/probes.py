"""Probes: how well the slot of an object predicts the object's shape, color, size and position.

The slots of a trained model are computed for built-in scenes. True objects are matched to slots one to one, for the
largest sum of cosine similarities between true masks and decoder masks. A probe is then trained to predict all
properties of an object from its slot, and scored on other scenes. There are two: a linear layer, and an MLP with one
hidden layer of 256 units. This follows Dittadi et al. (2022), with the settings of their object-centric-library
(github.com/addtt/object-centric-library), but without early stopping.

    property   target                                                                 score
    shape      class                                                                  accuracy
    color      class; where materials have their own colors, the mean color, RGB      accuracy; R2
    size       class                                                                  accuracy
    position   center of the object in the image, in [-1, 1]                          R2

Shapes: B images, K slots, D slot dimension, N objects of all images.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cutslots.data.open import open_dataset
from cutslots.dataset import Dataset
from cutslots.devices import resolve_device
from cutslots.files import progress, write_atomically
from cutslots.models.checkpoints import load
from cutslots.models.discovery import Discovery, check_finite
from cutslots.scenes import Scenes
from cutslots.scenes.sample import FAMILIES
from cutslots.scenes.scene_batch import SceneBatch

PROBES = ("linear", "mlp")
HIDDEN = 256  # units of the MLP
STEPS, LEARNING_RATE = 6000, 1e-3
DECAY_STEPS, DECAY = (2000, 4000), 0.5  # of the learning rate
BATCH_SIZE = 400  # objects; about those of 64 images
IMAGE_BATCH_SIZE = 32


class Objects(NamedTuple):
    """Slots (N, D) of objects and their properties: classes (N,) int64, or values (N, d) float32."""

    slots: Tensor
    properties: dict[str, Tensor]

    @staticmethod
    def concatenate(parts: list[Objects]) -> Objects:
        names = parts[0].properties
        properties = {name: torch.cat([part.properties[name] for part in parts]) for name in names}
        return Objects(torch.cat([part.slots for part in parts]), properties)


def probe(
    checkpoint: str,
    data: str,
    out: Path | None = None,
    num_train: int = 2000,
    num_test: int = 500,
    device: str = "auto",
    plugins: Iterable[str | Path] = (),
    quiet: bool = False,
) -> dict[str, Any]:
    """Train and score the probes of a checkpoint on built-in scenes; print a table; write the scores to `out`.

    The probes are trained on scenes of the split val, which the model has not seen, and scored on the split test.
    """
    target = resolve_device(device)
    model = load(checkpoint, target, plugins)
    splits = {"val": num_train, "test": num_test}
    opened = {split: _open_scenes(data, split, model, count) for split, count in splits.items()}
    train, test = (collect_objects(model, scenes, target, quiet) for scenes in opened.values())
    scores = {"majority": majority_scores(train, test)}
    for kind in PROBES:
        scores[kind] = score_probe(train_probe(train, kind), test)
    result = {
        "checkpoint": str(checkpoint),
        "data": data,
        "num_train": len(train.slots),
        "num_test": len(test.slots),
        "measure": {name: "accuracy" if values.ndim == 1 else "R2" for name, values in test.properties.items()},
        "scores": scores,
    }
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(out, json.dumps(result, indent=1).encode())
    if not quiet:
        print(scores_text(result))
    return result


def _open_scenes(data: str, split: str, model: Discovery, count: int) -> Scenes:
    if count < 2:
        raise ValueError(f"the number of scenes is {count}; expected at least 2")
    scenes: Dataset = open_dataset(data, split, model.image_size, count, videos=True)
    if not isinstance(scenes, Scenes) or scenes.frames > 1 or model.spacetime:
        raise ValueError(f"data is {data!r}; expected built-in scenes that are images, and a model for images")
    return scenes


def scores_text(result: dict[str, Any]) -> str:
    """Return the table for a terminal, in percent."""
    names = result["measure"]
    lines = [["probe", *(f"{name} ({measure})" for name, measure in names.items())]]
    for kind, scores in result["scores"].items():
        lines.append([kind, *(f"{100 * scores[name]:.1f}" for name in names)])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(cell.rjust(w) for cell, w in zip(line, widths, strict=True)) for line in lines)


# -------------------------------------------------------------------------------------------------------------- objects


@torch.no_grad()
def collect_objects(model: Discovery, scenes: Scenes, device: torch.device, quiet: bool = True) -> Objects:
    """Return the slots and properties of all objects that have pixels and are matched to a slot."""
    parts, was_training = [], model.training
    model.eval()
    with progress(quiet) as bar:
        starts = range(0, len(scenes), IMAGE_BATCH_SIZE)
        for b, start in enumerate(bar.track(starts, description=f"slots, {scenes.split}")):
            indices = np.arange(start, min(start + IMAGE_BATCH_SIZE, len(scenes)))
            sample, properties = scenes.get_batch(indices, device), object_properties(scenes, scenes.sample(indices))
            torch.manual_seed(b)  # Slot Attention samples its initial slots
            output = model(sample.image)
            check_finite(model, masks=output.masks, reconstruction=output.reconstruction)
            rows, objects, slots = match_objects(sample.mask, output.masks.float())
            matched = {name: values[rows, objects - 1] for name, values in properties.items()}
            parts.append(Objects(output.slots.float().cpu()[rows, slots], matched))
    model.train(was_training)
    return Objects.concatenate(parts)


def match_objects(true: Tensor, masks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Match objects of true labels (B, H, W) to masks (B, K, H, W) by cosine similarity, one to one.

    Returns for every match the image, the label of the object and the slot, (N,) each. With fewer slots than objects,
    some objects have no match.
    """
    from scipy.optimize import linear_sum_assignment  # slow to import

    matches = []
    flat = F.normalize(masks.flatten(2), dim=2)
    for b, labels in enumerate(true.flatten(1).long()):
        used = labels.unique()
        used = used[used > 0]
        similarity = F.normalize((labels == used[:, None]).to(flat.dtype), dim=1) @ flat[b].T
        objects, slots = linear_sum_assignment(similarity.cpu().numpy(), maximize=True)
        matches += [(b, int(used[o]), int(k)) for o, k in zip(objects, slots, strict=True)]
    rows, objects, slots = torch.tensor(matches, dtype=torch.long).reshape(-1, 3).unbind(1)
    return rows, objects, slots


def object_properties(scenes: Scenes, batch: SceneBatch) -> dict[str, Tensor]:
    """Return the properties of all objects of a batch: classes (B, O) or values (B, O, d)."""
    batch = batch.to("cpu")
    center = batch.cameras().project(batch.position[:, 0])
    sizes = torch.tensor(sorted(FAMILIES[scenes.family].sizes), dtype=torch.float64)
    named = not FAMILIES[scenes.family].textured
    return {
        "shape": batch.shape,
        "color": batch.color if named else batch.palette[:, 1:].mean(2).float(),
        "size": (batch.size[..., None] - sizes).abs().argmin(2),
        "position": center.float(),
    }


# --------------------------------------------------------------------------------------------------------------- probes


class Probe(nn.Module):
    """Predicts all properties from slots (N, D): logits (N, C) of classes, values (N, d) in units of the targets."""

    def __init__(self, train: Objects, kind: str) -> None:
        super().__init__()
        if kind not in PROBES:
            raise ValueError(f"probe is {kind!r}; expected one of {', '.join(PROBES)}")
        self.widths = {name: _width(values) for name, values in train.properties.items()}
        D, outputs = train.slots.shape[1], sum(self.widths.values())
        hidden = [nn.Linear(D, HIDDEN), nn.LeakyReLU(), nn.Linear(HIDDEN, outputs)]
        self.layers = nn.Sequential(*(hidden if kind == "mlp" else [nn.Linear(D, outputs)]))
        self.mean, self.scale = _statistics(train.slots)
        self.statistics = {name: _statistics(v) for name, v in train.properties.items() if v.ndim == 2}

    def forward(self, slots: Tensor) -> dict[str, Tensor]:
        parts = self.layers((slots - self.mean) / self.scale).split(list(self.widths.values()), 1)
        return dict(zip(self.widths, parts, strict=True))

    def loss(self, slots: Tensor, properties: dict[str, Tensor]) -> Tensor:
        """Return the sum over properties of cross entropies and squared errors of standardized values."""
        losses = []
        for name, predicted in self(slots).items():
            if name in self.statistics:
                mean, scale = self.statistics[name]
                losses.append(F.mse_loss(predicted, (properties[name] - mean) / scale))
            else:
                losses.append(F.cross_entropy(predicted, properties[name]))
        return torch.stack(losses).sum()

    def predict(self, slots: Tensor) -> dict[str, Tensor]:
        """Return classes (N,) and values (N, d)."""
        return {
            name: self.statistics[name][1] * x + self.statistics[name][0] if name in self.statistics else x.argmax(1)
            for name, x in self(slots).items()
        }


def _width(values: Tensor) -> int:
    return values.shape[1] if values.ndim == 2 else int(values.max()) + 1


def _statistics(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation of columns; 1 for constant ones."""
    scale = values.std(0, correction=0)
    return values.mean(0), scale.where(scale > 0, 1)


def train_probe(train: Objects, kind: str, steps: int = STEPS, seed: int = 0) -> Probe:
    """Return a trained probe, "linear" or "mlp". The same seed gives the same probe."""
    if len(train.slots) == 0:
        raise ValueError("no object was matched to a slot; expected at least one")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        probe = Probe(train, kind)
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(probe.parameters(), LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, DECAY_STEPS, DECAY)
    for _ in range(steps):
        rows = torch.randint(len(train.slots), (BATCH_SIZE,), generator=generator)
        optimizer.zero_grad()
        probe.loss(train.slots[rows], {name: values[rows] for name, values in train.properties.items()}).backward()
        optimizer.step()
        schedule.step()
    return probe


@torch.no_grad()
def score_probe(probe: Probe, test: Objects) -> dict[str, float]:
    """Return accuracies of classes and R2 of values."""
    return {name: _score(x, test.properties[name]) for name, x in probe.predict(test.slots).items()}


def majority_scores(train: Objects, test: Objects) -> dict[str, float]:
    """Return the scores of the most frequent class and of the mean value of the training objects."""
    constant = {n: v.mode().values if v.ndim == 1 else v.mean(0) for n, v in train.properties.items()}
    return {name: _score(x.expand_as(test.properties[name]), test.properties[name]) for name, x in constant.items()}


def _score(predicted: Tensor, true: Tensor) -> float:
    """Return the accuracy of classes (N,), or R2 of values (N, d), the mean over columns."""
    if true.ndim == 1:
        return (predicted == true).double().mean().item()
    predicted, true = predicted.double(), true.double()
    residual, total = (predicted - true).square().sum(0), (true - true.mean(0)).square().sum(0)
    return (1 - residual / total.clamp(min=1e-12)).mean().item()
