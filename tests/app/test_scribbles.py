"""Strokes that the browser sends: checked, and drawn as marks at any resolution."""

import numpy as np
import pytest

from cutslots.app.scribbles import COLORS, MAX_POINTS, MAX_STROKES, draw_strokes, read_strokes

SIZE = (60, 40)


def marks(strokes, size=SIZE):
    return draw_strokes(read_strokes(strokes, SIZE), SIZE, size)


def test_a_stroke_marks_the_pixels_near_its_line():
    drawn = marks([[2, 6, 10, 20, 50, 20]])
    y, x = np.mgrid[:40, :60] + 0.5  # centers of pixels
    distance = np.hypot(x - np.clip(x, 10, 50), y - 20)
    assert (drawn[distance < 2] == 2).all() and not drawn[distance > 4.2].any()


@pytest.mark.parametrize("scale", [2, 5])
def test_strokes_mark_the_same_places_at_every_resolution(scale):
    canvas = (300, 200)
    strokes = read_strokes([[1, 24, 50, 50, 250, 60, 150, 150], [3, 30, 200, 175]], canvas)
    small, large = (draw_strokes(strokes, canvas, (300 * s, 200 * s)) for s in (1, scale))
    for label in (1, 3):
        assert (large == label).mean() == pytest.approx((small == label).mean(), rel=0.15)  # to a pixel
    assert (large[scale // 2 :: scale, scale // 2 :: scale] == small).mean() > 0.98


def test_thin_strokes_mark_a_pixel_of_a_small_image():
    assert marks([[1, 1, 3, 3], [2, 1, 50, 30]], (6, 4))[[0, 3], [0, 5]].tolist() == [1, 2]


def test_later_strokes_win_and_label_0_erases():
    drawn = marks([[1, 20, 30, 20], [2, 6, 30, 20], [0, 2, 30, 20]])
    assert drawn[20, 30] == 0 and drawn[20, 32] == 2 and drawn[20, 37] == 1


@pytest.mark.parametrize(
    "strokes, message",
    [
        (None, "scribbles are a NoneType; expected a list"),
        ("0102", "scribbles are a str; expected a list"),
        ([3], "scribbles are a list; expected a list of strokes"),
        ([[1, 5, 10, 10]] * (MAX_STROKES + 1), "1,001 strokes; expected at most 1,000"),
        ([[1, 5] + [1] * (2 * MAX_POINTS)], "20,001 points; expected at most 20,000"),
        ([[1, 5, 10]], "a stroke has 3 numbers"),
        ([[1, 5]], "a stroke has 2 numbers"),
        ([[]], "a stroke has 0 numbers"),
        ([[1, 5, 10, "x"]], "no number below 1e9"),
        ([[1, 5, 10, None]], "no number below 1e9"),
        ([[True, 5, 10, 10]], "no number below 1e9"),
        ([[1, 5, float("nan"), 10]], "no number below 1e9"),
        ([[1, float("inf"), 10, 10]], "no number below 1e9"),
        ([[1, 5, 10**400, 10]], "no number below 1e9"),
        ([[len(COLORS) + 1, 5, 10, 10]], "label 7; expected 0 to 6"),
        ([[-1, 5, 10, 10]], "label -1"),
        ([[1.5, 5, 10, 10]], r"label 1\.5"),
        ([[1, 0.5, 10, 10]], r"0\.5 pixels wide; expected 1 to 200"),
        ([[1, 1e8, 10, 10]], "pixels wide"),
        ([[1, 5, 61, 10]], "outside of the image of 60x40"),
        ([[1, 5, 10, -1]], "outside of the image of 60x40"),
    ],
)
def test_what_no_visitor_can_draw_is_one_sentence(strokes, message):
    with pytest.raises(ValueError, match=message) as raised:
        read_strokes(strokes, SIZE)
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 150
