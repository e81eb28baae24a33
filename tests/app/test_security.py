"""Which requests are answered: the rules alone, without a server."""

import asyncio
import socket

import pytest

from cutslots.app import security
from cutslots.app.security import RequestGuard, Uploads, is_own_host, is_own_origin

PAGE = "http://127.0.0.1:7860"


@pytest.mark.parametrize(
    "host, expected", [("127.0.0.1", True), ("localhost", True), ("::1", True), ("0.0.0.0", False), ("box", False)]
)
def test_is_loopback(host, expected):
    assert security.is_loopback(host) is expected


# ----------------------------------------------------------------------------------------------------------------- host


@pytest.mark.parametrize("header", ["127.0.0.1:7860", "localhost:7860", "LOCALHOST:7860", "[::1]:7860"])
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "0.0.0.0", "::"])
def test_loopback_names_are_own_hosts(host, header):
    assert is_own_host(header, host, 7860)


@pytest.mark.parametrize(
    "header",
    [
        "evil.example:7860",
        "evil.example",
        "127.0.0.1",
        "127.0.0.1:7861",
        "127.0.0.1.evil.example:7860",
        "localhost.evil.example:7860",
        "evil@127.0.0.1:7860",
        "127.0.0.1:7860, evil.example:7860",
        "127.0.0.1:7860/evil.example",
        "192.0.2.1:7860",
        "127.0.0.1:port",
        "[::1:7860",
        "",
    ],
)
def test_other_hosts(header):
    assert not is_own_host(header, "127.0.0.1", 7860)


def test_hosts_of_a_server_on_a_network():
    assert is_own_host("192.0.2.1:80", "192.0.2.1", 80) and is_own_host("192.0.2.1", "192.0.2.1", 80)
    assert is_own_host("box:7860", "Box", 7860)
    assert not is_own_host("localhost:7860", "box", 7860) and not is_own_host("evil.example:7860", "box", 7860)
    for host in ("0.0.0.0", "::"):
        assert is_own_host("192.0.2.1:7860", host, 7860) and is_own_host("[2001:db8::1]:7860", host, 7860)
        assert is_own_host(f"{socket.gethostname()}:7860", host, 7860)
        assert not is_own_host("evil.example:7860", host, 7860)


# --------------------------------------------------------------------------------------------------------------- origin


@pytest.mark.parametrize(
    "method, site, origin, expected",
    [
        ("POST", "same-origin", PAGE, True),
        ("POST", None, PAGE, True),  # browsers send Sec-Fetch-Site only to this machine or by HTTPS
        ("POST", None, None, True),  # other programs
        ("POST", "none", None, True),
        ("POST", "same-origin", "null", True),
        ("POST", None, "null", False),
        ("POST", None, "http://evil.example", False),
        ("POST", None, "https://127.0.0.1:7860", False),
        ("POST", None, "http://127.0.0.1:3000", False),
        ("POST", None, "http://localhost:7860", False),
        ("POST", "cross-site", None, False),
        ("POST", "same-site", None, False),
        ("POST", "cross-site", PAGE, False),
        ("GET", "same-origin", None, True),
        ("GET", "cross-site", None, False),  # such as an image, whose loading tells whether it is there
        ("GET", None, "http://evil.example", False),
    ],
)
def test_origins(method, site, origin, expected):
    headers = {"host": "127.0.0.1:7860", "sec-fetch-site": site, "origin": origin}
    assert is_own_origin(method, {name: value for name, value in headers.items() if value}) is expected


def test_links_to_the_page_are_followed():
    link = {"host": "127.0.0.1:7860", "sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
    assert is_own_origin("GET", link | {"sec-fetch-dest": "document"})
    assert not is_own_origin("GET", link | {"sec-fetch-dest": "iframe"})
    assert not is_own_origin("POST", link | {"sec-fetch-dest": "document"})  # a form


# -------------------------------------------------------------------------------------------------------------- uploads


def test_uploads_are_bounded_by_visitor_and_in_all(tmp_path, monkeypatch):
    monkeypatch.setattr(security, "MAX_UPLOAD", 100)
    monkeypatch.setattr(security, "MULTIPART", 10)
    monkeypatch.setattr(security, "MAX_VISITOR_UPLOADS", 250)
    monkeypatch.setattr(security, "MAX_TOTAL_UPLOADS", 400)
    uploads = Uploads(tmp_path)
    assert uploads.check("a", 110) is None
    assert "the upload has 111 bytes; expected a file of at most 100" in uploads.check("a", 111).reason
    uploads.arriving["a"] = 60
    (tmp_path / "first").write_bytes(bytes(100))
    uploads.owners[tmp_path / "first"] = "a"
    assert uploads.check("a", 90) is None and uploads.check("b", 100) is None
    assert uploads.check("a", 91).reason.startswith("your uploads would have 251 bytes; expected at most 250")
    (tmp_path / "second").write_bytes(bytes(200))
    assert uploads.check("b", 50).reason.startswith("all uploads would have 410 bytes; expected at most 400")
    (tmp_path / "first").unlink()  # opened
    assert uploads.check("a", 91) is None and not uploads.owners


# ----------------------------------------------------------------------------------------------------------- middleware


def responses(inner, folder, path="/", method="GET", kind="http", **headers):
    """The messages that a browser receives through the middleware."""
    messages, headers = [], {"host": "127.0.0.1:7860"} | headers

    async def send(message):
        messages.append(message)

    async def receive():
        return {"type": "http.request", "body": b"", "more_body": False}

    scope = {"type": kind, "path": path, "method": method, "client": ("127.0.0.1", 1)}
    scope["headers"] = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    asyncio.run(RequestGuard(inner, "127.0.0.1", 7860, folder)(scope, receive, send))
    return messages


def test_middleware_adds_headers_and_removes_urls_of_other_hosts(tmp_path):
    page = b'<html><meta property="og:image" content="https://raw.githubusercontent.com/x.jpg"/><p>stays</p>'
    page += b'<script>x = "https://github.com/a/b.pdf"</script>'

    async def inner(scope, receive, send):
        headers = [(b"content-type", b"text/html"), (b"Content-Length", str(len(page)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": page})

    start, body = responses(inner, tmp_path)
    assert body["body"].replace(b" ", b"") == b'<html><p>stays</p><script>x=""</script>'
    headers = {name.lower(): value for name, value in start["headers"]}
    assert headers[b"content-length"] == str(len(body["body"])).encode() and len(start["headers"]) == len(headers)
    policy = headers[b"content-security-policy"]
    assert b"http" not in policy and b"'self'" in policy and b"frame-ancestors 'none'" in policy
    start, body = responses(inner, tmp_path, "/assets/index.js")
    assert body["body"] == page and (b"content-security-policy", policy) in start["headers"]


@pytest.mark.parametrize(
    "request_, status, sentence",
    [
        ({"host": "evil.example:7860"}, 421, "Host is 'evil.example:7860', which is not the address that this server"),
        ({"method": "POST", "origin": "http://evil.example"}, 403, "this request comes from another site"),
        ({"method": "POST", "path": "/gradio_api/process_recording"}, 404, "there is no POST"),
        ({"method": "PUT"}, 404, "there is no PUT '/'"),
        ({"method": "POST", "path": "/gradio_api/upload"}, 411, "the request has no Content-Length"),
        ({"method": "POST", "path": "/gradio_api/upload/", "content_length": "-1"}, 411, "no Content-Length"),
        ({"method": "POST", "path": "/gradio_api/queue/join", "content_length": "3000000"}, 413, "has 3,000,000 bytes"),
        ({"method": "POST", "path": "/gradio_api/upload", "content_length": "30000000"}, 413, "at most 20,971,520"),
    ],
)
def test_refusals_are_one_sentence_and_reach_no_handler(tmp_path, request_, status, sentence):
    async def inner(scope, receive, send):
        raise AssertionError

    start, body = responses(inner, tmp_path, **request_)
    assert start["status"] == status and sentence in body["body"].decode()
    assert body["body"].startswith(b"cutslots: ") and body["body"].count(b"\n") == 1
    assert (b"x-content-type-options", b"nosniff") in start["headers"]


def test_websockets_are_closed(tmp_path):
    assert responses(None, tmp_path, kind="websocket") == [{"type": "websocket.close", "code": 1008}]
