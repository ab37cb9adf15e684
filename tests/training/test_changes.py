"""Tests of the settings that a resumed run may change."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.training.curves import events_of
from tests.training.jobs import Make, Outcome, StopAt, train_until
from vitrail.errors import ConfigError, RunError, Stopped
from vitrail.training.config import ALLOWED, ON_RESUME, TrainConfig
from vitrail.training.folder import read_record
from vitrail.training.log import Log
from vitrail.training.run import changed_config, resume

RUN = Path("runs/photos")


def test_every_name_is_a_setting() -> None:
    assert ALLOWED.keys() < ON_RESUME.keys() <= TrainConfig().settings().keys()


def test_a_free_setting_and_an_equal_one_need_no_leave(small: Make) -> None:
    config = small(RUN)
    changed, differences = changed_config(RUN, config, {"threads": 0, "precision": "float32", "track": ""})
    assert changed == config.override(threads=0) and differences == {"threads": (2, 0)}


def test_each_difference_is_named(small: Make) -> None:
    config = small(RUN, data="photos")
    wanted = {"precision": "bf16", "data": "moved", "seed": 3, "threads": 1, "accumulation": 2}
    with pytest.raises(ConfigError) as caught:
        changed_config(RUN, config, wanted, ("accumulation",))
    seed, precision, data = str(caught.value).split("\n")
    assert seed.startswith("seed=3 cannot change, because run runs/photos keeps the settings that it began with")
    assert precision.startswith("precision='bf16' differs from 'float32', with which run runs/photos began")
    assert data.startswith("data='moved' differs from 'photos', with which run runs/photos began")
    assert all(line.endswith("--allow accumulation,precision,data") for line in (precision, data))
    del wanted["seed"]
    changed, differences = changed_config(RUN, config, wanted, ("accumulation", "precision", "data"))
    assert changed == config.override(precision="bf16", data="moved", threads=1, accumulation=2)
    assert differences["data"] == ("photos", "moved") and len(differences) == 4


@pytest.mark.parametrize(
    ("name", "advice"), [("precison", "nearest: precision"), ("seed", "choices: data, accumulation")]
)
def test_names_that_cannot_be_allowed(name: str, advice: str, small: Make) -> None:
    with pytest.raises(ConfigError, match=f"^allow='{name}' is not a setting that may change; {advice}"):
        changed_config(RUN, small(RUN), {}, (name,))


@pytest.mark.slow
def test_moved_data_changes_no_bit(small: Make, straight: dict[str, Any], outcome: Outcome, tmp_path: Path) -> None:
    run, moved = tmp_path / "run", tmp_path / "moved"
    config = small(run)
    shutil.copytree(config.data.spec, tmp_path / "first")
    train_until(config.override(data=str(tmp_path / "first")), 11)
    (tmp_path / "first").rename(moved)
    with pytest.raises(ConfigError, match="accept the change with --allow data"):
        resume(run, changes={"data": str(moved)})
    labels = next(moved.glob("train-labels*"))
    content = labels.read_bytes()
    labels.write_bytes(content[:-1] + bytes([(content[-1] + 1) % 10]))
    with pytest.raises(RunError, match="has changed since the run began"):
        resume(run, changes={"data": str(moved)}, allow=("data",))
    assert read_record(run).config.data.spec == str(tmp_path / "first"), "a refused change is not recorded"
    labels.write_bytes(content)
    resume(run, changes={"data": str(moved), "threads": 0}, allow=("data",))
    assert outcome(run) == straight
    assert events_of(run, "resumed")[-1]["changes"] == {
        "data": [str(tmp_path / "first"), str(moved)],
        "threads": [2, 0],
    }


@pytest.mark.slow
def test_another_precision_goes_on_and_is_recorded(small: Make, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train_until(small(run), 11)
    with pytest.raises(Stopped):
        resume(run, changes={"precision": "bf16"}, allow=("precision",), log=Log(StopAt(15)))
    assert read_record(run).config.run.precision == "bf16"
    with pytest.raises(Stopped):  # without the option, the run goes on as it was
        resume(run, changes={"max_time": "1s"}, log=Log(StopAt(18)))
    record = read_record(run).config.run
    assert (record.precision, record.max_time) == ("bf16", None)
    assert resume(run).summary["steps"] == 24
