"""Segmentation by scribbles: known answers, literal restatements, files, bad input."""

import json
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import ndimage
from scipy.special import logsumexp
from scipy.stats import multivariate_normal
from skimage import data, transform

import cutslots
from cutslots import Graph, Segmentation, cli, exact, segment
from cutslots.files import Notice
from cutslots.inference import segmentation as module
from cutslots.inference.segment import segment_file
from cutslots.inference.segmentation import (
    Marks,
    Mixture,
    color_densities,
    cut_weights,
    fit_mixture,
    label_evidence,
    log_densities,
    neighbor_capacities,
    read_scribbles,
)
from cutslots.programs.graph import grid_edges
from tests.small_runs import Command

COLORS = np.array([(200, 40, 40), (40, 60, 220), (240, 220, 30)], dtype=np.uint8)


def regions(height=60, width=80, noise=12, seed=0):
    """An image of three regions with noise, and their truth (H, W): a disc in a half in another half."""
    y, x = np.mgrid[:height, :width]
    truth = (x >= width // 2).astype(int)
    truth[(y - height / 2) ** 2 + (x - width / 4) ** 2 < (height / 4) ** 2] = 2
    clean = COLORS[truth].astype(float)
    image = np.clip(clean + np.random.default_rng(seed).normal(0, noise, clean.shape), 0, 255)
    return image.astype(np.uint8), truth


def dots(truth, margin=3, label=lambda k: k + 1):
    """Scribbles (H, W): a short horizontal stroke inside each region of the truth."""
    marks = np.zeros(truth.shape, dtype=int)
    for k in np.unique(truth):
        core = ndimage.binary_erosion(truth == k, iterations=margin)
        y, x = np.argwhere(core)[len(np.argwhere(core)) // 2]
        marks[y, max(0, x - 4) : x + 5][core[y, max(0, x - 4) : x + 5]] = label(k)
    return marks


def iou(a, b):
    return (a & b).sum() / (a | b).sum()


# ------------------------------------------------------------------------------------------------------ known answers


def test_two_regions_are_found_exactly():
    image, truth = regions()
    truth[truth == 2] = 0
    image = np.where((truth == 1)[..., None], image, regions()[0][:1, :1])
    found = segment(image, dots(truth))
    np.testing.assert_array_equal(found.labels, truth)
    assert found.gap <= module.TOLERANCE


def test_three_regions_are_found_exactly():
    image, truth = regions()
    found = segment(image, dots(truth))
    np.testing.assert_array_equal(found.labels, truth)
    assert found.labels.dtype == np.uint8 and found.colors.shape == (3, 3)


def test_strong_noise_needs_capacities():
    """Without capacities every pixel decides alone."""
    image, truth = regions(noise=90)
    scribbles = np.where(np.random.default_rng(0).random(truth.shape) < 0.1, truth + 1, 0)
    alone, held = (segment(image, scribbles, capacity=c).labels for c in (0.0, 20.0))
    assert (alone != truth).mean() > 0.03
    assert (held != truth).mean() < 0.01


def test_the_order_of_labels_changes_nothing_else():
    image, truth = regions()
    first, second = segment(image, dots(truth)), segment(image, dots(truth, label=lambda k: 3 - k))
    np.testing.assert_array_equal(second.labels, 2 - first.labels)
    np.testing.assert_allclose(second.alpha[::-1], first.alpha, atol=1e-5)


def test_marks_are_kept_even_where_they_contradict_the_colors():
    image, truth = regions()
    scribbles = dots(truth)
    scribbles[5, 5:9], scribbles[50, 70] = 2, 3  # inside other regions
    for capacity in (0.0, 1.0, 100.0):
        found = segment(image, scribbles, capacity)
        np.testing.assert_array_equal(found.labels[scribbles > 0], scribbles[scribbles > 0] - 1)
        for k in range(3):
            np.testing.assert_array_equal(found.alpha[k][scribbles > 0], scribbles[scribbles > 0] == k + 1)
            assert (found.p[k][scribbles == k + 1] > 0.9).all()


def test_nothing_is_left_to_find_if_all_pixels_are_marked():
    image, truth = regions()
    np.testing.assert_array_equal(segment(image, truth + 1).labels, truth)


@pytest.mark.parametrize("shape", [(1, 2), (1, 40), (3, 3), (35, 2)])
def test_small_images(shape):
    image = np.zeros((*shape, 3), np.uint8)
    marks = np.zeros(shape, int)
    marks.flat[0], marks.flat[-1] = 1, 2
    found = segment(image, marks)
    assert found.labels.flat[0] == 0 and found.labels.flat[-1] == 1
    assert np.isfinite(found.alpha).all()


def test_alpha_is_a_partition_and_agrees_with_p():
    image, truth = regions(noise=60)
    for scribbles in (dots(truth), np.minimum(dots(truth), 2)):
        found = segment(image, scribbles)
        free = scribbles == 0
        np.testing.assert_allclose(found.alpha.sum(0), 1, atol=1e-5)
        np.testing.assert_array_equal(found.alpha.argmax(0)[free], found.labels[free])
        expected = np.exp(found.p / 2 - logsumexp(found.p / 2, 0))
        np.testing.assert_allclose(found.alpha[:, free], expected[:, free], atol=1e-5)
    sigmoid = 1 / (1 + np.exp(-found.p[0].astype(float)))
    np.testing.assert_allclose(found.alpha[0][free], sigmoid[free], atol=1e-5)


def test_it_is_deterministic_and_leaves_random_states_alone():
    image, truth = regions(noise=60)
    state, torch_state = np.random.get_state()[1].copy(), torch.get_rng_state()
    first, second = (segment(image, dots(truth)) for _ in range(2))
    np.testing.assert_array_equal(first.p, second.p)
    np.testing.assert_array_equal(np.random.get_state()[1], state)
    assert torch.equal(torch.get_rng_state(), torch_state)


# ------------------------------------------------------------------------------------------------------- restatements


def cut_value(w, side):
    """The total capacity of the edges that a side (H, W) of the source removes, in loops."""
    right, left, down, up, source, sink = w.tolist()
    total = 0.0
    for (i, j), inside in np.ndenumerate(side):
        total += sink[i][j] if inside else source[i][j]
        if inside and j + 1 < side.shape[1] and not side[i, j + 1]:
            total += right[i][j]
        if inside and j and not side[i, j - 1]:
            total += left[i][j]
        if inside and i + 1 < side.shape[0] and not side[i + 1, j]:
            total += down[i][j]
        if inside and i and not side[i - 1, j]:
            total += up[i][j]
    return total


@pytest.mark.parametrize("seed", range(8))
def test_two_labels_are_the_minimum_cut_of_maximum_flow(seed):
    rng = np.random.default_rng(seed)
    image = rng.integers(0, 256, (9, 11, 3), dtype=np.uint8)
    scribbles = rng.choice(3, (9, 11), p=[0.8, 0.1, 0.1])
    scribbles[0, :2] = 1, 2
    found = segment(image, scribbles, capacity=3.0, tolerance=1e-6)
    w = cut_weights(image, read_scribbles(scribbles, (11, 9)), 3.0)[0]
    maximum = exact.min_cut(Graph.grid((9, 11)), w[torch.as_tensor(grid_edges((9, 11)))].double().numpy())
    assert cut_value(w, found.labels == 0) == pytest.approx(maximum.value, rel=1e-5)


def test_the_density_is_that_of_scipy():
    rng = np.random.default_rng(0)
    colors = rng.random((200, 3))
    mixture = fit_mixture(colors)
    density = module.OUTLIERS * np.ones(200)
    for weight, mean, covariance in zip(*mixture, strict=True):
        density += (1 - module.OUTLIERS) * weight * multivariate_normal(mean, covariance).pdf(colors)
    (found,) = log_densities(colors.T.astype(np.float32), [mixture])
    np.testing.assert_allclose(found, np.log(density), atol=1e-3)


def test_the_density_of_a_narrow_mixture_is_finite_and_exact():
    """The smallest covariance that there is, with colors as far away as there are."""
    means = np.array([[0.0, 0.0, 0.0], [1.0, 1.0, 1.0]])
    mixture = Mixture(np.array([0.5, 0.5]), means, np.stack([module.MIN_VARIANCE * np.eye(3)] * 2))
    x = np.vstack([np.eye(3), means, np.add(means, (0.02, 0, 0.01)), [[0.5, 0.5, 0.5]]])
    density = sum(0.5 * multivariate_normal(m, module.MIN_VARIANCE * np.eye(3)).pdf(x) for m in means)
    expected = np.log(module.OUTLIERS + (1 - module.OUTLIERS) * density)
    (found,) = log_densities(x.T.astype(np.float32), [mixture])
    np.testing.assert_allclose(found, expected, atol=0.02)


def test_a_mixture_has_the_mean_and_the_covariance_of_its_clusters(monkeypatch):
    monkeypatch.setattr(module, "COMPONENTS", 5)
    rng = np.random.default_rng(1)
    clusters = [rng.normal(center, 0.01, (50, 3)) for center in (0.1, 0.3, 0.5, 0.7, 0.9)]
    mixture = fit_mixture(np.vstack(clusters))
    order = mixture.means[:, 0].argsort()
    np.testing.assert_allclose(mixture.weights, 0.2)
    for k, cluster in zip(order, clusters, strict=True):
        np.testing.assert_allclose(mixture.means[k], cluster.mean(0))
        expected = np.cov(cluster.T, bias=True) + module.MIN_VARIANCE * np.eye(3)
        np.testing.assert_allclose(mixture.covariances[k], expected)


@pytest.mark.parametrize("count", [1, 2, 7])
def test_few_marks_make_a_mixture(count):
    mixture = fit_mixture(np.full((count, 3), 0.5))
    assert len(mixture.weights) == 1 and np.isfinite(np.linalg.inv(mixture.covariances)).all()


def test_evidence_is_the_ratio_to_the_best_other_label():
    rng = np.random.default_rng(0)
    densities = rng.normal(size=(4, 5, 6)).astype(np.float32)
    marks = rng.choice([-1, -1, -1, 0, 1, 2, 3], (5, 6))
    found = label_evidence(torch.tensor(densities), marks, 2.0).numpy()
    for k in range(4):
        for i in range(5):
            for j in range(6):
                others = max(densities[m, i, j] for m in range(4) if m != k)
                expected = densities[k, i, j] - others
                if marks[i, j] >= 0:
                    expected = 9.0 if marks[i, j] == k else -9.0
                assert found[k, i, j] == pytest.approx(expected, abs=1e-6)


def test_densities_do_not_depend_on_strips(monkeypatch):
    image, truth = regions()
    marks = Marks(dots(truth).astype(np.int16) - 1, COLORS)
    whole = color_densities(image, marks)
    monkeypatch.setattr(module, "DENSITY_STRIP", 100)
    torch.testing.assert_close(color_densities(image, marks), whole, atol=1e-4, rtol=0)


def test_capacities_fall_by_the_mean_difference_of_neighbors():
    image = np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    x = image / 255.0
    pairs = [((i, j), (i + a, j + b)) for i in range(5) for j in range(7) for a, b in ((0, 1), (1, 0))]
    pairs = [(u, v) for u, v in pairs if v[0] < 5 and v[1] < 7]
    squares = {pair: ((x[pair[0]] - x[pair[1]]) ** 2).sum() for pair in pairs}
    mean = np.mean(list(squares.values()))
    w = neighbor_capacities(image, 3.0)[0]
    for (u, v), square in squares.items():
        forward, backward = (0, 1) if u[0] == v[0] else (2, 3)
        assert w[(forward, *u)] == pytest.approx(3 * np.exp(-square / (2 * mean)), rel=1e-5)
        assert w[(backward, *v)] == w[(forward, *u)]


# -------------------------------------------------------------------------------------------------------- photographs


def composite(inside, outside, size=256):
    """One photograph inside a wavy disc on another one, with the truth, blurred as by a lens."""
    y, x = np.mgrid[:size, :size] - size / 2
    truth = np.hypot(x / 1.3, y) < size * (0.28 + 0.04 * np.sin(5 * np.arctan2(y, x)))
    a, b = (transform.resize(photo[:400, :400], (size, size), anti_aliasing=True) for photo in (inside, outside))
    image = ndimage.gaussian_filter(np.where(truth[..., None], a, b), (0.7, 0.7, 0))
    return (255 * image).astype(np.uint8), truth


def strokes(truth):
    """A cross inside the object, and a frame near the border of the image."""
    marks = np.zeros(truth.shape, dtype=int)
    core, middle = ndimage.binary_erosion(truth, iterations=6), len(truth) // 2
    marks[middle - 2 : middle + 2][core[middle - 2 : middle + 2]] = 2
    marks[:, middle - 2 : middle + 2][core[:, middle - 2 : middle + 2]] = 2
    marks[8:12, 8:-8] = marks[-12:-8, 8:-8] = marks[8:-8, 8:12] = marks[8:-8, -12:-8] = 1
    return marks


PAIRS = {
    "cat on coffee": lambda: (data.chelsea()[:300, 50:350], data.coffee()),
    "rocket on cat": lambda: (data.rocket(), data.chelsea()[:300, :300]),
    "astronaut on grass": lambda: (data.astronaut(), np.dstack([data.grass()] * 3)),
}


@pytest.mark.parametrize("name", PAIRS)
def test_photographs_with_known_truth(name):
    """The truth is known because the image is put together. Of the three, 0.95 is the lowest; an ellipse around the
    strokes has 0.79, colors alone have 0.86 for the cat."""
    image, truth = composite(*PAIRS[name]())
    scribbles = strokes(truth)
    labels = segment(image, scribbles).labels
    assert iou(labels == 1, truth) > 0.94
    assert iou(labels == 1, truth) > iou(segment(image, scribbles, capacity=0.0).labels == 1, truth)
    swapped = np.where(scribbles > 0, 3 - scribbles, 0)
    np.testing.assert_array_equal(segment(image, swapped).labels, 1 - labels)


def test_a_photograph_follows_its_marks():
    """The cup of coffee, then its saucer's surroundings: marks in opposite places give opposite labels."""
    photo = data.coffee()[::2, ::2]
    marks = np.zeros(photo.shape[:2], int)
    marks[60:120, 120:150], marks[5:15, 10:290] = 1, 2
    found = segment(photo, marks)
    opposite = segment(photo, np.where(marks > 0, 3 - marks, 0))
    np.testing.assert_array_equal(found.labels, 1 - opposite.labels)
    assert 0.05 < (found.labels == 0).mean() < 0.7


# -------------------------------------------------------------------------------------------------------------- files


def save_scribbles(path, marks, mode="RGBA"):
    """Write marks (H, W), 0 unmarked, in COLORS."""
    colors = np.vstack([np.zeros((1, 3), np.uint8), COLORS])[marks]
    if mode == "RGBA":
        colors = np.dstack([colors, np.uint8(255) * (marks > 0)])
    image = Image.fromarray(colors.astype(np.uint8))
    (image.quantize(8) if mode == "P" else image).save(path)


@pytest.fixture
def files(tmp_path):
    image, truth = regions()
    Image.fromarray(image).save(tmp_path / "photo.png")
    save_scribbles(tmp_path / "marks.png", dots(truth))
    return tmp_path


def read(path):
    return np.asarray(Image.open(path))


@pytest.mark.parametrize("mode", ["RGBA", "RGB", "P"])
def test_scribbles_of_all_modes_are_the_same(tmp_path, mode):
    _, truth = regions()
    save_scribbles(tmp_path / "marks.png", dots(truth), mode)
    marks = read_scribbles(tmp_path / "marks.png", (80, 60))
    np.testing.assert_array_equal(marks.colors, COLORS[[1, 0, 2]])  # in ascending order
    expected = np.array([-1, 1, 0, 2])[dots(truth)]
    np.testing.assert_array_equal(marks.labels, expected)
    np.testing.assert_array_equal(read_scribbles(Image.open(tmp_path / "marks.png"), (80, 60)).labels, expected)


def test_gray_scribbles(tmp_path):
    marks = np.zeros((4, 5), np.uint8)
    marks[0, 0], marks[3, 4] = 255, 7
    Image.fromarray(marks).save(tmp_path / "marks.png")
    found = read_scribbles(tmp_path / "marks.png", (5, 4))
    assert found.labels[0, 0] == 1 and found.labels[3, 4] == 0 and (found.labels == -1).sum() == 18
    np.testing.assert_array_equal(found.colors, [(7, 7, 7), (255, 255, 255)])
    np.testing.assert_array_equal(read_scribbles(torch.tensor(marks), (5, 4)).labels, found.labels)


def test_scribbles_are_turned_upright_as_photographs_are(tmp_path):
    marks = Image.fromarray(np.array([[10, 0, 0], [0, 0, 20]], dtype=np.uint8))
    exif = Image.Exif()
    exif[0x0112] = 6  # orientation: a quarter turn
    marks.save(tmp_path / "marks.png", exif=exif)
    found = read_scribbles(tmp_path / "marks.png", (2, 3))
    np.testing.assert_array_equal(found.labels, np.rot90([[0, -1, -1], [-1, -1, 1]], -1))


def test_the_command_writes_what_python_returns(files, monkeypatch, capsys):
    words = ["segment", str(files / "photo.png"), "--scribbles", str(files / "marks.png"), "-o", str(files / "out")]
    monkeypatch.setattr(sys, "argv", ["cutslots", *words])
    cli.main()
    assert "3 labels of 80x60 pixels" in capsys.readouterr().out
    found, out = segment(files / "photo.png", files / "marks.png"), files / "out"
    assert isinstance(found, Segmentation)
    np.testing.assert_array_equal(read(out / "labels.png"), found.labels + 1)
    np.testing.assert_array_equal(np.asarray(Image.open(out / "labels.png").convert("RGB")), found.colors[found.labels])
    np.testing.assert_array_equal(read(out / "overlay.png"), np.asarray(found.overlay()))
    for k in range(3):
        np.testing.assert_allclose(read(out / f"alpha_{k + 1:02d}.png") / 255, found.alpha[k], atol=0.5 / 255 + 1e-6)
    result = json.loads((out / "result.json").read_text())
    assert [row["color"] for row in result["labels"]] == COLORS[[1, 0, 2]].tolist()
    assert [row["area"] for row in result["labels"]] == np.bincount(found.labels.ravel()).tolist()
    assert 0 <= result["gap"] <= module.TOLERANCE and result["iterations"] >= 0
    alphas = {f"alpha_{k:02d}.png" for k in (1, 2, 3)}
    names = {"labels.png", "overlay.png", "result.json", "request.json", ".lock"}
    assert {path.name for path in out.iterdir()} == names | alphas


def test_labels_are_scribbles_themselves(files):
    segment_file(files / "photo.png", files / "marks.png", files / "out")
    again = segment(files / "photo.png", files / "out" / "labels.png")
    np.testing.assert_array_equal(again.labels + 1, read(files / "out" / "labels.png"))


def test_other_scribbles_replace_only_if_asked(files):
    out = files / "out"
    segment_file(files / "photo.png", files / "marks.png", out)
    _, truth = regions()
    save_scribbles(files / "two.png", np.minimum(dots(truth), 2))
    with pytest.raises(ValueError, match=r"holds another segmentation \(differing in scribbles\)"):
        segment_file(files / "photo.png", files / "two.png", out)
    assert (out / "alpha_03.png").exists()
    segment_file(files / "photo.png", files / "two.png", out, overwrite=True)
    assert not (out / "alpha_03.png").exists() and (out / "alpha_02.png").exists()
    save_scribbles(files / "two.png", dots(truth))  # the same command, after more marks
    segment_file(files / "photo.png", files / "two.png", out)
    assert (out / "alpha_03.png").exists()


def test_a_folder_of_something_else_is_refused(files):
    (files / "other").mkdir()
    (files / "other" / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="is not empty and holds no segmentation"):
        segment_file(files / "photo.png", files / "marks.png", files / "other")


def test_nothing_is_written_for_bad_input(files):
    with pytest.raises(ValueError, match="there is no"):
        segment_file(files / "photo.png", files / "missing.png", files / "out")
    assert not (files / "out").exists()


def test_a_cutout_has_the_soft_mask_as_transparency(files):
    found = segment(files / "photo.png", files / "marks.png")
    cutout = np.asarray(found.cutout(1))
    np.testing.assert_array_equal(cutout[..., :3], np.asarray(found.image))
    np.testing.assert_allclose(cutout[..., 3] / 255, found.alpha[1], atol=0.5 / 255 + 1e-6)


def test_the_command_has_the_defaults_of_python():
    defaults = dict(zip(cli.segment.__code__.co_varnames[3:], cli.segment.__defaults__, strict=False))
    assert (defaults["capacity"], defaults["tolerance"]) == (module.CAPACITY, module.TOLERANCE)


# ---------------------------------------------------------------------------------------------------------- bad input


def bad_scribbles():
    marks = np.zeros((60, 80, 3), np.uint8)
    marks[5, 5:9] = 255, 0, 0
    yield "one label", marks, "one label; expected marks in at least two colors"
    yield "no marks", np.zeros_like(marks), "no marks; expected marks in at least two colors"
    yield "other size", marks[:50], "80x50 pixels; expected 80x60, the size of the image"
    yield "a photograph", data.coffee()[:60, :80], r"colors; expected one for each label, at most 20: draw on a black"
    soft = np.dstack([marks, np.full((60, 80), 128, np.uint8)])
    yield "half-transparent", soft, "half-transparent pixels; expected strokes without soft edges"
    both = np.dstack([marks, np.full((60, 80), 255, np.uint8)])
    both[0, 0] = 0
    yield "black and transparent", both, "has black and transparent pixels; expected one of them"


@pytest.mark.parametrize(("pixels", "message"), [pytest.param(p, m, id=name) for name, p, m in bad_scribbles()])
def test_bad_scribbles_are_one_sentence(files, pixels, message):
    Image.fromarray(pixels).save(files / "bad.png")
    with pytest.raises(ValueError, match=message) as error:
        segment(files / "photo.png", files / "bad.png")
    assert "bad.png" in str(error.value) and "\n" not in str(error.value)
    with pytest.raises(ValueError, match=message):
        segment(files / "photo.png", Image.open(files / "bad.png"))


def test_bad_arguments_are_one_sentence(files):
    image, truth = regions()
    for capacity in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=r"capacity is .*; expected a number of at least 0"):
            segment(image, dots(truth), capacity)
    for tolerance in (0.0, 1.0, float("nan")):
        with pytest.raises(ValueError, match=r"tolerance is .*; expected a number between 0 and 1"):
            segment(image, dots(truth), tolerance=tolerance)
    with pytest.raises(ValueError, match=r"scribbles are float64 of shape \(60, 80\); expected integers"):
        segment(image, truth * 1.0)
    with pytest.raises(ValueError, match=r"scribbles are int64 of shape \(60, 80, 1\); expected integers"):
        segment(image, truth[..., None])
    with pytest.raises(ValueError, match=r"scribbles have the value -1; expected 0"):
        segment(image, truth - 1)
    with pytest.raises(TypeError, match=r"scribbles are a list; expected a path"):
        segment(image, [[0, 1]])
    with pytest.raises(ValueError, match="there is no"):
        segment(files / "missing.jpg", files / "marks.png")
    (files / "text.png").write_text("no image")
    with pytest.raises(ValueError, match="cannot be read as an image"):
        segment(image, files / "text.png")
    deep = Image.fromarray(np.zeros((60, 80), np.uint16))
    deep.save(files / "deep.png")
    with pytest.raises(ValueError, match=r"deep.png cannot be read as an image: it has mode I;16; expected RGB"):
        segment(image, files / "deep.png")


def test_a_gap_that_is_not_reached_is_told(monkeypatch):
    monkeypatch.setattr(module, "MAX_ITERATIONS", 2)
    image, truth = regions(noise=90)
    with pytest.warns(Notice, match=r"the cut has a duality gap of .* after 2 iterations; expected 0.001"):
        segment(image, dots(truth))


def test_too_many_pixels_are_refused(monkeypatch):
    monkeypatch.setattr(module, "MAX_CUT_PIXELS", 10_000)
    image, truth = regions()
    with pytest.raises(ValueError, match=r"image has 4,800 pixels; expected at most 3,333 for 3 cuts"):
        segment(image, dots(truth))
    segment(image, np.minimum(dots(truth), 2))  # two labels are one cut


def test_the_command_ends_with_one_sentence(files):
    words = ["segment", str(files / "photo.png"), "--scribbles", str(files / "missing.png"), "-o", str(files / "out")]
    command = Command(words, files / "log", errors=files / "errors")
    assert command.end() == 1 and command.said() == ""
    assert (files / "errors").read_text() == f"cutslots: there is no {files / 'missing.png'}\n"
    assert cutslots.segment is segment
