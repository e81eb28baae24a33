"""The learning rate and the strength of textures by step."""

import dataclasses

import pytest

from cutslots.data.builtin import TexturedConfig
from cutslots.training.presets import PRESETS
from cutslots.training.schedules import learning_rate, texture_range


def test_learning_rate_warms_up_and_decays():
    config = dataclasses.replace(PRESETS["clevr"], lr=2.0, warmup_steps=4, lr_decay=0.5, lr_decay_steps=10)
    assert [learning_rate(config, step) for step in (0, 1, 3)] == pytest.approx([0.5, 2**-0.1, 2 * 2**-0.3])
    assert [learning_rate(config, step) for step in (10, 20, 35)] == pytest.approx([1.0, 0.5, 2 * 2**-3.5])


def test_learning_rate_without_warm_up():
    assert learning_rate(dataclasses.replace(PRESETS["clevr"], lr=2.0, warmup_steps=0), 0) == 2.0


def test_textures_ramp_up():
    data = TexturedConfig(texture_ramp_start=10, texture_ramp_end=30)
    ranges = [texture_range(data, step) for step in (0, 10, 20, 29)]
    assert ranges[:3] == [pytest.approx(x) for x in ((0, 0.15), (0, 0.15), (0.275, 0.575))]
    assert ranges[3] == pytest.approx((0.6575, 0.9575))


def test_a_ramp_of_no_steps_is_a_jump():
    data = TexturedConfig(texture_ramp_start=5, texture_ramp_end=5)
    assert texture_range(data, 4) == (0, 0.15)
    assert texture_range(data, 6) == (0.7, 1.0)


def test_textures_stay_at_full_strength_after_the_ramp():
    data = TexturedConfig(texture_ramp_start=10, texture_ramp_end=30)
    assert texture_range(data, 30) == texture_range(data, 1000) == (0.7, 1.0)
