"""Tests of interleaved timing: the order of the calls, and the statistics of the times."""

from __future__ import annotations

from functools import partial

import torch

from vitrail.bench.workload import Spread, interleave, timed, waits_for


def test_rounds_run_every_timer_once_in_turn() -> None:
    calls: list[str] = []

    def timer(name: str) -> float:
        calls.append(name)
        return float(len(calls))

    times = interleave({name: partial(timer, name) for name in "abc"}, repetitions=2, warmup=1)
    assert "".join(calls) == "abc" * 3
    assert times == {"a": [4.0, 7.0], "b": [5.0, 8.0], "c": [6.0, 9.0]}, "what warmed up does not count"


def test_the_device_is_waited_for_on_both_sides() -> None:
    calls: list[str] = []
    seconds = timed(lambda: calls.append("a"), lambda: calls.append("|"))()
    assert "".join(calls) == "|a|" and seconds >= 0
    waits_for(torch.device("cpu"))()


def test_spread() -> None:
    assert Spread.of([3.0, 1.0, 2.0]) == Spread(median=2.0, low=1.0, high=3.0)
