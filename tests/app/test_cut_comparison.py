"""The comparison of the relaxed and the exact cut in the second tab: both cuts are those of the library."""

import re

import numpy as np
import pytest
import torch

from cutslots.app import cut_comparison as tab
from cutslots.programs import exact
from cutslots.programs.graph import Graph, grid_edges
from cutslots.programs.grid_cut import GridCut


@pytest.fixture(scope="module")
def small():
    """An image of two grays, 6 by 8, and a scribble on each half."""
    image = np.full((6, 8, 3), 60, dtype=np.uint8)
    image[:, 4:] = 200
    scribbles = np.zeros((6, 8), dtype=np.uint8)
    scribbles[2, 1], scribbles[3, 6] = tab.SOURCE, tab.SINK
    return image, scribbles


def test_both_cuts_solve_the_edge_weights(small):
    cuts = tab.solve_cuts(*small, gamma=0.4, temperature=0.5, reach=1.5, smoothness=0.3)
    w = tab.edge_weights(*small, smoothness=0.3)
    edges = w[torch.from_numpy(grid_edges((6, 8)))].numpy()
    best = exact.min_cut_lp(Graph.grid((6, 8)), edges)
    assert cuts.value == pytest.approx(best.value, rel=1e-5)
    assert (cuts.exact == best.side[:-2].reshape(6, 8)).all()
    relaxed = GridCut((6, 8), 0.4, 1.5, anchor=1.0).solve(w)
    assert np.allclose(cuts.p, relaxed.p.numpy(), atol=1e-6)
    softmax = torch.stack([relaxed.p, -relaxed.p]).div(0.5).softmax(0)[0]
    assert np.allclose(cuts.probability, softmax.numpy(), atol=1e-6)
    left = np.zeros((6, 8), dtype=bool)
    left[:, :4] = True
    assert (cuts.exact == left).all() and ((cuts.p > 0) == left).all()


def test_d_is_the_largest_variable_of_existing_edges(small):
    cuts = tab.solve_cuts(*small, gamma=0.5, temperature=0.5, reach=1.0, smoothness=0.2)
    d = GridCut((6, 8), 0.5, 1.0, anchor=1.0).solve(tab.edge_weights(*small, smoothness=0.2)).d.numpy()
    assert cuts.d[0, 0] == pytest.approx(max(d[0, 0, 0], d[2, 0, 0]))  # a corner has an edge right and one down
    assert cuts.d[2, 3] == pytest.approx(d[:4, 2, 3].max())


def test_gamma_scales_p_and_temperature_does_not(small):
    first = tab.solve_cuts(*small, gamma=0.5, temperature=0.5, reach=2, smoothness=0.5)
    halved = tab.solve_cuts(*small, gamma=0.25, temperature=0.5, reach=2, smoothness=0.5)
    colder = tab.solve_cuts(*small, gamma=0.5, temperature=0.1, reach=2, smoothness=0.5)
    assert np.allclose(halved.p, 2 * first.p, atol=1e-6) and (halved.exact == first.exact).all()
    assert (colder.p == first.p).all()
    assert abs(colder.probability - 0.5).min() > abs(first.probability - 0.5).min()
    assert tab.heat_map(halved.p) != tab.heat_map(first.p)


def test_smoothness_changes_d_but_not_p(small):
    low, high = (
        tab.solve_cuts(*small, gamma=0.5, temperature=0.5, reach=2, smoothness=smoothness) for smoothness in (0, 2)
    )
    assert np.allclose(low.p, high.p, atol=1e-5) and (low.d != high.d).any()


@pytest.mark.parametrize("name", ["gamma", "temperature", "reach", "smoothness"])
@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf"), None])
def test_invalid_hyperparameters_are_named(small, name, value):
    values = {"gamma": 0.5, "temperature": 0.5, "reach": 2.0, "smoothness": 0.5} | {name: value}
    with pytest.raises(ValueError, match=f"{name} is"):
        tab.solve_cuts(*small, **values)


@pytest.mark.parametrize("shape", [(1, 1), (1, 5), (5, 1)])
def test_images_of_one_pixel_height_or_width_are_cut(shape):
    scribbles = np.zeros(shape, dtype=np.uint8)
    scribbles.flat[-1] = tab.SINK
    scribbles.flat[0] = tab.SOURCE
    shown = tab.cuts_html(np.zeros((*shape, 3), dtype=np.uint8), scribbles, 0.5, 0.5, 2, 0.5)
    assert "hint" in shown if scribbles.size == 1 else "exact minimum cut" in shown


def test_color_nll_is_zero_for_marked_colors_and_one_for_distant_ones():
    image = np.zeros((4, 4, 3))
    image[0] = 1.0
    marked = np.zeros((4, 4), dtype=bool)
    marked[0, 0] = True
    nll = tab.color_nll(image, marked)
    assert np.allclose(nll[0], 0, atol=1e-6) and np.allclose(nll[1:], 1, atol=1e-6)


def test_every_image_has_alt_text(small):
    images = re.findall(r"<img [^>]*>", tab.cuts_html(*small, 0.5, 0.5, 2, 0.5))
    assert len(images) == 5 and all(re.search(r'alt="[^"]{5,}"', each) for each in images)
    assert all(re.search(r'src="data:image/', each) for each in images)


def test_missing_scribbles_are_asked_for(small):
    image, scribbles = small
    assert "object and on the background" in tab.cuts_html(image, np.zeros_like(scribbles), 0.5, 0.5, 2, 0.5)
    only_object = np.where(scribbles == tab.SOURCE, scribbles, 0)
    assert "Scribble on the background" in tab.cuts_html(image, only_object, 0.5, 0.5, 2, 0.5)
