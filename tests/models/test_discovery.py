import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from cutslots.models.discovery import MODELS, Discovery, DiscoveryConfig, ModelConfig, build, channels_last
from cutslots.models.pair_discovery import PairDiscovery
from cutslots.modules.decoders import (
    DECODERS,
    PixelShuffleDecoder,
    SpatialBroadcastConfig,
    SpatialBroadcastDecoder,
)
from cutslots.modules.encoders import CNNConfig, CNNEncoder, Encoder
from cutslots.modules.partition import SpacetimePartitionConfig
from cutslots.modules.slots import CutSlots
from tests.models.configs import (
    ATTENTION,
    CONFIGS,
    IMAGES,
    KINDS,
    SMALL,
    SOFTMAX,
    SPACETIME_SLOTS,
    assert_same,
    assert_trains,
    random_input,
    randomize_zeros,
    run_seeded,
    small_model,
)

SIZES = [(8, 8), (9, 9), (16, 16), (17, 24), (32, 10), (100, 37), (64, 96)]


@pytest.mark.parametrize("name", CONFIGS)
def test_forward_and_backward(name):
    config = CONFIGS[name]
    model, image = randomize_zeros(build(config)), random_input(config)
    output = model(image)
    K, D, (H, W) = config.slots.num_slots, config.slots.slot_dim, config.image_size
    grid = model.encoder.out_size((H, W))
    frames = (2, config.frames) if config.frames > 1 else (2,)
    assert output.slots.shape == (*frames, K, D) and output.masks.shape == (*frames, K, H, W)
    assert output.partition_masks.shape == (*frames, K, *grid)
    assert output.slot_reconstructions.shape == (*frames, K, 3, H, W) and output.reconstruction.shape == image.shape
    torch.testing.assert_close(output.masks.sum(-3), torch.ones(*frames, H, W))
    first = output.partition_masks[:, 0] if isinstance(model, PairDiscovery) else output.partition_masks
    torch.testing.assert_close(first.sum(-3), torch.ones(*first.shape[:-3], *grid))  # matching mixes those of frame 2
    mixture = (output.masks.unsqueeze(-3) * output.slot_reconstructions).sum(-4)
    torch.testing.assert_close(output.reconstruction, mixture)
    assert_trains(model, (output.reconstruction - image).square().mean())


@pytest.mark.parametrize("name", CONFIGS)
def test_models_describe_themselves(name):
    config = CONFIGS[name]
    model = build(config)
    assert model.config is config and model.image_size == config.image_size and model.frames == config.frames
    assert model.num_slots == config.slots.num_slots and model.frames == config.frames


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("decoder", ["spatial-broadcast", "pixel-shuffle"])
def test_image_sizes(size, decoder):
    config = replace(IMAGES, image_size=size, decoder=DECODERS[decoder].config(channels=(8,)))
    output = build(config)(torch.rand(1, 3, *size))
    assert output.masks.shape == (1, 3, *size) and output.reconstruction.shape == (1, 3, *size)
    assert output.partition_masks.shape == (1, 3, (size[0] + 1) // 2, (size[1] + 1) // 2)


@settings(max_examples=20, deadline=None)
@given(st.integers(8, 70), st.integers(8, 70), st.sampled_from(sorted(KINDS)))
def test_any_image_size(height, width, kind):
    config = replace(KINDS[kind], image_size=(height, width))
    output = run_seeded(build(config).eval(), random_input(config, 1))
    assert output.masks.shape[-2:] == output.reconstruction.shape[-2:] == (height, width)


def test_images_are_bytes_or_floats():
    for config in (SMALL, SOFTMAX, ATTENTION):
        model = build(config)
        image = torch.randint(0, 256, (2, 3, 16, 16), dtype=torch.uint8)
        assert_same(run_seeded(model, image), run_seeded(model, image / 255))


def test_the_encoder_gets_normalized_images():
    model, image = build(SMALL), torch.rand(2, 3, 16, 16)
    slots, masks = model.slots(model.encoder(image * 2 - 1))
    output = model(image)
    torch.testing.assert_close((output.slots, output.partition_masks), (slots, masks))
    torch.testing.assert_close(tuple(model.encode(image)), (slots, masks))


def test_decode_is_the_second_half_of_forward():
    model, image = build(SMALL), torch.rand(2, 3, 16, 16)
    output = run_seeded(model, image)
    for decoded in (model.decode(output.slots), model.decode_frame(output.slots)):
        for name, x in decoded._asdict().items():
            assert torch.equal(x, getattr(output, name)), name


def test_an_empty_batch():
    assert build(SMALL)(torch.rand(0, 3, 16, 16)).masks.shape == (0, 6, 16, 16)


def test_double_precision():
    """Checks by finite differences need float64. It gives the results of float32, and gradients."""
    for kind, length in (("images", 1), ("pairs", 2), ("spacetime", 2), ("spacetime", 3)):
        model, image = small_model(kind), torch.rand(1, length, 3, 16, 16)
        image = image[:, 0] if kind == "images" else image
        single = run_seeded(model, image)
        double = model.double()(image.double().requires_grad_())
        assert double.reconstruction.dtype == torch.float64
        torch.testing.assert_close(double.reconstruction.float(), single.reconstruction, rtol=1e-3, atol=1e-4)
        double.reconstruction.sum().backward()


def test_channels_last_keeps_the_output():
    model, image = build(SMALL).eval(), torch.rand(2, 3, 16, 16)
    before = run_seeded(model, image)
    after = run_seeded(channels_last(model), image)
    for a, b in zip(before, after, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert model.encoder.layers[2].weight.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("kind", KINDS)
def test_the_order_of_the_batch_does_not_matter(kind):
    model, image, order = small_model(kind), random_input(KINDS[kind], 4), torch.randperm(4)
    for a, b in zip(run_seeded(model, image), run_seeded(model, image[order]), strict=True):
        torch.testing.assert_close(a[order], b, rtol=1e-4, atol=1e-5)


# ----------------------------------------------------------------------------------------- models built from modules


class PlainEncoder(nn.Module):
    """A module that knows nothing of this package."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 4, stride=4)

    def forward(self, x):
        self.seen = x
        return self.conv(x).relu()


def test_a_model_of_modules():
    model = Discovery(CNNEncoder(8, (3,)), CutSlots(8, 4, (12, 16), 20), PixelShuffleDecoder(20, (24, 32)))
    image = torch.rand(2, 3, 24, 32)
    output = model(image)
    assert output.masks.shape == (2, 4, 24, 32) and output.slots.shape == (2, 4, 20)
    assert model.image_size == (24, 32) and model.num_slots == 4 and model.config is None and model.frames == 1
    assert_trains(model, (output.reconstruction - image).square().mean())


def test_the_encoder_may_be_any_module():
    model = Discovery(PlainEncoder(), CutSlots(6, 3, (4, 5)), PixelShuffleDecoder(64, (16, 20)))
    image = torch.rand(2, 3, 16, 20)
    output = model(image)
    assert output.partition_masks.shape == (2, 3, 4, 5)
    torch.testing.assert_close(model.encoder.seen, image * 2 - 1, msg="without `normalize`, images are in [-1, 1]")


class PatchEmbedding(Encoder):
    """Features as those of a ViT with patches of 14x14 pixels."""

    out_channels = 24

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 24, 14, stride=14)

    def out_size(self, image_size):
        return image_size[0] // 14, image_size[1] // 14

    def forward(self, x):
        return self.conv(x)


@pytest.mark.parametrize("decoder", [SpatialBroadcastDecoder, PixelShuffleDecoder])
@pytest.mark.parametrize("image_size, grid", [((224, 224), (16, 16)), ((224, 308), (16, 22))])
def test_the_grid_of_a_vit(decoder, image_size, grid):
    encoder = PatchEmbedding()
    slots = CutSlots(encoder.out_channels, 4, encoder.out_size(image_size), slot_dim=16)
    output = Discovery(encoder, slots, decoder(16, image_size, (8,)))(torch.rand(1, 3, *image_size))
    assert output.partition_masks.shape == (1, 4, *grid) and output.masks.shape == (1, 4, *image_size)


def test_an_encoder_normalizes_as_it_says():
    class Shifted(CNNEncoder):
        def normalize(self, image):
            return (image - 0.45) / 0.22

        def forward(self, x):
            self.seen = x
            return super().forward(x)

    model = Discovery(Shifted(8, (3,)), CutSlots(8, 3, (8, 8)), PixelShuffleDecoder(64, (16, 16)))
    image = torch.randint(0, 256, (2, 3, 16, 16), dtype=torch.uint8)
    model(image)
    torch.testing.assert_close(model.encoder.seen, (image / 255 - 0.45) / 0.22)


def test_slots_for_clips_need_a_model_for_clips():
    with pytest.raises(ValueError, match=r"^slots partition clips; expected a slot module for images, or .*$"):
        build(replace(IMAGES, slots=SPACETIME_SLOTS))
    slots = CutSlots(8, 3, (8, 8), partition=SpacetimePartitionConfig())
    with pytest.raises(ValueError, match=r"^slots partition clips"):
        Discovery(CNNEncoder(8, (3,)), slots, PixelShuffleDecoder(64, (16, 16)))


def test_the_grid_of_the_slots_must_be_that_of_the_features():
    model = Discovery(CNNEncoder(8, (3,)), CutSlots(8, 3, (8, 9)), PixelShuffleDecoder(64, (16, 16)))
    with pytest.raises(ValueError, match=r"^features have shape \(1, 8, 8, 8\); expected \(B, 8, 8, 9\)$"):
        model(torch.rand(1, 3, 16, 16))


# --------------------------------------------------------------------------------------------------------------- errors


def test_bad_images():
    model = build(replace(SMALL, image_size=(16, 24)))
    for shape in [(2, 3, 16, 16), (2, 1, 16, 24), (3, 16, 24), (2, 16, 24, 3), (2, 3, 24, 16), (1, 2, 3, 16, 24)]:
        with pytest.raises(ValueError, match=r"^image has shape \(.*\); expected \(B, 3, 16, 24\)$") as caught:
            model(torch.rand(shape))
        assert str(shape) in str(caught.value)
    for dtype in (torch.int64, torch.bool):
        with pytest.raises(TypeError, match=f"^image has dtype {dtype}; expected uint8 or a floating-point type$"):
            model(torch.zeros(1, 3, 16, 24, dtype=dtype))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"image_size": (7, 64)}, "image_size is (7, 64); expected 2 values, each an integer from 8 to 2,048"),
        ({"image_size": (64, 4096)}, "image_size is (64, 4096); expected 2 values, each an integer from 8 to 2,048"),
        ({"image_size": 64}, "image_size is 64; expected 2 values, each an integer from 8 to 2,048"),
        ({"image_size": (64, 64, 64)}, "image_size is (64, 64, 64); expected 2 values"),
        ({"encoder": {"name": "cnn"}}, "encoder is {'name': 'cnn'}; expected a EncoderConfig"),
        ({"encoder": SpatialBroadcastConfig()}, "encoder is SpatialBroadc"),
        ({"slots": None}, "slots is None; expected a SlotsConfig"),
    ],
)
def test_bad_configs(changes, message):
    with pytest.raises(ValueError, match=r"\A[^\n]+\Z") as caught:
        replace(SMALL, **changes)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"slots": replace(SMALL.slots, num_slots=1)}, "num_slots is 1; expected at least 2"),
        ({"slots": replace(SMALL.slots, slot_dim=3, relative_positions=True)}, "slot_dim is 3; expected more than 3"),
        ({"encoder": CNNConfig(kernel_sizes=())}, r"kernel_sizes is \(\); expected an odd integer"),
        ({"encoder": CNNConfig(kernel_sizes=(3, 4))}, r"kernel_sizes is \(3, 4\); expected an odd integer"),
        ({"decoder": SpatialBroadcastConfig(channels=())}, r"channels is \(\); expected at least one positive"),
    ],
)
def test_models_that_cannot_be_built(changes, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        build(replace(SMALL, **changes))


def test_a_base_config_is_not_a_model():
    with pytest.raises(ValueError, match=r"^ModelConfig is not the config of a registered model$"):
        build(ModelConfig())


def test_parts_are_registered_once_models_are_imported():
    """A checkpoint names its parts, so loading needs no further imports."""
    code = """
from cutslots.models.checkpoints import MODELS
from cutslots.registry import REGISTRIES
for registry in REGISTRIES: print(registry.kind, *registry.names(), sep="|")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    names = {kind: parts for kind, *parts in (line.split("|") for line in done.stdout.splitlines())}
    assert names["model"] == ["discovery", "pair-discovery", "spacetime-discovery"], done.stderr
    assert names["slot module"] == ["cut-slots", "graph-ocl-slots", "slot-attention"]
    assert names["encoder"] == ["cnn", "resnet", "patch-vit", "pretrained", "vit"]
    assert names["decoder"] == ["spatial-broadcast", "pixel-shuffle", "graph-ocl-decoder", "mlp", "transformer"]
    assert names["partition"] == ["cut", "softmax", "spacetime-cut", "min-cut", "graph-ocl-cut"]


def test_the_default_config_builds():
    assert isinstance(build(DiscoveryConfig()), Discovery) and MODELS.part_of(DiscoveryConfig()).name == "discovery"
