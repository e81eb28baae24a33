"""Curves for TensorBoard, on disk as soon as they are written.

The writer of tensorboardX is a thread that buffers for minutes. A full disk ends it, and the next write waits forever.
So its file format is used here, and its thread is not.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any

import numpy as np
from tensorboardX import summary
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog

from cutslots.files import errors_name_path


class TensorBoardWriter:
    """Writes event files to a folder. A run resumed after step `first` discards what was written after it."""

    def __init__(self, folder: Path, first: int) -> None:
        self.folder = folder
        with errors_name_path(folder):
            folder.mkdir(exist_ok=True)
            self.writer = EventsWriter(str(folder / "events"))
        self._write(Event(step=first + 1, session_log=SessionLog(status=SessionLog.START)))

    def scalars(self, step: int, values: dict[str, float]) -> None:
        self._write(*(Event(step=step, summary=summary.scalar(name, value)) for name, value in values.items()))

    def image(self, step: int, name: str, value: np.ndarray) -> None:
        self._write(Event(step=step, summary=summary.image(name, value, dataformats="HWC")))

    def _write(self, *events: Any) -> None:
        """Write events, and wait for the disk once."""
        with errors_name_path(self.folder):
            for event in events:
                event.wall_time = time.time()
                self.writer.write_event(event)
            self.writer.flush()

    def close(self) -> None:
        with contextlib.suppress(OSError):  # a full disk was reported by the write
            self.writer.close()
