"""The page, by Gradio, which is imported when it is made: the parts of both tabs, and what happens when they are used.

What is asked for is done one by one. Gradio checks no input (`preprocess`): it would write "Error" over every part of
the page, and leave an empty file for each upload. What is wrong is said, in a sentence, by the function it is given to.
"""

from __future__ import annotations

import base64
import functools
import html
import importlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_args

from cutslots.app import objects
from cutslots.app.cutting import NUMBERS, board, cuts_html, example, picture_to_cut, read_board
from cutslots.app.objects import Seen
from cutslots.app.style import BOARD, PICK, SAVE, SCRIBBLE, STYLE
from cutslots.disk import one_line
from cutslots.model import Discovery
from cutslots.predict import Masks

OLDEST = (6, 31)  # of Gradio, as in pyproject.toml; older ones ask other hosts for scripts or lack what we use
FIRST_LOOK = 1.0  # seconds for which a film is followed unless more of it is asked for
MOST_UPLOAD = "20mb"
ALWAYS = {"api_visibility": "private", "concurrency_id": "work", "preprocess": False}

EXPLAINED = """**p** is the relaxed cut: 1 and beyond is blue (source), 0 white, -1 and beyond orange (sink).
**d** is the largest variable of the edges from a pixel to its neighbours: white where p falls across an edge that is
cheap to sever. **Weights**: neighbours are tied by how alike their colours are; pixels to the source by how unlike they
are to what is scribbled as background, to the sink by how unlike they are to what is scribbled as object, the scribbles
themselves by 1 more. **The exact cut** is by maximum flow, for the same weights."""


def gradio() -> Any:
    """Gradio, asked not to report on its users; if there is none, what to do about it."""
    os.environ |= {"GRADIO_ANALYTICS_ENABLED": "False", "GRADIO_RUN_HISTORY": "False"}
    os.environ.pop("GRADIO_ALLOWED_PATHS", None)
    try:
        gradio: Any = importlib.import_module("gradio")
    except ImportError:
        gradio = None
    if gradio is None or tuple(map(int, gradio.__version__.split(".")[:2])) < OLDEST:
        raise ValueError(f"the app needs Gradio {'.'.join(map(str, OLDEST))} or later: pip install 'cutslots[app]'")
    return gradio


def build(names: Sequence[str], own_paths: bool = True, device: str = "cpu") -> Any:
    """The page, a `gradio.Blocks`. With `own_paths` visitors may name weights on this machine."""
    gr = gradio()

    def model(weights: str) -> Discovery:
        if not own_paths and weights not in names:
            raise ValueError(f"model is {weights!r}; expected one of {', '.join(names)}")
        return objects.model_for(weights, device)

    model(names[0])  # what is wrong with it is said before anybody waits for a page
    with gr.Blocks(title="cutslots", analytics_enabled=False) as page:
        gr.Markdown("# cutslots\nObjects found without labels, by differentiable graph cuts.")
        with gr.Tab("Objects"):
            _objects(gr, page, names, own_paths, model)
        with gr.Tab("The cut"):
            _the_cut(gr)
    return page.queue(max_size=32, default_concurrency_limit=1, api_open=False)


def told(work: Callable[..., Any]) -> Callable[..., Any]:
    """The function, whatever is wrong with what it was given being shown in the page, which stays as it was."""

    @functools.wraps(work)
    def telling(*given: Any) -> Any:
        try:
            return work(*given)
        except (ValueError, TypeError, KeyError, OSError) as error:
            gr = gradio()
            gr.Warning(html.escape(one_line(error)))
            return gr.skip()

    return telling


def when(events: list[Any], work: Callable[..., Any], inputs: list[Any], outputs: Any, **more: str) -> Any:
    """Does the work when one of the events happens; of those that come while the server is busy, for the last alone."""
    return gradio().on(
        events,
        told(work),
        inputs,
        outputs,
        **ALWAYS | {"show_progress": "hidden", "trigger_mode": "always_last"} | more,
    )


def kept(seen: Seen | None) -> Seen:
    """What a visitor sees; those who were not heard of for long are forgotten."""
    if seen is None:
        raise ValueError("this page was idle for too long and has been forgotten; reload it")
    return seen


def _objects(gr: Any, page: Any, names: Sequence[str], own_paths: bool, model: Callable[[str], Discovery]) -> None:
    state, packed = gr.State(), gr.Textbox(visible=False)
    with gr.Row():
        with gr.Column(scale=2, min_width=300):
            more = "; or the path of a run folder or a .safetensors file on this machine" if own_paths else ""
            said = {"label": "Model", "info": f"A shipped model{more}."}
            weights = gr.Dropdown(list(names), value=names[0], allow_custom_value=own_paths, **said)
            family = gr.Radio(objects.FAMILIES, value="plain", label="Scenes", info="Each is drawn on the spot.")
            with gr.Row():
                seed = gr.Number(0, label="Seed", precision=0, minimum=0, maximum=2**32 - 1, min_width=80)
                count = gr.Slider(1, 10, 4, step=1, label="Objects", scale=2, min_width=180)
            another = gr.Button("Draw another scene", variant="primary")
            kinds = "picture, GIF or film" if objects.FILMS else "picture or GIF"
            label = f"Or your {kinds}, up to {MOST_UPLOAD.upper()}"
            upload = gr.File(label=label, file_types=list(objects.OPENED), height=150, elem_id="upload")
            frames = gr.Slider(1, step=1, label="Frames to follow", visible=False, elem_id="frames")
            info = "Joined: the picture is evidence, and slots that draw the same are one. "
            info += "Eager: the ground gives way besides, to miss fewer things. Decoder: as drawn."
            masks = gr.Radio(list(get_args(Masks)), value="joined", label="Masks", info=info)
        with gr.Column(scale=5, min_width=320):
            shown = gr.HTML(js_on_load=PICK, css_template=STYLE, apply_default_css=False, elem_id="found")
            frame = gr.Slider(1, step=1, label="Frame shown", visible=False, elem_id="frame")
            info = "Hidden slots are left out of the download too."
            hide = gr.CheckboxGroup(label="Hide slots", info=info, elem_id="hide")
            info = "Tick two or more; their masks are added up."
            merge = gr.CheckboxGroup(label="Merge slots", info=info, elem_id="merge")
            with gr.Row():
                join = gr.Button("Merge ticked slots", size="md", min_width=140)
                part = gr.Button("Undo merging", size="md", min_width=140)
            save = gr.Button("Download masks", size="md")
    view = [state, shown]
    groups = [*view, hide, merge]
    everything = [*groups, frame, frames]

    def shows(seen: Seen) -> list[Any]:
        return [seen, objects.found_html(seen)]

    def regrouped(seen: Seen) -> list[Any]:
        slots = [(f"Slot {k + 1}", str(k)) for k in objects.in_use(seen)]
        return [*shows(seen), *(gr.CheckboxGroup(slots, value=[]) for _ in (hide, merge))]

    def anew(seen: Seen) -> list[Any]:
        now, most = len(seen.masks), len(seen.source.frames)
        turn = gr.Slider(maximum=max(now, 2), value=1, visible=now > 1)
        return [*regrouped(seen), turn, gr.Slider(maximum=max(most, 2), value=now, visible=most > 1)]

    def draw(weights: str, family: str, seed: float | None, count: float | None, masks: Any) -> list[Any]:
        chosen = model(weights)
        scene = objects.scene(family, int(seed or 0), int(count or 0), chosen.config.size)
        return anew(objects.find(chosen, scene, masks))

    def open_file(weights: str, file: Any, masks: Any) -> list[Any]:
        source = objects.opened(Path(file["path"]))
        return anew(objects.find(model(weights), source, masks, objects.MOST_FRAMES, FIRST_LOOK))

    def again(seen: Seen | None, weights: str, masks: Any, frames: float | None) -> list[Any]:
        return anew(objects.find(model(weights), kept(seen).source, masks, int(frames or 1)))

    def look(seen: Seen | None, frame: float | None, hidden: Sequence[str]) -> list[Any]:
        t = min(max(int(frame or 1), 1), len(kept(seen).masks)) - 1
        return shows(kept(seen)._replace(frame=t, hidden=set(map(int, hidden))))

    def pick(seen: Seen | None, event: Any) -> list[Any]:
        asked, found = event._data, objects.parts(kept(seen))
        slot = int(asked["slot"]) if "slot" in asked else objects.slot_at(found, asked["x"], asked["y"])
        if not 0 <= slot < len(found.areas):
            raise ValueError(f"slot is {slot + 1}; expected one of {len(found.areas)}")
        return shows(kept(seen)._replace(picked=slot))

    def join_ticked(seen: Seen | None, slots: Sequence[str]) -> list[Any]:
        return regrouped(objects.merged(kept(seen), set(map(int, slots))))

    def zipped(seen: Seen | None) -> str:
        return base64.b64encode(objects.archive(kept(seen))).decode()

    pick.__annotations__["event"] = gr.EventData  # which is how Gradio knows
    drawn = [family, seed, count]
    first = [page.load, *(each.change for each in drawn)]
    when(first, draw, [weights, *drawn, masks], everything, show_progress="minimal")
    another.click(None, seed, seed, js="(seed) => ((seed ?? 0) + 1) % 2 ** 32")
    came = when([upload.upload], open_file, [weights, upload, masks], everything, show_progress="minimal")
    came.then(lambda: None, None, upload, **ALWAYS)  # so that the next can be dropped there
    others = [weights.change, masks.change, frames.input]
    when(others, again, [state, weights, masks, frames], everything, show_progress="minimal")
    when([frame.change, hide.input], look, [state, frame, hide], view)
    when([shown.select], pick, [state], view)
    when([join.click], join_ticked, [state, merge], groups, trigger_mode="once")
    when([part.click], lambda seen: regrouped(objects.parted(kept(seen))), [state], groups, trigger_mode="once")
    saved = when([save.click], zipped, [state], packed, trigger_mode="once")
    saved.success(None, packed, packed, js=SAVE)


def _the_cut(gr: Any) -> None:
    first = example()
    with gr.Row():
        with gr.Column(scale=2, min_width=300):
            brushes = [("object (source, blue)", "1"), ("background (sink, orange)", "2"), ("eraser", "0")]
            gr.Radio(brushes, value="1", label="Scribble with", interactive=True, elem_id="brush")
            scripts = {"html_template": BOARD, "js_on_load": SCRIBBLE, "css_template": STYLE}
            canvas = gr.HTML(board(*first), apply_default_css=False, elem_id="board", **scripts)
            with gr.Row():
                upload = gr.UploadButton("Open file", file_types=list(objects.OPENED), size="md", min_width=80)
                restart = gr.Button("Example", size="md", min_width=80)
                clear = gr.Button("Clear", size="md", min_width=80)
            sliders = [
                gr.Slider(low, high, start, step=step, label=name, info=info)
                for name, (low, high, start, step, info) in NUMBERS.items()
            ]
        with gr.Column(scale=5, min_width=320):
            cut = cuts_html(*first, *(slider.value for slider in sliders))
            shown = gr.HTML(cut, css_template=STYLE, apply_default_css=False, elem_id="cuts")
            gr.Markdown(EXPLAINED)

    def moved(value: Any, *numbers: float) -> str:
        return cuts_html(*read_board(value), *numbers)

    def open_file(file: Any) -> dict[str, Any]:
        return board(*picture_to_cut(objects.opened(Path(file["path"]))))

    when([each.change for each in (canvas, *sliders)], moved, [canvas, *sliders], shown)
    when([upload.upload], open_file, [upload], canvas)
    when([restart.click], lambda: board(*first), [], canvas)
    clear.click(None, canvas, canvas, js="(board) => ({ ...board, marks: board.marks.replaceAll(/./g, 0) })")
