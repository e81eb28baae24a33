"""The encoder `pretrained`, and the checkpoints of encoders."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from cutslots.modules.encoders import ENCODERS, CNNConfig, ResNetConfig
from cutslots.modules.patch_vit import PatchViTConfig
from cutslots.modules.pretrained import PretrainedConfig, PretrainedEncoder, load_encoder, save_encoder

CONFIGS = {
    "cnn": CNNConfig(6, (3, 3), 1),
    "resnet": ResNetConfig(6, (3, 3), batch_norm=True, pyramid_levels=1),
    "patch-vit": PatchViTConfig(8, 1, 2, 4),
}
SIZE = (16, 24)


def make(folder, name="resnet"):
    """Write a checkpoint of random weights to a folder; return the encoder in evaluation mode."""
    folder.mkdir(exist_ok=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        encoder = ENCODERS.build(CONFIGS[name])
        for _ in range(3):
            encoder.train()(torch.randn(4, 3, *SIZE))  # statistics of batches
    save_encoder(encoder, CONFIGS[name], folder)
    return encoder.eval()


@pytest.fixture
def folder(tmp_path):
    make(tmp_path / "encoder")
    return tmp_path / "encoder"


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("name", CONFIGS)
def test_features_are_those_of_the_encoder(tmp_path, name, frozen):
    encoder, x = make(tmp_path, name), torch.randn(2, 3, *SIZE)
    loaded = PretrainedEncoder(tmp_path, frozen, layer_norm=False).eval()
    assert loaded(x).equal(encoder(x)) and loaded.normalize(x).equal(encoder.normalize(x))
    assert loaded.out_size(SIZE) == encoder.out_size(SIZE) and loaded.out_channels == encoder.out_channels
    if frozen:
        assert loaded.train()(x).equal(encoder(x)), "statistics stay as they are"


def test_the_checkpoint_is_two_files_without_code(folder):
    assert {path.name for path in folder.iterdir()} == {"config.json", "model.safetensors"}
    config = json.loads((folder / "config.json").read_text())
    assert config == ENCODERS.to_dict(CONFIGS["resnet"]) | {"plugins": []} and config["name"] == "resnet"


def test_layer_norm_is_over_the_channels_of_a_position(folder):
    encoder, x = load_encoder(folder), torch.randn(2, 3, *SIZE)
    rows = encoder(x).movedim(1, -1)
    centered = rows - rows.mean(-1, keepdim=True)
    expected = centered / (centered.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(PretrainedEncoder(folder)(x), expected.movedim(-1, 1))


@pytest.mark.parametrize("size, grid", [(SIZE, (4, 6)), ((18, 24), (4, 6))])
def test_pooled_features_are_means_of_blocks(folder, size, grid):
    encoder, x = load_encoder(folder), torch.randn(2, 3, *size)
    pooled = PretrainedEncoder(folder, pool=2, layer_norm=False)
    features = encoder(x)
    expected = [[features[:, :, 2 * i : 2 * i + 2, 2 * j : 2 * j + 2].mean((2, 3)) for j in range(6)] for i in range(4)]
    expected = torch.stack([torch.stack(row, -1) for row in expected], -2)
    torch.testing.assert_close(pooled(x), expected)
    assert pooled.out_size(size) == grid
    with pytest.raises(ValueError, match=r"^encoder.pool is 9; expected at most 8, the smaller side of the grid$"):
        PretrainedEncoder(folder, pool=9).out_size(SIZE)


# ------------------------------------------------------------------------------------------------- frozen, fine-tuned


def test_frozen_weights_are_not_trained(folder):
    encoder = PretrainedEncoder(folder).train()
    assert encoder.training and not encoder.backbone.training
    assert not encoder(torch.randn(1, 3, *SIZE)).requires_grad
    assert encoder.parameter_groups() == [{"params": [], "lr_scale": 0.1}]


def test_fine_tuned_weights_have_a_rate_of_their_own(folder):
    encoder = PretrainedEncoder(folder, frozen=False, lr_scale=0.3).train()
    (group,) = encoder.parameter_groups()
    assert encoder.backbone.training and group["lr_scale"] == 0.3
    encoder(torch.randn(2, 3, *SIZE))[:, 0].sum().backward()
    assert group["params"] and all(p.grad is not None for p in group["params"])
    assert encoder.state_dict().keys() == {f"backbone.{name}" for name in load_file(folder / "model.safetensors")}


def test_state_dict_of_a_frozen_encoder_is_a_norm(folder):
    encoder = PretrainedEncoder(folder)
    tensors = [x for x in load_file(folder / "model.safetensors").values() if x.is_floating_point()]
    norm = torch.cat([x.flatten().double() for x in tensors]).norm().item()
    state = torch.nn.Sequential(encoder).state_dict()
    assert state.keys() == {"0.weight_norm"} and state["0.weight_norm"].item() * 1e-6 == pytest.approx(norm, rel=1e-6)
    torch.nn.Sequential(encoder).load_state_dict(state)


@pytest.mark.parametrize("name", ["stem.0.weight", "stem.1.running_mean"])
def test_another_checkpoint_in_the_place_of_the_first_is_an_error(folder, name):
    state = PretrainedEncoder(folder).state_dict()
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {name: tensors[name] + 0.5}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"^encoder.checkpoint is .*; expected the checkpoint that the model was"):
        PretrainedEncoder(folder).load_state_dict(state)


@pytest.mark.parametrize("way", ["to_empty", "assign"])
def test_frozen_weights_are_read_when_the_encoder_leaves_the_meta_device(folder, way):
    expected, x = PretrainedEncoder(folder), torch.randn(1, 3, *SIZE)
    with torch.device("meta"):
        encoder = PretrainedEncoder(folder)
    assert {p.device.type for p in encoder.parameters()} == {"meta"}
    if way == "to_empty":
        encoder.to_empty(device="cpu")
    else:
        encoder.load_state_dict(expected.state_dict(), assign=True)
    assert encoder(x).equal(expected(x))


def test_precisions(folder):
    expected, x = PretrainedEncoder(folder), torch.randn(1, 3, *SIZE)
    there_and_back = PretrainedEncoder(folder).half().float()
    assert there_and_back(x).equal(expected(x)), "weights are read again"
    assert PretrainedEncoder(folder).double()(x.double()).dtype == torch.float64


def test_loading_does_not_change_the_random_state(folder):
    torch.manual_seed(0)
    load_encoder(folder)
    after = torch.rand(3)
    torch.manual_seed(0)
    assert torch.rand(3).equal(after)


def test_the_fingerprint_is_that_of_the_features(folder, tmp_path):
    first = PretrainedEncoder(folder).fingerprint()
    assert json.loads(json.dumps(first)) == first == PretrainedEncoder(folder).fingerprint()
    others = [PretrainedEncoder(folder, pool=2), PretrainedEncoder(folder, layer_norm=False)]
    make(tmp_path / "other", "cnn")
    others.append(PretrainedEncoder(tmp_path / "other"))
    assert all(other.fingerprint() != first for other in others)
    assert PretrainedEncoder(folder, frozen=False).fingerprint() is None


# -------------------------------------------------------------------------------------------------------------- errors


DAMAGES = {
    "no config": ("config.json", None, "expected a folder with config.json and model.safetensors, as `cutslots pret"),
    "no weights": ("model.safetensors", None, "expected a folder with config.json and model.safetensors, as `cutslots"),
    "no JSON": ("config.json", b"{", "config.json is not readable as JSON"),
    "a list": ("config.json", b"[]", "config.json is not the config of an encoder: encoder is"),
    "a model": ("config.json", b'{"name": "discovery"}', "encoder is 'discovery'; expected one of cnn, resnet"),
    "no such option": ("config.json", b'{"name": "cnn", "depth": 3}', "has no option 'depth'"),
    "too large": ("config.json", b'{"name": "cnn", "channels": 65536}', "parameters; expected at most 1e"),
    "another size": ("config.json", b'{"name": "resnet", "channels": 7}', "does not fit its config.json: "),
    "cut off": ("model.safetensors", b"\x10\x00", "is not a complete safetensors file"),
    "a plugin's": (
        "config.json",
        b'{"name": "own", "plugins": ["own.py"]}',
        "an encoder with parts of the plugin own.py",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_folder_gives_one_sentence(folder, name):
    file, content, message = DAMAGES[name]
    (folder / file).unlink() if content is None else (folder / file).write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        PretrainedEncoder(folder)
    assert "\n" not in str(caught.value) and str(caught.value).startswith("encoder.checkpoint")


def test_weights_that_are_not_finite(folder):
    tensors = load_file(folder / "model.safetensors")
    tensors["stem.0.weight"][0] = torch.nan
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"^encoder.checkpoint: .* holds values in stem.0.weight that are not finite"):
        PretrainedEncoder(folder)


def test_config_builds_the_encoder(folder):
    encoder = ENCODERS.build(PretrainedConfig(str(folder), frozen=False, lr_scale=0.5, pool=2, layer_norm=False))
    assert (encoder.frozen, encoder.lr_scale, encoder.pool) == (False, 0.5, 2)
