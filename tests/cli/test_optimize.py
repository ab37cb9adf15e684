"""Tests of `vitrail optimize`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Cli
from tests.make import make_bundle, make_colour_folder
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
    model: Path, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    out = tmp_path / "fast"
    words = ["optimize", str(model), "--data", "bundled", "--keep", "0.7", "--images", "40", "--out", str(out)]
    result = cli.json(*words)
    assert result["written"] == str(out) and result["trials"][0]["result"] == "start"
    taken = [trial for trial in result["trials"] if trial["result"] == "taken"]
    fast = load(out)
    record = fast.provenance["optimized"]
    assert record["after"] == taken[-1] and record["before"] == result["trials"][0] and record["keep"] == 0.7
    assert fast.metrics == {"validation_accuracy": taken[-1]["accuracy"]}
    assert fast.network.config.inference_flops() == taken[-1]["flops"] < result["trials"][0]["flops"]
    assert list(fast.network.config.image_size) == taken[-1]["image_size"]
    assert "--overwrite" in cli.refuses(*words)
    shown = cli.shows(*words, "--overwrite")
    assert f"Written: {out}" in shown and all(f" {trial['accuracy']:.1%} " in shown for trial in result["trials"])
    assert cli.json("evaluate", out, "--data", "bundled")["test"]["images"] == 300


def test_an_exported_file_is_refused_by_name(tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = make_bundle(num_classes=3)
    network: Any = ExportedNetwork(plain.network.config, plain.preprocess, Interface(), lambda _: {}, "a.onnx", "0")
    exported = replace(plain, network=network)
    monkeypatch.setattr("vitrail.weights.load.load", lambda *_, **__: exported)
    monkeypatch.setattr("vitrail.cli.inside.load", lambda *_, **__: exported)
    for words in (["optimize", "a.onnx", "--data", "bundled"], ["explain", "a.onnx", str(tmp_path)]):
        (tmp_path / "a.png").touch()
        assert "a.onnx is an exported model" in cli.refuses(*words, "--device", "cpu")


@pytest.mark.slow
def test_a_model_without_a_head_gets_a_linear_one(model: Path, tmp_path: Path, cli: Cli) -> None:
    data = make_colour_folder(tmp_path / "colours")
    headless, out = tmp_path / "headless", tmp_path / "fast"
    cli.call("convert", model, headless, "--to", "vitrail", "--num-classes", "0")
    shown = cli.shows("optimize", headless, "--data", data, "--keep", "0.5", "--out", out)
    assert "the model has no head, so it got a linear head from" in shown
    assert load(out).classes == ("blue", "green", "red")
