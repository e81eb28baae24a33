"""Contact sheets: the first images of a dataset, each above its mask, in one image."""

from __future__ import annotations

import numpy as np
from PIL import Image

from cutslots.dataset import Dataset, masks_to_show
from cutslots.viz.palette import PALETTE

MAX_IMAGES = 16

GAP = 2  # pixels between images


def contact_sheet(data: Dataset, columns: int = 8) -> Image.Image:
    """Return the first images of a dataset above their masks, at most 16.

    Of a dataset of videos, each row shows `columns` frames of one video.
    """
    count = min(len(data), MAX_IMAGES if data.frames == 1 else MAX_IMAGES // columns)
    sample = masks_to_show(data.get_batch(np.arange(count)), data.ignore_label)
    images, masks = sample.image.numpy(), sample.mask.numpy()
    height, width = images.shape[-2:]
    if count == 0:
        return Image.new("RGB", (width, height), "white")
    if data.frames > 1:
        frames = np.linspace(0, data.frames - 1, columns).astype(int)
        images, masks = (x[:, frames].reshape(-1, *x.shape[2:]) for x in (images, masks))
    columns = min(columns, len(images))
    rows = -(-len(images) // columns)
    sheet = np.full((rows * 2 * (height + GAP) - GAP, columns * (width + GAP) - GAP, 3), 255, dtype=np.uint8)
    for i, (image, mask) in enumerate(zip(images, masks, strict=True)):
        y, x = (i // columns) * 2 * (height + GAP), (i % columns) * (width + GAP)
        sheet[y : y + height, x : x + width] = image.transpose(1, 2, 0)
        sheet[y + height + GAP : y + 2 * height + GAP, x : x + width] = PALETTE[mask]
    return Image.fromarray(sheet)
