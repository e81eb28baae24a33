"""A plugin that registers one part of every kind, each as small as it can be."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from cutslots import DATASETS, DECODERS, ENCODERS, LOSSES, PARTITIONS, SLOTS
from cutslots.data.registry import DatasetConfig
from cutslots.dataset import Dataset, Indices, Sample
from cutslots.modules.decoders import DecoderConfig, MixtureDecoder
from cutslots.modules.encoders import Encoder, EncoderConfig
from cutslots.modules.partition import PartitionConfig, PartitionModule
from cutslots.modules.slots import SlotModule, Slots, SlotsConfig
from cutslots.training.losses import Loss, LossConfig, LossOutput


@dataclass(frozen=True)
class PatchesConfig(EncoderConfig):
    channels: int = 12


@ENCODERS.register("patches", PatchesConfig)
class Patches(Encoder):
    """Patches of 4x4 pixels, at a quarter of the resolution."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.out_channels, self.conv = channels, nn.Conv2d(3, channels, 4, stride=4)

    def out_size(self, image_size: tuple[int, int]) -> tuple[int, int]:
        return image_size[0] // 4, image_size[1] // 4

    def normalize(self, image: Tensor) -> Tensor:
        return (image - 0.45) / 0.22

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x)


@dataclass(frozen=True)
class StripesConfig(PartitionConfig):
    sharpness: float = 1.0


@PARTITIONS.register("stripes", StripesConfig)
class Stripes(PartitionModule):
    """A softmax of one convolution."""

    def __init__(self, in_channels: int, num_slots: int, size: tuple[int, int], sharpness: float) -> None:
        super().__init__()
        self.conv, self.sharpness = nn.Conv2d(in_channels, num_slots, 1), sharpness

    def masks(self, x: Tensor) -> Tensor:
        return (self.sharpness * self.conv(x)).softmax(1)


@dataclass(frozen=True)
class MeansConfig(SlotsConfig):
    partition: PartitionConfig = StripesConfig()


@SLOTS.register("means", MeansConfig)
class Means(SlotModule):
    """Means of features under a partition, projected."""

    def __init__(self, in_channels, num_slots, size, slot_dim, relative_positions, partition) -> None:
        super().__init__(num_slots, slot_dim, relative_positions)
        self.partition = PARTITIONS.build(partition, in_channels=in_channels, num_slots=num_slots, size=size)
        self.linear = nn.Linear(in_channels, self.content_dim)

    def forward(self, x: Tensor) -> Slots:
        masks = self.partition.masks(x)
        means = torch.einsum("bkhw,bchw->bkc", masks, x) / masks.sum((2, 3))[..., None]
        return Slots(self.with_positions(self.linear(means), masks), masks)


@dataclass(frozen=True)
class LinearConfig(DecoderConfig):
    hidden: int = 8


@DECODERS.register("linear", LinearConfig)
class LinearDecoder(MixtureDecoder):
    """Two linear layers to all pixels at once."""

    def __init__(self, slot_dim: int, image_size: tuple[int, int], position_dim: int, hidden: int) -> None:
        super().__init__()
        self.image_size = image_size
        self.net = nn.Sequential(nn.Linear(slot_dim, hidden), nn.Linear(hidden, 4 * image_size[0] * image_size[1]))

    def components(self, slots: Tensor) -> Tensor:
        return self.net(slots).unflatten(-1, (4, *self.image_size))


@dataclass(frozen=True)
class AbsoluteConfig(LossConfig):
    scale: float = 1.0


@LOSSES.register("absolute", AbsoluteConfig)
class AbsoluteLoss(Loss):
    """Mean absolute error."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def __call__(self, output, image, step: int) -> LossOutput:
        error = (output.reconstruction - image / 255).abs().mean()
        return LossOutput(self.scale * error, error)


@dataclass(frozen=True)
class SquaresConfig(DatasetConfig):
    side: int = 5


@DATASETS.register("squares", SquaresConfig)
class Squares(Dataset):
    """One bright square on black in each image."""

    def __init__(self, split: str, image_size: tuple[int, int], count: int | None, side: int) -> None:
        self.image_size, self.count, self.side = image_size, 40 if count is None else min(count, 40), side
        self.seed = {"train": 0, "val": 1, "test": 2}[split]

    def __len__(self) -> int:
        return self.count

    def get_batch(self, indices: Indices, device: torch.device | str = "cpu") -> Sample:
        masks = torch.zeros(len(indices), *self.image_size, dtype=torch.uint8)
        for mask, i in zip(masks, indices, strict=True):
            random = torch.Generator().manual_seed(1000 * self.seed + int(i))
            y, x = (int(torch.randint(0, n - self.side, (1,), generator=random)) for n in self.image_size)
            mask[y : y + self.side, x : x + self.side] = 1
        return Sample((255 * masks)[:, None].repeat(1, 3, 1, 1).to(device), masks.to(device))
