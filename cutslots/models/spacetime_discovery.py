"""`SpacetimeDiscovery`: clips, partitioned by cuts through space and time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from torch import Tensor, nn

from cutslots.models.discovery import (
    MODELS,
    Discovery,
    ModelConfig,
    ModelOutput,
    build_parts,
    flatten_frames,
    make_output,
    unflatten_frames,
)
from cutslots.modules.decoders import Decoder, DecoderConfig
from cutslots.modules.encoders import EncoderConfig
from cutslots.modules.partition import SpacetimePartition, SpacetimePartitionConfig
from cutslots.modules.slots import CutSlots, CutSlotsConfig, SlotModule, SlotsConfig
from cutslots.registry import Range


@dataclass(frozen=True)
class SpacetimeDiscoveryConfig(ModelConfig):
    slots: SlotsConfig = field(default_factory=lambda: CutSlotsConfig(partition=SpacetimePartitionConfig()))
    num_frames: Annotated[int, Range(2, 1024)] = 2
    """Frames of a training clip."""

    @property
    def frames(self) -> int:
        return self.num_frames


class SpacetimeDiscovery(Discovery):
    """Clips (B, T, 3, H, W) of any length, partitioned as a whole; each frame is decoded from its slots.

    The slot module must partition clips: CutSlots with the partition "spacetime-cut".

    >>> import torch
    >>> from cutslots.models.discovery import build
    >>> model = build(SpacetimeDiscoveryConfig(image_size=(32, 32)))
    >>> model(torch.rand(1, 3, 3, 32, 32)).masks.shape
    torch.Size([1, 3, 11, 32, 32])
    """

    spacetime: ClassVar[bool] = True
    associations: ClassVar[tuple[str, ...]] = ("overlap",)

    def __init__(self, encoder: nn.Module, slots: SlotModule, decoder: Decoder, num_frames: int = 2) -> None:
        super().__init__(encoder, slots, decoder)
        if not slots.spacetime:
            raise ValueError(
                "slots partition images; expected clips: --slots cut-slots --slots.partition spacetime-cut"
            )
        self.frames = num_frames
        if isinstance(slots, CutSlots) and isinstance(slots.partition, SpacetimePartition):
            for background in (False, True):  # before anything is compiled
                slots.partition.prepare(num_frames, background)

    def forward(self, image: Tensor) -> ModelOutput:
        return self.forward_features(self.features(flatten_frames(image)).unflatten(0, image.shape[:2]))

    def forward_features(self, features: Tensor) -> ModelOutput:
        slots, partition_masks = self.slots(features)
        decoded = self.decode(slots.flatten(0, 1), *self.target(features.flatten(0, 1)))
        return make_output(slots, partition_masks, unflatten_frames(decoded, features))


@MODELS.register("spacetime-discovery", SpacetimeDiscoveryConfig)
def build_spacetime_discovery(
    image_size: tuple[int, int], encoder: EncoderConfig, slots: SlotsConfig, decoder: DecoderConfig, num_frames: int
) -> SpacetimeDiscovery:
    """Objects in clips, partitioned by cuts through space and time."""
    return SpacetimeDiscovery(*build_parts(image_size, encoder, slots, decoder), num_frames)
