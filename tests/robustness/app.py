"""Simulated users of `cutslots app`, speaking its page's protocol: they use every control, in any order."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tests.robustness.images import gray_png, intact_files


class Server:
    def __init__(self, address: str, process: subprocess.Popen, log: Path) -> None:
        self.address, self.process, self.log = address, process, log

    def memory(self) -> int:
        """Return the memory of the server in bytes."""
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def faults(self) -> list[str]:
        """Return the errors in its log, except Gradio's own, which are of values that no user can enter."""
        found = re.findall(r"(?m)^[\w.]*(?:Error|Exception)\b.*", self.log.read_text())
        return sorted({line for line in found if not line.startswith("gradio.exceptions.Error: ")})

    def ask(self, path: str, data: bytes | None = None, kind: str = "application/json") -> Any:
        request = urllib.request.Request(self.address + path, data, {"Content-Type": kind})
        return urllib.request.urlopen(request, timeout=120)


@contextlib.contextmanager
def serve(log: Path) -> Iterator[Server]:
    command = [sys.executable, "-m", "cutslots", "app", "--port", "0", "--device", "cpu"]
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=file, text=True)
    try:
        assert process.stdout
        found = re.search(r"http://127\.0\.0\.1:\d+", process.stdout.readline())
        assert found, log.read_text()
        yield Server(found[0], process, log)
    finally:
        process.terminate()  # a process in the background may ignore SIGINT
        process.wait(30)


class User:
    """One page in one browser. It keeps the values that the page shows and sends them with every request."""

    def __init__(self, server: Server, rng: np.random.Generator) -> None:
        self.server, self.rng, self.session = server, rng, uuid.uuid4().hex[:11]
        config = json.load(server.ask("/config"))
        self.prefix = config.get("api_prefix", "")
        self.parts = {each["id"]: each for each in config["components"]}
        self.shown = {name: each["props"].get("value") for name, each in self.parts.items()}
        self.events = [each for each in config["dependencies"] if each["backend_fn"]]

    def do_anything(self) -> bool:
        """Click, slide or upload something; return False if the server answered with an error."""
        event = self.events[self.rng.integers(len(self.events))]
        for name in event["inputs"]:
            self.shown[name] = self._choose_value(self.parts[name])
        seen = {"slot": int(self.rng.integers(4)), "x": 5, "y": 5, "marks": ""}
        asked = {"data": [self.shown[name] for name in event["inputs"]], "fn_index": event["id"], "event_data": seen}
        asked |= {"session_hash": self.session, "trigger_id": event["targets"][0][0]}
        self.server.ask(f"{self.prefix}/queue/join", json.dumps(asked).encode()).read()
        with self.server.ask(f"{self.prefix}/queue/data?session_hash={self.session}") as answers:
            for line in answers:
                said = json.loads(line[5:]) if line.startswith(b"data:") else {}
                if said.get("msg") == "process_completed":
                    return bool(said["success"])
        return False

    def _choose_value(self, part: dict[str, Any]) -> Any:
        """Return another value of a component, as a user would enter it."""
        props, rng = part["props"], self.rng
        if part["type"] in ("slider", "number"):
            low, high = props.get("minimum") or 0, min(props.get("maximum") or 100, 1000)
            value = rng.uniform(low, high)
            return int(value) if props.get("step") == 1 or props.get("precision") == 0 else round(value, 2)
        if part["type"] in ("radio", "dropdown"):
            return props["choices"][rng.integers(len(props["choices"]))][1] if rng.random() < 0.95 else "no such thing"
        if part["type"] == "checkboxgroup":
            return [str(k) for k in range(4) if rng.random() < 0.4]
        if part["type"] in ("file", "uploadbutton"):
            return self._upload()
        if isinstance(self.shown[part["id"]], dict) and "strokes" in self.shown[part["id"]]:
            return self.shown[part["id"]] | {"strokes": self._draw(self.shown[part["id"]])}
        return None if part["type"] == "state" else self.shown[part["id"]]

    def _draw(self, canvas: dict[str, Any]) -> list[Any]:
        """Return strokes on a canvas; some are what no page sends."""
        rng, size = self.rng, (canvas["width"], canvas["height"])
        strokes: list[Any] = []
        for _ in range(rng.integers(12)):
            points = rng.uniform(0, 1, (rng.integers(1, 30), 2)) * size
            strokes.append([int(rng.integers(7)), int(rng.integers(1, 60)), *points.round(1).ravel().tolist()])
        wrong = [[9, 5, 1, 1], [1, 5, -3, 1], [1, 5, 1], "stroke", None, [1, 1e300, 1, 1], [1, 5] + [1] * 90_000]
        return strokes + ([wrong[rng.integers(len(wrong))]] if rng.random() < 0.1 else [])

    def _upload(self) -> dict[str, Any]:
        """Upload a file of any kind, intact or truncated."""
        files = intact_files(self.rng) | {
            "large.png": gray_png(3000, 2000),
            "text.png": b"none",
            "video.gif": b"GIF89a",
        }
        name = str(self.rng.choice(list(files)))
        data = files[name] if self.rng.random() < 0.7 else files[name][: len(files[name]) // 2]
        mark = uuid.uuid4().hex
        head = f'--{mark}\r\nContent-Disposition: form-data; name="files"; filename="{name}"\r\n'
        body = f"{head}Content-Type: application/octet-stream\r\n\r\n".encode() + data + f"\r\n--{mark}--\r\n".encode()
        kind = f"multipart/form-data; boundary={mark}"
        path = json.load(self.server.ask(f"{self.prefix}/upload", body, kind))[0]
        return {"path": path, "orig_name": name, "size": len(data), "meta": {"_type": "gradio.FileData"}}
