"""`cutslots app`: a page to try models and cuts on, served from this machine to this machine.

    objects.py   a model's slots in a scene drawn on the spot, a picture or a film: shown, picked, hidden, merged, saved
    cutting.py   one picture, scribbles for source and sink: the relaxed cut, its edge variables, the exact minimum cut
    page.py      both as tabs of a page, by Gradio; what comes before knows nothing of it
    style.py     what the browser does by itself

Choices: pictures travel inside the page (data URLs), so that the server keeps no files but uploads, and those only for
minutes; what a visitor looks at is held in a few bounded sessions; a policy that the server sends forbids browsers to
ask anybody else for anything.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cutslots.app.objects import model_names
from cutslots.app.page import MOST_UPLOAD, build, gradio
from cutslots.predict import chosen

SESSIONS = 8  # held at once; the one used longest ago goes first
KEPT = 600  # seconds that an upload stays on disk
FAINT = ("body_text_color_subdued", "block_info_text_color", "block_label_text_color")  # in Gradio's own theme
READABLE = dict.fromkeys(FAINT, "*neutral_600") | {f"{name}_dark": "*neutral_300" for name in FAINT}
HEADERS = [
    (b"content-security-policy", b"default-src 'self' 'unsafe-inline' 'unsafe-eval' data: blob:; form-action 'self'"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-content-type-options", b"nosniff"),
]
FOREIGN = rb"<meta\s[^>]*content=\"https?://[^>]*>|https?://(?:github\.com|raw\.githubusercontent\.com)/[^\"]*"


def serve(weights: Sequence[str] = (), host: str = "127.0.0.1", port: int = 7860, device: str = "auto") -> None:
    """Serves the page until it is interrupted. All that is written is in a temporary folder, gone at the end."""
    port = free_port(host, port)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # which ends it as Ctrl-C does
    with tempfile.TemporaryDirectory(prefix="cutslots-app-", ignore_cleanup_errors=True) as folder:
        uploads = Path(folder) / "uploads"
        os.environ |= {"GRADIO_TEMP_DIR": str(uploads), "MPLCONFIGDIR": folder}  # Gradio calls Matplotlib
        gr = gradio()
        page = build(model_names(weights), own_paths=is_loopback(host), device=str(chosen(device)))
        fonts = {"font": ("system-ui", "sans-serif"), "font_mono": ("ui-monospace", "monospace")}
        closed = {"share": False, "ssr_mode": False, "mcp_server": False, "enable_monitoring": False}
        undocumented = {"docs_url": None, "redoc_url": None, "openapi_url": None}
        page.launch(
            server_name=host,
            server_port=port,
            theme=gr.themes.Default(primary_hue="blue", **fonts).set(**READABLE),
            max_file_size=MOST_UPLOAD,
            state_session_capacity=SESSIONS,
            app_kwargs={"middleware": [(Alone, (), {})], **undocumented},
            footer_links=[],
            quiet=True,
            prevent_thread_lock=True,
            **closed,
        )
        try:
            name = f"[{host}]" if ":" in host else host
            print(f"cutslots: the app is at http://{name}:{port}; Ctrl-C ends it", flush=True)
            while True:
                time.sleep(60)
                tidy(uploads, time.time() - KEPT)
        except KeyboardInterrupt:
            print("cutslots: the app has ended", file=sys.stderr)
        finally:
            page.close(verbose=False)


def free_port(host: str, port: int) -> int:
    """The port, or for 0 any that is free; a sentence if it is taken."""
    if not 0 <= port < 2**16:
        raise ValueError(f"port is {port}; expected a number from 0 to 65535")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.create_server((host, port), family=family) as probe:
            return int(probe.getsockname()[1])
    except OSError as error:
        raise ValueError(f"{host}:{port} cannot be listened on ({error}); choose another --host or --port") from None


def is_loopback(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def tidy(folder: Path, before: float) -> None:
    """Removes what is older: uploads, those that were broken off, folders that held them."""
    for path in sorted(folder.rglob("*"), reverse=True):
        with contextlib.suppress(OSError):  # a folder holds newer files, or somebody was quicker
            if path.stat().st_mtime < before:
                path.rmdir() if path.is_dir() else path.unlink()


class Alone:
    """Between server and browser: sends the policy along, and blots out the addresses of others that the page names for
    those who would share or script it."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def sent(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *HEADERS]
            elif message["type"] == "http.response.body" and scope["path"] == "/":  # it comes whole
                message["body"] = re.sub(FOREIGN, lambda found: b" " * len(found[0]), message.get("body", b""))
            await send(message)

        await self.app(scope, receive, sent)
