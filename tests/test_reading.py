import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from cutslots import metrics
from cutslots.model import Found
from cutslots.reading import MEETING, eager, joined, meetings, read


def found(masks, pictures):
    empty = torch.empty(0)
    return Found(empty, masks, empty, (masks[:, :, None] * pictures).sum(1), pictures)


def random_case(seed, B=2, K=5, S=6):
    generator = torch.Generator().manual_seed(seed)
    masks = (3 * torch.randn(B, K, S, S, generator=generator)).softmax(1)
    colours = torch.rand(B, 3, 3, generator=generator)[:, torch.randint(0, 3, (K,), generator=generator)]  # some alike
    pictures = colours[..., None, None] + 0.05 * torch.randn(B, K, 3, S, S, generator=generator)
    return found(masks, pictures), torch.rand(B, 3, S, S, generator=generator)


def joined_pixel_by_pixel(masks, pictures, likeness):
    """As joining is described, for one image, without tables: joined slots are kept as lists of their members."""
    whole = (masks[:, None] * pictures).sum(0)
    alike = likeness * whole.flatten(1).var(1, correction=0).mean().item()
    groups = {k: [k] for k in range(len(masks))}
    while True:
        best = None
        for one, other in itertools.combinations(groups, 2):
            share = apart = 0.0
            for k, j in itertools.product(groups[one], groups[other]):
                both = masks[k] * masks[j]
                share += both.mean().item()
                apart += (both * (pictures[k] - pictures[j]).square().mean(0)).mean().item()
            if share >= MEETING and apart / share < alike and (best is None or apart / share < best[0]):
                best = apart / share, one, other
        if best is None:
            return [next(name for name, group in groups.items() if k in group) for k in range(len(masks))]
        small, large = sorted(best[1:], key=lambda name: sum(masks[k].sum() for k in groups[name]))
        groups[large] += groups.pop(small)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000), likeness=st.sampled_from([-0.1, 0.0, 0.03, 0.3, 1.0, 3.0, 1e9]))
def test_joining_is_what_it_says(seed, likeness):
    case, _ = random_case(seed)
    case = Found(*(x.double() for x in case))
    expected = [joined_pixel_by_pixel(case.masks[b], case.pictures[b], likeness) for b in range(2)]
    assert joined(meetings(case), likeness).tolist() == expected


def test_by_hand():
    """Slots 0 and 1 meet in half of the picture and draw 0.1 apart there, 1 and 2 in the other, 0.4 apart; slot 3 meets
    none. What slots draw where they do not meet does not count."""
    masks = torch.tensor([[0.6, 0.0], [0.4, 0.3], [0.0, 0.7], [0.0, 0.0]]).view(1, 4, 1, 2)
    drawn = torch.tensor([[0.2, 0.9], [0.3, 0.5], [0.8, 0.9], [0.3, 0.5]]).view(1, 4, 1, 1, 2).expand(1, 4, 3, 1, 2)
    meet = meetings(found(masks, drawn))
    torch.testing.assert_close(meet.share[0, 0], torch.tensor([0.18, 0.12, 0, 0], dtype=torch.float64))
    torch.testing.assert_close(meet.apart[0, 1], torch.tensor([0.0012, 0, 0.0168, 0], dtype=torch.float64))
    torch.testing.assert_close(meet.area[0], torch.tensor([0.3, 0.35, 0.35, 0], dtype=torch.float64))
    # Together they draw 0.24 and 0.78: a variance of 0.0729. The first pair is 0.01 apart, the second 0.16.
    torch.testing.assert_close(meet.variance, torch.tensor([0.0729], dtype=torch.float64))
    assert joined(meet, 0.13).tolist() == [[0, 1, 2, 3]]
    assert joined(meet, 0.14).tolist() == [[1, 1, 2, 3]], "the smaller goes to the larger"
    assert joined(meet, 2.1).tolist() == [[1, 1, 2, 3]]
    assert joined(meet, 2.2).tolist() == [[1, 1, 1, 3]], "0 and 1 together are larger than 2"


def test_evidence_is_bayes_rule():
    masks = torch.tensor([0.7, 0.3]).view(1, 2, 1, 1)
    pictures = torch.tensor([[0.1, 0.2, 0.3], [0.5, 0.5, 0.5]]).view(1, 2, 3, 1, 1)
    image = torch.tensor([0.4, 0.4, 0.5]).view(1, 3, 1, 1)
    weights = [
        share * math.exp(-sum((x - c) ** 2 for x, c in zip((0.4, 0.4, 0.5), colour, strict=True)) / (2 * 0.2**2))
        for share, colour in ((0.7, (0.1, 0.2, 0.3)), (0.3, (0.5, 0.5, 0.5)))
    ]
    got = read(found(masks, pictures), image, spread=0.2, likeness=-1.0).flatten()
    torch.testing.assert_close(got, torch.tensor(weights) / sum(weights))


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_masks_sum_to_one_and_joined_slots_are_empty(seed):
    case, image = random_case(seed)
    masks = read(case, image)
    torch.testing.assert_close(masks.sum(1), torch.ones(2, 6, 6))
    apart = read(case, image, likeness=-1.0)
    kept = masks.sum((2, 3)) > 0
    assert (kept.sum(1) <= 5).all() and kept.any(1).all()
    assert (masks[kept] >= apart[kept] - 1e-6).all()


def test_neither_evidence_nor_joining_leaves_the_decoders_masks():
    case, image = random_case(0)
    torch.testing.assert_close(read(case, image, spread=1e6, likeness=-1.0), case.masks)


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
    hard = F.one_hot(pieces, 5).permute(0, 3, 1, 2).float()
    masks = F.avg_pool2d(F.pad(hard, (1, 1, 1, 1), mode="replicate"), 3, stride=1)  # soft at borders, as decoders draw
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


# --------------------------------------------------------------------------------------------------------------- eager


def pixels(*rows):
    """Masks (1, K, 1, n) of a picture of n pixels, one row for each slot."""
    return torch.tensor(rows, dtype=torch.float64)[None, :, None, :]


def test_the_ground_gives_way_by_hand():
    """The second slot has 0.9 and 0.3 of two pixels, 0.6 on average; the third at most 0.1 of what it would win."""
    masks = pixels([0.1, 0.7, 0.9, 0.95, 1.0], [0.9, 0.3, 0.0, 0.0, 0.0], [0.0, 0.0, 0.1, 0.05, 0.0])
    assert masks.argmax(1).flatten().tolist() == [1, 0, 0, 0, 0]
    got = eager(masks)
    assert got.argmax(1).flatten().tolist() == [1, 1, 0, 0, 0]
    expected = [[0.1 / 45.1, 0.7 / 15.7, 0.9, 0.95, 1], [45 / 45.1, 15 / 15.7, 0, 0, 0], [0, 0, 0.1, 0.05, 0]]
    torch.testing.assert_close(got, pixels(*expected))


def test_how_sure_is_sure():
    """On average, over all that a slot would have; one that is not keeps what it has."""
    for second, expected in ((0.15, [1, 0, 0, 0]), (0.25, [1, 1, 0, 0])):  # 0.525 and 0.575
        masks = pixels([0.1, 1 - second, 1.0, 1.0], [0.9, second, 0.0, 0.0])
        assert eager(masks).argmax(1).flatten().tolist() == expected


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_only_slots_that_are_sure_win_and_the_ground_loses(seed):
    case, image = random_case(seed)
    masks = read(case, image)
    got, ground = eager(masks), masks.mean((2, 3)).argmax(1)
    torch.testing.assert_close(got.sum(1), torch.ones(2, 6, 6))
    for b in range(2):
        assert (got[b, ground[b]] <= masks[b, ground[b]] + 1e-6).all()
        before, after = masks[b].argmax(0), got[b].argmax(0)
        assert (after[before != after] != ground[b]).all(), "nothing goes to the ground"


def test_eager_masks_do_not_depend_on_the_order_of_slots_or_images():
    case, image = random_case(5, B=4)
    masks = read(case, image)
    order = torch.randperm(5, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(eager(masks[:, order]), eager(masks)[:, order])
    torch.testing.assert_close(torch.cat([eager(masks[b : b + 1]) for b in range(4)]), eager(masks))
