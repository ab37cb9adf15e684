"""Tests of run.json: its formats, missing fields, and damaged or newer files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.training.jobs import Finished
from vitrail.errors import RunError
from vitrail.tasks.regression import Regression
from vitrail.training.config import RESOLVED, TrainConfig
from vitrail.training.folder import FORMAT, read_record


def written(folder: Path, **fields: Any) -> Path:
    """Return a run's folder with a small run.json of the newest format. Fields of None are missing."""
    values = {
        "format": FORMAT, "config": TrainConfig().to_plain(), "data": {"fingerprint": "abc", "train": 7}, **fields
    }  # fmt: skip
    (folder / "run.json").write_text(json.dumps({name: one for name, one in values.items() if one is not None}))
    return folder


def test_a_run_writes_what_is_read(finished: Finished) -> None:
    folder = finished.result.folder
    values = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    record = read_record(folder)
    resolved = {name: getattr(record.config.run, name) for name in RESOLVED}
    assert values["format"] == FORMAT == 2 and values["config"]["task"]["name"] == "classification"
    assert record.config == finished.config.override(**resolved) and not {"auto", None} & {*resolved.values()}
    assert record.images == values["data"]["train"] == 200 and values["steps"] == 24
    assert values["machine"]["versions"].keys() >= {"vitrail", "torch"}
    assert (record.fingerprint, record.origin, record.objects) == (values["data"]["fingerprint"], None, ())


def test_missing_fields_of_a_section_take_their_defaults(tmp_path: Path) -> None:
    plain = TrainConfig().override(seed=5).to_plain()
    del plain["run"]["patience"], plain["optimizer"], plain["task"]["select"]
    assert read_record(written(tmp_path, config=plain)).config == TrainConfig().override(seed=5)


def test_the_task_is_read_by_its_name(tmp_path: Path) -> None:
    config = TrainConfig().override(task="regression", loss="huber", delta=2.0, numbers=("age", "größe"))
    record = read_record(written(tmp_path, config=config.to_plain(), objects=["data"]))
    assert record.config.task == Regression(loss="huber", delta=2.0) and record.config.data.numbers == ("age", "größe")
    assert record.objects == ("data",)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"format": 3}, "has format 3, but this version of Vitrail reads formats up to 2; install a newer version"),
        ({"format": 1}, "has format 1, which no release of Vitrail wrote; train the run again"),
        ({"format": None}, "is damaged: the field 'format' is missing"),
        ({"format": "two"}, "is damaged: format='two' is not a whole number above 0"),
        ({"format": 0}, "is damaged: format=0 is not a whole number above 0"),
        ({"config": None}, "is damaged: the field 'config' is missing"),
        ({"data": None}, "is damaged: the field 'data' is missing"),
        ({"data": {"train": 7}}, "is damaged: the field 'data.fingerprint' is missing"),
        ({"data": {"fingerprint": "a"}}, "is damaged: the field 'data.train' is missing"),
        ({"data": [1]}, "is damaged: 'data' is not an object of named fields"),
        ({"config": {"run": {"stepz": 3}}}, "is damaged: unknown field 'stepz'; nearest: steps"),
        ({"config": {"task": {"name": "clasification"}}}, "is damaged: unknown task 'clasification'; nearest: class"),
        ({"config": {"run": {"batch_size": 0}}}, "is damaged: batch_size=0 is less than 1"),
    ],
)
def test_what_cannot_be_read_is_named(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(RunError) as caught:
        read_record(written(tmp_path, **fields))
    assert str(caught.value).startswith(f"{tmp_path / 'run.json'} {message}")


@pytest.mark.parametrize(("text", "message"), [("[1, 2]", "it holds list, not an object"), ("{", "is damaged: ")])
def test_a_file_that_is_no_record_is_named(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(RunError, match=message):
        read_record(tmp_path)
    (tmp_path / "run.json").unlink()
    with pytest.raises(RunError, match=r"is not the folder of a run: it has no run\.json"):
        read_record(tmp_path)
