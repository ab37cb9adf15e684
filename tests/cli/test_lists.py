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
def test_lists_parameters_and_cost(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(vitrail.cli.lists, "total_memory", lambda: 20_000_000_000)
    small, usual = cli.shows("models", "--image-size", "64", "96"), cli.shows("models")
    (line,) = (line for line in small.splitlines() if line.split()[:1] == ["ViT-B/16"])
    assert line.split()[2:4] == ["64x96", "25"]
    lines = {line.split()[0]: line.split()[1:] for line in usual.splitlines() if "/" in line or "BiT" in line}
    assert set(PUBLISHED) <= set(lines)
    assert lines["ViT-B/16"][:-1] == ["768/12/3072/12", "224", "197", "86,567,656", "17.56"]
    assert lines["R50+ViT-B/16"][:-1] == ["768/12/3072/12", "224", "197", "98,659,112", "21.54"]
    assert lines["BiT-R50x1"][:-1] == ["3-4-6-3", "224", "49", "25,549,352", "4.09"]
    assert lines["ViT-e/14"][:-1] == ["1792/56/15360/16", "224", "257", "3,807,214,312", "990.7"]
    assert lines["ViT-e/14"][-1].endswith("*") and not lines["ViT-B/16"][-1].endswith("*"), "more memory than there is"
    (line,) = (line for line in cli.shows("models", "--batch-size", "40960").splitlines() if "ViT-e/14" in line)
    assert line.endswith("k*"), "thousands of gigabytes"
    assert lines["ViT-Pico/7"][1] == "28" and lines["ViT-Nano/8"][1] == "64" and lines["Conv+ViT-Pico/8"][1] == "32"


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
    by_name = {row["name"]: row for row in rows}
    assert by_name["ViT-B/16"]["shape"] == "768/12/3072/12" and by_name["BiT-R152x4"]["shape"] == "3-8-36-3"
    assert by_name["ViT-Pico/7"]["image_size"] == [28, 28] and by_name["BiT-R50x1"]["tokens"] == 49
    assert by_name["ViT-S/16"]["parameters"] == (30_075_219 if given else 22_050_664)


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
    lines = cli.shows("models", "--layers").splitlines()
    assert lines[0].strip() == "Mixing 197 tokens of width 768, as in ViT-B/16"
    line, of_pixels = (line for line in lines if "recurrence" in line)
    assert line.split() == ["recurrence", "0.116", "197", "197"]
    assert of_pixels.split() == ["recurrence", "of", "pixels", "29.595", "50176", "50176"]


@pytest.mark.slow
def test_layers_measured(cli: Cli) -> None:
    rows = cli.json("models", "--layers", "--measure", "--image-size", "32", "32")
    assert all(row["seconds"] > 0 for row in rows) and rows[0]["computed_tokens"] == 5
    lines = cli.shows("models", "--layers", "--measure", "--image-size", "32", "32").splitlines()
    (headings,) = (line.split() for line in lines if "GFLOP/s" in line)
    assert headings == ["layer", "GMAC", "steps", "path", "ms", "GFLOP/s"]
    assert not any("*" in line for line in lines if "attention" in line), "all tokens were computed"


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


@pytest.mark.parametrize("option", [[], ["--transfers"]])
def test_recipes_as_json_are_the_same(option: list[str], cli: Cli) -> None:
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
