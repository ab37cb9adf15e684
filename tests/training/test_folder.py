"""Tests of the folders of runs, and of the link from a run's report to the page that looks inside its model."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from vitrail.analysis.pages.summaries import OVERVIEW_FILES
from vitrail.errors import RunError
from vitrail.recipes import RECIPES
from vitrail.training.folder import ENTRIES, INSIDE, LOCK, inside_link, link_inside, locked, new_folder, run_of


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
