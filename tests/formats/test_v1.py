"""Tests that files of format 1 still load: bundles, runs and checkpoints of the code that knew no other format.

The files are never written again. The numbers in `expected.json` were also computed by that code.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import vitrail
from vitrail.errors import RunError
from vitrail.training.run import finished, resume
from vitrail.weights.bundle import Bundle

V1 = Path(__file__).parent / "v1"
EXPECTED = json.loads((V1 / "expected.json").read_text(encoding="utf-8"))
MODELS = sorted(EXPECTED["models"])
TOLERANCES = {"model-grey": 1e-3}
"""Tolerances that are not 1e-4. The code that computed the numbers of model-grey, whose images are padded, left a
border of one pixel black instead of filling it with `pad_value`."""


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Copy all files to a new working folder, because runs name their data by relative paths."""
    shutil.copytree(V1, tmp_path / "v1")
    monkeypatch.chdir(tmp_path / "v1")
    return tmp_path / "v1"


def check_numbers(bundle: Bundle, expected: dict[str, Any], tolerance: float) -> None:
    """Compare what the model computes for a few images with the stored numbers."""
    images = [V1 / name for name in EXPECTED["images"]]
    if "embed" in expected:
        torch.testing.assert_close(bundle.embed(images), torch.tensor(expected["embed"]), atol=tolerance, rtol=1e-4)
        return
    assert list(bundle.classes) == expected["classes"]
    for prediction, row in zip(bundle.predict(images), expected["probabilities"], strict=True):
        assert dict(prediction.ranking) == pytest.approx(dict(zip(bundle.classes, row, strict=True)), abs=tolerance)


@pytest.mark.parametrize("name", MODELS)
def test_bundles_predict_the_stored_numbers(name: str) -> None:
    check_numbers(vitrail.load(V1 / name, device="cpu"), EXPECTED["models"][name], TOLERANCES.get(name, 1e-4))


def test_bundles_keep_what_is_written_beside_the_weights() -> None:
    bundle = vitrail.load(V1 / "model-vit", device="cpu")
    assert bundle.classes == ("rose", "tulip", "黒い花")
    assert bundle.metrics == {"test_accuracy": 0.75}
    assert bundle.provenance == {"data": "data", "recipe": "folder", "seed": 3}
    assert bundle.preprocess.mean == (0.4, 0.5, 0.6) and bundle.preprocess.crop_share == 0.9
    assert vitrail.load(V1 / "model-grey", device="cpu").preprocess.pad_value == (7,)


@pytest.mark.parametrize("name", MODELS)
def test_bundles_can_be_saved_again(name: str, tmp_path: Path) -> None:
    again = vitrail.load(vitrail.load(V1 / name, device="cpu").save(tmp_path / "again"), device="cpu")
    check_numbers(again, EXPECTED["models"][name], TOLERANCES.get(name, 1e-4))


def test_a_finished_run_is_read(files: Path) -> None:
    expected = EXPECTED["runs"]["run-finished"]
    result = finished(files / "run-finished")
    assert result is not None and result.metrics == expected["metrics"] and result.summary["steps"] == 8
    check_numbers(vitrail.load(files / "run-finished", device="cpu"), expected, 1e-4)
    with pytest.raises(RunError, match="is complete"):
        resume(files / "run-finished")


@pytest.mark.parametrize("name", ["run-stopped", "run-from-model"])
@pytest.mark.parametrize("checkpoints", ["kept", "lost"])
def test_a_stopped_run_ends_as_it_would_have(name: str, checkpoints: str, files: Path) -> None:
    if checkpoints == "kept":
        shutil.rmtree(files / "model-vit")  # a run with a checkpoint does not need the model that it started from
    else:
        shutil.rmtree(files / name / "checkpoints")
    result = resume(files / name)
    events = [json.loads(line) for line in (files / name / "journal.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [event["step"] for event in events if event["event"] == "resumed"] == [3 if checkpoints == "kept" else 0]
    assert events[-1]["event"] == "finished" and events[-1]["step"] == 8
    check_numbers(result.bundle, EXPECTED["runs"][name], 2e-3)
