"""The encoder `vit`. References are transformers' own models, and formulas written out."""

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

import cutslots.modules.vit as module
from cutslots.modules.encoders import ENCODERS
from cutslots.modules.vit import ViTConfig, ViTEncoder, find_folder
from tests.modules.small_vits import CHANNELS, KINDS, MEAN, PATCH, SIZE, STD, make_vit

SIZES = [(SIZE, SIZE), (24, 24), (8, 32), (32, 8), (12, 20), (4, 4)]  # (8, 32) has as many patches as (16, 16)


@pytest.fixture
def folder(tmp_path):
    make_vit(tmp_path / "vit")
    return tmp_path / "vit"


def reference(vit, kind, x):
    """Return patch features by transformers' own forward pass."""
    if kind == "mae":
        vit.config.mask_ratio = 0.0
        noise = torch.rand(len(x), x.shape[2] // PATCH * (x.shape[3] // PATCH))
        out = vit(x, noise=noise, interpolate_pos_encoding=True)
        tokens = out.last_hidden_state[:, 1:]  # in the order of the noise
        return tokens.gather(1, out.ids_restore[:, :, None].expand_as(tokens))
    if kind == "vit":
        return vit(x, interpolate_pos_encoding=True).last_hidden_state[:, 1:]
    return vit(x).last_hidden_state[:, 1 + (3 if "registers" in kind else 0) :]


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_features_are_those_of_transformers(tmp_path, kind, frozen):
    vit, encoder = make_vit(tmp_path, kind), ViTEncoder(tmp_path, frozen).eval()
    assert encoder.out_channels == CHANNELS and encoder.patch_size == (PATCH, PATCH)
    for size in SIZES:
        x = torch.randn(2, 3, *size)
        features, h, w = encoder(x), size[0] // PATCH, size[1] // PATCH
        assert features.shape == (2, CHANNELS, h, w) and encoder.out_size(size) == (h, w)
        expected = reference(vit, kind, x)
        torch.testing.assert_close(features.flatten(2).mT, expected, rtol=0, atol=1e-5)
        assert features[1, :, h - 1, 0].allclose(expected[1, (h - 1) * w], atol=1e-5)  # rows first


def test_positions_at_the_size_of_pretraining_are_not_interpolated(tmp_path):
    vit, encoder = make_vit(tmp_path), ViTEncoder(tmp_path)
    x = torch.randn(1, 3, SIZE, SIZE)
    torch.testing.assert_close(encoder(x).flatten(2).mT, vit(x).last_hidden_state[:, 1:], rtol=0, atol=1e-6)


def test_mae_masks_nothing(tmp_path):
    make_vit(tmp_path, "mae", mask_ratio=0.75)
    encoder, x = ViTEncoder(tmp_path), torch.randn(2, 3, SIZE, SIZE)
    assert encoder(x).equal(encoder(x))
    changed = x.clone()
    changed[:, :, -PATCH:, -PATCH:] += 1
    assert ((encoder(changed) - encoder(x)).abs().amax(1) > 1e-6).all()  # every patch sees the last one


def test_images_are_normalized_as_the_checkpoint_says(folder):
    image = torch.rand(2, 3, SIZE, SIZE)
    expected = (image - torch.tensor(MEAN)[:, None, None]) / torch.tensor(STD)[:, None, None]
    torch.testing.assert_close(ViTEncoder(folder).normalize(image), expected)
    (folder / "preprocessor_config.json").write_text('{"do_normalize": false}')
    assert ViTEncoder(folder).normalize(image).equal(image)


def test_weights_in_half_precision_become_float32(folder):
    file = folder / "model.safetensors"
    save_file({k: v.half() for k, v in load_file(file).items()}, file, {"format": "pt"})
    assert {p.dtype for p in ViTEncoder(folder).parameters()} == {torch.float32}


# ------------------------------------------------------------------------------------------------- frozen, fine-tuned


def test_frozen_weights_are_not_trained_and_have_no_dropout(folder):
    encoder, x = ViTEncoder(folder).train(), torch.randn(1, 3, SIZE, SIZE)
    assert encoder.training and not encoder.backbone.training
    assert not encoder(x).requires_grad and encoder(x).equal(encoder.eval()(x))
    assert encoder.parameter_groups() == [{"params": [], "lr_scale": 0.1}]


@pytest.mark.parametrize("kind", KINDS)
def test_all_weights_that_are_fine_tuned_get_a_gradient(tmp_path, kind):
    make_vit(tmp_path, kind)
    encoder = ViTEncoder(tmp_path, frozen=False, lr_scale=0.3).train()
    assert encoder.backbone.training
    (group,) = encoder.parameter_groups()
    assert group["lr_scale"] == 0.3
    encoder(torch.randn(1, 3, 8, 12)).square().sum().backward()
    assert group["params"] and all(p.grad is not None for p in group["params"])
    left = {name for name, p in encoder.named_parameters() if not p.requires_grad}
    fixed = {"vit": set(), "mae": {"backbone.embeddings.position_embeddings"}}  # sines and cosines
    assert left == fixed.get(kind, {"backbone.embeddings.mask_token"})


def test_state_dict_of_a_frozen_encoder_is_the_norm_of_its_weights(folder):
    encoder = ViTEncoder(folder)
    state = torch.nn.Sequential(encoder).state_dict()
    norm = torch.cat([p.flatten().double() for p in encoder.parameters()]).norm().item()
    assert encoder.state_dict().keys() == {"weight_norm"} and state.keys() == {"0.weight_norm"}
    assert state["0.weight_norm"].item() * 1e-6 == pytest.approx(norm, rel=1e-6)
    before = [p.clone() for p in encoder.parameters()]
    torch.nn.Sequential(encoder).load_state_dict(state)
    assert all(a.equal(b) for a, b in zip(before, encoder.parameters(), strict=True))
    with pytest.raises(RuntimeError, match="Unexpected key"):
        encoder.load_state_dict(encoder.state_dict() | {"other": torch.zeros(1)})


def test_another_checkpoint_in_the_place_of_the_first_is_an_error(folder, tmp_path):
    state = ViTEncoder(folder).state_dict()
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"layernorm.bias": tensors["layernorm.bias"] + 0.1}, folder / "model.safetensors")
    encoder = ViTEncoder(folder)
    with pytest.raises(
        ValueError, match=r"^encoder.checkpoint is .*; expected the checkpoint that the model was trained"
    ):
        torch.nn.Sequential(encoder).load_state_dict({"0.weight_norm": state["weight_norm"]})
    encoder.load_state_dict(encoder.state_dict())
    encoder.load_state_dict({"weight_norm": (encoder.weight_norm * (1 + 1e-6)).long()})


def test_missing_weights_of_other_modules_are_still_reported(folder):
    model = torch.nn.ModuleDict({"encoder": ViTEncoder(folder), "head": torch.nn.Linear(2, 2)})
    with pytest.raises(RuntimeError, match=r'in state_dict: "encoder.weight_norm", "head.weight", "head.bias"'):
        model.load_state_dict({})


def test_state_dict_of_a_fine_tuned_encoder_has_its_weights(folder):
    encoder, other = ViTEncoder(folder, frozen=False), ViTEncoder(folder, frozen=False)
    assert encoder.state_dict().keys() == dict(encoder.named_parameters()).keys()
    with torch.no_grad():
        encoder.backbone.layernorm.weight.add_(1)
    other.load_state_dict(encoder.state_dict())
    assert other.backbone.layernorm.weight.equal(encoder.backbone.layernorm.weight)


@pytest.mark.parametrize("way", ["to_empty", "assign"])
def test_frozen_weights_are_read_when_the_encoder_leaves_the_meta_device(folder, way):
    expected, x = ViTEncoder(folder), torch.randn(1, 3, 8, 8)
    with torch.device("meta"):
        encoder = ViTEncoder(folder)
    assert {p.device.type for p in encoder.parameters()} == {"meta"}
    if way == "to_empty":
        encoder.to_empty(device="cpu")
    else:
        encoder.load_state_dict(expected.state_dict(), assign=True)
    assert encoder(x).equal(expected(x))


# -------------------------------------------------------------------------------------------------------------- errors


def test_image_size_must_be_a_multiple_of_the_patch_size(folder):
    message = rf"^image_size is \(18, 16\); expected multiples of \(4, 4\), .* of {folder}, such as \(16, 16\)$"
    with pytest.raises(ValueError, match=message):
        ViTEncoder(folder).out_size((18, 16))


@pytest.mark.parametrize("name", ["facebook/dinov2-nowhere", "nowhere", "/no/such/folder", "", "a/b/c", "../no-vit"])
def test_missing_checkpoint_says_how_to_get_it(name, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    shown = name if name == "facebook/dinov2-nowhere" else "facebook/dinov2-small"
    with pytest.raises(ValueError, match=rf"^encoder.checkpoint is '{name}', .* `hf download {shown}`$"):
        ViTEncoder(name)


def test_checkpoint_by_its_name_on_the_hub(folder, monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--owner--vit"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    (repository / "snapshots").mkdir()
    folder.rename(repository / "snapshots" / ("0" * 40))
    monkeypatch.setattr("huggingface_hub._snapshot_download.constants.HF_HUB_CACHE", str(tmp_path))
    assert find_folder("owner/vit").name == "0" * 40
    assert ViTEncoder("owner/vit").out_channels == CHANNELS


def test_missing_transformers_says_how_to_get_it(folder, monkeypatch):
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ValueError, match=r"^encoder vit needs the package transformers: pip install 'cutslots\[vit\]'$"
    ):
        ViTEncoder(folder)


def damage(folder, name, content):
    path = folder / name
    if content is None:
        path.unlink()
    else:
        path.write_text(content) if isinstance(content, str) else path.write_bytes(content)


DAMAGES = {
    "no config": ("config.json", None, "expected config.json and model.safetensors in"),
    "no weights": ("model.safetensors", None, "expected config.json and model.safetensors in"),
    "no normalisation": ("preprocessor_config.json", None, "there is no .*preprocessor_config.json"),
    "config is no JSON": ("config.json", "{", "config.json is not readable as a JSON object"),
    "config is a list": ("config.json", "[]", "config.json is not readable as a JSON object"),
    "another architecture": ("config.json", '{"model_type": "bert"}', "has model_type 'bert'; expected vit, dinov2"),
    "no architecture": ("config.json", "{}", "has model_type None; expected vit, dinov2"),
    "cut off": ("model.safetensors", b"\x10\x00", "cannot be loaded: "),
    "no numbers": ("preprocessor_config.json", '{"image_mean": [0, 0], "image_std": 1}', "expected three numbers each"),
    "zero": ("preprocessor_config.json", '{"image_mean": [0, 0, 0], "image_std": [1, 0, 1]}', "those of image_std pos"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_folder_gives_one_sentence(folder, name):
    file, content, message = DAMAGES[name]
    damage(folder, file, content)
    with pytest.raises(ValueError, match=message) as caught:
        ViTEncoder(folder)
    assert "\n" not in str(caught.value) and str(caught.value).startswith("encoder.checkpoint")


def test_pickled_weights_are_not_loaded(folder):
    (folder / "model.safetensors").unlink()
    torch.save({}, folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match="pickled weights may run code and are not loaded"):
        ViTEncoder(folder)


def test_incomplete_weights_are_an_error(folder):
    tensors = load_file(folder / "model.safetensors")
    tensors.pop("layernorm.weight")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"lack layernorm.weight; expected a complete file$"):
        ViTEncoder(folder)


def test_weights_of_another_size_are_an_error(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 48}))
    with pytest.raises(ValueError, match=r"^encoder.checkpoint: .* cannot be loaded") as caught:
        ViTEncoder(folder)
    assert "\n" not in str(caught.value)


def test_transformers_is_imported_when_an_encoder_is_built():
    code = "import sys, cutslots.training.options; assert 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_config_builds_the_encoder(folder):
    encoder = ENCODERS.build(ViTConfig(str(folder), frozen=False, lr_scale=0.5))
    assert (encoder.frozen, encoder.lr_scale, encoder.checkpoint) == (False, 0.5, str(folder))
