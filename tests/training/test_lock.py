"""Tests of the lock of a run's folder: only one process trains a run, and a killed process leaves nothing behind."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from tests.listening import Display
from tests.several import server
from tests.training import ranks
from tests.training.jobs import Make, StopAt
from vitrail.errors import RunError
from vitrail.training.folder import LOCK, locked
from vitrail.training.log import Log
from vitrail.training.run import resume, train


@contextmanager
def another_process(folder: Path) -> Iterator[BaseProcess]:
    """Start a process that holds the lock of a run's folder."""
    context = server()
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=ranks.holding_the_lock, args=(folder, send), daemon=True)
    process.start()
    try:
        assert receive.poll(60) and receive.recv()
        yield process
    finally:
        process.kill()
        process.join()


@pytest.mark.slow
def test_a_lock_that_another_process_holds_is_refused_by_its_number(tmp_path: Path) -> None:
    with another_process(tmp_path) as process:
        message = f"^run {tmp_path} is in use: process {process.pid} trains it, .* stop it with kill {process.pid}$"
        with pytest.raises(RunError, match=message), locked(tmp_path):
            pass
        (tmp_path / LOCK).write_text("")
        with pytest.raises(RunError, match="is in use: another process trains it, and two processes must not"):
            locked(tmp_path).__enter__()
        process.kill()
        process.join()
        with locked(tmp_path):
            assert (tmp_path / LOCK).exists()
    assert not (tmp_path / LOCK).exists()


def test_a_thread_of_the_same_process_is_refused_too(tmp_path: Path) -> None:
    with locked(tmp_path):
        for _ in range(2):
            with pytest.raises(RunError, match=f"process {os.getpid()} trains it"), locked(tmp_path):
                pass


class Meanwhile(Display):
    """A display that calls a function at the first report of a run."""

    def __init__(self, action: Callable[[], object]) -> None:
        self.action: Callable[[], object] | None = action

    def step(self, step: int, metrics: dict[str, float]) -> None:
        if self.action is not None:
            self.action, action = None, self.action
            action()


@pytest.mark.slow
def test_a_run_is_neither_resumed_nor_replaced_while_it_trains(small: Make, tmp_path: Path) -> None:
    run, refused = tmp_path / "run", []

    def others() -> None:
        for attempt in (lambda: resume(run), lambda: train(small(run, overwrite=True))):
            with pytest.raises(RunError, match=rf"^run {run} is in use: process {os.getpid()} trains it") as caught:
                attempt()
            refused.append(caught)

    result = train(small(run, steps=4), log=Log(Meanwhile(others)))
    assert len(refused) == 2 and result.summary["steps"] == 4
    assert not (run / LOCK).exists()
    train(small(run, steps=2, overwrite=True))


@pytest.mark.slow
def test_two_that_resume_do_not_train_together(small: Make, tmp_path: Path) -> None:
    run, refused = tmp_path / "run", []
    with pytest.raises(Exception, match="stopped at step 8"):
        train(small(run), log=Log(StopAt(8)))

    def other() -> None:
        with pytest.raises(RunError, match="is in use") as caught:
            resume(run)
        refused.append(caught)

    resume(run, log=Log(Meanwhile(other)))
    assert refused
