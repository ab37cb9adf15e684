"""Function calls with a time limit."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

__all__ = ["within"]

T = TypeVar("T")


def within(seconds: float, work: Callable[[], T]) -> T:
    """Return the result of `work`, or raise its error. Raise `TimeoutError` if it takes longer than this time.

    `work` runs in a thread, which continues in the background after the time limit and may never end. For example, a
    read from a network that was cut waits for ever.
    """
    results: list[T] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            results.append(work())
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)  # so that a call that never ends does not block the exit
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError("no answer")
    return results[0]
