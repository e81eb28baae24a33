"""`cutslots predict`: the files that it writes, read back by Pillow and by COCO's own tools."""

import copy
import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from PIL import Image
from pycocotools import mask as coco_mask
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

import cutslots
from cutslots.data.images import ImageWarning, _warn_of_12_bits
from cutslots.evaluation.visualize import colorize
from cutslots.inference.coco import encode_rle
from cutslots.inference.predict import predict
from cutslots.inference.predictor import predict_image
from cutslots.models.checkpoints import load, save
from cutslots.models.discovery import build
from cutslots.models.refinement import finish_masks, high_recall_masks, merge_posterior, refine_masks
from cutslots.training.presets import PRESETS
from tests.small_runs import Command

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # pycocotools

SIZES = {"wide": (45, 20), "tall": (7, 31), "dot": (1, 1)}  # width, height


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    torch.manual_seed(0)
    model = build(dataclasses.replace(PRESETS["tiny"].model, image_size=(16, 16)))
    with torch.no_grad():
        model.decoder.layers[-2].weight *= 30  # otherwise the masks of an untrained model are nearly constant
    save(model, folder)
    return str(folder)


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    folder, rng = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    for name, (width, height) in SIZES.items():
        Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(folder / f"{name}.png")
    return folder


@pytest.fixture(scope="module")
def predicted(checkpoint, images, tmp_path_factory):
    """The decoder's masks of all images: refinement would merge the slots of an untrained model."""
    out = tmp_path_factory.mktemp("predicted") / "deep" / "out"
    assert predict(checkpoint, images, out, device="cpu", masks="decoder")
    return out


def read(path):
    return np.asarray(Image.open(path))


def slots(folder):
    """The masks of an image by slot."""
    return {int(p.stem[5:]): read(p) for p in sorted(folder.glob("slot_*.png"))}


@pytest.mark.parametrize("name", SIZES)
def test_files_have_the_size_of_the_image(predicted, name):
    assert {p.name for p in predicted.iterdir()} == {*SIZES, "coco.json", "request.json", ".lock"}
    files = {p.name for p in (predicted / name).iterdir()}
    assert {p for p in files if not p.startswith("slot_")} == {"overlay.png", "labels.png", "reconstruction.png"}
    for file in files:
        with Image.open(predicted / name / file) as image:
            assert image.size == SIZES[name], file
            expected = "P" if file == "labels.png" else "L" if file.startswith("slot") else "RGB"
            assert image.mode == expected, file


@pytest.mark.parametrize("name", SIZES)
def test_labels_and_slot_masks_agree(predicted, name):
    labels, masks = read(predicted / name / "labels.png"), slots(predicted / name)
    assert set(np.unique(labels)) == set(masks) and min(masks) >= 1 and max(masks) <= 6
    assert len(masks) > 1 or name == "dot", "the test needs more than one slot"
    for slot, mask in masks.items():
        assert np.array_equal(mask, (labels == slot) * 255)


def test_files_hold_the_prediction(predicted, checkpoint, images):
    image = Image.open(images / "wide.png")
    prediction = predict_image(load(checkpoint), image, "decoder")
    labels, scores, background = prediction.labels, prediction.slot_scores, prediction.background
    assert np.array_equal(read(predicted / "wide" / "labels.png"), labels + 1)
    assert np.array_equal(read(predicted / "wide" / "reconstruction.png"), prediction.reconstruction)
    overlay = 0.35 * np.asarray(image) + 0.65 * colorize(labels)
    overlay[labels == background] = np.asarray(image)[labels == background]
    assert np.abs(read(predicted / "wide" / "overlay.png") - overlay).max() <= 1
    assert scores.shape == (6,) and (scores >= 0).all() and (scores <= 1).all()
    assert all(scores[k] >= 1 / 6 for k in np.unique(labels)), "the largest of six masks is at least a sixth"


@pytest.mark.parametrize("masks", ["decoder", "refined", "high-recall"])
def test_labels_are_the_argmax_of_the_masks_at_the_size_of_the_model(checkpoint, masks):
    model = load(checkpoint)
    image = Image.fromarray(np.random.default_rng(1).integers(0, 256, (16, 16, 3), dtype=np.uint8))
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None]
    with torch.no_grad():
        output = model(pixels)
    refined = refine_masks(output, pixels)
    soft = {"decoder": output.masks[0], "refined": refined[0], "high-recall": high_recall_masks(refined)[0]}[masks]
    prediction = predict_image(model, image, masks)
    best = soft.argmax(0)
    assert np.array_equal(prediction.labels, best)
    _, posterior = finish_masks(output, merge_posterior(output, pixels), pixels)
    values = soft if masks == "decoder" else posterior[0]
    for k in np.unique(best):
        assert prediction.slot_scores[k] == pytest.approx(values[k][best == k].mean().item(), abs=1e-5)


def test_coco_reads_the_masks(predicted, capsys):
    coco = COCO(str(predicted / "coco.json"))
    assert {i["file_name"]: (i["width"], i["height"]) for i in coco.imgs.values()} == {
        f"{name}.png": size for name, size in SIZES.items()
    }
    for number, image in coco.imgs.items():
        masks = slots(predicted / image["file_name"].removesuffix(".png"))
        seen = coco.loadAnns(coco.getAnnIds(imgIds=number))
        assert [a["slot"] for a in seen] == list(masks)
        for annotation in seen:
            mask, run = masks[annotation["slot"]] > 0, annotation["segmentation"]
            assert np.array_equal(coco_mask.decode(run), mask) and np.array_equal(coco.annToMask(annotation), mask)
            assert annotation["area"] == coco_mask.area(run) == mask.sum()
            assert annotation["bbox"] == coco_mask.toBbox(run).tolist()
            assert annotation["iscrowd"] == 0 and 0 < annotation["score"] <= 1
    areas = sum(a["area"] for a in coco.anns.values())
    assert areas == sum(w * h for w, h in SIZES.values()), "every pixel is in one mask"


def test_coco_has_info_and_licenses(predicted, capsys):
    record = json.loads((predicted / "coco.json").read_text())
    assert list(record) == ["info", "licenses", "images", "annotations", "categories"] and record["licenses"] == []
    assert record["info"] == {"description": "Objects discovered by cutslots", "version": cutslots.__version__}
    COCO(str(predicted / "coco.json")).info()  # fails without "info" in every version
    assert f"version: {cutslots.__version__}" in capsys.readouterr().out


def test_coco_loads_and_evaluates_results(predicted, tmp_path, capsys):
    """The masks are found in themselves: the average precision is one."""
    coco = COCO(str(predicted / "coco.json"))
    keys = ("image_id", "category_id", "segmentation", "score")
    results = [{key: annotation[key] for key in keys} for annotation in coco.dataset["annotations"]]
    (tmp_path / "results.json").write_text(json.dumps(results))
    for loaded in (results, str(tmp_path / "results.json"), coco.dataset["annotations"]):
        found = coco.loadRes(copy.deepcopy(loaded))
        assert found.dataset["info"] == coco.dataset["info"] and len(found.anns) == len(coco.anns)
        for number, annotation in found.anns.items():
            assert np.array_equal(found.annToMask(annotation), coco.annToMask(coco.anns[number]))
    evaluation = COCOeval(coco, coco.loadRes(results), "segm")
    for step in (evaluation.evaluate, evaluation.accumulate, evaluation.summarize):
        step()
    assert evaluation.stats[0] == 1


def test_one_image(checkpoint, images, predicted, tmp_path):
    assert predict(checkpoint, images / "tall.png", tmp_path / "out", device="cpu", masks="decoder")
    assert {p.name for p in (tmp_path / "out").iterdir()} == {"tall", "coco.json", "request.json", ".lock"}
    for file in (predicted / "tall").iterdir():
        assert (tmp_path / "out" / "tall" / file.name).read_bytes() == file.read_bytes(), (
            "the same alone or in a folder"
        )


def test_folder_with_images_subfolder(checkpoint, images, tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "images").symlink_to(images)
    assert predict(checkpoint, tmp_path / "data", tmp_path / "out", device="cpu")
    assert {p.name for p in (tmp_path / "out").iterdir() if p.is_dir()} == set(SIZES)


@pytest.mark.parametrize("mode", ["L", "LA", "RGBA", "P", "1", "I;16"])
def test_any_image_mode(checkpoint, tmp_path, mode):
    Image.new(mode, (9, 5)).save(tmp_path / "a.png")
    assert predict(checkpoint, tmp_path / "a.png", tmp_path / "out", device="cpu")
    assert read(tmp_path / "out" / "a" / "overlay.png").shape == (5, 9, 3)


masks = arrays(bool, array_shapes(min_dims=2, max_dims=2, max_side=40), elements=st.booleans(), fill=st.booleans())
dot = np.zeros((30, 50), dtype=bool)
dot[17, 3] = True


@given(masks)
@example(np.zeros((30, 50), dtype=bool))
@example(np.ones((30, 50), dtype=bool))
@example(np.zeros((1, 1), dtype=bool))
@example(np.ones((1, 1), dtype=bool))
@example(dot)
@example(~dot)
@example(dot[17:18, 3:])
@example(dot[:18, :4])
@settings(max_examples=200, deadline=None)
def test_run_lengths_equal_those_of_pycocotools(mask):
    expected = coco_mask.encode(np.asfortranarray(mask.astype(np.uint8)))
    assert encode_rle(mask) == {"size": expected["size"], "counts": expected["counts"].decode()}


@pytest.mark.parametrize("seed", range(10))
def test_long_run_lengths_equal_those_of_pycocotools(seed):
    """Runs of thousands: several characters each, with large positive and negative differences."""
    rng = np.random.default_rng(seed)
    runs = rng.integers(1, 10 ** rng.integers(1, 5, 40))
    flat = np.repeat(np.arange(40) % 2 == seed % 2, runs)
    mask = flat[: len(flat) // 7 * 7].reshape(-1, 7).T if seed < 5 else flat[: len(flat) // 7 * 7].reshape(7, -1)
    expected = coco_mask.encode(np.asfortranarray(mask.astype(np.uint8)))
    assert encode_rle(mask)["counts"] == expected["counts"].decode()


def test_corrupt_image_does_not_stop_the_others(checkpoint, images, tmp_path, capsys):
    mixed = tmp_path / "mixed"
    mixed.mkdir()
    for name in ("wide", "tall"):
        (mixed / f"{name}.png").symlink_to(images / f"{name}.png")
    (mixed / "torn.png").write_bytes((images / "wide.png").read_bytes()[:100])
    assert not predict(checkpoint, mixed, tmp_path / "out", device="cpu")
    said = capsys.readouterr()
    assert f"cutslots: {mixed / 'torn.png'} cannot be read as an image" in said.out + said.err
    assert "wrote 2 of 3 images" in said.out and "1 of 3 images could not be read" in said.err
    assert {p.name for p in (tmp_path / "out").iterdir() if p.is_dir()} == {"wide", "tall"}
    record = json.loads((tmp_path / "out" / "coco.json").read_text())
    assert [image["file_name"] for image in record["images"]] == ["tall.png", "wide.png"]


def test_same_command_again_writes_the_same_files(checkpoint, images, tmp_path):
    out = tmp_path / "out"
    predict(checkpoint, images / "wide.png", out, device="cpu")
    before = {p: p.read_bytes() for p in out.rglob("*") if p.is_file()}
    (out / "wide" / "slot_99.png").write_text("left by another checkpoint")
    assert predict(checkpoint, images / "wide.png", out, device="cpu")
    assert {p: p.read_bytes() for p in out.rglob("*") if p.is_file()} == before


def test_other_files_are_left_alone(checkpoint, images, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.tex").write_text("years of work")
    with pytest.raises(
        ValueError, match=r"out is not empty and holds no prediction; choose another folder or pass --ov"
    ):
        predict(checkpoint, images / "wide.png", out, device="cpu")
    assert [p.name for p in out.iterdir()] == ["thesis.tex"]
    assert predict(checkpoint, images / "wide.png", out, device="cpu", overwrite=True)
    with pytest.raises(
        ValueError, match=r"out holds another prediction \(differing in images\); choose another folder or"
    ):
        predict(checkpoint, images / "tall.png", out, device="cpu")
    with pytest.raises(ValueError, match=r"\(differing in images, masks, resize\)"):
        predict(checkpoint, images / "tall.png", out, "cpu", masks="decoder", resize="stretch")
    with pytest.raises(ValueError, match=r"thesis.tex is a file; expected a folder to write to"):
        predict(checkpoint, images / "tall.png", out / "thesis.tex", device="cpu")
    assert predict(checkpoint, images / "tall.png", out, device="cpu", overwrite=True)
    assert (out / "thesis.tex").read_text() == "years of work"
    assert {p.name for p in out.iterdir()} == {"tall", "thesis.tex", "coco.json", "request.json", ".lock"}


@pytest.mark.parametrize("name", ["coco.json", "wide", "request.json"])
def test_overwrite_refuses_files_of_the_same_name_that_predict_did_not_write(checkpoint, images, tmp_path, name):
    (tmp_path / name).mkdir() if name == "wide" else (tmp_path / name).write_text("{}")
    with pytest.raises(ValueError, match="of a prediction; choose another folder"):
        predict(checkpoint, images / "wide.png", tmp_path, device="cpu", overwrite=True)
    assert [p.name for p in tmp_path.iterdir()] == [name]


def test_overwrite_removes_only_what_predict_wrote(checkpoint, images, tmp_path):
    """Folders of images that are not predicted again go, unless something else is in them."""
    out = tmp_path / "out"
    predict(checkpoint, images, out, device="cpu")
    (out / "tall" / "notes.txt").write_text("mine")
    (out / "dot" / "slot_03.png.part").write_text("half")
    (out / "mine").mkdir()
    predict(checkpoint, images / "wide.png", out, device="cpu", overwrite=True)
    assert {p.name for p in out.iterdir()} == {"wide", "tall", "mine", "coco.json", "request.json", ".lock"}
    assert [p.name for p in (out / "tall").iterdir()] == ["notes.txt"]


def folders(out):
    """The folders of images in an output, in request.json and in coco.json."""
    named = json.loads((out / "request.json").read_text())["folders"]
    images = json.loads((out / "coco.json").read_text())["images"]
    return sorted(p.name for p in out.iterdir() if p.is_dir()), named, sorted(i["file_name"][:-4] for i in images)


@pytest.mark.parametrize("overwrite", [False, True])
def test_folder_of_an_image_that_is_gone_is_removed(checkpoint, images, tmp_path, overwrite):
    source, out = Path(shutil.copytree(images, tmp_path / "source")), tmp_path / "out"
    predict(checkpoint, source, out, device="cpu")
    (source / "tall.png").unlink()
    (out / "dot" / "notes.txt").write_text("mine")
    predict(checkpoint, source, out, device="cpu", overwrite=overwrite)
    assert folders(out) == (["dot", "wide"],) * 3 and (out / "dot" / "notes.txt").exists()


@pytest.mark.parametrize("overwrite", [False, True])
def test_folder_of_an_image_that_became_unreadable_is_removed(checkpoint, images, tmp_path, overwrite):
    source, out = Path(shutil.copytree(images, tmp_path / "source")), tmp_path / "out"
    predict(checkpoint, source, out, device="cpu")
    (source / "tall.png").write_bytes(b"torn")
    assert not predict(checkpoint, source, out, device="cpu", overwrite=overwrite)
    on_disk, _, in_json = folders(out)
    assert on_disk == in_json == ["dot", "wide"]


def test_a_folder_that_predict_removed_is_no_longer_its_own(checkpoint, images, tmp_path):
    """Another file of the same name, put there later, stays."""
    source, out = Path(shutil.copytree(images, tmp_path / "source")), tmp_path / "out"
    predict(checkpoint, source, out, device="cpu")
    (source / "tall.png").unlink()
    predict(checkpoint, source, out, device="cpu")
    (out / "tall").mkdir()
    (out / "tall" / "overlay.png").write_text("mine")
    predict(checkpoint, source, out, device="cpu", overwrite=True)
    assert (out / "tall" / "overlay.png").read_text() == "mine"


def test_missing_images(checkpoint, tmp_path):
    with pytest.raises(ValueError, match=r"images: there is no .*nowhere.png; expected an image or a folder"):
        predict(checkpoint, tmp_path / "nowhere.png", tmp_path / "out")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"images: .*empty holds no images"):
        predict(checkpoint, tmp_path / "empty", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_command_line_prints_one_sentence(checkpoint, tmp_path):
    words, errors = ["predict", checkpoint, "nowhere.png", "-o", str(tmp_path / "out")], tmp_path / "errors"
    command = Command(words, tmp_path / "log", errors=errors)
    assert command.end() == 1 and command.said() == ""
    assert errors.read_text() == "cutslots: images: there is no nowhere.png; expected an image or a folder of images\n"


def test_no_images(checkpoint, tmp_path):
    with pytest.raises(ValueError, match=r"^images: there are none; expected an image or a folder of images$"):
        predict(checkpoint, (), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_several_images_and_folders(checkpoint, images, predicted, tmp_path):
    """An image that is given twice, alone and with its folder, is written once."""
    (tmp_path / "more").mkdir()
    shutil.copy(images / "wide.png", tmp_path / "more" / "other.png")
    paths = [images / "tall.png", images, tmp_path / "more"]
    assert predict(checkpoint, paths, tmp_path / "out", device="cpu", masks="decoder")
    labels = {file.parent.name: file.read_bytes() for file in (tmp_path / "out").glob("*/labels.png")}
    expected = {file.parent.name: file.read_bytes() for file in predicted.glob("*/labels.png")}
    assert labels == expected | {"other": expected["wide"]}
    record = json.loads((tmp_path / "out" / "coco.json").read_text())
    assert len(record["images"]) == len(labels) and record["images"][0]["file_name"] == "tall.png"


def test_images_of_several_folders_that_would_share_a_folder(checkpoint, images, tmp_path):
    (tmp_path / "more").mkdir()
    shutil.copy(images / "wide.png", tmp_path / "more")
    with pytest.raises(ValueError, match=r"images.*/wide\.png, .*more/wide\.png would all be written to"):
        predict(checkpoint, [images, tmp_path / "more"], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_images_that_would_share_a_folder(checkpoint, tmp_path):
    for name in ("a.b.png", "a_b.png"):
        Image.new("RGB", (8, 8)).save(tmp_path / name)
    with pytest.raises(ValueError, match=r"a\.b\.png, .*a_b\.png would all be written to"):
        predict(checkpoint, tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_12_bit_images_are_not_black_and_a_warning_says_so(tmp_path):
    _warn_of_12_bits.cache_clear()
    values = np.tile(np.linspace(0, 4095, 64).astype(np.uint16), (48, 1))
    Image.fromarray(values).save(tmp_path / "camera.png")
    with pytest.warns(ImageWarning, match="is read as 12-bit: 4095 is white"):
        predict("tiny-64", tmp_path / "camera.png", tmp_path / "out", device="cpu")
    assert np.asarray(Image.open(tmp_path / "out" / "camera" / "reconstruction.png")).mean() > 60
