"""Tests of `vitrail evaluate` for models of boxes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Cli
from tests.make import OBJECT_NAMES, coco_data, dense_model
from vitrail.data.objects import Objects
from vitrail.data.sources import open_data
from vitrail.evaluation.metrics.average_precision import average_precision
from vitrail.weights.load import load


def test_boxes_have_a_table_and_json_with_notes_of_the_data(tmp_path: Path, cli: Cli) -> None:
    data, model = coco_data(tmp_path / "data", [5, 17, 90]), dense_model(tmp_path / "model", "pyramid")
    file = data / "test" / "_annotations.coco.json"
    values = json.loads(file.read_text())
    values["annotations"][0]["bbox"] = [20, 3, 30, 9]  # reaches beyond the image
    file.write_text(json.dumps(values))
    captured = cli.call("evaluate", model, "--data", data, "--json")
    (row,) = json.loads(captured.out).values()
    test = open_data(str(data), validation_share=0.0).test
    assert test is not None and "reaches beyond the image" in captured.err
    found = load(model).predict([data / test.key(index) for index in range(len(test))])
    truths = [test.target(index) for index in range(len(test))]
    assert all(isinstance(one, Objects) for one in truths)
    expected = average_precision(truths, found, len(OBJECT_NAMES))
    assert row["average_precision"] == pytest.approx(expected.precision.value)
    assert row["average_precision_50_low"] == pytest.approx(expected.precision_50.low)
    assert row["average_precision_small"] == pytest.approx(expected.by_size["small"])
    named = dict(zip(OBJECT_NAMES, expected.by_class, strict=True))
    assert {name: row.get(f"{name}:average_precision") for name in OBJECT_NAMES} == pytest.approx(named)
    shown = cli.shows("evaluate", model, "--data", data)
    assert "AP50" in shown and "AP of small objects" in shown and f"{OBJECT_NAMES[0]}: AP" in shown
    assert "held out" not in cli.call("evaluate", model, "--data", data, "--split", "test").err, (
        "no validation split is cut for the test split"
    )
