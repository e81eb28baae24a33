"""The registry of datasets.

A dataset is a config and the class or function that opens it:

    @dataclass(frozen=True)
    class DiscsConfig(DatasetConfig):
        max_discs: int = 5

    @DATASETS.register("discs", DiscsConfig)
    class Discs(Dataset):
        def __init__(self, split: str, image_size: tuple[int, int], count: int | None, max_discs: int) -> None: ...

`split` is "train", "val" or "test", `count` the number of images or videos to keep, None for all. A dataset that has
no images for a split raises `EmptySplit`. Two option names have a short form on the command line: `path: str`, as in
NAME:PATH, and `num_objects: tuple[int, int]`, as in NAME:2-5.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from cutslots.registry import PartConfig, Registry
from cutslots.scenes.sample import SPLITS


@dataclass(frozen=True)
class DatasetConfig(PartConfig):
    """Base of the configs of datasets."""

    default_image_size: ClassVar[tuple[int, int] | None] = (128, 128)  # None: the dataset knows its own


DATASETS = Registry("dataset", DatasetConfig)


def check_split(split: str) -> None:
    if split not in SPLITS:
        raise ValueError(f"split is {split!r}; expected one of {', '.join(SPLITS)}")
