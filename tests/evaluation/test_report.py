"""Report pages of evaluations and runs: they are parsed, and the images in them are decoded."""

import json
import re

import numpy as np
import pytest
from PIL import Image

from cutslots.evaluation.gallery import Example, Examples
from cutslots.evaluation.report import (
    STEP_IMAGES,
    example_sections,
    image_rows,
    training_sections,
    video_player,
    write_evaluation_report,
)
from cutslots.files import read_lines
from cutslots.training.report import write_training_page
from tests.evaluation.small_visualizations import PANELS, random_visualization, result
from tests.viz.html_page import HTMLPage, assert_self_contained

NASTY = '<script>alert("1")</script> & co'


@pytest.fixture
def visualization(rng):
    shown = random_visualization(rng)
    shown.truth[1] = 0  # the true masks of the second image are unknown
    return shown


@pytest.fixture
def run(tmp_path):
    """A run folder whose last line was being written when the run was killed."""
    run = tmp_path / "run"
    (run / STEP_IMAGES).mkdir(parents=True)
    metrics = {"ari_fg": 0.5, "ari": 0.25, "miou": 0.125}
    lines = [{"step": 20, "loss": 0.1}, {"step": 40, "loss": 0.05, "val": metrics}, {"step": 60, "loss": 0.04}]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (run / "metrics.jsonl").write_text(text + '{"step": 80, "lo')
    for i in range(9):
        Image.new("RGB", (7, 5), (i, i, i)).save(run / STEP_IMAGES / f"step_{100 * i:07d}.png")
    (run / "run.json").write_text(json.dumps({"data": f"</pre>{NASTY}"}))
    return run


def examples(visualization, *names):
    """Return the images of a visualization as the worst examples of a dataset."""
    images = [visualization.select([i]) for i in range(len(visualization.image))]
    return Examples([Example(f"{name} {i}", image) for name in names or ["image"] for i, image in enumerate(images)])


def video_examples(*videos, pair=None, first=()):
    named = [
        [Example(f"{name} {i}", video) for i, video in enumerate(each)]
        for name, each in (("worst", videos), ("first", first))
    ]
    return Examples(*named, pair)


def record(results, checkpoint="checkpoint", model=None):
    return {"checkpoint": checkpoint, "model": model or {}, "results": results}


def test_evaluation_page(tmp_path, visualization, run):
    path = tmp_path / "report.html"
    results = {"plain": result(20), NASTY: result(50)}
    shown = [each for name in results for each in example_sections(examples(visualization, NASTY), name)]
    write_evaluation_report(path, record(results, NASTY, {"size": NASTY}), shown, training_sections(run))
    page = HTMLPage(path.read_text())
    assert_self_contained(page, path.read_text())
    for tag in ("section", "div", "table", "figure", "pre"):
        assert tag in page.tags
    assert len(page.svgs) == 2
    assert page.text.count(NASTY) >= 5, "title, heading, key figures, table and checkpoint, as text"
    assert f"Worst images of {NASTY}" in page.text and f"{NASTY} 1" in page.text
    for text in ("20.0", "30.5", "59.0", "49.0", "95.4", "published on CLEVR"):
        assert text in page.text
    expected = [panel for _ in results for i in range(2) for panel in visualization.panels(i).values()]
    assert len(page.images) == len(expected) + 6, "six of the run's images, the first and the last among them"
    assert all(np.array_equal(a, b) for a, b in zip(page.images, expected, strict=False))
    assert page.images[len(expected)].max() == 0 and page.images[-1].min() == 8
    assert "step 0" in page.text and "step 800" in page.text


def test_evaluation_page_without_a_run(tmp_path, visualization):
    path = tmp_path / "report.html"
    results = {"plain": result(20) | {"refined_ari_fg": 0.87}}
    write_evaluation_report(
        path, record(results, model={"size": 64}), example_sections(examples(visualization), "plain")
    )
    page = HTMLPage(path.read_text())
    assert_self_contained(page, path.read_text())
    assert not page.svgs and "Model configuration" in page.text and '"size": 64' in page.text
    assert "87.0ARI-FG on plain, refined masks" in page.text, "the key figure is that of refined masks"


def test_training_page(tmp_path, visualization, run):
    path, figures = tmp_path / "report.html", {"steps": "60", NASTY: NASTY}
    write_training_page(path, f"tiny on {NASTY}", run, figures, {"plain": result(20)}, visualization, NASTY)
    page = HTMLPage(path.read_text())
    assert_self_contained(page, path.read_text())
    assert len(page.svgs) == 2 and len(page.images) == 9 + 8 + 6
    assert page.text.count(NASTY) >= 4
    assert f'{{"data": {json.dumps("</pre>" + NASTY)}}}' in page.text, "the configuration, as it was written"


@pytest.mark.parametrize("content", ["", '{"step": 20', '{"step": 20, "loss": 0.1}\n'])
def test_training_page_of_a_run_that_has_just_started(tmp_path, visualization, content):
    run, path = tmp_path / "run", tmp_path / "report.html"
    run.mkdir()
    (run / "metrics.jsonl").write_text(content)
    write_training_page(path, "tiny", run, {}, {}, visualization, "cpu")
    assert_self_contained(HTMLPage(path.read_text()), path.read_text())


def test_incomplete_last_line_is_ignored(run):
    assert [line["step"] for line in read_lines(run / "metrics.jsonl")] == [20, 40, 60]
    assert read_lines(run / "nowhere") == []


# ------------------------------------------------------------------------------------------------------- accessibility


@pytest.fixture(params=["training", "evaluation", "videos"])
def page(request, tmp_path, visualization, run):
    path, results = tmp_path / "report.html", {"plain": result(20)}
    if request.param == "training":
        write_training_page(path, "tiny", run, {"steps": "60"}, results, visualization, "cpu")
    else:
        video = visualization._replace(shared_labels=True)
        videos = video_examples(video, video, pair=visualization)
        shown = examples(visualization) if request.param == "evaluation" else videos
        write_evaluation_report(path, record(results), example_sections(shown, "plain"), training_sections(run))
    parsed = HTMLPage(path.read_text())
    assert_self_contained(parsed, path.read_text(), scripts=request.param == "videos")
    return parsed


def test_page_has_a_language_a_title_and_a_viewport(page):
    assert page.all("html") == [{"lang": "en"}] and page.tags.count("title") == 1 and page.tags.count("main") == 1
    assert {"name": "viewport", "content": "width=device-width, initial-scale=1"} in page.all("meta")


def test_headings_are_in_order(page):
    levels = [int(tag[1]) for tag in page.tags if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1 and set(levels[1:]) == {2}


def test_every_image_has_an_alternative_text(page):
    assert all(attrs["alt"].strip() for attrs in page.all("img"))
    assert len({attrs["aria-label"] for attrs in page.all("div", role="group")}) == 2, "a group for each image"


def test_controls_work_with_the_keyboard(page):
    """Controls are native elements. Boxes that scroll can be focused and have a name."""
    for tag, attrs in zip(page.tags, page.attributes, strict=True):
        assert not any(name.startswith("on") for name in attrs) and attrs.get("role") not in ("button", "slider")
        scrolls = attrs.get("class") == "scroll"
        assert attrs.get("tabindex") == ("0" if scrolls else None), tag
        assert not scrolls or (attrs["role"] == "region" and attrs["aria-label"])
    assert all(attrs["aria-label"] for attrs in page.all("button", "input"))


# -------------------------------------------------------------------------------------------------- images and videos


def test_rows_show_images_that_are_not_square(rng):
    shown = random_visualization(rng, 1, height=6, width=10)
    page = HTMLPage(image_rows(shown))
    expected = list(shown.panels(0).values())
    assert len(page.images) == 9 and all(np.array_equal(a, b) for a, b in zip(page.images, expected, strict=True))


@pytest.mark.parametrize("height, width", [(12, 12), (8, 14)])
def test_player_shows_all_frames_of_each_panel(rng, height, width):
    video = random_visualization(rng, 6, height, width, shared_labels=True)
    page = HTMLPage(video_player(video, "video 1"))
    assert [attrs["alt"] for attrs in page.all("img")] == [f"video 1, {caption}" for caption in PANELS]
    for strip, caption in zip(page.images, PANELS, strict=True):
        expected = np.concatenate([video.panels(t)[caption] for t in range(6)], 1)
        assert strip.shape == expected.shape == (height, 6 * width, 3)
        assert abs(strip.mean((0, 1)) - expected.mean((0, 1))).max() < 5, "up to the loss of JPEG"
    assert all(caption in page.text for caption in PANELS)


def test_player_without_ground_truth(rng):
    video = random_visualization(rng, 6, shared_labels=True)
    page = HTMLPage(video_player(video._replace(truth=np.zeros_like(video.truth)), "video 2"))
    expected = [f"video 2, {caption}" for caption in PANELS if caption != "ground truth"]
    assert [attrs["alt"] for attrs in page.all("img")] == expected


@pytest.mark.parametrize("empty", [0, 3])
def test_player_of_a_video_with_an_empty_frame_shows_the_ground_truth(rng, empty):
    video = random_visualization(rng, 6, shared_labels=True)
    video.truth[empty] = 0
    page = HTMLPage(video_player(video, "video 1"))
    assert [attrs["alt"] for attrs in page.all("img")] == [f"video 1, {caption}" for caption in PANELS]


def test_sections_of_videos_and_of_a_pair(rng):
    videos = [random_visualization(rng, length, shared_labels=True) for length in (6, 10)]
    pair = random_visualization(rng, 2, shared_labels=True)
    shown = [video_examples(*videos), video_examples(*videos, pair=pair)]
    without, both = (HTMLPage("".join(example_sections(each, "moving:2-3"))) for each in shown)
    for page in (without, both):
        assert [attrs["max"] for attrs in page.all("input")] == ["5", "9"]
        assert "Worst videos of moving:2-3" in page.text and "Slots over time" in page.text
        assert "worst 0" in page.text and "First videos" not in page.text
        for row in ("image", "reconstruction", "slot 1", "slot 2", "slot 3"):
            assert len(page.all("img", alt=row)) == 6 + (2 if page is both else 0), "all frames of a short video"
    assert "Frames 5 and 20" not in without.text and "Frames 5 and 20 as a matched pair" in both.text
    assert len(both.all("img")) == len(without.all("img")) + 2 * 9


def test_worst_videos_come_before_the_first_ones(rng):
    videos = [random_visualization(rng, length, shared_labels=True) for length in (6, 10)]
    page = HTMLPage("".join(example_sections(video_examples(videos[0], first=videos[1:]), "moving")))
    assert [attrs["max"] for attrs in page.all("input")] == ["5", "9"]
    assert page.text.index("Worst videos of moving") < page.text.index("First videos of moving")


def test_worst_images_come_before_the_first_ones(rng):
    worst, first = random_visualization(rng, 2), random_visualization(rng, 1)
    shown = examples(worst)._replace(first=[Example("first 0", first)])
    page = HTMLPage("".join(example_sections(shown, "plain")))
    assert [attrs["aria-label"] for attrs in page.all("div", role="group")] == ["image 0", "image 1", "first 0"]
    panels = [p for each, i in ((worst, 0), (worst, 1), (first, 0)) for p in each.panels(i).values()]
    assert all(np.array_equal(a, b) for a, b in zip(page.images, panels, strict=True))
    assert page.text.index("Worst images of plain") < page.text.index("First images of plain")


def test_dataset_without_images_has_no_sections():
    assert example_sections(Examples([]), "plain") == []


def test_files_of_a_run_that_are_not_text(tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(b"\xff\n")
    (tmp_path / "run.json").write_bytes(b'{"seed": 1, "out": "\xff"}')
    (configuration,) = training_sections(tmp_path)
    assert "Run configuration" in configuration and "\ufffd" in configuration
