"""The page end to end: the real server, in headless Chromium.

Skipped where there is no Gradio, Playwright or Chromium, unless CUTSLOTS_REQUIRE_BROWSER=1 says that there have to be.
"""

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from cutslots.app import SESSIONS
from cutslots.app.cutting import example
from tests.conftest import need

try:
    from playwright.sync_api import expect, sync_playwright
except ImportError:
    sync_playwright = None

# The command itself, in a process that writes down whoever it tries to reach besides this machine.
WATCHED = """
import socket, sys
from pathlib import Path

def watch(name):
    inner = getattr(socket.socket, name)
    def outer(self, address):
        if self.family in (socket.AF_INET, socket.AF_INET6) and address[0] not in ("127.0.0.1", "::1", "localhost"):
            with Path(LOG).open("a") as file:
                print(address, file=file)
        return inner(self, address)
    setattr(socket.socket, name, outer)

watch("connect"), watch("connect_ex")
from cutslots.cli import main
sys.argv = ["cutslots", "app", "--port", "0"]
main()
"""


def chromium(play):
    """Where Chromium is: the system's, or Playwright's own."""
    names = ("chromium", "chromium-browser", "google-chrome", play.chromium.executable_path)
    path = next(filter(None, map(shutil.which, names)), None)
    need(path, "there is no Chromium: apt-get install chromium, or python -m playwright install chromium")
    return path


@pytest.fixture(scope="module")
def browser(gradio):
    need(sync_playwright, "there is no Playwright: pip install playwright")
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=chromium(play), args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def server(browser, tmp_path_factory):
    """The address of the app. At its end it has written nothing that is left, and has reached nobody."""
    folder = tmp_path_factory.mktemp("server")
    places = {name: folder / name.lower() for name in ("HOME", "TMPDIR", "CWD")}
    for place in places.values():
        place.mkdir()
    env = {name: value for name, value in os.environ.items() if not name.startswith(("GRADIO", "XDG", "MPL"))}
    env |= {"HOME": str(places["HOME"]), "TMPDIR": str(places["TMPDIR"]), "OMP_NUM_THREADS": "2"}
    env |= {"PYTHONPATH": os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH", "")]))}
    command = [sys.executable, "-c", WATCHED.replace("LOG", repr(str(folder / "reached.txt")))]
    errors = (folder / "errors.txt").open("w")
    process = subprocess.Popen(command, cwd=places["CWD"], env=env, stdout=subprocess.PIPE, stderr=errors, text=True)
    try:
        line = process.stdout.readline()
        found = re.search(r"http://127\.0\.0\.1:\d+", line)
        assert found, line + (folder / "errors.txt").read_text()
        yield found[0]
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        errors.close()
    told = (folder / "errors.txt").read_text()
    assert "Traceback" not in told, told
    assert not (folder / "reached.txt").exists(), (folder / "reached.txt").read_text()
    left = [str(p.relative_to(folder)) for place in places.values() for p in place.rglob("*")]
    assert not left


@pytest.fixture
def page(browser, server):
    """The page, with a scene in it. Nothing is asked of other hosts, and no script fails."""
    context = browser.new_context(viewport={"width": 1200, "height": 900}, accept_downloads=True)
    context.set_default_timeout(20_000)
    page, asked, failed = context.new_page(), [], []
    page.on("request", lambda request: asked.append(request.url))
    page.on("websocket", lambda socket: asked.append(socket.url))
    page.on("pageerror", lambda error: failed.append(str(error)))
    page.goto(server)
    expect(page.locator("#found .slot").first).to_be_visible(timeout=20_000)
    yield page
    context.close()
    foreign = [url for url in asked if not url.startswith((f"{server}/", "data:", "blob:"))]
    assert not foreign and not failed


def sources(page, selector):
    """What the pictures there show."""
    return page.eval_on_selector_all(selector, "found => found.map(each => each.src)")


def changed(page, selector, before):
    """Waits until the pictures there are others."""
    test = "([s, b]) => JSON.stringify([...document.querySelectorAll(s)].map(x => x.src)) !== JSON.stringify(b)"
    page.wait_for_function(test, arg=[selector, before])


def chosen(page, path):
    """Opens a file in the second tab."""
    with page.expect_file_chooser() as chooser:
        page.get_by_role("button", name="Open").click()
    chooser.value.set_files(path)


def test_objects_are_drawn_picked_hidden_merged_and_saved(page, tmp_path):
    before, start = sources(page, "#found .big img"), time.perf_counter()
    page.get_by_role("button", name="Draw another scene").click()
    changed(page, "#found .big img", before)
    print(f"a scene drawn and shown: {time.perf_counter() - start:.2f} s")
    numbers = [int(text) for text in page.locator("#found .big span").all_inner_texts()]
    assert len(numbers) >= 3 and page.locator("#found .slot").count() == len(numbers)

    picture = page.locator("#found .big img")
    box, place = picture.bounding_box(), page.locator("#found .big span").nth(1).bounding_box()
    middle = {"x": place["x"] + place["width"] / 2 - box["x"], "y": place["y"] + place["height"] / 2 - box["y"]}
    picture.click(position=middle)  # where the number of an object is written
    expect(page.locator("#picked .said")).to_contain_text(f"Slot {numbers[1]}:")
    expect(page.locator("#found .slot[aria-pressed=true]")).to_have_attribute("data-slot", str(numbers[1] - 1))
    assert page.locator("#picked img").count() == 2

    page.locator(f"#found .slot[data-slot='{numbers[2] - 1}']").focus()
    page.keyboard.press("Enter")
    expect(page.locator("#picked .said")).to_contain_text(f"Slot {numbers[2]}:")

    before = sources(page, "#found .pictures img")
    page.locator("#hide").get_by_label(f"Slot {numbers[1]}", exact=True).check()
    changed(page, "#found .pictures img", before)
    expect(page.locator("#found .big span")).to_have_count(len(numbers) - 1)

    with page.expect_download() as download:
        page.get_by_role("button", name="Download masks").click()
    download.value.save_as(tmp_path / "masks.zip")
    assert download.value.suggested_filename == "masks.zip"
    with zipfile.ZipFile(tmp_path / "masks.zip") as out:
        assert out.testzip() is None
        record = json.loads(out.read("masks.json"))
        name = Path(record["images"][0]["file_name"]).stem
        labels = np.asarray(Image.open(io.BytesIO(out.read(f"{name}/labels.png"))))
        shown = sorted(set(numbers) - {numbers[1]})
        assert sorted(set(np.unique(labels)) - {0}) == shown == [each["slot"] for each in record["annotations"]]
        for k in shown:
            mask = np.asarray(Image.open(io.BytesIO(out.read(f"{name}/slot_{k:02d}.png"))))
            assert (mask.astype(bool) == (labels == k)).all()

    for slot in numbers[:2]:
        page.locator("#merge").get_by_label(f"Slot {slot}", exact=True).check()
    page.get_by_role("button", name="Merge ticked slots").click()
    expect(page.locator("#found .status")).to_contain_text("Merged:")
    expect(page.locator("#found .slot")).to_have_count(len(numbers) - 1)
    page.get_by_role("button", name="Undo merging").click()
    expect(page.locator("#found .slot")).to_have_count(len(numbers))
    page.get_by_role("button", name="Merge ticked slots").click()
    expect(page.get_by_text("expected at least two slots to merge")).to_be_visible()


def test_pictures_and_films_are_opened_and_others_refused_in_a_sentence(page, tmp_path):
    (tmp_path / "notes.png").write_text("these are not pixels")
    page.locator("#upload input[type=file]").set_input_files(tmp_path / "notes.png")
    expect(page.get_by_text("notes.png cannot be read as a picture")).to_be_visible()
    assert "Traceback" not in page.content() and page.locator("#found .slot").count()

    frames = [Image.new("RGB", (48, 48), "grey") for _ in range(4)]
    for t, frame in enumerate(frames):
        frame.paste((200, 30, 30), (4 + 6 * t, 16, 18 + 6 * t, 30))
    frames[0].save(tmp_path / "film.gif", save_all=True, append_images=frames[1:], duration=80)
    page.locator("#upload input[type=file]").set_input_files(tmp_path / "film.gif")
    expect(page.locator("#found .status")).to_contain_text("film: ")
    expect(page.locator("#found .status")).to_contain_text("4 frames")
    before = sources(page, "#found .big img")
    page.locator("#frame input[type=range]").press("ArrowRight")
    changed(page, "#found .big img", before)
    page.locator("#frames input[type=range]").press("ArrowLeft")
    expect(page.locator("#found .status")).to_contain_text("3 frames")


def test_a_picture_is_cut_by_scribbles(page, tmp_path):
    page.get_by_role("tab", name="The cut").click()
    expect(page.locator("#cuts img")).to_have_count(5)
    before, start = sources(page, "#cuts img"), time.perf_counter()
    gamma = page.get_by_role("slider", name=re.compile("gamma"))
    gamma.press("ArrowRight")
    changed(page, "#cuts img", before)
    print(f"gamma moved and cuts shown: {time.perf_counter() - start:.2f} s")
    after = sources(page, "#cuts img")
    assert after[0] != before[0] and after[4] == before[4]  # it scales p; the exact cut has no gamma

    canvas = page.locator("#board canvas")
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    page.mouse.move(box["x"] + 0.72 * box["width"], box["y"] + 0.5 * box["height"])
    page.mouse.down()
    page.mouse.move(box["x"] + 0.62 * box["width"], box["y"] + 0.55 * box["height"], steps=4)
    page.mouse.up()
    changed(page, "#cuts img", after)

    before = sources(page, "#cuts img")
    page.get_by_role("tab", name="Objects").click()
    page.get_by_role("tab", name="The cut").click()
    page.locator("#brush").get_by_label("background").check()
    canvas.focus()
    for key in ("ArrowDown", "ArrowDown", "Space"):
        page.keyboard.press(key)
    changed(page, "#cuts img", before)

    page.get_by_role("button", name="Clear").click()
    expect(page.locator("#cuts .hint")).to_contain_text("Scribble on the object and on the background")
    page.get_by_role("button", name="Example").click()
    expect(page.locator("#cuts img")).to_have_count(5)

    Image.new("RGB", (120, 60), "teal").save(tmp_path / "wide.png")
    chosen(page, tmp_path / "wide.png")
    expect(canvas).to_have_attribute("height", "48")
    (tmp_path / "notes.png").write_text("these are not pixels")
    chosen(page, tmp_path / "notes.png")
    expect(page.get_by_text("notes.png cannot be read as a picture")).to_be_visible()


def holds(page, count):
    """Waits until so many pixels of the canvas hold a mark."""
    test = """count => { const canvas = document.querySelector('#board canvas');
        const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
        return data.filter((value, i) => i % 4 === 3 && value).length === count; }"""
    page.wait_for_function(test, arg=int(count))


@pytest.mark.parametrize("button", ["Example", "Clear"])
def test_what_was_scribbled_goes_away_each_time(page, button):
    page.get_by_role("tab", name="The cut").click()
    at_first = np.count_nonzero(example()[1])
    after = at_first if button == "Example" else 0
    for before in (at_first, after):
        page.locator("#board canvas").focus()
        page.keyboard.press("Space")
        page.keyboard.press("Tab")
        holds(page, before + 9)  # in the middle, where the example has no mark
        page.get_by_role("button", name=button).click()
        holds(page, after)


def test_numbers_that_will_not_do_are_said_in_a_sentence(page):
    number = lambda name: page.get_by_role("spinbutton", name=name)
    number("Seed").fill("-5")
    expect(page.get_by_text("seed is -5; expected")).to_be_visible()
    number("Seed").fill("0")
    for value, said in (("99", "objects is (99, 99)"), ("", "objects is (0, 0)")):
        number("Objects").fill(value)
        expect(page.get_by_text(said)).to_be_visible()
    page.get_by_role("tab", name="The cut").click()
    for value, said in (("99", "gamma is 99"), ("", "gamma is None")):
        number("gamma").fill(value)
        expect(page.get_by_text(said)).to_be_visible()
    assert not page.get_by_text("Error", exact=True).count()


def visit(server, session):
    """A scene is drawn for somebody else."""
    config = json.load(urllib.request.urlopen(f"{server}/config"))
    draw = next(each for each in config["dependencies"] if each["api_name"] == "draw")
    asked = {"data": ["tiny", "plain", 7, 2, "joined"], "fn_index": draw["id"], "session_hash": session}
    headers = {"Content-Type": "application/json"}
    join = urllib.request.Request(f"{server}/gradio_api/queue/join", json.dumps(asked).encode(), headers)
    urllib.request.urlopen(join).read()
    assert (
        b"process_completed" in urllib.request.urlopen(f"{server}/gradio_api/queue/data?session_hash={session}").read()
    )


def test_visitors_do_not_see_each_other_and_few_are_remembered(browser, server, page):
    context = browser.new_context()
    other = context.new_page()
    other.goto(server)
    other.get_by_role("button", name="Draw another scene").click()
    expect(other.locator("#found .status")).to_contain_text("plain_1_4")
    for each, name in ((page, "plain_0_4"), (other, "plain_1_4")):
        each.locator("#found .slot").nth(1).click()
        expect(each.locator("#found .slot[aria-pressed=true]")).to_have_count(1)
        expect(each.locator("#found .status")).to_contain_text(name)
    page.locator("#hide").get_by_label("Slot").first.check()
    expect(page.locator("#found .faded")).to_have_count(1)
    other.locator("#found .slot").nth(0).click()
    expect(other.locator("#found .slot").nth(0)).to_have_attribute("aria-pressed", "true")
    assert not other.locator("#found .faded").count()
    context.close()
    for number in range(SESSIONS):
        visit(server, f"visitor{number}")
    page.locator("#hide").get_by_label("Slot").nth(1).check()
    expect(page.get_by_text("has been forgotten; reload it")).to_be_visible()
    assert page.locator("#found .slot").count() and not page.get_by_text("Error", exact=True).count()


@pytest.mark.parametrize("width", [400, 1400])
def test_the_page_fits_the_screen(page, width):
    page.set_viewport_size({"width": width, "height": 900})
    for tab in ("Objects", "The cut"):
        page.get_by_role("tab", name=tab).click()
        assert page.evaluate("document.documentElement.scrollWidth") <= width
    bare = page.eval_on_selector_all("img", "found => found.filter(each => !each.alt).map(each => each.outerHTML)")
    assert not bare
