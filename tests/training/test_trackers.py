"""Tests of the programs that show the metrics of a run during training."""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.listening import Display
from vitrail.errors import ConfigError, Stopped
from vitrail.training.config import TrainConfig
from vitrail.training.log import Log, read_journal, scalars
from vitrail.training.run import resume, train


def test_numbers_are_named_by_their_split() -> None:
    assert scalars({"event": "step", "time": 5.0, "step": 3, "loss": 0.5}) == {"train/loss": 0.5}
    evaluation = {"event": "evaluation", "time": 5.0, "step": 3, "split": "validation", "best": True, "accuracy": 1}
    assert scalars(evaluation) == {"validation/accuracy": 1.0}
    assert scalars(evaluation | {"split": "test", "kept": True}) == {"final/test/accuracy": 1.0}
    assert scalars({"event": "probe", "time": 5.0, "step": 3, "weights": "trained", "knn_1": 0.25}) == {
        "probe/knn_1": 0.25
    }
    assert scalars({"event": "checkpoint", "time": 5.0, "step": 3, "path": "step-3"}) == {}


def test_settings_that_do_not_fit(
    small: Callable[..., TrainConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"track='tensorbord': unknown program 'tensorbord'; .*tensorboard"):
        TrainConfig().override(track="tensorbord")
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(ConfigError, match=r"install it with: pip install 'vitrail\[tensorboard\]'"):
        train(small(tmp_path / "run", track="tensorboard"))
    assert not (tmp_path / "run").exists()


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
def stopped_and_resumed(
    small: Callable[..., TrainConfig], tmp_path: Path, stop_at: Callable[[int], Display]
) -> Callable[[str], Path]:
    """Runs 24 steps with a program, with a stop after nine of them."""

    def make(track: str) -> Path:
        run = tmp_path / "run"
        with pytest.raises(Stopped):
            train(small(run, track=track, threads=0, seed=3), log=Log(stop_at(9)))
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
