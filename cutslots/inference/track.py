"""`cutslots track`: the objects in a video, as files.

    OUT/overlay.mp4 or .gif   the video blended with the colors of its tracks
    OUT/masks/000000.png      palette PNGs, value = track, from 1
    OUT/tracks.json           area and bounding box of every track in every frame; written last
    OUT/request.json          what was asked for

Frames are processed one at a time: memory does not grow with the length of the video. See `cutslots.models.tracker`.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image

import cutslots
from cutslots.devices import resolve_device
from cutslots.files import Layout, append_line, output_folder, progress, write_atomically
from cutslots.inference.coco import bounding_box
from cutslots.inference.predictor import crop_output, draw_overlay, preprocess, upsample_labels
from cutslots.inference.prepare import Resize
from cutslots.inference.video import MAX_GIF_FRAMES, Video, VideoWriter, has_pyav, open_video
from cutslots.models.checkpoints import load
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
) -> None:
    """Track the objects in a video and write them to `out`.

    `overwrite` replaces an earlier tracking in the folder. `plugins` register the parts of a model that has its own.
    """
    opened = open_video(video)
    model = load(checkpoint, resolve_device(device), plugins)
    tracker = Tracker(model, association)
    writer = _overlay_writer(overlay, opened, video, out)
    request = {"command": "track", "checkpoint": str(checkpoint), "video": str(video), "resize": resize}
    request |= {"association": tracker.association, "version": cutslots.__version__}
    torch.manual_seed(0)  # Slot Attention samples its initial slots
    count = 0
    with output_folder(out, LAYOUT, request, overwrite), _append_to(out / "tracks.json") as tracks:
        _remove_frames(out)
        with writer or contextlib.nullcontext(), progress() as bar:
            task = bar.add_task("frames", total=opened.length)
            for count, image in enumerate(opened.frames, 1):
                labels = _label_frame(tracker, image, resize)
                write_atomically(out / "masks" / f"{count - 1:06d}.png", encode_png(palette_image(labels + 1)))
                if writer:
                    draw_overlay(image, labels)
                    writer.add(np.asarray(image))
                if count == 1:
                    facts = {"video": video.name, "width": image.width, "height": image.height, "fps": opened.fps}
                    append_line(tracks, (json.dumps(facts)[:-1] + ', "frames": [').encode())
                append_line(tracks, (("," if count > 1 else "") + json.dumps(_describe_tracks(labels))).encode())
                bar.advance(task)
            append_line(tracks, b"]}")
    shown = f", {writer.path}" if writer else ""
    print(f"wrote {count} frames to {out}: {out / 'tracks.json'}{shown}, masks/")


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


def _label_frame(tracker: Tracker, image: Image.Image, resize: Resize) -> np.ndarray:
    """Return the track of every pixel of the next frame, uint8 from 0."""
    pixels, box = preprocess(tracker.model, image, resize)
    output = crop_output(tracker(pixels), box)
    return upsample_labels(output.masks[0], (image.height, image.width))[0]


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


def _describe_tracks(labels: np.ndarray) -> list[dict[str, Any]]:
    """Return number, area in pixels and bounding box (left, top, width, height) of each track in a frame."""
    tracks = []
    for k in np.unique(labels):
        mask = labels == k
        tracks.append({"track": int(k) + 1, "area": int(mask.sum()), "bbox": bounding_box(mask)})
    return tracks
