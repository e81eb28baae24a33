"""The functions behind the page, without a browser: what is shown is what `predict` and the cuts say."""

import asyncio
import gc
import io
import json
import os
import re
import socket
import subprocess
import sys
import time
import tracemalloc
import zipfile

import numpy as np
import pytest
import torch
from PIL import Image
from pycocotools import mask as coco_mask

from cutslots import app, exact, predict
from cutslots.app import cutting, objects, page
from cutslots.cut import GridCut
from cutslots.graph import Graph, grid_edges
from cutslots.model import SHIPPED, load
from cutslots.predict import chosen
from cutslots.scenes import Scenes

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # pycocotools

needs_gradio = pytest.mark.usefixtures("gradio")


@pytest.fixture(scope="module")
def source():
    return objects.scene("plain", 1, 4, 64)


@pytest.fixture(scope="module")
def seen(source):
    return objects.find(objects.model_for("tiny"), source)


@pytest.fixture(scope="module")
def film(tmp_path_factory):
    """A GIF of 20 frames: a disc that moves."""
    path = tmp_path_factory.mktemp("films") / "disc.gif"
    frames = []
    for t in range(20):
        frame = Image.new("RGB", (60, 40), "grey")
        frame.paste((200, 30, 30), (2 * t, 10, 2 * t + 14, 24))
        frames.append(frame)
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=80)
    return path


# -------------------------------------------------------------------------------------------------------------- sources


@pytest.mark.parametrize(
    "family, side, expected", [("plain", 64, 192), ("textured", 16, 192), ("ood", 128, 128), ("camo", 256, 256)]
)
def test_scenes_are_drawn_at_a_multiple_of_what_the_model_sees(family, side, expected):
    (frame,) = objects.scene(family, 3, 2, side).frames
    assert frame.size == (expected, expected) and frame.mode == "RGB"


def test_scenes_are_the_ones_asked_for():
    first, again, other = (np.asarray(objects.scene("plain", seed, 3, 64).frames[0]) for seed in (5, 5, 6))
    assert (first == again).all() and (first != other).any()
    wanted = Scenes("plain", "test", 192, seed=5, count=1, objects=(3, 3))[0].image
    assert (first == wanted.permute(1, 2, 0).numpy()).all()
    for wrong, said in (
        (("moving", 0, 3, 64), "family is 'moving'"),
        (("plain", -1, 3, 64), "seed is -1"),
        (("plain", 0, 0, 64), "objects is"),
        (("plain", 0, 99, 64), "objects is"),
    ):
        with pytest.raises(ValueError, match=said):
            objects.scene(*wrong)


def test_pictures_are_opened_and_large_ones_shrunk(tmp_path):
    Image.new("RGB", (300, 200), "red").save(tmp_path / "small.name.png")
    small = objects.opened(tmp_path / "small.name.png")
    assert [frame.size for frame in small.frames] == [(300, 200)] and small.name == "small_name" and not small.note
    Image.new("L", (3000, 1500)).save(tmp_path / "large.jpg")
    large = objects.opened(tmp_path / "large.jpg")
    assert large.frames[0].size == (768, 384) and "from 3000x1500 to 768x384" in large.note
    assert large.frames[0].mode == "RGB"


def test_films_are_opened_up_to_a_number_of_frames(film, tmp_path):
    made = objects.opened(film)
    assert len(made.frames) == objects.MOST_FRAMES and made.frames[0].size == (60, 40)
    still = tmp_path / "still.gif"
    Image.new("RGB", (30, 20)).save(still)
    assert len(objects.opened(still).frames) == 1


@pytest.mark.parametrize(
    "name, content, said",
    [
        ("notes.png", b"these are not pixels", "notes.png cannot be read as a picture"),
        ("empty.jpg", b"", "empty.jpg cannot be read as a picture"),
        ("notes.gif", b"GIF89a but no more", "notes.gif cannot be read"),
        ("notes.txt", b"text", "notes.txt cannot be opened; expected a file that ends with .png"),
        ("film.mp4", b"\0no film", "film.mp4 cannot be"),
    ],
)
def test_what_cannot_be_opened_is_said_in_a_sentence_without_our_folders(tmp_path, name, content, said):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(said)) as raised:
        objects.opened(tmp_path / name)
    assert str(tmp_path) not in str(raised.value) and "\n" not in str(raised.value)


def test_old_uploads_go_away_and_what_was_left_of_them(tmp_path):
    for name in ("old/picture.png", "half/picture.png", "half/new.png", "tmpa", "new/picture.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "empty").mkdir()
    for name in ("old/picture.png", "half/picture.png", "tmpa", "old", "half", "empty"):
        os.utime(tmp_path / name, (1, 1))
    app.tidy(tmp_path, before=1000)  # a folder is as old as its last change: that of `old` is now
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")}
    assert left == {"old", "half", "half/new.png", "new", "new/picture.png"}
    app.tidy(tmp_path, before=time.time() + 1000)
    app.tidy(tmp_path, before=time.time() + 1000)
    assert not list(tmp_path.iterdir())
    app.tidy(tmp_path / "nowhere", before=1000)


# ---------------------------------------------------------------------------------------------------------------- slots


@pytest.mark.parametrize("masks", ["joined", "eager", "decoder"])
def test_the_page_shows_what_predict_finds(source, masks):
    labels, scores, redrawn = predict.find(load("tiny"), source.frames[0], masks)
    found = objects.find(objects.model_for("tiny"), source, masks)
    parts = objects.parts(found)
    assert (parts.labels == labels).all()
    here = np.unique(labels)
    assert np.allclose(parts.scores[here], np.asarray(scores)[here], atol=1e-6)
    assert parts.areas.sum() == pytest.approx(1)
    small = Image.fromarray(objects.redrawn(found)).resize(source.frames[0].size, Image.Resampling.BICUBIC)
    assert (np.asarray(small) == redrawn).all()


def test_merged_slots_are_one_and_can_be_parted(seen):
    first, second, *_ = objects.in_use(seen)
    one = objects.merged(seen, [second, first])
    assert one.to[second] == one.to[first] == first
    before, after = objects.parts(seen).labels, objects.parts(one).labels
    assert (after[np.isin(before, [first, second])] == first).all() and second not in objects.in_use(one)
    drawn = objects.alone(seen, first).astype(int) + objects.alone(seen, second) - 255
    assert abs(objects.alone(one, first).astype(int) - drawn.clip(0)).max() <= 1
    assert objects.parted(one).to == seen.to
    third = next(k for k in range(len(seen.to)) if k not in (first, second))
    assert set(objects.merged(one, [second, third]).to[k] for k in (first, second, third)) == {min(first, third)}


@pytest.mark.parametrize("slots", [[], [1], [1, 1], [0, 99], [-1, 0]])
def test_merging_needs_two_slots_that_there_are(seen, slots):
    with pytest.raises(ValueError, match="at least two slots"):
        objects.merged(seen, slots)


def test_hidden_slots_are_not_coloured_and_not_redrawn(seen):
    parts = objects.parts(seen)
    slot = objects.in_use(seen)[1]
    inside, image = parts.labels == slot, np.asarray(seen.source.frames[0])
    shown, hidden = objects.overlay(seen, parts), objects.overlay(seen._replace(hidden=[slot]), parts)
    assert (hidden[inside] == image[inside]).all() and (shown[inside] != hidden[inside]).any()
    assert (shown[~inside] == hidden[~inside]).all()
    for everything in (range(len(seen.to)), range(-1, 999)):
        assert (objects.redrawn(seen._replace(hidden=everything)) == 255).all()


def test_borders_are_where_the_pixel_above_or_to_the_left_is_another():
    labels = np.array([[7, 7, 7, 7], [7, 9, 9, 7], [7, 9, 3, 7]], dtype=np.uint8)
    assert (objects.border(labels) == [[0, 0, 0, 0], [0, 1, 1, 1], [0, 1, 1, 1]]).all()


def test_a_click_picks_the_slot_under_it(seen):
    parts = objects.parts(seen)
    for k, (x, y) in objects.middles(parts.labels).items():
        height, width = parts.labels.shape
        assert objects.slot_at(parts, int(x * width), int(y * height)) == k  # where its number is written
    assert objects.slot_at(parts, -5, 10_000) == parts.labels[-1, 0]


def test_films_are_followed_and_only_images_are_joined(film):
    made, model = objects.opened(film), objects.model_for("tiny")
    found = objects.find(model, made, "joined", frames=3)
    assert len(found.masks) == len(found.pictures) == len(found.reconstruction) == 3
    assert torch.equal(found.masks, objects.find(model, made, "decoder", frames=3).masks)
    assert len(objects.find(model, made, frames=1000).masks) == objects.MOST_FRAMES
    assert len(objects.find(model, made, frames=1000, seconds=0).masks) == 1


def test_the_download_is_what_predict_writes(source, seen, tmp_path):
    source.frames[0].save(tmp_path / f"{source.name}.png")
    predict.predict("tiny", tmp_path / f"{source.name}.png", tmp_path / "out", device="cpu")
    with zipfile.ZipFile(io.BytesIO(objects.archive(seen))) as out:
        assert out.testzip() is None
        written = {p.name for p in (tmp_path / "out" / source.name).glob("*.png")} - {
            "overlay.png",
            "reconstruction.png",
        }
        assert set(out.namelist()) == {"masks.json"} | {f"{source.name}/{name}" for name in written}
        for name in written:
            mine = np.asarray(Image.open(io.BytesIO(out.read(f"{source.name}/{name}"))))
            assert (mine == np.asarray(Image.open(tmp_path / "out" / source.name / name))).all()
        assert json.loads(out.read("masks.json")) == json.loads((tmp_path / "out" / "masks.json").read_text())


def test_the_download_leaves_hidden_slots_out(seen):
    slot, kept = objects.in_use(seen)[:2]
    with zipfile.ZipFile(io.BytesIO(objects.archive(seen._replace(hidden=[slot])))) as out:
        labels = np.asarray(Image.open(io.BytesIO(out.read(f"{seen.source.name}/labels.png"))))
        parts = objects.parts(seen)
        assert ((labels == 0) == (parts.labels == slot)).all()
        assert f"{seen.source.name}/slot_{slot + 1:02d}.png" not in out.namelist()
        record = json.loads(out.read("masks.json"))
    by_slot = {each["slot"]: each for each in record["annotations"]}
    assert slot + 1 not in by_slot
    assert (coco_mask.decode(by_slot[kept + 1]["segmentation"]).astype(bool) == (labels == kept + 1)).all()


def test_the_download_of_a_film_has_every_frame(film):
    found = objects.find(objects.model_for("tiny"), objects.opened(film), frames=3)
    with zipfile.ZipFile(io.BytesIO(objects.archive(found))) as out:
        record = json.loads(out.read("masks.json"))
        assert [each["file_name"] for each in record["images"]] == [f"disc_{t:03d}.png" for t in range(3)]
        assert all(f"disc_{t:03d}/labels.png" in out.namelist() for t in range(3))


# --------------------------------------------------------------------------------------------------------------- models


def test_shipped_models_and_those_asked_for_can_be_chosen():
    assert objects.model_names(["runs/a", "tiny"])[:2] == ["runs/a", "tiny"]
    assert set(objects.model_names()) == {p.name for p in SHIPPED.iterdir() if p.is_dir()}
    with pytest.raises(ValueError, match="there is no"):
        objects.model_for("/nowhere/at/all")


def test_few_models_are_kept_and_changed_ones_loaded_again(tmp_path):
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
        for file in (SHIPPED / "tiny").iterdir():
            (tmp_path / name / file.name).write_bytes(file.read_bytes())
        objects.model_for(f" {tmp_path / name} ")
    assert objects._loaded.cache_info().currsize == objects.MODELS
    before = objects.model_for(str(tmp_path / "c"))
    assert objects.model_for(str(tmp_path / "c" / "model.safetensors")) is before
    os.utime(tmp_path / "c" / "model.safetensors", (1, 1))
    assert objects.model_for(str(tmp_path / "c")) is not before


# ----------------------------------------------------------------------------------------------------------------- cuts


@pytest.fixture(scope="module")
def small():
    """A picture of two greys, 6 by 8, and a mark on each."""
    image = np.full((6, 8, 3), 60, dtype=np.uint8)
    image[:, 4:] = 200
    marks = np.zeros((6, 8), dtype=np.uint8)
    marks[2, 1], marks[3, 6] = cutting.SOURCE, cutting.SINK
    return image, marks


def test_both_cuts_are_those_of_the_weights(small):
    cut = cutting.cuts(*small, gamma=0.4, temperature=0.5, reach=1.5, tie=0.3)
    w = cutting.edge_weights(*small, tie=0.3)
    edges = w[torch.from_numpy(grid_edges((6, 8)))].numpy()
    best = exact.min_cut_lp(Graph.grid((6, 8)), edges)
    assert cut.value == pytest.approx(best.value, rel=1e-5)
    assert (cut.side == best.side[:-2].reshape(6, 8)).all()
    solved = GridCut((6, 8), 0.4, 1.5, anchor=1.0).solve(w)
    assert np.allclose(cut.p, solved.p.numpy(), atol=1e-6)
    assert np.allclose(cut.soft, torch.stack([solved.p, -solved.p]).div(0.5).softmax(0)[0].numpy(), atol=1e-6)
    left = np.zeros((6, 8), dtype=bool)
    left[:, :4] = True
    assert (cut.side == left).all() and ((cut.p > 0) == left).all()


def test_the_edge_variables_are_the_largest_of_edges_that_there_are(small):
    cut = cutting.cuts(*small, gamma=0.5, temperature=0.5, reach=1.0, tie=0.2)
    d = GridCut((6, 8), 0.5, 1.0, anchor=1.0).solve(cutting.edge_weights(*small, tie=0.2)).d.numpy()
    assert cut.d[0, 0] == pytest.approx(max(d[0, 0, 0], d[2, 0, 0]))  # a corner has an edge right and one down
    assert cut.d[2, 3] == pytest.approx(d[:4, 2, 3].max())


def test_gamma_scales_p_and_temperature_leaves_it(small):
    first = cutting.cuts(*small, gamma=0.5, temperature=0.5, reach=2, tie=0.5)
    halved = cutting.cuts(*small, gamma=0.25, temperature=0.5, reach=2, tie=0.5)
    colder = cutting.cuts(*small, gamma=0.5, temperature=0.1, reach=2, tie=0.5)
    assert np.allclose(halved.p, 2 * first.p, atol=1e-6) and (halved.side == first.side).all()
    assert (colder.p == first.p).all() and abs(colder.soft - 0.5).min() > abs(first.soft - 0.5).min()
    assert cutting.heat(halved.p) != cutting.heat(first.p)


def test_equal_weights_both_ways_leave_p(small):
    loose, tight = (cutting.cuts(*small, gamma=0.5, temperature=0.5, reach=2, tie=tie) for tie in (0, 2))
    assert np.allclose(loose.p, tight.p, atol=1e-5) and (loose.d != tight.d).any()


@pytest.mark.parametrize("name", ["gamma", "temperature", "reach", "tie"])
@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_bad_numbers_are_named(small, name, value):
    numbers = {"gamma": 0.5, "temperature": 0.5, "reach": 2.0, "tie": 0.5} | {name: value}
    with pytest.raises(ValueError, match=f"{name} is"):
        cutting.cuts(*small, **numbers)


@pytest.mark.parametrize("shape", [(1, 1), (1, 5), (5, 1)])
def test_thin_pictures_are_cut(shape):
    marks = np.zeros(shape, dtype=np.uint8)
    marks.flat[0], marks.flat[-1] = cutting.SOURCE, cutting.SINK
    image = np.zeros((*shape, 3), dtype=np.uint8)
    marks = np.where(np.arange(marks.size).reshape(shape) == 0, cutting.SOURCE, marks).astype(np.uint8)
    shown = cutting.cuts_html(image, marks, 0.5, 0.5, 2, 0.5)
    assert "hint" in shown if marks.size == 1 else "exact minimum cut" in shown


def test_the_example_is_cut_well():
    image, marks = cutting.example()
    truth = Scenes("textured", "test", cutting.GRID, seed=35, count=1, objects=(4, 4))[0].mask.numpy()
    largest = truth == np.bincount(truth[truth > 0]).argmax()
    assert largest[marks == cutting.SOURCE].all() and not largest[marks == cutting.SINK].any()
    cut = cutting.cuts(image, marks, 0.5, 0.5, 2, 0.5)
    for side in (cut.side, cut.p > 0):
        assert (side & largest).sum() / (side | largest).sum() > 0.9


def test_colours_that_were_marked_are_likely():
    image = np.zeros((4, 4, 3))
    image[0] = 1.0
    marked = np.zeros((4, 4), dtype=bool)
    marked[0, 0] = True
    unlike = cutting.unlikelihood(image, marked)
    assert np.allclose(unlike[0], 0, atol=1e-6) and np.allclose(unlike[1:], 1, atol=1e-6)


def test_the_board_is_read_as_it_was_written():
    image, marks = cutting.example()
    board = cutting.board(image, marks)
    assert (board["height"], board["width"]) == marks.shape and board["image"].startswith("data:image/png")
    for mine, theirs in zip(cutting.read_board(board), (image, marks), strict=True):
        assert (mine == theirs).all()


def test_boards_that_no_page_sends_are_refused():
    image = np.zeros((2, 3, 3), dtype=np.uint8)
    board = cutting.board(image, np.array([[0, 1, 2], [2, 1, 0]]))
    assert (cutting.read_board(board)[1] == [[0, 1, 2], [2, 1, 0]]).all()
    for wrong in ("0122", "0123450", "01221x", "", ["0"] * 6):
        with pytest.raises(ValueError, match="do not fit the picture"):
            cutting.read_board(board | {"marks": wrong})
    large = objects.picture_url(np.zeros((cutting.GRID + 1, 1, 3), dtype=np.uint8))
    for wrong in (large, "data:image/png;base64,AAAA", "nothing"):
        with pytest.raises((ValueError, OSError)):
            cutting.read_board(board | {"image": wrong, "marks": "0" * (cutting.GRID + 1)})


# ----------------------------------------------------------------------------------------------------------------- page


def test_every_picture_has_words_and_every_slot_its_number(seen):
    slots = objects.in_use(seen)
    shown = objects.found_html(seen._replace(hidden=[slots[0]], picked=slots[1]))
    shown += cutting.cuts_html(*cutting.example(), 0.5, 0.5, 2, 0.5)
    pictures = re.findall(r"<img [^>]*>", shown)
    assert pictures and all(re.search(r'alt="[^"]{5,}"', each) for each in pictures)
    assert all(re.search(r'src="data:image/', each) for each in pictures)
    numbers = re.findall(r'<span style="left:[^>]*>(\d+)<', shown)
    assert set(numbers) == {str(k + 1) for k in slots[1:]}  # for readers who cannot tell the colours apart
    assert shown.count('aria-pressed="true"') == 1 and "hidden" in shown
    assert f"Slot {slots[1] + 1}: " in shown


def test_names_are_escaped(seen):
    named = seen._replace(source=seen.source._replace(name="<script>alert(1)</script>"))
    assert "<script>" not in objects.found_html(named)


def test_scribbles_are_asked_for():
    image, marks = cutting.example()
    assert "object and on the background" in cutting.cuts_html(image, np.zeros_like(marks), 0.5, 0.5, 2, 0.5)
    assert "Scribble on the background" in cutting.cuts_html(image, np.where(marks == 1, 1, 0), 0.5, 0.5, 2, 0.5)


def test_ports_and_hosts():
    assert app.free_port("127.0.0.1", 0) > 0
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ValueError, match="choose another --host or --port"):
            app.free_port("127.0.0.1", taken.getsockname()[1])
    for host, expected in (("127.0.0.1", True), ("localhost", True), ("::1", True), ("0.0.0.0", False), ("box", False)):
        assert app.is_loopback(host) is expected
    with pytest.raises(ValueError, match="port is 99999"):
        app.free_port("127.0.0.1", 99_999)
    with pytest.raises(ValueError, match="cannot be listened on"):
        app.free_port("192.0.2.1", 0)  # nobody's


def asked(inner, path="/"):
    """The messages that a browser gets through the middleware."""
    sent = []

    async def send(message):
        sent.append(message)

    asyncio.run(app.Alone(inner)({"type": "http", "path": path}, None, send))
    return sent


def test_nobody_else_is_named_or_asked():
    page = b'<html><meta property="og:image" content="https://raw.githubusercontent.com/x.jpg"/><p>stays</p>'
    page += b'<script>x = "https://github.com/a/b.pdf"</script>'

    async def inner(scope, receive, send):
        headers = [(b"content-type", b"text/html"), (b"Content-Length", str(len(page)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": page})

    start, body = asked(inner)
    assert body["body"].replace(b" ", b"") == b'<html><p>stays</p><script>x=""</script>'
    headers = {name.lower(): value for name, value in start["headers"]}
    assert headers[b"content-length"] == str(len(body["body"])).encode() and len(start["headers"]) == len(headers)
    assert b"http" not in headers[b"content-security-policy"] and b"'self'" in headers[b"content-security-policy"]
    start, body = asked(inner, "/assets/index.js")
    assert (
        body["body"] == page and (b"content-security-policy", headers[b"content-security-policy"]) in start["headers"]
    )


@needs_gradio
def test_the_page_is_private():
    made = page.build(["tiny"], own_paths=False)
    config = made.get_config_file()
    assert not made.analytics_enabled
    assert all(each["api_visibility"] == "private" for each in config["dependencies"])
    chooser = next(each for each in config["components"] if each["props"].get("label") == "Model")
    assert chooser["props"]["allow_custom_value"] is False
    chooser = next(
        each for each in page.build(["tiny"]).get_config_file()["components"] if each["props"].get("label") == "Model"
    )
    assert chooser["props"]["allow_custom_value"] is True
    text = re.sub(r"data:image/[^\"]*", "", json.dumps(config, default=str))
    assert "googleapis" not in text and "cdn" not in text


@needs_gradio
@pytest.mark.parametrize("films, kinds", [((".mp4",), "picture, GIF or film"), ((), "picture or GIF")])
def test_what_may_be_uploaded_is_said(monkeypatch, films, kinds):
    monkeypatch.setattr(objects, "FILMS", films)
    labels = [each["props"].get("label") for each in page.build(["tiny"]).get_config_file()["components"]]
    assert f"Or your {kinds}, up to 20MB" in labels


@needs_gradio
def test_visitors_from_elsewhere_may_name_no_files(tmp_path):
    """The page offers them none; who asks without it is refused here."""
    made = page.build(["tiny"], own_paths=False)
    draw, again = (next(each.fn for each in made.fns.values() if each.name == name) for name in ("draw", "again"))
    for path in (str(SHIPPED / "tiny"), str(tmp_path), "", None):
        with pytest.warns(UserWarning, match="model is .*; expected one of tiny"):
            draw(path, "plain", 0, 3, "joined")
    with pytest.warns(UserWarning, match="model is .*; expected one of tiny"):
        again(None, str(SHIPPED / "tiny"), "joined", 1)


@needs_gradio
def test_what_is_wrong_is_shown_in_the_page_which_stays_as_it_is():
    gr = page.gradio()

    def work(value):
        raise ValueError(f"value is {value};\nexpected <b>")

    with pytest.warns(UserWarning, match=r"value is 3;\\nexpected &lt;b&gt;"):  # which it is where there is no page
        assert page.told(work)(3) == gr.skip()
    with pytest.raises(ValueError, match="idle for too long"):
        page.kept(None)


@needs_gradio
def test_the_first_model_is_tried_before_the_page_is_made():
    with pytest.raises(ValueError, match="there is no"):
        page.build(["/no/such/weights"])


def test_requests_leave_nothing_behind(source):
    """In memory that Python knows of."""
    model = objects.model_for("tiny")
    image, marks = cutting.example()

    def request():
        found = objects.find(model, source)
        objects.found_html(found._replace(picked=0)), objects.archive(found)
        cutting.cuts_html(image, marks, 0.5, 0.5, 2, 0.5)

    for _ in range(3):
        request()
    tracemalloc.start()
    request()
    gc.collect()
    before = tracemalloc.get_traced_memory()[0]
    for _ in range(10):
        request()
    gc.collect()
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert grown < 200_000


# -------------------------------------------------------------------------------------------------------------- command


def run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


def test_help_imports_neither_torch_nor_gradio():
    done = run("""
import sys, cutslots.cli
sys.argv = ["cutslots", "app", "--help"]
try:
    cutslots.cli.main()
finally:
    assert not {"torch", "gradio"} & set(sys.modules)
""")
    assert done.returncode == 0 and "--port" in done.stdout, done.stderr


def test_without_gradio_one_sentence_says_what_to_do():
    done = run("""
import sys, cutslots.cli
sys.modules["gradio"] = None
sys.argv = ["cutslots", "app", "--port", "0"]
cutslots.cli.main()
""")
    assert done.returncode == 1
    assert done.stderr.strip() == "cutslots: the app needs Gradio 6.31 or later: pip install 'cutslots[app]'"


@needs_gradio
def test_old_gradio_will_not_do(monkeypatch):
    monkeypatch.setattr(page.gradio(), "__version__", "6.4.0")
    with pytest.raises(ValueError, match=r"Gradio 6\.31 or later"):
        page.gradio()


def test_devices_that_cannot_be_used_are_named():
    with pytest.raises(ValueError, match="device is 'cuda:99', which cannot be used here"):
        chosen("cuda:99")
