"""The outer layer of the server: the token, the limits of a request's body, clients that disconnect, and the access
log."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import time
import zlib
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any

from starlette.responses import JSONResponse

from vitrail.serving.service import RETRY, Refused, Service, log_line
from vitrail.serving.settings import is_loopback

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

PROBES = ("live", "ready", "startup")
"""Names of the probes, which ask for the state of the server."""

PROBE_PATHS = ("/health", *(f"{prefix}/{probe}" for prefix in ("/health", "/v2/health") for probe in PROBES))
"""Paths of the probes, which need no token and may be asked under any name of the server."""

NAMED = (
    *PROBE_PATHS, "/", "/metrics", "/models", "/openapi.json", "/predict", "/explain", "/search", "/v1/embeddings",
    "/v1/models", "/v2",
)  # fmt: skip
"""Paths that metrics name. Other paths are counted together, so that a scan cannot fill the memory."""

WINDOW_BITS = {"gzip": 31, "x-gzip": 31, "deflate": 15}
"""Content encodings that are read, with zlib's number for each format."""

CLIENT_GONE = 499
"""Status in the log of a request whose client closed the connection before the answer."""


class JsonAnswer(JSONResponse):
    """An answer in JSON. Half characters, which stand for bytes of file names that are not UTF-8, are escaped."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode(
            "utf-8", "backslashreplace"
        )


class Guard:
    """Receives the whole body of a request within its limits before the application sees the request. Stops the
    application if the client disconnects."""

    def __init__(self, app: App, service: Service) -> None:
        self._app, self._service, self._settings = app, service, service.settings
        self._held = 0  # bytes of all bodies

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope = {**scope, "path": scope["path"].rstrip("/") or "/"}  # a redirection would lose a proxy's address
        begun, status = time.perf_counter(), CLIENT_GONE

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if self._service.is_draining:  # the client has to connect to another server
                    message["headers"] = [*message.get("headers", ()), (b"connection", b"close")]
            await send(message)

        body = _Body()
        try:
            try:
                await self._receive(scope, receive, body)
                content = await self._decoded(scope, body)
            except Refused as refused:
                headers = {**refused.headers, "Connection": "close"}
                await JsonAnswer({"error": str(refused)}, refused.status, headers)(scope, receive, sending)
            else:
                await self._answer(scope, content, receive, sending)
        except _ClientGone:
            status = CLIENT_GONE
        finally:
            self._hold(-body.size)
            self._record(scope, status, body.size, time.perf_counter() - begun)

    def _check_host(self, scope: Message) -> Refused | None:
        """Return the refusal of a request under a foreign name. A web site can let its own name lead to a loopback
        address, and then read the answers as its own (DNS rebinding)."""
        host = dict(scope["headers"]).get(b"host", b"").decode("latin-1").strip().lower()
        name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
        name = name.removesuffix(".")
        allowed = (one.lower().removesuffix(".") for one in self._settings.allow_host)
        is_known = not host or is_loopback(name) or name in allowed
        if is_known or not self._settings.checks_host or scope["path"] in PROBE_PATHS:
            return None
        return Refused(421, f"Host: {host!r} is not a name of this server; start it with --allow-host {name}")

    async def _decoded(self, scope: Message, body: _Body) -> bytes:
        """Return the body without its content encoding. Raise `Refused` if it is unknown, broken or too large."""
        stated = b",".join(value for name, value in scope["headers"] if name == b"content-encoding")
        codings = [coding.strip().lower() for coding in stated.decode("latin-1").split(",")]
        content = body.take()
        for coding in reversed([coding for coding in codings if coding not in ("", "identity")]) if content else ():
            if coding not in WINDOW_BITS:
                known = ", ".join(WINDOW_BITS)
                raise Refused(415, f"Content-Encoding: {coding!r} is not one of {known}", {"Accept-Encoding": known})
            content = await self._service.parse(_inflate, content, coding, self._settings.body_bytes)
            if len(content) > self._settings.body_bytes:
                raise self._too_large()
            if self._held - body.size + len(content) > self._settings.body_memory_bytes:
                raise _too_many_bodies()
            self._hold(len(content) - body.size)
            body.size = len(content)
        return content

    def _too_large(self) -> Refused:
        return Refused(413, f"the body is larger than {self._settings.max_body}, the limit of this server")

    def _check_token(self, scope: Message) -> Refused | None:
        """Return the refusal of a request that needs the token and has not sent it."""
        is_open = scope["path"] in PROBE_PATHS or (scope["path"] == "/" and scope["method"] in ("GET", "HEAD"))
        if self._settings.token is not None and not is_open:
            scheme, _, given = dict(scope["headers"]).get(b"authorization", b"").partition(b" ")
            if scheme.lower() != b"bearer" or not hmac.compare_digest(given.strip(), self._settings.token.encode()):
                message = "this server needs a token: send the header 'Authorization: Bearer TOKEN'"
                return Refused(401, message, {"WWW-Authenticate": "Bearer"})
        return None

    async def _receive(self, scope: Message, receive: Receive, body: _Body) -> None:
        """Receive the body. Raise `Refused` if the token is missing or the body is too large or too slow, and
        `_ClientGone`."""
        settings, headers = self._settings, dict(scope["headers"])
        stated = headers.get(b"content-length", b"0")
        refused = self._check_host(scope) or self._check_token(scope)
        if refused is None and (not stated.isdigit() or int(stated) > settings.body_bytes):
            refused = self._too_large()
        if refused is not None and b"expect" in headers:  # the client waits before it sends the body
            raise refused
        try:
            async with asyncio.timeout(settings.receive_seconds):
                is_complete = False
                while not is_complete:
                    part, is_complete = await _next_part(receive)
                    if refused is None:
                        refused = self._keep(part, body)
                    # The rest of a refused body is received and discarded, because many clients read no answer before
                    # they have sent it.
        except TimeoutError:
            message = f"the body did not arrive within {settings.receive_seconds:g} seconds, the limit of this server"
            raise refused or Refused(408, message) from None
        if refused is not None:
            raise refused

    def _keep(self, part: bytes, body: _Body) -> Refused | None:
        """Append a part to the body. If the body is refused, return the reason."""
        if body.size + len(part) > self._settings.body_bytes:
            return self._too_large()
        if self._held + len(part) > self._settings.body_memory_bytes:
            return _too_many_bodies()
        self._hold(len(part))
        body.size += len(part)
        body.parts.append(part)
        return None

    def _hold(self, size: int) -> None:
        self._held += size
        self._service.metrics.bodies.set(self._held)

    async def _answer(self, scope: Message, body: bytes, receive: Receive, send: Send) -> None:
        """Run the application. Raise `_ClientGone` if the client closes the connection before the answer."""
        parts = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return parts.pop() if parts else {"type": "http.disconnect"}

        answering = asyncio.ensure_future(self._app(scope, replay, send))
        leaving = asyncio.ensure_future(_until_gone(receive))
        try:
            await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                raise _ClientGone
            await answering
        finally:
            for task in (answering, leaving):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, Exception):
                    await task

    def _record(self, scope: Message, status: int, size: int, seconds: float) -> None:
        path = scope["path"] if scope["path"] in NAMED else "infer" if scope["path"].endswith("/infer") else "other"
        self._service.metrics.requests.labels(path, str(status)).inc()
        self._service.metrics.seconds.labels(path).observe(seconds)
        client = scope.get("client") or ("",)
        log_line(
            client=client[0], method=scope["method"], path=scope["path"], status=status, bytes=size,
            ms=round(1000 * seconds, 2),
        )  # fmt: skip


@dataclass
class _Body:
    parts: list[bytes] = field(default_factory=list)
    size: int = 0

    def take(self) -> bytes:
        """Return the content of the body, and free the received parts."""
        content = b"".join(self.parts)
        self.parts.clear()
        return content


class _ClientGone(Exception):
    """The client closed the connection."""


def _too_many_bodies() -> Refused:
    return Refused(503, "the server holds too many bodies of requests; try again later", RETRY)


def _inflate(content: bytes, coding: str, limit: int) -> bytes:
    """Return decompressed bytes, but at most one more than `limit`. Raise `Refused` for broken ones.

    Bytes after the end are refused, because reading many short members one after the other takes very long.
    """
    bits = WINDOW_BITS[coding]
    if coding == "deflate" and (content[0] & 15 != 8 or int.from_bytes(content[:2], "big") % 31):
        bits = -bits  # without zlib's header, as some clients send it
    reader = zlib.decompressobj(bits)
    try:
        found = reader.decompress(content, limit + 1)
    except zlib.error as error:
        raise Refused(400, f"Content-Encoding: the body is not {coding}: {error}") from None
    if len(found) <= limit and (not reader.eof or reader.unused_data):
        raise Refused(
            400, f"Content-Encoding: the {coding} body {'has bytes after its end' if reader.eof else 'is cut off'}"
        )
    return found


async def _next_part(receive: Receive) -> tuple[bytes, bool]:
    """Return the next part of a body, and True if it is the last one. Raise `_ClientGone`."""
    message = await receive()
    if message["type"] == "http.disconnect":
        raise _ClientGone
    return message.get("body", b""), not message.get("more_body")


async def _until_gone(receive: Receive) -> None:
    with contextlib.suppress(_ClientGone):
        while True:
            await _next_part(receive)
