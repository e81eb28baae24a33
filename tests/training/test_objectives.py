"""Objectives of pre-training against literal constructions."""

import math

import pytest
import torch
from torch import nn

from cutslots.modules.encoders import CNNEncoder, Encoder, ResNetEncoder
from cutslots.registry import validate_nested
from cutslots.training.augment import ViewAugmentation, augment_view, random_crops, random_flips
from cutslots.training.objectives import OBJECTIVES, SimCLR, SimCLRConfig, SimMIM, SimMIMConfig, nt_xent

SIZE = (16, 24)


def literal_nt_xent(z, temperature):
    """The loss of SimCLR, view by view."""
    count = len(z)
    unit = [row / row.norm() for row in z]
    losses = []
    for i in range(count):
        similarity = {k: math.exp(float(unit[i] @ unit[k]) / temperature) for k in range(count) if k != i}
        other = (i + count // 2) % count
        losses.append(-math.log(similarity[other] / sum(similarity.values())))
    return sum(losses) / count


@pytest.mark.parametrize("temperature", [0.1, 1.0])
def test_nt_xent_view_by_view(temperature):
    z = torch.randn(10, 4, dtype=torch.float64)
    assert nt_xent(z, temperature).loss.item() == pytest.approx(literal_nt_xent(z, temperature), rel=1e-12)


def test_gradients_of_nt_xent():
    z = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda z: nt_xent(z, 0.5).loss, (z,))


def test_accuracy_counts_views_whose_nearest_is_the_other_one():
    a, b, c = torch.eye(3)
    first, second = torch.stack([a, b, c]), torch.stack([a + 0.1 * b, b, b + 0.4 * c])
    # The nearest view of c is b + 0.4 c, but not the other way round.
    assert nt_xent(torch.cat([first, second]), 0.1).metrics["accuracy"].item() == pytest.approx(5 / 6)


def test_alike_views_have_the_loss_of_chance():
    assert nt_xent(torch.ones(8, 5), 0.3).loss.item() == pytest.approx(math.log(7), rel=1e-6)


def test_similarities_are_float32_under_autocast():
    z = torch.randn(8, 16)
    with torch.autocast("cpu", torch.bfloat16):
        assert nt_xent(z, 0.1).loss.equal(nt_xent(z, 0.1).loss) and nt_xent(z, 0.1).loss.dtype == torch.float32
        mixed = nt_xent(z, 0.1).loss
    torch.testing.assert_close(mixed, nt_xent(z, 0.1).loss)


def test_simclr_compares_two_views_of_each_image():
    encoder, objective = ResNetEncoder(6, (3, 3)), SimCLR(6, (8, 12), SIZE, 0.3, 10, 5, 0.5, 0.4, 0.3, 0.2)
    image = torch.rand(4, 3, *SIZE)
    torch.manual_seed(5)
    found = objective(encoder, image)
    torch.manual_seed(5)
    strength = ViewAugmentation(min_crop=0.5, jitter=0.4, grayscale=0.3, blur=0.2)
    views = [augment_view(image, strength) for _ in range(2)]
    features = encoder(torch.cat(views) * 2 - 1).mean((2, 3))  # in one batch, for the statistics of batches
    z = objective.projection(features)
    assert found.loss.item() == pytest.approx(literal_nt_xent(z.detach().double(), 0.3), rel=1e-4)
    found.loss.backward()
    parameters = [*encoder.parameters(), *objective.parameters()]
    assert all(p.grad is not None and p.grad.isfinite().all() and p.grad.any() for p in parameters)


class Spy(Encoder):
    """Keeps its input, and returns it at half the resolution."""

    out_channels = 3

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def out_size(self, image_size):
        return (image_size[0] + 1) // 2, (image_size[1] + 1) // 2

    def forward(self, x):
        self.seen = x
        return self.scale * nn.functional.avg_pool2d(x, 2, ceil_mode=True)


def test_masked_patches_are_hidden_and_the_others_are_not():
    encoder, objective = Spy(), SimMIM(3, (8, 12), SIZE, mask_ratio=0.5, mask_size=4, min_crop=0.5)
    with torch.no_grad():
        objective.mask_token.copy_(torch.tensor([7.0, 8.0, 9.0]))
    image = torch.rand(5, 3, *SIZE)
    torch.manual_seed(2)
    objective(encoder, image)
    torch.manual_seed(2)
    view = random_flips(random_crops(image, 0.5))
    patches = encoder.seen.unfold(2, 4, 4).unfold(3, 4, 4)  # (B, 3, 4, 6, 4, 4)
    hidden = (patches == torch.tensor([7.0, 8.0, 9.0]).view(3, 1, 1, 1, 1)).flatten(4).all(-1).all(1)
    assert hidden.flatten(1).sum(1).tolist() == [12] * 5, "as many of every image"
    assert len({tuple(x.flatten().tolist()) for x in hidden}) > 1, "which ones differs"
    shown = patches.movedim(1, 3)[~hidden]
    expected = (view * 2 - 1).unfold(2, 4, 4).unfold(3, 4, 4).movedim(1, 3)[~hidden]
    torch.testing.assert_close(shown, expected)


@pytest.mark.parametrize("size", [SIZE, (15, 21)])
def test_simmim_is_the_mean_error_of_masked_pixels(size):
    encoder, objective = CNNEncoder(6, (3, 3)), SimMIM(6, ((size[0] + 1) // 2, (size[1] + 1) // 2), size, 0.4, 4, 0.5)
    image = torch.rand(3, 3, *size)
    torch.manual_seed(1)
    loss = objective(encoder, image).loss
    torch.manual_seed(1)
    view = random_flips(random_crops(image, 0.5))
    masked = objective.random_mask(view)
    assert masked.shape == (3, 1, *size)
    features = encoder(torch.where(masked, 0.0, view * 2 - 1))  # the token is zero at first
    pixels = objective.prediction(features).detach()  # (B, 12, h, w): each position predicts 2x2 pixels
    errors = []
    for b, y, x in masked[:, 0].nonzero().tolist():
        for channel in range(3):
            predicted = pixels[b, 4 * channel + 2 * (y % 2) + x % 2, y // 2, x // 2]
            errors.append(abs(float(predicted - view[b, channel, y, x])))
    assert loss.item() == pytest.approx(sum(errors) / len(errors), rel=1e-5)
    loss.backward()
    assert all(p.grad is not None and p.grad.any() for p in [*encoder.parameters(), *objective.parameters()])


def test_simmim_with_patches_too_large():
    with pytest.raises(
        ValueError, match=r"^objective.mask_size is 99, which gives 1x1 patches, .* expected a smaller one$"
    ):
        SimMIM(3, (8, 12), SIZE, mask_size=99)


def test_simmim_with_features_of_two_strides():
    with pytest.raises(ValueError, match=r"^objective is simmim, but .*; expected an encoder with one stride for both"):
        SimMIM(3, (8, 24), SIZE, mask_size=4)


def test_configs_build_their_objectives():
    context = {"feature_channels": 4, "feature_size": (8, 12), "image_size": SIZE}
    contrastive = OBJECTIVES.build(SimCLRConfig(temperature=0.7, projection_dim=3), **context)
    assert contrastive.temperature == 0.7 and contrastive.projection[-1].out_features == 3
    assert OBJECTIVES.build(SimMIMConfig(mask_ratio=0.25, mask_size=8), **context).num_masked == 2
    assert OBJECTIVES.names() == ["simclr", "simmim"]


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"jitter": 1.5}, {"min_crop": 0.0}])
def test_options_out_of_range(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        validate_nested(SimCLRConfig(**options))
