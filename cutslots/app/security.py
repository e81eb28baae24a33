"""Which requests the server answers: those to its own address, from its own page, of a bounded size.

A web page of another site can make a browser send requests to a server on this machine. `RequestGuard` refuses them in
three steps:

- **Host.** A name of the attacker may resolve to this machine (DNS rebinding). The header Host must be the address that
  the server was started with.
- **Origin.** Requests that another site makes the browser send are refused, except following a link to the page.
- **Size.** Uploads are bounded for each visitor and in all; other bodies are small.

It also adds the security headers, and removes URLs of other hosts from the page.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import re
import socket
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

MAX_UPLOAD = 20 * 2**20  # bytes of a file
MAX_VISITOR_UPLOADS = 60 * 2**20  # bytes of the files of one address that were not opened yet
MAX_TOTAL_UPLOADS = 200 * 2**20  # bytes of all files
MAX_BODY = 2 * 2**20  # bytes of a request that is no upload
MAX_DRAINED = 100 * 2**20  # bytes of a refused request that are read before it is answered
MULTIPART = 2**16  # bytes that the encoding of an upload adds at most

LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})

API = "/gradio_api"
UPLOAD = f"{API}/upload"
POSTS = frozenset({UPLOAD, f"{API}/queue/join", f"{API}/cancel", f"{API}/reset"})  # all that the page sends

SECURITY_HEADERS = [
    (
        b"content-security-policy",
        b"default-src 'self' 'unsafe-inline' 'unsafe-eval' data: blob:; form-action 'self'; frame-ancestors 'none'",
    ),
    (b"referrer-policy", b"no-referrer"),
    (b"x-content-type-options", b"nosniff"),
]

EXTERNAL_URLS = rb"<meta\s[^>]*content=\"https?://[^>]*>|https?://(?:github\.com|raw\.githubusercontent\.com)/[^\"]*"


class Refusal(NamedTuple):
    """The HTTP status and the sentence of a request that is not answered."""

    status: int
    reason: str


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach the host."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def is_own_host(header: str, host: str, port: int) -> bool:
    """Return whether the header Host is the address of a server that was started with `host` and `port`.

    A server on all addresses (0.0.0.0 or ::) is also known by any IP address, which no DNS entry can replace, and by
    the name of the machine."""
    try:
        address = urlsplit(f"//{header}")
        name, given = address.hostname or "", address.port or 80
    except ValueError:
        return False
    if given != port or re.search(r"[/@?#\\\s]", header):
        return False
    own = {host.lower()} | (LOOPBACK_NAMES if is_loopback(host) or _is_any(host) else frozenset())
    if not _is_any(host):
        return name in own
    machine = socket.gethostname().lower()
    return name in own | {machine, f"{machine}.local"} or _is_address(name)


def _is_address(name: str) -> bool:
    with contextlib.suppress(ValueError):
        return bool(ipaddress.ip_address(name))
    return False


def _is_any(host: str) -> bool:
    """Return whether a host stands for all addresses of this machine."""
    return _is_address(host) and ipaddress.ip_address(host).is_unspecified


def is_own_origin(method: str, headers: dict[str, str]) -> bool:
    """Return whether a request comes from the page itself, from no page, or follows a link to the page.

    Browsers send Sec-Fetch-Site to this machine, and Origin with every POST; a page cannot change either. Requests with
    neither are of other programs, which no page controls."""
    site, origin = headers.get("sec-fetch-site"), headers.get("origin")
    if origin not in (None, "null") and origin.lower() != f"http://{headers['host']}".lower():
        return False
    if origin == "null" and site != "same-origin":  # as of a sandboxed frame
        return False
    is_link = method == "GET" and headers.get("sec-fetch-mode") == "navigate"
    return site in (None, "same-origin", "none") or (is_link and headers.get("sec-fetch-dest") == "document")


class Uploads:
    """The bytes that visitors have uploaded to a folder and that were not opened yet."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.arriving: Counter[str] = Counter()  # bytes of each visitor's unfinished uploads
        self.owners: dict[Path, str] = {}

    def check(self, visitor: str, size: int) -> Refusal | None:
        """Return why a visitor may not upload `size` bytes, or None."""
        self.owners = {path: owner for path, owner in self.owners.items() if path.exists()}
        own = self.arriving[visitor] + sum(_size(path) for path, owner in self.owners.items() if owner == visitor)
        everything = self.arriving.total() + sum(_size(path) for path in self.folder.rglob("*"))
        if size > MAX_UPLOAD + MULTIPART:
            return Refusal(413, f"the upload has {size:,} bytes; expected a file of at most {MAX_UPLOAD:,}")
        for limit, used, whose in ((MAX_VISITOR_UPLOADS, own, "your"), (MAX_TOTAL_UPLOADS, everything, "all")):
            if used + size > limit:
                return Refusal(
                    413, f"{whose} uploads would have {used + size:,} bytes; expected at most {limit:,}: wait a while"
                )
        return None


def _size(path: Path) -> int:
    with contextlib.suppress(OSError):  # it was removed meanwhile
        return path.stat().st_size if path.is_file() else 0
    return 0


class RequestGuard:
    """ASGI middleware that answers only requests to `host` and `port`, from the page, of a bounded size."""

    def __init__(self, app: Any, host: str, port: int, uploads: Path) -> None:
        self.app, self.host, self.port, self.uploads = app, host, port, Uploads(uploads)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":  # the page opens none
            await send({"type": "websocket.close", "code": 1008})
        elif refusal := self.check(scope):
            await _drain(receive)
            await _refuse(refusal, _secured(send))
        elif scope["method"] == "POST" and _path(scope) == UPLOAD:
            await self._upload(scope, receive, _secured(send))
        else:
            await self.app(scope, receive, _secured(send, removes_urls=scope["path"] == "/"))

    def check(self, scope: Any) -> Refusal | None:
        """Return why a request is not answered, or None."""
        headers, method = _headers(scope), scope["method"]
        host = headers.get("host", "")
        if not is_own_host(host, self.host, self.port):
            return Refusal(421, f"Host is {host!r}, which is not the address that this server was started with")
        if not is_own_origin(method, headers):
            return Refusal(403, "this request comes from another site; open the page of this server instead")
        if method not in ("GET", "HEAD", "POST") or (method == "POST" and _path(scope) not in POSTS):
            return Refusal(404, f"there is no {method} {scope['path']!r}")
        return self._check_size(scope, headers) if method == "POST" else None

    def _check_size(self, scope: Any, headers: dict[str, str]) -> Refusal | None:
        if not headers.get("content-length", "").isdecimal():  # without it a body has no bound
            return Refusal(411, "the request has no Content-Length")
        size = int(headers["content-length"])
        if _path(scope) == UPLOAD:
            return self.uploads.check(_visitor(scope), size)
        return (
            Refusal(413, f"the request has {size:,} bytes; expected at most {MAX_BODY:,}") if size > MAX_BODY else None
        )

    async def _upload(self, scope: Any, receive: Any, send: Any) -> None:
        """Pass an upload on, and remember whose files it has left."""
        visitor, size, body = _visitor(scope), int(_headers(scope)["content-length"]), bytearray()

        async def recording_send(message: Any) -> None:
            body.extend(message.get("body", b""))
            await send(message)

        self.uploads.arriving[visitor] += size
        try:
            await self.app(scope, receive, recording_send)
        finally:
            self.uploads.arriving[visitor] -= size
            with contextlib.suppress(ValueError, TypeError):  # the answer is an error, not a list of files
                self.uploads.owners |= dict.fromkeys(map(Path, json.loads(body)), visitor)


def _secured(send: Any, removes_urls: bool = False) -> Any:
    """Return `send` with the security headers and, in the page, without the URLs of other hosts.

    Gradio writes those URLs into the page for sharing and for scripting it."""

    async def secured_send(message: Any) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message["headers"], *SECURITY_HEADERS]
        elif message["type"] == "http.response.body" and removes_urls:  # one message holds the page
            # Spaces keep the content length.
            message["body"] = re.sub(EXTERNAL_URLS, lambda match: b" " * len(match[0]), message.get("body", b""))
        await send(message)

    return secured_send


async def _drain(receive: Any) -> None:
    """Read and forget the body of a request, up to `MAX_DRAINED` bytes: browsers show no answer before they sent it."""
    size, more = 0, True
    while more and size < MAX_DRAINED:
        message = await receive()
        size, more = size + len(message.get("body", b"")), message.get("more_body", False)


async def _refuse(refusal: Refusal, send: Any) -> None:
    body = f"cutslots: {refusal.reason}\n".encode()
    headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"content-length", str(len(body)).encode())]
    headers.append((b"connection", b"close"))  # the rest of the body is not read
    await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _headers(scope: Any) -> dict[str, str]:
    """Return the headers of a request; several of one name are joined by commas, so that two hosts are no host."""
    headers: dict[str, str] = {}
    for name, value in scope["headers"]:
        key, text = name.decode("latin-1").lower(), value.decode("latin-1")
        headers[key] = f"{headers[key]}, {text}" if key in headers else text
    return headers


def _path(scope: Any) -> str:
    return str(scope["path"]).rstrip("/")


def _visitor(scope: Any) -> str:
    """Return the address of a visitor. An upload does not name its session."""
    return str((scope.get("client") or ("unknown",))[0])
