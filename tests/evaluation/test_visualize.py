import numpy as np
import pytest

from cutslots.evaluation.visualize import Visualization, colorize, visualization_grid
from cutslots.viz.images import blend_colors
from cutslots.viz.palette import PALETTE
from tests.evaluation.small_visualizations import PANELS, random_visualization

SIZE = 12


def colors_by_label(colors, labels):
    found = {k: {tuple(c) for c in colors[labels == k].tolist()} for k in np.unique(labels).tolist()}
    assert all(len(colors) == 1 for colors in found.values()), "one color per label"
    return {k: colors.pop() for k, colors in found.items()}


@pytest.mark.parametrize("seed", range(5))
def test_labels_have_the_colors_of_their_objects(seed):
    rng = np.random.default_rng(seed)
    truth = np.repeat(np.arange(6), 6).reshape(6, 6).astype(np.uint8)
    names = rng.permutation(10)[:6].astype(np.uint8)
    labels = names[truth]
    labels[rng.integers(6), 0] = names[0]  # an error that changes no majority
    assert np.array_equal(colorize(names[truth], truth), PALETTE[truth])
    found = colors_by_label(colorize(labels, truth), labels)
    assert found == {int(names[t]): tuple(PALETTE[t].tolist()) for t in range(6)}


@pytest.mark.parametrize("seed", range(10))
def test_labels_have_different_colors(seed):
    rng = np.random.default_rng(seed)
    truth = rng.integers(0, rng.integers(1, 6), (SIZE, SIZE), dtype=np.uint8)
    labels = rng.integers(0, rng.integers(1, 10), (SIZE, SIZE), dtype=np.uint8)
    for given in (truth, None):
        found = colors_by_label(colorize(labels, given), labels)
        assert len(set(found.values())) == len(found)


def test_extra_labels_have_colors_of_no_object():
    truth = np.uint8([[0, 0, 0, 0], [0, 0, 1, 1], [2, 2, 2, 2]])
    labels = np.uint8([[0, 0, 0, 0], [0, 2, 1, 1], [1, 1, 1, 1]])  # 2 is extra; 1 covers both objects
    found = colors_by_label(colorize(labels, truth), labels)
    assert found[0] == (0, 0, 0) and found[1] == tuple(PALETTE[2].tolist()), "the larger object gives its color"
    assert found[2] not in {tuple(PALETTE[t].tolist()) for t in range(3)}


def test_without_truth_label_k_has_color_k_plus_one():
    labels = np.uint8([[0, 1], [2, 0]])
    assert np.array_equal(colorize(labels), PALETTE[labels + 1])


def test_panels(rng):
    shown = random_visualization(rng)
    shown.truth[1] = 0  # the true masks of the second image are unknown
    slots = ["slot 1", "slot 2", "slot 3"]
    assert list(shown.panels(0)) == [*PANELS, *slots]
    assert list(shown.panels(1)) == [*(name for name in PANELS if name != "ground truth"), *slots]
    assert np.array_equal(shown.panels(0)["ground truth"], blend_colors(shown.image[0], PALETTE[shown.truth[0]]))
    without = list(shown._replace(refined=None).panels(0))
    assert without == [*(name for name in PANELS if name != "refined masks"), *slots]


def test_grid_has_a_row_for_each_image(rng):
    shown = random_visualization(rng)
    grid = np.asarray(visualization_grid(shown))
    assert grid.shape == (2 * SIZE + 2, 9 * SIZE + 8 * 2, 3)
    assert np.array_equal(grid[:SIZE, :SIZE], shown.image[0])
    assert np.array_equal(grid[-SIZE:, :SIZE], shown.image[1])
    assert (grid[SIZE : SIZE + 2] == 205).all()


def test_subsample_takes_evenly_spaced_images(rng):
    video = random_visualization(rng, 9, shared_labels=True)
    video = video._replace(features=video.reconstruction)
    chosen = video.subsample(3)
    assert chosen.shared_labels and all(
        np.array_equal(getattr(chosen, name), getattr(video, name)[[0, 4, 8]]) for name in Visualization._fields[:-1]
    )
    assert len(video.subsample(99).image) == 9
    assert video._replace(refined=None).subsample(3).refined is None


def test_track_has_one_color_in_all_frames(rng):
    video = random_visualization(rng, 6, shared_labels=True)
    for labels in (video.decoder, video.partition, video.refined):
        colors = np.stack([video.colors(labels, i) for i in range(len(labels))])
        for k in range(3):
            assert len(np.unique(colors[labels == k], axis=0)) == 1
