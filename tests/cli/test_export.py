"""Tests of `vitrail export`, and of exported files in other verbs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vitrail.cli import main
from vitrail.training.execution import RunResult


def test_an_exported_run_predicts_and_is_measured_like_the_run(
    trained: RunResult, fewer_bundled: None, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert main(["export", str(trained.folder), "--to", "pt2", "--images", "20", "--json"]) == 0
    written = json.loads(capsys.readouterr().out)
    assert written["written"] == "run.pt2" and written["bytes"] == Path("run.pt2").stat().st_size
    assert written["parity"]["agreement"] == 1.0 and written["parity"]["labelled"] == 20
    assert written["parity"]["accuracy"]["low"] <= written["parity"]["accuracy"]["value"]
    shown = []
    for model in (str(trained.folder), "run.pt2"):
        assert main(["predict", model, str(trained.examples[0].path), "--json"]) == 0
        shown.append(json.loads(capsys.readouterr().out))
        assert main(["evaluate", model, "--data", "bundled[:40]", "--json"]) == 0
        shown.append(json.loads(capsys.readouterr().out))
    assert shown[0]["probabilities"] == pytest.approx(shown[2]["probabilities"], abs=1e-4)
    assert main(["predict", "run.pt2", str(trained.examples[0].path), "--precision", "bf16"]) == 2
    assert "run.pt2 computes in its own number format; choose" in capsys.readouterr().err
    assert main(["embed", "run.pt2", "--data", "bundled[:40]", "--out", "f", "--precision", "float32"]) == 2
    assert "was exported with" in capsys.readouterr().err


def test_wrong_usage_is_said_before_the_model_is_loaded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    for words, message in (
        (["--to", "onxx"], "--to: 'onxx' is not a format; nearest: onnx"),
        (["--to", "pt2", "--out", str(tmp_path / "a.onnx")], "must end in '.pt2'"),
        (["--to", "pt2", "--images", "0"], "--images: 0 is less than 1"),
        (["--to", "pt2", "--out", str(tmp_path / "file" / "a.pt2")], "is not a folder"),
    ):
        assert main(["export", "missing", *words]) == 2
        assert message in capsys.readouterr().err
