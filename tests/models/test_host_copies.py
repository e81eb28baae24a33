"""No model copies from the host in a step: the device would wait for it, and a CUDA graph cannot hold it."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cutslots.models.discovery import build
from cutslots.training.losses import LOSSES
from cutslots.training.presets import PRESETS


class LiteralTensors(TorchDispatchMode):
    """Counts the tensors that are made of Python's numbers: `torch.tensor`, `new_tensor`."""

    count = 0

    def __torch_dispatch__(self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function is torch.ops.aten.lift_fresh.default
        return function(*args, **(kwargs or {}))


def test_literal_tensors_are_counted():
    with LiteralTensors() as found:
        torch.zeros(2).new_tensor([1.0, 2.0])
        torch.zeros(2).new_full((2,), 1.0)
    assert found.count == 1


@pytest.mark.parametrize("name", ["ours", "clevrtex", "graph-ocl", "movi", "ours-video"])
def test_steps_make_no_tensors_of_numbers(name):
    preset = PRESETS[name]
    config = replace(preset.model, image_size=(64, 64))
    model, loss = build(config), LOSSES.build(preset.loss)
    image = torch.randint(0, 256, (2, *([config.frames] if config.frames > 1 else []), 3, 64, 64), dtype=torch.uint8)
    step = torch.zeros((), dtype=torch.int64)
    with LiteralTensors() as found:
        loss.in_phase(model(image), image, step, loss.phase(0)).loss.backward()
    assert found.count == 0
