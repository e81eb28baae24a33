"""Models that reconstruct the features of a frozen encoder, and what is made of their output."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional as F

from cutslots.app.discovery_tab import discover
from cutslots.app.sources import Source
from cutslots.dataset import Sample
from cutslots.evaluation.labels import hard_labels, video_hard_labels
from cutslots.evaluation.visualize import Visualization
from cutslots.inference.export import onnx_bytes
from cutslots.inference.predictor import crop_output
from cutslots.inference.prepare import Box
from cutslots.models.checkpoints import load, save
from cutslots.models.discovery import Discovery, DiscoveryOutput, FeatureOutput, build
from cutslots.models.feature_colors import feature_colors, principal_axes, reconstruction_colors, target_colors
from cutslots.models.refinement import cut_masks, merge_slots, posterior_masks, refine_masks, slot_overlap
from cutslots.models.tracker import track_clip
from cutslots.models.training_data import TrainingData, measure_training_data, output_errors
from cutslots.modules.encoders import CNNEncoder
from cutslots.modules.feature_decoders import MLPDecoder, MLPDecoderConfig, TransformerDecoderConfig
from cutslots.modules.slots import CutSlots
from cutslots.modules.vit import ViTConfig
from tests.models.configs import KINDS, clips, random_input, run_seeded
from tests.modules.small_vits import CHANNELS, PATCH, make_vit

DECODERS = {"mlp": MLPDecoderConfig((16,)), "transformer": TransformerDecoderConfig(1, 3)}
IMAGE = (16, 24)
GRID = (IMAGE[0] // PATCH, IMAGE[1] // PATCH)


@pytest.fixture(scope="module")
def vit(tmp_path_factory):
    """The folder of a small ViT. Read only."""
    folder = tmp_path_factory.mktemp("checkpoints") / "vit"
    make_vit(folder)
    return str(folder)


def config_of(vit, decoder="mlp", kind="images", size=IMAGE):
    return replace(KINDS[kind], image_size=size, encoder=ViTConfig(vit), decoder=DECODERS[decoder])


@pytest.fixture
def model(vit):
    torch.manual_seed(0)
    return build(config_of(vit)).eval()


@pytest.fixture
def output(model):
    return run_seeded(model, torch.rand(2, 3, *IMAGE))


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("kind", KINDS)
def test_output(kind, decoder, vit):
    config = config_of(vit, decoder, kind)
    model, image = build(config).eval(), random_input(config)
    output = run_seeded(model, image)
    batch = image.shape[:-3]
    assert isinstance(output, FeatureOutput) and model.reconstructs_features
    assert output.masks.shape == (*batch, 3, *IMAGE) and output.partition_masks.shape == (*batch, 3, *GRID)
    assert output.reconstruction.shape == output.target.shape == (*batch, CHANNELS, *GRID)
    frames = image.flatten(0, -4) if image.ndim == 5 else image
    torch.testing.assert_close(output.target.flatten(0, -4), model.encoder(model.encoder.normalize(frames)))


@pytest.mark.parametrize("kind", KINDS)
def test_output_of_features_is_that_of_their_images(kind, vit):
    config = config_of(vit, kind=kind)
    model, image = build(config).eval(), random_input(config)
    with torch.no_grad():
        features = model.features(image.flatten(0, -4)).unflatten(0, image.shape[:-3])
        torch.manual_seed(0)
        output = model.forward_features(features)
        torch.manual_seed(0)
        expected = model(image)
    for x, y in zip(output, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0)


def test_the_target_is_that_of_its_own_frame(vit):
    """The transformer predicts each frame of a pair from that frame's features."""
    model = build(config_of(vit, "transformer", "pairs")).eval()
    image = torch.rand(3, 2, 3, *IMAGE)
    output = run_seeded(model, image)
    with torch.no_grad():
        for t in (0, 1):
            target = model.features(image[:, t])
            torch.testing.assert_close(output.target[:, t], target)
            again = model.decode(output.slots[:, t], target).reconstruction
            torch.testing.assert_close(output.reconstruction[:, t], again)


@pytest.mark.parametrize("decoder", DECODERS)
def test_only_the_encoder_is_frozen(decoder, vit):
    model = build(config_of(vit, decoder)).train()
    output = model(torch.rand(2, 3, *IMAGE))
    (output.reconstruction - output.target).square().mean().backward()
    for name, value in model.named_parameters():
        assert (value.grad is None) == name.startswith("encoder."), name


@pytest.mark.parametrize("kind", KINDS)
def test_save_and_load(kind, vit, tmp_path):
    config = config_of(vit, "transformer", kind)
    model, image = build(config).eval(), random_input(config)
    save(model, tmp_path)
    again = load(tmp_path)
    assert again.config == config
    for name, a, b in zip(FeatureOutput._fields, run_seeded(again, image), run_seeded(model, image), strict=True):
        assert a.equal(b), name


def test_pixels_are_reconstructed_as_before(vit):
    model = build(replace(KINDS["images"], encoder=ViTConfig(vit))).eval()
    output = run_seeded(model, torch.rand(2, 3, 16, 16))
    assert isinstance(output, DiscoveryOutput) and not model.reconstructs_features
    assert output.reconstruction.shape == (2, 3, 16, 16)


def test_an_encoder_that_is_trained_is_no_target():
    encoder, slots = CNNEncoder(8, (3,)), CutSlots(8, 3, (8, 8))
    decoder = MLPDecoder(64, (16, 16), 8, (8, 8), (16,))
    with pytest.raises(ValueError, match=r"^the decoder MLPDecoder reconstructs .*; expected a frozen encoder"):
        Discovery(encoder, slots, decoder)
    model = Discovery(encoder.requires_grad_(False), slots, decoder)
    assert model(torch.rand(1, 3, 16, 16)).target.shape == (1, 8, 8, 8)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("decoder", DECODERS)
def test_tracking(kind, decoder, vit):
    """Tracks are the slots of each frame in another order: masks and reconstructions belong to their slots."""
    model = build(config_of(vit, decoder, kind, (16, 16))).eval()
    video = clips(2, 4)
    for association in model.associations:
        with torch.no_grad():
            outputs = track_clip(model, video, association)
        for t, output in enumerate(outputs):
            assert isinstance(output, FeatureOutput) and output.masks.shape == (2, 3, 16, 16)
            with torch.no_grad():
                torch.testing.assert_close(output.target, model.features(video[:, t]), atol=1e-5, rtol=0)
        assert video_hard_labels(outputs, video)["refined"].shape == (2, 4, 16, 16)


# ---------------------------------------------------------------------------------------------------------- refinement


def test_refined_masks_are_decoder_masks_cut_along_edges(output):
    image = torch.rand(2, 3, *IMAGE)
    assert posterior_masks(output, image).equal(output.masks)
    K = output.masks.shape[1]
    assert merge_slots(slot_overlap(output), merge_threshold=1e9).tolist() == [list(range(K))] * 2
    assert refine_masks(output, image).equal(cut_masks(output.masks, image))
    assert refine_masks(output, image, capacity=0).equal(output.masks)
    assert set(hard_labels(output, image)) == {"decoder", "partition", "refined", "high-recall"}


# -------------------------------------------------------------------------------------------------------------- colors


def test_colors_are_principal_components():
    rows = torch.randn(200, 6, dtype=torch.float64) @ torch.randn(6, 6, dtype=torch.float64)
    _, _, expected = np.linalg.svd((rows - rows.mean(0)).numpy(), full_matrices=False)
    axes = principal_axes(rows).T
    for axis, reference in zip(axes, torch.from_numpy(expected[:3]), strict=True):
        assert axis[axis.abs().argmax()] > 0
        torch.testing.assert_close(axis, reference * reference[reference.abs().argmax()].sign())


def test_colors_of_a_plane_of_features():
    """Features that vary along one axis have one color channel, from black to full."""
    ramp = torch.linspace(0, 1, 101).reshape(1, 101)
    features = torch.stack([ramp * 3 + 1, ramp * 4 - 2, torch.zeros_like(ramp)])  # (3, 1, 101)
    colors = feature_colors(features, features)
    torch.testing.assert_close(colors[0, 0], ((ramp[0] - 0.02) / 0.96).clamp(0, 1), atol=1e-6, rtol=0)
    assert feature_colors(features[:1], features[:1]).shape == (3, 1, 101)


def test_reconstruction_and_features_have_the_same_colors(output):
    perfect = output._replace(reconstruction=output.target)
    assert reconstruction_colors(perfect).equal(target_colors(output))
    assert reconstruction_colors(output).shape == (2, 3, *GRID)
    large = reconstruction_colors(output, IMAGE)
    assert large.shape == (2, 3, *IMAGE) and large[:, :, ::PATCH, ::PATCH].equal(reconstruction_colors(output))


def test_visualization_has_a_panel_of_features(output):
    image = (255 * torch.rand(2, 3, *IMAGE)).byte()
    sample = Sample(image, torch.zeros(2, *IMAGE, dtype=torch.uint8))
    shown = Visualization.from_output(sample, output, hard_labels(output, image))
    panels = shown.panels(0)
    assert list(panels)[:3] == ["image", "features", "reconstruction"]
    assert {panel.shape for panel in panels.values()} == {(*IMAGE, 3)}
    assert shown.subsample(1).features.shape == (1, *IMAGE, 3)
    weights = output.masks[0, 1].numpy()[..., None]
    expected = panels["image"] * weights + 255 * (1 - weights)  # the image under the mask of a slot
    assert np.abs(panels["slot 2"] - expected).max() <= 1


# ----------------------------------------------------------------------------------------------------------- inference


@pytest.mark.parametrize("size", [(30, 50), (50, 30), (16, 24), (200, 20)])
@pytest.mark.parametrize("masks", ["refined", "high-recall", "decoder"])
def test_predict(size, masks, model):
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (*size, 3), dtype=np.uint8))
    (prediction,) = model.predict(image, masks)
    assert prediction.labels.shape == size and prediction.reconstruction.size == image.size
    assert isinstance(prediction.output, FeatureOutput) and prediction.output.target.ndim == 3


def test_features_are_cropped_to_the_patches_that_the_image_touches(output):
    cropped = crop_output(output, Box(top=3, left=8, height=6, width=9))
    assert cropped.masks.equal(output.masks[:, :, 3:9, 8:17])
    assert cropped.target.equal(output.target[:, :, 0:3, 2:5])
    assert cropped.reconstruction.equal(output.reconstruction[:, :, 0:3, 2:5])


def test_familiarity_is_that_of_features(model):
    images = [torch.rand(4, 3, *IMAGE) for _ in range(3)]
    with torch.no_grad():
        output = model(images[0])
    error, variance, detail = output_errors(output, images[0])
    assert not detail.any()
    torch.testing.assert_close(error[1], F.mse_loss(output.reconstruction[1], output.target[1]))
    torch.testing.assert_close(variance[1], output.target[1].flatten(1).var(1, correction=0).mean())
    data = measure_training_data(model, images, "noise", "noise")
    assert isinstance(data, TrainingData) and data.max_error >= error.median()
    model.training_data = data._replace(max_error=1e-9)
    with pytest.warns(match="far from the training data"):
        model.predict(Image.new("RGB", (24, 16)))


def test_track(model):
    frames = [Image.fromarray(np.full((20, 20, 3), 60 * t, dtype=np.uint8)) for t in range(3)]
    for masks in ("refined", "decoder"):
        assert [p.labels.shape for p in model.track(frames, masks)] == [(20, 20)] * 3


@pytest.mark.parametrize("frames", [1, 2])
def test_app(model, frames):
    images = [Image.fromarray(np.full((20, 30, 3), 60 + t, dtype=np.uint8)) for t in range(frames)]
    view = discover(model, Source("name", images), frames=frames)
    assert view.reconstructions.shape[1:3] == view.masks.shape[-2:]
    assert view.slot_reconstructions.shape == (*view.masks.shape, 3) and (view.slot_reconstructions[0] == 60).all()


@pytest.mark.parametrize("decoder", DECODERS)
def test_export(decoder, vit):
    import onnxruntime

    model, image = build(config_of(vit, decoder)).eval(), torch.rand(2, 3, *IMAGE)
    running = onnxruntime.InferenceSession(onnx_bytes(model))
    assert [each.name for each in running.get_outputs()] == list(FeatureOutput._fields)
    expected = run_seeded(model, image)
    for name, a, b in zip(FeatureOutput._fields, running.run(None, {"image": image.numpy()}), expected, strict=True):
        torch.testing.assert_close(torch.from_numpy(a), b, atol=1e-4, rtol=1e-4, msg=name)
