"""Compute threads beside other programs on the same cores.

Threads of one matrix product wait for each other, and the library that runs them (libgomp) lets a waiting thread check
a variable about 300,000 times before it sleeps. If another program needs the core meanwhile, the thread for which all
wait cannot run, and a step takes up to a hundred times as long (docs/performance.md). `share_cores` therefore lets
waiting threads sleep at once while other programs use the cores. The number of threads and all results stay the same.
"""

from __future__ import annotations

import ctypes
import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import monotonic  # this name is kept by a thread, while programs may replace functions of `time`

import torch


@dataclass(frozen=True)
class Usage:
    """Use of the cores on which this process may run, in seconds since an arbitrary time."""

    wall: float
    own: float
    """CPU time of all threads of this process."""
    free: float
    """Time in which a core was idle, summed over the cores. Time of programs of lower priority counts as idle."""

    def available_since(self, earlier: Usage) -> float:
        """Return the number of cores that this process used or could have used since an earlier reading."""
        return ((self.own - earlier.own) + (self.free - earlier.free)) / (self.wall - earlier.wall)


def read_usage() -> Usage | None:
    """Return the use of the cores so far, or None if the system has no /proc/stat."""
    own = os.times()
    try:
        cores = os.sched_getaffinity(0)
        with open("/proc/stat", encoding="ascii") as file:
            lines = [line.split() for line in file if line.startswith("cpu")]
    except (AttributeError, OSError):
        return None
    free = 0
    for name, *counts in lines:
        if name[3:].isdigit() and int(name[3:]) in cores:
            _, nice, _, idle, iowait = map(int, counts[:5])
            free += idle + iowait + (nice if os.nice(0) == 0 else 0)
    return Usage(monotonic(), own.user + own.system, free / os.sysconf("SC_CLK_TCK"))


@contextmanager
def compute_threads(number: int | None) -> Iterator[None]:
    """Compute with this number of threads inside the `with` block, but at most one per core. None leaves the number of
    threads as it is. Afterwards the number is the same as before the block, even if the block has changed it.
    """
    before = torch.get_num_threads()
    if number is not None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        torch.set_num_threads(min(number, cores))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def share_cores() -> None:
    """From now on, watch the cores, and let waiting compute threads sleep at once while other programs use them.

    A thread in the background reads twice a second how much of the cores was free. Further calls change nothing.
    Nothing happens on systems without /proc, and with other thread libraries than libgomp, which the usual builds of
    PyTorch for Linux contain.
    """
    global _watcher
    with _starting:
        if _watcher is None or not _watcher.is_alive():  # a forked process has no threads
            _watcher = threading.Thread(target=_watch, name="cores", daemon=True)
            _watcher.start()


def are_cores_shared() -> bool:
    """Return True while other programs use the cores. False before `share_cores`."""
    return _waits.are_short


_starting = threading.Lock()
_watcher: threading.Thread | None = None


def _watch() -> None:
    cores, never = SharedCores(_waits), threading.Event()
    while not never.wait(SharedCores.WINDOW):
        if not cores.check():
            return


class SharedCores:
    """Decides from the use of the cores whether waiting threads sleep at once. Call `check` every half second.

    They do when other programs have taken half a core or more of the threads' cores since the last call, and no longer
    when the cores were free for three seconds.
    """

    WINDOW = 0.5
    """Seconds between two readings."""
    CALM = 6
    """Number of readings of free cores after which waiting threads are active again."""

    def __init__(self, waits: ShortWaits, read: Callable[[], Usage | None] | None = None) -> None:
        self._waits, self._read = waits, read or read_usage
        self._before = self._read()
        self._calm = 0

    def check(self) -> bool:
        """Read the use of the cores, and choose how threads wait. Return False if it cannot be read."""
        before, now = self._before, self._read()
        if before is None or now is None:
            return False
        self._before = now
        if (threads := torch.get_num_threads()) > 1 and now.available_since(before) <= threads - 0.5:
            self._calm = 0
            self._waits.begin()
        else:
            self._calm += 1
            if self._calm == self.CALM:
                self._waits.end()
        return True


class ShortWaits:
    """Lets waiting threads of this process sleep at once between `begin` and `end`.

    libgomp shortens the wait (from 300,000 to 100 checks) while a process has more of its threads than cores. Therefore
    an idle thread owns as many further compute threads as there are cores, all of which sleep.
    """

    def __init__(self) -> None:
        self._ended: threading.Event | None = None

    @property
    def are_short(self) -> bool:
        """True between `begin` and `end`."""
        return self._ended is not None

    def begin(self) -> None:
        if self._ended is None:
            self._ended = threading.Event()
            threading.Thread(target=_own_threads, args=(self._ended,), name="cores", daemon=True).start()

    def end(self) -> None:
        if self._ended is not None:
            self._ended.set()
            self._ended = None


_waits = ShortWaits()


def _own_threads(ended: threading.Event) -> None:
    """Own further compute threads until `ended` is set: they end with the thread that calls this."""
    for path in _libraries():
        library = ctypes.CDLL(path)
        nothing = ctypes.cast(library.omp_get_thread_num, ctypes.c_void_p)  # a function without an effect
        library.GOMP_parallel(nothing, None, ctypes.c_uint(len(os.sched_getaffinity(0)) + 1), ctypes.c_uint(0))
    ended.wait()


def _libraries() -> list[str]:
    """Return the paths of the libgomp libraries that are loaded."""
    try:
        loaded = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return sorted(set(re.findall(r"^(?:\S+ +){5}(/.*/libgomp[^/\s]*\.so[^/\s]*)$", loaded, re.MULTILINE)))
