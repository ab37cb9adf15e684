"""Stopping on request. After the first Ctrl-C, SIGTERM, SIGUSR1, SIGXCPU or SIGHUP, the run saves its state and stops.
A second Ctrl-C, SIGTERM or SIGUSR1 ends the process at once."""

from __future__ import annotations

import errno
import os
import signal
import termios
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

from vitrail.errors import Interrupted


@contextmanager
def interrupted_by_signals(message: str = "") -> Iterator[None]:
    """Raise `KeyboardInterrupt` on SIGTERM and SIGHUP inside the `with` block, as Python does on SIGINT. With a message
    for the user, raise `Interrupted` with it on all of them.

    Python handles signals in its main thread only. In other threads nothing changes.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        _leave_closed_terminal()
        raise KeyboardInterrupt

    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, *_hangup())}
    try:
        yield
    except KeyboardInterrupt:
        if not message:
            raise
        raise Interrupted(message) from None
    finally:
        _restore(before)


class StopRequest:
    """Records SIGINT, SIGTERM, SIGUSR1, SIGXCPU and SIGHUP in `requested` inside a `with` block. The loop checks
    `requested` between steps. Batch systems can send SIGUSR1 (SLURM) or SIGXCPU before the time of a job is over.

    At the time `end` (`time.perf_counter()`), `requested` becomes True without a signal.

    The first signal also restores the usual handlers of the others, so that a second one ends the process at once.
    SIGHUP stays handled, because a terminal that closes can send it twice, and so does SIGXCPU, which comes every
    second beyond a limit of CPU time. A process that ignores SIGHUP, such as one started by nohup, goes on ignoring it.
    Python handles signals in its main thread only. In other threads this class changes nothing.
    """

    def __init__(self, end: float | None = None) -> None:
        self.end = end
        self.is_asked = False
        """True after a signal, or if a caller requests a stop by this attribute."""
        self._before: dict[int, Any] = {}
        self._repeated: dict[int, Any] = {}

    @property
    def requested(self) -> bool:
        """True after a request, or after the end of the time."""
        return self.is_asked or (self.end is not None and time.perf_counter() >= self.end)

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
                self._before[number] = signal.signal(number, self._ask)
            for number in (signal.SIGXCPU, *_hangup()):
                self._repeated[number] = signal.signal(number, self._ask)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _restore(self._before)
        _restore(self._repeated)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.is_asked = True
        _restore(self._before)
        _leave_closed_terminal()


def _hangup() -> tuple[signal.Signals, ...]:
    """Return SIGHUP, unless the process ignores it."""
    return () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)


def _restore(handlers: dict[int, Any]) -> None:
    """Restore the earlier signal handlers, and empty the dictionary."""
    while handlers:
        signal.signal(*handlers.popitem())


def _leave_closed_terminal() -> None:
    """Discard output to a terminal that was closed. Otherwise the next printed line would end the process with an error
    before the state is saved."""
    for descriptor in (1, 2):
        try:
            termios.tcgetattr(descriptor)
        except termios.error as error:
            if error.args[0] == errno.EIO:
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, descriptor)
                os.close(nowhere)
