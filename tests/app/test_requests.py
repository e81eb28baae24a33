"""Raw HTTP requests to the real server: other hosts and origins, uploads, and nine visitors."""

import http.client
import json
import re
import time
import uuid

import pytest

from cutslots.app.security import MAX_VISITOR_UPLOADS
from cutslots.app.sessions import MAX_SESSIONS
from cutslots.models.checkpoints import SHIPPED
from tests.app.conftest import CHECKPOINT
from tests.robustness.app import serve
from tests.robustness.images import gray_png

pytestmark = pytest.mark.usefixtures("gradio")

API = "/gradio_api"
SCENE = [CHECKPOINT, "plain", 0, 3, "decoder"]


@pytest.fixture(scope="module")
def temporary(tmp_path_factory):
    """The temporary folder of the server."""
    return tmp_path_factory.mktemp("temporary")


@pytest.fixture(scope="module")
def server(temporary, tmp_path_factory):
    log = tmp_path_factory.mktemp("server") / "log.txt"
    with pytest.MonkeyPatch.context() as patch, serve_in(temporary, patch, log) as server:
        yield server
    assert "/cutslots/" not in log.read_text(), log.read_text()  # Gradio logs the files that it refuses
    assert not list(temporary.iterdir())


def serve_in(folder, patch, log):
    patch.setenv("TMPDIR", str(folder))
    return serve(log)


def ask(server, method, path, body=None, **headers):
    """Send a request; return the status and the text of the answer."""
    address = server.address.removeprefix("http://")
    connection = http.client.HTTPConnection(address, timeout=60)
    connection.request(method, path, body, {"Host": address} | {k.replace("_", "-"): v for k, v in headers.items()})
    with connection.getresponse() as response:
        return response.status, response.read().decode()


def run_event(server, name, session, data, **headers):
    """Call a handler as the page does; return its warnings, or the status of a refusal."""
    handlers = json.loads(ask(server, "GET", "/config")[1])["dependencies"]
    handler = next(each for each in handlers if each["api_name"] == name)
    event = {"data": data, "fn_index": handler["id"], "session_hash": session, "event_data": {"slot": 0}}
    event["trigger_id"] = handler["targets"][0][0]
    headers |= {"Content_Type": "application/json"}
    status, _ = ask(server, "POST", f"{API}/queue/join", json.dumps(event), **headers)
    if status != 200:
        return status
    answer = ask(server, "GET", f"{API}/queue/data?session_hash={session}", **headers)[1]
    messages = [json.loads(line[5:]) for line in answer.splitlines() if line.startswith("data:")]
    assert any(each["msg"] == "process_completed" for each in messages)
    return [each["log"] for each in messages if each["msg"] == "log"]


def upload(server, name, data, **headers):
    mark = uuid.uuid4().hex
    head = f'--{mark}\r\nContent-Disposition: form-data; name="files"; filename="{name}"\r\n\r\n'
    body = head.encode() + data + f"\r\n--{mark}--\r\n".encode()
    return ask(server, "POST", f"{API}/upload", body, Content_Type=f"multipart/form-data; boundary={mark}", **headers)


def stored(temporary):
    """The files that the server stores of uploads."""
    return [path for path in temporary.glob("cutslots-app-*/uploads/**/*") if path.is_file()]


def test_other_hosts_are_refused(server):
    port = server.address.rpartition(":")[2]
    for path in ("/", "/config", f"{API}/info", f"{API}/file=/etc/passwd", "/theme.css"):
        for host in (f"evil.example:{port}", "evil.example", f"127.0.0.1:{int(port) - 1}"):
            status, text = ask(server, "GET", path, Host=host)
            assert status == 421 and text == (
                f"cutslots: Host is {host!r}, which is not the address that this server was started with\n"
            )
    assert run_event(server, "show_scene", "rebound", SCENE, Host=f"localhost:{port}") == []
    assert ask(server, "GET", "/", Host=f"localhost:{port}")[0] == 200


def test_other_origins_cannot_ask_which_paths_exist(server, tmp_path):
    """The answers to them are the same whether or not the path of the checkpoint is there."""
    for headers in ({"Origin": "http://evil.example"}, {"Origin": "null"}, {"Sec_Fetch_Site": "cross-site"}):
        for path in (str(SHIPPED / CHECKPOINT), str(tmp_path), "/nowhere"):
            assert run_event(server, "show_scene", "other", [path, *SCENE[1:]], **headers) == 403
        assert upload(server, "image.png", gray_png(8, 8), **headers)[0] == 403
    own = {"Origin": server.address, "Sec_Fetch_Site": "same-origin"}
    assert run_event(server, "show_scene", "own", SCENE, **own) == []
    assert "there is no" in run_event(server, "show_scene", "own", ["/nowhere", *SCENE[1:]], **own)[0]


def test_endpoints_that_the_page_does_not_use_are_closed(server):
    for path in ("process_recording", "component_server", "vibe-edit", "run/show_scene", "call/show_scene"):
        assert ask(server, "POST", f"{API}/{path}", b"{}", Content_Type="application/json")[0] == 404


def test_uploads_are_removed_when_they_are_opened(server, temporary):
    for handler, others in (("show_upload", (CHECKPOINT, "decoder")), ("show_photograph", ())):
        for name, data, warning in (("image.png", gray_png(64, 48), None), ("broken.png", b"none", "cannot be read")):
            status, text = upload(server, name, data)
            assert status == 200 and len(stored(temporary)) == 1
            file = {"path": json.loads(text)[0], "orig_name": name, "meta": {"_type": "gradio.FileData"}}
            values = [others[0], file, others[1]] if others else [file]
            warnings = run_event(server, handler, "uploader", values)
            assert not stored(temporary) and (warning in warnings[0] if warning else warnings == [])
            again = run_event(server, handler, "uploader", values)
            assert again == [f"the server does not store {name}; upload it again"]


def test_only_uploads_are_opened_and_removed(server, tmp_path):
    for path in (tmp_path / "mine.png", tmp_path / "nothing.png"):
        if path.name == "mine.png":
            path.write_bytes(gray_png(8, 8))
        for meta in ({}, {"meta": {"_type": "gradio.FileData"}}):
            file = {"path": str(path), "orig_name": path.name} | meta
            assert run_event(server, "show_upload", "reader", [CHECKPOINT, file, "decoder"]) == []
    assert (tmp_path / "mine.png").is_file()


def test_total_size_of_uploads_is_bounded(server, temporary):
    data, answers = bytes(19_000_000), []
    for k in range(8):
        answers.append(upload(server, f"{k}.png", data + bytes([k])))
    accepted = MAX_VISITOR_UPLOADS // len(data)
    assert [status for status, _ in answers] == [200] * accepted + [413] * (8 - accepted)
    assert re.match(r"cutslots: your uploads would have [\d,]+ bytes; expected at most 62,914,560", answers[-1][1])
    assert sum(path.stat().st_size for path in stored(temporary)) < MAX_VISITOR_UPLOADS
    for path in stored(temporary):
        path.unlink()
    assert upload(server, "small.png", gray_png(8, 8))[0] == 200


def test_large_upload_is_refused(server):
    status, text = upload(server, "large.png", bytes(22_000_000))
    assert status == 413 and "expected a file of at most 20,971,520" in text


def test_ninth_visitor_drops_the_least_recently_used(server):
    visitors = [f"visitor{k}" for k in range(MAX_SESSIONS + 1)]
    for visitor in visitors[:-1]:
        assert run_event(server, "show_scene", visitor, SCENE) == []
    assert run_event(server, "select_slot", visitors[0], [None]) == []  # the first visitor is active
    assert run_event(server, "show_scene", visitors[-1], SCENE) == []
    dropped = ["the server no longer stores the state of this page; reload the page"]
    for _ in range(2):  # the visitor who was dropped costs no other one the state
        seen = {visitor: run_event(server, "select_slot", visitor, [None]) for visitor in visitors}
        assert seen == {visitor: dropped if visitor == visitors[1] else [] for visitor in visitors}


def test_closed_page_is_dropped_before_an_open_one(server):
    visitors = [f"page{k}" for k in range(MAX_SESSIONS + 1)]
    for visitor in visitors[:-1]:
        assert run_event(server, "show_scene", visitor, SCENE) == []
    connection = http.client.HTTPConnection(server.address.removeprefix("http://"), timeout=60)
    connection.request("GET", f"{API}/heartbeat/{visitors[3]}")
    connection.getresponse().readline()
    connection.close()  # as a browser does when the page is closed
    time.sleep(1)
    assert run_event(server, "show_scene", visitors[-1], SCENE) == []
    seen = {visitor: run_event(server, "select_slot", visitor, [None]) for visitor in visitors}
    assert [visitor for visitor in visitors if seen[visitor]] == [visitors[3]]


def test_segmentation_requests_are_bounded(server):
    value = {"token": "example", "width": 384, "height": 384, "strokes": [[1, 5, 20, 20]]}
    options = [False, 0.5, 0.5, 2, 0.5]
    show = lambda changed: run_event(server, "show_all", "painter", [None, value | changed, "blue", 40, *options])
    assert show({}) == []
    assert show({"strokes": [[1, 5, 20, 900]]}) == [
        "a stroke is outside of the image of 384x384 pixels; reload the page"
    ]
    assert "20,000" in show({"strokes": [[1, 5] + [20] * 100_000]})[0]
    assert show({"token": "of another server"}) == [
        "the server no longer stores the photograph of this page; open it again"
    ]
    assert show({"strokes": [[1, 5] + [20] * 1_000_000]}) == 413
    download = run_event(server, "download_labels", "painter", [None, value, "blue", 40])
    assert download == ["there are marks of 1 labels; expected at least 2: mark more, then download"]
