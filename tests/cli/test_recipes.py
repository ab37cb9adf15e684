"""`vitrail recipes`: every recipe and every fine-tuning run with its command and published result."""

from __future__ import annotations

import json

import pytest

from vitrail.cli import main
from vitrail.recipes import RECIPES
from vitrail.recipes.transfers import TRANSFERS


def test_recipes_are_listed_with_published_results(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes"]) == 0
    text = capsys.readouterr().out
    assert all(f"{name} " in text for name in RECIPES)
    assert "2205.01580, Table 1, on ImageNet's validation split" in text and "76.5 %" in text


def test_transfers_are_listed_with_their_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", "--transfers"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(f"            {row.command}" in lines for row in TRANSFERS)


@pytest.mark.parametrize("option", [[], ["--transfers"]])
def test_json_has_the_same(option: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", "--json", *option]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert len(rows) == len(TRANSFERS if option else RECIPES)
    assert all(row["command"].startswith("vitrail ") and "result" in row for row in rows)


def test_a_papers_result_is_said_before_its_data_is_opened(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "plain-vit-s16-90", "--data", "nowhere"]) == 2
    said = capsys.readouterr()
    assert "published result: 76.5 % on ImageNet's validation split (2205.01580, Table 1)" in said.out
    assert "data 'nowhere' does not exist" in said.err
