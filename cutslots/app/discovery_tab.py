"""First tab: the slots of a model in a scene, an image or a video.

`discover` runs a model on a `Source` and returns a `ViewState`: the masks, and what the visitor has selected, hidden
and merged. The functions after it derive images, HTML and the download from a `ViewState`. `DiscoveryTab` is the tab
in Gradio.

Shapes: T frames, K slots, h w resolution of the model, H W of the image.
"""

from __future__ import annotations

import base64
import functools
import html
import io
import json
import math
import time
import zipfile
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args

import numpy as np
import torch
from PIL import Image
from scipy import ndimage
from torch import Tensor

from cutslots.app import sources
from cutslots.app.events import EVENT_OPTIONS, on_event
from cutslots.app.figures import boundaries, figure_html, image_url, static
from cutslots.app.security import MAX_UPLOAD
from cutslots.app.sources import Source, generate_scene, open_source, open_upload
from cutslots.inference.coco import add_annotations, new_coco
from cutslots.inference.prediction import Prediction, draw_overlay, mask_files
from cutslots.inference.predictor import is_unfamiliar, predict_image, unfamiliar_sentence
from cutslots.inference.tracking import find_merges, track_frames
from cutslots.models.checkpoints import checkpoint_file, checkpoint_names, load
from cutslots.models.discovery import Discovery
from cutslots.models.feature_colors import reconstruction_colors
from cutslots.models.mask_kinds import MaskKind
from cutslots.viz.images import to_uint8
from cutslots.viz.palette import PALETTE

FIRST_CHECKPOINT = "plain-128"  # of those of the package; it is for the scenes that the page begins with
MAX_MODELS = 2  # in memory; the least recently used one is dropped first

UPLOAD_SECONDS = 4.0  # for both passes over an uploaded video; visitors ask for more frames with a slider


# -------------------------------------------------------------------------------------------------------------- models


def checkpoint_choices(checkpoints: Sequence[str] = ()) -> list[str]:
    """Return the given checkpoints and the shipped ones, without duplicates. The page begins with the first."""
    shipped = sorted(checkpoint_names(), key=lambda name: name != FIRST_CHECKPOINT)
    return list(dict.fromkeys([*checkpoints, *shipped]))


def load_cached(checkpoint: str, device: str = "cpu") -> Discovery:
    """Load a model by name or path, from memory if it was used recently and its file has not changed."""
    file = checkpoint_file(Path(str(checkpoint).strip()).expanduser())
    return _load_version(str(file), file.stat().st_mtime_ns, device)


@functools.lru_cache(maxsize=MAX_MODELS)
def _load_version(file: str, modified_ns: int, device: str) -> Discovery:
    return load(file, device)


# --------------------------------------------------------------------------------------------------------------- slots


class ViewState(NamedTuple):
    """The output of a model on the first T frames of a source, and what the visitor has chosen to see of it."""

    source: Source
    masks: Tensor  # (T, K, h, w), sum to one over K
    labels: np.ndarray  # (T, H, W) uint8: the slot of every pixel of the frames, not merged
    slot_reconstructions: np.ndarray  # (T, K, h, w, 3) uint8
    reconstructions: np.ndarray  # (T, h, w, 3) uint8
    seconds: float  # run time
    merged_into: tuple[int, ...]  # (K,) the slot that each slot is merged into, or itself
    slot_scores: np.ndarray  # (T, K) of the slots as they are, not merged
    background: int | None = None  # the slot that is the background
    warning: str = ""  # that the source is far from the training data
    frame: int = 0
    hidden: Collection[int] = ()
    selected: int | None = None


class Segmentation(NamedTuple):
    """The slot of every pixel of one frame."""

    labels: np.ndarray  # (H, W) uint8, slots from 0
    scores: np.ndarray  # (K,) of each slot; a merged slot has the highest score of its members
    areas: np.ndarray  # (K,) fraction of the pixels of each slot


def discover(
    model: Discovery, source: Source, masks: MaskKind = "refined", frames: int = 1, seconds: float = math.inf
) -> ViewState:
    """Run the model on the first frames of a source.

    One frame gets the masks that `predict` computes. Several are tracked as `track` does; they have no high-recall
    masks, so refined ones are shown. No further frame is started after about `seconds`, so the result may have fewer
    frames than asked for."""
    start = time.perf_counter()
    chosen = source.frames[: max(1, frames)]
    if len(chosen) == 1:
        predictions = [predict_image(model, chosen[0], masks, name=source.name)]
    elif masks == "decoder":
        predictions = list(track_frames(model, _until(chosen, seconds)))
    else:
        tracked: list[Image.Image] = []
        merges = find_merges(model, _until(chosen, seconds / 2, tracked))
        predictions = list(track_frames(model, tracked, merges=merges))
    unfamiliar = [source.name] if 2 * sum(map(is_unfamiliar, predictions)) > len(predictions) else []
    return ViewState(
        source,
        torch.stack([prediction.soft_masks for prediction in predictions]),
        np.stack([prediction.labels for prediction in predictions]),
        np.stack([_slot_colors(prediction) for prediction in predictions]),
        np.stack([to_uint8(reconstruction_colors(x.output, _mask_size(x))) for x in predictions]),
        time.perf_counter() - start,
        tuple(range(model.num_slots)),
        np.stack([prediction.slot_scores for prediction in predictions]),
        predictions[0].background,
        unfamiliar_sentence(model, unfamiliar, 1) if unfamiliar else "",
    )


def _mask_size(prediction: Prediction) -> tuple[int, int]:
    return prediction.soft_masks.shape[-2], prediction.soft_masks.shape[-1]


def _slot_colors(prediction: Prediction) -> np.ndarray:
    """Return what each slot reconstructs, (K, h, w, 3) uint8: the image itself where slots reconstruct no colors."""
    slots = getattr(prediction.output, "slot_reconstructions", None)
    if slots is not None:
        return to_uint8(slots)
    height, width = _mask_size(prediction)
    small = np.asarray(prediction.image.resize((width, height), Image.Resampling.BOX))
    return np.broadcast_to(small, (len(prediction.soft_masks), height, width, 3))


def _until(
    frames: Sequence[Image.Image], seconds: float, started: list[Image.Image] | None = None
) -> Iterator[Image.Image]:
    """Yield frames, the first one always, until so much time has passed; append them to `started`."""
    start = time.perf_counter()
    for number, frame in enumerate(frames):
        if number and time.perf_counter() - start > seconds:
            return
        if started is not None:
            started.append(frame)
        yield frame


def merge(view: ViewState, slots: Collection[int]) -> ViewState:
    """Merge slots into the one with the lowest index. Resets what is hidden and selected."""
    if len(set(slots)) < 2 or not set(slots) <= set(range(len(view.merged_into))):
        raise ValueError("expected at least two slots to merge; select them first")
    targets = {view.merged_into[k] for k in slots}
    merged_into = tuple(min(targets) if k in targets else k for k in view.merged_into)
    return view._replace(merged_into=merged_into, hidden=(), selected=None)


def unmerge(view: ViewState) -> ViewState:
    """Undo all merges. Resets what is hidden and selected."""
    return view._replace(merged_into=tuple(range(len(view.merged_into))), hidden=(), selected=None)


def merged_masks(view: ViewState) -> Tensor:
    """Return the masks (K, h, w) of the frame, with those of merged slots added."""
    masks = view.masks[view.frame]
    return torch.zeros_like(masks).index_add_(0, torch.tensor(view.merged_into), masks)


def segment(view: ViewState) -> Segmentation:
    """Return the slot of every pixel of the frame shown."""
    labels = np.array(view.merged_into, np.uint8)[view.labels[view.frame]]
    scores = np.zeros(len(view.merged_into))
    np.maximum.at(scores, list(view.merged_into), view.slot_scores[view.frame])
    return Segmentation(labels, scores, np.bincount(labels.ravel(), minlength=len(view.merged_into)) / labels.size)


def background(view: ViewState) -> int | None:
    """Return the slot that is the background, after merges."""
    return None if view.background is None else view.merged_into[view.background]


def segment_frames(view: ViewState) -> list[Segmentation]:
    """Return the segmentation of each of the T frames."""
    return [segment(view._replace(frame=t)) for t in range(len(view.masks))]


def nonempty_slots(view: ViewState) -> list[int]:
    """Return the slots that have at least one pixel in any frame."""
    return np.flatnonzero(sum(frame.areas for frame in segment_frames(view))).tolist()


def slot_at(segmentation: Segmentation, x: float, y: float) -> int:
    """Return the slot of the pixel at (x, y), clamped to the image."""
    row, column = np.clip((int(y), int(x)), 0, np.array(segmentation.labels.shape) - 1)
    return int(segmentation.labels[row, column])


def label_positions(labels: np.ndarray) -> dict[int, tuple[float, float]]:
    """Return where to write the number of each slot: (x, y) in [0, 1] of its pixel furthest from any boundary."""
    depth = ndimage.distance_transform_cdt(np.pad(~boundaries(labels), 1))[1:-1, 1:-1]
    slots, (height, width) = np.unique(labels).tolist(), labels.shape
    positions = ndimage.maximum_position(depth, labels, slots)
    return {k: ((x + 0.5) / width, (y + 0.5) / height) for k, (y, x) in zip(slots, positions, strict=True)}


def zip_masks(view: ViewState) -> bytes:
    """Return a zip of coco.json and, for each frame, NAME/labels.png and NAME/slot_01.png ..., as `predict` writes.

    Hidden slots are left out; their pixels are 0 in labels.png."""
    record, data = new_coco(), io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as out:
        for t, (labels, scores, _) in enumerate(segment_frames(view)):
            name = view.source.name + (f"_{t:03d}" if len(view.masks) > 1 else "")
            visible = np.where(np.isin(labels, list(view.hidden)), 0, labels + 1).astype(np.uint8)
            for file, content in mask_files(visible):
                out.writestr(f"{name}/{file}", content)
            add_annotations(record, f"{name}.png", labels, scores, background(view))
        annotations = [each for each in record["annotations"] if each["slot"] - 1 not in view.hidden]
        out.writestr("coco.json", json.dumps(record | {"annotations": annotations}))
    return data.getvalue()


# -------------------------------------------------------------------------------------------------------------- images


def overlay_image(view: ViewState, segmentation: Segmentation) -> np.ndarray:
    """Return the frame (H, W, 3) with objects in the colors of their slots, with white boundaries.

    The background and hidden slots are not colored."""
    image = view.source.frames[view.frame]
    overlay = image.copy()
    draw_overlay(overlay, segmentation.labels, background(view))
    colored = np.where(boundaries(segmentation.labels)[..., None], np.uint8(255), np.asarray(overlay))
    return np.where(np.isin(segmentation.labels, list(view.hidden))[..., None], np.asarray(image), colored)


def reconstruction_image(view: ViewState) -> np.ndarray:
    """Return the reconstruction (h, w, 3) of the frame, white where hidden slots are."""
    is_hidden = np.isin(range(len(view.merged_into)), list(view.hidden))
    hidden = merged_masks(view)[is_hidden].sum(0)[..., None].numpy()
    return ((1 - hidden) * view.reconstructions[view.frame] + 255 * hidden).round().astype(np.uint8)


def slot_image(view: ViewState, slot: int) -> np.ndarray:
    """Return the masked reconstruction (h, w, 3) of a slot and those merged into it, on white."""
    members = np.array(view.merged_into) == slot
    masks = view.masks[view.frame][members][..., None].numpy()
    masked = (masks * view.slot_reconstructions[view.frame][members]).sum(0)
    return (masked + 255 * (1 - masks.sum(0))).round().astype(np.uint8)


# ---------------------------------------------------------------------------------------------------------------- HTML


def view_html(view: ViewState) -> str:
    """Return the overlay, the image and its reconstruction; a button for each slot; the selected slot."""
    segmentation, image = segment(view), view.source.frames[view.frame]
    positions = {k: at for k, at in label_positions(segmentation.labels).items() if k not in view.hidden}
    areas = ", ".join(f"slot {k + 1} {_percent(segmentation.areas[k])}" for k in positions) or "all slots are hidden"
    numbers = "".join(f'<span style="left:{x:.1%};top:{y:.1%}">{k + 1}</span>' for k, (x, y) in positions.items())
    overlay = overlay_image(view, segmentation)
    return f"""<div style="--ratio:{image.width}/{image.height}"><div class="images">
        {figure_html(overlay, "masks: click one", f"Masks of the slots over the image: {areas}", numbers, "overlay")}
        {figure_html(image, "image", "The image")}
        {figure_html(reconstruction_image(view), "reconstruction", "Reconstruction from the slots shown")}</div>
        <p class="status hint" role="status">{html.escape(_status(view, segmentation))}</p>
        <div class="slots" role="group" aria-label="Slots">{_slots_html(view, segmentation)}</div>
        <div id="selected">{_selected_html(view, segmentation)}</div></div>"""


def _slots_html(view: ViewState, segmentation: Segmentation) -> str:
    return "".join(
        f"""<button type="button" class="slot {"faded" * hidden}" data-slot="{k}" style="{_color(k)}"
        aria-pressed="{json.dumps(k == view.selected)}"><img src="{image_url(slot_image(view, k))}"
        alt="Reconstruction of slot {k + 1}">
        <span>{k + 1} · {"hidden" if hidden else _percent(segmentation.areas[k])}</span></button>"""
        for k, hidden in ((k, k in view.hidden) for k in np.flatnonzero(segmentation.areas).tolist())
    )


def _selected_html(view: ViewState, segmentation: Segmentation) -> str:
    """Return the area, the score, the pixels and the reconstruction of the selected slot."""
    if view.selected is None:
        return '<p class="hint">Click a mask, or choose a slot with Tab and Enter, to see that slot alone.</p>'
    k = view.merged_into[view.selected]
    name = f"Slot {k + 1}" + (f" (merged: {_members(view, k)})" if view.merged_into.count(k) > 1 else "")
    name += ", the background" if k == background(view) else ""
    area = f"{_percent(segmentation.areas[k])} of the pixels"
    score = f", score {segmentation.scores[k]:.2f}" if segmentation.areas[k] else ""
    image = np.asarray(view.source.frames[view.frame])
    pixels = np.where((segmentation.labels == k)[..., None], image, np.uint8(255))
    return f"""<p class="summary" role="status" style="{_color(k)}">{name}: {area}{score}.</p>
        <div class="images">{figure_html(pixels, "masked image", f"The pixels of slot {k + 1}, on white")}
        {figure_html(slot_image(view, k), "slot reconstruction", f"Reconstruction of slot {k + 1}, on white")}</div>"""


def _status(view: ViewState, segmentation: Segmentation) -> str:
    nonempty, frames, merged_into = np.count_nonzero(segmentation.areas), len(view.masks), view.merged_into
    text = [f"{view.source.name}: {nonempty} of {len(merged_into)} slots have pixels; run time {view.seconds:.2f} s."]
    text += [f"Tracked over {frames} frames."] if frames > 1 else []
    text += [f"Merged: {_members(view, k)}." for k in sorted(set(merged_into)) if merged_into.count(k) > 1]
    return " ".join([*text, view.source.note, f"Warning: {view.warning}." if view.warning else ""]).strip()


def _members(view: ViewState, slot: int) -> str:
    """Return the numbers, from 1, of the slots merged into this one."""
    return ", ".join(str(k + 1) for k, target in enumerate(view.merged_into) if target == slot)


def _color(slot: int) -> str:
    return f"--slot-color:rgb({','.join(map(str, PALETTE[slot + 1]))})"


def _percent(fraction: float) -> str:
    """Return a percentage as HTML."""
    return f"{100 * fraction:.1f}%" if fraction >= 0.0005 else "&lt;0.1%"


# -------------------------------------------------------------------------------------------------------------- Gradio


def require_session(view: ViewState | None) -> ViewState:
    """Return the state of a visitor. Raises ValueError if the server has dropped it."""
    if view is None:
        raise ValueError("the server no longer stores the state of this page; reload the page")
    return view


class DiscoveryTab:
    """The components of the tab and the functions that handle its events.

    `get_model` loads a model from the text in the field "Checkpoint"."""

    def __init__(self, gr: Any, choices: Sequence[str], allow_paths: bool, get_model: Callable[[str], Discovery]):
        self.gr, self.get_model = gr, get_model
        self.state, self.file = gr.State(), gr.Textbox(visible=False)
        with gr.Row():
            with gr.Column(scale=2, min_width=300):
                self._add_inputs(list(choices), allow_paths)
            with gr.Column(scale=5, min_width=320):
                self._add_outputs()
        DiscoveryTab.select_slot.__annotations__["event"] = gr.EventData  # tells Gradio to pass the event

    def _add_inputs(self, choices: list[str], allow_paths: bool) -> None:
        gr = self.gr
        info = "A checkpoint by name" + (", or the path of a run folder or .safetensors file." if allow_paths else ".")
        info += " Those of the package are trained on rendered scenes, not on photographs."
        options = {"value": choices[0], "allow_custom_value": allow_paths}
        self.checkpoint = gr.Dropdown(choices, label="Checkpoint", info=info, **options)
        info = "Scenes are rendered by the built-in generator."
        self.family = gr.Radio(sources.FAMILIES, value="plain", label="Scene family", info=info)
        with gr.Row():
            self.seed = gr.Number(0, label="Seed", precision=0, minimum=0, maximum=2**32 - 1, min_width=80)
            self.objects = gr.Slider(1, 10, 4, step=1, label="Objects", scale=2, min_width=180)
        self.next_scene = gr.Button("Generate another scene", variant="primary")
        kinds = "image, GIF or video" if sources.VIDEO_SUFFIXES else "image or GIF"
        label = f"Or upload an {kinds}, up to {MAX_UPLOAD // 2**20} MB"
        suffixes = list(sources.UPLOAD_SUFFIXES)
        self.upload = gr.File(label=label, file_types=suffixes, height=150, elem_id="upload")
        self.frames = gr.Slider(1, step=1, label="Frames to track", visible=False, elem_id="frames")
        info = "refined: the posterior given the image, similar slots merged, then a minimum cut along image edges; "
        info += "missed objects are added. "
        info += "high-recall: refined, with the background down-weighted to miss fewer objects (images only). "
        info += "decoder: the masks of the decoder."
        self.masks = gr.Radio(list(get_args(MaskKind)), value="refined", label="Masks", info=info)

    def _add_outputs(self) -> None:
        gr = self.gr
        options = {"js_on_load": static("select_slot.js"), "css_template": static("app.css")}
        self.shown = gr.HTML(apply_default_css=False, elem_id="discovery", **options)
        self.frame = gr.Slider(1, step=1, label="Frame", visible=False, elem_id="frame")
        info = "The download leaves out hidden slots."
        self.hide = gr.CheckboxGroup(label="Hide slots", info=info, elem_id="hide")
        info = "Select two or more slots. Their masks are added."
        self.merge = gr.CheckboxGroup(label="Merge slots", info=info, elem_id="merge")
        with gr.Row():
            self.merge_button = gr.Button("Merge selected", size="md", min_width=140)
            self.unmerge_button = gr.Button("Undo merges", size="md", min_width=140)
        self.download_button = gr.Button("Download masks", size="md")

    def connect(self, page: Any) -> None:
        """Register the event handlers. `page` is the `gradio.Blocks` around the tab; its load event runs a model."""
        view = [self.state, self.shown]
        slots = [*view, self.hide, self.merge]
        everything = [*slots, self.frame, self.frames]
        scene = [self.family, self.seed, self.objects]
        events = [page.load, *(each.change for each in scene)]
        on_event(events, self.show_scene, [self.checkpoint, *scene, self.masks], everything, show_progress="minimal")
        self.next_scene.click(None, self.seed, self.seed, js=static("next_seed.js"))
        inputs = [self.checkpoint, self.upload, self.masks]
        opened = on_event([self.upload.upload], self.show_upload, inputs, everything, show_progress="minimal")
        opened.then(lambda: None, None, self.upload, **EVENT_OPTIONS)  # empties the field for the next upload
        events = [self.checkpoint.change, self.masks.change, self.frames.input]
        inputs = [self.state, self.checkpoint, self.masks, self.frames]
        on_event(events, self.rerun, inputs, everything, show_progress="minimal")
        on_event([self.frame.change, self.hide.input], self.update_view, [self.state, self.frame, self.hide], view)
        on_event([self.shown.select], self.select_slot, [self.state], view)
        on_event([self.merge_button.click], self.merge_slots, [self.state, self.merge], slots, trigger_mode="once")
        on_event([self.unmerge_button.click], self.undo_merges, [self.state], slots, trigger_mode="once")
        zipped = on_event([self.download_button.click], self.download, [self.state], self.file, trigger_mode="once")
        zipped.success(None, self.file, self.file, js=static("download.js"))

    # Handlers. They return new values for `view`, `slots` or `everything` in `connect`.

    def show_scene(self, checkpoint: str, family: str, seed: float | None, objects: float | None, masks: Any) -> list:
        model = self.get_model(checkpoint)
        scene = generate_scene(family, int(seed or 0), int(objects or 0), model.image_size)
        return self._update_all(discover(model, scene, masks))

    def show_upload(self, checkpoint: str, file: Any, masks: Any) -> list:
        source = open_upload(file, open_source)
        view = discover(self.get_model(checkpoint), source, masks, sources.MAX_FRAMES, UPLOAD_SECONDS)
        return self._update_all(view)

    def rerun(self, view: ViewState | None, checkpoint: str, masks: Any, frames: float | None) -> list:
        return self._update_all(
            discover(self.get_model(checkpoint), require_session(view).source, masks, int(frames or 1))
        )

    def update_view(self, view: ViewState | None, frame: float | None, hidden: Sequence[str]) -> list:
        view = require_session(view)
        t = min(max(int(frame or 1), 1), len(view.masks)) - 1
        return self._update_view(view._replace(frame=t, hidden=set(map(int, hidden))))

    def select_slot(self, view: ViewState | None, event: Any) -> list:
        view = require_session(view)
        clicked, segmentation = event._data, segment(view)
        slot = int(clicked["slot"]) if "slot" in clicked else slot_at(segmentation, clicked["x"], clicked["y"])
        if not 0 <= slot < len(view.merged_into):
            raise ValueError(f"slot is {slot + 1}; expected 1 to {len(view.merged_into)}")
        return self._update_view(view._replace(selected=slot))

    def merge_slots(self, view: ViewState | None, slots: Sequence[str]) -> list:
        return self._update_slots(merge(require_session(view), set(map(int, slots))))

    def undo_merges(self, view: ViewState | None) -> list:
        return self._update_slots(unmerge(require_session(view)))

    def download(self, view: ViewState | None) -> str:
        return f"masks.zip:{base64.b64encode(zip_masks(require_session(view))).decode()}"

    def _update_view(self, view: ViewState) -> list:
        return [view, view_html(view)]

    def _update_slots(self, view: ViewState) -> list:
        choices = [(f"Slot {k + 1}", str(k)) for k in nonempty_slots(view)]
        return [*self._update_view(view), *(self.gr.CheckboxGroup(choices, value=[]) for _ in range(2))]

    def _update_all(self, view: ViewState) -> list:
        tracked, available = len(view.masks), len(view.source.frames)
        frame = self.gr.Slider(maximum=max(tracked, 2), value=1, visible=tracked > 1)
        frames = self.gr.Slider(maximum=max(available, 2), value=tracked, visible=available > 1)
        return [*self._update_slots(view), frame, frames]
