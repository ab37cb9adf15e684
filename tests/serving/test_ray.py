"""Tests of the class for Ray Serve, called as Ray Serve calls it: with Starlette's requests from a real server."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from starlette.requests import Request

from tests.serving.running import Running
from vitrail import load
from vitrail.errors import ConfigError, DataError
from vitrail.serving.ray import ModelDeployment
from vitrail.weights.bundle import Bundle, weights_sha256


@contextmanager
def running(deployment: ModelDeployment, prefix: str = "") -> Iterator[Running]:
    """Run a server that does what the replicas of Ray Serve do."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        scope = {**scope, "root_path": prefix}
        answer = await deployment(Request(scope, receive))
        await answer(scope, receive, send)

    server = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_level="error"))
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            service: Any = None
            yield Running(service, listening.getsockname()[1])
        finally:
            server.should_exit = True
            thread.join(20)


@pytest.fixture(scope="module")
def model(bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bundle.save(tmp_path_factory.mktemp("models") / "flowers")


@pytest.mark.slow
def test_all_paths_are_answered(model: Path, bundle: Bundle, images: list[bytes]) -> None:
    with running(ModelDeployment(str(model), f"again={model}", max_batch=4)) as server:
        answer = server.ask_form("/predict?model=again", ("a.png", images[0]), ("b.png", b"no image"))
        assert answer.status == 200 and answer.headers["x-model-sha256"] == weights_sha256(bundle.network)
        (wanted,) = bundle.predict([images[0]])
        first, second = answer.json["results"]
        assert [one["label"] for one in first["predictions"]] == [label for label, _ in wanted.ranking]
        assert "error" in second
        assert server.ask("POST", "/", b"no image").status == 422
        assert server.ask("GET", "/nowhere").status == 404
        assert server.ask("GET", "/health/ready").json == {"ready": True}
        assert server.ask("GET", "/").body.startswith(b"<!doctype html>")


def test_a_prefix_and_a_token(model: Path, images: list[bytes]) -> None:
    with running(ModelDeployment(f"flowers={model}", max_batch=4, token="secret"), "/vision") as server:
        assert server.ask("GET", "/vision/health/ready").status == 200
        assert server.ask("POST", "/vision/", images[0]).status == 401
        assert server.ask("POST", "/vision/", images[0], Authorization="Bearer secret").status == 200
        assert server.ask("POST", "/vision", images[0], Authorization="Bearer secret").status == 200


def test_the_token_of_the_environment(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VITRAIL_TOKEN", "secret")
    with running(ModelDeployment(str(model), max_batch=4)) as server:
        assert server.ask("GET", "/metrics").status == 401
        assert server.ask("GET", "/metrics", Authorization="Bearer secret").status == 200


def test_the_runtime_the_index_and_the_notes(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(DataError, match="features"):
        ModelDeployment(str(model), index=tmp_path)
    noted = replace(load(model), notes=("it was assumed",))
    monkeypatch.setattr("vitrail.serving.server.load", lambda *_, **__: noted)
    asked: list[str] = []
    monkeypatch.setattr("vitrail.serving.server.with_engine", lambda one, engine, **_: asked.append(engine) or one)
    ModelDeployment(str(model), max_batch=4)
    ModelDeployment(str(model), max_batch=4, engine="auto")
    assert asked == ["torch", "auto"] and "it was assumed" in capfd.readouterr().err


@pytest.mark.parametrize("settings", [{"workers": 2}, {"port": 80}, {"watch": True}, {"max_connections": 9}])
def test_settings_of_the_framework_are_refused(settings: dict[str, int], model: Path) -> None:
    with pytest.raises(ConfigError, match=f"^{next(iter(settings))}="):
        ModelDeployment(str(model), **settings)
