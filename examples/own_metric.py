"""A custom metric: the number of slots that share the background.

python examples/own_metric.py
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor

from cutslots import Scenes, load
from cutslots.evaluation.metrics import MetricRows, contingency, image_metrics


def background_slots(true: Tensor, predicted: Tensor, min_share: float = 0.05) -> Tensor:
    """Return how many slots cover at least `min_share` of the background, (B,), from integer labels (B, H, W)."""
    background = contingency(true, predicted)[:, 0]  # (B, K): pixels with true label 0, by predicted label
    return (background >= min_share * background.sum(1, keepdim=True)).sum(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--num-images", type=int, default=64)
    args = parser.parse_args()
    model = load("tiny-64")
    scenes = Scenes("plain", split="test", size=model.image_size, num_objects=(2, 5))
    rows = MetricRows()
    for indices in torch.arange(args.num_images).split(16):
        image, true = scenes.get_batch(indices)
        with torch.no_grad():
            predicted = model(image).masks.argmax(1)
        metrics = image_metrics(true, predicted, model.num_slots)
        metrics["background_slots"] = background_slots(true, predicted)
        rows.add(indices.tolist(), metrics)
    means = rows.means()
    print(f"ARI-FG {100 * means['ari_fg']:.1f}, {means['background_slots']:.2f} slots share the background")


if __name__ == "__main__":
    main()
