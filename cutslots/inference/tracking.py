"""From a video to a `Prediction` for every frame, in constant memory.

Slots of a video are merged in all frames or in none, so merging needs all frames (see `refine_video_masks`). Refined
masks therefore take two passes over the video: the first one finds the slots to merge, the second one gives the masks.
Nothing of a frame is stored in between. Decoder masks take one pass.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import get_args

import torch
from PIL import Image
from torch import Tensor

from cutslots.inference.prediction import Prediction
from cutslots.inference.predictor import Frame, make_prediction, run_model
from cutslots.inference.prepare import Images, Resize, open_images
from cutslots.inference.video import open_video
from cutslots.models.discovery import Discovery
from cutslots.models.mask_kinds import VideoMaskKind
from cutslots.models.refinement import VIDEO_PIXEL_SIGMA, cut_masks, merge_masks, merge_tracks, posterior_masks
from cutslots.models.tracker import Tracker


def track_video(
    model: Discovery,
    video: Images,
    masks: VideoMaskKind = "refined",
    association: str | None = None,
    resize: Resize = "pad",
) -> Iterator[Prediction]:
    """Yield the objects in every frame of a video; see `Discovery.track`."""
    check_masks(masks)
    Tracker(model, association)  # checks the association before the first frame is asked for
    frames = _reader(video)

    def predictions() -> Iterator[Prediction]:
        merges = find_merges(model, frames(), association, resize) if masks == "refined" else None
        yield from track_frames(model, frames(), association, resize, merges)

    return predictions()


def check_masks(masks: str) -> None:
    """Raise ValueError for a kind of masks that videos do not have."""
    if masks not in get_args(VideoMaskKind):
        raise ValueError(f"masks is {masks!r}; expected one of {', '.join(get_args(VideoMaskKind))} for videos")


def _reader(video: Images) -> Callable[[], Iterator[Image.Image]]:
    """Return a function that opens a video from its first frame."""
    if isinstance(video, str | os.PathLike):
        path = Path(video)
        return lambda: open_video(path).frames
    return lambda: (image for _, image in open_images(video))


def find_merges(
    model: Discovery, frames: Iterable[Image.Image], association: str | None = None, resize: Resize = "pad"
) -> Tensor:
    """Return the track that each track is merged into, (1, K): the first pass over a video."""
    return merge_tracks((frame.output, frame.pixels) for frame in _run(model, frames, association, resize))


def track_frames(
    model: Discovery,
    frames: Iterable[Image.Image],
    association: str | None = None,
    resize: Resize = "pad",
    merges: Tensor | None = None,
) -> Iterator[Prediction]:
    """Yield the objects in every frame. With `merges` (1, K) the masks are refined, else they are the decoder's."""
    background = None  # that of the first frame
    for number, frame in enumerate(_run(model, frames, association, resize)):
        masks, values = frame.output.masks, None
        if merges is not None:
            values = merge_masks(posterior_masks(frame.output, frame.pixels, VIDEO_PIXEL_SIGMA), merges)
            masks = cut_masks(values, frame.pixels)
        prediction = make_prediction(model, frame, masks, f"frame_{number}", background, values, merges is not None)
        background = prediction.background
        yield prediction


def _run(model: Discovery, frames: Iterable[Image.Image], association: str | None, resize: Resize) -> Iterator[Frame]:
    """Yield the output for every frame, with slots in the order of tracks."""
    tracker = Tracker(model, association)
    for image in frames:
        with torch.no_grad():
            frame = run_model(model, tracker, image, resize)
        yield frame
