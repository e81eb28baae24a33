"""Curves for TensorBoard, on disk as soon as they are told.

tensorboardX's own writer is a thread that keeps things for minutes, and that a full disk ends, whereupon the next to
write waits for ever. Its file format is kept, the thread is not.
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

from cutslots.disk import naming


class Board:
    """A folder of TensorBoard's; a run that goes on after step `first` voids what was written beyond it."""

    def __init__(self, folder: Path, first: int) -> None:
        self.folder = folder
        with naming(folder):
            folder.mkdir(exist_ok=True)
            self.writer = EventsWriter(str(folder / "events"))
        self._write(step=first + 1, session_log=SessionLog(status=SessionLog.START))

    def scalars(self, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self._write(step=step, summary=summary.scalar(name, value))

    def image(self, step: int, name: str, value: np.ndarray) -> None:
        self._write(step=step, summary=summary.image(name, value, dataformats="HWC"))

    def _write(self, **values: Any) -> None:
        with naming(self.folder):
            self.writer.write_event(Event(wall_time=time.time(), **values))
            self.writer.flush()

    def close(self) -> None:
        with contextlib.suppress(OSError):  # what did not fit was told when it was written
            self.writer.close()
