"""`RunLogger`: progress, metrics.jsonl, TensorBoard, visualisations, checkpoints and the report of a run."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning_fabric import Fabric
from PIL import Image
from torch import Tensor

from cutslots.dataset import Dataset
from cutslots.evaluation.evaluate import evaluate_model
from cutslots.evaluation.visualize import visualization_grid, visualize_images
from cutslots.files import append_line, progress, read_lines, write_atomically
from cutslots.models.checkpoints import save
from cutslots.training.config import RunConfig
from cutslots.training.report import write_training_report
from cutslots.training.run_folder import save_state
from cutslots.training.tensorboard import TensorBoardWriter
from cutslots.viz.images import encode_png

LOG_EVERY = 20  # steps between lines of metrics.jsonl; reading the loss more often would make the device wait
NUM_SHOWN, NUM_REPORTED = 4, 8  # images in a visualisation of a step, and in the report


class RunLogger:
    """Writes what a run produces. Only process 0 writes; all processes take part in evaluation."""

    def __init__(self, folder: Path, config: RunConfig, fabric: Fabric, state: dict[str, Any]) -> None:
        self.folder, self.config, self.fabric, self.first_step = folder, config, fabric, state["step"]
        self.writes = fabric.global_rank == 0
        self.saved_at = self.logged_at = time.monotonic()
        self.logged_step = state["step"]
        self.newest: dict[str, float] = {}  # validation metrics
        self.recent: list[Tensor] = []  # loss and gradient norm of steps since the last line, on the device
        self.speed = 0.0
        self.bar = progress(not self.writes, "{task.fields[status]}")
        if self.writes:
            self._drop_lines_after(state["step"])
            (folder / "visualizations").mkdir(exist_ok=True)

    def __enter__(self) -> None:
        self.bar.start()
        total = self.config.max_steps
        self.task = self.bar.add_task(self.config.preset, total=total, completed=self.first_step, status="")
        if self.writes:
            self.tensorboard = TensorBoardWriter(self.folder / "tensorboard", self.first_step)
            if self.first_step:
                self.bar.console.print(f"resuming after step {self.first_step}")

    def __exit__(self, *_: object) -> None:
        self.bar.stop()
        if self.writes:
            self.tensorboard.close()

    def _drop_lines_after(self, step: int) -> None:
        """Drop lines that a killed run wrote after its newest state: those steps are repeated."""
        kept = [line for line in read_lines(self.folder / "metrics.jsonl") if line.get("step", 0) <= step]
        if (self.folder / "metrics.jsonl").exists():
            write_atomically(self.folder / "metrics.jsonl", b"".join(json.dumps(x).encode() + b"\n" for x in kept))
        for line in kept:
            self.newest = line.get("val", self.newest)

    def record(self, loss: Tensor, norm: Tensor | None) -> None:
        """Keep the loss and the gradient norm of a step on the device, without waiting for it."""
        self.recent.append(torch.stack([loss.detach(), loss.detach() if norm is None else norm.detach()]))

    def losses(self, step: int, seconds: float, lr: float) -> None:
        """Write the mean loss since the last line."""
        self.check_finite(step)
        rows = torch.stack(self.recent).mean(0)
        if self.fabric.world_size > 1:
            rows = torch.as_tensor(self.fabric.all_reduce(rows, reduce_op="mean"))
        loss, norm = rows.tolist()
        now = time.monotonic()
        images = (step - self.logged_step) * self.config.batch_size * self.config.frames
        self.speed = images / max(now - self.logged_at, 1e-9)
        self.logged_step, self.logged_at, self.recent = step, now, []
        curves = {"loss": loss, "grad_norm": norm, "lr": lr, "images_per_second": self.speed}
        self._write({"step": step, **curves, "seconds": round(seconds, 2)})
        if self.writes:
            self.tensorboard.scalars(step, {f"train/{name}": value for name, value in curves.items()})
        self.bar.update(self.task, completed=step, status=self._status(loss))

    def check_finite(self, step: int) -> None:
        """Raise if a loss or a gradient norm since the last line is not finite."""
        values = torch.stack(self.recent).tolist() if self.recent else []
        for i, (loss, norm) in enumerate(values, start=step - len(values) + 1):
            if not (math.isfinite(loss) and math.isfinite(norm)):
                state = self.folder / "state.pt"
                saved = f"the last good state is {state}" if state.exists() else "no state was saved before"
                what = f"loss is {loss}" if not math.isfinite(loss) else f"gradient norm is {norm}"
                raise ValueError(f"the {what} at step {i}; {saved}; try a lower --lr")

    def _status(self, loss: float) -> str:
        metric = f"  ARI-FG {100 * self.newest['ari_fg']:.1f}" if "ari_fg" in self.newest else ""
        return f"loss {loss:.5f}  {self.speed:.0f} images/s{metric}"

    def evaluate(self, step: int, model: Any, data: Dataset) -> None:
        """Evaluate on the validation data; write metrics and a visualisation."""
        self.check_finite(step)
        started = time.monotonic()
        self.newest = self.measure(model, data)
        if self.writes:
            self._write({"step": step, "val": self.newest})
            self.tensorboard.scalars(step, {f"val/{name}": value for name, value in self.newest.items()})
            grid = self.visualize(model, data)
            write_atomically(self.folder / "visualizations" / f"step_{step:07d}.png", encode_png(grid))
            self.tensorboard.image(step, "visualizations", np.asarray(grid))
            self.bar.console.print(f"step {step}: {self.describe()}", highlight=False)
        self.logged_at += time.monotonic() - started  # the speed is that of training

    def measure(self, model: Any, data: Dataset) -> dict[str, float]:
        """Return the validation metrics, gathered from all processes."""
        return evaluate_model(model, data, self.fabric).means()

    def visualize(self, model: Any, data: Dataset) -> Image.Image:
        """Return what the model makes of a few validation images."""
        return visualization_grid(visualize_images(model, data, NUM_SHOWN, self.fabric))

    def describe(self) -> str:
        """Return the newest validation metrics in a few words."""
        shown = [("ARI-FG", "ari_fg"), ("mIoU", "miou")] if "ari_fg" in self.newest else []
        metrics = "".join(f"{name} {100 * self.newest[key]:.1f}  " for name, key in shown)
        error = f"MSE {self.newest['mse']:.1f}" if "mse" in self.newest else _feature_error(self.newest)
        return f"{metrics}{error}"

    def _write(self, line: dict[str, Any]) -> None:
        if self.writes:
            append_line(self.folder / "metrics.jsonl", json.dumps(line).encode())

    def checkpoint_due(self, step: int) -> bool:
        """Return whether it is time to save. Process 0 saves by the clock, since a state is exact after any step.

        Several processes save only when they log: then all of them find a loss that is not finite.
        """
        if self.fabric.world_size > 1 and step % LOG_EVERY:
            return False
        return self.writes and time.monotonic() - self.saved_at > 60 * self.config.checkpoint_minutes

    def save(self, model: Any, optimizer: Any, state: dict[str, Any]) -> None:
        """Save the training state and the checkpoint. The state is first: weights without one cannot be resumed."""
        self.check_finite(state["step"])
        if self.writes:
            inner = getattr(optimizer, "optimizer", optimizer)
            save_state(self.folder / "state.pt", model, inner, state)
            self.save_checkpoint(model)
        self.saved_at = time.monotonic()

    def save_checkpoint(self, model: Any) -> None:
        """Write config.json and model.safetensors."""
        save(model, self.folder)

    def finish(self, model: Any, data: Dataset) -> Path:
        """Write the report and return the run folder."""
        if self.writes:
            self.save_checkpoint(model)  # again, for a run that was killed between its last state and its weights
            self.write_report(model, data)
            print(f"wrote {self.folder / 'model.safetensors'} and {self.folder / 'report.html'}")
        return self.folder

    def write_report(self, model: Any, data: Dataset) -> None:
        """Write report.html."""
        shown = visualize_images(model, data, NUM_REPORTED, self.fabric)
        write_training_report(self.folder, self.config, len(data), shown, self.fabric)


def _feature_error(means: dict[str, float]) -> str:
    return f"feature MSE {means['feature_mse']:.4f}"
