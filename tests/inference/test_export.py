"""`cutslots export`: onnxruntime computes from the file what torch computes from the model."""

import importlib.util
import logging
from dataclasses import replace

import numpy as np
import pytest
import torch

import cutslots
from cutslots.inference import export as exporting
from cutslots.inference.export import export, onnx_bytes
from cutslots.models.checkpoints import load, save
from cutslots.models.discovery import DiscoveryOutput, build
from cutslots.modules.partition import CutPartitionConfig
from cutslots.programs import dct
from cutslots.programs.grid_cut import GridCut
from cutslots.scenes import Scenes
from tests.models.configs import ATTENTION, CLEVRTEX, GRAPH_OCL, IMAGES, KINDS, RELATIVE, run_seeded
from tests.small_runs import sentence

needs_onnx = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("onnx", "onnxscript", "onnxruntime")),
    reason="needs the onnx extra",
)
CUT = replace(
    IMAGES,
    image_size=(20, 12),
    slots=replace(IMAGES.slots, pool="mask_mean", partition=CutPartitionConfig(reach=3.0, background_anchor=1.0)),
)


def session(content):
    import onnxruntime

    return onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])


def run_onnx(running, image):
    return DiscoveryOutput(*map(torch.from_numpy, running.run(None, {"image": image.numpy()})))


def assert_equal(running, model, image, tolerance=1e-4):
    output, expected = run_onnx(running, image), run_seeded(model, image)
    for name, a, b in zip(DiscoveryOutput._fields, output, expected, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype, name
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@needs_onnx
def test_checkpoint_from_the_command_line(tmp_path, monkeypatch, capsys):
    import onnx

    out, model = tmp_path / "model.onnx", load("tiny-64")
    monkeypatch.setattr("sys.argv", ["cutslots", "export", "tiny-64", "-o", str(out)])
    cutslots.cli.main()
    said = capsys.readouterr()
    assert said.out.startswith(f"wrote {out} (1.") and "image (B, 3, 64, 64) -> slots, masks, " in said.out
    assert not said.err and [path.name for path in tmp_path.iterdir()] == ["model.onnx"]
    stored = onnx.load(out)
    onnx.checker.check_model(stored, full_check=True)
    assert (stored.producer_name, stored.producer_version) == ("cutslots", cutslots.__version__)
    running = session(out.read_bytes())
    assert [x.name for x in running.get_outputs()] == list(DiscoveryOutput._fields)
    images = Scenes("plain", "test", model.image_size).get_batch(np.arange(5)).image / 255
    for batch in (images[:1], images[:2], images):
        assert_equal(running, model, batch)


@needs_onnx
def test_other_parts():
    """Relative positions with a ResNet. The other tests export a CNN, cuts of images that are not square, attention."""
    config = replace(RELATIVE, encoder=replace(CLEVRTEX.encoder, pyramid_levels=RELATIVE.encoder.pyramid_levels))
    torch.manual_seed(0)
    model = build(config).eval()
    running = session(onnx_bytes(model))
    for batch in (1, 3):
        assert_equal(running, model, torch.rand(batch, 3, *config.image_size))


@needs_onnx
def test_cuts_of_the_fft_size(monkeypatch):
    """A large cut is solved by FFT in torch and by matrix products in ONNX."""
    monkeypatch.setitem(dct.MAX_DCT_MATMUL_SIZE, "cpu", 4)
    torch.manual_seed(0)
    exported, model = build(CUT).eval(), build(CUT).eval()
    model.load_state_dict(exported.state_dict())
    assert isinstance(model.slots.partition.cut._dct, dct.FFTDCT)
    running = session(onnx_bytes(exported))
    assert isinstance(model.slots.partition.cut._dct, dct.FFTDCT)
    assert_equal(running, model, torch.rand(2, 3, 20, 12))


@needs_onnx
def test_slot_attention_samples_its_slots():
    running, image = session(onnx_bytes(build(ATTENTION).eval())), torch.rand(3, 3, 16, 16)
    one, other = run_onnx(running, image), run_onnx(running, image)
    for name, x, y in zip(DiscoveryOutput._fields, one, other, strict=True):
        assert x.isfinite().all() and len(x) == 3 and not torch.equal(x, y), name
    torch.testing.assert_close(one.masks.sum(1), torch.ones(3, 16, 16))


@pytest.mark.parametrize("shape", [(7, 12), (3, 6, 5)])
def test_use_matmul(shape, monkeypatch):
    monkeypatch.setitem(dct.MAX_DCT_MATMUL_SIZE, "cpu", 4)
    cut = GridCut(shape, reach=2.0)
    w = torch.randn(2, cut.channels, *shape)
    expected = cut(w)
    cut.use_matmul()
    assert isinstance(cut._dct, dct.MatmulDCT)
    torch.testing.assert_close(cut(w), expected, rtol=1e-5, atol=1e-5)


# ------------------------------------------------------------------------------------------------------------ bad input


@pytest.fixture
def installed(monkeypatch):
    monkeypatch.setattr(exporting, "PACKAGES", ())


@pytest.mark.parametrize(
    "words, said",
    [
        (["-o", "model.pt"], "out is model.pt; expected a file name that ends in .onnx"),
        (["-o", "no/model.onnx"], "out: there is no folder no; expected one to write model.onnx to"),
        (["-o", "a.onnx"], "out: a.onnx exists; choose another name or pass --overwrite"),
        (["-o", "folder.onnx", "--overwrite"], "out: folder.onnx exists; choose another name"),
        (["-o", "b.onnx", "--batch-size", "0"], "batch_size is 0; expected an integer from 1 to 65,536"),
        (["-o", "b.onnx", "--batch-size", "100000"], "batch_size is 100000; expected an integer from 1 to 65,536"),
    ],
)
def test_bad_arguments(words, said, installed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.onnx").write_text("mine")
    (tmp_path / "folder.onnx").mkdir()
    assert sentence(monkeypatch, ["export", "tiny-64", *words]) == f"cutslots: {said}"
    assert (tmp_path / "a.onnx").read_text() == "mine" and not (tmp_path / "b.onnx").exists()


@needs_onnx
def test_a_model_of_pairs_is_exported_for_images():
    torch.manual_seed(0)
    model = build(KINDS["pairs"]).eval()
    assert_equal(session(onnx_bytes(model)), model, torch.rand(2, 3, 16, 16))


def test_models_of_clips(installed, tmp_path):
    save(build(KINDS["spacetime"]), tmp_path)
    with pytest.raises(ValueError, match=r"partitions clips; expected a model of images to export"):
        export(str(tmp_path), tmp_path / "model.onnx")


def test_cuts_of_graphs(installed, tmp_path):
    save(build(GRAPH_OCL), tmp_path)
    with pytest.raises(ValueError, match=r"by a sparse factorisation \(GraphCut\), which ONNX has not; expected the"):
        export(str(tmp_path), tmp_path / "model.onnx")


def test_missing_packages(tmp_path, monkeypatch):
    monkeypatch.setattr(exporting, "PACKAGES", ("onnx", "onnxscript", "no_such_package"))
    said = sentence(monkeypatch, ["export", "tiny-64", "-o", str(tmp_path / "model.onnx")])
    assert said.endswith("pip install 'cutslots[onnx]'") and not (tmp_path / "model.onnx").exists()


def test_large_models(installed, tmp_path, monkeypatch):
    monkeypatch.setattr(exporting, "MAX_BYTES", 1000)
    with pytest.raises(ValueError, match=r"^checkpoint: tiny-64 has [\d,]+ bytes of weights; expected at most 1,000$"):
        export("tiny-64", tmp_path / "model.onnx")


def test_parts_that_cannot_be_exported(installed, tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise torch.onnx.OnnxExporterError("\nstep 1 of 3") from RuntimeError("no op for this\nmore")

    monkeypatch.setattr(torch.onnx, "export", fail)
    before = logging.root.manager.disable
    with pytest.raises(ValueError, match=r"^checkpoint: tiny-64 has a part that ONNX cannot express: no op for this$"):
        export("tiny-64", tmp_path / "model.onnx")
    assert logging.root.manager.disable == before


@needs_onnx
def test_fixed_batch_size_over_an_old_file(tmp_path):
    out, model = tmp_path / "model.onnx", build(CUT).eval()
    out.write_text("old")
    save(model, tmp_path)
    export(str(tmp_path), out, batch_size=3, overwrite=True)
    running = session(out.read_bytes())
    assert running.get_inputs()[0].shape == [3, 3, 20, 12]
    assert_equal(running, model, torch.rand(3, 3, 20, 12))
