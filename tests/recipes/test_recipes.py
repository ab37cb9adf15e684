"""Tests that every recipe has a description and trains."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.tasks.books import make_tokenizer
from vitrail.recipes import PAPER_RECIPES, RECIPES
from vitrail.training.config import RESOLVED, TrainConfig
from vitrail.training.log import read_journal
from vitrail.training.run import train
from vitrail.weights.load import load

COMMANDS = {
    **{name: f"vitrail train {name}" for name in RECIPES if name not in PAPER_RECIPES},
    "demo": "vitrail train",
    "folder": "vitrail train folder --data DIR",
    "pairs": "vitrail train pairs --data TABLE",
}


@pytest.mark.parametrize("name", COMMANDS)
def test_the_docstring_states_the_command_and_the_names_agree(name: str) -> None:
    text = inspect.getdoc(RECIPES[name]) or ""
    assert f"Command: `{COMMANDS[name]}`" in text
    assert RECIPES[name].__name__ == name.replace("-", "_")
    assert RECIPES[name]().run.name in (name, "")
    assert RECIPES[name]() == RECIPES[name](), "a recipe is the same every time"


def test_no_recipe_has_probabilities_of_views_that_it_lacks() -> None:
    for name, recipe in RECIPES.items():
        config = recipe()
        local = config.task.local_views_of(config.images, config.augment, config.run.seed)
        views = config.task.views + (0 if local is None else local.count)
        assert max(len(config.augment.blur), len(config.augment.solarise)) <= views, name


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_the_network_is_built_and_takes_two_steps(
    name: str, tiny: Callable[..., TrainConfig], colour_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = {"folder": str(colour_folder), "scenes": "scenes:24", "pairs": "scenes:24"}
    data = others[name] if name in others else tiny().data.spec
    if name == "beit":
        monkeypatch.chdir(tmp_path)
        make_tokenizer(size=(28, 28), channels=1, variant="ViT-Pico/4").save(Path("runs/vqvae/model"))
    config = RECIPES[name]().override(
        data=data, run=str(tmp_path / "recipe"), steps=2, batch_size=6, device="cpu", threads=2, evaluations=1,
        checkpoints=1,
    )  # fmt: skip
    result = train(config)
    events = read_journal(result.folder / "journal.jsonl")
    assert [event["step"] for event in events if event["event"] == "step"] == [1, 2]
    network = load(result.folder).network
    assert network.config == config.model.resolve(
        num_classes=len(result.bundle.classes), image_size=config.images.image_size, channels=config.images.channels
    )
    assert all(torch.isfinite(tensor).all() for tensor in network.state_dict().values())
    if result.bundle.classes:
        assert network.head is not None and network.head.weight.abs().sum() > 0, "the head began at 0"
    else:
        assert network.head is None
    record = json.loads((result.folder / "run.json").read_text(encoding="utf-8"))
    recorded = TrainConfig.from_plain(record["config"])
    assert recorded.run.precision in ("bf16", "float32"), "what auto stood for, so that resuming elsewhere keeps it"
    assert recorded.override(**{name: getattr(config.run, name) for name in RESOLVED}) == config
