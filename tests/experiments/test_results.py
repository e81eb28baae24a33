import dataclasses
import json
import re
import shutil
import types
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from cutslots.evaluation.labels import EVALUATED_MASKS
from cutslots.models.checkpoints import save
from cutslots.models.discovery import build
from cutslots.training.presets import PRESETS
from experiments import results, study
from experiments.results import (
    EVALUATIONS,
    GENERATED,
    ablations,
    against_paper,
    draw_images,
    evaluate_checkpoints,
    first_step,
    main,
    mean_and_std,
    paper,
    read_record,
    slot_attention_lr,
    summary,
    temperature,
    write_results,
)
from tests.small_runs import Module

NAMES = [make.__name__ for make in GENERATED]
PAGE = "# Results\n\n" + "".join(f"Before {n}.\n\n<!-- {n} -->\nold\n<!-- end -->\n\n" for n in NAMES) + "The end.\n"

PLAIN, TEXTURED = "temperature/background-plain-0", "temperature/background-textured-1"
MACHINE = {"device": "a device", "torch": "2.6", "scipy": "1.17", "python": "3.11", "date": "2026-11-15"}


def scores_of(ari_fg, miou=0.3, num_images=100):
    """Return scores of a dataset: refined masks are 2 percent higher, high-recall masks 3, partition masks 10 lower."""
    values = {"ari_fg": ari_fg, "ari": 0.41, "miou": miou, "miou_fg": 0.33, "miou_gt": 0.35}
    offsets = {"refined": 0.02, "high_recall": 0.03, "partition": -0.1}
    others = {f"{kind}_{k}": v + offset for kind, offset in offsets.items() for k, v in values.items()}
    return {"num_images": num_images, "mse": 123.4, **values, **others}


def run_record(scores=None, curve=(), seed=0, **changes):
    record = {"seed": seed, "steps": 12_345, "batch_size": 32, "seconds": 510, "images_per_second": 1_234}
    record |= {"machine": MACHINE, "curve": [list(x) for x in curve], "refined": [], "scores": scores or {}}
    return record | changes


def checkpoint_records(**scores):
    """Return the evaluations of plain-128 and textured-128 by their metrics on families."""
    plain = {family: means for family, means in scores.items() if family == "plain"}
    others = {family: means for family, means in scores.items() if family != "plain"}
    return {
        f"checkpoints/{name}": {"command": f"cutslots evaluate {name}", "machine": MACHINE, "scores": means}
        for name, means in (("plain-128", plain), ("textured-128", others))
        if means
    }


def without_miou(scores):
    """Return scores as runs have them that were evaluated by another rule than the evaluator's."""
    return {name: value for name, value in scores.items() if not name.endswith(("miou", "miou_fg"))}


def head(text):
    return next(line for line in text.splitlines() if line.startswith("|"))


def rows(text):
    """Return the cells of a table without its head. Every row is as wide as the head."""
    if "|" not in text:
        assert text.strip() == "There are no such runs yet."
        return []
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    assert len({len(row) for row in cells}) == 1 and set(cells[1]) == {"---"}
    return cells[2:]


# -------------------------------------------------------------------------------------------------------------- tables


def test_summary_has_refined_masks_and_published_results():
    records = checkpoint_records(plain=scores_of(0.9541, 0.4903), textured=scores_of(0.802, 0.5))
    text = summary(records)
    commands = "`cutslots evaluate plain-128`, `cutslots evaluate textured-128`"
    assert text.startswith(f"{commands}: a device, torch 2.6, 2026-11-15.\n\n|")
    assert rows(text) == [
        ["plain", "`plain-128`", "CLEVR", "97.4", "95.4", "95.9", "51.0", "49.0", "36.6"],
        ["textured", "`textured-128`", "CLEVRTEX", "82.2", "80.2", "62.4", "52.0", "42.4", "22.6"],
    ]
    assert rows(summary({})) == []
    runs = {PLAIN: run_record({"plain": scores_of(0.9)})}
    assert rows(summary(runs)) == rows(against_paper(runs)) == [], "these tables are of the checkpoints of this package"


def test_results_that_are_reached_and_not_reached():
    plain, textured, camo = scores_of(0.9541, 0.4903), scores_of(0.802, 0.5), scores_of(0.7, 0.389)
    assert rows(against_paper(checkpoint_records(plain=plain, textured=textured, camo=camo))) == [
        ["plain", "decoder", "95.4", "95.4", "reached", "49.0", "49.0", "not reached"],
        ["plain", "refined", "97.4", "95.4", "reached", "51.0", "49.0", "reached"],
        ["plain", "high-recall", "98.4", "95.4", "reached", "52.0", "49.0", "reached"],
        ["textured", "decoder", "80.2", "80.2", "reached", "50.0", "42.4", "reached"],
        ["textured", "refined", "82.2", "80.2", "reached", "52.0", "42.4", "reached"],
        ["textured", "high-recall", "83.2", "80.2", "reached", "53.0", "42.4", "reached"],
        ["camo", "decoder", "70.0", "75.5", "not reached", "38.9", "38.9", "reached"],
        ["camo", "refined", "72.0", "75.5", "not reached", "40.9", "38.9", "reached"],
        ["camo", "high-recall", "73.0", "75.5", "not reached", "41.9", "38.9", "reached"],
    ]
    assert rows(against_paper({})) == []


def test_seeds_without_miou_are_compared_by_miou_gt():
    """A group is compared by one metric: the one that all of its runs have."""
    records = {**ablation("base", 0.60, 0.62), **ablation("softmax", 0.50, 0.51)}
    assert "| ARI-FG | mIoU | ARI-FG, camo |" in head(ablations(records))
    assert rows(ablations(records))[1][3] == "30.0 ± 0.0"
    run = records["ablations/softmax-1"]
    run["scores"] = {"textured:3-6": without_miou(scores_of(0.51)) | {"miou_gt": 0.25}}
    text = ablations(records)
    assert "| ARI-FG | mIoU-GT | ARI-FG, camo |" in head(text)
    assert head(text).endswith("| ARI-FG, difference | mIoU-GT, difference |")
    assert [row[3] for row in rows(text)] == ["35.0 ± 0.0", "30.0 ± 7.1"] and rows(text)[1][-1] == "-5.0"


def test_masks_without_scores_are_left_out():
    """Older evaluations have no high-recall masks."""
    old = {name: value for name, value in scores_of(0.9).items() if not name.startswith("high_recall")}
    assert [row[1] for row in rows(against_paper(checkpoint_records(plain=old)))] == ["decoder", "refined"]


def ablation(name, *values, family="textured:3-6", curves=(), **more):
    """Return a run for each value of ARI-FG."""
    curves = curves or [[(500, 1.0, value, 0.2)] for value in values]
    return {
        f"ablations/{name}-{seed}": run_record({family: scores_of(value), **more}, curve, seed)
        for seed, (value, curve) in enumerate(zip(values, curves, strict=True))
    }


def test_table_of_partitions():
    records = {
        f"partition/{name}-{seed}": run_record({f"{x}:3-6": scores_of(value) for x in ("textured", "camo")}, seed=seed)
        for name, values in {"cut": (0.70, 0.71, 0.72), "softmax": (0.60, 0.61, 0.62)}.items()
        for seed, value in enumerate(values)
    }
    found = rows(results.partition(records))
    assert [row[:2] for row in found[::2]] == [
        [f"{x}:3-6", kind] for x in ("textured", "camo") for kind in ("decoder", "partition")
    ]
    assert found[0][2:] == ["cut", "3", "71.0 ± 1.0", "30.0 ± 0.0", "+10.0, better", "+0.0"]
    assert found[1][2:] == ["no-cut ablation (softmax)", "3", "61.0 ± 1.0", "30.0 ± 0.0", "", ""]
    assert found[2][4] == "61.0 ± 1.0", "partition masks are ten points lower in these records"
    single = rows(results.partition({"partition/cut-0": records["partition/cut-0"]}))
    assert {row[2] for row in single} == {"cut"} and single[0][4:] == ["70.0", "30.0", "", ""], "one run, so far"


def test_table_of_ablations():
    never, late = [(250, 1.0, 0.2, 0.1)], [(250, 1.0, 0.2, 0.1), (500, 2.0, 0.5, 0.1), (750, 3.0, 0.9, 0.1)]
    records = {
        **ablation("base", 0.60, 0.62, 0.64, **{"camo:3-6": scores_of(0.5)}),
        **ablation("softmax", 0.50, 0.51, 0.52),
        **ablation("reach-8", 0.80, 0.81, 0.82, curves=[late, late, never]),
        **ablation("relu-weights", 0.55, 0.65, 0.75),
        **ablation("relative-positions", 0.7),
        **ablation("plain-base", 0.89, 0.9, 0.91, family="plain:3-6"),
        **ablation("plain-softmax", 0.89, 0.91, 0.92, family="plain:3-6"),
    }
    text = ablations(records)
    assert text.startswith("19 runs, seeds 0, 1, 2, 8.5 to 8.5 minutes each, a device, torch 2.6, 2026-11-15.\n")
    found = {row[0]: row[1:] for row in rows(text)}
    labels = results.ABLATIONS
    assert list(found) == [labels[n] for n in labels if f"ablations/{n}-0" in records], "in the order of the list"
    base = found[labels["base"]]
    assert base == ["3", "62.0 ± 2.0", "30.0 ± 0.0", "50.0 ± 0.0", "500 ± 0", "", ""], "no difference to itself"
    assert found[labels["softmax"]][1:] == ["51.0 ± 1.0", "30.0 ± 0.0", "", "500 ± 0", "-11.0, worse", "+0.0"]
    assert found[labels["reach-8"]][4:6] == ["500 ± 0 (1 never)", "+19.0, better"]
    assert found[labels["relu-weights"]][1] == "65.0 ± 10.0"
    assert found[labels["relu-weights"]][5] == "+3.0", "not significant"
    single = found[labels["relative-positions"]]
    assert single[0] == "1" and single[5] == "", "one seed proves nothing"
    assert found[labels["plain-softmax"]][5] == "+0.7", "to the base on plain scenes"


@pytest.mark.parametrize(
    "base_std, std, verdict",
    [
        (5, 5, ""),  # t = 10 / sqrt(25/3 + 25/3) = 2.449 at 4 degrees of freedom, p = 0.0705
        (2.5, 2.5, ", better"),  # t = 4.899, p = 0.0080
        (1, 5, ""),  # t = 3.397; at 4 degrees p = 0.027, but by Welch's formula there are 2.16
    ],
)
def test_significance_is_welchs_test(base_std, std, verdict):
    """Means that are 10 apart, three seeds each."""
    base, changed = ([(mean + step * d) / 100 for step in (-1, 0, 1)] for mean, d in ((50, base_std), (60, std)))
    found = rows(ablations({**ablation("base", *base), **ablation("reach-2", *changed)}))
    assert found[1][-2] == f"+10.0{verdict}"


def test_fixed_grid_baseline_in_tables():
    values = {"ari": 0.03, "ari_fg": 0.53, "miou": 0.12, "miou_fg": 0.11, "miou_gt": 0.17, "num_slots": 8}
    records = {**ablation("base", 0.6), "paper/clevr-plain-0": run_record({"plain": scores_of(0.9)})}
    records["fixed_grid"] = {"plain": values | {"num_slots": 11}, "textured:3-6": values, "camo": values}
    label = "textured scenes: fixed-grid baseline, 8 cells"
    assert rows(ablations(records))[-1] == [label, "", "53.0", "12.0", *[""] * 4]
    assert rows(paper(records)) == [
        ["`clevr`", "12,345", "1", "plain, test", "90.0", "41.0", "30.0"],
        ["fixed-grid baseline, 11 cells", "", "", "plain, test", "53.0", "3.0", "12.0"],
        ["fixed-grid baseline, 8 cells", "", "", "camo, test", "53.0", "3.0", "12.0"],
    ], "on whole families only"


def test_mean_and_std():
    assert mean_and_std([1.0, 2.0, 3.0]) == "2.0 ± 1.0" and mean_and_std([]) == ""
    assert mean_and_std([1_000, 2_000], 0) == "1,500 ± 707"
    assert mean_and_std([3.0]) == "3.0", "one seed has no deviation"


def test_first_step_at_a_threshold():
    curve = [[500, 1, 0.3], [1000, 2, 0.499], [1500, 3, 0.5, 0], [2000, 4, 0.4], [2500, 5, 0.9]]  # one with mIoU
    run = {"curve": curve}
    assert first_step(run) == 1500
    assert first_step(run, threshold=0.3) == 500 and first_step(run, threshold=0.95) is None
    assert first_step({"curve": []}) is None


def test_table_of_the_papers_presets():
    """Runs that are evaluated have a row for each family, the others their last evaluation on validation scenes."""
    curve = [(1_000, 1.0, 0.2, 0.1), (2_000, 2.0, 0.6, 0.25)]
    records = {
        f"paper/clevrtex-textured-{seed}": run_record(
            {"textured": scores_of(0.7 + 0.01 * seed), "camo": scores_of(0.6)}, curve, seed, steps=20_000 + seed
        )
        for seed in range(3)
    }
    records["paper/clevr-plain-0"] = run_record(curve=[point[:3] for point in curve], steps=2_000)
    text, clevrtex = paper(records), ["`clevrtex`, texture ramp", "20,000, 20,001, 20,002", "3"]
    assert text.startswith("4 runs, seeds 0, 1, 2, ")
    assert rows(text) == [
        ["`clevr`", "2,000", "1", "plain, validation", "60.0", "", ""],
        [*clevrtex, "textured, test", "71.0 ± 1.0", "41.0 ± 0.0", "30.0 ± 0.0"],
        [*clevrtex, "camo, test", "60.0 ± 0.0", "41.0 ± 0.0", "30.0 ± 0.0"],
    ]
    records = {"paper/clevr-plain-0": run_record(curve=curve, steps=2_000)}
    assert rows(paper(records)) == [["`clevr`", "2,000", "1", "plain, validation", "60.0", "25.0"]]
    assert rows(paper({})) == []


def test_table_of_the_readings_of_the_temperature():
    records = {
        f"temperature/{name}-plain-{seed}": run_record({"plain:2-5": scores_of(start + 0.02 * seed)}, seed=seed)
        for name, start in (("background", 0.5), ("combined", 0.6))
        for seed in range(2)
    }
    labels = ["`tiny`, 0.1 between background and foreground", "`tiny`, 0.1 over the combined masks"]
    ari_fgs = ["51.0 ± 1.4", "61.0 ± 1.4"]
    assert rows(temperature(records)) == [
        [label, "12,345", "2", "plain:2-5, test", ari_fg, "41.0 ± 0.0", "30.0 ± 0.0"]
        for label, ari_fg in zip(labels, ari_fgs, strict=True)
    ]


def test_table_of_the_sweep_of_slot_attention():
    """The last evaluation counts, not the best."""
    curve = [(500, 1.0, 0.9, 0.9), (3_500, 2.0, 0.8, 0.8), (4_000, 3.0, 0.4567, 0.2345)]
    refined = [[500, 0.9, 0.9], [4_000, 0.5, 0.3]]
    record = run_record(curve=curve, refined=refined, seed=3)
    other = run_record(curve=[(4_000, 1.0, 0.6, 0.31)], refined=[[4_000, 0.625, 0.375]], seed=3)
    records = {
        "slot_attention_lr/lr-1e-3-warmup-200-3": other,
        "slot_attention_lr/lr-2e-4-warmup-2000-3": record,
        "partition/cut-0": record,
    }
    text = slot_attention_lr(records)
    assert text.startswith("2 runs, seeds 3, 8.5 to 8.5 minutes each")
    assert rows(text) == [
        ["2e-4", "2,000", "4,000", "45.7 / 23.4", "50.0 / 30.0"],
        ["1e-3", "200", "4,000", "60.0 / 31.0", "62.5 / 37.5"],
    ]
    assert rows(slot_attention_lr({})) == []


# ------------------------------------------------------------------------------------------------------------- records


@pytest.fixture
def runs(tmp_path):
    """Run folders of a reading of the temperature and of an ablation, as training and evaluation leave them."""
    for name, data in ((TEXTURED, "textured:3-6"), ("ablations/base-1", "textured:3-6")):
        folder = tmp_path / "runs" / name
        (folder / "evaluation").mkdir(parents=True)
        logged = [
            {"step": 20, "loss": 0.2, "images_per_second": 100.0, "seconds": 10.5},
            {"step": 40, "loss": 0.1, "images_per_second": 300.0, "seconds": 20.4},
            {"step": 40, "val": {"ari_fg": 0.3, "miou": 0.2, "mse": 5.0}},
            {"step": 60, "loss": 0.1, "images_per_second": 200.0, "seconds": 30.6},
            {"step": 60, "val": {"ari_fg": 0.6, "miou": 0.4, "refined_ari_fg": 0.7, "refined_miou": 0.5, "mse": 4.0}},
            {"step": 60, "val": {"mse": 4.0}},  # datasets without masks have no other metrics
        ]
        (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, logged)) + '\n{"step": 8')
        (folder / "run.json").write_text(json.dumps({"seed": 1, "batch_size": 16, "lr": 0.1}))
        (folder / "machine.json").write_text(json.dumps(MACHINE))
        (folder / "evaluation" / "results.json").write_text(json.dumps({"results": {data: scores_of(0.96, 0.5)}}))
        (folder / "done").touch()
    return tmp_path / "runs"


@pytest.fixture
def docs(tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "results.md").write_text(PAGE)
    return tmp_path / "docs"


def test_record_of_a_run_folder(runs):
    assert read_record(runs / TEXTURED) == {
        "seed": 1,
        "steps": 60,
        "batch_size": 16,
        "seconds": 31,
        "images_per_second": 200,
        "machine": MACHINE,
        "curve": [[40, 20.4, 0.3, 0.2], [60, 30.6, 0.6, 0.4]],
        "refined": [[60, 0.7, 0.5]],
        "scores": {"textured:3-6": scores_of(0.96, 0.5)},
    }


def generated_parts(docs):
    text = (docs / "results.md").read_text()
    return {name: re.search(f"<!-- {name} -->\n(.*?)<!-- end -->", text, re.S)[1] for name in NAMES}


def test_only_generated_parts_of_the_page_change(runs, docs):
    names = [TEXTURED, "ablations/base-1", "paper/clevrtex-textured-1", "ablations/base-2"]
    shutil.copytree(runs / TEXTURED, runs / names[2])
    write_results(runs, docs, names)
    records = json.loads((docs / "results.json").read_text())
    assert records == {name: read_record(runs / name) for name in names[:3]}
    parts = generated_parts(docs)
    for make in GENERATED:
        assert parts[make.__name__] == make(records)
    assert rows(parts["temperature"])[0][3:] == ["textured:3-6, test", "96.0", "41.0", "50.0"]
    text = (docs / "results.md").read_text()
    for name, part in parts.items():
        text = text.replace(f"<!-- {name} -->\n{part}", f"<!-- {name} -->\nold\n")
    assert text == PAGE
    with Image.open(docs / "img" / "paper-curves.png") as image:
        assert image.width > 2 * image.height
    assert [p.name for p in (docs / "img").iterdir()] == ["paper-curves.png"], "there are no weights to visualise"


def test_writing_twice_changes_nothing(runs, docs):
    write_results(runs, docs, [TEXTURED, "ablations/base-1"])
    before = (docs / "results.md").read_bytes(), (docs / "results.json").read_bytes()
    write_results(runs, docs, [TEXTURED, "ablations/base-1"])
    assert ((docs / "results.md").read_bytes(), (docs / "results.json").read_bytes()) == before


def test_page_is_made_from_records_alone(runs, docs):
    write_results(runs, docs, [TEXTURED, "ablations/base-1"])
    before = (docs / "results.md").read_bytes(), (docs / "results.json").read_bytes()
    (docs / "results.md").write_text(PAGE)
    main(docs)
    assert ((docs / "results.md").read_bytes(), (docs / "results.json").read_bytes()) == before


def test_records_without_a_run_folder_are_kept(runs, docs):
    kept = {PLAIN: run_record({"plain:2-5": scores_of(0.9)}), **checkpoint_records(plain=scores_of(0.9))}
    (docs / "results.json").write_text(json.dumps(kept))
    write_results(runs, docs, [TEXTURED, PLAIN])
    parts = generated_parts(docs)
    assert [row[3] for row in rows(parts["temperature"])] == ["plain:2-5, test", "textured:3-6, test"]
    assert [row[0] for row in rows(parts["against_paper"])] == ["plain"] * 3


def test_unfinished_runs_are_left_out(runs, docs):
    (runs / TEXTURED / "done").unlink()
    write_results(runs, docs, [TEXTURED, "ablations/base-1"])
    assert list(json.loads((docs / "results.json").read_text())) == ["ablations/base-1"]
    assert rows(generated_parts(docs)["temperature"]) == []
    assert not (docs / "img").exists(), "there are no curves to draw"


def test_unfinished_runs_of_the_papers_presets_are_recorded(runs, docs):
    name = "paper/clevrtex-textured-1"
    (runs / "paper").mkdir()
    (runs / TEXTURED).rename(runs / name)
    (runs / name / "done").unlink()
    shutil.rmtree(runs / name / "evaluation")
    write_results(runs, docs, [name, "paper/clevr-plain-0"])
    assert list(json.loads((docs / "results.json").read_text())) == [name]
    assert "| `clevrtex`, texture ramp | 60 | 1 | textured, validation | 60.0 |" in (docs / "results.md").read_text()
    assert (docs / "img" / "paper-curves.png").is_file()


def test_records_are_sorted_one_on_a_line(runs, docs):
    write_results(runs, docs, [TEXTURED, "ablations/base-1"])
    first, *records, last = (docs / "results.json").read_text().splitlines()
    assert (first, last) == ("{", "}")
    assert [line.split('"')[1] for line in records] == ["ablations/base-1", TEXTURED]


def test_checkpoints_are_evaluated_and_recorded(docs, monkeypatch):
    def run(command, check):
        assert Module.start(command, docs / "log", 1).wait() == 0 and check

    monkeypatch.setattr(results, "subprocess", types.SimpleNamespace(run=run))
    command = "cutslots evaluate tiny-64 --data plain:2-5 --num-images 2"
    (docs / "results.json").write_text(json.dumps({PLAIN: run_record()}))
    evaluate_checkpoints(docs, [command])
    records = json.loads((docs / "results.json").read_text())
    assert set(records) == {"checkpoints/tiny-64", PLAIN}
    record = records["checkpoints/tiny-64"]
    assert record["command"] == command and set(record["machine"]) == set(MACHINE)
    assert record["scores"]["plain:2-5"]["num_images"] == 2
    assert {"miou", "refined_miou", "high_recall_miou_fg"} <= set(record["scores"]["plain:2-5"])


@pytest.mark.parametrize("name", NAMES)
def test_page_without_a_place(runs, docs, name):
    page = docs / "results.md"
    page.write_text(PAGE.replace(f"<!-- {name} -->", ""))
    before = page.read_bytes()
    with pytest.raises(ValueError, match=r"\A[^\n]+\Z") as caught:
        write_results(runs, docs, [TEXTURED])
    assert str(caught.value) == f"{page} has no place for {name}; expected the line <!-- {name} -->"
    assert page.read_bytes() == before


def test_outputs_of_checkpoints_are_drawn(tmp_path, monkeypatch):
    save(build(dataclasses.replace(PRESETS["tiny"].model, image_size=(16, 16))), tmp_path)
    drawn = {file: (str(tmp_path), family) for file, (_, family) in results.FIGURES.items()}
    monkeypatch.setattr(results, "FIGURES", drawn)
    draw_images(tmp_path / "img")
    assert {path.name for path in (tmp_path / "img").iterdir()} == set(drawn)
    assert {family for _, family in drawn.values()} == set(results.FAMILIES)


def test_page_in_the_repository_is_up_to_date():
    """Its tables are those that the records give."""
    docs = Path(__file__).parents[2] / "docs"
    records = json.loads((docs / "results.json").read_text())
    assert results.fill(docs / "results.md", records) == (docs / "results.md").read_text()


def test_checkpoints_of_this_package_are_recorded():
    """Their records are of the commands of EVALUATIONS, and of the model cards."""
    root = Path(__file__).parents[2]
    records = json.loads((root / "docs" / "results.json").read_text())
    for command in EVALUATIONS:
        checkpoint = command.split()[2]
        record = records[f"checkpoints/{checkpoint}"]
        card = (root / "cutslots" / "models" / "weights" / checkpoint / "README.md").read_text()
        assert record["command"] == command and f"`{command}`" in card
        for family, scores in record["scores"].items():
            for kind in ("decoder", "refined") if family == "moving" else ("decoder", "refined", "high-recall"):
                prefix = EVALUATED_MASKS[kind].prefix
                values = [f"{100 * scores[prefix + metric]:.1f}" for metric in ("ari_fg", "ari", "miou")]
                scenes = "" if family in ("plain:2-5", "moving") else f"| `{family}` "
                assert f"{scenes}| {kind} | {' | '.join(values)} |" in card
        assert ("renders" in record) == (checkpoint in results.RENDERED)
        if "renders" in record:
            assert_rendered_rows(card, record["renders"]["scores"])


def assert_rendered_rows(card, scores):
    for kind in ("decoder", "refined", "high-recall", "partition"):
        prefix = EVALUATED_MASKS[kind].prefix
        values = " | ".join(f"{100 * scores[prefix + metric]:.1f}" for metric in ("ari_fg", "ari", "miou"))
        mse = f" {scores['mse']:.1f}" if kind == "decoder" else ""
        assert re.search(rf"^\| rendered[^|]* \| {kind} \| {re.escape(values)} \|{mse} \|$", card, re.M), kind


def test_renders_are_evaluated(tmp_path, monkeypatch):
    """The last renders by the checkpoint of their family; the record keeps what it had."""
    checkpoint, renders = tmp_path / "checkpoint", tmp_path / "renders"
    checkpoint.mkdir()
    save(build(dataclasses.replace(PRESETS["tiny"].model, image_size=(16, 16))), checkpoint)
    for i in range(3):
        for kind in ("images", "masks"):
            (renders / kind).mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.full((16, 16), i % 2, np.uint8)).save(renders / kind / f"{i}.png")
    monkeypatch.setattr(study, "NUM_RENDERS", 2)
    monkeypatch.setattr(results, "RENDERED", {str(checkpoint): "plain", "textured-128": "textured"})
    results.write_records(tmp_path / "results.json", {f"checkpoints/{checkpoint}": {"command": "as before"}})
    results.evaluate_renders(tmp_path, {"plain": renders})
    record = json.loads((tmp_path / "results.json").read_text())[f"checkpoints/{checkpoint}"]
    assert record["command"] == "as before" and record["renders"]["scores"]["num_images"] == 2
    assert "date" in record["renders"]["machine"]
