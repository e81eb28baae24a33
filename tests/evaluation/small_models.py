"""Untrained models for tests of evaluation, small enough to run in milliseconds."""

from pathlib import Path

import torch

from cutslots.models.discovery import build
from tests.small_runs import small

KINDS = {
    "images": {"model": "discovery"},
    "attention": {"slots": "slot-attention"},
    "pairs": {},
    "spacetime": {"model": "spacetime-discovery", "slots__partition": "spacetime-cut"},
}


def small_model(kind):
    """Return a model for images of 16 x 16 pixels, or for videos of such frames, with three slots."""
    torch.manual_seed(0)
    return build(small(Path("unused"), "movi", **KINDS[kind]).model).eval()
