import pytest

from cutslots.evaluation.labels import EVALUATED_MASKS
from cutslots.evaluation.objects import GROUPS
from cutslots.evaluation.published import IMITATED, PUBLISHED, published_results
from cutslots.evaluation.tables import (
    METRIC_DESCRIPTIONS,
    METRIC_LABELS,
    found_section,
    found_text,
    metrics_section,
    table_text,
)
from cutslots.scenes import FAMILIES
from tests.evaluation.small_visualizations import result
from tests.viz.html_page import HTMLPage


def test_text_table_contains_the_metrics():
    lines = table_text({"plain:2-5": result(20), "somewhere": result(50)}).splitlines()
    assert lines[0].split()[:3] == ["dataset", "ARI-FG", "ARI"]
    assert len({len(line) for line in lines}) == 1, "columns line up"
    assert [line.split("masks")[1].split() for line in lines[1:5]] == [
        ["20.0", "21.0", "22.0", "23.0", "24.0", "30.5"],
        ["25.0", "26.0", "27.0", "28.0", "29.0"],
        ["50.0", "51.0", "52.0", "53.0", "54.0", "60.5"],
        ["55.0", "56.0", "57.0", "58.0", "59.0"],
    ]
    assert lines[1].startswith("plain:2-5 (7 images)") and lines[3].startswith("somewhere (7 images)")
    assert len(lines) == 7 and all(line.startswith("published on CLEVR ") for line in lines[5:])
    assert lines[6].split()[-3:] == ["95.4", "49.0", "14.0"]


@pytest.mark.parametrize(
    "name, more, note",
    [
        ("plain", {}, "In percent, except MSE. Gray rows are published results. They were measured on CLEVR, not on"),
        ("moving", {"id_switches": 1.0}, "In percent, except MSE and ID switches. Gray rows are published"),
        ("clevr:folder", {}, "In percent, except MSE. Gray rows are published results.</p>"),
        ("somewhere", {}, "In percent, except MSE.</p>"),
    ],
)
def test_note_says_what_the_table_shows(name, more, note):
    assert note in metrics_section({name: result(20) | more})


def test_section_defines_the_metrics_and_masks_of_the_table():
    page = HTMLPage(metrics_section({"plain": result(20)}))
    for name in ("ari", "ari_fg", "miou", "miou_fg", "miou_gt", "mse"):
        assert METRIC_DESCRIPTIONS[name] in page.text
    for kind, info in EVALUATED_MASKS.items():
        assert (info.description in page.text) == (kind in ("decoder", "partition"))
    assert METRIC_DESCRIPTIONS["id_switches"] not in page.text


def test_every_metric_has_a_label_and_a_description():
    assert METRIC_LABELS.keys() == METRIC_DESCRIPTIONS.keys()


def test_table_is_accessible():
    page = HTMLPage(metrics_section({"plain": result(20)}))
    boxes = [page.attributes[i - 1].get("class") for i, tag in enumerate(page.tags) if tag == "table"]
    assert boxes == ["scroll"], "a wide table scrolls in a box of its own"
    assert {attrs["scope"] for attrs in page.all("th")} == {"col", "row"}
    assert len(page.all("tr", **{"class": "published"})) == 2


def test_published_results_of_datasets():
    assert set(IMITATED) == set(FAMILIES) and set(IMITATED.values()) == set(PUBLISHED)
    assert published_results(["clevr:folder"]) == published_results(["plain:2-5", "plain"]) == PUBLISHED["clevr"]
    assert published_results(["moving", "camo"]) == PUBLISHED["movi-a"] + PUBLISHED["clevrtex-camo"]
    assert published_results(["somewhere"]) == []


def found(start, groups):
    """Fractions of objects found of start, start + 1, ... percent, and 14 objects of each group in 7 images."""
    names = ["found", *(f"found_{group}" for group in groups)]
    values = {name: (start + i) / 100 for i, name in enumerate(names)} | {f"refined_{name}": 0.5 for name in names}
    return result(20) | values | {f"num_{group}": 2.0 for group in ("objects", *groups)}


def test_text_of_objects_found():
    several = {"plain": found(20, GROUPS), "somewhere": found(60, ["small", "medium", "large"])}
    lines = found_text(several).splitlines()
    assert len({len(line) for line in lines}) == 1, "columns line up"
    words = [line.split() for line in lines]
    assert words[0][:6] == ["objects", "found", "all", "small", "medium", "large"]
    assert words[1] == ["plain", "decoder", "masks", *(f"{20 + i}.0" for i in range(7))]
    assert words[2] == ["plain", "refined", "masks", *["50.0"] * 7]
    assert words[3] == ["plain", "true", "objects", *["14"] * 7]
    assert words[4] == ["somewhere", "decoder", "masks", "60.0", "61.0", "62.0", "63.0"]
    assert words[6] == ["somewhere", "true", "objects", *["14"] * 4] and len(lines) == 7


def test_section_of_objects_found():
    page = HTMLPage(found_section({"<b>": found(20, ["small", "medium", "large"])}))
    assert "20.0" in page.text and "14" in page.text and page.text.count("<b>") == 3, "names are escaped"
    for group, description in GROUPS.items():
        assert (description in page.text) == (group in ("small", "medium", "large"))
    assert {attrs["scope"] for attrs in page.all("th")} == {"col", "row"}
    assert found_section({"plain": result(20)}) == ""


def test_group_without_objects_has_an_empty_cell():
    means = found(20, GROUPS)
    del means["found_small"]
    means["num_small"] = 0.0
    lines = found_text({"plain": means}).splitlines()
    assert lines[1].split()[3:5] == ["20.0", "22.0"] and lines[3].split()[3:5] == ["14", "0"]
