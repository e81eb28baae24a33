"""Building blocks of HTML reports: pages, sections, tables in scroll boxes, images.

A page is one file that loads nothing else: style, script and images are inlined. The style is in `report.css`, the
script of the video player in `report.js`. Functions return HTML as text and escape the text that they are given.
"""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Sequence
from importlib import resources
from typing import Any

import numpy as np
from PIL import Image

from cutslots.viz.images import encode_png


def _read_resource(name: str) -> str:
    return resources.files("cutslots.viz").joinpath(name).read_text(encoding="utf-8")


STYLE = _read_resource("report.css")
SCRIPT = _read_resource("report.js")


def page(title: str, summary: str, *sections: str) -> bytes:
    """Return a complete page: a title, a summary paragraph and sections of HTML."""
    script = f"<script>{SCRIPT}</script>" if any('class="player"' in content for content in sections) else ""
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{STYLE}</style></head>'
        f"<body><main><h1>{html.escape(title)}</h1><p>{html.escape(summary)}</p>{''.join(sections)}</main>"
        f"{script}</body></html>"
    ).encode()


def section(heading: str, *content: str, note: str = "") -> str:
    """Return a section: a heading, a note as text, and content as HTML."""
    paragraph = f"<p>{html.escape(note)}</p>" if note else ""
    return f"<section><h2>{html.escape(heading)}</h2>{paragraph}{''.join(content)}</section>"


def key_figures(values: dict[str, str]) -> str:
    """Return cards with one large value each, from values by their labels."""
    items = "".join(f"<li><b>{html.escape(v)}</b><span>{html.escape(k)}</span></li>" for k, v in values.items())
    return f'<ul class="figures">{items}</ul>'


def definitions(values: dict[str, str]) -> str:
    """Return a list of terms and their definitions."""
    items = "".join(f"<dt>{html.escape(k)}</dt><dd>{html.escape(v)}</dd>" for k, v in values.items())
    return f"<dl>{items}</dl>"


def preformatted(text: str) -> str:
    """Return text in a fixed-width box."""
    return f"<pre>{html.escape(text)}</pre>"


def scroll_box(label: str, content: str) -> str:
    """Return a box that scrolls sideways, also with the keyboard, so that the page does not."""
    return f'<div class="scroll" tabindex="0" role="region" aria-label="{html.escape(label)}">{content}</div>'


def figure(content: str, caption: str, wide: bool = False) -> str:
    """Return content with a caption below it."""
    attribute = ' class="wide"' if wide else ""
    return f"<figure{attribute}>{content}<figcaption>{html.escape(caption)}</figcaption></figure>"


def png_image(image: Image.Image | np.ndarray, alt: str) -> str:
    """Return an inline PNG of an image, or of an array (H, W, 3) uint8."""
    return _inline_image("png", encode_png(image), alt)


def svg_image(plot: Any, alt: str) -> str:
    """Return an inline SVG of a matplotlib figure. As an image it keeps its ids apart from those of the page."""
    data = io.BytesIO()
    plot.savefig(data, format="svg", metadata={"Date": None})
    return _inline_image("svg+xml", data.getvalue(), alt)


def frame_strip(frames: Sequence[np.ndarray], alt: str) -> str:
    """Return a box that shows one of T frames (H, W, 3) uint8, inlined side by side as one JPEG.

    The CSS variables --n, the number of frames, and --f, the frame to show, are set on the player around it.
    """
    data = io.BytesIO()
    Image.fromarray(np.concatenate(frames, 1)).save(data, "JPEG", quality=90)
    height, width = frames[0].shape[:2]
    strip = _inline_image("jpeg", data.getvalue(), alt)
    return f'<div class="screen" style="aspect-ratio: {width} / {height}">{strip}</div>'


def player(name: str, num_frames: int, *screens: str) -> str:
    """Return frame strips that one button and one slider play together."""
    return (
        f'<div class="player" style="--n:{num_frames}"><div class="row"><div>{"".join(screens)}</div></div>'
        f'<button type="button" aria-label="play {html.escape(name)}">play</button><input type="range" min="0" '
        f'max="{num_frames - 1}" value="0" aria-label="frame of {html.escape(name)}"></div>'
    )


def _inline_image(kind: str, data: bytes, alt: str) -> str:
    return f'<img alt="{html.escape(alt)}" src="data:image/{kind};base64,{base64.b64encode(data).decode()}">'
