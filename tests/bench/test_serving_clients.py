"""Tests of the clients: they ask for as long as they should, and count every answer and failure."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from vitrail.bench.serving import Load, Outcome, send_load, send_requests, summarise

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]"


async def with_server(
    answer: Callable[[int], bytes], work: Callable[[int], Awaitable[Any]], seconds: float = 0.0
) -> tuple[Any, list[bytes]]:
    """Run `work(port)` beside a server that answers its n-th request with `answer(n)`, or closes the connection."""
    bodies: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                bodies.append(await reader.readexactly(length))
                await asyncio.sleep(seconds)
                content = answer(len(bodies))
                if not content:
                    break
                writer.write(content)
        except asyncio.IncompleteReadError:
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        return await work(server.sockets[0].getsockname()[1]), bodies
    finally:
        server.close()
        await asyncio.sleep(0.01)


@pytest.mark.slow
def test_a_closed_loop_has_as_many_requests_under_way_as_clients() -> None:
    outcomes, bodies = asyncio.run(
        with_server(lambda _: OK, lambda port: send_load(Load(clients=3), port, [b"a", b"bb"], 0.3), 0.05)
    )
    assert {outcome.status for outcome in outcomes} == {200} and {*bodies} == {b"a", b"bb"}
    assert 9 <= len(outcomes) == len(bodies) <= 21 and all(outcome.seconds >= 0.05 for outcome in outcomes)


@pytest.mark.slow
def test_an_open_loop_does_not_wait_for_answers() -> None:
    load = Load(rate=200.0)
    outcomes, bodies = asyncio.run(
        with_server(lambda _: OK, lambda port: send_load(load, port, [b"a"], 0.3, seed=3), 0.2)
    )
    assert 35 <= len(outcomes) == len(bodies) <= 90  # one connection would have answered twice
    again = asyncio.run(with_server(lambda _: OK, lambda port: send_load(load, port, [b"a"], 0.3, seed=3)))
    assert len(again[1]) == len(bodies)


def test_requests_are_divided_among_clients() -> None:
    outcomes, bodies = asyncio.run(with_server(lambda _: OK, lambda port: send_requests(4, 10, port, [b"a", b"bb"])))
    assert len(outcomes) == len(bodies) == 10 and {outcome.status for outcome in outcomes} == {200}
    assert asyncio.run(with_server(lambda _: OK, lambda port: send_requests(4, 2, port, [b"a"])))[1] == [b"a", b"a"]


@pytest.mark.slow
def test_failures_are_counted() -> None:
    busy = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
    answers = {1: busy, 2: b"", 0: OK}
    outcomes, bodies = asyncio.run(
        with_server(
            lambda number: answers[number % 3], lambda port: send_load(Load(clients=1), port, [b"a"], 0.5), 0.005
        )
    )
    assert [one.status for one in outcomes] == [(200, 503, 0)[number % 3] for number in range(1, len(outcomes) + 1)]
    assert len(bodies) == len(outcomes) > 2
    closed = asyncio.run(send_load(Load(clients=1), 1, [b"a"], 0.01))
    assert closed and {outcome.status for outcome in closed} == {0}


def test_the_summary() -> None:
    outcomes = [Outcome(0.1 * number, 200) for number in range(1, 21)] + [Outcome(0.05, 503)]
    found = summarise("vitrail", Load(clients=8), outcomes, 4.0, 2.1, 5000)
    assert [found[name] for name in ("load", "requests", "errors", "memory")] == ["8 clients", 21, 1, 5000]
    measured = [found[name] for name in ("throughput", "goodput", "p50", "p95", "cpu_seconds")]
    assert measured == pytest.approx([5.0, 2.5, 1.0, 1.9, 0.1])
    assert Load(rate=12.34).name == "12.3 req/s" and Load(clients=1).name == "1 client"
