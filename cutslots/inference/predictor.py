"""From an image of any size to the masks of a model, in memory.

The model has one image size, (H, W). `prepare.py` scales an image to fit it and pads the rest, or stretches the image;
`crop_output` removes the padding from what the model returns; `upsample_labels` brings masks to the size of the image.

Shapes: K slots, H W of the model's images, h w of the image without its padding.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from cutslots.evaluation.visualize import colorize
from cutslots.inference.prepare import Box, Resize, fit_image
from cutslots.models.discovery import Discovery, DiscoveryOutput, check_finite
from cutslots.models.mask_kinds import DEFAULT_MASK_KIND, MaskKind
from cutslots.models.refinement import select_masks
from cutslots.viz.images import blend_colors, to_uint8

MAX_PIXELS = 2**22  # of a large image that are processed at once


@torch.no_grad()
def predict_image(
    model: Discovery, image: Image.Image, masks: MaskKind = DEFAULT_MASK_KIND, resize: Resize = "pad"
) -> tuple[np.ndarray, np.ndarray, Image.Image]:
    """Return the slot of every pixel, uint8 from 0, the confidence (K,) of each slot, and the reconstruction.

    Labels and reconstruction have the size of the image. The confidence of a slot is the mean of its mask over the
    pixels that it wins.
    """
    torch.manual_seed(0)  # Slot Attention samples its initial slots
    pixels, box = preprocess(model, image, resize)
    output = crop_output(model(pixels), box)
    check_finite(model, masks=output.masks, reconstruction=output.reconstruction)
    selected = select_masks(masks, output, box.crop(pixels))[0]
    labels, scores = upsample_labels(selected, (image.height, image.width))
    reconstruction = Image.fromarray(to_uint8(output.reconstruction[0]))
    return labels, scores, reconstruction.resize(image.size, Image.Resampling.BICUBIC)


def preprocess(model: Discovery, image: Image.Image, resize: Resize = "pad") -> tuple[Tensor, Box]:
    """Return an RGB image as uint8 (1, 3, H, W), at the size and on the device of a model, and where it lies in it."""
    pixels, box = fit_image(image, model.image_size, resize)
    return pixels.to(next(model.parameters()).device), box


def crop_output(output: DiscoveryOutput, box: Box) -> DiscoveryOutput:
    """Return the output of a model without the padding of its image; partition masks are on another grid and stay."""
    return output._replace(
        masks=box.crop(output.masks),
        reconstruction=box.crop(output.reconstruction),
        slot_reconstructions=box.crop(output.slot_reconstructions),
    )


def upsample_labels(masks: Tensor, shape: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Upsample masks (K, h, w) to `shape`; return the winning slot of every pixel, uint8, and confidences (K,).

    Works in strips of rows: of a large image only the labels are in memory at once.
    """
    masks, count = masks.float().cpu(), len(masks)
    labels, pixels, total = np.empty(shape, dtype=np.uint8), np.zeros(count), np.zeros(count)
    for rows in strips(shape, MAX_PIXELS):
        best, winner = torch.tensor(-1.0), torch.tensor(0, dtype=torch.uint8)
        for k, mask in enumerate(masks):
            mask = upsample_rows(mask, shape, rows)
            winner, best = torch.where(mask > best, k, winner), torch.fmax(best, mask)
        labels[rows] = winner
        pixels += torch.bincount(winner.flatten(), minlength=count).numpy()
        total += torch.bincount(winner.flatten(), best.flatten().double(), count).numpy()  # float32 counts to 2^24
    return labels, total / np.maximum(pixels, 1)


def upsample_rows(mask: Tensor, shape: tuple[int, int], rows: slice) -> Tensor:
    """Return some rows of a mask (h, w) that is upsampled to `shape` bilinearly."""
    (height, width), small = shape, len(mask)
    if rows.stop - rows.start < height:  # F.interpolate returns all rows
        position = (torch.arange(rows.start, rows.stop, dtype=torch.float64) + 0.5) * small / height - 0.5
        position = position.clamp(0, small - 1)
        above, below = position.floor().long(), position.ceil().long()
        mask = mask[above].lerp(mask[below], (position - above).float()[:, None])
        height = len(mask)
    return F.interpolate(mask[None, None], (height, width), mode="bilinear", align_corners=False)[0, 0]


def strips(shape: tuple[int, ...], pixels: int) -> Iterator[slice]:
    """Yield the rows of an image (height, width) in slices of about so many pixels."""
    height, width = shape
    step = max(1, pixels // width)
    return (slice(y, min(y + step, height)) for y in range(0, height, step))


def draw_overlay(image: Image.Image, labels: np.ndarray) -> None:
    """Blend the colors of the slots into the image itself, in strips of rows: blending takes float64."""
    for rows in strips(labels.shape, MAX_PIXELS // 16):
        strip = image.crop((0, rows.start, image.width, rows.stop))
        image.paste(Image.fromarray(blend_colors(np.asarray(strip), colorize(labels[rows]))), (0, rows.start))
