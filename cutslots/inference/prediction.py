"""`Prediction`: the objects in one image, as `Discovery.predict` and `Discovery.track` return them.

Shapes: N objects, K slots, H W the image, h w the model's image without padding.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor

from cutslots.evaluation.visualize import colorize
from cutslots.files import write_atomically
from cutslots.inference.coco import add_annotations, bounding_box, new_coco
from cutslots.models.discovery import ModelOutput
from cutslots.models.feature_colors import reconstruction_colors
from cutslots.viz.images import blend_colors, encode_png, palette_image, to_uint8

MAX_PIXELS = 2**22  # of a large image that are processed at once


@dataclass(frozen=True, eq=False)
class Prediction:
    """The objects in one image, or in one frame of a video.

    Row i of `slots`, `masks`, `boxes` and `scores` is object i. The background is not among them.
    """

    name: str
    """Name of the file; image_0, frame_0, ... for images in memory."""
    image: Image.Image
    """The image, RGB."""
    labels: np.ndarray
    """(H, W) uint8: the slot of every pixel, from 0, the background included. Of a video: the track."""
    background: int | None
    """The slot that is the background: the one with the most pixels of the image's border."""
    slot_scores: np.ndarray
    """(K,) the score of every slot; see `scores`."""
    soft_masks: Tensor
    """(K, h, w) float32 on the CPU: the masks at the resolution of the model. `labels` is their maximum, upsampled; of
    refined masks the outlines then follow the image."""
    output: ModelOutput
    """Slots, decoder masks and reconstructions of the model, without batch axis and padding, on the CPU."""
    familiarity: float | None
    """1 for an image like the training data of the checkpoint, less for others; None if the checkpoint has no
    training_data.json."""

    @cached_property
    def slots(self) -> np.ndarray:
        """(N,) the slots of the objects: those that win a pixel, without the background."""
        found = np.unique(self.labels)
        return found[found != self.background] if self.background is not None else found

    def __len__(self) -> int:
        return len(self.slots)

    @property
    def masks(self) -> np.ndarray:
        """(N, H, W) bool: the mask of every object. Masks do not overlap."""
        return self.labels == self.slots[:, None, None]

    @property
    def background_mask(self) -> np.ndarray:
        """(H, W) bool: the pixels of the background."""
        return self.labels == (-1 if self.background is None else self.background)

    @cached_property
    def boxes(self) -> np.ndarray:
        """(N, 4) int: left, top, right, bottom of the smallest box around every object. Right and bottom are exclusive:
        the width is right - left."""
        boxes = np.array([bounding_box(self.labels == k) for k in self.slots], dtype=int).reshape(-1, 4)
        boxes[:, 2:] += boxes[:, :2]
        return boxes

    @property
    def scores(self) -> np.ndarray:
        """(N,) in [0, 1]: the mean of an object's mask over its pixels, times `familiarity`.

        Of refined masks that is the mean posterior probability, of an object that the model missed the background's.
        High-recall masks have the scores of refined ones."""
        return self.slot_scores[self.slots]

    @property
    def reconstruction(self) -> Image.Image:
        """The model's reconstruction at the size of the image; of features, their first three principal components."""
        small = Image.fromarray(to_uint8(reconstruction_colors(self.output)))
        return small.resize(self.image.size, Image.Resampling.BICUBIC)

    def overlay(self) -> Image.Image:
        """Return the image with its objects in the colors of their slots. The background keeps its colors."""
        image = self.image.copy()
        draw_overlay(image, self.labels, self.background)
        return image

    def save(self, folder: str | Path, background: bool = True) -> None:
        """Write overlay.png, labels.png, slot_01.png ... and reconstruction.png to a folder, as `cutslots predict`.

        Without `background` its pixels are 0 in labels.png, and it has no slot_XX.png. Old slot_*.png are removed."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob("slot_*.png"):
            old.unlink()
        write_atomically(folder / "reconstruction.png", encode_png(self.reconstruction))
        write_atomically(folder / "overlay.png", encode_png(self.overlay()))
        for name, content in mask_files(self.numbered(background)):
            write_atomically(folder / name, content)

    def numbered(self, background: bool = True) -> np.ndarray:
        """Return the labels from 1, as files hold them. Without `background` its pixels are 0."""
        labels = self.labels + np.uint8(1)
        if not background:
            labels[self.background_mask] = 0
        return labels

    def add_to(self, coco: dict[str, Any], background: bool = True) -> None:
        """Add the image and its masks to a COCO dictionary."""
        add_annotations(coco, self.name, self.labels, self.slot_scores, self.background, background)


def to_coco(predictions: Iterable[Prediction], background: bool = True) -> dict[str, Any]:
    """Return predictions as a dictionary in COCO's format, which `json.dump` writes.

    Category 1 is "object", category 2 "background". Without `background` there is no annotation of category 2.
    """
    coco = new_coco()
    for prediction in predictions:
        prediction.add_to(coco, background)
    return coco


def mask_files(labels: np.ndarray) -> Iterator[tuple[str, bytes]]:
    """Yield name and content of labels.png and of slot_01.png ... for labels (height, width), from 1; 0 is no slot."""
    yield "labels.png", encode_png(palette_image(labels))
    for k in np.unique(labels[labels > 0]):
        yield f"slot_{k:02d}.png", encode_png(np.uint8(255) * (labels == k))


def draw_overlay(image: Image.Image, labels: np.ndarray, background: int | None = None) -> None:
    """Blend the colors of the slots into the image itself, in strips of rows: blending takes float64.

    The pixels of the slot `background` stay as they are."""
    for rows in strips(labels.shape, MAX_PIXELS // 16):
        strip = np.asarray(image.crop((0, rows.start, image.width, rows.stop)))
        colored = blend_colors(strip, colorize(labels[rows]))
        if background is not None:
            colored = np.where((labels[rows] == background)[..., None], strip, colored)
        image.paste(Image.fromarray(colored), (0, rows.start))


def strips(shape: tuple[int, ...], pixels: int) -> Iterator[slice]:
    """Yield the rows of an image (height, width) in slices of about so many pixels."""
    height, width = shape
    step = max(1, pixels // width)
    return (slice(y, min(y + step, height)) for y in range(0, height, step))
