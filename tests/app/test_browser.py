"""The page end to end: the real server, in headless Chromium.

Skipped without Gradio, Playwright or Chromium; with CUTSLOTS_REQUIRE_BROWSER=1 these tests fail instead.
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

from cutslots.app.sessions import MAX_SESSIONS
from tests.app.conftest import CHECKPOINT
from tests.conftest import need

try:
    from playwright.sync_api import expect, sync_playwright
except ImportError:
    sync_playwright = None

TIMEOUT = 20_000  # milliseconds; the browser shares two cores with the other tests
DISCOVERY, SEGMENTATION = "Object discovery", "Segmentation"  # names of the tabs

# Runs the command in a process that logs every address it connects to, except this machine's.
MONITORED_APP = """
import socket, sys
from pathlib import Path

def monitor(name):
    connect = getattr(socket.socket, name)
    def logged(self, address):
        if self.family in (socket.AF_INET, socket.AF_INET6) and address[0] not in ("127.0.0.1", "::1", "localhost"):
            with Path(LOG).open("a") as file:
                print(address, file=file)
        return connect(self, address)
    setattr(socket.socket, name, logged)

monitor("connect"), monitor("connect_ex")
from cutslots.cli import main
sys.argv = ["cutslots", "app", "--port", "0"]
main()
"""


def chromium(play):
    """The path of Chromium: the system's, or Playwright's own."""
    names = ("chromium", "chromium-browser", "google-chrome", play.chromium.executable_path)
    path = next(filter(None, map(shutil.which, names)), None)
    need(path, "there is no Chromium: apt-get install chromium, or python -m playwright install chromium")
    return path


@pytest.fixture(scope="module")
def browser(gradio):
    need(sync_playwright, "there is no Playwright: pip install playwright")
    expect.set_options(timeout=TIMEOUT)
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=chromium(play), args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def server(browser, tmp_path_factory):
    """The address of the app. When it has stopped, it has left compiled code alone and has contacted no other host."""
    root = tmp_path_factory.mktemp("server")
    folders = {name: root / name.lower() for name in ("HOME", "TMPDIR", "CWD")}
    for folder in folders.values():
        folder.mkdir()
    env = {name: value for name, value in os.environ.items() if not name.startswith(("GRADIO", "XDG", "MPL"))}
    env |= {"HOME": str(folders["HOME"]), "TMPDIR": str(folders["TMPDIR"]), "OMP_NUM_THREADS": "2"}
    env |= {"PYTHONPATH": os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH", "")]))}
    connections, errors = root / "connections.txt", root / "errors.txt"
    command = [sys.executable, "-c", MONITORED_APP.replace("LOG", repr(str(connections)))]
    with errors.open("w") as stderr:
        options = {"cwd": folders["CWD"], "env": env, "stdout": subprocess.PIPE, "stderr": stderr, "text": True}
        process = subprocess.Popen(command, **options)
        try:
            line = process.stdout.readline()
            address = re.search(r"http://127\.0\.0\.1:\d+", line)
            assert address, line + errors.read_text()
            yield address[0]
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
    assert "Traceback" not in errors.read_text(), errors.read_text()
    assert not connections.exists(), connections.read_text()
    left = {path.relative_to(root) for folder in folders.values() for path in folder.rglob("*") if not path.is_dir()}
    assert all(path.match("home/.cache/cutslots/native/*_cut-*.so") for path in left), left


@pytest.fixture
def page(browser, server):
    """The page with a scene in it. It makes no request to another host, and no script fails."""
    context = browser.new_context(viewport={"width": 1200, "height": 900}, accept_downloads=True)
    context.set_default_timeout(TIMEOUT)
    page, requests, errors = context.new_page(), [], []
    page.on("request", lambda request: requests.append(request.url))
    page.on("websocket", lambda socket: requests.append(socket.url))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(server)
    expect(page.locator("#discovery .slot").first).to_be_visible()
    yield page
    context.close()
    assert not [url for url in requests if not url.startswith((f"{server}/", "data:", "blob:"))]
    assert not errors


def image_sources(page, selector):
    return page.eval_on_selector_all(selector, "images => images.map(each => each.src)")


def wait_for_change(page, selector, before):
    """Wait until the images of the selector differ from those before."""
    test = "([s, b]) => JSON.stringify([...document.querySelectorAll(s)].map(x => x.src)) !== JSON.stringify(b)"
    page.wait_for_function(test, arg=[selector, before])


def open_tab(page, name):
    page.get_by_role("tab", name=name).click()


def slot_numbers(page):
    """The numbers of the slots, from 1, as written on the overlay."""
    return [int(text) for text in page.locator("#discovery .overlay span").all_inner_texts()]


# ------------------------------------------------------------------------------------------------------- discovery tab


def test_generate_another_scene(page):
    before, start = image_sources(page, "#discovery .overlay img"), time.perf_counter()
    page.get_by_role("button", name="Generate another scene").click()
    wait_for_change(page, "#discovery .overlay img", before)
    print(f"scene generated and shown: {time.perf_counter() - start:.2f} s")
    assert len(slot_numbers(page)) >= 3 and page.locator("#discovery .slot").count() == len(slot_numbers(page))


def test_select_a_slot_by_click_and_by_keyboard(page):
    numbers, image = slot_numbers(page), page.locator("#discovery .overlay img")
    box, label = image.bounding_box(), page.locator("#discovery .overlay span").nth(1).bounding_box()
    center = {"x": label["x"] + label["width"] / 2 - box["x"], "y": label["y"] + label["height"] / 2 - box["y"]}
    image.click(position=center)
    expect(page.locator("#selected .summary")).to_contain_text(f"Slot {numbers[1]}:")
    expect(page.locator("#discovery .slot[aria-pressed=true]")).to_have_attribute("data-slot", str(numbers[1] - 1))
    assert page.locator("#selected img").count() == 2

    page.locator(f"#discovery .slot[data-slot='{numbers[2] - 1}']").focus()
    page.keyboard.press("Enter")
    expect(page.locator("#selected .summary")).to_contain_text(f"Slot {numbers[2]}:")


def test_hidden_slots_are_left_out_of_view_and_download(page, tmp_path):
    numbers, before = slot_numbers(page), image_sources(page, "#discovery .images img")
    page.locator("#hide").get_by_label(f"Slot {numbers[1]}", exact=True).check()
    wait_for_change(page, "#discovery .images img", before)
    expect(page.locator("#discovery .overlay span")).to_have_count(len(numbers) - 1)

    with page.expect_download() as download:
        page.get_by_role("button", name="Download masks").click()
    download.value.save_as(tmp_path / "masks.zip")
    assert download.value.suggested_filename == "masks.zip"
    with zipfile.ZipFile(tmp_path / "masks.zip") as out:
        assert out.testzip() is None
        record = json.loads(out.read("coco.json"))
        name = Path(record["images"][0]["file_name"]).stem
        labels = np.asarray(Image.open(io.BytesIO(out.read(f"{name}/labels.png"))))
        visible = sorted(set(numbers) - {numbers[1]})
        assert sorted(set(np.unique(labels)) - {0}) == visible == [each["slot"] for each in record["annotations"]]
        for k in visible:
            mask = np.asarray(Image.open(io.BytesIO(out.read(f"{name}/slot_{k:02d}.png"))))
            assert (mask.astype(bool) == (labels == k)).all()


def test_merge_slots_and_undo(page):
    numbers = slot_numbers(page)
    for slot in numbers[:2]:
        page.locator("#merge").get_by_label(f"Slot {slot}", exact=True).check()
    page.get_by_role("button", name="Merge selected").click()
    expect(page.locator("#discovery .status")).to_contain_text("Merged:")
    expect(page.locator("#discovery .slot")).to_have_count(len(numbers) - 1)
    page.get_by_role("button", name="Undo merges").click()
    expect(page.locator("#discovery .slot")).to_have_count(len(numbers))
    page.get_by_role("button", name="Merge selected").click()
    expect(page.get_by_text("expected at least two slots to merge")).to_be_visible()


def test_masks_can_be_of_every_kind(page):
    for kind in ("high-recall", "decoder", "refined"):
        before = image_sources(page, "#discovery .overlay img")
        page.get_by_role("radio", name=kind, exact=True).check()
        wait_for_change(page, "#discovery .overlay img", before)


def test_upload_of_an_unreadable_file_shows_an_error(page, tmp_path):
    (tmp_path / "notes.png").write_text("these are not pixels")
    page.locator("#upload input[type=file]").set_input_files(tmp_path / "notes.png")
    expect(page.get_by_text("notes.png cannot be read as a")).to_be_visible()
    assert "Traceback" not in page.content() and page.locator("#discovery .slot").count()


def test_upload_of_a_video_is_tracked(page, tmp_path):
    frames = [Image.new("RGB", (48, 48), "grey") for _ in range(4)]
    for t, frame in enumerate(frames):
        frame.paste((200, 30, 30), (4 + 6 * t, 16, 18 + 6 * t, 30))
    frames[0].save(tmp_path / "video.gif", save_all=True, append_images=frames[1:], duration=80)
    page.locator("#upload input[type=file]").set_input_files(tmp_path / "video.gif")
    expect(page.locator("#discovery .status")).to_contain_text("video: ")
    expect(page.locator("#discovery .status")).to_contain_text("4 frames")
    before = image_sources(page, "#discovery .overlay img")
    page.locator("#frame input[type=range]").press("ArrowRight")
    wait_for_change(page, "#discovery .overlay img", before)
    page.locator("#frames input[type=range]").press("ArrowLeft")
    expect(page.locator("#discovery .status")).to_contain_text("3 frames")


# ----------------------------------------------------------------------------------------------------- segmentation tab


RESULT = "#segmentation .images img"


def open_image(page, path):
    """Upload a file in the segmentation tab."""
    with page.expect_file_chooser() as chooser:
        page.get_by_role("button", name="Open image").click()
    chooser.value.set_files(path)


def choose_brush(page, name):
    page.locator("#canvas .brush", has_text=name).click()


def stroke(page, name, *points):
    """Draw with the mouse through points (x, y) in [0, 1]."""
    choose_brush(page, name)
    canvas = page.locator("#canvas canvas")
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    (x, y), *rest = ((box["x"] + x * box["width"], box["y"] + y * box["height"]) for x, y in points)
    page.mouse.move(x, y)
    page.mouse.down()
    for x, y in rest:
        page.mouse.move(x, y, steps=4)
    page.mouse.up()


def scribbled(page, x, y):
    """The color of the canvas at a point in [0, 1], RGBA."""
    test = """([x, y]) => { const canvas = document.querySelector('#canvas canvas');
        return [...canvas.getContext('2d').getImageData(x * canvas.width, y * canvas.height, 1, 1).data]; }"""
    return page.evaluate(test, [x, y])


@pytest.fixture
def halves(page, tmp_path):
    """The tab with a photograph of 1,200 by 600 pixels, dark on the left and light on the right; it has no strokes."""
    pixels = np.random.default_rng(0).integers(0, 50, (600, 1200, 3), dtype=np.uint8)
    pixels[:, 400:] += np.uint8(170)
    Image.fromarray(pixels).save(tmp_path / "halves.png")
    open_tab(page, SEGMENTATION)
    open_image(page, tmp_path / "halves.png")
    expect(page.locator("#canvas canvas")).to_have_attribute("height", "512")
    expect(page.locator("#segmentation .hint")).to_contain_text("Mark the object with one brush")
    return page


def draw_halves(page):
    stroke(page, "blue", (0.1, 0.2), (0.2, 0.8))
    stroke(page, "orange", (0.7, 0.2), (0.8, 0.8))
    expect(page.locator("#segmentation .status")).to_contain_text("blue 33.")


def test_strokes_are_segmented_live(halves):
    stroke(halves, "blue", (0.1, 0.2), (0.2, 0.8))
    start = time.perf_counter()
    stroke(halves, "orange", (0.7, 0.2), (0.8, 0.8))
    expect(halves.locator(RESULT)).to_have_count(3)
    print(f"stroke drawn and segmentation shown: {time.perf_counter() - start:.2f} s")
    status = "at 512x256 pixels; downloads have 1200x600."
    expect(halves.locator("#segmentation .status")).to_contain_text(status)
    expect(halves.locator("#canvas .outlines")).to_be_visible()
    before = image_sources(halves, RESULT)
    halves.locator("#chosen").get_by_label("orange").check()
    wait_for_change(halves, RESULT, before)
    expect(halves.locator("#segmentation figcaption").last).to_have_text("cut-out: orange")


def test_downloads_have_the_resolution_of_the_photograph(halves, tmp_path):
    halves.get_by_role("button", name="Download labels").click()
    expect(halves.get_by_text("marks of 0 labels; expected at least 2")).to_be_visible()
    draw_halves(halves)
    for kind in ("labels", "cut-out"):
        with halves.expect_download() as download:
            halves.get_by_role("button", name=f"Download {kind}").click()
        name = download.value.suggested_filename
        assert name == kind.replace("-", "") + ".png"
        download.value.save_as(tmp_path / name)
    labels, cutout = (np.asarray(Image.open(tmp_path / name)) for name in ("labels.png", "cutout.png"))
    assert (labels == np.where(np.arange(1200) < 400, 1, 2)).all() and labels.shape == (600, 1200)
    photograph = np.asarray(Image.open(tmp_path / "halves.png"))
    assert (
        (cutout[..., :3] == photograph).all() and (cutout[:, :400, 3] > 127).all() and (cutout[:, 400:, 3] < 128).all()
    )


def test_undo_clear_and_eraser(halves):
    draw_halves(halves)
    assert scribbled(halves, 0.15, 0.5) == [0, 114, 178, 255] and scribbled(halves, 0.75, 0.5) == [213, 94, 0, 255]
    halves.get_by_role("button", name="Undo").click()
    expect(halves.locator("#segmentation .hint")).to_contain_text("Mark the object with one brush")
    expect(halves.locator("#canvas .outlines")).to_be_hidden()
    assert scribbled(halves, 0.75, 0.5)[3] == 0
    stroke(halves, "orange", (0.7, 0.2), (0.8, 0.8))
    expect(halves.locator("#segmentation .status")).to_contain_text("blue 33.")
    halves.locator("#canvas [name=size]").fill("60")
    stroke(halves, "eraser", (0.7, 0.2), (0.8, 0.8))
    expect(halves.locator("#segmentation .hint")).to_contain_text("Mark the object with one brush")
    assert scribbled(halves, 0.75, 0.5)[3] == 0 and scribbled(halves, 0.15, 0.5)[3] == 255
    halves.get_by_role("button", name="Clear").click()
    assert scribbled(halves, 0.15, 0.5)[3] == 0
    halves.get_by_role("button", name="Example").click()
    expect(halves.locator("#segmentation .status")).to_contain_text("at 384x384 pixels")


def test_the_last_of_many_quick_strokes_is_shown(halves):
    """Requests are debounced, and no older answer replaces that of the last stroke."""
    requests = []
    halves.on("request", lambda request: requests.append(request.url) if request.url.endswith("queue/join?") else None)
    draw_halves(halves)
    requests.clear()
    for k in range(6):
        stroke(halves, "green", (0.5 + 0.03 * k, 0.3), (0.5 + 0.03 * k, 0.7))
    stroke(halves, "pink", (0.9, 0.3), (0.95, 0.7))
    expect(halves.locator("#segmentation .status")).to_contain_text("pink")
    halves.wait_for_timeout(1000)
    expect(halves.locator("#segmentation .status")).to_contain_text("pink")
    assert len(requests) <= 7  # at most one for each stroke


def test_strokes_by_touch(browser, server):
    context = browser.new_context(viewport={"width": 400, "height": 900}, has_touch=True)
    page = context.new_page()
    page.goto(server)
    open_tab(page, SEGMENTATION)
    page.wait_for_timeout(500)
    before, canvas = image_sources(page, RESULT), page.locator("#canvas canvas")
    choose_brush(page, "yellow")
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    page.touchscreen.tap(box["x"] + 0.2 * box["width"], box["y"] + 0.6 * box["height"])
    wait_for_change(page, RESULT, before)
    expect(page.locator("#segmentation .status")).to_contain_text("yellow")
    context.close()


def test_strokes_by_keyboard(page):
    open_tab(page, SEGMENTATION)
    before, canvas = image_sources(page, RESULT), page.locator("#canvas canvas")
    page.locator("#canvas [name=brush]").nth(0).focus()
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    assert page.locator("#canvas [name=brush]:checked").get_attribute("value") == "4"
    canvas.focus()
    for key in ("ArrowDown", "ArrowDown", "Shift+ArrowDown", "Space"):
        page.keyboard.press(key)
    wait_for_change(page, RESULT, before)
    expect(page.locator("#segmentation .status")).to_contain_text("yellow")
    canvas.focus()
    page.keyboard.press("Control+z")
    page.keyboard.press("Control+z")
    expect(page.locator("#segmentation .status")).not_to_contain_text("yellow")


def test_unreadable_file_in_the_segmentation_tab(halves, tmp_path):
    (tmp_path / "notes.png").write_text("these are not pixels")
    open_image(halves, tmp_path / "notes.png")
    expect(halves.get_by_text("notes.png cannot be read as a")).to_be_visible()
    expect(halves.locator("#canvas canvas")).to_have_attribute("height", "512")


def test_gamma_changes_p_but_not_the_exact_cut(page):
    open_tab(page, SEGMENTATION)
    expect(page.locator("#cuts")).to_be_hidden()
    page.locator("#compare").get_by_role("checkbox").check()
    expect(page.locator("#cuts img")).to_have_count(5)
    before, start = image_sources(page, "#cuts img"), time.perf_counter()
    page.get_by_role("slider", name=re.compile("gamma")).press("ArrowRight")
    wait_for_change(page, "#cuts img", before)
    print(f"gamma changed and cuts shown: {time.perf_counter() - start:.2f} s")
    after = image_sources(page, "#cuts img")
    assert after[0] != before[0] and after[4] == before[4]


# ------------------------------------------------------------------------------------------------------------ both tabs


def test_invalid_values_are_shown_as_one_sentence(page):
    field = lambda name: page.get_by_role("spinbutton", name=name)
    field("Seed").fill("-5")
    expect(page.get_by_text("seed is -5; expected")).to_be_visible()
    field("Seed").fill("0")
    for value, message in (("99", "objects is (99, 99)"), ("", "objects is (0, 0)")):
        field("Objects").fill(value)
        expect(page.get_by_text(message)).to_be_visible()
    open_tab(page, SEGMENTATION)
    for value, message in (("999", "capacity is 999"), ("", "capacity is None")):
        field("capacity").fill(value)
        expect(page.get_by_text(message)).to_be_visible()
    page.locator("#compare").get_by_role("checkbox").check()
    field("capacity").fill("40")
    for value, message in (("99", "gamma is 99"), ("", "gamma is None")):
        field("gamma").fill(value)
        expect(page.get_by_text(message).first).to_be_visible()  # each change of the page may show it again
    assert not page.get_by_text("Error", exact=True).count()


def visit(server, session):
    """Request a scene as another visitor."""
    config = json.load(urllib.request.urlopen(f"{server}/config"))
    handler = next(each for each in config["dependencies"] if each["api_name"] == "show_scene")
    request = {"data": [CHECKPOINT, "plain", 7, 2, "refined"], "fn_index": handler["id"], "session_hash": session}
    headers = {"Content-Type": "application/json"}
    join = urllib.request.Request(f"{server}/gradio_api/queue/join", json.dumps(request).encode(), headers)
    urllib.request.urlopen(join).read()
    events = urllib.request.urlopen(f"{server}/gradio_api/queue/data?session_hash={session}").read()
    assert b"process_completed" in events


def test_visitors_have_separate_states(browser, server, page):
    context = browser.new_context()
    other = context.new_page()
    other.goto(server)
    other.get_by_role("button", name="Generate another scene").click()
    expect(other.locator("#discovery .status")).to_contain_text("plain_1_4")
    for each, name in ((page, "plain_0_4"), (other, "plain_1_4")):
        each.locator("#discovery .slot").nth(1).click()
        expect(each.locator("#discovery .slot[aria-pressed=true]")).to_have_count(1)
        expect(each.locator("#discovery .status")).to_contain_text(name)
    page.locator("#hide").get_by_label("Slot").first.check()
    expect(page.locator("#discovery .faded")).to_have_count(1)
    other.locator("#discovery .slot").nth(0).click()
    expect(other.locator("#discovery .slot").nth(0)).to_have_attribute("aria-pressed", "true")
    assert not other.locator("#discovery .faded").count()
    context.close()


def test_dropped_state_asks_to_reload(server, page):
    page.locator("#hide").get_by_label("Slot").first.check()
    expect(page.locator("#discovery .faded")).to_have_count(1)
    for number in range(MAX_SESSIONS + 1):  # the request of the last one drops a state
        visit(server, f"visitor{number}")
    page.locator("#hide").get_by_label("Slot").nth(1).check()
    expect(page.get_by_text("reload the page")).to_be_visible()
    assert page.locator("#discovery .slot").count() and not page.get_by_text("Error", exact=True).count()


@pytest.mark.parametrize("width", [400, 1400])
def test_page_fits_the_screen_and_images_have_alt_text(page, width):
    page.set_viewport_size({"width": width, "height": 900})
    for tab in (DISCOVERY, SEGMENTATION):
        open_tab(page, tab)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
    without_alt = "images => images.filter(each => !each.alt).map(each => each.outerHTML)"
    assert not page.eval_on_selector_all("img", without_alt)
