"""The steps of the training loop."""

import pytest
import torch

from cutslots.models.checkpoints import load
from cutslots.models.discovery import build
from cutslots.training.loop import train
from tests.small_runs import small

ADAM_EPSILON = 1e-8  # torch's default


def largest_moves(config):
    """Return how far a run moves each parameter, in learning rates."""
    torch.manual_seed(config.seed)
    before = dict(build(config.model).named_parameters())
    after = load(train(config)).named_parameters()
    return {name: (value - before[name]).abs().max().item() / config.lr for name, value in after}


def test_gradients_are_clipped(tmp_path):
    """The first step of Adam is lr g / (|g| + epsilon), so gradients far below epsilon hardly move the weights."""
    moves = largest_moves(small(tmp_path / "run", max_steps=1, warmup_steps=0, grad_clip=0.01 * ADAM_EPSILON))
    assert 0 < max(moves.values()) <= 0.01


def test_without_clipping_gradients_keep_their_norm(tmp_path):
    moves = largest_moves(small(tmp_path / "run", max_steps=1, warmup_steps=0, grad_clip=0.0))
    assert moves == {name: pytest.approx(1.0, rel=0.05) for name in moves}
