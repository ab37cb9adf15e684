"""The number of compute threads while other programs use the same cores.

Threads of one matrix product wait for each other. If another program holds one of their cores, all of them wait until
the operating system lets the last one run, and a step takes many times as long (docs/performance.md). With at most as
many threads as free cores, no thread waits.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Usage:
    """Use of the cores on which this process may run, in seconds since an arbitrary time."""

    wall: float
    own: float
    """CPU time of all threads of this process."""
    free: float
    """Time in which a core was idle, summed over the cores. Time of programs of lower priority counts as idle."""

    def since(self, earlier: Usage) -> Usage:
        """Return the use since an earlier reading."""
        return Usage(self.wall - earlier.wall, self.own - earlier.own, self.free - earlier.free)

    @property
    def available(self) -> float:
        """Number of cores that this process used or could have used."""
        return (self.own + self.free) / self.wall


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
    return Usage(time.perf_counter(), own.user + own.system, free / os.sysconf("SC_CLK_TCK"))


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


@contextmanager
def following_cores(precision: str, device: torch.device) -> Iterator[Callable[[], object]]:
    """Yield a function to call after every batch, which adapts the number of compute threads as `SharedCores` does.

    The function does nothing for float32, whose bits depend on the number of threads, and on other devices than CPUs.
    After the block the number of threads is the same as before.
    """
    with compute_threads(None):
        yield SharedCores().check if precision != "float32" and device.type == "cpu" else lambda: None


class SharedCores:
    """Adapts the number of compute threads to the cores that other programs leave. Call `check` after every step.

    The number falls when other programs have taken half a core or more of the threads' cores for two seconds. It rises
    when cores are idle for three seconds. A program that would give way is not idle time, so the full number is also
    tried for a second, first after half a minute, and then at growing intervals.

    The number of threads changes results by rounding, so this class is not used where equal bits are promised.
    """

    WINDOW = 1.0
    """Seconds between two readings. A reading also contains a whole step."""
    FALL, RISE = 2, 3
    """Numbers of consecutive readings after which the number of threads falls or rises."""
    FIRST_TRIAL, LAST_TRIAL = 30.0, 480.0
    """Shortest and longest interval between two trials of the full number, in seconds."""

    def __init__(self, read: Callable[[], Usage | None] = read_usage) -> None:
        self.full = torch.get_num_threads()
        """The number of threads on free cores."""
        self.threads = self.full
        """The number that was chosen last. During a trial, torch uses `full` threads."""
        self._read = read
        self._before = read() if self.full > 1 else None
        self._readings: list[int] = []
        """Numbers of threads for which the last readings had free cores."""
        self._trial_begins = math.inf
        self._interval = self.FIRST_TRIAL
        self._in_trial = False

    def check(self) -> int | None:
        """Adapt the number of threads. Return the new number if it has changed for good, else None."""
        before = self._before
        if before is None or time.perf_counter() - before.wall < self.WINDOW:
            return None
        now = self._read()
        self._before = now
        if now is None:
            return None
        free = max(1, min(self.full, math.floor(now.since(before).available + 0.5)))
        if self._in_trial:
            return self._end_trial(free)
        self._readings = [*self._readings, free][-max(self.FALL, self.RISE) :]
        falls, rises = self._readings[-self.FALL :], self._readings[-self.RISE :]
        if len(falls) == self.FALL and max(falls) < self.threads:
            return self._use(max(falls), now.wall)
        if len(rises) == self.RISE and min(rises) > self.threads:
            return self._use(min(rises), now.wall)
        if now.wall >= self._trial_begins:
            self._in_trial = True
            torch.set_num_threads(self.full)
        return None

    def _use(self, threads: int, now: float) -> int:
        """Compute with this number of threads from now on, and plan a trial unless the number is the full one."""
        torch.set_num_threads(threads)
        self.threads, self._readings = threads, []
        self._trial_begins = now + self._interval if threads < self.full else math.inf
        return threads

    def _end_trial(self, free: int) -> int | None:
        self._in_trial = False
        assert self._before is not None
        if free == self.full:
            self._interval = self.FIRST_TRIAL
            return self._use(self.full, self._before.wall)
        self._interval = min(2 * self._interval, self.LAST_TRIAL)
        self._use(self.threads, self._before.wall)
        return None
