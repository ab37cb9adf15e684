"""Tests of the compute threads beside other programs."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
import torch

from vitrail import cores
from vitrail.cores import SharedCores, ShortWaits, Usage, compute_threads, read_usage, share_cores

linux = pytest.mark.skipif(read_usage() is None, reason="this system has no /proc/stat")
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1


class Machine(ShortWaits):
    """A machine of four cores on which other programs take some of the cores, and a process that checks it."""

    def __init__(self) -> None:
        self.now = Usage(0.0, 0.0, 0.0)
        self.others = 0.0
        self.short = False
        self.shared = SharedCores(self, lambda: self.now)

    def begin(self) -> None:
        self.short = True

    def end(self) -> None:
        self.short = False

    def run(self, checks: int, threads: int = 4) -> list[int]:
        """Return after which checks the threads began or ended to sleep at once."""
        changes = []
        with compute_threads(None):
            torch.set_num_threads(threads)
            for check in range(1, checks + 1):
                before, own = self.short, min(threads, 4 - self.others)
                self.now = Usage(self.now.wall + 1, self.now.own + own, self.now.free + 4 - self.others - own)
                assert self.shared.check()
                changes += [check] if self.short != before else []
        return changes


def test_threads_sleep_at_once_while_cores_are_taken() -> None:
    machine = Machine()
    assert machine.run(20) == []
    machine.others = 0.4
    assert machine.run(20) == []
    machine.others = 0.5
    assert machine.run(20) == [1]
    machine.others = 0.0
    assert machine.run(20) == [SharedCores.CALM]
    machine.others = 2.0
    assert machine.run(2) == [1]
    machine.others = 0.0
    assert machine.run(SharedCores.CALM - 1) == []
    machine.others = 2.0
    assert machine.run(2) == [] and machine.short


@pytest.mark.parametrize(("threads", "others", "expected"), [(1, 4.0, []), (2, 1.9, []), (2, 2.5, [1]), (3, 1.4, [])])
def test_threads_that_have_their_cores_stay_active(threads: int, others: float, expected: list[int]) -> None:
    machine = Machine()
    machine.others = others
    assert machine.run(3, threads) == expected


@pytest.mark.slow
def test_systems_without_readings_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not SharedCores(ShortWaits(), lambda: None).check()
    monkeypatch.setattr(cores, "read_usage", lambda: None)
    monkeypatch.setattr(cores, "_watcher", None)
    share_cores()
    watcher = cores._watcher
    assert watcher is not None
    watcher.join(10)
    assert not watcher.is_alive()


def test_a_block_restores_the_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    with compute_threads(1):
        assert torch.get_num_threads() == 1
        torch.set_num_threads(3)
    assert torch.get_num_threads() == before
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})
    with compute_threads(64):
        assert torch.get_num_threads() == 2, "no more than cores"
    assert torch.get_num_threads() == before


@pytest.mark.slow
@linux
def test_the_system_reports_what_this_process_uses() -> None:
    first = read_usage()
    assert first is not None
    ends = time.perf_counter() + 0.3
    while time.perf_counter() < ends:
        pass
    last = read_usage()
    assert last is not None
    wall, own, free = last.wall - first.wall, last.own - first.own, last.free - first.free
    assert 0.3 <= wall < 60 and 0 <= own <= wall * CORES + 0.1 and 0 <= free <= wall * CORES + 0.1
    assert last.available_since(first) == pytest.approx((own + free) / wall)


@contextmanager
def _other_programs() -> Iterator[None]:
    with ExitStack() as programs:
        for _ in range(2 * CORES):
            program = programs.enter_context(subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]))
            programs.callback(program.kill)
        yield


BESIDE = """
import os, time, torch
from vitrail.cores import share_cores
torch.manual_seed(0)
torch.set_num_threads(2)
x = torch.randn(300, 300)
x @ x
tasks = lambda: len(os.listdir("/proc/self/task"))
alone = most = tasks()
if {watched}:
    share_cores()
ends = time.monotonic() + {seconds}
while time.monotonic() < ends and most - alone < {more}:
    total = (x @ x).double().sum().item()
    most = max(most, tasks())
print(most - alone, total.hex())
"""


@linux
@pytest.mark.slow
@pytest.mark.skipif(CORES < 2, reason="one core is not shared")
def test_real_programs_on_all_cores_are_noticed_and_bits_stay() -> None:
    found = {}
    for watched in (False, True):
        with _other_programs():
            command = [
                sys.executable,
                "-c",
                BESIDE.format(watched=watched, seconds=90 if watched else 2, more=CORES + 2),
            ]
            run = subprocess.run(command, capture_output=True, text=True, check=True, timeout=240)
        threads, found[watched] = run.stdout.split()
        assert int(threads) == (CORES + 2 if watched else 0), "the watcher, an idle thread, and its threads"
    assert found[False] == found[True]
