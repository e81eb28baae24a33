"""Runs small enough for tests: one set of numbers for the library, for the command line and for processes to kill."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import resource
import socket
import sys
import time
from pathlib import Path

import pytest
import torch
from lightning_fabric.utilities.rank_zero import rank_zero_only

from cutslots import cli
from cutslots.presets import PRESETS, TrainConfig

MODEL = {
    "size": 16,
    "slots": 3,
    "slot_dim": 16,
    "module": "cut",
    "encoder_maps": 8,
    "encoder_kernels": (3,),
    "weight_maps": 8,
    "weight_kernels": (3,),
    "feature_maps": 16,
    "hidden": 16,
    "decoder_maps": (8,),
}
RUN = {
    "images": 24,
    "batch": 4,
    "steps": 48,
    "eval_every": 8,
    "eval_images": 8,
    "save_minutes": 0.0,  # after every step
    "accelerator": "cpu",
}

# Python and torch are loaded once; every process that is to be killed is a fork of that one.
FORKED = multiprocessing.get_context("forkserver")
FORKED.set_forkserver_preload(["cutslots.train", "cutslots.evaluate", "tensorboardX", "tests.small_runs"])


def small(out: Path, **changes) -> TrainConfig:
    values = MODEL | RUN | changes
    model = dataclasses.replace(PRESETS["tiny"].model, **{k: v for k, v in values.items() if k in MODEL})
    rest = {k: v for k, v in values.items() if k not in MODEL}
    return dataclasses.replace(PRESETS["tiny"], model=model, out=out, **rest)


def train_command(out: Path, **changes) -> list[str]:
    """The command that runs `small(out, **changes)`."""
    words = ["train", "tiny", "--out", str(out)]
    for name, value in (MODEL | RUN | changes).items():
        words.append("--" + name.replace("_", "-"))
        words += [] if value is True else map(str, value) if isinstance(value, tuple) else [str(value)]
    return words


def _in_process(words: list[str], log: Path, environment: dict[str, str], largest: int | None) -> None:
    torch.set_num_threads(1)
    os.environ.update(environment)
    rank_zero_only.rank = int(environment.get("RANK", 0))  # Lightning looked before the fork
    if largest:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest, largest))
    with log.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.argv = ["cutslots", *words]
    cli.main()


class Command:
    """`cutslots` with these words in a process of its own. `largest` is the most bytes a file may have."""

    def __init__(self, words: list[str], log: Path, environment: dict[str, str] | None = None, largest: int = 0):
        self.log = log
        self.process = FORKED.Process(target=_in_process, args=(words, log, environment or {}, largest))
        self.process.start()

    def wait_for(self, condition) -> None:
        while not condition() and self.process.exitcode is None:
            time.sleep(0.002)

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def end(self, seconds: float = 120) -> int:
        """The exit status; a process that does not end is killed, whose status is -9."""
        self.process.join(seconds)
        self.process.kill()
        self.process.join()
        return self.process.exitcode

    def said(self) -> str:
        return self.log.read_text()


def two(words: list[str], folder: Path) -> list[Command]:
    """The command as two processes that torchrun would start."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "0",
        "TORCHELASTIC_RUN_ID": "none",
    }
    return [
        Command(words, folder / f"{rank}.log", common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in (0, 1)
    ]


def sentence(monkeypatch, words: list[str]) -> str:
    """What the command says when it refuses: one line, and an exit status that is not zero."""
    monkeypatch.setattr(sys, "argv", ["cutslots", *words])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    said = caught.value.code  # text given to sys.exit goes to standard error, and the status is 1
    assert isinstance(said, str) and said.startswith("cutslots: ") and "\n" not in said
    return said


def lines(folder: Path) -> list[dict]:
    file = folder / "metrics.jsonl"
    return [json.loads(line) for line in file.read_bytes().splitlines()] if file.exists() else []


def weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()
