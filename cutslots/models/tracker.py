"""Slots associated over the frames of a video, one frame at a time, in constant memory.

`Tracker` returns slots in the order of tracks: slot k is the same object in every frame. Slots of a new frame are
assigned to tracks one to one by an association:

- **area**: maximises the sum of  min(a_i, a_j) cos(s_i, t_j),  a_i and a_j being the areas of track i and slot j.
  Without areas the many empty slots outvote the few objects. s_i and a_i are running means over the track.
- **learned**: the learned matching of `PairDiscovery` between this frame and the one before (the paper's algorithm 3),
  rounded. The frame is decoded from the pairs. With `match_half_area`, between this frame and running
  means of the tracks, weighted by the areas of decoder masks; every frame is decoded twice.
- **hungarian**: maximises inner products with the slots of the frame before (the paper's baseline).
- **overlap**: for `SpacetimeDiscovery`, which partitions the newest frames as one clip. Successive clips are
  associated by the overlap of their masks in the frame they share.

Shapes: B videos, T frames, K slots, H W the image.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from cutslots.models.discovery import Discovery, ModelOutput, check_finite, make_output, map_output
from cutslots.modules.base import upcast_half
from cutslots.programs.matching import pairwise_min

MOMENTUM = 0.5  # of the running means: a slot that changes its object over more than a few frames is lost
MIN_AREA = 1e-4  # added to the share of pixels, so that no area is zero


class Tracker:
    """Tracks objects through B videos at once.

    >>> from cutslots.models.discovery import DiscoveryConfig, build
    >>> tracker = Tracker(build(DiscoveryConfig(image_size=(32, 32))))
    >>> for frame in torch.rand(3, 1, 3, 32, 32):  # three frames of one video
    ...     output = tracker(frame)
    >>> output.masks.shape
    torch.Size([1, 11, 32, 32])
    """

    def __init__(self, model: Discovery, association: str | None = None) -> None:
        """Track with `model` by an association; by default the first of `model.associations`."""
        association = association or model.associations[0]
        if association not in model.associations:
            raise ValueError(
                f"association is {association!r}; a {type(model).__name__} expects {' or '.join(model.associations)}"
            )
        self.model, self.association = model, association
        self.slots: Tensor | None = None  # of the newest frame, in the order of tracks
        self.mean: Tensor | None = None  # running mean of the slots of each track
        self.area: Tensor | None = None  # running mean of the area of each track
        self.masks: Tensor | None = None
        self.clip: deque[Tensor] = deque(maxlen=max(2, model.frames))

    @torch.no_grad()
    def __call__(self, frame: Tensor) -> ModelOutput:
        """Return the output for the next frame (B, 3, H, W), in the order of tracks.

        Raises a ValueError if it is not finite.
        """
        if self.association == "overlap":
            return self._by_overlap(frame)
        (slots, partition_masks), target = self.model.encode_with_target(frame)
        slots = upcast_half(slots)
        check_finite(self.model, slots=slots)
        if self.association == "learned":
            return self._by_matching(slots, partition_masks, target)
        output = make_output(slots, partition_masks, self.model.decode_frame(slots, *target)._asdict())
        self._check(output)
        area = _areas(output.masks)
        if self.slots is None or self.mean is None or self.area is None:
            self.slots, self.mean, self.area = slots, slots, area
            return output
        if self.association == "hungarian":
            order = assignment(self.slots @ slots.mT)
        else:
            similarity = F.normalize(self.mean, dim=-1) @ F.normalize(slots, dim=-1).mT
            order = assignment(pairwise_min(self.area, area) * similarity)
        self.slots = take_slots(slots, order)
        self.mean = MOMENTUM * self.mean + (1 - MOMENTUM) * self.slots
        self.area = MOMENTUM * self.area + (1 - MOMENTUM) * take_slots(area, order)
        return reorder_slots(output, order)

    def _by_matching(self, slots: Tensor, partition_masks: Tensor, target: tuple[Tensor, ...]) -> ModelOutput:
        model: Any = self.model  # a PairDiscovery: no other has this association
        area = _areas(model.decode_frame(slots, *target).masks) if model.match_half_area else None
        if self.slots is None or self.mean is None:
            self.slots, self.mean, self.area = slots, slots, area
        # With areas, empty slots hardly count, so that a track can wait for its object to return.
        known = self.slots if area is None else self.mean
        order = assignment(model.match(known, slots, self.area, area).weights)
        before, self.slots = self.slots, take_slots(slots, order)
        self.mean = MOMENTUM * self.mean + (1 - MOMENTUM) * self.slots
        if area is not None and self.area is not None:
            self.area = MOMENTUM * self.area + (1 - MOMENTUM) * take_slots(area, order)
        decoded = model.decode(model.transform(before, self.slots)[:, 1], *target)
        return self._check(make_output(self.slots, take_slots(partition_masks, order), decoded._asdict()))

    def _by_overlap(self, frame: Tensor) -> ModelOutput:
        self.clip.append(frame)
        clip = self._check(self.model(torch.stack(tuple(self.clip), 1)))
        output = _frame(clip, -1)
        if self.masks is not None:
            old, new = self.masks.flatten(2), clip.masks[:, -2].flatten(2)  # of the frame that both clips hold
            shared = old @ new.mT
            order = assignment(shared / (old.sum(-1)[:, :, None] + new.sum(-1)[:, None] - shared))
            output = reorder_slots(output, order)
        self.masks = output.masks
        return output

    def _check(self, output: ModelOutput) -> ModelOutput:
        check_finite(self.model, masks=output.masks, reconstruction=output.reconstruction)
        return output


def _frame(output: ModelOutput, t: int) -> ModelOutput:
    """Return the output of one frame of clips."""
    return map_output(lambda x: x[:, t], output)


def _areas(masks: Tensor) -> Tensor:
    """Return the share (B, K) of pixels that each slot wins."""
    return F.one_hot(masks.argmax(1).flatten(1), masks.shape[1]).float().mean(1) + MIN_AREA


def assignment(gain: Tensor) -> Tensor:
    """Return for gains (B, K, K) the column (B, K) of each row, one to one, with the largest sum."""
    from scipy.optimize import linear_sum_assignment  # takes most of a second to import; only tracking needs it

    pairs = [linear_sum_assignment(each, maximize=True)[1] for each in gain.detach().float().cpu().numpy()]
    return torch.from_numpy(np.stack(pairs)).to(gain.device)


def take_slots(x: Tensor, order: Tensor) -> Tensor:
    """Return x (B, K, ...) with its slots in this order (B, K)."""
    return x[torch.arange(len(x), device=x.device)[:, None], order]


def reorder_slots(output: ModelOutput, order: Tensor) -> ModelOutput:
    """Return the output with its slots in this order (B, K). The reconstruction does not depend on it."""
    shared = ("reconstruction", "target")
    by_slot = {name: take_slots(x, order) for name, x in output._asdict().items() if name not in shared}
    return output._replace(**by_slot)


def track_clip(model: Discovery, clips: Tensor, association: str | None = None) -> list[ModelOutput]:
    """Return the output for each frame of clips (B, T, 3, H, W), in the order of tracks."""
    tracker = Tracker(model, association)  # checks the association
    if model.spacetime:
        with torch.no_grad():
            output = model(clips)
        check_finite(model, masks=output.masks, reconstruction=output.reconstruction)
        return [_frame(output, t) for t in range(clips.shape[1])]
    return [tracker(frame) for frame in clips.unbind(1)]
