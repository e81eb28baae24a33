"""The associations of slots over time, listed once. The command line shows them, so this module does not import torch.

`tracker.py` implements them; a model lists those it supports in `associations`.
"""

from __future__ import annotations

from typing import Literal

Association = Literal["area", "learned", "hungarian", "overlap"]
