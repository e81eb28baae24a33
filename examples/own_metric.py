"""A metric of your own: over how many slots is the background spread?

python examples/own_metric.py
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor

from cutslots import Scenes, load, metrics


def ground_slots(true: Tensor, predicted: Tensor, share: float = 0.05) -> Tensor:
    """How many slots hold at least this share of the background, (B,), from labels (B, ...) of whole numbers."""
    ground = metrics.contingency(true, predicted)[:, 0]  # (B, K): pixels of true label 0 by predicted label
    return (ground >= share * ground.sum(1, keepdim=True)).sum(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--images", type=int, default=64)
    args = parser.parse_args()
    model = load("tiny")
    scenes = Scenes("plain", split="test", size=model.config.size, objects=(2, 5))
    scores = metrics.Scores()
    for numbers in torch.arange(args.images).split(16):
        image, mask = scenes.render(numbers)
        with torch.no_grad():
            predicted = model(image).masks.argmax(1)
        columns = metrics.score(mask, predicted) | {"ground_slots": ground_slots(mask, predicted)}
        scores.add(numbers.tolist(), columns)
    means = scores.means()
    print(f"ARI-FG {100 * means['ari_fg']:.1f}; the background is spread over {means['ground_slots']:.2f} slots")


if __name__ == "__main__":
    main()
