"""Random augmentations of batches of images: torch operations on the device of the images.

Images are (B, 3, H, W) with values in [0, 1]. Each image has random numbers of its own. For `cutslots pretrain` they
come from torch's generator, which the training loop seeds before every step: a resumed run sees the same views.

    random_crops         a box of random area and aspect ratio, resized to the image, bilinearly
    random_flips         left to right
    color_jitter         brightness, contrast, saturation and hue, in this order
    random_grayscale     the luma of ITU-R BT.601, as Pillow has it
    random_blur          a Gaussian of random width
    ViewAugmentation     which of these changes a view of SimCLR has, and how strong they are
    augment_view         makes a view

The loader of `cutslots train` passes random numbers of its own, which do not depend on the number of processes:

    BatchAugmentation    which of these changes a run makes, and how strong they are
    augment_batch        crops, colors, blur and noise, of images or clips; frames of a clip differ in their noise
    camouflage           objects take on the background's texture, where labels say what they are
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

LUMA = (0.299, 0.587, 0.114)  # of red, green and blue
YIQ = (LUMA, (0.5959, -0.2746, -0.3213), (0.2115, -0.5227, 0.3112))  # hue is the angle of (I, Q)
RGB = torch.linalg.inv(torch.tensor(YIQ, dtype=torch.float64)).tolist()  # the way back
MAX_LOG_ASPECT = math.log(4 / 3)  # of boxes, width to height
MAX_SIGMA = 2 / 224  # of blurs, relative to the smaller side: 2 pixels at the size for which SimCLR chose it
JITTER_PROBABILITY = 0.8
HUE = 0.25  # the largest rotation of hues, in turns, at a strength of 1; other changes are up to 1


class ViewAugmentation(NamedTuple):
    """How strongly images are augmented."""

    min_crop: float = 0.2  # smallest area of a box, relative to the image
    jitter: float = 0.8  # strength of the changes of colors
    grayscale: float = 0.2  # probability
    blur: float = 0.5  # probability


def augment_view(image: Tensor, strength: ViewAugmentation) -> Tensor:
    """Return a random view of each image, without gradients."""
    with full_precision(image):
        view = random_flips(random_crops(image, strength.min_crop))
        view = color_jitter(view, strength.jitter)
        view = random_grayscale(view, strength.grayscale)
        return random_blur(view, strength.blur)


def crop_and_flip(image: Tensor, min_area: float) -> Tensor:
    """Return a random box of each image, mirrored at random, without gradients."""
    with full_precision(image):
        return random_flips(random_crops(image, min_area))


@contextlib.contextmanager
def full_precision(image: Tensor) -> Iterator[None]:
    """Compute without autocast, whose half precision would move pixels, and without gradients."""
    with torch.no_grad(), torch.autocast(image.device.type, enabled=False):
        yield


# ----------------------------------------------------------------------------------------------------------- geometry


def random_crops(image: Tensor, min_area: float) -> Tensor:
    """Return a random box of each image, resized to the image."""
    return crop(image, random_boxes(image, min_area))


def random_boxes(image: Tensor, min_area: float) -> Tensor:
    """Return boxes (B, 4) in the units of the image: top, left, height, width, from 0 to 1."""
    return to_boxes(_uniform(image, 4), min_area)


def to_boxes(numbers: Tensor, min_area: float) -> Tensor:
    """Return boxes (B, 4) of random numbers (4, B): of area, aspect ratio, top and left."""
    area, aspect, top, left = numbers
    area = min_area + (1 - min_area) * area
    ratio = torch.exp(MAX_LOG_ASPECT * (2 * aspect - 1))
    height, width = (area / ratio).sqrt().clamp(max=1), (area * ratio).sqrt().clamp(max=1)
    return torch.stack([top * (1 - height), left * (1 - width), height, width], 1)


def crop(image: Tensor, boxes: Tensor, mode: str = "bilinear") -> Tensor:
    """Return the box of each image, resized to the image; beyond the image its border is repeated.

    A box is enlarged, never reduced, so that no filter against aliasing is needed.
    """
    top, left, height, width = boxes.to(image.dtype).unbind(1)
    zero = torch.zeros_like(top)
    # From coordinates of the view in [-1, 1] to those of the image.
    rows = torch.stack([width, zero, 2 * left + width - 1], 1), torch.stack([zero, height, 2 * top + height - 1], 1)
    grid = F.affine_grid(torch.stack(rows, 1), list(image.shape), align_corners=False)
    return F.grid_sample(image, grid, mode=mode, padding_mode="border", align_corners=False)


def random_flips(image: Tensor) -> Tensor:
    """Return half of the images mirrored, left to right."""
    return _select(image, 0.5, image.flip(-1))


# ------------------------------------------------------------------------------------------------------------- colors


def color_jitter(image: Tensor, strength: float) -> Tensor:
    """Return most images with other brightness, contrast, saturation and hue."""
    brightness, contrast, saturation, hue = (2 * x - 1 for x in _uniform(image, 4))
    changed = adjust_brightness(image, 1 + strength * brightness)
    changed = adjust_contrast(changed, 1 + strength * contrast)
    changed = adjust_saturation(changed, 1 + strength * saturation)
    return _select(image, JITTER_PROBABILITY, rotate_hue(changed, HUE * strength * hue))


def adjust_brightness(image: Tensor, factor: Tensor) -> Tensor:
    """Return images times a factor (B,), which is not negative."""
    return _blend(image, torch.zeros_like(image), factor)


def adjust_contrast(image: Tensor, factor: Tensor) -> Tensor:
    """Return images whose difference from their mean luma is multiplied by a factor (B,)."""
    return _blend(image, luma(image).mean((2, 3), keepdim=True), factor)


def adjust_saturation(image: Tensor, factor: Tensor) -> Tensor:
    """Return images whose difference from their luma is multiplied by a factor (B,)."""
    return _blend(image, luma(image), factor)


def rotate_hue(image: Tensor, turns: Tensor) -> Tensor:
    """Return images whose chroma is rotated in the plane of I and Q by `turns` (B,). Luma stays, but for clipping."""
    angle = (2 * math.pi * turns).to(image.dtype).view(-1, 1, 1)
    y, i, q = _mix(image.unbind(1), YIQ)
    rotated = y, angle.cos() * i - angle.sin() * q, angle.sin() * i + angle.cos() * q
    return torch.stack(_mix(rotated, RGB), 1).clamp(0, 1)


def _mix(channels: Sequence[Tensor], matrix: Sequence[Sequence[float]]) -> list[Tensor]:
    """Return a matrix times channels. Its numbers stay in Python: copying them to a device would make it wait."""
    a, b, c = channels
    return [x * a + y * b + z * c for x, y, z in matrix]


def random_grayscale(image: Tensor, probability: float) -> Tensor:
    """Return some images without color."""
    return _select(image, probability, luma(image).expand_as(image))


def luma(image: Tensor) -> Tensor:
    """Return the luma (B, 1, H, W)."""
    red, green, blue = LUMA
    return red * image[:, :1] + green * image[:, 1:2] + blue * image[:, 2:]


def _blend(image: Tensor, other: Tensor, factor: Tensor) -> Tensor:
    return torch.lerp(other.expand_as(image), image, factor.to(image.dtype).view(-1, 1, 1, 1)).clamp(0, 1)


# --------------------------------------------------------------------------------------------------------------- blur


def random_blur(image: Tensor, probability: float) -> Tensor:
    """Return some images blurred by Gaussians of random width."""
    return _select(image, probability, _blur_by(image, _uniform(image, 1)[0]))


def _blur_by(image: Tensor, numbers: Tensor) -> Tensor:
    """Return images blurred by Gaussians whose widths follow from random numbers (B,)."""
    largest = MAX_SIGMA * min(image.shape[-2:])
    return blur(image, largest * (0.05 + 0.95 * numbers), math.ceil(3 * largest))


def blur(image: Tensor, sigma: Tensor, radius: int) -> Tensor:
    """Return images blurred by Gaussians of standard deviations (B,) in pixels, truncated, with borders repeated."""
    offsets = torch.arange(-radius, radius + 1, device=image.device, dtype=image.dtype)
    weights = torch.exp(-0.5 * (offsets / sigma.to(image.dtype)[:, None]) ** 2)
    weights = (weights / weights.sum(1, keepdim=True)).repeat_interleave(3, 0)[:, None]  # (3 B, 1, taps)
    flat = image.flatten(0, 1)[None]  # every channel of every image has a kernel of its own
    for kernel, padding in (
        (weights[..., None, :], (radius, radius, 0, 0)),
        (weights[..., None], (0, 0, radius, radius)),
    ):
        flat = F.conv2d(F.pad(flat, padding, mode="replicate"), kernel, groups=flat.shape[1])
    return flat[0].unflatten(0, image.shape[:2])


def _select(image: Tensor, probability: float, changed: Tensor) -> Tensor:
    """Return the changed image with this probability, for each image."""
    return torch.where(_uniform(image, 1)[0].view(-1, 1, 1, 1) < probability, changed, image)


def _uniform(image: Tensor, count: int) -> Tensor:
    """Return uniform random numbers (count, B), float32."""
    return torch.rand(count, image.shape[0], device=image.device)


# --------------------------------------------------------------------------------------------- cutslots train


class BatchAugmentation(NamedTuple):
    """How strongly `cutslots train` changes images. By default it does not."""

    min_crop_area: float = 1.0  # smallest area of a box, relative to the image
    brightness: float = 0.0  # largest difference of the factor from 1; so for contrast and saturation
    contrast: float = 0.0
    saturation: float = 0.0
    hue: float = 0.0  # largest rotation, in turns
    blur: float = 0.0  # probability
    noise: float = 0.0  # largest standard deviation, for values from 0 to 1
    camouflage: float = 0.0  # probability; it needs labels


Draw = Callable[[str, int], Tensor]  # random numbers in [0, 1), (count, B), of the change with this name


def augment_batch(
    image: Tensor, strength: BatchAugmentation, draw: Draw, noise: Callable[[Sequence[int]], Tensor]
) -> Tensor:
    """Return changed uint8 images (B, 3, H, W) or clips (B, T, 3, H, W). `noise` returns normal numbers of a shape.

    Images may have labels as a fourth channel.
    """
    frames = image.shape[1] if image.ndim == 5 else 1

    def numbers(name: str, count: int = 1) -> Tensor:
        return draw(name, count).to(image.device, torch.float32).repeat_interleave(frames, 1)

    with full_precision(image):
        view, labels = image.flatten(0, -4).split([3, image.shape[-3] - 3], 1)
        view = view / 255
        if strength.camouflage:
            chosen, amount, down, right = numbers("camouflage", 4)
            hidden = camouflage(view, labels[:, 0], amount, down, right)
            view = torch.where((chosen < strength.camouflage).view(-1, 1, 1, 1), hidden, view)
        if strength.min_crop_area < 1:
            boxes = to_boxes(numbers("crop", 4), strength.min_crop_area)
            view = crop(view, boxes)
            if labels.shape[1]:
                labels = crop(labels.float(), boxes, "nearest").to(labels.dtype)
        for name, change in COLOR_CHANGES.items():
            if largest := getattr(strength, name):
                view = change(view, largest * (2 * numbers(name)[0] - 1))
        if strength.blur:
            width, chosen = numbers("blur", 2)
            view = torch.where((chosen < strength.blur).view(-1, 1, 1, 1), _blur_by(view, width), view)
        if strength.noise:
            normal = noise((*image.shape[:-3], *view.shape[1:])).view_as(view)
            view = view + (strength.noise * numbers("noise")[0]).view(-1, 1, 1, 1) * normal
        return torch.cat([(255 * view.clamp(0, 1) + 0.5).to(torch.uint8), labels], 1).view_as(image)


COLOR_CHANGES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "brightness": lambda image, change: adjust_brightness(image, 1 + change),
    "contrast": lambda image, change: adjust_contrast(image, 1 + change),
    "saturation": lambda image, change: adjust_saturation(image, 1 + change),
    "hue": rotate_hue,
}


# ---------------------------------------------------------------------------------------------------------- camouflage

MAX_LABELS = 32
SHADING_RADIUS = 1 / 32  # of the smaller side; light changes more slowly on an object than its texture
SHADING_RANGE = (0.3, 2.5)


def camouflage(image: Tensor, labels: Tensor, amount: Tensor, down: Tensor, right: Tensor) -> Tensor:
    """Return images (B, 3, H, W) whose objects have the background's texture, shaded as the objects were.

    `labels` (B, H, W) say what the objects are; label 0 is the background. An object gets the pixels of the
    background that are some way `down` and `right` of it, random numbers (B,) in units of the image, times its shading:
    its luma, blurred, relative to its mean. Where there is no background, it keeps its texture, and its mean color
    becomes the background's. An image without background stays as it is. `amount` (B,), from 0 to 1, says how much of
    the objects' own colors is gone.
    """
    # Products of zeros and ones add in one order on CUDA, unlike scatter_add.
    members = (labels.flatten(1)[..., None] == torch.arange(MAX_LABELS, device=labels.device)).to(image.dtype)
    area = members.sum(1)
    is_object = (labels != 0)[:, None]
    color = (image.flatten(2) @ members) / area.clamp(min=1)[:, None]  # (B, 3, L)
    own = (color @ members.mT).view_as(image)
    background = color[..., :1, None]
    moved, moved_labels = (_shift(x, down, right) for x in (image, labels[:, None]))
    shaded = moved * _shading(luma(image) / luma(own).clamp(min=1e-2), is_object)
    hidden = torch.where(moved_labels == 0, shaded, image - own + background)
    mixed = torch.lerp(image, hidden, amount.sqrt().view(-1, 1, 1, 1).to(image.dtype))  # most of it, on average
    return torch.where(is_object & (area[:, 0] > 0).view(-1, 1, 1, 1), mixed, image).clamp(0, 1)


def _shift(x: Tensor, down: Tensor, right: Tensor) -> Tensor:
    """Return what is `down` and `right` of each pixel of (B, C, H, W), in units of the image. Beyond, it repeats."""
    (B, _, H, W), device = x.shape, x.device
    image = torch.arange(B, device=device)[:, None, None]
    rows = (torch.arange(H, device=device) + (down * H).long()[:, None]) % H
    columns = (torch.arange(W, device=device) + (right * W).long()[:, None]) % W
    return x.movedim(1, 3)[image, rows[:, :, None], columns[:, None]].movedim(3, 1)


def _shading(relative: Tensor, is_object: Tensor) -> Tensor:
    """Return the luma of objects relative to their means (B, 1, H, W), blurred over pixels of objects."""
    radius = max(1, round(SHADING_RADIUS * min(relative.shape[-2:])))
    total, count = (F.avg_pool2d(x, 2 * radius + 1, 1, radius) for x in (relative * is_object, is_object.to(relative)))
    return (total / count.clamp(min=1e-6)).clamp(*SHADING_RANGE)
