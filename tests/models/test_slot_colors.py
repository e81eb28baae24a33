"""The colors of slots: statistics and the steps of refinement that use them, against brute force and by hand."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import ndimage
from torch.nn import functional as F

from cutslots.models.discovery import DiscoveryOutput
from cutslots.models.refinement import merge_tracks, posterior_masks, refine_masks, refine_video_masks
from cutslots.models.slot_colors import (
    MASK_LEVELS,
    MissedObjects,
    SlotColors,
    compare_with_background,
    connected_regions,
    find_missed_objects,
    merge_background,
    regions_by_passes,
    slot_colors,
    weigh_colors,
)
from tests.conftest import DEVICES


def make_output(masks, slot_reconstructions):
    empty = torch.empty(0)
    reconstruction = (masks[:, :, None] * slot_reconstructions).sum(1)
    return DiscoveryOutput(empty, masks, empty, reconstruction, slot_reconstructions)


def random_masks(seed, B=2, K=6, size=6):
    generator = torch.Generator().manual_seed(seed)
    masks = (3 * torch.randn(B, K, size, size, generator=generator)).softmax(1)
    return masks, torch.rand(B, 3, size, size, generator=generator)


def test_autocast_does_not_change_which_slots_are_merged():
    """Products in bfloat16 would: all statistics are those without autocast, to the last bit."""
    posterior, image = random_masks(3)
    expected = slot_colors(posterior, image)
    target = torch.tensor([[0, 1, 2, 0, 4, 4], [0, 1, 1, 3, 4, 5]])
    with torch.autocast("cpu", torch.bfloat16):
        found = slot_colors(posterior, image)
        merged = merge_background(found, target, 3.0)
    assert all(a.dtype == torch.float64 and torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert torch.equal(merged, merge_background(expected, target, 3.0)) and not torch.equal(merged, target)


def test_histograms_of_large_images_do_not_overflow():
    """256 levels of nine megapixels are more than 2^31."""
    masks = torch.ones(1, 1, 1, 1).expand(1, 1, 3000, 3000)
    statistics = slot_colors(masks, torch.zeros(1, 3, 1, 1).expand(1, 3, 3000, 3000))
    assert statistics.histogram.sum().item() == statistics.histogram[0, 0, 0].item() == 1.0


# ----------------------------------------------------------------------------------------------------- the background


def textured_case(seed, B=2, K=6, H=12, W=12):
    """Masks of slots, and an image in which each slot has one of four textures of two colors."""
    generator = torch.Generator().manual_seed(seed)
    masks = (4 * torch.randn(B, K, H, W, generator=generator)).softmax(1)
    colors = torch.rand(B, 4, 2, 3, generator=generator)
    texture = torch.randint(0, 4, (K,), generator=generator)[masks.argmax(1)]  # (B, H, W)
    which = torch.randint(0, 2, (B, H, W), generator=generator)
    image = colors[torch.arange(B)[:, None, None], texture, which].movedim(-1, 1)
    return masks, image


def merge_background_by_hand(masks, image, groups, threshold):
    """Return the slots of one image that join the background, as the module describes it. Groups are lists of slots."""
    masks = {name: masks[group].sum(0).flatten() for name, group in groups.items()}
    pixels = image.flatten(1).T.double().numpy()
    background = max(masks, key=lambda name: masks[name].sum())
    histograms, confidence = {}, {}
    for name, mask in masks.items():
        counts, _ = np.histogramdd(pixels, bins=(8, 8, 8), range=[(0, 1)] * 3, weights=mask.double().numpy())
        histograms[name] = counts / counts.sum()
        confidence[name] = ((mask * mask).sum() / mask.sum()).item()
    distance = {name: 1 - np.sqrt(histograms[name] * histograms[background]).sum() for name in masks}
    del distance[background]
    large = [name for name in distance if masks[name].mean() > 1 / 200]
    scale = np.mean(sorted(distance[name] for name in large)[-3:]) if large else 0.0
    limits = {name: threshold * math.sqrt(1 - confidence[name]) * scale**2 for name in distance}
    return background, {name for name in distance if distance[name] < limits[name]}


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), threshold=st.sampled_from([0.0, 0.4, 0.85, 2.0, 5.0]), merged=st.booleans())
def test_merging_the_background_equals_brute_force(seed, threshold, merged):
    masks, image = textured_case(seed)
    masks = (masks * MASK_LEVELS).round() / MASK_LEVELS  # as histograms have them
    target = torch.tensor([[0, 0, 2, 3, 2, 5] if merged else list(range(6))] * 2)
    got = merge_background(slot_colors(masks, image), target, threshold)
    for b in range(2):
        groups = {name: [k for k in range(6) if target[b, k] == name] for name in set(target[b].tolist())}
        background, joins = merge_background_by_hand(masks[b], image[b], groups, threshold)
        assert got[b].tolist() == [background if name in joins else name for name in target[b].tolist()]


def colors_of(bins, areas, confidence):
    """Statistics of slots, each with its area spread evenly over some colors."""
    histogram, overlap = torch.zeros(1, len(bins), 512), torch.zeros(1, len(bins), len(bins))
    for k, (colors, area) in enumerate(zip(bins, areas, strict=True)):
        histogram[0, k, colors] = area / len(colors)
        overlap[0, k, k] = confidence[k] * area
    return SlotColors(histogram, overlap)


def test_limit_of_the_background_by_hand():
    """Slot 1 shares half of its colors with slot 0: 1 - sqrt(1/2 * 1/2) = 1/2. The others share none."""
    bins, areas = [[0, 1], [1, 2], [3], [4]], (0.6, 0.2, 0.1, 0.1)
    limit = math.sqrt(1 - 0.75) * ((0.5 + 1 + 1) / 3) ** 2  # times the threshold
    statistics, apart = colors_of(bins, areas, (1, 0.75, 0.75, 0.75)), torch.arange(4)[None]
    for factor, expected in ((0.99, [0, 1, 2, 3]), (1.01, [0, 0, 2, 3])):
        assert merge_background(statistics, apart, factor * 0.5 / limit).tolist() == [expected]
    certain = colors_of(bins, areas, (1, 1, 1, 1))
    assert merge_background(certain, apart, 1e9).tolist() == [[0, 1, 2, 3]], "a slot certain of its pixels stays"


def test_colors_say_nothing_where_all_slots_have_them():
    bins, areas, confidence = (
        [list(range(10)), list(range(1, 11)), [2, 3, 4, 5, 6, 7, 8, 9]],
        (0.5, 0.3, 0.2),
        (0.5,) * 3,
    )
    assert merge_background(colors_of(bins, areas, confidence), torch.arange(3)[None]).tolist() == [[0, 1, 2]]
    bins, areas, confidence = [*bins, [20], [30]], (0.4, 0.2, 0.2, 0.1, 0.1), (0.5,) * 5
    assert merge_background(colors_of(bins, areas, confidence), torch.arange(5)[None]).tolist() == [[0, 0, 0, 3, 4]]


def test_small_slots_do_not_say_how_much_objects_differ():
    """Without slots 2 to 4 the scale is that of slot 1, which is then not small compared with it."""
    bins, confidence = [[0, 1, 2, 3], [1, 2, 3, 4], [5], [6], [7]], (0.5,) * 5
    for area, expected in ((0.0049, [0, 1, 2, 3, 4]), (0.0051, [0, 0, 2, 3, 4])):
        areas = (0.7 - 3 * area, 0.3, area, area, area)
        assert merge_background(colors_of(bins, areas, confidence), torch.arange(5)[None]).tolist() == [expected]


def test_empty_slots_and_single_slots_are_not_merged_into_the_background():
    statistics = colors_of([[0], [0], [1], [2]], (0.6, 0.0, 0.2, 0.2), (0.5, 0.5, 0.5, 0.5))
    assert merge_background(statistics, torch.arange(4)[None], 1e9)[0, 1] == 1
    assert merge_background(colors_of([[0]], (1.0,), (0.5,)), torch.zeros(1, 1, dtype=torch.long), 1e9).tolist() == [
        [0]
    ]


def checkerboard_case():
    """Slots 0 and 1 divide a checkerboard between them and do not overlap; slots 2 to 4 are single colors in it."""
    labels = torch.zeros(16, 16, dtype=torch.long)
    labels[:, 9:] = 1
    for slot, left in ((2, 0), (3, 5), (4, 12)):
        labels[5:9, left : left + 4] = slot
    rows, columns = torch.meshgrid(torch.arange(16), torch.arange(16), indexing="ij")
    image = (0.3 + 0.4 * ((rows + columns) % 2)).expand(3, -1, -1).clone()
    for slot in (2, 3, 4):
        image[:, labels == slot] = F.one_hot(torch.tensor(slot - 2), 3).float()[:, None]
    sure = 0.9 * F.one_hot(labels, 6).movedim(-1, 0)
    sure[5] += 0.1  # slot 5 is a tenth of every pixel, and never the largest
    colors = torch.zeros(6, 3, 16, 16) + image.mean((1, 2), keepdim=True)
    return make_output(sure[None], colors[None]), image[None], labels


def test_a_texture_that_two_slots_divide_is_merged():
    case, image, labels = checkerboard_case()
    options = {"pixel_sigma": 10.0, "merge_threshold": -1.0, "capacity": 0.0}
    found = refine_masks(case, image, **options).argmax(1)[0]
    assert torch.equal(found, labels.where(labels != 1, 0))
    assert torch.equal(refine_masks(case, image, **options, background_threshold=0.0).argmax(1)[0], labels)
    (video,) = refine_video_masks([case], image[:, None], **options, background_threshold=0.8)
    assert torch.equal(video.argmax(1)[0], found)
    assert torch.equal(refine_video_masks([case], image[:, None], **options)[0].argmax(1)[0], labels), "off by default"


def test_colors_of_frames_are_averaged():
    case, image, _ = checkerboard_case()
    blue = torch.zeros_like(image)
    blue[:, 2] = 1  # in which no slot differs from any other
    merges = lambda *frames: merge_tracks([(case, x) for x in frames], 10.0, -1.0, background_threshold=0.8).tolist()
    assert merges(image)[0][1] == 0
    assert merges(image, image) == merges(image)
    both = [slot_colors(posterior_masks(case, frame, 10.0), frame) for frame in (image, blue)]
    mean = SlotColors(*((a + b) / 2 for a, b in zip(*both, strict=True)))
    assert merges(image, blue) == merge_background(mean, torch.arange(6)[None], 0.8).tolist()


# ------------------------------------------------------------------------------------------------------ weighing colors


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), weight=st.sampled_from([0.3, 1.0, 2.0]))
def test_weighed_masks_equal_brute_force(seed, weight):
    masks, image = textured_case(seed)
    masks = (masks * MASK_LEVELS).round() / MASK_LEVELS  # as histograms have them
    got = weigh_colors(masks, image, weight)
    separation = compare_with_background(slot_colors(masks, image).histogram).separation
    for b in range(2):
        bins = np.minimum((image[b].flatten(1).numpy() * 8).astype(int), 7)
        values = []
        for mask in masks[b].flatten(1).double().numpy():
            counts = np.zeros((8, 8, 8))
            np.add.at(counts, tuple(bins), mask)
            share = (counts / counts.sum())[tuple(bins)]
            power = weight * min(max((separation[b].item() - 0.25) / 0.15, 0), 1)
            values.append(mask * (share + 1e-3) ** power)
        expected = torch.tensor(np.stack(values) / np.sum(values, 0)).float()
        torch.testing.assert_close(got[b].flatten(1), expected, rtol=1e-4, atol=1e-6)


def split_case(colors, size=16):
    """Three slots of one color each, (0, 1, 2) from left to right; the second is unsure of its left half."""
    labels = torch.zeros(size, size, dtype=torch.long)
    labels[:, 8:12], labels[:, 12:] = 1, 2
    masks = (0.98 * F.one_hot(labels, 3) + 0.02 / 3).movedim(-1, 0).contiguous()
    masks[:, :, 8:10] = torch.tensor([0.55, 0.44, 0.01])[:, None, None]
    image = torch.tensor(colors, dtype=torch.float)[labels].movedim(-1, 0)
    return masks[None], image[None], labels


def test_colors_decide_where_masks_are_unsure():
    masks, image, labels = split_case([[0.1, 0.1, 0.1], [0.9, 0.1, 0.1], [0.1, 0.9, 0.1]])
    assert not torch.equal(masks.argmax(1)[0], labels)
    assert torch.equal(weigh_colors(masks, image).argmax(1)[0], labels)
    torch.testing.assert_close(weigh_colors(masks, image).sum(1), torch.ones(1, 16, 16))
    assert torch.equal(weigh_colors(masks, (image * 255).byte()).argmax(1)[0], labels)


def test_colors_do_not_count_where_all_slots_have_the_same():
    masks, image, _ = split_case([[0.1, 0.1, 0.1]] * 3)
    torch.testing.assert_close(weigh_colors(masks, image), masks)


def test_a_large_weight_leaves_masks_that_sum_to_one():
    masks, image, _ = split_case([[0.1, 0.1, 0.1], [0.9, 0.1, 0.1], [0.1, 0.9, 0.1]])
    torch.testing.assert_close(weigh_colors(masks, image, 50.0).sum(1), torch.ones(1, 16, 16))


def test_empty_slots_stay_empty_when_masks_are_weighed():
    masks, image, _ = split_case([[0.1, 0.1, 0.1], [0.9, 0.1, 0.1], [0.1, 0.9, 0.1]])
    masks = torch.cat([masks, torch.zeros(1, 1, 16, 16)], 1)
    weighed = weigh_colors(masks, image)
    assert not weighed[:, 3].any() and weighed.isfinite().all()
    torch.testing.assert_close(weighed[:, :3], weigh_colors(masks[:, :3], image))


# ------------------------------------------------------------------------------------------------------- missed objects


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 10_000), density=st.sampled_from([0.05, 0.2, 0.35]))
def test_connected_regions_are_those_of_scipy(device, seed, density):
    mask = torch.rand(2, 20, 17, generator=torch.Generator().manual_seed(seed)) < density
    got = regions_by_passes(mask.to(device)).cpu()
    for found, each in zip(got, mask, strict=True):
        expected, count = ndimage.label(each.numpy(), np.ones((3, 3)))
        pairs = {(a, b) for a, b in zip(found.flatten().tolist(), expected.flatten().tolist(), strict=True)}
        assert (0, 0) in pairs and len(pairs) == count + 1, "one number for each region, and no number twice"


def test_a_long_region_has_one_number():
    mask = torch.zeros(1, 256, 256, dtype=torch.bool)
    mask[0, ::2] = True
    mask[0, 1::4, -1] = mask[0, 3::4, 0] = True  # a meander through the whole image
    for turned in (mask, mask.flip(1), mask.mT, mask.mT.flip(2)):
        assert len(regions_by_passes(turned).unique()) == len(connected_regions(turned).unique()) == 2


def missed_case(num_slots=5, objects=((8, 8, 16, 0), (40, 60, 14, 1)), found=((80, 80, 20, 2),)):
    """A gray background in slot 0 that covers `objects`; those in `found` have slot 1 on. Rows: y, x, side, channel.

    Objects have two colors, so that no color is common.
    """
    image, labels = torch.full((3, 128, 128), 0.4), torch.zeros(128, 128, dtype=torch.long)
    covered = torch.zeros_like(labels)
    image += 0.1 * torch.rand(128, 128, generator=torch.Generator().manual_seed(0))
    for i, (y, x, side, channel) in enumerate((*objects, *found)):
        color = F.one_hot(torch.tensor(channel), 3).float()[:, None, None]
        image[:, y : y + side, x : x + side] = color
        image[:, y : y + side, x : x + side // 2] = 0.6 * color
        covered[y : y + side, x : x + side] = i + 1
        labels[y : y + side, x : x + side] = max(0, i + 1 - len(objects))
    masks = (0.99 * F.one_hot(labels, num_slots) + 0.01 / num_slots).movedim(-1, 0)
    return masks[None], image[None], labels, covered


@pytest.mark.parametrize("device", DEVICES)
def test_missed_objects_go_to_slots_without_pixels(device):
    masks, image, labels, covered = missed_case()
    missed = find_missed_objects(masks.to(device), image.to(device))
    assert missed.background.tolist() == [[0]]
    got, slot = missed.move(masks.to(device)).cpu(), missed.slot[0].cpu()
    torch.testing.assert_close(got.sum(1), torch.ones(1, 128, 128))
    assert torch.equal(slot == 2, covered == 1) and torch.equal(slot == 3, covered == 2), "the largest first"
    new = got.argmax(1)[0]
    assert torch.equal(new.where(slot < 0, -1), labels.where(slot < 0, -1)), "other pixels stay"
    assert torch.equal(new[slot >= 0], slot[slot >= 0]), "they win their pixels"


def test_without_empty_slots_the_background_keeps_its_pixels():
    masks, image, _, _ = missed_case(num_slots=3)
    slot = find_missed_objects(masks, image).slot
    assert slot.unique().tolist() == [-1, 2], "one slot is empty, and the larger object gets it"
    masks, image, _, _ = missed_case(num_slots=2)
    missed = find_missed_objects(masks, image)
    assert (missed.slot == -1).all()
    torch.testing.assert_close(missed.move(masks), masks)


def test_small_regions_and_common_colors_are_no_objects():
    small = missed_case(objects=((8, 8, 7, 0),))
    assert (find_missed_objects(*small[:2]).slot == -1).all()
    common = missed_case(objects=((8, 8, 40, 0),))  # a tenth of the background
    assert (find_missed_objects(*common[:2]).slot == -1).all()
    assert (find_missed_objects(*missed_case()[:2], rare_color=1e-4).slot == -1).all(), "no color is so rare"


def test_nothing_is_missed_where_objects_have_the_colors_of_the_background():
    masks, image, labels, _ = missed_case()
    image[:, :, labels == 1] = image[:, :, 60:80, 10:30].flatten(2)
    assert (find_missed_objects(masks, image).slot == -1).all()


def test_moved_pixels_by_hand():
    """Slot 2 gets the second pixel from the background, slot 0, and loses what it has elsewhere."""
    masks = torch.tensor([[0.8, 0.7, 0.35], [0.1, 0.1, 0.4], [0.1, 0.2, 0.25]]).view(1, 3, 1, 3)
    missed = MissedObjects(torch.tensor([[[-1, 2, -1]]]), torch.tensor([[0]]))
    expected = torch.tensor([[8 / 9, 0, 7 / 15], [1 / 9, 1 / 8, 8 / 15], [0, 7 / 8, 0]])
    torch.testing.assert_close(missed.move(masks)[0, :, 0], expected)


def test_a_colorful_background_is_no_object():
    """Every color of noise is rare."""
    masks, image, labels, _ = missed_case()
    noise = torch.rand(image.shape, generator=torch.Generator().manual_seed(1))
    assert (find_missed_objects(masks, torch.where(labels == 0, noise, image)).slot == -1).all()


def test_missed_objects_do_not_depend_on_other_images():
    cases = [missed_case(), missed_case(objects=((8, 8, 7, 0),)), missed_case(objects=((50, 9, 14, 1),))]
    masks, image = (torch.cat([case[i] for case in cases]) for i in (0, 1))
    together = find_missed_objects(masks, image)
    for b, case in enumerate(cases):
        alone = find_missed_objects(*case[:2])
        assert torch.equal(together.slot[b], alone.slot[0]) and torch.equal(together.background[b], alone.background[0])
    assert [int(slot.max()) for slot in together.slot] == [3, -1, 2]


def test_refined_masks_have_the_missed_objects():
    masks, image, _, covered = missed_case()
    colors = torch.full((1, 5, 3, 128, 128), 0.45)
    colors[0, 1] = torch.tensor([0.0, 0.0, 1.0])[:, None, None]
    output = make_output(masks, colors)
    labels = refine_masks(output, image, merge_threshold=-1.0).argmax(1)[0]
    assert len(labels.unique()) == 4
    for number in (1, 2):
        assert (labels == labels[covered == number].mode().values).equal(covered == number)
    none = refine_masks(output, image, merge_threshold=-1.0, rare_color=0.0).argmax(1)[0]
    assert none.unique().tolist() == [0, 1]
