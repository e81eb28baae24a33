"""`PairDiscovery`: pairs of frames, whose slots are matched (the paper's algorithm 3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, get_args

import torch
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
from cutslots.modules.base import Positive, downcast_half, first_parameter, mlp, upcast_half
from cutslots.modules.decoders import Decoder, DecoderConfig, DecoderOutput
from cutslots.modules.encoders import EncoderConfig
from cutslots.modules.feature_decoders import FeatureDecoderOutput
from cutslots.modules.slots import SlotModule, SlotsConfig
from cutslots.programs.matching import MatchedSlots, match_slots, pairwise_min
from cutslots.programs.qp import check_positive
from cutslots.registry import Range

Pairing = Literal["joint", "shared", "separate"]


@dataclass(frozen=True)
class PairDiscoveryConfig(ModelConfig):
    match_gamma: Positive = 0.1
    """Regulariser of the matching QP."""
    match_temperature: Positive = 0.5
    """Temperature of the softmax over its solution."""
    match_dim: Annotated[int, Range(0, 65_536)] = 0
    """Dimension of a learned projection by which slots are matched; 0 matches the slots themselves (the paper)."""
    match_half_area: Annotated[float, Range(0, 1)] = 0.0
    """The share of an image with which a pair of slots counts half as much as a large one, so that empty slots, which
    are all alike, hardly count. 0: all pairs count alike (the paper)."""
    pairing: Pairing = "joint"
    """How a pair of slots reconstructs two frames: one slot for both (joint, the paper), the mean of the pair with a
    small code for each frame (shared), or each frame's own slot changed by the other (separate)."""
    motion_dim: Annotated[int, Range(1, 65_536)] = 128
    """Hidden dimension of the MLP that transforms a pair of slots."""
    code_dim: Annotated[int, Range(1, 65_536)] = 8
    """Dimension of the code of each frame, with pairing shared."""

    @property
    def frames(self) -> int:
        return 2


class PairDiscovery(Discovery):
    """Pairs of frames (B, 2, 3, H, W): slots of each frame, matched, transformed, decoded to both frames.

    Slot i of the first frame and its partner r_i of the second reconstruct both frames; `pairing` says how. Slots are
    matched by their cosine similarity, or that of a learned projection, in float32. `match` and `transform` are the
    two steps alone, for tracking. Positions of slots are not matched by, and the pairing does not change them. An image
    (B, 3, H, W) is taken for a pair of itself.

    >>> from cutslots.models.discovery import build
    >>> model = build(PairDiscoveryConfig(image_size=(32, 32)))
    >>> output = model(torch.rand(3, 2, 3, 32, 32))
    >>> output.slots.shape, output.masks.shape, output.reconstruction.shape
    (torch.Size([3, 2, 11, 64]), torch.Size([3, 2, 11, 32, 32]), torch.Size([3, 2, 3, 32, 32]))
    """

    frames = 2
    associations: ClassVar[tuple[str, ...]] = ("area", "hungarian", "learned")

    def __init__(
        self,
        encoder: nn.Module,
        slots: SlotModule,
        decoder: Decoder,
        match_gamma: float = 0.1,
        match_temperature: float = 0.5,
        match_dim: int = 0,
        match_half_area: float = 0.0,
        pairing: Pairing = "joint",
        motion_dim: int = 128,
        code_dim: int = 8,
    ) -> None:
        super().__init__(encoder, slots, decoder)
        self.match_gamma = check_positive("match_gamma", match_gamma)
        self.match_temperature = check_positive("match_temperature", match_temperature)
        if not 0 <= match_half_area <= 1:
            raise ValueError(f"match_half_area is {match_half_area}; expected a number from 0 to 1")
        self.match_half_area = match_half_area
        self.match_projection = nn.Linear(slots.content_dim, match_dim, bias=False) if match_dim else nn.Identity()
        self.pairing = _build_pairing(pairing, slots.content_dim, motion_dim, code_dim)

    def forward(self, image: Tensor) -> ModelOutput:
        if isinstance(image, Tensor) and image.ndim == 4:
            return super().forward(image)
        frames = flatten_frames(image, 2)
        return self.forward_features(self.features(frames).unflatten(0, image.shape[:2]))

    def forward_features(self, features: Tensor) -> ModelOutput:
        if features.ndim == 4:
            return super().forward_features(features)
        frames = features.flatten(0, 1)
        slots, masks = (x.unflatten(0, features.shape[:2]) for x in self.slots(frames))
        areas = masks.flatten(3).mean(-1).unbind(1) if self.match_half_area else ()
        partner, weights = self.match(slots[:, 0], slots[:, 1], *areas)
        transformed = self.transform(slots[:, 0], partner)
        # The masks of the second frame in the order of the first, as far as the matching is one to one.
        partner_masks = (weights @ masks[:, 1].flatten(2)).view_as(masks[:, 1])
        decoded = unflatten_frames(self.decode(transformed.flatten(0, 1), *self.target(frames)), features)
        return make_output(transformed, torch.stack([masks[:, 0], partner_masks], 1), decoded)

    def match(self, s: Tensor, t: Tensor, s_area: Tensor | None = None, t_area: Tensor | None = None) -> MatchedSlots:
        """Return for slots s of one frame their partners among t of the other, and the weights (B, K, K).

        A model with `match_half_area` needs their areas (B, K) as shares of the image. It is trained with those of
        the slot module's masks.
        """
        with torch.autocast(s.device.type, enabled=False):
            s, t = upcast_half(s), upcast_half(t)
            unit_s, unit_t = (nn.functional.normalize(self._project(x), dim=-1) for x in (s, t))
            importance = self._importance(s_area, t_area)
            weights = match_slots(unit_s, unit_t, self.match_gamma, self.match_temperature, importance).weights
            return MatchedSlots(weights @ t, weights)

    def _project(self, slots: Tensor) -> Tensor:
        content = slots[..., : self.slots.content_dim]
        if isinstance(self.match_projection, nn.Identity):
            return content
        return upcast_half(self.match_projection(downcast_half(content, self.match_projection.weight)))

    def _importance(self, s_area: Tensor | None, t_area: Tensor | None) -> Tensor | None:
        if not self.match_half_area:
            return None
        if s_area is None or t_area is None:
            raise ValueError("s_area or t_area is None; a model with match_half_area expects the areas of both")
        area = pairwise_min(upcast_half(s_area), upcast_half(t_area))
        return area / (area + self.match_half_area)

    def transform(self, s: Tensor, r: Tensor) -> Tensor:
        """Return the slots (B, 2, K, D) that reconstruct both frames, from slots s and their partners r."""
        parameter, size = first_parameter(self.pairing), self.slots.content_dim
        s, r = upcast_half(s), upcast_half(r)
        content: Tensor = self.pairing(*(downcast_half(x[..., :size], parameter) for x in (s, r)))
        if not self.slots.position_dim:
            return content
        positions = torch.stack([s, r], 1)[..., size:]
        return torch.cat([content.to(positions.dtype), positions], -1)

    def decode_frame(self, slots: Tensor, *target: Tensor) -> DecoderOutput | FeatureDecoderOutput:
        return self.decode(self.transform(slots, slots)[:, 1], *target)


# The pairings map slots s (B, K, D) of the first frame and their partners r to the slots (B, 2, K, D) of both frames.
# What they add to s and r is zero at first, so a model that begins with the weights of one of single frames decodes
# what that one does.


class JointPairing(nn.Module):
    """One slot u = MLP(s, r) for both frames (the paper). A layer for each frame turns it into what is decoded.

    u is no larger than a slot, so a pair of two objects has to fit where a pair of one object is described once.
    """

    def __init__(self, slot_dim: int, motion_dim: int) -> None:
        super().__init__()
        self.joint = _zero_last(mlp(2 * slot_dim, motion_dim, slot_dim))
        self.frames = _zero_last(nn.Linear(slot_dim, 2 * slot_dim))

    def forward(self, s: Tensor, r: Tensor) -> Tensor:
        joint = (s + r) / 2 + self.joint(torch.cat([s, r], -1))
        return torch.stack([joint + frame for frame in self.frames(joint).chunk(2, -1)], 1)


class SharedPairing(nn.Module):
    """The mean of s and r for both frames, changed by a code of dimension `code_dim` of each frame's own slot.

    What two frames of an object share, its appearance, is in the mean; a code has room for a position. The mean of two
    objects describes neither, so the reconstruction suffers from a wrong partner.
    """

    def __init__(self, slot_dim: int, motion_dim: int, code_dim: int) -> None:
        super().__init__()
        self.code = nn.Linear(slot_dim, code_dim)
        self.motion = _zero_last(mlp(slot_dim + code_dim, motion_dim, slot_dim))

    def forward(self, s: Tensor, r: Tensor) -> Tensor:
        mean = (s + r) / 2
        return torch.stack([mean + self.motion(torch.cat([mean, self.code(x)], -1)) for x in (s, r)], 1)


class SeparatePairing(nn.Module):
    """The slot of each frame, changed by an MLP of both."""

    def __init__(self, slot_dim: int, motion_dim: int) -> None:
        super().__init__()
        self.motion = _zero_last(mlp(2 * slot_dim, motion_dim, 2 * slot_dim))

    def forward(self, s: Tensor, r: Tensor) -> Tensor:
        pair = torch.cat([s, r], -1)
        return torch.stack((pair + self.motion(pair)).chunk(2, -1), 1)


def _zero_last(layers: nn.Module) -> nn.Module:
    """Return the layers with the last one, or the only one, set to zero."""
    last = layers[-1] if isinstance(layers, nn.Sequential) else layers
    for parameter in last.parameters():
        nn.init.zeros_(parameter)
    return layers


def _build_pairing(pairing: Pairing, slot_dim: int, motion_dim: int, code_dim: int) -> nn.Module:
    if pairing == "joint":
        return JointPairing(slot_dim, motion_dim)
    if pairing == "shared":
        return SharedPairing(slot_dim, motion_dim, code_dim)
    if pairing == "separate":
        return SeparatePairing(slot_dim, motion_dim)
    raise ValueError(f"pairing is {pairing!r}; expected one of {', '.join(get_args(Pairing))}")


@MODELS.register("pair-discovery", PairDiscoveryConfig)
def build_pair_discovery(
    image_size: tuple[int, int],
    encoder: EncoderConfig,
    slots: SlotsConfig,
    decoder: DecoderConfig,
    **options: Any,
) -> PairDiscovery:
    """Objects in pairs of frames, whose slots are matched (the paper)."""
    parts = build_parts(image_size, encoder, slots, decoder)
    return PairDiscovery(*parts, **options)
