"""Tests of function calls with a time limit."""

from __future__ import annotations

import threading

import pytest

from vitrail.processes.launch import within


def test_the_result_is_returned_and_an_error_is_raised() -> None:
    assert within(60.0, lambda: [7]) == [7]
    with pytest.raises(ZeroDivisionError):
        within(60.0, lambda: 1 // 0)


def test_a_call_that_is_too_slow_is_left_behind() -> None:
    may_end, has_ended = threading.Event(), threading.Event()

    def slow() -> None:
        may_end.wait()
        has_ended.set()

    with pytest.raises(TimeoutError, match="no answer"):
        within(0.01, slow)
    assert not has_ended.is_set()
    may_end.set()
    assert has_ended.wait(60.0), "the thread continues in the background"
