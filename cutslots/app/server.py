"""The HTTP server of the page: by default reachable from this machine only, and never contacts another host."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cutslots.app.discovery_tab import checkpoint_choices
from cutslots.app.events import import_gradio
from cutslots.app.page import build_page
from cutslots.app.security import MAX_UPLOAD, RequestGuard, is_loopback
from cutslots.app.sessions import bound_sessions
from cutslots.devices import resolve_device
from cutslots.registry import load_plugins

MAX_UPLOAD_AGE = 600  # seconds that an uploaded file which was not opened stays on disk

SUBDUED = ("body_text_color_subdued", "block_info_text_color", "block_label_text_color")

# Gradio's default gray has too little contrast to be readable.
TEXT_COLORS = dict.fromkeys(SUBDUED, "*neutral_600") | {f"{name}_dark": "*neutral_300" for name in SUBDUED}


def serve(
    checkpoints: Sequence[str] = (),
    host: str = "127.0.0.1",
    port: int = 7860,
    device: str = "auto",
    plugins: Sequence[str | Path] = (),
) -> None:
    """Serve the page until interrupted. All files are written to a temporary folder, which is removed at the end.

    Args:
        checkpoints: Names or paths of checkpoints to offer besides the shipped ones.
        host: Address to listen on. If other machines can reach it, visitors may not enter paths of checkpoints.
            Requests that name another host are refused.
        port: Port to listen on; 0 takes any free one.
        device: Device of the models, such as "cpu" or "cuda:1"; "auto" is CUDA where available.
        plugins: Python files or modules to import first, for checkpoints that use their parts.
    """
    load_plugins(plugins)
    port = free_port(host, port)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # stops the server as Ctrl+C does
    with tempfile.TemporaryDirectory(prefix="cutslots-app-", ignore_cleanup_errors=True) as folder:
        uploads = Path(folder) / "uploads"
        os.environ |= {"GRADIO_TEMP_DIR": str(uploads), "MPLCONFIGDIR": folder}  # Gradio imports Matplotlib
        import_gradio()  # raises before a model is loaded
        page = build_page(checkpoint_choices(checkpoints), is_loopback(host), str(resolve_device(device)))
        _launch(page, host, port, uploads)
        try:
            print(f"cutslots: serving at {url(host, port)} (press Ctrl+C to stop)", flush=True)
            while True:
                time.sleep(60)
                remove_old_files(uploads, time.time() - MAX_UPLOAD_AGE)
        except KeyboardInterrupt:
            print("cutslots: stopped", file=sys.stderr)
        finally:
            page.close(verbose=False)


def _launch(page: Any, host: str, port: int, uploads: Path) -> None:
    """Start serving in a thread, with everything off that publishes the page or documents an API."""
    fonts = {"font": ("system-ui", "sans-serif"), "font_mono": ("ui-monospace", "monospace")}
    no_docs = {"docs_url": None, "redoc_url": None, "openapi_url": None}
    guard = (RequestGuard, (), {"host": host, "port": port, "uploads": uploads})
    page.launch(
        server_name=f"[{host}]" if ":" in host else host,
        server_port=port,
        theme=import_gradio().themes.Default(primary_hue="blue", **fonts).set(**TEXT_COLORS),
        max_file_size=MAX_UPLOAD,
        app_kwargs={"middleware": [guard], **no_docs},
        footer_links=[],
        quiet=True,
        prevent_thread_lock=True,
        share=False,
        ssr_mode=False,
        mcp_server=False,
        enable_monitoring=False,
    )
    bound_sessions(page.app.state_holder)


def url(host: str, port: int) -> str:
    """Return the address of the page; IPv6 hosts are put in brackets."""
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def free_port(host: str, port: int) -> int:
    """Return the port, or any free one if it is 0. Raises ValueError if it cannot be listened on."""
    if not 0 <= port < 2**16:
        raise ValueError(f"port is {port}; expected an integer from 0 to 65535")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.create_server((host, port), family=family) as probe:
            return int(probe.getsockname()[1])
    except OSError as error:
        raise ValueError(f"cannot listen on {host}:{port} ({error}); choose another --host or --port") from None


def remove_old_files(folder: Path, before: float) -> None:
    """Remove files and empty folders last modified before a time, in seconds since the epoch."""
    for path in sorted(folder.rglob("*"), reverse=True):
        with contextlib.suppress(OSError):  # a folder is not empty, or a file was removed meanwhile
            if path.stat().st_mtime < before:
                path.rmdir() if path.is_dir() else path.unlink()
