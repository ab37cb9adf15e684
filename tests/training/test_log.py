"""Tests of the journal, and of the programs that show the metrics of a run during training."""

from __future__ import annotations

import json
import struct
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.training.jobs import Make, train_until
from vitrail.errors import ConfigError, SaveError
from vitrail.training.config import TrainConfig
from vitrail.training.log import Log, TensorBoard, check_trackers, kept_result, read_journal, scalars
from vitrail.training.run import resume, train


def test_an_event_a_line_in_order(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    log = Log(path=path)
    before = time.time()
    log.tell("started", step=0, steps=3)
    key = "rose/ü\n中\u2028b\x85.png"
    log.tell("skipped", step=1, key=key, reason='is "empty"')
    assert "ü" in path.read_text(encoding="utf-8")
    first, second = read_journal(path)
    assert first["event"] == "started" and first["steps"] == 3
    assert before - 0.001 <= first["time"] <= time.time() + 0.001
    assert second["key"] == key and second["reason"] == 'is "empty"'


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


def test_the_time_of_an_event_is_no_metric(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    Log(path=path).tell("evaluation", step=1, split="validation", images=8, kept=True, accuracy=0.5)
    assert kept_result(path) == {"accuracy": 0.5}


def test_a_place_that_cannot_be_written_is_a_save_error(tmp_path: Path) -> None:
    with pytest.raises(SaveError, match=r"could not save the journal to .*missing/journal\.jsonl: No such file"):
        Log(path=tmp_path / "missing" / "journal.jsonl").tell("started", step=0)


def test_an_event_after_a_torn_line_is_not_lost_and_lines_without_an_event_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    log = Log(path=path)
    log.tell("step", step=1, loss=2.0)
    with path.open("ab") as file:
        file.write('5\nnull\n[1]\n{}\n"event"\n{"event": "skipped", "key": "é'.encode()[:-1])
    log.tell("resumed", step=0)
    assert [event["event"] for event in read_journal(path)] == ["resumed"]


def test_numbers_are_named_by_their_split() -> None:
    assert scalars({"event": "step", "time": 5.0, "step": 3, "loss": 0.5}) == {"train/loss": 0.5}
    evaluation = {"event": "evaluation", "time": 5.0, "step": 3, "split": "validation", "best": True, "accuracy": 1}
    assert scalars(evaluation) == {"validation/accuracy": 1.0}
    trained = {name: value for name, value in evaluation.items() if name != "best"} | {"weights": "trained"}
    assert scalars(trained) == {"trained/validation/accuracy": 1.0}, "averaged weights are measured beside them"
    assert scalars(trained | {"split": "test", "kept": True}) == {"final/test/accuracy": 1.0}
    assert scalars({"event": "probe", "time": 5.0, "step": 3, "weights": "trained", "knn_1": 0.25}) == {
        "probe/knn_1": 0.25
    }
    assert scalars({"event": "checkpoint", "time": 5.0, "step": 3, "path": "step-3"}) == {}


def test_settings_that_do_not_fit(small: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"track='tensorbord': unknown program 'tensorbord'; .*tensorboard"):
        TrainConfig().override(track="tensorbord")
    for track in ("tensorboard,tensorboard", " , "):
        with pytest.raises(ConfigError, match=f"track='{track}' does not name different programs; .*tensorboard"):
            TrainConfig().override(track=track)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(ConfigError, match=r"install it with: pip install 'vitrail\[tensorboard\]'"):
        train(small(tmp_path / "run", track="tensorboard"))
    assert not (tmp_path / "run").exists()


def test_a_program_without_an_account_is_named_before_the_folder_is_made(
    small: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def login() -> None:
        raise OSError("No API key\n configured.")

    program: Any = ModuleType("wandb")
    program.login = login
    monkeypatch.setitem(sys.modules, "wandb", program)
    monkeypatch.setenv("WANDB_MODE", "online")
    with pytest.raises(ConfigError, match=r"track='wandb' failed: No API key configured\.; .*WANDB_MODE=offline"):
        train(small(tmp_path / "run", track="wandb"))
    assert not (tmp_path / "run").exists()
    monkeypatch.setenv("WANDB_MODE", "offline")
    check_trackers("wandb")


def journal_of(run: Path, names: tuple[str, ...]) -> dict[str, list[tuple[int, float]]]:
    """Return the steps and values of numbers in the journal, by the names that trackers receive."""
    found: dict[str, list[tuple[int, float]]] = {name: [] for name in names}
    for event in read_journal(run / "journal.jsonl"):
        for name, value in scalars(event).items():
            if name in found:
                found[name].append((event["step"], value))
    return found


NAMES = ("train/loss", "train/update_ratio", "validation/accuracy", "final/test/accuracy")


@pytest.fixture
def stopped_and_resumed(small: Make, tmp_path: Path) -> Callable[[str], Path]:
    """Runs 24 steps with a program, with a stop after nine of them."""

    def make(track: str) -> Path:
        run = train_until(small(tmp_path / "run", track=track, threads=0, seed=3), 9)
        resume(run)
        return run

    return make


@pytest.mark.slow
def test_tensorboard_reads_what_the_journal_has(stopped_and_resumed: Callable[[str], Path]) -> None:
    accumulator: Any = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run = stopped_and_resumed("tensorboard")
    events = accumulator.EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    for name, rows in journal_of(run, NAMES).items():
        assert rows and [(item.step, item.value) for item in events.Scalars(name)] == [
            (step, pytest.approx(value, rel=1e-6)) for step, value in rows
        ]
    assert "settings/text_summary" in events.Tags()["tensors"]


def test_tensorboard_hides_the_steps_that_a_run_forgot(tmp_path: Path) -> None:
    accumulator: Any = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    tracker = TensorBoard(tmp_path, {}, 0)
    for step in (0, 1, 2, 3):
        tracker.receive({"event": "step", "step": step, "time": 1.0, "loss": 1.0})
    tracker.receive({"event": "rolled back", "step": 1, "time": 2.0, "at": 4})
    for step in (2, 3, 4):
        tracker.receive({"event": "step", "step": step, "time": 3.0, "loss": 0.5})
    tracker.close()
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    found = [(item.step, item.value) for item in events.Scalars("train/loss")]
    assert found == [(0, 1.0), (1, 1.0), (2, 0.5), (3, 0.5), (4, 0.5)]


def histories(file: Path) -> Iterator[dict[str, float]]:
    """Yield the numbers of each step in a file of Weights & Biases: a log of LevelDB, in blocks of 32 KiB."""
    records: Any = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    content, place, record = file.read_bytes(), 7, b""
    while place + 7 <= len(content):
        left = 2**15 - place % 2**15
        _, size, kind = struct.unpack("<IHB", content[place : place + 7])
        if left < 7 or not kind:
            place += left
            continue
        record += content[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # a whole record, or the end of one
            found = records.Record.FromString(record)
            record = b""
            if found.WhichOneof("record_type") == "history":
                yield {
                    item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in found.history.item
                }


@pytest.mark.slow
def test_weights_and_biases_receives_what_the_journal_has(
    stopped_and_resumed: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    run = stopped_and_resumed("wandb")
    identity = (run / "wandb" / "run-id.txt").read_text()
    files = sorted((run / "wandb").glob(f"offline-run-*/run-{identity}.wandb"))
    assert len(files) == 2, "the stopped and the resumed part are one run"
    rows = [row for file in files for row in histories(file)]
    for name, expected in journal_of(run, NAMES).items():
        found = [(row["training_step"], row[name]) for row in rows if name in row]
        assert expected and found == [(step, pytest.approx(value)) for step, value in expected]
