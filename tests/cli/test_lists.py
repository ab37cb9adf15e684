"""Tests of `vitrail models` and `vitrail recipes`: every recipe and every fine-tuning run with its published result."""

from __future__ import annotations

import shlex

import pytest

import vitrail.cli.lists
from tests.cli.conftest import Cli
from vitrail.cli import main
from vitrail.cli.run_options import check_effects
from vitrail.cli.train import COMMAND
from vitrail.models.cost import layer_costs, training_bytes
from vitrail.models.variants import PUBLISHED, variant_config
from vitrail.recipes import RECIPES
from vitrail.recipes.papers import TRANSFERS
from vitrail.training.config import TrainConfig
from vitrail.training.folder import differing_settings

FIELDS = ["name", "shape", "image_size", "tokens", "parameters", "macs", "training_flops", "training_bytes"]


@pytest.mark.slow
@pytest.mark.parametrize("columns", ["80", "50"])
def test_lists_parameters_and_cost(columns: str, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setattr(vitrail.cli.lists, "total_memory", lambda: 20_000_000_000)
    usual = cli.shows("models")
    lines = {line.split()[0]: line.split()[1:] for line in usual.splitlines() if "/" in line or "BiT" in line}
    assert set(PUBLISHED) <= set(lines)
    assert lines["ViT-B/16"][:-1] == ["768/12/3072/12", "224", "197", "86,567,656", "17.56"]
    assert lines["R50+ViT-B/16"][:-1] == ["768/12/3072/12", "224", "197", "98,659,112", "21.54"]
    assert lines["BiT-R50x1"][:-1] == ["3-4-6-3", "224", "49", "25,549,352", "4.09"]
    assert lines["ViT-e/14"][-1].endswith("*") and not lines["ViT-B/16"][-1].endswith("*"), "more memory than there is"


@pytest.mark.slow
@pytest.mark.parametrize("given", [{}, {"num_classes": 21843}])
def test_networks_as_json_have_exact_numbers(given: dict[str, int], cli: Cli) -> None:
    rows = cli.json("models", *(["--num-classes", "21843", "--batch-size", "2"] if given else []))
    assert [row["name"] for row in rows] == list(PUBLISHED)
    for row in rows:
        assert list(row) == FIELDS
        config = variant_config(row["name"], image_size=tuple(row["image_size"]), **given)
        assert row["parameters"] == config.parameters() and row["macs"] == config.macs()
        assert row["training_bytes"] == training_bytes(config, 2 if given else 32, precision="bf16")
        assert row["training_flops"] == config.training_flops()


@pytest.mark.slow
def test_another_size_is_rounded_to_the_patch(cli: Cli) -> None:
    rows = {row["name"]: row for row in cli.json("models", "--image-size", "384", "380")}
    assert rows["ViT-B/16"]["image_size"] == [384, 384]
    assert rows["ViT-B/16"]["parameters"] == 86_859_496
    assert rows["ViT-Pico/7"]["image_size"] == [385, 378]
    assert rows["R+ViT-Ti/16"]["image_size"] == [384, 384] and rows["R+ViT-Ti/16"]["tokens"] == 12 * 12 + 1
    assert rows["R50+ViT-B/16"]["tokens"] == 24 * 24 + 1
    assert rows["BiT-R50x1"]["image_size"] == [384, 380] and rows["BiT-R50x1"]["tokens"] == 12 * 12


def test_layers_compared(cli: Cli) -> None:
    rows = cli.json("models", "--layers", "--image-size", "380", "190")  # the nearest size is 384 x 192
    expected = [{**layer._asdict(), "tokens": 289, "width": 768} for layer in layer_costs(289, 768)]
    assert rows[:3] == expected and [row["kind"] for row in rows[:3]] == ["self-attention", "recurrence", "convolution"]
    macs = {row["kind"]: row["macs"] for row in rows}
    assert macs["self-attention of pixels"] == 2 * (384 * 192) ** 2 * 768
    assert macs["axial"] == 2 * (288 * (12 + 1) + 289) * 768  # a row has 12 patches, and all see the class token
    assert macs["linformer"] == 2 * (64 * 288 + 65 * 289) * 768
    assert macs["lsh"] == 2 * (289 + 2 * 288 * 64 + 288) * 768 + 2 * 288 * 5 * 768
    kinds = [row["kind"] for row in cli.json("models", "--layers", "--image-size", "64", "64")]
    assert "axial" in kinds and "local" not in kinds, "a window of 7 does not fit 4 x 4 patches"
    line, _ = (line for line in cli.shows("models", "--layers").splitlines() if "recurrence" in line)
    assert line.split() == ["recurrence", "0.116", "197", "197"]
    measured = cli.json("models", "--layers", "--measure", "--image-size", "32", "32")
    assert all(row["seconds"] > 0 for row in measured) and measured[0]["computed_tokens"] == 5


@pytest.mark.slow
def test_a_recipe_is_shown_with_its_settings(cli: Cli) -> None:
    """The printed words are options: they make the recipe out of the defaults."""
    for name in ("plain-vit-s16-90", "demo", "vit-b16-i1k-mae", "vit-s16-i1k-dino-300", "deit3-s16-i1k"):
        out = cli.shows("recipes", name)
        lines = [shlex.split(line) for line in out.splitlines() if line.startswith("  --")]
        typed = COMMAND.parse([word for line in lines for word in line])
        recipe = RECIPES[name]()
        check_effects(typed, recipe)
        assert all(sentence in out for sentence in getattr(RECIPES[name], "differences", ()))
        made = TrainConfig().override(**{"task": recipe.task.name, "name": recipe.run.name, **typed})
        assert differing_settings([made, recipe]) == [{}, {}], name
    assert cli.json("recipes", "plain-vit-s16-90")["settings"]["warmup"] == "10000 steps"


def test_recipes_and_transfers_are_listed_with_commands_and_published_results(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = cli.shows("recipes")
    assert (
        "…" not in text
        and all(f"{name} " in text for name in RECIPES)
        and "2205.01580, Table 1" in text
        and "76.5 %" in text
    )
    lines = cli.shows("recipes", "--transfers").splitlines()
    assert all(f"            {row.command}" in lines for row in TRANSFERS)
    for option, known in (([], RECIPES), (["--transfers"], TRANSFERS)):
        rows = cli.json("recipes", *option)
        assert len(rows) == len(known)
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
    assert main(["train", "vit-s16-i1k-dino-100", "--data", "nowhere", "--end-weight-decay", "none"]) == 2
    assert "--end-weight-decay None" in capsys.readouterr().out
