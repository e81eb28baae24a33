"""Runs small enough for tests: one set of options for the library, for the command line and for processes to kill."""

from __future__ import annotations

import dataclasses
import functools
import json
import multiprocessing
import os
import resource
import runpy
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning_fabric.utilities.rank_zero import rank_zero_only

from cutslots import cli
from cutslots.models.checkpoints import load
from cutslots.registry import REGISTRIES, Part, deferred_validation
from cutslots.training.config import PretrainConfig, TrainConfig
from cutslots.training.options import parse_pretrain, parse_train

# Options by name; "slots__mlp_dim" is --slots.mlp-dim.
MODEL: dict[str, Any] = {
    "image_size": (16, 16),
    "encoder__channels": 8,
    "encoder__kernel_sizes": (3,),
    "slots__num_slots": 3,
    "slots__slot_dim": 16,
    "slots__feature_dim": 16,
    "slots__mlp_dim": 16,
    "slots__partition__edge_net_channels": 8,
    "slots__partition__edge_net_kernel_sizes": (3,),
    "decoder__channels": (8,),
}
RUN: dict[str, Any] = {
    "num_images": 24,
    "batch_size": 4,
    "max_steps": 48,
    "eval_every": 8,
    "num_eval_images": 8,
    "checkpoint_minutes": 0.0,  # after every step
    "accelerator": "cpu",
}

PRETRAIN: dict[str, Any] = {
    "image_size": (16, 16),
    "encoder__channels": 8,
    "encoder__kernel_sizes": (3, 3),
    "encoder__pyramid_levels": 1,
    "objective__hidden_dim": 16,
    "objective__projection_dim": 8,
}

MASK_BIAS, QUERY_BIAS = "decoder.layers.0.bias", "slots.norm_slots.bias"  # see effective_weights

# Python and torch are loaded once; every process that is to be killed is a fork of that one.
FORKED = multiprocessing.get_context("forkserver")
FORKED.set_forkserver_preload(
    ["cutslots.training.pretrain", "cutslots.inference.track", "tensorboardX", "tests.small_runs"]
)


def small(out: Path | None, preset: str = "tiny", **changes: Any) -> TrainConfig:
    """Return the config of a small run, with these options changed. Without `out` it has the default run folder."""
    config = _parse(parse_train, tuple(train_command(None, preset, **changes)[1:]), _parts())
    return _with_folder(config, out)


def train_command(out: Path | None, preset: str = "tiny", **changes: Any) -> list[str]:
    """Return the words of the command that runs `small(out, preset, **changes)`."""
    values = MODEL | RUN | changes
    if values.get("slots") == "slot-attention":  # which has neither
        values = {k: v for k, v in values.items() if not k.startswith(("slots__partition", "slots__feature_dim"))}
    if values.get("encoder") in ("vit", "pretrained"):
        values = {k: v for k, v in values.items() if k not in ("encoder__channels", "encoder__kernel_sizes")}
    if values.get("decoder") in ("mlp", "transformer"):
        values = {k: v for k, v in values.items() if k != "decoder__channels"}
    return ["train", preset, *([] if out is None else ["--out", str(out)]), *option_words(values)]


def small_pretraining(out: Path | None, preset: str = "tiny", **changes: Any) -> PretrainConfig:
    """Return the config of a small run of `cutslots pretrain`, with these options changed."""
    config = _parse(parse_pretrain, tuple(pretrain_command(None, preset, **changes)[1:]), _parts())
    return _with_folder(config, out)


def pretrain_command(out: Path | None, preset: str = "tiny", **changes: Any) -> list[str]:
    """Return the words of the command that runs `small_pretraining(out, preset, **changes)`."""
    values = PRETRAIN | RUN | changes
    if values.get("objective", "simclr") != "simclr":
        values = {k: v for k, v in values.items() if k not in PRETRAIN or not k.startswith("objective__")}
    if values.get("encoder", "resnet") != "resnet":
        values = {k: v for k, v in values.items() if k not in PRETRAIN or not k.startswith("encoder__")}
    return ["pretrain", preset, *([] if out is None else ["--out", str(out)]), *option_words(values)]


@functools.cache
def _parse(parse: Callable[[Sequence[str]], Any], words: tuple[str, ...], parts: tuple[Part, ...]) -> Any:
    """Parse the same words once, as long as the same parts are registered: it takes a tenth of a second."""
    return parse(words)


def _parts() -> tuple[Part, ...]:
    return tuple(part for registry in REGISTRIES for part in registry.parts.values())


def _with_folder(config: Any, out: Path | None) -> Any:
    with deferred_validation():  # as the command line does
        return config if out is None else dataclasses.replace(config, out=out)


def option_words(values: dict[str, Any]) -> list[str]:
    """Return options as words of the command line."""
    words = []
    for name, value in values.items():
        path, _, option = name.replace("__", ".").replace("_", "-").rpartition(".")
        dotted = f"{path}." if path else ""
        if isinstance(value, bool):
            words.append(f"--{dotted}{'' if value else 'no-'}{option}")
        else:
            words += [f"--{dotted}{option}", *map(str, value if isinstance(value, tuple) else (value,))]
    return words


def _in_process(
    words: list[str], log: Path, environment: dict[str, str], largest: int | None, errors: Path | None
) -> None:
    torch.set_num_threads(1)
    os.environ.update(environment)
    rank_zero_only.rank = int(environment.get("RANK", 0))  # Lightning looked before the fork
    if largest:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest, largest))
    with log.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    if errors:
        with errors.open("wb") as file:
            os.dup2(file.fileno(), 2)
    sys.argv = ["cutslots", *words]
    cli.main()


class Command:
    """`cutslots` with these words in a process of its own. `largest` limits the size of its files, in bytes.

    The log holds what it prints; with a file for `errors`, standard error goes there instead.
    """

    def __init__(
        self,
        words: list[str],
        log: Path,
        environment: dict[str, str] | None = None,
        largest: int = 0,
        errors: Path | None = None,
    ):
        self.log = log
        self.process = FORKED.Process(target=_in_process, args=(words, log, environment or {}, largest, errors))
        self.process.start()

    def wait_for(self, condition) -> None:
        while not condition() and self.process.exitcode is None:
            time.sleep(0.002)

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def end(self, seconds: float = 120) -> int:
        """Return the exit status; a process that does not end is killed, with status -9."""
        self.process.join(seconds)
        self.process.kill()
        self.process.join()
        return self.process.exitcode

    def said(self) -> str:
        return self.log.read_text()


def _module_in_process(words: list[str], log: Path) -> None:
    torch.set_num_threads(1)
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.argv = words
    runpy.run_module(words[0], run_name="__main__", alter_sys=True)


class Module(Command):
    """`python -m` with these words in a process of its own, with the methods of `subprocess.Popen` for experiments."""

    def __init__(self, words: list[str], log: Path):
        log.parent.mkdir(parents=True, exist_ok=True)
        self.log = log
        self.process = FORKED.Process(target=_module_in_process, args=(words, log))
        self.process.start()

    @classmethod
    def start(cls, command: Sequence[str], log: Path, jobs: int) -> Module:
        """Start a command of `python -m`, as `experiments.jobs.start_process` does."""
        assert command[:2] == [sys.executable, "-m"]
        return cls(list(command[2:]), log)

    def poll(self) -> int | None:
        return self.process.exitcode

    def send_signal(self, number: int) -> None:
        self.signal(number)

    def wait(self, timeout: float | None = None) -> int:
        self.process.join(timeout)
        if self.process.exitcode is None:
            raise subprocess.TimeoutExpired(str(self.log), timeout or 0)
        return self.process.exitcode

    def kill(self) -> None:
        self.process.kill()


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def two(words: list[str], folder: Path) -> list[Command]:
    """Start the command as two processes, as torchrun starts them."""
    common = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "0",
        "TORCHELASTIC_RUN_ID": "none",
    }
    return [
        Command(words, folder / f"{rank}.log", common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in (0, 1)
    ]


def sentence(monkeypatch, words: list[str]) -> str:
    """Return the error message of a command: one line, and an exit status that is not zero."""
    monkeypatch.setattr(sys, "argv", ["cutslots", *words])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    message = caught.value.code  # text given to sys.exit goes to standard error, and the status is 1
    assert isinstance(message, str) and message.startswith("cutslots: ") and "\n" not in message
    return message


def lines(folder: Path) -> list[dict]:
    """Return the lines of metrics.jsonl."""
    file = folder / "metrics.jsonl"
    return [json.loads(line) for line in file.read_bytes().splitlines()] if file.exists() else []


def line_kinds(folder: Path) -> list[tuple[int, str]]:
    """Return the step of every line of metrics.jsonl, and whether it holds a loss or validation metrics."""
    return [(line["step"], "val" if "val" in line else "loss") for line in lines(folder)]


def state(folder: Path) -> dict[str, Any]:
    """Return the training state of a run."""
    return torch.load(folder / "state.pt", weights_only=True)


def effective_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Return the weights of a small run, to compare with those of another one, without those that have no effect.

    A softmax over slots cancels what shifts all slots alike: the bias of the mask logits, and that of the queries of
    Slot Attention. Their gradients are rounding errors, which Adam enlarges to whole steps.
    """
    state = load(folder).state_dict()
    state[MASK_BIAS] = state[MASK_BIAS].unflatten(0, (4, -1))[:3]  # red, green and blue; the fourth is the logit
    return {name: value for name, value in state.items() if name != QUERY_BIAS}


def weights(folder: Path) -> bytes:
    """Return the bytes of the newest weights of a run."""
    return (folder / "model.safetensors").read_bytes()
