"""Tests of the folders of runs: their names, run.json and what is read of it, the lock while a run is trained, and the
link to the page that looks inside the model."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from tests.several import server
from tests.training import ranks
from tests.training.jobs import AtStep, Finished, Make
from vitrail.analysis.pages.summaries import OVERVIEW_FILES
from vitrail.errors import RunError
from vitrail.recipes import RECIPES
from vitrail.tasks.regression import Regression
from vitrail.training.config import RESOLVED, TrainConfig
from vitrail.training.folder import (
    ENTRIES,
    FORMAT,
    INSIDE,
    LOCK,
    differing_settings,
    find_runs,
    inside_link,
    link_inside,
    locked,
    new_folder,
    notes_on_data,
    outdate_pages,
    read_record,
    run_of,
    settings_beside,
    summarise,
)
from vitrail.training.log import Log
from vitrail.training.run import resume, train


def test_names_come_from_the_recipe_or_the_data_and_are_numbered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    demo, folder = RECIPES["demo"](), RECIPES["folder"]()
    assert [new_folder(demo) for _ in range(3)] == [Path("runs/demo"), Path("runs/demo-2"), Path("runs/demo-3")]
    assert new_folder(folder.override(data="/images/My flowers!/")) == Path("runs/My-flowers")
    assert new_folder(folder.override(data="/")) == Path("runs/run")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert new_folder(demo.override(run="~/mine")) == tmp_path / "mine"


@pytest.mark.parametrize("left", [(LOCK,), (LOCK, ".run.json.vitrail-partial")])
def test_a_folder_in_which_no_run_was_recorded_is_new(left: tuple[str, ...], tmp_path: Path) -> None:
    for name in left:
        (tmp_path / name).touch()
    config = RECIPES["demo"]().override(run=str(tmp_path))
    assert new_folder(config) == tmp_path
    (tmp_path / "mine.txt").touch()
    with pytest.raises(RunError, match=r"exists; choose another --run$"):
        new_folder(config)
    (tmp_path / "mine.txt").unlink()
    with locked(tmp_path), pytest.raises(RunError, match="exists; choose another --run"):
        new_folder(config)


def test_an_overwritten_run_that_is_deleted_only_in_part_is_still_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(path: Path) -> None:
        raise KeyboardInterrupt

    for name in (f"{INSIDE}/a.svg", "model/model.json", "run.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    config = RECIPES["demo"]().override(run=str(tmp_path), overwrite=True)
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr("shutil.rmtree", killed)
        new_folder(config)
    assert (tmp_path / "run.json").is_file()
    assert list(new_folder(config).iterdir()) == []


LINK = '<p id="inside"><a href="inside/report.html">Look inside the model</a>: '


def test_the_link_is_there_while_the_page_is_newer_than_the_model(tmp_path: Path) -> None:
    page, model, report = (tmp_path / name for name in ("inside/report.html", "model/model.json", "report.html"))
    for path in (page, model):
        path.parent.mkdir()
    assert inside_link(tmp_path) == '<p id="inside"></p>'
    link_inside(tmp_path)
    assert not report.exists(), "without a report there is nothing to link from"
    report.write_text('<p>1</p><p id="inside"></p><p>2</p>', encoding="utf-8")
    model.touch()
    page.touch()
    link_inside(tmp_path)
    text = report.read_text(encoding="utf-8")
    assert text.startswith(f"<p>1</p>{LINK}") and text.endswith("</p><p>2</p>") and inside_link(tmp_path) in text
    os.utime(model, (page.stat().st_atime, page.stat().st_mtime + 1))
    link_inside(tmp_path)
    assert report.read_text(encoding="utf-8") == '<p>1</p><p id="inside"></p><p>2</p>', "the page is of older weights"


def test_pages_on_an_earlier_model_stay_old_if_the_clock_goes_back(tmp_path: Path) -> None:
    page, model = tmp_path / "inside/report.html", tmp_path / "model/model.json"
    for path in (page, model):
        path.parent.mkdir()
        path.touch()
    outdate_pages(tmp_path)
    os.utime(model, (1e9, 1e9))
    assert inside_link(tmp_path) == '<p id="inside"></p>'


def test_a_run_may_hold_the_files_of_its_page() -> None:
    assert {INSIDE, *(f"{INSIDE}/{name}" for name in OVERVIEW_FILES)} <= set(ENTRIES)


def test_the_run_of_a_model(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "model").mkdir(parents=True)
    (run / "examples").mkdir()
    assert run_of(run) is None and run_of(run / "model") is None
    (run / "run.json").touch()
    assert run_of(run) == run_of(run / "model") == run
    assert run_of(run / "examples") is None and run_of(Path("google/vit")) is None


def written(folder: Path, **fields: Any) -> Path:
    """Return a run's folder with a small run.json of the newest format. Fields of None are missing."""
    values = {
        "format": FORMAT, "config": TrainConfig().to_plain(),
        "data": {"fingerprint": "abc", "train": 7, "classes": []}, **fields
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


OTHER = "is damaged, or of another version of Vitrail:"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"format": 3}, "has format 3, written by a newer version of Vitrail; this version reads formats up to 2"),
        ({"format": 1}, "has format 1, which no release of Vitrail wrote; train the run again"),
        ({"format": None}, "is damaged: the field 'format' is missing"),
        ({"format": "two"}, "is damaged: format='two' is not a whole number above 0"),
        ({"format": 0}, "is damaged: format=0 is not a whole number above 0"),
        ({"config": None}, "is damaged: the field 'config' is missing"),
        ({"data": None}, "is damaged: the field 'data' is missing"),
        ({"data": {"train": 7}}, "is damaged: the field 'data.fingerprint' is missing"),
        ({"data": {"fingerprint": "a"}}, "is damaged: the field 'data.train' is missing"),
        ({"data": [1]}, "is damaged: 'data' is not an object of named fields"),
        ({"config": {"run": {"stepz": 3}}}, f"{OTHER} unknown field 'stepz'; nearest: steps"),
        ({"config": {"task": {"name": "clasification"}}}, f"{OTHER} unknown task 'clasification'; nearest: class"),
        ({"config": {"run": {"batch_size": 0}}}, f"{OTHER} batch_size=0 is less than 1"),
    ],
)
def test_what_cannot_be_read_is_named(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(RunError) as caught:
        read_record(written(tmp_path, **fields))
    assert str(caught.value).startswith(f"{tmp_path / 'run.json'} {message}")


@pytest.mark.parametrize(
    ("text", "message"), [("[1, 2]", "it must be an object of named fields, not"), ("{", "is damaged: ")]
)
def test_a_file_that_is_no_record_is_named(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(RunError, match=message):
        read_record(tmp_path)
    (tmp_path / "run.json").unlink()
    with pytest.raises(RunError, match=r"is not the folder of a run: it has no run\.json"):
        read_record(tmp_path)


def rewritten(run: Path, journal: list[dict[str, object]], place: Path) -> Path:
    """Return a copy of a run with other events."""
    place.mkdir()
    (place / "run.json").write_bytes((run / "run.json").read_bytes())
    (place / "journal.jsonl").write_text("".join(json.dumps(event) + "\n" for event in journal))
    return place


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
    for name in ("a", "deep/er/b", "deep/er/than/c", "a/model", "a/x", ".hidden/d", "checkpoints/e", "model"):
        (tmp_path / name).mkdir(parents=True, exist_ok=True)
        (tmp_path / name / "run.json").touch()
    found = [str(path.relative_to(tmp_path)) for path in find_runs(tmp_path)]
    assert found == ["a", "checkpoints/e", "deep/er/b", "model"]
    assert list(find_runs(tmp_path / "a")) == [tmp_path / "a"]
    assert list(find_runs(tmp_path, depth=0)) == list(find_runs(tmp_path / "nowhere")) == []


def test_the_search_for_runs_asks_the_system_about_no_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "photos").mkdir()
    for place in ("photos/1.jpg", "photos/2.jpg", "run.json"):
        (tmp_path / place).touch()
    (tmp_path / "photos/link").symlink_to(tmp_path)
    asked: list[Path] = []
    is_dir = Path.is_dir
    monkeypatch.setattr(Path, "is_dir", lambda path: asked.append(path) or is_dir(path))
    link = tmp_path / "photos/link"
    assert list(find_runs(tmp_path / "photos")) == asked == [link]


def test_values_of_presets_and_variants_are_compared(tiny: Make) -> None:
    """A setting that repeats the value of the preset or of the variant is no difference."""
    usual = tiny(steps=3, variant="ViT-Pico/8", preset="light2")
    same = usual.override(mixup=usual.augment.settings.mixup, depth=usual.in_effect("depth"), optimizer="adamw")
    assert differing_settings([usual, usual, same])[2] == {}
    other = usual.override(mixup=0.0, depth=1, optimizer="muon")
    assert differing_settings([usual, usual, other])[2] == {
        "mixup": 0.0, "mixup_per": None, "depth": 1, "optimizer": "muon", "momentum": 0.95
    }  # fmt: skip
    lamb = settings_beside([usual.override(optimizer="lamb", momentum=0.5, warmup=0.0, warmup_from_zero=True)])[0]
    assert lamb["momentum"] is lamb["warmup_from_zero"] is None and lamb["beta1"] == 0.9
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


@pytest.mark.slow
def test_a_run_is_neither_resumed_nor_replaced_while_it_trains(small: Make, tmp_path: Path) -> None:
    run, refused = tmp_path / "run", []

    def others() -> None:
        for attempt in (lambda: resume(run), lambda: train(small(run, overwrite=True))):
            with pytest.raises(RunError, match=rf"^run {run} is in use: process {os.getpid()} trains it") as caught:
                attempt()
            refused.append(caught)

    result = train(small(run, steps=4), log=Log(AtStep(1, others)))
    assert len(refused) == 2 and result.summary["steps"] == 4
    assert not (run / LOCK).exists()
    train(small(run, steps=2, overwrite=True))
