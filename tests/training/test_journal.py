"""Tests of the journal: written events can be read, and repeated steps of a resumed run replace the earlier ones."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from vitrail.errors import SaveError
from vitrail.training.log import Log, read_journal


def test_an_event_a_line_in_order(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    log = Log(path=path)
    before = time.time()
    log.tell("started", step=0, steps=3)
    log.tell("skipped", step=1, key="rose/ü\n中.png", reason='is "empty"')
    lines = path.read_text(encoding="utf-8").splitlines()
    assert len(lines) == 2 and "ü" in lines[1]
    first, second = read_journal(path)
    assert first["event"] == "started" and first["steps"] == 3
    assert before - 0.001 <= first["time"] <= time.time() + 0.001
    assert second["key"] == "rose/ü\n中.png" and second["reason"] == 'is "empty"'


def test_a_new_log_adds_to_the_file(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    Log(path=path).tell("started", step=0)
    Log(path=path).tell("resumed", step=0)
    assert [event["event"] for event in read_journal(path)] == ["started", "resumed"]


def test_what_was_done_again_counts_once(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    log = Log(path=path)
    log.tell("started", step=0)
    for step in (1, 2, 3, 4, 5):
        log.tell("step", step=step, loss=float(step))
    log.tell("resumed", step=3)
    for step in (4, 5, 6):
        log.tell("step", step=step, loss=10.0 * step)
    log.tell("resumed", step=5)
    log.tell("step", step=6, loss=600.0)
    steps = [(event["step"], event["loss"]) for event in read_journal(path) if event["event"] == "step"]
    assert steps == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 40.0), (5, 50.0), (6, 600.0)]
    assert len(path.read_text(encoding="utf-8").splitlines()) == 12, "the file itself keeps everything"


def test_a_last_line_that_was_cut_short_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    log = Log(path=path)
    log.tell("step", step=1)
    line = json.dumps({"event": "step", "time": 1.5, "step": 2})
    whole = path.read_bytes()
    for length in range(1, len(line)):
        path.write_bytes(whole + line[:length].encode())
        assert [event["step"] for event in read_journal(path)] == [1]


def test_a_place_that_cannot_be_written_is_a_save_error(tmp_path: Path) -> None:
    with pytest.raises(SaveError, match=r"could not save the journal to .*missing/journal\.jsonl: No such file"):
        Log(path=tmp_path / "missing" / "journal.jsonl").tell("started", step=0)


def test_an_event_after_a_torn_line_is_not_lost(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    log = Log(path=path)
    log.tell("step", step=1, loss=2.0)
    with path.open("ab") as file:
        file.write('{"event": "skipped", "key": "é'.encode()[:-1])
    log.tell("resumed", step=0)
    assert [event["event"] for event in read_journal(path)] == ["resumed"]


def test_a_key_may_hold_any_line_break(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    log = Log(path=path)
    log.tell("skipped", step=1, key="a\u2028b\x85.png")
    assert read_journal(path)[0]["key"] == "a\u2028b\x85.png"
