"""The mean squared error of images, its blur and its foreground penalty; that of features; a loss of one's own."""

import math
from dataclasses import dataclass, replace

import pytest
import torch
from scipy import ndimage

from cutslots.models.discovery import DiscoveryOutput, FeatureOutput, build
from cutslots.training.loop import train
from cutslots.training.losses import (
    LOSSES,
    FeatureMSELoss,
    Loss,
    LossConfig,
    LossOutput,
    MSEConfig,
    MSELoss,
    gaussian_blur,
    mask_cross_entropy,
)
from tests.small_runs import lines, small, weights

SHAPES = [(2, 3, 16, 16), (2, 2, 3, 12, 20)]  # images, clips


# ----------------------------------------------------------------------------------------------------------------- blur


@pytest.mark.parametrize("sigma", [0.3, 1.0, 2.5, 7.0])  # the last is wider than the image
@pytest.mark.parametrize("shape", SHAPES)
def test_blur_equals_scipy(shape, sigma):
    x = torch.randn(shape, dtype=torch.float64)
    axes = (len(shape) - 2, len(shape) - 1)
    expected = ndimage.gaussian_filter(x, sigma, mode="nearest", radius=math.ceil(3 * sigma), axes=axes)
    assert torch.allclose(gaussian_blur(x, sigma), torch.from_numpy(expected), atol=1e-12)


def test_a_small_blur_returns_its_input():
    x = torch.randn(2, 3, 8, 8)
    assert gaussian_blur(x, 0.0) is x and gaussian_blur(x, 0.29) is x


def test_blur_decays_linearly():
    loss = MSELoss(blur=4.0, blur_steps=8)
    assert [loss.sigma_at(step) for step in (0, 2, 6, 8, 999)] == [4, 3, 1, 0, 0]
    assert [MSELoss(blur=4.0, blur_steps=1).sigma_at(step) for step in (0, 1, 2)] == [4, 0, 0]
    assert not any(MSELoss().sigma_at(step) for step in (0, 10**6))


def test_blur_stays_on_the_device_of_its_input():
    assert gaussian_blur(torch.empty(2, 3, 8, 8, device="meta"), 1.0).device.type == "meta"


# --------------------------------------------------------------------------------------------------- foreground penalty


def test_foreground_penalty_rises_linearly():
    loss = MSELoss(foreground_penalty=0.5, foreground_penalty_start=10)
    steps = {0: 0, 9: 0, 10: 0.05, 14: 0.25, 19: 0.5, 20: 0.5, 999: 0.5}
    assert [loss.penalty_at(step) for step in steps] == list(steps.values())
    assert MSELoss(foreground_penalty=0.5).penalty_at(0) == 0.5, "without a start it is there from the first step"
    assert MSELoss().penalty_at(10**6) == 0


# ---------------------------------------------------------------------------------------------------------- written out


def output(shape, num_slots=4):
    """A random output for images or clips of this shape."""
    *batch, _, height, width = shape
    masks = torch.rand(*batch, num_slots, height, width).softmax(-3)
    return DiscoveryOutput(torch.empty(0), masks, torch.empty(0), torch.rand(shape), torch.empty(0))


@pytest.mark.parametrize("shape", SHAPES)
def test_mean_squared_error_written_out(shape):
    image, found = torch.rand(shape), output(shape)
    loss, logged = MSELoss()(found, image, step=0)
    assert torch.equal(loss, logged) and torch.equal(loss, (found.reconstruction - image).square().mean())


@pytest.mark.parametrize("shape", SHAPES)
def test_blur_and_penalty_written_out(shape):
    image, found = torch.rand(shape), output(shape)
    loss, logged = MSELoss(3.0, 10, foreground_penalty=0.5, foreground_penalty_start=4)(found, image, step=5)
    difference = found.reconstruction - image
    blurred = gaussian_blur(difference, 1.5).square().mean()
    foreground = found.masks.movedim(-3, 0)[1:].sum(0).mean()
    torch.testing.assert_close(loss, blurred + 0.25 * foreground)
    assert torch.equal(logged, difference.square().mean()), "the plain error is logged"


@pytest.mark.parametrize("shape", SHAPES)
def test_mask_consistency_written_out(shape):
    """The cross-entropy of every feature pixel, whose target is the mean of four pixels of the decoder's masks."""
    image, found = torch.rand(shape), output(shape)
    *batch, _, height, width = shape
    own = torch.rand(*batch, 4, height // 2, width // 2).softmax(-3).requires_grad_()
    masks = found.masks.clone().requires_grad_()
    found = found._replace(masks=masks, partition_masks=own)
    loss, logged = MSELoss(mask_consistency=0.5, mask_consistency_start=4)(found, image, step=5)
    target = masks.unflatten(-1, (-1, 2)).unflatten(-3, (-1, 2)).mean((-1, -3))
    torch.testing.assert_close(loss, logged + 0.25 * -(target * own.log()).sum(-3).mean())
    (loss - logged).backward()
    assert masks.grad is None or not masks.grad.any(), "the decoder is not drawn towards the partition"
    assert own.grad is not None and own.grad.any()


def test_mask_consistency_of_an_empty_mask_is_finite():
    masks = torch.tensor([0.0, 1.0]).view(1, 2, 1, 1).requires_grad_()
    loss = mask_cross_entropy(masks, torch.tensor([1.0, 0.0]).view(1, 2, 1, 1))
    loss.backward()
    assert loss.isfinite() and masks.grad.isfinite().all()


def test_uint8_images_are_scaled():
    image, found = torch.randint(0, 256, SHAPES[0], dtype=torch.uint8), output(SHAPES[0])
    assert torch.equal(MSELoss()(found, image, 0).loss, MSELoss()(found, image / 255, 0).loss)


# -------------------------------------------------------------------------------------------------------------- in runs


def test_a_blur_changes_the_weights_but_not_the_logged_loss(tmp_path):
    runs = [train(small(tmp_path / f"{b}", max_steps=1, loss__blur=b, loss__blur_steps=9)) for b in (0.0, 3.0)]
    assert len({line["loss"] for folder in runs for line in lines(folder) if "loss" in line}) == 1
    assert len(set(map(weights, runs))) == 2


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"loss__blur": -1.0}, "loss.blur is -1.0; expected a number from 0 to 2,048"),
        ({"loss__blur": math.nan}, "loss.blur is nan; expected a number from 0 to 2,048"),
        ({"loss__blur": 1e9}, "loss.blur is 1000000000.0; expected a number from 0 to 2,048"),
        ({"loss__blur": 17.0}, "loss.blur is 17.0; expected at most the image size, 16"),
        ({"loss__blur_steps": -1}, "loss.blur_steps is -1; expected an integer from 0 to 1,000,000,000"),
        ({"loss__foreground_penalty": -1.0}, "loss.foreground_penalty is -1.0; expected a number from 0 to 65,536"),
        ({"loss__foreground_penalty": math.nan}, "loss.foreground_penalty is nan; expected a number from 0"),
        ({"loss__mask_consistency": -1.0}, "loss.mask_consistency is -1.0; expected a number from 0 to 65,536"),
        ({"loss__foreground_penalty_start": -1}, "loss.foreground_penalty_start is -1; expected an integer from 0"),
        (
            {"slots": "slot-attention", "loss__foreground_penalty": 0.1},
            "loss.foreground_penalty is 0.1, but no slot of this model is the background; expected 0",
        ),
        (
            {"slots__partition__background": "none", "loss__foreground_penalty": 0.1},
            "loss.foreground_penalty is 0.1, but no slot of this model is the background; expected 0",
        ),
    ],
)
def test_bad_options_are_named(tmp_path, changes, message):
    with pytest.raises(ValueError, match=r"\A[^\n]+\Z") as caught:
        train(small(tmp_path / "run", **changes))
    assert str(caught.value).startswith(message) and not (tmp_path / "run").exists()


def test_a_blur_may_be_as_wide_as_the_image():
    config = small(None)
    MSELoss(blur=min(config.model.image_size)).validate(build(config.model))


@dataclass(frozen=True)
class HuberConfig(LossConfig):
    delta: float = 0.1


class HuberLoss(Loss):
    """Huber loss of the reconstruction."""

    def __init__(self, delta):
        self.delta = delta

    def __call__(self, output, image, step):
        loss = torch.nn.functional.huber_loss(output.reconstruction, image / 255, delta=self.delta)
        return LossOutput(loss, 2 * loss)


def test_a_custom_loss_is_minimised_and_logged(tmp_path, monkeypatch):
    monkeypatch.setattr(LOSSES, "parts", dict(LOSSES.parts))
    LOSSES.register("huber", HuberConfig)(HuberLoss)
    config = small(tmp_path / "run", max_steps=8, loss="huber", loss__delta=0.2)
    assert config.loss == HuberConfig(delta=0.2)
    train(config)
    (line,) = (line for line in lines(tmp_path / "run") if "loss" in line)
    first = train(replace(config, out=tmp_path / "first", max_steps=1))
    (first_line,) = (line for line in lines(first) if "loss" in line)
    assert 0 < line["loss"] < first_line["loss"], "the mean of 8 steps is below the first"
    assert weights(first) != weights(train(small(tmp_path / "mse", max_steps=1))), "not the mean squared error"


def test_mse_config_has_the_defaults_of_the_loss():
    assert vars(LOSSES.build(MSEConfig())) == vars(MSELoss())
    MSELoss().validate(build(small(None).model))


# ------------------------------------------------------------------------------------------------------------ features


def test_feature_mse_is_the_mean_over_channels_and_positions():
    reconstruction, target = torch.rand(2, 5, 3, 4, requires_grad=True), torch.rand(2, 5, 3, 4)
    output = FeatureOutput(torch.empty(0), torch.empty(0), torch.empty(0), reconstruction, target)
    for value in (FeatureMSELoss()(output, torch.empty(0), 3), FeatureMSELoss().in_phase(output, None, None, 0)):
        torch.testing.assert_close(value.loss, torch.nn.functional.mse_loss(reconstruction, target))
        assert value.logged is value.loss
    (gradient,) = torch.autograd.grad(value.loss, reconstruction)
    torch.testing.assert_close(gradient, 2 * (reconstruction - target).detach() / target.numel())
    assert FeatureMSELoss().phase(0) == FeatureMSELoss().phase(10**6) is not None  # one CUDA graph for all steps
