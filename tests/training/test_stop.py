"""Tests of stopping: the first signal requests a stop, and the second one ends the process."""

from __future__ import annotations

import os
import pty
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.make import wait_for
from tests.training.jobs import SMALL, Make, events_of, steps_of
from vitrail.errors import Interrupted, Stopped
from vitrail.training.folder import read_record
from vitrail.training.log import Log, read_journal
from vitrail.training.run import resume, train
from vitrail.training.stop import StopRequest, interrupted_by_signals

Command = Callable[..., "subprocess.Popen[str]"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_the_first_signal_asks_and_makes_way_for_the_second(number: signal.Signals) -> None:
    kinds = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    before = [signal.getsignal(kind) for kind in kinds]
    with StopRequest() as stop:
        assert not stop.requested
        assert not {signal.getsignal(kind) for kind in kinds} & {*before}
        os.kill(os.getpid(), number)
        assert stop.requested
        assert [signal.getsignal(kind) for kind in kinds] == before
    assert [signal.getsignal(kind) for kind in kinds] == before


@pytest.mark.slow
def test_a_run_stops_after_its_time_and_goes_on(tiny: Make) -> None:
    config = tiny(steps=4, max_time="0.001s", keep="last")
    with pytest.raises(Stopped, match=r"^stopped at step 1 of 4") as caught:
        train(config)
    with pytest.raises(Stopped, match=r"^stopped at step 2 of 4"):
        resume(caught.value.run)
    assert resume(caught.value.run, changes={"max_time": "10m"}).summary["steps"] == 4
    assert read_record(caught.value.run).config.run.max_time == "0.001s"
    assert resume(caught.value.run, changes={"steps": 5, "max_time": "10m"}).summary["steps"] == 5
    assert read_record(caught.value.run).config.run.max_time == "0.001s", "an extension does not record the time"


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGXCPU])
def test_a_hangup_asks_and_can_come_twice(number: signal.Signals) -> None:
    numbers = (signal.SIGINT, signal.SIGTERM, number)
    before = [signal.getsignal(kind) for kind in numbers]
    with StopRequest() as stop:
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), signal.SIGHUP)
        assert stop.requested
        assert [signal.getsignal(kind) for kind in numbers[:2]] == before[:2], "a second Ctrl-C ends the process"
    assert [signal.getsignal(kind) for kind in numbers] == before


def test_a_hangup_that_nohup_ignores_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopRequest() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
        assert not stop.requested
        with interrupted_by_signals():
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signals_interrupt_a_computation(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt), interrupted_by_signals():
        os.kill(os.getpid(), number)
    with pytest.raises(Interrupted, match="the results stay here"), interrupted_by_signals("the results stay here"):
        os.kill(os.getpid(), number)
    assert signal.getsignal(number) is before


IN_A_TERMINAL = """
import sys, time
from pathlib import Path
from vitrail.training.stop import StopRequest
with StopRequest() as stop:
    print("ready", flush=True)
    while not stop.requested:
        time.sleep(0.01)
    for line in range(3):  # the terminal is gone, so each line would be an error
        print(line, flush=True)
    Path(sys.argv[1]).write_text("saved")
"""


def test_a_terminal_that_closes_does_not_end_the_process_before_it_saves(tmp_path: Path) -> None:
    child, terminal = pty.fork()
    if not child:
        os.execv(sys.executable, [sys.executable, "-c", IN_A_TERMINAL, str(tmp_path / "state")])
    assert b"ready" in os.read(terminal, 100)
    os.close(terminal)
    guard = threading.Timer(60, os.kill, (child, signal.SIGKILL))
    guard.start()
    assert os.waitpid(child, 0)[1] == 0
    guard.cancel()
    assert (tmp_path / "state").read_text() == "saved"


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["the last checkpoint", "the last measurements"])
def test_a_signal_after_the_last_step_is_not_lost(moment: str, tiny: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def signalling(event: Any) -> None:
        if event["event"] == "checkpoint" and moment == "the last checkpoint":
            signal.raise_signal(signal.SIGTERM)

    with monkeypatch.context() as patch, pytest.raises(Stopped) as caught:
        if moment == "the last measurements":
            patch.setattr("vitrail.training.run.write_examples", lambda *_: signal.raise_signal(signal.SIGTERM))
        train(tiny(steps=2, checkpoints=1), log=Log(signalling))
    assert steps_of(caught.value.run, "stopped") == [2]
    assert resume(caught.value.run).summary["steps"] == 2


@pytest.mark.slow
def test_a_run_works_outside_the_main_thread(tiny: Make) -> None:
    results = []
    thread = threading.Thread(target=lambda: results.append(train(tiny(steps=2))))
    thread.start()
    thread.join(60)
    assert len(results) == 1 and (results[0].folder / "model" / "model.json").is_file()


def await_event(process: subprocess.Popen[str], run: Path, event: str) -> None:
    def has_happened() -> bool:
        assert process.poll() is None, process.communicate()
        return (run / "journal.jsonl").exists() and bool(events_of(run, event))

    wait_for(has_happened, 60)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP])
def test_a_signal_saves_and_says_how_to_go_on(
    number: signal.Signals, tmp_path: Path, three_splits: Path, command: Command
) -> None:
    run = tmp_path / "my run"
    options = (*SMALL, "--data", str(three_splits), "--run", str(run), "--steps", "100000", "--batch-size", "20")
    process = command("demo", *options, "--checkpoints", "1", "--evaluations", "1", "--warmup", "0.5")
    await_event(process, run, "step")
    process.send_signal(number)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 75, errors
    assert "Traceback" not in output + errors
    (step,) = steps_of(run, "stopped")
    assert steps_of(run, "checkpoint") == [step]
    assert f"stopped at step {step:,} of 100,000" in errors
    assert f"vitrail train --resume {shlex.quote(str(run))}\n" in errors
    assert [path.name for path in (run / "checkpoints").iterdir()] == [f"step-{step}"]


@pytest.mark.slow
def test_a_second_signal_ends_at_once(tmp_path: Path, command: Command) -> None:
    run = tmp_path / "run"
    options = ("--run", str(run), "--steps", "10", "--batch-size", "4000", "--accumulation", "400")
    process = command("demo", *options, "--variant", "ViT-S/8", "--device", "cpu", "--precision", "float32")
    await_event(process, run, "started")
    time.sleep(1)
    process.send_signal(signal.SIGTERM)
    time.sleep(1)
    assert process.poll() is None, "a step takes far longer than this test"
    process.send_signal(signal.SIGTERM)
    begin = time.monotonic()
    process.communicate(timeout=20)
    assert time.monotonic() - begin < 5
    assert process.returncode == -signal.SIGTERM
    events = [event["event"] for event in read_journal(run / "journal.jsonl")]
    assert events in (["started"], ["started", "limit"])
