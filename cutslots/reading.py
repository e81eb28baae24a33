"""Which pixel is whose, read from what a model has drawn: sharper than its masks alone, and with fewer pieces.

A decoder's masks are blurred, and nothing keeps it from painting the ground, or one object, with several slots. Two
steps mend much of that without learning anything:

    evidence   masks m are a prior; the pixel x itself speaks too:  m_k exp(-|x - picture_k|^2 / 2 spread^2)
    joining    a slot whose pixels another one draws nearly as well is joined to it, cheapest first

Shapes: B batch, K slots, S side of the picture.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from cutslots.model import Found, as_floats

SPREAD = 0.2  # by which a channel of a pixel may stray from its slot's picture
TOLERANCE = 0.005  # mean squared error of a channel by which another slot may draw a slot's pixels worse


def read(found: Found, image: Tensor, spread: float = SPREAD, tolerance: float = TOLERANCE) -> Tensor:
    """Masks (B, K, S, S) by evidence, with slots joined: they sum to one, and joined slots are empty.

    >>> from cutslots.model import load
    >>> image = torch.rand(2, 3, 64, 64)
    >>> read(load("tiny")(image), image).shape
    torch.Size([2, 6, 64, 64])
    """
    masks, errors = weighed(found, image, spread)
    return _together(masks, joined(masks.argmax(1), errors, tolerance))


def read_film(
    found: Sequence[Found], image: Tensor, spread: float = SPREAD, tolerance: float = TOLERANCE
) -> list[Tensor]:
    """The same for the frames (B, T, 3, S, S) of films, followed: T masks (B, K, S, S). A slot is joined to another in
    all frames of a film or in none."""
    films = []
    for b, frames in enumerate(image):  # one film at a time: the pictures of all slots are large
        alone = (Found(*(part[b : b + 1] for part in frame)) for frame in found)
        masks, errors = (
            torch.cat(parts, 2)
            for parts in zip(*(weighed(f, x[None], spread) for f, x in zip(alone, frames, strict=True)), strict=True)
        )
        films.append(_together(masks, joined(masks.argmax(1), errors, tolerance)))
    return list(torch.cat(films).chunk(len(found), 2))


def weighed(found: Found, image: Tensor, spread: float) -> tuple[Tensor, Tensor]:
    """Masks by evidence, and the mean squared error of every slot's picture: (B, K, S, S) both."""
    errors = (found.pictures.float() - as_floats(image).float()[:, None]).square()  # (B, K, 3, S, S)
    evidence = -errors.sum(2) / (2 * spread**2)
    return (found.masks.float().clamp(min=1e-6).log() + evidence).softmax(1), errors.mean(2)


def _together(masks: Tensor, to: Tensor) -> Tensor:
    return torch.zeros_like(masks).scatter_add_(1, to[:, :, None, None].expand_as(masks), masks)


def joined(labels: Tensor, errors: Tensor, tolerance: float) -> Tensor:
    """The slot that each slot is joined to, (B, K), itself if none.

    `labels` (B, H, W) say whose pixel is whose, `errors` (B, K, H, W) how badly each slot draws it. Of all pairs that
    may be joined, the smaller to the larger, the one that costs least is joined first; then what is left is looked
    at again.
    """
    B, K = errors.shape[:2]
    pixels = F.one_hot(labels.flatten(1), K).to(errors.dtype)  # (B, HW, K)
    area, cost = pixels.sum(1), pixels.mT @ errors.flatten(2).mT  # cost[k, j]: of slot k's pixels drawn by slot j
    to = torch.arange(K, device=labels.device).repeat(B, 1)
    image = torch.arange(B, device=labels.device)
    for _ in range(K - 1):
        worse = (cost - cost.diagonal(dim1=1, dim2=2)[..., None]) / area[..., None].clamp(min=1)
        may = (area[:, :, None] > 0) & (area[:, None] >= area[:, :, None])
        may &= ~torch.eye(K, dtype=torch.bool, device=labels.device)
        least, pair = worse.masked_fill(~may, torch.inf).flatten(1).min(1)
        chosen = least < tolerance
        if not chosen.any():
            break
        b, small, large = image[chosen], (pair // K)[chosen], (pair % K)[chosen]
        to[chosen] = torch.where(to[chosen] == small[:, None], large[:, None], to[chosen])
        cost[b, large] += cost[b, small]
        area[b, large] += area[b, small]
        area[b, small] = 0
    return to
