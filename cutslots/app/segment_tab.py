"""Second tab: segment a photograph by scribbles with `cutslots.segment`, live.

The visitor draws strokes of two or more labels. After each one the browser sends all strokes, and `segmentation_html`
shows the labels, the soft mask and the cut-out. That view has a reduced resolution; `labels_png` and `cutout_png`
segment the photograph at its own. `SegmentTab` is the tab in Gradio. A section of it compares the paper's relaxed cut
with the exact one, for the same strokes (cut_comparison.py).

The server stores the photograph of a visitor, not the strokes. An answer is never shown for another photograph than the
strokes were drawn on: each has a token, which the browser sends back. Of several requests of a page, Gradio sends one
at a time and the last one in the end, so an older answer never replaces a newer one.

Shapes: L labels, H W of the photograph.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import time
import uuid
from typing import Any, NamedTuple

import numpy as np
from PIL import Image
from scipy import ndimage

from cutslots.app import cut_comparison
from cutslots.app.events import on_event
from cutslots.app.figures import boundaries, data_url, figure_html, image_url, static
from cutslots.app.scribbles import COLORS, Stroke, draw_strokes, read_strokes
from cutslots.app.sources import UPLOAD_SUFFIXES, open_photograph, open_upload
from cutslots.inference.segmentation import CAPACITY, Segmentation, segment
from cutslots.scenes import Scenes
from cutslots.viz.images import encode_png

MAX_VIEW = 512  # pixels of the longer side of the canvas and of what is shown
MAX_CUT_PIXELS = 25_000_000  # of a download: pixels times cuts, about 2.3 GB of memory and half a minute
MAX_CAPACITY = 200
MAX_IDLE_SECONDS = 3600  # for which the photograph of a page is kept

EXAMPLE = "example"  # the token of the built-in image
NAMES, TABLE = list(COLORS), np.array([(0, 0, 0), *COLORS.values()], dtype=np.uint8)

EXPLANATION = """Mark some pixels of every object, and of the background, each with a brush of its own. A mixture of
Gaussians models the colors of each label's marks. A minimum cut finds all other pixels: neighbors of one color are held
together, and outlines follow the edges of the image. The soft mask is computed from the cut's solution p. No training
is involved. Add strokes where the outline is wrong; the eraser takes marks away."""


class Photograph(NamedTuple):
    """An image to segment."""

    name: str
    image: Image.Image  # RGB, as `open_photograph` returns it
    view: Image.Image  # the same, at most MAX_VIEW pixels wide and high
    token: str
    note: str = ""  # shown to the visitor


class Request(NamedTuple):
    """What a visitor asks for: a photograph, strokes, and what to show of the segmentation."""

    photograph: Photograph
    strokes: list[Stroke]
    chosen: int  # the label that is cut out, from 1
    capacity: float


def new_photograph(name: str, image: Image.Image, token: str, note: str = "") -> Photograph:
    view = image.copy()
    view.thumbnail((MAX_VIEW, MAX_VIEW), Image.Resampling.LANCZOS)
    return Photograph(name, image, view, token, note)


@functools.cache
def example() -> tuple[Photograph, list[list[float]]]:
    """Return a rendered scene and strokes: on its two largest objects (labels 1 and 2) and on the background (3)."""
    sample = Scenes("textured", "test", 384, seed=35, count=1, num_objects=(4, 4))[0]
    image, mask = Image.fromarray(sample.image.permute(1, 2, 0).numpy().copy()), sample.mask.numpy()
    strokes: list[list[float]] = []
    for label, k in enumerate(np.argsort(-np.bincount(mask.ravel())[1:])[:2] + 1, 1):
        distances = ndimage.distance_transform_edt(mask == k)
        y, x = (int(i) for i in np.unravel_index(distances.argmax(), mask.shape))
        r = float(distances.max()) * 0.6
        strokes += [[label, 10, x - r, y, x + r, y], [label, 10, x, y - r, x, y + r]]
    low, high = 14, 384 - 14
    strokes.append([3, 10, low, low, high, low, high, high, low, high, low, low])
    return new_photograph("example", image, EXAMPLE), strokes


def read_request(photograph: Photograph | None, value: Any, chosen: Any, capacity: Any) -> Request | None:
    """Return the request in what the browser sends, or None if it is for a photograph that was replaced meanwhile.

    `photograph` is the one stored for the visitor, if any. Raises ValueError for what no visitor can enter."""
    if not isinstance(value, dict):
        raise ValueError(f"the canvas is a {type(value).__name__}; expected its strokes: reload the page")
    token = value.get("token")
    if token == EXAMPLE:
        photograph = example()[0]
    elif photograph is None:
        raise ValueError("the server no longer stores the photograph of this page; open it again")
    elif token != photograph.token:
        return None
    if chosen not in NAMES:
        raise ValueError(f"the label is {chosen!r}; expected one of {', '.join(NAMES)}")
    if type(capacity) not in (int, float) or not 0 <= capacity <= MAX_CAPACITY:
        raise ValueError(f"capacity is {capacity}; expected 0 to {MAX_CAPACITY}")
    strokes = read_strokes(value.get("strokes"), photograph.view.size)
    return Request(photograph, strokes, NAMES.index(chosen) + 1, float(capacity))


def marks_for(request: Request, image: Image.Image) -> np.ndarray:
    """Return the marks (H, W) of the strokes in an image: the photograph or its view.

    Labels that are erased in the view are left out: in the photograph a rim of theirs may be left.
    """
    view = request.photograph.view.size
    marks = draw_strokes(request.strokes, view, image.size)
    if image.size == view:
        return marks
    return np.where(np.isin(marks, draw_strokes(request.strokes, view, view)), marks, 0)


def used_labels(marks: np.ndarray) -> list[int]:
    """Return the labels in marks, from 1, in ascending order."""
    return [int(k) for k in np.unique(marks) if k]


def segment_marks(request: Request, image: Image.Image) -> tuple[Segmentation, int]:
    """Segment the photograph or its view. Also returns the row of the chosen label, or of the first one, from 0."""
    marks = marks_for(request, image)
    used = used_labels(marks)
    found = segment(image, marks, request.capacity)
    row = used.index(request.chosen) if request.chosen in used else 0
    return dataclasses.replace(found, colors=TABLE[used]), row


# ---------------------------------------------------------------------------------------------------------------- HTML


def segmentation_html(request: Request) -> str:
    """Return the labels, the soft mask and the cut-out of the chosen label, or what is missing."""
    marks = marks_for(request, request.photograph.view)
    if len(used_labels(marks)) < 2:
        return '<p class="hint" role="status">Mark the object with one brush and the background with another.</p>'
    start = time.perf_counter()
    found, row = segment_marks(request, request.photograph.view)
    seconds = time.perf_counter() - start
    name = NAMES[used_labels(marks)[row] - 1]
    figures = (
        (outlined_image(found), "labels", "The image in the colors of its labels, with white outlines", "", "overlay"),
        (Image.fromarray(_alpha(found, row)), f"soft mask: {name}", f"Soft mask of the label {name}: white inside"),
        (on_checkerboard(found.cutout(row)), f"cut-out: {name}", f"The pixels of the label {name} on a checkerboard"),
    )
    shown = "".join(figure_html(*figure) for figure in figures)
    width, height = found.image.size
    outlines = f'<img hidden id="outlines" alt="Outlines of the labels" src="{data_url(outlines_png(found), "png")}">'
    return f"""<div style="--ratio:{width}/{height}"><div class="images segments">{shown}</div>{outlines}
        <p class="status hint" role="status">{_status(request, found, seconds)}</p></div>"""


def _status(request: Request, found: Segmentation, seconds: float) -> str:
    photograph, (width, height) = request.photograph, found.image.size
    names = [NAMES[TABLE.tolist().index(color.tolist()) - 1] for color in found.colors]
    shares = [row["area"] / (width * height) for row in found.to_dict()["labels"]]
    areas = ", ".join(f"{name} {share:.1%}" for name, share in zip(names, shares, strict=True))
    full = download_size(request, len(names))
    text = f"{areas}. {seconds:.2f} s at {width}x{height} pixels; downloads have {full[0]}x{full[1]}. {photograph.note}"
    return text.strip()


def _alpha(found: Segmentation, row: int) -> np.ndarray:
    return np.asarray(found.cutout(row).getchannel("A"))


def outlined_image(found: Segmentation) -> np.ndarray:
    """Return the image (H, W, 3) in the colors of its labels, with white outlines."""
    image = np.asarray(found.image)
    tinted = (0.55 * image + 0.45 * found.colors[found.labels]).astype(np.uint8)
    return np.where(boundaries(found.labels)[..., None], np.uint8(255), tinted)


def outlines_png(found: Segmentation) -> bytes:
    """Return the outlines as a transparent PNG: white with a dark edge, to be seen on any image."""
    line = boundaries(found.labels)
    level = np.where(line, 2, ndimage.binary_dilation(line)).astype(np.uint8)
    image = Image.fromarray(level).convert("P")
    image.putpalette([0, 0, 0, 20, 20, 20, 255, 255, 255])
    image.info["transparency"] = bytes([0, 150, 255])
    return encode_png(image)


def on_checkerboard(image: Image.Image, size: int = 8) -> Image.Image:
    """Return an RGBA image on a gray checkerboard with fields of `size` pixels."""
    rows, columns = (np.arange(n) // size for n in (image.height, image.width))
    board = np.where((rows[:, None] + columns) % 2, np.uint8(255), np.uint8(205))
    out = Image.fromarray(board).convert("RGBA")
    out.alpha_composite(image)
    return out.convert("RGB")


def comparison_html(request: Request, *values: float) -> str:
    """Return the relaxed and the exact cut of the chosen label against all others; see `cut_comparison.cuts_html`."""
    image = request.photograph.view.copy()
    image.thumbnail((cut_comparison.MAX_SIZE, cut_comparison.MAX_SIZE), Image.Resampling.LANCZOS)
    marks = marks_for(request, image)
    sides = np.where(marks == request.chosen, cut_comparison.SOURCE, cut_comparison.SINK)
    return cut_comparison.cuts_html(np.asarray(image), np.where(marks > 0, sides, 0), *values)


# ----------------------------------------------------------------------------------------------------------- downloads


def download_size(request: Request, labels: int) -> tuple[int, int]:
    """Return the width and height of downloads: those of the photograph, or fewer pixels if there are many labels."""
    width, height = request.photograph.image.size
    cuts = 1 if labels == 2 else labels
    scale = min(1.0, (MAX_CUT_PIXELS / cuts / (width * height)) ** 0.5)
    return max(1, int(width * scale)), max(1, int(height * scale))


def segment_photograph(request: Request) -> tuple[Segmentation, int]:
    """Segment at the resolution of downloads; see `segment_marks`."""
    image, labels = request.photograph.image, used_labels(marks_for(request, request.photograph.view))
    if len(labels) < 2:
        raise ValueError(f"there are marks of {len(labels)} labels; expected at least 2: mark more, then download")
    size = download_size(request, len(labels))
    image = image if size == image.size else image.resize(size, Image.Resampling.LANCZOS)
    if used_labels(marks_for(request, image)) != labels:
        raise ValueError("a label has too few marks to be found at the full resolution; mark more of it, then download")
    return segment_marks(request, image)


def labels_png(request: Request) -> bytes:
    """Return labels.png as `cutslots segment` writes it."""
    return encode_png(segment_photograph(request)[0].label_image())


def cutout_png(request: Request) -> bytes:
    """Return the photograph with the soft mask of the chosen label as transparency."""
    found, row = segment_photograph(request)
    return encode_png(found.cutout(row))


# -------------------------------------------------------------------------------------------------------------- Gradio


class SegmentTab:
    """The components of the tab and the functions that handle its events."""

    def __init__(self, gr: Any) -> None:
        self.gr, self.file = gr, gr.Textbox(visible=False)
        self.state = gr.State(time_to_live=MAX_IDLE_SECONDS)
        with gr.Row():
            with gr.Column(scale=4, min_width=300):
                self._add_inputs()
            with gr.Column(scale=5, min_width=320):
                self._add_outputs()
        self._add_comparison()

    def _add_inputs(self) -> None:
        gr, (photograph, strokes) = self.gr, example()
        options = {"html_template": canvas_template(), "js_on_load": static("scribble.js")}
        options |= {"css_template": static("app.css"), "elem_id": "canvas", "photo": image_url(photograph.view)}
        self.canvas = gr.HTML(to_canvas(photograph, strokes), apply_default_css=False, **options)
        with gr.Row():
            self.upload = gr.UploadButton("Open image", file_types=list(UPLOAD_SUFFIXES), size="md", min_width=100)
            self.example_button = gr.Button("Example", size="md", min_width=100)
        info = "The label of the soft mask and of the cut-out."
        self.chosen = gr.Radio(NAMES, value=NAMES[0], label="Cut out", info=info, elem_id="chosen")
        info = "How strongly neighbors of one color are held together. Larger values give smoother outlines."
        self.capacity = gr.Slider(0, MAX_CAPACITY, CAPACITY, step=1, label="capacity", info=info)

    def _add_outputs(self) -> None:
        gr, (photograph, strokes) = self.gr, example()
        request = read_request(None, to_canvas(photograph, strokes), NAMES[0], CAPACITY)
        options = {"css_template": static("app.css"), "js_on_load": static("outlines.js"), "elem_id": "segmentation"}
        self.shown = gr.HTML(segmentation_html(request) if request else "", apply_default_css=False, **options)
        with gr.Row():
            self.labels_button = gr.Button("Download labels", size="md", min_width=180)
            self.cutout_button = gr.Button("Download cut-out", size="md", min_width=180)
        gr.Markdown(EXPLANATION, padding=True)

    def _add_comparison(self) -> None:
        gr, values = self.gr, cut_comparison.HYPERPARAMETERS
        label = "Compare the paper's relaxed cut with the exact minimum cut, at 96 pixels"
        self.compare = gr.Checkbox(False, label=label, elem_id="compare")
        with gr.Row(visible=False) as self.comparison:
            with gr.Column(scale=2, min_width=300):
                self.sliders = [
                    gr.Slider(low, high, default, step=step, label=name, info=info)
                    for name, (low, high, default, step, info) in values.items()
                ]
            with gr.Column(scale=5, min_width=320):
                self.cuts = gr.HTML(css_template=static("app.css"), apply_default_css=False, elem_id="cuts")
                gr.Markdown(cut_comparison.EXPLANATION, padding=True)

    def connect(self) -> None:
        """Register the event handlers."""
        inputs = [self.state, self.canvas, self.chosen, self.capacity]
        everything, cuts = [*inputs, self.compare, *self.sliders], [self.comparison, self.cuts]
        on_event([each.change for each in inputs[1:]], self.show_all, everything, [self.shown, *cuts])
        on_event([each.change for each in (self.compare, *self.sliders)], self.show_comparison, everything, cuts)
        on_event([self.upload.upload], self.show_photograph, [self.upload], [self.state, self.canvas])
        on_event([self.example_button.click], self.show_example, [], [self.state, self.canvas])
        for button, handler in ((self.labels_button, self.download_labels), (self.cutout_button, self.download_cutout)):
            made = on_event([button.click], handler, inputs, self.file, trigger_mode="once", show_progress="full")
            made.success(None, self.file, self.file, js=static("download.js"))

    def show_all(self, photograph: Photograph | None, value: Any, chosen: Any, capacity: Any, *others: Any) -> list:
        request = read_request(photograph, value, chosen, capacity)
        if request is None:
            return [self.gr.skip()] * 3
        return [segmentation_html(request), *self._comparison(request, *others)]

    def show_comparison(
        self, photograph: Photograph | None, value: Any, chosen: Any, capacity: Any, *others: Any
    ) -> list:
        request = read_request(photograph, value, chosen, capacity)
        return self._comparison(request, *others) if request else [self.gr.skip()] * 2

    def _comparison(self, request: Request, compare: Any, *values: float) -> list:
        if compare is not True:
            return [self.gr.Row(visible=False), self.gr.skip()]
        return [self.gr.Row(visible=True), comparison_html(request, *values)]

    def show_photograph(self, file: Any) -> list:
        source = open_upload(file, open_photograph)
        photograph = new_photograph(source.name, source.frames[0], uuid.uuid4().hex, source.note)
        return [photograph, self._show_canvas(photograph, [])]

    def show_example(self) -> list:
        return [None, self._show_canvas(*example())]

    def download_labels(self, *values: Any) -> str:
        return self._download("labels.png", labels_png, *values)

    def download_cutout(self, *values: Any) -> str:
        return self._download("cutout.png", cutout_png, *values)

    def _download(self, name: str, encode: Any, *values: Any) -> str:
        request = read_request(*values)
        if request is None:
            raise ValueError("the photograph was replaced meanwhile; download again")
        return f"{name}:{base64.b64encode(encode(request)).decode()}"

    def _show_canvas(self, photograph: Photograph, strokes: list[list[float]]) -> Any:
        return self.gr.HTML(to_canvas(photograph, strokes), photo=image_url(photograph.view))


def to_canvas(photograph: Photograph, strokes: list[list[float]]) -> dict[str, Any]:
    """Return the value of the canvas in the browser. It sends the same back, with the visitor's strokes."""
    width, height = photograph.view.size
    return {"token": photograph.token, "width": width, "height": height, "strokes": strokes}


def canvas_template() -> str:
    """Return the HTML of the canvas, with a brush for each label."""
    brushes = (
        f"""<label class="brush"><input type="radio" name="brush" value="{label}"{" checked" * (label == 1)}>
        <i style="background:rgb{color}"></i>{name}</label>"""
        for label, (name, color) in enumerate(COLORS.items(), 1)
    )
    return static("canvas.html").replace("BRUSHES", "\n".join(brushes))
