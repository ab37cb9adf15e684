"""The supervisor of worker processes, which share one listening socket.

A worker that dies is started again. Connections that no worker has accepted stay with the socket, so the other workers
or the new one answer them.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from types import FrameType
from typing import Any

from prometheus_client.multiprocess import mark_process_dead

from vitrail.errors import ProcessError, VitrailError
from vitrail.serving.answering.log import log_line
from vitrail.serving.answering.metrics import FOLDER

Work = Callable[[int, socket.socket, Connection], None]
"""The function of a worker: its number, the socket, and a connection to which it sends None when it listens, or the
`VitrailError` for which it cannot. It can be pickled."""

SETTLED = 60.0
"""Seconds after which the death of a worker counts as the first one again."""

LONGEST = 30.0
"""Longest pause in seconds before a worker is started again."""


@dataclass(eq=False)
class _Worker:
    number: int
    process: SpawnProcess
    told: Connection
    begun: float = field(default_factory=time.monotonic)
    is_ready: bool = False


class Supervisor:
    """Starts worker processes, forwards signals to them, and starts those again that die.

    SIGTERM or SIGINT lets all workers answer what they have received, and a second signal ends them at once. A worker
    that gets SIGTERM from someone else does the same, and another one takes its place.
    """

    def __init__(self, count: int, work: Work, listening: socket.socket, on_start: Callable[[], None]) -> None:
        """`on_start` is called when all workers listen for the first time."""
        self._count, self._work, self._listening, self._on_start = count, work, listening, on_start
        self._context = multiprocessing.get_context("spawn")  # a forked process could not use threads or a GPU
        self._workers: list[_Worker] = []
        self._deaths = [0] * count
        self._due: dict[int, float] = {}  # when a worker is started again, by its number
        self._signals = 0
        self._has_started = False
        self._metrics = ""

    def run(self) -> None:
        """Run until a signal has stopped all workers. Raise the `VitrailError` of a worker that cannot start, and
        `ProcessError` if a worker dies before all have started."""
        with tempfile.TemporaryDirectory(prefix="vitrail-metrics-") as self._metrics, self._waking() as woken:
            try:
                for number in range(self._count):
                    self._start(number)
                while self._workers or (self._due and not self._signals):
                    self._wait(woken)
            finally:
                for worker in self._workers:
                    worker.process.kill()
                    worker.process.join()

    def _start(self, number: int) -> None:
        theirs: Connection
        told, theirs = self._context.Pipe(duplex=False)
        process = self._context.Process(target=self._work, args=(number, self._listening, theirs))
        before = os.environ.get(FOLDER)
        os.environ[FOLDER] = self._metrics
        try:
            process.start()
        finally:
            os.environ.pop(FOLDER)
            if before is not None:
                os.environ[FOLDER] = before
        theirs.close()
        self._workers.append(_Worker(number, process, told))

    def _wait(self, woken: socket.socket) -> None:
        """Wait for the next event, and act on it."""
        now = time.monotonic()
        pause = min((due - now for due in self._due.values()), default=None)
        waiting: list[Any] = [woken, *(worker.process.sentinel for worker in self._workers)]
        waiting += [worker.told for worker in self._workers if not worker.told.closed]
        ready = wait(waiting, None if pause is None else max(0.0, pause))
        if woken in ready:
            woken.recv(4096)
            self._stop()
        for worker in list(self._workers):
            if worker.told in ready:
                self._read_report(worker)
            if worker.process.sentinel in ready:
                self._remove_ended(worker)
        for number in [number for number, due in self._due.items() if due <= time.monotonic()]:
            del self._due[number]
            self._start(number)

    def _read_report(self, worker: _Worker) -> None:
        """Read the only message of a worker."""
        try:
            error: VitrailError | None = worker.told.recv()
        except EOFError:  # it died before
            error = None
        else:
            worker.is_ready = error is None
        worker.told.close()
        if error is not None:
            if not self._has_started:
                raise error
            log_line(event="worker failed", worker=worker.number, pid=worker.process.pid, error=str(error))
        if worker.is_ready:
            log_line(event="worker started", worker=worker.number, pid=worker.process.pid)
        if not self._has_started and all(one.is_ready for one in self._workers):
            self._has_started = True
            self._on_start()

    def _remove_ended(self, worker: _Worker) -> None:
        """Remove a worker that has ended, and plan another one in its place."""
        worker.process.join()
        worker.told.close()
        self._workers.remove(worker)
        mark_process_dead(worker.process.pid, self._metrics)  # type: ignore[no-untyped-call]
        if self._signals:
            return
        code = worker.process.exitcode or 0
        cause = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        log_line(event="worker ended", worker=worker.number, pid=worker.process.pid, cause=cause)
        if not self._has_started:
            raise ProcessError(f"a worker ended with {cause} before all of them had started; is there enough memory?")
        lived = time.monotonic() - worker.begun
        deaths = self._deaths[worker.number] = 1 if lived > SETTLED else self._deaths[worker.number] + 1
        self._due[worker.number] = time.monotonic() + (min(LONGEST, 2.0 ** (deaths - 2)) if deaths > 1 else 0.0)

    def _stop(self) -> None:
        """Forward a signal. Workers that still load their models end at once."""
        self._due.clear()
        self._listening.close()  # or connections would wait for nobody after the workers have stopped listening
        for worker in self._workers:
            if self._signals > 1:
                worker.process.kill()
            else:
                worker.process.terminate()

    @contextmanager
    def _waking(self) -> Iterator[socket.socket]:
        """Yield a socket that can be read when a signal has arrived."""

        def handle(number: int, frame: FrameType | None) -> None:
            self._signals += 1

        ours, theirs = socket.socketpair()
        with ours, theirs:
            theirs.setblocking(False)
            before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
            earlier = signal.set_wakeup_fd(theirs.fileno())
            try:
                yield ours
            finally:
                signal.set_wakeup_fd(earlier)
                for number, handler in before.items():
                    signal.signal(number, handler)
