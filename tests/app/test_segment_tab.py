"""The functions behind the second tab, without a browser: what is shown and downloaded is what `segment` computes."""

import base64
import io
import re

import numpy as np
import pytest
from PIL import Image

from cutslots import segment
from cutslots.app import segment_tab as tab
from cutslots.app.events import import_gradio
from cutslots.app.scribbles import COLORS
from cutslots.inference.segmentation import CAPACITY
from cutslots.scenes import Scenes

STROKES = [[1, 12, 30, 40, 60, 90], [3, 12, 450, 60, 470, 300]]


@pytest.fixture(scope="module")
def photograph():
    """An image of 900 by 600 with two noisy halves; its view has 512 by 341 pixels."""
    pixels = np.random.default_rng(0).integers(0, 40, (600, 900, 3), dtype=np.uint8)
    pixels[:, 420:] += np.uint8(180)
    return tab.new_photograph("halves", Image.fromarray(pixels), "token")


@pytest.fixture(scope="module")
def request_(photograph):
    return read(photograph, STROKES)


def read(photograph, strokes, chosen="blue", capacity=CAPACITY):
    return tab.read_request(photograph, tab.to_canvas(photograph, strokes), chosen, capacity)


def images(html):
    """The decoded images in HTML."""
    urls = re.findall(r'src="data:image/\w+;base64,([^"]+)"', html)
    return [Image.open(io.BytesIO(base64.b64decode(url))) for url in urls]


def test_view_is_small_and_downloads_are_not(photograph, request_):
    assert photograph.view.size == (512, 341) and photograph.image.size == (900, 600)
    shown = images(tab.segmentation_html(request_))
    assert [each.size for each in shown] == [(512, 341)] * 4
    labels = Image.open(io.BytesIO(tab.labels_png(request_)))
    assert labels.size == (900, 600) and labels.mode == "P"
    assert labels.getpalette()[3:9] == [*COLORS["blue"], *COLORS["green"]]
    assert (np.asarray(labels) == np.where(np.arange(900) < 420, 1, 2)).all()


def test_downloads_are_what_segment_computes(photograph, request_):
    marks = tab.marks_for(request_, photograph.image)
    assert marks.shape == (600, 900) and set(np.unique(marks)) == {0, 1, 3}
    found = segment(photograph.image, marks)
    labels = np.asarray(Image.open(io.BytesIO(tab.labels_png(request_))))
    assert (labels == found.labels + 1).all()
    for chosen, row in (("blue", 0), ("green", 1), ("pink", 0)):  # pink has no marks
        cutout = Image.open(io.BytesIO(tab.cutout_png(read(photograph, STROKES, chosen))))
        assert cutout.mode == "RGBA" and (np.asarray(cutout) == np.asarray(found.cutout(row))).all()


def test_soft_mask_and_outlines_are_those_of_the_view(photograph, request_):
    found = segment(photograph.view, tab.marks_for(request_, photograph.view))
    _, alpha, _, outlines = images(tab.segmentation_html(request_))
    assert abs(np.asarray(alpha).astype(int) - np.asarray(found.cutout(0).getchannel("A"))).mean() < 2  # JPEG
    pixels = np.asarray(outlines.convert("RGBA"))
    line = pixels[..., 3] == 255
    column = int(found.labels[100].argmax())  # where the second label starts
    assert line[:, column].all() and line.sum() == len(line)
    assert (pixels[line] == 255).all() and not pixels[:, : column - 2, 3].any()


def test_status_names_labels_and_sizes(request_):
    html = tab.segmentation_html(request_)
    assert re.search(r"blue 46\.\d%, green 53\.\d%\. [\d.]+ s at 512x341 pixels; downloads have 900x600\.", html)
    assert len(re.findall(r'alt="[^"]{5,}"', html)) == 4


@pytest.mark.parametrize("strokes", [[], STROKES[:1], [*STROKES, [0, 60, 450, 60, 470, 300]]])
def test_fewer_than_two_labels_are_asked_for(photograph, strokes):
    request = read(photograph, strokes)
    assert "Mark the object with one brush" in tab.segmentation_html(request)
    for download in (tab.labels_png, tab.cutout_png):
        with pytest.raises(ValueError, match=r"marks of [01] labels; expected at least 2"):
            download(request)


@pytest.mark.parametrize(
    "value, chosen, capacity, message",
    [
        ({}, "red", 40, "label is 'red'; expected one of blue, orange"),
        ({}, None, 40, "label is None"),
        ({}, "blue", None, "capacity is None; expected 0 to 200"),
        ({}, "blue", float("nan"), "capacity is nan"),
        ({}, "blue", -1, "capacity is -1"),
        ({}, "blue", True, "capacity is True"),
        ({"strokes": "1" * 100}, "blue", 40, "scribbles are a str"),
        ({"strokes": [[1, 5, 513, 20]]}, "blue", 40, "outside of the image of 512x341 pixels"),
        ({"strokes": [[1, 5] + [20] * 100_000]}, "blue", 40, "50,001 points; expected at most 20,000"),
    ],
)
def test_invalid_requests_are_one_sentence(photograph, value, chosen, capacity, message):
    with pytest.raises(ValueError, match=message):
        tab.read_request(photograph, tab.to_canvas(photograph, STROKES) | value, chosen, capacity)


def test_canvas_must_be_an_object(photograph):
    for value in (None, "text", [1]):
        with pytest.raises(ValueError, match="expected its strokes: reload the page"):
            tab.read_request(photograph, value, "blue", 40)


def test_strokes_on_a_replaced_photograph_change_nothing(gradio, photograph):
    value = tab.to_canvas(photograph, STROKES)
    newer = photograph._replace(token="newer")
    assert tab.read_request(newer, value, "blue", 40) is None
    with pytest.raises(ValueError, match="no longer stores the photograph"):
        tab.read_request(None, value, "blue", 40)
    gr = import_gradio()
    with gr.Blocks():
        handlers = tab.SegmentTab(gr)
        assert handlers.show_all(newer, value, "blue", 40, True, 0.5, 0.5, 2, 0.5) == [gr.skip()] * 3
        with pytest.raises(ValueError, match="replaced meanwhile"):
            handlers.download_labels(newer, value, "blue", 40)


def test_many_labels_of_a_large_photograph_reduce_the_download(photograph):
    large = photograph._replace(image=Image.new("RGB", (4000, 3000)))
    assert tab.download_size(read(large, []), labels=2) == (4000, 3000)
    width, height = tab.download_size(read(large, []), labels=3)
    assert 0.97 * tab.MAX_CUT_PIXELS < 3 * width * height <= tab.MAX_CUT_PIXELS
    assert width / height == pytest.approx(4 / 3, rel=1e-3)


def test_example_segments_its_objects():
    photograph, strokes = tab.example()
    mask = Scenes("textured", "test", 384, seed=35, count=1, num_objects=(4, 4))[0].mask.numpy()
    objects = np.argsort(-np.bincount(mask.ravel())[1:])[:2] + 1
    request = tab.read_request(None, tab.to_canvas(photograph, strokes), "blue", CAPACITY)
    marks = tab.marks_for(request, photograph.image)
    assert [set(mask[marks == label]) for label in (1, 2, 3)] == [{objects[0]}, {objects[1]}, {0}]
    found, _ = tab.segment_photograph(request)
    largest = found.labels == 0
    assert (largest & (mask == objects[0])).sum() / (largest | (mask == objects[0])).sum() > 0.9


def test_comparison_is_of_the_chosen_label_against_the_rest(photograph):
    values = (0.5, 0.5, 2, 0.5)
    for chosen, share in (("blue", 46), ("green", 53)):
        html = tab.comparison_html(read(photograph, STROKES, chosen), *values)
        assert len(images(html)) == 5 and re.search(rf"<b>{share}\.\d%</b> of the pixels are object in the exact", html)
    assert "Scribble on the object" in tab.comparison_html(read(photograph, STROKES, "pink"), *values)
