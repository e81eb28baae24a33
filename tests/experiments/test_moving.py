import json
import shutil

import pytest

from cutslots.data import open_films
from cutslots.devices import make_fabric
from cutslots.evaluate import judge
from cutslots.model import load, save
from experiments import moving
from experiments.moving import Options, main
from tests.test_track import tiny_model

KINDS = {"cut-pairs-0": "pairs", "cut-frames-0": "images", "volume-0": "volumes"}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """What the command writes for weights that were brought: one run of each kind, judged by one film."""
    folder = tmp_path_factory.mktemp("moving")
    for name, kind in KINDS.items():
        run = folder / "runs" / name
        run.mkdir(parents=True)
        save(tiny_model(kind), run)
        (run / "run.json").write_text('{"seed": 7}')
        (run / "metrics.jsonl").write_text('{"step": 1234, "loss": 1.0, "seconds": 5.6}\n')
    (folder / "docs" / "img").mkdir(parents=True)
    (folder / "docs" / "moving.md").write_text("Before.\n<!-- table -->\nold\n<!-- end of table -->\nAfter.\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(moving, "RUNS", {name: moving.RUNS[name] for name in KINDS})
        patch.setattr(moving, "make_fabric", lambda *_: make_fabric("cpu"))
        main(Options(folder / "runs", folder / "docs", films=1))
        yield folder


@pytest.fixture
def copied(written, tmp_path):
    return shutil.copytree(written, tmp_path / "copy")


def record(folder):
    return json.loads((folder / "docs" / "moving.json").read_text())


def table(folder):
    """The cells of each row, the head and the published rows left out."""
    lines = (folder / "docs" / "moving.md").read_text().splitlines()
    assert lines[:2] == ["Before.", "<!-- table -->"] and lines[-2:] == ["<!-- end of table -->", "After."]
    return [line.strip("| ").split(" | ") for line in lines[4:-4]]


def test_a_row_for_every_join_and_for_masks_as_read(written):
    cut = ["Hungarian", "by area (ours)", "by area, masks read and joined"]
    volume = ["one cut of the film", "one cut of the film, masks read and joined"]
    assert [row[2] for row in table(written)] == ["learned matching", *cut, *cut, *volume]
    assert all(row[3:5] == ["7", "1,234"] for row in table(written))
    assert (written / "docs" / "img" / "moving.png").is_file()


@pytest.mark.parametrize("name", KINDS)
def test_the_rows_are_what_judge_finds(written, name):
    films = open_films("moving", "test", 16, 1)
    means = judge(load(written / "runs" / name), films, make_fabric("cpu")).means()
    assert record(written)[name]["scores"]["area"] == means
    for prefix in ("", "joined_"):
        scores = [f"{100 * means[prefix + score]:.1f}" for score in ("ari_fg", "ari", "frame_ari_fg", "frame_ari")]
        assert [*scores, f"{means[f'{prefix}switches']:.1f}"] in [row[5:] for row in table(written)]


def test_only_what_is_missing_is_judged(written, copied, monkeypatch):
    """Here the masks as read of one run: what was recorded of the decoder's stays."""
    results, asked = record(copied), []
    scores = results["cut-frames-0"]["scores"]
    scores["area"] = {key: 0.5 for key in scores["area"] if not key.startswith("joined_")}
    (copied / "docs" / "moving.json").write_text(json.dumps(results))
    monkeypatch.setattr(moving, "judge", lambda *a, **k: asked.append(k["title"]) or judge(*a, **k))
    for _ in range(2):
        main(Options(copied / "runs", copied / "docs", films=1))
    assert asked == ["cut-frames-0, area"]
    before, after = (record(folder)["cut-frames-0"]["scores"]["area"] for folder in (written, copied))
    assert after == {key: value if key.startswith("joined_") else 0.5 for key, value in before.items()}


def test_another_training_is_judged_anew(copied, monkeypatch):
    asked = []
    (copied / "runs" / "cut-pairs-0" / "run.json").write_text('{"seed": 8}')
    monkeypatch.setattr(moving, "judge", lambda *a, **k: asked.append(k["join"]) or judge(*a, **k))
    main(Options(copied / "runs", copied / "docs", films=1))
    assert asked == ["matching", "hungarian", "area"] and [row[3] for row in table(copied)] == [*"8888", *"77777"]
