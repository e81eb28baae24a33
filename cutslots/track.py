"""Objects followed through videos of any length, one frame at a time, in memory that does not grow.

`Tracker` hands out slots in the order of tracks: slot k is the same thing in every frame. To put a frame's slots into
that order they are joined, one to one, with those of the tracks, by one of

- **area** (ours): the matching program itself, unrelaxed, for the gains  h(a_i, a_j) cos(s_i, t_j),  h being the
  harmonic mean of the areas of track i and slot j. Without areas the many empty slots outvote the few objects, and a
  thing that passes from one slot to another is lost on the way. s_i is a running mean over the track, `MEMORY` of it
  old: a hand-over that takes more than a few frames is lost all the same.
- **matching**: the learned matching of `PairDiscovery` between this frame and the one before (algorithm 3), rounded;
  the frame is redrawn from the pairs.
- **hungarian**: the largest inner products with the slots of the frame before (the paper's baseline).

`VolumeDiscovery` needs none of them: it cuts the newest frames as one clip, and two clips are joined by their masks
where they overlap.

Shapes: B videos, T frames, K slots, S side of the picture.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor
from torch.nn import functional as F

import cutslots
from cutslots.disk import append_line, claimed, progress, write_atomically
from cutslots.model import Discovery, Found, PairDiscovery, VolumeDiscovery, full, load
from cutslots.predict import at_size, box_of, chosen, paint_over, seen_by
from cutslots.scenes.files import palette_image, png
from cutslots.video import LONGEST_GIF, Movie, has_pyav, open_video

MEMORY = 0.5
Join = Literal["area", "matching", "hungarian"]


class Tracker:
    """Follows objects through B videos at once.

    >>> from cutslots.presets import PRESETS
    >>> tracker = Tracker(Discovery(PRESETS["tiny"].model))
    >>> for frame in torch.rand(3, 1, 3, 64, 64):  # three frames of one video
    ...     found = tracker(frame)
    >>> found.masks.shape
    torch.Size([1, 6, 64, 64])
    """

    def __init__(self, model: Discovery, join: Join = "area") -> None:
        if join not in ("area", "matching", "hungarian"):
            raise ValueError(f"join is {join!r}; expected area, matching or hungarian")
        if join == "matching" and not isinstance(model, PairDiscovery):
            raise ValueError("join is 'matching', which this model has not learned; expected area or hungarian")
        self.model, self.join = model, join
        self.slots: Tensor | None = None  # of the newest frame, in the order of tracks
        self.mean: Tensor | None = None  # of each track's slots
        self.area: Tensor | None = None  # of each track, likewise a running mean
        self.masks: Tensor | None = None
        self.clip: deque[Tensor] = deque(maxlen=max(2, model.config.frames))

    @torch.no_grad()
    def __call__(self, frame: Tensor) -> Found:
        """What is found in the next frame (B, 3, S, S), in the order of tracks."""
        if isinstance(self.model, VolumeDiscovery):
            return self._by_volume(frame)
        slots, partition = self.model.encode(frame)
        slots = full(slots)
        if self.join == "matching":
            return self._by_matching(slots, partition)
        seen = self.model.paired(slots, slots)[:, 1] if isinstance(self.model, PairDiscovery) else slots
        found = Found(slots, partition=partition, **self.model.decode(seen))
        area = _areas(found.masks)
        if self.slots is None or self.mean is None or self.area is None:
            self.slots, self.mean, self.area = slots, slots, area
            return found
        if self.join == "hungarian":
            order = assignment(self.slots @ slots.mT)
        else:
            both = 2 / (1 / self.area[:, :, None] + 1 / area[:, None])
            order = assignment(both * (F.normalize(self.mean, dim=-1) @ F.normalize(slots, dim=-1).mT))
        self.slots = taken(slots, order)
        self.mean = MEMORY * self.mean + (1 - MEMORY) * self.slots
        self.area = MEMORY * self.area + (1 - MEMORY) * taken(area, order)
        return reordered(found, order)

    def _by_matching(self, slots: Tensor, partition: Tensor) -> Found:
        assert isinstance(self.model, PairDiscovery)
        before = slots if self.slots is None else self.slots
        order = assignment(self.model.match(before, slots).weights)
        self.slots = taken(slots, order)
        seen = self.model.paired(before, self.slots)[:, 1]
        return Found(self.slots, partition=taken(partition, order), **self.model.decode(seen))

    def _by_volume(self, frame: Tensor) -> Found:
        self.clip.append(frame)
        clip = self.model(torch.stack(tuple(self.clip), 1))
        found = Found(*(x[:, -1] for x in clip))
        if self.masks is not None:
            old, new = self.masks.flatten(2), clip.masks[:, -2].flatten(2)  # of the frame that both clips hold
            shared = old @ new.mT
            found = reordered(found, assignment(shared / (old.sum(-1)[:, :, None] + new.sum(-1)[:, None] - shared)))
        self.masks = found.masks
        return found


def _areas(masks: Tensor) -> Tensor:
    """The share (B, K) of pixels that each slot wins; never quite nothing."""
    return F.one_hot(masks.argmax(1).flatten(1), masks.shape[1]).float().mean(1) + 1e-4


def assignment(gain: Tensor) -> Tensor:
    """For gains (B, K, K) the column (B, K) that each row is given, one to one, with the largest sum."""
    pairs = [linear_sum_assignment(each, maximize=True)[1] for each in gain.detach().float().cpu().numpy()]
    return torch.from_numpy(np.stack(pairs)).to(gain.device)


def taken(x: Tensor, order: Tensor) -> Tensor:
    """x (B, K, ...) with its slots in this order (B, K)."""
    return x[torch.arange(len(x), device=x.device)[:, None], order]


def reordered(found: Found, order: Tensor) -> Found:
    """The same with its slots in another order; the reconstruction has none."""
    slots, masks, partition, reconstruction, pictures = found
    return Found(
        taken(slots, order), taken(masks, order), taken(partition, order), reconstruction, taken(pictures, order)
    )


def follow(model: Discovery, film: Tensor, join: Join = "area") -> list[Found]:
    """What is found in each frame of films (B, T, 3, S, S), in the order of tracks. Volumes are cut whole."""
    tracker = Tracker(model, join)
    if isinstance(model, VolumeDiscovery):
        with torch.no_grad():
            found = model(film)
        return [Found(*(x[:, t] for x in found)) for t in range(film.shape[1])]
    return [tracker(frame) for frame in film.unbind(1)]


# ------------------------------------------------------------------------------------------------------------ as files


def track(
    weights: str,
    video: Path,
    out: Path,
    device: str = "auto",
    join: Join = "area",
    overlay: Literal["auto", "mp4", "gif", "none"] = "auto",
    overwrite: bool = False,
) -> None:
    """Follows the objects in a video and writes them to `out`:

    overlay.mp4 or .gif   the video under the colours of its tracks
    masks/000000.png      palette PNGs, value = track, from 1 on
    tracks.json           for every frame each track's area and box; written last
    track.json            what was asked for
    """
    opened = open_video(video)
    model = load(weights, chosen(device))
    tracker, count = Tracker(model, join), 0
    kind = overlay if overlay != "auto" else "mp4" if has_pyav() else "gif"
    if kind == "gif" and (opened.length or 0) > LONGEST_GIF:
        raise ValueError(
            f"video: {video} has over {LONGEST_GIF} frames, too many for a GIF; pass --overlay mp4 or none"
        )
    movie = Movie(out / f"overlay.{kind}", opened.rate) if kind != "none" else None
    if (out / "masks").exists() and not (out / "track.json").is_file():
        raise ValueError(f"out: {out} holds masks/ that track did not write; choose another folder")
    request = {"weights": str(weights), "video": str(video), "join": join, "version": cutslots.__version__}
    torch.manual_seed(0)  # Slot Attention draws its slots
    with claimed(out, "track.json", request, overwrite, last="tracks.json"), _part(out / "tracks.json") as record:
        for name in ("overlay.mp4", "overlay.gif", "masks/*.png"):
            for old in (*out.glob(name), *out.glob(f"{name}.part")):
                old.unlink()
        (out / "masks").mkdir(exist_ok=True)
        with movie or contextlib.nullcontext(), progress() as bar:
            task = bar.add_task("frames", total=opened.length)
            for count, picture in enumerate(opened.frames, 1):
                found = tracker(seen_by(model, picture))
                labels, _ = at_size(found.masks[0], (picture.height, picture.width))  # the track of every pixel, from 0
                write_atomically(out / "masks" / f"{count - 1:06d}.png", png(palette_image(labels + 1)))
                if movie:
                    paint_over(picture, labels)
                    movie.add(np.asarray(picture))
                if count == 1:
                    facts = {"video": video.name, "width": picture.width, "height": picture.height, "rate": opened.rate}
                    append_line(record, (json.dumps(facts)[:-1] + ', "frames": [').encode())
                append_line(record, (("," if count > 1 else "") + json.dumps(_boxes(labels))).encode())
                bar.advance(task)
            append_line(record, b"]}")
    shown = f", {out / f'overlay.{kind}'}" if movie else ""
    print(f"wrote {count} frames to {out}: {out / 'tracks.json'}{shown}, masks/")


@contextlib.contextmanager
def _part(path: Path) -> Iterator[Path]:
    """A file to append to, which has its name once it is whole."""
    part = path.with_name(path.name + ".part")
    part.unlink(missing_ok=True)  # of a run that was killed
    try:
        yield part
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def _boxes(labels: np.ndarray) -> list[dict[str, Any]]:
    """Number, area in pixels and box (left, top, width, height) of each track in a frame."""
    found = []
    for k in np.unique(labels):
        mask = labels == k
        found.append({"track": int(k) + 1, "area": int(mask.sum()), "box": box_of(mask)})
    return found
