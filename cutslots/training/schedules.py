"""Schedules: the learning rate and the strength of textures by step."""

from __future__ import annotations

from cutslots.data.builtin import TexturedSceneConfig
from cutslots.scenes.dataset import FLAT_STRENGTH
from cutslots.training.config import RunConfig

STRENGTH_SPAN = 0.3  # width of the range that the textures of a batch are sampled from


def learning_rate(config: RunConfig, step: int) -> float:
    """Return the learning rate: a linear warm-up, then exponential decay."""
    warmup = min(1.0, (step + 1) / max(config.warmup_steps, 1))
    return config.lr * warmup * config.lr_decay ** (step / config.lr_decay_steps)


def has_flat_textures(data: TexturedSceneConfig, step: int) -> bool:
    """Return whether the texture ramp has not begun."""
    return step < min(data.texture_ramp_start, data.texture_ramp_end)


def texture_range(data: TexturedSceneConfig, step: int) -> tuple[float, float]:
    """Return the smallest and largest strength of textures: nearly flat at first, then a linear ramp."""
    risen = (step - data.texture_ramp_start) / max(data.texture_ramp_end - data.texture_ramp_start, 1)
    high = FLAT_STRENGTH + (1 - FLAT_STRENGTH) * min(1.0, max(0.0, risen))
    return max(0.0, high - STRENGTH_SPAN), high
