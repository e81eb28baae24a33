"""The commands of the page on photographs, run in their order.

A small transformer with random weights stands in for the checkpoints that users download, and a few images in COCO's
format for the dataset.
"""

import json
import sys

import numpy as np
import pytest
from PIL import Image

from cutslots import cli
from cutslots.modules import vit
from tests.data.small_photographs import write_coco, write_photo
from tests.modules.small_vits import make_vit
from tests.small_runs import lines, state

from .pages import DOCS, commands

TEXT = (DOCS / "photographs.md").read_text()
SHORT = ["--batch-size", "2", "--num-images", "2", "--num-eval-images", "1", "--accelerator", "cpu"]
SHORT += ["--decoder.hidden-dims", "32", "32", "--slots.feature-dim", "32", "--slots.num-slots", "4"]
MORE = {"evaluate": ["--num-images", "2", "--accelerator", "cpu"], "predict": ["--device", "cpu"]}


@pytest.fixture
def photographs(folder, monkeypatch):
    """A working directory with photos/, coco/ and any transformer by its name on the Hub."""
    for i in range(3):
        write_photo(folder / "photos" / "images" / f"{i}.jpg", i, 60, 40)
    write_coco(folder / "coco", {"train": 3, "val": 2})
    make_vit(folder / "vit", "dinov2", image_size=112, patch_size=56)
    monkeypatch.setattr(vit, "find_folder", lambda checkpoint: folder / "vit")
    return folder


def run(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["cutslots", *words])
    cli.main()


def test_every_command_runs(photographs, monkeypatch, capsys):
    ran = list(commands(TEXT))
    for words in ran:
        if "runs/my-photos" in words and words[0] == "train":
            run(monkeypatch, *words, *SHORT, "--max-steps", "1")  # which the next one resumes
        run(monkeypatch, *words, *([*SHORT, "--max-steps", "2"] if words[0] == "train" else MORE.get(words[0], [])))
    names = [words[0] for words in ran]
    assert {"prepare", "inspect", "train", "evaluate", "predict"} == set(names) and names.count("train") == 3
    said = capsys.readouterr().out
    assert "resuming after step 1" in said and "caching features of 2 images" in said
    check_outputs(photographs)


def check_outputs(folder):
    for name in ("my-photos", "coco-coco-0", "coco-cached"):
        assert state(folder / "runs" / name)["step"] == 2 and "feature_mse" in lines(folder / "runs" / name)[-1]["val"]
    results = json.loads((folder / "runs" / "coco-coco-0" / "evaluation" / "results.json").read_text())["results"]
    assert {"mbo_i", "mbo_c", "corloc", "ari_fg", "refined_mbo_i"} <= results["coco:data/coco"].keys()
    for name in ("my-photos", "coco"):
        out = folder / "out" / name
        assert len(json.loads((out / "coco.json").read_text())["images"]) == 3
        assert Image.open(out / "2" / "labels.png").size == Image.open(out / "2" / "overlay.png").size == (60, 40)


def test_the_sizes_of_caches_follow_from_patches_and_channels():
    for name, channels, dtype in (("small", 384, "float16"), ("base", 768, "float16"), ("base", 768, "float32")):
        size = (224 // 14) ** 2 * channels * np.dtype(dtype).itemsize
        assert f"{dtype} | {size / 1e6:.2f} MB | {118_287 * size / 1e9:.0f} GB |" in TEXT, name
