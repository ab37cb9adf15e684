"""Tests of `vitrail runs` and `vitrail runs compare`."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from tests.cli.conftest import Cli
from tests.make import make_idx_folder, tiny_config
from vitrail.cli.runs import write_overlay
from vitrail.tasks.task import TaskMetric
from vitrail.training.folder import find_runs
from vitrail.training.log import read_journal
from vitrail.training.run import train


@pytest.fixture(scope="module")
def trained_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two finished runs, of which one has more steps and is also the worse one."""
    folder = tmp_path_factory.mktemp("listed")
    data = make_idx_folder(folder / "data")
    for name, settings in (("long-name-of-a-run", {"steps": 2}), ("[b]", {"steps": 1, "learning_rate": 0.5})):
        train(tiny_config(data=data, run=folder / "runs" / name, **settings))
    return folder / "runs"


@pytest.fixture
def runs(trained_runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the two runs, an unreadable one, and a trial."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    shutil.copytree(trained_runs, "runs")
    trial = Path("runs/b-trials/learning-rate-0.5-30")
    trial.mkdir(parents=True)
    (trial / "run.json").write_bytes(Path("runs/[b]/run.json").read_bytes())
    (trial.parents[1] / "damaged").mkdir()
    (trial.parents[1] / "damaged/run.json").write_text('{"format": 99}')
    return tmp_path / "runs"


def test_the_axis_of_a_fraction_ends_at_1(tmp_path: Path) -> None:
    events = [{"event": "evaluation", "step": step, "best": False, "accuracy": 1.0} for step in (1, 2)]
    (tmp_path / "journal.jsonl").write_text("\n".join(map(json.dumps, events)))
    for is_fraction, beyond in ((True, ">110<"), (False, ">1.10<")):
        write_overlay(tmp_path / "page.html", [tmp_path], metrics=[TaskMetric("accuracy", is_fraction=is_fraction)])
        assert (beyond not in (tmp_path / "page.html").read_text()) == is_fraction


def test_a_line_has_the_averaged_weights_if_both_are_measured(tmp_path: Path) -> None:
    common = {"event": "evaluation", "split": "validation", "step": 3}
    events = [{**common, "weights": "trained", "accuracy": 0.25}, {**common, "best": True, "accuracy": 0.75}]
    (tmp_path / "journal.jsonl").write_text("\n".join(map(json.dumps, events)))
    write_overlay(tmp_path / "page.html", [tmp_path], metrics=[TaskMetric("accuracy", is_fraction=True)])
    assert re.findall(r": 3, ([.\d]+)<", (tmp_path / "page.html").read_text()) == ["75"]


def test_runs_that_are_too_deep_are_noted(tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b/c/d/e", "1/2/3/4/5/6/7"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "run.json").write_text('{"format": 99}')
    searched: list[Path] = []
    monkeypatch.setattr("vitrail.cli.runs.find_runs", lambda *given: searched.append(given[0]) or find_runs(*given))
    printed = cli.call("runs", str(tmp_path))
    assert searched == [tmp_path], "folders are searched once"
    assert "not listed: 1 run deeper" in printed.out + printed.err and "b/c/d/e" in printed.out + printed.err
    assert "not searched: 1 folder deeper" in printed.out + printed.err and "4/5/6/7" in printed.out + printed.err


@pytest.mark.slow
def test_the_list_shows_what_differs(runs: Path, cli: Cli) -> None:
    text = cli.shows("runs")
    assert len(re.findall(r"\d\d-\d\d \d\d:\d\d\n", text)) == 2, "minutes are not cut off"
    assert len(re.findall(r"\d% on \d+ ", text)) == 4, "every accuracy has its number of images"
    assert "b-trials" not in text and "1 trial not shown (--trials)" in text
    assert "test accuracy" in text and text.count("finished") == 2
    assert "damaged: runs/damaged/run.json has format 99" in text and "unreadable" in text
    assert "[b]: --learning-rate 0.5, --steps 1" in text or "long-name-of-a-run: --learning-rate" in text

    printed = cli.call("runs", "--trials", "--json", "--sort", "metric")
    rows = json.loads(printed.out)
    assert "not shown" not in printed.err
    assert sorted(row["run"] for row in rows) == [
        "runs/[b]", "runs/b-trials/learning-rate-0.5-30", "runs/damaged", "runs/long-name-of-a-run",
    ]  # fmt: skip
    values = [row["metrics"].get("validation_accuracy", -1) for row in rows]
    assert values == sorted(values, reverse=True) and values[0] >= 0
    shown = cli.shows("runs", "--sort", "time")
    assert shown.index("[b]") < shown.index("long-name")


@pytest.mark.parametrize("folder", ["my-trials/vit-16", "my/checkpoints", "model"])
def test_runs_with_names_like_those_of_parts_are_listed(folder: str, tmp_path: Path, cli: Cli) -> None:
    (tmp_path / folder).mkdir(parents=True)
    (tmp_path / folder / "run.json").write_text("{}")
    assert [row["run"] for row in cli.json("runs", tmp_path)] == [str(tmp_path / folder)]


def test_trials_that_are_left_out_are_counted(tmp_path: Path, cli: Cli) -> None:
    for name in ("learning-rate-0.5-30", "LoRA-of-rank-8,-learning-rate-0.1-30"):
        (tmp_path / "b-trials" / name).mkdir(parents=True)
        (tmp_path / "b-trials" / name / "run.json").write_text("{}")
    assert "2 trials not shown (--trials)" in cli.shows("runs", tmp_path)
    printed = cli.call("runs", tmp_path, "--json")
    assert json.loads(printed.out) == [] and "2 trials not shown" in printed.err


def test_a_comparison_has_a_column_for_each_run(runs: Path, cli: Cli) -> None:
    folders = ["runs/long-name-of-a-run", "runs/[b]"]
    text = cli.shows("runs", "compare", *folders)
    assert "--learning-rate" in text and "0.5" in text and "2 of 2" in text and "--width" not in text
    recorded = json.loads((runs / "[b]/run.json").read_text())["data"]
    for split in ("validation", "test"):
        (counts,) = (line.split()[2:] for line in text.splitlines() if line.startswith(f"{split} images"))
        assert counts == [str(recorded[split])] * 2
    first, second = cli.json("runs", "compare", *folders)
    assert second["settings"] == {"learning_rate": 0.5, "steps": 1} and first["settings"]["steps"] == 2


def test_curves_of_runs_are_drawn_in_the_same_charts(runs: Path, tmp_path: Path, cli: Cli) -> None:
    folders, page = ["runs/long-name-of-a-run", "runs/[b]"], tmp_path / "new" / "curves.html"
    cli.shows("runs", "compare", *folders, "--page", page)
    text = page.read_text(encoding="utf-8")
    assert {"Validation accuracy", "Training loss", "Learning rate"} <= {*re.findall("<h2>(.*?)</h2>", text)}
    for section in text.split("<section>")[1:]:
        assert all(section.count(f"<title>{folder}</title>") == 1 for folder in folders), "a line for each run"
    (loss,) = (event for event in read_journal(Path("runs/[b]/journal.jsonl")) if event["event"] == "step")
    assert f"runs/[b]: 1, {loss['loss']:.4g}" in text
    assert "curves.html exists already" in cli.refuses("runs", "compare", *folders, "--page", page)
