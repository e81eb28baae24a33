"""What is written is read back by other programs: Pillow and COCO's own tools."""

import dataclasses
import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from PIL import Image
from pycocotools import mask as coco_mask
from pycocotools.coco import COCO

from cutslots import reading
from cutslots.model import Discovery, load, save
from cutslots.predict import find, predict, run_lengths
from cutslots.presets import PRESETS
from cutslots.report import paint

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # pycocotools

SIZES = {"wide": (45, 20), "tall": (7, 31), "dot": (1, 1)}  # width, height


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    folder = tmp_path_factory.mktemp("weights")
    torch.manual_seed(0)
    model = Discovery(dataclasses.replace(PRESETS["tiny"].model, size=16))
    with torch.no_grad():
        model.decoder.layers[-2].weight *= 30  # an untrained model says much the same everywhere; this one does not
    save(model, folder)
    return str(folder)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    folder, rng = tmp_path_factory.mktemp("pictures"), np.random.default_rng(0)
    for name, (width, height) in SIZES.items():
        Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(folder / f"{name}.png")
    return folder


@pytest.fixture(scope="module")
def done(weights, pictures, tmp_path_factory):
    """The prediction of all pictures by the decoder's masks: an untrained model's slots are alike, to be joined."""
    out = tmp_path_factory.mktemp("done") / "deep" / "out"
    assert predict(weights, pictures, out, device="cpu", masks="decoder")
    return out


def read(path):
    return np.asarray(Image.open(path))


def slots(folder):
    """The masks of a picture by slot."""
    return {int(p.stem[5:]): read(p) for p in sorted(folder.glob("slot_*.png"))}


@pytest.mark.parametrize("name", SIZES)
def test_files_have_the_size_of_the_picture(done, name):
    assert {p.name for p in done.iterdir()} == {*SIZES, "masks.json", "predict.json", ".lock"}
    files = {p.name for p in (done / name).iterdir()}
    assert {p for p in files if not p.startswith("slot_")} == {"overlay.png", "labels.png", "reconstruction.png"}
    for file in files:
        with Image.open(done / name / file) as picture:
            assert picture.size == SIZES[name], file
            expected = "P" if file == "labels.png" else "L" if file.startswith("slot") else "RGB"
            assert picture.mode == expected, file


@pytest.mark.parametrize("name", SIZES)
def test_labels_and_slots_agree(done, name):
    labels, masks = read(done / name / "labels.png"), slots(done / name)
    assert set(np.unique(labels)) == set(masks) and min(masks) >= 1 and max(masks) <= 6
    assert len(masks) > 1 or name == "dot", "more than one slot, or this proves little"
    for slot, mask in masks.items():
        assert np.array_equal(mask, (labels == slot) * 255)


def test_files_hold_what_is_found(done, weights, pictures):
    picture = Image.open(pictures / "wide.png")
    labels, scores, redrawn = find(load(weights), picture, "decoder")
    assert np.array_equal(read(done / "wide" / "labels.png"), labels + 1)
    assert np.array_equal(read(done / "wide" / "reconstruction.png"), redrawn)
    overlay = 0.35 * np.asarray(picture) + 0.65 * paint(labels)
    assert np.abs(read(done / "wide" / "overlay.png") - overlay).max() <= 1
    assert scores.shape == (6,) and (scores >= 0).all() and (scores <= 1).all()
    assert all(scores[k] >= 1 / 6 for k in np.unique(labels)), "the winner of six has a sixth at least"


@pytest.mark.parametrize("masks", ["decoder", "joined", "eager"])
def test_masks_are_the_models_where_sizes_are_equal(weights, masks):
    model = load(weights)
    picture = Image.fromarray(np.random.default_rng(1).integers(0, 256, (16, 16, 3), dtype=np.uint8))
    with torch.no_grad():
        found = model(torch.from_numpy(np.array(picture)).permute(2, 0, 1)[None])
    image = torch.from_numpy(np.array(picture)).permute(2, 0, 1)[None]
    read = reading.read(found, image)
    soft = {"decoder": found.masks[0], "joined": read[0], "eager": reading.eager(read)[0]}[masks]
    labels, scores, _ = find(model, picture, masks)
    best = soft.max(0)
    assert np.array_equal(labels, best.indices)
    for k in np.unique(labels):
        assert scores[k] == pytest.approx(best.values[best.indices == k].mean().item(), abs=1e-5)


def test_coco_reads_the_masks(done, capsys):
    coco = COCO(str(done / "masks.json"))
    assert {i["file_name"]: (i["width"], i["height"]) for i in coco.imgs.values()} == {
        f"{name}.png": size for name, size in SIZES.items()
    }
    for number, image in coco.imgs.items():
        masks = slots(done / image["file_name"].removesuffix(".png"))
        seen = coco.loadAnns(coco.getAnnIds(imgIds=number, catIds=1))
        assert [a["slot"] for a in seen] == list(masks)
        for annotation in seen:
            mask, run = masks[annotation["slot"]] > 0, annotation["segmentation"]
            assert np.array_equal(coco_mask.decode(run), mask) and np.array_equal(coco.annToMask(annotation), mask)
            assert annotation["area"] == coco_mask.area(run) == mask.sum()
            assert annotation["bbox"] == coco_mask.toBbox(run).tolist()
            assert annotation["iscrowd"] == 0 and 0 < annotation["score"] <= 1
    areas = sum(a["area"] for a in coco.anns.values())
    assert areas == sum(w * h for w, h in SIZES.values()), "every pixel is in one mask"


def test_one_picture(weights, pictures, done, tmp_path):
    assert predict(weights, pictures / "tall.png", tmp_path / "out", device="cpu", masks="decoder")
    assert {p.name for p in (tmp_path / "out").iterdir()} == {"tall", "masks.json", "predict.json", ".lock"}
    for file in (done / "tall").iterdir():
        assert (tmp_path / "out" / "tall" / file.name).read_bytes() == file.read_bytes(), "alone or among others"


def test_a_folder_that_holds_images(weights, pictures, tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "images").symlink_to(pictures)
    assert predict(weights, tmp_path / "data", tmp_path / "out", device="cpu")
    assert {p.name for p in (tmp_path / "out").iterdir() if p.is_dir()} == set(SIZES)


@pytest.mark.parametrize("mode", ["L", "LA", "RGBA", "P", "1", "I;16"])
def test_any_mode(weights, tmp_path, mode):
    Image.new(mode, (9, 5)).save(tmp_path / "a.png")
    assert predict(weights, tmp_path / "a.png", tmp_path / "out", device="cpu")
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
def test_run_lengths_are_cocos(mask):
    theirs = coco_mask.encode(np.asfortranarray(mask.astype(np.uint8)))
    assert run_lengths(mask) == {"size": theirs["size"], "counts": theirs["counts"].decode()}


@pytest.mark.parametrize("seed", range(10))
def test_long_run_lengths_are_cocos(seed):
    """Runs of thousands, of several characters each, with large differences both ways."""
    rng = np.random.default_rng(seed)
    runs = rng.integers(1, 10 ** rng.integers(1, 5, 40))
    flat = np.repeat(np.arange(40) % 2 == seed % 2, runs)
    mask = flat[: len(flat) // 7 * 7].reshape(-1, 7).T if seed < 5 else flat[: len(flat) // 7 * 7].reshape(7, -1)
    theirs = coco_mask.encode(np.asfortranarray(mask.astype(np.uint8)))
    assert run_lengths(mask)["counts"] == theirs["counts"].decode()


def test_a_corrupt_picture_stops_no_other(weights, pictures, tmp_path, capsys):
    mixed = tmp_path / "mixed"
    mixed.mkdir()
    for name in ("wide", "tall"):
        (mixed / f"{name}.png").symlink_to(pictures / f"{name}.png")
    (mixed / "torn.png").write_bytes((pictures / "wide.png").read_bytes()[:100])
    assert not predict(weights, mixed, tmp_path / "out", device="cpu")
    said = capsys.readouterr()
    assert f"cutslots: {mixed / 'torn.png'} cannot be read as a picture" in said.out + said.err
    assert "wrote 2 of 3 pictures" in said.out and "1 of 3 pictures could not be read" in said.err
    assert {p.name for p in (tmp_path / "out").iterdir() if p.is_dir()} == {"wide", "tall"}
    record = json.loads((tmp_path / "out" / "masks.json").read_text())
    assert [image["file_name"] for image in record["images"]] == ["tall.png", "wide.png"]


def test_the_same_again(weights, pictures, tmp_path):
    out = tmp_path / "out"
    predict(weights, pictures / "wide.png", out, device="cpu")
    before = {p: p.read_bytes() for p in out.rglob("*") if p.is_file()}
    (out / "wide" / "slot_99.png").write_text("left by other weights")
    assert predict(weights, pictures / "wide.png", out, device="cpu")
    assert {p: p.read_bytes() for p in out.rglob("*") if p.is_file()} == before


def test_other_contents_are_left_alone(weights, pictures, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.tex").write_text("years of work")
    with pytest.raises(ValueError, match=r"out holds something else; choose another folder or pass --overwrite"):
        predict(weights, pictures / "wide.png", out, device="cpu")
    assert [p.name for p in out.iterdir()] == ["thesis.tex"]
    assert predict(weights, pictures / "wide.png", out, device="cpu", overwrite=True)
    assert (out / "thesis.tex").read_text() == "years of work", "written over is what has the same name"
    with pytest.raises(ValueError, match="out holds something else"):
        predict(weights, pictures / "tall.png", out, device="cpu")
    with pytest.raises(ValueError, match=r"thesis.tex is a file; expected a folder to write to"):
        predict(weights, pictures / "tall.png", out / "thesis.tex", device="cpu")


def test_nothing_to_look_at(weights, tmp_path):
    with pytest.raises(ValueError, match=r"images: there is no .*nowhere.png; expected a picture or a folder"):
        predict(weights, tmp_path / "nowhere.png", tmp_path / "out")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"images: .*empty holds no pictures"):
        predict(weights, tmp_path / "empty", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_command_line_says_what_is_wrong(weights, tmp_path):
    command = [sys.executable, "-m", "cutslots", "predict", weights, "nowhere.png", "-o", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr == "cutslots: images: there is no nowhere.png; expected a picture or a folder of pictures\n"


def test_pictures_that_would_share_a_folder(weights, tmp_path):
    for name in ("a.b.png", "a_b.png"):
        Image.new("RGB", (8, 8)).save(tmp_path / name)
    with pytest.raises(ValueError, match=r"a\.b\.png, a_b\.png would all be written to"):
        predict(weights, tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()
