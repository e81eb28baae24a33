import json
import shutil
from pathlib import Path

import pytest
from PIL import Image

from cutslots.scenes import Scenes
from cutslots.scenes.export import generate
from cutslots.training import loop
from experiments import study
from experiments.study import Options, last_images, run_study
from experiments.varied import FAMILIES, METHODS, METRICS, RUN_NAMES, SEEDS, STUDY, TEST_DATA, run_config, table
from tests.experiments.test_table import differences
from tests.small_runs import state

DOCS = Path(__file__).parents[2] / "docs"
SCENES = {"data.variation"}
AUGMENTATION = {
    "horizontal_flips",
    "min_crop_area",
    "brightness_jitter",
    "contrast_jitter",
    "saturation_jitter",
    "hue_jitter",
    "blur_probability",
    "noise_sigma",
}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """What the command writes for one run, with renders that are built-in scenes."""
    folder = tmp_path_factory.mktemp("varied")
    (folder / "docs").mkdir()
    shutil.copy(DOCS / "varied.md", folder / "docs")
    generate(Scenes("plain", size=16, count=3), folder / "renders", quiet=True)
    run_study(STUDY, quick(folder))
    return folder


def all_runs(options):
    return {name: run_config(name, options) for name in RUN_NAMES}


def quick(folder):
    renders = folder / "renders"
    return Options(folder / "runs", folder / "docs", None, renders, quick=True, num_images=2, match="plain-both-1")


def test_every_method_has_three_seeds_on_both_families():
    found = all_runs(Options(Path("runs")))
    assert len(found) == len(FAMILIES) * len(METHODS) * len(SEEDS) == 24
    for name, config in found.items():
        assert config.seed == int(name[-1]) and config.num_images == "endless" and config.max_steps == 10_000
        assert (config.data.variation == "v1") == ("varied" in name or "both" in name)
        assert (config.augmentation.min_crop_area < 1) == ("augmented" in name or "both" in name)


def test_methods_differ_in_what_is_compared_alone():
    found = all_runs(Options(Path("runs")))
    expected = {"varied": SCENES, "augmented": AUGMENTATION, "both": SCENES | AUGMENTATION}
    for family in FAMILIES:
        for method, names in expected.items():
            assert differences(found[f"{family}-{method}-0"], found[f"{family}-as-is-0"]) == names


def test_every_config_is_valid(tmp_path):
    for name in RUN_NAMES:
        if name.endswith("-0"):
            loop.validate(run_config(name, Options(tmp_path, quick=True)))


def test_the_last_images_of_a_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(study, "NUM_RENDERS", 2)
    for kind in ("images", "masks"):
        (tmp_path / "renders" / kind).mkdir(parents=True)
        for i in range(4):
            Image.new("L", (2, 2), i).save(tmp_path / "renders" / kind / f"{i:05d}.png")
    for _ in range(2):
        found = last_images(tmp_path / "renders", tmp_path / "last")
        assert sorted(str(p.relative_to(found)) for p in found.rglob("*.png")) == [
            f"{kind}/0000{i}.png" for kind in ("images", "masks") for i in (2, 3)
        ]
    assert Image.open(found / "masks" / "00003.png").getpixel((0, 0)) == 3
    (tmp_path / "empty" / "images").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"empty/images is empty; expected images"):
        last_images(tmp_path / "empty", tmp_path / "none")


def test_runs_and_records(written):
    record = json.loads((written / "docs" / "varied.json").read_text())
    assert record.keys() == {"plain-both-1"} and record["plain-both-1"]["steps"] == 4
    assert record["plain-both-1"]["test"].keys() == set(TEST_DATA)
    assert all(set(METRICS) < set(values) for values in record["plain-both-1"]["test"].values())
    assert str(written) not in json.dumps(record), "paths are left out"


def test_finished_runs_are_skipped_and_other_data_are_evaluated(written, monkeypatch):
    monkeypatch.setattr(loop, "train", None)
    evaluation = written / "runs" / "plain-both-1" / "evaluation"
    before = (written / "docs" / "varied.md").read_bytes()
    shutil.rmtree(evaluation / "renders")
    kept = (evaluation / "varied" / "results.json").stat().st_mtime_ns
    run_study(STUDY, quick(written))
    assert (written / "docs" / "varied.md").read_bytes() == before
    assert (evaluation / "varied" / "results.json").stat().st_mtime_ns == kept
    assert state(written / "runs" / "plain-both-1")["step"] == 4


def test_table(written):
    text = (written / "docs" / "varied.md").read_text()
    assert text.startswith("# Transfer") and text.count("| not run |") == 3 * (8 - 1)
    values = json.loads((written / "docs" / "varied.json").read_text())["plain-both-1"]["test"]["renders"]
    cells = [f"{100 * values[name]:.1f}" for name in METRICS]
    assert f"| plain | varied, augmented | renders | 1 | 4 | {' | '.join(cells)} |" in text


def test_table_has_the_mean_and_the_range():
    values = {"ari_fg": 0.5, "miou": 0.4, "refined_ari_fg": 0.25, "refined_miou": 0.125}
    results = {
        f"textured-varied-{seed}": {"steps": 10, "test": {"renders": {k: v + seed / 100 for k, v in values.items()}}}
        for seed in SEEDS
    }
    row = "| textured | varied | renders | 3 | 10 | 51.0 (50.0 to 52.0) | 41.0 (40.0 to 42.0) | 26.0 (25.0 to 27.0) |"
    assert row in table(results) and "| textured | varied | built-in | not run |" in table(results)


def test_table_of_the_docs_is_that_of_the_record():
    file = DOCS / "varied.json"
    results = json.loads(file.read_text()) if file.is_file() else {}
    assert table(results) in (DOCS / "varied.md").read_text()
