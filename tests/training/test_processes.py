"""Runs of several processes and nodes."""

import os
import re
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest
import torch

from cutslots.models.checkpoints import load
from cutslots.models.discovery import build
from cutslots.training import loop
from cutslots.training.loop import train
from tests.small_runs import (
    FORKED,
    Command,
    free_port,
    line_kinds,
    lines,
    sentence,
    small,
    state,
    train_command,
    two,
    weights,
)

STRICT = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error::DeprecationWarning,error::FutureWarning"}


def flat(model):
    return torch.nn.utils.parameters_to_vector(model.parameters())


def test_two_processes_learn_what_one_learns(tmp_path):
    one, both = train(small(tmp_path / "one", max_steps=20)), tmp_path / "two"
    command = [sys.executable, "-m", "cutslots", *train_command(both, max_steps=20, devices=2)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | STRICT)
    assert done.returncode == 0, done.stderr
    assert line_kinds(one) == line_kinds(both)
    for a, b in zip(lines(one), lines(both), strict=True):
        if "loss" in a:
            assert [b["loss"], b["grad_norm"]] == pytest.approx([a["loss"], a["grad_norm"]], rel=1e-4)
        else:
            assert b["val"]["mse"] == pytest.approx(a["val"]["mse"], rel=1e-4)
    a, b = (flat(load(folder)) for folder in (one, both))
    torch.manual_seed(0)
    start = flat(build(small(one).model))
    torch.testing.assert_close(b, a, rtol=1e-4, atol=2e-4)
    assert (b - a).norm() < 1e-3 * (a - start).norm()  # Adam enlarges gradients that are rounding errors
    train(small(both, max_steps=24))  # one process resumes a run of two
    assert state(both)["step"] == 24


def test_two_processes_learn_the_labels_that_one_learns(tmp_path):
    teacher = train(small(tmp_path / "teacher", max_steps=2))
    options = {"max_steps": 6, "teacher": str(teacher), "loss__label_weight": 0.1, "cache_dir": str(tmp_path / "cache")}
    one, both = train(small(tmp_path / "one", **options)), tmp_path / "two"
    (labels,) = (tmp_path / "cache").glob("labels-*.npz")
    labels.unlink()  # one of the two processes labels again
    command = [sys.executable, "-m", "cutslots", *train_command(both, **options, devices=2)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | STRICT)
    assert done.returncode == 0 and labels.is_file(), done.stderr
    losses = [[line["loss"] for line in lines(folder) if "loss" in line] for folder in (one, both)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


def test_two_processes_refuse_another_run_in_one_sentence(run, tmp_path):
    command = Command(train_command(run, max_steps=8, devices=2, lr=0.5), tmp_path / "log")
    assert command.end() == 1 and re.fullmatch(r"cutslots: .*\(differing in lr\).*\n", command.said()), command.said()


def test_two_processes_stop_at_a_loss_that_is_not_finite(tmp_path):
    commands = two(train_command(tmp_path / "run", devices=2, lr=60_000, grad_clip=0), tmp_path)
    statuses = [command.end() for command in commands]
    said = "".join(command.said() for command in commands)
    assert 0 not in statuses and re.search(r"the .* is (nan|inf) at step \d+; ", said) and "Traceback" not in said


# ------------------------------------------------------------------------------------------------------------ two nodes


def torchrun(words, log):
    """torchrun itself, in a process that has torch already."""
    os.environ.update(STRICT)
    with log.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    from torch.distributed import run

    run.main(words)


def two_nodes(words, folder):
    """Start the command by torchrun on two nodes of one process each. Its output is in folder/NODE/."""
    port, agents = str(free_port()), []
    for node in ("0", "1"):
        logs = folder / node
        logs.mkdir(parents=True)
        nodes = ["--nnodes", "2", "--nproc-per-node", "1", "--node-rank", node]
        nodes += ["--master-addr", "127.0.0.1", "--master-port", port, "--log-dir", str(logs), "--redirects", "3"]
        arguments = ([*nodes, "-m", "cutslots", *words], folder / f"torchrun{node}.log")
        agents.append(FORKED.Process(target=torchrun, args=arguments))
        agents[-1].start()
    return agents


def end(agents):
    """Return the exit statuses. Agents that do not end are killed."""
    for agent in agents:
        agent.join(120)
        agent.kill()
        agent.join()
    return [agent.exitcode for agent in agents]


def logged(folder):
    return "".join(path.read_text() for path in sorted(folder.rglob("*.log")))


def test_two_nodes_of_which_one_is_killed_resume_to_the_same_weights(tmp_path):
    """In the end the weights have the bytes of a run of two processes that was left alone."""
    folder, options = tmp_path / "run", {"num_nodes": 2, "eval_every": 10**6, "num_eval_images": 2}
    agents = two_nodes(train_command(folder, max_steps=10**6, **options), tmp_path / "killed")
    while not (folder / "model.safetensors").exists() and all(agent.is_alive() for agent in agents):
        time.sleep(0.01)
    (worker,) = Path(f"/proc/{agents[1].pid}/task/{agents[1].pid}/children").read_text().split()
    os.kill(int(worker), signal.SIGKILL)
    assert 0 not in end(agents)
    said = logged(tmp_path / "killed" / "0")
    lost = "cutslots: process 0 of 2 lost the others, which ended or cannot be reached; run the same command again, "
    assert f"{lost}on every node, to resume from {folder}\n" in said and "Traceback" not in said, said

    steps = state(folder)["step"] + 4
    alone = two(train_command(tmp_path / "alone", max_steps=steps, **options), tmp_path)
    assert end(two_nodes(train_command(folder, max_steps=steps, **options), tmp_path / "resumed")) == [0, 0]
    said = logged(tmp_path / "resumed")
    assert f"resuming after step {steps - 4}" in said and not re.search("warning", said, re.IGNORECASE), said
    assert [command.end() for command in alone] == [0, 0], alone[0].said()
    assert weights(folder) == weights(tmp_path / "alone") and line_kinds(folder) == line_kinds(tmp_path / "alone")


def test_the_second_node_does_not_touch_the_folder(tmp_path, monkeypatch):
    def connect(*_):
        raise ConnectionError

    monkeypatch.setenv("NODE_RANK", "1")
    monkeypatch.setattr(loop, "make_fabric", connect)
    with pytest.raises(ConnectionError):
        train(small(tmp_path / "run", num_nodes=2))
    assert not (tmp_path / "run").exists()


def test_batch_size_is_a_multiple_of_the_processes(tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "make_fabric", lambda *_: types.SimpleNamespace(world_size=3, global_rank=0))
    said = sentence(monkeypatch, train_command(tmp_path / "run", devices=3))
    assert said == "cutslots: batch_size is 4; expected a multiple of the 3 processes"


def test_batch_normalisation_needs_one_process_or_cuda(tmp_path):
    fabric = types.SimpleNamespace(world_size=2, device=torch.device("cpu"))
    config = small(tmp_path / "run", encoder="resnet", encoder__kernel_sizes=(3, 3), encoder__batch_norm=True)
    with pytest.raises(ValueError, match=r"^batch normalisation needs one process or CUDA: "):
        loop._prepare_model(config, tmp_path / "run", fabric)
    fabric.world_size = 1
    loop._prepare_model(config, tmp_path / "run", fabric)
