import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from cutslots.data.inspect import inspect
from cutslots.data.open import open_dataset
from cutslots.data.prepare import prepare
from cutslots.scenes import Scenes
from tests.data.small_files import clevrtex_files, image_png, palette_png, scene, write_clevr, write_files, write_movi
from tests.small_runs import Command

SQUARE = 48 * 48 / 192**2  # area of a square of 48 pixels as a fraction of the crop of 192 pixels: 1/16


def draw_labels(squares):
    """Return labels (240, 320) with squares of 48 pixels: label, and row and column in the crop, in squares."""
    labels = np.zeros((240, 320), dtype=np.uint8)
    for label, row, column in squares:
        labels[24 + 48 * row :, 64 + 48 * column :][:48, :48] = label
    return labels


# Ten scenes: one for test, one for validation, eight for training.
TEST = [(1, 0, 0), (2, 1, 1)]
VAL = [(3, 0, 0), (3, 0, 1), (3, 0, 2), (3, 0, 3)]
TRAIN = [[], [], [], [(1, 3, 3)], [(1, 0, 0)], [(1, 0, 0)], [(10, 1, 1), (10, 1, 2)], [(1, 0, 0), (2, 2, 2), (7, 3, 0)]]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Prepare a cache of 192x192, which keeps every pixel of the crop. Tests must not write to it."""
    root = tmp_path_factory.mktemp("inspect")
    for i, squares in enumerate([TEST, VAL, *TRAIN]):
        stem = f"clevrtex_full/0/CLEVRTEX_full_{i:06d}"
        files = {
            f"{stem}.png": image_png(scene(i, 0).image, False),
            f"{stem}_flat.png": palette_png(draw_labels(squares)),
        }
        write_files(root / "source", files)
    prepare("clevrtex", root / "source", root / "out", 192, quiet=True)
    return root / "out"


@pytest.fixture
def cache(made, tmp_path):
    return Path(shutil.copytree(made, tmp_path / "cache"))


def test_statistics_of_a_cache(cache):
    facts = inspect(f"clevrtex:{cache}", quiet=True)
    assert set(facts) == {"train", "val", "test"}
    assert facts["test"] == {
        "num_images": 1,
        "inspected": 1,
        "objects": [0, 0, 1],
        "labels": {0: 1 - 2 * SQUARE, 1: SQUARE, 2: SQUARE},
        "largest_object": SQUARE,
    }
    assert facts["val"]["objects"] == [0, 1] and facts["val"]["labels"] == {0: 0.75, 3: 0.25}
    assert facts["val"]["largest_object"] == 0.25
    train = facts["train"]
    assert train["num_images"] == train["inspected"] == 8 and train["objects"] == [3, 4, 0, 1]
    assert train["labels"] == pytest.approx(
        {0: 1 - 8 * SQUARE / 8, 1: 4 * SQUARE / 8, 2: SQUARE / 8, 7: SQUARE / 8, 10: 2 * SQUARE / 8}
    )
    assert train["largest_object"] == 2 * SQUARE


def test_number_of_inspected_images(cache):
    facts = inspect(f"clevrtex:{cache}", num_images=4, quiet=True)
    assert facts["train"]["num_images"] == 8 and facts["train"]["inspected"] == 4
    assert facts["train"]["objects"] == [3, 1] and facts["train"]["labels"] == {0: 1 - SQUARE / 4, 1: SQUARE / 4}
    assert facts["test"]["inspected"] == 1


def test_cache_by_its_path_and_by_a_range_of_objects(cache):
    assert inspect(str(cache), quiet=True) == inspect(f"clevrtex:{cache}", quiet=True)
    facts = inspect(f"clevrtex:{cache}:1-2", quiet=True)
    assert [facts[split]["num_images"] for split in ("train", "val", "test")] == [4, 1, 1]
    assert facts["train"]["objects"] == [0, 4]


def test_empty_splits_are_left_out(cache):
    assert set(inspect(f"clevrtex:{cache}:3-3", quiet=True)) == {"train"}


def test_cache_too_small_for_every_split(tmp_path):
    """Four scenes have no tenth for test; slot-attention's training split takes the first 70,000."""
    source = write_files(tmp_path / "source", clevrtex_files("full", (1,) * 4))
    prepare("clevrtex", source, tmp_path / "out", 16, quiet=True)
    assert {split: facts["num_images"] for split, facts in inspect(str(tmp_path / "out"), quiet=True).items()} == {
        "train": 4
    }
    prepare("clevr", write_clevr(tmp_path / "clevr", [3, 7]), tmp_path / "b", 16, "slot-attention", quiet=True)
    facts = inspect(f"clevr:{tmp_path / 'b'}", quiet=True)
    assert set(facts) == {"train"} and facts["train"]["num_images"] == 1, "the scene of seven objects is left out"


def test_clevrtex_ood_has_no_training_split(tmp_path):
    source = write_files(tmp_path / "source", clevrtex_files("outd", (2, 3)))
    prepare("clevrtex-ood", source, tmp_path / "out", 16, quiet=True)
    facts = inspect(f"clevrtex-ood:{tmp_path / 'out'}", quiet=True)
    assert {split: each["num_images"] for split, each in facts.items()} == {"val": 2, "test": 2}


def test_videos_are_counted_as_videos(tmp_path):
    prepare(
        "movi-a", write_movi(tmp_path / "a", {"train": [2], "validation": [1]}, 32), tmp_path / "out", 32, quiet=True
    )
    facts = inspect(f"movi-a:{tmp_path / 'out'}", quiet=True)
    masks = np.load(tmp_path / "out" / "masks.npy")
    assert facts["train"]["num_images"] == 2 and facts["val"] == facts["test"] and facts["val"]["num_images"] == 1
    for split, videos in (("train", masks[:2]), ("val", masks[2:])):
        counts = [len(set(video.ravel().tolist()) - {0}) for video in videos]
        assert facts[split]["objects"] == np.bincount(counts).tolist()
        assert facts[split]["labels"] == {i: (videos == i).mean() for i in np.unique(videos).tolist()}


def test_contact_sheet_is_written_to_the_cache(cache):
    inspect(f"clevrtex:{cache}", quiet=True)
    sheet = np.asarray(Image.open(cache / "contact_sheet.png"))
    assert sheet.shape == (2 * 192 + 2, 8 * 194 - 2, 3), "eight images, each above its mask"
    image, mask = open_dataset(f"clevrtex:{cache}", "train")[3]
    assert np.array_equal(sheet[:192, 3 * 194 :][:, :192], image.permute(1, 2, 0))
    colors = sheet[194:, 3 * 194 :][:, :192]
    assert (colors[mask == 0] == 0).all() and (colors[mask == 1] == colors[-1, -1]).all() and colors[-1, -1].any()


def test_inspected_cache_is_still_up_to_date(made, cache):
    inspect(str(cache), quiet=True)
    assert prepare("clevrtex", made.parent / "source", cache, 192, quiet=True) is False


def test_path_of_the_contact_sheet(cache, tmp_path):
    inspect(f"clevrtex:{cache}", out=tmp_path / "sheet.png", quiet=True)
    assert Image.open(tmp_path / "sheet.png").size == (8 * 194 - 2, 2 * 192 + 2)
    assert not (cache / "contact_sheet.png").exists()


@pytest.mark.parametrize("name", ["images.npy", "masks.npy", "objects.npy"])
def test_changed_byte_is_detected(cache, name):
    """The length and the header stay: only the checksum shows it."""
    data = bytearray((cache / name).read_bytes())
    data[-1] ^= 1
    (cache / name).write_bytes(data)
    assert len(open_dataset(f"clevrtex:{cache}", "train")) > 0
    with pytest.raises(
        ValueError, match=rf"^{cache / name} does not match its checksum; delete {cache} and prepare it again$"
    ):
        inspect(f"clevrtex:{cache}", quiet=True)
    assert not (cache / "contact_sheet.png").exists()


def test_built_in_scenes(tmp_path):
    facts = inspect("plain:2-4", num_images=3, out=tmp_path / "sheet.png", quiet=True)
    for split, length in (("train", 50_000), ("val", 1_000), ("test", 1_000)):
        masks = Scenes("plain", split, num_objects=(2, 4)).get_batch(range(3)).mask.numpy()
        counts = [len(set(mask.ravel().tolist()) - {0}) for mask in masks]
        assert facts[split]["num_images"] == length and facts[split]["inspected"] == 3
        assert facts[split]["objects"] == np.bincount(counts).tolist()
        assert facts[split]["labels"] == pytest.approx({i: (masks == i).mean() for i in np.unique(masks).tolist()})
        assert facts[split]["largest_object"] == max((mask == i).mean() for mask in masks for i in range(1, 5))
    assert Image.open(tmp_path / "sheet.png").size == (8 * 130 - 2, 4 * 130 - 2)


def test_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for kind in ("images", "masks"):
        (tmp_path / "mine" / kind).mkdir(parents=True)
    quarter = np.zeros((64, 64), dtype=np.uint8)
    quarter[:32, :32] = 5
    for name, labels in (("a", quarter), ("b", np.zeros_like(quarter)), ("c", quarter)):
        Image.new("RGB", (64, 64), "red").save(tmp_path / "mine" / "images" / f"{name}.png")
        Image.fromarray(labels).save(tmp_path / "mine" / "masks" / f"{name}.png")
    facts = inspect("mine")
    assert facts == {
        "all": {
            "num_images": 3,
            "inspected": 3,
            "objects": [1, 2],
            "labels": {0: pytest.approx(5 / 6), 5: pytest.approx(1 / 6)},
            "largest_object": 0.25,
        }
    }
    assert Image.open("mine-sheet.png").size == (3 * 130 - 2, 2 * 130 - 2)
    assert "wrote mine-sheet.png" in capsys.readouterr().out


def test_printed_tables(cache, capsys):
    inspect(f"clevrtex:{cache}")
    output = capsys.readouterr().out
    assert f"clevrtex:{cache}: CLEVRTEX, 10 of the published 50,000, 192x192, protocol clevrtex\n" in output
    assert all(word in output for word in ("visible objects", "train", "val", "test", "largest object"))
    assert "8 of 8" in output and "6.25 %" in output and "25.00 %" in output and "0, background" in output
    assert output.endswith(f"wrote {cache / 'contact_sheet.png'}\n")


def test_unknown_data_is_refused(tmp_path):
    with pytest.raises(ValueError, match="data is 'nothing'; expected one of plain, "):
        inspect("nothing", quiet=True)
    with pytest.raises(ValueError, match="holds no folder images/"):
        inspect(str(tmp_path), quiet=True)


def test_command_line(cache, tmp_path):
    command = Command(["inspect", f"clevrtex:{cache}"], tmp_path / "log")
    assert command.end() == 0, command.said()
    assert "CLEVRTEX, 10 of the published 50,000" in command.said() and (cache / "contact_sheet.png").exists()
    (cache / "masks.npy").write_bytes((cache / "masks.npy").read_bytes()[:-1] + b"\xff")
    command = Command(["inspect", f"clevrtex:{cache}"], tmp_path / "log")
    assert command.end() == 1 and "Traceback" not in command.said()
    assert command.said().splitlines()[-1] == (
        f"cutslots: {cache}/masks.npy does not match its checksum; delete {cache} and prepare it again"
    )
    command = Command(["inspect", f"clevrtex:{cache}", "--num-images", "0"], tmp_path / "log")
    assert command.end() == 1 and command.said() == "cutslots: num_images is 0; expected at least 1\n"
