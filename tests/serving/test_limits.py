"""Tests of the limits: bodies, slow clients, the queue, connections, the token, and clients that go."""

from __future__ import annotations

import asyncio
import gzip
import json
import math
import resource
import socket
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.make import encode, wait_for
from tests.serving.running import Running, serving
from vitrail.errors import ConfigError, VitrailError
from vitrail.serving.server import ServeJob, open_socket, serve
from vitrail.serving.settings import ServeSettings
from vitrail.weights.bundle import Bundle


@pytest.fixture(scope="module")
def limited(bundle: Bundle) -> Iterator[Running]:
    limits: dict[str, Any] = {
        "max_body": "10000", "body_memory": "15000", "max_images": 3, "max_queue": 4, "max_connections": 6,
        "max_pixels": 1000, "receive_seconds": 0.4, "token": "secret",
    }  # fmt: skip
    with serving({"flowers": bundle}, **limits) as running:
        yield running


TOKEN = {"Authorization": "Bearer secret"}
HEAD = b"POST / HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer secret\r\n"


class Held:
    """A model that computes only after `release`."""

    def __init__(self, run: Callable[[np.ndarray], Any]) -> None:
        self.run, self.images = run, 0
        self.begun, self.released = threading.Event(), threading.Event()

    def __call__(self, pixels: np.ndarray) -> Any:
        self.begun.set()
        assert self.released.wait(20)
        self.images += len(pixels)
        return self.run(pixels)


@pytest.fixture
def held(limited: Running, monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    batcher = limited.service.models["flowers"].batchers["classes"]
    made = Held(batcher._run)
    monkeypatch.setattr(batcher, "_run", made)
    yield made
    made.released.set()
    wait_for(lambda: accepted(limited) == 0)


def accepted(server: Running) -> int:
    return server.service._accepted


def test_the_token(limited: Running, images: list[bytes]) -> None:
    answer = limited.ask("POST", "/", images[0])
    assert answer.status == 401 and "Authorization: Bearer TOKEN" in answer.json["error"]
    assert limited.ask("POST", "/", images[0], Authorization="Bearer secre").status == 401
    assert limited.ask("POST", "/", b"x" * 3_000_000).status == 401  # more than the socket's buffers hold
    assert limited.ask("GET", "/metrics").status == 401
    assert limited.ask("GET", "/health/ready").status == 200
    for token in (TOKEN["Authorization"], TOKEN["Authorization"].replace("Bearer", "bearer")):
        assert limited.ask("POST", "/", images[0], Authorization=token).status == 200


def test_a_body_that_is_too_large(limited: Running) -> None:
    message = "the body is larger than 10000, the limit of this server"
    answer = limited.ask("POST", "/", b"x" * 10001, **TOKEN)
    assert answer.status == 413 and answer.json["error"] == message
    answer = limited.ask("POST", "/", b"x" * 3_000_000, **TOKEN)  # more than the socket's buffers hold
    assert answer.status == 413 and answer.json["error"] == message
    with limited.connect() as client:  # a body of unknown length
        client.sendall(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
        for _ in range(3):
            client.sendall(b"1000\r\n" + b"x" * 4096 + b"\r\n")
        client.sendall(b"0\r\n\r\n")
        assert b"413" in client.recv(1000)
    with limited.connect() as client:  # a client that asks before it sends
        client.sendall(HEAD + b"Content-Length: 99999\r\n")
        client.sendall(b"Expect: 100-continue\r\n\r\n")
        assert client.recv(1000).startswith(b"HTTP/1.1 413")
    assert limited.metric("vitrail_body_bytes", **TOKEN) == 0


@pytest.mark.slow
@pytest.mark.parametrize("sent", [b"", b"POST / HTTP/1.1\r\nHost:", HEAD + b"Content-Length: 9\r\n\r\nxx"])
def test_a_client_that_is_too_slow(limited: Running, sent: bytes) -> None:
    with limited.connect() as client:
        client.sendall(sent)
        begun = time.monotonic()
        assert client.recv(1000).startswith(b"HTTP/1.1 408")
        assert 0.3 < time.monotonic() - begun < 10


def test_a_full_queue_answers_503(limited: Running, held: Held, images: list[bytes]) -> None:
    files = [("a.png", images[0])] * 2
    with ThreadPoolExecutor(2) as clients:
        waiting = [clients.submit(limited.ask_form, "/predict", *files, **TOKEN) for _ in range(2)]
        wait_for(lambda: accepted(limited) == 4)
        answer = limited.ask("POST", "/", images[0], **TOKEN)
        assert answer.status == 503 and answer.headers["retry-after"] == "1"
        assert "more than 4 images wait" in answer.json["error"]
        assert limited.ask("GET", "/health/live").status == 200
        held.released.set()
        assert [one.result().status for one in waiting] == [200, 200]
    assert limited.ask_form("/predict", *files, *files, **TOKEN).status == 413


def test_images_of_a_client_that_has_gone_are_dropped(limited: Running, held: Held, images: list[bytes]) -> None:
    with ThreadPoolExecutor(1) as clients:
        stays = clients.submit(limited.ask, "POST", "/", images[0], **TOKEN)
        assert held.begun.wait(20)
        with limited.connect() as client:
            client.sendall(HEAD + f"Content-Length: {len(images[1])}\r\n\r\n".encode() + images[1])
            wait_for(lambda: accepted(limited) == 2)
        wait_for(lambda: accepted(limited) == 1)
        held.released.set()
        assert stays.result().status == 200
    assert held.images == 1


def test_too_many_bodies_answer_503(limited: Running) -> None:
    head = HEAD + b"Content-Length: 9000\r\n\r\n"
    with limited.connect() as first, limited.connect() as second:
        first.sendall(head + b"x" * 8000)
        wait_for(lambda: limited.metric("vitrail_body_bytes", **TOKEN) == 8000)
        second.sendall(head + b"x" * 9000)
        answer = second.recv(1000)
        assert answer.startswith(b"HTTP/1.1 503") and b"retry-after: 1" in answer


@pytest.mark.slow
def test_too_many_connections_answer_503(limited: Running) -> None:
    clients = [limited.connect() for _ in range(9)]
    answers = [client.recv(1000) for client in clients]
    for client in clients:
        client.close()
    assert sorted(answer[9:12] for answer in answers) == [b"408"] * 6 + [b"503"] * 3
    wait_for(lambda: limited.ask("GET", "/health/ready").status == 200)


def test_an_image_of_too_many_pixels(limited: Running) -> None:
    answer = limited.ask("POST", "/", encode(np.zeros((20, 51, 3), np.uint8), "PNG"), **TOKEN)
    assert answer.status == 422
    assert answer.json["error"].startswith("image 0 claims 51 x 20 pixels (width x height); this server accepts 1,000")


def test_the_access_log(limited: Running, capfd: pytest.CaptureFixture[str], images: list[bytes]) -> None:
    limited.ask("POST", "/?model=none", images[0], **TOKEN)
    lines: list[dict[str, Any]] = []
    ends = time.monotonic() + 10
    while not lines and time.monotonic() < ends:  # the line is written after the answer was sent
        time.sleep(0.01)
        written = (line for line in capfd.readouterr().err.splitlines() if '"status": 404' in line)
        lines += map(json.loads, written)  # an answer of an earlier test can still be written here
    (line,) = lines
    assert {key: line[key] for key in ("client", "method", "path", "status", "bytes")} == {
        "client": "127.0.0.1", "method": "POST", "path": "/", "status": 404, "bytes": len(images[0]),
    }  # fmt: skip
    assert "secret" not in json.dumps(line)


def test_answers_do_not_wait_for_acknowledgements() -> None:
    async def accepted_socket() -> int:
        """The option TCP_NODELAY of an accepted connection."""
        found: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            taken = writer.get_extra_info("socket")
            found.set_result(taken.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        async with await asyncio.start_server(serve, sock=open_socket(ServeSettings(port=0))) as server:
            with socket.create_connection(server.sockets[0].getsockname()):
                return await found

    assert asyncio.run(accepted_socket()) != 0


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_body": "1GB"}, "max_body=1GB is more than body_memory=256MB"),
        ({"max_body": "huge"}, "max_body"),
        ({"token": "abc\n"}, "token"),
        ({"allow_host": ("a.example:80",)}, "allow_host='a.example:80' is not the name of a host"),
        ({"allow_host": ("",)}, "is not the name of a host"),
        ({"allow_origin": ("a.example",)}, "allow_origin='a.example' is not an origin"),
        ({"allow_origin": ("https://a.example/",)}, "is not an origin"),
        ({"deadline_seconds": math.inf}, "deadline_seconds=inf"),
    ],
)
def test_a_wrong_setting_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ServeSettings(**settings)


def raw_deflate(content: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-15)
    return packer.compress(content) + packer.flush()


@pytest.mark.parametrize(
    ("coding", "pack"),
    [
        ("x-GZIP", gzip.compress),
        ("deflate", zlib.compress),
        ("deflate", raw_deflate),
        ("deflate, identity, gzip", lambda content: gzip.compress(zlib.compress(content))),
    ],
)
def test_compressed_bodies(limited: Running, images: list[bytes], coding: str, pack: Callable[[bytes], bytes]) -> None:
    wanted = limited.ask("POST", "/", images[0], **TOKEN)
    answer = limited.ask("POST", "/", pack(images[0]), Content_Encoding=coding, **TOKEN)
    assert (answer.status, answer.json) == (200, wanted.json)
    message = json.dumps({"input": "data:,"}).encode()
    answer = limited.ask("POST", "/v1/embeddings", pack(message), Content_Encoding=coding, **TOKEN)
    assert answer.status == 400 and "the data URI must be in base64" in answer.json["error"]
    for size, status in ((10_000, 422), (10_001, 413), (9_000_000, 413)):
        assert limited.ask("POST", "/", pack(bytes(size)), Content_Encoding=coding, **TOKEN).status == status
    for broken in (pack(images[0])[:-3], pack(images[0]) + b"x", b"no stream"):
        answer = limited.ask("POST", "/", broken, Content_Encoding=coding, **TOKEN)
        assert answer.status == 400 and answer.json["error"].startswith("Content-Encoding: ")
    assert limited.metric("vitrail_body_bytes", **TOKEN) == 0
    answer = limited.ask("POST", "/", images[0], Content_Encoding="br", **TOKEN)
    assert answer.status == 415 and "'br'" in answer.json["error"] and "gzip" in answer.headers["accept-encoding"]


@pytest.mark.slow
def test_names_of_a_server_on_a_loopback_address(bundle: Bundle, images: list[bytes]) -> None:
    with serving({"flowers": bundle}, allow_host=("Flowers.example.",)) as server:
        for host in ("localhost", "LOCALHOST:80", "127.0.0.1:1", "[::1]:8000", "app.localhost", "flowers.example:7"):
            assert server.ask("POST", "/", images[0], Host=host).status == 200
        for host in ("evil.example", "127.0.0.1.evil.example", "localhost.evil.example:8000", "0.0.0.0", "10.0.0.1"):
            for method, path in (("POST", "/"), ("GET", "/"), ("GET", "/models"), ("GET", "/metrics")):
                answer = server.ask(method, path, images[0] if method == "POST" else None, Host=host)
                assert answer.status == 421 and "--allow-host" in answer.json["error"]
            assert server.ask("GET", "/health/ready", Host=host).status == 200
            assert server.ask("GET", "/health", Host=host).json == {"health": True}
    for settings in ({"token": "secret"}, {"host": "0.0.0.0"}):  # other servers answer under every name
        with serving({"flowers": bundle}, **settings) as server:
            assert server.ask("POST", "/", images[0], Host="flowers.example", **TOKEN).status == 200


def test_pages_of_other_origins(bundle: Bundle, images: list[bytes]) -> None:
    asking = {"Access_Control_Request_Method": "POST", "Access_Control_Request_Headers": "authorization"}
    mine, other = "https://flowers.example", "https://other.example"
    with serving({"flowers": bundle}, token="secret", allow_origin=("https://Flowers.example:443",)) as server:
        granted = server.ask("OPTIONS", "/", Origin=mine, **asking)
        assert granted.status == 200 and granted.headers["access-control-allow-origin"] == mine
        assert "authorization" in granted.headers["access-control-allow-headers"].lower()
        answer = server.ask("POST", "/", images[0], Origin=mine, **TOKEN)
        assert answer.status == 200 and answer.headers["access-control-allow-origin"] == mine
        assert "X-Model" in answer.headers["access-control-expose-headers"]
        assert server.ask("OPTIONS", "/", Origin=other, **asking).status == 400
        assert "access-control-allow-origin" not in server.ask("POST", "/", images[0], Origin=other, **TOKEN).headers


@pytest.mark.slow
def test_an_idle_connection_is_closed_after_the_time_of_the_option(bundle: Bundle) -> None:
    with serving({"flowers": bundle}, keep_alive_seconds=0.1) as server, server.connect() as client:
        client.settimeout(3)  # less than the default of the option
        client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        received = b""
        while part := client.recv(4096):
            received += part
        assert received.startswith(b"HTTP/1.1 200")


def test_too_few_open_files_for_the_connections_are_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda limit: (48, 48))
    monkeypatch.setattr(resource, "setrlimit", lambda limit, value: None)
    job = ServeJob(models={"absent": str(tmp_path / "absent")}, settings=ServeSettings(max_connections=8))
    notes: list[str] = []
    with socket.socket() as listening, pytest.raises(VitrailError, match="absent"):
        serve(job, listening, on_start=lambda: None, on_note=notes.append)
    assert len(notes) == 1 and "max_connections=1" in notes[0] and "ulimit -n" in notes[0]
