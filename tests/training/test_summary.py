"""Tests of the summaries of runs, from the files in their folders."""

from __future__ import annotations

import json
from pathlib import Path

from tests.training.jobs import Finished, Make
from vitrail.settings import bare_names
from vitrail.training.folder import (
    differing_settings,
    find_runs,
    locked,
    notes_on_data,
    settings_beside,
    settings_of,
    summarise,
)


def rewritten(run: Path, journal: list[dict[str, object]], place: Path) -> Path:
    """Return a copy of a run with other events."""
    place.mkdir()
    (place / "run.json").write_bytes((run / "run.json").read_bytes())
    (place / "journal.jsonl").write_text("".join(json.dumps(event) + "\n" for event in journal))
    return place


def test_a_finished_run(finished: Finished) -> None:
    found = summarise(finished.result.folder)
    assert (found.state, found.step, found.steps, found.problem) == ("finished", 24, 24, "")
    assert found.metrics is not None and 0 <= found.metrics["validation_accuracy"] <= 1
    assert found.started is not None and found.changed is not None and found.started <= found.changed
    assert found.texts("validation") == [f"accuracy {found.metrics['validation_accuracy']:.2%}"]
    assert found.texts("nowhere") == []


BEGUN = {"event": "started", "time": 10.0, "step": 0, "steps": 7}
BETTER = {"event": "evaluation", "time": 11.0, "step": 2, "split": "validation", "best": True, "accuracy": 0.75}
WORSE = BETTER | {"time": 12.0, "step": 4, "best": False, "accuracy": 0.5}


def test_the_best_evaluation_and_the_last_event_count(finished: Finished, tmp_path: Path) -> None:
    found = summarise(rewritten(finished.result.folder, [BEGUN, BETTER, WORSE], tmp_path / "cut"))
    assert (found.state, found.step, found.steps, found.changed) == ("interrupted", 4, 7, 12.0)
    assert found.texts("validation") == ["accuracy 75.00%"] and found.texts("test") == []
    stopped = {"event": "stopped", "time": 13.0, "step": 4}
    assert summarise(rewritten(finished.result.folder, [BEGUN, stopped], tmp_path / "stopped")).state == "stopped"
    failed = {"event": "failed", "time": 13.0, "step": 4, "reason": "the loss is nan"}
    found = summarise(rewritten(finished.result.folder, [BEGUN, failed], tmp_path / "failed"))
    assert (found.state, found.problem) == ("failed", "the loss is nan")
    with locked(tmp_path / "cut"):
        assert summarise(tmp_path / "cut").state == "training"
    assert summarise(rewritten(finished.result.folder, [], tmp_path / "empty")).started is None


def test_what_cannot_be_read_is_said(finished: Finished, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{")
    found = summarise(tmp_path)
    assert found.state == "unreadable" and "run.json is damaged" in found.problem and found.texts("test") == []


def test_runs_are_found_in_folders_but_not_in_runs(tmp_path: Path) -> None:
    for name in ("a", "deep/er/b", "deep/er/than/c", "a/model", "a/x", ".hidden/d", "checkpoints/e"):
        (tmp_path / name).mkdir(parents=True, exist_ok=True)
        (tmp_path / name / "run.json").touch()
    assert [str(path.relative_to(tmp_path)) for path in find_runs(tmp_path)] == ["a", "deep/er/b"]
    assert list(find_runs(tmp_path / "a")) == [tmp_path / "a"]
    assert list(find_runs(tmp_path, depth=0)) == list(find_runs(tmp_path / "nowhere")) == []


def test_every_section_of_a_config_can_differ(tiny: Make) -> None:
    usual = tiny(steps=3)
    settings = settings_of(usual)
    for section in (usual.early, usual.faults):
        assert bare_names(type(section)).keys() <= settings.keys()
    changed = usual.override(on_non_finite="skip", max_faults=7)
    assert differing_settings([usual, usual, changed])[2] == {"on_non_finite": "skip", "max_faults": 7}


def test_values_of_presets_and_variants_are_compared(tiny: Make) -> None:
    """A setting that repeats the value of the preset or of the variant is no difference."""
    usual = tiny(steps=3, variant="ViT-Pico/8", preset="light2")
    same = usual.override(mixup=usual.augment.settings.mixup, depth=usual.in_effect("depth"), optimizer="adamw")
    assert differing_settings([usual, usual, same])[2] == {}
    other = usual.override(mixup=0.0, depth=1, optimizer="muon")
    assert differing_settings([usual, usual, other])[2] == {
        "mixup": 0.0, "depth": 1, "optimizer": "muon", "momentum": 0.95
    }  # fmt: skip
    assert settings_beside([usual, other])[0]["mixup"] == 0.2 and settings_beside([usual, other])[0]["depth"] == 2
    longer = usual.override(steps=None, epochs=2.0)
    assert differing_settings([usual, longer])[1] == {"epochs": 2.0, "steps": None}


def test_runs_on_data_that_changed_are_named(tiny: Make, finished: Finished, tmp_path: Path) -> None:
    other = rewritten(finished.result.folder, [BEGUN, BETTER], tmp_path / "other")
    assert list(notes_on_data([summarise(finished.result.folder), summarise(other)])) == []
    record = json.loads((other / "run.json").read_text())
    record["data"]["fingerprint"] = "0" * 64
    (other / "run.json").write_text(json.dumps(record))
    (note,) = notes_on_data([summarise(finished.result.folder), summarise(other)])
    assert "other" in note and finished.result.folder.name in note and "not comparable" in note


def test_only_settings_unlike_the_others_are_returned(tiny: Make) -> None:
    usual = tiny(steps=3)
    others = usual.override(learning_rate=0.5), usual.override(threads=1, device="cpu", name="x", flip=True)
    flipped = differing_settings([usual, *others])
    assert flipped[0] == {} and flipped[1] == {"learning_rate": 0.5}
    assert flipped[2] == ({} if usual.augment.flip else {"flip": True})
    assert settings_of(usual)["task"] == "classification" and "threads" not in settings_of(usual)
    assert differing_settings([]) == []
