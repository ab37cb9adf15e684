"""A small hub on this machine that tests can break. It answers the requests that huggingface_hub makes for downloads.

Data sets are repositories whose names begin with "datasets/", as in the addresses of the real hub.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote, unquote, urlsplit

import pytest

from vitrail.hub import client


@contextmanager
def serving(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Start the server, and make it the only hub that the client knows. Waits between attempts take no time."""
    for name in list(os.environ):
        if name.startswith(("HF_", "HUGGING")) or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    monkeypatch.delenv("TRANSFORMERS_OFFLINE", raising=False)
    monkeypatch.setenv("HF_HOME", str(home))
    monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")  # which asks the hub for more than the files
    look_up = socket.getaddrinfo

    def local_only(host: Any, *arguments: Any, **options: Any) -> Any:
        assert host in ("127.0.0.1", "localhost"), f"a test asks for {host}"
        return look_up(host, *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", local_only)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    with Hub() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.endpoint)
        restart_client()
        yield server
    restart_client()


def restart_client() -> None:
    """Remove the client's modules, so that the next use imports it again and reads the environment."""
    if "huggingface_hub" in sys.modules:
        close_session = getattr(sys.modules["huggingface_hub"], "close_session", lambda: None)
        close_session()  # Reading the name imports more parts of the client, so the list below is made afterwards.
    for name in [name for name in sys.modules if name.split(".")[0] == "huggingface_hub"]:
        del sys.modules[name]
    client.cache_clear()


@dataclass
class Repository:
    """Files by commit. As on the real hub, a gated repository shows its list of files to everyone, but not the
    files."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    token: str | None = None
    """Token with which the files of a gated repository can be read."""

    def commit(self, files: Mapping[str, bytes], ref: str = "main") -> str:
        """Add a commit, let `ref` point to it, and return its hash."""
        listed = repr(sorted(files.items())) + repr(list(self.commits))
        commit = hashlib.sha1(listed.encode()).hexdigest()
        self.commits[commit] = dict(files)
        self.refs[ref] = commit
        return commit

    def resolve(self, revision: str) -> str | None:
        return revision if revision in self.commits else self.refs.get(revision)


class Hub:
    """The server, inside `with Hub() as hub`. `requests` lists what it was asked, as "GET /path"."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.requests: list[str] = []
        self.status: int | None = None
        """Status of every answer, if it is set."""
        self.cut: dict[str, list[int]] = {}
        """By file: number of bytes after which the next answers break off. Answers that are not listed are complete."""
        self.shrunk: dict[str, int] = {}
        """By file: number of its bytes that are served, as if they were all."""
        self.altered: dict[str, bytes] = {}
        """By file: other content of the same length that is served."""
        self.stalled: dict[str, int] = {}
        """By file: number of bytes after which its answers stall."""
        self.closing = threading.Event()
        hub = self

        class Handler(_Handler):
            state = hub

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self.port = self._server.server_address[1]
        self.endpoint = f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop the server, so that connections are refused."""
        self.closing.set()
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
            self._server.server_close()

    def add(self, name: str, files: Mapping[str, bytes]) -> str:
        """Add a repository with one commit, and return its hash."""
        return self.repositories.setdefault(name, Repository()).commit(files)

    def fetched(self) -> list[str]:
        """Return the names of the files that were sent, in order, and forget all requests."""
        names = [request.rpartition("/")[2] for request in self.requests if request.startswith("GET /stored/")]
        self.requests.clear()
        return names


class _Handler(BaseHTTPRequestHandler):
    state: Hub

    def log_message(self, *arguments: object) -> None:
        """Not to the terminal."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = urlsplit(self.path).path
        self.state.requests.append(f"{self.command} {path}")
        if self.state.status is not None:
            return self._send(self.state.status, b"out of order")
        parts = [unquote(part) for part in path.strip("/").split("/")]  # a revision may have slashes of its own
        is_stored = parts[0] == "stored"
        if is_stored or parts[:2] == ["api", "models"]:
            parts = parts[1 if is_stored else 2 :]
        elif parts[0] == "api":
            parts = parts[1:]
        length = 3 if parts[0] == "datasets" else 2
        name, parts = "/".join(parts[:length]), parts[length:]
        if is_stored:
            return self._stored(name, parts[0], "/".join(parts[1:]))
        repository = self.state.repositories.get(name)
        if repository is None:  # the same answer as for a private repository
            return self._fail(401, "RepoNotFound", "Invalid username or password.")
        if parts == ["refs"]:
            return self._refs(repository)
        if parts[0] == "resolve":
            return self._resolve(repository, name, parts)
        commit = repository.resolve(parts[1])
        if commit is None:
            return self._fail(404, "RevisionNotFound", f"Invalid rev id: {parts[1]}")
        files = [{"rfilename": file} for file in repository.commits[commit]]
        listed = {"id": name.removeprefix("datasets/"), "sha": commit, "siblings": files, "tags": [], "private": False}
        return self._json(listed)

    def _refs(self, repository: Repository) -> None:
        refs = [
            {"name": name, "ref": f"refs/heads/{name}", "targetCommit": commit}
            for name, commit in repository.refs.items()
        ]
        self._json({"branches": refs, "converts": [], "tags": []})

    def _resolve(self, repository: Repository, name: str, parts: list[str]) -> None:
        """Describe the file, and redirect to another host, which has the bytes."""
        commit, file = repository.resolve(parts[1]), "/".join(parts[2:])
        if commit is None:
            return self._fail(404, "RevisionNotFound", f"Invalid rev id: {parts[1]}")
        if repository.token is not None and self.headers["Authorization"] != f"Bearer {repository.token}":
            return self._fail(401, "GatedRepo", "Access to this model is restricted.")
        content = repository.commits[commit].get(file)
        if content is None:
            return self._fail(404, "EntryNotFound", "Entry not found")
        return self._send(
            302,
            b"",
            {
                "X-Repo-Commit": commit,
                "X-Linked-Etag": f'"{hashlib.sha256(content).hexdigest()}"',
                "X-Linked-Size": str(len(content)),
                "Location": f"http://localhost:{self.state.port}/stored/{name}/{commit}/{quote(file)}",
            },
        )

    def _stored(self, name: str, commit: str, file: str) -> None:
        content = self.state.repositories[name].commits[commit][file]
        content = self.state.altered.get(file, content)[: self.state.shrunk.get(file)]
        headers = {"ETag": f'"{hashlib.sha256(content).hexdigest()}"', "Accept-Ranges": "bytes"}
        status, start = 200, 0
        if self.headers["Range"]:
            start = int(self.headers["Range"].removeprefix("bytes=").partition("-")[0])
            status, headers["Content-Range"] = 206, f"bytes {start}-{len(content) - 1}/{len(content)}"
        cut = self.state.cut.get(file)
        stalled = self.state.stalled.get(file)
        self._send(status, content[start:], headers, cut.pop(0) if cut else stalled)
        if stalled is not None and self.command == "GET":
            self.wfile.flush()
            self.state.closing.wait()

    def _json(self, content: object) -> None:
        self._send(200, json.dumps(content).encode(), {"Content-Type": "application/json"})

    def _fail(self, status: int, code: str, message: str) -> None:
        self._send(status, b"{}", {"X-Error-Code": code, "X-Error-Message": message})

    def _send(self, status: int, body: bytes, headers: Mapping[str, str] | None = None, cut: int | None = None) -> None:
        """Send an answer. With `cut`, send only this number of the announced bytes."""
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[:cut])


def cut_off(hub: Hub, monkeypatch: pytest.MonkeyPatch, way: str) -> str:
    """Make the hub unreachable ("offline", "down" or "broken"), and return the expected message."""
    if way == "offline":
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        return "offline mode is on (HF_HUB_OFFLINE)"
    if way == "down":
        hub.close()
        return "the hub at http://127.0.0.1"
    hub.status = 503
    return f"the hub at {hub.endpoint} answers with an error (503"
