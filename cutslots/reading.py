"""Which pixel is whose, read from what a model has drawn: sharper than its masks alone, and with fewer pieces.

A decoder's masks are blurred, and nothing keeps it from painting the ground, or one object, with several slots. Two
steps mend much of that without learning anything, and a third is for those who would rather not miss a thing:

    evidence   masks m are a prior; the pixel x itself speaks too:  m_k exp(-|x - picture_k|^2 / 2 spread^2)
    joining    slots that draw alike where their masks meet are one, the likest first:  the mean of
               |picture_k - picture_j|^2 over the picture, weighted by m_k m_j, against the variance of the whole
    eager      the ground, the largest of all, gives way to slots that are sure enough of what they would take

Only where masks meet have both slots learned what to draw; elsewhere a slot's picture means nothing.

Shapes: B batch, K slots, S side of the picture.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from cutslots.model import Found, as_floats

SPREAD = 0.2  # by which a channel of a pixel may stray from its slot's picture
LIKENESS = 1.0  # up to this share of the variance of what is drawn, slots are alike
FILM_LIKENESS = 0.3  # in films, where slots that are joined once are joined for good
GROUND = 1 / 50  # what the ground weighs where it gives way
SURE = 0.55  # how sure a slot has to be, on average, of what it would have then
MEETING = 1 / 800  # the share of the picture in which two slots have to meet, for anything to be said of them


def read(found: Found, image: Tensor, spread: float = SPREAD, likeness: float = LIKENESS) -> Tensor:
    """Masks (B, K, S, S) by evidence, with slots joined: they sum to one, and joined slots are empty.

    >>> from cutslots.model import load
    >>> image = torch.rand(2, 3, 64, 64)
    >>> read(load("tiny")(image), image).shape
    torch.Size([2, 6, 64, 64])
    """
    return _together(weighed(found, image, spread), joined(meetings(found), likeness))


def eager(masks: Tensor) -> Tensor:
    """Masks (B, K, S, S) that have been read, in which the ground, the largest, gives way to slots that are sure.

    If it weighed GROUND of what it does, slots would win some of it. One that has more than SURE of all that would then
    be its own, on average, gets that; one that has less keeps what it has. Fewer objects are missed, and outlines are
    drawn too wide: ARI-FG, which does not ask for the ground, rises; mIoU and ARI fall. How sure these masks look is
    not how sure the slots were.
    """
    K = masks.shape[1]
    ground = nn.functional.one_hot(masks.mean((2, 3)).argmax(1), K).bool()  # (B, K)
    given = masks * torch.where(ground, GROUND, 1.0)[:, :, None, None]
    won = nn.functional.one_hot(given.argmax(1), K).movedim(-1, 1)
    sure = (won * masks).sum((2, 3)) > SURE * won.sum((2, 3))  # not where nothing would be won
    taken = masks * torch.where(sure & ~ground, 1 / GROUND, 1.0)[:, :, None, None]
    return taken / taken.sum(1, keepdim=True)


def read_film(
    found: Sequence[Found], image: Tensor, spread: float = SPREAD, likeness: float = FILM_LIKENESS
) -> list[Tensor]:
    """The same for the frames (B, T, 3, S, S) of films, followed: T masks (B, K, S, S). A slot is joined to another in
    all frames of a film or in none."""
    to = joined(Meetings(*(torch.stack(each).mean(0) for each in zip(*map(meetings, found), strict=True))), likeness)
    return [_together(weighed(each, image[:, t], spread), to) for t, each in enumerate(found)]


def weighed(found: Found, image: Tensor, spread: float = SPREAD) -> Tensor:
    """Masks by evidence (B, K, S, S)."""
    errors = (found.pictures.float() - as_floats(image).float()[:, None]).square().sum(2)
    return (found.masks.float().clamp(min=1e-6).log() - errors / (2 * spread**2)).softmax(1)


class Meetings(NamedTuple):
    """How slots meet: what the picture's pixels say of each pair, on average."""

    share: Tensor  # (B, K, K): of m_k m_j
    apart: Tensor  # (B, K, K): of m_k m_j |picture_k - picture_j|^2, a channel's mean
    area: Tensor  # (B, K): of m_k
    variance: Tensor  # (B,): of the picture that all slots draw together, a channel's mean


def meetings(found: Found) -> Meetings:
    exactly = torch.float32 if found.masks.device.type == "mps" else torch.float64  # small differences of large sums
    masks, pictures, whole = (x.to(exactly) for x in (found.masks, found.pictures, found.reconstruction))
    m, p = masks.flatten(2), pictures.flatten(3).transpose(1, 2)  # (B, K, n), (B, 3, K, n)
    n = m.shape[-1]
    squares = m * p.square().mean(1)
    drawn = (m[:, None] * p).contiguous()  # by channels
    apart = squares @ m.mT + m @ squares.mT - 2 * (drawn @ drawn.mT).mean(1)  # |a - b|^2 = a^2 + b^2 - 2ab
    return Meetings(m @ m.mT / n, apart.clamp(min=0) / n, m.mean(-1), whole.flatten(2).var(-1, correction=0).mean(1))


def joined(meet: Meetings, likeness: float = LIKENESS) -> Tensor:
    """The slot that each slot is joined to, (B, K), itself if none.

    Of all pairs that meet, the likest is joined first, the smaller to the larger; then what is left is looked at
    again, until none is alike.
    """
    share, apart, area = (each.clone() for each in meet[:3])
    B, K = area.shape
    to = torch.arange(K, device=area.device).repeat(B, 1)
    image = torch.arange(B, device=area.device)
    same = torch.eye(K, dtype=torch.bool, device=area.device)
    for _ in range(K - 1):
        unlike = (apart / share).masked_fill(same | (share < MEETING), torch.inf)
        least, pair = unlike.flatten(1).min(1)
        chosen = least < likeness * meet.variance
        if not chosen.any():
            break
        b, one, other = image[chosen], (pair // K)[chosen], (pair % K)[chosen]
        swap = area[b, one] > area[b, other]
        small, large = torch.where(swap, other, one), torch.where(swap, one, other)
        to[chosen] = torch.where(to[chosen] == small[:, None], large[:, None], to[chosen])
        for each in (share, apart):
            each[b, large] += each[b, small]
            each[b, :, large] += each[b, :, small]
            each[b, small], each[b, :, small] = 0, 0
        area[b, large] += area[b, small]
    return to


def _together(masks: Tensor, to: Tensor) -> Tensor:
    return torch.zeros_like(masks).scatter_add_(1, to[:, :, None, None].expand_as(masks), masks)
