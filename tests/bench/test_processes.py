"""Tests of objects in worker processes: calls, errors and ends."""

from __future__ import annotations

import os
import signal

import pytest

from vitrail.bench.workload import ProcessKilled, Worker
from vitrail.errors import ConfigError


class Counter:
    """An object with state that lasts between calls."""

    def __init__(self, start: int) -> None:
        if start < 0:
            raise ConfigError(f"start={start} is negative")
        self.value = start

    def next(self) -> int:
        self.value += 1
        return self.value

    def process(self) -> int:
        return os.getpid()

    def refuse(self) -> None:
        raise ConfigError("not now")

    def stumble(self) -> None:
        raise Unsendable(lambda: None)

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class Unsendable(Exception):
    """An object that cannot be pickled."""


@pytest.mark.slow
def test_a_process_keeps_its_object_until_it_is_closed() -> None:
    one, two = Worker(Counter, 3), Worker(Counter, 10)
    assert [one.call("next"), two.call("next"), one.call("next")] == [4, 11, 5]
    processes = {one.call("process"), two.call("process"), os.getpid()}
    assert len(processes) == 3
    one.close()
    assert two.call("next") == 12
    two.close()


@pytest.mark.slow
def test_errors_come_back_as_they_are_or_in_words() -> None:
    with pytest.raises(ConfigError, match="start=-1 is negative"):
        Worker(Counter, -1)
    for method, words in (("refuse", "^not now$"), ("stumble", "^Unsendable: <function")):
        worker = Worker(Counter, 0)
        with pytest.raises(Exception, match=words):
            worker.call(method)
        worker.close()


def test_a_death_is_told_apart() -> None:
    worker = Worker(Counter, 0)
    with pytest.raises(ProcessKilled, match="ended with exit code -9 and no answer"):
        worker.call("die")
    worker.close()
