"""Mask refinement against brute force, and on cases computed by hand."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from cutslots.evaluation import metrics
from cutslots.models import refinement
from cutslots.models.discovery import DiscoveryOutput
from cutslots.models.mask_kinds import MASK_KINDS
from cutslots.models.refinement import (
    MERGE_THRESHOLD,
    MIN_OVERLAP,
    PIXEL_SIGMA,
    SlotOverlap,
    cut_masks,
    drop_fragments,
    edge_capacities,
    high_recall_masks,
    merge_slots,
    merge_tracks,
    posterior_masks,
    refine_masks,
    refine_video_masks,
    select_masks,
    slot_overlap,
)
from cutslots.models.slot_colors import BACKGROUND_THRESHOLD
from cutslots.programs.min_cut import GraphMinCut

NO_COLORS = {"color_weight": 0.0, "rare_color": 0.0}  # neither weigh masks by colors nor add missed objects


def make_output(masks, slot_reconstructions):
    empty = torch.empty(0)
    reconstruction = (masks[:, :, None] * slot_reconstructions).sum(1)
    return DiscoveryOutput(empty, masks, empty, reconstruction, slot_reconstructions)


def random_case(seed, B=2, K=5, H=6, W=6):
    generator = torch.Generator().manual_seed(seed)
    masks = (3 * torch.randn(B, K, H, W, generator=generator)).softmax(1)
    colors = torch.rand(B, 3, 3, generator=generator)[:, torch.randint(0, 3, (K,), generator=generator)]  # some equal
    slot_reconstructions = colors[..., None, None] + 0.05 * torch.randn(B, K, 3, H, W, generator=generator)
    return make_output(masks, slot_reconstructions), torch.rand(B, 3, H, W, generator=generator)


def merge_by_brute_force(masks, slot_reconstructions, merge_threshold, colors=None, color_threshold=0.0):
    """Merge the slots of one image as the module describes it. Merged slots are lists of their members."""

    def color_distance(one, other):
        sums = [sum(colors[k].numpy() for k in groups[name]) for name in (one, other)]
        return 1 - sum(math.sqrt(a / sums[0].sum() * b / sums[1].sum()) for a, b in zip(*sums, strict=True))

    reconstruction = (masks[:, None] * slot_reconstructions).sum(0)
    limit = merge_threshold * reconstruction.flatten(1).var(1, correction=0).mean().item()
    groups = {k: [k] for k in range(len(masks))}
    while True:
        best = None
        for one, other in itertools.combinations(groups, 2):
            overlap = distance = 0.0
            for k, j in itertools.product(groups[one], groups[other]):
                both = masks[k] * masks[j]
                overlap += both.mean().item()
                squares = (slot_reconstructions[k] - slot_reconstructions[j]).square().mean(0)
                distance += (both * squares).mean().item()
            similar = overlap >= MIN_OVERLAP and distance / overlap < limit
            similar = similar and (colors is None or color_distance(one, other) < color_threshold)
            if similar and (best is None or distance / overlap < best[0]):
                best = distance / overlap, one, other
        if best is None:
            return [next(name for name, group in groups.items() if k in group) for k in range(len(masks))]
        small, large = sorted(best[1:], key=lambda name: sum(masks[k].sum() for k in groups[name]))
        groups[large] += groups.pop(small)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000), merge_threshold=st.sampled_from([-0.1, 0.0, 0.03, 0.3, 1.0, 3.0, 1e9]))
def test_merging_equals_brute_force(seed, merge_threshold):
    case, _ = random_case(seed)
    case = DiscoveryOutput(*(x.double() for x in case))
    pairs = zip(case.masks, case.slot_reconstructions, strict=True)
    expected = [merge_by_brute_force(masks, slots, merge_threshold) for masks, slots in pairs]
    assert merge_slots(slot_overlap(case), merge_threshold).tolist() == expected


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), color_threshold=st.sampled_from([0.0, 0.02, 0.1, 0.3, 1.1]))
def test_merging_of_like_colors_equals_brute_force(seed, color_threshold):
    case, _ = random_case(seed)
    case = DiscoveryOutput(*(x.double() for x in case))
    colors = torch.rand(2, 5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) ** 2
    triples = zip(case.masks, case.slot_reconstructions, colors, strict=True)
    expected = [merge_by_brute_force(*images[:2], 3.0, images[2], color_threshold) for images in triples]
    assert merge_slots(slot_overlap(case), 3.0, MIN_OVERLAP, colors, color_threshold).tolist() == expected


def test_slots_that_differ_in_color_are_not_merged():
    """Slots 0 and 1 share half of their colors: a distance of 1/2. Together with 1, slot 0 has a quarter in common
    with slot 2: 1 - sqrt(1/4 * 1/2) = 0.646."""
    statistics = statistics_of({(0, 1): 0.1, (0, 2): 0.1}, {(0, 1): 0.001, (0, 2): 0.002}, (0.4, 0.3, 0.2))
    colors = torch.tensor([[[1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]]).double()
    for threshold, expected in ((0.49, [0, 1, 2]), (0.51, [0, 0, 2]), (0.64, [0, 0, 2]), (0.65, [0, 0, 0])):
        assert merge_slots(statistics, 1e9, MIN_OVERLAP, colors, threshold).tolist() == [expected]
    assert colors[0, 0].tolist() == [1, 1, 0, 0], "the caller's histograms stay"


def test_merging_by_hand():
    """Slots 0 and 1 overlap in half of the image and differ by 0.1 there. Slots 1 and 2 overlap in the other half and
    differ by 0.4. Slot 3 overlaps none. Slot reconstructions do not count where slots do not overlap."""
    masks = torch.tensor([[0.6, 0.0], [0.4, 0.3], [0.0, 0.7], [0.0, 0.0]]).view(1, 4, 1, 2)
    slots = torch.tensor([[0.2, 0.9], [0.3, 0.5], [0.8, 0.9], [0.3, 0.5]]).view(1, 4, 1, 1, 2).expand(1, 4, 3, 1, 2)
    statistics = slot_overlap(make_output(masks, slots))
    torch.testing.assert_close(statistics.overlap[0, 0], torch.tensor([0.18, 0.12, 0, 0], dtype=torch.float64))
    torch.testing.assert_close(statistics.distance[0, 1], torch.tensor([0.0012, 0, 0.0168, 0], dtype=torch.float64))
    torch.testing.assert_close(statistics.area[0], torch.tensor([0.3, 0.35, 0.35, 0], dtype=torch.float64))
    # The reconstruction is 0.24 and 0.78: a variance of 0.0729. The distances are 0.01 and 0.16.
    torch.testing.assert_close(statistics.variance, torch.tensor([0.0729], dtype=torch.float64))
    assert merge_slots(statistics, 0.13).tolist() == [[0, 1, 2, 3]]
    assert merge_slots(statistics, 0.14).tolist() == [[1, 1, 2, 3]], "the smaller is merged into the larger"
    assert merge_slots(statistics, 2.1).tolist() == [[1, 1, 2, 3]]
    assert merge_slots(statistics, 2.2).tolist() == [[1, 1, 1, 3]], "0 and 1 together are larger than 2"


def statistics_of(overlap, distance, area, variance=1.0):
    """Return statistics of one image; matrices are given by their upper triangles."""
    K = len(area)
    matrices = torch.zeros(2, 1, K, K, dtype=torch.float64)
    for matrix, values in zip(matrices, (overlap, distance), strict=True):
        for (k, j), value in values.items():
            matrix[0, k, j] = matrix[0, j, k] = value
    return SlotOverlap(*matrices, torch.tensor([area], dtype=torch.float64), torch.tensor([variance]).double())


@pytest.mark.parametrize("areas, expected", [((0.3, 0.2, 0.1), [0, 0, 2]), ((0.2, 0.3, 0.6), [1, 1, 2])])
@pytest.mark.parametrize("min_overlap", [0.0, MIN_OVERLAP])
def test_a_merged_slot_is_compared_no_more(areas, expected, min_overlap):
    """Slots 0 and 1 are merged. Slot 2 overlaps none, whatever the thresholds."""
    statistics = statistics_of({(0, 1): 0.1}, {(0, 1): 0.001}, areas)
    assert merge_slots(statistics, 1e9, min_overlap).tolist() == [expected]


def test_merged_slots_do_not_delay_others():
    """Three merges suffice for four slots. Slots 2 and 3 differ much more than 0 and 1."""
    statistics = statistics_of({(0, 1): 0.1, (2, 3): 0.1}, {(0, 1): 0.001, (2, 3): 0.5}, (0.4, 0.3, 0.2, 0.1))
    assert merge_slots(statistics, 1e9).tolist() == [[0, 0, 2, 2]]


def test_of_two_equal_slots_the_first_is_merged_into_the_second():
    assert merge_slots(statistics_of({(0, 1): 0.1}, {(0, 1): 0.001}, (0.5, 0.5))).tolist() == [[1, 1]]


def test_min_overlap_is_enough_to_be_compared():
    """The default is 1/800 of the image."""
    for overlap, expected in ((1 / 800, [0, 0]), (1 / 800.5, [0, 1])):
        assert merge_slots(statistics_of({(0, 1): overlap}, {(0, 1): 0.0}, (0.6, 0.4))).tolist() == [expected]


def test_slots_as_different_as_the_threshold_are_not_merged():
    for distance, expected in ((0.015625, [0, 1]), (0.0156, [0, 0])):
        statistics = statistics_of({(0, 1): 0.125}, {(0, 1): distance}, (0.6, 0.4), variance=0.5)
        assert merge_slots(statistics).tolist() == [expected], "the default threshold is a quarter of the variance"


def test_overlaps_of_frames_are_averaged(monkeypatch):
    """Identical frames are merged like one. A frame in which two slots do not overlap counts by its variance alone."""
    monkeypatch.setattr(refinement, "slot_overlap", lambda statistics: statistics)

    def merge_frames(overlaps, threshold, min_overlap=1 / 800):
        return merge_tracks([(each, None) for each in overlaps], 0.2, threshold, min_overlap)

    same = statistics_of({(0, 1): 0.1}, {(0, 1): 0.01}, (0.6, 0.4), variance=0.5)  # different by 0.2 variances
    for threshold, expected in ((0.19, [0, 1]), (0.21, [0, 0])):
        assert merge_frames([same] * 3, threshold).tolist() == merge_slots(same, threshold).tolist() == [expected]
    apart = statistics_of({}, {}, (0.5, 0.5), variance=0.0)
    for threshold, expected in ((0.39, [0, 1]), (0.41, [0, 0])):
        assert merge_frames([same, apart], threshold).tolist() == [expected]
        assert merge_frames([apart, same], threshold).tolist() == [expected]
    assert merge_frames([same, apart], 1e9, min_overlap=0.06).tolist() == [[0, 1]], "0.05 on average"
    with pytest.raises(ValueError, match=r"^frames are empty; expected at least one$"):
        merge_tracks([])


def test_slots_of_videos_are_merged_if_they_differ_by_less_than_0_3_variances(monkeypatch):
    case, image = random_case(0, B=1, K=2)
    for distance, expected in ((0.031, [0, 1]), (0.029, [0, 0])):
        statistics = statistics_of({(0, 1): 0.1}, {(0, 1): distance}, (0.6, 0.4))
        monkeypatch.setattr(refinement, "slot_overlap", lambda output, statistics=statistics: statistics)
        assert merge_tracks([(case, image)]).tolist() == [expected]


def test_defaults_are_recorded():
    """The values of the recorded evaluations."""
    assert refinement.DEFAULTS == {
        "pixel_sigma": 0.5,
        "video_pixel_sigma": 0.2,
        "merge_threshold": 0.25,
        "color_threshold": 0.45,
        "video_merge_threshold": 0.3,
        "background_weight": 0.02,
        "min_confidence": 0.55,
        "min_overlap": 0.00125,
        "background_threshold": 0.8,
        "video_background_threshold": 0.0,
        "capacity": 6.0,
        "edge_sigma": 0.09,
        "min_area": 0.003,
        "color_weight": 1.0,
        "rare_color": 0.01,
        "min_separation": 0.25,
        "full_separation": 0.4,
        "min_object_area": 0.004,
        "max_object_area": 0.2,
    }


def test_posterior_is_bayes_rule():
    masks = torch.tensor([0.7, 0.3]).view(1, 2, 1, 1)
    slots = torch.tensor([[0.1, 0.2, 0.3], [0.5, 0.5, 0.5]]).view(1, 2, 3, 1, 1)
    image = torch.tensor([0.4, 0.4, 0.5]).view(1, 3, 1, 1)
    weights = [
        prior * math.exp(-sum((x - c) ** 2 for x, c in zip((0.4, 0.4, 0.5), color, strict=True)) / (2 * 0.2**2))
        for prior, color in ((0.7, (0.1, 0.2, 0.3)), (0.3, (0.5, 0.5, 0.5)))
    ]
    output, expected = make_output(masks, slots), torch.tensor(weights) / sum(weights)
    torch.testing.assert_close(posterior_masks(output, image, 0.2).flatten(), expected)
    torch.testing.assert_close(refine_masks(output, image, 0.2, merge_threshold=-1.0).flatten(), expected)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_masks_sum_to_one_and_merged_slots_are_empty(seed):
    case, image = random_case(seed)
    masks = refine_masks(case, image)
    torch.testing.assert_close(masks.sum(1), torch.ones(2, 6, 6))
    uncut = refine_masks(case, image, capacity=0, **NO_COLORS)
    unmerged = refine_masks(case, image, merge_threshold=-1.0, capacity=0, background_threshold=0, **NO_COLORS)
    kept = refine_masks(case, image, **NO_COLORS).sum((2, 3)) > 0
    assert torch.equal(kept, uncut.sum((2, 3)) > 0), "a cut keeps empty slots empty"
    assert (kept.sum(1) <= 5).all() and kept.any(1).all()
    assert (uncut[kept] >= unmerged[kept] - 1e-6).all()


def test_wide_sigma_without_merging_gives_the_decoder_masks():
    case, image = random_case(0)
    masks = refine_masks(case, image, 1e6, -1.0, capacity=0, background_threshold=0, **NO_COLORS)
    torch.testing.assert_close(masks, case.masks)


def test_cut_masks_are_the_softmax_of_minimum_cuts():
    case, image = random_case(1, B=1, K=3, H=5, W=4)
    x, log_masks = image[0].double().numpy(), case.masks[0].double().log().numpy()
    vertices, edges, capacities = np.arange(20).reshape(5, 4), [], []
    for tails, heads in ((vertices[:, :-1], vertices[:, 1:]), (vertices[:-1], vertices[1:])):
        for u, v in zip(tails.ravel(), heads.ravel(), strict=True):
            difference = x[:, u // 4, u % 4] - x[:, v // 4, v % 4]
            edges += [(u, v), (v, u)]
            capacities += [2.5 * math.exp(-(difference**2).sum() / (2 * 0.3**2))] * 2
    cut = GraphMinCut(edges, 20, tolerance=1e-10, max_iterations=100_000).double()
    weights = [[*capacities, *(f - f.min()).ravel(), *[0] * 20] for f in log_masks]
    p = cut(torch.tensor(weights)) + torch.tensor(log_masks.min((1, 2)))[:, None]
    expected = p.softmax(0).view(3, 5, 4).float()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(refinement, "CUT_TOLERANCE", 1e-7)
        torch.testing.assert_close(cut_masks(case.masks, image, 2.5, 0.3)[0], expected, rtol=0, atol=1e-4)


def test_outlines_move_to_the_edges_of_the_image():
    image = torch.full((1, 3, 12, 16), 0.2)
    image[..., 9:] = 0.8  # the edge is at column 9, the mask ends at column 7 and has a hole
    mask = torch.full((1, 1, 12, 16), 0.9)
    mask[..., 7:] = 0.4
    mask[..., 10:] = 0.1
    mask[..., 4, 3] = 0.3
    masks = cut_masks(torch.cat([mask, 1 - mask], 1), image)
    assert torch.equal(masks[0, 0] > 0.5, (torch.arange(16) < 9).expand(12, 16))
    assert torch.equal(cut_masks(masks, image, capacity=0), masks)


def test_empty_slots_stay_empty_and_uint8_images_are_those_in_floats():
    masks = torch.rand(2, 4, 6, 5).softmax(1)
    masks[0, 1] = 0
    masks, image = masks / masks.sum(1, keepdim=True), torch.randint(0, 256, (2, 3, 6, 5), dtype=torch.uint8)
    cut = cut_masks(masks, image)
    assert not cut[0, 1].any() and torch.equal(cut, cut_masks(masks, image / 255))
    torch.testing.assert_close(cut.sum(1), torch.ones(2, 6, 5))


def test_images_of_a_batch_are_independent():
    case, image = random_case(3, B=4)
    alone = torch.cat(
        [refine_masks(DiscoveryOutput(*(x[b : b + 1] for x in case)), image[b : b + 1]) for b in range(4)]
    )
    torch.testing.assert_close(refine_masks(case, image), alone)


def test_order_of_slots_does_not_matter():
    case, image = random_case(5)
    order = torch.randperm(5, generator=torch.Generator().manual_seed(0))
    permuted = make_output(case.masks[:, order], case.slot_reconstructions[:, order])
    torch.testing.assert_close(refine_masks(permuted, image), refine_masks(case, image)[:, order])


def test_parts_of_the_background_are_merged():
    truth = torch.zeros(1, 16, 16, dtype=torch.long)
    truth[:, 4:8, 4:8], truth[:, 9:14, 8:15] = 1, 2
    colors = torch.tensor([[0.2, 0.3, 0.4], [0.9, 0.1, 0.1], [0.1, 0.8, 0.2]])
    image = colors[truth].permute(0, 3, 1, 2)
    fragments = torch.where(truth > 0, truth + 1, (torch.arange(16) >= 9).long()[None, None].expand_as(truth))
    hard = F.one_hot(fragments, 5).permute(0, 3, 1, 2).float()
    masks = F.avg_pool2d(
        F.pad(hard, (1, 1, 1, 1), mode="replicate"), 3, stride=1
    )  # soft at borders, as those of decoders
    slots = torch.cat([colors[:1], colors, colors[:1]])[None, :, :, None, None].expand(1, 5, 3, 16, 16)
    before, after = (
        metrics.image_metrics(truth, masks.argmax(1)),
        metrics.image_metrics(truth, refine_masks(make_output(masks, slots), image).argmax(1)),
    )
    assert before["miou"] < 0.9 and before["ari"] < 0.8
    assert after["miou"] == 1 and after["ari"] == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_refined_in_float32(dtype):
    case, image = random_case(1)
    half = DiscoveryOutput(*(x.to(dtype) for x in case))
    assert refine_masks(half, image).dtype == torch.float32
    torch.testing.assert_close(refine_masks(half, (image * 255).byte()).sum(1), torch.ones(2, 6, 6))


# --------------------------------------------------------------------------------------------------- high-recall masks


def pixels(*rows):
    """Return masks (1, K, 1, n) of an image of n pixels, one row for each slot."""
    return torch.tensor(rows, dtype=torch.float64)[None, :, None, :]


def test_high_recall_masks_by_hand():
    """The second slot has 0.9 and 0.3 of two pixels, 0.6 on average. The third has at most 0.1 of what it would win."""
    masks = pixels([0.1, 0.7, 0.9, 0.95, 1.0], [0.9, 0.3, 0.0, 0.0, 0.0], [0.0, 0.0, 0.1, 0.05, 0.0])
    assert masks.argmax(1).flatten().tolist() == [1, 0, 0, 0, 0]
    got = high_recall_masks(masks)
    assert got.argmax(1).flatten().tolist() == [1, 1, 0, 0, 0]
    expected = [[0.1 / 45.1, 0.7 / 15.7, 0.9, 0.95, 1], [45 / 45.1, 15 / 15.7, 0, 0, 0], [0, 0, 0.1, 0.05, 0]]
    torch.testing.assert_close(got, pixels(*expected))


def test_confidence_is_a_mean_over_all_pixels_of_a_slot():
    """A slot below the threshold keeps what it has."""
    for second, expected in ((0.15, [1, 0, 0, 0]), (0.25, [1, 1, 0, 0])):  # 0.525 and 0.575
        masks = pixels([0.1, 1 - second, 1.0, 1.0], [0.9, second, 0.0, 0.0])
        assert high_recall_masks(masks).argmax(1).flatten().tolist() == expected


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_only_the_background_loses_pixels(seed):
    case, image = random_case(seed)
    masks = refine_masks(case, image)
    got, background = high_recall_masks(masks), masks.mean((2, 3)).argmax(1)
    torch.testing.assert_close(got.sum(1), torch.ones(2, 6, 6))
    for b in range(2):
        assert (got[b, background[b]] <= masks[b, background[b]] + 1e-6).all()
        before, after = masks[b].argmax(0), got[b].argmax(0)
        assert (after[before != after] != background[b]).all(), "no pixel becomes background"


def test_high_recall_masks_do_not_depend_on_the_order_of_slots_or_images():
    case, image = random_case(5, B=4)
    masks = refine_masks(case, image)
    order = torch.randperm(5, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(high_recall_masks(masks[:, order]), high_recall_masks(masks)[:, order])
    torch.testing.assert_close(
        torch.cat([high_recall_masks(masks[b : b + 1]) for b in range(4)]), high_recall_masks(masks)
    )


def test_a_slot_that_wins_nothing_keeps_what_it_has():
    """The third slot wins the first pixel with too little confidence, the second slot wins none."""
    masks = pixels([0.3, 1.0, 1.0], [0.2, 0.0, 0.0], [0.5, 0.0, 0.0])
    torch.testing.assert_close(high_recall_masks(masks), masks)


def test_pixels_that_a_slot_would_not_win_do_not_lower_its_confidence():
    """A slot wins what is more than 1/50 of the background: the first pixel, and the second one in one case."""
    for second, expected in ((0.019, [1, 0, 0]), (0.021, [1, 0, 0])):
        masks = pixels([0.1, 1 - second, 1.0], [0.9, second, 0.0])
        got = high_recall_masks(masks)
        assert got.argmax(1).flatten().tolist() == expected
        assert torch.equal(got, masks) == (second == 0.021), "0.9 is confident, the mean of 0.9 and 0.021 is not"


def test_high_recall_thresholds_are_arguments():
    masks = pixels([0.1, 0.75, 1.0, 1.0], [0.9, 0.25, 0.0, 0.0])  # a confidence of 0.575
    labels = lambda **options: high_recall_masks(masks, **options).argmax(1).flatten().tolist()
    assert labels() == [1, 1, 0, 0]
    assert labels(min_confidence=0.6) == [1, 0, 0, 0]
    assert labels(background_weight=0.5) == [1, 0, 0, 0], "0.25 is less than half of 0.75"


# ----------------------------------------------------------------------------------------------- videos, kinds, options


def test_video_of_one_frame_equals_an_image():
    case, image = random_case(7)
    options = {name: refinement.DEFAULTS[name] for name in ("pixel_sigma", "merge_threshold", "background_threshold")}
    (masks,) = refine_video_masks([case], image[:, None], **options)
    torch.testing.assert_close(masks, refine_masks(case, image, color_threshold=2.0, min_area=0.0, **NO_COLORS))


def test_slots_are_merged_in_all_frames_or_in_none():
    (one, first), (other, second) = random_case(8), random_case(9)
    masks = refine_video_masks([one, other], torch.stack([first, second], 1), merge_threshold=1.0)
    assert torch.equal(masks[0].sum((2, 3)) > 0, masks[1].sum((2, 3)) > 0)


def test_images_need_not_be_square():
    case, image = random_case(2, H=6, W=9)
    masks = refine_masks(case, image)
    turned = DiscoveryOutput(*(x.mT if x.ndim > 1 else x for x in case))
    torch.testing.assert_close(refine_masks(turned, image.mT), masks.mT)
    assert high_recall_masks(masks).shape == masks.shape == (2, 5, 6, 9)


def test_min_overlap_is_an_argument():
    case, image = random_case(4)
    statistics = slot_overlap(case)
    assert merge_slots(statistics, 1e9).tolist() != [list(range(5))] * 2
    assert merge_slots(statistics, 1e9, min_overlap=1.0).tolist() == [list(range(5))] * 2
    posterior = posterior_masks(case, image)
    options = {"merge_threshold": 1e9, "min_overlap": 1.0, "capacity": 0.0, "background_threshold": 0.0}
    assert torch.equal(refine_masks(case, image, **options, **NO_COLORS), posterior)
    posterior = posterior_masks(case, image, 0.2)  # the default of videos
    assert torch.equal(refine_video_masks([case], image[:, None], **options)[0], posterior)


def test_capacity_and_edge_sigma_are_arguments():
    case, image = random_case(4)
    alike = {"color_threshold": 2.0, "min_area": 0.0} | NO_COLORS  # as for videos
    merged = refine_masks(case, image, capacity=0.0, **alike)
    for capacity, edge_sigma in ((1.0, 0.09), (6.0, 0.5)):
        expected = cut_masks(merged, image, capacity, edge_sigma)
        assert torch.equal(refine_masks(case, image, capacity=capacity, edge_sigma=edge_sigma, **alike), expected)
        options = {"merge_threshold": MERGE_THRESHOLD, "capacity": capacity, "edge_sigma": edge_sigma}
        options |= {"background_threshold": BACKGROUND_THRESHOLD, "pixel_sigma": PIXEL_SIGMA}
        assert torch.equal(refine_video_masks([case], image[:, None], **options)[0], expected)
    assert torch.equal(cut_masks(merged, image), cut_masks(merged, image, 6.0, 0.09)), "the defaults"


def test_capacities_by_hand():
    """Two columns that differ by 0.3 in one channel, two rows that are equal. Channels: right, left, down, up."""
    image = torch.zeros(1, 3, 2, 2)
    image[0, 1, :, 1] = 0.3
    w = edge_capacities(image, 2.0, 0.3)
    across, along = 2 * math.exp(-0.5), 2.0
    expected = [
        [[across, 0], [across, 0]],
        [[0, across], [0, across]],
        [[along, along], [0, 0]],
        [[0, 0], [along, along]],
        [[0, 0], [0, 0]],
        [[0, 0], [0, 0]],
    ]
    torch.testing.assert_close(w[0], torch.tensor(expected))


def test_masks_below_e_to_the_minus_10_are_none():
    masks = torch.full((1, 2, 4, 4), math.exp(-10.1))
    masks[:, 0] = 1 - masks[:, 1]
    assert cut_masks(masks, torch.rand(1, 3, 4, 4))[0, 1].max() == 0
    masks[:, 1] = math.exp(-9.9)
    assert cut_masks(masks, torch.rand(1, 3, 4, 4))[0, 1].min() > 0


def test_cuts_are_computed_in_float32():
    case, image = random_case(1)
    for dtype in (torch.float16, torch.bfloat16):
        cut = cut_masks(case.masks.to(dtype), image)
        assert cut.dtype == torch.float32 and cut.isfinite().all()


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000), min_area=st.sampled_from([0.0, 0.05, 0.1, 0.2, 0.5, 1.0]))
def test_fragments_by_brute_force(seed, min_area):
    case, _ = random_case(seed, W=7)
    found = drop_fragments(case.masks, min_area)
    for masks, left in zip(case.masks, found, strict=True):
        pixels = [int((masks.argmax(0) == k).sum()) for k in range(5)]
        fragments = [k for k in range(5) if 0 < pixels[k] < min_area * 42 and pixels[k] < max(pixels)]
        kept = masks.clone()
        kept[fragments] = 0
        torch.testing.assert_close(left, kept / kept.sum(0))
        assert fragments or torch.equal(left, masks), "nothing changes without fragments"


def fragment_case():
    """A 32x32 image of two halves, in which slot 2 wins three pixels: fewer than 0.3 %, which are 3.07."""
    labels = (torch.arange(32) >= 16).long().expand(2, 32, 32).clone()
    labels[:, 5, 3:6] = 2
    masks = (0.98 * F.one_hot(labels, 3) + 0.01).movedim(-1, 1) / 1.01
    slots = torch.eye(3).view(1, 3, 3, 1, 1).expand(2, 3, 3, 32, 32)
    return make_output(masks, slots), torch.eye(3)[labels].movedim(-1, 1), labels


def test_refined_masks_have_no_fragments():
    case, image, labels = fragment_case()
    options = {"capacity": 0.0, "background_threshold": 0.0}
    assert torch.equal(refine_masks(case, image, **options, min_area=0.0).argmax(1), labels)
    masks = refine_masks(case, image, **options)
    assert torch.equal(masks.argmax(1), labels.where(labels < 2, 0)) and not masks[:, 2].any()
    torch.testing.assert_close(masks.sum(1), torch.ones(2, 32, 32))
    alone = refine_masks(DiscoveryOutput(*(x[:1] for x in case)), image[:1], **options)
    torch.testing.assert_close(masks[:1], alone)
    assert torch.equal(select_masks("refined", case, image), refine_masks(case, image))


def test_a_slot_of_exactly_the_smallest_area_stays():
    case, _, labels = fragment_case()
    for min_area, kept in ((3 / 1024, True), (3.01 / 1024, False)):
        assert torch.equal(drop_fragments(case.masks, min_area).argmax(1), labels) == kept


def test_a_pixel_that_belongs_to_a_fragment_alone_stays():
    masks = torch.zeros(1, 2, 10, 10)
    masks[0, 0], masks[0, :, 0, 0] = 1, torch.tensor([0.0, 1.0])
    assert torch.equal(drop_fragments(masks, 0.5), masks)


def test_slots_below_the_background_are_no_fragments():
    masks = torch.tensor([0.6, 0.4]).view(1, 2, 1, 1).expand(1, 2, 8, 8)
    assert torch.equal(drop_fragments(masks, 1.0), masks)


def test_color_threshold_and_min_area_are_arguments():
    case, image = random_case(4)
    uncut = {"merge_threshold": 1e9, "capacity": 0.0, "background_threshold": 0.0, "min_area": 0.0} | NO_COLORS
    posterior = posterior_masks(case, image)
    assert torch.equal(refine_masks(case, image, **uncut, color_threshold=0.0), posterior)
    assert not torch.equal(refine_masks(case, image, **uncut, color_threshold=2.0), posterior)
    whole = refine_masks(case, image, min_area=0.0, rare_color=0.0)
    dropped = refine_masks(case, image, min_area=0.2, rare_color=0.0)
    assert torch.equal(dropped, drop_fragments(whole, 0.2)) and not torch.equal(dropped, whole)


def test_pixel_sigma_is_an_argument():
    case, image = random_case(4)
    for pixel_sigma in (0.1, 0.5):
        expected = posterior_masks(case, image, pixel_sigma)
        options = {"merge_threshold": -1.0, "capacity": 0.0, "background_threshold": 0.0}
        assert torch.equal(refine_masks(case, image, pixel_sigma, **options, **NO_COLORS), expected)
        assert torch.equal(refine_video_masks([case], image[:, None], pixel_sigma, **options)[0], expected)


def test_masks_of_each_kind():
    case, image = random_case(6)
    refined = refine_masks(case, image)
    expected = {"decoder": case.masks, "refined": refined, "high-recall": high_recall_masks(refined)}
    assert expected.keys() == MASK_KINDS.keys()
    for kind, masks in expected.items():
        assert torch.equal(select_masks(kind, case, image), masks)
    with pytest.raises(ValueError, match=r"^masks is 'sharp'; expected one of decoder, refined, high-recall$"):
        select_masks("sharp", case, image)


def test_refinement_needs_slot_reconstructions():
    case, image = random_case(0)
    with pytest.raises(ValueError, match=r"^slot_reconstructions is None; expected a tensor"):
        refine_masks(case._replace(slot_reconstructions=None), image)


def test_cuts_of_empty_slots_change_nothing():
    """On CUDA empty slots are cut too, so that the CPU does not wait for the number of the others."""
    output, image = random_case(5, B=3, K=6, H=12, W=10)
    masks = refinement.merge_masks(output.masks, torch.tensor([[0, 0, 2, 3, 3, 3], [0, 1, 2, 3, 4, 5], [4] * 6]))
    cut = refinement.MinCut((12, 10), tolerance=1e-2, max_iterations=300, warn=False)
    w = edge_capacities(image, 6.0, 0.09)
    expected = refinement._cut_present(cut, w, masks)
    assert torch.equal(refinement._cut_all(cut, w, masks), expected)
    assert torch.equal(cut_masks(masks, image, 6.0, 0.09), expected)
    assert (expected[0, [1, 4, 5]] == 0).all() and torch.equal(expected[2, 4], torch.ones(12, 10))
