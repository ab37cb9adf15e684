"""Tests of runs that are made longer after their end."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.listening import Display
from tests.training.curves import events_of, steps_of
from tests.training.jobs import Make, Outcome, StopAt, train_until
from vitrail.errors import ConfigError, RunError, Stopped
from vitrail.training.folder import read_record
from vitrail.training.log import Log
from vitrail.training.run import finished, resume, train

FEW = {"evaluations": 2, "checkpoints": 1}


def rates(run: Path) -> dict[int, float]:
    return {event["step"]: event["learning_rate"] for event in events_of(run)}


@pytest.mark.slow
def test_with_a_constant_rate_the_longer_run_is_bitwise_that_of_the_whole_length(
    small: Make, outcome: Outcome, tmp_path: Path
) -> None:
    fields = {"schedule": "constant", "warmup": 0.0, "keep": "last", "average": 0.9, **FEW}
    train(small(tmp_path / "whole", steps=31, **fields))
    train(small(tmp_path / "longer", steps=17, **fields))
    result = resume(tmp_path / "longer", changes={"steps": 31})
    whole, longer = outcome(tmp_path / "whole"), outcome(tmp_path / "longer")
    assert longer["tensors"] == whole["tensors"] and longer["model"] == whole["model"]
    assert longer["steps"] == whole["steps"] and longer["values"]["random"] == whole["values"]["random"]
    assert result.summary["steps"] == 31 and result.bundle.provenance["steps"] == 31


@pytest.mark.slow
def test_the_rate_is_that_of_a_run_of_the_whole_length(small: Make, tmp_path: Path) -> None:
    train(small(tmp_path / "whole", steps=40, **FEW))
    train(small(tmp_path / "longer", steps=20, **FEW))
    before = rates(tmp_path / "longer")
    resume(tmp_path / "longer", changes={"epochs": 4.0})  # 10 steps each
    whole, longer = rates(tmp_path / "whole"), rates(tmp_path / "longer")
    assert all(longer[step] == before[step] for step in range(1, 21))
    assert all(longer[step] == whole[step] for step in range(21, 41))
    assert longer[20] < longer[21], "the cosine had fallen to its end, and rises again"


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "rises"), [("cosine", True), ("constant", False)])
def test_a_rate_that_rises_again_is_noted(small: Make, tmp_path: Path, schedule: str, *, rises: bool) -> None:
    train(small(tmp_path / "run", steps=4, schedule=schedule, warmup=0.0, **FEW))
    shown = Display()
    resume(tmp_path / "run", changes={"steps": 8}, log=Log(shown))
    found = rates(tmp_path / "run")
    assert (found[5] > found[4]) is rises
    assert [f"{found[5]:.3g}" in note for note in shown.notes if "learning rate" in note] == [True] * rises


@pytest.mark.slow
def test_the_record_and_the_journal_tell_of_the_extension(small: Make, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(small(run, steps=8, **FEW))
    shown = Display()
    resume(run, changes={"steps": 12}, log=Log(shown))
    assert "continuing after step 8 of 12" in shown.said
    resume(run, changes={"epochs": 1.5})
    record = json.loads((run / "run.json").read_text(encoding="utf-8"))
    assert record["steps"] == 15 and record["extensions"] == [
        {"after": 8, "from": 8, "to": 12}, {"after": 12, "from": 12, "to": 15}
    ]  # fmt: skip
    config = read_record(run).config.run
    assert (config.steps, config.epochs) == (None, 1.5)
    resumed = [(event["step"], event["steps"], event["extends"]) for event in events_of(run, "resumed")]
    assert resumed == [(8, 12, 8), (12, 15, 12)] and steps_of(run, "finished") == [15]
    result = finished(run)
    assert result is not None and result.summary["steps"] == 15
    with pytest.raises(RunError, match=r"is complete.* it has done all of its 15 steps"):
        resume(run)


@pytest.mark.slow
def test_a_stopped_run_can_be_made_longer_and_stopped_again(small: Make, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train_until(small(run, **FEW), 9)
    with pytest.raises(Stopped, match="stopped at step 20 of 30"):
        resume(run, changes={"steps": 30}, log=Log(StopAt(20)))
    assert finished(run) is None
    assert resume(run).summary["steps"] == 30


@pytest.mark.slow
def test_a_length_that_is_not_larger_is_refused(small: Make, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(small(run, steps=12))
    before = sorted((path, path.stat().st_mtime_ns) for path in run.rglob("*"))
    with pytest.raises(RunError, match="it has done all of its 12 steps"):
        resume(run)
    for length, steps in (({"steps": 12}, 12), ({"epochs": 1.0}, 10)):
        with pytest.raises(RunError, match=rf"has 12 steps \(1.2 epochs\), and {steps} steps are not more"):
            resume(run, changes=length)
    with pytest.raises(ConfigError, match=r"epochs=-1.0 is not above 0"):
        resume(run, changes={"epochs": -1.0})
    with pytest.raises(ConfigError, match=r"epochs=3.0 and steps=9: a run is extended to .*; give one of them"):
        resume(run, changes={"epochs": 3.0, "steps": 9})
    assert sorted((path, path.stat().st_mtime_ns) for path in run.rglob("*")) == before


@pytest.mark.slow
def test_without_the_checkpoint_of_the_end_the_way_out_is_named(small: Make, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(small(run, steps=12))
    shutil.rmtree(run / "checkpoints" / "step-12")
    with pytest.raises(RunError, match=r"checkpoint of its end, .*/step-12, is gone; .* new run with --init .*/model"):
        resume(run, changes={"steps": 20})
