"""From an image of any size to a `Prediction`, in memory.

The model has one image size, (H, W). `prepare.py` scales an image to fit it and pads the rest, or stretches the image;
`crop_output` removes the padding from what the model returns; `upsample_labels` brings masks to the size of the image.

Shapes: K slots, H W of the model's images, h w of the image without its padding.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from cutslots.inference.outlines import sharpen_outlines
from cutslots.inference.prediction import MAX_PIXELS, Prediction, strips
from cutslots.inference.prepare import Box, Images, Resize, fit_image, open_images
from cutslots.models.discovery import Discovery, FeatureOutput, ModelOutput, check_finite, map_output
from cutslots.models.mask_kinds import DEFAULT_MASK_KIND, MaskKind
from cutslots.models.refinement import finish_masks, high_recall_masks, merge_posterior, select_masks
from cutslots.models.training_data import output_errors


def predict_images(
    model: Discovery, images: Images, masks: MaskKind = DEFAULT_MASK_KIND, resize: Resize = "pad"
) -> list[Prediction]:
    """Return the objects in images; see `Discovery.predict`."""
    check_takes_images(model)
    predictions = [predict_image(model, image, masks, resize, name) for name, image in open_images(images)]
    unfamiliar = [each.name for each in predictions if is_unfamiliar(each)]
    if unfamiliar:
        warnings.warn(unfamiliar_sentence(model, unfamiliar, len(predictions)), stacklevel=3)
    return predictions


def check_takes_images(model: Discovery, name: str = "model") -> None:
    """Raise ValueError for a model of clips."""
    if model.spacetime:
        raise ValueError(f"{name} partitions clips, not images; see cutslots track and Discovery.track")


@torch.no_grad()
def predict_image(
    model: Discovery,
    image: Image.Image,
    masks: MaskKind = DEFAULT_MASK_KIND,
    resize: Resize = "pad",
    name: str = "image_0",
) -> Prediction:
    """Return the objects in one RGB image."""
    frame = run_model(model, model, image, resize)
    if masks not in ("refined", "high-recall"):
        return make_prediction(model, frame, select_masks(masks, frame.output, frame.pixels), name)
    merged = merge_posterior(frame.output, frame.pixels)
    refined, posterior = finish_masks(frame.output, merged, frame.pixels)
    shown = high_recall_masks(refined) if masks == "high-recall" else refined
    return make_prediction(model, frame, shown, name, values=posterior, sharpen=masks == "refined")


class Frame(NamedTuple):
    """An image, and what a model returns for it, without the padding."""

    image: Image.Image
    pixels: Tensor  # (1, 3, h, w) uint8
    output: ModelOutput


def run_model(model: Discovery, forward: Callable[[Tensor], ModelOutput], image: Image.Image, resize: Resize) -> Frame:
    """Call `forward`, the model itself or a tracker, on an image."""
    pixels, box = preprocess(model, image, resize)
    with fixed_seed(pixels.device):
        output = forward(pixels)
    output = crop_output(output, box)
    check_finite(model, masks=output.masks, reconstruction=output.reconstruction)
    return Frame(image, box.crop(pixels), output)


@contextmanager
def fixed_seed(device: torch.device) -> Iterator[None]:
    """Seed the random numbers of Slot Attention, which samples its initial slots. Those of the caller are restored."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        yield


def make_prediction(
    model: Discovery,
    frame: Frame,
    masks: Tensor,
    name: str,
    background: int | None = None,
    values: Tensor | None = None,
    sharpen: bool = False,
) -> Prediction:
    """Return the prediction for masks (1, K, h, w). Scores are means of `values` (1, K, h, w), by default the masks.

    `background` is that of an earlier frame; by default it is found in the labels. With `sharpen` the outlines in an
    image larger than the masks follow its edges.
    """
    image, soft = frame.image, masks[0].float().cpu()
    size = (image.height, image.width)
    labels, scores = upsample_labels(soft, size, None if values is None else values[0].float().cpu())
    background = find_background(labels) if background is None else background
    if sharpen and image.height * image.width > soft[0].numel():
        labels = sharpen_outlines(labels, soft, image, background)
    familiarity = _familiarity(model, frame)
    return Prediction(
        name=name,
        image=image,
        labels=labels,
        background=background,
        slot_scores=scores * (1.0 if familiarity is None else familiarity),
        soft_masks=soft,
        output=map_output(lambda x: x[0].cpu(), frame.output),
        familiarity=familiarity,
    )


def find_background(labels: np.ndarray) -> int:
    """Return the slot that is the background: the one with the most pixels on the border of the image."""
    border = np.concatenate([labels[0], labels[-1], labels[1:-1, 0], labels[1:-1, -1]])
    return int(np.bincount(border).argmax())


def _familiarity(model: Discovery, frame: Frame) -> float | None:
    if model.training_data is None:
        return None
    return model.training_data.familiarity(*map(float, output_errors(frame.output, frame.pixels)))


def is_unfamiliar(prediction: Prediction) -> bool:
    """Return whether an image is known to be far from the training data."""
    return prediction.familiarity is not None and prediction.familiarity < 1


def unfamiliar_sentence(model: Discovery, names: Sequence[str], count: int, what: str = "images") -> str:
    """Return a warning that some of `count` images are far from the training data of a model."""
    trained_on = f" ({model.training_data.description})" if model.training_data else ""
    which = names[0] if count == 1 else f"{len(names)} of {count} {what} (the first is {names[0]})"
    verb = "is" if count == 1 or len(names) == 1 else "are"
    return (
        f"{which} {verb} far from the training data of this checkpoint{trained_on}: "
        "the masks may not be objects, and their scores are lowered; for photographs see docs/photographs.md"
    )


def preprocess(model: Discovery, image: Image.Image, resize: Resize = "pad") -> tuple[Tensor, Box]:
    """Return an RGB image as uint8 (1, 3, H, W), at the size and on the device of a model, and where it lies in it."""
    pixels, box = fit_image(image, model.image_size, resize)
    return pixels.to(next(model.parameters()).device), box


def crop_output(output: ModelOutput, box: Box) -> ModelOutput:
    """Return the output of a model without the padding of its image; partition masks are on another grid and stay."""
    if isinstance(output, FeatureOutput):
        return _crop_features(output, box)
    slot_reconstructions = output.slot_reconstructions
    return output._replace(
        masks=box.crop(output.masks),
        reconstruction=box.crop(output.reconstruction),
        slot_reconstructions=slot_reconstructions if slot_reconstructions is None else box.crop(slot_reconstructions),
    )


def _crop_features(output: FeatureOutput, box: Box) -> FeatureOutput:
    """Crop features to the patches that the image touches."""
    rows, columns = (a // b for a, b in zip(output.masks.shape[-2:], output.target.shape[-2:], strict=True))
    top, left = box.top // rows, box.left // columns
    bottom, right = -(-(box.top + box.height) // rows), -(-(box.left + box.width) // columns)
    grid = Box(top, left, bottom - top, right - left)
    return output._replace(
        masks=box.crop(output.masks), reconstruction=grid.crop(output.reconstruction), target=grid.crop(output.target)
    )


def upsample_labels(
    masks: Tensor, shape: tuple[int, int], values: Tensor | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Upsample masks (K, h, w) to `shape`; return the winning slot of every pixel, uint8, and scores (K,).

    The score of a slot is the mean of `values` (K, h, w), by default its mask, over the pixels that it wins. Works in
    strips of rows: of a large image only the labels are in memory at once.
    """
    count = len(masks)
    labels, pixels, total = np.empty(shape, dtype=np.uint8), np.zeros(count), np.zeros(count)
    for rows in strips(shape, MAX_PIXELS):
        best, winner = torch.tensor(-1.0), torch.tensor(0, dtype=torch.uint8)
        for k, mask in enumerate(masks):
            mask = upsample_rows(mask, shape, rows)
            winner, best = torch.where(mask > best, k, winner), torch.fmax(best, mask)
        if values is not None:
            for k, value in enumerate(values):
                best = torch.where(winner == k, upsample_rows(value, shape, rows), best)
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
