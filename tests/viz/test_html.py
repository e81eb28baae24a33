"""Building blocks of report pages, their style and their accessibility."""

import re

import numpy as np
import pytest

from cutslots.viz.curves import training_curves
from cutslots.viz.html import (
    SCRIPT,
    STYLE,
    definitions,
    figure,
    frame_strip,
    key_figures,
    page,
    player,
    png_image,
    preformatted,
    scroll_box,
    section,
)
from tests.viz.html_page import HTMLPage, assert_self_contained

NASTY = '<script>alert("1")</script> & co'


def test_text_is_escaped(rng):
    image = png_image(rng.integers(0, 256, (2, 3, 3), dtype=np.uint8), NASTY)
    content = figure(image, NASTY) + scroll_box(NASTY, "") + player(NASTY, 2)
    content += key_figures({NASTY: NASTY}) + definitions({NASTY: NASTY}) + preformatted(NASTY)
    parsed = HTMLPage(section(NASTY, content, note=NASTY))
    assert "script" not in parsed.tags and parsed.text.count(NASTY) == 8
    labels = [value for attrs in parsed.attributes for name, value in attrs.items() if name in ("alt", "aria-label")]
    assert labels == [NASTY, NASTY, f"play {NASTY}", f"frame of {NASTY}"]


def test_page_is_one_file():
    text = page(NASTY, NASTY, section("heading", png_image(np.zeros((2, 2, 3), np.uint8), "black"))).decode()
    parsed = HTMLPage(text)
    assert_self_contained(parsed, text)
    assert parsed.tags.count("title") == parsed.tags.count("main") == parsed.tags.count("h1") == 1
    assert STYLE in text and SCRIPT not in text, "only players need the script"
    assert SCRIPT in page("title", "summary", player("video 1", 3)).decode()


@pytest.mark.parametrize("height, width", [(12, 12), (9, 16), (20, 7)])
def test_frame_strip_keeps_the_aspect_ratio(height, width, rng):
    frames = [rng.integers(0, 256, (height, width, 3), dtype=np.uint8) for _ in range(4)]
    parsed = HTMLPage(frame_strip(frames, "video 1, image"))
    (image,) = parsed.images
    assert image.shape == (height, 4 * width, 3)
    (screen,) = parsed.all("div", **{"class": "screen"})
    assert screen["style"] == f"aspect-ratio: {width} / {height}"


def test_style_does_not_assume_square_images():
    assert "aspect-ratio" not in STYLE


def test_player_has_a_slider_and_a_button():
    parsed = HTMLPage(player("video 1", 6, "<figure></figure>"))
    (slider,) = parsed.all("input", type="range")
    assert (slider["min"], slider["max"], slider["value"]) == ("0", "5", "0")
    assert slider["aria-label"] == "frame of video 1"
    (button,) = parsed.all("button")
    assert button["aria-label"] == "play video 1"
    (box,) = parsed.all("div", **{"class": "player"})
    assert box["style"] == "--n:6"


def test_focus_is_visible_and_long_names_wrap():
    assert re.search(r":focus-visible \{ outline: [2-9]px solid var\(--ink\)", STYLE) and "outline: none" not in STYLE
    assert ".scroll { overflow-x: auto; }" in STYLE
    assert "overflow-wrap: anywhere" in STYLE


def luminance(color):
    digits = color[1:] if len(color) == 7 else "".join(2 * c for c in color[1:])
    x = np.array(list(bytes.fromhex(digits))) / 255
    return np.where(x <= 0.04045, x / 12.92, ((x + 0.055) / 1.055) ** 2.4) @ [0.2126, 0.7152, 0.0722]


def test_text_has_contrast_in_light_and_dark_mode():
    """WCAG's contrast of at least 4.5 to 1, for all pairs of text and background colors."""
    assert set(re.findall(r"[ {]color: ([^;]*);", STYLE)) == {"var(--ink)", "var(--soft)"}
    backgrounds = set(re.findall(r"background: ([^;]*);", STYLE))
    assert backgrounds == {"var(--page)", "var(--card)", "#fff"}  # #fff is behind curves
    schemes = [dict(re.findall(r"--(\w+): (#\w+);", scheme)) for scheme in re.findall(r":root \{([^}]*)\}", STYLE)]
    assert len(schemes) == 2
    for scheme in schemes:
        for text in ("ink", "soft"):
            for background in ("page", "card"):
                low, high = sorted(luminance(scheme[name]) for name in (text, background))
                assert (high + 0.05) / (low + 0.05) >= 4.5, (text, background)


def test_curves_are_described_by_their_last_values():
    metrics = {"ari_fg": 0.5, "ari": 0.25, "miou": 0.125}
    history = [{"step": 20, "loss": 0.1}, {"step": 40, "loss": 0.05, "val": metrics}, {"step": 60, "loss": 0.04}]
    parsed = HTMLPage(training_curves(history))
    loss, curves = (attrs["alt"] for attrs in parsed.all("img"))
    assert loss.endswith(": 0.04 at step 60")
    assert curves.endswith(": ARI-FG 50.0, ARI 25.0, mIoU 12.5 at step 40")
    assert len(parsed.svgs) == 2


def test_curves_without_history():
    parsed = HTMLPage(training_curves([]))
    assert [attrs["alt"] for attrs in parsed.all("img")] == [
        "Curve of the reconstruction loss",
        "Curves of the validation metrics",
    ]
