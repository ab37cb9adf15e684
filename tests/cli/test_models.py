"""`vitrail models`."""

from __future__ import annotations

import json

import pytest

from vitrail.cli import main


def test_lists_parameters_and_cost(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models"]) == 0
    shown = capsys.readouterr().out
    line = next(line for line in shown.splitlines() if "ViT-B/16" in line)
    assert line.split() == ["ViT-B/16", "768", "12", "12", "3072", "224x224", "197", "86,567,656", "17.56"]
    assert "ViT-Pico/7" in shown and "ViT-e/14" in shown


def test_another_size_is_rounded_to_the_patch(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "--image-size", "384", "380", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["ViT-B/16"]["image_size"] == [384, 384]
    assert rows["ViT-B/16"]["parameters"] == 86_859_496
