"""Servers in this process, with real sockets, and clients that speak plain HTTP."""

from __future__ import annotations

import base64
import http.client
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from vitrail.analysis.images import Overlays
from vitrail.evaluation.features.index import FeatureIndex
from vitrail.serving.server import Server, open_socket
from vitrail.serving.service import Service
from vitrail.serving.settings import ServeSettings
from vitrail.weights.bundle import Bundle


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Running:
    service: Service
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def ask(self, method: str, path: str, body: bytes | None = None, **headers: str) -> Answer:
        """Send one request. Underscores in the names of headers are dashes."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        try:
            names = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method, path, body, names)
            answer = connection.getresponse()
            return Answer(answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read())
        finally:
            connection.close()

    def ask_json(self, path: str, content: Any, **headers: str) -> Answer:
        return self.ask("POST", path, json.dumps(content).encode(), Content_Type="application/json", **headers)

    def ask_form(self, path: str, *files: tuple[str, bytes], **headers: str) -> Answer:
        """Send files as a browser does."""
        parts = []
        for name, content in files:
            head = f'--limit\r\nContent-Disposition: form-data; name="file"; filename="{name}"\r\n\r\n'
            parts.append(head.encode() + content + b"\r\n")
        body = b"".join([*parts, b"--limit--\r\n"])
        return self.ask("POST", path, body, Content_Type="multipart/form-data; boundary=limit", **headers)

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=20)

    def metric(self, line: str, **headers: str) -> float:
        """The value of a metric, by its name with its labels."""
        lines = self.ask("GET", "/metrics", **headers).body.decode().splitlines()
        return next(float(one.split()[-1]) for one in lines if one.startswith(f"{line} "))


@contextmanager
def serving(bundles: dict[str, Bundle], index: FeatureIndex | None = None, **settings: Any) -> Iterator[Running]:
    made = ServeSettings(**{"port": 0, "max_batch": 4, "drain_seconds": 0.0, **settings})
    service = Service(bundles, made, overlays=Overlays(), index=index)
    started = threading.Event()
    server = Server(service, started.set)
    with open_socket(made) as listening:
        port = listening.getsockname()[1]
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            assert started.wait(20)
            yield Running(service, port)
        finally:
            server.should_exit = True
            thread.join(20)
            assert not thread.is_alive()


def data_uri(image: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(image).decode()
