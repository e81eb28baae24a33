"""Presets: every named training run builds and round-trips through JSON; the hyperparameters of the paper."""

import dataclasses
import json
from dataclasses import replace

import pytest
import torch

from cutslots.data.builtin import MovingConfig, PlainConfig, TexturedConfig
from cutslots.data.registry import DATASETS
from cutslots.models.checkpoints import load
from cutslots.models.discovery import Discovery, DiscoveryConfig, build
from cutslots.models.pair_discovery import PairDiscovery, PairDiscoveryConfig
from cutslots.modules.decoders import PixelShuffleConfig, SpatialBroadcastConfig
from cutslots.modules.encoders import CNNConfig, ResNetConfig
from cutslots.modules.feature_decoders import TransformerDecoderConfig
from cutslots.modules.slots import CutSlotsConfig
from cutslots.registry import plugins_of
from cutslots.training.config import TrainConfig
from cutslots.training.loop import train, validate
from cutslots.training.losses import LOSSES, FeatureMSEConfig, MSEConfig
from cutslots.training.presets import PRESETS, SUMMARIES, add_preset
from tests.models import configs
from tests.models.configs import random_input
from tests.modules.small_vits import make_vit
from tests.small_runs import sentence, small

PIXELS = ["tiny", "ours", "clevr", "clevrtex", "graph-ocl", "movi", "ours-video"]
FEATURES = ["coco", "voc", "movi-c", "movi-e", "ytvis"]
NAMES = PIXELS + FEATURES
PAIRS = ["movi", "ours-video", "ytvis"]


def test_names():
    assert list(PRESETS) == list(SUMMARIES) == NAMES
    assert all(summary and "\n" not in summary for summary in SUMMARIES.values())


@pytest.fixture(scope="module")
def vit(tmp_path_factory):
    """The folder of a small ViT, which stands in for the checkpoints that users download."""
    folder = tmp_path_factory.mktemp("vit")
    make_vit(folder)
    return str(folder)


@pytest.mark.parametrize("name", NAMES)
def test_every_preset_builds(name, vit):
    preset = PRESETS[name]
    config = with_vit(preset.model, vit) if name in FEATURES else preset.model
    model = build(config)
    assert preset.preset == name and model.config == config and model.image_size == preset.model.image_size
    assert type(model) is (PairDiscovery if name in PAIRS else Discovery)
    assert model.num_slots == preset.model.slots.num_slots and model.reconstructs_features == (name in FEATURES)
    LOSSES.build(preset.loss).validate(model)
    assert not any(plugins_of(part) for part in (preset.model, preset.data, preset.loss))


def with_vit(config, folder):
    return replace(config, encoder=replace(config.encoder, checkpoint=folder))


@pytest.mark.parametrize("name", NAMES)
def test_every_preset_trains_at_a_small_size(name, vit):
    config = replace(PRESETS[name].model, image_size=(24, 32))
    config = with_vit(config, vit) if name in FEATURES else config
    model, image = configs.randomize_zeros(build(config)), random_input(config)
    output = model(image)
    (output.reconstruction - (output.target if name in FEATURES else image)).square().mean().backward()
    for parameter, value in model.named_parameters():
        if value.requires_grad:
            assert value.grad is not None and torch.isfinite(value.grad).all() and value.grad.any(), parameter
        else:
            assert parameter.startswith("encoder.backbone.") and name in FEATURES


@pytest.mark.parametrize("name", NAMES)
def test_every_preset_round_trips_through_json(name):
    values = json.loads(json.dumps(PRESETS[name].to_dict()))
    assert TrainConfig.from_dict(values) == PRESETS[name]


@pytest.mark.parametrize("name", NAMES)
def test_data_and_loss_are_registered(name):
    assert DATASETS.part_of(PRESETS[name].data) and LOSSES.part_of(PRESETS[name].loss)


def test_small_configs_of_model_tests_are_those_of_presets():
    assert PRESETS["tiny"].model == configs.TINY
    assert replace(PRESETS["clevr"].model, image_size=(32, 32)) == configs.CLEVR
    assert replace(PRESETS["clevrtex"].model, image_size=(32, 32)) == configs.CLEVRTEX
    released = PRESETS["graph-ocl"].model
    small = replace(
        released,
        image_size=(16, 16),
        encoder=replace(released.encoder, channels=8),
        slots=replace(released.slots, partition=replace(released.slots.partition, edge_net_channels=8)),
        decoder=replace(released.decoder, channels=(8,)),
    )
    assert small == configs.GRAPH_OCL


@pytest.mark.parametrize("name", PIXELS)
def test_every_preset_can_be_made_small(name):
    kernel_sizes = (3, 3) if isinstance(PRESETS[name].model.encoder, ResNetConfig) else (3,)
    validate(small(None, name, encoder__kernel_sizes=kernel_sizes))


# ----------------------------------------------------------------------------------------------------- the paper's text


def test_clevr_has_the_numbers_of_the_paper():
    config = PRESETS["clevr"]
    assert isinstance(config.model, DiscoveryConfig) and config.model.image_size == (128, 128)
    assert config.model.encoder == CNNConfig(channels=64, kernel_sizes=(5, 5, 5, 5), pyramid_levels=0)
    slots = config.model.slots
    assert isinstance(slots, CutSlotsConfig) and (slots.num_slots, slots.slot_dim, slots.feature_dim) == (12, 64, 64)
    assert (slots.mlp_dim, slots.pool, slots.relative_positions) == (128, "image_mean", False)
    partition = slots.partition
    assert (partition.gamma, partition.temperature, partition.background_temperature) == (0.5, 0.5, 0.5)
    assert partition.combined_temperature == 0.1
    assert (partition.anchor, partition.reach, partition.background) == (0.0, None, "cuts")
    assert config.model.decoder == SpatialBroadcastConfig(channels=(64,), extra_layers=1)
    assert config.data == PlainConfig() and config.loss == MSEConfig()
    assert (config.batch_size, config.lr, config.grad_clip) == (64, 4e-4, 1.0)
    assert (config.warmup_steps, config.lr_decay, config.lr_decay_steps) == (500, 0.5, 20_000)


def test_clevrtex_differs_in_encoder_and_data():
    config, clevr = PRESETS["clevrtex"], PRESETS["clevr"]
    assert config.model.encoder == ResNetConfig(
        channels=100, kernel_sizes=(5, 3, 3, 3, 3), batch_norm=True, pyramid_levels=0
    )
    assert config.model.slots == clevr.model.slots and config.model.decoder == clevr.model.decoder
    assert config.data == TexturedConfig() and config.loss == MSEConfig()


def test_movi_is_clevr_for_pairs_with_eight_slots():
    config, clevr = PRESETS["movi"], PRESETS["clevr"]
    assert isinstance(config.model, PairDiscoveryConfig) and config.model.slots.num_slots == 8
    assert config.model.encoder == clevr.model.encoder and config.model.decoder == clevr.model.decoder
    assert (config.model.match_gamma, config.model.match_temperature, config.model.motion_dim) == (0.1, 0.5, 128)
    assert config.model.pairing == "joint" and config.model.match_dim == 0 and config.max_frame_gap == 1
    assert PRESETS["ours-video"].model.pairing == "separate", "as the recorded runs"
    assert config.data == MovingConfig() and config.batch_size == 32


# ----------------------------------------------------------------------------------------------------------- the others


def test_graph_ocl_has_the_numbers_of_the_released_code():
    """tests/models/test_graph_ocl.py compares the network."""
    config = PRESETS["graph-ocl"]
    assert (config.model.image_size, config.model.slots.num_slots, config.batch_size) == ((128, 128), 12, 64)
    assert config.max_steps == 500 * 40_000 // 64 == 5 * config.lr_decay_steps
    assert (config.lr, config.lr_decay, config.warmup_steps, config.grad_clip) == (4e-4, 0.8, 0, 0.0)
    assert config.precision == "32-true" and config.data == TexturedConfig() and config.loss == MSEConfig()


def test_ours_has_positions_a_pyramid_a_blur_a_texture_ramp_and_mask_consistency():
    config = PRESETS["ours"]
    assert config.model.slots.relative_positions and config.model.encoder.pyramid_levels == 4
    assert config.model.slots.partition.background_anchor == 1.0
    assert config.data == TexturedConfig(texture_ramp_start=2_000, texture_ramp_end=5_000, num_flat_scenes=450)
    consistency = {"mask_consistency": 1e-3, "mask_consistency_start": 2_000}
    assert config.loss == MSEConfig(blur=5.0, blur_steps=2_000, **consistency)
    assert isinstance(config.model.decoder, PixelShuffleConfig)


@pytest.mark.parametrize(
    "changes", [{}, {"slots__partition": "softmax"}, {"slots": "slot-attention"}], ids=["cut", "softmax", "attention"]
)
def test_ours_trains_every_parameter(changes, tmp_path):
    tiny = {"encoder__kernel_sizes": (3, 3), "encoder__pyramid_levels": 1, "max_steps": 2, "data": "textured:1-2"}
    config = small(tmp_path / "run", "ours", **tiny, num_images=4, num_eval_images=2, **changes)
    torch.manual_seed(0)
    before = build(config.model)
    trained = load(train(config))
    assert any(name.startswith("encoder.pyramid.down") for name, _ in trained.named_parameters())
    for (name, value), start in zip(trained.named_parameters(), before.parameters(), strict=True):
        assert value.isfinite().all() and not torch.equal(value, start), name


def test_only_ours_video_has_a_foreground_penalty():
    loss = LOSSES.build(PRESETS["ours-video"].loss)
    steps = {0: 0, 2_999: 0, 3_000: 7e-4 / 3_000, 4_499: 3.5e-4, 5_999: 7e-4, 6_000: 7e-4, 23_999: 7e-4}
    assert [loss.penalty_at(step) for step in steps] == pytest.approx(list(steps.values()))
    others = [LOSSES.build(PRESETS[name].loss) for name in PIXELS if name != "ours-video"]
    assert not any(loss.penalty_at(step) for loss in others for step in (0, 10**6))


# ---------------------------------------------------------------------------------------------------------- photographs

# As in the configs of object-centric-learning-framework and videosaur that presets.py names: checkpoint, slots, their
# dimension, hidden layers of the decoder; batch size, learning rate, warm-up, steps of decay, clipping, steps, flips.
PUBLISHED = {
    "coco": ("facebook/dinov2-base", 7, 256, (2048,) * 3, 64, 4e-4, 10_000, 100_000, 1.0, 500_000, True),
    "voc": ("facebook/dino-vitb16", 6, 256, None, 64, 4e-4, 10_000, 100_000, 1.0, 300_000, True),
    "movi-c": ("facebook/dino-vits8", 11, 128, (1024,) * 3, 64, 4e-4, 10_000, 100_000, 1.0, 500_000, False),
    "movi-e": ("facebook/dino-vits8", 24, 128, (1024,) * 3, 64, 4e-4, 10_000, 100_000, 1.0, 500_000, False),
    "ytvis": ("facebook/dino-vitb16", 7, 64, (1024,) * 3, 128, 4 * 1e-4, 2_500, 100_000, 0.05, 100_000, True),
}


@pytest.mark.parametrize("name", FEATURES)
def test_photographs_have_the_published_numbers(name):
    config, slots = PRESETS[name], PRESETS[name].model.slots
    network = (slots.num_slots, slots.slot_dim, getattr(config.model.decoder, "hidden_dims", None))
    schedule = (config.batch_size, config.lr, config.warmup_steps, config.lr_decay_steps, config.grad_clip)
    run = (*schedule, config.max_steps, config.horizontal_flips)
    assert (config.model.encoder.checkpoint, *network, *run) == PUBLISHED[name]
    assert config.model.image_size == (224, 224) and config.model.encoder.frozen and config.lr_decay == 0.5
    assert isinstance(slots, CutSlotsConfig) and slots.partition == PRESETS["clevr"].model.slots.partition
    assert slots.mlp_dim == 4 * slots.slot_dim and config.loss == FeatureMSEConfig()
    assert config.data == type(config.data)(path=f"data/{name}")


def test_voc_has_a_transformer_of_four_layers_with_four_heads():
    assert PRESETS["voc"].model.decoder == TransformerDecoderConfig(num_layers=4, num_heads=4)


@pytest.mark.parametrize("name", FEATURES)
def test_a_checkpoint_that_was_not_downloaded_is_one_sentence(name, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    checkpoint = PRESETS[name].model.encoder.checkpoint
    assert f"after `hf download {checkpoint}`" in sentence(monkeypatch, ["train", name])
    assert not any(tmp_path.iterdir())


def test_data_that_was_not_prepared_is_one_sentence(monkeypatch, tmp_path, vit):
    monkeypatch.chdir(tmp_path)
    message = sentence(monkeypatch, ["train", "coco", "--encoder.checkpoint", vit])
    assert "data/coco holds no manifest.json; expected a folder written by cutslots prepare" in message


def test_a_plugin_may_add_a_preset(monkeypatch):
    monkeypatch.setattr("cutslots.training.presets.PRESETS", dict(PRESETS))
    monkeypatch.setattr("cutslots.training.presets.SUMMARIES", dict(SUMMARIES))
    from cutslots.training import presets

    add_preset("mine", "a preset of my own", dataclasses.replace(PRESETS["tiny"], seed=3))
    assert presets.PRESETS["mine"].preset == "mine" and presets.PRESETS["mine"].seed == 3
    assert presets.SUMMARIES["mine"] == "a preset of my own"
    with pytest.raises(ValueError, match=r"^preset 'tiny' exists; choose another name$"):
        add_preset("tiny", "another", PRESETS["tiny"])
