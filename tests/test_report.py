"""Pages are parsed, pictures in them decoded."""

import base64
import io
import json
import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image

from cutslots.disk import read_lines
from cutslots.report import (
    STYLE,
    FilmPictures,
    Pictures,
    blend,
    paint,
    paper_rows,
    png,
    scores_section,
    sheet,
    table_text,
    write_evaluation,
    write_training,
)
from cutslots.scenes.files import PALETTE

SIDE, SLOTS = 12, 3
NASTY = '<script>alert("1")</script> & co'
VOID = {"meta", "img", "br", "hr", "link", "input"}


class Page(HTMLParser):
    """Checks that tags are balanced; keeps tags and their attributes, texts, pictures, curves, what is linked to."""

    def __init__(self, path):
        super().__init__()
        self.open, self.tags, self.attributes, self.links, self.text = [], [], [], [], ""
        self.pictures, self.curves = [], []
        self.feed(path.read_text())
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes.append(dict(attrs))
        for name, value in attrs:
            if name in ("src", "href", "xlink:href", "srcset", "action", "data"):
                self.links.append(value)
            if name == "src":
                head, _, data = value.partition(",")
                data = base64.b64decode(data, validate=True)
                if head == "data:image/svg+xml;base64":
                    self.curves.append(ElementTree.fromstring(data))
                    continue
                assert head in ("data:image/png;base64", "data:image/jpeg;base64")
                with Image.open(io.BytesIO(data)) as picture:
                    picture.load()
                    self.pictures.append(np.asarray(picture))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data

    def all(self, *tags):
        """The attributes of all elements of these kinds, in order."""
        return [attrs for tag, attrs in zip(self.tags, self.attributes, strict=True) if tag in tags]


def assert_needs_nothing_else(page, path):
    assert page.links and all(link.startswith(("data:", "#")) for link in page.links)
    assert not {"script", "iframe", "link", "object", "embed"} & set(page.tags)
    text = path.read_text()
    assert "url(http" not in text and "@import" not in text


@pytest.fixture
def pictures(rng):
    colours = lambda *shape: rng.integers(0, 256, (*shape, SIDE, SIDE, 3), dtype=np.uint8)
    labels = lambda top: rng.integers(0, top, (2, SIDE, SIDE), dtype=np.uint8)
    truth = labels(4)
    truth[1] = 0  # of the second image there is no truth
    return Pictures(colours(2), truth, colours(2), labels(SLOTS), labels(SLOTS), colours(2, SLOTS), labels(SLOTS))


@pytest.fixture
def run(tmp_path):
    """A run folder whose last line was being written when the run was killed."""
    run = tmp_path / "run"
    (run / "pictures").mkdir(parents=True)
    scores = {"ari_fg": 0.5, "ari": 0.25, "miou": 0.125}
    lines = [{"step": 20, "loss": 0.1}, {"step": 40, "loss": 0.05, "val": scores}, {"step": 60, "loss": 0.04}]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (run / "metrics.jsonl").write_text(text + '{"step": 80, "lo')
    for i in range(9):
        picture = png(np.full((5, 7, 3), i, dtype=np.uint8))
        (run / "pictures" / f"step_{100 * i:07d}.png").write_bytes(picture)
    (run / "run.json").write_text(json.dumps({"data": f"</pre>{NASTY}"}))
    return run


def means(start):
    """Scores that a table shows as start, start + 1, ... per cent; MSE as start + 10.5."""
    names = ["ari_fg", "ari", "miou", "miou_fg", "miou_gt"]
    names += [f"partition_{name}" for name in names]
    return {"images": 7, "mse": start + 10.5} | {name: (start + i) / 100 for i, name in enumerate(names)}


def colours_by_label(painted, labels):
    found = {k: {tuple(c) for c in painted[labels == k].tolist()} for k in np.unique(labels).tolist()}
    assert all(len(colours) == 1 for colours in found.values()), "one colour to a label"
    return {k: colours.pop() for k, colours in found.items()}


@pytest.mark.parametrize("seed", range(5))
def test_paint_gives_labels_the_colours_of_their_objects(seed):
    rng = np.random.default_rng(seed)
    truth = np.repeat(np.arange(6), 6).reshape(6, 6).astype(np.uint8)
    names = rng.permutation(10)[:6].astype(np.uint8)
    labels = names[truth]
    labels[rng.integers(6), 0] = names[0]  # an error that changes no majority
    assert np.array_equal(paint(names[truth], truth), PALETTE[truth])
    seen = colours_by_label(paint(labels, truth), labels)
    assert seen == {int(names[t]): tuple(PALETTE[t].tolist()) for t in range(6)}


@pytest.mark.parametrize("seed", range(10))
def test_paint_is_one_to_one(seed):
    rng = np.random.default_rng(seed)
    truth = rng.integers(0, rng.integers(1, 6), (SIDE, SIDE), dtype=np.uint8)
    labels = rng.integers(0, rng.integers(1, 10), (SIDE, SIDE), dtype=np.uint8)
    for given in (truth, None):
        seen = colours_by_label(paint(labels, given), labels)
        assert len(set(seen.values())) == len(seen)


def test_paint_knows_extra_and_missed_objects():
    truth = np.uint8([[0, 0, 0, 0], [0, 0, 1, 1], [2, 2, 2, 2]])
    labels = np.uint8([[0, 0, 0, 0], [0, 2, 1, 1], [1, 1, 1, 1]])  # 2 is extra; 1 holds both objects
    seen = colours_by_label(paint(labels, truth), labels)
    assert seen[0] == (0, 0, 0) and seen[1] == tuple(PALETTE[2].tolist()), "the larger object gives its colour"
    assert seen[2] not in {tuple(PALETTE[t].tolist()) for t in range(3)}, "what pairs with nothing has a colour apart"


def test_paint_without_truth_numbers_labels_from_one():
    labels = np.uint8([[0, 1], [2, 0]])
    assert np.array_equal(paint(labels), PALETTE[labels + 1])


def test_columns_and_sheet(pictures):
    with_truth, without = pictures.columns(0), pictures.columns(1)
    slots = ["slot 1", "slot 2", "slot 3"]
    assert list(with_truth) == ["image", "redrawn", "true objects", "found objects", "joined", "its partition", *slots]
    assert list(without) == ["image", "redrawn", "found objects", "joined", "its partition", *slots]
    assert np.array_equal(with_truth["true objects"], blend(pictures.image[0], PALETTE[pictures.truth[0]]))
    page = np.asarray(sheet(pictures))
    assert page.shape == (2 * SIDE + 2, 9 * SIDE + 8 * 2, 3)
    assert np.array_equal(page[:SIDE, :SIDE], pictures.image[0])
    assert np.array_equal(page[-SIDE:, :SIDE], pictures.image[1])
    assert (page[SIDE : SIDE + 2] == 205).all()


def test_table_holds_the_numbers():
    results = {"plain:2-5": means(20), "somewhere": means(50)}
    lines = table_text(results, paper_rows(results)).splitlines()
    assert lines[0].split()[:3] == ["data", "ARI-FG", "ARI"]
    assert len({len(line) for line in lines}) == 1, "columns line up"
    assert [line.split("masks")[1].split() for line in lines[1:5]] == [
        ["20.0", "21.0", "22.0", "23.0", "24.0", "30.5"],
        ["25.0", "26.0", "27.0", "28.0", "29.0"],
        ["50.0", "51.0", "52.0", "53.0", "54.0", "60.5"],
        ["55.0", "56.0", "57.0", "58.0", "59.0"],
    ]
    assert lines[1].startswith("plain:2-5 (7 images)") and lines[3].startswith("somewhere (7 images)")
    assert len(lines) == 7 and all(line.startswith("published, CLEVR ") for line in lines[5:])
    assert lines[6].split()[-3:] == ["95.4", "49.0", "14.0"]


def test_what_was_cut_short_is_left_out(run):
    assert [line["step"] for line in read_lines(run / "metrics.jsonl")] == [20, 40, 60]
    assert read_lines(run / "nowhere") == []


def test_evaluation_page(tmp_path, pictures, run):
    path = tmp_path / "report.html"
    results = {"plain": means(20), NASTY: means(50)}
    shown = {"plain": pictures, NASTY: pictures}
    write_evaluation(path, {"weights": NASTY, "model": {"size": NASTY}, "results": results}, shown, run)
    page = Page(path)
    assert_needs_nothing_else(page, path)
    for tag in ("section", "div", "table", "figure", "pre"):
        assert tag in page.tags
    assert len(page.curves) == 2
    assert page.text.count(NASTY) >= 5, "title, heading, facts, table, weights: as text"
    assert f"What it sees in {NASTY}" in page.text
    for number in ("20.0", "30.5", "59.0", "49.0", "95.4", "published, CLEVR"):
        assert number in page.text
    expected = [p for _ in shown for i in range(2) for p in pictures.columns(i).values()]
    assert len(page.pictures) == len(expected) + 6, "six of the run's pictures, the first and the last among them"
    assert all(np.array_equal(a, b) for a, b in zip(page.pictures, expected, strict=False))
    assert page.pictures[len(expected)].max() == 0 and page.pictures[-1].min() == 8
    assert "step 0" in page.text and "step 800" in page.text


def test_evaluation_page_without_a_run(tmp_path, pictures):
    path = tmp_path / "report.html"
    write_evaluation(
        path, {"weights": "w", "model": {"size": 64}, "results": {"plain": means(20)}}, {"plain": pictures}, None
    )
    page = Page(path)
    assert_needs_nothing_else(page, path)
    assert not page.curves


def test_training_page(tmp_path, pictures, run):
    path = tmp_path / "report.html"
    write_training(path, f"tiny on {NASTY}", run, {"steps": "60", NASTY: NASTY}, {"plain": means(20)}, pictures, NASTY)
    page = Page(path)
    assert_needs_nothing_else(page, path)
    assert len(page.curves) == 2 and len(page.pictures) == 9 + 8 + 6
    assert page.text.count(NASTY) >= 4
    assert f'{{"data": {json.dumps("</pre>" + NASTY)}}}' in page.text, "the configuration, as it was written"


@pytest.mark.parametrize("content", ["", '{"step": 20', '{"step": 20, "loss": 0.1}\n'])
def test_training_page_of_a_young_run(tmp_path, pictures, content):
    run, path = tmp_path / "run", tmp_path / "report.html"
    run.mkdir()
    (run / "metrics.jsonl").write_text(content)
    write_training(path, "tiny", run, {}, {}, pictures, "cpu")
    assert_needs_nothing_else(Page(path), path)


# ------------------------------------------------------------------------------------------- for all eyes and all hands


@pytest.fixture(params=["training", "evaluation", "films"])
def page(request, tmp_path, pictures, run):
    path, results = tmp_path / "report.html", {"plain": means(20)}
    record = {"weights": "w", "model": {}, "results": results}
    if request.param == "training":
        write_training(path, "tiny", run, {"steps": "60"}, results, pictures, "cpu")
    else:
        shown = pictures if request.param == "evaluation" else FilmPictures([pictures, pictures], pictures)
        write_evaluation(path, record, {"plain": shown}, run)
    return Page(path)


def test_a_page_says_what_it_is(page):
    assert page.all("html") == [{"lang": "en"}] and page.tags.count("title") == 1 and page.tags.count("main") == 1
    assert {"name": "viewport", "content": "width=device-width, initial-scale=1"} in page.all("meta")


def test_headings_are_in_order(page):
    levels = [int(tag[1]) for tag in page.tags if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1 and set(levels[1:]) == {2}


def test_every_picture_is_described(page):
    assert all(attrs["alt"].strip() for attrs in page.all("img"))
    assert len({attrs["aria-label"] for attrs in page.all("div") if attrs.get("role") == "group"}) == 2, "by image"


def test_curves_are_described_by_where_they_end(page):
    error, scores = (attrs["alt"] for attrs in page.all("img") if "svg" in attrs["src"][:20])
    assert error.endswith(": 0.04 at step 60")
    assert scores.endswith(": ARI-FG 50.0, ARI 25.0, mIoU 12.5 at step 40")


def test_everything_is_reached_with_the_keyboard(page):
    """What acts is of the browser's own kind; what scrolls can be scrolled with the keys, and has a name."""
    for tag, attrs in zip(page.tags, page.attributes, strict=True):
        assert not any(name.startswith("on") for name in attrs) and attrs.get("role") not in ("button", "slider")
        scrolls = attrs.get("class") == "scroll"
        assert attrs.get("tabindex") == ("0" if scrolls else None), tag
        assert not scrolls or (attrs["role"] == "region" and attrs["aria-label"])
    assert all(attrs["aria-label"] for attrs in page.all("button", "input"))
    assert re.search(r":focus-visible \{ outline: [2-9]px solid var\(--ink\)", STYLE) and "outline: none" not in STYLE


@pytest.mark.parametrize(
    "name, more, said",
    [
        ("plain", {}, "Per cent, but for MSE. Published rows are"),
        ("moving", {"switches": 1.0}, "Per cent, but for MSE and switches. Published rows are"),
        ("somewhere", {}, "Per cent, but for MSE.</p>"),
    ],
)
def test_the_note_says_what_is_in_the_table(name, more, said):
    assert said in scores_section({name: means(20) | more})


def test_tables_scroll_in_a_box_of_their_own(page):
    inside = [page.attributes[i - 1].get("class") for i, tag in enumerate(page.tags) if tag == "table"]
    assert inside == ["scroll"] and ".scroll { overflow-x: auto; }" in STYLE
    assert {attrs["scope"] for attrs in page.all("th")} == {"col", "row"}
    assert "overflow-wrap: anywhere" in STYLE, "names that are long do not widen the page"


def luminance(colour):
    digits = colour[1:] if len(colour) == 7 else "".join(2 * c for c in colour[1:])
    x = np.array(list(bytes.fromhex(digits))) / 255
    return np.where(x <= 0.04045, x / 12.92, ((x + 0.055) / 1.055) ** 2.4) @ [0.2126, 0.7152, 0.0722]


def test_text_stands_out_by_day_and_by_night():
    """WCAG's contrast of at least 4.5 to 1, for all colours that text and what is behind it can have."""
    assert set(re.findall(r"[ {]color: ([^;]*);", STYLE)) == {"var(--ink)", "var(--soft)"}
    assert set(re.findall(r"background: ([^;]*);", STYLE)) == {"var(--page)", "var(--card)", "#fff"}  # #fff: of curves
    schemes = [dict(re.findall(r"--(\w+): (#\w+);", scheme)) for scheme in re.findall(r":root \{([^}]*)\}", STYLE)]
    assert len(schemes) == 2
    for scheme in schemes:
        for text in ("ink", "soft"):
            for behind in ("page", "card"):
                low, high = sorted(luminance(scheme[name]) for name in (text, behind))
                assert (high + 0.05) / (low + 0.05) >= 4.5, (text, behind)
