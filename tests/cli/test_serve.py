"""Tests of `vitrail serve`: wrong usage in this process, and real server processes."""

from __future__ import annotations

import base64
import http.client
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.make import encode, wait_for
from tests.serving.conftest import make_bundle
from tests.serving.running import Running
from vitrail.cli import main
from vitrail.models.vit_config import ViTConfig
from vitrail.weights.bundle import load_bundle, weights_sha256


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder with a model of random weights."""
    return make_bundle().save(tmp_path_factory.mktemp("runs") / "flowers" / "model").parent


@pytest.fixture(scope="module")
def slow_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that needs some milliseconds for an image, so that requests queue."""
    config = ViTConfig(
        image_size=(64, 48), patch_size=(4, 4), width=96, depth=6, heads=3, mlp_width=192, num_classes=3
    )  # fmt: skip
    return make_bundle(config).save(tmp_path_factory.mktemp("runs") / "slow" / "model").parent


@contextmanager
def started(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], Running, list[str]]]:
    """Start `vitrail serve` as a process. Yield it with a client, and the lines of its log, which grow."""
    command = [sys.executable, "-m", "vitrail", "serve", *arguments, "--port", "0"]
    environment = {**os.environ, "VITRAIL_TOKEN": ""}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    lines: list[str] = []
    try:
        port = None
        while port is None:
            lines.append(process.stderr.readline())
            assert lines[-1], "".join(lines)
            port = re.search(r"serving .* at http://127.0.0.1:(\d+)", lines[-1])
        reader = threading.Thread(target=lambda: lines.extend(process.stderr or ()), daemon=True)
        reader.start()
        service: Any = None
        yield process, Running(service, int(port[1])), lines
        reader.join(0 if process.poll() is None else 5)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        process.stderr.close()


def picture(draws: np.random.Generator) -> bytes:
    return encode(draws.integers(0, 256, (int(draws.integers(5, 60)), 41, 3), dtype=np.uint8), "JPEG")


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["1", "2"])
def test_stopping_loses_no_request(slow_model: Path, workers: str) -> None:
    images = [picture(np.random.default_rng(seed)) for seed in range(8)]
    with started(str(slow_model), "--drain-seconds", "2", "--workers", workers) as (process, server, lines):
        is_stopping = threading.Event()
        statuses: list[int] = []

        def client(number: int) -> None:
            """Ask again and again until the server says that it closes the connection, as a load balancer sees it."""
            while True:
                answer = server.ask("POST", "/", images[number % 8])
                statuses.append(answer.status)
                if is_stopping.is_set() and answer.headers.get("connection") == "close":
                    return

        with ThreadPoolExecutor(16) as clients:
            running = [clients.submit(client, number) for number in range(16)]
            while len(statuses) < 50:
                time.sleep(0.01)
            process.send_signal(signal.SIGTERM)
            is_stopping.set()
            time.sleep(0.25)
            assert server.ask("GET", "/health/ready").status == 503
            assert server.ask("GET", "/health/live").status == 200
            for one in running:
                one.result()
        assert process.wait(20) == 0
    assert {*statuses} == {200} and len(statuses) > 60
    logged = [json.loads(line)["status"] for line in lines if line.startswith("{") and '"POST"' in line]
    assert len(logged) == len(statuses)


@pytest.mark.slow
def test_requests_that_are_under_way_at_the_end_are_answered(slow_model: Path) -> None:
    draws = np.random.default_rng(1)
    files = [("a.jpg", picture(draws)) for _ in range(60)]
    with started(str(slow_model), "--drain-seconds", "0") as (process, server, _):
        with ThreadPoolExecutor(4) as clients:
            answers = [clients.submit(server.ask_form, "/predict", *files) for _ in range(4)]
            while server.metric("vitrail_images") < 240:
                time.sleep(0.005)
            process.send_signal(signal.SIGTERM)
            assert all(len(one.result().json["results"]) == 60 for one in answers)
        assert process.wait(20) == 0


@pytest.mark.slow
def test_a_second_signal_stops_at_once(model: Path) -> None:
    with started(str(model), "--drain-seconds", "60") as (process, server, _):
        process.send_signal(signal.SIGINT)
        while server.ask("GET", "/health/ready").status == 200:
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0


@pytest.mark.slow
def test_workers_share_a_port_and_are_replaced(slow_model: Path) -> None:
    """A killed worker takes its own requests with it and no others, a worker that is asked to stop takes none, and the
    metrics are those of all workers that ever were."""
    images = [picture(np.random.default_rng(seed)) for seed in range(8)]
    with started(str(slow_model), "--workers", "2", "--drain-seconds", "0") as (process, server, lines):
        is_over = threading.Event()
        answered = [0] * 8

        def client(number: int) -> int:
            """Ask again and again, each time with a new connection. Return the number of broken connections."""
            broken = 0
            while not is_over.is_set():
                try:
                    assert server.ask("POST", "/", images[number]).status == 200
                    answered[number] += 1
                except (OSError, http.client.HTTPException):
                    broken += 1
            return broken

        def under_load(change: Callable[[], None]) -> int:
            """Make a change while clients ask. Return the number of broken connections."""
            is_over.clear()
            with ThreadPoolExecutor(8) as clients:
                running = [clients.submit(client, number) for number in range(8)]
                before = sum(answered)
                wait_for(lambda: sum(answered) > before + 20)
                count = events(lines, "worker started")
                change()
                wait_for(lambda: events(lines, "worker started") == count + 1)
                before = sum(answered)
                wait_for(lambda: sum(answered) > before + 20)
                is_over.set()
                return sum(one.result() for one in running)

        first, second = workers_of(lines)
        assert under_load(lambda: os.kill(first, signal.SIGKILL)) <= 8
        assert '"cause": "signal SIGKILL"' in "".join(lines)
        assert under_load(lambda: os.kill(second, signal.SIGTERM)) == 0
        assert '"cause": "exit code 0"' in "".join(lines)
        for _ in range(8):  # whichever worker answers
            assert server.metric("vitrail_ready") == 2
            # A killed worker may have sent answers that it had not counted yet, at most one to each client.
            assert server.metric('vitrail_requests_total{path="/",status="200"}') >= sum(answered) - 8
        third, fourth = workers_of(lines)[-2:]
        process.kill()
        wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in (third, fourth)))


def workers_of(lines: list[str]) -> list[int]:
    """Processes of workers, in the order in which they started."""
    return [json.loads(line)["pid"] for line in lines if '"event": "worker started"' in line]


@pytest.mark.slow
def test_workers_that_cannot_start(model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = Path(shutil.copytree(model / "model", tmp_path / "broken"))
    (path / "model.safetensors").write_bytes(b"")
    assert main(["serve", str(path), "--workers", "2", "--port", "0"]) == 2
    assert capfd.readouterr().err.count("model.safetensors was altered") == 1


@pytest.mark.slow
def test_a_model_is_replaced_without_a_lost_request(slow_model: Path, tmp_path: Path) -> None:
    """Answers come from the model that their hash names, with its names of classes, and none is lost. The memory of
    replaced models is freed."""
    path = Path(shutil.copytree(slow_model, tmp_path / "slow"))
    images = [picture(np.random.default_rng(seed)) for seed in range(4)]
    variants = [load_bundle(slow_model)]
    for number in range(1, 3):
        made = load_bundle(slow_model)
        for parameter in made.network.parameters():
            parameter.data.mul_(1 + 0.1 * number)
        variants.append(replace(made, classes=tuple(f"{number} {name}" for name in made.classes)))
    wanted = {weights_sha256(one.network): [one.predict([image])[0].ranking for image in images] for one in variants}
    with started(str(path), "--watch", "--drain-seconds", "0") as (process, server, lines):
        is_over = threading.Event()

        def client(number: int) -> list[tuple[int, str]]:
            found = []
            while not is_over.is_set():
                answer = server.ask("POST", "/", images[number % 4])
                found.append((answer.status, answer.headers.get("x-model-sha256", "")))
                if answer.status == 200:
                    ranking = wanted[found[-1][1]][number % 4]
                    assert [one["label"] for one in answer.json] == [label for label, _ in ranking]
                    scores = [one["score"] for one in answer.json]
                    np.testing.assert_allclose(scores, [p for _, p in ranking], atol=1e-4)
            return found

        with ThreadPoolExecutor(8) as clients:
            running = [clients.submit(client, number) for number in range(8)]
            sizes = []
            for turn in range(6):
                if turn % 2:  # a half-written model first
                    weights = path / "model" / "model.safetensors"
                    weights.write_bytes(weights.read_bytes()[:1000])
                    wait_for(lambda turn=turn: events(lines, "model refused") == (turn + 1) // 2)
                variants[(turn + 1) % 3].save(path / "model", overwrite=True)
                wait_for(lambda turn=turn: events(lines, "model replaced") == turn + 1)
                sizes.append(memory(process.pid))
            is_over.set()
            found = [item for one in running for item in one.result()]
    assert {status for status, _ in found} == {200} and {sha256 for _, sha256 in found} == {*wanted}
    assert sizes[-1] - sizes[1] < 20e6


def events(lines: list[str], name: str) -> int:
    """Number of events of this name in a log."""
    return sum(f'"event": "{name}"' in line for line in lines)


@pytest.mark.slow
def test_a_thousand_connections_at_once(slow_model: Path) -> None:
    images = [picture(np.random.default_rng(seed)) for seed in range(8)]
    with started(str(slow_model), "--max-queue", "64") as (process, server, _):
        before = memory(process.pid)
        barrier = threading.Barrier(1000)

        def client(number: int) -> int:
            barrier.wait(60)
            return server.ask("POST", "/", images[number % 8]).status

        with ThreadPoolExecutor(1000) as clients:
            statuses = list(clients.map(client, range(1000)))
        assert {*statuses} == {200, 503} and statuses.count(200) >= 64
        assert server.ask("POST", "/", images[0]).status == 200
        assert memory(process.pid) - before < 300e6


def memory(process: int) -> float:
    """Resident bytes of a process."""
    (line,) = [line for line in Path(f"/proc/{process}/status").read_text().splitlines() if line.startswith("VmRSS")]
    return 1024 * float(line.split()[1])


@pytest.mark.slow
def test_ten_thousand_mutated_requests(model: Path) -> None:
    """No request crashes or stops the server, whatever it contains, and the memory stays bounded."""
    draws = random.Random(0)
    pixels = np.random.default_rng(0).integers(0, 256, (23, 31, 3), dtype=np.uint8)
    image, jpeg = (encode(pixels, kind) for kind in ("PNG", "JPEG"))
    with started(str(model), "--receive-seconds", "0.2") as (process, server, lines):
        seeds = list(seed_requests(image, jpeg))
        for seed in seeds:
            assert send(server, seed).startswith(b"HTTP/1.1 200"), seed[:200]
        requests = [mutated(draws.choice(seeds), draws) for _ in range(10_000)]
        with ThreadPoolExecutor(16) as clients:  # many wait for a time-out, because their body is too short
            answers = list(clients.map(lambda content: send(server, content), requests[:2000]))
            settled = memory(process.pid)
            answers += clients.map(lambda content: send(server, content), requests[2000:])
        statuses = {answer[9:12] for answer in answers}
        refusals = {b"400", b"401", b"404", b"405", b"408", b"411", b"413", b"415", b"421", b"422", b"501"}
        assert statuses <= {b"", b"200", *refusals}
        assert process.poll() is None
        assert send(server, seeds[0]).startswith(b"HTTP/1.1 200")
        assert memory(process.pid) - settled < 30e6
    assert not [line for line in lines if "Traceback" in line]


def seed_requests(image: bytes, jpeg: bytes) -> Iterator[bytes]:
    """Requests of every path that takes images."""
    text = base64.b64encode(image).decode()
    tensor = {"name": "images", "shape": [1, 12, 10, 3], "datatype": "UINT8", "data": [7] * 360}
    files = {"name": "images", "shape": [1], "datatype": "BYTES", "data": [text]}
    binary = {**tensor, "parameters": {"binary_data_size": 360}}
    del binary["data"]
    message = json.dumps({"inputs": [binary], "outputs": [{"name": "logits"}]}).encode()
    form = b'--l\r\nContent-Disposition: form-data; name="f"; filename="a.png"\r\n\r\n' + image + b"\r\n--l--\r\n"
    yield request("/", image)
    yield request("/?model=flowers", jpeg)
    yield request("/", json.dumps({"inputs": text, "parameters": {"top_k": 2}}).encode(), "application/json")
    yield request("/predict?top=2", form, "multipart/form-data; boundary=l")
    yield request("/v1/embeddings", json.dumps({"input": f"data:image/png;base64,{text}"}).encode())
    for one in (tensor, files):
        yield request("/v2/models/flowers/infer", json.dumps({"inputs": [one]}).encode())
    yield request(
        "/v2/models/flowers/infer", message + bytes(360), extra=f"Inference-Header-Content-Length: {len(message)}\r\n"
    )


def request(path: str, body: bytes, kind: str = "image/png", extra: str = "") -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {kind}\r\n{extra}Content-Length: {len(body)}\r\n"
    return f"{head}Connection: close\r\n\r\n".encode() + body


def mutated(content: bytes, draws: random.Random) -> bytes:
    """Change some bytes of a request, most often of its body, and keep its length right most of the time."""
    head, _, body = content.partition(b"\r\n\r\n")
    is_head = draws.random() < 0.2
    part = bytearray(head if is_head else body)
    changes: list[Callable[[int], None]] = [
        lambda place: part.__setitem__(slice(place, place + 1), bytes([draws.randrange(256)])),
        lambda place: part.__delitem__(slice(place, place + draws.randrange(1, 20))),
        lambda place: part.__setitem__(slice(place, place), part[: draws.randrange(30)]),
        lambda place: part.__setitem__(slice(place, place), draws.choice([b"-1", b"1e999", b"[" * 40, b"null", b'"'])),
    ]
    for _ in range(draws.randrange(1, 6)):
        draws.choice(changes)(draws.randrange(len(part) + 1))
    if is_head:
        return bytes(part) + b"\r\n\r\n" + body
    if draws.random() < 0.97:
        head = re.sub(rb"(\r\nContent-Length: )\d+", rb"\g<1>%d" % len(part), head)
    return head + b"\r\n\r\n" + bytes(part)


def send(server: Running, content: bytes) -> bytes:
    """Send a request as it is, and return the answer, or nothing if the connection was closed."""
    with server.connect() as client:
        try:
            client.sendall(content)
            parts = []
            while part := client.recv(65536):
                parts.append(part)
            return b"".join(parts)
        except ConnectionError:
            return b""
