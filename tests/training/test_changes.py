"""Tests of the settings that a resumed run may change, and of runs that are made longer after their end."""

from __future__ import annotations

import inspect
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.listening import Display
from tests.training.jobs import Make, Outcome, StopAt, events_of, steps_of, train_until
from vitrail.errors import ConfigError, RunError, Stopped
from vitrail.training.folder import read_record
from vitrail.training.log import Log
from vitrail.training.run import changed_config, finished, resume, train

RUN = Path("runs/photos")


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


def test_changes_that_are_no_settings_with_values_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"^changes=\['steps'\] is not a mapping of settings"):
        inspect.unwrap(resume)(RUN, changes=["steps"])  # without the tests' own check of types
    with pytest.raises(ConfigError, match=r"^epochs=2.0 and steps=3: a run is extended to .* give one of them"):
        resume(RUN, changes={"steps": 3, "epochs": 2.0})


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
    train_until(run, 15, changes={"precision": "bf16"}, allow="precision")
    assert read_record(run).config.run.precision == "bf16"
    train_until(run, 18, changes={"max_time": "1s"})  # without the option, the run goes on as it was
    record = read_record(run).config.run
    assert (record.precision, record.max_time) == ("bf16", None)
    assert resume(run).summary["steps"] == 24


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
@pytest.mark.parametrize(("fields", "notes"), [({}, 0), ({"early_image_size": ("14:0.5",)}, 1)], ids=str)
def test_early_settings_that_end_later_are_noted(
    fields: dict[str, Any], notes: int, small: Make, tmp_path: Path
) -> None:
    train(small(tmp_path / "run", steps=4, schedule="constant", warmup=0.0, **fields, **FEW))
    resume(tmp_path / "run", changes={"steps": 6}, log=Log(shown := Display()))
    assert len(shown.notes) == notes


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
    assert sorted((path, path.stat().st_mtime_ns) for path in run.rglob("*")) == before


@pytest.mark.slow
def test_without_the_checkpoint_of_the_end_the_way_out_is_named(small: Make, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(small(run, steps=12))
    shutil.rmtree(run / "checkpoints" / "step-12")
    with pytest.raises(RunError, match=r"checkpoint of its end, .*/step-12, is gone; .* new run with --init .*/model"):
        resume(run, changes={"steps": 20})
