"""Tests of `vitrail runs` and `vitrail runs compare`."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from tests.make import make_idx_folder, tiny_config
from vitrail.cli import main
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


@pytest.mark.slow
def test_the_list_shows_what_differs(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs"]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines()[:7])) <= 80
    assert len(re.findall(r"\d\d-\d\d \d\d:\d\d\n", text)) == 2, "minutes are not cut off"
    assert len(re.findall(r"\d% on \d+ ", text)) == 4, "every accuracy has its number of images"
    assert "b-trials" not in text and "1 trial not shown (--trials)" in text
    assert "test accuracy" in text and text.count("finished") == 2
    assert "damaged: runs/damaged/run.json has format 99" in text and "unreadable" in text
    assert "[b]: --learning-rate 0.5, --steps 1" in text or "long-name-of-a-run: --learning-rate" in text

    assert main(["runs", "--trials", "--json", "--sort", "metric"]) == 0
    printed = capsys.readouterr()
    rows = json.loads(printed.out)
    assert "not shown" not in printed.err
    assert sorted(row["run"] for row in rows) == [
        "runs/[b]", "runs/b-trials/learning-rate-0.5-30", "runs/damaged", "runs/long-name-of-a-run",
    ]  # fmt: skip
    values = [row["metrics"].get("validation_accuracy", -1) for row in rows]
    assert values == sorted(values, reverse=True) and values[0] >= 0
    assert main(["runs", "--sort", "time"]) == 0
    shown = capsys.readouterr().out
    assert shown.index("[b]") < shown.index("long-name")


@pytest.mark.parametrize("folder", ["my-trials/vit-16", "my/checkpoints", "model"])
def test_runs_with_names_like_those_of_parts_are_listed(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / folder).mkdir(parents=True)
    (tmp_path / folder / "run.json").write_text("{}")
    assert main(["runs", str(tmp_path), "--json"]) == 0
    assert [row["run"] for row in json.loads(capsys.readouterr().out)] == [str(tmp_path / folder)]


def test_trials_that_are_left_out_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("learning-rate-0.5-30", "LoRA-of-rank-8,-learning-rate-0.1-30"):
        (tmp_path / "b-trials" / name).mkdir(parents=True)
        (tmp_path / "b-trials" / name / "run.json").write_text("{}")
    assert main(["runs", str(tmp_path)]) == 0
    assert "2 trials not shown (--trials)" in capsys.readouterr().out
    assert main(["runs", str(tmp_path), "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out) == [] and "2 trials not shown" in printed.err


@pytest.mark.slow
def test_long_names_and_numbers_leave_every_number_whole(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In 80 columns, with a split that was measured on other images than the rest."""
    long = runs / "a-name-of-a-run-that-is-longer-than-half-of-the-line" / "and-continues-in-another-folder"
    long.mkdir(parents=True)
    (long / "run.json").write_bytes((runs / "[b]/run.json").read_bytes())
    events = [
        {"event": "started", "time": 1.7e9, "step": 0, "steps": 123_456_789},
        {"event": "evaluation", "time": 1.7e9, "step": 98_765_432, "split": "validation", "accuracy": 0.8124,
         "images": 54321.0, "best": True},
    ]  # fmt: skip
    (long / "journal.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    assert main(["runs"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if not re.match(r"\S+: ", line)]
    assert max(map(len, lines)) <= 80
    text = " ".join(lines)
    for number in ("98,765,432", "123,456,789", "81.24%", "54,321"):
        assert re.search(rf"(?<!\S){number}(?!\S)", text), number
    assert len(re.findall(r" \d\d-\d\d \d\d:\d\d(?: |$)", text)) == 3, "minutes are shown for each journal"
    assert "…" not in text


def test_a_comparison_has_a_column_for_each_run(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = ["runs/long-name-of-a-run", "runs/[b]"]
    assert main(["runs", "compare", *folders]) == 0
    text = capsys.readouterr().out
    assert "--learning-rate" in text and "0.5" in text and "2 of 2" in text and "--width" not in text
    recorded = json.loads((runs / "[b]/run.json").read_text())["data"]
    for split in ("validation", "test"):
        (counts,) = (line.split()[2:] for line in text.splitlines() if line.startswith(f"{split} images"))
        assert counts == [str(recorded[split])] * 2
    assert main(["runs", "compare", *folders, "--json"]) == 0
    first, second = json.loads(capsys.readouterr().out)
    assert second["settings"] == {"learning_rate": 0.5, "steps": 1} and first["settings"]["steps"] == 2


def test_curves_of_runs_are_drawn_in_the_same_charts(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders, page = ["runs/long-name-of-a-run", "runs/[b]"], tmp_path / "new" / "curves.html"
    assert main(["runs", "compare", *folders, "--page", str(page)]) == 0
    text = page.read_text(encoding="utf-8")
    names = re.findall("<h2>(.*?)</h2>", text)
    assert names == [
        "Validation accuracy", "Validation cross entropy", "Training loss", "Learning rate", "Norm of the gradients",
        "Relative update of the weights", "Images per second",
    ]  # fmt: skip
    for section in text.split("<section>")[1:]:
        assert all(section.count(f"<title>{folder}</title>") == 1 for folder in folders), "a line for each run"
    (loss,) = (event for event in read_journal(Path("runs/[b]/journal.jsonl")) if event["event"] == "step")
    assert f"runs/[b]: 1, {loss['loss']:.4g}" in text
    capsys.readouterr()
    assert main(["runs", "compare", *folders, "--page", str(page)]) == 2
    assert "curves.html exists already" in capsys.readouterr().err
