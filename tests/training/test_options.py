"""The command line of `cutslots train`: selecting parts, setting their options, and errors."""

import math
import re
import sys

import pytest
import torch

from cutslots import cli, registry
from cutslots.data.builtin import CamoConfig, PlainConfig, TexturedConfig
from cutslots.models.pair_discovery import PairDiscoveryConfig
from cutslots.models.spacetime_discovery import SpacetimeDiscoveryConfig
from cutslots.modules.decoders import PixelShuffleConfig, SpatialBroadcastConfig
from cutslots.modules.encoders import CNNConfig, ResNetConfig
from cutslots.modules.partition import SoftmaxPartitionConfig
from cutslots.modules.slot_attention import SlotAttentionConfig
from cutslots.training.loop import resolve, train
from cutslots.training.options import parse_train
from cutslots.training.presets import PRESETS
from tests.small_runs import sentence, small, train_command
from tests.test_plugins import PLUGIN

TINY = PRESETS["tiny"]


@pytest.fixture(autouse=True)
def forget_plugins(monkeypatch):
    """Parts that a test registers are gone after it."""
    monkeypatch.setattr(registry, "_loaded", {})
    for each in registry.REGISTRIES:
        monkeypatch.setattr(each, "parts", {k: part for k, part in each.parts.items() if part.plugin is None})


def printed(monkeypatch, capsys, *words):
    """Return what a command that ends at once prints, without colors and frames."""
    monkeypatch.setattr(sys, "argv", ["cutslots", *words])
    monkeypatch.setenv("COLUMNS", "300")
    with pytest.raises(SystemExit) as caught:
        cli.main()
    output = capsys.readouterr()
    return caught.value.code, output.out + output.err


# ------------------------------------------------------------------------------------------------------ selecting parts


def test_a_preset_alone():
    assert parse_train(["tiny"]) == TINY


def test_options_of_the_run():
    config = parse_train(["tiny", "--lr", "0.5", "--max-steps", "7", "--image-size", "20", "28", "--no-overwrite"])
    assert (config.lr, config.max_steps, config.model.image_size) == (0.5, 7, (20, 28))
    assert config.batch_size == TINY.batch_size and config.model.encoder == TINY.model.encoder


@pytest.mark.parametrize("words", [["--encoder", "resnet"], ["--encoder=resnet"]])
def test_a_selected_part_keeps_the_options_it_shares(words):
    config = parse_train(["tiny", *words])
    assert config.model.encoder == ResNetConfig(channels=32, kernel_sizes=(5, 3, 3), pyramid_levels=0, batch_norm=True)
    assert config.model.slots == TINY.model.slots


def test_options_of_a_selected_part():
    words = ["--encoder.channels", "8", "--encoder.batch-norm", "--encoder", "resnet"]
    encoder = parse_train(["tiny", *words]).model.encoder
    assert isinstance(encoder, ResNetConfig) and encoder.channels == 8 and encoder.batch_norm


def test_options_with_underscores_and_equals_signs():
    config = parse_train(["tiny", "--encoder.kernel_sizes", "3", "5", "--max_steps=7", "--slots.num_slots=4"])
    assert config.model.encoder.kernel_sizes == (3, 5) and config.max_steps == 7 and config.model.slots.num_slots == 4


def test_parts_inside_parts():
    words = ["--slots.partition", "softmax", "--slots.partition.temperature", "0.7", "--slots.mlp-dim", "9"]
    slots = parse_train(["clevr", *words]).model.slots
    assert isinstance(slots.partition, SoftmaxPartitionConfig) and slots.partition.temperature == 0.7
    assert slots.mlp_dim == 9 and slots.partition.background_temperature == 0.5


def test_slot_attention_keeps_the_number_of_slots():
    slots = parse_train(["clevr", "--slots", "slot-attention", "--slots.num-iterations", "5"]).model.slots
    assert slots == SlotAttentionConfig(num_slots=12, slot_dim=64, mlp_dim=128, num_iterations=5)


def test_the_decoder_keeps_its_channels():
    decoder = parse_train(["tiny", "--decoder", "spatial-broadcast"]).model.decoder
    assert decoder == SpatialBroadcastConfig(channels=(32, 32))
    assert parse_train(["clevr", "--decoder", "pixel-shuffle"]).model.decoder == PixelShuffleConfig(channels=(64,))


def test_another_model_keeps_the_parts():
    model = parse_train(["clevr", "--model", "pair-discovery", "--match-gamma", "0.3"]).model
    assert isinstance(model, PairDiscoveryConfig) and model.match_gamma == 0.3
    assert (model.encoder, model.slots, model.decoder) == tuple(
        getattr(PRESETS["clevr"].model, name) for name in ("encoder", "slots", "decoder")
    )


def test_the_spacetime_model():
    words = ["--model", "spacetime-discovery", "--slots.partition", "spacetime-cut", "--num-frames", "3"]
    model = parse_train(["movi", *words]).model
    assert isinstance(model, SpacetimeDiscoveryConfig) and model.frames == 3 and model.slots.num_slots == 8


def test_data_by_text():
    assert parse_train(["clevr", "--data", "plain:2-5"]).data == PlainConfig((2, 5))
    assert parse_train(["clevr", "--data", "plain", "--data.num-objects", "2", "5"]).data == PlainConfig((2, 5))


def test_data_keeps_the_curriculum_of_the_preset():
    ramp = {"texture_ramp_start": 2_000, "texture_ramp_end": 5_000, "num_flat_scenes": 450}
    assert parse_train(["ours", "--data", "camo:1-2"]).data == CamoConfig(num_objects=(1, 2), **ramp)
    assert parse_train(["ours", "--data", "textured"]).data == TexturedConfig(**ramp)
    assert parse_train(["ours", "--data", "plain"]).data == PlainConfig(), "which has no textures"
    words = ["--data", "textured:1-2", "--data.texture-ramp-end", "6000"]
    assert parse_train(["ours", *words]).data == TexturedConfig((1, 2), **(ramp | {"texture_ramp_end": 6_000}))


def test_the_last_selection_counts():
    assert isinstance(parse_train(["tiny", "--encoder", "resnet", "--encoder", "cnn"]).model.encoder, CNNConfig)


def test_plugins_are_loaded_before_parts_are_selected():
    words = ["--plugin", str(PLUGIN), "--encoder", "patches", "--encoder.channels", "5", "--loss", "absolute"]
    config = parse_train(["tiny", *words])
    assert config.plugins == (str(PLUGIN),) and config.model.encoder.channels == 5
    assert config.to_dict()["plugins"] == ["own_parts.py"], "run.json names the plugins that the parts need"
    assert parse_train(["tiny", "--plugin", str(PLUGIN)]).to_dict()["plugins"] == []


def test_a_plugin_that_does_not_exist(monkeypatch, tmp_path):
    said = sentence(monkeypatch, ["train", "tiny", "--plugin", str(tmp_path / "no.py")])
    assert said == f"cutslots: plugin: there is no {tmp_path / 'no.py'}; expected a Python file or the name of a module"


# --------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    "words, message",
    [
        (
            ["--encoder.batch-norm"],
            "--encoder.batch-norm is an option of the encoder resnet, but cnn is selected; "
            "pass --encoder resnet too, or leave it out",
        ),
        (
            ["--encoder.no-batch-norm"],
            "--encoder.no-batch-norm is an option of the encoder resnet, but cnn is selected; "
            "pass --encoder resnet too, or leave it out",
        ),
        (
            ["--slots.num-iterations=5"],
            "--slots.num-iterations is an option of the slot module slot-attention, but cut-slots is selected; "
            "pass --slots slot-attention too, or leave it out",
        ),
        (
            ["--decoder.extra_layers", "2"],
            "--decoder.extra-layers is an option of the decoder spatial-broadcast, graph-ocl-decoder, "
            "but pixel-shuffle is selected; pass --decoder spatial-broadcast too, or leave it out",
        ),
        (
            ["--slots.partition", "softmax", "--slots.partition.gamma", "1"],
            "--slots.partition.gamma is an option of the partition cut, spacetime-cut, min-cut, graph-ocl-cut, "
            "but softmax is selected; pass --slots.partition cut too, or leave it out",
        ),
        (
            ["--data.low-contrast", "0.5"],
            "--data.low-contrast is an option of the dataset textured, ood, camo, but plain is selected; "
            "pass --data textured too, or leave it out",
        ),
        (
            ["--match-gamma", "0.5"],
            "--match-gamma is an option of the model pair-discovery, but discovery is selected; "
            "pass --model pair-discovery too, or leave it out",
        ),
        (
            ["--slots", "slot-attention", "--slots.partition", "cut"],
            "--slots.partition is an option of the slot module cut-slots, graph-ocl-slots, "
            "but slot-attention is selected; pass --slots cut-slots too, or leave it out",
        ),
        (
            ["--slots", "slot-attention", "--slots.partition.gamma", "1"],
            "--slots.partition.gamma: there is no --slots.partition; expected one of --model, --encoder, --slots, "
            "--decoder, --data, --loss",
        ),
    ],
)
def test_an_option_of_a_part_that_is_not_selected(monkeypatch, words, message):
    assert sentence(monkeypatch, ["train", "tiny", *words]) == f"cutslots: {message}"


@pytest.mark.parametrize(
    "words, message",
    [
        (
            ["--encoder.nope", "3"],
            "--encoder.nope is not an option of the encoder cnn; expected one of --encoder.channels, "
            "--encoder.kernel-sizes, --encoder.pyramid-levels",
        ),
        (
            ["--enc.channels", "3"],
            "--enc.channels: there is no --enc; expected one of --model, --encoder, --slots, --slots.partition, "
            "--decoder, --data, --loss",
        ),
    ],
)
def test_an_option_that_does_not_exist(monkeypatch, words, message):
    assert sentence(monkeypatch, ["train", "tiny", *words]) == f"cutslots: {message}"


def test_an_option_of_the_run_that_does_not_exist(monkeypatch, capsys):
    code, output = printed(monkeypatch, capsys, "train", "tiny", "--frobnicate", "3")
    assert code == 2 and "--frobnicate" in output and "cutslots train tiny --help" in output


@pytest.mark.parametrize(
    "flag, known",
    [
        ("--encoder", "encoder is 'nope'; expected one of cnn, resnet"),
        ("--slots", "slot module is 'nope'; expected one of cut-slots, graph-ocl-slots, slot-attention"),
        (
            "--slots.partition",
            "partition is 'nope'; expected one of cut, softmax, spacetime-cut, min-cut, graph-ocl-cut",
        ),
        ("--decoder", "decoder is 'nope'; expected one of spatial-broadcast, pixel-shuffle, graph-ocl-decoder"),
        ("--model", "model is 'nope'; expected one of discovery, pair-discovery, spacetime-discovery"),
        ("--loss", "loss is 'nope'; expected one of mse"),
        ("--data", "data is 'nope'; expected one of plain, textured, ood, camo, moving, clevr:DIR"),
    ],
)
def test_unknown_parts_list_the_known_ones(monkeypatch, flag, known):
    assert sentence(monkeypatch, ["train", "tiny", flag, "nope"]).startswith(f"cutslots: {known}")


@pytest.mark.parametrize("words", [["nope"], ["nope", "--lr", "1"], []])
def test_unknown_presets_list_the_known_ones(monkeypatch, capsys, words):
    code, output = printed(monkeypatch, capsys, "train", *words)
    assert code == 2 and all(name in output for name in PRESETS)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"batch_size": 0}, "batch_size is 0; expected an integer from 1 to 65,536"),
        ({"max_steps": 0}, "max_steps is 0; expected an integer from 1 to 1,000,000,000"),
        ({"max_steps": -5}, "max_steps is -5; expected an integer from 1 to 1,000,000,000"),
        ({"lr": "nan"}, "lr is nan; expected a number from 1e-12 to 65,536"),
        ({"lr": "inf"}, "lr is inf; expected a number from 1e-12 to 65,536"),
        ({"lr_decay": 0}, "lr_decay is 0.0; expected a number from"),
        ({"lr_decay_steps": 0}, "lr_decay_steps is 0; expected an integer from 1"),
        ({"warmup_steps": -1}, "warmup_steps is -1; expected an integer from 0"),
        ({"eval_every": 0}, "eval_every is 0; expected an integer from 1"),
        ({"num_eval_images": 0}, "num_eval_images is 0; expected an integer from 1"),
        ({"num_images": 0}, "num_images is 0; expected an integer from 1 to 1,000,000,000 or endless or none"),
        ({"devices": 0}, "devices is 0; expected an integer from 1"),
        ({"num_nodes": 0}, "num_nodes is 0; expected an integer from 1"),
        ({"seed": -1}, "seed is -1; expected an integer from 0 to 4,294,967,295"),
        ({"seed": 2**32}, "seed is 4294967296; expected an integer from 0 to 4,294,967,295"),
        ({"grad_clip": -1.0}, "grad_clip is -1.0; expected a number from 0"),
        ({"grad_clip": math.nan}, "grad_clip is nan; expected a number from 0"),
        ({"max_minutes": "nan"}, "max_minutes is nan; expected a number"),
        ({"max_minutes": -1}, "max_minutes is -1.0; expected a number"),
        ({"checkpoint_minutes": -1}, "checkpoint_minutes is -1.0; expected a number"),
        ({"encoder__channels": 0}, "encoder.channels is 0; expected an integer from 1 to 65,536"),
        ({"encoder__kernel_sizes": (300,)}, "encoder.kernel_sizes is (300,); expected at most 64 values, each"),
        ({"encoder__kernel_sizes": (2,)}, "kernel_sizes is (2,); expected an odd integer for each of at least 1 layer"),
        ({"slots__slot_dim": 0}, "slots.slot_dim is 0; expected an integer from 1 to 65,536"),
        ({"slots__num_slots": 1}, "num_slots is 1; expected at least 2"),
        (
            {"slots__partition__temperature": -1},
            "slots.partition.temperature is -1.0; expected a number from 1e-06 to 1,000,000",
        ),
        ({"slots__partition__edge_net_channels": 0}, "slots.partition.edge_net_channels is 0; expected an integer"),
        ({"decoder__channels": (0,)}, "decoder.channels is (0,); expected at most 64 values, each an integer from 1"),
        ({"data": "plain:few"}, "data is 'plain:few'; expected numbers of objects as in plain:2-5"),
        ({"data": "plain:9-2"}, "data.num_objects is (9, 2); expected a range between 1 and 10"),
        ({"data__num_objects": (9, 2)}, "data.num_objects is (9, 2); expected a range between 1 and 10"),
        ({"data": "/"}, "/ holds no folder images/"),
    ],
)
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_bad_values_are_one_sentence(tmp_path, monkeypatch, changes, message):
    said = sentence(monkeypatch, train_command(tmp_path / "run", **changes))
    assert said.startswith(f"cutslots: {message}") and not (tmp_path / "run").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="has CUDA")
def test_cuda_that_is_not_there(tmp_path, monkeypatch):
    said = sentence(monkeypatch, train_command(tmp_path / "run", accelerator="cuda"))
    assert said == "cutslots: accelerator is cuda; there is no CUDA device here"


@pytest.mark.skipif(torch.mps.is_available(), reason="has MPS")
def test_mps_that_is_not_there(tmp_path):
    with pytest.raises(ValueError, match=r"^accelerator is mps; "):
        train(small(tmp_path / "run", accelerator="mps"))


# --------------------------------------------------------------------------------------------------- precision, compile


def test_auto_is_resolved():
    resolved = resolve(small(None))
    assert (resolved.accelerator, resolved.precision, resolved.compile) == ("cpu", "32-true", "off")
    assert resolve(small(None, precision="bf16-mixed", compile="on")).precision == "bf16-mixed"
    assert resolve(small(None, compile="on")).compile == "on"


def test_training_in_bfloat16(tmp_path):
    run = train(small(tmp_path / "run", precision="bf16-mixed", max_steps=2))
    assert '"precision": "bf16-mixed"' in (run / "run.json").read_text()


@pytest.mark.parametrize("option, compiled", [("on", True), ("off", False), ("auto", False)])
def test_compile(tmp_path, monkeypatch, option, compiled):
    calls = []
    monkeypatch.setattr(torch, "compile", lambda model: calls.append(model) or model)
    train(small(tmp_path / "run", compile=option, max_steps=1))
    assert bool(calls) is compiled, "auto is on for CUDA alone"


def test_an_unknown_precision(monkeypatch, capsys, tmp_path):
    code, output = printed(monkeypatch, capsys, *train_command(tmp_path / "run", precision="16-true"))
    assert code == 2 and "bf16-mixed" in output and not (tmp_path / "run").exists()


def test_max_frame_gap_is_for_models_of_clips(tmp_path):
    with pytest.raises(ValueError, match=r"^max_frame_gap is 8; a model of images expects 1$"):
        train(small(tmp_path / "run", max_frame_gap=8))
    assert not (tmp_path / "run").exists()


# ----------------------------------------------------------------------------------------------------------------- help


def options_in(help_text):
    return set(re.findall(r"(?<![\w.-])--[a-z][\w.-]*", help_text))


def test_help_shows_the_options_of_the_selected_parts(monkeypatch, capsys):
    code, cnn = printed(monkeypatch, capsys, "train", "tiny", "--help")
    assert code == 0 and {"--lr", "--encoder", "--encoder.channels", "--slots.partition.gamma"} <= options_in(cnn)
    assert "--encoder.batch-norm" not in cnn and "--slots.num-iterations" not in cnn and "--match-gamma" not in cnn
    assert "--plugins" not in cnn and "--preset" not in cnn


def test_help_follows_the_selection(monkeypatch, capsys):
    words = ["--encoder", "resnet", "--slots", "slot-attention", "--model", "pair-discovery", "--data", "camo"]
    _, text = printed(monkeypatch, capsys, "train", "tiny", *words, "--help")
    expected = {"--encoder.batch-norm", "--slots.num-iterations", "--match-gamma", "--data.texture-ramp-end"}
    assert expected <= options_in(text) and "--slots.partition" not in options_in(text)
    assert "(default: resnet)" in text and "(default: slot-attention)" in text


def test_help_shows_the_values_of_the_preset(monkeypatch, capsys):
    _, text = printed(monkeypatch, capsys, "train", "ours", "--help")
    assert "(default: 0.001)" in text and "(default: 16000)" in text and "(default: textured)" in text


def test_help_of_train_lists_the_presets(monkeypatch, capsys):
    code, text = printed(monkeypatch, capsys, "train", "--help")
    positions = [text.index(f" {name} ") for name in PRESETS]
    assert code == 0 and positions == sorted(positions), "in the order of the table in presets.py"


def test_help_shows_the_parts_of_plugins(monkeypatch, capsys):
    _, text = printed(monkeypatch, capsys, "train", "tiny", "--plugin", str(PLUGIN), "--encoder", "patches", "--help")
    assert (
        "{cnn,resnet,patch-vit,pretrained,vit,patches}" in text
        and "(default: patches)" in text
        and "--encoder.kernel-sizes" not in text
    )


@pytest.mark.parametrize("words", [["--plugin", str(PLUGIN), "tiny"], [f"--plugin={PLUGIN}", "tiny"]])
def test_plugins_may_precede_the_preset(words):
    assert parse_train([*words, "--loss", "absolute"]).plugins == (str(PLUGIN),)


def test_help_with_a_plugin_and_without_a_preset(monkeypatch, capsys):
    code, text = printed(monkeypatch, capsys, "train", "--plugin", str(PLUGIN), "--help")
    assert code == 0 and "graph-ocl" in text


def test_options_that_the_data_names_are_not_the_presets():
    config = parse_train(["ours", "--data", "textured:texture_ramp_start=0,texture_ramp_end=0"])
    assert (config.data.texture_ramp_start, config.data.texture_ramp_end) == (0, 0)
    assert parse_train(["ours", "--data", "ood:2-4"]).data.texture_ramp_end == 5_000


def test_values_are_checked_when_all_options_are_known():
    words = ["ours", "--data", "textured:texture_ramp_end=1000", "--data.texture-ramp-start", "0"]
    config = parse_train(words)
    config.validate()
    assert (config.data.texture_ramp_start, config.data.texture_ramp_end) == (0, 1_000)
