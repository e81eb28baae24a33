"""An encoder of your own in a model that finds objects, and the few lines that train it.

python examples/own_encoder.py --steps 200
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

from cutslots import PRESETS, Discovery, Scenes
from cutslots.model import as_floats


class Patches(nn.Module):
    """(B, 3, S, S) to (B, maps, S/2, S/2): patches of 2x2 pixels, then depthwise convolutions with a wide view."""

    def __init__(self, maps: int, layers: int = 3) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, maps, 2, stride=2)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Conv2d(maps, maps, 7, padding=3, groups=maps), nn.GELU(), nn.Conv2d(maps, maps, 1))
            for _ in range(layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = x + layer(x)
        return x


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    torch.manual_seed(0)
    config = PRESETS["tiny"].model
    model = Discovery(config)
    model.encoder = Patches(config.encoder_maps)
    scenes = Scenes("plain", size=config.size, objects=(2, 5), count=64).cache()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for step in range(args.steps):
        image = scenes.render(torch.randint(len(scenes), (8,))).image
        loss = (model(image).reconstruction - as_floats(image)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            print(f"step {step}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
