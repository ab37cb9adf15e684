"""Tests of the supervisor with workers that serve nothing. tests/cli/test_serve.py has workers that do."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from multiprocessing.connection import Connection

import pytest

from vitrail.errors import ProcessError
from vitrail.serving.server import Supervisor, Work
from vitrail.serving.service import FOLDER


def end_at_once(number: int, listening: socket.socket, told: Connection) -> None:
    os._exit(3)


def sleep_on(number: int, listening: socket.socket, told: Connection) -> None:
    """Do not stop after SIGTERM, as a worker with a request that takes long."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    told.send(None)
    time.sleep(600)


def end_by_signal(number: int, listening: socket.socket, told: Connection) -> None:
    os.kill(os.getpid(), signal.SIGRTMIN + 6)  # which has no name


@pytest.mark.slow
@pytest.mark.parametrize(("work", "cause"), [(end_at_once, "exit code 3"), (end_by_signal, r"signal \d+")])
def test_workers_that_end_before_they_listen(work: Work, cause: str) -> None:
    message = f"{cause} before all of them had started"
    with socket.socket() as listening, pytest.raises(ProcessError, match=message):
        Supervisor(1, work, listening, lambda: None).run()
    assert FOLDER not in os.environ


@pytest.mark.slow
def test_a_second_signal_ends_workers_at_once() -> None:
    def stop() -> None:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.3)

    before = signal.getsignal(signal.SIGTERM)
    with socket.socket() as listening:
        begun = time.monotonic()
        Supervisor(1, sleep_on, listening, threading.Thread(target=stop).start).run()
    assert time.monotonic() - begun < 120 and signal.getsignal(signal.SIGTERM) is before
