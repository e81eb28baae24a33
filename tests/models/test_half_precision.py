"""Models converted by `.half()`, `.bfloat16()` and `.double()` run on the CPU and agree with float32."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from cutslots.inference.predictor import predict_image
from cutslots.models.checkpoints import checkpoint_names, load
from cutslots.models.discovery import DiscoveryOutput, build
from cutslots.models.pair_discovery import PairDiscovery
from cutslots.models.tracker import track_clip
from cutslots.modules.vit import ViTConfig
from cutslots.programs.grid_cut import GridCut
from cutslots.scenes import Scenes
from cutslots.training.presets import PRESETS
from tests.models.configs import CONFIGS, PAIRS, random_input, run_seeded, small_model

TOLERANCE = 4e-2  # bfloat16 has 8 significant bits


@pytest.mark.parametrize("name", [name for name in PRESETS if not isinstance(PRESETS[name].model.encoder, ViTConfig)])
def test_presets_agree_with_float32(name):
    """tests/contracts runs every layer in both half types."""
    torch.manual_seed(0)
    config = replace(PRESETS[name].model, image_size=(16, 24))
    model, image = build(config).eval(), random_input(config)
    expected, output = run_seeded(model, image), run_seeded(model.bfloat16(), image)
    for field, x, y in zip(DiscoveryOutput._fields, output, expected, strict=True):
        assert x.isfinite().all() and x.shape == y.shape, field
        torch.testing.assert_close(x.to(y.dtype), y, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("name", ["tiny", "attention", "relative", "pairs", "spacetime"])
def test_cuts_and_masks_stay_in_float32(name):
    model = build(CONFIGS[name]).eval().bfloat16()
    output = run_seeded(model, random_input(CONFIGS[name]))
    assert output.masks.dtype == output.partition_masks.dtype == output.reconstruction.dtype == torch.float32
    for module in model.modules():
        if isinstance(module, GridCut):
            assert module.dtype == torch.float32
            assert all(x.dtype == torch.float32 for name, x in module.named_buffers() if name != "_like")
    for field in ("masks", "partition_masks") if name != "pairs" else ("masks",):  # the matching mixes those of pairs
        masks = getattr(output, field)
        total = masks.sum(-3)
        torch.testing.assert_close(total, torch.ones_like(total))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("checkpoint", checkpoint_names())
def test_trained_models_find_the_same_objects(checkpoint, dtype):
    """Rounding decides which of two slots has a pixel that they share to within the tolerance: these are left out.

    Most of them are background: that of plain-paper-128 is shared by several slots, and 5 % of the pixels are such.
    """
    model = load(checkpoint)
    family = "textured" if "textured" in checkpoint else "plain"
    image = Scenes(family, "test", model.image_size).get_batch(np.arange(1)).image
    expected, output = run_seeded(model, image), run_seeded(model.to(dtype), image)
    first, second = expected.masks.topk(2, dim=1).values.unbind(1)
    clear = first - second > TOLERANCE
    same = output.masks.argmax(1) == expected.masks.argmax(1)
    assert clear.float().mean() > 0.9
    assert same[clear].float().mean() > {torch.float16: 0.9999, torch.bfloat16: 0.997}[dtype]
    error = (output.reconstruction - expected.reconstruction).square().mean().sqrt()
    assert error < {torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]


@pytest.mark.parametrize("kind", ["images", "pairs", "spacetime"])
def test_videos(kind):
    clips = torch.rand(1, 3, 3, 16, 16)
    model = small_model(kind).bfloat16()
    for association in model.associations:
        for output in track_clip(model, clips, association):
            assert all(x.isfinite().all() for x in output)


def test_prediction_of_an_image():
    prediction = predict_image(load("tiny-64").bfloat16(), Image.new("RGB", (80, 60), (9, 99, 199)))
    assert prediction.labels.shape == (60, 80) and np.isfinite(prediction.slot_scores).all()


def test_projection_of_pairs_is_compared_in_float32():
    model: PairDiscovery = build(replace(PAIRS, match_dim=4)).bfloat16()
    assert model.match(torch.rand(2, 3, 16).bfloat16(), torch.rand(2, 3, 16).bfloat16()).weights.dtype == torch.float32


def test_parts_may_differ_in_precision():
    """A decoder in half precision follows slots in float32."""
    model = copy.deepcopy(small_model("images"))
    model.decoder.bfloat16()
    assert run_seeded(model, torch.rand(1, 3, 16, 16)).masks.isfinite().all()
