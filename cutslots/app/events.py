"""Gradio events: run a function when a component changes, one at a time, and show its errors in the page.

Gradio's own input checks (`preprocess`) are off. They would write "Error" over every component, and leave an empty
file for each upload. Instead, the function raises an error of one sentence, and the page shows it.
"""

from __future__ import annotations

import functools
import html
import importlib
import os
from collections.abc import Callable
from typing import Any

from cutslots.files import escape_unprintable

MIN_GRADIO = (6, 31)  # as in pyproject.toml; older versions load scripts from other hosts or lack what we use

EVENT_OPTIONS = {"api_visibility": "private", "concurrency_id": "work", "preprocess": False}


def import_gradio() -> Any:
    """Import Gradio with its telemetry off. Raises ValueError if it is missing or too old."""
    os.environ |= {"GRADIO_ANALYTICS_ENABLED": "False", "GRADIO_RUN_HISTORY": "False"}
    os.environ.pop("GRADIO_ALLOWED_PATHS", None)
    try:
        gradio: Any = importlib.import_module("gradio")
    except ImportError:
        gradio = None
    if gradio is None or tuple(map(int, gradio.__version__.split(".")[:2])) < MIN_GRADIO:
        raise ValueError(f"the app needs Gradio {'.'.join(map(str, MIN_GRADIO))} or later: pip install 'cutslots[app]'")
    return gradio


def show_errors(handler: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a handler so that the page shows its errors as a warning and stays unchanged."""

    @functools.wraps(handler)
    def wrapper(*args: Any) -> Any:
        try:
            return handler(*args)
        except (ValueError, TypeError, KeyError, OSError) as error:
            gr = import_gradio()
            gr.Warning(html.escape(escape_unprintable(error)))
            return gr.skip()

    return wrapper


def on_event(events: list[Any], handler: Callable[..., Any], inputs: list[Any], outputs: Any, **options: str) -> Any:
    """Call the handler on any of the events. Of several events while the server is busy, only the last one counts."""
    defaults = EVENT_OPTIONS | {"show_progress": "hidden", "trigger_mode": "always_last"}
    return import_gradio().on(events, show_errors(handler), inputs, outputs, **defaults | options)
