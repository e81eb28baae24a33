import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from cutslots import metrics
from cutslots.model import Found
from cutslots.reading import joined, read


def found(masks, pictures):
    empty = torch.empty(0)
    return Found(empty, masks, empty, (masks[:, :, None] * pictures).sum(1), pictures)


def random_case(seed, B=2, K=5, S=6):
    generator = torch.Generator().manual_seed(seed)
    masks = (3 * torch.randn(B, K, S, S, generator=generator)).softmax(1)
    colours = torch.rand(B, 3, 3, generator=generator)[:, torch.randint(0, 3, (K,), generator=generator)]  # some alike
    pictures = colours[..., None, None] + 0.05 * torch.randn(B, K, 3, S, S, generator=generator)
    return found(masks, pictures), torch.rand(B, 3, S, S, generator=generator)


def joined_pixel_by_pixel(labels, errors, tolerance):
    """As `joined` is described, for one image, without its tables."""
    labels, K = labels.clone(), len(errors)
    to = list(range(K))
    while True:
        best = None
        for small in range(K):
            mine = labels == small
            for large in range(K):
                theirs = labels == large
                if small != large and mine.any() and theirs.sum() >= mine.sum():
                    worse = (errors[large] - errors[small])[mine].mean().item()
                    if worse < tolerance and (best is None or worse < best[0]):
                        best = worse, small, large
        if best is None:
            return to
        labels[labels == best[1]] = best[2]
        to = [best[2] if slot == best[1] else slot for slot in to]


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000), tolerance=st.sampled_from([-0.1, 0.0, 0.003, 0.02, 0.2, 10.0]))
def test_joining_is_what_it_says(seed, tolerance):
    case, image = random_case(seed)
    errors = (case.pictures - image[:, None]).square().mean(2).double()
    labels = case.masks.argmax(1)
    expected = [joined_pixel_by_pixel(labels[b], errors[b], tolerance) for b in range(2)]
    assert joined(labels, errors, tolerance).tolist() == expected


def test_by_hand():
    labels = torch.tensor([[[0, 0, 0, 1], [2, 2, 1, 1]]])  # 3, 3 and 2 pixels; slot 3 has none
    drawn = torch.tensor([[0.0, 0.6, 1.0, 9.0], [0.5, 0.0, 1.0, 9.0], [0.5, 0.1, 0.05, 9.0]])  # whose pixels, by whom
    errors = drawn[labels].permute(0, 3, 1, 2)
    assert joined(labels, errors, 0.04).tolist() == [[0, 1, 2, 3]]
    assert joined(labels, errors, 0.06).tolist() == [[0, 1, 1, 3]], "slot 2's pixels are 0.05 worse by slot 1"
    assert joined(labels, errors, 0.59).tolist() == [[0, 1, 1, 3]], "slot 1 has 5 pixels now: slot 0 would go to it"
    assert joined(labels, errors, 0.61).tolist() == [[1, 1, 1, 3]]


def test_evidence_is_bayes_rule():
    masks = torch.tensor([0.7, 0.3]).view(1, 2, 1, 1)
    pictures = torch.tensor([[0.1, 0.2, 0.3], [0.5, 0.5, 0.5]]).view(1, 2, 3, 1, 1)
    image = torch.tensor([0.4, 0.4, 0.5]).view(1, 3, 1, 1)
    weights = [
        share * math.exp(-sum((x - c) ** 2 for x, c in zip((0.4, 0.4, 0.5), colour, strict=True)) / (2 * 0.2**2))
        for share, colour in ((0.7, (0.1, 0.2, 0.3)), (0.3, (0.5, 0.5, 0.5)))
    ]
    got = read(found(masks, pictures), image, spread=0.2, tolerance=-torch.inf).flatten()
    torch.testing.assert_close(got, torch.tensor(weights) / sum(weights))


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_masks_sum_to_one_and_joined_slots_are_empty(seed):
    case, image = random_case(seed)
    masks = read(case, image, tolerance=0.02)
    torch.testing.assert_close(masks.sum(1), torch.ones(2, 6, 6))
    apart = read(case, image, tolerance=-torch.inf)
    kept = masks.sum((2, 3)) > 0
    assert (kept.sum(1) <= 5).all() and kept.any(1).all()
    assert (masks[kept] >= apart[kept] - 1e-6).all()


def test_neither_evidence_nor_joining_leaves_the_decoders_masks():
    case, image = random_case(0)
    torch.testing.assert_close(read(case, image, spread=1e6, tolerance=-torch.inf), case.masks)


def test_images_are_read_apart():
    case, image = random_case(3, B=4)
    alone = torch.cat([read(Found(*(x[b : b + 1] for x in case)), image[b : b + 1]) for b in range(4)])
    torch.testing.assert_close(read(case, image), alone)


def test_the_order_of_slots_does_not_matter():
    case, image = random_case(5)
    order = torch.randperm(5, generator=torch.Generator().manual_seed(0))
    turned = found(case.masks[:, order], case.pictures[:, order])
    torch.testing.assert_close(read(turned, image), read(case, image)[:, order])


def test_a_ground_in_pieces_becomes_one():
    truth = torch.zeros(1, 16, 16, dtype=torch.long)
    truth[:, 4:8, 4:8], truth[:, 9:14, 8:15] = 1, 2
    colours = torch.tensor([[0.2, 0.3, 0.4], [0.9, 0.1, 0.1], [0.1, 0.8, 0.2]])
    image = colours[truth].permute(0, 3, 1, 2)
    pieces = torch.where(truth > 0, truth + 1, (torch.arange(16) >= 9).long()[None, None].expand_as(truth))
    masks = (8.0 * F.one_hot(pieces, 5)).permute(0, 3, 1, 2).softmax(1)
    drawn = torch.cat([colours[:1], colours, colours[:1]])[None, :, :, None, None].expand(1, 5, 3, 16, 16)
    before, after = (
        metrics.score(truth, masks.argmax(1)),
        metrics.score(truth, read(found(masks, drawn), image).argmax(1)),
    )
    assert before["miou"] < 0.9 and before["ari"] < 0.8
    assert after["miou"] == 1 and after["ari"] == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_read_in_full(dtype):
    case, image = random_case(1)
    half = Found(*(x.to(dtype) for x in case))
    assert read(half, image).dtype == torch.float32
    torch.testing.assert_close(read(half, (image * 255).byte()).sum(1), torch.ones(2, 6, 6))
