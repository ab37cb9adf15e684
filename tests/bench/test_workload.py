"""Tests of workloads, of interleaved timing, and of objects in worker processes: calls, errors and ends."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from functools import partial

import pytest

from tests.bench.conftest import MakeWork
from vitrail.bench.workload import ProcessKilled, Worker, interleave
from vitrail.errors import ConfigError
from vitrail.models.cost import activation_bytes, training_bytes


def test_costs_are_of_the_whole_batch(tiny_work: MakeWork) -> None:
    work = tiny_work(batch=4)
    assert work.flops == 4 * work.config.training_flops()
    assert work.activation_bytes == 4 * activation_bytes(work.config)
    assert work.predicted_bytes == training_bytes(work.config, 4)
    infer = tiny_work(batch=4, task="infer")
    assert infer.flops == 4 * infer.config.inference_flops() < infer.whole_flops == 8 * infer.config.macs()
    assert work.flops < work.whole_flops == 4 * replace(work.config, pool="gap", class_token=True).training_flops()
    assert infer.predicted_bytes is None and infer.activation_bytes is None
    assert tiny_work(task="infer", num_classes=0).flops > 0
    float8 = tiny_work(precision="bf16", float8=True)
    assert float8.predicted_bytes is None and float8.activation_bytes is None
    assert float8.plain()["precision"] == "float8"
    plain = json.loads(json.dumps(work.plain()))
    assert (plain["image_size"], plain["batch_size"], plain["precision"]) == ([28, 21], 4, "float32")


def test_rounds_run_every_timer_once_in_turn() -> None:
    calls: list[str] = []

    def timer(name: str) -> float:
        calls.append(name)
        return float(len(calls))

    times = interleave({name: partial(timer, name) for name in "abc"}, repetitions=2, warmup=1)
    assert "".join(calls) == "abc" * 3
    assert times == {"a": [4.0, 7.0], "b": [5.0, 8.0], "c": [6.0, 9.0]}, "what warmed up does not count"


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
