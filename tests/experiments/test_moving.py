import json
import shutil
from pathlib import Path

import pytest

from cutslots.data.open import open_dataset
from cutslots.devices import make_fabric
from cutslots.evaluation.evaluate import evaluate_model
from cutslots.models.checkpoints import load, save
from cutslots.models.discovery import build
from cutslots.training.options import parse_train
from experiments import moving
from experiments.moving import RUNS, Options, main
from experiments.study import marks
from tests.small_runs import small

SMALL_RUNS = {
    "cut-pairs-0": {},
    "cut-frames-0": {"model": "discovery"},
    "spacetime-0": {"model": "spacetime-discovery", "slots__partition": "spacetime-cut"},
}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """What the command writes for imported weights: one run of each kind, evaluated on one video."""
    folder = tmp_path_factory.mktemp("moving")
    for name, changes in SMALL_RUNS.items():
        run = folder / "runs" / name
        run.mkdir(parents=True)
        save(build(small(run, "ours-video", **changes).model), run)
        (run / "run.json").write_text('{"seed": 7}')
        (run / "metrics.jsonl").write_text('{"step": 1234, "loss": 1.0, "seconds": 5.6}\n')
    (folder / "docs" / "img").mkdir(parents=True)
    (folder / "docs" / "moving.md").write_text("Before.\n<!-- table -->\nold\n<!-- end of table -->\nAfter.\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(moving, "RUNS", {name: RUNS[name] for name in SMALL_RUNS})
        patch.setattr(moving, "make_fabric", lambda *_: make_fabric("cpu"))
        main(Options(folder / "runs", folder / "docs", num_videos=1))
        yield folder


@pytest.fixture
def copied(written, tmp_path):
    return shutil.copytree(written, tmp_path / "copy")


def record(folder):
    return json.loads((folder / "docs" / "moving.json").read_text())


def table(folder):
    """Return the cells of each row without the head and the published rows."""
    lines = (folder / "docs" / "moving.md").read_text().splitlines()
    assert lines[:2] == ["Before.", "<!-- table -->"] and lines[-2:] == ["<!-- end of table -->", "After."]
    rows = [line.strip("| ").split(" | ") for line in lines[4:-4]]
    assert all("published" in line for line in lines[-4:-2]) and {len(row) for row in rows} == {11}
    return rows


def test_row_for_every_association_and_for_refined_masks(written):
    images = [("Hungarian", "decoder"), ("area (ours)", "decoder"), ("area (ours)", "refined")]
    spacetime = [("none: one cut of the video", "decoder"), ("none: one cut of the video", "refined")]
    expected = [("learned matching", "decoder"), *images, *images, *spacetime]
    assert [tuple(row[2:4]) for row in table(written)] == expected
    assert all(row[4:6] == ["7", "1,234"] for row in table(written))
    assert (written / "docs" / "img" / "moving.png").is_file()


@pytest.mark.parametrize("name", SMALL_RUNS)
def test_rows_are_the_results_of_evaluation(written, name):
    videos = open_dataset("moving", "test", 16, 1, videos=True)
    means = evaluate_model(load(written / "runs" / name), videos, make_fabric("cpu")).means()
    assert record(written)[name]["scores"]["overlap" if name == "spacetime-0" else "area"] == means
    for prefix in ("", "refined_"):
        values = [f"{100 * means[prefix + metric]:.1f}" for metric in ("ari_fg", "ari", "frame_ari_fg", "frame_ari")]
        assert [*values, f"{means[f'{prefix}id_switches']:.1f}"] in [row[6:] for row in table(written)]


def test_only_missing_metrics_are_evaluated(written, copied, monkeypatch):
    """Here those of refined masks: the recorded ones of decoder masks stay."""
    results, titles = record(copied), []
    scores = results["cut-frames-0"]["scores"]
    scores["area"] = {key: 0.5 for key in scores["area"] if not key.startswith("refined_")}
    (copied / "docs" / "moving.json").write_text(json.dumps(results))
    monkeypatch.setattr(moving, "evaluate_model", lambda *a, **k: titles.append(k["title"]) or evaluate_model(*a, **k))
    for _ in range(2):
        main(Options(copied / "runs", copied / "docs", num_videos=1))
    assert titles == ["cut-frames-0, area"]
    before, after = (record(folder)["cut-frames-0"]["scores"]["area"] for folder in (written, copied))
    assert after == {key: value if key.startswith("refined_") else 0.5 for key, value in before.items()}


def test_another_training_run_is_evaluated_again(copied, monkeypatch):
    used = []
    (copied / "runs" / "cut-pairs-0" / "run.json").write_text('{"seed": 8}')
    monkeypatch.setattr(
        moving, "evaluate_model", lambda *a, **k: used.append(k["association"]) or evaluate_model(*a, **k)
    )
    main(Options(copied / "runs", copied / "docs", num_videos=1))
    assert sorted(used) == ["area", "hungarian", "learned"]
    assert [row[4] for row in table(copied)] == [*"8888", *"77777"]


@pytest.mark.parametrize("name", RUNS)
def test_changes_are_options_of_the_preset(name):
    config = parse_train(["ours-video", *RUNS[name].changes])
    build(config.model)
    assert config.model.frames == (1 if "frames" in name else 2) and config.seed == int(name[-1])


def test_page_in_the_repository_is_up_to_date(monkeypatch):
    """Its table is that of the records."""
    monkeypatch.setattr(moving, "RUNS", RUNS)  # all of them, whatever the fixtures need
    docs = Path(__file__).parents[2] / "docs"
    text = moving.table(json.loads((docs / "moving.json").read_text()))
    start, end = marks("table")
    assert start + text + end in (docs / "moving.md").read_text()
