"""`vitrail recipes`: every recipe and every fine-tuning run with its command and published result."""

from __future__ import annotations

import shlex

import pytest

from tests.cli.conftest import Cli
from vitrail.cli import main
from vitrail.cli.train import COMMAND
from vitrail.recipes import RECIPES
from vitrail.recipes.papers import TRANSFERS
from vitrail.training.config import TrainConfig
from vitrail.training.folder import differing_settings


@pytest.mark.slow
def test_recipes_are_listed_with_published_results(cli: Cli) -> None:
    text = cli.shows("recipes")
    assert all(f"{name} " in text for name in RECIPES)
    assert "2205.01580, Table 1, on ImageNet's validation split" in text and "76.5 %" in text


def test_transfers_are_listed_with_their_commands(cli: Cli) -> None:
    lines = cli.shows("recipes", "--transfers").splitlines()
    assert all(f"            {row.command}" in lines for row in TRANSFERS)


@pytest.mark.slow
def test_a_recipe_is_shown_with_its_settings(cli: Cli) -> None:
    """The printed words are options: they make the recipe out of the defaults."""
    for name in ("plain-vit-s16-90", "demo", "vit-b16-i1k-mae"):
        out = cli.shows("recipes", name)
        lines = [shlex.split(line) for line in out.splitlines() if line.startswith("  --")]
        typed = COMMAND.parse([word for line in lines for word in line])
        recipe = RECIPES[name]()
        assert all(sentence in out for sentence in getattr(RECIPES[name], "differences", ()))
        made = TrainConfig().override(**{"task": recipe.task.name, "name": recipe.run.name, **typed})
        assert differing_settings([made, recipe]) == [{}, {}], name
    assert cli.json("recipes", "plain-vit-s16-90")["settings"]["warmup"] == "10000 steps"


@pytest.mark.parametrize("option", [[], ["--transfers"]])
def test_json_has_the_same(option: list[str], cli: Cli) -> None:
    rows = cli.json("recipes", *option)
    assert len(rows) == len(TRANSFERS if option else RECIPES)
    assert all(row["command"].startswith("vitrail ") and "result" in row for row in rows)


def test_a_papers_result_is_said_before_its_data_is_opened(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "plain-vit-s16-90", "--data", "nowhere"]) == 2
    said = capsys.readouterr()
    assert "published result: 76.5 % on ImageNet's validation split (2205.01580, Table 1)" in said.out
    assert "data 'nowhere' does not exist" in said.err
    assert "changed in this run: --data nowhere\n" in said.out
    assert main(["train", "plain-vit-s16-90", "--data", "nowhere", "--mixup", "0", "--warmup", "0.1"]) == 2
    changed = capsys.readouterr().out.splitlines()[1]
    assert "--mixup 0" in changed and "--warmup 0.1" in changed and "--preset" not in changed
