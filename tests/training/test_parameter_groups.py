"""Parts that are frozen or trained at a learning rate of their own."""

from dataclasses import dataclass

import pytest
import torch

from cutslots.models.checkpoints import load
from cutslots.models.discovery import Discovery, build
from cutslots.modules.decoders import DECODERS, PixelShuffleConfig, PixelShuffleDecoder
from cutslots.modules.encoders import ENCODERS, CNNConfig, CNNEncoder
from cutslots.training.loop import parameter_groups, train
from tests.small_runs import small, weights

SCALE = 0.25


@dataclass(frozen=True)
class FrozenConfig(CNNConfig):
    pass


class FrozenEncoder(CNNEncoder):
    """A CNN that is not trained."""

    def __init__(self, **options):
        super().__init__(**options)
        self.requires_grad_(False)


@dataclass(frozen=True)
class SlowConfig(PixelShuffleConfig):
    pass


class SlowDecoder(PixelShuffleDecoder):
    """A decoder with a lower learning rate."""

    def parameter_groups(self):
        return [{"params": list(self.parameters()), "lr_scale": SCALE}]


@pytest.fixture(autouse=True)
def own_parts(monkeypatch):
    for registry in (ENCODERS, DECODERS):
        monkeypatch.setattr(registry, "parts", dict(registry.parts))
    ENCODERS.register("frozen", FrozenConfig)(FrozenEncoder)
    DECODERS.register("slow", SlowConfig)(SlowDecoder)


def parameters_before(config):
    torch.manual_seed(config.seed)
    return dict(build(config.model).named_parameters())


def test_a_frozen_part_does_not_move(tmp_path):
    config = small(tmp_path / "run", max_steps=2, encoder="frozen")
    before = parameters_before(config)
    for name, value in load(train(config)).named_parameters():
        assert torch.equal(value, before[name]) == name.startswith("encoder."), name


def test_a_part_has_its_own_learning_rate(tmp_path):
    """The first step of Adam has the size of the learning rate where gradients are not tiny."""
    config = small(tmp_path / "run", max_steps=1, decoder="slow", grad_clip=0.0)
    before = parameters_before(config)
    steps = {name: (value - before[name]).abs().max() for name, value in load(train(config)).named_parameters()}
    for name, step in steps.items():
        expected = config.lr * (SCALE if name.startswith("decoder.") else 1)
        assert step.item() == pytest.approx(expected, rel=0.05), name


def test_runs_with_parameter_groups_resume(tmp_path):
    parts = {"encoder": "frozen", "decoder": "slow"}
    expected = weights(train(small(tmp_path / "one", max_steps=4, **parts)))
    for steps in (2, 4):
        train(small(tmp_path / "resumed", max_steps=steps, **parts))
    assert weights(tmp_path / "resumed") == expected


@pytest.mark.parametrize("preset", ["tiny", "movi"])
def test_every_trained_parameter_is_in_one_group(preset):
    model = build(small(None, preset).model)
    groups = parameter_groups(model)
    grouped = [id(p) for group in groups for p in group["params"]]
    assert sorted(grouped) == sorted(id(p) for p in model.parameters())
    assert {group["lr_scale"] for group in groups} == {1.0}


def test_plain_modules_are_trained_too():
    """An encoder need not be a part of this package."""
    own = build(small(None).model)
    encoder = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3, stride=2, padding=1))
    model = Discovery(encoder, own.slots, own.decoder)
    grouped = {id(p) for group in parameter_groups(model) for p in group["params"]}
    assert grouped == {id(p) for p in model.parameters()}
