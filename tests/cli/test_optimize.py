"""Tests of `vitrail optimize`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.make import make_bundle, make_colour_folder
from vitrail.cli import main
from vitrail.experiments import faster as search_module
from vitrail.weights.exported import ExportedNetwork, Interface
from vitrail.weights.load import load


@pytest.fixture(autouse=True)
def seconds_of_flops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time is the closed form of FLOPs, so that the result does not depend on the machine."""
    monkeypatch.setattr(
        search_module, "_seconds", lambda models, batch: [one.network.config.inference_flops() / 1e9 for one in models]
    )


@pytest.mark.slow
@pytest.mark.usefixtures("fewer_bundled")
def test_a_faster_model_is_written_and_used(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    out = tmp_path / "fast"
    words = ["optimize", str(model), "--data", "bundled", "--keep", "0.7", "--images", "40", "--out", str(out)]
    assert main([*words, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["written"] == str(out) and result["trials"][0]["result"] == "start"
    taken = [trial for trial in result["trials"] if trial["result"] == "taken"]
    fast = load(out)
    record = fast.provenance["optimized"]
    assert record["after"] == taken[-1] and record["before"] == result["trials"][0]
    assert (record["keep"], record["images"], record["data"]) == (0.7, 40, "bundled")
    assert fast.metrics == {"validation_accuracy": taken[-1]["accuracy"]}
    assert fast.network.config.inference_flops() == taken[-1]["flops"] < result["trials"][0]["flops"]
    assert list(fast.network.config.image_size) == taken[-1]["image_size"]
    assert main(words) == 2  # nothing is overwritten
    assert "--overwrite" in capsys.readouterr().err
    assert main([*words, "--overwrite"]) == 0
    shown = capsys.readouterr().out
    assert "the model" in shown and "times as fast at" in shown and f"Written: {out}" in shown
    table = shown[shown.index(" height x") : shown.index("times as fast at")].splitlines()[:-1]
    assert max(map(len, table)) <= 80 and "…" not in shown
    for trial in result["trials"]:
        assert any(f" {trial['accuracy']:.1%} " in line for line in table), "accuracies are not cut off"
    assert main(["evaluate", str(out), "--data", "bundled", "--json"]) == 0  # the same held-out images are known
    assert json.loads(capsys.readouterr().out)["test"]["images"] == 300


def test_an_exported_file_is_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = make_bundle(num_classes=3)
    network: Any = ExportedNetwork(plain.network.config, plain.preprocess, Interface(), lambda _: {}, "a.onnx", "0")
    exported = replace(plain, network=network)
    monkeypatch.setattr("vitrail.weights.load.load", lambda *_, **__: exported)
    monkeypatch.setattr("vitrail.cli.inside.load", lambda *_, **__: exported)
    for words in (["optimize", "a.onnx", "--data", "bundled"], ["explain", "a.onnx", str(tmp_path)]):
        (tmp_path / "a.png").touch()
        assert main([*words, "--device", "cpu"]) == 2
        assert "a.onnx is an exported model" in capsys.readouterr().err


@pytest.mark.slow
def test_a_model_without_a_head_gets_a_linear_one(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = make_colour_folder(tmp_path / "colours")
    headless, out = tmp_path / "headless", tmp_path / "fast"
    assert main(["convert", str(model), str(headless), "--to", "vitrail", "--num-classes", "0"]) == 0
    capsys.readouterr()
    assert main(["optimize", str(headless), "--data", str(data), "--keep", "0.5", "--out", str(out)]) == 0
    assert "the model has no head, so it got a linear head from" in capsys.readouterr().out
    assert load(out).classes == ("blue", "green", "red")
