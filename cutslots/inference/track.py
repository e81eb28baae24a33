"""`cutslots track`: the objects in a video, as files.

    OUT/overlay.mp4 or .gif   the video with its objects in the colors of their tracks
    OUT/masks/000000.png      palette PNGs, value = track, from 1
    OUT/tracks.json           area, bounding box and score of every track in every frame, and which track is the
                              background; written last
    OUT/request.json          what was asked for

Frames are processed one at a time: memory does not grow with the length of the video. Refined masks take two passes.
See `tracking.py`.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np

import cutslots
from cutslots.devices import resolve_device
from cutslots.files import Layout, append_line, escape_unprintable, output_folder, progress, write_atomically
from cutslots.inference.coco import bounding_box
from cutslots.inference.prediction import Prediction
from cutslots.inference.predictor import is_unfamiliar, unfamiliar_sentence
from cutslots.inference.prepare import Resize
from cutslots.inference.tracking import check_masks, find_merges, track_frames
from cutslots.inference.video import MAX_GIF_FRAMES, Video, VideoWriter, has_pyav, open_video
from cutslots.models.checkpoints import load
from cutslots.models.mask_kinds import VideoMaskKind
from cutslots.models.tracker import Tracker
from cutslots.viz.images import encode_png, palette_image

OverlayFormat = Literal["auto", "mp4", "gif", "none"]

LAYOUT = Layout("tracking", ("overlay.mp4", "overlay.gif", "masks", "tracks.json"), marker="tracks.json")


def track(
    checkpoint: str,
    video: Path,
    out: Path,
    device: str = "auto",
    association: str | None = None,
    overlay: OverlayFormat = "auto",
    overwrite: bool = False,
    resize: Resize = "pad",
    plugins: Iterable[str | Path] = (),
    masks: VideoMaskKind = "refined",
    background: bool = True,
) -> None:
    """Track the objects in a video and write them to `out`.

    `overwrite` replaces an earlier tracking in the folder. `plugins` register the parts of a model that has its own.
    Without `background` the background has no mask and no track.
    """
    check_masks(masks)
    opened = open_video(video)
    model = load(checkpoint, resolve_device(device), plugins)
    association = Tracker(model, association).association
    writer = _overlay_writer(overlay, opened, video, out)
    request: dict[str, Any] = {
        "command": "track",
        "checkpoint": str(checkpoint),
        "video": str(video),
        "masks": masks,
        "resize": resize,
    }
    request |= {"association": association, "background": background, "version": cutslots.__version__}
    count = unfamiliar = 0
    with output_folder(out, LAYOUT, request, overwrite), _append_to(out / "tracks.json") as tracks:
        _remove_frames(out)
        with writer or contextlib.nullcontext(), progress() as bar:
            merges = None
            if masks == "refined":
                frames = bar.track(open_video(video).frames, total=opened.length, description="slots to merge")
                merges = find_merges(model, frames, association, resize)
            frames = bar.track(opened.frames, total=opened.length, description="frames")
            for count, prediction in enumerate(track_frames(model, frames, association, resize, merges), 1):
                if count == 1:
                    append_line(tracks, _header(prediction, video, opened.fps, background))
                described = json.dumps(_describe_tracks(prediction, background))
                append_line(tracks, (("," if count > 1 else "") + described).encode())
                labels = palette_image(prediction.numbered(background))
                write_atomically(out / "masks" / f"{count - 1:06d}.png", encode_png(labels))
                if writer:
                    writer.add(np.asarray(prediction.overlay()))
                unfamiliar += is_unfamiliar(prediction)
            append_line(tracks, b"]}")
    shown = f", {writer.path}" if writer else ""
    print(f"wrote {count} frames to {out}: {out / 'tracks.json'}{shown}, masks/")
    if 2 * unfamiliar > count:
        sentence = escape_unprintable(unfamiliar_sentence(model, [video.name], 1))
        print(f"cutslots: warning: {sentence}", file=sys.stderr)


def _overlay_writer(overlay: OverlayFormat, opened: Video, video: Path, out: Path) -> VideoWriter | None:
    kind = overlay if overlay != "auto" else "mp4" if has_pyav() else "gif"
    if kind == "gif" and (opened.length or 0) > MAX_GIF_FRAMES:
        raise ValueError(
            f"video: {video} has over {MAX_GIF_FRAMES} frames, too many for a GIF; pass --overlay mp4 or none"
        )
    return VideoWriter(out / f"overlay.{kind}", opened.fps) if kind != "none" else None


def _remove_frames(out: Path) -> None:
    """Remove what an interrupted run of the same request wrote: a video is always tracked from its first frame."""
    for name in ("overlay.mp4", "overlay.gif", "masks/*.png"):
        for old in (*out.glob(name), *out.glob(f"{name}.part")):
            old.unlink()
    (out / "masks").mkdir(exist_ok=True)


@contextlib.contextmanager
def _append_to(path: Path) -> Iterator[Path]:
    """Yield a temporary file to append to; it gets its final name at the end."""
    part = path.with_name(path.name + ".part")
    part.unlink(missing_ok=True)  # of a run that was killed
    try:
        yield part
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def _header(prediction: Prediction, video: Path, fps: float, background: bool) -> bytes:
    """Return the beginning of tracks.json, up to the list of frames."""
    width, height = prediction.image.size
    track = prediction.background + 1 if background and prediction.background is not None else None
    facts = {"video": video.name, "width": width, "height": height, "fps": fps, "background": track}
    return (json.dumps(facts)[:-1] + ', "frames": [').encode()


def _describe_tracks(prediction: Prediction, background: bool) -> list[dict[str, Any]]:
    """Return number, area in pixels, bounding box (left, top, width, height) and score of each track in a frame."""
    tracks = []
    for k in np.unique(prediction.labels):
        if k != prediction.background or background:
            mask = prediction.labels == k
            score = round(float(prediction.slot_scores[k]), 4)
            facts = {"track": int(k) + 1, "area": int(mask.sum()), "bbox": bounding_box(mask), "score": score}
            tracks.append(facts)
    return tracks
