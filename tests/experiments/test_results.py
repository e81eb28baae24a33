import dataclasses
import json
import re

import pytest
from PIL import Image

from cutslots.model import build, save
from cutslots.presets import PRESETS
from experiments import results
from experiments.results import (
    OURS,
    RISING,
    bars,
    headline,
    ours,
    plateau,
    reached,
    record,
    renders,
    rising,
    shipped,
    spread,
    studies,
    write_results,
)

NAMES = ("bars", "ours", "rising", "headline", "studies", "plateau", "renders")
PAGE = "# Results\n\n" + "".join(f"Before {n}.\n\n<!-- {n} -->\nold\n<!-- end -->\n\n" for n in NAMES) + "The end.\n"

PLAIN, TEXTURED = shipped("plain"), shipped("textured")


def scored(ari_fg, miou=0.3, images=100):
    """Scores of one dataset: those of joined masks 2 per cent higher, of eager ones 3, of the partition 10 lower."""
    values = {"ari_fg": ari_fg, "ari": 0.41, "miou": miou, "miou_fg": 0.33, "miou_gt": 0.35}
    more = {"joined": 0.02, "eager": 0.03, "partition": -0.1}
    others = {f"{kind}_{k}": v + gain for kind, gain in more.items() for k, v in values.items()}
    return {"images": images, "mse": 123.4, **values, **others}


def ran(scores=None, curve=(), seed=0, **changes):
    machine = {"device": "a device", "torch": "2.6", "python": "3.11", "date": "2026-11-15"}
    made = {"seed": seed, "steps": 12_345, "batch": 32, "seconds": 510, "images_per_second": 1_234, "machine": machine}
    return made | {"curve": [list(x) for x in curve], "joined": [], "scores": scores or {}, "renders": {}} | changes


def rows(text):
    """The cells of a table, without its head; every row is as wide as the head. Where there is none, that is said."""
    if "|" not in text:
        assert text.strip() == "These runs were not made yet."
        return []
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    assert len({len(row) for row in cells}) == 1 and set(cells[1]) == {"---"}
    return cells[2:]


# -------------------------------------------------------------------------------------------------------------- tables


def test_bars_that_are_held_and_missed():
    records = {
        PLAIN: ran({"plain": scored(0.9541, 0.4903)}),
        TEXTURED: ran({"textured": scored(0.802, 0.5), "camo": scored(0.7, 0.389)}),
    }
    assert rows(bars(records)) == [
        ["plain", "decoder", "95.4", "95.4", "held", "49.0", "49.0", "missed"],
        ["plain", "joined", "97.4", "95.4", "held", "51.0", "49.0", "held"],
        ["plain", "eager", "98.4", "95.4", "held", "52.0", "49.0", "held"],
        ["textured", "decoder", "80.2", "80.2", "held", "50.0", "42.4", "held"],
        ["textured", "joined", "82.2", "80.2", "held", "52.0", "42.4", "held"],
        ["textured", "eager", "83.2", "80.2", "held", "53.0", "42.4", "held"],
        ["camo", "decoder", "70.0", "75.5", "missed", "38.9", "38.9", "held"],
        ["camo", "joined", "72.0", "75.5", "missed", "40.9", "38.9", "held"],
        ["camo", "eager", "73.0", "75.5", "missed", "41.9", "38.9", "held"],
    ]
    assert rows(bars({})) == []


def test_the_headline_holds_ours_and_what_was_published():
    records = {
        "headline/attention-textured-0": ran({"textured": scored(0.624, 0.2258)}),
        "headline/free-textured-0": ran({"textured": scored(0.85, 0.5), "ood": scored(0.7)}, seconds=540),
    }
    text = headline(records)
    assert text.startswith("2 runs, seeds 0, 8.5 to 9.0 minutes each, a device, torch 2.6, 2026-11-15.\n\n|")
    found = rows(text)
    common = ["123", "12,345", "1,234"]
    ours = ["textured", "cut in our network", "decoder", "85.0", "41.0", "50.0", "33.0", "35.0", *common]
    at = found.index(ours)
    assert found[at + 1] == ["", "", "joined", "87.0", "43.0", "52.0", "35.0", "37.0", "", "", ""]
    assert found[at + 2] == ["", "", "eager", "88.0", "44.0", "53.0", "36.0", "38.0", "", "", ""]
    assert found[at + 3] == ["", "", "partition", "75.0", "31.0", "40.0", "23.0", "25.0", "", "", ""]
    assert found[at + 4][:4] == ["textured", "Slot Attention in our network", "decoder", "62.4"]
    assert found[at + 8] == ["", "Slot Attention, published, CLEVRTEX", "", "62.4", "", "22.6", "", "", "254", "", ""]
    assert found[at + 9] == ["", "the paper, published, CLEVRTEX", "", "80.2", "", "42.4", "", "", "207", "", ""]
    assert [row[0] for row in found if row[0]] == ["textured", "textured", "ood"]
    assert rows(headline({})) == []


def test_ours_by_hand():
    records = {
        "ours/softmax-plain-0": ran({"plain": scored(0.95)}),
        "ours/near-textured-1": ran({"textured": scored(0.85, 0.5), "camo": scored(0.6)}, seed=1),
        "headline/free-plain-0": ran({"plain": scored(0.9)}),
    }
    text = ours(records)
    assert text.startswith("2 runs, seeds 0, 1, 8.5 to 8.5 minutes each")
    found = rows(text)
    assert [row[0] for row in found] == ["plain", "", "", "", "textured", "", "", "", "camo", "", "", ""]
    assert found[0][1:6] == ["softmax control, 12 slots", "decoder", "95.0", "41.0", "30.0"]
    assert found[4][1:4] == ["the same, gone on with, half of the scenes near", "decoder", "85.0"]
    assert rows(ours({})) == []


def test_masks_that_were_not_judged_are_left_out():
    """Runs of before there were eager masks."""
    old = {name: value for name, value in scored(0.9).items() if not name.startswith("eager")}
    records = {PLAIN: ran({"plain": old}), "headline/free-plain-0": ran({"plain": old}, renders={"pictures": old})}
    for make, column, count in ((bars, 1, 2), (ours, 2, 3), (headline, 2, 3)):
        assert [row[column] for row in rows(make(records))][:count] == ["decoder", "joined", "partition"][:count]


def study(name, *values, family="textured:3-6", curves=(), **more):
    """A run for each value of ARI-FG."""
    curves = curves or [[(500, 1.0, value, 0.2)] for value in values]
    return {
        f"studies/{name}-{seed}": ran({family: scored(value), **more}, curve, seed)
        for seed, (value, curve) in enumerate(zip(values, curves, strict=True))
    }


def test_studies_by_hand():
    never, late = [(250, 1.0, 0.2, 0.1)], [(250, 1.0, 0.2, 0.1), (500, 2.0, 0.5, 0.1), (750, 3.0, 0.9, 0.1)]
    records = {
        **study("base", 0.60, 0.62, 0.64, **{"camo:3-6": scored(0.5)}),
        **study("softmax", 0.50, 0.51, 0.52),
        **study("reach-8", 0.80, 0.81, 0.82, curves=[late, late, never]),
        **study("relu", 0.55, 0.65, 0.75),
        **study("placed", 0.7),
        **study("plain-base", 0.89, 0.9, 0.91, family="plain:3-6"),
        **study("plain-softmax", 0.89, 0.91, 0.92, family="plain:3-6"),
    }
    text = studies(records)
    assert text.startswith("19 runs, seeds 0, 1, 2, 8.5 to 8.5 minutes each, a device, torch 2.6, 2026-11-15.\n")
    found = {row[0]: row[1:] for row in rows(text)}
    called = results.STUDIES
    assert list(found) == [called[n] for n in called if f"studies/{n}-0" in records], "in the order of the list"
    base = found[called["base"]]
    assert base == ["3", "62.0 ± 2.0", "30.0 ± 0.0", "50.0 ± 0.0", "500 ± 0", "", ""], "nothing to be held against"
    assert found[called["softmax"]][1:] == ["51.0 ± 1.0", "30.0 ± 0.0", "", "500 ± 0", "-11.0, worse", "+0.0"]
    assert found[called["reach-8"]][4:6] == ["500 ± 0 (1 never)", "+19.0, better"]
    assert found[called["relu"]][1] == "65.0 ± 10.0"
    assert found[called["relu"]][5] == "+3.0", "not clear"
    assert found[called["placed"]][0] == "1" and found[called["placed"]][5] == "", "one seed says nothing"
    assert found[called["plain-softmax"]][5] == "+0.7", "against plain scenes"


@pytest.mark.parametrize(
    "theirs, ours, verdict",
    [
        (5, 5, ""),  # t = 10 / sqrt(25/3 + 25/3) = 2.449 at 4 degrees of freedom, p = 0.0705
        (2.5, 2.5, ", better"),  # t = 4.899, p = 0.0080
        (1, 5, ""),  # t = 3.397; at 4 degrees p = 0.027, but by Welch's formula there are 2.16
    ],
)
def test_what_is_clear_is_welchs_test(theirs, ours, verdict):
    """Means that are 10 apart, by the deviations of three seeds each."""
    base, changed = ([(mean + step * d) / 100 for step in (-1, 0, 1)] for mean, d in ((50, theirs), (60, ours)))
    found = rows(studies({**study("base", *base), **study("reach-2", *changed)}))
    assert found[1][-2] == f"+10.0{verdict}"


def test_fixed_blocks_stand_beside_what_was_learned():
    values = {"ari": 0.03, "ari_fg": 0.53, "miou": 0.12, "miou_fg": 0.11, "miou_gt": 0.17, "slots": 8}
    records = {**study("base", 0.6), "headline/free-plain-0": ran({"plain": scored(0.9)})}
    records["blocks"] = {"plain": values | {"slots": 11}, "textured:3-6": values, "camo": values}
    assert rows(studies(records))[-1] == [
        "textured scenes: 8 fixed blocks, which look at nothing",
        "",
        "53.0",
        "12.0",
        *[""] * 4,
    ]
    mine = [row for row in rows(headline(records)) if "blocks" in row[1]]
    told = ["", "11 fixed blocks, which look at nothing", "", "53.0", "3.0", "12.0", "11.0", "17.0", "", "", ""]
    assert mine == [told], "on families that were judged"


def test_spread():
    assert spread([1.0, 2.0, 3.0]) == "2.0 ± 1.0" and spread([]) == ""
    assert spread([1_000, 2_000], 0) == "1,500 ± 707"
    assert spread([3.0]) == "3.0", "one seed has no deviation"


def test_the_first_step_past_a_bar():
    run = ran(curve=[(500, 1, 0.3, 0), (1000, 2, 0.499, 0), (1500, 3, 0.5, 0), (2000, 4, 0.4, 0), (2500, 5, 0.9, 0)])
    curve = run["curve"]
    assert reached(curve) == 1500 and reached(curve, 0.3) == 500 and reached(curve, 0.95) is None
    assert reached([[500, 0.4, 0.9], [1000, 0.6, 0.1]]) == 1000, "joined"
    assert reached([]) is None


def test_the_plateau_by_hand():
    curve = [(step, step / 10, step / 5000, 0.2) for step in range(500, 4001, 500)]
    records = {
        "headline/free-textured-0": ran(curve=curve),
        "plateau/free-textured-2": ran(curve=curve[:2], seed=2),
        "headline/paper-textured-0": ran(curve=[(3000, 1.0, 0.123, 0.2)], batch=64),
        "plateau/free-textured-0": ran(curve=curve, steps=1),  # the first seed is the headline's
    }
    joined = [[step, ari_fg + 0.15, miou] for step, _, ari_fg, miou in curve]
    records["ours/ground-textured-1"] = ran(curve=curve[1::2], seed=1, joined=joined[1::2])
    records["ours/softmax-textured-0"] = ran(curve=curve[:1], joined=joined[:1])
    steps = ["10.0 / 20", "20.0 / 20", "30.0 / 20", "40.0 / 20", "50.0 / 20", "60.0 / 20"]
    assert rows(plateau(records)) == [
        ["cut, the paper's preset", "0", "64", "", "", "", "", "", "12.3 / 20", "never", "never"],
        ["cut in our network", "0", "32", *steps, "2,500", "never"],
        ["cut in our network", "2", "32", *steps[:2], "", "", "", "", "never", "never"],
        [
            "cut (`best`), textures whole from step 5,000",
            "1",
            "32",
            *["", steps[1], "", steps[3], "", steps[5]],
            "3,000",
            "2,000",
        ],
        [OURS["softmax-textured-0"], "0", "32", steps[0], "", "", "", "", "", "never", "never"],
    ]


def test_one_course_by_hand():
    records = {
        f"rising/{method}-textured-{seed}": ran({"camo": scored(start + step * seed, start)}, seed=seed)
        for method, start, step in (("ground", 0.7, 0.01), ("softmax", 0.5, 0.01), ("attention", 0.5, 0.1))
        for seed in range(3)
    }
    found = rows(rising(records))
    assert [row[:4] for row in found[:3]] == [
        ["camo", "decoder", slots, "3"] for slots in ("cut (`best`)", "softmax control", "Slot Attention")
    ]
    assert found[0][4:] == ["71.0 ± 1.0", "70.0 ± 0.0", "+20.0, better", "+20.0, better"]
    assert found[1][4:] == ["51.0 ± 1.0", "50.0 ± 0.0", "", ""]
    assert found[2][4:6] == ["60.0 ± 10.0", "50.0 ± 0.0"] and found[2][6] == "+9.0", "not clear"
    assert [row[1] for row in found[::3]] == ["decoder", "joined", "eager"] and found[3][4] == "73.0 ± 1.0"
    assert [row[0] for row in rows(plateau(records))] == [
        f"{slots}, textures rising" for slots in RISING.values() for _ in range(3)
    ]
    del records["rising/softmax-textured-0"], records["rising/softmax-textured-1"]
    assert len(rows(rising(records))[0]) == 6, "one seed says nothing"


def test_rendered_scenes_by_hand():
    records = {
        "headline/free-textured-0": ran({"textured": scored(0.9)}, renders={"pictures": scored(0.5, images=7)}),
        "renders/alone-0": ran(renders={"pictures": scored(0.75)}, steps=99),
    }
    found = rows(renders(records))
    rest = ["41.0", "30.0", "33.0", "35.0", "123"]
    assert found[0] == ["rendered scenes alone", "decoder", "75.0", *rest, "99", "100"]
    assert found[1] == ["", "joined", "77.0", "43.0", "32.0", "35.0", "37.0", "", "", ""]
    assert found[2] == ["", "eager", "78.0", "44.0", "33.0", "36.0", "38.0", "", "", ""]
    assert found[3] == ["", "partition", "65.0", "31.0", "20.0", "23.0", "25.0", "", "", ""]
    assert found[4] == ["built-in scenes alone", "decoder", "50.0", *rest, "12,345", "7"] and len(found) == 8
    assert rows(renders({})) == []


# ------------------------------------------------------------------------------------------------------------- records


@pytest.fixture
def runs(tmp_path):
    """Run folders of a headline and a study, as training and judging leave them."""
    for name, data in ((TEXTURED, "textured"), ("studies/base-1", "textured:3-6")):
        folder = tmp_path / "runs" / name
        (folder / "evaluation").mkdir(parents=True)
        told = [
            {"step": 20, "loss": 0.2, "images_per_second": 100.0, "seconds": 10.5},
            {"step": 40, "loss": 0.1, "images_per_second": 300.0, "seconds": 20.4},
            {"step": 40, "val": {"ari_fg": 0.3, "miou": 0.2, "mse": 5.0}},
            {"step": 60, "loss": 0.1, "images_per_second": 200.0, "seconds": 30.6},
            {"step": 60, "val": {"ari_fg": 0.6, "miou": 0.4, "joined_ari_fg": 0.7, "joined_miou": 0.5, "mse": 4.0}},
            {"step": 60, "val": {"mse": 4.0}},  # films and pictures without truth have no scores
        ]
        (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, told)) + '\n{"step": 8')
        (folder / "run.json").write_text(json.dumps({"seed": 1, "batch": 16, "lr": 0.1}))
        (folder / "machine.json").write_text(json.dumps(ran()["machine"]))
        (folder / "evaluation" / "results.json").write_text(json.dumps({"results": {data: scored(0.96, 0.5)}}))
        (folder / "done").touch()
    return tmp_path / "runs"


@pytest.fixture
def docs(tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "results.md").write_text(PAGE)
    return tmp_path / "docs"


def test_what_a_run_folder_says(runs):
    made = record(runs / TEXTURED)
    assert made == {
        "seed": 1,
        "steps": 60,
        "batch": 16,
        "seconds": 31,
        "images_per_second": 200,
        "machine": ran()["machine"],
        "curve": [[40, 20.4, 0.3, 0.2], [60, 30.6, 0.6, 0.4]],
        "joined": [[60, 0.7, 0.5]],
        "scores": {"textured": scored(0.96, 0.5)},
        "renders": {},
    }


def written(docs):
    return {n: re.search(f"<!-- {n} -->\n(.*?)<!-- end -->", (docs / "results.md").read_text(), re.S)[1] for n in NAMES}


def test_the_page_is_filled_and_its_words_are_left(runs, docs):
    names = [TEXTURED, "studies/base-1", "studies/base-2"]
    write_results(runs, docs, names)
    records = json.loads((docs / "results.json").read_text())
    assert records == {name: record(runs / name) for name in names[:2]}
    parts = written(docs)
    for name in NAMES:
        assert parts[name] == getattr(results, name)(records)
    assert rows(parts["bars"])[0] == ["textured", "decoder", "96.0", "80.2", "held", "50.0", "42.4", "held"]
    text = (docs / "results.md").read_text()
    for name, part in parts.items():
        text = text.replace(f"<!-- {name} -->\n{part}", f"<!-- {name} -->\nold\n")
    assert text == PAGE, "all else is as it was"
    with Image.open(docs / "img" / "results-curves.png") as picture:
        assert picture.width > 2 * picture.height
    assert [p.name for p in (docs / "img").iterdir()] == ["results-curves.png"], "there are no weights to look with"


def test_written_twice_it_is_the_same(runs, docs):
    write_results(runs, docs, [TEXTURED, "studies/base-1"])
    before = (docs / "results.md").read_bytes(), (docs / "results.json").read_bytes()
    write_results(runs, docs, [TEXTURED, "studies/base-1"])
    assert ((docs / "results.md").read_bytes(), (docs / "results.json").read_bytes()) == before


def test_records_of_runs_that_are_elsewhere_are_kept(runs, docs):
    (docs / "results.json").write_text(json.dumps({PLAIN: ran({"plain": scored(0.9)})}))
    write_results(runs, docs, [TEXTURED, PLAIN])
    assert [row[0] for row in rows(written(docs)["bars"])] == ["plain"] * 3 + ["textured"] * 3


def test_runs_that_are_not_done_are_left_out(runs, docs):
    (runs / TEXTURED / "done").unlink()
    write_results(runs, docs, [TEXTURED, "studies/base-1"])
    assert list(json.loads((docs / "results.json").read_text())) == ["studies/base-1"]
    assert rows(written(docs)["bars"]) == [] and not (docs / "img").exists(), "there are no curves to draw"


def test_a_record_is_a_line(runs, docs):
    """For changes to be seen; in the order of their names."""
    write_results(runs, docs, ["studies/base-1", TEXTURED])
    first, *told, last = (docs / "results.json").read_text().splitlines()
    assert (first, last) == ("{", "}") and [line.split('"')[1] for line in told] == [
        TEXTURED,
        "studies/base-1",
    ]


@pytest.mark.parametrize("name", NAMES)
def test_a_page_without_a_place(runs, docs, name):
    page = docs / "results.md"
    page.write_text(PAGE.replace(f"<!-- {name} -->", ""))
    before = page.read_bytes()
    with pytest.raises(ValueError, match=r"\A[^\n]+\Z") as caught:
        write_results(runs, docs, [TEXTURED])
    assert str(caught.value) == f"{page} has no place for {name}; expected the line <!-- {name} -->"
    assert page.read_bytes() == before


def test_what_our_models_see_is_shown(runs, docs):
    model = build(dataclasses.replace(PRESETS["tiny"].model, size=16))
    save(model, runs / TEXTURED)
    write_results(runs, docs, [TEXTURED])
    families = {"textured", "ood", "camo"}  # what it is judged on
    assert {p.stem.removeprefix("results-") for p in (docs / "img").iterdir()} == families | {"curves"}
