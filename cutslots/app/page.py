"""Both tabs as one Gradio page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cutslots.app.discovery_tab import DiscoveryTab, load_cached
from cutslots.app.events import import_gradio
from cutslots.app.segment_tab import SegmentTab
from cutslots.models.discovery import Discovery


def build_page(choices: Sequence[str], allow_paths: bool = True, device: str = "cpu") -> Any:
    """Return the page, a `gradio.Blocks`.

    `choices` are names or paths of checkpoints; the first one is loaded at once, so that its errors show early. With
    `allow_paths`, visitors may also enter the path of a checkpoint on this machine."""
    gr = import_gradio()

    def get_model(checkpoint: str) -> Discovery:
        if not allow_paths and checkpoint not in choices:
            raise ValueError(f"checkpoint is {checkpoint!r}; expected one of {', '.join(choices)}")
        return load_cached(checkpoint, device)

    get_model(choices[0])
    with gr.Blocks(title="cutslots", analytics_enabled=False) as page:
        gr.Markdown("# cutslots\nObject discovery without labels, by differentiable graph cuts.")
        with gr.Tab("Object discovery"):
            DiscoveryTab(gr, choices, allow_paths, get_model).connect(page)
        with gr.Tab("Segmentation"):
            SegmentTab(gr).connect()
    return page.queue(max_size=32, default_concurrency_limit=1, api_open=False)
