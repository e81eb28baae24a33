"""Learn the capacities of minimum cuts from a few labelled scenes, and compare with the same network and a softmax.

    python examples/learned_capacities.py --out out/learned_capacities
    python examples/learned_capacities.py --sweep        # how the options of each method were chosen

Somebody clicks on an object of a textured scene, and a small network finds its mask. All methods have the same hidden
layers, loss, labelled scenes and clicks:

    softmax               the last layer gives a logit for each pixel
    softmax, edges too    the same, and the edges of the image are an input of the network
    fixed capacities      it gives source - sink; MinCut with capacities from the edges of the image gives the logits p
    learned capacities    it gives source - sink and four capacities for each pixel; MinCut gives the logits p
    learned, times edges  the same, with learned capacities times those from the edges of the image

Prints the IoU of clicked objects in unseen scenes, and writes learned_capacities.png. docs/minimum_cuts.md explains it.
"""

from __future__ import annotations

import argparse
import itertools
import math
from pathlib import Path
from typing import NamedTuple

import matplotlib
import numpy as np
import torch
from torch import Tensor, nn

from cutslots import MinCut, Scenes

matplotlib.use("Agg")
import matplotlib.pyplot as plt

SIZE = 48  # pixels along a side
CHANNELS = 16
DILATIONS = (1, 2, 4, 8)
CONTRAST = 0.12  # difference of colors at which a fixed capacity is 0.6 of the largest
MIN_AREA = 20  # pixels of an object that is clicked on
CLICK_SIGMA = 6.0  # pixels
BATCH = 8
SWEEP_SEED = 1000  # no result uses its scenes or its initial weights


class Options(NamedTuple):
    lr: float
    other: float  # weight decay of the softmax; the largest capacity; the initial capacity


METHODS = {
    "softmax": Options(3e-3, 0.0),
    "softmax, edges too": Options(6e-3, 0.0),
    "fixed capacities": Options(3e-3, 0.1),
    "learned capacities": Options(3e-3, 0.1),
    "learned, times edges": Options(3e-3, 0.1),
}
LEARNING_RATES = (1.5e-3, 3e-3, 6e-3)
OTHERS = {
    "softmax": (0.0, 0.1),
    "softmax, edges too": (0.0, 0.1),
    "fixed capacities": (0.1, 2.0),
    "learned capacities": (0.1, 1.0),
    "learned, times edges": (0.1, 1.0),
}


class Segmenter(nn.Module):
    """Map images (B, 3, H, W) in [0, 1] and clicks (B, 2) to logits (B, H, W) of the clicked object."""

    def __init__(self, method: str, capacity: float) -> None:
        super().__init__()
        self.method, self.capacity = method, capacity
        inputs = 11 if method == "softmax, edges too" else 7
        layers: list[nn.Module] = []
        for i, d in enumerate(DILATIONS):
            convolution = nn.Conv2d(CHANNELS if i else inputs, CHANNELS, 3, padding=d, dilation=d)
            layers += [convolution, nn.GroupNorm(4, CHANNELS), nn.ReLU()]
        self.trunk = nn.Sequential(*layers)
        self.last = nn.Conv2d(CHANNELS, 5 if method.startswith("learned") else 1, 1)
        self.cut = MinCut((SIZE, SIZE), tolerance=1e-3, max_iterations=300, warn=False)

    def forward(self, image: Tensor, click: Tensor) -> Tensor:
        out = self.outputs(image, click)
        if self.method.startswith("softmax"):
            return out[:, 0]
        return self.cut(torch.cat([self.capacities(image, out), out[:, :1], torch.zeros_like(out[:, :1])], 1))

    def outputs(self, image: Tensor, click: Tensor) -> Tensor:
        """Return the last layer's: source - sink, then what becomes capacities. It sees image, click and its color."""
        y, x = click.T
        color = image[torch.arange(len(image)), :, y, x][:, :, None, None]
        grid = torch.stack(torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij"), -1)
        distance = (grid - click[:, None, None]).float().square().sum(-1, keepdim=True).movedim(-1, 1)
        inputs = [image, image - color, torch.exp(-distance / (2 * CLICK_SIGMA**2))]
        if self.method == "softmax, edges too":
            inputs.append(edges(image))
        return self.last(self.trunk(torch.cat(inputs, 1)))

    def capacities(self, image: Tensor, out: Tensor) -> Tensor:
        """Return capacities (B, 4, H, W): right, left, down, up."""
        if self.method == "fixed capacities":
            return self.capacity * edges(image)
        shift = math.log(math.expm1(self.capacity))  # an output of zero means the initial capacity
        learned = nn.functional.softplus(out[:, 1:] + shift)
        return learned if self.method == "learned capacities" else learned * edges(image)


def edges(image: Tensor) -> Tensor:
    """Return the similarity (B, 4, H, W) of each pixel's color to those of its neighbours: right, left, down, up."""
    channels = []
    for axis in (3, 2):
        similarity = torch.exp(-image.diff(dim=axis).square().sum(1, keepdim=True) / (2 * CONTRAST**2))
        end = torch.zeros_like(similarity.narrow(axis, 0, 1))
        channels += [torch.cat([similarity, end], axis), torch.cat([end, similarity], axis)]
    return torch.cat(channels, 1)


class Clicks(NamedTuple):
    image: Tensor  # (B, 3, H, W) in [0, 1]
    click: Tensor  # (B, 2): y, x
    mask: Tensor  # (B, H, W): 1 for the clicked object, else 0


def labelled(split: str, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return images (B, 3, H, W) in [0, 1] and the masks (B, H, W) of their objects."""
    image, mask = Scenes("textured", split, SIZE, seed=seed, count=count, num_objects=(3, 6)).get_batch(range(count))
    return image / 255.0, mask


def random_clicks(image: Tensor, mask: Tensor) -> Clicks:
    """Click on a random pixel of a random object of each scene."""
    clicks, masks = [], []
    for each in mask:
        areas = torch.bincount(each.flatten().long())
        large = [k for k in range(1, len(areas)) if areas[k] >= MIN_AREA] or [int(areas.argmax())]
        masks.append(each == large[int(torch.randint(len(large), ()))])
        pixels = masks[-1].nonzero()
        clicks.append(pixels[torch.randint(len(pixels), ())])
    return Clicks(image, torch.stack(clicks), torch.stack(masks).float())


def train(method: str, options: Options, count: int, seed: int, steps: int) -> Segmenter:
    """Return a network trained on `count` scenes, with random clicks and flips."""
    torch.manual_seed(seed)
    decay, capacity = (options.other, 1.0) if method.startswith("softmax") else (0.0, options.other)
    model, (images, masks) = Segmenter(method, capacity), labelled("train", count, seed)
    torch.manual_seed(seed)  # the same clicks for every method, whose last layers took different random numbers
    optimizer = torch.optim.AdamW(model.parameters(), options.lr, weight_decay=decay)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, options.lr, total_steps=steps)
    for _ in range(steps):
        chosen = torch.randint(count, (BATCH,))
        flips = [axis for axis in (-1, -2) if torch.rand(()) < 0.5]
        image, click, mask = random_clicks(images[chosen].flip(flips), masks[chosen].flip(flips))
        loss = segmentation_loss(model(image, click), mask)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return model


def segmentation_loss(logits: Tensor, mask: Tensor) -> Tensor:
    """Return cross-entropy plus one minus the soft IoU: most pixels are not of the object."""
    soft = logits.sigmoid()
    both, either = (soft * mask).sum((1, 2)), (soft + mask - soft * mask).sum((1, 2))
    return nn.functional.binary_cross_entropy_with_logits(logits, mask) + 1 - (both / either).mean()


def unseen(split: str, count: int, seed: int) -> Clicks:
    """Return scenes with one click each, the same ones in every call."""
    torch.manual_seed(seed)
    return random_clicks(*labelled(split, count, seed))


@torch.no_grad()
def intersection_over_union(model: Segmenter, scenes: Clicks) -> float:
    """Return the IoU of the clicked objects, averaged over scenes."""
    pieces = zip(scenes.image.split(50), scenes.click.split(50), strict=True)
    found, true = torch.cat([model(image, click) for image, click in pieces]) > 0, scenes.mask > 0.5
    return float(((found & true).sum((1, 2)) / (found | true).sum((1, 2))).mean())


def sweep(args: argparse.Namespace) -> None:
    """Print the IoU of validation scenes for every pair of options, as many pairs for each method."""
    scenes = unseen("val", args.test_scenes, SWEEP_SEED)
    for method in METHODS:
        for lr, other in itertools.product(LEARNING_RATES, OTHERS[method]):
            scores = [
                intersection_over_union(
                    train(method, Options(lr, other), args.scenes, SWEEP_SEED + i, args.steps), scenes
                )
                for i in range(args.seeds)
            ]
            print(f"{method:20} lr {lr:g}, {other:g}: IoU {np.mean(scores):.3f}", flush=True)


def compare(args: argparse.Namespace) -> None:
    """Print the IoU of unseen scenes by method, over seeds, and draw those of the first seed."""
    scenes = unseen("test", args.test_scenes, 0)
    scores: dict[str, list[float]] = {method: [] for method in METHODS}
    shown: dict[str, Segmenter] = {}
    for seed, method in itertools.product(range(args.seeds), METHODS):
        model = train(method, METHODS[method], args.scenes, seed, args.steps)
        shown.setdefault(method, model)
        scores[method].append(intersection_over_union(model, scenes))
    print(f"IoU of {args.test_scenes} unseen scenes after {args.steps} steps on {args.scenes}, {args.seeds} seeds")
    for method, found in scores.items():
        less = np.subtract(found, scores["softmax"])
        each = " ".join(f"{value:.3f}" for value in found)
        error = np.std(less) / max(args.seeds - 1, 1) ** 0.5  # of the mean
        print(
            f"{method:20} {np.mean(found):.3f} ± {np.std(found):.3f}; "
            f"difference from softmax {np.mean(less):+.3f} ± {error:.3f}, "
            f"above it {(less > 0).sum()} of {args.seeds}; each {each}"
        )
    save_figure(shown, Clicks(*(x[:4] for x in scenes)), args.out / "learned_capacities.png")
    print(f"wrote {args.out / 'learned_capacities.png'}")


@torch.no_grad()
def save_figure(models: dict[str, Segmenter], scenes: Clicks, path: Path) -> None:
    """Draw a row for each scene: image, object, probabilities of each method, capacities of both cuts."""
    image, click, mask = scenes
    columns = {"scene and click": image.movedim(1, -1), "clicked object": mask}
    columns |= {method: model(image, click).sigmoid() for method, model in models.items()}
    learned = models["learned capacities"]
    capacity = learned.capacities(image, learned.outputs(image, click)).mean(1)
    columns["mean capacity of a pixel"] = capacity / capacity.flatten(1).quantile(0.98, 1)[:, None, None]
    shape = (len(image), len(columns))
    figure, axes = plt.subplots(*shape, figsize=(2 * shape[1], 2.1 * shape[0]), layout="constrained", squeeze=False)
    for column, (title, values) in enumerate(columns.items()):
        for row, value in enumerate(values):
            axes[row, column].imshow(value.numpy(), cmap="gray", vmin=0, vmax=1)
            axes[row, column].set_axis_off()
        axes[0, column].set_title(title, fontsize=10)
    for row, (y, x) in enumerate(click.tolist()):
        axes[row, 0].plot(x, y, "o", color="white", markeredgecolor="red", markersize=6)
    figure.savefig(path, dpi=85)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("out/learned_capacities"))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--scenes", type=int, default=8, help="labelled scenes")
    parser.add_argument("--test-scenes", type=int, default=200)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--sweep", action="store_true", help="compare options on validation scenes instead")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    sweep(args) if args.sweep else compare(args)


if __name__ == "__main__":
    main()
