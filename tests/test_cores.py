"""Tests of the number of compute threads while other programs use the cores."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterator

import pytest
import torch

from vitrail import cores
from vitrail.cores import SharedCores, Usage, compute_threads, following_cores, read_usage

linux = pytest.mark.skipif(read_usage() is None, reason="this system has no /proc/stat")


@pytest.fixture
def four_threads() -> Iterator[None]:
    with compute_threads(None):
        torch.set_num_threads(4)
        yield


class Machine:
    """A machine of four cores on which other programs take some of the cores, and a run that checks it every second.

    The clock of the machine also replaces the system's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = Usage(0.0, 0.0, 0.0)
        self.others = 0.0
        self.yields = False
        """True if the other programs run only on cores that the run leaves."""
        monkeypatch.setattr(time, "perf_counter", lambda: self.now.wall)
        self.shared = SharedCores(lambda: self.now)

    def run(self, seconds: int) -> list[tuple[int, int]]:
        """Return the changes within some seconds: at which second, and to which number of threads."""
        changes = []
        for _ in range(seconds):
            threads = torch.get_num_threads()
            others = min(self.others, 4 - threads) if self.yields else self.others
            own = min(threads, 4 - others)
            self.now = Usage(self.now.wall + 1, self.now.own + own, self.now.free + 4 - others - own)
            if (changed := self.shared.check()) is not None:
                assert changed == torch.get_num_threads()
                changes.append((int(self.now.wall), changed))
        return changes


@pytest.fixture
def machine(four_threads: None, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def test_free_cores_change_nothing(machine: Machine) -> None:
    assert machine.run(100) == []
    machine.others = 0.4
    assert machine.run(100) == [] and torch.get_num_threads() == 4


def test_the_number_follows_the_cores_that_others_leave(machine: Machine) -> None:
    machine.others = 1.0
    assert machine.run(10) == [(2, 3)]
    machine.others = 3.0
    assert machine.run(10) == [(12, 1)]
    machine.others = 2.0
    assert machine.run(5) == [(23, 2)]
    machine.others = 0.0
    assert machine.run(10) == [(28, 4)]


def test_one_thread_is_left_however_many_programs_there_are(machine: Machine) -> None:
    machine.others = 3.9
    assert machine.run(20) == [(2, 1)]


def test_a_short_load_changes_nothing(machine: Machine) -> None:
    machine.others = 2.0
    machine.run(1)
    machine.others = 0.0
    assert machine.run(60) == []


def test_programs_that_give_way_are_found_by_a_trial(machine: Machine) -> None:
    machine.others = 2.0
    assert machine.run(5) == [(2, 2)]
    machine.yields = True
    assert machine.run(40) == [(33, 4)] and torch.get_num_threads() == 4


def test_trials_in_vain_become_rare(machine: Machine) -> None:
    machine.others, trials = 2.0, []
    for second in range(400):
        before = torch.get_num_threads()
        assert machine.run(1) == ([(2, 2)] if second == 1 else [])
        if torch.get_num_threads() == 4 and before == 2:
            trials.append(second + 1)
    assert trials == [32, 93, 214], "after 30, 60 and 120 seconds, each of which follows a trial of one second"


def test_one_thread_and_systems_without_proc_stat_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with compute_threads(1):
        shared = SharedCores(lambda: pytest.fail("one thread cannot be fewer"))
        time.sleep(0.01)
        assert shared.check() is None
    with compute_threads(None):
        torch.set_num_threads(2)
        monkeypatch.setattr(SharedCores, "WINDOW", 0.0)
        assert SharedCores(lambda: None).check() is None


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


@linux
def test_the_system_reports_what_this_process_uses() -> None:
    first = read_usage()
    assert first is not None
    ends = time.perf_counter() + 0.3
    while time.perf_counter() < ends:
        pass
    last = read_usage()
    assert last is not None
    used = last.since(first)
    all_cores = len(os.sched_getaffinity(0))
    assert 0.3 <= used.wall < 60 and 0 < used.own <= used.wall * all_cores + 0.1
    assert 0 <= used.free <= used.wall * all_cores + 0.1


def _spin(until: float) -> None:
    while time.time() < until:
        pass


@linux
@pytest.mark.slow
def test_real_programs_on_all_cores_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    count = len(os.sched_getaffinity(0))
    if count < 2:
        pytest.skip("one core is not shared")
    programs = [
        multiprocessing.get_context("spawn").Process(target=_spin, args=(time.time() + 15,)) for _ in range(2 * count)
    ]
    for program in programs:
        program.start()
    try:
        with compute_threads(count):
            shared, changes, x = SharedCores(), [], torch.randn(300, 300)
            ends = time.monotonic() + 12
            while not changes and time.monotonic() < ends:
                x @ x
                changes += [changed] if (changed := shared.check()) is not None else []
            assert changes and changes[0] < count
    finally:
        for program in programs:
            program.terminate()
            program.join()


def test_predictions_follow_the_cores_except_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = 0.0

    def read() -> Usage:
        """A second later at each call, in which another program takes one of two cores."""
        nonlocal seconds
        seconds += 1.0
        return Usage(seconds, seconds, 0.0)

    monkeypatch.setattr(SharedCores, "WINDOW", 0.0)
    monkeypatch.setattr(cores, "SharedCores", lambda: SharedCores(read))
    for precision, device, expected in (
        ("bf16", "cpu", 1), ("int8", "cpu", 1), ("float32", "cpu", 2), ("bf16", "meta", 2),
    ):  # fmt: skip
        with compute_threads(2):
            with following_cores(precision, torch.device(device)) as adapt_threads:
                for _ in range(3):
                    adapt_threads()
                assert torch.get_num_threads() == expected
            assert torch.get_num_threads() == 2
