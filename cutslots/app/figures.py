"""Images as HTML, and the files in static/."""

from __future__ import annotations

import base64
import functools
import importlib.resources
import io

import numpy as np
from PIL import Image
from scipy import ndimage

MAX_PNG_SIZE = 192  # pixels of the longer side; larger images are sent as JPEG


@functools.cache
def static(name: str) -> str:
    """Return the text of a file in static/."""
    return importlib.resources.files("cutslots.app").joinpath("static", name).read_text(encoding="utf-8")


def image_url(image: Image.Image | np.ndarray) -> str:
    """Return the image as a data URL: PNG if it is small, else JPEG."""
    data, image = io.BytesIO(), image if isinstance(image, Image.Image) else Image.fromarray(image)
    kind = "png" if max(image.size) <= MAX_PNG_SIZE else "jpeg"
    image.save(data, kind, quality=90)
    return data_url(data.getvalue(), kind)


def data_url(data: bytes, kind: str) -> str:
    """Return the bytes of an image file as a data URL. `kind` is "png" or "jpeg"."""
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def figure_html(image: Image.Image | np.ndarray, caption: str, alt: str, over: str = "", css_class: str = "") -> str:
    """Return a figure with a caption. `over` is HTML drawn over the image; `alt` describes it to screen readers."""
    img = f'<img src="{image_url(image)}" alt="{alt}">'
    return f'<figure class="{css_class}"><div>{img}{over}</div><figcaption>{caption}</figcaption></figure>'


def boundaries(labels: np.ndarray) -> np.ndarray:
    """Return where a pixel of `labels` (H, W) differs from the one above or to the left, as bool (H, W)."""
    lowest, highest = (f(labels, footprint=[[0, 1], [1, 1]]) for f in (ndimage.minimum_filter, ndimage.maximum_filter))
    return lowest != highest
