from dataclasses import replace

import pytest
import torch

from cutslots.models.discovery import build
from cutslots.models.spacetime_discovery import SpacetimeDiscovery, SpacetimeDiscoveryConfig
from cutslots.modules.decoders import PixelShuffleDecoder
from cutslots.modules.encoders import CNNEncoder
from cutslots.modules.partition import SpacetimePartition, SpacetimePartitionConfig
from cutslots.modules.slots import CutSlots
from tests.models.configs import (
    SLOTS,
    SPACETIME,
    SPACETIME_SLOTS,
    assert_same,
    assert_trains,
    clips,
    run_seeded,
    small_model,
)


@pytest.mark.parametrize("length", [1, 2, 5])
@pytest.mark.parametrize("background", ["cuts", "none"])
def test_clips_of_any_length(length, background):
    partition = replace(SPACETIME_SLOTS.partition, background=background)
    model, image = small_model("spacetime", slots=replace(SPACETIME_SLOTS, partition=partition)), clips(2, length)
    output = model(image)
    assert output.slots.shape == (2, length, 3, 16) and output.masks.shape == (2, length, 3, 16, 16)
    assert output.partition_masks.shape == (2, length, 3, 8, 8)
    assert output.slot_reconstructions.shape == (2, length, 3, 3, 16, 16)
    assert output.reconstruction.shape == image.shape
    torch.testing.assert_close(output.masks.sum(2), torch.ones(2, length, 16, 16))
    torch.testing.assert_close(output.partition_masks.sum(2), torch.ones(2, length, 8, 8))
    assert_trains(model, (output.reconstruction - image).square().mean())


def test_forward_written_out():
    """Features of each frame, one partition of the clip, slots of each frame decoded alone."""
    model, image = small_model("spacetime"), clips(2, 3)
    output = run_seeded(model, image)
    with torch.no_grad():
        features = torch.stack([model.encoder(frame * 2 - 1) for frame in image.unbind(1)], 1)
        slots, masks = model.slots(features)
        torch.testing.assert_close(output.slots, slots)
        torch.testing.assert_close(output.partition_masks, masks)
        for t in range(3):
            for name, x in model.decode(slots[:, t])._asdict().items():
                torch.testing.assert_close(getattr(output, name)[:, t], x)


@pytest.mark.parametrize("size", [(8, 8), (15, 9), (24, 40)])
def test_image_sizes(size):
    model = build(replace(SPACETIME, image_size=size))
    assert model(torch.rand(1, 3, 3, *size)).masks.shape == (1, 3, 3, *size) and model.image_size == size


def test_bytes_and_floats_are_the_same_clip():
    model, image = small_model("spacetime"), torch.randint(0, 256, (2, 2, 3, 16, 16), dtype=torch.uint8)
    assert_same(run_seeded(model, image), run_seeded(model, image / 255))


def test_slots_with_positions():
    slots = replace(SPACETIME_SLOTS, relative_positions=True)
    assert small_model("spacetime", slots=slots)(clips(1, 3)).slots.shape == (1, 3, 3, 16)


@pytest.mark.parametrize("background_anchor, layers", [(None, {"4_objects"}), (1.0, {"4_objects", "4_background"})])
def test_the_layers_for_training_clips_are_made_with_the_model(background_anchor, layers):
    partition = replace(SPACETIME_SLOTS.partition, background_anchor=background_anchor)
    model = build(replace(SPACETIME, slots=replace(SPACETIME_SLOTS, partition=partition), num_frames=4))
    assert model.frames == model.config.frames == 4
    assert set(model.slots.partition.clip_cuts) == layers


def test_a_model_of_modules():
    slots = CutSlots(8, 4, (8, 10), 20, partition=SpacetimePartition(8, 4, (8, 10)))
    model = SpacetimeDiscovery(CNNEncoder(8, (3,)), slots, PixelShuffleDecoder(20, (16, 20)), num_frames=3)
    assert model.frames == 3 and model.spacetime and model.config is None
    assert model(torch.rand(1, 2, 3, 16, 20)).masks.shape == (1, 2, 4, 16, 20)


def test_the_default_config_partitions_clips():
    assert isinstance(SpacetimeDiscoveryConfig().slots.partition, SpacetimePartitionConfig)
    assert isinstance(build(SpacetimeDiscoveryConfig(image_size=(16, 16))), SpacetimeDiscovery)


# --------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize("slots", SLOTS)
def test_slots_for_clips_are_expected(slots):
    with pytest.raises(ValueError, match=r"^slots partition images; expected clips: .* spacetime-cut$"):
        build(replace(SPACETIME, slots=SLOTS[slots]))


@pytest.mark.parametrize(
    "shape, message",
    [
        ((2, 3, 16, 16), r"image has shape \(2, 3, 16, 16\); expected clips \(B, T, 3, H, W\)"),
        ((1, 2, 3, 32, 32), r"image has shape \(2, 3, 32, 32\); expected \(B, 3, 16, 16\)"),
    ],
)
def test_bad_clips(shape, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        small_model("spacetime")(torch.rand(shape))


def test_clips_of_integers():
    with pytest.raises(TypeError, match=r"^image has dtype torch\.int64; expected uint8 or a floating-point type$"):
        small_model("spacetime")(torch.zeros(1, 2, 3, 16, 16, dtype=torch.int64))


@pytest.mark.parametrize("num_frames", [0, 1, 1025])
def test_bad_number_of_frames(num_frames):
    with pytest.raises(ValueError, match=f"^num_frames is {num_frames}; expected an integer from 2 to 1,024$"):
        replace(SPACETIME, num_frames=num_frames)


def test_clips_that_are_too_large():
    message = r"^image_size is \(2048, 2048\) with 17 frames; expected at most 67,108,864 pixels in a sample$"
    with pytest.raises(ValueError, match=message):
        SpacetimeDiscoveryConfig(image_size=(2048, 2048), num_frames=17)
    assert SpacetimeDiscoveryConfig(image_size=(2048, 2048), num_frames=16).frames == 16
