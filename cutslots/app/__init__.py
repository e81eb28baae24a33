"""The web page of `cutslots app`: try models and graph cuts in a browser, offline.

Read the modules in this order:

    sources.py         images to work on: a built-in scene, an uploaded image, the first frames of a video
    figures.py         images as HTML; the files in static/
    events.py          Gradio: import it, run a function on an event, show errors in the page
    discovery_tab.py   first tab: the slots of a model in an image or video; select, hide, merge and download them
    scribbles.py       the strokes that a visitor draws, as pixels
    cut_comparison.py  the relaxed and the exact cut of an image with scribbles
    segment_tab.py     second tab: segment a photograph by scribbles, live
    page.py            both tabs as one Gradio page
    sessions.py        whose state is stored
    security.py        which requests are answered; the security headers
    server.py          `serve`: the HTTP server
    static/            CSS, JavaScript and HTML templates that run in the browser

Design choices:

- Images are sent as data URLs. The server writes no files except uploads, of a bounded size in all. It deletes them
  when it has opened them, or after minutes.
- The state of a visitor, with the frames of an upload, is stored in a bounded number of Gradio sessions.
- Only requests to the server's own address and from its own page are answered.
- A content security policy forbids the browser to contact other hosts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__all__ = ["serve"]

if TYPE_CHECKING:
    from cutslots.app.server import serve


def __getattr__(name: str) -> Any:
    if name != "serve":
        raise AttributeError(f"module 'cutslots.app' has no attribute {name!r}")
    from cutslots.app.server import serve

    return serve
