"""Open any registered dataset, by its config or by the text of --data."""

from __future__ import annotations

import math
from typing import Any

from cutslots.data import builtin, folder, prepared  # noqa: F401  they register datasets
from cutslots.data.registry import DATASETS, DatasetConfig, check_split
from cutslots.data.text import parse_data
from cutslots.data.video import VideoFrames
from cutslots.dataset import Dataset, ImageSize, VideoDataset, check_image_size


def open_dataset(
    data: DatasetConfig | str,
    split: str,
    image_size: ImageSize | None = None,
    count: int | None = None,
    *,
    masks: bool = True,
    videos: bool = False,
) -> Dataset:
    """Open a split of a dataset.

    `image_size` is the side of a square or (H, W); None means 128, or the size of a prepared cache. By default videos
    are opened as images, frame by frame, and `count` keeps the first images. With `videos` they stay videos, and
    `count` keeps the first videos. Without `masks` a folder's masks are not read.
    """
    config = parse_data(data) if isinstance(data, str) else data
    check_split(split)
    size = config.default_image_size if image_size is None else check_image_size(image_size)
    context: dict[str, Any] = {"split": split, "image_size": size}
    if count is not None and not videos:
        frames = DATASETS.build(config, **context, count=0).frames
        opened = DATASETS.build(config, **context, count=math.ceil(count / frames))
    else:
        opened = DATASETS.build(config, **context, count=count)
    opened = opened if masks else opened.without_masks()
    if videos or opened.frames == 1:
        return opened
    if not isinstance(opened, VideoDataset):
        raise TypeError(f"{type(opened).__name__} has {opened.frames} frames; expected a VideoDataset")
    return VideoFrames(opened, count)
