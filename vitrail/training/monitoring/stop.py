"""Stopping on request. After the first Ctrl-C or SIGTERM, the run saves its state and stops. A second signal ends the
process at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

__all__ = ["StopRequest", "interrupted_by_sigterm"]


@contextmanager
def interrupted_by_sigterm() -> Iterator[None]:
    """Raise `KeyboardInterrupt` on SIGTERM inside the `with` block, as Python does on SIGINT.

    Python handles signals in its main thread only. In other threads nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class StopRequest:
    """Records SIGINT and SIGTERM in `requested` inside a `with` block. The loop checks `requested` between steps.

    The first signal also restores the usual handlers, so that a second one ends the process at once. Python handles
    signals in its main thread only. In other threads this class changes nothing.
    """

    def __init__(self) -> None:
        self.requested = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._ask)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
